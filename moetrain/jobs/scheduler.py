"""The service: which job is served next, what happens on an error, and what survives a crash.

    service.create(id, seed)    service.submit(id, kind, body)    ... from any thread
    while service.turn(): ...                                     one thread

Jobs with waiting requests take turns, training runs and samplers alike. A turn serves one of these:

- one request,
- all requests that wait at a sampler, whose texts are generated together,
- small requests of several jobs, a *batch*.

A turn has begun when all of its work is queued for the device. It is finished when its answers are
on the disk and sent. One thread finishes all turns, in order. A pass or an update begins before
earlier turns are finished, so that the device does not wait for the host. Any other request begins
when no turn is unfinished.

A request is on the disk before its sender knows that it was accepted. An answer is on the disk
before its client gets it, and before a checkpoint includes its request. So after a crash the next
process goes on from the newest checkpoint of each job and serves later requests again. An error
within a request, or a damaged file, affects only its own job. A write that fails ends the service.
"""

import math
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from os.path import dirname
from pathlib import Path
from typing import Any, NamedTuple

from moetrain.config import Config, logger
from moetrain.config.sources import RunFailed, shortened
from moetrain.jobs.api import (
    JOB_ID,
    KINDS,
    Forward,
    ForwardBackward,
    JobRequest,
    OptimStep,
    Pass,
    Refused,
    SaveForSampler,
)
from moetrain.jobs.session import JobSession
from moetrain.jobs.store import SAMPLERS, DamagedJob, Job, Sampler, SaveFolder, check_base
from moetrain.runtime.memory import LateValues
from moetrain.train.run_folder import RunFolder
from moetrain.train.session import resolve_run

_REMOVED = ".removed"
"""Beginning of the names of folders that are being removed."""
_LateAnswer = Callable[[], dict[str, Any]]
"""Waits for the device, and returns the answer: its ``result``, or its ``error``."""
_Answers = Mapping[Job, Sequence[_LateAnswer]]
"""Answers to the next requests of each job."""
_BATCHED = (Forward, ForwardBackward, OptimStep)
"""Types of requests that may share a turn with others of their type."""
_MOST_UNFINISHED = 2
"""Most turns that stay unfinished: a pass and its update. An update alone is too short to hide the
host's work."""
_POLL_SECONDS = 5e-4
"""Seconds between two checks whether the device has computed a turn, while no turn can begin."""
LONGEST_WAIT = 0.5
"""Most seconds that a pass waits, on an idle device, for the jobs of the last batch."""


class Turn(NamedTuple):
    """A turn that has begun."""

    mark: LateValues
    """Ready when the device has computed the turn."""
    finished: Future[None]
    """Done when the turn's answers are on the disk and sent; if that fails, it has the error."""


class Service(AbstractContextManager["Service"]):
    """A session and the jobs that take turns at it.

    Attributes:
        jobs: by id, the least recently served first.
        unfinished: turns that have begun and are not finished, in order.
        pass_seconds: seconds that beginning the last pass of several jobs took.
    """

    STOPPED = "the service was stopped; ask again when it runs"
    """The error of requests that had no answer when the service ended."""

    def __init__(self, config: Config) -> None:
        """Load the model, and the jobs in the output folder.

        Raises ConfigError: the settings do not fit, or the jobs depend on another model.
        """
        self.folder = Path(config.output_dir)
        folder = RunFolder(self.folder)
        folder.check_usable()
        config, arch = resolve_run(config)
        with ExitStack() as stack:
            stack.enter_context(folder.claimed())
            self.session = JobSession(config, arch)
            self.config = self.session.config
            kinds = {"architecture": type(arch), "lora": type(config.lora)}
            check_base(self.folder, self.session.base, kinds)
            self._lock = threading.Condition()
            self._last_batch, self.pass_seconds = set[Job](), 0.0
            self._wait_until = math.inf
            """Time until which the next pass waits for jobs of the last batch."""
            self.unfinished: list[Turn] = []
            self.jobs = {job.id: job for job in self._read_jobs()}
            self._writers = stack.enter_context(ThreadPoolExecutor())
            self._finisher = stack.enter_context(ThreadPoolExecutor(1))
            self._stack = stack.pop_all()
        self.is_stopping: Callable[[], bool] = lambda: False
        """Called while text is generated. True: the service is to stop."""
        self._is_stopped = False
        self.removals: list[tuple[Job, Future[None]]] = []
        """Jobs to remove, and futures that are done when they are gone."""
        self._removed_saves: list[SaveFolder] = []
        """Folders of removed saves, to be cleared."""

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Save all jobs in memory, and release the folder."""
        try:
            self.refuse_waiting()
            self._remove()
            self.drain()
            for job in [job for job in self.jobs.values() if job.begun != job.done]:
                self.session.forget(job.id)  # no checkpoint may include a request without answer
            self.session.evict_all()
        finally:
            self.release()

    def release(self) -> None:
        """End the threads and release the folder, without saving."""
        self._stack.close()

    def refuse_waiting(self) -> None:
        """Answer all clients that wait, and all that ask from now on, that the service stops."""
        with self._lock:
            self._is_stopped = True
            for job in self.jobs.values():
                job.fail_waiting(self.STOPPED)

    def _read_jobs(self) -> list[Job]:
        root = self.folder / "jobs"
        root.mkdir(mode=0o700, exist_ok=True)
        found = []
        for folder in sorted(root.iterdir()):
            if folder.name.startswith(_REMOVED):
                shutil.rmtree(folder, ignore_errors=True)
            elif Job(folder).is_removed:  # a service was killed before it had removed the job
                job = Job(folder)
                with suppress(DamagedJob):
                    job.load()
                self._remove_files(job)
            elif JOB_ID.fullmatch(folder.name) and folder.is_dir() and Job(folder).has_files:
                found.append(Job(folder))
                found[-1].clear_removed_saves()
                try:
                    found[-1].load()
                except DamagedJob as error:
                    self._set_aside(found[-1], str(error))
        return found

    def _set_aside(self, job: Job, error: str) -> None:
        """Stop serving ``job``, and leave its folder as it is."""
        self.drain()  # its earlier turns still get their answers
        self.session.forget(job.id)
        with self._lock:  # not written to disk: the job may be repaired before the next start
            job.status = "failed"
            job.error = error
            job.fail_waiting(error)
        logger.warning("job %s is served no more; its folder stays as it is: %s", job.label, error)

    # ---- for clients, from any thread ----------------------------------------------------------

    def create(self, name: str, seed: int | None = 0, source: str | None = None) -> Job:
        """Create a job with the id ``name``, or return the job if an equal call has created it.

        Args:
            seed: None: it follows from ``name``.
            source: a save, as a path under the folder of jobs. A sampler generates with its
                weights; a run loads it by its first request. None: the weights that all jobs begin
                with.

        Raises:
            Refused: ``name``, ``seed`` or ``source`` is not valid; the job has another seed or
                source, or is being deleted; or there are ``jobs.max_jobs`` jobs already.
            OSError: the job cannot be written, and does not exist.
        """
        if not JOB_ID.fullmatch(name):
            raise Refused(f"{shortened(name)} cannot be the id of a job")
        seed = zlib.crc32(name.encode()) if seed is None else seed
        if not 0 <= seed < 2**63:
            raise Refused(f"seed {seed!r:.40} is not from 0 to 2^63 - 1")
        root = self.folder / "jobs"
        with self._lock:
            job, most = self.jobs.get(name), self.config.jobs.max_jobs
            if job is None:
                if source is not None:  # with its step: another save may get the same name
                    source = str(SaveFolder(root / source).checkpoint().relative_to(root))
                job = Job(root / name, seed, source=source)
                if job.is_sampler:
                    self._make_room(job.session)
                if sum(job.status != "finished" for job in self.jobs.values()) >= most:
                    raise Refused(
                        f"there are {most} jobs, as many as jobs.max_jobs; delete some", 429
                    )
                if any(job.id == name for job, _ in self.removals):  # its folder is still there
                    raise Refused("the job of this id is being deleted; ask again later", 429)
                job.create()
                self.jobs[name] = job
            elif job.seed not in (None, seed) or source not in (None, dirname(job.source or "")):
                raise Refused(f"a job of this id exists, with seed {job.seed} or another source")
            return job

    def _make_room(self, session: str) -> None:
        """Remove the sampler of ``session`` that was idle for longest if it has ``jobs.max_saves``.

        Raises Refused: all of them are at work.
        """
        mine = [x for x in self.jobs.values() if x.session == session and x.is_sampler]
        if len(mine) >= self.config.jobs.max_saves:
            if not (idle := [x for x in mine if x.status != "open" or x.done == x.accepted]):
                raise Refused(
                    f"{len(mine)} samplers of this session are at work already; ask again later",
                    429,
                )
            self.delete(idle[0].id)

    def finish(self, session: str) -> list[Future[None]]:
        """End the jobs of a session. Runs that have saves keep them; other jobs are removed.

        Returns futures that are done when the removed jobs are gone (:meth:`delete`).
        """
        with self._lock:
            mine = [job for job in self.jobs.values() if job.session == session]
            for job in mine:
                if job.saves:
                    self.end(job.id)
            return [self.delete(job.id) for job in mine if not job.saves]  # samplers have none

    def end(self, name: str) -> None:
        """Drop a job's waiting requests, and accept no more.

        Raises OSError: this cannot be written to the disk, and the job goes on.
        """
        with self._lock:
            job = self.find(name)
            if job.status == "open":
                job.set_status("finished")
                job.fail_waiting("finished")

    def folder_of(self, name: str, save: str) -> Path:
        """Return the folder of a save; Refused: there is none."""
        if save not in self.find(name).saves:
            raise Refused("there is no such save", 404)
        return self.find(name).folder / save

    def remove_save(self, name: str, save: str) -> None:
        """Remove a save; Refused: there is none. With its last save a finished run is deleted."""
        with self._lock:
            folder, job = SaveFolder(self.folder_of(name, save)), self.find(name)
            if job.status == "finished" and set(job.saves) == {save}:
                self.delete(name)  # at once: a kill must not leave a run without a save
            else:
                folder.unmark()  # its files go between turns: a turn may write a new save there
                self._removed_saves.append(folder)
                self._lock.notify()

    def find(self, name: str) -> Job:
        """Return a job. This method, and each that takes the name of a job, raises Refused if there
        is none; only :meth:`create` does not."""
        if (job := self.jobs.get(name)) is None:
            raise Refused("there is no such job", 404)
        return job

    def submit(self, name: str, kind: str, body: object, number: int | None = None) -> int:
        """Parse and :meth:`accept` a request; Refused: it cannot be served."""
        job = self.find(name)  # raises Refused before the body is parsed
        if job.is_sampler is not (kind == "asample"):
            raise Refused(f"{shortened(kind)} is not a request to this kind of job")
        return self.accept(name, self.session.limits.parse(kind, body), number)

    def accept(self, name: str, request: JobRequest, number: int | None = None) -> int:
        """Write a request to a job to the disk, and return its number.

        ``number``: the client's number of the request, under which it can be sent again; None: the
        next. To a run it is the place of the request in the order. To a sampler it is any number.

        Raises Refused: the request is not accepted.
        """
        job, engine = self.find(name), self.session.engine
        is_small = isinstance(request, OptimStep)
        if isinstance(request, Pass):
            is_small = request.fits(engine.part_rows, engine.part_seq_len)
        with job.adding:  # clients of other jobs do not wait for its disk
            job.check_open()
            most = self.config.jobs.max_queued
            accepted = job.accept(request, number, is_small=is_small, max_queued=most)
        with self._lock:
            self._lock.notify()
        return accepted

    def answer(self, name: str, number: int) -> Future[dict[str, Any]]:
        """Return a future of a request's ``result`` or ``error``.

        Refused: there was no such request, or its answer is no longer kept.
        """
        with self._lock:
            job = self.find(name)
            if not 0 <= number < job.accepted:
                job.check_open()
                raise Refused(f"there was no request {number}; the next is {job.accepted}")
            if number >= job.done and job.status == "open":
                if self._is_stopped:
                    raise Refused(self.STOPPED, 503)
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

    def delete(self, name: str) -> Future[None]:
        """Remove a job and its files; the future is done when they are gone.

        When this returns, a mark is on the disk, unless writing fails. If this process is killed,
        the next service removes what is left of a marked job.
        """
        with self._lock:
            job = self.find(name)
            try:
                job.mark_removed()
                self.end(name)
            except OSError:  # a full disk must not keep anybody from making room
                job.status = "finished"
                job.fail_waiting("finished")
            del self.jobs[name]
            future: Future[None] = Future()
            future.set_running_or_notify_cancel()  # a client that leaves cannot stop it
            self.removals.append((job, future))
            self._lock.notify()
            return future

    # ---- the worker's thread -------------------------------------------------------------------

    def turn(self) -> bool:
        """Begin the next turn, and wait for those before it that may not stay unfinished.

        Returns False if there is nothing to do. Raises RunFailed or OSError: the device or the disk
        has failed, in this turn or one before it.
        """
        self._remove()
        # 1. Choose the jobs.
        with self._lock:
            waiting = [job for job in self.jobs.values() if job.has_work]
            has_more = bool(waiting or self.unfinished)
            kind, jobs = self._choose(waiting)
            if (
                has_more
                and not jobs
                and not (self.unfinished and self.unfinished[0].finished.done())
            ):
                self._lock.wait(_POLL_SECONDS)
            if kind is not None and issubclass(kind, Pass):
                self._last_batch, self._wait_until = set(jobs), math.inf
            for job in jobs:
                self.jobs[job.id] = self.jobs.pop(job.id)  # behind all others
        # 2. Passes and updates of resident jobs begin at once. Others wait for unfinished turns.
        session = self.session
        is_ahead = all(self._goes_ahead(job) for job in jobs)
        if not is_ahead:
            self.drain()
        if len(jobs) > 1 and not all(map(self._is_ready, jobs)):
            jobs = [job for job in jobs if self._activate(job)]
        if kind is OptimStep and len(jobs) > 1:
            jobs = [job for job in jobs if session.has_gradient(job.id)]
        # 3. Begin the turn, and let the other thread finish it.
        if len(jobs) > 1:
            served = self._serve_batch(jobs)
        else:
            served = {job: self._serve(job) for job in jobs if self._activate(job)}
        if served:
            for job, answers in served.items():
                for number in range(job.begun, job.begun + len(answers)):
                    job.pending.pop(number, None)
                job.begun += len(answers)
            mark, before = session.mark(), self.unfinished[-1:]
            finished = self._finisher.submit(self._finish, before, mark, served)
            self.unfinished.append(Turn(mark, finished))
        # 4. Wait for earlier turns, and save the active job if no turn is unfinished.
        self.drain(_MOST_UNFINISHED if is_ahead else 0)
        if not self.unfinished and (now := self.jobs.get(session.now.id or "")) is not None:
            self._save_if_due(now)
        return has_more

    def _batch_key(self, job: Job) -> object:
        """Return a key that jobs have in common if their next requests may share a turn.

        It is the type of the requests, or the job itself if its next request needs its own turn. An
        update shares a turn only if it follows a pass.
        """
        pending = job.pending.get(job.begun)
        if pending is None or not pending.is_small:
            return job
        if isinstance(pending.request, OptimStep) and not job.follows_pass:
            return job
        return type(pending.request)

    def _goes_ahead(self, job: Job) -> bool:
        """Return whether the job's turn may begin while others are unfinished."""
        pending = job.pending.get(job.begun)
        is_queued = pending is not None and isinstance(pending.request, Pass | OptimStep)
        return is_queued and self.session.resident(job.id) is not None

    def _choose(
        self, waiting: Sequence[Job]
    ) -> tuple[type[Forward | ForwardBackward | OptimStep] | None, list[Job]]:
        """Return the type of the next turn's requests, None if they are not small, and its jobs.

        Small updates that follow a pass come first, so that jobs that are one request apart share a
        pass again. A pass waits for the jobs of the last batch while the device is at work. After
        that it waits as long as beginning the last shared pass took, but at most
        :data:`LONGEST_WAIT`.
        """
        keys = {job: self._batch_key(job) for job in waiting}
        most = self.config.jobs.max_tenants
        for key in sorted(dict.fromkeys(keys.values()), key=lambda key: key is not OptimStep):
            jobs = [job for job in waiting if keys[job] == key][:most]
            kind = next((kind for kind in _BATCHED if kind is key), None)
            missed = {job for job in self._last_batch if job.status == "open"} - keys.keys()
            is_pass = kind is not None and issubclass(kind, Pass)
            if is_pass and missed and len(jobs) < most:
                if self.unfinished and not self.unfinished[-1].mark.is_ready:
                    continue
                now = time.monotonic()
                longest = min(self.pass_seconds, LONGEST_WAIT)
                self._wait_until = min(self._wait_until, now + longest)
                if now < self._wait_until:
                    continue
            return kind, jobs
        return None, []

    def _activate(self, job: Job) -> bool:
        """Make ``job`` active, in its state after the last answer. False: it cannot be served.

        Answered requests that no checkpoint includes are computed again.
        """
        assert job.seed is not None  # else it was set aside
        session = self.session
        try:
            session.activate(job.id, job.seed, job.folder, job.source)
            while not job.is_sampler and session.now.seen < job.done:  # answered, not in its state
                if self._is_cancelled(job):
                    return False
                number = session.now.seen
                answer = job.answer_of(number)
                if "result" in answer and KINDS[answer["kind"]].changes_state:
                    session.serve(number, job.request(number, session.limits), True)
                else:
                    session.skip(number, "error" in answer and not answer["refused"])
        except (RunFailed, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - any error here affects only this job
            session.wait_for_device()
            self._set_aside(job, f"its state could not be restored: {_line_of(error)}")
            return False
        self._save_if_due(job)  # now, because a client may never let the job become idle
        return True

    def _serve_batch(self, jobs: Sequence[Job]) -> _Answers:
        """Serve the next request of each of ``jobs`` in one turn.

        If that fails, it returns no answers, and each request later gets a turn of its own.
        """
        requests = [job.pending[job.begun].request for job in jobs]
        try:
            started = time.monotonic()
            results = self.session.serve_batch(
                {
                    job.id: (job.begun, request)
                    for job, request in zip(jobs, requests, strict=True)
                    if isinstance(request, Forward | ForwardBackward | OptimStep)
                }
            )
            if isinstance(requests[0], Pass):
                self.pass_seconds = time.monotonic() - started
        except Exception as error:  # each request's own turn will show whose error it is
            for job in jobs:
                job.pending.pop(job.begun)  # a request that is read from the disk is served alone
                self.session.forget(job.id)
            if isinstance(error, RunFailed | OSError):
                raise
            text = "a turn that %d jobs shared failed, and each is served by itself: %s"
            logger.warning(text, len(jobs), _line_of(error))
            self.session.wait_for_device()
            return {}
        return {job: [_answer_with(late)] for job, late in zip(jobs, results, strict=True)}

    def _serve(self, job: Job) -> Sequence[_LateAnswer]:
        """Serve the next request of ``job``, or the requests that wait at a sampler.

        Returns no answers if the job was cancelled, or is served no more.
        """
        number, session = job.begun, self.session
        session.is_cancelled = partial(self._is_cancelled, job)
        try:
            if job.is_sampler:
                limits = session.limits
                end = min(job.accepted, number + limits.max_completions)
                asked = [job.request(i, limits) for i in range(number, end)]
                results = session.generate(number, asked)
                if results is None:
                    session.forget(job.id)
                    return []
                return [_constant({"result": result}) for result in results]
            stored = job.request(number, session.limits)
            late = session.serve(number, stored)
            if isinstance(request := stored.request, SaveForSampler):
                self._create_sampler(job, request)
            return [_answer_with(late)]
        except DamagedJob as error:
            self._set_aside(job, str(error))
            return []
        except (RunFailed, OSError):
            session.forget(job.id)  # no checkpoint may include a request without an answer
            raise
        except Refused as error:
            answers = [{"error": _line_of(error), "refused": True}]
            session.skip(number, False)
        except Exception as error:  # noqa: BLE001 - any error here affects only this job
            failed = {"error": _line_of(error), "refused": False}
            answers = [failed] * (job.accepted - number if job.is_sampler else 1)
            session.forget(job.id)
            logger.warning("job %s, request %d: %s", job.label, number, failed["error"])
        session.wait_for_device()
        return [_constant(answer) for answer in answers]

    def _create_sampler(self, job: Job, request: SaveForSampler) -> None:
        """Make the sampler for which ``job`` has saved its weights, unless they have a name."""
        if (number := request.sampling_session_seq_id) is None:
            return
        assert job.seed is not None
        sampler = Sampler.of_run(job.id, job.seed, number)
        try:
            self.create(sampler.id, sampler.seed, sampler.source)
        except Refused:  # no sampler will use the saved weights
            shutil.rmtree(self.folder / "jobs" / sampler.source, ignore_errors=True)
            raise

    def drain(self, most: int = 0) -> None:
        """Wait until at most ``most`` turns are unfinished. Raises the error of a turn that failed.

        With none left, every request that a job's state includes has its answer, so that the state
        may be saved.
        """
        while self.unfinished and (
            len(self.unfinished) > most or self.unfinished[0].finished.done()
        ):
            first, *later = self.unfinished
            self.unfinished = []  # if this turn failed, so did the later ones, with its error
            first.finished.result()
            self.unfinished = later

    def _finish(self, before: Sequence[Turn], mark: LateValues, served: _Answers) -> None:
        """Wait for the device, write the answers of all jobs at once, and send them.

        Raises the error of a turn in ``before``, because no answer may be left out.
        """
        for turn in before:
            turn.finished.result()
        self.session.wait_for_device(mark)
        answers = {job: [late() for late in lates] for job, lates in served.items()}

        def write(job: Job) -> None:
            for number, answer in enumerate(answers[job], job.done):
                job.answer(number, answer)
                with self._lock:
                    future = job.waiting.pop(number, None)
                if future is not None:
                    future.set_result(answer)
            if job.is_sampler:
                with job.adding, self._lock:
                    job.prune(job.done)

        writing = [self._writers.submit(write, job) for job in answers]
        for one in wait(writing).done:  # even if one fails, answers that are on the disk are sent
            one.result()

    def _is_ready(self, job: Job) -> bool:
        """Return whether the job's state on the device is up to date, and not due to be saved."""
        state = self.session.resident(job.id)
        return state is not None and state.seen == job.begun and not state.is_due(self.config)

    def _save_if_due(self, job: Job) -> None:
        now, engine = self.session.now, self.session.engine
        if now.id == job.id and now.is_due(self.config) and engine.is_between_steps:
            self.drain()
            seen = self.session.save()
            with job.adding, self._lock:
                job.prune(seen)

    def _is_cancelled(self, job: Job) -> bool:
        return job.status != "open" or self.is_stopping()

    def wait(self, seconds: float) -> None:
        """Return when a request or a removal waits, or after ``seconds``."""
        with self._lock:
            is_idle = not (self.removals or self._removed_saves or self.unfinished)
            if is_idle and not any(job.has_work for job in self.jobs.values()):
                self._lock.wait(seconds)

    def _remove(self) -> None:
        """Remove the files of removed saves and of deleted jobs."""
        while self._removed_saves:
            self._removed_saves.pop().clear()
        while self.removals:
            self.drain()
            job, future = self.removals[0]
            self.session.forget(job.id)
            self._remove_files(job)
            with self._lock:  # only now may another job take its name
                del self.removals[0]
            future.set_result(None)

    def _remove_files(self, job: Job) -> None:
        """Remove the files of a job that is marked as removed.

        The folder is renamed first: the next service removes what a kill leaves of it.
        """
        root, source = job.folder.parent, job.source or ""
        if job.is_sampler and f"/{SAMPLERS}/" in source:  # a save for this sampler alone
            shutil.rmtree((root / source).parent, ignore_errors=True)
        gone = root / f"{_REMOVED}-{job.id}"
        with job.adding:
            job.folder.rename(gone)
        shutil.rmtree(gone)


def _answer_with(late: Callable[[], dict[str, Any]]) -> _LateAnswer:
    return lambda: {"result": late()}


def _constant(answer: dict[str, Any]) -> _LateAnswer:
    return lambda: answer


def _line_of(error: Exception) -> str:
    """Describe ``error`` in one line for a client, with its class unless it is a ValueError."""
    text = " ".join(str(error).encode(errors="replace").decode().split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
