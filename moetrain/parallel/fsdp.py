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
ranks it is small (38 MB a layer for Qwen3-30B-A3B). With ``reshard`` it is freed after the block
and gathered again for its backward (:mod:`moetrain.parallel.reshard`). Under full recomputation it
is freed too, and the recomputed forward gathers it; both run a block ahead in the backward as well.

Left out on purpose: gradients of different units in one collective; parameters that change shape.

Legend: W ranks of the FSDP axis, N numbers of one rank's shard of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from moetrain.parallel.reshard import Loan, Memory

Gathering = tuple[torch.Tensor, dist.Work | None]
"""A gather under way: its output [W, N], and what to wait for."""


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
    replicas: dist.ProcessGroup | None
    """Ranks that hold this very shard, over which its gradient is still to be summed."""
    dtype: torch.dtype
    """What it is gathered in."""
    has_gradient: bool = False
    gathering: Gathering | None = None
    """A gather under way, for the next forward."""
    reducing: PendingReduce | None = None
    """A reduction under way."""

    @property
    def rows_are_views(self) -> bool:
        """Whether full parameters are views of the gathered buffer; else they are copies."""
        return len(self.members) == 1 or self.group.size() == 1

    @property
    def is_never_sharded(self) -> bool:
        """Whether the gathered buffer is the shard itself."""
        return self.group.size() == 1 and self.dtype == self.shard_N.dtype

    def begin_gather(self, out_WN: torch.Tensor | None = None) -> Gathering:
        """The all-gather, into ``out_WN`` or a buffer of its own."""
        shard_N = self.shard_N.to(self.dtype)
        if self.group.size() > 1:
            return all_gather_start(shard_N, self.group, out_WN)
        return (shard_N[None] if out_WN is None else out_WN.copy_(shard_N)), None

    def start_gather(self) -> None:
        """Begin the next forward's all-gather, unless it is under way."""
        if self.gathering is None:
            self.gathering = self.begin_gather()

    def finish_gather(self) -> Gathered:
        """The full parameters, in the order of ``members``."""
        assert self.gathering is not None  # start_gather came first
        (whole_WN, work), self.gathering = self.gathering, None
        if work is not None:
            work.wait()
        rows = self.rows(whole_WN)
        return Gathered(rows, None if self.is_never_sharded else Memory(self, whole_WN, rows))

    def rows(self, whole_WN: torch.Tensor) -> list[torch.Tensor]:
        """The full parameters out of the gathered buffer."""
        return [_rows(whole_WN, member) for member in self.members]

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


class Gathered(NamedTuple):
    """A bucket's full parameters, and the memory that they lie in (None: the parameters' own)."""

    rows: list[torch.Tensor]
    memory: Memory | None


def _rows(gathered_WN: torch.Tensor, member: Member) -> torch.Tensor:
    """One full parameter out of a gathered bucket: see ``Bucket.rows_are_views``."""
    shard_WN = gathered_WN[:, member.start : member.start + member.numel]
    numbers = member.shape.numel()  # cuts the last ranks' padding
    return shard_WN.contiguous().view(-1)[:numbers].view(member.shape)


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

    def gather(self) -> list[Gathered]:
        """Full parameters, detached; the neighbour's gather starts behind this one."""
        self.start_gather()
        gathered = [bucket.finish_gather() for bucket in self.buckets]
        self.fsdp.prefetch(self)
        return gathered

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


class _HandOut(torch.autograd.Function):
    """Hands out a unit's full parameters; its backward reduces their gradients into the shards.

    The shards' gradients do not flow through autograd: they are summed in fp32 into buffers that
    outlive the graph, while the next block's backward runs.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, unit: Unit, gathered: Sequence[Gathered]
    ) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        return tuple(row for bucket in gathered for row in bucket.rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.unit.fsdp.reduce(ctx.unit, gradients)
        return None, None, None


class FSDP:
    """The units of one model in forward order, and the collectives under way between them.

    ``reshard``: whether a block's full parameters are away between its forward and its backward.
    """

    def __init__(self, mode: ReduceMode) -> None:
        self.mode: ReduceMode = mode
        self.reshard = False
        self.units: list[Unit] = []
        self.unit_of: dict[nn.Module, Unit] = {}
        self._reducing: list[Bucket] = []
        self._anchor: torch.Tensor | None = None
        self._in_backward = False
        self._last_loan: Loan | None = None

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

    def full_parameters(self, unit: Unit, gathered: Sequence[Gathered]) -> list[torch.Tensor]:
        """What ``unit`` has gathered, differentiable."""
        if self._anchor is None:
            device = unit.buckets[0].shard_N.device
            self._anchor = torch.zeros((), device=device, requires_grad=True)
        return list(_HandOut.apply(self._anchor, unit, gathered))

    def prefetch(self, unit: Unit) -> None:
        """Begin the gather of the unit that will be asked for next."""
        # A gather during the backward is a recomputed block's; the embedding never recomputes.
        neighbour = unit.index - 1 if self._in_backward else unit.index + 1
        if neighbour < len(self.units) and not (self._in_backward and neighbour == 0):
            self.units[neighbour].start_gather()

    def run(self, block: nn.Module, *inputs: Any) -> Any:
        """``block(*inputs)`` with its full parameters."""
        unit = self.unit_of[block]
        gathered = unit.gather()
        with unit.swapped(self.full_parameters(unit, gathered)):
            outputs = block(*inputs)
        if not self.reshard or not torch.is_grad_enabled():
            return outputs
        # The last block's backward comes next: what it holds stays.
        stays = unit.index == len(self.units) - 2
        memories = [] if stays else [g.memory for g in gathered if g.memory is not None]
        self._last_loan = Loan(memories, unit.index, self._last_loan)
        self._last_loan.close()
        return self._last_loan.wrap(outputs)

    def open(self, module: nn.Module, inputs: Any = None) -> None:
        """Let the unit of ``module`` hold full parameters until :meth:`finish_backward`."""
        unit = self.unit_of[module]
        unit.swap_in(self.full_parameters(unit, unit.gather()))

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
        self._in_backward, self._last_loan = False, None
        for unit in self.units:
            unit.swap_out()

    def publish_gradients(self) -> None:
        """End of a step: sum over replicas and show each parameter's gradient as a DTensor."""
        for unit in self.units:
            for bucket in unit.buckets:
                if not bucket.has_gradient:  # nothing used these parameters in this step
                    bucket.gradient_N.zero_()
                if bucket.replicas is not None:
                    dist.all_reduce(bucket.gradient_N, group=bucket.replicas)
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
        squares = [
            torch.linalg.vector_norm(b.gradient_N).square()
            / (1 if b.replicas is None else b.replicas.size())
            for b in buckets
        ]
        total = torch.stack(squares).sum()
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
