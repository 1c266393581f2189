"""Matrix products in e4m3; no other module calls torch's scaled GEMMs.

Both operands are contiguous along the inner width. The first has a scale for each row, and the
second one for each column of the product. On a CPU the dequantised operands are multiplied in fp32:
the same sum, but for its order. Tensor cores add in registers that keep fewer bits than fp32
(``use_fast_accum``); adding up every 128 products in fp32 costs a quarter of the rate on one H200.

:func:`linears_fp8` is a dense layer, ``y = q(x) @ q(w)^T``, for several ``w`` at once. So ``x`` and
``dy`` are quantised once for all ``w``, and the parts of ``dx`` from all ``w`` are added in the
product. For an upstream ``dy``, with q() as in :mod:`moetrain.kernels.experts.frame_fp8`::

    dx = q(dy) @ q(w)        dw = dy^T @ x  (in bf16)

Weights in blocks of 128 x 128 take the products of :mod:`moetrain.kernels.quant.blocks`.

Legend: T tokens, R rows sorted by expert, E experts, D or M inner width, N outer width (of all
``w`` together).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from moetrain.config.compute import Precision
from moetrain.kernels.experts.products import grouped_mm
from moetrain.kernels.quant import grouped_e4m3
from moetrain.kernels.quant.blocks import QuantisedBlocks, blocks_mm
from moetrain.kernels.quant.e4m3 import MULTIPLE, TILE, Quantised
from moetrain.kernels.quant.recipes import RECIPES
from moetrain.runtime.backend import (
    INTERPRETED,
    Backend,
    gradients,
    refusal,
    use_fast,
    worth_saving,
)
from moetrain.runtime.typed import OpContext


def scaled_mm(
    a_TM: Quantised, b_NM: Quantised, dtype: torch.dtype, *, fast: bool = True
) -> torch.Tensor:
    """Return ``a @ b^T`` [T, N] in ``dtype``; on CUDA that is bf16, and widths are multiples of 16.

    ``a`` may be in e5m2. With ``fast`` False products are added up in fp32.
    """
    if not a_TM.values.is_cuda:
        return (a_TM.to(torch.float32) @ b_NM.to(torch.float32).t()).to(dtype)
    return torch._scaled_mm(
        a_TM.values,
        b_NM.values.t(),
        a_TM.scales[:, None],
        b_NM.scales[None, :],
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def scaled_grouped_mm(
    a_RM: Quantised,
    b_ENM: Quantised | QuantisedBlocks,
    offsets_E: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``out[r] = a[r] @ b[group of r]^T`` [R, N], groups as in ``grouped_mm``."""
    if dtype == torch.bfloat16 and grouped_e4m3.takes(a_RM.values, b_ENM.values):
        return grouped_e4m3.product(a_RM.values, a_RM.scales, b_ENM.values, b_ENM.scales, offsets_E)
    if isinstance(b_ENM, QuantisedBlocks) and (a_RM.values.is_cuda or INTERPRETED):
        return blocks_mm(a_RM, b_ENM, offsets_E, dtype)
    if not a_RM.values.is_cuda:
        a, b = a_RM.to(torch.float32), b_ENM.to(torch.float32)
        return grouped_mm(a, b.transpose(1, 2), offsets_E).to(dtype)
    if not a_RM.values.shape[0]:
        return torch.empty(0, b_ENM.values.shape[1], device=a_RM.values.device, dtype=dtype)
    return torch._scaled_grouped_mm(
        a_RM.values,
        b_ENM.values.transpose(1, 2),
        a_RM.scales,
        b_ENM.scales,
        offs=offsets_E,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def linears_fp8(
    x_TD: torch.Tensor,
    weights: Sequence[torch.Tensor],
    backend: Backend = "auto",
    precision: Precision = "fp8",
) -> tuple[torch.Tensor, ...]:
    """Multiply ``x`` by each ``w`` [N, D], on CUDA in bf16; N and D are multiples of 16.

    The results are views of one tensor [T, N of all ``w``].

    Raises ValueError: shapes, dtypes or widths do not fit.
    """
    fits = all(w.shape[1:] == x_TD.shape[1:] and w.dtype == x_TD.dtype for w in weights)
    if not fits or any(size % MULTIPLE for w in weights for size in w.shape):
        was_given = {f"w{i}": w for i, w in enumerate(weights)}
        takes = f"[N, D] in x's dtype, both multiples of {MULTIPLE}"
        raise refusal("linears_fp8", takes, x=x_TD, **was_given)
    if use_fast(backend, x_TD):
        y_TN = linears_fp8_op(x_TD.contiguous(), list(weights), precision)
    else:
        y_TN = _DenseProduct.apply(x_TD, _stacked(weights, precision), precision)
    parts = y_TN.split([_padded_rows(w, precision) for w in weights], dim=1)
    return tuple(y[:, : len(w)] for y, w in zip(parts, weights, strict=True))


class _DenseProduct(torch.autograd.Function):
    """The reference's ``q(x) @ q(w)^T``, multiplied in ``x``'s dtype."""

    @staticmethod
    def forward(
        ctx: OpContext, x_TD: torch.Tensor, w_ND: torch.Tensor, precision: Precision
    ) -> torch.Tensor:
        ctx.recipe = recipe = RECIPES[precision]
        ctx.save_for_backward(x_TD, w_ND)
        x, w = recipe.rows(x_TD, "reference"), recipe.weights(w_ND[None], "reference")
        return F.linear(x.to(x_TD.dtype), w.to(x_TD.dtype)[0])

    @staticmethod
    def backward(
        ctx: OpContext, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (dy_TN,) = grads
        x_TD, w_ND = ctx.saved_tensors
        dy = ctx.recipe.rows(dy_TN, "reference")
        w = ctx.recipe.weights(w_ND[None], "reference", transposed=True)
        dx_TD = F.linear(dy.to(dy_TN.dtype), w.to(dy_TN.dtype)[0])
        return dx_TD, dy_TN.t() @ x_TD if ctx.needs_input_grad[1] else None, None


@torch.library.custom_op("moetrain::linears_fp8", mutates_args=())
def linears_fp8_op(
    x_TD: torch.Tensor, weights: Sequence[torch.Tensor], precision: str
) -> torch.Tensor:
    recipe = RECIPES[precision]
    x, w = recipe.rows(x_TD, "triton"), recipe.weights(_stacked(weights, precision)[None], "triton")
    return _dense(x, w, x_TD.dtype)


def _dense(a_TM: Quantised, b_1NM: Quantised | QuantisedBlocks, dtype: torch.dtype) -> torch.Tensor:
    """Return ``a @ b[0]^T`` [T, N] in ``dtype``."""
    if isinstance(b_1NM, Quantised):
        return scaled_mm(a_TM, Quantised(b_1NM.values[0], b_1NM.scales[0]), dtype)
    rows, inner = a_TM.values.shape
    outer = b_1NM.values.shape[1]
    # Torch pads scales to multiples of four along the inner width.
    is_whole = not (rows % TILE or outer % TILE or inner % (4 * TILE))
    if a_TM.values.is_cuda and is_whole:
        # The same bits as ours, at 1.8 times the rate (docs/log/quantisation.md).
        return F.scaled_mm(
            a_TM.values,
            b_1NM.values[0].t(),
            a_TM.scales.t(),
            ScalingType.BlockWise1x128,
            b_1NM.scales[0].t(),
            ScalingType.BlockWise128x128,
            output_dtype=dtype,
        )
    ends = a_TM.scales.new_full((1,), rows, dtype=torch.int32)
    return scaled_grouped_mm(a_TM, b_1NM, ends, dtype)


def _padded_rows(weight: torch.Tensor, precision: str) -> int:
    """Return the rows of ``weight`` in :func:`_stacked`: whole blocks, if the recipe has blocks."""
    return -(-len(weight) // TILE) * TILE if RECIPES[precision].tiled else len(weight)


def _stacked(weights: Sequence[torch.Tensor], precision: str) -> torch.Tensor:
    """Stack the rows of all weights, each padded; a single weight is not copied."""
    padded: list[torch.Tensor] = []
    for w in weights:
        missing = _padded_rows(w, precision) - len(w)
        padded.append(F.pad(w, (0, 0, 0, missing)) if missing else w)
    return padded[0] if len(weights) == 1 else torch.cat(padded)


@linears_fp8_op.register_fake
def _(x_TD: torch.Tensor, weights: Sequence[torch.Tensor], precision: str) -> torch.Tensor:
    return x_TD.new_empty(x_TD.shape[0], sum(_padded_rows(w, precision) for w in weights))


@torch.library.custom_op("moetrain::linears_fp8_backward", mutates_args=())
def linears_fp8_backward_op(
    dy_TN: torch.Tensor,
    x_TD: torch.Tensor,
    w_ND: torch.Tensor,
    precision: str,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    recipe = RECIPES[precision]
    w_DN = recipe.weights(w_ND[None], "triton", transposed=True)
    dx_TD = _dense(recipe.rows(dy_TN, "triton"), w_DN, dy_TN.dtype)
    return dx_TD, dy_TN.t() @ x_TD if is_trained else dy_TN.new_empty(0)


@linears_fp8_backward_op.register_fake
def _(
    dy_TN: torch.Tensor, x_TD: torch.Tensor, w_ND: torch.Tensor, precision: str, is_trained: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x_TD), torch.empty_like(w_ND) if is_trained else w_ND.new_empty(0)


def _save(ctx: OpContext, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x_TD, weights, ctx.precision = inputs
    ctx.save_for_backward(x_TD, *weights)


def _differentiate(ctx: OpContext, dy_TN: torch.Tensor) -> tuple[object, ...]:
    x_TD, *weights = ctx.saved_tensors
    is_trained = any(ctx.needs_input_grad[1])
    w_ND = _stacked(weights, ctx.precision)  # made again, not kept since the forward
    dx_TD, dw_ND = linears_fp8_backward_op(
        dy_TN.contiguous(), x_TD, w_ND, ctx.precision, is_trained
    )
    d_weights: list[torch.Tensor | None] = [None] * len(weights)
    if is_trained:
        parts = dw_ND.split([_padded_rows(w, ctx.precision) for w in weights])
        d_weights = [dw[: len(w)] for dw, w in zip(parts, weights, strict=True)]
    return gradients(linears_fp8_op, x_TD=dx_TD, weights=d_weights)


linears_fp8_op.register_autograd(_differentiate, setup_context=_save)
worth_saving("linear", torch.ops.moetrain.linears_fp8.default)
