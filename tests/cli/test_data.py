"""``moetrain data PATH`` prints records, lengths and masks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moetrain.cli import data as command
from moetrain.config import Config
from moetrain.data.loader import build_data
from moetrain.losses.preference import LOSSES, Scores, Segments, kto_losses
from tests.lib.data_files import write_lines


def test_rows_lengths_and_masks_are_shown(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    turns = [{"role": "user", "content": "Asked"}, {"role": "assistant", "content": "Answered"}]
    path = write_lines(tmp_path / "a.jsonl", *({"messages": turns, "n": i} for i in range(30)))
    words = ["--data.seq_len", "256", "--data.cache_dir", str(tmp_path / "cache"), "--show", "1"]
    assert command.main([str(path), *words]) == 0
    out = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[\d;]*m", "", out)
    assert "the first 30 records are messages (30)" in caplog.text
    assert "of 256 tokens" in out
    assert "\x1b[32mAnswered<|im_end|>" in out
    assert "\x1b[2mAsked<|im_end|>" in out
    assert "row 0" in plain
    assert "row 1" not in plain
    assert "█" * 40 in out


def test_data_command_reports_bad_data_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "x", "answer": "y"})
    assert command.main([str(path), "--data.cache_dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "a.jsonl:1: " in error
    assert "write `answer` as `completion` for plain text" in error
    assert error.count("\n") == 1
    assert command.main([str(tmp_path / "none.parquet")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert command.main([]) == 2


@pytest.mark.parametrize("colour", ["FORCE_COLOR", "NO_COLOR"])
def test_control_characters_of_records_are_shown_as_escapes(
    colour: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """ESC [2J would clear the terminal, and a return would write over the line."""
    monkeypatch.setenv(colour, "1")
    record = {"prompt": "q\x1b[2J\x07\x7f", "completion": "a\ttab\nline\r\x9bend é«»"}
    path = write_lines(tmp_path / "a.jsonl", record)
    words = ["--data.seq_len", "64", "--data.cache_dir", str(tmp_path / "cache")]
    assert command.main([str(path), *words, "--data.eval_fraction", "0"]) == 0
    plain = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert r"q\x1b[2J\x07\x7f" in plain
    assert "line\\r\\x9bend é«»" in plain
    assert re.search("a(\t| +)tab\n", plain)  # rich writes tabs as blanks
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", plain)


def test_a_mixture_and_a_recipe_are_shown_without_colours(tmp_path: Path, capsys):
    turns = [{"role": "user", "content": "Asked"}, {"role": "assistant", "content": "Answered"}]
    path = write_lines(tmp_path / "a.jsonl", *({"messages": turns, "n": i} for i in range(30)))
    common = ["--data.seq_len", "256", "--data.cache_dir", str(tmp_path / "cache"), "--show", "1"]
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'model.preset = "debug"\n[[data.mix]]\npath = "{path}"\n')
    for words in (["--data.mix", f'[{{"path": "{path}"}}]', *common], [str(recipe), *common]):
        assert command.main(words) == 0
        out = capsys.readouterr().out
        assert "«Answered<|im_end|>" in out
        assert "«Asked" not in out


@pytest.mark.tier("long")
def test_log_lines_go_to_what_stands_in_for_standard_error():
    """A progress bar stands there while it is shown, and prints lines above itself."""
    code = """
import io, logging, sys
from moetrain.cli.main import log_lines
log_lines()
sys.stderr = bar = io.StringIO()
logging.getLogger("moetrain").warning("a line")
sys.stderr = sys.__stderr__
print(bar.getvalue(), end="")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("a line\n", "")


def test_an_option_given_twice_is_an_error(capsys):
    """argparse would drop the first."""
    assert command.main(["a.jsonl", "--show", "1", "--show=2"]) == 2
    assert "error: --show: given twice; leave one out" in capsys.readouterr().err


PAIR = {"prompt": "Asked ", "chosen": "Right", "rejected": "Wrong"}
GOOD, BAD = (
    {"prompt": "Asked ", "completion": said, "label": said == "Right"}
    for said in ("Right", "Wrong")
)


@pytest.mark.parametrize(
    ("objective", "record", "answers"),
    [
        ("dpo", PAIR, ["chosen 32 Right", "rejected 31 Wrong"]),
        ("kto", PAIR, ["chosen 32 Right", "rejected 31 Wrong", "another 2 Right"]),
        ("kto", GOOD, ["desirable 32 Right", "another 2 Right"]),
        ("kto", BAD, ["undesirable 31 Wrong", "another 2 Wrong"]),
        ("next_token", PAIR, [" 32 Right"]),
    ],
    ids=["dpo", "kto, a pair", "kto, desirable", "kto, undesirable", "next_token"],
)
def test_answers_to_avoid_are_named_and_red(
    objective: str,
    record: dict,
    answers: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = write_lines(tmp_path / "a.jsonl", *({**record, "n": i} for i in range(4)))
    words = ["--data.seq_len", "64", "--data.cache_dir", str(tmp_path / "cache"), "--show", "1"]
    words += ["--train.objective", objective, "--data.eval_fraction", "0"]
    assert command.main([str(path), *words]) == 0
    out = capsys.readouterr().out
    name = r"(?:\x1b\[1;\d+m(\w+)[^\x1b]*\x1b\[0m\s+)?"
    found = re.findall(name + r"\x1b\[2mAsked (?:\x1b\[0m\x1b\[)?(\d+m)?(Right|Wrong)", out)
    found = [(side, (colour or "2m")[:-1], answer) for side, colour, answer in found]
    assert [" ".join(each) for each in found][: len(answers)] == answers


@pytest.mark.parametrize(
    ("objective", "record", "marked"),
    [
        ("kto", PAIR, ["Right", "Wrong"]),
        ("kto", GOOD, ["Right"]),
        ("kto", BAD, ["Wrong"]),
        ("dpo", PAIR, ["Right", "Wrong"]),
        ("reward", {**PAIR, "margin": 0.5}, []),
    ],
)
def test_what_the_loss_has_a_gradient_of_is_marked_and_counted(
    objective: str,
    record: dict,
    marked: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """KTO only measures a divergence by another record's answer, and a reward has no target."""
    monkeypatch.setenv("NO_COLOR", "1")
    path = write_lines(tmp_path / "a.jsonl", record, {**record, "prompt": "Another "})
    words = ["--data.path", str(path), "--data.seq_len", "64", "--data.cache_dir", str(tmp_path)]
    words += ["--train.objective", objective, "--data.eval_fraction", "0"]
    assert command.main(words) == 0
    shown = capsys.readouterr().out
    rows = shown.partition("row 0")[2]
    assert re.findall("«(.*?)»", rows) == 2 * [f"{answer}<|endoftext|>" for answer in marked]
    assert ("chosen, by a margin of 0.5:" in rows) == (objective == "reward")
    if objective == "reward":
        assert "learned             each text's reward, read at its last token" in shown
        return
    num_with_gradient = 0
    train = build_data(Config.load(None, words), 512).train
    for row in map(train.row, range(2)):
        ratio_S = torch.zeros(64, requires_grad=True)
        cu_seqlens, targets_1S = torch.tensor([0, *row.lengths.cumsum()]), row.targets_S[None]
        labels_1S = torch.as_tensor(row.extra["label"][None]) if objective == "kto" else None
        segments = Segments.of(ratio_S, torch.as_tensor(targets_1S), cu_seqlens, labels_1S)
        if objective == "kto":
            losses = kto_losses(segments, torch.zeros(()), beta=0.1)
        else:
            losses = LOSSES[objective](Scores.of_pairs(segments), 0.1, 0.0)
        (gradient_S,) = torch.autograd.grad(losses.sum(), ratio_S)
        num_with_gradient += int((gradient_S != 0).sum())
    assert re.findall(r"learned +([0-9]+) ", shown) == [str(num_with_gradient)]


def test_what_a_row_learns_of_the_next_one_is_shown(tmp_path: Path, capsys, monkeypatch):
    """All that is shown as learned are as many bytes as the count says."""
    monkeypatch.setenv("NO_COLOR", "1")
    path = write_lines(tmp_path / "a.jsonl", {"text": "A page about bees. They make honey."})
    words = [str(path), "--data.seq_len", "12", "--data.eval_fraction", "0", "--show", "9"]
    assert command.main([*words, "--data.cache_dir", str(tmp_path / "cache")]) == 0
    shown = capsys.readouterr().out
    rows = shown.partition("row 0")[2]
    learned = re.findall("«(.*?)»", rows, re.S)
    (count,) = re.findall(r"learned +([0-9]+) ", shown)
    text = "".join(learned).replace("<|endoftext|>", "\0")
    assert len(text) == int(count)
    assert text == " page about bees. They make honey.\0"
