"""Generation over ranks that share the experts; each rank has everything else for itself.

Every rank serves its own requests over its own cache. Tokens travel to their experts as in
training, so every rank takes every step, even with nothing to read; :class:`ExpertParallel` tells
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
    """This rank's part of the experts of a :class:`~moetrain.rollout.engine.Generator`'s model."""

    def __init__(
        self,
        model: Transformer,
        group: dist.ProcessGroup,
        backend: Backend,
        transport: Transport | None = None,
    ) -> None:
        """Keep only this rank's experts of ``model``, which has all of them.

        On the meta device all experts cost no memory: :func:`moetrain.rollout.weights.replica`.

        Args:
            transport: sends tokens to the ranks of ``group``; None: the all-to-all.

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
        """Return this rank's part of ``weight``, the whole parameter ``name``."""
        return weight[self._rows[name]] if name in self._rows else weight

    @property
    def can_fix_sizes(self) -> bool:
        """Whether :meth:`fixed_sizes` has an effect; otherwise a step cannot be captured."""
        return isinstance(self._transport, DeepEP)

    def fixed_sizes(self, most: int) -> AbstractContextManager[None]:
        """Fix all sizes inside, with room for all tokens that can arrive.

        Args:
            most: tokens that a rank reads, the same on all ranks.
        """
        transport = self._transport
        if not isinstance(transport, DeepEP):
            return nullcontext()
        per_token = min(self.top_k, transport.num_experts // transport.num_ranks)
        return transport.sized(StaticSizes(most, transport.num_ranks * most * per_token))

    def agree(self, size: int, flag: bool, device: torch.device) -> tuple[int, bool]:
        """Return all ranks' largest size, and whether any of them has set its flag.

        Collective; waits for the device, since all ranks must run the same step next.
        """
        numbers = torch.tensor([size, int(flag)], device=device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        size, is_any = numbers.tolist()
        return size, bool(is_any)
