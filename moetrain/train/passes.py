"""Passes over a batch: micro-batches run through a model that is spread over ranks, and summed up.

    totals = Pass(passes, objective, sizes, learns=True).over(batches).totals()

It is the half of :class:`moetrain.train.engine.Engine` that computes. What comes of gradients, and
when anything may change, is the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch

from moetrain.config import Config
from moetrain.kernels.annotate import annotated
from moetrain.models.architecture import Architecture
from moetrain.models.moe import RoutingStats
from moetrain.models.transformer import Transformer
from moetrain.parallel.expert.deepep import DeepEP
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.pipeline.executor import Pipeline
from moetrain.parallel.pipeline.stages import Stages
from moetrain.parallel.world import World
from moetrain.train.objectives import ExpertLoad, MicroBatch, Objective, Outputs

B = TypeVar("B", bound=MicroBatch)

Schedule = Callable[
    [Sequence[Any], Callable[[Any], torch.Tensor], Callable[[torch.Tensor], None]], None
]
"""``schedule(batches, forward, backward)``: calls ``forward`` once with every micro-batch, and
``backward`` once with everything that gave, in any order that brings forwards first."""


def sequential(
    batches: Sequence[B],
    forward: Callable[[B], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
) -> None:
    """One micro-batch after the other: the least memory, and all there is to do on one stage."""
    for batch in batches:
        backward(forward(batch))


class Totals(NamedTuple):
    """Sums over the micro-batches of one call, on the device."""

    total: torch.Tensor
    """What was minimised: 0-d fp64, of all ranks."""
    terms: dict[str, torch.Tensor]
    """Its terms without their coefficients, by name: each 0-d fp64, of all ranks."""
    routing: RoutingStats | None
    """This rank's; ``routing.map(world.sum)`` are those of all. None: no MoE layer."""


class LateNumbers:
    """Numbers that the device is still to compute; reading waits for them and nothing after."""

    def __init__(self, numbers: torch.Tensor) -> None:
        on_cuda = numbers.device.type == "cuda"
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=on_cuda)
        self._host.copy_(numbers, non_blocking=True)
        self._copied = torch.cuda.Event() if on_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> torch.Tensor:
        """The numbers, on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


@dataclass(frozen=True)
class Passes:
    """A model, how it is spread, and in which order it takes micro-batches."""

    config: Config
    arch: Architecture
    world: World
    model: Transformer
    fsdp: FSDP
    stages: Stages
    schedule: Schedule
    pipeline: Pipeline | None
    """Orders micro-batches in place of ``schedule``; None: every rank has every stage."""
    static: DeepEP | None
    """What carries tokens in buffers of fixed sizes; None: nothing does."""

    def exact_sizes(self) -> AbstractContextManager[None]:
        """Whatever the routing, no row is dropped meanwhile."""
        return nullcontext() if self.static is None else self.static.exactly()

    def count_ahead(self, batches: Sequence[MicroBatch]) -> ExpertLoad | None:
        """The expert load of all ``batches`` together, by a forward pass of its own.

        None: this rank does not have the last stage, which alone is told.
        """
        routings: list[RoutingStats] = []

        def keep(hidden_BSD: torch.Tensor, routing: RoutingStats | None, _: Any) -> torch.Tensor:
            assert routing is not None  # nobody asks a dense model
            routings.append(routing)
            return hidden_BSD

        with torch.no_grad(), self.exact_sizes():
            self.drive(batches, keep)
        return self.expert_load(RoutingStats.together(routings)) if routings else None

    def drive(
        self,
        batches: Sequence[B],
        finish: Callable[[torch.Tensor, RoutingStats | None, B], torch.Tensor],
        backward: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Run the model on ``batches``, then ``finish(hidden_BSD, routing, batch)`` where the last
        stage is; and ``backward`` of what that gives (None: there is none), or all stages' own."""
        if self.pipeline is not None:
            self.pipeline.run(batches, finish, learns=backward is not None)
            return

        def forward(batch: B) -> torch.Tensor:
            batch = batch.to(self.world.device)
            return finish(*self.model.backbone(*batch.inputs), batch)

        self.schedule(batches, forward, backward or (lambda _: None))

    def collect(
        self,
        batches: Sequence[B],
        finish: Callable[[torch.Tensor, RoutingStats | None, B], torch.Tensor],
        shapes: Sequence[Sequence[int]],
    ) -> list[torch.Tensor]:
        """What ``finish`` gives, fp32 of these shapes, for each of ``batches``; on every rank."""
        found: list[torch.Tensor] = []

        def keep(hidden_BSD: torch.Tensor, routing: RoutingStats | None, batch: B) -> torch.Tensor:
            found.append(finish(hidden_BSD, routing, batch))
            return found[-1]

        self.drive(batches, keep)
        if self.pipeline is None:
            return found
        last, broadcast = self.stages.plan.rank_of_stage[-1], self.stages.broadcast
        mine = found or [None] * len(shapes)
        return [broadcast(last, x, s, torch.float32) for x, s in zip(mine, shapes, strict=True)]

    @property
    def batch_multiple(self) -> int:
        """Of which the number of micro-batches of a :meth:`forward_backward` is a multiple."""
        return 1 if self.pipeline is None else self.pipeline.batch_multiple

    def expert_load(self, routing: RoutingStats) -> ExpertLoad:
        """What this rank counted in ``routing``, of all ranks together."""
        counts_LE = self.world.sum(routing.counts_LE)
        num_tokens = counts_LE[0].sum() // self.arch.num_experts_per_token
        return ExpertLoad(counts_LE, num_tokens.clamp(min=1))  # there may be pads alone


class Pass(Generic[B]):
    """One pass of ``objective`` over ``batches``, in the order of ``passes``."""

    def __init__(
        self,
        passes: Passes,
        objective: Objective[B],
        sizes: Mapping[str, torch.Tensor],
        *,
        learns: bool,
    ) -> None:
        self.passes, self.objective, self.sizes, self.learns = passes, objective, sizes, learns
        self.num_batches = self.num_done = 0
        self.names: list[str] = []
        self.values: list[torch.Tensor] = []
        """Each micro-batch's total and terms."""
        self.routings: list[RoutingStats] = []
        self.dropped: LateNumbers | None = None
        """Rows of all ranks that found no room; None: nothing can be dropped."""
        self.load: ExpertLoad | None = None
        """Of all micro-batches; None: each has its own."""

    def over(self, batches: Sequence[B]) -> Self:
        passes, self.num_batches = self.passes, len(batches)
        if not batches:
            raise ValueError("Engine: a call takes one micro-batch at least")
        # A single micro-batch of all ranks is the whole batch.
        is_global = passes.config.moe.aux_loss_scope == "global_batch" and len(batches) > 1
        if is_global and self.objective.balances and passes.arch.moe_layer_indices:
            self.load = passes.count_ahead(batches)
        passes.drive(batches, self.finish, self.backward if self.learns else None)
        return self

    @annotated("head and loss")
    def finish(
        self, hidden_BSD: torch.Tensor, routing: RoutingStats | None, batch: B
    ) -> torch.Tensor:
        """This micro-batch's share of what is minimised."""
        passes, load = self.passes, self.load
        if load is None and routing is not None and self.objective.balances:
            load = passes.expert_load(routing)
        outputs = Outputs(hidden_BSD, routing, load, share=1 / passes.world.dims.tp)
        terms = self.objective.terms(passes.model, outputs, batch, self.sizes)
        total = sum(term.coefficient * term.value for term in terms.values())
        assert isinstance(total, torch.Tensor)  # there is one term at least
        self.names = list(terms)
        self.values.append(torch.stack([total, *(t.value for t in terms.values())]).detach())
        if routing is not None:
            self.routings.append(routing.map(torch.Tensor.detach))
            dropped = [r.dropped for r in self.routings if r.dropped is not None]
            if dropped and len(self.routings) == self.num_batches:
                # Before the last backward, which then runs while this is read.
                self.dropped = LateNumbers(passes.world.sum(torch.stack(dropped).sum()))
        return total

    def backward(self, total: torch.Tensor) -> None:
        """Its gradients, added to the step's."""
        self.num_done += 1
        self.passes.fsdp.backward(total, is_last=self.num_done == self.num_batches)

    def totals(self) -> Totals:
        sums, routing = None, None
        if self.values:
            # In fp64, which counts exactly; a few numbers cost nothing.
            sums = self.passes.world.sum(torch.stack(self.values).double().sum(0))
            routing = RoutingStats.together(self.routings) if self.routings else None
        if (pipeline := self.passes.pipeline) is not None:
            self.names = pipeline.broadcast_names(self.objective, self.names)
            sums, routing = pipeline.broadcast_sums(len(self.names) + 1, sums, routing)
        assert sums is not None  # the last stage is somewhere
        total, *terms = sums.unbind()
        return Totals(total, dict(zip(self.names, terms, strict=True)), routing)
