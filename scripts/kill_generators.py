"""Kill the generators of a run again and again, and check that no prompt is lost.

    python scripts/kill_generators.py [--kills 100] [--generators 2] [--stop-every 20]
        [--patience 15] [section.key=value ...]

One learner or more (``--learners``) train a tiny model with ``rl.placement`` apart and trajectories
that run ahead, on CPUs unless ``train.device`` is given. At random times a generator gets SIGKILL,
and every twentieth time SIGSTOP, which leaves a process that hangs. The next signal follows once
the run has counted that loss. At the end the run is stopped by SIGTERM, and its metrics and
checkpoint are checked: every step had all its prompts, and every prompt was trained once, is in
flight, or was not begun.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

STEPS = 1_000_000
WORDS = {
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.num_experts": 4,
    "model.moe_intermediate_size": 16,
    "data.seq_len": 128,
    "train.steps": STEPS,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 16,
    "train.eval_interval": 0,
    "train.device": "cpu",
    "rl.env": "sort",
    "rl.supervised_steps": 1,
    "rl.group_size": 4,
    "rl.eval_tasks": 0,
    "rl.max_tokens": 32,
    "rl.max_staleness": 1,
    "rl.placement": "apart",
    "log.interval": 1,
    "log.tensorboard": "false",
}


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


def rows_of(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if "reward" in row]


def counted(folder: Path) -> int:
    rows = rows_of(folder)
    return int(rows[-1]["generators_lost"]) if rows else -1


def await_count(run: subprocess.Popen, folder: Path, number: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and run.poll() is None:
        if counted(folder) >= number:
            return True
        time.sleep(0.05)
    return False


def kill(run: subprocess.Popen, folder: Path, generators: int, args) -> Counter:
    """Kill generators of ``run`` until it has counted ``args.kills``."""
    rng, done = random.Random(0), Counter()
    while run.poll() is None and (lost := counted(folder)) < args.kills:
        time.sleep(rng.random())
        supervisors = [rank for rank in children_of(run.pid) if children_of(rank)][-generators:]
        (victim,) = children_of(rng.choice(supervisors))
        how = signal.SIGSTOP if lost % args.stop_every == args.stop_every - 1 else signal.SIGKILL
        os.kill(victim, how)
        is_counted = await_count(run, folder, lost + 1, args.patience)
        done[how.name if is_counted else "before it served"] += 1
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--generators", type=int, default=2)
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument("--stop-every", type=int, default=20)
    parser.add_argument("--patience", type=float, default=15, help="seconds for the next to serve")
    parser.add_argument("words", nargs="*", help="settings, as train.device=cuda")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name) / "out", time.monotonic()
        own = {"output_dir": folder, "rl.generators": args.generators}
        given = dict(word.split("=", 1) for word in args.words)
        own["launch.nproc"] = args.learners + args.generators
        words = [f"{key}={value}" for key, value in (WORDS | own | given).items()]
        log = (Path(name) / "log").open("w+")
        command = [sys.executable, "-m", "moetrain.rl", *words]
        run = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            assert await_count(run, folder, 0, 120), "no step came"
            done = kill(run, folder, args.generators, args)
            run.send_signal(signal.SIGTERM)
            code = run.wait(120)
        finally:
            run.kill()
        rows = rows_of(folder)
        (checkpoint,) = (folder / "checkpoints").iterdir()
        state = json.loads((checkpoint / "state.json").read_text())
        under_way = Counter(row["group"] for row in state["under_way"])
        taken, begun = state["sample_index"], state["begun"]
        checks = {
            "the run went on to the end": code == 143,
            "every step has its prompts": {row["prompts"] for row in rows} == {4},
            "every step is there": [r["step"] for r in rows] == list(range(2, state["step"] + 1)),
            "all prompts were trained once": sum(row["prompts"] for row in rows) == taken,
            "all others are under way": under_way == dict.fromkeys(range(taken, begun), 4),
            "each death is counted": rows[-1]["generators_lost"] == args.kills,
        }
        print(f"{dict(done)} in {time.monotonic() - began:.0f} s, {len(rows)} steps")
        print(f"{taken * 4} trajectories trained, {rows[-1]['trajectories_restarted']} begun again")
        for text, holds in checks.items():
            print(f"{'yes' if holds else 'NO'}: {text}")
        if not all(checks.values()):
            print(f"exit code {code}", *Path(log.name).read_text().splitlines()[-40:], sep="\n")
        return int(not all(checks.values()))


if __name__ == "__main__":
    sys.exit(main())
