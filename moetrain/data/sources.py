"""The documents of a run: from the standard library, text files, or files of records.

A source lists its files when it is made, and reads them a bounded part at a time: a corpus, and
even a single file, may be larger than memory. Held-out documents are chosen by a hash of their name
(files) or content (records), so the split is the same on every machine, and a document never
changes sides when others are added.

Left out on purpose: synthetic data, which needs no text (packing.py).
"""

from __future__ import annotations

import codecs
import hashlib
import logging
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from moetrain.config import ConfigError, DataSection
from moetrain.config.sources import shortened
from moetrain.data.chat import BadLineError, ChatTemplate
from moetrain.data.containers import (
    Container,
    FilePart,
    Raw,
    document_name,
    list_files,
    open_container,
)
from moetrain.data.formats import Document, RecordReader
from moetrain.data.tokenizer import Tokenizer

_logger = logging.getLogger("moetrain")

_PART_BYTES = 1 << 20
"""Size of the parts in which longer text files are read, cut at line ends."""

# Parts of the library folder that are not the library: installed packages, tests, their fixtures.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


_STREAM_PART = 1 << 20
"""Bytes of files of lines, and of longer texts, that a stream reads as one part."""
_FIRST = 64
"""Records that are looked at to say what forms a source has."""


class TextPart(NamedTuple):
    """A document, or the next part of one that is too large to hold."""

    document: Document
    ends_document: bool
    num_bytes: int
    """Bytes of the source that were read for it, for the progress bar."""


class HashRange(NamedTuple):
    """The documents whose hash, a number in [0, 1), lies in ``low <= hash < high``."""

    low: float
    high: float

    def holds(self, key: bytes) -> bool:
        """Return whether the document identified by ``key`` (its name or content) is in it."""
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return self.low <= int.from_bytes(digest, "big") / 2**64 < self.high


EVERYTHING = HashRange(0.0, 1.0)
PAIRED = ("pairs", "triples")
"""Further values of data.packing, which train.objective sets: rows of preference pairs, and those
with a third segment, which kto needs."""


@dataclass(frozen=True)
class Source:
    """Documents of one setting."""

    container: Container

    @property
    def field(self) -> str:
        """The setting that named the files, for messages."""
        return self.container.field

    @property
    def path(self) -> str:
        """The value of that setting."""
        return self.container.path

    def identity(self) -> list[Any]:
        """Return what decides the documents, as JSON for the key of the token cache."""
        raise NotImplementedError

    def parts(self) -> Iterator[TextPart]:
        """Yield the documents in order.

        Raises:
            ConfigError: a file cannot be read, or is malformed; the message says where.
        """
        raise NotImplementedError

    def file_parts(self, share: HashRange) -> list[FilePart]:
        """List the parts of the files that a stream reads in any order."""
        raise NotImplementedError

    def read(self, part: FilePart, share: HashRange) -> Iterator[Raw] | Iterator[TextPart]:
        """Yield what is of ``share`` in ``part``, for :meth:`parts_of`."""
        raise NotImplementedError

    def for_workers(self) -> Source:
        """Return a copy without its files, whose :meth:`parts_of` another process calls."""
        return replace(self, container=replace(self.container, files=[], table=None))

    def parts_of(self, found: Iterable[Any]) -> Iterator[TextPart]:
        """Yield the documents of what :meth:`read` yields; raises as :meth:`parts`."""
        raise NotImplementedError

    def describe(self) -> str:
        """Say in a line which forms the first records have; raises as :meth:`parts`."""
        return ""


class _TextSource(Source):
    """Text files, one document each. Bytes that are not UTF-8 become U+FFFD."""

    def identity(self) -> list[Any]:
        return ["text", self.container.stamps()]

    def parts(self) -> Iterator[TextPart]:
        for path in self.container.files:
            with self.container.reading(path):
                yield from _text_parts(path)

    def file_parts(self, share: HashRange) -> list[FilePart]:
        """A file longer than a part is divided into documents of a part's length."""
        root = Path(self.path)
        parts = []
        for file in self.container.files:
            size, name = file.stat().st_size, os.fsencode(document_name(file, root))
            for start in range(0, size, _STREAM_PART):
                key = name if size <= _STREAM_PART else b"%s#%d" % (name, start)
                if share.holds(key):
                    stop = min(size, start + _STREAM_PART)
                    parts.append(FilePart(file, start, stop, stop - start))
        return parts

    def read(self, part: FilePart, share: HashRange) -> Iterator[TextPart]:
        with self.container.reading(part.file):
            if part.start == 0 and part.stop == part.file.stat().st_size:
                yield from _text_parts(part.file)
                return
            text = _lines_from(part)
            yield TextPart(Document(text), True, len(text))

    def parts_of(self, found: Iterable[Any]) -> Iterator[TextPart]:
        return iter(found)


@dataclass(frozen=True)
class _RecordSource(Source):
    """Records, of which a share is chosen by hash."""

    share: HashRange
    reader: RecordReader
    limit: int | None = None
    """Records to read at most, before the share is chosen; None: all."""

    def identity(self) -> list[Any]:
        reader = self.reader.identity()
        return ["records", self.container.stamps(), self.share, self.limit, reader]

    def raws(self) -> Iterator[Raw]:
        """Yield the records of the share as they lie in the files."""
        pieces = self.container.pieces()
        every = (raw for piece in pieces for raw in self.container.records(piece))
        return (raw for raw in islice(every, self.limit) if self.share.holds(raw.key))

    def parts(self) -> Iterator[TextPart]:
        return self.parts_of(self.raws())

    def file_parts(self, share: HashRange) -> list[FilePart]:
        return self.container.pieces(_STREAM_PART)

    def read(self, part: FilePart, share: HashRange) -> Iterator[Raw]:
        return (raw for raw in self.container.records(part) if share.holds(raw.key))

    def parts_of(self, found: Iterable[Any]) -> Iterator[TextPart]:
        for raw in found:
            num_bytes = raw.num_bytes
            try:
                documents = self.reader.documents(raw.value())
            except BadLineError as error:
                raise ConfigError(error.field or self.field, f"{raw.where}: {error}") from None
            for document in documents:
                yield TextPart(document, True, num_bytes)
                num_bytes = 0

    def describe(self) -> str:
        forms: Counter[str] = Counter()
        for raw in islice(self.raws(), _FIRST):
            try:
                record = raw.value()
                if not isinstance(record, dict):
                    raise BadLineError(
                        f"not a JSON object: {shortened(record)}; give one object a line"
                    )
                forms[self.reader.form_of(record)] += 1
            except BadLineError as error:
                raise ConfigError(error.field or self.field, f"{raw.where}: {error}") from None
        found = ", ".join(f"{name} ({count})" for name, count in forms.most_common())
        if not found:
            return ""
        return f"{self.path}: the first {forms.total()} records are {found}"


class _Sources(NamedTuple):
    """The sources that the settings name."""

    train: Source
    eval: Source | None
    """The held-out documents; None: there is no evaluation."""
    undivided: Source
    """All of ``data.path``: both of these together, unless ``eval`` has a path of its own."""
    template: str | None
    """The template of conversations, if the format has any."""


def open_sources(data: DataSection, tokenizer: Tokenizer, limit: int | None = None) -> _Sources:
    """Open the sources of a run: list their files, and read nothing yet.

    Args:
        limit: files or records to read at most; None: all.

    Raises:
        ConfigError: a path or template file is missing or cannot be read, a template is malformed,
            or a folder has no files.
    """
    reads_records = data.source in ("records", "jsonl")
    template = ChatTemplate.of(tokenizer, data.chat_template) if reads_records else None
    source = None if template is None else template.source
    reads_pairs = data.packing in PAIRED
    if reads_pairs and data.format not in ("auto", "preference"):
        problem = f"{data.format!r}, and train.objective learns from pairs alone"
        raise ConfigError("data.format", f"{problem}; set preference")

    def opened(field: str, path: str, *shares: HashRange) -> list[Source]:
        if template is not None:
            container = open_container(field, path, data.split, data.subset)
            reader = RecordReader(
                template,
                "preference" if reads_pairs else data.format,
                data.text_field,
                data.train_on,
                reads_pairs,
            )
            return [_RecordSource(container, share, reader, limit) for share in shares]
        is_stdlib = data.source == "stdlib"
        skipped = _NOT_STDLIB if is_stdlib else frozenset()
        files = list_files(field, path, (".py",) if is_stdlib else ("",), skipped)
        named = [(f, os.fsencode(document_name(f, Path(path)))) for f in files[:limit]]
        return [
            _TextSource(Container([file for file, name in named if share.holds(name)], field, path))
            for share in shares
        ]

    shares = EVERYTHING, HashRange(data.eval_fraction, 1.0), HashRange(0.0, data.eval_fraction)
    if data.source == "stdlib":
        named = "data.source", sysconfig.get_path("stdlib")
    else:
        assert data.path is not None  # Config.check demands it
        named = "data.path", data.path
    undivided, train, held_out = opened(*named, *shares)
    if data.eval_path is not None:
        (other,) = opened("data.eval_path", data.eval_path, EVERYTHING)
        return _Sources(undivided, other, undivided, source)
    return _Sources(train, held_out if data.eval_fraction else None, undivided, source)


def _lines_from(part: FilePart) -> str:
    """Return the lines that begin in ``part``; a line longer than that is cut."""
    with part.file.open("rb") as file:
        skipped = 0
        if part.start:
            file.seek(part.start - 1)
            skipped = len(file.readline(_STREAM_PART)) - 1
        raw = file.read(max(0, part.stop - part.start - skipped))
        raw += file.readline(_STREAM_PART) if raw and raw[-1:] != b"\n" else b""
    return raw.decode("utf-8", errors="replace")


def _text_parts(path: Path) -> Iterator[TextPart]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    with path.open("rb") as file:
        raw = file.read(_PART_BYTES)
        if b"\0" in raw:
            _logger.warning("%s is not text; skipped", path)
        if b"\0" in raw or not raw.strip():
            return
        while raw:
            raw += file.readline(_PART_BYTES)
            following = file.read(_PART_BYTES)
            text = decoder.decode(raw, final=not following)
            yield TextPart(Document(text), not following, len(raw))
            raw = following
