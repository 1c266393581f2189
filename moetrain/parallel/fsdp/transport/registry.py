"""The transports beside collectives. A new one is a file in this folder and a row here."""

from collections.abc import Callable, Mapping, Sequence

import torch

from moetrain.config import ParallelSection
from moetrain.parallel.fsdp.bucket import Bucket
from moetrain.parallel.fsdp.transport import peers
from moetrain.parallel.fsdp.transport.protocol import Session

Connect = Callable[[Sequence[Bucket], ParallelSection, torch.device], Session | None]
"""Sets ``transport`` of the buckets that it carries, and returns what they share. Collective."""

TRANSPORTS: Mapping[str, Connect] = {"copy": peers.connect}
"""By the value of ``parallel.fsdp_transport`` that asks for it. With auto all of them are asked,
and the last one to set a bucket's ``transport`` wins. A bucket that none carries travels by
collectives (nccl)."""


def connect(
    buckets: Sequence[Bucket], setting: ParallelSection, device: torch.device
) -> list[Session]:
    """Let each transport that the setting asks for take the buckets that it can carry. Collective.

    Raises ConfigError: ``parallel.fsdp_transport`` asks for one that cannot run here.
    """
    asked = setting.fsdp_transport
    wanted = [ask for name, ask in TRANSPORTS.items() if asked in (name, "auto")]
    sessions = [ask(buckets, setting, device) for ask in wanted]
    return [session for session in sessions if session is not None]
