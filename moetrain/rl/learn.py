"""Updates of a step: samples are dealt to ranks, packed into rows, scored and learned.

Every rank is given all samples and takes its share of them; every denominator is the global
batch's, so the split among ranks does not change the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from moetrain.config import Config
from moetrain.data.packing import IGNORE_INDEX
from moetrain.models.moe import RoutingStats
from moetrain.parallel.layout import Sliceable, TensorSlice
from moetrain.parallel.world import World
from moetrain.rl.losses import PolicyObjective, TokenStats, corrected, kl_estimate, score
from moetrain.rl.rows import RolloutBatch, Sample, pack, unpack
from moetrain.train.engine import Engine
from moetrain.train.objectives import Objective

_T = TypeVar("_T")


def gather(world: World, mine: _T) -> list[_T]:
    """Return every rank's object, by rank. Collective; waits."""
    if world.size == 1:
        return [mine]
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, mine)
    return found


def packed(engine: Engine, mine: Sequence[Sample], seq_len: int, rows: int) -> list[RolloutBatch]:
    """Pack this rank's samples into as many micro-batches as every rank has. Collective.

    Args:
        rows: of a micro-batch, each of ``seq_len`` tokens.
    """
    batches = pack(mine, seq_len, rows)
    most = max(gather(engine.world, len(batches)))
    most += -most % engine.batch_multiple
    return batches if len(batches) == most else pack(mine, seq_len, rows, least=most)


def by_sample(world: World, mine: Sequence[int], values: Sequence[_T]) -> list[_T]:
    """Return the values of all ranks' samples in order. Collective.

    Args:
        mine: the indices of this rank's samples; together the ranks have each once.
    """
    parts = gather(world, dict(zip(mine, values, strict=True)))
    known = {i: value for part in parts for i, value in part.items()}
    return [known[i] for i in range(len(known))]


class Learned(NamedTuple):
    """The result of one step's updates."""

    skipped: torch.Tensor
    """0-d bool, on the device: whether an update was skipped."""
    routing: RoutingStats | None
    """This rank's routing; None: there is no MoE layer, or nothing was learned."""
    row: dict[str, float]
    """Figures for the metrics."""


class Learner:
    """Updates an engine's weights on samples."""

    def __init__(self, config: Config, engine: Engine) -> None:
        self.config, self.engine, self.world = config, engine, engine.world
        self.policy = PolicyObjective.of(config, engine.arch)
        self.reference: dict[str, torch.Tensor] = {}
        """This rank's part of the weights that the policy is kept near to, in host memory."""
        self.compared = self.differing = 0
        """Tokens of all ranks that the trainer scored with the very weights that generated them,
        and those of them whose log-probability differs from generation's by a bit or more."""

    def rows_of(self, samples: Sequence[Sample]) -> list[RolloutBatch]:
        """Pack this rank's share of ``samples``. Collective."""
        return self._packed([samples[i] for i in self._mine(samples)])

    def _mine(self, samples: Sequence[Sample]) -> list[int]:
        """Return the indices of this rank's samples: like shares of long and of short ones."""
        longest_first = sorted(range(len(samples)), key=lambda i: -len(samples[i].tokens))
        return longest_first[self.world.data_rank :: self.world.dims.data_ranks]

    def _packed(self, mine: Sequence[Sample]) -> list[RolloutBatch]:
        return packed(
            self.engine, mine, self.config.data.seq_len, self.config.train.micro_batch_size
        )

    def update(
        self, batches: Sequence[RolloutBatch], objective: Objective[RolloutBatch], lr: float
    ) -> Learned:
        """Make one update by ``objective``, whose terms become the metrics."""
        totals = self.engine.forward_backward(batches, objective)
        outcome = self.engine.step(lr)
        # The host waits here, once an update, for the figures that are logged.
        row = {name: term.item() for name, term in totals.terms.items()}
        row["grad_norm"] = outcome.grad_norm.item()
        return Learned(outcome.skipped, totals.routing, row)

    def learn(self, samples: Sequence[Sample], version: int, lr: float) -> Learned:
        """Make the policy's updates on ``samples``, all ranks' together, at least one.

        Args:
            version: number of the weights as they are.
        """
        settings = self.config.rl
        numbers = sorted({sample.group for sample in samples})
        groups = [set(part) for part in np.array_split(numbers, settings.updates_per_rollout)]
        updates = [
            self.rows_of([sample for sample in samples if sample.group in some])
            for some in groups
            if some
        ]
        batches = [batch for update in updates for batch in update]
        batches, row = self._scored(batches, version)
        if settings.kl_coef:
            with self.at_reference():
                stats = score(self.engine, batches, settings.temperature)
            pairs = zip(batches, stats, strict=True)
            batches = [b._replace(reference_BS=found.logprob) for b, found in pairs]
        rest = iter(batches)
        parts = [list(islice(rest, len(update))) for update in updates]
        done = [self.update(part, self.policy, lr) for part in parts]
        rows = [learned.row for learned in done]
        # An update's own mismatch holds what updates have moved, in this step or before.
        names = [name for name in rows[0] if name != "mismatch"]
        row |= {name: sum(r[name] for r in rows) / len(rows) for name in names}
        routings = [learned.routing for learned in done if learned.routing is not None]
        return Learned(
            torch.stack([learned.skipped for learned in done]).any(),
            RoutingStats.together(routings) if routings else None,
            row,
        )

    def _scored(
        self, batches: list[RolloutBatch], version: int
    ) -> tuple[list[RolloutBatch], dict[str, float]]:
        """Add the trainer's log-probabilities where the loss needs others than generation's.

        Also returns how far the two are apart on tokens that these very weights have chosen. The
        first batch of every rank is scored in any case. Where all of its tokens have the same bits
        in training and in generation, and no batch has a token of earlier weights, the other
        batches have them too, and are not scored.
        """
        settings = self.config.rl
        stats = score(self.engine, batches[:1], settings.temperature)
        seen = self._compare(batches[:1], stats, version)
        old = sum(int(((b.versions_BS >= 0) & (b.versions_BS != version)).sum()) for b in batches)
        differs = self.world.sum_rows(seen + torch.tensor([0, old, 0], device=seen.device))[1] > 0
        if differs and (settings.ratio == "proximal" or settings.importance_of != "none"):
            rest = score(self.engine, batches[1:], settings.temperature)
            seen += self._compare(batches[1:], rest, version)
            proximal = [found.logprob for found in (*stats, *rest)]
            batches = corrected(batches, proximal, settings)
        apart, differing, number = self.world.sum_rows(seen).tolist()
        self.compared += int(number)
        self.differing += int(differing)
        return batches, (
            {"mismatch": apart / number, "mismatch_share": differing / number} if number else {}
        )

    def _compare(
        self, batches: Sequence[RolloutBatch], stats: Sequence[TokenStats], version: int
    ) -> torch.Tensor:
        """Return k3 summed over tokens of ``version``, how many differ, and how many there are."""
        sums = torch.zeros(3, dtype=torch.float64)
        for batch, found in zip(batches, stats, strict=True):
            same_BS = (batch.targets_BS != IGNORE_INDEX) & (batch.versions_BS == version)
            mine, theirs = found.logprob[same_BS], batch.logprobs_BS[same_BS]
            apart = kl_estimate("k3", theirs.double(), mine.double()).sum()
            sums += torch.stack([apart, (mine != theirs).double().sum(), same_BS.double().sum()])
        return sums.to(self.world.device)

    # ---- the reference -------------------------------------------------------------------------

    def kl_sums(self, samples: Sequence[Sample]) -> list[float]:
        """Estimate each sample's KL from the reference over its actions. Collective."""
        settings, mine = self.config.rl, self._mine(samples)
        batches = self._packed([samples[i] for i in mine])
        with self.at_reference():
            stats = score(self.engine, batches, settings.temperature)
        kls = [
            torch.where(
                batch.targets_BS != IGNORE_INDEX,
                kl_estimate(settings.kl, batch.logprobs_BS, found.logprob),
                0,
            )
            for batch, found in zip(batches, stats, strict=True)
        ]
        return by_sample(self.world, mine, [kl.sum().item() for kl in unpack(batches, kls)])

    def keep_reference(self) -> None:
        """Make the weights as they are now the reference."""
        self.reference = {k: v.to("cpu", copy=True) for k, v in self._values().items()}

    @contextmanager
    def at_reference(self) -> Iterator[None]:
        """Give the engine the reference's weights inside."""
        with self._restored() as values:
            self.engine.before_change()
            _copy(self.reference, values)
            yield

    def reference_state(self) -> dict[str, TensorSlice]:
        """Return this rank's parts of the reference, for a checkpoint."""
        parts = self.engine.state()["model"]
        return {k: part._replace(tensor=self.reference[k]) for k, part in parts.items()}

    def load_reference(self, state: Mapping[str, Sliceable]) -> None:
        """Load the reference from a checkpoint; the engine's weights stay as they are."""
        with self._restored():
            self.engine.load_state({"model": state})
            self.keep_reference()

    @contextmanager
    def _restored(self) -> Iterator[dict[str, torch.Tensor]]:
        """Put the engine's weights back as they are now; yields what changes inside."""
        values = self._values()
        now = {name: value.to("cpu", copy=True) for name, value in values.items()}
        try:
            yield values
        finally:
            _copy(now, values)

    def _values(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of everything that changes and makes the model's output."""
        self.engine.fsdp.settle()
        members = self.engine.fsdp.members.items()
        trained = {name: member.local for name, member in members if member.rule.trainable}
        return trained | dict(self.engine.model.named_buffers())


@torch.no_grad()
def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    for name, value in target.items():
        value.copy_(source[name])
