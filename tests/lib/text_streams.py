"""Helpers of tests/generate/test_text_stream.py that other tests use too."""

import json
import random
from functools import cache

import pytest
import tokenizers
from tokenizers import decoders, models

from moetrain.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from tests.lib.chats import bpe_tokenizer
from tests.lib.exports import make_tokenizer
from tests.lib.tokenizer_files import save

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
    """Does the work of :class:`TextStream`, from the start each time."""

    def __init__(self, tokenizer: Tokenizer, stop=()):
        self.tokenizer, self.stop = tokenizer, stop
        self.held_back = max((len(text) - 1 for text in stop), default=0)
        self.tokens, self.given = [], 0

    def push(self, token, is_last=False):
        self.tokens.append(token)
        return self.told(is_last)

    def finish(self):
        """Return the text that is still held back at the end."""
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
    """Draw tokens: from all, from a few or from texts, some in runs longer than any window."""
    tokens: list[int] = []
    some = [*range(tokenizer.vocab_size), tokenizer.vocab_size + 1]  # the last id is no token
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
            cut = rng.choice((0, 0, 0, 1))  # sometimes the last character is incomplete
            tokens += [len(PIECES) + byte for byte in spelt[: len(spelt) - cut]]
    return tokens
