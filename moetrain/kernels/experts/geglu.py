"""GeGLU with a routing weight: ``y = gelu(gate) * up * w`` (arXiv 2002.05202).

GELU is the one with tanh (arXiv 1606.08415). With ``u = 2 sqrt(2 / pi) (gate + 0.044715 gate^3)``
and ``s = sigmoid(u)`` it is ``gelu(gate) = gate * s``. The gradients for an upstream ``dy`` are::

    d_up   = dy * w * gate * s
    d_gate = dy * w * up * (s + gate * s * (1 - s) * u')
    d_w    = sum over F of dy * gate * s * up

Worked example, one row, F = 1: gate 0, up 3, w 2 and dy 1 give s = 1/2, y = 0, d_up = 0,
d_gate = 1 * 2 * 3 * 1/2 = 3 and d_w = 0.

Rows are independent: a row of uninitialised memory (past the last expert's) spoils no other.

Legend: R rows, F expert width. ``gate_up`` holds gate in its first F columns and up in the rest.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
from torch.nn import functional as F

from moetrain.kernels.backend import (
    Backend,
    refusal,
    require_contiguous,
    save_inputs,
    tl,
    triton,
    use_fast,
)

_COLS, _WARPS = 1024, 4  # as SwiGLU's
_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBIC = tl.constexpr(0.044715)


def geglu(
    gate_up_R2F: torch.Tensor, weights_R: torch.Tensor | None = None, backend: Backend = "auto"
) -> torch.Tensor:
    """Return ``y_RF`` in ``gate_up``'s dtype, computed in fp32.

    Args:
        gate_up_R2F: bf16, fp16 or fp32, contiguous.
        weights_R: routing weights, any floating dtype, differentiable too; None: ones.
    """
    is_paired = gate_up_R2F.dim() == 2 and gate_up_R2F.shape[1] % 2 == 0
    if not is_paired or (weights_R is not None and weights_R.shape != gate_up_R2F.shape[:1]):
        takes = "[R, 2F], gate's columns, then up's, and one weight a row"
        raise refusal("geglu", takes, gate_up=gate_up_R2F, weights=weights_R)
    if not use_fast(backend, gate_up_R2F):
        wide = torch.promote_types(gate_up_R2F.dtype, torch.float32)
        gate_RF, up_RF = gate_up_R2F.to(wide).chunk(2, dim=-1)
        y_RF = F.gelu(gate_RF, approximate="tanh") * up_RF
        if weights_R is not None:
            y_RF = y_RF * weights_R.to(wide)[:, None]
        return y_RF.to(gate_up_R2F.dtype)
    if gate_up_R2F.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise refusal("geglu", "bf16, fp16 or fp32", gate_up=gate_up_R2F)
    require_contiguous("geglu", gate_up=gate_up_R2F)
    if weights_R is None:
        weights_R = gate_up_R2F.new_ones(gate_up_R2F.shape[0], dtype=torch.float32)
    return _geglu(gate_up_R2F, weights_R.contiguous())


@torch.library.custom_op("moetrain::geglu", mutates_args=())
def _geglu(gate_up_R2F: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
    y_RF = gate_up_R2F.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, _COLS))
    _forward_kernel[grid](gate_up_R2F, weights_R, y_RF, width, _COLS, num_warps=_WARPS)
    return y_RF


@_geglu.register_fake
def _(gate_up_R2F: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    return gate_up_R2F.new_empty(gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2)


@torch.library.custom_op("moetrain::geglu_backward", mutates_args=())
def _geglu_backward(
    dy_RF: torch.Tensor, gate_up_R2F: torch.Tensor, weights_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return geglu_gradients(dy_RF, gate_up_R2F, weights_R)


@_geglu_backward.register_fake
def _(dy_RF, gate_up_R2F, weights_R):
    return torch.empty_like(gate_up_R2F), torch.empty_like(weights_R)


def geglu_gradients(
    dy_RF: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    y_RF: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``d_gate_up`` and ``d_weights`` within an op; ``y_RF`` receives :func:`geglu`."""
    rows, width = dy_RF.shape
    grads = torch.empty_like(gate_up_R2F), torch.empty_like(weights_R)
    inputs = dy_RF, gate_up_R2F, weights_R
    _backward_kernel[(rows,)](*inputs, *grads, y_RF, width, _COLS, num_warps=_WARPS)
    return grads


def _differentiate(ctx, dy_RF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _geglu_backward(dy_RF.contiguous(), *ctx.saved_tensors)


_geglu.register_autograd(_differentiate, setup_context=save_inputs)


@triton.jit
def _share(gate):
    """The sigmoid of which GELU is gate's multiple."""
    return tl.sigmoid(gate * (gate * gate * _CUBIC + 1.0) * _SLOPE)


@triton.jit
def _forward_kernel(gate_up, weights, y, width, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    gate_at = gate_up + row * 2 * width + col
    gate = tl.load(gate_at, col < width).to(tl.float32)
    up = tl.load(gate_at + width, col < width).to(tl.float32)
    w = tl.load(weights + row).to(tl.float32)
    tl.store(y + row * width + col, gate * _share(gate) * up * w, col < width)


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
        s = _share(gate)
        gelu = gate * s
        slope = s + gelu * (1.0 - s) * (gate * gate * _CUBIC * 3.0 + 1.0) * _SLOPE
        d_w += d_y * gelu * up
        tl.store(d_gate_up + gate_at, d_y * w * up * slope, col < width)
        tl.store(d_gate_up + gate_at + width, d_y * w * gelu, col < width)
        if y is not None:
            tl.store(y + row * width + col, gelu * up * w, col < width)
    tl.store(d_weights + row, tl.sum(d_w, axis=0))
