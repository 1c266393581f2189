"""Jobs on the disk: each file is there whole or not at all, and damage is found and named.

    jobs/<id>/job.json                 seed, source, and whether it is open or finished
              requests/00000007.json   from when it was taken up until a checkpoint has seen it
              answers/00000007.json    the newest, for clients that ask again
              checkpoints/step-...     the state after so many requests (:mod:`moetrain.checkpoint`)
              weights/<name>/          the same under a name, with a save.json that makes it a save
              sampler_weights/<name>/  the adapter alone; samplers/<number>/ for one sampler
              external_weights/<name>/ the adapter in PEFT's format

Anything else in requests/ and answers/, except hidden files, is damage, and so is a missing file.
JSON files end with a checksum. A request's number is its place in the job's order, from 0; sent
again under its number, it gets the first one's answer. Requests to a sampler come in any order:
each has a key, under which it can be sent again. A sampler has no checkpoints.
"""

import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args

from pydantic_core import to_json

from moetrain.checkpoint.read import holds_seal, list_checkpoints, sealed, step_of
from moetrain.config import Config, ConfigError
from moetrain.config.files import fsync, remove_temporaries, write_durably
from moetrain.config.sources import shortened
from moetrain.jobs.api import KINDS, Refused
from moetrain.train.run_folder import RunFolder

_KEPT_ANSWERS, _KEPT_SAMPLES = 100, 4096
"""Answers that are kept of each job: a client that asks for older ones has lost its place."""
_Status = Literal["open", "finished", "failed"]
_JOB, _SAVE, _MARK = "job.json", "save.json", ".to-be-removed"
_REQUESTS = "requests"
_ANSWERS = "answers"
PASSES = ("forward", "forward_backward")
"""Kinds of requests that go through the model."""
_SAVES = ("weights", "sampler_weights", "external_weights")
"""Kinds of saves, as paths have them."""
_NAME = re.compile(r"([0-9]{8,})\.json")


class DamagedJob(Refused):
    """A file of a job is not what was written; the message names it, and is for the client."""

    def __init__(self, name: str, why: object) -> None:
        super().__init__(f"{name} is damaged: {' '.join(str(why).split())}")


def check_base(folder: Path, mine: Mapping[str, Any]) -> None:
    """Raise ConfigError if the jobs in ``folder`` have another base; a new folder gets ``mine``."""
    path = folder / "base.json"
    if not path.exists():
        _write_durably(path, mine)
    try:
        theirs = _load(folder, path.name)
    except DamagedJob as error:
        raise ConfigError(
            "output_dir",
            f"in {str(folder)!r} {error}; put it back, or, where model, lora and "
            "optim.state_dtype are as they were for its jobs, remove it",
        ) from None
    for key in mine:
        if theirs.get(key) != mine[key]:
            setting = {"lora": "lora", "moments": "optim.state_dtype"}.get(key, "model")
            problem = f"{str(folder)!r} has jobs of another base ({key} differs)"
            remedy = f"set {setting} as it was, or choose another folder"
            raise ConfigError("output_dir", f"{problem}; {remedy}")


def _write_durably(path: Path, value: Mapping[str, Any], body: str | None = None) -> None:
    """Write ``value`` (not empty) and the JSON ``body`` to the disk; OSError: nothing changed."""
    text = to_json(value).decode()  # several times as fast as json, for which others wait
    if body is not None:
        text = f'{text[:-1]}, "body": {body}}}'
    write_durably(path, sealed(text))


def _load(folder: Path, name: str, **fields: type | tuple[type, ...]) -> dict[str, Any]:
    """Read what :func:`_write_durably` wrote, with ``fields`` of these types; or DamagedJob."""
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
        """Make what is in the folder a save of a job that has seen so many requests."""
        now = time.time()
        expires = None if ttl is None else now + ttl
        _write_durably(self.path / _SAVE, {"seen": seen, "time": now, "expires": expires})

    def read(self) -> dict[str, Any] | None:
        """Read what :meth:`write` wrote; None: there is no such save, or not any longer."""
        try:
            known = _load(self.path, _SAVE, seen=int, time=float, expires=(float, NoneType))
        except DamagedJob:
            if (self.path / _SAVE).exists():
                raise
            return None  # or it was removed just now
        return None if (known["expires"] or math.inf) < time.time() else known

    def forget(self) -> None:
        """Make it no save; what is in the folder stays."""
        (self.path / _SAVE).unlink()

    def clear(self) -> None:
        """Remove the folder unless it is a save."""
        if self.read() is None:
            shutil.rmtree(self.path, ignore_errors=True)

    def checkpoint(self) -> Path:
        """Return the save's checkpoint; Refused: there is no such save, or not any longer."""
        try:
            found = list_checkpoints(self.path) if self.read() is not None else []
        except DamagedJob as error:  # another job's, which costs this one nothing
            raise Refused(str(error)) from None
        if not found:
            raise Refused(f"there is no save {'/'.join(self.path.parts[-3:])}", 404)
        return found[-1]

    def make_room(self, seen: int, overwrite: bool, most: int) -> str:
        """Clear the folder for a save of a job that has seen so many requests; returns why not.

        Saves beside it whose time is over are removed, and ``most`` may be left.
        """
        others = [path for path in self.path.parent.glob("[!.]*") if path != self.path]
        for path in others:
            SaveFolder(path).clear()  # what is left counts
        known, left, name = self.read(), sum(path.exists() for path in others), self.path.name
        # One of this very request: it was saved, and its answer was not.
        if known is not None and known["seen"] != seen and not overwrite:
            return f"there is a save {name!r} already; choose another name, or overwrite it"
        if left >= most:
            return f"this job has {left} saves, as many as jobs.max_saves"
        shutil.rmtree(self.path, ignore_errors=True)
        return ""


def _file(kind: str, number: int) -> str:
    return f"{kind}/{number:08d}.json"


@dataclass(eq=False)
class Job:
    """One job: its files, its state, and the clients that wait for it."""

    folder: Path
    seed: int | None = None
    """None: its job.json is damaged."""
    status: _Status = "open"
    error: str | None = None
    """Why it has failed, which is not written down: the next start may find it put right."""
    source: str | None = None
    """What it began with: a save's checkpoint, under the folder of jobs; None: its seed."""
    accepted: int = 0
    """Requests that there are."""
    done: int = 0
    """Requests that have an answer."""
    begun: int = 0
    """Requests that were served, of which the latest need not have an answer yet."""
    waiting: dict[int, Future[dict[str, Any]]] = field(default_factory=dict)
    """Answers that clients wait for."""
    ahead: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """Requests that may be begun before a turn before them is finished, each behind a word that it
    has in common with those that may share its turn."""
    adding: threading.Lock = field(default_factory=threading.Lock)
    """Who has it writes the next request, or moves the folder."""
    saved_time: float = field(default_factory=time.monotonic)
    """When it was last saved, or found."""
    _entries: dict[int, dict[str, str]] = field(default_factory=dict)
    """Kind, digest and key of requests, which their answers repeat."""
    _numbers_of: dict[str, int] = field(default_factory=dict)
    """The number of each key."""

    @property
    def id(self) -> str:
        """The secret by which clients know it."""
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
        """Whether a request waits to be served."""
        return self.status == "open" and self.begun < self.accepted

    @property
    def next_word(self) -> str:
        """What the next request has in common with those that share its turn; else the job's id."""
        word, _ = self.ahead.get(self.begun, (self.id, None))
        before = self._entries.get(self.begun - 1, {}).get("kind")
        return word if word != "optim_step" or before in PASSES else self.id

    @property
    def saves(self) -> dict[str, dict[str, Any]]:
        """The saves of a run by kind and name, ``weights/NAME``, the oldest first."""
        paths = [path for kind in _SAVES for path in self.folder.glob(f"{kind}/*")]
        read = {f"{x.parent.name}/{x.name}": SaveFolder(x).read() for x in paths}
        found = {name: save for name, save in read.items() if save is not None}
        return dict(sorted(found.items(), key=lambda item: item[1]["time"]))

    @property
    def has_begun(self) -> bool:
        """Whether it has a file; else a service died before it told anybody of the job."""
        errors: list[OSError] = []
        walk = os.walk(self.folder, onerror=errors.append)
        is_there = any(not name.startswith(".") for _, _, names in walk for name in names)
        return is_there or bool(errors)  # of which look will say what is wrong

    @staticmethod
    def request_in(folder: Path, number: int) -> dict[str, Any]:
        """Return ``kind`` and ``body`` of a request of the job in ``folder``; or DamagedJob."""
        return _load(folder, _file(_REQUESTS, number), kind=str, body=dict)

    def mark_removed(self) -> None:
        """Let the disk know that the job is to be removed. Raises OSError."""
        (self.folder / _MARK).touch()
        fsync(self.folder)

    @property
    def is_removed(self) -> bool:
        return os.path.exists(self.folder / _MARK)  # not if it may not be looked at

    def clear_removed_saves(self) -> None:
        """Remove what a killed service has left of saves that are none any more."""
        for kind in _SAVES:
            for path in (self.folder / kind).glob("[!.]*"):
                with suppress(DamagedJob, OSError):  # whom it concerns is told
                    SaveFolder(path).clear()

    def begin(self) -> None:
        self._count(0)
        self.note("open")

    def look(self) -> None:
        """Read from the disk how the job was left; DamagedJob: a file is not as it should be."""
        try:
            known = _load(self.folder, _JOB, seed=int, status=str, source=(str, NoneType))
            if len(known) != 3 or known["status"] not in get_args(_Status)[:2]:
                raise DamagedJob(_JOB, "it is not what this version of moetrain writes")
            self.seed, self.status, self.source = known["seed"], known["status"], known["source"]
            checkpoints = RunFolder(self.folder).checkpoints
            checkpoints.mkdir(parents=True, exist_ok=True)
            seen = max(filter(None, map(step_of, list_checkpoints(checkpoints))), default=0)
            self._count(seen)
            if self.is_sampler:
                kept = self._numbers(_REQUESTS) | self._numbers(_ANSWERS)
                self._numbers_of = {self.known(number)["key"]: number for number in kept}
        except OSError as error:
            name = Path(os.fsdecode(error.filename or "")).name
            raise DamagedJob(f"its folder ({name})", error.strerror) from None
        if seen > self.done:
            raise DamagedJob("its log", f"a checkpoint has seen {seen} requests of {self.done}")

    def _count(self, seen: int) -> None:
        """Count requests and answers on the disk, of which the newest checkpoint has seen so many.

        DamagedJob, OSError: a file is not as it should be, missing, or one too many.
        """
        for folder in (self.folder, *(self.folder / x for x in (_REQUESTS, _ANSWERS))):
            folder.mkdir(exist_ok=True)
            remove_temporaries(folder)
        for kind in (_REQUESTS, _ANSWERS):
            for entry in os.scandir(self.folder / kind):
                is_ours = entry.is_file() and _NAME.fullmatch(entry.name)
                if not is_ours and not entry.name.startswith("."):
                    raise DamagedJob(f"{kind}/{shortened(entry.name)}", "it is no file of a job")
        fsync(self.folder)
        requests, answers = self._numbers(_REQUESTS), self._numbers(_ANSWERS)
        done = 1 + max(answers, default=-1)
        accepted = max(done, 1 + max(requests, default=-1))
        # Requests that every checkpoint has seen may be gone; later ones are needed to go on.
        first, oldest = (done, done - len(answers)) if self.is_sampler else (seen, seen)
        wanted = (_REQUESTS, requests, first, accepted), (_ANSWERS, answers, oldest, done)
        for kind, known, start, end in wanted:
            if (lost := next((n for n in range(start, end) if n not in known), None)) is not None:
                raise DamagedJob(_file(kind, lost), "it is not there")
        self.accepted = accepted
        self.done = self.begun = done

    def note(self, status: _Status) -> None:
        """Write the new status to disk, then adopt it. Raises OSError, and changes nothing then."""
        known = {"seed": self.seed, "status": status, "source": self.source}
        _write_durably(self.folder / _JOB, known)
        self.status = status

    def check_open(self) -> None:
        """Raise Refused unless the job is open."""
        if self.status != "open":
            raise Refused(f"this job is {self.status}" + (f": {self.error}" * bool(self.error)))

    def tell_waiting(self, error: str) -> None:
        for future in self.waiting.values():
            future.set_result({"error": error})
        self.waiting.clear()

    # ---- requests and answers ------------------------------------------------------------------

    def add(self, kind: str, body: str, number: int | None, *, most: int, ahead: Any) -> int:
        """Take up a request, its ``body`` as JSON, and return its number.

        ``number``: what its client calls it, which is a sampler's key; None: the next. ``ahead``:
        what :attr:`ahead` has of it.

        Raises Refused: another request has ``number``, or ones before it have not come; as many as
        ``most`` wait already.
        """
        number = key = self.accepted if number is None else number
        entry = {"kind": kind, "digest": hashlib.sha256(f"{kind} {body}".encode()).hexdigest()}
        if self.is_sampler:
            entry["key"] = str(key)
            number = self._numbers_of.get(str(key), self.accepted)
        if number < self.accepted:
            if self.known(number)["digest"] != entry["digest"]:
                raise Refused(f"number {key} was another request; the next is {self.accepted}")
            return number
        if number > self.accepted:
            raise Refused(f"number {number} is ahead of the next, {self.accepted}")
        if self.accepted - self.done >= most:
            raise Refused(f"{most} requests of this job wait already (jobs.max_queued)", 429)
        _write_durably(self.folder / _file(_REQUESTS, self.accepted), entry, body)
        self._entries[self.accepted] = entry
        if self.is_sampler:
            self._numbers_of[str(key)] = self.accepted
        if ahead is not None:
            self.ahead[self.accepted] = ahead
        self.accepted += 1
        return self.accepted - 1

    def known(self, number: int) -> dict[str, str]:
        """Return kind, digest and a sampler's key of a request."""
        if number not in self._entries:
            is_kept = (self.folder / _file(_REQUESTS, number)).exists()
            entry = self._read(_REQUESTS, number) if is_kept else self.answer_of(number)
            names = {"kind", "digest", "key"} & set(entry)
            self._entries[number] = {name: entry[name] for name in names}
        return self._entries[number]

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        """Keep the ``result`` or the ``error`` of the request that was served last."""
        assert number == self.done
        path = self.folder / _file(_ANSWERS, number)
        _write_durably(path, {**self.known(number), **answer})
        self.done += 1

    def answer_of(self, number: int) -> dict[str, Any]:
        """Return the answer to request ``number``, which is done, with its kind and digest.

        Refused: it was too long ago; DamagedJob, which is one too: its file is damaged.
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
        entry = _load(self.folder, name, kind=str, digest=str, **more)
        outcome = {"body"} if kind == _REQUESTS else {"result", "error"}
        if entry["kind"] not in KINDS or not outcome & set(entry):
            raise DamagedJob(name, "it is not what this version of moetrain writes")
        return entry

    def is_due(self, new: int, config: Config) -> bool:
        """Whether to save it, with so many ``new`` requests that no checkpoint has seen."""
        by_time = 0 < 60 * config.checkpoint.minutes <= time.monotonic() - self.saved_time
        # What was loaded need not be there any more when requests are served again.
        has_loaded = new > 0 and self.known(self.begun - 1)["kind"] == "load_weights"
        return has_loaded or (new > 0 and (by_time or new >= config.jobs.save_interval))

    def prune(self, seen: int) -> None:
        """Remove files that are not needed once every checkpoint has seen so many requests."""
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
        return _KEPT_SAMPLES if self.is_sampler else _KEPT_ANSWERS

    def _numbers(self, kind: str) -> set[int]:
        names = map(_NAME.fullmatch, os.listdir(self.folder / kind))
        return {int(name[1]) for name in names if name}
