"""Data: from files on disk to the batches of a step.

    sources -> documents -> tokenizer -> cache (memory-mapped) -> packing (rows) -> loader (batches)

:func:`build_data` follows the arrows as far as rows; the trainer makes the loader, which needs to
know the ranks.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from moetrain.config import Config, ConfigError, user_cache_dir
from moetrain.data.cache import open_cache
from moetrain.data.loader import Batch, Loader, eval_batches
from moetrain.data.packing import IGNORE_INDEX, Dataset, PackedDataset, SyntheticDataset
from moetrain.data.sources import open_sources
from moetrain.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["IGNORE_INDEX", "Batch", "Data", "Dataset", "Loader", "build_data", "eval_batches"]


class Data(NamedTuple):
    """What a run trains on."""

    train: Dataset
    eval: Dataset | None
    """Held-out rows, None: no evaluation was asked for (data.eval_fraction 0)."""
    tokenizer: Tokenizer


def build_data(config: Config, vocab_size: int) -> Data:
    """The rows that ``config.data`` describes, tokenised now if no earlier run did.

    The synthetic source draws ids from the whole of ``vocab_size``; its tokenizer only shows
    samples of the model's output, under the same limit.

    Raises:
        ConfigError: anything wrong with the data or its settings.
    """
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            "data.tokenizer",
            f"{data.tokenizer!r} has {tokenizer.vocab_size} tokens, more than the model's "
            f"vocabulary of {vocab_size}; use the model's own tokenizer or raise model.vocab_size",
        )
    if data.source == "synthetic":
        return _synthetic(config, vocab_size, tokenizer)
    train_source, eval_source = open_sources(data, tokenizer)
    cache_dir = user_cache_dir() if data.cache_dir is None else Path(data.cache_dir)
    train = PackedDataset(
        open_cache(train_source, tokenizer, cache_dir), data.seq_len, "lower it or add text"
    )
    if eval_source is None:
        return Data(train, None, tokenizer)
    held_out = PackedDataset(
        open_cache(eval_source, tokenizer, cache_dir),
        data.seq_len,
        "they are held out: lower it, raise data.eval_fraction, or add text to data.eval_path",
    )
    return Data(train, held_out, tokenizer)


def _synthetic(config: Config, vocab_size: int, tokenizer: Tokenizer) -> Data:
    data, seed = config.data, config.train.seed
    train = SyntheticDataset(data.num_documents, data.seq_len, vocab_size, seed)
    num_held_out = math.ceil(data.num_documents * data.eval_fraction)
    if num_held_out == 0:
        return Data(train, None, tokenizer)
    held_out = SyntheticDataset(
        num_held_out, data.seq_len, vocab_size, seed, first=data.num_documents
    )
    return Data(train, held_out, tokenizer)
