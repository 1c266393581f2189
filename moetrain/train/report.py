"""``report.html``: a run on one page, in one file, that any browser shows without a server.

    output_dir/metrics.jsonl, config.json, sample.txt, routing.npz  ->  output_dir/report.html

:class:`Report` writes it at the end of a run, and ``moetrain report FOLDER`` at any time. It also
keeps ``routing.npz``, which has what metrics.jsonl leaves out: how many tokens each expert got.

Legend: N points in time, L layers with experts, E experts.
"""

import base64
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from moetrain.config import Config
from moetrain.config.files import write_atomically
from moetrain.config.sources import leaves
from moetrain.train.callbacks import Callback, Row, RunView
from moetrain.train.metrics import read_metrics

_POINTS = 256
"""Points in time of the routing that are kept; of twice as many, neighbours are averaged."""
_WIDTH, _HEIGHT, _MARGIN = 520, 220, 56
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_CHARTS = (
    ("Loss (nats a token)", ("loss", "eval_loss")),
    ("Reward", ("reward", "eval_reward")),
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
"""Titles, and the metrics that a chart draws, with those below them (``NAME/...``)."""
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1120px;padding:0 1em;color:#111}
h2{margin-top:1.6em;border-bottom:1px solid #ddd} .charts{display:flex;flex-wrap:wrap;gap:12px}
figure{margin:0;width:520px} figcaption{font-weight:600} table{border-collapse:collapse}
td,th{padding:2px 12px 2px 0;text-align:left;vertical-align:top;font-variant-numeric:tabular-nums}
pre{white-space:pre-wrap;background:#f5f5f4;padding:1em} .dead{color:#b91c1c}
img{image-rendering:pixelated;width:330px;height:150px;border:1px solid #ddd}
"""


class Report(Callback):
    """Writes ``report.html`` when the run ends in order, and keeps ``routing.npz``."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._counts: list[np.ndarray] = []

    def on_start(self, run: RunView) -> None:
        kept = _routing(run.folder)
        if run.step and kept is not None:
            before = kept["steps"] <= run.step
            self._steps, self._counts = kept["steps"][before].tolist(), [*kept["counts"][before]]

    def on_log(self, run: RunView, row: Row) -> None:
        if run.expert_counts_LE is None or "loss" not in row:
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
        if error is None or isinstance(error, SystemExit):  # else the disk may be what failed
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

    Raises:
        OSError: there is no run in ``folder``, or it cannot be written.
    """
    rows = read_metrics(folder / "metrics.jsonl")
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    parts = [
        f"<h1>{escape(folder.absolute().name)}</h1>",
        _summary(rows),
        _charts(rows),
        _times(rows),
        _experts(_routing(folder)),
        _sample(folder),
        _settings(settings),
    ]
    head = f'<meta charset="utf-8"/><title>{escape(folder.name)}</title><style>{_STYLE}</style>'
    text = f"<!DOCTYPE html>\n<html><head>{head}</head><body>{''.join(parts)}</body></html>\n"
    file = folder / "report.html"
    write_atomically(file, lambda new: new.write_text(text, "utf-8"))
    return file


def _routing(folder: Path) -> dict[str, np.ndarray] | None:
    """Return ``steps`` [N], ``counts`` [N, L, E] and ``layers`` [L]; None: there are none."""
    file = folder / "routing.npz"
    if not file.exists():
        return None
    with np.load(file) as kept:
        return dict(kept)


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Show the last value of the numbers that a person asks for first."""
    names = ("step", "loss", "eval_loss", "reward", "eval_reward", "tokens", "mfu", "memory_gib")
    last = {name: row[name] for row in rows for name in names if row.get(name) is not None}
    return _table([(name, _number(last[name])) for name in names if name in last])


def _charts(rows: Sequence[Mapping[str, Any]]) -> str:
    drawn = []
    for title, names in _CHARTS:
        series: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            for key, value in row.items():
                if value is not None and key.partition("/")[0] in names:
                    series.setdefault(key, []).append((row["step"], value))
        if series:
            drawn.append(_chart(title, series))
    return f'<h2>Curves</h2><div class="charts">{"".join(drawn)}</div>'


def _chart(title: str, series: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Draw lines over steps, as SVG."""
    from matplotlib.ticker import MaxNLocator  # slow to import

    points = [point for line in series.values() for point in line]
    (left, right), values = ((min(x), max(x)) for x in zip(*points, strict=True))
    ticks = [float(tick) for tick in MaxNLocator(4).tick_values(*values)]
    low, high = ticks[0], ticks[-1]

    def place(step: float, value: float) -> tuple[float, float]:
        x = _MARGIN + (step - left) / ((right - left) or 1) * (_WIDTH - _MARGIN - 10)
        return x, _HEIGHT - 24 - (value - low) / (high - low) * (_HEIGHT - 34)

    body, legend = [], []
    for tick in ticks:
        x, y = place(left, tick)
        ends = f'x1="{x}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"'
        body.append(f'<line {ends} stroke="#e5e5e5"/>')
        body.append(f'<text x="{x - 4}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for step, anchor in ((left, "start"), (right, "end")):
        x, _ = place(step, low)
        body.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{step}</text>')
    for i, (name, line) in enumerate(series.items()):
        colour, spots = _COLOURS[i % len(_COLOURS)], [place(*point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        tip = f"<title>{escape(name)}: {_number(line[-1][1])} at step {line[-1][0]}</title>"
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}">{tip}</polyline>')
        if len(line) < 30:
            body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in spots]
        legend.append(f'<span style="color:{colour}">{escape(name)}</span>')
    box = f'width="{_WIDTH}" height="{_HEIGHT}" font-size="11"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(body)}</svg>'
    named = f"<small>{' '.join(legend)}</small>"
    return f"<figure><figcaption>{escape(title)}</figcaption>{named}<br/>{svg}</figure>"


def _times(rows: Sequence[Mapping[str, Any]]) -> str:
    """Add up where the time of the logged steps went, as far as a run notes it."""
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
    whole, lines, bar, legend = sum(spent.values()) or 1.0, [], "", []
    largest = sorted(((name, x) for name, x in spent.items() if x), key=lambda part: -part[1])
    for colour, (name, x) in zip(cycle(_COLOURS), largest, strict=False):
        lines.append((name.replace("_", " and "), f"{x:,.1f} s", f"{x / whole:.1%}"))
        box = f"display:inline-block;height:16px;width:{100 * x / whole:.2f}%;background:{colour}"
        bar += f'<span title="{escape(" ".join(lines[-1]))}" style="{box}"></span>'
        legend.append(f'<span style="color:{colour}">{escape(lines[-1][0])}</span>')
    return f"<h2>Time</h2><div>{bar}</div><small>{' '.join(legend)}</small>{_table(lines)}"


def _experts(kept: Mapping[str, np.ndarray] | None) -> str:
    """Draw the load of each layer's experts over time, and name those that got no token."""
    if kept is None:
        return ""
    from matplotlib import colormaps, image  # slow to import

    counts_NLE = kept["counts"]
    load_NLE = counts_NLE / np.maximum(counts_NLE.mean(2, keepdims=True), 1e-9)
    recent_LE = counts_NLE[-max(1, len(counts_NLE) // 10) :].sum(0)
    dead, figures = [], []
    for i, layer in enumerate(kept["layers"].tolist()):
        if len(idle := np.flatnonzero(recent_LE[i] == 0)):
            dead.append(f"layer {layer}: experts {', '.join(map(str, idle.tolist()))}")
        picture = BytesIO()
        colours = colormaps["viridis"](np.minimum(load_NLE[:, i].T / 3, 1.0))
        image.imsave(picture, colours, format="png")
        data = base64.b64encode(picture.getvalue()).decode()
        source = f'<img alt="load of layer {layer}" src="data:image/png;base64,{data}"/>'
        figures.append(f"<figure><figcaption>layer {layer}</figcaption>{source}</figure>")
    said = "".join(f'<p class="dead">No token in the last tenth of the run: {x}</p>' for x in dead)
    steps = f"step {kept['steps'][0]} to {kept['steps'][-1]}"
    note = f"<p>A row an expert, a column a time ({steps}): dark is no token, yellow three times "
    note += "the mean or more.</p>"
    every = "" if dead else "<p>Every expert got tokens in the last tenth of the run.</p>"
    return f'<h2>Experts</h2>{note}{said}{every}<div class="charts">{"".join(figures)}</div>'


def _sample(folder: Path) -> str:
    texts = [folder / "sample.txt", *sorted(folder.glob("completions/*.txt"))[-1:]]
    shown = [f"<pre>{_printable(x.read_text('utf-8'))}</pre>" for x in texts if x.exists()]
    return f"<h2>Samples</h2>{''.join(shown)}" if shown else ""


def _settings(settings: dict[str, Any]) -> str:
    default = dict(leaves(Config().to_dict()))
    lines = [
        (name, json.dumps(value)) for name, value in leaves(settings) if value != default.get(name)
    ]
    return "<h2>Settings that are not the defaults</h2>" + _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    body = ("".join(f"<td>{escape(text)}</td>" for text in line) for line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in body)}</table>"


def _printable(text: str) -> str:
    """Escape ``text`` without the control characters that no page may hold."""
    shown = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return escape("".join(shown))


def _number(value: float) -> str:
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:,.0f}"
    return f"{value:.4g}"
