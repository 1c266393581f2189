"""Ranks that hold a copy of a bucket's shard, and whose gradients are added up."""

import torch
import torch.distributed as dist

from moetrain.parallel.collectives import all_reduce
from moetrain.parallel.waits import waiting


class ReplicaCopies:
    """The replicas of data parallelism: ``group`` holds the same shard (``dp_replicate``)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.count = group, group.size()

    def add(self, gradient_N: torch.Tensor) -> None:
        """Sum ``gradient_N`` (fp32) over the replicas, in place. Collective."""
        with waiting(gradient_N.device):
            all_reduce(gradient_N, group=self.group)


class TiedCopy:
    """The other copy of a tied embedding, which another pipeline stage uses."""

    count = 2

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        """``rank``: the one of ``group`` that holds the other copy."""
        self.group, self.rank = group, rank

    def add(self, gradient_N: torch.Tensor) -> None:
        """Add the other rank's gradient to ``gradient_N`` (fp32), in place. Both ranks call it."""
        theirs_N = torch.empty_like(gradient_N)
        pairs = ((dist.isend, gradient_N), (dist.irecv, theirs_N))
        ops = [dist.P2POp(op, x, group=self.group, group_peer=self.rank) for op, x in pairs]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        gradient_N += theirs_N
