"""Speculative decoding: completions equal those without drafts, in fewer steps."""

import asyncio
import json
import random
import re
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from moetrain.cli.generate import main
from moetrain.config import ConfigError, ModelSection
from moetrain.config.sections import LoraSection
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.drafting import Chunks, Lookup, most_drafts
from moetrain.generate.engine import Generator, load_model
from moetrain.generate.ranks import ExpertParallel
from moetrain.generate.request import Request, SamplingParams
from moetrain.kernels.linear_attention.gated_delta import CHUNK
from moetrain.models.hf.load import load_hf, resolve_architecture
from moetrain.models.hf.save import save_hf
from moetrain.models.transformer import Inputs, Transformer
from moetrain.serve.serving import Serving
from tests.lib.architectures import put_weights
from tests.lib.distributed import spawn
from tests.lib.drafts import SIZES, foreseen, make_generator, make_model
from tests.lib.families_beside_transformers import save_adapters
from tests.lib.family_cases import architecture_of
from tests.lib.generators import draw_request
from tests.lib.generators import make_model as make_plain_model
from tests.lib.multi_token_models import with_multi_token

CASES = ["glm4_moe", "deepseek_v3", "glm4_moe_lite tied", "qwen3_5_moe_text", "mellum"]
CASES += ["deepseek_v32", "glm_moe_dsa"]


def texts_of(found):
    return {(c.request_id, c.index): c.tokens for completions in found for c in completions}


def check_same(found, expected):
    """Compare all fields of completions; a router's logits are fp32."""
    close = partial(pytest.approx, rel=1e-5, abs=1e-5)
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a.tokens, a.finish_reason) == (b.tokens, b.finish_reason)
            assert a.versions == b.versions
            assert a.logprobs == close(b.logprobs)
            assert a.prompt_logprobs == close(b.prompt_logprobs)
            assert [[*x] for x in a.prompt_top_logprobs] == [[*x] for x in b.prompt_top_logprobs]
            assert len(a.top_logprobs) == len(b.top_logprobs)
            for top, other in zip(a.top_logprobs, b.top_logprobs, strict=True):
                assert list(top) == list(other)
                assert list(top.values()) == close(list(other.values()))
            assert (a.routes is None) == (b.routes is None)
            assert a.routes is None or torch.equal(a.routes, b.routes)


def count_steps(generator):
    """Return a list that collects the number of tokens of each step."""
    steps, run = [], generator.steps.run

    def counted(chunks, **how):
        steps.append(sum(number for *_, number in chunks))
        return run(chunks, **how)

    generator.steps.run = counted
    return steps


def requests_like(name, number):
    rng = random.Random(name)
    requests = [draw_request(i, rng) for i in range(number)]
    asked = ({"prompt_logprobs": 1} if i % 4 == 3 else {} for i in range(number))
    scored = (replace(r.params, **more) for r, more in zip(requests, asked, strict=True))
    return [replace(r, params=params) for r, params in zip(requests, scored, strict=True)]


DISTURBED = {
    "all at once": {},
    "pages of one token": {"page_size": 1, "num_pages": 256},
    "chunks": {"page_size": 4, "max_tokens": 5},
    "one token a step": {"page_size": 4, "max_tokens": 1},
    "two at a time": {"page_size": 4, "max_sequences": 2},
    "hardly any room": {"page_size": 4, "num_pages": 24},
}


RUNS = [
    *(
        ("glm4_moe", name, share)
        for name, share in zip(DISTURBED, [0.0, 0.7, None] * 2, strict=True)
    ),
    ("glm4_moe", "hardly any room", 1.0),
    *((case, "chunks", 0.7) for case in CASES[1:]),
    *((case, "hardly any room", None) for case in CASES[1:]),
]
"""A model, an obstacle, and the share of right drafts; None: the block's own drafts."""


@pytest.mark.tier(
    "long",
    wide=[
        "glm4_moe-all at once-0.0",
        "glm4_moe-chunks-None",
        "glm4_moe-one token a step-0.0",
        "glm4_moe_lite tied-chunks-0.7",
        "qwen3_5_moe_text-chunks-0.7",
        "qwen3_5_moe_text-hardly any room-None",
    ],
)
@pytest.mark.parametrize(("case", "name", "share"), RUNS)
def test_completions_are_those_without_drafts(case, name, share):
    requests = requests_like(name, 3 if "one token a" in name else 8)
    expected = make_generator(case).generate(requests)
    generator = make_generator(case, 1 + len(name) % 3, **DISTURBED[name])
    made = Counter() if share is None else foreseen(generator, texts_of(expected), share)
    steps = count_steps(generator)
    check_same(generator.generate(requests), expected)
    assert max(steps) <= generator.scheduler.max_tokens
    assert generator.pages.num_available == generator.pages.num_pages
    if "room" in name:
        assert generator.scheduler.figures["generator/read_again"] > 0
    if share is not None:
        assert (bool(made[True]), bool(made[False])) == (share > 0, share < 1)
    assert not any(c.num_drafted or c.num_right for own in expected for c in own)


# ---- what is drafted ---------------------------------------------------------------------------


def parrot(case, seed=0):
    """Make a model whose next token follows from the last alone, and whose MTP block knows how."""
    model = make_model(case, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("wo.weight", "down.weight", "w_down")):
                parameter.zero_()  # blocks then leave the residual stream unchanged
            if name.endswith("join.proj.weight"):
                parameter.copy_(torch.eye(len(parameter), parameter.shape[1]))
    return model


@pytest.mark.tier("long", wide=["qwen3_5_moe_text-1", "qwen3_5_moe_text-3"])
@pytest.mark.parametrize("draft", [1, 3])
@pytest.mark.parametrize("case", ["glm4_moe", "deepseek_v3", "qwen3_5_moe_text"])
def test_a_block_that_foresees_all_takes_as_few_steps_as_can_be(case, draft):
    greedy = SamplingParams(max_tokens=25, temperature=0)
    request = Request("a", tuple(range(9)), greedy)
    ((expected,),) = Generator(parrot(case), ByteTokenizer()).generate([request])
    assert len(set(expected.tokens)) > 2
    generator = Generator(parrot(case), ByteTokenizer(), draft=draft, page_size=4)
    steps = count_steps(generator)
    check_same(generator.generate([request]), [[expected]])
    assert len(steps) == 1 + 24 // (1 + draft)
    ((found,),) = generator.generate([replace(request, id="b")])
    assert found.num_right == found.num_drafted == 24 - 24 // (1 + draft)


def drafts_by_hand(model, text, number):
    """Return the drafts after ``text``, computed over all of it and without a cache."""
    tokens_BS, found = torch.tensor([text]), []
    positions_BS = torch.arange(len(text) + number)[None]
    hidden_BSD, _ = model.backbone(Inputs(tokens_BS[:, :-1]))
    for i in range(number):
        rows = model.prepare(Inputs(tokens_BS[:, 1:], positions_BS[:, : len(text) - 1 + i]))
        embedded_BSD = model.embed(tokens_BS[:, 1:], model.vocabulary)
        block = model.arch.num_layers
        pair_BSP = torch.cat((embedded_BSD, hidden_BSD), -1)
        new_BSD, _, _ = model.through(block, pair_BSP, rows.contexts[model.kinds[block]])
        hidden_BSD = torch.cat((hidden_BSD, new_BSD[:, -1:]), 1)
        logits_V = model.vocabulary.logits(new_BSD[:, -1:], model.head_weight)[0, 0, :257]
        found.append(int(logits_V.argmax()))
        tokens_BS = torch.cat((tokens_BS, torch.tensor([found[-1:]])), 1)
    return found


@pytest.mark.tier("wide", long=["deepseek_v3"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_drafts_are_the_blocks_whatever_was_wrong_before(case):
    """The prompt is in chunks, right and wrong drafts precede, and a page has four tokens."""
    plain = make_model(case)
    generator = make_generator(case, 2, page_size=4, max_tokens=7)
    assert generator.steps.known == 257
    params = SamplingParams(max_tokens=80, temperature=0.7, seed=1)
    request = Request("a", tuple(range(40, 59)), params)
    ((expected,),) = make_generator(case).generate([request])
    texts, extend, rng = [*request.tokens, *expected.tokens], generator._extend, random.Random(0)
    seen = []

    def extended(sequence, chosen, routes):
        extend(sequence, chosen, routes)
        known, drafts = len(sequence.tokens), sequence.drafts
        if drafts:  # the second is read at the last token's position, which may have no page yet
            most = min(len(drafts), 1 + (known <= 4 * len(sequence.pages)))
            assert drafts[:most] == drafts_by_hand(plain, sequence.tokens, most)[:most], known
            if rng.random() < 0.6:  # else the block's own
                drafts[:] = texts[known : known + len(drafts)]
            seen.append(len(drafts))

    generator._extend = extended
    ((found,),) = generator.generate([request])
    assert found.tokens == expected.tokens
    assert 0 < found.num_right < found.num_drafted
    assert len(seen) > 20


@pytest.mark.tier("wide", long=["0.0-glm4_moe-3", "1.0-glm4_moe-3"])
@pytest.mark.parametrize(("case", "draft"), [("glm4_moe", 3), ("qwen3_5_moe_text", 2)])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_right_drafts_save_a_step_each_and_wrong_ones_none(case, draft, share):
    params = SamplingParams(max_tokens=101, seed=3)
    requests = [Request("a", tuple(range(30)), params)]
    expected = make_generator(case).generate(requests)
    generator = make_generator(case, draft)
    foreseen(generator, texts_of(expected), share)
    steps = count_steps(generator)
    found = generator.generate(requests)
    check_same(found, expected)
    completion = found[0][0]
    assert completion.num_drafted == sum(steps) - len(steps) - 29  # without those of the prompt
    assert completion.num_right == (completion.num_drafted if share else 0)
    assert len(steps) == 101 - completion.num_right
    if case == "glm4_moe":
        assert len(steps) == (26 if share else 101)


@pytest.mark.tier("wide", long=["glm4_moe"])
@pytest.mark.parametrize("case", ["glm4_moe", "qwen3_5_moe_text"])
def test_completions_end_within_right_drafts(case):
    asked = SamplingParams(max_tokens=40, seed=5)
    request = Request("a", (5, 6, 7), asked)
    (whole,) = make_generator(case).generate([request])
    tokens = whole[0].tokens
    at = next(i for i in range(9, 40) if tokens[i] not in tokens[:i])
    text = ByteTokenizer().decode(tokens)
    part = next(text[i : i + 2] for i in range(9, 39) if "\ufffd" not in text[i : i + 2])
    for how in (
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 12},
        {"stop_ids": (tokens[at],)},
        {"stop_ids": (tokens[at],), "routes": True, "logprobs": 2, "top_k": 100},
        {"stop": (part,)},
    ):
        ended = [replace(request, params=replace(asked, **how))]
        expected = make_generator(case).generate(ended)
        reads = []
        for draft in (1, 3, 5):
            generator = make_generator(case, draft, page_size=4)
            foreseen(generator, {("a", 0): tokens})
            steps = count_steps(generator)
            check_same(generator.generate(ended), expected)
            reads.append(len(steps))
            assert generator.pages.num_available == generator.pages.num_pages
        assert reads == sorted(reads, reverse=True)
        if "top_k" not in how:  # a filtered token is no draft
            assert reads[-1] <= len(expected[0][0].tokens) // 3 + 2


@pytest.mark.tier("long")
def test_the_last_tokens_that_fit_are_drafted_too():
    """One completion fills the model's positions, and another one all pages."""
    for case, settings, most in (
        ("glm4_moe", {"page_size": 8}, 256),
        ("glm4_moe", {"num_pages": 3, "page_size": 8}, 24),
    ):
        prompt = tuple(range(most - 20))
        request = Request("a", prompt, SamplingParams(max_tokens=20))
        expected = make_generator(case).generate([request])
        for draft in (1, 4, 7):
            generator = make_generator(case, draft, **settings)
            foreseen(generator, texts_of(expected))
            check_same(generator.generate([request]), expected)
            assert generator.longest == most


def test_drafts_give_way_to_sequences_when_pages_run_short():
    """Two sequences fill the cache, so the sequence of the step has no page for drafts."""
    params = SamplingParams(max_tokens=8, temperature=0)
    requests = [Request(name, tuple(range(i, i + 8)), params) for i, name in enumerate("ab")]
    expected = make_generator("glm4_moe").generate(requests)
    generator = make_generator("glm4_moe", 4, num_pages=4, page_size=4)
    foreseen(generator, texts_of(expected))
    check_same(generator.generate(requests), expected)


@pytest.mark.tier("wide", long=["0.5"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_shared_page_is_never_written_again(share):
    """Keys and values of published pages, which others may read, do not change."""
    prompt = tuple(range(22))
    params = SamplingParams(max_tokens=30, n=4, seed=2)
    requests = [Request("a", prompt, params), Request("b", prompt[:17], params)]
    expected = make_generator("glm4_moe").generate(requests)
    generator = make_generator("glm4_moe", 3, page_size=4, num_pages=120)
    foreseen(generator, texts_of(expected), share)
    own = generator.steps.caches[: generator.model.arch.num_layers]
    pages, kept = generator.pages, {}
    generator.submit(*requests)
    found = {c.index: c for _ in range(2) for c in generator.step()}
    shared = 0
    while generator.is_busy:
        now = {}
        for page, text in pages._prefix_of.items():
            now[page, text.serial] = [
                x[page].clone() for c in own for x in (c.keys_PZGd, c.values_PZGv)
            ]
            before = kept.get((page, text.serial), now[page, text.serial])
            assert all(map(torch.equal, before, now[page, text.serial]))
            shared += pages._ref_counts[page] > 1
        kept = now
        for c in generator.step():
            found[c.request_id, c.index] = c
    assert shared > 50
    for completions in expected:
        for c in completions:
            check_same([[found[c.request_id, c.index]]], [[c]])


# ---- weights, sleep, ranks ---------------------------------------------------------------------


@pytest.mark.tier("wide", long=["deepseek_v3"])
@pytest.mark.parametrize("case", ["deepseek_v3", "qwen3_5_moe_text"])
def test_drafts_follow_weights_that_change_in_a_request(case):
    """A sleep and an abort follow."""
    params = SamplingParams(max_tokens=30, seed=4)
    request = Request("a", tuple(range(20)), params)
    other = dict(make_model(case, 1).state_dict())
    ((before,),) = make_generator(case).generate([request])
    generator = make_generator(case, 2, page_size=4)
    made = foreseen(generator, {("a", 0): before.tokens})
    generator.submit(request)
    (completion,) = [generator.step()[0] for _ in range(4)][-1:]
    assert len(completion.tokens) == 10
    put_weights(generator, other.items())
    assert generator.scheduler.waiting[0].drafts == []
    made.clear()
    del generator._extend  # the block drafts from here on
    for _ in range(5):
        generator.step()
    generator.sleep()
    generator.wake()
    while generator.is_busy:
        generator.step()
    assert completion.versions == [0] * 10 + [1] * 20
    plain = make_generator(case, seed=1)
    begun = plain.steps.begin(request, 0)
    begun.tokens += before.tokens[:10]
    begun.completion.tokens += before.tokens[:10]
    plain._live["a"] = [begun]
    plain.scheduler.waiting.append(begun)
    while plain.is_busy:
        plain.step()
    assert completion.tokens == begun.completion.tokens
    generator.submit(request)
    generator.step()
    generator.step()
    (cut,) = generator.abort("a")
    assert cut.finish_reason == "abort"
    assert generator.pages.num_available == generator.pages.num_pages


def serve_on_ranks(case, draft):
    """Serve more requests on one rank than on another."""
    model = make_model(case)
    experts = ExpertParallel(model, dist.group.WORLD, "auto")
    settings = {"page_size": 4, "num_pages": 60, "max_tokens": 16}
    generator = Generator(model, ByteTokenizer(), experts=experts, draft=draft, **settings)
    requests = requests_like("ranks", 4)[: 4 if dist.get_rank() == 0 else 1]
    return generator.generate(requests)


@pytest.mark.tier("wide")
@pytest.mark.parametrize("case", ["glm4_moe", "qwen3_5_moe_text"])
def test_ranks_that_share_experts_draft_together(case):
    expected = make_generator(case).generate(requests_like("ranks", 4))
    many, one = spawn(2, serve_on_ranks, case, 2, timeout=200)
    check_same(many, expected)
    check_same(one, expected[:1])
    assert any(c.num_drafted for own in many for c in own)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_rank_with_nothing_to_read_runs_the_block_for_every_token_of_a_draft(is_mixed):
    """Other ranks have tokens: each run of a router is followed by an exchange of all ranks."""
    generator, runs = make_generator("glm4_moe", draft=3), Counter()
    steps, layers = generator.steps, generator.model.layers
    steps.experts = SimpleNamespace(agree=lambda *own: (1, is_mixed), can_fix_sizes=False)
    for i, layer in enumerate(layers):
        if hasattr(layer, "moe"):
            layer.moe.router.register_forward_hook(lambda *run, i=i: runs.update([i]))
    steps.run([], routes=False)
    block = generator.model.arch.num_layers
    assert runs[block] == 3
    assert {runs[i] for i in runs if i != block} == {1}


# ---- parts -------------------------------------------------------------------------------------


def test_the_last_right_chunks_are_found():
    """Three sequences: three drafts, two of them right; one wrong draft; no draft."""
    chosen = torch.tensor([5, 6, 7, 8, 1, 2, 3])
    ends = torch.tensor([4, 5, 6, 9, 0, 3, 8])
    depths = torch.tensor([0, 1, 2, 3, 0, 1, 0])
    chunks = Chunks(
        last_N=slice(None),
        end_token_N=ends,
        positions_N=depths,
        num_drafts_N=depths,
        next_N=depths,
        limits_N=depths,
        chosen_N=chosen,
    )
    assert chunks.last_right(3).int().tolist() == [0, 0, 1, 0, 1, 0, 1]
    right_again = chunks._replace(end_token_N=torch.tensor([4, 9, 6, 7, 0, 1, 8]))
    assert right_again.last_right(3).int().tolist() == [1, 0, 0, 0, 0, 1, 1]
    none = torch.zeros(0, dtype=torch.int64)
    assert Chunks(slice(None), *[none] * 6).last_right(2).tolist() == []


def test_with_states_a_step_ends_before_its_chunk_does():
    found = [
        most_drafts(place, 5, True) for place in (0, CHUNK - 4, CHUNK - 3, CHUNK - 2, CHUNK - 1)
    ]
    assert found == [4, 2, 1, 0, 0]
    assert [most_drafts(CHUNK - 1, left, False) for left in (0, 1, 2, 9)] == [0, 0, 1, 8]


@pytest.mark.tier("quick", long=["qwen3_5_moe_text"])
@pytest.mark.parametrize("case", ["deepseek_v3", "qwen3_5_moe_text"])
def test_in_bf16_a_block_drafts_too(case):
    request = Request("a", tuple(range(30)), SamplingParams(max_tokens=40, temperature=0))
    ((expected,),) = Generator(parrot(case).bfloat16()).generate([request])
    ((found,),) = Generator(parrot(case).bfloat16(), draft=2, page_size=4).generate([request])
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=0.05)
    assert found.num_right == found.num_drafted > 20


@pytest.mark.tier("long")
def test_of_several_blocks_the_first_drafts():
    request = Request("a", (1, 2, 3), SamplingParams(max_tokens=25, temperature=0))
    ((expected,),) = Generator(parrot("glm4_moe")).generate([request])
    model = Transformer(with_multi_token(architecture_of("glm4_moe", **SIZES), 2)).double()
    model.init_weights(std=0.3, seed=1)
    model.load_state_dict(parrot("glm4_moe").state_dict(), strict=False)
    ((found,),) = Generator(model, draft=2).generate([request])
    assert found.tokens == expected.tokens
    assert found.num_right == found.num_drafted == 16


def looked_up(tokens, number):
    """Return drafts by definition: the tokens after the latest match of the longest suffix."""
    for length in (4, 3, 2):
        last = tokens[-length:]
        for place in range(len(tokens) - 1, length - 1, -1):
            if len(last) == length and tokens[place - length : place] == last:
                return [tokens[place + i % (len(tokens) - place)] for i in range(number)]
    return []


def test_a_text_is_looked_up_in_itself():
    assert Lookup().draft([5, 6, 7, 8, 5, 6], 3) == [7, 8, 5]
    assert Lookup().draft([5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]
    assert Lookup().draft([5, 6, 1, 5, 6, 2, 5, 6], 1) == [2]
    rng, found = random.Random(0), 0
    for _ in range(50):
        lookup, tokens = Lookup(), []
        while len(tokens) < 60:
            tokens += [rng.randrange(3) for _ in range(rng.choice([1, 1, 2, 7]))]
            assert lookup.draft(tokens, 3) == looked_up(tokens, 3)
            found += bool(looked_up(tokens, 3))
    assert found > 500


def plain_parrot(case):
    model = Transformer(architecture_of(case, **SIZES)).double()
    model.init_weights(std=0.3, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("wo.weight", "down.weight", "w_down")):
                parameter.zero_()
    return model


@pytest.mark.tier(
    "wide", long=["glm4_moe-all at once", "glm4_moe-chunks", "glm4_moe-hardly any room"]
)
@pytest.mark.parametrize("name", ["all at once", "chunks", "hardly any room"])
@pytest.mark.parametrize("case", ["glm4_moe", "qwen3_5_moe_text"])
def test_the_text_so_far_drafts_for_any_model(case, name):
    requests = requests_like(name, 8)
    greedy = {"temperature": 0.0, "max_tokens": 40, "stop": (), "stop_ids": (), "n": 1}
    greedy = [replace(r, params=replace(r.params, **greedy)) for r in requests[:3]]
    requests = [*greedy, *requests[3:]]
    expected = Generator(plain_parrot(case), ByteTokenizer()).generate(requests)
    how = {"draft": 3, "draft_by": "ngram", **DISTURBED[name]}
    generator = Generator(plain_parrot(case), ByteTokenizer(), **how)
    found = generator.generate(requests)
    check_same(found, expected)
    assert generator.pages.num_available == generator.pages.num_pages
    right, drafted = (
        sum(getattr(c, key) for own in found for c in own) for key in ("num_right", "num_drafted")
    )
    assert 10 < right < drafted + (name == "chunks")  # with chunks, all drafts were right


def test_a_model_without_a_block_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"^draft: 2, but .* without multi-token prediction blocks; load it with .* 'ngram'",
    ):
        Generator(Transformer(architecture_of("glm4_moe", **SIZES)), draft=2)
    with pytest.raises(ValueError, match="draft -1 is negative"):
        Generator(make_model("glm4_moe"), draft=-1)
    with pytest.raises(ValueError, match="draft_by 'n-gram' is neither"):
        Generator(make_model("glm4_moe"), draft=1, draft_by="n-gram")


# ---- commands, servers, files ------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp")
    save_hf(parrot("glm4_moe").float(), folder, tokenizer=ByteTokenizer().export())
    return folder


@pytest.mark.tier("long")
def test_the_command_prints_the_same_text_and_how_much_was_right(folder, capsys):
    words = [str(folder), "--device", "cpu", "--max_tokens", "25", "--prompt", "AB"]
    for more in (["--temperature", "0"], ["--seed", "3", "--stop", "e"]):
        assert main([*words, *more]) == 0
        printed = capsys.readouterr()
        assert main([*words, *more, "--draft", "2"]) == 0
        drafted = capsys.readouterr()
        assert drafted.out == printed.out
        assert re.search(r"^drafted tokens that were accepted: \d+ of \d+$", drafted.err, re.M)
        if "0" in more:
            assert "accepted: 16 of 16\n" in drafted.err


def test_the_server_counts_drafts_and_streams_every_token(folder):
    client_of = pytest.importorskip("starlette.testclient").TestClient
    from moetrain.serve.server import CompletionServer

    model, tokenizer = load_model(str(folder), "cpu", "float32", None, 2)
    server = CompletionServer(Generator(model, tokenizer, draft=2, page_size=4), "tiny")
    how = {"prompt": "AB", "max_tokens": 25, "temperature": 0, "n": 2}
    with client_of(server.app, base_url="http://127.0.0.1") as client:
        reply = client.post("/v1/completions", json=how).json()
        events = client.post("/v1/completions", json={**how, "n": 1, "stream": True}).text
    details = {"accepted_prediction_tokens": 32, "rejected_prediction_tokens": 0}
    assert reply["usage"]["completion_tokens_details"] == details
    assert reply["usage"]["completion_tokens"] == 50
    parts = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    choices = [part["choices"][0] for part in parts]
    assert [len(choice["token_ids"]) for choice in choices] == [1] * 25
    assert [choice["finish_reason"] for choice in choices] == [None] * 24 + ["length"]
    ids = [choice["token_ids"][0] for choice in choices]
    assert ids == reply["choices"][0]["token_ids"]
    assert "".join(choice["text"] for choice in choices) == reply["choices"][0]["text"]


def test_updates_have_their_own_numbers(folder):
    """In a step with several new tokens, each has its own log-probability and likeliest tokens."""
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=2)
    request = Request("a", (1, 2, 3), params)
    ((expected,),) = Generator(parrot("glm4_moe")).generate([request])

    async def work():
        serving = Serving(Generator(parrot("glm4_moe"), draft=3))
        found = [update async for update in serving.stream(request)]
        await serving.close()
        return found

    found = asyncio.run(work())
    assert [u.token for u in found] == expected.tokens
    assert [u.logprob for u in found] == pytest.approx(expected.logprobs, rel=1e-5)
    assert [list(u.top_logprobs) for u in found] == [list(x) for x in expected.top_logprobs]
    assert [u.finish_reason for u in found] == [None] * 19 + ["length"]


@pytest.mark.tier("long")
def test_draft_of_a_model_without_mtp_is_refused_in_one_line(folder, tmp_path, capsys):
    save_hf(make_plain_model(), tmp_path / "none", tokenizer=ByteTokenizer().export())
    stored = load_file(folder / "model.safetensors")
    shutil.copytree(folder, tmp_path / "part")
    kept = {name: x for name, x in stored.items() if "eh_proj" not in name}
    save_file(kept, tmp_path / "part" / "model.safetensors", {"format": "pt"})
    for name, says in {
        "none": "draft: this qwen3_moe model has no multi-token prediction blocks; unset it",
        "part": "draft: .*do not load .*missing: .*eh_proj.*; unset it",
    }.items():
        words = [str(tmp_path / name), "--device", "cpu", "--prompt", "x", "--draft", "1"]
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(f"^error: {says}", line), line
        texts = []
        for how in ([], ["--draft", "3", "--draft_by", "ngram"]):
            assert main([*words[:-2], "--max_tokens", "40", *how]) == 0
            texts.append(capsys.readouterr())
        assert texts[0].out == texts[1].out
        assert "drafted tokens that were accepted: " in texts[1].err
    assert main([*words[:-1], "-1"]) == 2
    assert "--draft" in capsys.readouterr().err


@pytest.mark.tier("long")
@torch.no_grad()
def test_adapters_are_of_the_models_own_blocks(folder, tmp_path):
    plain, lora = load_hf(folder), LoraSection(rank=8, alpha=64)
    save_adapters(plain, lora, tmp_path, torch.arange(9)[None])
    params = SamplingParams(max_tokens=20, seed=1)
    texts = []
    for draft in (0, 2):
        model, tokenizer = load_model(str(folder), "cpu", "float32", str(tmp_path), draft)
        generator = Generator(model, tokenizer, draft=draft)
        texts.append(generator.generate([Request("a", (1, 2, 3), params)])[0][0].tokens)
    assert texts[0] == texts[1]


PRESETS = ["glm-4.5-air", "deepseek-v3", "glm-4.7-flash", "qwen3.6-35b-a3b"]


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_on_a_gpu_bits_are_those_without_drafts(preset):
    """The run has graphs, chunks, preemption and filters; drafts are the block's, or half right."""
    sizes = {"num_layers": 4 if "qwen" in preset else 3, "hidden_size": 256, "num_experts": 16}
    sizes |= {"moe_intermediate_size": 128, "vocab_size": 3000, "max_positions": 512}
    plain = resolve_architecture(ModelSection(preset=preset, num_layers=sizes["num_layers"]))
    arch = with_multi_token(plain.model_copy(update=sizes))
    models = [Transformer(arch).to("cuda", torch.bfloat16) for _ in range(3)]
    models[0].init_weights(std=0.05, seed=0)
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    rng = random.Random(0)
    requests = []
    for i in range(24):
        prompt = tuple(rng.randrange(3000) for _ in range(rng.randint(1, 150)))
        how = {"top_p": 0.9} if i % 5 == 4 else {"logprobs": 2} if i % 5 == 3 else {}
        params = SamplingParams(max_tokens=90, temperature=i % 3 / 2, seed=i, **how)
        requests.append(Request(str(i), prompt, params))
    settings = {"num_pages": 30, "max_sequences": 12, "max_tokens": 150}
    expected = Generator(models[0], **settings).generate(requests)
    for model, share in zip(models[1:], (None, 0.5), strict=True):
        generator = Generator(model, **settings, draft=2)
        generator.warm_up()
        assert max(generator.steps._graphs) >= 36
        if share is not None:
            foreseen(generator, texts_of(expected), share)
        found = generator.generate(requests)
        assert generator.scheduler.figures["generator/read_again"]
        for mine, theirs in zip(found, expected, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert (a.tokens, a.logprobs) == (b.tokens, b.logprobs)
                assert (a.top_logprobs, a.finish_reason) == (b.top_logprobs, b.finish_reason)
        if share is not None:
            assert sum(c.num_right for own in found for c in own) > 300
