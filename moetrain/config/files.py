"""Writes files that appear whole or not at all, and reads others' files without blocking.

The module lies in the lowest package because models, checkpoints, metrics and jobs all need it, and
none of them may import another's helpers.
"""

import errno
import os
import re
import resource
import stat
from collections.abc import Callable
from pathlib import Path

_TEMPORARY = re.compile(r"\.[\w.-]+\.\d+\.tmp")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it to ``path``.

    Whenever the process dies, ``path`` holds the old content or the new.

    Raises OSError: the file cannot be written; ``path`` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Write ``data`` as :func:`write_atomically` does, and force content and name to the disk.

    The function makes few system calls, because after each one its thread may have to wait for the
    interpreter's lock.
    """

    def put(temporary: Path) -> None:
        left = memoryview(data)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    write_atomically(path, put)
    fsync(path.parent)


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises OSError: ``path`` cannot be opened, or is a folder, a device, a socket, a link to nothing
    or a pipe. (Python's ``open`` of a pipe waits until somebody opens it for writing.)
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = next(name for is_kind, name in _KINDS if is_kind(mode))
            raise OSError(errno.EINVAL, f"it is {kind} and not a file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (lambda mode: True, "something else"),
)


def read_regular(path: Path, most: int, first: int | None = None) -> bytes:
    """Return the content of a regular file, or its ``first`` bytes.

    Raises OSError: as :func:`open_regular`, or more than ``most`` bytes would be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        wanted = size if first is None else min(max(first, 0), size)
        if wanted > most:
            said = f"it has {size:,} bytes, and at most {most:,} are read"
            raise OSError(errno.EFBIG, said, str(path))
        return file.read(wanted)


def remove_temporaries(folder: Path) -> None:
    """Remove the files that killed calls of :func:`write_atomically` have left in ``folder``."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            path.unlink()


def disk_remedy(number: int | None, setting: str) -> str:
    """Return what to do about the disk's error ``number`` in the folder that ``setting`` names.

    The text is empty where another folder would not help, as for a closed standard output.
    """
    has_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    if number == errno.EFBIG and has_limit:
        return "raise the limit of this process's files (ulimit -f)"
    if number == errno.EPIPE:
        return ""
    first = ""
    if number in (errno.ENOSPC, errno.EDQUOT):
        first = "make room, or "
    elif number in (errno.EROFS, errno.EACCES, errno.EPERM):
        first = "make it writable, or "
    return f"{first}choose another {setting}"


def fsync(path: Path) -> None:
    """Force the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
