"""Runs a generator for an event loop: a thread takes steps, whose tokens are yielded at once."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from moetrain.generate.engine import Generator
from moetrain.generate.grammars import Compiled
from moetrain.generate.request import Request, Update

_T = TypeVar("_T")


class ServingClosedError(RuntimeError):
    """The server is stopping, so nothing more is generated."""


class _Listener(asyncio.Queue[Update | Exception]):
    """The updates of one call of :meth:`Serving.stream`, or the error that ends it."""

    num_open = 0
    """Number of completions that are not finished."""


class Serving:
    """Serves the requests of one event loop with ``generator``. Nothing else may use it meanwhile.

    All calls of the generator run on a single thread.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._thread = ThreadPoolExecutor(1, "generator")
        self._streams: list[_Listener] = []
        self._listeners: dict[str, _Listener] = {}
        """The listener of each request that was submitted, by the request's id."""
        self._driver: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Number of unfinished completions, in any state."""
        return sum(listener.num_open for listener in self._streams)

    async def stream(self, *requests: Request) -> AsyncGenerator[Update, None]:
        """Yield the tokens of all completions of ``requests`` as they are generated.

        Raises:
            BusyError: too many grammars are in use now.
            RequestError: a request can never be served, or its id is being served already.
            ServingClosedError: :meth:`close` was called.
        """
        if self._is_closed:
            raise ServingClosedError("generation was closed")
        left = sum(request.params.n for request in requests)
        submitted: Future[None] | None = None
        listener = _Listener()
        listener.num_open = left
        self._streams.append(listener)
        try:
            async with self._compiled(requests):
                submitted = self._thread.submit(self.generator.submit, *requests)
                await asyncio.wrap_future(submitted)
            self._listeners |= {request.id: listener for request in requests}
            if self._driver is None or self._driver.done():
                self._driver = asyncio.create_task(self._drive())
            while left:
                update = await listener.get()
                if isinstance(update, Exception):
                    raise update
                left -= update.finish_reason is not None
                yield update
        finally:
            self._streams.remove(listener)
            for request in requests:
                if self._listeners.get(request.id) is listener:
                    del self._listeners[request.id]
            if left and submitted is not None and not self._is_closed:
                # The abort is not awaited: a task that is being cancelled must not await.
                self._thread.submit(self._abort, requests, submitted)

    @asynccontextmanager
    async def _compiled(self, requests: Sequence[Request]) -> AsyncIterator[None]:
        """Compile the grammars of ``requests``, and keep them while the context lasts.

        Raises RequestError: a grammar cannot be compiled.
        """
        firsts = {r.params.grammar: r for r in reversed(requests) if r.params.grammar is not None}
        held: list[Compiled] = []
        try:
            for request in firsts.values():
                held.append(self.generator.compile(request))
                ready = asyncio.wrap_future(held[-1].ready)
                ready.add_done_callback(lambda done: done.cancelled() or done.exception())
                # Other requests may wait for the same grammar, so cancelling this one must not
                # cancel it.
                await asyncio.wait((ready,))
                try:
                    ready.result()
                except ValueError as error:
                    raise self.generator.refusal(request, error) from None
            yield
        finally:
            for compiled in held:
                self.generator.grammars.release(compiled)

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call ``function(*args)`` on the generator's thread, between two steps."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def close(self) -> None:
        """Abort all requests, so that their streams raise ServingClosedError; end the thread."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
        for name, listener in list(self._listeners.items()):
            await self.call(self.generator.abort, name)
            listener.put_nowait(ServingClosedError(f"request {name!r}: generation was closed"))
        self._thread.shutdown()

    def _abort(self, requests: Sequence[Request], submitted: Future[None]) -> None:
        """Abort ``requests`` unless submitting them failed. Runs on the generator's thread."""
        if not submitted.cancelled() and submitted.exception() is None:
            for request in requests:
                self.generator.abort(request.id)

    async def _drive(self) -> None:
        """Take steps while there are requests, and give each listener its updates."""
        try:
            while self._listeners:
                updates = await self.call(self._step)
                if not updates:  # the step read part of a long prompt
                    await asyncio.sleep(0.001)
                for update in updates:
                    if listener := self._listeners.get(update.completion.request_id):
                        listener.num_open -= update.finish_reason is not None
                        listener.put_nowait(update)
        except Exception as error:  # noqa: BLE001 - every listener raises it
            for listener in self._listeners.values():
                listener.num_open = 0
                listener.put_nowait(error)

    def _step(self) -> list[Update]:
        """Take a step and return its new tokens. Runs on the generator's thread."""
        return [
            Update(
                completion=completion,
                token=completion.tokens[i],
                logprob=completion.logprobs[i],
                top_logprobs=completion.top_logprobs[i] if completion.top_logprobs else {},
                finish_reason=completion.finish_reason if i == -1 else None,
            )
            for completion in self.generator.step()
            for i in range(-completion.num_new, 0)
        ]
