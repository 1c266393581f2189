"""``report.html``: a run on one page, in one file, that any browser shows without a server.

    output_dir/metrics.jsonl, config.json, sample.txt, routing.npz  ->  output_dir/report.html

This command writes it, for a finished run or one that still trains:

    python examples/report.py FOLDER

A callback writes it at the end of a run. It also keeps ``routing.npz``, the number of tokens of
each expert, which metrics.jsonl leaves out.

    from report import Report

    Trainer(config, callbacks=[Report()]).fit()

``report.html.jinja`` beside this file is the template of the page.

Legend: N points in time, L layers with experts, E experts.
"""

if __name__ == "__main__":  # Ctrl-C during the imports below ends without a traceback
    from moetrain.cli import interrupt_quietly

    interrupt_quietly()

import base64
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from moetrain.cli import interrupt_by_exception
from moetrain.config import Config
from moetrain.config.files import write_atomically
from moetrain.config.sources import leaves
from moetrain.train.callbacks import Callback, Row, RunView
from moetrain.train.metrics import read_metrics

_POINTS = 256
"""Points in time of the routing that are kept; at twice as many, neighbours are averaged."""
_SIZE = {"width": 520, "height": 220, "left": 56, "right": 510}
"""Pixels of a chart, and the margins of its axes."""
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_FIRST = ("step", "loss", "eval_loss", "reward", "eval_reward", "tokens", "mfu", "memory_gib")
"""Metrics whose last values the page shows first."""
_CHARTS = (
    ("Loss (nats a token)", ("loss", "eval_loss")),
    ("Reward", ("reward", "eval_reward")),
    ("Share that is solved", ("solved", "eval_solved")),
    ("Preferences", ("margin", "accuracy", "eval_margin", "eval_accuracy")),
    ("Gradient norm", ("grad_norm",)),
    ("Learning rate", ("lr",)),
    ("Tokens a second and device", ("tokens_per_second_per_device",)),
    ("Seconds a step", ("step_seconds", "seconds")),
    ("Peak memory (GiB)", ("memory_gib",)),
    ("Fullest expert (times the mean)", ("expert_load_max",)),
    ("Entropy of the routers (nats)", ("router_entropy",)),
    ("Experts without tokens", ("experts_without_tokens",)),
)
"""Titles of charts with their metrics; a name also stands for the metrics below it
(``NAME/...``)."""


class Report(Callback):
    """Writes ``report.html`` when the run ends without an error, and keeps ``routing.npz``."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._counts: list[np.ndarray] = []

    def on_start(self, run: RunView) -> None:
        if not run.world.is_main:
            return
        kept = _routing(run.folder)
        if run.step and kept is not None:
            before = kept["steps"] <= run.step
            self._steps, self._counts = kept["steps"][before].tolist(), [*kept["counts"][before]]

    def on_log(self, run: RunView, row: Row) -> None:
        if not run.world.is_main or run.expert_counts_LE is None or "loss" not in row:
            return
        self._steps.append(run.step)
        self._counts.append(run.expert_counts_LE.float().cpu().numpy())
        if len(self._steps) >= 2 * _POINTS:
            self._steps = self._steps[1::2]
            pairs = zip(self._counts[::2], self._counts[1::2], strict=True)
            self._counts = [(a + b) / 2 for a, b in pairs]

    def on_checkpoint(self, run: RunView, path: Path) -> None:
        self._keep(run)

    def on_end(self, run: RunView, error: BaseException | None) -> None:
        is_in_order = error is None or isinstance(error, SystemExit)
        if run.world.is_main and is_in_order:  # after an error the disk may be full
            self._keep(run)
            write_report(run.folder)

    def _keep(self, run: RunView) -> None:
        if not self._steps:
            return
        kept = {"steps": np.array(self._steps), "counts": np.stack(self._counts)}
        kept["layers"] = np.array(run.moe_layers)
        buffer = BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **kept)
        file = run.folder / "routing.npz"
        write_atomically(file, lambda new: new.write_bytes(buffer.getvalue()))


def write_report(folder: Path) -> Path:
    """Write ``report.html`` of the run in ``folder``; return its path.

    Raises OSError or ValueError: there is no run, or it cannot be read.
    """
    rows = read_metrics(folder / "metrics.jsonl")
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    default = dict(leaves(Config().to_dict()))
    last = {name: row[name] for row in rows for name in _FIRST if row.get(name) is not None}
    undefined = jinja2.StrictUndefined
    pages = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=undefined)
    pages.filters["number"] = _number
    page = pages.from_string(Path(__file__).with_name("report.html.jinja").read_text("utf-8"))
    text = page.render(
        name=folder.absolute().name,
        size=_SIZE,
        summary=[(name, _number(last[name])) for name in _FIRST if name in last],
        charts=[chart for title, names in _CHARTS if (chart := _chart(title, names, rows))],
        times=_times(rows),
        experts=_experts(_routing(folder)),
        samples=_samples(folder),
        settings=[(k, json.dumps(v)) for k, v in leaves(settings) if v != default.get(k)],
    )
    file = folder / "report.html"
    write_atomically(file, lambda new: new.write_text(text, "utf-8"))
    return file


def _routing(folder: Path) -> dict[str, np.ndarray] | None:
    """Return ``steps`` [N], ``counts`` [N, L, E] and ``layers`` [L]; None if there are none."""
    file = folder / "routing.npz"
    if not file.exists():
        return None
    with np.load(file) as kept:
        return dict(kept)


def _chart(
    title: str, names: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return a chart of the metrics ``names``, and of those below them; None without values."""
    from matplotlib.ticker import MaxNLocator  # slow to import

    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key, value in row.items():
            if value is not None and key.partition("/")[0] in names:
                series.setdefault(key, []).append((row["step"], value))
    if not series:
        return None
    steps, values = zip(*(point for line in series.values() for point in line), strict=True)
    first, last = min(steps), max(steps)
    ticks = [float(tick) for tick in MaxNLocator(4).tick_values(min(values), max(values))]
    sides, ends = [_SIZE["left"], _SIZE["right"]], [_SIZE["height"] - 24, 10]
    across = partial(np.interp, xp=[first, last + (first == last)], fp=sides)
    down = partial(np.interp, xp=[ticks[0], ticks[-1]], fp=ends)
    lines = [
        {
            "name": name,
            "colour": colour,
            "spots": [(round(across(step), 1), round(down(value), 1)) for step, value in line],
            "step": line[-1][0],
            "value": line[-1][1],
        }
        for colour, (name, line) in zip(cycle(_COLOURS), series.items(), strict=False)
    ]
    places = [(round(down(tick), 1), tick) for tick in ticks]
    return {"title": title, "first": first, "last": last, "ticks": places, "lines": lines}


def _times(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sum the parts of the logged steps' time, as far as the run logged them."""
    spent: dict[str, float] = defaultdict(float)
    before = 0
    for row in rows:
        spent["evaluations"] += row.get("eval_seconds") or 0.0
        spent["checkpoints"] += row.get("checkpoint_blocked_seconds") or 0.0
        if row.get("step_seconds") is None:
            continue
        steps, before = max(1, row["step"] - before), row["step"]
        parts = {k.partition("/")[2]: v for k, v in row.items() if k.startswith("seconds/")}
        for name, seconds in (parts or {"steps": row["step_seconds"]}).items():
            spent[name] += steps * (seconds or 0.0)
    whole, found = sum(spent.values()) or 1.0, []
    largest = sorted(((name, x) for name, x in spent.items() if x), key=lambda part: -part[1])
    for colour, (part, x) in zip(cycle(_COLOURS), largest, strict=False):
        name, percent = part.replace("_", " and "), round(100 * x / whole, 2)
        words = name, f"{x:,.1f} s", f"{x / whole:.1%}"
        found.append({"name": name, "words": words, "percent": percent, "colour": colour})
    return found


def _experts(kept: Mapping[str, np.ndarray] | None) -> dict[str, Any] | None:
    """Draw the load of each layer's experts over time, and list those that got no token."""
    if kept is None:
        return None
    from matplotlib import colormaps, image  # slow to import

    counts_NLE = kept["counts"]
    load_NLE = counts_NLE / np.maximum(counts_NLE.mean(2, keepdims=True), 1e-9)
    recent_LE = counts_NLE[-max(1, len(counts_NLE) // 10) :].sum(0)
    dead, pictures = [], []
    for i, layer in enumerate(kept["layers"].tolist()):
        if len(idle := np.flatnonzero(recent_LE[i] == 0)):
            dead.append((layer, idle.tolist()))
        picture = BytesIO()
        colours = colormaps["viridis"](np.minimum(load_NLE[:, i].T / 3, 1.0))
        image.imsave(picture, colours, format="png")
        pictures.append((layer, base64.b64encode(picture.getvalue()).decode()))
    first, last = kept["steps"][[0, -1]].tolist()
    return {"dead": dead, "pictures": pictures, "first": first, "last": last}


def _samples(folder: Path) -> list[str]:
    """Return the model's samples, without the control characters that a page may not hold."""
    files = [folder / "sample.txt", *sorted(folder.glob("completions/*.txt"))[-1:]]
    texts = (file.read_text("utf-8") for file in files if file.exists())
    unknown = "\N{REPLACEMENT CHARACTER}"
    return ["".join(c if c.isprintable() or c in "\n\t" else unknown for c in x) for x in texts]


def _number(value: float) -> str:
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _main() -> None:
    interrupt_by_exception()  # so that no half-written page stays
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/report.py FOLDER (the output folder of a run)")
    try:
        print(write_report(Path(sys.argv[1])))
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, ValueError) as error:
        problem = f"{sys.argv[1]} has no run that can be read: {error}"
        sys.exit(f"error: {problem}; give the output_dir of one")


if __name__ == "__main__":
    _main()
