"""Hugging Face checkpoints out: a model's weights, with all that it carries on from its source.

``config.json`` and ``generation_config.json`` are written anew, since the architecture, the dtype
or the tokenizer may have changed; everything in them that none of these decide stays. Other files
are copies.

Left out on purpose: process groups (one process writes), and how a run's tokenizer becomes files
(:mod:`moetrain.data.tokenizer_files`).
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
from moetrain.models.hf.config import exported_config
from moetrain.models.hf.files import (
    CONFIG,
    GENERATION,
    INDEX,
    SINGLE,
    TokenizerFiles,
    copy_file,
    error,
    is_tokenizer_file,
    listing,
    open_shard,
    remove_leftovers,
    remove_stale,
    replace,
    write_json,
    write_text,
)
from moetrain.models.hf.load import check_checkpoint, pieces_of
from moetrain.models.source import HFSource, Stamp
from moetrain.models.transformer import Transformer

DEFAULT_SHARD_BYTES = 5 * 10**9
"""What ``transformers`` uses."""
ExportDtype = Literal["auto", "bfloat16", "float16", "float32"]
_METADATA = {"format": "pt"}
"""``transformers`` refuses files that do not say which framework wrote them."""
_OUR_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")

SideFile = Path | str | Mapping[str, Any]
"""A file to copy, text to write, or an object to write as JSON."""
_EOS = "eos_token_id"

logger = logging.getLogger(__name__)


def save_hf(
    model: Transformer,
    folder: str | os.PathLike[str],
    *,
    dtype: ExportDtype = "auto",
    tokenizer: TokenizerFiles | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes ``model`` as a checkpoint that ``transformers`` loads unchanged, shard by shard.

    Where ``model.source`` notes a checkpoint (:func:`load_hf` does), everything else of that is
    carried on: its keys of config.json, generation_config.json, its tokenizer and other small
    files (:func:`~moetrain.models.hf.files.small_files`), and bit for bit the tensors that the
    model does not have. Those are read from there now. Set ``model.source`` to None to save the
    bare model.

    Each file appears whole or not at all. An earlier export's files in ``folder`` are replaced,
    and those that this one does not have are removed at the end.

    Args:
        dtype: of the weights; auto: each tensor's own in ``model.source``, without one the
            parameter's.
        tokenizer: takes the place of the source's tokenizer, and brings the ids of special tokens.
        max_shard_bytes: upper size of a file; a larger single tensor gets a file of its own.

    Raises:
        ConfigError: a weight does not fit ``dtype``, or the source's folder is gone or has changed
            (what does not need it has been written by then).
        ValueError: the family's format cannot express the model's architecture.
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
    for name, parameter, place in pieces_of(model.arch, parameters):
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
    return part.detach().contiguous().to(dtype)


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


def side_files(
    arch: Architecture,
    source: HFSource | None,
    tokenizer: TokenizerFiles | None,
    dtype: torch.dtype | None,
) -> dict[str, SideFile]:
    """Everything but weights, by name in the export.

    Args:
        tokenizer: replaces that of ``source``, its special tokens' ids too.
        dtype: for config.json; None: what ``source`` says.

    Raises:
        ValueError: the family's format cannot express ``arch``.
    """
    config = exported_config(arch, None if source is None else source.config)
    keys = [key for key in ("torch_dtype", "dtype") if key in config]
    if dtype is not None or not keys:
        name = str(dtype or _most_common(source)).removeprefix("torch.")
        config |= dict.fromkeys(keys or ["torch_dtype"], name)
    generation: dict[str, Any] = dict(source.generation or {}) if source is not None else {}
    files: dict[str, SideFile] = {}
    if source is not None:
        kept = (f for f in source.files if tokenizer is None or not is_tokenizer_file(f))
        files |= {name: source.folder / name for name in kept}
    if tokenizer is not None:
        files |= tokenizer.files
        _set_ids(config, generation, tokenizer, source)
    if generation:
        files[GENERATION] = generation
    return files | {CONFIG: config}


def write_side_files(folder: Path, files: Mapping[str, SideFile]) -> list[str]:
    """Writes them into ``folder``; the names of those that were to be copied and are gone."""
    lost = []
    for name, content in files.items():
        if isinstance(content, Path):
            try:
                copy_file(content, folder / name)
            except FileNotFoundError:
                lost.append(name)
        elif isinstance(content, str):
            write_text(folder / name, content)
        else:
            write_json(folder / name, content)
    return lost


def _most_common(source: HFSource | None) -> torch.dtype:
    assert source is not None  # or there would be a dtype
    dtypes = list(source.dtypes.values())
    return max(set(dtypes), key=dtypes.count)


def _set_ids(
    config: dict[str, Any],
    generation: dict[str, Any],
    tokenizer: TokenizerFiles,
    source: HFSource | None,
) -> None:
    """Puts the tokenizer's special ids in place, unless ``source`` had the same tokenizer.

    Even then the token that ended every document in training must be among those that end a text:
    a chat model's checkpoint often lists more than one.
    """
    ids = tokenizer.ids()
    if source is not None and _is_same_tokenizer(tokenizer, source.folder):
        known = [x for value in (config, generation) for x in _as_list(value.get(_EOS))]
        if ids[_EOS] in known:
            return
        ids = {_EOS: ids[_EOS]}
    config |= ids
    for key, value in ids.items():
        generation.pop(key, None)
        if value is not None:
            generation[key] = value


def _is_same_tokenizer(tokenizer: TokenizerFiles, folder: Path) -> bool:
    ours, theirs = tokenizer.files.get("tokenizer.json"), folder / "tokenizer.json"
    if not isinstance(ours, Path) or not (ours.is_file() and theirs.is_file()):
        return False
    return ours.samefile(theirs) or ours.read_bytes() == theirs.read_bytes()


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
