"""The requests that a client may send to its job: JSON bodies, checked before they are queued.

They are those of the ``tinker`` SDK (0.38), without the ids of model and request. The SDK sends a
:class:`Pass` as a protobuf message. :meth:`Limits.parse` turns a body into one of
:data:`JobRequest`, once. An accepted request can be served: the model has its token ids, its texts
fit in rows, its numbers are finite. Otherwise :class:`Refused` says in one line what is wrong.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from pydantic import Field

from moetrain.config.sources import shortened
from moetrain.data.packing import best_fit
from moetrain.generate.request import Completion, JsonBody, SamplingParams
from moetrain.jobs.losses import ClientLoss
from moetrain.train.samples import Sample

JOB_ID = re.compile(r"([0-9a-f]{32}):(train|sample):(0|[1-9][0-9]{0,8})")
"""An id: the session (a random number), the kind and the number of the job. The SDK makes ids of
training runs in this form."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
"""Pattern of a save's name, which is also the name of its folder."""
_SOURCE = re.compile(rf"tinker://({JOB_ID.pattern})/(weights|sampler_weights)/({_NAME})")
_FP32_LARGEST = float(np.finfo(np.float32).max)
MOST_TEXTS = 65_536
"""Largest number of texts in one request. A short text that is parsed takes some hundred times the
bytes of its JSON."""

_Ints = Annotated[list[int], Field(fail_fast=True)]
_Floats = Annotated[list[float], Field(fail_fast=True)]


class Refused(ValueError):
    """A request is refused; the message is one line for the client."""

    def __init__(self, problem: str, status: int = 400) -> None:
        """``status`` is the HTTP status: 404 for an unknown job, 429 if too many requests wait."""
        super().__init__(problem)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """The largest requests that a service can serve."""

    vocab_size: int
    longest_row: int
    """Most tokens of one training sample."""
    longest_text: int
    """Most tokens of a prompt with its completion."""
    max_completions: int
    """Most completions of one answer."""
    max_logprobs: int
    """Most log-probabilities of likeliest tokens in one answer."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a text unless a request names others; empty without a tokenizer."""

    def check_tokens(self, name: str, tokens: Sequence[int]) -> None:
        """Raise ValueError if there are no ``tokens``, or the model lacks one of them."""
        if not tokens:
            raise ValueError(f"{name} has no tokens; send one or more")
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise ValueError(f"{name} has a token outside of 0 to {self.vocab_size - 1}")

    def parse(self, kind: str, body: object) -> "JobRequest":
        """Parse the JSON value ``body`` as a request. Raises Refused: it cannot be served.

        ``kind`` is a name of :data:`KINDS`.
        """
        try:
            request = KINDS[kind].model_validate(body)
            request.check(self)
        except ValueError as error:
            raise Refused(JsonBody.complaint(error)) from None
        return request


class JobBody(JsonBody):
    """The body of a request to a job."""

    route: ClassVar[str]
    """The SDK's name of the request; paths and files use it."""
    changes_state: ClassVar = False
    """True: the request changes the job's state, and is served again if the state was lost."""

    def check(self, limits: Limits) -> None:
        """Raise ValueError if the request can never be served."""


class Datum(JsonBody):
    """A text to train on or to score. Every list has one value for each token of the input."""

    tokens: _Ints
    target_tokens: _Ints
    weights: _Floats | None = None
    """Weight of each target in cross-entropy; None: 1."""
    logprobs: _Floats | None = None
    """Log-probability of each target when it was sampled, nats."""
    advantages: _Floats | None = None

    def check(self, name: str, limits: Limits, loss: str) -> None:
        """Raise ValueError if the text fits in no row, or its values are not those of ``loss``."""
        limits.check_tokens(name, self.tokens)
        limits.check_tokens(f"{name}.target_tokens", self.target_tokens)
        if len(self.tokens) > limits.longest_row:
            raise ValueError(
                f"{name} has {len(self.tokens)} tokens, more than the {limits.longest_row} of a "
                "row (data.seq_len); shorten it"
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
                problem = f"{name} has {key}, which loss {loss!r} does not use"
                raise ValueError(f"{problem}; leave them out")
            if len(values) != len(self.tokens):
                problem = f"{name} has {len(values)} {key} for {len(self.tokens)} tokens"
                raise ValueError(f"{problem}; send one for each")
            if key != "target_tokens" and (largest := np.max(np.abs(values))) > _FP32_LARGEST:
                raise ValueError(
                    f"{name}.{key}: {largest} is infinite in fp32; send smaller numbers"
                )

    def sample(self, group: int) -> Sample:
        """Return the text as a sample. Without advantages its weights take their place."""
        factors = self.weights if self.advantages is None else self.advantages
        return Sample(
            [*self.tokens, 0],
            [0] + [1] * len(self.tokens),
            1.0 if factors is None else [0.0, *factors],
            group,
            None if self.logprobs is None else [0.0, *self.logprobs],
            targets=self.target_tokens,
        )


class Pass(JobBody):
    """A request for a pass over texts. The answer has the loss and each target's logprob."""

    data: list[Datum] = Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)
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


class Forward(Pass):
    """A request for a forward pass."""

    route: ClassVar = "forward"


class ForwardBackward(Pass):
    """A request for a forward and a backward pass, whose gradients are added to the step's."""

    route: ClassVar = "forward_backward"
    changes_state: ClassVar = True


class _AdamParams(JsonBody):
    learning_rate: float = Field(default=1e-4, ge=0, le=1e6)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0, le=1e6)
    weight_decay: float = Field(default=0.0, ge=0, le=1e6)
    grad_clip_norm: float = Field(default=0.0, ge=0)
    """0: gradients are not clipped."""


class OptimStep(JobBody):
    """A request to update the adapter with the step's gradients."""

    route: ClassVar = "optim_step"
    changes_state: ClassVar = True

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
    """Texts or token ids that end a completion; None: :attr:`Limits.end_ids`."""
    temperature: float = 1.0
    top_k: int = Field(default=-1, ge=-1)
    """-1 and 0: all tokens."""
    top_p: float = 1.0


class Sampling(JobBody):
    """A request to continue a prompt."""

    route: ClassVar = "asample"

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
        """Return the generator's parameters; ``seed`` is used if the request has none."""
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
                f"num_samples {shortened(self.num_samples)} is more than jobs.max_completions "
                f"{limits.max_completions}; ask in parts"
            )
        if self.prompt_logprobs_last_n and not self.prompt_logprobs:
            raise ValueError(
                "prompt_logprobs_last_n has no effect without prompt_logprobs; send both"
            )
        params = self.params(0, limits)
        if params.stop and not limits.end_ids:
            raise ValueError("stop: stop texts need a tokenizer (data.tokenizer); send token ids")
        if params.logprobs > limits.vocab_size:
            raise ValueError(
                f"topk_sample_logprobs {shortened(params.logprobs)} is more than the model's "
                f"{limits.vocab_size} tokens; lower it"
            )
        if params.logprobs * params.max_tokens * params.n > limits.max_logprobs:
            raise ValueError(
                f"topk_sample_logprobs {params.logprobs} for every token makes an answer larger "
                "than jobs.max_request_mib; lower it, or ask in parts"
            )

    def answer(self, completion: Completion) -> dict[str, Any]:
        """Return the JSON of a finished sample. The first one has the prompt's logprobs too."""
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


class Save(JobBody):
    """A request to keep the job's state under a name."""

    route: ClassVar = "save_weights"

    path: str | None = Field(default=None, pattern=f"^{_NAME}$")
    overwrite: bool = False
    ttl_seconds: int | None = Field(default=None, ge=3600, le=315_360_000)
    """Seconds after which the save is removed; None: never."""

    def check(self, limits: Limits) -> None:
        if self.path is None:
            raise ValueError("path is missing; send a name for the save")


class SavePeft(Save):
    """A request to keep the adapter under a name, in PEFT's format."""

    route: ClassVar = "save_weights_external"


class SaveForSampler(Save):
    """A request to keep the adapter, under a name or for one new sampler alone."""

    route: ClassVar = "save_weights_for_sampler"

    kind: Literal["snapshot"] = "snapshot"
    sampling_session_seq_id: int | None = Field(default=None, ge=0, lt=10**8)
    """Number of the new sampler in the job's session."""

    def check(self, limits: Limits) -> None:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("send either path or sampling_session_seq_id, and not both")


class Load(JobBody):
    """A request to go on from a save of any job, if the client knows the save's path."""

    route: ClassVar = "load_weights"
    changes_state: ClassVar = True

    path: str
    optimizer: bool
    """True: the moments are loaded too. False: they begin at zero."""

    def check(self, limits: Limits) -> None:
        if "/weights/" not in source_of(self.path) and self.optimizer:
            raise ValueError(
                "path: sampler_weights have no optimizer state; load weights, or load without it"
            )


class Unserved(JobBody):
    """A refused request, in its place among the job's requests."""

    route: ClassVar = "unserved"

    problem: str


JobRequest = (
    Forward
    | ForwardBackward
    | OptimStep
    | Sampling
    | Save
    | SavePeft
    | SaveForSampler
    | Load
    | Unserved
)

KINDS: Mapping[str, type[JobRequest]] = {kind.route: kind for kind in get_args(JobRequest)}
"""The types of requests by the SDK's names."""


def finite(values: Sequence[float]) -> Sequence[float | None]:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if math.isfinite(sum(values)):
        return values
    return [x if math.isfinite(x) else None for x in values]


def source_of(path: str) -> str:
    """Return a save's ``path`` relative to the folder of jobs. Raises Refused: it is no save's."""
    if _SOURCE.fullmatch(path) is None:
        raise Refused(f"path: {shortened(path)} does not have the form tinker://RUN/weights/NAME")
    return path.removeprefix("tinker://")
