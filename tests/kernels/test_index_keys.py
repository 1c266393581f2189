"""The choice of keys: by blocks of queries and of keys, in any batch, and by scores of any values.

Its keys are those of the formula in fp64 in test_kernels.py, for scores that every dtype computes
exactly.
"""

import pytest
import torch

from moetrain.kernels.attention import index_keys
from moetrain.kernels.attention.index_keys import index_scores, select_keys, visible_keys
from tests.lib.kernel_cases import devices


def inputs_of(device, *, dtype=torch.bfloat16, rows=2, size=26, heads=3, width=32):
    """Return queries, keys, weights and places of rows of documents that begin at 0 and 7."""
    draw = torch.Generator(device).manual_seed(0)
    shapes = (rows, size, heads, width), (rows, size, width), (rows, size, heads)
    q, k, w = (torch.randn(shape, generator=draw, device=device) for shape in shapes)
    last_BS = torch.arange(size, device=device).expand(rows, size)
    first_BS = torch.where(last_BS < 7, 0, 7)
    return q.to(dtype), k.to(dtype), w, torch.stack((first_BS, last_BS), dim=-1)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_key_that_is_left_out_has_a_larger_score(dtype, device):
    q, k, w, seen = inputs_of(device, dtype=dtype)
    keys_BSK = select_keys(q, k, w, seen, 5, "triton")
    assert keys_BSK.dtype == torch.int32
    scores_BSL = index_scores(q.double(), k.double(), w.double())
    visible_BSL = visible_keys(seen, 26)
    for row in range(2):
        for query in range(26):
            found = [key for key in keys_BSK[row, query].tolist() if key >= 0]
            visible = visible_BSL[row, query].nonzero()[:, 0].tolist()
            assert found == sorted(found)
            assert keys_BSK[row, query, len(found) :].eq(-1).all()
            assert len(found) == min(5, len(visible))
            assert {*found} <= {*visible}
            own = scores_BSL[row, query]
            others = [own[key] for key in visible if key not in found]
            assert not others or min(own[key] for key in found) > max(others) - 1e-4


@devices
def test_blocks_of_queries_and_of_keys_select_the_same(device, monkeypatch):
    """Also where many scores are equal, and where the last block is smaller."""
    q, k, w, seen = inputs_of(device, rows=1)
    for values in (q, k, w):
        values.copy_(values.round())
    want = select_keys(q, k, w, seen, 5, "triton")
    monkeypatch.setattr(index_keys, "_OF_KEYS", index_keys._OF_KEYS._replace(keys=16))
    assert torch.equal(select_keys(q, k, w, seen, 5, "triton"), want)
    monkeypatch.setattr(index_keys, "_SCORES", 26 * 20)
    assert torch.equal(select_keys(q, k, w, seen, 5, "triton"), want)
    narrow = index_keys._OF_SCORES._replace(queries=64, keys=32)
    monkeypatch.setattr(index_keys, "_OF_SCORES", narrow)
    assert torch.equal(select_keys(q, k, w, seen, 5, "triton"), want)


@devices
def test_a_query_alone_selects_what_it_selects_in_a_row(device):
    """So generation selects the keys of training, also where scores nearly tie."""
    q, k, w, seen = inputs_of(device, rows=1, heads=20, width=64)
    k[0, 1::2] = k[0, ::2]  # scores of pairs of keys are equal
    want = select_keys(q, k, w, seen, 5, "triton")
    own = slice(8, 26, 6)
    q, w, seen = (x[0, own, None] for x in (q, w, seen))
    alone = select_keys(q, k.expand(len(q), -1, -1), w, seen, 5, "triton")
    assert torch.equal(alone[:, 0], want[0, own])


@devices
def test_other_sizes_are_selected_in_plain_torch_unless_the_kernel_is_asked_for(device):
    q, k, w, seen = inputs_of(device, width=24)
    assert select_keys(q, k, w, seen, 5).shape == (2, 26, 5)
    with pytest.raises(ValueError, match="widths d that are powers of two from 16"):
        select_keys(q, k, w, seen, 5, "triton")
