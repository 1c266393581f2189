"""Reads documents from the standard library, text files or jsonl.

A source lists its files when it is made, and reads them only when its parts are requested, a
bounded part at a time: a corpus, and even a single file, may be larger than memory.

Held-out documents are chosen by a hash of their name (files) or text (jsonl lines), so the split
is the same on every machine, and a document never changes sides when others are added.

Left out on purpose: synthetic data, which is made of tokens and needs no text (packing.py), and
compressed or remote files.
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
from moetrain.data.chat import CHATML, BadLineError, ChatTemplate, Span, template_variables
from moetrain.data.tokenizer import Tokenizer

logger = logging.getLogger("moetrain")

PART_BYTES = 1 << 20
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
    loss_spans: list[Span] | None
    """The characters to learn; None: all."""
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
class _FileSource:
    files: list[Path]
    if_empty: ConfigError
    """The error to raise if no document has any text."""

    def total_bytes(self) -> int:
        """Return how many bytes ``parts`` reads."""
        return sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True)
class TextSource(_FileSource):
    """Text files, one document each. Bytes that are not UTF-8 become U+FFFD."""

    def identity(self) -> list[Any]:
        """Return what decides the documents, as JSON for the key of the token cache."""
        return ["text", _stat(self.files)]

    def parts(self) -> Iterator[TextPart]:
        """Yield the documents in order."""
        for path in self.files:
            with _reading(path, self.if_empty.field):
                yield from _text_parts(path)


@dataclass(frozen=True)
class JsonlSource(_FileSource):
    """Lines of JSON objects with a text or ``messages``, of which a share is chosen by hash."""

    share: _HashRange
    field: str
    """The setting that named the files, for error messages."""
    text_field: str
    template: ChatTemplate

    def identity(self) -> list[Any]:
        """Return what decides the documents, as :meth:`TextSource.identity` does."""
        template = self.template.identity()
        return ["jsonl", _stat(self.files), self.share, self.text_field, template]

    def parts(self) -> Iterator[TextPart]:
        """Yield the documents in order.

        Raises:
            ConfigError: a line is malformed; the message names the file and the line number.
        """
        num_bytes = 0
        for path in self.files:
            with _reading(path, self.field), path.open("rb") as file:
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

    def _documents(self, line: bytes) -> list[tuple[str, list[Span] | None]]:
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


Source = TextSource | JsonlSource


class _Sources(NamedTuple):
    """The sources that the settings name."""

    train: Source
    eval: Source | None
    """The held-out documents; None: there is no evaluation."""
    undivided: Source
    """All of ``data.path``: both of these together, unless ``eval`` has a path of its own."""


def open_sources(data: DataSection, tokenizer: Tokenizer) -> _Sources:
    """Open the sources of a run: list their files, and read nothing yet.

    Raises:
        ConfigError: a path or template file is missing or cannot be read, a template is malformed,
            or a folder has no files.
    """
    shares = _EVERYTHING, _HashRange(data.eval_fraction, 1.0), _HashRange(0.0, data.eval_fraction)
    undivided, train, held_out = _open(data, "data.path", data.path, tokenizer, *shares)
    if data.eval_path is not None:
        (other,) = _open(data, "data.eval_path", data.eval_path, tokenizer, _EVERYTHING)
        return _Sources(undivided, other, undivided)
    return _Sources(train, held_out if data.eval_fraction else None, undivided)


def _open(
    data: DataSection, field: str, path: str | None, tokenizer: Tokenizer, *shares: _HashRange
) -> list[Source]:
    if data.source == "stdlib":
        field, path = "data.source", sysconfig.get_path("stdlib")
    if path is None:
        raise ConfigError(field, f"not set, and data.source {data.source!r} needs it")
    suffix = {"stdlib": ".py", "jsonl": ".jsonl"}.get(data.source, "")
    skipped = _NOT_STDLIB if data.source == "stdlib" else frozenset()
    files = _list_files(field, path, suffix, skipped)
    if_empty = ConfigError(field, f"{path!r} holds no text")
    if data.source == "jsonl":
        template = chat_template(data.chat_template, tokenizer)
        return [JsonlSource(files, if_empty, s, field, data.text_field, template) for s in shares]
    names = [os.fsencode(_name(file, Path(path))) for file in files]
    return [
        TextSource([f for f, n in zip(files, names, strict=True) if share.holds(n)], if_empty)
        for share in shares
    ]


def _list_files(field: str, path: str, suffix: str, skipped: Set[str]) -> list[Path]:
    """List the visible files under ``path`` (or ``path`` itself, if it is a file) by name."""

    def refuse(error: OSError) -> None:
        raise ConfigError(field, f"{error.filename!r} cannot be read: {error.strerror}")

    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise ConfigError(
            field, f"{path!r} does not exist; name a file or folder of this machine"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: no path at all, with a NUL in it
        raise ConfigError(field, f"{path!r} cannot be read: {error}") from None
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
            logger.info("%s is a link to a folder; not followed", link)
        tables += sorted(Path(folder, n) for n in names if Path(n).suffix.lower() in _TABLES)
        for name in names:
            if name.endswith(suffix) and not name.startswith("."):
                if os.path.isfile(file := Path(folder, name)):
                    found.append(file)
                else:
                    logger.info("%s is no file, or a link to none; skipped", file)
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


@contextmanager
def _reading(path: Path, field: str) -> Iterator[None]:
    """Turn an OSError inside into an error of the setting ``field``, which named the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(field, f"{str(path)!r} cannot be read: {error.strerror}") from None


def _name(path: Path, root: Path) -> str:
    """Return a document's name, which does not depend on where ``root`` lies."""
    return path.name if path == root else path.relative_to(root).as_posix()


def _stat(files: list[Path]) -> list[Any]:
    return [[str(f.absolute()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def chat_template(file_name: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of ``data.chat_template``, else the tokenizer's, else ChatML."""
    special = tokenizer.special_tokens
    if file_name is not None:
        return ChatTemplate(_read_template(file_name), special, check=True)
    if tokenizer.chat_template is not None:
        return ChatTemplate(tokenizer.chat_template, special, with_tools=tokenizer.tool_template)
    # Templates write their own BOS: so does this one, where the model knows texts to begin with it.
    has_bos = tokenizer.bos_ids and "bos_token" in special
    return ChatTemplate("{{- bos_token }}" * bool(has_bos) + CHATML, special)


def _read_template(file_name: str) -> str:
    try:
        if stat.S_ISREG(os.stat(file_name).st_mode):
            return Path(file_name).read_text(encoding="utf-8")
        problem = "is not a file"
    except FileNotFoundError:
        problem = "does not exist"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValueError as error:  # not UTF-8; or no path at all, with a NUL in it
        problem = f"is no text file: {error}"
    raise ConfigError("data.chat_template", f"{file_name!r} {problem}")


def _text_parts(path: Path) -> Iterator[TextPart]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    with path.open("rb") as file:
        raw = file.read(PART_BYTES)
        if b"\0" in raw:
            logger.warning("%s is not text; skipped", path)
            return
        if not raw.strip():
            return
        while raw:
            raw += file.readline(PART_BYTES)
            following = file.read(PART_BYTES)
            text = decoder.decode(raw, final=not following)
            yield TextPart(text, None, not following, len(raw))
            raw = following


def _unicode(text: str) -> str:
    """Replace lone surrogates, which JSON can spell and no tokenizer accepts, by ``?``."""
    return text.encode(errors="replace").decode()
