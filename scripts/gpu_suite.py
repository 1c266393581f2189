"""Run every test marked ``gpu`` on the GPUs of this machine and write a report.

    python scripts/gpu_suite.py --out outputs/gpu_suite [--minutes 8] [--workers 12]
    python scripts/gpu_suite.py --due

Compiling takes most of the time, so many workers share a GPU. There are three phases; the first two
run at the same time. Tests that took longest in the recorded run begin first, so that a phase does
not end with a few long tests while most processors are idle.

1. Tests that need one GPU, with :data:`WORKERS_PER_GPU` workers a GPU. Each worker sees one GPU.
2. Tests that need several GPUs, with :data:`WORKERS_OF_RANKS` workers that see all of them.
3. Tests marked ``alone``, one after another. They measure a device's memory, which a neighbour
   would change.

The folder ``--out`` gets

- ``report.md``: full texts of failures, tests that did not end, skips with their reasons, the
  slowest tests, commit and GPUs;
- ``report.json``: the counts;
- ``results_PHASE.jsonl``: a line when a test begins, and one when it ends;
- ``log_PHASE.txt``: pytest's output, with the stacks of tests that run for more than
  :data:`STACK_SECONDS`.

The exit code is 0 if every test passed or was skipped and no phase ran out of time.

``--due`` compares the work tree with the commit of the last run, in ``tests/gpu_last_run.json``. It
lists the changed files that GPU tests cover, and exits with 1 if there are any. ``--record`` writes
that file after a run of all phases and tests in which none failed and no time ran out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAST_RUN = ROOT / "tests" / "gpu_last_run.json"
WORKERS_PER_GPU = 12
"""With 16 cores for each GPU, compilers of as many workers leave few cores idle."""
WORKERS_OF_RANKS = 6
"""Each of these workers starts two or four ranks, which compile as well."""
TEST_SECONDS = 300
"""The most seconds that a test may take."""
STACK_SECONDS = 150
"""After as many seconds a test's stacks are printed: the phase may end before the test does."""
SLOW_SECONDS = 3
"""Tests that take more seconds are recorded, and begin first in the next run."""
COVERED = (
    "moetrain/checkpoint",
    "moetrain/generate",
    "moetrain/jobs",
    "moetrain/kernels",
    "moetrain/losses",
    "moetrain/models",
    "moetrain/optim",
    "moetrain/parallel",
    "moetrain/rl",
    "moetrain/runtime",
    "moetrain/serve",
    "moetrain/train",
    "tests/lib/distributed.py",
    "tests/lib/specs",
)
"""Files that GPU tests execute on a device. Test files with the mark ``gpu`` are covered too."""


@dataclass(frozen=True)
class Phase:
    """Tests that run together: their pytest marks, and how many workers run them."""

    name: str
    marks: str
    workers: int
    one_gpu_each: bool = False


def phases(num_gpus: int, workers_per_gpu: int = WORKERS_PER_GPU) -> list[Phase]:
    """Return the phases on ``num_gpus`` GPUs.

    ``workers_per_gpu`` processes share a GPU in the first phase.
    """
    single = Phase(
        name="one GPU",
        marks="gpu and not several_gpus and not alone",
        workers=workers_per_gpu * num_gpus,
        one_gpu_each=True,
    )
    several = Phase("several GPUs", "gpu and several_gpus and not alone", WORKERS_OF_RANKS)
    alone = Phase("alone", "gpu and alone", 0)
    return [single, several, alone] if num_gpus > 1 else [single, alone]


# ---- the pytest plugin: this module, loaded with ``-p gpu_suite`` ------------------------------


def pytest_load_initial_conftests(early_config: Any) -> None:
    """Give each xdist worker one GPU, before anything counts devices."""
    devices = os.environ.get("GPU_SUITE_ONE_EACH", "")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if devices and worker:
        each = devices.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = each[int(worker) % len(each)]


@pytest.hookimpl(trylast=True)  # after conftest.py has given the marks
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Sort tests so that those that took longest in the recorded run begin first."""
    slow = json.loads(LAST_RUN.read_text()).get("slow", {})
    items.sort(key=lambda item: -slow.get(item.nodeid, 0))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a test begins."""
    _append({"test": nodeid, "outcome": "begun"})


def _append(row: dict[str, Any]) -> None:
    """Append a row to the file that ``GPU_SUITE_RESULTS`` names.

    With xdist the controlling process gets the reports of all workers, so workers write nothing.
    """
    path = os.environ.get("GPU_SUITE_RESULTS")
    if path is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def pytest_runtest_logreport(report: Any) -> None:
    """Note that a test has ended, with its outcome."""
    if report.when != "call" and report.outcome == "passed":
        return
    outcome, text = report.outcome, ""
    if outcome == "failed":
        text = report.longreprtext
    elif outcome == "skipped":
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    row = {"test": report.nodeid, "outcome": outcome, "when": report.when, "text": text}
    row["seconds"] = round(report.duration, 2)
    _append(row)


def number_of_gpus() -> int:
    """Return the number of CUDA devices."""
    import torch

    return torch.cuda.device_count()


# ---- the run -----------------------------------------------------------------------------------


def run_phase(
    phase: Phase, num_gpus: int, out: Path, keyword: str, deadline: float
) -> dict[str, Any]:
    """Run one phase until it ends or ``deadline`` (of ``time.monotonic``) passes.

    Returns:
        The phase's name, its seconds, pytest's exit code (None: time ran out), the rows of tests
        that ended, and the names of tests that began but did not end.
    """
    slug = phase.name.replace(" ", "_")
    results = out / f"results_{slug}.jsonl"
    results.unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_suite", "-p", "no:cacheprovider"]
    words += ["-o", "addopts=--strict-markers", "-m", phase.marks, f"--timeout={TEST_SECONDS}"]
    words += ["-o", f"faulthandler_timeout={STACK_SECONDS}"]
    if phase.workers:  # tests are given out one at a time to free workers, so the order holds
        words += ["-n", str(phase.workers), "--dist", "load", "--maxschedchunk", "1"]
    words += ["-k", keyword] if keyword else []
    environment = {**os.environ, "GPU_SUITE_RESULTS": str(results)}
    path = [str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if phase.one_gpu_each:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
        environment["GPU_SUITE_ONE_EACH"] = visible
    begin = time.monotonic()
    with open(out / f"log_{slug}.txt", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(max(1.0, deadline - begin))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    rows = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    ended = [row for row in rows if row["outcome"] != "begun"]
    unfinished = sorted({row["test"] for row in rows} - {row["test"] for row in ended})
    return {
        "name": phase.name,
        "seconds": round(time.monotonic() - begin),
        "exit_code": code,
        "rows": ended,
        "unfinished": unfinished,
    }


def is_good(phase: dict[str, Any]) -> bool:
    """Return True if the phase ended without a failure. Pytest's code 5 means that it was empty."""
    return phase["exit_code"] in (0, 5)


def counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return the numbers of passed, failed and skipped tests."""
    found = Counter(row["outcome"] for row in rows)
    return {outcome: found[outcome] for outcome in ("passed", "failed", "skipped")}


def output_of(*words: str) -> str:
    """Return the output of a command, without its final newline."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def describe_machine() -> dict[str, Any]:
    """Return the commit, the GPUs, the number of cores and versions."""
    import torch
    import triton

    commit = os.environ.get("GPU_SUITE_COMMIT") or output_of("git", "rev-parse", "HEAD")
    return {
        "commit": commit or "unknown",
        "cards": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def report_text(machine: dict[str, Any], done: list[dict[str, Any]]) -> str:
    """Return the report as Markdown."""
    rows = [row for phase in done for row in phase["rows"]]
    lines = ["# GPU tests", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += [
        "",
        "| phase | passed | failed | skipped | seconds | end |",
        "|---|---|---|---|---|---|",
    ]
    for phase in done:
        end = "time ran out" if phase["exit_code"] is None else f"exit {phase['exit_code']}"
        numbers = " | ".join(str(n) for n in counts(phase["rows"]).values())
        lines.append(f"| {phase['name']} | {numbers} | {phase['seconds']} | {end} |")
    failed = [row for row in rows if row["outcome"] == "failed"]
    lines += ["", f"## Failures ({len(failed)})", ""]
    for row in failed:
        lines += [f"### {row['test']} ({row['when']})", "", "```", row["text"], "```", ""]
    unfinished = [test for phase in done for test in phase["unfinished"]]
    lines += [f"## Not finished ({len(unfinished)})", "", *(f"- {test}" for test in unfinished), ""]
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["outcome"] == "skipped":
            reasons[row["text"].removeprefix("Skipped: ")].append(row["test"])
    lines += ["## Skipped", ""]
    for reason, tests in sorted(reasons.items()):
        lines += [f"- {reason}: {len(tests)} (first: {tests[0]})"]
    lines += ["", "## Slowest", ""]
    slowest = sorted(rows, key=lambda row: -row["seconds"])[:30]
    lines += [f"- {row['seconds']:.1f} s {row['test']}" for row in slowest]
    return "\n".join(lines) + "\n"


def run(
    out: Path, minutes: float, keyword: str, only: str, workers_per_gpu: int, record: bool
) -> int:
    """Run the selected phases, write the reports and print the counts.

    Returns 0 if all tests passed or were skipped in time, 1 if not, and 2 if nothing could be run.
    """
    num_gpus = number_of_gpus()
    if not num_gpus:
        print("error: no CUDA device; GPU tests need one", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    begin, done, machine = time.monotonic(), [], describe_machine()
    selected = [phase for phase in phases(num_gpus, workers_per_gpu) if only in phase.name]
    if not selected:
        print(f"error: --phase: no phase's name contains {only!r}", file=sys.stderr)
        return 2
    at_once = [phase for phase in selected if phase.workers]
    for group in (at_once, *([phase] for phase in selected if not phase.workers)):
        with ThreadPoolExecutor(len(selected)) as pool:
            runs = [
                pool.submit(run_phase, phase, num_gpus, out, keyword, begin + 60 * minutes)
                for phase in group
            ]
        for phase in (ended.result() for ended in runs):
            done.append(phase)
            print(f"{phase['name']}: {counts(phase['rows'])} in {phase['seconds']} s", flush=True)
        (out / "report.md").write_text(report_text(machine, done))
    summary = {
        **machine,
        "seconds": round(time.monotonic() - begin),
        "phases": {
            p["name"]: {**counts(p["rows"]), "seconds": p["seconds"], "exit_code": p["exit_code"]}
            for p in done
        },
        "slow": {
            row["test"]: round(row["seconds"])
            for phase in done
            for row in sorted(phase["rows"], key=lambda row: -row["seconds"])
            if row["seconds"] > SLOW_SECONDS
        },
    }
    (out / "report.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"all in {summary['seconds']} s; {out / 'report.md'}")
    passed = all(is_good(phase) for phase in done)
    if record and passed and not keyword and not only:
        LAST_RUN.write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if passed else 1


# ---- what changed since ------------------------------------------------------------------------


def is_covered(path: str) -> bool:
    """Return True if GPU tests execute this file, or if it holds GPU tests."""
    if any(path == place or path.startswith(f"{place}/") for place in COVERED):
        return True
    file = ROOT / path
    is_test = re.fullmatch(r"tests/(\w+/)*test_\w+\.py", path)
    if is_test is None or not file.exists():
        return False
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from tests.lib.marks import may_have

    return may_have("gpu", file)


def due() -> int:
    """Print the covered files that changed since the last run; return 1 if any did."""
    last = json.loads(LAST_RUN.read_text())
    commit = last["commit"]
    passed, failed = (
        sum(phase[outcome] for phase in last["phases"].values()) for outcome in ("passed", "failed")
    )
    changed = output_of("git", "diff", "--name-only", commit).splitlines()
    covered = [path for path in changed if is_covered(path)]
    cards = ", ".join(last["cards"])
    outcome = f"{passed} passed, {failed} failed in {last['seconds']} s"
    print(f"GPU tests last ran at {commit[:8]} on {cards}: {outcome}")
    if covered:
        print(f"{len(covered)} files that they cover changed since; run scripts/gpu_suite.py:")
        print("\n".join(f"  {path}" for path in covered))
    return 1 if covered else 0


def main() -> int:
    """Read the command line; run the tests, or list what is due."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_suite")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of all phases")
    parser.add_argument("-k", dest="keyword", default="", help="as pytest's -k")
    parser.add_argument("--workers", type=int, default=WORKERS_PER_GPU, help="processes per GPU")
    parser.add_argument("--phase", default="", help="only phases whose name contains this")
    parser.add_argument(
        "--record",
        action="store_true",
        help="write tests/gpu_last_run.json if all tests passed in time",
    )
    parser.add_argument("--due", action="store_true", help="list covered files that changed since")
    args = parser.parse_args()
    if args.due:
        return due()
    return run(
        out=args.out.resolve(),
        minutes=args.minutes,
        keyword=args.keyword,
        only=args.phase,
        workers_per_gpu=args.workers,
        record=args.record,
    )


if __name__ == "__main__":
    sys.exit(main())
