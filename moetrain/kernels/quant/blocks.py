"""Matrices in e4m3 with a scale for each block, as files of quantised models hold them.

    w[i, j] = codes[i, j] * scales[i // n, j // m]

Blocks are n x m, mostly 128 x 128, and the last of a row or column of blocks may be partial
(DeepSeek-V3, arXiv 2412.19437, section 3.3.2). With blocks of 2 x 2 a matrix [3, 5] has scales
[2, 3], and ``w[2, 4]`` has the scale [1, 2].

Left out on purpose: quantising, and products of codes (:mod:`moetrain.kernels.quant.e4m3`).

Legend: N rows and M columns of the part that is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moetrain.config import ConfigError

SCALES = "_scale_inv"
"""What the name of a matrix's scales adds to its own."""


@dataclass(frozen=True)
class BlockScaled:
    """A matrix of a file, which is dequantised where it is indexed with slices."""

    codes: Any
    """[rows, columns] in e4m3; it is indexed with slices, as ``scales`` are."""
    scales: Any
    shape: tuple[int, ...]
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


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the size of the blocks in which a ``config.json`` says that matrices are quantised.

    None: they are not. Raises ConfigError if they are quantised in another way.
    """
    how = config.get("quantization_config")
    if how is None:
        return None
    said = how if isinstance(how, Mapping) else {}
    match said.get("weight_block_size"):
        case [int(n), int(m)] if said.get("quant_method") == "fp8" and min(n, m) > 0:
            return n, m
    problem = f"quantization_config {how!r:.80}: such quantized weights cannot be trained"
    remedy = "use a checkpoint in bf16, or in fp8 with weight_block_size"
    raise ConfigError("model.path", f"config.json: {problem}; {remedy}")


def with_scales(stored: Mapping[str, Any], block: tuple[int, int]) -> dict[str, Any]:
    """Return the tensors of files with each matrix in e4m3 and its scales as one, in bf16.

    A tensor is a named tuple with its ``file``, ``dtype``, ``shape`` and the file of its
    ``scales``. Raises ConfigError if scales are not one for each block.
    """
    found = dict(stored)
    for name, codes in stored.items():
        scales = stored.get(name + SCALES)
        if codes.dtype != torch.float8_e4m3fn or scales is None:
            continue
        wanted = tuple(-(-size // n) for size, n in zip(codes.shape, block, strict=False))
        if len(codes.shape) != 2 or scales.shape != wanted:
            sizes = f"{list(scales.shape)}, not one for each block of {block[0]} x {block[1]}"
            problem = f"{name} {list(codes.shape)} has scales {sizes}"
            raise ConfigError("model.path", f"{codes.file.parent}: {problem}; fetch it again")
        found[name] = codes._replace(dtype=torch.bfloat16, scales=scales.file)
        del found[name + SCALES]
    return found
