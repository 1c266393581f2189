"""An HTTP server that speaks OpenAI's protocol: completions and chats, whole or as streams.

Who hangs up is generated for no further (:class:`~moetrain.serve.serving.Serving`).
"""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, ClassVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope
from starlette.types import Send as ASGISend

from moetrain.config import logger
from moetrain.config.sources import shortened
from moetrain.data.tokenizer import Tokenizer
from moetrain.generate.engine import Generator
from moetrain.generate.request import (
    BusyError,
    Request,
    RequestError,
    SamplingParams,
    TextStream,
    chat_stops,
    end_ids,
    sampling_defaults,
)
from moetrain.serve.http_json import JsonServer
from moetrain.serve.protocol import Chat, Completions, Responses
from moetrain.serve.serving import Serving, ServingClosedError, Update

_MOST_LOGPROBS = 1 << 20
"""Log-probabilities in one reply, of tokens and alternatives, some hundred bytes each."""
_NOT_FINITE = "the model's probabilities are not finite numbers: its weights are damaged"
_ERRORS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

_SAMPLING = {"temperature", "top_k", "top_p", "min_p"}
"""Parameters for which a checkpoint may have values of its own."""

_Item = tuple[int, Update]
"""One token of one choice: the choice's number, and the update."""


class CompletionServer(JsonServer):
    """The HTTP server of a generator that has a tokenizer."""

    BODIES: ClassVar[dict[str, type[Completions | Chat]]] = {
        "/v1/completions": Completions,
        "/v1/chat/completions": Chat,
        "/v1/responses": Responses,
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
        self.chat_stops = chat_stops(self.tokenizer)
        self.sampling = sampling_defaults(generator.model)
        """The checkpoint's own parameters, for requests without them."""
        if self.sampling:
            logger.info("requests are sampled with generation_config.json's %s", self.sampling)
        routes = [Route("/v1/models", self.models), Route("/v1/models/{model:path}", self.models)]
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

    @staticmethod
    def described(name: str, wanted: str | None, **more: Any) -> dict[str, Any]:
        """Return the model ``name`` if it is ``wanted`` alone; None: a list of it."""
        entry = {"id": name, "object": "model", "created": 0, "owned_by": "moetrain", **more}
        return {"object": "list", "data": [entry]} if wanted is None else entry

    async def models(self, request: HTTPRequest) -> Response:
        wanted = request.path_params.get("model")
        if wanted not in (None, self.name):
            raise HTTPException(404, f"no model {shortened(wanted)} is here; ask for {self.name!r}")
        most = self.generator.longest
        return self.reply(self.described(self.name, wanted, max_model_len=most))

    async def answer(self, kind: type[Completions | Chat], request: HTTPRequest) -> Response:
        answer = await self.read(request, partial(self.parsed, kind, partial(_Served, self)))
        return await answer.sent(request)


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


class Answer(ABC):
    """The reply to one request, whole or as a stream, made of tokens as they come."""

    drafts = False
    """Whether the reply says how many drafts were right."""
    is_empty = False
    """Whether the reply has no token of its own."""

    def __init__(
        self,
        server: JsonServer,
        asked: Completions | Chat,
        name: str,
        texts: Sequence[TextStream],
        num_read: int,
    ) -> None:
        """``name``: the model's; ``texts``: one for each choice; ``num_read``: prompts' tokens."""
        self.http, self.asked, self.texts = server, asked, texts
        self._name, self._num_read = name, num_read

    @abstractmethod
    def updates(self) -> AsyncGenerator[_Item, None]:
        """Yield each token of each choice as it comes; HTTPException: there is no reply."""

    async def sent(self, request: HTTPRequest) -> Response:
        """Return the response to ``request``: a stream begins with the first token."""
        updates = self.updates()
        if not self.asked.stream:
            return await self.http.unless_gone(request, self.whole(updates))
        # The first update, or the error, comes before the status is sent.
        first = await self.http.unless_gone(request, anext(updates))
        return _Events(self.events(first, updates), updates)

    async def whole(self, updates: AsyncGenerator[_Item, None]) -> Response:
        return await asyncio.to_thread(self._whole, [item async for item in updates])

    def _whole(self, items: Sequence[_Item]) -> Response:
        updates: list[list[Update]] = [[] for _ in self.texts]
        for number, update in items:
            updates[number].append(update)
        choices = []
        for i, of in enumerate(updates):
            text = self.texts[i].push(*(update.token for update in of), is_last=True)
            choices.append(self._choice(i, text, of))
        reply = self._reply(choices, [of[-1] for of in updates])
        return self.http.reply(self.asked.whole(reply))

    async def events(
        self, first: _Item, updates: AsyncGenerator[_Item, None]
    ) -> AsyncGenerator[str, None]:
        """Yield the reply token by token as server-sent events; an error is the last one."""
        write, held, ends = self.asked.writer(), [""] * len(self.texts), list[Update]()
        item: _Item | None = first
        try:
            while item is not None:
                number, update = item
                is_last = update.finish_reason is not None
                text = self.texts[number].push(update.token, is_last=is_last)
                if isinstance(self.asked, Chat) and self.asked.schemas:
                    held[number] += text
                    text = held[number] if is_last else ""
                ends += [update] if is_last else []
                yield write(self._reply([self._choice(number, text, [update])], ends))
                item = await anext(updates, None)
        except HTTPException as error:
            yield self.http.stream_error(error.status_code, error.detail)

    def _reply(self, choices: list[dict[str, Any]], ends: Sequence[Update]) -> dict[str, Any]:
        """Return a reply, or a part of one, after the last updates of the choices that ended."""
        whole = [update.completion for update in ends]
        if len(whole) < len(self.texts):
            return self.asked.reply(self._name, choices, None)
        counts = self._num_read, 0 if self.is_empty else sum(len(c.tokens) for c in whole)
        reply = self.asked.reply(self._name, choices, counts)
        if self.drafts:
            right, drafted = sum(c.num_right for c in whole), sum(c.num_drafted for c in whole)
            found = {"accepted_prediction_tokens": right}
            found["rejected_prediction_tokens"] = drafted - right
            reply["usage"]["completion_tokens_details"] = found
        return reply

    def _choice(self, number: int, text: str, updates: list[Update]) -> dict[str, Any]:
        choice = {"index": number, "token_ids": [update.token for update in updates]}
        choice |= self.asked.said(text, updates[-1].finish_reason)
        if self.asked.likeliest is not None:
            name = self.texts[number].text_of
            choice["logprobs"] = self.asked.logprobs_of(updates, name)
        return choice


class _Served(Answer):
    """A request whose prompts a generator serves in parallel."""

    def __init__(self, server: CompletionServer, asked: Completions | Chat) -> None:
        """Check the request; raises ValueError if a prompt or a parameter is impossible."""
        self.server = server
        prompts = asked.prompts(server.tokenizer)
        longest, most = max(map(len, prompts)), server.generator.longest
        if longest >= most:
            raise ValueError(f"a prompt of {longest} tokens leaves no room: {most} is the longest")
        (limit, wanted), grammars = asked.limit, asked.grammars(server.tokenizer)
        if len(grammars) > 1:
            problem = "a text follows one of them"
            raise ValueError(f"response_format, guided_* and tool_choice: {problem}")
        kind, text = grammars[0] if grammars else (None, None)
        self.is_empty = wanted == 0
        """True: the request is for what the prompt has; the one token that is chosen is dropped."""
        default = min(SamplingParams.max_tokens, most - longest)
        ends = server.chat_stops if isinstance(asked, Chat) and not asked.ignore_eos else ()
        scored = asked.prompt_logprobs, asked.likeliest if asked.echo else None
        params = self.params = SamplingParams(
            max_tokens=default if wanted is None else max(wanted, 1),
            seed=uuid.uuid4().int % 2**63 if asked.seed is None else asked.seed,
            stop=(*asked.stop, *ends),
            stop_ids=(*asked.stop_token_ids, *(() if asked.ignore_eos else server.stop_ids)),
            logprobs=asked.likeliest or 0,
            prompt_logprobs=max((number for number in scored if number is not None), default=None),
            grammar=(kind, text if isinstance(text, str) else json.dumps(text)) if kind else None,
            n=asked.n,
            **server.sampling | asked.model_dump(include=_SAMPLING & asked.model_fields_set),
        )
        count = len(prompts) * params.n
        if count > server.max_queue:
            problem = f"{len(prompts)} prompts x n {params.n} are more completions than "
            raise ValueError(f"{problem}max_queue {server.max_queue} allows; ask in parts")
        read, number = sum(map(len, prompts)), 0
        if asked.likeliest is not None:
            number += count * params.max_tokens * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            number += read * params.n * (1 + params.prompt_logprobs)
        if number > _MOST_LOGPROBS:
            problem = f"{number} log-probabilities are more than {_MOST_LOGPROBS}"
            raise ValueError(f"logprobs: {problem}; lower {limit}, or ask in parts")
        self.requests = [
            Request(f"{asked.head['id']}-{i}", prompt, params) for i, prompt in enumerate(prompts)
        ]
        stops = params.stop, params.stop_ids
        skips = asked.skip_special_tokens
        texts = [
            TextStream(server.tokenizer, *stops, skip_special_tokens=skips) for _ in range(count)
        ]
        self._unechoed = set(range(count)) if asked.echo else set[int]()
        """The choices whose prompt is still to come."""
        super().__init__(server, asked, server.name, texts, read)
        self.drafts = server.generator.steps.draft > 0

    def _choice(self, number: int, text: str, updates: list[Update]) -> dict[str, Any]:
        asked, done = self.asked, updates[-1].completion
        prompt = self.requests[number // self.params.n].tokens
        choice = super()._choice(number, text, updates)
        if self.is_empty:
            choice |= {"text": "", "token_ids": [], "finish_reason": "length"}
            choice |= {"logprobs": asked.logprobs_of([], str)} if "logprobs" in choice else {}
        if number in self._unechoed:
            self._unechoed.remove(number)
            stream = self.texts[number]
            choice |= {"text": stream.decode(prompt) + choice["text"]}
            choice |= {"token_ids": [*prompt, *choice["token_ids"]]}
            if "logprobs" in choice:
                first = Completions.logprobs_of_prompt(prompt, done, stream.text_of)
                choice["logprobs"] = {k: first[k] + v for k, v in choice["logprobs"].items()}
        if asked.prompt_logprobs is not None and updates[-1].finish_reason:
            choice["prompt_logprobs"] = Completions.scored(prompt, done)
        return choice

    async def updates(self) -> AsyncGenerator[_Item, None]:
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
                    yield number, update
        except RequestError as error:
            problem = error.problem.replace("max_tokens", self.asked.limit[0])
            status = 429 if isinstance(error, BusyError) else 400
            raise HTTPException(status, problem) from None
        except ServingClosedError:
            raise HTTPException(503, self.server.STOPPED) from None
        except HTTPException:
            raise
        except Exception as error:  # noqa: BLE001 - a failed step fails all that it served
            logger.error("generation failed", exc_info=error)
            raise HTTPException(500, self.server.FAILED) from None
