"""Permutation of tokens to rows sorted by expert: the index maps, and the copies there and back.

A token t that chose experts ``ids[t, 0..K)`` becomes up to K rows. Rows are sorted by expert, and
within one expert by (token, slot). Worked example with T=3, K=2, E=3 and
``ids = [[2, 0], [0, -1], [2, 1]]`` (-1: no expert)::

    row          0       1       2       3       4      5
    (token,slot) (0,1)   (1,0)   (2,1)   (0,0)   (2,0)  none
    expert       0       0       1       2       2      -
    counts  = [2, 1, 2]        offsets  = [2, 3, 5]     (cumulative ends)
    row_slot = [1, 2, 5, 0, 4, -1]                      (token * K + slot of each row)
    slot_row = [[3, 0], [1, -1], [4, 2]]                (row of each slot)

With room for 4 rows only, row 4 is dropped: ``offsets`` is [2, 3, 4], slot (2, 0) gets -1, and
``counts`` still counts all 5.

:func:`expert_indices` is a counting sort in two launches, without atomics. In the first launch each
program counts its ids by expert. In the second it ranks them, from the counts of the programs
before it. The host does not wait.

With the maps, tokens are copied to rows and rows summed to tokens, over the slots (t, k) that have
a row::

    permute:    x_RD[slot_row[t, k]] = x_TD[t]             unpermute:  y_TD[t] = sum over k of
                weights_R[slot_row[t, k]] = weights_TK[t, k]                   y_RD[slot_row[t, k]]

Each is the other's backward. A program takes a token: if it took a row, each token would be read K
times. Rows past ``offsets[-1]`` are unspecified, and gradients never read them.

Legend: T tokens, K experts a token, E experts, R rows (T * K, or as many as the row map has room
for), D width.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# Triton has no types, so the bodies of kernels, and what calls them, have unknown types.

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
    worth_saving,
)
from moetrain.runtime.typed import OpContext, fake_of, register_gradient

# Launch settings, measured on one H200.
_TILE, _WARPS = 128, 4
"""Ids that are ranked at once, by comparing all pairs, and warps of a program."""
_MAX_PROGRAMS = 256
"""The most programs: each reads the counts of all."""
_COUNT_ELEMENTS = 16384
"""Counts that a program reads at once."""
_CHANGING = ("programs", "num_rows", "slots", "tiles")
"""Arguments that change with the routing from call to call. Kernels are not specialised for them:
otherwise Triton would compile anew for each combination of arguments that are 1 or multiples of 16,
which takes 0.4 s within a training step."""


class ExpertIndices(NamedTuple):
    """The two index maps of a routing decision, all int32 on the tokens' device."""

    counts_E: torch.Tensor
    """The number of slots that chose each expert."""
    offsets_E: torch.Tensor
    """The cumulative end row of each expert, as a grouped GEMM takes it."""
    row_slot_R: torch.Tensor
    """The flat slot ``token * K + slot`` of each row, -1 past the last row."""
    slot_row_TK: torch.Tensor
    """The row of each slot, -1 where the slot has no expert or no row."""


def expert_indices(
    topk_ids_TK: torch.Tensor,
    num_experts: int,
    backend: Backend = "auto",
    *,
    num_rows: int | None = None,
) -> ExpertIndices:
    """Make the index maps of ``topk_ids_TK`` (int32 or int64, -1: no expert) over ``num_experts``.

    Args:
        num_rows: R, at most T * K (None: T * K). Rows past it are dropped, see above.

    Raises:
        ValueError: shapes, dtypes or the number of rows do not fit.
    """
    if topk_ids_TK.dim() != 2 or topk_ids_TK.dtype not in (torch.int32, torch.int64):
        raise refusal("expert_indices", "int32 or int64 [T, K]", ids=topk_ids_TK)
    rows = topk_ids_TK.numel() if num_rows is None else num_rows
    if use_fast(backend, topk_ids_TK):
        return ExpertIndices(*expert_indices_op(topk_ids_TK.contiguous(), num_experts, rows))
    ids_N = topk_ids_TK.reshape(-1)
    # "No expert" sorts behind every expert.
    keys_N = torch.where(ids_N < 0, num_experts, ids_N)
    sorted_N, slots_N = torch.sort(keys_N, stable=True)
    edges = torch.arange(num_experts + 1, device=ids_N.device, dtype=sorted_N.dtype)
    starts = torch.searchsorted(sorted_N, edges)
    slot_row_N = torch.empty_like(slots_N)
    slot_row_N[slots_N] = torch.arange(ids_N.numel(), device=ids_N.device)
    has_row_N = (ids_N >= 0) & (slot_row_N < rows)
    row_slot_N = torch.where(sorted_N < num_experts, slots_N, -1).int()
    return ExpertIndices(
        counts_E=starts.diff().int(),
        offsets_E=starts[1:].clamp(max=rows).int(),
        # Not a slice: the compiler could not tell its length for a size that it does not know.
        row_slot_R=row_slot_N.narrow(0, 0, rows),
        slot_row_TK=torch.where(has_row_N, slot_row_N, -1).int().view_as(topk_ids_TK),
    )


@torch.library.custom_op("moetrain::expert_indices", mutates_args=())
def expert_indices_op(
    ids_TK: torch.Tensor,
    num_experts: int,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if not 0 <= num_rows <= ids_TK.numel():
        raise refusal("expert_indices", f"at most {ids_TK.numel()}", num_rows=num_rows, ids=ids_TK)
    outputs = _empty_indices(ids_TK, num_experts, num_rows)
    slots = ids_TK.numel()
    width = triton.next_power_of_2(num_experts)
    # At least two tiles: reading the counts at a program's start costs more than a tile.
    tiles = max(2, triton.cdiv(triton.cdiv(slots, _TILE), _MAX_PROGRAMS))
    programs = max(1, triton.cdiv(slots, tiles * _TILE))
    counts = ids_TK.new_empty(programs, num_experts, dtype=torch.int32)
    _count_kernel[(programs,)](
        ids_TK, counts, slots, num_experts, tiles, TILE=_TILE, EXPERTS=width, num_warps=_WARPS
    )
    _rank_kernel[(programs,)](
        ids_TK, counts, *outputs, programs, num_rows, slots, num_experts, tiles,
        TILE=_TILE, EXPERTS=width, COUNT_ROWS=max(1, _COUNT_ELEMENTS // width), num_warps=_WARPS,
    )  # fmt: skip
    return outputs


def _empty_indices(
    ids_TK: torch.Tensor,
    num_experts: int,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = ((num_experts,), (num_experts,), (num_rows,), ids_TK.shape)
    counts, offsets, row_slot, slot_row = (ids_TK.new_empty(s, dtype=torch.int32) for s in shapes)
    return counts, offsets, row_slot, slot_row


fake_of(expert_indices_op)(_empty_indices)
# In the reference the rows come from the sort, so it is worth saving, too.
worth_saving("routing", torch.ops.moetrain.expert_indices.default, torch.ops.aten.sort.stable)


@triton.jit
def _load_ids(ids, slot, slots, E):
    """Return the ids of some slots, -1 past the last slot and for ids outside 0..E-1."""
    expert = tl.load(ids + slot, slot < slots, other=-1).to(tl.int32)
    return tl.where((expert >= 0) & (expert < E), expert, -1)


@triton.jit(do_not_specialize=_CHANGING)
def _count_kernel(ids, counts, slots, E, tiles, TILE: tl.constexpr, EXPERTS: tl.constexpr):
    """Count the program's ``tiles * TILE`` ids by expert: ``counts[program, expert]``."""
    program = tl.program_id(0)
    column = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    for i in range(tiles):
        expert = _load_ids(ids, (program * tiles + i) * TILE + tl.arange(0, TILE), slots, E)
        total += tl.sum((expert[:, None] == column[None, :]).to(tl.int32), axis=0)
    tl.store(counts + program * E + column, total, column < E)


@triton.jit(do_not_specialize=_CHANGING)
def _rank_kernel(
    ids,
    counts,
    counts_out,
    offsets_out,
    row_slot,
    slot_row,
    programs,
    num_rows,
    slots,
    E,
    tiles,
    TILE: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNT_ROWS: tl.constexpr,
):
    """Store the row of each of the program's ids, and the slot of each such row."""
    program = tl.program_id(0)
    column = tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    total = tl.zeros([EXPERTS], tl.int32)
    # 1. Ids of each expert, in the programs before this one and in all.
    for start in range(0, programs, COUNT_ROWS):
        other = start + tl.arange(0, COUNT_ROWS)
        mask = (other < programs)[:, None] & (column < E)[None, :]
        count = tl.load(counts + other[:, None] * E + column[None, :], mask, other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where((other < program)[:, None], count, 0), axis=0)
    end = tl.cumsum(total, axis=0)
    if program == 0:
        tl.store(counts_out + column, total, column < E)
        tl.store(offsets_out + column, tl.minimum(end, num_rows), column < E)
    # 2. The first row of each expert that is this program's. Slots without an expert take the rows
    # behind all others.
    next_row = end - total + before
    next_unused = tl.sum(total, axis=0) + program * tiles * TILE - tl.sum(before, axis=0)
    # 3. Rank the ids, a tile at a time.
    order = tl.arange(0, TILE)
    for i in range(tiles):
        slot = (program * tiles + i) * TILE + order
        expert = _load_ids(ids, slot, slots, E)
        earlier = (expert[:, None] == expert[None, :]) & (order[:, None] < order[None, :])
        first = tl.gather(next_row, tl.maximum(expert, 0), axis=0)
        row = tl.where(expert >= 0, first, next_unused) + tl.sum(earlier.to(tl.int32), axis=0)
        fits = row < num_rows
        tl.store(row_slot + row, tl.where(expert >= 0, slot, -1), (slot < slots) & fits)
        tl.store(slot_row + slot, tl.where((expert >= 0) & fits, row, -1), slot < slots)
        here = tl.sum((expert[:, None] == column[None, :]).to(tl.int32), axis=0)
        next_row += here
        next_unused += TILE - tl.sum(here, axis=0)


_COLUMNS, _ROW_WARPS = 1024, 2
"""Columns that a program copies or sums, and its warps, measured on one H200."""


def permute(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor | None,
    indices: ExpertIndices,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy tokens and routing weights to rows ``x_RD``, ``weights_R`` sorted by expert.

    A token's gradient is the fp32 sum over its rows, rounded once. ``x_TD`` is contiguous. Without
    weights ``weights_R`` is empty.

    Raises:
        ValueError: shapes do not fit, or ``x_TD`` is not contiguous.
    """
    shape = indices.slot_row_TK.shape
    if x_TD.dim() != 2 or x_TD.shape[:1] != shape[:1]:
        raise refusal("permute", "[T, D]", x=x_TD, slot_row_TK=indices.slot_row_TK)
    if weights_TK is not None and weights_TK.shape != shape:
        raise refusal("permute", "[T, K]", weights=weights_TK, slot_row_TK=indices.slot_row_TK)
    if use_fast(backend, x_TD):
        require_contiguous("permute", x=x_TD)
        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        return permute_op(x_TD, weights_TK, indices.slot_row_TK, indices.row_slot_R.shape[0])
    used_R = indices.row_slot_R >= 0
    slot_R = indices.row_slot_R.clamp(min=0)
    # where, not a product: the gradient of an unused row may hold NaN.
    x_RD = torch.where(used_R[:, None], x_TD[slot_R // shape[1]], 0)
    if weights_TK is None:
        return x_RD, x_TD.new_empty(0)
    return x_RD, torch.where(used_R, weights_TK.reshape(-1)[slot_R], 0)


def unpermute(
    y_RD: torch.Tensor,
    indices: ExpertIndices,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return ``y_TD``, the sum of each token's rows in fp32, rounded once to ``y_RD``'s dtype.

    Raises ValueError: the shape does not fit, or ``y_RD`` is not contiguous.
    """
    if y_RD.dim() != 2 or y_RD.shape[0] != indices.row_slot_R.shape[0]:
        raise refusal("unpermute", "[R, D]", y=y_RD, row_slot_R=indices.row_slot_R)
    if use_fast(backend, y_RD):
        require_contiguous("unpermute", y=y_RD)
        return unpermute_op(y_RD, None, indices.slot_row_TK)[0]
    # -1, an absent row, indexes the last row, which is zeros.
    rows_TKD = F.pad(y_RD, (0, 0, 0, 1))[indices.slot_row_TK]
    wide = torch.promote_types(y_RD.dtype, torch.float32)
    return rows_TKD.sum(1, dtype=wide).to(y_RD.dtype)


@torch.library.custom_op("moetrain::permute", mutates_args=())
def permute_op(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_row_TK: torch.Tensor,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows_of(x_TD, weights_TK, slot_row_TK, num_rows)


@fake_of(permute_op)
def _(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_row_TK: torch.Tensor,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights_R = x_TD.new_empty(0) if weights_TK is None else weights_TK.new_empty(num_rows)
    return x_TD.new_empty(num_rows, x_TD.shape[1]), weights_R


@torch.library.custom_op("moetrain::unpermute", mutates_args=())
def unpermute_op(
    x_RD: torch.Tensor,
    weights_R: torch.Tensor | None,
    slot_row_TK: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    x_TD, weights_TK = _unpermute_fake(x_RD, weights_R, slot_row_TK)
    sum_rows(x_RD, slot_row_TK, x_TD, weights_R, None if weights_R is None else weights_TK)
    return x_TD, weights_TK


@fake_of(unpermute_op)
def _unpermute_fake(
    x_RD: torch.Tensor, weights_R: torch.Tensor | None, slot_row_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x_TD = x_RD.new_empty(slot_row_TK.shape[0], x_RD.shape[1])
    return x_TD, x_RD.new_empty(0) if weights_R is None else weights_R.new_empty(slot_row_TK.shape)


def _save_permuted(ctx: OpContext, inputs: tuple[Any, ...], output: object) -> None:
    _, weights_TK, slot_row_TK, _ = inputs
    ctx.save_for_backward(slot_row_TK)
    ctx.has_weights = weights_TK is not None


def _save_summed(ctx: OpContext, inputs: tuple[Any, ...], output: object) -> None:
    x_RD, weights_R, slot_row_TK = inputs
    ctx.save_for_backward(slot_row_TK)
    ctx.has_weights = weights_R is not None
    ctx.num_rows = x_RD.shape[0]


def _differentiate_permute(
    ctx: OpContext, d_x_RD: torch.Tensor, d_weights_R: torch.Tensor
) -> tuple[object, ...]:
    (slot_row_TK,) = ctx.saved_tensors
    d_x_TD, d_weights_TK = unpermute_op(
        d_x_RD.contiguous(), d_weights_R.contiguous() if ctx.has_weights else None, slot_row_TK
    )
    return gradients(permute_op, x_TD=d_x_TD, weights_TK=d_weights_TK if ctx.has_weights else None)


def _differentiate_unpermute(
    ctx: OpContext, d_x_TD: torch.Tensor, d_weights_TK: torch.Tensor
) -> tuple[object, ...]:
    (slot_row_TK,) = ctx.saved_tensors
    d_x_RD, d_weights_R = permute_op(
        d_x_TD.contiguous(),
        d_weights_TK.contiguous() if ctx.has_weights else None,
        slot_row_TK,
        ctx.num_rows,
    )
    return gradients(unpermute_op, x_RD=d_x_RD, weights_R=d_weights_R if ctx.has_weights else None)


register_gradient(permute_op, _differentiate_permute, _save_permuted)
register_gradient(unpermute_op, _differentiate_unpermute, _save_summed)


def rows_of(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_row_TK: torch.Tensor,
    num_rows: int,
    x_RD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy as :func:`permute` does, within an op; ``x_RD`` receives the rows if it is given."""
    if x_RD is None:
        x_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    weights_R = None if weights_TK is None else weights_TK.new_empty(num_rows)
    tokens, slots = slot_row_TK.shape
    width = x_TD.shape[1]
    grid = (tokens, triton.cdiv(width, _COLUMNS))
    _copy_kernel[grid](
        x_TD, slot_row_TK, x_RD, weights_TK, weights_R, width, slots, _COLUMNS, num_warps=_ROW_WARPS
    )
    return x_RD, x_TD.new_empty(0) if weights_R is None else weights_R


def sum_rows(
    x_RD: torch.Tensor,
    slot_row_TK: torch.Tensor,
    x_TD: torch.Tensor,
    weights_R: torch.Tensor | None = None,
    weights_TK: torch.Tensor | None = None,
) -> None:
    """Sum each token's rows in slot order to ``x_TD``, and copy ``weights_R`` to ``weights_TK``."""
    tokens, slots = slot_row_TK.shape
    width = x_TD.shape[1]
    grid = (tokens, triton.cdiv(width, _COLUMNS))
    _sum_kernel[grid](
        x_RD, slot_row_TK, x_TD, weights_R, weights_TK, width, slots, _COLUMNS, num_warps=_ROW_WARPS
    )


@triton.jit
def _copy_kernel(
    x,
    slot_row,
    rows,
    weights,
    row_weights,
    width,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * width + column, column < width)
    for k in tl.static_range(SLOTS):
        row = tl.load(slot_row + token * SLOTS + k).to(tl.int64)
        # An absent row has no columns.
        tl.store(rows + row * width + column, value, column < tl.where(row >= 0, width, 0))
        if weights is not None and (tl.program_id(1) == 0) & (row >= 0):
            tl.store(row_weights + row, tl.load(weights + token * SLOTS + k))


@triton.jit
def _sum_kernel(
    rows,
    slot_row,
    x,
    row_weights,
    weights,
    width,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    # Unrolled, so that the loads of all rows are in flight together.
    for k in tl.static_range(SLOTS):
        row = tl.load(slot_row + token * SLOTS + k).to(tl.int64)
        # An absent row has no columns.
        mask = column < tl.where(row >= 0, width, 0)
        total += tl.load(rows + row * width + column, mask, other=0.0).to(tl.float32)
        if row_weights is not None and tl.program_id(1) == 0:
            weight = tl.load(row_weights + row, row >= 0, other=0.0)
            tl.store(weights + token * SLOTS + k, weight)
    tl.store(x + token * width + column, total, column < width)


def transpose_blocks(x_RD: torch.Tensor, sizes_GM: torch.Tensor) -> torch.Tensor:
    """Reorder blocks of rows from (g, m) to (m, g); return ``x_RD`` itself if M is 1.

    ``sizes_GM`` has the rows of each block (integers on the host), which add up to R.
    """
    groups = sizes_GM.shape[1]
    if groups == 1:
        return x_RD
    blocks = x_RD.split(sizes_GM.flatten().tolist())
    return torch.cat([x for m in range(groups) for x in blocks[m::groups]])
