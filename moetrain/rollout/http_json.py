"""JSON over HTTP for both servers: bounded bodies, strict JSON, and errors as JSON too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Lifespan

from moetrain.config.sources import shortened
from moetrain.rollout.protocol import complaint

_SMALL_BYTES = 64 << 10
"""Bodies up to this size are read whatever else arrives: uvicorn buffers as much of each anyway."""
_LARGEST_TOGETHER = 8

FAILED = "the server failed at this; its log says why"
_Meaning = Callable[[Any], tuple[int, str]]
"""The status and the problem that an exception stands for."""
_T = TypeVar("_T")


def json_app(
    routes: Sequence[BaseRoute],
    error_body: Callable[[int, str], object],
    refusals: Mapping[type[Exception], _Meaning],
    lifespan: Lifespan[Starlette] | None = None,
) -> Starlette:
    """Make an application whose every error is ``error_body(status, problem)``.

    Args:
        refusals: status and problem of exceptions by their class. Any that is neither here nor
            below is status 500, and is logged.
    """

    def answering(meaning: _Meaning) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def answer(request: Request, error: Exception) -> Response:
            status, problem = meaning(error)
            return reply(error_body(status, problem), status, getattr(error, "headers", None))

        return answer

    meanings: dict[type[Exception], _Meaning] = {
        HTTPException: lambda error: (error.status_code, error.detail),
        ValidationError: lambda error: (400, complaint(error)),
        ClientDisconnect: lambda error: (400, "the client hung up"),
        Exception: lambda error: (500, FAILED),
        **refusals,
    }
    handlers = {kind: answering(meaning) for kind, meaning in meanings.items()}
    routes = [Route("/health", _health), *routes]
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False  # a redirect has no body
    return app


async def _health(request: Request) -> Response:
    return reply({"status": "ok"})


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

    async def read(self, request: Request, parse: Callable[[Any], _T]) -> _T:
        """Parse the JSON body of ``request`` with ``parse``, in another thread.

        Raises:
            HTTPException: the body has another type, is too large or no JSON.
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
            # Parsed values take many times the memory of their JSON.
            async with self._turn if len(data) > _SMALL_BYTES else nullcontext():
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
