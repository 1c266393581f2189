"""Matrices in e4m3 with a scale for each block, as files of quantised models hold them.

    w[i, j] = codes[i, j] * scales[i // n, j // m]

Blocks are n x m, mostly 128 x 128, and the last of a row or column of blocks may be partial
(DeepSeek-V3, arXiv 2412.19437, section 3.3.2). With blocks of 2 x 2 a matrix [3, 5] has scales
[2, 3], and ``w[2, 4]`` has the scale [1, 2].

Left out on purpose: quantising, and products of codes (:mod:`moetrain.kernels.quant.e4m3`).

Legend: N rows and M columns of the part that is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class BlockScaled:
    """A matrix of a file, which is dequantised where it is indexed with slices."""

    codes: Any
    """[rows, columns] in e4m3; it is indexed with slices, as ``scales`` are."""
    scales: Any
    shape: Sequence[int]
    block: tuple[int, int]

    def get_shape(self) -> list[int]:
        """Return the shape of the matrix, as a file's tensor does."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the part in ``index``, a slice, a tuple of slices or ``...``, in fp32."""
        given = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        whole = (*given, slice(None), slice(None))[:2]
        (top, end), (left, right) = (
            one.indices(size)[:2] for one, size in zip(whole, self.shape, strict=True)
        )
        n, m = self.block
        w_NM = self.codes[top:end, left:right].float()
        scales = self.scales[top // n : -(-end // n), left // m : -(-right // m)].float()
        columns_M = torch.arange(left, right) // m - left // m
        for i, scales_M in enumerate(scales[:, columns_M]):  # no matrix of scales as wide as w
            start = (top // n + i) * n
            w_NM[max(start - top, 0) : start + n - top] *= scales_M
        return w_NM
