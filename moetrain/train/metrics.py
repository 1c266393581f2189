"""Reports of a run: terminal lines or a progress bar, and metrics.jsonl.

The values of a logged step are one flat mapping of names to floats. Each output shows some of them.
``None`` stands for a value that is not known (MFU on a CPU) or not finite. Callbacks that report to
other programs are in :mod:`moetrain.train.callbacks`.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from moetrain.config import LogSection, logger
from moetrain.config.environment import GPUS
from moetrain.config.files import write_atomically
from moetrain.config.sources import redacted
from moetrain.losses.balancing import RoutingStats
from moetrain.parallel.waits import elapsed, noted, now, share_waited
from moetrain.runtime.memory import DeviceBytes

_LAYER_GROUPS = 4  # MoE health is logged for this many groups of neighbouring layers
UNHEALTHY_LOGS = 20
"""The user is warned when routing was unhealthy, or a rank slow, in this many logged steps in a
row. The first steps of a run are uneven, and so is a single small batch."""
_SLOW = 1.1
"""A rank is slow if its step, without waits, takes more than this many times the others' mean."""


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far: the run's own on CUDA, the resident set on a CPU."""
    if device.type == "cuda":
        return DeviceBytes.peak(device) / 2**30
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss / 2**30 if sys.platform == "darwin" else rss / 2**20


class Throughput:
    """Measures seconds and tokens of training alone; evaluation and checkpoints stop the clock."""

    def __init__(self, flops_per_token: float, device: torch.device) -> None:
        self.flops_per_token = flops_per_token
        self.device = device
        self.peak: float | None = None
        """Dense bf16 FLOP/s of the device; None: a CPU or an unknown GPU."""
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)  # e.g. "NVIDIA H200"
            peaks = (gpu.peak_flops for kind, gpu in GPUS.items() if kind.upper() in name)
            self.peak = next(peaks, None)
        self._started: float | None = None
        self._seconds, self._tokens, self._steps = 0.0, 0, 0
        self.blocked = 0.0
        """Seconds for which checkpoints have blocked training."""
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        self._started = time.perf_counter()
        self.mark("")
        if noted[-1:] != [None]:
            noted.append(None)

    def mark(self, part: str) -> None:
        """Mark the end of the ``part`` of a step that began at the last mark.

        With an empty name the time since the last mark belongs to no part. On CUDA the mark is an
        event, which :meth:`take` reads later, so nothing waits.
        """
        self._marks.append((part, now(self.device)))

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

    def take(self) -> dict[str, float | None]:
        """Return rates per device, and the seconds per step of each part, since the last call."""
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
        if self.blocked:
            row["checkpoint_blocked_seconds"] = self.blocked
        self._seconds, self._tokens, self._steps, self.blocked = 0.0, 0, 0, 0.0
        self._marks = []
        return row

    def _parts(self) -> dict[str, float]:
        """Add up the seconds of each part, and the rest as ``other``; empty: there are no parts."""
        found: dict[str, float] = {}
        for (_, begin), (part, end) in pairwise(self._marks):
            if part:
                found[part] = found.get(part, 0.0) + elapsed(begin, end)
        return found and {**found, "other": max(0.0, self._seconds - sum(found.values()))}


class _StepBar(Progress):
    """A bar of steps, and below it a line with the numbers of the last logged step."""

    numbers = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.numbers:  # cut where the terminal ends, so that the display keeps its height
            yield Text(self.numbers, no_wrap=True, overflow="ellipsis")


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
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()
        self._bar = _StepBar(*columns, console=self.console)
        self._task = self._bar.add_task("", total=total_steps, completed=resume_step)
        self._total_steps = total_steps
        self._first: tuple[int, float] | None = None
        """The first step that was logged, and its time in seconds of a monotonic clock."""
        if config.progress and self.console.is_terminal:
            self._bar.start()

    def log(self, step: int, row: Mapping[str, float | None]) -> None:
        """Record one line; ``row`` holds finite floats, or None, by name."""
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()
        text = _describe(row)
        if "loss" not in row:
            self.console.print(f"step {step}  {text}")
        elif self._bar.live.is_started:
            self._bar.numbers = text
            self._bar.update(self._task, completed=step)
        else:
            self.console.print(f"step {step}/{self._total_steps}  {text}{self._left(step)}")

    def _left(self, step: int) -> str:
        """Return the time that the remaining steps take at the mean rate since the first line."""
        moment = time.monotonic()
        begin, then = self._first = self._first or (step, moment)
        if step <= begin:
            return ""
        seconds = (moment - then) / (step - begin) * (self._total_steps - step)
        return f"  left {timedelta(seconds=round(seconds))}"

    def say(self, text: str) -> None:
        """Print a line of prose, above the progress bar if there is one."""
        self.console.print(redacted(text), markup=False)

    def end_progress(self) -> None:
        """Leave the bar where it is; later lines are printed below it."""
        self._bar.live.stop()

    def close(self) -> None:
        self.end_progress()
        self._file.close()


def _describe(row: Mapping[str, float | None]) -> str:
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


class RankWatch:
    """Compares ranks' times, and names a rank that the others wait for in many logged steps."""

    def __init__(self, gather: Callable[[float], list[float]], say: Callable[[str], None]) -> None:
        self._gather, self._say = gather, say
        self._slowest, self._in_row = -1, 0

    def row(self, seconds: float) -> dict[str, float]:
        """Return metrics of the time of a step without waits for other ranks. Collective.

        ``seconds``: the time of the step on this rank. With one rank there are no metrics.
        """
        own_R = self._gather(seconds * (1 - share_waited()))
        if len(own_R) == 1:
            return {}
        longest = max(own_R)
        slowest, others = own_R.index(longest), (sum(own_R) - longest) / (len(own_R) - 1)
        in_row = self._in_row if slowest == self._slowest else 0
        self._slowest, self._in_row = slowest, (in_row + 1) * (longest > _SLOW * others)
        if self._in_row == UNHEALTHY_LOGS:
            self._say(
                f"rank {slowest} is slow: without waits, its steps take {longest:.3f} s and "
                f"those of others {others:.3f} s, in {UNHEALTHY_LOGS} logged steps in a row"
            )
        mean = sum(own_R) / len(own_R)
        return {"own_seconds": mean, "own_seconds_max": longest, "slowest_rank": slowest}


class RoutingWatch:
    """Measures how evenly tokens are routed, and reports routing that stays uneven.

    There are two reports, each given once in a run, for experts that are in the same state in
    :data:`UNHEALTHY_LOGS` logged steps in a row. One state is that no token chooses the expert. The
    other is that more than half of the tokens do, and more than twice its even share.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        """Watch the MoE layers; ``layers`` are their indices in the model."""
        self.layers = layers
        self._seen: dict[str, torch.Tensor] = {}
        self._said: set[str] = set()

    def health(self, routing: RoutingStats) -> dict[str, float]:
        """Return expert load (fullest over mean), router entropy (nats), experts without tokens.

        There is one load for the whole model, that of the worst layer. Load and entropy are also
        averaged over groups of neighbouring layers. ``routing`` is that of a whole global batch.
        """
        counts_LE, layers = routing.counts_LE.float(), self.layers
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

    def update(self, routing: RoutingStats) -> list[str]:
        """Take the routing of a logged step; return the lines to print. Waits for the device."""
        counts_LE, tokens = routing.counts_LE.cpu(), int(routing.num_tokens)
        crowded_LE = (counts_LE > tokens / 2) & (counts_LE > 2 * counts_LE.float().mean())
        found = []
        for is_so_LE, state in (
            (counts_LE == 0, "got no token"),
            (crowded_LE, "took most of their layer's tokens"),
        ):
            # Logged steps in a row, for each expert.
            self._seen[state] = (self._seen.get(state, 0) + is_so_LE.int()) * is_so_LE
            lasting_LE = self._seen[state] >= UNHEALTHY_LOGS
            if state in self._said or not lasting_LE.any():
                continue
            self._said.add(state)
            layers = [n for n, any_E in zip(self.layers, lasting_LE.any(1), strict=True) if any_E]
            found.append(
                f"routing is uneven: {int(lasting_LE.sum())} of {lasting_LE.numel()} experts "
                f"{state} in {UNHEALTHY_LOGS} logged steps in a row (layers "
                f"{', '.join(map(str, layers[:8]))}{', ...' if len(layers) > 8 else ''}); raise "
                "moe.aux_loss_coef with moe.aux_loss_layers each, or set moe.bias_update_rate"
            )
        return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics.jsonl, without a last line that a crash cut short.

    Damaged lines are left out, and a warning names the first of them.
    """
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    damaged: list[int] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = json.loads(line.decode()) if line else None
        except (ValueError, RecursionError):
            row = ()
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        elif row is not None:
            damaged.append(number)
    if damaged:
        logger.warning(
            "%s: line %d is not what a run writes, and is left out%s",
            path,
            damaged[0],
            f" with {len(damaged) - 1} others" if damaged[1:] else "",
        )
    return rows
