"""Generation gives transformers' tokens: in chunks, with shared prefixes, preempted, in batches."""

import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
import tokenizers
import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from moetrain.cli.generate import main
from moetrain.config import KernelsSection
from moetrain.data.tokenizer import ByteTokenizer, load_tokenizer
from moetrain.generate.engine import Generator
from moetrain.generate.pages import Pages
from moetrain.generate.request import (
    Request,
    RequestError,
    SamplingParams,
    chat_stops,
    end_ids,
)
from moetrain.generate.sampling import Filters, kept_tokens, sample_filtered
from moetrain.kernels.vocabulary.gumbel import gumbel_noise, noise_keys, stream_of
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import save_hf
from moetrain.runtime.backend import INTERPRETED
from tests.lib.architectures import put_weights
from tests.lib.generators import alone, draw_request, make_generator, make_model
from tests.lib.small_models import CASES, SIZES
from tests.lib.turn_ends import NO_END


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.split()[0], **{**SIZES, **CASES[name]})
    config.initializer_range = 0.3
    theirs = AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    generator = Generator(load_hf(tmp_path), num_pages=40, page_size=4, max_tokens=7)
    requests, expected = [], []
    for i, length in enumerate((1, 3, 9, 17)):
        prompt = torch.randint(0, 56, (1, length))
        made = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(made[0, length:].tolist())
        params = SamplingParams(max_tokens=20, temperature=0)
        requests.append(Request(str(i), tuple(prompt[0].tolist()), params))
    found = [completions[0].tokens for completions in generator.generate(requests)]
    assert found == expected
    assert generator.pages.num_available == 40


DISTURBED = {
    "pages of one token": {"page_size": 1, "num_pages": 128},
    "chunks": {"max_tokens": 3},
    "one at a time": {"max_sequences": 1},
    "hardly any room": {"page_size": 4, "num_pages": 24},
}


@pytest.mark.tier("quick", long=["one at a time"], wide=["chunks"])
@pytest.mark.parametrize("name", DISTURBED)
def test_requests_do_not_notice_each_other(name):
    rng = random.Random(name)
    requests = [draw_request(i, rng) for i in range(12)]
    generator = make_generator(**DISTURBED[name])
    for request in requests[:6]:
        generator.submit(request)
    for _ in range(5):
        generator.step()
    found = generator.generate(requests[6:])
    while generator.is_busy:
        generator.step()
    if "room" in name:
        assert generator.scheduler.figures["generator/read_again"] > 0
    for request, completions in zip(requests[6:], found, strict=True):
        assert [c.tokens for c in completions] == alone(request), request
    assert generator.pages.num_available == generator.pages.num_pages


@pytest.mark.tier("long")
def test_hundreds_of_requests_with_arrivals_and_aborts():
    rng = random.Random(0)
    generator = make_generator(page_size=4, num_pages=200, max_sequences=40, max_tokens=64)
    requests = {f"r{i}": draw_request(i, rng) for i in range(200)}
    coming, finished, aborted = list(requests.values()), {}, set()
    while coming or generator.is_busy:
        for _ in range(min(len(coming), rng.randrange(4))):
            generator.submit(coming.pop())
        if rng.random() < 0.05 and generator.is_busy:
            name = rng.choice(list(generator._live))
            aborted.add(name)
            assert all(c.finish_reason for c in generator.abort(name))
        for completion in generator.step():
            if completion.finish_reason is not None:
                finished[completion.request_id, completion.index] = completion
        assert len(generator.scheduler.running) <= 40
    assert generator.pages.num_available == 200
    assert not any(generator.pages._ref_counts)
    assert generator.scheduler.figures["generator/read_again"] > 0
    assert aborted
    expected = {
        (r.id, i) for r in requests.values() if r.id not in aborted for i in range(r.params.n)
    }
    assert expected <= set(finished)
    for request in rng.sample([r for r in requests.values() if r.id not in aborted], 40):
        completions = [finished[request.id, i] for i in range(request.params.n)]
        assert [c.tokens for c in completions] == alone(request), request
        for completion in completions:
            length, params = len(completion.tokens), request.params
            assert len(completion.logprobs) == len(completion.versions) == length
            assert all(len(top) == params.logprobs for top in completion.top_logprobs)
            is_stop = completion.tokens[-1] in params.stop_ids
            assert completion.finish_reason == ("stop" if is_stop else "length")
            assert is_stop or length == params.max_tokens
            if params.routes:
                read = len(request.tokens) + length - 1
                assert completion.routes.shape == (read, 2, 2)


def test_log_probabilities_and_routes_are_the_models():
    model = make_model()
    routes = []
    for block in model.layers:
        block.moe.router.register_forward_hook(lambda m, a, routed: routes.append(routed.ids_TK))
    generator = Generator(model, page_size=4, num_pages=32, max_tokens=5)
    params = SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9, logprobs=3, routes=True)
    (completion,) = generator.generate([Request("a", (5, 6, 7, 8, 9, 10), params)])[0]
    routes.clear()
    whole = torch.tensor([[5, 6, 7, 8, 9, 10, *completion.tokens]])
    plain = make_model()
    for mine, theirs in zip(plain.layers, model.layers, strict=True):
        mine.moe.router.register_forward_hook(lambda m, a, routed: routes.append(routed.ids_TK))
        assert torch.equal(mine.attn.wq.weight, theirs.attn.wq.weight)
    with torch.no_grad():
        expected = plain(whole)[0, 5:-1].log_softmax(-1)
    chosen = expected[torch.arange(12), completion.tokens]
    torch.testing.assert_close(torch.tensor(completion.logprobs), chosen, rtol=1e-5, atol=1e-5)
    for row, top in zip(expected, completion.top_logprobs, strict=True):
        assert list(top) == row.topk(3).indices.tolist()
    assert torch.equal(completion.routes, torch.stack(routes, 1)[:-1])


def test_log_probabilities_at_the_temperature_of_sampling():
    own = SamplingParams(max_tokens=9, temperature=0.7, logprobs=2)
    told = [replace(own, tempered=True), own, replace(own, tempered=True, temperature=0)]
    requests = [Request(str(i), (5, 6, 7), params) for i, params in enumerate(told)]
    found = [completions[0] for completions in make_generator(num_pages=9).generate(requests)]
    assert found[0].tokens == found[1].tokens
    for completion, temperature in zip(found, (0.7, 1, 1), strict=True):
        with torch.no_grad():
            logits = make_model()(torch.tensor([[5, 6, 7, *completion.tokens]]))[0, 2:-1]
        expected = (logits / temperature).log_softmax(-1)
        chosen = expected[torch.arange(9), completion.tokens]
        torch.testing.assert_close(torch.tensor(completion.logprobs), chosen, rtol=1e-5, atol=1e-5)
        known = expected[:, : ByteTokenizer.vocab_size]  # others are never chosen
        for row, top in zip(known, completion.top_logprobs, strict=True):
            assert list(top.values()) == pytest.approx(row.topk(2).values.tolist(), rel=1e-4)
    with pytest.raises(ValueError, match=r"tempered .* ignore filters"):
        SamplingParams(top_k=3, tempered=True)


def test_log_probabilities_of_prompts_are_the_models():
    """Prompts are read in chunks, with too few pages, beside others with shared prefixes."""
    generator, model = make_generator(page_size=4, num_pages=9, max_tokens=5), make_model()
    known = generator.tokenizer.vocab_size  # tokens from there on are never chosen
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 64, (n,), generator=draw).tolist() for n in (1, 2, 11, 16, 13, 9)]
    texts.append(texts[2] + [3, 4])  # has the same beginning
    plain = [
        Request(f"plain {i}", tuple(x), SamplingParams(max_tokens=12)) for i, x in enumerate(texts)
    ]
    asked = SamplingParams(max_tokens=9, prompt_logprobs=3)
    scored = [Request(str(i), tuple(text), asked) for i, text in enumerate(texts)]
    mixed = [request for pair in zip(plain, scored, strict=True) for request in pair]
    found = {c.request_id: c for (c,) in generator.generate(mixed)}
    assert generator.scheduler.figures["generator/read_again"] > 0
    for request, beside in zip(scored, plain, strict=True):
        completion = found[request.id]
        assert found[beside.id].tokens[:9] == completion.tokens
        assert found[beside.id].prompt_logprobs == []
        with torch.no_grad():
            expected = model(torch.tensor([request.tokens]))[0, :-1].log_softmax(-1)
        logprobs = expected.gather(1, torch.tensor(request.tokens[1:], dtype=torch.int64)[:, None])
        assert completion.prompt_logprobs == pytest.approx(logprobs[:, 0].tolist(), rel=1e-4)
        for found_top, row in zip(completion.prompt_top_logprobs, expected, strict=True):
            top = row[:known].topk(3)
            assert [*found_top] == top.indices.tolist()
            assert [*found_top.values()] == pytest.approx(top.values.tolist(), rel=1e-4)


def test_a_cache_that_is_kept_is_its_own_sequences_alone():
    """After an update a sequence continues on its pages; new ones prefill with new weights."""
    prompt, params = tuple(range(40)), SamplingParams(max_tokens=40, seed=3)
    kept, untold = (make_generator(page_size=4, num_pages=64) for _ in range(2))
    for generator in (kept, untold):
        generator.submit(Request("a", prompt, params))
        for _ in range(10):
            generator.step()
        generator.model.load_state_dict(make_model(seed=1).state_dict())
    kept.weights_changed(keeps_cache=True)
    (sequence,) = kept.scheduler.running
    pages = sequence.pages.copy()
    for _ in range(8):  # fills its page
        ours, theirs = kept.step()[0], untold.step()[0]
    assert sequence.pages[: len(pages)] == pages
    assert kept.scheduler.figures["generator/read_again"] == 0
    assert ours.versions == [0] * 10 + [1] * 8
    assert (ours.tokens, ours.logprobs) == (theirs.tokens, theirs.logprobs)
    beside = Request("b", (*prompt, *ours.tokens[:16]), replace(params, n=2))
    expected = make_generator(seed=1, page_size=4).generate([beside])[0]
    found = kept.generate([beside])[0]
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    assert [c.logprobs for c in found] == [pytest.approx(c.logprobs, rel=1e-4) for c in expected]
    assert not kept.is_busy
    kept.submit(replace(beside, id="c"))
    kept.step()
    kept.weights_changed()
    assert kept.scheduler.figures["generator/read_again"] >= 56
    assert kept.abort("c")
    assert kept.pages.num_available == 64


@pytest.mark.parametrize(("batch", "pages", "most"), [(1, 400, 26), (4, 400, 12), (4, 40, 12)])
def test_those_that_wait_begin_together(batch, pages, most):
    """Otherwise each end would admit one sequence, whose prompt makes the step slow.

    This holds if pages are short, and also if slots are.
    """
    generator = make_generator(max_sequences=8, page_size=4, num_pages=pages)
    scheduler = generator.scheduler
    scheduler.batch = batch
    rng = random.Random(0)
    for i in range(32):
        length = SamplingParams(max_tokens=rng.randrange(5, 60))
        generator.submit(Request(str(i), (1, 2, 3, i), length))
    while generator.is_busy:
        waited = len(scheduler.waiting)
        generator.step()
        begun = waited - len(scheduler.waiting)
        assert begun <= 0 or begun >= min(batch, waited)
    figures = scheduler.figures
    assert figures["generator/mixed_steps"] <= most
    assert figures["generator/places"] / figures["generator/steps"] > 4


def test_generator_prefills_a_shared_prefix_once():
    generator = make_generator(page_size=4, num_pages=64)
    read = []
    plan = generator.scheduler.plan
    generator.scheduler.plan = lambda: read.append(p := plan()) or p
    prompt = tuple(range(40))
    greedy = SamplingParams(max_tokens=2, temperature=0)
    generator.generate([Request("a", prompt, greedy)])
    assert sum(number for step in read for _, number in step) == 41
    read.clear()
    generator.generate([Request("b", (*prompt, 50), replace(greedy, n=3))])
    # Forty tokens are cached; each of three reads the new one, and then its first.
    assert sum(number for step in read for _, number in step) == 6
    read.clear()
    first = Request("c", tuple(range(100, 141)), replace(greedy, n=3))
    behind = Request("d", (1, 2), greedy)
    assert len(generator.generate([first, behind])[0]) == 3
    # The first of three reads the prompt, the others its last token; then each its own.
    assert sum(n for step in read for s, n in step if s.request is first) == 41 + 2 + 3
    assert behind in [sequence.request for sequence, _ in read[0]]  # it does not wait for that
    read.clear()
    apart = replace(first, params=replace(first.params, routes=True))
    generator.generate([apart])
    assert sum(number for step in read for _, number in step) == 3 * 42


def test_generator_continues_with_new_weights():
    request = Request("a", tuple(range(20)), SamplingParams(max_tokens=30, temperature=0))
    generator = make_generator(page_size=4, num_pages=32)
    addresses = [p.data_ptr() for p in generator.model.parameters()]
    before = generator.generate([request])[0][0].tokens
    other = make_model(seed=1)
    generator.submit(request)
    for _ in range(10):
        generator.step()
    (moved,) = (s.completion for s in generator._live["a"])
    assert moved.tokens == before[:10]
    put_weights(generator, other.named_parameters())
    assert [p.data_ptr() for p in generator.model.parameters()] == addresses
    while generator.is_busy:
        generator.step()
    assert moved.versions == [0] * 10 + [1] * 20
    fresh = Generator(make_model(seed=1), ByteTokenizer())
    continued = replace(request.params, max_tokens=20)
    go_on = Request("b", (*request.tokens, *before[:10]), continued)
    assert moved.tokens[10:] == fresh.generate([go_on])[0][0].tokens
    assert generator.generate([request])[0][0].tokens == fresh.generate([request])[0][0].tokens


def test_sleep_and_abort():
    request = Request("a", tuple(range(20)), SamplingParams(max_tokens=30, seed=3))
    expected = alone(request)[0]
    generator = make_generator(page_size=4, num_pages=32)
    generator.submit(request)
    completion = generator._live["a"][0].completion
    for _ in range(5):
        generator.step()
    assert generator.abort("b") == []  # it is not running
    generator.sleep()
    with pytest.raises(RuntimeError, match="sleeps"):
        generator.generate([replace(request, id="b")])
    assert list(generator._live) == ["a"]
    assert all(cache.keys_PZGd is None for cache in generator.steps.caches)
    with pytest.raises(RuntimeError, match="wake"):
        generator.step()
    generator.wake()
    for _ in range(5):
        generator.step()
    generator.sleep(weights=True)
    assert all(p.untyped_storage().nbytes() == 0 for p in generator.model.parameters())
    generator.wake()
    put_weights(generator, make_model().named_parameters())
    while generator.is_busy:
        generator.step()
    assert completion.tokens == expected
    generator.submit(request)
    generator.step()
    (cut,) = generator.abort("a")
    assert (cut.tokens, cut.finish_reason) == (expected[:1], "abort")
    assert generator.abort("a") == []
    assert not generator.is_busy


BAD = {
    "no tokens": (Request("x", ()), {}),
    "0 to 263": (Request("x", (264,)), {}),
    r"positions \(128\)": (Request("x", (1,) * 100, SamplingParams(max_tokens=29)), {}),
    r"the cache \(64\)": (
        Request("x", (1,) * 60, SamplingParams(max_tokens=5)),
        {"num_pages": 4, "page_size": 16},
    ),
    "being served": (Request("there", (1,)), {}),
}


@pytest.mark.parametrize("problem", BAD)
def test_submit_refuses_impossible_requests(problem):
    request, settings = BAD[problem]
    generator = make_generator(**settings)
    generator.submit(Request("there", (1,), SamplingParams(max_tokens=3)))
    with pytest.raises(RequestError, match=f"request '{request.id}': .*{problem}") as caught:
        generator.submit(request)
    assert caught.value.request_id == request.id
    twice = [Request("y", (token,), SamplingParams(max_tokens=3)) for token in (1, 2)]
    with pytest.raises(RequestError, match="'y': a request of this id is being served"):
        generator.generate(twice)
    assert list(generator._live) == ["there"]  # nothing of them remains


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -1),
        ("min_p", 1.5),
        ("n", 0),
        ("stop", ("",)),
        ("stop", "END"),
        ("stop", (5,)),
        ("stop_ids", ("x",)),
        ("seed", -1),
    ],
)
def test_impossible_parameters_are_named(name, value):
    with pytest.raises(ValidationError) as refused:
        SamplingParams(**{name: value})
    assert refused.value.errors()[0]["loc"][0] == name


@pytest.mark.parametrize("kind", [SamplingParams, Filters])
def test_sampling_params_refuse_an_unknown_name(kind):
    with pytest.raises(ValidationError) as refused:
        kind(temprature=0)
    (first,) = refused.value.errors()
    assert (first["loc"], first["type"]) == (("temprature",), "unexpected_keyword_argument")


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "n", "logprobs"])
def test_numbers_that_are_not_whole_are_named(name):
    with pytest.raises(ValidationError) as refused:
        SamplingParams(**{name: 2.5})
    (first,) = refused.value.errors()
    assert (first["loc"], first["type"]) == ((name,), "int_type")


@pytest.mark.parametrize("name", ["num_pages", "page_size", "max_sequences", "max_tokens"])
def test_a_generator_that_could_never_step_is_none(name):
    with pytest.raises(ValueError, match=f"{name} 0 is not positive"):
        make_generator(**{name: 0})


def test_extreme_parameters_do_what_they_say():
    def tokens(**params):
        return alone(Request("a", (5, 6, 7), SamplingParams(max_tokens=12, **params)))[0]

    greedy = tokens(temperature=0)
    assert tokens(temperature=1e-300) == greedy
    assert tokens(temperature=1e-40, top_p=0.9) == greedy
    assert tokens(temperature=1e300) == tokens(temperature=1e20) != greedy
    assert tokens(top_k=10**30) == tokens()


@pytest.mark.tier("long")
@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_logprobs_do_not_change_tokens():
    model = make_model().bfloat16()
    with torch.no_grad():  # pairs of tokens whose logits are equal once rounded
        half = model.lm_head.weight[:132].clone()
        half[:, 0] *= 1 + 2**-7
        model.lm_head.weight[132:] = half
    model.kernels = KernelsSection(backend="triton")  # only for sampling
    generator = Generator(model)
    params = SamplingParams(max_tokens=30, temperature=0)
    plain = generator.generate([Request("a", (1, 2, 3), params)])[0][0]
    asked = Request("a", (1, 2, 3), replace(params, logprobs=2))
    beside = Request("b", (1, 2, 3), replace(params, top_k=2))
    looked_at = generator.generate([asked, beside])[0][0]
    assert looked_at.tokens == plain.tokens
    assert looked_at.logprobs == plain.logprobs
    assert len(looked_at.top_logprobs) == 30


def test_of_equal_tokens_the_first_are_reported_whoever_asks_for_more():
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[132:] = model.lm_head.weight[:132]
    generator = Generator(model)
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=3)
    request = Request("a", (1, 2, 3), params)
    more = Request("b", (1, 2, 3), replace(params, logprobs=60))
    alone, beside = (generator.generate(r)[0][0] for r in ([request], [request, more]))
    assert [list(top) for top in beside.top_logprobs] == [list(top) for top in alone.top_logprobs]
    for first, second, third in map(list, alone.top_logprobs):
        assert second == first + 132
        assert third < 132


def test_likeliest_tokens_are_those_that_the_tokenizer_has():
    model = make_model()
    with torch.no_grad():
        model.head_weight[257:] *= 20.0  # rows that pad the vocabulary
    generator = Generator(model, ByteTokenizer())
    params = SamplingParams(max_tokens=3, logprobs=6)
    ((found,),) = generator.generate([Request("a", (1, 2, 3), params)])
    params = SamplingParams(max_tokens=1, prompt_logprobs=6)
    ((scored,),) = generator.generate([Request("b", (1, 2, 3, *found.tokens), params)])
    for mine, theirs in zip(found.top_logprobs, scored.prompt_top_logprobs[2:], strict=True):
        assert max(mine) < ByteTokenizer.vocab_size
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_without_filters_nothing_is_ruled_out():
    logits = torch.tensor([[30.0, *[0.0] * 9]])  # the cumulative share is 1 from the first token on
    assert kept_tokens(logits.repeat(2, 1), [SamplingParams(), SamplingParams(top_k=10)]).all()


def test_top_p_keeps_no_more_than_it_takes():
    kept_NV = kept_tokens(
        torch.zeros(1, 4), [SamplingParams(top_p=0.5)]
    )  # four shares of a quarter
    assert kept_NV.tolist() == [[True, True, False, False]]


def test_a_stop_text_ends_a_completion():
    request = Request("a", (65, 66), SamplingParams(max_tokens=60, seed=1))
    tokens = alone(request)[0]
    text = ByteTokenizer().decode(tokens)
    stop = next(text[i : i + 2] for i in range(5, len(text)) if "\ufffd" not in text[i : i + 2])
    stopping = replace(request, params=replace(request.params, stop=(stop,)))
    (completion,) = make_generator().generate([stopping])[0]
    assert completion.finish_reason == "stop"
    assert completion.tokens == tokens[: len(completion.tokens)]
    assert stop in ByteTokenizer().decode(completion.tokens)
    assert stop not in ByteTokenizer().decode(completion.tokens[:-1])
    with pytest.raises(RequestError, match="stop_ids"):
        Generator(make_model()).submit(stopping)


def plain_filter(logits, params):
    """Filter the logits token by token, one filter after the other; return the allowed tokens."""
    p = (logits / params.temperature).softmax(-1)
    ranked = sorted(range(len(p)), key=lambda i: -p[i].item())
    kept = ranked[: params.top_k or len(p)]
    total = sum(p[i].item() for i in kept)
    nucleus, have = [], 0.0
    for i in kept:
        if have >= params.top_p * total:
            break
        nucleus.append(i)
        have += p[i].item()
    return {i for i in nucleus if p[i] >= params.min_p * p[ranked[0]]}


def test_draws_follow_the_filtered_softmax():
    generator = torch.Generator().manual_seed(0)
    for top_k, top_p, min_p in [(0, 1, 0), (4, 1, 0), (0, 0.7, 0), (0, 1, 0.2), (6, 0.8, 0.05)]:
        logits = torch.randn(12, generator=generator) * 1.5
        params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, seed=9)
        streams = torch.tensor([stream_of(params.seed, i) for i in range(3)]).repeat(7000)
        keys = noise_keys(streams, torch.arange(len(streams)))
        rows = logits.expand(len(keys), -1)
        found = Counter(
            sample_filtered(rows, keys, [1 / 0.8] * len(keys), [params] * len(keys)).tolist()
        )
        allowed = plain_filter(logits, params)
        assert set(found) <= allowed
        mask = torch.tensor([i in allowed for i in range(12)])
        shares = (logits / 0.8).masked_fill(~mask, -torch.inf).softmax(-1)
        for i in allowed:  # five standard deviations
            spread = 5 * (shares[i] * (1 - shares[i]) / len(keys)).sqrt()
            assert abs(found[i] / len(keys) - shares[i]) < spread + 1e-4, (top_k, top_p, min_p, i)


def test_noise_depends_on_what_it_is_for_alone():
    params = [SamplingParams(seed=seed) for seed in (5, 6, 5 + 2**32)]
    streams = torch.tensor([*(stream_of(p.seed, 0) for p in params), stream_of(params[0].seed, 1)])
    keys = torch.cat([noise_keys(streams, torch.full((4,), position)) for position in (3, 4)])
    noise = gumbel_noise(keys, 1000)
    assert torch.equal(gumbel_noise(keys[:1], 100)[0], noise[0, :100])
    correlations = torch.corrcoef(noise) - torch.eye(len(noise))
    assert correlations.abs().max() < 0.15
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.05)  # Euler's constant


def test_pages_are_shared_evicted_and_forgotten():
    pages = Pages(4, 2)
    first = pages.allocate(3)
    pages.cache(first, [1, 2, 3, 4, 5])  # two full pages
    assert pages.match([1, 2, 3, 4, 9, 9]) == first[:2]
    pages.release(first[:2])
    pages.release(first)
    assert pages.num_available == 4
    assert pages.match([1, 2, 7, 7]) == first[:1]
    assert pages.allocate(4) is None
    taken = pages.allocate(3)  # the second is evicted, although the first holds on
    assert pages.match([1, 2, 3, 4]) == first[:1]
    pages.release(taken)
    pages.release(first[:1] * 2)
    again = pages.allocate(1)
    pages.cache([first[0], *again], [1, 2, 3, 4])
    pages.clear_cache()
    assert pages.match([1, 2, 3, 4]) == []
    pages.release(again)
    assert pages.num_available == 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    save_hf(make_model(), folder, tokenizer=ByteTokenizer().export())
    return folder


def test_chats_stop_where_their_template_ends_a_turn(tmp_path):
    """They stop at tokens if the template has some, else before its text."""
    assert chat_stops(ByteTokenizer()) == ("<|im_end|>",)
    for file, content in ByteTokenizer().export(NO_END).files.items():
        (tmp_path / file).write_text(str(content))
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["<|user|>", "<|result|>", "<|elsewhere|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert end_ids(make_model(), tokenizer) == (256, 257, 258)
    assert chat_stops(tokenizer) == ("<|system|>",)


def test_the_command_continues_a_text(checkpoint, capsys):
    words = [str(checkpoint), "--device", "cpu", "--max_tokens", "20", "--seed", "3"]
    assert main([*words, "--prompt", "AB"]) == 0
    tokenizer = load_tokenizer(str(checkpoint))
    params = SamplingParams(max_tokens=20, seed=3, stop_ids=(tokenizer.eos_id,))
    tokens = Generator(load_hf(checkpoint), tokenizer).generate([Request("a", (65, 66), params)])
    assert capsys.readouterr().out == tokenizer.decode(tokens[0][0].tokens) + "\n"
    assert main([*words, "--prompt", "AB", "--chat"]) == 0
    assert capsys.readouterr().out


def test_the_command_prints_special_tokens_where_asked(tmp_path, capsys):
    save_hf(make_model(), tmp_path, tokenizer=ByteTokenizer().export())
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens([chr(code) for code in range(33, 127)])
    backend.save(str(tmp_path / "tokenizer.json"))
    words = [str(tmp_path), "--device", "cpu", "--max_tokens", "20", "--prompt", "é"]
    assert main([*words, "--seed", "3"]) == 0
    plain = capsys.readouterr().out
    assert main([*words, "--seed", "3", "--special_tokens"]) == 0
    shown = capsys.readouterr().out
    assert shown != plain
    assert [c for c in shown if not "!" <= c <= "~"] == list(plain)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--prompt", "x", "--top_p", "2"],
            "top_p: Input should be less than .* not 2.0",
        ),
        (["--prompt", ""], "prompt: .*no tokens"),
        (["--prompt", "x", "--max_tokens", "128"], "max_tokens: .*more than the model's positions"),
        ([], "generate: .*--prompt"),
        (["--prompt", "x", "--tempreature", "1"], "generate: .*--tempreature"),
        (["--prompt", "x", "--device", "cuda"], "device: 'cuda'"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(words, says, checkpoint, capsys):
    if torch.cuda.is_available() and "cuda" in words:
        pytest.skip("there is a GPU")
    assert main([str(checkpoint), *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert re.search(f"^error: .*{says}", line), line
