"""What a job has been asked and has answered, on the disk: a request is there whole or not at all.

    jobs/<id>/job.json                 seed, and whether it is open, cancelled, finished or failed
              requests/00000007.json   from when it was taken up until a checkpoint has seen it
              answers/00000007.json    the newest, for whoever asks again
              checkpoints/step-...     the state after so many requests (:mod:`moetrain.checkpoint`)
              saves/<name>/            the same under a name, and the adapter in PEFT's format

A request's number is its place in the job's order, from 0. A client that sends one again under its
number (the connection broke, the service was killed) has the first one's answer: each is done once.

What is killed leaves no more than a file under a temporary name; there is nothing to be repaired.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from moetrain.checkpoint.folder import fsync
from moetrain.jobs.desk import Desk
from moetrain.jobs.durable import read, write_durably
from moetrain.jobs.requests import KINDS, BadRequest

KEPT_ANSWERS = 100
"""Of each job: a client that asks for older ones has lost its place."""


class Log(Protocol):
    """Where a job's requests come from, and where its answers go."""

    accepted: int
    """Requests that there are, ..."""
    done: int
    """... and those that have an answer."""

    def serve(self, number: int, desk: Desk) -> dict[str, Any]:
        """What comes of the request, at the desk where its job sits."""
        ...

    def serve_again(self, number: int, desk: Desk) -> None:
        """Let the job be as it was after the request, which has an answer."""
        ...

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        """Keep what came of the request that was served last: ``result``, or ``error``."""
        ...

    def prune(self, seen: int) -> None:
        """Forget what nobody needs when every checkpoint has seen so many requests."""
        ...


class Journal:
    """The :class:`Log` of a job that a client asks."""

    def __init__(self, folder: Path) -> None:
        self._requests, self._answers = folder / "requests", folder / "answers"
        for path in (self._requests, self._answers):
            path.mkdir(exist_ok=True)
        fsync(folder)
        self.done = 1 + max(_numbers(self._answers), default=-1)
        self.accepted = max(self.done, 1 + max(_numbers(self._requests), default=-1))
        self._entries: dict[int, dict[str, str]] = {}
        """What answers keep of their requests, of those that came since the service runs."""

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
        write_durably(_file(self._requests, self.accepted), entry, body=body)
        self._entries[self.accepted] = entry
        self.accepted += 1
        return self.accepted - 1

    def _known(self, number: int) -> dict[str, str]:
        """Kind and digest of a request."""
        if number not in self._entries:
            path = _file(self._requests, number)
            entry = read(path) if path.exists() else self.answer_of(number)
            self._entries[number] = {key: entry[key] for key in ("kind", "digest")}
        return self._entries[number]

    def serve(self, number: int, desk: Desk) -> dict[str, Any]:
        return desk.serve(number, str(_file(self._requests, number)))

    def serve_again(self, number: int, desk: Desk) -> None:
        answer = self.answer_of(number)
        if "error" in answer and not answer["refused"]:
            desk.forget_step()
        if "result" in answer and KINDS[answer["kind"]].changes:
            self.serve(number, desk)
        else:
            desk.pass_over(number)

    def answer(self, number: int, answer: Mapping[str, Any]) -> None:
        assert number == self.done
        write_durably(_file(self._answers, number), {**self._known(number), **answer})
        self.done += 1

    def answer_of(self, number: int) -> dict[str, Any]:
        """What came of request ``number``, which is done; BadRequest: that was too long ago."""
        try:
            return read(_file(self._answers, number))
        except FileNotFoundError:
            raise BadRequest(
                f"the answer to request {number} is no longer kept: the last {KEPT_ANSWERS} are"
            ) from None

    def prune(self, seen: int) -> None:
        self._entries = {n: entry for n, entry in self._entries.items() if n >= seen}
        for number in _numbers(self._requests):
            if number < min(seen, self.done):
                _file(self._requests, number).unlink()
        for number in _numbers(self._answers):
            if number < min(seen, self.done - KEPT_ANSWERS):
                _file(self._answers, number).unlink()


class Full(Exception):
    """A service has as much to do as it takes; the message is one line for the client."""


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.json"


def _numbers(folder: Path) -> list[int]:
    """Of the files that are complete."""
    return [int(path.stem) for path in folder.glob("[0-9]*.json")]
