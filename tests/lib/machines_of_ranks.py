"""Helpers of tests/parallel/expert/test_across_machines.py that other tests use too."""

from functools import cache, partial

import torch
import torch.distributed as dist

from moetrain.parallel.expert.dispatch import AllToAll
from moetrain.parallel.mesh import ExpertHops, ParallelDims, build_meshes
from tests.lib.transports import (
    ROUTINGS,
    Batch,
    Size,
    make_batch,
    make_experts,
    run_layer,
    run_narrow,
    run_step,
)

SMALL, WIDE = Size(16, 3, 16, 16), Size(8, 3, 256, 16)
# The number of tokens on each rank.
UNEVEN, ALL_ON_ONE, NONE = (9, 0, 1, 40, 7, 0, 0, 13), (0, 11, 0, 0, 0, 0, 0, 0), (0,) * 8


@cache
def hops_of(per_machine: int) -> ExpertHops:
    world = dist.get_world_size()
    dims = ParallelDims(world, dp_shard=world, ep=world, per_machine=per_machine)
    hops = build_meshes(dims, "cpu").expert_hops
    assert [hop.size() for hop in hops] == [world // per_machine, per_machine]
    return hops


def both(size: Size, per_machine: int, **how) -> tuple[AllToAll, AllToAll]:
    """Return an all-to-all over all ranks, and one that knows machines."""
    hops, world = hops_of(per_machine), dist.group.WORLD
    assert world is not None
    flat, near = (AllToAll(size.experts, world, hops=x, **how) for x in (None, hops))
    assert (flat.hops, near.hops) == (None, hops if per_machine > 1 else None)
    near.hops = hops  # even with one rank per machine there are two hops, one of them to itself
    return flat, near


def equal(got: dict, want: dict, case: object) -> None:
    for name, value in want.items():
        assert torch.equal(got[name], value), f"rank {dist.get_rank()}, {case}: {name} differs"


def be_strict() -> None:
    """Fill fresh memory with NaN: rows past the counts must not reach a result."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()


def random_batch(size: Size, own, alike, seed: int, dtype: torch.dtype) -> Batch:
    """Draw few or no tokens, with experts on all ranks or mostly on some."""
    tokens = own.choice([0, 1, 2, own.randint(3, 90)])
    batch = make_batch(size, tokens, "uniform", seed, dtype=dtype)
    generator = torch.Generator().manual_seed(own.randrange(1000))
    likely_E = torch.rand(size.experts, generator=generator) ** own.choice([1, 8])
    if alike.random() < 0.3:  # a range of experts, possibly of one rank or machine
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
    """Run :func:`run_step` for both batches, with both forwards before the first backward."""
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
    """Check that tokens arrive in the order of the whole batch: by rank, then by token."""
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


def check_kernels(both=both) -> None:
    """Check kernels in Triton's interpreter, and e4m3 rows over both hops."""
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
