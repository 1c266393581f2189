"""Calls of an environment, each with a time limit, none of which can stop the others.

Every call starts in a thread of its own. One that gives its answer there is waited for, so that a
run whose environment is quick is the same at every rerun. One that gives an awaitable goes on, on
an event loop that all of them share, beside whatever else is done meanwhile.

A thread cannot be ended from outside: one that hangs is left behind, as a daemon that does not keep
the process alive. So is a loop that somebody blocks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Generic, NamedTuple, TypeVar

logger = logging.getLogger("moetrain")

K = TypeVar("K")

GRACE_SECONDS = 1.0
"""After its limit, in which a loop that works has ended a call."""


class Failed(NamedTuple):
    """A call that gave nothing."""

    reason: str
    """``raised`` or ``timeout``."""
    detail: str


class Calls(Generic[K]):
    """Calls under way, each by a key of the caller's."""

    def __init__(self, limit: float) -> None:
        """``limit``: seconds for one call."""
        self.limit = limit
        self._plain: dict[K, tuple[Future[Any], float]] = {}
        self._later: dict[K, tuple[Future[Any], float, asyncio.AbstractEventLoop]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, key: K, function: Callable[..., Any], *args: Any) -> None:
        """Begin ``function(*args)``."""
        future: Future[Any] = Future()
        threading.Thread(target=_run, args=(future, function, *args), daemon=True).start()
        self._plain[key] = future, time.monotonic() + self.limit

    def __len__(self) -> int:
        return len(self._plain) + len(self._later)

    def finished(self, patience: float = 0.0) -> list[tuple[K, Any]]:
        """What has come, in the order of the calls: results, or :class:`Failed`.

        Waits for those that answer where they are called, and, where these are none, up to
        ``patience`` seconds for one of the others.
        """
        done: list[tuple[K, Any]] = []
        for key, (future, deadline) in self._plain.items():
            result = _result(future, deadline - time.monotonic())
            if isinstance(result, Awaitable):
                self._later[key] = self._go_on(result, deadline)
            else:
                done.append((key, result))
        self._plain.clear()
        if not done and self._later and patience:
            wait([future for future, *_ in self._later.values()], patience, FIRST_COMPLETED)
        now = time.monotonic()
        for key, (future, deadline, loop) in list(self._later.items()):
            if future.done() or now > deadline + GRACE_SECONDS:
                done.append((key, _result(future, 0)))
                del self._later[key]
                if not future.done() and loop is self._loop:  # blocked: the next get another
                    self._loop = None
        return done

    def _go_on(
        self, result: Awaitable[Any], deadline: float
    ) -> tuple[Future[Any], float, asyncio.AbstractEventLoop]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()

        async def limited() -> Any:
            return await asyncio.wait_for(result, max(0, deadline - time.monotonic()))

        return asyncio.run_coroutine_threadsafe(limited(), self._loop), deadline, self._loop


def _run(future: Future[Any], function: Callable[..., Any], *args: Any) -> None:
    try:
        future.set_result(function(*args))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it ends this call alone
        future.set_exception(error)


def _result(future: Future[Any], seconds: float) -> Any:
    """What ``future`` has come to after ``seconds`` at most, or why nothing."""
    if not wait([future], max(0, seconds)).done:
        return Failed("timeout", "no answer within rl.step_timeout")
    error = future.exception()
    if error is None:
        return future.result()
    reason = "timeout" if isinstance(error, TimeoutError) else "raised"
    return Failed(reason, f"{type(error).__name__}: {error}")
