"""Where text comes from: the standard library, text files, jsonl. Files in, documents out.

A source lists its files when it is made and reads them only when its pieces are asked for, a
bounded piece at a time: a corpus, and a single file too, may be larger than memory.

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
import sysconfig
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moetrain.config import ConfigError, DataSection
from moetrain.data.chat import CHATML, BadLineError, ChatTemplate, Span
from moetrain.data.tokenizer import Tokenizer

logger = logging.getLogger("moetrain")

PIECE_BYTES = 1 << 20
"""Longer text files are read in pieces of about this size, cut at line ends."""

# Parts of the library folder that are not the library: installed packages, tests, their fixtures.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Piece(NamedTuple):
    """A document, or the next part of one too large to hold."""

    text: str
    loss_spans: list[Span] | None
    """The characters to learn, None: all."""
    ends_document: bool
    num_bytes: int
    """Bytes of the source read for it, for the progress bar."""


class Share(NamedTuple):
    """The documents whose hash, a number in [0, 1), lies in ``low <= hash < high``."""

    low: float
    high: float

    def holds(self, key: bytes) -> bool:
        """Whether the document known by ``key`` (its name or text) is in this share."""
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return self.low <= int.from_bytes(digest, "big") / 2**64 < self.high


EVERYTHING = Share(0.0, 1.0)


@dataclass(frozen=True)
class TextSource:
    """Text files, one document each. Bytes that are no UTF-8 become U+FFFD."""

    files: list[Path]
    if_empty: ConfigError
    """What to tell the user if no document has any text."""

    def identity(self) -> list[Any]:
        """What decides the documents, as JSON: the key of the token cache."""
        return ["text", _stat(self.files)]

    def total_bytes(self) -> int:
        """Bytes that :meth:`pieces` reads."""
        return sum(path.stat().st_size for path in self.files)

    def pieces(self) -> Iterator[Piece]:
        """The documents, in order."""
        for path in self.files:
            yield from _text_pieces(path)


@dataclass(frozen=True)
class JsonlSource:
    """Lines of JSON objects with a text, or with ``messages``; a share of them, by hash."""

    files: list[Path]
    if_empty: ConfigError
    """As of :class:`TextSource`."""
    share: Share
    field: str
    """The setting that named the files, for errors."""
    text_field: str
    template: ChatTemplate

    def identity(self) -> list[Any]:
        """As :meth:`TextSource.identity`."""
        return ["jsonl", _stat(self.files), self.share, self.text_field, self.template.source]

    def total_bytes(self) -> int:
        """As :meth:`TextSource.total_bytes`."""
        return sum(path.stat().st_size for path in self.files)

    def pieces(self) -> Iterator[Piece]:
        """The documents, in order.

        Raises:
            ConfigError: a line that is not as promised, by file and line number.
        """
        num_bytes = 0
        for path in self.files:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    num_bytes += len(line)
                    if not line.strip() or not self.share.holds(line.strip()):
                        continue
                    try:
                        documents = self._documents(line)
                    except BadLineError as error:
                        raise ConfigError(self.field, f"{path}:{number}: {error}") from None
                    for text, spans in documents:
                        yield Piece(text, spans, True, num_bytes)
                        num_bytes = 0

    def _documents(self, line: bytes) -> list[tuple[str, list[Span] | None]]:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadLineError(f"not JSON: {error.msg} at column {error.colno}") from None
        except UnicodeDecodeError as error:
            raise BadLineError(f"not UTF-8: {error.reason} at byte {error.start}") from None
        if not isinstance(entry, dict):
            raise BadLineError("not a JSON object")
        if "messages" in entry:
            return [(_unicode(t), spans) for t, spans in self.template.documents(entry["messages"])]
        if self.text_field not in entry:
            raise BadLineError(
                f"no {self.text_field!r} and no 'messages'; name the field in data.text_field"
            )
        text = entry[self.text_field]
        if not isinstance(text, str):
            raise BadLineError(f"{self.text_field!r} is not text")
        return [(_unicode(text), None)] if text.strip() else []


Source = TextSource | JsonlSource


def open_sources(data: DataSection, tokenizer: Tokenizer) -> tuple[Source, Source | None]:
    """The training and the held-out source (None: no evaluation) that the settings ask for.

    Raises:
        ConfigError: a path or template file that is missing, or a folder without files.
    """
    if data.eval_path is not None:
        train = _open(data, "data.path", data.path, EVERYTHING, tokenizer)
        return train, _open(data, "data.eval_path", data.eval_path, EVERYTHING, tokenizer)
    train = _open(data, "data.path", data.path, Share(data.eval_fraction, 1.0), tokenizer)
    if data.eval_fraction == 0:
        return train, None
    return train, _open(data, "data.path", data.path, Share(0.0, data.eval_fraction), tokenizer)


def _open(
    data: DataSection, field: str, path: str | None, share: Share, tokenizer: Tokenizer
) -> Source:
    if data.source == "stdlib":
        field, path = "data.source", sysconfig.get_path("stdlib")
    if path is None:
        raise ConfigError(field, f"not set, and data.source {data.source!r} needs it")
    root = Path(path)
    suffix = {"stdlib": ".py", "jsonl": ".jsonl"}.get(data.source, "")
    files = _list_files(root, suffix, _NOT_STDLIB if data.source == "stdlib" else frozenset())
    if not files:
        missing = f"holds no {suffix or 'text'} files" if root.is_dir() else "does not exist"
        raise ConfigError(field, f"{path!r} {missing}")
    if_empty = _empty_error(field, path, share, data.eval_fraction)
    if data.source == "jsonl":
        template = _chat_template(data.chat_template, tokenizer)
        return JsonlSource(files, if_empty, share, field, data.text_field, template)
    return TextSource([f for f in files if share.holds(_name(f, root).encode())], if_empty)


def _list_files(root: Path, suffix: str, skipped: Set[str]) -> list[Path]:
    """Visible files under ``root`` (or ``root`` itself, if a file), in the order of their names."""
    if root.is_file():
        return [root]
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in skipped]
        found += [
            Path(folder, name)
            for name in names
            if name.endswith(suffix) and not name.startswith(".")
        ]
    return sorted(found, key=lambda path: _name(path, root))


def _name(path: Path, root: Path) -> str:
    """A document's name, the same wherever ``root`` lies."""
    return path.name if path == root else path.relative_to(root).as_posix()


def _stat(files: list[Path]) -> list[Any]:
    return [[str(f.absolute()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def _empty_error(field: str, path: str, share: Share, eval_fraction: float) -> ConfigError:
    if share == EVERYTHING:
        return ConfigError(field, f"{path!r} holds no text")
    if share.low > 0:
        return ConfigError(
            field, f"{path!r} holds no text, or data.eval_fraction {eval_fraction} holds out all"
        )
    return ConfigError(
        "data.eval_fraction",
        f"{eval_fraction} of the documents of {path!r} holds out none; raise it, name held-out "
        "text in data.eval_path, or set it to 0 for no evaluation",
    )


def _chat_template(file_name: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    source = tokenizer.chat_template or CHATML
    if file_name is not None:
        if not Path(file_name).is_file():
            raise ConfigError("data.chat_template", f"{file_name!r} does not exist")
        source = Path(file_name).read_text(encoding="utf-8")
    return ChatTemplate(source, tokenizer.special_tokens)


def _text_pieces(path: Path) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    with path.open("rb") as file:
        raw = file.read(PIECE_BYTES)
        if b"\0" in raw:
            logger.warning("%s is not text; skipped", path)
            return
        if not raw.strip():
            return
        while raw:
            raw += file.readline(PIECE_BYTES)
            following = file.read(PIECE_BYTES)
            text = decoder.decode(raw, final=not following)
            yield Piece(text, None, not following, len(raw))
            raw = following


def _unicode(text: str) -> str:
    """``text`` with ``?`` for lone surrogates, which JSON can spell and no tokenizer takes."""
    return text.encode(errors="replace").decode()
