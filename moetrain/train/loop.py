"""Pretraining and fine-tuning: a loop over an engine, its data, its evaluation and its reports.

:class:`Trainer` builds everything from a :class:`~moetrain.config.Config`, resumes if there is
something to resume from, and trains. What every kind of run has around its steps is in
:mod:`moetrain.train.run`; model and optimizer are in :class:`~moetrain.train.engine.Engine`.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from moetrain.checkpoint.read import Checkpoint
from moetrain.config import Config
from moetrain.data.given import given_data
from moetrain.data.loader import Loader, build_data, eval_batches
from moetrain.data.packing import Dataset
from moetrain.losses.balancing import RoutingStats
from moetrain.models.architecture import Architecture
from moetrain.optim.schedule import learning_rate
from moetrain.train.callbacks import Callback, Result
from moetrain.train.engine import Engine
from moetrain.train.objectives import Objective, Pretraining, routing_losses
from moetrain.train.preferences import Reference, chosen_objective, pair_datasets
from moetrain.train.run import GivenUp, Run


class _StepResult(NamedTuple):
    """The numbers of one optimizer step, still on the device (0-d unless said otherwise)."""

    terms: dict[str, torch.Tensor]
    """The objective's terms over the global batch, without their coefficients, by name."""
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    routing: RoutingStats | None
    """Statistics of this rank's micro-batches, summed; None: the model has no experts."""

    @property
    def loss(self) -> torch.Tensor:
        """The first term: the mean cross-entropy in nats a token, unless an objective is given."""
        return next(iter(self.terms.values()))


class _HeldOut(NamedTuple):
    """What was measured on held-out rows."""

    terms: dict[str, float]
    """The objective's terms by name; nan where nothing was counted."""
    is_some: bool
    """True: some row has something of the first thing that the objective counts, such as a
    target."""


class Trainer(Run):
    """One run of pretraining or fine-tuning. ``Trainer(config).fit()`` is all there is to call."""

    def __init__(
        self,
        config: Config,
        *,
        data: Any = None,
        eval_data: Any = None,
        objective: Objective[Any] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Build the run, and resume it if there is something to resume.

        Args:
            data: a sequence or an iterable of rows (:mod:`moetrain.data.given`), read by every
                rank; None: what ``config.data`` describes.
            eval_data: a sequence of rows to evaluate on, or several by name; with ``data`` alone.
            objective: what is minimised beside the routers' losses, and measured in evaluations
                (:mod:`moetrain.train.objectives`); None: what ``train.objective`` says.
            callbacks: what to call as the run goes along (:mod:`moetrain.train.callbacks`).

        Raises ConfigError: a setting or the data is wrong, or the run cannot be made of it here.
        """
        self._given = data
        self._given_eval = eval_data
        self._objective = objective
        self._said_what_counts_nothing = False
        super().__init__(config, callbacks=callbacks, needs_text=data is None)

    def build(self, arch: Architecture) -> None:
        config = self.config
        if self._given is None:
            is_first = self.world.local_rank == 0
            if not is_first:
                self.world.barrier()  # the first rank of a machine tokenises, into a cache for all
            self.data = build_data(config, arch.vocab_size)
            if is_first:
                self.world.barrier()
        else:
            self.data = given_data(self._given, self._given_eval, config, arch.vocab_size)
        pairs = pair_datasets(self.data)
        self._own = chosen_objective(config, pairs, self._objective)
        if pairs and getattr(self._own, "needs_reference", True):
            self.callbacks.append(Reference(pairs))
        self.objective = Pretraining.of(config, arch, own=self._own)
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
        self.identity = self.data.fingerprint
        number = f"{len(self.data.train):,} rows" if len(self.data.train) else "a stream of rows"
        self.trained_on = f"{number} of {config.data.seq_len} tokens"
        is_text, is_given = config.data.source != "synthetic", self._given is not None
        self.has_text = config.is_set("data.tokenizer") if is_given else is_text
        """Whether the ids that are trained on are the tokenizer's."""
        self.engine = Engine(config, arch, self.world)
        self.engine.before_forward = self.give_up_if_stopped

    # ---- the loop ------------------------------------------------------------------------------

    def fit(self) -> Result:
        """Train to ``train.steps``, or for ``train.epochs``; raises as :meth:`opened` says."""
        with self.opened():
            with self.stepping():
                while self.goes_on:
                    self.after_step(self.train_step())
            self.finish()
        return self.result()

    def train_step(self) -> _StepResult:
        """Queue forward, backward and update over one global batch."""
        start = self.loader.sample_index
        self.clock.mark("")
        try:
            batches = self.loader.next_step()
            self.clock.mark("data")
            totals = self.engine.forward_backward(batches, self.objective)
        except GivenUp:
            self.loader.sample_index = start
            raise
        self.clock.mark("forward_backward")
        outcome = self.engine.step(learning_rate(self.step, self.total_steps, self.config.optim))
        self.clock.mark("update")
        self.step += 1
        tokens = self.world.dims.data_ranks * sum(b.tokens_BS.numel() for b in batches)
        self.tokens += tokens
        self.clock.count(tokens // self.world.size)
        return _StepResult(totals.terms, *outcome, totals.routing)

    def give_up_if_stopped(self) -> None:
        """Raise GivenUp between two micro-batches once a stop signal has come.

        Only a single process does so: several would have to agree between all micro-batches where
        to stop, so they stop at the end of the step. So does a stream, which cannot go back.
        """
        if self.stop and self.world.size == 1 and len(self.data.train):
            raise GivenUp

    # ---- evaluation and reports ----------------------------------------------------------------

    def evaluate(self) -> None:
        """Log the mean of the objective over ``train.eval_rows`` held-out rows.

        Of several sets of rows (a mixture's sources, or sets with names) each has a line, and
        ``eval_loss`` is their mean, by shares of the rows that are trained on. A set without a
        target is left out of it, which is said once.
        """
        rows = self.data.eval
        if rows is None or self.evaluated_at == self.step:
            return
        self.clock.stop()
        started = time.perf_counter()
        parts, row = self.data.sources or {"": (rows, 1.0)}, {}
        try:
            found = {name: self.held_out_terms(part) for name, (part, _) in parts.items()}
        except GivenUp:
            return
        counted = [name for name, measured in found.items() if measured.is_some]
        self._say_what_counts_nothing([name for name in parts if name not in counted])
        whole = sum(parts[name][1] for name in counted)
        for name, (terms, is_some) in found.items():
            for term, value in terms.items():
                key = f"eval_{term}"
                row.setdefault(key, 0.0 if counted else math.nan)
                row[key] += value * parts[name][1] / whole if is_some else 0.0
                row |= {f"{key}/{name}": value} if name else {}
        self.evaluated_at = self.step
        self.report({**row, "eval_seconds": time.perf_counter() - started})
        self.clock.start()

    def _say_what_counts_nothing(self, names: list[str]) -> None:
        """Log once that these held-out sets have no target among the rows that are evaluated."""
        if names and not self._said_what_counts_nothing:
            what = "the held-out rows" if names == [""] else f"held-out rows of {', '.join(names)}"
            problem = "no token that is a target in the first train.eval_rows"
            rest = "eval_loss is not measured" if names == [""] else "eval_loss leaves them out"
            self.say(f"{what} have {problem} {self.config.train.eval_rows}: {rest}")
            self._said_what_counts_nothing = True

    def held_out_terms(self, rows: Dataset) -> _HeldOut:
        """Return the terms over ``train.eval_rows`` of ``rows``, the first as ``loss``; collective.

        They are the given objective's, else the cross-entropy in nats a token. Waits for the
        device.
        """
        world, train, objective = self.world, self.config.train, self._own
        ranks = world.data_rank, world.dims.data_ranks
        batches = list(eval_batches(rows, train.eval_rows, train.micro_batch_size, *ranks))
        terms = _named(self.engine.forward(batches, objective).terms)
        counted = next(iter(objective.sizes(batches).values()))
        is_some = world.sum_rows(torch.full((), counted, device=world.device)).item() > 0
        return _HeldOut(terms if is_some else dict.fromkeys(terms, math.nan), is_some)

    def log_step(self, result: _StepResult) -> None:
        """Log the step just done; this waits for the device."""
        self.clock.stop()
        speed = self.clock.take()
        row: dict[str, float | None] = {
            **_named(result.terms),
            "grad_norm": result.grad_norm.item(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "tokens": self.tokens,
            **speed,
            **self.rank_watch.row(speed["step_seconds"] or 0.0),
            "skipped_steps": self.watch.total(),
        }
        if self.engine.static is not None:
            row["retried_steps"] = self.engine.retried_steps
        if result.routing is not None:
            routing = result.routing.map(self.world.sum)
            row |= routing_losses(routing, pooled=self.objective.is_pooled)
            row |= self.routing_row(routing)
        self.report(row)
        self.clock.start()

    def finish(self) -> None:
        """Evaluate, and export what settings ask for."""
        self.evaluate()
        self.export(self.data.tokenizer if self.has_text else None, self.data.chat_template)

    # ---- saving and resuming -------------------------------------------------------------------

    def progress(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        return self.loader.state(), {}

    def take_up(self, found: Checkpoint) -> None:
        self.loader.resume(found.state)


def _named(terms: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return an objective's terms as they are logged: the first is the loss."""
    first, *others = terms
    # Those of the routers are logged for the whole global batch, whatever the objective balances.
    named = {"loss": first} | {k: k for k in others if k not in ("load_balancing", "router_z")}
    return {name: terms[key].item() for name, key in named.items()}
