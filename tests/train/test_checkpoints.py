"""Runs and their checkpoints: background saves, milestones, damage, restarts, stop signals."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moetrain.checkpoint import save as checkpoint_save
from moetrain.checkpoint.read import list_checkpoints
from moetrain.cli.train import main
from moetrain.config import Config, ConfigError, Recipes
from moetrain.config.environment import LaunchedPlace
from moetrain.config.sources import RunFailed
from moetrain.jobs.scheduler import Service
from moetrain.jobs.session import JobSession
from moetrain.models.hf.load import resolve_architecture
from moetrain.parallel.world import join_world
from moetrain.rl.loop import RlTrainer
from moetrain.train import run_folder
from moetrain.train.callbacks import Callback
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from moetrain.train.run_folder import RUN_FILE
from moetrain.train.session import resolve_run
from tests.lib.checkpointed_runs import losses, names
from tests.lib.checkpoints import save, tensors_of
from tests.lib.command_lines import settled
from tests.lib.distributed import fork_server, spawn
from tests.lib.rl_runs import config_of as rl_config

QUIET = ["train.sample_tokens=0", "checkpoint.interval=1"]


def assert_same_tensors(one, two):
    mine, theirs = tensors_of(one), tensors_of(two)
    assert mine.keys() == theirs.keys()
    for group, tensors in mine.items():
        assert tensors.keys() == theirs[group].keys()
        for name, x in tensors.items():
            assert torch.equal(x, theirs[group][name]), (group, name)


# ---- behind the steps ---------------------------------------------------------------------------


@pytest.fixture
def slow_writes(monkeypatch):
    """Let writes wait until the fixture's event is set, or a moment has passed."""
    write, go = checkpoint_save.write_tensors, threading.Event()

    def slowly(*args):
        go.wait(0.3)
        return write(*args)

    monkeypatch.setattr(checkpoint_save, "write_tensors", slowly)
    return go


@pytest.mark.tier("long")
def test_background_save_holds_the_state_of_its_step(tiny, tmp_path, slow_writes):
    words = [*QUIET, "checkpoint.keep=9", "moe.bias_update_rate=0.1"]
    slow_writes.set()
    Trainer(tiny(*words, f"output_dir={tmp_path / 'a'}")).fit()
    slow_writes.clear()
    trainer = Trainer(tiny(*words, "checkpoint.asynchronous=yes", f"output_dir={tmp_path / 'b'}"))
    busy, step = [], trainer.train_step

    def watched():
        result = step()
        busy.append(trainer.checkpointer.snapshots.under_way is not None)
        return result

    trainer.train_step = watched
    trainer.fit()
    assert busy == [False, True, True, True]  # a step ran while the one before was written
    roots = [tmp_path / name / "checkpoints" for name in "ab"]
    assert names(roots[0]) == names(roots[1]) == [f"step-{n:08d}" for n in range(1, 5)]
    for one, two in zip(*map(list_checkpoints, roots), strict=True):
        assert_same_tensors(one, two)
    rows = read_metrics(tmp_path / "b" / "metrics.jsonl")
    blocked = [row.get("checkpoint_blocked_seconds", 0.0) for row in rows if "loss" in row]
    assert blocked[0] == 0 < min(blocked[1:])  # the first line comes before the first checkpoint


def test_a_write_that_fails_behind_the_steps_ends_the_run_at_the_next(tiny, tmp_path, monkeypatch):
    write, calls = checkpoint_save.write_tensors, []

    def fail_later(path, *args):
        calls.append(path)
        if "step-00000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *args)

    monkeypatch.setattr(checkpoint_save, "write_tensors", fail_later)
    trainer = Trainer(tiny(*QUIET, "train.steps=50", "checkpoint.asynchronous=yes"))
    with pytest.raises(RunFailed, match=r"cannot write .*step-00000002: .*No space left") as caught:
        trainer.fit()
    assert "earlier checkpoints are unchanged" in str(caught.value)
    assert trainer.step < 5
    root = tmp_path / "out" / "checkpoints"
    assert names(root) == ["step-00000001"]
    monkeypatch.undo()
    assert Trainer(tiny(*QUIET)).step == 1


def test_a_stop_waits_for_what_is_being_written(tiny, tmp_path, slow_writes):
    trainer = Trainer(tiny(*QUIET, "train.steps=50", "checkpoint.asynchronous=yes"))
    step = trainer.train_step

    def stop_at_2():
        result = step()
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)  # as batch systems do some time before the end
        return result

    trainer.train_step = stop_at_2
    with pytest.raises(SystemExit) as stopped:
        trainer.fit()
    assert stopped.value.code == 143
    root = tmp_path / "out" / "checkpoints"
    assert names(root) == ["step-00000001", "step-00000002"]  # the third step was given up
    assert tensors_of(root / "step-00000002")["rng"].keys() == {"cpu"}


# ---- which are kept -----------------------------------------------------------------------------


def test_milestones_are_kept_for_good(tmp_path, tiny_words):
    for step in range(2, 15, 2):
        save(tmp_path, step, keep=1, keep_every=6)
    assert names(tmp_path) == ["step-00000006", "step-00000012", "step-00000014"]
    for interval, problem in ((0, "5, but checkpoint.interval 0"), (2, "5 is not a multiple")):
        words = ["checkpoint.keep_every=5", f"checkpoint.interval={interval}"]
        with pytest.raises(ConfigError, match=rf"checkpoint\.keep_every: {problem}"):
            Config.load(None, [*tiny_words, *words], environ={})


# ---- damage that only reading finds -------------------------------------------------------------


def flip(folder, group):
    """Flip one bit in the middle of a group's tensors."""
    (file,) = folder.glob(f"{group}-*")
    data = bytearray(file.read_bytes())
    data[-len(data) // 8] ^= 4
    file.write_bytes(data)


@pytest.mark.tier("long")
@pytest.mark.parametrize("group", ["model", "optim", "rng"])
def test_a_flipped_bit_is_found_and_auto_goes_on_from_the_one_before(group, tiny, tmp_path, caplog):
    words = [*QUIET, "checkpoint.keep=9"]
    Trainer(tiny(*words)).fit()
    straight = losses(tmp_path / "out")
    root = tmp_path / "out" / "checkpoints"
    flip(root / "step-00000004", group)
    flip(root / "step-00000003", "optim")
    named = f"checkpoint.resume={root / 'step-00000004'}"
    with pytest.raises(ConfigError, match=rf"checkpoint\.resume: .*{group}-00000-00.*checksum"):
        Trainer(tiny(*words, named, f"output_dir={tmp_path / 'other'}"))
    trainer = Trainer(tiny(*words))
    assert trainer.step == 2
    assert caplog.text.count("a damaged checkpoint is passed over") == 2
    trainer.fit()
    assert losses(tmp_path / "out") == straight
    assert names(tmp_path / "out" / "earlier-1" / "checkpoints") == [
        "step-00000003",
        "step-00000004",
    ]
    for step in range(1, 5):
        flip(root / f"step-{step:08d}", group)
    with pytest.raises(ConfigError, match=r"every checkpoint .* is damaged"):
        Trainer(tiny(*words))


# ---- killed and started again -------------------------------------------------------------------

KILLED = """
import os, signal, sys
import moetrain.train.loop
from moetrain.cli.train import main

step = moetrain.train.loop.Trainer.train_step
rank, restarts = (int(os.environ[n]) for n in ("RANK", "TORCHELASTIC_RESTART_COUNT"))

def killed(trainer):
    result = step(trainer)
    if trainer.step == 4 and restarts == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

moetrain.train.loop.Trainer.train_step = killed
sys.exit(main(sys.argv[1:]))
"""
START = (
    "import sys; from moetrain.cli import launch; launch._GRACE_SECONDS = 1.0;"
    "sys.exit(launch.start_ranks(sys.argv[1:], 2, 1))"
)
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]


@pytest.mark.tier("wide", long=["torchrun"])
@pytest.mark.parametrize("launcher", [["-c", START], TORCHRUN], ids=["ours", "torchrun"])
def test_a_killed_rank_starts_the_run_again_from_its_last_checkpoint(
    launcher, tiny, tiny_words, tmp_path
):
    (tmp_path / "killed.py").write_text(KILLED)
    root = tmp_path / "out" / "checkpoints"
    save(root, 9)  # an earlier run's, which the first start moves away
    own = ["train.steps=6", "checkpoint.resume=never", "launch.max_restarts=1"]
    words = settled([*tiny_words, *QUIET, *own])
    done = subprocess.run(
        [sys.executable, *launcher, str(tmp_path / "killed.py"), *words],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr
    assert names(root) == ["step-00000005", "step-00000006"]
    assert names(tmp_path / "out" / "earlier-1" / "checkpoints") == ["step-00000009"]
    assert read_metrics(tmp_path / "out" / "metrics.jsonl")[0]["step"] == 1
    Trainer(tiny(*QUIET, "train.steps=6", f"output_dir={tmp_path / 'straight'}")).fit()
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "straight"), rel=1e-5)


@pytest.mark.tier("long")
def test_a_run_killed_before_its_first_save_begins_again_where_it_did(tiny, tmp_path, monkeypatch):
    first = tmp_path / "first"
    Trainer(tiny(*QUIET, "train.steps=2", f"output_dir={first}")).fit()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RUN_FILE).touch()  # nothing else was left
    place = LaunchedPlace(0, 0, 1, "host:1", None, None, True, restarts=1, max_restarts=3)
    monkeypatch.setattr("moetrain.train.run_folder.launched_place", lambda: place)
    named = first / "checkpoints" / "step-00000002"
    for step in (2, 3):  # with "auto" meant, because the run has its own checkpoint
        trainer = Trainer(tiny(*QUIET, "train.steps=3", f"checkpoint.resume={named}"))
        assert trainer.step == step
        trainer.fit()


def test_restarts_that_nobody_would_make_are_an_error(tiny, monkeypatch):
    place = LaunchedPlace(0, 0, 2, "host:1", None, None, True, restarts=1, max_restarts=3)
    monkeypatch.setattr("moetrain.parallel.world.launched_place", lambda: place)
    config = tiny("launch.max_restarts=5")
    with pytest.raises(ConfigError, match=r"launch\.max_restarts: 5, .* at most 3 times"):
        join_world(config, resolve_architecture(config.model))


def soak(words):
    """Return the exit code of scripts/soak.py, and its row."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    import soak  # scripts/ is no package

    with redirect_stdout(StringIO()) as text:
        code = soak.main(words.split())
    return code, json.loads(text.getvalue())


@pytest.mark.tier("wide")
def test_a_run_that_is_killed_again_and_again_comes_to_the_same_end():
    """This is the short form of scripts/soak.py: one process, and so equal bits."""
    words = "--seconds 500 --runs 1 --disturbances 2 --steps 30 --patience 1 --seed 1"
    words += " --layouts one --same --kinds launcher stop flip"
    ((code, row),) = spawn(1, soak, words, timeout=550)  # need not import torch
    assert code == 0, row
    assert (row["runs"], row["steps"], sum(row["disturbances"].values())) == (1, 30, 2)


# ---- machines that do not share output_dir -------------------------------------------------------


def on_a_machine_of_its_own(folder, case):
    """Give every rank its own ``out``, unless ``case`` says otherwise; return all messages."""
    rank = dist.get_rank()
    here = Path(folder) / f"node{rank}"
    here.mkdir()
    os.chdir(here)
    socket.gethostname = lambda: here.name
    run_folder._VISIBLE_SECONDS = 20.0 if case in ("late", "unwritable") else 0.3
    link = threading.Timer(1.0, (here / "out").symlink_to, [Path(folder) / "node0" / "out"])
    if rank and case in ("late", "unwritable"):
        link.start()
    elif rank and case == "empty":
        (here / "out").mkdir()
    if rank and case == "unwritable":
        Path.write_text = fail_to_write
    return here


def fail_to_write(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")


def start_a_run(folder, words, case):
    here = on_a_machine_of_its_own(folder, case)
    config = Config.load(None, [*words, "output_dir=out"], environ={})
    try:
        return Trainer(config).step, names(here)
    except ConfigError as error:
        return str(error), names(here)


def start_a_service(folder, words, case):
    here = on_a_machine_of_its_own(folder, case)
    config = Config.load(None, [*words, "output_dir=out"], environ={}, recipes=Recipes.JOBS)
    try:
        if dist.get_rank():
            JobSession(*resolve_run(config))
        else:
            Service(config)
    except ConfigError as error:
        return str(error), names(here)


@pytest.mark.tier("quick", long=["missing-there is no such folder;-start_a_run"])
@pytest.mark.parametrize("start", [start_a_run, start_a_service])
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("missing", "there is no such folder;"),
        ("empty", "a file that rank 0 writes there is not seen;"),
        ("unwritable", r"it cannot be written to \(Read-only file system\);"),
    ],
)
def test_machines_without_a_shared_folder_are_told_before_the_first_step(
    start, case, says, tiny_words, tmp_path
):
    words = [word for word in tiny_words if not word.startswith("output_dir")]
    found = spawn(2, start, tmp_path, words, case)
    for error, _ in found:
        assert re.match(rf"output_dir: 'out' is not .* on node1 \(rank 1\) {says} choose", error)
        assert "file system that all machines of the run share" in error
    (_, left), (_, its) = found
    assert left == []  # nothing that was made for it
    assert its == ([] if case == "missing" else ["out"])
    assert not list((tmp_path / "node1").glob("out/*"))


def test_a_shared_folder_that_is_seen_late_will_do(tiny_words, tmp_path):
    words = [word for word in tiny_words if not word.startswith("output_dir")]
    assert [step for step, _ in spawn(2, start_a_run, tmp_path, words, "late")] == [0, 0]
    assert not list((tmp_path / "node0" / "out").glob(".rank*"))


class MainOfTwo:
    """The main rank's view of a world in which the other rank has no problem."""

    rank, size, is_main = 0, 2, True

    def __init__(self, folder):
        self.folder, self.seen = folder, None

    def gather(self, mine):
        self.seen = self.seen or names(self.folder)
        return [mine, ("node1", 1, "")]


def test_nobody_looks_for_the_main_ranks_file_before_it_is_there(tmp_path):
    world = MainOfTwo(tmp_path)
    run_folder.RunFolder(tmp_path).check_shared(world)
    assert world.seen == [".rank-0"]
    assert names(tmp_path) == []


def test_a_main_rank_that_can_neither_write_nor_remove_raises_as_the_others_do(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Path, "write_text", fail_to_write)
    monkeypatch.setattr(Path, "unlink", fail_to_write)
    with pytest.raises(ConfigError, match=r"\(rank 0\) it cannot be written to \(Read-only"):
        run_folder.RunFolder(tmp_path).check_shared(MainOfTwo(tmp_path))


def end_of_a_process(rank, port, folder, words):
    """Act as one of two processes, each of which the launcher of its machine has started."""
    run_folder._VISIBLE_SECONDS = 0.3
    place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.chdir(Path(folder) / f"node{rank}")
    sys.stderr = open("error", "w")  # noqa: SIM115 - until this process ends
    sys.exit(main(settled([*words, "output_dir=out"])))


def test_two_processes_without_a_shared_folder_end_alike(tiny_words, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = []
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()
        words = (rank, port, tmp_path, tiny_words)
        started.append(fork_server().Process(target=end_of_a_process, args=words))
        started[-1].start()
    for rank, process in enumerate(started):
        process.join(120)
        error = (tmp_path / f"node{rank}" / "error").read_text()
        assert process.exitcode == 2, error
        assert error.startswith("error: output_dir: 'out' is not one folder for all ranks: on ")
        assert error.count("\n") == 1


# ---- saved by time ------------------------------------------------------------------------------


class Clock:
    """A clock in which every step takes a minute."""

    def __init__(self, monkeypatch, trainer):
        self.now, self.step = 0.0, trainer.train_step
        monkeypatch.setattr("moetrain.train.checkpointer.time", self)
        trainer.train_step = self.train_step
        trainer.checkpointer.saved_time = 0.0

    def train_step(self):
        self.now += 60
        return self.step()

    def monotonic(self):
        return self.now

    perf_counter = monotonic


@pytest.mark.tier("long", quick=["words4-steps4"])
@pytest.mark.parametrize(
    ("words", "steps"),
    [
        # The time is up after step 3, and all ranks know it after the next.
        (["checkpoint.minutes=3"], [4, 8, 12, 13]),
        (["checkpoint.minutes=3", "checkpoint.interval=6"], [4, 6, 10, 12, 13]),
        (["checkpoint.minutes=3", "checkpoint.asynchronous=yes"], [4, 8, 12, 13]),
        (["checkpoint.minutes=1"], [2, 4, 6, 8, 10, 12, 13]),
        (["checkpoint.minutes=0"], [13]),
    ],
)
def test_a_run_is_saved_by_time(words, steps, tiny, tmp_path, monkeypatch):
    keep = ["checkpoint.keep=99", "train.steps=13", "train.sample_tokens=0"]
    trainer = Trainer(tiny(*words, *keep))
    Clock(monkeypatch, trainer)
    trainer.fit()
    assert names(tmp_path / "out" / "checkpoints") == [f"step-{step:08d}" for step in steps]


def test_a_step_that_was_skipped_puts_off_what_time_asks_for(tiny, tmp_path, monkeypatch):
    words = ["checkpoint.minutes=3", "train.steps=7", "train.sample_tokens=0"]
    trainer = Trainer(tiny(*words, "train.max_bad_steps=9", "checkpoint.at_end=no"))
    step = trainer.train_step

    def skip_the_fourth():
        result = step()
        skipped = result.skipped | (trainer.step == 4)
        return result._replace(skipped=skipped)

    trainer.train_step = skip_the_fourth
    Clock(monkeypatch, trainer)
    trainer.fit()
    assert names(tmp_path / "out" / "checkpoints") == ["step-00000005"]


class OwnClock(Callback):
    """Asks for checkpoints at other steps on the first rank than on others."""

    def on_update(self, run):
        late = dist.get_rank() == 0
        if run.step % 5 == 3 if late else run.step % 2 == 0:
            run.ask_to_save()


def saved_by_one_clock(words):
    """Return the saves of a run with different clocks on its ranks."""
    config, saved = Config.load(None, words, environ={}), []
    trainer = Trainer(config, callbacks=[OwnClock()])
    begin = trainer.begin_save
    trainer.begin_save = lambda **how: saved.append(trainer.step) or begin(**how)
    trainer.fit()
    return saved


@pytest.mark.tier("long")
def test_ranks_save_by_the_clock_of_one(tiny_words, tmp_path):
    words = [*tiny_words, "train.steps=10", "train.sample_tokens=0"]
    assert spawn(2, saved_by_one_clock, words, timeout=90) == [[4, 9, 10]] * 2
    assert names(tmp_path / "out" / "checkpoints") == ["step-00000009", "step-00000010"]


def run_slowly(words):
    """Run with slow steps."""
    step = Trainer.train_step
    Trainer.train_step = lambda trainer: time.sleep(0.1) or step(trainer)
    sys.exit(main(settled(words)))


@pytest.mark.tier("long")
def test_a_run_that_is_killed_goes_on_from_what_was_saved_by_time(tiny, tiny_words, tmp_path):
    words = ["train.steps=40", "train.sample_tokens=0", "checkpoint.minutes=0.01"]
    process = fork_server().Process(target=run_slowly, args=([*tiny_words, *words],))
    process.start()
    root, deadline = tmp_path / "out" / "checkpoints", time.monotonic() + 120
    while not list_checkpoints(root):
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    trainer = Trainer(tiny(*words))
    assert 0 < trainer.step < 40
    trainer.fit()
    Trainer(tiny(*words, f"output_dir={tmp_path / 'straight'}")).fit()
    assert losses(tmp_path / "out") == losses(tmp_path / "straight")


def test_reinforcement_learning_is_saved_by_time(tmp_path, monkeypatch):
    values = {"rl.env": "sort", "train.steps": 5, "checkpoint.minutes": 3}
    trainer = RlTrainer(rl_config(tmp_path, **values))
    Clock(monkeypatch, trainer)
    trainer.fit()
    assert names(tmp_path / "checkpoints") == ["step-00000004", "step-00000005"]


def test_a_save_that_fails_first_says_that_there_is_none(tiny, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_save, "write_tensors", fail)
    with pytest.raises(RunFailed, match=r"No space left .*; there is no earlier checkpoint, so"):
        Trainer(tiny("train.sample_tokens=0")).fit()
