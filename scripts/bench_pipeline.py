"""Compare pipeline schedules on this machine's GPUs: losses, speed, and idle time.

    python scripts/bench_pipeline.py --launch.nproc auto [--layers 12] [--sequences N] [--steps 5]
        [--only NAME,...] [--recipe bench-qwen3-30b-a3b-24l] [--results FILE.jsonl] [--profile]
        [--timeout SECONDS] [--section.key value ...]

Each row of the table is a separate run on all GPUs, with the same model and batches. The first row
has no pipeline stages. Then every schedule runs on 2 pipeline ranks, with all other GPUs expert
parallel, and once more with all GPUs as pipeline ranks. The first losses and the first gradient
norm of a row are compared with those of the first row. Then steps are timed, and a few more steps
run with marks in the device's queue around each action of a rank:

    busy      a rank's time between the two marks of its actions; an action's first mark is set when
              its inputs have arrived
    bubble    the mean over ranks of 1 - busy / makespan. The makespan is the longest time from a
              rank's first mark to its last (the first stage's rank begins first and ends last)
    simulated the bubble by the simulator, with the median time measured for each stage's actions

A row that fails says why in a line, and the next one runs. ``--profile`` adds the share of dispatch
and combine that computation hides, from a trace of rank 0. Each row is printed as a JSON line, and
a table of all rows follows at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from bench_train import (
    attribute,
    commit,
    device_name,
    mark,
    profile_step,
    seconds_between,
    wait,
)

from moetrain.cli.launch import start_ranks
from moetrain.config import Config
from moetrain.config.environment import launched_place
from moetrain.parallel.pipeline.executor import _Run
from moetrain.parallel.pipeline.schedules import SCHEDULES, Action
from moetrain.parallel.processes import num_processes
from moetrain.train.loop import Trainer
from moetrain.train.metrics import peak_memory_gib
from moetrain.train.session import garbage_collector_off

WARMUP_STEPS = 3
MARKED_STEPS = 3


class Layout(NamedTuple):
    """One row."""

    pp: int
    ep: int
    schedule: str

    @property
    def name(self) -> str:
        return "pp1" if self.pp == 1 else f"pp{self.pp}-ep{self.ep}-{self.schedule}"

    @property
    def words(self) -> list[str]:
        """Return the settings of this layout."""
        words = [f"parallel.{key}={getattr(self, key)}" for key in ("pp", "ep")]
        return words + [f"parallel.pp_schedule={self.schedule}"] * (self.pp > 1)


def layouts(nproc: int) -> list[Layout]:
    """Return the layouts of all rows, the one without stages first."""
    meshes = dict.fromkeys([(2, nproc // 2), (nproc, 1)])
    return [Layout(1, nproc, "")] + [Layout(*mesh, name) for mesh in meshes for name in SCHEDULES]


def main() -> int:
    """Run every row, or be the launcher or a rank of one; return 1 if a row has failed."""
    parser = argparse.ArgumentParser(description="Time pipelines.", allow_abbrev=False)
    parser.add_argument("--recipe", default="bench-qwen3-30b-a3b-24l")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequences", type=int, help="sequences of a step; default: 8 a process")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", help="names of rows, or parts of them, with commas between")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=2e-3,
        help="relative error of losses; of norms 10 times as much",
    )
    parser.add_argument("--timeout", type=float, default=180.0, help="most seconds of a row")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args, settings = parser.parse_known_args()
    nproc = num_processes(Config.load(args.recipe, settings))
    if args.row is None:
        return run_rows(args, nproc)
    if launched_place() is None and nproc > 1:
        return start_ranks([__file__, *sys.argv[1:]], nproc)
    layout = next(one for one in layouts(nproc) if one.name == args.row)
    with tempfile.TemporaryDirectory() as folder, garbage_collector_off():  # as in a run
        config = config_of(args, settings, layout, nproc, folder)
        row = bench(config, args)
    if row is not None:
        args.out.write_text(json.dumps({"row": layout.name, **row}))
    return 0


def config_of(
    args: argparse.Namespace, settings: Sequence[str], layout: Layout, nproc: int, folder: str
) -> Config:
    """Return a row's settings."""
    words = [f"model.num_layers={args.layers}", "train.micro_batch_size=1"]
    words += [f"train.global_batch_size={args.sequences or 8 * nproc}", "data.source=synthetic"]
    words.append("moe.aux_loss_coef=0")  # its loss depends on the split into batches
    words += [f"output_dir={folder}", "log.tensorboard=no", "checkpoint.resume=never"]
    return Config.load(args.recipe, [*words, *settings, *layout.words])


# ---- all rows -----------------------------------------------------------------------------------


def run_rows(args: argparse.Namespace, nproc: int) -> int:
    """Run each row in its own processes, so that a crash does not end the others."""
    wanted = (args.only or "").split(",")
    chosen = [one for one in layouts(nproc) if any(part in one.name for part in wanted)]
    rows, plain = [], None
    for layout in chosen:
        row = run_row(layout.name, args.timeout)
        if layout.pp == 1 and "error" not in row:
            plain = row
        if plain is not None and "error" not in row:
            row |= compared(row, plain, args.tolerance)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.results is not None:
            with args.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print("\n".join(table(rows)), flush=True)
    return int(any("error" in row or not row.get("equal", True) for row in rows))


def run_row(name: str, timeout: float) -> dict[str, Any]:
    """Return a row's measurements, or ``error``."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    # This file imports another script, so ranks need its folder on their path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    how = {"capture_output": True, "text": True, "timeout": timeout, "env": environment}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--row", name, "--out", str(out), *sys.argv[1:]]
        try:
            done = subprocess.run(command, **how)
        except subprocess.TimeoutExpired:  # its ranks are killed too
            return {"row": name, "error": f"took more than {timeout:.0f} s"}
        if done.returncode == 0 and out.exists():
            return json.loads(out.read_text())
    return {"row": name, "error": last_error(done.stderr) or f"exit code {done.returncode}"}


def last_error(text: str) -> str:
    """Return the line of a failed run's output that says why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [
        line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]*(error|failed)\b", line, re.I)
    ]
    return (errors or lines or [""])[0][:300]


def compared(row: dict[str, Any], plain: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """Return the relative differences from the row without stages."""
    losses = max(abs(x / y - 1) for x, y in zip(row["losses"], plain["losses"], strict=True))
    norm = abs(row["norms"][0] / plain["norms"][0] - 1)
    equal = losses <= tolerance and norm <= 10 * tolerance
    rate = row["tokens_per_second_per_device"] / plain["tokens_per_second_per_device"]
    return {"loss_error": losses, "norm_error": norm, "equal": equal, "of_pp1": rate}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return the table as text."""
    yield (
        f"{'':22} {'ms/step':>8} {'tok/s/GPU':>10} {'of pp1':>6} {'GiB':>6} "
        f"{'loss err':>8} {'norm err':>8} {'bubble':>7} {'simul.':>7} {'hidden':>7}  idle by rank"
    )
    for row in rows:
        if "error" in row:
            yield f"{row['row']:22} {row['error']}"
            continue
        share = {key: _percent(row.get(key)) for key in ("of_pp1", "bubble", "simulated", "hidden")}
        idle = " ".join(f"{x:.1%}" for x in row.get("idle", []))
        errors = f"{row.get('loss_error', 0):8.1e} {row.get('norm_error', 0):8.1e}"
        yield (
            f"{row['row']:22} {1e3 * row['step_seconds']:8.1f} "
            f"{row['tokens_per_second_per_device']:10,.0f} {share['of_pp1']:>6} "
            f"{row['memory_gib']:6.1f} {errors} {share['bubble']:>7} {share['simulated']:>7} "
            f"{share['hidden']:>7}  {idle}{'' if row.get('equal', True) else '  NOT EQUAL'}"
        )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


# ---- one row ------------------------------------------------------------------------------------


def bench(config: Config, args: argparse.Namespace) -> dict[str, Any] | None:
    """Measure; return the row on rank 0, None elsewhere."""
    trainer = Trainer(config)
    first = [trainer.train_step() for _ in range(WARMUP_STEPS)]
    wait(trainer)
    start, tokens = perf_counter(), trainer.tokens
    for _ in range(args.steps):
        trainer.train_step()
    wait(trainer)
    seconds = (perf_counter() - start) / args.steps
    row = {
        "words": sys.argv[1:],
        "hardware": f"{trainer.world.size} x {device_name(trainer.device)}",
        "torch": torch.__version__,
        "commit": commit(),
        "layers": trainer.model.arch.num_layers,
        "losses": [step.loss.item() for step in first],
        "norms": [step.grad_norm.item() for step in first],
        "step_seconds": seconds,
        "tokens_per_second_per_device": (trainer.tokens - tokens)
        / args.steps
        / seconds
        / trainer.world.size,
        "memory_gib": max(gather(peak_memory_gib(trainer.device))),
    }
    if trainer.engine.runner.pipeline is not None:
        row |= idle_times(trainer)
    if args.profile and (parts := attribute(profile_step(trainer))).get("dispatch + combine"):
        row["hidden"] = 1 - parts["dispatch + combine exposed"] / parts["dispatch + combine"]
    trainer.world.leave()
    return row if trainer.world.is_main else None


def gather(mine: Any) -> list[Any]:
    """Return every rank's value. Collective."""
    found: list[Any] = [mine] * dist.get_world_size()
    if len(found) > 1:
        dist.all_gather_object(found, mine)
    return found


def kind_of(action: Action) -> str:
    """Return the action without its micro-batch."""
    return f"{action.kind}{action.stage}"


def idle_times(trainer: Trainer) -> dict[str, Any]:
    """Return the measured bubble, by rank and in all, and the simulated one."""
    pipeline, stages = trainer.engine.runner.pipeline, trainer.engine.stages
    assert pipeline is not None  # the caller has checked this
    makespan, bubbles, idle, everything = 0.0, [], [], defaultdict(list)
    number = trainer.config.train.micro_batches(trainer.world.dims.data_ranks)
    schedule, _ = pipeline.plan(number, True)
    for _ in range(MARKED_STEPS):
        marks = marked_step(trainer, schedule.actions[stages.rank])
        seconds_of = {action: seconds_between(*pair) for action, pair in marks.items()}
        for action, seconds in seconds_of.items():
            everything[kind_of(action)].append(seconds)
        actions = schedule.actions[stages.rank]
        total = seconds_between(marks[actions[0]][0], marks[actions[-1]][1])
        by_rank = gather((stages.rank, sum(seconds_of.values()), total))
        makespan = max(total for *_, total in by_rank)
        # The mean is over ranks with the same stages.
        shares = [
            statistics.mean(1 - busy / makespan for rank, busy, _ in by_rank if rank == wanted)
            for wanted in range(schedule.num_ranks)
        ]
        idle.append(shares)
        bubbles.append(statistics.mean(shares))
    mine = {kind: statistics.median(seconds) for kind, seconds in everything.items()}
    times = gather(mine)
    merged = {k: statistics.mean(t[k] for t in times if k in t) for t in times for k in t}
    return {
        "micro_batches": number,
        "bubble": statistics.median(bubbles),
        "idle": [statistics.median(shares) for shares in zip(*idle, strict=True)],
        "pipeline_seconds": makespan,
        "simulated": schedule.simulate(lambda action: merged[kind_of(action)]).bubble,
        "times": merged,
    }


def marked_step(trainer: Trainer, actions: Sequence[Action]) -> dict[Action, tuple[Any, Any]]:
    """Run a step; return the marks before and after each of this rank's ``actions``."""
    found: dict[Action, tuple[Any, Any]] = {}

    begins: list[Any] = []
    take, methods = _Run.take, {"F": _Run.forward, "B": _Run.backward}

    def take_first(run: _Run, *what: Any) -> Any:
        taken = take(run, *what)
        begins.append(mark(trainer.device))  # when its inputs have arrived
        return taken

    def watched(run: _Run, action: Action) -> None:
        begins.append(mark(trainer.device))
        methods[action.kind](run, action)
        found[action] = begins[-1], mark(trainer.device)  # replaces a pass that counts ahead

    wait(trainer)
    with patch.multiple(_Run, take=take_first, forward=watched, backward=watched):
        trainer.train_step()
    wait(trainer)
    return {action: found[action] for action in actions}


if __name__ == "__main__":
    sys.exit(main())
