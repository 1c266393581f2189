"""Reads documents from the standard library, text files or jsonl.

A source lists its files when it is made, and reads them a bounded part at a time: a corpus, and
even a single file, may be larger than memory. Held-out documents are chosen by a hash of their name
(files) or text (jsonl lines), so the split is the same on every machine, and a document never
changes sides when others are added.

Left out on purpose: synthetic data, which needs no text (packing.py), compressed or remote files.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import os
import stat
import sysconfig
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moetrain.config import ConfigError, DataSection
from moetrain.data.chat import BadLineError, ChatTemplate, template_variables
from moetrain.data.tokenizer import Tokenizer

_logger = logging.getLogger("moetrain")

_PART_BYTES = 1 << 20
"""Size of the parts in which longer text files are read, cut at line ends."""

# Parts of the library folder that are not the library: installed packages, tests, their fixtures.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

# Formats that data sets come in instead of text. A folder that holds tables is a data set, and its
# other files only describe it; a compressed file in a folder is skipped with a warning.
_TABLES = {".arrow", ".parquet"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z"}


class TextPart(NamedTuple):
    """A document, or the next part of one that is too large to hold."""

    text: str
    loss_spans: list[tuple[int, int]] | None
    """The characters ``start:end`` to learn; None: all."""
    ends_document: bool
    num_bytes: int
    """Bytes of the source that were read for it, for the progress bar."""


class _HashRange(NamedTuple):
    """The documents whose hash, a number in [0, 1), lies in ``low <= hash < high``."""

    low: float
    high: float

    def holds(self, key: bytes) -> bool:
        """Return whether the document identified by ``key`` (its name or text) is in the range."""
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return self.low <= int.from_bytes(digest, "big") / 2**64 < self.high


_EVERYTHING = _HashRange(0.0, 1.0)


@dataclass(frozen=True)
class Source:
    """Files of documents, of one format."""

    files: list[Path]
    field: str
    """The setting that named the files, for error messages."""
    path: str
    """Its value."""

    def total_bytes(self) -> int:
        """Return how many bytes :meth:`parts` reads."""
        return sum(path.stat().st_size for path in self.files)

    def identity(self) -> list[Any]:
        """Return what decides the documents, as JSON for the key of the token cache."""
        raise NotImplementedError

    def parts(self) -> Iterator[TextPart]:
        """Yield the documents in order.

        Raises:
            ConfigError: a file cannot be read, or is malformed; the message says where.
        """
        raise NotImplementedError

    def _stamps(self) -> list[Any]:
        stats = [(file, file.stat()) for file in self.files]
        return [[str(file.absolute()), stat.st_size, stat.st_mtime_ns] for file, stat in stats]

    @contextmanager
    def _reading(self, file: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"{str(file)!r} cannot be read: {error.strerror}"
            raise ConfigError(self.field, problem) from None


class _TextSource(Source):
    """Text files, one document each. Bytes that are not UTF-8 become U+FFFD."""

    def identity(self) -> list[Any]:
        return ["text", self._stamps()]

    def parts(self) -> Iterator[TextPart]:
        for path in self.files:
            with self._reading(path):
                yield from _text_parts(path)


@dataclass(frozen=True)
class _JsonlSource(Source):
    """Lines of JSON objects with a text or ``messages``, of which a share is chosen by hash."""

    share: _HashRange
    text_field: str
    template: ChatTemplate

    def identity(self) -> list[Any]:
        template = self.template.identity()
        return ["jsonl", self._stamps(), self.share, self.text_field, template]

    def parts(self) -> Iterator[TextPart]:
        num_bytes = 0
        for path in self.files:
            with self._reading(path), path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    num_bytes += len(line)
                    if not line.strip() or not self.share.holds(line.strip()):
                        continue
                    try:
                        documents = self._documents(line)
                    except BadLineError as error:
                        field = error.field or self.field
                        raise ConfigError(field, f"{path}:{number}: {error}") from None
                    for text, spans in documents:
                        yield TextPart(text, spans, True, num_bytes)
                        num_bytes = 0

    def _documents(self, line: bytes) -> list[tuple[str, list[tuple[int, int]] | None]]:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadLineError(f"not JSON: {error.msg} at column {error.colno}") from None
        except UnicodeDecodeError as error:
            raise BadLineError(f"not UTF-8: {error.reason} at byte {error.start}") from None
        except ValueError as error:  # an integer of thousands of digits
            raise BadLineError(f"not JSON that can be read: {error}") from None
        except RecursionError:
            raise BadLineError("nested too deeply") from None
        if not isinstance(entry, dict):
            raise BadLineError("not a JSON object")
        if "messages" in entry:
            documents = self.template.documents(entry["messages"], template_variables(entry))
            return [(_unicode(text), spans) for text, spans in documents]
        if self.text_field not in entry:
            raise BadLineError(
                f"no {self.text_field!r} and no 'messages'; name the field in data.text_field"
            )
        text = entry[self.text_field]
        if not isinstance(text, str):
            raise BadLineError(f"{self.text_field!r} is not text")
        return [(_unicode(text), None)] if text.strip() else []


class _Sources(NamedTuple):
    """The sources that the settings name."""

    train: Source
    eval: Source | None
    """The held-out documents; None: there is no evaluation."""
    undivided: Source
    """All of ``data.path``: both of these together, unless ``eval`` has a path of its own."""
    template: str | None
    """The template of conversations, if the format has any."""


def open_sources(data: DataSection, tokenizer: Tokenizer) -> _Sources:
    """Open the sources of a run: list their files, and read nothing yet.

    Raises:
        ConfigError: a path or template file is missing or cannot be read, a template is malformed,
            or a folder has no files.
    """
    template = ChatTemplate.of(tokenizer, data.chat_template) if data.source == "jsonl" else None
    source = None if template is None else template.source

    def opened(field: str, path: str, *shares: _HashRange) -> list[Source]:
        skipped = _NOT_STDLIB if data.source == "stdlib" else frozenset()
        suffix = {"stdlib": ".py", "jsonl": ".jsonl"}.get(data.source, "")
        files = _list_files(field, path, suffix, skipped)
        if template is not None:
            settings = data.text_field, template
            return [_JsonlSource(files, field, path, share, *settings) for share in shares]
        named = [(file, os.fsencode(_name(file, Path(path)))) for file in files]
        return [
            _TextSource([file for file, name in named if share.holds(name)], field, path)
            for share in shares
        ]

    shares = _EVERYTHING, _HashRange(data.eval_fraction, 1.0), _HashRange(0.0, data.eval_fraction)
    if data.source == "stdlib":
        named = "data.source", sysconfig.get_path("stdlib")
    else:
        assert data.path is not None  # Config.check demands it
        named = "data.path", data.path
    undivided, train, held_out = opened(*named, *shares)
    if data.eval_path is not None:
        (other,) = opened("data.eval_path", data.eval_path, _EVERYTHING)
        return _Sources(undivided, other, undivided, source)
    return _Sources(train, held_out if data.eval_fraction else None, undivided, source)


def _list_files(field: str, path: str, suffix: str, skipped: Set[str]) -> list[Path]:
    """List the visible files under ``path`` (or ``path`` itself, if it is a file) by name."""

    def refuse(error: OSError) -> None:
        raise ConfigError(field, f"{error.filename!r} cannot be read: {error.strerror}")

    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        problem = "does not exist; name a file or folder of this machine"
        problem = problem if absent else f"cannot be read: {error}"
        raise ConfigError(field, f"{path!r} {problem}") from None
    root = Path(path)
    if stat.S_ISREG(mode):
        _check_is_text(field, path, root)
        return [root]
    if not stat.S_ISDIR(mode):
        raise ConfigError(field, f"{path!r} is neither a file nor a folder")
    found, tables = [], []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in skipped]
        for link in filter(os.path.islink, (Path(folder, s) for s in subfolders)):
            _logger.info("%s is a link to a folder; not followed", link)
        tables += sorted(Path(folder, n) for n in names if Path(n).suffix.lower() in _TABLES)
        for name in names:
            if name.endswith(suffix) and not name.startswith("."):
                if os.path.isfile(file := Path(folder, name)):
                    found.append(file)
                else:
                    _logger.info("%s is no file, or a link to none; skipped", file)
    if tables and not (found and suffix):
        _check_is_text(field, path, tables[0])
    if not found:
        raise ConfigError(
            field, f"{path!r} holds no {suffix or 'text'} files; name a file, or a folder with some"
        )
    return sorted(found, key=lambda file: _name(file, root))


def _check_is_text(field: str, path: str, file: Path) -> None:
    """Raise ConfigError for a ``file`` of ``path`` whose format, by its suffix, is not read."""
    suffix = file.suffix.lower()
    if suffix in _TABLES:
        remedy = "write its rows as .jsonl (to_json of Hugging Face's datasets does)"
    elif suffix in _COMPRESSED:
        remedy = "unpack it"
    else:
        return
    what = "it is" if str(file) == path else f"it holds {file.name!r},"
    raise ConfigError(field, f"{path!r} cannot be read: {what} no text but {suffix}; {remedy}")


def _name(path: Path, root: Path) -> str:
    """Return a document's name, which does not depend on where ``root`` lies."""
    return path.name if path == root else path.relative_to(root).as_posix()


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
            yield TextPart(text, None, not following, len(raw))
            raw = following


def _unicode(text: str) -> str:
    """Replace lone surrogates, which JSON can spell and no tokenizer accepts, by ``?``."""
    return text.encode(errors="replace").decode()
