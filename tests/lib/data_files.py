"""Files of texts and tokenizers for tests of data, and configs that read them."""

import json
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

from moetrain.config import Config
from moetrain.data.containers import find_records
from moetrain.data.tokenizer import ByteTokenizer

BYTE_VOCAB = ByteTokenizer.vocab_size


def config(tmp_path: Path, **data: object) -> Config:
    return Config.load(
        {"model": {"preset": "debug"}, "data": {"cache_dir": str(tmp_path / "cache")} | data}
    )


def write_files(folder: Path, **texts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def write_lines(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def word_tokenizer(folder: Path, *words: str, **settings: object) -> Path:
    """Write a whitespace tokenizer over ``words`` as Hugging Face files."""
    folder.mkdir(exist_ok=True)
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def found_in(folder, files: dict[str, str]) -> str:
    """Write ``files`` below ``folder``, and return the names that are read as records."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    found, _ = find_records("data.path", str(folder), "train", None)
    return " ".join(file.relative_to(folder).as_posix() for file in found)
