"""How far jobs that are files have come, in :mod:`moetrain.jobs.lessons` that do not change.

files/<name>/job.json        whether it is open, finished or failed
             settings.json   which job it is
             metrics.jsonl   a line a step
             checkpoints/    to go on from
             adapter/        in the end
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moetrain.config import ConfigError
from moetrain.jobs.durable import DamagedJob, read, write_durably
from moetrain.jobs.lessons import SETTINGS, Lessons
from moetrain.jobs.session import JobSession


class Course:
    """The :class:`moetrain.jobs.journal.Log` of a job that is a file: its steps, and its end.

    Attributes:
        is_hopeless: whether its last steps, ``train.max_bad_steps`` of them, were all skipped.
    """

    def __init__(self, lessons: Lessons, folder: Path) -> None:
        """Of the job in ``folder``; raises nothing before :meth:`look`."""
        self.config, self.folder, self.seed = lessons.config, folder, lessons.config.train.seed
        self._data = lessons.data
        self.total_steps = lessons.total_steps
        self._metrics = folder / "metrics.jsonl"
        self._skipped = self.done = 0
        self.accepted = self.total_steps + 1

    def look(self, seen: int) -> None:
        """As :meth:`moetrain.jobs.journal.Log.look`; ConfigError: it was begun as another."""
        self._check_same(self._data)
        rows = _whole_rows(self._metrics)
        for row in rows:
            self._count(row)
        self.done = len(rows)
        adapter = self.folder / "adapter" / "adapter_config.json"
        if len(rows) == self.total_steps and adapter.exists():
            self.done += 1

    def _check_same(self, data: str) -> None:
        """Refuse to go on with another job of the same name."""
        pairs = (name.split(".") for name in SETTINGS if name != "data.path")
        values = {f"{s}.{k}": getattr(getattr(self.config, s), k) for s, k in pairs}
        values["data.path"] = data  # known by its content
        path = self.folder / "settings.json"
        if not path.exists():
            write_durably(path, values)
        before = read(self.folder, path.name)
        for name, value in values.items():
            if before.get(name) != value:
                raise ConfigError(
                    "jobs.files",
                    f"{str(self.folder)!r} was begun with another {name}; put that back, or rename "
                    "the file to begin anew",
                )

    @property
    def is_hopeless(self) -> bool:
        return self._skipped >= self.config.train.max_bad_steps

    def _count(self, row: Mapping[str, Any]) -> None:
        self._skipped = self._skipped + 1 if row["skipped"] else 0

    def serve(self, number: int, session: JobSession) -> dict[str, Any]:
        return session.take(number)

    def serve_again(self, number: int, session: JobSession) -> None:
        session.take(number)

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        assert number == self.done
        if "error" in answer:  # it ends the job
            return
        if number < self.total_steps:
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(answer["result"], allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._count(answer["result"])
        self.done += 1

    def prune(self, seen: int) -> None:
        pass  # what is asked follows from the file


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of lines, from which half a line at its end is removed.

    Raises:
        DamagedJob: a line is no step's.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
    except (ValueError, RecursionError) as error:
        raise DamagedJob(path.name, error) from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or row.get("step") != number or "skipped" not in row:
            raise DamagedJob(path.name, f"line {number} is not that of step {number}")
    return rows
