"""Rows that a program hands to a trainer, instead of a source of text in the settings.

docs/library.md says what rows may be. Those of a sequence are drawn in an order of ``train.seed``;
an iterable's come as it gives them, and when it ends, it is begun again. Every rank reads the same
rows, and takes its own. An objective finds a token's further fields where it finds it as a target.

An iterable that has ``state_dict`` and ``load_state_dict``, as torch's stateful data sets have,
goes on from its state (JSON) in the checkpoint; any other is begun again, and read up to there.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
from torch.utils.data import IterableDataset

from moetrain.config import Config, ConfigError
from moetrain.config.sources import RunFailed, shortened
from moetrain.data.loader import Data, check_prompt
from moetrain.data.packing import IGNORE_INDEX, Dataset, Row, Samples
from moetrain.data.tokenizer import load_tokenizer

_OF_TEXT = ("source", "path", "eval_path", "mix", "format", "text_field", "chat_template")
_OF_TEXT += ("train_on", "split", "subset", "packing", "eval_fraction", "num_documents")
"""Settings of the section ``data`` that rows have no use for."""


class _GivenRows:
    """The rows of a sequence of token ids, as a :class:`~moetrain.data.packing.Dataset`."""

    def __init__(self, rows: Any, seq_len: int, vocab_size: int) -> None:
        self._rows, self._sizes = rows, (seq_len, vocab_size)
        self.identity: list[Any] = ["given", _name_of(rows), len(rows), seq_len]

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return _row_of(self._rows[index], f"row {index}", *self._sizes)


class _GivenStream(Samples):
    """The rows of an iterable, in the order in which they come."""

    def __init__(self, rows: Iterable[Any], seq_len: int, vocab_size: int) -> None:
        self.rows, self._sizes = rows, (seq_len, vocab_size)
        self.identity: list[Any] = ["stream", _name_of(rows)]
        self._iterator: Iterator[Any] = iter(rows)
        self._taken = self._began_at = 0
        """Rows taken in all, and those before the iterable was last begun."""

    def __len__(self) -> int:
        return 0  # not known

    def sample(self, number: int) -> Row:
        assert number >= self._taken  # a step of a stream is not given up
        return _row_of(self._read_to(number + 1), f"row {number}", *self._sizes)

    def _read_to(self, number: int) -> Any:
        found = None
        while self._taken < number:
            found = next(self._iterator, self)
            if found is self:
                self._began_at, self._iterator = self._taken, iter(self.rows)
                found = next(self._iterator, self)
            if found is self:
                raise RunFailed(
                    f"the data ended after {self._taken} rows and cannot be read again; give an "
                    "iterable with as many rows as train.steps take, or one that can be begun again"
                )
            self._taken += 1
        return found

    def state(self, number: int) -> dict[str, Any]:
        self._read_to(number)  # over the rows of other ranks
        state: dict[str, Any] = {"taken": number, "began_at": self._began_at}
        if hasattr(self.rows, "state_dict"):
            state["rows"] = cast("Any", self.rows).state_dict()
        return state

    def resume(self, state: Any) -> None:
        taken, self._began_at = state["taken"], state["began_at"]
        has_state = "rows" in state and hasattr(self.rows, "load_state_dict")
        if has_state:
            cast("Any", self.rows).load_state_dict(state["rows"])
        self._iterator, self._taken = iter(self.rows), taken
        for _ in range(0 if has_state else taken - self._began_at):
            if next(self._iterator, self) is self:
                raise ConfigError(
                    "checkpoint.resume",
                    f"the data that was given ends before row {taken}, to which the checkpoint "
                    "was trained; give the same, or set never",
                )


def given_data(rows: Any, held_out: Any, config: Config, vocab_size: int) -> Data:
    """Return the data of a run on ``rows``.

    ``held_out``: a sequence of rows to evaluate on, or several by name; None: there are none.

    Raises:
        ConfigError: settings name or shape other data, no rows were given, ``train.epochs`` of a
            stream, or a ``train.sample_prompt`` without a tokenizer or that it cannot encode.
    """
    for name in _OF_TEXT:
        if config.is_users(f"data.{name}"):
            problem = "set, but the program gives rows (data=); leave one of them out"
            raise ConfigError(f"data.{name}", problem)
    tokenizer = load_tokenizer(config.data.tokenizer, new_tokens=config.data.new_tokens)
    if config.is_set("data.tokenizer"):
        check_prompt(config, tokenizer)
    elif config.is_users("train.sample_prompt"):
        problem = "set, but rows that a program gives (data=) need no tokenizer, and this does"
        remedy = "name the model's in data.tokenizer, or unset it"
        raise ConfigError("train.sample_prompt", f"{problem}; {remedy}")
    is_sized = hasattr(rows, "row") or _is_sequence(rows)
    sizes = config.data.seq_len, vocab_size
    train = _sized(rows, *sizes) if is_sized else _GivenStream(rows, *sizes)
    if not is_sized and config.train.epochs is not None:
        problem = f"{config.train.epochs}, but the rows that were given have no length"
        raise ConfigError("train.epochs", f"{problem}; give train.steps")
    sets = held_out if isinstance(held_out, Mapping) else {"": held_out}
    sets = {name: _sized(rows, *sizes) for name, rows in sets.items() if rows is not None}
    if not sets and config.train.patience:
        problem = f"{config.train.patience}, but no rows to evaluate on were given (eval_data=)"
        raise ConfigError("train.patience", f"{problem}; give some, or set it to 0")
    identity = [train.identity, [x.identity for x in sets.values()]]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    first = next(iter(sets.values()), None)
    parts = {name: (rows, 1.0) for name, rows in sets.items() if name}
    return Data(train, first, tokenizer, fingerprint, None, parts)


def _is_sequence(rows: Any) -> bool:
    is_stream = isinstance(rows, IterableDataset)  # which may have both, and cannot be indexed
    return not is_stream and hasattr(rows, "__getitem__") and hasattr(rows, "__len__")


def _sized(rows: Any, seq_len: int, vocab_size: int) -> Dataset:
    """Return a sequence of rows as a dataset; one that is such a dataset is returned as it is."""
    if not hasattr(rows, "row") and not _is_sequence(rows):
        raise ConfigError("eval_data", f"{_name_of(rows)} has no len() and []; give a list of rows")
    if len(rows) == 0:
        raise ConfigError("data", "no rows were given; give some")
    return rows if hasattr(rows, "row") else _GivenRows(rows, seq_len, vocab_size)


def _name_of(rows: Any) -> str:
    return f"{type(rows).__module__}.{type(rows).__qualname__}"


def _row_of(given: Any, what: str, size: int, vocab_size: int) -> Row:
    fields = given if isinstance(given, Mapping) else {"input_ids": given}
    ids = np.asarray(fields["input_ids"])
    labels = np.asarray(fields.get("labels", ids))
    is_right = ids.ndim == 1 and ids.dtype.kind in "iu" and 0 < len(ids) <= size
    if not is_right or labels.shape != ids.shape:
        raise ConfigError(
            "data",
            f"{what} is {shortened(given)}, of shape {ids.shape} and dtype {ids.dtype}; a row has "
            f"1 to {size} token ids (data.seq_len), with as many labels",
        )
    extra: dict[str, np.ndarray] = {}
    for name in fields.keys() - {"labels"}:
        found = _numbers(fields[name], f"{what}, field {name!r}", len(ids))
        if found is None:
            continue
        if name.endswith("_ids") and (found.min() < 0 or found.max() >= vocab_size):
            wrong, last = found[(found < 0) | (found >= vocab_size)][0], vocab_size - 1
            raise ConfigError("data", f"{what} has token {wrong}; the model's are 0 to {last}")
        extra[name] = np.zeros((size, *found.shape[1:]), found.dtype)
        extra[name][: len(ids) - 1] = found[1:]
    del extra["input_ids"]
    targets_T = np.append(np.where(labels < 0, IGNORE_INDEX, labels)[1:], IGNORE_INDEX)
    # One document, whose attention needs no mask.
    return Row.filled(size, [(ids, targets_T)])._replace(positions_S=None, extra=extra)


def _numbers(given: Any, what: str, length: int) -> np.ndarray | None:
    """Return a field with an entry for each of the tokens; None: it is no list of numbers."""
    try:
        found = np.asarray(given)
    except ValueError as error:
        raise ConfigError("data", f"{what}: {error}; give as many numbers for each token") from None
    if found.ndim == 0 or found.dtype.kind not in "biuf":
        return None
    if len(found) != length:
        problem = f"{len(found)} entries for {length} tokens"
        raise ConfigError("data", f"{what} has {problem}; give one for each, or leave it out")
    return found.astype(np.float32 if found.dtype.kind == "f" else np.int64)
