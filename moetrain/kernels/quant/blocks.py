"""Matrices in e4m3 with a scale for each block: read from files, quantised, and multiplied.

    w[i, j] = values[i, j] * scales[i // n, j // m]

Blocks are n x m, mostly 128 x 128, and the last of a row or column of blocks may be partial
(DeepSeek-V3, arXiv 2412.19437, section 3.3.2). With blocks of 2 x 2 a matrix [3, 5] has scales
[2, 3], and ``w[2, 4]`` has the scale [1, 2].

:func:`quantise_blocks` makes blocks of 128 x 128, with one of two kinds of scales::

    fp32     scale = amax / 448                                 as in DeepSeek-V3's checkpoint
    ue8m0    scale = 2^k, the smallest with amax <= 448 scale   as in DeepSeek-V3.1's

If a matrix of such a checkpoint is read in bf16 and quantised again, it gets the same values and
scales. With ue8m0 every element is exact in bf16, so none of them changes (only a block whose
largest value is 224 gets half of its scale and twice its values). With fp32 scales, rounding to
bf16 changes an element by at most 2^-8 of itself. It changes the block's largest element, and so
the scale, by as little. The two errors together are less than half a step of e4m3, which is at
least 2^-5 of the element, so the values are the same. The scale is the same if the largest element
was exact in bf16.

:func:`blocks_mm` multiplies rows in tiles of 128 by such blocks. Tensor cores make its partial sums
over 128 products; these are then scaled and added up in fp32, as in section 3.3.2.

Left out on purpose: products on a CPU (:mod:`moetrain.kernels.quant.products`).

Legend: N rows and M columns of a matrix or of the part that is read (M is a product's inner width),
R rows sorted by expert, E experts. In shapes, n and m are the numbers of blocks along N and M.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional as F

from moetrain.kernels.quant.e4m3 import (
    E4M3,
    LARGEST_E4M3,
    TILE,
    Quantised,
    quantise_rows,
    scale_of,
    to_e4m3,
)
from moetrain.runtime.backend import (
    INTERPRETED,
    Backend,
    TensorDescriptor,
    require_contiguous,
    tl,
    triton,
    use_fast,
)

Scales = Literal["fp32", "ue8m0"]
"""The kinds of scales of :func:`quantise_blocks`."""
_LEAST = 2.0**-100
"""Lower bound of a block's largest element, so that neither scale nor inverse is 0."""
# For products that grouped_e4m3 does not take: the fastest of three settings on one H100
# (docs/log/quantisation.md).
_PRODUCT = {"BM": 64, "BN": 128, "num_warps": 4, "num_stages": 4}


@dataclass(frozen=True)
class BlockScaled:
    """A matrix in a file; indexing it with slices dequantises that part."""

    values: Any
    """[rows, columns] in e4m3; a tensor, or part of a file that is indexed with slices."""
    scales: Any
    """A scale for each block; indexed with slices too."""
    shape: Sequence[int]
    """[rows, columns]."""
    block: tuple[int, int]
    """Rows and columns of a block."""

    def get_shape(self) -> list[int]:
        """Return the shape of the matrix; the name is that of safetensors' slices."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the part in ``index``, a slice, a tuple of slices or ``...``, in fp32."""
        if index is Ellipsis:
            index = ()
        slices = (*(index if isinstance(index, tuple) else (index,)), slice(None), slice(None))[:2]
        (top, end), (left, right) = (
            one.indices(size)[:2] for one, size in zip(slices, self.shape, strict=True)
        )
        n, m = self.block
        w_NM = self.values[top:end, left:right].float()
        scales = self.scales[top // n : -(-end // n), left // m : -(-right // m)].float()
        columns_M = torch.arange(left, right) // m - left // m
        # Block row by block row, so that scales are never spread to the size of w.
        for i, scales_M in enumerate(scales[:, columns_M]):
            start = (top // n + i) * n
            w_NM[max(start - top, 0) : start + n - top] *= scales_M
        return w_NM


class QuantisedBlocks(NamedTuple):
    """Matrices in e4m3 in blocks of 128 x 128."""

    values: torch.Tensor
    """[E, N, M] e4m3."""
    scales: torch.Tensor
    """[E, n, m] fp32."""

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise to ``dtype``."""
        _, rows, columns = self.values.shape
        scales = self.scales.to(dtype).repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)
        return self.values.to(dtype) * scales[:, :rows, :columns]


def quantise_blocks(
    w_ENM: torch.Tensor, kind: Scales, *, transposed: bool = False, backend: Backend = "auto"
) -> QuantisedBlocks:
    """Quantise contiguous matrices in blocks.

    For use inside an op. With ``transposed`` the result is [E, M, N], with the same values and
    scales.
    """
    experts, rows, columns = w_ENM.shape
    n, m = (-(-size // TILE) for size in (rows, columns))
    if use_fast(backend, w_ENM):
        require_contiguous("quantise_blocks", w=w_ENM)
        shapes = ((columns, rows), (m, n)) if transposed else ((rows, columns), (n, m))
        values = w_ENM.new_empty(experts, *shapes[0], dtype=E4M3)
        scales = w_ENM.new_empty(experts, *shapes[1], dtype=torch.float32)
        if w_ENM.numel():
            _blocks_kernel[(m, n, experts)](
                w_ENM,
                values,
                scales,
                rows,
                columns,
                TILE=TILE,
                TRANSPOSED=transposed,
                POWERS=kind == "ue8m0",
                LEAST=_LEAST,
                BY_HAND=INTERPRETED,
                num_warps=8,
            )
        return QuantisedBlocks(values, scales)
    padded = F.pad(w_ENM.detach().float(), (0, m * TILE - columns, 0, n * TILE - rows))
    blocks_EnNmM = padded.view(experts, n, TILE, m, TILE)
    if kind == "ue8m0":
        parts = blocks_EnNmM.transpose(2, 3).flatten(-2)
        values, scales = quantise_rows(parts, "reference")
        values = values.unflatten(-1, (TILE, TILE)).transpose(2, 3)
    else:
        largest = blocks_EnNmM.abs().amax((2, 4)).clamp(min=_LEAST)
        # Divided by a tensor, because on a GPU torch multiplies by the inverse of a Python number.
        scales = largest / torch.full_like(largest, LARGEST_E4M3)
        values = blocks_EnNmM * (1 / scales)[:, :, None, :, None]
        values = values.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)
    values = values.reshape(experts, n * TILE, m * TILE)[:, :rows, :columns]
    if transposed:
        values, scales = values.transpose(1, 2), scales.transpose(1, 2)
    return QuantisedBlocks(values.contiguous(), scales.contiguous())


def blocks_mm(
    a_RM: Quantised, b_ENM: QuantisedBlocks, offsets_E: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``out[r] = a[r] @ b[group of r]^T`` [R, N], groups as in ``grouped_mm``.

    ``a_RM`` has a scale for each 128 elements of a row. There is only the fast path, for CUDA.
    """
    (rows, width), (experts, n, _) = a_RM.values.shape, b_ENM.values.shape
    out_RN = a_RM.scales.new_empty(rows, n, dtype=dtype)
    if not rows:
        return out_RN
    launch = _PRODUCT
    descriptors = (
        TensorDescriptor.from_tensor(a_RM.values, [launch["BM"], TILE]),
        TensorDescriptor.from_tensor(b_ENM.values.flatten(0, 1), [launch["BN"], TILE]),
    )
    tiles = triton.cdiv(rows, launch["BM"]) + experts - 1
    _product_kernel[(tiles * triton.cdiv(n, launch["BN"]),)](
        *descriptors,
        a_RM.scales,
        b_ENM.scales,
        offsets_E,
        out_RN,
        rows,
        n,
        width,
        experts,
        GROUPS=triton.next_power_of_2(experts),
        BK=TILE,
        IN_FP32=INTERPRETED,
        **launch,
    )
    return out_RN


@triton.jit
def _blocks_kernel(
    w,
    values,
    scales,
    N,
    M,
    TILE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    POWERS: tl.constexpr,
    LEAST: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    expert = tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = (n < N)[:, None] & (m < M)[None, :]
    first = expert * N * M
    x = tl.load(w + first + n[:, None] * M + m[None, :], mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    if POWERS:
        scale, inverse = scale_of(largest)
    else:
        scale = tl.div_rn(tl.maximum(largest, LEAST), 448.0)  # its inverse is finite
        inverse = tl.div_rn(1.0, scale)
    quantised = to_e4m3(x * inverse, BY_HAND)
    across, down = tl.num_programs(0), tl.num_programs(1)
    at = scales + expert * across * down
    if TRANSPOSED:
        at_values = values + first + m[:, None] * N + n[None, :]
        tl.store(at_values, tl.trans(quantised), (m < M)[:, None] & (n < N)[None, :])
        tl.store(at + tl.program_id(0) * down + tl.program_id(1), scale)
    else:
        tl.store(values + first + n[:, None] * M + m[None, :], quantised, mask)
        tl.store(at + tl.program_id(1) * across + tl.program_id(0), scale)


@triton.jit(do_not_specialize=["R"])  # it changes with every call
def _product_kernel(
    a_desc,
    b_desc,
    a_scales,
    b_scales,
    ends,
    out,
    R,
    N,
    M,
    E,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """Compute a tile of the result: rows of one group, and columns of one block.

    Programs that read the same rows follow one another, so that the rows stay in the cache.
    """
    across = tl.cdiv(N, BN)
    tile, first_n = tl.program_id(0) // across, tl.program_id(0) % across * BN
    e = tl.arange(0, GROUPS)
    ends_E = tl.load(ends + e, e < E, other=0)
    starts_E = tl.load(ends + e - 1, (e > 0) & (e < E), other=0)
    tiles_E = (ends_E - starts_E + BM - 1) // BM
    group = tl.sum((tl.cumsum(tiles_E, axis=0) <= tile).to(tl.int32), axis=0)
    before = tl.sum(tl.where(e < group, tiles_E, 0), axis=0)
    end = tl.sum(tl.where(e == group, ends_E, 0), axis=0)  # 0 after the last group
    first = tl.sum(tl.where(e == group, starts_E, 0), axis=0) + (tile - before) * BM
    if first < end:
        row, column = first + tl.arange(0, BM), first_n + tl.arange(0, BN)
        blocks = tl.cdiv(M, BK)
        b_scales += (group * tl.cdiv(N, BK) + first_n // BK) * blocks
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, blocks):
            a_scale = tl.load(a_scales + k * R + row, row < end, other=0.0)
            scale = a_scale * tl.load(b_scales + k)
            a = a_desc.load([first, k * BK])
            b = b_desc.load([group * N + first_n, k * BK])
            if IN_FP32:  # Triton's interpreter does not multiply e4m3
                a, b = a.to(tl.float32), b.to(tl.float32)
            total += tl.dot(a, b.T) * scale[:, None]
        at = out + row.to(tl.int64)[:, None] * N + column[None, :]
        mask = (row < end)[:, None] & (column < N)[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask)
