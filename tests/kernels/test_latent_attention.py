"""Attention within latents: values in fp64, and bits that do not depend on the batch."""

import itertools

import pytest
import torch

from moetrain.kernels.attention import latent
from moetrain.kernels.attention.latent import latent_attention, per_head
from moetrain.kernels.attention.paged import PagedRows, attend_to_latents
from tests.lib.invariant_rows import PLACES

SCALE = 0.21


def drawn(place, *shape, seed=0, dtype=None):
    """Return random numbers in the dtype of the place's tests."""
    dtype = dtype or (torch.bfloat16 if place == "cuda" else torch.float32)
    generator = torch.Generator(place).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=place).to(dtype)


def ends_of(lengths, place):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=place)


def in_pages(lengths, latents_Ld, size):
    """Put the latents of sequences end to end into shuffled pages; return the pages' table too."""
    needed = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1))
    table = torch.full((len(lengths), max(needed)), -1, dtype=torch.int32)
    pages = latents_Ld.new_zeros(sum(needed), size, latents_Ld.shape[1])
    parts = zip(lengths, needed, order.split(needed), latents_Ld.split(lengths), strict=True)
    for i, (length, number, own, x_Ld) in enumerate(parts):
        table[i, :number] = own.int()
        padded = x_Ld.new_zeros(number * size, x_Ld.shape[1])
        padded[:length] = x_Ld
        pages[own.to(pages.device)] = padded.unflatten(0, (number, size))
    return pages, table.to(pages.device)


def formula(q_THd, x_Ld, width, first):
    """Attend query i to keys 0 to ``first + i``, in fp64."""
    q, x = q_THd.double(), x_Ld.double()
    scores_HTL = torch.einsum("thd,ld->htl", q, x) * SCALE
    index_L = torch.arange(len(x), device=x.device)
    is_hidden_TL = index_L > first + torch.arange(len(q), device=x.device)[:, None]
    weights_HTL = scores_HTL.masked_fill(is_hidden_TL, -torch.inf).softmax(-1)
    return torch.einsum("htl,lc->thc", weights_HTL, x[:, :width])


SHAPES = [
    ((140, 7), 4, 32, 16, 64),
    ((65, 1, 3), 3, 12, 6, 4),  # pages of less than a block, and odd widths
    ((2, 9), 66, 16, 16, 64),  # the heads of a token are in several tiles
]
REAL = [((700, 1, 1500), 16, 512, 64, 64), ((600, 64), 128, 512, 64, 64)]


@pytest.mark.tier("quick", long=["lengths0-4-32-16-64-cpu", "lengths2-66-16-16-64-cpu"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("lengths", "heads", "width", "rotating", "size"), [*SHAPES, *REAL])
def test_whole_chunked_and_single_tokens_have_one_answer(
    place, lengths, heads, width, rotating, size, monkeypatch
):
    """Splits are short here on a CPU, so that sequences have several."""
    if place == "cpu":
        if heads in (16, 128):
            pytest.skip("the interpreter would take minutes")
        monkeypatch.setattr(latent, "_SPLIT", 64)
    total = sum(lengths)
    q, x = (
        drawn(place, total, heads, width + rotating),
        drawn(place, total, width + rotating, seed=1),
    )
    if place == "cuda" and (width + rotating) % 8:
        pytest.skip("generation on a GPU refuses such widths")
    pages, table = in_pages(lengths, x, size)
    ends = ends_of(lengths, place)
    nothing = torch.zeros(len(lengths), dtype=torch.int32, device=place)
    out = latent_attention(q, pages, ends, nothing, table, width, SCALE)
    parts = zip(q.split(lengths), x.split(lengths), strict=True)
    expected = torch.cat([formula(*part, width, 0) for part in parts])
    error = (out.double() - expected).norm() / expected.norm()
    assert error < (6e-3 if place == "cuda" else 2e-6)
    for most in (1, 37):  # tokens of each sequence that are read now
        now = [min(n, most) for n in lengths]
        read = torch.cat(
            [torch.arange(e - n, e) for n, e in zip(now, ends[1:].tolist(), strict=True)]
        ).to(place)
        starts = ends_of(now, place)
        seen = torch.tensor(lengths, dtype=torch.int32, device=place) - starts.diff()
        found = latent_attention(q[read], pages, starts, seen, table, width, SCALE)
        assert torch.equal(found, out[read]), most
        if most == 1:  # a token at a time, which is less than there are sequences
            with monkeypatch.context() as patched:
                patched.setattr(latent, "_PARTIAL", 1)
                found = latent_attention(q[read], pages, starts, seen, table, width, SCALE)
            assert torch.equal(found, out[read])
    # A sequence alone, with other pages behind it, and some tokens at a time.
    alone = latent_attention(q[: lengths[0]], pages, ends[:2], nothing[:1], table[:1], width, SCALE)
    assert torch.equal(alone, out[: lengths[0]])
    monkeypatch.setattr(latent, "_PARTIAL", 17 * heads * width * 4)
    assert torch.equal(latent_attention(q, pages, ends, nothing, table, width, SCALE), out)
    monkeypatch.setattr(latent, "_PROGRAMS", 0)  # one program computes all splits of a tile
    assert torch.equal(latent_attention(q, pages, ends, nothing, table, width, SCALE), out)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("heads", "inner", "width"), [(3, 12, 20), (16, 128, 512), (2, 160, 70)])
def test_products_of_heads_are_those_of_the_formula_in_any_batch(place, heads, inner, width):
    if place == "cpu" and heads == 16:
        heads, width = 2, 80
    x, w = drawn(place, 70, heads, inner), drawn(place, heads, width, inner, seed=1) / inner**0.5
    expected = torch.einsum("thk,hmk->thm", x.double(), w.double())
    out = per_head(x, w, "triton")
    plain = per_head(x, w, "reference")
    assert (plain.double() - expected).norm() / expected.norm() < 6e-3
    assert (out.double() - expected).norm() / expected.norm() < (6e-3 if place == "cuda" else 2e-6)
    # The other order of the matrix, as keys need it, and queries within wider rows.
    turned = w.transpose(1, 2).contiguous().transpose(1, 2)
    beside = torch.cat((x, x), -1)[..., :inner]
    assert torch.equal(per_head(beside, turned, "triton"), out)
    for tokens in (0, 1, 65):
        found = per_head(x[70 - tokens :], w, "triton")
        assert torch.equal(found, out[70 - tokens :])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [4, 64])
def test_selected_keys_are_those_of_the_mask(place, size):
    """Tokens that see no more keys than are selected have the bits of attention to all keys."""
    lengths, heads, width, rotating, topk = (90, 2, 31), 3, 16, 16, 24
    x = drawn(place, sum(lengths), width + rotating, seed=1)
    pages, table = in_pages(lengths, x, size)
    now = (1, 2, 11)
    q = drawn(place, sum(now), heads, width + rotating)
    seen = torch.tensor(lengths, dtype=torch.int32) - torch.tensor(now, dtype=torch.int32)
    draw, selected = torch.Generator().manual_seed(2), torch.full((14, topk), -1, dtype=torch.int32)
    places_T = [
        i for n, first in zip(now, seen.tolist(), strict=True) for i in range(first, first + n)
    ]
    for row, at in zip(selected, places_T, strict=True):
        kept = torch.randperm(at + 1, generator=draw)[:topk]
        row[: len(kept)] = kept.int()
    rows = PagedRows(
        torch.full((14,), -1, dtype=torch.int32, device=place), ends_of(now, place),
        seen.to(place), table, 1,
    )  # fmt: skip
    chosen = rows._replace(selected_TAK=selected[:, None].to(place))
    found, whole = (
        attend_to_latents(q, pages, each, width=width, scale=SCALE, backend="triton")
        for each in (chosen, rows)
    )
    want = []
    at = 0
    for number, first, x_Ld in zip(now, seen.tolist(), x.split(lengths), strict=True):
        for i in range(number):
            keys = selected[at][selected[at] >= 0].long().to(place)
            want.append(formula(q[at : at + 1], x_Ld[keys], width, len(keys)))
            if first + i < topk:
                assert torch.equal(found[at], whole[at])
            at += 1
    error = (found.double() - torch.cat(want)).norm() / torch.cat(want).norm()
    assert error < (6e-3 if place == "cuda" else 2e-6)
    # A slot of a step that holds no sequence selects nothing.
    selected[0] = -1
    chosen = rows._replace(selected_TAK=selected[:, None].to(place))
    again = attend_to_latents(q, pages, chosen, width=width, scale=SCALE, backend="triton")
    assert torch.equal(again[1:], found[1:])
    assert not again[0].any()


@pytest.mark.parametrize("place", PLACES)
def test_a_step_of_nothing_gives_nothing(place):
    none = torch.zeros(0, dtype=torch.int32, device=place)
    ends, pages = none.new_zeros(1), drawn(place, 2, 64, 24)
    q = drawn(place, 0, 4, 24)
    assert latent_attention(q, pages, ends, none, none[:, None], 16, SCALE).shape == (0, 4, 16)
