"""The token cache: a source is tokenised once, into files that training maps into memory.

A cache is a folder named by a hash of everything that decides its tokens. It is written under a
temporary name and renamed, so it exists whole or not at all. If several processes want it at once,
one builds it, and the others wait. Neither building nor reading holds the corpus in memory.

    tokens.bin     [num_tokens] uint16, or uint32 for a vocabulary over 65,536
    documents.bin  [num_documents + 1] int64: where each document starts, then num_tokens
    targets.bin    [num_documents] int64: tokens with loss in each document
    masked.bin     [num_tokens] uint8, 1 for a token without loss; empty if there is none
    labels.bin     [num_documents] int8: 1 for an answer that is wanted, 0 for one that is not, -1
                   for a document without a label; empty if there are no labels
    margins.bin    [num_documents] float32: by how much the rewards of a pair's answers are to
                   differ, in both; empty if margins are not read
    meta.json      the sizes, the type of the tokens, a hash of all that is in the files, checksums
                   of their beginnings, the records that were left out, and warnings

Left out on purpose: removing caches that are no longer used (delete the folder), and reading
sources only to see whether they changed (a file's path, size and time of change stand for its
content).
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import Progress

from moetrain.config import ConfigError, logger
from moetrain.config.environment import launched_place, one_tokenizer_thread
from moetrain.config.locks import file_lock
from moetrain.data.sources import Document, HashRange, Skipped, Source
from moetrain.data.tokenizer import Tokenizer
from moetrain.data.warned import noted, warn_once

_T = TypeVar("_T")

_FORMAT = 8
"""Part of every key. Raise it when the files, or the way tokens are made, change."""

_FILES = ("tokens.bin", "documents.bin", "targets.bin", "masked.bin", "labels.bin", "margins.bin")
_CHECKED_BYTES = 1 << 26
"""Bytes of each file that are checked when a cache is opened: all of a small corpus, and as many of
a large one as are read in a tenth of a second."""
# Characters encoded in one call: enough for the tokenizer's threads, small beside any model.
_BATCH_CHARACTERS = 1 << 22
_BLOCK_BYTES = 1 << 22
"""Bytes of text in a block of a stream, at least; twice as many at most."""
_KEPT_BLOCKS, _MOST_WORKERS = 4, 8
_FREE_SHARE = 0.1

_Place = tuple[int, int, int]
"""Where a block is in a walk: the pass, the group of parts in its order, the chunk of that."""


class TokenCache(NamedTuple):
    """Tokenised documents, mapped into memory read-only."""

    tokens: np.ndarray
    """[num_tokens] uint16 or uint32."""
    documents: np.ndarray
    """[num_documents + 1] int64: document d is ``tokens[documents[d]:documents[d + 1]]``."""
    targets: np.ndarray
    """[num_documents] int64: tokens with loss in each document, without its first token."""
    masked: np.ndarray | None
    """[num_tokens] uint8, 1 for a token without loss; None: there are no conversations, and every
    token has loss."""
    content: str
    """Hash of all of these."""
    labels: np.ndarray | None = None
    """[num_documents] int8: whether an answer is wanted (KTO), 1 or 0, -1 without a label; None:
    there are no labels."""
    skipped: Skipped = Skipped()
    """Records that were left out as bad."""
    margins: np.ndarray | None = None
    """[num_documents] float32: the margin of the pair that a document is of; None: there are no
    margins."""
    warnings: Mapping[str, str] = MappingProxyType({})
    """What was warned of when the cache was made, by kind (:mod:`moetrain.data.warned`)."""

    @property
    def num_documents(self) -> int:
        return len(self.targets)

    @classmethod
    def of(cls, source: Source, tokenizer: Tokenizer, cache_dir: Path) -> Self:
        """Open the cache of ``source``, and build it first if no earlier run did.

        Raises ConfigError: the source or the tokenizer is bad, ``cache_dir`` cannot be written, or
        the cache in it is damaged.
        """
        identity = [_FORMAT, tokenizer.fingerprint, source.identity()]
        key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        folder = cache_dir / key
        skipped = Skipped()
        _build(source.documents(skipped), tokenizer, folder, source.total_bytes, skipped)
        cache = cls.opened(folder)
        cache.repeat_warnings()
        return cache

    def repeat_warnings(self) -> None:
        """Warn as the run did that made the cache, on the main rank."""
        place = launched_place()
        if place is None or place.rank == 0:
            for kind, text in self.warnings.items():
                warn_once(kind, text)

    @classmethod
    def opened(cls, folder: Path) -> Self:
        """Map the cache in ``folder``; ConfigError if it is damaged."""

        def mapped(name: str, dtype: str, length: int) -> np.ndarray:
            # An empty file cannot be mapped.
            found = np.memmap(folder / name, dtype, "r") if length else np.empty(0, dtype)
            if len(found) != length:
                raise ValueError(f"{name} has {len(found)} numbers")
            return found

        try:
            meta = json.loads((folder / "meta.json").read_bytes())
            num_tokens, num_documents = meta["num_tokens"], meta["num_documents"]
            if meta["dtype"] not in ("uint16", "uint32"):
                raise ValueError(f"tokens of type {meta['dtype']!r}")
            for name in _FILES:
                if _checksum(folder / name) != meta["checksums"][name]:
                    raise ValueError(f"{name} is not what was written")
            has_mask = (folder / "masked.bin").stat().st_size > 0
            has_labels = (folder / "labels.bin").stat().st_size > 0
            has_margins = (folder / "margins.bin").stat().st_size > 0
            return cls(
                mapped("tokens.bin", meta["dtype"], num_tokens),
                mapped("documents.bin", "int64", num_documents + 1),
                mapped("targets.bin", "int64", num_documents),
                mapped("masked.bin", "uint8", num_tokens) if has_mask else None,
                str(meta["content"]),
                mapped("labels.bin", "int8", num_documents) if has_labels else None,
                Skipped(**meta.get("skipped", {})),
                mapped("margins.bin", "float32", num_documents) if has_margins else None,
                {str(kind): str(text) for kind, text in meta.get("warnings", {}).items()},
            )
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            reason = str(error) if isinstance(error, ValueError) else repr(error)
            problem = f"{folder} is damaged ({reason}); delete it to tokenise again"
            raise ConfigError("data.cache_dir", problem) from None


class Blocks:
    """The token caches of a source's blocks, made by several processes ahead of their use.

    A block holds parts from all over the source. Blocks stay in the cache for the next pass and the
    next run, until a tenth of the disk is left: then those that were used first go.
    """

    def __init__(
        self,
        source: Source,
        share: HashRange,
        tokenizer: Tokenizer,
        cache_dir: Path,
        workers: int | None,
    ) -> None:
        """List the blocks of ``share`` of ``source``; ``workers`` processes make them (None: a core
        each, up to 8)."""
        parts = source.file_parts(share)
        order = np.random.Generator(np.random.PCG64(0)).permutation(len(parts))
        shuffled = (parts[i] for i in order)
        self._groups = list(_grouped(shuffled, lambda part: part.size, _BLOCK_BYTES)) or [[]]
        self.num_bytes = sum(part.size for part in parts)
        self._source, self._share, self._tokenizer = source, share, tokenizer
        self._warned: set[str] = set()
        names = [[part.file.name, *part[1:]] for part in parts]
        self.identity = ["blocks", _FORMAT, tokenizer.fingerprint, share, names]
        self.identity += source.identity()[2:]  # without the files' places
        key = json.dumps([self.identity, source.identity()])
        self._folder = cache_dir / hashlib.sha256(key.encode()).hexdigest()[:32]
        place = launched_place()
        self._local_rank = 0 if place is None else place.local_rank
        self._on_machine = (place and place.on_machine) or 1
        cores = (os.cpu_count() or 1) // self._on_machine
        self._workers = min(max(1, cores), _MOST_WORKERS) if workers is None else workers

    def first(self) -> tuple[TokenCache, int]:
        """Return the first block, and how many bytes its records have."""
        found = next(self._chunks(0), [])
        return self._made(found, "0-0"), max(1, sum(each.num_bytes for each in found))

    def sample(self, num_bytes: int) -> TokenCache | None:
        """Return a cache of the first ``num_bytes``, of at most sixteen groups of parts."""
        found = []
        for group in range(min(16, len(self._groups))):
            for each in itertools.chain.from_iterable(self._chunks(group)):
                found.append(each)
                num_bytes -= each.num_bytes
            if num_bytes <= 0:
                break
        return self._made(found, "sample-0") if found else None

    def walk(self, seed: int, at: _Place) -> Iterator[tuple[_Place, TokenCache]]:
        """Yield blocks and their places, from ``at`` on without end; raises as TokenCache.of."""
        ahead: deque[tuple[_Place, str, list[Any]]] = deque()
        used: deque[Path] = deque()
        read = self._read(seed, at)
        while True:
            while len(ahead) <= 2 * self._workers * self._on_machine:
                place, name, found = next(read)
                ahead.append((place, name, found))
                is_mine = (place[1] + place[2]) % self._on_machine == self._local_rank
                # The next one is made here, and so are all if there are no processes for it.
                if len(ahead) > 1 and is_mine and not (self._folder / name).is_dir():
                    self._pool.apply_async(_work, (found, self._folder / name))
            place, name, found = ahead.popleft()
            yield place, self._made(found, name)
            used.append(self._folder / name)
            disk = shutil.disk_usage(self._folder)
            while len(used) > _KEPT_BLOCKS and disk.free < _FREE_SHARE * disk.total:
                shutil.rmtree(used.popleft(), ignore_errors=True)
                disk = shutil.disk_usage(self._folder)

    def _made(self, found: list[Any], name: str) -> TokenCache:
        folder = self._folder / name
        _build_block(self._source, found, self._tokenizer, folder)
        made = TokenCache.opened(folder)
        if name not in self._warned:  # a block is opened again, in the next pass at the latest
            self._warned.add(name)
            made.skipped.warn(self._source.path)
            made.repeat_warnings()
        return made

    def _read(self, seed: int, at: _Place) -> Iterator[tuple[_Place, str, list[Any]]]:
        """Yield the place, the name and the records of each block, without end."""
        for turn in itertools.count(at[0]):
            generator = np.random.Generator(np.random.PCG64([seed, turn]))
            order = [0, *(1 + generator.permutation(len(self._groups) - 1))]
            for place in range(at[1] if turn == at[0] else 0, len(order)):
                skipped = at[2] if (turn, place) == at[:2] else 0
                chunks = enumerate(self._chunks(int(order[place])))
                for chunk, found in itertools.islice(chunks, skipped, None):
                    yield (turn, place, chunk), f"{order[place]}-{chunk}", found

    def _chunks(self, group: int) -> Iterator[list[Any]]:
        parts = self._groups[group]
        records = (each for part in parts for each in self._source.read(part, self._share))
        return _grouped(records, lambda each: each.num_bytes, 2 * _BLOCK_BYTES)

    @cached_property
    def _pool(self) -> Any:
        """The processes, which are started without waiting for what they import.

        They get the tokenizer in a file: megabytes in the pipe of a process that is starting would
        be waited for, one process after the other. They do not import the program's main module,
        which may have no guard against that, and which they have no use for.
        """
        folder = TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True)
        given = Path(folder.name, "given")
        source = replace(self._source, files=[], table=None)  # documents_of needs none of them
        given.write_bytes(pickle.dumps((source, self._tokenizer)))
        program = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            context = multiprocessing.get_context("spawn")
            pool = context.Pool(self._workers, _begin_worker, (given,))
        finally:
            sys.modules["__main__"] = program
        weakref.finalize(self, folder.cleanup)
        weakref.finalize(self, pool.terminate)
        return pool


_worker: list[Any] = []
"""In a process that makes blocks: the source, without its files, and the tokenizer."""


def _begin_worker(given: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    one_tokenizer_thread()
    _worker[:] = pickle.loads(given.read_bytes())


def _work(found: list[Any], folder: Path) -> None:
    source, tokenizer = _worker
    _build_block(source, found, tokenizer, folder)


def _build_block(source: Source, found: list[Any], tokenizer: Tokenizer, folder: Path) -> None:
    skipped = Skipped()
    _build(source.documents_of(found, skipped), tokenizer, folder, skipped=skipped)


def _checksum(file: Path) -> int:
    with file.open("rb") as opened:
        return zlib.crc32(opened.read(_CHECKED_BYTES))


def _build(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: Path,
    total: Callable[[], int] | None = None,
    skipped: Skipped | None = None,
) -> None:
    """Write a cache, unless it is there; if another process writes it, wait for that.

    Args:
        total: counts the bytes of all documents, for the progress bar; None: there is none.
        skipped: what ``documents`` leaves out, once all are read.
    """
    if os.path.isdir(folder):  # not if its name is too long to ask
        return
    parent = folder.parent
    is_silent = total is None or not sys.stderr.isatty()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with (
            # Without locks all build the same, and the first one wins.
            file_lock(folder.with_suffix(".lock"), waits=True),
            TemporaryDirectory(None, f"{folder.name}.", parent, ignore_cleanup_errors=True) as made,
            Progress(console=Console(stderr=True), transient=True, disable=is_silent) as progress,
        ):
            if folder.is_dir():
                return
            task = progress.add_task("Tokenising", total=total and total())
            with noted() as warnings:
                meta = _write(documents, tokenizer, Path(made), partial(progress.advance, task))
            if skipped is not None and skipped.count:
                meta["skipped"] = {"count": skipped.count, "kinds": skipped.kinds}
            if warnings:
                meta["warnings"] = warnings
            (Path(made) / "meta.json").write_text(json.dumps(meta))
            Path(made).rename(folder)
    except OSError as error:  # about this folder: sources report what is wrong with their files
        if os.path.isdir(folder):
            return
        problem = f"{str(parent)!r} cannot be written: {error}"
        raise ConfigError("data.cache_dir", problem) from None
    if meta["num_documents"] and total is not None:
        logger.info("tokenised %(num_documents)d documents into %(num_tokens)d tokens", meta)


def _write(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: Path,
    advance: Callable[[int], object],
) -> dict[str, Any]:
    """Write the files of a cache but for meta.json; return the content of that."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    content = hashlib.blake2b(digest_size=16)
    num_tokens = num_documents = start = num_targets = 0
    with ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("wb")) for name in _FILES]
        tokens, starts, targets, masked, labels, margins = files
        starts.write(np.int64(0).tobytes())
        for document, ids_T, masked_T in encoded(documents, tokenizer):
            data = ids_T.astype(dtype).tobytes()
            tokens.write(data)
            content.update(b"%d %d %d;" % (len(ids_T), masked_T is not None, document.is_end))
            content.update(data)
            learned_T = np.ones(len(ids_T), bool) if masked_T is None else masked_T == 0
            if masked_T is not None:
                masked.seek(num_tokens)  # what is skipped reads as 0: with loss
                masked.write(masked_T.tobytes())
                content.update(masked_T.tobytes())
            if num_tokens == start:
                learned_T = learned_T[1:]  # no token predicts a document's first
            num_targets += int(learned_T.sum())
            num_tokens += len(ids_T)
            if document.is_end:
                starts.write(np.int64(num_tokens).tobytes())
                targets.write(np.int64(num_targets).tobytes())
                if document.label is not None:
                    labels.write(b"\xff" * (num_documents - labels.tell()))  # -1: without a label
                    labels.write(np.int8(document.label).tobytes())
                    content.update(b"label %d;" % document.label)
                if document.margin is not None:
                    margins.write(np.float32(document.margin).tobytes())
                    content.update(b"margin %r;" % document.margin)
                num_documents, start, num_targets = num_documents + 1, num_tokens, 0
            advance(document.num_bytes)
        if masked.tell() > 0:
            masked.truncate(num_tokens)
        if labels.tell() > 0:
            labels.write(b"\xff" * (num_documents - labels.tell()))
        for file in files:
            file.flush()
            os.fsync(file.fileno())  # no name before its content: a machine may stop at any time
    meta = {"num_tokens": num_tokens, "num_documents": num_documents, "dtype": dtype.name}
    meta |= {"content": content.hexdigest()}
    return meta | {"checksums": {name: _checksum(folder / name) for name in _FILES}}


def encoded(
    documents: Iterable[Document], tokenizer: Tokenizer
) -> Iterator[tuple[Document, np.ndarray, np.ndarray | None]]:
    """Yield each part with its ids [T], and [T] whether a token has no loss (None: all have).

    Documents begin with ``bos_ids``, once, unless a template says how; all end with EOS.
    """
    is_start = True
    for batch in _grouped(documents, lambda document: len(document.text), _BATCH_CHARACTERS):
        encodings = tokenizer.encode_batch([document.text for document in batch])
        for document, encoded in zip(batch, encodings, strict=True):
            has_bos, masked_T = is_start and not document.is_rendered, None
            bos_T = np.array(tokenizer.missing_bos(encoded.ids) if has_bos else (), np.uint32)
            ids_T = np.concatenate([bos_T, encoded.ids])
            lacks_eos = document.is_end and ids_T[-1:].tolist() != [tokenizer.eos_id]
            ids_T = np.append(ids_T, np.array([tokenizer.eos_id] * lacks_eos, np.uint32))
            if document.loss_spans is not None:
                masked_T = _masked(encoded.offsets(), document.loss_spans)
                # EOS has the loss of the text or of the assistant's turn that it ends, if any.
                around = len(bos_T), int(lacks_eos)
                masked_T = np.pad(masked_T, around, constant_values=(1, masked_T.min(initial=1)))
            is_start = document.is_end
            yield document, ids_T, masked_T


def _grouped(items: Iterable[_T], size_of: Callable[[_T], int], least: int) -> Iterator[list[_T]]:
    """Yield the items in groups that are as short as their sizes, ``least`` together, allow."""
    group, size = [], 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= least:
            yield group
            group, size = [], 0
    if group:
        yield group


def _masked(offsets_T2: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """Return [T] uint8: 0 for a token that covers a character of a span, else 1.

    Spans [(3, 5)] over tokens at (0, 2), (2, 4), (4, 5), (5, 6) give 1, 0, 0, 1.
    """
    masked_T = np.ones(len(offsets_T2), dtype=np.uint8)
    for start, end in spans:
        masked_T[(offsets_T2[:, 0] < end) & (offsets_T2[:, 1] > start)] = 0
    return masked_T
