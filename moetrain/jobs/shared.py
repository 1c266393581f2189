"""An engine that serves many jobs, and copies of what is a job's of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from moetrain.config import Config
from moetrain.models.architecture import Architecture
from moetrain.parallel.layout import TensorSlice
from moetrain.parallel.world import World
from moetrain.train.engine import Engine
from moetrain.train.passes import Totals


class Pending(NamedTuple):
    """What forward_backward has left for the next step."""

    gradients: dict[str, torch.Tensor]
    """In host memory: those of buckets that have any, and their squares, by bucket."""
    since_step: list[Totals]


class SharedEngine(Engine):
    """An engine whose trained values are one job's at a time, in the same tensors for all."""

    def __init__(self, config: Config, arch: Architecture, world: World) -> None:
        super().__init__(config, arch, world)
        self.optimizer.begin()  # else it would at its first step, and have nothing to be copied to

    @property
    def is_between_steps(self) -> bool:
        """Whether there are no gradients that wait for a step."""
        return not self._since_step

    @torch.no_grad()
    def set_aside(self) -> Pending | None:
        """The gradients of the step so far, which the engine forgets; None: there are none."""
        if self.is_between_steps:
            return None
        kept = {}
        for i, bucket in enumerate(self.fsdp.buckets):
            if bucket.has_gradient:
                assert bucket.gradient_N is not None
                assert bucket.squares_B is not None
                kept |= {f"{i}.gradient": to_host(bucket.gradient_N)}
                kept |= {f"{i}.squares": to_host(bucket.squares_B)}
        pending = Pending(kept, self._since_step)
        self._forget()
        return pending

    @torch.no_grad()
    def take_back(self, pending: Pending | None) -> None:
        """Inverse of :meth:`set_aside`."""
        self._forget()
        if pending is None:
            return
        for i, bucket in enumerate(self.fsdp.buckets):
            if (gradient_N := pending.gradients.get(f"{i}.gradient")) is None:
                continue
            squares_B = pending.gradients[f"{i}.squares"]
            if bucket.gradient_N is None:
                bucket.gradient_N = bucket.gradients.empty(gradient_N.numel(), gradient_N.dtype)
            if bucket.squares_B is None:
                bucket.squares_B = torch.empty_like(squares_B, device=bucket.shard_N.device)
            bucket.gradient_N.copy_(gradient_N, non_blocking=True)
            bucket.squares_B.copy_(squares_B, non_blocking=True)
            bucket.has_gradient = True
        self._since_step = list(pending.since_step)

    def forget(self) -> None:
        """Forget the gradients of the step so far."""
        self._forget()


def copies_of(parts: Mapping[str, TensorSlice]) -> dict[str, TensorSlice]:
    return {name: part._replace(tensor=to_host(part.tensor)) for name, part in parts.items()}


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, pinned if ``tensor`` is on CUDA; it is whole when the device has come so far."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return host.copy_(tensor.detach(), non_blocking=True)
