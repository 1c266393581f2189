"""Who reaches an HTTP server: one way for :mod:`moetrain.serve` and :mod:`moetrain.jobs`.

What listens to other machines serves who has a bearer token, by default. What listens to this one
alone asks for none; but a page in a browser here can have a name of its own mean this machine (DNS
rebinding), and would be of the same origin as the server. So without a token a request to a
loopback address must name such an address as its host.

Connections are bounded, and closed when nothing comes of them, since each takes a file of the
process, and anybody who can connect makes them.

Left out on purpose: TLS, which a proxy before the server has; who sends slowly, but sends.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import resource
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from moetrain.config import ConfigError
from moetrain.config_sources import shortened

if TYPE_CHECKING:
    import uvicorn  # which is in an extra

CONNECTIONS = 1024
"""At once, or half as many as this process may have files open; further ones are closed."""
IDLE_SECONDS = 60.0
"""For which a connection may bring nothing while a request is to come, or the rest of one."""

App = Callable[[Any, Any, Any], Awaitable[None]]
"""Of ASGI: ``app(scope, receive, send)``."""
Auth = Literal["auto", "token", "none"]


@dataclass(frozen=True)
class Access:
    """An address, and who is served there, as settings say."""

    host: str
    port: int
    auth: Auth
    """token: whoever sends the token; none: everybody; auto: none where :attr:`host` is a loopback
    address, else token."""
    token_file: str | None
    """That holds the token; None: :attr:`own_file`, which is made if there is none."""
    own_file: Path
    section: str = ""
    """Of the settings' names, with a dot."""

    def check(self) -> None:
        """Raise ConfigError for settings that contradict each other, or what is not installed."""
        missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
        if missing:
            problem = f"{' and '.join(missing)} is not installed; pip install 'moetrain[serve]'"
            raise self._error("port", f"{self.port}, but {problem}")
        if self.is_open and self.token_file is not None:
            problem = f"{self.token_file!r} contradicts {self.section}auth {self.auth!r}"
            if self.auth == "auto":
                problem += f", which asks for no token at {self.section}host {self.host!r}"
            raise self._error(
                "token_file", f"{problem}; unset one, or set {self.section}auth token"
            )

    @property
    def is_open(self) -> bool:
        """Whether everybody who can connect is served."""
        return self.auth == "none" or (self.auth == "auto" and is_loopback(self.host))

    def token(self) -> str | None:
        """What who is served must send; None: nothing.

        Raises:
            ConfigError: the file that holds it cannot be read, or holds nothing.
        """
        if self.is_open:
            return None
        path = Path(self.token_file or self.own_file)
        try:
            if self.token_file is None and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                _write_secret(path, secrets.token_urlsafe(32))
            token = path.read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            raise self._error(
                "token_file", f"{shortened(str(path))} cannot be read: {error}"
            ) from None
        if not token:
            raise self._error("token_file", f"{shortened(str(path))} holds no token")
        print(f"the bearer token is in {path}", flush=True)
        return token

    def server(
        self, app: App, body: Callable[[str], object] = lambda problem: {"error": problem}
    ) -> tuple[uvicorn.Server, socket.socket]:
        """A server of ``app`` for who may come in, and what it is to run with; it listens already.

        Args:
            body: what others are told, as JSON.

        Raises:
            ConfigError: as :meth:`token`; the address is none, or cannot be listened at.
        """
        import uvicorn

        token = self.token()
        settings: dict[str, Any] = {"log_level": "warning", "ws": "none", "http": _bounded()}
        settings["timeout_graceful_shutdown"] = 2  # seconds; then what is being served ends
        listener = self._listen()
        return uvicorn.Server(uvicorn.Config(self._guarded(app, token, body), **settings)), listener

    def _guarded(self, app: App, token: str | None, body: Callable[[str], object]) -> App:
        """``app`` for who sends ``token``, or, if that is None, for whom the address is meant."""
        is_local = token is None and is_loopback(self.host)

        async def handle(scope: Any, receive: Any, send: Any) -> None:
            headers = dict(scope.get("headers", ()))
            host = headers.get(b"host", b"").decode("latin-1")
            if scope["type"] != "http":
                await app(scope, receive, send)
            elif token is not None and not _shows(headers, token):
                problem = "no bearer token, or another than the server's"
                await _answer(send, 401, body(problem))
            elif is_local and not _names_this_machine(host):
                problem = f"host {shortened(host)} is not {self.host}, which alone is served here"
                remedy = f"use that, or start the server with {self.section}auth token"
                await _answer(send, 403, body(f"{problem}; {remedy}"))
            else:
                await app(scope, receive, send)

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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names_this_machine(address: str) -> bool:
    """Whether ``HOST[:PORT]`` does, in a way that no name server has a say in."""
    try:
        return is_loopback(urlsplit(f"//{address}").hostname or "")
    except ValueError:
        return False


def _write_secret(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text + "\n")
    temporary.replace(path)


def _shows(headers: dict[bytes, bytes], token: str) -> bool:
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token.encode())


async def _answer(send: Any, status: int, body: object) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def _bounded() -> type[asyncio.Protocol]:
    """HTTP of a number of connections, of which something comes."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = CONNECTIONS if files == resource.RLIM_INFINITY else min(CONNECTIONS, files // 2)

    class Bounded(H11Protocol):
        idle: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.abort()
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop_waiting()

        def _wait(self) -> None:
            self._stop_waiting()
            self.idle = self.loop.call_later(IDLE_SECONDS, self._give_up)

        def _stop_waiting(self) -> None:
            if self.idle is not None:
                self.idle.cancel()

        def _give_up(self) -> None:
            # Of a whole request something comes, and afterwards uvicorn's own timer runs.
            if self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
                self.transport.abort()

    return Bounded
