"""Pipeline schedules as data: which rank runs what, in which order, with which messages.

A stage is a range of a model's blocks, and every rank has one or several. Worked example, 1f1b of 2
ranks and 3 micro-batches::

    rank 0   F0 F1    B0 F2    B1    B2
    rank 1      F0 B0 F1    B1 F2 B2

Rank r of p, with v stages of forward time f / v and backward time b / v, idles for (p-1)(f+b) / v
in each schedule. With m micro-batches, the schedules differ in the largest number of (stage,
micro-batch) pairs whose activations rank r keeps at once:

    gpipe             arXiv 1811.06965   m
    1f1b              arXiv 2104.04473   p-r                  v = 1
    interleaved_1f1b  arXiv 2104.04473   (v-1)p + 2(p-r) - 1  v > 1

Left out on purpose: schedules that split the backward (zero bubble), which compiled blocks do not
allow, and schedules that merge forwards with backwards. docs/log/pipeline.md has their results.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Self

from moetrain.config import ConfigError


class Action(NamedTuple):
    """The forward (F) or the backward (B) of one micro-batch in one stage.

    F needs the activations of the stage before, B the gradient that the stage after makes.
    """

    kind: Literal["F", "B"]
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """``F3.1`` is the forward of micro-batch 3 in stage 1."""
        return f"{self.kind}{self.micro_batch}.{self.stage}"

    @property
    def unit_time(self) -> float:
        """The time of the action in units of a forward; a backward takes two."""
        return 1.0 if self.kind == "F" else 2.0


class _Transfer(NamedTuple):
    """One message between two ranks: the result of action ``made``, for stage ``receiver``."""

    made: Action
    receiver: int
    source: int
    target: int


Step = Action | list[_Transfer]
"""An action of a rank, or the messages that the rank sends and receives at one time. All ranks have
the messages in the same order."""


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank."""

    name: str
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    """Each rank's actions, in order."""

    @classmethod
    def make(cls, name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> Self:
        """Make the schedule ``name`` of ``ranks``. Raises ConfigError, with what is possible."""
        kind = SCHEDULES[name]
        if kind.by_rounds and micro_batches % ranks:
            others = " or ".join(other for other, kind in SCHEDULES.items() if not kind.by_rounds)
            raise ConfigError(
                "parallel.pp_schedule",
                f"{micro_batches} micro-batches, but {name} needs a multiple of its {ranks} "
                f"ranks; use {others}, which take any number",
            )
        kind.check_stages(name, stages_per_rank)
        counts = ranks, stages_per_rank, micro_batches
        actions = tuple(tuple(kind.actions(rank, *counts)) for rank in range(ranks))
        return cls(name, tuple(range(ranks)) * stages_per_rank, actions)

    @classmethod
    def forward_only(cls, rank_of_stage: tuple[int, ...], micro_batches: int) -> Self:
        """Make the schedule of forwards alone: every stage runs each micro-batch in turn."""
        stages = list(enumerate(rank_of_stage))
        numbers = range(micro_batches)
        actions = tuple(
            tuple(Action("F", s, k) for k in numbers for s, owner in stages if owner == rank)
            for rank in range(max(rank_of_stage) + 1)
        )
        return cls("forward", rank_of_stage, actions)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    def needs(self, action: Action) -> list[Action]:
        """Return the actions that must be done before ``action``."""
        kind, stage, micro_batch = action
        if kind == "F":
            return [Action("F", stage - 1, micro_batch)] if stage else []
        own = Action("F", stage, micro_batch)
        is_last = stage == self.num_stages - 1
        return [own] if is_last else [own, Action("B", stage + 1, micro_batch)]

    def in_flight(self, rank: int) -> list[int]:
        """Count the (stage, micro-batch) pairs whose activations ``rank`` holds after each action.

        These are the pairs whose forward is done and whose backward is not.
        """
        changes = (1 if action.kind == "F" else -1 for action in self.actions[rank])
        return list(accumulate(changes))

    def simulate(
        self,
        time_of: Callable[[Action], float] = lambda action: action.unit_time,
        communication: float = 0.0,
    ) -> "_Timeline":
        """Return when every action runs, if each starts as soon as its rank and its inputs allow.

        Args:
            time_of: returns the time that an action takes, in any unit.
            communication: the time from an action's end until another rank has what it made.
        """
        times: dict[Action, tuple[float, float]] = {}
        position, now = [0] * self.num_ranks, [0.0] * self.num_ranks
        waiting = set(range(self.num_ranks))
        while waiting:
            before = sum(position)
            for rank in sorted(waiting):
                for action in self.actions[rank][position[rank] :]:
                    needed = self.needs(action)
                    if any(other not in times for other in needed):
                        break
                    for other in needed:
                        is_here = self.rank_of_stage[other.stage] == rank
                        arrival = times[other][1] + (0.0 if is_here else communication)
                        now[rank] = max(now[rank], arrival)
                    times[action] = now[rank], now[rank] + time_of(action)
                    now[rank] = times[action][1]
                    position[rank] += 1
            waiting = {r for r in waiting if position[r] < len(self.actions[r])}
            assert not waiting or sum(position) > before, f"{self.name}: deadlock at {position}"
        return _Timeline(self, times)

    def steps(self) -> list[list[Step]]:
        """Return every rank's actions and transfers, in an order in which ranks cannot deadlock.

        The order follows the times of :meth:`simulate`, whole numbers that all ranks compute alike.
        A result for a stage of another rank is sent at the time at which its action ends. All
        messages that a rank sends or receives at one time are one batch. A rank posts its batches
        in the order of time. The batch of the time at which an action ends comes right after that
        action.

        Ranks cannot deadlock. Suppose that some batches are never done, and take the earliest of
        them. The actions that made its messages began before its time, so they needed only earlier
        batches, which are done. So the senders post the batch. The receivers post it too, because
        everything before it in their order is earlier. This holds even if a batch blocks its rank
        until all of its messages have arrived.
        """
        times = self.simulate().times
        batches: list[dict[float, list[_Transfer]]] = [{} for _ in self.actions]
        for action, (_, end) in sorted(times.items(), key=lambda item: (item[1][1], item[0])):
            receiver = action.stage + (1 if action.kind == "F" else -1)
            if not 0 <= receiver < self.num_stages:
                continue
            source, target = (self.rank_of_stage[s] for s in (action.stage, receiver))
            if source != target:
                for rank in (source, target):
                    transfer = _Transfer(action, receiver, source, target)
                    batches[rank].setdefault(end, []).append(transfer)
        plans: list[list[Step]] = []
        for actions, mine in zip(self.actions, batches, strict=True):
            steps: list[tuple[float, int, Any]] = [(times[a][1], 0, a) for a in actions]
            steps += [(time, 1, found) for time, found in mine.items()]
            plans.append([step for _, _, step in sorted(steps, key=lambda item: item[:2])])
        return plans


@dataclass(frozen=True)
class _Timeline:
    """The times at which the actions of a schedule run."""

    schedule: Schedule
    times: Mapping[Action, tuple[float, float]]
    """Start and end of every action, in the order in which they were found."""

    @property
    def makespan(self) -> float:
        """The time at which the last action ends; the first starts at 0."""
        return max(end for _, end in self.times.values())

    @property
    def bubble(self) -> float:
        """The share of the time in which a rank idles, averaged over ranks."""
        busy = sum(end - start for start, end in self.times.values())
        return 1 - busy / (self.schedule.num_ranks * self.makespan)


# ---- the kinds of schedules ----------------------------------------------------------------------


class _ScheduleKind(NamedTuple):
    """Makes the schedules of one name, for any number of ranks."""

    fills: bool = False
    """True: all forwards come before the first backward."""
    stages_per_rank: range = range(1, 2)
    """The numbers of stages that a rank can have."""
    by_rounds: bool = False
    """True: the number of micro-batches must be a multiple of the ranks."""

    def actions(self, r: int, p: int, v: int, m: int) -> Iterator[Action]:
        """Yield the actions of rank r of p, with v stages, for m micro-batches.

        Micro-batches go through the rank's stages in groups of p: some forwards first, then
        forwards and backwards alternately, then the backwards that are left.
        """
        rounds = [(k // (v * p) * p + k % p, k // p % v) for k in range(v * m)]
        forwards = [Action("F", r + chunk * p, k) for k, chunk in rounds]
        warmup = p - r - 1 if v == 1 else 2 * (p - r - 1) + (v - 1) * p
        warmup = len(forwards) if self.fills else warmup
        yield from forwards[:warmup]
        for i, (k, chunk) in enumerate(rounds, warmup):
            yield from forwards[i : i + 1]
            yield Action("B", r + (v - 1 - chunk) * p, k)

    def check_stages(self, name: str, stages: int) -> None:
        low, high = self.stages_per_rank[0], self.stages_per_rank[-1]
        if not low <= stages <= high:
            wanted = str(low) if low == high else f"{low} to {high}"
            problem = f"{stages} stages a rank, but parallel.pp_schedule {name} takes {wanted}"
            raise ConfigError("parallel.pp_stages", f"{problem}; set auto")


SCHEDULES: Mapping[str, _ScheduleKind] = {
    "gpipe": _ScheduleKind(fills=True),
    "1f1b": _ScheduleKind(),
    "interleaved_1f1b": _ScheduleKind(stages_per_rank=range(2, 65), by_rounds=True),
}
