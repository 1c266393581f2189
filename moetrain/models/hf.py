"""Hugging Face checkpoints in and out: load them into a model, write them.

Loading streams: one tensor at a time goes from the memory-mapped file into the parameter that
already exists, so the process needs the model's own memory plus one tensor. (Measure that as
anonymous memory, ``RssAnon``: mapped file pages also count as resident, but the kernel drops them
whenever it wants the space.) Every name, shape and dtype is checked before the first byte is
copied.

A checkpoint may hold more than the model: heads for several tokens, a vision tower, a tokenizer.
The model remembers where it came from (``model.source``), and saving carries all of that on. What
lies within a layer or a module that we model, under a name that this model has no use for, is an
error instead: config.json says one thing there and the weights another.

Left out on purpose: quantized weights, and process groups: who downloads and how the others wait
are arguments. :mod:`moetrain.models.hf_files` finds, reads and writes the files themselves.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file

from moetrain.config import ConfigError
from moetrain.models.architecture import Architecture
from moetrain.models.family import HFConfig, config_error
from moetrain.models.hf_config import architecture_from_hf, family_of
from moetrain.models.hf_export import side_files, write_side_files
from moetrain.models.hf_files import (
    CONFIG,
    GENERATION,
    INDEX,
    SINGLE,
    HFSource,
    Stamp,
    Stored,
    TokenizerFiles,
    error,
    listing,
    open_shard,
    read_json,
    readable,
    remove_leftovers,
    remove_stale,
    replace,
    resolve,
    small_files,
    stored_tensors,
    write_json,
)
from moetrain.models.registry import build_model
from moetrain.models.transformer import Transformer
from moetrain.models.weight_map import Piece, Place, all_pieces, find_scope

DEFAULT_SHARD_BYTES = 5 * 10**9
"""What ``transformers`` uses."""
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WritePiece = Callable[[str, Place, torch.Tensor], None]
ExportDtype = Literal["auto", "bfloat16", "float16", "float32"]
_METADATA = {"format": "pt"}
"""``transformers`` refuses files that do not say which framework wrote them."""
_TRAINABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_OUR_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_FOLLOWS_FROM_CONFIG = re.compile(r".*rotary_emb\.inv_freq")
"""Tensors of old checkpoints, which may lie anywhere."""

logger = logging.getLogger(__name__)


class Checked(NamedTuple):
    """A checkpoint whose headers fit a model."""

    source: HFSource
    stored: dict[str, Stored]
    """Every tensor of the files, file by file."""
    pieces: dict[str, Piece]
    """Where the model's tensors go, by their names in the files."""


def read_checkpoint_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The parsed ``config.json`` of a checkpoint folder; ConfigError if there is none."""
    return read_json(Path(folder) / CONFIG)


def check_checkpoint(folder: str | os.PathLike[str], arch: Architecture) -> Checked:
    """Whether the tensors in ``folder`` are those of ``arch``; reads headers alone, so it is quick.

    Raises:
        ConfigError: files missing or damaged; tensors missing, of another shape or dtype, or such
            as ``arch`` would have to have and has not.
    """
    folder = Path(os.path.abspath(folder))  # it is read again when the model is saved
    with readable(folder):
        config, stored = read_checkpoint_config(folder), stored_tensors(folder)
        generation = folder / GENERATION
        settings = read_json(generation) if generation.is_file() else None
        files = tuple(small_files(folder))
    if arch.num_layers + arch.num_moe_layers * arch.num_experts > len(stored):
        sizes = f"{arch.num_layers} layers and {arch.num_experts} experts"
        raise error(folder, f"config.json describes {sizes}, the files hold {len(stored)} tensors")
    with torch.device("meta"):
        parameters = dict(build_model(arch).named_parameters())
    pieces = {piece.hf_name: piece for piece in _pieces(arch, parameters)}
    extra = {name: tensor for name, tensor in stored.items() if name not in pieces}
    if arch.tie_embeddings:
        extra.pop(HEAD, None)  # it may only repeat the embedding, which load_weights sees to
    num_extra_layers = _num_extra_layers(config)
    unexpected = [name for name in extra if _is_contradiction(name, arch, num_extra_layers)]
    _check_headers(stored, pieces, parameters, unexpected, folder)
    source = HFSource(
        folder=folder,
        config=config,
        generation=settings,
        dtypes={name: stored[name].dtype for name in pieces},
        extra=extra,
        stamps={tensor.file: Stamp.of(tensor.file) for tensor in extra.values()},
        files=files,
    )
    return Checked(source, stored, pieces)


def load_weights(
    model: Transformer, folder: str | os.PathLike[str], write: WritePiece | None = None
) -> None:
    """Copies a checkpoint into the existing parameters of ``model``, in their dtype and device.

    ``write(name, place, tensor)`` puts one file tensor in its place of parameter ``name``; None:
    by :func:`write_piece`. Sharded parameters take what is theirs that way.

    Buffers keep their values. A ``lm_head.weight`` beside tied embeddings is taken if it equals
    the embedding, as it then says nothing new; a different one is an error, as the file
    contradicts itself. What else the checkpoint holds is noted in ``model.source``.

    Raises:
        ConfigError: as :func:`check_checkpoint`.
    """
    source, stored, pieces = check_checkpoint(folder, model.arch)
    if write is None:
        write = partial(_write_whole, dict(model.named_parameters()))
    with ExitStack() as stack, torch.no_grad():
        paths = dict.fromkeys(tensor.file for tensor in stored.values())
        files = {path: stack.enter_context(open_shard(path)) for path in paths}
        if model.arch.tie_embeddings and HEAD in stored:
            head_VD, embed_VD = (files[stored[n].file].get_tensor(n) for n in (HEAD, EMBED))
            _check_redundant_head(head_VD, embed_VD, source.folder)
        for name, tensor in stored.items():
            if name in pieces:
                piece = pieces[name]
                write(piece.parameter, piece.place, files[tensor.file].get_tensor(name))
    if source.extra:
        logger.info(
            "%s: %d tensors that are not trained here are carried on into an export: %s",
            source.folder,
            len(source.extra),
            listing(sorted(source.extra)),
        )
    model.source = source


def write_piece(parameter: torch.Tensor, place: Place, tensor: torch.Tensor) -> None:
    """Copies one file tensor to its place in one parameter, converting dtype and device."""
    parameter[place].copy_(tensor)


def read_piece(parameter: torch.Tensor, place: Place) -> torch.Tensor:
    """The file tensor at one place of a parameter, contiguous: the inverse of write_piece."""
    return parameter.detach()[place].contiguous()


def load_hf(
    path_or_hub_id: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Transformer:
    """The model of a checkpoint, its weights in ``dtype`` on ``device``.

    ``model(tokens_BS)`` gives logits ``[B, S, V]``. fp32, the default, holds bf16 and fp16
    checkpoints exactly; a narrower ``dtype`` rounds. ``model.source`` notes what else the
    checkpoint holds, for :func:`save_hf`.

    Raises:
        ConfigError: as :func:`resolve`, :func:`architecture_from_hf` and :func:`check_checkpoint`.
    """
    folder = resolve(path_or_hub_id)
    arch = architecture_from_hf(read_checkpoint_config(folder))
    check_checkpoint(folder, arch)  # before config.json decides how much memory is taken
    with torch.device("meta"):
        model = build_model(arch)
    model.to(dtype).to_empty(device=device)
    load_weights(model, folder)
    return model


def save_hf(
    model: Transformer,
    folder: str | os.PathLike[str],
    *,
    dtype: ExportDtype = "auto",
    tokenizer: TokenizerFiles | None = None,
) -> None:
    """Writes ``model`` as a checkpoint that ``transformers`` loads unchanged.

    Where ``model.source`` notes a checkpoint (:func:`load_hf` does), everything else of that is
    carried on: its keys of config.json, generation_config.json, its tokenizer and other small
    files (:func:`~moetrain.models.hf_files.small_files`), and bit for bit the tensors that the
    model does not have. Those are read from there now. Set ``model.source`` to None to save the
    bare model.

    Args:
        dtype: of the weights; auto: each tensor's own in ``model.source``, without one the
            parameter's.
        tokenizer: takes the place of the source's tokenizer, and brings the ids of special tokens.

    Raises:
        ConfigError: a weight does not fit ``dtype``, or the source's folder is gone or has changed
            (what does not need it has been written by then).
        ValueError: the family's format cannot express the model's architecture.
    """
    save_weights(model, folder, dtype=dtype, tokenizer=tokenizer)


def save_weights(
    model: Transformer,
    folder: str | os.PathLike[str],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    *,
    dtype: ExportDtype = "auto",
    tokenizer: TokenizerFiles | None = None,
) -> None:
    """:func:`save_hf`, one shard at a time.

    Each file appears whole or not at all. An earlier export's files in ``folder`` are replaced,
    and those that this one does not have are removed at the end.

    Args:
        max_shard_bytes: upper size of a file; a larger single tensor gets a file of its own.
    """
    folder, source = Path(folder), model.source
    parameters = dict(model.named_parameters())
    own = _own_tensors(model, parameters, dtype)
    default = None if source is not None and dtype == "auto" else own[0].dtype
    files = side_files(model.arch, source, tokenizer, default)
    warn_about_router_bias(model)
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    with ExitStack() as stack:
        extra, lost = ([], []) if source is None else _extra_tensors(source, stack)
        written = _write_shards(folder, [*own, *extra], max_shard_bytes)
    lost += write_side_files(folder, files)
    for path in folder.iterdir():
        if _OUR_FILES.fullmatch(path.name) and path.name not in written:
            path.unlink()
    remove_stale(folder, [*written, *files])
    logger.info("Hugging Face checkpoint: %s", folder)
    if lost:
        raise _gone(source, folder, lost)
    if source is not None and folder.samefile(source.folder):
        model.source = check_checkpoint(folder, model.arch).source


def warn_about_router_bias(model: Transformer) -> None:
    """The selection bias steers routing and has no place in the file: the user must know."""
    lost = [n for n, b in model.named_buffers() if n.endswith("router.bias") and b.any()]
    if lost:
        logger.warning("Hugging Face files cannot hold %s: left out", listing(lost))


def _pieces(arch: Architecture, parameters: Mapping[str, torch.Tensor]) -> list[Piece]:
    table = family_of(arch.family).weight_map
    return all_pieces(table, {name: p.shape for name, p in parameters.items()})


# Reading.
def _write_whole(
    parameters: Mapping[str, torch.Tensor], name: str, place: Place, tensor: torch.Tensor
) -> None:
    write_piece(parameters[name], place, tensor)


def _check_redundant_head(head_VD: torch.Tensor, embed_VD: torch.Tensor, folder: Path) -> None:
    if not torch.equal(head_VD, embed_VD):
        problem = f"config.json ties the embeddings, but {HEAD} differs from {EMBED}"
        raise error(folder, f"{problem}; set tie_word_embeddings to false there to keep both")


def _check_headers(
    stored: Mapping[str, Stored],
    pieces: Mapping[str, Piece],
    parameters: Mapping[str, torch.Tensor],
    unexpected: Sequence[str],
    folder: Path,
) -> None:
    misshapen, untrainable = [], []
    for name, piece in pieces.items():
        if name not in stored:
            continue
        got, want = stored[name].shape, tuple(parameters[piece.parameter][piece.place].shape)
        if got != want:
            misshapen.append(f"{name} {list(got)}, not {list(want)}")
        if stored[name].dtype not in _TRAINABLE:
            untrainable.append(f"{name} {str(stored[name].dtype).removeprefix('torch.')}")
    problems = [
        f"{what}: {listing(names)}"
        for what, names in (
            ("missing", [name for name in pieces if name not in stored]),
            ("unexpected", unexpected),
            ("of another shape", misshapen),
            ("of a dtype that cannot be trained", untrainable),
        )
        if names
    ]
    if problems:
        raise error(folder, f"tensors do not fit config.json; {'; '.join(problems)}")


def _is_contradiction(name: str, arch: Architecture, num_extra_layers: int) -> bool:
    """Whether a tensor that no parameter takes lies within what config.json describes."""
    scope = find_scope(family_of(arch.family).weight_map, name)
    if scope is None or _FOLLOWS_FROM_CONFIG.fullmatch(name):
        return False
    is_layer = scope.isascii() and scope.isdecimal() and len(scope) < 9
    return not is_layer or not 0 <= int(scope) - arch.num_layers < num_extra_layers


def _num_extra_layers(config: HFConfig) -> int:
    """Layers behind the model's own that predict further tokens (DeepSeek's form of them)."""
    value = config.get("num_nextn_predict_layers")
    if value is not None and (type(value) is not int or value < 0):
        raise config_error(f"num_nextn_predict_layers is {value!r:.80}, expected 0 or more")
    return value or 0


# Writing.
class _Outgoing(NamedTuple):
    """A tensor of an export, read when its file is written."""

    name: str
    dtype: torch.dtype
    num_bytes: int
    read: Callable[[], torch.Tensor]


def _own_tensors(
    model: Transformer, parameters: Mapping[str, torch.Tensor], dtype: ExportDtype
) -> list[_Outgoing]:
    """Every weight, converted; ConfigError if a converted one would overflow."""
    dtypes = {} if model.source is None else model.source.dtypes
    tensors = []
    for name, parameter, place in _pieces(model.arch, parameters):
        part = parameters[parameter][place]
        own = dtypes.get(name, part.dtype) if dtype == "auto" else getattr(torch, dtype)
        limit = torch.finfo(own).max
        if limit < torch.finfo(part.dtype).max:
            largest = part.detach().abs().amax().item()
            if limit < largest < math.inf:
                problem = f"{own} cannot hold {name}, whose largest weight is {largest:.3g}"
                raise ConfigError("checkpoint.hf_dtype", f"{problem}; use bfloat16 or float32")
        tensors.append(
            _Outgoing(name, own, part.numel() * own.itemsize, partial(_converted, part, own))
        )
    return tensors


def _converted(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return read_piece(part, ()).to(dtype)


def _extra_tensors(source: HFSource, stack: ExitStack) -> tuple[list[_Outgoing], list[str]]:
    """The source's own tensors, and the names of those that are no longer there as they were.

    Files stay open until ``stack`` is left: saving may replace them.
    """
    intact = {file for file, stamp in source.stamps.items() if stamp == Stamp.of(file) is not None}
    files = {file: stack.enter_context(open_shard(file)) for file in intact}
    tensors, lost = [], []
    for name, (file, dtype, shape) in source.extra.items():
        if file in intact:
            read = partial(files[file].get_tensor, name)
            tensors.append(_Outgoing(name, dtype, math.prod(shape) * dtype.itemsize, read))
        else:
            lost.append(name)
    return tensors, lost


def _gone(source: HFSource | None, folder: Path, lost: Sequence[str]) -> ConfigError:
    """That not all could be carried on, and where the rest is."""
    problem = f"gone or changed since it was read; {folder} has all but {listing(lost)}"
    problem += "; put it back and save again"
    if source is None:
        return ConfigError("data.tokenizer", problem)
    return error(source.folder, problem)


def _write_shards(folder: Path, tensors: Sequence[_Outgoing], max_shard_bytes: int) -> set[str]:
    """Writes the weights and their index; the names of the files."""
    shards = _plan_shards(tensors, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else SINGLE
        values = {tensor.name: tensor.read() for tensor in shard}
        replace(folder / file, lambda temporary, v=values: save_file(v, temporary, _METADATA))
        weight_map |= dict.fromkeys(values, file)
    written = set(weight_map.values())
    if len(shards) > 1:
        metadata = {"total_size": sum(tensor.num_bytes for tensor in tensors)}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
        written.add(INDEX)
    return written


def _plan_shards(tensors: Iterable[_Outgoing], max_shard_bytes: int) -> list[list[_Outgoing]]:
    """Tensors in order, cut wherever the next one would not fit."""
    shards: list[list[_Outgoing]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards
