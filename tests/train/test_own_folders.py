"""Machines with an ``output_dir`` of their own (``checkpoint.shared no``).

Machines are processes here, distinguished by their folders.
"""

import errno
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from moetrain.checkpoint.read import MANIFEST, list_checkpoints, open_checkpoint
from moetrain.cli.train import main
from moetrain.config import CheckpointSection, Config, ConfigError
from moetrain.config.sources import RunFailed
from moetrain.models.hf.load import resolve_architecture
from moetrain.models.hf.save import Export
from moetrain.train import run_folder
from moetrain.train.loop import Trainer
from moetrain.train.state import ModelState
from tests.lib.checkpointed_runs import losses, names
from tests.lib.command_lines import settled
from tests.lib.distributed import spawn
from tests.lib.recoveries import rank_of, train

WORDS = [
    "train.sample_tokens=0",
    "optim.schedule=constant",
    "checkpoint.minutes=0",
    "checkpoint.at_end=no",
    "checkpoint.interval=1",
    "checkpoint.shared=no",
]
STEPS = "train.steps=9"
TWO = "checkpoint.replicas=2"
SHARDED = "parallel.dp_shard=2"


def run_of_a_machine(words, folder, until=None, ends=False, half=""):
    """Be one of several machines; return its first step, or the error, and its files.

    ``MACHINE`` in a word is its number. A fetched file named ``half`` is written only by half.
    """
    write = os.write

    def write_half(file, data):
        if half and half in os.readlink(f"/proc/self/fd/{file}"):
            write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    os.write = write_half
    own = Path(folder, f"out{dist.get_rank()}")
    words = [word.replace("MACHINE", str(dist.get_rank())) for word in words]
    config = Config.load(None, [*words, f"output_dir={own}"], environ={})
    began: object = None
    try:
        if until is None:
            trainer = Trainer(config)
            began = trainer.step
            if ends:
                trainer.fit()
        else:
            began = train(config, until).step
    except (ConfigError, RunFailed) as error:
        began = str(error)
    return began, {p.name: names(p) for p in list_checkpoints(own / "checkpoints")}


@pytest.fixture
def two(tiny_words, tmp_path):
    """Return ``two(WORD, ..., until=STEP)``, which runs two machines."""

    def run(*words, until=None, ends=False, half=""):
        own = settled([*tiny_words, *WORDS, STEPS, *words])
        return spawn(2, run_of_a_machine, own, str(tmp_path), until, ends, half)

    return run


def paths(tmp_path, step):
    return [tmp_path / f"out{n}" / "checkpoints" / f"step-{step:08d}" for n in range(2)]


def damage(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.tier("long")
def test_each_machine_has_its_part_and_a_run_goes_on_from_both(two, tmp_path):
    (_, mine), (_, theirs) = two(SHARDED, until=3)
    assert mine.keys() == theirs.keys() == {"step-00000002", "step-00000003"}  # checkpoint.keep
    assert {rank_of(file) for file in mine["step-00000003"]} == {None, 0}
    assert {rank_of(file) for file in theirs["step-00000003"]} == {None, 1}
    assert {*names(tmp_path / "out0")} > {"metrics.jsonl", "config.json"}
    assert names(tmp_path / "out1") == [".lock", ".run", "checkpoints"]
    ran = two(SHARDED, "train.steps=5", ends=True)
    assert [began for began, _ in ran] == [3, 3]
    straight = two(SHARDED, "train.steps=5", "checkpoint.resume=never", ends=True)
    assert [began for began, _ in straight] == [0, 0]
    found = losses(tmp_path / "out0" / "earlier-1")
    assert found == losses(tmp_path / "out0")
    assert list(found) == [1, 2, 3, 4, 5]
    assert names(tmp_path / "out1" / "earlier-1" / "checkpoints") == [
        "step-00000004",
        "step-00000005",
    ]


@pytest.mark.tier("wide", long=["0"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_machines_parts_come_from_another(lost, two, tmp_path):
    (_, mine), (_, theirs) = two(SHARDED, TWO, until=3)
    assert mine == theirs
    shutil.rmtree(tmp_path / f"out{lost}")
    (began, mine), (other, theirs) = two(SHARDED, TWO)
    assert began == other == 3
    assert mine["step-00000003"] == theirs["step-00000003"]
    for path in paths(tmp_path, 3):
        open_checkpoint(path)
    two(SHARDED, TWO, until=5)  # and the machine is one of the run's again
    shutil.rmtree(tmp_path / f"out{1 - lost}")
    assert [began for began, _ in two(SHARDED, TWO)] == [5, 5]


@pytest.mark.tier("long")
def test_without_copies_a_lost_machine_is_one_line_and_nothing_begins_anew(two, tmp_path):
    two(SHARDED, until=3)
    shutil.rmtree(tmp_path / "out1")
    for error, _ in two(SHARDED):
        assert error.startswith("checkpoint.resume: every checkpoint in ")
        assert "step-00000003: no machine has model-00001-00.safetensors" in error
        assert "checkpoint.replicas 2" in error
        assert "never" in error
    assert names(tmp_path / "out0" / "checkpoints") == ["step-00000002", "step-00000003"]
    assert [began for began, _ in two(SHARDED, "checkpoint.resume=never")] == [0, 0]


@pytest.mark.tier("long")
def test_replicas_of_data_need_no_copies(two, tmp_path):
    """Each rank of a replica writes a share; parts that only one machine has are lost with it."""
    two("parallel.dp_replicate=2", TWO, until=2)
    shutil.rmtree(tmp_path / "out0")
    assert [began for began, _ in two("parallel.dp_replicate=2", TWO)] == [2, 2]


@pytest.mark.tier("wide")
def test_damaged_part_is_repaired_from_a_copy_or_skipped(two, tmp_path):
    two(SHARDED, TWO, until=3)
    mine, theirs = paths(tmp_path, 3)
    for name in (MANIFEST, "model-00000-00.safetensors"):
        whole = (mine / name).read_bytes()
        (mine / name).write_bytes(whole[:-1])
        assert [began for began, _ in two(SHARDED, TWO)] == [3, 3]
        assert (mine / name).read_bytes() == whole
    for path in (mine, theirs):
        (path / "model-00000-00.safetensors").unlink()
    assert [began for began, _ in two(SHARDED, TWO)] == [2, 2]
    assert mine.exists()  # until a run resumes
    assert theirs.exists()


@pytest.mark.tier("long")
def test_a_fetch_that_ends_half_way_costs_nothing(two, tmp_path):
    two(SHARDED, until=3)
    for error, _ in two(SHARDED, half="model-"):
        assert re.match(r"cannot fetch .*step-00000003: .*No space left.* \(output_dir or", error)
    assert [began for began, _ in two(SHARDED)] == [3, 3]


@pytest.mark.tier("long")
def test_a_byte_that_has_changed_is_passed_over_by_all(two, tmp_path):
    two(SHARDED, until=3)
    damage(paths(tmp_path, 3)[1] / "model-00001-00.safetensors")
    assert [began for began, _ in two(SHARDED)] == [2, 2]


@pytest.mark.tier("wide")
def test_a_step_of_which_machines_have_different_ones_is_passed_over(two, tmp_path):
    two(SHARDED, until=3)
    kept = tmp_path / "kept"
    shutil.copytree(paths(tmp_path, 3)[1], kept)
    two(SHARDED, "train.seed=5", "checkpoint.resume=never", until=3)
    shutil.rmtree(paths(tmp_path, 3)[1])
    kept.rename(paths(tmp_path, 3)[1])
    assert [began for began, _ in two(SHARDED, "train.seed=5")] == [2, 2]


@pytest.mark.tier("wide")
def test_machines_with_different_runs_are_told(two, tmp_path):
    two(SHARDED, until=2)
    (tmp_path / "out1").rename(tmp_path / "kept")
    two(SHARDED, "checkpoint.resume=never", until=2)
    shutil.rmtree(tmp_path / "out1")
    (tmp_path / "kept").rename(tmp_path / "out1")
    for error, _ in two(SHARDED):
        assert re.match(r"output_dir: '.*' is of one run on .* and of another on .*move", error)
    assert [began for began, _ in two(SHARDED, "checkpoint.resume=never", until=1)] == [1, 1]
    assert [began for began, _ in two(SHARDED)] == [1, 1]


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("other", ["a1", "b2", ""])
def test_machines_with_folders_of_different_runs_are_told_unless_none_is_resumed(
    other, resume, tmp_path, monkeypatch
):
    """The first of two machines looks; the second's answers are given. It may be new."""
    (tmp_path / run_folder.RUN_FILE).write_text("a1")
    monkeypatch.setattr(dist, "new_group", lambda **settings: Mock(spec=dist.ProcessGroup))
    theirs = iter(["another place", 0, (other, "", True, "the second")])
    world = SimpleNamespace(rank=0, gather=lambda mine: [mine, next(theirs)])
    folder = run_folder.RunFolder(tmp_path, world, CheckpointSection(shared=False))
    if (other, resume) == ("b2", "auto"):
        with pytest.raises(ConfigError, match=r"output_dir: .* and of another on the second; move"):
            folder.resume_now(resume, world)
    else:
        assert folder.resume_now(resume, world) == resume


@pytest.mark.tier("long")
def test_an_own_earlier_step_can_be_named(two, tmp_path):
    two(SHARDED, until=3)
    named = f"checkpoint.resume={paths(tmp_path, 2)[0]}"
    ((began, mine), (other, theirs)) = two(SHARDED, named, until=3)
    assert (began, other) == (3, 3)
    assert mine.keys() == theirs.keys() == {"step-00000002", "step-00000003"}
    for n in range(2):  # both have moved later checkpoints
        assert names(tmp_path / f"out{n}" / "earlier-1" / "checkpoints") == ["step-00000003"]
    for path in paths(tmp_path, 2):
        (path / "model-00001-00.safetensors").unlink()
    for error, _ in two(SHARDED, named):
        assert re.match(r"checkpoint\.resume: step-00000002 in .* is damaged or incomplete", error)


@pytest.mark.tier("wide", long=["0"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_store_brings_back_what_no_machine_has(lost, two, tmp_path):
    store = f"checkpoint.store=file://{tmp_path / 'store'}"
    two(SHARDED, store, until=3)
    assert names(tmp_path / "store") == ["step-00000002", "step-00000003"]
    ranks = {rank_of(file) for file in names(tmp_path / "store" / "step-00000003")}
    assert ranks == {None, 0, 1}
    open_checkpoint(tmp_path / "store" / "step-00000003")
    shutil.rmtree(tmp_path / f"out{lost}")
    (began, mine), (other, theirs) = two(SHARDED, store)
    assert began == other == 3
    assert mine["step-00000003"] == theirs["step-00000003"]


def export_of_a_machine(words, folder):
    """Train and export in small files, so that each rank would have some to write."""
    ModelState.save_hf.__kwdefaults__["max_shard_bytes"] = 10_000
    own = Path(folder, f"out{dist.get_rank()}")
    Trainer(Config.load(None, [*words, f"output_dir={own}"], environ={})).fit()
    return names(own / "hf") if (own / "hf").exists() else None


@pytest.mark.tier("long")
def test_the_first_machine_has_the_export(tiny_words, tmp_path):
    words = [
        *tiny_words,
        *WORDS,
        SHARDED,
        "train.steps=1",
        "checkpoint.save_hf=yes",
        "optim.lr=1e-9",
    ]
    files, none = spawn(2, export_of_a_machine, settled(words), str(tmp_path))
    assert none is None
    shared = settled([*words, "checkpoint.shared=yes", f"output_dir={tmp_path / 'both'}"])
    ModelState.save_hf.__kwdefaults__["max_shard_bytes"] = 10_000
    try:
        Trainer(Config.load(None, [*shared, "parallel.dp_shard=1"])).fit()
    finally:
        ModelState.save_hf.__kwdefaults__["max_shard_bytes"] = Export.SHARD_BYTES
    assert files == names(tmp_path / "both" / "hf")
    assert sum(name.endswith(".safetensors") for name in files) > 2
    for name in files:
        if name.endswith(".safetensors"):
            mine, alone = (load_file(tmp_path / one / "hf" / name) for one in ("out0", "both"))
            assert mine.keys() == alone.keys()
            for key, x in mine.items():
                assert torch.allclose(x, alone[key], atol=1e-5)


@pytest.mark.tier("wide")
def test_memory_and_own_folders_go_together(two, tmp_path):
    """A machine that is lost takes its memory with it; a step that is in no memory is on disks."""
    memories = [tmp_path / f"memory{number}" for number in range(2)]
    for memory in memories:
        memory.mkdir()
    words = ["checkpoint.memory_interval=1", f"checkpoint.memory={tmp_path}/memoryMACHINE"]
    words += ["checkpoint.interval=2", TWO, SHARDED]
    two(*words, until=3)
    for lost in (tmp_path / "out0", *memories[0].iterdir()):
        shutil.rmtree(lost)
    assert [began for began, _ in two(*words)] == [3, 3]
    for lost in (path for memory in memories for path in memory.iterdir()):
        shutil.rmtree(lost)
    assert [began for began, _ in two(*words)] == [2, 2]


@pytest.mark.tier("long")
def test_one_machine_of_two_goes_on_alone(tiny_words, tmp_path):
    words = settled([*tiny_words, *WORDS, STEPS, TWO])
    spawn(2, run_of_a_machine, words, str(tmp_path), 3)
    shutil.rmtree(tmp_path / "out0")
    (tmp_path / "out1").rename(tmp_path / "out0")
    ((began, _),) = spawn(1, run_of_a_machine, words, str(tmp_path))
    assert began == 3


def test_own_folders_with_one_process(tiny):
    words = tiny(*WORDS, STEPS)
    train(words, until=3)
    trainer = Trainer(words)
    assert trainer.step == 3
    assert names(trainer.run_folder.checkpoints) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (
            "train.objective=dpo data.source=jsonl data.path=.",
            "train.objective: 'dpo' contradicts checkpoint.shared False",
        ),
        ("checkpoint.save_hf=yes", ""),
        ("checkpoint.replicas=2", ""),
    ],
)
def test_own_folders_refuse_settings_that_need_a_shared_one(word, says, tmp_path, capsys):
    words = ["checkpoint.shared=no", *word.split(), f"output_dir={tmp_path / 'out'}", "--dry_run"]
    assert main(["debug", "train.device=cpu", *words]) == (2 if says else 0)
    assert says in capsys.readouterr().err


def test_a_machines_disk_needs_room_for_its_part(tiny, tmp_path, monkeypatch):
    words = [*WORDS, "train.steps=2", "checkpoint.keep=1", "checkpoint.interval=0"]
    arch = resolve_architecture(tiny(*words, "checkpoint.at_end=yes").model)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (1e12, 1e12 - 600, 600))

    def check(*more):
        config = tiny(*settled([*words, "checkpoint.at_end=yes", *more]))
        folder = run_folder.RunFolder(tmp_path, settings=config.checkpoint)
        if folder.own is not None:
            folder.own._machines = [0, 1, 2, 3]
        folder.check_room(config, arch, 1000.0)

    check()
    check(TWO)  # half of a checkpoint
    for more in ("checkpoint.replicas=3", "checkpoint.shared=yes"):
        with pytest.raises(ConfigError, match="has room for"):
            check(more)
