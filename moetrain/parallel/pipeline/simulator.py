"""What a schedule takes, found by running it on paper: order, deadlock, time, bubble, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from moetrain.parallel.pipeline.schedules import Action, Schedule, Work


class ScheduleError(ValueError):
    """A schedule that cannot run: see the message."""


@dataclass(frozen=True)
class Timeline:
    """When every action runs, if each starts as soon as its rank and what it needs allow."""

    schedule: Schedule
    spans: Mapping[Action, tuple[float, float]]
    """Its start and end."""

    @property
    def makespan(self) -> float:
        """When the last action ends; the first starts at 0."""
        return max(end for _, end in self.spans.values())

    def busy(self, rank: int) -> float:
        """How long ``rank`` works."""
        spans = [self.spans[work.parts[0]] for work in self.schedule.actions[rank]]
        return sum(end - start for start, end in spans)

    @property
    def bubble(self) -> float:
        """The mean over ranks of the share of the time in which a rank idles."""
        ranks = self.schedule.num_ranks
        return 1 - sum(map(self.busy, range(ranks))) / (ranks * self.makespan)


class Times(Protocol):
    """How long things take; :class:`Costs`, or what was measured."""

    @property
    def communication(self) -> float:
        """From the end of an action until another rank has what it made."""
        ...

    def of(self, work: Work) -> float:
        """An action, or a pair."""
        ...


def run_on_paper(schedule: Schedule, costs: Times) -> Timeline:
    """Every action's time.

    Raises:
        ScheduleError: as :func:`check_order`; or ranks wait for each other for ever, and it names
            what each of them waits with.
    """
    check_order(schedule)
    spans: dict[Action, tuple[float, float]] = {}
    at, clock = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    waiting = set(range(schedule.num_ranks))
    while waiting:
        before = sum(at)
        for rank in sorted(waiting):
            actions = schedule.actions[rank]
            while at[rank] < len(actions):
                work = actions[at[rank]]
                needed = [other for part in work.parts for other in schedule.needs(part)]
                if any(other not in spans for other in needed):
                    break
                arrivals = [_arrival(schedule, rank, n, spans[n][1], costs) for n in needed]
                start = max([clock[rank], *arrivals])
                clock[rank] = start + costs.of(work)
                spans.update(dict.fromkeys(work.parts, (start, clock[rank])))
                at[rank] += 1
        waiting = {r for r in waiting if at[r] < len(schedule.actions[r])}
        if waiting and sum(at) == before:
            blocked = ", ".join(
                f"rank {r} at {schedule.actions[r][at[r]]}" for r in sorted(waiting)
            )
            raise ScheduleError(f"{schedule.name}: deadlock, with {blocked}")
    return Timeline(schedule, spans)


def _arrival(schedule: Schedule, rank: int, needed: Action, end: float, costs: Times) -> float:
    is_here = schedule.rank_of_stage[needed.stage] == rank
    return end if is_here else end + costs.communication


def check_order(schedule: Schedule) -> None:
    """Raise :class:`ScheduleError` unless every stage's rank, and no other, does all that is to be
    done to every micro-batch, once, each thing after what it needs of the same rank."""
    wanted = {"F", "B"} if schedule.gradient_kind == "B" else {"F", "I", "W"}
    if schedule.name == "forward":
        wanted = {"F"}
    done: set[Action] = set()
    for rank, actions in enumerate(schedule.actions):
        for work in actions:
            for action in work.parts:
                if action in done:
                    raise ScheduleError(f"{schedule.name}: {action} twice")
                if schedule.rank_of_stage[action.stage] != rank:
                    raise ScheduleError(f"{schedule.name}: {action} on rank {rank}, which lacks it")
                for other in schedule.needs(action):
                    if schedule.rank_of_stage[other.stage] == rank and other not in done:
                        raise ScheduleError(f"{schedule.name}: {work} before {other}")
            done.update(work.parts)
    everything = Counter(
        (kind, stage, k)
        for kind in wanted
        for stage in range(schedule.num_stages)
        for k in range(schedule.num_micro_batches)
    )
    if odd := everything.keys() ^ {tuple(action) for action in done}:
        raise ScheduleError(f"{schedule.name}: {len(odd)} actions missing or unasked")


def in_flight(schedule: Schedule, rank: int) -> list[int]:
    """After each action of ``rank``, of how many (stage, micro-batch) pairs it has activations.

    They are kept from the forward until the weights' gradients are there.
    """
    counts, held = [], 0
    for work in schedule.actions[rank]:
        for action in work.parts:  # of a pair the forward's come while the backward's are there
            held += {"F": 1, "I": 0}.get(action.kind, -1)
            counts.append(held)
    return counts
