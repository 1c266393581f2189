"""Reporters: each library's own reader finds a run's values, also after a resume."""

import math
import time

import pytest

from moetrain.cli.train import main
from moetrain.config import ConfigError
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics


def read_tensorboard(folder, project):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {e.step: e.value for e in events.Scalars("loss")}, {}


def wandb_records(file):
    """Return the records of a W&B file: LevelDB's log of blocks, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, block, at, whole = file.read_bytes(), 32768, 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if block - at % block < 7:  # no header fits
            at += block - at % block
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def read_wandb(folder, project):
    found, settings = {}, {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(file):
            row = {(i.key or "".join(i.nested_key)): i.value_json for i in record.history.item}
            if "loss" in row:
                found[record.history.step.num] = float(row["loss"])
            for item in record.run.config.update:
                settings[item.key] = item.value_json
            assert record.run.project in ("", project)
    return found, settings


def read_mlflow(folder, project):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name(project)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    return {m.step: m.value for m in history}, run.data.params


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def callbacks_of(name):
    """Return the callback of ``examples/``; the other reporters are our own."""
    if name != "mlflow":
        return []
    from mlflow_reporter import MLflow

    return [MLflow("tried")]


@pytest.mark.tier("long")
@pytest.mark.parametrize("name", READERS)
def test_a_reporters_own_library_reads_the_losses(name, tiny, offline):
    pytest.importorskip(name)
    words = ["checkpoint.interval=2", "train.sample_tokens=0"]
    words += [] if name == "mlflow" else [f"log.reporters={name}"]
    words += ["log.project=tried"] if name == "wandb" else []
    folder = Trainer(tiny("train.steps=2", *words), callbacks=callbacks_of(name)).fit().folder
    # Names of TensorBoard's files have the second and a counter of this process: 10 sorts before 9,
    # and events that are read out of order are dropped.
    time.sleep(1 - time.time() % 1)
    Trainer(tiny("train.steps=4", *words), callbacks=callbacks_of(name)).fit()
    rows = read_metrics(folder / "metrics.jsonl")
    expected = {row["step"]: row["loss"] for row in rows if "loss" in row}
    found, settings = READERS[name](folder, "tried")
    assert found.keys() == expected.keys() == {1, 2, 3, 4}
    assert all(math.isclose(found[step], expected[step], rel_tol=1e-6) for step in found)
    if name == "mlflow":
        assert settings["model.hidden_size"] == "16"
    if name == "wandb":
        assert '"hidden_size":16' in settings["model"].replace(" ", "")


def test_a_reporter_that_is_not_installed_is_named(tiny_words, monkeypatch, capsys):
    monkeypatch.setattr("moetrain.train.callbacks.find_spec", lambda name: None)
    assert main([*tiny_words, "log.reporters=wandb"]) == 2
    said = "error: log.reporters: 'wandb' is not installed; pip install wandb, or leave it out"
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_a_reporter_that_is_none_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"log\.reporters"):
        tiny("log.reporters=wandb,paper")
