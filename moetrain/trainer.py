"""The trainer: pretraining and fine-tuning as a loop over an engine. Read it top to bottom.

:class:`Trainer` builds everything from a :class:`~moetrain.config.Config`, resumes if there is
something to resume from, and trains: data, evaluation, reports and checkpoints are here, model and
optimizer in :class:`~moetrain.engine.Engine`. Inside a step nothing here waits for the device:
skipped steps are counted on it and looked at one step late.
"""

from __future__ import annotations

import gc
import json
import signal
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from moetrain.checkpoint import Checkpoint, checkpoint_name
from moetrain.config import Config, RunFailed
from moetrain.data import Loader, build_data
from moetrain.data.tokenizer_files import tokenizer_files
from moetrain.engine import Engine
from moetrain.evaluate import held_out_loss
from moetrain.loss import Pretraining, routing_losses
from moetrain.memory import check_memory, device_capacity, estimate_memory
from moetrain.metrics import (
    MetricsLog,
    RoutingWatch,
    SilentLog,
    Throughput,
    opening_lines,
    plot_losses,
    routing_health,
)
from moetrain.models import Architecture, RoutingStats
from moetrain.optim import learning_rate
from moetrain.parallel.apply import compute_dtype
from moetrain.parallel.world import join_world
from moetrain.preflight import check_what_can_run, prepare
from moetrain.run_control import (
    BadSteps,
    StepWatch,
    garbage_collector_off,
    make_deterministic,
    stop_signals,
)
from moetrain.run_folder import CHECKPOINTS, claimed, set_aside, where_it_failed
from moetrain.snapshot import find_snapshot, restore_snapshot, save_snapshot


class StepResult(NamedTuple):
    """One optimizer step's numbers, still on the device (0-d unless said otherwise)."""

    loss: torch.Tensor
    """Mean cross-entropy over the global batch's targets, nats a token."""
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    routing: RoutingStats | None
    """This rank's, summed over its micro-batches."""


class Trainer:
    """One training run, of which :class:`moetrain.sample.Trainer` shows a sample too."""

    def __init__(self, config: Config) -> None:
        config, arch = prepare(config)
        self.config = config
        self.world = join_world(config, arch)
        self.device = self.world.device
        check_what_can_run(config, arch, self.device)
        memory = estimate_memory(config, arch, self.world.dims, compute_dtype(config, self.device))
        check_memory(memory, config, device_capacity(self.device))
        if config.train.deterministic:
            make_deterministic()
        self.folder = Path(config.output_dir)
        with self.claim():
            self.build(arch)

    def claim(self) -> AbstractContextManager[None]:
        """Meanwhile this run alone writes its folder; a second one ends here."""
        return claimed(self.folder) if self.world.is_main else nullcontext()

    def build(self, arch: Architecture) -> None:
        """Data, model and optimizer, with the state of the checkpoint that the run goes on from."""
        config = self.config
        found = find_snapshot(config, self.folder, arch, self.world)  # before anything slow
        if not self.world.is_first_on_machine:
            self.world.wait()  # for the first one's tokenising: its cache serves all
        self.data = build_data(config, arch.vocab_size)
        if self.world.is_first_on_machine:
            self.world.wait()
        self.loader = Loader(
            self.data.train,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            seed=config.train.seed,
            rank=self.world.data_rank,
            world_size=self.world.dims.data_ranks,
        )
        self.total_steps = config.train.total_steps(len(self.data.train))
        self.engine = Engine(config, arch, self.world)
        self.model, self.optimizer = self.engine.model, self.engine.optimizer
        self.objective = Pretraining.of(config, arch)
        self.step, self.tokens, self.evaluated_at, self.saved_at = 0, 0, -1, -1
        self.continues: Path | None = None
        """The newest checkpoint on this run's way."""
        self.watch = StepWatch(self.device, config.train.max_bad_steps)
        self.routing_watch = RoutingWatch(arch.moe_layer_indices)
        self.clock = Throughput(arch.flops_per_token(config.data.seq_len), self.device)
        if found is not None:
            self.resume(found)
        self.world.wait()  # until every rank has read what may be moved from now on

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
            with stop_signals() as stop, garbage_collector_off():
                if self.step == 0 and config.train.eval_interval:
                    self.evaluate()  # where the held-out curve starts
                self.clock.start()
                while self.step < self.total_steps and not self.watch.asked_to_stop:
                    result = self.train_step()
                    self.watch.update(result.skipped, self.count_stops(stop))
                    if self.due(config.log.interval) or self.step in (1, self.total_steps):
                        self.log_step(result)
                    if self.due(config.train.eval_interval):
                        self.evaluate()
                    if self.due(config.checkpoint.interval):
                        self.save_if_good()
                    if self.due(config.train.gc_interval):
                        gc.collect()
                self.watch.check_end()
                if config.checkpoint.at_end:
                    self.save()  # before all that takes time, and while a stop signal can wait
                if self.count_stops(stop).item() > 0:
                    self.save()
                    number = stop[0] if stop else signal.SIGTERM  # another rank's
                    self.log.say(f"stopped by {signal.Signals(number).name} at step {self.step}")
                    self.world.leave()
                    raise SystemExit(128 + number)
            self.finish()
            self.world.leave()
        except BadSteps as failure:
            raise RunFailed(f"{failure}; {self.save_failed()}") from None
        finally:
            self.log.close()

    def count_stops(self, signals: list[int]) -> torch.Tensor:
        """How many stop signals have come to all ranks (0-d, on the device)."""
        return self.world.sum_all(torch.full((), len(signals), device=self.device))

    def due(self, interval: int) -> bool:
        """Whether something done every ``interval`` steps (0: never) is to be done now."""
        return interval > 0 and self.step % interval == 0

    # ---- one step ------------------------------------------------------------------------------

    def train_step(self) -> StepResult:
        """Forward, backward and update over one global batch; queues work."""
        batches = self.loader.next_step()
        totals = self.engine.forward_backward(batches, self.objective)
        outcome = self.engine.step(learning_rate(self.step, self.total_steps, self.config.optim))
        self.step += 1
        tokens = self.world.dims.data_ranks * sum(b.tokens_BS.numel() for b in batches)
        self.tokens += tokens
        self.clock.count(tokens // self.world.size)
        return StepResult(totals.terms["cross_entropy"], *outcome, totals.routing)

    # ---- evaluation and reports ----------------------------------------------------------------

    def evaluate(self) -> None:
        """Log the mean loss of ``train.eval_rows`` held-out rows, nats a token."""
        rows = self.data.eval
        if rows is None or self.evaluated_at == self.step:
            return
        self.clock.stop()
        loss = held_out_loss(self.engine, rows, self.config.train)
        self.evaluated_at = self.step
        self.log.log(self.step, {"eval_loss": loss})
        self.clock.start()

    def log_step(self, result: StepResult) -> None:
        """Log the step just done; this waits for the device."""
        self.clock.stop()
        row: dict[str, float | None] = {
            "loss": result.loss.item(),
            "grad_norm": result.grad_norm.item(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "tokens": self.tokens,
            **self.clock.take(),
            "skipped_steps": self.watch.total(),
        }
        if self.engine.static is not None:
            row["retried_steps"] = self.engine.retried_steps
        if result.routing is not None:
            routing = result.routing.map(self.world.sum)
            row |= routing_losses(routing, pooled=self.objective.is_pooled)
            row |= routing_health(routing, self.model.arch.moe_layer_indices)
            for text in self.routing_watch.update(routing):  # every rank finds the same
                self.log.say(text)
        self.log.log(self.step, row)
        self.clock.start()

    def announce(self) -> None:
        """Say what is about to run and write ``config.json``."""
        settings = json.dumps(self.config.to_dict(), indent=2)
        (self.folder / "config.json").write_text(settings, "utf-8")
        dtype = str(self.model.compute_dtype).removeprefix("torch.")
        hardware = f"{self.world.size} x {self.device.type}, {dtype}"
        rows, steps = len(self.data.train), (self.step, self.total_steps)
        for text in opening_lines(self.config, self.model.arch, hardware, rows, *steps):
            self.log.say(text)

    def finish(self) -> None:
        """What a run leaves behind beside its checkpoint: an evaluation, plot, ..."""
        self.log.end_progress()
        self.evaluate()
        data = self.data
        if self.config.checkpoint.save_hf:
            is_text = self.config.data.source != "synthetic"  # else the ids are of no tokenizer
            self.engine.save_hf(
                self.folder / "hf",
                dtype=self.config.checkpoint.hf_dtype,
                tokenizer=tokenizer_files(data.tokenizer, data.chat_template) if is_text else None,
            )
            self.world.wait()  # not in a collective, which gives up after a while
        if self.world.is_main:
            plot_losses(self.log.path, self.folder / "loss.png")

    # ---- saving and resuming -------------------------------------------------------------------

    def save(self, *, failed: bool = False) -> Path:
        """Write a checkpoint of the current step, unless there is one already.

        Raises:
            RunFailed: it cannot be written.
        """
        path = self.folder / CHECKPOINTS / checkpoint_name(self.step, failed=failed)
        if self.saved_at == self.step and not failed:
            return path
        self.clock.stop()
        progress = {
            "step": self.step,
            "tokens": self.tokens,
            "sample_index": self.loader.sample_index,
            "data": self.data.fingerprint,
        }
        save_snapshot(self.engine, path.parent, progress, failed=failed)
        self.log.say(f"checkpoint: {path}")
        self.saved_at, self.continues = self.step, path
        self.clock.start()
        return path

    def save_if_good(self) -> None:
        """:meth:`save`, but not while steps are skipped: it would push out what was good."""
        if self.watch.in_row():
            self.log.say(f"step {self.step} was skipped, not finite: no checkpoint of it")
        else:
            self.save()

    def save_failed(self) -> str:
        """Save what a failed run has come to, apart from the good; returns what to say."""
        try:
            return where_it_failed(self.save(failed=True))
        except RunFailed as failure:
            return str(failure)

    def resume(self, found: Checkpoint) -> None:
        """Take up where ``found`` was saved."""
        restore_snapshot(found, self.engine, self.data.fingerprint, self.total_steps)
        self.step = self.saved_at = found.state["step"]
        self.tokens = found.state["tokens"]
        self.loader.sample_index = found.state["sample_index"]
        self.continues = found.folder
