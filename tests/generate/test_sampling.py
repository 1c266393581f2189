"""Sampling draws from the softmax: the noise of every possible word, and its choices."""

import pytest
import torch

from moetrain.cli.generate import main
from moetrain.generate.request import SamplingParams
from moetrain.generate.sampling import FILTER_NAMES, Filters, kept_tokens, sample_filtered
from moetrain.http.protocol import Chat, Completions
from moetrain.kernels.vocabulary.chunk import sample_tokens
from moetrain.kernels.vocabulary.gumbel import (
    MASK,
    exponential_of,
    gumbel_argmax,
    mix,
    noise_keys,
    noise_of,
    tl_exponential,
    tl_noise,
)
from moetrain.runtime.backend import INTERPRETED, tl, triton

PLACES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
BLOCK = 2**16 if INTERPRETED else 2**10
QWEN = 151_936
"""Tokens in the vocabulary of Qwen3's tokenizer, padding included."""
HIGHEST = [(10754, 138), (38825, 20), (74792, 292)]
"""Keys and tokens whose hash begins with 24 ones."""


@triton.jit
def _noise_kernel(words_ptr, exponential_ptr, noise_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(words_ptr + at).to(tl.uint32)
    tl.store(exponential_ptr + at, tl_exponential(bits))
    tl.store(noise_ptr + at, tl_noise(bits))


def on_both_paths(words, exact):
    """Return -log u of ``words`` on one path; both paths give its noise and that of ``exact``."""
    exponential, noise = exponential_of(words), noise_of(words)
    torch.testing.assert_close(exponential.double(), exact, rtol=2e-5, atol=0)
    torch.testing.assert_close(noise.double(), -exact.log(), rtol=0, atol=2e-5)
    fast_exponential, fast_noise = torch.empty_like(noise), torch.empty_like(noise)
    grid = (len(words) // BLOCK,)
    _noise_kernel[grid](words.int(), fast_exponential, fast_noise, BLOCK=BLOCK)
    # Two libraries' logarithms differ in about the last bit.
    torch.testing.assert_close(fast_noise, noise, rtol=0, atol=2e-6)
    return exponential, fast_exponential


@pytest.mark.parametrize("place", PLACES)
def test_keys_are_alike_on_both_paths(place):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (300, 3), generator=generator).int().to(place)
    streams, positions = words[:, 0], words[:, 1]
    positions[:3] = torch.tensor([0, -1, 2**31 - 1])
    for number in (300, 1, 0):
        given = streams[:number], positions[:number]
        keys = noise_keys(*given, "triton")
        assert torch.equal(keys, noise_keys(*given, "reference"))
        assert torch.equal(keys, noise_keys(*(x.long() for x in given), "triton"))
    assert len(set(noise_keys(streams, positions).tolist())) == 300


@pytest.mark.parametrize("place", PLACES)
def test_every_word_has_finite_noise_alike_on_both_paths(place):
    for start in range(0, 2**23, 2**20):
        parts = torch.arange(start, start + 2**20, device=place)
        words = parts << 9 | parts & 0x1FF
        is_divided = words >= 2**32 - 2**17  # below, the 9 lower bits are ignored
        exact = -((parts.double() + 0.5) / 2**23).log()
        exact = exact.where(~is_divided, -torch.log1p(-(MASK - words + 0.5) / 2**32))
        on_both_paths(words, exact)


@pytest.mark.parametrize("place", PLACES)
def test_the_noise_of_unlikely_winners_is_finely_divided(place):
    from_above = torch.arange(2**17, device=place)
    exact = (from_above.double() + 0.5) / 2**32
    exponential, fast = on_both_paths(MASK - from_above, -torch.log1p(-exact))
    assert torch.equal(exponential.double(), exact)  # so none is 0, and no two are equal
    assert torch.equal(fast, exponential)


@pytest.mark.parametrize("place", PLACES)
def test_the_highest_word_chooses_no_token_that_the_softmax_would_not(place):
    tokens = torch.tensor([token for _, token in HIGHEST])
    keys = torch.tensor([key for key, _ in HIGHEST])
    hashed = mix(mix(keys ^ (tokens * 0x9E3779B1 & MASK)) ^ keys)
    assert (hashed >> 8 == 2**24 - 1).all()
    # Token 7 is 96 above all others, which have a share of e^-96 each.
    dtype = torch.bfloat16 if place == "cuda" else torch.float32
    h, w = torch.zeros(3, 16, dtype=dtype), torch.zeros(300, 16, dtype=dtype)
    h[:, 0], w[7, 0] = 1, 96
    one = torch.ones(3, device=place)
    rows = h.to(place), w.to(place), keys.int().to(place), one, one
    for backend in ("triton", "reference"):
        assert sample_tokens(*rows, 300, backend)[0].tolist() == [7, 7, 7]
    # A filter keeps only the first of equal logits.
    logits, one_of_all = torch.zeros(3, 300, device=place), SamplingParams(top_k=1)
    assert sample_filtered(logits, keys.int().to(place), [1.0] * 3, [one_of_all] * 3).tolist() == [
        0,
        0,
        0,
    ]


def test_every_filter_is_a_parameter_of_http_clients_and_an_option(capsys):
    assert set(FILTER_NAMES) <= Completions.model_fields.keys() & Chat.model_fields.keys()
    for kind in (Completions, Chat):
        defaults = {name: kind.model_fields[name].default for name in FILTER_NAMES}
        assert Filters(**defaults).is_neutral
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert [name for name in FILTER_NAMES if f"--{name} " not in said] == []


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_million_draws_stay_within_their_filters(place):
    logits = torch.randn(24, generator=torch.Generator().manual_seed(1)).sort(descending=True)[0]
    shares, hot = logits.softmax(-1), (logits / 2)[:5].softmax(-1)
    limits = {  # how many of the likeliest tokens each keeps
        SamplingParams(top_k=2): 2,
        SamplingParams(top_p=0.5): int((shares.cumsum(-1) < 0.5).sum()) + 1,
        SamplingParams(min_p=0.4): int((shares >= 0.4 * shares[0]).sum()),
        SamplingParams(top_k=5, top_p=0.6, temperature=2.0): int((hot.cumsum(-1) < 0.6).sum()) + 1,
    }
    inverse = torch.tensor([1.0, 1.0, 1.0, 0.5], device=place)
    kept = kept_tokens(logits.to(place) * inverse[:, None], [*limits])
    masked = logits.to(place).expand(4, -1).masked_fill(~kept, -torch.inf).repeat(2**12, 1)
    inverse, most = inverse.repeat(2**12), torch.tensor([*limits.values()] * 2**12, device=place)
    for part in range(64):  # 16,384 draws each
        positions = torch.arange(len(masked), device=place) + part * len(masked)
        keys = noise_keys(torch.full_like(positions, 5), positions)
        assert (gumbel_argmax(masked, keys, inverse) < most).all()


@pytest.mark.tier("quick", long=["cpu"])
@pytest.mark.long
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_draws_from_a_large_vocabulary_follow_the_softmax(place):
    """Pearson's chi-square: four tokens have 90 %, a thousand have 9.7 %, all others 0.3 %."""
    shares, heavy = torch.tensor([0.4, 0.3, 0.15, 0.05, 0.097, 0.003]), [0, 999, 99_999, QWEN - 1]
    bin_of = torch.full((QWEN,), 5)
    bin_of[70_000:71_000] = 4
    bin_of[heavy] = torch.arange(4)
    w = torch.zeros(QWEN, 16)  # the logits are its first column
    w[:, 0] = (shares / bin_of.bincount()).log()[bin_of]
    rows, number = (4, 2**11) if place == "cpu" else (2**10, 2**17)
    w, h, one = w.to(place), torch.eye(1, 16, device=place).repeat(rows, 1), torch.ones(rows)
    counts, one = torch.zeros(6), one.to(place)
    for start in range(0, number, rows):
        keys = noise_keys(torch.full((rows,), 11), torch.arange(start, start + rows)).to(place)
        tokens = sample_tokens(h, w, keys, one, one, QWEN)[0].cpu()
        counts += bin_of[tokens].bincount(minlength=6)
    expected = number * shares
    # With five degrees of freedom, 0.1 % of fair draws have more.
    assert ((counts - expected).square() / expected).sum() < 20.5, counts
