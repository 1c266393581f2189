"""Pretraining and fine-tuning: a loop over an engine, its data, its evaluation and its reports.

:class:`Trainer` builds everything from a :class:`~moetrain.config.Config`, resumes if there is
something to resume from, and trains. What every kind of run has around its steps is in
:mod:`moetrain.train.run`; model and optimizer are in :class:`~moetrain.train.engine.Engine`.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any, NamedTuple

import torch

from moetrain.checkpoint.read import Checkpoint
from moetrain.config import ConfigError, TrainSection
from moetrain.data.loader import Loader, build_data, eval_batches
from moetrain.data.packing import Dataset
from moetrain.models.architecture import Architecture
from moetrain.models.moe import RoutingStats
from moetrain.optim import learning_rate
from moetrain.train.engine import Engine, sequential
from moetrain.train.metrics import plot_curves, routing_health
from moetrain.train.objectives import CrossEntropy, Pretraining, routing_losses
from moetrain.train.run import GivenUp, Run

_SAMPLER = "moetrain.rollout.weights"
"""Module whose ``write_sample`` writes ``sample.txt``. It is imported by name at the end of a run:
generation is a layer above training, which needs nothing else of it."""


class _StepResult(NamedTuple):
    """The numbers of one optimizer step, still on the device (0-d unless said otherwise)."""

    loss: torch.Tensor
    """Mean cross-entropy over the global batch's targets, in nats a token."""
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    routing: RoutingStats | None
    """Statistics of this rank's micro-batches, summed; None: the model has no experts."""


class Trainer(Run):
    """One run of pretraining or fine-tuning. ``Trainer(config).fit()`` is all there is to call."""

    def build(self, arch: Architecture) -> None:
        """Build data, model and optimizer."""
        config = self.config
        if not self.world.is_first_on_machine:
            self.world.barrier()  # the first rank of a machine tokenises, into a cache for all
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

    # ---- the loop ------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to ``train.steps``, or for ``train.epochs``; raises as :meth:`opened` says."""
        with self.opened():
            with self.stepping():
                while self.goes_on:
                    result = self.train_step()
                    self.count_step(result.skipped)
                    if self.is_logged:
                        self.log_step(result)
                    self.after_step()
            self.finish()

    def train_step(self) -> _StepResult:
        """Queue forward, backward and update over one global batch."""
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
        return _StepResult(totals.terms["cross_entropy"], *outcome, totals.routing)

    def give_up_if_stopped(self) -> None:
        """Raise GivenUp between two micro-batches once a stop signal has come.

        Only a single process does so: several would have to agree between all micro-batches where
        to stop, so they stop at the end of the step.
        """
        if self.stop and self.world.size == 1:
            raise GivenUp

    def one_by_one(self, batches: Any, forward: Any, backward: Any) -> None:
        """Run :func:`~moetrain.train.engine.sequential`, which a stop signal ends early."""

        def forward_unless_stopped(batch: Any) -> torch.Tensor:
            self.give_up_if_stopped()
            return forward(batch)

        sequential(batches, forward_unless_stopped, backward)

    # ---- evaluation and reports ----------------------------------------------------------------

    def evaluate(self) -> None:
        """Log the mean loss of ``train.eval_rows`` held-out rows, in nats a token.

        Of a mixture each source has a loss; ``eval_loss`` is their mean by shares of the rows.
        """
        rows = self.data.eval
        if rows is None or self.evaluated_at == self.step:
            return
        self.clock.stop()
        parts = self.data.sources or {"": (rows, 1.0)}
        try:
            losses = {
                name: held_out_loss(self.engine, part, self.config.train)
                for name, (part, _) in parts.items()
            }
        except GivenUp:
            return
        self.evaluated_at = self.step
        whole = sum(share for _, share in parts.values())
        loss = sum(losses[name] * share / whole for name, (_, share) in parts.items())
        of_sources = {f"eval_loss/{name}": losses[name] for name in self.data.sources}
        self.log.log(self.step, {"eval_loss": loss, **of_sources})
        self.clock.start()

    def log_step(self, result: _StepResult) -> None:
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

    def finish(self) -> None:
        """Evaluate, export what settings ask for, plot the losses and write a sample."""
        self.evaluate()
        data, is_text = self.data, self.config.data.source != "synthetic"
        # Synthetic ids are of no tokenizer.
        self.export(data.tokenizer if is_text else None, data.chat_template)
        if self.world.is_main:
            curves = ("loss", "training", ""), ("eval_loss", "held out", "o")
            plot_curves(self.log.path, self.folder / "loss.png", curves, "loss (nats a token)")
        if self.config.train.sample_tokens and is_text:
            write_sample = import_module(_SAMPLER).write_sample
            write_sample(self.engine, data, self.folder / "sample.txt", self.log)

    # ---- saving and resuming -------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        return self.loader.state()

    def take_up(self, found: Checkpoint) -> None:
        if "under_way" in found.state:
            raise ConfigError(
                "checkpoint.resume",
                f"{str(found.folder)!r} is of reinforcement learning; to begin from its weights "
                "give its export (checkpoint.save_hf) as model.path",
            )
        self.loader.resume(found.state)


def held_out_loss(engine: Engine, rows: Dataset, train: TrainSection) -> float:
    """Return the mean loss of ``train.eval_rows`` of ``rows``, in nats a token, on every rank.

    Waits for the device; nan if no row has a target.
    """
    world = engine.world
    batches = eval_batches(
        rows, train.eval_rows, train.micro_batch_size, world.data_rank, world.dims.data_ranks
    )
    batches, objective = list(batches), CrossEntropy()
    loss = engine.forward(batches, objective).terms["cross_entropy"].item()
    targets = torch.full((), objective.sizes(batches)["targets"], device=world.device)
    return loss if world.sum_rows(targets).item() > 0 else math.nan
