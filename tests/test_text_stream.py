"""Text of a completion, piece by piece, beside the whole text read anew at every token."""

import json
import random
from functools import cache

import pytest
import tokenizers
from test_data_chat import bpe_tokenizer
from test_hf_export import make_tokenizer
from test_tokenizer import save
from tokenizers import decoders, models

from moetrain.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from moetrain.generate.request import TextStream

LENGTH = 300
PIECES = [
    "▁",
    "▁▁▁",
    "▁a",
    "a",
    "b",
    "▁the",
    "##b",
    "##",
    "##the",
    "b</w>",
    "the</w>",
    ".",
    "▁.",
    "é",
]
PIECES += ["</s>", "<pad>", "END", "▁EN", "D", "中", "�", "\n", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "gemma": decoders.Sequence(LLAMA),
    "llama": decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]),
    "metaspace": decoders.Metaspace(),
    "metaspace, bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "wordpiece": decoders.WordPiece("##"),
    "suffixes": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
}


class WholeText:
    """What :class:`TextStream` does, from the start each time."""

    def __init__(self, tokenizer: Tokenizer, stop=()):
        self.tokenizer, self.stop = tokenizer, stop
        self.held_back = max((len(text) - 1 for text in stop), default=0)
        self.tokens, self.given = [], 0

    def push(self, token, is_last=False):
        self.tokens.append(token)
        return self.told(is_last)

    def finish(self):
        """What is held back, once there is nothing more."""
        return self.told(is_last=True)

    def told(self, is_last):
        text = self.tokenizer.decode(self.tokens)
        found = [text.index(stop) for stop in self.stop if stop in text]
        if found:
            text = text[: min(found)]
        elif not is_last:
            text = text.rstrip("\ufffd")
            text = text[: max(0, len(text) - self.held_back)]
        return self.new(text)

    def new(self, text):
        new, self.given = text[self.given :], max(self.given, len(text))
        return new


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    @cache
    def load(name: str) -> Tokenizer:
        folder = tmp_path_factory.mktemp("t") / "t"
        if name == "bytes":
            return ByteTokenizer()
        if name == "words":
            save(folder)
        elif name == "byte-level":
            bpe_tokenizer(folder, eos_token="<|im_end|>")
        elif name == "no decoder":
            make_tokenizer(folder)
        else:
            vocabulary = {piece: i for i, piece in enumerate([*PIECES, *BYTES])}
            tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
            tokenizer.add_special_tokens(["</s>", "<pad>"])
            tokenizer.decoder = DECODERS[name]
            folder.mkdir()
            tokenizer.save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
        return load_tokenizer(str(folder))

    return load


NAMES = ["bytes", "words", "byte-level", "no decoder", *DECODERS]


def random_tokens(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Now of all tokens, now of a few, now of texts; some in runs longer than any window."""
    tokens: list[int] = []
    some = [*range(tokenizer.vocab_size), tokenizer.vocab_size + 1]  # the last is no token
    texts = ["a the é 中b. ", "中" * 40, "😀é" * 9, "the cat sat. ", "\n \n", "b  ", "EN EN"]
    while len(tokens) < LENGTH:
        kind = rng.randrange(4)
        if kind == 0:
            tokens += rng.choices(some, k=rng.choice((1, 3, 20)))
        elif kind == 1:
            few = rng.sample(some, k=rng.choice((1, 2, 5)))
            tokens += rng.choices(few, k=rng.choice((3, 20, 90)))
        elif kind == 2:
            tokens += tokenizer.encode_batch([rng.choice(texts)])[0].ids.tolist()
        elif tokenizer.byte_ids:
            spelt = rng.choice(texts).encode()
            cut = rng.choice((0, 0, 0, 1))  # now and then the last character is not whole
            tokens += [len(PIECES) + byte for byte in spelt[: len(spelt) - cut]]
    return tokens


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
    if tokenizer.byte_ids:  # without merges it knows no word: pieces, and bytes between them
        rng, emoji = random.Random(0), [len(PIECES) + byte for byte in "😀é".encode()]
        tokens = [t for _ in range(1000) for t in (*emoji, *rng.choices(range(2, 6), k=2))]
    stream = TextStream(Counting(), (stop,))
    pieces = [stream.push(t, is_last=i == len(tokens)) for i, t in enumerate(tokens, 1)]
    assert "".join(pieces) == tokenizer.decode(tokens)
    window = 2 * (32 + 4 * len(stop))
    assert max(costs) <= window + 6  # a run of bytes ends first
    assert sum(costs) <= window * len(tokens) < len(tokens) ** 2 / 6
