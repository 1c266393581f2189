"""Time whole steps of reinforcement learning: generation, updates, and everything in between.

    torchrun --nproc-per-node 4 scripts/bench_rl.py --output_dir OUT [--layers 24]
        [--section.key=value ...]

The model is ``qwen3-30b-a3b`` with random weights, cut to ``--layers``. Prompts have ``--prompt``
random tokens, in groups of 8, and every response has ``--responses`` tokens. For each rank there
are ``--sequences`` trajectories in a step; with ``--rl.placement=apart`` ranks that only generate
count too. With ``--mean M`` lengths are skewed instead: they are drawn as if each token ended a
response with a probability of 1 / M, up to ``--responses`` tokens. The reward is the share of even
tokens, so that rewards vary within every group. The first step compiles kernels, captures CUDA
graphs and connects ranks, and is not counted.

One line is for the whole step, and one for each part of it, with seconds and share. Generated
tokens are counted as in published figures: those of responses alone, over the time of the whole
step. The exit code is 1 if a log-probability of generation differs from training's although both
use exact kernels and the same weights (``--rl.generator_dtype``, ``--rl.keep_cache``).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_train import commit, device_name

from moetrain.config import Config
from moetrain.config.environment import launched_place
from moetrain.rl.envs import Episode, Prompts, Turn
from moetrain.rl.loop import RlTrainer

GROUP = 8


class Noise(Episode):
    """A prompt of random tokens, with one answer."""

    def __init__(self, task: int, length: int, vocabulary: int, most: int | None) -> None:
        rng = random.Random(task)
        self.prompt = tuple(rng.randrange(vocabulary) for _ in range(length))
        self.most = most

    def reset(self) -> Turn:
        return Turn(self.prompt, max_tokens=self.most)

    def step(self, action: Sequence[int]) -> Turn:
        return Turn(reward=sum(token % 2 == 0 for token in action) / len(action), done=True)


class Noises:
    """The environment, with one prompt for every number."""

    num_tasks: int | None = None

    def __init__(self, prompts: Prompts, length: int, mean: int | None) -> None:
        self.length, self.vocabulary = length, prompts.tokenizer.vocab_size
        self.mean, self.lengths = mean, random.Random(0)

    def episode(self, task: int) -> Noise:
        most = self.mean and 1 + int(self.lengths.expovariate(1 / self.mean))
        return Noise(task, self.length, self.vocabulary, most)


class Bench(RlTrainer):
    """A run in which responses end only by their length."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.collector.stop_ids = ()

    def finish(self) -> None:
        """Save nothing: these weights are useless."""


def main() -> int:
    """Run the benchmark, and print the report on rank 0."""
    parser = argparse.ArgumentParser(description="Time RL steps.", allow_abbrev=False)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--responses", type=int, default=2048)
    parser.add_argument("--mean", type=int)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output_dir", type=Path, required=True)
    args, words = parser.parse_known_args()
    if args.steps < 2:
        parser.error(f"--steps: {args.steps} counts no step, as the first is not counted; give 2")
    place = launched_place()
    ranks = 1 if place is None else place.world_size
    own = dict(word.removeprefix("--").split("=", 1) for word in words)
    apart = int(own.get("rl.generators", "1")) if own.get("rl.placement") == "apart" else 0
    row = args.prompt + args.responses
    settings = {
        "model.preset": "qwen3-30b-a3b",
        "model.num_layers": args.layers,
        "data.seq_len": 2 * row,
        "train.steps": args.steps,
        "train.micro_batch_size": 2,
        "train.global_batch_size": ranks * args.sequences,
        "train.eval_interval": 0,
        "parallel.ep": ranks - apart,
        "optim.lr": 1e-6,
        "rl.group_size": GROUP,
        "rl.max_tokens": args.responses,
        "rl.max_sequences": args.sequences * ranks // (apart or ranks),
        "rl.cache_tokens": args.sequences * ranks // (apart or ranks) * (row + 64),
        "rl.env": f"{__file__}:Noises",
        "rl.env_args": json.dumps({"length": args.prompt, "mean": args.mean}),
        "rl.eval_tasks": 0,
        "rl.ratio": "rollout",
        "compile.enabled": "yes",
        "checkpoint.at_end": "no",
        "checkpoint.minutes": 0,
        "log.interval": 1,
        "log.tensorboard": "no",
        "output_dir": args.output_dir,
    }
    settings |= {} if apart else {"rl.offload": "yes"}
    given = [f"{key}={value}" for key, value in (settings | own).items()]
    trainer = Bench(Config.load(None, given))
    world = trainer.world
    hardware = f"{ranks} x {device_name(world.device)}, {world.dims.describe()}, apart {apart}"
    main_rank = world.is_main
    trainer.fit()
    if not main_rank:
        return 0
    lines = (args.output_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "step_seconds" in row][1:]
    print(f"{hardware}, commit {commit()}: {args.layers} layers")
    print(report(rows, ranks, args), flush=True)
    config = trainer.config
    has_same = not config.generation_differs and not config.rl.keep_cache
    is_exact = has_same and config.kernels.attention == "exact"
    return 1 if is_exact and any(row.get("mismatch_share") for row in rows) else 0


def report(rows: Sequence[dict[str, Any]], ranks: int, args: argparse.Namespace) -> str:
    """Describe the rows of the counted steps."""
    mean = {
        name: sum(row[name] for row in rows) / len(rows)
        for name in rows[0]
        if all(isinstance(row.get(name), int | float) for row in rows)
    }
    whole = mean["step_seconds"]
    responses = args.sequences * mean["length"]
    text = responses + args.sequences * args.prompt
    lines = [
        f"{len(rows)} steps of {whole:.2f} s: {responses / whole:,.0f} generated tokens/s/GPU, "
        f"{text / whole:,.0f} with prompts; length {mean['length']:.0f}, "
        f"mismatch {mean.get('mismatch', float('nan')):.3g} nats a token, of "
        f"{mean.get('mismatch_share', float('nan')):.3g}, "
        f"{mean['memory_gib']:.1f} GiB, ranks {ranks}"
    ]
    for name, value in mean.items():
        if name.startswith("seconds/"):
            lines.append(f"  {name[8:]:<16} {value:8.3f} s  {value / whole:6.1%}")
    for name, value in mean.items():
        if name.startswith("generator/"):
            lines.append(f"  {name:<26} {value:10,.1f} a step")
    lines.append(f"  generation {mean['generated_tokens_per_second'] / ranks:,.0f} tokens/s/GPU, ")
    lines[-1] += f"training {mean['tokens_per_second_per_device']:,.0f}"
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
