"""An HTTP server that speaks OpenAI's protocol: completions, chat, streams of both.

Beyond the protocol: prompts may be token ids, ``top_k`` and ``min_p`` are parameters, and every
choice has its ``token_ids``. ``tools``, ``documents`` and ``chat_template_kwargs`` go to the chat
template; what the model calls comes as the text that it writes. A parameter that this server does
not know is an error, since who sends it expects it to do something.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from moetrain.config import ConfigError
from moetrain.data.tokenizer import Tokenizer
from moetrain.rollout.engine import Generator
from moetrain.rollout.request import Request, SamplingParams
from moetrain.rollout.serving import Serving, Update
from moetrain.rollout.text import TextStream, chat_ids, end_ids, prompt_ids

Item = tuple[int, str, Update]
"""One token of one choice: the choice's number, the text that the token adds, and what came."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "n")
_COMMON = {*_SAMPLING, "model", "max_tokens", "stop", "stream", "logprobs", "user"}
_KNOWN = {
    "text_completion": {*_COMMON, "prompt"},
    "chat.completion": {*_COMMON, "messages", "max_completion_tokens", "top_logprobs"}
    | {"tools", "documents", "chat_template_kwargs"},
}


def make_app(generator: Generator, name: str) -> Starlette:
    """The server of ``generator`` (which has a tokenizer), whose model is called ``name``."""
    return _Server(generator, name).app


class _Server:
    def __init__(self, generator: Generator, name: str) -> None:
        assert generator.tokenizer is not None
        self.tokenizer: Tokenizer = generator.tokenizer
        self.generator, self.name = generator, name
        self.stop_ids = end_ids(generator.model, self.tokenizer)
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes, lifespan=self.lifespan)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """What is being served ends with the server."""
        self.serving = Serving(self.generator)
        yield
        await self.serving.close()

    async def health(self, request: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: HTTPRequest) -> Response:
        entry = {"id": self.name, "object": "model", "created": 0, "owned_by": "moetrain"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def completions(self, request: HTTPRequest) -> Response:
        return await self._answer(request, "text_completion")

    async def chat(self, request: HTTPRequest) -> Response:
        return await self._answer(request, "chat.completion")

    async def _answer(self, request: HTTPRequest, kind: str) -> Response:
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError("the body is not a JSON object")
            if unknown := sorted(key for key in set(body) - _KNOWN[kind] if body[key] is not None):
                raise ValueError(f"{unknown[0]!r} is not supported")
            answer = _Answer(self, body, kind)
            if not body.get("stream"):
                return JSONResponse(await answer.whole(request))
            # The first update, or the error, comes before the status is sent.
            updates = answer.updates()
            first = await anext(updates)
        except (ValueError, ConfigError) as error:  # RequestError is a ValueError
            return JSONResponse(error_body(str(error)), 400)
        return StreamingResponse(answer.events(first, updates), media_type="text/event-stream")


@dataclass
class _Choice:
    """One completion of one prompt, as far as it has come."""

    text: TextStream
    updates: list[Update] = field(default_factory=list)
    content: str = ""


class _Answer:
    """One HTTP request: its prompts, served beside each other, and its reply."""

    def __init__(self, server: _Server, body: Mapping[str, Any], kind: str) -> None:
        self.server, self.kind = server, kind
        self.id, self.created = f"{kind}-{uuid.uuid4().hex}", int(time.time())
        self.prompts = self._prompts(body)
        # A number of completions, and of chats whether and how many: the protocol's own habits.
        asked = body.get("logprobs")
        self.has_logprobs = asked not in (None, False)
        self.top = body.get("top_logprobs") or (asked if type(asked) is int else 0)
        longest = max(map(len, self.prompts))
        params = self.params = self._params(body, longest)
        self.requests = [
            Request(f"{self.id}-{i}", prompt, params) for i, prompt in enumerate(self.prompts)
        ]
        self.choices = [
            _Choice(TextStream(server.tokenizer, params.stop))
            for _ in range(len(self.prompts) * params.n)
        ]

    def _prompts(self, body: Mapping[str, Any]) -> list[tuple[int, ...]]:
        tokenizer = self.server.tokenizer
        if self.kind == "chat.completion":
            return [chat_ids(tokenizer, body.get("messages"), body)]
        prompt = body.get("prompt")
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_ids(prompt)):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("prompt is neither text nor token ids, nor a list of either")
        if not all(isinstance(one, str) or _is_ids(one) for one in prompt):
            raise ValueError("prompt is a list of something else than texts or token ids")
        return [prompt_ids(tokenizer, p) if isinstance(p, str) else tuple(p) for p in prompt]

    def _params(self, body: Mapping[str, Any], longest: int) -> SamplingParams:
        stop = body.get("stop") or ()
        room = max(1, self.server.generator.longest - longest)
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        given = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
        given.setdefault("seed", uuid.uuid4().int % 2**63)
        try:
            return SamplingParams(
                max_tokens=min(SamplingParams.max_tokens, room) if most is None else most,
                stop_ids=self.server.stop_ids,
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                logprobs=self.top,
                **given,
            )
        except TypeError as error:
            raise ValueError(f"a parameter is of the wrong type: {error}") from None

    async def updates(self) -> AsyncGenerator[Item, None]:
        """Each token of each choice, as it comes."""
        queue: asyncio.Queue[tuple[int, Update] | Exception | None] = asyncio.Queue()

        async def listen(number: int, request: Request) -> None:
            try:
                async for update in self.server.serving.stream(request):
                    queue.put_nowait((number * self.params.n + update.completion, update))
                queue.put_nowait(None)
            except Exception as error:  # noqa: BLE001 - raised below
                queue.put_nowait(error)

        tasks = [asyncio.create_task(listen(i, r)) for i, r in enumerate(self.requests)]
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

    async def whole(self, request: HTTPRequest) -> dict[str, Any]:
        """The reply in one piece; who hangs up ends it."""
        updates = self.updates()
        try:
            async for _ in updates:
                if await request.is_disconnected():
                    break
        finally:
            await updates.aclose()
        read, made = sum(map(len, self.prompts)), sum(len(c.updates) for c in self.choices)
        usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
        choices = [self._choice(i, c.content, c.updates) for i, c in enumerate(self.choices)]
        return self._reply(choices) | {"usage": usage}

    async def events(
        self, first: Item, updates: AsyncGenerator[Item, None]
    ) -> AsyncGenerator[str, None]:
        """The reply token by token, as server-sent events."""
        try:
            yield self._event(*first)
            async for item in updates:
                yield self._event(*item)
            yield "data: [DONE]\n\n"
        finally:
            await updates.aclose()

    def _event(self, number: int, new: str, update: Update) -> str:
        choice = self._choice(number, new, [update], is_part=True)
        return f"data: {json.dumps(self._reply([choice], is_part=True))}\n\n"

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
        if self.has_logprobs:
            choice["logprobs"] = self._logprobs(updates)
        return choice

    def _logprobs(self, updates: list[Update]) -> dict[str, Any]:
        if self.kind == "text_completion":
            return {
                "tokens": [self._name(update.token) for update in updates],
                "token_logprobs": [update.logprob for update in updates],
                "top_logprobs": [
                    {self._name(token): value for token, value in update.top_logprobs.items()}
                    for update in updates
                ],
            }
        content = []
        for update in updates:
            top = [self._token(*pair) for pair in update.top_logprobs.items()]
            content.append(self._token(update.token, update.logprob) | {"top_logprobs": top})
        return {"content": content}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": logprob, "bytes": None}

    def _name(self, token: int) -> str:
        return self.server.tokenizer.decode([token])


def error_body(problem: str) -> dict[str, Any]:
    """What a client of this protocol is told, as JSON."""
    return {"error": {"message": problem, "type": "invalid_request_error"}}


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
