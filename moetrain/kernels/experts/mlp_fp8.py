"""The expert MLP of :mod:`moetrain.kernels.experts.mlp` with products in e4m3.

q() quantises by the precision's recipe (:mod:`moetrain.kernels.quant.recipes`): rows by row or
tile, weights by row or block, and for gradients weights by column or block. r(t) are the rows that
token t is copied to::

    a = q(x)[r] @ q([gate; up])^T       h = swiglu(a, w)        y = sum over r of q(h) @ q(down)^T

    dh = q(dy)[r] @ q(down)                       d_down    = q(dy)[r]^T @ h
    da, dw = swiglu'(dh)                          d_gate_up = da^T @ q(x)[r]
    dx = sum over r of q(da) @ q([gate; up])

The weights' gradients are products in bf16: they sum over many rows, and their operands are stored
along the wrong dimension for e4m3. They take ``x`` and ``dy`` dequantised. A token that another
rank sent arrives in e4m3, so a gradient does not depend on the rank that an expert is on.

A recipe with ``quantises_weight_grads`` multiplies them in e4m3, too. The operands are the same
quantised rows, transposed expert by expert (t() of :mod:`moetrain.kernels.quant.transposed`)::

    d_down    = t(q(dy)[r]) @ t(q(h))^T       d_gate_up = t(q(da)) @ t(q(x)[r])^T

SwiGLU's kernels write e4m3 at once: a program holds a whole row, and so knows its scale. They round
to the rows' dtype first, as if the result were stored and then quantised.

Legend: T tokens, K experts a token, R rows sorted by expert, E experts, D model width, F expert
width.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any, NamedTuple

import torch

from moetrain.config.compute import Precision
from moetrain.kernels.experts.mlp import check_experts, gradient_shapes, register_experts
from moetrain.kernels.experts.permutation import (
    ExpertIndices,
    permute,
    sum_rows,
    unpermute,
)
from moetrain.kernels.experts.products import grouped_mm, grouped_weight_grad
from moetrain.kernels.experts.swiglu import swiglu
from moetrain.kernels.quant.e4m3 import (
    MULTIPLE,
    Quantised,
    quantise_to_rows,
    row_launch,
    scale_of,
    to_e4m3,
)
from moetrain.kernels.quant.products import scaled_grouped_mm
from moetrain.kernels.quant.recipes import RECIPES, Recipe
from moetrain.kernels.quant.transposed import (
    Columns,
    place_columns,
    scaled_weight_grad,
    transpose_rows,
)
from moetrain.runtime.backend import (
    INTERPRETED,
    Backend,
    refusal,
    tl,
    triton,
    use_fast,
    worth_saving,
)


def expert_mlp_fp8(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    backend: Backend = "auto",
    precision: Precision = "fp8",
) -> torch.Tensor:
    """Compute :func:`~moetrain.kernels.experts.mlp.expert_mlp` in e4m3.

    D is a multiple of 16, and F of the recipe's ``multiple``.

    Raises:
        ValueError: shapes, dtypes or widths do not fit.
    """
    check_experts("expert_mlp_fp8", x_TD, weights_TK, indices, w_gate_up_E2FD, w_down_EDF)
    _, dim, width = w_down_EDF.shape
    multiple = RECIPES[precision].multiple
    if dim % MULTIPLE or width % multiple:
        takes = f"multiples of {MULTIPLE} and {multiple}"
        raise refusal("expert_mlp_fp8", takes, widths=(dim, width))
    if use_fast(backend, x_TD):
        y_TD, _ = expert_mlp_fp8_op(
            x_TD.contiguous(),
            weights_TK.contiguous(),
            indices.slot_row_TK.contiguous(),
            indices.offsets_E.contiguous(),
            w_gate_up_E2FD.contiguous(),
            w_down_EDF.contiguous(),
            precision,
            indices.row_slot_R.shape[0],
        )
        return y_TD
    rounded_TD = _Rounded.apply(x_TD, precision, True, False)
    x_RD, weights_R = permute(rounded_TD, weights_TK, indices, "reference")
    a_R2F = _GroupedProduct.apply(x_RD, w_gate_up_E2FD, indices.offsets_E, precision)
    h_RF = swiglu(a_R2F, weights_R, "reference")
    y_RD = _GroupedProduct.apply(h_RF, w_down_EDF, indices.offsets_E, precision)
    return _Rounded.apply(unpermute(y_RD, indices, "reference"), precision, False, True)


class _Rounded(torch.autograd.Function):
    """The identity, with its input, its gradient, or both rounded to values of e4m3."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        precision: Precision,
        is_value: bool,
        is_gradient: bool,
    ) -> torch.Tensor:
        ctx.recipe = RECIPES[precision]
        ctx.is_gradient = is_gradient
        return ctx.recipe.rows(x, "reference").to(x.dtype) if is_value else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (g,) = grads
        g = ctx.recipe.rows(g, "reference").to(g.dtype) if ctx.is_gradient else g
        return g, None, None, None


class _GroupedProduct(torch.autograd.Function):
    """Computes the reference's grouped ``q(x) @ q(w)^T``, multiplied in ``x``'s dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RM: torch.Tensor,
        w_ENM: torch.Tensor,
        offsets_E: torch.Tensor,
        precision: Precision,
    ) -> torch.Tensor:
        ctx.recipe = recipe = RECIPES[precision]
        ctx.save_for_backward(x_RM, w_ENM, offsets_E)
        x, w = recipe.rows(x_RM, "reference"), recipe.weights(w_ENM, "reference")
        return grouped_mm(x.to(x_RM.dtype), w.to(x_RM.dtype).transpose(1, 2), offsets_E)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        (g_RN,), (x_RM, w_ENM, offsets_E) = grads, ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        g = recipe.rows(g_RN, "reference")
        w = recipe.weights(w_ENM, "reference", transposed=True).to(g_RN.dtype)
        grad_x = grouped_mm(g.to(g_RN.dtype), w.transpose(1, 2), offsets_E)
        if recipe.quantises_weight_grads:
            columns = place_columns(offsets_E, len(x_RM), "reference")
            x = recipe.rows(x_RM, "reference")
            grad_w = scaled_weight_grad(
                transpose_rows(g, columns, None, "reference"),
                transpose_rows(x, columns, None, "reference"),
                columns,
                g_RN.dtype,
                "reference",
            )
        else:
            grad_w = grouped_weight_grad(g_RN.contiguous(), x_RM, offsets_E)
        return grad_x, grad_w, None, None


@torch.library.custom_op("moetrain::expert_mlp_fp8", mutates_args=())
def expert_mlp_fp8_op(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    precision: str,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``y_TD``, and ``a_R2F`` for the backward."""
    dtype = x_TD.dtype
    recipe = RECIPES[precision]
    # 1. Quantise the tokens and copy them to rows.
    x = quantise_to_rows(x_TD, weights_TK, slot_row_TK, num_rows, tiled=recipe.tiled)
    # 2. First product and SwiGLU, whose result is quantised.
    gate_up = recipe.weights(w_gate_up_E2FD, "triton")
    a_R2F = scaled_grouped_mm(x.rows, gate_up, offsets_E, dtype)
    weights_R = x.weights_R
    del x, gate_up
    h_RF = swiglu_quantised(a_R2F, weights_R, recipe.tiled)
    # 3. Second product, and each token's sum.
    y_RD = scaled_grouped_mm(h_RF, recipe.weights(w_down_EDF, "triton"), offsets_E, dtype)
    y_TD = torch.empty_like(x_TD)
    sum_rows(y_RD, slot_row_TK, y_TD)
    return y_TD, a_R2F


@expert_mlp_fp8_op.register_fake
def _(
    x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up_E2FD, w_down_EDF, precision, num_rows
):  # fmt: skip
    return torch.empty_like(x_TD), x_TD.new_empty(num_rows, w_gate_up_E2FD.shape[1])


@torch.library.custom_op("moetrain::expert_mlp_fp8_backward", mutates_args=())
def expert_mlp_fp8_backward_op(
    dy_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    a_R2F: torch.Tensor,
    precision: str,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, weights, w_gate_up and w_down.

    The last two are empty unless ``is_trained``. Their products take dequantised rows or, if the
    recipe quantises them, transposed quantised rows, for which tokens are transposed without
    copying them to rows. Tensors are deleted before the products during which memory peaks.
    """
    num_rows, dtype, recipe = a_R2F.shape[0], dy_TD.dtype, RECIPES[precision]
    quantised = is_trained and recipe.quantises_weight_grads
    dequantised = is_trained and not recipe.quantises_weight_grads
    columns = place_columns(offsets_E, num_rows, "triton") if quantised else None
    # 1. Quantise the upstream gradient and copy it to rows.
    dy = quantise_to_rows(
        dy_TD,
        weights_TK,
        slot_row_TK,
        num_rows,
        tiled=recipe.tiled,
        with_dequantised=dequantised,
        with_tokens=quantised,
    )
    # 2. Back through the second product and SwiGLU, which recomputes h.
    down = recipe.weights(w_down_EDF, "triton", transposed=True)
    dh_RF = scaled_grouped_mm(dy.rows, down, offsets_E, dtype)
    dy, token_R, weights_R = dy.tokens if quantised else dy.dequantised_RD, dy.token_R, dy.weights_R
    del down
    da, h, d_weights_R, da_R2F = swiglu_backward_quantised(
        dh_RF,
        a_R2F,
        weights_R,
        tiled=recipe.tiled,
        with_dequantised=dequantised,
        with_quantised=quantised,
    )
    del dh_RF
    # 3. The second matrix's gradient.
    d_down = dy_TD.new_empty(0)
    if is_trained:
        d_down = _weight_grad(dy, h, offsets_E, columns, dtype, a_tokens=token_R)
    del dy, h
    # 4. Back through the first product, and each token's sum.
    gate_up = recipe.weights(w_gate_up_E2FD, "triton", transposed=True)
    dx_RD = scaled_grouped_mm(da, gate_up, offsets_E, dtype)
    del gate_up
    dx_TD, d_weights_TK = torch.empty_like(x_TD), torch.empty_like(weights_TK)
    sum_rows(dx_RD, slot_row_TK, dx_TD, d_weights_R, d_weights_TK)
    del dx_RD
    if not is_trained:
        return dx_TD, d_weights_TK, dy_TD.new_empty(0), d_down
    # 5. The first matrix's gradient.
    x, da = recipe.rows(x_TD, "triton") if quantised else None, da if quantised else da_R2F
    if x is None:
        x = quantise_to_rows(
            x_TD,
            weights_TK,
            slot_row_TK,
            num_rows,
            tiled=recipe.tiled,
            with_rows=False,
            with_dequantised=dequantised,
        ).dequantised_RD
    d_gate_up = _weight_grad(da, x, offsets_E, columns, dtype, g_tokens=token_R)
    return dx_TD, d_weights_TK, d_gate_up, d_down


def _weight_grad(
    a: torch.Tensor | Quantised,
    g: torch.Tensor | Quantised,
    offsets_E: torch.Tensor,
    columns: Columns | None,
    dtype: torch.dtype,
    *,
    a_tokens: torch.Tensor | None = None,
    g_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``a^T @ g`` by expert of rows or, with ``columns``, of quantised rows.

    Args:
        a_tokens, g_tokens: the token of each row, if the operand has tokens in place of rows.
    """
    if columns is None:
        return grouped_weight_grad(a, g, offsets_E)
    return scaled_weight_grad(
        transpose_rows(a, columns, a_tokens, "triton"),
        transpose_rows(g, columns, g_tokens, "triton"),
        columns,
        dtype,
        "triton",
    )


@expert_mlp_fp8_backward_op.register_fake
def _(
    dy_TD, x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up_E2FD, w_down_EDF, a_R2F, precision,
    is_trained,
):  # fmt: skip
    return gradient_shapes(x_TD, weights_TK, w_gate_up_E2FD, w_down_EDF, is_trained)


register_experts(expert_mlp_fp8_op, expert_mlp_fp8_backward_op)
worth_saving("experts", torch.ops.moetrain.expert_mlp_fp8.default)


def swiglu_quantised(
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    tiled: bool = False,
) -> Quantised:
    """Return SwiGLU's ``y_RF`` quantised to e4m3, within an op; inputs are contiguous."""
    rows = gate_up_R2F.shape[0]
    width = gate_up_R2F.shape[1] // 2
    y = Quantised.empty(gate_up_R2F, rows, width, tiled)
    if rows:
        _quantised_forward_kernel[(rows,)](
            gate_up_R2F, weights_R, *y, width, rows,
            BY_HAND=INTERPRETED, **row_launch(width, tiled),
        )  # fmt: skip
    return y


class _SwiGLUGradients(NamedTuple):
    """The results of SwiGLU's backward."""

    d_gate_up: Quantised
    """The gradient of the pre-activations, [R, 2F]."""
    y: torch.Tensor | Quantised | None
    """SwiGLU's result [R, F], in the dtype that was asked for; None: it was not asked for."""
    d_weights_R: torch.Tensor
    """The gradient of the routing weights."""
    d_gate_up_R2F: torch.Tensor | None
    """``d_gate_up`` in the rows' dtype; None: it was not asked for."""


def swiglu_backward_quantised(
    dy_RF: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    *,
    tiled: bool = False,
    with_dequantised: bool = False,
    with_quantised: bool = False,
) -> _SwiGLUGradients:
    """Differentiate SwiGLU and quantise the result to e4m3, within an op; inputs are contiguous.

    Args:
        tiled: quantise in tiles of 128 columns; F is a multiple of 128.
        with_dequantised: return ``d_gate_up_R2F`` and ``y``, too, in the rows' dtype.
        with_quantised: return ``y``, too, quantised.
    """
    rows, width = dy_RF.shape
    y = None
    if with_dequantised:
        y = torch.empty_like(dy_RF)
    elif with_quantised:
        y = Quantised.empty(dy_RF, rows, width, tiled)
    made = _SwiGLUGradients(
        d_gate_up=Quantised.empty(dy_RF, rows, 2 * width, tiled),
        y=y,
        d_weights_R=torch.empty_like(weights_R),
        d_gate_up_R2F=torch.empty_like(gate_up_R2F) if with_dequantised else None,
    )
    if rows:
        _quantised_backward_kernel[(rows,)](
            dy_RF, gate_up_R2F, weights_R, *made.d_gate_up, made.d_gate_up_R2F, made.d_weights_R,
            *(y if isinstance(y, Quantised) else (y, None)), width, rows,
            TILED=tiled, BY_HAND=INTERPRETED, **row_launch(width, tiled),
        )  # fmt: skip
    return made


@triton.jit
def _rounded(x, like):
    """Return ``x`` rounded to the dtype that ``like`` points to, in fp32."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])  # it changes from call to call
def _quantised_forward_kernel(
    gate_up, weights, values, scales, width, num_rows,
    BLOCK: tl.constexpr, PART: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK // PART)
    col = part[:, None] * PART + tl.arange(0, PART)[None, :]
    gate_at = gate_up + row * 2 * width + col
    gate = tl.load(gate_at, col < width, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, col < width, other=0.0).to(tl.float32)
    w = tl.load(weights + row).to(tl.float32)
    y = _rounded(gate * tl.sigmoid(gate) * up * w, gate_up)
    scale, inverse = scale_of(tl.max(tl.abs(y), axis=1))
    tl.store(values + row * width + col, to_e4m3(y * inverse[:, None], BY_HAND), col < width)
    tl.store(scales + part * num_rows + row, scale, part * PART < width)


@triton.jit(do_not_specialize=["num_rows"])
def _quantised_backward_kernel(
    dy,
    gate_up,
    weights,
    values,
    scales,
    d_gate_up,
    d_weights,
    y,
    y_scales,
    width,
    num_rows,
    TILED: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK // PART)
    col = part[:, None] * PART + tl.arange(0, PART)[None, :]
    mask, has_scale = col < width, part * PART < width
    gate_at = row * 2 * width + col
    gate = tl.load(gate_up + gate_at, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + gate_at + width, mask, other=0.0).to(tl.float32)
    d_y = tl.load(dy + row * width + col, mask, other=0.0).to(tl.float32)
    w = tl.load(weights + row).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    d_gate = _rounded(d_y * w * up * (s + silu * (1 - s)), gate_up)
    d_up = _rounded(d_y * w * silu, gate_up)
    largest_gate, largest_up = tl.max(tl.abs(d_gate), axis=1), tl.max(tl.abs(d_up), axis=1)
    if not TILED:  # one scale for both
        largest_gate = tl.maximum(largest_gate, largest_up)
        largest_up = largest_gate
    scale, inverse = scale_of(largest_gate)
    tl.store(values + gate_at, to_e4m3(d_gate * inverse[:, None], BY_HAND), mask)
    scale_at = scales + part * num_rows + row
    tl.store(scale_at, scale, has_scale)
    scale, inverse = scale_of(largest_up)
    tl.store(values + gate_at + width, to_e4m3(d_up * inverse[:, None], BY_HAND), mask)
    if TILED:
        tl.store(scale_at + width // PART * num_rows, scale, has_scale)
    if d_gate_up is not None:
        tl.store(d_gate_up + gate_at, d_gate, mask)
        tl.store(d_gate_up + gate_at + width, d_up, mask)
    if y_scales is not None:  # as in the forward
        value = _rounded(silu * up * w, gate_up)
        scale, inverse = scale_of(tl.max(tl.abs(value), axis=1))
        tl.store(y + row * width + col, to_e4m3(value * inverse[:, None], BY_HAND), mask)
        tl.store(y_scales + part * num_rows + row, scale, has_scale)
    elif y is not None:
        tl.store(y + row * width + col, silu * up * w, mask)
    tl.store(d_weights + row, tl.sum(tl.sum(d_y * silu * up, axis=1), axis=0))
