"""Requests to generate and their completions: token ids in, token ids out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from moetrain.config.sources import shortened
from moetrain.data.tokenizer import Tokenizer

_FinishReason = Literal["stop", "length", "abort"]


class RequestError(ValueError):
    """A request can never be served; the message says what to change."""

    def __init__(self, request_id: str, problem: str) -> None:
        super().__init__(f"request {request_id!r}: {problem}")
        self.request_id, self.problem = request_id, problem


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are sampled.

    Impossible values raise a ValueError that names them, numbers that are not integers a TypeError:
    in a step they would fail every request that is served beside them.

    The filters act one after the other on the probabilities at ``temperature``: ``top_k``, then
    ``top_p`` (the fewest tokens that have so much together, arXiv 1904.09751), then ``min_p`` (at
    least this share of the likeliest token's probability, arXiv 2407.01082).
    """

    max_tokens: int = 256
    temperature: float = 1.0
    """0: always the likeliest token."""
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """The same seed gives the same tokens, whatever is generated beside the request."""
    n: int = 1
    """Number of completions."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion, and are part of it."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, with the token that completes one."""
    logprobs: int = 0
    """How many of the likeliest tokens to report beside each chosen one."""
    routes: bool = False
    """Whether to report which experts each token was sent to."""
    prompt_logprobs: bool = False
    """Whether to report the log-probability of every token of the prompt but the first."""
    tempered: bool = False
    """Report log-probabilities at ``temperature``, as training at it needs; otherwise, and at
    temperature 0, they are those at 1. They ignore filters, so there must be none."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed", "n", "logprobs"):
            if not isinstance(getattr(self, name), int):
                raise TypeError(f"{name} {shortened(getattr(self, name))} is no whole number")
        good = {
            "max_tokens": self.max_tokens >= 1,
            # Integers may be larger than any float.
            "temperature": 0 <= self.temperature <= sys.float_info.max,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "seed": 0 <= self.seed < 2**63,
            "n": self.n >= 1,
            "stop_ids": all(isinstance(token, int) for token in self.stop_ids),
            # A lone string would be taken for its characters.
            "stop": not isinstance(self.stop, str)
            and all(text and isinstance(text, str) for text in self.stop),
            "logprobs": self.logprobs >= 0,
            "tempered": not (self.tempered and self.has_filters),
        }
        for name, is_good in good.items():
            if not is_good:
                raise ValueError(f"{name} {shortened(getattr(self, name))} is out of range")

    @property
    def reads_all(self) -> bool:
        """Whether every token of the prompt must be read for this request itself."""
        return self.routes or self.prompt_logprobs

    @property
    def has_filters(self) -> bool:
        """Whether filters rule out tokens, which takes all logits."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def inverse(self) -> float:
        """1 / temperature, clamped so that products stay finite in fp32; 0: greedy choice."""
        return min(max(1 / self.temperature, 1e-30), 1e30) if self.temperature > 0 else 0.0

    @property
    def scale(self) -> float:
        """Factor of the logits in reported log-probabilities."""
        return (self.tempered and self.inverse) or 1.0

    def reason(self, tokens: Sequence[int], tokenizer: Tokenizer | None) -> _FinishReason | None:
        """Return why a completion of ``tokens`` has ended; None: it goes on."""
        if tokens[-1] in self.stop_ids:
            return "stop"
        if self.stop:
            assert tokenizer is not None  # the generator has checked
            # A character takes four tokens at most, and the first may have begun before.
            longest = 4 * max(map(len, self.stop)) + 4
            text = tokenizer.decode(tokens[-longest:])
            if any(stop in text for stop in self.stop):
                return "stop"
        return "length" if len(tokens) == self.max_tokens else None


@dataclass(frozen=True)
class Request:
    """Token ids to continue."""

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams = SamplingParams()


@dataclass
class Completion:
    """One continuation of a request so far."""

    request_id: str
    index: int
    """Number of the completion, from 0 to ``n`` - 1."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token, nats: before filters, and at temperature 1 unless
    ``tempered``."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """The likeliest tokens at each position and their log-probabilities; empty: not asked for."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token of the prompt but the first, nats, at temperature 1; empty: not
    asked for."""
    prompt_likeliest: list[int] = field(default_factory=list)
    """The likeliest token in the place of each of those."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that chose each token: how often they had been updated."""
    routes: torch.Tensor | None = None
    """int32 [tokens that were read, MoE layers, K]: the experts of every token of prompt and
    completion except the last, which was never read; None: not asked for, or not finished. Tokens
    that were read again (after preemption or an update) have the experts of the last time."""
    finish_reason: _FinishReason | None = None
    """None: not finished. stop: at a stop token or text; length: at ``max_tokens``; abort."""
