"""A dry run opens the data, and shows the first document as it will be learned."""

import json
import re

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.cli.train import main
from moetrain.data.chat import CHATML

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


def dry_run(path, capsys, *words):
    """Return the exit code, and the line on standard error about the data."""
    code = main(
        ["debug", "--data.path", str(path), "--data.tokenizer", "byte", *words, "--dry_run"]
    )
    lines = capsys.readouterr().err.strip().splitlines()
    assert code or lines[-1].startswith("fits: ")
    return code, next(line for line in lines if line.startswith(("data", "error: ")))


def test_a_chat_is_shown_with_what_is_learned(tmp_path, capsys):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    code, line = dry_run(path, capsys)
    (whole,), _ = render_jinja_template([CHAT], chat_template=CHATML)
    right = whole.rstrip().replace("4<|im_end|>", "«4<|im_end|>»").replace("\n", "\\n")
    assert code == 0
    assert line == f"data: what is learned stands in « »; the first document: {right}"


def test_a_pair_is_shown_by_its_better_answer(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(PAIR) + "\n")
    code, line = dry_run(path, capsys, "--train.objective", "dpo")
    assert (code, line.rpartition(": ")[2]) == (0, "q«a»")
    code, line = dry_run(path, capsys, "--train.objective", "reward")
    said = "data: a text's reward is read at its last token; the first document: qa"
    assert (code, line) == (0, said)


def test_control_characters_are_shown_as_escapes(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "q\x1b[2J", "completion": "a\r\nb"}) + "\n")
    code, line = dry_run(path, capsys)
    assert (code, line.rpartition(": ")[2]) == (0, r"q\x1b[2J«a\r\nb»")


def test_a_long_text_is_cut_in_the_middle(tmp_path, capsys):
    path = tmp_path / "long.txt"
    path.write_text("begin " + "x" * 5000 + " end")
    code, line = dry_run(path, capsys)
    assert code == 0
    assert "«begin xxx" in line
    assert line.endswith(" end»")
    assert len(line) < 500


@pytest.mark.parametrize("source", ["synthetic", "stdlib"])
def test_data_without_a_path(source, capsys):
    assert main(["debug", "--data.source", source, "--dry_run"]) == 0
    assert re.search("^data", capsys.readouterr().err, re.M)


def test_data_that_is_not_there_or_is_wrong_ends_a_dry_run_as_it_would_the_run(tmp_path, capsys):
    code, line = dry_run(tmp_path / "none.jsonl", capsys)
    assert code == 2
    assert line.startswith("error: data.path: ")
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"messages": "none"}\n')
    code, line = dry_run(path, capsys)
    assert code == 2
    assert "`messages` is not a list of turns" in line


def test_a_plan_for_other_machines_only_names_what_is_not_here(tmp_path, capsys):
    words = ["--launch.gpus", "1", "--launch.gpu", "h200"]
    code, line = dry_run(tmp_path / "none.jsonl", capsys, *words)
    assert code == 0
    said = "data is not checked, since the plan is for other machines: data.path: "
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--data.source", "synthetic"], ["data.source synthetic: random tokens"]),
        (
            ["--model.preset", "olmoe-1b-7b"],
            ["data.tokenizer byte: text becomes 257 of the model's 50"],
        ),
        (["--checkpoint.at_end", "no", "--checkpoint.minutes", "0"], ["no checkpoint is kept"]),
        (["--checkpoint.at_end", "no"], []),
        ([], []),
    ],
)
def test_what_teaches_or_keeps_less_than_one_may_think_has_a_line(words, says, capsys):
    assert main(["debug", "--dry_run", *words]) == 0
    lines = capsys.readouterr().err.splitlines()
    told = [line for line in lines if re.match(r"data\.|no checkpoint", line)]
    assert len(told) == len(says)
    for line, beginning in zip(told, says, strict=True):
        assert line.startswith(beginning)


@pytest.mark.tier("long")
def test_a_run_says_so_too(tmp_path, caplog):
    words = ["debug", "--data.source", "synthetic", "--train.steps", "1", "--model.num_layers", "1"]
    words += ["--output_dir", str(tmp_path / "out"), "--optim.warmup_steps", "0"]
    with caplog.at_level("INFO", "moetrain"):
        assert main(words) == 0
    assert "data.source synthetic: random tokens, from which nothing is learned" in caplog.text
