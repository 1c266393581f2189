"""The frame of the expert MLPs with products in e4m3.

q() quantises as the precision's recipe says (:mod:`moetrain.kernels.quant.recipes`). Rows have a
scale for each row or tile. Weights have one for each row or block, and in the products of the
inputs' gradients one for each column or block. Let token t be copied to the rows r(t). The parts of
:mod:`moetrain.kernels.experts.projections`, here without adapters and biases, compute::

    a = q(x)[r] @ q(W1)^T       h = activation(a, w)        y = sum over r of q(h) @ q(W2)^T

    dh = q(dy)[r] @ q(W2)                         dW2 = q(dy)[r]^T @ h
    da, dw = activation'(dh)                      dW1 = da^T @ q(x)[r]
    dx = sum over r of q(da) @ q(W1)

The weights' gradients are products in bf16: they sum over many rows, and their operands are stored
along the wrong dimension for e4m3. They take ``x`` and ``dy`` dequantised, as a token from another
rank arrives in e4m3. So a gradient does not depend on the rank that an expert is on.

With ``quantises_weight_grads`` these products are in e4m3, too. The operands are the same quantised
rows, transposed expert by expert (t() of :mod:`moetrain.kernels.quant.transposed`)::

    dW2 = t(q(dy)[r]) @ t(q(h))^T       dW1 = t(q(da)) @ t(q(x)[r])^T

Adapters' products are in bf16, and so are sums over biases' rows. They take ``x`` and ``dy``
dequantised, too.

Legend: T tokens, K experts a token, R rows sorted by expert, E experts, D model width, F expert
width, A width of ``a`` (2F with a gate, F without), M and N outer and inner widths of a projection,
r rank of the adapters.
"""

from typing import NamedTuple, cast

import torch

from moetrain.config.compute import Precision
from moetrain.kernels.experts.adapters import add_wide, narrow
from moetrain.kernels.experts.clamped_swiglu import sum_by_expert
from moetrain.kernels.experts.permutation import (
    ExpertIndices,
    permute,
    rows_of,
    sum_rows,
    unpermute,
)
from moetrain.kernels.experts.products import grouped_mm, grouped_weight_grad
from moetrain.kernels.experts.projections import (
    Activation,
    Gradients,
    Projection,
    ProjectionGradients,
    Saved,
    Tokens,
    add_bias_products,
    is_swiglu,
    sum_biased_rows,
)
from moetrain.kernels.experts.swiglu_fp8 import swiglu_backward_quantised, swiglu_quantised
from moetrain.kernels.quant.e4m3 import Quantised, quantise_to_rows
from moetrain.kernels.quant.products import scaled_grouped_mm
from moetrain.kernels.quant.recipes import RECIPES, Recipe
from moetrain.kernels.quant.transposed import (
    Columns,
    place_columns,
    scaled_weight_grad,
    transpose_rows,
)
from moetrain.runtime.typed import OpContext


class _Rows(NamedTuple):
    """Rows in the forms that products take. A form that no product takes may be None."""

    quantised: Quantised | None
    """In e4m3, with their scales."""
    values: torch.Tensor | None
    """In the tokens' dtype."""


def forward(
    tokens: Tokens,
    num_rows: int,
    first: Projection,
    second: Projection,
    activation: Activation,
    precision: Precision,
) -> tuple[torch.Tensor, Saved]:
    """Return ``y_TD``, the sum of each token's experts, and what is saved; within an op."""
    x_TD, weights_TK, slot_row_TK, offsets_E = tokens
    recipe, has_adapters = RECIPES[precision], first.adapter is not None
    # 1. Quantise the tokens and copy them to rows, sorted by expert.
    made = quantise_to_rows(
        x_TD,
        weights_TK,
        slot_row_TK,
        num_rows,
        tiled=recipe.tiled,
        with_dequantised=has_adapters,
    )
    x, weights_R = _Rows(made.rows, made.dequantised_RD), made.weights_R
    del made
    # 2. First projection and activation, whose result is quantised.
    a_RA, u_Rr = _product(first, x, offsets_E, recipe, x_TD.dtype)
    del x
    if is_swiglu(activation) and not has_adapters:
        h = _Rows(swiglu_quantised(a_RA, weights_R, recipe.tiled), None)
    else:
        h_RF = activation.forward(a_RA, weights_R, offsets_E, "triton")
        h = _Rows(recipe.rows(h_RF, "triton"), h_RF if has_adapters else None)
        del h_RF
    # 3. Second projection.
    y_RD, v_Rr = _product(second, h, offsets_E, recipe, x_TD.dtype)
    del h
    # 4. Sum each token's rows, and with them their weighted biases.
    y_TD = torch.empty_like(x_TD)
    if second.bias_EM is None:
        sum_rows(y_RD, slot_row_TK, y_TD)
    else:
        sum_biased_rows(y_RD, tokens, second.bias_EM, y_TD)
    return y_TD, Saved(a_RA, u_Rr, v_Rr)


def backward(
    dy_TD: torch.Tensor,
    tokens: Tokens,
    first: Projection,
    second: Projection,
    activation: Activation,
    saved: Saved,
    is_trained: bool,
    precision: Precision,
) -> Gradients:
    """Differentiate :func:`forward`, within an op; ``dy_TD`` is contiguous.

    Of the parameters, adapters get gradients; without adapters matrices and biases do, if
    ``is_trained``. Matrices' gradients are products of dequantised rows or, if the recipe quantises
    them, of transposed quantised rows. Tokens are then transposed without being copied to rows.
    Tensors are deleted before the products during which memory peaks.
    """
    x_TD, weights_TK, slot_row_TK, offsets_E = tokens
    num_rows, dtype, recipe = saved.a_RA.shape[0], dy_TD.dtype, RECIPES[precision]
    has_adapters = second.adapter is not None
    trains_biases = is_trained and second.bias_EM is not None
    quantised = is_trained and recipe.quantises_weight_grads
    dequantised = has_adapters or (is_trained and not quantised)
    columns = place_columns(offsets_E, num_rows, "triton") if quantised else None
    # 1. Quantise the upstream gradient and copy it to rows.
    made = quantise_to_rows(
        dy_TD,
        weights_TK,
        slot_row_TK,
        num_rows,
        tiled=recipe.tiled,
        with_dequantised=dequantised,
        with_tokens=quantised or second.bias_EM is not None,
    )
    dy, tokens_dy, token_R = _Rows(made.rows, made.dequantised_RD), made.tokens, made.token_R
    weights_R = made.weights_R
    del made
    # 2. Back through the second projection and the activation, which recomputes h.
    dh_RF, dv_Rr = _input_gradient(second, dy, offsets_E, recipe, dtype)
    dy = _Rows(None, dy.values)
    da, h, d_weights_R = _differentiate(
        activation,
        dh_RF,
        saved.a_RA,
        weights_R,
        offsets_E,
        recipe,
        with_values=dequantised,
        with_quantised=quantised,
        is_fused=is_swiglu(activation) and not has_adapters,
    )
    del dh_RF
    if not (dequantised or trains_biases):  # before the products, where memory peaks
        da = _Rows(da.quantised, None)
    # 3. Gradients of the second projection's parameters.
    d_first = d_second = ProjectionGradients()
    if second.bias_EM is not None:
        dy_TD = tokens_dy.to(dtype, "triton")
    if has_adapters:
        d_second = second.gradients(
            _there(dy.values), _there(h.values), saved.v_Rr, dv_Rr, weights_R, offsets_E
        )
    elif is_trained:
        d_bias = None
        if trains_biases:
            dy_RD = dy.values
            if not dequantised:
                dy_RD, _ = rows_of(dy_TD, None, slot_row_TK, num_rows)
            d_bias = sum_by_expert(_there(dy_RD), weights_R, offsets_E)
            del dy_RD
        grads, values = (tokens_dy, h.quantised) if quantised else (dy.values, h.values)
        d_w = _weight_grad(grads, values, offsets_E, columns, dtype, a_tokens=token_R)
        d_second = ProjectionGradients(w=d_w, bias=d_bias)
        del grads, values
    del dy, tokens_dy, h
    # 4. Back through the first projection, and sum each token's rows.
    dx_RD, du_Rr = _input_gradient(first, da, offsets_E, recipe, dtype)
    dx_TD, d_weights_TK = torch.empty_like(x_TD), torch.empty_like(weights_TK)
    sum_rows(dx_RD, slot_row_TK, dx_TD, d_weights_R, d_weights_TK)
    del dx_RD
    if second.bias_EM is not None:
        add_bias_products(dy_TD, tokens, second.bias_EM, d_weights_TK)
    # 5. Gradients of the first projection's parameters.
    if not (is_trained or has_adapters):
        return Gradients(dx_TD, d_weights_TK, d_first, d_second)
    d_bias = sum_by_expert(_there(da.values), None, offsets_E) if trains_biases else None
    if quantised:
        d_w = _weight_grad(
            da.quantised, recipe.rows(x_TD, "triton"), offsets_E, columns, dtype, g_tokens=token_R
        )
        return Gradients(dx_TD, d_weights_TK, ProjectionGradients(w=d_w, bias=d_bias), d_second)
    da = _Rows(None, da.values)
    x_RD = quantise_to_rows(
        x_TD,
        weights_TK,
        slot_row_TK,
        num_rows,
        tiled=recipe.tiled,
        with_rows=False,
        with_dequantised=True,
    ).dequantised_RD
    if has_adapters:
        d_first = first.gradients(_there(da.values), x_RD, saved.u_Rr, du_Rr, None, offsets_E)
    else:
        d_w = grouped_weight_grad(_there(da.values), x_RD, offsets_E)
        d_first = ProjectionGradients(w=d_w, bias=d_bias)
    return Gradients(dx_TD, d_weights_TK, d_first, d_second)


def reference(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    first: Projection,
    second: Projection,
    activation: Activation,
    precision: Precision,
) -> torch.Tensor:
    """Compute ``y_TD`` of :func:`forward` in plain torch, with e4m3 values in ``x``'s dtype."""
    offsets_E = indices.offsets_E
    rounded_TD = _Rounded.apply(x_TD, precision, True, False)
    x_RD, weights_R = permute(rounded_TD, weights_TK, indices, "reference")
    a_RA = _reference_product(first, x_RD, offsets_E, precision)
    h_RF = activation.forward(a_RA, weights_R, offsets_E, "reference")
    y_RD = second.biased(
        _reference_product(second, h_RF, offsets_E, precision), weights_R, offsets_E
    )
    return _Rounded.apply(unpermute(y_RD, indices, "reference"), precision, False, True)


def _there(x: torch.Tensor | None) -> torch.Tensor:
    """Return ``x``, which is not None."""
    assert x is not None
    return x


def _product(
    projection: Projection, x: _Rows, offsets_E: torch.Tensor, recipe: Recipe, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result [R, M], and the product with A [R, r] ([0] without an adapter)."""
    assert x.quantised is not None
    w = recipe.weights(projection.w_EMN, "triton")
    y_RM = scaled_grouped_mm(x.quantised, w, offsets_E, dtype)
    if projection.adapter is None:
        return y_RM, y_RM.new_empty(0)
    a, b, scale, offsets_G = projection.adapter
    low_Rr = narrow(_there(x.values), a, offsets_G)
    add_wide(y_RM, low_Rr, b.mT, offsets_G, scale)
    return y_RM, low_Rr


def _input_gradient(
    projection: Projection, dy: _Rows, offsets_E: torch.Tensor, recipe: Recipe, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of :func:`_product`'s input and of its second result."""
    assert dy.quantised is not None
    w = recipe.weights(projection.w_EMN, "triton", transposed=True)
    dx_RN = scaled_grouped_mm(dy.quantised, w, offsets_E, dtype)
    if projection.adapter is None:
        return dx_RN, dx_RN.new_empty(0)
    a, b, scale, offsets_G = projection.adapter
    d_low_Rr = narrow(_there(dy.values), b.mT, offsets_G, scale)
    add_wide(dx_RN, d_low_Rr, a, offsets_G)
    return dx_RN, d_low_Rr


def _differentiate(
    activation: Activation,
    dh_RF: torch.Tensor,
    a_RA: torch.Tensor,
    weights_R: torch.Tensor,
    offsets_E: torch.Tensor,
    recipe: Recipe,
    *,
    with_values: bool,
    with_quantised: bool,
    is_fused: bool,
) -> tuple[_Rows, _Rows, torch.Tensor]:
    """Return ``da``, ``h`` and ``d_weights_R``; ``da`` is quantised.

    Args:
        with_values: return ``da`` and ``h`` in the rows' dtype, too.
        with_quantised: return ``h`` quantised.
        is_fused: SwiGLU's own kernel computes and quantises them.
    """
    if is_fused:
        made = swiglu_backward_quantised(
            dh_RF,
            a_RA,
            weights_R,
            tiled=recipe.tiled,
            with_dequantised=with_values,
            with_quantised=with_quantised,
        )
        h = _Rows(made.y, None) if isinstance(made.y, Quantised) else _Rows(None, made.y)
        return _Rows(made.d_gate_up, made.d_gate_up_R2F), h, made.d_weights_R
    h_RF = torch.empty_like(dh_RF)
    da_RA, d_weights_R = activation.gradients(dh_RF, a_RA, weights_R, offsets_E, h_RF)
    h = _Rows(
        recipe.rows(h_RF, "triton") if with_quantised else None, h_RF if with_values else None
    )
    return _Rows(recipe.rows(da_RA, "triton"), da_RA), h, d_weights_R


def _weight_grad(
    a: torch.Tensor | Quantised | None,
    g: torch.Tensor | Quantised | None,
    offsets_E: torch.Tensor,
    columns: Columns | None,
    dtype: torch.dtype,
    *,
    a_tokens: torch.Tensor | None = None,
    g_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return each expert's ``a^T @ g``, of rows or, with ``columns``, of quantised rows.

    Args:
        a_tokens, g_tokens: the token of each row, if the operand has tokens in place of rows.
    """
    if columns is None:
        return grouped_weight_grad(cast("torch.Tensor", a), cast("torch.Tensor", g), offsets_E)
    return scaled_weight_grad(
        transpose_rows(cast("Quantised", a), columns, a_tokens, "triton"),
        transpose_rows(cast("Quantised", g), columns, g_tokens, "triton"),
        columns,
        dtype,
        "triton",
    )


def _reference_product(
    projection: Projection, x_RN: torch.Tensor, offsets_E: torch.Tensor, precision: Precision
) -> torch.Tensor:
    """Return the result of :func:`_product` in plain torch, differentiably."""
    w_EMN = projection.w_EMN
    if projection.adapter is None:
        return _GroupedProduct.apply(x_RN, w_EMN, offsets_E, precision)
    y_RM = _GroupedProduct.apply(x_RN, w_EMN.detach(), offsets_E, precision)
    return y_RM + projection.adapter.reference(x_RN)


class _Rounded(torch.autograd.Function):
    """The identity, with its input, its gradient, or both rounded to values of e4m3."""

    @staticmethod
    def forward(
        ctx: OpContext,
        x: torch.Tensor,
        precision: Precision,
        is_value: bool,
        is_gradient: bool,
    ) -> torch.Tensor:
        ctx.recipe = RECIPES[precision]
        ctx.is_gradient = is_gradient
        return ctx.recipe.rows(x, "reference").to(x.dtype) if is_value else x.view_as(x)

    @staticmethod
    def backward(ctx: OpContext, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (g,) = grads
        g = ctx.recipe.rows(g, "reference").to(g.dtype) if ctx.is_gradient else g
        return g, None, None, None


class _GroupedProduct(torch.autograd.Function):
    """Computes the reference's grouped ``q(x) @ q(w)^T``, multiplied in ``x``'s dtype."""

    @staticmethod
    def forward(
        ctx: OpContext,
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
    def backward(
        ctx: OpContext, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        (g_RN,), (x_RM, w_ENM, offsets_E) = grads, ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        g = recipe.rows(g_RN, "reference")
        w = recipe.weights(w_ENM, "reference", transposed=True).to(g_RN.dtype)
        grad_x = grouped_mm(g.to(g_RN.dtype), w.transpose(1, 2), offsets_E)
        grad_w = None
        if not ctx.needs_input_grad[1]:
            pass
        elif recipe.quantises_weight_grads:
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
