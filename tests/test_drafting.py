"""Drafting: the same completions as without it, whatever the drafts are, in fewer steps."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from family_cases import architecture_of
from test_multi_token import with_further
from test_rollout import draw_request

from moetrain.config import ConfigError
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.kernels.linear_attention.gated_delta import CHUNK
from moetrain.models.families.drafting import Chunks, most_drafts
from moetrain.models.transformer import Transformer
from moetrain.rollout.engine import Generator
from moetrain.rollout.request import Request, SamplingParams
from moetrain.rollout.steps import ExpertParallel

SIZES = {"vocab_size": 264, "max_positions": 256}
CASES = ["glm4_moe", "deepseek_v3", "glm4_moe_lite tied", "qwen3_5_moe_text"]


def make_arch(case):
    return with_further(architecture_of(case, **SIZES))


def make_model(case, seed=0, dtype=torch.float32):
    model = Transformer(make_arch(case)).to(dtype)
    model.init_weights(std=0.3, seed=seed)
    return model


def make_generator(case, draft=0, seed=0, **settings):
    return Generator(make_model(case, seed), ByteTokenizer(), draft=draft, **settings)


def foreseen(generator, texts, share=1.0, seed=0):
    """Let ``generator`` draft what ``texts`` have, by request and index, or at times another token.

    How many it drafts stays its own choice. Returns drafts that were made, right and wrong.
    """
    extend, rng, made = generator._extend, random.Random(seed), Counter()

    def extended(sequence, chosen, routes):
        extend(sequence, chosen, routes)
        completion = sequence.completion
        ahead = texts[completion.request_id, completion.index][len(completion.tokens) :]
        for i, token in enumerate(ahead[: len(sequence.drafts)]):
            is_right = rng.random() < share
            sequence.drafts[i] = token if is_right else (token + rng.randrange(1, 200)) % 264
            made[is_right] += 1

    generator._extend = extended
    return made


def texts_of(found):
    return {(c.request_id, c.index): c.tokens for completions in found for c in completions}


def check_same(found, expected):
    """On a CPU bits depend on how many rows a product has."""
    close = partial(pytest.approx, rel=1e-4, abs=1e-4)
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a.tokens, a.finish_reason) == (b.tokens, b.finish_reason)
            assert a.versions == b.versions
            assert a.logprobs == close(b.logprobs)
            assert a.prompt_logprobs == close(b.prompt_logprobs)
            assert a.prompt_likeliest == b.prompt_likeliest
            assert len(a.top_logprobs) == len(b.top_logprobs)
            for top, other in zip(a.top_logprobs, b.top_logprobs, strict=True):
                assert list(top) == list(other)
                assert list(top.values()) == close(list(other.values()))
            assert (a.routes is None) == (b.routes is None)
            assert a.routes is None or torch.equal(a.routes, b.routes)


def count_steps(generator):
    """Count its steps from now on, in the list that is returned."""
    steps, run = [], generator.steps.run

    def counted(chunks, **how):
        steps.append(len(chunks))
        return run(chunks, **how)

    generator.steps.run = counted
    return steps


def requests_like(name, number=12):
    rng = random.Random(name)
    requests = [draw_request(i, rng) for i in range(number)]
    scored = (replace(r.params, prompt_logprobs=i % 4 == 3) for i, r in enumerate(requests))
    return [replace(r, params=params) for r, params in zip(requests, scored, strict=True)]


DISTURBED = {
    "all at once": {},
    "pages of one token": {"page_size": 1, "num_pages": 256},
    "chunks": {"page_size": 4, "max_tokens": 5},
    "one token a step": {"page_size": 4, "max_tokens": 1},
    "two at a time": {"page_size": 4, "max_sequences": 2},
    "hardly any room": {"page_size": 4, "num_pages": 24},
}


@pytest.mark.parametrize("share", [None, 0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", DISTURBED)
@pytest.mark.parametrize("case", CASES)
def test_completions_are_those_without_drafts(case, name, share):
    """With the block's own drafts, and with right and wrong ones."""
    requests = requests_like(name)
    expected = make_generator(case).generate(requests)
    generator = make_generator(case, 1 + len(name) % 3, **DISTURBED[name])
    made = share is not None and foreseen(generator, texts_of(expected), share)
    check_same(generator.generate(requests), expected)
    assert generator.pages.num_available == generator.pages.num_pages
    if "room" in name:
        assert generator.scheduler.num_preempted > 0
    elif made and name != "one token a step":
        assert bool(made[True]) == (share > 0)
        assert bool(made[False]) == (share < 1)
    for completions in expected:
        assert not any(c.num_drafted or c.num_right for c in completions)
