"""Train runs that differ in a few settings, and draw their losses into one picture.

    python scripts/compare_runs.py OUT debug train.steps=200 \\
        --run "fp32 moments" optim.state_dtype=float32 \\
        --run "bf16 moments" optim.state_dtype=bfloat16

The words before the first ``--run`` (a recipe or file, and settings) are common to all runs. Each
``--run`` adds a name and its own settings, which replace common ones. Each run gets a folder in
OUT; what is in this folder is removed first. ``losses.png`` shows every run's loss above, and its
smoothed difference from the first run's below. ``losses.json`` has the losses. A line for each run
shows the mean loss of the last tenth of the steps. With several GPUs ``launch.nproc=auto`` uses
them all. ``--at-once N`` trains N runs concurrently on the same devices: a small run leaves them
mostly idle.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from moetrain.train.metrics import read_metrics

SMOOTHED = 0.05
"""Share of the steps over which differences are averaged."""


def train(folder: Path, words: Sequence[str]) -> list[float]:
    """Train a run in its own process; return the losses of every step."""
    shutil.rmtree(folder, ignore_errors=True)
    said = [f"output_dir={folder}", "log.interval=1"]
    said += ["checkpoint.at_end=no", "checkpoint.minutes=0"]
    subprocess.run([sys.executable, "-m", "moetrain.train", *arguments(words, said)], check=True)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
    return [row["loss"] for row in rows]


def arguments(*groups: Sequence[str]) -> list[str]:
    """Return a command line: the recipe, then the settings of all ``groups``.

    A setting of a later group replaces that of an earlier one.
    """
    words = [word for group in groups for word in group]
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    recipes = [word for word in words if "=" not in word]
    return [*recipes, *(part for key, value in settings.items() for part in (f"--{key}", value))]


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Return, at each position, the mean of the last ``width`` values."""
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def draw(losses: dict[str, list[float]], picture: Path) -> None:
    """Draw losses above, and smoothed differences from the first run below."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    first = next(iter(losses.values()))
    for name, values in losses.items():
        steps = range(1, len(values) + 1)
        above.plot(steps, values, label=name, linewidth=1)
        apart = [a - b for a, b in zip(values, first, strict=True)]
        below.plot(steps, smoothed(apart, max(1, round(SMOOTHED * len(values)))), linewidth=1)
    above.set_ylabel("loss (nats a token)")
    below.set_ylabel(f"minus {next(iter(losses))}'s")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    above.legend()
    figure.savefig(picture, dpi=130)


def main() -> int:
    """Train all runs, print a line for each, and draw. A run that fails ends the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("common", nargs="*", help="a recipe, and settings: section.key=value")
    parser.add_argument("--run", nargs="+", action="append", required=True, metavar=("NAME", "SET"))
    parser.add_argument("--at-once", type=int, default=1, metavar="N")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    losses = {}
    with ThreadPoolExecutor(args.at_once) as threads:
        folders = [args.out / name.replace(" ", "-") for name, *_ in args.run]
        words = [[*args.common, *words] for _, *words in args.run]
        for (name, *_), found in zip(args.run, threads.map(train, folders, words), strict=True):
            losses[name] = found
            last = statistics.fmean(found[-max(1, len(found) // 10) :])
            print(f"{name}: {len(found)} steps, {last:.4f} at the end", flush=True)
    (args.out / "losses.json").write_text(json.dumps(losses))
    draw(losses, args.out / "losses.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
