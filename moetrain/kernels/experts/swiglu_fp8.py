"""SwiGLU between products in e4m3: :mod:`moetrain.kernels.experts.swiglu`, quantised by rows.

A program has a row whole, so its largest number, and with it the scale, is known before anything is
written. Numbers are rounded to the rows' dtype first: what comes out is what
:func:`~moetrain.kernels.quant.rows.quantise_rows` makes of the plain kernel's results, without
their way to memory and back. What the weights' gradients are made of is written as it is too.

Legend: R rows, F expert width.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch

from moetrain.kernels.quant.rows import (
    E4M3,
    Quantised,
    row_launch,
    scale_of,
    to_e4m3,
)
from moetrain.kernels.triton import INTERPRETED, tl, triton


class SwigluGrads(NamedTuple):
    """What the backward of an expert's products takes from SwiGLU's."""

    narrow: Quantised
    """d_gate_up [R, 2F] in e4m3."""
    gate_up_R2F: torch.Tensor
    """The same as it is."""
    weights_R: torch.Tensor
    y_RF: torch.Tensor
    """No gradient: SwiGLU's result, recomputed in the same pass."""


def swiglu_quantised(gate_up_R2F: torch.Tensor, weights_R: torch.Tensor) -> Quantised:
    """``y_RF`` in e4m3; contiguous inputs, no autograd: for ops, on their fast path.

    Raises:
        ValueError: another number of weights than of rows.
    """
    _check(gate_up_R2F, weights_R)
    return Quantised(*_swiglu_quantised(gate_up_R2F, weights_R))


def swiglu_backward_quantised(
    dy_RF: torch.Tensor, gate_up_R2F: torch.Tensor, weights_R: torch.Tensor
) -> SwigluGrads:
    """The gradients for an upstream ``dy_RF``, and the result; otherwise as above."""
    _check(gate_up_R2F, weights_R)
    values_R2F, scales_R, *others = _swiglu_backward_quantised(dy_RF, gate_up_R2F, weights_R)
    return SwigluGrads(Quantised(values_R2F, scales_R), *others)


def _check(gate_up_R2F: torch.Tensor, weights_R: torch.Tensor) -> None:
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
        _forward_kernel[(rows,)](
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
        _backward_kernel[(rows,)](
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
    """In fp32, what ``x`` is in the dtype that ``like`` points to."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _forward_kernel(
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
def _backward_kernel(
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
