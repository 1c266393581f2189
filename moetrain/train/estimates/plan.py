"""Memory of devices and hosts: the report of ``--dry_run``, and the refusal of runs that do not
fit.

:func:`plan_memory` plans a run for devices that this machine need not have. If the run does not
fit, it tries other settings with the same estimate, the cheapest first, until one fits. It tries
only settings that change results by no more than rounding. Left out on purpose: speed, which
:mod:`moetrain.train.estimates.speed` estimates.

:func:`check_host` checks host memory, most of it pinned, because Linux kills a process that takes
too much, without a message. The processes of a machine share its memory, so ranks exchange their
needs. If the processes are in a control group (cgroup v2) with a limit, a run that exceeds the
limit is refused. A run that stays below the limit but exceeds the free memory gets only a warning,
because some virtual machines receive memory only as they use it. Without a limit, the free memory
decides. Left out on purpose: the few GiB that every process takes, and the host memory of the
settings that :func:`plan_memory` tries.

Sizes are in bytes unless a name says otherwise.
"""

import math
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Self

from moetrain.config import Config, ConfigError, Fact, logger
from moetrain.config.environment import GIB, GPUS, NETWORK_RATE
from moetrain.models.architecture import Architecture
from moetrain.models.transformer import compute_dtype
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.pipeline.stages import StagePlan
from moetrain.parallel.processes import Machine, planned_machine
from moetrain.parallel.world import World, plan_world
from moetrain.train.checks import check_rows
from moetrain.train.estimates.memory import (
    AUTO_MARGIN,
    MemoryEstimate,
    RankSizes,
    Recomputation,
)

_MOST_GPUS = 4096
"""The largest number of GPUs that is tried."""
_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Values of ``optim.offload_fraction`` that are tried."""

_Change = Mapping[str, Any]
"""Settings with other values, by dotted name."""
_Takes = Counter[str]
"""Bytes of one process, by the setting that asks for them."""


class MemoryPlan(NamedTuple):
    """A run, and the machine it is planned for."""

    config: Config
    arch: Architecture
    machine: Machine
    generates: bool
    """True: the run generates beside training (reinforcement learning)."""

    @classmethod
    def of(cls, config: Config, arch: Architecture, *, generates: bool) -> Self:
        """Plan ``config`` as it is.

        Raises ConfigError: a setting has no effect on the planned machine, or kernels there cannot
        compute with the model's widths.
        """
        machine = planned_machine(config)
        kind = machine.device.type
        config = config.fitted({Fact.CUDA: None if kind == "cuda" else "this run is on a CPU"})
        check_rows(config, arch, machine.device)
        # The estimate counts what ranks on GPUs need of one another.
        return cls(config.filled({"train.device": kind}, "the plan"), arch, machine, generates)

    @property
    def recomputation(self) -> Recomputation | None:
        """The recomputation that ``activation.policy auto`` chooses; None: the policy differs."""
        config, arch, machine, generates = self
        if config.activation.policy != "auto":
            return None
        return RankSizes.least_recomputation(
            config,
            arch,
            plan_world(config, arch, machine.processes),
            compute_dtype(config, machine.device),
            machine.capacity,
            config.rl.sleep if generates else None,
        )

    def sizes(self) -> list[RankSizes]:
        """Size each pipeline rank; raises ConfigError where the layout does not fit."""
        config, arch, machine, _ = self
        dims = plan_world(config, arch, machine.processes)
        if (chosen := self.recomputation) is not None:
            config = chosen.of(config)
        return RankSizes.of_ranks(config, arch, dims, compute_dtype(config, machine.device))

    def surely_fits(self, peak: MemoryEstimate) -> bool:
        """Return True if ``peak`` fits even with the error of the estimate."""
        margin = AUTO_MARGIN if self.config.activation.policy == "auto" else peak.MARGIN
        return peak.surely_fits(self.machine.capacity, margin)

    def ranks(self) -> list[MemoryEstimate]:
        """Estimate each pipeline rank; raises ConfigError where the layout does not fit."""
        ranks, capacity = self.sizes(), self.machine.capacity
        sleep = RankSizes.least_sleep(ranks, capacity) if self.generates else None
        return [rank.peak(sleep) for rank in ranks]

    def changed(self, change: _Change) -> Self | None:
        """Return the plan with ``change``; None if such settings contradict each other."""
        try:
            config = self.config.filled(change, "the plan")
            config.check()
            plan = self.of(config.fitted(), self.arch, generates=self.generates)
            plan_world(plan.config, plan.arch, plan.machine.processes)
        except ConfigError:
            return None
        return plan

    def first_that_fits(self, changes: Iterable[_Change], most: float = math.inf) -> str | None:
        """Return the first of ``changes`` with which every rank surely fits, in words, or None.

        ``most``: the largest estimate to accept, in bytes.
        """
        for change in changes:
            plan = self.changed(change)
            if plan is None or (peak := _largest(plan.ranks())).total > most:
                continue
            if plan.surely_fits(peak):
                shown = {name: "yes" if x is True else x for name, x in change.items()}
                words = " ".join(f"--{name} {value}" for name, value in shown.items())
                return f"{words} ({peak.total / GIB:.1f} GiB)"
        return None


def _largest(ranks: Iterable[MemoryEstimate]) -> MemoryEstimate:
    return max(ranks, key=lambda estimate: estimate.total)


def plan_memory(config: Config, arch: Architecture, *, generates: bool = False) -> str:
    """Describe the machine, the estimate, whether the run fits, and its host memory.

    No device is needed.

    Raises ConfigError: the degrees do not fit the model or the number of processes, a setting has
    no effect on the planned machine, or a run that generates does not fit into its memory.
    """
    plan = MemoryPlan.of(config, arch, generates=generates)
    ranks, machine = plan.ranks(), plan.machine
    peak, capacity = _largest(ranks), machine.capacity
    if generates:  # rl.cache_tokens alone sets the size of the cache: no other setting helps
        peak.check(config, capacity)
    lines = [f"memory on {machine.describe()}, estimated: {peak.describe()}"]
    if (chosen := plan.recomputation) is not None:
        lines.append(f"activation.policy auto: {chosen.describe()}")
    dims = plan_world(plan.config, arch, machine.processes)
    if dims.machines(dims.world_size) > 1:
        lines.append(_describe_machines(dims, machine))
    if dims.pp > 1:
        by_rank = " ".join(f"{estimate.total / GIB:.1f}" for estimate in ranks)
        lines.append(f"{StagePlan(plan.config, arch).describe(dims)}, GiB {by_rank}")
    if dims.cp > 1:
        lines.append(_exchange(plan.config, dims, plan.sizes()[0]))
    sizes = f"{peak.total / GIB:.1f} of {capacity / GIB:.1f} GiB"
    verdict = f"fits: {sizes}"
    if not plan.surely_fits(peak):
        may = "may not" if peak.may_fit(capacity) else "does not"
        ways = [plan.first_that_fits(_changes(plan))]
        if machine.device.type == "cuda":
            ways.append(plan.first_that_fits(_more_gpus(plan)))
        nearest = ", or ".join(filter(None, ways))
        remedy = f"nearest that fits: {nearest}" if nearest else "nothing that was tried fits"
        verdict = f"{may} fit: {sizes}, give or take {peak.MARGIN:.0%}; {remedy}"
    lines.append(verdict)
    of_ranks = [rank.on_host() for rank in plan.sizes()] * (dims.world_size // dims.pp)
    takes = sum(of_ranks, Counter())
    if takes:
        lines.append(
            f"host memory of {dims.world_size} processes, estimated: {_described(takes)}; "
            f"this machine has {room_here().most / GIB:.1f} GiB"
        )
    return "\n".join(lines)


def propose_less(config: Config, arch: Architecture, *, generates: bool = False) -> str:
    """Give the estimate of a run that ran out of memory, and name settings that take less.

    The estimate of the run was too low. So the estimate of the proposed settings must be a tenth
    below both that estimate and the memory of the device.
    """
    plan = MemoryPlan.of(config, arch, generates=generates)
    peak = _largest(plan.ranks())
    most = (1 - peak.MARGIN) * min(peak.total, plan.machine.capacity)
    changes = [*_changes(plan)]
    if config.activation.policy == "auto":
        changes += [{"activation.policy": policy} for policy in ("selective", "full")]
    found = plan.first_that_fits(changes, most) or plan.first_that_fits(_more_gpus(plan), most)
    advice = f"this should fit: {found}" if found else "use more devices or a smaller model"
    return f"the estimate was {peak.describe()}; {advice}"


def _describe_machines(dims: ParallelDims, machine: Machine) -> str:
    """Describe which groups stay inside a machine, which span several, and the assumed speed of
    the links."""
    spans = {"tp": dims.tp, "cp": dims.token_ranks, "ep": dims.ep}
    spans |= {"dp_shard": dims.sharding_ranks, "pp": dims.world_size}
    spans["dp_replicate"] = dims.world_size // dims.pp
    on = {name: dims.machines(n) for name, n in spans.items() if getattr(dims, name) > 1}
    inside = ", ".join(name for name in on if on[name] == 1) or "nothing"
    across = ", ".join(f"{name} over {on[name]}" for name in on if on[name] > 1)
    rates = [gpu.link_rate for name, gpu in GPUS.items() if name in machine.name.lower()]
    links = [f"{rate / 1e9:.0f} GB/s" for rate in (*rates, NETWORK_RATE)]
    whole = f"{dims.machines(dims.world_size)} machines of {dims.per_machine}"
    links = f"{' inside and '.join(links)} across are assumed for each"
    return f"{whole}: inside {inside}; across {across}; {links}"


def _exchange(config: Config, dims: ParallelDims, rank: RankSizes) -> str:
    """Name the method of context parallelism, its reason, and the bytes that each method sends."""
    method, sizes = dims.cp_method, rank.received()
    why = "asked for"
    if config.parallel.cp_method == "auto":
        can = "can" if method == "ulysses" else "cannot"
        why = f"{dims.token_ranks} ranks {can} share the heads"
    shown = ", ".join(f"{name} {size / GIB:.3f} GiB" for name, size in sizes.items())
    return f"parallel.cp_method {method} ({why}); a rank receives in a forward: {shown}"


def _changes(plan: MemoryPlan) -> Iterator[_Change]:
    """Yield changes for the same devices, the cheapest first: one setting, then several at once."""
    config, on_gpus = plan.config, plan.machine.device.type == "cuda"
    reshard: list[_Change] = [{"parallel.reshard_after_forward": True}]
    if plan.machine.processes == 1 or config.parallel.reshard_after_forward is True:
        reshard = []
    smaller = _smaller(config)
    yield from (*reshard, *smaller)
    yield from ({**first, **then} for first in reshard for then in smaller)
    least = _together([*reshard, *smaller])
    yield least
    for share in _SHARES if on_gpus else ():
        if share > config.optim.offload_fraction:
            yield {**least, "optim.offload_fraction": share}


def _smaller(config: Config) -> list[_Change]:
    rows, policies = config.train.micro_batch_size, ("none", "selective", "full")
    batches = [n for n in range(rows - 1, 0, -1) if rows % n == 0]
    policy = config.activation.policy
    more = () if policy == "auto" else policies[policies.index(policy) + 1 :]
    return [
        *({"train.micro_batch_size": n} for n in batches),
        *({"activation.policy": policy} for policy in more),
    ]


def _together(changes: Iterable[_Change]) -> _Change:
    """Merge ``changes``; if several change the same setting, the last one counts."""
    return {name: value for change in changes for name, value in change.items()}


def _more_gpus(plan: MemoryPlan) -> Iterator[_Change]:
    """Yield changes to 2, 4, ... times the GPUs: first with the settings as they are, then with
    those that take the least memory."""
    config, p = plan.config, plan.config.parallel
    for base in ({}, _together(_smaller(config))):
        size = 2 * plan.machine.processes
        while size <= _MOST_GPUS:
            change = {**base, "launch.gpus": size}
            if config.launch.nproc not in ("auto", 1):
                change["launch.nproc"] = "auto"
            if p.dp_shard > 0:
                change["parallel.dp_shard"] = p.dp_shard * size // plan.machine.processes
            rows = change.get("train.micro_batch_size", config.train.micro_batch_size)
            rows *= size // (p.tp * p.pp * p.cp)
            if rows and config.train.global_batch_size % rows:
                whole = rows * math.ceil(config.train.global_batch_size / rows)
                change["train.global_batch_size"] = whole
            yield change
            size *= 2


# ---- host memory ---------------------------------------------------------------------------------


class Room(NamedTuple):
    """Host memory that processes may still take on this machine."""

    available: float
    """Memory that is free or holds only caches, which Linux drops when memory is needed."""
    allowed: float
    """Memory that the control group may still take below its limit; inf: there is no limit."""

    @property
    def most(self) -> float:
        return self.available if math.isinf(self.allowed) else self.allowed


def check_host(ranks: Sequence[RankSizes], world: World) -> None:
    """Refuse a run that takes more host memory than one of its machines has. Collective.

    ``ranks``: the sizes of every pipeline rank.

    Raises ConfigError: a machine has too little memory. The error names the setting that takes
    most.
    """
    of_stages = [rank.on_host() for rank in ranks]
    if not any(of_stages):
        return
    mine = of_stages[world.rank // (world.size // world.dims.pp)]
    by_host: dict[str, list[tuple[_Takes, Room]]] = {}
    for name, takes, room in world.gather((socket.gethostname(), mine, room_here())):
        by_host.setdefault(name, []).append((takes, room))
    for name, found in by_host.items():
        takes, room = sum((takes for takes, _ in found), Counter()), found[0][1]
        setting = max(takes, key=lambda key: takes[key], default="")
        need = sum(takes.values())
        if need <= min(room):
            continue
        problem = (
            f"{attrgetter(setting)(ranks[0].config)!r} takes more host memory than {name} has "
            f"free: {_described(takes)}, in {len(found)} process{'es' * (len(found) > 1)}"
        )
        if need > room.most:
            why = "free" if math.isinf(room.allowed) else "left of its control group's limit"
            remedy = "ask for less of it, or use more machines or larger ones"
            problem = f"{problem}; it has {room.most / GIB:.1f} GiB {why}; {remedy}"
            raise ConfigError(setting, problem)
        if world.is_main:
            free = f"{room.available / GIB:.1f} GiB free, though its control group may use more"
            logger.warning("%s: %s; it has %s", setting, problem, free)


def _described(takes: _Takes) -> str:
    """Write ``14.0 GiB: optim.offload_fraction 12.0, rl.offload 2.0``."""
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in takes.items())
    return f"{sum(takes.values()) / GIB:.1f} GiB: {parts}"


def room_here(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Room:
    """Return the memory that is left, from the files of Linux in ``proc`` and ``groups``.

    Without these files it is all memory of the machine.
    """
    available = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if (table := _table(proc / "meminfo")) and "MemAvailable:" in table:
        available = table["MemAvailable:"] * 1024.0
    return Room(available, min(_left(proc / "self" / "cgroup", groups), default=math.inf))


def _left(mine: Path, root: Path) -> Iterator[float]:
    """Yield the memory that each control group of this process may still take: that of its own
    group, and that of every group around it."""
    for line in mine.read_text().splitlines() if mine.exists() else ():
        if not line.startswith("0::"):  # a line of cgroup v1
            continue
        inner = root / line.removeprefix("0::").lstrip("/")
        # A container may see its own group as the root. The named folder is then not there.
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(root):
                break
            limit, used = (_text(folder / f"memory.{name}") for name in ("max", "current"))
            if limit.isdecimal():
                stat = _table(folder / "memory.stat")
                caches = stat.get("active_file", 0) + stat.get("inactive_file", 0)
                yield max(0.0, float(int(limit) - int(used) + caches))


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _table(path: Path) -> dict[str, int]:
    words = map(str.split, _text(path).splitlines())
    return {name: int(number) for name, number, *_ in words}
