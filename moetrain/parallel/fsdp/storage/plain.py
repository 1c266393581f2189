"""A shard whose values lie on the device, where the optimizer updates them."""

from typing import Self

import torch

from moetrain.parallel.fsdp.storage.protocol import ShardSpec, Storage, nowhere


class Plain(Storage):
    """Values of one rank's shard in device memory."""

    def __init__(self, shard_N: torch.Tensor) -> None:
        self.shard_N = self.source_N = shard_N

    @classmethod
    def takes(cls, spec: ShardSpec) -> bool:
        return True

    @classmethod
    def make(cls, spec: ShardSpec) -> Self:
        dtype = spec.rule.storage
        if spec.may_be_read:
            plain = cls(nowhere(spec.numel, dtype, spec.weights.device))
            plain.awaits_memory = True
            return plain
        return cls(spec.weights.empty(spec.numel + spec.spare_numel, dtype).zero_()[: spec.numel])
