"""The token cache: a source is tokenised once into files that training maps into memory.

A cache is a folder named by a hash of everything that decides its tokens (the source's files and
how they are read, the tokenizer, the format below). It is written under a temporary name and
renamed, so it exists whole or not at all; of several processes that build it at once the first
one wins and the others use its result. Neither building nor reading holds the corpus in memory.

    tokens.bin     [num_tokens] uint16, or uint32 for a vocabulary over 65,536
    documents.bin  [num_documents + 1] int64: where each document starts, then num_tokens
    masked.bin     [num_tokens] uint8, 1 for a token without loss; empty if there is none
    meta.json      the sizes and the type of the tokens

Every document ends with EOS. Left out on purpose: removing caches that are no longer used (delete
the folder), and content hashes (a file's path, size and time of change stand for its content).
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from moetrain.config import ConfigError
from moetrain.data.chat import Span
from moetrain.data.sources import Piece, Source
from moetrain.data.tokenizer import Tokenizer

logger = logging.getLogger("moetrain")

FORMAT = 1
"""Part of every key: raise it when the files or the way tokens are made change."""

# Characters encoded in one call: enough for the tokenizer's threads, small beside any model.
_BATCH_CHARACTERS = 1 << 22


class TokenCache(NamedTuple):
    """Tokenised documents, mapped into memory and read-only."""

    tokens: np.ndarray
    """[num_tokens] uint16 or uint32."""
    documents: np.ndarray
    """[num_documents + 1] int64: document d is ``tokens[documents[d]:documents[d + 1]]``."""
    masked: np.ndarray | None
    """[num_tokens] uint8, 1 where a token carries no loss; None: all carry loss."""


def open_cache(source: Source, tokenizer: Tokenizer, cache_dir: Path) -> TokenCache:
    """The tokens of ``source``, built now if no earlier run did.

    Raises:
        ConfigError: the source is wrong or has no text, ``cache_dir`` cannot be written, or a
            cache in it is damaged.
    """
    identity = [FORMAT, tokenizer.fingerprint, source.identity()]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    folder = cache_dir / key
    if not folder.is_dir():
        _build(source, tokenizer, folder)
    return _open(folder)


def _open(folder: Path) -> TokenCache:
    meta = json.loads((folder / "meta.json").read_text())

    def mapped(name: str, dtype: str, length: int) -> np.ndarray:
        file = folder / name
        if file.stat().st_size != length * np.dtype(dtype).itemsize:
            raise ConfigError("data.cache_dir", f"{file} is damaged; delete {folder}")
        return np.memmap(file, dtype=dtype, mode="r")

    has_mask = (folder / "masked.bin").stat().st_size > 0
    return TokenCache(
        mapped("tokens.bin", meta["dtype"], meta["num_tokens"]),
        mapped("documents.bin", "int64", meta["num_documents"] + 1),
        mapped("masked.bin", "uint8", meta["num_tokens"]) if has_mask else None,
    )


def _build(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ConfigError("data.cache_dir", f"{folder.parent} cannot be written: {error}") from None
    try:
        _write(source, tokenizer, temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    num_tokens = num_documents = 0
    with (
        Progress(
            console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
        ) as progress,
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "documents.bin").open("wb") as documents,
        (folder / "masked.bin").open("wb") as masked,
    ):
        task = progress.add_task("Tokenising", total=source.total_bytes())
        documents.write(np.int64(0).tobytes())
        for piece, ids_T, masked_T in _encoded(source.pieces(), tokenizer):
            tokens.write(ids_T.astype(dtype).tobytes())
            if masked_T is not None:
                masked.seek(num_tokens)  # what is skipped reads as 0: with loss
                masked.write(masked_T.tobytes())
            num_tokens += len(ids_T)
            if piece.ends_document:
                num_documents += 1
                documents.write(np.int64(num_tokens).tobytes())
            progress.advance(task, piece.num_bytes)
        if masked.tell() > 0:
            masked.truncate(num_tokens)
    if num_documents == 0:
        raise source.if_empty
    meta = {"num_tokens": num_tokens, "num_documents": num_documents, "dtype": dtype.name}
    (folder / "meta.json").write_text(json.dumps(meta))
    logger.info("tokenised %d documents into %d tokens", num_documents, num_tokens)


def _encoded(
    pieces: Iterable[Piece], tokenizer: Tokenizer
) -> Iterator[tuple[Piece, np.ndarray, np.ndarray | None]]:
    """Each piece with its ids [T], documents ended by EOS, and [T] whether a token has no loss."""
    for batch in _batches(pieces):
        for piece, encoded in zip(
            batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True
        ):
            ids_T, masked_T = encoded.ids, None
            if piece.loss_spans is not None:
                masked_T = _masked(encoded.offsets(), piece.loss_spans)
            has_eos = len(ids_T) > 0 and ids_T[-1] == tokenizer.eos_id
            if piece.ends_document and not has_eos:
                ids_T = np.append(ids_T.astype(np.uint32), np.uint32(tokenizer.eos_id))
                # It ends the assistant's turn, or a text without any mask: it has loss.
                masked_T = None if masked_T is None else np.append(masked_T, np.uint8(0))
            yield piece, ids_T, masked_T


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _masked(offsets_T2: np.ndarray, spans: list[Span]) -> np.ndarray:
    """[T] uint8: 0 for a token that covers a character of a span, else 1.

    Spans [(3, 5)] over tokens at (0, 2), (2, 4), (4, 5), (5, 6) give 1, 0, 0, 1.
    """
    masked_T = np.ones(len(offsets_T2), dtype=np.uint8)
    for start, end in spans:
        masked_T[(offsets_T2[:, 0] < end) & (offsets_T2[:, 1] > start)] = 0
    return masked_T
