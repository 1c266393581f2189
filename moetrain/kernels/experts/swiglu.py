"""SwiGLU with a routing weight, ``y = silu(gate) * up * w`` (arXiv 2002.05202), plain or in e4m3.

With ``s = sigmoid(gate)`` and ``silu(gate) = gate * s``, the gradients for an upstream ``dy`` are::

    d_up   = dy * w * gate * s
    d_gate = dy * w * up * s * (1 + gate * (1 - s))
    d_w    = sum over F of dy * gate * s * up

Worked example, one row, F = 1: gate 0, up 3, w 2 and dy 1 give s = 1/2, y = 0, d_up = 0,
d_gate = 1 * 2 * 3 * 1/2 = 3 and d_w = 0.

``w`` is one scalar a row, applied here so that combining a token's experts is a plain sum
afterwards. The backward saves the inputs alone and recomputes ``s``. Rows are independent: a row of
uninitialised memory (past the last expert's) spoils no other, so no offsets are needed.

:func:`swiglu_quantised` and :func:`swiglu_backward_quantised` write rows in e4m3 for the products
of :mod:`moetrain.kernels.experts.mlp_fp8`. A program holds a whole row, so it knows the largest
number, and with it the scale, before it writes. Numbers are rounded to the rows' dtype first: the
results equal :func:`~moetrain.kernels.quant.e4m3.quantise_rows` of the plain kernel's, without the
way to memory and back. The operands of the weights' gradients are also written unquantised.

Legend: R rows, F expert width. ``gate_up`` holds gate in its first F columns and up in the rest.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton's launch settings and unrolled ranges are not typed.)

from typing import NamedTuple

import torch
from torch.nn import functional as F

from moetrain.kernels.backend import INTERPRETED, Backend, tl, triton, use_fast
from moetrain.kernels.quant.e4m3 import (
    E4M3,
    Quantised,
    row_launch,
    scale_of,
    to_e4m3,
)

# Measured on one H200: a program takes one row, 1024 columns at a time (16 bytes of bf16 a thread).
_COLS, _WARPS = 1024, 4


def swiglu(
    gate_up_R2F: torch.Tensor, weights_R: torch.Tensor | None = None, backend: Backend = "auto"
) -> torch.Tensor:
    """Return ``y_RF`` in ``gate_up``'s dtype, computed in fp32.

    Args:
        gate_up_R2F: bf16, fp16 or fp32, contiguous (any floating dtype on the reference path).
        weights_R: routing weights, any floating dtype, differentiable too; None: ones.

    Raises:
        ValueError: for other shapes, dtypes or strides.
    """
    if gate_up_R2F.dim() != 2 or gate_up_R2F.shape[1] % 2:
        raise ValueError(
            f"swiglu: gate_up was given as {tuple(gate_up_R2F.shape)}; it takes [R, 2F], with "
            "gate's columns, then up's"
        )
    if weights_R is not None and weights_R.shape != gate_up_R2F.shape[:1]:
        raise ValueError(
            f"swiglu: weights were given as {tuple(weights_R.shape)}; with gate_up of "
            f"{tuple(gate_up_R2F.shape)} it takes one weight a row"
        )
    if not use_fast(backend, gate_up_R2F):
        return swiglu_reference(gate_up_R2F, weights_R)
    if gate_up_R2F.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"swiglu: gate_up was given in {gate_up_R2F.dtype}; it takes bf16, fp16 or fp32"
        )
    if not gate_up_R2F.is_contiguous():
        raise ValueError(
            f"swiglu: gate_up was given with strides {gate_up_R2F.stride()}; it takes a contiguous "
            "tensor"
        )
    if weights_R is None:
        weights_R = gate_up_R2F.new_ones(gate_up_R2F.shape[0], dtype=torch.float32)
    return _swiglu(gate_up_R2F, weights_R.contiguous())


def swiglu_reference(
    gate_up_R2F: torch.Tensor, weights_R: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute :func:`swiglu` in plain torch."""
    wide = torch.promote_types(gate_up_R2F.dtype, torch.float32)
    gate_RF, up_RF = gate_up_R2F.to(wide).chunk(2, dim=-1)
    y_RF = F.silu(gate_RF) * up_RF
    if weights_R is not None:
        y_RF = y_RF * weights_R.to(wide)[:, None]
    return y_RF.to(gate_up_R2F.dtype)


@torch.library.custom_op("moetrain::swiglu", mutates_args=())
def _swiglu(gate_up_R2F: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
    y_RF = gate_up_R2F.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, _COLS))
    _forward_kernel[grid](gate_up_R2F, weights_R, y_RF, width, _COLS, num_warps=_WARPS)
    return y_RF


@_swiglu.register_fake
def _(gate_up_R2F: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    return gate_up_R2F.new_empty(gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2)


@torch.library.custom_op("moetrain::swiglu_backward", mutates_args=())
def _swiglu_backward(
    dy_RF: torch.Tensor, gate_up_R2F: torch.Tensor, weights_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch_backward(dy_RF, gate_up_R2F, weights_R, None)


def swiglu_backward_with_output(
    dy_RF: torch.Tensor, gate_up_R2F: torch.Tensor, weights_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``d_gate_up``, ``d_weights`` and ``y`` itself, recomputed in the same pass.

    An op whose own backward needs ``y`` calls this; inputs are contiguous, without autograd.
    """
    y_RF = torch.empty_like(dy_RF)
    return *_launch_backward(dy_RF, gate_up_R2F, weights_R, y_RF), y_RF


def _launch_backward(
    dy_RF: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    y_RF: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = dy_RF.shape
    grads = torch.empty_like(gate_up_R2F), torch.empty_like(weights_R)
    inputs = dy_RF, gate_up_R2F, weights_R
    _backward_kernel[(rows,)](*inputs, *grads, y_RF, width, _COLS, num_warps=_WARPS)
    return grads


@_swiglu_backward.register_fake
def _(dy_RF, gate_up_R2F, weights_R):
    return torch.empty_like(gate_up_R2F), torch.empty_like(weights_R)


def _save(ctx, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, dy_RF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _swiglu_backward(dy_RF.contiguous(), *ctx.saved_tensors)


_swiglu.register_autograd(_differentiate, setup_context=_save)


@triton.jit
def _forward_kernel(gate_up, weights, y, width, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    gate_at = gate_up + row * 2 * width + col
    gate = tl.load(gate_at, col < width).to(tl.float32)
    up = tl.load(gate_at + width, col < width).to(tl.float32)
    w = tl.load(weights + row).to(tl.float32)
    tl.store(y + row * width + col, gate * tl.sigmoid(gate) * up * w, col < width)


@triton.jit
def _backward_kernel(
    dy, gate_up, weights, d_gate_up, d_weights, y, width: tl.constexpr, COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(weights + row).to(tl.float32)
    d_w = tl.zeros([COLS], tl.float32)
    # Unrolled, so that the loads of all columns are in flight together.
    for start in tl.static_range(0, width, COLS):
        col = start + tl.arange(0, COLS)
        gate_at = row * 2 * width + col
        gate = tl.load(gate_up + gate_at, col < width, other=0.0).to(tl.float32)
        up = tl.load(gate_up + gate_at + width, col < width, other=0.0).to(tl.float32)
        d_y = tl.load(dy + row * width + col, col < width, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        silu = gate * s
        d_w += d_y * silu * up
        tl.store(d_gate_up + gate_at, d_y * w * up * (s + silu * (1 - s)), col < width)
        tl.store(d_gate_up + gate_at + width, d_y * w * silu, col < width)
        if y is not None:
            tl.store(y + row * width + col, silu * up * w, col < width)
    tl.store(d_weights + row, tl.sum(d_w, axis=0))


class _SwigluGrads(NamedTuple):
    """The tensors that the backward of an expert's products takes from SwiGLU's."""

    narrow: Quantised
    """d_gate_up [R, 2F] in e4m3."""
    gate_up_R2F: torch.Tensor
    """The same in the rows' dtype."""
    weights_R: torch.Tensor
    y_RF: torch.Tensor
    """SwiGLU's result (not a gradient), recomputed in the same pass."""


def swiglu_quantised(gate_up_R2F: torch.Tensor, weights_R: torch.Tensor) -> Quantised:
    """Return ``y_RF`` in e4m3, for ops on their fast path; inputs are contiguous, no autograd.

    Raises:
        ValueError: if there are not as many weights as rows.
    """
    _check_quantised(gate_up_R2F, weights_R)
    return Quantised(*_swiglu_quantised(gate_up_R2F, weights_R))


def swiglu_backward_quantised(
    dy_RF: torch.Tensor, gate_up_R2F: torch.Tensor, weights_R: torch.Tensor
) -> _SwigluGrads:
    """Return the gradients for an upstream ``dy_RF``, and the result; otherwise as above."""
    _check_quantised(gate_up_R2F, weights_R)
    values_R2F, scales_R, *others = _swiglu_backward_quantised(dy_RF, gate_up_R2F, weights_R)
    return _SwigluGrads(Quantised(values_R2F, scales_R), *others)


def _check_quantised(gate_up_R2F: torch.Tensor, weights_R: torch.Tensor) -> None:
    if weights_R.shape != gate_up_R2F.shape[:1]:
        raise ValueError(
            f"swiglu_quantised: weights were given as {tuple(weights_R.shape)}; with gate_up of "
            f"{tuple(gate_up_R2F.shape)} it takes one weight a row"
        )


@torch.library.custom_op("moetrain::swiglu_quantised", mutates_args=())
def _swiglu_quantised(
    gate_up_R2F: torch.Tensor, weights_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    values_RF, scales_R = _swiglu_quantised_fake(gate_up_R2F, weights_R)
    rows, width = values_RF.shape
    if rows:
        _quantised_forward_kernel[(rows,)](
            gate_up_R2F, weights_R, values_RF, scales_R, width,
            BY_HAND=INTERPRETED, **row_launch(width),
        )  # fmt: skip
    return values_RF, scales_R


@_swiglu_quantised.register_fake
def _swiglu_quantised_fake(gate_up_R2F, weights_R):
    rows, width = gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
    scales_R = gate_up_R2F.new_empty(rows, dtype=torch.float32)
    return gate_up_R2F.new_empty(rows, width, dtype=E4M3), scales_R


@torch.library.custom_op("moetrain::swiglu_backward_quantised", mutates_args=())
def _swiglu_backward_quantised(
    dy_RF: torch.Tensor, gate_up_R2F: torch.Tensor, weights_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    results = _swiglu_backward_fake(dy_RF, gate_up_R2F, weights_R)
    rows, width = dy_RF.shape
    if rows:
        _quantised_backward_kernel[(rows,)](
            dy_RF, gate_up_R2F, weights_R, *results, width,
            BY_HAND=INTERPRETED, **row_launch(width),
        )  # fmt: skip
    return results


@_swiglu_backward_quantised.register_fake
def _swiglu_backward_fake(dy_RF, gate_up_R2F, weights_R):
    values_R2F = torch.empty_like(gate_up_R2F, dtype=E4M3)
    scales_R = dy_RF.new_empty(dy_RF.shape[0], dtype=torch.float32)
    others = (torch.empty_like(x) for x in (gate_up_R2F, weights_R, dy_RF))
    return values_R2F, scales_R, *others


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
    dy, gate_up, weights, values, scales, d_gate_up, d_weights, y, width,
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
    tl.store(d_gate_up + gate_at, d_gate, mask)
    tl.store(d_gate_up + gate_at + width, d_up, mask)
    tl.store(y + row * width + col, silu * up * w, mask)
    tl.store(d_weights + row, tl.sum(d_y * silu * up, axis=0))
