"""Hugging Face checkpoints out: a model's weights, with all that it carries on from its source.

Left out on purpose: process groups; one process writes.
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
from typing import Literal, NamedTuple

import torch
from safetensors.torch import save_file

from moetrain.config import ConfigError
from moetrain.models.hf.export import side_files, write_side_files
from moetrain.models.hf.files import (
    INDEX,
    SINGLE,
    TokenizerFiles,
    error,
    listing,
    open_shard,
    remove_leftovers,
    remove_stale,
    replace,
    write_json,
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

logger = logging.getLogger(__name__)


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
    files (:func:`~moetrain.models.hf.files.small_files`), and bit for bit the tensors that the
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
