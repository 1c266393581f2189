"""Errors that only files, folders and the machine reveal: one line, and exit code 2.

Nothing here trains: a bad input is found before that, or this module would take long. In a row of
:data:`FILES`, ``{tmp}`` is an empty folder, ``{text}`` one of text files, ``{hf}`` a checkpoint
that has only its config.json.

A row has the given words, the setting that the line names, and words of the line.
"""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest

from moetrain.cli.checkpoint import main as checkpoint
from moetrain.cli.generate import main as generate
from moetrain.cli.train import main as train
from moetrain.cli.train import run_rl as rl
from moetrain.config import Config, ConfigError
from moetrain.models.hf.config import architecture_from_hf
from moetrain.models.hf.save import save_hf
from moetrain.models.transformer import Transformer
from tests.lib.command_lines import assert_refused

HF_CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}
RANKS = "--dry_run --launch.nproc "
PP = RANKS + "2 --parallel.pp 2 --train.micro_batch_size 4"
HF = "--model.path {hf} --data.source text --data.path {text}"

FILES = [
    # The output folder.
    ("--output_dir {file}", "output_dir", "is not a folder; choose another"),
    ("--output_dir {file}/below/it", "output_dir", "'.*/file' is not a folder"),
    ("--output_dir {link}", "output_dir", "is a link to nothing"),
    ("--output_dir {link}/below", "output_dir", "is a link to nothing"),
    ("--output_dir {loop}", "output_dir", "link|Too many levels"),
    ("--output_dir /proc/moetrain", "output_dir", "cannot be written to"),
    ("--output_dir {tmp}/" + "n" * 300, "output_dir", "has a name of more than 255 bytes"),
    ("--output_dir {tmp}/" + "é" * 130, "output_dir", "has a name of more than 255 bytes"),
    ("--output_dir {tmp}" + "/n" * 3000, "output_dir", "too long"),
    ("--output_dir {used}", "output_dir", "its metrics.jsonl is a folder"),
    ("--output_dir {used2}", "output_dir", "its checkpoints is not a folder"),
    ("--checkpoint.resume " + "n" * 300, "checkpoint.resume", "is not a checkpoint"),
    ("--checkpoint.resume {tmp}/no", "checkpoint.resume", "is not a checkpoint"),
    # The model.
    (
        "--model.preset gpt-5",
        "model.preset",
        "'gpt-5' is not one of .*gpt-oss-20b, .* give model.path",
    ),
    ("--model.preset qwen3-30b-a3c", "model.preset", "is not one of qwen3-30b-a3b, .* more "),
    ("--model.num_heads 3", "model.num_heads", "not a multiple"),
    ("--model.head_dim 7", "model.head_dim", "odd"),
    ("--model.num_experts 1", "model.num_experts", "more than"),
    (
        "--model.moe_intermediate_size 9 --dry_run --launch.gpus 1 --train.device auto",
        "model.moe_intermediate_size",
        "multiple of 8",
    ),
    (
        "--model.path {tmp} --data.source text --data.path {text}",
        "model.path",
        "no config.json",
    ),
    ("--model.path {file} --data.source text --data.path {text}", "model.path", ""),
    # Settings that depend on the model.
    (HF, "data.tokenizer", "not set, and model.path '.*hf' holds no tokenizer.json"),
    (
        HF + " --data.tokenizer byte --data.seq_len 65",
        "data.seq_len",
        r"65 is more than the 64 positions \(max_position_embeddings\) of model.path '.*hf'",
    ),
    (
        HF + " --data.tokenizer byte --moe.z_loss_coef 0.1",
        "moe.z_loss_coef",
        "0.1, but qwen3 has no experts; unset it",
    ),
    ("--model.preset qwen3-0.6b --moe.force_balanced yes", "moe.force_balanced", "no experts"),
    ("--data.seq_len 4097", "data.seq_len", "more than the 4096 positions .* model.preset 'debug'"),
    # The layout.
    ("--parallel.pp 2", "parallel.pp", "world of 1 process"),
    ("--parallel.cp 2", "parallel.cp", "world of 1 process"),
    ("--parallel.tp 2", "parallel.tp", "world of 1 process"),
    ("--parallel.ep 2", "parallel.ep", "2 does not divide"),
    ("--parallel.dp_replicate 2", "parallel.dp_replicate", "world of 1"),
    (
        RANKS + "2 --parallel.pp 2",
        "parallel.pp",
        "2 is more than the 1 micro-batches",
    ),
    (PP + " --parallel.pp_schedule 2f2b", "parallel.pp_schedule", "'gpipe', '1f1b' or 'int"),
    (PP + " --model.num_layers 1", "parallel.pp", "2 stages, but the model has 1 blocks; use 1 or"),
    (
        PP + " --parallel.pp_schedule interleaved_1f1b --model.num_layers 3",
        "parallel.pp",
        "use 1 or fewer, or fewer stages",
    ),
    (PP + " --parallel.pp_stages 2", "parallel.pp_stages", "2 stages a rank, but .*1f1b takes 1"),
    (PP + " --parallel.pp_split 1,2,3", "parallel.pp_split", "give 2 numbers that add up to"),
    (PP + " --parallel.pp_split 1,x", "parallel.pp_split", "integer"),
    (PP + " --parallel.pp_split 0,4", "parallel.pp_split", "at least one block"),
    (
        RANKS + "4 --parallel.pp 2 --parallel.ep 2 --train.micro_batch_size 4 "
        "--moe.dispatch_mode static --moe.dispatcher deepep",
        "moe.dispatch_mode",
        "use exact",
    ),
    (
        "--parallel.reshard_after_forward -3",
        "parallel.reshard_after_forward",
        "give yes, no, or a number of blocks, 2 or more",
    ),
    (
        RANKS + "2 --parallel.pp 2 --parallel.pp_schedule interleaved_1f1b "
        "--train.global_batch_size 3 --train.micro_batch_size 1 --model.num_layers 4",
        "parallel.pp_schedule",
        "3 micro-batches, but interleaved_1f1b needs a multiple of its 2 ranks; use gpipe",
    ),
    (
        RANKS + "3",
        "train.global_batch_size",
        "3 ranks .* = 48; set .*global_batch_size 48$",
    ),
    (
        RANKS + "2",
        "train.global_batch_size",
        "size 16 x 2 .* = 32; set .* 32 or .*_size 8$",
    ),
    ("--train.global_batch_size 1e11", "train.global_batch_size", "GiB of host memory .* lower it"),
    (
        RANKS + "4 --parallel.tp 4 --model.vocab_size 5 --model.num_kv_heads 4",
        "parallel.tp",
        "too much for the model's vocab_size 5",
    ),
    ("--train.device cuda --launch.nproc 1", "train.device", "no CUDA device"),
    # The kernels.
    ("--kernels.attention flex", "kernels.attention", "no backward on a CPU"),
    ("--kernels.attention cudnn", "kernels.attention", ""),
]


COMMANDS = [  # the command, its words, the field, words of the line
    (checkpoint, "inspect {tmp}/no", "PATH", "no such folder; give a step-... folder, or the out"),
    (
        checkpoint,
        "verify {text}",
        "PATH",
        "no manifest.json; give a step-... folder, or",
    ),
    (checkpoint, "diff {hf} {tmp}", "PATH", "a Hugging Face one: .* import-hf"),
    (checkpoint, "inspect", "checkpoint", "required: PATH; see --help"),
    (checkpoint, "look {tmp}", "checkpoint", "'look' .choose from 'inspect'"),
    (generate, "{run} --prompt a", "path", "no export: .* export-hf {run} {run}/hf writes"),
    (generate, "{adapted} --prompt a", "path", "adapters alone, .*{adapted}/adapter as --adapter"),
    (
        generate,
        "{adapter} --prompt a",
        "path",
        "they belong to .b.; give it, and {adapter} as --adapter",
    ),
    (
        train,
        "--model.path {adapter} --data.tokenizer byte --data.path {text}/a.txt",
        "model.path",
        "to it, and lora.path to",
    ),
    (generate, "{tmp} --prompt a", "path|data.tokenizer", "no tokenizer.json"),
    (rl, "debug", "recipe", "'debug' sets data.source, .* for this command, such as rl-sort"),
    (generate, "{hf}", "generate", "required: --prompt; see --help"),
]


@pytest.mark.parametrize(("run", "words", "field", "says"), COMMANDS)
def test_commands_refuse_bad_inputs_in_one_line(run, words, field, says, places, capsys):
    for name, place in places.items():
        words, says = (text.replace("{" + name + "}", place) for text in (words, says))
    assert run(words.split()) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1), error
    assert re.match(f"error: ({field}): ", error), error
    assert re.search(says, error), error


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """Make the files and folders that the rows above name."""
    root = tmp_path_factory.mktemp("places")
    places = {name: str(root / name) for name in ("tmp", "text", "hf", "used", "used2")}
    for folder in places.values():
        os.mkdir(folder)
    (root / "used" / "metrics.jsonl").mkdir()
    (root / "used2" / "checkpoints").write_text("")
    (root / "text" / "a.txt").write_text("some text. " * 100)
    save_hf(Transformer(architecture_from_hf(HF_CONFIG)), root / "hf")
    for name, inside in (("run", "checkpoints"), ("adapted", "adapter")):
        places[name] = str(root / name)
        (root / name / inside).mkdir(parents=True)
    places["adapter"] = str(root / "adapter")
    (root / "adapter").mkdir()
    settings = {"base_model_name_or_path": "b"}
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    for name in ("file", "link", "loop"):
        places[name] = str(root / name)
    (root / "file").write_text("")
    (root / "link").symlink_to(root / "nothing")
    (root / "loop").symlink_to(root / "loop")
    return places


@pytest.mark.parametrize(("words", "field", "says"), FILES, ids=[row[0][:60] for row in FILES])
def test_train_refuses_bad_files_folders_and_layouts(
    words, field, says, places, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, place in places.items():
        words = words.replace("{" + name + "}", place)
    if "train.device" not in words:
        words += " --train.device cpu"
    if "output_dir" not in words:
        words += " --output_dir out"
    assert_refused(words.split(), field, says, tmp_path, capsys)


NEVER_BY_TIME = "checkpoint.minutes=0"


def test_a_folder_that_may_not_be_written_to(tmp_path, capsys, monkeypatch):
    def refuse(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    words = [f"--output_dir={tmp_path / 'out'}"]
    says = "cannot be written to: Read-only file system; choose another"
    assert_refused(words, "output_dir", says, tmp_path, capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "0.06 GiB: 3 checkpoints of 0.02 GiB;"),  # saves by time: their number is unknown
        (["train.steps=2"], "0.04 GiB: 2 checkpoints of 0.02 GiB;"),
        ([NEVER_BY_TIME], "the run will write 0.02 GiB: 1 checkpoint of 0.02 GiB;"),
        ([NEVER_BY_TIME, "checkpoint.interval=100"], "0.06 GiB: 3 checkpoints of 0.02 GiB;"),
        ([NEVER_BY_TIME, "checkpoint.interval=200"], "0.04 GiB: 2 checkpoints of 0.02 GiB;"),
        (["checkpoint.interval=100", "checkpoint.keep_every=300"], "4 checkpoints of 0.02 GiB;"),
        (
            [NEVER_BY_TIME, "checkpoint.at_end=no", "checkpoint.save_hf=yes"],
            "0.01 GiB: checkpoint.save_hf's",
        ),
    ],
    ids=repr,
)
def test_no_room_for_what_will_be_written(words, says, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    words = [f"--output_dir={tmp_path / 'out'}", *words]
    assert_refused(words, "output_dir", f"has room for 0.00 GiB, and .*{says}", tmp_path, capsys)


def test_compile_enabled_without_a_compiler_is_refused(tmp_path, capsys):
    from torch._inductor import config

    words = ["compile.enabled=yes", f"output_dir={tmp_path / 'out'}", "train.device=cpu"]
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert_refused(
            words, "compile.enabled", "on a CPU needs a C\\+\\+ compiler", tmp_path, capsys
        )


def test_no_compiler_beside_a_gpu(monkeypatch):
    import torch

    from moetrain.train.checks import check_compilers

    monkeypatch.setenv("CC", "no-such-compiler")
    config = Config.load("debug", ["compile.enabled=no"], environ={})
    with pytest.raises(ConfigError, match=r"kernels\.backend: Triton needs a C compiler"):
        check_compilers(config, torch.device("cuda"))
