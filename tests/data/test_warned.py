"""Warnings about a data set are logged once in a process, and again in each run on its cache."""

import json
from pathlib import Path

import pytest

from moetrain.data.loader import build_data
from moetrain.data.warned import SEEN, noted, warn_once
from tests.lib.data_files import BYTE_VOCAB, config, write_lines

CALL = {"type": "function", "function": {"name": "rain", "arguments": {}}}
TURNS = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "no"},
    {"role": "critic", "content": "hm"},
    {"role": "assistant", "content": "a"},
]
SAID = ["call a tool that they do not declare, such as 'rain'", "the role 'critic' is none of"]


def test_a_kind_is_logged_once_and_noted_each_time(caplog: pytest.LogCaptureFixture):
    SEEN.clear()
    for _ in range(2):
        with noted() as notes:
            warn_once("a", "first 100%")
            warn_once("a", "second")
            warn_once("b", "other")
        assert notes == {"a": "first 100%", "b": "other"}
    warn_once("a", "outside")
    assert [record.getMessage() for record in caplog.records] == ["first 100%", "other"]


@pytest.mark.parametrize("streaming", ["no", "yes"])
def test_a_run_on_a_token_cache_warns_as_the_one_that_made_it(
    streaming: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = write_lines(tmp_path / "a.jsonl", *({"messages": TURNS, "id": i} for i in range(9)))
    data = {"source": "records", "path": str(path), "eval_fraction": 0, "streaming": streaming}
    data |= {"workers": 0} if streaming == "yes" else {}
    found = []
    for _ in range(3):
        SEEN.clear()  # as in another process
        caplog.clear()
        build_data(config(tmp_path, seq_len=256, **data), BYTE_VOCAB)
        found.append([record.getMessage() for record in caplog.records if record.levelno > 20])
        assert all(sum(text in line for line in found[-1]) == 1 for text in SAID)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == len(SAID)


def test_a_text_that_is_skipped_is_named_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some words " * 99)
    (tmp_path / "texts" / "b.txt").write_bytes(b"\0\1" * 99)
    for _ in range(2):
        SEEN.clear()
        caplog.clear()
        data = {"source": "text", "path": str(tmp_path / "texts"), "eval_fraction": 0}
        build_data(config(tmp_path, seq_len=32, **data), BYTE_VOCAB)
        assert caplog.text.count("b.txt is not text; skipped") == 1


def test_a_cache_without_warnings_has_none(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", *({"text": f"text {i} " * 9} for i in range(9)))
    data = {"source": "records", "path": str(path), "eval_fraction": 0}
    build_data(config(tmp_path, seq_len=32, **data), BYTE_VOCAB)
    (meta,) = (tmp_path / "cache").rglob("meta.json")
    assert "warnings" not in json.loads(meta.read_text())
