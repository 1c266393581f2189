"""Full parameters that are away between a block's forward and its backward.

    forward   block i runs; its full parameters are freed
    backward  before block i: those of i, gathered while block i+1 computed, are waited for,
              and the gather of i-1 starts; after block i, autograd lets go of them

Autograd saved these very tensors, or views of them, and a compiled block did too: they are inputs
of its graph. So the tensors and their storages stay, and only the memory behind a storage comes and
goes. It is written through ``.data``, an alias with a version counter of its own: autograd would
else take the second gather for a change of what it saved.

What triggers the gather is an identity around the block's outputs: its backward runs once all their
gradients are there, before anything of the block's own.

Left out on purpose: recomputed blocks (``activation.policy = "full"``), which gather again anyway.

Legend: W ranks of the FSDP axis, N numbers of one rank's shard of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from moetrain.parallel.fsdp import Bucket, Gathering


class Memory:
    """What a bucket's full parameters lie in: the gathered buffer, or where each was copied to."""

    def __init__(
        self, bucket: Bucket, whole_WN: torch.Tensor, rows: Sequence[torch.Tensor]
    ) -> None:
        self.bucket = bucket
        self.tensors = [t.data for t in ([whole_WN] if bucket.rows_are_views else rows)]
        self.gathering: Gathering | None = None

    def free(self) -> None:
        """Give the memory back; the tensors must not be read until :meth:`finish`."""
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)

    def start(self) -> None:
        """Begin to gather again, unless that is under way."""
        if self.gathering is None:
            out_WN = _allocate(self.tensors[0]) if self.bucket.rows_are_views else None
            self.gathering = self.bucket.begin_gather(out_WN)

    def finish(self) -> None:
        """The tensors hold what they held."""
        assert self.gathering is not None  # start came first
        whole_WN, work = self.gathering
        if work is not None:
            work.wait()
        if not self.bucket.rows_are_views:
            for tensor, row in zip(self.tensors, self.bucket.rows(whole_WN), strict=True):
                _allocate(tensor).copy_(row)


def _allocate(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` (contiguous, at its storage's start) with memory again."""
    tensor.untyped_storage().resize_(tensor.nbytes)
    return tensor


class Loan:
    """One block's full parameters for one forward and its backward."""

    def __init__(self, memories: Sequence[Memory], index: int, below: Loan | None) -> None:
        self.memories, self.index = memories, index
        # Of the same forward, which is the next to run in the backward.
        self.below = below if below is not None and below.index == index - 1 else None

    def wrap(self, outputs: Any) -> Any:
        """``outputs``, whose backward brings the parameters back first."""
        leaves, spec = pytree.tree_flatten(outputs)
        at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        for i, leaf in zip(at, _Return.apply(self, *(leaves[i] for i in at)), strict=True):
            leaves[i] = leaf
        return pytree.tree_unflatten(leaves, spec)

    def close(self) -> None:
        """The forward is done."""
        for memory in self.memories:
            memory.free()

    @record_function("fsdp_gather")
    def start(self) -> None:
        """Begin to bring back what :meth:`close` freed."""
        for memory in self.memories:
            memory.start()

    def reopen(self) -> None:
        """The backward is next; the neighbour's gather starts behind this one."""
        self.start()
        for memory in self.memories:
            memory.finish()
        if self.below is not None:
            self.below.start()
        # From here on only autograd holds the tensors, until it has used them.
        self.memories, self.below = (), None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loan: Loan, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.loan = loan
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.loan.reopen()
        return None, *gradients
