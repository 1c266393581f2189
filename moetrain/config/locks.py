"""Locks on files: a process holds one until it ends, however it ends.

The lock is ``flock(2)`` on a file that names its holder. Such a lock belongs to an open file, which
``fork(2)`` shares with the child: a child that outlives a killed process would hold the lock on.
Two things prevent that. Children that Python forks close the file at once. A child that other code
forks keeps it, so a process that finds the lock taken asks whether the holder that the file names
is still alive. If it has ended, the lock is taken over.

Each holder has a file of its own, locked and written before it gets its name, so that a locked file
never names anyone but its holder. A file is replaced only by a process that has its
``fcntl(2)`` lock, which no child inherits, and has seen that the file still bears the name: of
several processes that take over the same lock one succeeds.
"""

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moetrain.config import logger

_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}
"""Errors of ``flock`` on file systems without it."""
_POLL_SECONDS = 0.1
"""Time between two attempts to get a lock that another holds."""
_MOST_ATTEMPTS = 10
"""Attempts after which a lock counts as held if other processes keep replacing its file."""

_mutex = threading.RLock()
"""Held during each attempt: the threads of a process share its ``fcntl`` locks. A fork waits for
it, so that no child misses a descriptor that it must close."""
_held: set["_HeldLock"] = set()


class LockHeldError(Exception):
    """Another process, or another part of this one, holds the lock; the message names it."""


class _CrowdedError(LockHeldError):
    """Another process takes the lock at this moment, and may still fail to."""


class _HeldLock:
    """A lock that this process holds, by a descriptor of its file."""

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
def file_lock(path: Path, *, waits: bool = False) -> Iterator[bool]:
    """Hold the lock of the file ``path`` inside; the file is made, and stays.

    Yields False where the file system has no locks: then nothing keeps others out.

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
            # This is only a probe: on NFS it would stand in the way of the other kind of lock.
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
            # On NFS the child's lock and this one are of one kind.
            problem = "has ended, but a process that it started holds its lock; end that"
            raise _CrowdedError(f"{survivor.described()} {problem}") from None
        if not _is_at(descriptor, path):
            raise _CrowdedError("others that start at the same time")
        if survivor is not None:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                survivor = None  # it was only the probe of another that starts too
        held = _replace(path)
    finally:
        os.close(descriptor)
    if survivor is not None:
        logger.warning(
            "%s held %s and has ended, though a process that it started has the file open still; "
            "this process takes the lock over",
            survivor.described(),
            path,
        )
    return held


def _replace(path: Path) -> _HeldLock:
    """Replace ``path`` by a file that this process has locked."""
    start, end = f".{path.name}.", ".tmp"
    for name in os.listdir(path.parent):
        if name.startswith(start) and name.endswith(end):  # of one that was killed right here
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
            return False  # of another machine or container, or of before a boot
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
    """Return the fields of a process or thread after its name; empty: they cannot be read."""
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
