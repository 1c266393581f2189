"""The engine: a model, how it is spread over ranks, and its optimizer; nothing else.

    totals = engine.forward_backward(batches, objective)    # as often as a step has batches for
    norm, skipped = engine.step(lr)

Data, folders, learning-rate schedules and when to do what are a loop's business
(:mod:`moetrain.trainer` is one). Inside a step nothing here waits for the device, except that
dispatch of tokens of unknown number does, and that the number of rows for which buffers of fixed
sizes had no room is read while the last backward runs.

Every method is collective: all ranks call them in the same order, with as many micro-batches each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch

from moetrain.annotate import annotated
from moetrain.config import Config, ConfigError
from moetrain.loss import ExpertLoad, MicroBatch, Objective, Outputs
from moetrain.models import (
    Architecture,
    RoutingStats,
    build_model,
    find_family,
    update_router_bias,
)
from moetrain.models.hf.files import TokenizerFiles
from moetrain.models.hf.peft import save_peft
from moetrain.models.hf.save import (
    DEFAULT_SHARD_BYTES,
    ExportDtype,
    Share,
    save_stream,
    warn_about_router_bias,
    what_does_not_fit,
)
from moetrain.models.lora import Adapter, own_draws
from moetrain.models.rules import ADAPTER, is_adapter
from moetrain.models.weight_map import all_pieces
from moetrain.optim import (
    HostMoments,
    build_optimizer,
    guarded_step,
    load_optimizer_state,
    optimizer_parts,
)
from moetrain.parallel.apply import load_whole_state, place_model, static_transport
from moetrain.parallel.frozen import fingerprint
from moetrain.parallel.layout import Part, Region
from moetrain.parallel.pipeline.executor import Pipeline
from moetrain.parallel.pipeline.stages import Stages
from moetrain.parallel.world import World
from moetrain.run_control import LateNumbers

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


class StepOutcome(NamedTuple):
    """What an update was made of (0-d, on the device)."""

    grad_norm: torch.Tensor
    """2-norm of the whole gradient before clipping, fp32."""
    skipped: torch.Tensor
    """bool: a loss or the norm was not finite, and weights and moments are as they were."""


class Engine:
    """Model, sharding and optimizer of one run. Building it reads ``model.path`` and nothing else.

    Attributes:
        model, fsdp, optimizer: the parts it is made of.
        retried_steps: calls of :meth:`forward_backward` that were run again because rows were
            dropped (``moe.dispatch_mode`` static).
    """

    def __init__(
        self, config: Config, arch: Architecture, world: World, schedule: Schedule = sequential
    ) -> None:
        """The model of ``arch`` with initial values (or those of ``model.path``) on ``world``.

        Args:
            config: as :func:`moetrain.preflight.resolve_run` gives it, with ``arch``.
            schedule: orders the micro-batches of a call; with pipeline ranks,
                ``parallel.pp_schedule`` does.

        Raises:
            ConfigError: ``model.path`` cannot be loaded.
        """
        self.config, self.arch, self.world, self.schedule = config, arch, world, schedule
        self.stages = Stages.of(config, arch, world.meshes, world.device)
        self.model, self.fsdp = place_model(config, arch, world, self.stages)
        self.pipeline = None
        if world.dims.pp > 1:
            self.pipeline = Pipeline(config, world.dims, self.model, self.fsdp, self.stages)
        self.optimizer = build_optimizer(self.fsdp, config.optim, config.train.seed)
        self.static = static_transport(self.model)
        self._moments = HostMoments(self.optimizer)
        self.before_change: Callable[[], None] = lambda: None
        """Called before weights or moments change; whoever copies them meanwhile sets it."""
        self.retried_steps = 0
        self._since_step: list[Totals] = []

    # ---- training ------------------------------------------------------------------------------

    @annotated("forward_backward")
    def forward_backward(self, batches: Sequence[B], objective: Objective[B]) -> Totals:
        """Add the gradients of ``objective`` over ``batches``, this rank's, to the step's.

        If it fails, the step's gradients are forgotten, those of earlier calls too.
        """
        sizes = self._sum_sizes(objective.sizes(batches))
        try:
            # A retry forgets the step's gradients: an earlier call's must not go with them.
            with self.exact_sizes() if self._since_step else nullcontext():
                run = self._learn(batches, objective, sizes)
            # With fixed sizes alone: waits for the last forward, while its backward runs.
            if run.dropped is not None and run.dropped.read() > 0:
                self.retried_steps += 1
                self.fsdp.clear_gradients()
                with self.exact_sizes():
                    run = self._learn(batches, objective, sizes)
            self._since_step.append(run.totals())
        except BaseException:
            self._forget()
            raise
        return self._since_step[-1]

    def _learn(
        self, batches: Sequence[B], objective: Objective[B], sizes: Mapping[str, torch.Tensor]
    ) -> _Run[B]:
        with self.work(), self._draws():
            return _Run(self, objective, sizes, learns=True).over(batches)

    def _draws(self) -> AbstractContextManager[None]:
        if not self.config.lora.dropout:
            return nullcontext()
        key = f"{self.config.train.seed}.{self.world.data_rank}.{self.stages.rank}"
        return own_draws(key, self.world.device)

    def _forget(self) -> None:
        """Forget what was added up since the last step."""
        self.fsdp.clear_gradients()
        self._since_step = []

    def forward(self, batches: Sequence[B], objective: Objective[B]) -> Totals:
        """The sums that :meth:`forward_backward` would give, without gradients."""
        sizes = self._sum_sizes(objective.sizes(batches))
        with self.work(), torch.no_grad(), self.exact_sizes():
            return _Run(self, objective, sizes, learns=False).over(batches).totals()

    @annotated("update")
    def step(self, lr: float) -> StepOutcome:
        """Clip, update with learning rate ``lr`` and forget the gradients.

        Skipped, on the device, if the norm or a loss since the last step is not finite.

        Raises:
            ValueError: there was no :meth:`forward_backward` since the last step.
        """
        self._check_moments()
        if not self._since_step:
            raise ValueError("Engine.step: no forward_backward since the last step")
        norm = self.fsdp.gradient_norm()
        self.before_change()
        done, self._since_step = self._since_step, []
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = torch.stack([totals.total for totals in done]).sum()
        skipped = guarded_step(self.optimizer, loss, norm, self.config.optim.max_grad_norm)
        self.fsdp.clear_gradients()
        routings = [totals.routing for totals in done if totals.routing is not None]
        rate = self.config.moe.bias_update_rate
        if routings and rate:
            counts_LE = self.world.sum(RoutingStats.together(routings).counts_LE)
            update_router_bias(self.model, counts_LE[self.stages.moe_rows], rate * ~skipped)
        return StepOutcome(norm, skipped)

    def work(self) -> AbstractContextManager[None]:
        """Meanwhile :attr:`model` can be called, and its parameters must not change.

        Each method enters it by itself; around several it saves gathering parameters anew.
        """
        return self.fsdp.work()

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Meanwhile moments, and parameters gathered, take no device memory; no step, no state."""
        self.fsdp.release()
        self.before_change()
        self._moments.leave()
        try:
            yield
        finally:
            self._moments.come_back()

    def _check_moments(self) -> None:
        if self._moments.away:
            raise RuntimeError("a step or a state within Engine.offloaded()")

    def exact_sizes(self) -> AbstractContextManager[None]:
        """Whatever the routing, no row is dropped meanwhile."""
        return nullcontext() if self.static is None else self.static.exactly()

    def _sum_sizes(self, counted: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """This rank's counts to those of all, on the device; torch.tensor would wait for it."""
        counts = [torch.full((), n, device=self.world.device) for n in counted.values()]
        summed = self.world.sum_rows(torch.stack(counts)).clamp(min=1)
        return dict(zip(counted, summed.unbind(), strict=True))

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
        last, share = self.stages.plan.rank_of_stage[-1], self.stages.share
        mine = found or [None] * len(shapes)
        return [share(last, x, s, torch.float32) for x, s in zip(mine, shapes, strict=True)]

    @property
    def batch_multiple(self) -> int:
        """Of which the number of micro-batches of a :meth:`forward_backward` is a multiple."""
        return 1 if self.pipeline is None else self.pipeline.batch_multiple

    def expert_load(self, routing: RoutingStats) -> ExpertLoad:
        """What this rank counted in ``routing``, of all ranks together."""
        counts_LE = self.world.sum(routing.counts_LE)
        num_tokens = counts_LE[0].sum() // self.arch.num_experts_per_token
        return ExpertLoad(counts_LE, num_tokens.clamp(min=1))  # there may be pads alone

    # ---- weights and state ---------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Part]]:
        """Groups ``model`` and ``optim``: this rank's own parts of tensors, by name; not copies.

        Gradients are no part of it, nor is what is not trained: that is where it came from
        (:attr:`fingerprint` tells whether it still is the same).
        """
        self._check_moments()
        members, among = self.fsdp.members, self.stages.among
        model = {
            name: among(name, member.layout.part(member.local))
            for name, member in members.items()
            if member.rule.trainable
        }
        common = next(iter(members.values())).layout.common
        model |= {name: among(name, common(x)) for name, x in self.model.named_buffers()}
        return {"model": model, "optim": optimizer_parts(self.optimizer, members, self.stages)}

    def load_state(self, groups: Mapping[str, Mapping[str, Region]]) -> None:
        """Take what all ranks' :meth:`state` were, on any layout: each group that ``groups`` has.

        Forgets the step's gradients.

        Raises:
            ConfigError: tensors of other names, shapes, dtypes.
        """
        self.fsdp.check_idle()
        self._check_moments()
        self.before_change()
        self._forget()
        if "model" in groups:
            load_whole_state(self.model, self.fsdp, self.stages, groups["model"])
        if "optim" in groups:
            members, optim = self.fsdp.members, groups["optim"]
            load_optimizer_state(self.optimizer, members, self.stages, optim)

    @cached_property
    def fingerprint(self) -> str:
        """Of what is not trained (:mod:`moetrain.parallel.frozen`). Collective at its first use."""
        return fingerprint(self.fsdp.members, self.stages, self.world)

    @torch.no_grad()
    def weights(
        self, *, hf: bool = False, merged: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight whole, by name, on the device: one at a time, and valid until a step.

        fp32, but for what is frozen: that is as it is stored.

        Args:
            hf: names and pieces of Hugging Face's files, which hold no selection bias; else ours,
                and buffers too.
            merged: weights that have adapters are what both make together, in fp32, and adapters
                by themselves are left out; always so with ``hf``.
        """
        table, merged = find_family(self.arch).hf.weight_map, merged or hf
        for name, entry in self.stages.table.items():
            if (entry.rule is None and hf) or (merged and is_adapter(name)):
                continue
            whole = self._whole(name)
            if merged and (halves := self._adapter(name)) is not None:
                whole = halves.merged(whole.float())
            if hf:
                for piece in all_pieces(table, {name: whole.shape}):
                    yield piece.hf_name, whole[piece.place]
            else:
                yield name, whole

    def _adapter(self, name: str) -> Adapter | None:
        """That of the weight ``name``, whole. Collective."""
        halves = [name + half for half in ADAPTER]
        if halves[0] not in self.stages.table:
            return None
        a, b = (self._whole(half) for half in halves)
        return Adapter(a, b, self.config.lora.scale)

    def _whole(self, name: str) -> torch.Tensor:
        return self.stages.whole(self.stages.table[name], partial(self._whole_here, name)).detach()

    def _whole_here(self, name: str) -> torch.Tensor:
        """A tensor of this rank's stages; collective over the ranks that have them."""
        member = self.fsdp.members.get(name)
        if member is None:
            return self.model.get_buffer(name)
        return member.layout.whole(member.local)

    @torch.no_grad()
    def save_peft(self, folder: Path) -> None:
        """The adapters in PEFT's format (:mod:`moetrain.models.hf.peft`), by the main rank."""
        adapters = []
        for name, entry in self.stages.table.items():
            if (adapter := self._adapter(name)) is not None and self.world.is_main:
                halves = (adapter.a.cpu(), adapter.b.cpu())
                adapters.append((name, entry.shape, Adapter(*halves, adapter.scale)))
        if self.world.is_main:
            save_peft(folder, self.arch, self.config.lora, adapters, self.config.model.path)

    def save_hf(
        self,
        folder: Path,
        *,
        dtype: ExportDtype = "auto",
        tokenizer: TokenizerFiles | None = None,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        """:func:`moetrain.save_hf` of the model, adapters merged; every rank writes some files."""
        with torch.device("meta"):
            whole = build_model(self.arch)
        whole.source, world = self.model.source, self.world
        here = {name: member.local for name, member in self.fsdp.members.items()}
        if unfit := world.any(what_does_not_fit(whole, here, dtype)):
            raise ConfigError("checkpoint.hf_dtype", unfit)
        if world.is_main:
            warn_about_router_bias(self.model)
        share = Share(world.rank, world.size, world.wait)
        weights = self.weights(hf=True)
        save_stream(whole, folder, weights, dtype, tokenizer, max_shard_bytes, share)


class _Run(Generic[B]):
    """One pass of ``objective`` over ``batches``, in the order of the engine's schedule."""

    def __init__(
        self,
        engine: Engine,
        objective: Objective[B],
        sizes: Mapping[str, torch.Tensor],
        *,
        learns: bool,
    ) -> None:
        self.engine, self.objective, self.sizes, self.learns = engine, objective, sizes, learns
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
        engine, self.num_batches = self.engine, len(batches)
        if not batches:
            raise ValueError("Engine: a call takes one micro-batch at least")
        # A single micro-batch of all ranks is the whole batch.
        is_global = engine.config.moe.aux_loss_scope == "global_batch" and len(batches) > 1
        if is_global and self.objective.balances and engine.arch.moe_layer_indices:
            self.load = engine.count_ahead(batches)
        engine.drive(batches, self.finish, self.backward if self.learns else None)
        return self

    @annotated("head and loss")
    def finish(
        self, hidden_BSD: torch.Tensor, routing: RoutingStats | None, batch: B
    ) -> torch.Tensor:
        """This micro-batch's share of what is minimised."""
        engine, load = self.engine, self.load
        if load is None and routing is not None and self.objective.balances:
            load = engine.expert_load(routing)
        outputs = Outputs(hidden_BSD, routing, load, share=1 / engine.world.dims.tp)
        terms = self.objective.terms(engine.model, outputs, batch, self.sizes)
        total = sum(term.coefficient * term.value for term in terms.values())
        assert isinstance(total, torch.Tensor)  # there is one term at least
        self.names = list(terms)
        self.values.append(torch.stack([total, *(t.value for t in terms.values())]).detach())
        if routing is not None:
            self.routings.append(routing.map(torch.Tensor.detach))
            dropped = [r.dropped for r in self.routings if r.dropped is not None]
            if dropped and len(self.routings) == self.num_batches:
                # Before the last backward, which then runs while this is read.
                self.dropped = LateNumbers(engine.world.sum(torch.stack(dropped).sum()))
        return total

    def backward(self, total: torch.Tensor) -> None:
        """Its gradients, added to the step's."""
        self.num_done += 1
        self.engine.fsdp.backward(total, is_last=self.num_done == self.num_batches)

    def totals(self) -> Totals:
        sums, routing = None, None
        if self.values:
            # In fp64, which counts exactly; a few numbers cost nothing.
            sums = self.engine.world.sum(torch.stack(self.values).double().sum(0))
            routing = RoutingStats.together(self.routings) if self.routings else None
        if (pipeline := self.engine.pipeline) is not None:
            self.names = pipeline.share_names(self.objective, self.names)
            sums, routing = pipeline.share_sums(len(self.names) + 1, sums, routing)
        assert sums is not None  # the last stage is somewhere
        total, *terms = sums.unbind()
        return Totals(total, dict(zip(self.names, terms, strict=True)), routing)
