"""Callbacks: functions of your own that a run calls as it goes along, and that may end it.

    class LowEnough(Callback):
        def on_evaluate(self, run, row):
            if row["eval_loss"] < 1.5:
                run.end("the held-out loss is low enough")

    Trainer(config, callbacks=[LowEnough()]).fit()

Every hook is called on every rank, in the order of the callbacks, with the same numbers. A hook
that raises ends the run with that error. Early stopping and the best checkpoint (:class:`Best`),
checkpoints by time (:class:`Timed`), profiles, samples, benchmarks and all reporters are callbacks
too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from moetrain.checkpoint.read import checkpoint_name
from moetrain.config import Config
from moetrain.parallel.world import World
from moetrain.train.engine import Engine
from moetrain.train.metrics import Throughput

Row = Mapping[str, float | None]
"""A line of metrics.jsonl without its step; None: not known, or not finite."""


class RunView(Protocol):
    """What callbacks may use of a run; :class:`moetrain.train.run.Run` has all of it."""

    config: Config
    world: World
    engine: Engine
    folder: Path
    step: int
    """Steps done."""
    total_steps: int
    clock: Throughput
    """Measures steps; a callback that takes long stops it meanwhile."""
    saved_time: float
    """``time.monotonic()`` at the last checkpoint, or at the first step."""
    moe_layers: list[int]
    """Indices of the layers with experts."""
    expert_counts_LE: torch.Tensor | None
    """Tokens that chose each expert in the last logged step, of all ranks; None: no experts."""

    def end(self, reason: str, *, everywhere: bool = False) -> None:
        """End the run in order, as :meth:`moetrain.train.run.Run.end` says."""

    def say(self, text: str) -> None:
        """Print a line on the main rank."""

    def begin_save(self) -> Path:
        """Begin a checkpoint of this step, unless there is one; collective."""
        ...

    def ask_to_save(self) -> None:
        """Have all ranks save at most two steps later, if this is the main rank."""


class Callback:
    """Does nothing; a subclass overrides the hooks that it needs."""

    def on_start(self, run: RunView) -> None:
        """The run is built, and resumed if there was something to resume."""

    def on_update(self, run: RunView) -> None:
        """A step is queued, and neither logged nor evaluated."""

    def on_step(self, run: RunView) -> None:
        """A step is over; the device may still be computing it."""

    def on_last_step(self, run: RunView) -> None:
        """No further step is taken; the last evaluation and exports follow."""

    def on_log(self, run: RunView, row: Row) -> None:
        """A line is logged, of a step or of an evaluation."""

    def on_evaluate(self, run: RunView, row: Row) -> None:
        """An evaluation is over, and logged."""

    def on_checkpoint(self, run: RunView, path: Path) -> None:
        """A checkpoint is complete."""

    def on_end(self, run: RunView, error: BaseException | None) -> None:
        """The run is over: in order (None), stopped by a signal (SystemExit), or failed."""

    def state(self) -> dict[str, Any]:
        """Return what checkpoints keep for :meth:`load_state`, as JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state`, before :meth:`on_start`."""


class Result(NamedTuple):
    """What a run has come to; the same on every rank."""

    step: int
    """The last step."""
    reason: str
    """Why it ended: its length in words, or what the callback said that ended it."""
    loss: float | None
    """Of the last logged step; None: not finite, or no step was taken."""
    best_step: int | None
    """The step of the best evaluation; None: there was none behind a step."""
    best_value: float | None
    """The lowest ``eval_loss``, or of reinforcement learning the highest ``eval_reward``."""
    best: Path | None
    """The checkpoint of that step, with ``checkpoint.best``."""
    checkpoint: Path | None
    """The newest checkpoint that the run has resumed or written."""
    folder: Path
    """``output_dir``, where ``metrics.jsonl`` has every logged line."""


class Best(Callback):
    """Remembers the best evaluation: the lowest ``eval_loss``, or the highest ``eval_reward``.

    It keeps its checkpoint (``checkpoint.best``), to which the link ``checkpoints/best`` points,
    and ends a run that no longer improves (``train.patience``).
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.value: float | None = None
        self.since = 0
        """Evaluations since the best one."""

    def state(self) -> dict[str, Any]:
        return {} if self.step is None else vars(self)

    def load_state(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def on_start(self, run: RunView) -> None:
        self._end_if_enough(run)

    def on_evaluate(self, run: RunView, row: Row) -> None:
        if run.step == 0:  # nothing was trained yet
            return
        name, sign = ("eval_loss", -1) if "eval_loss" in row else ("eval_reward", 1)
        value = row.get(name)
        if value is None or (self.value is not None and sign * value <= sign * self.value):
            self.since += 1
            self._end_if_enough(run)
            return
        self.step, self.value, self.since = run.step, value, 0
        if run.config.checkpoint.best:
            self.on_checkpoint(run, run.begin_save())

    def on_checkpoint(self, run: RunView, path: Path) -> None:
        is_mine = run.config.checkpoint.best and path == self.path(path.parent) and path.exists()
        if is_mine and run.world.is_main:
            new = path.parent / ".best"
            new.unlink(missing_ok=True)
            new.symlink_to(path.name)
            new.replace(path.parent / "best")

    def path(self, checkpoints: Path) -> Path | None:
        """Return the checkpoint of the best evaluation, or where it would be."""
        return None if self.step is None else checkpoints / checkpoint_name(self.step)

    def _end_if_enough(self, run: RunView) -> None:
        patience = run.config.train.patience
        if 0 < patience <= self.since:
            times = f"{self.since} evaluations"
            best = f"the best was {self.value:.4f} at step {self.step}" if self.step else "none was"
            run.end(f"no better in {times} (train.patience); {best}", everywhere=True)


class Timed(Callback):
    """Asks for a checkpoint once ``checkpoint.minutes`` have passed since the last one."""

    def on_update(self, run: RunView) -> None:
        seconds = 60 * run.config.checkpoint.minutes
        if 0 < seconds <= time.monotonic() - run.saved_time:
            run.ask_to_save()


class Callbacks(Callback):
    """Calls each hook of several callbacks, in order, and gathers their states by class."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = [*callbacks]

    def add(self, callback: Callback) -> None:
        """Call ``callback`` too, behind the others."""
        self._callbacks.append(callback)

    @contextmanager
    def running(self, run: RunView) -> Iterator[None]:
        """Start the callbacks; at the end, whatever raises, end in reverse those that started."""
        with ExitStack() as started:
            for callback in self._callbacks:
                callback.on_start(run)
                started.push(partial(_end, callback, run))
            yield

    def on_update(self, run: RunView) -> None:
        for callback in self._callbacks:
            callback.on_update(run)

    def on_step(self, run: RunView) -> None:
        for callback in self._callbacks:
            callback.on_step(run)

    def on_last_step(self, run: RunView) -> None:
        for callback in self._callbacks:
            callback.on_last_step(run)

    def on_log(self, run: RunView, row: Row) -> None:
        for callback in self._callbacks:
            callback.on_log(run, row)

    def on_evaluate(self, run: RunView, row: Row) -> None:
        for callback in self._callbacks:
            callback.on_evaluate(run, row)

    def on_checkpoint(self, run: RunView, path: Path) -> None:
        for callback in self._callbacks:
            callback.on_checkpoint(run, path)

    def state(self) -> dict[str, Any]:
        states = {name: callback.state() for name, callback in self._named()}
        kept = {name: state for name, state in states.items() if state}
        return {"callbacks": kept} if kept else {}

    def load_state(self, state: dict[str, Any]) -> None:
        kept = state.get("callbacks", {})
        for name, callback in self._named():
            if name in kept:
                callback.load_state(kept[name])

    def _named(self) -> Iterator[tuple[str, Callback]]:
        count: Counter[str] = Counter()
        for callback in self._callbacks:
            name = type(callback).__name__
            count[name] += 1
            yield f"{name}.{count[name]}", callback


def _end(
    callback: Callback,
    run: RunView,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    """Call a callback's ``on_end``, with the arguments of an :class:`~contextlib.ExitStack`."""
    callback.on_end(run, error)
