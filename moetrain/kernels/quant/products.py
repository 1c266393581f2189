"""Matrix products in e4m3: the one place that names torch's scaled GEMMs.

Both operands lie along the inner width, with a scale for each row of the first and each column of
the product (:mod:`moetrain.kernels.quant.e4m3`). On CUDA the tensor cores multiply e4m3; on a CPU
the dequantised operands are multiplied in fp32: the same sum, but for its order. Tensor cores add
in registers that keep fewer bits than fp32 (``use_fast_accum``). Without that option torch adds
every 128 products up in fp32, which on one H200 costs a quarter of the rate.

:func:`linears_fp8` is a dense layer, ``y = q(x) @ q(w)^T``, of several ``w`` at once. For an
upstream ``dy``, whose columns are those of all the products::

    dx = q(dy) @ q(w)        dw = dy^T @ x

where q() quantises by rows, or by columns where a weight is read that way, as in
:mod:`moetrain.kernels.experts.mlp_fp8`; weights' gradients are bf16 products of bf16. One product
for all ``w`` quantises the rows once both ways and adds their gradients in fp32.

Legend: T tokens, R rows sorted by expert, E experts, D or M inner width, N outer width (of all
``w`` together).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from moetrain.kernels.backend import Backend, use_fast, worth_saving
from moetrain.kernels.experts.grouped_mm import grouped_mm
from moetrain.kernels.quant.e4m3 import (
    MULTIPLE,
    Quantised,
    quantise_columns,
    quantise_columns_reference,
    quantise_rows,
    quantise_rows_reference,
)


def fp8_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why e4m3 products cannot run on a CUDA device in a compute dtype; None if they can."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"takes a Hopper GPU or later, and this is a {torch.cuda.get_device_name(device)}"
    if dtype != torch.bfloat16:
        return f"takes train.dtype bfloat16, and this run computes in {dtype}"
    return None


def _scaled_mm(a_TM: Quantised, b_NM: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Return ``a @ b^T`` [T, N] in ``dtype``; on CUDA that is bf16, with widths in 16s."""
    if not a_TM.values.is_cuda:
        return (a_TM.to(torch.float32) @ b_NM.to(torch.float32).t()).to(dtype)
    return torch._scaled_mm(
        a_TM.values,
        b_NM.values.t(),
        a_TM.scales[:, None],
        b_NM.scales[None, :],
        out_dtype=dtype,
        use_fast_accum=True,
    )


def scaled_grouped_mm(
    a_RM: Quantised, b_ENM: Quantised, offsets_E: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``out[r] = a[r] @ b[group of r]^T`` [R, N], groups as in ``grouped_mm``."""
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
    x_TD: torch.Tensor, weights: Sequence[torch.Tensor], backend: Backend = "auto"
) -> tuple[torch.Tensor, ...]:
    """Multiply ``x`` by each ``w`` [N, D], on CUDA in bf16. The results are views of one tensor.

    Raises:
        ValueError: for weights of another width or dtype, or widths that are not multiples of 16.
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


class _DenseProduct(torch.autograd.Function):
    """The reference's ``q(x) @ q(w)^T``, multiplied in ``x``'s dtype."""

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
    """The products side by side in one tensor [T, N]."""
    return _scaled_mm(
        quantise_rows(x_TD, "triton"), quantise_rows(_joined(weights), "triton"), x_TD.dtype
    )


def _joined(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack the rows of all weights; a single weight is not copied."""
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


@_linears_fp8.register_fake
def _(x_TD, weights):
    return x_TD.new_empty(x_TD.shape[0], sum(w.shape[0] for w in weights))


@torch.library.custom_op("moetrain::linears_fp8_backward", mutates_args=())
def _linears_fp8_backward(
    dy_TN: torch.Tensor, x_TD: torch.Tensor, w_ND: torch.Tensor, is_trained: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of w (empty, unless ``is_trained``)."""
    w_DN = Quantised(*(x[0] for x in quantise_columns(w_ND[None], "triton")))
    dx_TD = _scaled_mm(quantise_rows(dy_TN, "triton"), w_DN, dy_TN.dtype)
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
    w_ND = _joined(weights)  # made again rather than kept since the forward
    dx_TD, dw_ND = _linears_fp8_backward(dy_TN.contiguous(), x_TD, w_ND, is_trained)
    if not is_trained:
        return dx_TD, [None] * len(weights)
    return dx_TD, list(dw_ND.split([w.shape[0] for w in weights]))


_linears_fp8.register_autograd(_differentiate, setup_context=_save)
worth_saving("linear", torch.ops.moetrain.linears_fp8.default)
