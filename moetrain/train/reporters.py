"""Reporters: callbacks that hand every logged line to another program's store.

metrics.jsonl and the terminal are :mod:`moetrain.train.metrics`'s; a run has them in any case. The
reporters here run on the main rank, import their library when they start, and read its own
environment variables (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR, ...). A resumed run goes on
with the record that its checkpoint names.
"""

from __future__ import annotations

import importlib
import time
from importlib.util import find_spec
from typing import Any

from moetrain.config import ConfigError, LogSection
from moetrain.config.sources import leaves
from moetrain.train.callbacks import Callback, Row, RunView

_BATCH = 100
"""Most parameters of a run that MLflow takes at once."""


class _Recorder(Callback):
    """A reporter whose record has an identifier, which checkpoints keep."""

    def __init__(self) -> None:
        self.identifier: str | None = None

    def state(self) -> dict[str, Any]:
        return {} if self.identifier is None else {"identifier": self.identifier}

    def load_state(self, state: dict[str, Any]) -> None:
        self.identifier = state["identifier"]


class _TensorBoard(Callback):
    """Event files in ``output_dir/tensorboard``, without those after the step it goes on from."""

    def on_start(self, run: RunView) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

        self._board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1)

    def on_log(self, run: RunView, row: Row) -> None:
        for name, value in row.items():
            if value is not None:
                self._board.add_scalar(name, value, run.step)

    def on_end(self, run: RunView, error: BaseException | None) -> None:
        self._board.close()


class _WandB(_Recorder):
    """A run of Weights & Biases, whose files lie in ``output_dir/wandb``."""

    def on_start(self, run: RunView) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=run.config.log.project,
            name=run.folder.name,
            dir=run.folder,
            config=run.config.to_dict(),
            id=self.identifier,
            resume="allow",
            settings=wandb.Settings(console="off"),  # the terminal is the run's
        )
        self.identifier = self._run.id

    def on_log(self, run: RunView, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if v is not None}, step=run.step)

    def on_end(self, run: RunView, error: BaseException | None) -> None:
        self._run.finish(exit_code=int(error is not None))


class _MLflow(_Recorder):
    """A run of MLflow, in ``output_dir/mlflow.db`` unless MLFLOW_TRACKING_URI names a server."""

    def on_start(self, run: RunView) -> None:
        mlflow = importlib.import_module("mlflow")
        self._metric, log = mlflow.entities.Metric, run.config.log
        is_named = mlflow.tracking.is_tracking_uri_set()
        uri = None if is_named else f"sqlite:///{run.folder.absolute()}/mlflow.db"
        self._client = client = mlflow.MlflowClient(uri)
        if self.identifier is not None:
            client.update_run(self.identifier, status="RUNNING")
            return
        found = client.get_experiment_by_name(log.project)
        experiment = client.create_experiment(log.project) if found is None else found.experiment_id
        self.identifier = client.create_run(experiment, run_name=run.folder.name).info.run_id
        settings = [
            mlflow.entities.Param(name, str(value)) for name, value in leaves(run.config.to_dict())
        ]
        for first in range(0, len(settings), _BATCH):
            client.log_batch(self.identifier, params=settings[first : first + _BATCH])

    def on_log(self, run: RunView, row: Row) -> None:
        now = int(1000 * time.time())
        values = {k: v for k, v in row.items() if v is not None}
        metrics = [self._metric(k, v, now, run.step) for k, v in values.items()]
        self._client.log_batch(self.identifier, metrics=metrics)

    def on_end(self, run: RunView, error: BaseException | None) -> None:
        stopped = "KILLED" if isinstance(error, SystemExit) else "FAILED"
        self._client.set_terminated(self.identifier, "FINISHED" if error is None else stopped)


class _Trackio(Callback):
    """A run of Trackio, in its own folder; a run of the same name is gone on with."""

    def on_start(self, run: RunView) -> None:
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(
            project=run.config.log.project,
            name=run.folder.name,
            config=run.config.to_dict(),
            resume="allow" if run.step else "never",
        )

    def on_log(self, run: RunView, row: Row) -> None:
        self._run.log({k: v for k, v in row.items() if v is not None}, step=run.step)

    def on_end(self, run: RunView, error: BaseException | None) -> None:
        self._run.finish()


_REPORTERS: dict[str, type[Callback]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "mlflow": _MLflow,
    "trackio": _Trackio,
}
"""By the name in ``log.reporters``, which is the library's."""


def reporters_of(log: LogSection) -> list[Callback]:
    """Return the reporters that ``log.reporters`` and ``log.tensorboard`` ask for.

    Raises:
        ConfigError: the library of one is not installed.
    """
    names = dict.fromkeys(["tensorboard"] * log.tensorboard + list(log.reporters))
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                "log.reporters", f"{name!r} is not installed; pip install {name}, or leave it out"
            )
    return [_REPORTERS[name]() for name in names]
