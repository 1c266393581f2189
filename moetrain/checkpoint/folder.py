"""Names of checkpoints, and how one comes to be in an instant, and goes.

Names beside ``step-N``, in the order of trust:

    failed-step-N       what a failed run left: for whoever names it, never found by itself
    .step-N.replaced    step N, for the instant in which another save of the same step takes over
    .step-N.<other>     being written, or removed; of a process that was killed if none is

Which checkpoint a run goes on from, and that one run alone writes here, is
:mod:`moetrain.train.run_folder`'s.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

logger = logging.getLogger("moetrain")

_NAME = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.replaced")
_LEFTOVER = re.compile(r"\.((?:failed-)?step-\d{8,})\.(\w+)")


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


def newest_in(path: Path) -> Path:
    """The newest checkpoint of ``path``, a run's output folder or a folder of checkpoints; else
    ``path`` itself, which then is to be one."""
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    return found[-1] if found else path


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


def begin(final: Path) -> Path:
    """A new folder beside ``final``, to be filled and then given to :func:`commit`.

    Raises:
        OSError: it cannot be made.
    """
    new = _hidden(final, str(os.getpid()))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    return new


def commit(new: Path, final: Path) -> None:
    """Let ``new``, whose files are complete and on the disk, be ``final`` from one instant on.

    Whatever this process dies of and whenever, there is a complete ``final`` if there was one.

    Raises:
        OSError: it cannot be done, and ``final`` is as it was.
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


def fsync(path: Path) -> None:
    """Force what is known of a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
