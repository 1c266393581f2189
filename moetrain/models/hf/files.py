"""The files of a Hugging Face checkpoint: finds, reads and writes them.

Nothing here knows a model. A checkpoint is a folder with ``config.json``, safetensors files, and
other files that ``transformers`` or a server needs: tokenizer, generation settings, a licence.

Nothing in a folder is trusted. Every fault is one ConfigError on ``model.path``, raised before a
weight is read.

Left out on purpose: pickled weights (``.bin`` files run code when they are read).
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

import huggingface_hub as hub  # it imports its parts at their first use
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES

from moetrain.config import ConfigError, logger
from moetrain.config.files import open_regular, read_regular, write_atomically
from moetrain.models.architecture import ConfigJson
from moetrain.models.family import Piece, WeightMap
from moetrain.models.hf.formats import Dequantised, Format, formats_of
from moetrain.models.hf.lazy import LazyTensor
from moetrain.models.hf.new_rows import WithNewRows, is_of_vocabulary

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
MODELOPT = "hf_quant_config.json"
"""The file in which NVIDIA's library modelopt says what is quantised. Older checkpoints have no
``quantization_config`` beside it."""
EXPORT = "hf"
"""Name of a run's export folder, in its output folder."""
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_MANIFEST = ".moetrain-export.json"
"""Name of the file that lists an export's files. The next export into the folder reads the list to
remove files that it does not have."""


class FileTensor(NamedTuple):
    """A tensor of a checkpoint's files."""

    file: Path
    dtype: torch.dtype
    """The dtype in which the tensor is used and exported."""
    shape: tuple[int, ...]
    form: Format | None = None
    """The format of a quantised tensor; None: it is not quantised."""
    parts: Mapping[str, Path] = {}
    """The names of the tensors that a quantised tensor consists of, and their files."""
    own_rows: int | None = None
    """The rows in the file, if the model has more (:mod:`moetrain.models.hf.new_rows`)."""


@dataclass(frozen=True)
class HFSource:
    """The contents of a checkpoint's files, for loading a model and for a later export of it."""

    folder: Path
    config: ConfigJson
    """The whole ``config.json``."""
    generation: ConfigJson | None
    """The whole ``generation_config.json``, if there is one."""
    stored: Mapping[str, FileTensor]
    """Every tensor of the files, in their order."""
    files: tuple[str, ...]
    """Other files that an export copies, relative to ``folder``; see :func:`small_files`."""
    own: Mapping[str, Sequence[Piece]] = field(default_factory=dict)
    """The pieces of each of the model's tensors, by its name in the files."""
    weight_map: WeightMap | None = None
    """The layout of the model's tensors; None: the family's usual one."""
    extra: tuple[str, ...] = ()
    """Names of tensors that the model does not have; an export copies them bit for bit."""
    _stamps: Mapping[Path, tuple[int, int] | None] = field(default_factory=dict)
    """Size and time of modification of each file, as it was read."""

    @classmethod
    def read(cls, folder: Path) -> HFSource:
        """Read the headers in ``folder``; ConfigError if a file is missing or damaged."""
        with _readable(folder):
            config, stored = read_json(folder / CONFIG), _stored_tensors(folder)
            path = folder / GENERATION
            generation = read_json(path) if os.path.lexists(path) else None
            stamps = {tensor.file: _stamp(tensor.file) for tensor in stored.values()}
            text = config.get("text_config")  # Kimi's files have the settings there
            places = [config, text] if isinstance(text, dict) else [config]
            places = [place for place in places if place.get("quantization_config") is not None]
            forms = formats_of(places[0]) if places else _formats_of_modelopt(folder)
            stored = _dequantised(folder, stored, forms)
            for place in places:
                del place["quantization_config"]
            files = tuple(small_files(folder))
            return cls(folder, config, generation, stored, files, _stamps=stamps)

    def with_rows(self, rows: int, own: int) -> HFSource:
        """Return a copy whose vocabulary matrices have ``rows`` rows instead of ``own``."""
        stored = {
            name: tensor._replace(shape=(rows, *tensor.shape[1:]), own_rows=own)
            for name, tensor in self.stored.items()
            if is_of_vocabulary(name, tensor.shape, own)
        }
        return replace(self, stored={**self.stored, **stored})

    def intact(self) -> set[Path]:
        """Return the files with weights that have not changed since they were read."""
        return {f for f, before in self._stamps.items() if before == _stamp(f) is not None}


def _formats_of_modelopt(folder: Path) -> tuple[Format, ...]:
    """Return the formats that ``hf_quant_config.json`` names; none: there is no such file."""
    if not os.path.lexists(folder / MODELOPT):
        return ()
    said = {**read_json(folder / MODELOPT), "quant_method": "modelopt"}
    return formats_of({"quantization_config": said}, MODELOPT)


def _dequantised(
    folder: Path, stored: Mapping[str, FileTensor], forms: Sequence[Format]
) -> dict[str, FileTensor]:
    """Replace the parts of every quantised tensor by one entry for the tensor.

    Raises ConfigError: the parts of a tensor do not fit together.
    """
    unused = tuple(ending for form in forms for ending in form.unused)
    found = {name: tensor for name, tensor in stored.items() if not name.endswith(unused)}
    opened = lru_cache(maxsize=8)(open_shard)
    for form, name, parts in ((one, *x) for one in forms for x in one.parts(found).items()):
        own = [found.pop(part, None) for part in parts]
        known = [tensor for tensor in own if tensor is not None]
        fits = len(known) == len(own)
        fits = fits and all(x.dtype in kind for x, kind in zip(known, form.dtypes, strict=True))
        sizes: list[Any] = [tensor.shape for tensor in known]
        if fits and form.has_state:
            sizes[0] = opened(known[0].file).get_slice(parts[0])
        shape = form.shape(*sizes) if fits else None
        if shape is None:
            kinds = ", ".join(str(tensor and (*tensor[1:3],)) for tensor in own)
            raise error(folder, f"{' and '.join(parts)} do not fit together: {kinds}")
        files = {part: tensor.file for part, tensor in zip(parts, known, strict=True)}
        found[name] = FileTensor(known[0].file, torch.bfloat16, shape, form, files)
    return found


def _stamp(file: Path) -> tuple[int, int] | None:
    """Return size and time of modification of ``file``; None: it cannot be read."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


_NOT_READ = ("C64", "U16", "U32", "U64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""Dtypes of safetensors files that are not read: complex ones, and those of packed weights."""
_TEMPLATES = "additional_chat_templates"
_OWN_FILES = (CONFIG, GENERATION, MODELOPT)
"""Files that an export does not copy: it writes two of them, and is not quantised as the third
says."""
_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|distcp|h5|msgpack|onnx|onnx_data|gguf|ggml|npz|npy|pkl|pickle"
    r"|joblib|tflite|ot|mlmodel|pb|zip|tar|gz|index\.json)"
)
_MAX_COPY_BYTES = 256 * 2**20
_MAX_BYTES = {"tokenizer.json": 256 << 20, INDEX: 64 << 20, ".jinja": 1 << 20, "": 16 << 20}
"""The largest size of a file that is read whole, by the end of its name, in bytes.

The largest published files have 35 MB (a tokenizer), some 20 MB (the index of 200,000 tensors),
30 KB (a template) and 2 MB (the settings of a tokenizer with 10,000 added tokens).
"""


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer that a model was trained with, as files to export."""

    NAMES: ClassVar = (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "*.tiktoken"),
        *("added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template.*"),
        f"{_TEMPLATES}/*",
    )
    """Patterns of a tokenizer's files in its checkpoint."""

    files: Mapping[str, Path | str]
    """The path to copy or the text to write, for each file by its name in the export."""
    ids: Mapping[str, int | None]
    """Ids of special tokens under their keys in ``config.json``: ``eos_token_id`` and others."""
    origin: Path | None = None
    """The tokenizer.json to which tokens were added; None: it is among ``files``, or there is
    none."""

    @classmethod
    def has(cls, name: str) -> bool:
        """Return True if the file ``name`` of a checkpoint belongs to the tokenizer."""
        return any(fnmatchcase(name, pattern) for pattern in cls.NAMES)

    def is_in(self, folder: Path) -> bool:
        """Return True if the checkpoint in ``folder`` has this tokenizer, before additions."""
        ours, theirs = self.origin or self.files.get("tokenizer.json"), folder / "tokenizer.json"
        if not (isinstance(ours, Path) and ours.is_file() and theirs.is_file()):
            return False
        return filecmp.cmp(ours, theirs, shallow=False)


def small_files(folder: Path) -> list[str]:
    """List the files that an export copies: every small file of ``folder`` without weights.

    These are the tokenizer, processors' settings, chat templates, licence, model card and code. The
    list leaves out hidden files, the two configs that an export writes, modelopt's, weights of any
    format and their indices, other subfolders, and files over 256 MiB.
    """
    found = []
    for path in sorted((*folder.glob("[!.]*"), *folder.glob(f"{_TEMPLATES}/[!.]*"))):
        name = path.relative_to(folder).as_posix()
        if _WEIGHTS.fullmatch(name) or name in _OWN_FILES or not path.is_file():
            continue
        if follow(path, folder).stat().st_size <= _MAX_COPY_BYTES:
            found.append(name)
    return found


def _is_within(path: Path, folder: Path) -> bool:
    """Return True if ``path``, with links followed, is in the checkpoint's ``folder``.

    In the hub's cache it may also be among the files that the revisions of a checkpoint share
    (``snapshots/REVISION/config.json -> ../../blobs/HASH``).
    """
    real = Path(os.path.realpath(path))
    root = Path(os.path.realpath(folder))
    is_cache = root.parent.name == "snapshots"
    return real.is_relative_to(root) or (
        is_cache and real.is_relative_to(root.parents[1] / "blobs")
    )


def follow(path: Path, folder: Path, field: str = "model.path") -> Path:
    """Return ``path`` if it is in the checkpoint's ``folder`` (:func:`_is_within`).

    Links to other places are refused. The checkpoint's author chose their targets, perhaps a
    private key, and an export would publish it.

    Raises ConfigError: ``path`` links to a place outside of the folder.
    """
    if not _is_within(path, folder):
        problem = f"links to {os.path.realpath(path)}, outside of its folder"
        raise ConfigError(field, f"{path} {problem}; if you trust it, put a copy in its place")
    return path


def error(what: str | os.PathLike[str], problem: str, field: str = "model.path") -> ConfigError:
    """Make the error for a fault of the checkpoint at ``what``: one line of readable length."""
    return ConfigError(field, f"{_short(os.fspath(what))}: {_short(problem)}")


def _short(text: str, most: int = 500) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def listing(names: Sequence[str], shown: int = 5) -> str:
    """Join names to ``a, b, c and 7 more``."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


# Finding.
_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]
_DOWNLOADED += ["LICENSE*", "NOTICE*", "README.md"]


_AS_SETTING = "set model.path to it, and lora.path to {}"
"""The advice for a folder of adapters where a setting names a model."""


def resolve(
    path_or_hub_id: str | os.PathLike[str],
    *,
    needs_weights: bool = True,
    field: str = "model.path",
    for_adapters: str = _AS_SETTING,
) -> Path:
    """Return the local folder of a checkpoint; download a hub id unless the cache has all of it.

    Several processes may call it at once: the hub's library downloads under locks.

    Args:
        needs_weights: False: ``config.json`` is enough, and nothing is downloaded.
        field: the setting or argument that names the checkpoint, for errors.
        for_adapters: the advice to a user who names a folder of adapters; ``{}`` is the folder.

    Raises ConfigError: there is no such folder or id, it holds adapters alone, or the hub cannot be
    reached (``HF_HUB_OFFLINE``).
    """
    name = os.fspath(path_or_hub_id)
    if (folder := _find_local(name, needs_weights, field, for_adapters)) is not None:
        return folder
    if not needs_weights:
        raise error(
            name, f"neither a folder with {CONFIG} nor in this machine's cache of the hub", field
        )
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_DOWNLOADED))
    except hub.errors.HFValidationError:
        raise error(name, "neither a folder nor a hub id (owner/name)", field) from None
    except OSError as failure:  # the hub's own errors are OSErrors too
        problem = f"there is no such folder, and the hub does not provide it: {failure}"
        raise error(name, problem, field) from None


def export_in(folder: Path, field: str = "model.path", for_adapters: str = _AS_SETTING) -> Path:
    """Return ``folder``, or the export in a run's output folder.

    Raises ConfigError: the output folder has no export, or ``folder`` holds adapters alone.
    ``field`` and ``for_adapters`` are as in :func:`resolve`.
    """
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return folder
    if (folder / EXPORT / CONFIG).is_file():
        return folder / EXPORT
    if (folder / "adapter_config.json").is_file():
        base = read_json(folder / "adapter_config.json", field).get("base_model_name_or_path")
        its = f"the model that they belong to ({base})" if base else "the model that they belong to"
        problem = f"holds adapters without {its}; {for_adapters.format(folder)}"
        raise error(folder, problem, field)
    if (folder / "adapter").is_dir():
        what = "adapters alone, without the model that they belong to; "
        what += for_adapters.format(folder / "adapter")
    elif (folder / "checkpoints").is_dir():
        what = f"no export: python -m moetrain.checkpoint export-hf {folder} {folder / EXPORT}"
        what += " writes one now; checkpoint.save_hf yes writes one at the end of a run"
    else:
        return folder
    raise error(folder, f"the output folder of a run, with {what}", field)


def _find_local(name: str, needs_weights: bool, field: str, for_adapters: str) -> Path | None:
    """Find the folder, or a complete snapshot in the hub's cache, without using the network."""
    if not name.strip() or "\0" in name:
        raise error(
            repr(name), "neither a folder nor a hub id (owner/name); give one of them", field
        )
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return export_in(folder, field, for_adapters)
        if folder.exists() or folder.is_symlink():
            kind = "a file" if folder.is_file() else "a link to nothing or no folder"
            problem = f"{kind}; give the folder that holds {CONFIG} and the weights"
            raise error(name, problem, field)
    except (OSError, RuntimeError) as failure:  # too long, not permitted, a user without a home
        reason = failure.strerror if isinstance(failure, OSError) else failure
        raise error(name, f"cannot be opened: {reason}", field) from None
    try:
        snapshot = hub.snapshot_download(name, allow_patterns=_DOWNLOADED, local_files_only=True)
        if needs_weights:
            _shards(Path(snapshot))
    # The cache has no snapshot of this id, or only some of its files.
    except (hub.errors.LocalEntryNotFoundError, hub.errors.HFValidationError, ConfigError):
        return None
    return Path(snapshot) if (Path(snapshot) / CONFIG).is_file() else None


# Reading.
@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn an OSError inside (permissions, a failing disk) into a ConfigError."""
    try:
        yield
    except OSError as failure:
        where = failure.filename or folder
        raise error(where, f"cannot be read ({failure.strerror or failure})") from None


def read_small(path: Path, folder: Path, field: str = "model.path") -> bytes:
    """Read a file of the checkpoint in ``folder`` that holds no weights.

    Raises ConfigError on ``field``: the file does not exist, links to outside of the folder, is not
    a regular file (opening a pipe would wait for ever), is too large, or cannot be read.
    """
    most = next(most for end, most in _MAX_BYTES.items() if path.name.endswith(end))
    try:
        if not os.path.lexists(path):
            raise error(path.parent, f"no {path.name} in it", field)
        return read_regular(follow(path, folder, field), most)
    except FileNotFoundError:
        raise error(path, "a link to nothing", field) from None
    except OSError as failure:
        said = f"cannot be read ({failure.strerror or failure})"
        raise error(path, said, field) from None


def read_json(path: Path, field: str = "model.path") -> dict[str, Any]:
    """Read the JSON object in a file of a checkpoint.

    Raises ConfigError on ``field``: as :func:`read_small`, or the file is not JSON in UTF-8, or
    holds something other than an object.
    """
    content = read_small(path, path.parent, field)
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as failure:
        raise error(path, f"not JSON ({failure})", field) from None
    if not isinstance(value, dict):
        raise error(path, f"holds a {type(value).__name__}, not an object", field)
    return value


def _stored_tensors(folder: Path) -> dict[str, FileTensor]:
    """List every tensor of a checkpoint, from the headers of its files."""
    found: dict[str, FileTensor] = {}
    shards, promised = _shards(folder)
    for shard in shards:
        with open_shard(shard) as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                if name in found:
                    raise error(folder, f"{name} is in {found[name].file.name} and {shard.name}")
                part = file.get_slice(name)
                dtype = part.get_dtype()
                if dtype not in _TYPES or dtype in _NOT_READ:
                    raise error(shard, f"{name} is of dtype {dtype}, which is not read")
                found[name] = FileTensor(shard, _TYPES[dtype], tuple(part.get_shape()))
    if absent := [name for name in promised if name not in found]:
        raise error(folder, f"{INDEX} names {listing(absent)}, which no file holds")
    return found


def find_in(files: Mapping[Path, safe_open], name: str, tensor: FileTensor) -> LazyTensor:
    """Return a tensor of open ``files`` that is read where it is indexed."""
    if tensor.own_rows is not None:
        shape = (tensor.own_rows, *tensor.shape[1:])
        own = find_in(files, name, tensor._replace(shape=shape, own_rows=None))
        return WithNewRows(own, tensor.shape[0])
    if tensor.form is None:
        return files[tensor.file].get_slice(name)
    parts = [files[file].get_slice(part) for part, file in tensor.parts.items()]
    return Dequantised(tensor.form, parts, tensor.shape)


def open_shard(shard: Path) -> safe_open:
    """Open a safetensors file and check its header; ConfigError if it is damaged."""
    with _readable(shard):
        # The library would wait for a pipe, and reports every refusal as a missing file.
        os.close(open_regular(shard))
        try:
            return safe_open(shard, framework="pt")
        except SafetensorError as failure:
            raise error(shard, f"damaged or cut short ({failure}); fetch it again") from None


def _shards(folder: Path) -> tuple[list[Path], list[str]]:
    """List the safetensors files of a checkpoint, and the tensors that its index names."""
    if (folder / SINGLE).is_file():
        return [follow(folder / SINGLE, folder)], []
    if not (folder / INDEX).is_file():
        raise error(folder, f"has neither {SINGLE} nor {INDEX} (other formats are not read)")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise error(folder / INDEX, "has no weight_map")
    for tensor, file in weight_map.items():
        if not _is_inside(file):
            raise error(folder / INDEX, f"{tensor} is in {file!r:.100}, not a file of this folder")
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not os.path.isfile(folder / file)]
    if absent:
        raise error(folder, f"{INDEX} names {listing(absent)}, absent from the folder")
    return [follow(folder / file, folder) for file in files], list(weight_map)


def _is_inside(name: object) -> bool:
    """Return True if ``name`` is a relative path that stays in its folder; ignores links."""
    if not isinstance(name, str) or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


# Writing.
def write_files(folder: Path, files: Mapping[str, Path | str | ConfigJson]) -> list[str]:
    """Write copies, texts and JSON, each atomically.

    Returns the names of copies whose source is gone, or is now a link to another place.
    """
    lost = []
    for name, content in files.items():
        path = folder / name
        follow(path.parent, folder)
        if isinstance(content, Path):
            try:
                source = follow(content, content.parents[name.count("/")])
                path.parent.mkdir(exist_ok=True)
                if not (path.exists() and path.samefile(source)):
                    write_atomically(path, partial(shutil.copyfile, source))
            except (FileNotFoundError, ConfigError):  # gone, or replaced by a link
                lost.append(name)
            continue
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        write_atomically(path, lambda new, text=text: new.write_text(text, encoding="utf-8"))
    return lost


def remove_stale(folder: Path, written: Sequence[str]) -> None:
    """Remove an earlier export's files that this one does not have, and write this one's list.

    Other files of weights are removed even if no export wrote them, because a reader would take
    them for this export's, and so is modelopt's file, because it would take weights for quantised.
    """
    manifest = folder / _MANIFEST
    earlier: object = None
    if manifest.is_file():
        try:
            earlier = read_json(manifest).get("files")
        except ConfigError as failure:
            logger.warning("files of an earlier export are kept: %s", failure.problem)
    write_files(folder, {_MANIFEST: {"files": sorted(written)}})
    names = [path.name for path in folder.iterdir()]
    others = [name for name in names if _SHARD.fullmatch(name) or name == MODELOPT]
    for name in others + (earlier if isinstance(earlier, list) else []):
        if _is_inside(name) and name not in written and _is_within((folder / name).parent, folder):
            (folder / name).unlink(missing_ok=True)
