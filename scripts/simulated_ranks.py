"""Operations that the ranks of a step queue, and their order: FSDP, dispatch, pipelines.

scripts/simulate.py runs them. Ranks of a machine with the same stages are alike, so one of them is
simulated. :class:`Work` has the seconds and bytes of the operations. The pipeline's own schedule
orders them. FSDP follows moetrain/parallel/fsdp/fsdp.py. One unit is gathered ahead, and the gather
begins after the computation that was queued last. A reduction begins after its unit's backward, and
the computation after the next unit's backward waits for it. Copies have their own streams. NCCL's
collectives over the same ranks share one communicator and one stream, in order, even for different
mesh axes, because moetrain/parallel/mesh.py makes each group of ranks only once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from streams import Operation, Simulation

from moetrain.parallel.mesh import _DENSE_AXES, _EXPERT_AXES, ParallelDims
from moetrain.parallel.pipeline.schedules import Action, Schedule

SLOWED = 6.87 / 7.68
"""Share of the products' rate that remains while NCCL runs. It was measured with four grouped
products on an H200: beside a gather by copy engines, and beside one by NCCL."""
INSIDE = 20e-6
"""Seconds before an exchange within a machine moves anything. It is the intercept of DeepEP's
combine, which takes 0.18 ms for 4,096 tokens and 0.65 ms for 16,384."""


_WAYS = {**dict.fromkeys(("reduce", "cp", "dispatch"), "direct"), "replicas": "sums"}
"""Names of the rates of :class:`Links` for kinds of collectives; for other kinds ``across``. In
``direct`` ones every rank sends each other rank its own part; ``sums`` are all-reduces."""


# ---- the work of ranks ---------------------------------------------------------------------------


class PartWork(NamedTuple):
    """Seconds of a part of a block, and its ranks' exchanges before and after each pass."""

    forward: float
    backward: float
    exchanges: Sequence[tuple[str, float, tuple[float, float]]] = ()
    """Mesh axis, bytes that arrive from all ranks, and numbers of exchanges in the forward and in
    the backward."""
    once: float = 1.0
    """The share of dispatched bytes that a machine receives, because each token is sent to it only
    once."""


@dataclass(frozen=True)
class Work:
    """The work of a rank in a step, with one pipeline stage or several."""

    blocks: Mapping[int, Sequence[PartWork]]
    gathered: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Bytes of each block's full parameters, by the axis that shards them."""
    vocabulary: Mapping[str, float] = field(default_factory=dict)
    """Bytes of the embedding's and of the head's parameters, by axis."""
    turns: int = 0
    """The number of first blocks whose gathered parameters share two buffers (double buffering)."""
    share_trained: float = 1.0
    reduces_last: bool = False
    by_copies: bool = True
    embedding: float = 0.0
    """Seconds of the embedding, which is queued after the first stage's backward."""
    head: float = 0.0
    """Seconds of the head and the loss with their gradients, after the last stage's forward."""
    border: float = 0.0
    """Bytes of a micro-batch that are sent from one stage to the next."""
    copies: float = 0.0
    """Bytes of the gradient all-reduce over replicas: they send gradients, and then their sums."""
    update: float = 0.0


class Links(NamedTuple):
    """Bytes per second and GPU in one direction, and seconds of latency."""

    inside: float
    across: float
    hop: float = 10e-6
    start: float = INSIDE
    direct: float | None = None
    """Rate across machines of all-to-alls; None: that of other collectives."""
    sums: float | None = None
    """Rate across machines of all-reduces; None: that of other collectives."""
    together: float = 1.0
    """The share of an adapter's rate that remains while several collectives use it."""
    beside: float = 1.0
    """The share of an adapter's rate that remains while its GPU computes."""
    products: float = SLOWED
    """The share of the products' rate that remains while NCCL runs a collective of FSDP."""

    def rate(self, kind: str) -> float:
        """Return the rate across machines of one kind of collective."""
        return getattr(self, _WAYS.get(kind, "across")) or self.across


class Group(NamedTuple):
    """The ranks of a collective."""

    ranks: tuple[int, ...]
    machines: int

    @property
    def local(self) -> int:
        """Return the number of its ranks on one machine."""
        return len(self.ranks) // self.machines

    def hop(self, rank: int, way: str) -> tuple[int, ...]:
        """Return the ranks of a hop of ``rank``, by ``way``.

        They are those ``inside`` its machine, those with its place on each machine (``across``),
        or all.
        """
        at = self.ranks.index(rank)
        first = at - at % self.local
        if way == "across":
            return self.ranks[at - first :: self.local]
        return self.ranks[first : first + self.local] if way == "inside" else self.ranks


class Mesh:
    """The groups of ranks that communicate, and their machines."""

    def __init__(self, dims: ParallelDims) -> None:
        self.dims, self.of_machine = dims, dims.per_machine or dims.world_size
        dense = torch.arange(dims.world_size).view([getattr(dims, x) for x in _DENSE_AXES])
        expert = dense.view([getattr(dims, x) for x in _EXPERT_AXES])
        # The order of axes is that of moetrain.parallel.mesh.build_meshes.
        self._along = {
            "dp_replicate": dense.movedim(1, -1),
            "fsdp": dense.movedim(-1, 2).flatten(3),
            "cp": dense.movedim(3, -1),
            "tp": dense,
            "efsdp": expert.transpose(2, 3),
            "ep": expert,
        }

    def group(self, axis: str, rank: int) -> Group:
        rows = self._along[axis].flatten(0, -2)
        ranks = tuple(rows[(rows == rank).any(1)][0].tolist())
        return Group(ranks, len({r // self.of_machine for r in ranks}))

    def members(self, stage_rank: int, *, all_machines: bool) -> list[int]:
        """Return the simulated ranks of a pipeline rank: one on each machine, or a single one."""
        size = self.dims.world_size // self.dims.pp
        ranks = range(stage_rank * size, (stage_rank + 1) * size, self.of_machine)
        return list(ranks) if all_machines else list(ranks)[:1]


# ---- one step ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered together."""

    index: int
    label: str
    sizes: Mapping[str, float]
    region: object
    is_kept_back: bool = False
    """True: it has gradients that have not been reduced."""
    gathers: list[list[Operation]] = field(default_factory=list)
    """Pending gathers, by member."""


class Step:
    """All simulated ranks of a step, and their queued operations."""

    def __init__(
        self,
        works: Sequence[Work],
        schedule: Schedule,
        ranges: Sequence[range],
        mesh: Mesh,
        links: Links,
        slow: Mapping[int, float],
    ) -> None:
        """Queue a whole step.

        Args:
            works: the work of each pipeline rank.
            ranges: the blocks of every stage.
            slow: the factor of the computing time of slow machines, by the machine's number.
        """
        self.schedule, self.ranges, self.mesh, self.links = schedule, ranges, mesh, links
        self.slow, self.flows = slow, dict[tuple[object, int], Operation]()
        self.simulation = Simulation()
        self.teams = [
            Team(self, p, work, mesh.members(p, all_machines=bool(slow)))
            for p, work in enumerate(works)
        ]
        for team, steps in zip(self.teams, schedule.steps(), strict=True):
            team.run(steps)
        for team in self.teams:
            team.finish()
        everyone = [(rank, "compute") for team in self.teams for rank in team.ranks]
        needs = [one for team in self.teams for found in team.after for one in found]
        machines = math.ceil(mesh.dims.world_size / mesh.of_machine)
        latency = (links.start + links.hop * (machines - 1)) * (mesh.dims.world_size > 1)
        self.simulation.queue("norm", "sum of norms", everyone, needs, latency=latency)
        for team in self.teams:
            team.after = [[] for _ in team.ranks]
            team.compute("update", "update", team.work.update)

    def run(self) -> float:
        """Simulate the step; return its seconds."""
        for team in self.teams:
            for rank in team.ranks:
                rates = (("link", self.links.inside), ("adapter", self.links.across))
                for name, rate in rates:
                    for way in ("in", "out"):
                        self.simulation.capacity[rank, name, way] = rate
                        if name == "adapter":
                            self.simulation.together[rank, name, way] = self.links.together
        return self.simulation.run()


class Team:
    """The simulated ranks of one pipeline rank. They do the same, each on its own machine."""

    def __init__(self, step: Step, number: int, work: Work, ranks: Sequence[int]) -> None:
        self.step, self.work, self.ranks = step, work, ranks
        self.simulation, self.number = step.simulation, number
        self.last: list[list[Operation]] = [[] for _ in ranks]
        """The last operation on each member's compute stream."""
        self.after: list[list[Operation]] = [[] for _ in ranks]
        """The operations that each member's next computation waits for."""
        self.reducing: list[list[Operation]] = [[] for _ in ranks]
        self.sent: list[list[list[Operation]]] = []
        self.arriving: dict[tuple[Action, int], list[list[Operation]]] = {}
        self.owners: dict[object, Unit] = {}
        stages = step.schedule.rank_of_stage
        self.embeds, self.ends = (stages[at] == number for at in (0, -1))
        self.units: list[Unit] = []
        if self.embeds:
            self._add("embedding", work.vocabulary)
        self.unit_of = {i: self._add(f"block {i}", work.gathered.get(i, {})) for i in work.blocks}
        if self.ends:
            self._add("head", work.vocabulary)
        self.backwards = sum(action.kind == "B" for action in step.schedule.actions[number])

    def _add(self, label: str, sizes: Mapping[str, float]) -> Unit:
        index = len(self.units)
        turns = label.startswith("block") and index - self.embeds < self.work.turns
        unit = Unit(index, label, sizes, index % 2 if turns else label)
        self.units.append(unit)
        return unit

    # ---- streams -------------------------------------------------------------------------------

    def compute(self, kind: str, label: str, seconds: float) -> None:
        """Queue a computation after the operations that it waits for."""
        for i, rank in enumerate(self.ranks):
            slow = self.step.slow.get(rank // self.step.mesh.of_machine, 1.0)
            uses = {(rank, "products"): slow * seconds}
            stream = [(rank, "compute")]
            slows = {(rank, "adapter", to): self.step.links.beside for to in ("in", "out")}
            how = {"uses": uses, "slows": slows}
            made = self.simulation.queue(kind, label, stream, self.after[i], **how)
            self.last[i], self.after[i] = [made], []

    def collective(
        self, kind: str, label: str, axis: str, size: float, hop: str = ""
    ) -> list[list[Operation]]:
        """Queue a collective over ``axis``, after the computation that was queued last.

        Args:
            size: the bytes that every rank has afterwards; its own part of them is not sent.
            hop: queue only the traffic ``inside`` machines, or ``across`` them; empty: all.

        Returns the operations by member.
        """
        links, found = self.step.links, [[] for _ in self.ranks]
        groups: dict[Group, list[int]] = defaultdict(list)
        for i, group in enumerate(self._groups[axis]):
            groups[group].append(i)
        for group, members in groups.items():
            ranks, machines, local = len(group.ranks), group.machines, group.local
            if (
                machines if hop == "across" else local if hop == "inside" else ranks
            ) == 1 or not size:
                continue
            inside, across = size * (1 - 1 / ranks) * (local > 1), size * (1 - 1 / machines)
            across *= links.across / links.rate(kind)
            if hop:  # inside a machine, the data from all machines is passed on
                inside = size * (1 - 1 / local)
            elif _WAYS.get(kind) == "direct":
                inside = size * (local - 1) / ranks
            else:  # a ring sends everything to a machine once, through all its adapters
                across /= local
            inside, across = inside * (hop != "across"), across * (hop != "inside")
            latency = links.start + (across > 0) * links.hop * (machines - 1)
            # Within a machine, FSDP by copy engines and dispatch by DeepEP do not use NCCL.
            copies = {"gather": self.work.by_copies, "reduce": self.work.by_copies}
            is_nccl = machines > 1 or not copies.get(kind, kind == "dispatch")
            names, slows = [kind] * len(members), {}
            if is_nccl:
                names = [self._communicator(i, group.hop(self.ranks[i], hop)) for i in members]
            if kind in copies and is_nccl:
                slows = {(self.ranks[i], "products"): links.products for i in members}
            uses = {
                (self.ranks[i], name, way): x
                for i in members
                for name, x in (("link", inside), ("adapter", across))
                for way in ("in", "out")
            }
            needs = [one for i in members for one in (*self.last[i], *self.after[i])]
            streams = [(self.ranks[i], name) for i, name in zip(members, names, strict=True)]
            how = {"uses": uses, "latency": latency, "slows": slows}
            made = self.simulation.queue(kind, label, streams, needs, **how)
            for i in members:
                found[i].append(made)
        return found

    def _communicator(self, member: int, ranks: tuple[int, ...]) -> str:
        """Name the communicator of ``ranks`` by all axes with this group."""
        found = [axis for axis, groups in self._groups.items() if groups[member].ranks == ranks]
        return f"collectives over {', '.join(found) or f'a hop of {len(ranks)} ranks'}"

    @cached_property
    def _groups(self) -> dict[str, list[Group]]:
        mesh = self.step.mesh
        return {axis: [mesh.group(axis, rank) for rank in self.ranks] for axis in mesh._along}

    def wait(self, operations: Sequence[Iterable[Operation]]) -> None:
        """Let each member's next computation wait for its ``operations``."""
        for mine, new in zip(self.after, operations, strict=True):
            mine += new

    def exchange(self, part: PartWork, way: int, *, first: bool, label: str) -> None:
        """Queue the exchanges before or after a part's pass. No computation overlaps with them.

        Args:
            way: 0 for the forward, 1 for the backward.
            first: True: the exchanges before the pass; False: those after it.
        """
        for axis, size, passes in part.exchanges:
            times = math.ceil(passes[way] / 2) if first else math.floor(passes[way] / 2)
            for _ in range(int(times)):
                if axis != "ep":
                    self.wait(self.collective(axis, f"{axis} {label}", axis, size))
                    continue
                # A token is sent to each machine once and passed on inside; sums return directly.
                hops = [("across", part.once * size), ("inside", size)] if first else [("", size)]
                for hop, amount in hops:
                    name = f"{'dispatch' if first else 'combine'} {label}"
                    name += f", {hop}" * bool(hop)
                    self.wait(self.collective("dispatch", name, axis, amount, hop))

    # ---- FSDP, as moetrain/parallel/fsdp/fsdp.py orders it --------------------------------------

    def start_unshard(self, unit: Unit, beside: Unit | None = None) -> None:
        owner = self.owners.get(unit.region)
        if owner is unit or (beside is not None and unit.region == beside.region):
            return
        self.owners[unit.region] = unit
        unit.gathers = [[] for _ in self.ranks]
        for axis, size in unit.sizes.items():
            found = self.collective("gather", f"gather {unit.label}", axis, size)
            for mine, new in zip(unit.gathers, found, strict=True):
                mine += new

    def unshard(self, unit: Unit) -> None:
        self.start_unshard(unit)
        self.wait(unit.gathers)

    def reduce(self, unit: Unit) -> None:
        unit.is_kept_back = self.work.reduces_last and self.backwards > 0
        started = self.reduced([] if unit.is_kept_back else [unit])
        self.wait(self.reducing)
        self.reducing = started

    def reduced(self, units: Iterable[Unit]) -> list[list[Operation]]:
        started = [list[Operation]() for _ in self.ranks]
        for unit in units:
            for axis, size in unit.sizes.items():
                trained = self.work.share_trained * size
                found = self.collective("reduce", f"reduce {unit.label}", axis, trained)
                for mine, new in zip(started, found, strict=True):
                    mine += new
        return started

    # ---- the pipeline, as moetrain/parallel/pipeline/executor.py runs it -----------------------

    def run(self, steps: Sequence[Action | list]) -> None:
        for step in steps:
            if isinstance(step, list):
                self.transfer(step)
            elif step.kind == "F":
                self.forward(step)
            else:
                self.backward(step)

    def take(self, made: Action, stage: int) -> None:
        if (made, stage) in self.arriving:
            self.wait(self.arriving.pop((made, stage)))

    def forward(self, action: Action) -> None:
        stage, last = action.stage, len(self.step.ranges) - 1
        self.take(action._replace(stage=stage - 1), stage)
        if stage == 0:
            self.unshard(self.units[0])
        for i in self.step.ranges[stage]:
            unit = self.unit_of[i]
            self.unshard(unit)
            for following in self.units[unit.index + 1 : unit.index + 2]:
                self.start_unshard(following, beside=unit)
            for part in self.work.blocks[i]:
                label = f"{action}, block {i}"
                self.exchange(part, 0, first=True, label=label)
                self.compute("forward", label, part.forward)
                self.exchange(part, 0, first=False, label=label)
        if stage == last:
            self.unshard(self.units[-1])
            self.compute("head", f"{action}, head", self.work.head)

    def backward(self, action: Action) -> None:
        stage = action.stage
        self.take(action._replace(stage=stage + 1), stage)
        self.backwards -= 1
        if stage == len(self.step.ranges) - 1:
            self.reduce(self.units[-1])
        for i in reversed(self.step.ranges[stage]):
            unit = self.unit_of[i]
            if self.work.turns:
                self.unshard(unit)
                if unit.index > 0:
                    self.start_unshard(self.units[unit.index - 1], beside=unit)
            for part in reversed(self.work.blocks[i]):
                label = f"{action}, block {i}"
                self.exchange(part, 1, first=True, label=label)
                self.compute("backward", label, part.backward)
                self.exchange(part, 1, first=False, label=label)
            self.reduce(unit)
        if stage == 0:
            self.compute("backward", f"{action}, embedding", self.work.embedding)
            self.reduce(self.units[0])

    def transfer(self, batch: Sequence) -> None:
        """Queue a batch of messages, after the computation so far and the batch before."""
        previous = self.sent[-1] if self.sent else [[] for _ in self.ranks]
        flows = [
            [self.flow(transfer, i, previous[i]) for transfer in batch]
            for i in range(len(self.ranks))
        ]
        for made, receiver, _, target in batch:
            if target == self.number:
                self.arriving[made, receiver] = flows
        self.sent.append(flows)
        if len(self.sent) > 2 * self.step.schedule.num_ranks:
            self.wait(self.sent.pop(0))

    def flow(self, transfer: tuple, member: int, previous: Sequence[Operation]) -> Operation:
        """Queue one message, which also waits for this end if the other end has queued it."""
        made, _, source, target = transfer
        needs = [*previous, *self.last[member], *self.after[member]]
        if (transfer, member) in self.step.flows:
            found = self.step.flows[transfer, member]
            found.needs += needs
            return found
        a, b = (self.step.teams[team].ranks[member] for team in (source, target))
        of_machine, links = self.step.mesh.of_machine, self.step.links
        is_near = a // of_machine == b // of_machine
        name, latency = "link" if is_near else "adapter", links.start + links.hop * (not is_near)
        uses = {(a, name, "out"): self.work.border, (b, name, "in"): self.work.border}
        # Each direction has one peer, so both ends order its messages alike.
        streams = [(a, f"send {made.kind}"), (b, f"receive {made.kind}")]
        queued = self.simulation.queue(
            "pipeline", f"output of {made}", streams, needs, uses=uses, latency=latency
        )
        self.step.flows[transfer, member] = queued
        return queued

    def finish(self) -> None:
        """Queue the remaining reductions, and the sum of gradients over replicas."""
        self.wait(self.reducing)
        self.wait(self.reduced(unit for unit in self.units if unit.is_kept_back))
        size = self.work.copies
        self.wait(self.collective("replicas", "sum over replicas", "dp_replicate", size))
