"""The tokenizer of a run as files that ``transformers`` and servers read, for the export.

A Hugging Face tokenizer is copied from where it was read. The byte tokenizer has no files, but an
exact equivalent: byte-level BPE without a merge, whose 256 symbols have the bytes' values for ids.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from moetrain.data.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer
from moetrain.models.hf.files import TokenizerFiles, is_tokenizer_file, read_json, small_files

_CONFIG = "tokenizer_config.json"
_CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
_BYTE_EOS = "<|endoftext|>"


def tokenizer_files(tokenizer: Tokenizer, chat_template: str | None = None) -> TokenizerFiles:
    """What an export holds of ``tokenizer``, with ``chat_template`` (None: its own, if any)."""
    if isinstance(tokenizer, ByteTokenizer):
        files, ids = _byte_files(), {}
    elif isinstance(tokenizer, HFTokenizer):
        files, ids = _copied_files(tokenizer), tokenizer.special_ids
    else:
        raise TypeError(f"{type(tokenizer).__name__} has no form in files")
    if chat_template not in (None, tokenizer.chat_template):
        files["chat_template.jinja"] = chat_template
    return TokenizerFiles(files, tokenizer.eos_id, ids.get("bos_token"), ids.get("pad_token"))


def _copied_files(tokenizer: HFTokenizer) -> dict[str, Path | str]:
    """The files beside ``tokenizer.json``; its config says which token ends a text."""
    folder = tokenizer.file.parent
    files: dict[str, Path | str] = {
        f: folder / f for f in small_files(folder) if is_tokenizer_file(f)
    }
    files["tokenizer.json"] = tokenizer.file
    config = read_json(folder / _CONFIG) if _CONFIG in files else _CLASS
    if "eos_token" not in config:
        files[_CONFIG] = json.dumps({**config, **tokenizer.special_tokens}, indent=2) + "\n"
    return files


def _byte_files() -> dict[str, Path | str]:
    """:class:`ByteTokenizer`, id for id, whatever the text.

    The end of a document is no added token in tokenizer.json, and ``split_special_tokens`` keeps
    ``transformers`` from making it one that a text can contain: it is never read out of a text.
    """
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    backend = Backend(models.BPE(vocab={**vocabulary, _BYTE_EOS: ByteTokenizer.eos_id}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    config = {
        **_CLASS,
        "eos_token": _BYTE_EOS,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": backend.to_str(pretty=True) + "\n",
        _CONFIG: json.dumps(config, indent=2) + "\n",
    }


def _byte_symbols() -> list[str]:
    """GPT-2's printable characters for the 256 bytes: themselves, or from U+0100 on in order."""
    kept = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = (chr(0x100 + i) for i in range(256))
    return [chr(byte) if byte in kept else next(others) for byte in range(256)]
