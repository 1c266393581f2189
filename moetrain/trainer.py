"""The trainer: build, step, fit. Read it top to bottom.

:class:`Trainer` builds everything from a :class:`~moetrain.config.Config`, resumes if there is
something to resume from, and trains. Inside a step nothing here waits for the device (dispatch of
tokens of unknown number does): clipping and the skip decision happen in the fused update
(``optim.guarded_step``), and skipped steps are counted on the device and looked at one step late.
"""

from __future__ import annotations

import gc
import json
import logging
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from moetrain.checkpoint import Checkpoint, checkpoint_name, open_checkpoint, save_checkpoint
from moetrain.config import Config, RunFailed
from moetrain.config_sources import changed_settings
from moetrain.data import Batch, Loader, build_data
from moetrain.data.tokenizer_files import tokenizer_files
from moetrain.evaluate import held_out_loss, sample_text
from moetrain.generate import SampleError
from moetrain.loss import (
    GlobalBatch,
    LossCoefficients,
    MicroLoss,
    micro_batch_loss,
    routing_losses,
)
from moetrain.memory import check_memory, device_capacity, estimate_memory
from moetrain.metrics import (
    MetricsLog,
    RoutingWatch,
    SilentLog,
    Throughput,
    plot_losses,
    routing_health,
)
from moetrain.models import (
    Architecture,
    RoutingStats,
    update_router_bias,
)
from moetrain.optim import build_optimizer, guarded_step, learning_rate, set_learning_rate
from moetrain.parallel.apply import (
    compute_dtype,
    place_model,
    save_whole_model,
    static_transport,
)
from moetrain.parallel.world import join_world
from moetrain.preflight import check_what_can_run, prepare
from moetrain.run_control import (
    BadSteps,
    LateNumbers,
    StepWatch,
    garbage_collector_off,
    make_deterministic,
    stop_signals,
)
from moetrain.run_folder import (
    CHECKPOINTS,
    claimed,
    find_checkpoint,
    set_aside,
    where_it_failed,
)
from moetrain.snapshot import check_continues, check_same_run, restore_snapshot, take_snapshot

logger = logging.getLogger("moetrain")


class StepResult(NamedTuple):
    """One optimizer step's numbers, still on the device (0-d unless said otherwise)."""

    loss: torch.Tensor
    """Mean cross-entropy over the global batch's targets, nats a token."""
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    routing: RoutingStats | None
    """This rank's, summed over its micro-batches."""


class Trainer:
    """One training run. ``Trainer(config).fit()`` is all there is to call."""

    def __init__(self, config: Config) -> None:
        config, arch = prepare(config)
        self.config = config
        self.world = join_world(config, arch)
        self.device = self.world.device
        check_what_can_run(config, arch, self.device)
        dtype = compute_dtype(config, self.device)
        memory = estimate_memory(config, arch, self.world.dims, dtype)
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
        found = self.find(arch)  # before anything slow; every rank waits for the main one's answer
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
        self.model, self.fsdp = place_model(config, arch, self.world)
        self.static = static_transport(self.model)
        self.retried_steps = 0
        self.optimizer = build_optimizer(self.fsdp.members, config.optim)
        aux = config.moe.aux_loss_coef
        self.coefficients = LossCoefficients(
            arch.router_aux_loss_coef if aux is None else aux,
            config.moe.z_loss_coef,
            config.moe.pools_aux_loss(config.model),
        )
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
                    stops = torch.full((), len(stop), device=self.device)
                    self.watch.update(result.skipped, self.world.sum(stops))
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
                stops = torch.full((), len(stop), device=self.device)
                if self.world.sum(stops).item() > 0:
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

    def due(self, interval: int) -> bool:
        """Whether something done every ``interval`` steps (0: never) is to be done now."""
        return interval > 0 and self.step % interval == 0

    # ---- one step ------------------------------------------------------------------------------

    def train_step(self) -> StepResult:
        """Forward, backward and update over one global batch; queues work."""
        batches = self.loader.next_step()
        # Counted where the batches are made, on the host, before they travel.
        counted = (
            sum(int((b.targets_BS >= 0).sum()) for b in batches),
            sum(b.num_tokens for b in batches),
        )
        # torch.tensor would wait
        counted = torch.stack([torch.full((), n, device=self.device) for n in counted])
        sizes = GlobalBatch(*self.world.sum_rows(counted).clamp(min=1).unbind())
        batches = [b.to(self.device) for b in batches]
        self.model.train()
        with self.fsdp.work():
            losses, dropped = self.run_batches(batches, sizes)
        # With fixed sizes alone: waits for the last forward, while its backward runs.
        if dropped is not None and dropped.read() > 0:
            self.retried_steps += 1
            self.fsdp.clear_gradients()
            with self.exact_sizes(), self.fsdp.work():
                losses, _ = self.run_batches(batches, sizes)
        terms = [torch.stack([m.total, m.cross_entropy]) for m in losses]
        total, loss = self.world.sum(torch.stack(terms).sum(0)).unbind()
        routing = _sum_routing([m.routing for m in losses])
        norm = self.fsdp.gradient_norm()
        lr = learning_rate(self.step, self.total_steps, self.config.optim)
        set_learning_rate(self.optimizer, lr)
        skipped = guarded_step(self.optimizer, total, norm, self.config.optim.max_grad_norm)
        self.fsdp.clear_gradients()
        if routing is not None and self.config.moe.bias_update_rate:
            rate = self.config.moe.bias_update_rate * ~skipped
            update_router_bias(self.model, self.world.sum(routing.counts_LE), rate)
        self.step += 1
        tokens = self.world.dims.data_ranks * sum(b.tokens_BS.numel() for b in batches)
        self.tokens += tokens
        self.clock.count(tokens // self.world.size)
        return StepResult(loss, norm, skipped, routing)

    def run_batches(
        self, batches: list[Batch], sizes: GlobalBatch
    ) -> tuple[list[MicroLoss], LateNumbers | None]:
        """Forward and backward of every micro-batch, gradients added up.

        Also, where buffers of fixed sizes carry tokens between ranks, how many rows of all ranks
        found no room in them.
        """
        with self.exact_sizes():
            global_counts = self.count_experts(batches)
        losses, dropped, late = [], None, None
        for batch in batches:
            loss = micro_batch_loss(self.model, batch, sizes, self.coefficients, global_counts)
            if loss.routing is not None and loss.routing.dropped is not None:
                dropped = loss.routing.dropped + (0 if dropped is None else dropped)
                if batch is batches[-1]:  # before the backward, which then runs while this is read
                    late = LateNumbers(self.world.sum(dropped))
            self.fsdp.backward(loss.total, is_last=batch is batches[-1])
            losses.append(loss._replace(total=loss.total.detach()))
        return losses, late

    def exact_sizes(self) -> AbstractContextManager[None]:
        """Whatever the routing, no row is dropped meanwhile."""
        return nullcontext() if self.static is None else self.static.exactly()

    def count_experts(self, batches: list[Batch]) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """How a micro-batch learns the expert counts of the whole batch; see micro_batch_loss.

        With several micro-batches it takes a forward pass over all of them without gradients; a
        single one's own counts, summed over the ranks, are the batch's.
        """
        if self.config.moe.aux_loss_scope == "micro_batch":
            return None
        if (
            len(batches) == 1
            or self.model.arch.num_moe_layers == 0
            or self.coefficients.load_balancing == 0
        ):
            return self.world.sum
        with torch.no_grad():
            routings = []
            for b in batches:
                inputs = (b.tokens_BS, b.positions_BS, b.cu_seqlens, b.is_pad_BS)
                routings.append(self.model.backbone(*inputs)[1])
        routing = _sum_routing(routings)
        assert routing is not None  # the model has MoE layers
        counts_LE = self.world.sum(routing.counts_LE)
        return lambda own_counts_LE: counts_LE

    # ---- evaluation and reports ----------------------------------------------------------------

    def evaluate(self) -> None:
        """Log the mean loss of ``train.eval_rows`` held-out rows, nats a token."""
        rows = self.data.eval
        if rows is None or self.evaluated_at == self.step:
            return
        self.pause_clock()
        loss = held_out_loss(
            self.model, self.fsdp, self.world, rows, self.config.train, self.exact_sizes
        )
        self.evaluated_at = self.step
        self.log.log(self.step, {"eval_loss": loss})
        self.clock.start()

    def log_step(self, result: StepResult) -> None:
        """Log the step just done; this waits for the device."""
        self.pause_clock()
        row: dict[str, float | None] = {
            "loss": result.loss.item(),
            "grad_norm": result.grad_norm.item(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "tokens": self.tokens,
            **self.clock.take(),
            "skipped_steps": self.watch.total(),
        }
        if self.static is not None:
            row["retried_steps"] = self.retried_steps
        if result.routing is not None:
            routing = self.world_routing(result.routing)
            row |= routing_losses(routing, self.coefficients)
            row |= routing_health(routing, self.model.arch.moe_layer_indices)
            for text in self.routing_watch.update(routing):  # every rank finds the same
                self.log.say(text)
        self.log.log(self.step, row)
        self.clock.start()

    def world_routing(self, routing: RoutingStats) -> RoutingStats:
        """The statistics of all ranks together."""
        return RoutingStats(*(self.world.sum(x) for x in routing[:5]))

    def pause_clock(self) -> None:
        """Wait for the device and stop counting time as training."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.clock.stop()

    def announce(self) -> None:
        """Say what is about to run and write ``config.json``."""
        arch, config = self.model.arch, self.config
        (self.folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2), "utf-8")
        self.log.say(
            f"moetrain: {arch.family}, {arch.num_params():,} parameters "
            f"({arch.num_active_params():,} active a token) on "
            f"{self.world.size} x {self.device.type}, "
            f"{str(self.model.compute_dtype).removeprefix('torch.')}; "
            f"{len(self.data.train):,} rows of {config.data.seq_len} tokens; "
            f"output in {self.folder}"
        )
        self.log.say(f"settings:\n{config.describe()}")
        length = "train.steps" if config.train.epochs is None else "train.epochs"
        self.log.say(f"{self.total_steps:,} steps, by {length}")
        if self.step >= self.total_steps:
            self.log.say(
                f"already trained to step {self.step}, nothing is left to do: raise {length} to go "
                "on, set checkpoint.resume never to start again, or choose another output_dir"
            )

    def finish(self) -> None:
        """What a run leaves behind beside its checkpoint: an evaluation, plot, sample, ..."""
        self.log.end_progress()
        self.evaluate()
        if self.config.checkpoint.save_hf:
            data = self.data
            is_text = self.config.data.source != "synthetic"  # else the ids are of no tokenizer
            save_whole_model(
                self.model,
                self.fsdp,
                self.folder / "hf",
                write=self.world.is_main,
                dtype=self.config.checkpoint.hf_dtype,
                tokenizer=tokenizer_files(data.tokenizer, data.chat_template) if is_text else None,
            )
            self.world.wait()  # not in a collective, which gives up after a while
        if self.world.is_main:
            plot_losses(self.log.path, self.folder / "loss.png")
        if self.config.train.sample_tokens and self.config.data.source != "synthetic":
            try:
                text = sample_text(
                    self.model, self.fsdp, self.world, self.data, self.config, self.exact_sizes
                )
            except SampleError as error:  # the run did what it was for
                self.log.say(f"no sample: {error} (train.sample_prompt, train.sample_tokens)")
                return
            if self.world.is_main:
                (self.folder / "sample.txt").write_text(text, "utf-8")
                self.log.say("sample:\n" + text)

    # ---- saving and resuming -------------------------------------------------------------------

    def save(self, *, failed: bool = False) -> Path:
        """Write a checkpoint of the current step, unless there is one already.

        Raises:
            RunFailed: it cannot be written.
        """
        root = self.folder / CHECKPOINTS
        path = root / checkpoint_name(self.step, failed=failed)
        if self.saved_at == self.step and not failed:
            return path
        self.pause_clock()
        groups = take_snapshot(
            self.model, self.fsdp, self.optimizer, self.device, keep=self.world.is_main
        )
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "sample_index": self.loader.sample_index,
            "data": self.data.fingerprint,
            "architecture": self.model.arch.model_dump(mode="json"),
            "config": self.config.to_dict(),
        }
        if self.world.is_main:
            keep = self.config.checkpoint.keep
            save_checkpoint(root, self.step, groups, state, keep, failed=failed)
            self.log.say(f"checkpoint: {path}")
        self.world.wait()
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

    def find(self, arch: Architecture) -> Checkpoint | None:
        """What ``checkpoint.resume`` asks for, chosen by the main rank; None: start afresh."""
        path = None
        if self.world.is_main:
            path = find_checkpoint(self.config.checkpoint.resume, self.folder)
        path = self.world.share("" if path is None else str(path))
        if not path:
            return None
        found = open_checkpoint(Path(path))
        check_continues(found, arch)
        return found

    def resume(self, found: Checkpoint) -> None:
        """Take up where ``found`` was saved."""
        check_same_run(found, self.config, self.data.fingerprint, self.total_steps)
        restore_snapshot(found, self.model, self.fsdp, self.optimizer, self.device)
        self.step = self.saved_at = found.state["step"]
        self.tokens = found.state["tokens"]
        self.loader.sample_index = found.state["sample_index"]
        self.continues = found.folder
        logger.info("resuming from %s", found.folder)
        for line in changed_settings(found.state["config"], self.config.to_dict()):
            logger.info("  changed since: %s", line)


def _sum_routing(stats: list[RoutingStats | None]) -> RoutingStats | None:
    """The statistics of several micro-batches together; None: a dense model's."""
    routed = [s for s in stats if s is not None]
    if not routed:
        return None
    parts = zip(*(s[:5] for s in routed), strict=True)
    return RoutingStats(*(torch.stack(part).sum(0) for part in parts))
