"""Calls of an environment's methods, plain or ``async``, each with a time limit.

Calls are made in daemon threads. One thread makes all of them as long as they are quick; if calls
are slow, threads are added until each has its own, or the system allows no more.
:meth:`Calls.finished` waits for the answers of plain methods, so that a rerun with a quick
environment is the same run. The awaitables of ``async`` methods all run on one event loop, while
text is generated. A thread that hangs is abandoned.

Left out on purpose: isolation of code that blocks the event loop or ends the interpreter.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

PATIENCE = 0.01
"""Seconds for which a caller without other work lets :meth:`Calls.finished` wait for awaitables."""
_QUICK = 0.005
"""Seconds that a call may take before the calls behind it get more threads. Threads have a cost:
when each of 2,048 calls had its own, a step took 0.67 s instead of 0.43 s."""


class Failed(NamedTuple):
    """Takes the place of an answer that did not come, or is not valid."""

    reason: str
    """The kind of failure, one word; failures are counted by it."""
    detail: str


class Calls:
    """Calls that are running, each with a key."""

    def __init__(self, limit: float) -> None:
        """``limit``: seconds that each call may take."""
        self.limit = limit
        self._plain: dict[Any, tuple[Future[Any], Future[float]]] = {}
        """For each call that was started, a future of the answer, and a future of the time at which
        the call began. The answer of an ``async`` method is itself a future."""
        self._awaited: dict[Any, tuple[Future[Any], float]] = {}
        """The futures of ``async`` methods, each with the deadline of its call."""
        self._loop = asyncio.new_event_loop()
        self._queue: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        """Calls that have not begun, each after the two futures of ``_plain``."""
        self._num_threads = 0

    def start(self, key: Hashable, function: Callable[..., Any], *args: Any) -> None:
        """Queue ``function(*args)``; :meth:`finished` returns its answer with ``key``."""
        if not self._num_threads:
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
            self._add_threads(1)
        answer, begun = self._plain[key] = Future(), Future()
        self._queue.put((answer, begun, partial(function, *args)))

    def notify(self, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function`` on the event loop, which logs what it raises; nobody waits for it."""
        self._loop.call_soon_threadsafe(function, *args)

    def finished(self, patience: float = 0.0) -> list[tuple[Any, Any]]:
        """Return the keys and answers of calls that are finished; :class:`Failed` for a failure.

        Waits for all plain calls. If none has an answer, waits up to ``patience`` seconds for an
        awaitable. Plain calls come first, then awaitables, both in the order of the calls.
        """
        done: list[tuple[Any, Any]] = []
        # 1. Plain calls; slow ones get threads of their own.
        is_stuck = False
        for key, (answer, begun) in self._plain.items():
            while not (self._queue.empty() or answer.done() or wait([answer], _QUICK).done):
                if not self._add_threads(min(self._num_threads, self._queue.qsize())):
                    break
            # A call is in the queue for longer only if every thread hangs, and no other starts.
            if not wait([begun], 0 if is_stuck else self.limit).done:
                is_stuck = True
                done.append((key, Failed("timeout", "no thread was free within rl.step_timeout")))
                continue
            deadline = begun.result() + self.limit  # time in the queue does not count
            result = _result(answer, deadline - time.monotonic())
            if isinstance(result, Future):
                self._awaited[key] = result, deadline
            else:
                done.append((key, result))
        self._plain.clear()
        # 2. Awaitables that are done or late.
        if not done and self._awaited and patience:
            wait([answer for answer, _ in self._awaited.values()], patience, FIRST_COMPLETED)
        for key, (answer, deadline) in list(self._awaited.items()):
            if answer.done() or time.monotonic() > deadline:
                done.append((key, _result(answer, 0)))
                answer.cancel()
                del self._awaited[key]
        return done

    def all_finished(self) -> dict[Any, Any]:
        """Wait for all calls; returns their answers by key."""
        found: dict[Any, Any] = {}
        while self._plain or self._awaited:
            found |= dict(self.finished(PATIENCE))
        return found

    def _add_threads(self, number: int) -> bool:
        """Start ``number`` threads, or as many as the system allows; False: it allows no more."""
        for _ in range(number):
            try:
                threading.Thread(target=self._work, daemon=True).start()
            except RuntimeError:
                if not self._num_threads:
                    raise
                return False
            self._num_threads += 1
        return True

    def _work(self) -> None:
        while True:
            answer, begun, call = self._queue.get()
            begun.set_result(time.monotonic())
            try:
                result = call()
                if isinstance(result, Awaitable):
                    result = asyncio.run_coroutine_threadsafe(_awaited(result), self._loop)
                answer.set_result(result)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it ends this call alone
                answer.set_exception(error)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _result(answer: Future[Any], seconds: float) -> Any:
    """Return the result of ``answer`` within ``seconds``, or why there is none."""
    if not (answer.done() or wait([answer], max(0.0, seconds)).done):
        return Failed("timeout", "no answer within rl.step_timeout")
    if answer.cancelled():
        return Failed("raised", "it was cancelled")
    if (error := answer.exception()) is None:
        return answer.result()
    reason = "timeout" if isinstance(error, TimeoutError) else "raised"
    return Failed(reason, " ".join(f"{type(error).__name__}: {error}".split()))
