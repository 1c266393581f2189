"""JSON over HTTP for both servers: bounded bodies, strict JSON, errors as JSON, no slow clients.

A client that keeps the server waiting, for a request or while it reads an answer, is closed after a
minute, or earlier if there are too many connections and it was waited for longest: each takes a
file of the process. Starlette's and uvicorn's own means answer in plain text, count each body by
itself, and close no slow client. :mod:`moetrain.rollout.access` says who is served at all.
"""

import asyncio
import json
import resource
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar, cast

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from moetrain.config.sources import shortened
from moetrain.rollout.access import Access
from moetrain.rollout.request import JsonBody

_SMALL_BYTES = 64 << 10
"""Bodies up to this size are read whatever else arrives: uvicorn buffers as much of each anyway."""
_LARGEST_TOGETHER = 8
_SLOWEST = 16 << 10
"""Bytes, sent or read, that earn a client another second: slower clients are closed."""
_RESUMED = 48 << 10
"""Bytes that were read when asyncio lets a writer go on: above 64 KiB it waits for a quarter."""

_JSON = "application/json"

_T = TypeVar("_T")
_A = TypeVar("_A", bound=JsonBody)


class JsonServer:
    """An HTTP server of JSON: every error is :meth:`error_body`, and bodies take bounded memory.

    Attributes:
        app: the ASGI application; it does not authenticate clients.
    """

    FAILED = "the server failed at this; its log says why"
    connections = 1024
    """Connections at once at most; fewer where half of the process's file limit is less."""

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        most_mib: int,
        setting: str,
        refusals: Mapping[type[Exception], Callable[[Any], tuple[int, str]]] | None = None,
        lifespan: Lifespan[Starlette] | None = None,
    ) -> None:
        """
        Args:
            most_mib: size of one body, which ``setting`` gives.
            refusals: status and problem of exceptions by their class. Any that is neither here nor
                below is status 500, and is logged.
        """
        self.most_mib, self.setting = most_mib, setting
        self.arriving = 0
        """Bytes of bodies that are being received or parsed."""
        self._turn = asyncio.Lock()
        meanings: dict[type[Exception], Callable[[Any], tuple[int, str]]] = {
            HTTPException: lambda error: (error.status_code, error.detail),
            ValidationError: lambda error: (400, JsonBody.complaint(error)),
            ClientDisconnect: lambda error: (400, "the client hung up"),
            Exception: lambda error: (500, self.FAILED),
            **(refusals or {}),
        }
        handlers = {kind: partial(self._refuse, meaning) for kind, meaning in meanings.items()}
        routes = [Route("/health", self._health), *routes]
        self.app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
        self.app.router.redirect_slashes = False  # a redirect has no body

    @staticmethod
    def error_body(status: int, problem: str) -> object:
        """Return the JSON of an error."""
        raise NotImplementedError

    @staticmethod
    def reply(
        value: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Answer with ``value`` as JSON in ASCII: texts may hold surrogates, which UTF-8 cannot."""
        data = json.dumps(value, allow_nan=False, separators=(",", ":"))
        return Response(data, status, headers, media_type="application/json")

    async def _refuse(self, meaning: Any, request: Request, error: Exception) -> Response:
        status, problem = meaning(error)
        headers = getattr(error, "headers", None)
        return self.reply(self.error_body(status, problem), status, headers)

    async def _health(self, request: Request) -> Response:
        return self.reply({"status": "ok"})

    async def read(self, request: Request, parse: Callable[[Any], _T], wanted: str = _JSON) -> _T:
        """Parse the body of ``request``, of type ``wanted``, with ``parse``, in another thread.

        Raises:
            HTTPException: the body has another type, is too large or no JSON.
            ClientDisconnect: the client hung up.
        """
        # Browsers let any page post other types to a local server without a preflight request.
        kind = request.headers.get("content-type", "").partition(";")[0]
        if kind.strip().lower() != wanted:
            raise HTTPException(415, f"the body is not {wanted}")
        data, most = bytearray(), self.most_mib << 20
        try:
            async for chunk in request.stream():
                data += chunk
                self.arriving += len(chunk)
                if len(data) > most:
                    problem = f"the body has more than the {self.most_mib} MiB of {self.setting}"
                    raise HTTPException(413, problem)
                if len(data) > _SMALL_BYTES and self.arriving > _LARGEST_TOGETHER * most:
                    problem = "too many large bodies arrive at once; send it again later"
                    raise HTTPException(429, problem)
            # Parsed values take many times the memory of their JSON.
            async with self._turn if len(data) > _SMALL_BYTES else nullcontext():
                made = _parsed if wanted == _JSON else bytes
                return await asyncio.to_thread(lambda: parse(made(bytes(data))))
        finally:
            self.arriving -= len(data)

    @staticmethod
    def parsed(kind: type[_A], then: Callable[[_A], _T], body: object) -> _T:
        """Return what ``then`` makes of a request; HTTPException: it is refused."""
        if isinstance(body, dict):  # null counts as left out
            body = {key: value for key, value in body.items() if value is not None}
        try:
            return then(kind.model_validate(body))
        except ValueError as error:  # from SamplingParams, ConfigError among others
            raise HTTPException(400, JsonBody.complaint(error)) from None
        except RecursionError:
            raise HTTPException(400, "the body is nested too deeply; send it flatter") from None

    @staticmethod
    async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
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

    def listen(self, access: Access) -> tuple[uvicorn.Server, socket.socket]:
        """Return a server for whom ``access`` allows, and its socket; or raise ConfigError."""
        token = access.token()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_limited = files != resource.RLIM_INFINITY
        most = min(self.connections, files // 2) if is_limited else self.connections

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            app: ASGIApp = self.app
            is_http = scope["type"] == "http"
            if is_http and (refusal := access.refusal(dict(scope["headers"]), token)):
                status, problem = refusal
                app = self.reply(self.error_body(status, problem), status)
            await app(scope, receive, send)

        config = uvicorn.Config(
            guarded,
            log_level="error",
            ws="none",
            http=_bounded(self.error_body, most),
            backlog=most // 4,  # asyncio accepts as many before anything else happens
            timeout_graceful_shutdown=2,  # seconds; then requests are cut off
        )
        return uvicorn.Server(config), access.listen()


def _parsed(data: bytes) -> Any:
    """Parse strict JSON (RFC 8259); no data is an empty object. Raises HTTPException."""
    try:
        return json.loads(data.decode() or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {shortened(str(error))}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _bounded(error_body: Callable[[int, str], object], most: int) -> type[asyncio.Protocol]:
    """Return a protocol class for at most ``most`` connections that closes slow clients."""

    class Bounded(H11Protocol):
        waited = 0.0
        """Seconds that the client has kept the server waiting, less those that it earned."""
        moved = left = 0
        """Bytes that were sent or read since the last look, and that were still to be read then."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self._watch()
            if len(self.connections) > most:
                here = cast("set[Bounded]", self.connections)
                slowest = max(here, key=lambda one: (one.waited, one is self))
                self.connections.discard(slowest)
                slowest.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.timer.cancel()

        def data_received(self, data: bytes) -> None:
            self.moved += len(data)
            super().data_received(data)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.moved += _RESUMED

        def on_response_complete(self) -> None:
            self.waited = 0.0
            super().on_response_complete()

        def eof_received(self) -> None:
            if self._is_in_request():
                self._refuse(400, "the request has no end")

        def send_400_response(self, msg: str) -> None:
            self._refuse(400, "the request is no HTTP/1.1")

        def _watch(self) -> None:
            self.timer = self.loop.call_later(Access.idle_seconds / 60, self._look)

        def _look(self) -> None:
            cycle, left = self.cycle, self.transport.get_write_buffer_size()
            moved = self.moved + max(0, self.left - left)
            self.moved, self.left = 0, left
            is_served = cycle is not None and not cycle.more_body and not cycle.response_complete
            is_waiting = not is_served or self.flow.write_paused
            waited = self.waited + Access.idle_seconds / 60 - moved / _SLOWEST
            self.waited = max(0.0, waited) if is_waiting else 0.0
            if self.waited < Access.idle_seconds:
                self._watch()
            elif self._is_in_request() and not self.transport.is_closing():
                limit = f"{Access.idle_seconds:.0f} s"
                self._refuse(408, f"the rest of the request did not come in {limit}")
                self._watch()
            else:
                self.transport.abort()

        def _is_between(self) -> bool:
            cycle = self.cycle
            return cycle is None or (cycle.response_complete and not cycle.more_body)

        def _is_in_request(self) -> bool:
            if self._is_between():
                return bool(self.conn.trailing_data[0])
            return self.cycle.more_body and not self.cycle.response_started

        def _refuse(self, status: int, problem: str) -> None:
            """Answer a request that the application has not answered, and close the connection."""
            if self._is_between() or not self.cycle.response_started:
                body = json.dumps(error_body(status, problem)).encode()
                line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
                headers = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                self.transport.write(f"{line}{headers}connection: close\r\n\r\n".encode() + body)
            self.transport.close()

    return Bounded
