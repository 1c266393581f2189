"""The transports beside collectives. A new one is a file in this folder and a line here."""

from collections.abc import Callable, Sequence

import torch

from moetrain.config import ParallelSection
from moetrain.parallel.fsdp.bucket import Bucket
from moetrain.parallel.fsdp.transport import peers
from moetrain.parallel.fsdp.transport.protocol import Session

Connect = Callable[[Sequence[Bucket], ParallelSection, torch.device], Session | None]
"""Sets ``transport`` of the buckets that it carries, and returns what they share. Collective."""

TRANSPORTS: Sequence[Connect] = (peers.connect,)
"""Asked in this order. A bucket that none carries keeps travelling by collectives."""


def connect(
    buckets: Sequence[Bucket], setting: ParallelSection, device: torch.device
) -> list[Session]:
    """Let each transport take the buckets that it can carry. Collective.

    Raises ConfigError: ``parallel.fsdp_transport`` asks for one that cannot run here.
    """
    sessions = [connect_one(buckets, setting, device) for connect_one in TRANSPORTS]
    return [session for session in sessions if session is not None]
