"""Calls of an environment, each with a time limit, none of which can stop the others.

Every call starts in a thread beside the caller's. One that gives its answer there is waited for, so
that a run whose environment is quick is the same at every rerun. One that gives an awaitable goes
on, on an event loop that all of them share, beside whatever else is done meanwhile.

One thread makes all calls that are quick; where one is not, there are soon as many as calls. A
thread cannot be ended from outside: one that hangs is left behind, as a daemon that does not keep
the process alive. So is a loop that somebody blocks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

logger = logging.getLogger("moetrain")

K = TypeVar("K")

PATIENCE = 1.0
"""Seconds between looks at calls whose answers come later, where nothing else is to be done."""
GRACE_SECONDS = 1.0
"""After its limit, in which a loop that works has ended a call."""
QUICK_SECONDS = 0.005
"""What a call may take before others no longer wait for its thread."""


class Failed(NamedTuple):
    """What came of a call instead of an answer."""

    reason: str
    """A word to count by: ``raised`` or ``timeout``; others have more."""
    detail: str


class Calls(Generic[K]):
    """Calls under way, each by a key of the caller's."""

    def __init__(self, limit: float) -> None:
        """``limit``: seconds for one call."""
        self.limit = limit
        self._plain: dict[K, _Call] = {}
        self._later: dict[K, _Call] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_threads = 0

    def start(self, key: K, function: Callable[..., Any], *args: Any) -> None:
        """Begin ``function(*args)``."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        call = _Call(Future(), Future(), self.limit, self._loop)
        self._queue.put(partial(call.run, function, *args))
        if not self._num_threads:
            self._add_threads(1)
        self._plain[key] = call

    def __len__(self) -> int:
        return len(self._plain) + len(self._later)

    def finished(self, patience: float = 0.0) -> list[tuple[K, Any]]:
        """What has come, in the order of the calls: results, or :class:`Failed`.

        Waits for those that answer where they are called, and, where these are none, up to
        ``patience`` seconds for one of the others.
        """
        done: list[tuple[K, Any]] = []
        for key, call in self._plain.items():
            while not self._queue.empty() and not _is_done(call.future, QUICK_SECONDS):
                self._add_threads(min(self._num_threads, self._queue.qsize()))
            result = _result(call.future, call.deadline() - time.monotonic())
            if isinstance(result, Future):
                self._later[key] = call._replace(future=result)
            else:
                done.append((key, result))
        self._plain.clear()
        if not done and self._later and patience:
            wait([call.future for call in self._later.values()], patience, FIRST_COMPLETED)
        for key, call in list(self._later.items()):
            is_done = call.future.done()
            if is_done or time.monotonic() > call.deadline() + GRACE_SECONDS:
                done.append((key, _result(call.future, 0)))
                del self._later[key]
                if not is_done and call.loop is self._loop:  # blocked: the next get another
                    self._loop = None
        return done

    def wait_for_all(self) -> dict[K, Any]:
        """What comes of all calls under way, as :meth:`finished` has it."""
        found: dict[K, Any] = {}
        while len(self):
            found |= dict(self.finished(PATIENCE))
        return found

    def _add_threads(self, number: int) -> None:
        for _ in range(number):
            threading.Thread(target=_work, args=(self._queue,), daemon=True).start()
        self._num_threads += number


def _work(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        queue.get()()


class _Call(NamedTuple):
    """A call under way."""

    future: Future[Any]
    """Of its result; or of another future, where that is still to come."""
    begun: Future[float]
    """Of when a thread has taken it up: what waits for its turn behind others is not late."""
    limit: float
    loop: asyncio.AbstractEventLoop

    def deadline(self) -> float:
        """Of a call that no longer waits for a thread."""
        return self.begun.result() + self.limit

    def run(self, function: Callable[..., Any], *args: Any) -> None:
        """In one of the threads."""
        self.begun.set_result(time.monotonic())
        try:
            result = function(*args)
            if isinstance(result, Awaitable):
                left = max(0.0, self.deadline() - time.monotonic())
                result = asyncio.run_coroutine_threadsafe(_limited(result, left), self.loop)
            self.future.set_result(result)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it ends this call alone
            self.future.set_exception(error)


async def _limited(result: Awaitable[Any], seconds: float) -> Any:
    try:
        return await asyncio.wait_for(_contained(result), seconds)
    except asyncio.CancelledError as error:  # the environment's own: nobody here cancels a call
        return _failed(error)


async def _contained(result: Awaitable[Any]) -> Any:
    """``result``, without what would end the loop, and with it everybody's calls."""
    try:
        return await result
    except (SystemExit, KeyboardInterrupt) as error:
        return _failed(error)


def _result(future: Future[Any], seconds: float) -> Any:
    """What ``future`` has come to after ``seconds`` at most, or why nothing."""
    if not _is_done(future, max(0, seconds)):
        return Failed("timeout", "no answer within rl.step_timeout")
    error = future.exception()
    if error is None:
        return future.result()
    return _failed(error)


def _is_done(future: Future[Any], seconds: float) -> bool:
    """Whether it is, within ``seconds``."""
    return future.done() or bool(wait([future], seconds).done)


def _failed(error: BaseException) -> Failed:
    """Of ``error``, whose text may raise too."""
    reason = "timeout" if issubclass(type(error), TimeoutError) else "raised"
    try:
        text = "".join(traceback.format_exception_only(error))
    except BaseException:  # noqa: BLE001 - what looks for notes in it runs code of its own
        text = f"{type(error).__name__}, which cannot be printed"
    return Failed(reason, " ".join(text.split()))
