"""Draw the parts of moetrain and what they pass to one another, in a light and a dark picture.

    python scripts/draw_system.py

It writes pictures/system-light.svg and pictures/system-dark.svg, which the README shows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

FOLDER = Path(__file__).parent.parent / "pictures"
COLOURS = {
    "light": {"ink": "#1f2328", "box": "#f6f8fa", "edge": "#8c959f", "arrow": "#0969da"},
    "dark": {"ink": "#e6edf3", "box": "#161b22", "edge": "#6e7681", "arrow": "#58a6ff"},
}


class Box(NamedTuple):
    """A part: its centre, width, name and what it does."""

    x: float
    y: float
    width: float
    name: str
    text: str


HEIGHT = 1.0
BOXES = [
    Box(1.5, 5.2, 2.6, "data", "texts, chats, pairs,\ntool calls, Parquet"),
    Box(5.0, 5.2, 2.6, "train", "loop, objectives,\ncheckpoints"),
    Box(8.5, 5.2, 2.6, "generate", "pages, batching,\ndrafts, grammars"),
    Box(5.0, 3.5, 2.6, "model", "one graph a block,\nHugging Face weights"),
    Box(1.5, 3.5, 2.6, "parallel", "FSDP, tensor, expert,\ncontext, pipeline"),
    Box(8.5, 3.5, 2.6, "kernels", "Triton, DeepEP, cuDNN,\neach beside its formula"),
    Box(8.5, 6.9, 2.6, "serve, jobs", "OpenAI's protocol,\nadapters of many tenants"),
    Box(5.0, 6.9, 2.6, "rl", "environments, rewards,\nadvantages"),
]
ARROWS = [  # from, to, what is passed on
    ("data", "train", "rows"),
    ("train", "generate", "weights"),
    ("train", "model", ""),
    ("parallel", "model", "shards"),
    ("kernels", "model", "ops"),
    ("generate", "serve, jobs", ""),
    ("generate", "rl", "rollouts"),
    ("rl", "train", "samples"),
]


def draw(colours: dict[str, str], path: Path) -> None:
    """Draw all boxes and arrows in one set of colours."""
    figure, axes = plt.subplots(figsize=(8, 4.6))
    axes.set_xlim(0, 10)
    axes.set_ylim(2.8, 7.6)
    axes.axis("off")
    boxes = {box.name: box for box in BOXES}
    for box in BOXES:
        corner = (box.x - box.width / 2, box.y - HEIGHT / 2)
        style: dict[str, Any] = {
            "facecolor": colours["box"],
            "edgecolor": colours["edge"],
            "linewidth": 1.0,
        }
        shape = FancyBboxPatch(corner, box.width, HEIGHT, boxstyle="round,pad=0.02", **style)
        axes.add_patch(shape)
        ink: dict[str, Any] = {"ha": "center", "va": "center", "color": colours["ink"]}
        axes.text(box.x, box.y + 0.28, box.name, weight="bold", fontsize=11, **ink)
        axes.text(box.x, box.y - 0.16, box.text, fontsize=8.5, **ink)
    for begin, end, word in ARROWS:
        start, stop = ends(boxes[begin], boxes[end])
        arrow = {"arrowstyle": "-|>", "color": colours["arrow"], "linewidth": 1.4}
        axes.annotate("", xy=stop, xytext=start, arrowprops=arrow)
        x, y = (start[0] + stop[0]) / 2, (start[1] + stop[1]) / 2
        beside: dict[str, Any] = {"fontsize": 8.5, "color": colours["arrow"]}
        if start[1] == stop[1]:
            axes.text(x, y + 0.12, word, ha="center", va="bottom", **beside)
        else:
            axes.text(x + 0.15, y, word, ha="left", va="center", **beside)
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def ends(begin: Box, end: Box) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return where an arrow leaves one box and reaches another, on facing sides."""
    if begin.y == end.y:
        side = 1 if end.x > begin.x else -1
        return (begin.x + side * begin.width / 2, begin.y), (end.x - side * end.width / 2, end.y)
    side = 1 if end.y > begin.y else -1
    if begin.x == end.x:
        return (begin.x, begin.y + side * HEIGHT / 2), (end.x, end.y - side * HEIGHT / 2)
    across = 1 if end.x > begin.x else -1
    start = (begin.x + across * begin.width / 2, begin.y + side * HEIGHT / 4)
    return start, (end.x - across * end.width / 2, end.y - side * HEIGHT / 4)


def main() -> int:
    """Write both pictures, and print their paths."""
    mpl.rcParams.update({"svg.hashsalt": "moetrain", "svg.fonttype": "path"})
    for name, colours in COLOURS.items():
        path = FOLDER / f"system-{name}.svg"
        draw(colours, path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
