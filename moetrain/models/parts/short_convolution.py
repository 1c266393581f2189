"""Gated short convolutions: a mixer of tokens that sees a few tokens back (LFM2, arXiv 2511.23404).

    y = W_o (c * conv(b * x)),    b, c, x = W_b h, W_c h, W_x h

The convolution is causal and has a filter for each channel. It sees zeros before the start of a
document. Nothing is activated: the two products with projections of the token are the gates.

In generation a sequence keeps the last inputs of the convolution. In context parallelism channels
are exchanged as heads are.

Left out on purpose: biases, which no published model has.

Legend: B batch, S sequence, T = B * S tokens, D model width, J taps of the convolution.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.linear_attention.convolution import Convolution
from moetrain.models.architecture import FP32, AttentionPart, Weight, Workload
from moetrain.models.layers import Context, Linear, linears
from moetrain.models.parts.linear_states import FILTER, LinearMixer
from moetrain.models.rules import COLWISE, ROWWISE

_MOST_CHANNELS = 128
"""Channels that generation's kernel computes together, at most."""


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(AttentionPart):
    """Describes a gated short convolution."""

    name: ClassVar[str] = "conv"
    carries_state: ClassVar[bool] = True
    divided: ClassVar[Mapping[str, str]] = {"hidden_size": "tp"}

    conv_kernel_dim: int
    """J, the number of tokens that the convolution sees, the present one included."""

    def __post_init__(self) -> None:
        if self.conv_kernel_dim == 0:
            raise ValueError("conv_kernel_dim is 0, but a layer is a short convolution")

    def build(self, kernels: KernelsSection, moe: MoeSection) -> "_GatedConvolution":
        return _GatedConvolution(self, kernels)

    @property
    def weights(self) -> Mapping[str, Weight]:
        dim = self.hidden_size
        found = {f"w{x}.weight": Weight((dim, dim), COLWISE) for x in "bcx"}
        found["filters"] = Weight((dim, 1, self.conv_kernel_dim), FILTER)
        return found | {"wo.weight": Weight((dim, dim), ROWWISE)}

    def products_per_token(self, seq_len: int) -> float:
        """Count the products with the four matrices; the filters are no matrix product."""
        return 4 * self.hidden_size**2

    def activations(self, share: Workload) -> float:
        """Return the bytes of the three projections, and of the result before ``wo``.

        Without the compiler, the products of both gates are kept too, the latter's factor with the
        inputs of each tap in fp32.
        """
        elements = 4.0
        if not share.is_compiled:
            elements += 1 + self.conv_kernel_dim * FP32 / share.width
        return share.tokens * share.width * elements * self.hidden_size / share.tp

    def exchanged(self, share: Workload) -> dict[str, float]:
        spread = 2 * self.hidden_size / share.tp
        return share.received(spread, spread / share.cp)  # both methods exchange channels

    def state_bytes(self, width: int) -> float:
        return (self.conv_kernel_dim - 1) * self.hidden_size * width

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        products = share.tokens * 3 * self.hidden_size / share.tp
        return {"linear": share.width * (products + share.own_tokens * self.hidden_size)}


class _GatedConvolution(LinearMixer):
    """The module of :class:`ShortConvolution`."""

    def __init__(self, sizes: ShortConvolution, kernels: KernelsSection) -> None:
        super().__init__(kernels)
        dim = sizes.hidden_size
        self.wb, self.wc, self.wx, self.wo = (Linear(dim, dim, kernels) for _ in range(4))
        self.filters = nn.Parameter(torch.empty(dim, 1, sizes.conv_kernel_dim))

    def forward(self, h_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Mix tokens; returns [B, S, D] in ``h_BSD``'s dtype."""
        h_TD = h_BSD.flatten(0, 1)
        b_TD, c_TD, x_TD = linears(h_TD, (self.wb, self.wc, self.wx))
        y_TD = self.over_heads(self._mixed, (b_TD * x_TD,), (self.filters,), context)
        return self.wo(c_TD * y_TD).view_as(h_BSD)

    def _mixed(
        self,
        values: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        context: Context,
    ) -> torch.Tensor:
        """Return the convolution of some channels."""
        (x_TC,), (filters_C1J,) = values, weights
        convolution = Convolution(
            x_TC=x_TC,
            filters_C1J=filters_C1J,
            width=math.gcd(x_TC.shape[1], _MOST_CHANNELS),
            normalised=False,
            activated=False,
        )
        return self.convolved({"x": convolution}, context)[0].flatten(1)
