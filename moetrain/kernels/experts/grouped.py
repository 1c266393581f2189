"""Grouped products on a Hopper GPU, bitwise equal to torch's: forward, gradients, with SwiGLU.

Rows of ``a`` are sorted by group, and group g has the rows ``offsets[g-1]:offsets[g]``::

    product   out[r] = a[r] @ b[group of r]                    [R, K] x [E, K, N] -> [R, N]
    outer     out[e] = a[rows of e]^T @ g[rows of e]           [R, M] x [R, N] -> [E, M, N]
    gated     a[r] = x[r] @ w[group of r]^T,  h[r] = silu(a_gate[r]) * a_up[r] * weight[r]

Tiles, programs and their parts are those of :mod:`moetrain.kernels.experts.grouped_frame`. Sums run
over K in ascending order, as in torch's product and in cuBLAS. So the bits are equal to theirs, and
a row's bits do not depend on the other rows. Rows past ``offsets[-1]`` are neither read into a sum
nor written.

Left out on purpose: other dtypes than bf16, and gathering rows while loading. That was slower where
it was tried (docs/log/experts.md), and TMA gathers rows only on newer GPUs.

Legend: R rows, E groups (experts), K inner and M, N outer widths, D model width, F expert width.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false

from typing import Any

import torch

from moetrain.kernels.experts import grouped_frame as frame
from moetrain.runtime.backend import gl, gluon, hopper

# Limits of the sizes for which this kernel is taken, measured on one H100 with 16 to 128 experts.
# Where a comment gives two rates in TFLOP/s, torch has the first and this kernel the second.
# docs/log/experts.md has more.
_NARROWEST = 512
"""The smallest inner and outer width."""
_LARGEST = 3 << 21
"""The most elements of a group's matrix, 12 MB: several such matrices stay in the L2 cache while
the tiles of a group are multiplied. 2048 -> 2816 reaches 615 and 627, but 2048 -> 7168 reaches 601
and 487."""
_LONGEST = 6144
"""The most rows of a group, on average, for gradients of matrices larger than
:data:`_LARGEST_LONG`. 1536 x 2048 reaches 509 and 569 over 1,024 rows, but 582 and 547 over 8,192.
768 x 2048 reaches 491 and 539 over 8,192."""
_LARGEST_LONG = 1 << 21
"""Elements of a group's matrix up to which gradients are summed over any number of rows."""


def takes(a_RK: torch.Tensor, b_EKN: torch.Tensor) -> bool:
    """Return True if :func:`product` should multiply these: bf16, many rows, on a Hopper GPU.

    It is False while gradients are enabled or the compiler traces. Within ops neither is the case.
    """
    is_packed = b_EKN.is_contiguous() or b_EKN.transpose(1, 2).is_contiguous()
    depth, width = b_EKN.shape[1:]
    return is_packed and depth % frame.DEPTH.value == 0 and _fits(a_RK, b_EKN, depth, width)


def takes_outer(
    a_RM: torch.Tensor,
    g_RN: torch.Tensor,
    groups: int,
) -> bool:
    """Return True if :func:`outer` should multiply these rows of ``groups`` groups."""
    height, width = a_RM.shape[1], g_RN.shape[1]
    is_packed = g_RN.is_contiguous() and height % (2 * frame.HALF.value) == 0
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
    # If the last tile is not full, torch is faster: 2048 -> 1408 reaches 575 and 534.
    is_measured = width % frame.COLUMNS.value == 0 and height * width <= _LARGEST
    is_large = min(height, width) >= _NARROWEST and a.shape[0] >= frame.FEWEST_ROWS
    is_bf16 = a.dtype == b.dtype == torch.bfloat16
    is_here = a.is_cuda and a.is_contiguous() and frame.is_hopper(a.device)
    return is_measured and is_large and is_bf16 and is_here


def product(
    a_RK: torch.Tensor,
    b_EKN: torch.Tensor,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    """Return ``out[r] = a[r] @ b[group of r]`` [R, N] for arguments that :func:`takes` accepts."""
    width = b_EKN.shape[2]
    out_RN = a_RK.new_empty(a_RK.shape[0], width)
    if b_EKN.is_contiguous():
        b = frame.descriptor(b_EKN.flatten(0, 1), frame.DEPTH, frame.COLUMNS)
        mode = frame.TRANSPOSED
    else:
        b = frame.descriptor(b_EKN.transpose(1, 2).flatten(0, 1), frame.COLUMNS, frame.DEPTH)
        mode = frame.FORWARD
    a = frame.descriptor(a_RK, frame.HALF, frame.DEPTH)
    out = frame.descriptor(out_RN, frame.HALF, frame.PART, moves=True)
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
    a = frame.descriptor(a_RM, frame.DEPTH, frame.HALF, moves=True)
    g = frame.descriptor(g_RN, frame.DEPTH, frame.COLUMNS, moves=True)
    out = frame.descriptor(out_EMN.flatten(0, 1), frame.HALF, frame.PART)
    _launch(frame.OUTER, (a, g, out, out), offsets_E, offsets_E, height, width, 0)
    return out_EMN


def gated(
    x_RD: torch.Tensor,
    w_E2FD: torch.Tensor,
    offsets_E: torch.Tensor,
    weights_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``a_R2F = x @ w^T``, [gate, up] in bf16, and ``h_RF = silu(gate) * up * weight``.

    :func:`takes_gated` accepts the first two arguments.

    Args:
        w_E2FD: gate's F rows, then up's.
        weights_R: any floating dtype.
    """
    double = w_E2FD.shape[1]
    a_R2F = x_RD.new_empty(x_RD.shape[0], double)
    h_RF = x_RD.new_empty(x_RD.shape[0], double // 2)
    x = frame.descriptor(x_RD, frame.HALF, frame.DEPTH)
    w = frame.descriptor(w_E2FD.flatten(0, 1), frame.PART, frame.DEPTH)
    outs = (frame.descriptor(out, frame.HALF, frame.PART, moves=True) for out in (a_R2F, h_RF))
    _launch(
        frame.FORWARD, (x, w, *outs), offsets_E, weights_R, 0, double, x_RD.shape[1], is_gated=True
    )
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


@gluon.jit
def _multiply(
    bounds, outs, ring, numbers, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    MODE: gl.constexpr, GATED: gl.constexpr, LOWER: gl.constexpr,
):  # fmt: skip
    """Multiply and store the upper or, if ``LOWER``, the lower halves of tiles."""
    offsets, groups = bounds
    out_desc, h_desc, weights, out_parts = outs
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, frame.COLUMNS, 16])
    tile = frame.next_tile(groups * 0, numbers, 4)
    turn = groups * 0 + 1
    first = groups * 0
    start = groups * 0
    stage = groups * 0
    phase = groups * 0
    whole = out_parts.index(LOWER)
    part = whole
    if MODE != 2:
        part = whole.reshape([frame.HALF, frame.PART])
    for g in range(groups):
        end = gl.load(offsets + g)
        rows = end - start
        tiles = frame.tiles_of(rows, M, N, MODE)
        steps = frame.steps_of(rows, K, MODE)
        while tile < first + tiles:
            m, n = frame.place_of(tile - first, N)
            m += LOWER * frame.HALF
            if MODE != 2 and m >= rows:
                stage, phase = frame.skip(ring, steps, stage, phase)
            else:
                sums = gl.zeros([frame.HALF, frame.COLUMNS], gl.float32, LAYOUT)
                sums, stage, phase = frame.accumulate(
                    ring, steps, stage, phase, sums, MODE, False, LOWER
                )
                left, right = frame.halves(sums.to(out_desc.dtype))
                row = frame.END - rows + m
                for half in gl.static_range(2):
                    at = n + half * frame.PART
                    if GATED:
                        at = n // 2 + half * (N // 2)
                    value = left if half == 0 else right
                    if MODE == 2:
                        frame.emit(value, part, out_desc, [g * M + m, at], part)
                    else:
                        frame.emit(value, part, out_desc, [frame.END, end, row, at], whole)
                if GATED:
                    gate = left.to(gl.float32)
                    ROWS: gl.constexpr = gl.SliceLayout(1, gate.type.layout)
                    r = m + gl.arange(0, frame.HALF, ROWS)
                    w = gl.load(weights + start + r, r < rows, 0.0).to(gl.float32)
                    h = gate * (1.0 / (1.0 + gl.exp(-gate))) * right.to(gl.float32)
                    h = (h * gl.expand_dims(w, 1)).to(out_desc.dtype)
                    frame.emit(h, part, h_desc, [frame.END, end, row, n // 2], whole)
            tile = frame.next_tile(turn, numbers, 4)
            turn += 1
        first += tiles
        start = end
    hopper.tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["groups"])
def _grouped_kernel(
    a_desc, b_desc, out_desc, h_desc, offsets, weights, counter, groups,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, MODE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    B_SHAPE: gl.constexpr = [frame.COLUMNS, frame.DEPTH] if GATED else b_desc.block_type.shape
    B_LAYOUT: gl.constexpr = b_desc.layout
    ring, numbers, out_parts = frame.shared_memory(a_desc, out_desc, B_SHAPE, B_LAYOUT)
    bounds = (offsets, groups)
    ins = (a_desc, b_desc)
    outs = (out_desc, h_desc, weights, out_parts)
    gl.warp_specialize(
        [
            (_multiply, (bounds, outs, ring, numbers, M, N, K, MODE, GATED, 0)),
            (_multiply, (bounds, outs, ring, numbers, M, N, K, MODE, GATED, 1)),
            (frame.load_pieces, (bounds, ins, ring, numbers, M, N, K, MODE, GATED)),
            (frame.schedule, (bounds, counter, numbers, M, N, MODE)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
