"""Gated delta nets: linear attention that carries a state through a document (arXiv 2412.06464).

    q, k, v = silu(convolution of W x)      g = -exp(a) softplus(W x + b)      beta = sigmoid(W x)
    y = W (norm(o) * silu(W x)),    o by :mod:`moetrain.kernels.linear_attention.gated_delta`

Convolutions are causal. They see zeros before the start of a document, and the state is zero there.
Queries and keys have norm 1. Several value heads share one query and key head.

Legend: B batch, S sequence, T = B * S tokens, D model width, H value heads, Q key heads, K and V
widths of a key and a value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.experts.swiglu import swiglu
from moetrain.kernels.linear_attention.convolution import Convolution
from moetrain.kernels.linear_attention.gated_delta import CHUNK, gated_delta
from moetrain.kernels.linear_attention.step import gated_delta_step
from moetrain.kernels.norm.elementwise import exp, sigmoid, softplus
from moetrain.models.architecture import (
    FP32,
    AttentionPart,
    Weight,
    Workload,
)
from moetrain.models.layers import Context, Linear, RMSNorm, linears
from moetrain.models.parts.linear_states import (
    FILTER,
    RATES,
    LinearMixer,
)
from moetrain.models.rules import COLWISE, NORM, ROWWISE, Rule

_NARROW = replace(COLWISE, gather=torch.float32)
"""The rule of the gates' weights: gathered in fp32, because products with only one output for each
head are too narrow for fp8."""
_BIAS = Rule("colwise", init="ones", decay=False, gather=torch.float32)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(AttentionPart):
    """Describes a gated delta net."""

    name: ClassVar[str] = "linear_attn"
    carries_state: ClassVar[bool] = True
    divided: ClassVar[Mapping[str, str]] = {
        "linear_num_key_heads": "tp",
        "linear_num_value_heads": "tp",
    }

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"):
            if getattr(self, f"linear_{name}") == 0:
                raise ValueError(f"linear_{name} is 0, but a layer has linear attention")
        heads = self.linear_num_value_heads
        keys = self.linear_num_key_heads
        if heads == 0 or heads % keys:
            problem = f"linear_num_value_heads {heads} is not a multiple of"
            raise ValueError(f"{problem} linear_num_key_heads {keys}")

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "_LinearAttention":
        return _LinearAttention(self, kernels)

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of all key heads together, and of all value heads."""
        return (
            self.linear_num_key_heads * self.linear_key_head_dim,
            self.linear_num_value_heads * self.linear_value_head_dim,
        )

    @property
    def weights(self) -> Mapping[str, Weight]:
        dim, (k_dim, v_dim), heads = self.hidden_size, self.widths, self.linear_num_value_heads
        found = {f"w{x}.weight": Weight((n, dim), COLWISE) for x, n in self._inputs()}
        found |= {f"w{x}.weight": Weight((heads, dim), _NARROW) for x in "ba"}
        for x, channels in {"q": k_dim, "k": k_dim, "v": v_dim}.items():
            found[f"conv_{x}"] = Weight((channels, 1, self.linear_conv_kernel_dim), FILTER)
        found |= {"a_log": Weight((heads,), RATES), "dt_bias": Weight((heads,), _BIAS)}
        found["norm.weight"] = Weight((self.linear_value_head_dim,), NORM)
        return found | {"wo.weight": Weight((dim, v_dim), ROWWISE)}

    def _inputs(self) -> list[tuple[str, int]]:
        """Return the names and widths of the wide projections of the input."""
        k_dim, v_dim = self.widths
        return [("q", k_dim), ("k", k_dim), ("v", v_dim), ("z", v_dim)]

    def products_per_token(self, seq_len: int) -> float:
        """Count the multiplications with weights, and three for each element of the heads' states:
        reading it at the key, writing to it, and reading it at the query."""
        k_dim, v_dim = self.widths
        gates = 2 * self.linear_num_value_heads
        weights = self.hidden_size * (2 * k_dim + 3 * v_dim + gates)
        return weights + 3 * v_dim * self.linear_key_head_dim

    def activations(self, share: Workload) -> float:
        """Return the bytes of the projections, of the convolutions' results, of the rule's result
        before and after its gate, and of what the rule keeps for each chunk.

        Without the compiler, every step but the rule also keeps tensors in fp32: the input of each
        tap's product, the inputs of silu and of the norms of queries and keys, and the factors of
        the gate.
        """
        (k_dim, v_dim), w = self.widths, share.width
        channels = 2 * k_dim + v_dim
        values = w * (2 * channels + 3 * v_dim)
        if not share.is_compiled:
            wide = (self.linear_conv_kernel_dim + 1) * channels + 2 * k_dim + 3 * v_dim
            values = w * (channels + 2 * v_dim) + FP32 * wide
        heads = self.linear_num_value_heads * (CHUNK * w + 5 * FP32)
        return share.tokens * (values + heads) / share.tp

    def exchanged(self, share: Workload) -> dict[str, float]:
        k_dim, v_dim = self.widths
        gates = 2 * self.linear_num_value_heads
        spread = (2 * k_dim + 2 * v_dim + gates) / share.tp
        return share.received(spread, spread / share.cp)  # both methods send heads

    def state_bytes(self, width: int) -> float:
        (k_dim, v_dim), heads = self.widths, self.linear_num_value_heads
        channels = 2 * k_dim + v_dim
        tokens = CHUNK + self.linear_conv_kernel_dim - 1
        kept = tokens * channels * width + CHUNK * heads * (FP32 + width)
        return v_dim * self.linear_key_head_dim * FP32 + kept

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        (k_dim, v_dim), w = self.widths, share.width
        products = share.tokens * w * (2 * k_dim + 2 * v_dim) / share.tp
        rule = v_dim * w + self.linear_num_value_heads * (CHUNK * w + FP32)
        return {
            "attention": share.tokens * rule / share.tp,
            "linear": products + share.own_tokens * w * self.hidden_size,
        }


class _LinearAttention(LinearMixer):
    """The module of :class:`GatedDeltaNet`."""

    def __init__(self, sizes: GatedDeltaNet, kernels: KernelsSection) -> None:
        super().__init__(kernels)
        self.key_dim, self.value_dim = sizes.linear_key_head_dim, sizes.linear_value_head_dim
        dim = sizes.hidden_size
        v_dim = sizes.widths[1]
        heads = sizes.linear_num_value_heads
        self.wq, self.wk, self.wv, self.wz = (
            Linear(dim, width, kernels) for _, width in sizes._inputs()
        )
        self.wb, self.wa = (Linear(dim, heads, kernels.without_fp8) for _ in "ba")
        filters = (sizes.weights[f"conv_{x}"].shape for x in "qkv")
        self.conv_q, self.conv_k, self.conv_v = (nn.Parameter(torch.empty(x)) for x in filters)
        self.a_log, self.dt_bias = (nn.Parameter(torch.empty(heads)) for _ in "ab")
        self.norm = RMSNorm(self.value_dim, sizes.norm_eps, kernels)
        self.wo = Linear(v_dim, dim, kernels)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Mix tokens; returns [B, S, D] in ``x_BSD``'s dtype."""
        x_TD = x_BSD.flatten(0, 1)
        dtype = x_BSD.dtype
        wide = torch.promote_types(dtype, torch.float32)
        # z has a product of its own. From one fp8 product with q, k and v it would be a view, which
        # would keep the results of all four until the backward, although that needs only z.
        z = self.wz(x_TD)
        q, k, v = linears(x_TD, (self.wq, self.wk, self.wv))
        values = (q, k, v, self.wa(x_TD), self.wb(x_TD))
        weights = (self.conv_q, self.conv_k, self.conv_v, self.a_log, self.dt_bias)
        o_THV = self.over_heads(self._mixed, values, weights, context)
        normed_THV = self.norm(o_THV.unflatten(1, (-1, self.value_dim)))
        if self.batch_invariant:
            y = swiglu(torch.cat((z, normed_THV.flatten(1)), dim=-1), backend=self.backend)
        else:
            z_THV = z.unflatten(-1, (-1, self.value_dim))
            y = (normed_THV.to(wide) * F.silu(z_THV.to(wide))).to(dtype).flatten(1)
        return self.wo(y).view_as(x_BSD)

    def _mixed(
        self,
        values: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        context: Context,
    ) -> torch.Tensor:
        """Return what each head reads from its state, [T, H * V]."""
        q, k, v, a_TH, b_TH = values
        *filters, a_log, dt_bias = weights
        wide = torch.promote_types(q.dtype, torch.float32)
        convolving = {
            "q": Convolution(q, filters[0], self.key_dim, True),
            "k": Convolution(k, filters[1], self.key_dim, True),
            "v": Convolution(v, filters[2], self.value_dim, False),
        }
        q_TQK, k_TQK, v_THV = self.convolved(convolving, context)
        fusible = not self.batch_invariant
        rates_H = exp(a_log.to(wide), fusible=fusible)
        g_TH = -rates_H * softplus(a_TH.to(wide) + dt_bias, fusible=fusible)
        inputs = (q_TQK, k_TQK, v_THV, g_TH, sigmoid(b_TH, fusible=fusible))
        scale = self.key_dim**-0.5
        o_THV = self.ruled(inputs, context, gated_delta, gated_delta_step, scale=scale)
        return o_THV.flatten(1)
