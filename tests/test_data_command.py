"""``moetrain data PATH``: what it says of records, lengths and masks."""

import re
from pathlib import Path

import pytest
from data_files import write_lines

from moetrain.cli import data as command


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


def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_lines(tmp_path / "a.jsonl", {"question": "x"})
    assert command.main([str(path), "--data.cache_dir", str(tmp_path)]) == 2
    assert "nearest is" in capsys.readouterr().err
    assert command.main([str(tmp_path / "none.parquet")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert command.main([]) == 2
