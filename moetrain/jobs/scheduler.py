"""The service: which job is served next, what happens on an error, and what survives a crash.

    service.create(id, seed)    service.submit(id, kind, body)    ... from any thread
    while service.turn(): ...                                     one thread: a request at a time

Jobs with something to do take turns, one request each. A request is on the disk before its sender
is told so, and its answer before the next one runs: after a crash the next process goes on from
the newest checkpoint of each job and computes again what that has not seen. An error within a
request, or a damaged file, costs its own job alone. A write that fails ends the service.
"""

import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from moetrain.config import Config, logger
from moetrain.config.sources import RunFailed
from moetrain.jobs.api import KINDS, Refused
from moetrain.jobs.session import JobSession
from moetrain.jobs.store import DamagedJob, Job, check_base
from moetrain.train.run_folder import RunFolder
from moetrain.train.setup import resolve_run

_ID = re.compile(r"[0-9a-f]{32}")
_REMOVED = ".removed"


class Service(AbstractContextManager["Service"]):
    """A session and the jobs that take turns at it. For use without HTTP, see :meth:`ask`."""

    STOPPED = "the service was stopped; ask again when it runs"
    """The error of requests that had no answer when it ended."""

    def __init__(self, config: Config) -> None:
        """Load the model, and the folder's jobs; ConfigError if those are of another model."""
        self.folder = Path(config.output_dir)
        folder = RunFolder(self.folder)
        folder.check_usable()
        config, arch = resolve_run(config)
        with ExitStack() as stack:
            stack.enter_context(folder.claimed())
            self.session = JobSession(config, arch)
            self.config = self.session.config
            base = {
                "architecture": arch.model_dump(mode="json"),
                "frozen": self.session.fingerprint,
                "lora": self.config.lora.model_dump(mode="json", exclude={"save", "layout"}),
                "moments": self.config.optim.state_dtype,
            }
            check_base(self.folder, base)
            self._lock = threading.Condition()
            self.jobs = {job.id: job for job in self._find()}
            """Who was served last, or came last, is last."""
            self._stack = stack.pop_all()
        self.is_stopping: Callable[[], bool] = lambda: False
        """Called while text is generated: whether the service is to stop."""
        self._removals: list[tuple[Job, Future[None]]] = []

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Save all jobs in memory, and release the folder."""
        try:
            self.tell_stopped()
            self._remove()
            self.session.put_all_away()
        finally:
            self._stack.close()

    def tell_stopped(self) -> None:
        with self._lock:
            for job in self.jobs.values():
                job.tell_waiting(self.STOPPED)

    def _find(self) -> list[Job]:
        root = self.folder / "jobs"
        root.mkdir(mode=0o700, exist_ok=True)
        found = []
        for folder in sorted(root.iterdir()):
            if folder.name.startswith(_REMOVED):
                shutil.rmtree(folder, ignore_errors=True)
            elif _ID.fullmatch(folder.name) and folder.is_dir() and Job(folder).has_begun:
                found.append(Job(folder))
                try:
                    found[-1].look()
                except DamagedJob as error:
                    self._set_aside(found[-1], str(error))
        return found

    def _set_aside(self, job: Job, error: str) -> None:
        """Stop serving ``job``, and leave its folder as it is."""
        self.session.forget(job.id)
        with self._lock:  # not written down: the next start may find it put right
            job.status = "failed"
            job.error = error
            job.tell_waiting(error)
        logger.warning("job %s is set aside, with its folder as it is: %s", job.label, error)

    # ---- for clients, from any thread ----------------------------------------------------------

    def create(self, name: str | None = None, seed: int = 0) -> dict[str, Any]:
        """Make a new job; ``name``, 32 hexadecimal digits, makes it safe to ask again.

        Raises:
            Refused: ``name`` or ``seed`` is not valid, the job has another seed or is being
                deleted, or there are ``jobs.max_jobs`` already.
            OSError: it cannot be written, and there is no such job.
        """
        name = secrets.token_hex(16) if name is None else name
        if not _ID.fullmatch(name):
            raise Refused("id is not 32 hexadecimal digits (of a random number that is secret)")
        if not 0 <= seed < 2**63:
            raise Refused(f"seed {seed!r:.40} is out of range")
        with self._lock:
            job, most = self.jobs.get(name), self.config.jobs.max_jobs
            if job is None:
                if len(self.jobs) >= most:
                    problem = f"there are {most} jobs, as many as jobs.max_jobs; delete some"
                    raise Refused(problem, 429)
                if any(job.id == name for job, _ in self._removals):  # whose folder is still there
                    raise Refused("the job of this id is being deleted; ask again when it is", 429)
                job = Job(self.folder / "jobs" / name, seed)
                job.begin()
                self.jobs[name] = job
            elif job.seed not in (None, seed):
                raise Refused(f"this job has seed {job.seed}")
            return job.describe()

    def _of(self, name: str) -> Job:
        if name not in self.jobs:
            raise Refused("there is no such thing", 404)
        return self.jobs[name]

    def describe(self, name: str) -> dict[str, Any]:
        """Describe a job to its client. This and all below raise Refused where there is none."""
        with self._lock:
            return self._of(name).describe()

    def submit(self, name: str, kind: str, body: object, number: int | None = None) -> int:
        """Take up a request and return its number. It is on the disk when this returns.

        ``number``: the place in the job's order that the client gives it, so that it can be sent
        again; None: the next.

        Raises Refused: it is not taken up.
        """
        self.describe(name)  # raises Refused before the body is parsed
        text = self.session.limits.parse(kind, body).model_dump_json()
        with self._lock:
            job = self._of(name)
            job.check_open()
            taken = job.add(kind, text, number, most=self.config.jobs.max_queued)
            self._lock.notify()
            return taken

    def answer(self, name: str, number: int) -> Future[dict[str, Any]]:
        """Return a future of a request's ``result`` or ``error``.

        Refused: there was no such request, or it was too long ago.
        """
        with self._lock:
            job = self._of(name)
            if not 0 <= number < job.accepted:
                job.check_open()
                raise Refused(f"there was no request {number}; the next is {job.accepted}")
            if number >= job.done and job.status == "open":
                return job.waiting.setdefault(number, Future())
            answer = {"error": job.error or job.status}
            if number < job.done:
                try:
                    answer = job.answer_of(number)
                except DamagedJob as error:  # the job itself can go on
                    logger.warning("job %s: %s", job.label, error)
                    answer = {"error": str(error)}
            future: Future[dict[str, Any]] = Future()
            future.set_result(answer)
            return future

    def cancel(self, name: str) -> dict[str, Any]:
        """Cancel a job's waiting requests, and take up no more."""
        with self._lock:
            job = self._of(name)
            if job.status == "open":
                job.note("cancelled")
                job.tell_waiting("cancelled")
            return job.describe()

    def delete(self, name: str) -> Future[None]:
        """Remove a job and its files; the future is done when they are gone."""
        with self._lock:
            job = self._of(name)
            if job.status == "open":
                try:
                    job.note("cancelled")
                except OSError:  # a full disk must not keep anybody from making room
                    job.status = "cancelled"
                job.tell_waiting("cancelled")
            del self.jobs[name]
            future: Future[None] = Future()
            future.set_running_or_notify_cancel()  # a client that leaves cannot stop it
            self._removals.append((job, future))
            self._lock.notify()
            return future

    def saved_file(self, name: str, save: str, file: str) -> Path:
        """Return the path of a file of a save's adapter, in PEFT's format."""
        with self._lock:
            path = self._of(name).folder / "saves" / save / "adapter" / file
            # The routes let no name through that leads out of the folder.
            if not path.is_file():
                raise Refused("there is no such thing", 404)
            return path

    def ask(self, name: str, kind: str, body: object, number: int | None = None) -> dict[str, Any]:
        """Submit a request and take turns until its answer is there, all from one thread."""
        future = self.answer(name, self.submit(name, kind, body, number))
        while not future.done():
            self.turn()
        return future.result()

    # ---- the worker's thread -------------------------------------------------------------------

    def turn(self) -> bool:
        """Serve one request; False: none waits. RunFailed, OSError: device or disk failed."""
        self._remove()
        with self._lock:
            job = next((job for job in self.jobs.values() if job.has_work), None)
            if job is None:
                return False
            self.jobs[job.id] = self.jobs.pop(job.id)  # behind all others
        assert job.seed is not None  # else it was set aside
        try:
            self.session.sit(job.id, job.seed, str(job.folder))
            while self.session.now.seen < job.done:  # what is in no checkpoint
                if self._is_given_up(job):
                    return True
                self._serve_again(job, self.session.now.seen)
        except (RunFailed, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            self.session.probe()
            self._set_aside(job, f"it could not be brought back: {_line_of(error)}")
            return True
        try:
            self._serve(job)
        except DamagedJob as error:
            self._set_aside(job, str(error))
        return True

    def _serve_again(self, job: Job, number: int) -> None:
        """Bring ``job`` to where it was after request ``number``, which has an answer."""
        answer = job.answer_of(number)
        if "result" in answer and KINDS[answer["kind"]].changes:
            self.session.serve(number)
        else:
            self.session.pass_over(number, "error" in answer and not answer["refused"])

    def _serve(self, job: Job) -> None:
        number, session = job.done, self.session
        session.is_given_up = partial(self._is_given_up, job)
        try:
            result = session.serve(number)
            if result is None:  # it was given up
                session.forget(job.id)
                return
            answer: dict[str, Any] = {"result": result}
        except (RunFailed, OSError, DamagedJob):
            raise
        except Refused as error:
            answer = {"error": str(error), "refused": True}
            session.pass_over(number, False)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            answer = {"error": _line_of(error), "refused": False}
            session.forget(job.id)
            logger.warning("job %s, request %d: %s", job.label, number, answer["error"])
        with self._lock:
            try:
                job.answer(number, answer)
            except OSError:  # a checkpoint at the end must not have seen what has no answer
                session.forget(job.id)
                raise
            future = job.waiting.pop(number, None)
        if "error" in answer:
            session.probe()
        new, seconds = session.now.seen - session.now.saved, 60 * self.config.checkpoint.minutes
        by_time = 0 < seconds <= time.monotonic() - job.saved_time
        is_due = new > 0 and (by_time or new >= self.config.jobs.save_interval)
        if session.now.id == job.id and is_due and session.engine.is_between_steps:
            session.save()
            job.saved_time = time.monotonic()
            with self._lock:
                job.prune(session.oldest_saved)
        if future is not None:
            future.set_result(answer)

    def _is_given_up(self, job: Job) -> bool:
        return job.status != "open" or self.is_stopping()

    def wait(self, seconds: float) -> None:
        """Return when a request or a removal waits, or after ``seconds``."""
        with self._lock:
            if not self._removals and not any(job.has_work for job in self.jobs.values()):
                self._lock.wait(seconds)

    def _remove(self) -> None:
        while self._removals:
            job, future = self._removals[0]
            self.session.forget(job.id)
            gone = job.folder.with_name(f"{_REMOVED}-{job.id}")
            job.folder.rename(gone)
            shutil.rmtree(gone)
            with self._lock:  # only now may another job take its name
                del self._removals[0]
            future.set_result(None)


def _line_of(error: Exception) -> str:
    """Describe ``error`` in one line for a client, with its class unless the message is ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
