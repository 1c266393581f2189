"""The short causal convolutions of linear attention, and their step in generation.

A token's channel becomes silu of the sum of its last J inputs times as many filters, in fp32. With
``normalised`` each head is then divided by its norm. Inputs from before a document are zeros::

    y_tc = silu(sum_j f_cj x_(t - J + 1 + j)c + b_c)         y_th / sqrt(|y_th|^2 + 1e-6)

In training these are plain formulas that the compiler fuses; of the inputs it keeps one tensor in
the compute dtype. In generation a sequence's last J - 1 inputs are kept in its slot
(:class:`~moetrain.kernels.linear_attention.reads.Reads`): the token at place t of a
sequence is at place t mod J - 1 of the slot. On CUDA a kernel then does all of it, since as many
small kernels as the formulas would take longer than the step's products.

Legend: T tokens, C channels, J taps, P slots, h heads of width d.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from moetrain.kernels.backend import Backend, refusal, tl, triton, use_fast
from moetrain.kernels.linear_attention.reads import Reads

_EPS = 1e-6


class Convolution(NamedTuple):
    """The input [T, C] and the filters [C, 1, J] of one, whose result is heads of ``width``."""

    x_TC: torch.Tensor
    filters_C1J: torch.Tensor
    width: int
    normalised: bool
    bias_C: torch.Tensor | None = None
    """What is added before silu."""


def convolved(given: Sequence[Convolution], place_T: torch.Tensor) -> list[torch.Tensor]:
    """Return the heads [T, h, d] of packed documents, in the inputs' dtypes.

    Sums come before norms: in another order the compiler, which bans what it takes for long chains
    from being computed again, keeps some of the sums in fp32.

    Args:
        place_T: each token's place in its document.
    """
    sums = [_summed(_earlier(one, place_T), one) for one in given]
    return [_heads(y_TC, one) for y_TC, one in zip(sums, given, strict=True)]


def _earlier(given: Convolution, place_T: torch.Tensor) -> list[torch.Tensor]:
    """Return the inputs 0, 1, ... places before each token: views of one tensor, and masks."""
    taps, tokens = given.filters_C1J.shape[-1], len(given.x_TC)
    padded_TC = F.pad(given.x_TC, (0, 0, taps - 1, 0))
    views = [padded_TC[taps - 1 - back :][:tokens] for back in range(taps)]
    earlier = (x.where((place_T >= back)[:, None], 0.0) for back, x in enumerate(views[1:], 1))
    return [views[0], *earlier]


def _summed(inputs_TC: Sequence[torch.Tensor], given: Convolution) -> torch.Tensor:
    wide, taps = torch.promote_types(inputs_TC[0].dtype, torch.float32), len(inputs_TC)
    filters_JC = given.filters_C1J[:, 0].t().to(wide)
    y_TC = inputs_TC[0].to(wide) * filters_JC[-1]
    for back in range(1, taps):
        y_TC = y_TC + inputs_TC[back].to(wide) * filters_JC[taps - 1 - back]
    return F.silu(y_TC if given.bias_C is None else y_TC + given.bias_C.to(wide))


def _heads(y_TC: torch.Tensor, given: Convolution) -> torch.Tensor:
    y_Thd = y_TC.unflatten(-1, (-1, given.width))
    if given.normalised:
        y_Thd = y_Thd * torch.rsqrt(y_Thd.square().sum(-1, True) + _EPS)
    return y_Thd.to(given.x_TC.dtype)


def convolution_step(
    given: Convolution, kept_PJC: torch.Tensor, reads: Reads, backend: Backend = "auto"
) -> torch.Tensor:
    """Return one of :func:`convolved` of the tokens that a step reads, and keep their inputs.

    Args:
        kept_PJC: [P, J - 1, C] in the input's dtype; both are contiguous.
    """
    x_TC, filters_C1J, width, normalised, bias_C = given
    (tokens, channels), taps = x_TC.shape, filters_C1J.shape[-1]
    is_like = kept_PJC.shape[1:] == (taps - 1, channels) and kept_PJC.dtype == x_TC.dtype
    if not is_like or channels % width or not (x_TC.is_contiguous() and kept_PJC.is_contiguous()):
        takes = "contiguous [T, C] and [P, J - 1, C] of one dtype, C a multiple of the width"
        raise refusal("convolution_step", takes, x=x_TC, kept=kept_PJC, width=width)
    if use_fast(backend, x_TC):
        y_Thd = x_TC.new_empty(tokens, channels // width, width)
        if tokens:
            _step_kernel[(tokens, channels // width)](
                x_TC, filters_C1J.contiguous(), bias_C, kept_PJC, reads.place_T, reads.before_T,
                reads.slots_T, y_Thd, C=channels, J=taps, D=width, HAS_BIAS=bias_C is not None,
                BLOCK=triton.next_power_of_2(width), EPS=_EPS, NORMALISED=normalised, num_warps=1,
            )  # fmt: skip
    else:
        y_Thd = _heads(_summed(_inputs(x_TC, taps, kept_PJC, reads), given), given)
    if taps > 1:
        slots_T = torch.where(reads.after_T < taps - 1, reads.slots_T, 0)
        kept_PJC[slots_T, reads.place_T % (taps - 1)] = x_TC
    return y_Thd


def _inputs(
    x_TC: torch.Tensor, taps: int, kept_PJC: torch.Tensor, reads: Reads
) -> list[torch.Tensor]:
    """Return the inputs 0, 1, ... places before each token, from this step or kept."""
    found = [x_TC]
    for back in range(1, taps):
        now_TC = F.pad(x_TC, (0, 0, back, 0))[: len(x_TC)]
        then_TC = kept_PJC[reads.slots_T, (reads.place_T - back) % (taps - 1)]
        both_TC = torch.where((reads.before_T >= back)[:, None], now_TC, then_TC)
        found.append(both_TC.where((reads.place_T >= back)[:, None], 0.0))
    return found


@triton.jit
def _step_kernel(
    x_ptr, filters_ptr, bias_ptr, kept_ptr, place_ptr, before_ptr, slots_ptr, y_ptr,
    C: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
    NORMALISED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute one head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, before = tl.load(place_ptr + token), tl.load(before_ptr + token)
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
        at = (slot * (J - 1) + (place + (J - 1) - back) % (J - 1)) * C
        then = tl.load(kept_ptr + at + channel, mask=i < kept, other=0.0)
        filters = tl.load(taps + (J - 1 - back), mask=valid, other=0.0).to(tl.float32)
        y += (now.to(tl.float32) + then.to(tl.float32)) * filters  # of which one is 0
    if HAS_BIAS:
        y += tl.load(bias_ptr + channel, mask=valid, other=0.0).to(tl.float32)
    y = y * tl.sigmoid(y)
    if NORMALISED:
        y *= tl.rsqrt(tl.sum(y * y, axis=0) + EPS)
    tl.store(y_ptr + token * C + channel, y.to(y_ptr.dtype.element_ty), mask=valid)
