"""Files that appear whole or not at all.

It lies in the lowest package, because models, checkpoints, metrics and jobs all write such files,
and none of these packages may import another's helpers.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

_TEMPORARY = re.compile(r"\.[\w.-]+\.\d+\.tmp")


def write_atomically(path: Path, write: Callable[[Path], object], *, durable: bool = False) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it to ``path``.

    Whatever the process dies of, ``path`` holds the old content or the new. ``durable`` forces the
    content and the name to the disk before this returns.

    Raises OSError: the file cannot be written; ``path`` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        if durable:
            fsync(temporary)
        temporary.replace(path)
        if durable:
            fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


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
