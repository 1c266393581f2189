"""Streamed text of a completion equals the whole text decoded anew at every token."""

import random

import pytest

from moetrain.generate.request import TextStream
from tests.lib.text_streams import NAMES, PIECES, WholeText, load, random_tokens

__all__ = ["load"]  # a fixture

STOPS = [(), ("END",), ("\n\n\n", "b.b"), ("\ufffd\ufffd",), ("##",), ("the " * 8, "�a")]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_pieces_are_those_of_the_whole_text(name, seed, load):
    tokenizer, rng = load(name), random.Random(f"{name} {seed}")
    tokens = random_tokens(rng, tokenizer)
    for stop in STOPS:
        ours, whole = TextStream(tokenizer, stop), WholeText(tokenizer, stop)
        for i, token in enumerate(tokens):
            assert ours.push(token) == whole.push(token), (stop, i)
        ours, whole = TextStream(tokenizer, stop), WholeText(tokenizer, stop)
        cut = rng.randrange(1, len(tokens))
        given = [(ours.push(t), whole.push(t)) for t in tokens[: cut - 1]]
        given.append((ours.push(tokens[cut - 1], is_last=True), whole.push(tokens[cut - 1], True)))
        assert [a for a, _ in given] == [b for _, b in given]


def test_a_run_of_bytes_is_spoilt_as_a_whole_and_goes_on_behind_tokens_without_text(load):
    tokenizer = load("gemma")
    a, silent, byte = PIECES.index("a"), PIECES.index("</s>"), len(PIECES)
    for number in range(60):
        run = [a, *[byte + 0xC3, silent, byte + 0xA9] * number, *[silent] * 40]
        tokens = [*run, byte + 0xC3, byte + 0xA9, byte + 0xFF, a]
        ours, whole = TextStream(tokenizer), WholeText(tokenizer)
        assert [ours.push(token) for token in tokens] == [whole.push(token) for token in tokens]


@pytest.mark.parametrize("stop", ["NEVER", "N" * 100], ids=["short", "long"])
@pytest.mark.parametrize("name", ["bytes", "byte-level", "llama", "metaspace"])
def test_a_token_costs_a_window_and_the_pieces_are_the_text(name, stop, load):
    tokenizer, costs = load(name), []

    class Counting:
        byte_ids = tokenizer.byte_ids

        def decode(self, ids):
            costs.append(len(ids))
            return tokenizer.decode(ids)

    text = "a the 😀 b. 中 é\n the a b b the b " * 200
    tokens = tokenizer.encode_batch([text])[0].ids.tolist()
    if tokenizer.byte_ids:  # without merges it knows no word: pieces, with bytes between them
        rng, emoji = random.Random(0), [len(PIECES) + byte for byte in "😀é".encode()]
        tokens = [t for _ in range(1000) for t in (*emoji, *rng.choices(range(2, 6), k=2))]
    stream = TextStream(Counting(), (stop,))
    pieces = [stream.push(t, is_last=i == len(tokens)) for i, t in enumerate(tokens, 1)]
    assert "".join(pieces) == tokenizer.decode(tokens)
    window = 2 * (32 + 4 * len(stop))
    assert max(costs) <= window + 6  # a run of bytes ends first
    assert sum(costs) <= window * len(tokens) < len(tokens) ** 2 / 6
