"""What a run trains and is evaluated on, from its settings: :func:`build_data`.

What is held out are whole documents, chosen by a hash. Where that leaves either side without a row
(one file, a handful of chats), the end of the data is held out instead: of a stream its last rows,
of whole documents the last ones. Either way nothing that is trained is evaluated.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from pathlib import Path
from typing import NamedTuple

from moetrain.config import Config, ConfigError, DataSection
from moetrain.config.environment import user_cache_dir
from moetrain.data.cache import TokenCache, open_cache
from moetrain.data.packing import Dataset, StreamDataset, SyntheticDataset
from moetrain.data.sources import JsonlSource, Source, open_sources
from moetrain.data.tokenizer import Tokenizer, load_tokenizer
from moetrain.data.whole import WholeDataset

logger = logging.getLogger("moetrain")


class Data(NamedTuple):
    """What a run trains on."""

    train: Dataset
    eval: Dataset | None
    """Held-out rows, None: no evaluation was asked for (data.eval_fraction 0)."""
    tokenizer: Tokenizer
    fingerprint: str
    """Hash of what decides the rows of both: tokens and which are learned (so the text, tokenizer
    and template, wherever their files lie), packing, row length, what is held out, and the seed of
    synthetic ones. The order in which a run sees them is not in it: train.seed decides that."""
    chat_template: str | None
    """What conversations were rendered with, None: there are none."""


def build_data(config: Config, vocab_size: int) -> Data:
    """The rows that ``config.data`` describes, tokenised now if no earlier run did.

    The synthetic source draws ids from the whole of ``vocab_size``; its tokenizer only shows
    samples of the model's output, under the same limit.

    Raises:
        ConfigError: anything wrong with the data or its settings, or a ``train.sample_prompt`` that
            nothing can be sampled from.
    """
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            "data.tokenizer",
            f"{data.tokenizer!r} has {tokenizer.vocab_size} tokens, more than the model's "
            f"vocabulary of {vocab_size}; use the model's own tokenizer or raise model.vocab_size",
        )
    if config.train.sample_prompt is not None and config.train.sample_tokens:
        try:
            tokenizer.encode_prompt(config.train.sample_prompt)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError("train.sample_prompt", str(error)) from None
    if data.source == "synthetic":
        train, held_out = _synthetic(config, vocab_size)
        template = None
    else:
        train, held_out, template = _from_text(data, tokenizer)
        for side, dataset in (("", train), ("held out: ", held_out)):
            if isinstance(dataset, WholeDataset):
                logger.info("%s%s", side, dataset.describe())
    identity = [train.identity, None if held_out is None else held_out.identity]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return Data(train, held_out, tokenizer, fingerprint, template)


def _synthetic(config: Config, vocab_size: int) -> tuple[Dataset, Dataset | None]:
    data, seed = config.data, config.train.seed
    train = SyntheticDataset(data.num_documents, data.seq_len, vocab_size, seed)
    num_held_out = math.ceil(data.num_documents * data.eval_fraction)
    if num_held_out == 0:
        return train, None
    return train, SyntheticDataset(
        num_held_out, data.seq_len, vocab_size, seed, first=data.num_documents
    )


def _from_text(
    data: DataSection, tokenizer: Tokenizer
) -> tuple[Dataset, Dataset | None, str | None]:
    """The rows of both sides, and the template of the conversations among them."""
    sources = open_sources(data, tokenizer)
    cache_dir = user_cache_dir() if data.cache_dir is None else Path(data.cache_dir)

    def read(source: Source) -> TokenCache:
        return open_cache(source, tokenizer, cache_dir)

    train = read(sources.train)
    held_out = None if sources.eval is None else read(sources.eval)
    has_chats = any(cache is not None and cache.masked is not None for cache in (train, held_out))
    template = None
    if has_chats and isinstance(sources.train, JsonlSource):
        template = sources.train.template.source
    if held_out is None or sources.eval is None:
        return _all_rows(train, sources.train, data), None, template
    if data.eval_path is not None:
        rows = _all_rows(train, sources.train, data), _all_rows(held_out, sources.eval, data)
        return *rows, template
    rows = _rows(train, data), _rows(held_out, data)
    if all(map(len, rows)) and train.targets.any() and held_out.targets.any():
        return *rows, template
    if train.num_documents == 0 or held_out.num_documents == 0:  # then the other is everything
        whole = train if train.num_documents else held_out
    else:
        whole = read(sources.undivided)
    return *_divided(whole, sources.undivided, data), template


def _rows(cache: TokenCache, data: DataSection, first: int = 0, stop: int | None = None) -> Dataset:
    return _packing(cache, data)(cache, data.seq_len, first, stop)


def _packing(cache: TokenCache, data: DataSection) -> type[WholeDataset] | type[StreamDataset]:
    whole = data.packing == "whole" or (data.packing == "auto" and cache.masked is not None)
    return WholeDataset if whole else StreamDataset


def _all_rows(cache: TokenCache, source: Source, data: DataSection) -> Dataset:
    _check(cache, source)
    rows = _rows(cache, data)
    if len(rows) == 0:
        raise ConfigError(
            "data.seq_len",
            f"{data.seq_len} is more than the {len(cache.tokens)} tokens of "
            f"{source.if_empty.field}; lower it or add text"
            if isinstance(rows, StreamDataset)
            else f"in their first {data.seq_len} tokens, the conversations of "
            f"{source.if_empty.field} have nothing to learn; raise it",
        )
    return rows


def _divided(cache: TokenCache, source: Source, data: DataSection) -> tuple[Dataset, Dataset]:
    """The rows of all the data but its end, and those of its end."""
    _check(cache, source)
    is_stream = _packing(cache, data) is StreamDataset
    total = len(cache.tokens) // data.seq_len if is_stream else cache.num_documents
    what = f"rows of {data.seq_len} tokens" if is_stream else "documents"
    border = total - min(max(1, round(total * data.eval_fraction)), total - 1)
    if total > 1:
        train, held_out = _rows(cache, data, 0, border), _rows(cache, data, border)
        if len(train) and len(held_out):
            logger.info(
                "data.eval_fraction %s of the documents leaves a side without a row: held out are "
                "the last %d of all %d %s instead",
                data.eval_fraction,
                total - border,
                total,
                what,
            )
            return train, held_out
    where = source.if_empty.field
    if is_stream:
        raise ConfigError(
            "data.seq_len",
            f"{data.seq_len} is too long to make two rows of the {len(cache.tokens)} tokens of "
            f"{where}, one of them held out; lower it, add text, or set data.eval_fraction 0",
        )
    raise ConfigError(
        "data.eval_fraction",
        f"{data.eval_fraction}: of the {total} documents of {where} none can be held out that "
        f"leaves both sides something to learn in rows of data.seq_len {data.seq_len}; raise that, "
        "add documents, name some in data.eval_path, or set it to 0",
    )


def _check(cache: TokenCache, source: Source) -> None:
    """There is something to learn.

    Raises:
        ConfigError: there is no text, or no token of it has a loss.
    """
    if cache.num_documents == 0:
        raise source.if_empty
    if cache.targets.any():
        return
    where = source.if_empty.field
    if cache.masked is None:
        raise ConfigError(where, "no document has two tokens: there is nothing to predict")
    raise ConfigError(
        "data.chat_template",
        f"of the conversations of {where}, it renders nothing that could be learned; give another",
    )
