"""Dispatch across machines: the bits of one machine, and fewer bytes between machines.

A machine is simulated by several ranks; the collectives count the bytes that cross machines.
"""

import random
from collections import Counter
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from moetrain.kernels.experts.mlp import expert_mlp
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.parallel.expert import dispatch
from moetrain.parallel.expert.dispatch import AllToAll
from tests.lib.distributed import spawn
from tests.lib.expert_layers import CountExchanges
from tests.lib.machines_of_ranks import (
    ALL_ON_ONE,
    NONE,
    SMALL,
    UNEVEN,
    be_strict,
    both,
    check_kernels,
    check_order,
    equal,
    random_batch,
    run_two,
)
from tests.lib.one_answer import run, words_of
from tests.lib.transports import (
    ROUTINGS,
    Batch,
    Size,
    make_batch,
    make_experts,
    plainly,
    run_layer,
    run_step,
    saving,
)


class Crossing:
    """Counts bytes of rows that stay on a machine, and of rows that do not."""

    def __init__(self, per_machine: int) -> None:
        self.bytes: Counter[str] = Counter()
        self.per_machine = per_machine
        self.patch = patch.object(dispatch, "all_to_all_single", self.all_to_all)

    def __enter__(self):
        self.patch.start()
        return self.bytes

    def __exit__(self, *_):
        self.patch.stop()

    def all_to_all(self, out, given, received=None, sent=None, **how):
        ranks = dist.get_process_group_ranks(how["group"])
        mine = dist.get_rank() // self.per_machine
        for rank, size in zip(ranks, sent or [0] * len(ranks), strict=True):  # 0: a few counts
            where = "inside" if rank // self.per_machine == mine else "across"
            self.bytes[where] += size * given[:1].nbytes
        return dist.all_to_all_single(out, given, received, sent, **how)


def machines_of(world: int) -> list[int]:
    """Return numbers of ranks per machine for which there are several machines."""
    return [n for n in (1, 2, 4) if n < world]


def check_bits() -> None:
    """Check every routing, on every number of machines."""
    rank, world = dist.get_rank(), dist.get_world_size()
    be_strict()
    cases = [(tokens, r) for tokens in (UNEVEN, ALL_ON_ONE, NONE) for r in ROUTINGS]
    ways = {n: both(SMALL, n) for n in machines_of(world)}
    totals: Counter[tuple[int, str]] = Counter()
    for seed, (tokens, routing) in enumerate(cases):
        dtype = torch.bfloat16 if seed % 2 else torch.float32
        batch = make_batch(SMALL, tokens[rank], routing, seed, dtype=dtype)
        experts = make_experts(SMALL, dtype=dtype)
        for per_machine, (flat, near) in ways.items():
            found = {}
            for name, transport in (("flat", flat), ("near", near)):
                with Crossing(per_machine) as counted:
                    found[name] = run_step(partial(run_layer, transport), batch, experts)
                totals[per_machine, name] += counted["across"]
            case = f"{world // per_machine} machines of {per_machine}, {tokens}, {routing}"
            equal(found["near"], found["flat"], case)
            check_order(near, batch, case)
            if dtype == torch.float32:
                check_one_process(found["near"], batch, case)
    for per_machine in ways:
        sums = torch.tensor([totals[per_machine, name] for name in ("near", "flat")])
        dist.all_reduce(sums)
        assert sums[0] < sums[1] or per_machine == 1, f"machines of {per_machine} save nothing"


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
        ways = {n: both(size, n) for n in machines_of(world)}
        flat, _ = ways[1]
        want = [run_step(partial(run_layer, flat), batch, experts) for batch in pair]
        for per_machine, (_, near) in ways.items():
            case = f"seed {seed}, machines of {per_machine}, {size}"
            for got, one in zip(run_two(near, pair, experts), want, strict=True):
                equal(got, one, case)


def check_one_process(found: dict, batch: Batch, case: str) -> None:
    """Check that experts' gradients have the bits of one process with all tokens and experts."""
    world, rank = dist.get_world_size(), dist.get_rank()
    everything: list = [None] * world
    mine = (*batch, *(x.detach() for x in make_experts(SMALL)))
    dist.all_gather_object(everything, mine)
    x_TD, ids_TK, weights_TK, slope_TD, gate_up, down = (
        torch.cat(parts) for parts in zip(*everything, strict=True)
    )
    gate_up, down = gate_up.requires_grad_(), down.requires_grad_()
    indices = expert_indices(ids_TK, SMALL.experts)
    y_TD = expert_mlp(x_TD, weights_TK, indices, gate_up, down)
    grads = torch.autograd.grad(y_TD, (gate_up, down), slope_TD)
    own = slice(rank * SMALL.experts // world, (rank + 1) * SMALL.experts // world)
    want = dict(zip(("gate_up", "down"), (grad[own] for grad in grads), strict=True))
    equal(found, want, f"{case}, beside one process")


@pytest.mark.tier("wide", long=["4"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_bits_are_those_of_one_machine(world):
    spawn(world, check_bits, timeout=180.0)


@pytest.mark.tier("wide", long=["4-40"])
@pytest.mark.parametrize(("world", "seeds"), [(4, 40), (8, 10)])
def test_bits_of_random_routings(world, seeds):
    spawn(world, check_random, seeds, timeout=180.0)


@pytest.mark.tier("long")
def test_bits_of_kernels_and_in_e4m3():
    spawn(4, check_kernels, timeout=180.0)


def check_compiled(per_machine: int) -> None:
    """Check that one graph serves every routing, recomputed or not, with the bits of eager.

    Without recomputation one rank compiles; its collectives meet those of the other's eager layer.
    """
    _, near = both(SMALL, per_machine)
    for again in (plainly, saving):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")

        def layer(*inputs, again=again):
            return again(lambda *args: run_layer(near, *args), *inputs)

        compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
        if is_plain := again is plainly and dist.get_rank() == 0:
            compiled = layer
        for seed, routing in enumerate(("natural", "one-hot", "empty")):
            batch = make_batch(SMALL, UNEVEN[dist.get_rank()], routing, seed)
            experts = make_experts(SMALL)
            want = run_step(partial(run_layer, near), batch, experts)
            equal(run_step(compiled, batch, experts), want, (again.__name__, routing))
        assert counter.frame_count == (not is_plain), f"{again.__name__} was compiled again"


@pytest.mark.tier("long")
def test_a_layer_is_one_graph():
    spawn(2, check_compiled, 1, timeout=300.0)


def check_waits(near: AllToAll, batch: Batch, size: Size) -> None:
    """Check that the host waits once in a forward, and never in a backward."""
    with CountExchanges() as counted:
        run_step(partial(run_layer, near), batch, make_experts(size))
    assert counted.calls == {"exchange_counts": 1, "exchange_rows": 5}


def check_savings() -> None:
    """Check that dispatch sends a token once for K experts, and combine sends every row."""
    world, per_machine, tokens = dist.get_world_size(), 2, 400
    size = Size(world * 4, 6, 64, 8)
    flat, near = both(size, per_machine)
    batch = make_batch(size, tokens, "uniform", 0)
    check_waits(near, batch, size)
    x_TD = batch.x_TD.clone().requires_grad_()
    seen: dict[str, list[int]] = {}
    for name, transport in (("flat", flat), ("near", near)):
        ways = []
        with Crossing(per_machine) as counted:
            sent = transport.send(x_TD, *batch[1:3])
            ways.append(counted["across"])
            y_TD = transport.combine(sent.x_SD, sent.handle)
            ways.append(counted["across"] - ways[-1])
            torch.autograd.grad(y_TD, x_TD, batch.slope_TD)
            ways.append(counted["across"] - sum(ways))
        seen[name] = ways
    rank_TK = batch.ids_TK // 4
    far = rank_TK // per_machine != dist.get_rank() // per_machine
    rows = len({(t, int(r)) for t, r in far.nonzero().tolist() for r in [rank_TK[t, r]]})
    machines = len({(t, int(rank_TK[t, k]) // per_machine) for t, k in far.nonzero().tolist()})
    width = size.width * 4
    assert machines < 0.8 * rows
    near_way, near_back, near_backward = seen["near"]
    flat_way, flat_back, _ = seen["flat"]
    assert machines * width <= near_way < 1.3 * machines * width
    assert rows * width <= flat_way
    assert near_back >= rows * width * 0.5  # rows from others, about as many
    assert near_way < 0.85 * flat_way
    assert near_backward < flat_way + flat_back


@pytest.mark.tier("long")
def test_a_token_crosses_once():
    spawn(4, check_savings)


def train(words: list[str]) -> None:
    """Train the same run with all ranks on one machine, on two, and on four."""
    one, *others = (run([*words, f"launch.gpus_per_machine={n}"]) for n in (4, 2, 1))
    for per_machine, other in zip((2, 1), others, strict=True):
        case = f"machines of {per_machine}"
        assert torch.equal(other[0], one[0]), f"{case}: losses and norms {other[0] - one[0]}"
        equal(other[1], one[1], case)
        equal(other[2], one[2], case)


@pytest.mark.tier("wide", long=["more0"])
@pytest.mark.parametrize("more", [[], ["activation.policy=selective", "parallel.tp=1"]])
def test_a_run_has_the_bits_of_one_machine(more, tiny_words):
    spawn(4, train, words_of(tiny_words, "parallel.ep=4", *more), timeout=180.0)
