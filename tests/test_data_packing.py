"""Data from tokens on: packed rows, and the order and shape of batches."""

import numpy as np
import pytest

from moetrain.config import ConfigError
from moetrain.data import IGNORE_INDEX, Loader, eval_batches
from moetrain.data.cache import TokenCache
from moetrain.data.packing import PackedDataset


def packed(
    documents: list[list[int]], seq_len: int, masked: list[int] | None = None
) -> PackedDataset:
    tokens = np.array([t for d in documents for t in d], dtype=np.uint16)
    ends = np.cumsum([0] + [len(d) for d in documents])
    mask = None if masked is None else np.array(masked, dtype=np.uint8)
    return PackedDataset(TokenCache(tokens, ends, mask), seq_len, "add text")


def test_rows_by_hand():
    """The example of packing.py's docstring: a a a | b b b b b | c c, four tokens a row."""
    data = packed([[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]], seq_len=4)
    assert len(data) == 2
    row = data.row(0)
    assert row.tokens_S.tolist() == [1, 2, 3, 4]
    assert row.targets_S.tolist() == [2, 3, IGNORE_INDEX, 5]  # 5 lies past the row
    assert row.positions_S.tolist() == [0, 1, 2, 0]
    assert row.lengths.tolist() == [3, 1]
    row = data.row(1)
    assert row.tokens_S.tolist() == [5, 6, 7, 8]
    assert row.targets_S.tolist() == [6, 7, 8, IGNORE_INDEX]  # the document ends with the row
    assert row.positions_S.tolist() == [0, 1, 2, 3]
    assert row.lengths.tolist() == [4]
    assert all(array.dtype == np.int64 for array in row)


def test_last_row_at_the_end_of_the_corpus():
    row = packed([[1, 2], [3, 4]], seq_len=4).row(0)
    assert row.targets_S.tolist() == [2, IGNORE_INDEX, 4, IGNORE_INDEX]


def test_masked_tokens_are_no_targets():
    row = packed([[1, 2, 3, 4, 5, 6]], seq_len=4, masked=[1, 1, 0, 0, 1, 0]).row(0)
    assert row.targets_S.tolist() == [IGNORE_INDEX, 3, 4, IGNORE_INDEX]


@pytest.mark.parametrize("seq_len", [2, 7, 100])
def test_rows_agree_with_a_token_by_token_walk(seq_len: int):
    """Random documents, single-token ones included, against the definition, one token a time."""
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


def test_too_few_tokens_for_a_row():
    with pytest.raises(ConfigError, match=r"data\.seq_len: 5 is more than the 4 tokens"):
        packed([[1, 2, 3, 4]], seq_len=5)


# Loader


def test_batch_by_hand():
    data = packed([[1, 2, 3], [4, 5, 6, 7, 8], [9, 10, 11, 12]], seq_len=4)
    (batch,) = Loader(data, 3, 3, seed=0, shuffle=False).next_step()
    assert batch.tokens_BS.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 8, 12]
    assert batch.max_seqlen == 4
    assert str(batch.cu_seqlens.dtype) == "torch.int32"
    assert {str(t.dtype) for t in batch[:3]} == {"torch.int64"}


def numbered(num_rows: int) -> PackedDataset:
    """Rows of two tokens whose first token is the row's number."""
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
    assert [row for _ in range(4) for rank in ranks for row in first_tokens(rank, 1)] == expected


def test_batches_that_do_not_divide():
    with pytest.raises(ConfigError, match=r"train\.global_batch_size: 12 .* 4 times 2"):
        Loader(numbered(20), 12, 4, seed=0, world_size=2)


@pytest.mark.parametrize(
    ("num_rows", "micro", "count", "expected"),
    [(10, 3, 2, [[0, 1, 2], [3, 4, 5]]), (7, 3, 9, [[0, 1, 2], [3, 4, 5]]), (2, 3, 9, [[0, 1]])],
)
def test_eval_batches(num_rows: int, micro: int, count: int, expected: list[list[int]]):
    batches = eval_batches(numbered(num_rows), micro, count)
    assert [batch.tokens_BS[:, 0].tolist() for batch in batches] == expected
