"""An HTTP server that speaks OpenAI's protocol: completions and chat, whole or as streams.

Beyond the protocol (:mod:`moetrain.rollout.protocol`), prompts may be token ids, ``top_k`` and
``min_p`` are parameters, and every choice has its ``token_ids``. ``tools``, ``documents`` and
``chat_template_kwargs`` go to the chat template; tool calls come as the text that the model writes.

:class:`Serving` lets many requests share one generator as asynchronous iterators. One thread alone
touches the generator, a step or a call at a time; the event loop hands it requests and hands out
its tokens. A listener that stops (a cancelled task, a client that hangs up) aborts its request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope
from starlette.types import Send as ASGISend

from moetrain.data.tokenizer import Tokenizer
from moetrain.rollout.engine import Generator
from moetrain.rollout.http_json import FAILED, Bodies, json_app, reply, unless_gone
from moetrain.rollout.protocol import ASKED, Chat, Completions, error_body, validated
from moetrain.rollout.request import (
    Completion,
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
)
from moetrain.rollout.text import TextStream, chat_ids, end_ids, prompt_ids

logger = logging.getLogger("moetrain")

_MOST_LOGPROBS = 1 << 20
"""Log-probabilities in one reply, of tokens and alternatives, some hundred bytes each."""
_NOT_FINITE = "the model's probabilities are not finite numbers: its weights are damaged"
_LEAST_LOGPROB = -9999.0
"""The protocol's value for a token that is never chosen."""
T = TypeVar("T")


class Update(NamedTuple):
    """One more token of a completion."""

    completion: int
    """Which of the request's ``n`` completions it belongs to."""
    token: int
    logprob: float
    top_logprobs: dict[int, float]
    """The likeliest tokens, as many as were asked for."""
    finish_reason: FinishReason | None
    """None: more tokens will come."""
    result: Completion | None
    """The whole completion, once it is finished."""


class Serving:
    """Serves one event loop's requests with ``generator``, which nothing else may use meanwhile."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._thread = ThreadPoolExecutor(1, "generator")
        self._listeners: dict[str, asyncio.Queue[Update | Exception]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._is_closed = False

    async def stream(self, request: Request) -> AsyncIterator[Update]:
        """Yield the tokens of all completions of ``request`` as they come.

        Raises:
            RequestError: it can never be served, or another of its id is being served.
            RuntimeError: :meth:`close` came first.
        """
        submitted = self._thread.submit(self.generator.submit, request)
        try:
            await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:  # the thread may have taken it up already
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
                # Not awaited: a task that is being cancelled must not await.
                self._thread.submit(self.generator.abort, request.id)

    async def complete(self, request: Request) -> list[Completion]:
        """Return the finished completions of ``request``; raises as :meth:`stream`."""
        found: dict[int, Completion] = {}
        async for update in self.stream(request):
            if update.result is not None:
                found[update.completion] = update.result
        return [found[index] for index in range(request.params.n)]

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call ``function(*args)`` on the generator's thread, between two steps."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def close(self) -> None:
        """Abort all requests, which raises an error in their listeners, and end the thread."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
        for name, queue in list(self._listeners.items()):
            await self.call(self.generator.abort, name)
            queue.put_nowait(RuntimeError(f"request {name!r}: generation was closed"))
        self._thread.shutdown()

    def _abort_if_there(self, request_id: str, submitted: Future[None]) -> None:
        """Abort a request if ``submitted`` has taken it up. Runs on the generator's thread."""
        if not submitted.cancelled() and submitted.exception() is None:
            self.generator.abort(request_id)

    async def _drive(self) -> None:
        """Take steps as long as anybody listens."""
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


_Item = tuple[int, str, Update]
"""One token of one choice: the choice's number, the text that the token adds, and the update."""


class _GenerationFailed(Exception):
    """The server failed to generate; the message is one line for the client."""


def make_app(
    generator: Generator,
    name: str,
    *,
    max_queue: int = 1024,
    max_request_mib: int = 4,
) -> Starlette:
    """Make the server of ``generator``, which has a tokenizer, and whose model is called ``name``.

    Args:
        max_queue: completions that run or wait at once; further requests are status 429.
        max_request_mib: size of one body.
    """
    return _Server(generator, name, max_queue, max_request_mib).app


class _Server:
    def __init__(
        self, generator: Generator, name: str, max_queue: int, max_request_mib: int
    ) -> None:
        assert generator.tokenizer is not None
        self.tokenizer: Tokenizer = generator.tokenizer
        self.generator, self.name, self.max_queue = generator, name, max_queue
        self.open = 0
        """Completions that run or wait."""
        self.bodies = Bodies(max_request_mib << 20, "max_request_mib")
        self.stop_ids = end_ids(generator.model, self.tokenizer)
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        refusals = {
            RequestError: lambda error: (400, error.problem),
            _GenerationFailed: lambda error: (500, str(error)),
        }
        self.app = json_app(routes, error_body, refusals, self.lifespan)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Abort what is being served when the server ends."""
        self.serving = Serving(self.generator)
        yield
        await self.serving.close()

    async def health(self, request: HTTPRequest) -> Response:
        return reply({"status": "ok"})

    async def models(self, request: HTTPRequest) -> Response:
        entry = {"id": self.name, "object": "model", "created": 0, "owned_by": "moetrain"}
        return reply({"object": "list", "data": [entry]})

    async def completions(self, request: HTTPRequest) -> Response:
        return await self._answer(request, "text_completion")

    async def chat(self, request: HTTPRequest) -> Response:
        return await self._answer(request, "chat.completion")

    async def _answer(self, request: HTTPRequest, kind: str) -> Response:
        answer = await self.bodies.read(request, partial(self._parse, kind))
        updates = answer.updates()
        if not answer.asked.stream:
            return await unless_gone(request, answer.whole(updates))
        # The first update, or the error, comes before the status is sent.
        first = await unless_gone(request, anext(updates))
        return _Events(answer.events(first, updates), updates)

    def _parse(self, kind: str, body: object) -> _Answer:
        try:
            return _Answer(self, kind, validated(ASKED[kind], body))
        except ValueError as error:  # from SamplingParams, ConfigError among others
            raise HTTPException(400, str(error)) from None

    def take(self, count: int) -> None:
        """Count ``count`` more completions as open; raises HTTPException if there are too many."""
        if self.open + count > self.max_queue:
            problem = f"{self.open} completions run or wait, of max_queue {self.max_queue}"
            raise HTTPException(429, f"{problem}; ask again later")
        self.open += count


class _Events(StreamingResponse):
    """Server-sent events, whose updates are closed however the response ends."""

    def __init__(
        self, events: AsyncGenerator[str, None], updates: AsyncGenerator[_Item, None]
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.updates = updates

    async def __call__(self, scope: Scope, receive: Receive, send: ASGISend) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.updates.aclose()


@dataclass
class _Choice:
    """One completion of one prompt so far."""

    text: TextStream
    updates: list[Update] = field(default_factory=list)
    content: str = ""


class _Answer:
    """One HTTP request: its prompts, served in parallel, and its reply."""

    def __init__(self, server: _Server, kind: str, asked: Completions | Chat) -> None:
        """Check the request; raises ValueError if a prompt or a parameter is impossible."""
        self.server, self.kind, self.asked = server, kind, asked
        self.id, self.created = f"{kind}-{uuid.uuid4().hex}", int(time.time())
        tokenizer = server.tokenizer
        if isinstance(asked, Chat):
            self.prompts = [chat_ids(tokenizer, asked.messages, asked.record)]
        else:
            self.prompts = [
                prompt_ids(tokenizer, one) if isinstance(one, str) else tuple(one)
                for one in asked.prompts()
            ]
        params = self.params = self._params()
        count = len(self.prompts) * params.n
        if count > server.max_queue:
            problem = f"{len(self.prompts)} prompts x n {params.n} are more completions than "
            raise ValueError(f"{problem}max_queue {server.max_queue} allows; ask in parts")
        if (
            asked.has_logprobs
            and count * params.max_tokens * (1 + params.logprobs) > _MOST_LOGPROBS
        ):
            problem = f"{1 + params.logprobs} log-probabilities for each of {count} x "
            raise ValueError(
                f"logprobs: {problem}{params.max_tokens} tokens are more than {_MOST_LOGPROBS}; "
                "lower max_tokens, or ask in parts"
            )
        self.requests = [
            Request(f"{self.id}-{i}", prompt, params) for i, prompt in enumerate(self.prompts)
        ]
        self.choices = [_Choice(TextStream(tokenizer, params.stop)) for _ in range(count)]

    def _params(self) -> SamplingParams:
        longest, most = max(map(len, self.prompts)), self.server.generator.longest
        if longest >= most:
            raise ValueError(f"a prompt of {longest} tokens leaves no room: {most} is the longest")
        wanted = self.asked.most_tokens
        return SamplingParams(
            max_tokens=min(SamplingParams.max_tokens, most - longest) if wanted is None else wanted,
            stop_ids=self.server.stop_ids,
            logprobs=self.asked.top,
            **self.asked.sampling(),
        )

    async def updates(self) -> AsyncGenerator[_Item, None]:
        """Yield each token of each choice as it comes.

        Raises:
            HTTPException: too much is being served.
            RequestError: the request can never be served.
            _GenerationFailed: a step failed.
        """
        server, n = self.server, self.params.n
        queue: asyncio.Queue[tuple[int, Update] | Exception | None] = asyncio.Queue()

        async def listen(number: int, request: Request) -> None:
            try:
                async for update in server.serving.stream(request):
                    queue.put_nowait((number * n + update.completion, update))
                queue.put_nowait(None)
            except RequestError as error:
                queue.put_nowait(error)
            except Exception as error:  # a failed step fails all requests that it served
                logger.error("generation failed", exc_info=error)
                queue.put_nowait(_GenerationFailed(FAILED))

        def give_back(task: asyncio.Task[None]) -> None:
            server.open -= n

        server.take(len(self.choices))
        tasks = [asyncio.create_task(listen(i, r)) for i, r in enumerate(self.requests)]
        for task in tasks:  # counted until generation ends, not until a slow reader does
            task.add_done_callback(give_back)
        try:
            still_open = len(tasks)
            while still_open:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    still_open -= 1
                else:
                    number, update = item
                    if not math.isfinite(update.logprob):
                        logger.error("%s", _NOT_FINITE)
                        raise _GenerationFailed(_NOT_FINITE)
                    yield number, self._take(self.choices[number], update), update
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, choice: _Choice, update: Update) -> str:
        ends = update.finish_reason is not None and update.token in self.params.stop_ids
        is_last = update.finish_reason is not None
        new = choice.text.end() if ends else choice.text.push(update.token, is_last)
        choice.updates.append(update)
        choice.content += new
        return new

    async def whole(self, updates: AsyncGenerator[_Item, None]) -> Response:
        """Return the reply in one piece."""
        async for _ in updates:
            pass
        return await asyncio.to_thread(self._whole)

    def _whole(self) -> Response:
        read, made = sum(map(len, self.prompts)), sum(len(c.updates) for c in self.choices)
        usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
        choices = [self._choice(i, c.content, c.updates) for i, c in enumerate(self.choices)]
        return reply(self._reply(choices) | {"usage": usage})

    async def events(
        self, first: _Item, updates: AsyncGenerator[_Item, None]
    ) -> AsyncGenerator[str, None]:
        """Yield the reply token by token as server-sent events; an error is the last one."""
        try:
            yield self._event(*first)
            async for item in updates:
                yield self._event(*item)
            yield "data: [DONE]\n\n"
        except _GenerationFailed as error:
            yield f"data: {json.dumps(error_body(500, str(error)))}\n\n"

    def _event(self, number: int, new: str, update: Update) -> str:
        choice = self._choice(number, new, [update], is_part=True)
        data = json.dumps(self._reply([choice], is_part=True), allow_nan=False)
        return f"data: {data}\n\n"

    def _reply(self, choices: list[dict[str, Any]], *, is_part: bool = False) -> dict[str, Any]:
        kind = self.kind + (".chunk" if is_part and self.kind == "chat.completion" else "")
        reply = {"id": self.id, "object": kind, "created": self.created}
        return reply | {"model": self.server.name, "choices": choices}

    def _choice(
        self, number: int, text: str, updates: list[Update], *, is_part: bool = False
    ) -> dict[str, Any]:
        reason = updates[-1].finish_reason if updates else None
        tokens = [update.token for update in updates]
        choice: dict[str, Any] = {"index": number, "finish_reason": reason, "token_ids": tokens}
        if self.kind == "text_completion":
            choice["text"] = text
        else:
            choice["delta" if is_part else "message"] = {"role": "assistant", "content": text}
        if self.asked.has_logprobs:
            choice["logprobs"] = self._logprobs(updates)
        return choice

    def _logprobs(self, updates: list[Update]) -> dict[str, Any]:
        if self.kind == "text_completion":
            return {
                "tokens": [self._name(update.token) for update in updates],
                "token_logprobs": [update.logprob for update in updates],
                "top_logprobs": [
                    {
                        self._name(token): max(p, _LEAST_LOGPROB)
                        for token, p in update.top_logprobs.items()
                    }
                    for update in updates
                ],
            }
        content = []
        for update in updates:
            top = [self._token(*pair) for pair in update.top_logprobs.items()]
            content.append(self._token(update.token, update.logprob) | {"top_logprobs": top})
        return {"content": content}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        logprob = max(logprob, _LEAST_LOGPROB)
        return {"token": self._name(token), "logprob": logprob, "bytes": None}

    def _name(self, token: int) -> str:
        return self.server.tokenizer.decode([token])
