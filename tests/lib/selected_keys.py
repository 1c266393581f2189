"""Helpers of tests of attention to keys that an indexer selects."""

import torch

from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams
from moetrain.kernels.attention import paged
from moetrain.models.transformer import Transformer
from tests.lib.family_cases import tokens


def drawn(arch, seed=0, std=0.3):
    """Return a model of ``arch`` with random weights."""
    model = Transformer(arch)
    model.init_weights(std=std, seed=seed)
    return model


def rows_of(starts, size):
    """Return ``Context.seen_BS2`` of one row whose documents begin at ``starts``."""
    first = [max(s for s in starts if s <= i) for i in range(size)]
    return torch.tensor([[*zip(first, range(size), strict=True)]])


def pages_of(seed=0, pages=9, size=4, heads=3):
    """Return pages of keys and values."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(pages, size, heads, width, generator=draw) for width in (6, 5))


def assert_gathering_generates_the_same(arch, monkeypatch):
    """Assert that a GPU's way to attend to selected keys, run here, generates the same tokens."""
    requests = [
        Request(
            str(n), tuple(tokens(1, n)[0].tolist()), SamplingParams(max_tokens=9, temperature=0)
        )
        for n in (2, 17)
    ]

    def generated():
        generator = Generator(drawn(arch), num_pages=30, page_size=4)
        return [found[0].tokens for found in generator.generate(requests)]

    want, calls = generated(), []

    def gathered(q_THd, cache, rows, window, scale, sinks_H):
        if rows.selected_TAK is None:
            return by_lengths(q_THd, cache, rows, window, scale, sinks_H)
        calls.append(rows)
        whole = by_lengths(q_THd, cache, rows._replace(selected_TAK=None), window, scale, sinks_H)
        return paged._with_selected(whole, q_THd, cache, rows, rows.selected_TAK, scale)

    by_lengths = paged._attend_by_lengths
    monkeypatch.setattr(paged, "_attend_by_lengths", gathered)
    assert generated() == want
    assert calls
