"""Locks on files: a process holds one until it ends, however it ends.

The lock is ``flock(2)`` on a file that names its holder. Such a lock belongs to an open file, which
``fork(2)`` shares with the child: a child that outlives a killed process would keep the lock. Two
things prevent that. Children that Python forks close the file at once. A child that other code
forks keeps the file open. So a process that finds the lock taken checks whether the holder that the
file names is still alive, and takes the lock over if the holder has ended.

Each holder makes a file of its own. It locks and writes this file before it renames it to the
lock's path, so that a locked file never names anyone but its holder. A process replaces the file at
the path only if it has that file's ``fcntl(2)`` lock, which no child inherits, and has then seen
that the file is still at the path. So only one of several processes can take over a lock.
"""

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from moetrain.config import logger

_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}
"""Errors of ``flock`` on file systems that do not support it."""
_POLL_SECONDS = 0.1
"""Time between two attempts to get a lock that another holds."""
_MOST_ATTEMPTS = 10
"""Attempts after which a lock counts as held if other processes keep replacing its file."""

_mutex = threading.RLock()
"""This mutex is held during each attempt, because the threads of a process share its ``fcntl``
locks. A fork waits for the mutex, so that no child misses a descriptor that it must close."""
_held: set["_HeldLock"] = set()


class LockHeldError(Exception):
    """Another process, or another part of this one, holds the lock. The message names it."""


class _CrowdedError(LockHeldError):
    """Another process may be taking the lock now, and may fail to. A new attempt can succeed."""


class _HeldLock:
    """A lock that this process holds through an open descriptor of the lock's file."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor: int | None = descriptor
        _held.add(self)

    def release(self) -> None:
        with _mutex:
            _held.discard(self)
            if self.descriptor is not None:  # otherwise this is a forked child, without the lock
                os.close(self.descriptor)
                self.descriptor = None


def _forget_in_child() -> None:
    for held in _held:
        if held.descriptor is not None:
            with suppress(OSError):
                os.close(held.descriptor)  # never LOCK_UN: it would unlock the parent's too
            held.descriptor = None
    _held.clear()
    _mutex.release()


os.register_at_fork(
    before=_mutex.acquire, after_in_parent=_mutex.release, after_in_child=_forget_in_child
)


@contextmanager
def file_lock(path: Path, *, waits: bool = False) -> Generator[bool]:
    """Hold the lock of the file ``path`` within the context. The file is created, and stays.

    Yields True. On a file system without locks it yields False, and other processes are not kept
    out.

    Args:
        waits: wait for the lock while another holds it.

    Raises:
        LockHeldError: another holds it, and ``waits`` is false.
        OSError: the file cannot be made or written.
    """
    try:
        held = _take(path, waits)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        held = None
    try:
        yield held is not None
    finally:
        if held is not None:
            held.release()


def _take(path: Path, waits: bool) -> _HeldLock:
    attempts = 0
    while True:
        try:
            with _mutex:
                return _attempt(path)
        except _CrowdedError:
            attempts += 1
            if attempts > _MOST_ATTEMPTS and not waits:
                raise
        except LockHeldError:
            if not waits:
                raise
        time.sleep(_POLL_SECONDS)


def _attempt(path: Path) -> _HeldLock:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        survivor = None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # This lock is only a probe: on NFS it would conflict with the fcntl lock below.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except BlockingIOError:
            survivor = _Holder.read(descriptor)
            if not survivor.has_ended():
                raise LockHeldError(survivor.described()) from None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if survivor is None:
                raise _CrowdedError("others that start at the same time") from None
            # On NFS both kinds of lock are one kind, so the child's lock conflicts with this one.
            problem = "has ended, but a process that it started holds its lock; end that process"
            raise _CrowdedError(f"{survivor.described()} {problem}") from None
        if not _is_at(descriptor, path):
            raise _CrowdedError("others that start at the same time")
        if survivor is not None:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                survivor = None  # the lock was only the probe of another process that starts too
        held = _replace(path)
    finally:
        os.close(descriptor)
    if survivor is not None:
        logger.warning(
            "%s held %s and has ended, but a process that it started still has the file open; "
            "this process takes the lock over",
            survivor.described(),
            path,
        )
    return held


def _replace(path: Path) -> _HeldLock:
    """Replace the file at ``path`` by a new one that this process has locked."""
    start, end = f".{path.name}.", ".tmp"
    for name in os.listdir(path.parent):
        if name.startswith(start) and name.endswith(end):  # left by a process killed here
            (path.parent / name).unlink(missing_ok=True)
    new = path.with_name(f"{start}{os.getpid()}{end}")
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(descriptor, _Holder.of_this_process().record(), 0)
        new.rename(path)
    except BaseException:
        os.close(descriptor)
        new.unlink(missing_ok=True)
        raise
    return _HeldLock(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


class _Holder:
    """The process that a lock's file names."""

    def __init__(self, process: int, host: str, place: str, started: str) -> None:
        """Describe a process.

        Args:
            place: the boot of the machine and the namespace of the process number; "": unknown.
            started: the start of the process, in the kernel's ticks since the boot.
        """
        self.process, self.host, self.place, self.started = process, host, place, started

    @classmethod
    def of_this_process(cls) -> "_Holder":
        process = os.getpid()
        return cls(process, socket.gethostname(), _place(), _start_of(process) or "")

    @classmethod
    def read(cls, descriptor: int) -> "_Holder":
        """Parse the text of :meth:`record`; missing or damaged fields are unknown."""
        words = os.pread(descriptor, 1000, 0).decode(errors="replace").split()
        known = len(words) > 3 and words[0] == "process" and words[1].isdecimal()
        if not known:
            return cls(0, "", "", "")
        return cls(int(words[1]), words[3], *(words[4:6] if len(words) == 6 else ("", "")))

    def record(self) -> bytes:
        text = f"process {self.process} on {self.host}\n"
        if self.place and self.started:
            text += f"{self.place} {self.started}\n"
        return text.encode()

    def described(self) -> str:
        return f"process {self.process} on {self.host}" if self.process else "just started"

    def has_ended(self) -> bool:
        """Return True if the process has surely ended, even if its number is in use again."""
        if not self.place or self.place != _place():
            return False  # the process is from another machine, container or boot
        started = _start_of(self.process)
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # /proc may hide another user's process
            return started not in (None, self.started)
        return started not in (None, self.started) or _is_dead(self.process)


def _place() -> str:
    """Identify the boot of this machine and this process's namespace of process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except (OSError, ValueError):
        return ""


def _fields(stat: Path) -> list[str]:
    """Return the fields of a process's or thread's ``stat`` after the name; empty: unreadable."""
    try:
        return stat.read_bytes().rpartition(b")")[2].decode("ascii").split()
    except (OSError, ValueError):
        return []


def _start_of(process: int) -> str | None:
    fields = _fields(Path(f"/proc/{process}/stat"))
    return fields[19] if len(fields) > 19 else None  # starttime in proc(5)


def _is_dead(process: int) -> bool:
    """Return True for a zombie: all threads have ended, and the parent has not reaped it."""
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
    except FileNotFoundError:
        return True
    except OSError:
        return False
    states = [fields[0] for thread in threads if (fields := _fields(thread / "stat"))]
    return bool(states) and all(state in "ZX" for state in states)
