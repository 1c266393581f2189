"""Grouped products of e4m3 on a Hopper GPU, in the frame of the grouped products in bf16.

Tiles, programs and their parts are those of :mod:`moetrain.kernels.experts.grouped_frame`. A piece
of a row in the ring has 128 bytes. They are moved as 64 elements of bf16, and multiplied as 128 of
e4m3.

    rows    out[r, n] = a_scale[r] * b_scale[g, n] * sum over k of a[r, k] b[g, n, k]
    blocks  out[r, n] = sum over pieces p of a_scale[p, r] * b_scale[g, n / 128, p] * s(p)
            s(p)      = sum over k in p of a[r, k] b[g, n, k]

If rows have one scale each, sums stay in tensor cores' registers (torch's ``use_fast_accum``). With
scales of tiles and blocks, each piece's sum is scaled and added up in fp32 (DeepSeek-V3, arXiv
2412.19437, section 3.3.2). That is done for 128 columns at a time, as registers hold no more. While
one warpgroup adds up, the other multiplies.

Triton's interpreter does not run Gluon: a CPU never takes this file.

Legend: R rows sorted by group, E groups (experts), K inner and N outer width.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

import torch

from moetrain.kernels.experts import grouped_frame as frame
from moetrain.runtime.backend import gl, gluon, hopper

_PIECE = gl.constexpr(128)
"""Elements of a row in a piece, and the columns that are added up at a time."""


def takes(a_RK: torch.Tensor, b_ENK: torch.Tensor) -> bool:
    """Return True if :func:`product` should multiply these: many rows, on a Hopper GPU."""
    _, width, depth = b_ENK.shape
    is_whole = width % frame.COLUMNS.value == 0 and depth % _PIECE.value == 0
    is_large = a_RK.shape[0] >= frame.FEWEST_ROWS
    is_packed = a_RK.is_contiguous() and b_ENK.is_contiguous()
    return is_whole and is_large and is_packed and a_RK.is_cuda and frame.is_hopper(a_RK.device)


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
        frame.descriptor(a, frame.HALF, frame.DEPTH),
        frame.descriptor(b.flatten(0, 1), frame.COLUMNS, frame.DEPTH),
        frame.descriptor(out_RN, frame.HALF, frame.PART, moves=True),
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
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, frame.COLUMNS, 32])
    PIECE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _PIECE, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, PIECE_LAYOUT if TILED else LAYOUT)
    tile = frame.next_tile(groups * 0, numbers, 4)
    turn = groups * 0 + 1
    first = groups * 0
    start = groups * 0
    stage = groups * 0
    phase = groups * 0
    whole = out_parts.index(LOWER)
    part = whole.reshape([frame.HALF, frame.PART])
    for g in range(groups):
        end = gl.load(offsets + g)
        rows = end - start
        tiles = frame.tiles_of(rows, 0, N, 0)
        steps = frame.steps_of(rows, K, 0)
        while tile < first + tiles:
            m, n = frame.place_of(tile - first, N)
            m += LOWER * frame.HALF
            if m >= rows:
                stage, phase = frame.skip(ring, steps, stage, phase)
            else:
                row = frame.END - rows + m
                r = gl.arange(0, frame.HALF, ROWS)
                is_row = r < rows - m
                a_at = a_scales + (start + m)
                if TILED:
                    b_at = b_scales + (g * (N // _PIECE) + n // _PIECE) * steps
                    left = gl.zeros([frame.HALF, _PIECE], gl.float32, PIECE_LAYOUT)
                    right = gl.zeros([frame.HALF, _PIECE], gl.float32, PIECE_LAYOUT)
                    for step in range(steps):
                        # Loaded before the wait, to hide the latency.
                        own = gl.load(a_at + r, is_row, 0.0)
                        a_at += num_rows
                        of_left = gl.load(b_at + step)
                        of_right = gl.load(b_at + steps + step)
                        hopper.mbarrier.wait(ready.index(stage), phase)
                        a = frame.as_e4m3(a_ring.index(2 * stage + LOWER), frame.HALF)
                        b = frame.as_e4m3(b_ring.index(stage), frame.COLUMNS)
                        for half in gl.static_range(2):
                            columns = b.slice(half * _PIECE, _PIECE).permute((1, 0))
                            none = gl.zeros([frame.HALF, _PIECE], gl.float32, PIECE_LAYOUT)
                            sums = hopper.warpgroup_mma(
                                a, columns, none, use_acc=False, is_async=True
                            )
                            sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
                            if half == 0:
                                left += sums * gl.expand_dims(own * of_left, 1)
                            else:
                                hopper.mbarrier.arrive(empty.index(stage), count=1)
                                right += sums * gl.expand_dims(own * of_right, 1)
                        stage, phase = frame.next_stage(stage, phase)
                    frame.emit(
                        left.to(out_desc.dtype), part, out_desc, [frame.END, end, row, n], whole
                    )
                    frame.emit(
                        right.to(out_desc.dtype),
                        part,
                        out_desc,
                        [frame.END, end, row, n + frame.PART],
                        whole,
                    )
                else:
                    sums = gl.zeros([frame.HALF, frame.COLUMNS], gl.float32, LAYOUT)
                    sums, stage, phase = frame.accumulate(
                        ring, steps, stage, phase, sums, 0, True, LOWER
                    )
                    own = gl.load(a_at + r, is_row, 0.0)
                    c = gl.arange(0, frame.COLUMNS, gl.SliceLayout(0, LAYOUT))
                    of_columns = gl.load(b_scales + g * N + n + c)
                    sums = sums * gl.expand_dims(of_columns, 0) * gl.expand_dims(own, 1)
                    left, right = frame.halves(sums.to(out_desc.dtype))
                    frame.emit(left, part, out_desc, [frame.END, end, row, n], whole)
                    frame.emit(right, part, out_desc, [frame.END, end, row, n + frame.PART], whole)
            tile = frame.next_tile(turn, numbers, 4)
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
    B_SHAPE: gl.constexpr = b_desc.block_type.shape
    B_LAYOUT: gl.constexpr = b_desc.layout
    ring, numbers, out_parts = frame.shared_memory(a_desc, out_desc, B_SHAPE, B_LAYOUT)
    bounds = (offsets, groups)
    ins = (a_desc, b_desc)
    outs = (out_desc, out_parts)
    scales = (a_scales, b_scales, num_rows)
    gl.warp_specialize(
        [
            (_multiply, (bounds, outs, ring, numbers, scales, N, K, TILED, 0)),
            (_multiply, (bounds, outs, ring, numbers, scales, N, K, TILED, 1)),
            (frame.load_pieces, (bounds, ins, ring, numbers, 0, N, K, 0, False)),
            (frame.schedule, (bounds, counter, numbers, 0, N, 0)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
