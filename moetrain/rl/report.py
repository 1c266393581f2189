"""Reports of a run: rewards, completions as text, and how its time is divided."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Literal, get_args

import torch

from moetrain.data.tokenizer import Tokenizer
from moetrain.rl.rows import Trajectory

_SHOWN = 8
"""Trajectories written out at each evaluation."""
_PartName = Literal["generate", "rewards", "train", "weights", "offload", "evaluate", "other"]
"""generate: trajectories, and waiting for other ranks'; rewards: waiting for environments while
nothing is left to generate; train: scoring and updates; weights: the trainer's into the generator;
offload: moments, and the generator's memory, going and coming back; other: checkpoints, reports."""
PARTS: tuple[_PartName, ...] = get_args(_PartName)


def figures(trajectories: Sequence[Trajectory], prefix: str = "") -> dict[str, float]:
    """Return means over ``trajectories``, at least one; failed ones count with a reward of 0.

    ``solved`` is the share with the full reward of 1.
    """
    number = len(trajectories)
    rewards = [0.0 if t.fault else t.reward for t in trajectories]
    return {
        f"{prefix}reward": sum(rewards) / number,
        f"{prefix}solved": sum(reward >= 1 for reward in rewards) / number,
        f"{prefix}length": sum(t.num_written for t in trajectories) / number,
        f"{prefix}overlong": sum(t.is_overlong for t in trajectories) / number,
    }


def write_completions(trajectories: Iterable[Trajectory], tokenizer: Tokenizer, file: Path) -> None:
    """Write the first few as text to ``file``, with the policy's own words in double brackets."""
    parts = []
    for t in list(trajectories)[:_SHOWN]:
        said = []
        for acts, run in groupby(zip(t.is_action, t.tokens, strict=True), lambda pair: pair[0]):
            text = tokenizer.decode([token for _, token in run])
            said.append(f"[[{text}]]" if acts else text)
        ending = t.fault or ("cut off" if t.is_overlong else "ended")
        parts.append(f"--- task {t.task}, reward {t.reward:g}, {ending}\n{''.join(said)}\n")
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(parts), "utf-8")


class TimeSplit:
    """Seconds of the loop by part. Parts may nest, and each second counts for the innermost."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        """Sums of everything that :meth:`take` has returned."""
        self._since: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._part: _PartName = "other"
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: _PartName) -> Iterator[None]:
        """Count the time inside as ``name``. Waits for the device at both ends."""
        around = self._part
        self._go_on_as(name)
        yield
        self._go_on_as(around)

    def _go_on_as(self, name: _PartName) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self._since[self._part] += now - self._started
        self._part, self._started = name, now

    def move(self, seconds: float, source: _PartName, target: _PartName) -> None:
        """Count ``seconds`` of ``source`` as ``target``'s instead."""
        self._since[source] -= seconds
        self._since[target] += seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by part since the last call."""
        self._go_on_as(self._part)
        taken = self._since
        self._since = dict.fromkeys(PARTS, 0.0)
        for name, seconds in taken.items():
            self.total[name] += seconds
        return taken

    @staticmethod
    def line(seconds: Mapping[str, float]) -> str:
        """Describe a step in one line: ``time 2.3 s: generate 1.2 (52%)  train 0.9 (39%)``."""
        whole = max(sum(seconds.values()), 1e-9)
        parts = (f"{n} {s:.2f} ({s / whole:.0%})" for n, s in seconds.items() if s >= whole / 100)
        return f"  time {whole:.2f} s: {'  '.join(parts)}"

    def table(self) -> list[str]:
        """Describe :attr:`total` by a line for each part."""
        whole = max(sum(self.total.values()), 1e-9)
        return [f"  {n:<9}{s:>10.1f} s {s / whole:>7.1%}" for n, s in self.total.items()]
