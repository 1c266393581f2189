"""Files of a run with damaged bytes, when the run resumes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from moetrain.config import ConfigError
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from moetrain.train.preferences import Reference
from moetrain.train.run_folder import RunFolder

LINES = [b'{"step": 1, "loss": 3.5}', b'{"step": 2, "loss": 3.25}', b'{"step": 3, "loss": 3.0}']


DAMAGED = [b'{"step": 2, "lo\xff": 3.25}', b'{"step": 2, "loss"', b'{"loss": 1}', b'{"step": "2"}']
DAMAGED += [b'{"step": true}', b"[1]", b"[" * 10**5, b"\0" * 30]


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_read_metrics_leaves_out_damaged_lines_alone(tmp_path, damaged, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([LINES[0], damaged, LINES[2], b"\xff", b'{"step": 4']))
    assert read_metrics(path) == [json.loads(LINES[0]), json.loads(LINES[2])]
    assert f"{path}: line 2 is not what a run writes, and is left out with 1 others" in caplog.text
    caplog.clear()
    path.write_bytes(b"\n".join([*LINES, b'{"step": 4']))
    assert read_metrics(path) == [json.loads(line) for line in LINES]
    assert not caplog.text


def test_a_run_goes_on_with_a_damaged_line_in_its_metrics(tiny, tmp_path):
    Trainer(tiny("train.steps=3")).fit()
    path = tmp_path / "out" / "metrics.jsonl"
    data = path.read_bytes()
    steps = [json.loads(line)["step"] for line in data.splitlines()]
    at = data.index(b'"loss"')
    path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    Trainer(tiny("train.steps=4")).fit()
    found = [row["step"] for row in read_metrics(path)]
    assert found[: len(steps) - 1] == steps[1:]
    assert max(found) == 4


@pytest.mark.tier("long", quick=["name"])
@pytest.mark.parametrize("data", [b"\xff", b"0123456789abcde\xe9", b"\0" * 16, b"name"])
def test_a_damaged_name_of_a_run_is_one_line(tiny, tmp_path, data):
    Trainer(tiny("train.steps=2")).fit()
    mark = tmp_path / "out" / ".run"
    before = mark.read_bytes()
    for broken in (data, before + data):
        mark.write_bytes(broken)
        with pytest.raises(ConfigError) as error:
            Trainer(tiny("train.steps=3"))
        assert str(error.value).startswith(f"output_dir: '{mark}' holds b")
        assert "\n" not in str(error.value)
        assert mark.read_bytes() == broken
    mark.unlink()  # the remedy
    assert Trainer(tiny("train.steps=3")).step == 2
    assert RunFolder(tmp_path / "out").find("auto") is not None


@pytest.mark.tier("long")
def test_damaged_references_of_preferences_are_one_line(tmp_path):
    """A changed or missing byte anywhere causes only a ConfigError."""
    dataset = SimpleNamespace(identity={"of": "é"}, reference_PS=np.zeros((2, 3), np.float32))
    run = SimpleNamespace(step=3, folder=tmp_path)
    file = tmp_path / "reference.npz"
    with file.open("wb") as opened:
        np.savez(opened, np.ones((2, 3), np.float32), identity=json.dumps([dataset.identity]))
    Reference([dataset]).on_start(run)
    assert dataset.reference_PS.sum() == 6
    data, refused = file.read_bytes(), 0
    ends = [data[:length] for length in range(len(data))]
    flips = [
        data[:i] + bytes([data[i] ^ bit]) + data[i + 1 :]
        for i in range(len(data))
        for bit in (1, 128)
    ]
    said = set()
    for broken in (*ends, *flips, b"\xff" * 100):
        file.write_bytes(broken)
        try:
            Reference([dataset]).on_start(run)
            assert dataset.reference_PS.sum() == 6
        except ConfigError as error:
            refused += 1
            said.add(str(error))
    assert refused > len(data)
    assert all(one.startswith(f"checkpoint.resume: {file}") for one in said)
    assert not any("\n" in one for one in said)
