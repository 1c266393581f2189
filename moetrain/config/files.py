"""Files that appear whole or not at all.

It lies in the lowest package, because models, checkpoints, metrics and jobs all write such files,
and none of these packages may import another's helpers.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

_TEMPORARY = re.compile(r"\.[\w.-]+\.\d+\.tmp")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it to ``path``.

    Whatever the process dies of, ``path`` holds the old content or the new.

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
    """Write ``data`` as :func:`write_atomically`, and force it and its name to the disk.

    In few calls of the system: after each, a thread may wait for its turn again.
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


def remove_temporaries(folder: Path) -> None:
    """Remove the files that killed calls of :func:`write_atomically` have left in ``folder``."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            path.unlink()


def fsync(path: Path) -> None:
    """Force the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
