"""Reads Hugging Face checkpoints: checks them against a model, and loads them into one.

Loading streams: one tensor at a time goes from the memory-mapped file into the parameter that
already exists, and of a sharded parameter a rank reads only its own part. So a process needs memory
for its part of the model and one tensor. (Measure that as anonymous memory, ``RssAnon``: mapped
file pages also count as resident, but the kernel drops them whenever it wants the space.) Every
name, shape and dtype is checked before the first byte is copied.

A checkpoint may hold more than the model: heads for several tokens, a vision tower, a tokenizer.
The model remembers where it came from (``model.source``), and saving carries all of that on. A
tensor within a layer or a module that the family describes, under a name that the model does not
have, is an error instead: config.json and the weights contradict each other.

Left out on purpose: quantized weights, and process groups: who downloads and how the others wait
are arguments. :mod:`moetrain.models.hf.files` finds, reads and writes the files themselves.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from moetrain.config import ConfigError, ModelSection
from moetrain.config.sources import shortened
from moetrain.models.architecture import Architecture, Part
from moetrain.models.families import FAMILIES, PRESETS, find_family
from moetrain.models.family import HFConfig, Index, Piece, all_pieces, config_error, find_scope
from moetrain.models.hf.config import architecture_from_hf
from moetrain.models.hf.files import (
    CONFIG,
    GENERATION,
    FileTensor,
    HFSource,
    Stamp,
    error,
    listing,
    open_shard,
    read_json,
    readable,
    resolve,
    small_files,
    stored_tensors,
)
from moetrain.models.transformer import Transformer, build_model

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WritePiece = Callable[[str, Index, Any], None]
_TRAINABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_COMPARED_ROWS = 1 << 12
_FOLLOWS_FROM_CONFIG = re.compile(r".*rotary_emb\.inv_freq")
"""Names of tensors in old checkpoints that follow from config.json and are ignored."""

logger = logging.getLogger(__name__)


class _Checked(NamedTuple):
    """A checkpoint whose headers fit a model."""

    source: HFSource
    stored: dict[str, FileTensor]
    """Every tensor of the files, in their order."""
    pieces: dict[str, Piece]
    """Where each of the model's tensors goes, by its name in the files."""


def check_checkpoint(folder: str | os.PathLike[str], arch: Architecture) -> _Checked:
    """Check that the tensors in ``folder`` are those of ``arch``. Reads only headers: it is quick.

    Raises:
        ConfigError: a file is missing or damaged; a tensor is missing, has another shape or dtype,
            or lies where ``arch`` describes everything and does not have it.
    """
    folder = Path(os.path.abspath(folder))  # it is read again when the model is saved
    with readable(folder):
        config, stored = read_json(folder / CONFIG), stored_tensors(folder)
        generation = folder / GENERATION
        settings = read_json(generation) if generation.is_file() else None
        files = tuple(small_files(folder))
    if (expected := _count_tensors(arch)) > 2 * len(stored):  # too many to be named, or built
        sizes = f"{arch.num_layers} layers of {expected} tensors"
        raise error(folder, f"config.json describes {sizes}; the files hold {len(stored)}")
    with torch.device("meta"):
        parameters = dict(build_model(arch).named_parameters())
    pieces = {piece.hf_name: piece for piece in pieces_of(arch, parameters)}
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
    return _Checked(source, stored, pieces)


def load_weights(
    model: Transformer, folder: str | os.PathLike[str], write: _WritePiece | None = None
) -> None:
    """Copy a checkpoint into the existing parameters of ``model``, in their dtype and device.

    ``write(name, place, tensor)`` puts a file tensor into its place of parameter ``name``; None
    writes the model's own parameters. ``tensor`` is read where it is indexed with slices
    (``tensor[...]`` is all of it), so that a shard reads only its part.

    Buffers keep their values. A ``lm_head.weight`` beside tied embeddings is taken if it equals
    the embedding, and refused if it differs, because the file then contradicts itself. What else
    the checkpoint holds is noted in ``model.source``.

    Raises:
        ConfigError: as :func:`check_checkpoint`.
    """
    source, stored, pieces = check_checkpoint(folder, model.arch)
    parameters = dict(model.named_parameters())

    def write_whole(name: str, place: Index, tensor: Any) -> None:
        parameters[name][place].copy_(tensor[...])  # converts dtype and device

    write = write or write_whole
    with ExitStack() as stack, torch.no_grad():
        paths = dict.fromkeys(tensor.file for tensor in stored.values())
        files = {path: stack.enter_context(open_shard(path)) for path in paths}
        if model.arch.tie_embeddings and HEAD in stored:
            check_tied(source.folder, *(files[stored[n].file].get_slice(n) for n in (HEAD, EMBED)))
        for name, tensor in stored.items():
            if name in pieces:
                piece = pieces[name]
                write(piece.parameter, piece.place, files[tensor.file].get_slice(name))
    if source.extra:
        logger.info(
            "%s: %d tensors that are not trained here are carried on into an export: %s",
            source.folder,
            len(source.extra),
            listing(sorted(source.extra)),
        )
    model.source = source


def check_tied(folder: Path, head_VD: Any, embed_VD: Any) -> None:
    """Raise ConfigError unless head and embedding are equal; compares a few rows at a time."""
    shape = head_VD.get_shape()
    rows = (slice(i, i + _COMPARED_ROWS) for i in range(0, shape[0], _COMPARED_ROWS))
    are_alike = shape == embed_VD.get_shape()
    if not (are_alike and all(torch.equal(head_VD[part], embed_VD[part]) for part in rows)):
        problem = f"config.json ties the embeddings, but {HEAD} differs from {EMBED}; set "
        problem += "tie_word_embeddings to false there to keep both"
        raise error(folder, problem)


def load_hf(
    path_or_hub_id: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Transformer:
    """Load the model of a checkpoint, its weights in ``dtype`` on ``device``.

    ``model(tokens_BS)`` gives logits ``[B, S, V]``. fp32, the default, holds bf16 and fp16
    checkpoints exactly; a narrower ``dtype`` rounds. ``model.source`` notes what else the
    checkpoint holds, for :func:`save_hf`.

    Raises:
        ConfigError: as :func:`resolve`, :func:`architecture_from_hf` and :func:`check_checkpoint`.
    """
    folder = resolve(path_or_hub_id)
    arch = architecture_from_hf(read_json(folder / CONFIG))
    check_checkpoint(folder, arch)  # before config.json decides how much memory is taken
    with torch.device("meta"):
        model = build_model(arch)
    model.to(dtype).to_empty(device=device)
    load_weights(model, folder)
    return model


def pieces_of(arch: Architecture, parameters: Mapping[str, torch.Tensor]) -> list[Piece]:
    """List every file tensor of a model with ``parameters``, and where it lies."""
    table = find_family(arch).hf.weight_map
    return all_pieces(table, {name: p.shape for name, p in parameters.items()})


def _count_tensors(arch: Architecture) -> int:
    """Count the file tensors of all blocks' parts."""
    table, total = find_family(arch).hf.weight_map, 0
    for part, count in Counter(part for layer in arch.layers() for part in layer).items():
        shapes = {f"layers.0.{part.name}.{leaf}": w.shape for leaf, w in part.weights.items()}
        total += count * len(all_pieces(table, shapes))
    return total


def _check_headers(
    stored: Mapping[str, FileTensor],
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
    """Return whether a tensor of no parameter lies within what config.json describes."""
    scope = find_scope(find_family(arch).hf.weight_map, name)
    if scope is None or _FOLLOWS_FROM_CONFIG.fullmatch(name):
        return False
    is_layer = scope.isascii() and scope.isdecimal() and len(scope) < 9
    return not is_layer or not 0 <= int(scope) - arch.num_layers < num_extra_layers


def _num_extra_layers(config: HFConfig) -> int:
    """Read how many layers behind the model's own predict further tokens (as DeepSeek has them)."""
    value = config.get("num_nextn_predict_layers")
    if value is not None and (type(value) is not int or value < 0):
        raise config_error(f"num_nextn_predict_layers is {value!r:.80}, expected 0 or more")
    return value or 0


def resolve_architecture(section: ModelSection) -> Architecture:
    """Return the architecture that ``model.path`` or ``model.preset`` (with overrides) names.

    A checkpoint's headers are checked here too, before anything slow is done.

    Raises:
        ConfigError: the path, its ``config.json`` or a weight file is bad; the preset is unknown;
            overrides do not fit the preset or each other.
    """
    if section.path is not None:
        folder = resolve(section.path)
        arch = architecture_from_hf(read_json(folder / CONFIG))
        check_checkpoint(folder, arch)
        return arch
    preset = PRESETS.get(section.preset or "")
    if preset is None:
        name, known = section.preset or "", sorted(PRESETS)
        near = "".join(f"did you mean {n}? " for n in get_close_matches(name.lower(), known, 1))
        raise ConfigError(
            "model.preset",
            f"{shortened(name)} is not one of {', '.join(known)}; {near}For other models give "
            "model.path, a Hugging Face folder or hub id",
        )
    overrides = section.overrides()
    kinds = {kind for family in FAMILIES.values() for kind in family.architecture.kinds}
    foreign = _fields_of(kinds) - _fields_of(preset.kinds)
    for field in overrides:
        if field in foreign:
            problem = f"{overrides[field]}, but preset {section.preset!r} has no use for it"
            raise ConfigError(f"model.{field}", f"{problem}; unset it")
    try:
        arch = type(preset).model_validate({**preset.model_dump(), **overrides})
    except ValidationError as error:
        first = error.errors()[0]
        problem = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            raise ConfigError(
                f"model.{first['loc'][0]}", f"{first['input']!r}: {problem}"
            ) from None
        guilty = next((name for name in overrides if name in problem.split()), "preset")
        raise ConfigError(f"model.{guilty}", problem) from None
    for part in arch.parts():
        for field, multiple in part.aligned.items():
            if getattr(part, field) % multiple:
                problem = f"{getattr(part, field)} is not a multiple of {multiple}"
                raise ConfigError(f"model.{field}", f"{problem}, which {part.name} weights need")
    return arch


def _fields_of(kinds: Iterable[type[Part]]) -> set[str]:
    return {field.name for kind in kinds for field in fields(kind)}
