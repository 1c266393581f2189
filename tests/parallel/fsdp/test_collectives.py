"""Reduce-scatter compared with an fp64 sum, and all-gather, on gloo."""

import itertools

import pytest
import torch
import torch.distributed as dist

from moetrain.parallel.fsdp.transport.collectives import reduce_scatter_start
from moetrain.parallel.mesh import all_gather_start
from tests.lib.distributed import spawn

SIZES, DTYPES = (1, 7, 1000), (torch.bfloat16, torch.float32)


def random_chunks(rank: int, world: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(world, size, generator=generator).to(dtype)


def exact_sum(world: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's result in fp64, and the sum of magnitudes that bounds rounding errors."""
    rank = dist.get_rank()
    rows = torch.stack([random_chunks(r, world, size, dtype)[rank] for r in range(world)]).double()
    return rows.sum(0), rows.abs().sum(0)


def reduced(
    chunks_WN: torch.Tensor,
    base_N: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    out_N = torch.full((chunks_WN.shape[1],), torch.nan) if base_N is None else base_N.clone()
    group = group or dist.group.WORLD
    accumulate = base_N is not None
    reduce_scatter_start(chunks_WN, group, out_N=out_N, accumulate=accumulate)()
    return out_N


def check_reductions() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for size, dtype in itertools.product(SIZES, DTYPES):
        case = f"rank {rank}, {size} x {dtype}"
        chunks_WN = random_chunks(rank, world, size, dtype)
        out_N = reduced(chunks_WN)
        want_N, magnitude_N = exact_sum(world, size, dtype)
        # An fp32 sum of W numbers rounds W - 1 times, by at most half a unit in the last place.
        assert ((out_N - want_N).abs() <= (world - 1) * 2**-24 * magnitude_N).all(), case
        if dtype == torch.bfloat16:  # its fp32 sums are rounded at most once, at the end
            assert torch.equal(out_N, want_N.float()), case
        assert torch.equal(out_N, reduced(chunks_WN)), case
        base_N = torch.linspace(-1, 1, size)
        assert torch.equal(reduced(chunks_WN, base_N), out_N + base_N), case


def check_small_numbers_are_not_lost() -> None:
    """Check that a large value and its negative leave the sum of small values between them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    large = {0: 256.0, world - 1: -256.0}.get(rank, 0.0)
    chunks_WN = torch.full((world, 5), large + 0.5 * (large == 0), dtype=torch.bfloat16)
    want_N = torch.full((5,), 0.5 * (world - 2))
    assert torch.equal(reduced(chunks_WN), want_N)


def check_two_at_once() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    outputs = [torch.empty(size) for size in SIZES]
    waits = [
        reduce_scatter_start(
            random_chunks(rank, world, out_N.numel(), torch.bfloat16),
            dist.group.WORLD,
            out_N=out_N,
            accumulate=False,
        )
        for out_N in outputs
    ]
    for out_N, wait in reversed(list(zip(outputs, waits, strict=True))):
        wait()
        want_N = exact_sum(world, out_N.numel(), torch.bfloat16)[0]
        assert torch.equal(out_N, want_N.float())


def check_groups(group: dist.ProcessGroup) -> None:
    ranks = dist.get_process_group_ranks(group)
    x_N = torch.arange(7.0) / 3 + dist.get_rank()
    want_WN = torch.stack([torch.arange(7.0) / 3 + r for r in ranks])
    x_WN, work = all_gather_start(x_N, group)
    work.wait()
    assert torch.equal(x_WN, want_WN)

    out_WN = torch.empty(len(ranks), 7, dtype=torch.bfloat16)
    filled_WN, work = all_gather_start(x_N.bfloat16(), group, out_WN)
    work.wait()
    assert filled_WN is out_WN
    assert torch.equal(out_WN, want_WN.bfloat16())

    # 1/256 is lost beside 1 in bf16: the sum must arrive as fp32, whatever the group.
    slope_WN = torch.full((len(ranks), 7), 1.0 if dist.get_rank() == ranks[0] else 1 / 256)
    want_N = torch.full((7,), 1.0 + (len(ranks) - 1) / 256)
    assert torch.equal(reduced(slope_WN.bfloat16(), group=group), want_N)


def check_everything() -> None:
    check_reductions()
    check_small_numbers_are_not_lost()
    check_two_at_once()
    world, rank = dist.get_world_size(), dist.get_rank()
    check_groups(dist.group.WORLD)
    pairs = [dist.new_group([r, r + 1]) for r in range(0, world, 2)]
    check_groups(pairs[rank // 2])


@pytest.mark.parametrize("world", [2, 4])
def test_collectives(world):
    spawn(world, check_everything, timeout=180.0)
