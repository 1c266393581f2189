"""Helpers of tests/generate/test_adapters.py that other tests use too."""

import pytest
import torch

from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams
from moetrain.generate.weights import WeightUpdate, replica
from moetrain.models.rules import ADAPTER
from moetrain.models.transformer import Transformer
from tests.lib.adapters import EVERYTHING, MICRO, adapted
from tests.lib.architectures import own_part
from tests.lib.engines import train, weights_of

REQUESTS = [
    Request("a", (1, 2, 3), SamplingParams(max_tokens=12, temperature=0)),
    Request("b", (7,), SamplingParams(max_tokens=7, seed=1, top_k=20)),
]


def answers_of(generator):
    return [(c.tokens, c.logprobs) for (c,) in generator.generate(REQUESTS)]


def follow(words):
    """Return the tokens generated while an engine learns, and its weights with merged adapters."""
    engine = adapted(EVERYTHING, *words)
    model, experts = replica(engine)
    generator = Generator(model, experts=experts, num_pages=20, page_size=4)
    update, found = WeightUpdate(engine, generator), []
    for step in range(2):
        train(engine, [step], MICRO)
        update()
        for name, weight in weights_of(engine).items():
            theirs = model.get_parameter(name)
            assert torch.equal(theirs, own_part(experts, weight, theirs)), name
        merged = {n: w.to("cpu", copy=True) for n, w in engine.weights(merged=True)}
        found.append((answers_of(generator), merged))
    assert any(name.endswith(ADAPTER) for name, _ in model.named_parameters())
    return engine.arch, found


def check(arch, found):
    for answers, weights in found:
        model = Transformer(arch)
        model.load_state_dict(weights)
        expected = answers_of(Generator(model, num_pages=20, page_size=4))
        for (tokens, logprobs), (wanted, scores) in zip(answers, expected, strict=True):
            assert tokens == wanted
            assert logprobs == pytest.approx(scores, abs=1e-5)
    assert found[0][0] != found[1][0]
