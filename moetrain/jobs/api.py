"""The requests that a client may send to its job: bodies of JSON, checked before they are queued.

They are those of the ``tinker`` SDK (0.38), without the ids of model and request; :class:`Pass` is
what the SDK sends as a protobuf message. A request that is taken up can be served: the model has
its token ids, its rows fit, its numbers are finite. Otherwise one line says what is wrong
(:class:`Refused`).

Legend: B rows, S tokens of a row.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field

from moetrain.config.sources import shortened
from moetrain.data.packing import IGNORE_INDEX, best_fit
from moetrain.generate.request import Completion, JsonBody, SamplingParams
from moetrain.losses.policy import policy_total
from moetrain.models.transformer import Transformer
from moetrain.train.objectives import Outputs, Sizes, Term, token_losses
from moetrain.train.samples import RolloutBatch, Sample

JOB_ID = re.compile(r"([0-9a-f]{32}):(train|sample):(0|[1-9][0-9]{0,8})")
"""Session (a random number), kind and number of a job; the SDK makes ids of training runs so."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
"""Pattern of a save's name, which names a folder and leads nowhere else."""
_SOURCE = re.compile(rf"tinker://({JOB_ID.pattern})/(weights|sampler_weights)/({_NAME})")
_FP32_LARGEST = float(np.finfo(np.float32).max)
MOST_TEXTS = 65_536
"""Texts of one request: each takes some hundred times the bytes of a short one's JSON."""

_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_LOSSES: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "cross_entropy": ("reinforce", {}),
    "importance_sampling": ("clip", {}),
    "ppo": ("clip", _CLIPS),
    "cispo": ("cispo", _CLIPS),
    "dro": ("reinforce", {"beta": 0.05}),
}
"""The formula of each loss, and its settings with their defaults."""

_Ints = Annotated[list[int], Field(fail_fast=True)]
_Floats = Annotated[list[float], Field(fail_fast=True)]


class Refused(ValueError):
    """A request is refused; the message is one line for the client."""

    def __init__(self, problem: str, status: int = 400) -> None:
        """``status`` is HTTP's: 404 where there is no such job, 429 where there is much to do."""
        super().__init__(problem)
        self.status = status


@dataclass(frozen=True)
class ClientLoss:
    """A loss that clients name, as the ``tinker`` SDK defines it: a sum over all positions.

    The formulas are :mod:`moetrain.losses.policy`'s, where a target's weight (cross-entropy)
    or advantage (the others) is A. There are no denominators and no auxiliary losses: chunks of a
    batch add up to it. Log-probabilities of targets that it has seen are collected on the way.
    """

    formula: str
    low: float = 0.0
    high: float = math.inf
    beta: float = 0.0
    """Coefficient of the k2 estimate of the KL from what sampled the targets."""
    others: tuple[Self, ...] = ()
    """Losses of further jobs; the rows are in equal parts, of which each has one, in order."""
    seen: list[torch.Tensor] = field(default_factory=list, compare=False)
    """Log-probabilities [B, S] of the batches since it was emptied."""
    balances = False

    @classmethod
    def of(cls, name: str, config: Mapping[str, float]) -> Self:
        """Raise ValueError for a loss, or a setting of it, that there is not."""
        if name not in _LOSSES:
            raise ValueError(f"loss_fn {shortened(name)} is not one of {', '.join(_LOSSES)}")
        formula, known = _LOSSES[name]
        if odd := sorted(set(config) - set(known)):
            has = f"has {', '.join(known)}" if known else "has none"
            raise ValueError(f"loss_fn_config: {shortened(odd[0])} is unknown; loss {name!r} {has}")
        values = {**known, **config}
        low, high, beta = map(values.get, (*_CLIPS, "beta"), (0.0, math.inf, 0.0))
        if not 0 <= low <= high or beta < 0:
            raise ValueError(f"loss_fn_config: {shortened(values)} is out of range for {name!r}")
        return cls(formula, low, high, beta)

    def sizes(self, batches: Sequence[RolloutBatch]) -> dict[str, int]:
        return {"targets": sum(int((b.targets_BS != IGNORE_INDEX).sum()) for b in batches)}

    def terms(
        self, model: Transformer, outputs: Outputs, batch: RolloutBatch, sizes: Sizes
    ) -> dict[str, Term]:
        losses = token_losses(model, outputs.hidden_BSD, batch)
        logprob_BS = -losses.loss_T.view_as(batch.targets_BS)
        self.seen.append(logprob_BS.detach())
        losses = (self, *self.others)
        is_target_BS = batch.targets_BS != IGNORE_INDEX
        given = logprob_BS, batch.logprobs_BS, batch.advantages_BS, is_target_BS
        parts = zip(losses, *(x_BS.chunk(len(losses)) for x_BS in given), strict=True)
        totals = [
            policy_total(loss.formula, (loss.low, loss.high), loss.beta, *part)
            for loss, *part in parts
        ]
        return {f"loss.{i}": Term(total * outputs.share) for i, total in enumerate(totals)}


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
    end_ids: tuple[int, ...] = ()
    """Tokens that end a text where a request names none; without a tokenizer there are none."""

    def check_tokens(self, name: str, tokens: Sequence[int]) -> None:
        """Raise ValueError unless the model has all ``tokens``, at least one."""
        if not tokens:
            raise ValueError(f"{name} has no tokens; send one or more")
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise ValueError(f"{name}: its tokens are not all of 0 to {self.vocab_size - 1}")

    def parse(self, kind: str, body: object) -> "_JobBody":
        """Parse and check the JSON value ``body`` of a request ``kind``; raises Refused."""
        try:
            request = KINDS[kind].model_validate(body)
            request.check(self)
        except ValueError as error:
            raise Refused(JsonBody.complaint(error)) from None
        return request


class _JobBody(JsonBody):
    def check(self, limits: Limits) -> None:
        """Raise ValueError if the request can never be served."""


class _Datum(JsonBody):
    """One text to train on, or to score: a target, and numbers, for every token of its input."""

    tokens: _Ints
    target_tokens: _Ints
    weights: _Floats | None = None
    """What each target counts in cross-entropy; None: 1."""
    logprobs: _Floats | None = None
    """Log-probability of each target when it was sampled."""
    advantages: _Floats | None = None

    def check(self, name: str, limits: Limits, loss: str) -> None:
        """Raise ValueError if no row holds the text, or ``loss`` needs other numbers."""
        limits.check_tokens(name, self.tokens)
        limits.check_tokens(f"{name}.target_tokens", self.target_tokens)
        if len(self.tokens) > limits.longest_row:
            raise ValueError(
                f"{name} has {len(self.tokens)} tokens, and a row of data.seq_len "
                f"{limits.longest_row} takes {limits.longest_row}; shorten it"
            )
        needed, unused = {"logprobs", "advantages"}, {"weights"}
        if loss == "cross_entropy":
            needed, unused = set(), needed
        for key in ("target_tokens", "weights", "logprobs", "advantages"):
            values = getattr(self, key)
            if values is None and key in needed:
                raise ValueError(f"{name} has no {key}, which loss {loss!r} needs; send them")
            if values is None:
                continue
            if key in unused:
                problem = f"{name} has {key}, of which loss {loss!r} has no use"
                raise ValueError(f"{problem}; leave them out")
            if len(values) != len(self.tokens):
                problem = f"{name} has {len(values)} {key} for {len(self.tokens)} tokens"
                raise ValueError(f"{problem}; send one for each")
            if key != "target_tokens" and (largest := np.max(np.abs(values))) > _FP32_LARGEST:
                raise ValueError(f"{name}: {largest} is infinite in fp32")

    def sample(self, group: int) -> Sample:
        """Return the text as a sample, with its weights in place of advantages if it has any."""
        factors = self.weights if self.advantages is None else self.advantages
        return Sample(
            [*self.tokens, 0],
            [0] + [1] * len(self.tokens),
            1.0 if factors is None else [0.0, *factors],
            group,
            None if self.logprobs is None else [0.0, *self.logprobs],
            targets=self.target_tokens,
        )


class Pass(_JobBody):
    """A request for a forward pass over texts: a loss, and every target's log-probability."""

    data: list[_Datum] = Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)
    loss_fn: str = "cross_entropy"
    loss_fn_config: dict[str, float] = Field(default={}, max_length=8)

    def check(self, limits: Limits) -> None:
        ClientLoss.of(self.loss_fn, self.loss_fn_config)
        for i, datum in enumerate(self.data):
            datum.check(f"data[{i}]", limits, self.loss_fn)

    def fits(self, rows: int, length: int) -> bool:
        """Return whether the texts fit in ``rows`` of ``length`` tokens."""
        lengths_N = np.array([len(datum.tokens) for datum in self.data])
        return lengths_N.max() <= length and best_fit(lengths_N, length).max() < rows


class _AdamParams(JsonBody):
    learning_rate: float = Field(default=1e-4, ge=0, le=1e6)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0, le=1e6)
    weight_decay: float = Field(default=0.0, ge=0, le=1e6)
    grad_clip_norm: float = Field(default=0.0, ge=0)
    """0: gradients are not clipped."""


class OptimStep(_JobBody):
    """A request to update the adapter with the step's gradients."""

    adam_params: _AdamParams


class _Chunk(JsonBody):
    tokens: _Ints
    type: Literal["encoded_text"] = "encoded_text"


class _ModelInput(JsonBody):
    chunks: Annotated[list[_Chunk], Field(fail_fast=True, max_length=MOST_TEXTS)]


class _SamplingParams(JsonBody):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | _Ints | None = None
    """None: the model's own end; an empty list: none."""
    temperature: float = 1.0
    top_k: int = Field(default=-1, ge=-1)
    """-1, as 0: all tokens."""
    top_p: float = 1.0


class Sampling(_JobBody):
    """A request to continue a prompt."""

    prompt: _ModelInput
    sampling_params: _SamplingParams
    num_samples: int = Field(default=1, ge=1)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: int = Field(default=0, ge=0)
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]

    def params(self, seed: int, limits: Limits) -> SamplingParams:
        """Return what the generator is asked; ``seed`` is used if none was given."""
        asked = self.sampling_params
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        ids = limits.end_ids if stop is None else [x for x in stop if isinstance(x, int)]
        longest = limits.longest_text - len(self.tokens)
        return SamplingParams(
            max_tokens=longest if asked.max_tokens is None else asked.max_tokens,
            temperature=asked.temperature,
            top_k=max(asked.top_k, 0),
            top_p=asked.top_p,
            seed=(seed if asked.seed is None else asked.seed) % (2**63 - 1),
            n=self.num_samples,
            stop_ids=tuple(ids),
            stop=tuple(x for x in stop or () if isinstance(x, str)),
            logprobs=self.topk_sample_logprobs,
            prompt_logprobs=0 if self.prompt_logprobs else None,
        )

    def check(self, limits: Limits) -> None:
        tokens, asked = self.tokens, self.sampling_params
        limits.check_tokens("prompt", tokens)
        if len(tokens) + (asked.max_tokens or 1) > limits.longest_text:
            raise ValueError(
                f"prompt: {len(tokens)} tokens and max_tokens {shortened(asked.max_tokens or 1)} "
                f"are more than the {limits.longest_text} that one text may have; shorten it, or "
                "lower max_tokens"
            )
        if self.num_samples > limits.max_completions:
            raise ValueError(
                f"num_samples {shortened(self.num_samples)} are more than jobs.max_completions "
                f"{limits.max_completions}; ask in parts"
            )
        if self.prompt_logprobs_last_n and not self.prompt_logprobs:
            raise ValueError("prompt_logprobs_last_n is for prompt_logprobs; ask for these too")
        params = self.params(0, limits)
        if params.stop and not limits.end_ids:
            raise ValueError("stop: there is no tokenizer (data.tokenizer); give token ids")
        if params.logprobs > limits.vocab_size:
            raise ValueError(
                f"topk_sample_logprobs {shortened(params.logprobs)} are more than there are tokens"
            )
        if params.logprobs * params.max_tokens * params.n > limits.max_logprobs:
            raise ValueError(
                f"topk_sample_logprobs {params.logprobs} of every token are more than an answer of "
                "jobs.max_request_mib holds; ask in parts"
            )

    def answer(self, completion: Completion) -> dict[str, Any]:
        """Describe one of its samples, the first with what was asked of the prompt."""
        row: dict[str, Any] = {
            "tokens": completion.tokens,
            "logprobs": finite(completion.logprobs),
            "stop_reason": completion.finish_reason,
        }
        if self.topk_sample_logprobs:
            tops = [zip(x, finite([*x.values()]), strict=True) for x in completion.top_logprobs]
            row["topk"] = [[*map(list, top)] for top in tops]
        if self.prompt_logprobs and completion.index == 0:
            scores = [None, *finite(completion.prompt_logprobs)]
            unscored = max(0, len(scores) - (self.prompt_logprobs_last_n or len(scores)))
            row["prompt_logprobs"] = [None] * unscored + scores[unscored:]
        return row


class Save(_JobBody):
    """A request to keep the job's state, or its adapter in PEFT's format, under a name."""

    path: str | None = Field(default=None, pattern=f"^{_NAME}$")
    overwrite: bool = False
    ttl_seconds: int | None = Field(default=None, ge=3600, le=315_360_000)
    """Seconds after which the save is removed; None: it stays."""

    def check(self, limits: Limits) -> None:
        if self.path is None:
            raise ValueError("path is missing; give the save a name")


class SaveForSampler(Save):
    """A request to keep the adapter, under a name or for one new sampler alone."""

    kind: Literal["snapshot"] = "snapshot"
    sampling_session_seq_id: int | None = Field(default=None, ge=0, lt=10**8)

    def check(self, limits: Limits) -> None:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("it takes path or sampling_session_seq_id, and not both")


class Load(_JobBody):
    """A request to go on from a save, of any job whose path the client knows."""

    path: str
    optimizer: bool
    """Whether the moments are loaded too; otherwise they are zero."""

    def check(self, limits: Limits) -> None:
        if "/weights/" not in source_of(self.path) and self.optimizer:
            raise ValueError("path: sampler_weights have no optimizer state; load weights")


class _Unserved(_JobBody):
    """A request that was refused, in its place among the job's requests."""

    problem: str


def finite(values: Sequence[float]) -> Sequence[float | None]:
    """Put None where JSON has no number."""
    if math.isfinite(sum(values)):
        return values
    return [x if math.isfinite(x) else None for x in values]


def source_of(path: str) -> str:
    """Return where a save's ``path`` leads under the folder of jobs; Refused: it is none."""
    if _SOURCE.fullmatch(path) is None:
        raise Refused(f"path: {shortened(path)} is not tinker://RUN/weights/NAME of this service")
    return path.removeprefix("tinker://")


KINDS: Mapping[str, type[_JobBody]] = {
    "forward_backward": Pass,
    "forward": Pass,
    "optim_step": OptimStep,
    "asample": Sampling,
    "save_weights": Save,
    "save_weights_for_sampler": SaveForSampler,
    "save_weights_external": Save,
    "load_weights": Load,
    "unserved": _Unserved,
}
