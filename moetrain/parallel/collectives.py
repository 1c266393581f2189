"""Torch's collectives, groups and stores, with type annotations: torch has none for most of them.

Each constant is torch's own function, cast to its type. So a call costs nothing more, and the
compiler traces the same function. Callers need no casts.

Left out on purpose: collectives that torch annotates, such as ``broadcast``.
"""

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.tensor import Placement, Shard

_T = TypeVar("_T")

Store: TypeAlias = dist.Store
HashStore: TypeAlias = dist.HashStore


class _AllReduce(Protocol):
    def __call__(
        self,
        tensor: torch.Tensor,
        op: dist.ReduceOp.RedOpType = ...,
        group: dist.ProcessGroup | None = None,
    ) -> None: ...


class _AllGather(Protocol):
    @overload
    def __call__(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        /,
        group: dist.ProcessGroup | None = None,
        async_op: Literal[False] = False,
    ) -> None: ...
    @overload
    def __call__(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        /,
        group: dist.ProcessGroup | None = None,
        *,
        async_op: Literal[True],
    ) -> dist.Work: ...


class _AllToAll(Protocol):
    @overload
    def __call__(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        received: list[int] | None = None,
        sent: list[int] | None = None,
        /,
        group: dist.ProcessGroup | None = None,
        async_op: Literal[False] = False,
    ) -> None: ...
    @overload
    def __call__(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        received: list[int] | None = None,
        sent: list[int] | None = None,
        /,
        group: dist.ProcessGroup | None = None,
        *,
        async_op: Literal[True],
    ) -> dist.Work: ...


class _NewAllToAll(Protocol):
    def __call__(
        self,
        x_N: torch.Tensor,
        received: list[int] | None,
        sent: list[int] | None,
        /,
        group: dist.ProcessGroup,
    ) -> torch.Tensor: ...


class _AllGatherObject(Protocol):
    def __call__(
        self, found: list[_T], mine: _T, /, group: dist.ProcessGroup | None = None
    ) -> None: ...


class _Barrier(Protocol):
    def __call__(self, group: dist.ProcessGroup = ..., /) -> None: ...


class _SplitGroup(Protocol):
    def __call__(self, *, split_ranks: list[list[int]]) -> dist.ProcessGroup | None: ...


all_reduce = cast("_AllReduce", dist.all_reduce)
# Torch 2.13 renamed this function, and warns at the old name.
all_gather_single = cast(
    "_AllGather", getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
)
all_to_all_single = cast("_AllToAll", dist.all_to_all_single)
new_all_to_all_single = cast("_NewAllToAll", functional.all_to_all_single)
"""An all-to-all that returns the received rows as a new tensor."""
all_gather_object = cast("_AllGatherObject", dist.all_gather_object)
barrier = cast("_Barrier", dist.barrier)
split_group = cast("_SplitGroup", dist.split_group)
new_subgroups = cast(
    "Callable[[list[list[int]]], tuple[dist.ProcessGroup | None, list[dist.ProcessGroup]]]",
    dist.new_subgroups_by_enumeration,
)
"""Makes a group of each list of ranks; the first result is this rank's."""
default_store = cast("Callable[[], Store]", distributed_c10d._get_default_store)
"""The store of the default process group. Torch has no public name for it."""
resolve_group = cast("Callable[[str], dist.ProcessGroup]", distributed_c10d._resolve_process_group)
"""Returns the process group with a name. Ops that communicate take this name, not the group.

Torch's own function is private, and its versions differ in the type of the name.
"""


def sharded_dim(placement: Placement) -> int | None:
    """Return the dim that ``placement`` cuts; None: it cuts none."""
    return placement.dim if isinstance(placement, Shard) else None
