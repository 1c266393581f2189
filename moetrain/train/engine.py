"""The engine: a model, how it is spread over ranks, and its optimizer; nothing else.

    totals = engine.forward_backward(batches, objective)    # as often as a step has batches for
    norm, skipped = engine.step(lr)

Data, folders, learning-rate schedules and when to do what are a loop's business
(:mod:`moetrain.train.trainer` is one). Inside a step nothing here waits for the device, except that
dispatch of tokens of unknown number does, and that the number of rows for which buffers of fixed
sizes had no room is read while the last backward runs.

Every method is collective: all ranks call them in the same order, with as many micro-batches each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from moetrain.config import Config, ConfigError
from moetrain.config.environment import launched_place
from moetrain.kernels.ahead import can_compile_ahead, compile_ahead, launches_of
from moetrain.kernels.annotate import annotated
from moetrain.models.architecture import Architecture
from moetrain.models.families import find_family
from moetrain.models.family import all_pieces
from moetrain.models.hf.files import TokenizerFiles
from moetrain.models.hf.peft import save_peft
from moetrain.models.hf.save import (
    DEFAULT_SHARD_BYTES,
    ExportDtype,
    ExportRank,
    save_stream,
    warn_about_router_bias,
    what_does_not_fit,
)
from moetrain.models.init import compute_dtype
from moetrain.models.lora import Adapter, own_draws
from moetrain.models.moe import RoutingStats, update_router_bias
from moetrain.models.rehearsal import Place, rehearse
from moetrain.models.rules import ADAPTER, is_adapter
from moetrain.models.transformer import build_model
from moetrain.optim.adamw import (
    build_optimizer,
    guarded_step,
    load_optimizer_state,
    optimizer_parts,
)
from moetrain.parallel.apply import (
    load_whole_state,
    place_model,
    resharded_blocks,
    static_transport,
)
from moetrain.parallel.fsdp.copy_engines import is_wanted
from moetrain.parallel.fsdp.frozen import fingerprint
from moetrain.parallel.layout import Sliceable, TensorSlice
from moetrain.parallel.pipeline.executor import Pipeline
from moetrain.parallel.pipeline.stages import Stages
from moetrain.parallel.world import World
from moetrain.train.objectives import Objective
from moetrain.train.passes import B, Pass, Passes, Schedule, Totals, sequential

logger = logging.getLogger("moetrain")

Offloaded = Literal["weights", "gradients", "moments", "workspaces"]
OFFLOADED: tuple[Offloaded, ...] = get_args(Offloaded)


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
            config: as :func:`moetrain.train.setup.resolve_run` gives it, with ``arch``.
            schedule: orders the micro-batches of a call; with pipeline ranks,
                ``parallel.pp_schedule`` does.

        Raises:
            ConfigError: ``model.path`` cannot be loaded.
        """
        self.config, self.arch, self.world = config, arch, world
        _compile_ahead(config, arch, world)
        self.stages = Stages.of(config, arch, world.meshes, world.device)
        self.model, self.fsdp = place_model(config, arch, world, self.stages)
        pipeline = None
        if world.dims.pp > 1:
            pipeline = Pipeline(config, world.dims, self.model, self.fsdp, self.stages)
        self.optimizer = build_optimizer(self.fsdp, config.optim, config.train.seed)
        static = static_transport(self.model)
        spread = (self.model, self.fsdp, self.stages)
        self.passes = Passes(config, arch, world, *spread, schedule, pipeline, static)
        arenas = (self.fsdp.weights, self.fsdp.gradients, self.optimizer.arena)
        self._arenas = {arena.name: arena for arena in arenas}
        self._link = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
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
        self._need("weights", "gradients")
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
    ) -> Pass[B]:
        with self.work(), self._draws():
            return Pass(self.passes, objective, sizes, learns=True).over(batches)

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
        self._need("weights")
        sizes = self._sum_sizes(objective.sizes(batches))
        with self.work(), torch.no_grad(), self.exact_sizes():
            return Pass(self.passes, objective, sizes, learns=False).over(batches).totals()

    @annotated("update")
    def step(self, lr: float) -> StepOutcome:
        """Clip, update with learning rate ``lr`` and forget the gradients.

        Skipped, on the device, if the norm or a loss since the last step is not finite.

        Raises:
            ValueError: there was no :meth:`forward_backward` since the last step.
        """
        self._need("weights", "gradients", "moments")
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

    def offload(self, *what: Offloaded) -> None:
        """Keep ``what`` in host memory, and free its memory on the device, until :meth:`reload`.

        Tensors stay those that they are, and on a GPU where they are: parameters, moments and, with
        several ranks, gradients come back to their addresses. Until then what needs them raises
        :class:`~moetrain.parallel.offload.arena.OffloadedError`, and nobody else may touch them.
        Host memory is kept for the next time.

        Args:
            what: nothing stands for everything. Workspaces (parameters gathered) are but freed, and
                come back with their next use.

        Raises:
            ValueError: something unknown.
            RuntimeError: within :meth:`work`.
            RunFailed: the system does not give as much pinned memory.
        """
        if odd := set(what) - set(OFFLOADED):
            raise ValueError(f"Engine.offload: {sorted(odd)} are none of {', '.join(OFFLOADED)}")
        self.fsdp.check_idle()
        if not self.fsdp.weights.is_away:  # else no step has been since
            self.fsdp.settle()
        self.before_change()
        what = what or OFFLOADED
        if "workspaces" in what:
            self.fsdp.release()
        for name, arena in self._arenas.items():
            if name in what and not arena.is_away:
                keep = name != "gradients" or self.fsdp.has_gradients
                arena.offload(self._link, keep=keep)
        if self._link is not None:
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Bring back what is offloaded; what needs some of it waits, on the device, for that alone.

        Raises:
            torch.OutOfMemoryError: others have the memory now. Once they have not, call it again.
        """
        for arena in self._arenas.values():  # in the order in which a step needs them
            arena.reload(self._link)

    def _need(self, *what: Offloaded) -> None:
        for name in what:
            self._arenas[name].need()

    def exact_sizes(self) -> AbstractContextManager[None]:
        """Whatever the routing, no row is dropped meanwhile."""
        return self.passes.exact_sizes()

    def _sum_sizes(self, counted: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """This rank's counts to those of all, on the device; torch.tensor would wait for it."""
        counts = [torch.full((), n, device=self.world.device) for n in counted.values()]
        summed = self.world.sum_rows(torch.stack(counts)).clamp(min=1)
        return dict(zip(counted, summed.unbind(), strict=True))

    # ---- weights and state ---------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, TensorSlice]]:
        """Groups ``model`` and ``optim``: this rank's own parts of tensors, by name; not copies.

        Gradients are no part of it, nor is what is not trained: that is where it came from
        (:attr:`fingerprint` tells whether it still is the same).
        """
        self._need("weights", "moments")
        self.fsdp.settle()
        members, among = self.fsdp.members, self.stages.among
        model = {
            name: among(name, member.layout.part(member.local))
            for name, member in members.items()
            if member.rule.trainable
        }
        common = next(iter(members.values())).layout.common
        model |= {name: among(name, common(x)) for name, x in self.model.named_buffers()}
        return {"model": model, "optim": optimizer_parts(self.optimizer, members, self.stages)}

    def load_state(self, groups: Mapping[str, Mapping[str, Sliceable]]) -> None:
        """Take what all ranks' :meth:`state` were, on any layout: each group that ``groups`` has.

        Forgets the step's gradients.

        Raises:
            ConfigError: tensors of other names, shapes, dtypes.
        """
        self.fsdp.check_idle()
        self._need("weights", "gradients", "moments")
        self.fsdp.settle()
        self.before_change()
        self._forget()
        if "model" in groups:
            load_whole_state(self.model, self.fsdp, self.stages, groups["model"])
        if "optim" in groups:
            members, optim = self.fsdp.members, groups["optim"]
            load_optimizer_state(self.optimizer, members, self.stages, optim)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the weights that are not trained. Collective at its first use."""
        self._need("weights")
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
        self._need("weights")  # on every rank, whichever stage has it: else the others would wait
        return self.stages.whole(self.stages.table[name], partial(self._whole_here, name)).detach()

    def _whole_here(self, name: str) -> torch.Tensor:
        """A tensor of this rank's stages; collective over the ranks that have them."""
        member = self.fsdp.members.get(name)
        if member is None:
            return self.model.get_buffer(name)
        self.fsdp.settle()
        return member.layout.whole(member.read().to(self.world.device))

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
        self.fsdp.settle()
        here = {name: member.read for name, member in self.fsdp.members.items()}
        if unfit := world.any(what_does_not_fit(whole, here, dtype)):
            raise ConfigError("checkpoint.hf_dtype", unfit)
        if world.is_main:
            warn_about_router_bias(self.model)
        share = ExportRank(world.rank, world.size, world.barrier)
        weights = self.weights(hf=True)
        save_stream(whole, folder, weights, dtype, tokenizer, max_shard_bytes, share)


def _compile_ahead(config: Config, arch: Architecture, world: World) -> None:
    """Begin to compile the kernels of a step; those it misses are compiled as they are launched."""
    device, launched = world.device, launched_place()
    if not can_compile_ahead(device):
        return
    rank, size = 0, 1
    if launched is not None and launched.on_machine is not None:
        rank, size = launched.local_rank, launched.on_machine
    try:
        place = rehearsal_place(config, arch, world)
        launches = launches_of(lambda: rehearse(config, arch, place))
        compile_ahead(launches, device, rank, size)
    except Exception as error:  # noqa: BLE001 - nothing is lost but seconds
        logger.warning("kernels will be compiled as they are launched: %s", error)


def rehearsal_place(config: Config, arch: Architecture, world: World) -> Place:
    """Where this rank will do its steps, as far as is known before anything is built: ranks that
    share parameters are taken to reach one another's memory if they are on one machine."""
    launched, dims = launched_place(), world.dims
    on_machine = None if launched is None else launched.on_machine
    is_near = on_machine is None or dims.sharding_ranks <= on_machine
    return Place(
        world.device,
        compute_dtype(config, world.device),
        world.meshes.sharding,
        copies=is_near and is_wanted(config.parallel, world.device.type),
        takes_turns=resharded_blocks(config, world.size, arch.num_layers) > 0,
        micro_batches=config.train.micro_batches(dims.data_ranks),
    )
