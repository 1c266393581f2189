"""Rows of packed samples: their layout, and the way back to samples."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moetrain.data.packing import IGNORE_INDEX
from moetrain.train.samples import DealtSamples, Sample, pack, unpack
from tests.lib.rl_samples import make_sample, make_samples


def test_packed_rows_worked_example():
    a = Sample(
        tokens=np.array([10, 11, 12, 13]),
        is_action=np.array([False, False, True, True]),
        logprobs=np.array([0, 0, -0.25, -0.5], np.float32),
        versions=np.array([-1, -1, 7, 8]),
        advantage=2.0,
        group=0,
        routes=np.arange(6, dtype=np.int32).reshape(3, 2, 1),
    )
    b = Sample(
        tokens=np.array([20, 21, 22]),
        is_action=np.array([False, True, True]),
        logprobs=np.array([0, -0.125, -1], np.float32),
        versions=np.array([-1, 8, 8]),
        advantage=np.array([0, -1, -3], np.float32),
        group=1,
    )
    (batch,) = pack([a, b], 6, 1)
    no = IGNORE_INDEX
    assert batch.tokens_BS.tolist() == [[10, 11, 12, 20, 21, 0]]
    assert batch.targets_BS.tolist() == [[no, 12, 13, 21, 22, no]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6]
    assert batch.is_pad_BS.tolist() == [[False] * 5 + [True]]
    assert batch.logprobs_BS.tolist() == [[0, -0.25, -0.5, -0.125, -1, 0]]
    assert batch.advantages_BS.tolist() == [[2, 2, 2, -1, -3, 0]]
    assert batch.versions_BS.tolist() == [[-1, 7, 8, 8, 8, -1]]
    assert batch.routes_BSLK[0, :, :, 0].tolist() == [[0, 1], [2, 3], [4, 5]] + [[-1, -1]] * 3
    assert batch.spans == ((0, 0, 3), (1, 3, 2))
    assert batch.num_tokens == 5
    assert batch.num_trained_samples() == 2
    sums = batch.sums_over_samples(torch.tensor([[1.0, 2, 4, 8, 16, 32]]))
    assert sums.tolist() == [[7, 7, 7, 24, 24, 32]]
    assert batch.to(torch.device("cpu")).spans == batch.spans


def test_samples_lie_whole_in_few_rows_and_come_back():
    lengths = [5, 13, 2, 7, 9, 3, 4, 13, 6]
    samples = make_samples(*lengths)
    batches = pack(samples, 12, 2)
    rows = [batch.tokens_BS.shape for batch in batches]
    assert rows == [(2, 12)] * 3  # 53 positions need at least 5 rows of 12
    for name in ("tokens_BS", "targets_BS", "logprobs_BS", "advantages_BS", "versions_BS"):
        found = unpack(batches, [getattr(batch, name) for batch in batches])
        for sample, values in zip(samples, found, strict=True):
            acts = sample.is_action[1:]
            expected = {
                "tokens_BS": sample.tokens[:-1],
                "targets_BS": np.where(acts, sample.tokens[1:], IGNORE_INDEX),
                "logprobs_BS": sample.logprobs[1:],
                "advantages_BS": np.full(len(acts), np.float32(sample.advantage)),
                "versions_BS": sample.versions[1:],
            }[name]
            assert values[0] == 0
            assert np.array_equal(values[1:].numpy(), expected), name
    # Nothing else is trained, and each segment is one sample or one run of pads.
    targets = sum(int((batch.targets_BS != IGNORE_INDEX).sum()) for batch in batches)
    assert targets == sum(int(sample.is_action.sum()) for sample in samples)
    for batch in batches:
        is_pad = batch.is_pad_BS.flatten()
        edges = batch.cu_seqlens.tolist()
        assert edges[-1] == batch.tokens_BS.numel()
        assert (batch.positions_BS.flatten() == 0).nonzero().flatten().tolist() == edges[:-1]
        for start, stop in pairwise(edges):
            assert is_pad[start:stop].unique().numel() == 1


def test_empty_micro_batches_where_other_ranks_have_more():
    full, empty, last = pack(make_samples(5), 6, 1, min_batches=3)
    assert full.num_tokens == 4
    for batch in (empty, last):
        assert batch.num_tokens == batch.num_trained_samples() == 0
        assert (batch.targets_BS == IGNORE_INDEX).all()
        assert batch.cu_seqlens.tolist() == [0, 6]
    assert len(pack([], 6, 2)) == 1


def test_samples_stay_in_the_part_of_their_job_where_a_batch_is_added():
    """A pipeline takes a multiple of batches. The parts used to be lost with the added ones."""
    samples = [make_sample(5, group=1), make_sample(3, group=0)]
    plan = SimpleNamespace(batch_multiple=2)
    world = SimpleNamespace(
        data_rank=0, dims=SimpleNamespace(data_ranks=1), gather=lambda value: [value]
    )
    engine: Any = SimpleNamespace(world=world, stages=SimpleNamespace(plan=plan))
    dealt = DealtSamples(engine, samples, order=[0, 1], seq_len=6, micro_batch_size=1, num_parts=2)
    first, added = dealt.batches
    assert (~first.is_pad_BS).sum(1).tolist() == [2, 4]  # the row of each job
    assert added.tokens_BS.shape == first.tokens_BS.shape
    assert added.num_tokens == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokens": np.array([1])}, "1 tokens, but at least two are needed"),
        ({"logprobs": np.zeros(4)}, "logprobs has 4 values for 3 tokens"),
        ({"is_action": np.array([True, False, True])}, "first token is an action"),
        ({"advantage": np.zeros(2)}, "advantage has 2 values for 3 tokens"),
        ({"routes": np.zeros((3, 1, 1))}, "routes has 3 entries, but 2 tokens were read"),
    ],
)
def test_a_sample_that_does_not_fit_together_says_why(changes, named):
    good = vars(make_sample(3))
    with pytest.raises(ValueError, match=named):
        Sample(**(good | changes))


def test_a_sample_longer_than_a_row_is_named():
    with pytest.raises(ValueError, match="sample 1 has 8 tokens, and a row of 6 takes 7"):
        pack(make_samples(7, 8), 6, 1)
