"""The service: which job is served next, what happens on an error, and what survives a crash.

    service.create(id, seed)    service.submit(id, kind, body)    ... from any thread
    while service.turn(): ...                                     one thread

Training runs and samplers are jobs alike. Jobs with something to do take turns: one request each,
or all that wait at a sampler, which are generated together, or small ones of several jobs. A turn
is begun, when all is queued for the device, and finished, when answers are on the disk and clients
are told, which a thread of its own does, in order. Passes and updates are begun before turns before
them are finished, so that the device computes meanwhile; all else when nothing is unfinished.

A request is on the disk before its sender is told so, an answer before its client is, and before
a checkpoint has seen its request: after a crash the next process goes on from the newest checkpoint
of each job and computes again what that has not seen. An error within a request, or a damaged file,
costs its own job alone. A write that fails ends the service.
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
from typing import Any

from moetrain.config import Config, logger
from moetrain.config.sources import RunFailed, shortened
from moetrain.jobs.api import JOB_ID, OptimStep, Pass, Refused
from moetrain.jobs.session import JobSession
from moetrain.jobs.store import PASSES, DamagedJob, Job, SaveFolder, check_base
from moetrain.runtime.memory import LateValues
from moetrain.train.run_folder import RunFolder
from moetrain.train.session import resolve_run

_REMOVED = ".removed"
_CHANGES = ("forward_backward", "optim_step", "load_weights")
"""Kinds of requests that change the job's state, and so are served again where that was lost."""
_Answers = Mapping[Job, list[dict[str, Any]]]
"""To the next requests of each job, with callables for what waits for the device."""
_UNFINISHED = 2
"""Turns that are left unfinished: a pass, and its update, which hides no work of the host."""
_POLL_SECONDS = 5e-4
"""Between looks whether the device has computed a turn, while nothing can be begun."""
_LONGEST_WAIT = 0.5
"""Seconds that a pass waits at most, on a device with nothing to do, for jobs of the last one."""


class Service(AbstractContextManager["Service"]):
    """A session and the jobs that take turns at it."""

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
            check_base(self.folder, self.session.base)
            self._lock = threading.Condition()
            self._company, self._pass_seconds, self._until = set[Job](), 0.0, math.inf
            """Jobs of the last pass, how long that took to begin, and until when the next waits."""
            self._begun: list[tuple[LateValues, Future[None]]] = []
            """Unfinished turns, in order, each with a mark that is ready when they are computed."""
            self.jobs = {job.id: job for job in self._read_jobs()}
            """Who was served last, or came last, is last."""
            self._writers = stack.enter_context(ThreadPoolExecutor())
            self._finisher = stack.enter_context(ThreadPoolExecutor(1))
            self._stack = stack.pop_all()
        self.is_stopping: Callable[[], bool] = lambda: False
        """Called while text is generated: whether the service is to stop."""
        self._is_stopped = False
        self._removals: list[tuple[Job, Future[None]]] = []
        self._remains: list[SaveFolder] = []
        """Folders of saves that were removed."""

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Save all jobs in memory, and release the folder."""
        try:
            self.tell_stopped()
            self._remove()
            self._settle()
            for job in [job for job in self.jobs.values() if job.begun != job.done]:
                self.session.forget(job.id)  # a checkpoint must not have seen what has no answer
            self.session.put_all_away()
        finally:
            self._stack.close()

    def tell_stopped(self) -> None:
        """Tell all clients that wait, and from now on those that ask, that the service stops."""
        with self._lock:
            self._is_stopped = True
            for job in self.jobs.values():
                job.tell_waiting(self.STOPPED)

    def _read_jobs(self) -> list[Job]:
        root = self.folder / "jobs"
        root.mkdir(mode=0o700, exist_ok=True)
        found = []
        for folder in sorted(root.iterdir()):
            if folder.name.startswith(_REMOVED):
                shutil.rmtree(folder, ignore_errors=True)
            elif Job(folder).is_removed:  # a service was killed before it was gone
                job = Job(folder)
                with suppress(DamagedJob):
                    job.look()
                self._clear_away(job)
            elif JOB_ID.fullmatch(folder.name) and folder.is_dir() and Job(folder).has_begun:
                found.append(Job(folder))
                found[-1].clear_removed_saves()
                try:
                    found[-1].look()
                except DamagedJob as error:
                    self._set_aside(found[-1], str(error))
        return found

    def _set_aside(self, job: Job, error: str) -> None:
        """Stop serving ``job``, and leave its folder as it is."""
        self._settle()  # its turns before this one are as good as others'
        self.session.forget(job.id)
        with self._lock:  # not written down: the next start may find it put right
            job.status = "failed"
            job.error = error
            job.tell_waiting(error)
        logger.warning("job %s is set aside, with its folder as it is: %s", job.label, error)

    # ---- for clients, from any thread ----------------------------------------------------------

    def create(self, name: str, seed: int | None = 0, source: str | None = None) -> Job:
        """Make a new job; to ask again for ``name``, an id, is safe. ``seed`` None: of the name.

        ``source``: the save that a sampler has, or that the first request of a run is to load, as
        a path under the folder of jobs; None: the weights that all jobs begin with.

        Raises:
            Refused: ``name``, ``seed`` or ``source`` is not valid, the job has another or is being
                deleted, or there are ``jobs.max_jobs`` already.
            OSError: it cannot be written, and there is no such job.
        """
        if not JOB_ID.fullmatch(name):
            raise Refused(f"{shortened(name)} is not the id of a job")
        seed = zlib.crc32(name.encode()) if seed is None else seed
        if not 0 <= seed < 2**63:
            raise Refused(f"seed {seed!r:.40} is out of range")
        root = self.folder / "jobs"
        with self._lock:
            job, most = self.jobs.get(name), self.config.jobs.max_jobs
            if job is None:
                if source is not None:  # its step too: a save may give way to another of its name
                    source = str(SaveFolder(root / source).checkpoint().relative_to(root))
                job = Job(root / name, seed, source=source)
                if job.is_sampler:
                    self._make_room(job.session)
                if sum(job.status != "finished" for job in self.jobs.values()) >= most:
                    problem = f"there are {most} jobs, as many as jobs.max_jobs; delete some"
                    raise Refused(problem, 429)
                if any(job.id == name for job, _ in self._removals):  # whose folder is still there
                    raise Refused("the job of this id is being deleted; ask again when it is", 429)
                job.begin()
                self.jobs[name] = job
            elif job.seed not in (None, seed) or source not in (None, dirname(job.source or "")):
                raise Refused(f"this job has seed {job.seed}, or another source")
            return job

    def _make_room(self, session: str) -> None:
        """Remove the sampler of ``session`` that was idle for longest, if it has many."""
        mine = [x for x in self.jobs.values() if x.session == session and x.is_sampler]
        if len(mine) >= self.config.jobs.max_saves:
            if not (idle := [x for x in mine if x.status != "open" or x.done == x.accepted]):
                raise Refused(f"{len(mine)} samplers of this session are at work already", 429)
            self.delete(idle[0].id)

    def finish(self, session: str) -> list[Future[None]]:
        """End the jobs of a session; runs that have saves keep them.

        Returns futures that are done when the others are gone (:meth:`delete`).
        """
        with self._lock:
            mine = [job for job in self.jobs.values() if job.session == session]
            for job in mine:
                if job.saves:
                    self.end(job.id)
            return [self.delete(job.id) for job in mine if not job.saves]  # samplers have none

    def end(self, name: str) -> None:
        """Drop a job's waiting requests, and take up no more. OSError: it goes on."""
        with self._lock:
            job = self.find(name)
            if job.status == "open":
                job.note("finished")
                job.tell_waiting("finished")

    def folder_of(self, name: str, save: str) -> Path:
        """Return the folder of a save; Refused: there is none."""
        if save not in self.find(name).saves:
            raise Refused("there is no such thing", 404)
        return self.find(name).folder / save

    def remove_save(self, name: str, save: str) -> None:
        """Remove a save, and with the last one a run that is finished; Refused: there is none."""
        with self._lock:
            folder, job = SaveFolder(self.folder_of(name, save)), self.find(name)
            if job.status == "finished" and set(job.saves) == {save}:
                self.delete(name)  # first: without it a kill would leave a run of no use
            else:
                folder.forget()  # and the rest goes between turns: one may write another there
                self._remains.append(folder)
                self._lock.notify()

    def find(self, name: str) -> Job:
        """Return a job. This and all below raise Refused where there is none."""
        if (job := self.jobs.get(name)) is None:
            raise Refused("there is no such thing", 404)
        return job

    def submit(self, name: str, kind: str, body: object, number: int | None = None) -> int:
        """Take up a request and return its number. It is on the disk when this returns.

        ``number``: what the client calls it, so that it can be sent again; None: the next. It is a
        place in a run's order, and anything to a sampler.

        Raises Refused: it is not taken up.
        """
        job = self.find(name)  # raises Refused before the body is parsed
        if job.is_sampler is not (kind == "asample"):
            raise Refused(f"{shortened(kind)} is no request to this kind of job")
        request = self.session.limits.parse(kind, body)
        text = request.model_dump_json()
        ahead = None
        if isinstance(request, Pass | OptimStep):
            is_small = isinstance(request, OptimStep) or request.fits(*self.session.engine.part)
            ahead = kind if is_small else name, request
        with job.adding:  # clients of other jobs do not wait for its disk
            job.check_open()
            taken = job.add(kind, text, number, most=self.config.jobs.max_queued, ahead=ahead)
        with self._lock:
            self._lock.notify()
        return taken

    def answer(self, name: str, number: int) -> Future[dict[str, Any]]:
        """Return a future of a request's ``result`` or ``error``.

        Refused: there was no such request, or it was too long ago.
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

        What the disk knows when this returns is enough for the next service to remove them.
        """
        with self._lock:
            job = self.find(name)
            try:
                job.mark_removed()
                self.end(name)
            except OSError:  # a full disk must not keep anybody from making room
                job.status = "finished"
                job.tell_waiting("finished")
            del self.jobs[name]
            future: Future[None] = Future()
            future.set_running_or_notify_cancel()  # a client that leaves cannot stop it
            self._removals.append((job, future))
            self._lock.notify()
            return future

    # ---- the worker's thread -------------------------------------------------------------------

    def turn(self) -> bool:
        """Begin what is next, a request or small ones of several jobs together, and wait for turns
        that are too many. False: there is nothing to do.

        RunFailed, OSError: device or disk failed, in this turn or one before it.
        """
        self._remove()
        with self._lock:
            waiting = [job for job in self.jobs.values() if job.has_work]
            has_more = bool(waiting or self._begun)
            kind, jobs = self._next(waiting)
            if has_more and not jobs and not (self._begun and self._begun[0][1].done()):
                self._lock.wait(_POLL_SECONDS)
            if kind in PASSES:
                self._company, self._until = set(jobs), math.inf
            for job in jobs:
                self.jobs[job.id] = self.jobs.pop(job.id)  # behind all others
        session = self.session
        asked = {job: job.ahead.pop(job.begun, None) for job in jobs}
        is_ahead = all(x is not None and session.resident(job.id) for job, x in asked.items())
        if not is_ahead:
            self._settle()
        if len(jobs) > 1 and not all(map(self._is_here, jobs)):
            jobs = [job for job in jobs if self._bring(job)]
        if kind == "optim_step" and len(jobs) > 1:
            jobs = [job for job in jobs if session.has_gradient(job.id)]
        if len(jobs) > 1:
            served = self._serve_together(kind, {job: asked[job] for job in jobs})
        else:
            served = {job: self._serve(job) for job in jobs if self._bring(job)}
        if served:
            for job, answers in served.items():
                job.begun += len(answers)
            mark, before = session.mark(), [future for _, future in self._begun[-1:]]
            self._begun.append((mark, self._finisher.submit(self._finish, before, mark, served)))
        self._settle(_UNFINISHED if is_ahead else 0)
        if not self._begun and (now := self.jobs.get(session.now.id or "")) is not None:
            self._save_if_due(now)
        return has_more

    def _next(self, waiting: Sequence[Job]) -> tuple[str, list[Job]]:
        """Choose who shares the next turn, and the word that their requests have in common.

        Updates that follow a pass come first: then jobs a request apart share a pass again. A pass
        waits for those of the last one while the device is at work, and as beginning that took.
        """
        words = {job: job.next_word for job in waiting}
        most = self.config.jobs.max_tenants
        for word in sorted(dict.fromkeys(words.values()), key=lambda word: word != "optim_step"):
            jobs = [job for job in waiting if words[job] == word][:most]
            missed = {job for job in self._company if job.status == "open"} - words.keys()
            if word in PASSES and missed and len(jobs) < most:
                if self._begun and not self._begun[-1][0].is_ready:
                    continue
                now = time.monotonic()
                self._until = min(self._until, now + min(self._pass_seconds, _LONGEST_WAIT))
                if now < self._until:
                    continue
            return word, jobs
        return "", []

    def _bring(self, job: Job) -> bool:
        """Let the session have ``job`` as its answers left it; False: it is not to be served."""
        assert job.seed is not None  # else it was set aside
        try:
            self.session.sit(job.id, job.seed, str(job.folder), job.source)
            while not job.is_sampler and self.session.now.seen < job.done:  # in no checkpoint
                if self._is_given_up(job):
                    return False
                number = self.session.now.seen
                answer = job.answer_of(number)
                if "result" in answer and answer["kind"] in _CHANGES:
                    self.session.serve(number, True)
                else:
                    self.session.pass_over(number, "error" in answer and not answer["refused"])
        except (RunFailed, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            self.session.probe()
            self._set_aside(job, f"it could not be brought back: {_line_of(error)}")
            return False
        self._save_if_due(job)  # of a client that always has a further request
        return True

    def _serve_together(self, kind: str, jobs: Mapping[Job, Any]) -> _Answers:
        """Serve a small request each; if that fails none, and each has a turn of its own."""
        try:
            asked = {job.id: (job.begun, request) for job, (_, request) in jobs.items()}
            started = time.monotonic()
            results = self.session.serve_together(kind, asked)
            if kind in PASSES:
                self._pass_seconds = time.monotonic() - started
        except Exception as error:  # whose it is, their own turns show
            for job in jobs:
                self.session.forget(job.id)
            if isinstance(error, RunFailed | OSError):
                raise
            logger.warning("%d jobs shared a turn that failed: %s", len(jobs), _line_of(error))
            self.session.probe()
            return {}
        return {job: [{"result": result}] for job, result in zip(jobs, results, strict=True)}

    def _serve(self, job: Job) -> list[dict[str, Any]]:
        """Return answers to the next requests of ``job``; none: it was given up or set aside."""
        number, session = job.begun, self.session
        session.is_given_up = partial(self._is_given_up, job)
        try:
            if job.is_sampler:
                results = session.sample(number, job.accepted - number)
            else:
                results = [result := session.serve(number)]
                if not callable(result) and (new := result.pop("sampler", None)) is not None:
                    try:
                        self.create(**new)
                    except Refused:  # nobody has its weights
                        shutil.rmtree(self.folder / "jobs" / new["source"], ignore_errors=True)
                        raise
            if results is None:  # they were given up
                session.forget(job.id)
                return []
            return [{"result": result} for result in results]
        except DamagedJob as error:
            self._set_aside(job, str(error))
            return []
        except (RunFailed, OSError):
            session.forget(job.id)  # a save must not see what has no answer
            raise
        except Refused as error:
            answers = [{"error": _line_of(error), "refused": True}]
            session.pass_over(number, False)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            failed = {"error": _line_of(error), "refused": False}
            answers = [failed] * (job.accepted - number if job.is_sampler else 1)
            session.forget(job.id)
            logger.warning("job %s, request %d: %s", job.label, number, failed["error"])
        session.probe()
        return answers

    def _settle(self, most: int = 0) -> None:
        """Wait until ``most`` turns at most are unfinished; raises what one of them failed with.

        With none left states have seen nothing without an answer, and may be saved.
        """
        while self._begun and (len(self._begun) > most or self._begun[0][1].done()):
            (_, finished), *later = self._begun
            self._begun = []  # if this fails: states have seen what has no answer
            finished.result()
            self._begun = later

    def _finish(self, before: list[Future[None]], mark: LateValues, served: _Answers) -> None:
        """Wait for the device, write answers of all jobs at once, and tell clients when theirs is
        there; raises what the turn ``before`` failed with, of which no answer is left out."""
        for one in before:
            one.result()
        self.session.probe(mark)
        served = {
            job: [{k: x() if callable(x) else x for k, x in answer.items()} for answer in answers]
            for job, answers in served.items()
        }

        def write(job: Job) -> None:
            for number, answer in enumerate(served[job], job.done):
                job.answer(number, answer)
                with self._lock:
                    future = job.waiting.pop(number, None)
                if future is not None:
                    future.set_result(answer)
            if job.is_sampler:
                with job.adding, self._lock:
                    job.prune(job.done)

        writing = [self._writers.submit(write, job) for job in served]
        for one in wait(writing).done:  # whatever fails: whose answer is on the disk, is told
            one.result()

    def _is_here(self, job: Job) -> bool:
        """Whether the device has the state that the requests begun have left, to be saved later."""
        if (state := self.session.resident(job.id)) is None or state.seen != job.begun:
            return False
        return not job.is_due(state.seen - state.saved, self.config)

    def _save_if_due(self, job: Job) -> None:
        now, engine = self.session.now, self.session.engine
        is_due = now.id == job.id and job.is_due(now.seen - now.saved, self.config)
        if is_due and engine.is_between_steps:
            self._settle()
            seen, job.saved_time = self.session.save(), time.monotonic()
            with job.adding, self._lock:
                job.prune(seen)

    def _is_given_up(self, job: Job) -> bool:
        return job.status != "open" or self.is_stopping()

    def wait(self, seconds: float) -> None:
        """Return when a request or a removal waits, or after ``seconds``."""
        with self._lock:
            is_idle = not (self._removals or self._remains or self._begun)
            if is_idle and not any(job.has_work for job in self.jobs.values()):
                self._lock.wait(seconds)

    def _remove(self) -> None:
        while self._remains:
            self._remains.pop().clear()
        while self._removals:
            self._settle()
            job, future = self._removals[0]
            self.session.forget(job.id)
            self._clear_away(job)
            with self._lock:  # only now may another job take its name
                del self._removals[0]
            future.set_result(None)

    def _clear_away(self, job: Job) -> None:
        """Remove the files of a job that is marked; the mark goes with the last ones."""
        root, source = job.folder.parent, job.source or ""
        if job.is_sampler and f"/{JobSession.SAMPLERS}/" in source:  # which is its alone
            shutil.rmtree((root / source).parent, ignore_errors=True)
        gone = root / f"{_REMOVED}-{job.id}"
        with job.adding:
            job.folder.rename(gone)
        shutil.rmtree(gone)


def _line_of(error: Exception) -> str:
    """Describe ``error`` in one line for a client, with its class unless the message is ours."""
    text = " ".join(str(error).encode(errors="replace").decode().split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
