"""Copies of busy experts on idle ranks: nothing but the order of sums changes."""

import pytest
import test_parallel
import torch
import torch.distributed as dist
from distributed import spawn
from test_expert_parallel import (
    ALL_ON_ONE,
    EVEN,
    EXPERTS,
    FEW,
    NONE,
    ROUTINGS,
    UNEVEN,
    Pair,
    check_step,
    make_pair,
)
from test_parallel import TOLERANCE, Trainer, compare, plan_runs, run, run_layouts, words_of
from torch import nn

from moetrain.kernels.backend import Backend
from moetrain.models.moe import Router
from moetrain.parallel.expert.dispatch import AllToAll
from moetrain.parallel.expert.replicas import Replicas


def with_copies(spare: int, backend: Backend = "auto") -> Pair:
    """The layer with all experts, and one with this rank's and places for copies, any number."""
    pair, group = make_pair(backend), dist.distributed_c10d._get_default_group()
    replicas = Replicas(EXPERTS, spare, group, torch.device("cpu"), backend)
    replicas.least_rows = 1
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


class Skewed(Trainer):
    """Its routers favour the first experts, which are one rank's."""

    def __init__(self, *args):
        super().__init__(*args)
        for module in self.model.modules():
            if isinstance(module, Router):
                assert module.bias is not None
                module.bias += torch.tensor([0.5, 0.3] + [0.0] * (len(module.bias) - 2))


def run_skewed(runs):
    Replicas.least_rows = 1
    test_parallel.Trainer = Skewed
    return run_layouts(runs)


RUNS = {
    2: {
        "plain": ["ep", "tp+ep", "cp+ep"],
        "selective": ["ep"],
        "recompute": ["tp+ep"],
        "accumulate+last": ["ep"],
        "reshard": ["ep"],
        "compile+selective": ["ep"],
    },
    4: {
        "plain": ["ep", "ep+efsdp", "dp+tp+ep", "hsdp+ep"],
        "accumulate": ["ep+efsdp"],
        "reshard": ["ep+efsdp"],
        "recompute": ["dp+tp+ep"],
    },
}


@pytest.mark.parametrize("world", RUNS)
def test_a_run_with_copies_is_the_single_process_s(world, tiny_words, monkeypatch):
    monkeypatch.setattr(test_parallel, "Trainer", Skewed)
    words = words_of(tiny_words)
    expected = run([*words, "train.micro_batch_size=8"])
    layouts = sorted({layout for found in RUNS[world].values() for layout in found})
    runs = plan_runs(world, words, layouts, RUNS[world], only=RUNS)
    runs = {name: [*w, "moe.redundant_experts=2"] for name, w in runs.items()}
    answers = spawn(world, run_skewed, runs, timeout=300)[0]
    assert set(answers) == set(runs)
    compare(answers, expected, TOLERANCE)
