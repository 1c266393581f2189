"""Products of the experts' LoRA adapters: many groups of rows, and a rank that is small.

A grouped product's tile of 128 x 128 is mostly empty for a rank of 16, and more so if jobs that
share a pass have 1,024 groups of a few rows each. Time goes into reading and writing the wide rows,
and each kernel here does that once. Rows are sorted by group, and each group has a matrix ``m``
[r, N] (A, or B transposed)::

    narrow      low[r] = s * x[r] @ m[g]^T                        [R, N] -> [R, r]
    add_wide    y[r] += s * low[r] @ m[g]                         [R, r] -> [R, N], in place
    narrow_grad d_m[g] = s * low[rows of g]^T @ x[rows of g]      [E, r, N] or [S, E, r, N]

Results are rounded once. Sums over N, r and rows are in ascending order, in tiles that begin with
the group. So a row's bits do not depend on other rows, nor a group's gradient on other groups.

For S tenants (:mod:`moetrain.kernels.experts.mlp`) matrices are [S, E, r, N], and group ``g`` is
expert ``g // S`` and tenant ``g % S``. A tile of B rows has rows of one group. Groups begin
anywhere, and the host does not know their numbers of tiles. So group g gets the tiles from
``start // B + g`` on, which are always enough::

    B = 64, groups of 70, 0 and 60 rows      starts  0, 70, 70      first tiles  0, 2, 3
    tile   0: rows 0 to 63    1: 64 to 69    2: none    3: 70 to 129    4: none

Legend: R rows, E experts, G = E * S groups, N width, r rank.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from typing import NamedTuple

import torch

from moetrain.kernels.experts.products import grouped_mm
from moetrain.runtime.backend import INTERPRETED, tl, triton

_WIDEST_RANK = 64
"""The most columns of the rank that a program takes at a time."""
# Rows and columns of a tile, and launch settings, measured on one H200 (docs/log/lora.md). They do
# not depend on the number of rows, so that a row's bits do not either.
_NARROW = {"BR": 64, "BN": 128, "num_warps": 4, "num_stages": 4}
_WIDE = {"BR": 32, "BN": 128, "num_warps": 4, "num_stages": 2}
_GRADIENT = {"BR": 64, "BN": 128, "num_warps": 4, "num_stages": 3}


def adapted_product(
    x_RN: torch.Tensor,
    w_EMN: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    offsets_E: torch.Tensor,
    offsets_G: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x @ w^T + scale * low @ b^T`` [R, M], and ``low = x @ a^T`` [R, r].

    Args:
        a, b: [E, r, N] and [E, M, r], or [S, E, ...] of S tenants.
        offsets_E, offsets_G: int32, the ends of experts' and of groups' rows.
    """
    low_Rr = narrow(x_RN, a, offsets_G)
    y_RM = grouped_mm(x_RN, w_EMN.transpose(1, 2), offsets_E)
    add_wide(y_RM, low_Rr, b.mT, offsets_G, scale)
    return y_RM, low_Rr


def adapted_product_backward(
    dy_RM: torch.Tensor,
    w_EMN: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    offsets_E: torch.Tensor,
    offsets_G: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of :func:`adapted_product`'s ``x`` and ``low``."""
    d_low_Rr = narrow(dy_RM, b.mT, offsets_G, scale)
    dx_RN = grouped_mm(dy_RM, w_EMN, offsets_E)
    add_wide(dx_RN, d_low_Rr, a, offsets_G)
    return dx_RN, d_low_Rr


def narrow(
    x_RN: torch.Tensor,
    m: torch.Tensor,
    offsets_G: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return ``scale * x[r] @ m[group of r]^T`` [R, r] in ``x``'s dtype.

    ``m`` is [E, r, N] or [S, E, r, N], of any strides. Rows past the last offset are uninitialised.
    """
    rows, width = x_RN.shape
    rank = m.shape[-2]
    layout = _groups_of(m, offsets_G)
    low_Rr = x_RN.new_empty(rows, rank)
    block = _rank_block(rank)
    grid = (triton.cdiv(rows, _NARROW["BR"]) + layout.groups, triton.cdiv(rank, block))
    _narrow_kernel[grid](
        x_RN, m, low_Rr, offsets_G, scale, *layout, width, rank,
        triton.next_power_of_2(layout.groups), BK=block, WIDEN=INTERPRETED, **_NARROW,
    )  # fmt: skip
    return low_Rr


def add_wide(
    y_RN: torch.Tensor,
    low_Rr: torch.Tensor,
    m: torch.Tensor,
    offsets_G: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """Add ``scale * low[r] @ m[group of r]`` to ``y`` [R, N]; ``m`` is as in :func:`narrow`."""
    rows, width = y_RN.shape
    rank = m.shape[-2]
    layout = _groups_of(m, offsets_G)
    tiles = triton.cdiv(rows, _WIDE["BR"]) + layout.groups
    grid = (tiles, triton.cdiv(width, _WIDE["BN"]))
    _wide_kernel[grid](
        y_RN, m, low_Rr, offsets_G, scale, *layout, width, rank,
        triton.next_power_of_2(layout.groups), BK=_rank_block(rank), WIDEN=INTERPRETED, **_WIDE,
    )  # fmt: skip


def narrow_grad(
    low_Rr: torch.Tensor,
    x_RN: torch.Tensor,
    m: torch.Tensor,
    offsets_G: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return ``scale * low[rows of g]^T @ x[rows of g]``, its dimensions in the order of ``m``'s.

    A group without rows gives zeros.
    """
    rank, width = m.shape[-2:]
    d_m = torch.empty_like(m)
    layout, block = _groups_of(d_m, offsets_G), _rank_block(rank)
    grid = (layout.groups, triton.cdiv(width, _GRADIENT["BN"]), triton.cdiv(rank, block))
    _gradient_kernel[grid](
        x_RN, d_m, low_Rr, offsets_G, scale, *layout, width, rank,
        BK=block, WIDEN=INTERPRETED, **_GRADIENT,
    )  # fmt: skip
    return d_m


def _rank_block(rank: int) -> int:
    return min(_WIDEST_RANK, max(16, triton.next_power_of_2(rank)))


class _Groups(NamedTuple):
    """The groups of rows, and where a group's matrix lies; arguments of each kernel, in order."""

    groups: int
    """G, the number of groups."""
    tenants: int
    """S, the number of tenants; 1 where the matrices are not stacked."""
    m_tenant: int
    """The stride from a tenant's matrices to the next one's; 0 for one tenant."""
    m_expert: int
    """The stride from an expert's matrix to the next one's."""
    m_rank: int
    """The stride of a matrix along its rank."""
    m_column: int
    """The stride of a matrix along its width."""


def _groups_of(m: torch.Tensor, offsets_G: torch.Tensor) -> _Groups:
    groups = offsets_G.shape[0]
    if m.dim() == 4:
        return _Groups(groups, m.shape[0], *m.stride())
    return _Groups(groups, 1, 0, *m.stride())


@triton.jit
def _dot(a, b, total, WIDEN: tl.constexpr):
    if WIDEN:  # Triton's interpreter would multiply bf16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _stored(x, there, WIDEN: tl.constexpr):
    """Return ``x`` in the dtype of ``there``, rounded to nearest.

    Triton's interpreter would truncate to bf16.
    """
    if WIDEN and there.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = bits.to(tl.float32, bitcast=True)
    return x.to(there.dtype.element_ty)


@triton.jit
def _tile(offsets, groups, GP: tl.constexpr, BR: tl.constexpr):
    """Return this program's group, its rows, and a mask of those that exist."""
    tile = tl.program_id(0)
    g = tl.arange(0, GP)
    starts = tl.load(offsets + g - 1, mask=(g > 0) & (g < groups), other=0)
    is_before = (starts // BR + g <= tile) & (g < groups)
    group = tl.sum(is_before.to(tl.int32)) - 1
    start = tl.max(tl.where(is_before, starts, 0))
    end = tl.load(offsets + group)
    first = start // BR + group
    row = start + (tile - first) * BR
    row += tl.arange(0, BR)
    return group, row, row < end


@triton.jit
def _place(group, tenants, m_tenant, m_expert):
    """Return the offset at which a group's matrix begins."""
    tenant = (group % tenants).to(tl.int64)
    expert = (group // tenants).to(tl.int64)
    return tenant * m_tenant + expert * m_expert


@triton.jit
def _narrow_kernel(
    x, m, low, offsets, scale, groups, tenants, m_tenant, m_expert, m_rank, m_column,
    N: tl.constexpr, R: tl.constexpr, GP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    group, row, is_row = _tile(offsets, groups, GP, BR)
    if tl.sum(is_row.to(tl.int32)) == 0:
        return
    m += _place(group, tenants, m_tenant, m_expert)
    k = tl.program_id(1) * BK
    k += tl.arange(0, BK)
    x += row.to(tl.int64)[:, None] * N
    total = tl.zeros([BR, BK], tl.float32)
    for n in range(0, N, BN):
        column = n + tl.arange(0, BN)
        is_in = (column < N)[None, :]
        wide = tl.load(x + column[None, :], mask=is_row[:, None] & is_in, other=0.0)
        at = k[:, None] * m_rank + column[None, :] * m_column
        matrix = tl.load(m + at, mask=(k < R)[:, None] & is_in, other=0.0)
        total = _dot(wide, matrix.T, total, WIDEN)
    at = row.to(tl.int64)[:, None] * R + k[None, :]
    tl.store(low + at, _stored(total * scale, low, WIDEN), mask=is_row[:, None] & (k < R)[None, :])


@triton.jit
def _wide_kernel(
    y, m, low, offsets, scale, groups, tenants, m_tenant, m_expert, m_rank, m_column,
    N: tl.constexpr, R: tl.constexpr, GP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    group, row, is_row = _tile(offsets, groups, GP, BR)
    if tl.sum(is_row.to(tl.int32)) == 0:
        return
    m += _place(group, tenants, m_tenant, m_expert)
    column = tl.program_id(1) * BN
    column += tl.arange(0, BN)
    is_in = (column < N)[None, :]
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    before = tl.load(y + at, mask=is_row[:, None] & is_in, other=0.0).to(tl.float32)
    total = tl.zeros([BR, BN], tl.float32)
    for first in tl.static_range(0, R, BK):
        k = first + tl.arange(0, BK)
        mine = is_row[:, None] & (k < R)[None, :]
        narrow = tl.load(low + row.to(tl.int64)[:, None] * R + k[None, :], mask=mine, other=0.0)
        places = k[:, None] * m_rank + column[None, :] * m_column
        matrix = tl.load(m + places, mask=(k < R)[:, None] & is_in, other=0.0)
        total = _dot(narrow, matrix, total, WIDEN)
    tl.store(y + at, _stored(before + total * scale, y, WIDEN), mask=is_row[:, None] & is_in)


@triton.jit
def _gradient_kernel(
    x, d_m, low, offsets, scale, groups, tenants, m_tenant, m_expert, m_rank, m_column,
    N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    start = tl.load(offsets + group - 1, mask=group > 0, other=0)
    end = tl.load(offsets + group)
    column = tl.program_id(1) * BN
    column += tl.arange(0, BN)
    k = tl.program_id(2) * BK
    k += tl.arange(0, BK)
    is_in = (column < N)[None, :]
    is_rank = (k < R)[None, :]
    total = tl.zeros([BK, BN], tl.float32)
    for first in range(start, end, BR):
        row = first + tl.arange(0, BR)
        is_row = (row < end)[:, None]
        at = row.to(tl.int64)[:, None]
        narrow = tl.load(low + at * R + k[None, :], mask=is_row & is_rank, other=0.0)
        wide = tl.load(x + at * N + column[None, :], mask=is_row & is_in, other=0.0)
        total = _dot(narrow.T, wide, total, WIDEN)
    d_m += _place(group, tenants, m_tenant, m_expert)
    at = k[:, None] * m_rank + column[None, :] * m_column
    tl.store(d_m + at, _stored(total * scale, d_m, WIDEN), mask=(k < R)[:, None] & is_in)
