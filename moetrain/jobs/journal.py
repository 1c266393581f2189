"""What a job has been asked and has answered, on the disk: a request is there whole or not at all.

    jobs/<id>/job.json                 seed, and whether it is open, cancelled or failed
              requests/00000007.json   from when it was taken up until a checkpoint has seen it
              answers/00000007.json    the newest, for whoever asks again
              checkpoints/step-...     the state after so many requests (:mod:`moetrain.checkpoint`)
              saves/<name>/            the same under a name, and the adapter in PEFT's format

Anything else in requests/ and answers/, but for hidden files, is damage, and so is what is missing.

A request's number is its place in the job's order, from 0. A client that sends one again under its
number (the connection broke, the service was killed) has the first one's answer: each is done once.

What is killed leaves no more than a file under a temporary name; there is nothing to be repaired.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moetrain.config.files import fsync
from moetrain.config.sources import shortened
from moetrain.jobs.durable import DamagedJob, read, write_durably
from moetrain.jobs.requests import KINDS, BadRequest
from moetrain.jobs.session import JobSession

KEPT_ANSWERS = 100
"""Of each job: a client that asks for older ones has lost its place."""
REQUESTS, ANSWERS, SAVES = "requests", "answers", "saves"
_NAME = re.compile(r"([0-9]{8,})\.json")


class Journal:
    """A job's requests and answers.

    Attributes:
        accepted, done: how many requests there are, and how many of them have an answer.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.accepted = self.done = 0
        self._entries: dict[int, dict[str, str]] = {}
        """What answers keep of their requests, of those that came since the service runs."""

    def look(self, seen: int) -> None:
        """Read what is on the disk, given how many requests the newest checkpoint has seen.

        Raises:
            DamagedJob, OSError: a file is not what it should be, missing, or one too many.
        """
        for kind in (REQUESTS, ANSWERS, SAVES):
            (self._folder / kind).mkdir(exist_ok=True)
        for kind in (REQUESTS, ANSWERS):
            for entry in os.scandir(self._folder / kind):
                is_ours = entry.is_file() and _NAME.fullmatch(entry.name)
                if not is_ours and not entry.name.startswith("."):
                    raise DamagedJob(f"{kind}/{shortened(entry.name)}", "it is no file of a job")
        fsync(self._folder)
        requests, answers = self._numbers(REQUESTS), self._numbers(ANSWERS)
        done = 1 + max(answers, default=-1)
        accepted = max(done, 1 + max(requests, default=-1))
        # What every checkpoint has seen may be gone; what none has is needed to go on.
        for kind, known, end in ((REQUESTS, requests, accepted), (ANSWERS, answers, done)):
            if (lost := next((n for n in range(seen, end) if n not in known), None)) is not None:
                raise DamagedJob(_name(kind, lost), "it is not there")
        self.accepted, self.done = accepted, done

    def add(self, kind: str, body: str, number: int | None, *, most: int) -> int:
        """Take up a request; returns its number.

        Args:
            body: as JSON.
            number: what the client thinks that it is; None: the next, whichever that is.
            most: that may wait.

        Raises:
            BadRequest: another request has that number, or ones before it have not come.
            Full: as many wait already.
        """
        entry = {"kind": kind, "digest": hashlib.sha256(f"{kind} {body}".encode()).hexdigest()}
        if number is not None and number < self.accepted:
            if self._known(number)["digest"] != entry["digest"]:
                raise BadRequest(
                    f"number {number} was another request; the next is {self.accepted}"
                )
            return number
        if number not in (None, self.accepted):
            raise BadRequest(f"number {number} is ahead of the next, {self.accepted}")
        if self.accepted - self.done >= most:
            raise Full(f"{most} requests of this job wait already (jobs.max_queued)")
        write_durably(self._folder / _name(REQUESTS, self.accepted), entry, body=body)
        self._entries[self.accepted] = entry
        self.accepted += 1
        return self.accepted - 1

    def _known(self, number: int) -> dict[str, str]:
        """Kind and digest of a request."""
        if number not in self._entries:
            is_kept = (self._folder / _name(REQUESTS, number)).exists()
            entry = self._read(REQUESTS, number) if is_kept else self.answer_of(number)
            self._entries[number] = {key: entry[key] for key in ("kind", "digest")}
        return self._entries[number]

    def serve(self, number: int, session: JobSession) -> dict[str, Any]:
        """Return the result of the request, at the session where its job sits."""
        return session.serve(number, _name(REQUESTS, number))

    def serve_again(self, number: int, session: JobSession) -> None:
        """Bring the job to where it was after the request, which has an answer."""
        answer = self.answer_of(number)
        if "error" in answer and not answer["refused"]:
            session.forget_step()
        if "result" in answer and KINDS[answer["kind"]].changes:
            self.serve(number, session)
        else:
            session.pass_over(number)

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        """Keep the ``result`` or the ``error`` of the request that was served last."""
        assert number == self.done
        path = self._folder / _name(ANSWERS, number)
        write_durably(path, {**self._known(number), **answer})
        self.done += 1

    def answer_of(self, number: int) -> dict[str, Any]:
        """What came of request ``number``, which is done.

        Raises:
            BadRequest: that was too long ago; or DamagedJob, which is one.
        """
        if not os.path.lexists(self._folder / _name(ANSWERS, number)):
            raise BadRequest(
                f"the answer to request {number} is no longer kept: the last {KEPT_ANSWERS} are"
            )
        return self._read(ANSWERS, number)

    def _read(self, kind: str, number: int) -> dict[str, Any]:
        name = _name(kind, number)
        entry = read(self._folder, name, kind=str, digest=str)
        outcome = {"body"} if kind == REQUESTS else {"result", "error"}
        if entry["kind"] not in KINDS or not outcome & set(entry):
            raise DamagedJob(name, "it is not what this version of moetrain writes")
        return entry

    def prune(self, seen: int) -> None:
        """Remove files that are not needed once every checkpoint has seen so many requests."""
        self._entries = {n: entry for n, entry in self._entries.items() if n >= seen}
        for kind, end in ((REQUESTS, self.done), (ANSWERS, self.done - KEPT_ANSWERS)):
            for number in self._numbers(kind):
                if number < min(seen, end):
                    (self._folder / _name(kind, number)).unlink()

    def _numbers(self, kind: str) -> set[int]:
        """Of the files that are complete."""
        names = map(_NAME.fullmatch, os.listdir(self._folder / kind))
        return {int(name[1]) for name in names if name}


class Full(Exception):
    """A service has as much to do as it takes; the message is one line for the client."""


def _name(kind: str, number: int) -> str:
    return f"{kind}/{number:08d}.json"
