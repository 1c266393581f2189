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

from moetrain.kernels import Backend
from moetrain.models import Transformer, find_family
from moetrain.models.rules import parameter_rules, part_styles
from moetrain.parallel.alltoall import AllToAll
from moetrain.parallel.apply import set_dispatcher
from moetrain.parallel.expert import ExpertParallelDispatcher
from moetrain.parallel.layout import chunk_of


class ExpertParallel:
    """What a :class:`~moetrain.rollout.engine.Generator` must know of its part of the experts."""

    def __init__(self, model: Transformer, group: dist.ProcessGroup, backend: Backend) -> None:
        """Keeps of ``model``, which has all experts, those of this rank of ``group`` alone.

        Raises:
            ValueError: the ranks cannot share the experts equally.
        """
        self.group = group
        plan = find_family(model.arch).plan(model.arch)
        styles, rules = part_styles(plan, model), parameter_rules(plan, model)
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
    def is_static(self) -> bool:
        """Whether sizes do not depend on the routing, so that a step can be captured."""
        return getattr(self._transport, "static", None) is not None

    def exactly(self) -> AbstractContextManager[None]:
        """Meanwhile there is room for as many tokens as arrive."""
        return self._transport.exactly() if self.is_static else nullcontext()

    def agree(self, size: int, is_mixed: bool, device: torch.device) -> tuple[int, bool]:
        """The largest size, and whether any is mixed, of all ranks. Collective; waits."""
        numbers = torch.tensor([size, int(is_mixed)], device=device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        size, any_mixed = numbers.tolist()
        return size, bool(any_mixed)

    def is_any(self, flag: bool, device: torch.device) -> bool:
        """Whether ``flag`` is set on any rank. Collective; waits for the device."""
        count = torch.tensor([int(flag)], device=device)
        dist.all_reduce(count, group=self.group)
        return bool(count.item())
