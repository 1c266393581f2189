"""Ranks that generate together: they divide the experts of a model, or the heads of the cache.

With :class:`ExpertParallel` every rank has requests of its own.

With :class:`HeadParallel` the first rank has the requests. It plans every step, and sends the plan
to the others. Each rank computes attention for its own key/value heads and keeps only their keys
and values. Everything else is computed on every rank. Heads do not depend on each other, so the
result is bitwise equal to that of a single rank. Every rank computes all heads of a layer if the
number of its key/value heads is not a multiple of the number of ranks. Every rank keeps the whole
state of each layer that carries one. Left out on purpose: CUDA graphs of such steps.

Legend: B batch, S sequence, H query heads, G key/value heads, h query heads of a rank, g key/value
heads of a rank, d width of a query and a key, v width of a value, W ranks.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moetrain.generate.paged_attention import PagedAttention
from moetrain.models.layers import Context
from moetrain.models.transformer import Transformer
from moetrain.parallel.apply import set_dispatcher
from moetrain.parallel.expert.deepep import DeepEP, StaticSizes
from moetrain.parallel.expert.dispatch import AllToAll, ExpertParallelDispatcher
from moetrain.parallel.mesh import all_gather_start, chunk_of
from moetrain.parallel.world import World
from moetrain.runtime.backend import Backend


class ExpertParallel:
    """This rank's part of the experts of a generator's model. The rank has all other weights.

    Tokens are dispatched to their experts as in training, so every rank takes part in every step,
    even if it has no tokens to read.
    """

    def __init__(
        self,
        model: Transformer,
        group: dist.ProcessGroup,
        backend: Backend,
        dispatcher: ExpertParallelDispatcher | None = None,
    ) -> None:
        """Remove other ranks' experts from ``model``, which has all of them at first.

        ``model`` may be on the meta device.

        Without ``dispatcher`` tokens are dispatched by an all-to-all over ``group``.
        """
        self.group = group
        self.top_k = model.arch.num_experts_per_token
        plan = model.arch.plan()
        styles, rules = plan.styles, plan.rules(model)
        self._dispatcher = dispatcher or AllToAll(model.arch.num_experts, group, backend)
        set_dispatcher(model, styles, self._dispatcher)
        for name, rule in rules.items():
            if rule.style == "expert":
                owner, _, key = name.rpartition(".")
                whole = model.get_parameter(name)
                rows = chunk_of(whole.shape[0], group.size(), group.rank())
                local = nn.Parameter(whole.detach()[rows].clone(), whole.requires_grad)
                model.get_submodule(owner).register_parameter(key, local)

    @property
    def can_fix_sizes(self) -> bool:
        """True if :meth:`fixed_sizes` can be called. Otherwise steps cannot be captured."""
        return isinstance(self._dispatcher, DeepEP)

    def fixed_sizes(self, most: int) -> AbstractContextManager[None]:
        """Return a context in which all sizes are fixed.

        Inside it every rank reads ``most`` tokens, and there is room for all of them on one rank.
        """
        dispatcher = self._dispatcher
        assert isinstance(dispatcher, DeepEP)  # the caller has checked can_fix_sizes
        per_token = min(self.top_k, dispatcher.num_local_experts)
        return dispatcher.sized(StaticSizes(most, dispatcher.num_ranks * most * per_token))

    def agree(self, size: int, flag: bool, device: torch.device) -> tuple[int, bool]:
        """Return the largest ``size`` of all ranks, and True if ``flag`` is True on any rank.

        Collective; the host waits for the result.
        """
        numbers = torch.tensor([size, int(flag)], device=device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        size, is_any = numbers.tolist()
        return size, bool(is_any)


class HeadParallel:
    """The ranks that divide the cache by heads. All have the same model and run the same steps.

    Attributes:
        leads: True on the first rank, which has the requests.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.leads = group, group.rank() == 0

    def from_leader(self, own: Any) -> Any:
        """Return the first rank's value of ``own``. Collective; the host waits for the message."""
        found = [own]
        dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]


def sharing_heads(
    world: World, experts: ExpertParallel | None
) -> tuple[HeadParallel | None, list[int]]:
    """Return the ranks that share heads with this one, and the list of all ranks with requests.

    The ranks of ``parallel.cp`` share heads; None: ``parallel.cp`` is 1. Collective.
    """
    cp = world.meshes.dense.get_group("cp")
    heads = HeadParallel(cp) if cp.size() > 1 else None
    if heads and experts:  # the groups of experts and of heads may overlap, so all ranks agree
        experts.group = world.meshes.everyone
    leads = world.gather(heads is None or heads.leads)
    return heads, [rank for rank, is_one in enumerate(leads) if is_one]


class SplitAttention(PagedAttention):
    """Attention of one layer whose pages hold this rank's heads. Collective.

    The arguments and the result of a call have all heads.
    """

    rotates = False  # the keys of all heads are rotated before the call

    def __init__(
        self, group: dist.ProcessGroup, num_pages: int, page_size: int, window: int | None
    ) -> None:
        super().__init__(num_pages, page_size, window)
        self.group = group

    def __call__(
        self,
        q_BSHd: torch.Tensor,
        k_BSGd: torch.Tensor,
        v_BSGv: torch.Tensor,
        context: Context,
        scale: float | None = None,
        *,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with this rank's heads, and gather the results of all."""
        ranks, rank = self.group.size(), self.group.rank()
        if k_BSGd.shape[2] % ranks:  # every rank computes all heads
            return super().__call__(q_BSHd, k_BSGd, v_BSGv, context, scale, sinks_H=sinks_H)
        q_BShd, k_BSgd, v_BSgv = (
            x.chunk(ranks, 2)[rank].contiguous() for x in (q_BSHd, k_BSGd, v_BSGv)
        )
        sinks_h = None if sinks_H is None else sinks_H.chunk(ranks)[rank]
        y_BShv = super().__call__(q_BShd, k_BSgd, v_BSgv, context, scale, sinks_H=sinks_h)
        found_WN, work = all_gather_start(y_BShv.flatten(), self.group)
        work.wait()
        return found_WN.view(ranks, *y_BShv.shape).movedim(0, 2).flatten(2, 3)
