"""The storages that there are. A new one is a file in this folder and a line here."""

from collections.abc import Sequence

from moetrain.parallel.fsdp.storage.offloaded import Offloaded
from moetrain.parallel.fsdp.storage.plain import Plain
from moetrain.parallel.fsdp.storage.protocol import ShardSpec, Storage
from moetrain.parallel.fsdp.storage.quantised import Quantised

STORAGES: Sequence[type[Storage]] = (Quantised, Offloaded, Plain)
"""The first whose ``takes`` returns True stores a shard."""


def make_storage(spec: ShardSpec) -> Storage:
    """Make the storage of one rank's shard.

    Raises RunFailed if the system does not give as much pinned memory.
    """
    return next(kind for kind in STORAGES if kind.takes(spec)).make(spec)
