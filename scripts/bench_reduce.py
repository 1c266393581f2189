"""Time reduce-scatter: ours (bf16 on the wire, fp32 sums) beside NCCL's in fp32 and in bf16.

    torchrun --nproc-per-node 4 scripts/bench_reduce.py

For each size it prints the median device milliseconds of a call with allocated buffers, the errors
against an fp64 sum, and whether a rerun of ours gives the same bits. A spin kernel before each call
hides the launches, as a busy queue does in training. A size is that of one rank's whole input in
bf16.
"""

import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from moetrain.parallel.fsdp.transport.collectives import reduce_scatter_start

SIZES_MIB = (16, 64, 128, 256, 512)
REPEATS = 20
SPIN_CYCLES = 4_000_000  # about 2 ms, more than the longest call takes to launch

Reduction = Callable[[], torch.Tensor]

# torch 2.13 renamed it, and warns about the old name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def main() -> None:
    """Print one line per size, on rank 0."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None  # just made
    say(f"{group.size()} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    names = ("ours", "NCCL fp32", "NCCL bf16")
    heads = "".join(f"{name:>11}" for name in names)
    say("         " + "milliseconds".center(33) + "fp32".rjust(8) + "error".center(33))
    say(f"MiB      {heads}{'/ ours':>8}{heads}  rerun")
    for mib in SIZES_MIB:
        chunks = random_chunks(mib, group, device)
        functions = reductions(chunks, group)
        exact = exact_sum(chunks, group)
        errors = [((f().double() - exact).norm() / exact.norm()).item() for f in functions]
        same = all_equal(functions[0]().clone(), functions[0]())
        times = [milliseconds(f) for f in functions]
        say(
            f"{mib:<9}"
            + "".join(f"{ms:11.3f}" for ms in times)
            + f"{times[1] / times[0]:7.2f}x"
            + "".join(f"{error:11.1e}" for error in errors)
            + f"{'equal' if same else 'DIFFER':>7}"
        )
    dist.destroy_process_group()


def say(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def random_chunks(mib: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Return a random bf16 [W, N] of ``mib`` MiB, different on each rank."""
    length = mib * 2**20 // 2 // group.size()
    generator = torch.Generator(device).manual_seed(group.rank())
    return torch.randn(group.size(), length, device=device, generator=generator).bfloat16()


def reductions(
    chunks: torch.Tensor, group: dist.ProcessGroup
) -> tuple[Reduction, Reduction, Reduction]:
    """Return functions that reduce ``chunks``: ours, NCCL in fp32 and NCCL in bf16."""
    wide, out_bf16 = chunks.float(), chunks.new_empty(chunks.shape[1])
    out = torch.empty_like(out_bf16, dtype=torch.float32)

    def ours() -> torch.Tensor:
        reduce_scatter_start(chunks, group, out_N=out, accumulate=False)()
        return out

    def fp32() -> torch.Tensor:
        _reduce_scatter(out, wide.view(-1), group=group)
        return out

    def bf16() -> torch.Tensor:
        _reduce_scatter(out_bf16, chunks.view(-1), group=group)
        return out_bf16

    return ours, fp32, bf16


def exact_sum(chunks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's row of the sum, in fp64."""
    arriving = torch.empty_like(chunks)
    dist.all_to_all_single(arriving, chunks, group=group)
    total = torch.zeros(chunks.shape[1], device=chunks.device, dtype=torch.float64)
    for row in arriving:
        total += row
    return total


def all_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if both have the same bits on every rank."""
    differ = torch.tensor(float(not torch.equal(a.view(torch.int32), b.view(torch.int32))))
    differ = differ.to(a.device)
    dist.all_reduce(differ)
    return not differ.item()


def milliseconds(function: Reduction) -> float:
    """Return the median device milliseconds of a call. All ranks begin each call together."""
    times = []
    for _ in range(REPEATS + 3):
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(SPIN_CYCLES)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
