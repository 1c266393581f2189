"""Mamba-2: a mixer of tokens with a decaying state of fixed size (arXiv 2405.21060).

    x, B, C = silu(convolution of W h)      dt = max(softplus(W h + b), s)      g = -exp(a) dt
    y = W norm((o + d x) * silu(W h)),    o by :mod:`moetrain.kernels.linear_attention.ssd`

Each W is a projection of its own, and s is ``mamba_min_step``. Convolutions are causal. Each
document starts with a zero state, and its convolutions see no earlier document. A group of heads
shares B and C, and the norm is over the elements of all heads of a group.

Ranks that divide heads also divide groups, with the heads of each. If all heads are one group
(:class:`OneGroupMamba2`), every rank computes B and C, and the norm adds up the squares of all
ranks.

Left out on purpose: biases of the projections, which no published model has.

Legend: B batch, S sequence, T = B * S tokens, D model width, H heads, G groups, V width of a head,
K width of a state, N width of a group's heads together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
    ConfigJson,
    Weight,
    Workload,
)
from moetrain.models.family import Rename, WeightMap
from moetrain.models.hf.files import error
from moetrain.models.hf.take_rows import TakeRows
from moetrain.models.layers import Context, Linear, linears
from moetrain.models.parts.linear_states import (
    FILTER,
    RATES,
    STEPS,
    LinearMixer,
)
from moetrain.models.rules import COLWISE, ROWWISE, WIDE_NORM, Rule

_NARROW = replace(COLWISE, gather=torch.float32)
"""The rule of the projection to dt. It has one output for each head: too few for fp8."""

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
        found |= {"a_log": Weight((heads,), RATES), "dt_bias": Weight((heads,), STEPS)}
        found |= {"d": Weight((heads,), _SKIP), "norm": Weight((v_dim,), WIDE_NORM)}
        return found | {"wo.weight": Weight((dim, v_dim), ROWWISE)}

    def _widths_on(self, share: Workload) -> tuple[int, int]:
        """Return :attr:`widths`, of which each tensor parallel rank has a part."""
        return self.widths

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
        (v_dim, k_dim), w = self._widths_on(share), share.width
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
        (v_dim, k_dim), w = self._widths_on(share), share.width
        products = share.tokens * w * (2 * v_dim + 2 * k_dim) / share.tp
        recurrence = v_dim * w + self.mamba_num_heads * FP32
        return {
            "attention": share.tokens * recurrence / share.tp,
            "linear": products + share.own_tokens * w * self.hidden_size,
        }


_WHOLE = Rule("replicate")
_WHOLE_BIAS = Rule("replicate", init="zeros", decay=False)


@dataclass(frozen=True, kw_only=True)
class OneGroupMamba2(Mamba2):
    """Describes a Mamba-2 mixer whose heads all share B and C."""

    divided: ClassVar[Mapping[str, str]] = {"mamba_num_heads": "tp"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mamba_num_groups != 1:
            raise ValueError(f"mamba_num_groups {self.mamba_num_groups} is not 1")

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "Mamba":
        return _OneGroupMamba(self, kernels)

    @property
    def weights(self) -> Mapping[str, Weight]:
        whole: Mapping[str, Rule] = {
            f"{name}{end}": rule
            for x in "bc"
            for name, end, rule in (
                (f"w{x}", ".weight", _WHOLE),
                (f"conv_{x}", "", replace(FILTER, style="replicate")),
                (f"conv_{x}", "_bias", _WHOLE_BIAS),
            )
        }
        own = super().weights
        return {name: own[name]._replace(rule=whole.get(name, own[name].rule)) for name in own}

    def _widths_on(self, share: Workload) -> tuple[int, int]:
        v_dim, k_dim = self.widths
        return v_dim, k_dim * share.tp

    def exchanged(self, share: Workload) -> dict[str, float]:
        v_dim, k_dim = self.widths
        results = v_dim * FP32 / share.width
        spread = (v_dim + self.mamba_num_heads + results) / share.tp + 2 * k_dim * share.cp
        return share.received(spread, spread / share.cp)


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
        x, b, c = linears(h_TD, (self.wx, self.wb, self.wc))
        y = self._over_heads((x, self.wdt(h_TD)), (b, c), context)
        return self.wo(self._normed(y * F.silu(z.to(y.dtype))).to(dtype)).view_as(h_BSD)

    def _over_heads(
        self, own: Sequence[torch.Tensor], of_groups: Sequence[torch.Tensor], context: Context
    ) -> torch.Tensor:
        """Call :meth:`_mixed` for all heads, with values of heads and of groups."""
        weights = (*self._own_weights(), *self._group_weights())
        return self.over_heads(self._mixed, (*own, *of_groups), weights, context)

    def _own_weights(self) -> list[torch.Tensor]:
        """Return the weights of heads, as :meth:`_mixed` takes them."""
        return [self.conv_x, self.a_log, self.dt_bias, self.d, *self._biases("x")]

    def _group_weights(self) -> list[torch.Tensor]:
        """Return the weights of groups, as :meth:`_mixed` takes them."""
        return [self.conv_b, self.conv_c, *self._biases("bc")]

    def _mixed(
        self,
        values: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        context: Context,
    ) -> torch.Tensor:
        """Return o + d x, what the heads read from their states plus the skip: [T, H * V], fp32."""
        x_TC, dt_TH, b_TC, c_TC = values
        biases: tuple[torch.Tensor | None, ...] = (None, None, None)
        if len(weights) == 6:
            conv_x, a_log, dt_bias, d, conv_b, conv_c = weights
        else:
            conv_x, a_log, dt_bias, d, bias_x, conv_b, conv_c, bias_b, bias_c = weights
            biases = bias_x, bias_b, bias_c
        dtype = dt_TH.dtype
        wide = torch.promote_types(dtype, torch.float32)
        fusible = not self.batch_invariant
        widths = (self.head_dim, self.state_dim, self.state_dim)
        convolving, filters = (x_TC, b_TC, c_TC), (conv_x, conv_b, conv_c)
        each = zip("xbc", convolving, filters, widths, biases, strict=True)
        inputs = {name: Convolution(y, f, width, False, b) for name, y, f, width, b in each}
        x_THV, b_TGK, c_TGK = self.convolved(inputs, context)
        x_THV = x_THV.to(wide)
        dt_TH = softplus(dt_TH.to(wide) + dt_bias, fusible=fusible).clamp(min=self.min_step)
        u_THV = (x_THV * dt_TH[..., None]).to(dtype)
        g_TH = -exp(a_log.to(wide), fusible=fusible) * dt_TH
        o_THV = self.ruled((c_TGK, b_TGK, u_THV, g_TH), context, ssd, ssd_step)
        return (o_THV.to(wide) + x_THV * d.to(wide)[:, None]).flatten(1)

    def _biases(self, names: str) -> list[torch.Tensor]:
        """Return the biases of the convolutions ``names``; empty: they have none."""
        found = (getattr(self, f"conv_{name}_bias", None) for name in names)
        return [bias for bias in found if bias is not None]

    def _normed(self, y: torch.Tensor) -> torch.Tensor:
        """Normalise the elements of each group's heads together."""
        y_TGN = y.unflatten(-1, (-1, self.group_dim))
        if self.states is not None:  # generation needs an op whose rows do not affect one another
            y_TGN = rms_norm(y_TGN, y.new_ones(self.group_dim), self.eps, self.backend)
            return y_TGN.flatten(1) * self.norm.to(y.dtype)
        y_TGN = y_TGN * torch.rsqrt(y_TGN.square().mean(-1, keepdim=True) + self.eps)
        return y_TGN.flatten(1) * self.norm.to(y.dtype)


class _OneGroupMamba(Mamba):
    """The module of :class:`OneGroupMamba2`.

    ``sum_squares`` is a plain attribute, as that of :class:`~moetrain.models.layers.WideNorm`.
    """

    sum_squares: Callable[[torch.Tensor], torch.Tensor] | None = None

    def _over_heads(
        self, own: Sequence[torch.Tensor], of_groups: Sequence[torch.Tensor], context: Context
    ) -> torch.Tensor:
        return self.over_heads(
            self._mixed,
            own,
            self._own_weights(),
            context,
            whole_values=of_groups,
            whole_weights=self._group_weights(),
        )

    def _normed(self, y: torch.Tensor) -> torch.Tensor:
        """Normalise the elements of all heads together, those of other ranks included."""
        if self.sum_squares is None:
            return super()._normed(y)
        squares_T1 = self.sum_squares(y.square().sum(-1, keepdim=True))
        return y * torch.rsqrt(squares_T1 / self.group_dim + self.eps) * self.norm.to(y.dtype)


# ---- config.json and files ---------------------------------------------------------------------


def check_step_limit(config: ConfigJson) -> None:
    """Raise ConfigError if ``time_step_limit`` of ``config`` would clip steps; null is none."""
    low, high = (*(config["time_step_limit"] or ()), None, None)[:2]
    if low not in (0, None) or high not in (None, float("inf"), {"__float__": "Infinity"}):
        problem = f"time_step_limit {config['time_step_limit']!r:.80} is not supported"
        raise error("config.json", f"{problem}, only 0 to infinity")


def mamba_map(ours: str, theirs: str, part: Callable[[Any], Mamba2]) -> WeightMap:
    """Map the tensors of a mixer, which files have under ``theirs``.

    Args:
        ours: the module's name, with ``{layer}``.
        part: returns the mixer of an architecture.
    """

    def rows(arch: Any) -> tuple[int, ...]:
        """Return the numbers of rows of z, x, B, C and dt in their common projection."""
        return tuple(part(arch).inputs.values())

    def convolved_rows(arch: Any) -> tuple[int, ...]:
        return rows(arch)[1:4]

    projections = tuple(f"{ours}.w{x}.weight" for x in ("z", "x", "b", "c", "dt"))
    filters, biases = (tuple(f"{ours}.conv_{x}{end}" for x in "xbc") for end in ("", "_bias"))
    return (
        TakeRows(projections, f"{theirs}.in_proj.weight", rows),
        TakeRows(filters, f"{theirs}.conv1d.weight", convolved_rows),
        TakeRows(biases, f"{theirs}.conv1d.bias", convolved_rows),
        Rename(f"{ours}.a_log", f"{theirs}.A_log"),
        Rename(f"{ours}.d", f"{theirs}.D"),
        Rename(f"{ours}.dt_bias", f"{theirs}.dt_bias"),
        Rename(f"{ours}.norm", f"{theirs}.norm.weight"),
        Rename(f"{ours}.wo", f"{theirs}.out_proj"),
    )
