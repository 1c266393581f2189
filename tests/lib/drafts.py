"""Helpers of tests/generate/test_drafting.py that other tests use too."""

import random
from collections import Counter

import torch

from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.engine import Generator
from moetrain.models.transformer import Transformer
from tests.lib.family_cases import architecture_of
from tests.lib.multi_token_models import with_multi_token

SIZES = {"vocab_size": 264, "max_positions": 256}


def make_arch(case):
    return with_multi_token(architecture_of(case, **SIZES))


def make_model(case, seed=0):
    """Make a model in fp64: a CPU's products depend on the number of rows in their last bits."""
    model = Transformer(make_arch(case)).double()
    model.init_weights(std=0.3, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("a_log"):  # states then forget little
                parameter.fill_(-4)
    return model


def make_generator(case, draft=0, seed=0, **settings):
    return Generator(make_model(case, seed), ByteTokenizer(), draft=draft, **settings)


def foreseen(generator, texts, share=1.0, seed=0):
    """Let ``generator`` draft the tokens of ``texts``, by request and index, or a wrong one at
    times.

    The generator still chooses the number of drafts. Returns the counts of right and wrong drafts.
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
