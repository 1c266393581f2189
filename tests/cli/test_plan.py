"""``moetrain plan``: the listed layouts fit, are ordered, and match what their commands run."""

import json
import re
import shlex

import pytest

from moetrain.cli import train
from moetrain.cli.machines import main as machines
from moetrain.cli.plan import main
from moetrain.config import Config
from moetrain.models.families import PRESETS
from moetrain.models.hf import files
from moetrain.models.hf.load import resolve_architecture

SIX = ["bench-qwen3-30b-a3b", "--model.num_layers", "6"]
FIXED = ["--kernels.precision", "bf16", "--optim.state_dtype", "float32"]


def plan(capsys, *words):
    """Return the rows by column, and the command."""
    assert main([*words]) == 0
    out = capsys.readouterr().out.splitlines()
    heads, *rows = (re.split(r" {2,}", line.strip()) for line in out if "  " in line)
    best = next(line for line in out if line.startswith("best: "))
    return out, [dict(zip(heads, row, strict=True)) for row in rows], shlex.split(best)[1:]


def test_the_best_layout_is_first_and_its_command_fits(capsys):
    _, rows, command = plan(capsys, *SIX, "--gpus", "2", "--top", "4", *FIXED)
    rates = [float(row["tokens/s/GPU"].replace(",", "")) for row in rows]
    assert len(rows) == 4
    assert rates == sorted(rates, reverse=True)
    assert command[:3] == ["moetrain", "train", "bench-qwen3-30b-a3b"]
    at = command.index("--launch.nproc")
    planned = ["--launch.gpus", command[at + 1], "--launch.gpu", "h200", "--dry_run"]
    assert train.main([*command[2:at], *command[at + 2 :], *planned]) == 0
    said = capsys.readouterr()
    assert f"\nfits: {rows[0]['GiB']} of 139.8 GiB" in said.err
    config = json.loads(said.out)
    assert str(config["train"]["micro_batch_size"]) == rows[0]["rows"]
    assert config["kernels"]["precision"] == rows[0]["precision"] == "bf16"


LONG = ["--data.seq_len", "131072", "--model.max_positions", "131072", "--model.rope", "yarn"]


def test_ranks_share_the_tokens_of_rows_that_no_layout_holds_otherwise(capsys):
    """The rows have 1,048,576 tokens; with short rows context parallelism is not tried."""
    longer = [word.replace("131072", "1048576") for word in LONG]
    axes = [word for axis in ("tp", "pp") for word in (f"--parallel.{axis}", "1")]
    alone = [*SIX, "--gpus", "4", *FIXED, *longer, *axes]
    assert main([*alone, "--parallel.cp", "1"]) == 2
    assert "fits in no layout" in capsys.readouterr().err
    _, rows, command = plan(capsys, *alone)
    assert {row["cp"] for row in rows} <= {"2", "4"}
    assert command[command.index("--parallel.cp") + 1] == rows[0]["cp"]
    _, rows, _ = plan(capsys, *SIX, "--gpus", "4", *FIXED, *axes)
    assert {row["cp"] for row in rows} == {"1"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], r"cp_method ulysses \(2 ranks can share the heads\)"),
        (["--model.num_heads", "31", "--model.num_kv_heads", "1"], r"all_gather \(2 ranks cannot"),
        (["--parallel.cp_method", "all_gather"], r"cp_method all_gather \(asked for\)"),
    ],
)
def test_the_dry_run_says_how_ranks_share_rows(words, says, capsys):
    """The values are computed by hand for six layers of bf16 and 65,536 tokens per rank."""
    devices = ["--launch.gpus", "2", "--launch.gpu", "h200", "--parallel.cp", "2"]
    rows = ["--train.global_batch_size", "1", "--train.micro_batch_size", "1", "--dry_run"]
    assert train.main([*SIX, *LONG, *devices, *rows, *words]) == 0
    said = capsys.readouterr().err
    assert re.search(says, said)
    tokens, (heads, groups) = 65_536, (31, 1) if "31" in words else (32, 4)
    numbers = tokens * 6 * 2 * 128
    ulysses = numbers * (2 * heads + 2 * max(groups, 2)) / 2
    gathered = numbers * 2 * groups
    assert f"ulysses {ulysses / 2**30:.3f} GiB, all_gather {gathered / 2**30:.3f} GiB" in said


@pytest.mark.parametrize("preset", ["gemma-4-26b-a4b", "gpt-oss-20b"])
def test_plan_of_experts_with_other_activations_has_fp8(preset, capsys):
    sizes = ["--model.num_layers", "6", "--optim.state_dtype", "float32"]
    _, rows, _ = plan(capsys, preset, "--gpus", "2", *sizes)
    assert {row["precision"] for row in rows} == {"bf16", "fp8"}


def test_plan_keeps_settings_of_the_user(capsys):
    given = ["--parallel.ep", "2", "--train.global_batch_size", "12", "--activation.policy", "full"]
    _, rows, command = plan(capsys, *SIX, "--gpus", "4", *FIXED, *given, "--parallel.tp", "1")
    assert {row["ep"] for row in rows} == {"2"}
    assert {row["recompute"] for row in rows} == {"full"}
    ranks = [int(row["dp_shard"]) * int(row["dp_replicate"]) for row in rows]
    assert all(12 % (n * int(row["rows"])) == 0 for n, row in zip(ranks, rows, strict=True))
    assert command.count("--train.global_batch_size") == 1


def test_machines_are_started_by_torchrun_and_said_to_be_estimated(capsys):
    axes = [word for axis in ("tp", "pp", "ep") for word in (f"--parallel.{axis}", "1")]
    out, rows, command = plan(capsys, *SIX, "--gpus", "16", *FIXED, *axes, "--gpu", "h100")
    assert any("between 2 machines is assumed to have" in line for line in out)
    assert any("measured on H200s" in line for line in out)
    assert command[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "8"]
    assert {row["dp_replicate"] for row in rows} == {"1", "2"}


def test_several_numbers_of_gpus_are_planned_one_by_one(capsys):
    axes = [word for axis in ("tp", "pp", "ep") for word in (f"--parallel.{axis}", "1")]
    more = ["--train.micro_batch_size", "2", "--activation.policy", "full", "--top", "1"]
    out, rows, _ = plan(capsys, *SIX, "--gpus", "16", "1024", *FIXED, *axes, *more)
    first, heads, second = rows
    assert list(heads) == list(heads.values()) == list(first)
    ranks = [int(row["dp_shard"]) * int(row["dp_replicate"]) for row in (first, second)]
    assert ranks == [16, 1024]
    commands = [line.split() for line in out if line.startswith("best: ")]
    assert [words[words.index("--nnodes") + 1] for words in commands] == ["2", "128"]
    assert any("between 128 machines is assumed to have 400 Gbit/s" in line for line in out)


def test_plan_takes_gpus_per_machine(capsys):
    axes = [word for axis in ("pp", "ep") for word in (f"--parallel.{axis}", "1")]
    more = ["--train.micro_batch_size", "2", "--launch.gpus_per_machine", "2"]
    out, rows, command = plan(capsys, *SIX, "--gpus", "4", *FIXED, *axes, *more)
    assert {row["tp"] for row in rows} == {"1", "2"}
    assert any("between 2 machines is assumed to have" in line for line in out)
    assert command[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "2"]


def test_a_folder_or_a_hubs_cache_with_nothing_but_a_config(capsys, tmp_path, monkeypatch):
    arch = PRESETS["qwen3-0.6b"]
    config = {"model_type": "qwen3", "tie_word_embeddings": True, "rope_theta": arch.rope_theta}
    config |= {"vocab_size": arch.vocab_size, "hidden_size": arch.hidden_size}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8}
    config |= {"intermediate_size": arch.intermediate_size, "max_position_embeddings": 40960}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, _, command = plan(capsys, str(tmp_path), "--gpus", "1", *FIXED)
    assert command[2:4] == ["--model.path", str(tmp_path)]
    monkeypatch.setattr(files.hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    _, _, command = plan(capsys, "owner/name", "--gpus", "1", *FIXED)
    assert command[2:4] == ["--model.path", "owner/name"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "nothing --gpus 1",
            r"^error: model: 'nothing' is neither a folder, a hub id nor a preset, such as ",
        ),
        (
            "no/such --gpus 1",
            r"^error: model\.path: .*neither a folder with config\.json nor in this machine's c",
        ),
        ("debug --gpus 0", r"^error: gpus: 0: give 1 to 8, or whole machines of 8"),
        ("debug --gpus 12", r"^error: gpus: 12: give 1 to 8"),
        ("debug --gpus 1 --gpu x", r"^error: plan: .*invalid choice"),
        (
            "bench-qwen3-30b-a3b --gpus 1 --gpu l40s",
            r"^error: gpus: 1: bench-qwen3-30b-a3b fits in no layout",
        ),
        ("debug --gpus 1 --optim.lrr 1", r"^error: optim\.lrr: "),
    ],
)
def test_plan_command_refuses_bad_settings_in_one_line(words, says, capsys):
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert re.search(says, said), said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("preset", "total", "active"), [("qwen3-30b-a3b", 30.5, 3.3), ("qwen3-235b-a22b", 235.1, 22.2)]
)
def test_presets_have_their_models_sizes(preset, total, active):
    arch = resolve_architecture(Config.load(preset, environ={}).model)
    assert arch.num_params() / 1e9 == pytest.approx(total, abs=0.06)
    assert arch.num_active_params() / 1e9 == pytest.approx(active, abs=0.06)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "",
            "2 machines of 8: inside nothing; across dp_shard over 2; 450 GB/s inside and 50 GB/s",
        ),
        (
            "--parallel.dp_replicate -1 --parallel.ep 4",
            "inside ep, dp_shard; across dp_replicate over",
        ),
        ("--parallel.pp 2 --parallel.tp 2", "inside tp, dp_shard; across pp over 2; 450"),
        ("--launch.gpus_per_machine 4", "4 machines of 4: inside nothing; across dp_shard over 4;"),
        ("--launch.gpus_per_machine 16", ""),
    ],
)
def test_the_dry_run_says_what_leaves_a_machine(words, says, capsys):
    rows = ["--train.micro_batch_size", "1", "--train.global_batch_size", "32"]
    devices = ["--launch.gpus", "16", "--launch.gpu", "h200", "--dry_run"]
    assert train.main([*SIX, *rows, *devices, *words.split()]) == 0
    said = capsys.readouterr().err
    assert says in said
    assert (" machines of " in said) == bool(says)


def test_a_preset_stands_where_a_recipe_does(capsys):
    """Its rows have a length of their own, and the command that plan prints begins with it."""
    words = ["olmoe-1b-7", "--dry_run"]
    assert train.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: recipe: 'olmoe-1b-7' is not one of bench-qwen3-235b-a22b, ")
    assert error.endswith("nor a .toml file; did you mean olmoe-1b-7b?\n")
    machine = ["--launch.gpus", "8", "--launch.gpu", "h200", "--data.source", "synthetic"]
    assert train.main(["olmoe-1b-7b", "--dry_run", *machine]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"]["preset"], found["data"]["seq_len"]) == ("olmoe-1b-7b", 4096)
    assert found["checkpoint"]["interval"] == 500
    assert main(["olmoe-1b-7b", "--gpus", "8", "--top", "1"]) == 0
    printed = capsys.readouterr().out
    assert "olmoe-1b-7b, rows of 4096 tokens" in printed
    assert "best: moetrain train olmoe-1b-7b --launch.nproc 8" in printed
    job = ["slurm", "olmoe-1b-7b", "--nodes", "1", "--dry_run", "--data.source", "synthetic"]
    assert machines([*job, "--output_dir", "/shared/olmoe"]) == 0
    assert "-m moetrain.train olmoe-1b-7b" in capsys.readouterr().out
