"""``moetrain report RUN [RUN ...]``: write an HTML page with the curves of runs.

    output_dir/metrics.jsonl, config.json, sample.txt, routing.npz  ->  output_dir/report.html

RUN is the output folder of a run, which may still be training. Several runs share the charts, and
the page lists the settings in which they differ. The page is one file that any browser shows. It is
written to the first run's folder, or to ``--out``. In a Python program, the callback Report writes
the page at the end of a run. It also keeps ``routing.npz``, the number of tokens that each expert
got, which metrics.jsonl does not have.

    from moetrain.cli.report import Report

    Trainer(config, callbacks=[Report()]).fit()

Charts need matplotlib (``pip install matplotlib``).
"""

# Legend: N points in time, L layers with experts, E experts.

import base64
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import jinja2
import numpy as np

from moetrain.cli.main import Parser, command
from moetrain.config import Config, ConfigError
from moetrain.config.files import write_atomically
from moetrain.config.sources import leaves
from moetrain.train.callbacks import Callback, Row, RunView
from moetrain.train.metrics import read_metrics

_POINTS = 256
"""Points in time at which routing is kept. Once there are twice as many, the mean of each two
neighbours replaces them."""
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
            write_report([read_run(run.folder)], run.folder / "report.html")

    def _keep(self, run: RunView) -> None:
        if not self._steps:
            return
        kept = {"steps": np.array(self._steps), "counts": np.stack(self._counts)}
        kept["layers"] = np.array(run.moe_layers)
        buffer = BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **kept)
        file = run.folder / "routing.npz"
        write_atomically(file, lambda new: new.write_bytes(buffer.getvalue()))


class _Run(NamedTuple):
    """The metrics, settings, samples and routing of one run."""

    name: str
    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    """Values by dotted name."""
    samples: list[str]
    routing: dict[str, np.ndarray] | None
    """``steps`` [N], ``counts`` [N, L, E] and ``layers`` [L]; None: they were not kept."""


def read_run(folder: Path) -> _Run:
    """Read a run's output folder.

    Raises OSError, ValueError or BadZipFile: it has no run, or the run's files cannot be read.
    """
    return _Run(
        name=folder.absolute().name,
        rows=read_metrics(folder / "metrics.jsonl"),
        settings=dict(leaves(json.loads((folder / "config.json").read_text("utf-8")))),
        samples=_samples(folder),
        routing=_routing(folder),
    )


def write_report(runs: Sequence[_Run], file: Path) -> None:
    """Write the page of ``runs`` to ``file``. Raises OSError: it cannot be written."""
    if len({run.name for run in runs}) < len(runs):  # folders of one name
        runs = [run._replace(name=f"{run.name} ({i})") for i, run in enumerate(runs, 1)]
    undefined = jinja2.StrictUndefined
    pages = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=undefined)
    pages.filters["number"] = _number
    source = Path(__file__).parent / "templates" / "report.html.jinja"
    page = pages.from_string(source.read_text("utf-8"))
    is_alone = len(runs) == 1
    heads = ["" if is_alone else run.name for run in runs]
    text = page.render(
        name=", ".join(run.name for run in runs),
        size=_SIZE,
        summary=_summary(runs),
        charts=[chart for title, names in _CHARTS if (chart := _chart(title, names, runs))],
        times=[(head, _times(run.rows)) for head, run in zip(heads, runs, strict=True)],
        experts=_experts(runs[0].routing) if is_alone else None,
        samples=[(h, text) for h, run in zip(heads, runs, strict=True) for text in run.samples],
        settings=_settings(runs),
    )
    write_atomically(file, lambda new: new.write_text(text, "utf-8"))


def _summary(runs: Sequence[_Run]) -> list[list[str]]:
    """Return a row for each metric of ``_FIRST``, with its last value in each run."""
    last = [
        {name: row[name] for row in run.rows for name in _FIRST if row.get(name) is not None}
        for run in runs
    ]
    heads = [["", *(run.name for run in runs)]] * (len(runs) > 1)
    values = [
        [name, *(_number(each[name]) if name in each else "" for each in last)]
        for name in _FIRST
        if any(name in each for each in last)
    ]
    return heads + values


def _settings(runs: Sequence[_Run]) -> list[list[str]]:
    """Return the settings of a run that are not the defaults; of several, those that differ."""
    if len(runs) == 1:
        default = dict(leaves(Config().to_dict()))
        found = runs[0].settings.items()
        return [[k, json.dumps(v)] for k, v in found if v != default.get(k)]
    every = dict.fromkeys(name for run in runs for name in run.settings)
    texts = {k: [json.dumps(run.settings.get(k)) for run in runs] for k in every}
    differing = [[name, *values] for name, values in texts.items() if len({*values}) > 1]
    return [["", *(run.name for run in runs)], *differing]


def _routing(folder: Path) -> dict[str, np.ndarray] | None:
    """Return ``steps`` [N], ``counts`` [N, L, E] and ``layers`` [L]; None if there are none."""
    file = folder / "routing.npz"
    if not file.exists():
        return None
    with np.load(file) as kept:
        return dict(kept)


def _chart(title: str, names: Sequence[str], runs: Sequence[_Run]) -> dict[str, Any] | None:
    """Return a chart of the metrics ``names`` and ``NAME/...``; None: they have no values."""
    from matplotlib.ticker import MaxNLocator  # slow to import

    series: dict[str, list[tuple[int, float]]] = {}
    for run in runs:
        before = f"{run.name}: " if len(runs) > 1 else ""
        for row in run.rows:
            for key, value in row.items():
                if value is not None and key.partition("/")[0] in names:
                    series.setdefault(before + key, []).append((row["step"], value))
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


@command
def main(argv: Sequence[str] | None) -> None:
    parser = Parser("report", __doc__)
    parser.prog = "moetrain report"
    parser.add_argument("runs", metavar="RUN", nargs="+", help="output folder of a run")
    meaning = "file to write; default report.html in the first run's folder"
    parser.add_argument("--out", metavar="FILE.html", help=meaning)
    options = parser.parse_args(argv)
    folders = [Path(run).expanduser() for run in options.runs]
    file = Path(options.out).expanduser() if options.out else folders[0] / "report.html"
    runs: list[_Run] = []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except (OSError, ValueError, BadZipFile) as error:
            problem = f"{str(folder)!r} has no run that can be read: {error}"
            raise ConfigError("RUN", f"{problem}; give the output_dir of a run") from None
    try:
        write_report(runs, file)
    except ModuleNotFoundError as error:
        raise ConfigError("report", f"{error}; pip install matplotlib") from None
    except OSError as error:
        raise ConfigError("out", f"{str(file)!r}: {error.strerror}; give another file") from None
    print(file)
