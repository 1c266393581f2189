"""Helpers of tests/docs/test_new_user.py that other tests use too."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from moetrain.train.metrics import read_metrics

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "TORCHELASTIC_", "MOETRAIN_")
"""Prefixes of variables that would tell a process that a launcher has started it."""


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


# ---- two ranks -----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def by_slurm(run: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Return the variables that srun sets for its two tasks."""
    common = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(free_port())}
    common |= {"SLURM_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    return [(["-m", *run], common | own) for own in ranks]


def run_together(commands: list[tuple[list[str], dict[str, str]]], folder: Path) -> None:
    """Run these commands of Python at the same time; each must succeed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    clean |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    running = []
    try:
        for i, (words, own) in enumerate(commands):
            with (folder / f"said{i}").open("w") as said:
                command = [sys.executable, *words]
                running.append(subprocess.Popen(command, env=clean | own, stdout=said, stderr=said))
        codes = [process.wait(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert codes == [0] * len(codes), "\n".join(f.read_text() for f in folder.glob("said*"))
