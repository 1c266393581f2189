"""Our own FSDP: sharded fp32 parameters, gathered in the compute dtype where they are used.

Every parameter is a DTensor, sharded on its first dim over its FSDP axis (and before that over
tensor or expert parallel ranks). A :class:`Unit` is a block, or the embedding, or the head: the
parameters that are gathered together. Around its forward the unit's modules hold full tensors
instead of their DTensors; one autograd function hands them out, and its backward reduces their
gradients into fp32 shards.

    forward   gather(i+1) runs while block i computes
    backward  the reduction of block i runs while block i-1 computes

The gather lives outside the compiled block. Inside, the compiler would see it but could not start
it before the block begins; outside, it runs a block ahead, and the compiled block only sees plain
tensors, so no hook breaks its graph.

What is gathered stays until the backward has used it: with experts sharded over expert parallel
ranks it is small (38 MB a layer for Qwen3-30B-A3B). Under full recomputation it is freed after the
block and gathered again by the recomputed forward, a block ahead as well.

Left out on purpose: gradients of different units in one collective; parameters that change shape.

Legend: W ranks of the FSDP axis, N numbers of one rank's shard of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from moetrain.parallel.collectives import (
    PendingReduce,
    ReduceMode,
    all_gather_start,
    reduce_scatter_start,
)


@dataclass
class Member:
    """One parameter of a bucket, as one rank sees it."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    """The DTensor that ``named_parameters`` shows."""
    local: torch.Tensor
    """This rank's rows, fp32: a view into the bucket. The optimizer's parameter."""
    shape: torch.Size
    """The gathered shape: all rows of this tensor (or expert) parallel rank."""
    start: int
    numel: int
    """Where its padded shard lies in the bucket, in numbers."""
    cut: tuple[slice, ...]
    """``local`` is this part of the whole parameter."""
    model_axis: tuple[dist.ProcessGroup, int] | None
    """Tensor or expert parallel ranks that split the whole, and on which dim; None: not split."""


@dataclass
class Bucket:
    """Parameters that travel in one collective: one flat fp32 shard a rank, and its gradient."""

    members: list[Member]
    group: dist.ProcessGroup
    shard_N: torch.Tensor
    gradient_N: torch.Tensor
    replicas: Sequence[dist.ProcessGroup]
    """Groups over which this shard's gradient is still to be summed."""
    copies: int
    """Ranks of the world that hold this very shard."""
    dtype: torch.dtype
    """What it is gathered in."""
    has_gradient: bool = False
    gathering: tuple[torch.Tensor, dist.Work | None] | None = None
    """A gather under way: its output, and what to wait for."""
    reducing: PendingReduce | None = None
    """A reduction under way."""

    def start_gather(self) -> None:
        """Begin the all-gather, unless one is under way."""
        if self.gathering is not None:
            return
        shard_N = self.shard_N.to(self.dtype)
        if self.group.size() == 1:
            self.gathering = shard_N[None], None
        else:
            self.gathering = all_gather_start(shard_N, self.group)

    def finish_gather(self) -> list[torch.Tensor]:
        """The full parameters, in the order of ``members``."""
        assert self.gathering is not None  # start_gather came first
        (gathered_WN, work), self.gathering = self.gathering, None
        if work is not None:
            work.wait()
        return [_rows(gathered_WN, m) for m in self.members]

    def start_reduce(self, gradients: Sequence[torch.Tensor | None], mode: ReduceMode) -> None:
        """Begin to sum the full parameters' gradients over the group."""
        chunks_WN = _chunks(self.members, gradients, self.group.size())
        self.reducing = reduce_scatter_start(
            chunks_WN, self.group, out_N=self.gradient_N, accumulate=self.has_gradient, mode=mode
        )
        self.has_gradient = True

    def finish_reduce(self) -> None:
        """Add the sum to this step's gradient."""
        assert self.reducing is not None  # start_reduce came first
        self.reducing.finish()
        self.reducing = None


def _rows(gathered_WN: torch.Tensor, member: Member) -> torch.Tensor:
    """One full parameter out of a gathered bucket: a view if the bucket has but one member."""
    shard_WN = gathered_WN[:, member.start : member.start + member.numel]
    numbers = member.shape.numel()
    return shard_WN.reshape(-1)[:numbers].view(member.shape)  # cuts the last ranks' padding


def _chunks(
    members: Sequence[Member], gradients: Sequence[torch.Tensor | None], ranks: int
) -> torch.Tensor:
    """Gradients of full parameters as [W, N]: row r is what rank r's shard receives."""
    dtype = next(g.dtype for g in gradients if g is not None)
    only = gradients[0]
    if len(members) == 1 and only is not None and only.numel() == ranks * members[0].numel:
        return only.contiguous().view(ranks, -1)
    size = members[-1].start + members[-1].numel
    chunks_WN = members[0].local.new_zeros((ranks, size), dtype=dtype)
    for member, gradient in zip(members, gradients, strict=True):
        if gradient is None:
            continue
        flat = gradient.reshape(-1)
        whole, rest = divmod(flat.numel(), member.numel)
        target_WN = chunks_WN[:, member.start : member.start + member.numel]
        target_WN[:whole] = flat[: whole * member.numel].view(whole, -1)
        if rest:
            target_WN[whole, :rest] = flat[whole * member.numel :]
    return chunks_WN


@dataclass
class Unit:
    """Parameters gathered together; ``fsdp`` owns the order and what is under way."""

    buckets: list[Bucket]
    fsdp: FSDP
    index: int

    @property
    def members(self) -> Iterator[Member]:
        """Every parameter, bucket by bucket."""
        for bucket in self.buckets:
            yield from bucket.members

    @record_function("fsdp_gather")
    def start_gather(self) -> None:
        """Begin gathering every bucket that is not under way."""
        for bucket in self.buckets:
            bucket.start_gather()

    def gather(self) -> list[torch.Tensor]:
        """Full parameters, detached; the neighbour's gather starts behind this one."""
        self.start_gather()
        full = [tensor for bucket in self.buckets for tensor in bucket.finish_gather()]
        self.fsdp.prefetch(self)
        return full

    def swap_in(self, full: Sequence[torch.Tensor]) -> None:
        """Let the modules hold ``full`` in place of their DTensors."""
        for member, tensor in zip(self.members, full, strict=True):
            member.module._parameters[member.name] = tensor  # pyright: ignore

    def swap_out(self) -> None:
        """Give the modules their DTensors back."""
        for member in self.members:
            member.module._parameters[member.name] = member.parameter

    @contextmanager
    def swapped(self, full: Sequence[torch.Tensor]) -> Iterator[None]:
        """:meth:`swap_in` for the length of a block."""
        self.swap_in(full)
        try:
            yield
        finally:
            self.swap_out()


class _Gather(torch.autograd.Function):
    """Hands out a unit's full parameters; its backward reduces their gradients into the shards.

    The shards' gradients do not flow through autograd: they are summed in fp32 into buffers that
    outlive the graph, while the next block's backward runs.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, unit: Unit) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        return tuple(unit.gather())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None]:
        ctx.unit.fsdp.reduce(ctx.unit, gradients)
        return None, None


class FSDP:
    """The units of one model in forward order, and the collectives under way between them."""

    def __init__(self, mode: ReduceMode) -> None:
        self.mode: ReduceMode = mode
        self.units: list[Unit] = []
        self.unit_of: dict[nn.Module, Unit] = {}
        self._reducing: list[Bucket] = []
        self._anchor: torch.Tensor | None = None
        self._in_backward = False

    def add(self, buckets: list[Bucket], modules: Sequence[nn.Module]) -> None:
        """Append the unit of ``modules``; units are added in the order their forwards run."""
        unit = Unit(buckets, self, index=len(self.units))
        self.units.append(unit)
        self.unit_of.update(dict.fromkeys(modules, unit))

    @property
    def members(self) -> Iterator[Member]:
        """Every parameter of the model."""
        for unit in self.units:
            yield from unit.members

    def full_parameters(self, unit: Unit) -> list[torch.Tensor]:
        """The unit's full parameters, differentiable."""
        if self._anchor is None:
            device = unit.buckets[0].shard_N.device
            self._anchor = torch.zeros((), device=device, requires_grad=True)
        return list(_Gather.apply(self._anchor, unit))

    def prefetch(self, unit: Unit) -> None:
        """Begin the gather of the unit that will be asked for next."""
        # A gather during the backward is a recomputed block's; the embedding never recomputes.
        neighbour = unit.index - 1 if self._in_backward else unit.index + 1
        if neighbour < len(self.units) and not (self._in_backward and neighbour == 0):
            self.units[neighbour].start_gather()

    def run(self, block: nn.Module, *inputs: Any) -> Any:
        """``block(*inputs)`` with its full parameters."""
        unit = self.unit_of[block]
        with unit.swapped(self.full_parameters(unit)):
            return block(*inputs)

    def open(self, module: nn.Module, inputs: Any = None) -> None:
        """Let the unit of ``module`` hold full parameters until :meth:`finish_backward`."""
        unit = self.unit_of[module]
        unit.swap_in(self.full_parameters(unit))

    @record_function("fsdp_reduce")
    def reduce(self, unit: Unit, gradients: Sequence[torch.Tensor | None]) -> None:
        """Begin the unit's reductions, then finish those of the unit before it."""
        self._in_backward = True
        started, rest = [], list(gradients)
        for bucket in unit.buckets:
            mine, rest = rest[: len(bucket.members)], rest[len(bucket.members) :]
            if any(g is not None for g in mine):
                bucket.start_reduce(mine, self.mode)
                started.append(bucket)
        self._finish_reductions()
        self._reducing = started

    def _finish_reductions(self) -> None:
        for bucket in self._reducing:
            bucket.finish_reduce()
        self._reducing = []

    def finish_backward(self) -> None:
        """End of a micro-batch: every reduction is done, every module holds its DTensors again."""
        self._finish_reductions()
        self._in_backward = False
        for unit in self.units:
            unit.swap_out()

    def publish_gradients(self) -> None:
        """End of a step: sum over replicas and show each parameter's gradient as a DTensor."""
        for unit in self.units:
            for bucket in unit.buckets:
                if not bucket.has_gradient:  # nothing used these parameters in this step
                    bucket.gradient_N.zero_()
                for group in bucket.replicas:
                    dist.all_reduce(bucket.gradient_N, group=group)
                for member in bucket.members:
                    rows = bucket.gradient_N[member.start :][: member.local.numel()]
                    gradient = rows.view(member.local.shape)
                    member.local.grad = gradient
                    member.parameter.grad = like(member.parameter, gradient)

    def clear_gradients(self) -> None:
        """Forget the step's gradients; the buffers stay."""
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.has_gradient = False
                for member in bucket.members:
                    member.local.grad = member.parameter.grad = None

    def squared_norm(self) -> torch.Tensor:
        """Squared 2-norm of all gradients over the world (fp32 scalar on the device)."""
        buckets = [bucket for unit in self.units for bucket in unit.buckets]
        norms = [torch.linalg.vector_norm(b.gradient_N) / b.copies**0.5 for b in buckets]
        total = torch.stack(norms).square().sum()
        dist.all_reduce(total)
        return total


def like(parameter: nn.Parameter, local: torch.Tensor) -> DTensor:
    """``local`` as a DTensor laid out as ``parameter``."""
    data = parameter.data
    assert isinstance(data, DTensor)  # FSDP made it
    return DTensor.from_local(
        local,
        data.device_mesh,
        data.placements,
        run_check=False,
        shape=data.shape,
        stride=data.stride(),
    )
