"""Callbacks: your own functions, which a run calls as it goes along, and which may end it.

    class LowEnough(Callback):
        def on_evaluate(self, run, row):
            if row["eval_loss"] < 1.5:
                run.end("the held-out loss is low enough", everywhere=True)

    Trainer(config, callbacks=[LowEnough()]).fit()

Every hook is called on every rank, in the order of the callbacks, with the same numbers. A hook
that raises ends the run with that error. Callbacks of our own follow: :class:`Best` (early
stopping, the best checkpoint), :class:`Profile` (traces of a few steps) and the reporters, which
hand every logged line to another program's store. Reporters run on the main rank, import their
library when they start, and read its own environment variables (WANDB_MODE, ...); a resumed run
goes on with the record that its checkpoint names. examples/mlflow_reporter.py is one more.

Left out on purpose: metrics.jsonl and the terminal, which every run has
(:mod:`moetrain.train.metrics`), and reading traces (scripts/bench_train.py adds one up by part).
"""

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from moetrain.checkpoint.read import checkpoint_name
from moetrain.config import Config, ConfigError, LogSection
from moetrain.parallel.world import World
from moetrain.train.engine import Engine
from moetrain.train.metrics import Throughput

_MOST_ALLOCATIONS = 2_000_000
"""Allocations in a history of memory, enough for some steps of a large model; older ones are
dropped."""

Row = Mapping[str, float | None]
"""A line of metrics.jsonl, ``step`` first; None: not known, or not finite."""


class RunView(Protocol):
    """The part of a run that callbacks may use; :class:`moetrain.train.run.Run` has all of it."""

    config: Config
    world: World
    engine: Engine
    folder: Path
    step: int
    """Steps done."""
    total_steps: int
    clock: Throughput
    """Measures steps; a callback that takes long stops it meanwhile."""
    moe_layers: list[int]
    """Indices of the MoE layers."""
    expert_counts_LE: torch.Tensor | None
    """Tokens that chose each expert in the last logged step, of all ranks; None: no experts."""

    def end(self, reason: str, *, everywhere: bool = False) -> None:
        """End the run in order, as if this step were its last.

        ``reason`` is printed, and :class:`Result` has it. Pass ``everywhere=True`` if every rank
        calls this at the same step, as a hook that decides by its ``row`` alone does: the run then
        ends with this step. Otherwise a single rank may call it, and all ranks end together at most
        two steps later.
        """

    def say(self, text: str) -> None:
        """Print a line on the main rank."""

    def begin_save(self) -> Path:
        """Begin a checkpoint of this step, unless there is one; collective."""
        ...

    def ask_to_save(self) -> None:
        """Make all ranks save at most two steps later. Only the main rank's call has an effect."""


class Callback:
    """Does nothing; a subclass overrides the hooks that it needs."""

    writes_sample = False
    """True: it writes the sample that ``train.sample_tokens`` asks for."""

    def on_start(self, run: RunView) -> None:
        """The run is built, and resumed if there was something to resume."""

    def on_update(self, run: RunView) -> None:
        """A step is queued on the device, and not logged or evaluated yet."""

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


class Callbacks(list[Callback]):
    """The callbacks of a run, in the order in which they are called."""

    @contextmanager
    def running(self, run: RunView) -> Iterator[None]:
        """Start the callbacks; at the end, also after an error, end the started ones in reverse
        order."""
        with ExitStack() as started:
            for callback in self:
                callback.on_start(run)
                started.push(lambda *about, end=callback.on_end: end(run, about[1]))
            yield

    def on_update(self, run: RunView) -> None:
        for callback in self:
            callback.on_update(run)

    def on_step(self, run: RunView) -> None:
        for callback in self:
            callback.on_step(run)

    def on_last_step(self, run: RunView) -> None:
        for callback in self:
            callback.on_last_step(run)

    def on_log(self, run: RunView, row: Row) -> None:
        for callback in self:
            callback.on_log(run, row)

    def on_evaluate(self, run: RunView, row: Row) -> None:
        for callback in self:
            callback.on_evaluate(run, row)

    def on_checkpoint(self, run: RunView, path: Path) -> None:
        for callback in self:
            callback.on_checkpoint(run, path)

    def state(self) -> dict[str, Any]:
        """Return the callbacks' states by class, for a checkpoint."""
        states = {name: callback.state() for name, callback in self._named()}
        kept = {name: state for name, state in states.items() if state}
        return {"callbacks": kept} if kept else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a :meth:`state` into the callbacks."""
        kept = state.get("callbacks", {})
        for name, callback in self._named():
            if name in kept:
                callback.load_state(kept[name])

    def _named(self) -> Iterator[tuple[str, Callback]]:
        count: Counter[str] = Counter()
        for callback in self:
            name = type(callback).__name__
            count[name] += 1
            yield f"{name}.{count[name]}", callback


class Result(NamedTuple):
    """The result of a run; the same on every rank."""

    step: int
    """The last step."""
    reason: str
    """Why the run ended: the setting that limits its length, or the ``reason`` that a callback gave
    to :meth:`RunView.end`."""
    loss: float | None
    """Loss of the last logged step; None: not finite, or no step was taken."""
    best_step: int | None
    """The step of the best evaluation; None: no evaluation after a step had a finite value."""
    best_value: float | None
    """The lowest ``eval_loss``; in reinforcement learning, the highest ``eval_reward``."""
    best: Path | None
    """The checkpoint of that step, with ``checkpoint.best``."""
    checkpoint: Path | None
    """The newest checkpoint that the run has resumed or written."""
    folder: Path
    """``output_dir``, where ``metrics.jsonl`` has every logged line."""


class Best(Callback):
    """Remembers the best evaluation: the lowest ``eval_loss``, or the highest ``eval_reward``.

    It keeps the checkpoint of that step (``checkpoint.best``; the link ``checkpoints/best`` points
    to it), and ends a run that no longer improves (``train.patience``) or whose loss is low enough
    (``train.target_loss``). The evaluation before the first step does not count. Its state is in
    checkpoints, so a run that had a reason to end ends again when it is resumed (``on_start``),
    unless the setting has changed.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.value: float | None = None
        self.since = 0
        """Evaluations since the best one."""
        self.last_step = 0
        """The step of the last evaluation; 0: none after a step."""
        self.last_loss: float | None = None
        """Its ``eval_loss``; None: not finite, or it measured rewards. Not ``value``, which is
        that of earlier weights: a resumed run may have got worse since, and may have a new
        target."""

    def state(self) -> dict[str, Any]:
        return {} if self.step is None else vars(self)

    def load_state(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def on_start(self, run: RunView) -> None:
        self._end_if_enough(run)

    def on_evaluate(self, run: RunView, row: Row) -> None:
        if run.step == 0:  # nothing was trained yet
            return
        self.last_step, self.last_loss = run.step, row.get("eval_loss")
        name, sign = ("eval_loss", -1) if "eval_loss" in row else ("eval_reward", 1)
        value = row.get(name)
        if value is None or (self.value is not None and sign * value <= sign * self.value):
            self.since += 1
        else:
            self.step, self.value, self.since = run.step, value, 0
            if run.config.checkpoint.best:
                self.on_checkpoint(run, run.begin_save())
        self._end_if_enough(run)

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
        patience, target = run.config.train.patience, run.config.train.target_loss
        if target is not None and self.last_loss is not None and self.last_loss <= target:
            loss = f"the held-out loss at step {self.last_step} is {self.last_loss:.4f}"
            run.end(f"{loss}, at or below {target} (train.target_loss)", everywhere=True)
        elif 0 < patience <= self.since:
            times = f"{self.since} evaluations"
            best = (
                f"the best was {self.value:.4f} at step {self.step}"
                if self.step
                else "no value was finite"
            )
            run.end(f"no better in {times} (train.patience); {best}", everywhere=True)


class Profile(Callback):
    """Traces the steps that ``log.profile`` asks for; the clock stops while it starts and writes.

        output_dir/profile/steps-5-7-rank-0.json.gz    a Chrome trace, for ui.perfetto.dev
        output_dir/profile/steps-5-7-rank-0.pickle     memory on CUDA, for pytorch.org/memory_viz

    A trace holds every op with its shapes, every kernel, and the ranges of
    :mod:`moetrain.runtime.annotate`. The history of memory holds every allocation with the lines of
    code that made it. Nothing is attached to the model, so all other steps run as if there were no
    profile. If the run ends within the traced steps, the incomplete trace is written too, unless an
    error ended the run.
    """

    def __init__(self) -> None:
        self._done = 0
        """Steps that this process has done."""
        self._first: int | None = None
        """The first step of the trace; None: tracing has not begun, 0: the trace is written."""
        self._on = ExitStack()
        self._profiler: torch.profiler.profile

    @staticmethod
    def profiler(device: torch.device) -> torch.profiler.profile:
        """Return a profiler of the host and of ``device``."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        return torch.profiler.profile(activities=activities, record_shapes=True)

    def on_update(self, run: RunView) -> None:
        log = run.config.log
        if not log.profile:
            return
        self._done += 1
        traced = self._done - log.profile_after
        if traced not in (0, log.WARM_STEPS, log.WARM_STEPS + log.profile):
            return
        run.clock.stop()
        if traced == log.WARM_STEPS + log.profile:
            self._write(run)
        else:
            self._trace(run, is_kept=traced == log.WARM_STEPS)
        run.clock.start()

    def on_last_step(self, run: RunView) -> None:
        if self._first and self._first <= run.step:
            self._write(run)
        elif self._done and self._first != 0:
            run.say("nothing was traced: the run ended before the steps of log.profile")
        self._first = 0

    def on_end(self, run: RunView, error: BaseException | None) -> None:
        with self._on:
            if isinstance(error, SystemExit):  # the run was stopped, and has saved
                self.on_last_step(run)

    def _trace(self, run: RunView, *, is_kept: bool) -> None:
        """Trace the steps that follow; what was traced before is thrown away."""
        self._on.close()
        device = run.world.device
        if is_kept:
            self._first = run.step + 1
        if is_kept and device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS, stacks="python")
            self._on.callback(torch.cuda.memory._record_memory_history, None)
        self._profiler = self._on.enter_context(self.profiler(device))

    def _write(self, run: RunView) -> None:
        folder, steps = run.folder / "profile", f"{self._first}-{run.step}"
        folder.mkdir(exist_ok=True)
        name = folder / f"steps-{steps}-rank-{run.world.rank}"
        if run.world.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(f"{name}.pickle")
        self._on.close()
        self._profiler.export_chrome_trace(f"{name}.json.gz")
        del self._profiler  # with its events
        run.say(f"steps {self._first} to {run.step} were traced; see {folder}")
        self._first = 0


class _TensorBoard(Callback):
    """Writes event files to ``output_dir/tensorboard``.

    A resumed run discards the events of later steps than the one from which it resumes.
    """

    _board: Any = None

    def on_start(self, run: RunView) -> None:
        self._next, self._folder = run.step + 1, run.folder / "tensorboard"
        self._folder.mkdir(parents=True, exist_ok=True)

    def on_log(self, run: RunView, row: Row) -> None:
        if self._board is None:  # not in on_start: the first step would wait for the import
            from torch.utils.tensorboard import SummaryWriter

            self._folder.stat()  # raises if the folder was moved; the writer would make a new one
            self._board = SummaryWriter(str(self._folder), purge_step=self._next)
        for name, value in row.items():
            if value is not None and name != "step":
                self._board.add_scalar(name, value, run.step)

    def on_end(self, run: RunView, error: BaseException | None) -> None:
        if self._board is not None:
            self._board.close()


class _WandB(Callback):
    """A run of Weights & Biases, with its files in ``output_dir/wandb``."""

    identifier: str | None = None

    def state(self) -> dict[str, Any]:
        return {} if self.identifier is None else {"identifier": self.identifier}

    def load_state(self, state: dict[str, Any]) -> None:
        self.identifier = state["identifier"]

    def on_start(self, run: RunView) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=run.config.log.project,
            name=run.folder.name,
            dir=run.folder,
            config=run.config.to_dict(),
            id=self.identifier,
            resume="allow",
            settings=wandb.Settings(console="off"),  # the terminal is the run's
        )
        self.identifier = self._run.id

    def on_log(self, run: RunView, row: Row) -> None:
        values = {k: v for k, v in row.items() if v is not None and k != "step"}
        self._run.log(values, step=run.step)

    def on_end(self, run: RunView, error: BaseException | None) -> None:
        self._run.finish(exit_code=int(error is not None))


_REPORTERS: dict[str, type[Callback]] = {"tensorboard": _TensorBoard, "wandb": _WandB}
"""The reporters by their names in ``log.reporters``, which are also the libraries' names."""


def reporters_of(log: LogSection) -> list[Callback]:
    """Return the reporters that ``log`` asks for; ConfigError: a library is not installed."""
    names = dict.fromkeys(["tensorboard"] * log.tensorboard + list(log.reporters))
    for name in names:
        if find_spec(name) is None:
            problem = f"{name!r} is not installed; pip install {name}, or leave it out"
            raise ConfigError("log.reporters", problem)
    return [_REPORTERS[name]() for name in names]
