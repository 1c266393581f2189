"""Measure the cost of offloading: moving state off the GPU, and updates on the CPU.

    [torchrun --nproc-per-node N] scripts/bench_offload.py [--part cycle|update|losses|all]
        [--preset qwen3-30b-a3b] [--layers N] [--cycles 50] [--section.key value ...]

``cycle`` times ``Engine.offload`` and ``Engine.reload`` beside one plain copy of pinned memory. It
prints the share of memory that offloading frees, and whether the free memory and the addresses of
all tensors stay the same over repeated cycles.

``update`` trains with ``optim.offload_fraction`` 0, 0.5 and 1: tokens/s, memory, the time of
updates on the CPU, and the share of it that training did not wait for. An update uses torch's
threads. torchrun gives one to each rank, so set OMP_NUM_THREADS to a rank's number of cores.

``losses`` trains a small model 200 steps with each of these fractions, and compares the losses.

Rank 0 prints a line per measurement, with the slowest rank's figures. A part that fails prints why
and makes the exit code 1; the next parts still run. On one H200 all takes about three minutes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from bench_train import commit, device_name

from moetrain.config import Config
from moetrain.config.environment import launched_place
from moetrain.data.loader import Batch
from moetrain.optim import adamw as optim
from moetrain.optim.adamw import AdamW
from moetrain.parallel.fsdp.storage.offloaded import Offloaded
from moetrain.parallel.world import World, join_world
from moetrain.runtime.memory import DeviceBytes, HostMemory
from moetrain.train.engine import Engine
from moetrain.train.metrics import peak_memory_gib
from moetrain.train.objectives import CrossEntropy
from moetrain.train.session import resolve_run

GIB = 2**30
REPEATS = 5
WARMUP_STEPS, STEPS = 3, 6


def main() -> int:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description="Measure offloading.", allow_abbrev=False)
    parser.add_argument("--part", choices=["all", *PARTS], default="all")
    parser.add_argument("--preset", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--rows", type=int, default=4, help="rows of 4,096 tokens in a step of one rank"
    )
    parser.add_argument("--cycles", type=int, default=50)
    args, settings = parser.parse_known_args()
    failed = 0
    for name, part in PARTS.items():
        if args.part not in ("all", name):
            continue
        try:
            for line in part(args, settings):
                say(f"{name}: {line}")
        except Exception:  # noqa: BLE001 - printed, and the other parts still run
            failed = 1
            print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return failed


def say(line: str) -> None:
    """Print ``line`` on rank 0."""
    place = launched_place()
    if place is None or place.rank == 0:
        print(line, flush=True)


def make_engine(args: argparse.Namespace, settings: list[str], *words: str) -> Engine:
    """Return an engine with random weights on the ranks of the world."""
    place = launched_place()
    ranks = 1 if place is None else place.world_size
    common = [f"model.preset={args.preset}", f"model.num_layers={args.layers}"]
    common += [f"parallel.ep={ranks}", "data.source=synthetic", "data.seq_len=4096"]
    common += [f"train.micro_batch_size={args.rows}"]
    common += [f"train.global_batch_size={args.rows * ranks}"]
    config, arch = resolve_run(Config.load(None, [*common, *words, *settings]))
    return Engine(config, arch, join_world(config, arch))


def batch_of(engine: Engine, step: int) -> Batch:
    """Return this rank's batch of random tokens."""
    seq_len = engine.config.data.seq_len
    generator = torch.Generator().manual_seed(1000 * step + engine.world.data_rank)
    rows = engine.config.train.micro_batch_size
    tokens_BS = torch.randint(0, engine.arch.vocab_size, (rows, seq_len), generator=generator)
    ends = torch.arange(0, rows * seq_len + 1, seq_len, dtype=torch.int32)
    return Batch(tokens_BS, tokens_BS.roll(-1, 1), None, ends)


def learn(engine: Engine, step: int) -> torch.Tensor:
    """Make one step of one micro-batch; return its loss."""
    totals = engine.forward_backward([batch_of(engine, step)], CrossEntropy())
    engine.step(1e-4)
    return totals.total


def timed(world: World, call: Callable[[], object]) -> float:
    """Return the slowest rank's seconds of ``call`` and its device work; all begin together."""
    wait(world)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return slowest(world, time.perf_counter() - start)


def slowest(world: World, seconds: float) -> float:
    """Return the largest value of all ranks."""
    found = torch.tensor(seconds, device=world.device)
    if world.size > 1:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.item()


def wait(world: World) -> None:
    """Wait until every rank's device is idle."""
    torch.cuda.synchronize()
    world.barrier()


def free_now() -> int:
    """Return the bytes of GPU memory that the driver reports as free."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def describe(engine: Engine) -> str:
    """Return the measured model and the hardware."""
    arch, world = engine.arch, engine.world
    return (
        f"{world.size} x {device_name(world.device)}, torch {torch.__version__}, commit {commit()}"
        f", {engine.config.model.preset}, {arch.num_layers} layers, "
        f"{arch.num_params() / 1e9:.2f} B parameters"
    )


# ---- update and losses --------------------------------------------------------------------------

FRACTIONS = (0.0, 0.5, 1.0)


def update(args: argparse.Namespace, settings: list[str]) -> Iterator[str]:
    """Measure tokens per second and memory."""
    for fraction in FRACTIONS:
        try:
            yield measured(args, settings, fraction)
        except torch.OutOfMemoryError as error:
            yield f"offload_fraction {fraction}: does not fit, {str(error)[:100]}"
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def clocked(owner: Any, name: str) -> Iterator[list[float]]:
    """Collect the seconds of each call of a function inside the context."""
    seconds: list[float] = []
    call = getattr(owner, name)

    def clocked_call(*given: Any) -> Any:
        start = time.perf_counter()
        found = call(*given)
        seconds.append(time.perf_counter() - start)
        return found

    with patch.object(owner, name, clocked_call):
        yield seconds


def measured(args: argparse.Namespace, settings: list[str], fraction: float) -> str:
    """Train with the ``offload_fraction`` ``fraction``; return a line with its figures."""
    words = (f"optim.offload_fraction={fraction}", "activation.policy=selective")
    engine = make_engine(args, settings, *words)
    world = engine.world
    has_hosts = any(b.storage.has_host_master for b in engine.fsdp.buckets)
    DeviceBytes.forget_peak(world.device)  # an earlier engine may have run here
    for step in range(WARMUP_STEPS):
        learn(engine, step)
    engine.fsdp.settle()

    def steps() -> None:
        for step in range(STEPS):
            learn(engine, step)
        engine.fsdp.settle()  # includes the update that the last step left to the CPU

    with (
        clocked(optim, "adamw_on_host") as updates,
        clocked(Offloaded, "send") as sends,
        clocked(Offloaded, "wait") as waits,
    ):
        seconds = timed(world, steps) / STEPS
    held = torch.cuda.mem_get_info()
    rate = batch_of(engine, 0).tokens_BS.numel() / seconds
    words = [
        f"offload_fraction {fraction}: {rate:,.0f} tokens/s a rank",
        f"{seconds * 1e3:.0f} ms a step",
    ]
    words += [f"peak {peak_memory_gib(world.device):.1f} GiB"]
    words += [f"in use with caches {(held[1] - held[0]) / GIB:.1f} GiB"]
    if has_hosts:
        totals = sum(updates) + sum(sends), sum(waits)
        busy, waited = (slowest(world, total / STEPS) for total in totals)
        words += [f"host busy {busy * 1e3:.0f} ms a step, waited for {waited * 1e3:.0f} ms"]
        words += [f"hidden {max(0.0, 1 - waited / max(busy, 1e-9)):.0%}"]
        words += [f"{torch.get_num_threads()} threads"]
    return ", ".join(words)


def losses(args: argparse.Namespace, settings: list[str]) -> Iterator[str]:
    """Print the largest difference of the losses of 200 steps."""
    found = []
    small = argparse.Namespace(**{**vars(args), "preset": "debug", "layers": 4, "rows": 4})
    for fraction in FRACTIONS:
        words = (f"optim.offload_fraction={fraction}", "data.seq_len=256", "compile.enabled=no")
        engine = make_engine(small, settings, *words)
        found.append(torch.stack([learn(engine, step % 8) for step in range(200)]).cpu())
        yield f"offload_fraction {fraction}: from {found[-1][0]:.4f} to {found[-1][-1]:.4f}"
    for fraction, series in zip(FRACTIONS[1:], found[1:], strict=True):
        apart = (series - found[0]).abs()
        most, mean = apart.max().item(), apart.mean().item()
        yield f"offload_fraction {fraction}: at most {most:.1e} from those of 0, mean {mean:.1e}"


# ---- cycle -------------------------------------------------------------------------------------


def cycle(args: argparse.Namespace, settings: list[str]) -> Iterator[str]:
    """Time offloading and reloading."""
    engine = make_engine(args, settings, "compile.enabled=no")
    world = engine.world
    for step in range(2):
        learn(engine, step)
    yield describe(engine)
    down, up = link_speed(world)
    yield f"plain pinned copy: down {down:.1f} GiB/s, up {up:.1f} GiB/s"
    names = ("weights", "gradients", "moments")
    held = {name: sum(s.values()) for name, s in zip(names, storages(engine), strict=True)}
    copied = held["weights"] + held["moments"]
    yield ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in held.items())
    torch.cuda.empty_cache()
    places, before = addresses(engine), free_now()
    first = timed(world, engine.offload)
    freed = free_now() - before
    yield f"freed {freed / GIB:.2f} GiB: {freed / sum(held.values()):.1%} of the state's"
    engine.reload()
    yield f"first offload {first:.2f} s, with pinning"
    leaving, coming, away, back = [], [], [], []
    for i in range(args.cycles):
        leaving.append(timed(world, engine.offload))
        away.append(free_now())
        coming.append(timed(world, engine.reload))
        back.append(free_now())
        if i + 1 == REPEATS:
            for word, seconds, link in (("offload", leaving, down), ("reload", coming, up)):
                took = statistics.median(seconds)
                rate = copied / GIB / took
                yield f"{word} {took:.3f} s, {rate:.1f} GiB/s: {rate / link:.0%} of the plain copy"
    for word, found in (("away", away), ("back", back)):
        spread = (max(found) - min(found)) / 2**20
        yield f"{args.cycles} cycles: free memory while {word} differs by {spread:.1f} MiB"
    yield f"addresses unchanged: {addresses(engine) == places}"
    values = [weight.double().sum() for _, weight in engine.weights()]
    learn(engine, 2)
    changed = [weight.double().sum() for _, weight in engine.weights()]
    pairs = zip(values, changed, strict=True)
    yield f"weights that a step changes: {sum(bool(a != b) for a, b in pairs)} of {len(values)}"
    engine.offload("moments")
    hidden = timed(world, lambda: (engine.reload(), learn_forward(engine)))
    alone = timed(world, lambda: learn_forward(engine))
    engine.offload("moments")
    come = timed(world, engine.reload)
    yield (
        f"moments come back in {come:.3f} s; a forward takes {alone:.3f} s, "
        f"both together {hidden:.3f} s"
    )


def learn_forward(engine: Engine) -> None:
    """Run a forward alone, which needs no moments."""
    engine.forward([batch_of(engine, 0)], CrossEntropy())


def storages(engine: Engine) -> list[dict[int, int]]:
    """Return bytes by address of weights, gradients and moments."""
    buckets = list(engine.fsdp.buckets)
    moments = [s[k] for s in engine.optimizer.state.values() for k in AdamW.MOMENTS]
    kinds = (
        [bucket.shard_N for bucket in buckets],
        [bucket.gradient_N for bucket in buckets if bucket.gradient_N is not None],
        moments,
    )
    found = []
    for kind in kinds:
        each = (tensor.untyped_storage() for tensor in kind)
        found.append({storage.data_ptr(): storage.nbytes() for storage in each})
    return found


def addresses(engine: Engine) -> list[int]:
    """Return the address of every parameter and moment."""
    locals = [member.local for member in engine.fsdp.members.values()]
    moments = [s[k] for s in engine.optimizer.state.values() for k in AdamW.MOMENTS]
    return [tensor.data_ptr() for tensor in (*locals, *moments)]


def link_speed(world: World) -> tuple[float, float]:
    """Return GiB/s of one copy of pinned memory, down and up, by all ranks at once."""
    size = 4 * GIB
    host = HostMemory(world.device, "the benchmark", "use less").reserve(size)
    device = torch.empty(size, dtype=torch.uint8, device=world.device)
    found = []
    for target, source in ((host, device), (device, host)):
        target.copy_(source, non_blocking=True)
        copies = [
            timed(world, lambda t=target, s=source: t.copy_(s, non_blocking=True))
            for _ in range(REPEATS)
        ]
        found.append(size / GIB / statistics.median(copies))
    return found[0], found[1]


PARTS = {"cycle": cycle, "losses": losses, "update": update}

if __name__ == "__main__":
    sys.exit(main())
