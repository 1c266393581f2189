"""The short causal convolutions of linear attention, in training and in a step of generation.

A token's channel becomes silu of the sum of its last J inputs times as many filters, in fp32, or
that sum itself. With ``normalised`` each head is then divided by its norm. Inputs from before a
document are zeros::

    y_tc = silu(sum_j f_cj x_(t - J + 1 + j)c + b_c)         y_th / sqrt(|y_th|^2 + 1e-6)

In training these are plain formulas that the compiler fuses; it keeps one tensor of inputs, in the
compute dtype. Training uses generation's kernel where it must have generation's bits.

In generation a sequence's last R inputs are kept in its slot, R = J - 1 or more
(:class:`~moetrain.kernels.linear_attention.reads.Reads`): the token at place t of a sequence is at
index t mod R of the slot. So a sequence may go back by R - J + 1 tokens, which are then read again.
On CUDA one kernel does a step, since the formulas' many small kernels would take longer than the
step's products.

Legend: T tokens, C channels, J taps, P slots of R inputs, h heads of width d.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from moetrain.kernels.linear_attention.reads import Reads
from moetrain.runtime.backend import (
    INTERPRETED,
    Backend,
    gradients,
    refusal,
    tl,
    triton,
    use_fast,
)
from moetrain.runtime.typed import OpContext

_EPS = 1e-6


class Convolution(NamedTuple):
    """A convolution and its input."""

    x_TC: torch.Tensor
    filters_C1J: torch.Tensor
    width: int
    """Width of the result's heads."""
    normalised: bool
    """True: each head of the result is divided by its norm."""
    bias_C: torch.Tensor | None = None
    """Added before silu."""
    activated: bool = True
    """False: without silu."""


def convolved(
    convolutions: Sequence[Convolution], place_T: torch.Tensor, *, fusible: bool = True
) -> list[torch.Tensor]:
    """Return each convolution's heads [T, h, d] of packed documents, in the inputs' dtypes.

    Args:
        place_T: each token's place in its document, from 0.
        fusible: compute in plain torch, which the compiler fuses. If False one op computes each: on
            CUDA it is generation's kernel, with the bits of generation.

    Raises ValueError: C is not a multiple of a width.
    """
    for one in convolutions:
        if one.x_TC.shape[1] % one.width:
            takes = "[T, C], C a multiple of the width"
            raise refusal("convolution", takes, x=one.x_TC, width=one.width)
    if not fusible:
        return [
            convolution_op(
                one.x_TC.contiguous(),
                one.filters_C1J,
                one.width,
                one.normalised,
                one.bias_C,
                one.activated,
                place_T,
            )
            for one in convolutions
        ]
    # All sums come before the norms: in another order the compiler keeps some of the sums in fp32,
    # since it does not recompute long chains of operations.
    sums = [_summed(_earlier(one, place_T), one) for one in convolutions]
    return [_heads(y_TC, one) for y_TC, one in zip(sums, convolutions, strict=True)]


def _earlier(one: Convolution, place_T: torch.Tensor) -> list[torch.Tensor]:
    """Return the inputs 0, 1, ... places before each token, zeros before its document."""
    taps = one.filters_C1J.shape[-1]
    tokens = len(one.x_TC)
    padded_TC = F.pad(one.x_TC, (0, 0, taps - 1, 0))
    views = [padded_TC[taps - 1 - back :][:tokens] for back in range(taps)]
    earlier = (x.where((place_T >= back)[:, None], 0.0) for back, x in enumerate(views[1:], 1))
    return [views[0], *earlier]


def _summed(inputs_TC: Sequence[torch.Tensor], one: Convolution) -> torch.Tensor:
    """Return :func:`_sums`, or silu of it."""
    sums_TC = _sums(inputs_TC, one)
    return F.silu(sums_TC) if one.activated else sums_TC


def _sums(inputs_TC: Sequence[torch.Tensor], one: Convolution) -> torch.Tensor:
    """Return the inputs' sums with the filters, and the bias, in fp32 or wider."""
    wide = torch.promote_types(inputs_TC[0].dtype, torch.float32)
    taps = len(inputs_TC)
    filters_JC = one.filters_C1J[:, 0].t().to(wide)
    y_TC = inputs_TC[0].to(wide) * filters_JC[-1]
    for back in range(1, taps):
        y_TC = y_TC + inputs_TC[back].to(wide) * filters_JC[taps - 1 - back]
    return y_TC if one.bias_C is None else y_TC + one.bias_C.to(wide)


@torch.library.custom_op("moetrain::convolution", mutates_args=())
def convolution_op(
    x_TC: torch.Tensor,
    filters_C1J: torch.Tensor,
    width: int,
    normalised: bool,
    bias_C: torch.Tensor | None,
    activated: bool,
    place_T: torch.Tensor,
) -> torch.Tensor:
    one = Convolution(x_TC, filters_C1J, width, normalised, bias_C, activated)
    if not use_fast("triton" if INTERPRETED else "auto", x_TC):
        return _heads(_summed(_earlier(one, place_T), one), one)
    # All earlier inputs are this step's, and none is kept in a slot.
    return _by_kernel(one, x_TC[:, None], place_T, place_T, torch.zeros_like(place_T))


@convolution_op.register_fake
def _(
    x_TC: torch.Tensor,
    filters_C1J: torch.Tensor,
    width: int,
    normalised: bool,
    bias_C: torch.Tensor | None,
    activated: bool,
    place_T: torch.Tensor,
) -> torch.Tensor:
    return x_TC.new_empty(x_TC.shape[0], x_TC.shape[1] // width, width)


def _save(ctx: OpContext, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x_TC, filters_C1J, ctx.width, ctx.normalised, bias_C, ctx.activated, place_T = inputs
    ctx.save_for_backward(x_TC, filters_C1J, bias_C, place_T)


def _differentiate(ctx: OpContext, dy_Thd: torch.Tensor) -> tuple[object, ...]:
    """Return the gradients by plain formulas, which the compiler fuses.

    With s the sums, y = silu(s) (or s), and r = 1 / sqrt(|y|^2 + eps) of each head::

        dy <- r (dy - r^2 y (y . dy))     ds = dy silu'(s)     dx_t = sum_b f_b ds_(t + b)
    """
    x_TC, filters_C1J, bias_C, place_T = ctx.saved_tensors
    one = Convolution(
        x_TC, filters_C1J, ctx.width, ctx.normalised, bias_C=bias_C, activated=ctx.activated
    )
    # Recompute the sums.
    inputs_TC = _earlier(one, place_T)
    s_TC = _sums(inputs_TC, one)
    # Through the norm, then through silu.
    shares_TC = s_TC.sigmoid() if ctx.activated else torch.ones_like(s_TC)
    dy_Thd = dy_Thd.to(s_TC.dtype)
    if ctx.normalised:
        y_Thd = (s_TC * shares_TC).unflatten(-1, (-1, ctx.width))
        r_Th1 = torch.rsqrt(y_Thd.square().sum(-1, True) + _EPS)
        dy_Thd = r_Th1 * (dy_Thd - r_Th1.square() * y_Thd * (y_Thd * dy_Thd).sum(-1, True))
    ds_TC = dy_Thd.flatten(1) * shares_TC * (1 + s_TC * (1 - shares_TC))  # 1 - 1 without silu
    # Through each tap, to the input so many places back.
    filters_JC = filters_C1J[:, 0].t().to(s_TC.dtype)
    taps = filters_C1J.shape[-1]
    dx_TC = torch.zeros_like(ds_TC)
    d_filters_JC: list[torch.Tensor] = []
    for back in range(taps):
        masked_TC = ds_TC.where((place_T >= back)[:, None], 0.0)
        d_filters_JC.append((masked_TC * inputs_TC[back].to(s_TC.dtype)).sum(0))
        later_TC = F.pad(masked_TC, (0, 0, 0, back))[back:]
        dx_TC = dx_TC + later_TC * filters_JC[taps - 1 - back]
    d_filters_C1J = torch.stack(d_filters_JC[::-1], 1)[:, None].to(filters_C1J.dtype)
    d_bias_C = None if bias_C is None else ds_TC.sum(0).to(bias_C.dtype)
    return gradients(
        convolution_op, x_TC=dx_TC.to(x_TC.dtype), filters_C1J=d_filters_C1J, bias_C=d_bias_C
    )


convolution_op.register_autograd(_differentiate, setup_context=_save)


def _heads(y_TC: torch.Tensor, one: Convolution) -> torch.Tensor:
    """Split channels into heads, and normalise these if asked to."""
    y_Thd = y_TC.unflatten(-1, (-1, one.width))
    if one.normalised:
        y_Thd = y_Thd * torch.rsqrt(y_Thd.square().sum(-1, True) + _EPS)
    return y_Thd.to(one.x_TC.dtype)


def convolution_step(
    one: Convolution, kept_PRC: torch.Tensor, reads: Reads, backend: Backend = "auto"
) -> torch.Tensor:
    """Return the heads [T, h, d] of the tokens that a step reads, and keep their inputs.

    Args:
        one: the convolution, with the step's input, contiguous.
        kept_PRC: [P, J - 1 or more, C] in the input's dtype, contiguous; written in place.

    Raises ValueError: shapes or dtypes do not fit.
    """
    x_TC, width = one.x_TC, one.width
    channels = x_TC.shape[1]
    taps = one.filters_C1J.shape[-1]
    kept = kept_PRC.shape[1]
    is_like = kept >= taps - 1 and kept_PRC.shape[2] == channels and kept_PRC.dtype == x_TC.dtype
    if not is_like or channels % width or not (x_TC.is_contiguous() and kept_PRC.is_contiguous()):
        takes = "contiguous [T, C] and [P, >= J - 1, C] of one dtype, C a multiple of the width"
        raise refusal("convolution_step", takes, x=x_TC, kept=kept_PRC, width=width)
    if use_fast(backend, x_TC):
        y_Thd = _by_kernel(one, kept_PRC, reads.place_T, reads.before_T, reads.slots_T)
    else:
        y_Thd = _heads(_summed(_inputs(x_TC, taps, kept_PRC, reads), one), one)
    # Keep the last R inputs of each sequence; others go to slot 0.
    if kept:
        slots_T = torch.where(reads.after_T < kept, reads.slots_T, 0)
        kept_PRC[slots_T, reads.place_T % kept] = x_TC
    return y_Thd


def _by_kernel(
    one: Convolution,
    kept_PRC: torch.Tensor,
    place_T: torch.Tensor,
    before_T: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    (tokens, channels), width = one.x_TC.shape, one.width
    y_Thd = one.x_TC.new_empty(tokens, channels // width, width)
    if tokens:
        _step_kernel[(tokens, channels // width)](
            one.x_TC,
            one.filters_C1J.contiguous(),
            one.bias_C,
            kept_PRC,
            place_T,
            before_T,
            slots_T,
            y_Thd,
            C=channels,
            J=one.filters_C1J.shape[-1],
            R=kept_PRC.shape[1],
            D=width,
            BLOCK=triton.next_power_of_2(width),
            EPS=_EPS,
            ACTIVATED=one.activated,
            NORMALISED=one.normalised,
            HAS_BIAS=one.bias_C is not None,
            num_warps=1,
        )
    return y_Thd


def _inputs(
    x_TC: torch.Tensor, taps: int, kept_PRC: torch.Tensor, reads: Reads
) -> list[torch.Tensor]:
    """Return the inputs 0, 1, ... places before each token, from this step or kept."""
    found = [x_TC]
    for back in range(1, taps):
        now_TC = F.pad(x_TC, (0, 0, back, 0))[: len(x_TC)]
        then_TC = kept_PRC[reads.slots_T, (reads.place_T - back) % kept_PRC.shape[1]]
        both_TC = torch.where((reads.before_T >= back)[:, None], now_TC, then_TC)
        found.append(both_TC.where((reads.place_T >= back)[:, None], 0.0))
    return found


@triton.jit
def _step_kernel(
    x_ptr,
    filters_ptr,
    bias_ptr,
    kept_ptr,
    place_ptr,
    before_ptr,
    slots_ptr,
    y_ptr,
    C: tl.constexpr,
    J: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    ACTIVATED: tl.constexpr,
    NORMALISED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Compute one head of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.load(place_ptr + token)
    before = tl.load(before_ptr + token)
    slot = tl.load(slots_ptr + token)
    i = tl.arange(0, BLOCK)
    valid = i < D
    channel = head * D + i
    x = tl.load(x_ptr + token * C + channel, mask=valid, other=0.0).to(tl.float32)
    taps = filters_ptr + channel * J
    y = x * tl.load(taps + (J - 1), mask=valid, other=0.0).to(tl.float32)
    for back in tl.static_range(1, J):
        ours = tl.where(before >= back, D, 0)  # channels to load from this step's inputs
        kept = tl.where(place >= back, D, 0) - tl.where(before >= back, D, 0)
        now = tl.load(x_ptr + (token - back) * C + channel, mask=i < ours, other=0.0)
        at = (slot * R + (place + R - back) % R) * C
        then = tl.load(kept_ptr + at + channel, mask=i < kept, other=0.0)
        filters = tl.load(taps + (J - 1 - back), mask=valid, other=0.0).to(tl.float32)
        y += (now.to(tl.float32) + then.to(tl.float32)) * filters  # one of the two is 0
    if HAS_BIAS:
        y += tl.load(bias_ptr + channel, mask=valid, other=0.0).to(tl.float32)
    if ACTIVATED:
        y = y * tl.sigmoid(y)
    if NORMALISED:
        y *= tl.rsqrt(tl.sum(y * y, axis=0) + EPS)
    tl.store(y_ptr + token * C + channel, y.to(y_ptr.dtype.element_ty), mask=valid)
