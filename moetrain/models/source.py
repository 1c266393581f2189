"""What a model remembers of the checkpoint it came from, so that an export can carry all of it on.

Plain values, known to the model and to whoever reads and writes files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch


class FileTensor(NamedTuple):
    """A tensor in a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


class Stamp(NamedTuple):
    """Tells whether a file is still the one that was read."""

    num_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path) -> Stamp | None:
        """None: there is no such file."""
        try:
            stat = file.stat()
        except OSError:
            return None
        return cls(stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True)
class HFSource:
    """What the checkpoint that a model was loaded from holds beside the model's own weights."""

    folder: Path
    config: Mapping[str, Any]
    """All of ``config.json``."""
    generation: Mapping[str, Any] | None
    """All of ``generation_config.json``, if there is one."""
    dtypes: Mapping[str, torch.dtype]
    """Of the tensors that the model has, by their names in the files."""
    extra: Mapping[str, FileTensor]
    """Tensors that the model does not have; an export carries them on, bit for bit."""
    stamps: Mapping[Path, Stamp | None]
    """Of the files that hold ``extra``."""
    files: tuple[str, ...]
    """Other files that an export carries on, relative to ``folder``: ``hf.files.small_files``."""
