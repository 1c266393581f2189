"""``log.profile``: traces of a few steps of a run, their time and their memory, on each rank.

    output_dir/profile/steps-5-7-rank-0.json.gz    a Chrome trace, for ui.perfetto.dev
    output_dir/profile/steps-5-7-rank-0.pickle     memory on CUDA, for pytorch.org/memory_viz

A trace holds every op with its shapes, every kernel, and the ranges of
:mod:`moetrain.kernels.annotate`. The history of memory holds each allocation with the lines that
made it. Nothing is attached to the model, so all other steps run as without a profile.

Left out on purpose: reading traces (scripts/bench_train.py adds one up by part).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from moetrain.config import LogSection
from moetrain.train.metrics import Throughput

_FOLDER = "profile"
_MOST_ALLOCATIONS = 2_000_000
"""Allocations in a history of memory, enough for some steps of a large model; older ones are
dropped."""


def new_profiler(device: torch.device) -> torch.profiler.profile:
    """Return a profiler of the host and of ``device``."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, record_shapes=True)


class Profile:
    """Traces the steps that ``settings`` ask for; :meth:`step_done` tells it when a step is over.

    Use it in ``with``. A trace that is incomplete at the end is written too, unless an error ended
    the run. Profilers are switched off in any case.
    """

    def __init__(
        self,
        settings: LogSection,
        folder: Path,
        rank: int,
        clock: Throughput,
        say: Callable[[str], None],
    ) -> None:
        """Take the run's folder and its clock, which stops while traces start and are written.

        ``say`` is called with a line for the user.
        """
        self.settings, self.clock, self.say = settings, clock, say
        self.device = clock.device
        self.folder, self.rank = folder / _FOLDER, rank
        self._done = self._last = self._first = 0
        """Steps that this process has done, the last of them, and the first that is kept."""
        self._is_kept = False
        """Whether the steps that are being traced will be written."""
        self._on = ExitStack()
        self._profiler: torch.profiler.profile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._on:
            if kind not in (None, SystemExit):  # SystemExit: the run was stopped, and has saved
                return
            if self._is_kept and self._first <= self._last:
                self._write()
            elif self._done and (self._is_kept or not self._first):
                self.say("nothing was traced: the run ended before the steps of log.profile")

    def step_done(self, step: int) -> None:
        """Take note that step ``step`` of the run is over."""
        if not self.settings.profile:
            return
        self._done, self._last = self._done + 1, step
        traced = self._done - self.settings.profile_after
        warm = self.settings.WARM_STEPS
        last = warm + self.settings.profile
        change = {0: self._start, warm: self._keep, last: self._write}.get(traced)
        if change is not None:
            self.clock.stop()
            change()
            self.clock.start()

    def _start(self) -> None:
        if self.settings.profile_as == "trace":
            self._profiler = self._on.enter_context(new_profiler(self.device))

    def _keep(self) -> None:
        """Throw away what was traced so far, and keep what follows."""
        self._on.close()
        self._first, self._is_kept = self._last + 1, True
        if self.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS, stacks="python")
            self._on.callback(torch.cuda.memory._record_memory_history, None)
        if self.settings.profile_as == "nvtx":
            torch.cuda.profiler.start()
            self._on.callback(torch.cuda.profiler.stop)
            self._on.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))
        self._start()

    def _write(self) -> None:
        self._is_kept = False
        self.folder.mkdir(exist_ok=True)
        name = self.folder / f"steps-{self._first}-{self._last}-rank-{self.rank}"
        if self.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(f"{name}.pickle")
        self._on.close()
        if self._profiler is not None:
            self._profiler.export_chrome_trace(f"{name}.json.gz")
            self._profiler = None
        self.say(f"steps {self._first} to {self._last} were traced; see {self.folder}")
