"""Text in and out of generation: loads a checkpoint, encodes prompts, decodes streams."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from moetrain.config import ConfigError
from moetrain.data.chat import BadLineError, ChatTemplate
from moetrain.data.tokenizer import Tokenizer, load_tokenizer
from moetrain.models.hf.files import EXPORT, resolve
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.peft import attach_peft
from moetrain.models.transformer import Transformer

_logger = logging.getLogger("moetrain")

_KEPT = 32
"""Tokens in the window of a stream: many characters, yet few enough to decode at each token."""


def load_model(
    path: str, device: str, dtype: str, adapter: str | None = None
) -> tuple[Transformer, Tokenizer]:
    """Load the model and the tokenizer of ``path``, a Hugging Face folder or a hub id.

    Args:
        adapter: folder of adapters in PEFT's format, used beside the weights.
        device: auto, cpu or cuda.
        dtype: dtype of weights and arithmetic; auto: bfloat16 on CUDA, float32 on a CPU.

    Raises:
        ConfigError: the checkpoint cannot be loaded, or there is no such device.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ConfigError("device", "'cuda', but torch sees no CUDA device; use auto or cpu")
    on_gpu = has_gpu and device != "cpu"
    auto = torch.bfloat16 if on_gpu else torch.float32
    folder = resolve(path)
    if folder.name == EXPORT and Path(path).expanduser() == folder.parent:
        _logger.warning("%s is the output folder of a run; its export %s is used", path, folder)
    tokenizer = load_tokenizer(str(folder))  # the quicker one first
    model = load_hf(
        folder,
        dtype=auto if dtype == "auto" else getattr(torch, dtype),
        device="cuda" if on_gpu else "cpu",
    )
    if adapter is not None:
        try:
            attach_peft(model, adapter)
        except ConfigError as error:
            raise ConfigError("adapter", error.problem) from None
    return model, tokenizer


def end_ids(model: Transformer, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a text: the tokenizer's, and the checkpoint's."""
    named = None if model.source is None else (model.source.generation or {}).get("eos_token_id")
    ids = {tokenizer.eos_id, *(named if isinstance(named, list) else [named])}
    return tuple(sorted(ids - {None}))


def prompt_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the tokens of ``text`` as a prompt; ConfigError if there are none."""
    try:
        return tuple(tokenizer.encode_prompt(text))
    except ValueError as error:
        raise ConfigError("prompt", str(error)) from None


def chat_ids(
    tokenizer: Tokenizer, messages: object, record: Mapping[str, Any] = MappingProxyType({})
) -> tuple[int, ...]:
    """Return the tokens that an assistant's answer to ``messages`` continues.

    Args:
        record: further variables of the template, such as tools and documents
            (:meth:`~moetrain.data.chat.ChatTemplate.variables_of`).

    Raises:
        ConfigError: ``messages`` are not a conversation, or the template refuses them.
    """
    try:
        text = ChatTemplate.of(tokenizer).prompt(messages, ChatTemplate.variables_of(record))
    except BadLineError as error:
        raise ConfigError("messages", str(error)) from None
    return tuple(tokenizer.encode_batch([text])[0].ids.tolist())


class TextStream:
    """Decodes a completion as it grows: whole characters, up to a stop text, which is left out.

    The text of a token depends on its neighbours: it may be half a character, or lack a space that
    only the first token lacks. So a window of the last tokens is decoded again with each new one:
    :data:`_KEPT` to twice as many, and more where stop texts are long, or while tokens give no text
    or no valid UTF-8.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), stop_ids: Sequence[int] = ()
    ) -> None:
        """``stop_ids``: tokens that are no text where they are last."""
        self._tokenizer, self._stop, self._stop_ids = tokenizer, stop, stop_ids
        self._held_back = max((len(text) - 1 for text in stop), default=0)
        self._kept = _KEPT + 4 * self._held_back  # a character takes four tokens at most
        self._tokens: list[int] = []
        """The window; the first ``_given`` characters of its text were returned already."""
        self._given = 0
        self._false = 0
        """Characters at the window's start that differ from the whole text."""

    def push(self, token: int, is_last: bool = False) -> str:
        """Return the text that ``token`` adds; ``is_last``: with all that was held back."""
        if is_last and token in self._stop_ids:
            return self.end()
        self._tokens.append(token)
        text = whole = self._tokenizer.decode(self._tokens)
        starts = [text.find(stop, self._false) for stop in self._stop]
        found = [start for start in starts if start >= 0]
        if found:
            text = text[: min(found)]
        elif not is_last:
            text = text.rstrip("\ufffd")
            text = text[: max(0, len(text) - self._held_back)]
        new = self._new(text)
        if not found and len(self._tokens) >= 2 * self._kept:
            self._shorten(whole)
        return new

    def end(self) -> str:
        return self._new(self._tokenizer.decode(self._tokens))

    def _new(self, text: str) -> str:
        new, self._given = text[self._given :], max(self._given, len(text))
        return new

    def _shorten(self, text: str) -> None:
        """Drop the start of the window, whose text is ``text``, if later text reads the same then.

        The last tokens must read as they do in ``text``, from what was returned on. Their first
        must have a text, so that later tokens are not first, and must end a run of byte tokens.
        """
        last = self._tokens[-self._kept :]
        if last[0] in self._tokenizer.byte_ids or not self._tokenizer.decode(last[:1]):
            return
        short = self._tokenizer.decode(last)
        pairs = zip(reversed(short), reversed(text), strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same > len(text) - self._given:
            self._tokens, self._false = last, len(short) - same
            self._given += len(short) - len(text)
