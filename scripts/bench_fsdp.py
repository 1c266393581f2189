"""Compare FSDP over copy engines with FSDP over collectives: bits, memory over time, and speed.

    python scripts/bench_fsdp.py RECIPE [--section.key value ...] [--compare-steps 20]
        [--memory-steps 200]

Both transports train from the same start in one process per rank, one after the other. After
``--compare-steps`` steps, each rank compares all losses and the checksums of every parameter and
gradient; give ``--train.deterministic yes`` for that. The run over copy engines then continues to
``--memory-steps`` while the driver's free memory is watched. The exit code is 1 if bits differ or
free memory shrinks.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from typing import Any

import torch
from bench_train import wait

from moetrain.cli.launch import start_ranks
from moetrain.config import Config
from moetrain.config.environment import launched_place
from moetrain.parallel.processes import num_processes
from moetrain.train.loop import Trainer
from moetrain.train.metrics import peak_memory_gib

SETTLED = 50
"""Steps after which nothing new should be allocated."""
SLACK = 64 << 20
"""Bytes by which free memory may shrink: other processes use it too."""
NUMBERS = 2**24
"""Number of elements that are summed at a time."""


def main() -> int:
    """Start the ranks, or run as one of them; return 1 if a check fails."""
    parser = argparse.ArgumentParser(description="Compare FSDP's transports.", allow_abbrev=False)
    parser.add_argument("recipe")
    parser.add_argument("--compare-steps", type=int, default=20)
    parser.add_argument("--memory-steps", type=int, default=200)
    args, settings = parser.parse_known_args()
    if args.memory_steps <= args.compare_steps + SETTLED:
        least = args.compare_steps + SETTLED + 1
        parser.error(
            f"--memory-steps: {args.memory_steps} compares no memory; give {least} or more"
        )
    nproc = num_processes(Config.load(args.recipe, settings))
    if launched_place() is None and nproc > 1:
        return start_ranks([__file__, *sys.argv[1:]], nproc)
    config = [
        Config.load(args.recipe, [*settings, "--parallel.fsdp_transport", transport])
        for transport in ("nccl", "copy")
    ]
    expected = compare(Trainer(config[0]), args.compare_steps)
    gc.collect()
    torch.cuda.empty_cache()
    trainer = Trainer(config[1])
    found = compare(trainer, args.compare_steps)
    odd = [name for name, value in expected.items() if found[name] != value]
    is_flat = watch(trainer, args.memory_steps - args.compare_steps)
    problem = f"rank {trainer.world.rank}: {', '.join(odd[:5])} differ" if odd else ""
    problem = trainer.world.any(problem)
    if trainer.world.is_main:
        print(f"bits of {len(found)} numbers and tensors a rank: {problem or 'all the same'}")
    trainer.world.leave()
    return int(bool(problem) or not is_flat)


def compare(trainer: Trainer, steps: int) -> dict[str, float]:
    """Train, and print a line; return all losses, and checksums of the last step.

    The checksums are those of the gradients before the update, and of the parameters after it.
    """
    members, world = trainer.engine.fsdp.members, trainer.world
    losses = [trainer.train_step().loss for _ in range(steps // 2)]
    wait(trainer)
    start, before = time.perf_counter(), trainer.tokens
    losses += [trainer.train_step().loss for _ in range(len(losses), steps - 1)]
    wait(trainer)
    rate = (trainer.tokens - before) / (time.perf_counter() - start) / world.size
    gradients: dict[str, float] = {}

    def look(*_: Any) -> None:
        for name, member in members.items():
            if member.local.grad is not None:
                gradients[f"gradient of {name}"] = checksum(member.local.grad)

    hook = trainer.optimizer.register_step_pre_hook(look)
    losses.append(trainer.train_step().loss)
    hook.remove()
    if world.is_main:
        print(
            f"{trainer.config.parallel.fsdp_transport}: {rate:,.0f} tokens/s/GPU, "
            f"{peak_memory_gib(trainer.device):.1f} GiB, "
            f"loss {losses[0].item():.4f} -> {losses[-1].item():.4f}",
            flush=True,
        )
    parameters = {name: checksum(member.local) for name, member in members.items()}
    numbers = {f"loss {step}": loss.item() for step, loss in enumerate(losses)}
    return gradients | parameters | numbers


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the elements' bits and positions."""
    kind = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, bits in enumerate(tensor.detach().contiguous().view(-1).view(kind).split(NUMBERS)):
        places = torch.arange(1, len(bits) + 1, device=bits.device)
        total += (bits.long() * places).sum() * (2 * number + 1)
    return int(total.item())


def watch(trainer: Trainer, steps: int) -> bool:
    """Train ``steps`` more steps; return True if free memory stays the same.

    It may shrink by :data:`SLACK` from step :data:`SETTLED` of these to the last.
    """
    free = []
    for step in range(steps):
        trainer.train_step()
        if step + 1 in (SETTLED, steps):
            wait(trainer)
            free.append(free_bytes(trainer.device))
    lost = free[0] - free[-1]
    print(
        f"rank {trainer.world.rank}: {free[0] / 2**30:.2f} GiB free after {SETTLED} more steps, "
        f"{free[-1] / 2**30:.2f} after {steps}",
        flush=True,
    )
    return lost <= SLACK


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU; for a CPU, those of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
