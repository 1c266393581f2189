"""Makes the rows of a run from its settings (:func:`build_data`), and batches from rows.

Whole documents are held out for evaluation, chosen by a hash. If training or evaluation then has
nothing to learn (one file, a handful of chats), the end of the data is held out instead: the last
rows if documents are laid end to end, otherwise the last documents. In both cases no text is used
for both training and evaluation. A source that is tokenised during training has to hold out enough
in its first blocks.

Left out on purpose: worker processes and prefetching for batches. A row is a slice of a
memory-mapped file and takes microseconds.

Shapes: B rows, S tokens of a row.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch

from moetrain.config import Config, ConfigError, DataSection, logger
from moetrain.config.environment import user_cache_dir
from moetrain.config.sections import MixEntry
from moetrain.data import packing
from moetrain.data.cache import Blocks, TokenCache
from moetrain.data.documents import HashRange, Skipped
from moetrain.data.packing import IGNORE_INDEX, Dataset, Row, Samples, Shuffled
from moetrain.data.records import RecordReader
from moetrain.data.sources import NOTHING_LEARNED, Source
from moetrain.data.tokenizer import Tokenizer, load_tokenizer
from moetrain.models.transformer import Inputs
from moetrain.runtime.typed import from_array


class HeldOut(NamedTuple):
    """A source of a mixture, as evaluations see it."""

    rows: Dataset
    """The held-out rows of the source."""
    share: float
    """The source's share of the rows that are trained on, from 0 to 1."""


class Data(NamedTuple):
    """The data of a run."""

    train: Dataset
    eval: Dataset | None
    """Held-out rows. For a mixture they are the rows of its first source. None: there is no
    evaluation (data.eval_fraction 0)."""
    tokenizer: Tokenizer
    fingerprint: str
    """Hash of everything that decides the rows of ``train`` and ``eval``: the tokens and their
    masks, the packing, the row length, the held-out documents and the seed of synthetic rows. The
    order of rows and the places of files do not count."""
    chat_template: str | None
    """The template that rendered the conversations. None: there are no conversations."""
    sources: Mapping[str, HeldOut] = MappingProxyType({})
    """The sources of a mixture by name."""


_ROWS_OF_PREFERENCES = {
    **dict.fromkeys(("dpo", "ipo", "hinge", "simpo", "orpo"), "pairs"),
    "kto": "answers",
    "reward": "ranked",
}
"""The kind of rows (:attr:`RecordReader.PAIRED`) for each objective that learns from preferences.
Other objectives learn from text."""


def section_of_rows(config: Config) -> DataSection:
    """Return ``config.data`` with the kind of rows that ``train.objective`` learns from."""
    kind = _ROWS_OF_PREFERENCES.get(config.train.objective)
    if kind is None:
        return config.data
    # The log-probabilities of all rows under the reference model are computed before the first
    # step. A stream has no last row, so these rows are not streamed.
    return config.data.model_copy(update={"packing": kind, "streaming": "no"})


def build_data(config: Config, vocab_size: int) -> Data:
    """Open the rows that ``config.data`` describes, and tokenise them if no earlier run did.

    The ids of synthetic rows are below ``vocab_size``.

    Raises ConfigError: the data or its settings are wrong, or nothing can be sampled from
    ``train.sample_prompt``.
    """
    data = section_of_rows(config)
    data.check()
    tokenizer = load_tokenizer(data.tokenizer, vocab_size, data.new_tokens)
    check_prompt(config, tokenizer)
    template, sources, seed = None, {}, config.train.seed
    if data.source == "synthetic":
        make = partial(
            packing.SyntheticDataset, seq_len=data.seq_len, vocab_size=vocab_size, seed=seed
        )
        num_rows, held_out = data.num_documents, None
        train = make(num_rows)
        if num_held_out := math.ceil(num_rows * data.eval_fraction):
            held_out = make(num_held_out, first=num_rows)
    elif data.mix is None:
        train, held_out, template = _from_text(data, tokenizer, seed)
    else:
        train, sources, template = _mixed(data, data.mix, tokenizer, seed)
        held_out = next((source.rows for source in sources.values()), None)
    identities: list[object] | None = None if held_out is None else held_out.identity
    if data.mix is not None:
        identities = [source.rows.identity for source in sources.values()]
    fingerprint = hashlib.sha256(json.dumps([train.identity, identities]).encode()).hexdigest()
    return Data(
        train=train,
        eval=held_out,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        chat_template=template,
        sources=sources,
    )


def check_prompt(config: Config, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if nothing can be sampled from ``train.sample_prompt``."""
    if config.train.sample_prompt is not None and config.train.sample_tokens:
        try:
            tokenizer.encode_prompt(config.train.sample_prompt)
        except ValueError as error:
            raise ConfigError("train.sample_prompt", f"{error}; leave it out") from None


def _mixed(
    data: DataSection, mix: Sequence[MixEntry], tokenizer: Tokenizer, seed: int
) -> tuple[packing.Mixture, dict[str, HeldOut], str | None]:
    """Return the rows of a mixture, :attr:`Data.sources` and the template of conversations.

    A pass over the mixture is as long as the weights and repeats of the sources allow.
    """
    parts: dict[str, Samples] = {}
    held_out: dict[str, Dataset] = {}
    template = None
    for entry, (name, section) in zip(mix, data.sources().items(), strict=True):
        rows = _from_text(section, tokenizer, seed, entry.limit)
        part = rows.train
        parts[name] = part if isinstance(part, packing.Streamed) else Shuffled(part, seed)
        template = template or rows.chat_template
        if rows.held_out is not None:
            held_out[name] = rows.held_out
    # The source that runs out first ends the pass.
    most = [len(part) * entry.repeat for part, entry in zip(parts.values(), mix, strict=True)]
    weights = [
        n if entry.weight is None else entry.weight for entry, n in zip(mix, most, strict=True)
    ]
    size = min(n / weight for n, weight in zip(most, weights, strict=True))
    counts = [max(1, int(size * weight + 1e-6)) for weight in weights]
    train = packing.Mixture(parts, counts, seed)
    shares = {name: n / len(train) for name, n in zip(parts, counts, strict=True)}
    of_part = ", ".join(f"{n:,} of {name}" for name, n in zip(parts, counts, strict=True))
    logger.info("a pass over the mixture has %s rows: %s", f"{len(train):,}", of_part)
    return train, {name: HeldOut(rows, shares[name]) for name, rows in held_out.items()}, template


class _Rows(NamedTuple):
    """The rows of a source."""

    train: Dataset
    held_out: Dataset | None
    """None: nothing is held out."""
    chat_template: str | None
    """The template of the conversations. None: there are none."""


def _from_text(
    data: DataSection, tokenizer: Tokenizer, seed: int, limit: int | None = None
) -> _Rows:
    """Return the rows of a source. ``limit`` is as in :meth:`Source.of`."""
    source = Source.of(data, tokenizer, limit)
    other = None if data.eval_path is None else Source.of(data, tokenizer, limit, "eval_path")
    if said := source.describe():
        logger.info("%s", said)
    if said := source.describe_repeats():
        logger.warning("%s", said)
    cache_dir = user_cache_dir() if data.cache_dir is None else Path(data.cache_dir)
    is_streamed = data.streaming == "yes"
    if data.streaming == "auto" and data.source != "stdlib" and limit is None:
        is_streamed = source.total_bytes() > _STREAMED_BYTES
    if is_streamed and limit is None:
        train, held_out, has_chats = _streamed(data, source, other, tokenizer, cache_dir, seed)
    else:
        train, held_out, has_chats = _tokenised(data, source, other, tokenizer, cache_dir)
    for side, dataset in (("", train), ("held out: ", held_out)):
        if isinstance(dataset, (packing.WholeDataset, packing.PairDataset)):
            logger.info("%s%s", side, dataset.describe())
    template = source.reader.template.source if source.reader and has_chats else None
    return _Rows(train, held_out, template)


def _tokenised(
    data: DataSection, source: Source, other: Source | None, tokenizer: Tokenizer, cache_dir: Path
) -> tuple[Dataset, Dataset | None, bool]:
    """Return the rows to train on, the held-out rows, and True if there are conversations.

    ``other`` is the source to evaluate on. None: the share ``data.eval_fraction`` of ``source`` is
    held out, and nothing if it is 0.
    """

    def read(source: Source) -> TokenCache:
        return TokenCache.of(source, tokenizer, cache_dir)

    if other is None and data.eval_fraction:
        train = read(source.only(HashRange(low=data.eval_fraction)))
        held_out = read(source.only(HashRange(high=data.eval_fraction)))
    else:
        train, held_out = read(source), None if other is None else read(other)
    both = [cache for cache in (train, held_out) if cache is not None]
    has_chats = any(cache.masked is not None for cache in both)
    skipped = Skipped()
    for cache in both:
        skipped.merge(cache.skipped)
    skipped.warn(source.path)
    if held_out is None:
        return _all_rows(train, source, data), None, has_chats
    if other is not None:
        return _all_rows(train, source, data), _all_rows(held_out, other, data), has_chats
    rows = _rows(train, data), _rows(held_out, data)
    if all(map(len, rows)) and train.targets.any() and held_out.targets.any():
        return *rows, has_chats
    # One side has nothing to learn: divide all documents by their order instead.
    if train.num_documents == 0 or held_out.num_documents == 0:  # the other side has all documents
        whole = train if train.num_documents else held_out
    else:
        whole = read(source)
    return *_divided(whole, source, data), has_chats


_STREAMED_BYTES = 1 << 26
"""Estimated bytes of the records of a source above which data.streaming auto streams it."""
_HELD_OUT_BYTES = 1 << 22
"""Bytes of held-out text that are enough for a stream: it takes whole groups until it has them."""


def _streamed(
    data: DataSection,
    source: Source,
    other: Source | None,
    tokenizer: Tokenizer,
    cache_dir: Path,
    seed: int,
) -> tuple[Dataset, Dataset | None, bool]:
    """Return the same as :func:`_tokenised` for a source that is tokenised during training."""
    rest, share, held_out = other, HashRange(), HashRange()
    if other is None and data.eval_fraction:
        border = data.eval_fraction
        rest, share, held_out = source, HashRange(low=border), HashRange(high=border)
    blocks = Blocks(source, share, tokenizer, cache_dir, data.workers)
    first, _ = blocks.first()
    rows = _all_rows(first, source, data)
    if isinstance(rows, packing.WholeDataset):
        logger.info("the first block: %s", rows.describe())
    fixed = data.model_copy(update={"packing": "whole" if _is_whole(first, data) else "stream"})
    train = packing.Streamed(blocks, partial(_rows, data=fixed), seed)
    size = f"a pass has about {len(train):,} rows"
    logger.info("%s is tokenised during training (data.streaming): %s", source.path, size)
    has_chats = first.masked is not None
    if rest is None:
        return train, None, has_chats
    sample = Blocks(rest, held_out, tokenizer, cache_dir, 0).sample(_HELD_OUT_BYTES)
    if sample is None or not sample.targets.any() or not len(rows := _rows(sample, fixed)):
        if other is not None:
            problem = f"{data.eval_path!r}: its first blocks have no row with anything to learn"
            raise ConfigError("data.eval_path", f"{problem}; name other data, or add some")
        raise ConfigError(
            "data.eval_fraction",
            f"{data.eval_fraction}: the first blocks of {source.field} hold out too little; "
            "raise it, name data in data.eval_path instead, or set it to 0",
        )
    return train, rows, has_chats


def _is_whole(cache: TokenCache, data: DataSection) -> bool:
    """Return True if rows hold whole documents, False if documents are laid end to end."""
    return data.packing != "stream" and (data.packing != "auto" or cache.masked is not None)


def _rows(cache: TokenCache, data: DataSection, first: int = 0, stop: int | None = None) -> Dataset:
    """Pack ``first:stop`` of the documents, the preferences, or the stream's rows in ``cache``.

    Raises ConfigError: a conversation or a preference is longer than a row, and data.overlong is
    error.
    """
    kind = RecordReader.kind_of_rows(data)
    if kind in RecordReader.PAIRED:
        for_kto = kind == "answers"
        rows = packing.PairDataset(cache, data.seq_len, for_kto=for_kto, first=first, stop=stop)
    elif _is_whole(cache, data):
        drops = data.overlong == "drop"
        rows = packing.WholeDataset(cache, data.seq_len, first, stop, drops_overlong=drops)
    else:
        return packing.StreamDataset(cache, data.seq_len, first, stop)
    if data.overlong == "error" and (number := len(rows.overlong_lengths)):
        longest = int(rows.overlong_lengths.max())
        problem = (
            f"{number:,} are longer than data.seq_len {data.seq_len}, the longest has {longest}"
        )
        remedy = f"raise data.seq_len to {longest}, or set data.overlong drop"
        raise ConfigError("data.overlong", f"'error', and {problem} tokens; {remedy}")
    return rows


def _all_rows(cache: TokenCache, source: Source, data: DataSection) -> Dataset:
    """Pack all of ``cache``. Raises ConfigError: there is nothing to learn, or no row."""
    rows = _rows(_learnable(cache, source), data)
    if len(rows) == 0:
        problem = f"{data.seq_len}: the {len(cache.tokens)} tokens of {source.field} make no row"
        remedy = "lower it or add text"
        if not isinstance(rows, packing.StreamDataset):
            remedy = f"raise it, up to {_longest(cache, rows)}"
        raise ConfigError("data.seq_len", f"{problem} of this length to learn; {remedy}")
    return rows


def _longest(cache: TokenCache, rows: Dataset) -> int:
    """Return the tokens of the longest document, or of the longest pair, which a row holds."""
    if isinstance(rows, packing.PairDataset):
        return int(rows.needed_P.max())
    return int(np.diff(cache.documents).max())


def _divided(cache: TokenCache, source: Source, data: DataSection) -> tuple[Dataset, Dataset]:
    """Divide the data by its order. Return the rows to train on, and the last rows, held out.

    Raises ConfigError: a side would have nothing to learn.
    """
    is_stream = not _is_whole(_learnable(cache, source), data)
    total = len(cache.tokens) // data.seq_len if is_stream else cache.num_documents
    what = f"rows of {data.seq_len} tokens" if is_stream else "documents"
    if RecordReader.kind_of_rows(data) in RecordReader.PAIRED:
        total = len(packing.preference_starts(cache)) - 1
        what = "pairs" if cache.labels is None else "pairs and answers"
    if total == 0 or len(_rows(cache, data, 0)) == 0:
        _all_rows(cache, source, data)  # raises the error that says why there are no rows
    border = total - min(max(1, round(total * data.eval_fraction)), total - 1)
    if total > 1:
        sides = _rows(cache, data, 0, border), _rows(cache, data, border)
        if all(map(len, sides)):
            problem = f"{data.eval_fraction} of the documents leaves training or evaluation no row"
            moved = f"held out are the last {total - border} of all {total} {what} instead"
            logger.info("data.eval_fraction %s: %s", problem, moved)
            return sides
    remedy = "add data, name some in data.eval_path instead, or set it to 0"
    if is_stream and len(cache.tokens) > 3:
        remedy = f"lower data.seq_len to {len(cache.tokens) // 2}, {remedy}"
    elif total > 1:  # on one side, rows end before the answers begin
        longest = _longest(cache, _rows(cache, data, 0))
        wider = data.model_copy(update={"seq_len": longest})
        sides = (_rows(cache, wider, 0, border), _rows(cache, wider, border))
        if longest > data.seq_len and all(map(len, sides)):
            remedy = f"raise data.seq_len to {longest}, {remedy}"
    raise ConfigError(
        "data.eval_fraction",
        f"{data.eval_fraction}: the {total} {what} of {source.field} cannot be divided so that "
        f"training and evaluation both have something to learn; {remedy}",
    )


def _learnable(cache: TokenCache, source: Source) -> TokenCache:
    """Return ``cache`` itself. Raises ConfigError: there is no text, or no token has loss."""
    if cache.num_documents == 0:
        _, first = next(iter(cache.skipped.kinds.values()), (0, ""))
        why = f"; the first bad record: {first}" if first else ""
        notes = (x for kind, x in cache.warnings.items() if kind.startswith(NOTHING_LEARNED))
        if (note := next(notes, None)) is not None:
            why = f" that is to be learned: {note}{why}"
        raise ConfigError(source.field, f"{source.path!r} holds no text{why}")
    if cache.targets.any():
        return cache
    if cache.masked is None:
        problem = "no document has two tokens: there is nothing to predict"
        raise ConfigError(source.field, problem)
    problem = f"it renders the conversations of {source.field} without any text to learn"
    raise ConfigError("data.chat_template", f"{problem}; give another")


class Batch(NamedTuple):
    """One micro-batch, on the CPU."""

    tokens_BS: torch.Tensor
    """int64 ids."""
    targets_BS: torch.Tensor
    """int64: the token that each position predicts, or IGNORE_INDEX."""
    positions_BS: torch.Tensor | None
    """int64: from 0 in each segment. None: each row is one segment."""
    cu_seqlens: torch.Tensor
    """[num_segments + 1] int32: 0, then each segment's end in the flattened B * S tokens. A segment
    is the part of one document that lies in one row."""
    is_pad_BS: torch.Tensor | None = None
    """bool: True for tokens that only fill up a row. A pad belongs to the segment before it and has
    no target. None: no batch of this dataset has pads."""
    extra: Mapping[str, torch.Tensor] = MappingProxyType({})
    """Further fields that an objective reads with the targets, by name. Each is [B, S, ...]."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """Stack ``rows`` into a micro-batch. Raises ConfigError: their extra fields differ."""
        shapes = [{name: field.shape for name, field in row.extra.items()} for row in rows]
        if other := next((found for found in shapes if found != shapes[0]), None):
            problem = f"a row has fields of shapes {other}, and another of {shapes[0]}"
            raise ConfigError("data", f"{problem}; give all rows the same")
        lengths = np.concatenate([row.lengths for row in rows])
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        positions = [row.positions_S for row in rows if row.positions_S is not None]
        is_pad = [row.is_pad_S for row in rows if row.is_pad_S is not None]
        return cls(
            tokens_BS=_stacked([row.tokens_S for row in rows]),
            targets_BS=_stacked([row.targets_S for row in rows]),
            positions_BS=_stacked(positions) if positions else None,
            cu_seqlens=from_array(cu_seqlens),
            is_pad_BS=_stacked(is_pad) if is_pad else None,
            extra={name: _stacked([row.extra[name] for row in rows]) for name in shapes[0]},
        )

    def to(self, device: torch.device) -> Self:
        """Copy the batch to ``device`` without waiting for the copy."""
        tensors = tensors_on(device, self._asdict())
        return self._replace(**tensors, extra=tensors_on(device, self.extra))

    @property
    def inputs(self) -> Inputs:
        """The part of the batch that the model reads."""
        return Inputs(
            self.tokens_BS,
            self.positions_BS,
            cu_seqlens=self.cu_seqlens,
            is_pad_BS=self.is_pad_BS,
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are not pads. On a GPU this waits for the device."""
        return self.tokens_BS.numel() - int(0 if self.is_pad_BS is None else self.is_pad_BS.sum())


def _stacked(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return from_array(np.stack(arrays))


def tensors_on(device: torch.device, fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copy the tensors of ``fields`` to ``device`` without waiting. Other values are left out."""
    tensors = {name: x for name, x in fields.items() if isinstance(x, torch.Tensor)}
    if device.type == "cuda":
        tensors = {name: x if x.is_cuda else x.pin_memory() for name, x in tensors.items()}
    return {name: x.to(device, non_blocking=True) for name, x in tensors.items()}


@dataclass
class Loader:
    """One rank's micro-batches, step after step, without end.

    The samples of a run are numbered over all ranks (:class:`~moetrain.data.packing.Samples`). So
    the rows of a step do not depend on the number of ranks, and a resumed run sees the batches that
    it would have seen.
    """

    dataset: Dataset | Samples
    """Rows or samples. Rows are shuffled in each pass, and samples keep their order."""
    global_batch_size: int
    """Rows of a step, on all ranks."""
    micro_batch_size: int
    """Rows of a batch."""
    seed: int
    """Decides the order of the rows of a dataset."""
    rank: int = 0
    """Index of this rank among the data-parallel ranks."""
    world_size: int = 1
    """Number of data-parallel ranks."""
    sample_index: int = 0
    """Number of rows that all ranks have consumed."""
    seq_len: int | None = None
    """Tokens that each row must have. None: the length of the row's ``tokens_S``."""
    before_batch: Callable[[], None] = lambda: None
    """Called before each micro-batch is made. If it raises, the loader is unchanged."""

    def __post_init__(self) -> None:
        # moetrain.parallel.world.plan_world refuses other sizes.
        assert self.global_batch_size % (self.micro_batch_size * self.world_size) == 0
        self._samples = cast("Samples", self.dataset)
        if not hasattr(self.dataset, "sample"):
            self._samples = Shuffled(self.dataset, self.seed)

    def state(self) -> dict[str, Any]:
        """Return the position as JSON. A run on any number of ranks can resume from it."""
        position: dict[str, Any] = {"sample_index": self.sample_index}
        streams = self._samples.state(self.sample_index)
        return position if streams is None else {**position, "streams": streams}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from the position that :meth:`state` returned."""
        self.sample_index = state["sample_index"]
        self._samples.resume(state.get("streams"))

    def next_step(self) -> list[Batch]:
        """Return this rank's micro-batches of the next optimizer step.

        The step's rows are divided into micro-batches in order, and ranks take these in turn. With
        8 rows, 2 ranks and micro-batches of 2, rank 1 gets rows 2 and 3, then 6 and 7.

        Raises ValueError: the dataset returns a row with other shapes than those of :class:`Row`.
        Raises ConfigError: rows of a micro-batch have different extra fields.
        """
        size, end = self.micro_batch_size, self.sample_index + self.global_batch_size
        batches: list[Batch] = []
        for first in range(self.sample_index, end, size)[self.rank :: self.world_size]:
            self.before_batch()
            batches.append(Batch.of([self._row(i) for i in range(first, first + size)]))
        self.sample_index = end
        return batches

    def _row(self, number: int) -> Row:
        """Return sample ``number``. Raises ValueError: its shapes are not those of :class:`Row`."""
        row = self._samples.sample(number)
        shapes = {name: np.shape(x) for name, x in row._asdict().items() if x is not None}
        lengths, _ = shapes.pop("lengths"), shapes.pop("extra")
        shapes |= {name: np.shape(field)[:1] for name, field in row.extra.items()}
        wanted = (len(row.tokens_S) if self.seq_len is None else self.seq_len,)
        problems = [
            f"{name} of shape {shape}, where {wanted} is wanted, which is (S,)"
            for name, shape in shapes.items()
            if shape != wanted
        ]
        if len(lengths) != 1 or np.sum(row.lengths) != wanted[0]:
            found = f"lengths of shape {lengths} that sum to {np.sum(row.lengths)}"
            problems.append(f"{found}, where one for each segment, {wanted[0]} in all, are wanted")
        if problems:
            samples = self._samples
            index = samples.index(number) if isinstance(samples, Shuffled) else number
            raise ValueError(f"{type(self.dataset).__name__}.row({index}): {problems[0]}")
        return row


_EVAL_SEED = 0
"""Seed of the rows of an evaluation. Runs that differ in train.seed are compared by their held-out
loss, so they are evaluated on the same rows."""


def eval_batches(
    dataset: Dataset, num_rows: int, micro_batch_size: int, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """Draw ``num_rows`` rows at random from ``dataset``, and yield one rank's share in batches.

    The rows are the same at every call and on any number of ranks. If the dataset has at most
    ``num_rows`` rows, all are drawn. Every batch is full, so that nothing compiles again. All ranks
    have the same number of batches, since all take part in each forward pass. Rows without targets
    fill up the last batches.
    """
    generator = np.random.Generator(np.random.PCG64(_EVAL_SEED))
    drawn = generator.choice(len(dataset), min(num_rows, len(dataset)), replace=False)
    filler = dataset.row(int(drawn[0]))
    filler = filler._replace(targets_S=np.full_like(filler.targets_S, IGNORE_INDEX))
    for first in range(0, len(drawn), world_size * micro_batch_size):
        mine = drawn[first + rank * micro_batch_size :][:micro_batch_size]
        rows = [dataset.row(int(index)) for index in mine]
        yield Batch.of(rows + [filler] * (micro_batch_size - len(rows)))
