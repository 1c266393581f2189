"""Runs that die and resume: from machines' memory, from other machines' copies, on fewer machines.

Machines are processes here, each with its own folder for its memory.
"""

import errno
import faulthandler
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from moetrain.checkpoint import memory as memory_module
from moetrain.checkpoint import save as checkpoint_save
from moetrain.checkpoint.read import list_checkpoints
from moetrain.config import Config
from moetrain.config.sources import RunFailed
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from tests.lib.checkpointed_runs import losses, names
from tests.lib.checkpoints import tensors_of
from tests.lib.command_lines import settled
from tests.lib.distributed import spawn
from tests.lib.recoveries import rank_of, train
from tests.lib.typed_commands import LAUNCHERS, free_port

QUIET = ["train.sample_tokens=0", "checkpoint.minutes=0", "checkpoint.at_end=no"]
EACH = [*QUIET, "checkpoint.memory_interval=1"]


@pytest.fixture
def memory(tmp_path):
    """Return the settings for a folder of memory, and a function that lists it."""
    (tmp_path / "memory").mkdir()

    def there():
        return sorted(p.relative_to(tmp_path / "memory") for p in tmp_path.glob("memory/*/*/*"))

    there.words = [f"checkpoint.memory={tmp_path / 'memory'}"]
    return there


def said(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.mark.tier("long")
def test_a_run_that_dies_goes_on_from_memory_and_loses_no_step(tiny, memory, tmp_path):
    first = train(tiny(*EACH, *memory.words, "train.steps=6"), until=4)
    kept = [f"step-0000000{n}" for n in (3, 4)]
    assert [path.name for path in memory()] == kept
    assert not (tmp_path / "out" / "checkpoints").exists()  # nothing is on the disk
    second = Trainer(tiny(*EACH, *memory.words, "train.steps=6"))
    assert second.step == first.step == 4
    second.fit()
    assert second.checkpointer.newest == second.run_folder.memory.root / "step-00000004"
    assert not list((tmp_path / "memory").iterdir())  # the run is over
    train(tiny(*QUIET, "train.steps=6", f"output_dir={tmp_path / 'straight'}"))
    assert losses(tmp_path / "out") == losses(tmp_path / "straight")
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, 7)]


@pytest.mark.tier("long")
def test_memory_and_disk_hold_the_same_and_the_newer_one_is_resumed(tiny, memory, tmp_path):
    words = [*EACH, *memory.words, "train.steps=9", "checkpoint.interval=3"]
    train(tiny(*words), until=3)
    train(tiny(*words), until=5)
    disk = tmp_path / "out" / "checkpoints"
    assert names(disk) == ["step-00000003"]  # memory needs no copy of it
    assert [path.name for path in memory()] == ["step-00000004", "step-00000005"]
    train(tiny(*words), until=6)
    assert Trainer(tiny(*words)).checkpointer.newest == disk / "step-00000006"
    shutil.rmtree(disk / "step-00000006")
    newest = Trainer(tiny(*words))
    assert newest.step == 5
    assert newest.checkpointer.newest.parent == newest.run_folder.memory.root
    twin = tiny(*QUIET, "train.steps=9", "checkpoint.interval=5", f"output_dir={tmp_path / 'b'}")
    train(twin, until=5)
    mine, theirs = (
        tensors_of(newest.checkpointer.newest),
        tensors_of(tmp_path / "b/checkpoints/step-00000005"),
    )
    assert mine.keys() == theirs.keys()
    for group, tensors in mine.items():
        assert all((theirs[group][name] == x).all() for name, x in tensors.items())


@pytest.mark.tier("long")
def test_a_run_that_stands_in_memory_alone_is_written_to_the_disk_at_its_end(tiny, memory):
    words = [w for w in EACH if "at_end" not in w]
    train(tiny(*words, *memory.words, "train.steps=3"), until=3)
    trainer = Trainer(tiny(*words, *memory.words, "train.steps=3"))
    assert (trainer.step, trainer.checkpointer.saved_at) == (3, -1)
    assert trainer.fit().checkpoint.name == "step-00000003"
    assert names(trainer.run_folder.checkpoints) == ["step-00000003"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.tier("long")
def test_damage_in_memory_is_passed_over_in_one_line(tiny, memory, caplog):
    words = tiny(*EACH, *memory.words, "train.steps=9")
    trainer = train(words, until=4)
    four = trainer.run_folder.memory.root / "step-00000004"
    flip(four / "model-00000-00.safetensors")
    assert Trainer(words).step == 3
    assert not four.exists()
    assert sum("step-00000004" in text and "differs" in text for text in said(caplog)) == 1
    three = trainer.run_folder.memory.root / "step-00000003"
    (three / "model-00000-00.safetensors").unlink()
    assert Trainer(words).step == 0
    (line,) = (text for text in said(caplog) if "a checkpoint in memory is passed over" in text)
    assert line.endswith("step-00000003/model-00000-00.safetensors': No such file or directory")


@pytest.mark.tier("long")
def test_memory_of_another_run_is_removed(tiny, memory, tmp_path, caplog):
    words = tiny(*EACH, *memory.words, "train.steps=9")
    old = train(words, until=2)
    shutil.rmtree(tmp_path / "out")
    new = train(words, until=1)
    assert new.run_folder.memory.root != old.run_folder.memory.root
    assert [path.name for path in memory()] == ["step-00000001"]
    assert any(
        f"removing checkpoints that another run left in memory: {old.run_folder.memory.root}" in x
        for x in said(caplog)
    )
    train(tiny(*EACH, *memory.words, "train.steps=9", "checkpoint.resume=never"), until=1)
    assert len(memory()) == 1  # that of the restarted run


@pytest.mark.tier("long")
def test_memory_without_room_ends_the_run_with_one_line(tiny, memory, monkeypatch):
    write = checkpoint_save.write_tensors

    def full(path, *args):
        if "step-00000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *args)

    monkeypatch.setattr(checkpoint_save, "write_tensors", full)
    says = r"cannot write .*step-00000002: .*No space left.*; name another checkpoint\.memory, or"
    with pytest.raises(RunFailed, match=says):
        train(tiny(*EACH, *memory.words, "train.steps=9"))
    assert [path.name for path in memory()] == ["step-00000001"]


# ---- several machines ---------------------------------------------------------------------------


def run_of_a_machine(words, folder, until=None):
    """Train as one of several machines; return its first step, and its memory's files."""
    rank = dist.get_rank()
    memory_module.machine = lambda: f"machine {rank}"
    own = Path(folder, f"memory{rank}")
    own.mkdir(exist_ok=True)
    config = Config.load(None, [*words, f"checkpoint.memory={own}"], environ={})
    began = Trainer(config).step if until is None else 0
    if until is not None:
        train(config, until)
    files = {p.name: names(p) for p in list_checkpoints(next(own.glob("*/*"), own))}
    return began, files


@pytest.mark.tier("wide", long=["parallel.dp_shard=2"])
@pytest.mark.parametrize("mesh", ["parallel.dp_shard=2", "parallel.dp_replicate=2"])
def test_a_lost_machines_parts_come_from_another(mesh, tiny_words, tmp_path):
    words = settled([*tiny_words, *EACH, mesh, "train.steps=9", "checkpoint.replicas=2"])
    where = words, str(tmp_path)
    (_, mine), (_, theirs) = spawn(2, run_of_a_machine, *where, 3)
    assert mine == theirs
    assert mine.keys() == {"step-00000002", "step-00000003"}
    assert {rank_of(file) for file in mine["step-00000003"]} == {None, 0, 1}
    shutil.rmtree(tmp_path / "memory0")
    (began, mine), (other, theirs) = spawn(2, run_of_a_machine, *where)
    assert began == other == 3
    assert mine["step-00000003"] == theirs["step-00000003"]


@pytest.mark.tier("long")
def test_one_machine_of_two_goes_on_alone(tiny_words, tmp_path):
    words = settled([*tiny_words, *EACH, "train.steps=9", "checkpoint.replicas=2"])
    spawn(2, run_of_a_machine, words, str(tmp_path), 3)
    shutil.rmtree(tmp_path / "memory0")
    (tmp_path / "memory1").rename(tmp_path / "memory0")
    ((began, _),) = spawn(1, run_of_a_machine, words, str(tmp_path))
    assert began == 3


@pytest.mark.tier("wide")
def test_machines_without_copies_complete_one_another(tiny_words, tmp_path):
    words = settled([*tiny_words, *EACH, "parallel.dp_shard=2", "train.steps=9"])
    before = [files for _, files in spawn(2, run_of_a_machine, words, str(tmp_path), 2)]
    assert before[0]["step-00000002"] != before[1]["step-00000002"]
    after = spawn(2, run_of_a_machine, words, str(tmp_path))
    assert [began for began, _ in after] == [2, 2]
    whole = sorted({*before[0]["step-00000002"], *before[1]["step-00000002"]})
    assert [files["step-00000002"] for _, files in after] == [whole, whole]
    shutil.rmtree(tmp_path / "memory1")
    assert [began for began, _ in spawn(2, run_of_a_machine, words, str(tmp_path))] == [2, 2]
    shutil.rmtree(tmp_path / "memory1")  # with the fetched parts of the other
    for file in tmp_path.glob("memory0/*/*/*/*-00001-*"):
        file.unlink()
    assert [began for began, _ in spawn(2, run_of_a_machine, words, str(tmp_path))] == [0, 0]


# ---- ranks that hang, machines that go and come -------------------------------------------------


def started(command, log, **more):
    """Start a process in its own session, without the variables of other launchers."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    own |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with log.open("a") as file:
        return subprocess.Popen(
            command, env=own | more, stdout=file, stderr=file, start_new_session=True
        )


def last_step(folder):
    return max((row["step"] for row in read_metrics(folder / "metrics.jsonl")), default=0)


def wait_for(is_so, jobs, seconds=240):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        assert all(job.poll() is None for job in jobs)
        time.sleep(0.02)


def ranks_of(launcher):
    file = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return [int(child) for child in file.read_text().split()] if file.exists() else []


def kill_machine(launcher):
    """Kill a launcher and its ranks, which have their own sessions."""
    for pid in [*ranks_of(launcher), launcher.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.wait()


@pytest.mark.tier("long")
def test_a_rank_that_hangs_is_noticed_and_one_step_is_lost_at_most(tiny_words, tmp_path):
    own = ["launch.nproc=2", "launch.max_restarts=1", "launch.hang_seconds=8", "train.steps=40"]
    memory = f"checkpoint.memory={tmp_path / 'memory'}"
    words = settled([*tiny_words, *EACH, *own, memory])
    log, out = tmp_path / "log", tmp_path / "out"
    run = started([sys.executable, "-m", "moetrain.train", *words], log)
    try:
        wait_for(lambda: last_step(out) > 2, [run])
        hangs = time.monotonic()
        os.kill(ranks_of(run)[1], signal.SIGSTOP)
        wait_for(lambda: "starting again: 1 of 1" in log.read_text(), [run])
        # And five seconds in which ranks may say why they end.
        assert time.monotonic() - hangs < 8 + 8
        assert run.wait(240) == 0
    finally:
        kill_machine(run)
    text = log.read_text()
    assert "failed: rank 0 of 2 has not ended a step for 8 s (launch.hang_seconds)" in text
    assert "failed: rank 1 was stopped by a signal" in text
    assert "moetrain/train/run.py" in text or "train_step" in text  # where it hung
    rows = [row["step"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row]
    assert rows == [*range(1, 41)]
    assert int(re.search(r"resuming from \S*step-(\d+)", text)[1]) >= 2  # three were done


def test_a_run_that_fails_leaves_no_timer_that_would_end_the_program(tiny, monkeypatch):
    running = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: running.append(1))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", running.clear)
    trainer = train(tiny(*QUIET, "launch.hang_seconds=600"), until=2)
    assert trainer.watchdog.seconds == 600
    assert trainer.watchdog._deadline == math.inf
    assert running == []
    trainer.watchdog.restart()
    assert trainer.watchdog._deadline < math.inf
    assert running == [1]
    trainer.watchdog.pause()


@pytest.mark.tier("long")
def test_machines_go_and_come_and_the_loss_is_that_of_the_same_by_hand(tiny_words, tmp_path):
    own = ["train.steps=100000", "optim.schedule=constant", "checkpoint.replicas=2"]
    own += ["launch.hang_seconds=20", "launch.join_timeout=60"]
    words = settled([*tiny_words, *EACH, *own])
    port, out = free_port(), tmp_path / "out"
    logs = [tmp_path / f"log{n}" for n in range(2)]

    def agent(n):
        conf = f"is_host={1 - n},last_call_timeout=4,keep_alive_interval=1"
        how = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9", "--rdzv-backend=c10d"]
        how += [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf}"]
        more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        more["MOETRAIN_CHECKPOINT__MEMORY"] = str(tmp_path / f"memory{n}")
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        return started([*torchrun, *how, "-m", "moetrain.train", *words], logs[n], **more)

    def worlds():
        return re.findall(r" on (\d) x cpu", "".join(log.read_text() for log in logs))

    agents = [agent(0), agent(1)]
    try:
        wait_for(lambda: last_step(out) > 4, agents)
        assert worlds() == ["2"]
        kill_machine(agents[1])
        shutil.rmtree(tmp_path / "memory1")
        wait_for(lambda: worlds() == ["2", "1"], agents[:1])
        alone = last_step(out)
        wait_for(lambda: last_step(out) > alone + 4, agents[:1])
        agents[1] = agent(1)
        wait_for(lambda: sorted(worlds()) == ["1", "2", "2"], agents)
        again = last_step(out)
        wait_for(lambda: last_step(out) > again + 4, agents)
    finally:
        for each in agents:
            kill_machine(each)
    found = losses(out)
    text = "".join(log.read_text() for log in logs)
    shrunk, grown = sorted({int(step) for step in re.findall(r"resuming from \S*step-(\d+)", text)})
    assert list(found) == list(range(1, len(found) + 1))
    hand = settled([*words, "checkpoint.memory_interval=0", "checkpoint.replicas=1"])
    hand = [*hand, "checkpoint.at_end=yes", f"output_dir={tmp_path / 'hand'}"]
    for world, steps in ((2, shrunk), (1, grown), (2, len(found))):
        spawn(world, by_hand, settled([*hand, f"train.steps={steps}"]))
    assert losses(tmp_path / "hand") == found


def by_hand(words):
    Trainer(Config.load(None, words, environ={})).fit()


@pytest.mark.tier("long")
def test_killed_ranks_lose_no_step():
    """This is the short form of scripts/kill_ranks.py."""
    script = Path(__file__).parents[2] / "scripts" / "kill_ranks.py"
    words = ["--kills", "2", "--kinds", "rank", "disk", "--hang_seconds", "30"]
    # The interpreters are fresh, not forked (tests/lib/forked_python.py): forked agents hung here.
    fresh = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, script, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=fresh)
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["kills"] == {"rank": 1, "disk": 1}
    assert row["lost"].keys() <= {"0", "1"}
    assert row["deviation"] < 1e-4
