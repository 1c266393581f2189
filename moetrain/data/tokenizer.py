"""Text to token ids and back: raw bytes, or any Hugging Face ``tokenizer.json``.

The byte tokenizer needs no files, so a fresh machine can train at once. Everything else of this
package sees only the :class:`Tokenizer` protocol.

Left out on purpose: padding (rows are packed), truncation (documents are kept whole), and the
special tokens a post-processor would add (the packer ends documents, chat templates write the
rest). Shapes: T tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import huggingface_hub
import numpy as np
import tokenizers

from moetrain.config import ConfigError

logger = logging.getLogger("moetrain")

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Names of the end-of-text token, for a tokenizer.json with no tokenizer_config.json beside it.
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")


class Encoded(NamedTuple):
    """One text's tokens; offsets are made on demand, since only conversations need them."""

    ids: np.ndarray
    """[T] integers."""
    offsets: Callable[[], np.ndarray]
    """Gives [T, 2] int64: the characters ``start:end`` of the text that each token covers."""


class Tokenizer(Protocol):
    """What moetrain asks of a tokenizer."""

    vocab_size: int
    """Largest id + 1."""
    eos_id: int
    """The token that ends every document."""
    fingerprint: str
    """Hash of all that decides the ids a text or a conversation gets, but for its template."""
    chat_template: str | None
    """Its own Jinja template for conversations."""
    special_tokens: dict[str, str]
    """Variables of that template: ``bos_token``, ``eos_token``, ..., where they exist."""

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokens of each text, with nothing added at either end."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 for the end of a document."""

    vocab_size = 257
    eos_id = 256
    fingerprint = "byte"

    def __init__(self) -> None:
        self.chat_template: str | None = None
        self.special_tokens: dict[str, str] = {}

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """See :class:`Tokenizer`; ids are uint8."""
        return [
            Encoded(np.frombuffer(text.encode(), dtype=np.uint8), partial(_byte_offsets, text))
            for text in texts
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """See :class:`Tokenizer`."""
        return bytes(i for i in ids if i < self.eos_id).decode(errors="replace")


class HFTokenizer:
    """A ``tokenizer.json``, with what the files beside it say of EOS, PAD and conversations."""

    def __init__(self, folder: Path, file_name: str = "tokenizer.json") -> None:
        """Read ``folder/file_name`` and, where they exist, the files beside it.

        Raises:
            ConfigError: not a tokenizer, or its end-of-text token cannot be told.
        """
        file = folder / file_name
        config = _read_json(folder / "tokenizer_config.json")
        content = file.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # noqa: BLE001  the library raises nothing narrower
            raise ConfigError("data.tokenizer", f"{file} is not a tokenizer: {error}") from None
        padding = self._tokenizer.padding
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.special_tokens = _special_tokens(config)
        if "eos_token" not in self.special_tokens:
            self.special_tokens["eos_token"] = _guess_eos(vocabulary, file)
        eos = self.special_tokens["eos_token"]
        if eos not in vocabulary:
            raise ConfigError("data.tokenizer", f"{file} has no token {eos!r}, its eos_token")
        self.eos_id = vocabulary[eos]
        self.chat_template = _chat_template(folder, config)
        special = json.dumps(self.special_tokens, sort_keys=True)
        self.fingerprint = hashlib.sha256(content + special.encode()).hexdigest()
        self.file = file  # for exports, as are the ids
        self.special_ids = {key: vocabulary.get(t) for key, t in self.special_tokens.items()}
        if eos in (self.special_tokens.get("pad_token"), (padding or {}).get("pad_token")):
            logger.warning(
                "data.tokenizer: PAD is EOS (%r, id %d). Loss is masked by position, not by id, "
                "so real EOS tokens keep their loss",
                eos,
                self.eos_id,
            )

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """See :class:`Tokenizer`; ids are uint32. Uses every core."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            Encoded(np.array(encoding.ids, dtype=np.uint32), partial(_hf_offsets, encoding))
            for encoding in encodings
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """See :class:`Tokenizer`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that ``data.tokenizer`` names.

    Args:
        name: ``byte``, a tokenizer.json, a folder that holds one, or a hub id (fetched unless it
            is in the hub's cache; the library honours ``HF_HUB_OFFLINE``).

    Raises:
        ConfigError: nothing is there, or it is not a usable tokenizer.
    """
    if name == "byte":
        return ByteTokenizer()
    path = Path(name)
    if path.is_file():
        return HFTokenizer(path.parent, path.name)
    if not path.is_dir():
        try:
            path = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_FILES)))
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                "data.tokenizer", f"{name!r} is no file or folder, nor a hub id in reach: {reason}"
            ) from None
    if not (path / "tokenizer.json").is_file():
        raise ConfigError("data.tokenizer", f"{name!r} holds no tokenizer.json")
    return HFTokenizer(path)


def _byte_offsets(text: str) -> np.ndarray:
    """Characters that each UTF-8 byte of ``text`` belongs to: ``"aé"`` -> (0,1), (1,2), (1,2)."""
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    bytes_per_character = 1 + sum((code_points >= n).astype(int) for n in (0x80, 0x800, 0x10000))
    start = np.repeat(np.arange(len(text)), bytes_per_character)
    return np.stack([start, start + 1], axis=1)


def _hf_offsets(encoding: tokenizers.Encoding) -> np.ndarray:
    return np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError("data.tokenizer", f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("data.tokenizer", f"{path} is not a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """``{"eos_token": "</s>", ...}``; the file has plain strings or objects with ``content``."""
    tokens = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[key] = text
    return tokens


def _guess_eos(vocabulary: dict[str, int], file: Path) -> str:
    for name in _EOS_NAMES:
        if name in vocabulary:
            logger.info("data.tokenizer: nothing names the EOS token of %s; using %r", file, name)
            return name
    raise ConfigError(
        "data.tokenizer",
        f"{file} has no known end-of-text token; name one as eos_token in a "
        "tokenizer_config.json beside it",
    )


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
