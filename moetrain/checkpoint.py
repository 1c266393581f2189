"""Checkpoints: a folder that exists whole or not at all, and runs nobody's code when read.

``checkpoints/step-00000100/`` holds ``<group>.safetensors`` files (``model``, ``optim``, ``rng``)
and ``state.json`` (step, data position, architecture, config). It is written under a temporary
name, fsynced and renamed. Nothing in it is a pickle.

A group is a flat mapping of names to tensors; this file knows nothing of models or optimizers.
That is the seam for the distributed form, which writes the same groups shard by shard.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moetrain.config import ConfigError

_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk; tensors are read when asked for."""

    folder: Path
    state: dict[str, Any]

    def tensors(self, group: str) -> dict[str, torch.Tensor]:
        """The tensors of one group, on the CPU.

        Raises:
            ConfigError: the file is missing or damaged.
        """
        path = self.folder / f"{group}.safetensors"
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError("checkpoint.resume", f"cannot read {str(path)!r}: {error}") from None


def save_checkpoint(
    root: Path,
    step: int,
    groups: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write ``root/step-<step>`` atomically, then remove all but the newest ``keep``."""
    final = root / f"step-{step:08d}"
    temporary = root / f".{final.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for group, tensors in groups.items():
            path = temporary / f"{group}.safetensors"
            save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, path)
        (temporary / "state.json").write_text(json.dumps(dict(state), indent=1), "utf-8")
        for path in [*temporary.iterdir(), temporary]:
            _fsync(path)
        if final.exists():  # this very step was saved before: swap, never a moment with neither
            final.rename(root / f".{final.name}.replaced")
        temporary.rename(final)
        shutil.rmtree(root / f".{final.name}.replaced", ignore_errors=True)
        _fsync(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in list_checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints under ``root``, oldest first."""
    if not root.is_dir():
        return []
    found = [(int(m[1]), p) for p in root.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def find_checkpoint(resume: str, root: Path) -> Checkpoint | None:
    """The checkpoint that ``checkpoint.resume`` asks for; None: start afresh.

    Raises:
        ConfigError: a named folder that is not a checkpoint.
    """
    if resume == "never":
        return None
    if resume == "auto":
        newest = list_checkpoints(root)[-1:]
        if not newest:
            return None
        folder = newest[0]
    else:
        folder = Path(resume)
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "checkpoint.resume",
            f"{str(folder)!r} is not a checkpoint (auto, never, or a step-... folder): {error}",
        ) from None
    return Checkpoint(folder, state)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
