"""Many requesters of one generator: asynchronous iterators over the same steps.

The generator is touched by one thread alone, a step or a call at a time; an event loop hands it
requests and hands out what came of each step. Who stops listening (a cancelled task, a client that
hangs up) aborts the request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from moetrain.rollout.engine import Generator
from moetrain.rollout.request import Completion, FinishReason, Request

T = TypeVar("T")


class Update(NamedTuple):
    """One more token of a completion."""

    completion: int
    """Which of the request's ``n``."""
    token: int
    logprob: float
    top_logprobs: dict[int, float]
    """As many of the likeliest tokens as were asked for."""
    finish_reason: FinishReason | None
    """None: more will come."""
    result: Completion | None
    """All of it, once it is finished."""


class Serving:
    """Serves requests of one event loop by ``generator``, which nobody else may use meanwhile."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._thread = ThreadPoolExecutor(1, "generator")
        self._listeners: dict[str, asyncio.Queue[Update | Exception]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._is_closed = False

    async def stream(self, request: Request) -> AsyncIterator[Update]:
        """The tokens of ``request`` as they come, of all its completions.

        Raises:
            RequestError: it can never be served, or one of its id is being served.
            RuntimeError: :meth:`close` came first.
        """
        submitted = self._thread.submit(self.generator.submit, request)
        try:
            await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:  # it may be served all the same
            self._thread.submit(self._abort_if_there, request.id, submitted)
            raise
        queue: asyncio.Queue[Update | Exception] = asyncio.Queue()
        self._listeners[request.id] = queue
        open_completions = request.params.n
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            while open_completions:
                update = await queue.get()
                if isinstance(update, Exception):
                    raise update
                open_completions -= update.finish_reason is not None
                yield update
        finally:
            del self._listeners[request.id]
            if open_completions and not self._is_closed:
                # Not awaited: a task that is being cancelled may not be.
                self._thread.submit(self.generator.abort, request.id)

    async def complete(self, request: Request) -> list[Completion]:
        """The finished completions of ``request``; raises as :meth:`stream`."""
        found: dict[int, Completion] = {}
        async for update in self.stream(request):
            if update.result is not None:
                found[update.completion] = update.result
        return [found[index] for index in range(request.params.n)]

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` between two steps, where the generator may be touched."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def close(self) -> None:
        """Abort what is being served, which is an error to who listens, and end the thread."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
        for name, queue in list(self._listeners.items()):
            await self.call(self.generator.abort, name)
            queue.put_nowait(RuntimeError(f"request {name!r}: generation was closed"))
        self._thread.shutdown()

    def _abort_if_there(self, request_id: str, submitted: Future[None]) -> None:
        """On the thread, after what ``submitted`` stands for."""
        if not submitted.cancelled() and submitted.exception() is None:
            self.generator.abort(request_id)

    async def _drive(self) -> None:
        """Steps, as long as anybody listens."""
        try:
            while self._listeners:
                updates = await self.call(self._step)
                if not updates:  # it is paused, or reads a long prompt
                    await asyncio.sleep(0.001)
                for name, update in updates:
                    if name in self._listeners:
                        self._listeners[name].put_nowait(update)
        except Exception as error:  # noqa: BLE001 - every listener raises it
            for queue in self._listeners.values():
                queue.put_nowait(error)

    def _step(self) -> list[tuple[str, Update]]:
        return [(c.request_id, _last_of(c)) for c in self.generator.step()]


def _last_of(c: Completion) -> Update:
    top = c.top_logprobs[-1] if c.top_logprobs else {}
    result = None if c.finish_reason is None else c
    return Update(c.index, c.tokens[-1], c.logprobs[-1], top, c.finish_reason, result)


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns or raises; from inside a running event loop (a notebook's) as well.

    There it runs in a loop of its own in another thread, while this one waits.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    answers: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return answers[0]
