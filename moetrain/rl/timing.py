"""Where the time of a run goes: every second counts once, for one part of the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

import torch

PartName = Literal["generate", "rewards", "train", "weights", "offload", "evaluate", "other"]
"""generate: trajectories, and waiting for other ranks'; rewards: waiting for environments while
nothing is left to generate; train: scoring and updates; weights: the trainer's into the generator;
offload: moments, and the generator's memory, going and coming back; other: checkpoints, reports."""
PARTS: tuple[PartName, ...] = get_args(PartName)


class TimeSplit:
    """Seconds by part. Parts may lie within others, and a second counts for the innermost."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        """All that was taken."""
        self._since: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._part: PartName = "other"
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: PartName) -> Iterator[None]:
        """Meanwhile time counts as ``name``. Waits for the device at both ends."""
        around = self._part
        self._go_on_as(name)
        yield
        self._go_on_as(around)

    def _go_on_as(self, name: PartName) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self._since[self._part] += now - self._started
        self._part, self._started = name, now

    def move(self, seconds: float, source: PartName, target: PartName) -> None:
        """So many of ``source`` were ``target``'s."""
        self._since[source] -= seconds
        self._since[target] += seconds

    def take(self) -> dict[str, float]:
        """Seconds since the last call."""
        self._go_on_as(self._part)
        taken = self._since
        self._since = dict.fromkeys(PARTS, 0.0)
        for name, seconds in taken.items():
            self.total[name] += seconds
        return taken


def line_of(seconds: Mapping[str, float]) -> str:
    """Of a step, one line: ``time 2.3 s: generate 1.2 (52%)  train 0.9 (39%)``; parts from 1%."""
    whole = max(sum(seconds.values()), 1e-9)
    parts = (f"{n} {s:.2f} ({s / whole:.0%})" for n, s in seconds.items() if s >= whole / 100)
    return f"  time {whole:.2f} s: {'  '.join(parts)}"


def table_of(seconds: Mapping[str, float]) -> list[str]:
    """A line for each part."""
    whole = max(sum(seconds.values()), 1e-9)
    return [f"  {n:<9}{s:>10.1f} s {s / whole:>7.1%}" for n, s in seconds.items()]
