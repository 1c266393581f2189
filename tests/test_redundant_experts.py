"""Copies of busy experts on idle ranks: the plan, and that nothing but the order of sums changes."""

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from test_expert_parallel import (
    ALL_ON_ONE,
    CONTEXT,
    EVEN,
    EXPERTS,
    FEW,
    NONE,
    ROUTINGS,
    UNEVEN,
    WIDTH,
    Pair,
    check_step,
    local_experts,
    make_pair,
)
from torch import nn

from moetrain.kernels.backend import Backend
from moetrain.parallel.expert.dispatch import AllToAll
from moetrain.parallel.expert.replicas import Replicas


def with_copies(spare: int, backend: Backend = "auto") -> Pair:
    """The layer with all experts, and one with this rank's and places for copies, any number."""
    pair, group = make_pair(backend), dist.group.WORLD
    replicas = Replicas(EXPERTS, spare, group, torch.device("cpu"), backend, least_rows=1)
    pair.mine.dispatcher = AllToAll(EXPERTS, group, backend, replicas=replicas)
    for name, own in list(pair.mine.experts.named_parameters()):
        copies = torch.full((spare, *own.shape[1:]), torch.nan)
        setattr(pair.mine.experts, name, nn.Parameter(torch.cat((own.detach(), copies))))
    return pair


def check_eager() -> None:
    for spare in (1, 3, 9):
        pair = with_copies(spare)
        for seed, tokens in enumerate((EVEN, UNEVEN, ALL_ON_ONE, NONE)):
            for routing in ROUTINGS:
                for recompute in (False, True):
                    check_step(pair, tokens, routing, seed, recompute)


def check_kernels() -> None:
    pair = with_copies(2, "triton")
    for seed, routing in enumerate(ROUTINGS):
        check_step(pair, FEW, routing, seed, recompute=seed % 2 == 0)


@pytest.mark.parametrize("check", [check_eager, check_kernels])
@pytest.mark.parametrize("world", [2, 4])
def test_copies_change_nothing_but_the_order_of_sums(world, check):
    spawn(world, check, timeout=300)
