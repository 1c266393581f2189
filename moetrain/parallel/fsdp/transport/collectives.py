"""Collectives: shards travel by an all-gather, gradients by an all-to-all.

Gradients are sent in the compute dtype. One all-to-all brings a row from each rank, and the
receiver adds these rows in fp32, in rank order: no partial sum is rounded to bf16, as it is at each
hop of a ring, and the result does not depend on timing.

Legend: W ranks of the group, N elements of one rank's shard of a bucket.
"""

import torch
import torch.distributed as dist

from moetrain.kernels.optim.reduction import sum_chunks
from moetrain.parallel.collectives import all_to_all_single
from moetrain.parallel.fsdp.transport.protocol import Wait
from moetrain.parallel.mesh import all_gather_start


class Collectives:
    """Carries a bucket by torch's collectives over ``group``, on every device."""

    is_shared = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def gather(self, shard_N: torch.Tensor, out_WN: torch.Tensor) -> Wait | None:
        if self.group.size() == 1:
            return None
        return all_gather_start(shard_N, self.group, out_WN)[1].wait

    def reduce(
        self,
        chunks_WN: torch.Tensor,
        *,
        out_N: torch.Tensor,
        accumulate: bool,
        squares_B: torch.Tensor | None,
    ) -> Wait | None:
        wait = reduce_scatter_start(
            chunks_WN, self.group, out_N=out_N, accumulate=accumulate, squares_B=squares_B
        )
        if self.group.size() > 1:
            return wait
        wait()  # nothing is in flight, and the function would keep large tensors alive
        return None


def reduce_scatter_start(
    chunks_WN: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    out_N: torch.Tensor,
    accumulate: bool,
    squares_B: torch.Tensor | None = None,
) -> Wait:
    """Begin to sum, on rank r of ``group``, row r of every rank's ``chunks_WN``.

    Args:
        chunks_WN: bf16, fp16 or fp32, contiguous, one row for each rank in order. It must not
            change before the work is done.
        group: the ranks.
        out_N: fp32 or bf16, contiguous. The returned function writes the sum to it, computed in
            fp32 and rounded once.
        accumulate: add to what ``out_N`` holds then instead of overwriting it.
        squares_B: as :func:`~moetrain.kernels.optim.reduction.sum_chunks` takes it.
    """
    work, arriving_WN = None, chunks_WN
    if group.size() > 1:
        arriving_WN = torch.empty_like(chunks_WN)
        work = all_to_all_single(arriving_WN, chunks_WN, group=group, async_op=True)

    def wait() -> None:
        if work is not None:
            work.wait()
        sum_chunks(arriving_WN, out_N=out_N, accumulate=accumulate, squares_B=squares_B)

    return wait
