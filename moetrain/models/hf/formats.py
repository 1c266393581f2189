"""Reads quantised tensors of checkpoints, only the indexed parts; exports have them in bf16.

A :class:`Format` presents several tensors of a file as one. Readers, checks and exports then see
that tensor alone, with the name that it has in unquantised checkpoints. The key
``quantization_config`` names the formats (:func:`formats_of`), and exports leave it out.

    mxfp4   X_blocks uint8 [E, N, M/32, 16], X_scales uint8 [E, N, M/32] -> X [E, M, N]
            two elements a byte, the low half first; 32 consecutive ones share a scale 2^(x - 127)
            (OCP Microscaling Formats 1.0)
    fp8     X_scale_inv, X e4m3 [N, M] -> X [N, M]; see :mod:`moetrain.kernels.quant.blocks`
    nf4     X uint8 [N M / 2, 1], X.absmax, X.quant_map, X.quant_state.bitsandbytes__nf4 and, where
            scales are quantised too, X.nested_absmax, X.nested_quant_map -> X [N, M], as
            bitsandbytes writes it: two elements a byte, the high half first
    float-quantized, pack-quantized
            of the library compressed-tensors, with a scale a row in e4m3 and with groups in 4 bits;
            :mod:`moetrain.models.hf.packing` has their parts
    nvfp4   X uint8 [N, M/2], X_scale e4m3 [N, M/16], X_scale_2 fp32 [] -> X [N, M], as NVIDIA's
            library modelopt writes it: two elements in e2m1 a byte, the low half first; 16
            consecutive ones share a scale, and all of X share scale_2. Stacked experts, as those of
            GPT-OSS, are X uint8 [E, M/2, N], X_weight_scale e4m3 [E, M/16, N] and X_weight_scale_2
            -> X [E, M, N]
    nvfp4-pack-quantized
            the same of compressed-tensors: X_packed, X_scale and X_global_scale fp32 [1]
    FP8     X e4m3 [N, M], X_scale fp32 [] or [N] -> X [N, M], as modelopt writes it

In nvfp4 an element is ``e2m1 * (scale * scale_2)``, in compressed-tensors ``e2m1 * (scale /
global_scale)``. Both operations are in fp32, and rounded in this order, as in both libraries.
Factors for activations and for a cache of keys and values are left out, since an export in bf16 has
no use for them.

In nf4 the JSON of ``quant_state`` has the shape and ``blocksize``, the number of consecutive
elements that share a scale. Scales are fp32, or bytes where they are quantised; a scale is then
``map[byte] * nested_absmax + nested_offset``, rounded twice.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from moetrain.config import ConfigError
from moetrain.kernels.quant.blocks import BlockScaled
from moetrain.kernels.quant.groups import QUANT_FORMATS, Groups, QuantFormat
from moetrain.models.architecture import ConfigJson
from moetrain.models.hf.lazy import LazyTensor


class Format(NamedTuple):
    """A format of quantised tensors in files."""

    endings: tuple[str, ...]
    """The endings of the names of a tensor's parts."""
    ending: str
    """The ending of the tensor's name, in place of its parts'."""
    dtypes: tuple[set[torch.dtype], ...]
    """The dtypes that the parts may have."""
    shape: Callable[..., tuple[int, ...] | None]
    """Computes the tensor's shape from those of its parts; None: they do not fit together."""
    read: Callable[[Sequence[LazyTensor], slice], torch.Tensor]
    """Reads some indices of the tensor's first dim from its parts."""
    has_state: bool = False
    """True: ``shape`` takes the first part itself, which describes the others."""
    groups: Callable[[Sequence[LazyTensor], slice, QuantFormat], Groups | None] = (
        lambda parts, rows, format: None
    )
    """Reads some indices of the first dim in a :class:`QuantFormat`; None: the parts are not stored
    in that format."""
    unused: tuple[str, ...] = ()
    """The endings of the names of further tensors that such files have, which are left out."""

    def parts(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return every tensor of this format in the files, with the names of its parts."""
        first = self.endings[0]
        stems = [name.removesuffix(first) for name in names if name.endswith(first)]
        return {stem + self.ending: [stem + ending for ending in self.endings] for stem in stems}


class Dequantised:
    """A tensor in a :class:`Format`. Indexing it reads and dequantises only the indexed rows."""

    def __init__(
        self,
        form: Format,
        parts: Sequence[LazyTensor],
        shape: Sequence[int],
    ) -> None:
        self.form, self.parts, self.shape = form, parts, shape
        self._rows = slice(0, 0)
        self._values = torch.empty(0)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        """Read ``tensor[index]``. The first index is an int or a slice with a step of 1."""
        index = index if isinstance(index, tuple) else (index,)
        first, *others = (slice(None),) if index == (...,) else index
        rows = slice(first, first + 1) if isinstance(first, int) else first
        rows = slice(*rows.indices(self.shape[0])[:2])
        if rows != self._rows:  # kept for the next read: gate and up are of the same rows
            self._rows, self._values = rows, self.form.read(self.parts, rows)
        return self._values[(0 if isinstance(first, int) else slice(None), *others)]

    def groups(self, format: QuantFormat, index: tuple[int | slice, ...]) -> Groups | None:
        """Return ``tensor[index]`` as it is stored, if that is in ``format``; else None."""
        whole = torch.empty(self.shape, device="meta")
        part = whole[index]
        start, numel, width = part.storage_offset(), part.numel(), math.prod(self.shape[1:])
        if not part.is_contiguous() or start % width or numel % width:
            return None
        return self.form.groups(self.parts, slice(start // width, (start + numel) // width), format)


_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4 = torch.cat((_FP4, -_FP4))
_PAIRS = torch.stack((_FP4.repeat(16), _FP4.repeat_interleave(16)), dim=1)
"""The two elements of each byte, fp32 [256, 2]."""


def _e2m1(bytes_XB: torch.Tensor) -> torch.Tensor:
    """Return the elements in bytes [..., B], fp32 [..., 2 B]."""
    pairs = _PAIRS.index_select(0, bytes_XB.flatten().int())
    return pairs.view(*bytes_XB.shape[:-1], 2 * bytes_XB.shape[-1])


def _mxfp4_shape(blocks: Sequence[int], scales: Sequence[int]) -> tuple[int, ...] | None:
    if len(blocks) != 4 or blocks[3] != 16 or list(blocks[:3]) != list(scales):
        return None
    return blocks[0], blocks[2] * 32, blocks[1]


def _read_mxfp4(parts: Sequence[LazyTensor], rows: slice) -> torch.Tensor:
    blocks, scales = (part[rows] for part in parts)
    # Exact in bf16: an element has two leading bits, and a power of 2 shifts them.
    values = torch.ldexp(_e2m1(blocks), scales.int()[..., None] - 127).bfloat16()
    return values.flatten(-2).mT


_BYTES = {torch.uint8}
_MXFP4 = Format(
    endings=("_blocks", "_scales"),
    ending="",
    dtypes=(_BYTES, _BYTES),
    shape=_mxfp4_shape,
    read=_read_mxfp4,
)


def _fp8(block: tuple[int, int]) -> Format:
    """Return the format of matrices in fp8 with a scale for each ``block``."""

    def shape(scales: Sequence[int], codes: Sequence[int]) -> tuple[int, ...] | None:
        wanted = [-(-size // n) for size, n in zip(codes, block, strict=False)]
        return (*codes,) if len(codes) == 2 and list(scales) == wanted else None

    def read(parts: Sequence[LazyTensor], rows: slice) -> torch.Tensor:
        scales, codes = parts
        return BlockScaled(codes, scales, codes.get_shape(), block)[rows]

    wide = {torch.float32, torch.bfloat16}
    return Format(
        endings=("_scale_inv", ""),
        ending="",
        dtypes=(wide, {torch.float8_e4m3fn}),
        shape=shape,
        read=read,
    )


class _State(NamedTuple):
    """The description of a tensor in nf4 by bitsandbytes."""

    shape: tuple[int, ...]
    """The tensor's shape."""
    block: int
    """The number of elements that share a scale."""
    nested: int
    """The number of scales that share a factor; 0: scales are not quantised."""
    offset: float
    """The offset of quantised scales."""

    @classmethod
    def read(cls, part: LazyTensor) -> "_State | None":
        """Read the JSON of an untrusted file; None: it is not valid."""
        sizes = _sizes(part)
        if len(sizes) != 1 or sizes[0] > 1 << 16:
            return None
        try:
            said = json.loads(bytes(part[:].tolist()))
            shape, nested = said["shape"], said.get("nested_blocksize", 0)
            offset = said.get("nested_offset", 0.0)
            if said["quant_type"] != "nf4" or not isinstance(offset, int | float):
                return None
            found = cls((*shape,), said["blocksize"], nested, float(offset))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            return None
        sizes = [*found.shape, found.block, found.nested + 1]
        are_sizes = all(type(n) is int and 0 < n < 2**40 for n in sizes)
        return found if are_sizes and found.shape and math.isfinite(found.offset) else None


def _sizes(part: LazyTensor) -> list[int]:
    return [*(part.shape if isinstance(part, torch.Tensor) else part.get_shape())]


def _nf4_shape(state: LazyTensor, *sizes: Sequence[int]) -> tuple[int, ...] | None:
    said = _State.read(state)
    if said is None or bool(said.nested) != (len(sizes) == 5):
        return None
    elements = math.prod(said.shape)
    scales = -(-elements // said.block)
    wanted = [-(-elements // 2), scales, 16]
    if said.nested:
        wanted += [-(-scales // said.nested), 256]
    found = [math.prod(size) for size in sizes]
    are_flat = all(size[0] == n for size, n in zip(sizes, found, strict=True) if n)
    return said.shape if found == wanted and are_flat else None


class _StoredRows(NamedTuple):
    """Rows of a tensor in nf4, as they are stored."""

    state: _State
    first: int
    """The index of the rows' first element in the tensor."""
    end: int
    """The index behind the rows' last element."""
    packed: torch.Tensor
    """uint8: two codes a byte, from the byte of the first element on."""
    scales_G: torch.Tensor
    """The scales, or their bytes, from the first element's on."""
    factors_S: torch.Tensor | None
    """The factors of quantised scales, from the first element's on; None: scales are fp32."""

    @classmethod
    def read(cls, parts: Sequence[LazyTensor], rows: slice) -> "_StoredRows":
        """Read ``rows`` from the parts of a tensor."""
        state = _State.read(parts[0])
        assert state is not None  # the headers were checked
        first, end = (row * math.prod(state.shape[1:]) for row in (rows.start, rows.stop))

        def stored(part: LazyTensor, step: int) -> torch.Tensor:
            """Read the entries of the rows' elements; ``step`` elements share an entry."""
            return part[first // step : -(-end // step)].flatten()

        return cls(
            state,
            first,
            end,
            packed=stored(parts[1], 2),
            scales_G=stored(parts[2], state.block),
            factors_S=stored(parts[4], state.block * state.nested) if state.nested else None,
        )


def _read_nf4(parts: Sequence[LazyTensor], rows: slice) -> torch.Tensor:
    said, first, end, packed, scales_G, factors_S = _StoredRows.read(parts, rows)
    if factors_S is not None:
        group_G = torch.arange(first // said.block, -(-end // said.block))
        own = group_G // said.nested - first // said.block // said.nested
        scales_G = parts[5][:].float()[scales_G.int()] * factors_S.float()[own] + said.offset
    codes_N = torch.stack((packed >> 4, packed & 15), 1).flatten()[first % 2 :][: end - first]
    group_N = torch.arange(first, end) // said.block - first // said.block
    values_N = parts[3][:].float()[codes_N.int()] * scales_G.float()[group_N]
    return values_N.view(rows.stop - rows.start, *said.shape[1:])


def _nf4_groups(
    parts: Sequence[LazyTensor],
    rows: slice,
    format: QuantFormat,
) -> Groups | None:
    """Return the stored codes and scales.

    None: tables or block sizes are not ours, scales are fp32, or the rows would cut a unit.
    """
    said, first, end, packed, scales_G, factors_S = _StoredRows.read(parts, rows)
    if (
        format is not QUANT_FORMATS["nf4"]
        or said.block != format.group_size
        or said.nested % format.groups_per_set
    ):
        return None
    if factors_S is None or first % format.unit or end % format.unit:
        return None
    tables = torch.cat((parts[3][:].float(), parts[5][:].float()))
    ours = format.table(tables.device)
    assert ours is not None  # it has a codebook
    if not torch.equal(tables, ours):
        return None
    first_set = first // said.block // said.nested
    own_S = torch.arange(first, end, format.unit) // said.block // said.nested - first_set
    factor_S = factors_S.float()[own_S]
    shared_S2 = torch.stack((factor_S, torch.full_like(factor_S, said.offset)), 1)
    return Groups(((packed >> 4) | (packed << 4))[None], scales_G[None], shared_S2.view(1, -1))


def _nf4(is_nested: bool) -> Format:
    """Return the format that bitsandbytes writes; ``is_nested``: scales are quantised too."""
    wide = {torch.float32}
    endings = (".quant_state.bitsandbytes__nf4", "", ".absmax", ".quant_map")
    dtypes = (_BYTES, _BYTES, _BYTES if is_nested else wide, wide)
    if is_nested:
        endings += (".nested_absmax", ".nested_quant_map")
        dtypes += (wide, wide)
    return Format(
        endings=endings,
        ending="",
        dtypes=dtypes,
        shape=_nf4_shape,
        read=_read_nf4,
        has_state=True,
        groups=_nf4_groups,
    )


_FLOATS = {torch.float32, torch.bfloat16, torch.float16}
_ACTIVATIONS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""Endings of the names of factors for activations and for a cache of keys and values."""


def _rows_shape(scales: Sequence[int], codes: Sequence[int]) -> tuple[int, ...] | None:
    known = [], [1], [*codes[:1]], [*codes[:1], 1]
    return (*codes,) if len(codes) == 2 and [*scales] in known else None


def _read_rows(parts: Sequence[LazyTensor], rows: slice) -> torch.Tensor:
    scales, codes = parts
    own = scales[...] if math.prod(_sizes(scales)) == 1 else scales[rows]
    return codes[rows].float() * own.float().view(-1, 1)


_ROWS = Format(
    endings=(".weight_scale", ".weight"),
    ending=".weight",
    dtypes=(_FLOATS, {torch.float8_e4m3fn}),
    shape=_rows_shape,
    read=_read_rows,
    unused=_ACTIVATIONS,
)
"""Matrices in e4m3 with one scale, or with a scale a row."""


_NVFP4_GROUP = 16
"""Elements of a row that share a scale in nvfp4."""


def _nvfp4(
    endings: tuple[str, ...],
    ending: str,
    *,
    divides: bool = False,
    is_stacked: bool = False,
) -> Format:
    """Return the format of matrices, or of stacked experts, in nvfp4.

    Args:
        endings: those of the scale of the tensor, the scales of its groups, and the elements.
        divides: True: the scale of the tensor is a divisor.
    """

    def shape(
        shared: Sequence[int], scales: Sequence[int], codes: Sequence[int]
    ) -> tuple[int, ...] | None:
        if len(codes) != 2 + is_stacked or math.prod(shared) != 1:
            return None
        outer, width, *others = codes  # of stacked experts the last dim is that of rows
        width *= 2
        fits = width % _NVFP4_GROUP == 0 and [*scales] == [outer, width // _NVFP4_GROUP, *others]
        return (outer, width, *others) if fits else None

    def read(parts: Sequence[LazyTensor], rows: slice) -> torch.Tensor:
        shared, (scales, codes) = parts[0][...].float().view(()), (x[rows] for x in parts[1:])
        if is_stacked:
            scales, codes = scales.mT, codes.mT
        wide = scales.float() / shared if divides else scales.float() * shared
        groups = _e2m1(codes).unflatten(-1, (-1, _NVFP4_GROUP)) * wide[..., None]
        values = groups.flatten(-2)
        return values.mT if is_stacked else values

    def stored(parts: Sequence[LazyTensor], rows: slice, format: QuantFormat) -> Groups | None:
        """Return the stored elements and scales; None: the rows are not whole units, or each expert
        is transposed."""
        if format is not QUANT_FORMATS["nvfp4"] or is_stacked:
            return None
        shared, (scales, codes) = parts[0][...].view(()), (x[rows] for x in parts[1:])
        units, rest = divmod(2 * codes.numel(), format.unit)
        if rest:
            return None
        pair = torch.stack((1 / shared if divides else shared, torch.zeros(())))
        own = scales.view(torch.uint8).flatten()
        return Groups(codes.flatten()[None], own[None], pair.repeat(units)[None])

    return Format(
        endings=endings,
        ending=ending,
        dtypes=({torch.float32}, {torch.float8_e4m3fn}, _BYTES),
        shape=shape,
        read=read,
        groups=stored,
        unused=(*_ACTIVATIONS, "_input_scale"),
    )


_MODELOPT = (
    _nvfp4((".weight_scale_2", ".weight_scale", ".weight"), ".weight"),
    _nvfp4(("_weight_scale_2", "_weight_scale", ""), "", is_stacked=True),
    _ROWS,
)
_PACKED_NVFP4 = _nvfp4(
    (".weight_global_scale", ".weight_scale", ".weight_packed"), ".weight", divides=True
)


@cache
def _int4(group: int) -> Format:
    """Return the format of matrices in 4 bits with a scale for each ``group`` of a row."""

    def shape(
        state: LazyTensor, packed: Sequence[int], scales: Sequence[int]
    ) -> tuple[int, ...] | None:
        if _sizes(state) != [2]:
            return None
        rows, columns = (int(size) for size in state[:])
        fits = columns > 0 and columns % group == 0 and columns % 8 == 0
        wanted = [rows, columns // 8], [rows, columns // group]
        return (rows, columns) if fits and [[*packed], [*scales]] == [*wanted] else None

    def read(parts: Sequence[LazyTensor], rows: slice) -> torch.Tensor:
        bytes_NB, scales_NG = parts[1][rows].view(torch.uint8), parts[2][rows].float()
        codes_NM = torch.stack((bytes_NB & 15, bytes_NB >> 4), -1).flatten(1).float() - 8
        return (codes_NM.unflatten(1, (-1, group)) * scales_NG[..., None]).flatten(1)

    return Format(
        endings=(".weight_shape", ".weight_packed", ".weight_scale"),
        ending=".weight",
        dtypes=({torch.int64, torch.int32}, {torch.int32}, _FLOATS),
        shape=shape,
        read=read,
        has_state=True,
        unused=_ACTIVATIONS,
    )


def _compressed(config: ConfigJson) -> tuple[Format, ...]:
    """Return the formats that the settings of compressed-tensors describe; none: one is not read.

    A group of modules has a format of its own if the whole is ``mixed-precision``.
    """
    groups = config.get("config_groups")
    found: list[Format] = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        form = _format_of_group(group, config.get("format")) if isinstance(group, Mapping) else None
        if form is None:
            return ()
        if form not in found:
            found.append(form)
    if len({form.endings for form in found}) < len(found):  # one name would have two meanings
        return ()
    return tuple(sorted(found, key=lambda form: -len(form.endings)))


def _format_of_group(group: ConfigJson, format: object) -> Format | None:
    """Return the format of a group of modules; None: another one.

    Its matrices must be symmetric and in the order of the columns.
    """
    weights = group.get("weights")
    if not isinstance(weights, Mapping) or weights.get("symmetric") is not True:
        return None
    if format == "mixed-precision":
        format = group.get("format")
    keys = (format, *(weights.get(x) for x in ("type", "num_bits", "strategy")))
    if keys == ("float-quantized", "float", 8, "channel"):
        return _ROWS
    size = weights.get("group_size")
    if weights.get("actorder") or type(size) is not int:
        return None
    if keys == ("pack-quantized", "int", 4, "group") and size > 0:
        return _int4(size)
    if keys == ("nvfp4-pack-quantized", "float", 4, "tensor_group") and size == _NVFP4_GROUP:
        return _PACKED_NVFP4
    return None


_ALGORITHMS = {
    "NVFP4": _NVFP4_GROUP,
    "W4A16_NVFP4": _NVFP4_GROUP,
    "FP8": None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    None: None,  # the cache alone is quantised
}
"""The algorithms of modelopt that are read, with the elements of a group."""


def _unread_algorithm(config: ConfigJson) -> str | None:
    """Describe the first algorithm in the settings of modelopt that is not read; None: all are."""
    inner = config.get("quantization")
    own = inner if isinstance(inner, Mapping) else config
    layers, groups = (own.get(x) for x in ("quantized_layers", "config_groups"))
    listed = [*layers.values()] if isinstance(layers, Mapping) else []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            kind = f"{weights.get('num_bits')}-bit {weights.get('type')}"
            name = {"4-bit float": "NVFP4", "8-bit float": "FP8"}.get(kind, kind)
            listed.append({"quant_algo": name, "group_size": weights.get("group_size")})
        else:
            listed.append(group)
    if own.get("quant_algo") != "MIXED_PRECISION":
        listed.append(own)
    elif not listed:
        return "quant_algo 'MIXED_PRECISION' of modelopt without quantized_layers"
    for one in listed:
        said = one if isinstance(one, Mapping) else {"quant_algo": one}
        algorithm, size = said.get("quant_algo"), said.get("group_size")
        if not isinstance(algorithm, str | None) or algorithm not in _ALGORITHMS:
            return f"quant_algo {algorithm!r:.80} of modelopt"
        if size not in (None, _ALGORITHMS[algorithm]):
            return f"quant_algo {algorithm!r} of modelopt with group_size {size!r:.20}"
    return None


def formats_of(config: ConfigJson, file: str = "config.json") -> tuple[Format, ...]:
    """Return the formats of a checkpoint's quantised tensors; none: its settings name none.

    A tensor has the first of them whose parts it has.

    Args:
        config: the settings, in ``quantization_config``.
        file: the file that holds them, for errors.

    Raises ConfigError: a format is not known.
    """
    value = config.get("quantization_config")
    if value is None:
        return ()
    said = value if isinstance(value, Mapping) else {}
    problem = f"quantization_config {value!r:.80}"
    match said.get("quant_method"), said.get("weight_block_size"):
        case "mxfp4", _:
            return (_MXFP4,)
        case "fp8", [int(n), int(m)] if min(n, m) > 0:
            return (_fp8((n, m)),)
        case "bitsandbytes", _ if said.get("bnb_4bit_quant_type") == "nf4":
            return (_nf4(bool(said.get("bnb_4bit_use_double_quant"))),)
        case "compressed-tensors", _ if found := _compressed(said):
            return found
        case "modelopt", _:
            if (unread := _unread_algorithm(said)) is None:
                return _MODELOPT
            problem = unread
    raise ConfigError(
        "model.path",
        f"{file}: {problem}: such quantized weights are not read; use a checkpoint in bf16, mxfp4"
        " or nf4 (of bitsandbytes), in fp8 with weight_block_size, of compressed-tensors in fp8 by"
        " channel, in int4 by symmetric groups or in nvfp4, or of modelopt in NVFP4 or FP8",
    )
