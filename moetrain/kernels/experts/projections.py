"""The parts of an expert MLP: projections, adapters, biases and activations.

An expert MLP is two :class:`Projection` around one :class:`Activation`. A row is a token's copy for
one of its experts e, with a routing weight w::

    a = first(x)        h = activation(a, w)        y[t] = sum over the rows of t of second(h)

    projection(x) = x @ W[e]^T + scale * (x @ A[e]^T) @ B[e]^T + bias[e]

A projection has an adapter (A, B), a bias, both, or neither. The first one's bias is added by the
activation. The second one's is weighted by w, as the activation's result is.
:mod:`moetrain.kernels.experts.frame` computes these formulas in bf16, and
:mod:`moetrain.kernels.experts.frame_fp8` in e4m3.

Legend: T tokens, K experts a token, R rows sorted by expert, E experts, G groups of rows that share
an adapter, D model width, F expert width, A width of ``a`` (2F with a gate, F without), M and N
outer and inner widths of a projection, r rank of the adapters.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch

from moetrain.kernels.experts.adapters import (
    adapted_product,
    adapted_product_backward,
    narrow_grad,
)
from moetrain.kernels.experts.clamped_swiglu import (
    clamped_swiglu,
    clamped_swiglu_gradients,
    expert_of,
    expert_of_rows,
    sum_by_expert,
)
from moetrain.kernels.experts.products import grouped_mm, grouped_weight_grad
from moetrain.kernels.experts.relu2 import relu2, relu2_gradients
from moetrain.kernels.experts.swiglu import GATES, read_gate, swiglu, swiglu_gradients
from moetrain.runtime.backend import Backend, tl, triton

_COLUMNS, _WARPS = 1024, 2
"""Columns and warps of a program of the kernels below, the same as in those of permutation."""


class Activation(Protocol):
    """Computes ``h_RF`` of ``a_RA``, each row times its routing weight.

    A new one is a class here and a row of :data:`ACTIVATIONS`, or a row of ``GATES`` alone if it
    multiplies ``up`` by an activation of the gate. Routing, products, biases, adapters, e4m3 and
    copies of experts are the same for all of them.
    """

    has_gate: ClassVar[bool]
    """True: A is 2F, gate's columns before up's; False: A is F."""

    def forward(
        self, a_RA: torch.Tensor, weights_R: torch.Tensor, offsets_E: torch.Tensor, backend: Backend
    ) -> torch.Tensor:
        """Return ``h_RF``."""
        ...

    def gradients(
        self,
        dh_RF: torch.Tensor,
        a_RA: torch.Tensor,
        weights_R: torch.Tensor,
        offsets_E: torch.Tensor,
        h_RF: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``da_RA`` and ``d_weights_R``, within an op; ``h_RF`` receives the activation."""
        ...


@dataclass(frozen=True)
class Gated:
    """SwiGLU, GeGLU and the like (:mod:`moetrain.kernels.experts.swiglu`)."""

    has_gate: ClassVar[bool] = True

    kind: str
    """The activation of the gate, a name of ``GATES``, ``limited`` or ``oai``."""

    def forward(
        self, a_RA: torch.Tensor, weights_R: torch.Tensor, offsets_E: torch.Tensor, backend: Backend
    ) -> torch.Tensor:
        return swiglu(a_RA, weights_R, backend, self.kind)

    def gradients(
        self,
        dh_RF: torch.Tensor,
        a_RA: torch.Tensor,
        weights_R: torch.Tensor,
        offsets_E: torch.Tensor,
        h_RF: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return swiglu_gradients(dh_RF, a_RA, weights_R, self.kind, h_RF)


@dataclass(frozen=True)
class SquaredRelu:
    """Squared ReLU, without a gate (:mod:`moetrain.kernels.experts.relu2`)."""

    has_gate: ClassVar[bool] = False

    def forward(
        self, a_RA: torch.Tensor, weights_R: torch.Tensor, offsets_E: torch.Tensor, backend: Backend
    ) -> torch.Tensor:
        return relu2(a_RA, weights_R, backend)

    def gradients(
        self,
        dh_RF: torch.Tensor,
        a_RA: torch.Tensor,
        weights_R: torch.Tensor,
        offsets_E: torch.Tensor,
        h_RF: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return relu2_gradients(dh_RF, a_RA, weights_R, h_RF)


@dataclass(frozen=True)
class Clamped:
    """The clamped SwiGLU of GPT-OSS (:mod:`moetrain.kernels.experts.clamped_swiglu`)."""

    has_gate: ClassVar[bool] = True

    bias_E2F: torch.Tensor
    """The first projection's bias."""
    limit: float
    """The largest pre-activation."""
    alpha: float
    """The factor of the gate within the sigmoid."""

    def forward(
        self, a_RA: torch.Tensor, weights_R: torch.Tensor, offsets_E: torch.Tensor, backend: Backend
    ) -> torch.Tensor:
        return clamped_swiglu(
            a_RA, weights_R, self.bias_E2F, offsets_E, self.limit, self.alpha, backend
        )

    def gradients(
        self,
        dh_RF: torch.Tensor,
        a_RA: torch.Tensor,
        weights_R: torch.Tensor,
        offsets_E: torch.Tensor,
        h_RF: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return clamped_swiglu_gradients(
            dh_RF, a_RA, weights_R, self.bias_E2F, offsets_E, self.limit, self.alpha, h_RF
        )


ACTIVATIONS: Mapping[str, Activation] = {
    **{kind: Gated(kind) for kind in GATES},
    "relu2": SquaredRelu(),
}
"""The activations of experts without biases, by the names that ops, parts and architectures use.

Gated ones also have names with numbers (:func:`activation_of`)."""


def activation_of(name: str) -> Activation:
    """Return the activation called ``name``: a key of :data:`ACTIVATIONS`, or a gate's with numbers
    (:func:`~moetrain.kernels.experts.swiglu.read_gate`).

    Raises ValueError: there is none.
    """
    known = ACTIVATIONS.get(name)
    if known is not None:
        return known
    read_gate(name)
    return Gated(name)


def is_swiglu(activation: Activation) -> bool:
    """Return True for SwiGLU, for which there are fused kernels."""
    return isinstance(activation, Gated) and activation.kind == "silu"


class Adapter(NamedTuple):
    """LoRA beside a projection whose matrices and bias are frozen."""

    a: torch.Tensor
    """[E, r, N], or [S, E, r, N] of S tenants; any strides."""
    b: torch.Tensor
    """[E, M, r], or [S, E, M, r]; any strides."""
    scale: float
    """Multiplies what the adapter adds."""
    offsets_G: torch.Tensor
    """int32, the end row of each group that shares an A and a B: the experts' own, or those of
    :func:`~moetrain.kernels.experts.mlp.tenant_offsets`."""

    def reference(self, x_RN: torch.Tensor) -> torch.Tensor:
        """Return what the adapter adds to rows ``x_RN``, [R, M], in plain torch, differentiably."""
        a, b = self.a, self.b
        if a.dim() == 4:  # group e * S + s has expert e's matrices of tenant s
            a, b = (x.transpose(0, 1).flatten(0, 1) for x in (a, b))
        low_Rr = grouped_mm(x_RN, a.transpose(1, 2), self.offsets_G)
        return self.scale * grouped_mm(low_Rr, b.transpose(1, 2), self.offsets_G)


class ProjectionGradients(NamedTuple):
    """The gradients of one projection's parameters, each None where it has none."""

    w: torch.Tensor | None = None
    """[E, M, N]."""
    bias: torch.Tensor | None = None
    """[E, M]."""
    a: torch.Tensor | None = None
    """In the shape of :attr:`Adapter.a`."""
    b: torch.Tensor | None = None
    """In the shape of :attr:`Adapter.b`."""

    def of_matrices(self) -> list[torch.Tensor]:
        """Return the gradients of matrices and bias, without those that are None."""
        return [x for x in (self.w, self.bias) if x is not None]

    def of_adapter(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of A and B; the projection has an adapter."""
        assert self.a is not None
        assert self.b is not None
        return self.a, self.b


class Projection(NamedTuple):
    """One of the two projections, of all experts; its products leave the bias out."""

    w_EMN: torch.Tensor
    """The matrices."""
    bias_EM: torch.Tensor | None = None
    """The bias of each expert; None: there is none."""
    adapter: Adapter | None = None
    """LoRA beside frozen matrices; None: there is none."""

    def product(
        self, x_RN: torch.Tensor, offsets_E: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result [R, M], and the product with A [R, r] ([0] without an adapter)."""
        if self.adapter is None:
            return grouped_mm(x_RN, self.w_EMN.transpose(1, 2), offsets_E), x_RN.new_empty(0)
        a, b, scale, offsets_G = self.adapter
        return adapted_product(x_RN, self.w_EMN, a, b, scale, offsets_E, offsets_G)

    def input_gradient(
        self, dy_RM: torch.Tensor, offsets_E: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of :meth:`product`'s input and of its second result."""
        if self.adapter is None:
            return grouped_mm(dy_RM, self.w_EMN, offsets_E), dy_RM.new_empty(0)
        a, b, scale, offsets_G = self.adapter
        return adapted_product_backward(dy_RM, self.w_EMN, a, b, scale, offsets_E, offsets_G)

    def gradients(
        self,
        dy_RM: torch.Tensor,
        x_RN: torch.Tensor,
        low_Rr: torch.Tensor,
        d_low_Rr: torch.Tensor,
        weights_R: torch.Tensor | None,
        offsets_E: torch.Tensor,
    ) -> ProjectionGradients:
        """Return the parameters' gradients: the adapter's, or else those of matrices and bias.

        Args:
            low_Rr, d_low_Rr: the second result of :meth:`product`, and its gradient.
            weights_R: the routing weights by which rows of the bias were multiplied; None: ones.
        """
        if self.adapter is not None:
            a, b, scale, offsets_G = self.adapter
            return ProjectionGradients(
                a=narrow_grad(d_low_Rr, x_RN, a, offsets_G),
                b=narrow_grad(low_Rr, dy_RM, b.mT, offsets_G, scale).mT,
            )
        has_bias = self.bias_EM is not None
        return ProjectionGradients(
            w=grouped_weight_grad(dy_RM, x_RN, offsets_E),
            bias=sum_by_expert(dy_RM, weights_R, offsets_E) if has_bias else None,
        )

    def reference(self, x_RN: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        """Return the result of :meth:`product` in plain torch, differentiably."""
        if self.adapter is None:
            return grouped_mm(x_RN, self.w_EMN.transpose(1, 2), offsets_E)
        wide_RM = grouped_mm(x_RN, self.w_EMN.detach().transpose(1, 2), offsets_E)
        return wide_RM + self.adapter.reference(x_RN)

    def biased(
        self, y_RM: torch.Tensor, weights_R: torch.Tensor, offsets_E: torch.Tensor
    ) -> torch.Tensor:
        """Return ``y_RM`` with the bias times the routing weights, in plain torch."""
        if self.bias_EM is None:
            return y_RM
        bias_RM = self.bias_EM[expert_of_rows(offsets_E, len(y_RM))]
        return y_RM + weights_R.to(y_RM.dtype)[:, None] * bias_RM


class Tokens(NamedTuple):
    """The tokens that experts take, and how they become rows."""

    x_TD: torch.Tensor
    """The tokens."""
    weights_TK: torch.Tensor
    """Routing weights, any floating dtype."""
    slot_row_TK: torch.Tensor
    """The row of each slot, as :class:`~moetrain.kernels.experts.permutation.ExpertIndices` has
    it."""
    offsets_E: torch.Tensor
    """int32, the end row of each expert."""


class Saved(NamedTuple):
    """The results of the products that the backward takes."""

    a_RA: torch.Tensor
    """The first projection's, without its bias."""
    u_Rr: torch.Tensor
    """The first projection's product with A; [0] without an adapter."""
    v_Rr: torch.Tensor
    """The second projection's product with A; [0] without an adapter."""


class Gradients(NamedTuple):
    """The result of :func:`backward`."""

    x_TD: torch.Tensor
    """The gradient of the tokens."""
    weights_TK: torch.Tensor
    """The gradient of the routing weights; unspecified where a slot has no row."""
    first: ProjectionGradients
    """The gradients of the first projection."""
    second: ProjectionGradients
    """The gradients of the second projection."""


def sum_biased_rows(
    y_RD: torch.Tensor, tokens: Tokens, bias_ED: torch.Tensor, y_TD: torch.Tensor
) -> None:
    """Write to ``y_TD`` the sum of each token's rows and its experts' routing-weighted biases."""
    num_tokens, width = y_TD.shape
    experts = tokens.offsets_E.shape[0]
    _sum_kernel[(num_tokens, triton.cdiv(width, _COLUMNS))](
        y_RD, tokens.slot_row_TK, tokens.weights_TK, tokens.offsets_E, bias_ED, y_TD, width,
        experts, SLOTS=tokens.slot_row_TK.shape[1], EXPERTS=triton.next_power_of_2(experts),
        BLOCK=_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip


def add_bias_products(
    dy_TD: torch.Tensor, tokens: Tokens, bias_ED: torch.Tensor, d_weights_TK: torch.Tensor
) -> None:
    """Add ``<dy, bias>`` of each slot's expert to the gradient of its routing weight."""
    experts, width = bias_ED.shape
    _product_kernel[(dy_TD.shape[0],)](
        dy_TD, tokens.slot_row_TK, tokens.offsets_E, bias_ED, d_weights_TK, width, experts,
        SLOTS=tokens.slot_row_TK.shape[1], EXPERTS=triton.next_power_of_2(experts),
        BLOCK=_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip


@triton.jit
def _sum_kernel(
    rows, slot_row, weights, offsets, bias, x, width, experts,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    # Unrolled, so that the loads of all rows are in flight together.
    for k in tl.static_range(SLOTS):
        row = tl.load(slot_row + token * SLOTS + k).to(tl.int64)
        expert = expert_of(offsets, row, experts, EXPERTS).to(tl.int64)
        # An absent row has no columns, and no weight.
        mask = column < tl.where(row >= 0, width, 0)
        weight = tl.load(weights + token * SLOTS + k, row >= 0, other=0.0).to(tl.float32)
        value = tl.load(rows + row * width + column, mask, other=0.0).to(tl.float32)
        own = tl.load(bias + expert * width + column, mask, other=0.0).to(tl.float32)
        total += tl.fma(own, weight, value)
    tl.store(x + token * width + column, total, column < width)


@triton.jit
def _product_kernel(
    dy, slot_row, offsets, bias, d_weights, width, experts,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(SLOTS):
        row = tl.load(slot_row + token * SLOTS + k).to(tl.int64)
        expert = expert_of(offsets, row, experts, EXPERTS).to(tl.int64)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < tl.where(row >= 0, width, 0)
            upstream = tl.load(dy + token * width + column, mask, other=0.0).to(tl.float32)
            total += upstream * tl.load(bias + expert * width + column, mask, other=0.0).to(
                tl.float32
            )
        at = d_weights + token * SLOTS + k
        before = tl.load(at, row >= 0, other=0.0)
        tl.store(at, before + tl.sum(total, axis=0).to(before.dtype), row >= 0)
