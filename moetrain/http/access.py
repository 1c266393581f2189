"""Access to the HTTP servers (``serve`` and ``jobs``): address, token, and host of a request.

Without a token, a request to a loopback address must name a loopback address as its host. Otherwise
a web page in a local browser could let its own name resolve to this machine (DNS rebinding). The
browser would then take the page and the server for one origin, and let the page read answers.

Left out on purpose: TLS. A proxy in front of the server may add it.
"""

import hmac
import ipaddress
import os
import secrets
import socket
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from moetrain.config import ConfigError
from moetrain.config.files import write_atomically
from moetrain.config.sources import shortened

_listeners = weakref.WeakSet[socket.socket]()


def _close_listeners() -> None:
    for listener in _listeners:
        listener.close()


# A forked child may outlive a killed server, and would then keep the port in use.
os.register_at_fork(after_in_child=_close_listeners)


@dataclass(frozen=True)
class Access:
    """The address of a server and its authentication, as settings give them."""

    idle_seconds: ClassVar = 60.0
    """Seconds that the server waits for a client to send a request or to read an answer."""

    host: str
    port: int
    auth: Literal["auto", "token", "none"]
    """token: clients must send the token; none: every client is served; auto: none if :attr:`host`
    is a loopback address, else token."""
    token_file: str | None
    """File with the token; None: :attr:`own_file`, which is written if it is missing."""
    own_file: Path
    section: str = ""
    """Section of the settings, followed by a dot; empty for options of a command."""
    packages: tuple[str, ...] = ("starlette", "uvicorn")
    """Packages that the server needs."""

    def check(self) -> None:
        """Raise ConfigError for contradictory settings, or packages that are not installed."""
        if not 0 <= self.port <= 65535:
            raise self._error("port", f"{self.port} is not a port, 1 to 65535 (0: any free one)")
        missing = [name for name in self.packages if find_spec(name) is None]
        if missing:
            needed, is_one = " and ".join(missing), len(missing) == 1
            problem = f"a server needs {needed}, which {'is' if is_one else 'are'} not installed"
            extra = self.section[:-1] or "serve"
            raise self._error("port", f"{problem}; pip install 'moetrain[{extra}]'")
        if self.is_open and self.token_file is not None:
            problem = f"{self.token_file!r} contradicts {self.section}auth {self.auth!r}"
            if self.auth == "auto":
                problem += f", which asks for no token at {self.section}host {self.host!r}"
            problem += f"; unset it, or set {self.section}auth token"
            raise self._error("token_file", problem)

    @property
    def is_open(self) -> bool:
        """True if every client that can connect is served."""
        return self.auth == "none" or (self.auth == "auto" and _is_loopback(self.host))

    def token(self) -> str | None:
        """Return the token that clients must send; None: they need none.

        A missing :attr:`own_file` is written with a new token. The path of the file is printed.

        Raises ConfigError: the file cannot be read or written, or holds no token.
        """
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
            problem = f"{shortened(str(path))} holds no token"
            raise self._error("token_file", f"{problem}; write one there, or unset token_file")
        print(f"the bearer token is in {path}", flush=True)
        return token

    def refusal(self, headers: Mapping[bytes, bytes], token: str | None) -> tuple[int, str] | None:
        """Return status and problem of a request that is refused; None: it is served.

        ``token``: the result of :meth:`token`.
        """
        if token is not None:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            given = given if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
            if hmac.compare_digest(given.strip(), token.encode()):
                return None
            return 401, "the request has no bearer token, or one that is not the server's"
        host = headers.get(b"host", b"").decode("latin-1")
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if _is_loopback(name) or not _is_loopback(self.host):
            return None
        problem = f"host {shortened(host)} is not {self.host}, nor another loopback address"
        return 403, f"{problem}; use one, or start the server with {self.section}auth token"

    def listen(self) -> socket.socket:
        """Return a socket that listens at the address.

        Raises ConfigError: the address is invalid or in use.
        """
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
        except (OSError, UnicodeError) as error:
            raise self._error(
                "host", f"{self.host!r} is not an address: {error}; choose another"
            ) from None
        try:
            listener = socket.create_server((self.host, self.port), family=family, backlog=1024)
        except OSError as error:
            problem = f"{self.port}: cannot listen at {self.host}: {error.strerror}"
            raise self._error("port", f"{problem}; choose another") from None
        _listeners.add(listener)
        return listener

    def _error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.section}{name}", problem)


def _is_loopback(host: str) -> bool:
    """Return True if ``host`` is a loopback address. Names are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _write_secret(path: Path) -> None:
    path.touch(0o600, exist_ok=False)  # protected before the token is in it
    # The tinker SDK recognises API keys by this prefix.
    path.write_text(f"tml-{secrets.token_urlsafe(32)}\n", "utf-8")
