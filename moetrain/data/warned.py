"""Warns of a data set: of each kind once in a process, and again where its token cache is opened.

What is warned of while documents are read would otherwise be seen in the run that tokenises them,
and in no later one. So :func:`noted` collects the warnings, the cache keeps them, and
:func:`warn_once` repeats them when it is opened.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from moetrain.config import logger

SEEN: set[str] = set()
"""The kinds that this process has warned of."""
_MOST_KINDS = 64
"""Kinds that a cache keeps."""
_noting: ContextVar[dict[str, str] | None] = ContextVar("noting", default=None)


def warn_once(kind: str, text: str) -> None:
    """Log ``text`` unless this process has warned of its ``kind``; note it for the token cache."""
    notes = _noting.get()
    if notes is not None and len(notes) < _MOST_KINDS:
        notes.setdefault(kind, text)
    if kind not in SEEN:
        SEEN.add(kind)
        logger.warning("%s", text)


@contextmanager
def noted() -> Iterator[dict[str, str]]:
    """Yield the warnings of this block by their kinds, those that were logged before too."""
    notes: dict[str, str] = {}
    token = _noting.set(notes)
    try:
        yield notes
    finally:
        _noting.reset(token)
