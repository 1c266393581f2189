"""Reads the quantised tensors of checkpoints where they are indexed; exports have them in bf16.

A :class:`Format` makes one tensor of several of a file. Readers, checks and exports then see that
tensor alone, under the name that an unquantised checkpoint has for it. ``quantization_config`` says
which format it is (:func:`format_of`), and exports leave that out.

    mxfp4   X_blocks uint8 [E, N, M/32, 16], X_scales uint8 [E, N, M/32] -> X [E, M, N]
            two numbers a byte, the low half first; 32 consecutive ones share a scale 2^(x - 127)
            (OCP Microscaling Formats 1.0)
    fp8     X_scale_inv, X e4m3 [N, M] -> X [N, M]; see :mod:`moetrain.kernels.quant.blocks`
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from moetrain.config import ConfigError
from moetrain.kernels.quant.blocks import BlockScaled


class Format(NamedTuple):
    """How tensors are stored, and how they are made of what is stored."""

    endings: tuple[str, ...]
    """How the names of a tensor's parts end."""
    ending: str
    """How the name of the tensor ends instead."""
    dtypes: tuple[set[torch.dtype], ...]
    """The dtypes that the parts may have."""
    shape: Callable[..., tuple[int, ...] | None]
    """Computes the tensor's shape from those of its parts; None: they do not fit together."""
    read: Callable[[Sequence[Any], slice], torch.Tensor]
    """Reads some indices of the tensor's first dim from its parts."""

    def parts(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return every tensor that the files hold in this format, with the names of its parts."""
        first = self.endings[0]
        stems = [name.removesuffix(first) for name in names if name.endswith(first)]
        return {stem + self.ending: [stem + ending for ending in self.endings] for stem in stems}


class Dequantised:
    """A tensor of :class:`Format`, of which only what is indexed is read."""

    def __init__(self, form: Format, parts: Sequence[Any], shape: Sequence[int]) -> None:
        self.form, self.parts, self.shape = form, parts, shape
        self._rows, self._values = slice(0, 0), torch.empty(0)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read ``tensor[index]``, whose first element is an int or a slice with a step of 1."""
        index = index if isinstance(index, tuple) else (index,)
        first, *others = (slice(None),) if index == (...,) else index
        rows = slice(first, first + 1) if isinstance(first, int) else first
        rows = slice(*rows.indices(self.shape[0])[:2])
        if rows != self._rows:  # gate and up are read one after the other
            self._rows, self._values = rows, self.form.read(self.parts, rows)
        return self._values[(0 if isinstance(first, int) else slice(None), *others)]


_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4 = torch.cat((_FP4, -_FP4))
_PAIRS = torch.stack((_FP4.repeat(16), _FP4.repeat_interleave(16)), dim=1)
"""The two numbers of each byte, fp32 [256, 2]."""


def _mxfp4_shape(blocks: Sequence[int], scales: Sequence[int]) -> tuple[int, ...] | None:
    if len(blocks) != 4 or blocks[3] != 16 or list(blocks[:3]) != list(scales):
        return None
    return blocks[0], blocks[2] * 32, blocks[1]


def _read_mxfp4(parts: Sequence[Any], rows: slice) -> torch.Tensor:
    blocks, scales = (part[rows] for part in parts)
    pairs = _PAIRS.index_select(0, blocks.flatten().int()).view(*scales.shape, 32)
    # Exact in bf16: a number has two leading bits, and a power of 2 shifts them.
    values = torch.ldexp(pairs, scales.int()[..., None] - 127).bfloat16()
    return values.flatten(-2).mT


_BYTES = {torch.uint8}
_MXFP4 = Format(("_blocks", "_scales"), "", (_BYTES, _BYTES), _mxfp4_shape, _read_mxfp4)


def _fp8(block: tuple[int, int]) -> Format:
    """Return the format of matrices in blocks of fp8."""

    def shape(scales: Sequence[int], codes: Sequence[int]) -> tuple[int, ...] | None:
        wanted = [-(-size // n) for size, n in zip(codes, block, strict=False)]
        return (*codes,) if len(codes) == 2 and list(scales) == wanted else None

    def read(parts: Sequence[Any], rows: slice) -> torch.Tensor:
        scales, codes = parts
        return BlockScaled(codes, scales, codes.get_shape(), block)[rows]

    wide = {torch.float32, torch.bfloat16}
    return Format(("_scale_inv", ""), "", (wide, {torch.float8_e4m3fn}), shape, read)


def format_of(config: Mapping[str, Any]) -> Format | None:
    """Return the format of what a ``config.json`` calls quantised; None: nothing is.

    Raises ConfigError: they are quantised in another way.
    """
    how = config.get("quantization_config")
    if how is None:
        return None
    said = how if isinstance(how, Mapping) else {}
    match said.get("quant_method"), said.get("weight_block_size"):
        case "mxfp4", _:
            return _MXFP4
        case "fp8", [int(n), int(m)] if min(n, m) > 0:
            return _fp8((n, m))
    problem = f"config.json: quantization_config {how!r:.80}: such quantized weights are not read"
    remedy = "use a checkpoint in bf16, in mxfp4, or in fp8 with weight_block_size"
    raise ConfigError("model.path", f"{problem}; {remedy}")
