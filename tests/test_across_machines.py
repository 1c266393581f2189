"""Dispatch across machines: the bits of one machine, and fewer bytes between machines.

A machine is simulated by a number of ranks; what crosses is counted at the collectives.
"""

from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
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
from moetrain.parallel.mesh import ParallelDims, build_meshes

SMALL, WIDE = Size(16, 3, 16, 16), Size(8, 3, 256, 16)
# Tokens of each rank.
UNEVEN, ALL_ON_ONE, NONE = (9, 0, 1, 40, 7, 0, 0, 13), (0, 11, 0, 0, 0, 0, 0, 0), (0,) * 8
MACHINES = [(2, 1), (4, 1), (2, 2), (4, 2)]


def both(size: Size, per_machine: int, **how) -> tuple[AllToAll, AllToAll]:
    """One all-to-all over all ranks, and the one that knows machines."""
    world = dist.get_world_size()
    dims = ParallelDims(world, dp_shard=world, ep=world, per_machine=per_machine)
    meshes = build_meshes(dims, "cpu")
    group, hops = meshes.expert_parameters.get_group("ep"), meshes.expert_hops
    assert [hop.size() for hop in hops] == [world // per_machine, per_machine]
    flat, near = (AllToAll(size.experts, group, hops=x, **how) for x in ((), hops))
    assert [hop.size() for hop in near.hops] == [hop.size() for hop in hops if hop.size() > 1]
    near.hops = list(hops)  # one rank a machine is two hops here, of which one stays
    return flat, near


class Crossing:
    """Counts bytes that stay on a machine or do not."""

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
        row = given[:1].nbytes if sent else given.nbytes // len(ranks)
        for rank, size in zip(ranks, sent or [1] * len(ranks), strict=True):
            where = "inside" if rank // self.per_machine == mine else "across"
            self.bytes[where] += size * row
        return dist.all_to_all_single(out, given, received, sent, **how)


def equal(got: dict, want: dict, case: object) -> None:
    for name, value in want.items():
        assert torch.equal(got[name], value), f"rank {dist.get_rank()}, {case}: {name} differs"


def check_bits(per_machine: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    # Fills fresh memory with NaN: nothing may come of rows past the counts.
    torch.use_deterministic_algorithms(True, warn_only=True)
    flat, near = both(SMALL, per_machine)
    totals: Counter[str] = Counter()
    cases = [(tokens, r) for tokens in (UNEVEN, ALL_ON_ONE, NONE) for r in ROUTINGS]
    for seed, (tokens, routing) in enumerate(cases):
        dtype = torch.bfloat16 if seed % 2 else torch.float32
        batch = make_batch(SMALL, tokens[rank], routing, seed, dtype=dtype)
        experts = make_experts(SMALL, dtype=dtype)
        found = {}
        for name, transport in (("flat", flat), ("near", near)):
            with Crossing(per_machine) as counted:
                run = lambda *args, t=transport: run_layer(t, *args)  # noqa: E731
                found[name] = run_step(run, batch, experts)
            totals[name] += counted["across"]
        case = f"{world // per_machine} machines of {per_machine}, {tokens}, {routing}"
        equal(found["near"], found["flat"], case)
        check_order(near, batch, case)
        if dtype == torch.float32:
            check_one_process(found["near"], batch, case)
    sums = torch.tensor([totals["near"], totals["flat"]])
    dist.all_reduce(sums)
    near_bytes, flat_bytes = sums.tolist()
    assert near_bytes < flat_bytes or per_machine == 1, "nothing is saved"


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


@pytest.mark.parametrize(("machines", "ranks"), MACHINES)
def test_bits_are_those_of_one_machine(machines, ranks):
    spawn(machines * ranks, check_bits, ranks, timeout=180.0)


def check_narrow(per_machine: int) -> None:
    """In e4m3 rows are quantised for each way, to the same bits."""
    flat, near = both(WIDE, per_machine, precision="fp8")
    for seed, routing in enumerate(ROUTINGS):
        tokens = UNEVEN[dist.get_rank()]
        batch = make_batch(WIDE, tokens, routing, seed, dtype=torch.bfloat16)
        experts = make_experts(WIDE, dtype=torch.bfloat16)
        found = [
            run_step(lambda *args, t=transport: run_narrow(t, *args), batch, experts)
            for transport in (flat, near)
        ]
        equal(found[1], found[0], routing)


def test_bits_in_e4m3():
    spawn(4, check_narrow, 2)


def check_compiled(per_machine: int) -> None:
    """One graph for every routing, recomputed or not, and the bits of eager."""
    _, near = both(SMALL, per_machine)
    for again in (plainly, saving):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")

        def layer(*inputs, again=again):
            return again(lambda *args: run_layer(near, *args), *inputs)

        compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
        for seed, routing in enumerate(("natural", "one-hot", "empty")):
            batch = make_batch(SMALL, UNEVEN[dist.get_rank()], routing, seed)
            experts = make_experts(SMALL)
            want = run_step(lambda *args: run_layer(near, *args), batch, experts)
            equal(run_step(compiled, batch, experts), want, (again.__name__, routing))
        assert counter.frame_count == 1, f"{again.__name__} was compiled again"


def test_a_layer_is_one_graph():
    spawn(2, check_compiled, 1, timeout=180.0)


def check_savings() -> None:
    """With K experts a token, dispatch sends a token once, and the way back sends every row."""
    world, per_machine, tokens = dist.get_world_size(), 2, 400
    size = Size(world * 4, 6, 64, 8)
    flat, near = both(size, per_machine)
    batch = make_batch(size, tokens, "uniform", 0)
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


def train(words: list[str]) -> list[tuple]:
    """The same run where all ranks are on one machine, on two, and on four."""
    answers = []
    for per_machine in (4, 2, 1):
        answer = run([*words, f"launch.gpus_per_machine={per_machine}"])
        answers.append(answer)
    return answers


@pytest.mark.parametrize("more", [[], ["activation.policy=selective", "parallel.tp=1"]])
def test_a_run_has_the_bits_of_one_machine(more, tiny_words):
    words = words_of(tiny_words, "parallel.ep=4", *more)
    for one, *others in spawn(4, train, words, timeout=180.0):
        for other in others:
            assert str(other) == str(one)
