"""Checkpoints: a folder that exists whole or not at all, and runs nobody's code when read.

``checkpoints/step-00000100/`` holds ``<group>.safetensors`` files (``model``, ``optim``, ``rng``)
and ``state.json`` (step, data position, architecture, config). It is written under a temporary
name, fsynced and renamed. Nothing in it is a pickle.

A group is a flat mapping of names to tensors; this file knows nothing of models or optimizers.
That is the seam for the distributed form, which writes the same groups shard by shard. Which
checkpoint a run goes on from, and that one run alone writes here, is :mod:`moetrain.run_folder`'s.

Names beside ``step-N``, in the order of trust:

    failed-step-N       what a failed run left: for whoever names it, never found by itself
    .step-N.replaced    step N, for the instant in which another save of the same step takes over
    .step-N.<other>     being written, or removed; of a process that was killed if none is
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from moetrain.config import ConfigError, RunFailed
from moetrain.config_sources import shortened

logger = logging.getLogger("moetrain")

_NAME = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.replaced")
_LEFTOVER = re.compile(r"\.((?:failed-)?step-\d{8,})\.(\w+)")
_FIELDS = {"step": int, "tokens": int, "sample_index": int, "architecture": dict, "config": dict}
"""What ``state.json`` must hold; numbers count from 0."""


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
            raise _unreadable(path, error) from None


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint ``folder``, as far as can be told without reading its tensors intact.

    That is: ``state.json`` has every field, and the groups it names are files whose headers can be
    read and give the file's very size.

    Raises:
        ConfigError: it is not a checkpoint, or damaged; the message names the file.
    """
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            "checkpoint.resume",
            f"{str(folder)!r} is not a checkpoint (auto, never, or a step-... folder): {error}",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(state, dict):
        raise _unreadable(path, f"it holds a {type(state).__name__}, not an object")
    for name, kind in _FIELDS.items():
        value = state.get(name)
        is_negative = isinstance(value, int) and value < 0
        if not isinstance(value, kind) or isinstance(value, bool) or is_negative:
            what = "a number from 0" if kind is int else "an object"
            raise _unreadable(path, f"its {name!r} is {shortened(value)}, not {what}")
    if step_of(folder) not in (None, state["step"]):
        raise _unreadable(path, f"its 'step' is {shortened(state['step'])}, not that of its folder")
    groups = state.get("groups", [])  # checkpoints of earlier versions do not name theirs
    if not isinstance(groups, list) or not all(isinstance(group, str) for group in groups):
        raise _unreadable(path, f"its 'groups' is {shortened(groups)}, not a list of names")
    for file in {*folder.glob("*.safetensors"), *(folder / f"{g}.safetensors" for g in groups)}:
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise _unreadable(file, error) from None
    return Checkpoint(folder, state)


def save_checkpoint(
    root: Path,
    step: int,
    groups: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    keep: int,
    *,
    failed: bool = False,
) -> Path:
    """Write ``root/step-<step>`` atomically, then remove all but the newest ``keep`` intact ones.

    Whatever this process dies of and whenever, checkpoints that were complete stay so, and a later
    save of the same step works. Checkpoints of ``root`` are of one branch, the higher step the
    newer: :mod:`moetrain.run_folder` sees to that.

    Args:
        failed: of a run that failed: as ``root/failed-step-<step>``, in place of earlier ones of
            that kind; nothing else is removed.

    Raises:
        RunFailed: it cannot be written (no space, say); nothing of it is left.
    """
    final = root / checkpoint_name(step, failed=failed)
    new, replaced = _hidden(final, str(os.getpid())), _hidden(final, "replaced")
    try:
        shutil.rmtree(new, ignore_errors=True)
        try:
            new.mkdir(parents=True)
            _write(new, groups, state)
            if final.exists():  # this very step was saved before
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)  # which counts as this step while there is no other
            new.rename(final)
            _fsync(root)
        finally:
            if replaced.exists() and not final.exists():
                replaced.rename(final)
            shutil.rmtree(new, ignore_errors=True)
            shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise RunFailed(
            f"cannot write the checkpoint {final}: {error}; earlier ones are as they were, and the "
            "next run goes on from the newest"
        ) from None
    if failed:
        outdated = [path for path in root.glob("failed-step-*") if path != final]
    else:
        outdated = [path for path in list_checkpoints(root) if _is_intact(path)][:-keep]
    for path in outdated:
        _remove(path)
    return final


def checkpoint_name(step: int, *, failed: bool = False) -> str:
    """``step-00000100``."""
    return f"{'failed-' if failed else ''}step-{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints under ``root``, oldest first; those of failed runs are none."""
    if not root.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()):  # hidden names first: a replaced step gives way
        if (step := step_of(path)) is not None:
            found[step] = path
    return [found[step] for step in sorted(found)]


def step_of(checkpoint: Path) -> int | None:
    """The step in its name; None: it is not called like one of :func:`list_checkpoints`."""
    match = _NAME.fullmatch(checkpoint.name)
    return None if match is None else int(match[1] or match[2])


def remove_leftovers(root: Path) -> None:
    """Remove what killed processes left half written or half removed.

    Only for the one that has ``root`` to itself: another live process's would go too.
    """
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if match := _LEFTOVER.fullmatch(path.name):
            final = root / match[1]
            if match[2] == "replaced" and not final.exists():
                path.rename(final)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _write(
    folder: Path, groups: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]
) -> None:
    for group, tensors in groups.items():
        path = folder / f"{group}.safetensors"
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, path)
    state = {**state, "groups": list(groups)}
    (folder / "state.json").write_text(json.dumps(state, indent=1), "utf-8")
    for path in [*folder.iterdir(), folder]:
        _fsync(path)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, which at no instant looks like one that is damaged."""
    removed = _hidden(checkpoint, "removed")
    try:
        shutil.rmtree(removed, ignore_errors=True)
        checkpoint.rename(removed)
        shutil.rmtree(removed)
    except OSError as error:
        logger.warning("the old checkpoint %s could not be removed: %s", checkpoint, error)


def _hidden(checkpoint: Path, kind: str) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.{kind}")


def _is_intact(folder: Path) -> bool:
    try:
        open_checkpoint(folder)
    except ConfigError:
        return False
    return True


def _unreadable(path: Path, why: object) -> ConfigError:
    return ConfigError("checkpoint.resume", f"cannot read {str(path)!r}: {why}")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
