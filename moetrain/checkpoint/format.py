"""The files of a checkpoint: tensors in pieces as safetensors, and a manifest that vouches for all.

Each rank writes pieces of tensors into files of its own; ``manifest.json`` says of every tensor in
which files its pieces lie, and has a CRC-32 of every 4 MiB of them, of every file's header and of
itself. So a reader takes the bytes it needs alone, and knows that they are what was written. The
files are safetensors that any program reads: their headers are not needed here, but are checked.

``manifest.json``, of one line::

    {"format": 2,
     "files": {"model-00000-00.safetensors": [size, length of header, its CRC], "state.json": ...},
     "groups": {"model": {"norm.weight": {"dtype": "F32", "shape": [16],
                                          "pieces": [[file, offset, starts, stops, CRCs]]}}},
     "crc32": "89abcdef"}

Left out on purpose: folders and their names (:mod:`moetrain.checkpoint.folder`), models, ranks. The
checksums find accidents, not intent: whoever writes the files can write the manifest.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from moetrain.config import ConfigError
from moetrain.models.hf.files import DTYPES
from moetrain.parallel.layout import TensorSlice

FORMAT = 2
"""Version of the files. Version 1, which is no longer read, had whole tensors and no manifest."""
MANIFEST, STATE = "manifest.json", "state.json"
CHUNK = 4 << 20
"""Bytes under one checksum: little to read in vain where a piece is cut, and long for a disk."""
CRC_DIGITS = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SEAL = re.compile(rb', "crc32": "([0-9a-f]{8})"}\n')
_SEAL_BYTES = len(', "crc32": "89abcdef"}\n')


def sealed(text: str) -> bytes:
    """``text``, an object of JSON that is not empty, with a checksum of it as its last key."""
    body = text.encode()[:-1]
    return body + f', "crc32": "{crc_of(body)}"}}\n'.encode()


def holds_seal(data: bytes) -> bool | None:
    """Whether ``data`` is what :func:`sealed` gave; None: it has no checksum."""
    seal = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    return None if seal is None else crc_of(memoryview(data)[:-_SEAL_BYTES]) == seal[1].decode()


class DamagedCheckpoint(ConfigError):
    """A checkpoint's files are not what was written; an earlier one may do."""


def unreadable(path: Path, why: object) -> DamagedCheckpoint:
    """The error of a file that cannot be read, or not trusted."""
    return DamagedCheckpoint("checkpoint.resume", f"cannot read {str(path)!r}: {why}")


@dataclass(frozen=True)
class FilePiece:
    """Where a piece of a tensor lies: ``whole[starts:stops]``, row-major, from ``offset`` on."""

    file: str
    offset: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    crcs: str
    """Checksums of the piece's chunks of :data:`CHUNK` bytes, 8 hexadecimal digits each."""


@dataclass(frozen=True)
class ManifestEntry:
    """One tensor of a group."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[FilePiece, ...]

    def covers(self) -> bool:
        """Whether the pieces, which lie apart, are the whole."""
        numels = (_numel(p.starts, p.stops) for p in self.pieces)
        return sum(numels) == torch.Size(self.shape).numel()


class FileSum(NamedTuple):
    """What is known of a file by itself."""

    size: int
    head: int
    """Bytes at its beginning, of which ``crc`` is."""
    crc: str


@dataclass(frozen=True)
class Contents:
    """What lies in some files of a checkpoint; a rank's report, or all of it."""

    files: dict[str, FileSum]
    groups: dict[str, dict[str, ManifestEntry]]

    def to_json(self) -> dict[str, Any]:
        """As in the manifest."""
        groups = {
            group: {
                name: {
                    "dtype": _NAMES[entry.dtype],
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
        """Inverse of :meth:`to_json`; KeyError, TypeError or ValueError: it is none."""
        files = {_plain(name): FileSum(*known) for name, known in value["files"].items()}
        groups = {
            group: {
                name: ManifestEntry(
                    DTYPES[entry["dtype"]],
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
        """Of all ranks' reports, one. A piece that several have is taken from the first.

        Raises:
            ValueError: a tensor is not whole, or is one thing here and another there.
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
    """A file's name, which leads nowhere else."""
    if not name or name.startswith(".") or os.path.basename(name) != name:
        raise ValueError(f"{name!r:.100} is no file of a checkpoint")
    return name


def _numel(starts: Sequence[int], stops: Sequence[int]) -> int:
    numel = 1
    for start, stop in zip(starts, stops, strict=True):
        numel *= stop - start
    return numel


def crc_of(data: bytes | memoryview) -> str:
    """CRC-32, in hexadecimal."""
    return f"{zlib.crc32(data):08x}"


# ---- writing ------------------------------------------------------------------------------------


def write_tensors(path: Path, group: str, parts: Mapping[str, TensorSlice]) -> Contents:
    """Write the parts of a group to one new safetensors file, and force it to the disk.

    Takes host memory of one :data:`CHUNK`, wherever the tensors are.

    Raises:
        OSError: it cannot be written.
    """
    # Wide dtypes first, so that every tensor is aligned.
    names = sorted(parts, key=lambda name: -parts[name].tensor.element_size())
    header, offsets, end = _header({name: parts[name].tensor for name in names})
    entries = {}
    with path.open("xb", buffering=0) as file:
        write_all(file.fileno(), header)
        for name in names:
            tensor, shape, box, *_ = parts[name]
            crcs = []
            for chunk in host_chunks(tensor.detach()):
                crcs.append(crc_of(chunk))
                write_all(file.fileno(), chunk)
            starts, stops = tuple(s.start for s in box), tuple(s.stop for s in box)
            piece = FilePiece(path.name, offsets[name], starts, stops, "".join(crcs))
            entries[name] = ManifestEntry(tensor.dtype, tuple(shape), (piece,))
        os.fsync(file.fileno())
    return Contents({path.name: FileSum(end, len(header), crc_of(header))}, {group: entries})


def _header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int], int]:
    """A safetensors file's first bytes, where each tensor then begins, and the file's size."""
    described: dict[str, Any] = {}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        shape = list(tensor.shape)
        described[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    offsets = {name: len(header) + known["data_offsets"][0] for name, known in described.items()}
    return header, offsets, len(header) + start


def host_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of ``tensor``, row-major, a :data:`CHUNK` at a time; valid until the next."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    bounce = torch.empty(0)
    if flat.is_cuda:
        bounce = torch.empty(min(CHUNK, flat.numel()), dtype=torch.uint8, pin_memory=True)
    for chunk in flat.split(CHUNK) if flat.numel() else ():
        if chunk.is_cuda:
            chunk = bounce[: chunk.numel()].copy_(chunk)
        # Not chunk.numpy(), after which torch lets nobody resize the storage, as offloading does.
        yield memoryview((ctypes.c_char * chunk.numel()).from_address(chunk.data_ptr())).cast("B")


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """``os.write``, of everything."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_manifest(folder: Path, contents: Contents, state: Mapping[str, Any]) -> None:
    """Write ``state.json``, and the manifest of it and of all that ``contents`` names.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps({**state, "format": FORMAT}, indent=1).encode()
    _write_file(folder / STATE, text)
    files = {**contents.files, STATE: FileSum(len(text), len(text), crc_of(text))}
    body = {"format": FORMAT, **Contents(files, contents.groups).to_json()}
    _write_file(folder / MANIFEST, sealed(json.dumps(body)))


def _write_file(path: Path, data: bytes) -> None:
    with path.open("xb", buffering=0) as file:
        write_all(file.fileno(), data)
        os.fsync(file.fileno())


# ---- reading ------------------------------------------------------------------------------------


def open_file(path: Path) -> BinaryIO:
    """``path``, to be read; OSError if there is none, or a pipe, where reading would wait."""
    if not path.is_file():
        what = "a folder, a pipe, or a link to nothing" if os.path.lexists(path) else "no file"
        raise OSError(f"it is {what}")
    return path.open("rb")


def read_manifest(folder: Path) -> tuple[Contents, dict[str, Any]]:
    """What lies in ``folder``, and its state; the bytes of tensors are not looked at.

    Raises:
        DamagedCheckpoint: a file is missing, or not of its size, or its beginning is not what was
        written.
        ConfigError: it is of another version.
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
    """Raise ConfigError for a checkpoint that another version of the format describes."""
    if version != FORMAT:
        raise ConfigError(
            "checkpoint.resume",
            f"{str(folder)!r} has checkpoint format {version!r:.20}, and this version reads "
            f"{FORMAT} alone; continue with the version that wrote it, or export its weights there "
            "(checkpoint.save_hf yes) and begin from the export as model.path",
        )


def _check_beginning(path: Path, known: FileSum) -> None:
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != known.size:
            raise unreadable(path, f"it has {size} bytes, not {known.size}: cut short, or changed")
        if crc_of(file.read(known.head)) != known.crc:
            raise unreadable(path, "its beginning is not what was written (a checksum differs)")
