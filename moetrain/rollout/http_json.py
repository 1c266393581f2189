"""JSON over HTTP for both servers: bounded bodies, strict JSON, and errors as JSON too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
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

_Meaning = Callable[[Any], tuple[int, str]]
"""The status and the problem that an exception stands for."""
_T = TypeVar("_T")


class JsonServer:
    """An HTTP server of JSON: every error is :meth:`error_body`, and bodies take bounded memory.

    Starlette's own limit on a body answers in plain text, and counts each body by itself.

    Attributes:
        app: the ASGI application; it does not authenticate clients.
    """

    FAILED = "the server failed at this; its log says why"

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        refusals: Mapping[type[Exception], _Meaning],
        most_mib: int,
        setting: str,
        lifespan: Lifespan[Starlette] | None = None,
    ) -> None:
        """
        Args:
            refusals: status and problem of exceptions by their class. Any that is neither here nor
                below is status 500, and is logged.
            most_mib: size of one body, which ``setting`` gives.
        """
        self.most_mib, self.setting = most_mib, setting
        self.arriving = 0
        """Bytes of bodies that are being received or parsed."""
        self._turn = asyncio.Lock()
        meanings: dict[type[Exception], _Meaning] = {
            HTTPException: lambda error: (error.status_code, error.detail),
            ValidationError: lambda error: (400, complaint(error)),
            ClientDisconnect: lambda error: (400, "the client hung up"),
            Exception: lambda error: (500, self.FAILED),
            **refusals,
        }
        handlers = {kind: partial(self._refuse, meaning) for kind, meaning in meanings.items()}
        routes = [Route("/health", self._health), *routes]
        self.app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
        self.app.router.redirect_slashes = False  # a redirect has no body

    @staticmethod
    def error_body(status: int, problem: str) -> object:
        """Return the JSON of an error."""
        raise NotImplementedError

    async def _refuse(self, meaning: _Meaning, request: Request, error: Exception) -> Response:
        status, problem = meaning(error)
        return reply(self.error_body(status, problem), status, getattr(error, "headers", None))

    async def _health(self, request: Request) -> Response:
        return reply({"status": "ok"})

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
        most = self.most_mib << 20
        if length > most:
            problem = f"the body has more than the {self.most_mib} MiB of {self.setting}"
            raise HTTPException(413, problem)
        if length > _SMALL_BYTES and self.arriving > _LARGEST_TOGETHER * most:
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
