"""The shape of a model, and of what its layers are made.

One flat, frozen :class:`Architecture` holds every number that decides a model's parameters and its
arithmetic. A family's subclass of it names a :class:`Part` for each sub-layer. A part describes one
kind of sub-layer and builds its module: it answers for its parameters and their rules, its
arithmetic, its memory and what must be divisible, so that nobody else has to know its sizes. What a
whole model has and costs is the sum of what its parts say, which tests compare with built models.

Each kind of part lies beside the module that it builds: grouped-query attention in
:mod:`moetrain.models.attention`, SwiGLU in :mod:`moetrain.models.layers`, routed experts in
:mod:`moetrain.models.moe`. A family chooses among them or brings one of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.models.rules import PartStyle, Rule

FP32 = 4
"""Bytes of a number."""


class Weight(NamedTuple):
    """One parameter of a part."""

    shape: tuple[int, ...]
    rule: Rule


@dataclass(frozen=True)
class Workload:
    """What one rank has of a micro-batch, and how it computes."""

    tokens: int
    """T: of the rows here, which tensor parallel ranks have in common."""
    tp: int
    ep: int
    width: int
    """Bytes of a number in the compute dtype."""
    is_compiled: bool

    @property
    def own_tokens(self) -> int:
        """N: the tokens that this rank has alone."""
        return self.tokens // self.tp


@dataclass(frozen=True, kw_only=True)
class Part(ABC):
    """One sub-layer: what it is made of, and what it costs.

    Equal parts build equal modules. A field has the name of the architecture's field that it is
    read from. Impossible sizes are a ValueError that names them.
    """

    name: ClassVar[str] = "mlp"
    """Of the attribute of the block that holds the module."""
    style: ClassVar[PartStyle] = "all"
    aligned: ClassVar[Mapping[str, int]] = {}
    """Fields that kernels need to be a multiple of something."""
    divided: ClassVar[Mapping[str, str]] = {}
    """Fields that the degree of an axis (``parallel.tp`` or ``ep``) must divide."""

    hidden_size: int

    @classmethod
    def of(cls, arch: object, **others: Any) -> Self:
        """The part with the fields of ``arch``, but for ``others``."""
        names = [field.name for field in fields(cls) if field.name not in others]
        return cls(**{name: getattr(arch, name) for name in names}, **others)

    @abstractmethod
    def build(self, kernels: KernelsSection, moe: MoeSection) -> nn.Module:
        """The module; see :class:`moetrain.models.transformer.Block` for how it is called."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Weight]:
        """Every parameter of the module, by its name there."""

    # Arithmetic.
    def num_params(self) -> int:
        """Parameters."""
        return sum(math.prod(weight.shape) for weight in self.weights.values())

    def num_active_params(self) -> int:
        """Parameters that one token uses."""
        return self.num_params()

    def products_per_token(self, seq_len: int) -> float:
        """Multiply-adds of matrix products in one token's forward, in a row of ``seq_len``."""
        return sum(math.prod(weight.shape) for weight in self._matrices())

    # Memory.
    def numbers(self, share: Workload) -> float:
        """Of its matrices on one rank: whole over FSDP ranks, cut over tensor and expert ranks."""
        ranks = {"colwise": share.tp, "rowwise": share.tp, "expert": share.ep}
        return sum(math.prod(w.shape) / ranks.get(w.rule.style, 1) for w in self._matrices())

    def activations(self, share: Workload) -> float:
        """What it keeps for its backward, beside its input, if nothing is recomputed.

        Here what every matrix product results in; a part that keeps something else says so.
        """
        numbers = sum(weight.shape[0] for weight in self._matrices())
        return share.tokens * share.width * numbers / share.tp

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        """What each name of ``activation.save`` keeps of that."""
        return {}

    def working_set(self, share: Workload) -> float:
        """Gradients of what is wider than the residual stream, while its backward runs."""
        return 0.0

    def cached_numbers(self) -> int:
        """What generation keeps of every token that was read."""
        return 0

    def _matrices(self) -> Iterator[Weight]:
        return (weight for weight in self.weights.values() if len(weight.shape) > 1)


@dataclass(frozen=True, kw_only=True)
class AttentionPart(Part):
    """A sub-layer that mixes tokens: ``module(x_BSD, context) -> y_BSD``."""

    name = "attn"

    window: int | None = None
    """How many tokens back (itself included) a token sees; None: all."""

    @property
    def rotary_dim(self) -> int:
        """How many numbers of a head turn with the position; 0: none."""
        return 0


# Far above what anybody builds, and low enough that counting and building on meta stay quick: a
# damaged config.json is to be refused, not to be computed with.
MAX_LAYERS, MAX_EXPERTS, MAX_SIZE, MAX_PARAMS = 10_000, 2**16, 2**31 - 1, 10**15

Size = Annotated[int, Field(gt=0, le=MAX_SIZE)]
Count = Annotated[int, Field(ge=0, le=MAX_SIZE)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RopeScaling(BaseModel):
    """Rotary embedding variants, with Hugging Face's names and meanings.

    ``linear``: positions divided by ``factor`` (arXiv 2306.15595). ``yarn``: arXiv 2309.00071.
    ``llama3``: frequency-dependent scaling of Llama 3.1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["default", "linear", "yarn", "llama3"] = "default"
    factor: Positive = 1.0
    original_max_positions: Size | None = None
    # yarn
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    mscale: NonNegative | None = None
    mscale_all_dim: NonNegative | None = None
    truncate: bool = True
    # llama3
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0

    @model_validator(mode="after")
    def _consistent(self) -> RopeScaling:
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} is not more than "
                f"low_freq_factor {self.low_freq_factor}"
            )
        return self


class Architecture(BaseModel):
    """Sizes and switches of one decoder-only transformer.

    Each family has a subclass of its own (``Family.architecture``), which names the kinds of its
    parts and may add fields; :func:`moetrain.models.families.make_architecture` finds it. Fields
    that no part of a family reads keep their defaults.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kinds: ClassVar[tuple[type[AttentionPart], type[Part], *tuple[type[Part], ...]]]
    """Of which parts the family's layers are made: of the first two, unless :meth:`attention` and
    :meth:`feed_forward` say otherwise of some layers."""

    family: str
    """Hugging Face ``model_type``; :mod:`moetrain.models.families` knows them."""
    vocab_size: Size
    hidden_size: Size
    num_layers: int = Field(gt=0, le=MAX_LAYERS)
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    intermediate_size: Size
    max_positions: Size = 4096
    norm_eps: NonNegative = 1e-6
    tie_embeddings: bool = False
    rope_theta: Positive = 10000.0
    rope: RopeScaling = RopeScaling()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[Size | None, ...] = ()
    """Attention window of each layer in tokens, None: full; empty: full everywhere."""
    num_experts: int = Field(default=0, ge=0, le=MAX_EXPERTS)
    """0: dense."""
    num_experts_per_token: Count = 0
    moe_intermediate_size: Count = 0
    moe_layers: tuple[bool, ...] = ()
    """Which layers are MoE; empty: all if num_experts, else none."""
    norm_topk_prob: bool = True
    """Whether the chosen experts' weights are renormalised to sum to one."""
    router_aux_loss_coef: NonNegative = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> Architecture:
        for name in ("sliding_windows", "moe_layers"):
            value = getattr(self, name)
            if value and len(value) != self.num_layers:
                raise ValueError(
                    f"{name} names {len(value)} layers, num_layers is {self.num_layers}"
                )
        if self.num_params() > MAX_PARAMS:  # which also asks each part whether it can be
            raise ValueError(f"these sizes make a model of {self.num_params():.1e} parameters")
        return self

    def attention(self, layer: int) -> AttentionPart:
        """The first part of block ``layer``, counted from 0."""
        window = self.sliding_windows[layer] if self.sliding_windows else None
        return self.kinds[0].of(self, window=window)

    def feed_forward(self, layer: int) -> Part:
        """The second part of block ``layer``."""
        return self.kinds[1].of(self)

    def layers(self) -> list[tuple[AttentionPart, Part]]:
        """Both parts of every block."""
        return [(self.attention(i), self.feed_forward(i)) for i in range(self.num_layers)]

    def parts(self) -> list[Part]:
        """Each distinct part, in the order of layers."""
        return list(dict.fromkeys(self._every_part()))

    def window(self, layer: int) -> int | None:
        """Sliding attention window of block ``layer`` in tokens, None: unlimited."""
        return self.attention(layer).window

    @property
    def moe_layer_indices(self) -> list[int]:
        """Numbers of the blocks that route tokens to experts, from 0."""
        return [i for i in range(self.num_layers) if self.feed_forward(i).style == "routed"]

    def num_params(self) -> int:
        """Parameters of the built model (tied embeddings counted once)."""
        return self._frame() + sum(part.num_params() for part in self._every_part())

    def num_active_params(self) -> int:
        """Parameters one token uses: as :meth:`num_params` with only its chosen experts."""
        return self._frame() + sum(part.num_active_params() for part in self._every_part())

    def flops_per_token(self, seq_len: int, *, is_frozen: bool = False) -> float:
        """Training FLOPs of one token in a causal row of ``seq_len`` tokens.

        ``is_frozen``: without the gradients of weights; what adapters take instead is left out.

        Forward plus backward (3 x forward), 2 FLOPs a multiply-add, matrix products only: no
        recomputation, norms, embedding lookups or biases. Causal attention counts the average
        number of keys a query sees, ``seq_len / 2`` (less with a window).
        """
        products = sum(part.products_per_token(seq_len) for part in self._every_part())
        head = self.vocab_size * self.hidden_size
        with_weights = sum(part.num_active_params() for part in self._every_part()) + head
        return 6.0 * (products + head) - 2.0 * with_weights * is_frozen

    def _every_part(self) -> Iterator[Part]:
        return chain.from_iterable(self.layers())

    def _frame(self) -> int:
        """Parameters outside the parts: of the vocabulary and of norms."""
        matrices = 1 if self.tie_embeddings else 2
        return self.hidden_size * (matrices * self.vocab_size + 2 * self.num_layers + 1)
