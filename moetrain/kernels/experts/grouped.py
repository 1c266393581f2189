"""Grouped products on a Hopper GPU, with torch's bits: forward, both gradients, and with SwiGLU.

Rows of ``a`` are sorted by group, and group g has the rows ``offsets[g-1]:offsets[g]``::

    product   out[r] = a[r] @ b[group of r]                    [R, K] x [E, K, N] -> [R, N]
    outer     out[e] = a[rows of e]^T @ g[rows of e]           [R, M] x [R, N] -> [E, M, N]
    gated     a[r] = x[r] @ w[group of r]^T,  h[r] = silu(a_gate[r]) * a_up[r] * weight[r]

An output tile has 128 rows and 256 columns, and a tile of a product lies in one group. Worked
example: groups of 130 and 10 rows and N = 512 make (2 + 1) x 2 tiles. Tiles 0 to 3 are the first
group's, 4 and 5 the second's. Tiles 2 to 5 have rows in their upper half only.

There are as many programs as multiprocessors. They take tiles in ascending order, each the next one
as soon as it can: groups differ in size, and nothing waits for a program whose multiprocessor is
still busy with another kernel. A program has four parts that meet at barriers (warp specialisation,
arXiv 2407.08608):

- one warp takes the number of the next tile, for all,
- one warp loads pieces of both operands, 64 in K, into a ring of four stages,
- two warpgroups multiply, each one half of the tile's rows, 64 x 256. They do not wait for each
  other, so that one stores its half while the other multiplies. A half without rows does nothing.

Sums run over K in ascending order, as those of torch's product and cuBLAS do: their bits are equal,
and a row's bits do not depend on the other rows. Rows past ``offsets[-1]`` are neither read into a
sum nor written: past a group's end ``outer`` reads zeros, and nothing is stored. A descriptor does
that, whose bounds move with the group (as in ``triton.tools.ragged_tma``). It has two added
dimensions. One of them shifts the start to the group's end minus 2^30 rows, by an address that
wraps around at 2^64 bytes, so that 2^30 is the first row out of bounds.

Triton's interpreter does not run Gluon, so a CPU never takes this file. Left out: other dtypes, and
gathering rows while loading (slower where it was tried, docs/log/experts.md; TMA gathers on newer
GPUs alone).

Legend: R rows, E groups (experts), K inner and M, N outer widths, D model width, F expert width.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
# ruff: noqa: RUF005 - Triton's language has no starred expressions

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from moetrain.runtime.backend import (
    HopperDescriptor,
    gl,
    gluon,
    hopper,
    triton,
)

_FORWARD, _TRANSPOSED, _OUTER = 0, 1, 2
"""The kernel's modes: ``b`` is [E, N, K], ``b`` is [E, K, N], or the product is ``outer``."""
_HALF = gl.constexpr(64)
"""Rows of a warpgroup's half tile."""
_COLUMNS = gl.constexpr(256)
"""Columns of a tile."""
_DEPTH = gl.constexpr(64)
"""Columns of a piece of K: 128 bytes, the widest swizzle."""
_STAGES = gl.constexpr(4)
"""Stages of the ring that loads fill."""
_PART = gl.constexpr(128)
"""Columns that are stored at a time: four stages leave no room in shared memory for more."""
_END = gl.constexpr(0x40000000)
"""The first row out of a moving descriptor's bounds, and the shift of its first dimension."""
_fetch = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
_store = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
# Triton 3.7 and newer have the first names.
# Limits of the sizes for which this kernel is taken, measured on one H100 with 16 to 128 experts.
# Of two rates in TFLOP/s torch's comes first. docs/log/experts.md has more.
_FEWEST_ROWS = 16384
"""The fewest rows: with fewer the host, which takes 0.1 ms a launch, would not keep up."""
_NARROWEST = 512
"""The smallest inner and outer width."""
_LARGEST = 3 << 21
"""The most elements of a group's matrix, 12 MB: several such matrices stay in the L2 cache while
the tiles of a group are multiplied. 2048 -> 2816 has 615 and 627, 2048 -> 7168 601 and 487."""
_LONGEST = 6144
"""The most rows of a group, on average, for gradients of matrices larger than
:data:`_LARGEST_LONG`. 1536 x 2048 has 509 and 569 over 1,024 rows, 582 and 547 over 8,192.
768 x 2048 has 491 and 539 over 8,192."""
_LARGEST_LONG = 1 << 21
"""Elements of a group's matrix up to which gradients are summed over any number of rows."""


def takes(a_RK: torch.Tensor, b_EKN: torch.Tensor) -> bool:
    """Return True if :func:`product` should multiply these: bf16, many rows, on a Hopper GPU.

    It is False where something is differentiated or compiled. Within ops nothing is.
    """
    is_packed = b_EKN.is_contiguous() or b_EKN.transpose(1, 2).is_contiguous()
    depth, width = b_EKN.shape[1:]
    return is_packed and depth % _DEPTH.value == 0 and _fits(a_RK, b_EKN, depth, width)


def takes_outer(
    a_RM: torch.Tensor,
    g_RN: torch.Tensor,
    groups: int,
) -> bool:
    """Return True if :func:`outer` should multiply these rows of ``groups`` groups."""
    height, width = a_RM.shape[1], g_RN.shape[1]
    is_packed = g_RN.is_contiguous() and height % (2 * _HALF.value) == 0
    is_short = a_RM.shape[0] <= _LONGEST * groups or height * width <= _LARGEST_LONG
    return is_packed and is_short and _fits(a_RM, g_RN, height, width)


def takes_gated(x_RD: torch.Tensor, w_E2FD: torch.Tensor) -> bool:
    """Return True if :func:`gated` should multiply these."""
    return takes(x_RD, w_E2FD.transpose(1, 2))


def _fits(
    a: torch.Tensor,
    b: torch.Tensor,
    height: int,
    width: int,
) -> bool:
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    # If the last tile is not full torch is faster: 2048 -> 1408 has 575 and 534.
    is_measured = width % _COLUMNS.value == 0 and height * width <= _LARGEST
    is_large = min(height, width) >= _NARROWEST and a.shape[0] >= _FEWEST_ROWS
    is_bf16 = a.dtype == b.dtype == torch.bfloat16
    is_here = a.is_cuda and a.is_contiguous() and _is_hopper(a.device)
    return is_measured and is_large and is_bf16 and is_here


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def product(
    a_RK: torch.Tensor,
    b_EKN: torch.Tensor,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    """Return ``out[r] = a[r] @ b[group of r]`` [R, N] for arguments that :func:`takes` accepts."""
    width = b_EKN.shape[2]
    out_RN = a_RK.new_empty(a_RK.shape[0], width)
    if b_EKN.is_contiguous():
        b = _descriptor(b_EKN.flatten(0, 1), _DEPTH, _COLUMNS)
        mode = _TRANSPOSED
    else:
        b = _descriptor(b_EKN.transpose(1, 2).flatten(0, 1), _COLUMNS, _DEPTH)
        mode = _FORWARD
    a = _descriptor(a_RK, _HALF, _DEPTH)
    out = _descriptor(out_RN, _HALF, _PART, moves=True)
    _launch(mode, (a, b, out, out), offsets_E, offsets_E, 0, width, a_RK.shape[1])
    return out_RN


def outer(
    a_RM: torch.Tensor,
    g_RN: torch.Tensor,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    """Return ``out[e] = a[rows of e]^T @ g[rows of e]`` [E, M, N].

    :func:`takes_outer` accepts the arguments.
    """
    height, width = a_RM.shape[1], g_RN.shape[1]
    shape = offsets_E.shape[0], height, width
    if a_RM.shape[0] == 0:
        return a_RM.new_zeros(shape)
    out_EMN = a_RM.new_empty(shape)
    a = _descriptor(a_RM, _DEPTH, _HALF, moves=True)
    g = _descriptor(g_RN, _DEPTH, _COLUMNS, moves=True)
    out = _descriptor(out_EMN.flatten(0, 1), _HALF, _PART)
    _launch(_OUTER, (a, g, out, out), offsets_E, offsets_E, height, width, 0)
    return out_EMN


def gated(
    x_RD: torch.Tensor,
    w_E2FD: torch.Tensor,
    offsets_E: torch.Tensor,
    weights_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``a_R2F = x @ w^T`` in bf16, and of it ``h_RF = silu(gate) * up * weight``.

    :func:`takes_gated` accepts the first two arguments.

    Args:
        w_E2FD: gate's F rows, then up's.
        weights_R: any floating dtype.
    """
    double = w_E2FD.shape[1]
    a_R2F = x_RD.new_empty(x_RD.shape[0], double)
    h_RF = x_RD.new_empty(x_RD.shape[0], double // 2)
    x = _descriptor(x_RD, _HALF, _DEPTH)
    w = _descriptor(w_E2FD.flatten(0, 1), _PART, _DEPTH)
    outs = (_descriptor(out, _HALF, _PART, moves=True) for out in (a_R2F, h_RF))
    _launch(_FORWARD, (x, w, *outs), offsets_E, weights_R, 0, double, x_RD.shape[1], is_gated=True)
    return a_R2F, h_RF


def _launch(
    mode: int,
    descriptors: tuple[Any, ...],
    offsets_E: torch.Tensor,
    weights_R: torch.Tensor,
    height: int,
    width: int,
    depth: int,
    *,
    is_gated: bool = False,
) -> None:
    if None in descriptors:  # no rows
        return
    counter = offsets_E.new_zeros(1)
    programs = torch.cuda.get_device_properties(offsets_E.device).multi_processor_count
    a, b, out, h = descriptors
    _grouped_kernel[(programs,)](
        a, b, out, h, offsets_E, weights_R, counter, offsets_E.shape[0],
        M=height, N=width, K=depth, MODE=mode, GATED=is_gated, num_warps=4,
    )  # fmt: skip


def _descriptor(x: torch.Tensor, rows: Any, columns: Any, *, moves: bool = False) -> Any:
    """Return a descriptor of blocks of ``x``; None: ``x`` has no rows.

    If it ``moves``, the second coordinate of a block is the row that bounds it, a group's end.
    """
    shape, stride = list(x.shape), x.stride(0)
    if shape[0] == 0:
        return None
    block, strides = [rows.value, columns.value], [stride, 1]
    if moves:
        shape = [0x7FFF0000, 0x7FFF0000, _END.value, shape[1]]
        block, strides = [1, 1, *block], [2**34 - stride, stride, *strides]
    base = triton.runtime.jit.MockTensor(x.dtype) if isinstance(x, FakeTensor) else x
    return HopperDescriptor(base, shape, strides, block, _layout(tuple(block)))


@functools.cache
def _layout(block: tuple[int, ...]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)


@gluon.jit
def _tiles(rows, M: gl.constexpr, N: gl.constexpr, MODE: gl.constexpr):
    """Return the number of a group's tiles."""
    ACROSS: gl.constexpr = (N + _COLUMNS - 1) // _COLUMNS
    down = (rows + 2 * _HALF - 1) // (2 * _HALF)
    if MODE == 2:
        down = M // (2 * _HALF)
    return down * ACROSS


@gluon.jit
def _place(tile, N: gl.constexpr):
    """Return the first row and column of a group's tile; tiles are numbered row by row."""
    ACROSS: gl.constexpr = (N + _COLUMNS - 1) // _COLUMNS
    return tile // ACROSS * (2 * _HALF), tile % ACROSS * _COLUMNS


@gluon.jit
def _steps(rows, K: gl.constexpr, MODE: gl.constexpr):
    """Return the number of pieces of the dimension that a tile sums over."""
    steps = K // _DEPTH
    if MODE == 2:
        steps = (rows + _DEPTH - 1) // _DEPTH
    return gl.to_tensor(steps)


@gluon.jit
def _next_stage(stage, phase):
    """Return the ring's next stage, and the parity of its lap."""
    stage += 1
    phase = gl.where(stage == _STAGES, phase ^ 1, phase)
    return gl.where(stage == _STAGES, 0, stage), phase


@gluon.jit
def _next_tile(turn, numbers, WARPS: gl.constexpr):
    """Return the tile of ``turn``, as :func:`_schedule` publishes it."""
    ids, id_ready, id_empty = numbers
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    hopper.mbarrier.wait(id_ready, turn & 1)
    tile = gl.max(ids.load(ONE), 0)
    hopper.mbarrier.arrive(id_empty, count=1)
    return tile


@gluon.jit
def _publish(turn, counter, numbers):
    """Take a tile's number, publish it when all have read the one before, and return it."""
    ids, id_ready, id_empty = numbers
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    hopper.mbarrier.wait(id_empty, (turn & 1) ^ 1)
    tile = gl.atomic_add(counter, 1)
    ids.store(gl.full([1], tile, gl.int32, ONE))
    hopper.mbarrier.arrive(id_ready, count=1)
    return tile


@gluon.jit
def _schedule(
    bounds,
    counter,
    numbers,
    M: gl.constexpr,
    N: gl.constexpr,
    MODE: gl.constexpr,
):
    """Publish tiles up to the first number past the last tile."""
    offsets, groups = bounds
    tile = _publish(groups * 0, counter, numbers)
    total = groups * 0
    start = groups * 0
    for g in range(groups):
        end = gl.load(offsets + g)
        total += _tiles(end - start, M, N, MODE)
        start = end
    turn = groups * 0 + 1
    while tile < total:
        tile = _publish(turn, counter, numbers)
        turn += 1


@gluon.jit
def _load(
    bounds, ins, ring, numbers,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, MODE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Fill the ring: a stage has one or two halves of a's rows, and b's columns."""
    offsets, groups = bounds
    a_desc, b_desc = ins
    a_ring, b_ring, ready, empty = ring
    HALF_BYTES: gl.constexpr = 2 * _HALF * _DEPTH
    B_BYTES: gl.constexpr = 2 * _COLUMNS * _DEPTH
    tile = _next_tile(groups * 0, numbers, 1)
    turn = groups * 0 + 1
    first = groups * 0
    start = groups * 0
    stage = groups * 0
    phase = groups * 0 + 1  # the stages are empty
    for g in range(groups):
        end = gl.load(offsets + g)
        rows = end - start
        tiles = _tiles(rows, M, N, MODE)
        steps = _steps(rows, K, MODE)
        while tile < first + tiles:
            m, n = _place(tile - first, N)
            both = m >= 0
            if MODE != 2:
                both = m + _HALF < rows
            for step in range(steps):
                k = step * _DEPTH
                full = ready.index(stage)
                upper = a_ring.index(2 * stage)
                lower = a_ring.index(2 * stage + 1)
                b = b_ring.index(stage)
                hopper.mbarrier.wait(empty.index(stage), phase)
                hopper.mbarrier.expect(full, 2 * HALF_BYTES + B_BYTES, pred=both)
                hopper.mbarrier.expect(full, HALF_BYTES + B_BYTES, pred=both == 0)
                if MODE == 2:
                    row = _END - rows + k
                    _fetch(a_desc, [_END, end, row, m], full, upper)
                    _fetch(a_desc, [_END, end, row, m + _HALF], full, lower)
                    _fetch(b_desc, [_END, end, row, n], full, b)
                else:
                    _fetch(a_desc, [start + m, k], full, upper)
                    _fetch(a_desc, [start + m + _HALF, k], full, lower, pred=both)
                    if MODE == 1:
                        _fetch(b_desc, [g * K + k, n], full, b)
                    elif GATED:  # a tile has as many columns of gate as of up
                        gate = g * N + n // 2
                        _fetch(b_desc, [gate, k], full, b.slice(0, _PART))
                        _fetch(b_desc, [gate + N // 2, k], full, b.slice(_PART, _PART))
                    else:
                        _fetch(b_desc, [g * N + n, k], full, b)
                stage, phase = _next_stage(stage, phase)
            tile = _next_tile(turn, numbers, 1)
            turn += 1
        first += tiles
        start = end


@gluon.jit
def _halves(x):
    """Return the left and the right half of the columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@gluon.jit
def _multiply(
    bounds, outs, ring, numbers, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    MODE: gl.constexpr, GATED: gl.constexpr, LOWER: gl.constexpr,
):  # fmt: skip
    """Multiply and store the upper or, if ``LOWER``, the lower halves of tiles."""
    offsets, groups = bounds
    out_desc, h_desc, weights, out_parts = outs
    a_ring, b_ring, ready, empty = ring
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 16])
    tile = _next_tile(groups * 0, numbers, 4)
    turn = groups * 0 + 1
    first = groups * 0
    start = groups * 0
    stage = groups * 0
    phase = groups * 0
    part = out_parts.index(LOWER)
    if MODE != 2:
        part = part.reshape([_HALF, _PART])
    for g in range(groups):
        end = gl.load(offsets + g)
        rows = end - start
        tiles = _tiles(rows, M, N, MODE)
        steps = _steps(rows, K, MODE)
        while tile < first + tiles:
            m, n = _place(tile - first, N)
            m += LOWER * _HALF
            if MODE != 2 and m >= rows:
                for _ in range(steps):
                    hopper.mbarrier.wait(ready.index(stage), phase)
                    hopper.mbarrier.arrive(empty.index(stage), count=1)
                    stage, phase = _next_stage(stage, phase)
            else:
                sums = gl.zeros([_HALF, _COLUMNS], gl.float32, LAYOUT)
                for step in range(steps):
                    hopper.mbarrier.wait(ready.index(stage), phase)
                    a = a_ring.index(2 * stage + LOWER)
                    b = b_ring.index(stage)
                    if MODE == 0:
                        b = b.permute((1, 0))
                    elif MODE == 2:
                        a = a.reshape([_DEPTH, _HALF]).permute((1, 0))
                        b = b.reshape([_DEPTH, _COLUMNS])
                    sums = hopper.warpgroup_mma(a, b, sums, is_async=True)
                    # The products of the step before are done, so its stage is free.
                    sums = hopper.warpgroup_mma_wait(1, deps=(sums,))
                    before = gl.where(stage == 0, _STAGES - 1, stage - 1)
                    hopper.mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
                    stage, phase = _next_stage(stage, phase)
                sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
                before = gl.where(stage == 0, _STAGES - 1, stage - 1)
                hopper.mbarrier.arrive(empty.index(before), count=1, pred=steps > 0)
                left, right = _halves(sums.to(out_desc.dtype))
                row = _END - rows + m
                for half in gl.static_range(2):
                    at = n + half * _PART
                    if GATED:
                        at = n // 2 + half * (N // 2)
                    value = left if half == 0 else right
                    hopper.tma.store_wait(pendings=0)
                    part.store(value)
                    hopper.fence_async_shared()
                    if MODE == 2:
                        _store(out_desc, [g * M + m, at], part)
                    else:
                        _store(out_desc, [_END, end, row, at], out_parts.index(LOWER))
                if GATED:
                    gate = left.to(gl.float32)
                    ROWS: gl.constexpr = gl.SliceLayout(1, gate.type.layout)
                    r = m + gl.arange(0, _HALF, ROWS)
                    w = gl.load(weights + start + r, r < rows, 0.0).to(gl.float32)
                    h = gate * (1.0 / (1.0 + gl.exp(-gate))) * right.to(gl.float32)
                    h = (h * gl.expand_dims(w, 1)).to(out_desc.dtype)
                    hopper.tma.store_wait(pendings=0)
                    part.store(h)
                    hopper.fence_async_shared()
                    _store(h_desc, [_END, end, row, n // 2], out_parts.index(LOWER))
            tile = _next_tile(turn, numbers, 4)
            turn += 1
        first += tiles
        start = end
    hopper.tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["groups"])
def _grouped_kernel(
    a_desc, b_desc, out_desc, h_desc, offsets, weights, counter, groups,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, MODE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    a_shape: gl.constexpr = a_desc.block_type.shape
    b_shape: gl.constexpr = [_COLUMNS, _DEPTH] if GATED else b_desc.block_type.shape
    bf16: gl.constexpr = a_desc.dtype
    a_ring = gl.allocate_shared_memory(bf16, [2 * _STAGES] + a_shape, a_desc.layout)
    b_ring = gl.allocate_shared_memory(bf16, [_STAGES] + b_shape, b_desc.layout)
    out_parts = gl.allocate_shared_memory(bf16, [2] + out_desc.block_type.shape, out_desc.layout)
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER)
    id_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    id_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ids = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for stage in gl.static_range(_STAGES):
        hopper.mbarrier.init(ready.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=2)
    hopper.mbarrier.init(id_ready, count=1)
    hopper.mbarrier.init(id_empty, count=3)
    bounds = (offsets, groups)
    ins = (a_desc, b_desc)
    outs = (out_desc, h_desc, weights, out_parts)
    ring = (a_ring, b_ring, ready, empty)
    numbers = (ids, id_ready, id_empty)
    gl.warp_specialize(
        [
            (_multiply, (bounds, outs, ring, numbers, M, N, K, MODE, GATED, 0)),
            (_multiply, (bounds, outs, ring, numbers, M, N, K, MODE, GATED, 1)),
            (_load, (bounds, ins, ring, numbers, M, N, K, MODE, GATED)),
            (_schedule, (bounds, counter, numbers, M, N, MODE)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
