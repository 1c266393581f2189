"""The requests that a client may send to its job: bodies of JSON, checked before they are queued.

A request that is taken up can be served: the model has its token ids, its rows fit, its numbers are
finite. Otherwise one line says what is wrong (:class:`Refused`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from moetrain.config.rl import PolicyName, RlSection
from moetrain.config.sources import shortened
from moetrain.rl.rows import Sample
from moetrain.rollout.request import JsonBody, Request, SamplingParams

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
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

_Ints = Annotated[list[int], Field(fail_fast=True)]
_Floats = Annotated[list[float], Field(fail_fast=True)]
_Flags = Annotated[list[Annotated[int, Field(ge=0, le=1)]], Field(fail_fast=True)]


class Refused(ValueError):
    """A request is refused; the message is one line for the client."""

    def __init__(self, problem: str, status: int = 400) -> None:
        """``status`` is HTTP's: 404 where there is no such job, 429 where there is much to do."""
        super().__init__(problem)
        self.status = status


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

    def check_tokens(self, name: str, tokens: Sequence[int]) -> None:
        """Raise ValueError unless the model has all ``tokens``, at least one."""
        if not tokens:
            raise ValueError(f"{name} has no tokens")
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise ValueError(f"{name}: its tokens are not all of 0 to {self.vocab_size - 1}")

    def parse(self, kind: str, body: object) -> "_JobBody":
        """Parse and check the JSON value ``body`` of a request ``kind``; raises Refused."""
        if kind not in KINDS:
            raise Refused(f"{shortened(kind)} is not one of {', '.join(KINDS)}")
        try:
            request = KINDS[kind].model_validate(body)
            request.check(self)
        except ValueError as error:
            raise Refused(JsonBody.complaint(error)) from None
        return request


class _JobBody(JsonBody):
    changes: ClassVar[bool] = False
    """Whether it changes the job's state, and so is served again where that was lost."""

    def check(self, limits: Limits) -> None:
        """Raise ValueError if the request can never be served."""


class _Datum(JsonBody):
    """One text to train on, or to score."""

    tokens: _Ints
    mask: _Flags | None = None
    """1: this token is trained; None: all but the first, which nothing predicts."""
    logprobs: _Floats | None = None
    """Log-probability of each token when it was sampled; ignored where the mask is 0."""
    advantages: float | _Floats | None = None
    """One for all tokens, or one for each."""

    def check(self, name: str, limits: Limits) -> None:
        """Raise ValueError if no row holds the text, or fp32 one of its numbers."""
        limits.check_tokens(name, self.tokens)
        if len(self.tokens) > limits.longest_row + 1:
            raise ValueError(
                f"{name} has {len(self.tokens)} tokens, and a row of data.seq_len "
                f"{limits.longest_row} takes {limits.longest_row + 1}; shorten it"
            )
        for values in (self.logprobs, self.advantages):
            largest = np.max(np.abs(values or 0.0))
            if largest > _FP32_LARGEST:
                raise ValueError(f"{name}: {largest} is infinite in fp32")


class _Texts(_JobBody):
    """A request for a forward pass over texts."""

    data: list[_Datum] = Field(min_length=1, max_length=_MOST_TEXTS, fail_fast=True)

    def samples(self) -> list[Sample]:
        """Return :attr:`data` as :mod:`moetrain.rl` packs it; ValueError as there."""
        found = []
        for number, one in enumerate(self.data):
            mask = [0] + [1] * (len(one.tokens) - 1) if one.mask is None else one.mask
            advantage = 0.0 if one.advantages is None else one.advantages
            found.append(Sample.of(one.tokens, mask, advantage, number, one.logprobs))
        return found

    def check(self, limits: Limits) -> None:
        for i, datum in enumerate(self.data):
            datum.check(f"data[{i}]", limits)
        if not any(sample.is_action.any() for sample in self.samples()):
            raise ValueError("no token is learned: every mask is 0")


class ForwardBackward(_Texts):
    """A request to add the gradients of a loss to those of the step."""

    changes = True

    loss: Literal["cross_entropy"] | PolicyName = "cross_entropy"
    loss_settings: dict[str, Any] = Field(default={})
    """Settings of a policy's loss, by their names in ``rl``."""

    def policy(self) -> RlSection | None:
        """Return the settings of a policy's loss; None: cross-entropy. ValueError: they are bad."""
        if odd := sorted(set(self.loss_settings) - set(_LOSS_SETTINGS)):
            known = ", ".join(_LOSS_SETTINGS)
            raise ValueError(f"loss_settings: {shortened(odd[0])} is not one of {known}")
        if self.loss == "cross_entropy":
            if self.loss_settings:
                raise ValueError("loss_settings: cross_entropy has none; leave them out")
            return None
        values = {"ratio": "rollout", **self.loss_settings, "policy": self.loss}
        try:
            settings = RlSection.model_validate(values, strict=True)
            settings.check()
        except ValueError as error:  # pydantic's, or ConfigError
            raise ValueError(f"loss_settings: {JsonBody.complaint(error)}") from None
        if settings.ratio == "proximal":
            raise ValueError(
                "loss_settings: ratio 'proximal' is the trainer's own before the update; send "
                "these as logprobs (a forward request gives them) with ratio rollout"
            )
        return settings

    def check(self, limits: Limits) -> None:
        super().check(limits)
        policy = self.policy()
        for i, datum in enumerate(self.data):
            for key in ("advantages", "logprobs"):
                has = getattr(datum, key) is not None
                if policy is None and has:
                    raise ValueError(f"data[{i}] has {key}, of which cross_entropy has no use")
                is_needed = key == "advantages" or (policy and policy.ratio == "rollout")
                if policy and is_needed and not has:
                    raise ValueError(f"data[{i}] has no {key}, which loss {self.loss!r} needs")


class Forward(_Texts):
    """A request for the log-probability of every trained token; other tokens get 0."""

    temperature: float = Field(default=1.0, gt=0)


class OptimStep(_JobBody):
    """A request to update the adapter with the step's gradients."""

    changes = True

    lr: float = Field(gt=0, le=1e6)


class Sampling(_JobBody):
    """A request to continue prompts with the adapter as it is."""

    prompts: list[_Ints] = Field(min_length=1, fail_fast=True)
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Seed of the first prompt, and each further prompt has the next; None: it follows from the
    job's seed and the request's number."""
    n: int = 1
    stop_ids: _Ints = Field(default=[])
    logprobs: int = 0
    tempered: bool = False

    def requests(self, seed: int) -> list[Request]:
        """Return the generator's requests, one a prompt; ``seed`` is used if none was given."""
        given = self.model_dump(exclude={"seed", "prompts", "stop_ids"})
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
        completions = len(self.prompts) * self.n
        if completions > limits.max_completions:
            raise ValueError(
                f"{len(self.prompts)} prompts x n {shortened(self.n)} are more than "
                f"jobs.max_completions {limits.max_completions}; ask in parts"
            )
        self.requests(0)
        for i, prompt in enumerate(self.prompts):
            limits.check_tokens(f"prompts[{i}]", prompt)
            if len(prompt) + self.max_tokens > limits.longest_text:
                raise ValueError(
                    f"prompts[{i}]: {len(prompt)} tokens and max_tokens "
                    f"{shortened(self.max_tokens)} are more than the {limits.longest_text} that "
                    "one text may have"
                )
        if self.logprobs > limits.vocab_size:
            raise ValueError(f"logprobs {shortened(self.logprobs)} are more than there are tokens")
        if self.logprobs * self.max_tokens * completions > limits.max_logprobs:
            raise ValueError(
                f"logprobs {self.logprobs} of every token are more than an answer of "
                "jobs.max_request_mib holds; ask in parts"
            )


class Save(_JobBody):
    """A request to keep the job's state, adapter and moments, under a name."""

    name: str = Field(pattern=f"^{_NAME}$")

    @staticmethod
    def may_be_named(name: str) -> bool:
        return re.fullmatch(_NAME, name) is not None


class _Load(Save):
    """A request to go back to a save."""

    changes = True


KINDS: Mapping[str, type[_JobBody]] = {
    "forward_backward": ForwardBackward,
    "forward": Forward,
    "optim_step": OptimStep,
    "sample": Sampling,
    "save": Save,
    "load": _Load,
}
