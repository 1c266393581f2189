"""The trainer: pretraining and fine-tuning as a loop over an engine. Read it top to bottom.

:class:`Trainer` builds everything from a :class:`~moetrain.config.Config`, resumes if there is
something to resume from, and trains. Data, evaluation and reports are here, the frame that every
run has in :mod:`moetrain.train.run`, model and optimizer in :class:`~moetrain.train.engine.Engine`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moetrain.checkpoint.read import Checkpoint
from moetrain.config import ConfigError
from moetrain.data.build import build_data
from moetrain.data.loader import Loader
from moetrain.models.architecture import Architecture
from moetrain.models.moe import RoutingStats
from moetrain.optim.schedule import learning_rate
from moetrain.train.engine import Engine
from moetrain.train.evaluate import held_out_loss
from moetrain.train.metrics import plot_losses, routing_health
from moetrain.train.objectives import Pretraining, routing_losses
from moetrain.train.passes import sequential
from moetrain.train.run import Run
from moetrain.train.run_control import GivenUp


class StepResult(NamedTuple):
    """One optimizer step's numbers, still on the device (0-d unless said otherwise)."""

    loss: torch.Tensor
    """Mean cross-entropy over the global batch's targets, nats a token."""
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    routing: RoutingStats | None
    """This rank's, summed over its micro-batches."""


class Trainer(Run[StepResult]):
    """One training run, of which :class:`moetrain.rollout.sample.Trainer` shows a sample too."""

    def build(self, arch: Architecture) -> None:
        """Data, model and optimizer."""
        config = self.config
        if not self.world.is_first_on_machine:
            self.world.barrier()  # for the first one's tokenising: its cache serves all
        self.data = build_data(config, arch.vocab_size)
        if self.world.is_first_on_machine:
            self.world.barrier()
        self.loader = Loader(
            self.data.train,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            seed=config.train.seed,
            rank=self.world.data_rank,
            world_size=self.world.dims.data_ranks,
            seq_len=config.data.seq_len,
            before_batch=self.give_up_if_stopped,
        )
        self.total_steps = config.train.total_steps(len(self.data.train))
        self.engine = Engine(config, arch, self.world, self.one_by_one)
        self.objective = Pretraining.of(config, arch)

    @property
    def identity(self) -> str:
        return self.data.fingerprint

    @property
    def trained_on(self) -> str:
        return f"{len(self.data.train):,} rows of {self.config.data.seq_len} tokens"

    # ---- one step ------------------------------------------------------------------------------

    def train_step(self) -> StepResult:
        """Forward, backward and update over one global batch; queues work."""
        start = self.loader.sample_index
        try:
            batches = self.loader.next_step()
            totals = self.engine.forward_backward(batches, self.objective)
        except GivenUp:
            self.loader.sample_index = start
            raise
        outcome = self.engine.step(learning_rate(self.step, self.total_steps, self.config.optim))
        self.step += 1
        tokens = self.world.dims.data_ranks * sum(b.tokens_BS.numel() for b in batches)
        self.tokens += tokens
        self.clock.count(tokens // self.world.size)
        return StepResult(totals.terms["cross_entropy"], *outcome, totals.routing)

    def give_up_if_stopped(self) -> None:
        """Leave a step, or an evaluation, between two micro-batches once a stop signal came.

        Of one process alone: several would have to agree between all micro-batches where to stop,
        so they stop at the end of the step.

        Raises:
            GivenUp: so it is.
        """
        if self.stop and self.world.size == 1:
            raise GivenUp

    def one_by_one(self, batches: Any, forward: Any, backward: Any) -> None:
        """:func:`~moetrain.train.passes.sequential`, which a stop signal ends early."""

        def forward_unless_stopped(batch: Any) -> torch.Tensor:
            self.give_up_if_stopped()
            return forward(batch)

        sequential(batches, forward_unless_stopped, backward)

    # ---- evaluation and reports ----------------------------------------------------------------

    def evaluate(self) -> None:
        """Log the mean loss of ``train.eval_rows`` held-out rows, nats a token."""
        rows = self.data.eval
        if rows is None or self.evaluated_at == self.step:
            return
        self.clock.stop()
        try:
            loss = held_out_loss(self.engine, rows, self.config.train)
        except GivenUp:
            return
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
        if self.engine.passes.static is not None:
            row["retried_steps"] = self.engine.retried_steps
        if result.routing is not None:
            routing = result.routing.map(self.world.sum)
            row |= routing_losses(routing, pooled=self.objective.is_pooled)
            row |= routing_health(routing, self.model.arch.moe_layer_indices)
            for text in self.routing_watch.update(routing):  # every rank finds the same
                self.log.say(text)
        self.log.log(self.step, row)
        self.clock.start()

    def finish(self) -> None:
        """What a run leaves behind beside its checkpoint: an evaluation, plot, ..."""
        self.evaluate()
        data, is_text = self.data, self.config.data.source != "synthetic"
        # Synthetic ids are of no tokenizer.
        self.export(data.tokenizer if is_text else None, data.chat_template)
        if self.world.is_main:
            plot_losses(self.log.path, self.folder / "loss.png")

    # ---- saving and resuming -------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        return {"sample_index": self.loader.sample_index}

    def take_up(self, found: Checkpoint) -> None:
        if "under_way" in found.state:
            raise ConfigError(
                "checkpoint.resume",
                f"{str(found.folder)!r} is of reinforcement learning; to begin from its weights "
                "give its export (checkpoint.save_hf) as model.path",
            )
        self.loader.sample_index = found.state["sample_index"]
