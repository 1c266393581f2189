"""Documents to rows: what one training example is.

Documents are laid end to end and the stream is cut every ``seq_len`` tokens, so no token is padding
and none is dropped but the last partial row. A document cut by a row's end goes on in the next row
as a segment of its own: segments attend only to themselves, and no target crosses documents.

    documents  a a a | b b b b b | c c      seq_len 4
    row 0      tokens a a a b    targets a a . b    positions 0 1 2 0    lengths 3 1
    row 1      tokens b b b b    targets b b b .    positions 0 1 2 3    lengths 4

(each letter's target is the next token of its document, ``.`` is IGNORE_INDEX). The two tokens of
c are less than a row and are dropped.

This is for texts, where cutting costs only context; conversations are kept whole (whole.py).
Shapes: S tokens of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from moetrain.data.cache import TokenCache

IGNORE_INDEX = -100
"""Target of a token without loss: torch's default ``ignore_index``."""


class Row(NamedTuple):
    """One row of S tokens; all arrays are int64 but the last."""

    tokens_S: np.ndarray
    targets_S: np.ndarray
    """The next token of the same document (the last one's lies in the next row), or IGNORE_INDEX
    at a document's end and where that next token carries no loss."""
    positions_S: np.ndarray | None
    """Position within the segment, from 0; None: the row is one document, in every row of this
    dataset, so attention needs no mask."""
    lengths: np.ndarray
    """Tokens of each segment, in order; they sum to S."""
    is_pad_S: np.ndarray | None = None
    """bool: what only fills up the row, at its end and in its last segment; None: nothing does, in
    every row of this dataset."""


class Dataset(Protocol):
    """Rows by index: all that the loader asks for."""

    identity: list[Any]
    """What decides the rows, as JSON."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Row ``index`` of ``len(self)``; the same at every call."""
        ...


class StreamDataset:
    """Rows of ``seq_len`` tokens over a token cache, documents end to end."""

    def __init__(
        self, cache: TokenCache, seq_len: int, first: int = 0, stop: int | None = None
    ) -> None:
        """Rows ``first:stop`` of all there are (None: to the last). There may be none."""
        stop = len(cache.tokens) // seq_len if stop is None else stop
        self.identity: list[Any] = ["stream", cache.content, seq_len, first, stop]
        self._cache, self._seq_len = cache, seq_len
        self._first, self._num_rows = first, stop - first
        # No target lies in another's rows; the corpus may also end right at a row.
        self._end = len(cache.tokens) if stop == len(cache.tokens) // seq_len else stop * seq_len

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> Row:
        """See :class:`Dataset`."""
        cache, size = self._cache, self._seq_len
        start = (self._first + index) * size
        stop = start + size
        # One token more than the row, for its last target, if there is one.
        window = cache.tokens[start : min(stop + 1, self._end)].astype(np.int64)
        targets_S = np.full(size, IGNORE_INDEX)
        targets_S[: len(window) - 1] = window[1:]
        if cache.masked is not None:
            masked = cache.masked[start + 1 : start + len(window)]
            targets_S[: len(window) - 1][masked == 1] = IGNORE_INDEX
        # Documents that end in this row: their ends e lie in start < e <= stop.
        first, last = np.searchsorted(cache.documents, (start, stop), side="right")
        ends = cache.documents[first:last] - start
        targets_S[ends - 1] = IGNORE_INDEX
        starts = np.concatenate([[0], ends[ends < size]])
        lengths = np.diff(starts, append=size)
        positions_S = np.arange(size) - np.repeat(starts, lengths)
        return Row(window[:size], targets_S, positions_S, lengths)


class SyntheticDataset:
    """Random tokens, uniform over the vocabulary; every row is one document. For benchmarks."""

    def __init__(
        self, num_rows: int, seq_len: int, vocab_size: int, seed: int, first: int = 0
    ) -> None:
        """Rows ``first:first + num_rows`` of the endless sequence that ``seed`` gives."""
        self._num_rows, self._seq_len, self._vocab_size = num_rows, seq_len, vocab_size
        self._seed, self._first = seed, first
        self.identity: list[Any] = ["synthetic", num_rows, seq_len, vocab_size, seed, first]

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> Row:
        """See :class:`Dataset`."""
        generator = np.random.default_rng([self._seed, self._first + index])
        tokens_S = generator.integers(self._vocab_size, size=self._seq_len)
        targets_S = np.append(tokens_S[1:], IGNORE_INDEX)
        return Row(tokens_S, targets_S, None, np.array([self._seq_len]))
