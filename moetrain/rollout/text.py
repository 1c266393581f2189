"""The edge of generation: a checkpoint's model, text to tokens, tokens to text."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from moetrain.config import ConfigError
from moetrain.data.chat import BadLineError, template_variables
from moetrain.data.sources import chat_template
from moetrain.data.tokenizer import Tokenizer, load_tokenizer
from moetrain.models.hf.files import EXPORT, resolve
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.peft import attach_peft
from moetrain.models.transformer import Transformer

logger = logging.getLogger("moetrain")

_KEPT = 32
"""Tokens: many characters, where any of them may take four; few enough to be read at each one."""


def load_model(
    path: str, device: str, dtype: str, adapter: str | None = None
) -> tuple[Transformer, Tokenizer]:
    """The model and the tokenizer of ``path``, a Hugging Face folder or a hub id.

    Args:
        adapter: folder of adapters in PEFT's format, used beside the weights.
        device: auto, cpu or cuda.
        dtype: of weights and arithmetic; auto: bfloat16 on CUDA, float32 on a CPU.

    Raises:
        ConfigError: what cannot be loaded, or there is no such device.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ConfigError("device", "'cuda', but torch sees no CUDA device; use auto or cpu")
    on_gpu = has_gpu and device != "cpu"
    auto = torch.bfloat16 if on_gpu else torch.float32
    folder = resolve(path)
    if folder.name == EXPORT and Path(path).expanduser() == folder.parent:
        logger.warning("%s is the output folder of a run; its export %s is used", path, folder)
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
    """The tokens that end a text: the tokenizer's, and those of the checkpoint's settings."""
    named = None if model.source is None else (model.source.generation or {}).get("eos_token_id")
    ids = {tokenizer.eos_id, *(named if isinstance(named, list) else [named])}
    return tuple(sorted(ids - {None}))


def prompt_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The tokens that continue ``text``; ConfigError if there are none."""
    try:
        return tuple(tokenizer.encode_prompt(text))
    except ValueError as error:
        raise ConfigError("prompt", str(error)) from None


def chat_ids(
    tokenizer: Tokenizer, messages: object, record: Mapping[str, Any] = MappingProxyType({})
) -> tuple[int, ...]:
    """The tokens that an assistant's answer to ``messages`` continues.

    Args:
        record: what came with them, of which the template gets its variables
            (:func:`~moetrain.data.chat.template_variables`): tools and documents, say.

    Raises:
        ConfigError: ``messages`` are no conversation, or the template refuses them.
    """
    try:
        text = chat_template(None, tokenizer).prompt(messages, template_variables(record))
    except BadLineError as error:
        raise ConfigError("messages", str(error)) from None
    return tuple(tokenizer.encode_batch([text])[0].ids.tolist())


class TextStream:
    """The text of a completion as far as it is sure: whole characters, and no part of a stop text.

    A stop text and what follows it are no part of the text.

    What a token reads depends on its neighbours: half a character, a space that only the first
    token lacks. So the last tokens are read again with each new one, and not fewer than it takes
    for what comes to read as it would behind all of them: a window of :data:`_KEPT` to twice as
    many, and longer ones where stop texts are long, or while tokens give no text or no valid UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._held_back = max((len(text) - 1 for text in stop), default=0)
        self._kept = _KEPT + 4 * self._held_back  # a character takes four tokens at most
        self._tokens: list[int] = []
        """The window; of its text the first ``_given`` characters were given."""
        self._given = 0
        self._false = 0
        """Characters at its start that the whole text does not have so."""

    def push(self, token: int, is_last: bool = False) -> str:
        """What ``token`` adds to the text; ``is_last``: and all that was held back."""
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
        """What was held back, after the last token."""
        return self._new(self._tokenizer.decode(self._tokens))

    def _new(self, text: str) -> str:
        new, self._given = text[self._given :], max(self._given, len(text))
        return new

    def _shorten(self, text: str) -> None:
        """Forget the start of the window, which reads ``text``, if what comes reads the same then.

        The last tokens must read as they do in ``text``, from what was given on; and begin with one
        that has a text (what comes is not first then) and ends a run of bytes before it.
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
