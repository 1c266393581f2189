"""Writes quantised tensors of checkpoints: the formats in which an export can store matrices.

A :class:`Packing` stores a tensor of an export as several tensors of the files, and names itself in
``quantization_config``. The counterparts that read are in :mod:`moetrain.models.hf.formats`.

    fp8     X e4m3 [N, M] and X_scale_inv fp32 [N/128, M/128], both rounded up, as DeepSeek-V3 and
            Qwen3-30B-A3B-FP8 have them; see :mod:`moetrain.kernels.quant.blocks`
    mxfp4   X_blocks uint8 [E, N, M/32, 16] and X_scales uint8 [E, N, M/32] for X [E, M, N], as
            GPT-OSS has its experts; see :mod:`moetrain.kernels.quant.groups`
    compressed-fp8
            X e4m3 [N, M] and X_scale bf16 [N, 1], a scale a row
    compressed-int4
            X_packed int32 [N, M/8], X_scale bf16 [N, M/128] and X_shape int64 [2]; an int32 has
            eight elements of 4 bits, the first in its lowest bits, each with 8 added

The last two are the formats float-quantized and pack-quantized of the library compressed-tensors.
Their scales are the largest element / 448 and / 7.5, rounded to bf16 before elements are divided by
them, and elements are rounded to the nearest.

Matrices of products in blocks are quantised. Embedding, head, norms, biases, routers and other
gates keep their dtype, as in published checkpoints. In mxfp4 attention does too.

Legend: E experts, N outer and M inner width of a matrix.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from moetrain.config import ConfigError
from moetrain.kernels.quant.blocks import quantise_blocks
from moetrain.kernels.quant.e4m3 import E4M3, LARGEST_E4M3, SCALED, TILE
from moetrain.kernels.quant.groups import QUANT_FORMATS, quantise_groups
from moetrain.models.architecture import Fields
from moetrain.models.family import Piece
from moetrain.models.transformer import Transformer

ExportFormat = Literal["plain", "fp8", "mxfp4", "compressed-fp8", "compressed-int4"]
"""Formats of an export; ``plain``: nothing is quantised."""
_Shape = tuple[int, ...]
_Settings = Callable[[Sequence[str]], Fields]
"""Makes ``quantization_config``, from the modules that are not quantised."""
_LEAST_SCALE = 2.0**-100
"""Lower bound of a scale, so that it is not 0 where all elements are."""


class Packing(NamedTuple):
    """The storage of quantised tensors in an export."""

    name: ExportFormat
    endings: tuple[str, ...]
    """The endings of the names of a tensor's parts; they follow the tensor's name."""
    dims: int
    """The number of dims of the tensors that are quantised."""
    family: str | None
    """The one family whose files have this format; None: every family's may have it."""
    group: int
    """A divisor of the inner width of tensors that are quantised."""
    sizes: Callable[[_Shape], tuple[tuple[torch.dtype, _Shape], ...]]
    """Computes dtype and shape of each part from the shape of a tensor."""
    pack: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    """Quantises a tensor in fp32 to its parts."""
    settings: _Settings

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of the parts of the tensor ``name``."""
        return tuple(name + ending for ending in self.endings)

    def num_bytes(self, shape: _Shape) -> int:
        """Return the size of the parts of a tensor."""
        return sum(torch.Size(size).numel() * dtype.itemsize for dtype, size in self.sizes(shape))

    def packed(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantise the tensor ``name``; return its parts by name.

        Raises ConfigError: an element is not finite.
        """
        self.check(name, tensor)
        return dict(zip(self.names(name), self.pack(tensor), strict=True))

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ConfigError if the tensor ``name``, or a part of it, has what no format holds."""
        if not tensor.isfinite().all():
            problem = f"{self.name!r} cannot hold {name}, which has elements that are not finite"
            raise ConfigError("format", f"{problem}; use plain, or an earlier checkpoint")

    def chosen(self, model: Transformer, shapes: Mapping[str, _Shape]) -> set[str]:
        """Return the names of the files' tensors that are quantised.

        Args:
            shapes: the shape of each tensor of the files.

        Raises ConfigError: the family's files hold matrices in a form that this format cannot have.
        """
        family = model.arch.family
        if self.family not in (None, family):
            problem = f"{self.name!r} is a format of {self.family}, and this is a {family}"
            raise ConfigError("format", f"{problem}; use plain, or a format of every family")
        rules = model.arch.plan().rules(model)
        found: dict[str, list[Piece]] = {}
        for piece in model.pieces():
            found.setdefault(piece.hf_name, []).append(piece)

        def is_matrix(piece: Piece) -> bool:
            name = piece.parameter
            return name.startswith("layers.") and name in rules and rules[name].is_matrix

        chosen = {name for name, own in found.items() if all(map(is_matrix, own))}
        odd = {name for name in chosen if len(shapes[name]) != self.dims}
        if self.family is not None:
            chosen -= odd
        elif odd:
            problem = f"{self.name!r}, but files of the family {family} have stacked experts"
            raise ConfigError("format", f"{problem} ({min(odd)}); use {_format_of(family)}")
        for name in sorted(chosen):
            width = shapes[name][-1 if self.dims == 2 else -2]
            if width % self.group:
                problem = f"{self.name!r} has groups of {self.group}, which do not divide the width"
                raise ConfigError("format", f"{problem} {width} of {name}; use plain")
        return chosen


def _format_of(family: str) -> str:
    """Return a format that files of ``family``, with stacked experts, can have."""
    return next((p.name for p in _PACKINGS.values() if p.family == family), "plain")


def packing_of(format: ExportFormat) -> Packing | None:
    """Return the packing of ``format``; None: it is plain."""
    return _PACKINGS.get(format)


def _fp8_sizes(shape: _Shape) -> tuple[tuple[torch.dtype, _Shape], ...]:
    return (E4M3, shape), (torch.float32, tuple(-(-size // TILE) for size in shape))


def _pack_fp8(w_NM: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = quantise_blocks(w_NM[None], "fp32", backend="reference")
    return made.values[0], made.scales[0]


def _fp8_settings(kept: Sequence[str]) -> Fields:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [TILE, TILE],
        "modules_to_not_convert": [*kept],
    }


_FP8 = Packing(
    name="fp8",
    endings=("", "_scale_inv"),
    dims=2,
    family=None,
    group=1,
    sizes=_fp8_sizes,
    pack=_pack_fp8,
    settings=_fp8_settings,
)


def _mxfp4_sizes(shape: _Shape) -> tuple[tuple[torch.dtype, _Shape], ...]:
    experts, inner, outer = shape
    groups = (experts, outer, inner // SCALED)
    return (torch.uint8, (*groups, SCALED // 2)), (torch.uint8, groups)


def _pack_mxfp4(w_EMN: torch.Tensor) -> tuple[torch.Tensor, ...]:
    (_, blocks), (_, scales) = _mxfp4_sizes(tuple(w_EMN.shape))
    made = quantise_groups(QUANT_FORMATS["mxfp4"], w_EMN.mT.flatten())
    return made.quantised.view(blocks), made.scales.view(scales)


def _mxfp4_settings(kept: Sequence[str]) -> Fields:
    own = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
    return {"quant_method": "mxfp4", "modules_to_not_convert": [*own]}


_MXFP4 = Packing(
    name="mxfp4",
    endings=("_blocks", "_scales"),
    dims=3,
    family="gpt_oss",
    group=SCALED,
    sizes=_mxfp4_sizes,
    pack=_pack_mxfp4,
    settings=_mxfp4_settings,
)


def _compressed(format: str, activations: Fields | None, **weights: object) -> _Settings:
    """Return the function that makes the settings of the library compressed-tensors."""

    def settings(kept: Sequence[str]) -> Fields:
        of_weights = {**weights, "symmetric": True, "dynamic": False, "observer": "minmax"}
        group = {
            "targets": ["Linear"],
            "weights": of_weights,
            "input_activations": activations,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "ignore": [*kept],
            "config_groups": {"group_0": group},
        }

    return settings


def _scales(w_NGS: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the scale of each group [N, G] in bf16; an element is at most ``largest`` of them."""
    return (w_NGS.abs().amax(-1) / largest).clamp(min=_LEAST_SCALE).bfloat16()


def _channels_sizes(shape: _Shape) -> tuple[tuple[torch.dtype, _Shape], ...]:
    return (E4M3, shape), (torch.bfloat16, (shape[0], 1))


def _pack_channels(w_NM: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales_N1 = _scales(w_NM[:, None], LARGEST_E4M3)
    values_NM = (w_NM / scales_N1.float()).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return values_NM.to(E4M3), scales_N1


_TOKENS: Fields = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
"""Activations in e4m3 with a scale for each token, which a server computes."""
_CHANNELS = Packing(
    name="compressed-fp8",
    endings=("", "_scale"),
    dims=2,
    family=None,
    group=1,
    sizes=_channels_sizes,
    pack=_pack_channels,
    settings=_compressed("float-quantized", _TOKENS, num_bits=8, type="float", strategy="channel"),
)


def _int4_sizes(shape: _Shape) -> tuple[tuple[torch.dtype, _Shape], ...]:
    rows, columns = shape
    scales = (torch.bfloat16, (rows, columns // TILE))
    return (torch.int32, (rows, columns // 8)), scales, (torch.int64, (2,))


def _pack_int4(w_NM: torch.Tensor) -> tuple[torch.Tensor, ...]:
    w_NGS = w_NM.unflatten(1, (-1, TILE))
    scales_NG = _scales(w_NGS, 7.5)
    codes_NGS = (w_NGS / scales_NG.float()[..., None]).round().clamp(-8, 7) + 8
    codes_NM = codes_NGS.flatten(1).to(torch.uint8)
    packed = (codes_NM[:, ::2] | codes_NM[:, 1::2] << 4).contiguous().view(torch.int32)
    return packed, scales_NG, torch.tensor(w_NM.shape)


_INT4 = Packing(
    name="compressed-int4",
    endings=("_packed", "_scale", "_shape"),
    dims=2,
    family=None,
    group=TILE,
    sizes=_int4_sizes,
    pack=_pack_int4,
    settings=_compressed(
        "pack-quantized", None, num_bits=4, type="int", strategy="group", group_size=TILE
    ),
)
_PACKINGS = {packing.name: packing for packing in (_FP8, _MXFP4, _CHANNELS, _INT4)}
