"""Callback that logs a run's values to MLflow: an example of reporting to any service.

    from mlflow_reporter import MLflow

    Trainer(config, callbacks=[MLflow("my-experiment")]).fit()

or, with settings as ``python -m moetrain.train`` takes them:

    python examples/mlflow_reporter.py --model.path MODEL ...

MLFLOW_TRACKING_URI names a server; without it the run is in ``output_dir/mlflow.db``.
"""

import sys
import time
from typing import Any

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
from mlflow.tracking import is_tracking_uri_set  # pyright: ignore[reportMissingImports]

from moetrain.config import Config
from moetrain.config.sources import leaves
from moetrain.train.callbacks import Callback, Row, RunView
from moetrain.train.loop import Trainer

_BATCH = 100
"""The largest number of a run's parameters that MLflow takes at once."""


class MLflow(Callback):
    """Reports settings and logged values; a resumed run continues its record."""

    def __init__(self, experiment: str = "moetrain") -> None:
        self.experiment = experiment
        self.identifier: str | None = None

    def state(self) -> dict[str, Any]:
        return {"identifier": self.identifier} if self.identifier else {}

    def load_state(self, state: dict[str, Any]) -> None:
        self.identifier = state["identifier"]

    def on_start(self, run: RunView) -> None:
        if not run.world.is_main:
            return
        file = f"sqlite:///{run.folder.absolute()}/mlflow.db"
        self._client = client = MlflowClient(None if is_tracking_uri_set() else file)
        if self.identifier is not None:
            client.update_run(self.identifier, status="RUNNING")
            return
        found = client.get_experiment_by_name(self.experiment)
        number = found.experiment_id if found else client.create_experiment(self.experiment)
        self.identifier = client.create_run(number, run_name=run.folder.name).info.run_id
        settings = [Param(name, str(value)) for name, value in leaves(run.config.to_dict())]
        for first in range(0, len(settings), _BATCH):
            client.log_batch(self.identifier, params=settings[first : first + _BATCH])

    def on_log(self, run: RunView, row: Row) -> None:
        if run.world.is_main:
            now = int(1000 * time.time())
            values = {k: v for k, v in row.items() if v is not None and k != "step"}
            metrics = [Metric(k, v, now, run.step) for k, v in values.items()]
            self._client.log_batch(self.identifier, metrics=metrics)

    def on_end(self, run: RunView, error: BaseException | None) -> None:
        if run.world.is_main:
            stopped = "KILLED" if isinstance(error, SystemExit) else "FAILED"
            self._client.set_terminated(self.identifier, "FINISHED" if error is None else stopped)


if __name__ == "__main__":
    Trainer(Config.load(None, sys.argv[1:]), callbacks=[MLflow()]).fit()
