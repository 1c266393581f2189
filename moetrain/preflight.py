"""What a device or a layout cannot run, said in one line before anything is built.

Left out on purpose: what settings alone show (:mod:`moetrain.config`), and whether degrees, model
and batch fit the world (:func:`moetrain.parallel.world.plan_world`).
"""

from __future__ import annotations

import torch

from moetrain.config import Config, ConfigError
from moetrain.kernels import cudnn_attention
from moetrain.kernels.backend import INTERPRETED
from moetrain.models import Architecture
from moetrain.parallel.apply import compute_dtype
from moetrain.parallel.deepep import why_not_here


def check_what_can_run(config: Config, arch: Architecture, device: torch.device) -> None:
    """Reject what this device or this layout cannot run.

    Raises:
        ConfigError: it names the setting, the value and what to use instead.
    """
    if config.kernels.attention == "flex" and device.type == "cpu":
        raise ConfigError("kernels.attention", "'flex' has no backward on a CPU; use auto or sdpa")
    if config.kernels.attention == "cudnn":
        try:
            cudnn_attention.require(device, compute_dtype(config, device), arch.head_dim)
        except ValueError as error:
            raise ConfigError("kernels.attention", str(error)) from None
    if config.kernels.backend == "triton" and device.type == "cpu" and not INTERPRETED:
        raise ConfigError("kernels.backend", "'triton' takes a CUDA device; use auto or reference")
    moe, ep = config.moe, config.parallel.ep
    if (moe.dispatcher == "local") if ep > 1 else (moe.dispatcher in ("alltoall", "deepep")):
        raise ConfigError(
            "moe.dispatcher", f"{moe.dispatcher!r} contradicts parallel.ep {ep}; use auto"
        )
    for name, value, usual in (
        ("dispatch_mode", moe.dispatch_mode, "exact"),
        ("overlap_chunks", moe.overlap_chunks, 1),
    ):
        if ep == 1 and value != usual:
            raise ConfigError(
                f"moe.{name}", f"{value!r} takes DeepEP, which parallel.ep 1 has no use for"
            )
    if moe.dispatcher == "deepep":  # said again, for the group, where it is put to use
        reason = why_not_here(arch, ep, device, compute_dtype(config, device))
        if reason is not None:
            raise ConfigError("moe.dispatcher", f"'deepep' cannot run: {reason}")
