"""Grouped-query attention; the function that mixes queries, keys and values is injected.

Legend: B batch, S sequence, D model width, H query heads, G key/value heads, d head width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.attention.attention import attention
from moetrain.kernels.attention.sinks import attention_with_sinks
from moetrain.kernels.norm.elementwise import sigmoid
from moetrain.kernels.norm.rotary import rotary
from moetrain.models.architecture import FP32, AttentionPart, QKNormed, Weight, Workload, linear
from moetrain.models.layers import Context, Linear, RMSNorm, WideNorm, linears
from moetrain.models.rules import COLWISE, NORM, ROWWISE, WIDE_NORM, ZERO_NORM
from moetrain.runtime.backend import Backend


@dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention(AttentionPart):
    """Describes causal attention whose query heads share keys and values (arXiv 2305.13245)."""

    divided: ClassVar[Mapping[str, str]] = {"num_heads": "tp", "num_kv_heads": "tp"}

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalised."""
    qk_norm_of: QKNormed = "head"
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    output_gate: bool = False
    """Whether each head's result is multiplied by a sigmoid of the token; ``wq`` then has, head by
    head, the rows of the query and those of its gate."""
    zero_centred_norms: bool = False
    late_norms: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            others = f"num_kv_heads {self.num_kv_heads}"
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of {others}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        width = self.head_dim * self.partial_rotary_factor
        if abs(width - self.rotary_dim) > 1e-6 or self.rotary_dim % 2:
            problem = f"partial_rotary_factor {self.partial_rotary_factor} of head_dim"
            raise ValueError(f"{problem} {self.head_dim} is {width:g}, which is not an even number")

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "Attention":
        return Attention(self, kernels)

    @property
    def widths(self) -> tuple[int, int]:
        """Width of all query heads together, and of all key heads."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    @property
    def query_width(self) -> int:
        """Width of ``wq``'s result: that of all query heads, and of their gates."""
        return self.widths[0] * (2 if self.output_gate else 1)

    @property
    def widest_head(self) -> int:
        return self.head_dim

    @property
    def rotary_dim(self) -> int:
        return round(self.head_dim * self.partial_rotary_factor)

    @property
    def weights(self) -> Mapping[str, Weight]:
        dim, (q_dim, kv_dim) = self.hidden_size, self.widths
        found: dict[str, Weight] = {}
        for name, out_dim in {"wq": self.query_width, "wk": kv_dim, "wv": kv_dim}.items():
            found |= linear(name, out_dim, dim, COLWISE, bias=self.qkv_bias)
        found |= linear("wo", dim, q_dim, ROWWISE, bias=self.out_bias)
        if self.qk_norm:
            is_wide = self.qk_norm_of == "width"
            for name, width in zip(("q_norm", "k_norm"), (q_dim, kv_dim), strict=True):
                rule = ZERO_NORM if self.zero_centred_norms else NORM
                norm = ((width,), WIDE_NORM) if is_wide else ((self.head_dim,), rule)
                found[f"{name}.weight"] = Weight(*norm)
        return found

    def products_per_token(self, seq_len: int) -> float:
        window = min(self.window or seq_len, seq_len)
        keys = window * (1 - window / (2 * seq_len))
        scores_and_values = 2 * self.widths[0] * keys
        return super().products_per_token(seq_len) + scores_and_values

    def activations(self, share: Workload) -> float:
        """Return the bytes of queries, keys, values, the result and its log-sum-exp.

        They are of all tokens and this rank's heads. With q/k norms, the results of the products
        are kept beside the inputs of attention.
        """
        w = share.width
        numbers = sum(self.widths)
        values = 2 * w * numbers  # the result and the values; queries and keys, as taken
        if self.qk_norm:
            values += (w if share.is_compiled else FP32 + w) * numbers
        if self.output_gate:  # the gates, and the gated result
            values += 2 * w * self.widths[0]
        others = share.key_tokens - share.tokens  # of other ranks, with keys and values here
        others = min(others, 2 * self.window) if self.window else others
        gathered = 2 * w * self.widths[1] * others
        return (share.tokens * (values + FP32 * self.num_heads) + gathered) / share.tp

    def exchanged(self, share: Workload) -> dict[str, float]:
        q_dim, kv_dim = self.widths
        copies = max(1.0, share.cp * share.tp / self.num_kv_heads)
        spread = 2 * q_dim + 2 * kv_dim * copies
        all_of_one = share.tokens * max(1, share.cp - 1)
        seen = min(1.0, 2 * (self.window or all_of_one) / share.tokens)  # two pieces see windows
        return share.received(spread / share.tp, 2 * kv_dim * seen / share.tp)

    def cached_numbers(self, ranks: int = 1) -> int:
        return 2 * self.widths[1] // (1 if self.num_kv_heads % ranks else ranks)

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        w, (q_dim, kv_dim) = share.width, self.widths
        products = share.tokens * w * (self.query_width + 2 * kv_dim) / share.tp
        return {
            "attention": share.tokens * (w * q_dim + FP32 * self.num_heads) / share.tp,
            "linear": products + share.own_tokens * w * self.hidden_size,
        }


Core = Callable[..., torch.Tensor]
"""Mixes tokens: takes rotated queries [B, S, H, d] and keys [B, S, G, d], values, the context and,
where there are some, the heads' sinks [H]; returns one value a query head, [B, S, H, d]. Under
tensor parallelism H counts this rank's heads alone, and under context parallelism S counts its
tokens. It is called inside the compiled block, and is the seam of context parallelism, key/value
caches and other scores."""


def masked_attention(
    q_BSHd: torch.Tensor,
    k_BSGd: torch.Tensor,
    v_BSGv: torch.Tensor,
    context: Context,
    scale: float | None = None,
    *,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over whole rows: softmax over what the mask lets a token see, and over a sink."""
    if sinks_H is not None:
        return attention_with_sinks(q_BSHd, k_BSGd, v_BSGv, context.mask, sinks_H, scale)
    return attention(q_BSHd, k_BSGd, v_BSGv, context.mask, scale)


class Attention(nn.Module):
    """The module of :class:`GroupedQueryAttention`, with rotary positions if heads rotate.

    ``core`` is a plain attribute; generation replaces it by attention over pages.
    """

    def __init__(
        self,
        sizes: GroupedQueryAttention,
        kernels: KernelsSection,
        core: Core = masked_attention,
    ) -> None:
        super().__init__()
        self.core, self.batch_invariant = core, kernels.batch_invariant
        self.rotate: Any = None  # generation's, which rotates and keeps keys at once
        self.backend: Backend = kernels.backend
        self.head_dim, self.interleaved = sizes.head_dim, sizes.rope_interleaved
        self.norm_of, self.output_gate = sizes.qk_norm_of, sizes.output_gate
        self.rotates = sizes.rotary_dim > 0
        dim, (q_dim, kv_dim) = sizes.hidden_size, sizes.widths
        self.wq = Linear(dim, sizes.query_width, kernels, bias=sizes.qkv_bias)
        self.wk = Linear(dim, kv_dim, kernels, bias=sizes.qkv_bias)
        self.wv = Linear(dim, kv_dim, kernels, bias=sizes.qkv_bias)
        self.wo = Linear(q_dim, dim, kernels, bias=sizes.out_bias)
        self.q_norm = self.k_norm = None
        if sizes.qk_norm:
            kind, eps = WideNorm if sizes.qk_norm_of == "width" else RMSNorm, sizes.norm_eps
            q_dim, kv_dim = sizes.widths if kind is WideNorm else [sizes.head_dim] * 2
            how = {} if kind is WideNorm else {"zero_centred": sizes.zero_centred_norms}
            how["late"] = sizes.late_norms
            self.q_norm = kind(q_dim, eps, kernels, **how)
            self.k_norm = kind(kv_dim, eps, kernels, **how)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Mix tokens; returns [B, S, D] in ``x_BSD``'s dtype."""
        q, k, v = linears(x_BSD, (self.wq, self.wk, self.wv))
        gate = None
        if self.output_gate:
            both = q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
            q, gate = (half.flatten(-2) for half in both)
        q_BSHd, k_BSGd, v_BSGd = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        norm = self.q_norm
        is_plain = norm is None or (self.norm_of == "head" and not norm.late)
        if self.rotate is not None and q.is_cuda and self.rotates and is_plain:
            how = norm, self.k_norm, self.interleaved
            q_BSHd, context = self.rotate((q_BSHd, k_BSGd, v_BSGd), context, *how)
        else:
            q_BSHd = self._turn(q, self.q_norm, context)
            k_BSGd = self._turn(k, self.k_norm, context)
        y = self.mix(q_BSHd, k_BSGd, v_BSGd, context).flatten(-2)
        if gate is not None:
            y = y * sigmoid(gate, fusible=not self.batch_invariant)
        return self.wo(y)

    def mix(self, *qkv_and_context: Any) -> torch.Tensor:
        """Call :attr:`core`."""
        return self.core(*qkv_and_context)

    def _turn(self, x: torch.Tensor, norm: RMSNorm | None, context: Context) -> torch.Tensor:
        """Normalise queries or keys ``x`` [B, S, H * d] where there is a norm, and rotate them by
        their positions: [B, S, H, d]."""
        if norm is not None and self.norm_of == "width":
            x, norm = norm(x), None
        weight, eps = None, 0.0
        x_THd = x.flatten(0, 1).unflatten(-1, (-1, self.head_dim))
        if not self.rotates:
            y_THd = x_THd if norm is None else norm(x_THd)
            return y_THd.unflatten(0, x.shape[:2])
        if norm is not None and self.norm_of == "head":
            if norm.late:  # the op's own norm rounds before the weight
                x_THd = norm(x_THd)
            else:
                weight, eps = norm.weight, norm.eps
        cos_Sp, sin_Sp = (angles.flatten(0, 2) for angles in context.rotation)
        how = {"interleaved": self.interleaved, "fusible": not self.batch_invariant}
        y_THd = rotary(x_THd, cos_Sp, sin_Sp, weight, eps, self.backend, **how)
        if norm is not None and self.norm_of == "rotated":
            y_THd = norm(y_THd)
        return y_THd.unflatten(0, x.shape[:2])
