"""AdamW with moments of one byte a number, of weights in fp32 or in bf16, in one pass.

The update is that of :mod:`moetrain.kernels.optim.adamw`. Moments are widened as they are read, and
written as codes of 8 bits with a power of two for each group of 32 neighbours in a row (block-wise
quantisation, arXiv 2110.02861, with the scales of OCP's MXFP8):

    first moment    a sign, 4 bits of exponent, 3 of mantissa; numbers below 2^-14 of a group's
                    largest lie evenly, down to 0
    second moment   5 bits of exponent, 3 of mantissa; the smallest is 2^-31 of the largest, not 0:
                    a first moment over the root of a second one that was lost would be a step of
                    any size (the zero-point problem, arXiv 2309.01507)

A code is the upper bits of a number in fp32, once the scale has brought its group's largest to at
most 1.875. So steps between codes are a sixteenth to an eighth of a number whatever the scale is.

All is rounded stochastically, so that the mean is exact: a second moment at beta2 0.999 moves by
less than a code's step, and would stay where it is for ever. Of simulated gradients at beta2 0.95
(0.999) a step is then off by 10 (12) % of its norm, and the sum of 200 steps by 4 (6) %; by 17 (34)
and 9 (17) % if codes are rounded to the nearest. A weight in bf16 has no master in fp32
beside it: its mean is what a master would be. The 32 random bits of a number are Philox's, of the
seed, the step and the place: 12 round the weight, 12 the second moment and 8 the first.

A row is what one index of a parameter's first dim has. Groups begin anew with each row, and random
bits belong to groups. So every mesh that cuts rows, or columns at multiples of 32, has the same
groups, codes and weights, bit for bit, given the same gradients.

Worked example: the largest number of a group is 3, so its scale is 2 and 3 becomes 1.5: exponent
15, mantissa 4, the code 124. A first moment of 0.3 is 0.15 = 2^-3 1.2: between the codes 97 (2^-3
1.125) and 98 (2^-3 1.25) it becomes 98 for six in ten values of the bits.

Left out on purpose: updates on the host, momenta of Muon, moments in fewer bits.

Legend: R rows, C numbers a row, G groups a row, S numbers of a group, N numbers.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch.nn import functional as F

from moetrain.config import ConfigError
from moetrain.kernels.optim.adamw import Settings
from moetrain.kernels.optim.rounding import (
    WARPS,
    random_bits,
    random_bits_reference,
    round_by,
    round_by_reference,
)
from moetrain.kernels.quant.e4m3 import SCALED
from moetrain.runtime.backend import (
    Backend,
    refusal,
    tl,
    triton,
    use_fast,
)

_GROUPS = 32  # of a program: as many numbers as one of AdamW's has
_DTYPES = (torch.float32, torch.bfloat16)  # of weights and gradients
_OUT_DTYPES = (*_DTYPES, torch.float16)
_SMALLEST = 2.0**-14
"""What first moments from here on have an exponent for, beside a largest of 1."""
_FIRST = tl.constexpr(_SMALLEST)


class _Moment(NamedTuple):
    """A moment of R rows; groups of zeros alone have the scale 0."""

    codes_RC: torch.Tensor
    """uint8."""
    scales_RG: torch.Tensor
    """uint8: the exponent of the group's power of two, as fp32 has it."""

    def widen(self, *, is_signed: bool) -> torch.Tensor:
        """Return the numbers, fp32 [R, C]; ``is_signed``: it is a first moment."""
        codes_RGS = _grouped(self.codes_RC).int()
        scales_RG1 = (self.scales_RG.int() << 23).view(torch.float32)[..., None]
        if not is_signed:
            values_RGS = ((codes_RGS << 20) + (96 << 23)).view(torch.float32)
        else:
            size_RGS = codes_RGS & 127
            is_small = size_RGS < 8
            field_RGS = torch.where(is_small, 113, 112).int() << 23
            values_RGS = ((size_RGS << 20) + field_RGS).view(torch.float32)
            values_RGS = values_RGS - _SMALLEST * is_small
            values_RGS = torch.where(codes_RGS > 127, -values_RGS, values_RGS)
        return (values_RGS * scales_RG1).flatten(1)[:, : self.codes_RC.shape[1]]

    def narrow(self, x_RC: torch.Tensor, noise_RC: torch.Tensor, *, is_signed: bool) -> None:
        """Write ``x_RC`` (fp32), rounded by noise (int64) of 0 to 2^20 - 1."""
        x_RGS, noise_RGS = _grouped(x_RC), _grouped(noise_RC).int()
        largest_RG = x_RGS.abs().amax(-1)
        scales_RG = (largest_RG.view(torch.int32) + 0xFFFFF) >> 23
        inverse_RG1 = ((254 - scales_RG) << 23).view(torch.float32)[..., None]
        y_RGS = x_RGS.abs() * inverse_RG1
        if not is_signed:
            codes_RGS = ((y_RGS.view(torch.int32) + noise_RGS) >> 20) - (96 << 3)
            codes_RGS = codes_RGS.clamp(0, 255)
        else:
            is_small = y_RGS < _SMALLEST
            bits_RGS = torch.where(is_small, y_RGS + _SMALLEST, y_RGS).view(torch.int32)
            codes_RGS = ((bits_RGS + noise_RGS) >> 20) - torch.where(is_small, 113 << 3, 112 << 3)
            codes_RGS = codes_RGS.clamp(max=127) | ((x_RGS < 0).int() << 7)
        self.codes_RC.copy_(codes_RGS.flatten(1)[:, : x_RC.shape[1]])
        self.scales_RG.copy_(scales_RG)


class _Sliced(Protocol):
    """A rank's part of a parameter."""

    @property
    def shape(self) -> torch.Size:
        """The whole parameter's."""
        ...

    @property
    def box(self) -> Any:
        """The rank's slice of each of its dims."""
        ...


class _Whole(NamedTuple):
    shape: torch.Size
    box: tuple[slice, ...]


def moment_place(key: str, part: _Sliced) -> dict[str, Any]:
    """Return the ``shape`` of the tensor ``key`` of a parameter's moments, and a rank's ``box``.

    Scales have the shape [R, G], a ``step`` has none, and all else has the parameter's.

    Args:
        part: ranks cut rows, and of a matrix columns too.

    Raises:
        ConfigError: the rank's columns begin or end within what shares a scale.
    """
    shape, box = part.shape, part.box
    if not key.endswith("_scales"):
        return {"shape": (), "box": ()} if key == "step" else {"shape": shape, "box": box}
    columns = math.prod(shape[1:])
    mine = box[1] if len(shape) == 2 else slice(0, columns)
    if mine.start % SCALED or (mine.stop % SCALED and mine.stop < columns):
        raise ConfigError(
            "optim.state_dtype",
            f"'float8' has a scale for each {SCALED} numbers of a row, and parallel.tp cuts one of "
            f"{columns} at {mine.start or mine.stop}; use bfloat16, or another parallel.tp",
        )
    groups = slice(mine.start // SCALED, _groups(mine.stop))
    return {"shape": (shape[0], _groups(columns)), "box": (box[0], groups)}


class Float8Moments:
    """Both moments of a rank's part of a parameter; their :attr:`tensors` are uint8."""

    NAMES = ("exp_avg", "exp_avg_scales", "exp_avg_sq", "exp_avg_sq_scales")

    def __init__(
        self,
        part: _Sliced,
        key: int,
        empty: Callable[..., torch.Tensor],
    ) -> None:
        """Allocate them, without values; zeros are moments of zeros.

        Args:
            key: the place of the parameter's first number among those of all parameters.
            empty: makes a flat tensor, of a number of numbers and a ``dtype``.
        """
        self.tensors: dict[str, torch.Tensor] = {}
        for name in self.NAMES:
            sizes = [one.stop - one.start for one in moment_place(name, part)["box"]]
            self.tensors[name] = empty(math.prod(sizes), dtype=torch.uint8).view(sizes)
        scales = moment_place("_scales", part)
        (row, group), (_, groups) = (one.start for one in scales["box"]), scales["shape"]
        places = torch.tensor([key + SCALED * (row * groups + group), SCALED * groups])
        self.places_2 = places.to(self.tensors["exp_avg"].device)
        """As :func:`adamw_float8` takes them."""

    @classmethod
    def of_whole(cls, shape: Sequence[int], empty: Callable[..., torch.Tensor]) -> Self:
        """Make them for a whole parameter of ``shape``, the only one."""
        return cls(_Whole(torch.Size(shape), tuple(slice(0, n) for n in shape)), 0, empty)

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
        out = None if out is None else out.view(shape)
        how = (rates_S, self.places_2, settings, decays, out)
        adamw_float8(param.view(shape), grad.view(shape), *self, *how)


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
        avg, avg_scales_RG, avg_sq, avg_sq_scales_RG: uint8, the moments' codes and scales; zeros
            are a moment of zeros.
        rates_S: made by :meth:`~moetrain.kernels.optim.adamw.Settings.rates`; of a skipped step
            ``out`` alone is written.
        places_2: int64 [2]: the place of the first group's first number among those of all
            parameters, a multiple of 32, and how far on that of the next row is.
        decays: whether weight decay applies.
        out: of any float dtype: the new parameters, rounded to nearest.
    """
    shape = (param.shape[0], math.prod(param.shape[1:]))
    moments = (avg, avg_scales_RG, avg_sq, avg_sq_scales_RG)
    _check(param, grad, moments, places_2, out)
    param_RC, grad_RC = param.view(shape), grad.view(shape)
    if use_fast(backend, param):
        # In torch 2.11 an argument that an op writes must be a tensor.
        out = param.new_empty(0) if out is None else out
        _adamw_float8(param_RC, grad_RC, *moments, rates_S, places_2, out, decays, *settings)
        return
    first = _Moment(avg.view(shape), avg_scales_RG)
    second = _Moment(avg_sq.view(shape), avg_sq_scales_RG)
    clip, decay, size, root, skipped, step, _ = rates_S.unbind()
    p_RC = param_RC.float()
    g_RC = grad_RC.float() * clip
    m_RC = settings.beta1 * first.widen(is_signed=True) + (1 - settings.beta1) * g_RC
    v_RC = settings.beta2 * second.widen(is_signed=False) + (1 - settings.beta2) * g_RC * g_RC
    p_RC = p_RC - decay * decays * p_RC
    p_RC = p_RC - size * m_RC / (v_RC.sqrt() * root + settings.eps)
    bits_RC = _bits_reference(param_RC.shape, places_2, step, settings.seed)
    if param.dtype == torch.bfloat16:
        p_RC = round_by_reference(p_RC, (bits_RC >> 20 << 4) + 8)
    if skipped == 0:
        param_RC.copy_(p_RC)
        first.narrow(m_RC, ((bits_RC & 0xFF) << 12) + 2048, is_signed=True)
        second.narrow(v_RC, ((bits_RC >> 8 & 0xFFF) << 8) + 128, is_signed=False)
    if out is not None:
        out.copy_(param)


def _groups(columns: int) -> int:
    return -(-columns // SCALED)


def _grouped(x_RC: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [R, G, S], with zeros behind a row."""
    rows, columns = x_RC.shape
    return F.pad(x_RC, (0, -columns % SCALED)).view(rows, _groups(columns), SCALED)


def _bits_reference(
    shape: torch.Size,
    places_2: torch.Tensor,
    step: torch.Tensor,
    seed: int,
) -> torch.Tensor:
    """Return 32 random bits (int64) for each number of R rows of C."""
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
    codes = (torch.uint8,)
    like_scales = torch.Size((param.shape[0], _groups(math.prod(param.shape[1:]))))
    tensors = {
        "param": (param, like_param, _DTYPES),
        "grad": (grad, like_param, _DTYPES),
        "avg": (avg, like_param, codes),
        "avg_scales": (avg_scales_RG, like_scales, codes),
        "avg_sq": (avg_sq, like_param, codes),
        "avg_sq_scales": (avg_sq_scales_RG, like_scales, codes),
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
def _adamw_float8(
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
    moments = (avg, avg_scales_RG, avg_sq, avg_sq_scales_RG)
    tensors = (param_RC, grad_RC, *moments, out if out.numel() else None, rates_S, places_2)
    numbers = (float(decays), beta1, 1 - beta1, beta2, 1 - beta2, eps, seed)
    grid = (triton.cdiv(groups, _GROUPS),)
    sizes = (_GROUPS, SCALED)
    _adamw_float8_kernel[grid](*tensors, groups, columns, *numbers, *sizes, num_warps=WARPS)


@_adamw_float8.register_fake
def _(*arguments) -> None:
    return None


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
    """One program: GROUPS groups, which lie one after the other in as many rows as they take."""
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
        m = _widen(tl.load(avg + at, mask, 0), tl.load(avg_scales + group, is_group, 0), True)
        m = beta1 * m + rest1 * g
        v = _widen(
            tl.load(avg_sq + at, mask, 0), tl.load(avg_sq_scales + group, is_group, 0), False
        )
        v = beta2 * v + rest2 * g * g
        p -= tl.load(rates + 1) * decays * p
        # Approximate to an ulp or two, far below what moments are rounded by.
        p -= tl.load(rates + 2) * m / (tl.sqrt(v) * tl.load(rates + 3) + eps)
        if param.dtype.element_ty == tl.bfloat16:
            p = round_by(p, (((bits >> 20) & 0xFFF) << 4) + 8)
        tl.store(param + at, p.to(param.dtype.element_ty), mask)
        codes, scales = _narrow(tl.where(mask, m, 0.0), ((bits & 0xFF) << 12) + 2048, True)
        tl.store(avg + at, codes, mask)
        tl.store(avg_scales + group, scales, is_group)
        noise = (((bits >> 8) & 0xFFF) << 8) + 128
        codes, scales = _narrow(tl.where(mask, v, 0.0), noise, False)
        tl.store(avg_sq + at, codes, mask)
        tl.store(avg_sq_scales + group, scales, is_group)
    if out is not None:
        tl.store(out + at, p.to(out.dtype.element_ty), mask)


@triton.jit
def _widen(codes, scales, IS_SIGNED: tl.constexpr):
    """Codes [G, S] with scales [G] as fp32."""
    codes = codes.to(tl.int32)
    scale = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, None]
    if IS_SIGNED:
        size = codes & 127
        is_small = size < 8
        x = ((size << 20) + (tl.where(is_small, 113, 112) << 23)).to(tl.float32, bitcast=True)
        x -= tl.where(is_small, _FIRST, 0.0)
        x = tl.where(codes > 127, -x, x)
    else:
        x = ((codes << 20) + (96 << 23)).to(tl.float32, bitcast=True)
    return x * scale


@triton.jit
def _narrow(x, noise, IS_SIGNED: tl.constexpr):
    """fp32 [G, S] as codes [G, S] with scales [G], by noise of 20 bits."""
    size = tl.abs(x)
    # The largest number's exponent, or the next where a mantissa of 4 bits would not hold it.
    scales = (tl.max(size, 1).to(tl.int32, bitcast=True) + 0xFFFFF) >> 23
    size *= ((254 - scales) << 23).to(tl.float32, bitcast=True)[:, None]
    if IS_SIGNED:
        is_small = size < _FIRST
        bits = tl.where(is_small, size + _FIRST, size).to(tl.int32, bitcast=True) + noise
        codes = tl.minimum((bits >> 20) - (tl.where(is_small, 113, 112) << 3), 127)
        codes += tl.where(x < 0.0, 128, 0)
    else:
        bits = size.to(tl.int32, bitcast=True) + noise
        codes = tl.minimum(tl.maximum((bits >> 20) - (96 << 3), 0), 255)
    return codes.to(tl.uint8), scales.to(tl.uint8)
