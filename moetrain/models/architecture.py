"""The shape of a model: every number that decides its parameters and its arithmetic.

One flat, frozen :class:`Architecture` describes a model; a family's class of it says of which parts
each layer is made (:mod:`moetrain.models.parts`), and may have fields of its own. What a model has
and costs in all is added up here, from what its parts say, and is tested against built models.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moetrain.models.parts import AttentionPart, Part

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

    Each family has its own class (``Family.architecture``), which names the kinds of its parts;
    :func:`moetrain.models.make_architecture` finds it. Fields that no part of a family reads keep
    their defaults.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kinds: ClassVar[tuple[type[AttentionPart], type[Part], *tuple[type[Part], ...]]]
    """Of which parts the family's layers are made: of the first two, unless :meth:`attention` and
    :meth:`feed_forward` say otherwise of some layers."""

    family: str
    """Hugging Face ``model_type``; :mod:`moetrain.models.registry` knows them."""
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
