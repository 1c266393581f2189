"""Reading checkpoints: each rank reads what it needs, whatever layout wrote it.

:class:`StoredTensor` is a tensor in files that is indexed like one in memory: ``stored[box]`` reads
the pieces that overlap ``box``, in chunks of :data:`~moetrain.checkpoint.format.CHUNK` and several
threads, and checks every chunk. It takes host memory for what it returns, and where a box cuts a
piece's columns, for whole rows of the piece.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moetrain.checkpoint.format import (
    CHUNK,
    CRC_DIGITS,
    MANIFEST,
    STATE,
    Contents,
    FilePiece,
    ManifestEntry,
    check_version,
    crc_of,
    open_file,
    read_manifest,
    step_of,
    unreadable,
)
from moetrain.config import ConfigError
from moetrain.config.sources import shortened

_READERS = 8
"""Threads of a rank that read and check: they fill a disk's queue, and a core checks 2 GiB/s."""
_FIELDS = {"step": int, "tokens": int, "sample_index": int, "architecture": dict, "config": dict}
"""Fields that ``state.json`` must have, and their types; the numbers are not negative."""


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-read")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint; reading raises DamagedCheckpoint for bytes that have changed."""

    folder: Path
    entry: ManifestEntry

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.dtype

    def __getitem__(self, box: tuple[slice, ...]) -> torch.Tensor:
        """Read ``box``, a slice for each dim, or ``()`` for the whole tensor, to the CPU."""
        wanted = [part.indices(size)[:2] for part, size in zip(box, self.shape, strict=False)]
        wanted += [(0, size) for size in self.shape[len(wanted) :]]
        whole = torch.empty([stop - start for start, stop in wanted], dtype=self.dtype)
        found = sum(self._copy(piece, wanted, whole) for piece in self.entry.pieces)
        if found != whole.numel():
            lacking = whole.numel() - found
            raise unreadable(self.folder / MANIFEST, f"no file has {lacking} numbers of a tensor")
        return whole

    def _copy(self, piece: FilePiece, wanted: list[tuple[int, int]], out: torch.Tensor) -> int:
        """Copy what ``piece`` has of ``wanted`` into ``out``; return how many numbers that is."""
        mine = list(zip(piece.starts, piece.stops, strict=True))
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(mine, wanted, strict=True)]
        if any(start >= stop for start, stop in both):
            return 0
        target = out[
            tuple(slice(a - w, b - w) for (a, b), (w, _) in zip(both, wanted, strict=True))
        ]
        if not mine:
            self._read(piece, 0, out.nbytes, out)
            return 1
        sizes = [stop - start for start, stop in mine]
        row = self.dtype.itemsize * torch.Size(sizes[1:]).numel()
        first, last = both[0][0] - piece.starts[0], both[0][1] - piece.starts[0]
        if both[1:] == mine[1:] and target.is_contiguous():
            self._read(piece, first * row, last * row, target)
        else:
            rows = torch.empty([last - first, *sizes[1:]], dtype=self.dtype)
            self._read(piece, first * row, last * row, rows)
            pairs = zip(both[1:], mine[1:], strict=True)
            target.copy_(rows[(slice(None), *(slice(a - m, b - m) for (a, b), (m, _) in pairs))])
        return target.numel()

    def _read(self, piece: FilePiece, start: int, stop: int, out: torch.Tensor) -> None:
        """Read bytes ``start`` to ``stop`` of ``piece`` into ``out``, which is contiguous."""
        path, size = self.folder / piece.file, self.dtype.itemsize * piece.numel
        buffer = out.view(-1).view(torch.uint8).numpy()
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise unreadable(path, error) from None

        def read(index: int) -> None:
            first = index * CHUNK
            last = min(first + CHUNK, size)
            low, high = max(first, start), min(last, stop)
            is_all = (low, high) == (first, last)
            into = buffer[low - start : high - start]
            chunk = into if is_all else np.empty(last - first, np.uint8)
            self._read_chunk(descriptor, piece, index, chunk)
            if not is_all:
                into[:] = chunk[low - first : high - first]

        try:
            chunks = range(start // CHUNK, -(-stop // CHUNK))
            for _ in map(read, chunks) if len(chunks) < 2 else _readers().map(read, chunks):
                pass
        except OSError as error:
            raise unreadable(path, error) from None
        finally:
            os.close(descriptor)

    def _read_chunk(
        self, descriptor: int, piece: FilePiece, index: int, chunk: np.ndarray[Any, Any]
    ) -> None:
        view, done = memoryview(chunk.data), 0
        while done < len(view):
            got = os.preadv(descriptor, [view[done:]], piece.offset + index * CHUNK + done)
            if not got:
                raise unreadable(self.folder / piece.file, "it is cut short")
            done += got
        if crc_of(view) != piece.crcs[index * CRC_DIGITS : (index + 1) * CRC_DIGITS]:
            where = f"{piece.offset + index * CHUNK} to {piece.offset + index * CHUNK + len(view)}"
            problem = f"bytes {where} are not what was written (a checksum differs)"
            raise unreadable(self.folder / piece.file, problem)

    def check(self, rank: int = 0, ranks: int = 1) -> None:
        """Read and check one rank's share of the pieces; raises DamagedCheckpoint."""
        for piece in self.entry.pieces[rank::ranks]:
            size, step = self.dtype.itemsize * piece.numel, _READERS * CHUNK
            scratch = torch.empty(min(step, size), dtype=torch.uint8)
            for start in range(0, size, step):
                stop = min(start + step, size)
                self._read(piece, start, stop, scratch[: stop - start])


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk; a tensor is read when it is indexed."""

    folder: Path
    state: dict[str, Any]
    contents: Contents = field(repr=False)

    @property
    def groups(self) -> list[str]:
        """Names of the groups of tensors."""
        return list(self.contents.groups)

    def group(self, name: str) -> dict[str, StoredTensor]:
        """Return the tensors of a group, unread.

        Raises:
            DamagedCheckpoint: there is no such group.
        """
        if name not in self.contents.groups:
            raise unreadable(self.folder, f"it has no group {name!r}, but {self.groups}")
        entries = self.contents.groups[name]
        return {key: StoredTensor(self.folder, entry) for key, entry in entries.items()}

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Read the tensors of a group, whole, to the CPU.

        Raises:
            DamagedCheckpoint: a file is missing or damaged.
        """
        return {key: stored[()] for key, stored in self.group(name).items()}

    def stored(self) -> Iterator[tuple[str, str, StoredTensor]]:
        """Iterate over every tensor with its group and name."""
        for group in self.groups:
            for name, stored in self.group(group).items():
                yield group, name, stored


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint, and check all that can be checked without reading its tensors.

    The manifest and ``state.json`` must be what was written, the state must have every field, and
    every file must have its size and its header.

    Raises:
        ConfigError: it is not a checkpoint, or has another version of the format.
        DamagedCheckpoint: it is damaged; the message names the file.
    """
    if not folder.is_dir() or not os.path.lexists(folder / MANIFEST):
        raise _without_manifest(folder)
    contents, state = read_manifest(folder)
    path = folder / STATE
    if not isinstance(state, dict):
        raise unreadable(path, f"it holds a {type(state).__name__}, not an object")
    for name, kind in _FIELDS.items():
        value = state.get(name)
        is_negative = isinstance(value, int) and value < 0
        if not isinstance(value, kind) or isinstance(value, bool) or is_negative:
            what = "a number from 0" if kind is int else "an object"
            raise unreadable(path, f"its {name!r} is {shortened(value)}, not {what}")
    if step_of(folder) not in (None, state["step"]):
        raise unreadable(path, f"its 'step' is {shortened(state['step'])}, not that of its folder")
    return Checkpoint(folder, state, contents)


def _without_manifest(folder: Path) -> ConfigError:
    """Make the error for a folder without a manifest: no checkpoint, an old or a damaged one."""
    names = os.listdir(folder) if folder.is_dir() else []
    has_weights = any(name.endswith(".safetensors") for name in names)
    if has_weights and "config.json" in names and step_of(folder) is None:
        return ConfigError(
            "checkpoint.resume",
            f"{str(folder)!r} is not a run's checkpoint but a Hugging Face one: give it as "
            "model.path, or make one of it (python -m moetrain.checkpoint import-hf)",
        )
    if has_weights and STATE in names:
        _refuse_first_format(folder)
    if has_weights or step_of(folder) is not None:
        return unreadable(folder / MANIFEST, "there is none")
    problem = f"it has no {MANIFEST}" if folder.is_dir() else "there is no such folder"
    return ConfigError(
        "checkpoint.resume",
        f"{str(folder)!r} is not a checkpoint: {problem}; give a step-... folder, or the "
        "output_dir of a run that has saved one",
    )


def _refuse_first_format(folder: Path) -> None:
    """Raise ConfigError if ``state.json`` is of format 1: it names no format and is intact."""
    try:
        with open_file(folder / STATE) as file:
            state = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return  # damaged, whatever wrote it
    if isinstance(state, dict):
        check_version(state.get("format", 1), folder)


def is_intact(folder: Path) -> bool:
    """Return whether :func:`open_checkpoint` accepts it."""
    try:
        open_checkpoint(folder)
    except ConfigError:
        return False
    return True
