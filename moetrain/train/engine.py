"""The engine: runs micro-batches through a model that is spread over ranks, and updates it.

    totals = engine.forward_backward(batches, objective)    # as often as a step has batches for
    norm, skipped = engine.step(lr)

Data, folders, learning-rate schedules and when to do what are a loop's business, such as
:mod:`moetrain.train.loop`'s; weights and moments are held by :class:`ModelState`. Inside a step
nothing here waits for the device, with three exceptions: dispatch without fixed sizes waits for its
counts, the number of rows that found no room in buffers of fixed sizes is read while the last
backward runs, and ``log.find_nan`` reads whether the step was skipped.

Every method is collective: all ranks call them in the same order, with as many micro-batches each.
"""

import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist

from moetrain.config import Config, logger
from moetrain.config.environment import launched_place
from moetrain.losses.balancing import RoutingStats
from moetrain.models.architecture import Architecture
from moetrain.models.moe import Router, update_router_bias
from moetrain.models.rules import Rule
from moetrain.models.transformer import Inputs, Transformer, compute_dtype, plan_model
from moetrain.optim.fake_update import FakeUpdate
from moetrain.parallel.apply import dispatcher_of, resharded_blocks
from moetrain.parallel.expert.deepep import DeepEP
from moetrain.parallel.fsdp.transport import wants_copies
from moetrain.parallel.pipeline.executor import Finish, Pipeline
from moetrain.parallel.world import World
from moetrain.runtime.ahead import can_compile_ahead, compile_ahead, launches_of
from moetrain.runtime.annotate import annotate, annotated
from moetrain.runtime.graphs import Graphs, pad_documents
from moetrain.runtime.memory import LateNumbers
from moetrain.train.checks import check_run
from moetrain.train.faults import first_not_finite
from moetrain.train.objectives import MicroBatch, Objective, Outputs, batch_sums_of
from moetrain.train.state import ModelState, StateKind

_B = TypeVar("_B", bound=MicroBatch)


class Totals(NamedTuple):
    """Sums over the micro-batches of one call, on the device."""

    total: torch.Tensor
    """What was minimised: 0-d fp64, of all ranks."""
    terms: dict[str, torch.Tensor]
    """Its terms without their coefficients, by name: each 0-d fp64, of all ranks."""
    routing: RoutingStats | None
    """This rank's; ``routing.map(world.sum)`` are those of all. None: no MoE layer."""


class _StepOutcome(NamedTuple):
    """The numbers of an update (0-d, on the device)."""

    grad_norm: torch.Tensor
    """2-norm of the whole gradient before clipping, fp32."""
    skipped: torch.Tensor
    """bool: a loss or the norm was not finite, and weights and moments did not change."""


class Engine(ModelState):
    """A model in training. Building it reads ``model.path`` and nothing else.

    Attributes:
        static: transport of tokens in buffers of fixed sizes (``moe.dispatch_mode`` static), or
            None.
        retried_steps: calls of :meth:`forward_backward` that were run again because rows were
            dropped, which only ``static`` does.
        graphs: replays what steps compute (``compile.cuda_graphs``), or None.
        before_forward: called before each micro-batch, except those of pipelines, and before a
            replay; what it raises ends the call.
    """

    def __init__(self, config: Config, arch: Architecture, world: World) -> None:
        """Build the model of ``arch``, from ``model.path`` or with initial values.

        With ``train.deterministic`` torch uses reproducible algorithms for the rest of the process.

        Args:
            config: as :func:`moetrain.train.session.resolve_run` returns it, with ``arch``.
            arch: the model.
            world: as :func:`moetrain.parallel.world.join_world` returns it for both.

        Raises ConfigError: the settings cannot run here (:mod:`moetrain.train.checks`), or
        ``model.path`` cannot be loaded.
        """
        config = check_run(config, arch, world.dims, world.device)
        if config.train.deterministic:
            # cuBLAS reads this when its first handle is made. Two buffers of 4 MiB are NVIDIA's own
            # choice.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        _compile_ahead(config, arch, world)
        super().__init__(config, arch, world)
        config = self.config  # as the dispatcher takes it
        for member in self.fsdp.members.values():
            if isinstance(member.module, Router) and member.name == "weight":
                member.module.is_frozen = not member.rule.trainable
        self.pipeline = None
        if world.dims.pp > 1:
            self.pipeline = Pipeline(self.model, self.fsdp, self.stages)
        sender = dispatcher_of(self.model)
        self.static = sender if isinstance(sender, DeepEP) and sender.static is not None else None
        self.retried_steps = 0
        self.before_forward: Callable[[], None] = lambda: None
        self._since_step: list[Totals] = []
        self._given: list[tuple[Sequence[Any], Objective[Any], torch.Tensor]] = []
        """What the step's gradients are of, and with which random numbers; if they may have to be
        computed again."""
        self.graphs: Graphs | None = None
        self._agree: Any = None
        if config.compile.cuda_graphs is True:
            self.graphs = Graphs(world.device, self.fsdp)
            world.endings.append(self.graphs.clear)  # NCCL's end waits for that of its graphs
            if world.size > 1:
                hosts: Any = dist.new_group(backend="gloo")
                self._agree = partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=hosts)
        self._lr = torch.zeros((), dtype=torch.float64, device=world.device)

    # ---- training ------------------------------------------------------------------------------

    def forward_backward(self, batches: Sequence[_B], objective: Objective[_B]) -> Totals:
        """Add this rank's gradients of ``objective`` over ``batches`` to those of the step.

        If it fails, the gradients of the whole step are forgotten, those of earlier calls too.
        """
        self._need("weights", "gradients")
        if self.config.log.find_nan:
            self._given.append((batches, objective, torch.get_rng_state()))
        with annotate("forward_backward"):
            sizes = self._sum_sizes(objective.sizes(batches))
            try:
                learn = self._learn_totals if self.graphs is None else self._replay_totals
                self._since_step.append(learn(batches, objective, sizes))
            except BaseException:
                self.forget()
                raise
        return self._since_step[-1]

    def _learn_totals(
        self, batches: Sequence[_B], objective: Objective[_B], sizes: Mapping[str, torch.Tensor]
    ) -> Totals:
        # A retry forgets the step's gradients: an earlier call's must not go with them.
        with self.exact_sizes() if self._since_step else nullcontext():
            run = self._learn(batches, objective, sizes)
        # With fixed sizes alone: waits for the last forward, while its backward runs.
        if run.dropped is not None and run.dropped.read() > 0:
            self.retried_steps += 1
            self.fsdp.clear_gradients()
            with self.exact_sizes():
                run = self._learn(batches, objective, sizes)
        return run.totals()

    def _replay_totals(
        self, batches: Sequence[_B], objective: Objective[_B], sizes: Mapping[str, torch.Tensor]
    ) -> Totals:
        assert self.graphs is not None

        def learn(given: Any) -> tuple[Totals, torch.Tensor | None]:
            run = self._learn(given[0], objective, given[1])
            return run.totals(), run.lost

        same = pad_documents(batches, self._agree)
        if same is not None and not (self.static and self._since_step):
            self.before_forward()
            self.fsdp.refresh()
            given = [batch.to(self.world.device) for batch in same], dict(sizes)
            totals, lost = self.graphs.run([objective], learn, given)
            if lost is None or lost.item() == 0:  # with fixed sizes alone: waits for the replay
                return totals
            self.retried_steps += 1
            self.fsdp.clear_gradients()
        with self.exact_sizes():
            return learn((batches, sizes))[0]

    def _learn(
        self, batches: Sequence[_B], objective: Objective[_B], sizes: Mapping[str, torch.Tensor]
    ) -> "_Pass[_B]":
        drops = self.config.lora.dropout > 0
        with self.work(), self._own_draws() if drops else nullcontext():
            return _Pass(self, objective, sizes, learns=True).over(batches)

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Draw other random numbers inside than other ranks and calls do.

        They follow from torch's random state, of which each call draws one number, so that a run
        that resumes from a saved state draws the same ones.
        """
        key = f"{self.config.train.seed}.{self.world.data_rank}.{self.stages.rank}"
        call = int(torch.randint(2**31, ()))
        device = self.world.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(zlib.crc32(f"{key}.{call}".encode()))
            yield

    def forget(self) -> None:
        super().forget()
        self._since_step, self._given = [], []

    def forward(self, batches: Sequence[_B], objective: Objective[_B]) -> Totals:
        """Return the sums of :meth:`forward_backward`, without computing gradients."""
        self._need("weights")
        sizes = self._sum_sizes(objective.sizes(batches))
        with self.work(), torch.no_grad(), self.exact_sizes():
            return _Pass(self, objective, sizes, learns=False).over(batches).totals()

    @annotated("update")
    def step(self, lr: float) -> _StepOutcome:
        """Clip the gradients, update with learning rate ``lr``, and forget the gradients.

        The device skips the update if the norm or a loss since the last step is not finite.

        Raises ValueError: there was no :meth:`forward_backward` since the last step.
        """
        self._need("weights", "gradients", "moments")
        if not self._since_step:
            raise ValueError("Engine.step: no forward_backward since the last step")
        self.fsdp.check_idle()
        self.before_change()
        done, self._since_step = self._since_step, []
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._lr.fill_(lr)
        if self.graphs is None:
            outcome = self._update(done)
        else:
            outcome = self.graphs.run([], self._update, done)
        self.fsdp.clear_gradients()
        if self.config.log.find_nan and outcome.skipped.item():
            where = first_not_finite(self.model, self.fsdp, self.world, self._learn_again)
            said = f"the first is {where}" if where else "computed again, all of them are finite"
            logger.warning("log.find_nan: a step's numbers are not finite: %s", said)
            self.forget()
        self._given = []
        return outcome

    def _learn_again(self) -> None:
        with torch.random.fork_rng([]):
            for batches, objective, state in self._given:
                torch.set_rng_state(state)
                self._learn_totals(batches, objective, self._sum_sizes(objective.sizes(batches)))

    def _update(self, done: Sequence[Totals]) -> _StepOutcome:
        norm = self.fsdp.gradient_norm()
        loss = torch.stack([totals.total for totals in done]).sum()
        skipped = ~(torch.isfinite(norm) & torch.isfinite(loss))
        clip = (self.optimizer.config.max_grad_norm / norm).clamp(max=1.0)
        self.optimizer.step(clip, skipped, self._lr)
        routings = [totals.routing for totals in done if totals.routing is not None]
        rate = self.config.moe.bias_update_rate
        if routings and rate:
            counts_LE = self.world.sum(RoutingStats.together(routings).counts_LE)
            # Rows one by one: the device would have to wait for a list of their numbers.
            layers = enumerate(self.arch.moe_layer_indices)
            counts = [counts_LE[row] for row, i in layers if i in self.stages.blocks]
            update_router_bias(self.model, counts, rate * ~skipped)
        return _StepOutcome(norm, skipped)

    def offload(self, *what: StateKind) -> None:
        super().offload(*what)
        if self.graphs is not None:  # memory comes back elsewhere
            self.graphs.clear()

    def exact_sizes(self) -> AbstractContextManager[None]:
        """Drop no row while inside, whatever the routing."""
        return nullcontext() if self.static is None else self.static.sized(None)

    def _sum_sizes(self, counted: Mapping[str, int]) -> dict[str, torch.Tensor]:
        # torch.tensor would wait for the device.
        counts = [torch.full((), n, device=self.world.device) for n in counted.values()]
        summed = self.world.sum_rows(torch.stack(counts)).clamp(min=1)
        return dict(zip(counted, summed.unbind(), strict=True))

    # ---- one pass ------------------------------------------------------------------------------

    def _drive(
        self,
        batches: Sequence[_B],
        finish: Finish[_B],
        backward: Callable[[torch.Tensor], None] | None = None,
        multi_token: list[torch.Tensor] | None = None,
    ) -> None:
        """Run the model on ``batches``, and on its result ``finish(hidden_BSD, routing, batch)``.

        Forward and backward of one micro-batch follow those of another, which takes the least
        memory; with pipeline ranks ``parallel.pp_schedule`` orders them, and ``finish`` runs on the
        last stage. ``backward`` is called with what it returns; None: gradients are not wanted.
        Pipelines have a backward of their own. ``multi_token`` gets what ``backbone`` adds to it.
        """
        if self.pipeline is not None:
            self.pipeline.run(batches, finish, learns=backward is not None)
            return

        def forward(batch: _B) -> torch.Tensor:
            batch = batch.to(self.world.device)
            wanted = multi_token if self.arch.mtp_layers else None
            hidden_BSD, routing = self.model.backbone(batch.inputs, multi_token=wanted)
            return finish(hidden_BSD, routing, batch)

        for batch in batches:
            self.before_forward()
            total = forward(batch)
            if backward is not None:
                backward(total)
            del total  # and its graph, before the next forward

    @torch.no_grad()
    def collect(
        self, batches: Sequence[_B], finish: Finish[_B], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Return what ``finish`` returns for each of ``batches``, on every rank, on the CPU.

        ``shapes``: those of the results, which are fp32.
        """
        found: list[torch.Tensor] = []

        def keep(hidden_BSD: torch.Tensor, routing: RoutingStats | None, batch: _B) -> torch.Tensor:
            found.append(finish(hidden_BSD, routing, batch))
            return found[-1]

        last, broadcast = self.stages.plan.rank_of_stage[-1], self.stages.broadcast
        with self.work(), self.exact_sizes():
            self._drive(batches, keep)
            pairs = zip(found or [None] * len(shapes), shapes, strict=True)
            return [broadcast(last, x, shape, torch.float32).cpu() for x, shape in pairs]


@dataclass
class _Pass(Generic[_B]):
    """One pass of ``objective`` over micro-batches, and the sums that it makes."""

    engine: Engine
    objective: Objective[_B]
    sizes: Mapping[str, torch.Tensor]
    learns: bool
    num_batches: int = 0
    names: list[str] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    """Total and terms of each micro-batch."""
    routings: list[RoutingStats] = field(default_factory=list)
    lost: torch.Tensor | None = None
    """How many rows of all ranks found no room; None: no row can be dropped."""
    dropped: LateNumbers | None = None
    """The same, on the host."""
    load_LE: torch.Tensor | None = None
    """``Outputs.load_LE`` of all micro-batches; None: each is balanced by its own."""
    batch_sums: Mapping[str, torch.Tensor] | None = None
    """``Outputs.batch_sums``; None: the objective needs none, or they are not known yet."""
    multi_token: list[torch.Tensor] = field(default_factory=list)
    """Hidden states of the MTP blocks for this micro-batch, where these are trained."""

    def over(self, batches: Sequence[_B]) -> Self:
        engine, self.num_batches = self.engine, len(batches)
        if not batches:
            raise ValueError("Engine: a call takes one micro-batch at least")
        self._look_ahead(batches)
        learning = (
            {"backward": self.backward, "multi_token": self.multi_token} if self.learns else {}
        )
        engine._drive(batches, self.finish, **learning)
        return self

    def _look_ahead(self, batches: Sequence[_B]) -> None:
        """Count what losses need of the whole global batch, if they need anything.

        This is one more forward of every micro-batch, without gradients. A single micro-batch a
        rank needs none: :meth:`finish` sums over ranks what it finds.
        """
        engine, objective = self.engine, self.objective
        is_global = engine.config.moe.aux_loss_scope == "global_batch"
        counts_load = is_global and objective.balances and bool(engine.arch.moe_layer_indices)
        sums_of = batch_sums_of(objective)
        if len(batches) == 1 or not (counts_load or sums_of):
            return
        routings: list[RoutingStats] = []
        sums: list[Mapping[str, torch.Tensor]] = []

        def count(hidden_BSD: torch.Tensor, routing: RoutingStats | None, batch: _B) -> Any:
            if counts_load and routing is not None:
                routings.append(routing)
            if sums_of is not None:
                sums.append(sums_of(engine.model, self._outputs(hidden_BSD, routing), batch))
            self.multi_token.clear()
            return hidden_BSD

        with torch.no_grad(), engine.exact_sizes():
            engine._drive(batches, count, multi_token=self.multi_token if self.learns else None)
        if routings:  # on the last pipeline stage
            self.load_LE = engine.world.sum(RoutingStats.together(routings).counts_LE)
        if sums:
            self.batch_sums = self._summed(sums)

    def _summed(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Add up the sums of micro-batches over these and over ranks, in fp64."""
        names = list(parts[0])
        rows = [torch.stack([part[name] for name in names]) for part in parts]
        total = self.engine.world.sum(torch.stack(rows).double().sum(0))
        return dict(zip(names, total.unbind(), strict=True))

    def _outputs(self, hidden_BSD: torch.Tensor, routing: RoutingStats | None) -> Outputs:
        return Outputs(hidden_BSD, routing, None, 1 / self.engine.world.dims.token_ranks)

    @annotated("head and loss")
    def finish(
        self, hidden_BSD: torch.Tensor, routing: RoutingStats | None, batch: _B
    ) -> torch.Tensor:
        """Return this micro-batch's share of what is minimised."""
        engine, load_LE = self.engine, self.load_LE
        if load_LE is None and routing is not None and self.objective.balances:
            load_LE = engine.world.sum(routing.counts_LE)
        outputs, sums_of = self._outputs(hidden_BSD, routing), batch_sums_of(self.objective)
        batch_sums = self.batch_sums
        if batch_sums is None and sums_of is not None:  # this micro-batch is the only one
            with torch.no_grad():
                batch_sums = self._summed([sums_of(engine.model, outputs, batch)])
        outputs = outputs._replace(
            load_LE=load_LE, multi_token=tuple(self.multi_token), batch_sums=batch_sums or {}
        )
        self.multi_token.clear()
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
                self.lost = engine.world.sum(torch.stack(dropped).sum())
                self.dropped = None if engine.graphs else LateNumbers(self.lost)
        return total

    def backward(self, total: torch.Tensor) -> None:
        """Run the backward of the micro-batch that was finished last."""
        self.engine.fsdp.backward(total, is_last=len(self.values) == self.num_batches)

    def totals(self) -> Totals:
        sums, routing = None, None
        if self.values:
            # In fp64, which counts exactly; a few numbers cost nothing.
            sums = self.engine.world.sum(torch.stack(self.values).double().sum(0))
            routing = RoutingStats.together(self.routings) if self.routings else None
        if (pipeline := self.engine.pipeline) is not None:
            self.names = pipeline.broadcast_names(self.objective, self.names)
            sums, routing = pipeline.broadcast_sums(len(self.names) + 1, sums, routing)
        assert sums is not None  # the last stage is somewhere
        total, *terms = sums.unbind()
        return Totals(total, dict(zip(self.names, terms, strict=True)), routing)


def _compile_ahead(config: Config, arch: Architecture, world: World) -> None:
    """Begin to compile the kernels of a step; others are compiled when they are launched."""
    device, launched = world.device, launched_place()
    if not can_compile_ahead(device):
        return
    rank, size = 0, 1
    if launched is not None and launched.on_machine is not None:
        rank, size = launched.local_rank, launched.on_machine
    try:
        launches = launches_of(_fake_step(config, arch, world).run)
        compile_ahead(launches, device, rank, size)
    except Exception as error:  # noqa: BLE001 - nothing is lost but seconds
        logger.warning("kernels will be compiled as they are launched: %s", error)


@dataclass(frozen=True)
class _FakeStep(FakeUpdate):
    """A step without a device, to find which kernels it launches, and where it will run.

    Left out on purpose: what dispatch launches (indices among a rank's own experts too), and the
    few kernels that are compiled for a tensor parallel rank's part of the heads.
    """

    arch: Architecture

    def run(self) -> None:
        """Run a micro-batch through a block of each kind, and update; within a FakeTensorMode."""
        config = self.config
        if config.kernels.attention != "exact":  # a library's, or the compiler's
            kernels = config.kernels.model_copy(update={"attention": "reference"})
            config = config.model_copy(update={"kernels": kernels})
        model, rules = plan_model(config, self.arch, self.dtype)
        widths = {n: math.gcd(math.prod(x.shape[1:]), 16) for n, x in model.named_parameters()}
        self._run_micro_batch(model, rules)
        trained = ((widths[name], rule) for name, rule in rules.items() if rule.trainable)
        for kind in {(rule.gather or self.dtype, rule.storage, width) for width, rule in trained}:
            self.run_update(*kind)
        quantised = [rule for rule in rules.values() if rule.quant_format]
        for format, dtype in {(x.quant_format, x.gather or self.dtype) for x in quantised}:
            self.run_dequantise(format, dtype)

    def _run_micro_batch(self, model: Transformer, rules: Mapping[str, Rule]) -> None:
        own = model.arch.layers()[: model.arch.num_layers]  # others launch no further kernels
        kinds = {part: i for i, part in reversed(list(enumerate(own)))}
        seen = tuple(f"layers.{i}." for i in kinds.values())
        for name, parameter in list(model.named_parameters()):
            if name.startswith("layers.") and not name.startswith(seen):
                continue
            parent, _, last = name.rpartition(".")
            dtype = rules[name].gather or self.dtype
            whole = torch.empty(parameter.shape, dtype=dtype, device=self.device)
            made = torch.nn.Parameter(whole, requires_grad=rules[name].trainable)
            setattr(model.get_submodule(parent), last, made)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=self.device))
        model.compute_dtype = self.dtype
        shape = (self.config.train.micro_batch_size, self.config.data.seq_len)
        tokens_BS = torch.empty(shape, dtype=torch.int64, device=self.device)
        x_BSD, rows = model.embed_tokens(tokens_BS), model.prepare(Inputs(tokens_BS))
        losses: list[torch.Tensor] = []
        for i in kinds.values():
            x_BSD, statistics = model.run(x_BSD, rows, i, i + 1)
            found = (x for one in statistics for x in one if x is not None)
            losses += [x.sum() for x in found if x.requires_grad]
        hidden_TD = model.head(x_BSD, rows).flatten(0, 1)
        targets_T = tokens_BS.flatten()
        if model.score is not None:
            losses.append(model.vocabulary.scores(hidden_TD, model.head_weight, targets_T).sum())
        else:
            weights_T = torch.ones_like(targets_T, dtype=torch.float32)
            losses.append(
                model.vocabulary.loss_sum(hidden_TD, model.head_weight, targets_T, weights_T)[0]
            )
        torch.autograd.backward(losses)


def _fake_step(config: Config, arch: Architecture, world: World) -> _FakeStep:
    """Describe a step of this rank, as far as is known before anything is built.

    Ranks that share parameters are assumed to reach one another's memory if they are on one
    machine.
    """
    dims = world.dims
    is_near = dims.machines(dims.sharding_ranks) == 1
    return _FakeStep(
        config,
        world.device,
        compute_dtype(config, world.device),
        world.meshes.sharding,
        copies=is_near and wants_copies(config.parallel, world.device.type),
        takes_turns=resharded_blocks(config, world.size, arch.num_layers) > 0,
        micro_batches=config.train.micro_batches(dims.data_ranks),
        arch=arch,
    )
