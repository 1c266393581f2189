"""Host memory that settings ask for: whether the machine has it, before anything is built.

``optim.offload_fraction``, ``activation.offload`` and ``rl.offload`` move a part of what a device
holds to its host, most of it pinned: it cannot be swapped out, and a process that takes too much is
killed without a word. All processes of a machine take from the same memory, and a stage's may take
more than another's; so ranks tell the main one what they will take and what their machine has.

What a machine has are two numbers. A control group's limit is never exceeded, so it decides where
there is one. Free memory (``MemAvailable``) decides elsewhere; beside a limit it is worth a
warning, since some virtual machines are given memory only as they use it.

Left out on purpose: what a process takes besides, some GiB each. Bytes.
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
from typing import NamedTuple

import torch

from moetrain.config import Config, ConfigError
from moetrain.models.architecture import Architecture
from moetrain.models.planned import compute_dtype
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.processes import planned_machine
from moetrain.parallel.world import World, plan_world
from moetrain.train.memory import GIB, sizes_of_ranks

logger = logging.getLogger("moetrain")

HOSTED_BYTES = 16
"""Of a parameter that is updated on the host: master, gradient and both moments, in fp32."""
NO_LIMIT = 2**60
"""A control group's limit from here on is none: how the first version of them says so."""

Takes = Mapping[str, float]
"""Bytes of one process, by the setting that asks for them."""


class Room(NamedTuple):
    """Memory that processes may still take on this machine."""

    available: float
    """That is free, or would be without caches."""
    allowed: float
    """That the control group's limit leaves; inf: it has none."""

    @property
    def most(self) -> float:
        """What can be had."""
        return self.available if math.isinf(self.allowed) else self.allowed


def host_takes(
    config: Config, arch: Architecture, dims: ParallelDims, dtype: torch.dtype
) -> list[Takes]:
    """What a process of every pipeline rank takes; of settings that ask for something."""
    found = []
    for sizes in sizes_of_ranks(config, arch, dims, dtype):
        hosted = config.optim.offload_fraction * sizes.trained / dims.sharding_ranks
        wanted = {
            "optim.offload_fraction": HOSTED_BYTES * hosted,
            "activation.offload": sizes.host(),
            "rl.offload": config.rl.offload * sizes.local_moments(),
        }
        found.append({name: size for name, size in wanted.items() if size})
    return found


def plan_host(config: Config, arch: Architecture) -> str:
    """What a run would take, in words, beside what this machine has; empty: nothing.

    Raises:
        ConfigError: the degrees do not fit the model or the number of processes.
    """
    machine = planned_machine(config)
    dims = plan_world(config, arch, machine.processes)
    of_stages = host_takes(config, arch, dims, compute_dtype(config, machine.device))
    takes = _sum(one for one in of_stages for _ in range(dims.world_size // dims.pp))
    if not takes:
        return ""
    return (
        f"host memory of {dims.world_size} processes, estimated: {_described(takes)}; "
        f"this machine has {room_here().most / GIB:.1f} GiB"
    )


def check_host(config: Config, arch: Architecture, world: World) -> None:
    """Refuse a run whose processes cannot have what they will take on their machine. Collective.

    Raises:
        ConfigError: it names the setting that takes most, and what there is.
    """
    of_stages = host_takes(config, arch, world.dims, compute_dtype(config, world.device))
    if not any(of_stages):
        return
    mine = of_stages[world.rank // (world.size // world.dims.pp)]
    report = json.dumps([socket.gethostname(), mine, room_here()])
    reports = [report] if world.rendezvous is None else world.rendezvous.gather(report)
    problem = json.loads(
        world.broadcast(json.dumps(_what_is_wrong(config, map(json.loads, reports))))
    )
    if problem is not None:
        raise ConfigError(*problem)


def _what_is_wrong(
    config: Config, reports: Iterable[tuple[str, Takes, Sequence[float]]]
) -> tuple[str, str] | None:
    """A setting and its problem; None: all machines have enough. Warns where it may be too little.

    ``reports``: of each process its machine's name, what it takes, and a :class:`Room`.
    """
    by_host: dict[str, list[tuple[Takes, Room]]] = {}
    for name, takes, room in reports:
        by_host.setdefault(name, []).append((takes, Room(*room)))
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
        logger.warning("%s: %s; %s", setting, problem, free)
    return None


def _sum(takes: Iterable[Takes]) -> Takes:
    """Of several processes."""
    total: Counter[str] = Counter()
    for one in takes:
        total.update(one)  # pyright: ignore[reportArgumentType] - it adds whatever adds up
    return dict(total)


def _described(takes: Takes) -> str:
    """``14.0 GiB: optim.offload_fraction 12.0, activation.offload 2.0``."""
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in takes.items())
    return f"{sum(takes.values()) / GIB:.1f} GiB: {parts}"


# ---- what the machine has ------------------------------------------------------------------------


def room_here(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Room:
    """What Linux says; elsewhere all memory counts as free.

    Args:
        proc, groups: where the kernel shows them.
    """
    available = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if (table := _table(proc / "meminfo")) and "MemAvailable:" in table:
        available = table["MemAvailable:"] * 1024.0
    return Room(available, min(_left(proc / "self" / "cgroup", groups), default=math.inf))


def _left(mine: Path, groups: Path) -> Iterator[float]:
    """What each group that this process is in leaves it: its own, and those around it."""
    for line in mine.read_text().splitlines() if mine.exists() else ():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        names = V1 if kinds else V2
        root = groups / "memory" if kinds else groups
        inner = root / path.lstrip("/")
        # In a container that sees its own group as the root, what is named may not be there.
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(root):
                break
            limit, used = (_number(folder / name) for name in (names.limit, names.used))
            if limit is not None and used is not None and limit < NO_LIMIT:
                stat = _table(folder / "memory.stat")
                caches = sum(stat.get(name, 0) for name in names.caches)
                yield max(0.0, limit - used + caches)


class _Names(NamedTuple):
    """Files of a control group, and the lines of ``memory.stat`` with what it can give back."""

    limit: str
    used: str
    caches: tuple[str, str]


V1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)
V2 = _Names("memory.max", "memory.current", ("active_file", "inactive_file"))


def _number(path: Path) -> int | None:
    """What a file says; None: it is not there, or says that there is no number (``max``)."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    lines = path.read_text().splitlines() if path.exists() else ()
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1}
