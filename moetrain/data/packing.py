"""Makes rows from documents. A row of ``seq_len`` tokens is one training example.

Texts are laid end to end, and the stream is cut every ``seq_len`` tokens (:class:`StreamDataset`).
If a conversation were cut, its second part would lack the prompt, and a model would learn answers
without their questions. So rows hold conversations uncut (:class:`WholeDataset`), or one preference
each (:class:`PairDataset`).

Left out on purpose: storing which row each document is in. Finding the rows of a million documents
takes 1.4 s with rows of 2,048 tokens and 5 s with rows of 32,768. Each document takes a few
integers of memory, and its tokens stay on disk.

Shapes: S tokens of a row, D documents, I items (documents, or parts of them).
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from moetrain.data.cache import BlockPlace, Blocks, TokenCache

IGNORE_INDEX = -100
"""Target of a token without loss; torch's default ``ignore_index``."""


class Row(NamedTuple):
    """One row of S tokens. Arrays are int64, unless their description says otherwise."""

    tokens_S: np.ndarray
    """Ids of the tokens."""
    targets_S: np.ndarray
    """The next token of the same document, or IGNORE_INDEX if there is none or it has no loss."""
    positions_S: np.ndarray | None
    """Position within the segment. None: each row is one document, so attention needs no mask."""
    lengths: np.ndarray
    """Number of tokens of each segment, in order. They sum to S."""
    is_pad_S: np.ndarray | None = None
    """bool: True for tokens that only fill up the row. They belong to the last segment. None: no
    row of the dataset has such tokens."""
    extra: Mapping[str, np.ndarray] = {}
    """Further fields that an objective reads with the targets, by name. Each is [S, ...]."""

    @classmethod
    def filled(cls, size: int, segments: Iterable[tuple[np.ndarray, np.ndarray]]) -> Self:
        """Make a row of ``size`` tokens from the tokens and targets of ``segments``.

        Pads fill up the row. They belong to the last segment.
        """
        tokens_S, targets_S = np.zeros(size, np.int64), np.full(size, IGNORE_INDEX)
        positions_S, at = np.empty(size, np.int64), 0
        lengths: list[int] = []
        for tokens_T, targets_T in segments:
            end = at + len(tokens_T)
            tokens_S[at:end], targets_S[at:end] = tokens_T, targets_T
            positions_S[at:] = np.arange(size - at)  # the last segment's positions go on
            lengths.append(end - at)
            at = end
        lengths[-1] += size - at
        return cls(
            tokens_S=tokens_S,
            targets_S=targets_S,
            positions_S=positions_S,
            lengths=np.array(lengths),
            is_pad_S=np.arange(size) >= at,
        )


class Dataset(Protocol):
    """A sequence of rows."""

    identity: list[object]
    """A JSON value that differs if the rows differ."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Return row ``index``, from 0 to ``len(self) - 1``. Each call returns the same row."""
        ...


class Samples(Dataset, Protocol):
    """An infinite sequence of rows, one pass over the data after another.

    ``len`` is the number of rows in one pass, or 0 if this number is not known.
    """

    def sample(self, number: int) -> Row:
        """Return sample ``number``, the same on every rank.

        Samples far back may be slow to read, or cannot be read again.
        """
        ...

    def row(self, index: int) -> Row:
        return self.sample(index)

    def state(self, number: int) -> object:
        """Return a JSON value with which :meth:`resume` finds sample ``number`` quickly.

        None: :meth:`resume` needs no value.
        """
        return None

    def resume(self, state: Any) -> None:
        """Continue at the sample for which :meth:`state` returned the value ``state``."""


class Shuffled(Samples):
    """A dataset whose rows have a new random order in each pass.

    If there are n rows, sample g is row ``permutation(seed, g // n)[g % n]``.
    """

    def __init__(self, rows: Dataset, seed: int) -> None:
        self.rows, self.identity, self._seed = rows, rows.identity, seed
        self._pass, self._order = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def index(self, number: int) -> int:
        """Return the index of the row that is sample ``number``."""
        number_of_pass, index = divmod(number, len(self.rows))
        if number_of_pass != self._pass:
            self._pass = number_of_pass
            self._order = _permutation(len(self.rows), self._seed, number_of_pass)
        return int(self._order[index])

    def sample(self, number: int) -> Row:
        return self.rows.row(self.index(number))


class Mixture(Samples):
    """A mixture of several sources.

    A pass has a fixed number of rows of each source, in an order that the seed decides. The next
    pass takes the next rows of each source. So if a source has more rows than a pass takes, each
    pass has other rows of it.
    """

    def __init__(self, parts: Mapping[str, Samples], counts: Sequence[int], seed: int) -> None:
        pairs = zip(parts.values(), counts, strict=True)
        self.identity: list[object] = ["mix", [[part.identity, count] for part, count in pairs]]
        self.parts, self._counts, self._seed = dict(parts), counts, seed
        self._pass = -1

    def __len__(self) -> int:
        return sum(self._counts)

    def sample(self, number: int) -> Row:
        part, own_number = self._find(number)
        return list(self.parts.values())[part].sample(own_number)

    def _find(self, number: int) -> tuple[int, int]:
        """Return the index of the source of sample ``number``, and its number in this source."""
        number_of_pass, index = divmod(number, len(self))
        if number_of_pass != self._pass:
            order = _permutation(len(self), self._seed, number_of_pass)
            self._part = np.searchsorted(np.cumsum(self._counts), order, side="right")
            self._number_in_part = np.empty(len(self), np.int64)
            for part, count in enumerate(self._counts):
                self._number_in_part[self._part == part] = np.arange(count)
            self._pass = number_of_pass
        part = int(self._part[index])
        return part, number_of_pass * self._counts[part] + int(self._number_in_part[index])

    def state(self, number: int) -> object:
        number_of_pass, index = divmod(number, len(self))
        self._find(number)
        states: dict[str, object] = {}
        for part, (name, samples) in enumerate(self.parts.items()):
            before = int((self._part[:index] == part).sum())
            states[name] = samples.state(number_of_pass * self._counts[part] + before)
        return None if all(state is None for state in states.values()) else states

    def resume(self, state: Any) -> None:
        for name, samples in self.parts.items():
            samples.resume(state[name] if state else None)


class _BlockRows(NamedTuple):
    """The rows of a block."""

    first: int
    """Number of the first sample."""
    place: BlockPlace
    rows: Dataset
    order: np.ndarray
    """[rows] int64: the index of the row of each sample, in the order of the samples."""


class Streamed(Samples):
    """The rows of a source, block after block. The seed decides the order of a block's rows."""

    def __init__(self, blocks: Blocks, rows_of: Callable[[TokenCache], Dataset], seed: int) -> None:
        """Stream ``blocks``. ``rows_of`` makes the rows of a block from its token cache.

        The number of rows in a pass is estimated from the first block.
        """
        first, num_bytes = blocks.first()
        rows = rows_of(first)
        self.identity: list[object] = [blocks.identity, rows.identity]
        self._size = max(1, round(len(rows) * blocks.num_bytes / num_bytes))
        self._blocks, self._rows_of, self._seed = blocks, rows_of, seed
        self._recent: deque[_BlockRows] = deque(maxlen=4)
        self.resume(None)

    def __len__(self) -> int:
        return self._size

    def sample(self, number: int) -> Row:
        if number < (self._recent[0].first if self._recent else self._next):
            self.resume(None)
        while number >= self._next:
            place, cache = next(self._walk)
            rows = self._rows_of(cache)
            order = _permutation(
                len(rows), self._seed, place.number_of_pass, place.group, place.chunk
            )
            self._recent.append(_BlockRows(self._next, place, rows, order))
            self._next += len(rows)
        span = next(s for s in reversed(self._recent) if s.first <= number)
        return span.rows.row(int(span.order[number - span.first]))

    def state(self, number: int) -> object:
        found = [span for span in self._recent if span.first <= number]
        if found:
            return [found[-1].first, *found[-1].place]
        # Before anything is read, the state is the one from which the stream was resumed.
        return self._resumed if self._resumed[0] <= number else [0, 0, 0, 0]

    def resume(self, state: Any) -> None:
        self._resumed = state or [0, 0, 0, 0]  # number of the first sample, and a BlockPlace
        self._next = self._resumed[0]
        self._recent.clear()
        self._walk = self._blocks.walk(self._seed, BlockPlace(*self._resumed[1:]))


def _permutation(size: int, *seeds: int) -> np.ndarray:
    """Return the numbers below ``size`` in an order that ``seeds`` decide, int64 [size]."""
    return np.random.Generator(np.random.PCG64(seeds)).permutation(size)


def _targets(cache: TokenCache, where: slice | np.ndarray) -> np.ndarray:
    """Return the tokens ``where`` of the cache, int64 [T]. Those without loss are IGNORE_INDEX."""
    targets_T = cache.tokens[where].astype(np.int64)
    if cache.masked is not None:
        targets_T[cache.masked[where] == 1] = IGNORE_INDEX
    return targets_T


class StreamDataset:
    """Rows of ``seq_len`` tokens over a token cache, with documents laid end to end.

    There is no padding, and only the tokens behind the last full row are dropped. If the end of a
    row cuts a document, the document continues in the next row as a segment of its own. Segments
    attend only to themselves, and no target is a token of another document. In this example ``.``
    is IGNORE_INDEX, and the other targets are a document's next tokens:

        documents  a a a | b b b b b | c c      seq_len 4
        row 0      tokens a a a b    targets a a . b    positions 0 1 2 0    lengths 3 1
        row 1      tokens b b b b    targets b b b .    positions 0 1 2 3    lengths 4
    """

    def __init__(
        self, cache: TokenCache, seq_len: int, first: int = 0, stop: int | None = None
    ) -> None:
        """Take rows ``first:stop`` of the stream. There may be none.

        If ``stop`` is None, all rows from ``first`` on are taken.
        """
        stop = len(cache.tokens) // seq_len if stop is None else stop
        self.identity: list[object] = ["stream", cache.content, seq_len, first, stop]
        self._cache = cache
        self._seq_len = seq_len
        self._first = first
        self._num_rows = stop - first
        # No target lies at or behind this token: it may belong to another dataset's rows.
        self._end = len(cache.tokens) if stop == len(cache.tokens) // seq_len else stop * seq_len

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> Row:
        cache = self._cache
        size = self._seq_len
        start = (self._first + index) * size
        stop = start + size
        # The last target is the token after the row, if there is one.
        following = slice(start + 1, min(stop + 1, self._end))
        targets_S = np.full(size, IGNORE_INDEX)
        targets_S[: following.stop - following.start] = _targets(cache, following)
        # Find the documents that end in this row. Their ends e lie in start < e <= stop.
        first, last = np.searchsorted(cache.documents, (start, stop), side="right")
        ends = cache.documents[first:last] - start
        targets_S[ends - 1] = IGNORE_INDEX
        starts = np.concatenate([[0], ends[ends < size]])
        lengths = np.diff(starts, append=size)
        positions_S = np.arange(size) - np.repeat(starts, lengths)
        return Row(cache.tokens[start:stop].astype(np.int64), targets_S, positions_S, lengths)


class SyntheticDataset:
    """Rows of random tokens for benchmarks, uniform over the vocabulary. Each row is a document."""

    def __init__(
        self, num_rows: int, seq_len: int, vocab_size: int, seed: int, first: int = 0
    ) -> None:
        """Take rows ``first:first + num_rows`` of the endless sequence that ``seed`` decides."""
        self.identity: list[object] = ["synthetic", num_rows, seq_len, vocab_size, seed, first]
        self._num_rows, self._seq_len, self._vocab_size = num_rows, seq_len, vocab_size
        self._seed, self._first = seed, first

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> Row:
        generator = np.random.default_rng([self._seed, self._first + index])
        tokens_S = generator.integers(self._vocab_size, size=self._seq_len)
        return Row(
            tokens_S=tokens_S,
            targets_S=np.append(tokens_S[1:], IGNORE_INDEX),
            positions_S=None,
            lengths=np.array([self._seq_len]),
        )


class WholeDataset:
    """Rows of ``seq_len`` tokens that hold whole documents, fitted by :func:`best_fit`.

    The rest of a row is padding. If a chat takes about a fifth of a row, padding takes 1% of all
    tokens.

        documents  a a a a | b b b | c c      seq_len 6
        row 0      tokens a a a a c c    positions 0 1 2 3 0 1    lengths 4 2    pads . . . . . .
        row 1      tokens b b b 0 0 0    positions 0 1 2 3 4 5    lengths 6      pads . . . x x x

    A conversation that is longer than a row keeps its beginning, so that each answer in it keeps
    its whole context. With ``drops_overlong`` such a conversation is left out. A longer document
    without masked tokens is a text, and is cut into parts. Documents with nothing to learn are left
    out, so every row has a target.

    Attributes:
        overlong_lengths: int64 numbers of tokens of the conversations that are longer than a row.
    """

    def __init__(
        self,
        cache: TokenCache,
        seq_len: int,
        first: int = 0,
        stop: int | None = None,
        *,
        drops_overlong: bool = False,
    ) -> None:
        """Pack documents ``first:stop`` of ``cache``. There may be no row.

        If ``stop`` is None, all documents from ``first`` on are packed.
        """
        stop = cache.num_documents if stop is None else stop
        self.identity: list[object] = ["whole", cache.content, seq_len, first, stop]
        self.identity += ["drop"] * drops_overlong
        self._cache = cache
        self._seq_len = seq_len
        starts_D = cache.documents[first:stop].astype(np.int64)
        lengths_D = np.diff(cache.documents[first : stop + 1])
        targets_D = cache.targets[first:stop].astype(np.int64)
        # Find the documents that are longer than a row. The last token of a document has no target,
        # so it need not be an input, and a document of seq_len + 1 tokens fits a row.
        is_long_D = lengths_D > seq_len + 1
        is_text_D = targets_D == lengths_D - 1
        kept_D = targets_D.copy()
        is_overlong_D = is_long_D & ~is_text_D
        self.overlong_lengths = lengths_D[is_overlong_D]
        self._dropped = int(is_overlong_D.sum()) if drops_overlong else 0
        if drops_overlong:
            targets_D[is_overlong_D] = kept_D[is_overlong_D] = 0
        # Count the targets that each conversation keeps once it is cut.
        for d in np.flatnonzero(is_overlong_D & (kept_D > 0)):
            assert cache.masked is not None  # otherwise every document is a text
            start = starts_D[d] + 1
            kept_D[d] = seq_len - int(cache.masked[start : start + seq_len].sum())
        # Divide the documents into items, of which rows consist. Most items are whole documents,
        # and the others are parts of texts or beginnings of conversations.
        parts_D = np.where(is_text_D, -(-(lengths_D - 1) // seq_len), 1)
        parts_D[kept_D == 0] = 0
        first_item_D = np.cumsum(parts_D) - parts_D
        number_I = np.arange(int(parts_D.sum()))
        skipped_I = seq_len * (number_I - np.repeat(first_item_D, parts_D))
        left_I = np.repeat(lengths_D, parts_D) - skipped_I
        self._starts_I = np.repeat(starts_D, parts_D) + skipped_I
        self._lengths_I = np.minimum(left_I, seq_len)
        self._ends_document_I = left_I <= seq_len  # the last token predicts nothing
        # Fit the items into rows.
        rows_I = best_fit(self._lengths_I, seq_len)
        self._order_I = np.argsort(rows_I, kind="stable")
        self._ends = np.cumsum(np.bincount(rows_I))
        """The end of each row's items in ``_order_I``."""
        self._targets_D, self._kept_D = targets_D, kept_D

    def __len__(self) -> int:
        return len(self._ends)

    def row(self, index: int) -> Row:
        segments: list[tuple[np.ndarray, np.ndarray]] = []
        for i in self._order_I[self._ends[index - 1] if index else 0 : self._ends[index]]:
            start, length = int(self._starts_I[i]), int(self._lengths_I[i])
            # The target of the last token lies after the item, if the document goes on.
            known = length - int(self._ends_document_I[i])
            targets_T = np.full(length, IGNORE_INDEX)
            targets_T[:known] = _targets(self._cache, slice(start + 1, start + 1 + known))
            segments.append((self._cache.tokens[start : start + length], targets_T))
        return Row.filled(self._seq_len, segments)

    def describe(self) -> str:
        """Describe in one line how full the rows are, and which documents did not fit."""
        size, kept_D, targets_D = self._seq_len, self._kept_D, self._targets_D
        fill = int(self._lengths_I.sum()) / max(1, len(self) * size)
        what = "documents" if self._cache.masked is None else "conversations"
        text = f"packed {len(kept_D):,} {what} into {len(self):,} rows of {size} ({fill:.1%} full)"
        was_cut_D = kept_D < targets_D
        if was_cut_D.any():
            lost = int((targets_D - kept_D).sum()) / int(targets_D[was_cut_D].sum())
            text += f"; {int(was_cut_D.sum()):,} longer than a row were cut, {lost:.1%} of their "
            text += "trained tokens lost"
        if self._dropped:
            text += f"; {self._dropped:,} longer than a row were left out"
        if num_left_out := int((kept_D == 0).sum()) - self._dropped:
            text += f"; {num_left_out:,} were left out: nothing to learn within a row's length"
        return text


class PairDataset:
    """Rows of ``seq_len`` tokens that each hold one preference: a pair of answers, or one answer.

    Two successive documents of the cache without a label are a pair: the prompt with the chosen
    answer, and the prompt with the rejected answer. A document with a label is a prompt with a
    single answer. Each document becomes a segment of the row, and segments do not see each other.
    A preference is left out if it is longer than a row, or if an answer of it has no targets.

    For KTO a row has one more segment: its own prompt with the first answer of the next preference.
    Such rows have the field ``label``, [S] int64: 1 in the segment of a desirable answer, -1 in
    the segment of an undesirable one, 0 in the segment of the other preference's answer. If the
    cache has margins, rows have the field ``margin``, [S] float32, the pair's margin at each token.
    All rows have the field ``reference``, [S] float32, the row's part of ``reference_PS``.

    Attributes:
        pairs: int64 [rows], the index of the preference in the cache that each row holds.
        needed_P: int64 [preferences], the number of tokens that each one needs in a row. Those that
            have no row are among them.
        overlong_lengths: the values of ``needed_P`` that are larger than ``seq_len``.
        reference_PS: float32 [rows, S], log-probabilities of the targets under the reference model.
            They are 0 until the owner of the objective fills them in.
    """

    def __init__(
        self,
        cache: TokenCache,
        seq_len: int,
        for_kto: bool,
        first: int = 0,
        stop: int | None = None,
    ) -> None:
        """Take preferences ``first:stop`` of ``cache``. There may be no row.

        If ``stop`` is None, all preferences from ``first`` on are taken.
        """
        starts = preference_starts(cache)
        stop = len(starts) - 1 if stop is None else stop
        self.identity: list[object] = ["pairs", cache.content, seq_len, for_kto, first, stop]
        self._cache, self._seq_len, self._starts = cache, seq_len, starts
        self._for_kto, self._first, self._stop = for_kto, first, stop
        masked = np.empty(0) if cache.masked is None else cache.masked
        learned = np.append(np.flatnonzero(masked == 0), len(cache.tokens))
        self._answers_D = learned[np.searchsorted(learned, cache.documents[:-1])]
        begins_P, ends_P = starts[first:stop], starts[first + 1 : stop + 1]
        self.needed_P = cache.documents[ends_P] - cache.documents[begins_P]
        if for_kto:
            prompts_D = self._answers_D - cache.documents[:-1]
            answers_D = cache.documents[1:] - self._answers_D
            others_P = np.roll(answers_D[begins_P], -1)
            self.needed_P = self.needed_P + prompts_D[begins_P] + others_P
        fewest_P = np.minimum.reduceat(cache.targets[: starts[stop]], begins_P)
        self.overlong_lengths = self.needed_P[self.needed_P > seq_len]
        self.pairs = first + np.flatnonzero((fewest_P > 0) & (self.needed_P <= seq_len))
        self.reference_PS = np.zeros((len(self.pairs), seq_len), np.float32)

    def __len__(self) -> int:
        return len(self.pairs)

    def _segments(self, pair: int) -> list[np.ndarray]:
        """Return, for each segment of a preference, the indices of its tokens in the cache."""
        ends = self._cache.documents
        first, stop = (int(d) for d in self._starts[pair : pair + 2])
        segments = [np.arange(int(ends[d]), int(ends[d + 1])) for d in range(first, stop)]
        if self._for_kto:
            other = int(self._starts[pair + 1 if pair + 1 < self._stop else self._first])
            prompt = np.arange(int(ends[first]), int(self._answers_D[first]))
            answer = np.arange(int(self._answers_D[other]), int(ends[other + 1]))
            segments.append(np.concatenate([prompt, answer]))
        return segments

    def row(self, index: int) -> Row:
        pair, tokens = int(self.pairs[index]), self._cache.tokens
        segments = [
            (tokens[indices_T], np.append(_targets(self._cache, indices_T[1:]), IGNORE_INDEX))
            for indices_T in self._segments(pair)
        ]
        row = Row.filled(self._seq_len, segments)
        extra = {"reference": self.reference_PS[index]}
        if self._for_kto:
            extra["label"] = np.repeat([*self._labels(pair), 0], row.lengths)
        if (margins := self._cache.margins) is not None:
            extra["margin"] = np.full(self._seq_len, margins[self._starts[pair]])
        return row._replace(extra=extra)

    def _labels(self, pair: int) -> list[int]:
        """Return 1 for each desirable answer of a preference and -1 for each undesirable one."""
        labels, first = self._cache.labels, self._starts[pair]
        if labels is None or labels[first] < 0:
            return [1, -1]
        return [1 if labels[first] else -1]

    def describe(self) -> str:
        """Describe in one line what the rows hold, and how many preferences are left out."""
        left_out = len(self.needed_P) - len(self)
        labels = self._cache.labels
        labels_P = np.full(len(self), -1) if labels is None else labels[self._starts[self.pairs]]
        named = {"preference pairs": -1, "desirable answers": 1, "undesirable answers": 0}
        found = {what: int((labels_P == label).sum()) for what, label in named.items()}
        text = ", ".join(f"{number:,} {what}" for what, number in found.items() if number)
        text = f"{text or 'no preferences'}, one in a row of {self._seq_len}"
        return text + f"; {left_out:,} left out: too long, or nothing to learn" * (left_out > 0)


def preference_starts(cache: TokenCache) -> np.ndarray:
    """Return the first document of each preference, then the number of documents, int64 [P + 1].

    Documents with the labels -1, -1, 1, 0, -1, -1 are a pair, two single answers and a pair, so the
    result is 0, 2, 3, 4, 6.
    """
    if cache.labels is None:
        return np.arange(0, cache.num_documents + 1, 2)
    is_single_D = cache.labels >= 0
    firsts = np.concatenate([np.flatnonzero(is_single_D), np.flatnonzero(~is_single_D)[::2]])
    return np.append(np.sort(firsts), cache.num_documents)


def best_fit(lengths_I: np.ndarray, size: int) -> np.ndarray:
    """Fit items into rows of ``size``, by the method "best fit decreasing".

    The longest item comes first. Each item goes into the row with the least room that still holds
    it: lengths 3, 2, 5, 4 and rows of 7 give 5 + 2 and 4 + 3. If m rows are the fewest possible,
    the method fills at most 11/9 m + 4 rows (D. S. Johnson, 1973). It sorts the items in
    O(I log I) time, and then searches ``size`` bits for each item.

    Args:
        lengths_I: integers from 1 to ``size``.
        size: number of tokens of a row.

    Returns:
        The row of each item, int64 [I]. Rows are numbered in the order in which they are opened.
    """
    rows_I = np.empty(len(lengths_I), dtype=np.int64)
    rows_by_room: list[list[int]] = [[] for _ in range(size + 1)]
    rooms, num_rows = 0, 0  # bit r of rooms is set if some row has room for r more tokens
    by_length = np.argsort(-lengths_I, kind="stable")
    i: int
    length: int
    room: int
    for i, length in zip(by_length.tolist(), lengths_I[by_length].tolist(), strict=True):
        # The lowest bit from `length` on is the least room that holds the item.
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
