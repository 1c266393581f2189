"""Samples whose chosen tokens are trained, packed into rows and dealt to ranks.

Reinforcement learning makes samples from trajectories, and the service of jobs makes them from its
clients' texts. Samples are packed into rows without cutting them
(:func:`moetrain.data.packing.best_fit`), and the rest of a row is padding. Position t of a sample
reads token t and predicts token t + 1. So the log-probability, advantage and version of a token are
stored at the position before it. A sample of n tokens takes n - 1 positions, one for each token
that generation has read.

    samples   a0 a1 A2 A3 | b0 B1 B2      capitals: actions                   rows of 6
    tokens    a0 a1 a2 b0 b1  0           positions 0 1 2 0 1 0
    targets    . a2 a3 b1 b2  .           logprobs, advantages: of the targets

A position without a target is not trained: prompts, an environment's tokens, pads, and tokens that
:func:`moetrain.rl.losses.corrected` masks. There is no other mask.

Left out on purpose: cutting a sample that is longer than a row.
Legend: B rows, S tokens of a row, n tokens of a sample, N samples, L MoE layers, K experts a token.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from moetrain.data.loader import tensors_on
from moetrain.data.packing import IGNORE_INDEX, best_fit
from moetrain.models.transformer import Inputs
from moetrain.train.engine import Engine

_T = TypeVar("_T")


class Sample:
    """A text of n tokens. The model is trained on some of them."""

    def __init__(
        self,
        tokens: ArrayLike,
        is_action: ArrayLike,
        advantage: ArrayLike,
        group: int,
        logprobs: ArrayLike | None = None,
        versions: ArrayLike | None = None,
        routes: np.ndarray | None = None,
        targets: ArrayLike | None = None,
    ) -> None:
        """Convert the values to arrays.

        Without ``logprobs`` they are 0. Without ``versions`` actions have version 0, and other
        tokens -1.

        Raises ValueError: arrays differ in length, n < 2, or the first token is an action.
        """
        self.tokens = np.array(tokens, np.int64)
        """int64 [n]."""
        n = len(self.tokens)
        self.is_action = np.array(is_action, bool)
        """bool [n]: True where the policy chose the token. Only such tokens are trained. The first
        is False."""
        self.logprobs = np.array(np.zeros(n) if logprobs is None else logprobs, np.float32)
        """fp32 [n], nats: log-probability of each action when it was sampled, at the sampling
        temperature; 0 elsewhere."""
        versions = np.where(self.is_action, 0, -1) if versions is None else versions
        self.versions = np.array(versions, np.int64)
        """int64 [n]: version of the weights that chose each token; -1 where the policy did not."""
        self.advantage = np.array(advantage, np.float32)
        """fp32: one value for all actions, or [n], one for each token."""
        self.group = group
        """Number of the prompt."""
        self.routes = routes
        """int32 [n - 1, L, K]: the experts of every token but the last; None: not recorded."""
        self.targets = np.array(self.tokens[1:] if targets is None else targets, np.int64)
        """int64 [n - 1]: the token that each token but the last should predict; by default the
        next one."""
        if n < 2:
            raise ValueError(
                f"Sample: {n} tokens, but at least two are needed, the first to predict the second"
            )
        for name in ("is_action", "logprobs", "versions", "advantage"):
            values = getattr(self, name)
            if values.ndim and len(values) != n:
                raise ValueError(f"Sample: {name} has {len(values)} values for {n} tokens")
        if self.is_action[0]:
            raise ValueError("Sample: the first token is an action, but nothing predicts it")
        if routes is not None and len(routes) != n - 1:
            raise ValueError(
                f"Sample: routes has {len(routes)} entries, but {n - 1} tokens were read"
            )


class Span(NamedTuple):
    """The place of a sample in a batch, among its B * S positions."""

    sample: int
    """Index of the sample among those that were packed."""
    start: int
    length: int


class RolloutBatch(NamedTuple):
    """One :class:`~moetrain.train.objectives.MicroBatch` of packed samples, made on the CPU.

    Per-position tensors describe the token that a position predicts, except tokens, positions, pads
    and routes, which describe the position itself. Floating-point tensors are fp32; token ids,
    positions and versions are int64.
    """

    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    """The next token if it is trained, else IGNORE_INDEX."""
    positions_BS: torch.Tensor
    """Counted from 0 in each segment: a sample, or the pads at a row's end."""
    cu_seqlens: torch.Tensor
    """int32 [segments + 1]: 0, then the end of each segment among the B * S positions."""
    is_pad_BS: torch.Tensor
    logprobs_BS: torch.Tensor
    """Log-probabilities of the rollout, nats; 0 where there is no target."""
    advantages_BS: torch.Tensor
    versions_BS: torch.Tensor
    """Version of the weights that chose the target; -1: the policy did not choose it."""
    spans: tuple[Span, ...]
    routes_BSLK: torch.Tensor | None = None
    """int32: the experts of each *input* token in the rollout, -1 where unknown."""
    proximal_BS: torch.Tensor | None = None
    """Log-probabilities under the trainer's weights at the start of the update; None: they equal
    the rollout's, bit for bit."""
    reference_BS: torch.Tensor | None = None
    """Log-probabilities under the reference policy, for the KL."""
    teacher_BS: torch.Tensor | None = None
    """Log-probabilities under the teacher, for its sampled divergence."""
    teacher_BS2K: torch.Tensor | None = None
    """fp32 [B, S, 2, K]: ids of the teacher's K likeliest tokens, and their log-probabilities."""
    weights_BS: torch.Tensor | None = None
    """Importance weights, 0 where ``rl.mask`` left out a token; None: ones."""

    def to(self, device: torch.device) -> Self:
        return self._replace(**tensors_on(device, self._asdict()))

    @property
    def inputs(self) -> Inputs:
        return Inputs(
            self.tokens_BS,
            self.positions_BS,
            cu_seqlens=self.cu_seqlens,
            is_pad_BS=self.is_pad_BS,
            routes_BSLK=self.routes_BSLK,
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are not pads. Waits for the device if the batch is there."""
        return self.is_pad_BS.numel() - int(self.is_pad_BS.sum())

    def sums_over_samples(self, x_BS: torch.Tensor) -> torch.Tensor:
        """Sum ``x_BS`` over segments; returns [B, S], at each position the sum of its segment."""
        segments_T, x_T = self._segments(), x_BS.flatten()
        sums_N = x_T.new_zeros(self.cu_seqlens.numel() - 1).index_add(0, segments_T, x_T)
        return sums_N[segments_T].view_as(x_BS)

    def num_trained_samples(self) -> int:
        """Count samples with at least one target. Waits for the device if the batch is there."""
        return self._segments()[self.targets_BS.flatten() != IGNORE_INDEX].unique().numel()

    def _segments(self) -> torch.Tensor:
        """Return the segment of each position, int64 [B * S]."""
        flat_T = torch.arange(self.tokens_BS.numel(), device=self.tokens_BS.device)
        return torch.searchsorted(self.cu_seqlens[1:].long(), flat_T, right=True)


def pack(
    samples: Sequence[Sample],
    seq_len: int,
    micro_batch_size: int,
    *,
    min_batches: int = 1,
    num_parts: int = 1,
) -> list[RolloutBatch]:
    """Pack every sample once into micro-batches of rows of ``seq_len`` tokens.

    Args:
        micro_batch_size: rows of a micro-batch, or of one of its parts.
        min_batches: the least number of micro-batches; the last ones may be empty. All ranks of an
            engine's call need the same number.
        num_parts: above 1 there is one micro-batch, and the samples of group i lie in its i-th
            part of ``micro_batch_size`` rows.

    Raises ValueError: a sample has more than ``seq_len + 1`` tokens.
    """
    lengths_N = np.array([len(s.tokens) - 1 for s in samples], dtype=np.int64)
    for i in np.flatnonzero(lengths_N > seq_len):
        raise ValueError(
            f"pack: sample {i} has {lengths_N[i] + 1} tokens, and a row of {seq_len} takes "
            f"{seq_len + 1}"
        )
    rows_N = best_fit(lengths_N, seq_len)
    for part in range(num_parts if num_parts > 1 else 0):
        members = [i for i, sample in enumerate(samples) if sample.group == part]
        fit = best_fit(lengths_N[members], seq_len)
        assert fit.max(initial=0) < micro_batch_size  # else rows would be another part's
        rows_N[members] = part * micro_batch_size + fit
    micro_batch_size *= num_parts
    needed = -(-(rows_N.max(initial=-1) + 1) // micro_batch_size)
    num_rows = max(needed, min_batches) * micro_batch_size
    rows = [np.flatnonzero(rows_N == row).tolist() for row in range(num_rows)]
    return [
        _batch(samples, rows[first : first + micro_batch_size], seq_len)
        for first in range(0, num_rows, micro_batch_size)
    ]


def _batch(samples: Sequence[Sample], rows: Sequence[Sequence[int]], seq_len: int) -> RolloutBatch:
    """Build the batch in which row i holds the samples with the indices ``rows[i]``."""
    size = len(rows) * seq_len
    spans, ends = [], [0]
    for row, indices in enumerate(rows):
        end = row * seq_len
        for i in indices:
            spans.append(Span(i, end, len(samples[i].tokens) - 1))
            end += spans[-1].length
            ends.append(end)
        if end < (row + 1) * seq_len:
            ends.append((row + 1) * seq_len)
    values: dict[str, np.ndarray] = {
        "tokens_BS": np.zeros(size, np.int64),
        "targets_BS": np.full(size, IGNORE_INDEX),
        "positions_BS": np.arange(size) - np.repeat(ends[:-1], np.diff(ends)),
        "is_pad_BS": np.ones(size, bool),
        "logprobs_BS": np.zeros(size, np.float32),
        "advantages_BS": np.zeros(size, np.float32),
        "versions_BS": np.full(size, -1),
    }
    for i, start, length in spans:
        sample, here = samples[i], slice(start, start + length)
        acts = sample.is_action[1:]
        values["tokens_BS"][here] = sample.tokens[:-1]
        values["targets_BS"][here] = np.where(acts, sample.targets, IGNORE_INDEX)
        values["is_pad_BS"][here] = False
        values["logprobs_BS"][here] = np.where(acts, sample.logprobs[1:], 0)
        values["advantages_BS"][here] = np.broadcast_to(sample.advantage, length + 1)[1:]
        values["versions_BS"][here] = sample.versions[1:]
        if sample.routes is not None:
            if "routes_BSLK" not in values:
                values["routes_BSLK"] = np.full((size, *sample.routes.shape[1:]), -1, np.int32)
            values["routes_BSLK"][here] = sample.routes
    shape = len(rows), seq_len
    tensors = {name: torch.from_numpy(x).unflatten(0, shape) for name, x in values.items()}
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    return RolloutBatch(**tensors, cu_seqlens=cu_seqlens, spans=tuple(spans))


def unpack(batches: Sequence[RolloutBatch], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split the results of :func:`pack`'s batches, [B, S] each, into one tensor [n] a sample.

    Each token gets the value of the position that predicts it. The first token gets 0.
    """
    found = {}
    for batch, result_BS in zip(batches, results, strict=True):
        flat = result_BS.flatten()
        for sample, start, length in batch.spans:
            found[sample] = torch.cat([flat.new_zeros(1), flat[start : start + length]])
    return [found[i] for i in range(len(found))]


class DealtSamples:
    """The samples of a global batch, dealt to ranks and packed.

    Attributes:
        batches: this rank's share; every rank has the same number of batches.
    """

    def __init__(
        self,
        engine: Engine,
        samples: Sequence[Sample],
        *,
        order: Iterable[int],
        seq_len: int,
        micro_batch_size: int,
        num_parts: int = 1,
    ) -> None:
        """Pack this rank's share as :func:`pack` does. Collective.

        Args:
            samples: those of all ranks.
            order: the indices of ``samples``. In this order, data ranks take one sample each in
                turn.
        """
        self.world = engine.world
        self._mine = list(order)[self.world.data_rank :: self.world.dims.data_ranks]
        mine = [samples[i] for i in self._mine]
        self.batches = pack(mine, seq_len, micro_batch_size, num_parts=num_parts)
        number = max(self.world.gather(len(self.batches)))
        number += -number % engine.stages.plan.batch_multiple
        if len(self.batches) < number:
            self.batches = pack(
                mine, seq_len, micro_batch_size, min_batches=number, num_parts=num_parts
            )

    def by_sample(
        self, results: Sequence[torch.Tensor], value: Callable[[torch.Tensor], _T]
    ) -> list[_T]:
        """Return ``value(part)`` for each sample of all ranks, in the order of samples. Collective.

        ``results`` has a tensor [B, S] for each of this rank's batches. A sample's part of it is
        the tensor [n] that :func:`unpack` returns.
        """
        values = map(value, unpack(self.batches, results))
        parts = self.world.gather(dict(zip(self._mine, values, strict=True)))
        known = {i: found for part in parts for i, found in part.items()}
        return [known[i] for i in range(len(known))]
