"""Helpers of tests/generate/test_engine.py that other tests use too."""

import random

from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.engine import Generator
from moetrain.generate.request import (
    Request,
    SamplingParams,
)
from moetrain.models.transformer import Transformer
from tests.lib.architectures import make_architecture

ARCH = make_architecture(
    family="qwen3_moe",
    vocab_size=264,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    max_positions=128,
    qk_norm=True,
    num_experts=6,
    num_experts_per_token=2,
    moe_intermediate_size=16,
)


def make_model(seed=0):
    model = Transformer(ARCH)
    model.init_weights(std=0.3, seed=seed)
    return model


def make_generator(seed=0, **settings):
    return Generator(make_model(seed), ByteTokenizer(), **settings)


def alone(request, **settings):
    """Return the completions of a request with ample memory and no other request."""
    (completions,) = make_generator(**settings).generate([request])
    return [completion.tokens for completion in completions]


def draw_request(number, generator=None):
    """Draw a request with mixed options, by ``number`` alone unless ``generator`` is given."""
    generator = generator or random.Random(number)
    prompt = tuple(generator.randrange(256) for _ in range(generator.randrange(1, 40)))
    if generator.random() < 0.5:  # many requests share their first tokens
        prompt = tuple(range(32)) + prompt[:20]
    params = SamplingParams(
        max_tokens=generator.randrange(1, 30),
        temperature=generator.choice([0.0, 0.5, 1.0]),
        top_k=generator.choice([0, 5]),
        top_p=generator.choice([1.0, 0.9]),
        min_p=generator.choice([0.0, 0.05]),
        seed=generator.randrange(2**40),
        n=generator.choice([1, 1, 3]),
        stop_ids=generator.choice([(), (7, 11)]),
        logprobs=generator.choice([0, 2]),
        routes=generator.random() < 0.2,
    )
    return Request(f"r{number}", prompt, params)
