"""How many processes a run has on this machine. Imports torch alone: a launcher begins with it."""

from __future__ import annotations

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
