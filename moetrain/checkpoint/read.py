"""The files of a checkpoint, and reading them on any layout.

Each rank writes pieces of tensors into its own safetensors files. ``manifest.json`` names for every
tensor the files that hold its pieces. It has a CRC-32 of every 4 MiB of the pieces, of every file's
header and of itself. A reader thus takes only the bytes that it needs, and knows that they are the
bytes that were written. The manifest is one line::

    {"format": 2,
     "files": {"model-00000-00.safetensors": [size, length of header, its CRC], "state.json": ...},
     "groups": {"model": {"norm.weight": {"dtype": "F32", "shape": [16],
                                          "pieces": [[file, offset, starts, stops, CRCs]]}}},
     "crc32": "89abcdef"}

Beside a complete ``step-N``, a folder of checkpoints may hold these names:

    failed-step-N       the state of a failed run; it is read only if a user names it
    .step-N.replaced    step N, for the moment in which another save of that step replaces it
    .step-N.<other>     a checkpoint that is being written or removed, or that a killed process left

The checksums detect accidents, not attacks: an attacker who can write the files can write the
manifest too.
Left out on purpose: models and ranks, and the choice of the checkpoint that a run resumes
(:mod:`moetrain.train.run_folder`).
"""

import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from pydantic import AfterValidator, PlainSerializer, PlainValidator, TypeAdapter, ValidationError
from safetensors.torch import _TYPES

from moetrain.config import ConfigError
from moetrain.config.files import open_regular, read_regular
from moetrain.config.sources import shortened

FORMAT = 2
"""Version of the format. Version 1, which is no longer read, had whole tensors and no manifest."""
MANIFEST = "manifest.json"
STATE = "state.json"
CHUNK = 4 << 20
"""Bytes under one checksum: few enough that reading a part of a piece wastes little, and enough for
a disk to read at full speed."""
_CRC_DIGITS = 8
MAX_BYTES = 1 << 30
"""The largest size of a manifest or ``state.json`` in bytes. The manifest of a 200 TiB checkpoint
has this size."""
_SEAL = re.compile(rb', "crc32": "([0-9a-f]{8})"}\n')
_SEAL_BYTES = len(', "crc32": "89abcdef"}\n')
_NAME = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.replaced")
_READERS = 8
"""Threads of a rank that read and check. They fill a disk's queue; a core checks 2 GiB/s."""
_POOL = ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-read")


class DamagedCheckpoint(ConfigError):
    """A checkpoint's files are not what was written; an earlier checkpoint may be intact."""

    def __init__(self, path: Path, why: object) -> None:
        said = why.strerror if isinstance(why, OSError) and why.strerror else why
        super().__init__("checkpoint.resume", f"cannot read {str(path)!r}: {said}")


def sealed(text: str) -> bytes:
    """Add to ``text``, a JSON object that is not empty, its checksum as the last key."""
    body = text.encode()[:-1]
    return body + f', "crc32": "{crc_of(body)}"}}\n'.encode()


def holds_seal(data: bytes) -> bool | None:
    """Return whether ``data`` is what :func:`sealed` returned, or None if it has no checksum."""
    seal = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    return None if seal is None else crc_of(memoryview(data)[:-_SEAL_BYTES]) == seal[1].decode()


def crc_of(data: bytes | memoryview) -> str:
    """Return the CRC-32 in hexadecimal."""
    return f"{zlib.crc32(data):08x}"


def _plain(name: str) -> str:
    """Return ``name`` if it is a plain file name, which leads to no other folder."""
    if not name or name.startswith(".") or os.path.basename(name) != name:
        raise ValueError(f"{name!r:.100} is not the name of a checkpoint file")
    return name


_Name = Annotated[str, AfterValidator(_plain)]
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _TYPES.items()}


class FilePiece(NamedTuple):
    """A piece ``whole[starts:stops]`` of a tensor lies row-major in ``file`` from ``offset`` on."""

    file: _Name
    offset: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    crcs: str
    """Checksums of the piece's chunks of :data:`CHUNK` bytes, 8 hexadecimal digits each."""

    @property
    def numel(self) -> int:
        """The number of elements of the piece."""
        return math.prod(b - a for a, b in zip(self.starts, self.stops, strict=True))


@dataclass(frozen=True)
class ManifestEntry:
    """One tensor of a group."""

    dtype: Annotated[
        torch.dtype, PlainValidator(_TYPES.__getitem__), PlainSerializer(DTYPE_NAMES.__getitem__)
    ]
    shape: tuple[int, ...]
    pieces: tuple[FilePiece, ...]
    """The pieces of the tensor, which never overlap."""

    def joined(self, name: str, other: Self) -> Self:
        """Return this entry with the pieces of ``other`` that it lacks; errors mention ``name``."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            raise ValueError(f"ranks have {name!r} in different dtypes or shapes")
        boxes = {(piece.starts, piece.stops) for piece in self.pieces}
        new = (piece for piece in other.pieces if (piece.starts, piece.stops) not in boxes)
        return replace(self, pieces=(*self.pieces, *new))


class FileSum(NamedTuple):
    """Size and checksum of a file, as the manifest has them."""

    size: int
    head: int
    """Bytes at the beginning of the file that ``crc`` covers."""
    crc: str


@dataclass(frozen=True)
class Contents:
    """The contents of some files of a checkpoint: one rank's report, or the whole manifest."""

    files: dict[_Name, FileSum]
    groups: dict[str, dict[str, ManifestEntry]]

    def to_json(self) -> dict[str, object]:
        """Return the object that the manifest holds."""
        return _CONTENTS.dump_python(self, mode="json")

    @classmethod
    def from_json(cls, value: Any) -> "Contents":
        """Invert :meth:`to_json`; raises KeyError, TypeError or ValueError for anything else."""
        try:
            return _CONTENTS.validate_python(value)
        except ValidationError as error:  # its own text has several lines
            raise ValueError(error.errors()[0]["msg"]) from None

    def add(self, other: Self) -> None:
        """Add the contents of ``other``. A piece that is here already stays."""
        self.files.update(other.files)
        for group, entries in other.groups.items():
            known = self.groups.setdefault(group, {})
            for name, entry in entries.items():
                known[name] = known[name].joined(name, entry) if name in known else entry

    @classmethod
    def together(cls, parts: Sequence[Self]) -> Self:
        """Join all ranks' reports. A piece that several ranks have is taken from the first.

        Raises ValueError: the pieces of a tensor do not make up the whole tensor, or ranks disagree
        about its dtype or shape.
        """
        whole = cls({}, {})
        for part in parts:
            whole.add(part)
        for group, entries in whole.groups.items():
            sizes = {name: sum(p.numel for p in entry.pieces) for name, entry in entries.items()}
            lacking = [n for n, size in sizes.items() if size != math.prod(entries[n].shape)]
            if lacking:
                raise ValueError(f"group {group!r} lacks parts of {lacking[:3]}")
        return whole


_CONTENTS = TypeAdapter(Contents)


# ---- names of folders ----------------------------------------------------------------------------


def checkpoint_name(step: int, *, failed: bool = False) -> str:
    """Return the name of a step's folder, such as ``step-00000100``."""
    return f"{'failed-' if failed else ''}step-{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """Return the step in a folder's name; None if :func:`list_checkpoints` would not list it."""
    match = _NAME.fullmatch(checkpoint.name)
    return None if match is None else int(match[1] or match[2])


def list_checkpoints(root: Path) -> list[Path]:
    """List the complete checkpoints under ``root``, oldest first, without those of failed runs."""
    if not root.is_dir():
        return []
    # Hidden names come first, so that a replaced folder gives way to another of the same step.
    found = {step_of(path): path for path in sorted(root.iterdir())}
    return [found[step] for step in sorted(step for step in found if step is not None)]


def newest_in(path: Path) -> Path:
    """Return the newest checkpoint in ``path``, a folder of a run or of checkpoints.

    If there is none, return ``path`` itself.
    """
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    return found[-1] if found else path


# ---- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, indexed like one in memory: ``stored[box]`` is read and checked.

    A read takes host memory for its result and, where a box cuts a piece's columns, for whole rows
    of the piece. A read raises DamagedCheckpoint if bytes have changed.
    """

    folder: Path
    entry: ManifestEntry

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.dtype

    def __getitem__(self, box: tuple[slice, ...]) -> torch.Tensor:
        """Read ``box`` to the CPU: a slice for each dim, or ``()`` for the whole tensor."""
        wanted = [part.indices(size)[:2] for part, size in zip(box, self.shape, strict=False)]
        wanted += [(0, size) for size in self.shape[len(wanted) :]]
        whole = torch.empty([stop - start for start, stop in wanted], dtype=self.dtype)
        lacking = whole.numel()
        lacking -= sum(self._copy(piece, wanted, whole) for piece in self.entry.pieces)
        if lacking:
            problem = f"it lists no file for {lacking} elements of a tensor"
            raise DamagedCheckpoint(self.folder / MANIFEST, problem)
        return whole

    def _copy(self, piece: FilePiece, wanted: list[tuple[int, int]], out: torch.Tensor) -> int:
        """Copy the part of ``wanted`` that ``piece`` has into ``out``; return its number of
        elements."""
        mine = list(zip(piece.starts, piece.stops, strict=True))
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(mine, wanted, strict=True)]
        if any(start >= stop for start, stop in both):
            return 0
        if not mine:
            self._read(piece, 0, out.nbytes, out)
            return 1
        target = out[_inside(both, wanted)]
        sizes = [stop - start for start, stop in mine]
        row = self.dtype.itemsize * math.prod(sizes[1:])
        first, last = (end - piece.starts[0] for end in both[0])
        if both[1:] == mine[1:] and target.is_contiguous():
            self._read(piece, first * row, last * row, target)
        else:
            rows = torch.empty([last - first, *sizes[1:]], dtype=self.dtype)
            self._read(piece, first * row, last * row, rows)
            target.copy_(rows[(slice(None), *_inside(both[1:], mine[1:]))])
        return target.numel()

    def _read(self, piece: FilePiece, start: int, stop: int, out: torch.Tensor) -> None:
        """Read bytes ``start`` to ``stop`` of ``piece`` into ``out``, which is contiguous."""
        path, size = self.folder / piece.file, self.dtype.itemsize * piece.numel
        buffer = out.view(-1).view(torch.uint8).numpy()
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise DamagedCheckpoint(path, error) from None

        def read(index: int) -> None:
            first, last = index * CHUNK, min((index + 1) * CHUNK, size)
            low, high = max(first, start), min(last, stop)
            is_all = (low, high) == (first, last)
            into = buffer[low - start : high - start]
            chunk = into if is_all else np.empty(last - first, np.uint8)
            self._read_chunk(descriptor, piece, index, chunk)
            if not is_all:
                into[:] = chunk[low - first : high - first]

        try:
            chunks = range(start // CHUNK, -(-stop // CHUNK))
            for _ in map(read, chunks) if len(chunks) < 2 else _POOL.map(read, chunks):
                pass
        except OSError as error:
            raise DamagedCheckpoint(path, error) from None
        finally:
            os.close(descriptor)

    def _read_chunk(self, descriptor: int, piece: FilePiece, index: int, chunk: np.ndarray) -> None:
        view, done = memoryview(chunk.data), 0
        while done < len(view):
            got = os.preadv(descriptor, [view[done:]], piece.offset + index * CHUNK + done)
            if not got:
                raise DamagedCheckpoint(self.folder / piece.file, "it is cut short")
            done += got
        if crc_of(view) != piece.crcs[index * _CRC_DIGITS :][:_CRC_DIGITS]:
            start = piece.offset + index * CHUNK
            where = f"bytes {start} to {start + len(view)}"
            what = f"{where} are not what was written (a checksum differs)"
            raise DamagedCheckpoint(self.folder / piece.file, what)

    def check(self, rank: int = 0, ranks: int = 1) -> None:
        """Read and check one rank's share of the pieces; raises DamagedCheckpoint."""
        for piece in self.entry.pieces[rank::ranks]:
            size, step = self.dtype.itemsize * piece.numel, _READERS * CHUNK
            scratch = torch.empty(min(step, size), dtype=torch.uint8)
            for start in range(0, size, step):
                stop = min(start + step, size)
                self._read(piece, start, stop, scratch[: stop - start])


def _inside(box: list[tuple[int, int]], outer: list[tuple[int, int]]) -> tuple[slice, ...]:
    """Return ``box`` as slices of a tensor that covers ``outer``."""
    pairs = zip(box, outer, strict=True)
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in pairs)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk; a tensor is read when it is indexed."""

    folder: Path
    state: dict[str, Any]
    contents: Contents = field(repr=False)

    def group(self, name: str) -> dict[str, StoredTensor]:
        """Return the tensors of a group, unread; DamagedCheckpoint: there is no such group."""
        groups = self.contents.groups
        if name not in groups:
            raise DamagedCheckpoint(
                self.folder, f"it has no group {name!r}; its groups are {[*groups]}"
            )
        return {key: StoredTensor(self.folder, entry) for key, entry in groups[name].items()}

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Read the tensors of a group, whole, to the CPU; raises DamagedCheckpoint."""
        return {key: stored[()] for key, stored in self.group(name).items()}

    def stored(self) -> Iterator[tuple[str, str, StoredTensor]]:
        """Iterate over every tensor with its group and name."""
        for group in self.contents.groups:
            for name, stored in self.group(group).items():
                yield group, name, stored


def open_checkpoint(folder: Path, *, is_whole: bool = True) -> Checkpoint:
    """Open a checkpoint, and check all that can be checked without reading its tensors.

    Files with tensors may be missing if ``is_whole`` is False.

    Raises:
        ConfigError: ``folder`` is not a checkpoint, or has another version of the format.
        DamagedCheckpoint: the manifest or ``state.json`` differs from what was written, or a file
            has another size or header; the message names the file.
    """
    if not folder.is_dir() or not os.path.lexists(folder / MANIFEST):
        raise _without_manifest(folder)
    contents, state = _read_manifest(folder, is_whole)
    if step_of(folder) not in (None, state["step"]):
        problem = f"its 'step' is {shortened(state['step'])}, but the folder's name has another"
        raise DamagedCheckpoint(folder / STATE, problem)
    return Checkpoint(folder, state, contents)


def _without_manifest(folder: Path) -> ConfigError:
    """Return the error for a folder without a manifest.

    The error says whether the folder is a damaged checkpoint, one of format 1, or none at all.
    """
    names = os.listdir(folder) if folder.is_dir() else []
    has_weights = any(name.endswith(".safetensors") for name in names)
    if has_weights and "config.json" in names and step_of(folder) is None:
        return ConfigError(
            "checkpoint.resume",
            f"{str(folder)!r} is not a run's checkpoint but a Hugging Face one: give it as "
            "model.path, or make one of it (python -m moetrain.checkpoint import-hf)",
        )
    if has_weights and STATE in names:
        try:
            state = json.loads(read_regular(folder / STATE, MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            state = None  # the file is damaged, whatever version wrote it
        if isinstance(state, dict):  # version 1 of the format writes no "format"
            _check_version(state.get("format", 1), folder)
    if has_weights or step_of(folder) is not None:
        return DamagedCheckpoint(folder / MANIFEST, "the file is missing")
    problem = f"it has no {MANIFEST}" if folder.is_dir() else "there is no such folder"
    return ConfigError(
        "checkpoint.resume",
        f"{str(folder)!r} is not a checkpoint: {problem}; give a step-... folder, or the "
        "output_dir of a run that has saved one",
    )


def _read_manifest(folder: Path, is_whole: bool) -> tuple[Contents, dict[str, Any]]:
    """Read the manifest and the state of ``folder``, and check the size and header of each file."""
    path = folder / MANIFEST
    try:
        data = read_regular(path, MAX_BYTES)
        if not holds_seal(data):
            raise DamagedCheckpoint(path, "it is not what was written (its checksum differs)")
        value = json.loads(data)
        _check_version(value["format"], folder)
        contents = Contents.from_json(value)
        for name, known in contents.files.items():
            path = folder / name
            if not is_whole and not os.path.lexists(path):
                continue
            head, size = read_regular(path, MAX_BYTES, known.head), path.stat().st_size
            if size != known.size:
                problem = f"it has {size} bytes, not {known.size}: cut short, or changed"
                raise DamagedCheckpoint(path, problem)
            if crc_of(head) != known.crc:
                problem = "its beginning is not what was written (a checksum differs)"
                raise DamagedCheckpoint(path, problem)
        path = folder / STATE
        return contents, json.loads(read_regular(path, MAX_BYTES))
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise DamagedCheckpoint(path, error) from None


def _check_version(version: object, folder: Path) -> None:
    """Raise ConfigError for a checkpoint that has another version of the format."""
    if version != FORMAT:
        raise ConfigError(
            "checkpoint.resume",
            f"{str(folder)!r} has checkpoint format {version!r:.20}, but this version reads "
            f"only {FORMAT}; continue with the version that wrote it, or export its weights with "
            "that version (checkpoint.save_hf yes) and begin from the export as model.path",
        )
