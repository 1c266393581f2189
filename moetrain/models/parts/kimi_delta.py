"""Kimi Delta Attention: a gated delta net with a gate for each channel (arXiv 2510.26692).

    q, k, v = silu(convolution of W x)     beta = sigmoid(W x)
    g = -exp(a) softplus(F x + b), or where the gate is bounded  g = bound sigmoid(exp(a) (F x + b))
    y = W (norm(o) * sigmoid(G x)),    o by :mod:`moetrain.kernels.linear_attention.kda`

F and G, the matrices of the decay and of the output gate, are whole or products of two narrow ones.
Convolutions are causal. They see zeros before the start of a document, and the state is zero there.
Queries and keys have norm 1. The norm of the result, its gate and their product are in fp32, and
only the product is rounded.

Legend: B batch, S sequence, T = B * S tokens, D model width, H heads, K width of a head.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.linear_attention.convolution import Convolution
from moetrain.kernels.linear_attention.gated_delta import CHUNK
from moetrain.kernels.linear_attention.kda import kda
from moetrain.kernels.linear_attention.step import kda_step
from moetrain.kernels.norm.elementwise import exp, sigmoid, softplus
from moetrain.models.architecture import FP32, AttentionPart, Weight, Workload
from moetrain.models.layers import Context, Linear, RMSNorm, linears
from moetrain.models.parts.linear_states import FILTER, RATES, STEPS, LinearMixer
from moetrain.models.rules import COLWISE, NORM, ROWWISE, Rule

_WIDE = replace(COLWISE, gather=torch.float32)
"""The rule of weights that are never used in fp8: those of beta, which are too narrow, and those of
the decay, whose errors a state adds up."""
_WIDE_WHOLE = Rule("replicate", gather=torch.float32)
_WHOLE = Rule("replicate")
"""The rule of a narrow matrix whose results every tensor parallel rank computes for all tokens."""


def _draw_rates(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw the rates at which states decay from U(1, 16); return logs."""
    return rows.uniform_(1.0, 16.0, generator=generator).log_()


_RATES = replace(RATES, init=_draw_rates)


@dataclass(frozen=True, kw_only=True)
class KimiDelta(AttentionPart):
    """Describes Kimi Delta Attention."""

    name: ClassVar[str] = "linear_attn"
    carries_state: ClassVar[bool] = True
    divided: ClassVar[Mapping[str, str]] = {"linear_num_value_heads": "tp"}

    linear_num_value_heads: int
    """H; queries and keys have as many heads."""
    linear_key_head_dim: int
    """K; values are as wide as keys."""
    linear_conv_kernel_dim: int
    low_rank_gates: bool
    """True: the matrices of the decay and of the output gate are products of two, K wide."""
    decay_bound: float | None
    """The lower bound of g; None: the gate is a softplus, without a bound."""
    wide_filters: bool = False
    """True: the convolutions' filters are used in fp32; False: rounded to the compute dtype."""
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("num_value_heads", "key_head_dim", "conv_kernel_dim"):
            if getattr(self, f"linear_{name}") == 0:
                raise ValueError(f"linear_{name} is 0, but a layer has linear attention")

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "_KimiDeltaAttention":
        return _KimiDeltaAttention(self, kernels)

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.linear_num_value_heads * self.linear_key_head_dim

    @property
    def weights(self) -> Mapping[str, Weight]:
        dim, width, heads = self.hidden_size, self.width, self.linear_num_value_heads
        head = self.linear_key_head_dim
        found = {f"w{x}.weight": Weight((width, dim), COLWISE) for x in "qkv"}
        found["wb.weight"] = Weight((heads, dim), _WIDE)
        if self.low_rank_gates:
            for x, whole, rule in (("f", _WIDE_WHOLE, _WIDE), ("g", _WHOLE, COLWISE)):
                found[f"w{x}_a.weight"] = Weight((head, dim), whole)
                found[f"w{x}_b.weight"] = Weight((width, head), rule)
        else:
            found["wf.weight"] = Weight((width, dim), _WIDE)
            found["wg.weight"] = Weight((width, dim), COLWISE)
        taps = (1, self.linear_conv_kernel_dim)
        filters = replace(FILTER, gather=torch.float32) if self.wide_filters else FILTER
        found |= {f"conv_{x}": Weight((width, *taps), filters) for x in "qkv"}
        found |= {"a_log": Weight((heads,), _RATES), "dt_bias": Weight((width,), STEPS)}
        return found | {
            "norm.weight": Weight((head,), NORM),
            "wo.weight": Weight((dim, width), ROWWISE),
        }

    def products_per_token(self, seq_len: int) -> float:
        """Count the multiplications with weights, and three for each element of the heads' states:
        reading it at the key, writing to it, and reading it at the query."""
        matrices = (w for name, w in self.weights.items() if name.startswith("w"))
        weights = sum(math.prod(weight.shape) for weight in matrices)
        return weights + 3 * self.width * self.linear_key_head_dim

    def activations(self, share: Workload) -> float:
        """Return the bytes of the projections, of the convolutions' results, of the rule's result
        before and after its gate, and of what the rule keeps for each chunk.

        The compiler keeps the decays in fp32, since the rule's backward takes them. Without the
        compiler the convolutions' results and the gated result are kept, and in fp32 the input of
        each tap's product, the inputs of silu and of the norms of queries and keys, three tensors
        of the decay, and three of the output's norm and gate.
        """
        width, w = self.width, share.width
        values = (w * (5 + 3 + 2) + FP32) * width
        if not share.is_compiled:
            values = w * (3 + 1) * width
            values += FP32 * ((self.linear_conv_kernel_dim + 1) * 3 + 2 + 3 + 3) * width
        latents = 2 * self.linear_key_head_dim * w * self.low_rank_gates
        heads = self.linear_num_value_heads * (2 * CHUNK * w + 2 * FP32)
        return share.tokens * ((values + heads) / share.tp + latents)

    def exchanged(self, share: Workload) -> dict[str, float]:
        spread = (5 * self.width + self.linear_num_value_heads) / share.tp
        return share.received(spread, spread / share.cp)  # both methods send heads

    def state_bytes(self, width: int) -> float:
        tokens = CHUNK + self.linear_conv_kernel_dim - 1
        gates = self.width * FP32 + self.linear_num_value_heads * width
        kept = 3 * tokens * self.width * width + CHUNK * gates
        return self.width * self.linear_key_head_dim * FP32 + kept

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        width, w = self.width, share.width
        products = share.tokens * w * 5 * width / share.tp
        products += share.tokens * w * 2 * self.linear_key_head_dim * self.low_rank_gates
        rule = width * w + self.linear_num_value_heads * 2 * CHUNK * w
        return {
            "attention": share.tokens * rule / share.tp,
            "linear": products + share.own_tokens * w * self.hidden_size,
        }


class _KimiDeltaAttention(LinearMixer):
    """The module of :class:`KimiDelta`."""

    def __init__(self, sizes: KimiDelta, kernels: KernelsSection) -> None:
        super().__init__(kernels)
        self.head_dim, self.bound = sizes.linear_key_head_dim, sizes.decay_bound
        dim, width, heads = sizes.hidden_size, sizes.width, sizes.linear_num_value_heads
        wide = kernels.without_fp8
        self.wq, self.wk, self.wv = (Linear(dim, width, kernels) for _ in "qkv")
        self.wb = Linear(dim, heads, wide)
        self.low_rank_gates = sizes.low_rank_gates
        if self.low_rank_gates:
            self.wf_a, self.wg_a = (Linear(dim, self.head_dim, x) for x in (wide, kernels))
            self.wf_b, self.wg_b = (Linear(self.head_dim, width, x) for x in (wide, kernels))
        else:
            self.wf, self.wg = (Linear(dim, width, x) for x in (wide, kernels))
        filters = (sizes.weights[f"conv_{x}"].shape for x in "qkv")
        self.conv_q, self.conv_k, self.conv_v = (nn.Parameter(torch.empty(x)) for x in filters)
        self.a_log, self.dt_bias = (nn.Parameter(torch.empty(n)) for n in (heads, width))
        self.norm = RMSNorm(self.head_dim, sizes.norm_eps, kernels, late=True)
        self.wo = Linear(width, dim, kernels)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Mix tokens; returns [B, S, D] in ``x_BSD``'s dtype."""
        x_TD = x_BSD.flatten(0, 1)
        wide = torch.promote_types(x_BSD.dtype, torch.float32)
        # 1. What a token contributes, and how far the state decays before it.
        q, k, v = linears(x_TD, (self.wq, self.wk, self.wv))
        decays = self.wf_b(self.wf_a(x_TD)) if self.low_rank_gates else self.wf(x_TD)
        gates = self.wg_b(self.wg_a(x_TD)) if self.low_rank_gates else self.wg(x_TD)
        values = (q, k, v, decays, self.wb(x_TD))
        weights = (self.conv_q, self.conv_k, self.conv_v, self.a_log, self.dt_bias)
        # 2. What each head reads from its state.
        o_THK = self.over_heads(self._mixed, values, weights, context)
        o_THK = o_THK.unflatten(1, (-1, self.head_dim))
        # 3. The gated result.
        normed_TC = self.norm(o_THK.to(wide)).flatten(1)
        gated_TC = normed_TC * sigmoid(gates.to(wide), fusible=not self.batch_invariant)
        return self.wo(gated_TC.to(x_BSD.dtype)).view_as(x_BSD)

    def _mixed(
        self,
        values: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        context: Context,
    ) -> torch.Tensor:
        """Return what each head reads from its state, [T, H * K]."""
        q, k, v, decays_TC, b_TH = values
        *filters, a_log_H, dt_bias_C = weights
        wide = torch.promote_types(q.dtype, torch.float32)
        inputs = zip("qkv", (q, k, v), filters, (True, True, False), strict=True)
        convolving = {
            name: Convolution(x_TC, filters_C1J, self.head_dim, normalised)
            for name, x_TC, filters_C1J, normalised in inputs
        }
        q_THK, k_THK, v_THK = self.convolved(convolving, context)
        fusible = not self.batch_invariant
        rates_H1 = exp(a_log_H.to(wide), fusible=fusible)[:, None]
        decays_THK = (decays_TC.to(wide) + dt_bias_C).unflatten(1, (-1, self.head_dim))
        if self.bound is None:
            g_THK = -rates_H1 * softplus(decays_THK, fusible=fusible)
        else:
            g_THK = self.bound * sigmoid(rates_H1 * decays_THK, fusible=fusible)
        rule_inputs = (q_THK, k_THK, v_THK, g_THK, sigmoid(b_TH, fusible=fusible))
        scale = self.head_dim**-0.5
        return self.ruled(rule_inputs, context, kda, kda_step, scale=scale).flatten(1)
