"""The clamped SwiGLU of GPT-OSS: with the experts' biases, and ``up + 1`` in place of ``up``.

For a row of expert e, with its routing weight w, a limit L and a factor ``alpha`` of the gate::

    gate = min(a_gate + b_gate[e], L)      up = clamp(a_up + b_up[e], -L, L)
    s = sigmoid(alpha * gate)              y = (up + 1) * gate * s * w

For an upstream ``dy``, where each of the first two is 0 if its clamp took effect::

    d_up   = dy * w * gate * s
    d_gate = dy * w * (up + 1) * s * (1 + alpha * gate * (1 - s))
    d_w    = sum over F of dy * (up + 1) * gate * s

``d_a`` is ``[d_gate, d_up]``, and the biases' gradient is its sum over an expert's rows.

Worked example, one row, F = 1, no biases, L 7: gate 0, up 9, w 2 and dy 1 give up = 7, s = 1/2,
y = 0, d_up = 0, d_gate = 1 * 2 * 8 * 1/2 = 8 and d_w = 0.

Rows are independent: uninitialised rows, past those of the last expert, change no other row.

Legend: R rows sorted by expert, E experts, F expert width. ``gate_up`` and its bias hold gate in
their first F columns and up in the rest.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any

import torch

from moetrain.kernels.experts.products import grouped_weight_grad
from moetrain.runtime.backend import (
    Backend,
    gradients,
    refusal,
    require_contiguous,
    tl,
    triton,
    use_fast,
)
from moetrain.runtime.typed import OpContext

_COLS, _WARPS = 1024, 4  # as swiglu's


def clamped_swiglu(
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    bias_E2F: torch.Tensor,
    offsets_E: torch.Tensor,
    limit: float,
    alpha: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return ``y_RF`` in ``gate_up``'s dtype, computed in fp32.

    Args:
        gate_up_R2F: bf16, fp16 or fp32, contiguous. For gradients a row must have a multiple of 16
            bytes.
        weights_R: routing weights, any floating dtype, differentiable too.
        bias_E2F: in ``gate_up``'s dtype, contiguous, differentiable too.
        offsets_E: int32, the end row of each expert.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    rows, both = gate_up_R2F.shape
    fits = both % 2 == 0 and weights_R.shape == (rows,)
    if not fits or bias_E2F.shape != (*offsets_E.shape, both):
        takes = "[R, 2F], gate's columns, then up's, [R], and [E, 2F] for E offsets"
        raise refusal(
            "clamped_swiglu",
            takes,
            gate_up=gate_up_R2F,
            weights=weights_R,
            bias=bias_E2F,
            offsets=offsets_E,
        )
    if not use_fast(backend, gate_up_R2F):
        wide = torch.promote_types(gate_up_R2F.dtype, torch.float32)
        gate_up_R2F, dtype = gate_up_R2F.to(wide), gate_up_R2F.dtype
        biased_R2F = gate_up_R2F + bias_E2F.to(wide)[expert_of_rows(offsets_E, rows)]
        # Gradients of rows past the last expert's may hold NaN, which no bias must get.
        is_used_R = torch.arange(rows, device=offsets_E.device) < offsets_E[-1]
        biased_R2F = torch.where(is_used_R[:, None], biased_R2F, gate_up_R2F)
        gate_RF, up_RF = biased_R2F.chunk(2, dim=-1)
        gate_RF, up_RF = gate_RF.clamp(max=limit), up_RF.clamp(-limit, limit)
        y_RF = (up_RF + 1) * gate_RF * (alpha * gate_RF).sigmoid() * weights_R.to(wide)[:, None]
        return y_RF.to(dtype)
    is_known = gate_up_R2F.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if not is_known or gate_up_R2F.dtype != bias_E2F.dtype:
        takes = "bf16, fp16 or fp32, both alike"
        raise refusal("clamped_swiglu", takes, gate_up=gate_up_R2F, bias=bias_E2F)
    require_contiguous("clamped_swiglu", gate_up=gate_up_R2F, bias=bias_E2F)
    return clamped_swiglu_op(gate_up_R2F, weights_R.contiguous(), bias_E2F, offsets_E, limit, alpha)


def expert_of_rows(offsets_E: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the expert of each row, int64 [R]; rows past the last expert's get the last one."""
    index_R = torch.arange(rows, device=offsets_E.device, dtype=offsets_E.dtype)
    expert_R = torch.searchsorted(offsets_E, index_R, right=True)
    return expert_R.clamp(max=offsets_E.shape[0] - 1)


@torch.library.custom_op("moetrain::clamped_swiglu", mutates_args=())
def clamped_swiglu_op(
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    bias_E2F: torch.Tensor,
    offsets_E: torch.Tensor,
    limit: float,
    alpha: float,
) -> torch.Tensor:
    rows, both = gate_up_R2F.shape
    y_RF = gate_up_R2F.new_empty(rows, both // 2)
    experts = offsets_E.shape[0]
    grid = (rows, triton.cdiv(both // 2, _COLS))
    _forward_kernel[grid](
        gate_up_R2F, weights_R, bias_E2F, offsets_E, y_RF, both // 2, experts, limit, alpha,
        triton.next_power_of_2(experts), _COLS, num_warps=_WARPS,
    )  # fmt: skip
    return y_RF


@clamped_swiglu_op.register_fake
def _(gate_up_R2F, weights_R, bias_E2F, offsets_E, limit, alpha):
    return gate_up_R2F.new_empty(gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2)


@torch.library.custom_op("moetrain::clamped_swiglu_backward", mutates_args=())
def clamped_swiglu_backward_op(
    dy_RF: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    bias_E2F: torch.Tensor,
    offsets_E: torch.Tensor,
    limit: float,
    alpha: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    d_gate_up_R2F, d_weights_R = clamped_swiglu_gradients(
        dy_RF, gate_up_R2F, weights_R, bias_E2F, offsets_E, limit, alpha
    )
    return d_gate_up_R2F, d_weights_R, sum_by_expert(d_gate_up_R2F, None, offsets_E)


@clamped_swiglu_backward_op.register_fake
def _(dy_RF, gate_up_R2F, weights_R, bias_E2F, offsets_E, limit, alpha):
    return tuple(torch.empty_like(x) for x in (gate_up_R2F, weights_R, bias_E2F))


def clamped_swiglu_gradients(
    dy_RF: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    bias_E2F: torch.Tensor,
    offsets_E: torch.Tensor,
    limit: float,
    alpha: float,
    y_RF: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``d_gate_up`` and ``d_weights``, within an op; ``y_RF`` receives the forward."""
    rows, width = dy_RF.shape
    experts = offsets_E.shape[0]
    d_gate_up_R2F, d_weights_R = torch.empty_like(gate_up_R2F), torch.empty_like(weights_R)
    _backward_kernel[(rows,)](
        dy_RF, gate_up_R2F, weights_R, bias_E2F, offsets_E, d_gate_up_R2F, d_weights_R, y_RF,
        width, experts, limit, alpha, triton.next_power_of_2(experts), _COLS, num_warps=_WARPS,
    )  # fmt: skip
    return d_gate_up_R2F, d_weights_R


def sum_by_expert(
    x_RN: torch.Tensor,
    weights_R: torch.Tensor | None,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    """Sum each expert's rows, times their weights (None: ones), in fp32: [E, N] in ``x``'s dtype.

    The sum is a grouped product with a matrix of eight columns. In bf16 a weight is split into two
    of them, so that its leading 16 bits count.
    """
    columns_R8 = x_RN.new_zeros(x_RN.shape[0], 8)  # rows of 16 bytes or more
    if weights_R is None:
        columns_R8[:, 0] = 1
    else:
        columns_R8[:, 0] = weights_R
        columns_R8[:, 1] = weights_R - columns_R8[:, 0].to(weights_R.dtype)
    sums_EN8 = grouped_weight_grad(x_RN, columns_R8, offsets_E)
    return sums_EN8.sum(-1, dtype=torch.float32).to(x_RN.dtype)


def _save(ctx: OpContext, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate_up_R2F, weights_R, bias_E2F, offsets_E, ctx.limit, ctx.alpha = inputs
    ctx.save_for_backward(gate_up_R2F, weights_R, bias_E2F, offsets_E)


def _differentiate(ctx: OpContext, dy_RF: torch.Tensor) -> tuple[object, ...]:
    gate_up_R2F, weights_R, bias_E2F, offsets_E = ctx.saved_tensors
    d_gate_up_R2F, d_weights_R, d_bias_E2F = clamped_swiglu_backward_op(
        dy_RF.contiguous(), gate_up_R2F, weights_R, bias_E2F, offsets_E, ctx.limit, ctx.alpha
    )
    return gradients(
        clamped_swiglu_op,
        gate_up_R2F=d_gate_up_R2F,
        weights_R=d_weights_R,
        bias_E2F=d_bias_E2F,
    )


clamped_swiglu_op.register_autograd(_differentiate, setup_context=_save)


@triton.jit
def expert_of(offsets, row, experts, EXPERTS: tl.constexpr):
    """Return the expert of a row: the number of experts whose rows end at or before it."""
    index = tl.arange(0, EXPERTS)
    end = tl.load(offsets + index, index < experts, other=2147483647)
    return tl.minimum(tl.sum((end <= row).to(tl.int32), axis=0), experts - 1)


@triton.jit
def _at_most(x, limit):
    # By default the minimum of NaN and a limit is the limit.
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _within(x, limit):
    return tl.maximum(_at_most(x, limit), -limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _forward_kernel(
    gate_up,
    weights,
    bias,
    offsets,
    y,
    width,
    experts,
    limit,
    alpha,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = expert_of(offsets, row, experts, EXPERTS).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    gate_at = gate_up + row * 2 * width + col
    bias_at = bias + expert * 2 * width + col
    gate = tl.load(gate_at, col < width).to(tl.float32)
    gate += tl.load(bias_at, col < width).to(tl.float32)
    up = tl.load(gate_at + width, col < width).to(tl.float32)
    up += tl.load(bias_at + width, col < width).to(tl.float32)
    gate, up = _at_most(gate, limit), _within(up, limit)
    w = tl.load(weights + row).to(tl.float32)
    value = (up + 1) * gate * tl.sigmoid(alpha * gate) * w
    tl.store(y + row * width + col, value, col < width)


@triton.jit
def _backward_kernel(
    dy,
    gate_up,
    weights,
    bias,
    offsets,
    d_gate_up,
    d_weights,
    y,
    width: tl.constexpr,
    experts,
    limit,
    alpha,
    EXPERTS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = expert_of(offsets, row, experts, EXPERTS).to(tl.int64)
    w = tl.load(weights + row).to(tl.float32)
    d_w = tl.zeros([COLS], tl.float32)
    # Unrolled, so that the loads of all columns are in flight together.
    for start in tl.static_range(0, width, COLS):
        col = start + tl.arange(0, COLS)
        gate_at = row * 2 * width + col
        bias_at = bias + expert * 2 * width + col
        gate_in = tl.load(gate_up + gate_at, col < width, other=0.0).to(tl.float32)
        gate_in += tl.load(bias_at, col < width, other=0.0).to(tl.float32)
        up_in = tl.load(gate_up + gate_at + width, col < width, other=0.0).to(tl.float32)
        up_in += tl.load(bias_at + width, col < width, other=0.0).to(tl.float32)
        d_y = tl.load(dy + row * width + col, col < width, other=0.0).to(tl.float32)
        gate, up = _at_most(gate_in, limit), _within(up_in, limit) + 1
        s = tl.sigmoid(alpha * gate)
        gated = gate * s
        d_w += d_y * gated * up
        d_gate = d_y * w * up * (s + alpha * gated * (1 - s))
        d_up = d_y * w * gated
        is_clamped = (up_in < -limit) | (up_in > limit)
        tl.store(d_gate_up + gate_at, tl.where(gate_in > limit, 0.0, d_gate), col < width)
        tl.store(d_gate_up + gate_at + width, tl.where(is_clamped, 0.0, d_up), col < width)
        if y is not None:
            tl.store(y + row * width + col, gated * up * w, col < width)
    tl.store(d_weights + row, tl.sum(d_w, axis=0))
