"""Time dispatch and combine alone: DeepEP beside the all-to-all, forward and backward.

    torchrun --nproc-per-node 8 scripts/bench_dispatch.py [--tokens N ...] [--num-sms N ...]
        [--mode exact|static] [--precision bf16|fp8] [--results FILE.jsonl] [--per-machine N]

For each number of tokens per rank the script prints the milliseconds of each call: the slowest
rank's median over calls that all ranks begin together. For the four calls together it prints GB/s,
and as "floor" the share of NVLink's 450 GB/s. Both count the bytes that must travel in bf16: each
token once to every other rank that has one of its experts (fp8 sends half as many in two of the
calls). Both transports are compiled. The GPU spins before each call, which hides the launches of
the call's kernels, as a busy queue does in training. Launches after the host has waited for counts
are not hidden.

With ``--per-machine N``, N ranks count as one machine. Two transports that send a token only once
to each machine are then timed instead of DeepEP alone. Within a machine one of them uses a
collective, the other DeepEP. Results and gradients of both must have the bits of the single
all-to-all. DeepEP finds the GPUs of a machine by itself. NCCL treats ranks with different
``NCCL_HOSTID`` as if they were on several machines, so that one machine can stand for two::

    for node in 0 1; do
        NCCL_HOSTID=machine$node CUDA_VISIBLE_DEVICES=$((2 * node)),$((2 * node + 1)) torchrun \\
            --nnodes 2 --node-rank $node --nproc-per-node 2 --master-addr 127.0.0.1 \\
            --master-port 29500 scripts/bench_dispatch.py --per-machine 2 &
    done; wait
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from bench_train import commit

from moetrain.config.compute import Precision
from moetrain.kernels.experts.deepep import disconnect
from moetrain.parallel.expert.deepep import DeepEP, DeepEPInside, StaticSizes
from moetrain.parallel.expert.dispatch import AllToAll, ExpertParallelDispatcher
from moetrain.parallel.mesh import ExpertHops, ParallelDims, build_meshes

TOKENS, WIDTH, EXPERTS, TOP_K = (4096, 8192, 16384), 2048, 128, 8
NUM_SMS = (16, 20, 24, 32, 48)
NVLINK = 450e9  # bytes a second in each direction, by H200's datasheet
REPEATS, WARMUP = 15, 3
SPIN_CYCLES = 2_000_000  # about a millisecond
CALLS = ("dispatch", "combine", "combine backward", "dispatch backward")


def main() -> None:
    """Print one line per transport and size, on rank 0."""
    parser = argparse.ArgumentParser(description="Time dispatch and combine.")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--num-sms", type=int, nargs="+", default=NUM_SMS)
    parser.add_argument("--mode", choices=("exact", "static"), default="exact")
    parser.add_argument("--precision", choices=get_args(Precision), default="bf16")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--per-machine", type=int, default=0)
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None  # just made
    is_first = dist.get_rank() == 0
    hardware = f"{group.size()} x {torch.cuda.get_device_name()}"
    if is_first:
        print(f"{hardware}, torch {torch.__version__}, {WIDTH} wide, top-{TOP_K} of {EXPERTS}")
        print(f"tokens {'ms':22}" + "".join(f"{c:>19}" for c in CALLS) + "   GB/s  floor")
    all_to_all = compiled(AllToAll(EXPERTS, group, precision=args.precision))
    ranks = {"dp_shard": group.size(), "ep": group.size(), "per_machine": args.per_machine}
    hops = build_meshes(ParallelDims(group.size(), **ranks), "cuda").expert_hops
    for tokens in args.tokens:
        x_TD, ids_TK, weights_TK = make_batch(tokens, device)
        remote_bytes = count_remote(ids_TK, group) * WIDTH * x_TD.element_size()
        others = deepep_transports(group, tokens, args.num_sms, args.mode, args.precision)
        bits: list[torch.Tensor] = []
        if args.per_machine:
            others = over_machines(group, hops, args.num_sms, args.precision)
            bits = bits_of(all_to_all, x_TD, ids_TK, weights_TK)
        for name, transport in [("all-to-all", all_to_all), *others]:
            if bits:
                found = bits_of(transport, x_TD, ids_TK, weights_TK)
                same = all(torch.equal(*pair) for pair in zip(found, bits, strict=True))
                assert same, f"rank {dist.get_rank()}: {name} has other bits than the all-to-all"
            calls_ms = times(transport, x_TD, ids_TK, weights_TK, group)
            rate = len(CALLS) * remote_bytes / sum(calls_ms) * 1e3
            row: dict[str, Any] = {
                "hardware": hardware,
                "torch": torch.__version__,
                "commit": commit(),
                "tokens": tokens,
                "transport": name,
                "precision": args.precision,
                "ms": dict(zip(CALLS, calls_ms, strict=True)),
                "remote_bytes": remote_bytes,
                "gigabytes_per_second": rate / 1e9,
                "fraction_of_floor": rate / NVLINK,
            }
            if not is_first:
                continue
            figures = "".join(f"{ms:19.3f}" for ms in calls_ms)
            print(f"{tokens:6} {name:22}{figures} {rate / 1e9:6.0f} {rate / NVLINK:6.1%}")
            if args.results is not None:
                with args.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    disconnect()
    dist.destroy_process_group()


def make_batch(tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return random tokens (bf16) that choose distinct experts at random, with weights."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    x_TD = torch.randn(tokens, WIDTH, device=device, generator=generator).bfloat16()
    scores_TE = torch.rand(tokens, EXPERTS, device=device, generator=generator)
    weights_TK, ids_TK = scores_TE.topk(TOP_K)
    return x_TD.requires_grad_(), ids_TK.int(), weights_TK.requires_grad_()


def count_remote(ids_TK: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Return the mean number of tokens that a rank sends to others, each counted once per rank."""
    ranks_TK = ids_TK // (EXPERTS // group.size())
    goes_TW = (ranks_TK[:, :, None] == torch.arange(group.size(), device=ids_TK.device)).any(1)
    sent = goes_TW.sum() - goes_TW[:, group.rank()].sum()
    dist.all_reduce(sent, group=group)
    return sent.item() / group.size()


def deepep_transports(
    group: dist.ProcessGroup,
    tokens: int,
    every_num_sms: Sequence[int],
    mode: str,
    precision: Precision,
) -> Iterator[tuple[str, ExpertParallelDispatcher]]:
    """Return a name and DeepEP's transport for each number of SMs."""
    static = None
    if mode == "static":
        static = StaticSizes.plan(
            tokens, capacity=2.0, num_experts=EXPERTS, top_k=TOP_K, ranks=group.size()
        )
    for num_sms in every_num_sms:
        deepep = DeepEP(EXPERTS, group, WIDTH, num_sms=num_sms, static=static, precision=precision)
        yield f"DeepEP {num_sms} SMs, {mode}", compiled(deepep)


def over_machines(
    group: dist.ProcessGroup,
    hops: ExpertHops,
    every_num_sms: Sequence[int],
    precision: Precision,
) -> Iterator[tuple[str, ExpertParallelDispatcher]]:
    """Return transports of two hops. The hop within a machine is a collective, or DeepEP with each
    number of SMs."""
    inside = hops.inside.size()
    yield f"{inside} a machine", compiled(AllToAll(EXPERTS, group, hops=hops, precision=precision))
    for num_sms in every_num_sms:
        here = EXPERTS // hops.across.size()
        near = DeepEP(here, hops.inside, WIDTH, num_sms=num_sms, precision=precision)
        deepep = DeepEPInside(near, EXPERTS, group, hops=hops, precision=precision)
        yield f"{inside}, DeepEP {num_sms} SMs", compiled(deepep)


def compiled(transport: ExpertParallelDispatcher) -> ExpertParallelDispatcher:
    """Return ``transport`` with its torch operations fused."""
    for name in ("send", "combine"):
        call = torch.compile(getattr(transport, name), fullgraph=True, dynamic=True)
        setattr(transport, name, call)
    return transport


def bits_of(
    transport: ExpertParallelDispatcher,
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> list[torch.Tensor]:
    """Return dispatched tokens, their experts, combined tokens ``y``, and the gradients of tokens
    and weights for the upstream gradient ``tanh(y)``."""
    received = transport.send(x_TD, ids_TK, weights_TK)
    is_here_SK = received.ids_SK >= 0
    scale_S = torch.where(is_here_SK, received.weights_SK, 0).sum(1, keepdim=True)
    y_SD = (received.x_SD * scale_S).bfloat16()
    y_TD = transport.combine(y_SD, received.handle)
    d_x_TD, d_weights_TK = torch.autograd.grad(y_TD, (x_TD, weights_TK), torch.tanh(y_TD))
    return [received.x_SD, received.ids_SK, y_TD, d_x_TD, d_weights_TK]


def times(
    transport: ExpertParallelDispatcher,
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    group: dist.ProcessGroup,
) -> list[float]:
    """Return milliseconds of each of CALLS: the slowest rank's median."""
    measured: list[list[float]] = []
    for _ in range(WARMUP + REPEATS):
        received, dispatch_ms = timed(group, transport.send, x_TD, ids_TK, weights_TK)
        y_SD = received.x_SD.detach().requires_grad_()
        y_TD, combine_ms = timed(group, transport.combine, y_SD, received.handle)
        _, combine_backward_ms = timed(group, torch.autograd.grad, y_TD, y_SD, x_TD)
        # Other ranks' experts contribute nothing to a slot's gradient.
        d_weights_SK = torch.where(received.ids_SK >= 0, 1.0, 0.0)
        outputs, inputs = (received.x_SD, received.weights_SK), (x_TD, weights_TK)
        slopes = torch.ones_like(received.x_SD), d_weights_SK
        _, dispatch_backward_ms = timed(group, torch.autograd.grad, outputs, inputs, slopes)
        measured.append([dispatch_ms, combine_ms, combine_backward_ms, dispatch_backward_ms])
    medians = torch.tensor(measured[WARMUP:], device=x_TD.device).median(0).values
    dist.all_reduce(medians, dist.ReduceOp.MAX, group=group)
    return medians.tolist()


def timed(group: dist.ProcessGroup, call: Callable[..., Any], *inputs: Any) -> tuple[Any, float]:
    """Return ``call(*inputs)`` and its milliseconds, begun by all ranks together."""
    dist.barrier(group)
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = call(*inputs)
    end.record()
    torch.cuda.synchronize()
    return result, begin.elapsed_time(end)


if __name__ == "__main__":
    main()
