"""DeepEP within machines, over a fake of its package: the bits of one hop by a collective.

tests/parallel/expert/test_deepep_gpu.py tests the package itself.
"""

import random
import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moetrain.kernels.experts.deepep import disconnect
from moetrain.parallel import apply
from moetrain.parallel.expert.deepep import DeepEP, DeepEPInside
from moetrain.parallel.expert.dispatch import AllToAll
from moetrain.runtime.backend import saved_ops
from tests.lib import fake_deep_ep
from tests.lib.distributed import spawn
from tests.lib.expert_layers import CountExchanges
from tests.lib.machines_of_ranks import (
    ALL_ON_ONE,
    NONE,
    SMALL,
    UNEVEN,
    be_strict,
    check_kernels,
    check_order,
    equal,
    hops_of,
    random_batch,
    run_two,
)
from tests.lib.one_answer import run, words_of
from tests.lib.transports import (
    ROUTINGS,
    Size,
    make_batch,
    make_experts,
    plainly,
    recomputed,
    run_layer,
    run_step,
)


def both(size: Size, per_machine: int, **how) -> tuple[AllToAll, DeepEPInside]:
    """Return an all-to-all over all ranks, and one of two hops, the second by DeepEP."""
    sys.modules["deep_ep"] = fake_deep_ep
    world, hops = dist.group.WORLD, hops_of(per_machine)
    flat = AllToAll(size.experts, world, **how)
    here = size.experts // hops.across.size()
    near = DeepEP(here, hops.inside, size.width, num_sms=6, **how)
    return flat, DeepEPInside(near, size.experts, world, hops=hops, **how)


def calls_of(way, *inputs) -> Counter[str]:
    fake_deep_ep.calls.clear()
    run_step(way, *inputs)
    return Counter(fake_deep_ep.calls)


def check_bits(per_machine: int) -> None:
    be_strict()
    flat, near = both(SMALL, per_machine)
    cases = [(tokens, r) for tokens in (UNEVEN, ALL_ON_ONE, NONE) for r in ROUTINGS]
    for seed, (tokens, routing) in enumerate(cases):
        dtype = torch.bfloat16 if seed % 2 else torch.float32
        mine = tokens[(dist.get_rank() + seed) % len(tokens)]
        batch = make_batch(SMALL, mine, routing, seed, dtype=dtype)
        experts = make_experts(SMALL, dtype=dtype)
        want = run_step(partial(run_layer, flat), batch, experts)
        case = f"machines of {per_machine}, {tokens}, {routing}"
        equal(run_step(partial(run_layer, near), batch, experts), want, case)
        check_order(near, batch, case)
    # DeepEP computes no sum, and the host waits for none of its kernels.
    called = calls_of(partial(run_layer, near), batch, experts)
    assert called == {"dispatch": 1, "cached dispatch": 1}


def check_random(seeds: int) -> None:
    """Check random sizes, tokens and routings: bit for bit, with two calls in flight."""
    rank, world = dist.get_rank(), dist.get_world_size()
    be_strict()
    for seed in range(seeds):
        alike, own = random.Random(seed), random.Random(seed * 100 + rank)
        num_experts = world * alike.choice([1, 2, 5])
        size = Size(num_experts, alike.randint(1, min(num_experts, 9)), alike.choice([8, 24]), 8)
        dtype = alike.choice([torch.float32, torch.bfloat16])
        experts = make_experts(size, dtype=dtype)
        pair = [random_batch(size, own, alike, seed * 2 + i, dtype) for i in range(2)]
        flat, near = both(size, 2)
        want = [run_step(partial(run_layer, flat), batch, experts) for batch in pair]
        for got, one in zip(run_two(near, pair, experts), want, strict=True):
            equal(got, one, (seed, size))
    disconnect()


def check_everything() -> None:
    check_bits(2)
    check_kernels(both)
    check_random(20)


@pytest.mark.tier("long")
def test_bits_are_those_of_one_hop():
    spawn(4, check_everything, timeout=180.0)


@pytest.mark.tier("wide", long=["2"])
@pytest.mark.parametrize("per_machine", [2, 4])
def test_bits_over_eight_ranks(per_machine):
    spawn(8, check_bits, per_machine, timeout=180.0)


def keeping(layer, *inputs):
    """Recompute, except the parts of a dispatch that selective recomputation keeps."""
    kept = saved_ops(["dispatch"])

    def policy(ctx, op, *args, **kwargs):
        keep = isinstance(op, torch._ops.OpOverload) and op.name() in kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(layer, *inputs, use_reentrant=False, context_fn=contexts)


def check_compiled() -> None:
    """Check that one graph serves every routing, and tokens are sent again only if none are kept.

    Without recomputation one rank compiles; its collectives meet those of the others' eager layers.
    A layer that is recomputed whole is never compiled with its recomputation.
    """
    flat, near = both(SMALL, 2)
    experts = make_experts(SMALL)
    for how in (plainly, keeping, recomputed):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        layer = partial(how, partial(run_layer, near))
        compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
        is_plain = how is recomputed or (how is plainly and dist.get_rank() > 0)
        compiled = layer if is_plain else compiled
        for seed, routing in enumerate(("natural", "one-hot", "empty")):
            batch = make_batch(SMALL, UNEVEN[dist.get_rank()], routing, seed)
            want = run_step(partial(run_layer, flat), batch, experts)
            for way in (layer, compiled):
                # Nothing is compiled while calls are counted.
                with CountExchanges() if way is layer else nullcontext() as counted:
                    fake_deep_ep.calls.clear()
                    equal(run_step(way, batch, experts), want, (how.__name__, routing))
                calls = {"dispatch": 1 + (how is recomputed), "cached dispatch": 1}
                assert fake_deep_ep.calls == calls, how.__name__
                if counted is not None and how is not recomputed:
                    assert counted.calls == {"exchange_counts": 1, "exchange_rows": 4}
        assert counter.frame_count == (not is_plain), f"{how.__name__} was compiled again"


@pytest.mark.tier("long")
def test_a_layer_is_one_graph():
    spawn(4, check_compiled, timeout=300.0)


def train(words: list[str]) -> None:
    """Train the same run on one machine by an all-to-all, and on two by DeepEP."""
    want = run([*words, "launch.gpus_per_machine=4", "moe.dispatcher=alltoall"])
    sys.modules["deep_ep"] = fake_deep_ep
    apply.why_not = lambda *_, **__: None
    fake_deep_ep.calls.clear()
    got = run([*words, "launch.gpus_per_machine=2", "moe.deepep_num_sms=6"])
    calls = fake_deep_ep.calls
    assert calls["dispatch"] == calls["cached dispatch"] > 0
    assert calls["combine"] == 0
    assert torch.equal(got[0], want[0]), f"losses and norms {got[0] - want[0]}"
    equal(got[1], want[1], "gradients")
    equal(got[2], want[2], "parameters")


@pytest.mark.tier("long")
def test_a_run_has_the_bits_of_one_machine(tiny_words):
    words = words_of(tiny_words, "parallel.ep=4", "activation.policy=selective")
    spawn(4, train, words, timeout=180.0)
