"""A run's output folder: that one run alone writes in it, and which of its checkpoints goes on.

The checkpoints of a folder are one branch of training, the higher step the newer; the newest intact
one is what ``auto`` goes on from. What would break that (steps after the one that was resumed, or
another run's checkpoints) is moved to ``earlier-1``, ``earlier-2``, ... and never deleted.

One process a run calls these: the main rank.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import weakref
from pathlib import Path
from typing import ClassVar

from moetrain.checkpoint import list_checkpoints, open_checkpoint, remove_leftovers, step_of
from moetrain.config import ConfigError

logger = logging.getLogger("moetrain")

CHECKPOINTS = "checkpoints"
LOCK = ".lock"
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}
"""What ``flock`` answers on file systems without it."""


class FolderLock:
    """An output folder that this process alone writes to, for as long as this object lives.

    A process may hold one many times over, as when one trainer follows another: they share this
    object. The kernel frees it when the process ends, in whatever way.
    """

    _held: ClassVar[weakref.WeakValueDictionary[tuple[int, int], FolderLock]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, descriptor: int, *, is_exclusive: bool) -> None:
        self.is_exclusive = is_exclusive
        """Whether it keeps others out: not where the file system has no locks."""
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def take(cls, folder: Path) -> FolderLock:
        """Lock ``folder``, which is made if there is none.

        Raises:
            ConfigError: another process has it, or the folder cannot be written.
        """
        path = folder / LOCK
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if path.exists() and (held := cls._held.get(_identity(path))) is not None:
                return held
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError("output_dir", f"{str(folder)!r} cannot be written: {error}") from None
        lock = cls(descriptor, is_exclusive=_lock_file(descriptor, folder))
        cls._held[_identity(path)] = lock
        return lock


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _lock_file(descriptor: int, folder: Path) -> bool:
    """Whether the file is locked now and says by whom; not: there are no locks here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise ConfigError(
            "output_dir",
            f"{str(folder)!r} is being written by another run ({holder or 'just started'}); "
            "wait for it, stop it, or choose another folder",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "%s is on a file system without locks (%s): nothing keeps a second run out of it",
            folder,
            error.strerror,
        )
        return False
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return True


def find_checkpoint(resume: str, folder: Path, lock: FolderLock) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` asks for; None: start afresh.

    ``auto`` passes over damaged checkpoints, with a warning, to the newest that is intact. What
    killed saves left in ``folder`` is removed first.

    Raises:
        ConfigError: a named folder is not an intact checkpoint, or none of ``folder``'s is.
    """
    root = folder / CHECKPOINTS
    if lock.is_exclusive:
        remove_leftovers(root)
    if resume == "never":
        return None
    if resume != "auto":
        return open_checkpoint(Path(resume)).folder
    damaged: list[str] = []
    for newest in reversed(list_checkpoints(root)):
        try:
            open_checkpoint(newest)
        except ConfigError as error:
            damaged.append(error.problem)
            continue
        for problem in damaged:
            logger.warning("a damaged checkpoint is passed over: %s", problem)
        return newest
    if damaged:
        raise ConfigError(
            "checkpoint.resume",
            f"every checkpoint in {str(root)!r} is damaged ({'; '.join(damaged)}); name another "
            "one, or start afresh with never",
        )
    return None


def set_aside(folder: Path, resumed: Path | None, step: int) -> None:
    """Move out of the way what a run from checkpoint ``resumed`` at ``step`` does not continue.

    None: a fresh run, in whose way are an earlier one's checkpoints and metrics; and so they are if
    ``resumed`` lies elsewhere. Else the checkpoints of ``folder`` after ``step``, with a copy of
    the metrics, whose later lines the run will drop.
    """
    root = folder / CHECKPOINTS
    checkpoints = list_checkpoints(root)
    if resumed is not None and resumed.resolve().parent == root.resolve():
        later = [path for path in checkpoints if step_of(path) > step]
        if later:
            old = _next_earlier(folder)
            (old / CHECKPOINTS).mkdir()
            if (folder / "metrics.jsonl").exists():
                shutil.copy2(folder / "metrics.jsonl", old)
            for path in later:
                path.rename(old / CHECKPOINTS / path.name)
            logger.info("checkpoints after step %d were moved to %s", step, old)
    elif checkpoints:
        old = _next_earlier(folder)
        for path in (root, folder / "metrics.jsonl", folder / "tensorboard"):
            if path.exists():
                path.rename(old / path.name)
        logger.info("an earlier run's checkpoints and metrics were moved to %s", old)


def _next_earlier(folder: Path) -> Path:
    number = 1
    while (old := folder / f"earlier-{number}").exists():
        number += 1
    old.mkdir()
    return old
