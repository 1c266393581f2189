"""AdamW with float8 moments, for weights in fp32 or bf16, in one pass.

The update is that of :mod:`moetrain.kernels.optim.adamw`. Moments are dequantised as they are read,
and quantised as they are written: 8 bits an element, and a power of two as the scale of each group
of 32 neighbours in a row (block-wise quantisation, arXiv 2110.02861, with the scales of OCP's
MXFP8):

    first moment    a sign, 4 bits of exponent, 3 of mantissa; elements below 2^-14 of the group's
                    scale have evenly spaced values, down to 0
    second moment   5 bits of exponent, 3 of mantissa; the smallest value is 2^-31 of the scale,
                    not 0: the step divides the first moment by the root of the second, and would
                    have any size if that were rounded to 0 (the zero-point problem, arXiv
                    2309.01507)

The 8 bits are the upper bits of the fp32 value of element / scale. The scale is such that this is
at most 1.875 for the group's largest element. So neighbouring values differ by a sixteenth to an
eighth of themselves, whatever the scale is.

Moments, and weights in bf16, are rounded stochastically, so that their mean is exact. With beta2
0.999 one step moves a second moment by less than the distance between two values: rounded to
nearest, the moment would never change. In a simulation with random gradients at beta2 0.95 (0.999)
a step is off by 10 (12) % of its norm, and the sum of 200 steps by 4 (6) %; rounded to nearest, by
17 (34) and 9 (17) %. A weight in bf16 has no fp32 master beside it: its mean is the value that a
master would have. Philox makes 32 random bits for an element from the seed, the step and the
element's index: 12 round the weight, 12 the second moment and 8 the first.

A row holds the elements at one index of a parameter's first dim. Groups begin anew with each row,
and random bits belong to groups. So every mesh that cuts rows, or columns at multiples of 32, has
the same groups, moments and weights, bit for bit, given the same gradients.

Worked example: the largest element of a group is 3, so its scale is 2 and 3 becomes 1.5: exponent
15, mantissa 4, the byte 124. A first moment of 0.3 becomes 0.15 = 1.2 * 2^-3. It lies between the
bytes 97 (1.125 * 2^-3) and 98 (1.25 * 2^-3), and becomes 98 for six in ten values of the random
bits.

Left out on purpose: offloaded moments, momenta of Muon, moments in fewer bits.

Legend: R rows, C elements a row, G groups a row, S elements of a group, N elements.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch.nn import functional as F

from moetrain.config import ConfigError
from moetrain.kernels.optim.adamw import Rates, Settings
from moetrain.kernels.optim.rounding import (
    WARPS,
    random_bits,
    random_bits_reference,
    round_by,
    round_by_reference,
)
from moetrain.kernels.quant.e4m3 import SCALED
from moetrain.runtime.backend import Backend, refusal, tl, triton, use_fast

_GROUPS = 32  # of a program; as many elements as a block of AdamW
_DTYPES = (torch.float32, torch.bfloat16)  # of weights and gradients
_OUT_DTYPES = (*_DTYPES, torch.float16)
_SMALLEST = 2.0**-14
"""The smallest first moment with an exponent of its own; smaller ones are evenly spaced."""
_FIRST = tl.constexpr(_SMALLEST)


class QuantisedMoment(NamedTuple):
    """A moment of R rows; a group of zeros has the scale 0."""

    quantised_RC: torch.Tensor
    """uint8: the bits of each element."""
    scales_RG: torch.Tensor
    """uint8: the biased fp32 exponent of the group's power of two."""

    def dequantise(self, *, is_signed: bool) -> torch.Tensor:
        """Return the values, fp32 [R, C].

        Args:
            is_signed: True for a first moment, False for a second one.
        """
        bits_RGS = _grouped(self.quantised_RC).int()
        scales_RG1 = (self.scales_RG.int() << 23).view(torch.float32)[..., None]
        if not is_signed:
            values_RGS = ((bits_RGS << 20) + (96 << 23)).view(torch.float32)
        else:
            size_RGS = bits_RGS & 127
            is_small = size_RGS < 8
            field_RGS = torch.where(is_small, 113, 112).int() << 23
            values_RGS = ((size_RGS << 20) + field_RGS).view(torch.float32)
            values_RGS = values_RGS - _SMALLEST * is_small
            values_RGS = torch.where(bits_RGS > 127, -values_RGS, values_RGS)
        return (values_RGS * scales_RG1).flatten(1)[:, : self.quantised_RC.shape[1]]

    def quantise(self, x_RC: torch.Tensor, noise_RC: torch.Tensor, *, is_signed: bool) -> None:
        """Write ``x_RC`` (fp32), rounded stochastically.

        Args:
            noise_RC: int64, random from 0 to 2^20 - 1: added below the bits that are kept.
            is_signed: True for a first moment, False for a second one.
        """
        x_RGS, noise_RGS = _grouped(x_RC), _grouped(noise_RC).int()
        largest_RG = x_RGS.abs().amax(-1)
        scales_RG = (largest_RG.view(torch.int32) + 0xFFFFF) >> 23
        inverse_RG1 = ((254 - scales_RG) << 23).view(torch.float32)[..., None]
        y_RGS = x_RGS.abs() * inverse_RG1
        if not is_signed:
            kept_RGS = ((y_RGS.view(torch.int32) + noise_RGS) >> 20) - (96 << 3)
            kept_RGS = kept_RGS.clamp(0, 255)
        else:
            is_small = y_RGS < _SMALLEST
            shifted_RGS = torch.where(is_small, y_RGS + _SMALLEST, y_RGS).view(torch.int32)
            kept_RGS = ((shifted_RGS + noise_RGS) >> 20) - torch.where(is_small, 113 << 3, 112 << 3)
            kept_RGS = kept_RGS.clamp(max=127) | ((x_RGS < 0).int() << 7)
        self.quantised_RC.copy_(kept_RGS.flatten(1)[:, : x_RC.shape[1]])
        self.scales_RG.copy_(scales_RG)


class MomentPlace(NamedTuple):
    """A tensor of a parameter's optimizer state, and the rank's part of it."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: tuple[slice, ...]
    """The rank's slice of each dim."""


def moment_place(key: str, shape: tuple[int, ...], box: tuple[slice, ...]) -> MomentPlace:
    """Return the place of the state tensor ``key`` of a parameter.

    Scales have the shape [R, G], a ``step`` is a scalar, and all else has the parameter's shape.

    Args:
        shape: the whole parameter's.
        box: the rank's slice of each dim. Ranks cut rows; of a matrix, columns too.

    Raises:
        ConfigError: the rank's columns begin or end inside a group.
    """
    if key == "step":
        return MomentPlace((), ())
    if not key.endswith("_scales"):
        return MomentPlace(shape, box)
    columns = math.prod(shape[1:])
    mine = box[1] if len(shape) == 2 else slice(0, columns)
    if mine.start % SCALED or (mine.stop % SCALED and mine.stop < columns):
        raise ConfigError(
            "optim.state_dtype",
            f"'float8' has a scale for each {SCALED} elements of a row, but parallel.tp cuts a row "
            f"of {columns} elements at {mine.start or mine.stop}; use bfloat16, or another "
            "parallel.tp",
        )
    groups = slice(mine.start // SCALED, _num_groups(mine.stop))
    return MomentPlace((shape[0], _num_groups(columns)), (box[0], groups))


class Float8Moments:
    """Both moments of a rank's part of a parameter; their :attr:`tensors` are uint8."""

    NAMES = ("exp_avg", "exp_avg_scales", "exp_avg_sq", "exp_avg_sq_scales")

    def __init__(
        self,
        shape: tuple[int, ...],
        box: tuple[slice, ...],
        first: int,
        empty: Callable[..., torch.Tensor],
    ) -> None:
        """Allocate the moments, without values; with zeros everywhere they are moments of 0.

        Args:
            shape, box: the parameter and this rank's part of it, as in :func:`moment_place`.
            first: the index of the parameter's first element among those of all parameters.
            empty: makes a flat tensor, called with a number of elements and a ``dtype``.
        """
        self.tensors: dict[str, torch.Tensor] = {}
        """By :attr:`NAMES`."""
        for name in self.NAMES:
            sizes = [one.stop - one.start for one in moment_place(name, shape, box).box]
            self.tensors[name] = empty(math.prod(sizes), dtype=torch.uint8).view(sizes)
        scales = moment_place("_scales", shape, box)
        row, group = (one.start for one in scales.box)
        groups = scales.shape[1]
        places = torch.tensor([first + SCALED * (row * groups + group), SCALED * groups])
        self.places_2 = places.to(self.tensors["exp_avg"].device)
        """The argument of :func:`adamw_float8`."""

    @classmethod
    def of_whole(cls, shape: Sequence[int], empty: Callable[..., torch.Tensor]) -> Self:
        """Allocate the moments of a whole parameter of ``shape``, the only one."""
        return cls(tuple(shape), tuple(slice(0, n) for n in shape), 0, empty)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors.values())

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        out: torch.Tensor | None,
        rates_S: torch.Tensor,
        settings: Settings,
        decays: bool,
    ) -> None:
        """Do a step of :func:`adamw_float8`; tensors may be flat."""
        shape = self.tensors["exp_avg"].shape
        adamw_float8(
            param.view(shape),
            grad.view(shape),
            *self,
            rates_S,
            self.places_2,
            settings,
            decays,
            out=None if out is None else out.view(shape),
        )


def adamw_float8(
    param: torch.Tensor,
    grad: torch.Tensor,
    avg: torch.Tensor,
    avg_scales_RG: torch.Tensor,
    avg_sq: torch.Tensor,
    avg_sq_scales_RG: torch.Tensor,
    rates_S: torch.Tensor,
    places_2: torch.Tensor,
    settings: Settings,
    decays: bool,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Update one parameter and its moments in place, and write ``out`` if it is given.

    Args:
        param: fp32, or bf16, which is rounded stochastically; contiguous, as is all else.
        grad: fp32 or bf16, of the shape of ``param``.
        avg, avg_scales_RG, avg_sq, avg_sq_scales_RG: uint8, the quantised moments and their
            scales; zeros are a moment of zeros.
        rates_S: made by :meth:`~moetrain.kernels.optim.adamw.Settings.rates`; a skipped step writes
            only ``out``.
        places_2: int64 [2]: the index of the first element among the elements of all parameters, a
            multiple of 32, and the difference from one row's first index to the next row's.
        decays: True if weight decay applies.
        out: fp32, bf16 or fp16: the new parameters, rounded to nearest.

    Raises ValueError: a shape or dtype does not fit, or a tensor is not contiguous.
    """
    shape = (param.shape[0], math.prod(param.shape[1:]))
    moments = (avg, avg_scales_RG, avg_sq, avg_sq_scales_RG)
    _check(param, grad, moments, places_2, out)
    param_RC, grad_RC = param.view(shape), grad.view(shape)
    if use_fast(backend, param):
        # In torch 2.11 an argument that an op writes must be a tensor.
        out = param.new_empty(0) if out is None else out
        adamw_float8_op(param_RC, grad_RC, *moments, rates_S, places_2, out, decays, *settings)
        return
    rates = Rates.unpack(rates_S)
    beta1, beta2 = settings.beta1, settings.beta2
    first = QuantisedMoment(avg.view(shape), avg_scales_RG)
    second = QuantisedMoment(avg_sq.view(shape), avg_sq_scales_RG)
    p_RC = param_RC.float()
    # Clip the gradient.
    g_RC = grad_RC.float() * rates.clip
    # Update the averages of the gradient and of its square.
    m_RC = beta1 * first.dequantise(is_signed=True) + (1 - beta1) * g_RC
    v_RC = beta2 * second.dequantise(is_signed=False) + (1 - beta2) * g_RC * g_RC
    # Weight decay, decoupled: of the parameter before the update.
    p_RC = p_RC - rates.decay * decays * p_RC
    # Step along the averages; both bias corrections are in the rates.
    p_RC = p_RC - rates.lr_over_bias1 * m_RC / (v_RC.sqrt() * rates.rsqrt_bias2 + settings.eps)
    # Round and write. Of 32 random bits the weight takes the upper 12, the second moment the next
    # 12, the first moment the last 8. Half of the last bit is added, so that noise has no bias.
    bits_RC = _bits_reference(param_RC.shape, places_2, rates.step, settings.seed)
    if param.dtype == torch.bfloat16:
        p_RC = round_by_reference(p_RC, (bits_RC >> 20 << 4) + 8)
    if rates.skipped == 0:
        param_RC.copy_(p_RC)
        first.quantise(m_RC, ((bits_RC & 0xFF) << 12) + 2048, is_signed=True)
        second.quantise(v_RC, ((bits_RC >> 8 & 0xFFF) << 8) + 128, is_signed=False)
    if out is not None:
        out.copy_(param)


def _num_groups(columns: int) -> int:
    return -(-columns // SCALED)


def _grouped(x_RC: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as [R, G, S], each row padded with zeros."""
    rows, columns = x_RC.shape
    return F.pad(x_RC, (0, -columns % SCALED)).view(rows, _num_groups(columns), SCALED)


def _bits_reference(
    shape: torch.Size, places_2: torch.Tensor, step: torch.Tensor, seed: int
) -> torch.Tensor:
    """Return 32 random bits (int64) for each element of R rows of C."""
    rows, columns = shape
    device = places_2.device
    within_G = torch.arange(0, columns, SCALED, device=device)
    places_RG = places_2[0] + places_2[1] * torch.arange(rows, device=device)[:, None] + within_G
    bits_N = random_bits_reference(places_RG.flatten(), step, seed, SCALED)
    return bits_N.view(rows, len(within_G) * SCALED)[:, :columns]


def _check(
    param: torch.Tensor,
    grad: torch.Tensor,
    moments: Sequence[torch.Tensor],
    places_2: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    avg, avg_scales_RG, avg_sq, avg_sq_scales_RG = moments
    like_param = param.shape
    bytes_only = (torch.uint8,)
    like_scales = torch.Size((param.shape[0], _num_groups(math.prod(param.shape[1:]))))
    tensors = {
        "param": (param, like_param, _DTYPES),
        "grad": (grad, like_param, _DTYPES),
        "avg": (avg, like_param, bytes_only),
        "avg_scales": (avg_scales_RG, like_scales, bytes_only),
        "avg_sq": (avg_sq, like_param, bytes_only),
        "avg_sq_scales": (avg_sq_scales_RG, like_scales, bytes_only),
        "out": (param if out is None else out, like_param, _OUT_DTYPES),
    }
    for name, (tensor, shape, dtypes) in tensors.items():
        if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
            takes = f"a contiguous {tuple(shape)} of {' or '.join(map(str, dtypes))}"
            raise refusal("adamw_float8", takes, **{name: tensor})
    if places_2.shape != (2,) or places_2.dtype != torch.int64:
        raise refusal("adamw_float8", "int64 [2]", places=places_2)


_WRITTEN = ("param_RC", "avg", "avg_scales_RG", "avg_sq", "avg_sq_scales_RG", "out")


@torch.library.custom_op("moetrain::adamw_float8", mutates_args=_WRITTEN)
def adamw_float8_op(
    param_RC: torch.Tensor,
    grad_RC: torch.Tensor,
    avg: torch.Tensor,
    avg_scales_RG: torch.Tensor,
    avg_sq: torch.Tensor,
    avg_sq_scales_RG: torch.Tensor,
    rates_S: torch.Tensor,
    places_2: torch.Tensor,
    out: torch.Tensor,
    decays: bool,
    beta1: float,
    beta2: float,
    eps: float,
    seed: int,
) -> None:
    """Update in place; an empty ``out`` stands for none."""
    groups = avg_scales_RG.numel()
    columns = param_RC.shape[1]
    if not groups:
        return
    _adamw_float8_kernel[(triton.cdiv(groups, _GROUPS),)](
        param_RC,
        grad_RC,
        avg,
        avg_scales_RG,
        avg_sq,
        avg_sq_scales_RG,
        out if out.numel() else None,
        rates_S,
        places_2,
        groups,
        columns,
        float(decays),
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        seed,
        GROUPS=_GROUPS,
        SCALED=SCALED,
        num_warps=WARPS,
    )


@adamw_float8_op.register_fake
def _(
    param_RC: torch.Tensor,
    grad_RC: torch.Tensor,
    avg: torch.Tensor,
    avg_scales_RG: torch.Tensor,
    avg_sq: torch.Tensor,
    avg_sq_scales_RG: torch.Tensor,
    rates_S: torch.Tensor,
    places_2: torch.Tensor,
    out: torch.Tensor,
    decays: bool,
    beta1: float,
    beta2: float,
    eps: float,
    seed: int,
) -> None:
    """Write in place; there is nothing to return."""


@triton.jit(do_not_specialize=["groups", "seed"])
def _adamw_float8_kernel(
    param,
    grad,
    avg,
    avg_scales,
    avg_sq,
    avg_sq_scales,
    out,
    rates,
    places,
    groups,
    columns,
    decays,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    seed,
    GROUPS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Update GROUPS consecutive groups, which may span several rows."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    is_group = group < groups
    in_row = (columns + SCALED - 1) // SCALED
    row, part = group // in_row, group % in_row
    column = part[:, None] * SCALED + tl.arange(0, SCALED)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column
    mask = is_group[:, None] & (column < columns)
    p = tl.load(param + at, mask, 0.0).to(tl.float32)
    if tl.load(rates + 4) == 0.0:
        place = tl.load(places) + row * tl.load(places + 1) + part * SCALED
        bits = random_bits(place[:, None], tl.load(rates + 5).to(tl.int32), seed, SCALED)
        g = tl.load(grad + at, mask, 0.0).to(tl.float32) * tl.load(rates)
        m = _dequantise(tl.load(avg + at, mask, 0), tl.load(avg_scales + group, is_group, 0), True)
        m = beta1 * m + rest1 * g
        v = _dequantise(
            tl.load(avg_sq + at, mask, 0), tl.load(avg_sq_scales + group, is_group, 0), False
        )
        v = beta2 * v + rest2 * g * g
        p -= tl.load(rates + 1) * decays * p
        # Approximate to an ulp or two, far below what moments are rounded by.
        p -= tl.load(rates + 2) * m / (tl.sqrt(v) * tl.load(rates + 3) + eps)
        if param.dtype.element_ty == tl.bfloat16:
            p = round_by(p, (((bits >> 20) & 0xFFF) << 4) + 8)
        tl.store(param + at, p.to(param.dtype.element_ty), mask)
        quantised, scales = _quantise(tl.where(mask, m, 0.0), ((bits & 0xFF) << 12) + 2048, True)
        tl.store(avg + at, quantised, mask)
        tl.store(avg_scales + group, scales, is_group)
        noise = (((bits >> 8) & 0xFFF) << 8) + 128
        quantised, scales = _quantise(tl.where(mask, v, 0.0), noise, False)
        tl.store(avg_sq + at, quantised, mask)
        tl.store(avg_sq_scales + group, scales, is_group)
    if out is not None:
        tl.store(out + at, p.to(out.dtype.element_ty), mask)


@triton.jit
def _dequantise(quantised, scales, IS_SIGNED: tl.constexpr):
    """Return fp32 [G, S] of quantised [G, S] with scales [G]."""
    quantised = quantised.to(tl.int32)
    scale = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, None]
    if IS_SIGNED:
        size = quantised & 127
        is_small = size < 8
        x = ((size << 20) + (tl.where(is_small, 113, 112) << 23)).to(tl.float32, bitcast=True)
        x -= tl.where(is_small, _FIRST, 0.0)
        x = tl.where(quantised > 127, -x, x)
    else:
        x = ((quantised << 20) + (96 << 23)).to(tl.float32, bitcast=True)
    return x * scale


@triton.jit
def _quantise(x, noise, IS_SIGNED: tl.constexpr):
    """Quantise fp32 ``x`` [G, S], rounded by 20 bits of noise, to bits [G, S] and scales [G]."""
    size = tl.abs(x)
    # The largest element's exponent, or the next one if its mantissa is over 1.875, the most that 3
    # bits hold.
    scales = (tl.max(size, 1).to(tl.int32, bitcast=True) + 0xFFFFF) >> 23
    size *= ((254 - scales) << 23).to(tl.float32, bitcast=True)[:, None]
    if IS_SIGNED:
        is_small = size < _FIRST
        bits = tl.where(is_small, size + _FIRST, size).to(tl.int32, bitcast=True) + noise
        quantised = tl.minimum((bits >> 20) - (tl.where(is_small, 113, 112) << 3), 127)
        quantised += tl.where(x < 0.0, 128, 0)
    else:
        bits = size.to(tl.int32, bitcast=True) + noise
        quantised = tl.minimum(tl.maximum((bits >> 20) - (96 << 3), 0), 255)
    return quantised.to(tl.uint8), scales.to(tl.uint8)
