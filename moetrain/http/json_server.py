"""JSON over HTTP for all servers: bounded bodies, strict JSON, errors as JSON, no slow clients.

A client may keep the server waiting for a minute, while it sends a request or reads an answer.
After that the server closes the connection. Each connection takes a file descriptor. If there are
too many connections, the server closes the one that it has waited for longest. Starlette and
uvicorn by themselves answer in plain text, limit each body but not the sum of bodies, and close no
slow client. :mod:`moetrain.http.access` decides which clients are served at all.

A stopping server gives the requests that it has begun a few seconds. Requests that are not answered
by then, and new ones, get status 503. A stream ends with an error event.
"""

import asyncio
import json
import math
import resource
import select
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
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
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from moetrain.config.sources import shortened
from moetrain.generate.request import JsonBody
from moetrain.http.access import Access

_SMALL_BYTES = 64 << 10
"""Bodies up to this size are always read, because uvicorn buffers as much of each anyway."""
_LARGEST_TOGETHER = 8
"""Number of bodies of the largest size whose bytes may arrive at once."""
_SLOWEST = 16 << 10
"""Bytes a second, sent or read, below which a client is too slow."""
_RESUMED = 48 << 10
"""Bytes that a client has read when asyncio resumes a writer: asyncio pauses the writer above
64 KiB, and resumes it below a quarter of that."""

_GRACE_SECONDS = 2.0
"""Seconds that a stopping server gives to requests that are not answered yet."""
_LAST_WORDS_SECONDS = 0.5
"""Seconds that clients then have to read the error."""
_RETRY_AFTER = {429: "1", 503: "5"}
"""Seconds after which a client should try again, by status. A restart takes some seconds."""

_JSON = "application/json"
_CHARSETS = {"utf-8", "utf8", "us-ascii", "ascii"}
"""Names of UTF-8, and of encodings that are a subset of it."""

_T = TypeVar("_T")
_A = TypeVar("_A", bound=JsonBody)


class JsonServer:
    """An HTTP server of JSON. Bodies take bounded memory, and :meth:`error_body` makes each error.

    Attributes:
        app: the ASGI application, which does not authenticate clients.
    """

    FAILED = "the server failed at this; its log says why"
    STOPPED = "the server stops; ask again when it runs"
    connections = 1024
    """Most connections at once; half of the process's limit of open files, if that is less."""

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        most_mib: int,
        setting: str,
        refusals: Mapping[type[Exception], Callable[[Any], tuple[int, str]]] | None = None,
        lifespan: Lifespan[Starlette] | None = None,
    ) -> None:
        """Build the application.

        Args:
            routes: routes beside ``/health``.
            most_mib: size of the largest body, in MiB.
            setting: name of the setting that gives ``most_mib``.
            refusals: for each class of exception, a function that returns its status and problem.
                Exceptions of all other classes, unless the server handles them itself, get status
                500 and are logged.
            lifespan: the context that Starlette holds open while the server runs.
        """
        self.most_mib, self.setting = most_mib, setting
        self.arriving = 0
        """Bytes of all bodies that are being received or parsed."""
        self.is_stopping = False
        """True: the server is stopping and accepts no new requests."""
        self._turn = asyncio.Lock()
        self._open = set[asyncio.Task[Any]]()
        """Tasks of the requests that are not answered yet."""
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

    def stream_error(self, status: int, problem: str) -> str:
        """Return the server-sent event of an error, which ends a stream."""
        return f"data: {json.dumps(self.error_body(status, problem))}\n\n"

    @staticmethod
    def reply(
        value: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return a response with ``value`` as JSON.

        It is in ASCII, because texts may contain surrogates, which UTF-8 cannot encode.
        """
        data = json.dumps(value, allow_nan=False, separators=(",", ":"))
        return Response(data, status, headers, media_type="application/json")

    async def _refuse(self, meaning: Any, request: Request, error: Exception) -> Response:
        status, problem = meaning(error)
        return self._error(status, problem, getattr(error, "headers", None))

    def _error(
        self, status: int, problem: str, headers: Mapping[str, str] | None = None
    ) -> Response:
        later = {"retry-after": _RETRY_AFTER[status]} if status in _RETRY_AFTER else {}
        return self.reply(self.error_body(status, problem), status, {**later, **(headers or {})})

    async def _health(self, request: Request) -> Response:
        return self.reply({"status": "ok"})

    async def read(self, request: Request, parse: Callable[[Any], _T], wanted: str = _JSON) -> _T:
        """Return the result of ``parse``, which runs on another thread, on the body of ``request``.

        Args:
            wanted: content type of the body. If it is JSON, ``parse`` gets the parsed value, else
                bytes.

        Raises:
            HTTPException: the body has another type or encoding, is too large, or is not JSON.
            ClientDisconnect: the client disconnected.
        """
        # Browsers let any page post other types to a local server without a preflight request.
        kind, *parameters = request.headers.get("content-type", "").lower().split(";")
        if kind.strip() != wanted:
            raise HTTPException(415, f"the content-type is {shortened(kind.strip())}, not {wanted}")
        for name, _, value in (one.partition("=") for one in parameters):
            if name.strip() == "charset" and (charset := value.strip(' \t"')) not in _CHARSETS:
                raise HTTPException(
                    415, f"charset {shortened(charset)} is not supported; send UTF-8"
                )
        coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
        if coding not in ("", "identity"):
            problem = f"content-encoding {shortened(coding)} is not supported; send the body plain"
            raise HTTPException(415, problem, {"accept-encoding": "identity"})
        data, most = bytearray(), self.most_mib << 20
        try:
            async for chunk in request.stream():
                data += chunk
                self.arriving += len(chunk)
                if len(data) > most:
                    problem = f"the body has more than the {self.most_mib} MiB of {self.setting}"
                    raise HTTPException(413, problem)
                if len(data) > _SMALL_BYTES and self.arriving > _LARGEST_TOGETHER * most:
                    problem = "too many large bodies arrive at once; send this one again later"
                    raise HTTPException(429, problem)
            # Parsed values take many times the memory of their JSON, so only one large body is
            # parsed at a time.
            async with self._turn if len(data) > _SMALL_BYTES else nullcontext():
                made = _parsed if wanted == _JSON else bytes
                return await asyncio.to_thread(lambda: parse(made(bytes(data))))
        finally:
            self.arriving -= len(data)

    async def call(
        self, work: Callable[..., Any], request: Request, *, wanted: str = _JSON
    ) -> Response:
        """Answer ``request`` with the result of ``work``, which runs on another thread.

        Args:
            work: takes the names in the path as keywords and, for POST, the body first, as
                :meth:`read` parses it. It returns a response, or a value whose JSON is the
                response. If it returns None, or futures, for which the answer then waits, the
                response is an empty object.
            wanted: content type of the body.
        """
        names = request.path_params
        if request.method == "POST":
            answer = await self.read(request, partial(work, **names), wanted)
        else:
            answer = await asyncio.to_thread(work, **names)
        if isinstance(answer, Future):
            answer = [answer]
        if isinstance(answer, list):
            await asyncio.gather(*map(asyncio.wrap_future, answer))
            answer = None
        return answer if isinstance(answer, Response) else self.reply(answer or {})

    @staticmethod
    def parsed(kind: type[_A], then: Callable[[_A], _T], body: object) -> _T:
        """Check ``body`` as a request of class ``kind``, and return the result of ``then`` on it.

        Raises HTTPException: the request is refused.
        """
        if isinstance(body, dict):  # null counts as left out
            body = {key: value for key, value in body.items() if value is not None}
        try:
            return then(kind.model_validate(body))
        except ValueError as error:  # SamplingParams raises some, ConfigError among others
            raise HTTPException(400, JsonBody.complaint(error)) from None
        except RecursionError:
            raise HTTPException(400, "the body is nested too deeply; send fewer levels") from None

    @staticmethod
    async def unless_disconnected(request: Request, work: Awaitable[_T]) -> _T:
        """Await ``work``. If the client disconnects, cancel it and raise ClientDisconnect."""

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
        """Return a server for the clients that ``access`` allows, and the socket it listens on.

        Raises ConfigError: the address or the token file is wrong.
        """
        token = access.token()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_limited = files != resource.RLIM_INFINITY
        most = min(self.connections, files // 2) if is_limited else self.connections

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            app: ASGIApp = self.app
            is_http = scope["type"] == "http"
            if is_http and (refusal := access.refusal(dict(scope["headers"]), token)):
                app = self._error(*refusal)
            elif is_http and self.is_stopping:
                app = self._error(503, self.STOPPED)
            elif is_http:
                app = self._unless_stopped
            await app(scope, receive, send)

        config = uvicorn.Config(
            guarded,
            log_level="error",
            ws="none",
            http=_bounded(self.error_body, most),
            backlog=most // 4,  # asyncio accepts that many at once, before it does anything else
            # By then every client has its error, and uvicorn may cancel the remaining tasks.
            timeout_graceful_shutdown=math.ceil(_GRACE_SECONDS + _LAST_WORDS_SECONDS) + 1,
        )
        return _StoppingServer(config, self), access.listen()

    async def _unless_stopped(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. If the server stops first, end the answer with an error.

        The task of a request is cancelled only by :meth:`cut_off`, and by uvicorn when it stops.
        """
        sent = list[Message]()
        """The message that starts the answer, and the last message of its body."""

        async def record_and_send(message: Message) -> None:
            sent[1:] = [message]
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self.app(scope, receive, record_and_send)
        except asyncio.CancelledError:
            task.uncancel()
            # If the client does not read the error, the task is cancelled once more.
            with suppress(asyncio.CancelledError):
                if not sent:
                    await self._error(503, self.STOPPED)(scope, receive, send)
                elif len(sent) > 1 and not sent[1].get("more_body", False):
                    pass  # the answer is whole
                elif _is_events(sent[0]):
                    data = self.stream_error(503, self.STOPPED).encode()
                    await send({"type": "http.response.body", "body": data, "more_body": False})
                else:  # part of a file: closing the connection tells the client
                    while (await receive())["type"] != "http.disconnect":
                        pass
        finally:
            self._open.discard(task)

    def cut_off(self) -> None:
        """Cancel the requests that are not answered yet."""
        for task in self._open:
            task.cancel()


class _StoppingServer(uvicorn.Server):
    """A uvicorn server that answers its clients with errors when it stops."""

    def __init__(self, config: uvicorn.Config, served: JsonServer) -> None:
        super().__init__(config)
        self._served = served

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop as uvicorn does, after the time for answers and errors."""
        self._served.is_stopping = True
        loop = asyncio.get_running_loop()
        later = [
            loop.call_later(_GRACE_SECONDS, self._served.cut_off),
            loop.call_later(_GRACE_SECONDS + _LAST_WORDS_SECONDS, self._hang_up),
        ]
        try:
            await super().shutdown(sockets)
        finally:
            for one in later:
                one.cancel()

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _is_events(start: Message) -> bool:
    kinds = (value for name, value in start["headers"] if name.lower() == b"content-type")
    return any(kind.startswith(b"text/event-stream") for kind in kinds)


def _is_reset(transport: asyncio.Transport) -> bool:
    """Return True if the peer has reset the connection.

    After an EOF asyncio does not notice a reset.
    """
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)  # errors are always reported
    return bool(poll.poll(0))


def _parsed(data: bytes) -> Any:
    """Parse strict JSON (RFC 8259). Empty data is an empty object. Raises HTTPException."""
    try:
        return json.loads(data.decode() or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {shortened(str(error))}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _bounded(error_body: Callable[[int, str], object], most: int) -> type[asyncio.Protocol]:
    """Return a protocol class for at most ``most`` connections, which closes slow clients."""

    class Bounded(H11Protocol):
        waited = 0.0
        """Seconds that the client has kept the server waiting, less a credit for bytes it moved."""
        moved = 0
        """Bytes that the client has sent or read since the last check."""
        left = 0
        """Bytes that the client had still to read at the last check."""
        is_half_closed = False
        """True: the client closed its sending side. It may still wait for an answer."""

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
            if self.is_half_closed and self._is_between():
                self._end()

        def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
            """Return True if the connection stays open for an answer."""
            self.is_half_closed = True
            if self._is_between() or self._is_in_request():
                self._end()
                return False
            # A client that has closed its whole socket looks like one that waits for an answer,
            # until something is sent to it. HTTP allows the line below before an answer, and a
            # client that waits skips it.
            if not self.cycle.response_started and self.scope["http_version"] == "1.1":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return True

        def _end(self) -> None:
            if self._is_in_request():
                self._refuse(400, "the request has no end")
            else:
                self.transport.close()

        def send_400_response(self, msg: str) -> None:
            self._refuse(400, "the request is no HTTP/1.1")

        def _watch(self) -> None:
            """Check the client after a sixtieth of the time that it may keep the server waiting."""
            self.timer = self.loop.call_later(Access.idle_seconds / 60, self._look)

        def _look(self) -> None:
            """Close the connection if the server has waited for the client too long."""
            if self.is_half_closed and _is_reset(self.transport):
                self.transport.abort()
                return
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
            """Return True if there is no request, or the last one is answered."""
            cycle = self.cycle
            return cycle is None or (cycle.response_complete and not cycle.more_body)

        def _is_in_request(self) -> bool:
            """Return True if part of a request has arrived, and the rest of it is missing."""
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
