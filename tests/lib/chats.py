"""Helpers of tests/data/test_chat.py that other tests use too."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi thére"},
    {"role": "assistant", "content": "Héllo, you."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]


def bpe_tokenizer(folder: Path, **settings: object) -> Path:
    """Train a byte-level BPE with ChatML's markers, and write it as Hugging Face files."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [m["content"] for m in CONVERSATION] + ["user assistant system\n"]
    tokenizer.train_from_iterator(texts * 4, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
