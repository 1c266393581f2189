"""An HTTP server that speaks OpenAI's protocol: completions and chat, whole or as streams.

Beyond the protocol, every choice has its ``token_ids``. Tool calls come as the text that the model
writes. Who hangs up is generated for no further (:class:`~moetrain.rollout.engine.Serving`).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope
from starlette.types import Send as ASGISend

from moetrain.config import logger
from moetrain.data.tokenizer import Tokenizer
from moetrain.models.families.tool_calls import call_grammar
from moetrain.rollout.engine import Generator
from moetrain.rollout.http_json import JsonServer
from moetrain.rollout.request import (
    JsonBody,
    Request,
    RequestError,
    SamplingParams,
    TextStream,
    chat_ids,
    end_ids,
)
from moetrain.rollout.serving import Serving, Update

_MOST_COMPLETIONS = 128
_MOST_LIKELIEST = 20
"""Likeliest tokens beside a chosen one, as OpenAI limits them for chats."""
_MOST_STOPS, _LONGEST_STOP = 16, 128
"""Number of stop texts, and characters of one: each token is checked against all of them."""
_MOST_TURNS = 4096
"""Turns of a chat: templates may take time that grows with their square."""
_MOST_LOGPROBS = 1 << 20
"""Log-probabilities in one reply, of tokens and alternatives, some hundred bytes each."""
_NOT_FINITE = "the model's probabilities are not finite numbers: its weights are damaged"
_ERRORS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_LEAST_LOGPROB = -9999.0
"""The protocol's value for a token that is never chosen."""
_T = TypeVar("_T")
_Stop = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]
_Stops = Annotated[list[_Stop], BeforeValidator(lambda x: [x] if isinstance(x, str) else x)]


# ---- what clients may ask ------------------------------------------------------------------------


class _Format(JsonBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] = Field(default_factory=dict[str, Any])
    """``schema``, and others that only describe it."""


class _Asked(JsonBody):
    """The fields that completions and chats share. SamplingParams says what numbers may be."""

    model: str = ""
    """Ignored: the server has one model."""
    user: str = ""
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None: a new one for each request."""
    n: int = Field(default=1, le=_MOST_COMPLETIONS)
    stop: _Stops = Field([], max_length=_MOST_STOPS, fail_fast=True)
    stream: bool = False
    response_format: _Format = _Format(type="text")
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, min_length=1, fail_fast=True)
    guided_grammar: str | None = None

    def grammars(self, tokenizer: Tokenizer) -> list[tuple[Any, Any]]:
        """Return the grammars that are asked for, by kind, of which a text can follow one."""
        form, schema = self.response_format, self.response_format.json_schema.get("schema")
        schemas = {"text": None, "json_object": {"type": "object"}, "json_schema": schema}
        if form.type == "json_schema" and schema is None:
            raise ValueError("response_format: json_schema has no schema; give it")
        given = [
            ("json_schema", schemas[form.type]),
            ("json_schema", self.guided_json),
            ("regex", self.guided_regex),
            ("choice", self.guided_choice),
            ("grammar", self.guided_grammar),
        ]
        return [(kind, text) for kind, text in given if text is not None]

    @property
    def most_tokens(self) -> int | None:
        """Tokens of a completion at most; None: the default."""
        return self.max_tokens


class _Completions(_Asked):
    kind: ClassVar = "text_completion"
    """The ``object`` of a reply."""

    prompt: Any
    """A text or token ids, or a list of either."""
    logprobs: int | None = Field(default=None, ge=0, le=_MOST_LIKELIEST)

    @property
    def likeliest(self) -> int | None:
        """How many likeliest tokens go with each token's log-probability; None: there are none."""
        return self.logprobs

    def prompts(self, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
        """Return the tokens of every prompt; raises ValueError."""
        prompt = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_ids(prompt)):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise ValueError("prompt is neither text nor token ids, nor a list of either")
        if not all(isinstance(one, str) or _is_ids(one) for one in prompt):
            raise ValueError("prompt is a list of something else than texts or token ids")
        try:
            return [
                tuple(tokenizer.encode_prompt(one) if isinstance(one, str) else one)
                for one in prompt
            ]
        except ValueError as error:
            raise ValueError(f"prompt: {error}") from None

    def text(self, text: str, is_part: bool) -> dict[str, Any]:
        """Return the fields of a choice that hold its text, or a part of it."""
        return {"text": text}

    def logprobs_of(self, updates: list[Update], name: Callable[[int], str]) -> dict[str, Any]:
        """Return a choice's log-probabilities; ``name`` gives a token's text."""
        tops = [update.top_logprobs.items() for update in updates]
        return {
            "tokens": [name(update.token) for update in updates],
            "token_logprobs": [update.logprob for update in updates],
            "top_logprobs": [
                {name(token): max(p, _LEAST_LOGPROB) for token, p in top} for top in tops
            ],
        }


class Chat(_Asked):
    """A request to answer the last turn of a chat."""

    kind: ClassVar = "chat.completion"

    messages: list[Any] = Field(max_length=_MOST_TURNS)
    """Objects, whose keys the template defines."""
    tools: Any = None
    tool_choice: Any = None
    documents: Any = None
    chat_template_kwargs: Any = None
    """These three go to the template, which defines what they may be."""
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=_MOST_LIKELIEST)

    @model_validator(mode="after")
    def _is_consistent(self) -> Chat:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens is max_completion_tokens by another name; send one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs has no effect without logprobs true; send both")
        return self

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    def grammars(self, tokenizer: Tokenizer) -> list[tuple[Any, Any]]:
        found = super().grammars(tokenizer)
        if self.tool_choice not in (None, "auto", "none"):
            template = tokenizer.tool_template or tokenizer.chat_template or ""
            found.append(("grammar", call_grammar(self.tools, self.tool_choice, template)))
        return found

    def prompts(self, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
        names = ("tools", "documents", "chat_template_kwargs")
        record = {name: getattr(self, name) for name in names}
        return [chat_ids(tokenizer, self.messages, record)]

    def text(self, text: str, is_part: bool) -> dict[str, Any]:
        return {"delta" if is_part else "message": {"role": "assistant", "content": text}}

    def logprobs_of(self, updates: list[Update], name: Callable[[int], str]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token": name(token), "logprob": max(logprob, _LEAST_LOGPROB), "bytes": None}

        content = []
        for update in updates:
            top = [entry(*pair) for pair in update.top_logprobs.items()]
            content.append(entry(update.token, update.logprob) | {"top_logprobs": top})
        return {"content": content}


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


# ---- the server ----------------------------------------------------------------------------------

_Item = tuple[int, str, Update]
"""One token of one choice: the choice's number, the text that the token adds, and the update."""


class CompletionServer(JsonServer):
    """The HTTP server of a generator that has a tokenizer."""

    BODIES: ClassVar[dict[str, type[_Completions | Chat]]] = {
        "/v1/completions": _Completions,
        "/v1/chat/completions": Chat,
    }
    """The routes that generate, and what may be asked there."""

    def __init__(
        self, generator: Generator, name: str, *, max_queue: int = 1024, max_request_mib: int = 4
    ) -> None:
        """Serve ``max_queue`` completions at once, which run or wait; more are status 429."""
        assert generator.tokenizer is not None
        self.tokenizer: Tokenizer = generator.tokenizer
        self.generator = generator
        self.name = name
        self.max_queue = max_queue
        self.stop_ids = end_ids(generator.model, self.tokenizer)
        routes = [Route("/v1/models", self.models)]
        for path, kind in self.BODIES.items():
            routes.append(Route(path, partial(self.answer, kind), methods=["POST"]))
        super().__init__(routes, max_request_mib, "max_request_mib", lifespan=self.lifespan)

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
        return self.reply({"object": "list", "data": [entry]})

    async def answer(self, kind: type[_Completions | Chat], request: HTTPRequest) -> Response:
        answer = await self.read(request, partial(self._parse, kind))
        updates = answer.updates()
        if not answer.asked.stream:
            return await unless_gone(request, answer.whole(updates))
        # The first update, or the error, comes before the status is sent.
        first = await unless_gone(request, anext(updates))
        return _Events(answer.events(first, updates), updates)

    def _parse(self, kind: type[_Completions | Chat], body: object) -> _Answer:
        if isinstance(body, dict):  # null counts as left out
            body = {key: value for key, value in body.items() if value is not None}
        try:
            return _Answer(self, kind.model_validate(body))
        except ValueError as error:  # from SamplingParams, ConfigError among others
            raise HTTPException(400, JsonBody.complaint(error)) from None


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

    def __init__(self, server: CompletionServer, asked: _Completions | Chat) -> None:
        """Check the request; raises ValueError if a prompt or a parameter is impossible."""
        self.server, self.asked = server, asked
        self.id, self.created = f"{asked.kind}-{uuid.uuid4().hex}", int(time.time())
        prompts = asked.prompts(server.tokenizer)
        longest, most = max(map(len, prompts)), server.generator.longest
        if longest >= most:
            raise ValueError(f"a prompt of {longest} tokens leaves no room: {most} is the longest")
        wanted, grammars = asked.most_tokens, asked.grammars(server.tokenizer)
        if len(grammars) > 1:
            raise ValueError(
                "response_format, guided_* and tool_choice: a text follows one of them"
            )
        kind, text = grammars[0] if grammars else (None, None)
        params = self.params = SamplingParams(
            max_tokens=min(SamplingParams.max_tokens, most - longest) if wanted is None else wanted,
            seed=uuid.uuid4().int % 2**63 if asked.seed is None else asked.seed,
            stop=tuple(asked.stop),
            stop_ids=server.stop_ids,
            logprobs=asked.likeliest or 0,
            grammar=(kind, text if isinstance(text, str) else json.dumps(text)) if kind else None,
            **asked.model_dump(include={"temperature", "top_k", "top_p", "min_p", "n"}),
        )
        count = len(prompts) * params.n
        if count > server.max_queue:
            problem = f"{len(prompts)} prompts x n {params.n} are more completions than "
            raise ValueError(f"{problem}max_queue {server.max_queue} allows; ask in parts")
        number = count * params.max_tokens * (1 + params.logprobs)
        if asked.likeliest is not None and number > _MOST_LOGPROBS:
            each = f"{1 + params.logprobs} log-probabilities for each of {count} x "
            problem = f"{each}{params.max_tokens} tokens are more than {_MOST_LOGPROBS}"
            raise ValueError(f"logprobs: {problem}; lower max_tokens, or ask in parts")
        self.requests = [
            Request(f"{self.id}-{i}", prompt, params) for i, prompt in enumerate(prompts)
        ]
        stops = params.stop, params.stop_ids
        self.texts = [TextStream(server.tokenizer, *stops) for _ in range(count)]

    async def updates(self) -> AsyncGenerator[_Item, None]:
        """Yield each token of each choice as it comes; HTTPException: too much, or a failure."""
        serving, most = self.server.serving, self.server.max_queue
        if serving.num_open + len(self.texts) > most:
            problem = f"{serving.num_open} completions run or wait, of max_queue {most}"
            raise HTTPException(429, f"{problem}; ask again later")
        first = {request.id: i * self.params.n for i, request in enumerate(self.requests)}
        try:
            async with aclosing(serving.stream(*self.requests)) as stream:
                async for update in stream:
                    if not math.isfinite(update.logprob):
                        logger.error("%s", _NOT_FINITE)
                        raise HTTPException(500, _NOT_FINITE)
                    number = first[update.completion.request_id] + update.completion.index
                    is_last = update.finish_reason is not None
                    yield number, self.texts[number].push(update.token, is_last), update
        except RequestError as error:
            raise HTTPException(400, error.problem) from None
        except HTTPException:
            raise
        except Exception as error:  # noqa: BLE001 - a failed step fails all that it served
            logger.error("generation failed", exc_info=error)
            raise HTTPException(500, self.server.FAILED) from None

    async def whole(self, updates: AsyncGenerator[_Item, None]) -> Response:
        return await asyncio.to_thread(self._whole, [item async for item in updates])

    def _whole(self, items: Sequence[_Item]) -> Response:
        texts, updates = [""] * len(self.texts), [[] for _ in self.texts]
        for number, new, update in items:
            texts[number] += new
            updates[number].append(update)
        read, made = sum(len(request.tokens) for request in self.requests), len(items)
        usage: dict[str, Any] = {
            "prompt_tokens": read,
            "completion_tokens": made,
            "total_tokens": read + made,
        }
        if self.server.generator.steps.draft:
            whole = [of[-1].completion for of in updates]
            right, drafted = sum(c.num_right for c in whole), sum(c.num_drafted for c in whole)
            found = {"accepted_prediction_tokens": right}
            found["rejected_prediction_tokens"] = drafted - right
            usage["completion_tokens_details"] = found
        choices = [self._choice(i, texts[i], of, False) for i, of in enumerate(updates)]
        return self.server.reply(self._reply(self.asked.kind, choices) | {"usage": usage})

    async def events(
        self, first: _Item, updates: AsyncGenerator[_Item, None]
    ) -> AsyncGenerator[str, None]:
        """Yield the reply token by token as server-sent events; an error is the last one."""
        try:
            yield self._event(*first)
            async for item in updates:
                yield self._event(*item)
            yield "data: [DONE]\n\n"
        except HTTPException as error:
            yield f"data: {json.dumps(self.server.error_body(500, error.detail))}\n\n"

    def _event(self, number: int, new: str, update: Update) -> str:
        kind = self.asked.kind + ".chunk" * isinstance(self.asked, Chat)
        reply = self._reply(kind, [self._choice(number, new, [update], True)])
        return f"data: {json.dumps(reply, allow_nan=False)}\n\n"

    def _reply(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        reply = {"id": self.id, "object": kind, "created": self.created}
        return reply | {"model": self.server.name, "choices": choices}

    def _choice(
        self, number: int, text: str, updates: list[Update], is_part: bool
    ) -> dict[str, Any]:
        reason, tokens = updates[-1].finish_reason, [update.token for update in updates]
        choice: dict[str, Any] = {"index": number, "finish_reason": reason, "token_ids": tokens}
        choice |= self.asked.text(text, is_part)
        if self.asked.likeliest is not None:
            decode = self.server.tokenizer.decode
            choice["logprobs"] = self.asked.logprobs_of(updates, lambda token: decode([token]))
        return choice


async def unless_gone(request: HTTPRequest, work: Awaitable[_T]) -> _T:
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
