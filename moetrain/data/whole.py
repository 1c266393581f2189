"""Whole documents to rows: best-fit packing, for conversations.

A conversation that a row's end cuts goes on in the next row without its prompt, and what it learns
there is an answer to nothing. So conversations are fitted into rows uncut, the longest first, each
into the row with the least room that holds it ("best fit decreasing": never more than 11/9 of the
fewest possible rows; chats of a fifth of a row fill 99% of theirs). The rest of a row is padding.

    documents  a a a a | b b b | c c      seq_len 6
    row 0      tokens a a a a c c    positions 0 1 2 3 0 1    lengths 4 2    pads . . . . . .
    row 1      tokens b b b 0 0 0    positions 0 1 2 3 4 5    lengths 6      pads . . . x x x

A conversation longer than a row keeps its beginning: every answer that stays has all that it
answers. A longer document of which nothing is masked is a text, and is cut in parts, which loses
nothing but context. What has nothing to learn is left out, so every row has a target.

Left out on purpose: keeping the result. A million documents take 1.4 s in rows of 2,048 tokens and
5 s in rows of 32,768, and the memory of a few integers each; the documents stay on disk.
Shapes: S tokens of a row, D documents, I items (documents, or parts of them).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moetrain.data.cache import TokenCache
from moetrain.data.packing import IGNORE_INDEX, Row


class Items(NamedTuple):
    """What is put into rows: parts of the token stream, whole documents as a rule."""

    starts_I: np.ndarray
    lengths_I: np.ndarray
    ends_document_I: np.ndarray
    """bool: the last token has no next one."""
    num_cut: int
    """Conversations longer than a row that lost tokens with loss behind its end."""
    targets_of_cut: int
    """Tokens with loss that those had."""
    targets_lost: int
    """Those of them that were lost."""
    num_left_out: int
    """Documents with nothing to learn, or nothing in their first row."""


class WholeDataset:
    """Rows of ``seq_len`` tokens that hold documents uncut; see the module."""

    def __init__(
        self, cache: TokenCache, seq_len: int, first: int = 0, stop: int | None = None
    ) -> None:
        """Documents ``first:stop`` of ``cache`` (None: to the last). There may be no row."""
        stop = cache.num_documents if stop is None else stop
        self.identity: list[Any] = ["whole", cache.content, seq_len, first, stop]
        self._cache, self._seq_len, self._num_documents = cache, seq_len, stop - first
        self._items = _items(cache, seq_len, first, stop)
        rows_I = best_fit(self._items.lengths_I, seq_len)
        self._order_I = np.argsort(rows_I, kind="stable")
        self._ends = np.cumsum(np.bincount(rows_I))  # of each row, in that order

    def __len__(self) -> int:
        return len(self._ends)

    def row(self, index: int) -> Row:
        """See :class:`Dataset`."""
        cache, size = self._cache, self._seq_len
        tokens_S, targets_S = np.zeros(size, np.int64), np.full(size, IGNORE_INDEX)
        positions_S, lengths, at = np.empty(size, np.int64), [], 0
        for i in self._order_I[self._ends[index - 1] if index else 0 : self._ends[index]]:
            start, length = int(self._items.starts_I[i]), int(self._items.lengths_I[i])
            tokens_S[at : at + length] = cache.tokens[start : start + length]
            # The last token's target is the one behind the item, if the document goes on.
            known = length - int(self._items.ends_document_I[i])
            following = slice(start + 1, start + 1 + known)
            targets_S[at : at + known] = cache.tokens[following]
            if cache.masked is not None:
                targets_S[at : at + known][cache.masked[following] == 1] = IGNORE_INDEX
            positions_S[at:] = np.arange(size - at)  # the last one's go on over the pads
            lengths.append(length)
            at += length
        lengths[-1] += size - at
        return Row(tokens_S, targets_S, positions_S, np.array(lengths), np.arange(size) >= at)

    def describe(self) -> str:
        """One line: how full the rows are, and what did not fit."""
        items, size = self._items, self._seq_len
        fill = int(items.lengths_I.sum()) / max(1, len(self) * size)
        what = "documents" if self._cache.masked is None else "conversations"
        text = (
            f"packed {self._num_documents:,} {what} into {len(self):,} rows of {size} "
            f"({fill:.1%} full)"
        )
        if items.num_cut:
            lost = items.targets_lost / items.targets_of_cut
            text += f"; {items.num_cut:,} longer than a row were cut, {lost:.1%} of their trained "
            text += "tokens lost"
        if items.num_left_out:
            text += f"; {items.num_left_out:,} with nothing to learn in a row's length left out"
        return text


def _items(cache: TokenCache, size: int, first: int, stop: int) -> Items:
    starts_D = cache.documents[first:stop].astype(np.int64)
    lengths_D = np.diff(cache.documents[first : stop + 1])
    targets_D = cache.targets[first:stop].astype(np.int64)
    # A last token needs no room as an input, since it has no target: size + 1 tokens fit a row.
    is_long_D = lengths_D > size + 1
    is_text_D = targets_D == lengths_D - 1
    kept_D = targets_D.copy()
    for d in np.flatnonzero(is_long_D & ~is_text_D):
        assert cache.masked is not None  # else every document is a text
        start = starts_D[d] + 1
        kept_D[d] = size - int(cache.masked[start : start + size].sum())
    parts_D = np.where(is_text_D, -(-(lengths_D - 1) // size), 1)
    parts_D[kept_D == 0] = 0
    first_item_D = np.cumsum(parts_D) - parts_D
    skipped_I = size * (np.arange(parts_D.sum()) - np.repeat(first_item_D, parts_D))
    left_I = np.repeat(lengths_D, parts_D) - skipped_I
    was_cut_D = kept_D < targets_D
    return Items(
        np.repeat(starts_D, parts_D) + skipped_I,
        np.minimum(left_I, size),
        left_I <= size,
        int(was_cut_D.sum()),
        int(targets_D[was_cut_D].sum()),
        int((targets_D - kept_D).sum()),
        int((kept_D == 0).sum()),
    )


def best_fit(lengths_I: np.ndarray, size: int) -> np.ndarray:
    """Which row of ``size`` each item goes to [I], rows numbered from 0 in the order they are made.

    The longest item first, each into the row with the least room that still holds it: lengths
    3, 2, 5, 4 and rows of 7 give 5 + 2 and 4 + 3. O(I log I), and for each item a search of
    ``size`` bits: ``rooms`` has bit r set where some row has room for r more.

    Args:
        lengths_I: integers from 1 to ``size``.
    """
    rows_I = np.empty(len(lengths_I), dtype=np.int64)
    rows_by_room: list[list[int]] = [[] for _ in range(size + 1)]
    rooms, num_rows = 0, 0
    by_length = np.argsort(-lengths_I, kind="stable")
    for i, length in zip(by_length.tolist(), lengths_I[by_length].tolist(), strict=True):
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms ^= 1 << room
        else:
            row, room = num_rows, size
            num_rows += 1
        rows_I[i] = row
        if room > length:
            rows_by_room[room - length].append(row)
            rooms |= 1 << (room - length)
    return rows_I
