"""What every run has around its steps, whatever it trains: start, resuming, saving, stopping.

:class:`Run` is what :class:`moetrain.train.loop.Trainer` and :class:`moetrain.rl.loop` share.
A subclass has the loop over steps, inside :meth:`Run.stepping`; when to log, evaluate, save and
stop is decided here. Within a step nothing here waits for the device: skipped steps are counted on
it and read one step late.
"""

import faulthandler
import gc
import json
import math
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, TextIO, cast

import torch

from moetrain.checkpoint.read import Checkpoint, list_checkpoints
from moetrain.checkpoint.save import Saved, SavePlan
from moetrain.config import Config, ConfigError, logger
from moetrain.config.sources import RunFailed
from moetrain.data.tokenizer import Tokenizer
from moetrain.losses.balancing import RoutingStats
from moetrain.models.architecture import Architecture
from moetrain.models.hf.files import write_files
from moetrain.parallel.mesh import TensorSlice
from moetrain.runtime.memory import LateNumbers
from moetrain.train.callbacks import Best, Callback, Callbacks, Profile, Result, reporters_of
from moetrain.train.engine import Engine
from moetrain.train.faults import compare_replicas
from moetrain.train.metrics import MetricsLog, RankWatch, RoutingWatch, Throughput
from moetrain.train.objectives import router_loss
from moetrain.train.run_folder import RunFolder
from moetrain.train.session import Session, garbage_collector_off, prepare, stop_signals
from moetrain.train.state import Snapshots

_SAVE = 1 << 32
"""Added to the sum of all ranks' stop signals where the main rank asks for a checkpoint."""
_END = 1 << 40
"""Added to the same sum by every rank on which a callback asks to end the run."""


class _BadSteps(RunFailed):
    """Too many steps in a row were not finite; the state is that before them."""


class GivenUp(Exception):
    """A stop signal came within a step, of which nothing is kept."""


class _StepWatch:
    """Counts skipped steps and ranks' requests on the device, and reads the counts one step late.

    The host thus never waits for the step under way. A skipped step changes nothing, so one step
    later the state is still that before the first of them; and all ranks read the same sums of the
    same step, so they stop together.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.limit = limit
        self._steps = 0
        # Steps skipped in a row, steps skipped in all, and the sum of ranks' requests.
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._late = LateNumbers(self._counts)
        self.asked_to_save = self.asked_to_end = False
        """Whether, as of the step before the last, the main rank's clock asked for a checkpoint; a
        stop signal had come to any rank, or a callback on any rank asked to end the run."""

    def update(self, skipped: torch.Tensor, requests: torch.Tensor) -> None:
        """Count one step.

        Args:
            skipped: 0-d bool, the same on every rank.
            requests: 0-d, as :meth:`Run.sum_requests` returns it.

        Raises _BadSteps: the limit was reached by the steps before this one.
        """
        self.check()
        self._steps += 1
        in_row = torch.where(skipped, self._counts[0] + 1, 0)
        self._counts = torch.stack([in_row, self._counts[1] + skipped, requests.long()])
        self._late = LateNumbers(self._counts)

    def check(self, *, is_over: bool = False) -> None:
        """Raise :class:`_BadSteps` if the limit was reached by the steps counted so far, or if the
        run is over and no step of it was good."""
        in_row, _, requests = self._late.read().tolist()  # the step before is long done
        self.asked_to_save = requests % _END >= _SAVE
        self.asked_to_end |= requests >= _END or requests % _SAVE > 0
        if in_row >= self.limit:
            problem = f"{self.limit} steps in a row had a non-finite loss or gradient norm"
            remedy = "lower optim.lr, or look at the data"
            raise _BadSteps(f"{problem} (train.max_bad_steps); {remedy}")
        if is_over and 0 < self._steps == in_row:
            problem = f"all {self._steps} steps had a non-finite loss or gradient norm: nothing was"
            remedy = "look at the weights it started from, and at the data"
            raise _BadSteps(f"{problem} trained; {remedy}")

    def in_row(self) -> int:
        """Return how many steps were skipped since the last good one; waits for the device."""
        return int(self._counts[0])

    def total(self) -> int:
        """Return how many steps were skipped so far; waits for the device."""
        return int(self._counts[1])


class Run(ABC):
    """One training run.

    A subclass's ``fit`` is within :meth:`opened`. Its loop, within :meth:`stepping`, takes steps
    while :attr:`goes_on`, adds to :attr:`step` and :attr:`tokens`, and calls :meth:`after_step`. A
    step may raise :class:`GivenUp`, if everything is then as it was before it.
    """

    generates: ClassVar[bool] = False
    """Whether the devices need room for generation, by ``rl.sleep``."""
    engine: Engine
    total_steps: int
    identity: str
    """Hash of the data or tasks that are trained on."""
    trained_on: str
    """The data or tasks that are trained on, in words for people."""

    def __init__(
        self, config: Config, *, callbacks: Sequence[Callback] = (), needs_text: bool = True
    ) -> None:
        """Build the run, and resume it if there is something to.

        Args:
            config: the settings.
            callbacks: what to call as the run goes along (:mod:`moetrain.train.callbacks`).
            needs_text: the run reads or writes text, and so needs a tokenizer.

        Raises ConfigError: the run cannot be made.
        """
        sleep = config.rl.sleep if self.generates else None
        self.session = Session(*prepare(config, needs_text=needs_text), sleep)
        self.config, self.world = self.session.config, self.session.world
        config, arch = self.config, self.session.arch
        self.device = self.world.device
        self.folder = Path(config.output_dir)
        self.run_folder = RunFolder(self.folder, self.world, config.checkpoint)
        self.run_folder.check_room(config, arch, self.session.saved)
        self.step, self.tokens, self.evaluated_at, self.saved_at = 0, 0, -1, -1
        self.saved_time, self.wants_save = time.monotonic(), False
        self.stop: list[int] = []
        """Stop signals that came to this process."""
        self.continues: Path | None = None
        """The newest checkpoint that this run has resumed or written."""
        self.best = Best()
        shown = reporters_of(config.log) if self.world.is_main else []
        self.callbacks = Callbacks([self.best, *shown, *callbacks, Profile()])
        self.log: MetricsLog | None = None  # of the main rank, while the run is open
        self.loss: float | None = None
        self.ended_by = ""
        self.watch = _StepWatch(self.device, config.train.max_bad_steps)
        self.moe_layers = arch.moe_layer_indices
        self.routing_watch = RoutingWatch(self.moe_layers)
        self.rank_watch = RankWatch(self.world.gather, self.say)
        self.expert_counts_LE: torch.Tensor | None = None
        is_frozen = config.lora.rank > 0
        flops = arch.flops_per_token(config.data.seq_len, is_frozen=is_frozen)
        self.clock = Throughput(flops, self.device)
        with self.run_folder.claimed():
            # Before anything slow.
            self.run_folder.check_shared(self.world, ", or set checkpoint.shared no")
            self.run_folder.open_memory(self.world)
            found = self.find(None)
            self.build(arch)
            config = self.config = self.engine.config
            config.log.check(self.total_steps)
            self.model, self.optimizer = self.engine.model, self.engine.optimizer
            self.snapshots = Snapshots(self.engine)
            if found is not None:
                self.resume(found)
            self.world.barrier()  # until every rank has read what may be moved from now on

    # ---- what a kind of run says ---------------------------------------------------------------

    @abstractmethod
    def build(self, arch: Architecture) -> None:
        """Build :attr:`engine` and the data it trains on; set what is declared beside it."""

    @abstractmethod
    def evaluate(self) -> None:
        """Evaluate on held-out data and log it, unless that was done at this step."""

    @abstractmethod
    def log_step(self, result: Any) -> None:
        """Log what the loop got of a step; this waits for the device."""

    @abstractmethod
    def progress(self) -> tuple[dict[str, Any], Mapping[str, Mapping[str, TensorSlice]]]:
        """Return what a checkpoint holds besides the engine: ``sample_index`` and other JSON of its
        ``state.json``, and this rank's parts of further groups."""

    @abstractmethod
    def take_up(self, found: Checkpoint) -> None:
        """Continue from the progress in ``found``, whose state the engine has already loaded."""

    # ---- the run -------------------------------------------------------------------------------

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the run's folder and log, and leave the other ranks at the end.

        Raises:
            RunFailed: too many steps in a row were not finite (a checkpoint of them is marked as
                failed, and ``auto`` does not resume it), or a checkpoint cannot be written.
            SystemExit: SIGTERM (143) or Ctrl-C (130) came, and a checkpoint was written.
        """
        config = self.config
        with self.run_folder.claimed():
            try:
                self.run_folder.set_aside(self.continues, self.step, self.world)
                if self.world.is_main:
                    self.log = MetricsLog(self.folder, config.log, self.total_steps, self.step)
                    self.announce()
                self.run_folder.open_memory(self.world, self.step)
                with self.callbacks.running(self):
                    yield
                    self.report_saved(self.snapshots.wait())
                self.world.leave()
            except _BadSteps as failure:
                raise RunFailed(f"{failure}; {self._save_failed()}") from None
            finally:
                if self.log is not None:
                    self.log.close()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Watch for stop signals in the loop over steps, and save at its end."""
        with stop_signals() as self.stop, garbage_collector_off():
            if self.step == 0 and self.config.train.eval_interval:
                self.evaluate()  # where the held-out curve starts
            self.clock.start()
            self.saved_time = time.monotonic()
            with suppress(GivenUp):
                yield
            self.allow(0)
            self.end_steps()
            for callback in self.callbacks:
                callback.on_last_step(self)
        if self.log is not None:
            self.log.end_progress()

    @property
    def goes_on(self) -> bool:
        return self.step < self.total_steps and not self.watch.asked_to_end

    def end(self, reason: str, *, everywhere: bool = False) -> None:
        """End the run after this step, as if it were its last; ``reason`` is said and returned.

        Of several ranks any may call this: all end together at most two steps later. With
        ``everywhere``, all of them call it at this step, and end with it.
        """
        if not self.ended_by:
            self.ended_by = reason
            self.say(f"ended at step {self.step}: {reason}")
        self.watch.asked_to_end |= everywhere or self.world.size == 1

    def ask_to_save(self) -> None:
        self.wants_save = self.world.is_main

    def due(self, interval: int) -> bool:
        """Return whether something done every ``interval`` steps (0: never) is due now."""
        return interval > 0 and self.step % interval == 0

    def after_step(self, result: Any) -> None:
        """Count the step just taken, and log, evaluate and save, if it is time to.

        ``result`` is :meth:`log_step`'s; its ``skipped`` (0-d bool) is the same on every rank.
        """
        config = self.config
        self.allow(config.launch.hang_seconds)
        if 0 < 60 * config.checkpoint.minutes <= time.monotonic() - self.saved_time:
            self.ask_to_save()
        for callback in self.callbacks:
            callback.on_update(self)
        self.watch.update(result.skipped, self.sum_requests())
        if self.due(config.log.interval) or self.step in (1, self.total_steps):
            self.log_step(result)
        if self.due(config.train.compare_replicas):
            compare_replicas(self.engine.fsdp, self.world)
        if self.due(config.train.eval_interval):
            self.allow(0)
            self.evaluate()
        # What was asked for before the last checkpoint has come with that.
        by_time = self.watch.asked_to_save and self.saved_at < self.step - 1
        to_disk = self.due(config.checkpoint.interval) or by_time
        if to_disk or self.due(config.checkpoint.memory_interval):
            if self.watch.in_row():  # a bad one would push out a good one
                self.say(f"step {self.step} was skipped, not finite: no checkpoint of it")
            else:
                self.allow(0 if to_disk else config.launch.hang_seconds)
                self.begin_save(in_memory=not to_disk)
        self.report_saved(self.snapshots.finished())
        for callback in self.callbacks:
            callback.on_step(self)
        if self.due(config.train.gc_interval):
            gc.collect()
        self.allow(config.launch.hang_seconds)

    def allow(self, seconds: float) -> None:
        """End this process in so many seconds, unless this is called again; 0: never.

        The other ranks of one that hangs, or is stopped, wait for it, and end themselves likewise;
        then the launcher, which has lost some, kills all and starts them again.
        """
        if self.config.launch.hang_seconds:
            faulthandler.cancel_dump_traceback_later()
        if seconds:
            error = cast("TextIO", sys.__stderr__)
            faulthandler.dump_traceback_later(seconds, file=error, exit=True)

    def end_steps(self) -> None:
        """Save what the steps have made, and leave if a stop signal has come to any rank."""
        self.watch.check(is_over=True)
        if self.config.checkpoint.at_end:
            self.save()  # before all that takes time, and while a stop signal can wait
        self.report_saved(self.snapshots.wait())
        if self.sum_requests().item() % _SAVE > 0:
            self.save()
            number = self.stop[0] if self.stop else signal.SIGTERM  # another rank's
            self.say(f"stopped by {signal.Signals(number).name} at step {self.step}")
            self.world.leave()
            raise SystemExit(128 + number)

    def sum_requests(self) -> torch.Tensor:
        """Sum all ranks' stop signals, ``_SAVE`` and ``_END`` (0-d)."""
        # By the main rank's clock, since all must decide alike.
        mine = len(self.stop) + _SAVE * self.wants_save + _END * bool(self.ended_by)
        self.wants_save = False
        return self.world.sum_all(torch.full((), mine, device=self.device))

    def say(self, text: str) -> None:
        if self.log is not None:
            self.log.say(text)

    def routing_row(self, routing: RoutingStats) -> dict[str, float]:
        """Return the health of a step's routing, of all ranks, by name; says what is uneven."""
        self.expert_counts_LE = routing.counts_LE
        for text in self.routing_watch.update(routing):  # every rank finds the same
            self.say(text)
        return self.routing_watch.health(routing)

    def report(self, row: Mapping[str, float | None]) -> None:
        """Log the values of a step or an evaluation, which are the same on every rank."""
        clean = {k: v if v is not None and math.isfinite(v) else None for k, v in row.items()}
        self.loss = clean.get("loss", self.loss)
        if self.log is not None:
            self.log.log(self.step, clean)
        for callback in self.callbacks:
            callback.on_log(self, clean)
        if any(name.startswith("eval_") for name in clean):
            for callback in self.callbacks:
                callback.on_evaluate(self, clean)

    @property
    def _length(self) -> str:
        return "train.steps" if self.config.train.epochs is None else "train.epochs"

    def result(self) -> Result:
        best, reason = self.best, self.ended_by or self._length
        kept = best.path(self.run_folder.checkpoints) if self.config.checkpoint.best else None
        found = best.step, best.value, kept
        return Result(self.step, reason, self.loss, *found, self.continues, self.folder)

    def announce(self) -> None:
        """Say what is about to run, and write ``config.json``."""
        config, arch, say = self.config, self.model.arch, self.say
        settings = json.dumps(config.to_dict(), indent=2)
        (self.folder / "config.json").write_text(settings, "utf-8")
        dtype = str(self.model.compute_dtype).removeprefix("torch.")
        say(
            f"moetrain: {arch.family}, {arch.num_params():,} parameters "
            f"({arch.num_active_params():,} active a token) on {self.world.size} x "
            f"{self.device.type}, {dtype}; {self.trained_on}; output in {config.output_dir}"
        )
        say(f"settings:\n{config.describe()}")
        if arch.moe_layer_indices:
            balance = router_loss(config, arch, is_rl=self.generates)
            say(f"load-balancing loss: coefficient {balance.coefficient:g} ({balance.origin})")
        say(f"{self.total_steps:,} steps, by {self._length}")
        if self.step >= self.total_steps:
            say(
                f"already trained to step {self.step}, nothing is left to do: raise "
                f"{self._length} to go on, set checkpoint.resume never to start again, or choose "
                "another output_dir"
            )

    def export(self, tokenizer: Tokenizer | None, chat_template: str | None) -> None:
        """Write ``output_dir/hf`` and ``output_dir/adapter``, where settings ask for them."""
        if self.config.lora.rank and self.config.lora.save:
            self.engine.save_peft(self.folder / "adapter")
            if self.config.data.new_tokens and tokenizer is not None and self.world.is_main:
                write_files(self.folder / "adapter", tokenizer.export(chat_template).files)
            self.world.barrier()
        if not self.config.checkpoint.save_hf:
            return
        self.engine.save_hf(
            self.folder / "hf",
            dtype=self.config.checkpoint.hf_dtype,
            tokenizer=None if tokenizer is None else tokenizer.export(chat_template),
        )
        self.world.barrier()  # not in a collective, which gives up after a while

    # ---- saving and resuming -------------------------------------------------------------------

    def save(self, *, failed: bool = False) -> Path:
        """Write this step's checkpoint, unless there is one, and wait; RunFailed: it fails."""
        path = self.begin_save(failed=failed)
        self.report_saved(self.snapshots.wait())
        return path

    def begin_save(self, *, failed: bool = False, in_memory: bool = False) -> Path:
        """Begin a checkpoint; with ``checkpoint.asynchronous`` training goes on meanwhile."""
        own, settings = self.run_folder, self.config.checkpoint
        folders, store = (own.memory, None) if in_memory else (own.own, own.store)
        best = self.best.step if settings.best else None
        plan = SavePlan(
            root=(folders or own.disk).root,
            step=self.step,
            keep=settings.keep,
            keep_every=settings.keep_every,
            failed=failed,
            keeps=best,
            folders=folders,
            store=store,
        )
        if self.saved_at == self.step and not failed:
            return plan.path
        self.clock.stop()
        started = time.perf_counter()
        self.report_saved(self.snapshots.wait())  # one at a time
        more, tensors = self.progress()
        progress = {"tokens": self.tokens, "data": self.identity}
        self.snapshots.save(plan, progress | more | self.callbacks.state(), tensors)
        if not settings.asynchronous:
            self.report_saved(self.snapshots.wait())
        self.clock.blocked += time.perf_counter() - started
        if not in_memory:
            self.saved_at, self.continues = self.step, plan.path
            self.saved_time = time.monotonic()
        self.clock.start()
        return plan.path

    def report_saved(self, saved: Saved | None) -> None:
        """Say that a checkpoint is complete, if one is, and not in memory."""
        if saved is not None and saved.path.parent == self.run_folder.checkpoints:
            self.say(f"checkpoint: {saved.path} ({saved.seconds:.1f} s)")
            for callback in self.callbacks:
                callback.on_checkpoint(self, saved.path)

    def _save_failed(self) -> str:
        """Save the state of a failed run under another name; returns what to tell the user."""
        try:
            saved = self.save(failed=True)
        except RunFailed as failure:
            return str(failure)
        if self.run_folder.memory is not None:
            self.run_folder.memory.remove()  # its steps are those that led there
        good = list_checkpoints(saved.parent)[-1:]
        return (
            f"its weights, which may have blown up, are in {saved}, which only checkpoint.resume "
            f"with that path takes; auto goes on from {good[0].name if good else 'the start'}"
        )

    def find(self, before: int | None) -> Checkpoint | None:
        """Find the checkpoint to resume, of an earlier step than ``before``. Collective."""
        resume = self.config.checkpoint.resume
        self.resume_from = self.run_folder.resume_now(resume, self.world)
        return self.run_folder.open(self.resume_from, self.session.arch, self.world, before)

    def resume(self, found: Checkpoint) -> None:
        """Load the state of ``found``; with ``auto``, if it is damaged, of the newest before it."""
        while damaged := self.snapshots.restore(found, self.identity, self.total_steps):
            if self.resume_from != "auto":
                raise ConfigError("checkpoint.resume", damaged)
            if self.world.is_main:
                logger.warning("a damaged checkpoint is passed over: %s", damaged)
            before: int | None = found.state["step"]
            if (memory := self.run_folder.memory) and found.folder.parent == memory.root:
                memory.remove(before)
                before = None
            earlier = self.find(before)
            if earlier is None:
                raise ConfigError(
                    "checkpoint.resume", f"{damaged}, and there is none before it; set never"
                )
            found = earlier
        self.step = found.state["step"]
        self.saved_at = -1 if self.run_folder.is_in_memory(found.folder) else self.step
        self.tokens = found.state["tokens"]
        self.continues = found.folder
        if ("under_way" in found.state) != self.generates:
            kind = "a run that generated nothing" if self.generates else "reinforcement learning"
            remedy = "to begin from its weights give its export (checkpoint.save_hf) as model.path"
            raise ConfigError("checkpoint.resume", f"{str(found.folder)!r} is of {kind}; {remedy}")
        self.callbacks.load_state(found.state)
        self.take_up(found)
