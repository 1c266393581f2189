"""The frame of the expert MLPs in bf16: two projections around an activation, between permutations.

An expert MLP is two :class:`Projection` and one :class:`Activation`. The ops of
:mod:`moetrain.kernels.experts.mlp` and :mod:`moetrain.kernels.experts.clamped_mlp` choose these and
differ in nothing else. A row is a token's copy for one of its experts e, with a routing weight w::

    a = first(x)        h = activation(a, w)        y[t] = sum over the rows of t of second(h)

    projection(x) = x @ W[e]^T + scale * (x @ A[e]^T) @ B[e]^T + bias[e]

A projection has an adapter (A, B), a bias, both, or neither. The first one's bias is added by the
activation. The second one's is weighted by w, as the activation's result is.

:func:`forward` and :func:`backward` are bodies of ops, and :func:`reference` is plain torch, which
autograd differentiates. The backward keeps the tokens and ``a`` alone: it recomputes ``h`` while it
differentiates the activation, and copies the tokens' rows again.

Legend: T tokens, K experts a token, R rows sorted by expert, E experts, G groups of rows that share
an adapter, D model width, F expert width, A width of ``a`` (2F with a gate, F without), M and N
outer and inner widths of a projection, r rank of the adapters.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from moetrain.kernels.experts import grouped
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
from moetrain.kernels.experts.permutation import (
    ExpertIndices,
    permute,
    rows_of,
    sum_rows,
    unpermute,
)
from moetrain.kernels.experts.products import grouped_mm, grouped_weight_grad
from moetrain.kernels.experts.relu2 import relu2, relu2_gradients
from moetrain.kernels.experts.swiglu import swiglu, swiglu_gradients
from moetrain.runtime.backend import Backend, tl, triton

_COLUMNS, _WARPS = 1024, 2
"""Columns of a program of the kernels below, and its warps: as the kernels' of permutation."""


class Activation(Protocol):
    """Computes ``h_RF`` of ``a_RA``, each row times its routing weight."""

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
    """SwiGLU or GeGLU (:mod:`moetrain.kernels.experts.swiglu`)."""

    kind: str
    """``silu`` or ``gelu``, the activation of the gate."""

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


class Adapter(NamedTuple):
    """LoRA beside a projection, with its matrices and its bias frozen."""

    a: torch.Tensor
    """[E, r, N], or [S, E, r, N] of S tenants; any strides."""
    b: torch.Tensor
    """[E, M, r], or [S, E, M, r]; any strides."""
    scale: float
    """Multiplies what the adapter adds."""
    offsets_G: torch.Tensor
    """int32, the end row of each group that shares an A and a B: the experts' own, or those of
    :func:`~moetrain.kernels.experts.mlp.tenant_offsets`."""


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
        a, b, scale, offsets_G = self.adapter
        if a.dim() == 4:  # group e * S + s has expert e's matrices of tenant s
            a, b = (x.transpose(0, 1).flatten(0, 1) for x in (a, b))
        low_Rr = grouped_mm(x_RN, a.transpose(1, 2), offsets_G)
        wide_RM = grouped_mm(x_RN, self.w_EMN.detach().transpose(1, 2), offsets_E)
        return wide_RM + scale * grouped_mm(low_Rr, b.transpose(1, 2), offsets_G)


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


def forward(
    tokens: Tokens,
    num_rows: int,
    first: Projection,
    second: Projection,
    activation: Activation,
) -> tuple[torch.Tensor, Saved]:
    """Return ``y_TD``, the sum of each token's experts, and what is saved; within an op."""
    x_TD, weights_TK, slot_row_TK, offsets_E = tokens
    # 1. Copy the tokens to rows, sorted by expert.
    x_RD, weights_R = rows_of(x_TD, weights_TK, slot_row_TK, num_rows)
    # 2. First projection and activation, in one kernel where there is one.
    is_silu = isinstance(activation, Gated) and activation.kind == "silu"
    if is_silu and first.adapter is None and grouped.takes_gated(x_RD, first.w_EMN):
        a_RA, h_RF = grouped.gated(x_RD, first.w_EMN, offsets_E, weights_R)
        u_Rr = x_RD.new_empty(0)
        del x_RD
    else:
        a_RA, u_Rr = first.product(x_RD, offsets_E)
        del x_RD
        h_RF = activation.forward(a_RA, weights_R, offsets_E, "triton")
    # 3. Second projection.
    y_RD, v_Rr = second.product(h_RF, offsets_E)
    del h_RF
    # 4. Sum each token's rows, and with them their weighted biases.
    y_TD = torch.empty_like(x_TD)
    if second.bias_EM is None:
        sum_rows(y_RD, slot_row_TK, y_TD)
    else:
        _sum_biased_rows(y_RD, tokens, second.bias_EM, y_TD)
    return y_TD, Saved(a_RA, u_Rr, v_Rr)


def backward(
    dy_TD: torch.Tensor,
    tokens: Tokens,
    first: Projection,
    second: Projection,
    activation: Activation,
    saved: Saved,
    is_trained: bool,
) -> Gradients:
    """Differentiate :func:`forward`, within an op; ``dy_TD`` is contiguous.

    Parameters get gradients if ``is_trained``, adapters always.
    """
    x_TD, weights_TK, slot_row_TK, offsets_E = tokens
    # 1. Copy the upstream gradient to rows.
    dy_RD, weights_R = rows_of(dy_TD, weights_TK, slot_row_TK, saved.a_RA.shape[0])
    # 2. Back through the second projection and the activation, which recomputes h.
    dh_RF, dv_Rr = second.input_gradient(dy_RD, offsets_E)
    h_RF = torch.empty_like(dh_RF)
    da_RA, d_weights_R = activation.gradients(dh_RF, saved.a_RA, weights_R, offsets_E, h_RF)
    del dh_RF  # before the products below, where memory peaks
    # 3. Gradients of the second projection's parameters.
    d_first = d_second = ProjectionGradients()
    if is_trained or second.adapter is not None:
        d_second = second.gradients(dy_RD, h_RF, saved.v_Rr, dv_Rr, weights_R, offsets_E)
    del dy_RD, h_RF
    # 4. Back through the first projection, and sum each token's rows.
    dx_RD, du_Rr = first.input_gradient(da_RA, offsets_E)
    dx_TD = torch.empty_like(x_TD)
    d_weights_TK = torch.empty_like(weights_TK)
    sum_rows(dx_RD, slot_row_TK, dx_TD, d_weights_R, d_weights_TK)
    if second.bias_EM is not None:
        _add_bias_products(dy_TD, tokens, second.bias_EM, d_weights_TK)
    # 5. Gradients of the first projection's parameters. The tokens' rows take the memory of dx_RD,
    # which is summed by now.
    if is_trained or first.adapter is not None:
        x_RD, _ = rows_of(x_TD, None, slot_row_TK, len(dx_RD), dx_RD)
        d_first = first.gradients(da_RA, x_RD, saved.u_Rr, du_Rr, None, offsets_E)
    return Gradients(dx_TD, d_weights_TK, d_first, d_second)


def reference(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    first: Projection,
    second: Projection,
    activation: Activation,
) -> torch.Tensor:
    """Compute ``y_TD`` of :func:`forward` in plain torch."""
    offsets_E = indices.offsets_E
    x_RD, weights_R = permute(x_TD, weights_TK, indices, "reference")
    a_RA = first.reference(x_RD, offsets_E)
    h_RF = activation.forward(a_RA, weights_R, offsets_E, "reference")
    y_RD = second.reference(h_RF, offsets_E)
    if second.bias_EM is not None:
        bias_RD = second.bias_EM[expert_of_rows(offsets_E, len(y_RD))]
        y_RD = y_RD + weights_R.to(y_RD.dtype)[:, None] * bias_RD
    return unpermute(y_RD, indices, "reference")


def _sum_biased_rows(
    y_RD: torch.Tensor, tokens: Tokens, bias_ED: torch.Tensor, y_TD: torch.Tensor
) -> None:
    """Sum each token's rows, and the biases of its experts times their routing weights."""
    num_tokens, width = y_TD.shape
    experts = tokens.offsets_E.shape[0]
    _sum_kernel[(num_tokens, triton.cdiv(width, _COLUMNS))](
        y_RD, tokens.slot_row_TK, tokens.weights_TK, tokens.offsets_E, bias_ED, y_TD, width,
        experts, SLOTS=tokens.slot_row_TK.shape[1], EXPERTS=triton.next_power_of_2(experts),
        BLOCK=_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip


def _add_bias_products(
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
