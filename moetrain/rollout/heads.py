"""Generation whose ranks serve the same sequences, each with the cache of a part of the heads.

The first rank has the requests and plans every step; the others are told what to read. Attention,
and the memory of what was read, are of a rank's own key/value heads; all else is computed on every
rank. Heads know nothing of each other, so the bits are those of one rank. Layers whose key/value
heads the ranks do not divide, and states, are whole on every rank. Left out on purpose: graphs.
"""

from typing import Any

import torch
import torch.distributed as dist

from moetrain.parallel.mesh import all_gather_start
from moetrain.rollout.pages import PagedAttention


class HeadParallel:
    """The ranks of ``group``, which have the same model and take every step together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.leads = group, group.rank() == 0

    def told(self, given: Any) -> Any:
        """Return what the first rank gives. Collective."""
        found = [given]
        dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]


class SplitAttention(PagedAttention):
    """Takes all heads and returns those of all; its pages are of this rank's. Collective."""

    def __init__(self, group: dist.ProcessGroup, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.group = group

    def __call__(self, *qkv: Any, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        (q, k, v, *how), ranks, rank = qkv, self.group.size(), self.group.rank()
        if k.shape[2] % ranks:
            return super().__call__(q, k, v, *how, sinks_H=sinks_H)
        own = [x.chunk(ranks, 2)[rank].contiguous() for x in (q, k, v)]
        sinks_H = None if sinks_H is None else sinks_H.chunk(ranks)[rank]
        y_BShv = super().__call__(*own, *how, sinks_H=sinks_H)
        found_WN, work = all_gather_start(y_BShv.flatten(), self.group)
        work.wait()
        return found_WN.view(ranks, *y_BShv.shape).movedim(0, 2).flatten(2, 3)
