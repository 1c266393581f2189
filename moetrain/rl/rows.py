"""Trajectories, the samples that they become, and the rows that samples are packed into.

A trajectory is the exchange between the policy and an environment, token by token. A checkpoint
keeps its tokens and how far it has come: when it is resumed, a new episode is told the same
actions, and the policy goes on from the same tokens.

Samples are fitted into rows uncut (:func:`moetrain.data.packing.best_fit`); the rest of a row is
padding. Position t of a sample reads token t and predicts token t + 1, so everything that is known
of a token lies one position before it, and the last token takes no room: a sample of n tokens has
n - 1 positions, the very ones that generation has read.

    samples   a0 a1 A2 A3 | b0 B1 B2      capitals: chosen by the policy      rows of 6
    tokens    a0 a1 a2 b0 b1  0           positions 0 1 2 0 1 0
    targets    . a2 a3 b1 b2  .           logprobs, advantages: of the targets

A position without a target is not trained: prompts, an environment's words, pads, and what
:func:`moetrain.rl.losses.corrected` masks. There is no other mask.

Left out on purpose: cutting a sample that is longer than a row.
Legend: B rows, S tokens of a row, n tokens of a sample, N samples, L MoE layers, K experts a token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike

from moetrain.data.loader import tensors_on
from moetrain.data.packing import IGNORE_INDEX, best_fit
from moetrain.models.transformer import Inputs

_PER_TOKEN = {
    "tokens": torch.int64,
    "is_action": torch.bool,
    "logprobs": torch.float64,
    "versions": torch.int64,
}
"""What trajectories know of each token, as a checkpoint has it."""


class Sample:
    """One trajectory to train on, n tokens."""

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
        """Make a sample of values in any form; None: log-probabilities and versions are 0.

        Raises ValueError: arrays differ in length, or n < 2.
        """
        self.tokens = np.array(tokens, np.int64)
        """int64 [n]."""
        n = len(self.tokens)
        self.is_action = np.array(is_action, bool)
        """bool [n]: chosen by the policy, and trained; the first token cannot be."""
        self.logprobs = np.array(np.zeros(n) if logprobs is None else logprobs, np.float32)
        """fp32 [n]: of each token when it was chosen, at the sampling temperature; 0 elsewhere."""
        versions = np.where(self.is_action, 0, -1) if versions is None else versions
        self.versions = np.array(versions, np.int64)
        """int64 [n]: the weights that chose each token, -1 where the policy did not."""
        self.advantage = np.array(advantage, np.float32)
        """fp32: one for all actions, or [n], one for each."""
        self.group = group
        """Number of the prompt."""
        self.routes = routes
        """int32 [n - 1, L, K]: the experts of every token but the last; None: not recorded."""
        self.targets = np.array(self.tokens[1:] if targets is None else targets, np.int64)
        """int64 [n - 1]: what every token but the last predicts; by default the token after it."""
        if n < 2:
            raise ValueError(f"Sample: {n} tokens; it takes two, of which one predicts the other")
        for name in ("is_action", "logprobs", "versions", "advantage"):
            values = getattr(self, name)
            if values.ndim and len(values) != n:
                raise ValueError(f"Sample: {len(values)} {name} of {n} tokens")
        if self.is_action[0]:
            raise ValueError("Sample: the first token is an action, and nothing predicts it")
        if routes is not None and len(routes) != n - 1:
            raise ValueError(f"Sample: routes of {len(routes)} tokens; {n - 1} were read")


@dataclass(eq=False)
class Trajectory:
    """One attempt at one task."""

    group: int
    """Number of the prompt in the run; below 0 for held-out prompts."""
    member: int
    """Number of the attempt within the group."""
    task: int
    seed: int
    """Seed of its sampling."""
    temperature: float
    reward: float = 0.0
    answers: int = 0
    """How often the environment has answered, the prompt included."""
    actions: list[tuple[int, int]] = field(default_factory=list)
    """Start and stop of each of the policy's turns in ``tokens``."""
    is_over: bool = False
    is_overlong: bool = False
    """Cut off at ``rl.max_tokens``, ``rl.max_turns`` or the end of a row."""
    fault: str | None = None
    """Why it failed, in a word to count by; None: it did not fail."""
    detail: str = ""
    """The same in a line."""
    tokens: list[int] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Where in ``tokens`` each segment but the first begins; it is read without those before."""
    routes: np.ndarray | None = None
    """int32 [tokens read up to the last turn, MoE layers, K], of all but each segment's last token;
    None: not asked for."""

    def extend(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
    ) -> None:
        """Append the policy's tokens or, without ``logprobs``, the environment's."""
        self.tokens += tokens
        self.is_action += [logprobs is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        self.versions += [-1] * len(tokens) if versions is None else versions

    @property
    def num_written(self) -> int:
        """Tokens that the policy has chosen."""
        return sum(self.is_action)

    @property
    def start(self) -> int:
        """Where the last segment begins."""
        return self.starts[-1] if self.starts else 0

    @property
    def turn_start(self) -> int:
        """Where the policy's last turn starts: behind the environment's last tokens.

        They may be before the turn before.
        """
        start = len(self.tokens) - self.is_action[::-1].index(False)
        return max([start, *(stop for _, stop in self.actions)])

    def keep_routes(self, routes: np.ndarray | None) -> None:
        """Take the experts of the last segment's tokens."""
        if self.routes is not None and routes is not None and self.starts:
            routes = np.concatenate([self.routes[: self.start - len(self.starts)], routes])
        self.routes = routes

    def samples(self, advantage: float) -> list[Sample]:
        """Return one sample for each segment, all with this advantage."""
        found, ends = [], [*self.starts, len(self.tokens)]
        for i, (start, stop) in enumerate(zip([0, *self.starts], ends, strict=True)):
            parts = (self.tokens, self.is_action, self.logprobs, self.versions)
            tokens, acts, logprobs, versions = (part[start:stop] for part in parts)
            routes = None if self.routes is None else self.routes[start - i : stop - i - 1]
            known = self.group, logprobs, versions, routes
            found.append(Sample(tokens, acts, advantage, *known))
        return found

    @staticmethod
    def to_state(
        trajectories: "Iterable[Trajectory]",
    ) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        """Return fields as JSON, and per-token values of all as tensors, for a checkpoint."""
        rows: list[dict[str, Any]]
        rows = [asdict(t) | {"length": len(t.tokens)} for t in trajectories]
        tensors = {
            name: torch.tensor([value for row in rows for value in row.pop(name)], dtype=dtype)
            for name, dtype in _PER_TOKEN.items()
        }
        for i, row in enumerate(rows):
            if (routes := row.pop("routes")) is not None:
                tensors[f"routes.{i}"] = torch.from_numpy(routes)
        return rows, tensors

    @classmethod
    def from_state(
        cls, rows: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]
    ) -> list[Self]:
        """Rebuild the trajectories that :meth:`to_state` was given."""
        found, start = [], 0
        for i, row in enumerate(rows):
            fields: dict[str, Any] = dict(row)
            stop = start + fields.pop("length")
            fields |= {name: tensors[name][start:stop].tolist() for name in _PER_TOKEN}
            fields["actions"] = [tuple(action) for action in fields["actions"]]
            if f"routes.{i}" in tensors:
                fields["routes"] = tensors[f"routes.{i}"].numpy()
            found.append(cls(**fields))
            start = stop
        return found


class _Place(NamedTuple):
    """The place of a sample, by its index among those packed, among a batch's B * S positions."""

    sample: int
    start: int
    length: int


class RolloutBatch(NamedTuple):
    """One :class:`~moetrain.train.objectives.MicroBatch` of packed samples, made on the CPU.

    Per-position tensors, but for tokens, positions and routes, describe the token that a position
    predicts. Those of numbers are fp32, those of ids, positions and versions int64.
    """

    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    """The next token where it is an action that is trained, else IGNORE_INDEX."""
    positions_BS: torch.Tensor
    """From 0 in each segment: a sample, or the pads at a row's end."""
    cu_seqlens: torch.Tensor
    """int32, from 0: each segment's end among the B * S positions."""
    is_pad_BS: torch.Tensor
    logprobs_BS: torch.Tensor
    """Of the rollout; 0 where there is no target."""
    advantages_BS: torch.Tensor
    versions_BS: torch.Tensor
    """Of the weights that chose the target; -1: the policy did not choose it."""
    places: tuple[_Place, ...]
    routes_BSLK: torch.Tensor | None = None
    """int32, the experts of each *input* token in the rollout, -1 where unknown."""
    proximal_BS: torch.Tensor | None = None
    """Log-probabilities under the trainer's weights at the start of the update; None: those of the
    rollout are that, bit for bit."""
    reference_BS: torch.Tensor | None = None
    """Log-probabilities under the reference policy, for the KL."""
    teacher_BS: torch.Tensor | None = None
    """Log-probabilities under the teacher, for its sampled divergence."""
    teacher_BS2K: torch.Tensor | None = None
    """The teacher's likeliest tokens, as fp32, and their log-probabilities."""
    weights_BS: torch.Tensor | None = None
    """Importance weights, 0 where they have masked a token; None: ones."""

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
        """Count tokens that are not pads. Waits for the device if the batch is there."""
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
        """Return the segment that each position is in, int64 [B * S]."""
        flat_T = torch.arange(self.tokens_BS.numel(), device=self.tokens_BS.device)
        return torch.searchsorted(self.cu_seqlens[1:].long(), flat_T, right=True)


def pack(
    samples: Sequence[Sample],
    seq_len: int,
    micro_batch_size: int,
    *,
    least: int = 1,
    parts: int = 1,
) -> list[RolloutBatch]:
    """Pack every sample once into micro-batches of ``micro_batch_size`` rows of ``seq_len``.

    Samples of several ``parts``, their groups, have so many rows each of one micro-batch, in order.

    Returns at least ``least``, the last of them empty: all ranks of an engine's call need the same
    number. ValueError: a sample is longer than a row and the token that it predicts last.
    """
    lengths_N = np.array([len(s.tokens) - 1 for s in samples], dtype=np.int64)
    for i in np.flatnonzero(lengths_N > seq_len):
        problem = f"sample {i} has {lengths_N[i] + 1} tokens"
        raise ValueError(f"pack: {problem}, and a row of {seq_len} takes {seq_len + 1}")
    rows_N = best_fit(lengths_N, seq_len)
    for part in range(parts if parts > 1 else 0):
        mine = [i for i, sample in enumerate(samples) if sample.group == part]
        fit = best_fit(lengths_N[mine], seq_len)
        assert fit.max(initial=0) < micro_batch_size  # else rows would be another part's
        rows_N[mine] = part * micro_batch_size + fit
    micro_batch_size *= parts
    fewest = -(-(rows_N.max(initial=-1) + 1) // micro_batch_size)
    num_rows = max(fewest, least) * micro_batch_size
    members = [np.flatnonzero(rows_N == row).tolist() for row in range(num_rows)]
    return [
        _batch(samples, members[first : first + micro_batch_size], seq_len)
        for first in range(0, num_rows, micro_batch_size)
    ]


def _batch(
    samples: Sequence[Sample], members: Sequence[Sequence[int]], seq_len: int
) -> RolloutBatch:
    """Build the batch in which row i holds the samples ``members[i]``."""
    size = len(members) * seq_len
    places, ends = [], [0]
    for row, indices in enumerate(members):
        at = row * seq_len
        for i in indices:
            places.append(_Place(i, at, len(samples[i].tokens) - 1))
            at += places[-1].length
            ends.append(at)
        if at < (row + 1) * seq_len:
            ends.append((row + 1) * seq_len)
    rows: dict[str, np.ndarray] = {
        "tokens_BS": np.zeros(size, np.int64),
        "targets_BS": np.full(size, IGNORE_INDEX),
        "positions_BS": np.arange(size) - np.repeat(ends[:-1], np.diff(ends)),
        "is_pad_BS": np.ones(size, bool),
        "logprobs_BS": np.zeros(size, np.float32),
        "advantages_BS": np.zeros(size, np.float32),
        "versions_BS": np.full(size, -1),
    }
    for i, start, length in places:
        sample, here = samples[i], slice(start, start + length)
        acts = sample.is_action[1:]
        rows["tokens_BS"][here] = sample.tokens[:-1]
        rows["targets_BS"][here] = np.where(acts, sample.targets, IGNORE_INDEX)
        rows["is_pad_BS"][here] = False
        rows["logprobs_BS"][here] = np.where(acts, sample.logprobs[1:], 0)
        rows["advantages_BS"][here] = np.broadcast_to(sample.advantage, length + 1)[1:]
        rows["versions_BS"][here] = sample.versions[1:]
        if sample.routes is not None:
            if "routes_BSLK" not in rows:
                rows["routes_BSLK"] = np.full((size, *sample.routes.shape[1:]), -1, np.int32)
            rows["routes_BSLK"][here] = sample.routes
    shape = len(members), seq_len
    tensors = {name: torch.from_numpy(row).unflatten(0, shape) for name, row in rows.items()}
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    return RolloutBatch(**tensors, cu_seqlens=cu_seqlens, places=tuple(places))


def unpack(batches: Sequence[RolloutBatch], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Take ``results`` [B, S] for all of :func:`pack`'s batches apart into one [n] a sample.

    Each token has the value of the position that predicts it, and the first token has 0.
    """
    found = {}
    for batch, result_BS in zip(batches, results, strict=True):
        flat = result_BS.flatten()
        for sample, start, length in batch.places:
            found[sample] = torch.cat([flat.new_zeros(1), flat[start : start + length]])
    return [found[i] for i in range(len(found))]
