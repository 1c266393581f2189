"""Authentication and limits on connections for both HTTP servers (``serve`` and ``jobs``).

Without a token a request to a loopback address must name such an address as its host: a page in a
local browser can make a name of its own resolve to this machine (DNS rebinding), and would then
have the server's origin. A client that keeps the server waiting, for a request or while it reads an
answer, is closed after a minute, or earlier if there are too many connections and it was waited for
longest: each takes a file of the process. Starlette's and uvicorn's own means answer in plain text,
and close no slow client.

Left out on purpose: TLS, which belongs to a proxy before the server.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import resource
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast
from urllib.parse import urlsplit

from moetrain.config import ConfigError
from moetrain.config.files import write_atomically
from moetrain.config.sources import shortened

if TYPE_CHECKING:
    import uvicorn  # which is in an extra

_SLOWEST = 16 << 10
"""Bytes, sent or read, that earn a client another second: slower clients are closed."""
_PIECE = 64 << 10
"""Bytes of an answer that are handed to the connection at once, so that a reader's progress shows:
the size above which asyncio makes a writer wait until a quarter is left."""

_Send = Callable[[Any], Awaitable[None]]
_App = Callable[[Any, Any, _Send], Awaitable[None]]  # of ASGI
_ErrorBody = Callable[[int, str], object]


@dataclass(frozen=True)
class Access:
    """The address of a server and its authentication, as settings give them."""

    connections: ClassVar = 1024
    """Connections at once at most; fewer where half of the process's file limit is less."""
    idle_seconds: ClassVar = 60.0
    """Time that a client may keep the server waiting, for a request or while reading an answer."""

    host: str
    port: int
    auth: Literal["auto", "token", "none"]
    """token: clients must send the token; none: everybody is served; auto: none where :attr:`host`
    is a loopback address, else token."""
    token_file: str | None
    """The file that holds the token; None: :attr:`own_file`, which is made if it is missing."""
    own_file: Path
    section: str = ""

    def check(self) -> None:
        """Raise ConfigError for contradictory settings, or packages that are not installed."""
        if not 0 <= self.port <= 65535:
            raise self._error("port", f"{self.port} is not a port, 1 to 65535 (0: any free one)")
        missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
        if missing:
            problem = f"{self.port} needs {' and '.join(missing)}, not installed here"
            raise self._error("port", f"{problem}; pip install 'moetrain[serve]'")
        if self.is_open and self.token_file is not None:
            problem = f"{self.token_file!r} contradicts {self.section}auth {self.auth!r}"
            if self.auth == "auto":
                problem += f", which asks for no token at {self.section}host {self.host!r}"
            problem += f"; unset one, or set {self.section}auth token"
            raise self._error("token_file", problem)

    @property
    def is_open(self) -> bool:
        """Whether everybody who can connect is served."""
        return self.auth == "none" or (self.auth == "auto" and _is_loopback(self.host))

    def token(self) -> str | None:
        """Return the token that clients must send, if any; ConfigError if its file holds none."""
        if self.is_open:
            return None
        path = Path(self.token_file or self.own_file)
        try:
            if self.token_file is None and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, _write_secret)
            token = path.read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            problem = f"{shortened(str(path))} cannot be read: {error}"
            raise self._error("token_file", problem) from None
        if not token:
            raise self._error("token_file", f"{shortened(str(path))} holds no token")
        print(f"the bearer token is in {path}", flush=True)
        return token

    def server(self, app: _App, error_body: _ErrorBody) -> tuple[uvicorn.Server, socket.socket]:
        """Make a server of ``app`` behind authentication, and the listening socket it runs with.

        Raises:
            ConfigError: as :meth:`token`; the address is invalid, or cannot be listened at.
        """
        import uvicorn

        token = self.token()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_limited = files != resource.RLIM_INFINITY
        most = min(self.connections, files // 2) if is_limited else self.connections
        listener = self._listen()
        config = uvicorn.Config(
            self._guarded(app, token, error_body),
            log_level="error",
            ws="none",
            http=_bounded(error_body, most),
            backlog=most // 4,  # asyncio accepts as many before anything else happens
            timeout_graceful_shutdown=2,  # seconds; then requests are cut off
        )
        return uvicorn.Server(config), listener

    def _guarded(self, app: _App, token: str | None, error_body: _ErrorBody) -> _App:
        """Wrap ``app``: refuse requests without ``token``, or, if it is None, for another host."""
        from moetrain.rollout.http_json import reply  # whose starlette is in an extra

        is_local = token is None and _is_loopback(self.host)

        async def handle(scope: Any, receive: Any, send: Any) -> None:
            headers = dict(scope.get("headers", ()))
            host = headers.get(b"host", b"").decode("latin-1")
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            if token is not None and not _shows(headers, token):
                status, problem = 401, "no bearer token, or another than the server's"
            elif is_local and not _names_this_machine(host):
                problem = f"host {shortened(host)} is not {self.host}, which alone is served here"
                remedy = f"use that, or start the server with {self.section}auth token"
                status, problem = 403, f"{problem}; {remedy}"
            else:
                await app(scope, receive, _in_pieces(send))
                return
            await reply(error_body(status, problem), status)(scope, receive, send)

        return handle

    def _listen(self) -> socket.socket:
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
        except (OSError, UnicodeError) as error:
            raise self._error("host", f"{self.host!r} is no address: {error}") from None
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=1024)
        except OSError as error:
            problem = f"at {self.host} cannot be listened at: {error.strerror}; choose another"
            raise self._error("port", f"{self.port} {problem}") from None

    def _error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.section}{name}", problem)


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names_this_machine(address: str) -> bool:
    """Whether ``HOST[:PORT]`` is a loopback address, without asking a name server."""
    try:
        return _is_loopback(urlsplit(f"//{address}").hostname or "")
    except ValueError:
        return False


def _write_secret(path: Path) -> None:
    path.touch(0o600, exist_ok=False)  # before there is anything in it
    path.write_text(secrets.token_urlsafe(32) + "\n", "utf-8")


def _shows(headers: dict[bytes, bytes], token: str) -> bool:
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token.encode())


def _in_pieces(send: _Send) -> _Send:

    async def pieces(message: dict[str, Any]) -> None:
        body = message.get("body", b"")
        last = max(0, len(body) - 1) // _PIECE * _PIECE
        for start in range(0, last, _PIECE):
            await send({**message, "body": body[start : start + _PIECE], "more_body": True})
        await send({**message, "body": body[last:]} if last else message)

    return pieces


def _bounded(error_body: _ErrorBody, most: int) -> type[asyncio.Protocol]:
    """Return a protocol class for at most ``most`` connections that closes slow clients."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Bounded(H11Protocol):
        waited = 0.0
        """Seconds that the client has kept the server waiting, less those that it earned."""

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
            if self.cycle is None or not self.cycle.response_complete:
                self._earn(len(data))
            super().data_received(data)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._earn(_PIECE * 3 // 4)

        def on_response_complete(self) -> None:
            self.waited = 0.0
            super().on_response_complete()

        def eof_received(self) -> None:
            if self._is_in_request():
                self._refuse(400, "the request has no end")

        def send_400_response(self, msg: str) -> None:
            self._refuse(400, "the request is no HTTP/1.1")

        def _earn(self, num_bytes: int) -> None:
            self.waited = max(0.0, self.waited - num_bytes / _SLOWEST)

        def _watch(self) -> None:
            self.timer = self.loop.call_later(Access.idle_seconds / 60, self._look)

        def _look(self) -> None:
            cycle = self.cycle
            is_served = cycle is not None and not cycle.more_body and not cycle.response_complete
            is_waiting = not is_served or self.flow.write_paused
            self.waited = self.waited + Access.idle_seconds / 60 if is_waiting else 0.0
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
