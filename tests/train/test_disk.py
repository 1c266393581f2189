"""Disk failures during a run: one line with the path, exit code 1, never a traceback."""

import contextlib
import errno
import io
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from moetrain.cli.train import main
from moetrain.config import Config, ConfigError, LogSection
from moetrain.data.loader import build_data
from moetrain.models.hf.load import resolve_architecture
from moetrain.train.loop import Trainer
from moetrain.train.metrics import MetricsLog
from moetrain.train.run_folder import RunFolder
from tests.lib.command_lines import settled

BOARD_FILE = "tensorboard.summary.writer.record_writer.RecordWriter.write"  # in a thread
# pytest turns a traceback that a thread prints into this warning.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


def last_line(words, capsys):
    """Return the one line of a run that fails for lack of disk space."""
    assert main(settled(words)) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


@pytest.mark.tier(
    "long", quick=["20-no", "20-yes", "2000-no", "2000-yes", "100000-no", "100000-yes"]
)
@pytest.mark.parametrize("board", ["no", "yes"])
@pytest.mark.parametrize("longest", [20, 2_000, 10_000, 40_000, 100_000])
def test_no_file_may_grow_beyond_a_size(longest, board, tiny, tiny_words, capsys):
    """The limit is real: any file of the run may reach it first."""
    build_data(tiny(), vocab_size=1000)  # the token cache is no file of the run
    capsys.readouterr()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest, before[1]))
    try:
        line = last_line([*tiny_words, f"log.tensorboard={board}"], capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert line.startswith("failed: ")
    assert "File too large" in line
    assert "out" in line


def test_a_full_disk_takes_no_line_that_was_written(tmp_path):
    lines = "".join(json.dumps({"step": n, "loss": 1.0}) + "\n" for n in range(1, 100))
    (tmp_path / "metrics.jsonl").write_text(lines)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            MetricsLog(tmp_path, LogSection(tensorboard=False), 100, 90)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (
            "moetrain.train.state.Saver.start",
            OSError(errno.ENOSPC, "", "a/model.x"),
            "No space left on device: a/",
        ),
        (
            "moetrain.train.state.Saver.start",
            SafetensorError("I/O error: oh (os error 28)"),
            "No space left on dev",
        ),
        (
            "moetrain.train.state.Saver.start",
            OSError(errno.EDQUOT, ""),
            "Disk quota exceeded: in output_dir '",
        ),
        (
            "moetrain.train.state.Saver.start",
            OSError(errno.EROFS, "", "a"),
            "Read-only file system: a",
        ),
        (
            "moetrain.train.loop.Trainer.finish",
            OSError(errno.EIO, "", "sample.txt"),
            "Input/output error: sample.txt",
        ),
        (
            "moetrain.train.metrics.MetricsLog.log",
            BrokenPipeError(errno.EPIPE, ""),
            "Broken pipe: in output_dir '",
        ),
        (BOARD_FILE, OSError(errno.ENOSPC, ""), "No space left on device: in output_dir '"),
        (
            "moetrain.train.loop.build_data",
            PermissionError(errno.EACCES, "", "cache/x"),
            "Permission denied: cache/x",
        ),
    ],
    ids=repr,
)
def test_errors_of_a_disk(function, error, says, tiny_words, capsys, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(function, fail)
    assert last_line([*tiny_words, "log.tensorboard=yes"], capsys).startswith(f"failed: {says}")


def test_an_error_of_ours_keeps_its_traceback(tiny_words, monkeypatch):
    def fail(*_, **__):
        raise FileNotFoundError(errno.ENOENT, "", "a bug")

    monkeypatch.setattr("moetrain.train.loop.Trainer.finish", fail)
    with pytest.raises(FileNotFoundError):
        main(tiny_words)


@pytest.mark.parametrize("board", ["no", "yes"])
@pytest.mark.parametrize("when", ["announce", "log_step", "finish"])
def test_an_output_folder_that_is_moved_under_a_run(when, board, tiny_words, tmp_path, monkeypatch):
    do = getattr(Trainer, when)

    def move_first(trainer, *args):
        if (tmp_path / "out").exists():
            (tmp_path / "out").rename(tmp_path / "moved")
        return do(trainer, *args)

    monkeypatch.setattr(Trainer, when, move_first)
    words = [*tiny_words, f"log.tensorboard={board}", "checkpoint.at_end=no"]
    with contextlib.redirect_stderr(io.StringIO()) as error:
        assert main(settled(words)) == 1
    line = error.getvalue().splitlines()[-1]
    assert "Traceback" not in error.getvalue()
    assert line.startswith(f"failed: No such file or directory: {tmp_path / 'out'}/")


# ---- what there is room for ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["checkpoint.memory_interval=1"], "3 checkpoints of"),
        (["checkpoint.memory_interval=2"], "1 checkpoint of"),
        (["checkpoint.memory_interval=1", "train.steps=2"], "2 checkpoints of"),
    ],
)
def test_memory_needs_room_for_three_checkpoints(words, says, tiny_words, tmp_path, monkeypatch):
    """With replicas on two machines each needs room for all; old files there are removed."""
    memory = tmp_path / "memory"
    words = [*tiny_words, "train.steps=3", f"checkpoint.memory={memory}", *words]
    words += ["checkpoint.at_end=no", "checkpoint.minutes=0"]
    config = Config.load(None, settled([*words, "checkpoint.replicas=2"]))
    folder = RunFolder(Path(config.output_dir), World(), config.checkpoint)
    there = tmp_path / "memory" / folder.memory.root.name / "of-a-run" / "step-00000001"
    there.mkdir(parents=True)
    (there / "a.safetensors").write_bytes(b"12345")

    def check(machines, free):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: (2**60, 0, free))
        folder.memory._machines = [*range(machines)]
        folder.check_room(config, resolve_architecture(config.model), 100.0 * 2**30)

    whole = int(says[0]) * 100 * 2**30
    check(1, whole - 5)
    check(2, whole - 5)
    check(4, whole // 2 - 5)
    start = f"checkpoint.memory: {str(memory)!r} has room for .* GiB, and the run will write "
    start += f"{whole >> 30}.00 GiB: "
    remedy = r"; enlarge it .* unset it and checkpoint\.memory_interval"
    with pytest.raises(ConfigError, match=f"{start}{says} 100.00 GiB{remedy}"):
        check(1, whole - 6)
    with pytest.raises(ConfigError, match=r"checkpoint\.memory: "):
        check(4, whole // 2 - 6)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["optim.state_dtype=bfloat16"],
        ["optim.name=muon"],
        ["lora.rank=8"],
        ["optim.offload_fraction=0.5"],
    ],
    ids=repr,
)
def test_what_a_checkpoint_takes_is_known_before_it_is_written(words, tiny_words):
    words = [*tiny_words, "model.vocab_size=2048", "train.steps=1", "checkpoint.at_end=yes", *words]
    trainer = Trainer(Config.load(None, settled(words)))
    trainer.fit()
    files = (trainer.run_folder.checkpoints / "step-00000001").glob("*.safetensors")
    tensors = (x for file in files for x in load_file(file).values())
    size = sum(x.nbytes for x in tensors) - torch.get_rng_state().nbytes
    assert trainer.session.saved == pytest.approx(size, rel=0.02)


class World:
    """The world of a single process."""

    def __init__(self):
        self.rank, self.endings = 0, []

    def gather(self, mine):
        return [mine]
