"""Checkpoints and their folder: kills at any instant, damage, branches, two runs at once.

Most cases save tiny groups of tensors directly; real (tiny) runs show what a user sees.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from moetrain.checkpoint import save as checkpoint_save
from moetrain.checkpoint.read import list_checkpoints, open_checkpoint
from moetrain.cli.train import main
from moetrain.config import Config, ConfigError, locks
from moetrain.models.hf.load import resolve_architecture
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from moetrain.train.run_folder import RunFolder
from tests.lib.checkpoints import GROUPS, rewrite, save, state_of, tensors_of
from tests.lib.command_lines import settled


def newest(folder):
    """Return step and value that the next run's ``auto`` would find; None if nothing."""
    run = RunFolder(folder)
    with run.claimed():
        found = run.find("auto")
    if found is None:
        return None
    opened = open_checkpoint(found)
    values = {opened.tensors(group)["x"][0].item() for group in GROUPS}
    assert len(values) == 1
    return opened.state["step"], values.pop()


def names(root):
    return sorted(path.name for path in root.iterdir())


# ---- killed at any instant ----------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.fixture
def kill_after(monkeypatch):
    """Return ``kill_after(n)``: this process's n-th and later file operations do not happen."""
    calls = {"left": None}

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # it is slow, and no power fails here

    def guard(owner, name, before=None):
        original = getattr(owner, name)

        def guarded(*args, **kwargs):
            if calls["left"] is not None:
                calls["left"] -= 1
                if calls["left"] < 0:
                    if before is not None and calls["left"] == -1:
                        before(*args)
                    raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, guarded)

    for name in ("mkdir", "rename", "unlink", "rmdir", "fsync"):
        guard(os, name)
    guard(checkpoint_save, "_write_all", lambda file, data: os.write(file, data[: len(data) // 2]))

    def set_left(number):
        calls["left"] = number

    return set_left


CASES = {
    # steps saved before, the step whose save is killed, what auto may find then
    "first": ([], 1, {None, (1, 1.0)}),
    "next": ([1, 2], 3, {(2, 0.0), (3, 1.0)}),
    "same": ([1, 2], 2, {(2, 0.0), (2, 1.0)}),
    "only": ([2], 2, {(2, 0.0), (2, 1.0)}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_save_killed_between_any_two_file_operations_loses_nothing(case, tmp_path, kill_after):
    before, step, allowed = CASES[case]
    seen = set()
    for operation in range(200):
        folder = tmp_path / str(operation)
        root = folder / "checkpoints"
        for earlier in before:
            save(root, earlier)
        kill_after(operation)
        try:
            save(root, step, 1.0)
            killed = False
        except Killed:
            killed = True
        kill_after(None)
        # A reader without the lock finds whole checkpoints too, and nothing else.
        complete = [open_checkpoint(path).state["step"] for path in list_checkpoints(root)]
        assert complete[-1:] == ([step] if step in complete else before[-1:])
        found = newest(folder)
        assert found in allowed, f"killed at operation {operation}"
        seen.add(found)
        hidden = [name for name in (names(root) if root.exists() else []) if name[0] == "."]
        assert hidden == [], f"killed at operation {operation}"
        for value in (2.0, 3.0):  # later saves of the same step work
            save(root, step, value)
            assert newest(folder) == (step, value)
        assert names(root) == [path.name for path in list_checkpoints(root)]
        if not killed:
            break
    assert operation > 10
    assert seen == allowed  # it was killed before and after the decisive operation


@pytest.mark.tier("wide")
def test_a_failing_disk_leaves_the_good_checkpoint_and_one_line(tiny, tiny_words, tmp_path):
    words = ["train.steps=2", "train.sample_tokens=0"]
    Trainer(tiny(*words)).fit()
    root = tmp_path / "out" / "checkpoints"
    limited = (
        "import resource, sys; from moetrain.cli.train import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000)); sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, *settled([*tiny_words, *words, "train.steps=4"])],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 1, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"failed: cannot write the checkpoint {root / 'step-00000004'}: ")
    assert "File too large" in line
    assert "Traceback" not in done.stderr
    assert names(root) == ["step-00000002"]
    assert Trainer(tiny(*words)).step == 2


# ---- damage -------------------------------------------------------------------------------------


def damage_state(**changes):
    def damage(folder):
        (folder / "state.json").write_text(json.dumps(state_of(2) | changes))

    return damage


def file_of(folder, group):
    (found,) = folder.glob(f"{group}*.safetensors")
    return found


DAMAGES = {
    "cut weights": lambda f: os.truncate(
        file_of(f, "model"), file_of(f, "model").stat().st_size - 1
    ),
    "no optimizer": lambda f: file_of(f, "optim").unlink(),
    "empty file": lambda f: file_of(f, "rng").write_bytes(b""),
    "not a header": lambda f: file_of(f, "rng").write_bytes(b"{" * 40),
    "no state": lambda f: (f / "state.json").unlink(),
    "cut state": lambda f: (f / "state.json").write_text('{"step": 2'),
    "not UTF-8": lambda f: (f / "state.json").write_bytes(b"\xff\xfe"),
    "deep state": lambda f: (f / "state.json").write_text("[" * 100_000),
    "a list": lambda f: (f / "state.json").write_text("[]"),
    "huge": lambda f: (f / "state.json").write_text('{"step": ' + "9" * 5000 + "}"),
    "step": damage_state(step="two"),
    "step of another": damage_state(step=10**30),
    "true": damage_state(step=True),
    "negative": damage_state(tokens=-1),
    "fraction": damage_state(sample_index=1.5),
    "architecture": damage_state(architecture=None),
    "config": damage_state(config=[]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_auto_passes_over_a_damaged_checkpoint_and_says_so(name, tmp_path, caplog):
    root = tmp_path / "checkpoints"
    save(root, 1)
    damaged = save(root, 2)
    DAMAGES[name](damaged)
    assert newest(tmp_path) == (1, 0.0)
    assert "damaged checkpoint is passed over" in caplog.text
    assert str(damaged) in caplog.text
    with pytest.raises(ConfigError, match=r"checkpoint\.resume: ") as caught:
        RunFolder(tmp_path).find(str(damaged))
    assert str(damaged) in caught.value.problem
    assert len(caught.value.problem.splitlines()) == 1
    # Later saves neither count nor remove it.
    for step in (3, 4, 5):
        save(root, step)
    assert [path.name for path in list_checkpoints(root)] == [
        "step-00000002",
        "step-00000004",
        "step-00000005",
    ]


def test_where_all_are_damaged_nothing_starts_afresh(tmp_path):
    for step in (1, 2):
        DAMAGES["cut state"](save(tmp_path / "checkpoints", step))
    with pytest.raises(ConfigError, match=r"every checkpoint .*step-00000002.*step-00000001"):
        newest(tmp_path)


@pytest.mark.tier("long")
def test_a_run_goes_on_past_a_damaged_checkpoint_and_keeps_it(tiny, caplog):
    fit(tiny("checkpoint.interval=2", "train.steps=4"))
    root = Path(tiny().output_dir) / "checkpoints"
    weights = file_of(root / "step-00000004", "model")
    weights.write_bytes(weights.read_bytes()[:100])
    trainer = fit(tiny("train.steps=6"))
    assert weights.name in caplog.text
    assert names(root) == ["step-00000002", "step-00000006"]
    assert names(root.parent / "earlier-1" / "checkpoints") == ["step-00000004"]
    assert [row["step"] for row in read_metrics(trainer.reporter.log.path) if "loss" in row] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def drop(name):
    return lambda tensors: tensors.pop(name)


def change(name, make):
    return lambda tensors: tensors.update({name: make(tensors[name])})


@pytest.mark.parametrize(
    ("group", "edit", "named"),
    [
        ("model", change("norm.weight", lambda x: x[:1]), "norm.weight"),  # a copy would broadcast
        ("model", change("norm.weight", lambda x: x.long()), "int64"),
        ("optim", change("norm.weight.exp_avg", lambda x: x[:1]), r"exp_avg"),
        ("optim", change("norm.weight.exp_avg_sq", lambda x: x.sum()), r"exp_avg_sq"),
        ("optim", change("norm.weight.exp_avg", lambda x: x.bfloat16()), "bfloat16 .*; set optim"),
        ("optim", change("norm.weight.step", lambda x: x[None]), "step"),
        ("optim", drop("norm.weight.exp_avg"), "exp_avg"),
        ("optim", change("norm.weight.exp_avg", lambda x: torch.cat([x, x])), r"\[32\]"),
        ("rng", drop("cpu"), "random"),
        ("rng", change("cpu", lambda x: x[:10]), "random"),
        ("rng", change("cpu", lambda x: x.float()), "random"),
    ],
)
def test_tensors_of_another_shape_or_type_are_refused(group, edit, named, tiny):
    config = tiny("train.steps=1", "train.sample_tokens=0")
    trainer = fit(config)
    rewrite(trainer.folder / "checkpoints" / "step-00000001", lambda found: edit(found[group]))
    with pytest.raises(ConfigError, match=named) as caught:
        Trainer(config)
    assert caught.value.field == "checkpoint.resume"


# ---- branches -----------------------------------------------------------------------------------


def fit(config):
    trainer = Trainer(config)
    trainer.fit()
    return trainer


@pytest.mark.tier("long")
def test_a_run_from_an_older_checkpoint_keeps_both_branches(tiny):
    every = ["checkpoint.interval=2", "train.sample_tokens=0"]
    first = fit(tiny(*every, "train.steps=6", "checkpoint.keep=3"))
    root = first.folder / "checkpoints"
    older = f"checkpoint.resume={root / 'step-00000002'}"
    fit(tiny(*every, older, "train.steps=4", "optim.lr=1e-5"))
    assert names(root) == ["step-00000002", "step-00000004"]
    again = Trainer(tiny("train.steps=4"))  # auto: the new branch
    new = tensors_of(root / "step-00000004")["model"]
    assert again.step == 4
    assert torch.equal(again.model.norm.weight.to_local(), new["norm.weight"])
    earlier = first.folder / "earlier-1"
    assert names(earlier / "checkpoints") == ["step-00000004", "step-00000006"]
    old = tensors_of(earlier / "checkpoints" / "step-00000004")["model"]
    assert not torch.equal(old["norm.weight"], new["norm.weight"])
    assert read_metrics(earlier / "metrics.jsonl")[-1]["step"] == 6
    assert read_metrics(first.reporter.log.path)[-1]["step"] == 4


@pytest.mark.tier("long")
def test_a_run_from_another_folders_checkpoint_keeps_what_it_saves(tiny, tmp_path):
    quiet = ["checkpoint.interval=1", "checkpoint.keep=1", "train.sample_tokens=0"]
    fit(tiny(*quiet, "train.steps=2", f"output_dir={tmp_path / 'source'}"))
    source = tmp_path / "source" / "checkpoints" / "step-00000002"
    fit(tiny(*quiet, "train.steps=6"))  # an unrelated run, further on
    fit(tiny(*quiet, "train.steps=3", f"checkpoint.resume={source}"))
    root = tmp_path / "out" / "checkpoints"
    assert names(root) == ["step-00000003"]
    assert Trainer(tiny("train.steps=9")).step == 3
    assert names(tmp_path / "out" / "earlier-1" / "checkpoints") == ["step-00000006"]
    assert names(source.parent) == ["step-00000002"]


def test_failed_runs_are_no_checkpoints_to_go_on_from(tmp_path):
    root = tmp_path / "checkpoints"
    for step in (1, 2):
        save(root, step)
    for step in (5, 3):
        save(root, step, failed=True)
    assert newest(tmp_path) == (2, 0.0)
    assert names(root) == ["failed-step-00000003", "step-00000001", "step-00000002"]
    save(root, 3)  # these are counted separately
    assert names(root) == ["failed-step-00000003", "step-00000002", "step-00000003"]
    marked = str(root / "failed-step-00000003")
    assert RunFolder(tmp_path).find(marked) == Path(marked)


# ---- two runs -----------------------------------------------------------------------------------


@pytest.mark.tier("wide")
def test_a_second_run_is_refused_and_told_of_the_first(tiny_words, tmp_path, capsys):
    words = settled([*tiny_words, "train.steps=100000"])
    with subprocess.Popen(
        [sys.executable, "-m", "moetrain.train", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as first:
        deadline = time.monotonic() + 60
        while not read_metrics(tmp_path / "out" / "metrics.jsonl"):
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        before = set((tmp_path / "out").iterdir())
        assert main(settled([*words, "checkpoint.resume=never", "data.path=nowhere"])) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: output_dir: ")
        assert f"process {first.pid} on " in error
        assert set((tmp_path / "out").iterdir()) == before
        first.kill()
    assert Trainer(Config.load(None, words, environ={})).step == 0  # the lock was released


@pytest.mark.tier("wide")
def test_a_trainer_holds_its_folder_while_it_builds_and_fits_alone(tiny, tmp_path):
    first, second = Trainer(tiny()), Trainer(tiny())  # one after the other, as in a notebook
    step, code = first.train_step, "import sys; from moetrain.train.run_folder import *;"
    code += "RunFolder(Path(sys.argv[1])).claimed().__enter__()"
    refused = []

    def try_another():
        command = [sys.executable, "-c", code, str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        refused.append("ConfigError: output_dir: " in done.stderr)
        first.train_step = step
        return step()

    first.train_step = try_another
    first.fit()
    assert refused == [True]
    second.fit()  # the first does not hold it any more


def test_a_run_holds_its_folder_while_it_trains_and_no_longer(tiny, tmp_path, monkeypatch):
    trainer, folder = Trainer(tiny("train.steps=1", "train.sample_tokens=0")), tmp_path / "out"
    step = trainer.train_step

    def try_another():
        refusal = pytest.raises(ConfigError, match="is being written by another run")
        with refusal, RunFolder(folder).claimed():
            pass
        return step()

    monkeypatch.setattr(trainer, "train_step", Mock(side_effect=try_another))
    trainer.fit()
    assert trainer.train_step.call_count == 1
    with RunFolder(folder).claimed():
        assert names(folder / "checkpoints") == ["step-00000001"]


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, caplog):
    def refuse(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    save(tmp_path / "checkpoints", 1)
    half = tmp_path / "checkpoints" / ".step-00000002.1"
    half.mkdir()
    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    assert newest(tmp_path) == (1, 0.0)
    assert "nothing keeps a second run out" in caplog.text
    assert half.exists()  # it may belong to a live process


LOADING = """
import sys, time
import moetrain.train.loop
from moetrain.cli.train import main

def build_data(*args):
    open(sys.argv[1], "w").close()
    time.sleep(600)

moetrain.train.loop.build_data = build_data
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.tier("wide", long=["1"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_while_loading_is_one_line(ranks, tiny_words, tmp_path):
    (tmp_path / "loading.py").write_text(LOADING)
    words = [str(tmp_path / "loading.py"), str(tmp_path / "reached"), *tiny_words]
    start = "import sys; from moetrain.cli.launch import *; "
    start += f"sys.exit(start_ranks(sys.argv[1:], {ranks}))"
    with subprocess.Popen(
        [sys.executable, *(["-c", start] if ranks > 1 else []), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "reached").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)  # one rank works, and one waits for it
        try:
            _, error = process.communicate(timeout=90)
        finally:
            process.kill()
    assert (process.returncode, error) == (130, "interrupted\n")


def test_a_checkpoint_that_goes_while_room_is_looked_for(tiny, monkeypatch):
    """Another run may remove a checkpoint meanwhile, and a file may be a broken link."""
    config = tiny()
    root = Path(config.output_dir) / "checkpoints"
    for step in (1, 2):
        save(root, step)
    optim = file_of(root / "step-00000002", "optim")
    optim.unlink()
    optim.symlink_to("nowhere")
    before = os.lstat

    def remove_first(path, *args, **kwargs):
        if "step-" in str(path):
            shutil.rmtree(root / "step-00000001", ignore_errors=True)
        return before(path, *args, **kwargs)

    monkeypatch.setattr(os, "lstat", remove_first)
    arch = resolve_architecture(config.model)
    RunFolder(Path(config.output_dir)).check_room(config, arch, 1.0)
    assert not (root / "step-00000001").exists()
