"""The frame of a run, whatever it trains: its folder, resuming, steps until the end, stopping.

:class:`Run` is what :class:`moetrain.train.trainer.Trainer` and the loop of reinforcement learning
have in common. Each says what a step is; when to evaluate, log, save and stop is said here. Inside
a
step nothing here waits for the device: skipped steps are counted on it and looked at one step late.
"""

from __future__ import annotations

import gc
import json
import logging
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from moetrain.checkpoint.folder import checkpoint_name
from moetrain.checkpoint.read import Checkpoint
from moetrain.checkpoint.save import Saved
from moetrain.config import Config, ConfigError, RunFailed, launched_place
from moetrain.data.tokenizer import Tokenizer
from moetrain.data.tokenizer_files import tokenizer_files
from moetrain.models.architecture import Architecture
from moetrain.models.planned import compute_dtype
from moetrain.parallel.layout import TensorSlice
from moetrain.parallel.processes import device_capacity
from moetrain.parallel.world import join_world
from moetrain.train.engine import Engine
from moetrain.train.host_memory import check_host
from moetrain.train.memory import MemoryEstimate, check_memory, estimate_memory
from moetrain.train.metrics import MetricsLog, RoutingWatch, SilentLog, Throughput, opening_lines
from moetrain.train.preflight import check_what_can_run, prepare
from moetrain.train.profiling import Profile
from moetrain.train.run_control import (
    SAVE,
    BadSteps,
    GivenUp,
    StepWatch,
    garbage_collector_off,
    make_deterministic,
    stop_signals,
)
from moetrain.train.run_folder import (
    CHECKPOINTS,
    check_shared,
    claimed,
    resume_now,
    set_aside,
    where_it_failed,
)
from moetrain.train.snapshot import Snapshots, find_snapshot, restore_snapshot

logger = logging.getLogger("moetrain")


class Stepped(Protocol):
    """What a run has to be told of a step."""

    @property
    def skipped(self) -> torch.Tensor:
        """0-d bool, on the device, the same on every rank: it was not finite."""
        ...


S = TypeVar("S", bound=Stepped)


class Run(ABC, Generic[S]):
    """One training run. ``fit()`` is all there is to call."""

    engine: Engine
    total_steps: int

    def __init__(self, config: Config) -> None:
        config, arch = prepare(config)
        self.config = config
        self.world = join_world(config, arch)
        self.device = self.world.device
        check_what_can_run(config, arch, self.device)
        check_memory(self.estimate(arch), config, device_capacity(self.device))
        check_host(config, arch, self.world)
        if config.train.deterministic:
            make_deterministic()
        self.folder = Path(config.output_dir)
        self.step, self.tokens, self.evaluated_at, self.saved_at = 0, 0, -1, -1
        self.saved_time = time.monotonic()
        self.stop: list[int] = []
        """Stop signals that came to this process."""
        self.continues: Path | None = None
        """The newest checkpoint on this run's way."""
        self.watch = StepWatch(self.device, config.train.max_bad_steps)
        self.routing_watch = RoutingWatch(arch.moe_layer_indices)
        is_frozen = config.lora.rank > 0
        flops = arch.flops_per_token(config.data.seq_len, is_frozen=is_frozen)
        self.clock = Throughput(flops, self.device)
        with self.claim():
            # Before anything slow.
            check_shared(self.folder, self.world)
            found = self.find(arch, None)
            self.build(arch)
            config.log.check(self.total_steps)
            self.model, self.optimizer = self.engine.model, self.engine.optimizer
            self.snapshots = Snapshots(self.engine)
            if found is not None:
                self.resume(found)
            self.world.barrier()  # until every rank has read what may be moved from now on

    def claim(self) -> AbstractContextManager[None]:
        """Meanwhile this run alone writes its folder; a second one ends here."""
        return claimed(self.folder) if self.world.is_main else nullcontext()

    # ---- what a run is of ----------------------------------------------------------------------

    def estimate(self, arch: Architecture) -> MemoryEstimate:
        """What it takes on this rank's device."""
        dtype = compute_dtype(self.config, self.device)
        return estimate_memory(self.config, arch, self.world.dims, dtype)

    @abstractmethod
    def build(self, arch: Architecture) -> None:
        """Make :attr:`engine`, whatever it trains on, and say :attr:`total_steps`."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Hash of what it trains on."""

    @property
    @abstractmethod
    def trained_on(self) -> str:
        """What it trains on, for people."""

    @abstractmethod
    def train_step(self) -> S:
        """One step; adds to :attr:`step` and :attr:`tokens`. Raises GivenUp where a stop signal
        ended it early; everything is then as it was before it."""

    @abstractmethod
    def log_step(self, result: S) -> None:
        """Log the step just done."""

    @abstractmethod
    def evaluate(self) -> None:
        """Log what held-out data shows, unless it was done at this step."""

    @abstractmethod
    def finish(self) -> None:
        """What a run leaves behind beside its checkpoint: an evaluation, plot, sample, ..."""

    @abstractmethod
    def progress(self) -> dict[str, Any]:
        """Of a checkpoint's ``state.json``: ``sample_index``, and whatever else is JSON."""

    def progress_tensors(self) -> Mapping[str, Mapping[str, TensorSlice]]:
        """This rank's parts of groups of a checkpoint besides the engine's; after :meth:`progress`.
        Every rank names every group."""
        return {}

    @abstractmethod
    def take_up(self, found: Checkpoint) -> None:
        """Go on from the progress in ``found``; the engine has its state."""

    # ---- the run -------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to ``train.steps``, or for ``train.epochs``.

        Raises:
            RunFailed: too many non-finite steps in a row (their checkpoint is marked, and not one
                to go on from), or a checkpoint that cannot be written.
            SystemExit: SIGTERM (143) or Ctrl-C (130) came, after a checkpoint.
        """
        with self.claim():
            self.run()

    def run(self) -> None:
        """:meth:`fit`, in a folder of its own."""
        config = self.config
        if self.world.is_main:
            set_aside(self.folder, self.continues, self.step)
            self.log = MetricsLog(self.folder, config.log, self.total_steps, self.step)
        else:
            self.log = SilentLog()
        try:
            if self.world.is_main:
                self.announce()
            with stop_signals() as stop, garbage_collector_off(), self.profile() as profile:
                self.stop = stop
                if self.step == 0 and config.train.eval_interval:
                    self.evaluate()  # where the held-out curve starts
                self.clock.start()
                self.saved_time = time.monotonic()
                while self.step < self.total_steps and not self.watch.asked_to_stop:
                    try:
                        result = self.train_step()
                    except GivenUp:
                        break
                    asked = self.sum_requests(stop, save=self.is_time_to_save())
                    self.watch.update(result.skipped, asked)
                    profile.step_done(self.step)
                    if self.due(config.log.interval) or self.step in (1, self.total_steps):
                        self.log_step(result)
                    if self.due(config.train.eval_interval):
                        self.evaluate()
                    # What was asked for before the last checkpoint has come with that.
                    by_time = self.watch.asked_to_save and self.saved_at < self.step - 1
                    if self.due(config.checkpoint.interval) or by_time:
                        self.save_if_good()
                    self.report_saved(self.snapshots.finished())
                    if self.due(config.train.gc_interval):
                        gc.collect()
                self.watch.check_end()
                if config.checkpoint.at_end:
                    self.save()  # before all that takes time, and while a stop signal can wait
                self.report_saved(self.snapshots.wait())
                if self.sum_requests(stop).item() > 0:
                    self.save()
                    number = stop[0] if stop else signal.SIGTERM  # another rank's
                    self.log.say(f"stopped by {signal.Signals(number).name} at step {self.step}")
                    self.world.leave()
                    raise SystemExit(128 + number)
            self.log.end_progress()
            self.finish()
            self.world.leave()
        except BadSteps as failure:
            raise RunFailed(f"{failure}; {self.save_failed()}") from None
        finally:
            self.log.close()

    def profile(self) -> Profile:
        """What traces steps, if any are to be."""
        return Profile(self.config.log, self.folder, self.world.rank, self.clock, self.log.say)

    def sum_requests(self, signals: list[int], *, save: bool = False) -> torch.Tensor:
        """The stop signals that have come to all ranks, plus :data:`SAVE` where the main rank says
        ``save``; so all ranks decide alike, by one clock (0-d, on the device)."""
        mine = len(signals) + SAVE * (save and self.world.is_main)
        return self.world.sum_all(torch.full((), mine, device=self.device))

    def is_time_to_save(self) -> bool:
        """Whether ``checkpoint.minutes`` have passed since the last save, by this rank's clock."""
        seconds = 60 * self.config.checkpoint.minutes
        return 0 < seconds <= time.monotonic() - self.saved_time

    def due(self, interval: int) -> bool:
        """Whether something done every ``interval`` steps (0: never) is to be done now."""
        return interval > 0 and self.step % interval == 0

    def announce(self) -> None:
        """Say what is about to run and write ``config.json``."""
        settings = json.dumps(self.config.to_dict(), indent=2)
        (self.folder / "config.json").write_text(settings, "utf-8")
        dtype = str(self.model.compute_dtype).removeprefix("torch.")
        hardware = f"{self.world.size} x {self.device.type}, {dtype}"
        steps = (self.step, self.total_steps)
        for text in opening_lines(self.config, self.model.arch, hardware, self.trained_on, *steps):
            self.log.say(text)

    def export(self, tokenizer: Tokenizer | None, chat_template: str | None) -> None:
        """Write ``output_dir/hf`` and ``output_dir/adapter``, where settings ask for them."""
        if self.config.lora.rank and self.config.lora.save:
            self.engine.save_peft(self.folder / "adapter")
            self.world.barrier()
        if not self.config.checkpoint.save_hf:
            return
        self.engine.save_hf(
            self.folder / "hf",
            dtype=self.config.checkpoint.hf_dtype,
            tokenizer=None if tokenizer is None else tokenizer_files(tokenizer, chat_template),
        )
        self.world.barrier()  # not in a collective, which gives up after a while

    # ---- saving and resuming -------------------------------------------------------------------

    def save(self, *, failed: bool = False) -> Path:
        """Write a checkpoint of the current step, unless there is one; it is complete on return.

        Raises:
            RunFailed: it cannot be written, or one that was under way could not.
        """
        path = self.begin_save(failed=failed)
        self.report_saved(self.snapshots.wait())
        return path

    def begin_save(self, *, failed: bool = False) -> Path:
        """:meth:`save`, which with ``checkpoint.asynchronous`` goes on while the run does."""
        path = self.folder / CHECKPOINTS / checkpoint_name(self.step, failed=failed)
        if self.saved_at == self.step and not failed:
            return path
        self.clock.stop()
        started = time.perf_counter()
        self.report_saved(self.snapshots.wait())  # one at a time
        progress = {"step": self.step, "tokens": self.tokens, "data": self.identity}
        progress |= self.progress()
        self.snapshots.save(path.parent, progress, self.progress_tensors(), failed=failed)
        if not self.config.checkpoint.asynchronous:
            self.report_saved(self.snapshots.wait())
        self.clock.count_blocked(time.perf_counter() - started)
        self.saved_at, self.continues = self.step, path
        self.saved_time = time.monotonic()
        self.clock.start()
        return path

    def report_saved(self, saved: Saved | None) -> None:
        """Say that a checkpoint is complete, if one is."""
        if saved is not None:
            self.log.say(f"checkpoint: {saved.path} ({saved.seconds:.1f} s)")

    def save_if_good(self) -> None:
        """:meth:`begin_save`, but not while steps are skipped: it would push out what was good."""
        if self.watch.in_row():
            self.log.say(f"step {self.step} was skipped, not finite: no checkpoint of it")
        else:
            self.begin_save()

    def save_failed(self) -> str:
        """Save what a failed run has come to, apart from the good; returns what to say."""
        try:
            return where_it_failed(self.save(failed=True))
        except RunFailed as failure:
            return str(failure)

    def find(self, arch: Architecture, before: int | None) -> Checkpoint | None:
        """The checkpoint to go on from, of an earlier step than ``before``. Collective."""
        place, resume = launched_place(), self.config.checkpoint.resume
        if place is not None and self.world.is_main:
            resume = resume_now(resume, self.folder, place.restarts)
        self.resume_from = self.world.broadcast(resume)
        return find_snapshot(self.resume_from, self.folder, arch, self.world, before)

    def resume(self, found: Checkpoint) -> None:
        """Take up the state of ``found``; if it is damaged, with ``auto``, of one before it."""
        data, total = self.identity, self.total_steps
        while damaged := restore_snapshot(found, self.engine, data, total):
            if self.resume_from != "auto":
                raise ConfigError("checkpoint.resume", damaged)
            if self.world.is_main:
                logger.warning("a damaged checkpoint is passed over: %s", damaged)
            earlier = self.find(self.engine.arch, before=found.state["step"])
            if earlier is None:
                raise ConfigError("checkpoint.resume", f"{damaged}, and there is none before it")
            found = earlier
        self.step = self.saved_at = found.state["step"]
        self.tokens = found.state["tokens"]
        self.continues = found.folder
        self.take_up(found)
