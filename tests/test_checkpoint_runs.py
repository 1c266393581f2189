"""Runs and their checkpoints: saved behind steps, milestones, damage, restarts, stop signals."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from checkpoints import rewrite, save, save_first_format, tensors_of
from distributed import spawn

from moetrain.checkpoint import list_checkpoints
from moetrain.checkpoint import save as checkpoint_save
from moetrain.config import Config, ConfigError, RunFailed
from moetrain.config_sources import LaunchedPlace
from moetrain.metrics import read_metrics
from moetrain.models import resolve_architecture
from moetrain.parallel.world import join_world
from moetrain.run_folder import BEGUN
from moetrain.trainer import Trainer

QUIET = ["train.sample_tokens=0", "checkpoint.interval=1"]


def names(root):
    return sorted(path.name for path in root.iterdir())


def losses(folder):
    rows = read_metrics(folder / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


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
    """Writes wait until the fixture's event is set, or a moment has passed."""
    write, go = checkpoint_save.write_tensors, threading.Event()

    def slowly(*args):
        go.wait(0.3)
        return write(*args)

    monkeypatch.setattr(checkpoint_save, "write_tensors", slowly)
    return go


def test_what_is_saved_behind_the_steps_is_what_a_step_left(tiny, tmp_path, slow_writes):
    words = [*QUIET, "checkpoint.keep=9", "moe.bias_update_rate=0.1"]
    slow_writes.set()
    Trainer(tiny(*words, f"output_dir={tmp_path / 'a'}")).fit()
    slow_writes.clear()
    trainer = Trainer(tiny(*words, "checkpoint.asynchronous=yes", f"output_dir={tmp_path / 'b'}"))
    busy, step = [], trainer.train_step

    def watched():
        result = step()
        busy.append(trainer.snapshots.saver.is_busy)
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
    assert "earlier ones are as they were" in str(caught.value)
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
    assert names(root) == ["step-00000002", "step-00000003"]  # signals are seen a step later
    assert tensors_of(root / "step-00000003")["rng"].keys() == {"cpu"}


# ---- which are kept -----------------------------------------------------------------------------


def test_milestones_are_kept_for_good(tmp_path, tiny_words):
    for step in range(2, 15, 2):
        save(tmp_path, step, keep=1, keep_every=6)
    assert names(tmp_path) == ["step-00000006", "step-00000012", "step-00000014"]
    for interval in (0, 2):
        words = ["checkpoint.keep_every=5", f"checkpoint.interval={interval}"]
        with pytest.raises(ConfigError, match=r"checkpoint\.keep_every: 5 is no multiple"):
            Config.load(None, [*tiny_words, *words], environ={})


def test_a_run_goes_on_from_a_checkpoint_of_the_first_format(tiny, tmp_path):
    words = [*QUIET, "moe.bias_update_rate=0.1"]
    Trainer(tiny(*words)).fit()
    straight = losses(tmp_path / "out")
    root = tmp_path / "out" / "checkpoints"
    shutil.rmtree(root / "step-00000004")
    rewrite(root / "step-00000003", lambda groups: None, save_first_format)
    assert "model.safetensors" in names(root / "step-00000003")
    trainer = Trainer(tiny(*words))
    assert trainer.step == 3
    trainer.fit()
    assert losses(tmp_path / "out") == straight
    assert "manifest.json" in names(root / "step-00000004")


# ---- damage that only reading finds -------------------------------------------------------------


def flip(folder, group):
    """One bit in the middle of a group's tensors."""
    (file,) = folder.glob(f"{group}-*")
    data = bytearray(file.read_bytes())
    data[-len(data) // 8] ^= 4
    file.write_bytes(data)


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
import moetrain.trainer
from moetrain.train import main

step = moetrain.trainer.Trainer.train_step
rank, restarts = (int(os.environ[n]) for n in ("RANK", "TORCHELASTIC_RESTART_COUNT"))

def killed(trainer):
    result = step(trainer)
    if trainer.step == 4 and restarts == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

moetrain.trainer.Trainer.train_step = killed
sys.exit(main(sys.argv[1:]))
"""
START = (
    "import sys; from moetrain import launch; launch.GRACE_SECONDS = 1.0;"
    "sys.exit(launch.start_ranks(sys.argv[1:], 2, 1))"
)
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]


@pytest.mark.parametrize("launcher", [["-c", START], TORCHRUN], ids=["ours", "torchrun"])
def test_a_killed_rank_starts_the_run_again_from_its_last_checkpoint(
    launcher, tiny, tiny_words, tmp_path
):
    (tmp_path / "killed.py").write_text(KILLED)
    root = tmp_path / "out" / "checkpoints"
    save(root, 9)  # an earlier run's, which the first start puts away
    words = [*tiny_words, *QUIET, "train.steps=6", "checkpoint.resume=never"]
    words += ["launch.max_restarts=1"]
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


def test_a_run_killed_before_its_first_save_begins_again_where_it_did(tiny, tmp_path, monkeypatch):
    first = tmp_path / "first"
    Trainer(tiny(*QUIET, "train.steps=2", f"output_dir={first}")).fit()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / BEGUN).touch()  # all that was left
    place = LaunchedPlace(0, 0, 1, "host:1", None, None, True, restarts=1, max_restarts=3)
    monkeypatch.setattr("moetrain.run.launched_place", lambda: place)
    named = first / "checkpoints" / "step-00000002"
    for step in (2, 3):  # then auto is meant: the run has a checkpoint of its own
        trainer = Trainer(tiny(*QUIET, "train.steps=3", f"checkpoint.resume={named}"))
        assert trainer.step == step
        trainer.fit()


def test_restarts_that_nobody_would_make_are_an_error(tiny, monkeypatch):
    place = LaunchedPlace(0, 0, 2, "host:1", None, None, True, restarts=1, max_restarts=3)
    monkeypatch.setattr("moetrain.parallel.world.launched_place", lambda: place)
    config = tiny("launch.max_restarts=5")
    with pytest.raises(ConfigError, match=r"launch\.max_restarts: 5, .* again 3 times"):
        join_world(config, resolve_architecture(config.model))


def soak(words):
    """The exit code of scripts/soak.py, and its row."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
    import soak  # scripts are no package

    with redirect_stdout(StringIO()) as text:
        code = soak.main(words.split())
    return code, json.loads(text.getvalue())


def test_a_run_that_is_killed_again_and_again_comes_to_the_same_end():
    """The short form of scripts/soak.py: one process, and so the same bits."""
    words = "--seconds 500 --runs 1 --disturbances 2 --steps 30 --patience 1 --seed 1"
    words += " --layouts one --same --kinds launcher stop flip"
    ((code, row),) = spawn(1, soak, words, timeout=550)  # which need not import torch
    assert code == 0, row
    assert (row["runs"], row["steps"], sum(row["disturbances"].values())) == (1, 30, 2)
