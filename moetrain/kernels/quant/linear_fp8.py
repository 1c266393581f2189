"""Dense products in e4m3: ``y = q(x) @ q(w)^T`` of several ``w`` side by side, as one product.

For an upstream ``dy``, whose columns are those of all of them::

    dx = q(dy) @ q(w)        dw = dy^T @ x

with q() for quantised by rows, or by columns where a weight is read that way, as in
:mod:`moetrain.kernels.experts.mlp_fp8`; weights' gradients are bf16 of bf16. Products of the same
rows are one, so that the rows are quantised once both ways, and the gradients that come back
through each of them are added where products are, in fp32.

Legend: T tokens, D inner width, N outer width, all outer widths together.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from moetrain.kernels.backend import Backend, use_fast
from moetrain.kernels.quant.rows import (
    MULTIPLE,
    Quantised,
    quantise_columns,
    quantise_columns_reference,
    quantise_rows,
    quantise_rows_reference,
)
from moetrain.kernels.quant.scaled_mm import scaled_mm
from moetrain.kernels.saving import worth_saving


def linears_fp8(
    x_TD: torch.Tensor, weights: Sequence[torch.Tensor], backend: Backend = "auto"
) -> tuple[torch.Tensor, ...]:
    """``x @ w^T`` of each ``w`` [N, D]; on CUDA in bf16. Results are views of one tensor.

    Raises:
        ValueError: weights of another width or dtype, or widths that are no multiples of 16.
    """
    given = ", ".join(f"{w.dtype} {tuple(w.shape)}" for w in weights)
    if any(w.shape[1:] != x_TD.shape[1:] or w.dtype != x_TD.dtype for w in weights):
        raise ValueError(
            f"linears_fp8: was given x {x_TD.dtype} {tuple(x_TD.shape)} and {given}; it takes "
            "[N, D] in x's dtype"
        )
    if any(size % MULTIPLE for w in weights for size in w.shape):
        raise ValueError(f"linears_fp8: was given {given}; it takes multiples of {MULTIPLE}")
    sizes = [w.shape[0] for w in weights]
    if use_fast(backend, x_TD):
        y_TN = _linears_fp8(x_TD.contiguous(), list(weights))
    else:
        y_TN = _DenseProduct.apply(x_TD, _joined(weights))
    return y_TN.split(sizes, dim=1)


def linears_fp8_reference(
    x_TD: torch.Tensor, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """:func:`linears_fp8` in plain torch."""
    return linears_fp8(x_TD, weights, "reference")


class _DenseProduct(torch.autograd.Function):
    """``q(x) @ q(w)^T``, multiplied in ``x``'s dtype."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, w_ND: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_TD, w_ND)
        return F.linear(*(quantise_rows_reference(x).to(x.dtype) for x in (x_TD, w_ND)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        (dy_TN,), (x_TD, w_ND) = grads, ctx.saved_tensors
        dy, w = quantise_rows_reference(dy_TN), quantise_columns_reference(w_ND[None])
        dx_TD = F.linear(dy.to(dy_TN.dtype), w.to(dy_TN.dtype)[0])
        return dx_TD, dy_TN.t() @ x_TD if ctx.needs_input_grad[1] else None


@torch.library.custom_op("moetrain::linears_fp8", mutates_args=())
def _linears_fp8(x_TD: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of them side by side."""
    return scaled_mm(
        quantise_rows(x_TD, "triton"), quantise_rows(_joined(weights), "triton"), x_TD.dtype
    )


def _joined(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """One below the other; one alone is not copied."""
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


@_linears_fp8.register_fake
def _(x_TD, weights):
    return x_TD.new_empty(x_TD.shape[0], sum(w.shape[0] for w in weights))


@torch.library.custom_op("moetrain::linears_fp8_backward", mutates_args=())
def _linears_fp8_backward(
    dy_TN: torch.Tensor, x_TD: torch.Tensor, w_ND: torch.Tensor, is_trained: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of w ([0], unless ``is_trained``)."""
    w_DN = Quantised(*(x[0] for x in quantise_columns(w_ND[None], "triton")))
    dx_TD = scaled_mm(quantise_rows(dy_TN, "triton"), w_DN, dy_TN.dtype)
    return dx_TD, dy_TN.t() @ x_TD if is_trained else dy_TN.new_empty(0)


@_linears_fp8_backward.register_fake
def _(dy_TN, x_TD, w_ND, is_trained):
    return torch.empty_like(x_TD), torch.empty_like(w_ND) if is_trained else w_ND.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x_TD, weights = inputs
    ctx.save_for_backward(x_TD, *weights)


def _differentiate(ctx: Any, dy_TN: torch.Tensor) -> tuple[Any, ...]:
    x_TD, *weights = ctx.saved_tensors
    is_trained = any(ctx.needs_input_grad[1])
    w_ND = _joined(weights)  # again, rather than kept
    dx_TD, dw_ND = _linears_fp8_backward(dy_TN.contiguous(), x_TD, w_ND, is_trained)
    if not is_trained:
        return dx_TD, [None] * len(weights)
    return dx_TD, list(dw_ND.split([w.shape[0] for w in weights]))


_linears_fp8.register_autograd(_differentiate, setup_context=_save)
worth_saving("linear", torch.ops.moetrain.linears_fp8.default)
