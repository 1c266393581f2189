"""``python -m moetrain.checkpoint``: inspecting, verifying, comparing and converting."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.cli.checkpoint import main
from moetrain.config import Config
from moetrain.data.tokenizer import load_tokenizer
from moetrain.models.hf.files import resolve
from moetrain.train.loop import Trainer
from moetrain.train.run_folder import RunFolder
from tests.lib.checkpoints import rewrite, tensors_of
from tests.lib.exports import make_tokenizer


@pytest.fixture(scope="module")
def run(corpus, token_cache, tmp_path_factory):
    """Train a tiny run that exports itself; tests do not change it."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def saved(run, tiny_words, tmp_path):
    """Copy the output folder of that run."""
    if not (run / "out").exists():
        words = ["train.steps=2", "checkpoint.save_hf=yes", f"output_dir={run / 'out'}"]
        Trainer(Config.load(None, [*tiny_words, *words], environ={})).fit()
    shutil.copytree(run / "out", tmp_path / "out")
    return tmp_path / "out"


def test_inspect_and_verify(saved, capsys):
    newest = saved / "checkpoints" / "step-00000002"
    for path in (saved, newest):
        assert main(["inspect", str(path)]) == 0
        shown = capsys.readouterr().out
        assert "step 2, 256 tokens" in shown
        assert "optim: " in shown
        assert "norm.weight" not in shown
    assert main(["inspect", str(saved), "--tensors"]) == 0
    assert "  norm.weight float32 [16]\n" in capsys.readouterr().out
    assert main(["verify", str(saved)]) == 0
    assert "are as written" in capsys.readouterr().out
    (weights,) = newest.glob("model-*")
    data = bytearray(weights.read_bytes())
    data[-9] ^= 1
    weights.write_bytes(data)
    assert main(["verify", str(saved)]) == 1
    line = capsys.readouterr().err
    assert line.startswith("damaged: model ")
    assert str(weights) in line
    weights.unlink()
    assert main(["verify", str(saved)]) == 1
    assert str(weights) in capsys.readouterr().err


def test_a_run_stands_for_its_newest_checkpoint(saved, tmp_path, capsys):
    newest = saved / "checkpoints" / "step-00000002"
    for path in (saved, saved / "checkpoints", newest):
        assert RunFolder(tmp_path / "other").find(str(path)) == newest
        assert main(["inspect", str(path)]) == 0
    torch.manual_seed(987_654_321)  # a state that no run has saved
    assert main(["import-hf", str(saved / "hf"), str(tmp_path / "began")]) == 0
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "began"), str(saved)]) == 1
    lines = capsys.readouterr().out.splitlines()
    (moments,) = [line for line in lines if line.startswith("optim")]
    assert re.fullmatch(rf"optim: all \d+ tensors are only in {saved}", moments)
    assert [line.split(":")[0] for line in lines if line != moments] == ["rng cpu"]


def test_a_run_stands_for_its_export(saved):
    assert resolve(saved) == resolve(saved / "hf") == saved / "hf"


def test_diff_command_names_changed_tensors(saved, tmp_path, capsys):
    one, two = (saved / "checkpoints" / "step-00000002", tmp_path / "two" / "step-00000002")
    shutil.copytree(one, two)
    assert main(["diff", str(saved), str(two)]) == 0
    assert capsys.readouterr().out == "no tensor differs\n"

    def edit(groups):
        groups["model"]["norm.weight"][3] += 0.5
        groups["optim"].pop("norm.weight.step")
        groups["rng"]["cpu"] = groups["rng"]["cpu"][:8]

    broken = torch.tensor([float("nan"), float("inf"), 1.0])
    for path in (one, two):
        rewrite(path, lambda groups: groups["model"]["norm.weight"][:3].copy_(broken))
    assert main(["diff", str(one), str(two)]) == 0
    assert capsys.readouterr().out == "no tensor differs\n"
    rewrite(two, edit)
    assert main(["diff", str(one), str(two)]) == 1
    model, optim, rng = capsys.readouterr().out.splitlines()
    assert model.startswith("model norm.weight: differs by at most 0.5, ")
    assert model.endswith(" 6.2% of its elements")
    assert optim == f"optim norm.weight.step: only in {one}"
    assert rng.startswith("rng cpu: torch.uint8 [")


def test_an_export_is_the_runs_own(saved, tmp_path):
    assert main(["export-hf", str(saved), str(tmp_path / "hf")]) == 0
    assert files_of(tmp_path / "hf") == files_of(saved / "hf")
    assert main(["export-hf", str(saved), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    ours = load_file(saved / "hf" / "model.safetensors")
    for name, weight in load_file(tmp_path / "hf" / "model.safetensors").items():
        assert torch.equal(weight, ours[name].bfloat16()), name


def test_an_export_has_the_chat_template_that_was_trained(tiny_words, tmp_path):
    """The export has the training's template, not the tokenizer's nor its file's new text."""
    make_tokenizer(tmp_path / "own")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "own")
    theirs.chat_template = {"default": "own", "tool_use": "own with tools"}
    theirs.save_pretrained(tmp_path / "own")
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    )
    (tmp_path / "trained.jinja").write_text(template)
    turns = [{"role": "user", "content": "q?"}, {"role": "assistant", "content": "a."}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 9))
    words = [*tiny_words, "data.source=records", f"data.path={tmp_path}/chats.jsonl"]
    words += [f"data.tokenizer={tmp_path / 'own'}", "model.vocab_size=280", "train.steps=1"]
    words += [f"data.chat_template={tmp_path}/trained.jinja", "checkpoint.save_hf=yes"]
    folder = Trainer(Config.load(None, words, environ={})).fit().folder
    (tmp_path / "trained.jinja").write_text("another")
    assert main(["export-hf", str(folder), str(tmp_path / "hf")]) == 0
    (tmp_path / "trained.jinja").unlink()
    assert main(["export-hf", str(folder), str(tmp_path / "later")]) == 0
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for export in (tmp_path / "hf", tmp_path / "later", folder / "hf"):
        found = AutoTokenizer.from_pretrained(export)
        for given in (None, tools):
            text = found.apply_chat_template(turns, tools=given, tokenize=False)
            right, _ = render_jinja_template([turns], tools=given, chat_template=template)
            assert [text] == right
        ours = load_tokenizer(str(export))
        assert (ours.chat_template, ours.tool_template) == (template, None)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_import_is_where_a_run_begins(saved, tmp_path, tiny_words):
    source = saved / "hf"
    assert main(["import-hf", str(source), str(tmp_path / "in")]) == 0
    made = tmp_path / "in" / "step-00000000"
    trained = tensors_of(saved / "checkpoints" / "step-00000002")["model"]
    imported = tensors_of(made)["model"]
    assert imported.keys() == trained.keys()
    assert all(torch.equal(imported[name], trained[name]) for name in trained)
    words = [w for w in tiny_words if not w.startswith("model.")] + [f"model.path={source}"]
    words += ["data.tokenizer=byte", "train.sample_tokens=0"]
    losses = []
    for more in ([f"checkpoint.resume={made}"], []):
        folder = f"output_dir={tmp_path / str(len(losses))}"
        trainer = Trainer(Config.load(None, [*words, *more, folder], environ={}))
        assert trainer.step == 0
        losses.append([trainer.train_step().loss.item() for _ in range(2)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["inspect", "nowhere"], 2, "'nowhere' is not a checkpoint"),
        (["inspect"], 2, "PATH"),
        (["inspect", "a", "b"], 2, "inspect takes one path"),
        (["diff", "a"], 2, "diff takes two paths, not 1"),
        (["merge", "a", "b"], 2, "merge takes three paths: the adapters, BASE and OUT, not 2"),
        (["repair", "a"], 2, "invalid choice"),
        (["import-hf", "nowhere", "out"], 2, "nowhere"),
    ],
)
def test_checkpoint_command_refuses_bad_requests_in_one_line(
    words, code, says, capsys, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(words) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert says in error
    assert error.count("\n") == 1
    assert Path("out").exists() is False


@pytest.mark.parametrize("out", ["", "hf"])
def test_no_export_goes_into_a_checkpoint(out, saved, capsys):
    newest = saved / "checkpoints" / "step-00000002"
    there = set(newest.iterdir())
    assert main(["export-hf", str(saved), str(newest / out)]) == 2
    assert "is in the checkpoint itself" in capsys.readouterr().err
    assert set(newest.iterdir()) == there


def test_no_export_takes_the_place_of_a_runs_settings(saved, tmp_path, capsys):
    settings = (saved / "config.json").read_bytes()
    (tmp_path / "link").symlink_to(saved)
    for out in (saved, tmp_path / "link"):
        assert main(["export-hf", str(saved), str(out)]) == 2
        error = capsys.readouterr().err
        assert f"{str(out)!r} is a run's output folder, whose config.json" in error
        assert error.count("\n") == 1
    assert (saved / "config.json").read_bytes() == settings


@pytest.mark.parametrize("command", ["export-hf", "import-hf"])
@pytest.mark.parametrize("out", ["file", "file/sub", "n" * 300])
def test_a_place_that_cannot_be_written_is_one_line(command, out, saved, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    source = saved if command == "export-hf" else saved / "hf"
    assert main([command, str(source), str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: checkpoint: ")
    assert str(tmp_path / out) in error
    assert error.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_a_name_that_no_file_can_have_is_one_line(capsys):
    assert main(["inspect", "n" * 300]) == 2
    assert capsys.readouterr().err.count("\n") == 1
