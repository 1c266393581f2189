"""Kill, pause, starve and damage a run while it trains, and check that its losses do not change.

    python scripts/soak.py --seconds 1200 [--seed 0] [--steps 300] [--same] [--folder DIR]

A tiny model is trained without disturbance once. Then, until the time is up, runs of the same
settings are started, disturbed at a random moment and restarted on a random mesh, until they have
made all their steps:

    rank, launcher   SIGKILL to one rank's process, or to the process that started the ranks
    stop             SIGTERM: the run must save a checkpoint and end with exit code 143
    pause            SIGSTOP to one process for a while; then it is killed
    disk             files may not grow as large as a checkpoint needs: the run must end with exit
                     code 1 and one line
    flip             SIGKILL, and a byte of the newest checkpoint is changed

After each disturbance the script checks that the run resumes from the newest intact checkpoint,
that at most two save intervals lie between that and the last logged step, and that the losses so
far equal those of the undisturbed run: bit for bit on the same mesh (--same), within a relative
difference of --tolerance on others. After ``stop``, and after a run's last step, the folder must
hold only checkpoints.

One JSON line says what was done. If a check fails, the exit code is 1 and the finding is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from moetrain.checkpoint.read import (
    Checkpoint,
    DamagedCheckpoint,
    list_checkpoints,
    open_checkpoint,
)
from moetrain.train.metrics import read_metrics

INTERVAL = 2
ENOUGH_BYTES, TOO_FEW_BYTES = 1 << 30, 30_000
WORDS = {
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 16,
    "model.num_experts": 4,
    "model.moe_intermediate_size": 32,
    "model.vocab_size": 300,
    "data.source": "synthetic",
    "data.seq_len": 32,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 8,
    "train.eval_interval": 0,
    "train.sample_tokens": 0,
    "train.device": "cpu",
    "optim.lr": 1e-3,
    "moe.aux_loss_scope": "global_batch",
    "checkpoint.interval": INTERVAL,
    "checkpoint.keep": 3,
    "log.interval": 1,
    "log.tensorboard": "no",
}
LAYOUTS = {
    "one": ["launch.nproc=1"],
    "dp2": ["launch.nproc=2"],
    "tp2": ["launch.nproc=2", "parallel.tp=2"],
    "ep2": ["launch.nproc=2", "parallel.ep=2"],
    "pp2": ["launch.nproc=2", "parallel.pp=2"],
    "dp4": ["launch.nproc=4"],
    "tp2+ep2": ["launch.nproc=4", "parallel.tp=2", "parallel.ep=2"],
    "ep4": ["launch.nproc=4", "parallel.ep=4"],
}
KINDS = ("rank", "launcher", "stop", "pause", "disk", "flip")


class Found(Exception):
    """A check failed."""


def check(is_true: bool, problem: str) -> None:
    """Raise :class:`Found` unless ``is_true``."""
    if not is_true:
        raise Found(problem)


class Soak:
    """Disturbs one run until it is over, then the next."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.drawn = random.Random(options.seed)
        self.layouts = options.layouts[:1] if options.same else options.layouts
        self.kinds: Counter[str] = Counter()
        self.starts = self.runs = self.steps = 0
        self.deviation = 0.0
        self.reference = self.undisturbed()

    def command(self, out: Path, *more: str) -> list[str]:
        """Return the command line of a run into ``out``."""
        words = [f"{name}={value}" for name, value in WORDS.items()]
        words += [f"train.steps={self.options.steps}", f"output_dir={out}", *more]
        return [sys.executable, "-m", "moetrain.train", *words]

    def undisturbed(self) -> dict[int, float]:
        """Return the losses of an undisturbed run."""
        out = self.folder / "undisturbed"
        layout = LAYOUTS[self.layouts[0]]
        run = subprocess.run(self.command(out, *layout), capture_output=True, text=True)
        check(run.returncode == 0, f"the undisturbed run failed: {run.stderr}")
        return losses(out)

    def disturb_until_over(self, until: float) -> None:
        """Start and disturb one run, to its end or until the time is up."""
        self.out = self.folder / f"run-{self.runs}"
        while time.monotonic() < until:
            if self.start_and_disturb():
                self.runs += 1
                self.steps += len(losses(self.out))
                shutil.rmtree(self.out)
                return

    def start_and_disturb(self) -> bool:
        """Start the run and disturb it once; return True if it ended before that."""
        is_last = sum(self.kinds.values()) >= self.options.disturbances
        kind = "" if is_last else self.drawn.choice(self.options.kinds)
        layout = self.drawn.choice(self.layouts)
        before = self.newest_intact()
        logged = max(losses(self.out), default=0)
        asynchronous = f"checkpoint.asynchronous={self.drawn.choice(['yes', 'no'])}"
        limit = TOO_FEW_BYTES if kind == "disk" else ENOUGH_BYTES
        self.starts += 1
        with (self.folder / "output").open("w+") as output:
            process = subprocess.Popen(
                self.command(self.out, *LAYOUTS[layout], asynchronous),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            )
            try:
                is_over = self.disturb(process, kind, logged)
            finally:
                end_session(process.pid)
                process.wait()
            output.seek(0)
            text = output.read()
        self.check_start(text, before)
        self.check_end(process.returncode, text, "" if is_over else kind)
        return is_over

    def disturb(self, process: subprocess.Popen[bytes], kind: str, logged: int) -> bool:
        """Disturb the run by ``kind`` at a random moment; return True if it was over before."""
        if not kind:
            return process.wait(600) == 0
        if self.drawn.random() < 0.8:  # else at any time, such as during its start
            deadline = time.monotonic() + 120
            while max(losses(self.out), default=0) <= logged and process.poll() is None:
                check(time.monotonic() < deadline, "the run made no step in 120 s")
                time.sleep(0.01)
        try:
            process.wait(self.drawn.uniform(0, self.options.patience))
            is_over = process.returncode == 0
            check(is_over or kind == "disk", f"the run ended by itself: {process.returncode}")
            return is_over
        except subprocess.TimeoutExpired:
            pass
        self.kinds[kind] += 1
        if kind == "disk":
            process.wait(120)
            return process.returncode == 0
        if kind == "stop":
            process.terminate()
            process.wait(120)
        else:
            victims = [process.pid] if kind == "launcher" else ranks_of(process.pid)
            victim = self.drawn.choice(victims or [process.pid])
            if kind == "pause":
                send(victim, signal.SIGSTOP)
                time.sleep(self.drawn.uniform(0.1, 2))
                send(victim, signal.SIGCONT)
                time.sleep(self.drawn.uniform(0.1, 1))
            send(victim, signal.SIGKILL)
            process.wait(60)
        return False

    # ---- what is checked -----------------------------------------------------------------------

    def newest_intact(self) -> int:
        """Return the step of the newest checkpoint whose bytes are intact; 0: none."""
        for path in reversed(list_checkpoints(self.out / "checkpoints")):
            if is_intact(path):
                return open_checkpoint(path).state["step"]
        return 0

    def check_start(self, text: str, before: int) -> None:
        """Check that the run resumed from the newest checkpoint, if it came that far."""
        resumed = re.findall(r"resuming from \S*step-(\d+)", text)
        check(len(resumed) < 2, f"one start resumed {len(resumed)} times")
        if resumed:
            check(int(resumed[0]) == before, f"resumed from {resumed[0]}, not {before}")
        elif " steps, by train.steps" in text:  # it began to train
            check(before == 0, f"started from step 0, not {before}")

    def check_end(self, code: int, text: str, kind: str) -> None:
        """Check the run's exit code, the steps that it lost, and the files that it left."""
        tail = text[-2000:]
        check("Traceback" not in text, f"after {kind}: {tail}")
        self.compare()
        if kind == "stop":  # SIGTERM may come before its handler is installed
            check(code in (143, -signal.SIGTERM), f"stopped with {code}: {tail}")
        if kind == "disk":
            check(code == 1 and "File too large" in text, f"full disk: {code}: {tail}")
        newest, logged = self.newest_intact(), max(losses(self.out), default=0)
        check(newest >= logged - 2 * INTERVAL, f"after {kind}: {logged} steps, {newest} saved")
        if not kind:
            check(code == 0, f"ended with {code}: {tail}")
            check(newest == self.options.steps, f"over, but only {newest} is saved")
        if kind in ("", "stop"):
            self.check_no_strays()
        newest_path = list_checkpoints(self.out / "checkpoints")[-1:]
        if kind == "flip" and newest > 2 * INTERVAL:
            flip(self.drawn, newest_path[0])
            check(not is_intact(newest_path[0]), "a changed byte was not found")

    def check_no_strays(self) -> None:
        """Check that the checkpoints' folder holds only checkpoints, and no more than are kept."""
        root = self.out / "checkpoints"
        odd = [p.name for p in root.iterdir() if not re.fullmatch(r"step-\d{8}", p.name)]
        check(not odd, f"left behind: {odd}")
        intact = [path for path in list_checkpoints(root) if is_intact(path)]
        check(len(intact) <= WORDS["checkpoint.keep"], f"kept: {intact}")

    def compare(self) -> None:
        """Check that each step so far has a loss, which equals that of the undisturbed run."""
        found = losses(self.out)
        check(list(found) == list(range(1, len(found) + 1)), f"steps: {list(found)}")
        for step, loss in found.items():
            apart = abs(loss - self.reference[step]) / self.reference[step]
            self.deviation = max(self.deviation, apart)
            limit = 0.0 if self.options.same else self.options.tolerance
            check(apart <= limit, f"step {step}: loss {loss}, undisturbed {self.reference[step]}")


def losses(out: Path) -> dict[int, float]:
    """Return the losses by step."""
    rows = read_metrics(out / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if row.get("loss") is not None}


def is_intact(path: Path) -> bool:
    """Return True if every byte of a checkpoint is as written."""
    try:
        found: Checkpoint = open_checkpoint(path)
        for _, _, stored in found.stored():
            stored.check()
    except DamagedCheckpoint:
        return False
    return True


def flip(drawn: random.Random, checkpoint: Path) -> None:
    """Change one byte of one file."""
    path = drawn.choice(sorted(checkpoint.iterdir()))
    data = bytearray(path.read_bytes())
    data[drawn.randrange(len(data))] ^= drawn.randrange(1, 256)
    path.write_bytes(data)


def ranks_of(pid: int) -> list[int]:
    """Return the children of a process."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def end_session(session: int) -> None:
    """Kill the remaining processes of a session, and wait until they are gone."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(session, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.05)


def main(argv: Sequence[str] | None = None) -> int:
    """Soak; return the exit code."""
    parser = argparse.ArgumentParser(description="Disturb a run, and compare its curve.")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--runs", type=int, default=10**9, help="most runs")
    parser.add_argument("--disturbances", type=int, default=10**9, help="most of them")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=4.0, help="seconds before a disturbance")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--same", action="store_true", help="one layout; demand equal bits")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--folder", type=Path, help="where to make a temporary folder")
    options = parser.parse_args(argv)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        soak, problem = None, None
        try:
            soak = Soak(options, Path(folder))
            while time.monotonic() < began + options.seconds and soak.runs < options.runs:
                soak.disturb_until_over(began + options.seconds)
        except Found as found:
            problem = str(found)
    row = {"seconds": time.monotonic() - began, "problem": problem}
    if soak is not None:
        row |= {"starts": soak.starts, "runs": soak.runs, "steps": soak.steps}
        row |= {"disturbances": dict(soak.kinds), "deviation": soak.deviation}
    print(json.dumps(row))
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main())
