"""Generation on ranks that share experts or heads gives the tokens of one process."""

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate import ranks
from moetrain.generate.engine import Generator
from moetrain.generate.ranks import ExpertParallel, HeadParallel, SplitAttention
from moetrain.generate.request import Request, RequestError, SamplingParams
from moetrain.kernels.attention.paged import PagedRows
from moetrain.models.families import PRESETS
from moetrain.models.layers import Context
from moetrain.models.parts.sparse_attention import SparseLatentAttention
from moetrain.models.transformer import Transformer
from tests.lib.architectures import put_weights
from tests.lib.distributed import spawn
from tests.lib.family_cases import architecture_of
from tests.lib.generators import alone, draw_request, make_generator, make_model


def shared_generator(seed=0, **settings):
    """Return this rank's generator, over the experts of all ranks."""
    model = make_model(seed)
    experts = ExpertParallel(model, dist.group.WORLD, "auto")
    return Generator(model, ByteTokenizer(), experts=experts, **settings)


def requests_of(rank):
    """Return more requests on one rank than on another, and none on the last."""
    rng = random.Random(rank)
    number = 5 if rank == 0 else 2 if rank + 1 < dist.get_world_size() else 0
    return [draw_request(i, rng) for i in range(number)]


def serve():
    """Return this rank's completions, with one model's weights and then with another's."""
    generator = shared_generator(page_size=4, num_pages=40, max_tokens=16)
    experts = [p for n, p in generator.model.named_parameters() if "experts" in n]
    assert all(p.shape[0] == 6 // dist.get_world_size() for p in experts)
    mine = requests_of(dist.get_rank())
    first = [[c.tokens for c in completions] for completions in generator.generate(mine)]
    before = [p.data_ptr() for p in generator.model.parameters()]
    put_weights(generator, make_model(seed=1).named_parameters())
    assert [p.data_ptr() for p in generator.model.parameters()] == before
    second = [[c.tokens for c in completions] for completions in generator.generate(mine)]
    streamed = list(generator.stream(mine[:1]))
    assert bool(streamed) == bool(mine)
    assert generator.pages.num_available == 40
    return mine, first, second


@pytest.mark.tier("wide", long=["2"])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_more_and_fewer_and_no_requests(world):
    answers = spawn(world, serve, timeout=120)
    assert [len(mine) for mine, _, _ in answers] == [5, *[2] * (world - 2), 0]
    for mine, first, second in answers:
        for request, tokens, others in zip(mine, first, second, strict=True):
            assert tokens == alone(request)
            assert others == [c.tokens for c in make_generator(seed=1).generate([request])[0]]


def numbers_beside_training():
    """Return log-probabilities on this rank, while another has other tokens or none."""
    generator = shared_generator()
    rank = dist.get_rank()
    params = SamplingParams(max_tokens=10, seed=rank, routes=True)
    requests = [Request("a", (3, 4, 5), params)] if rank == 0 else []
    return [(c.tokens, c.logprobs, c.routes.tolist()) for (c,) in generator.generate(requests)]


def test_log_probabilities_are_those_of_one_process():
    ((tokens, logprobs, routes),), nothing = spawn(2, numbers_beside_training, timeout=60)
    assert nothing == []
    params = SamplingParams(max_tokens=10, seed=0, routes=True)
    ((expected,),) = make_generator().generate([Request("a", (3, 4, 5), params)])
    assert tokens == expected.tokens
    assert routes == expected.routes.tolist()
    torch.testing.assert_close(
        torch.tensor(logprobs), torch.tensor(expected.logprobs), rtol=1e-5, atol=1e-5
    )


# ---- ranks that share heads ----------------------------------------------------------------------

KINDS = ("glm4_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h", "glm_moe_dsa")
KINDS += ("glm4_moe one kv head",)
"""Plain heads, windows and sinks, latents, two kinds of states, selected keys, and one head for two
ranks."""


def test_a_rank_attends_with_its_own_heads_and_their_sinks(monkeypatch):
    """The reference is the formula, head by head; five tokens of a sequence lie on two pages."""
    rng = torch.Generator().manual_seed(0)
    q_THd, k_TGd, v_TGd = (torch.randn(5, n, 8, generator=rng) for n in (6, 2, 2))
    sinks_H = 3 * torch.randn(6, generator=rng)
    is_later_TT = torch.ones(5, 5).triu(1).bool()
    expected = []
    for head in range(6):
        own = head // 3
        scores_TT = (q_THd[:, head] @ k_TGd[:, own].T / 8**0.5).masked_fill(is_later_TT, -torch.inf)
        with_sink_TS = torch.cat((scores_TT, sinks_H[head].expand(5, 1)), 1)
        expected.append(with_sink_TS.softmax(1)[:, :-1] @ v_TGd[:, own])
    ints = (torch.tensor(x, dtype=torch.int32) for x in ([*range(5)], [0, 5], [0], [[0, 1]]))
    context: Any = Context((q_THd, q_THd), PagedRows(*ints, num_single=0))
    sent: list[torch.Tensor] = []
    for gathers in (False, True):

        def start(x_N, group, gathers=gathers):
            if not gathers:
                sent.append(x_N)
            return torch.stack(sent if gathers else [x_N, x_N]), Mock()

        monkeypatch.setattr(ranks, "all_gather_start", start)
        for rank in range(2):
            group: Any = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
            attend = SplitAttention(group, num_pages=2, page_size=4, window=None)
            q_BSHd, k_BSGd, v_BSGd = (x[None] for x in (q_THd, k_TGd, v_TGd))
            y_BSHd = attend(q_BSHd, k_BSGd, v_BSGd, context, sinks_H=sinks_H)
            assert attend.keys_PZGd is not None
            assert attend.keys_PZGd.shape == (2, 4, 1, 8)  # of its own head alone
            if gathers:
                torch.testing.assert_close(y_BSHd[0], torch.stack(expected, 1))


def cache_bytes(generator):
    """Return the bytes of keys and values in each layer that has some."""
    caches = [one for c in generator.steps.caches for one in getattr(c, "caches", (c,))]
    pages = [(c.keys_PZGd, c.values_PZGv) for c in caches if hasattr(c, "keys_PZGd")]
    return [sum(x.nbytes for x in both) for both in pages]


def answers_of(generator, requests):
    """Return all fields of the completions, and the counts of how they were made."""
    found = [
        (c.tokens, c.logprobs, c.top_logprobs, c.prompt_logprobs, c.finish_reason)
        for completions in generator.generate(requests)
        for c in completions
    ]
    sizes, heads = cache_bytes(generator), generator.steps.heads
    parts = [part for parts in generator.model.arch.layers() for part in parts]
    estimates = [part.cached_elements(heads.group.size() if heads else 1) for part in parts]
    indexers = [
        part.index_head_dim * part.has_indexer if isinstance(part, SparseLatentAttention) else 0
        for part in parts  # every rank has their keys
    ]
    width = generator.pages.num_tokens * generator.model.embed.weight.element_size()
    pairs = zip(estimates, indexers, strict=True)
    assert sizes == [width * (numbers - own) for numbers, own in pairs if numbers]
    return found, generator.scheduler.figures["generator/read_again"], sizes


def family_answers(kind, heads=None):
    arch = architecture_of(kind)
    if kind == "nemotron_h":  # with a width of 10, bits on a CPU depend on a head's position
        arch = arch.model_copy(update={"head_dim": 8})
    model = Transformer(arch)
    model.init_weights(std=0.3, seed=1)
    vocabulary, rng = model.arch.vocab_size, random.Random(0)
    requests = [
        Request(
            str(i),
            tuple(rng.randrange(vocabulary) for _ in range(rng.randrange(1, 14))),
            SamplingParams(
                max_tokens=8, temperature=i % 2, seed=i, prompt_logprobs=0 if i == 3 else None
            ),
        )
        for i in range(5)
    ]
    generator = Generator(model, num_pages=9, page_size=4, max_tokens=7, heads=heads)
    return answers_of(generator, requests if heads is None or heads.leads else [])


def whole_answers():
    return [family_answers(kind) for kind in KINDS]


def split_answers():
    heads = HeadParallel(dist.group.WORLD)
    return [family_answers(kind, heads) for kind in KINDS]


@pytest.mark.tier("wide")
def test_ranks_that_share_heads_have_one_ranks_bits_and_half_its_cache():
    """Sequences are preempted: there are fewer pages than all of them need."""
    (expected,) = spawn(1, whole_answers, timeout=100)
    found = zip(KINDS, expected, *spawn(2, split_answers, timeout=200), strict=True)
    for kind, (answers, preempted, size), first, second in found:
        assert first[:2] == (answers, preempted), kind
        assert second[:2] == ([], 0), kind
        assert preempted > 0, kind
        share = 1 if kind == KINDS[-1] else 2
        assert [share * part for part in first[2]] == [share * part for part in second[2]] == size


def answers_of_gpus(shares):
    heads, rng = HeadParallel(dist.group.WORLD) if shares else None, random.Random(0)
    with torch.device("meta"):
        model = Transformer(PRESETS["debug"]).to(torch.bfloat16)
    model.to_empty(device="cuda")
    model.init_weights(std=0.05, seed=0)
    requests = [
        Request(
            str(i),
            tuple(rng.randrange(256) for _ in range(rng.randrange(1, 200))),
            SamplingParams(max_tokens=40, seed=i, temperature=i % 3 / 2),
        )
        for i in range(12)
    ]
    generator = Generator(model, num_pages=12, max_tokens=150, heads=heads)
    return answers_of(generator, [] if heads and not heads.leads else requests)


@pytest.mark.gpu(2)
def test_two_gpus_that_share_heads_have_one_gpus_bits():
    (expected,) = spawn(1, answers_of_gpus, False, device_type="cuda", timeout=200)
    first, second = spawn(2, answers_of_gpus, True, device_type="cuda", timeout=200)
    assert expected[1] > 0  # some sequences were preempted
    assert first[:2] == expected[:2]
    assert [2 * part for part in first[2]] == [2 * part for part in second[2]] == expected[2]


def serve_by_pairs(shares_experts):
    """Return completions of pairs that share heads, and optionally experts with another pair."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
    heads, experts, model = HeadParallel(pairs[rank // 2]), None, make_model()
    if shares_experts:
        threes = [dist.new_group([i, i + 1, i + 2]) for i in range(0, world, 3)]
        experts = ExpertParallel(model, threes[rank // 3], "auto")
        experts.group = dist.group.WORLD
    sizes = {"page_size": 4, "num_pages": 40, "max_tokens": 16}
    generator = Generator(model, ByteTokenizer(), experts=experts, heads=heads, **sizes)
    mine = requests_of(rank) if heads.leads else []
    if not heads.leads:
        with pytest.raises(RequestError, match="only the first of the ranks"):
            generator.submit(Request("a", (1, 2)))
    first = [[c.tokens for c in completions] for completions in generator.generate(mine)]
    put_weights(generator, make_model(seed=1).named_parameters())
    second = [[c.tokens for c in completions] for completions in generator.generate(mine)]
    return mine, first, second


@pytest.mark.tier("wide")
@pytest.mark.parametrize(("world", "shares_experts"), [(4, False), (6, True)])
def test_pairs_that_share_heads_serve_requests_of_their_own(world, shares_experts):
    answers = spawn(world, serve_by_pairs, shares_experts, timeout=120)
    assert [len(mine) for mine, *_ in answers] == [5, 0, 2, 0, 2, 0][:world]
    for mine, first, second in answers:
        for request, tokens, others in zip(mine, first, second, strict=True):
            assert tokens == alone(request)
            assert others == [c.tokens for c in make_generator(seed=1).generate([request])[0]]
