"""SwiGLU with a routing weight, or GeGLU: ``y = act(gate) * up * w`` (arXiv 2002.05202).

``act(gate) = gate * s`` with ``s = sigmoid(u)``. For SiLU u is ``gate``. For GELU, in its tanh form
(arXiv 1606.08415), it is ``2 sqrt(2 / pi) (gate + 0.044715 gate^3)``. Another activation of a gate
needs an entry in :data:`GATES` and branches in :func:`_share` and :func:`_slope`. The gradients for
an upstream ``dy`` are::

    d_up   = dy * w * gate * s
    d_gate = dy * w * up * (s + gate * s * (1 - s) * u')
    d_w    = sum over F of dy * gate * s * up

Both factors may be clamped, to ``min(act(gate), c) * clamp(up, -c, c)`` for a limit c. They have
these values in the formulas then, and a clamped one gets no gradient. The name of such an
activation also has the limit: ``silu<=7.0`` (:func:`limited`).

GPT-OSS's variant (:func:`oai`; with the experts' biases it is
:mod:`moetrain.kernels.experts.clamped_swiglu`) clamps the gate before its activation, multiplies it
by a factor alpha within the sigmoid, and adds 1 to the clamped ``up``::

    g = min(gate, c)      u = alpha * g      act = g * sigmoid(u)      y = act * (clamp(up) + 1) * w

Worked example, one row, F = 1: gate 0, up 3, w 2 and dy 1 give s = 1/2, y = 0, d_up = 0,
d_gate = 1 * 2 * 3 * 1/2 = 3 and d_w = 0. With the limit 1, d_gate = 1 * 2 * 1 * 1/2 = 1, and in
GPT-OSS's variant 1 * 2 * (1 + 1) * 1/2 = 2.

Rows are independent: uninitialised rows, past those of the last expert, change no other row.

Legend: R rows, F expert width. ``gate_up`` holds gate in its first F columns and up in the rest.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

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

# Measured on one H200: 16 bytes of bf16 a thread.
_COLS, _WARPS = 1024, 4
_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBIC = tl.constexpr(0.044715)
_NO_LIMIT = tl.constexpr(float("inf"))

GATES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),
}
"""The activations of a gate by their names, in plain torch."""
_LIMIT = "<="
_OAI = "swigluoai"
NO_LIMIT = float("inf")


class Gate(NamedTuple):
    """An activation of a gate and its numbers, as its name says them."""

    kind: str
    """A name of :data:`GATES`, or ``swigluoai``."""
    limit: float = NO_LIMIT
    """The largest value of both factors; infinity: nothing is clamped."""
    alpha: float = 1.0
    """For ``swigluoai`` the factor of the gate within the sigmoid."""


def limited(kind: str, limit: float | None) -> str:
    """Return the name of the activation ``kind`` with clamped factors; None: nothing is clamped."""
    return f"{kind}{_LIMIT}{limit!r}" if limit else kind


def oai(limit: float, alpha: float) -> str:
    """Return the name of GPT-OSS's activation, such as ``swigluoai(1.702)<=7.0``."""
    return f"{_OAI}({alpha!r}){_LIMIT}{limit!r}"


def read_gate(activation: str) -> Gate:
    """Return what ``activation`` names: a row of :data:`GATES`, :func:`limited` or :func:`oai`.

    Raises ValueError: it names none of these.
    """
    kind, separator, number = activation.partition(_LIMIT)
    limit, alpha = float(number) if separator else NO_LIMIT, 1.0
    if kind.startswith(f"{_OAI}(") and separator:
        kind, alpha = _OAI, float(kind.removeprefix(f"{_OAI}(").removesuffix(")"))
    elif kind not in GATES:
        kind = ""
    if not (kind and limit > 0):
        raise ValueError(f"activation {activation!r} is not one of {', '.join(map(repr, GATES))}")
    return Gate(kind, limit, alpha)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``act(gate) * up`` in plain torch, clamped if ``activation`` has a limit."""
    kind, limit, alpha = read_gate(activation)
    if kind == _OAI:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return gate * (alpha * gate).sigmoid() * (up + 1)
    active = GATES[kind](gate)
    if limit == NO_LIMIT:
        return active * up
    return active.clamp(max=limit) * up.clamp(min=-limit, max=limit)


def swiglu(
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor | None = None,
    backend: Backend = "auto",
    activation: str = "silu",
) -> torch.Tensor:
    """Return ``y_RF`` in ``gate_up``'s dtype, computed in fp32.

    Args:
        gate_up_R2F: bf16, fp16 or fp32, contiguous.
        weights_R: routing weights, any floating dtype, differentiable too; None: ones.
        activation: a name of :data:`GATES`, or one of :func:`limited` or :func:`oai`.

    Raises:
        ValueError: shapes, dtypes or the activation do not fit.
    """
    is_paired = gate_up_R2F.dim() == 2 and gate_up_R2F.shape[1] % 2 == 0
    if not is_paired or (weights_R is not None and weights_R.shape != gate_up_R2F.shape[:1]):
        takes = "[R, 2F], gate's columns, then up's, and one weight a row"
        raise refusal("swiglu", takes, gate_up=gate_up_R2F, weights=weights_R)
    try:
        read_gate(activation)
    except ValueError:
        takes = " or ".join(map(repr, GATES))
        raise refusal("swiglu", takes, activation=repr(activation)) from None
    if not use_fast(backend, gate_up_R2F):
        wide = torch.promote_types(gate_up_R2F.dtype, torch.float32)
        gate_RF, up_RF = gate_up_R2F.to(wide).chunk(2, dim=-1)
        y_RF = gated(gate_RF, up_RF, activation)
        if weights_R is not None:
            y_RF = y_RF * weights_R.to(wide)[:, None]
        return y_RF.to(gate_up_R2F.dtype)
    if gate_up_R2F.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise refusal("swiglu", "bf16, fp16 or fp32", gate_up=gate_up_R2F)
    require_contiguous("swiglu", gate_up=gate_up_R2F)
    if weights_R is None:
        weights_R = gate_up_R2F.new_ones(gate_up_R2F.shape[0], dtype=torch.float32)
    return swiglu_op(gate_up_R2F, weights_R.contiguous(), activation)


@torch.library.custom_op("moetrain::swiglu", mutates_args=())
def swiglu_op(
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    rows = gate_up_R2F.shape[0]
    width = gate_up_R2F.shape[1] // 2
    y_RF = gate_up_R2F.new_empty(rows, width)
    kind, limit, alpha = read_gate(activation)
    grid = (rows, triton.cdiv(width, _COLS))
    _forward_kernel[grid](
        gate_up_R2F, weights_R, y_RF, width,
        COLS=_COLS, GATE=kind, LIMIT=limit, ALPHA=alpha, num_warps=_WARPS,
    )  # fmt: skip
    return y_RF


@swiglu_op.register_fake
def _(
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    return gate_up_R2F.new_empty(gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2)


@torch.library.custom_op("moetrain::swiglu_backward", mutates_args=())
def swiglu_backward_op(
    dy_RF: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return swiglu_gradients(dy_RF, gate_up_R2F, weights_R, activation)


@swiglu_backward_op.register_fake
def _(dy_RF, gate_up_R2F, weights_R, activation):
    return torch.empty_like(gate_up_R2F), torch.empty_like(weights_R)


def swiglu_gradients(
    dy_RF: torch.Tensor,
    gate_up_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    activation: str,
    y_RF: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``d_gate_up`` and ``d_weights``, within an op; ``y_RF`` receives :func:`swiglu`."""
    rows, width = dy_RF.shape
    d_gate_up_R2F, d_weights_R = torch.empty_like(gate_up_R2F), torch.empty_like(weights_R)
    kind, limit, alpha = read_gate(activation)
    _backward_kernel[(rows,)](
        dy_RF, gate_up_R2F, weights_R, d_gate_up_R2F, d_weights_R, y_RF, width,
        COLS=_COLS, GATE=kind, LIMIT=limit, ALPHA=alpha, num_warps=_WARPS,
    )  # fmt: skip
    return d_gate_up_R2F, d_weights_R


def _save(ctx: OpContext, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate_up_R2F, weights_R, ctx.activation = inputs
    ctx.save_for_backward(gate_up_R2F, weights_R)


def _differentiate(ctx: OpContext, dy_RF: torch.Tensor) -> tuple[object, ...]:
    gate_up_R2F, weights_R = ctx.saved_tensors
    d_gate_up_R2F, d_weights_R = swiglu_backward_op(
        dy_RF.contiguous(), gate_up_R2F, weights_R, ctx.activation
    )
    return gradients(swiglu_op, gate_up_R2F=d_gate_up_R2F, weights_R=d_weights_R)


swiglu_op.register_autograd(_differentiate, setup_context=_save)


@triton.jit
def _share(gate, GATE: tl.constexpr, ALPHA: tl.constexpr):
    """Return the share s of the gate: the activation is ``gate * s``."""
    if GATE == "gelu":
        gate = gate * (gate * gate * _CUBIC + 1.0) * _SLOPE
    if GATE == "swigluoai":
        gate = gate * ALPHA
    return tl.sigmoid(gate)


@triton.jit
def _slope(gate, s, active, GATE: tl.constexpr, ALPHA: tl.constexpr):
    """Return ``gate * ds / dgate``, given s and ``active = gate * s``."""
    slope = active * (1 - s)
    if GATE == "gelu":
        slope *= (gate * gate * _CUBIC * 3.0 + 1.0) * _SLOPE
    if GATE == "swigluoai":
        slope *= ALPHA
    return slope


@triton.jit
def _clamped(factor, up, LIMIT: tl.constexpr):
    """Clamp both factors. NaN stays NaN, which ``tl.minimum`` would hide."""
    factor = tl.where(factor > LIMIT, LIMIT, factor)
    return factor, tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))


@triton.jit
def _factors(gate, up, GATE: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return both factors of the result."""
    if GATE == "swigluoai":
        gate, up = _clamped(gate, up, LIMIT)
        active, up = gate * _share(gate, GATE, ALPHA), up + 1.0
    else:
        active = gate * _share(gate, GATE, ALPHA)
        if LIMIT != _NO_LIMIT:
            active, up = _clamped(active, up, LIMIT)
    return active, up


@triton.jit
def _forward_kernel(
    gate_up, weights, y, width,
    COLS: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    gate_at = gate_up + row * 2 * width + col
    gate = tl.load(gate_at, col < width).to(tl.float32)
    up = tl.load(gate_at + width, col < width).to(tl.float32)
    w = tl.load(weights + row).to(tl.float32)
    active, up = _factors(gate, up, GATE, LIMIT, ALPHA)
    tl.store(y + row * width + col, active * up * w, col < width)


@triton.jit
def _backward_kernel(
    dy,
    gate_up,
    weights,
    d_gate_up,
    d_weights,
    y,
    width: tl.constexpr,
    COLS: tl.constexpr,
    GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
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
        s = _share(gate, GATE, ALPHA)
        active = gate * s
        slope = s + _slope(gate, s, active, GATE, ALPHA)
        d_yw = d_y * w
        d_yw_of_up = d_yw
        if LIMIT != _NO_LIMIT:
            bounded = gate if GATE == "swigluoai" else active
            slope = tl.where(bounded > LIMIT, 0.0, slope)
            d_yw_of_up = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, d_yw)
            active, up = _factors(gate, up, GATE, LIMIT, ALPHA)
        d_w += d_y * active * up
        tl.store(d_gate_up + gate_at, d_yw * up * slope, col < width)
        tl.store(d_gate_up + gate_at + width, d_yw_of_up * active, col < width)
        if y is not None:
            tl.store(y + row * width + col, active * up * w, col < width)
    tl.store(d_weights + row, tl.sum(d_w, axis=0))
