"""Checkpoints of a run: when one is due, how it is saved, and how a run resumes from one.

:mod:`moetrain.train.state` decides what a checkpoint holds of the model,
:mod:`moetrain.train.run_folder` where it is, and :mod:`moetrain.checkpoint.save` how it is written.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moetrain.checkpoint.read import (
    Checkpoint,
    DamagedCheckpoint,
    list_checkpoints,
    open_checkpoint,
)
from moetrain.checkpoint.save import Saved, SavePlan
from moetrain.config import ConfigError, logger
from moetrain.config.sources import RunFailed
from moetrain.parallel.mesh import TensorSlice
from moetrain.train.metrics import Throughput
from moetrain.train.run_folder import RunFolder
from moetrain.train.state import ModelState, Snapshots


class Progress(NamedTuple):
    """The part of a checkpoint that is not the state of the model and its optimizer."""

    state: dict[str, Any]
    """JSON for ``state.json``, such as ``sample_index``."""
    tensors: Mapping[str, Mapping[str, TensorSlice]] = {}
    """This rank's parts of further groups of tensors, by group and name."""


class Checkpointer:
    """Saves the checkpoints of a run, and loads the one that it resumes. Collective.

    Attributes:
        snapshots: writes and reads the checkpoints.
        saved_at: the step of the newest checkpoint on the disk that this run has begun or resumed;
            -1: there is none.
        saved_time: the time from which ``checkpoint.minutes`` count, by ``time.monotonic``: when
            training started, or when the call of :meth:`begin` for that checkpoint ended.
        newest: the newest checkpoint that this run has resumed, or begun on the disk, or None.
    """

    def __init__(
        self,
        engine: ModelState,
        folder: RunFolder,
        clock: Throughput,
        *,
        progress: Callable[[], Progress],
        on_saved: Callable[[Saved], None],
    ) -> None:
        """Reserve host memory for copies.

        Args:
            engine: the model and its optimizer.
            folder: the folder of the checkpoints.
            clock: it is stopped while a save holds training up.
            progress: returns what a checkpoint of this step holds besides the engine's state.
            on_saved: called when a checkpoint on the disk is complete.

        Raises RunFailed: there is too little host memory.
        """
        self.engine, self.folder, self.clock = engine, folder, clock
        self.settings = engine.config.checkpoint
        self.snapshots = Snapshots(engine)
        self._progress, self._on_saved = progress, on_saved
        self.saved_at, self.saved_time = -1, time.monotonic()
        self.newest: Path | None = None

    def start_clock(self) -> None:
        """Count ``checkpoint.minutes`` from now on."""
        self.saved_time = time.monotonic()

    def is_time(self) -> bool:
        """Return True if ``checkpoint.minutes`` have passed since the last checkpoint."""
        return 0 < 60 * self.settings.minutes <= time.monotonic() - self.saved_time

    def due(self, step: int, *, asked: bool) -> Literal["disk", "memory"] | None:
        """Return where a checkpoint of ``step`` is due, or None.

        ``asked``: a checkpoint was asked for, by a signal or because it is time.
        """
        # The request was made in the step before. A checkpoint of that step has fulfilled it.
        by_time = asked and self.saved_at < step - 1
        if by_time or _is_multiple(step, self.settings.interval):
            return "disk"
        return "memory" if _is_multiple(step, self.settings.memory_interval) else None

    def begin(
        self, step: int, *, best: int | None, failed: bool = False, in_memory: bool = False
    ) -> Path:
        """Begin a checkpoint. Unless ``checkpoint.asynchronous``, wait until it is complete.

        Args:
            step: the number of steps done.
            best: the step of the best evaluation, whose checkpoint is kept.
            failed: the run has failed. The checkpoint gets another name, and no other is removed
                for it.
            in_memory: write it to the machines' memory, not to the disk.

        Returns the path of the checkpoint. If this step's checkpoint is on the disk already, it is
        not written again.

        Raises RunFailed: this checkpoint, or the one before, cannot be written.
        """
        own, settings = self.folder, self.settings
        folders, store = (own.memory, None) if in_memory else (own.own, own.store)
        plan = SavePlan(
            root=(folders or own.disk).root,
            step=step,
            keep=settings.keep,
            keep_every=settings.keep_every,
            failed=failed,
            keeps=best if settings.best else None,
            folders=folders,
            store=store,
        )
        if self.saved_at == step and not failed:
            return plan.path
        self.clock.stop()
        started = time.perf_counter()
        self.wait()  # one at a time
        progress = self._progress()
        self.snapshots.save(plan, progress.state, progress.tensors)
        if not settings.asynchronous:
            self.wait()
        self.clock.blocked += time.perf_counter() - started
        if not in_memory:
            self.saved_at, self.newest = step, plan.path
            self.saved_time = time.monotonic()
        self.clock.start()
        return plan.path

    def wait(self) -> None:
        """Wait until the checkpoint under way is complete; RunFailed: it cannot be written."""
        self._report(self.snapshots.wait())

    def poll(self) -> None:
        """Report a checkpoint that is complete by now, without waiting."""
        self._report(self.snapshots.finished())

    def _report(self, saved: Saved | None) -> None:
        if saved is not None and saved.path.parent == self.folder.checkpoints:
            self._on_saved(saved)

    def save_failed(self, step: int, best: int | None) -> str:
        """Save the state of a failed run under another name, and return what to tell the user."""
        try:
            saved = self.begin(step, best=best, failed=True)
            self.wait()
        except RunFailed as failure:
            return str(failure)
        if self.folder.memory is not None:
            self.folder.memory.remove()  # the checkpoints there would lead to the same failure
        good = list_checkpoints(saved.parent)[-1:]
        return (
            f"its weights, which may have diverged, are in {saved}; only checkpoint.resume with "
            f"that path loads them, and auto goes on from {good[0].name if good else 'the start'}"
        )

    def restore(self, found: Checkpoint, identity: str, total_steps: int) -> Checkpoint:
        """Load the state of the engine from ``found``, and return the checkpoint that was loaded.

        If ``found`` is damaged and ``checkpoint.resume`` is auto, an earlier one is loaded.

        Args:
            found: as :meth:`RunFolder.find_resumed` returns it.
            identity: hash of the data or tasks that are trained on.
            total_steps: the length of the run.

        Raises ConfigError: the checkpoint is damaged, and it was named or is the first one; or it
        does not suit the run (:meth:`Snapshots.restore`).
        """
        folder, world = self.folder, self.engine.world
        while damaged := self.snapshots.restore(found, identity, total_steps):
            if folder.resume_now(self.settings.resume, world) != "auto":
                raise ConfigError("checkpoint.resume", f"{damaged}; name another one, or set never")
            if world.is_main:
                logger.warning("a damaged checkpoint is passed over: %s", damaged)
            before: int | None = found.state["step"]
            if folder.memory is not None and folder.is_in_memory(found.folder):
                folder.memory.remove(before)
                before = None
            earlier = folder.find_resumed(self.engine.arch, world, before)
            if earlier is None:
                raise ConfigError(
                    "checkpoint.resume", f"{damaged}, and there is none before it; set never"
                )
            found = earlier
        self.saved_at = -1 if folder.is_in_memory(found.folder) else found.state["step"]
        self.newest = found.folder
        return found

    def load_weights(self, path: Path) -> str:
        """Load only the weights of a checkpoint of this run. Collective.

        Returns what is wrong with the checkpoint, the same on every rank; an empty text: nothing.
        """
        problem = ""
        try:
            found = self.folder.find(str(path))
            assert found is not None  # a path was named
            self.engine.load_state({"model": open_checkpoint(found).group("model")})
        except (ConfigError, DamagedCheckpoint) as error:
            problem = error.problem
        return self.engine.world.any(problem)


def _is_multiple(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
