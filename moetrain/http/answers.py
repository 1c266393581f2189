"""Replies in OpenAI's protocol, whole or as server-sent events, built as tokens arrive."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope
from starlette.types import Send as ASGISend

from moetrain.generate.request import TextStream, Update
from moetrain.http.json_server import JsonServer
from moetrain.http.protocol import Chat, Completions

ChoiceUpdate = tuple[int, Update]
"""One token of one choice: the number of the choice, and the update."""
_ERRORS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""OpenAI's error types by status. Other errors are invalid_request_error or server_error."""


class OpenAIServer(JsonServer):
    """An HTTP server with OpenAI's errors and list of models."""

    @staticmethod
    def error_body(status: int, problem: str) -> dict[str, Any]:
        kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": problem, "type": kind, "param": None, "code": None}}

    @staticmethod
    def described(name: str, wanted: str | None, **more: Any) -> dict[str, Any]:
        """Return the description of the model ``name``; in a list if ``wanted`` is None."""
        entry = {"id": name, "object": "model", "created": 0, "owned_by": "moetrain", **more}
        return {"object": "list", "data": [entry]} if wanted is None else entry


class _Events(StreamingResponse):
    """A response of server-sent events. However it ends, it closes ``updates``."""

    def __init__(
        self, events: AsyncGenerator[str, None], updates: AsyncGenerator[ChoiceUpdate, None]
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.updates = updates

    async def __call__(self, scope: Scope, receive: Receive, send: ASGISend) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.updates.aclose()


class Answer(ABC):
    """The reply to one request, whole or as a stream, built from tokens as they arrive."""

    drafts = False
    """True: the reply says how many draft tokens were right."""
    is_empty = False
    """True: the reply has no tokens of its own."""

    def __init__(
        self,
        server: JsonServer,
        asked: Completions | Chat,
        name: str,
        texts: Sequence[TextStream],
        num_read: int,
    ) -> None:
        """Store the arguments.

        Args:
            name: name of the model.
            texts: one stream for each choice.
            num_read: number of tokens of all prompts.
        """
        self.http, self.asked, self.texts = server, asked, texts
        self._name, self._num_read = name, num_read

    @abstractmethod
    def updates(self) -> AsyncGenerator[ChoiceUpdate, None]:
        """Yield the tokens of all choices as they arrive.

        Raises HTTPException: there is no reply.
        """

    async def response(self, request: HTTPRequest) -> Response:
        """Return the response to ``request``. A stream starts when its first token arrives."""
        updates = self.updates()
        if not self.asked.stream:
            return await self.http.unless_disconnected(request, self.whole(updates))
        # Wait for the first update, because an error before it still decides the status.
        first = await self.http.unless_disconnected(request, anext(updates))
        return _Events(self.events(first, updates), updates)

    async def whole(self, updates: AsyncGenerator[ChoiceUpdate, None]) -> Response:
        """Return the whole reply, once all updates have arrived."""
        return await asyncio.to_thread(self._whole, [item async for item in updates])

    def _whole(self, items: Sequence[ChoiceUpdate]) -> Response:
        updates: list[list[Update]] = [[] for _ in self.texts]
        for number, update in items:
            updates[number].append(update)
        choices = []
        for i, own in enumerate(updates):
            text = self.texts[i].push(*(update.token for update in own), is_last=True)
            choices.append(self._choice(i, text, own))
        reply = self._reply(choices, [own[-1] for own in updates])
        return self.http.reply(self.asked.whole(reply))

    async def events(
        self, first: ChoiceUpdate, updates: AsyncGenerator[ChoiceUpdate, None]
    ) -> AsyncGenerator[str, None]:
        """Yield the reply token by token as server-sent events. An error is the last event."""
        write, held, ends = self.asked.writer(), [""] * len(self.texts), list[Update]()
        item: ChoiceUpdate | None = first
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
        """Return a reply, or a part of one. ``ends``: last update of each ended choice."""
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
        """Return choice ``number`` of a reply, or of a part of one, with its new ``text``."""
        choice = {"index": number, "token_ids": [update.token for update in updates]}
        choice |= self.asked.choice_fields(text, updates[-1].finish_reason)
        if self.asked.likeliest is not None:
            name = self.texts[number].text_of
            choice["logprobs"] = self.asked.logprobs_of(updates, name)
        return choice
