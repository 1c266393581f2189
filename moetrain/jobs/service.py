"""The service: whose turn it is, what becomes of it, and what survives.

    service.create(id, seed)    service.submit(id, kind, body)    ... from any thread
    while service.turn(): ...                                     one thread: a request at a time

Jobs with something to do take turns, one request each. A request is on the disk before its sender
is told so, and its answer before the next one runs: after a crash the next process goes on from
the newest checkpoint of each job and computes again what that checkpoint has not seen. An error
within a request is reported to its job, and the others stay as they were. The same holds for a
job's files: where one is damaged the job is set aside, with its folder as it is, until a service
is started that finds it put right. A write that fails ends the service.

Who knows a job's id may use it; ids are random, and nobody is told another's.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moetrain.config import Config, ConfigError
from moetrain.config.sources import RunFailed
from moetrain.jobs.durable import DamagedJob, read, write_durably
from moetrain.jobs.job import Job, Status, has_begun
from moetrain.jobs.journal import Full, Journal
from moetrain.jobs.requests import BadRequest, parse
from moetrain.jobs.session import Cancelled, JobSession
from moetrain.models.architecture import Architecture
from moetrain.train.run_folder import check_output_folder, claimed
from moetrain.train.setup import resolve_run

logger = logging.getLogger("moetrain")

ID = re.compile(r"[0-9a-f]{32}")
STOPPED = "the service was stopped; ask again when it runs"
REMOVED = ".removed"


class Unknown(LookupError):
    """There is no such job."""


class Service:
    """A session, and the jobs that take turns at it; as a library, see :meth:`ask`."""

    def __init__(self, config: Config) -> None:
        """Load the model and find the jobs that there are.

        Raises:
            ConfigError: as a run's, or the folder's jobs are of another model.
        """
        self.folder = Path(config.output_dir)
        check_output_folder(self.folder)
        config, arch = resolve_run(config)
        self._stack = ExitStack()
        with ExitStack() as stack:
            stack.enter_context(claimed(self.folder))
            self.session = JobSession(config, arch)
            self.config = self.session.config
            self._check_same_base(arch)
            self._lock = threading.Condition()
            self.jobs = {job.id: job for job in self._find()}
            self._stack = stack.pop_all()
        self.is_stopping: Callable[[], bool] = lambda: False
        """Whether the service is to end, asked while text is generated."""
        self._last: str | None = None
        self._removals: list[tuple[Job, Future[None]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Save what is in memory, and let the folder go."""
        try:
            self.tell_stopped()
            self._remove()
            self.session.put_all_away()
        finally:
            self._stack.close()

    def tell_stopped(self) -> None:
        """Answer everybody who waits that nothing will come for now."""
        with self._lock:
            for job in self.jobs.values():
                job.tell_waiting(STOPPED)

    def _check_same_base(self, arch: Architecture) -> None:
        """Refuse jobs that were trained beside other weights, or with adapters of another shape."""
        path, lora = self.folder / "base.json", self.config.lora
        mine = {
            "architecture": arch.model_dump(mode="json"),
            "frozen": self.session.fingerprint,
            "lora": lora.model_dump(mode="json", exclude={"save", "layout"}),
            "moments": self.config.optim.state_dtype,
        }
        if not path.exists():
            write_durably(path, mine)
        try:
            theirs = read(self.folder, path.name)
        except DamagedJob as error:
            raise ConfigError(
                "output_dir",
                f"in {str(self.folder)!r} {error}; put it back, or, where model, lora and "
                "optim.state_dtype are as they were for its jobs, remove it",
            ) from None
        settings = {"architecture": "model", "frozen": "model", "lora": "lora"}
        settings["moments"] = "optim.state_dtype"
        for key, setting in settings.items():
            if theirs.get(key) != mine[key]:
                raise ConfigError(
                    "output_dir",
                    f"{str(self.folder)!r} has jobs of another base ({key} differs); set {setting} "
                    "as it was, or choose another folder",
                )

    def _find(self) -> list[Job]:
        """The jobs of clients, as they were left."""
        root = self.folder / "jobs"
        root.mkdir(mode=0o700, exist_ok=True)
        found = []
        for folder in sorted(root.iterdir()):
            if folder.name.startswith(REMOVED):
                shutil.rmtree(folder, ignore_errors=True)
            elif ID.fullmatch(folder.name) and folder.is_dir() and has_begun(folder):
                found.append(Job(folder.name, folder, Journal(folder)))
                self._look(found[-1])
        return found

    def _look(self, job: Job) -> None:
        try:
            job.look()
        except DamagedJob as error:
            self._set_aside(job, str(error))

    def _set_aside(self, job: Job, error: str) -> None:
        """Serve ``job`` no more, and leave all that it has as it is.

        Not on the disk: the next start, with other settings or a folder put right, may do it.
        """
        with self._lock:
            job.status, job.error = "failed", error
            job.tell_waiting(error)
        logger.warning("job %s is set aside, with its folder as it is: %s", job.label, error)

    # ---- for clients, from any thread ----------------------------------------------------------

    def create(self, name: str | None = None, seed: int = 0) -> dict[str, Any]:
        """A new job; ``name``, 32 hexadecimal digits, makes it safe to ask again.

        Raises:
            BadRequest: no such name, or a job of that name has another seed.
            Full: there are as many jobs as may be, or one of that name is being deleted.
            OSError: the disk does not take it, and there is no such job.
        """
        name = secrets.token_hex(16) if name is None else name
        if not ID.fullmatch(name):
            raise BadRequest("id is not 32 hexadecimal digits (of a random number that is secret)")
        if not 0 <= seed < 2**63:
            raise BadRequest(f"seed {seed!r:.40} is out of range")
        with self._lock:
            job = self.jobs.get(name)
            if job is None:
                job = self._make(name, seed)
            elif job.seed not in (None, seed):
                raise BadRequest(f"this job has seed {job.seed}")
            return job.describe()

    def _make(self, name: str, seed: int) -> Job:
        most = self.config.jobs.max_jobs
        if len(self.jobs) >= most:
            raise Full(f"there are {most} jobs, as many as jobs.max_jobs; delete some")
        if any(job.id == name for job, _ in self._removals):  # whose folder is still there
            raise Full("the job of this id is being deleted; ask again when it is")
        folder = self.folder / "jobs" / name
        folder.mkdir(exist_ok=True)
        job = Job(name, folder, Journal(folder), seed)
        job.log.look(0)
        job.note("open")
        self.jobs[name] = job
        return job

    def _of(self, name: str) -> Job:
        job = self.jobs.get(name)
        if job is None:
            raise Unknown(name)
        return job

    def describe(self, name: str) -> dict[str, Any]:
        """How a job is doing; raises Unknown."""
        with self._lock:
            return self._of(name).describe()

    def submit(self, name: str, kind: str, body: object, number: int | None = None) -> int:
        """Take up a request, which is on the disk when this returns; its number.

        Args:
            number: which one of the job's it is, so that it can be sent again; None: the next.

        Raises:
            BadRequest, Full, Unknown: it is not taken up.
        """
        self.describe(name)  # before work is put into it
        text = parse(kind, body, self.session.limits).model_dump_json()
        with self._lock:
            job = self._of(name)
            job.check_open()
            taken = job.log.add(kind, text, number, most=self.config.jobs.max_queued)
            self._lock.notify()
            return taken

    def answer(self, name: str, number: int) -> Future[dict[str, Any]]:
        """What comes of a request: ``result`` or ``error``.

        Raises:
            BadRequest: there was no such request, or it was too long ago.
            Unknown: there is no such job.
        """
        with self._lock:
            job = self._of(name)
            if not 0 <= number < job.log.accepted:
                job.check_open()
                raise BadRequest(f"there was no request {number}; the next is {job.log.accepted}")
            if number >= job.log.done and job.status == "open":
                return job.waiting.setdefault(number, Future())
            future: Future[dict[str, Any]] = Future()
            answer = {"error": job.error or job.status}
            if number < job.log.done:
                try:
                    answer = job.log.answer_of(number)
                except DamagedJob as error:  # which the job need not know, as long as it is loaded
                    logger.warning("job %s: %s", job.label, error)
                    answer = {"error": str(error)}
            future.set_result(answer)
            return future

    def cancel(self, name: str) -> dict[str, Any]:
        """Give up what a job has waiting, and take up nothing more; raises Unknown."""
        with self._lock:
            job = self._of(name)
            if job.status == "open":
                self._end(job, "cancelled")
            return job.describe()

    def delete(self, name: str) -> Future[None]:
        """Remove a job and all that it has; it is done when the future is. Raises Unknown."""
        with self._lock:
            job = self.jobs[name] = self._of(name)
            if job.status == "open":
                try:
                    self._end(job, "cancelled")
                except OSError:  # a full disk keeps nobody from making room
                    job.status = "cancelled"
                    job.tell_waiting(job.status)
            del self.jobs[name]
            future: Future[None] = Future()
            future.set_running_or_notify_cancel()  # who does not wait any more cannot stop it
            self._removals.append((job, future))
            self._lock.notify()
            return future

    def saved_file(self, name: str, save: str, file: str) -> Path:
        """A file of a save's adapter, in PEFT's format; raises Unknown."""
        with self._lock:
            path = self._of(name).folder / "saves" / save / "adapter" / file
            # Names are those of the routes, which have no way out of the folder.
            if not path.is_file():
                raise Unknown(name)
            return path

    def _end(self, job: Job, status: Status, error: str | None = None) -> None:
        """Let ``job`` be over; with the lock."""
        job.note(status, error)
        job.tell_waiting(error or status)

    # ---- the worker's thread -------------------------------------------------------------------

    def turn(self) -> bool:
        """Do what is next: one request. Not: there is nothing to do.

        Raises:
            RunFailed, OSError: the disk does not take what must be kept.
        """
        self._remove()
        with self._lock:
            job = self._next()
        if job is None:
            return False
        assert job.seed is not None  # else it was set aside
        try:
            self.session.sit(job.id, job.seed, str(job.folder))
            if not self._catch_up(job):
                return True
        except (RunFailed, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            self.session.probe()
            self.session.forget(job.id)
            self._set_aside(job, f"it could not be brought back: {_line_of(error)}")
            return True
        try:
            self._serve(job)
        except DamagedJob as error:
            self.session.forget(job.id)
            self._set_aside(job, str(error))
        return True

    def _next(self) -> Job | None:
        """The first that has work, behind the one that was served last."""
        jobs = list(self.jobs.values())
        names = [job.id for job in jobs]
        start = names.index(self._last) + 1 if self._last in names else 0
        job = next((job for job in jobs[start:] + jobs[:start] if job.has_work), None)
        self._last = job.id if job else self._last
        return job

    def _catch_up(self, job: Job) -> bool:
        """Do again what was done and is in no checkpoint. Not: the job was given up meanwhile."""
        while self.session.progress.seen < job.log.done:
            if self._is_given_up(job):
                return False
            job.log.serve_again(self.session.progress.seen, self.session)
        return True

    def _serve(self, job: Job) -> None:
        number, session = job.log.done, self.session
        try:
            session.is_given_up = partial(self._is_given_up, job)
            answer: dict[str, Any] = {"result": job.log.serve(number, session)}
        except (RunFailed, OSError, DamagedJob):
            raise
        except Cancelled:
            session.forget(job.id)
            return
        except BadRequest as error:
            answer = {"error": str(error), "refused": True}
            session.pass_over(number)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            answer = {"error": _line_of(error), "refused": False}
            session.forget(job.id)
            logger.warning("job %s, request %d: %s", job.label, number, answer["error"])
        with self._lock:
            try:
                job.log.answer(number, answer)
            except OSError:  # a checkpoint at the end must not have seen what has no answer
                session.forget(job.id)
                raise
            future = job.waiting.pop(number, None)
        if "error" in answer:
            session.probe()
        if session.job == job.id and self._is_due(job):
            session.save()
            job.saved_time = time.monotonic()
            with self._lock:
                job.log.prune(session.oldest_saved)
        if future is not None:
            future.set_result(answer)

    def _is_given_up(self, job: Job) -> bool:
        return job.status != "open" or self.is_stopping()

    def _is_due(self, job: Job) -> bool:
        new = self.session.progress.seen - self.session.saved
        seconds = 60 * self.config.checkpoint.minutes
        by_time = 0 < seconds <= time.monotonic() - job.saved_time
        is_due = new >= self.config.jobs.save_interval or by_time
        return new > 0 and is_due and self.session.engine.is_between_steps

    def wait(self, seconds: float) -> None:
        """Return when there may be something to do, or after so many seconds."""
        with self._lock:
            if not self._removals and not any(job.has_work for job in self.jobs.values()):
                self._lock.wait(seconds)

    def _remove(self) -> None:
        """Remove those that are to be."""
        while self._removals:
            job, future = self._removals[0]
            self.session.forget(job.id)
            gone = job.folder.with_name(f"{REMOVED}-{job.id}")
            job.folder.rename(gone)
            shutil.rmtree(gone)
            with self._lock:  # until now its name is taken
                del self._removals[0]
            future.set_result(None)

    def ask(self, name: str, kind: str, body: object, number: int | None = None) -> dict[str, Any]:
        """:meth:`submit`, and take turns until the answer is there; for one thread."""
        future = self.answer(name, self.submit(name, kind, body, number))
        while not future.done():
            self.turn()
        return future.result()


def _line_of(error: Exception) -> str:
    """One line for a client; an error of ours speaks for itself, another has its class."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
