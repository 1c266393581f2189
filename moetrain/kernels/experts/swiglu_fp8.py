"""SwiGLU that writes e4m3: a program holds a whole row, and so knows its scale.

The kernels round to the rows' dtype before they quantise. So the bits are those of two steps:
SwiGLU, and then :meth:`moetrain.kernels.quant.recipes.Recipe.rows`.

Legend: R rows, F expert width.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from typing import NamedTuple

import torch

from moetrain.kernels.quant.e4m3 import Quantised, row_launch, scale_of, to_e4m3
from moetrain.runtime.backend import INTERPRETED, tl, triton


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
    """SwiGLU's result [R, F], in the rows' dtype or quantised; None: it was not asked for."""
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
        with_quantised: return ``y``, too, quantised, unless ``with_dequantised`` is True.
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
