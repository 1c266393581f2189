"""Helpers of tests/data/test_tokenizer.py that other tests use too."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

WORDS = ["<unk>", "</s>", "<s>", "[SEP]", "a", "b", "c", "user", "assistant"]


def save(folder: Path, post: object = None, **settings: object) -> Path:
    """Write a whitespace tokenizer over WORDS with a post-processor, as Hugging Face files."""
    folder.mkdir(exist_ok=True)
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "</s>", "<s>", "[SEP]"])
    if post is not None:
        tokenizer.post_processor = post
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


# Only the files beside tokenizer.json have these tokens


def save_letters(folder: Path, config: dict[str, object], **files: object) -> Path:
    """Write a byte-level tokenizer without merges, and with one added token, "</s>"."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"[PLAIN]": 256}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"} | config
    for name, content in {"tokenizer_config": about, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
