"""Find how many processes a run has, and their devices: on this machine, or as planned.

Imports torch alone: a launcher begins with it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

import torch

from moetrain.config import Config, ConfigError
from moetrain.config.environment import GIB, GPUS, launched_place

_MOST_ON_CORE = 16
"""The most processes a core: enough to try a large layout on a small machine."""


def num_processes(config: Config) -> int:
    """Give the number of processes that ``launch.nproc`` means on this machine.

    Raises:
        ConfigError: more than there are GPUs, where GPUs are used; else far more than cores.
    """
    nproc, gpus = config.launch.nproc, torch.cuda.device_count()
    on_cpu = config.train.device == "cpu" or (config.train.device == "auto" and gpus == 0)
    if nproc == "auto":
        return 1 if on_cpu else max(1, gpus)
    if not on_cpu and nproc > max(1, gpus):
        problem = f"{nproc} processes, and this machine has {gpus} GPUs"
        raise ConfigError("launch.nproc", f"{problem}; use auto, which is one for each")
    cores = os.cpu_count() or 1
    if on_cpu and nproc > _MOST_ON_CORE * cores:
        problem = f"{nproc} processes, and this machine has {cores} cores and no GPU to use"
        raise ConfigError(
            "launch.nproc",
            f"{problem}; use {cores} or fewer (up to {_MOST_ON_CORE} a core are started)",
        )
    return nproc


def machine() -> str:
    """Identify this machine by its host name and its boot: machines made from one image may share
    the name, but not the boot."""
    start = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {start.read_text().strip() if start.exists() else ''}"


def device_capacity(device: torch.device) -> float:
    """Give the bytes of memory of ``device``; a CPU's is the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class Machine(NamedTuple):
    """The devices that a run has or is planned for, one a process."""

    name: str
    """The device's name, for people."""
    device: torch.device
    """The device's type."""
    processes: int
    """The run's processes."""
    capacity: float
    """Bytes for a process; processes on CPUs share their machine's memory."""
    why: str
    """The reason for these, for people."""

    def describe(self) -> str:
        """Describe them in words: ``8 x H100 of 79.1 GiB (launch.gpus)``."""
        return f"{self.processes} x {self.name} of {self.capacity / GIB:.1f} GiB ({self.why})"


def planned_machine(config: Config) -> Machine:
    """Find the devices that ``config`` is for.

    These are ``launch.gpus`` and ``launch.gpu`` where they are set, else this run's processes as a
    launcher started them or ``launch.nproc`` says, else as many as the degrees of parallelism
    multiply to.

    Raises:
        ConfigError: ``launch.nproc`` is not ``launch.gpus``, or more than there are GPUs here.
    """
    launch, p, place = config.launch, config.parallel, launched_place()
    gpus, is_asked = torch.cuda.device_count(), (launch.gpus or launch.gpu) is not None
    on_cpu = config.train.device == "cpu" or not (gpus or is_asked or config.train.device == "cuda")
    named = max(p.dp_replicate * max(p.dp_shard, 1) * p.tp * p.pp * p.cp, p.ep)
    if launch.gpus is not None:
        size, why = launch.gpus, "launch.gpus"
        if launch.nproc not in ("auto", 1, size):
            raise ConfigError("launch.nproc", f"{launch.nproc} contradicts launch.gpus {size}")
    elif place is not None:
        size, why = place.world_size, "those that the launcher started"
    else:
        here = num_processes(config) if gpus or on_cpu or launch.nproc == "auto" else launch.nproc
        size = max(here, named)
        why = "launch.nproc" if size == here else "as many as parallel's degrees multiply to"
    if on_cpu:
        on_machine = size if place is None else place.on_machine or size
        if not gpus:
            why += "; no GPU is here: launch.gpus and launch.gpu plan for some"
        cpu = torch.device("cpu")
        return Machine("CPU", cpu, size, device_capacity(cpu) / on_machine, why)
    cuda = torch.device("cuda")
    if launch.gpu is None and gpus:
        name = torch.cuda.get_device_name(cuda)
        return Machine(name, cuda, size, device_capacity(cuda), why)
    kind = launch.gpu or "h100"
    why += ", launch.gpu" if launch.gpu else "; no GPU is here: launch.gpu names another kind"
    return Machine(kind.upper(), cuda, size, GPUS[kind].memory_gib * GIB, why)
