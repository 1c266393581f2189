"""Grouped-query attention whose result is multiplied by a gate, a projection of the token.

With ``W_g`` [H * d, D], or [H, D] for a gate that all elements of a head share
(arXiv 2505.06708 compares both),

    y = W_o (f(W_g x) * attention(x)),    f = sigmoid or softplus

Qwen3-Next's gate is another layout of the first: its rows are in ``wq``
(:attr:`~moetrain.models.attention.GroupedQueryAttention.output_gate`).

Legend: B batch, S sequence, D model width, H query heads, d head width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.norm.elementwise import sigmoid, softplus
from moetrain.models.architecture import FP32, Weight, Workload, linear
from moetrain.models.attention import Attention, GroupedQueryAttention
from moetrain.models.layers import Context, Linear, linears
from moetrain.models.rules import COLWISE

GateOf = Literal["element", "head"]
"""The elements that a gate multiplies: one of a head's result, or all of them."""
GateActivation = Literal["sigmoid", "softplus"]
# A rank may have fewer rows than products in fp8 take.
_OF_HEADS = replace(COLWISE, gather=torch.float32)


@dataclass(frozen=True, kw_only=True)
class GatedAttention(GroupedQueryAttention):
    """Describes grouped-query attention with a gate that has a matrix of its own."""

    gate_of: GateOf = "element"
    gate_activation: GateActivation = "sigmoid"

    def build(self, kernels: KernelsSection, moe: MoeSection) -> Attention:
        return _GatedAttention(self, kernels)

    @property
    def gate_width(self) -> int:
        """The number of gates."""
        return self.num_heads if self.gate_of == "head" else self.value_widths[0]

    @property
    def weights(self) -> Mapping[str, Weight]:
        rule = _OF_HEADS if self.gate_of == "head" else COLWISE
        return {**super().weights, **linear("wg", self.gate_width, self.hidden_size, rule)}

    def activations(self, share: Workload) -> float:
        """Return the bytes of attention, the gates before and after ``f``, and the gated result."""
        w = share.width
        gates = 2 * w + (FP32 if self.gate_activation == "softplus" else 0)
        own = gates * self.gate_width + w * self.value_widths[0]
        return super().activations(share) + share.tokens * own / share.tp

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        found = dict(super().saved(share))
        found["linear"] += share.tokens * share.width * self.gate_width / share.tp
        return found


class _GatedAttention(Attention):
    """The module of :class:`GatedAttention`."""

    def __init__(self, sizes: GatedAttention, kernels: KernelsSection) -> None:
        super().__init__(sizes, kernels)
        self.gate_of, self.gate_activation = sizes.gate_of, sizes.gate_activation
        own = kernels.without_fp8 if sizes.gate_of == "head" else kernels
        self.wg = Linear(sizes.hidden_size, sizes.gate_width, own)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Mix tokens; returns [B, S, D] in ``x_BSD``'s dtype."""
        q, k, v = linears(x_BSD, (self.wq, self.wk, self.wv))
        gate = self._activated(self.wg(x_BSD))
        y_BSHv = self.attend(q, k, v, context)
        own = 1 if self.gate_of == "head" else y_BSHv.shape[-1]
        return self.wo((y_BSHv * torch.unflatten(gate, -1, (-1, own))).flatten(-2))

    def _activated(self, gate: torch.Tensor) -> torch.Tensor:
        """Return ``f(gate)`` in ``gate``'s dtype; softplus is computed in at least fp32."""
        fusible = not self.batch_invariant
        if self.gate_activation == "sigmoid":
            return sigmoid(gate, fusible=fusible)
        wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
        return softplus(wide, fusible=fusible).to(gate.dtype)
