"""Ranks start and end together: exit codes, one report, no process left, srun's variables."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from moetrain.cli import launch
from moetrain.cli.train import main
from moetrain.config import ConfigError
from moetrain.config.environment import LaunchedPlace, report_failure
from moetrain.config.sources import RunFailed
from moetrain.parallel.processes import find_ranks
from tests.lib.command_lines import settled
from tests.lib.launches import Launcher

# The program of the ranks: the real command line, with a trainer that follows instructions.
RANK = """
import glob, os, signal, sys, time, types
from moetrain.cli import launch
from moetrain.config import ConfigError
from moetrain.config.sources import RunFailed
from moetrain.cli.train import main

rank, folder = int(os.environ["RANK"]), sys.argv[2]


class Trainer:
    config = model = types.SimpleNamespace(arch=types.SimpleNamespace(vocab_size=256))

    def __init__(self, config, **_): ...

    def fit(self):
        open(os.path.join(folder, f"{rank}.{os.getpid()}"), "w").close()
        getattr(self, sys.argv[1])()

    def succeed(self):
        print(f"out {rank}" + chr(10), end="")

    def all_misconfigured(self):
        raise ConfigError("data.path", "nowhere")

    def all_fail(self):
        raise RunFailed("too many bad steps")

    def one_raises(self):
        if rank == 1:
            raise ValueError("the cause")
        if rank == 2:
            while not glob.glob(os.path.join(folder, "1.*")):
                time.sleep(0.05)
            time.sleep(1)
            raise ValueError("a consequence")
        time.sleep(600)  # as in a collective

    def die(self):
        while len(glob.glob(os.path.join(folder, "[0-9].*"))) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

    def one_is_killed(self):
        if rank == 2:
            self.die()
        time.sleep(600)

    def others_meet_a_death(self):
        if rank == 2:
            self.die()
        while not (files := glob.glob(os.path.join(folder, "2.*"))):
            time.sleep(0.05)
        try:
            while " Z " not in open(f"/proc/{files[0].rpartition('.')[2]}/stat").read():
                time.sleep(0.05)
        except OSError:  # and it was waited for
            pass
        raise RuntimeError("connection closed by peer")

    def one_is_stopped(self):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        from moetrain.train.stops import Watchdog

        Watchdog(0.5 if rank == 0 else 600, rank, 3).restart()
        time.sleep(600)

    def wait_for_a_signal(self):
        got = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: got.append(number))
        open(os.path.join(folder, f"ready{rank}"), "w").close()
        while not got:
            time.sleep(0.05)
        time.sleep(0.3 * rank)  # a checkpoint
        print(f"saved {rank}" + chr(10), end="")
        raise SystemExit(128 + got[0])


module = types.ModuleType("moetrain.train.loop")
module.Trainer = Trainer
sys.modules["moetrain.train.loop"] = module
preview = types.ModuleType("moetrain.data.preview")  # it would import torch
preview.cautions = lambda config, vocab_size: []
sys.modules["moetrain.data.preview"] = preview
sys.exit(main(["train.sample_tokens=0"]))  # whose callback would import torch
"""

# Ranks join a world over gloo; then one raises while the others wait for it.
MEETING = """
import sys, types
import torch
import torch.distributed as dist
from moetrain.models.hf.load import resolve_architecture
from moetrain.parallel.world import join_world
from moetrain.cli.train import main


class Trainer:
    def __init__(self, config, **_):
        self.config, arch = config, resolve_architecture(config.model)
        self.model = types.SimpleNamespace(arch=arch)
        self.world = join_world(config, arch)

    def fit(self):
        one = torch.ones(())
        dist.all_reduce(one)
        line = f"{self.world.rank} of {self.world.size}: {one}" + chr(10)
        print(line, end="", flush=True)  # one write: three ranks share the pipe
        if self.world.rank == 2:
            raise ValueError("the cause")
        dist.all_reduce(one)


module = types.ModuleType("moetrain.train.loop")
module.Trainer = Trainer
sys.modules["moetrain.train.loop"] = module
sys.exit(main(["train.device=cpu", "train.global_batch_size=6", "train.micro_batch_size=2"]))
"""

# Two ranks have collectives that give up after three seconds; one works for longer, one falls
# silent.
PATIENCE = """
import sys, time, types
from datetime import timedelta
from moetrain.models.hf.load import resolve_architecture
from moetrain.parallel import processes, world
from moetrain.cli.train import main

processes.TIMEOUT = timedelta(seconds=3)
processes._BEAT_SECONDS = 0.2


class Trainer:
    def __init__(self, config, **_):
        self.config, arch = config, resolve_architecture(config.model)
        self.model = types.SimpleNamespace(arch=arch)
        self.world = world.join_world(config, arch)

    def fit(self):
        if self.world.is_main:
            time.sleep(5)  # tokenises
        self.world.barrier()
        text = self.world.broadcast("from 0" if self.world.is_main else "from 1")
        self.world.barrier()
        if self.world.rank == 1:
            print(text, flush=True)
            self.world.rendezvous.end()  # as if it were gone
            time.sleep(600)
        self.world.barrier()


module = types.ModuleType("moetrain.train.loop")
module.Trainer = Trainer
sys.modules["moetrain.train.loop"] = module
sys.exit(main(["train.device=cpu", "train.micro_batch_size=2"]))
"""


@pytest.fixture
def start(tmp_path):
    """Return ``start(behaviour)``, which starts a launcher of three ranks with that behaviour."""
    started = []

    def launcher(behaviour, **how):
        started.append(Launcher(tmp_path, RANK, behaviour, str(tmp_path), **how))
        return started[-1]

    yield launcher
    for each in started:  # left by a failed test; their ranks die with them
        each.process.kill()


def assert_nobody_is_left(folder):
    pids = [int(path.suffix[1:]) for path in folder.glob("[0-9].*")]
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.tier("long")
def test_launcher_exits_with_0_when_all_ranks_succeed(start, tmp_path):
    code, out, error = start("succeed").end()
    assert (code, error) == (0, "")
    assert sorted(out.splitlines()) == ["out 0", "out 1", "out 2"]
    assert_nobody_is_left(tmp_path)


@pytest.mark.tier("long")
@pytest.mark.parametrize(
    ("behaviour", "code", "line"),
    [
        ("all_misconfigured", 2, "error: data.path: nowhere"),
        ("all_fail", 1, "failed: too many bad steps"),
    ],
)
def test_launcher_prints_an_error_of_all_ranks_once(behaviour, code, line, start):
    found, _, error = start(behaviour, nproc=2).end()
    assert (found, error) == (code, line + "\n")


@pytest.mark.tier("long")
def test_an_error_is_reported_by_its_rank_and_ends_the_others(start, tmp_path):
    code, _, error = start("one_raises").end()
    assert code == 1
    assert error.startswith("Traceback")
    assert error.endswith("ValueError: the cause\n(rank 1 of 3)\n")
    assert error.count("Traceback") == 1
    assert_nobody_is_left(tmp_path)


@pytest.mark.tier("wide", long=["one_is_killed"])
@pytest.mark.parametrize("others", ["one_is_killed", "others_meet_a_death"])
def test_a_killed_rank_ends_the_others(others, start, tmp_path):
    code, _, error = start(others).end()
    assert (code, error) == (1, "failed: rank 2 was killed by signal 9 (Killed)\n")
    assert_nobody_is_left(tmp_path)


@pytest.mark.tier("long")
def test_a_stopped_rank_is_named_after_the_rank_that_waited_for_it(start, tmp_path):
    code, _, error = start("one_is_stopped").end()
    assert code == 1
    assert error.startswith("the threads of rank 0 of 3:\n")
    assert "in one_is_stopped\n" in error
    hung, stopped = error.splitlines()[-2:]
    assert hung.startswith("failed: rank 0 of 3 has not ended a step for 0.5 s (launch.hang_sec")
    assert stopped.startswith("failed: rank 1 was stopped by a signal (SIGSTOP or SIGTSTP), ")
    assert_nobody_is_left(tmp_path)


@pytest.mark.tier("long")
@pytest.mark.parametrize(("end", "code"), [("os._exit(0)", 0), ("raise SystemExit(3)", 3)])
def test_a_rank_that_ends_too_early_is_named(end, code, tmp_path):
    """The others notice it by their connections, and say so in one line."""
    behaviour = MEETING.replace('raise ValueError("the cause")', f"import os; {end}")
    assert behaviour != MEETING
    found, _, error = Launcher(tmp_path, behaviour).end(timeout=180)
    assert found == 1
    lost, early = error.splitlines()
    # Gloo says that its peer has closed the connection, or has reset it.
    assert re.match("failed: lost another rank: .*Connection (closed|reset) by peer", lost)
    assert lost.endswith("; the output of that rank or launcher says why")
    assert (
        early == f"failed: rank 2 ended with exit code {code} and no error, while others needed it"
    )


@pytest.mark.parametrize("is_killed_by_kernel", [False, True])
def test_the_line_of_a_killed_rank_says_if_memory_was_full(
    is_killed_by_kernel, monkeypatch, tmp_path, capfd
):
    counts = iter([7, 7 + is_killed_by_kernel])
    monkeypatch.setattr(launch, "_oom_kills", lambda: next(counts))
    dies = subprocess.Popen(["sh", "-c", "kill -9 $$"])
    assert launch._watch([dies.pid], {}, {0: str(tmp_path / "0" / "error.json")}) == 1
    dies.wait()
    killed = "failed: rank 0 was killed by signal 9 (Killed)"
    line = capfd.readouterr().err
    assert line.startswith(killed)
    assert line.endswith(
        "; lower train.micro_batch_size, or start fewer processes (launch.nproc)\n"
        if is_killed_by_kernel
        else "(Killed)\n"
    )


def test_the_counter_of_full_memory_is_the_kernels():
    rows = dict(row.split() for row in Path("/proc/vmstat").read_text().splitlines())
    assert launch._oom_kills() == int(rows["oom_kill"])


def test_torchrun_shows_the_reason_of_the_rank_that_failed_first(tmp_path):
    """Within a second, too, and though a lower rank failed behind it."""
    files = [str(tmp_path / str(rank) / "error.json") for rank in (0, 1)]
    for file in files:
        Path(file).parent.mkdir()
    assert launch.is_first_to_fail(files[1], waits=False)
    assert not launch.is_first_to_fail(files[0], waits=False)
    report_failure(files[1], "failed: the cause")
    report_failure(files[0], "failed: a consequence", is_first=False)
    failures = {rank: ProcessFailure(rank, 1, 1, file) for rank, file in enumerate(files)}
    shown = ChildFailedError("moetrain.train", failures)
    assert shown.get_first_failure()[0] == 1
    assert "traceback : failed: the cause\n" in str(shown).partition("Root Cause")[2]
    assert "a consequence" not in str(shown)


@pytest.mark.tier("wide")
def test_started_ranks_meet_and_the_first_error_is_the_one_reported(tmp_path):
    code, out, error = Launcher(tmp_path, MEETING).end(timeout=180)
    assert code == 1
    assert sorted(out.splitlines()) == ["0 of 3: 3.0", "1 of 3: 3.0", "2 of 3: 3.0"]
    assert error.endswith("ValueError: the cause\n(rank 2 of 3)\n")
    assert error.count("Traceback") == 1


@pytest.mark.tier("long")
def test_ranks_die_with_their_launcher(start, tmp_path):
    process = start("wait_for_a_signal")
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("ready*"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.end() == (-signal.SIGKILL, "", "")
    deadline = time.monotonic() + 5
    while any(map(is_running, pids_of(tmp_path))):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pids_of(folder):
    return [int(path.suffix[1:]) for path in folder.glob("[0-9].*")]


def is_running(pid):
    """Return True if it is a process, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.tier("wide")
def test_a_wait_for_work_has_no_limit_and_one_for_the_dead_has(tmp_path):
    line = "failed: rank 1 of 2 gave no sign of life for 3 s\n"
    assert Launcher(tmp_path, PATIENCE, nproc=2).end(timeout=180) == (1, "from 0\n", line)


# ---- rendezvous ----------------------------------------------------------------------------------


def place(rank, size=2, host="127.0.0.1", port=0, is_served=False):
    return LaunchedPlace(rank, 0, size, f"{host}:{port}", None, None, is_served)


@pytest.fixture
def served():
    """Return the port of a store like a launcher's."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_an_unknown_address_is_known_to_be_at_once():
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: 'no\.such\.host\.invalid'"):
        find_ranks(place(1, host="no.such.host.invalid", port=1234), 300)
    with pytest.raises(ConfigError, match="MASTER_PORT: 70000"):
        find_ranks(place(1, port=70000), 300)
    assert time.monotonic() - began < 30  # the time of a resolver


def test_find_ranks_fails_if_nobody_serves_the_address():
    port = free_port()
    with pytest.raises(RunFailed, match=rf"rank 1 of 2 found nobody at 127\.0\.0\.1:{port} within"):
        find_ranks(place(1, port=port), 0.3)


def test_ranks_that_do_not_come_are_named(served):
    with pytest.raises(RunFailed, match=r"ranks 0, 2, 3 of 4 did not join at .* within 0.3 s"):
        find_ranks(place(1, 4, port=served, is_served=True), 0.3)
    with pytest.raises(ConfigError, match="RANK: two of 4 processes have 1"):
        find_ranks(place(1, 4, port=served, is_served=True), 0.3)
    with pytest.raises(ConfigError, match="WORLD_SIZE: 2 for rank 0, and 4 for another"):
        find_ranks(place(0, 2, port=served, is_served=True), 0.3)


@pytest.mark.tier("wide")
def test_a_group_that_cannot_form_is_one_line(tiny_words):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-m", "moetrain.train", *tiny_words, "launch.join_timeout=0.5"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("failed: rank 1 of 2 did not join at 127.0.0.1:")
    assert "launch.join_timeout" in done.stderr


@pytest.mark.tier("wide", long=["10"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_reaches_every_rank_and_waits_for_all(number, start, tmp_path):
    process = start("wait_for_a_signal")
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("ready*"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    [paused] = [int(path.suffix[1:]) for path in tmp_path.glob("1.*")]
    os.kill(paused, signal.SIGSTOP)  # it must not make the others wait for ever
    process.send_signal(number)
    code, out, error = process.end()
    means = signal.SIGTERM if number == signal.SIGUSR1 else number
    assert (code, error) == (128 + means, "")
    assert sorted(out.splitlines()) == ["saved 0", "saved 1", "saved 2"]
    assert_nobody_is_left(tmp_path)


@pytest.mark.parametrize(
    ("words", "field", "named"),
    [
        (["parallel.tp=3"], "parallel.tp", "world of 4"),
        (["parallel.dp_shard=3"], "parallel.dp_shard", "world of 4"),
        (["parallel.ep=3"], "parallel.ep", "dp_shard 4"),
        (["model.num_experts=6", "parallel.ep=4"], "parallel.ep", "num_experts 6"),
        (["model.preset=qwen3-0.6b", "parallel.ep=2"], "parallel.ep", "no experts"),
        (["parallel.tp=4"], "parallel.tp", "num_heads 2"),
        (["train.global_batch_size=12"], "train.global_batch_size", "4 ranks"),
        (["launch.nproc=0"], "launch.nproc", "0"),
    ],
)
def test_a_bad_layout_is_one_line(words, field, named, tiny_words, capsys):
    if "model.preset=qwen3-0.6b" in words:
        tiny_words = [word for word in tiny_words if not word.startswith("model.")]
    base = ["train.global_batch_size=8", "launch.nproc=4"]
    assert main(["--dry_run", *settled([*tiny_words, *base, *words])]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"error: {field}: ")
    assert named in error
    assert error.count("\n") == 1


@pytest.mark.tier("wide")
def test_a_bad_layout_ends_the_ranks_with_one_line(tmp_path, tiny_words):
    words = settled([*tiny_words, "train.global_batch_size=8", "parallel.tp=3", "launch.nproc=2"])
    words += [f"output_dir={tmp_path / 'out'}"]
    command = [sys.executable, "-m", "moetrain.train", *settled(words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: parallel.tp: pp 1, ")
    assert done.stderr.count("\n") == 1


def test_the_launcher_gets_the_words_as_they_came(tiny_words, monkeypatch):
    started = []
    monkeypatch.setattr("moetrain.cli.launch.start_ranks", lambda *call: started.append(call) or 7)
    words = ["debug", *settled([*tiny_words, "train.global_batch_size=8"]), "--launch.nproc", "4"]
    assert main(words) == 7
    assert started == [(["-m", "moetrain.train", *words], 4, 0)]
