"""The engine: runs micro-batches through a model that is spread over ranks, and updates it.

    totals = engine.forward_backward(batches, objective)    # as often as a step has batches for
    norm, skipped = engine.step(lr)

Data, folders, schedules and the order of actions belong to the training loop
(:mod:`moetrain.train.loop`). :class:`ModelState` holds weights and moments. Inside a step the host
does not wait for the device, with three exceptions:

- Expert dispatch without fixed sizes waits for the number of tokens that arrive.
- With fixed sizes, the host reads the number of dropped rows while the last backward runs.
- With ``log.find_nan``, the host reads whether the step was skipped.

Every method is collective: all ranks call the methods in the same order, and with the same number
of micro-batches.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from moetrain.config import Config
from moetrain.losses.balancing import RoutingStats
from moetrain.models.architecture import Architecture
from moetrain.models.moe import Router, update_router_bias
from moetrain.parallel.pipeline.executor import Finish
from moetrain.parallel.world import World
from moetrain.runtime.annotate import annotate, annotated
from moetrain.runtime.graphs import Graphs
from moetrain.train.checks import check_run
from moetrain.train.fake_step import compile_step_ahead
from moetrain.train.faults import NanFinder
from moetrain.train.objectives import MicroBatch, Objective
from moetrain.train.passes import ModelRunner, Pass, Totals
from moetrain.train.retries import GradientPasses
from moetrain.train.state import ModelState, StateKind

_B = TypeVar("_B", bound=MicroBatch)


class StepOutcome(NamedTuple):
    """The results of an update (0-d, on the device)."""

    grad_norm: torch.Tensor
    """2-norm of the whole gradient before clipping, fp32."""
    skipped: torch.Tensor
    """bool: a loss or the norm was not finite, and weights and moments did not change."""


class Engine(ModelState):
    """A model in training. Building it reads no files but ``model.path`` and ``lora.path``.

    Attributes:
        runner: runs micro-batches through the model.
        passes: runs micro-batches with gradients, and repeats a pass that dropped rows.
        graphs: captures and replays CUDA graphs of steps (``compile.cuda_graphs``), or None.
        since_step: the totals of each :meth:`forward_backward` since the last :meth:`step`.
    """

    def __init__(self, config: Config, arch: Architecture, world: World) -> None:
        """Build the model of ``arch``, from ``model.path`` or with initial values.

        With ``train.deterministic`` torch uses reproducible algorithms for the rest of the process.

        Args:
            config: as :func:`moetrain.train.session.resolve_run` returns it, with ``arch``.
            arch: the model.
            world: as :func:`moetrain.parallel.world.join_world` returns it for both.

        Raises ConfigError: the settings cannot run here (:mod:`moetrain.train.checks`), or
        ``model.path`` or ``lora.path`` cannot be loaded.
        """
        config = check_run(config, arch, world.dims, world.device)
        if config.train.deterministic:
            # cuBLAS reads this when its first handle is made. Two buffers of 4 MiB are NVIDIA's own
            # choice.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        compile_step_ahead(config, arch, world)
        super().__init__(config, arch, world)
        config = self.config  # without settings of a recipe that the dispatcher does not take
        for member in self.fsdp.members.values():
            if isinstance(member.module, Router) and member.name == "weight":
                member.module.is_frozen = not member.rule.trainable
        self.runner = ModelRunner(self.model, self.fsdp, self.stages, world)
        is_graphed = config.compile.cuda_graphs is True
        self.graphs = Graphs(world.device, self.fsdp) if is_graphed else None
        if self.graphs is not None:
            world.endings.append(self.graphs.clear)  # NCCL must outlive the graphs that use it
        self.passes = GradientPasses(self.runner, config, self.graphs, self.work)
        self.since_step: list[Totals] = []
        self.nan_finder = NanFinder(self.model, self.fsdp, world) if config.log.find_nan else None
        self._lr = torch.zeros((), dtype=torch.float64, device=world.device)

    # ---- training ------------------------------------------------------------------------------

    def forward_backward(self, batches: Sequence[_B], objective: Objective[_B]) -> Totals:
        """Add this rank's gradients of ``objective`` over ``batches`` to the gradients of the step.

        If this fails, all gradients of the step are discarded, including those of earlier calls.
        """
        self._need("weights", "gradients")
        if self.nan_finder is not None:
            self.nan_finder.note(batches, objective)
        with annotate("forward_backward"):
            sizes = self._sum_sizes(objective.sizes(batches))
            is_first = not self.since_step
            try:
                totals = self.passes.run(batches, objective, sizes, is_first=is_first)
                self.since_step.append(totals)
            except BaseException:
                self.forget()
                raise
        return self.since_step[-1]

    def learn_now(self, batches: Sequence[_B], objective: Objective[_B]) -> Totals:
        """Compute a pass of the last step again, without a CUDA graph (for ``log.find_nan``)."""
        sizes = self._sum_sizes(objective.sizes(batches))
        return self.passes.run_now(batches, objective, sizes, is_first=True)

    def forget(self) -> None:
        super().forget()
        self.since_step = []
        if self.nan_finder is not None:
            self.nan_finder.clear()

    def forward(self, batches: Sequence[_B], objective: Objective[_B]) -> Totals:
        """Return the sums of :meth:`forward_backward`, without computing gradients."""
        self._need("weights")
        sizes = self._sum_sizes(objective.sizes(batches))
        is_global = self.config.moe.aux_loss_scope == "global_batch"
        with self.work(), torch.no_grad(), self.runner.exact_sizes():
            measured = Pass(
                self.runner, objective, sizes, learns=False, balances_globally=is_global
            )
            return measured.run(batches).totals()

    @annotated("update")
    def step(self, lr: float) -> StepOutcome:
        """Clip the gradients, update with learning rate ``lr``, and discard the gradients.

        The update is skipped if the norm, or a loss since the last step, is not finite. The device
        decides that, so the host does not wait.

        Raises ValueError: there was no :meth:`forward_backward` since the last step.
        """
        self._need("weights", "gradients", "moments")
        if not self.since_step:
            raise ValueError("Engine.step: no forward_backward since the last step")
        self.fsdp.check_idle()
        self.before_change()
        done, self.since_step = self.since_step, []
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._lr.fill_(lr)
        if self.graphs is None:
            outcome = self._update(done)
        else:
            outcome = self.graphs.run([], self._update, done)
        self.fsdp.clear_gradients()
        if self.nan_finder is not None:
            if outcome.skipped.item():
                self.nan_finder.report(self.learn_now)
                self.forget()
            self.nan_finder.clear()
        return outcome

    def _update(self, done: Sequence[Totals]) -> StepOutcome:
        """Update with the gradients of the passes ``done``. Nothing here waits for the device."""
        norm = self.fsdp.gradient_norm()
        loss = torch.stack([totals.total for totals in done]).sum()
        skipped = ~(torch.isfinite(norm) & torch.isfinite(loss))
        clip = (self.optimizer.config.max_grad_norm / norm).clamp(max=1.0)
        self.optimizer.step(clip, skipped, self._lr)
        routings = [totals.routing for totals in done if totals.routing is not None]
        rate = self.config.moe.bias_update_rate
        if routings and rate:
            counts_LE = self.world.sum(RoutingStats.together(routings).counts_LE)
            # One row at a time: indexing by a list of rows would make the device wait.
            layers = enumerate(self.arch.moe_layer_indices)
            counts = [counts_LE[row] for row, i in layers if i in self.stages.blocks]
            update_router_bias(self.model, counts, rate * ~skipped)
        return StepOutcome(norm, skipped)

    def offload(self, *what: StateKind) -> None:
        super().offload(*what)
        if self.graphs is not None:  # reloaded memory has other addresses
            self.graphs.clear()

    def _sum_sizes(self, counted: Mapping[str, int]) -> dict[str, torch.Tensor]:
        # torch.tensor would wait for the device.
        counts = [torch.full((), n, device=self.world.device) for n in counted.values()]
        summed = self.world.sum_rows(torch.stack(counts)).clamp(min=1)
        return dict(zip(counted, summed.unbind(), strict=True))

    @torch.no_grad()
    def collect(
        self, batches: Sequence[_B], finish: Finish[_B], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Return the results of ``finish`` for each of ``batches``, on every rank, on the CPU.

        Args:
            finish: takes hidden states, routing and batch, and returns an fp32 tensor.
            shapes: the shape of each result.
        """
        found: list[torch.Tensor] = []

        def keep(hidden_BSD: torch.Tensor, routing: RoutingStats | None, batch: _B) -> torch.Tensor:
            found.append(finish(hidden_BSD, routing, batch))
            return found[-1]

        last, broadcast = self.stages.plan.rank_of_stage[-1], self.stages.broadcast
        with self.work(), self.runner.exact_sizes():
            self.runner.run(batches, keep)
            pairs = zip(found or [None] * len(shapes), shapes, strict=True)
            return [broadcast(last, x, shape, torch.float32).cpu() for x, shape in pairs]
