"""FSDP over copy engines (``parallel.fsdp_transport``): which buckets, when, and in what memory.

:mod:`moetrain.parallel.fsdp.peers` lets ranks reach one another's memory; here is what FSDP asks of
it. Peers read a copy of each bucket's shard in the dtype in which it is gathered. The optimizer
writes that copy with the master, so that no gather casts; if anything else changed a master, the
copy is written anew when the next work begins.

Collectives still carry buckets of which a rank holds all, those whose master lies on the host (its
copy comes up while the forward runs), those of 8-bit codes, and all-reduces over replicas.

Left out on purpose: shards that lie nowhere but in peers' memory. That would spare frozen ones a
copy, and tie their offloading to the memory of peers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from moetrain.config import Config, ConfigError, ParallelSection
from moetrain.kernels.annotate import annotated
from moetrain.models.rules import Rule
from moetrain.parallel.collectives import ReduceMode
from moetrain.parallel.fsdp.bucket import Bucket
from moetrain.parallel.fsdp.peers import Copied, CopyStreams, Peers
from moetrain.parallel.layout import STYLES
from moetrain.parallel.mesh import ParallelDims
from moetrain.parallel.processes import machine

logger = logging.getLogger("moetrain")

_Device = tuple[str, int | None]
"""A rank's machine, and the number of its GPU there."""


class CopyEngines:
    """The buckets that copy engines carry; at first none."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.streams = device, CopyStreams.of(device)
        self.buckets: list[Bucket] = []
        self.peers: dict[str, Peers] = {}
        """By the name of their group."""

    def carry(self, bucket: Bucket, mode: ReduceMode) -> None:
        """Carry ``bucket``, whose gradients are summed by ``mode``, from now on."""
        group = bucket.group
        if group.group_name not in self.peers:
            self.peers[group.group_name] = Peers(group, self.streams)
        bucket.peers = peers = self.peers[group.group_name]
        shard_bytes = bucket.shard_N.numel() * bucket.dtype.itemsize
        bucket.peers_start = peers.reserve(shard_bytes)
        if bucket.is_trained and mode == "fp32_accum":
            peers.reserve_inbox(group.size() * shard_bytes)
        self.buckets.append(bucket)

    @torch.inference_mode(False)  # which tensors made now would keep, when they are to be trained
    @torch.no_grad()
    @annotated("fsdp_share copy_engines")
    def begin(self) -> None:
        """Let every rank read all shards as they are now, before a work. Collective."""
        for peers in self.peers.values():
            peers.open()
        for bucket in self.buckets:
            bucket.share()
        for peers in self.peers.values():  # whether or not this rank's were stale: others' may be
            peers.barrier()

    def end(self) -> None:
        """Let the current stream wait for all copies, after a work or one that failed."""
        if self.buckets:
            Copied.by(*self.streams).wait()

    def release(self) -> None:
        """Give the memory back until the next work, after the buckets' own. Collective."""
        for peers in self.peers.values():
            peers.release()


def is_wanted(setting: ParallelSection, device_type: str) -> bool:
    """Tell whether ranks of one machine, with devices of this type, are to use copy engines."""
    return {"nccl": False, "copy": True, "auto": device_type == "cuda"}[setting.fsdp_transport]


def connect(
    engines: CopyEngines,
    buckets: Iterable[Bucket],
    setting: ParallelSection,
    everyone: dist.ProcessGroup,
) -> None:
    """Let ``engines`` carry what ``parallel.fsdp_transport`` says. Collective over ``everyone``.

    Raises:
        ConfigError: the setting is copy, and ranks do not reach one another's memory.
    """
    device = engines.device
    if not is_wanted(setting, device.type) or everyone.size() == 1:
        return
    mine: _Device = (machine(), device.index)
    devices: list[_Device] = [mine] * everyone.size()
    dist.all_gather_object(devices, mine, group=everyone)
    travelling = [b for b in buckets if b.group.size() > 1 and not (b.host or b.float8)]
    groups = {b.group.group_name: b.group for b in travelling}
    reasons: dict[str, str | None] = {}
    for name, group in groups.items():
        ranks = dist.get_process_group_ranks(group)
        reasons[name] = reason = why_not([devices[rank] for rank in ranks])
        if reason is not None:
            if setting.fsdp_transport == "copy":
                raise ConfigError(
                    "parallel.fsdp_transport", f"'copy' cannot be: {reason}; use nccl"
                )
            logger.info("FSDP uses collectives among ranks %s: %s", ranks, reason)
    for bucket in travelling:
        if reasons[bucket.group.group_name] is None:
            engines.carry(bucket, setting.reduce)


def peer_bytes(
    config: Config,
    numels: Mapping[str, int],
    rules: Mapping[str, Rule],
    here: Iterable[str],
    dims: ParallelDims,
    dtype: torch.dtype,
) -> float:
    """Estimate the bytes of a rank's :class:`Peers`, if all ranks are on one machine.

    Args:
        numels, rules: of every parameter, by name.
        here: those of this rank's stages.
        dtype: what parameters are gathered in where their rule does not say.
    """
    on_cpu = config.train.device == "cpu"
    if not is_wanted(config.parallel, "cpu" if on_cpu else "cuda"):
        return 0.0
    shards, inbox = 0.0, 0.0
    for name in here:
        rule, cut = rules[name], 1
        if isinstance(STYLES[rule.style], Shard):
            cut = dims.ep if rule.style == "expert" else dims.tp
        if dims.sharding_ranks == cut or rule.is_narrow:  # nobody copies it
            continue
        size = numels[name] * (rule.gather or dtype).itemsize / cut
        on_device = 1 - config.optim.offload_fraction * rule.trainable
        shards += on_device * size * cut / dims.sharding_ranks
        if rule.trainable and on_device and config.parallel.reduce == "fp32_accum":
            inbox = max(inbox, size)
    return shards + inbox


def why_not(devices: Sequence[_Device]) -> str | None:
    """Say why the ranks of ``devices`` do not reach one another's memory, or None if they do.

    All of them get the same answer.
    """
    hosts, gpus = zip(*devices, strict=True)
    if len(set(hosts)) > 1:
        return f"its {len(devices)} ranks are on {len(set(hosts))} machines, not on one"
    if gpus[0] is None:
        return None
    if len(set(gpus)) < len(gpus):
        return f"ranks call their GPUs {', '.join(map(str, gpus))}, and each must see all"
    for a in gpus:
        for b in gpus:
            if a != b and not torch.cuda.can_device_access_peer(a, b):
                return f"GPU {a} cannot reach the memory of GPU {b}"
    return None
