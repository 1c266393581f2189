"""This machine, and how many processes a run has on it. Imports torch alone: a launcher begins with
it."""

from __future__ import annotations

import socket
from pathlib import Path

import torch

from moetrain.config import Config, ConfigError


def num_processes(config: Config) -> int:
    """How many processes ``launch.nproc`` means on this machine.

    Raises:
        ConfigError: more than there are GPUs, where GPUs are used.
    """
    nproc, gpus = config.launch.nproc, torch.cuda.device_count()
    on_cpu = config.train.device == "cpu" or (config.train.device == "auto" and gpus == 0)
    if nproc == "auto":
        return 1 if on_cpu else max(1, gpus)
    if not on_cpu and nproc > max(1, gpus):
        raise ConfigError("launch.nproc", f"{nproc} processes, and this machine has {gpus} GPUs")
    return nproc


def machine() -> str:
    """This machine's host name and the start of its kernel: machines made from one image may share
    the name, but not the start."""
    start = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {start.read_text().strip() if start.exists() else ''}"
