"""A model in its place: whole on one device, or sharded over many, with one interface for both.

The trainer speaks to a :class:`Placed` and never asks which it is. Values have two forms: a rank's
own ``part`` of a parameter (or of its optimizer state), and the ``whole`` that checkpoints hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from moetrain.config import ConfigError
from moetrain.parallel.collectives import all_gather_start
from moetrain.parallel.fsdp import FSDP, Member


class Placed(Protocol):
    """What the trainer asks of a model in its place."""

    parts: Mapping[str, torch.Tensor]
    """This rank's fp32 part of every parameter: what the optimizer updates."""
    shapes: Mapping[str, torch.Size]
    """Of every parameter, whole."""

    def finish_backward(self) -> None:
        """To be called after every backward, and after a forward without one."""
        ...

    def gradient_norm(self) -> torch.Tensor:
        """After the step's last backward: complete every part's ``grad``.

        Returns the 2-norm of the whole gradient (0-d fp32, the same on every rank).
        """
        ...

    def clear_gradients(self) -> None:
        """Forget the step's gradients."""
        ...

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Of which ``part``, laid out as parameter ``name``, is this rank's. Collective."""
        ...

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``whole``: the inverse, as a view."""
        ...


class WholeModel:
    """Every parameter on this device."""

    def __init__(self, model: nn.Module) -> None:
        self.parts: Mapping[str, torch.Tensor] = dict(model.named_parameters())
        self.shapes: Mapping[str, torch.Size] = {
            name: part.shape for name, part in self.parts.items()
        }

    def finish_backward(self) -> None:
        pass

    def gradient_norm(self) -> torch.Tensor:
        gradients = [p.grad for p in self.parts.values() if p.grad is not None]
        return nn.utils.get_total_norm(gradients)

    def clear_gradients(self) -> None:
        for part in self.parts.values():
            part.grad = None

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        return part

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole


class ShardedModel:
    """Parameters in shards, gathered by :class:`~moetrain.parallel.fsdp.FSDP`."""

    def __init__(self, model: nn.Module, fsdp: FSDP) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        self.members: dict[str, Member] = {names[id(m.parameter)]: m for m in fsdp.members}
        self.parts: Mapping[str, torch.Tensor] = {n: m.local for n, m in self.members.items()}
        self.shapes: Mapping[str, torch.Size] = {
            name: m.parameter.shape for name, m in self.members.items()
        }
        self._fsdp = fsdp
        buckets = [bucket for unit in fsdp.units for bucket in unit.buckets]
        self._groups = {names[id(m.parameter)]: b.group for b in buckets for m in b.members}

    def finish_backward(self) -> None:
        self._fsdp.finish_backward()

    def gradient_norm(self) -> torch.Tensor:
        self._fsdp.publish_gradients()
        return self._fsdp.squared_norm().sqrt()

    def clear_gradients(self) -> None:
        self._fsdp.clear_gradients()

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        member = self.members[name]
        if part.shape != member.local.shape:
            return part  # a scalar of the optimizer, the same on every rank
        # Not DTensor.full_tensor: torch 2.11 has none for meshes whose axes are not in rank order.
        padded_N = part.new_zeros(member.numel)
        padded_N[: part.numel()] = part.flatten()
        whole = _gather(padded_N, self._groups[name])[: member.shape.numel()].view(member.shape)
        if member.model_axis is None:
            return whole
        group, dim = member.model_axis
        size = member.parameter.shape[dim]
        whole = whole.movedim(dim, 0)
        padded = whole.new_zeros(math.ceil(size / group.size()), *whole.shape[1:])
        padded[: whole.shape[0]] = whole
        rows = _gather(padded.flatten(), group).view(-1, *padded.shape[1:])
        return rows[:size].movedim(0, dim).contiguous()

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.members[name].cut] if whole.ndim else whole

    def write(self, name: str, place: tuple[int | slice, ...], tensor: torch.Tensor) -> None:
        """Copy what this rank holds of ``parameter[place] = tensor``."""
        member = self.members[name]
        target: list[slice] = []
        source: list[slice] = []
        for dim, cut in enumerate(member.cut):
            index = place[dim] if dim < len(place) else slice(None)
            if isinstance(index, int):
                tensor = tensor.unsqueeze(dim)
                index = slice(index, index + 1)
            start, stop, _ = index.indices(member.parameter.shape[dim])
            low, high = max(start, cut.start), min(stop, cut.stop)
            if low >= high:
                return
            target.append(slice(low - cut.start, high - cut.start))
            source.append(slice(low - start, high - start))
        member.local[tuple(target)].copy_(tensor[tuple(source)])


def _gather(x_N: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's ``x_N``, end to end."""
    gathered_WN, work = all_gather_start(x_N.contiguous(), group)
    work.wait()
    return gathered_WN.flatten()


def check_like(name: str, saved: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise :class:`ConfigError` unless ``saved``, a checkpoint's ``name``, is fp32 of ``shape``.

    Copies would otherwise broadcast, cut or round it in silence.
    """
    if saved.shape != torch.Size(shape) or saved.dtype != torch.float32:
        dtype = str(saved.dtype).removeprefix("torch.")
        raise ConfigError(
            "checkpoint.resume",
            f"its {name!r} is {dtype} of shape {list(saved.shape)}, "
            f"where this run has float32 of shape {list(shape)}",
        )
