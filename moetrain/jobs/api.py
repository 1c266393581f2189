"""What a client may ask of its job: bodies of JSON, checked whole before anything is queued.

A request that is taken up has been found possible: token ids that the model has, rows that fit,
numbers that are finite. What is wrong with one is said in one line (:class:`BadRequest`). A key
that nobody knows is an error, since who sends it expects it to do something.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field, ValidationError

from moetrain.config import ConfigError
from moetrain.config.rl import PolicyName, RlSection
from moetrain.config.sources import shortened
from moetrain.rl.rows import Sample
from moetrain.rollout.protocol import FIRST, JsonBody, complaint
from moetrain.rollout.request import Request, SamplingParams

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
"""Of a save: the name of a folder, which leads nowhere else."""
FP32_LARGEST = float(np.finfo(np.float32).max)
LOSS_SETTINGS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "ratio",
    "entropy_coef",
    "aggregation",
    "temperature",
    "max_tokens",
)
"""Those of ``rl`` that make sense of one request: it brings advantages, and no reference."""


MOST_TEXTS = 65_536
"""Of one request: each takes some hundred times the bytes of a short one's JSON."""


B = TypeVar("B", bound=JsonBody)
Ints = Annotated[list[int], FIRST]
Floats = Annotated[list[float], FIRST]
Flags = Annotated[list[Annotated[int, Field(ge=0, le=1)]], FIRST]


class BadRequest(ValueError):
    """A request is refused; the message is one line for the client."""


class Full(Exception):
    """The service has as much to do as it takes; the message is one line for the client."""


@dataclass(frozen=True)
class Limits:
    """What a service can serve."""

    vocab_size: int
    longest_row: int
    """Tokens of one sample of training, ..."""
    longest_text: int
    """... and of one of generation, prompt and completion."""
    max_completions: int
    max_logprobs: int
    """Likeliest tokens in one answer."""


class JobBody(JsonBody):
    """The body of a request."""

    changes: ClassVar[bool] = False
    """Whether it changes what a job has learned, and so is done again where that was lost."""

    def check(self, limits: Limits) -> None:
        """Raise BadRequest for what can never be served."""


class Datum(JsonBody):
    """One text to learn from, or to look at."""

    tokens: Ints
    mask: Flags | None = None
    """1: this token is learned; None: all but the first, which nothing predicts."""
    logprobs: Floats | None = None
    """Of each token when it was sampled; of those that are not learned any number."""
    advantages: float | Floats | None = None
    """Of all tokens, or of each."""

    def sample(self, number: int) -> Sample:
        """As :mod:`moetrain.rl` has it; ValueError as that raises it."""
        n = len(self.tokens)
        mask = [0] + [1] * (n - 1) if self.mask is None else self.mask
        advantage = 0.0 if self.advantages is None else self.advantages
        return Sample(
            np.array(self.tokens, np.int64),
            np.array(mask, bool),
            np.array([0.0] * n if self.logprobs is None else self.logprobs, np.float32),
            np.where(mask, 0, -1),
            np.array(advantage, np.float32) if isinstance(advantage, list) else advantage,
            number,
        )


class Texts(JobBody):
    """What a forward pass takes."""

    data: Annotated[list[Datum], FIRST] = Field(min_length=1, max_length=MOST_TEXTS)

    def samples(self) -> list[Sample]:
        """Of :attr:`data`."""
        return [datum.sample(number) for number, datum in enumerate(self.data)]

    def check(self, limits: Limits) -> None:
        for i, datum in enumerate(self.data):
            _check_tokens(f"data[{i}]", datum.tokens, limits)
            if len(datum.tokens) > limits.longest_row + 1:
                raise BadRequest(
                    f"data[{i}] has {len(datum.tokens)} tokens, and a row of data.seq_len "
                    f"{limits.longest_row} takes {limits.longest_row + 1}; shorten it"
                )
            for value in _floats(datum):
                if abs(value) > FP32_LARGEST:
                    raise BadRequest(f"data[{i}]: {value} is infinite in fp32")
        try:
            samples = self.samples()
        except ValueError as error:
            raise BadRequest(str(error)) from None
        if not any(sample.is_action.any() for sample in samples):
            raise BadRequest("no token is learned: every mask is 0")


class ForwardBackward(Texts):
    """Add the gradients of a loss to those of the step."""

    changes: ClassVar[bool] = True
    loss: Literal["cross_entropy"] | PolicyName = "cross_entropy"
    loss_settings: dict[str, Any] = Field(default={})
    """Of a policy's loss: some of ``rl``'s settings, by their names."""

    def policy(self) -> RlSection | None:
        """The settings of the policy's loss; None: cross-entropy.

        Raises:
            BadRequest: they are no settings, or contradict each other.
        """
        if odd := sorted(set(self.loss_settings) - set(LOSS_SETTINGS)):
            known = ", ".join(LOSS_SETTINGS)
            raise BadRequest(f"loss_settings: {shortened(odd[0])} is not one of {known}")
        if self.loss == "cross_entropy":
            if self.loss_settings:
                raise BadRequest("loss_settings: cross_entropy has none; leave them out")
            return None
        values = {"ratio": "rollout", **self.loss_settings, "policy": self.loss}
        try:
            settings = RlSection.model_validate(values, strict=True)
            settings.check()
        except (ValidationError, ConfigError) as error:
            told = complaint(error) if isinstance(error, ValidationError) else error
            raise BadRequest(f"loss_settings: {told}") from None
        if settings.ratio == "proximal":
            raise BadRequest(
                "loss_settings: ratio 'proximal' is the trainer's own before the update; send "
                "these as logprobs (a forward request gives them) with ratio rollout"
            )
        return settings

    def check(self, limits: Limits) -> None:
        super().check(limits)
        policy = self.policy()
        takes = {
            "advantages": policy is not None,
            "logprobs": policy is not None and policy.ratio == "rollout",
        }
        for i, datum in enumerate(self.data):
            for key, wanted in takes.items():
                has = getattr(datum, key) is not None
                if wanted and not has:
                    raise BadRequest(f"data[{i}] has no {key}, which loss {self.loss!r} needs")
                if has and policy is None:
                    raise BadRequest(f"data[{i}] has {key}, of which cross_entropy has no use")


class Forward(Texts):
    """The log-probability of every token that would be learned; of others 0."""

    temperature: float = Field(default=1.0, gt=0)


class OptimStep(JobBody):
    """Update the adapter by the step's gradients."""

    changes: ClassVar[bool] = True
    lr: float = Field(gt=0, le=1e6)


class Sampling(JobBody):
    """Continue prompts with the adapter as it is."""

    prompts: Annotated[list[Ints], FIRST] = Field(min_length=1)
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """Of the first prompt, each further one has the next; None: the job's seed and the request's
    number decide."""
    n: int = 1
    stop_ids: Ints = Field(default=[])
    logprobs: int = 0
    tempered: bool = False

    def requests(self, seed: int) -> list[Request]:
        """A generator's, one a prompt; ``seed``: where none was given. Each has its own."""
        own = {"seed", "prompts", "stop_ids"}
        given = {k: v for k, v in self.model_dump().items() if k not in own}
        first = seed if self.seed is None else self.seed
        return [
            Request(
                str(i),
                tuple(prompt),
                SamplingParams(**given, stop_ids=tuple(self.stop_ids), seed=(first + i) % 2**63),
            )
            for i, prompt in enumerate(self.prompts)
        ]

    def check(self, limits: Limits) -> None:
        if len(self.prompts) * self.n > limits.max_completions:
            raise BadRequest(
                f"{len(self.prompts)} prompts x n {shortened(self.n)} are more than "
                f"jobs.max_completions {limits.max_completions}; ask in parts"
            )
        try:
            self.requests(0)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise BadRequest(f"seed {shortened(self.seed)} is out of range")
        for i, prompt in enumerate(self.prompts):
            _check_tokens(f"prompts[{i}]", prompt, limits)
            if len(prompt) + self.max_tokens > limits.longest_text:
                raise BadRequest(
                    f"prompts[{i}]: {len(prompt)} tokens and max_tokens "
                    f"{shortened(self.max_tokens)} are more than the {limits.longest_text} that "
                    "one text may have"
                )
        if self.logprobs > limits.vocab_size:
            raise BadRequest(f"logprobs {shortened(self.logprobs)} are more than there are tokens")
        if self.logprobs * self.max_tokens * len(self.prompts) * self.n > limits.max_logprobs:
            raise BadRequest(
                f"logprobs {self.logprobs} of every token are more than an answer of "
                "jobs.max_request_mib holds; ask in parts"
            )


class Save(JobBody):
    """Keep the job as it is now, adapter and moments, under a name."""

    name: str = Field(pattern=f"^{NAME}$")


class Load(JobBody):
    """Go back to what was saved under a name."""

    changes: ClassVar[bool] = True
    name: str = Field(pattern=f"^{NAME}$")


class NewJob(JsonBody):
    """What a new job is made of."""

    id: str | None = None
    """None: the service chooses one."""
    seed: int = 0


class Nothing(JsonBody):
    """The body of a request that is all in its path."""


KINDS: Mapping[str, type[JobBody]] = {
    "forward_backward": ForwardBackward,
    "forward": Forward,
    "optim_step": OptimStep,
    "sample": Sampling,
    "save": Save,
    "load": Load,
}


def parse(kind: str, body: object, limits: Limits) -> JobBody:
    """The request ``kind`` with the JSON value ``body``; raises BadRequest."""
    if kind not in KINDS:
        raise BadRequest(f"{shortened(kind)} is not one of {', '.join(KINDS)}")
    request = validated(KINDS[kind], body)
    request.check(limits)
    return request


def validated(model: type[B], body: object) -> B:
    """``body`` as ``model`` has it; raises BadRequest."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise BadRequest(complaint(error)) from None


def _check_tokens(name: str, tokens: Sequence[int], limits: Limits) -> None:
    if not tokens:
        raise BadRequest(f"{name} has no tokens")
    if not 0 <= min(tokens) <= max(tokens) < limits.vocab_size:
        raise BadRequest(f"{name}: its tokens are not all of 0 to {limits.vocab_size - 1}")


def _floats(datum: Datum) -> Iterator[float]:
    yield from datum.logprobs or ()
    advantages = datum.advantages
    yield from advantages if isinstance(advantages, list) else [advantages or 0.0]


def finite(value: float) -> float | None:
    """``value`` for JSON, which has no infinities and no NaN."""
    return value if math.isfinite(value) else None
