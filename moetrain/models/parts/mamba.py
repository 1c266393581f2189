"""Mamba-2: a mixer of tokens with a decaying state of fixed size (arXiv 2405.21060).

    x, B, C = silu(convolution of W h)      dt = max(softplus(W h + b), s)      g = -exp(a) dt
    y = W norm((o + d x) * silu(W h)),    o by :mod:`moetrain.kernels.linear_attention.ssd`

Each W is a projection of its own, and s is ``mamba_min_step``. Convolutions are causal. Each
document starts with a zero state, and its convolutions see no earlier document. A group of heads
shares B and C, and the norm is over the elements of all heads of a group.

Left out on purpose: biases of the projections, which no published model has.

Legend: B batch, S sequence, T = B * S tokens, D model width, H heads, G groups, V width of a head,
K width of a state, N width of a group's heads together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.linear_attention.convolution import Convolution
from moetrain.kernels.linear_attention.gated_delta import CHUNK
from moetrain.kernels.linear_attention.ssd import ssd
from moetrain.kernels.linear_attention.step import ssd_step
from moetrain.kernels.norm.elementwise import exp, softplus
from moetrain.kernels.norm.rms_norm import rms_norm
from moetrain.models.architecture import (
    FP32,
    AttentionPart,
    Weight,
    Workload,
)
from moetrain.models.layers import Context, Linear, linears
from moetrain.models.parts.linear_states import (
    FILTER,
    RATES,
    LinearMixer,
)
from moetrain.models.rules import COLWISE, ROWWISE, WIDE_NORM, Rule

_NARROW = replace(COLWISE, gather=torch.float32)
"""The rule of the projection to dt. It has one output for each head: too few for fp8."""


def _draw_steps(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw values whose softplus is log-uniform between 0.001 and 0.1 (arXiv 2312.00752)."""
    steps = rows.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_()
    return steps + (-torch.expm1(-steps)).log()


_STEPS = replace(RATES, init=_draw_steps)
_SKIP = replace(RATES, init="ones")


@dataclass(frozen=True, kw_only=True)
class Mamba2(AttentionPart):
    """Describes a Mamba-2 mixer."""

    name: ClassVar[str] = "mamba"
    carries_state: ClassVar[bool] = True
    divided: ClassVar[Mapping[str, str]] = {"mamba_num_heads": "tp", "mamba_num_groups": "tp"}

    mamba_num_heads: int
    mamba_head_dim: int
    mamba_num_groups: int
    mamba_state_dim: int
    mamba_conv_kernel_dim: int
    mamba_conv_bias: bool = True
    mamba_min_step: float = 0.0
    """The lower bound of dt."""
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "num_groups", "state_dim", "conv_kernel_dim"):
            if getattr(self, f"mamba_{name}") == 0:
                raise ValueError(f"mamba_{name} is 0, but a layer is a Mamba-2 mixer")
        heads = self.mamba_num_heads
        groups = self.mamba_num_groups
        if heads % groups:
            problem = f"mamba_num_heads {heads} is not a multiple of"
            raise ValueError(f"{problem} mamba_num_groups {groups}")

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "Mamba":
        return Mamba(self, kernels)

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of all heads together, and of all groups' B; C is as wide as B."""
        return (
            self.mamba_num_heads * self.mamba_head_dim,
            self.mamba_num_groups * self.mamba_state_dim,
        )

    @property
    def inputs(self) -> Mapping[str, int]:
        """The names and widths of the projections of the input."""
        v_dim, k_dim = self.widths
        return {"z": v_dim, "x": v_dim, "b": k_dim, "c": k_dim, "dt": self.mamba_num_heads}

    @property
    def weights(self) -> Mapping[str, Weight]:
        dim = self.hidden_size
        heads = self.mamba_num_heads
        v_dim = self.widths[0]
        found = {f"w{x}.weight": Weight((n, dim), COLWISE) for x, n in self.inputs.items()}
        found["wdt.weight"] = Weight((heads, dim), _NARROW)
        taps = (1, self.mamba_conv_kernel_dim)
        found |= {f"conv_{x}": Weight((self.inputs[x], *taps), FILTER) for x in "xbc"}
        if self.mamba_conv_bias:
            zeros = Rule("colwise", init="zeros", decay=False)
            found |= {f"conv_{x}_bias": Weight((self.inputs[x],), zeros) for x in "xbc"}
        found |= {"a_log": Weight((heads,), RATES), "dt_bias": Weight((heads,), _STEPS)}
        found |= {"d": Weight((heads,), _SKIP), "norm": Weight((v_dim,), WIDE_NORM)}
        return found | {"wo.weight": Weight((dim, v_dim), ROWWISE)}

    def products_per_token(self, seq_len: int) -> float:
        """Count the products with the weights, and two with each head's state.

        One of these writes to the state, and the other reads it by C.
        """
        v_dim = self.widths[0]
        weights = self.hidden_size * (sum(self.inputs.values()) + v_dim)
        return weights + 2 * v_dim * self.mamba_state_dim

    def activations(self, share: Workload) -> float:
        """Return the bytes of the projections' results, B, C, dt x, and the recurrence's result.

        The last is counted twice: before and after its gate.
        """
        (v_dim, k_dim), w = self.widths, share.width
        elements = (2 * v_dim + 2 * k_dim) + (v_dim + 2 * k_dim) + 2 * v_dim
        if not share.is_compiled:  # convolutions, the gate and the norm keep fp32 instead
            taps = self.mamba_conv_kernel_dim
            elements = 2 * v_dim + 2 * k_dim
            elements += ((taps + 1) * (v_dim + 2 * k_dim) + 6 * v_dim) * FP32 / w
        heads = self.mamba_num_heads * 5 * FP32
        return share.tokens * (elements * w + heads) / share.tp

    def exchanged(self, share: Workload) -> dict[str, float]:
        v_dim, k_dim = self.widths
        results = v_dim * FP32 / share.width
        spread = (v_dim + 2 * k_dim + self.mamba_num_heads + results) / share.tp
        return share.received(spread, spread / share.cp)  # both methods exchange heads

    def state_bytes(self, width: int) -> float:
        (v_dim, k_dim), heads = self.widths, self.mamba_num_heads
        tokens = CHUNK + self.mamba_conv_kernel_dim - 1
        kept = tokens * (v_dim + 2 * k_dim) * width + CHUNK * heads * FP32
        return v_dim * self.mamba_state_dim * FP32 + kept

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        (v_dim, k_dim), w = self.widths, share.width
        products = share.tokens * w * (2 * v_dim + 2 * k_dim) / share.tp
        recurrence = v_dim * w + self.mamba_num_heads * FP32
        return {
            "attention": share.tokens * recurrence / share.tp,
            "linear": products + share.own_tokens * w * self.hidden_size,
        }


class Mamba(LinearMixer):
    """The module of :class:`Mamba2`."""

    conv_x: nn.Parameter
    conv_b: nn.Parameter
    conv_c: nn.Parameter
    a_log: nn.Parameter
    dt_bias: nn.Parameter
    d: nn.Parameter
    norm: nn.Parameter

    def __init__(self, sizes: Mamba2, kernels: KernelsSection) -> None:
        super().__init__(kernels)
        self.head_dim = sizes.mamba_head_dim
        self.state_dim = sizes.mamba_state_dim
        self.min_step = sizes.mamba_min_step
        self.eps = sizes.norm_eps
        self.group_dim = sizes.widths[0] // sizes.mamba_num_groups
        dim = sizes.hidden_size
        widths = sizes.inputs
        self.wz, self.wx, self.wb, self.wc = (Linear(dim, widths[x], kernels) for x in "zxbc")
        self.wdt = Linear(dim, widths["dt"], kernels.without_fp8)
        self.wo = Linear(sizes.widths[0], dim, kernels)
        for name, weight in sizes.weights.items():
            if "." not in name:
                self.register_parameter(name, nn.Parameter(torch.empty(weight.shape)))

    def forward(self, h_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Mix tokens; returns [B, S, D] in ``h_BSD``'s dtype."""
        h_TD = h_BSD.flatten(0, 1)
        dtype = h_BSD.dtype
        # z is projected separately: for a few rows, one launch computes at most three projections.
        z = self.wz(h_TD)
        values = (*linears(h_TD, (self.wx, self.wb, self.wc)), self.wdt(h_TD))
        biases = [x for x in map(self._bias, "xbc") if x is not None]
        weights = (self.conv_x, self.conv_b, self.conv_c, self.a_log, self.dt_bias, self.d, *biases)
        y = self.over_heads(self._mixed, values, weights, context)
        return self.wo(self._normed(y * F.silu(z.to(y.dtype))).to(dtype)).view_as(h_BSD)

    def _mixed(
        self,
        values: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        context: Context,
    ) -> torch.Tensor:
        """Return o + d x, what the heads read from their states plus the skip: [T, H * V], fp32."""
        *convolving, dt_TH = values
        *filters, a_log, dt_bias, d = weights[:6]
        dtype = dt_TH.dtype
        wide = torch.promote_types(dtype, torch.float32)
        fusible = not self.batch_invariant
        widths = (self.head_dim, self.state_dim, self.state_dim)
        biases = weights[6:] or (None, None, None)
        each = zip("xbc", convolving, filters, widths, biases, strict=True)
        inputs = {name: Convolution(y, f, width, False, b) for name, y, f, width, b in each}
        x_THV, b_TGK, c_TGK = self.convolved(inputs, context)
        x_THV = x_THV.to(wide)
        dt_TH = softplus(dt_TH.to(wide) + dt_bias, fusible=fusible).clamp(min=self.min_step)
        u_THV = (x_THV * dt_TH[..., None]).to(dtype)
        g_TH = -exp(a_log.to(wide), fusible=fusible) * dt_TH
        o_THV = self.ruled((c_TGK, b_TGK, u_THV, g_TH), context, ssd, ssd_step)
        return (o_THV.to(wide) + x_THV * d.to(wide)[:, None]).flatten(1)

    def _bias(self, name: str) -> torch.Tensor | None:
        return getattr(self, f"conv_{name}_bias", None)

    def _normed(self, y: torch.Tensor) -> torch.Tensor:
        """Normalise the elements of each group's heads together."""
        y_TGN = y.unflatten(-1, (-1, self.group_dim))
        if self.states is not None:  # generation needs an op whose rows do not affect one another
            y_TGN = rms_norm(y_TGN, y.new_ones(self.group_dim), self.eps, self.backend)
            return y_TGN.flatten(1) * self.norm.to(y.dtype)
        y_TGN = y_TGN * torch.rsqrt(y_TGN.square().mean(-1, keepdim=True) + self.eps)
        return y_TGN.flatten(1) * self.norm.to(y.dtype)
