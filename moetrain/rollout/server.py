"""An HTTP server that speaks OpenAI's protocol: completions and chat, whole or as streams.

Beyond the protocol, every choice has its ``token_ids``. Tool calls come as the text that the model
writes. One thread alone touches the generator, a step or a call at a time; the event loop hands it
requests and hands out its tokens. A listener that stops (a cancelled task, a client that hangs up)
aborts its requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope
from starlette.types import Send as ASGISend

from moetrain.data.tokenizer import Tokenizer
from moetrain.rollout.engine import Generator
from moetrain.rollout.http_json import JsonServer, reply
from moetrain.rollout.protocol import Chat, Completions
from moetrain.rollout.request import (
    Completion,
    Request,
    RequestError,
    SamplingParams,
)
from moetrain.rollout.text import TextStream, chat_ids, end_ids, prompt_ids

_logger = logging.getLogger("moetrain")

_MOST_LOGPROBS = 1 << 20
"""Log-probabilities in one reply, of tokens and alternatives, some hundred bytes each."""
_NOT_FINITE = "the model's probabilities are not finite numbers: its weights are damaged"
_ERRORS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_LEAST_LOGPROB = -9999.0
"""The protocol's value for a token that is never chosen."""
_T = TypeVar("_T")


class _Update(NamedTuple):
    """One more token of a completion."""

    completion: Completion
    """Which grows; with its last token it is whole."""
    token: int
    logprob: float
    top_logprobs: dict[int, float]
    """The likeliest tokens, as many as were asked for."""
    finish_reason: str | None
    """None: more tokens will come."""

    @classmethod
    def of(cls, c: Completion) -> Self:
        """Return the last token of ``c``."""
        top = c.top_logprobs[-1] if c.top_logprobs else {}
        return cls(c, c.tokens[-1], c.logprobs[-1], top, c.finish_reason)


class _Listener:
    """Who waits for the tokens of some requests."""

    def __init__(self, num_open: int) -> None:
        self.queue: asyncio.Queue[_Update | Exception] = asyncio.Queue()
        self.num_open = num_open
        """Completions that are not finished."""


class Serving:
    """Serves one event loop's requests with ``generator``, which nothing else may use meanwhile."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._thread = ThreadPoolExecutor(1, "generator")
        self._streams: list[_Listener] = []
        self._listeners: dict[str, _Listener] = {}
        """By the ids of requests that the generator has taken up."""
        self._driver: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Completions that run or wait, whether or not their tokens were read."""
        return sum(listener.num_open for listener in self._streams)

    async def stream(self, *requests: Request) -> AsyncGenerator[_Update, None]:
        """Yield the tokens of all completions of ``requests`` as they come.

        Raises:
            RequestError: one can never be served, or another of its id is being served.
            RuntimeError: :meth:`close` came first.
        """
        left = sum(request.params.n for request in requests)
        submitted = self._thread.submit(self.generator.submit, *requests)
        listener = _Listener(left)
        self._streams.append(listener)
        try:
            await asyncio.wrap_future(submitted)
            self._listeners |= {request.id: listener for request in requests}
            if self._driver is None or self._driver.done():
                self._driver = asyncio.create_task(self._drive())
            while left:
                update = await listener.queue.get()
                if isinstance(update, Exception):
                    raise update
                left -= update.finish_reason is not None
                yield update
        finally:
            self._streams.remove(listener)
            for request in requests:
                if self._listeners.get(request.id) is listener:
                    del self._listeners[request.id]
            if left and not self._is_closed:
                # Not awaited: a task that is being cancelled must not await.
                self._thread.submit(self._abort, requests, submitted)

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call ``function(*args)`` on the generator's thread, between two steps."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def close(self) -> None:
        """Abort all requests, which raises an error in their listeners, and end the thread."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
        for name, listener in list(self._listeners.items()):
            await self.call(self.generator.abort, name)
            listener.queue.put_nowait(RuntimeError(f"request {name!r}: generation was closed"))
        self._thread.shutdown()

    def _abort(self, requests: Sequence[Request], submitted: Future[None]) -> None:
        """End ``requests`` if ``submitted`` took them up. Runs on the generator's thread."""
        if not submitted.cancelled() and submitted.exception() is None:
            for request in requests:
                self.generator.abort(request.id)

    async def _drive(self) -> None:
        """Take steps as long as anybody listens."""
        try:
            while self._listeners:
                updates = await self.call(self._step)
                if not updates:  # it is paused, or reads a long prompt
                    await asyncio.sleep(0.001)
                for update in updates:
                    if listener := self._listeners.get(update.completion.request_id):
                        listener.num_open -= update.finish_reason is not None
                        listener.queue.put_nowait(update)
        except Exception as error:  # noqa: BLE001 - every listener raises it
            for listener in self._listeners.values():
                listener.num_open = 0
                listener.queue.put_nowait(error)

    def _step(self) -> list[_Update]:
        return [_Update.of(completion) for completion in self.generator.step()]


_Item = tuple[int, str, _Update]
"""One token of one choice: the choice's number, the text that the token adds, and the update."""


class _GenerationFailed(Exception):
    """The server failed to generate; the message is one line for the client."""


class CompletionServer(JsonServer):
    """The HTTP server of a generator that has a tokenizer."""

    def __init__(
        self, generator: Generator, name: str, *, max_queue: int = 1024, max_request_mib: int = 4
    ) -> None:
        """Serve ``max_queue`` completions at once, which run or wait; more are status 429."""
        assert generator.tokenizer is not None
        self.tokenizer: Tokenizer = generator.tokenizer
        self.generator, self.name, self.max_queue = generator, name, max_queue
        self.stop_ids = end_ids(generator.model, self.tokenizer)
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", partial(self.answer, Completions), methods=["POST"]),
            Route("/v1/chat/completions", partial(self.answer, Chat), methods=["POST"]),
        ]
        refusals = {
            RequestError: lambda error: (400, error.problem),
            _GenerationFailed: lambda error: (500, str(error)),
        }
        super().__init__(routes, refusals, max_request_mib, "max_request_mib", self.lifespan)

    @staticmethod
    def error_body(status: int, problem: str) -> dict[str, Any]:
        kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": problem, "type": kind, "param": None, "code": None}}

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Abort what is being served when the server ends."""
        self.serving = Serving(self.generator)
        yield
        await self.serving.close()

    async def models(self, request: HTTPRequest) -> Response:
        entry = {"id": self.name, "object": "model", "created": 0, "owned_by": "moetrain"}
        return reply({"object": "list", "data": [entry]})

    async def answer(self, kind: type[Completions | Chat], request: HTTPRequest) -> Response:
        answer = await self.read(request, partial(self._parse, kind))
        updates = answer.updates()
        if not answer.asked.stream:
            return await _unless_gone(request, answer.whole(updates))
        # The first update, or the error, comes before the status is sent.
        first = await _unless_gone(request, anext(updates))
        return _Events(answer.events(first, updates), updates)

    def _parse(self, kind: type[Completions | Chat], body: object) -> _Answer:
        if isinstance(body, dict):
            body = {key: value for key, value in body.items() if value is not None}
        asked = kind.model_validate(body)
        try:
            return _Answer(self, asked)
        except ValueError as error:  # from SamplingParams, ConfigError among others
            raise HTTPException(400, str(error)) from None


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


class _Answer:
    """One HTTP request: its prompts, served in parallel, and its reply."""

    def __init__(self, server: CompletionServer, asked: Completions | Chat) -> None:
        """Check the request; raises ValueError if a prompt or a parameter is impossible."""
        self.server, self.asked = server, asked
        self.kind = "chat.completion" if isinstance(asked, Chat) else "text_completion"
        self.id, self.created = f"{self.kind}-{uuid.uuid4().hex}", int(time.time())
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
        number = count * params.max_tokens * (1 + params.logprobs)
        if asked.likeliest is not None and number > _MOST_LOGPROBS:
            each = f"{1 + params.logprobs} log-probabilities for each of {count} x "
            problem = f"{each}{params.max_tokens} tokens are more than {_MOST_LOGPROBS}"
            raise ValueError(f"logprobs: {problem}; lower max_tokens, or ask in parts")
        self.requests = [
            Request(f"{self.id}-{i}", prompt, params) for i, prompt in enumerate(self.prompts)
        ]
        stops = params.stop, params.stop_ids
        self.texts = [TextStream(tokenizer, *stops) for _ in range(count)]

    def _params(self) -> SamplingParams:
        longest, most = max(map(len, self.prompts)), self.server.generator.longest
        if longest >= most:
            raise ValueError(f"a prompt of {longest} tokens leaves no room: {most} is the longest")
        wanted = self.asked.most_tokens
        return SamplingParams(
            max_tokens=min(SamplingParams.max_tokens, most - longest) if wanted is None else wanted,
            stop_ids=self.server.stop_ids,
            logprobs=self.asked.likeliest or 0,
            **self.asked.sampling(),
        )

    async def updates(self) -> AsyncGenerator[_Item, None]:
        """Yield each token of each choice as it comes.

        Raises:
            HTTPException, RequestError: too much is being served, or the request can never be.
            _GenerationFailed: a step failed.
        """
        serving, most = self.server.serving, self.server.max_queue
        if serving.num_open + len(self.texts) > most:
            problem = f"{serving.num_open} completions run or wait, of max_queue {most}"
            raise HTTPException(429, f"{problem}; ask again later")
        first = {request.id: i * self.params.n for i, request in enumerate(self.requests)}
        try:
            async with aclosing(serving.stream(*self.requests)) as stream:
                async for update in stream:
                    if not math.isfinite(update.logprob):
                        _logger.error("%s", _NOT_FINITE)
                        raise _GenerationFailed(_NOT_FINITE)
                    number = first[update.completion.request_id] + update.completion.index
                    is_last = update.finish_reason is not None
                    yield number, self.texts[number].push(update.token, is_last), update
        except (RequestError, _GenerationFailed):
            raise
        except Exception as error:  # a failed step fails all requests that it served
            _logger.error("generation failed", exc_info=error)
            raise _GenerationFailed(self.server.FAILED) from None

    async def whole(self, updates: AsyncGenerator[_Item, None]) -> Response:
        """Return the reply in one piece."""
        items = [item async for item in updates]
        return await asyncio.to_thread(self._whole, items)

    def _whole(self, items: Sequence[_Item]) -> Response:
        texts, updates = [""] * len(self.texts), [[] for _ in self.texts]
        for number, new, update in items:
            texts[number] += new
            updates[number].append(update)
        read, made = sum(map(len, self.prompts)), len(items)
        usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
        choices = [self._choice(i, texts[i], of) for i, of in enumerate(updates)]
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
            yield f"data: {json.dumps(self.server.error_body(500, str(error)))}\n\n"

    def _event(self, number: int, new: str, update: _Update) -> str:
        choice = self._choice(number, new, [update], is_part=True)
        data = json.dumps(self._reply([choice], is_part=True), allow_nan=False)
        return f"data: {data}\n\n"

    def _reply(self, choices: list[dict[str, Any]], *, is_part: bool = False) -> dict[str, Any]:
        kind = self.kind + (".chunk" if is_part and self.kind == "chat.completion" else "")
        reply = {"id": self.id, "object": kind, "created": self.created}
        return reply | {"model": self.server.name, "choices": choices}

    def _choice(
        self, number: int, text: str, updates: list[_Update], *, is_part: bool = False
    ) -> dict[str, Any]:
        reason = updates[-1].finish_reason if updates else None
        tokens = [update.token for update in updates]
        choice: dict[str, Any] = {"index": number, "finish_reason": reason, "token_ids": tokens}
        if self.kind == "text_completion":
            choice["text"] = text
        else:
            choice["delta" if is_part else "message"] = {"role": "assistant", "content": text}
        if self.asked.likeliest is not None:
            choice["logprobs"] = self._logprobs(updates)
        return choice

    def _logprobs(self, updates: list[_Update]) -> dict[str, Any]:
        if self.kind == "text_completion":
            pairs = [update.top_logprobs.items() for update in updates]
            return {
                "tokens": [self._name(update.token) for update in updates],
                "token_logprobs": [update.logprob for update in updates],
                "top_logprobs": [
                    {self._name(token): max(p, _LEAST_LOGPROB) for token, p in top} for top in pairs
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


async def _unless_gone(request: HTTPRequest, work: Awaitable[_T]) -> _T:
    """Await ``work``, or cancel it and raise ClientDisconnect when the client hangs up."""

    async def wait_for_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_end())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
