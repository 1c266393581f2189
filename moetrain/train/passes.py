"""One pass of an objective over micro-batches: forwards, losses, backwards, and their sums.

    runner = ModelRunner(model, fsdp, stages, world)
    totals = Pass(runner, objective, sizes, learns=True).run(batches).totals()

:class:`ModelRunner` runs the model, micro-batch by micro-batch or as a pipeline. :class:`Pass`
computes losses from its results, and adds up what they report. The host never waits for the device
here, except in dispatch without fixed sizes, which waits to learn how many tokens arrive.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch

from moetrain.losses.balancing import RoutingStats
from moetrain.models.layers import Selection
from moetrain.models.transformer import Transformer
from moetrain.parallel.apply import dispatcher_of
from moetrain.parallel.expert.deepep import DeepEP
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.pipeline.executor import Finish, Pipeline
from moetrain.parallel.pipeline.stages import Stages
from moetrain.parallel.world import World
from moetrain.runtime.annotate import annotated
from moetrain.runtime.memory import LateValues
from moetrain.train.objectives import MicroBatch, Objective, Outputs, batch_sums_of

_B = TypeVar("_B", bound=MicroBatch)


class Totals(NamedTuple):
    """Sums over the micro-batches of one call, on the device."""

    total: torch.Tensor
    """The value that was minimised, summed over ranks: 0-d fp64."""
    terms: dict[str, torch.Tensor]
    """Its terms without their coefficients, by name, summed over ranks: 0-d fp64 each."""
    routing: RoutingStats | None
    """This rank's statistics. ``routing.map(world.sum)`` sums them over ranks. None: no MoE
    layer."""


class ModelRunner:
    """Runs micro-batches through a model: one after another, or as a pipeline.

    Attributes:
        pipeline: orders micro-batches over stages; None: there is one stage.
        static: transport of tokens in buffers of fixed sizes (``moe.dispatch_mode`` static), or
            None.
        before_forward: called before each micro-batch, except those of pipelines, and before a
            replay of a CUDA graph. What it raises ends the call.
    """

    def __init__(self, model: Transformer, fsdp: FSDP, stages: Stages, world: World) -> None:
        self.model, self.fsdp, self.stages, self.world = model, fsdp, stages, world
        self.pipeline = Pipeline(model, fsdp, stages) if world.dims.pp > 1 else None
        sender = dispatcher_of(model)
        self.static = sender if isinstance(sender, DeepEP) and sender.static is not None else None
        self.before_forward: Callable[[], None] = lambda: None

    def run(
        self,
        batches: Sequence[_B],
        finish: Finish[_B],
        *,
        backward: Callable[[torch.Tensor], None] | None = None,
        multi_token: list[torch.Tensor] | None = None,
        selections: dict[int, Selection] | None = None,
    ) -> None:
        """Run the model on ``batches``, and ``finish`` on its results. Collective.

        Each micro-batch runs its forward and its backward before the next one starts, so that only
        one has activations in memory. With pipeline ranks ``parallel.pp_schedule`` sets the order.

        Args:
            finish: takes hidden states, routing and batch, and returns what is minimised (0-d).
                With pipeline ranks the last stage alone calls it.
            backward: is called with what ``finish`` returned. None: gradients are not wanted.
                Pipelines have a backward of their own.
            multi_token: receives the hidden states of the MTP blocks, before ``finish``.
            selections: receives the blocks' selections of keys, before ``finish``.
        """
        if self.pipeline is not None:
            self.pipeline.run(batches, finish, learns=backward is not None)
            return

        def forward(batch: _B) -> torch.Tensor:
            batch = batch.to(self.world.device)
            wanted = multi_token if self.model.arch.mtp_layers else None
            hidden_BSD, routing = self.model.backbone(
                batch.inputs, multi_token=wanted, selections=selections
            )
            return finish(hidden_BSD, routing, batch)

        for batch in batches:
            self.before_forward()
            total = forward(batch)
            if backward is not None:
                backward(total)
            del total  # and its graph, before the next forward

    def exact_sizes(self) -> AbstractContextManager[None]:
        """Return a context in which no row is dropped, however uneven the routing is."""
        return nullcontext() if self.static is None else self.static.sized(None)


@dataclass
class Pass(Generic[_B]):
    """One pass of ``objective`` over micro-batches, and the sums that it makes."""

    runner: ModelRunner
    objective: Objective[_B]
    sizes: Mapping[str, torch.Tensor]
    """Denominators of the losses over the whole global batch (:meth:`Objective.sizes`), by name:
    0-d, on the device."""
    learns: bool
    """True: gradients are computed."""
    balances_globally: bool = False
    """True: ``moe.aux_loss_scope`` is global_batch."""
    reads_dropped: bool = True
    """True: :attr:`dropped` is read back to the host while the last backward runs."""
    num_batches: int = 0
    names: list[str] = field(default_factory=list[str])
    values: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Total and terms of each micro-batch."""
    routings: list[RoutingStats] = field(default_factory=list[RoutingStats])
    lost: torch.Tensor | None = None
    """The number of expert rows that were dropped on all ranks; None: no row can be dropped."""
    dropped: LateValues | None = None
    """The same, on the host."""
    load_LE: torch.Tensor | None = None
    """``Outputs.load_LE`` of all micro-batches; None: each is balanced by its own load."""
    batch_sums: Mapping[str, torch.Tensor] | None = None
    """``Outputs.batch_sums``; None: the objective needs none, or they are not known yet."""
    multi_token: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Hidden states of the MTP blocks for this micro-batch, where these are trained."""
    selections: dict[int, Selection] = field(default_factory=dict[int, Selection])
    """The selections of keys for this micro-batch, by layer."""

    def run(self, batches: Sequence[_B]) -> Self:
        """Run forwards, and backwards if it learns; ValueError: there is no micro-batch."""
        self.num_batches = len(batches)
        if not batches:
            raise ValueError("Engine: a call takes at least one micro-batch")
        self._look_ahead(batches)
        if self.learns:
            self.runner.run(
                batches,
                self.finish,
                backward=self.backward,
                multi_token=self.multi_token,
                selections=self.selections,
            )
        else:
            self.runner.run(batches, self.finish)
        return self

    def _look_ahead(self, batches: Sequence[_B]) -> None:
        """Compute the sums over the whole global batch that the first loss already needs.

        This takes one more forward of every micro-batch, without gradients. It is not needed if
        each rank has a single micro-batch, because :meth:`finish` then sums over ranks.
        """
        runner, objective = self.runner, self.objective
        has_experts = bool(runner.model.arch.moe_layer_indices)
        counts_load = self.balances_globally and objective.balances and has_experts
        sums_of = batch_sums_of(objective)
        if len(batches) == 1 or not (counts_load or sums_of):
            return
        routings: list[RoutingStats] = []
        sums: list[Mapping[str, torch.Tensor]] = []

        def count(hidden_BSD: torch.Tensor, routing: RoutingStats | None, batch: _B) -> Any:
            if counts_load and routing is not None:
                routings.append(routing)
            if sums_of is not None:
                sums.append(sums_of(runner.model, self._outputs(hidden_BSD, routing), batch))
            self.multi_token.clear()
            return hidden_BSD

        with torch.no_grad(), runner.exact_sizes():
            runner.run(batches, count, multi_token=self.multi_token if self.learns else None)
        if routings:  # on the last pipeline stage
            self.load_LE = runner.world.sum(RoutingStats.together(routings).counts_LE)
        if sums:
            self.batch_sums = self._summed(sums)

    def _summed(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Add up the sums of micro-batches over these and over ranks, in fp64."""
        names = list(parts[0])
        rows = [torch.stack([part[name] for name in names]) for part in parts]
        total = self.runner.world.sum(torch.stack(rows).double().sum(0))
        return dict(zip(names, total.unbind(), strict=True))

    def _outputs(self, hidden_BSD: torch.Tensor, routing: RoutingStats | None) -> Outputs:
        return Outputs(hidden_BSD, routing, None, 1 / self.runner.world.dims.token_ranks)

    @annotated("head and loss")
    def finish(
        self, hidden_BSD: torch.Tensor, routing: RoutingStats | None, batch: _B
    ) -> torch.Tensor:
        """Return this micro-batch's share of what is minimised."""
        runner, load_LE = self.runner, self.load_LE
        if load_LE is None and routing is not None and self.objective.balances:
            load_LE = runner.world.sum(routing.counts_LE)
        outputs, sums_of = self._outputs(hidden_BSD, routing), batch_sums_of(self.objective)
        batch_sums = self.batch_sums
        if batch_sums is None and sums_of is not None:  # this micro-batch is the only one
            with torch.no_grad():
                batch_sums = self._summed([sums_of(runner.model, outputs, batch)])
        outputs = outputs._replace(
            load_LE=load_LE,
            multi_token=tuple(self.multi_token),
            batch_sums=batch_sums or {},
            selections=dict(self.selections),
        )
        self.multi_token.clear()
        self.selections.clear()
        terms = self.objective.terms(runner.model, outputs, batch, self.sizes)
        total = sum(term.coefficient * term.value for term in terms.values())
        assert isinstance(total, torch.Tensor)  # there is one term at least
        self.names = list(terms)
        self.values.append(torch.stack([total, *(t.value for t in terms.values())]).detach())
        if routing is not None:
            self.routings.append(routing.map(torch.Tensor.detach))
            dropped = [r.dropped for r in self.routings if r.dropped is not None]
            if dropped and len(self.routings) == self.num_batches:
                # Read before the last backward, so that both run at the same time.
                self.lost = runner.world.sum(torch.stack(dropped).sum())
                self.dropped = LateValues(self.lost) if self.reads_dropped else None
        return total

    def backward(self, total: torch.Tensor) -> None:
        """Run the backward of the micro-batch that was finished last."""
        self.runner.fsdp.backward(total, is_last=len(self.values) == self.num_batches)

    def totals(self) -> Totals:
        sums, routing = None, None
        if self.values:
            # fp64 counts exactly, and costs nothing for a few values.
            sums = self.runner.world.sum(torch.stack(self.values).double().sum(0))
            routing = RoutingStats.together(self.routings) if self.routings else None
        if (pipeline := self.runner.pipeline) is not None:
            self.names = pipeline.broadcast_names(self.objective, self.names)
            sums, routing = pipeline.broadcast_sums(len(self.names) + 1, sums, routing)
        assert sums is not None  # some rank has the last stage, and has broadcast them
        total, *terms = sums.unbind()
        return Totals(total, dict(zip(self.names, terms, strict=True)), routing)
