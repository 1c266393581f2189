"""Time training steps of any recipe, say where the time goes, and compare with a peer.

    python scripts/bench_train.py RECIPE [--section.key value ...] [--bench-steps 10]
        [--warm-up 4] [--kernels N] [--links ROUNDS] [--peer COMMAND] [--results FILE.jsonl]

RECIPE is a recipe or a TOML file. A preset that is no recipe, such as deepseek-v3, stands for the
recipe bench-qwen3-30b-a3b (random tokens, no checkpoints) with that preset.

Real steps, optimizer included: a few to warm up, then the timed ones, then one under the profiler,
whose GPU time is attributed by kernel and by the part of moetrain that launched it. "Exposed" is
the time in which communication ran and no computation did. FLOPs are counted as
``Architecture.flops_per_token`` says: no recomputation, causal attention halved. The time to the
first step counts from the start of this command, with imports, start of ranks and compilation.
``--kernels N`` prints the N kernels that took most of the profiled step.

The speed of links through sockets depends on the processors, and differs from run to run. ``--links
ROUNDS`` measures a run's own communicator between its steps, ROUNDS times, and prints the medians
as options of scripts/simulate.py.

With several processes (``--launch.nproc``) rank 0 prints. ``--peer`` runs a shell command
afterwards on the same GPUs. The command must print a line that holds ``<number> tok/s/gpu``.
``--results`` appends the figures as a line of JSON to a file. The exit code is 1 if the last loss
is not finite.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moetrain.cli.launch import start_ranks
from moetrain.config import Config
from moetrain.config.environment import launched_place
from moetrain.config.sources import recipe_names
from moetrain.models.families import PRESETS
from moetrain.parallel.processes import num_processes
from moetrain.train.session import garbage_collector_off

# The process that starts the ranks does not need Trainer, and importing it takes seconds.
if TYPE_CHECKING:
    from moetrain.train.loop import Trainer

BEGAN = "BENCH_TRAIN_BEGAN"
"""Environment variable with the start time of the command, for its ranks."""

BENCHMARK = "bench-qwen3-30b-a3b"
"""The recipe that a preset is timed with."""

LINKS_MIB = 512
"""Size of the messages by which ``--links`` measures."""

# The part that a kernel belongs to: the first pattern found in "<launching scopes> / <kernel
# name>".
PARTS = (
    ("FSDP", r"fsdp_.*(nccl|copy_engines)"),
    ("FSDP casts + copies", r"fsdp_"),
    ("dispatch + combine", r"exchange_|deep_?ep"),
    ("copies of experts", r"assign_places|expert_copies"),
    ("tensor parallel", r"(gather|scatter)_tokens"),
    ("host copies", r"memcpy (dtoh|htod)"),
    ("other communication", r"nccl"),
    ("head + loss", r"linear_cross_entropy|moetrain::scale"),
    ("experts", r"expert_mlp|grouped"),
    ("permute", r"permute|expert_indices"),
    ("router", r"router_topk"),
    ("attention", r"attention|sdpa|fmha|flash"),
    ("optimizer", r"adam|Optimizer"),
    ("projections", r"linears_fp8|gemm|nvjet|cutlass|::mm|cublas"),
)
COMMUNICATION = (
    *("FSDP", "dispatch + combine", "copies of experts", "tensor parallel", "host copies"),
    "other communication",
)


def main() -> int:
    """Start the ranks, or be one; return 1 if a run failed."""
    parser = argparse.ArgumentParser(description="Time training steps.", allow_abbrev=False)
    parser.add_argument("recipe", help="recipe, TOML file or preset")
    parser.add_argument("--bench-steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=4, help="untimed steps first, 1 at least")
    parser.add_argument("--kernels", type=int, default=0, metavar="N")
    parser.add_argument("--links", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--peer")
    parser.add_argument("--results", type=Path)
    args, settings = parser.parse_known_args()
    os.environ.setdefault(BEGAN, str(time.time() - process_seconds()))
    source = args.recipe
    if source in PRESETS and source not in recipe_names():
        source, settings = BENCHMARK, [f"--model.preset={source}", *settings]
    config = Config.load(source, settings)
    nproc = num_processes(config)
    if launched_place() is not None or nproc == 1:
        with garbage_collector_off():  # as in a run
            row = bench(config, args.bench_steps, args.warm_up, args.kernels, args.links)
        if row is not None:
            print(report(row), flush=True)
            if args.results is not None:
                with args.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            if not math.isfinite(row["last_loss"]):
                print("the last loss is not finite, so these figures are not of a run that learns")
                return 1
        if launched_place() is not None:
            return 0
    elif code := start_ranks([__file__, *sys.argv[1:]], nproc):
        return code
    return run_peer(args.peer, args.results) if args.peer else 0


def process_seconds() -> float:
    """Return the seconds since this process began; 0 where the system does not say it."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0.0
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def bench(
    config: Config, steps: int, warm_up: int, kernels: int = 0, rounds: int = 0
) -> dict[str, Any] | None:
    """Measure; return the row of results on rank 0, None elsewhere."""
    from moetrain.train.loop import Trainer
    from moetrain.train.metrics import peak_memory_gib

    trainer = Trainer(config)
    losses = [trainer.train_step().loss]
    wait(trainer)
    first_step = time.time() - float(os.environ[BEGAN])
    losses += [trainer.train_step().loss for _ in range(warm_up - 1)]
    wait(trainer)
    start, tokens, moments = time.perf_counter(), trainer.tokens, [mark(trainer.device)]
    for _ in range(steps):
        losses.append(trainer.train_step().loss)
        moments.append(mark(trainer.device))
    wait(trainer)
    seconds = (time.perf_counter() - start) / steps
    each = [seconds_between(*pair) for pair in itertools.pairwise(moments)]
    rate = (trainer.tokens - tokens) / steps / seconds / trainer.world.size
    links = between_links(trainer, steps, rounds) if rounds else []
    profiled = profile_step(trainer)
    breakdown = attribute(profiled)
    waits = {part: ms for part, ms in breakdown.items() if part == "idle" or "exposed" in part}
    world = trainer.world
    by_rank = world.rendezvous.gather(json.dumps(waits)) if world.size > 1 else []
    row = {
        "settings": config.describe(),
        "hardware": f"{trainer.world.size} x {device_name(trainer.device)}",
        "torch": torch.__version__,
        "commit": commit(),
        "tokens_per_second_per_device": rate,
        "tflops_per_device": rate * trainer.clock.flops_per_token / 1e12,
        "memory_gib": peak_memory_gib(trainer.device),
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "allocator_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "first_step_after_seconds": first_step,
        "step_seconds": seconds,
        "fastest_step_seconds": min(each),
        "slowest_step_seconds": max(each),
        "first_loss": losses[0].item(),
        "last_loss": losses[-1].item(),
        "step_ms": breakdown,
        "kernels": largest_kernels(profiled)[:kernels],
        "links": links,
        "waits_ms_by_rank": [json.loads(text) for text in by_rank],
    }
    trainer.world.leave()
    return row if trainer.world.is_main else None


def between_links(trainer: Trainer, steps: int, rounds: int) -> list[str]:
    """Alternate steps and measurements of the communicator: a line each, then medians."""
    from bench_links import NAMES, Links

    links, size = Links(trainer.device, 1.0, [None]), LINKS_MIB * 2**20
    found, lines = [], []
    for _ in range(rounds):
        rates = [links.rate(x, size, statistics.median(links.alone(x, size))) for x in NAMES[:3]]
        begin = links.begin()
        for _ in range(steps):
            trainer.train_step()
        wait(trainer)
        found.append((*rates, (time.perf_counter() - begin) / steps))
        lines.append("  {:.2f}, {:.2f}, {:.2f} GB/s; {:.3f} s a step".format(*found[-1]))
    *rates, seconds = map(statistics.median, zip(*found, strict=True))
    options = "--across {:.3g} --across-direct {:.3g} --across-sums {:.3g}".format(*rates)
    fastest, *_, slowest = sorted(1e3 * step for *_, step in found)
    return [
        f"{', '.join(NAMES[:3])} of {LINKS_MIB} MiB, and steps, in turns:",
        *lines,
        f"{options}: {1e3 * seconds:.0f} ms a step ({fastest:.0f} to {slowest:.0f})",
    ]


def mark(device: torch.device) -> torch.cuda.Event | float:
    """Return a mark in the device's queue; on a CPU, the time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Any, last: Any) -> float:
    """Return the seconds between two of :func:`mark`, once the device has passed them."""
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3


def wait(trainer: Trainer) -> None:
    """Wait until every rank's device is idle."""
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    trainer.world.barrier()


Span = tuple[str, str, float, float]
"""Part, kernel's name and grid, and start and end of its run in microseconds."""


def profile_step(trainer: Trainer) -> list[Span]:
    """Return the spans of one step on the GPU; none on a CPU."""
    from moetrain.train.callbacks import Profile

    if trainer.device.type != "cuda":
        return []
    with Profile.profiler(trainer.device) as profiler:
        trainer.train_step()
        wait(trainer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return spans_of(events)


def spans_of(events: list[dict[str, Any]]) -> list[Span]:
    """Return the GPU spans among a trace's events (Chrome's format)."""
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    scopes = defaultdict(list)
    for e in events:
        if e.get("cat") in ("cpu_op", "user_annotation") and "dur" in e:
            scopes[e["tid"]].append((e["ts"], e["ts"] + e["dur"], e["name"]))
    found = []
    for kernel, scope in zip(kernels, enclosing_names(kernels, launches, scopes), strict=True):
        text = f"{scope} / {kernel['name']}"
        part = next((p for p, pattern in PARTS if re.search(pattern, text, re.I)), "the rest")
        name = f"{kernel['name'][:90]} {kernel['args'].get('grid', '')}"
        found.append((part, name, kernel["ts"], kernel["ts"] + kernel["dur"]))
    return found


def attribute(spans: list[Span]) -> dict[str, float]:
    """Return the milliseconds of each part, of its exposed communication, idle, and in all."""
    if not spans:
        return {}
    busy: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for part, _, first, last in spans:
        busy[part].append((first, last))
    compute = [span for part, spans in busy.items() if part not in COMMUNICATION for span in spans]
    everything = [span for spans in busy.values() for span in spans]
    result = {part: total(spans) / 1e3 for part, spans in sorted(busy.items())}
    for part in COMMUNICATION:
        if part in busy:
            exposed = total(compute + busy[part]) - total(compute)
            result[f"{part} exposed"] = exposed / 1e3
    first, last = min(s for s, _ in everything), max(e for _, e in everything)
    result["idle"] = (last - first - total(everything)) / 1e3
    result["step"] = (last - first) / 1e3
    return result


def largest_kernels(spans: list[Span]) -> list[str]:
    """Return a line per kernel: milliseconds, number of calls, and microseconds per call."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for part, name, first, last in spans:
        found[part, name].append(last - first)
    return [
        f"{sum(us) / 1e3:8.2f} ms = {len(us):5} x {sum(us) / len(us):8.1f} us  {part}: {name}"
        for (part, name), us in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]


def enclosing_names(
    kernels: list[dict[str, Any]],
    launches: dict[int, dict[str, Any]],
    scopes: dict[int, list[tuple[float, float, str]]],
) -> list[str]:
    """Return for each kernel the host scopes in which it was launched, outermost first."""
    found: dict[int, str] = {}
    by_thread = defaultdict(list)
    for index, kernel in enumerate(kernels):
        launch = launches.get(kernel["args"].get("correlation"))
        if launch is not None:
            by_thread[launch["tid"]].append((launch["ts"], index))
    for thread, launched in by_thread.items():
        # One sweep over the thread's time keeps a stack of open scopes.
        opening = sorted(scopes[thread], key=lambda s: (s[0], -s[1]))
        stack, cursor = [], 0
        for moment, index in sorted(launched):
            while cursor < len(opening) and opening[cursor][0] <= moment:
                stack.append(opening[cursor])
                cursor += 1
            stack = [scope for scope in stack if scope[1] >= moment]
            found[index] = " ".join(name for _, _, name in stack)
    return [found.get(index, "") for index in range(len(kernels))]


def total(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of ``spans``."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length


def report(row: dict[str, Any]) -> str:
    """Return the row as a few lines of text."""
    lines = [
        f"{row['hardware']}, torch {row['torch']}, commit {row['commit']}",
        f"{row['tokens_per_second_per_device']:,.0f} tokens/s/GPU  "
        f"{row['tflops_per_device']:.0f} TFLOP/s/GPU  {row['memory_gib']:.1f} GiB "
        f"({row['reserved_gib']:.1f} reserved, {row['allocator_retries']} retries)  "
        f"{row['step_seconds'] * 1e3:.1f} ms a step "
        f"({row['fastest_step_seconds'] * 1e3:.1f} to {row['slowest_step_seconds'] * 1e3:.1f})  "
        f"loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}  "
        f"first step after {row['first_step_after_seconds']:.1f} s",
    ]
    step = row["step_ms"].get("step")
    lines += [f"  {ms:8.2f} ms {ms / step:6.1%}  {part}" for part, ms in row["step_ms"].items()]
    for rank, waits in enumerate(row["waits_ms_by_rank"]):
        lines.append(f"  rank {rank} " + ", ".join(f"{k} {ms:.1f}" for k, ms in waits.items()))
    lines += [*row["kernels"], *row["links"]]
    return "\n".join(lines)


def run_peer(command: str, results: Path | None) -> int:
    """Run the peer, find its rate, and print our rate divided by it."""
    process = subprocess.run(command, shell=True, capture_output=True, text=True)
    rates = re.findall(r"([\d.,]+) tok/s/gpu", process.stdout)
    if process.returncode or not rates:
        print(
            f"peer failed ({process.returncode}):\n{process.stdout[-2000:]}{process.stderr[-2000:]}"
        )
        return 1
    rate = float(rates[-1].replace(",", ""))
    print(f"peer: {rate:,.0f} tokens/s/GPU")
    if results is not None and results.exists():
        ours = json.loads(results.read_text().splitlines()[-1])["tokens_per_second_per_device"]
        print(f"ours / peer: {ours / rate:.2f}")
    return 0


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def commit() -> str:
    """Return the checkout's short commit, or unknown."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    process = subprocess.run(git, capture_output=True, text=True)
    return process.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
