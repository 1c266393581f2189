"""Draw pipeline schedules: who runs what when, as a PNG and an SVG.

Usage: python scripts/draw_schedule.py 1f1b zbv --ranks 4 --micro_batches 8 --out schedule

A rank is a row; a number is a micro-batch. Ranks with several stages show later ones lighter.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from moetrain.parallel.pipeline.schedules import RECIPES, Costs, make_schedule
from moetrain.parallel.pipeline.simulator import Timeline, in_flight, run_on_paper

COLORS = {"F": "#8fb8de", "B": "#8fce9f", "I": "#8fce9f", "W": "#f2c879"}
NAMES = {"F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight"}


def draw(axes: "plt.Axes", timeline: Timeline) -> None:
    """One schedule; its title says what it takes."""
    schedule = timeline.schedule
    for rank, actions in enumerate(schedule.actions):
        stages = schedule.stages_of(rank)
        for work in actions:
            height = 0.9 / len(work.parts)  # of a pair's halves one lies above the other
            for i, action in enumerate(work.parts):
                start, end = timeline.spans[action]
                shade = 1 - 0.55 * stages.index(action.stage) / max(1, len(stages) - 1)
                box = {"left": start, "height": height, "edgecolor": "white", "linewidth": 0.6}
                at = rank + (i - (len(work.parts) - 1) / 2) * height
                axes.barh(at, end - start, color=COLORS[action.kind], alpha=shade, **box)
                label = str(action.micro_batch)
                axes.text((start + end) / 2, at, label, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(schedule.num_ranks), [f"rank {r}" for r in range(schedule.num_ranks)])
    axes.set_ylim(schedule.num_ranks - 0.5, -0.5)
    axes.set_title(describe(timeline), fontsize=8, loc="left")


def describe(timeline: Timeline) -> str:
    """One line."""
    schedule = timeline.schedule
    peaks = [max(in_flight(schedule, rank)) for rank in range(schedule.num_ranks)]
    virtual = schedule.num_stages // schedule.num_ranks
    return (
        f"{schedule.name}: bubble {timeline.bubble:.1%}, activations in flight "
        f"{max(peaks)} of 1/{schedule.num_stages} of the layers"
        f"{f' ({virtual} stages a rank)' * (virtual > 1)}"
    )


def main() -> int:
    """Write OUT.png and OUT.svg; exit code 2 on a schedule that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedules", nargs="+", help=", ".join(RECIPES))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--virtual", type=int, default=2, help="stages a rank, where it can choose")
    parser.add_argument("--communication", type=float, default=0.0, help="in units of a forward")
    parser.add_argument("--out", type=Path, default=Path("schedule"))
    words = parser.parse_args()
    timelines = []
    for name in words.schedules:
        choices = RECIPES[name].virtual if name in RECIPES else (1,)
        virtual = choices[0] if len(choices) == 1 else words.virtual
        try:
            schedule = make_schedule(name, words.ranks, virtual, words.micro_batches)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        cost = 1 / virtual  # the same model, in shorter stages
        timelines.append(run_on_paper(schedule, Costs(cost, cost, cost, words.communication)))
    figure, rows = plt.subplots(
        len(timelines), figsize=(11, (0.28 * words.ranks + 0.5) * len(timelines)), squeeze=False,
        sharex=True,
    )  # fmt: skip
    for axes, timeline in zip(rows[:, 0], timelines, strict=True):
        draw(axes, timeline)
        print(describe(timeline))
    rows[-1, 0].set_xlabel("time, in forwards of a rank's layers")
    kinds = {action.kind for t in timelines for action in t.spans} - {"I"}
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[k]) for k in sorted(kinds)]
    names = [NAMES[k] + " (-input)" * (k == "B" and "W" in kinds) for k in sorted(kinds)]
    figure.legend(handles, names, loc="upper right", fontsize=7, ncols=4, frameon=False)
    figure.tight_layout()
    for ending in ("png", "svg"):
        path = words.out.with_name(f"{words.out.name}.{ending}")
        figure.savefig(path, dpi=150)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
