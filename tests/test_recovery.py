"""Runs that die and go on: from machines' memory, from other machines' copies, with fewer of them.

Machines are processes here, each with a folder of its own for its memory.
"""

import errno
import re
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoints import tensors_of
from command_lines import settled
from distributed import spawn
from test_checkpoint_runs import losses, names

from moetrain.checkpoint import memory as memory_module
from moetrain.checkpoint import save as checkpoint_save
from moetrain.checkpoint.read import list_checkpoints
from moetrain.config import Config
from moetrain.config.sources import RunFailed
from moetrain.train.metrics import read_metrics
from moetrain.train.trainer import Trainer

QUIET = ["train.sample_tokens=0", "checkpoint.minutes=0", "checkpoint.at_end=no"]
EACH = [*QUIET, "checkpoint.memory_interval=1"]


class PowerCut(Exception):
    """Ends a run in the middle, and leaves what a killed one does."""


def train(config, until=None):
    """Train, cut off once step ``until`` is done; return the trainer."""
    trainer = Trainer(config)
    after = trainer.after_step

    def watched(result):
        after(result)
        trainer.snapshots.wait()
        if trainer.step == until:
            raise PowerCut

    trainer.after_step = watched
    try:
        trainer.fit()
    except PowerCut:
        trainer.log and trainer.log.close()
    return trainer


@pytest.fixture
def memory(tmp_path):
    """The words for a folder of memory, and what lies there."""
    (tmp_path / "memory").mkdir()

    def there():
        return sorted(p.relative_to(tmp_path / "memory") for p in tmp_path.glob("memory/*/*/*"))

    there.words = [f"checkpoint.memory={tmp_path / 'memory'}"]
    return there


def said(caplog):
    return [record.getMessage() for record in caplog.records]


def test_a_run_that_dies_goes_on_from_memory_and_loses_no_step(tiny, memory, tmp_path):
    first = train(tiny(*EACH, *memory.words, "train.steps=6"), until=4)
    kept = [f"step-0000000{n}" for n in (3, 4)]
    assert [path.name for path in memory()] == kept
    assert not (tmp_path / "out" / "checkpoints").exists()  # nothing is on the disk
    second = Trainer(tiny(*EACH, *memory.words, "train.steps=6"))
    assert second.step == first.step == 4
    second.fit()
    assert second.continues == second.run_folder.memory.root / "step-00000004"
    assert not list((tmp_path / "memory").iterdir())  # the run is over
    train(tiny(*QUIET, "train.steps=6", f"output_dir={tmp_path / 'straight'}"))
    assert losses(tmp_path / "out") == losses(tmp_path / "straight")
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, 7)]


def test_memory_and_disk_hold_the_same_and_the_newer_one_is_resumed(tiny, memory, tmp_path):
    words = [*EACH, *memory.words, "train.steps=9", "checkpoint.interval=3"]
    train(tiny(*words), until=3)
    train(tiny(*words), until=5)
    disk = tmp_path / "out" / "checkpoints"
    assert names(disk) == ["step-00000003"]  # which needs none in memory
    assert [path.name for path in memory()] == ["step-00000004", "step-00000005"]
    train(tiny(*words), until=6)
    assert Trainer(tiny(*words)).continues == disk / "step-00000006"
    shutil.rmtree(disk / "step-00000006")
    newest = Trainer(tiny(*words))
    assert newest.step == 5
    assert newest.continues.parent == newest.run_folder.memory.root
    twin = tiny(*QUIET, "train.steps=9", "checkpoint.interval=5", f"output_dir={tmp_path / 'b'}")
    train(twin, until=5)
    mine, theirs = (
        tensors_of(newest.continues),
        tensors_of(tmp_path / "b/checkpoints/step-00000005"),
    )
    assert mine.keys() == theirs.keys()
    for group, tensors in mine.items():
        assert all((theirs[group][name] == x).all() for name, x in tensors.items())


def test_a_run_that_stands_in_memory_alone_is_written_to_the_disk_at_its_end(tiny, memory):
    words = [w for w in EACH if "at_end" not in w]
    train(tiny(*words, *memory.words, "train.steps=3"), until=3)
    trainer = Trainer(tiny(*words, *memory.words, "train.steps=3"))
    assert (trainer.step, trainer.saved_at) == (3, -1)
    assert trainer.fit().checkpoint.name == "step-00000003"
    assert names(trainer.run_folder.checkpoints) == ["step-00000003"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


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
    (line,) = (text for text in said(caplog) if "step 3 in memory is passed over" in text)
    assert "no machine has model-00000-00.safetensors (1 of 5 files are lost)" in line


def test_memory_of_another_run_is_passed_over(tiny, memory, tmp_path, caplog):
    words = tiny(*EACH, *memory.words, "train.steps=9")
    old = train(words, until=2)
    shutil.rmtree(tmp_path / "out")
    new = train(words, until=1)
    assert new.run_folder.memory.root != old.run_folder.memory.root
    assert [path.name for path in memory()] == ["step-00000001"]
    assert any(
        f"memory of another run is passed over: {old.run_folder.memory.root}" in x
        for x in said(caplog)
    )
    train(tiny(*EACH, *memory.words, "train.steps=9", "checkpoint.resume=never"), until=1)
    assert len(memory()) == 1  # that of the run that began anew


def test_memory_without_room_ends_the_run_with_one_line(tiny, memory, monkeypatch):
    write = checkpoint_save.write_tensors

    def full(path, *args):
        if "step-00000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *args)

    monkeypatch.setattr(checkpoint_save, "write_tensors", full)
    with pytest.raises(RunFailed, match=r"cannot write .*step-00000002: .*No space left"):
        train(tiny(*EACH, *memory.words, "train.steps=9"))
    assert [path.name for path in memory()] == ["step-00000001"]


# ---- several machines ---------------------------------------------------------------------------


def run_of_a_machine(words, folder, until=None):
    """Train as one of several machines; return the step it began at, and its memory's files."""
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


def rank_of(file):
    found = re.search(r"-(\d{5})-", file)
    return found and int(found[1])


def test_one_machine_of_two_goes_on_alone(tiny_words, tmp_path):
    words = settled([*tiny_words, *EACH, "train.steps=9", "checkpoint.replicas=2"])
    spawn(2, run_of_a_machine, words, str(tmp_path), 3)
    shutil.rmtree(tmp_path / "memory0")
    (tmp_path / "memory1").rename(tmp_path / "memory0")
    ((began, _),) = spawn(1, run_of_a_machine, words, str(tmp_path))
    assert began == 3


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
    shutil.rmtree(tmp_path / "memory1")  # and what the other had fetched
    for file in tmp_path.glob("memory0/*/*/*/*-00001-*"):
        file.unlink()
    assert [began for began, _ in spawn(2, run_of_a_machine, words, str(tmp_path))] == [0, 0]
