"""Reads the rows that a program hands to a trainer, in place of a source of text in the settings.

docs/library.md describes the rows. A sequence is shuffled by ``train.seed``, and each rank reads
only its own rows of it. An iterable keeps its order, and is begun again when it ends. Each rank
reads all rows of an iterable, and keeps its own share. Further fields of a token are stored at the
position that predicts the token, where an objective reads them.

An iterable with ``state_dict`` and ``load_state_dict``, as torch's stateful data sets have them,
resumes from its state, which the checkpoint holds as JSON. Any other iterable is begun again, and
its rows are skipped up to the row at which the checkpoint was written.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, cast

import numpy as np
from torch.utils.data import IterableDataset

from moetrain.config import Config, ConfigError
from moetrain.config.sources import RunFailed, shortened
from moetrain.data.loader import Data, HeldOut, check_prompt
from moetrain.data.packing import IGNORE_INDEX, Dataset, Row, Samples
from moetrain.data.tokenizer import load_tokenizer

_OF_TEXT = ("source", "path", "eval_path", "mix", "format", "text_field", "chat_template")
_OF_TEXT += ("train_on", "split", "subset", "packing", "eval_fraction", "num_documents")
"""Settings of the section ``data`` that have no effect on rows."""
_OF_EVALUATIONS = ("train.patience", "train.target_loss", "checkpoint.best")
"""Settings that have no effect without rows to evaluate on."""


class _SequenceRows:
    """The rows of a sequence, as a :class:`~moetrain.data.packing.Dataset`."""

    def __init__(self, rows: Any, seq_len: int, vocab_size: int) -> None:
        self._rows, self._seq_len, self._vocab_size = rows, seq_len, vocab_size
        self.identity: list[Any] = ["given", _name_of(rows), len(rows), seq_len]

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return _row_of(
            self._rows[index],
            f"row {index}",
            seq_len=self._seq_len,
            vocab_size=self._vocab_size,
        )


class _IterableRows(Samples):
    """The rows of an iterable, in its order."""

    def __init__(self, rows: Iterable[Any], seq_len: int, vocab_size: int) -> None:
        self.rows, self._seq_len, self._vocab_size = rows, seq_len, vocab_size
        self.identity: list[Any] = ["stream", _name_of(rows)]
        self._iterator: Iterator[Any] = iter(rows)
        self._taken = 0
        """Number of rows that were read in all."""
        self._began_at = 0
        """Number of rows that were read before the iterable was last begun."""

    def __len__(self) -> int:
        return 0  # not known

    def sample(self, number: int) -> Row:
        assert number >= self._taken  # an iterable cannot go back
        return _row_of(
            self._read_to(number + 1),
            f"row {number}",
            seq_len=self._seq_len,
            vocab_size=self._vocab_size,
        )

    def _read_to(self, number: int) -> Any:
        """Read until ``number`` rows have been read in all. Return the last one.

        None: as many rows had been read already.

        Raises RunFailed: the iterable ended and cannot be begun again.
        """
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
        self._read_to(number)  # the rows behind this rank's last one are other ranks'
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


def data_of_rows(rows: Any, held_out: Any, config: Config, vocab_size: int) -> Data:
    """Return the data of a run on ``rows``.

    Args:
        rows: a sequence or an iterable of rows, or a :class:`~moetrain.data.packing.Dataset`.
        held_out: a sequence of rows to evaluate on, or several by name; None: there are none.
        config: the settings of the run.
        vocab_size: number of token ids that the model takes.

    Raises ConfigError: a user gave a setting that has no effect on rows or needs held-out rows,
    there are no rows, ``held_out`` is no sequence, ``train.epochs`` is set for an iterable, or
    nothing can be sampled from ``train.sample_prompt``.
    """
    for name in _OF_TEXT:
        if config.is_users(f"data.{name}") and getattr(config.data, name) is not None:
            problem = "set, but the program gives rows (data=); leave one of them out"
            raise ConfigError(f"data.{name}", problem)
    tokenizer = load_tokenizer(config.data.tokenizer, new_tokens=config.data.new_tokens)
    if config.is_set("data.tokenizer"):
        check_prompt(config, tokenizer)
    elif config.is_users("train.sample_prompt") and config.train.sample_prompt is not None:
        problem = "set, but it needs a tokenizer, and rows that a program gives (data=) have none"
        remedy = "name the model's in data.tokenizer, or unset it"
        raise ConfigError("train.sample_prompt", f"{problem}; {remedy}")
    is_sized = hasattr(rows, "row") or _is_sequence(rows)
    seq_len = config.data.seq_len
    train = (
        _sized(rows, seq_len, vocab_size) if is_sized else _IterableRows(rows, seq_len, vocab_size)
    )
    if not is_sized and config.train.epochs is not None:
        problem = f"{config.train.epochs}, but the rows that were given have no length"
        raise ConfigError("train.epochs", f"{problem}; give train.steps")
    sets = held_out if isinstance(held_out, Mapping) else {"": held_out}
    sets = {
        name: _sized(rows, seq_len, vocab_size) for name, rows in sets.items() if rows is not None
    }
    for name in () if sets else _OF_EVALUATIONS:
        if value := attrgetter(name)(config):
            problem = f"{value}, but no rows to evaluate on were given (eval_data=)"
            raise ConfigError(name, f"{problem}; give some, or unset it")
    identity = [train.identity, [x.identity for x in sets.values()]]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return Data(
        train=train,
        eval=next(iter(sets.values()), None),
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        chat_template=None,
        sources={name: HeldOut(rows, 1.0) for name, rows in sets.items() if name},
    )


def _is_sequence(rows: Any) -> bool:
    """Return True if ``rows`` have a length and can be indexed."""
    is_stream = isinstance(rows, IterableDataset)  # may have both, and still cannot be indexed
    return not is_stream and hasattr(rows, "__getitem__") and hasattr(rows, "__len__")


def _sized(rows: Any, seq_len: int, vocab_size: int) -> Dataset:
    """Return a sequence of rows as a dataset, or a dataset unchanged.

    Raises ConfigError: ``rows`` is neither, or has no row.
    """
    if not hasattr(rows, "row") and not _is_sequence(rows):
        raise ConfigError("eval_data", f"{_name_of(rows)} has no len() and []; give a list of rows")
    if len(rows) == 0:
        raise ConfigError("data", "no rows were given; give some")
    return rows if hasattr(rows, "row") else _SequenceRows(rows, seq_len, vocab_size)


def _name_of(rows: Any) -> str:
    return f"{type(rows).__module__}.{type(rows).__qualname__}"


def _row_of(entry: Any, what: str, *, seq_len: int, vocab_size: int) -> Row:
    """Make a row of ``entry``, a list of token ids or a mapping with ``input_ids``.

    Raises ConfigError, whose text begins with ``what``: ``entry`` is neither, has more tokens than
    a row, or has tokens that the model lacks.
    """
    fields = entry if isinstance(entry, Mapping) else {"input_ids": entry}
    ids = np.asarray(fields["input_ids"])
    labels = np.asarray(fields.get("labels", ids))
    is_right = ids.ndim == 1 and ids.dtype.kind in "iu" and 0 < len(ids) <= seq_len
    if not is_right or labels.shape != ids.shape:
        raise ConfigError(
            "data",
            f"{what} is {shortened(entry)}, of shape {ids.shape} and dtype {ids.dtype}; a row has "
            f"1 to {seq_len} token ids (data.seq_len), with as many labels",
        )
    extra: dict[str, np.ndarray] = {}
    for name in fields.keys() - {"labels"}:
        found = _numbers(fields[name], f"{what}, field {name!r}", len(ids))
        if found is None:
            continue
        if name.endswith("_ids") and (found.min() < 0 or found.max() >= vocab_size):
            wrong, last = found[(found < 0) | (found >= vocab_size)][0], vocab_size - 1
            raise ConfigError("data", f"{what} has token {wrong}; the model's are 0 to {last}")
        # A field of a token belongs to the position that predicts it.
        extra[name] = np.zeros((seq_len, *found.shape[1:]), found.dtype)
        extra[name][: len(ids) - 1] = found[1:]
    del extra["input_ids"]
    targets_T = np.append(np.where(labels < 0, IGNORE_INDEX, labels)[1:], IGNORE_INDEX)
    # The row is one document, so attention needs no mask.
    return Row.filled(seq_len, [(ids, targets_T)])._replace(positions_S=None, extra=extra)


def _numbers(field: Any, what: str, length: int) -> np.ndarray | None:
    """Return ``field`` as an array with an entry for each token. None: it is no list of numbers.

    Raises ConfigError, whose text begins with ``what``: the entries differ in their length, or
    their number is not ``length``.
    """
    try:
        found = np.asarray(field)
    except ValueError as error:
        raise ConfigError("data", f"{what}: {error}; give as many numbers for each token") from None
    if found.ndim == 0 or found.dtype.kind not in "biuf":
        return None
    if len(found) != length:
        problem = f"{len(found)} entries for {length} tokens"
        raise ConfigError("data", f"{what} has {problem}; give one for each, or leave it out")
    return found.astype(np.float32 if found.dtype.kind == "f" else np.int64)
