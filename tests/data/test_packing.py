"""Packed rows, and the order and shape of batches."""

import itertools
import time

import numpy as np
import pytest

from moetrain.data.cache import TokenCache
from moetrain.data.loader import Batch, Loader, eval_batches
from moetrain.data.packing import IGNORE_INDEX, StreamDataset, WholeDataset, best_fit


def token_cache(documents: list[list[int]], masked: list[int] | None = None) -> TokenCache:
    tokens = np.array([t for d in documents for t in d], dtype=np.uint16)
    ends = np.cumsum([0] + [len(d) for d in documents])
    mask = np.array(masked if masked is not None else [0] * len(tokens), dtype=np.uint8)
    pairs = itertools.pairwise(ends)
    targets = np.array([(mask[a + 1 : b] == 0).sum() for a, b in pairs], dtype=np.int64)
    return TokenCache(tokens, ends, targets, None if masked is None else mask, "content")


def packed(
    documents: list[list[int]], seq_len: int, masked: list[int] | None = None
) -> StreamDataset:
    return StreamDataset(token_cache(documents, masked), seq_len)


def test_rows_by_hand():
    """The example of StreamDataset's docstring: a a a | b b b b b | c c, four tokens a row."""
    data = packed([[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]], seq_len=4)
    assert len(data) == 2
    row = data.row(0)
    assert row.tokens_S.tolist() == [1, 2, 3, 4]
    assert row.targets_S.tolist() == [2, 3, IGNORE_INDEX, 5]  # 5 is in the next row
    assert row.positions_S.tolist() == [0, 1, 2, 0]
    assert row.lengths.tolist() == [3, 1]
    row = data.row(1)
    assert row.tokens_S.tolist() == [5, 6, 7, 8]
    assert row.targets_S.tolist() == [6, 7, 8, IGNORE_INDEX]  # the document ends with the row
    assert row.positions_S.tolist() == [0, 1, 2, 3]
    assert row.lengths.tolist() == [4]
    assert all(array.dtype == np.int64 for array in row[:4])
    assert row.is_pad_S is None


def test_last_row_at_the_end_of_the_corpus():
    row = packed([[1, 2], [3, 4]], seq_len=4).row(0)
    assert row.targets_S.tolist() == [2, IGNORE_INDEX, 4, IGNORE_INDEX]


def test_masked_tokens_are_no_targets():
    row = packed([[1, 2, 3, 4, 5, 6]], seq_len=4, masked=[1, 1, 0, 0, 1, 0]).row(0)
    assert row.targets_S.tolist() == [IGNORE_INDEX, 3, 4, IGNORE_INDEX]


@pytest.mark.parametrize("seq_len", [2, 7, 100])
def test_rows_agree_with_a_token_by_token_walk(seq_len: int):
    """Random documents, also of single tokens, agree with the definition, token by token."""
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 1000, n).tolist() for n in generator.integers(1, 40, 60)]
    masked = generator.integers(0, 2, sum(map(len, documents))).tolist()
    stream = [(d, i, token) for d, doc in enumerate(documents) for i, token in enumerate(doc)]
    data = packed(documents, seq_len, masked)
    assert len(data) == len(stream) // seq_len
    for index in range(len(data)):
        row, start = data.row(index), index * seq_len
        for s in range(seq_len):
            document, offset, token = stream[start + s]
            following = start + s + 1
            goes_on = following < len(stream) and stream[following][0] == document
            learned = goes_on and not masked[following]
            assert row.tokens_S[s] == token
            assert row.targets_S[s] == (stream[following][2] if learned else IGNORE_INDEX)
            assert row.positions_S[s] == min(offset, s)
        assert row.lengths.sum() == seq_len
        assert row.lengths.min() > 0
        segment_starts = np.cumsum(row.lengths) - row.lengths
        assert segment_starts.tolist() == np.flatnonzero(row.positions_S == 0).tolist()


def test_parts_of_a_stream_share_no_target():
    cache = token_cache([[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    train, held_out = StreamDataset(cache, 3, 0, 2), StreamDataset(cache, 3, 2)
    assert [len(train), len(held_out), len(StreamDataset(cache, 3))] == [2, 1, 3]
    assert train.row(0).targets_S.tolist() == [2, 3, 4]
    assert train.row(1).targets_S.tolist() == [5, 6, IGNORE_INDEX]  # 7 is held out
    assert held_out.row(0).tokens_S.tolist() == [7, 8, 9]
    assert train.identity != held_out.identity


# Whole documents


def test_whole_rows_by_hand():
    """This is the example of WholeDataset's docstring: a a a a | b b b | c c, six tokens a row."""
    data = WholeDataset(token_cache([[1, 2, 3, 4], [5, 6, 7], [8, 9]]), seq_len=6)
    assert len(data) == 2
    row = data.row(0)
    assert row.tokens_S.tolist() == [1, 2, 3, 4, 8, 9]
    assert row.targets_S.tolist() == [2, 3, 4, IGNORE_INDEX, 9, IGNORE_INDEX]
    assert row.positions_S.tolist() == [0, 1, 2, 3, 0, 1]
    assert row.lengths.tolist() == [4, 2]
    assert row.is_pad_S.tolist() == [False] * 6
    row = data.row(1)
    assert row.tokens_S.tolist() == [5, 6, 7, 0, 0, 0]
    assert row.targets_S.tolist() == [6, 7, *[IGNORE_INDEX] * 4]
    assert row.positions_S.tolist() == [0, 1, 2, 3, 4, 5]  # pads belong to the segment before them
    assert row.lengths.tolist() == [6]
    assert row.is_pad_S.tolist() == [False] * 3 + [True] * 3
    assert all(array.dtype == np.int64 for array in row[:4])
    batch = Batch.of([data.row(0), data.row(1)])
    assert batch.is_pad_BS.tolist() == [[False] * 6, [False] * 3 + [True] * 3]
    assert batch.num_tokens == 9


def test_whole_rows_with_documents_longer_than_a_row():
    """A conversation keeps its beginning; a text is split; a part without targets makes no row."""
    conversation, text = list(range(10, 20)), list(range(30, 39))
    late = [50, 51, 52, 53, 54, 55]  # targets lie after the first row only
    nothing = [60, 61]
    documents = [conversation, text, late, nothing]
    masked = [1, 1, *[0] * 8, *[0] * 9, *[1] * 5, 0, 1, 1]
    data = WholeDataset(token_cache(documents, masked), seq_len=4)
    rows = [data.row(i) for i in range(len(data))]
    assert [row.tokens_S.tolist() for row in rows] == [
        [10, 11, 12, 13],
        [30, 31, 32, 33],
        [34, 35, 36, 37],  # 38 has no target, so it needs no room
    ]
    assert [row.targets_S.tolist() for row in rows] == [
        [IGNORE_INDEX, 12, 13, 14],
        [31, 32, 33, 34],
        [35, 36, 37, 38],
    ]
    # In the conversation 12 to 19 the tokens 15 to 19 are lost; in the late one its only target.
    assert data.describe() == (
        "packed 4 conversations into 3 rows of 4 (100.0% full); 2 longer than a row were cut, "
        "66.7% of their trained tokens lost; 2 were left out: nothing to learn within a row's "
        "length"
    )


def test_best_fit_by_hand():
    assert best_fit(np.array([3, 2, 5, 4]), 7).tolist() == [1, 0, 0, 1]
    # 6 and 4 leave room for 1 and 3; the 3 fills its room exactly, then 2 fits nowhere.
    assert best_fit(np.array([2, 3, 4, 6]), 7).tolist() == [2, 1, 1, 0]
    assert best_fit(np.array([], dtype=np.int64), 7).tolist() == []


@pytest.mark.parametrize("seq_len", [2, 7, 64])
def test_whole_rows_agree_with_a_walk_over_documents(seq_len: int):
    """Every document that fits lies in exactly one row, in one piece, with all of its targets."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 40, 80)
    first = np.cumsum([0, *lengths])  # every token is its own index in the stream
    documents = [list(range(a, b)) for a, b in itertools.pairwise(first)]
    masked = generator.integers(0, 2, int(lengths.sum())).tolist()
    data = WholeDataset(token_cache(documents, masked), seq_len)
    seen = {}
    for index in range(len(data)):
        row = data.row(index)
        at = 0
        assert (row.targets_S != IGNORE_INDEX).any()
        assert row.lengths.sum() == seq_len
        for length in row.lengths:
            part = slice(at, at + length)
            real = ~row.is_pad_S[part]
            assert row.positions_S[part].tolist() == list(range(length))
            tokens, targets = row.tokens_S[part][real], row.targets_S[part]
            assert (targets[~real] == IGNORE_INDEX).all()
            document = int(np.searchsorted(first, tokens[0], side="right")) - 1
            seen.setdefault(document, []).extend(targets[targets != IGNORE_INDEX].tolist())
            if len(documents[document]) <= seq_len:
                assert tokens.tolist() == documents[document]
            else:
                assert len(tokens) == seq_len or not any(masked[t] for t in documents[document][1:])
            at += length
        assert not row.is_pad_S[: -row.lengths[-1]].any()
    for number, document in enumerate(documents):
        learned = [t for t in document[1:] if not masked[t]]
        is_text = len(learned) == len(document) - 1
        if not is_text:
            learned = [t for t in learned if t <= document[0] + seq_len]
        assert sorted(seen.get(number, [])) == learned


def test_chats_fill_their_rows_and_none_that_fits_is_cut():
    """2,000 chats have a mean of 449 tokens, in rows of 2048: stream packing cut 22% of their
    targets from the prompt."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.gamma(2.0, 449 / 2, 2000).astype(int), 8, 2048)
    rows = best_fit(lengths, 2048)
    used = np.bincount(rows, weights=lengths)
    assert used.max() <= 2048
    assert used.sum() / (2048 * len(used)) > 0.95


def test_packing_a_million_documents_takes_seconds():
    lengths = np.random.default_rng(0).integers(1, 2049, 100_000)
    start = time.perf_counter()
    rows = best_fit(lengths, 2048)
    assert time.perf_counter() - start < 5  # a tenth of the time for a million; 0.3 s when written
    assert lengths.sum() / (2048 * (rows.max() + 1)) > 0.99


# Loader


def test_batch_by_hand():
    data = packed([[1, 2, 3], [4, 5, 6, 7, 8], [9, 10, 11, 12]], seq_len=4)
    batch = Batch.of([data.row(i) for i in range(3)])
    assert batch.tokens_BS.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 8, 12]
    inputs = vars(batch.inputs)
    for name in ("tokens_BS", "positions_BS", "cu_seqlens"):
        assert inputs.pop(name) is getattr(batch, name)
    assert {*inputs.values()} == {None}
    assert str(batch.cu_seqlens.dtype) == "torch.int32"
    assert {str(t.dtype) for t in batch[:3]} == {"torch.int64"}


def numbered(num_rows: int) -> StreamDataset:
    """Return rows of two tokens, the first of which is the row's number."""
    return packed([[i, 1000] for i in range(num_rows)], seq_len=2)


def first_tokens(loader: Loader, steps: int) -> list[int]:
    batches = [batch for _ in range(steps) for batch in loader.next_step()]
    return [token for batch in batches for token in batch.tokens_BS[:, 0].tolist()]


def test_every_epoch_is_another_permutation():
    rows = first_tokens(Loader(numbered(10), 4, 2, seed=3), 5)
    first, second = rows[:10], rows[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != list(range(10))
    assert rows == first_tokens(Loader(numbered(10), 4, 2, seed=3), 5)
    assert rows != first_tokens(Loader(numbered(10), 4, 2, seed=4), 5)


@pytest.mark.parametrize("done", [0, 1, 2, 3, 7])
def test_resume_gives_the_same_batches(done: int):
    straight = Loader(numbered(11), 4, 2, seed=1)
    first_tokens(straight, done)
    resumed = Loader(numbered(11), 4, 2, seed=1)
    resumed.sample_index = straight.sample_index
    assert first_tokens(resumed, 6) == first_tokens(straight, 6)


@pytest.mark.parametrize(("world_size", "micro"), [(1, 4), (2, 1), (3, 2), (12, 1)])
def test_samples_do_not_depend_on_the_ranks(world_size: int, micro: int):
    expected = first_tokens(Loader(numbered(29), 12, 12, seed=5), 4)
    ranks = [
        Loader(numbered(29), 12, micro, seed=5, rank=r, world_size=world_size)
        for r in range(world_size)
    ]
    steps = [[rank.next_step() for rank in ranks] for _ in range(4)]
    # The order is micro-batch after micro-batch, over all ranks together.
    batches = [b for step in steps for number in zip(*step, strict=True) for b in number]
    assert [row for batch in batches for row in batch.tokens_BS[:, 0].tolist()] == expected


def test_batches_that_do_not_divide():
    with pytest.raises(AssertionError):  # the layout's check names the settings
        Loader(numbered(20), 12, 4, seed=0, world_size=2)


def eval_rows(batches: list[Batch]) -> list[int]:
    """Return the rows with targets, in order; the others do not count."""
    return sorted(
        int(row[0])
        for batch in batches
        for row, targets in zip(batch.tokens_BS, batch.targets_BS, strict=True)
        if (targets != IGNORE_INDEX).any()
    )


@pytest.mark.parametrize(("num_rows", "count"), [(1, 9), (7, 9), (100, 9), (1000, 9)])
def test_evaluation_has_the_same_rows_on_every_layout(num_rows: int, count: int):
    data = numbered(num_rows)
    expected = eval_rows(list(eval_batches(data, count, micro_batch_size=1)))
    assert len(set(expected)) == min(num_rows, count)
    if num_rows == 1000:
        assert max(expected) > 500  # from all rows, not only the first
    for micro in (2, 3, 16):
        for world in (1, 2, 5):
            ranks = [list(eval_batches(data, count, micro, r, world)) for r in range(world)]
            assert len({len(batches) for batches in ranks}) == 1
            assert {b.tokens_BS.shape for batches in ranks for b in batches} == {(micro, 2)}
            assert eval_rows([b for batches in ranks for b in batches]) == expected
