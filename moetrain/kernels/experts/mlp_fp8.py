"""The expert MLP of :mod:`moetrain.kernels.experts.mlp` with products in e4m3.

With q() for quantisation by rows (of weights by rows or, for gradients, by columns) and r(t) for
the rows that token t is copied to::

    a = q(x)[r] @ q([gate; up])^T       h = swiglu(a, w)        y = sum over r of q(h) @ q(down)^T

    dh = q(dy)[r] @ q(down)                       d_down    = q(dy)[r]^T @ h
    da, dw = swiglu'(dh)                          d_gate_up = da^T @ q(x)[r]
    dx = sum over r of q(da) @ q([gate; up])

The weights' gradients are products in bf16: they sum over many rows, and their operands lie the
wrong way for e4m3. They take ``x`` and ``dy`` dequantised, so that a gradient does not depend on
which rank an expert is on: a token sent from another arrives in e4m3.

With ``narrow_grads`` they are products in e4m3, too: of the same quantised rows, transposed expert
by expert (t() of :mod:`moetrain.kernels.quant.transposed`), which depends on nothing but these::

    d_down    = t(q(dy)[r]) @ t(q(h))^T       d_gate_up = t(q(da)) @ t(q(x)[r])^T

SwiGLU writes e4m3 at once, since a program holds a whole row, and so knows the scale. It rounds to
the rows' dtype first, as if its result were quantised after it.

Legend: T tokens, K experts a token, R rows sorted by expert, E experts, D model width, F expert
width.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any

import torch

from moetrain.kernels.backend import (
    INTERPRETED,
    Backend,
    refusal,
    tl,
    triton,
    use_fast,
    worth_saving,
)
from moetrain.kernels.experts.mlp import check_experts, register_experts
from moetrain.kernels.experts.permutation import ExpertIndices, permute, sum_rows, unpermute
from moetrain.kernels.experts.products import grouped_mm, grouped_weight_grad
from moetrain.kernels.experts.swiglu import swiglu
from moetrain.kernels.quant.e4m3 import (
    E4M3,
    MULTIPLE,
    Quantised,
    quantise_columns,
    quantise_rows,
    quantise_to_rows,
    quantise_tokens_and_rows,
    row_launch,
    scale_of,
    to_e4m3,
)
from moetrain.kernels.quant.products import scaled_grouped_mm
from moetrain.kernels.quant.transposed import place_columns, scaled_weight_grad, transpose_rows


def expert_mlp_fp8(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    backend: Backend = "auto",
    *,
    narrow_grads: bool = False,
) -> torch.Tensor:
    """Compute :func:`~moetrain.kernels.experts.mlp.expert_mlp` in e4m3; D and F are in 16s.

    With ``narrow_grads`` the weights' gradients are products in e4m3, too.
    """
    inputs = (x_TD, weights_TK, indices, w_gate_up_E2FD, w_down_EDF)
    check_experts("expert_mlp_fp8", *inputs)
    _, dim, width = w_down_EDF.shape
    if dim % MULTIPLE or width % MULTIPLE:
        raise refusal("expert_mlp_fp8", f"multiples of {MULTIPLE}", widths=(dim, width))
    if use_fast(backend, x_TD):
        tensors = (x_TD, weights_TK, indices.slot_row_TK, indices.offsets_E)
        matrices = (w_gate_up_E2FD, w_down_EDF)
        contiguous = (x.contiguous() for x in (*tensors, *matrices))
        return _expert_mlp_fp8(*contiguous, narrow_grads, indices.row_slot_R.shape[0])[0]
    rounded_TD = _Rounded.apply(x_TD, True, False)
    x_RD, weights_R = permute(rounded_TD, weights_TK, indices, "reference")
    a_R2F = _GroupedProduct.apply(x_RD, w_gate_up_E2FD, indices.offsets_E, narrow_grads)
    h_RF = swiglu(a_R2F, weights_R, "reference")
    y_RD = _GroupedProduct.apply(h_RF, w_down_EDF, indices.offsets_E, narrow_grads)
    return _Rounded.apply(unpermute(y_RD, indices, "reference"), False, True)


class _Rounded(torch.autograd.Function):
    """An identity that rounds its input, its gradient, or both to what e4m3 holds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_value: bool, is_gradient: bool) -> torch.Tensor:
        ctx.is_gradient = is_gradient
        return quantise_rows(x, "reference").to(x.dtype) if is_value else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (g,) = grads
        return quantise_rows(g, "reference").to(g.dtype) if ctx.is_gradient else g, None, None


class _GroupedProduct(torch.autograd.Function):
    """The reference's ``q(x) @ q(w)^T`` by groups, multiplied in ``x``'s dtype."""

    @staticmethod
    def forward(
        ctx: Any, x_RM: torch.Tensor, w_ENM: torch.Tensor, offsets_E: torch.Tensor, narrow: bool
    ) -> torch.Tensor:
        ctx.narrow = narrow
        ctx.save_for_backward(x_RM, w_ENM, offsets_E)
        x, w = (quantise_rows(x, "reference").to(x_RM.dtype) for x in (x_RM, w_ENM))
        return grouped_mm(x, w.transpose(1, 2), offsets_E)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        (g_RN,), (x_RM, w_ENM, offsets_E) = grads, ctx.saved_tensors
        g = quantise_rows(g_RN, "reference")
        w = quantise_columns(w_ENM, "reference").to(g_RN.dtype)
        grad_x = grouped_mm(g.to(g_RN.dtype), w.transpose(1, 2), offsets_E)
        if ctx.narrow:
            columns = place_columns(offsets_E, len(x_RM), "reference")
            rows = (g, quantise_rows(x_RM, "reference"))
            pair = (transpose_rows(x, columns, None, "reference") for x in rows)
            grad_w = scaled_weight_grad(*pair, columns, g_RN.dtype, "reference")
        else:
            grad_w = grouped_weight_grad(g_RN.contiguous(), x_RM, offsets_E)
        return grad_x, grad_w, None, None


@torch.library.custom_op("moetrain::expert_mlp_fp8", mutates_args=())
def _expert_mlp_fp8(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    narrow_grads: bool,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = x_TD.dtype
    x_RD, weights_R, _ = quantise_to_rows(x_TD, weights_TK, slot_row_TK, num_rows)
    gate_up = quantise_rows(w_gate_up_E2FD, "triton")
    a_R2F = scaled_grouped_mm(x_RD, gate_up, offsets_E, dtype)
    del x_RD, gate_up
    h_RF = _swiglu_quantised(a_R2F, weights_R)
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
    narrow_grads: bool,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if narrow_grads and is_trained:
        return _narrow_backward(
            dy_TD, x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up_E2FD, w_down_EDF, a_R2F
        )
    rows, dtype = a_R2F.shape[0], dy_TD.dtype
    tokens = (weights_TK, slot_row_TK, rows)
    narrow, weights_R, dy_RD = quantise_to_rows(dy_TD, *tokens, wide=is_trained)
    down = quantise_columns(w_down_EDF, "triton")
    dh_RF = scaled_grouped_mm(narrow, down, offsets_E, dtype)
    del narrow, down
    narrow, da_R2F, d_weights_R, h_RF = _swiglu_backward_quantised(dh_RF, a_R2F, weights_R)
    d_down = grouped_weight_grad(dy_RD, h_RF, offsets_E) if is_trained else dy_TD.new_empty(0)
    del dh_RF, dy_RD  # before the products below, where memory peaks
    gate_up = quantise_columns(w_gate_up_E2FD, "triton")
    dx_RD = scaled_grouped_mm(narrow, gate_up, offsets_E, dtype)
    del gate_up
    dx_TD = torch.empty_like(x_TD)
    d_weights_TK = torch.empty_like(weights_TK)
    sum_rows(dx_RD, slot_row_TK, dx_TD, d_weights_R, d_weights_TK)
    if not is_trained:
        return dx_TD, d_weights_TK, dy_TD.new_empty(0), d_down
    del dx_RD
    _, _, x_RD = quantise_to_rows(x_TD, *tokens, narrow=False, wide=True)
    d_gate_up = grouped_weight_grad(da_R2F, x_RD, offsets_E)
    return dx_TD, d_weights_TK, d_gate_up, d_down


def _narrow_backward(
    dy_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    a_R2F: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiate with all products in e4m3; tokens are transposed without a copy of rows."""
    rows, dtype = a_R2F.shape[0], dy_TD.dtype
    dy_T, dy_R, weights_R, token_R = quantise_tokens_and_rows(dy_TD, weights_TK, slot_row_TK, rows)
    dh_RF = scaled_grouped_mm(dy_R, quantise_columns(w_down_EDF, "triton"), offsets_E, dtype)
    del dy_R
    da_R, d_weights_R, h_R = _swiglu_backward_narrow(dh_RF, a_R2F, weights_R)
    del dh_RF
    columns = place_columns(offsets_E, rows, "triton")
    dy_P = transpose_rows(dy_T, columns, token_R, "triton")
    h_P = transpose_rows(h_R, columns, None, "triton")
    d_down = scaled_weight_grad(dy_P, h_P, columns, dtype, "triton")
    del dy_T, dy_P, h_R, h_P
    dx_RD = scaled_grouped_mm(da_R, quantise_columns(w_gate_up_E2FD, "triton"), offsets_E, dtype)
    dx_TD = torch.empty_like(x_TD)
    d_weights_TK = torch.empty_like(weights_TK)
    sum_rows(dx_RD, slot_row_TK, dx_TD, d_weights_R, d_weights_TK)
    del dx_RD
    da_P = transpose_rows(da_R, columns, None, "triton")
    x_P = transpose_rows(quantise_rows(x_TD, "triton"), columns, token_R, "triton")
    d_gate_up = scaled_weight_grad(da_P, x_P, columns, dtype, "triton")
    return dx_TD, d_weights_TK, d_gate_up, d_down


register_experts(_expert_mlp_fp8, _expert_mlp_fp8_backward)
worth_saving("experts", torch.ops.moetrain.expert_mlp_fp8.default)


def _swiglu_quantised(gate_up_R2F: torch.Tensor, weights_R: torch.Tensor) -> Quantised:
    """Return SwiGLU's ``y_RF`` in e4m3, within an op; inputs are contiguous."""
    rows = gate_up_R2F.shape[0]
    width = gate_up_R2F.shape[1] // 2
    scales_R = gate_up_R2F.new_empty(rows, dtype=torch.float32)
    values_RF = gate_up_R2F.new_empty(rows, width, dtype=E4M3)
    if rows:
        _quantised_forward_kernel[(rows,)](
            gate_up_R2F, weights_R, values_RF, scales_R, width,
            BY_HAND=INTERPRETED, **row_launch(width),
        )  # fmt: skip
    return Quantised(values_RF, scales_R)


def _swiglu_backward_quantised(
    dy_RF: torch.Tensor, gate_up_R2F: torch.Tensor, weights_R: torch.Tensor
) -> tuple[Quantised, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``d_gate_up`` in e4m3 and unquantised, ``d_weights`` and SwiGLU's ``y_RF``."""
    d_gate_up, y_RF = torch.empty_like(gate_up_R2F), torch.empty_like(dy_RF)
    given = (dy_RF, gate_up_R2F, weights_R)
    narrow, d_weights = _launch_backward(*given, d_gate_up, y_RF, None)
    return narrow, d_gate_up, d_weights, y_RF


def _swiglu_backward_narrow(
    dy_RF: torch.Tensor, gate_up_R2F: torch.Tensor, weights_R: torch.Tensor
) -> tuple[Quantised, torch.Tensor, Quantised]:
    """Return ``d_gate_up``, ``d_weights`` and SwiGLU's ``y_RF``; the first and last in e4m3."""
    y = Quantised(
        torch.empty_like(dy_RF, dtype=E4M3), dy_RF.new_empty(len(dy_RF), dtype=torch.float32)
    )
    narrow, d_weights = _launch_backward(dy_RF, gate_up_R2F, weights_R, None, *y)
    return narrow, d_weights, y


def _launch_backward(
    dy_RF: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    d_gate_up: torch.Tensor | None,
    y_RF: torch.Tensor,
    y_scales_R: torch.Tensor | None,
) -> tuple[Quantised, torch.Tensor]:
    """Return ``d_gate_up`` in e4m3 and ``d_weights``, and fill the last three, where they are."""
    rows, width = dy_RF.shape
    values_R2F = torch.empty_like(gate_up_R2F, dtype=E4M3)
    scales_R, d_weights = dy_RF.new_empty(rows, dtype=torch.float32), torch.empty_like(weights_R)
    if rows:
        _quantised_backward_kernel[(rows,)](
            dy_RF, gate_up_R2F, weights_R, values_R2F, scales_R, d_gate_up, d_weights, y_RF,
            y_scales_R, width, BY_HAND=INTERPRETED, **row_launch(width),
        )  # fmt: skip
    return Quantised(values_R2F, scales_R), d_weights


@triton.jit
def _rounded(x, like):
    """``x`` rounded to the dtype that ``like`` points to, in fp32."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _quantised_forward_kernel(
    gate_up, weights, values, scales, width, BLOCK: tl.constexpr, BY_HAND: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    gate_at = gate_up + row * 2 * width + col
    gate = tl.load(gate_at, col < width, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, col < width, other=0.0).to(tl.float32)
    w = tl.load(weights + row).to(tl.float32)
    y = _rounded(gate * tl.sigmoid(gate) * up * w, gate_up)
    scale, inverse = scale_of(tl.max(tl.abs(y), axis=0))
    tl.store(values + row * width + col, to_e4m3(y * inverse, BY_HAND), col < width)
    tl.store(scales + row, scale)


@triton.jit
def _quantised_backward_kernel(
    dy, gate_up, weights, values, scales, d_gate_up, d_weights, y, y_scales, width,
    BLOCK: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < width
    gate_at = row * 2 * width + col
    gate = tl.load(gate_up + gate_at, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + gate_at + width, mask, other=0.0).to(tl.float32)
    d_y = tl.load(dy + row * width + col, mask, other=0.0).to(tl.float32)
    w = tl.load(weights + row).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    d_gate = _rounded(d_y * w * up * (s + silu * (1 - s)), gate_up)
    d_up = _rounded(d_y * w * silu, gate_up)
    scale, inverse = scale_of(tl.max(tl.maximum(tl.abs(d_gate), tl.abs(d_up)), axis=0))
    tl.store(values + gate_at, to_e4m3(d_gate * inverse, BY_HAND), mask)
    tl.store(values + gate_at + width, to_e4m3(d_up * inverse, BY_HAND), mask)
    tl.store(scales + row, scale)
    if d_gate_up is not None:
        tl.store(d_gate_up + gate_at, d_gate, mask)
        tl.store(d_gate_up + gate_at + width, d_up, mask)
    if y_scales is None:
        tl.store(y + row * width + col, silu * up * w, mask)
    else:  # as in the forward
        given = _rounded(silu * up * w, gate_up)
        scale, inverse = scale_of(tl.max(tl.abs(given), axis=0))
        tl.store(y + row * width + col, to_e4m3(given * inverse, BY_HAND), mask)
        tl.store(y_scales + row, scale)
    tl.store(d_weights + row, tl.sum(d_y * silu * up, axis=0))
