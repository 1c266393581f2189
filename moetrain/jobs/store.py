"""Jobs on the disk. Each file is there whole or not at all, and damage is found and named.

    jobs/<id>/job.json                 seed, source, and whether the job is open or finished
              requests/00000007.json   kept until every kept checkpoint has seen it
              answers/00000007.json    the newest answers, for clients that ask again
              checkpoints/step-...     the state after so many requests (:mod:`moetrain.checkpoint`)
              weights/<name>/          the same under a name, with a save.json that makes it a save
              sampler_weights/<name>/  the adapter alone; samplers/<number>/ for one sampler
              external_weights/<name>/ the adapter in PEFT's format

Any other file in requests/ and answers/, except hidden ones, is damage, and so is a missing file.
JSON files end with a checksum. A request's number is its place in the job's order, from 0. If a
request is sent again under its number, the first one's answer is its answer. Requests to a sampler
come in any order: each has a key under which it can be sent again. A sampler has no checkpoints;
its requests are kept until they are answered.
"""

import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel
from pydantic_core import to_json

from moetrain.checkpoint.read import holds_seal, list_checkpoints, sealed, step_of
from moetrain.config import ConfigError
from moetrain.config.files import fsync, remove_temporaries, write_durably
from moetrain.config.sources import shortened
from moetrain.config.versions import with_defaults
from moetrain.jobs.api import KINDS, JobRequest, Limits, Pass, Refused
from moetrain.train.run_folder import RunFolder

KEPT_ANSWERS, KEPT_SAMPLES = 100, 4096
"""Answers that are kept of each run, and of each sampler. A client that asks for its answers soon
needs no older ones."""
_Status = Literal["open", "finished", "failed"]
_JOB, _SAVE, _MARK = "job.json", "save.json", ".to-be-removed"
_REQUESTS = "requests"
_ANSWERS = "answers"
SAMPLERS = "samplers"
"""Folder of a run with weights that belong to one sampler each."""
_SAVES = ("weights", "sampler_weights", "external_weights")
"""Folders of a run's other saves. The path of a save begins with one of them."""
_NAME = re.compile(r"([0-9]{8,})\.json")


class DamagedJob(Refused):
    """A file of a job is not what was written. The message names it and is for the client."""

    def __init__(self, name: str, why: object) -> None:
        super().__init__(f"{name} is damaged: {' '.join(str(why).split())}")


def check_base(folder: Path, mine: Mapping[str, Any], kinds: Mapping[str, type[BaseModel]]) -> None:
    """Raise ConfigError if the jobs in ``folder`` depend on another base than ``mine``.

    The base is all that a job's state depends on, such as the frozen weights. It is written to a
    new folder. ``kinds``: the classes of the parts of it that are dumps, which an older version may
    have written without fields that are new.
    """
    path = folder / "base.json"
    if not path.exists():
        write_sealed(path, mine)
    try:
        theirs = read_sealed(folder, path.name)
    except DamagedJob as error:
        raise ConfigError(
            "output_dir",
            f"in {str(folder)!r} {error}; restore the file, or remove it if model, lora and "
            "optim.state_dtype are as they were for the folder's jobs",
        ) from None
    for key, value in mine.items():
        other = theirs.get(key)
        if key in kinds and isinstance(other, dict):
            value, other = (with_defaults(kinds[key], dump) for dump in (value, other))
        if value != other:
            setting = {"lora": "lora", "moments": "optim.state_dtype"}.get(key, "model")
            problem = f"{str(folder)!r} has jobs of another base ({key} differs)"
            remedy = f"set {setting} as it was, or choose another folder"
            raise ConfigError("output_dir", f"{problem}; {remedy}")


def write_sealed(path: Path, value: Mapping[str, Any], body: str | None = None) -> None:
    """Write ``value`` (not empty) and the JSON ``body`` to the disk; OSError: nothing changed."""
    text = to_json(value).decode()  # several times as fast as json, and other threads wait for it
    if body is not None:
        text = f'{text[:-1]}, "body": {body}}}'
    write_durably(path, sealed(text))


def read_sealed(folder: Path, name: str, **fields: type | tuple[type, ...]) -> dict[str, Any]:
    """Read what :func:`write_sealed` wrote, with ``fields`` of these types; raises DamagedJob."""
    try:
        data = (folder / name).read_bytes()
        if holds_seal(data) is False:
            raise ValueError("its checksum differs")
        value = json.loads(data.decode())
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, not an object")
        for field_name, kind in fields.items():
            if not isinstance(value.get(field_name, ...), kind):
                raise ValueError(f"it has no {field_name}, or one of another type")
    except FileNotFoundError:
        raise DamagedJob(name, "it is not there") from None
    except OSError as error:
        raise DamagedJob(name, f"it cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedJob(name, error) from None
    value.pop("crc32", None)
    return value


class SaveFolder(NamedTuple):
    """The folder of a save of a job."""

    path: Path

    def write(self, seen: int, ttl: int | None) -> None:
        """Make the folder a save of a job that has ``seen`` so many requests.

        ``ttl``: seconds until it expires; None: never.
        """
        now = time.time()
        expires = None if ttl is None else now + ttl
        write_sealed(self.path / _SAVE, {"seen": seen, "time": now, "expires": expires})

    def read(self) -> dict[str, Any] | None:
        """Read what :meth:`write` wrote; None: there is no save, or it has expired."""
        try:
            known = read_sealed(self.path, _SAVE, seen=int, time=float, expires=(float, NoneType))
        except DamagedJob:
            if (self.path / _SAVE).exists():
                raise
            return None  # or it was removed just now
        return None if (known["expires"] or math.inf) < time.time() else known

    def unmark(self) -> None:
        """Remove the file that makes the folder a save; the others stay."""
        (self.path / _SAVE).unlink()

    def clear(self) -> None:
        """Remove the folder unless it is a save."""
        if self.read() is None:
            shutil.rmtree(self.path, ignore_errors=True)

    def checkpoint(self) -> Path:
        """Return the save's checkpoint; Refused: there is no save, or it has expired."""
        try:
            found = list_checkpoints(self.path) if self.read() is not None else []
        except DamagedJob as error:  # the save may be another job's: this job is not damaged
            raise Refused(str(error)) from None
        if not found:
            raise Refused(f"there is no save {'/'.join(self.path.parts[-3:])}", 404)
        return found[-1]

    def make_room(self, seen: int, overwrite: bool, max_saves: int) -> str:
        """Clear the folder for a save of a job that has ``seen`` so many requests.

        Expired saves beside it are removed. Returns "", or why there is no room: a save has this
        name, or ``max_saves`` others are left.
        """
        others = [path for path in self.path.parent.glob("[!.]*") if path != self.path]
        for path in others:
            SaveFolder(path).clear()  # what is left counts
        known, left, name = self.read(), sum(path.exists() for path in others), self.path.name
        # A save of this very request is overwritten: its answer was not written.
        if known is not None and known["seen"] != seen and not overwrite:
            return f"there is a save {name!r} already; choose another name, or overwrite it"
        if left >= max_saves:
            return f"this job has {left} saves, as many as jobs.max_saves"
        shutil.rmtree(self.path, ignore_errors=True)
        return ""


def _file(kind: str, number: int) -> str:
    return f"{kind}/{number:08d}.json"


class Sampler(NamedTuple):
    """A sampler of weights that a run has saved for it alone."""

    id: str
    seed: int
    source: str
    """Path of its save, under the folder of jobs."""

    @classmethod
    def of_run(cls, run: str, seed: int, number: int) -> "Sampler":
        """Return sampler ``number`` of the session of ``run``, a job with this ``seed``."""
        session = run.partition(":")[0]
        own_seed = zlib.crc32(f"{seed}.{number}".encode())
        return cls(f"{session}:sample:{number}", own_seed, f"{run}/{SAMPLERS}/{number}")


class PendingRequest(NamedTuple):
    """A request that this process has accepted and not begun."""

    request: JobRequest
    is_small: bool
    """True: it may share a turn with small requests of its type, of other jobs."""


class StoredRequest(NamedTuple):
    """A request of a job."""

    key: str
    """The key of a sampler's request, which its random numbers follow from; else the number."""
    request: JobRequest


def read_request(folder: Path, number: int, limits: Limits) -> StoredRequest:
    """Read a request of the job in ``folder``; raises DamagedJob."""
    entry = read_sealed(folder, _file(_REQUESTS, number), kind=str, body=dict)
    request = limits.parse(entry["kind"], entry["body"])
    return StoredRequest(str(entry.get("key", number)), request)


@dataclass(eq=False)
class Job:
    """A job's log of requests and answers, on the disk, and the clients that wait for it.

    The log counts requests that were accepted, begun and done. How far the job's state has come is
    in :class:`~moetrain.jobs.shared.JobState`.
    """

    folder: Path
    seed: int | None = None
    """None: its job.json is damaged."""
    status: _Status = "open"
    error: str | None = None
    """Why it has failed. This is not written to disk: the job may be repaired before the next
    start."""
    source: str | None = None
    """The checkpoint of the save that the job began with, as a path under the folder of jobs; None:
    it began from its seed."""
    accepted: int = 0
    """Number of requests that were accepted."""
    begun: int = 0
    """Number of requests whose turn has begun. The latest ones need not have an answer yet."""
    done: int = 0
    """Number of requests that have an answer."""
    waiting: dict[int, Future[dict[str, Any]]] = field(default_factory=dict)
    """Answers that clients wait for."""
    pending: dict[int, PendingRequest] = field(default_factory=dict)
    adding: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that writes the next request, removes old files or moves the folder."""
    _entries: dict[int, dict[str, str]] = field(default_factory=dict)
    """Kind, digest and key of requests, which their answers repeat."""
    _numbers_of: dict[str, int] = field(default_factory=dict)
    """The number of the request with each key, of a sampler alone."""

    @property
    def id(self) -> str:
        """The secret by which clients know the job."""
        return self.folder.name

    @property
    def session(self) -> str:
        return self.id.partition(":")[0]

    @property
    def is_sampler(self) -> bool:
        return ":sample:" in self.id

    @property
    def label(self) -> str:
        """A name for the log, which must not show ids."""
        return self.id[:8] + self.id[32:]

    @property
    def has_work(self) -> bool:
        """True: a request waits to be served."""
        return self.status == "open" and self.begun < self.accepted

    @property
    def follows_pass(self) -> bool:
        """True: the request before the next one was a pass."""
        kind = self._entries.get(self.begun - 1, {}).get("kind")
        return kind is not None and issubclass(KINDS[kind], Pass)

    @property
    def saves(self) -> dict[str, dict[str, Any]]:
        """The saves of a run by folder and name, as ``weights/NAME``, the oldest first."""
        paths = [path for kind in _SAVES for path in self.folder.glob(f"{kind}/*")]
        read = {f"{x.parent.name}/{x.name}": SaveFolder(x).read() for x in paths}
        found = {name: save for name, save in read.items() if save is not None}
        return dict(sorted(found.items(), key=lambda item: item[1]["time"]))

    @property
    def has_files(self) -> bool:
        """False: a service died before any client knew of the job."""
        errors: list[OSError] = []
        walk = os.walk(self.folder, onerror=errors.append)
        is_there = any(not name.startswith(".") for _, _, names in walk for name in names)
        return is_there or bool(errors)  # load will say what is wrong

    def mark_removed(self) -> None:
        """Mark the job on the disk as to be removed. Raises OSError."""
        (self.folder / _MARK).touch()
        fsync(self.folder)

    @property
    def is_removed(self) -> bool:
        """True: :meth:`mark_removed` was called, perhaps by a service before this one."""
        return os.path.exists(self.folder / _MARK)  # False if the folder cannot be read

    def clear_removed_saves(self) -> None:
        """Remove what a killed service has left of the saves that it was removing."""
        for kind in _SAVES:
            for path in (self.folder / kind).glob("[!.]*"):
                with suppress(DamagedJob, OSError):  # whoever loads this save gets the error
                    SaveFolder(path).clear()

    def create(self) -> None:
        """Create the files of a new job."""
        self._count(0)
        self.set_status("open")

    def load(self) -> None:
        """Read the job from its files; DamagedJob: one of them is not as it should be."""
        try:
            known = read_sealed(self.folder, _JOB, seed=int, status=str, source=(str, NoneType))
            if len(known) != 3 or known["status"] not in get_args(_Status)[:2]:
                raise DamagedJob(_JOB, "it is not what this version of moetrain writes")
            self.seed, self.status, self.source = known["seed"], known["status"], known["source"]
            checkpoints = RunFolder(self.folder).checkpoints
            checkpoints.mkdir(parents=True, exist_ok=True)
            seen = max(filter(None, map(step_of, list_checkpoints(checkpoints))), default=0)
            self._count(seen)
            if self.is_sampler:
                kept = self._numbers(_REQUESTS) | self._numbers(_ANSWERS)
                self._numbers_of = {self.entry(number)["key"]: number for number in kept}
        except OSError as error:
            name = Path(os.fsdecode(error.filename or "")).name
            raise DamagedJob(f"its folder ({name})", error.strerror) from None
        if seen > self.done:
            raise DamagedJob(
                "its log",
                f"a checkpoint has seen {seen} requests, but only {self.done} are answered",
            )

    def _count(self, seen: int) -> None:
        """Count requests and answers on the disk.

        ``seen``: how many requests the newest checkpoint has seen. DamagedJob, OSError: a file is
        not as it should be, missing, or one too many.
        """
        for folder in (self.folder, *(self.folder / x for x in (_REQUESTS, _ANSWERS))):
            folder.mkdir(exist_ok=True)
            remove_temporaries(folder)
        for kind in (_REQUESTS, _ANSWERS):
            for entry in os.scandir(self.folder / kind):
                is_ours = entry.is_file() and _NAME.fullmatch(entry.name)
                if not is_ours and not entry.name.startswith("."):
                    raise DamagedJob(f"{kind}/{shortened(entry.name)}", "it is not a file of a job")
        fsync(self.folder)
        requests, answers = self._numbers(_REQUESTS), self._numbers(_ANSWERS)
        done = 1 + max(answers, default=-1)
        accepted = max(done, 1 + max(requests, default=-1))
        # Requests that the newest checkpoint has seen may be gone. Later ones are needed to go on.
        first, oldest = (done, done - len(answers)) if self.is_sampler else (seen, seen)
        wanted = (_REQUESTS, requests, first, accepted), (_ANSWERS, answers, oldest, done)
        for kind, known, start, end in wanted:
            if (lost := next((n for n in range(start, end) if n not in known), None)) is not None:
                raise DamagedJob(_file(kind, lost), "it is not there")
        self.accepted = accepted
        self.done = self.begun = done

    def set_status(self, status: _Status) -> None:
        """Write the new status to disk, then adopt it. OSError: nothing has changed."""
        known = {"seed": self.seed, "status": status, "source": self.source}
        write_sealed(self.folder / _JOB, known)
        self.status = status

    def check_open(self) -> None:
        """Raise Refused unless the job is open."""
        if self.status != "open":
            raise Refused(f"this job is {self.status}" + (f": {self.error}" * bool(self.error)))

    def fail_waiting(self, error: str) -> None:
        """Answer all clients that wait with ``error``."""
        for future in self.waiting.values():
            future.set_result({"error": error})
        self.waiting.clear()

    # ---- requests and answers ------------------------------------------------------------------

    def accept(
        self, request: JobRequest, number: int | None, *, is_small: bool, max_queued: int
    ) -> int:
        """Write ``request`` to the disk and return its number.

        ``number``: the client's number of the request, which is a sampler's key; None: the next.
        Nothing is done if the same request was accepted under this number before.

        Raises Refused: another request has ``number``, those before it have not come, or
        ``max_queued`` requests wait already. Raises OSError: it cannot be written.
        """
        number = key = self.accepted if number is None else number
        kind, body = request.route, request.model_dump_json()
        entry = {"kind": kind, "digest": hashlib.sha256(f"{kind} {body}".encode()).hexdigest()}
        if self.is_sampler:
            entry["key"] = str(key)
            number = self._numbers_of.get(str(key), self.accepted)
        if number < self.accepted:
            if self.entry(number)["digest"] != entry["digest"]:
                raise Refused(f"request {key} was another one; the next number is {self.accepted}")
            return number
        if number > self.accepted:
            raise Refused(f"request {number} comes too early; the next number is {self.accepted}")
        if self.accepted - self.done >= max_queued:
            raise Refused(
                f"{max_queued} requests of this job wait already (jobs.max_queued); ask later", 429
            )
        write_sealed(self.folder / _file(_REQUESTS, self.accepted), entry, body)
        self._entries[self.accepted] = entry
        if self.is_sampler:
            self._numbers_of[str(key)] = self.accepted
        self.pending[self.accepted] = PendingRequest(request, is_small)
        self.accepted += 1
        return self.accepted - 1

    def request(self, number: int, limits: Limits) -> StoredRequest:
        """Return a request: as it was accepted, else from its file. Raises DamagedJob."""
        if (pending := self.pending.get(number)) is None:
            return read_request(self.folder, number, limits)
        return StoredRequest(self.entry(number).get("key", str(number)), pending.request)

    def entry(self, number: int) -> dict[str, str]:
        """Return kind, digest and, of a sampler's request, key."""
        if number not in self._entries:
            is_kept = (self.folder / _file(_REQUESTS, number)).exists()
            entry = self._read(_REQUESTS, number) if is_kept else self.answer_of(number)
            names = {"kind", "digest", "key"} & set(entry)
            self._entries[number] = {name: entry[name] for name in names}
        return self._entries[number]

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        """Write the ``result`` or ``error`` of request ``number``, the first without an answer."""
        assert number == self.done
        path = self.folder / _file(_ANSWERS, number)
        write_sealed(path, {**self.entry(number), **answer})
        self.done += 1

    def answer_of(self, number: int) -> dict[str, Any]:
        """Return the answer to request ``number``, which is done, with its kind and digest.

        Refused: it is no longer kept; DamagedJob: its file is damaged.
        """
        if not os.path.lexists(self.folder / _file(_ANSWERS, number)):
            kept = self._kept
            raise Refused(
                f"the answer to request {number} is no longer kept: the last {kept} are", 410
            )
        return self._read(_ANSWERS, number)

    def _read(self, kind: str, number: int) -> dict[str, Any]:
        name = _file(kind, number)
        more = {"key": str} if self.is_sampler else {}
        entry = read_sealed(self.folder, name, kind=str, digest=str, **more)
        outcome = {"body"} if kind == _REQUESTS else {"result", "error"}
        if entry["kind"] not in KINDS or not outcome & set(entry):
            raise DamagedJob(name, "it is not what this version of moetrain writes")
        return entry

    def prune(self, seen: int) -> None:
        """Remove files that are not needed once every checkpoint has ``seen`` so many requests."""
        oldest = self.done - self._kept
        for number in [n for n in [*self._entries] if n < seen]:  # others may come meanwhile
            del self._entries[number]
        for key in [key for key, n in [*self._numbers_of.items()] if n < oldest]:
            del self._numbers_of[key]
        for kind, end in ((_REQUESTS, self.done), (_ANSWERS, oldest)):
            for number in self._numbers(kind):
                if number < min(seen, end):
                    (self.folder / _file(kind, number)).unlink()

    @property
    def _kept(self) -> int:
        return KEPT_SAMPLES if self.is_sampler else KEPT_ANSWERS

    def _numbers(self, kind: str) -> set[int]:
        names = map(_NAME.fullmatch, os.listdir(self.folder / kind))
        return {int(name[1]) for name in names if name}
