"""Expert indices: which row each (token, slot) takes once rows are sorted by expert.

Legend: T tokens, K experts a token, E experts, R = T * K rows (the most there can be).

A token t that chose experts ``ids[t, 0..K)`` becomes up to K rows; rows lie sorted by expert, and
within one expert by (token, slot), so the order is stable and reproducible. Worked example with
T=3, K=2, E=3 and ``ids = [[2, 0], [0, -1], [2, 1]]`` (-1: no expert)::

    row          0       1       2       3       4      5
    (token,slot) (0,1)   (1,0)   (2,1)   (0,0)   (2,0)  none
    expert       0       0       1       2       2      -
    counts  = [2, 1, 2]        offsets  = [2, 3, 5]     (cumulative ends)
    row_slot = [1, 2, 5, 0, 4, -1]                      (token * K + slot of each row)
    slot_row = [[3, 0], [1, -1], [4, 2]]                (row of each slot)

A caller that knows how many rows there are (5 here), or has room for so many only, says so, and the
row map is that long. With room for 4, row 4 is dropped: ``offsets`` ends at [2, 3, 4], slot (2, 0)
gets -1, and ``counts`` still tells of all 5.

The fast path is a counting sort in two launches: each program counts its ids, then ranks them from
the counts of the programs before it. Nothing races, so the order needs no atomics, and no [T, E]
map is stored. Shapes never depend on the routing, so nothing waits for the device.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton's launch settings and unrolled ranges are not typed.)

from typing import NamedTuple

import torch

from moetrain.kernels.backend import Backend, tl, triton, use_fast, worth_saving

# Launch settings, measured on one H200.
TILE, WARPS = 128, 4  # ids ranked at once, by comparing all pairs
MAX_PROGRAMS = 256  # every program reads all programs' counts, so their number is bounded
COUNT_ELEMENTS = 16384  # of those counts, this many at once
# What routing changes from call to call. Triton would compile anew, for 0.4 s in the midst of
# training, for each combination of those that are 1 or multiples of 16.
CHANGING = ("programs", "num_rows", "slots", "tiles")


class ExpertIndices(NamedTuple):
    """The two index maps of a routing decision, all int32 on the tokens' device."""

    counts_E: torch.Tensor
    """Slots that chose each expert."""
    offsets_E: torch.Tensor
    """Cumulative end row of each expert: what a grouped GEMM takes."""
    row_slot_R: torch.Tensor
    """Flat slot ``token * K + slot`` of each row, -1 past the last row."""
    slot_row_TK: torch.Tensor
    """Row of each slot, -1 where the slot has no expert or no row."""


def expert_indices(
    topk_ids_TK: torch.Tensor,
    num_experts: int,
    backend: Backend = "auto",
    *,
    num_rows: int | None = None,
    check: bool = False,
) -> ExpertIndices:
    """Index maps of ``topk_ids_TK`` (int32 or int64, -1: no expert) over ``num_experts``.

    Args:
        num_rows: R, at most T * K (None: that). Rows past it are dropped, see above.
        check: look for ids outside ``[-1, num_experts)`` first. For debugging: it waits for the
            device and breaks the compiled graph.

    Raises:
        ValueError: a wrong shape or dtype, or, with ``check``, an id out of range.
    """
    if topk_ids_TK.dim() != 2 or topk_ids_TK.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"expert_indices: ids were given as {topk_ids_TK.dtype} {tuple(topk_ids_TK.shape)}; it "
            "takes int32 or int64 [T, K]"
        )
    if check and topk_ids_TK.numel():
        low, high = (int(x) for x in topk_ids_TK.aminmax())
        if low < -1 or high >= num_experts:
            raise ValueError(
                f"expert_indices: ids were given in [{low}, {high}]; with {num_experts} experts it "
                f"takes -1 (no expert) to {num_experts - 1}"
            )
    if not use_fast(backend, topk_ids_TK):
        return expert_indices_reference(topk_ids_TK, num_experts, num_rows)
    rows = topk_ids_TK.numel() if num_rows is None else num_rows
    return ExpertIndices(*_expert_indices(topk_ids_TK.contiguous(), num_experts, rows))


def expert_indices_reference(
    topk_ids_TK: torch.Tensor, num_experts: int, num_rows: int | None = None
) -> ExpertIndices:
    """:func:`expert_indices` by one stable sort."""
    ids_N = topk_ids_TK.reshape(-1)
    rows = ids_N.numel() if num_rows is None else num_rows
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
        # Not a slice: the compiler could not say how long that is, with a size it does not know.
        row_slot_R=row_slot_N.narrow(0, 0, rows),
        slot_row_TK=torch.where(has_row_N, slot_row_N, -1).int().view_as(topk_ids_TK),
    )


@torch.library.custom_op("moetrain::expert_indices", mutates_args=())
def _expert_indices(
    ids_TK: torch.Tensor, num_experts: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if not 0 <= num_rows <= ids_TK.numel():
        raise ValueError(
            f"expert_indices: num_rows is {num_rows}; with ids of {tuple(ids_TK.shape)} it is at "
            f"most {ids_TK.numel()}"
        )
    outputs = _empty_indices(ids_TK, num_experts, num_rows)
    slots, width = ids_TK.numel(), triton.next_power_of_2(num_experts)
    # Two at least: a program's start, reading the counts, costs more than a tile.
    tiles = max(2, triton.cdiv(triton.cdiv(slots, TILE), MAX_PROGRAMS))
    programs = max(1, triton.cdiv(slots, tiles * TILE))
    counts = ids_TK.new_empty(programs, num_experts, dtype=torch.int32)
    sizes = (slots, num_experts, tiles, TILE, width)
    _count_kernel[(programs,)](ids_TK, counts, *sizes, num_warps=WARPS)
    count_rows = max(1, COUNT_ELEMENTS // width)
    _rank_kernel[(programs,)](
        ids_TK, counts, *outputs, programs, num_rows, *sizes, count_rows, num_warps=WARPS
    )
    return outputs


def _empty_indices(
    ids_TK: torch.Tensor, num_experts: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = ((num_experts,), (num_experts,), (num_rows,), ids_TK.shape)
    counts, offsets, row_slot, slot_row = (ids_TK.new_empty(s, dtype=torch.int32) for s in shapes)
    return counts, offsets, row_slot, slot_row


_expert_indices.register_fake(_empty_indices)
# And what sorts rows in the reference.
worth_saving("routing", torch.ops.moetrain.expert_indices.default, torch.ops.aten.sort.stable)


@triton.jit
def _load_ids(ids, slot, slots, E):
    """The ids of some slots, -1 past the last slot and for what is no expert."""
    expert = tl.load(ids + slot, slot < slots, other=-1).to(tl.int32)
    return tl.where((expert >= 0) & (expert < E), expert, -1)


@triton.jit(do_not_specialize=CHANGING)
def _count_kernel(ids, counts, slots, E, tiles, TILE: tl.constexpr, EXPERTS: tl.constexpr):
    """``counts[program, expert]``: the program's ``tiles * TILE`` ids by expert."""
    program = tl.program_id(0)
    column = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    for i in range(tiles):
        expert = _load_ids(ids, (program * tiles + i) * TILE + tl.arange(0, TILE), slots, E)
        total += tl.sum((expert[:, None] == column[None, :]).to(tl.int32), axis=0)
    tl.store(counts + program * E + column, total, column < E)


@triton.jit(do_not_specialize=CHANGING)
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
    """The row of each of the program's ids, and the slot of each such row."""
    program = tl.program_id(0)
    column = tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], tl.int32)
    total = tl.zeros([EXPERTS], tl.int32)
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
    next_row = end - total + before
    # Slots without an expert take the rows behind all others.
    next_unused = tl.sum(total, axis=0) + program * tiles * TILE - tl.sum(before, axis=0)
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
