"""The expert MLP of :mod:`moetrain.kernels.experts.mlp` with products in e4m3.

With q() for quantisation by rows (of weights by rows or, for gradients, by columns) and r(t) for
the rows that token t is copied to::

    a = q(x)[r] @ q([gate; up])^T       h = swiglu(a, w)        y = sum over r of q(h) @ q(down)^T

and for an upstream ``dy``::

    dh = q(dy)[r] @ q(down)                       d_down    = q(dy)[r]^T @ h
    da, dw = swiglu'(dh)                          d_gate_up = da^T @ q(x)[r]
    dx = sum over r of q(da) @ q([gate; up])

The weights' gradients, to the right, are products in bf16: they sum over many rows, and their
operands lie the wrong way for e4m3. They take ``x`` and ``dy`` dequantised, because a token sent
from another rank arrives in e4m3: a gradient does not depend on which rank an expert is on. They
take ``h`` and ``da`` unquantised.

Permutation is part of the op, because a token is quantised once and then copied in e4m3, which is
half of the bytes. The backward keeps ``a`` alone by row: the rows of ``x`` are copied again from
the tokens, of which there are K times fewer.

Legend: T tokens, K experts a token, R rows sorted by expert, E experts, D model width, F expert
width.
"""

from typing import Any

import torch

from moetrain.kernels.backend import Backend, use_fast, worth_saving
from moetrain.kernels.experts.grouped_mm import grouped_mm, grouped_weight_grad
from moetrain.kernels.experts.mlp import check_experts, register_experts
from moetrain.kernels.experts.permutation import (
    ExpertIndices,
    permute_reference,
    sum_rows,
    unpermute_reference,
)
from moetrain.kernels.experts.swiglu import (
    swiglu_backward_quantised,
    swiglu_quantised,
    swiglu_reference,
)
from moetrain.kernels.quant.e4m3 import (
    MULTIPLE,
    quantise_columns,
    quantise_columns_reference,
    quantise_rows,
    quantise_rows_reference,
    quantise_to_rows,
)
from moetrain.kernels.quant.products import scaled_grouped_mm


def expert_mlp_fp8(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Compute :func:`~moetrain.kernels.experts.mlp.expert_mlp` in e4m3; arguments as there.

    Raises:
        ValueError: for other shapes or dtypes, or widths that are not multiples of 16.
    """
    inputs = (x_TD, weights_TK, indices, w_gate_up_E2FD, w_down_EDF)
    check_experts("expert_mlp_fp8", *inputs)
    _, dim, width = w_down_EDF.shape
    if dim % MULTIPLE or width % MULTIPLE:
        raise ValueError(
            f"expert_mlp_fp8: the widths are {dim} and {width}; it takes multiples of {MULTIPLE}"
        )
    if not use_fast(backend, x_TD):
        return expert_mlp_fp8_reference(*inputs)
    tensors = (x_TD, weights_TK, indices.slot_row_TK, indices.offsets_E, w_gate_up_E2FD, w_down_EDF)
    return _expert_mlp_fp8(*(x.contiguous() for x in tensors), indices.row_slot_R.shape[0])[0]


def expert_mlp_fp8_reference(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
) -> torch.Tensor:
    """Compute :func:`expert_mlp_fp8` in plain torch."""
    x_RD, weights_R = permute_reference(_Rounded.apply(x_TD, True, False), weights_TK, indices)
    a_R2F = _GroupedProduct.apply(x_RD, w_gate_up_E2FD, indices.offsets_E)
    h_RF = swiglu_reference(a_R2F, weights_R)
    y_TD = unpermute_reference(_GroupedProduct.apply(h_RF, w_down_EDF, indices.offsets_E), indices)
    return _Rounded.apply(y_TD, False, True)


class _Rounded(torch.autograd.Function):
    """An identity that rounds its input, its gradient, or both to what e4m3 holds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_value: bool, is_gradient: bool) -> torch.Tensor:
        ctx.is_gradient = is_gradient
        return quantise_rows_reference(x).to(x.dtype) if is_value else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (g,) = grads
        return quantise_rows_reference(g).to(g.dtype) if ctx.is_gradient else g, None, None


class _GroupedProduct(torch.autograd.Function):
    """The reference's ``q(x) @ q(w)^T`` by groups, multiplied in ``x``'s dtype."""

    @staticmethod
    def forward(
        ctx: Any, x_RM: torch.Tensor, w_ENM: torch.Tensor, offsets_E: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x_RM, w_ENM, offsets_E)
        x, w = (quantise_rows_reference(x).to(x_RM.dtype) for x in (x_RM, w_ENM))
        return grouped_mm(x, w.transpose(1, 2), offsets_E)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (g_RN,), (x_RM, w_ENM, offsets_E) = grads, ctx.saved_tensors
        g = quantise_rows_reference(g_RN).to(g_RN.dtype)
        w = quantise_columns_reference(w_ENM).to(g_RN.dtype)
        grad_x = grouped_mm(g, w.transpose(1, 2), offsets_E)
        return grad_x, grouped_weight_grad(g_RN.contiguous(), x_RM, offsets_E), None


@torch.library.custom_op("moetrain::expert_mlp_fp8", mutates_args=())
def _expert_mlp_fp8(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y_TD``, and ``a_R2F`` for the backward."""
    dtype = x_TD.dtype
    x_RD, weights_R, _ = quantise_to_rows(x_TD, weights_TK, slot_row_TK, num_rows)
    gate_up = quantise_rows(w_gate_up_E2FD, "triton")
    a_R2F = scaled_grouped_mm(x_RD, gate_up, offsets_E, dtype)
    del x_RD, gate_up
    h_RF = swiglu_quantised(a_R2F, weights_R)
    y_RD = scaled_grouped_mm(h_RF, quantise_rows(w_down_EDF, "triton"), offsets_E, dtype)
    y_TD = torch.empty_like(x_TD)
    sum_rows(y_RD, slot_row_TK, y_TD)
    return y_TD, a_R2F


@torch.library.custom_op("moetrain::expert_mlp_fp8_backward", mutates_args=())
def _expert_mlp_fp8_backward(
    dy_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    a_R2F: torch.Tensor,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weights, w_gate_up and w_down (both empty, unless ``is_trained``)."""
    rows, dtype = a_R2F.shape[0], dy_TD.dtype
    tokens = (weights_TK, slot_row_TK, rows)
    narrow, weights_R, dy_RD = quantise_to_rows(dy_TD, *tokens, wide=is_trained)
    down = quantise_columns(w_down_EDF, "triton")
    dh_RF = scaled_grouped_mm(narrow, down, offsets_E, dtype)
    del narrow, down
    da = swiglu_backward_quantised(dh_RF, a_R2F, weights_R)
    d_down = grouped_weight_grad(dy_RD, da.y_RF, offsets_E) if is_trained else dy_TD.new_empty(0)
    del dh_RF, dy_RD  # before the products below, where memory peaks
    gate_up = quantise_columns(w_gate_up_E2FD, "triton")
    dx_RD = scaled_grouped_mm(da.narrow, gate_up, offsets_E, dtype)
    del gate_up
    dx_TD, d_weights_TK = torch.empty_like(x_TD), torch.empty_like(weights_TK)
    sum_rows(dx_RD, slot_row_TK, dx_TD, da.weights_R, d_weights_TK)
    if not is_trained:
        return dx_TD, d_weights_TK, dy_TD.new_empty(0), d_down
    del dx_RD
    _, _, x_RD = quantise_to_rows(x_TD, *tokens, narrow=False, wide=True)
    d_gate_up = grouped_weight_grad(da.gate_up_R2F, x_RD, offsets_E)
    return dx_TD, d_weights_TK, d_gate_up, d_down


register_experts(_expert_mlp_fp8, _expert_mlp_fp8_backward)
worth_saving("experts", torch.ops.moetrain.expert_mlp_fp8.default)
