"""The requests that a client may send to its job: bodies of JSON, checked before they are queued.

A request that is taken up can be served: the model has its token ids, its rows fit, its numbers are
finite. Otherwise one line says what is wrong (:class:`BadRequest`). An unknown key is an error,
since the client expects it to do something.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError

from moetrain.config import ConfigError
from moetrain.config.rl import PolicyName, RlSection
from moetrain.config.sources import shortened
from moetrain.rl.rows import Sample
from moetrain.rollout.protocol import FIRST, JsonBody, complaint
from moetrain.rollout.request import Request, SamplingParams

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
"""Pattern of a save's name, which names a folder and leads nowhere else."""
_FP32_LARGEST = float(np.finfo(np.float32).max)
_LOSS_SETTINGS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "ratio",
    "entropy_coef",
    "aggregation",
    "temperature",
    "max_tokens",
)
"""Settings of ``rl`` that a request may have: it brings advantages, and no reference."""
_MOST_TEXTS = 65_536
"""Texts of one request: each takes some hundred times the bytes of a short one's JSON."""

_Ints = Annotated[list[int], FIRST]
_Floats = Annotated[list[float], FIRST]
_Flags = Annotated[list[Annotated[int, Field(ge=0, le=1)]], FIRST]


class BadRequest(ValueError):
    """A request is refused; the message is one line for the client."""


class Full(Exception):
    """The service has as much to do as it takes; the message is one line for the client."""


@dataclass(frozen=True)
class Limits:
    """The largest requests that a service can serve."""

    vocab_size: int
    longest_row: int
    """Tokens of one training sample."""
    longest_text: int
    """Tokens of one generated sample, prompt and completion."""
    max_completions: int
    max_logprobs: int
    """Log-probabilities of likeliest tokens in one answer."""


class _Body(JsonBody):
    @classmethod
    def read(cls, body: object) -> Self:
        """Parse the JSON value ``body``; raises BadRequest."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise BadRequest(complaint(error)) from None


class NewJob(_Body):
    """The body that makes a new job."""

    id: str | None = None
    """None: the service draws one."""
    seed: int = 0


class Nothing(_Body):
    """The empty body of a request that is described by its path."""


class _JobBody(_Body):
    """The body of a request to a job."""

    def check(self, limits: Limits) -> None:
        """Raise BadRequest if the request can never be served."""


class Datum(JsonBody):
    """One text to train on, or to score."""

    tokens: _Ints
    mask: _Flags | None = None
    """1: this token is trained; None: all but the first, which nothing predicts."""
    logprobs: _Floats | None = None
    """Log-probability of each token when it was sampled; ignored where the mask is 0."""
    advantages: float | _Floats | None = None
    """One for all tokens, or one for each."""

    def sample(self, number: int) -> Sample:
        """Return the text as :mod:`moetrain.rl` packs it; ValueError as there."""
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


class _Texts(_JobBody):
    """A request for a forward pass over texts."""

    data: Annotated[list[Datum], FIRST] = Field(min_length=1, max_length=_MOST_TEXTS)

    def samples(self) -> list[Sample]:
        """Return :attr:`data` as samples."""
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
                if abs(value) > _FP32_LARGEST:
                    raise BadRequest(f"data[{i}]: {value} is infinite in fp32")
        try:
            samples = self.samples()
        except ValueError as error:
            raise BadRequest(str(error)) from None
        if not any(sample.is_action.any() for sample in samples):
            raise BadRequest("no token is learned: every mask is 0")


class ForwardBackward(_Texts):
    """A request to add the gradients of a loss to those of the step."""

    loss: Literal["cross_entropy"] | PolicyName = "cross_entropy"
    loss_settings: dict[str, Any] = Field(default={})
    """Settings of a policy's loss, by their names in ``rl``."""

    def policy(self) -> RlSection | None:
        """Return the settings of the policy's loss; None: the loss is cross-entropy.

        Raises:
            BadRequest: a setting is unknown or invalid, or two contradict each other.
        """
        if odd := sorted(set(self.loss_settings) - set(_LOSS_SETTINGS)):
            known = ", ".join(_LOSS_SETTINGS)
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


class Forward(_Texts):
    """A request for the log-probability of every trained token; other tokens get 0."""

    temperature: float = Field(default=1.0, gt=0)


class OptimStep(_JobBody):
    """A request to update the adapter with the step's gradients."""

    lr: float = Field(gt=0, le=1e6)


class Sampling(_JobBody):
    """A request to continue prompts with the adapter as it is."""

    prompts: Annotated[list[_Ints], FIRST] = Field(min_length=1)
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """Seed of the first prompt, and each further prompt has the next; None: it follows from the
    job's seed and the request's number."""
    n: int = 1
    stop_ids: _Ints = Field(default=[])
    logprobs: int = 0
    tempered: bool = False

    def requests(self, seed: int) -> list[Request]:
        """Return the generator's requests, one a prompt; ``seed`` is used if none was given."""
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


class Save(_JobBody):
    """A request to keep the job's state, adapter and moments, under a name."""

    name: str = Field(pattern=f"^{NAME}$")


class Load(Save):
    """A request to go back to a save."""


KINDS: Mapping[str, type[_JobBody]] = {
    "forward_backward": ForwardBackward,
    "forward": Forward,
    "optim_step": OptimStep,
    "sample": Sampling,
    "save": Save,
    "load": Load,
}
CHANGES = ("forward_backward", "optim_step", "load")
"""Kinds that change the job's state, and so are computed again where that was lost."""


def parse(kind: str, body: object, limits: Limits) -> _JobBody:
    """Parse and check the JSON value ``body`` of a request ``kind``; raises BadRequest."""
    if kind not in KINDS:
        raise BadRequest(f"{shortened(kind)} is not one of {', '.join(KINDS)}")
    request = KINDS[kind].read(body)
    request.check(limits)
    return request


def _check_tokens(name: str, tokens: Sequence[int], limits: Limits) -> None:
    if not tokens:
        raise BadRequest(f"{name} has no tokens")
    if not 0 <= min(tokens) <= max(tokens) < limits.vocab_size:
        raise BadRequest(f"{name}: its tokens are not all of 0 to {limits.vocab_size - 1}")


def _floats(datum: Datum) -> Iterator[float]:
    yield from datum.logprobs or ()
    advantages = datum.advantages
    yield from advantages if isinstance(advantages, list) else [advantages or 0.0]
