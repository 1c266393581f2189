"""Reads the documents of a run: Python's standard library, text files, or files of records.

A source lists its files when it is made, and reads a part of bounded size at a time. A corpus, and
even a single file, may be larger than memory. Held-out documents are chosen by a hash of the name
of a file, or of the content of a record, so the split is the same on every machine. If documents
are added, no other document moves into the held-out ones or out of them.

Left out on purpose: synthetic data, which has no text (:mod:`moetrain.data.packing`).
"""

import codecs
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from moetrain.config import ConfigError, DataSection
from moetrain.config.sources import shortened
from moetrain.data.characters import warn_of_controls
from moetrain.data.containers import FilePart, Files, Raw, find_records, list_files
from moetrain.data.documents import BadRecordError, Document, HashRange, Skipped
from moetrain.data.messages import (
    MARK_BYTES,
    TO_UTF8,
    BadLineError,
    refuse_other_marks,
    words_of,
)
from moetrain.data.records import NoFormError, RecordReader, other_answer
from moetrain.data.tokenizer import Tokenizer
from moetrain.data.warned import warn_once

_T = TypeVar("_T")

_CONTINUATIONS = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that begin no character."""
_PART_BYTES = 1 << 20
"""Bytes of a part of a file. A longer text is read in parts that end with a line. A stream reads
parts in any order."""
_FIRST = 64
"""Number of records that tell the forms of a source, and the fields that are not read."""
_COMPARED, _MOST_COMPARED = 3, 16
"""Number of first records of a file, and most files of a source, that are compared."""
_LEAST_SHARED = 20
"""Fewest characters of a text by which records of two files are recognised as the same."""
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Subfolders of the library's folder that do not belong to it: installed packages and tests."""
_EVERYTHING = HashRange()
_HELD_OUT = {
    *("validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"),
}
"""Names of splits that are not trained on, which ``datasets`` looks for in the names of files."""
NOTHING_LEARNED = "nothing is learned of records"
"""Kind of the warning about records that give no document."""


@dataclass(frozen=True)
class Source(Files):
    """The documents of the files that one setting names.

    A text file is one document, but a stream makes a document of each part of a large one. A record
    gives any number of documents.

    Methods that read files raise ConfigError if a file cannot be read or is malformed, also if a
    text is not UTF-8.
    """

    reader: RecordReader | None = None
    """The reader of the records. None: the files are texts."""
    limit: int | None = None
    """Most records to read, counted before the share is chosen. None: all are read."""
    share: HashRange = _EVERYTHING
    """The share of the records that is read."""

    @classmethod
    def of(
        cls, data: DataSection, tokenizer: Tokenizer, limit: int | None = None, field: str = "path"
    ) -> Self:
        """List the files that ``field`` of ``data`` names, and read none of them yet.

        ``limit`` is the largest number of files or records to read. None: there is no limit.

        Raises ConfigError: a path or template file is missing or cannot be read, a template is
        malformed, or a folder has no files.
        """
        name, path = f"data.{field}", getattr(data, field)
        if data.source in ("records", "jsonl"):
            reader = RecordReader.of(data, tokenizer)
            files, table = find_records(name, path, data.split, data.subset)
            if field == "path":
                _warn_of_held_files(path, files if table is None else [])
            return cls(name, path, files, table, reader, limit)
        if data.source == "stdlib" and field == "path":
            path = sysconfig.get_path("stdlib")
            return cls("data.source", path, list_files("data.source", path, (".py",), _NOT_STDLIB))
        return cls(name, path, list_files(name, path)[:limit])

    def only(self, share: HashRange) -> Self:
        """Return a source of the records, or of the text files, that are in ``share``."""
        if self.reader is not None:
            return replace(self, share=share)
        return replace(self, files=[file for file in self.files if share.holds(self._key(file))])

    def _key(self, file: Path) -> bytes:
        """Return the path of ``file`` in the corpus. The place of the corpus does not count."""
        root = Path(self.path)
        is_inside = file != root and file.is_relative_to(root)
        return os.fsencode(file.relative_to(root).as_posix() if is_inside else file.name)

    def identity(self) -> list[Any]:
        """Return a JSON value that differs if the documents differ, for the token cache's key."""
        if self.reader is None:
            return ["text", self.stamps()]
        return ["records", self.stamps(), self.share, self.limit, self.reader.identity()]

    def _raws(self) -> Iterator[Raw]:
        every = (raw for piece in self.pieces() for raw in self.records(piece))
        return (raw for raw in islice(every, self.limit) if self.share.holds(raw.key))

    def documents(self, skipped: Skipped | None = None) -> Iterator[Document]:
        """Yield all documents. ``skipped`` is as in :meth:`documents_of`."""
        texts = (text for part in self.pieces() for text in self.read(part, self.share))
        yield from self.documents_of(texts if self.reader is None else self._raws(), skipped)

    def file_parts(self, share: HashRange) -> list[FilePart]:
        """List the parts of the files that may have documents of ``share``.

        A stream reads them in any order. A text that is longer than a part is divided into
        documents that are about as long as a part.
        """
        parts = self.pieces(_PART_BYTES)
        if self.reader is not None:
            return parts
        ends = (b"" if part.is_whole else b"#%d" % part.start for part in parts)
        pairs = zip(parts, ends, strict=True)
        return [part for part, end in pairs if share.holds(self._key(part.file) + end)]

    def read(self, part: FilePart, share: HashRange) -> Iterator[Raw | Document]:
        """Yield the records, or the text, of ``part`` that are in ``share``.

        :meth:`documents_of` makes documents of them.
        """
        if self.reader is not None:
            yield from (raw for raw in self.records(part) if share.holds(raw.key))
            return
        with self.reading(part.file):
            if part.is_whole:
                yield from _text_parts(part.file)
            else:
                text = _lines_from(part)
                yield Document(text, num_bytes=len(text))

    def documents_of(
        self, found: Iterable[Raw | Document], skipped: Skipped | None = None
    ) -> Iterator[Document]:
        """Yield the documents of ``found``, the records or texts that :meth:`read` yields.

        With ``data.bad_records skip``, bad records are added to ``skipped``.

        Raises BadRecordError: a record is bad, and bad records are not skipped.
        """
        num_records = num_chats = num_plain = num_empty = num_silent = 0
        beside: str | None = None  # another answer of a record whose answer is empty
        unread: dict[str, None] = {}
        held: Counter[tuple[str, str]] = Counter()
        for each in found:
            if isinstance(each, Document):
                yield each
                continue
            num_bytes = each.num_bytes
            try:
                record, documents = self._read_by(_record_and_documents, each)
            except BadRecordError as error:
                assert self.reader is not None
                if not self.reader.skips_bad:
                    raise
                if skipped is not None:
                    skipped.add(error)
                continue
            num_records += 1
            held.update(_held_out_by(record))
            if num_records <= _FIRST and self.reader is not None:
                unread |= dict.fromkeys(self.reader.unread(record, documents))
            num_empty += not documents
            if any(document.has_empty_answer for document in documents):
                num_silent += 1
                beside = beside or other_answer(record, documents)
            num_chats += any(document.is_rendered for document in documents)
            num_plain += any(
                not document.is_rendered and document.loss_spans is not None
                for document in documents
            )
            for document in documents:
                yield document._replace(num_bytes=num_bytes)
                num_bytes = 0
        if unread:
            names = ", ".join(f"`{key}`" for key in unread)
            warn_once(
                f"fields that are not read {self.path}",
                f"{self.path}: neither learned nor shown: {names}",
            )
        if 0 < held.total() < num_records and not self.field.endswith("eval_path"):
            (key, value), count = held.most_common(1)[0]
            warn_once(
                f"held-out records {self.path}",
                f"{self.path}: of {num_records:,} records {count:,} have the `{key}` "
                f"{shortened(value)}, and are trained on too; write those in a file of their own "
                "as data.eval_path to hold them out",
            )
        if num_empty:
            warn_once(
                f"{NOTHING_LEARNED} {self.path}",
                f"{self.path}: of {num_records:,} records {num_empty:,} have nothing to learn, and "
                "are left out: their text is blank, or the weight (`weight`, `loss` and the like) "
                "of the record or of all answers is 0",
            )
        if num_silent:
            such = f", such as one with {beside}" * bool(beside)
            warn_once(
                f"empty answers {self.path}",
                f"{self.path}: of {num_records:,} records {num_silent:,} have an empty answer"
                f"{such}, which is learned as an answer that ends at once; leave such records out, "
                "or write their answers",
            )
        if num_chats and num_plain:
            warn_once(
                f"chats and plain texts {self.path}",
                f"{self.path}: of {num_records:,} records {num_chats:,} are chats, and in "
                f"{num_plain:,} a prompt and its answer are joined as plain text, without the chat "
                "template; write these as lists of messages to make all of them chats",
            )

    def _read_by(self, read: Callable[[RecordReader, Any], _T], raw: Raw) -> _T:
        """Return the result of ``read`` for a record. Raises BadRecordError: the record is bad."""
        assert self.reader is not None
        try:
            try:
                return read(self.reader, raw.value())
            except NoFormError:  # a row may have an empty cell where its answer should be
                if (row := raw.with_empty()) is not None:
                    self.reader.refuse_empty(row)
                raise
        except BadLineError as error:
            raise BadRecordError(error.field or self.field, raw.where, error) from None

    def _form_of(self, raw: Raw) -> str:
        try:
            return self._read_by(RecordReader.form_of, raw)
        except BadRecordError:
            if self.reader is None or not self.reader.skips_bad:
                raise
            return "bad"

    def describe(self) -> str:
        """Describe in one line the forms of the first records. Empty: there are no records."""
        first = islice(self._raws(), _FIRST) if self.reader is not None else ()
        forms = Counter(self._form_of(raw) for raw in first)
        found = ", ".join(f"{name} ({count})" for name, count in forms.most_common())
        return found and f"{self.path}: the first {forms.total()} records are {found}"

    def describe_repeats(self) -> str:
        """Describe in one line two files whose first records have the same texts, if there are any.

        Such files are GSM8K's ``main`` and ``socratic``, and UltraFeedback's ``train_sft`` and
        ``train_prefs``. Empty: there are none, or a file cannot be read. Reading it says why.
        """
        if self.reader is None or self.table is not None:
            return ""
        known: dict[Path, list[set[str]]] = {}
        try:
            for file in [file for file in self.files if not _is_later_shard(file)][:_MOST_COMPARED]:
                known[file] = self._first_texts(file)
        except ConfigError:
            return ""
        for file, other in combinations(known, 2):
            shared = [a & b for a, b in zip(known[file], known[other], strict=False)]
            if len(shared) == _COMPARED and all(shared):
                names = " and ".join(shortened(os.fsdecode(self._key(x))) for x in (file, other))
                same = f"the first records of its files {names} have the same texts"
                return (
                    f"{self.path}: {same}, such as {shortened(min(shared[0]))}; if they are one "
                    "set in two forms, name the files of one in data.path"
                )
        return ""

    def _first_texts(self, file: Path) -> list[set[str]]:
        """Return the texts of each of the first records of ``file``, but none that all have."""
        piece = next(iter(replace(self, files=[file]).pieces()), None)
        raws = () if piece is None else islice(self.records(piece), _COMPARED)
        texts = [{*_long_texts(raw)} for raw in raws]
        same = set.intersection(*texts) if len(texts) > 1 else set()
        return [each - same for each in texts]


def _record_and_documents(reader: RecordReader, record: Any) -> tuple[Any, list[Document]]:
    return record, reader.documents(record)


def _is_later_shard(file: Path) -> bool:
    """Return whether a file's name says that it is a further one of a set's files."""
    found = re.search(r"(\d+)-of-\d+", file.name)
    return found is not None and int(found[1]) > 0


def _long_texts(raw: Raw) -> list[str]:
    """Return the texts in a record of which no two sets have the same by chance."""
    try:
        waiting, texts = [raw.value()], list[str]()
    except BadLineError:
        return []
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and len(value) >= _LEAST_SHARED:
            texts.append(value)
        elif isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
    return texts


_OF_SPLITS = {"split", "partition", "subset", "metadata"}
"""Words in the names of fields that say which part of a set a record belongs to: mobile-actions'
``metadata`` is ``train`` or ``eval``."""


def _held_out_by(record: object) -> list[tuple[str, str]]:
    """Return the field and the value by which other trainers hold a record out, if any."""
    if not isinstance(record, dict):
        return []
    named = [(key, x) for key, x in record.items() if isinstance(x, str)]
    of_splits = [(key, x) for key, x in named if not words_of(key).isdisjoint(_OF_SPLITS)]
    return [(key, x) for key, x in of_splits if x.strip().lower() in _HELD_OUT][:1]


def _warn_of_held_files(path: str, files: Sequence[Path]) -> None:
    """Warn if some of several files have the name of a split that other trainers hold out.

    ``datasets`` finds such a name between separators and digits in the name of a file or a folder.
    """
    root = Path(path)
    names = [str(x.relative_to(root) if x.is_relative_to(root) else x.name) for x in files]
    held = [
        name for name in names if not _HELD_OUT.isdisjoint(re.split(r"[-._ 0-9/]", name.lower()))
    ]
    if held and len(held) < len(names):
        warn_once(
            f"held-out files {path}",
            f"{path}: its files {shortened(', '.join(held))} are trained on too; name the others "
            "in data.path, and these in data.eval_path to hold them out",
        )


def _lines_from(part: FilePart) -> str:
    """Return the lines that begin in ``part``.

    A line that is much longer than a part is cut: each part that lies within it has the bytes
    between one and two part sizes after its own start, and no character is cut in two.
    """
    with part.file.open("rb") as file:
        refuse_other_marks(file.read(MARK_BYTES), str(part.file))
        file.seek(max(0, part.start - 1))
        before = _rest_of_line(file, part.start + _PART_BYTES) if part.start else b"\n"
        start = file.tell()
        raw = file.read(max(0, part.stop - start))
        is_within = before[-1:] != b"\n"
        if is_within or (raw and raw[-1:] != b"\n"):
            raw += _rest_of_line(file, part.start + 2 * _PART_BYTES)
        is_end = not file.read(1)
    return _Decoder(part.file, "utf-8", start).decode(raw, is_end)


class _Decoder:
    """Decodes a text in UTF-8, piece by piece."""

    def __init__(self, path: Path, encoding: str, start: int = 0) -> None:
        """``start`` is the offset in the file of the first byte that :meth:`decode` gets."""
        self._path, self._at = path, start
        self._decoder = codecs.getincrementaldecoder(encoding)()

    def decode(self, raw: bytes, is_end: bool) -> str:
        """Return the text of ``raw``, which follows what was decoded before.

        ``is_end`` is True if the file ends there. If it ends within a character, that character is
        left out, and a warning says so.

        Raises BadLineError: the bytes are not UTF-8. The error names the file and the first such
        byte.
        """
        try:
            text = self._decoder.decode(raw)
        except UnicodeDecodeError as error:
            # Its object ends where `raw` ends, and may begin earlier, or behind a byte order mark.
            at = self._at + len(raw) - len(error.object) + error.start
            byte = f"byte 0x{error.object[error.start]:02x} at offset {at:,} is not UTF-8"
            raise BadLineError(
                f"{self._path}: {byte}: {error.reason}; {TO_UTF8}, or leave it out"
            ) from None
        warn_of_controls(text, f"{self._path} has")
        self._at += len(raw)
        if is_end and self._decoder.getstate()[0]:
            said = f"{self._path} ends within a character of UTF-8, which is left out"
            warn_once(f"half a character {self._path}", said)
        return text


def _rest_of_line(file: BinaryIO, end: int) -> bytes:
    """Read the rest of a line, but at most the characters that begin before the offset ``end``."""
    raw = file.readline(max(0, end - file.tell()))
    if raw[-1:] != b"\n":
        following = file.read(3)
        of_character = len(following) - len(following.lstrip(_CONTINUATIONS))
        raw += following[:of_character]
        file.seek(of_character - len(following), os.SEEK_CUR)
    return raw


def _text_parts(path: Path) -> Iterator[Document]:
    """Yield a text in parts that end with a line.

    A text is skipped if its first part is blank or has null bytes.
    """
    decoder = _Decoder(path, "utf-8-sig")
    with path.open("rb") as file:
        raw = file.read(_PART_BYTES)
        refuse_other_marks(raw, str(path))
        if b"\0" in raw:
            warn_once(f"no text {path}", f"{path} is not text; skipped")
        if b"\0" in raw or not raw.strip():
            return
        while raw:
            raw += file.readline(_PART_BYTES)
            following = file.read(_PART_BYTES)
            text = decoder.decode(raw, is_end=not following)
            yield Document(text, is_end=not following, num_bytes=len(raw))
            raw = following
