"""The files of a checkpoint, their manifest, and the names of checkpoints' folders.

Each rank writes pieces of tensors into safetensors files of its own. ``manifest.json`` says for
every tensor in which files its pieces lie, and holds a CRC-32 of every 4 MiB of them, of every
file's header and of itself. So a reader takes only the bytes that it needs, and knows that they are
what was written. Any program can read the safetensors files by their headers, which are not used
here but are checked.

``manifest.json`` is one line::

    {"format": 2,
     "files": {"model-00000-00.safetensors": [size, length of header, its CRC], "state.json": ...},
     "groups": {"model": {"norm.weight": {"dtype": "F32", "shape": [16],
                                          "pieces": [[file, offset, starts, stops, CRCs]]}}},
     "crc32": "89abcdef"}

Beside a complete ``step-N``, a folder of checkpoints may hold these names:

    failed-step-N       what a failed run left, which is read only where it is named
    .step-N.replaced    step N, for the instant in which another save of that step takes its place
    .step-N.<other>     a checkpoint that is being written or removed, or that a killed process left

Left out on purpose: models and ranks, and which checkpoint a run resumes
(:mod:`moetrain.train.run_folder`). The checksums find accidents, not intent: whoever can write the
files can write the manifest.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from moetrain.config import ConfigError
from moetrain.config.files import SAFETENSORS_DTYPES, fsync
from moetrain.parallel.layout import TensorSlice

_FORMAT = 2
"""Version of the files. Version 1, which is no longer read, had whole tensors and no manifest."""
MANIFEST, STATE = "manifest.json", "state.json"
CHUNK = 4 << 20
"""Bytes under one checksum: few to read in vain where a piece is cut, and many for a disk."""
CRC_DIGITS = 8
_DTYPES = {name: getattr(torch, dtype) for name, dtype in SAFETENSORS_DTYPES.items()}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SEAL = re.compile(rb', "crc32": "([0-9a-f]{8})"}\n')
_SEAL_BYTES = len(', "crc32": "89abcdef"}\n')
_NAME = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.replaced")
_LEFTOVER = re.compile(r"\.((?:failed-)?step-\d{8,})\.(\w+)")

logger = logging.getLogger("moetrain")


def sealed(text: str) -> bytes:
    """Add to ``text``, a JSON object that is not empty, its checksum as the last key."""
    body = text.encode()[:-1]
    return body + f', "crc32": "{crc_of(body)}"}}\n'.encode()


def holds_seal(data: bytes) -> bool | None:
    """Return whether ``data`` is what :func:`sealed` returned, or None if it has no checksum."""
    seal = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    return None if seal is None else crc_of(memoryview(data)[:-_SEAL_BYTES]) == seal[1].decode()


class DamagedCheckpoint(ConfigError):
    """A checkpoint's files are not what was written; an earlier checkpoint may be intact."""


def unreadable(path: Path, why: object) -> DamagedCheckpoint:
    """Make the error for a file that cannot be read or cannot be trusted."""
    return DamagedCheckpoint("checkpoint.resume", f"cannot read {str(path)!r}: {why}")


@dataclass(frozen=True)
class FilePiece:
    """A piece ``whole[starts:stops]`` of a tensor lies row-major in ``file`` from ``offset`` on."""

    file: str
    offset: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    crcs: str
    """Checksums of the piece's chunks of :data:`CHUNK` bytes, 8 hexadecimal digits each."""

    @property
    def numel(self) -> int:
        """How many numbers the piece has."""
        return torch.Size(b - a for a, b in zip(self.starts, self.stops, strict=True)).numel()


@dataclass(frozen=True)
class ManifestEntry:
    """One tensor of a group."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[FilePiece, ...]

    def covers(self) -> bool:
        """Return whether the pieces, which never overlap, make up the whole tensor."""
        return sum(piece.numel for piece in self.pieces) == torch.Size(self.shape).numel()


class _FileSum(NamedTuple):
    """What the manifest says of a file as such."""

    size: int
    head: int
    """How many bytes at the beginning ``crc`` is the checksum of."""
    crc: str


@dataclass(frozen=True)
class Contents:
    """What lies in some files of a checkpoint: one rank's report, or the whole manifest."""

    files: dict[str, _FileSum]
    groups: dict[str, dict[str, ManifestEntry]]

    def to_json(self) -> dict[str, Any]:
        """Return the object that the manifest holds."""
        groups = {
            group: {
                name: {
                    "dtype": _DTYPE_NAMES[entry.dtype],
                    "shape": entry.shape,
                    "pieces": [astuple(piece) for piece in entry.pieces],
                }
                for name, entry in entries.items()
            }
            for group, entries in self.groups.items()
        }
        return {"files": self.files, "groups": groups}

    @classmethod
    def from_json(cls, value: Any) -> Contents:
        """Invert :meth:`to_json`; raises KeyError, TypeError or ValueError for anything else."""
        files = {_plain(name): _FileSum(*known) for name, known in value["files"].items()}
        groups = {
            group: {
                name: ManifestEntry(
                    _DTYPES[entry["dtype"]],
                    tuple(entry["shape"]),
                    tuple(
                        FilePiece(_plain(file), offset, tuple(starts), tuple(stops), crcs)
                        for file, offset, starts, stops, crcs in entry["pieces"]
                    ),
                )
                for name, entry in entries.items()
            }
            for group, entries in value["groups"].items()
        }
        return cls(files, groups)

    @classmethod
    def together(cls, parts: Sequence[Contents]) -> Contents:
        """Join all ranks' reports. A piece that several ranks have is taken from the first.

        Raises:
            ValueError: the pieces of a tensor are not the whole, or ranks disagree about its dtype
                or shape.
        """
        whole = cls({}, {})
        for part in parts:
            whole.files.update(part.files)
            for group, entries in part.groups.items():
                known = whole.groups.setdefault(group, {})
                for name, entry in entries.items():
                    known[name] = _joined(name, known[name], entry) if name in known else entry
        for group, entries in whole.groups.items():
            lacking = [name for name, entry in entries.items() if not entry.covers()]
            if lacking:
                raise ValueError(f"nobody has all of {lacking[:3]} of group {group!r}")
        return whole


def _joined(name: str, one: ManifestEntry, two: ManifestEntry) -> ManifestEntry:
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        raise ValueError(f"ranks have {name!r} in different dtypes or shapes")
    boxes = {(piece.starts, piece.stops) for piece in one.pieces}
    new = (piece for piece in two.pieces if (piece.starts, piece.stops) not in boxes)
    return ManifestEntry(one.dtype, one.shape, (*one.pieces, *new))


def _plain(name: str) -> str:
    """Return ``name`` if it is a plain file name, which leads to no other folder."""
    if not name or name.startswith(".") or os.path.basename(name) != name:
        raise ValueError(f"{name!r:.100} is no file of a checkpoint")
    return name


def crc_of(data: bytes | memoryview) -> str:
    """Return the CRC-32 in hexadecimal."""
    return f"{zlib.crc32(data):08x}"


# ---- writing ------------------------------------------------------------------------------------


def write_tensors(path: Path, group: str, parts: Mapping[str, TensorSlice]) -> Contents:
    """Write parts of a group to a new safetensors file, and force it to the disk.

    It takes host memory for one :data:`CHUNK`, wherever the tensors are.

    Raises:
        OSError: the file cannot be written.
    """
    # Wide dtypes first, so that every tensor is aligned.
    names = sorted(parts, key=lambda name: -parts[name].tensor.element_size())
    header, offsets, end = _header({name: parts[name].tensor for name in names})
    entries = {}
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), header)
        for name in names:
            tensor, shape, box, *_ = parts[name]
            crcs = []
            for chunk in _host_chunks(tensor.detach()):
                crcs.append(crc_of(chunk))
                _write_all(file.fileno(), chunk)
            starts, stops = tuple(s.start for s in box), tuple(s.stop for s in box)
            piece = FilePiece(path.name, offsets[name], starts, stops, "".join(crcs))
            entries[name] = ManifestEntry(tensor.dtype, tuple(shape), (piece,))
        os.fsync(file.fileno())
    return Contents({path.name: _FileSum(end, len(header), crc_of(header))}, {group: entries})


def _header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int], int]:
    """Return a safetensors file's header, the offset of each tensor, and the file's size."""
    described: dict[str, Any] = {}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        described[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    offsets = {name: len(header) + known["data_offsets"][0] for name, known in described.items()}
    return header, offsets, len(header) + start


def _host_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of ``tensor``, row-major, a :data:`CHUNK` at a time, valid until the next."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    bounce = torch.empty(0)
    if flat.is_cuda:
        bounce = torch.empty(min(CHUNK, flat.numel()), dtype=torch.uint8, pin_memory=True)
    for chunk in flat.split(CHUNK) if flat.numel() else ():
        if chunk.is_cuda:
            chunk = bounce[: chunk.numel()].copy_(chunk)
        # Not chunk.numpy(), after which torch lets nobody resize the storage, as offloading does.
        yield memoryview((ctypes.c_char * chunk.numel()).from_address(chunk.data_ptr())).cast("B")


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of ``data``, which one ``os.write`` need not do."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_manifest(folder: Path, contents: Contents, state: Mapping[str, Any]) -> None:
    """Write ``state.json``, and the manifest of it and of all that ``contents`` names.

    Raises:
        OSError: a file cannot be written.
    """
    text = json.dumps({**state, "format": _FORMAT}, indent=1).encode()
    _write_file(folder / STATE, text)
    files = {**contents.files, STATE: _FileSum(len(text), len(text), crc_of(text))}
    body = {"format": _FORMAT, **Contents(files, contents.groups).to_json()}
    _write_file(folder / MANIFEST, sealed(json.dumps(body)))


def _write_file(path: Path, data: bytes) -> None:
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), data)
        os.fsync(file.fileno())


# ---- reading ------------------------------------------------------------------------------------


def open_file(path: Path) -> BinaryIO:
    """Open ``path`` to read it; raises OSError for anything but a file (a pipe would block)."""
    if not path.is_file():
        what = "a folder, a pipe, or a link to nothing" if os.path.lexists(path) else "no file"
        raise OSError(f"it is {what}")
    return path.open("rb")


def read_manifest(folder: Path) -> tuple[Contents, dict[str, Any]]:
    """Read the manifest and the state of ``folder``; no tensors are read.

    Raises:
        DamagedCheckpoint: a file is missing, has another size than the manifest says, or begins
            with other bytes than were written.
        ConfigError: the checkpoint has another version of the format.
    """
    path = folder / MANIFEST
    try:
        with open_file(path) as file:
            data = file.read()
        if not holds_seal(data):
            raise unreadable(path, "it is not what was written (its checksum differs)")
        value = json.loads(data)
        check_version(value["format"], folder)
        contents = Contents.from_json(value)
        for name, known in contents.files.items():
            path = folder / name
            _check_beginning(path, known)
        path = folder / STATE
        with open_file(path) as file:
            return contents, json.loads(file.read())
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise unreadable(path, error) from None


def check_version(version: object, folder: Path) -> None:
    """Raise ConfigError for a checkpoint that has another version of the format."""
    if version != _FORMAT:
        raise ConfigError(
            "checkpoint.resume",
            f"{str(folder)!r} has checkpoint format {version!r:.20}, and this version reads "
            f"{_FORMAT} alone; continue with the version that wrote it, or export its weights "
            "there (checkpoint.save_hf yes) and begin from the export as model.path",
        )


def _check_beginning(path: Path, known: _FileSum) -> None:
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != known.size:
            raise unreadable(path, f"it has {size} bytes, not {known.size}: cut short, or changed")
        if crc_of(file.read(known.head)) != known.crc:
            raise unreadable(path, "its beginning is not what was written (a checksum differs)")


# ---- folders ------------------------------------------------------------------------------------


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
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()):  # hidden names first: a replaced step gives way
        if (step := step_of(path)) is not None:
            found[step] = path
    return [found[step] for step in sorted(found)]


def newest_in(path: Path) -> Path:
    """Return the newest checkpoint in ``path``, a run's output folder or a folder of checkpoints.

    If it holds none, ``path`` itself is returned, which should then be a checkpoint.
    """
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    return found[-1] if found else path


def remove_leftovers(root: Path) -> None:
    """Remove what killed processes left half written or half removed.

    Only a process that has ``root`` to itself may call this: it would remove what another live
    process is writing.
    """
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if match := _LEFTOVER.fullmatch(path.name):
            final = root / match[1]
            if match[2] == "replaced" and not final.exists():
                path.rename(final)
            else:
                shutil.rmtree(path, ignore_errors=True)


def begin(final: Path) -> Path:
    """Make an empty folder beside ``final``, to be filled and then passed to :func:`commit`.

    Raises:
        OSError: it cannot be made.
    """
    new = _hidden(final, str(os.getpid()))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    return new


def commit(new: Path, final: Path) -> None:
    """Rename ``new``, whose files are complete and on the disk, to ``final``.

    If there was a complete ``final``, there is one at every instant, whenever this process dies.

    Raises:
        OSError: it cannot be renamed; ``final`` is unchanged.
    """
    replaced = _hidden(final, "replaced")
    fsync(new)
    try:
        if final.exists():  # this very step was saved before
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)  # which counts as this step while there is no other
        new.rename(final)
        fsync(final.parent)
    finally:
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint; at no instant does it look like a damaged one."""
    removed = _hidden(checkpoint, "removed")
    try:
        shutil.rmtree(removed, ignore_errors=True)
        checkpoint.rename(removed)
        shutil.rmtree(removed)
    except OSError as error:
        logger.warning("the old checkpoint %s could not be removed: %s", checkpoint, error)


def _hidden(checkpoint: Path, kind: str) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.{kind}")
