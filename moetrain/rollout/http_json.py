"""JSON over HTTP for both servers: bounded bodies, strict JSON, and errors as JSON too.

A server is :func:`json_app` over its routes. Its handlers read bodies with :class:`Bodies`, answer
with :func:`reply`, and raise ``HTTPException(status, problem)`` to refuse.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Lifespan

from moetrain.config.sources import shortened
from moetrain.rollout.access import ErrorBody

_SMALL_BYTES = 64 << 10
"""Bodies up to this size are read whatever else arrives: uvicorn buffers as much of each anyway."""
_LARGEST_TOGETHER = 8
"""How many bodies of the largest size may arrive at once."""

FAILED = "the server failed at this; its log says why"
Meaning = Callable[[Any], tuple[int, str]]
"""The status and the problem that an exception stands for."""
T = TypeVar("T")


def json_app(
    routes: Sequence[BaseRoute],
    error_body: ErrorBody,
    refusals: Mapping[type[Exception], Meaning] | None = None,
    lifespan: Lifespan[Starlette] | None = None,
) -> Starlette:
    """Make an application whose every error is ``error_body(status, problem)``.

    Args:
        refusals: maps classes of exceptions to a status and a problem. An HTTPException has both
            itself; any other is status 500, and is logged.
    """

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = error_body(error.status_code, error.detail)
        return reply(body, error.status_code, error.headers)

    def answering(meaning: Meaning) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def answer(request: Request, error: Exception) -> Response:
            status, problem = meaning(error)
            return reply(error_body(status, problem), status)

        return answer

    meanings: dict[type[Exception], Meaning] = {
        ClientDisconnect: lambda error: (400, "the client hung up"),
        Exception: lambda error: (500, FAILED),
        **(refusals or {}),
    }
    handlers = {kind: answering(meaning) for kind, meaning in meanings.items()}
    handlers[HTTPException] = refuse
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False  # a redirect has no body
    return app


class Bodies:
    """Reads the JSON bodies of one server in bounded memory.

    Starlette's own limit on a body answers in plain text, and counts each body by itself.
    """

    def __init__(self, most_bytes: int, setting: str) -> None:
        """``setting``: the name of the setting behind ``most_bytes``, the limit of one body."""
        self.most_bytes, self.setting = most_bytes, setting
        self.arriving = 0
        """Bytes of bodies that are being received or parsed."""
        self._turn = asyncio.Lock()

    async def read(self, request: Request, parse: Callable[[Any], T]) -> T:
        """Parse the JSON body of ``request`` with ``parse``, in another thread.

        Raises:
            HTTPException: the body has another type, is too large or no JSON, or too many large
                bodies arrive at once.
            ClientDisconnect: the client hung up.
        """
        # Browsers let any page post other types to a local server without a preflight request.
        kind = request.headers.get("content-type", "").partition(";")[0]
        if kind.strip().lower() != "application/json":
            raise HTTPException(415, "the body is not application/json")
        data = bytearray()
        try:
            async for chunk in request.stream():
                data += chunk
                self.arriving += len(chunk)
                self._check(len(data))
            if len(data) <= _SMALL_BYTES:
                return await asyncio.to_thread(lambda: parse(_parsed(bytes(data))))
            async with self._turn:  # parsed values take many times the memory of their JSON
                return await asyncio.to_thread(lambda: parse(_parsed(bytes(data))))
        finally:
            self.arriving -= len(data)

    def _check(self, length: int) -> None:
        if length > self.most_bytes:
            problem = f"the body has more than the {self.most_bytes >> 20} MiB of {self.setting}"
            raise HTTPException(413, problem)
        if length > _SMALL_BYTES and self.arriving > _LARGEST_TOGETHER * self.most_bytes:
            raise HTTPException(429, "too many large bodies arrive at once; send it again later")


def _parsed(data: bytes) -> Any:
    """Parse strict JSON (RFC 8259); no data is an empty object. Raises HTTPException."""
    try:
        return json.loads(data.decode() or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {shortened(str(error))}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def reply(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with ``value`` as JSON in ASCII: texts may hold surrogates, which UTF-8 cannot."""
    data = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(data, status, headers, media_type="application/json")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await ``work``, and cancel it when the client hangs up. The body must have been read.

    Raises:
        ClientDisconnect: the client has hung up.
    """

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
