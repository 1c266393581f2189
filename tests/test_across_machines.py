"""Dispatch across machines: the bits of one machine, and fewer bytes between machines.

A machine is simulated by a number of ranks; what crosses is counted at the collectives.
"""

import random
from collections import Counter
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from test_expert_parallel import CountExchanges
from test_parallel import run, words_of
from torch._dynamo.testing import CompileCounterWithBackend
from transports import (
    ROUTINGS,
    Batch,
    Size,
    make_batch,
    make_experts,
    plainly,
    run_layer,
    run_narrow,
    run_step,
    saving,
)

from moetrain.kernels.experts.mlp import expert_mlp
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.parallel.expert import dispatch
from moetrain.parallel.expert.dispatch import AllToAll
from moetrain.parallel.mesh import ExpertHops, ParallelDims, build_meshes

SMALL, WIDE = Size(16, 3, 16, 16), Size(8, 3, 256, 16)
# Tokens of each rank.
UNEVEN, ALL_ON_ONE, NONE = (9, 0, 1, 40, 7, 0, 0, 13), (0, 11, 0, 0, 0, 0, 0, 0), (0,) * 8


@cache
def hops_of(per_machine: int) -> ExpertHops:
    world = dist.get_world_size()
    dims = ParallelDims(world, dp_shard=world, ep=world, per_machine=per_machine)
    hops = build_meshes(dims, "cpu").expert_hops
    assert [hop.size() for hop in hops] == [world // per_machine, per_machine]
    return hops


def both(size: Size, per_machine: int, **how) -> tuple[AllToAll, AllToAll]:
    """One all-to-all over all ranks, and the one that knows machines."""
    hops, world = hops_of(per_machine), dist.group.WORLD
    assert world is not None
    flat, near = (AllToAll(size.experts, world, hops=x, **how) for x in (None, hops))
    assert (flat.hops, near.hops) == (None, hops if per_machine > 1 else None)
    near.hops = hops  # one rank a machine is two hops here, of which one stays
    return flat, near


class Crossing:
    """Counts bytes of rows that stay on a machine or do not."""

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


def equal(got: dict, want: dict, case: object) -> None:
    for name, value in want.items():
        assert torch.equal(got[name], value), f"rank {dist.get_rank()}, {case}: {name} differs"


def machines_of(world: int) -> list[int]:
    """Ranks of a machine, where there are several machines."""
    return [n for n in (1, 2, 4) if n < world]


def check_bits() -> None:
    """Of every routing, and of every number of machines."""
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


def be_strict() -> None:
    """Let fresh memory hold NaN: nothing may come of rows past the counts."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()


def check_random(seeds: int) -> None:
    """Random sizes, tokens and routings: bit for bit, with two calls in flight."""
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


def random_batch(size: Size, own, alike, seed: int, dtype: torch.dtype) -> Batch:
    """Some tokens, few or none, whose experts are anywhere, or mostly on some ranks."""
    tokens = own.choice([0, 1, 2, own.randint(3, 90)])
    batch = make_batch(size, tokens, "uniform", seed, dtype=dtype)
    generator = torch.Generator().manual_seed(own.randrange(1000))
    likely_E = torch.rand(size.experts, generator=generator) ** own.choice([1, 8])
    if alike.random() < 0.3:  # a range of experts, of one rank or of one machine
        first = alike.randrange(size.experts)
        likely_E[:first] = 0
        likely_E[first + alike.randint(1, size.experts) :] = 0
    likely_TE = (likely_E + 1e-9).expand(tokens, -1)
    ids_TK = batch.ids_TK
    if tokens:
        ids_TK = torch.multinomial(likely_TE, size.top_k, generator=generator)
    ids_TK[torch.rand(ids_TK.shape, generator=generator) < own.choice([0, 0.3, 0.9])] = -1
    return batch._replace(ids_TK=ids_TK.int().contiguous())


def run_two(transport: AllToAll, pair: list[Batch], experts) -> list[dict[str, torch.Tensor]]:
    """:func:`run_step` of both, whose forwards run before either's backward."""
    steps = []
    for batch in pair:
        x_TD, weights_TK = (x.clone().requires_grad_() for x in (batch.x_TD, batch.weights_TK))
        steps.append(
            (x_TD, weights_TK, run_layer(transport, x_TD, batch.ids_TK, weights_TK, *experts))
        )
    found = []
    for batch, (x_TD, weights_TK, y_TD) in zip(pair, steps, strict=True):
        grads = torch.autograd.grad(y_TD, (x_TD, weights_TK, *experts), batch.slope_TD)
        names = ("output", "tokens", "weights", "gate_up", "down")
        found.append(dict(zip(names, (y_TD.detach(), *grads), strict=True)))
        found[-1]["weights"] = found[-1]["weights"].masked_fill(batch.ids_TK < 0, 0)
    return found


def check_order(near: AllToAll, batch: Batch, case: str) -> None:
    """What arrives are the tokens of the whole batch in its order, by rank and then by token."""
    everything: list = [None] * dist.get_world_size()
    dist.all_gather_object(everything, tuple(batch))
    x_TD, ids_TK, weights_TK, _ = (torch.cat(parts) for parts in zip(*everything, strict=True))
    got = near.send(*batch[:3])
    first = near.rank * near.num_local_experts
    is_here_TK = (ids_TK >= first) & (ids_TK < first + near.num_local_experts)
    arriving = is_here_TK.any(1)
    want_SK = torch.where(is_here_TK, ids_TK - first, -1)[arriving]
    assert torch.equal(got.x_SD, x_TD[arriving]), case
    assert torch.equal(got.ids_SK, want_SK), case
    used_SK = want_SK >= 0
    assert torch.equal(got.weights_SK[used_SK], weights_TK[arriving][used_SK]), case
    assert got.num_rows == used_SK.sum(), case


def check_one_process(found: dict, batch: Batch, case: str) -> None:
    """Experts' gradients have the bits of one process with all tokens and all experts."""
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


@pytest.mark.parametrize("world", [2, 4, 8])
def test_bits_are_those_of_one_machine(world):
    spawn(world, check_bits, timeout=180.0)


@pytest.mark.parametrize(("world", "seeds"), [(4, 40), (8, 10)])
def test_bits_of_random_routings(world, seeds):
    spawn(world, check_random, seeds, timeout=180.0)


def check_kernels(both=both) -> None:
    """Kernels in Triton's interpreter, and rows that travel in e4m3 over both hops."""
    be_strict()
    few = (0, 7, 1, 3)[dist.get_rank()]
    layer = partial(run_layer, backend="triton")
    for size, tokens, way, how in (
        (SMALL, few, layer, {"backend": "triton"}),
        (WIDE, UNEVEN[dist.get_rank()], run_narrow, {"precision": "fp8"}),
    ):
        flat, near = both(size, 2, **how)
        for seed, routing in enumerate(ROUTINGS):
            batch = make_batch(size, tokens, routing, seed, dtype=torch.bfloat16)
            experts = make_experts(size, dtype=torch.bfloat16)
            found = [
                run_step(partial(way, transport), batch, experts) for transport in (flat, near)
            ]
            equal(found[1], found[0], (how, routing))


def test_bits_of_kernels_and_in_e4m3():
    spawn(4, check_kernels, timeout=180.0)


def check_compiled(per_machine: int) -> None:
    """One graph for every routing, recomputed or not, and the bits of eager.

    Without recomputation one rank compiles, and meets the other's plain layer in every collective.
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


def test_a_layer_is_one_graph():
    spawn(2, check_compiled, 1, timeout=300.0)


def check_waits(near: AllToAll, batch: Batch, size: Size) -> None:
    """The host waits once in a forward, and never in a backward."""
    with CountExchanges() as counted:
        run_step(partial(run_layer, near), batch, make_experts(size))
    assert counted.calls == {"exchange_counts": 1, "exchange_rows": 5}


def check_savings() -> None:
    """With K experts a token, dispatch sends a token once, and the way back sends every row."""
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
    assert near_back >= rows * width * 0.5  # what others sent here, about as much
    assert near_way < 0.85 * flat_way
    assert near_backward < flat_way + flat_back


def test_a_token_crosses_once():
    spawn(4, check_savings)


def train(words: list[str]) -> None:
    """The same run where all ranks are on one machine, on two, and on four."""
    one, *others = (run([*words, f"launch.gpus_per_machine={n}"]) for n in (4, 2, 1))
    for per_machine, other in zip((2, 1), others, strict=True):
        case = f"machines of {per_machine}"
        assert torch.equal(other[0], one[0]), f"{case}: losses and norms {other[0] - one[0]}"
        equal(other[1], one[1], case)
        equal(other[2], one[2], case)


@pytest.mark.parametrize("more", [[], ["activation.policy=selective", "parallel.tp=1"]])
def test_a_run_has_the_bits_of_one_machine(more, tiny_words):
    spawn(4, train, words_of(tiny_words, "parallel.ep=4", *more), timeout=180.0)
