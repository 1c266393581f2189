"""Logs each kind of warning about a data set once in a process, even if its token cache is used.

Documents are read only in the run that tokenises them, and later runs would miss the warnings.
Therefore :func:`noted` collects the warnings, the cache keeps them, and :func:`warn_once` repeats
them when the cache is opened.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from moetrain.config import logger

SEEN: set[str] = set()
"""The kinds of warnings that this process has logged."""
_MOST_KINDS = 64
"""Largest number of kinds that a cache keeps."""
_noting: ContextVar[dict[str, str] | None] = ContextVar("noting", default=None)


def warn_once(kind: str, text: str) -> None:
    """Log ``text`` unless this process has logged its ``kind``; record it for the token cache."""
    notes = _noting.get()
    if notes is not None and len(notes) < _MOST_KINDS:
        notes.setdefault(kind, text)
    if kind not in SEEN:
        SEEN.add(kind)
        logger.warning("%s", text)


@contextmanager
def noted() -> Iterator[dict[str, str]]:
    """Yield a dict that collects this block's warnings by kind, even those logged before."""
    notes: dict[str, str] = {}
    token = _noting.set(notes)
    try:
        yield notes
    finally:
        _noting.reset(token)
