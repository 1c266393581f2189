"""Measure tokens/s and peak memory of every activation policy.

    python scripts/bench_activation.py [--micro-batches 8,16] [--steps 5] [--rows NAME,...]
        [--recipe bench-qwen3-30b-a3b] [--layers 6] [--results FILE.jsonl] [--section.key value ...]

It runs real, compiled steps with the optimizer on one GPU, and prints a line for each policy and
micro-batch: tokens/s, the time of a step, the allocator's peak, the estimate of
``moetrain.train.estimates.memory`` and the last loss. For a policy that does not fit, the line says
so.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_train import commit, device_name, wait

from moetrain.config import Config, ConfigError
from moetrain.models.transformer import compute_dtype
from moetrain.runtime.memory import DeviceBytes
from moetrain.train.estimates.memory import GIB, RankSizes
from moetrain.train.loop import Trainer
from moetrain.train.metrics import peak_memory_gib
from moetrain.train.session import garbage_collector_off

WARMUP_STEPS = 3
ROWS = "none,selective,full"


def main() -> int:
    parser = argparse.ArgumentParser(description="Time activation policies.", allow_abbrev=False)
    parser.add_argument("--recipe", default="bench-qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--micro-batches", default="8,16")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--results", type=Path)
    args, settings = parser.parse_known_args()
    print(f"commit {commit()}, torch {torch.__version__}, {args.recipe}, {args.layers} layers")
    for size in args.micro_batches.split(","):
        for name in args.rows.split(","):
            row = {"row": name, "micro_batch": int(size)} | bench(args, settings, name, size)
            print(report(row), flush=True)
            if args.results is not None:
                with args.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return 0


def bench(args: argparse.Namespace, settings: list[str], name: str, size: str) -> dict[str, Any]:
    """Measure one policy at one micro-batch; return the figures, or the ``problem``."""
    words = [
        *("--model.num_layers", str(args.layers), "--compile.enabled", "yes"),
        *("--train.micro_batch_size", size, "--train.global_batch_size", size),
        *("--activation.policy", name),
        *("--checkpoint.at_end", "no", "--checkpoint.minutes", "0"),
        *("--log.tensorboard", "no", *settings),
    ]
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder, garbage_collector_off():
        try:
            config = Config.load(args.recipe, [*words, "--output_dir", f"{folder}/out"])
            return measure(Trainer(config), args.steps)
        except ConfigError as error:
            return {"problem": str(error)}
        except torch.OutOfMemoryError:
            return {"problem": "out of memory"}


def measure(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Time ``steps`` steps after some warm-up steps; return the figures by name."""
    for _ in range(WARMUP_STEPS):
        trainer.train_step()
    wait(trainer)
    if trainer.device.type == "cuda":
        DeviceBytes.forget_peak(trainer.device)  # excludes the peak of compiling and tuning
    start, tokens = time.perf_counter(), trainer.tokens
    losses = [trainer.train_step().loss for _ in range(steps)]
    wait(trainer)
    seconds = (time.perf_counter() - start) / steps
    dtype = compute_dtype(trainer.config, trainer.device)
    dims = trainer.world.dims
    ranks = RankSizes.of_ranks(trainer.config, trainer.session.arch, dims, dtype)
    return {
        "hardware": device_name(trainer.device),
        "tokens_per_second": (trainer.tokens - tokens) / steps / seconds,
        "step_ms": seconds * 1e3,
        "memory_gib": peak_memory_gib(trainer.device),
        "estimate_gib": max(rank.peak(None).total for rank in ranks) / GIB,
        "loss": losses[-1].item(),
    }


def report(row: dict[str, Any]) -> str:
    """Return the row as one line."""
    head = f"{row['row']:>15}  micro-batch {row['micro_batch']:2}"
    if "problem" in row:
        return f"{head}  {row['problem']}"
    return (
        f"{head}  {row['tokens_per_second']:9,.0f} tokens/s  {row['step_ms']:7.1f} ms  "
        f"{row['memory_gib']:6.1f} GiB (estimate {row['estimate_gib']:.1f})  "
        f"loss {row['loss']:.6f}"
    )


if __name__ == "__main__":
    sys.exit(main())
