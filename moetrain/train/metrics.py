"""Reports of a run: terminal lines or a progress bar, metrics.jsonl, plots.

The numbers of a logged step are one flat mapping of names to floats, from which each output takes
what it shows. ``None`` is a value that is not known (MFU on a CPU) or not finite. Stores of other
programs are :mod:`moetrain.train.reporters`.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moetrain.config import LogSection
from moetrain.config.environment import GPUS
from moetrain.config.files import write_atomically
from moetrain.models.moe import RoutingStats
from moetrain.parallel.offload.arena import DeviceBytes

_LAYER_GROUPS = 4  # MoE health is logged for this many groups of neighbouring layers
_UNHEALTHY_LOGS = 20
"""Logged steps in a row in which a layer's routing must be unhealthy before the user is told: the
first steps of a run are uneven, and so is a single small batch."""


def _peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak of ``device`` in FLOP/s; None for a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)  # such as NVIDIA H200
    return next((gpu.peak_flops for kind, gpu in GPUS.items() if kind.upper() in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far: the run's own on CUDA, the resident set on a CPU."""
    if device.type == "cuda":
        return DeviceBytes.peak(device) / 2**30
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss / 2**30 if sys.platform == "darwin" else rss / 2**20


class Throughput:
    """A clock of training alone, and its tokens; evaluation and checkpoints stop it."""

    def __init__(self, flops_per_token: float, device: torch.device) -> None:
        self.flops_per_token, self.peak = flops_per_token, _peak_flops(device)
        self.device = device
        self._started: float | None = None
        self._seconds, self._tokens, self._steps, self._blocked = 0.0, 0, 0, 0.0
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Start the clock."""
        self._started = time.perf_counter()
        self.mark("")

    def mark(self, part: str) -> None:
        """End the ``part`` of a step that began with the last mark; an empty name is no part.

        On CUDA that is an event on the device's own time, which :meth:`take` reads: nothing waits.
        """
        now: Any = time.perf_counter()
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            now = torch.cuda.current_stream(self.device).record_event(event)
        self._marks.append((part, now))

    def stop(self) -> None:
        """Wait for the device, and stop the clock."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None

    def count(self, tokens: int) -> None:
        """Count one step of ``tokens`` tokens on this device."""
        self._tokens += tokens
        self._steps += 1

    def count_blocked(self, seconds: float) -> None:
        """Count seconds in which a checkpoint held training up."""
        self._blocked += seconds

    def take(self) -> dict[str, float | None]:
        """Return the rates and the parts' seconds a step since the last call, per device."""
        seconds = max(self._seconds, 1e-9)
        rate = self._tokens / seconds
        flops = rate * self.flops_per_token
        row = {
            "tokens_per_second_per_device": rate,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / self.peak if self.peak else None,
            "memory_gib": peak_memory_gib(self.device),
            "step_seconds": seconds / max(self._steps, 1),
        }
        row |= {f"seconds/{name}": x / max(self._steps, 1) for name, x in self._parts().items()}
        if self._blocked:
            row["checkpoint_blocked_seconds"] = self._blocked
        self._seconds, self._tokens, self._steps, self._blocked = 0.0, 0, 0, 0.0
        self._marks = []
        return row

    def _parts(self) -> dict[str, float]:
        """Add up the seconds of each part, and of what is in none; empty: there are no parts."""
        found: dict[str, float] = {}
        for (_, begin), (part, end) in pairwise(self._marks):
            if part:
                is_cuda = self.device.type == "cuda"
                seconds = begin.elapsed_time(end) / 1e3 if is_cuda else end - begin
                found[part] = found.get(part, 0.0) + seconds
        return found and {**found, "other": max(0.0, self._seconds - sum(found.values()))}


class MetricsLog:
    """Writes each logged step to metrics.jsonl and the terminal.

    Lines of an existing metrics.jsonl after ``resume_step`` are dropped: the resumed run writes
    them again.
    """

    def __init__(
        self, folder: Path, config: LogSection, total_steps: int, resume_step: int = 0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(self.path) if row["step"] <= resume_step]
        # Not in place: a full disk or a kill would lose lines that were written long ago.
        text = "".join(json.dumps(row) + "\n" for row in kept)
        write_atomically(self.path, lambda new: new.write_text(text, "utf-8"))
        self._file = self.path.open("a", encoding="utf-8")
        self.console = Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        if config.progress and self.console.is_terminal:
            bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = bar.add_task("", total=total_steps, completed=resume_step)
            bar.start()
            self._bar = bar

    def log(self, step: int, row: Mapping[str, float | None]) -> None:
        """Record one line; ``row`` holds floats by name."""
        clean = {k: v if v is not None and math.isfinite(v) else None for k, v in row.items()}
        self._file.write(json.dumps({"step": step, **clean}) + "\n")
        self._file.flush()
        text = _describe(clean)
        if self._bar is None:
            self.console.print(f"step {step}  {text}")
        elif "loss" in clean:
            self._bar.update(self._task, completed=step, description=text)
        else:
            self._bar.print(f"step {step}  {text}")

    def say(self, text: str) -> None:
        """Print a line of prose, above the progress bar if there is one."""
        self.console.print(text, markup=False)

    def end_progress(self) -> None:
        """Leave the bar where it is; later lines are printed below it."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def close(self) -> None:
        """Flush and release everything."""
        self.end_progress()
        self._file.close()


class SilentLog(MetricsLog):
    """The log of ranks other than the main one, which writes nothing."""

    def __init__(self) -> None:
        pass

    def _do_nothing(self, *args: Any, **settings: Any) -> None:
        pass

    log = say = end_progress = close = _do_nothing


def _describe(row: Mapping[str, float | None]) -> str:
    """Format the few numbers that a person watches."""
    forms = {
        "loss": ("loss", "{:.4f}"),
        "eval_loss": ("held-out loss", "{:.4f}"),
        "reward": ("reward", "{:.3f}"),
        "eval_reward": ("held-out reward", "{:.3f}"),
        "eval_solved": ("solved", "{:.1%}"),
        "entropy": ("entropy", "{:.3f}"),
        "grad_norm": ("norm", "{:.3f}"),
        "lr": ("lr", "{:.2e}"),
        "tokens_per_second_per_device": ("tok/s", "{:,.0f}"),
        "mfu": ("mfu", "{:.1%}"),
        "memory_gib": ("GiB", "{:.2f}"),
        "step_seconds": ("s/step", "{:.3f}"),
        "skipped_steps": ("skipped", "{:.0f}"),
    }
    shown = []
    for name, (label, form) in forms.items():
        value = row.get(name, ...)
        if value is None and name in ("loss", "grad_norm"):
            shown.append(f"{label} not finite")
        elif isinstance(value, float | int) and not (name == "skipped_steps" and not value):
            shown.append(f"{label} {form.format(value)}")
    return "  ".join(shown)


def routing_health(routing: RoutingStats, layers: Sequence[int]) -> dict[str, float]:
    """Return expert load (fullest over mean), router entropy (nats) and unused experts, by name.

    Load is given as the worst of all layers, and load and entropy as means over groups of
    neighbouring layers.

    Args:
        routing: statistics of a whole global batch.
        layers: indices of the MoE layers in the model.
    """
    counts_LE = routing.counts_LE.float()
    load_L = counts_LE.amax(1) / counts_LE.mean(1)
    entropy_L = routing.entropy_sum_L / routing.num_tokens
    row = {
        "expert_load_max": load_L.max().item(),
        "experts_without_tokens": (counts_LE == 0).sum().item(),
    }
    for group in torch.arange(len(layers)).tensor_split(min(_LAYER_GROUPS, len(layers))):
        first, last = int(group[0]), int(group[-1])
        is_one = first == last
        label = f"layer_{layers[first]}" if is_one else f"layers_{layers[first]}-{layers[last]}"
        row[f"expert_load_max/{label}"] = load_L[first : last + 1].mean().item()
        row[f"router_entropy/{label}"] = entropy_L[first : last + 1].mean().item()
    return row


class RoutingWatch:
    """Finds dead experts, and experts that take most tokens; reports each once in a run.

    An expert is dead if no token of :data:`_UNHEALTHY_LOGS` logged steps in a row chose. It takes
    most tokens if more than half of them choose it, and more than twice its share.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        """Watch the MoE layers, whose indices in the model are ``layers``."""
        self.layers = layers
        self._seen: dict[str, torch.Tensor] = {}
        self._said: set[str] = set()

    def update(self, routing: RoutingStats) -> list[str]:
        """Look at one logged step of a whole global batch; returns new lines for the user.

        Waits for the device.
        """
        counts_LE, tokens = routing.counts_LE.cpu(), int(routing.num_tokens)
        mean = counts_LE.float().mean()
        crowded_LE = (counts_LE > tokens / 2) & (counts_LE > 2 * mean)
        found = []
        for what, is_so_LE in (("dead", counts_LE == 0), ("crowded", crowded_LE)):
            # Logged steps in a row, for each expert.
            self._seen[what] = (self._seen.get(what, 0) + is_so_LE.int()) * is_so_LE
            lasting_LE = self._seen[what] >= _UNHEALTHY_LOGS
            if what not in self._said and lasting_LE.any():
                self._said.add(what)
                found.append(self._describe(what, lasting_LE))
        return found

    def _describe(self, what: str, lasting_LE: torch.Tensor) -> str:
        layers = [n for n, any_E in zip(self.layers, lasting_LE.any(1), strict=True) if any_E]
        number, of = int(lasting_LE.sum()), lasting_LE.numel()
        state = {
            "dead": f"{number} of {of} experts got no token",
            "crowded": f"{number} of {of} experts took most of their layer's tokens",
        }[what]
        return (
            f"routing is uneven: {state} in {_UNHEALTHY_LOGS} logged steps in a row (layers "
            f"{', '.join(map(str, layers[:8]))}{', ...' if len(layers) > 8 else ''}); raise "
            "moe.aux_loss_coef with moe.aux_loss_layers each, or set moe.bias_update_rate"
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics.jsonl, without a last line that a crash cut short."""
    if not path.exists():
        return []
    lines = path.read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def plot_curves(
    metrics: Path, picture: Path, curves: Sequence[tuple[str, str, str]], unit: str
) -> None:
    """Draw ``curves`` of (name in the metrics, label, marker) over the steps of ``metrics``."""
    from matplotlib.figure import Figure  # slow to import, needed once

    rows = read_metrics(metrics)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, label, marker in curves:
        points = [(r["step"], r[name]) for r in rows if r.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(picture, dpi=130)
