"""Reads Hugging Face checkpoints: checks them against a model, and loads them into one.

Loading streams: one tensor at a time is copied from the memory-mapped file into the existing
parameter, and a rank reads only its own shard. So a process allocates memory only for its part of
the model and for one tensor. (``RssAnon`` shows it; the resident size also counts the pages of
mapped files.) Every name, shape and dtype is checked before the first byte is copied.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from moetrain.config import ConfigError, ModelSection, logger
from moetrain.config.sources import shortened
from moetrain.models.architecture import Architecture
from moetrain.models.families import FAMILIES, PRESETS
from moetrain.models.family import Piece, presets_near
from moetrain.models.hf import files as hf_files
from moetrain.models.hf.config import architecture_from_hf, is_reward_model
from moetrain.models.hf.lazy import LazyTensor
from moetrain.models.parts.multi_token import num_multi_token_layers, with_multi_token
from moetrain.models.rope_scaling import RopeScaling
from moetrain.models.rules import SCORE
from moetrain.models.transformer import Transformer

_FRAME = {"vocab_size", "hidden_size", "num_layers"}
"""Fields of an architecture that are used outside of the parts of layers."""
_Index = tuple[int | slice | None, ...]
_WritePiece = Callable[[str, _Index, LazyTensor], None]
"""``write(name, place, tensor)`` writes a tensor of the files to ``place`` of a parameter ``name``.
The tensor is lazy: indexing it reads only the indexed elements."""
_Parts = Callable[[Collection[str]], Iterator[tuple[str, _Index, LazyTensor]]]
"""``parts(names)`` yields the arguments of a :data:`_WritePiece` for each piece of the files that
belongs to one of the parameters ``names``."""
_TRAINABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FOLLOWS_FROM_CONFIG = re.compile(r".*rotary_emb\.inv_freq")
"""Names of tensors in old checkpoints that are computed from config.json; they are ignored."""


def check_checkpoint(folder: str | os.PathLike[str], arch: Architecture) -> hf_files.HFSource:
    """Check by the files' headers that the tensors in ``folder`` are those of ``arch``.

    The files may hold further tensors: MTP blocks, a vision tower. Saving carries them on. Where
    ``arch`` has more tokens than ``config.json``, matrices with a row for each token get new rows
    (:mod:`moetrain.models.hf.new_rows`).

    Raises ConfigError: a file is missing or damaged; a tensor is missing, has another shape or
    dtype, or belongs to a layer or module of ``arch`` that has no such tensor.
    """
    folder = Path(os.path.abspath(folder))  # saving the model reads the folder again
    source = hf_files.HFSource.read(folder)
    if arch.vocab_size > (own := architecture_from_hf(source.config).vocab_size):
        source = source.with_rows(arch.vocab_size, own)
    stored = source.stored
    if (expected := _count_tensors(arch)) > 2 * len(stored):  # too many to list, or to build
        raise hf_files.error(
            folder,
            f"config.json describes {arch.num_layers} layers with {expected} tensors in all, but "
            f"the files hold {len(stored)}",
        )
    with torch.device("meta"):
        model = Transformer(arch)
    layouts = []
    for weight_map in (None, *FAMILIES[arch.family].other_maps):
        found = defaultdict[str, list[Piece]](list)
        model.source = replace(source, weight_map=weight_map, own=found)
        for piece in model.pieces():
            found[piece.hf_name].append(piece)
        layouts.append(model.source)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    held = {*stored, *([SCORE] if arch.num_labels else ())}
    named = [one for one in layouts if one.own.keys() <= held] or layouts[:1]
    # Layouts with the same names differ in shapes.
    source = next((one for one in named[:-1] if not _misshapen(one, tensors)), named[-1])
    if arch.num_labels and not is_reward_model(source.config):  # a new head is trained
        source = replace(source, own={k: v for k, v in source.own.items() if k != SCORE})
    extra = [name for name in stored if name not in source.own]
    head = _file_name(arch, "lm_head.weight")
    if (arch.tie_embeddings or arch.num_labels) and head in extra:
        # load_weights checks that it repeats the embedding. A reward model has no such head.
        extra.remove(head)
    section = FAMILIES[arch.family].section
    described = source.config if section is None else source.config.get(section[0]) or {}
    num_extra_layers = num_multi_token_layers(described)
    unexpected = [name for name in extra if _is_contradiction(name, arch, num_extra_layers)]
    source = replace(source, extra=tuple(extra))
    _check_headers(source, tensors, unexpected)
    return source


def load_weights(
    model: Transformer, folder: str | os.PathLike[str], write: _WritePiece | None = None
) -> None:
    """Copy a checkpoint into the existing parameters of ``model``, in their dtype and device.

    ``write(name, place, tensor)`` is called to write each tensor of the files to its place in
    parameter ``name``; None: tensors are copied into the model's own parameters. ``tensor`` is
    lazy: a slice reads only that part of the file, so a shard reads only what it holds.
    ``tensor[...]`` reads all of it.

    Buffers that the files do not hold keep their values. A ``lm_head.weight`` beside tied
    embeddings is accepted if it equals the embedding, and refused if it differs, because the files
    then contradict themselves. ``model.source`` describes the rest of the checkpoint.

    Raises ConfigError: as :func:`check_checkpoint`.
    """
    source = check_checkpoint(folder, model.arch)
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    with opened(source, model.arch) as parts, torch.no_grad():
        for name, place, tensor in parts(parameters):
            if write is None:
                parameters[name][place].copy_(tensor[...])  # converts dtype and device
            else:
                write(name, place, tensor)
    if quantised := [name for name, tensor in source.stored.items() if tensor.form is not None]:
        what = "%s: %d quantised tensors are dequantised; an export has them in bfloat16"
        logger.info(what, source.folder, len(quantised))
    if source.extra:
        what = "%s: %d tensors are not trained here, and an export copies them unchanged: %s"
        logger.info(what, source.folder, len(source.extra), hf_files.listing(sorted(source.extra)))
    model.source = source


def filled(parts: _Parts, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy the values in the files into the parameters of ``whole``, in their dtypes; return it."""
    for name, place, part in parts(whole):
        whole[name][place].copy_(part[...])
    return whole


@contextmanager
def opened(source: hf_files.HFSource, arch: Architecture) -> Iterator[_Parts]:
    """Open the files of ``source``; the context's value is a :data:`_Parts`.

    Raises ConfigError: the embeddings of ``arch`` are tied, and the files hold a head that differs.
    """
    with ExitStack() as stack:
        paths = {path for x in source.stored.values() for path in (x.file, *x.parts.values())}
        files = {path: stack.enter_context(hf_files.open_shard(path)) for path in paths}
        find = lru_cache(1)(lambda name: hf_files.find_in(files, name, source.stored[name]))
        head, embed = (_file_name(arch, f"{x}.weight") for x in ("lm_head", "embed"))
        if arch.tie_embeddings and head in source.stored:
            head_VD, embed_VD, step = find(head), find(embed), 1 << 12  # a few rows at a time
            shape = head_VD.get_shape()
            rows = (slice(i, i + step) for i in range(0, shape[0], step))
            are_alike = shape == embed_VD.get_shape()
            if not (are_alike and all(torch.equal(head_VD[i], embed_VD[i]) for i in rows)):
                problem = f"config.json ties the embeddings, but {head} differs from {embed}; set"
                problem += " tie_word_embeddings to false there to keep both"
                raise hf_files.error(source.folder, problem)

        def parts(names: Collection[str]) -> Iterator[tuple[str, _Index, LazyTensor]]:
            for name in source.stored:
                for piece in source.own.get(name, ()):
                    if piece.parameter in names and not piece.is_copy:
                        found = find(name) if piece.is_whole else FilePiece(find(name), piece)
                        yield piece.parameter, piece.place, found

        yield parts


@dataclass(frozen=True)
class FilePiece:
    """A piece of a file tensor. Indexing it reads only the indexed elements."""

    tensor: LazyTensor
    piece: Piece

    def get_shape(self) -> list[int]:
        """Return the shape of the piece."""
        return list(self.piece.of(torch.empty(self.tensor.get_shape(), device="meta")).shape)

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        """Read ``piece[index]`` and nothing else of the file. Slices must have steps of 1."""
        piece, sizes = self.piece, list(self.tensor.get_shape())
        if piece.is_transposed:
            sizes[-2:] = sizes[:-3:-1]
        wanted = iter(() if index is Ellipsis else index if isinstance(index, tuple) else (index,))
        where: list[int | slice] = [*piece.within, *[slice(None)] * len(sizes)][: len(sizes)]
        for i, (own, size) in enumerate(zip(where, sizes, strict=True)):
            if isinstance(own, slice):
                found = range(size)[own][next(wanted, slice(None))]
                where[i] = slice(found.start, found.stop, found.step)
        if piece.is_transposed:
            where[-2:] = where[:-3:-1]
        read = self.tensor[tuple(where)]
        return read.mT if piece.is_transposed else read


def load_hf(
    path_or_hub_id: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    multi_token: str | None = None,
) -> Transformer:
    """Load the model of a checkpoint, its weights in ``dtype`` on ``device``.

    ``model(tokens_BS)`` gives logits ``[B, S, V]``. fp32, the default, holds bf16 and fp16
    checkpoints exactly; a narrower ``dtype`` rounds. ``model.source`` describes the rest of the
    checkpoint, for :func:`save_hf`.

    Args:
        multi_token: name of the setting that asks for MTP blocks; errors name it. None: the model
            gets no MTP blocks.

    Raises ConfigError: as :func:`resolve`, :func:`architecture_from_hf` and
    :func:`check_checkpoint`.
    """
    folder = hf_files.resolve(path_or_hub_id)
    arch = architecture_from_hf(config := hf_files.read_json(folder / hf_files.CONFIG))
    check_checkpoint(folder, arch)  # before memory is allocated for config.json's sizes
    if multi_token is not None:
        arch = with_multi_token(arch, config, multi_token)
        try:
            check_checkpoint(folder, arch)
        except ConfigError as error:
            problem = f"the model's multi-token prediction blocks do not load ({error.problem})"
            problem += "; unset it"
            raise ConfigError(multi_token, problem) from None
    with torch.device("meta"):
        model = Transformer(arch)
    model.to(dtype).to_empty(device=device)
    for buffer in model.buffers():  # only routers' biases are buffers; not all files hold them
        buffer.zero_()
    load_weights(model, folder)
    return model


def _count_tensors(arch: Architecture) -> int:
    """Count the file tensors of all blocks' parts, in the layout with the fewest tensors."""
    family = FAMILIES[arch.family]
    totals = dict.fromkeys((None, *family.other_maps), 0)
    first = {part: i for i, own in reversed([*enumerate(arch.layers())]) for part in own}
    for part, count in Counter(part for layer in arch.layers() for part in layer).items():
        prefix = f"layers.{first[part]}.{part.name}"
        shapes = {f"{prefix}.{leaf}": weight.shape for leaf, weight in part.weights.items()}
        for weight_map in totals:
            pieces = family.pieces(shapes, arch, weight_map)
            totals[weight_map] += count * len({piece.hf_name for piece in pieces})
    return min(totals.values())


def _file_name(arch: Architecture, parameter: str) -> str:
    """Return the name in files of the embedding's or the head's matrix."""
    pieces = FAMILIES[arch.family].pieces({parameter: ()}, arch)
    return next(piece.hf_name for piece in pieces if not piece.is_copy)


def _misshapen(
    source: hf_files.HFSource, parameters: Mapping[str, torch.Tensor]
) -> Mapping[str, tuple[int, ...]]:
    """Return the right shapes of the tensors that have others, by their names in the files."""
    shapes = {n: Piece.shape_of(x, parameters) for n, x in source.own.items() if n in source.stored}
    return {name: shape for name, shape in shapes.items() if source.stored[name].shape != shape}


def _check_headers(
    source: hf_files.HFSource, parameters: Mapping[str, torch.Tensor], unexpected: Sequence[str]
) -> None:
    """Raise one ConfigError for all tensors that do not fit."""
    missing, untrainable, stored = [], [], source.stored
    misshapen = [
        f"{name} {list(stored[name].shape)}, not {list(want)}"
        for name, want in _misshapen(source, parameters).items()
    ]
    for name in source.own:
        if (tensor := stored.get(name)) is None:
            missing.append(name)
            continue
        if tensor.dtype not in _TRAINABLE:
            untrainable.append(f"{name} {str(tensor.dtype).removeprefix('torch.')}")
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": misshapen,
        "of a dtype that cannot be trained": untrainable,
    }
    if faults := [f"{what}: {hf_files.listing(x)}" for what, x in problems.items() if x]:
        raise hf_files.error(source.folder, f"tensors do not fit config.json; {'; '.join(faults)}")


def _is_contradiction(name: str, arch: Architecture, num_extra_layers: int) -> bool:
    """Return True if a tensor that belongs to no parameter contradicts config.json.

    It does if it is in a module or a layer of the model, or in a layer past the
    ``num_extra_layers`` of multi-token prediction that follow the model's layers.
    """
    family = FAMILIES[arch.family]
    scope = family.scope(name)
    if scope is None or _FOLLOWS_FROM_CONFIG.fullmatch(name) or re.fullmatch(family.unused, name):
        return False
    is_layer = scope.isascii() and scope.isdecimal() and len(scope) < 9
    return not is_layer or not 0 <= int(scope) - arch.num_layers < num_extra_layers


def resolve_architecture(
    section: ModelSection, *, needs_weights: bool = True, multi_token: bool = False
) -> Architecture:
    """Return the architecture of the checkpoint or preset that ``section`` names.

    If ``model.max_positions`` is set, the architecture has that many positions. A checkpoint's
    headers are checked here too, before anything slow is done.

    Args:
        needs_weights: False: ``config.json`` is enough, and nothing is downloaded.
        multi_token: True: the architecture gets the MTP blocks.

    Raises ConfigError: the path, its ``config.json`` or a weight file is bad; the preset is
    unknown; overrides do not fit the preset or each other; the model does not support
    ``model.max_positions``.
    """
    arch = _named(section, needs_weights, multi_token)
    wanted, rope = section.max_positions, arch.rope
    if wanted is None:
        return arch
    original = rope.original_max_positions or int(arch.max_positions / rope.factor)
    if section.rope is not None and not arch.has_rotary:
        problem = f"{section.rope!r}, but this {arch.family} has no rotary embeddings to stretch"
        raise ConfigError("model.rope", f"{problem}; unset it: model.max_positions needs none here")
    if section.rope is None:
        if wanted > arch.reach and arch.has_rotary:
            problem = f"{wanted} is more than the {arch.reach} positions that the model is made for"
            kind = stretched_by(arch)
            remedy = f"lower it, or set model.rope {kind}" if kind else "lower it"
            raise ConfigError("model.max_positions", f"{problem}; {remedy}")
        return arch.model_copy(update={"max_positions": wanted})
    if _differ_in_angles(arch):
        problem = (
            f"{section.rope!r}, but the layers of a {arch.family} have different rotary angles"
        )
        raise ConfigError("model.rope", f"{problem}; unset it")
    if rope.kind not in ("default", section.rope) or wanted <= original:
        problem = f"{section.rope!r}, but the model has rope {rope.kind!r} for {original} positions"
        raise ConfigError("model.rope", f"{problem}, and model.max_positions is {wanted}; unset it")
    changes: dict[str, str | float] = {"kind": section.rope, "factor": wanted / original}
    if section.rope == "yarn":
        changes["original_max_positions"] = original
    scaled = RopeScaling.model_validate({**rope.model_dump(), **changes})
    return arch.model_copy(update={"max_positions": wanted, "rope": scaled})


def _differ_in_angles(arch: Architecture) -> bool:
    """Return True if not all layers have the model's own rope scaling."""
    return any(arch.rotation(i).scaling != arch.rope for i in range(arch.num_layers))


def stretched_by(arch: Architecture) -> str | None:
    """Return the ``model.rope`` that extends ``arch`` to longer rows; None: there is none."""
    if not arch.has_rotary or _differ_in_angles(arch):
        return None
    kinds = {"default": "yarn", "yarn": "yarn", "linear": "linear"}
    return kinds.get(arch.rope.kind)


def _with_tokens(arch: Architecture, section: ModelSection) -> Architecture:
    """Return the checkpoint's ``arch`` with ``model.vocab_size`` tokens, if that is set.

    Raises ConfigError: the checkpoint has more.
    """
    wanted, own = section.vocab_size, arch.vocab_size
    if wanted is None or wanted == own:
        return arch
    if wanted < own:
        problem = f"{wanted}, but model.path {shortened(section.path)} has {own} rows in its"
        raise ConfigError("model.vocab_size", f"{problem} embedding; unset it, or give {own}")
    return arch.model_copy(update={"vocab_size": wanted})


def _named(section: ModelSection, needs_weights: bool, multi_token: bool) -> Architecture:
    """Return the architecture of the checkpoint or preset, before ``model.max_positions``."""
    if section.path is not None:
        folder = hf_files.resolve(section.path, needs_weights=needs_weights)
        config = hf_files.read_json(folder / hf_files.CONFIG)
        arch = architecture_from_hf(config)
        if multi_token:
            arch = with_multi_token(arch, config)
        if needs_weights:
            check_checkpoint(folder, arch)
        return _with_tokens(arch, section)
    preset = PRESETS.get(section.preset or "")
    if preset is None:
        near = hf_files.listing(presets_near(section.preset or ""))
        raise ConfigError(
            "model.preset",
            f"{shortened(section.preset)} is not one of {near} (docs/families.md); for other "
            "models give model.path, a Hugging Face folder or hub id",
        )
    overrides: dict[str, Any] = {**section.overrides()}
    if count := overrides.get("num_layers"):
        for name, each in preset:
            if isinstance(each, tuple):  # it has an entry for each layer, or none
                overrides[name] = (each + each[-1:] * count)[:count]
    try:
        arch = type(preset).model_validate({**preset.model_dump(), **overrides})
    except ValidationError as error:
        first = error.errors()[0]
        problem = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            field, problem = first["loc"][0], f"{first['input']!r}: {problem}"
            raise ConfigError(f"model.{field}", problem) from None
        guilty = next((name for name in overrides if name in problem.split()), "preset")
        raise ConfigError(f"model.{guilty}", problem) from None
    if multi_token:
        arch = with_multi_token(arch, {})
    read = {field.name for part in arch.parts() for field in fields(part)} | _FRAME
    for field, value in section.overrides().items():
        if field not in read:
            problem = f"{value}, but preset {section.preset!r} has no layer that uses it"
            raise ConfigError(f"model.{field}", f"{problem}; unset it")
    return arch
