"""The shape of a model: every number that decides its parameters and its arithmetic.

One frozen :class:`Architecture` describes models of every family; a family's file says how a
Hugging Face ``config.json`` maps to it, what its presets are and how its blocks are built.
The parameter and FLOP formulas live here and are tested against built models.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
    """Sizes and switches of one decoder-only transformer."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

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
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token {self.num_experts_per_token} is more than "
                f"num_experts {self.num_experts}"
            )
        for name in ("num_experts_per_token", "moe_intermediate_size") if self.num_experts else ():
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0, and num_experts {self.num_experts}")
        for name in ("sliding_windows", "moe_layers"):
            value = getattr(self, name)
            if value and len(value) != self.num_layers:
                raise ValueError(
                    f"{name} names {len(value)} layers, num_layers is {self.num_layers}"
                )
        if self.num_params() > MAX_PARAMS:
            raise ValueError(f"these sizes make a model of {self.num_params():.1e} parameters")
        return self

    def is_moe_layer(self, layer: int) -> bool:
        """Whether block ``layer`` routes tokens to experts."""
        return self.moe_layers[layer] if self.moe_layers else self.num_experts > 0

    def window(self, layer: int) -> int | None:
        """Sliding attention window of block ``layer`` in tokens, None: unlimited."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    @property
    def moe_layer_indices(self) -> list[int]:
        """Numbers of the blocks with experts, from 0."""
        return [i for i in range(self.num_layers) if self.is_moe_layer(i)]

    @property
    def num_moe_layers(self) -> int:
        """Blocks with experts."""
        return len(self.moe_layer_indices)

    def num_params(self) -> int:
        """Parameters of the built model (tied embeddings counted once)."""
        return self._count(self.num_experts)

    def num_active_params(self) -> int:
        """Parameters one token uses: as :meth:`num_params` with only its chosen experts."""
        return self._count(self.num_experts_per_token)

    def flops_per_token(self, seq_len: int) -> float:
        """Training FLOPs of one token in a causal row of ``seq_len`` tokens.

        Forward plus backward (3 x forward), 2 FLOPs a multiply-add, matrix products only: no
        recomputation, norms, embedding lookups or biases. Causal attention counts the average
        number of keys a query sees, ``seq_len / 2`` (less with a window).
        """
        d, moe = self.hidden_size, self.num_moe_layers
        matrices = self.num_layers * self._attention_matrix()
        matrices += (self.num_layers - moe) * 3 * d * self.intermediate_size
        matrices += moe * (
            self.num_experts_per_token * 3 * d * self.moe_intermediate_size + d * self.num_experts
        )
        matrices += self.vocab_size * d
        keys = 0.0
        for i in range(self.num_layers):
            window = min(self.window(i) or seq_len, seq_len)
            keys += window * (1 - window / (2 * seq_len))
        attention = 2 * self.num_heads * self.head_dim * keys  # scores, then the weighted values
        return 6.0 * (matrices + attention)

    def _attention_matrix(self) -> int:
        return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    def _count(self, experts: int) -> int:
        d, heads, kv = self.hidden_size, self.num_heads, self.num_kv_heads
        block = self._attention_matrix() + 2 * d
        block += self.qkv_bias * self.head_dim * (heads + 2 * kv) + self.out_bias * d
        block += self.qk_norm * 2 * self.head_dim
        f = self.intermediate_size
        dense = 3 * d * f + self.mlp_bias * (2 * f + d)
        routed = experts * 3 * d * self.moe_intermediate_size + d * self.num_experts
        moe = self.num_moe_layers
        total = self.num_layers * block + (self.num_layers - moe) * dense + moe * routed + d
        return total + self.vocab_size * d * (1 if self.tie_embeddings else 2)
