"""Redundant experts on idle ranks change nothing but the order of sums."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moetrain.config import ConfigError
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.kernels.experts.replicas import place_ids, plan_replicas
from moetrain.models.moe import Router
from moetrain.parallel.expert.dispatch import AllToAll
from moetrain.parallel.expert.redundant import RedundantExperts
from moetrain.runtime.backend import Backend
from tests.lib import one_answer
from tests.lib.distributed import spawn
from tests.lib.expert_layers import (
    ALL_ON_ONE,
    EVEN,
    EXPERTS,
    FEW,
    NONE,
    ROUTINGS,
    UNEVEN,
    WIDTH,
    Pair,
    check_step,
    make_pair,
)
from tests.lib.one_answer import TOLERANCE, Trainer, compare, plan_runs, run, run_layouts, words_of

SIZES = [
    # Ranks, experts of a rank, slots for copies, experts per token.
    *[(1, 3, 2, 2), (2, 1, 1, 1), (2, 5, 2, 3), (3, 2, 1, 2), (3, 1, 4, 1)],
    *[(4, 3, 0, 2), (4, 2, 3, 2), (8, 2, 1, 3), (8, 3, 4, 2)],
]


def routings(ranks, experts, top_k):
    """Yield each rank's ids: few tokens or none, evenly or to few experts, some to none."""
    for seed, power in itertools.product(range(4), (0, 1, 8)):
        generator = torch.Generator().manual_seed(seed)
        popular_E = torch.rand(experts, generator=generator) ** power
        batch = []
        for tokens in torch.randint(0, 31, (ranks,), generator=generator).tolist():
            chosen = popular_E.expand(tokens + 1, -1).multinomial(top_k, True, generator=generator)
            nowhere = torch.rand(chosen.shape, generator=generator) < 0.1
            batch.append(chosen.masked_fill(nowhere, -1).int()[:tokens])
        yield batch


@pytest.mark.tier("long", quick=["1-size0", "6-size0"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("least", [1, 6])
def test_every_row_goes_to_its_expert_and_no_rank_has_more_than_its_share(size, least):
    ranks, local, spare, top_k = size
    experts = ranks * local
    for ids in routings(ranks, experts, top_k):
        indices = [expert_indices(x, experts, "reference") for x in ids]
        counts_WE = torch.stack([found.counts_E for found in indices])
        taken = torch.zeros(ranks * (local + spare), dtype=torch.int64)
        for rank, (ids_TK, found) in enumerate(zip(ids, indices, strict=True)):
            plan = plan_replicas(counts_WE, spare, rank, least, "reference")
            fast = plan_replicas(counts_WE, spare, rank, least, "triton")
            for name, one, other in zip(plan._fields, plan, fast, strict=True):
                assert torch.equal(one, other), name
            places_TK = place_ids(ids_TK, found, plan, rank, "reference")
            assert torch.equal(places_TK, place_ids(ids_TK, found, plan, rank, "triton"))
            own_WL = torch.arange(experts).view(ranks, local)
            held = torch.cat((own_WL, plan.experts_WN), dim=1).flatten()
            used = ids_TK >= 0
            assert torch.equal(places_TK >= 0, used)
            assert torch.equal(held[places_TK[used].long()], ids_TK[used].long())
            taken += places_TK[used].bincount(minlength=len(taken))
        load_W, share = taken.view(ranks, -1).sum(1), -(-int(counts_WE.sum()) // ranks)
        assert torch.equal(load_W, plan.rows_WE.sum(1))
        before_W = counts_WE.sum(0).view(ranks, local).sum(1)
        assert load_W.max() <= max(share, before_W.max())
        copied = plan.experts_WN >= 0
        if least == 1 and not copied.all(1).any():  # slots were left
            assert load_W.max() <= share
        for rank, e in zip(*copied.nonzero(as_tuple=True), strict=True):
            assert plan.rows_WE[rank, plan.experts_WN[rank, e]] >= least


def test_the_plan_of_the_kernel_s_own_example():
    counts_WE = torch.tensor([[5, 1, 1, 0], [4, 1, 2, 0]], dtype=torch.int32)
    plan = plan_replicas(counts_WE, 1, 0)
    assert plan.experts_WN.tolist() == [[-1], [0]]
    assert plan.rows_WE.tolist() == [[5, 2, 0, 0], [4, 0, 3, 0]]
    assert plan.places_WE.tolist() == [[0, 1, -1, -1], [5, -1, 3, 4]]
    assert plan.stay_E.tolist() == [5, 1, 0, 0]


def with_copies(spare: int, backend: Backend = "auto", *, room: bool = False) -> Pair:
    """Return the layer with all experts, and one with this rank's, copies and ``room``."""
    pair, group = make_pair(backend), dist.distributed_c10d._get_default_group()
    redundant = RedundantExperts(EXPERTS, spare, group, torch.device("cpu"), backend)
    redundant.least_rows = 1
    pair.mine.dispatcher = AllToAll(EXPERTS, group, backend, redundant=redundant)
    if room:
        experts = pair.mine.experts
        experts.room = spare
        for name, own in list(experts.named_parameters()):
            whole = torch.full((len(own) + spare, *own.shape[1:]), torch.nan)
            whole[: len(own)] = own.detach()
            setattr(experts, name, nn.Parameter(whole[: len(own)]))
    return pair


def check_eager() -> None:
    """Check eager layers: each routing and number of tokens; every second step recomputes."""
    for number, spare in enumerate((1, 3, 9)):
        pair = with_copies(spare)
        for seed, tokens in enumerate((EVEN, UNEVEN, ALL_ON_ONE, NONE)):
            for turn, routing in enumerate(ROUTINGS, start=number + seed):
                check_step(pair, tokens, routing, seed, recompute=turn % 2 == 0)


def check_kernels() -> None:
    """Check kernels on every routing with two ranks, and on every second one with four.

    With four ranks, the other half of the routings is run with memory behind the experts.
    """
    every = dist.get_world_size() // 2
    for room in (True, False):
        pair = with_copies(2, "triton", room=room)
        for seed, routing in enumerate([*ROUTINGS][room % every :: every]):
            check_step(pair, FEW, routing, seed, recompute=seed % 2 == 0)


@pytest.mark.tier("wide", long=["2-check_kernels"])
@pytest.mark.parametrize("check", [check_eager, check_kernels])
@pytest.mark.parametrize("world", [2, 4])
def test_copies_change_nothing_but_the_order_of_sums(world, check):
    spawn(world, check, timeout=300)


COPIED: Any = torch.ops.moetrain


def inputs_of_copied(room: bool) -> tuple[Pair, dict[str, list[Any]]]:
    """Return arguments of every op on this rank, with a copy in each slot and rows of each expert.

    The layers hold the transport of copies, and must stay alive. With ``room`` there is memory
    behind the experts, which the ops that take them may use.
    """
    pair = with_copies(2, "triton", room=room)
    gate_up, down = pair.mine.experts.w_gate_up, pair.mine.experts.w_down
    local, group = len(down), dist.group.WORLD.group_name
    copies_WN = torch.tensor([[4, 6], [1, 0]], dtype=torch.int32)[: dist.get_world_size()]
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TD = torch.randn(9, WIDTH, generator=generator).requires_grad_()
    ids_TK = torch.arange(18, dtype=torch.int32).view(9, 2) % (local + 2)
    indices = expert_indices(ids_TK, local + 2)
    weights_TK = torch.rand(9, 2, generator=generator).requires_grad_()
    experts = gate_up.detach(), down.detach()
    *copies, _ = COPIED.start_copies(*experts, ids_TK, copies_WN, group)
    tensors = [x_TD, weights_TK, indices.slot_row_TK, indices.offsets_E, gate_up, down, *copies]
    how = [group, "bf16", "silu", room]
    _, a_R2F = COPIED.expert_mlp_copied(*tensors, copies_WN, *how, 18)
    dy_TD = torch.randn(9, WIDTH, generator=generator)
    saved = [x.detach() for x in (dy_TD, *tensors)]
    wholes = [torch.randn(local + 2, *w.shape[1:], generator=generator) for w in experts]
    return pair, {
        "start_copies": [*experts, ids_TK, copies_WN, group],
        "expert_mlp_copied": [*tensors, copies_WN, *how, 18],
        "expert_mlp_copied_backward": [*saved, copies_WN, a_R2F.detach(), *how, True],
        "assign_places": [ids_TK % EXPERTS, EXPERTS, 2, group, 1, "triton"],
        "fetch_copies": [gate_up, down, copies_WN, group],
        "give_back_gradients": [*wholes, copies_WN, group],
    }


def check_ops() -> None:
    """Check that each op leaves its inputs unchanged, declares its shapes, and can be traced.

    All ranks run it, because all ops communicate.
    """
    _pair, inputs = inputs_of_copied(room=False)
    for name, args in inputs.items():
        torch.library.opcheck(getattr(COPIED, name), tuple(args))


def check_room() -> None:
    """Check that memory behind the experts changes no bit, and that ops write only there."""
    found = []
    for room in (False, True):
        results = []
        _pair, inputs = inputs_of_copied(room)
        for name, args in inputs.items():
            before = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
            out = getattr(COPIED, name)(*args)
            results += [out] if isinstance(out, torch.Tensor) else out
            for x, y in zip(args, before, strict=True):
                assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, name
        found.append(results)
    for i, (apart, beside) in enumerate(zip(*found, strict=True)):
        assert torch.equal(apart, beside), f"result {i}"


@pytest.mark.tier("long")
@pytest.mark.parametrize("check", [check_ops, check_room])
def test_ops_with_copies_change_none_of_their_inputs(check):
    spawn(2, check, timeout=200)


def check_clones() -> None:
    """Check that a clone of the experts without the memory behind them is an error."""
    _pair, inputs = inputs_of_copied(room=True)
    args = inputs["expert_mlp_copied"]
    args[4] = args[4].detach().clone()
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        COPIED.expert_mlp_copied(*args)


def test_expert_mlp_copied_refuses_experts_without_the_memory_behind_them():
    spawn(2, check_clones)


class Skewed(Trainer):
    """All its tokens choose the first expert, which one rank owns."""

    def __init__(self, *args):
        super().__init__(*args)
        for module in self.model.modules():
            if isinstance(module, Router):
                assert module.bias is not None
                places = torch.arange(len(module.bias), device=module.bias.device)
                module.bias += 0.5 * (places == 0)


def run_skewed(runs):
    RedundantExperts.least_rows = 1
    one_answer.Trainer = Skewed
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


@pytest.mark.tier("wide", long=["4"])
@pytest.mark.parametrize("world", RUNS)
def test_a_run_with_copies_is_the_single_process_s(world, tiny_words, monkeypatch):
    monkeypatch.setattr(one_answer, "Trainer", Skewed)
    words = words_of(tiny_words)
    expected = run([*words, "train.micro_batch_size=8"])
    layouts = sorted({layout for found in RUNS[world].values() for layout in found})
    runs = plan_runs(world, words, layouts, RUNS[world], only=RUNS)
    runs = {name: [*w, "moe.redundant_experts=2"] for name, w in runs.items()}
    answers = spawn(world, run_skewed, runs, timeout=300)[0]
    assert set(answers) == set(runs)
    compare(answers, expected, TOLERANCE)


@pytest.mark.gpu("world")
@pytest.mark.parametrize("world", RUNS)
def test_run_with_copies_is_the_single_gpu_s(world, tiny_words, monkeypatch):
    """The runs are in fp32 on GPUs, with the fast kernels and memory behind the experts."""
    monkeypatch.setattr(one_answer, "Trainer", Skewed)
    words = words_of(tiny_words, "train.device=cuda", "train.dtype=float32")
    words += ["kernels.attention=reference"]  # fp32 throughout
    expected = run([*words, "train.micro_batch_size=8"])
    layouts = sorted({layout for found in RUNS[world].values() for layout in found})
    runs = plan_runs(world, words, layouts, RUNS[world], only=RUNS)
    runs = {name: [*w, "moe.redundant_experts=2"] for name, w in runs.items()}
    answers = spawn(world, run_skewed, runs, device_type="cuda", timeout=300)[0]
    assert set(answers) == set(runs)
    compare(answers, expected, TOLERANCE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("parallel.ep=1", "parallel.ep 1"),
        ("parallel.ep=2 lora.rank=4", "lora.rank 4"),
        ("parallel.ep=2 optim.offload_fraction=0.5", "optim.offload_fraction 0.5"),
    ],
)
def test_redundant_experts_refuse_unsupported_settings(words, said, tiny):
    with pytest.raises(ConfigError, match=f"moe.redundant_experts: 2 contradicts {said}"):
        tiny("moe.redundant_experts=2", *words.split())
