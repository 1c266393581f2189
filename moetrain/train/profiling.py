"""``log.profile``: traces of a few steps of a run, their time and their memory, on each rank.

    output_dir/profile/steps-5-7-rank-0.json.gz    a Chrome trace, for ui.perfetto.dev
    output_dir/profile/steps-5-7-rank-0.pickle     memory on CUDA, for pytorch.org/memory_viz

A trace holds every op with its shapes, every kernel, and the ranges of
:mod:`moetrain.kernels.annotate`. The history of memory holds each allocation with the lines that
made it. Nothing is attached to the model, so all other steps run as without a profile.

Left out on purpose: reading traces (scripts/bench_train.py adds one up by part).
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from moetrain.train.callbacks import Callback, RunView

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


class Profile(Callback):
    """Traces the steps that ``log.profile`` asks for; the clock stops while it starts and writes.

    A trace that is incomplete at the end is written too, unless an error ended the run. Profilers
    are switched off in any case.
    """

    def __init__(self) -> None:
        self._done = self._last = self._first = 0
        """Steps that this process has done, the last of them, and the first that is kept."""
        self._is_kept = False
        """Whether the steps that are being traced will be written."""
        self._on = ExitStack()
        self._profiler: torch.profiler.profile | None = None

    def on_start(self, run: RunView) -> None:
        self.settings, self.device = run.config.log, run.world.device
        self.folder, self.rank = run.folder / _FOLDER, run.world.rank

    def on_update(self, run: RunView) -> None:
        if not self.settings.profile:
            return
        self._done, self._last = self._done + 1, run.step
        traced = self._done - self.settings.profile_after
        warm = self.settings.WARM_STEPS
        if traced not in (0, warm, warm + self.settings.profile):
            return
        run.clock.stop()
        if traced == 0:
            self._start()
        elif traced == warm:
            self._keep()
        else:
            self._write(run)
        run.clock.start()

    def on_last_step(self, run: RunView) -> None:
        if self._is_kept and self._first <= self._last:
            self._write(run)
        elif self._done and (self._is_kept or not self._first):
            run.say("nothing was traced: the run ended before the steps of log.profile")
        self._done = 0

    def on_end(self, run: RunView, error: BaseException | None) -> None:
        with self._on:
            if isinstance(error, SystemExit):  # the run was stopped, and has saved
                self.on_last_step(run)

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

    def _write(self, run: RunView) -> None:
        self._is_kept = False
        self.folder.mkdir(exist_ok=True)
        name = self.folder / f"steps-{self._first}-{self._last}-rank-{self.rank}"
        if self.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(f"{name}.pickle")
        self._on.close()
        if self._profiler is not None:
            self._profiler.export_chrome_trace(f"{name}.json.gz")
            self._profiler = None
        run.say(f"steps {self._first} to {self._last} were traced; see {self.folder}")
