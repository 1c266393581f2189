"""Draw pipeline schedules as a PNG and an SVG: each rank's actions over time.

Usage: python scripts/draw_schedule.py gpipe 1f1b --ranks 4 --micro_batches 8 --out schedule

Each row is a rank, and each number a micro-batch. If a rank has several stages, later ones are
lighter.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from moetrain.parallel.pipeline.schedules import SCHEDULES, Schedule, _Timeline

COLORS = {"F": "#8fb8de", "B": "#8fce9f"}
NAMES = {"F": "forward", "B": "backward"}


def draw(axes: "plt.Axes", timeline: _Timeline) -> None:
    """Draw one schedule; its title is :func:`describe`'s line."""
    schedule = timeline.schedule
    for rank, actions in enumerate(schedule.actions):
        stages = [s for s, owner in enumerate(schedule.rank_of_stage) if owner == rank]
        for action in actions:
            start, end = timeline.times[action]
            shade = 1 - 0.55 * stages.index(action.stage) / max(1, len(stages) - 1)
            box = {"left": start, "height": 0.9, "edgecolor": "white", "linewidth": 0.6}
            axes.barh(rank, end - start, color=COLORS[action.kind], alpha=shade, **box)
            label = str(action.micro_batch)
            axes.text((start + end) / 2, rank, label, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(schedule.num_ranks), [f"rank {r}" for r in range(schedule.num_ranks)])
    axes.set_ylim(schedule.num_ranks - 0.5, -0.5)
    axes.set_title(describe(timeline), fontsize=8, loc="left")


def describe(timeline: _Timeline) -> str:
    """Describe a schedule in one line: its bubble, and the most activations in flight on a rank."""
    schedule = timeline.schedule
    peaks = [max(schedule.in_flight(rank)) for rank in range(schedule.num_ranks)]
    virtual = schedule.num_stages // schedule.num_ranks
    return (
        f"{schedule.name}: bubble {timeline.bubble:.1%}, activations in flight "
        f"{max(peaks)} of 1/{schedule.num_stages} of the layers"
        f"{f' ({virtual} stages a rank)' * (virtual > 1)}"
    )


def main() -> int:
    """Write OUT.png and OUT.svg; return 2 for an impossible schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedules", nargs="+", help=", ".join(SCHEDULES))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--virtual", type=int, default=2, help="stages of a rank, if it may choose")
    parser.add_argument("--communication", type=float, default=0.0, help="time, in forwards")
    parser.add_argument("--out", type=Path, default=Path("schedule"))
    words = parser.parse_args()
    timelines = []
    for name in words.schedules:
        try:
            if name not in SCHEDULES:
                raise ValueError(f"unknown schedule {name!r}; use one of {', '.join(SCHEDULES)}")
            virtual = words.virtual if len(SCHEDULES[name].stages_per_rank) > 1 else 1
            schedule = Schedule.make(name, words.ranks, virtual, words.micro_batches)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        timelines.append(
            # The model is the same, so its stages are shorter if a rank has several.
            schedule.simulate(lambda action, v=virtual: action.unit_time / v, words.communication)
        )
    figure, rows = plt.subplots(
        len(timelines), figsize=(11, (0.28 * words.ranks + 0.5) * len(timelines)), squeeze=False,
        sharex=True,
    )  # fmt: skip
    for axes, timeline in zip(rows[:, 0], timelines, strict=True):
        draw(axes, timeline)
        print(describe(timeline))
    rows[-1, 0].set_xlabel("time, in forwards of a rank's layers")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    names = list(NAMES.values())
    figure.legend(handles, names, loc="upper right", fontsize=7, ncols=4, frameon=False)
    figure.tight_layout()
    for ending in ("png", "svg"):
        path = words.out.with_name(f"{words.out.name}.{ending}")
        figure.savefig(path, dpi=150)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
