"""Numbers stored in groups: codes of 8 or 4 bits, and scales. A frozen base is kept so.

A :class:`Form` says in which codes and with which scales. They are widened by one kernel, without
rounding but for that to the dtype that is asked for::

    float8  codes e4m3, and 2^k for each 32 numbers           (MXFP8 of OCP's Microscaling v1.0)
    mxfp4   codes e2m1, two a byte, and 2^k for each 32       (MXFP4 of the same)
    nf4     two a byte, of the 16 quantiles of a normal distribution, and a scale for each 64:
            byte's number in a table * factor + offset        (QLoRA, arXiv 2305.14314)

The lower half of a byte is the first number. 2^k is stored as the byte of its exponent in fp32, and
k is the least with which no number of the group is rounded to one beyond the largest code: 448 for
e4m3, 6 for e2m1, where 7 would be rounded to 8. So a group that was quantised has a 4 or a 6, and
is quantised to the same codes again.

Scales of nf4 are the largest absolute values of their groups, quantised themselves ("double
quantisation") by bitsandbytes' table of 256: 0, 1, and (0.1 + 0.9 (j + 1/2) / 2^i) 10^(i - 6)
with both signs, i = 0 ... 6, j < 2^i. There a factor is of 256 groups, and the offset of all of a
tensor's; here both lie beside each 32 groups. So all that bitsandbytes writes can be stored, and
what a rank stores does not depend on the others. What is quantised here takes::

    offset = the largest scale     factor = (largest - least) / 0.993, rounded down to bf16

so that all deviations are negative, and both can be found again in what was widened: nothing is
lost if that is quantised again. Only the table's entries from 0.001 on are used for it, and groups
whose numbers are below 1/128 of their neighbours' largest become 0. That rounds scales by 0.7 % of
their range at most.

Worked example, mxfp4: [6.9, -1.2, 0.3] has the scale 1 and the codes of [6, -1, 0.5]; with a 7
instead the scale is 2, and the codes are those of [4, -0.5, 0]. nf4: of the group [2, -1, 0.1] the
scale is 2 and the codes are those of [1, -0.525, 0.0796].

A group with a number that is not finite is NaN as a whole, and in nf4 so are those beside it.

Legend: W ranks, N numbers of whole groups, B bytes, G groups, S sets of groups that share factor
and offset. Of matrices: E experts, N rows, D columns.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional as F

from moetrain.kernels.quant.e4m3 import E4M3, SCALED, quantise_rows
from moetrain.runtime.backend import (
    Backend,
    refusal,
    tl,
    triton,
    use_fast,
)

_BAD = 255
"""The byte of a scale 2^k of a group with a number that is not finite."""
_LAUNCH = {8: {"GROUPS": 64, "num_warps": 2}, 4: {"GROUPS": 64, "num_warps": 4}}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
"""The quantiles that bitsandbytes has, in its order; what it writes stands for these numbers."""


class Groups(NamedTuple):
    """What is stored of numbers, in views of one rank's bytes or of several ranks'."""

    codes: torch.Tensor
    """uint8 [W, B]."""
    scales: torch.Tensor
    """uint8 [W, G]."""
    shared: torch.Tensor | None = None
    """fp32 [W, 2 S], factor and offset in turn; None: scales are powers of two."""

    def units(self, form: "Form", first: int, stop: int) -> "Groups":
        """Return views of units ``first:stop`` of each rank."""
        size = form.unit * form.bits // 8
        sharing = form.sharing
        codes = self.codes[:, first * size : stop * size]
        scales = self.scales[:, first * sharing : stop * sharing]
        shared = None if self.shared is None else self.shared[:, 2 * first : 2 * stop]
        return Groups(codes, scales, shared)

    def to(self, device: torch.device) -> "Groups":
        """Return them on ``device``."""
        shared = None if self.shared is None else self.shared.to(device)
        return Groups(self.codes.to(device), self.scales.to(device), shared)


@dataclass(frozen=True)
class Form:
    """How numbers are stored."""

    name: str
    bits: int
    """Of a code."""
    size: int
    """Numbers that share a scale."""
    codebook: tuple[float, ...] = ()
    """The number of each code; empty: those of e4m3."""
    sharing: int = 1
    """Groups that share factor and offset of their scales; 1: scales are powers of two."""

    @property
    def unit(self) -> int:
        """Numbers that are stored independently of all others."""
        return self.size * self.sharing

    @property
    def unit_bytes(self) -> int:
        return self.unit * self.bits // 8 + self.sharing + 8 * (self.sharing > 1)

    @property
    def bytes_per_number(self) -> float:
        return self.unit_bytes / self.unit

    def num_bytes(self, numel: int) -> int:
        """Count the bytes of ``numel`` numbers: whole units."""
        return -(-numel // self.unit) * self.unit_bytes

    def split(self, bytes_WB: torch.Tensor) -> Groups:
        """Split ranks' bytes (uint8, of whole units): codes, then scales, then what they share."""
        units = bytes_WB.shape[1] // self.unit_bytes
        codes, scales = units * self.unit * self.bits // 8, units * self.sharing
        shared = bytes_WB[:, codes + scales :].view(torch.float32) if self.sharing > 1 else None
        return Groups(bytes_WB[:, :codes], bytes_WB[:, codes:][:, :scales], shared)

    def table(self, device: torch.device) -> torch.Tensor | None:
        """Return the numbers of codes, and of the scales' bytes, for :func:`widen_groups`."""
        # In a step that compiles kernels ahead tensors have no memory: those are not kept.
        is_real = type(torch.empty(0)) is torch.Tensor
        return _table(self, device) if is_real else _table.__wrapped__(self, device)


FORMS = {
    form.name: form
    for form in (
        Form("float8", 8, SCALED),
        Form("mxfp4", 4, SCALED, (*_E2M1, *(-x for x in _E2M1))),
        Form("nf4", 4, 64, _NF4, 32),
    )
}


@cache
def _table(form: Form, device: torch.device) -> torch.Tensor | None:
    """Make :meth:`Form.table` once: it is asked for in steps, which graphs may capture."""
    if not form.codebook:
        return None
    codes = torch.tensor(form.codebook, dtype=torch.float32, device="cpu")
    scales = _scale_table() if form.sharing > 1 else codes[:0]
    return torch.cat((codes, scales)).to(device)


def _scale_table() -> torch.Tensor:
    """Compute bitsandbytes' table of 256 (fp32), rounded where it rounds."""
    parts = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        middles = (edges[:-1] + edges[1:]) / 2
        parts.append(10.0 ** (i - 6) * middles)
    found = torch.cat(parts)
    return torch.cat((found, -found, torch.tensor([0.0, 1.0]))).sort().values


# ---- quantising ---------------------------------------------------------------------------------


_AT_ONCE = 2**25
"""Numbers that are quantised at once, of whole units: it takes five times their fp32."""


def quantise_groups(form: Form, x_N: torch.Tensor) -> Groups:
    """Quantise ``x_N`` (floating, of whole units), in plain torch; as of one rank."""
    codes, scales, shared = zip(*(_quantise(form, x) for x in x_N.split(_AT_ONCE)), strict=True)
    joined = None if form.sharing == 1 else torch.cat(shared, 1)
    return Groups(torch.cat(codes, 1), torch.cat(scales, 1), joined)


def _quantise(form: Form, x_N: torch.Tensor) -> Groups:
    x_GS = x_N.float().view(-1, form.size)
    is_bad_G = ~x_GS.isfinite().all(1)
    x_GS = x_GS.masked_fill(is_bad_G[:, None], 0.0)
    if form.sharing > 1:
        amax_G = x_GS.abs().amax(1)
        bytes_G, shared_S2, is_zero_G = _quantise_scales(amax_G.view(-1, form.sharing))
        shared_S2[is_bad_G.view(-1, form.sharing).any(1)] = torch.nan
        # Codes are of numbers divided by their own largest, not by what is stored of that.
        x_GS = x_GS.masked_fill(is_zero_G[:, None], 0.0) / amax_G.clamp(min=2.0**-126)[:, None]
        codes_N = _nearest(x_GS, form.codebook).flatten()
        return Groups(_pack(codes_N)[None], bytes_G[None], shared_S2.view(1, -1))
    if form.bits == 8:
        codes_GS, scales_G = quantise_rows(x_GS, "reference")
        codes_N, exponent_G = codes_GS.view(torch.uint8).flatten(), scales_G.view(torch.int32) >> 23
    else:
        # From 1.75 times a power of two on, 7 among the codes, the next scale is taken.
        field_G = (x_GS.abs().amax(1).view(torch.int32) + 0x200000) >> 23
        exponent_G = field_G.clamp(min=3) - 2
        x_GS = x_GS * ((254 - exponent_G) << 23).view(torch.float32)[:, None]
        codes_N = _pack(_nearest_e2m1(x_GS).flatten())
    return Groups(codes_N[None], exponent_G.masked_fill(is_bad_G, _BAD).to(torch.uint8)[None])


def _nearest(x: torch.Tensor, numbers: tuple[float, ...]) -> torch.Tensor:
    """Return the place (uint8) of the nearest of ascending ``numbers``; the lower of two."""
    all_C = torch.tensor(numbers, dtype=torch.float32, device=x.device)
    return torch.bucketize(x, (all_C[:-1] + all_C[1:]) / 2, out_int32=True).to(torch.uint8)


def _nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the code of the nearest number, and of two the even code; a sign is kept with 0."""
    size = x.abs()
    codes = _nearest(size, _E2M1)
    edges = torch.tensor([0.75, 1.75, 3.5], device=x.device)  # where the lower code is odd
    return codes + torch.isin(size, edges).to(torch.uint8) + (x.signbit().to(torch.uint8) << 3)


def _pack(codes_N: torch.Tensor) -> torch.Tensor:
    return codes_N[0::2] | (codes_N[1::2] << 4)


_FEW = 2.0**-100
"""Groups of numbers below it are 0: what follows would be subnormal."""


def _quantise_scales(
    amax_SG: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise sets of scales; give bytes [G], factors and offsets [S, 2], and which groups are 0.

    The factor is found again in the scales that are stored, as one of them is the offset, another
    is the offset less 0.993 factors, and a factor has few enough bits.
    """
    largest_S1 = amax_SG.amax(1, keepdim=True)
    is_kept_SG = amax_SG >= (largest_S1 * 2.0**-7).clamp(min=_FEW)
    largest_S1 = largest_S1.where(largest_S1 >= _FEW, 0.0)
    least_S1 = amax_SG.where(is_kept_SG, torch.inf).amin(1, keepdim=True)
    least_S1 = torch.maximum(least_S1, largest_S1 * 2.0**-6)  # so that no scale is negative
    table_C = _scale_table().to(amax_SG.device)
    range_S1 = (largest_S1 - least_S1).clamp(min=0.0)
    # What is found again may have been rounded down by less than that.
    factor_S1 = range_S1 / -table_C[0] * (1 + 2.0**-12)
    factor_S1 = (factor_S1.view(torch.int32) & -0x10000).view(torch.float32)
    factor_S1 = factor_S1.where(factor_S1 >= largest_S1 * 2.0**-10, 0.0)
    places_C = torch.cat(((table_C < -1e-3).nonzero()[:, 0], (table_C == 0).nonzero()[:, 0]))
    used_C = table_C[places_C]
    share_SG = ((amax_SG - largest_S1) / factor_S1).nan_to_num(0.0, 0.0, -1.0)
    share_SG = share_SG.where(factor_S1 > 0, 0.0)
    bytes_SG = places_C[torch.bucketize(share_SG, (used_C[:-1] + used_C[1:]) / 2)]
    shared_S2 = torch.cat((factor_S1, largest_S1), 1)
    return bytes_SG.flatten().to(torch.uint8), shared_S2, ~is_kept_SG.flatten()


def quantise_matrices(
    form: Form,
    x_END: torch.Tensor,
    out_EB: torch.Tensor,
) -> None:
    """Write ``x_END`` (floating) to ``out_EB``, uint8 of whole units for each expert.

    What is left of an expert's last unit is 0.
    """
    x_EN = x_END.flatten(1)
    padded_EN = F.pad(x_EN, (0, -x_EN.shape[1] % form.unit))
    made = quantise_groups(form, padded_EN.flatten())
    for own, new in zip(form.split(out_EB), made, strict=True):
        if own is not None and new is not None:
            own.copy_(new.view(own.shape))


# ---- widening -----------------------------------------------------------------------------------


class CodedMatrices(NamedTuple):
    """All experts' matrices in codes, as products take them in place of a tensor."""

    form: Form
    bytes_EB: torch.Tensor
    """uint8, as :func:`quantise_matrices` writes them."""
    matrix: torch.Size
    """The shape of one expert's matrix, [N, D]."""
    dtype: torch.dtype
    """The dtype in which they are multiplied."""

    @property
    def shape(self) -> torch.Size:
        """[E, N, D]."""
        return torch.Size((len(self.bytes_EB), *self.matrix))

    def widen(self) -> torch.Tensor:
        """Dequantise all: a new tensor [E, N, D]."""
        bytes_EB = self.bytes_EB
        numel = self.matrix.numel()
        out = torch.empty(self.shape, dtype=self.dtype, device=bytes_EB.device)
        table = self.form.table(bytes_EB.device)
        widen_groups(self.form, self.form.split(bytes_EB), table, out.view(-1), 0, numel)
        return out


def widen_groups(
    form: Form,
    given: Groups,
    table: torch.Tensor | None,
    out_N: torch.Tensor,
    start: int,
    numel: int,
    backend: Backend = "auto",
) -> None:
    """Dequantise ``numel`` numbers from ``start`` on of each rank into ``out_N``, rank by rank.

    Args:
        given: rows may lie apart.
        table: :meth:`Form.table` on the device.
        out_N: floating, contiguous, at most W * ``numel``: the last ranks may have less.
    """
    _check(form, given, out_N, start, numel)
    if use_fast(backend, out_N):
        if out_N.numel():
            _widen_groups(*given, table, out_N, start, numel, form.bits, form.size, form.sharing)
        return
    first = start // form.unit
    stop = -(-(start + numel) // form.unit)
    bytes_WB, scales_WG, shared_WS = given.units(form, first, stop)
    if table is None:
        whole_WN = bytes_WB.view(E4M3).float()
    else:
        codes_WN = torch.stack((bytes_WB & 15, bytes_WB >> 4), -1).flatten(1)
        whole_WN = table.index_select(0, codes_WN.flatten().int()).view(codes_WN.shape)
    scales_WG = scales_WG.int()
    if shared_WS is None:
        wide_WG = (scales_WG << 23).view(torch.float32)
    else:
        assert table is not None
        factor_WS1, offset_WS1 = shared_WS.unflatten(1, (-1, 2)).split(1, -1)
        shares_WSG = table[len(form.codebook) :][scales_WG].unflatten(1, (-1, form.sharing))
        wide_WG = (shares_WSG * factor_WS1 + offset_WS1).flatten(1)  # rounded twice
    whole_WN = whole_WN.unflatten(1, (-1, form.size)) * wide_WG[..., None]
    wide_WN = whole_WN.flatten(1)[:, start - first * form.unit :][:, :numel]
    out_N.copy_(wide_WN.reshape(-1)[: out_N.numel()])


def _check(
    form: Form,
    given: Groups,
    out_N: torch.Tensor,
    start: int,
    numel: int,
) -> None:
    """Raise ValueError if :func:`widen_groups` does not take these."""
    codes, scales, shared = given
    ranks = len(codes)
    numbers = codes.shape[1] * 8 // form.bits
    is_there = 0 <= start <= start + numel <= numbers and out_N.numel() <= ranks * numel
    wanted = [(ranks, numbers // form.size), (ranks, 2 * numbers // form.unit)]
    others = [scales] if shared is None else [scales, shared]
    fits = numbers % form.unit == 0 and (shared is not None) == (form.sharing > 1)
    fits &= all(x.shape == w for x, w in zip(others, wanted, strict=False))
    fits &= codes.dtype == scales.dtype == torch.uint8
    fits &= shared is None or shared.dtype == torch.float32
    are_near = out_N.dim() == 1 and all(x.stride(-1) == 1 for x in (codes, *others, out_N))
    if not (is_there and fits and are_near):
        takes = f"whole units of {form.unit} numbers in {form.name}, uint8 and near neighbours"
        raise refusal(
            "widen_groups",
            takes,
            **{"numbers": f"{start} to {start + numel}", "room for": out_N, **given._asdict()},
        )


@torch.library.custom_op("moetrain::widen_groups", mutates_args=("out_N",))
def _widen_groups(
    codes_WB: torch.Tensor,
    scales_WG: torch.Tensor,
    shared_WS: torch.Tensor | None,
    table: torch.Tensor | None,
    out_N: torch.Tensor,
    start: int,
    numel: int,
    bits: int,
    size: int,
    sharing: int,
) -> None:
    launch = _LAUNCH[bits]
    groups = -(-(start + numel) // size) - start // size
    _groups_kernel[(triton.cdiv(groups, launch["GROUPS"]), len(codes_WB))](
        codes_WB, scales_WG, shared_WS, table, out_N,
        codes_WB.stride(0), scales_WG.stride(0), 0 if shared_WS is None else shared_WS.stride(0),
        start, numel, out_N.numel(), BITS=bits, SIZE=size, SHARING=sharing,
        enable_fp_fusion=False, **launch,
    )  # fmt: skip


@_widen_groups.register_fake
def _(*arguments) -> None:
    return None


@triton.jit
def _groups_kernel(
    codes, scales, shared, table, out, code_stride, scale_stride, shared_stride,
    start, numel, total, BITS: tl.constexpr, SIZE: tl.constexpr, SHARING: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    rank = tl.program_id(1).to(tl.int64)
    first = start // SIZE + tl.program_id(0).to(tl.int64) * GROUPS
    skipped = first * SIZE - start  # of those that are wanted; below zero: some here are not
    left = tl.minimum(numel, total - rank * numel) - skipped
    group = tl.arange(0, GROUPS)
    is_there = group * SIZE < left
    number = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = (number < left) & (number + skipped >= 0)
    scales, codes = scales + rank * scale_stride, codes + rank * code_stride
    if SHARING > 1:
        shared += rank * shared_stride
    wide = load_scales(scales, shared, table, first + group, is_there, SHARING)
    if BITS == 8:
        x = load_codes(codes + first * SIZE + number, mask, table, BITS, SHARING)
    else:
        pairs = group[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        place = codes + first * (SIZE // 2) + pairs
        x = load_codes(place, is_there[:, None], table, BITS, SHARING)
    tl.store(out + (rank * numel + skipped) + number, x * wide[:, None], mask)


@triton.jit
def load_scales(scales, shared, table, group, is_there, SHARING: tl.constexpr):
    """The scales, fp32, of the groups with these numbers."""
    scale = tl.load(scales + group, is_there, other=0).to(tl.int32)
    if SHARING == 1:
        wide = (scale << 23).to(tl.float32, bitcast=True)
    else:
        pair = shared + 2 * (group // SHARING)
        share = tl.load(table + 16 + scale)
        # Rounded twice, as the launch forbids to fuse them: bitsandbytes does so.
        wide = share * tl.load(pair, is_there, other=0.0)
        wide += tl.load(pair + 1, is_there, other=0.0)
    return wide


@triton.jit
def load_codes(place, is_there, table, BITS: tl.constexpr, SHARING: tl.constexpr):
    """The numbers, fp32, of the bytes at ``place``; of 4 bits two a byte, along the last dim."""
    code = tl.load(place, is_there, other=0).to(tl.int32)
    if BITS == 8:
        # By hand, as not every GPU can. The bits of e4m3 lie in fp32's as those of a number that
        # is 2^120 times smaller, subnormal ones too.
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        x = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif SHARING == 1:
        # Those of e2m1 likewise, 2^126 times smaller.
        pair = tl.interleave(code & 15, code >> 4)
        bits = ((pair & 8) << 28) | ((pair & 7) << 22)
        x = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        x = tl.interleave(tl.load(table + (code & 15)), tl.load(table + (code >> 4)))
    return x
