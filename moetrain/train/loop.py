"""The loop of pretraining and fine-tuning.

:class:`Trainer` builds a run from a :class:`~moetrain.config.Config`, and resumes it if there is a
checkpoint to resume. :meth:`Trainer.fit` is the loop: a step, then logs, evaluation and checkpoint
where they are due. It uses an :class:`~moetrain.train.engine.Engine` (model and optimizer), a
:class:`~moetrain.data.loader.Loader` (batches), and the objects of a
:class:`~moetrain.train.run.Run` (reports, checkpoints, requests to stop).
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from moetrain.checkpoint.read import Checkpoint
from moetrain.config import Config, ConfigError
from moetrain.data.loader import Data, HeldOut, Loader, build_data, eval_batches
from moetrain.data.packing import Dataset
from moetrain.data.program_rows import data_of_rows
from moetrain.losses.balancing import RoutingStats
from moetrain.optim.schedule import learning_rate
from moetrain.parallel.world import World
from moetrain.train.callbacks import Callback, Result
from moetrain.train.checkpointer import Progress
from moetrain.train.engine import Engine
from moetrain.train.faults import compare_replicas
from moetrain.train.objectives import Objective, Pretraining, routing_losses
from moetrain.train.preferences import Reference, chosen_objective, pair_datasets
from moetrain.train.run import Run, claimed_folder
from moetrain.train.session import Session, prepare
from moetrain.train.stops import GivenUp


class StepResult(NamedTuple):
    """The results of one optimizer step, still on the device (0-d unless said otherwise)."""

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
    """The measurement on one set of held-out rows."""

    terms: dict[str, float]
    """The objective's terms by name; nan: nothing was counted."""
    is_some: bool
    """True: the first denominator of the objective, such as the count of targets, is above 0."""


class Trainer(Run):
    """One run of pretraining or fine-tuning. ``Trainer(config).fit()`` is all there is to call."""

    def __init__(
        self,
        config: Config,
        *,
        data: Sequence[Any] | Iterable[Any] | None = None,
        eval_data: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
        objective: Objective[Any] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Build the run, and resume it if there is something to resume.

        Args:
            config: the settings.
            data: a sequence or an iterable of rows (:mod:`moetrain.data.program_rows`), read by
                every rank; None: what ``config.data`` describes.
            eval_data: a sequence of rows to evaluate on, or several by name. It needs ``data``.
            objective: is minimised beside the routers' losses, and measured in evaluations
                (:mod:`moetrain.train.objectives`); None: the one that ``train.objective`` names.
            callbacks: are called as the run goes along (:mod:`moetrain.train.callbacks`).

        Raises ConfigError: a setting or the data is wrong, or the run cannot be made of it here.
        """
        session = Session(*prepare(config, needs_text=data is None))
        config, arch, world = session.config, session.arch, session.world
        with claimed_folder(session) as (folder, found):
            if data is None:
                self.data = _build_data(config, arch.vocab_size, world)
            else:
                self.data = data_of_rows(data, eval_data, config, arch.vocab_size)
            has_text = config.data.source != "synthetic"
            self.has_text = has_text if data is None else config.is_set("data.tokenizer")
            """True: the ids that are trained on are the tokenizer's."""
            pairs = pair_datasets(self.data)
            self.own_objective = chosen_objective(config, pairs, objective)
            """The objective that is minimised and measured, without the routers' losses."""
            self.objective = Pretraining.of(config, arch, own=self.own_objective)
            if pairs and getattr(self.own_objective, "needs_reference", True):
                callbacks = [*callbacks, Reference(pairs)]
            self.loader = Loader(
                self.data.train,
                global_batch_size=config.train.global_batch_size,
                micro_batch_size=config.train.micro_batch_size,
                seed=config.train.seed,
                rank=world.data_rank,
                world_size=world.dims.data_ranks,
                seq_len=config.data.seq_len,
                before_batch=self.give_up_if_stopped,
            )
            rows = len(self.data.train)
            number = f"{rows:,} rows" if rows else "a stream of rows"
            super().__init__(
                session,
                folder,
                Engine(config, arch, world),
                callbacks=callbacks,
                total_steps=config.train.total_steps(rows),
                identity=self.data.fingerprint,
                trained_on=f"{number} of {config.data.seq_len} tokens",
                progress=self._progress,
            )
            self.engine.runner.before_forward = self.give_up_if_stopped
            self._said_what_counts_nothing = False
            if found is not None:
                self.resume(found)

    def _progress(self) -> Progress:
        """Return the position in the data, and the chat template, whose file may change later."""
        return Progress({**self.loader.state(), "chat_template": self.data.chat_template})

    def resume(self, found: Checkpoint) -> None:
        """Go on from ``found``, or from an earlier checkpoint if it is damaged."""
        found = self.restore(found)
        if "under_way" in found.state:
            raise ConfigError(
                "checkpoint.resume",
                f"{str(found.folder)!r} is of reinforcement learning; to begin from its weights "
                "give its export (checkpoint.save_hf) as model.path",
            )
        self.loader.resume(found.state)

    # ---- the loop ------------------------------------------------------------------------------

    def fit(self) -> Result:
        """Train to ``train.steps``, or for ``train.epochs``; raises as :meth:`Run.opened` says."""
        train = self.config.train
        with self.opened():
            self._tell_missing_sample()
            with self.stop_signals():
                if self.step == 0 and train.eval_interval and train.eval_first:
                    self.evaluate()  # where the held-out curve starts
                self.start_clocks()
                with suppress(GivenUp):  # a stop signal came within a step: nothing of it is kept
                    while self.goes_on:
                        result = self.train_step()  # batches, forward_backward, step
                        self.count_step(result.skipped)
                        if self.is_log_due():
                            self.log_step(result)
                        if self.due(train.compare_replicas):
                            compare_replicas(self.engine.fsdp, self.world)
                        if self.due(train.eval_interval):
                            self.watchdog.pause()
                            self.evaluate()
                        self.save_if_due()
                        self.end_step()
                self.end_steps()  # saves; leaves by SystemExit if a stop signal came
            self.finish()
        return self.result()

    def _tell_missing_sample(self) -> None:
        """Say so if the user asked for a sample and no callback writes it."""
        wanted = self.config.train.sample_tokens and self.config.is_users("train.sample_tokens")
        if wanted and not any(callback.writes_sample for callback in self.callbacks):
            self.say("no sample: give callbacks=[moetrain.generate.weights.Sampled()]")

    def train_step(self) -> StepResult:
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
        return StepResult(totals.terms, outcome.grad_norm, outcome.skipped, totals.routing)

    def finish(self) -> None:
        """Evaluate, and export what settings ask for."""
        self.evaluate()
        self.export(self.data.tokenizer if self.has_text else None, self.data.chat_template)

    def give_up_if_stopped(self) -> None:
        """Raise GivenUp between two micro-batches once a stop signal has come.

        Only a single process does so. Several ranks would have to agree where to stop between all
        micro-batches, so they stop at the end of the step. A stream cannot go back, so it ends the
        step too.
        """
        if self.stops.signals and self.world.size == 1 and len(self.data.train):
            raise GivenUp

    # ---- evaluation and reports ----------------------------------------------------------------

    def evaluate(self) -> None:
        """Log the mean of the objective over ``train.eval_rows`` held-out rows.

        If there are several sets of rows (a mixture's sources, or sets with names), each has its
        own value, and ``eval_loss`` is their mean, weighted by shares of the training rows. A set
        without a target is left out, which is logged once.
        """
        rows = self.data.eval
        if rows is None or self.evaluated_at == self.step:
            return
        self.clock.stop()
        started = time.perf_counter()
        parts = self.data.sources or {"": HeldOut(rows, 1.0)}
        row: dict[str, float] = {}
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
            problem = "no target token in the first"
            rest = (
                "eval_loss is not measured" if names == [""] else "eval_loss does not include them"
            )
            self.say(
                f"{what} have {problem} {self.config.train.eval_rows} (train.eval_rows): {rest}"
            )
            self._said_what_counts_nothing = True

    def held_out_terms(self, rows: Dataset) -> _HeldOut:
        """Return the objective's terms over the first ``train.eval_rows`` of ``rows``. Collective.

        The first term is named ``loss``: the cross-entropy in nats a token, unless an objective is
        given. This waits for the device.
        """
        world, train, objective = self.world, self.config.train, self.own_objective
        ranks = world.data_rank, world.dims.data_ranks
        batches = list(eval_batches(rows, train.eval_rows, train.micro_batch_size, *ranks))
        terms = _named(self.engine.forward(batches, objective).terms)
        counted = next(iter(objective.sizes(batches).values()))
        is_some = world.sum_rows(torch.full((), counted, device=world.device)).item() > 0
        return _HeldOut(terms if is_some else dict.fromkeys(terms, math.nan), is_some)

    def log_step(self, result: StepResult) -> None:
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
            "skipped_steps": self.stops.skipped(),
        }
        if self.engine.runner.static is not None:
            row["retried_steps"] = self.engine.passes.num_retried
        if result.routing is not None:
            routing = result.routing.map(self.world.sum)
            row |= routing_losses(routing, pooled=self.objective.is_pooled)
            row |= self.routing_row(routing)
        self.report(row)
        self.clock.start()


def _build_data(config: Config, vocab_size: int, world: World) -> Data:
    """Build the data on every rank; the first rank of each machine tokenises, into a cache."""
    is_first = world.local_rank == 0
    if not is_first:
        world.barrier()
    data = build_data(config, vocab_size)
    if is_first:
        world.barrier()
    return data


def _named(terms: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return an objective's terms by the names in the log: the first is ``loss``."""
    first, *others = terms
    # routing_losses logs the routers' terms, for the whole global batch.
    named = {"loss": first} | {k: k for k in others if k not in ("load_balancing", "router_z")}
    return {name: terms[key].item() for name, key in named.items()}
