"""Reduce-scatter: ours (bf16 on the wire, fp32 sums) beside NCCL's in fp32 and in bf16.

    torchrun --nproc-per-node 4 scripts/bench_reduce.py

First the error against an fp64 sum and whether a rerun gives the same bits, then milliseconds:
median device time of a call, buffers ready. Sizes are bytes of one rank's whole bf16 input.
"""

import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moetrain.parallel.collectives import reduce_scatter_single, reduce_scatter_start

SIZES_MIB = (16, 64, 256, 512)
REPEATS = 20


def main() -> None:
    """Print one line a size, on rank 0."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    assert group is not None  # just made
    if rank == 0:
        print(f"{world} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
        print("MiB   ours ms  fp32 ms  bf16 ms  fp32/ours   error ours     fp32     bf16  rerun")
    for mib in SIZES_MIB:
        length = mib * 2**20 // 2 // world
        generator = torch.Generator(device).manual_seed(rank)
        chunks = torch.randn(world, length, device=device, generator=generator).bfloat16()
        wide = chunks.float()
        out, out_bf16 = torch.empty(length, device=device), chunks.new_empty(length)

        def ours(chunks=chunks, out=out) -> torch.Tensor:
            return reduce_scatter_start(
                chunks, group, out_N=out, accumulate=False, mode="fp32_accum"
            ).finish()

        def fp32(wide=wide, out=out) -> torch.Tensor:
            reduce_scatter_single(out, wide.view(-1), group=group)
            return out

        def bf16(chunks=chunks, out=out_bf16) -> torch.Tensor:
            reduce_scatter_single(out, chunks.view(-1), group=group)
            return out

        exact = exact_sum(chunks, group)
        errors = [((f().double() - exact).norm() / exact.norm()).item() for f in (ours, fp32, bf16)]
        same = torch.equal(ours().clone(), ours())
        times = [milliseconds(f) for f in (ours, fp32, bf16)]
        if rank == 0:
            print(
                f"{mib:4} {times[0]:8.3f} {times[1]:8.3f} {times[2]:8.3f} "
                f"{times[1] / times[0]:9.2f}x {errors[0]:12.1e} {errors[1]:8.1e} {errors[2]:8.1e}"
                f"  {'equal' if same else 'DIFFERS'}",
                flush=True,
            )
    dist.destroy_process_group()


def exact_sum(chunks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's row of the sum, in fp64, a few ranks' chunks at a time."""
    arriving = torch.empty_like(chunks)
    dist.all_to_all_single(arriving, chunks, group=group)
    total = torch.zeros(chunks.shape[1], device=chunks.device, dtype=torch.float64)
    for row in arriving:
        total += row
    return total


def milliseconds(function: Callable[[], Any]) -> float:
    """Median over calls that all ranks begin together."""
    times = []
    for _ in range(REPEATS + 3):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
