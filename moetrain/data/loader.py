"""Rows to batches, in an order that one integer decides.

The loader's whole state is ``sample_index``: how many rows the run has consumed over all ranks.
Sample g is row ``permutation(seed, g // n)[g % n]`` of a dataset of n rows, so a resumed run sees
the batches it would have seen, and the rows of a step do not depend on the number of ranks.

Left out on purpose: worker processes, prefetching and pinned memory. A row is a slice of a
memory-mapped file; a step's rows take microseconds each.
Shapes: B rows, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from moetrain.data.packing import IGNORE_INDEX, Dataset, Row
from moetrain.models.transformer import Inputs


class Batch(NamedTuple):
    """One micro-batch, on the CPU."""

    tokens_BS: torch.Tensor
    """int64."""
    targets_BS: torch.Tensor
    """int64, the token each position predicts, or IGNORE_INDEX."""
    positions_BS: torch.Tensor | None
    """int64, from 0 in each segment; None: every row is one segment."""
    cu_seqlens: torch.Tensor
    """[num_segments + 1] int32: 0, each segment's end in the flattened B * S tokens, ..., B * S.
    A segment is the part of one document that lies in one row."""
    is_pad_BS: torch.Tensor | None = None
    """bool, what only fills up a row; None: nothing does, in any batch of this dataset. A pad lies
    in the segment before it and has no target."""

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``, without waiting for the copy."""
        return self._replace(**tensors_on(device, self._asdict()))

    @property
    def inputs(self) -> Inputs:
        """What the model sees of it."""
        return Inputs(self.tokens_BS, self.positions_BS, self.cu_seqlens, self.is_pad_BS)

    @property
    def num_tokens(self) -> int:
        """Tokens that are no pads. Waits for the device, once the batch is there."""
        return self.tokens_BS.numel() - int(0 if self.is_pad_BS is None else self.is_pad_BS.sum())


def tensors_on(device: torch.device, fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of ``fields`` on ``device``, by name, without waiting for the copies."""
    tensors = {name: x for name, x in fields.items() if isinstance(x, torch.Tensor)}
    if device.type == "cuda":
        tensors = {name: x.pin_memory() for name, x in tensors.items()}
    return {name: x.to(device, non_blocking=True) for name, x in tensors.items()}


@dataclass
class Loader:
    """One rank's micro-batches, step after step, without end.

    ``rank`` of ``world_size`` data-parallel ranks; both batch sizes count rows.
    """

    dataset: Dataset
    global_batch_size: int
    micro_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    sample_index: int = 0
    """Rows consumed so far by all ranks. Set it to resume."""
    seq_len: int | None = None
    """Tokens that every row has to have; None: as many as its own first array."""
    before_batch: Callable[[], None] = lambda: None
    """Called before each micro-batch is made; what it raises leaves the loader as it was."""

    def __post_init__(self) -> None:
        # moetrain.parallel.world.plan_world saw to it.
        assert self.global_batch_size % (self.micro_batch_size * self.world_size) == 0
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next optimizer step.

        Number k of all ranks together is the step's k-th part in order: of 8 rows, 2 ranks and
        micro-batches of 2, rank 1 has rows 2 and 3, then 6 and 7.

        Raises:
            ValueError: the dataset gives a row of other shapes than :class:`Row` has.
        """
        size, end = self.micro_batch_size, self.sample_index + self.global_batch_size
        batches = []
        for first in range(self.sample_index, end, size)[self.rank :: self.world_size]:
            self.before_batch()
            batches.append(collate([self._sample(i) for i in range(first, first + size)]))
        self.sample_index = end
        return batches

    def _sample(self, sample: int) -> Row:
        epoch, index = divmod(sample, len(self.dataset))
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._epoch, self._order = epoch, generator.permutation(len(self.dataset))
        row = self.dataset.row(int(self._order[index]))
        check_row(row, self.seq_len, f"{type(self.dataset).__name__}.row({self._order[index]})")
        return row


EVAL_SEED = 0
"""Draws the rows of an evaluation. A constant: runs that differ in train.seed are compared by their
held-out loss, so all of them are evaluated on the same rows."""


def eval_batches(
    dataset: Dataset, num_rows: int, micro_batch_size: int, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """One data-parallel rank's share of ``num_rows`` rows drawn at random over all of ``dataset``.

    The rows are the same at every call and however they are shared out (all of them, if there are
    no more). Every batch is whole and every rank has as many, since all take part in each forward
    pass and nothing should compile again: what is missing are rows without targets.
    """
    generator = np.random.Generator(np.random.PCG64(EVAL_SEED))
    drawn = generator.choice(len(dataset), min(num_rows, len(dataset)), replace=False)
    filler = dataset.row(int(drawn[0]))
    filler = filler._replace(targets_S=np.full_like(filler.targets_S, IGNORE_INDEX))
    for first in range(0, len(drawn), world_size * micro_batch_size):
        mine = drawn[first + rank * micro_batch_size :][:micro_batch_size]
        rows = [dataset.row(int(index)) for index in mine]
        yield collate(rows + [filler] * (micro_batch_size - len(rows)))


def check_row(row: Row, seq_len: int | None, what: str) -> None:
    """Raise ValueError unless ``row``, which ``what`` gave, has the shapes of :class:`Row`."""
    shapes = {name: np.shape(x) for name, x in row._asdict().items() if x is not None}
    lengths = shapes.pop("lengths")
    wanted = (len(row.tokens_S) if seq_len is None else seq_len,)
    for name, shape in shapes.items():
        if shape != wanted:
            raise ValueError(f"{what}: {name} of shape {shape}, where {wanted} is wanted (S,)")
    if len(lengths) != 1 or np.sum(row.lengths) != wanted[0]:
        problem = f"lengths of shape {lengths} that sum to {np.sum(row.lengths)}"
        raise ValueError(f"{what}: {problem}, where one of each segment, {wanted[0]} in all, are")


def collate(rows: Sequence[Row]) -> Batch:
    """One micro-batch of ``rows``, in their order."""
    lengths = np.concatenate([row.lengths for row in rows])
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = [row.positions_S for row in rows if row.positions_S is not None]
    is_pad = [row.is_pad_S for row in rows if row.is_pad_S is not None]
    return Batch(
        torch.from_numpy(np.stack([row.tokens_S for row in rows])),
        torch.from_numpy(np.stack([row.targets_S for row in rows])),
        torch.from_numpy(np.stack(positions)) if positions else None,
        torch.from_numpy(cu_seqlens),
        torch.from_numpy(np.stack(is_pad)) if is_pad else None,
    )
