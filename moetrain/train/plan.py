"""Memory of devices and hosts: what ``--dry_run`` says of a run, and what a run is refused for.

:func:`plan_memory` plans for devices that need not be here. Where a run does not fit, settings are
tried in the order of what they cost, each by the same estimate, until one does; only those are
tried that change results by no more than rounding. Left out on purpose: speed, which
:mod:`moetrain.train.speed` estimates.

:func:`check_host` is about host memory. ``optim.offload_fraction``, ``activation.offload`` and
``rl.offload`` move a part of what a device holds to its host, most of it pinned: it cannot be
swapped out, and a process that takes too much is killed without a word. All processes of a machine
share its memory, and one stage may need more than another, so ranks tell the main one what they
will take and what their machine has. A control group's limit is never exceeded, so it decides where
there is one; free memory (``MemAvailable``) decides elsewhere. Beside a limit, too little free
memory is worth a warning alone, since some virtual machines get memory only as they use it. Left
out on purpose: the few GiB that a process takes anyway, and host memory of settings that are tried.

Bytes unless a name says otherwise.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moetrain.config import Config, ConfigError
from moetrain.config.checks import Fact
from moetrain.config.environment import GIB
from moetrain.config.rl import SleepName
from moetrain.models.architecture import Architecture
from moetrain.models.transformer import compute_dtype
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.pipeline.stages import StagePlan
from moetrain.parallel.processes import Machine, planned_machine
from moetrain.parallel.world import World, plan_world
from moetrain.train.memory import (
    MARGIN,
    MemoryEstimate,
    RankSizes,
    least_sleep,
    sizes_of_ranks,
)

_logger = logging.getLogger("moetrain")

_MOST_GPUS = 4096
"""The largest number of GPUs that is tried."""
_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Values of ``optim.offload_fraction`` that are tried."""
_NO_LIMIT = 2**60
"""A control group's limit from here on is none: the first version of them says so that way."""

_Change = Mapping[str, Any]
"""Settings with other values, by dotted name."""
_Takes = Mapping[str, float]
"""Bytes of one process, by the setting that asks for them."""


def check_effects(config: Config, device: torch.device) -> None:
    """Reject a setting that a user gave and that has no effect on ``device``, which need not exist.

    Raises:
        ConfigError: it names the setting and the value.
    """
    config.fitting({Fact.CUDA: None if device.type == "cuda" else "this run is on a CPU"})


# ---- device memory: the dry run ------------------------------------------------------------------


class MemoryPlan(NamedTuple):
    """A run, and the machine it is planned for."""

    config: Config
    arch: Architecture
    machine: Machine
    generates: bool
    """Whether the run generates beside training (reinforcement learning)."""

    @classmethod
    def of(cls, config: Config, arch: Architecture, *, generates: bool) -> MemoryPlan:
        """Plan ``config`` as it is.

        Raises:
            ConfigError: a setting has no effect on such a machine.
        """
        machine = planned_machine(config)
        check_effects(config, machine.device)
        if config.train.device != machine.device.type:
            # The estimate counts what ranks on GPUs need of one another.
            config = config.filled({"train.device": machine.device.type}, "the plan")
        return cls(config, arch, machine, generates)

    @property
    def _sizes(self) -> tuple[Config, Architecture, ParallelDims, torch.dtype]:
        dims = plan_world(self.config, self.arch, self.machine.processes)
        return self.config, self.arch, dims, compute_dtype(self.config, self.machine.device)

    def sizes(self) -> list[RankSizes]:
        """Size each pipeline rank; raises ConfigError where the layout does not fit."""
        return sizes_of_ranks(*self._sizes)

    def ranks(self) -> list[MemoryEstimate]:
        """Estimate each pipeline rank; raises ConfigError where the layout does not fit."""
        sleep: SleepName | None = None
        if self.generates:
            sleep = least_sleep(*self._sizes, self.machine.capacity)
        return [rank.peak(sleep) for rank in self.sizes()]

    def peak(self) -> MemoryEstimate:
        """Return the estimate of the device that takes most."""
        return max(self.ranks(), key=lambda estimate: estimate.total)

    def changed(self, change: _Change) -> MemoryPlan | None:
        """Return the plan with ``change``; None if such settings contradict each other."""
        try:
            config = self.config.filled(change, "the plan")
            config.check()
            plan = self.of(config.fitting(), self.arch, generates=self.generates)
            plan_world(plan.config, plan.arch, plan.machine.processes)
        except ConfigError:
            return None
        return plan

    def first_that_fits(self, changes: Iterable[_Change]) -> str | None:
        """Return the first of ``changes`` with which all surely fits, in words, or None."""
        for change in changes:
            plan = self.changed(change)
            if plan and (peak := plan.peak()).surely_fits(plan.machine.capacity):
                words = " ".join(f"--{name} {_shown(value)}" for name, value in change.items())
                return f"{words} ({peak.total / GIB:.1f} GiB)"
        return None


def plan_memory(config: Config, arch: Architecture, *, generates: bool = False) -> str:
    """Describe the machine, the estimate and whether it fits; needs no device.

    Raises:
        ConfigError: the degrees do not fit the model or the number of processes, a setting has no
            effect on such a machine, or a run that generates does not fit into it.
    """
    plan = MemoryPlan.of(config, arch, generates=generates)
    ranks, machine = plan.ranks(), plan.machine
    found = max(ranks, key=lambda estimate: estimate.total)
    if generates:  # its cache is as large as rl.cache_tokens says: no other setting helps
        found.check(config, machine.capacity)
    lines = [f"memory on {machine.describe()}, estimated: {found.describe()}"]
    dims = plan_world(plan.config, arch, machine.processes)
    if dims.pp > 1:
        by_rank = " ".join(f"{estimate.total / GIB:.1f}" for estimate in ranks)
        lines.append(f"{StagePlan(plan.config, arch).describe(dims)}, GiB {by_rank}")
    return "\n".join([*lines, _verdict(plan, found)])


def _verdict(plan: MemoryPlan, peak: MemoryEstimate) -> str:
    """Say whether ``peak`` fits, to the estimate's error, and else which settings would."""
    machine = plan.machine
    sizes = f"{peak.total / GIB:.1f} of {machine.capacity / GIB:.1f} GiB"
    if peak.surely_fits(machine.capacity):
        return f"fits: {sizes}"
    may = "may not" if peak.may_fit(machine.capacity) else "does not"
    verdict = f"{may} fit: {sizes}, give or take {MARGIN:.0%}"
    ways = [plan.first_that_fits(_changes(plan))]
    if machine.device.type == "cuda":
        ways.append(plan.first_that_fits(_more_gpus(plan)))
    nearest = ", or ".join(filter(None, ways))
    return f"{verdict}; {f'nearest that fits: {nearest}' if nearest else 'nothing tried would'}"


def _changes(plan: MemoryPlan) -> Iterator[_Change]:
    """Changes on the same devices, the cheapest first: single settings, then several together."""
    config, on_gpus = plan.config, plan.machine.device.type == "cuda"
    offload: list[_Change] = [{"activation.offload": "auto"}]
    if not on_gpus or config.activation.offload:
        offload = []
    reshard: list[_Change] = [{"parallel.reshard_after_forward": True}]
    if plan.machine.processes == 1 or config.parallel.reshard_after_forward is True:
        reshard = []
    batches, recompute = _smaller_batches(config), _more_recomputation(config)
    yield from (*offload, *reshard, *batches, *recompute)
    yield from ({**first, **then} for first in reshard for then in (*batches, *recompute))
    least = _least(reshard, batches, recompute)
    yield least
    for share in _SHARES if on_gpus else ():
        if share > config.optim.offload_fraction:
            yield {**least, "optim.offload_fraction": share}


def _smaller_batches(config: Config) -> list[_Change]:
    rows = config.train.micro_batch_size
    return [{"train.micro_batch_size": n} for n in range(rows - 1, 0, -1) if rows % n == 0]


def _more_recomputation(config: Config) -> list[_Change]:
    policies = ("none", "selective", "full")
    more = policies[policies.index(config.activation.policy) + 1 :]
    return [{"activation.policy": policy} for policy in more]


def _least(*ways: list[_Change]) -> _Change:
    """Combine the last change of each of ``ways``."""
    return {name: value for way in ways for name, value in (way[-1] if way else {}).items()}


def _more_gpus(plan: MemoryPlan) -> Iterator[_Change]:
    """Twice as many GPUs, and so on: with settings as they are, then with the least memory."""
    config, p = plan.config, plan.config.parallel
    for base in ({}, _least(_smaller_batches(config), _more_recomputation(config))):
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


def _shown(value: Any) -> str:
    return "yes" if value is True else str(value)


# ---- host memory: what settings ask for ----------------------------------------------------------


class _Room(NamedTuple):
    """Host memory that processes may still take on this machine."""

    available: float
    """Memory that is free, or would be without caches."""
    allowed: float
    """Memory that the control group's limit leaves; inf: there is no limit."""

    @property
    def most(self) -> float:
        """Memory that can be had: the limit's rest, else what is free."""
        return self.available if math.isinf(self.allowed) else self.allowed


def plan_host(config: Config, arch: Architecture) -> str:
    """Describe what a run would take of host memory and what this machine has; empty: nothing.

    Raises:
        ConfigError: the degrees do not fit the model or the number of processes.
    """
    machine = planned_machine(config)
    dims = plan_world(config, arch, machine.processes)
    ranks = sizes_of_ranks(config, arch, dims, compute_dtype(config, machine.device))
    takes = _sum([rank.on_host() for rank in ranks] * (dims.world_size // dims.pp))
    if not takes:
        return ""
    return (
        f"host memory of {dims.world_size} processes, estimated: {_described(takes)}; "
        f"this machine has {_room_here().most / GIB:.1f} GiB"
    )


def check_host(config: Config, arch: Architecture, world: World) -> None:
    """Refuse a run that takes more host memory than one of its machines has. Collective.

    Raises:
        ConfigError: it names the setting that takes most, and how much memory there is.
    """
    ranks = sizes_of_ranks(config, arch, world.dims, compute_dtype(config, world.device))
    of_stages = [rank.on_host() for rank in ranks]
    if not any(of_stages):
        return
    mine = of_stages[world.rank // (world.size // world.dims.pp)]
    report = json.dumps([socket.gethostname(), mine, _room_here()])
    reports = [report] if world.rendezvous is None else world.rendezvous.gather(report)
    problem = json.loads(
        world.broadcast(json.dumps(_what_is_wrong(config, map(json.loads, reports))))
    )
    if problem is not None:
        raise ConfigError(*problem)


def _what_is_wrong(
    config: Config, reports: Iterable[tuple[str, _Takes, Sequence[float]]]
) -> tuple[str, str] | None:
    """Return a setting and its problem, or None if all machines have enough; may warn.

    Args:
        reports: for each process its machine's name, what it takes, and a :class:`_Room`.
    """
    by_host: dict[str, list[tuple[_Takes, _Room]]] = {}
    for name, takes, room in reports:
        by_host.setdefault(name, []).append((takes, _Room(*room)))
    for name, found in by_host.items():
        takes, room = _sum(takes for takes, _ in found), found[0][1]
        setting = max(takes, key=lambda key: takes[key], default="")
        need = sum(takes.values())
        if need <= min(room):
            continue
        section, _, key = setting.partition(".")
        problem = (
            f"{getattr(getattr(config, section), key)!r} takes more host memory than {name} has "
            f"free: {_described(takes)}, in {len(found)} process{'es' * (len(found) > 1)}"
        )
        if need > room.most:
            why = "free" if math.isinf(room.allowed) else "left of its control group's limit"
            remedy = "ask for less of it, or use more machines or larger ones"
            return setting, f"{problem}; it has {room.most / GIB:.1f} GiB {why}; {remedy}"
        free = f"it has {room.available / GIB:.1f} GiB free, though its control group may use more"
        _logger.warning("%s: %s; %s", setting, problem, free)
    return None


def _sum(takes: Iterable[_Takes]) -> _Takes:
    """Add up what several processes take."""
    total: Counter[str] = Counter()
    for one in takes:
        total.update(one)  # pyright: ignore[reportArgumentType] - it adds whatever adds up
    return dict(total)


def _described(takes: _Takes) -> str:
    """Write ``14.0 GiB: optim.offload_fraction 12.0, activation.offload 2.0``."""
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in takes.items())
    return f"{sum(takes.values()) / GIB:.1f} GiB: {parts}"


# ---- host memory: what the machine has -----------------------------------------------------------


def _room_here(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> _Room:
    """Return the memory left on this machine by Linux's account; elsewhere all counts as free.

    Args:
        proc, groups: folders in which the kernel shows processes and control groups.
    """
    available = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if (table := _table(proc / "meminfo")) and "MemAvailable:" in table:
        available = table["MemAvailable:"] * 1024.0
    return _Room(available, min(_left(proc / "self" / "cgroup", groups), default=math.inf))


def _left(mine: Path, groups: Path) -> Iterator[float]:
    """What each control group of this process leaves it: its own, and those around it."""
    for line in mine.read_text().splitlines() if mine.exists() else ():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        names = _V1 if kinds else _V2
        root = groups / "memory" if kinds else groups
        inner = root / path.lstrip("/")
        # In a container that sees its own group as the root, what is named may not be there.
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(root):
                break
            limit, used = (_number(folder / name) for name in (names.limit, names.used))
            if limit is not None and used is not None and limit < _NO_LIMIT:
                stat = _table(folder / "memory.stat")
                caches = sum(stat.get(name, 0) for name in names.caches)
                yield max(0.0, limit - used + caches)


class _Names(NamedTuple):
    """Names of a control group's files, and the lines of ``memory.stat`` that count caches."""

    limit: str
    used: str
    caches: tuple[str, str]


_V1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)
_V2 = _Names("memory.max", "memory.current", ("active_file", "inactive_file"))


def _number(path: Path) -> int | None:
    """Read a number; None: there is no such file, or it says ``max``."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None


def _table(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    lines = path.read_text().splitlines() if path.exists() else ()
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1}
