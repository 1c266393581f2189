"""Generation over ranks that share the experts; attention and everything else is each rank's own.

Every rank serves requests of its own over a cache of its own. Tokens travel to their experts as in
training, so every rank takes every step, with nothing to read as well: :class:`ExpertParallel` says
when all of them are done.

Legend: W ranks, E experts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from moetrain.kernels.backend import Backend
from moetrain.models.families import find_family
from moetrain.models.rules import parameter_rules, part_styles
from moetrain.models.transformer import Transformer
from moetrain.parallel.apply import set_dispatcher
from moetrain.parallel.expert.deepep import DeepEP, StaticSizes
from moetrain.parallel.expert.dispatch import AllToAll, ExpertParallelDispatcher, Transport
from moetrain.parallel.layout import chunk_of


class ExpertParallel:
    """What a :class:`~moetrain.rollout.engine.Generator` must know of its part of the experts."""

    def __init__(
        self,
        model: Transformer,
        group: dist.ProcessGroup,
        backend: Backend,
        transport: Transport | None = None,
    ) -> None:
        """Keeps of ``model``, which has all experts, those of this rank of ``group`` alone.

        A model on meta has all of them at no cost: :func:`moetrain.rollout.weights.replica`.

        Args:
            transport: brings tokens to the ranks of ``group``; None: the all-to-all.

        Raises:
            ValueError: the ranks cannot share the experts equally.
        """
        self.group, self.top_k = group, model.arch.num_experts_per_token
        plan = find_family(model.arch).plan(model.arch)
        styles, rules = part_styles(plan, model), parameter_rules(plan, model)
        if transport is None:
            transport = AllToAll(model.arch.num_experts, group, backend)
        self._transport = transport
        dispatcher = ExpertParallelDispatcher(model.arch.num_experts, transport, backend)
        set_dispatcher(model, styles, dispatcher)
        self._rows: dict[str, slice] = {}
        for name, rule in rules.items():
            if rule.style == "expert":
                owner, _, key = name.rpartition(".")
                whole = model.get_parameter(name)
                rows = chunk_of(whole.shape[0], group.size(), group.rank())
                local = nn.Parameter(whole.detach()[rows].clone(), whole.requires_grad)
                model.get_submodule(owner).register_parameter(key, local)
                self._rows[name] = rows

    def part(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """What this rank has of ``weight``, the whole parameter ``name``."""
        return weight[self._rows[name]] if name in self._rows else weight

    @property
    def can_fix_sizes(self) -> bool:
        """Whether :meth:`fixed_sizes` does anything; without it a step cannot be captured."""
        return isinstance(self._transport, DeepEP)

    def fixed_sizes(self, most: int) -> AbstractContextManager[None]:
        """Meanwhile no size depends on the routing: there is room for all that can arrive.

        Args:
            most: tokens that a rank reads, the same on all of them.
        """
        transport = self._transport
        if not isinstance(transport, DeepEP):
            return nullcontext()
        per_token = min(self.top_k, transport.num_experts // transport.num_ranks)
        return transport.sized(StaticSizes(most, transport.num_ranks * most * per_token))

    def agree(self, size: int, flag: bool, device: torch.device) -> tuple[int, bool]:
        """The largest size, and whether any flag is set, of all ranks.

        Collective; waits for the device: what a rank runs next must be what the others run.
        """
        numbers = torch.tensor([size, int(flag)], device=device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        size, is_any = numbers.tolist()
        return size, bool(is_any)
