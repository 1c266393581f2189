"""Matrix products in e4m3: the one place that names torch's scaled GEMMs.

Both operands lie along the inner width, with a scale for each row of the first and each column of
the product. On a CPU the dequantised operands are multiplied in fp32: the same sum, but for its
order. Tensor cores add in registers that keep fewer bits than fp32 (``use_fast_accum``); to add
every 128 products up in fp32 costs a quarter of the rate on one H200.

:func:`linears_fp8` is a dense layer, ``y = q(x) @ q(w)^T``, of several ``w`` at once, so that rows
are quantised once both ways and the gradients of all ``w`` added in fp32. For an upstream ``dy``,
with q() as in :mod:`moetrain.kernels.experts.mlp_fp8`::

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
    refusal,
    save_inputs,
    use_fast,
    worth_saving,
)


def scaled_mm(
    a_TM: Quantised,
    b_NM: Quantised,
    dtype: torch.dtype,
    *,
    fast: bool = True,
) -> torch.Tensor:
    """Return ``a @ b^T`` [T, N] in ``dtype``; on CUDA that is bf16, with widths in 16s.

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
        return grouped_e4m3.product(*a_RM, *b_ENM, offsets_E)
    if isinstance(b_ENM, QuantisedBlocks) and (a_RM.values.is_cuda or INTERPRETED):
        return blocks_mm(a_RM, b_ENM, offsets_E, dtype)
    if not a_RM.values.is_cuda:
        a = a_RM.to(torch.float32)
        b = b_ENM.to(torch.float32)
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

    The results are views of one tensor.
    """
    fits = all(w.shape[1:] == x_TD.shape[1:] and w.dtype == x_TD.dtype for w in weights)
    if not fits or any(size % MULTIPLE for w in weights for size in w.shape):
        given = {f"w{i}": w for i, w in enumerate(weights)}
        takes = f"[N, D] in x's dtype, both multiples of {MULTIPLE}"
        raise refusal("linears_fp8", takes, x=x_TD, **given)
    if use_fast(backend, x_TD):
        y_TN = _linears_fp8(x_TD.contiguous(), list(weights), precision)
    else:
        y_TN = _DenseProduct.apply(x_TD, _joined(weights, precision), precision)
    parts = y_TN.split([_room(w, precision) for w in weights], dim=1)
    return tuple(y[:, : len(w)] for y, w in zip(parts, weights, strict=True))


class _DenseProduct(torch.autograd.Function):
    """The reference's ``q(x) @ q(w)^T``, multiplied in ``x``'s dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        w_ND: torch.Tensor,
        precision: Precision,
    ) -> torch.Tensor:
        ctx.recipe = recipe = RECIPES[precision]
        ctx.save_for_backward(x_TD, w_ND)
        x, w = recipe.rows(x_TD, "reference"), recipe.weights(w_ND[None], "reference")
        return F.linear(x.to(x_TD.dtype), w.to(x_TD.dtype)[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (dy_TN,) = grads
        x_TD, w_ND = ctx.saved_tensors
        dy = ctx.recipe.rows(dy_TN, "reference")
        w = ctx.recipe.weights(w_ND[None], "reference", turned=True)
        dx_TD = F.linear(dy.to(dy_TN.dtype), w.to(dy_TN.dtype)[0])
        return dx_TD, dy_TN.t() @ x_TD if ctx.needs_input_grad[1] else None, None


@torch.library.custom_op("moetrain::linears_fp8", mutates_args=())
def _linears_fp8(
    x_TD: torch.Tensor,
    weights: Sequence[torch.Tensor],
    precision: str,
) -> torch.Tensor:
    recipe = RECIPES[precision]
    x, w = recipe.rows(x_TD, "triton"), recipe.weights(_joined(weights, precision)[None], "triton")
    return _dense(x, w, x_TD.dtype)


def _dense(
    a_TM: Quantised,
    b_1NM: Quantised | QuantisedBlocks,
    dtype: torch.dtype,
) -> torch.Tensor:
    if isinstance(b_1NM, Quantised):
        return scaled_mm(a_TM, Quantised(*(x[0] for x in b_1NM)), dtype)
    rows, width = a_TM.values.shape
    wide = b_1NM.values.shape[1]
    is_whole = not (rows % TILE or wide % TILE or width % (4 * TILE))  # torch pads scales by fours
    if a_TM.values.is_cuda and is_whole:
        # The bits of ours, and 1.8 times its rate (docs/log/quantisation.md).
        kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        scales = a_TM.scales.t(), b_1NM.scales[0].t()
        operands = (a_TM.values, b_1NM.values[0].t(), scales[0], kinds[0], scales[1], kinds[1])
        return F.scaled_mm(*operands, output_dtype=dtype)
    ends = a_TM.scales.new_full((1,), rows, dtype=torch.int32)
    return scaled_grouped_mm(a_TM, b_1NM, ends, dtype)


def _room(weight: torch.Tensor, precision: str) -> int:
    """Return the rows that ``weight`` takes among others: whole blocks, where it has blocks."""
    return -(-len(weight) // TILE) * TILE if RECIPES[precision].tiled else len(weight)


def _joined(weights: Sequence[torch.Tensor], precision: str) -> torch.Tensor:
    """Stack the rows of all weights; a single weight is not copied."""
    rooms = [_room(w, precision) for w in weights]
    padded = [
        w if len(w) == n else F.pad(w, (0, 0, 0, n - len(w)))
        for w, n in zip(weights, rooms, strict=True)
    ]
    return padded[0] if len(weights) == 1 else torch.cat(padded)


@_linears_fp8.register_fake
def _(x_TD, weights, precision):
    return x_TD.new_empty(x_TD.shape[0], sum(_room(w, precision) for w in weights))


@torch.library.custom_op("moetrain::linears_fp8_backward", mutates_args=())
def _linears_fp8_backward(
    dy_TN: torch.Tensor,
    x_TD: torch.Tensor,
    w_ND: torch.Tensor,
    precision: str,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    recipe = RECIPES[precision]
    w_DN = recipe.weights(w_ND[None], "triton", turned=True)
    dx_TD = _dense(recipe.rows(dy_TN, "triton"), w_DN, dy_TN.dtype)
    return dx_TD, dy_TN.t() @ x_TD if is_trained else dy_TN.new_empty(0)


@_linears_fp8_backward.register_fake
def _(dy_TN, x_TD, w_ND, precision, is_trained):
    return torch.empty_like(x_TD), torch.empty_like(w_ND) if is_trained else w_ND.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.precision = inputs
    save_inputs(ctx, tuple(tensors), output)


def _differentiate(ctx: Any, dy_TN: torch.Tensor) -> tuple[Any, ...]:
    x_TD, *weights = ctx.saved_tensors
    is_trained = any(ctx.needs_input_grad[1])
    w_ND = _joined(weights, ctx.precision)  # made again rather than kept since the forward
    dx_TD, dw_ND = _linears_fp8_backward(dy_TN.contiguous(), x_TD, w_ND, ctx.precision, is_trained)
    if not is_trained:
        return dx_TD, [None] * len(weights), None
    parts = dw_ND.split([_room(w, ctx.precision) for w in weights])
    return dx_TD, [dw[: len(w)] for dw, w in zip(parts, weights, strict=True)], None


_linears_fp8.register_autograd(_differentiate, setup_context=_save)
worth_saving("linear", torch.ops.moetrain.linears_fp8.default)
