"""The transports beside collectives. A new one is a file in this folder and a row here."""

from collections.abc import Callable, Mapping, Sequence

import torch

from moetrain.config import ParallelSection
from moetrain.parallel.fsdp.bucket import Bucket
from moetrain.parallel.fsdp.transport import peers
from moetrain.parallel.fsdp.transport.protocol import Session
from moetrain.runtime.arena import Arena

Connect = Callable[[Sequence[Bucket], ParallelSection, torch.device, Arena], Session | None]
"""Sets ``transport`` of the buckets that it carries, and returns what they share. Collective. It
may place a shard that awaits memory; that memory is then a piece of the arena of weights."""

TRANSPORTS: Mapping[str, Connect] = {"copy": peers.connect}
"""By the value of ``parallel.fsdp_transport`` that asks for it. With auto all of them are asked,
and the last one to set a bucket's ``transport`` wins. A bucket that none carries travels by
collectives (nccl)."""


def connect(
    buckets: Sequence[Bucket], setting: ParallelSection, device: torch.device, weights: Arena
) -> list[Session]:
    """Let each transport that the setting asks for take the buckets that it can carry. Collective.

    Shards that await memory then have some, and are zeros. ``weights``: the memory of shards.

    Raises ConfigError: ``parallel.fsdp_transport`` asks for one that cannot run here.
    """
    asked = setting.fsdp_transport
    wanted = [ask for name, ask in TRANSPORTS.items() if asked in (name, "auto")]
    sessions = [ask(buckets, setting, device, weights) for ask in wanted]
    for bucket in buckets:
        if bucket.storage.awaits_memory:
            shard_N = bucket.shard_N
            bucket.place(weights.empty(shard_N.numel(), shard_N.dtype).zero_())
    return [session for session in sessions if session is not None]
