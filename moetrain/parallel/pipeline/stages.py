"""Cut a model's blocks into stages, and place its tensors on pipeline ranks.

The cuts are chosen so that the slowest rank takes as little time as possible. The cost of a block
is estimated from its multiply-adds and from its parameters, which every micro-batch moves through
memory. The first stage also has the embedding, which counts as free, and the last stage has the
final norm and the head. With tied embeddings both stages need the same matrix: each keeps a copy,
and their gradients are added up before the step.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, permutations
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from moetrain.config import Config, ConfigError
from moetrain.models.architecture import Architecture, AttentionPart, Workload
from moetrain.models.rules import Rule
from moetrain.models.transformer import Transformer, compute_dtype, plan_model
from moetrain.parallel.mesh import Meshes, ParallelDims, Sliceable, TensorSlice
from moetrain.parallel.pipeline.schedules import SCHEDULES, Schedule

# Rates of an H200; for other GPUs only their ratio is used.
_PRODUCTS = 640e12
"""FLOP/s of large matrix products in bf16."""
_MEMORY = 4.26e12
"""Bytes/s that a copy on the device reads and writes together."""
_BYTES_MOVED = 16
"""Bytes for each parameter and micro-batch: it is read twice in bf16, and its gradient is written
and added in fp32."""


class StagePlan:
    """The model cut into the stages that ``config.parallel`` asks for.

    Attributes:
        ranges: the blocks of every stage.
        rank_of_stage: the pipeline rank of every stage.

    Raises:
        ConfigError: there are more stages than blocks, the schedule does not allow this number of
            stages on a rank, or ``pp_split`` does not give every block to one of the stages.
    """

    def __init__(self, config: Config, arch: Architecture) -> None:
        self.config, self.arch = config, arch
        parallel = config.parallel
        ranks, kind = parallel.pp, SCHEDULES[parallel.pp_schedule]
        virtual = kind.stages_per_rank[0] if parallel.pp_stages == "auto" else parallel.pp_stages
        if ranks == 1:
            virtual = 1
        else:
            kind.check_stages(parallel.pp_schedule, virtual)
        self.rank_of_stage = tuple(range(ranks)) * virtual
        count, blocks, sizes = ranks * virtual, len(arch.layers()), parallel.pp_split
        if count > blocks:
            fewer = ", or fewer stages (parallel.pp_schedule, parallel.pp_stages)" * (virtual > 1)
            raise ConfigError(
                "parallel.pp",
                f"{ranks} ranks with {virtual} stage{'s' * (virtual > 1)} each are {count} "
                f"stages, but the model has {blocks} blocks; use {max(1, blocks // virtual)} or "
                f"fewer{fewer}",
            )
        if count == 1:
            sizes = sizes or (blocks,)
        if sizes is None:
            *costs, head = self._costs()
            sizes = self.balance(tuple(costs), head, self.rank_of_stage)
        elif len(sizes) != count or sum(sizes) != blocks:
            raise ConfigError(
                "parallel.pp_split",
                f"{','.join(map(str, sizes))} are {len(sizes)} stages of {sum(sizes)} blocks; give "
                f"{count} numbers that add up to the model's {blocks} blocks",
            )
        ends = accumulate(sizes)
        self.ranges = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self._check_starts()

    def _check_starts(self) -> None:
        """Raise ConfigError if a stage begins with a block that needs an earlier block's keys."""
        following = {
            i
            for i, parts in enumerate(self.arch.layers())
            for part in parts
            if isinstance(part, AttentionPart) and part.follows_selection
        }
        if odd := [blocks.start for blocks in self.ranges if blocks.start in following]:
            fits = [i for i in range(self.arch.num_layers) if i not in following]
            wrong = f"begin with block {odd[0]}, which attends to keys that an earlier one selects"
            remedy = f"let stages begin with some of the blocks {','.join(map(str, fits))}"
            sizes = ",".join(str(len(blocks)) for blocks in self.ranges)
            problem = f"stages of {sizes} blocks {wrong}"
            raise ConfigError("parallel.pp_split", f"{problem}; {remedy}, or use fewer stages")

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of pipeline rank ``rank``, in the order of the model."""
        return [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]

    def blocks_of(self, rank: int) -> list[int]:
        """Return the blocks of pipeline rank ``rank``."""
        return [i for stage in self.stages_of(rank) for i in self.ranges[stage]]

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the pipeline ranks that hold the tensor ``name``, in the forward's order."""
        first, last = self.rank_of_stage[0], self.rank_of_stage[-1]
        kind, _, rest = name.partition(".")
        if kind == "layers":
            block = int(rest.partition(".")[0])
            stage = next(s for s, blocks in enumerate(self.ranges) if block in blocks)
            return (self.rank_of_stage[stage],)
        if kind == "embed":
            return (first, last) if self.arch.tie_embeddings and first != last else (first,)
        return (last,)

    def check(self, dims: ParallelDims) -> None:
        """Raise :class:`ConfigError` unless the schedule can run the micro-batches of a step.

        It is called with two or more pipeline ranks.
        """
        number = self.config.train.micro_batches(dims.data_ranks)
        if number < dims.pp:
            raise ConfigError(
                "parallel.pp",
                f"{dims.pp} is more than the {number} micro-batches of a step, which leaves ranks "
                "idle throughout; raise train.global_batch_size, or lower train.micro_batch_size "
                "or parallel.pp",
            )
        self.schedule(number)

    @property
    def batch_multiple(self) -> int:
        """The number that must divide the micro-batches of a step."""
        parallel = self.config.parallel
        return parallel.pp if SCHEDULES[parallel.pp_schedule].by_rounds else 1

    def schedule(self, micro_batches: int) -> Schedule:
        """Make the schedule of a step.

        Raises ConfigError: there is none for these numbers; the error names what is possible.
        """
        name, ranks = self.config.parallel.pp_schedule, self.config.parallel.pp
        return Schedule.make(name, ranks, len(self.rank_of_stage) // ranks, micro_batches)

    def in_flight(self, dims: ParallelDims) -> list[int]:
        """Return, for each rank, the most (stage, micro-batch) pairs with activations at once."""
        if dims.pp == 1:
            return [1]
        schedule = self.schedule(self.config.train.micro_batches(dims.data_ranks))
        return [max(schedule.in_flight(rank)) for rank in range(dims.pp)]

    def describe(self, dims: ParallelDims) -> str:
        """Describe a step's schedule in one line: stages, bubble, activations by rank.

        The bubble is that of a simulation with the estimated costs of the stages. In it a backward
        takes twice as long as a forward, and communication takes no time.
        """
        number = self.config.train.micro_batches(dims.data_ranks)
        schedule = self.schedule(number)
        *costs, head = self._costs()
        scale = [sum(costs[i] for i in blocks) for blocks in self.ranges]
        scale[-1] += head
        timeline = schedule.simulate(lambda action: action.unit_time * scale[action.stage])
        sizes = ",".join(str(len(blocks)) for blocks in self.ranges)
        held = " ".join(map(str, self.in_flight(dims)))
        return (
            f"pipeline {schedule.name}: stages of {sizes} blocks, {number} micro-batches, bubble "
            f"{timeline.bubble:.1%}; by rank: activations in flight {held} (stages x micro-batches)"
        )

    def _costs(self) -> list[float]:
        """Estimate the seconds for a token, forward and backward, of each block and of the head."""
        config, arch = self.config, self.arch
        tokens = config.train.micro_batch_size * config.data.seq_len // config.parallel.cp
        share = Workload(tokens, config.parallel.tp, config.parallel.ep, 2, config.compile.is_on)

        def seconds(products: float, numbers: float) -> float:
            flops = 6 * products / share.tp
            return flops / _PRODUCTS + _BYTES_MOVED * numbers / share.tokens / _MEMORY

        found = {}
        for parts in set(arch.layers()):
            products = sum(part.products_per_token(config.data.seq_len) for part in parts)
            found[parts] = seconds(products, sum(part.matrix_elements(share) for part in parts))
        matrix = (arch.num_labels or arch.vocab_size) * arch.hidden_size
        return [*(found[parts] for parts in arch.layers()), seconds(matrix, matrix / share.tp)]

    @staticmethod
    @lru_cache
    def balance(
        costs: tuple[float, ...], head: float, rank_of_stage: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return the number of blocks of each stage, at least one.

        It is a local search. It starts from numbers that differ by at most one, and moves one block
        at a time from one stage to another. The best move leaves the smallest cost of the slowest
        rank; among equal ones, the most equal costs of ranks, and then of stages. The search ends
        when no move is better than none.

        Args:
            costs: the cost of each block.
            head: the cost of the head, which the last stage has.
            rank_of_stage: the pipeline rank of every stage.
        """
        sums = [0.0, *accumulate(costs)]

        def weights(sizes: tuple[int, ...]) -> tuple[float, ...]:
            pairs = zip(accumulate(sizes), sizes, strict=True)
            stages = [sums[end] - sums[end - size] for end, size in pairs]
            stages[-1] += head
            ranks = [0.0] * (max(rank_of_stage) + 1)
            for rank, cost in zip(rank_of_stage, stages, strict=True):
                ranks[rank] += cost
            return max(ranks), sum(x * x for x in ranks), sum(x * x for x in stages)

        even, more = divmod(len(costs), len(rank_of_stage))
        sizes = tuple(even + (i < more) for i in range(len(rank_of_stage)))
        while True:
            moves = (
                tuple(n - (i == source) + (i == target) for i, n in enumerate(sizes))
                for source, target in permutations(range(len(sizes)), 2)
                if sizes[source] > 1
            )
            better = min(moves, key=weights, default=sizes)
            if weights(better) >= weights(sizes):
                return sizes
            sizes = better


# ---- one rank's view ----------------------------------------------------------------------------


class _ModelTensor(NamedTuple):
    shape: torch.Size
    rule: Rule | None
    """The parameter's rule; None: it is a buffer."""
    holders: tuple[int, ...]
    """The pipeline ranks that hold it."""


class _RemoteStage(nn.Module):
    """Takes the place of a part of the model that another rank has."""


class Stages:
    """This rank's part of the model, and which ranks have the rest.

    Attributes:
        table: every parameter, then every buffer, in the model's order.
        rules: the rule of every parameter.
        trained: the entries of the table that are trained.
        saved: the entries that a checkpoint holds: trained parameters, and buffers.
        token_ranks: the number of ranks of each stage that share a micro-batch's tokens.
        group: the ranks that have the stages for the same data. A rank's number in the group is
            its pipeline rank.
        rank: this rank's pipeline rank.
        blocks: the blocks of this rank.
    """

    def __init__(
        self, config: Config, arch: Architecture, meshes: Meshes, device: torch.device
    ) -> None:
        self.plan, self.arch, self.device = StagePlan(config, arch), arch, device
        self.token_ranks = meshes.dims.token_ranks
        self.group = meshes.dense.get_group("pp")
        self.rank = self.group.rank()
        self.blocks = self.plan.blocks_of(self.rank)
        model, rules = plan_model(config, arch, compute_dtype(config, device))
        self.table = {
            name: _ModelTensor(x.shape, rules.get(name), self.plan.holders(name))
            for name, x in (*model.named_parameters(), *model.named_buffers())
        }
        self.rules = {n: e.rule for n, e in self.table.items() if e.rule is not None}
        self.trained = {n: self.table[n] for n, rule in self.rules.items() if rule.trainable}
        self.saved = {n: e for n, e in self.table.items() if n in self.trained or e.rule is None}
        for rank in range(meshes.dims.pp):
            if not any(rank in entry.holders for entry in self.trained.values()):
                raise ConfigError(
                    "train.freeze" if config.train.freeze else "lora.targets",
                    f"pipeline rank {rank} of {meshes.dims.pp} would have nothing to train, which "
                    "is not supported; train something in each stage, or use parallel.pp 1",
                )

    @property
    def tied_rank(self) -> int | None:
        """The pipeline rank that holds the tied embedding's other copy; None: there is none."""
        holders = self.table["embed.weight"].holders
        if len(holders) == 1 or self.rank not in holders:
            return None
        return next(rank for rank in holders if rank != self.rank)

    def cut(self, model: Transformer) -> list[Sequence[nn.Module]]:
        """Leave only this rank's parts in ``model``.

        Returns the modules of each unit of FSDP, in the order of the forward.
        """
        heads = [name for name in ("lm_head", "score") if getattr(model, name) is not None]
        head = ["norm", *heads]
        units: list[list[nn.Module]] = []
        for names in (["embed"], head):
            if self.rank in self.plan.holders(names[0]):
                units.append([model.get_submodule(name) for name in names])
            else:
                for name in names:
                    setattr(model, name, _RemoteStage())
        for i in set(range(len(model.layers))) - set(self.blocks):
            model.layers[i] = _RemoteStage()
        first = self.rank == self.plan.rank_of_stage[0]  # there the embedding comes before blocks
        return [*units[:first], *([model.layers[i]] for i in self.blocks), *units[first:]]

    def among(self, name: str, part: TensorSlice) -> TensorSlice:
        """Return ``part`` with copies on all pipeline ranks counted, and its number among them.

        ``name``: the tensor that it is a part of, or one with the same layout.
        """
        holders = self.table[name].holders
        number, copies = holders.index(self.rank), part.copies * len(holders)
        return part._replace(copy=part.copy * len(holders) + number, copies=copies)

    def whole(self, entry: _ModelTensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return, on all pipeline ranks, what ``make()`` returns on the entry's first holder."""
        holder = entry.holders[0]
        dtype = torch.float32 if entry.rule is None else entry.rule.storage
        x = make() if self.rank == holder else None
        return self.broadcast(holder, x, entry.shape, dtype)

    def broadcast(
        self, holder: int, x: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return, on all pipeline ranks, the ``x`` of rank ``holder``. Collective."""
        if self.rank != holder:
            x = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        assert x is not None
        if self.group.size() == 1:
            return x
        x = x.to(self.device).contiguous()
        dist.broadcast(x, group=self.group, group_src=holder)
        return x


def check_like(
    name: str, saved: Sliceable, shape: Sequence[int], dtype: torch.dtype, remedy: str = ""
) -> None:
    """Raise :class:`ConfigError` unless a checkpoint's ``saved`` has this shape and dtype.

    Without this check, copying the tensor could broadcast, cut or round it in silence. ``remedy``:
    what the error advises if the dtype differs.
    """
    if saved.shape != torch.Size(shape) or saved.dtype != dtype:
        theirs, ours = (str(d).removeprefix("torch.") for d in (saved.dtype, dtype))
        raise ConfigError(
            "checkpoint.resume",
            f"its {name!r} is {theirs} of shape {list(saved.shape)}, "
            f"but this run has {ours} of shape {list(shape)}{remedy * (theirs != ours)}",
        )
