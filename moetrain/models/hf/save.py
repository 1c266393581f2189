"""Writes Hugging Face checkpoints: a model's weights, and all that it carries on from its source.

``config.json`` and ``generation_config.json`` are written anew, since the architecture, the dtype
or the tokenizer may have changed; everything else in them stays. Other files are copied.

Left out on purpose: process groups (how processes share the work is an argument), and how a run's
tokenizer becomes files (:mod:`moetrain.data.tokenizer`).
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mode
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file

from moetrain.config import ConfigError
from moetrain.config.files import remove_temporaries, write_atomically
from moetrain.models.architecture import Architecture
from moetrain.models.hf.config import exported_config
from moetrain.models.hf.files import (
    CONFIG,
    GENERATION,
    INDEX,
    SINGLE,
    HFSource,
    Stamp,
    TokenizerFiles,
    copy_file,
    error,
    follow,
    is_tokenizer_file,
    listing,
    open_shard,
    remove_stale,
    write_json,
    write_text,
)
from moetrain.models.hf.load import check_checkpoint, pieces_of
from moetrain.models.transformer import Transformer

DEFAULT_SHARD_BYTES = 5 * 10**9
"""The default of ``transformers``."""
ExportDtype = Literal["auto", "bfloat16", "float16", "float32"]
_METADATA = {"format": "pt"}
"""``transformers`` refuses files that do not say which framework wrote them."""
_OUR_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")

_SideFile = Path | str | Mapping[str, Any]
"""A file to copy, a text to write, or an object to write as JSON."""
_EOS = "eos_token_id"

logger = logging.getLogger(__name__)


class ExportRank(NamedTuple):
    """Which files of an export this process writes: every ``ranks``-th, from ``rank`` on."""

    rank: int = 0
    ranks: int = 1
    wait: Callable[[], object] = lambda: None
    """Waits until every process has called it."""


_ALONE = ExportRank()


def save_hf(
    model: Transformer,
    folder: str | os.PathLike[str],
    *,
    dtype: ExportDtype = "auto",
    tokenizer: TokenizerFiles | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write ``model`` as a checkpoint that ``transformers`` loads unchanged, shard by shard.

    If ``model.source`` names a checkpoint (:func:`load_hf` sets it), everything else of that is
    carried on: its keys of config.json, generation_config.json, its tokenizer and other small
    files (:func:`~moetrain.models.hf.files.small_files`), and, bit for bit, the tensors that the
    model does not have, which are read from there now. Set ``model.source`` to None to save the
    bare model.

    Each file appears whole or not at all. An earlier export's files in ``folder`` are replaced,
    and those that this one does not have are removed at the end.

    Args:
        dtype: dtype of the weights. ``auto`` keeps each tensor's dtype in ``model.source``, or
            without a source the parameter's.
        tokenizer: replaces the source's tokenizer, and sets the ids of special tokens.
        max_shard_bytes: largest size of a file; a larger single tensor gets a file of its own.

    Raises:
        ConfigError: a weight does not fit ``dtype``, or the source's folder is gone or has changed
            (what does not need it has been written by then).
        ValueError: the family's format cannot express the model's architecture.
    """
    parameters = dict(model.named_parameters())
    pieces = pieces_of(model.arch, parameters)
    dtypes = _export_dtypes(model, dtype)
    for name, parameter, place in pieces:
        _check_fits(name, parameters[parameter][place], dtypes[name])
    warn_about_router_bias(model)
    tensors = ((name, parameters[parameter][place]) for name, parameter, place in pieces)
    save_stream(model, Path(folder), tensors, dtype, tokenizer, max_shard_bytes)
    if model.source is not None and Path(folder).samefile(model.source.folder):
        model.source = check_checkpoint(folder, model.arch).source


def save_stream(
    model: Transformer,
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: ExportDtype,
    tokenizer: TokenizerFiles | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    share: ExportRank = _ALONE,
) -> None:
    """Write an export like :func:`save_hf`, from weights that arrive one by one.

    Several processes can share the work. Each takes host memory for two files: one that is being
    written, and one that it collects.

    Args:
        model: names the parameters and the source; its values are not read.
        tensors: every weight with its name in the files, in the order of :func:`pieces_of`. Every
            process gets all of them; each is valid until the next is requested.
    """
    source, own = model.source, _own_tensors(model, dtype)
    default = None if source is not None and dtype == "auto" else own[0].dtype
    files = _side_files(model.arch, source, tokenizer, default)
    if share.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporaries(folder)
    share.wait()
    with ExitStack() as stack:
        extra, lost = ([], []) if source is None else _extra_tensors(source, stack)
        shards = _Shards(folder, [*own, *extra], max_shard_bytes, share)
        shards.write(tensors)
    share.wait()
    if share.rank > 0:
        return
    written = shards.write_index()
    lost += write_side_files(folder, files)
    for path in folder.iterdir():
        if _OUR_FILES.fullmatch(path.name) and path.name not in written:
            path.unlink()
    remove_stale(folder, [*written, *files])
    logger.info("Hugging Face checkpoint: %s", folder)
    if lost:
        raise _gone(source, folder, lost)


def warn_about_router_bias(model: Transformer) -> None:
    """Warn of a selection bias, which steers routing and has no place in the files."""
    lost = [n for n, b in model.named_buffers() if n.endswith("router.bias") and b.any()]
    if lost:
        logger.warning("Hugging Face files cannot hold %s: left out", listing(lost))


class _Outgoing(NamedTuple):
    """A tensor to export."""

    name: str
    dtype: torch.dtype
    num_bytes: int
    read: Callable[[], torch.Tensor] | None
    """Reads the tensor; None: it is the model's own, and arrives with the stream."""


def _export_dtypes(model: Transformer, dtype: ExportDtype) -> dict[str, torch.dtype]:
    """Return the dtype in which each weight is exported, by its name in the files."""
    return {tensor.name: tensor.dtype for tensor in _own_tensors(model, dtype)}


def _own_tensors(model: Transformer, dtype: ExportDtype) -> list[_Outgoing]:
    """List every weight of the model."""
    dtypes = {} if model.source is None else model.source.dtypes
    parameters = dict(model.named_parameters())
    tensors = []
    for name, parameter, place in pieces_of(model.arch, parameters):
        part = parameters[parameter][place]
        own = dtypes.get(name, part.dtype) if dtype == "auto" else getattr(torch, dtype)
        tensors.append(_Outgoing(name, own, part.numel() * own.itemsize, None))
    return tensors


def _check_fits(name: str, weight: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ConfigError if a number of ``weight`` would overflow in ``dtype``."""
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(weight.dtype).max and weight.numel():
        largest = weight.detach().abs().amax().item()
        if limit < largest < math.inf:
            problem = f"{dtype} cannot hold {name}, whose largest weight is {largest:.3g}"
            raise ConfigError("checkpoint.hf_dtype", f"{problem}; use bfloat16 or float32")


def what_does_not_fit(
    model: Transformer, here: Mapping[str, Callable[[], torch.Tensor]], dtype: ExportDtype
) -> str:
    """Describe the first of the parts ``here`` with a number that an export cannot hold, or ""."""
    dtypes = _export_dtypes(model, dtype)
    pieces = pieces_of(model.arch, dict(model.named_parameters()))
    # One of each parameter's pieces, and dtypes, speaks for all.
    for (parameter, wanted), name in {(p, dtypes[n]): n for n, p, _ in pieces}.items():
        if parameter in here:
            try:
                _check_fits(name, here[parameter](), wanted)
            except ConfigError as error:
                return error.problem
    return ""


def _extra_tensors(source: HFSource, stack: ExitStack) -> tuple[list[_Outgoing], list[str]]:
    """List the source's own tensors, and the names of those that are gone or have changed.

    Files stay open until ``stack`` is left, since saving may replace them.
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
    """Make the error that names what could not be carried on."""
    problem = f"gone or changed since it was read; {folder} has all but {listing(lost)}"
    problem += "; put it back and save again"
    if source is None:
        return ConfigError("data.tokenizer", problem)
    return error(source.folder, problem)


class _Shards:
    """Writes this process's share of the files of an export's weights."""

    def __init__(
        self, folder: Path, tensors: Sequence[_Outgoing], max_bytes: int, share: ExportRank
    ) -> None:
        self.folder, self.share = folder, share
        self.shards = _plan_shards(tensors, max_bytes)
        self.total_size = sum(tensor.num_bytes for tensor in tensors)
        count = len(self.shards)
        self.names = [
            f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else SINGLE
            for number in range(1, count + 1)
        ]

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write this process's files while ``tensors``, the model's own, go by."""
        coming = iter(tensors)
        with ThreadPoolExecutor(1) as thread:
            writing = thread.submit(lambda: None)
            for number, shard in enumerate(self.shards):
                is_mine = number % self.share.ranks == self.share.rank
                values = self._collect(shard, coming, is_mine)
                if is_mine:
                    writing.result()
                    path = self.folder / self.names[number]
                    writing = thread.submit(self._write_file, path, values)
            writing.result()

    def _collect(
        self,
        shard: Sequence[_Outgoing],
        coming: Iterator[tuple[str, torch.Tensor]],
        is_mine: bool,
    ) -> dict[str, torch.Tensor]:
        """Collect the tensors of one file in host memory; none if another process writes it."""
        values = {}
        for name, dtype, _, read in shard:
            if read is not None:
                values |= {name: read()} if is_mine else {}
                continue
            came, tensor = next(coming)
            assert came == name  # both walk the same table
            if is_mine:
                values[name] = self._copy(tensor.detach(), dtype)
        return values

    def _copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy a tensor to host memory; its own memory where the stream will reuse the tensor's."""
        is_borrowed = self.share.ranks > 1 and tensor.dtype == dtype
        return tensor.contiguous().to(dtype).to("cpu", copy=is_borrowed)

    def _write_file(self, path: Path, values: Mapping[str, torch.Tensor]) -> None:
        write_atomically(path, lambda temporary: save_file(dict(values), temporary, _METADATA))

    def write_index(self) -> set[str]:
        """Write the index of all processes' files; return their names."""
        written = set(self.names)
        if len(self.names) > 1:
            pairs = zip(self.names, self.shards, strict=True)
            weight_map = {tensor.name: file for file, shard in pairs for tensor in shard}
            index = {"metadata": {"total_size": self.total_size}, "weight_map": weight_map}
            write_json(self.folder / INDEX, index)
            written.add(INDEX)
        return written


def _plan_shards(tensors: Iterable[_Outgoing], max_shard_bytes: int) -> list[list[_Outgoing]]:
    """Divide tensors, in order, into files of at most ``max_shard_bytes``."""
    shards: list[list[_Outgoing]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _side_files(
    arch: Architecture,
    source: HFSource | None,
    tokenizer: TokenizerFiles | None,
    dtype: torch.dtype | None,
) -> dict[str, _SideFile]:
    """Make everything but weights, by name in the export.

    Args:
        tokenizer: replaces the tokenizer of ``source`` and the ids of its special tokens.
        dtype: the dtype that config.json names; None: the one that ``source`` names.

    Raises:
        ValueError: the family's format cannot express ``arch``.
    """
    config = exported_config(arch, None if source is None else source.config)
    keys = [key for key in ("torch_dtype", "dtype") if key in config]
    if dtype is not None or not keys:
        dtypes = {} if source is None else source.dtypes
        name = str(dtype or mode(dtypes.values())).removeprefix("torch.")
        config |= dict.fromkeys(keys or ["torch_dtype"], name)
    generation: dict[str, Any] = dict(source.generation or {}) if source is not None else {}
    files: dict[str, _SideFile] = {}
    if source is not None:
        kept = (f for f in source.files if tokenizer is None or not is_tokenizer_file(f))
        files |= {name: source.folder / name for name in kept}
    if tokenizer is not None:
        files |= tokenizer.files
        _set_ids(config, generation, tokenizer, source)
    if generation:
        files[GENERATION] = generation
    return files | {CONFIG: config}


def write_side_files(folder: Path, files: Mapping[str, _SideFile]) -> list[str]:
    """Write side files to ``folder``; return the names of files to copy that are gone."""
    lost = []
    for name, content in files.items():
        follow((folder / name).parent, folder)
        if isinstance(content, Path):
            try:
                copy_file(follow(content, content.parents[name.count("/")]), folder / name)
            except (FileNotFoundError, ConfigError):  # a link since it was read
                lost.append(name)
        elif isinstance(content, str):
            write_text(folder / name, content)
        else:
            write_json(folder / name, content)
    return lost


def _set_ids(
    config: dict[str, Any],
    generation: dict[str, Any],
    tokenizer: TokenizerFiles,
    source: HFSource | None,
) -> None:
    """Set the tokenizer's special ids, unless ``source`` had the same tokenizer.

    Even then the token that ended every document in training must be among those that end a text,
    of which a chat model's checkpoint often lists several.
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
