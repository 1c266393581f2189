"""Redundant experts: plans which experts each rank copies and which rows it takes, and copies.

Every rank has L = E / W experts of its own and N places for copies behind them. From the counts of
all ranks' choices each rank makes the same plan, move by move: the busiest rank gives rows of its
busiest expert to the idlest rank with a free place. It gives as many as bring one of the two ranks
to the mean, at most all rows of the expert. The plan ends where a move would have fewer than
``least`` rows, and so cost more than it saves. With ``least`` 1 and enough places, no rank has more
rows than the mean, rounded up.

A row stays on its own rank if that has a place of its expert and a share left. The other rows go to
the other holders by their position among all ranks' rows. Worked example with W=2, L=2, N=1,
``least`` 1::

    rows of experts   0  1 | 2  3       rank 0 has 11 of 14, 7 are its share:
    from rank 0       5  1 | 1  0       4 rows of expert 0, its busiest, go to rank 1
    from rank 1       4  1 | 2  0
    places            0  1  0'| 2  3  0'      places 0 to 2 on rank 0, 3 to 5 on rank 1
    experts_WN        [-1], [0]
    rows              5  2  - | 3  0  4       rank 0's 5 rows of expert 0 stay, rank 1's 4 as well

Experts' weights are copied into the places. The gradients of copies are added in fp32 to those of
the experts, in the order of places, and rounded once. Both go through memory that all ranks of a
machine share. SMs move them, and not copy engines, since only the device knows the plan.

The idea is that of EPLB's redundant experts (https://github.com/deepseek-ai/EPLB). Here the plan is
made anew for each batch.

Legend: W ranks, E experts, L of them on a rank, N places for copies on a rank, T tokens, K choices
of a token, P = W * (L + N) places in all, M elements of an expert's matrix.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moetrain.kernels.experts.permutation import ExpertIndices
from moetrain.runtime.backend import (
    Backend,
    refusal,
    tl,
    triton,
    use_fast,
)

_PLAN_WARPS = 4
_BLOCK, _COPY_WARPS, _PARTS = 8192, 8, 32
"""Elements that a program moves at once, its warps, and the programs that share an expert."""


class ReplicaPlan(NamedTuple):
    """A plan as one rank sees it, int32 on the counts' device. The host never waits for it."""

    experts_WN: torch.Tensor
    """The expert in each rank's places for copies; -1: none. The same on every rank."""
    rows_WE: torch.Tensor
    """The number of rows of each expert that each rank takes. The same on every rank."""
    places_WE: torch.Tensor
    """The place of each expert on each rank, counted over the places of all ranks; -1: none."""
    bounds_WE: torch.Tensor
    """The end of each rank's rows within this rank's rows of an expert. A rank's rows begin at the
    end of the rank before it. The first :attr:`stay_E` rows stay here, whatever the bounds are."""
    stay_E: torch.Tensor
    """The number of this rank's rows of each expert that stay here."""


def plan_replicas(
    counts_WE: torch.Tensor,
    spare: int,
    rank: int,
    least: int = 1,
    backend: Backend = "auto",
) -> ReplicaPlan:
    """Return the plan as ``rank`` sees it.

    Args:
        counts_WE: int32, the number of choices of each expert by every rank's tokens.
        spare: N, the number of places for copies on each rank.
        least: the fewest rows that are worth a copy.

    Raises:
        ValueError: E is not a multiple of W, or the counts are not int32.
    """
    ranks, experts = counts_WE.shape
    if experts % ranks or counts_WE.dtype != torch.int32:
        raise refusal("plan_replicas", "int32 [W, E], E a multiple of W", counts=counts_WE)
    if not use_fast(backend, counts_WE):
        return _plan_reference(counts_WE, spare, rank, least)
    plan = ReplicaPlan(
        experts_WN=counts_WE.new_empty(ranks, spare),
        rows_WE=counts_WE.new_empty(ranks, experts),
        places_WE=counts_WE.new_empty(ranks, experts),
        bounds_WE=counts_WE.new_empty(ranks, experts),
        stay_E=counts_WE.new_empty(experts),
    )
    _plan_kernel[(1,)](
        counts_WE.contiguous(), *plan, spare, rank, max(1, least), ranks, experts,
        RANKS=triton.next_power_of_2(ranks), EXPERTS=triton.next_power_of_2(experts),
        num_warps=_PLAN_WARPS,
    )  # fmt: skip
    return plan


def _plan_reference(
    counts_WE: torch.Tensor,
    spare: int,
    rank: int,
    least: int,
) -> ReplicaPlan:
    ranks, experts = counts_WE.shape
    local = experts // ranks
    # 1. Each rank takes all rows of its own experts.
    counts_E = counts_WE.sum(0).tolist()
    homes = [e // local for e in range(experts)]
    rows, places = ([[nothing] * experts for _ in range(ranks)] for nothing in (0, -1))
    for e, home in enumerate(homes):
        rows[home][e], places[home][e] = counts_E[e], home * (local + spare) + e % local
    copies: list[list[int]] = [[] for _ in range(ranks)]
    # 2. Move rows from the busiest rank to the idlest with a free place, while it is worth a copy.
    share = -(-sum(counts_E) // ranks)
    while True:
        load = [sum(row) for row in rows]
        busy = max(range(ranks), key=lambda r: load[r])
        free = [r for r in range(ranks) if len(copies[r]) < spare]
        if not free:
            break
        idle = min(free, key=lambda r: load[r])
        e = max(range(busy * local, (busy + 1) * local), key=lambda e: rows[busy][e])
        moved = min(load[busy] - share, share - load[idle], rows[busy][e])
        if moved < max(1, least):
            break
        rows[busy][e] -= moved
        rows[idle][e] += moved
        places[idle][e] = idle * (local + spare) + local + len(copies[idle])
        copies[idle].append(e)
    # 3. Split this rank's rows: those that stay, and the bounds of those that go to other ranks.
    experts_WN = [row + [-1] * (spare - len(row)) for row in copies]
    rows_WE = counts_WE.new_tensor(rows)
    stay_WE = torch.minimum(counts_WE, rows_WE)
    before_E = (counts_WE - stay_WE)[:rank].sum(0)
    bounds_WE = (rows_WE - stay_WE).cumsum(0) - before_E + stay_WE[rank]
    return ReplicaPlan(
        experts_WN=counts_WE.new_tensor(experts_WN).view(ranks, spare),
        rows_WE=rows_WE,
        places_WE=counts_WE.new_tensor(places),
        bounds_WE=bounds_WE.int(),
        stay_E=stay_WE[rank].clone(),
    )


@triton.jit
def _plan_kernel(
    counts, experts, rows, places, bounds, stay, spare, rank, least, W, E,
    RANKS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    w = tl.arange(0, RANKS)
    e = tl.arange(0, EXPERTS)
    at = w[:, None] * E + e[None, :]
    mask = (w < W)[:, None] & (e < E)[None, :]
    count = tl.load(counts + at, mask, other=0)
    local = E // W
    home = e // local
    left = tl.sum(count, axis=0)  # the rows of each expert that its own rank keeps
    is_home = (home[None, :] == w[:, None]) & mask
    row = tl.where(is_home, left[None, :], 0)
    place = tl.where(is_home, (home * (local + spare) + e % local)[None, :], -1)
    load = tl.sum(row, axis=1)
    share = (tl.sum(load, axis=0) + W - 1) // W
    used = tl.zeros([RANKS], tl.int32)
    for i in range(spare):
        tl.store(experts + w * spare + i, used - 1, w < W)
    tl.debug_barrier()
    going = spare > 0
    while going:
        busy = tl.argmax(load, axis=0)
        idle = tl.argmin(tl.where((w < W) & (used < spare), load, 2147483647), axis=0)
        of_busy = tl.where((home == busy) & (e < E), left, -1)
        chosen = tl.argmax(of_busy, axis=0)
        highest = tl.max(load, axis=0)
        lowest = tl.min(tl.where((w < W) & (used < spare), load, 2147483647), axis=0)
        moved = tl.minimum(tl.minimum(highest - share, share - lowest), tl.max(of_busy, axis=0))
        going = moved >= least
        moved = tl.where(going, moved, 0)
        taken = tl.sum(tl.where(w == idle, used, 0), axis=0)
        to = (w == idle)[:, None] & (e == chosen)[None, :] & going
        place = tl.where(to, idle * (local + spare) + local + taken, place)
        row += tl.where(to, moved, 0)
        row -= tl.where((w == busy)[:, None] & (e == chosen)[None, :], moved, 0)
        left -= tl.where(e == chosen, moved, 0)
        load += tl.where(w == idle, moved, 0) - tl.where(w == busy, moved, 0)
        used += tl.where((w == idle) & going, 1, 0)
        tl.store(experts + idle * spare + taken, chosen, going)
    stays = tl.minimum(count, row)
    before = tl.sum(tl.where((w < rank)[:, None], count - stays, 0), axis=0)
    own = tl.sum(tl.where((w == rank)[:, None], stays, 0), axis=0)
    bound = tl.cumsum(row - stays, axis=0) + (own - before)[None, :]
    tl.store(rows + at, row, mask)
    tl.store(places + at, place, mask)
    tl.store(bounds + at, bound, mask)
    tl.store(stay + e, own, e < E)


def place_ids(
    ids_TK: torch.Tensor,
    indices: ExpertIndices,
    plan: ReplicaPlan,
    rank: int,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return the place of each choice in ``ids_TK``, int32 [T, K]; -1: none.

    Args:
        ids_TK: int32, this rank's choices.
        indices: the index maps of ``ids_TK`` over all experts.
    """
    if use_fast(backend, ids_TK):
        places_TK = torch.empty_like(ids_TK)
        slots = ids_TK.numel()
        ranks, experts = plan.places_WE.shape
        _place_kernel[(triton.cdiv(slots, 512),)](
            ids_TK, indices.slot_row_TK, indices.counts_E, indices.offsets_E, plan.places_WE,
            plan.bounds_WE, plan.stay_E, places_TK, rank, slots, experts, ranks, 512,
        )  # fmt: skip
        return places_TK
    e_TK = ids_TK.clamp(min=0)
    nth_TK = indices.slot_row_TK - (indices.offsets_E - indices.counts_E)[e_TK]
    holder_TK = (nth_TK >= plan.bounds_WE[:, e_TK]).sum(0)
    holder_TK = torch.where(nth_TK < plan.stay_E[e_TK], rank, holder_TK)
    places_TK = plan.places_WE.reshape(-1)[
        (holder_TK * plan.places_WE.shape[1] + e_TK).clamp(max=plan.places_WE.numel() - 1)
    ]
    return torch.where(ids_TK >= 0, places_TK, -1)


@triton.jit(do_not_specialize=("slots",))
def _place_kernel(
    ids, slot_row, counts, offsets, places, bounds, stay, out, rank, slots, E,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(ids + slot, slot < slots, other=-1)
    has = e >= 0
    start = tl.load(offsets + e, has, other=0) - tl.load(counts + e, has, other=0)
    nth = tl.load(slot_row + slot, has, other=0) - start
    holder = tl.zeros([BLOCK], tl.int32)
    for r in tl.static_range(RANKS):
        holder += (nth >= tl.load(bounds + r * E + e, has, other=0)).to(tl.int32)
    holder = tl.where(nth < tl.load(stay + e, has, other=0), rank, holder)
    tl.store(out + slot, tl.load(places + holder * E + e, has, other=-1), slot < slots)


# ---- copying ------------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """One matrix of the experts and its copies, or the gradients of both, and the memory between
    ranks."""

    experts_LM: torch.Tensor
    """This rank's experts, or their gradients, a row each."""
    copies_NM: torch.Tensor
    """The copies in this rank's places, or their gradients."""
    experts_WN: torch.Tensor
    """int32, the expert in each place of every rank; -1: none."""
    rank: int
    """This rank."""
    parts: Sequence[torch.Tensor]
    """Every rank's shared memory, [N, M]."""
    addresses_W: torch.Tensor
    """int64 on the device, where every rank's shared memory begins."""
    backend: Backend
    """The implementation that copies."""


def send_experts(exchange: Exchange) -> None:
    """Write this rank's experts to the memory of the ranks that want them."""
    own_LM, experts_WN, rank = exchange.experts_LM, exchange.experts_WN, exchange.rank
    (ranks, spare), (local, numel) = experts_WN.shape, own_LM.shape
    if use_fast(exchange.backend, own_LM):
        _send_kernel[(ranks * spare, _PARTS)](
            own_LM, experts_WN, exchange.addresses_W, rank * local, local, numel, spare,
            _PARTS, _BLOCK, num_warps=_COPY_WARPS,
        )  # fmt: skip
        return
    for r, copies in enumerate(experts_WN.tolist()):
        for n, e in enumerate(copies):
            if e // local == rank:
                exchange.parts[r][n].copy_(own_LM[e % local])


def take_copies(exchange: Exchange) -> None:
    """Read this rank's copies from its memory, when all ranks have sent."""
    own_part_NM = exchange.parts[exchange.rank]
    copy_used(exchange.copies_NM, own_part_NM, exchange.experts_WN, exchange.rank, exchange.backend)


def show_gradients(exchange: Exchange) -> None:
    """Write the gradients of this rank's copies to its memory."""
    own_part_NM = exchange.parts[exchange.rank]
    copy_used(own_part_NM, exchange.copies_NM, exchange.experts_WN, exchange.rank, exchange.backend)


def copy_used(
    target_NM: torch.Tensor,
    source_NM: torch.Tensor,
    experts_WN: torch.Tensor,
    rank: int,
    backend: Backend = "auto",
) -> None:
    """Copy the rows of those places of ``rank`` that have a copy; others are unspecified."""
    spare, numel = target_NM.shape
    if not use_fast(backend, target_NM):
        target_NM.copy_(source_NM)
        return
    _copy_kernel[(spare, _PARTS)](
        target_NM, source_NM, experts_WN[rank], numel, _PARTS, _BLOCK, num_warps=_COPY_WARPS
    )


@triton.jit
def _copy_kernel(target, source, experts, numel, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    if tl.load(experts + n) >= 0:
        row = n.to(tl.int64) * numel
        for start in range(tl.program_id(1) * BLOCK, numel, PARTS * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(target + row + at, tl.load(source + row + at, at < numel), at < numel)


@triton.jit(do_not_specialize=("first",))
def _send_kernel(
    weights, experts, addresses, first, local, numel, spare,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    target = tl.program_id(0)
    e = tl.load(experts + target) - first
    if (e >= 0) & (e < local):
        base = tl.load(addresses + target // spare).to(tl.pointer_type(weights.dtype.element_ty))
        source = weights + e.to(tl.int64) * numel
        base += (target % spare).to(tl.int64) * numel
        for start in range(tl.program_id(1) * BLOCK, numel, PARTS * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(base + at, tl.load(source + at, at < numel), at < numel)


def add_gradients(exchange: Exchange) -> None:
    """Add to this rank's gradients what the memory of all ranks holds for its experts."""
    gradients_LM, experts_WN, rank = exchange.experts_LM, exchange.experts_WN, exchange.rank
    (ranks, spare), (local, numel) = experts_WN.shape, gradients_LM.shape
    if use_fast(exchange.backend, gradients_LM):
        _add_kernel[(local, _PARTS)](
            gradients_LM, experts_WN, exchange.addresses_W, rank * local, numel, spare,
            ranks * spare, _PARTS, _BLOCK, num_warps=_COPY_WARPS,
        )  # fmt: skip
        return
    wide = torch.promote_types(gradients_LM.dtype, torch.float32)
    sums: dict[int, torch.Tensor] = {}
    for r, copies in enumerate(experts_WN.tolist()):
        for n, e in enumerate(copies):
            if e // local == rank:
                total = sums.get(e % local)
                total = gradients_LM[e % local].to(wide) if total is None else total
                sums[e % local] = total + exchange.parts[r][n].to(wide)
    for e, total in sums.items():
        gradients_LM[e] = total.to(gradients_LM.dtype)


@triton.jit(do_not_specialize=("first",))
def _add_kernel(
    gradients, experts, addresses, first, numel, spare,
    PLACES: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = first + tl.program_id(0)
    found = 0
    for i in range(PLACES):
        found += (tl.load(experts + i) == e).to(tl.int32)
    if found > 0:
        own = gradients + tl.program_id(0).to(tl.int64) * numel
        for start in range(tl.program_id(1) * BLOCK, numel, PARTS * BLOCK):
            at = start + tl.arange(0, BLOCK)
            total = tl.load(own + at, at < numel, other=0.0).to(tl.float32)
            for i in range(PLACES):
                if tl.load(experts + i) == e:
                    base = tl.load(addresses + i // spare)
                    theirs = base.to(tl.pointer_type(gradients.dtype.element_ty))
                    theirs += (i % spare).to(tl.int64) * numel
                    total += tl.load(theirs + at, at < numel, other=0.0).to(tl.float32)
            tl.store(own + at, total, at < numel)
