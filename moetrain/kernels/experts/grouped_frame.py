"""The frame of all grouped products for Hopper GPUs: which tiles a program takes, and how it loads,
sums and stores them.

Rows of ``a`` are sorted by group, and group g has the rows ``offsets[g-1]:offsets[g]``. An output
tile has 128 rows and 256 columns, and a tile of a product lies in one group. Worked example: groups
of 130 and 10 rows and N = 512 make (2 + 1) x 2 tiles. Tiles 0 to 3 are the first group's, 4 and 5
the second's. Tiles 2 to 5 have rows in their upper half only.

There is one program for each multiprocessor. As soon as a program is free, it takes the next tile,
in ascending order. So groups of different sizes are balanced, and no tile waits for a program whose
multiprocessor is still busy with another kernel. A program has four parts that meet at barriers
(warp specialisation, arXiv 2407.08608):

- one warp takes the number of the next tile, for all four (:func:`schedule`),
- one warp loads pieces of both operands, 128 bytes in K, into a ring of four stages
  (:func:`load_pieces`),
- two warpgroups multiply, each one half of the tile's rows, 64 x 256. They do not wait for each
  other, so that one stores its half while the other multiplies. A half without rows does nothing.

:mod:`moetrain.kernels.experts.grouped` multiplies bf16, and
:mod:`moetrain.kernels.quant.grouped_e4m3` e4m3, in pieces of as many bytes.

Where sums run over a group's rows (mode :data:`OUTER`), rows past the group's end are read as
zeros, and nothing is stored past it. A descriptor with bounds that move with the group does that
(as in ``triton.tools.ragged_tma``). It has two added dimensions. Together they shift the start to
the group's end minus 2^30 rows (the address wraps around at 2^64 bytes), so that row 2^30 is the
first out of bounds.

Triton's interpreter does not run Gluon, so a CPU never takes this file.

Legend: R rows, E groups, K inner and M, N outer widths.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
# ruff: noqa: RUF005 - Triton's language has no starred expressions

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from moetrain.runtime.backend import HopperDescriptor, gl, gluon, hopper, triton

FORWARD, TRANSPOSED, OUTER = 0, 1, 2
"""The modes of the loads: ``b`` is [E, N, K], ``b`` is [E, K, N], or the product is ``a^T @ b`` by
group."""
HALF = gl.constexpr(64)
"""Rows of a warpgroup's half tile."""
COLUMNS = gl.constexpr(256)
"""Columns of a tile."""
DEPTH = gl.constexpr(64)
"""Columns of a piece of K: 128 bytes, the widest swizzle."""
STAGES = gl.constexpr(4)
"""Stages of the ring that loads fill."""
PART = gl.constexpr(128)
"""Columns that are stored at a time: four stages leave no room in shared memory for more."""
END = gl.constexpr(0x40000000)
"""The first row out of a moving descriptor's bounds, and the shift of its first dimension."""
fetch = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
store = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
# Triton 3.7 and newer have the first names.
reinterpret = (
    getattr(gl.shared_memory_descriptor, "_reinterpret", None)
    or gl.shared_memory_descriptor.reinterpret
)
"""Triton 3.7 and newer have the second name."""
FEWEST_ROWS = 16384
"""The fewest rows for these kernels: with fewer the host, at 0.1 ms a launch, would not keep up."""


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def descriptor(x: torch.Tensor, rows: Any, columns: Any, *, moves: bool = False) -> Any:
    """Return a descriptor of blocks of ``x``; None: ``x`` has no rows.

    If it ``moves``, the second coordinate of a block is the row that bounds it, a group's end.
    """
    shape, stride = list(x.shape), x.stride(0)
    if shape[0] == 0:
        return None
    block, strides = [rows.value, columns.value], [stride, 1]
    if moves:
        shape = [0x7FFF0000, 0x7FFF0000, END.value, shape[1]]
        block, strides = [1, 1, *block], [2**34 - stride, stride, *strides]
    base = triton.runtime.jit.MockTensor(x.dtype) if isinstance(x, FakeTensor) else x
    return HopperDescriptor(base, shape, strides, block, _layout(tuple(block)))


@functools.cache
def _layout(block: tuple[int, ...]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)


@gluon.jit
def tiles_of(rows, M: gl.constexpr, N: gl.constexpr, MODE: gl.constexpr):
    """Return the number of a group's tiles."""
    ACROSS: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    down = (rows + 2 * HALF - 1) // (2 * HALF)
    if MODE == 2:
        down = M // (2 * HALF)
    return down * ACROSS


@gluon.jit
def place_of(tile, N: gl.constexpr):
    """Return the first row and column of a group's tile; tiles are numbered row by row."""
    ACROSS: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    return tile // ACROSS * (2 * HALF), tile % ACROSS * COLUMNS


@gluon.jit
def steps_of(rows, K: gl.constexpr, MODE: gl.constexpr):
    """Return the number of pieces of the dimension that a tile sums over."""
    steps = K // DEPTH
    if MODE == 2:
        steps = (rows + DEPTH - 1) // DEPTH
    return gl.to_tensor(steps)


@gluon.jit
def next_stage(stage, phase):
    """Return the ring's next stage, and the parity of its lap."""
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    return gl.where(stage == STAGES, 0, stage), phase


@gluon.jit
def next_tile(turn, numbers, WARPS: gl.constexpr):
    """Return the tile of ``turn``, as :func:`schedule` publishes it."""
    ids, id_ready, id_empty = numbers
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    hopper.mbarrier.wait(id_ready, turn & 1)
    tile = gl.max(ids.load(ONE), 0)
    hopper.mbarrier.arrive(id_empty, count=1)
    return tile


@gluon.jit
def publish(turn, counter, numbers):
    """Once all parts have read the last tile's number, take the next, publish it and return it."""
    ids, id_ready, id_empty = numbers
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    hopper.mbarrier.wait(id_empty, (turn & 1) ^ 1)
    tile = gl.atomic_add(counter, 1)
    ids.store(gl.full([1], tile, gl.int32, ONE))
    hopper.mbarrier.arrive(id_ready, count=1)
    return tile


@gluon.jit
def schedule(
    bounds,
    counter,
    numbers,
    M: gl.constexpr,
    N: gl.constexpr,
    MODE: gl.constexpr,
):
    """Publish the numbers of tiles, up to the first past the last tile, which ends the others."""
    offsets, groups = bounds
    tile = publish(groups * 0, counter, numbers)
    total = groups * 0
    start = groups * 0
    for g in range(groups):
        end = gl.load(offsets + g)
        total += tiles_of(end - start, M, N, MODE)
        start = end
    turn = groups * 0 + 1
    while tile < total:
        tile = publish(turn, counter, numbers)
        turn += 1


@gluon.jit
def load_pieces(
    bounds, ins, ring, numbers,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, MODE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Fill the ring: a stage has one or two halves of a's rows, and b's columns."""
    offsets, groups = bounds
    a_desc, b_desc = ins
    a_ring, b_ring, ready, empty = ring
    HALF_BYTES: gl.constexpr = 2 * HALF * DEPTH
    B_BYTES: gl.constexpr = 2 * COLUMNS * DEPTH
    tile = next_tile(groups * 0, numbers, 1)
    turn = groups * 0 + 1
    first = groups * 0
    start = groups * 0
    stage = groups * 0
    phase = groups * 0 + 1  # the stages are empty
    for g in range(groups):
        end = gl.load(offsets + g)
        rows = end - start
        tiles = tiles_of(rows, M, N, MODE)
        steps = steps_of(rows, K, MODE)
        while tile < first + tiles:
            m, n = place_of(tile - first, N)
            both = m >= 0
            if MODE != 2:
                both = m + HALF < rows
            for step in range(steps):
                k = step * DEPTH
                full = ready.index(stage)
                upper = a_ring.index(2 * stage)
                lower = a_ring.index(2 * stage + 1)
                b = b_ring.index(stage)
                hopper.mbarrier.wait(empty.index(stage), phase)
                hopper.mbarrier.expect(full, 2 * HALF_BYTES + B_BYTES, pred=both)
                hopper.mbarrier.expect(full, HALF_BYTES + B_BYTES, pred=both == 0)
                if MODE == 2:
                    row = END - rows + k
                    fetch(a_desc, [END, end, row, m], full, upper)
                    fetch(a_desc, [END, end, row, m + HALF], full, lower)
                    fetch(b_desc, [END, end, row, n], full, b)
                else:
                    fetch(a_desc, [start + m, k], full, upper)
                    fetch(a_desc, [start + m + HALF, k], full, lower, pred=both)
                    if MODE == 1:
                        fetch(b_desc, [g * K + k, n], full, b)
                    elif GATED:  # a tile has as many columns of gate as of up
                        gate = g * N + n // 2
                        fetch(b_desc, [gate, k], full, b.slice(0, PART))
                        fetch(b_desc, [gate + N // 2, k], full, b.slice(PART, PART))
                    else:
                        fetch(b_desc, [g * N + n, k], full, b)
                stage, phase = next_stage(stage, phase)
            tile = next_tile(turn, numbers, 1)
            turn += 1
        first += tiles
        start = end


@gluon.jit
def halves(x):
    """Return the left and the right half of the columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@gluon.jit
def shared_memory(a_desc, out_desc, B_SHAPE: gl.constexpr, B_LAYOUT: gl.constexpr):
    """Allocate the ring, the tiles' numbers and the parts that are stored, with their barriers.

    Returns:
        ring: halves of a's pieces [2 * STAGES], b's pieces [STAGES], and barriers of full and of
            empty stages.
        numbers: the tile's number, a barrier for its being published, and one for its having been
            read by all parts.
        out_parts: what each warpgroup stores at a time.
    """
    bf16: gl.constexpr = a_desc.dtype
    a_shape: gl.constexpr = a_desc.block_type.shape
    a_ring = gl.allocate_shared_memory(bf16, [2 * STAGES] + a_shape, a_desc.layout)
    b_ring = gl.allocate_shared_memory(bf16, [STAGES] + B_SHAPE, B_LAYOUT)
    out_parts = gl.allocate_shared_memory(bf16, [2] + out_desc.block_type.shape, out_desc.layout)
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    id_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    id_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ids = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=2)
    hopper.mbarrier.init(id_ready, count=1)
    hopper.mbarrier.init(id_empty, count=3)
    ring = (a_ring, b_ring, ready, empty)
    numbers = (ids, id_ready, id_empty)
    return ring, numbers, out_parts


@gluon.jit
def skip(ring, steps, stage, phase):
    """Release a tile's pieces unread: the warpgroup has no rows in it. Return stage and phase."""
    _, _, ready, empty = ring
    for _ in range(steps):
        hopper.mbarrier.wait(ready.index(stage), phase)
        hopper.mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase)
    return stage, phase


@gluon.jit
def accumulate(
    ring, steps, stage, phase, sums,
    MODE: gl.constexpr, E4M3: gl.constexpr, LOWER: gl.constexpr,
):  # fmt: skip
    """Add the products of a tile's upper or (``LOWER``) lower half to ``sums``, in K's order.

    With ``E4M3`` the pieces are e4m3, in memory that is declared as bf16. Returns sums, stage and
    phase.
    """
    a_ring, b_ring, ready, empty = ring
    for step in range(steps):
        hopper.mbarrier.wait(ready.index(stage), phase)
        a = a_ring.index(2 * stage + LOWER)
        b = b_ring.index(stage)
        if E4M3:
            a = as_e4m3(a, HALF)
            b = as_e4m3(b, COLUMNS)
        if MODE == 0:
            b = b.permute((1, 0))
        elif MODE == 2:
            a = a.reshape([DEPTH, HALF]).permute((1, 0))
            b = b.reshape([DEPTH, COLUMNS])
        sums = hopper.warpgroup_mma(a, b, sums, is_async=True)
        # The products of the step before are done, so its stage is free.
        sums = hopper.warpgroup_mma_wait(1, deps=(sums,))
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        hopper.mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
        stage, phase = next_stage(stage, phase)
    sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
    before = gl.where(stage == 0, STAGES - 1, stage - 1)
    hopper.mbarrier.arrive(empty.index(before), count=1, pred=steps > 0)
    return sums, stage, phase


@gluon.jit
def as_e4m3(piece, ROWS: gl.constexpr):
    """Return ``ROWS`` rows of a piece of the ring as 128 elements of e4m3 each."""
    SHAPE: gl.constexpr = [ROWS, 2 * DEPTH]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, gl.float8e4nv)
    return reinterpret(piece, gl.float8e4nv, SHAPE, LAYOUT)


@gluon.jit
def emit(value, part, desc, coordinates, whole):
    """Store a warpgroup's value through ``part``, its piece of shared memory, once its last store
    has read that. ``whole`` is the same piece in the descriptor's shape."""
    hopper.tma.store_wait(pendings=0)
    part.store(value)
    hopper.fence_async_shared()
    store(desc, coordinates, whole)
