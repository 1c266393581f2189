"""The token cache: a source is tokenised once, into files that training maps into memory.

A cache is a folder. Its name is a hash of everything that decides the tokens. The folder is written
under a temporary name and then renamed, so a cache exists whole or not at all. If several processes
want the same cache at once, one builds it and the others wait. Neither building nor reading holds
the corpus in memory.

    tokens.bin     [num_tokens] uint16, or uint32 for a vocabulary over 65,536
    documents.bin  [num_documents + 1] int64: the start of each document, then num_tokens
    targets.bin    [num_documents] int64: number of tokens with loss in each document
    masked.bin     [num_tokens] uint8: 1 for a token without loss; empty if no document has
                   a mask
    labels.bin     [num_documents] int8: 1 for a desirable answer, 0 for an undesirable one, -1
                   for a document without a label; empty if there are no labels
    margins.bin    [num_documents] float32: the margin of each document's pair; empty if
                   margins are not read
    meta.json      the sizes, the type of the tokens, a hash of the content of the files, checksums
                   of their beginnings, the number of bad records by kind, and warnings

Left out on purpose: removing caches that are no longer used (delete the folder), and reading a
source to see whether it has changed (its files' paths, sizes and times of change decide).
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
from collections import Counter, deque
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
from moetrain.config.files import disk_remedy
from moetrain.config.locks import file_lock
from moetrain.data.documents import Document, HashRange, Skipped
from moetrain.data.marks import count_ends, warn_of_ends
from moetrain.data.sources import Source
from moetrain.data.tokenizer import Tokenizer
from moetrain.data.warned import noted, warn_once

_T = TypeVar("_T")

_FORMAT = 24
"""Part of every key. Raise it when the files, or the way tokens are made, change."""

_FILES = ("tokens.bin", "documents.bin", "targets.bin", "masked.bin", "labels.bin", "margins.bin")
_CHECKED_BYTES = 1 << 26
"""Bytes at the beginning of each file that are checked when a cache is opened. A small file is
checked whole. Reading this part of a large file takes a tenth of a second."""
_BATCH_CHARACTERS = 1 << 22
"""Characters after which a batch is encoded in one call. So many characters keep all threads busy,
and take little memory beside a model."""
_BLOCK_BYTES = 1 << 22
"""Least bytes of each group of file parts of a stream. Only the last group may have fewer. A group
becomes one block, or several blocks if its records have more than twice as many bytes."""
_MOST_WORKERS = 8
_KEPT_BLOCKS = 4
"""Number of blocks, those used last, that a walk keeps even if the disk is full."""
_FREE_SHARE = 0.1
"""Share of the disk that has to stay free. A walk removes blocks if less is free."""


class BlockPlace(NamedTuple):
    """The place of a block in a walk over a stream."""

    number_of_pass: int
    group: int
    """Index of the group of parts in the order of this pass."""
    chunk: int
    """Index of the block among those of its group."""


class TokenCache(NamedTuple):
    """Tokenised documents, mapped into memory read-only."""

    tokens: np.ndarray
    """[num_tokens] uint16 or uint32."""
    documents: np.ndarray
    """[num_documents + 1] int64: document d is ``tokens[documents[d]:documents[d + 1]]``."""
    targets: np.ndarray
    """[num_documents] int64: number of tokens with loss in each document. The first token of a
    document does not count."""
    masked: np.ndarray | None
    """[num_tokens] uint8: 1 for a token without loss. None: no document has a mask, and every token
    has loss."""
    content: str
    """Hash of all arrays."""
    labels: np.ndarray | None = None
    """[num_documents] int8, for KTO: 1 for a desirable answer, 0 for an undesirable one, -1 without
    a label. None: there are no labels."""
    skipped: Skipped = Skipped()
    """The bad records that were left out."""
    margins: np.ndarray | None = None
    """[num_documents] float32: the margin of a document's pair. None: there are no margins."""
    warnings: Mapping[str, str] = MappingProxyType({})
    """The warnings of the run that made the cache, by kind (:mod:`moetrain.data.warned`)."""

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.targets)

    @classmethod
    def of(cls, source: Source, tokenizer: Tokenizer, cache_dir: Path) -> Self:
        """Open the cache of ``source``. Build it first if it is not there.

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
        """Repeat the warnings of the run that made the cache, on the main rank."""
        place = launched_place()
        if place is None or place.rank == 0:
            for kind, text in self.warnings.items():
                warn_once(kind, text)

    @classmethod
    def opened(cls, folder: Path) -> Self:
        """Map the cache in ``folder`` into memory.

        Raises ConfigError: the cache is damaged.
        """

        def mapped(name: str, dtype: str, length: int) -> np.ndarray:
            # mmap refuses an empty file.
            found = np.memmap(folder / name, dtype, "r") if length else np.empty(0, dtype)
            if len(found) != length:
                raise ValueError(f"{name} has {len(found)} numbers")
            return found

        def mapped_if_any(name: str, dtype: str, length: int) -> np.ndarray | None:
            return mapped(name, dtype, length) if (folder / name).stat().st_size else None

        try:
            meta = json.loads((folder / "meta.json").read_bytes())
            num_tokens, num_documents = meta["num_tokens"], meta["num_documents"]
            if meta["dtype"] not in ("uint16", "uint32"):
                raise ValueError(f"tokens of type {meta['dtype']!r}")
            for name in _FILES:
                if _checksum(folder / name) != meta["checksums"][name]:
                    raise ValueError(f"{name} is not what was written")
            return cls(
                tokens=mapped("tokens.bin", meta["dtype"], num_tokens),
                documents=mapped("documents.bin", "int64", num_documents + 1),
                targets=mapped("targets.bin", "int64", num_documents),
                masked=mapped_if_any("masked.bin", "uint8", num_tokens),
                content=str(meta["content"]),
                labels=mapped_if_any("labels.bin", "int8", num_documents),
                skipped=Skipped(**meta.get("skipped", {})),
                margins=mapped_if_any("margins.bin", "float32", num_documents),
                warnings={str(kind): str(x) for kind, x in meta.get("warnings", {}).items()},
            )
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            reason = str(error) if isinstance(error, ValueError) else repr(error)
            problem = f"{folder} is damaged ({reason}); delete it to tokenise again"
            raise ConfigError("data.cache_dir", problem) from None


class Blocks:
    """The token caches of a stream's blocks. Several processes make them ahead of their use.

    A block holds parts from all over the source. Blocks stay in the cache for the next pass and the
    next run. Once less than a tenth of the disk is free, a walk removes the blocks that it used
    first.
    """

    def __init__(
        self,
        source: Source,
        share: HashRange,
        tokenizer: Tokenizer,
        cache_dir: Path,
        workers: int | None,
    ) -> None:
        """List the blocks of ``share`` of ``source``.

        ``workers`` is the number of processes that make blocks. None: one for each core of this
        rank's share of the machine, up to 8. 0: this process makes each block when it is used.
        """
        parts = source.file_parts(share)
        order = np.random.Generator(np.random.PCG64(0)).permutation(len(parts))
        shuffled = (parts[i] for i in order)
        self._groups = list(_grouped(shuffled, lambda part: part.size, _BLOCK_BYTES)) or [[]]
        self.num_bytes = sum(part.size for part in parts)
        self._source, self._share, self._tokenizer = source, share, tokenizer
        self._warned: set[str] = set()
        names = [[part.file.name, *part[1:]] for part in parts]
        self.identity: list[object] = ["blocks", _FORMAT, tokenizer.fingerprint, share, names]
        self.identity += source.identity()[2:]  # without the files' places
        key = json.dumps([self.identity, source.identity()])
        self._folder = cache_dir / hashlib.sha256(key.encode()).hexdigest()[:32]
        place = launched_place()
        self._local_rank = 0 if place is None else place.local_rank
        self._on_machine = (place and place.on_machine) or 1
        cores = (os.cpu_count() or 1) // self._on_machine
        self._workers = min(max(1, cores), _MOST_WORKERS) if workers is None else workers

    def first(self) -> tuple[TokenCache, int]:
        """Return the first block, and the number of bytes of its records."""
        found = next(self._chunks(0), [])
        return self._made(found, "0-0"), max(1, sum(each.num_bytes for each in found))

    def sample(self, num_bytes: int) -> TokenCache | None:
        """Return a cache of the first groups of parts, which together have ``num_bytes`` or more.

        Each group is read whole. At most sixteen groups are read, even if they have fewer bytes.
        None: there are no records.
        """
        found = []
        for group in range(min(16, len(self._groups))):
            for each in itertools.chain.from_iterable(self._chunks(group)):
                found.append(each)
                num_bytes -= each.num_bytes
            if num_bytes <= 0:
                break
        return self._made(found, "sample-0") if found else None

    def walk(self, seed: int, at: BlockPlace) -> Iterator[tuple[BlockPlace, TokenCache]]:
        """Yield blocks and their places from ``at`` on, without end.

        Raises ConfigError as :meth:`TokenCache.of`.
        """
        ahead: deque[tuple[BlockPlace, str, list[Any]]] = deque()
        used: deque[Path] = deque()
        read = self._read(seed, at)
        while True:
            # Read the records of the next blocks, and ask the processes to tokenise them. The ranks
            # of a machine share its blocks.
            while len(ahead) <= 2 * self._workers * self._on_machine:
                place, name, found = next(read)
                ahead.append((place, name, found))
                is_mine = (place.group + place.chunk) % self._on_machine == self._local_rank
                # This process itself makes the next block, or all blocks if it has no workers.
                if len(ahead) > 1 and is_mine and not (self._folder / name).is_dir():
                    self._pool.apply_async(_work, (found, self._folder / name))
            place, name, found = ahead.popleft()
            yield place, self._made(found, name)
            # While the disk is nearly full, remove the blocks that were used first.
            used.append(self._folder / name)
            disk = shutil.disk_usage(self._folder)
            while len(used) > _KEPT_BLOCKS and disk.free < _FREE_SHARE * disk.total:
                shutil.rmtree(used.popleft(), ignore_errors=True)
                disk = shutil.disk_usage(self._folder)

    def _made(self, found: list[Any], name: str) -> TokenCache:
        """Open the block ``name`` of the records ``found``. Build it first if it is not there."""
        folder = self._folder / name
        _build_block(self._source, found, self._tokenizer, folder)
        made = TokenCache.opened(folder)
        if name not in self._warned:  # every pass opens the block again
            self._warned.add(name)
            made.skipped.warn(self._source.path)
            made.repeat_warnings()
        return made

    def _read(self, seed: int, at: BlockPlace) -> Iterator[tuple[BlockPlace, str, list[Any]]]:
        """Yield the place, the name and the records of each block from ``at`` on, without end.

        The first group comes first in each pass. The seed decides the order of the others.
        """
        for number in itertools.count(at.number_of_pass):
            generator = np.random.Generator(np.random.PCG64([seed, number]))
            order = [0, *(1 + generator.permutation(len(self._groups) - 1))]
            is_first_pass = number == at.number_of_pass
            for group in range(at.group if is_first_pass else 0, len(order)):
                num_passed = at.chunk if is_first_pass and group == at.group else 0
                chunks = enumerate(self._chunks(int(order[group])))
                for chunk, found in itertools.islice(chunks, num_passed, None):
                    yield BlockPlace(number, group, chunk), f"{order[group]}-{chunk}", found

    def _chunks(self, group: int) -> Iterator[list[Any]]:
        """Yield the records of each block of a group of parts."""
        parts = self._groups[group]
        records = (each for part in parts for each in self._source.read(part, self._share))
        return _grouped(records, lambda each: each.num_bytes, 2 * _BLOCK_BYTES)

    @cached_property
    def _pool(self) -> Any:
        """The processes that make blocks. The caller does not wait until they have been started.

        The processes read the tokenizer from a file. If it came through a pipe, each process would
        have to finish its imports before the next one could start. The processes do not import the
        program's main module: they do not need it, and it may lack the guard
        ``__name__ == "__main__"``.
        """
        folder = TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True)
        shared = Path(folder.name, "source")
        source = replace(self._source, files=[], table=None)  # documents_of reads no files
        shared.write_bytes(pickle.dumps((source, self._tokenizer)))
        program = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            context = multiprocessing.get_context("spawn")
            pool = context.Pool(self._workers, _begin_worker, (shared,))
        finally:
            sys.modules["__main__"] = program
        weakref.finalize(self, folder.cleanup)
        weakref.finalize(self, pool.terminate)
        return pool


_worker: list[Any] = []
"""The source, without its files, and the tokenizer. Only a process that makes blocks has them."""


def _begin_worker(shared: Path) -> None:
    """Load the source and the tokenizer that the file ``shared`` holds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    one_tokenizer_thread()
    _worker[:] = pickle.loads(shared.read_bytes())


def _work(found: list[Any], folder: Path) -> None:
    """Build a block in a process of :attr:`Blocks._pool`."""
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
    """Write the cache ``folder``, unless it is there. Wait if another process is writing it.

    Args:
        documents: the documents to tokenise.
        tokenizer: encodes their texts.
        folder: the folder of the cache.
        total: counts the bytes of all documents, for a progress bar. None: there is no bar.
        skipped: the records that ``documents`` leaves out. It is complete once all documents are
            read.

    Raises ConfigError: the folder cannot be written.
    """
    if os.path.isdir(folder):  # unlike Path.is_dir, it accepts names of any length
        return
    parent = folder.parent
    is_silent = total is None or not sys.stderr.isatty()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with (
            # On a file system without locks all processes build the cache, and the first one wins.
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
    except OSError as error:
        # An error of a source's files is a ConfigError, so this one comes from the cache's folder.
        if os.path.isdir(folder):
            return
        problem = f"{str(parent)!r} cannot be written: {error}"
        remedy = disk_remedy(error.errno, "data.cache_dir")
        raise ConfigError("data.cache_dir", f"{problem}; {remedy}") from None
    if meta["num_documents"] and total is not None:
        logger.info("tokenised %(num_documents)d documents into %(num_tokens)d tokens", meta)


def _write(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: Path,
    advance: Callable[[int], object],
) -> dict[str, Any]:
    """Write the files of a cache except for meta.json, and return the content of that file."""
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
                masked.seek(num_tokens)  # skipped bytes are 0, which means with loss
                masked.write(masked_T.tobytes())
                content.update(masked_T.tobytes())
            if num_tokens == start:
                learned_T = learned_T[1:]  # no token predicts the first token of a document
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
            os.fsync(file.fileno())  # the content is on disk before the folder gets its name
    meta = {"num_tokens": num_tokens, "num_documents": num_documents, "dtype": dtype.name}
    meta |= {"content": content.hexdigest()}
    return meta | {"checksums": {name: _checksum(folder / name) for name in _FILES}}


def encoded(
    documents: Iterable[Document], tokenizer: Tokenizer
) -> Iterator[tuple[Document, np.ndarray, np.ndarray | None]]:
    """Tokenise documents.

    A document begins with ``bos_ids`` once, unless a template rendered it. Every document ends with
    EOS. An empty span at the end of a text that no template rendered stands for an empty answer:
    only EOS is learned.

    Yields:
        Each document, or part of one, with its ids [T] and its mask, uint8 [T]: 1 for a token
        without loss. The mask is None if all tokens have loss.
    """
    is_start, ends = True, Counter[str]()
    for batch in _grouped(documents, lambda document: len(document.text), _BATCH_CHARACTERS):
        encodings = tokenizer.encode_batch([document.text for document in batch])
        for document, encoded in zip(batch, encodings, strict=True):
            has_bos, masked_T = is_start and not document.is_rendered, None
            bos_T = np.array(tokenizer.missing_bos(encoded.ids) if has_bos else (), np.uint32)
            ids_T = np.concatenate([bos_T, encoded.ids])
            last = document.loss_spans[-1] if document.loss_spans else (0, 1)
            ends_at_once = last[0] == last[1] == len(document.text) and not document.is_rendered
            has_eos = ids_T[-1:].tolist() == [tokenizer.eos_id] and not ends_at_once
            lacks_eos = document.is_end and not has_eos
            ids_T = np.append(ids_T, np.array([tokenizer.eos_id] * lacks_eos, np.uint32))
            if document.loss_spans is not None:
                masked_T = _masked(encoded.offsets(), document.loss_spans)
                # EOS has loss if the last token has loss, or if an answer is empty.
                around = len(bos_T), int(lacks_eos)
                of_eos = 0 if ends_at_once else masked_T[-1:].min(initial=1)
                masked_T = np.pad(masked_T, around, constant_values=(1, of_eos))
            if document.loss_spans is None and not document.is_rendered:
                ends.update(count_ends(document.text, tokenizer, is_end=document.is_end))
            is_start = document.is_end
            if is_start and ends:
                warn_of_ends(ends, tokenizer)
                ends.clear()
            yield document, ids_T, masked_T


def _grouped(items: Iterable[_T], size_of: Callable[[_T], int], least: int) -> Iterator[list[_T]]:
    """Yield the items in groups. A group ends once the sizes of its items sum to ``least``."""
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
    """Return uint8 [T]: 0 for a token that covers a character of a span, otherwise 1.

    Spans [(3, 5)] over tokens at (0, 2), (2, 4), (4, 5), (5, 6) give 1, 0, 0, 1.
    """
    masked_T = np.ones(len(offsets_T2), dtype=np.uint8)
    for start, end in spans:
        masked_T[(offsets_T2[:, 0] < end) & (offsets_T2[:, 1] > start)] = 0
    return masked_T
