"""Kill ranks, agents and machines of a run again and again, and check that nothing is lost.

    python scripts/kill_ranks.py [--kills 100] [--kinds rank hang ...] [--seconds 3000] [--seed 0]

Two "machines" train a tiny model on this machine's CPU, with a checkpoint in memory after each
step. Each of them is a torchrun with one rank and its own folder for these checkpoints. At random
moments:

    rank      SIGKILL to a rank
    hang      SIGSTOP to a rank
    disk      a rank can write no file as large as a checkpoint needs
    link      all connections of a rank are broken (ss --kill, for root), as by a cable pulled out
    agent     SIGKILL to a torchrun, whose rank goes on without it; another starts a little later
    machine   SIGKILL to a torchrun and its rank, whose memory is lost; it comes back a little later

After each fault the script measures the seconds until a new step is done, and the number of
finished steps that were computed again. At the end the run is stopped, and its losses are compared
with those of two undisturbed ranks. An agent that ends by itself, for example because another agent
did not answer within 60 s, is started again and counted. A JSON line says what was found. The exit
code is 1 if a step is missing, if one fault lost more than one step, or if the losses differ.
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
from collections.abc import Callable
from pathlib import Path

from soak import WORDS, Found, check, end_session, losses, ranks_of, send
from torch.distributed import TCPStore

KINDS = ("rank", "hang", "disk", "link", "agent", "machine")
OWN = {
    "train.micro_batch_size": 4,
    "train.global_batch_size": 32,
    "optim.schedule": "constant",
    "checkpoint.interval": 0,
    "checkpoint.memory_interval": 1,
    "checkpoint.replicas": 2,
    "launch.join_timeout": 120,
}
TOO_FEW_BYTES = 30_000


class Kills:
    """A run on two machines that are killed."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.out = options, folder, folder / "out"
        self.drawn = random.Random(options.seed)
        self.log = folder / "log"
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        settings = WORDS | OWN | {"launch.hang_seconds": options.hang_seconds}
        settings |= {"output_dir": self.out, "train.steps": 10**6}
        self.words = [f"{name}={value}" for name, value in settings.items()]
        self.agents = [self.start(0), self.start(1)]
        self.seconds: list[tuple[str, float]] = []
        self.lost: list[int] = []
        self.gave_up = 0

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """Start one machine's torchrun."""
        words = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=1000", "--rdzv-backend=c10d"]
        words += [f"--rdzv-endpoint=127.0.0.1:{self.store.port}"]
        words += ["--rdzv-conf=is_host=0,last_call_timeout=2,keep_alive_interval=1"]
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        own |= {"MOETRAIN_CHECKPOINT__MEMORY": str(self.memory(number)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        with self.log.open("a") as log:
            return subprocess.Popen(
                [*command, "-m", "moetrain.train", *self.words],
                env=os.environ | own,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def memory(self, number: int) -> Path:
        return self.folder / f"memory{number}"

    # ---- what is known of the run --------------------------------------------------------------

    def last_step(self) -> int:
        return max(losses(self.out), default=0)

    def resumed(self) -> list[int]:
        """Return the steps at which the run has resumed so far."""
        return [int(n) for n in re.findall(r"resuming from \S*step-(\d+)", self.log.read_text())]

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self.options.patience
        while not is_so():
            for number, agent in enumerate(self.agents):
                if agent.poll() is not None:  # nobody has killed it: it gave up
                    self.gave_up += 1
                    self.agents[number] = self.start(number)
            check(time.monotonic() < end, f"{what} did not come: {self.log.read_text()[-3000:]}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait until both machines train together."""

        def worlds() -> list[str]:
            return re.findall(r" on (\d) x cpu", self.log.read_text())

        self.wait(lambda: worlds()[-1:] == ["2"], "a world of two")
        before = self.last_step()
        self.wait(lambda: self.last_step() > before + 1, "a step of two")

    # ---- kills ---------------------------------------------------------------------------------

    def kill(self, kind: str) -> None:
        """Make a fault of ``kind``, and wait until the run continues."""
        self.settle()
        time.sleep(self.drawn.uniform(0, 1))
        number = self.drawn.randrange(2)
        agent = self.agents[number]
        (rank,) = ranks_of(agent.pid)
        starts, began = len(self.resumed()), time.monotonic()
        if kind in ("agent", "machine"):
            send(agent.pid, signal.SIGKILL)
            agent.wait()
        if kind in ("rank", "machine"):
            send(rank, signal.SIGKILL)
        elif kind == "hang":
            send(rank, signal.SIGSTOP)
        elif kind == "disk":
            resource.prlimit(rank, resource.RLIMIT_FSIZE, (TOO_FEW_BYTES, TOO_FEW_BYTES))
        elif kind == "link":
            break_connections(rank)
        if kind == "machine":
            shutil.rmtree(self.memory(number), ignore_errors=True)
        if kind in ("agent", "machine"):
            time.sleep(self.drawn.uniform(0, 5))
            self.agents[number] = self.start(number)
        done = self.last_step()

        def goes_on() -> bool:
            nonlocal done
            if len(self.resumed()) == starts:
                done = max(done, self.last_step())
            return len(self.resumed()) > starts and self.last_step() > done

        self.wait(goes_on, f"a step after {kind}")
        self.seconds.append((kind, time.monotonic() - began))
        self.lost.append(done - self.resumed()[starts])
        check(self.lost[-1] <= 1, f"{kind} lost {self.lost[-1]} steps")
        took, when = f"{self.seconds[-1][1]:.1f} s", time.strftime("%H:%M:%S")
        row = f"{when} {len(self.seconds)}: {kind} at step {done}, {took}, lost {self.lost[-1]}"
        print(f"{row}, load {os.getloadavg()[0]:.0f}", file=sys.stderr, flush=True)

    def end(self) -> None:
        pids = [pid for agent in self.agents for pid in (agent.pid, *ranks_of(agent.pid))]
        for pid in pids:  # all ranks: a remaining one would continue alone
            send(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.wait()  # its session exists until then
            end_session(agent.pid)

    def compare(self) -> float:
        """Return the greatest relative difference from the losses of an undisturbed run."""
        found = losses(self.out)
        check(list(found) == list(range(1, len(found) + 1)), f"steps: {list(found)}")
        away = {"output_dir": self.folder / "alone", "train.steps": len(found)}
        away |= {"checkpoint.memory_interval": 0, "checkpoint.replicas": 1}
        away |= {"launch.hang_seconds": 0, "launch.nproc": 2}
        given = dict(word.split("=", 1) for word in self.words) | away
        words = [f"{name}={value}" for name, value in given.items()]
        subprocess.run(
            [sys.executable, "-m", "moetrain.train", *words], check=True, stdout=subprocess.DEVNULL
        )
        alone = losses(self.folder / "alone")
        return max(abs(found[step] - loss) / loss for step, loss in alone.items())


def break_connections(pid: int) -> None:
    """Break the TCP connections of a process: both ends see that they are gone."""
    rows = subprocess.run(["ss", "-Htnp"], check=True, capture_output=True, text=True).stdout
    ports = [row.split()[3].rsplit(":", 1)[1] for row in rows.splitlines() if f"pid={pid}," in row]
    for port in ports:
        command = ["ss", "-K", "-Htn", "sport", "=", f":{port}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def histogram(seconds: list[float]) -> str:
    """Return a line for each five seconds."""
    bins = Counter(int(each // 5) for each in seconds)
    rows = (f"{5 * n:4}-{5 * n + 5:3} s  {bins[n]:3}  {'#' * bins[n]}" for n in sorted(bins))
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill ranks of a run, and count what is lost.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1e9, help="no kill begins after that time")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hang_seconds", type=float, default=10.0, help="launch.hang_seconds")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds for each recovery")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    options = parser.parse_args()
    began, deviation, problem = time.monotonic(), None, ""
    with tempfile.TemporaryDirectory() as folder:
        kills = Kills(options, Path(folder))
        try:
            while len(kills.seconds) < options.kills:
                if time.monotonic() > began + options.seconds:
                    break
                # Each kind comes once per cycle, in another order each time.
                drawn = random.Random(f"{options.seed} {len(kills.seconds) // len(options.kinds)}")
                order = drawn.sample(options.kinds, len(options.kinds))
                kills.kill(order[len(kills.seconds) % len(order)])
            kills.settle()
        except Found as found:
            problem = str(found)
        finally:
            kills.end()
        try:
            deviation = kills.compare()
            check(deviation <= options.tolerance, f"losses differ by {deviation}")
        except Found as found:
            problem = problem or str(found)
        steps = kills.last_step()
    print(histogram([seconds for _, seconds in kills.seconds]))
    row = {"kills": dict(Counter(kind for kind, _ in kills.seconds)), "steps": steps}
    means = {k: [s for kind, s in kills.seconds if kind == k] for k in options.kinds}
    row |= {"mean_seconds": {k: round(sum(s) / len(s), 1) for k, s in means.items() if s}}
    row |= {
        "agents_that_gave_up": kills.gave_up,
        "lost": dict(Counter(kills.lost)),
        "deviation": deviation,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(row | {"seconds": time.monotonic() - began, "problem": problem}))
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
