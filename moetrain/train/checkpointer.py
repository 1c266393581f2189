"""Checkpoints of a run: when one is due, how it is saved, and how a run resumes from one.

What a checkpoint holds of the model is :mod:`moetrain.train.state`'s business, where it lies
:mod:`moetrain.train.run_folder`'s, and how it is written :mod:`moetrain.checkpoint.save`'s.
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
    """The part of a checkpoint besides the state of the model."""

    state: dict[str, Any]
    """JSON for ``state.json``, such as ``sample_index``."""
    tensors: Mapping[str, Mapping[str, TensorSlice]] = {}
    """This rank's parts of further groups of tensors, by group and name."""


class Checkpointer:
    """Saves the checkpoints of a run, and loads the one that it resumes. Collective.

    Attributes:
        snapshots: writes and reads them.
        saved_at: the step of the newest checkpoint on the disk; -1: there is none.
        saved_time: when that was begun, by ``time.monotonic``.
        newest: the newest checkpoint that this run has resumed or written, or None.
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
        """Reserve host memory for copies; RunFailed: there is too little.

        Args:
            engine: the model and its optimizer.
            folder: where checkpoints lie.
            clock: stops while a save holds training up.
            progress: returns what a checkpoint of this step holds besides the engine.
            on_saved: called once a checkpoint on the disk is complete.
        """
        self.engine, self.folder, self.clock = engine, folder, clock
        self.settings = engine.config.checkpoint
        self.snapshots = Snapshots(engine)
        self._progress, self._on_saved = progress, on_saved
        self.saved_at, self.saved_time = -1, time.monotonic()
        self.newest: Path | None = None

    def start_clock(self) -> None:
        """Begin to wait for the first ``checkpoint.minutes``."""
        self.saved_time = time.monotonic()

    def is_time(self) -> bool:
        """Return whether ``checkpoint.minutes`` are over since the last checkpoint."""
        return 0 < 60 * self.settings.minutes <= time.monotonic() - self.saved_time

    def due(self, step: int, *, asked: bool) -> Literal["disk", "memory"] | None:
        """Return where a checkpoint of ``step`` is due; ``asked``: one was asked for."""
        # A request from before the last checkpoint is fulfilled by it.
        by_time = asked and self.saved_at < step - 1
        if by_time or _is_multiple(step, self.settings.interval):
            return "disk"
        return "memory" if _is_multiple(step, self.settings.memory_interval) else None

    def begin(
        self, step: int, *, best: int | None, failed: bool = False, in_memory: bool = False
    ) -> Path:
        """Begin a checkpoint; with ``checkpoint.asynchronous`` training goes on meanwhile.

        Args:
            step: the step that is done.
            best: the step of the best evaluation, whose checkpoint is kept.
            failed: the run has failed; the checkpoint has another name, and removes no other.
            in_memory: write it to the machines' memory, not to the disk.

        Returns its path. A checkpoint on the disk that there is already is not written again.

        Raises RunFailed: it, or the one before, cannot be written.
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
        """Wait until the checkpoint that was begun is complete; RunFailed: it cannot be written."""
        self._report(self.snapshots.wait())

    def poll(self) -> None:
        """Report a checkpoint that is complete by now, without waiting."""
        self._report(self.snapshots.finished())

    def _report(self, saved: Saved | None) -> None:
        if saved is not None and saved.path.parent == self.folder.checkpoints:
            self._on_saved(saved)

    def save_failed(self, step: int, best: int | None) -> str:
        """Save the state of a failed run under another name; returns what to tell the user."""
        try:
            saved = self.begin(step, best=best, failed=True)
            self.wait()
        except RunFailed as failure:
            return str(failure)
        if self.folder.memory is not None:
            self.folder.memory.remove()  # its checkpoints lead to the same failure
        good = list_checkpoints(saved.parent)[-1:]
        return (
            f"its weights, which may have blown up, are in {saved}, which only checkpoint.resume "
            f"with that path takes; auto goes on from {good[0].name if good else 'the start'}"
        )

    def restore(self, found: Checkpoint, identity: str, total_steps: int) -> Checkpoint:
        """Load the state of the engine from ``found``, and return what was loaded.

        That is an earlier checkpoint where ``found`` is damaged and ``checkpoint.resume`` is auto.

        Args:
            found: as :meth:`RunFolder.find_resumed` returns it.
            identity: hash of the data or tasks that are trained on.
            total_steps: the length of the run.

        Raises ConfigError: it is damaged, and was named or has none before it, or it does not suit
        the run (:meth:`Snapshots.restore`).
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
        """Load the weights of a checkpoint of this run, and nothing else of it. Collective.

        Returns what is wrong with it, the same on every rank, or an empty text.
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
