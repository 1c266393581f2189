"""Rows in e4m3, transposed group by group, for weights' gradients as products in e4m3.

A weight's gradient sums over the rows of its group, here in e4m3::

    d_w[e] = a[rows of e]^T @ g[rows of e]         a = values_a * scales_a,  g = values_g * scales_g

Each row has a scale of its own, and a scale that changes along the sum cannot be taken out of it.
So a group takes the largest scale of its rows, and the values of a row with a smaller scale become
smaller by the ratio::

    scale[e] = max over r in e of scale[r]    out[m, p] = round(values[r, m] * scale[r] / scale[e])

Both scales are powers of two. So rounding changes only values that fall below 2^-6 and become
subnormal, by at most half of 2^-9. In units of the group's scale its largest element is about 2^8,
so this is about 2^-18 of that element.

With rows scaled by tiles of 128 (:mod:`moetrain.kernels.quant.e4m3`) a group takes a scale for each
column of tiles, in the same way.

The product reads 128 columns at once, so each group begins at a multiple of 128. Column p of the
result holds the row r = ``row_P[p]``, which is in general another number. A group has its rows in
order, then zeros up to the next multiple.

Worked example, groups of 3, 0 and 1 rows: group 0 has columns 0 to 127, of which 3 to 127 are
zeros, group 1 none and group 2 columns 128 to 255; the ends are [128, 128, 256]. Rows of scales
[1, 4, 1] with values [8, 8, 0.002] become scale 4 and [2, 8, 0]: 0.0005 rounds to 0, as the
smallest value is 2^-9.

Legend: T tokens, R rows sorted by group, P columns of all groups, E groups, M and N widths.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
from torch.nn import functional as F

from moetrain.kernels.experts.products import grouped_weight_grad
from moetrain.kernels.quant.e4m3 import E4M3, TILE, Quantised, to_e4m3
from moetrain.runtime.backend import (
    INTERPRETED,
    Backend,
    TensorDescriptor,
    tl,
    triton,
    use_fast,
)

_ROOM = 128
"""Columns of a group are a multiple of this: a product reads so many at once."""
_SCALES = 4096
"""Rows whose scales a program reads at once."""
_WORD = 4
"""Columns in one int32."""
# On an H100 163,840 rows of 2,048 take 0.25 ms, or 0.16 from 20,480 tokens; a copy takes 0.22.
_TILE = {"BM": 128, "WORDS": 32, "num_warps": 8}
# The fastest of seven on one H100 (docs/log/quantisation.md).
_PRODUCT = {"BM": 256, "BN": 128, "num_warps": 8, "num_stages": 4}
_LEAST = 2.0**-126
"""The smallest scale of a row."""


class Columns(NamedTuple):
    """The columns of transposed operands, and the row that each holds."""

    ends_E: torch.Tensor
    """int32: ends of the groups in rows."""
    offsets_E: torch.Tensor
    """int32: ends of the groups in columns, multiples of 128."""
    row_P: torch.Tensor
    """int32: the row that a column holds; -1: none."""
    group_P: torch.Tensor
    """int32: the group of each column; after the last group, the last group."""


class Transposed(NamedTuple):
    """A transposed operand.

    Column p of group e is ``values[:, p] * scales[e]``, or with tiles
    ``values[m, p] * scales[m // 128, e]``.
    """

    values: torch.Tensor
    """[M, P] e4m3."""
    scales: torch.Tensor
    """fp32, powers of two: [E], or [M / 128, E] of tiles."""

    @property
    def is_tiled(self) -> bool:
        """True: a group has a scale for each column of tiles."""
        return self.scales.dim() == 2

    def rows(self, columns: Columns, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise to rows [P, M] in ``dtype``."""
        scales = _by_column(self.scales.to(dtype)[..., columns.group_P], len(self.values))
        return self.values.t().to(dtype) * scales


def _by_column(scales: torch.Tensor, width: int) -> torch.Tensor:
    """Spread scales [P], or [M / 128, P] of tiles, over what they scale: [P, 1] or [P, M]."""
    if scales.dim() == 1:
        return scales[:, None]
    return scales.t().repeat_interleave(TILE, 1)[:, :width]


def place_columns(ends_E: torch.Tensor, num_rows: int, backend: Backend = "auto") -> Columns:
    """Assign columns to the rows of groups that end at ``ends_E`` (int32, at most ``num_rows``)."""
    groups = ends_E.shape[0]
    columns = max(1, -(-num_rows // _ROOM) + groups - 1) * _ROOM
    if use_fast(backend, ends_E):
        offsets_E = torch.empty_like(ends_E)
        row_P, group_P = ends_E.new_empty(2, columns)
        _place_kernel[(columns // _ROOM,)](
            ends_E,
            offsets_E,
            row_P,
            group_P,
            groups,
            ROOM=_ROOM,
            GROUPS=triton.next_power_of_2(groups),
            num_warps=2,
        )
        return Columns(ends_E, offsets_E, row_P, group_P)
    starts_E = torch.cat((ends_E.new_zeros(1), ends_E[:-1]))
    room_E = (ends_E - starts_E + _ROOM - 1) // _ROOM * _ROOM
    offsets_E = room_E.cumsum(0, dtype=torch.int32)
    column_P = torch.arange(columns, device=ends_E.device, dtype=torch.int32)
    group_P = torch.searchsorted(offsets_E, column_P, right=True).clamp(max=groups - 1)
    row_P = column_P - (offsets_E - room_E)[group_P] + starts_E[group_P]
    row_P = torch.where(row_P < ends_E[group_P], row_P, -1)
    return Columns(ends_E, offsets_E, row_P.int(), group_P.int())


def transpose_rows(
    rows: Quantised,
    columns: Columns,
    token_R: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> Transposed:
    """Transpose quantised rows [R, M] group by group.

    Args:
        rows: the rows; those that are in no group are not read. With ``token_R``, tokens [T, M].
        token_R: int32, the token of each row.
    """
    groups, width, total = columns.ends_E.shape[0], rows.values.shape[1], columns.row_P.shape[0]
    shape = (*rows.scales.shape[:-1], groups)
    if use_fast(backend, rows.values):
        scales = rows.scales.new_empty(shape)
        tiled = rows.is_tiled
        _group_scale_kernel[(groups, shape[0] if tiled else 1)](
            rows.scales,
            token_R,
            columns.ends_E,
            scales,
            len(rows.values),
            groups,
            LEAST=_LEAST,
            BLOCK=_SCALES,
            num_warps=8,
        )
        values_MP = rows.values.new_empty(width, total)
        grid = (triton.cdiv(width, _TILE["BM"]), triton.cdiv(total, _TILE["WORDS"] * _WORD))
        # With tokens, all programs that read the same part of them run together.
        along = token_R is not None
        _transpose_kernel[grid[::-1] if along else grid](
            rows.values.view(torch.uint8),
            rows.scales,
            token_R,
            columns.row_P,
            columns.group_P,
            scales,
            values_MP.view(torch.int32),
            width,
            total // _WORD,
            len(rows.values),
            groups,
            ALONG=along,
            TILED=tiled,
            BY_HAND=INTERPRETED,
            **_TILE,
        )
        return Transposed(values_MP, scales)
    # A column without a row has -1, which indexes the padding.
    source_P = columns.row_P if token_R is None else F.pad(token_R, (0, 1), value=-1)[columns.row_P]
    scales_P = F.pad(rows.scales, (0, 1), value=_LEAST)[..., source_P]
    group_P = columns.group_P.long().expand_as(scales_P)
    scales = rows.scales.new_full(shape, _LEAST).scatter_reduce(-1, group_P, scales_P, "amax")
    shrunk = _by_column(scales_P / scales[..., columns.group_P], width)
    values_PM = F.pad(rows.values.float(), (0, 0, 0, 1))[source_P] * shrunk
    return Transposed(values_PM.t().contiguous().to(E4M3), scales)


def scaled_weight_grad(
    a: Transposed,
    g: Transposed,
    columns: Columns,
    dtype: torch.dtype,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return ``out[e] = a[columns of e] @ g[columns of e]^T`` [E, M, N] in ``dtype``.

    The reference multiplies the dequantised operands, in fp32 or a wider ``dtype``.
    """
    if not use_fast(backend, a.values):
        wide = torch.promote_types(dtype, torch.float32)
        rows = (x.rows(columns, wide) for x in (a, g))
        return grouped_weight_grad(*rows, columns.offsets_E).to(dtype)
    experts, M, N = len(columns.offsets_E), a.values.shape[0], g.values.shape[0]
    out_EMN = a.scales.new_empty(experts, M, N, dtype=dtype)
    launch = _PRODUCT
    grid = (experts * triton.cdiv(M, launch["BM"]) * triton.cdiv(N, launch["BN"]),)
    _weight_grad_kernel[grid](
        TensorDescriptor.from_tensor(a.values, [launch["BM"], _ROOM]),
        TensorDescriptor.from_tensor(g.values, [launch["BN"], _ROOM]),
        columns.offsets_E,
        a.scales,
        g.scales,
        out_EMN,
        M,
        N,
        experts,
        BK=_ROOM,
        TILED=a.is_tiled,
        IN_FP32=INTERPRETED,
        **launch,
    )
    return out_EMN


@triton.jit
def _place_kernel(ends, offsets, rows, groups, E, ROOM: tl.constexpr, GROUPS: tl.constexpr):
    first = tl.program_id(0) * ROOM  # the ROOM columns from here on are of one group
    e = tl.arange(0, GROUPS)
    end = tl.load(ends + e, e < E, other=0)
    start = tl.load(ends + e - 1, (e > 0) & (e < E), other=0)
    room = (end - start + ROOM - 1) // ROOM * ROOM
    offset = tl.cumsum(room, axis=0)
    if tl.program_id(0) == 0:
        tl.store(offsets + e, offset, e < E)
    group = tl.sum(((offset <= first) & (e < E - 1)).to(tl.int32), axis=0)
    # The shift from the group's columns to its rows, and the end of its rows.
    shift = tl.sum(tl.where(e == group, start - offset + room, 0), axis=0)
    last = tl.sum(tl.where(e == group, end, 0), axis=0)
    p = first + tl.arange(0, ROOM)
    row = p + shift
    tl.store(rows + p, tl.where(row < last, row, -1))
    tl.store(groups + p, group)


@triton.jit(do_not_specialize=["num_rows"])  # it changes with every call
def _group_scale_kernel(
    scales,
    tokens,
    ends,
    group_scales,
    num_rows,
    E,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0)
    scales += tl.program_id(1).to(tl.int64) * num_rows
    end = tl.load(ends + group)
    start = tl.load(ends + group - 1, group > 0, other=0)
    largest = tl.full([BLOCK], LEAST, tl.float32)
    for first in range(start, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        source = row if tokens is None else tl.load(tokens + row, row < end, other=0)
        largest = tl.maximum(largest, tl.load(scales + source, row < end, other=LEAST))
    tl.store(group_scales + tl.program_id(1) * E + group, tl.max(largest, axis=0))


@triton.jit(do_not_specialize=["num_rows"])
def _transpose_kernel(
    values,
    scales,
    tokens,
    rows,
    groups,
    group_scales,
    out,
    M,
    W,
    num_rows,
    E,
    BM: tl.constexpr,
    WORDS: tl.constexpr,
    ALONG: tl.constexpr,
    TILED: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """Put four columns into each word, one after the other, so that whole words are transposed."""
    m = tl.program_id(1 if ALONG else 0) * BM + tl.arange(0, BM)
    w = tl.program_id(0 if ALONG else 1) * WORDS + tl.arange(0, WORDS)
    words = tl.zeros([WORDS, BM], tl.int32)
    if TILED:  # a program's rows of the result are one column of tiles
        scales += tl.program_id(1 if ALONG else 0).to(tl.int64) * num_rows
        group_scales += tl.program_id(1 if ALONG else 0) * E
    for i in tl.static_range(4):
        row = tl.load(rows + w * 4 + i, w < W, other=-1)
        group = tl.load(groups + w * 4 + i, w < W, other=0)
        is_used = row >= 0
        source = row if tokens is None else tl.load(tokens + row, is_used, other=0)
        own = tl.load(scales + source, is_used, other=0.0)
        bits = tl.load(group_scales + group).to(tl.int32, bitcast=True)
        shrunk = own * (0x7F000000 - bits).to(tl.float32, bitcast=True)
        at = values + source.to(tl.int64)[:, None] * M + m[None, :]
        byte = tl.load(at, is_used[:, None] & (m < M)[None, :], other=0)
        x = byte.to(tl.float8e4nv, bitcast=True)
        if BY_HAND:
            x = to_e4m3(x.to(tl.float32) * shrunk[:, None], BY_HAND)
        else:  # fp16 holds these products exactly, or they are far below e4m3's smallest value
            x = (x.to(tl.float16) * shrunk.to(tl.float16)[:, None]).to(tl.float8e4nv)
        byte = x.to(tl.uint8, bitcast=True)
        words |= byte.to(tl.int32) << (8 * i)
    mask = (m < M)[:, None] & (w < W)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * W + w[None, :], tl.trans(words), mask)


@triton.jit
def _weight_grad_kernel(
    a_desc,
    g_desc,
    offsets,
    a_scales,
    g_scales,
    out,
    M,
    N,
    E,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILED: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """Compute a tile of one group's product.

    Programs of a group follow one another, for the cache.
    """
    across = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * across
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    first_m, first_n = tile // across * BM, tile % across * BN
    end = tl.load(offsets + group)
    start = tl.load(offsets + group - 1, group > 0, other=0)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(start, end, BK):
        a = a_desc.load([first_m, k])
        g = g_desc.load([first_n, k])
        if IN_FP32:  # Triton's interpreter does not multiply e4m3
            a, g = a.to(tl.float32), g.to(tl.float32)
        total = tl.dot(a, g.T, total)
    m, n = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN)
    if TILED:
        a_scale = tl.load(a_scales + m // BK * E + group, m < M, other=0.0)
        g_scale = tl.load(g_scales + n // BK * E + group, n < N, other=0.0)
        total *= a_scale[:, None] * g_scale[None, :]
    else:
        total *= tl.load(a_scales + group) * tl.load(g_scales + group)
    at = out + group.to(tl.int64) * M * N + m[:, None] * N + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])
