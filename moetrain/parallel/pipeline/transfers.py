"""What every rank of a schedule sends and receives, and when: one rule, by which none can deadlock.

What an action makes for a stage of another rank leaves when the action ends, on a clock that all
ranks know: the schedule run on paper, with whole numbers as costs. All that leaves or arrives at
one time is one batch of a rank, and every rank posts its batches in the order of time:

    those of its past, then an action; the batch of the moment in which the action ends comes after

No rank can wait for ever. Take the earliest batch that does. Each of its senders made what it sends
with an action that began before, for which it needed earlier batches alone; these are done. So its
senders have posted it, or are about to, and its receivers have done only earlier things. This holds
even if a batch blocks its rank until all of it is done, which is more than anybody asks: what is
received is waited for where it is needed, and what is sent at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moetrain.parallel.pipeline.schedules import Action, Costs, Schedule, Work
from moetrain.parallel.pipeline.simulator import run_on_paper

CLOCK = Costs(1, 1, 1)


class Transfer(NamedTuple):
    """One message: what ``made`` it gives to the stage ``receiver``."""

    made: Action
    receiver: int
    source: int
    """Rank."""
    target: int
    """Rank."""


class Transfers(NamedTuple):
    """What a rank sends and receives at one time, in one order on all ranks."""

    time: float
    transfers: tuple[Transfer, ...]


Step = Work | Transfers


def programs(schedule: Schedule) -> list[list[Step]]:
    """For every rank its actions and batches, in order."""
    spans = run_on_paper(schedule, CLOCK).spans
    batches: list[dict[float, list[Transfer]]] = [{} for _ in schedule.actions]
    for action, (_, end) in sorted(spans.items(), key=lambda item: (item[1][1], item[0])):
        receiver = schedule.receiver(action)
        if receiver is None:
            continue
        source, target = (schedule.rank_of_stage[s] for s in (action.stage, receiver))
        if source != target:
            for rank in (source, target):
                transfer = Transfer(action, receiver, source, target)
                batches[rank].setdefault(end, []).append(transfer)
    return [
        _in_order(actions, spans, mine)
        for actions, mine in zip(schedule.actions, batches, strict=True)
    ]


def _in_order(
    actions: tuple[Work, ...],
    spans: Mapping[Action, tuple[float, float]],
    batches: dict[float, list[Transfer]],
) -> list[Step]:
    """An action before every batch of its end or later, and after all before."""
    steps: list[tuple[float, int, Step]] = [(spans[a.parts[0]][1], 0, a) for a in actions]
    steps += [(time, 1, Transfers(time, tuple(found))) for time, found in batches.items()]
    return [step for _, _, step in sorted(steps, key=lambda item: item[:2])]
