"""Group quantisation: elements of 8 or 4 bits with a scale for each group, for frozen weights.

A :class:`QuantFormat` says how elements and scales are stored. One kernel dequantises all formats,
and rounds only to the dtype that is asked for::

    float8  elements in e4m3, and a scale 2^k for each 32      (MXFP8 of OCP's Microscaling v1.0)
    mxfp4   elements in e2m1, two a byte, and 2^k for each 32  (MXFP4 of the same)
    nf4     two a byte, each one of the 16 quantiles of a normal distribution, and a scale for each
            64: table[scale's byte] * factor + offset          (QLoRA, arXiv 2305.14314)
    nvfp4   elements in e2m1, two a byte, and a scale for each 16: e4m3 * factor         (NVFP4)

The lower half of a byte is the first element. 2^k is stored as the byte of its exponent in fp32. In
e4m3, k is the smallest for which no element is more than 448 times the scale. In e2m1, k is the
smallest for which all are less than 7 times the scale: they round to 6 at most, while 7 would round
to 8. Dequantised elements do not change when they are quantised again. In e2m1 the bytes stay the
same too, since the largest of a group is then 4 or 6 times its scale.

Scales of nf4 are the largest absolute values of their groups, quantised themselves ("double
quantisation") by bitsandbytes' table of 256: 0, 1, and (0.1 + 0.9 (j + 1/2) / 2^i) 10^(i - 6)
with both signs, i = 0 ... 6, j < 2^i. bitsandbytes has a factor for 256 groups and one offset for
the whole tensor. Here both are stored for each set of 32 groups, so all that bitsandbytes writes
can be stored, and what a rank stores does not depend on the others. Quantising takes::

    offset = the set's largest scale     factor = (largest - smallest) / 0.993, rounded down to bf16

so every scale is the offset plus a deviation that is at most 0. Quantising the dequantised elements
again finds the same factor and offset, and so changes nothing. Quantising uses only the table's 0
and its entries below -0.001. Groups whose elements are all below 1/128 of the set's largest become
0. So a scale is rounded by at most 0.7 % of the range of its set's scales.

The factor of nvfp4 is one for a whole tensor in NVIDIA's files, so these can be stored too. Here it
is stored for each set of 128 groups, and quantising takes::

    factor = the set's largest element / 2688, rounded up to 18 bits     (2688 = 6 * 448)
    scale = the group's largest element / 6 / factor, rounded to e4m3

The largest element of a group becomes 6 times its scale, and every such product is exact in fp32.
So quantising the dequantised elements again finds the same factor, scales and elements. Groups
whose scale would be below 2^-6, the least normal value of e4m3, become 0.

Worked example, mxfp4: [6.9, -1.2, 0.3] has the scale 1 and becomes [6, -1, 0.5]; with a 7 in place
of the 6.9 the scale is 2, and the elements become 2 times [4, -0.5, 0]. nf4: the group [2, -1, 0.1]
has the scale 2 and becomes 2 times [1, -0.525, 0.0796]. nvfp4: beside a group with a 2688, a group
[12, 5.2, -0.4] has the scale 2 and becomes 2 times [6, 3, 0].

An element that is not finite makes its group NaN, in nf4 and nvfp4 its whole set.

Legend: W ranks, N elements of whole groups, B bytes, G groups, S sets of groups that share factor
and offset. Of matrices: E experts, N rows, D columns.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional as F

from moetrain.kernels.quant.e4m3 import E4M3, SCALED, quantise_rows
from moetrain.runtime.backend import Backend, refusal, tl, triton, use_fast

_BAD = 255
"""The byte of a scale 2^k that makes its group NaN."""
_LAUNCH: dict[int, dict[str, int]] = {
    8: {"GROUPS": 64, "num_warps": 2},
    4: {"GROUPS": 64, "num_warps": 4},
}
"""Launch settings by the bits of an element."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of e2m1 without a sign."""
_SIGNED_E2M1 = (*_E2M1, *(-x for x in _E2M1))
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
"""bitsandbytes' quantiles, in the order of its files."""


class Groups(NamedTuple):
    """Quantised elements of W ranks; views of the bytes of one or several ranks."""

    quantised: torch.Tensor
    """uint8 [W, B]: the elements."""
    scales: torch.Tensor
    """uint8 [W, G]."""
    shared: torch.Tensor | None = None
    """fp32 [W, 2 S]: factor and offset (in nvfp4 0) of each set in turn; None: scales are powers of
    two."""

    def units(self, format: "QuantFormat", first: int, stop: int) -> "Groups":
        """Return views of units ``first:stop`` of each rank."""
        size = format.unit * format.bits // 8
        quantised = self.quantised[:, first * size : stop * size]
        scales = self.scales[:, first * format.groups_per_set : stop * format.groups_per_set]
        shared = None if self.shared is None else self.shared[:, 2 * first : 2 * stop]
        return Groups(quantised, scales, shared)

    def to(self, device: torch.device) -> "Groups":
        """Return them on ``device``."""
        shared = None if self.shared is None else self.shared.to(device)
        return Groups(self.quantised.to(device), self.scales.to(device), shared)


@dataclass(frozen=True)
class QuantFormat:
    """The storage of quantised elements: first all elements, then scales, then what sets share."""

    name: str
    bits: int
    """Bits of an element."""
    group_size: int
    """Elements that share a scale."""
    codebook: tuple[float, ...] = ()
    """The value of each element's bits; empty: those of e4m3."""
    groups_per_set: int = 1
    """Groups that share factor and offset of their scales; 1: scales are powers of two."""
    has_e4m3_scales: bool = False
    """True: the scales of a set are e4m3 * factor; False: those of bitsandbytes' table."""

    @property
    def unit(self) -> int:
        """Elements of one set of groups, the smallest part that is stored independently."""
        return self.group_size * self.groups_per_set

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit with its scales."""
        shared = 8 if self.groups_per_set > 1 else 0
        return self.unit * self.bits // 8 + self.groups_per_set + shared

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element with its share of the scales."""
        return self.unit_bytes / self.unit

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` elements, rounded up to whole units."""
        return -(-numel // self.unit) * self.unit_bytes

    def split(self, bytes_WB: torch.Tensor) -> Groups:
        """Return views of the elements, scales and shared values in ranks' bytes (whole units)."""
        units = bytes_WB.shape[1] // self.unit_bytes
        elements, scales = units * self.unit * self.bits // 8, units * self.groups_per_set
        has_shared = self.groups_per_set > 1
        shared = bytes_WB[:, elements + scales :].view(torch.float32) if has_shared else None
        return Groups(bytes_WB[:, :elements], bytes_WB[:, elements:][:, :scales], shared)

    def table(self, device: torch.device) -> torch.Tensor | None:
        """Return the fp32 values of elements' bits, then of scales' bytes; None for float8."""
        # Not cached in a step that only compiles kernels: its fake tensors have no memory.
        is_real = type(torch.empty(0)) is torch.Tensor
        return _table(self, device) if is_real else _table.__wrapped__(self, device)


QUANT_FORMATS = {
    format.name: format
    for format in (
        QuantFormat("float8", bits=8, group_size=SCALED),
        QuantFormat("mxfp4", bits=4, group_size=SCALED, codebook=_SIGNED_E2M1),
        QuantFormat("nf4", bits=4, group_size=64, codebook=_NF4, groups_per_set=32),
        QuantFormat(
            "nvfp4",
            bits=4,
            group_size=16,
            codebook=_SIGNED_E2M1,
            groups_per_set=128,
            has_e4m3_scales=True,
        ),
    )
}
"""By the values of ``lora.base_dtype`` and ``rl.generator_dtype``."""


@cache
def _table(format: QuantFormat, device: torch.device) -> torch.Tensor | None:
    """Make :meth:`QuantFormat.table`, once: CUDA graphs may capture the step that asks for it."""
    if not format.codebook:
        return None
    elements = torch.tensor(format.codebook, dtype=torch.float32, device="cpu")
    if format.has_e4m3_scales:
        scales = torch.arange(256, dtype=torch.uint8, device="cpu").view(E4M3).float()
    else:
        scales = _scale_table() if format.groups_per_set > 1 else elements[:0]
    return torch.cat((elements, scales)).to(device)


def _scale_table() -> torch.Tensor:
    """Return bitsandbytes' table of 256 values of a scale's byte (fp32), rounded as there."""
    parts = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        middles = (edges[:-1] + edges[1:]) / 2
        parts.append(10.0 ** (i - 6) * middles)
    found = torch.cat(parts)
    return torch.cat((found, -found, torch.tensor([0.0, 1.0]))).sort().values


# ---- quantising ---------------------------------------------------------------------------------


_AT_ONCE = 2**25
"""Elements (whole units) that are quantised at a time, in five times their memory in fp32."""


def quantise_groups(
    format: QuantFormat, x_N: torch.Tensor, dtype: torch.dtype | None = None
) -> Groups:
    """Quantise ``x_N`` (floating, whole units) in plain torch; the result has W = 1.

    ``dtype``: the dtype to which elements are rounded first; None: they are not.
    """
    parts = [_quantise(format, x.to(dtype or x.dtype)) for x in x_N.split(_AT_ONCE)]
    return Groups(
        quantised=torch.cat([part.quantised for part in parts], 1),
        scales=torch.cat([part.scales for part in parts], 1),
        shared=torch.cat([part.shared for part in parts if part.shared is not None], 1)
        if format.groups_per_set > 1
        else None,
    )


def _quantise(format: QuantFormat, x_N: torch.Tensor) -> Groups:
    x_GS = x_N.float().view(-1, format.group_size)
    is_bad_G = ~x_GS.isfinite().all(1)
    x_GS = x_GS.masked_fill(is_bad_G[:, None], 0.0)
    if format.has_e4m3_scales:
        return _quantise_nvfp4(format, x_GS, is_bad_G)
    if format.groups_per_set > 1:
        return _quantise_nested(format, x_GS, is_bad_G)
    if format.bits == 8:
        values_GS, scales_G = quantise_rows(x_GS, "reference")
        quantised_N = values_GS.view(torch.uint8).flatten()
        exponent_G = scales_G.view(torch.int32) >> 23
    else:
        # From 1.75 times a power of two on (7 times the scale), the next larger scale is taken.
        field_G = (x_GS.abs().amax(1).view(torch.int32) + 0x200000) >> 23
        exponent_G = field_G.clamp(min=3) - 2
        x_GS = x_GS * ((254 - exponent_G) << 23).view(torch.float32)[:, None]
        quantised_N = _pack(_nearest_e2m1(x_GS).flatten())
    return Groups(quantised_N[None], exponent_G.masked_fill(is_bad_G, _BAD).to(torch.uint8)[None])


def _quantise_nested(format: QuantFormat, x_GS: torch.Tensor, is_bad_G: torch.Tensor) -> Groups:
    """Quantise groups whose scales are quantised too."""
    amax_G = x_GS.abs().amax(1)
    bytes_G, shared_S2, is_zero_G = _quantise_scales(amax_G.view(-1, format.groups_per_set))
    shared_S2[is_bad_G.view(-1, format.groups_per_set).any(1)] = torch.nan
    # Elements are divided by their exact largest, not by the scale that is stored for it.
    x_GS = x_GS.masked_fill(is_zero_G[:, None], 0.0) / amax_G.clamp(min=2.0**-126)[:, None]
    indices_N = _nearest(x_GS, format.codebook).flatten()
    return Groups(_pack(indices_N)[None], bytes_G[None], shared_S2.view(1, -1))


def _quantise_nvfp4(format: QuantFormat, x_GS: torch.Tensor, is_bad_G: torch.Tensor) -> Groups:
    """Quantise groups whose scales are in e4m3, beneath a factor for each set."""
    amax_SG = x_GS.abs().amax(1).view(-1, format.groups_per_set)
    amax_SG = amax_SG.where(amax_SG >= _FEW, 0.0)
    # Round the factor up: adding makes the last 6 bits carry unless they are 0. Its products with
    # values of e4m3 (4 bits) and e2m1 (2 bits) are then exact.
    factor_S1 = amax_SG.amax(1, keepdim=True) / _LARGEST_NVFP4
    factor_S1 = ((factor_S1.view(torch.int32) + 0x3F) & -0x40).view(torch.float32)
    # Scales are at most 448, and 0 for what is too small.
    scale_SG = amax_SG / 6 / factor_S1
    is_kept_SG = scale_SG >= _LEAST_E4M3  # False where all of a set is 0
    scale_SG = scale_SG.where(is_kept_SG, 0.0).to(E4M3)
    # Elements.
    wide_G1 = (scale_SG.float() * factor_S1).view(-1, 1)
    is_kept_G1 = is_kept_SG.view(-1, 1)
    x_GS = x_GS.where(is_kept_G1, 0.0) / wide_G1.where(is_kept_G1, 1.0)
    factor_S1 = factor_S1.where(~is_bad_G.view_as(amax_SG).any(1, keepdim=True), torch.nan)
    shared_S2 = torch.cat((factor_S1, torch.zeros_like(factor_S1)), 1)
    return Groups(
        _pack(_nearest_e2m1(x_GS).flatten())[None],
        scale_SG.view(torch.uint8).view(1, -1),
        shared_S2.view(1, -1),
    )


def _nearest(x: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """Return the index (uint8) of the nearest of ascending ``values``; a tie takes the lower."""
    all_C = torch.tensor(values, dtype=torch.float32, device=x.device)
    return torch.bucketize(x, (all_C[:-1] + all_C[1:]) / 2, out_int32=True).to(torch.uint8)


def _nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of the nearest e2m1 value; a tie takes even bits. Zeros keep their sign."""
    size = x.abs()
    bits = _nearest(size, _E2M1)
    ties = torch.tensor([0.75, 1.75, 3.5], device=x.device)  # those whose lower value is odd
    return bits + torch.isin(size, ties).to(torch.uint8) + (x.signbit().to(torch.uint8) << 3)


def _pack(bits_N: torch.Tensor) -> torch.Tensor:
    """Put two elements of 4 bits into each byte."""
    return bits_N[0::2] | (bits_N[1::2] << 4)


_FEW = 2.0**-100
"""Groups whose largest element is smaller become 0: their arithmetic would be subnormal."""
_LARGEST_NVFP4 = 6 * 448.0
"""The largest product of a value of e2m1 and one of e4m3."""
_LEAST_E4M3 = 2.0**-6
"""The least normal value of e4m3."""


def _quantise_scales(
    amax_SG: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise the scales of each set.

    Quantising the dequantised scales again finds the same factor and offset: one scale is the
    offset, another is the offset minus 0.993 times the factor, and the factor, in bf16, has so few
    bits that rounding finds it again.

    Returns:
        Bytes [G], factors and offsets [S, 2], and the groups that become 0, bool [G].
    """
    # Drop groups that are too small beside the set's largest.
    largest_S1 = amax_SG.amax(1, keepdim=True)
    is_kept_SG = amax_SG >= (largest_S1 * 2.0**-7).clamp(min=_FEW)
    # The range of the other scales gives the factor.
    largest_S1 = largest_S1.where(largest_S1 >= _FEW, 0.0)
    least_S1 = amax_SG.where(is_kept_SG, torch.inf).amin(1, keepdim=True)
    least_S1 = torch.maximum(least_S1, largest_S1 * 2.0**-6)  # so that no scale is negative
    table_C = _scale_table().to(amax_SG.device)
    range_S1 = (largest_S1 - least_S1).clamp(min=0.0)
    # A factor that is found again may have been rounded down by less than 2^-12 of it.
    factor_S1 = range_S1 / -table_C[0] * (1 + 2.0**-12)
    factor_S1 = (factor_S1.view(torch.int32) & -0x10000).view(torch.float32)  # down to bf16
    factor_S1 = factor_S1.where(factor_S1 >= largest_S1 * 2.0**-10, 0.0)
    # Take the nearest entry of the part of the table that is used.
    entries_C = torch.cat(((table_C < -1e-3).nonzero()[:, 0], (table_C == 0).nonzero()[:, 0]))
    used_C = table_C[entries_C]
    share_SG = ((amax_SG - largest_S1) / factor_S1).nan_to_num(0.0, 0.0, -1.0)
    share_SG = share_SG.where(factor_S1 > 0, 0.0)
    bytes_SG = entries_C[torch.bucketize(share_SG, (used_C[:-1] + used_C[1:]) / 2)]
    shared_S2 = torch.cat((factor_S1, largest_S1), 1)
    return bytes_SG.flatten().to(torch.uint8), shared_S2, ~is_kept_SG.flatten()


def quantise_matrices(
    format: QuantFormat,
    x_END: torch.Tensor,
    out_EB: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    """Quantise ``x_END`` (floating) into ``out_EB``: uint8, whole units for each expert.

    The rest of an expert's last unit is 0. ``dtype`` is that of :func:`quantise_groups`.
    """
    x_EN = x_END.flatten(1)
    padded_EN = F.pad(x_EN, (0, -x_EN.shape[1] % format.unit))
    made = quantise_groups(format, padded_EN.flatten(), dtype)
    for own, new in zip(format.split(out_EB), made, strict=True):
        if own is not None and new is not None:
            own.copy_(new.view(own.shape))


# ---- dequantising -------------------------------------------------------------------------------


class QuantisedMatrices(NamedTuple):
    """All experts' matrices, quantised; products take them in place of a tensor."""

    format: QuantFormat
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

    def dequantise(self) -> torch.Tensor:
        """Return all matrices as a new tensor [E, N, D]."""
        device = self.bytes_EB.device
        out = torch.empty(self.shape, dtype=self.dtype, device=device)
        dequantise_groups(
            self.format,
            self.format.split(self.bytes_EB),
            self.format.table(device),
            out.view(-1),
            start=0,
            numel=self.matrix.numel(),
        )
        return out


def dequantise_groups(
    format: QuantFormat,
    groups: Groups,
    table: torch.Tensor | None,
    out_N: torch.Tensor,
    start: int,
    numel: int,
    backend: Backend = "auto",
) -> None:
    """Dequantise elements ``start:start + numel`` of each rank into ``out_N``, in rank order.

    Args:
        groups: whole units; the bytes of different ranks need not be adjacent.
        table: :meth:`QuantFormat.table` on the device.
        out_N: floating, contiguous, at most W * ``numel`` elements. If it has fewer, the end of the
            last ranks is left out.
    """
    _check(format, groups, out_N, start, numel)
    if use_fast(backend, out_N):
        if out_N.numel():
            dequantise_groups_op(
                *groups,
                table,
                out_N,
                start,
                numel,
                format.bits,
                format.group_size,
                format.groups_per_set,
            )
        return
    # Take the units that hold the elements.
    first = start // format.unit
    stop = -(-(start + numel) // format.unit)
    bytes_WB, scales_WG, shared_WS = groups.units(format, first, stop)
    # Elements without their scales.
    if table is None:
        x_WN = bytes_WB.view(E4M3).float()
    else:
        indices_WN = torch.stack((bytes_WB & 15, bytes_WB >> 4), -1).flatten(1)
        x_WN = table.index_select(0, indices_WN.flatten().int()).view(indices_WN.shape)
    # Scales in fp32.
    scales_WG = scales_WG.int()
    if shared_WS is None:
        factor_WG = (scales_WG << 23).view(torch.float32)
    else:
        assert table is not None
        factor_WS1, offset_WS1 = shared_WS.unflatten(1, (-1, 2)).split(1, -1)
        shares_WG = table[len(format.codebook) :][scales_WG]
        shares_WSG = shares_WG.unflatten(1, (-1, format.groups_per_set))
        factor_WG = (shares_WSG * factor_WS1 + offset_WS1).flatten(1)  # rounded twice
    x_WGS = x_WN.unflatten(1, (-1, format.group_size)) * factor_WG[..., None]
    wanted_WN = x_WGS.flatten(1)[:, start - first * format.unit :][:, :numel]
    out_N.copy_(wanted_WN.reshape(-1)[: out_N.numel()])


def _check(
    format: QuantFormat, groups: Groups, out_N: torch.Tensor, start: int, numel: int
) -> None:
    """Raise ValueError if :func:`dequantise_groups` does not take these."""
    quantised, scales, shared = groups
    ranks = len(quantised)
    elements = quantised.shape[1] * 8 // format.bits
    is_there = 0 <= start <= start + numel <= elements and out_N.numel() <= ranks * numel
    wanted = [(ranks, elements // format.group_size), (ranks, 2 * elements // format.unit)]
    others = [scales] if shared is None else [scales, shared]
    fits = elements % format.unit == 0 and (shared is not None) == (format.groups_per_set > 1)
    fits &= all(x.shape == w for x, w in zip(others, wanted, strict=False))
    fits &= quantised.dtype == scales.dtype == torch.uint8
    fits &= shared is None or shared.dtype == torch.float32
    are_dense = all(x.stride(-1) == 1 for x in (quantised, *others, out_N))
    if not (is_there and fits and are_dense and out_N.dim() == 1):
        takes = f"whole units of {format.unit} elements in {format.name}, uint8, of last stride 1"
        raise refusal(
            "dequantise_groups",
            takes,
            **{"elements": f"{start} to {start + numel}", "room for": out_N, **groups._asdict()},
        )


@torch.library.custom_op("moetrain::widen_groups", mutates_args=("out_N",))
def dequantise_groups_op(
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
        codes_WB,
        scales_WG,
        shared_WS,
        table,
        out_N,
        codes_WB.stride(0),
        scales_WG.stride(0),
        0 if shared_WS is None else shared_WS.stride(0),
        start,
        numel,
        out_N.numel(),
        BITS=bits,
        SIZE=size,
        SHARING=sharing,
        enable_fp_fusion=False,
        **launch,
    )


@dequantise_groups_op.register_fake
def _(
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
    """Write in place; there is nothing to return."""


@triton.jit
def _groups_kernel(
    quantised, scales, shared, table, out, quantised_stride, scale_stride, shared_stride,
    start, numel, total, BITS: tl.constexpr, SIZE: tl.constexpr, SHARING: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    rank = tl.program_id(1).to(tl.int64)
    first = start // SIZE + tl.program_id(0).to(tl.int64) * GROUPS
    # Wanted elements before this program's first; negative: its first ones are not wanted.
    skipped = first * SIZE - start
    left = tl.minimum(numel, total - rank * numel) - skipped
    group = tl.arange(0, GROUPS)
    is_there = group * SIZE < left
    element = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = (element < left) & (element + skipped >= 0)
    scales, quantised = scales + rank * scale_stride, quantised + rank * quantised_stride
    if SHARING > 1:
        shared += rank * shared_stride
    wide = load_scales(scales, shared, table, first + group, is_there, SHARING)
    if BITS == 8:
        x = load_elements(quantised + first * SIZE + element, mask, table, BITS, SHARING)
    else:
        pairs = group[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        place = quantised + first * (SIZE // 2) + pairs
        x = load_elements(place, is_there[:, None], table, BITS, SHARING)
    tl.store(out + (rank * numel + skipped) + element, x * wide[:, None], mask)


@triton.jit
def load_scales(scales, shared, table, group, is_there, SHARING: tl.constexpr):
    """Return the scales, fp32, of groups with the indices ``group``."""
    scale = tl.load(scales + group, is_there, other=0).to(tl.int32)
    if SHARING == 1:
        wide = (scale << 23).to(tl.float32, bitcast=True)
    else:
        pair = shared + 2 * (group // SHARING)
        share = tl.load(table + 16 + scale)
        # The product and the sum are each rounded, as in bitsandbytes: the launch disables FMA.
        wide = share * tl.load(pair, is_there, other=0.0)
        wide += tl.load(pair + 1, is_there, other=0.0)
    return wide


@triton.jit
def load_elements(place, is_there, table, BITS: tl.constexpr, SHARING: tl.constexpr):
    """Return the elements, fp32, of the bytes at ``place``, without their scales.

    A byte holds two elements of 4 bits, so then the last dim doubles.
    """
    code = tl.load(place, is_there, other=0).to(tl.int32)
    if BITS == 8:
        # Converted by hand, since not every GPU has an instruction for it. Shifted into fp32's
        # fields, the bits of an e4m3 value, even a subnormal one, are those of the value / 2^120.
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        x = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif SHARING == 1:
        # Likewise, the bits of e2m1 become those of the value / 2^126.
        pair = tl.interleave(code & 15, code >> 4)
        bits = ((pair & 8) << 28) | ((pair & 7) << 22)
        x = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        x = tl.interleave(tl.load(table + (code & 15)), tl.load(table + (code >> 4)))
    return x
