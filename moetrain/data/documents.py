"""Documents, the shares of a source that are read, and the bad records that are left out."""

import hashlib
import re
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from moetrain.config import ConfigError, logger
from moetrain.data.messages import BadLineError


class Document(NamedTuple):
    """A text with its loss mask, or a part of a text that is too large to be held in memory."""

    text: str
    loss_spans: list[tuple[int, int]] | None = None
    """The spans ``start:end`` of characters to learn. None: all. An empty span at the end of a text
    that no template rendered stands for an empty answer: only EOS is learned."""
    is_rendered: bool = False
    """True: a chat template made the text, and decided how it begins."""
    is_end: bool = True
    """True: the document ends with this part."""
    num_bytes: int = 0
    """Bytes of the source that were read for the document, for the progress bar."""
    label: bool | None = None
    """For KTO: True for a desirable answer, False for an undesirable one. None: no label."""
    has_empty_answer: bool = False
    """True: an answer that is learned has no text, thought or call."""
    margin: float | None = None
    """For reward models: the least difference that the rewards of the pair's answers should have.
    None: margins are not read."""


class HashRange(NamedTuple):
    """A share of documents: those with ``low <= hash < high``. A hash is a number in [0, 1)."""

    low: float = 0.0
    high: float = 1.0

    def holds(self, key: bytes) -> bool:
        """Return whether a document is in the share. ``key`` is the document's name or content."""
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return self.low <= int.from_bytes(digest, "big") / 2**64 < self.high


class BadRecordError(ConfigError):
    """A record that cannot be used, with its file and line."""

    def __init__(self, field: str, where: str, error: BadLineError) -> None:
        """``field`` is the setting at fault, ``where`` the record's file and line."""
        self.problem = f"{where}: {error}"
        self.kind = error.kind or _kind_of(str(error))
        """The kind of problem, by which bad records are counted."""
        super().__init__(field, self.problem)


@dataclass
class Skipped:
    """The bad records that ``data.bad_records skip`` leaves out, counted by kind."""

    MOST_KINDS: ClassVar = 10
    count: int = 0
    kinds: dict[str, tuple[int, str]] = field(default_factory=dict)
    """For each kind of problem, the number of records, and the place and problem of the first one.
    After :data:`MOST_KINDS` kinds, records of other kinds count in ``count`` alone."""

    def add(self, error: BadRecordError) -> None:
        """Count a bad record."""
        self.merge(Skipped(1, {error.kind: (1, error.problem)}))

    def merge(self, other: "Skipped") -> None:
        """Add the records of ``other``."""
        self.count += other.count
        for kind, (count, first) in other.kinds.items():
            if kind in self.kinds or len(self.kinds) < self.MOST_KINDS:
                known, known_first = self.kinds.get(kind, (0, first))
                self.kinds[kind] = (known + count, known_first)

    def warn(self, path: str) -> None:
        """Log the bad records of ``path``, if there are any."""
        if not self.count:
            return
        logger.warning("%s: %s bad records were left out", path, f"{self.count:,}")
        for count, first in sorted(self.kinds.values(), key=lambda kind: -kind[0]):
            logger.warning("%s such as %s", f"{count:,}", first)
        if rest := self.count - sum(count for count, _ in self.kinds.values()):
            logger.warning("%s of other kinds", f"{rest:,}")


_VALUE = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+|(?<=\s)[\[{(].*""")
"""Matches the parts that differ between errors of one kind: quoted texts, numbers, and everything
from the beginning of a list or an object on."""


def _kind_of(problem: str) -> str:
    """Return ``problem`` without its remedy, and with dots in place of the record's values."""
    return _VALUE.sub("...", problem.partition("; ")[0])
