"""A job, as the service knows it: how it is, who waits for it, and what of that is on the disk."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from moetrain.checkpoint.format import list_checkpoints, step_of
from moetrain.jobs.durable import DamagedJob, read, write_durably
from moetrain.jobs.journal import Journal
from moetrain.jobs.requests import BadRequest
from moetrain.train.run_folder import CHECKPOINTS

JOB = "job.json"
Status = Literal["open", "cancelled", "failed"]


@dataclass(eq=False)
class Job:
    """One job, in memory."""

    id: str
    folder: Path
    log: Journal
    seed: int | None = None
    """None: its file that says so is damaged."""
    status: Status = "open"
    error: str | None = None
    waiting: dict[int, Future[dict[str, Any]]] = field(default_factory=dict)
    """Those who wait for an answer."""
    saved_time: float = field(default_factory=time.monotonic)
    """When it was saved, or found."""

    @property
    def label(self) -> str:
        """For the service's log, which is not to know the ids that clients keep secret."""
        return self.id[:8]

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something."""
        return self.status == "open" and self.log.done < self.log.accepted

    def look(self) -> None:
        """Find on the disk how it was left.

        Raises:
            DamagedJob: a file is not what it should be, or missing.
        """
        try:
            known = read(self.folder, JOB, seed=int, status=str, error=(str, NoneType))
            if len(known) != 3 or known["status"] not in get_args(Status):
                raise DamagedJob(JOB, "it is not what this version of moetrain writes")
            self.seed, self.status, self.error = known["seed"], known["status"], known["error"]
            (self.folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            steps = map(step_of, list_checkpoints(self.folder / CHECKPOINTS))
            seen = max(filter(None, steps), default=0)
            self.log.look(seen)
        except OSError as error:
            name = Path(os.fsdecode(error.filename or "")).name
            raise DamagedJob(f"its folder ({name})", error.strerror) from None
        if seen > self.log.done:
            raise DamagedJob("its log", f"a checkpoint has seen {seen} requests of {self.log.done}")

    def note(self, status: Status, error: str | None = None) -> None:
        """Be so, on the disk first; OSError: it is as it was."""
        value = {"seed": self.seed, "status": status, "error": error}
        write_durably(self.folder / JOB, value)
        self.status, self.error = status, error

    def check_open(self) -> None:
        """Raise BadRequest unless it is."""
        if self.status != "open":
            raise BadRequest(f"this job is {self.status}" + (f": {self.error}" * bool(self.error)))

    def describe(self) -> dict[str, Any]:
        """For its client."""
        waiting = self.log.accepted - self.log.done if self.status == "open" else 0
        return {
            "id": self.id,
            "status": self.status,
            "error": self.error,
            "seed": self.seed,
            "next_number": self.log.accepted,
            "waiting": waiting,
        }

    def tell_waiting(self, error: str) -> None:
        """Answer everybody who waits, since nothing more will come."""
        for future in self.waiting.values():
            future.set_result({"error": error})
        self.waiting.clear()


def has_begun(folder: Path) -> bool:
    """Whether a job is in ``folder``; not: a service died before it told anybody of one."""

    def fail(error: OSError) -> None:
        raise error

    try:
        walk = os.walk(folder, onerror=fail)
        return any(not name.startswith(".") for _, _, names in walk for name in names)
    except OSError:  # what it is shows when it is looked at
        return True
