"""Grouped products of e4m3 on a Hopper GPU, in the frame of the grouped products in bf16.

Tiles, roles of a program's warps, ring and barriers are those of
:mod:`moetrain.kernels.experts.grouped`; only what the two multiplying warpgroups do is different. A
piece of the ring holds 128 bytes: 64 elements of bf16 where they are moved, 128 of e4m3 where they
are multiplied.

    rows    out[r, n] = a_scale[r] * b_scale[g, n] * sum over k of a[r, k] b[g, n, k]
    blocks  out[r, n] = sum over pieces p of a_scale[p, r] * b_scale[g, n / 128, p] * s(p)
            s(p)      = sum over k in p of a[r, k] b[g, n, k]

With a scale a row the sums stay in tensor cores' registers (torch's ``use_fast_accum``). With tiles
and blocks each piece's sum is scaled and added up in fp32 (DeepSeek-V3, arXiv 2412.19437, section
3.3.2): 128 columns at a time, as registers hold no more. While one warpgroup adds up, the other
multiplies.

Triton's interpreter does not run Gluon: a CPU never takes this file.

Legend: R rows sorted by group, E groups (experts), K inner and N outer width.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
# ruff: noqa: RUF005 - Triton's language has no starred expressions

import torch

from moetrain.kernels.experts import grouped
from moetrain.kernels.experts.grouped import (
    _COLUMNS,
    _DEPTH,
    _END,
    _HALF,
    _PART,
    _STAGES,
    _halves,
    _load,
    _next_stage,
    _next_tile,
    _place,
    _schedule,
    _steps,
    _store,
    _tiles,
)
from moetrain.runtime.backend import gl, gluon, hopper

_PIECE = gl.constexpr(128)
"""Elements of a row in a piece, and the columns that are added up at a time."""
_reinterpret = (
    getattr(gl.shared_memory_descriptor, "_reinterpret", None)
    or gl.shared_memory_descriptor.reinterpret
)
"""Triton 3.7 and newer have the second name."""


def takes(a_RK: torch.Tensor, b_ENK: torch.Tensor) -> bool:
    """Return True if :func:`product` should multiply these: many rows, on a Hopper GPU."""
    _, width, depth = b_ENK.shape
    is_whole = width % _COLUMNS.value == 0 and depth % _PIECE.value == 0
    is_large = a_RK.shape[0] >= grouped._FEWEST_ROWS
    is_packed = a_RK.is_contiguous() and b_ENK.is_contiguous()
    return is_whole and is_large and is_packed and a_RK.is_cuda and grouped._is_hopper(a_RK.device)


def product(
    a_RK: torch.Tensor,
    a_scales: torch.Tensor,
    b_ENK: torch.Tensor,
    b_scales: torch.Tensor,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    """Return ``out[r] = a[r] @ b[group of r]^T`` [R, N] in bf16.

    Args:
        a_RK, b_ENK: e4m3, operands that :func:`takes` approves.
        a_scales, b_scales: [R] and [E, N]; or [K / 128, R] and [E, N / 128, K / 128].
        offsets_E: int32, ends of the groups in rows.
    """
    (rows, depth), (experts, width, _) = a_RK.shape, b_ENK.shape
    out_RN = a_RK.new_empty(rows, width, dtype=torch.bfloat16)
    a, b = (x.view(torch.bfloat16) for x in (a_RK, b_ENK))
    programs = torch.cuda.get_device_properties(offsets_E.device).multi_processor_count
    _product_kernel[(programs,)](
        grouped._descriptor(a, _HALF, _DEPTH),
        grouped._descriptor(b.flatten(0, 1), _COLUMNS, _DEPTH),
        grouped._descriptor(out_RN, _HALF, _PART, moves=True),
        offsets_E,
        a_scales,
        b_scales,
        offsets_E.new_zeros(1),
        experts,
        rows,
        N=width,
        K=depth // 2,
        TILED=a_scales.dim() == 2,
        num_warps=4,
    )
    return out_RN


@gluon.jit
def _emit(value, at, row, end, out_desc, part, whole):
    """Store 128 columns of a half tile."""
    hopper.tma.store_wait(pendings=0)
    part.store(value)
    hopper.fence_async_shared()
    _store(out_desc, [_END, end, row, at], whole)


@gluon.jit
def _multiply(
    bounds,
    outs,
    ring,
    numbers,
    scales,
    N: gl.constexpr,
    K: gl.constexpr,
    TILED: gl.constexpr,
    LOWER: gl.constexpr,
):
    """Multiply and store the upper or the lower halves of tiles."""
    offsets, groups = bounds
    out_desc, out_parts = outs
    a_scales, b_scales, num_rows = scales
    a_ring, b_ring, ready, empty = ring
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 32])
    PIECE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _PIECE, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, PIECE_LAYOUT if TILED else LAYOUT)
    A_SHAPE: gl.constexpr = [_HALF, _PIECE]
    B_SHAPE: gl.constexpr = [_COLUMNS, _PIECE]
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(A_SHAPE, gl.float8e4nv)
    B_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(B_SHAPE, gl.float8e4nv)
    tile = _next_tile(groups * 0, numbers, 4)
    turn = groups * 0 + 1
    first = groups * 0
    start = groups * 0
    stage = groups * 0
    phase = groups * 0
    whole = out_parts.index(LOWER)
    part = whole.reshape([_HALF, _PART])
    for g in range(groups):
        end = gl.load(offsets + g)
        rows = end - start
        tiles = _tiles(rows, 0, N, 0)
        steps = _steps(rows, K, 0)
        while tile < first + tiles:
            m, n = _place(tile - first, N)
            m += LOWER * _HALF
            if m >= rows:
                for _ in range(steps):
                    hopper.mbarrier.wait(ready.index(stage), phase)
                    hopper.mbarrier.arrive(empty.index(stage), count=1)
                    stage, phase = _next_stage(stage, phase)
            else:
                row = _END - rows + m
                r = gl.arange(0, _HALF, ROWS)
                is_row = r < rows - m
                a_at = a_scales + (start + m)
                if TILED:
                    b_at = b_scales + (g * (N // _PIECE) + n // _PIECE) * steps
                    left = gl.zeros([_HALF, _PIECE], gl.float32, PIECE_LAYOUT)
                    right = gl.zeros([_HALF, _PIECE], gl.float32, PIECE_LAYOUT)
                    for step in range(steps):
                        # Loaded before the wait, to hide the latency.
                        own = gl.load(a_at + r, is_row, 0.0)
                        a_at += num_rows
                        of_left = gl.load(b_at + step)
                        of_right = gl.load(b_at + steps + step)
                        hopper.mbarrier.wait(ready.index(stage), phase)
                        a = _reinterpret(
                            a_ring.index(2 * stage + LOWER), gl.float8e4nv, A_SHAPE, A_LAYOUT
                        )
                        b = _reinterpret(b_ring.index(stage), gl.float8e4nv, B_SHAPE, B_LAYOUT)
                        for half in gl.static_range(2):
                            columns = b.slice(half * _PIECE, _PIECE).permute((1, 0))
                            none = gl.zeros([_HALF, _PIECE], gl.float32, PIECE_LAYOUT)
                            sums = hopper.warpgroup_mma(
                                a, columns, none, use_acc=False, is_async=True
                            )
                            sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
                            if half == 0:
                                left += sums * gl.expand_dims(own * of_left, 1)
                            else:
                                hopper.mbarrier.arrive(empty.index(stage), count=1)
                                right += sums * gl.expand_dims(own * of_right, 1)
                        stage, phase = _next_stage(stage, phase)
                    _emit(left.to(out_desc.dtype), n, row, end, out_desc, part, whole)
                    _emit(right.to(out_desc.dtype), n + _PART, row, end, out_desc, part, whole)
                else:
                    sums = gl.zeros([_HALF, _COLUMNS], gl.float32, LAYOUT)
                    for step in range(steps):
                        hopper.mbarrier.wait(ready.index(stage), phase)
                        a = _reinterpret(
                            a_ring.index(2 * stage + LOWER), gl.float8e4nv, A_SHAPE, A_LAYOUT
                        )
                        b = _reinterpret(b_ring.index(stage), gl.float8e4nv, B_SHAPE, B_LAYOUT)
                        sums = hopper.warpgroup_mma(a, b.permute((1, 0)), sums, is_async=True)
                        # Wait for all but this step's products.
                        sums = hopper.warpgroup_mma_wait(1, deps=(sums,))
                        before = gl.where(stage == 0, _STAGES - 1, stage - 1)
                        hopper.mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
                        stage, phase = _next_stage(stage, phase)
                    sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
                    before = gl.where(stage == 0, _STAGES - 1, stage - 1)
                    hopper.mbarrier.arrive(empty.index(before), count=1, pred=steps > 0)
                    own = gl.load(a_at + r, is_row, 0.0)
                    c = gl.arange(0, _COLUMNS, gl.SliceLayout(0, LAYOUT))
                    of_columns = gl.load(b_scales + g * N + n + c)
                    sums = sums * gl.expand_dims(of_columns, 0) * gl.expand_dims(own, 1)
                    left, right = _halves(sums.to(out_desc.dtype))
                    _emit(left, n, row, end, out_desc, part, whole)
                    _emit(right, n + _PART, row, end, out_desc, part, whole)
            tile = _next_tile(turn, numbers, 4)
            turn += 1
        first += tiles
        start = end
    hopper.tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["groups", "num_rows"])
def _product_kernel(
    a_desc,
    b_desc,
    out_desc,
    offsets,
    a_scales,
    b_scales,
    counter,
    groups,
    num_rows,
    N: gl.constexpr,
    K: gl.constexpr,
    TILED: gl.constexpr,
):
    bf16: gl.constexpr = a_desc.dtype
    a_shape: gl.constexpr = a_desc.block_type.shape
    b_shape: gl.constexpr = b_desc.block_type.shape
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
    outs = (out_desc, out_parts)
    ring = (a_ring, b_ring, ready, empty)
    numbers = (ids, id_ready, id_empty)
    scales = (a_scales, b_scales, num_rows)
    gl.warp_specialize(
        [
            (_multiply, (bounds, outs, ring, numbers, scales, N, K, TILED, 0)),
            (_multiply, (bounds, outs, ring, numbers, scales, N, K, TILED, 1)),
            (_load, (bounds, ins, ring, numbers, 0, N, K, 0, False)),
            (_schedule, (bounds, counter, numbers, 0, N, 0)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
