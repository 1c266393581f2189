"""Collectives: torch's under names that every supported version has, and FSDP's own two.

Gradients are reduced in one of three modes:

    fp32_accum  rows travel in their own dtype (bf16: half the bytes of fp32) by one all-to-all, and
                the receiver adds them in fp32, in rank order. No partial sum is rounded to bf16, as
                it is at each hop of a ring, and the result does not depend on timing.
    fp32        rows are widened to fp32 and reduce-scattered: twice the bytes.
    bf16        rows are reduce-scattered in their own dtype.

Inside blocks tokens are exchanged by :func:`all_gather_rows` and :func:`sum_scatter_rows`,
functional collectives that the compiler sees.

Legend: W ranks of the group, N elements of one rank's row.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d

from moetrain.kernels.optim.reduction import sum_chunks

ReduceMode = Literal["fp32_accum", "fp32", "bf16"]

_Collective = Callable[..., Any]  # (output, input, ..., group, async_op) -> the work, if async

all_to_all_single: _Collective = dist.all_to_all_single
_all_to_all: _Collective = functional.all_to_all_single
# torch 2.13 renamed these two and warns on the old names.
if hasattr(dist, "all_gather_single"):
    all_gather_single: _Collective = dist.all_gather_single
    reduce_scatter_single: _Collective = dist.reduce_scatter_single
    _all_gather: _Collective = functional.all_gather_single
else:
    _all_gather = functional.all_gather_tensor
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor


def resolve_group(name: str) -> dist.ProcessGroup:
    """Give the process group whose ``group_name`` is ``name``."""
    # torch has no public way back from a name; 2.13 gives names a type of their own.
    return distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportArgumentType]


def all_gather_rows(x_ND: torch.Tensor, group: str) -> torch.Tensor:
    """Gather every rank's rows, in rank order."""
    return functional.wait_tensor(_all_gather(x_ND, 0, group))


def sum_scatter_rows(y_TD: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Give this rank's T / W rows of the sum of every rank's ``y_TD``, made in fp32 in rank order
    and rounded once."""
    arriving_TD = functional.wait_tensor(_all_to_all(y_TD, None, None, group))
    out_N = y_TD.new_empty(y_TD.numel() // ranks)
    return sum_chunks(arriving_TD.view(ranks, -1), out_N=out_N).view(-1, y_TD.shape[1])


def all_gather_start(
    x_N: torch.Tensor, group: dist.ProcessGroup, out_WN: torch.Tensor | None = None
) -> tuple[torch.Tensor, dist.Work]:
    """Begin to gather every rank's ``x_N`` in rank order; gives ``x_WN`` and the work."""
    x_WN = x_N.new_empty(group.size(), x_N.shape[0]) if out_WN is None else out_WN
    # Flat, because gloo does not stack.
    return x_WN, all_gather_single(x_WN.view(-1), x_N, group=group, async_op=True)


class PendingReduce(NamedTuple):
    """A reduce-scatter under way."""

    work: dist.Work | None
    """The collective, if there is one to wait for."""
    arriving: torch.Tensor
    """[W or 1, N]: rows that add up to the result, once ``work`` is done."""
    out_N: torch.Tensor
    accumulate: bool
    squares_B: torch.Tensor | None

    def finish(self) -> torch.Tensor:
        """Wait, and add up in fp32 into ``out_N``, which it returns."""
        if self.work is not None:
            self.work.wait()
        return sum_chunks(
            self.arriving,
            out_N=self.out_N,
            accumulate=self.accumulate,
            squares_B=self.squares_B,
        )


def reduce_scatter_start(
    chunks_WN: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    out_N: torch.Tensor,
    accumulate: bool,
    mode: ReduceMode,
    squares_B: torch.Tensor | None = None,
) -> PendingReduce:
    """Begin to sum, on rank r of ``group``, row r of every rank's ``chunks_WN``.

    Args:
        chunks_WN: bf16, fp16 or fp32, contiguous, one row for each rank in order. It must not
            change before the work is done.
        out_N: fp32 or bf16, contiguous; ``finish`` writes the sum to it, rounded once.
        accumulate: add to what ``out_N`` holds then instead of overwriting it.
        mode: how, see the head of this file.
        squares_B: as :func:`~moetrain.kernels.optim.reduction.sum_chunks` takes it.
    """
    if group.size() == 1:
        work, arriving = None, chunks_WN
    elif mode == "fp32_accum":
        arriving = torch.empty_like(chunks_WN)
        work = all_to_all_single(arriving, chunks_WN, group=group, async_op=True)
    else:
        rows_WN = chunks_WN.float() if mode == "fp32" else chunks_WN
        arriving = rows_WN.new_empty(1, rows_WN.shape[1])
        work = reduce_scatter_single(arriving, rows_WN, group=group, async_op=True)
    return PendingReduce(work, arriving, out_N, accumulate, squares_B)
