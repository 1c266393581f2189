"""Squared ReLU with a routing weight: ``y = relu(a)^2 * w`` (arXiv 2109.08668).

The gradients for an upstream ``dy`` are::

    d_a = 2 * dy * w * relu(a)        d_w = sum over F of dy * relu(a)^2

Worked example, one row, F = 2: a = 3 and -1, w 2 and dy 1 give y = 18 and 0, d_a = 12 and 0, and
d_w = 9.

Rows are independent: uninitialised rows, past those of the last expert, change no other row.

Legend: R rows, F expert width.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch

from moetrain.runtime.backend import (
    Backend,
    refusal,
    require_contiguous,
    save_inputs,
    tl,
    triton,
    use_fast,
)
from moetrain.runtime.typed import OpContext

_COLS, _WARPS = 1024, 4  # as SwiGLU's


def relu2(
    a_RF: torch.Tensor,
    weights_R: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return ``y_RF`` in ``a``'s dtype, computed in fp32.

    Args:
        a_RF: bf16, fp16 or fp32, contiguous.
        weights_R: routing weights, any floating dtype, differentiable too; None: ones.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if a_RF.dim() != 2 or (weights_R is not None and weights_R.shape != a_RF.shape[:1]):
        raise refusal("relu2", "[R, F] and one weight a row", a=a_RF, weights=weights_R)
    if not use_fast(backend, a_RF):
        y_RF = a_RF.to(torch.promote_types(a_RF.dtype, torch.float32)).relu().square()
        if weights_R is not None:
            y_RF = y_RF * weights_R.to(y_RF.dtype)[:, None]
        return y_RF.to(a_RF.dtype)
    if a_RF.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise refusal("relu2", "bf16, fp16 or fp32", a=a_RF)
    require_contiguous("relu2", a=a_RF)
    if weights_R is None:
        weights_R = a_RF.new_ones(a_RF.shape[0], dtype=torch.float32)
    return relu2_op(a_RF, weights_R.contiguous())


@torch.library.custom_op("moetrain::relu2", mutates_args=())
def relu2_op(a_RF: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    rows, width = a_RF.shape
    y_RF = torch.empty_like(a_RF)
    grid = (rows, triton.cdiv(width, _COLS))
    _forward_kernel[grid](a_RF, weights_R, y_RF, width, _COLS, num_warps=_WARPS)
    return y_RF


@relu2_op.register_fake
def _(a_RF: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(a_RF)


@torch.library.custom_op("moetrain::relu2_backward", mutates_args=())
def relu2_backward_op(
    dy_RF: torch.Tensor,
    a_RF: torch.Tensor,
    weights_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return relu2_gradients(dy_RF, a_RF, weights_R)


@relu2_backward_op.register_fake
def _(dy_RF, a_RF, weights_R):
    return torch.empty_like(a_RF), torch.empty_like(weights_R)


def relu2_gradients(
    dy_RF: torch.Tensor,
    a_RF: torch.Tensor,
    weights_R: torch.Tensor,
    y_RF: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``d_a`` and ``d_weights``, within an op; ``y_RF`` receives :func:`relu2`."""
    rows, width = dy_RF.shape
    d_a_RF, d_weights_R = torch.empty_like(a_RF), torch.empty_like(weights_R)
    _backward_kernel[(rows,)](
        dy_RF, a_RF, weights_R, d_a_RF, d_weights_R, y_RF, width, COLS=_COLS, num_warps=_WARPS
    )
    return d_a_RF, d_weights_R


def _differentiate(ctx: OpContext, dy_RF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a_RF, weights_R = ctx.saved_tensors
    return relu2_backward_op(dy_RF.contiguous(), a_RF, weights_R)


relu2_op.register_autograd(_differentiate, setup_context=save_inputs)


@triton.jit
def _positive(x):
    # By default the maximum of NaN and 0 is 0.
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _forward_kernel(a, weights, y, width, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    positive = _positive(tl.load(a + row * width + col, col < width).to(tl.float32))
    w = tl.load(weights + row).to(tl.float32)
    tl.store(y + row * width + col, positive * positive * w, col < width)


@triton.jit
def _backward_kernel(dy, a, weights, d_a, d_weights, y, width: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(weights + row).to(tl.float32)
    d_w = tl.zeros([COLS], tl.float32)
    # Unrolled, so that the loads of all columns are in flight together.
    for start in tl.static_range(0, width, COLS):
        col = start + tl.arange(0, COLS)
        at = row * width + col
        positive = _positive(tl.load(a + at, col < width, other=0.0).to(tl.float32))
        d_y = tl.load(dy + at, col < width, other=0.0).to(tl.float32)
        squared = positive * positive
        d_w += d_y * squared
        tl.store(d_a + at, 2.0 * d_y * w * positive, col < width)
        if y is not None:
            tl.store(y + at, squared * w, col < width)
    tl.store(d_weights + row, tl.sum(d_w, axis=0))
