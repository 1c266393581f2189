"""Start a program by torchrun on several machines that are network namespaces of this one.

    python scripts/namespaces.py --machines 2 --ranks 2 [--rate 100mbit] [--delay 5ms]
        [--own FOLDER ...] -- -m moetrain.train debug --train.steps 20 --output_dir outputs/two

A machine is a set of namespaces: a host name, a network with one interface (eth0) and one address,
processes and mounts. A cable (veth) connects each machine to a bridge, which has a namespace of its
own. So nothing is visible outside, and no interface can be left over. When the first process of a
machine ends, the kernel ends all others of that machine; and it ends the first one when this
process ends, for whatever reason. Machines see the same files, except for /dev/shm, their own
/etc/hosts, and the folders named by --own.

--rate and --delay hold for each cable in each direction (by tc's tbf; with a delay by netem, which
the kernel must have). Needs root, iproute2 and util-linux. Exit code: the highest of the machines'.
Left out on purpose: GPUs, since all machines would share those of this host.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ENDS_WITH_US = ["setpriv", "--pdeathsig", "KILL"]
UNSHARED = [*ENDS_WITH_US, "unshare", "--net", "--mount", "--uts", "--ipc", "--pid"]
UNSHARED += ["--mount-proc", "--fork", "--kill-child"]
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")
PORT = 29500
"""The port of the first machine's rendezvous; every machine has all ports."""


def why_not() -> str:
    """Return why machines cannot be made here; an empty text if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"network namespaces need {', '.join(missing)} (iproute2, util-linux)"
    try:
        with Machines(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {str(error.stderr).strip()}"


def do(*words: str) -> None:
    """Run a program that must succeed; otherwise raise CalledProcessError with its output."""
    subprocess.run(words, check=True, capture_output=True, text=True)


class _Namespaces:
    """Namespaces that live as long as their first process, which only sleeps."""

    def __init__(self) -> None:
        words = [*UNSHARED, "sh", "-c", "echo ready; exec sleep infinity"]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self._unshare = subprocess.Popen(words, stdin=subprocess.DEVNULL, **pipes)
        if self._unshare.stdout.readline() != "ready\n":  # pyright: ignore
            _, said = self._unshare.communicate()
            raise subprocess.CalledProcessError(self._unshare.returncode, words, stderr=said)
        (self.pid,) = children(self._unshare)

    def inside(self, *words: str) -> list[str]:
        """Return the command line that runs ``words`` in these namespaces."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--ipc"]
        return [*enter, "--pid", f"--wd={os.getcwd()}", *words]

    def end(self) -> None:
        """Kill all processes; return when they are gone."""
        self._unshare.kill()  # its child ends with it, and all others with the child
        self._unshare.wait()
        while Path(f"/proc/{self.pid}").exists():
            time.sleep(0.01)


class Machine(_Namespaces):
    """One machine: its ``name`` and its ``address``."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.name, self.address = f"machine{number}", f"10.0.0.{number + 1}"
        self._jobs: list[subprocess.Popen[str]] = []

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a program here; ``options`` are Popen's. Its exit code is the program's."""
        words = tuple(self.inside(*ENDS_WITH_US, *words))
        self._jobs.append(subprocess.Popen(words, text=True, **options))
        return self._jobs[-1]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the programs that :meth:`start` started and that still run."""
        for job in self._jobs:
            for pid in children(job):  # the child of nsenter
                os.kill(pid, number)

    def bind(self, source: Path, target: Path) -> None:
        """Bind-mount ``source`` over ``target``, a file or a folder, on this machine only."""
        do(*self.inside("mount", "--bind", str(source), str(target)))

    def end(self) -> None:
        """Lose the machine: kill all its processes at once."""
        super().end()
        for job in self._jobs:
            job.wait()


class Machines:
    """Context of ``count`` machines on one bridge; it yields them.

    Raises CalledProcessError: the kernel does not make them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._machines: list[Machine] = []

    def __enter__(self) -> Machines:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._bridge = _Namespaces()
            stack.callback(self._bridge.end)
            self._outside("ip", "link", "add", "bridge", "type", "bridge")
            self._outside("ip", "link", "set", "bridge", "up")
            for number in range(self.count):
                machine = Machine(number)
                stack.callback(machine.end)
                self._machines.append(machine)
                self._connect(machine)
            lines = [f"{each.address} {each.name}\n" for each in self._machines]
            hosts = folder / "hosts"
            hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))
            for machine in self._machines:
                machine.bind(hosts, Path("/etc/hosts"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, number: int) -> Machine:
        return self._machines[number]

    def _outside(self, *words: str) -> None:
        do(*self._bridge.inside(*words))

    def _connect(self, machine: Machine) -> None:
        ends = ["eth0", "netns", str(machine.pid), "type", "veth", "peer", "name", machine.name]
        do("ip", "link", "add", *ends, "netns", str(self._bridge.pid))
        self._outside("ip", "link", "set", machine.name, "master", "bridge", "up")
        for words in (
            f"hostname {machine.name}",
            "mount -t tmpfs tmpfs /dev/shm",
            "ip link set lo up",
            f"ip address add {machine.address}/24 dev eth0",
            "ip link set eth0 up",
        ):
            do(*machine.inside(*words.split()))

    def limit(self, rate: str | None = None, delay: str | None = None) -> None:
        """Give each cable a rate and a delay in each direction, in tc's units; None: no limit."""
        words = ["noqueue"]  # the default of a cable
        if delay is not None:
            words = ["netem", "delay", delay, *(["rate", rate] if rate else [])]
        elif rate is not None:
            words = ["tbf", "rate", rate, "burst", "128kb", "latency", "500ms"]
        for machine in self._machines:
            for where, device in ((machine, "eth0"), (self._bridge, machine.name)):
                do(*where.inside("tc", "qdisc", "replace", "dev", device, "root", *words))

    def cut(self, machine: Machine) -> None:
        """Take a machine's cable out of the bridge: packets to and from it are lost."""
        self._outside("ip", "link", "set", machine.name, "nomaster")

    def mend(self, machine: Machine) -> None:
        """Put the cable back."""
        self._outside("ip", "link", "set", machine.name, "master", "bridge")

    def torchrun(self, words: Sequence[str], ranks: int = 1, **options: Any) -> list[int | None]:
        """Start ``python WORDS`` as ``ranks`` ranks of every machine; return their exit codes.

        ``options`` are those of :meth:`agents`.
        """
        return [agent.wait() for agent in self.agents(words, ranks, **options)]

    def agents(
        self,
        words: Sequence[str],
        ranks: int = 1,
        *,
        restarts: int = 0,
        said: Sequence[Path] = (),
        env: dict[str, str] | None = None,
    ) -> list[subprocess.Popen[str]]:
        """Start an agent of torchrun on every machine, each with ``ranks`` of ``python WORDS``.

        ``restarts``: how often all start again; ``said``: files for what each machine prints;
        ``env``: variables on top of those of this process.
        """
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.count}"]
        command += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={self[0].name}:{PORT}", *words]
        own = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **(env or {})}
        agents = []
        for number, machine in enumerate(self._machines):
            with ExitStack() as stack:
                out: Any = {}
                if said:
                    out["stdout"] = stack.enter_context(said[number].open("w"))
                    out["stderr"] = subprocess.STDOUT
                agents.append(machine.start(*command, env=own, **out))
        return agents


def children(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that ``process`` has started; none if it is gone."""
    if process.poll() is not None:
        return []
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in listed.read_text().split()]


def main() -> int:
    """Return the highest exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each machine")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--rate", help="rate of each cable, such as 100mbit")
    parser.add_argument("--delay", help="delay of each cable, such as 5ms")
    parser.add_argument("--own", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("words", nargs="+", help="after --: what python runs, as -m MODULE ...")
    options = parser.parse_args()
    if why := why_not():
        sys.exit(f"error: {why}")
    with Machines(options.machines) as machines:
        machines.limit(options.rate, options.delay)
        for folder in options.own:
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(options.machines):
                mine = folder.with_name(f"{folder.name}.{machines[number].name}")
                mine.mkdir(exist_ok=True)
                machines[number].bind(mine, folder)
        codes = machines.torchrun(options.words, options.ranks, restarts=options.restarts)
    return max(code if code is not None and code >= 0 else 1 for code in codes)


if __name__ == "__main__":
    sys.exit(main())
