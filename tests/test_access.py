"""Who reaches an HTTP server: tokens, names of hosts, connections that nothing comes of."""

import asyncio
import http.client
import json
import socket
import threading
import time

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moetrain import access as access_module
from moetrain.access import Access
from moetrain.config import ConfigError


def access_to(folder, host="127.0.0.1", auth="auto", file=None, port=0):
    return Access(host, port, auth, file, folder / "made" / "token", "jobs.")


async def echo(request: Request) -> Response:
    body = await request.body()
    await asyncio.sleep(float(request.query_params.get("wait", "0")))
    return JSONResponse({"length": len(body)})


@pytest.fixture
def serve():
    """``serve(access)``: its port; ended with the test."""
    running = []

    def begin(access):
        app = Starlette(routes=[Route("/echo", echo, methods=["GET", "POST"])])
        server, listener = access.server(app)
        running.append((server, threading.Thread(target=server.run, args=([listener],))))
        running[-1][1].start()
        return listener.getsockname()[1]

    yield begin
    for server, thread in running:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def ask(port, host=None, **headers):
    """Status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest("GET", "/echo", skip_host=host is not None)
    if host is not None:
        connection.putheader("Host", host.format(port=port))
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


MINE = (
    "127.0.0.1:{port}",
    "127.0.0.1",
    "localhost:{port}",
    "LocalHost",
    "[::1]:{port}",
    "127.9.9.9",
)
THEIRS = (
    "evil.example:{port}",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example",
    "[::1",
    "[::2]",
    "0.0.0.0",
    "10.0.0.1:{port}",
    "",
)


def test_a_name_that_a_page_may_have_made_is_refused(serve, tmp_path):
    port = serve(access_to(tmp_path))
    for host in MINE:
        assert ask(port, host) == (200, {"length": 0}), host
    for host in THEIRS:
        status, body = ask(port, host)
        assert status == 403, host
        assert "is not 127.0.0.1" in body["error"]
        assert body["error"].endswith("or start the server with jobs.auth token")


@pytest.mark.parametrize(("host", "auth"), [("127.0.0.1", "token"), ("0.0.0.0", "auto")])
def test_who_has_the_token_may_use_any_name(serve, tmp_path, host, auth):
    access = access_to(tmp_path, host, auth)
    port, token = serve(access), access.token()
    assert token == (tmp_path / "made" / "token").read_text().strip()
    for name in ("evil.example", "127.0.0.1"):
        assert ask(port, name, authorization=f"Bearer {token}") == (200, {"length": 0})
        for wrong in (token[:-1], f"{token}x", "", "\xe9"):
            status, body = ask(port, name, authorization=f"Bearer {wrong}")
            assert (status, list(body)) == (401, ["error"])
        assert ask(port, name)[0] == 401
        assert ask(port, name, authorization=f"Basic {token}")[0] == 401


def test_everybody_is_served_where_that_was_asked_for(serve, tmp_path):
    port = serve(access_to(tmp_path, "0.0.0.0", "none"))
    assert ask(port, "any.example")[0] == 200
    assert not (tmp_path / "made").exists()


def test_what_cannot_be_is_one_line(tmp_path):
    for host, auth in (("127.0.0.1", "auto"), ("localhost", "auto"), ("0.0.0.0", "none")):
        match = rf"^jobs\.token_file: 'x' contradicts jobs\.auth '{auth}'.*set jobs\.auth token$"
        with pytest.raises(ConfigError, match=match):
            access_to(tmp_path, host, auth, file="x").check()
    for host, auth in (("127.0.0.1", "token"), ("0.0.0.0", "auto")):
        access_to(tmp_path, host, auth, file="x").check()
    with pytest.raises(ConfigError, match=r"^jobs\.host: 'no such' is no address"):
        access_to(tmp_path, "no such", "none").server(Starlette())
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ConfigError, match=r"^jobs\.port: \d+ at 127.0.0.1 cannot be listened at"),
    ):
        access_to(tmp_path, port=other.getsockname()[1]).server(Starlette())


POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
IDLE = [b"", b"GET /ec", b"GET /echo HTTP/1.1\r\nHost: lo", POST, POST + b"12345"]


@pytest.mark.parametrize("sent", IDLE, ids=["nothing", "line", "headers", "no body", "half a body"])
def test_a_connection_that_nothing_comes_of_is_closed(serve, tmp_path, monkeypatch, sent):
    monkeypatch.setattr(access_module, "IDLE_SECONDS", 0.5)
    port = serve(access_to(tmp_path))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        start = time.monotonic()
        connection.sendall(sent)
        assert connection.recv(1) == b""  # and no answer before
        assert 0.4 < time.monotonic() - start < 5


def test_who_sends_slowly_or_waits_long_is_not_idle(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(access_module, "IDLE_SECONDS", 0.5)
    port = serve(access_to(tmp_path))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for part in (POST[:20], POST[20:], *[b"1"] * 10):
            connection.sendall(part)
            time.sleep(0.15)
        assert answered(connection)
        connection.sendall(POST.replace(b"/echo", b"/echo?wait=1.5") + b"1" * 10)
        assert answered(connection)


def answered(connection):
    """Whether all of the answer comes, in as many parts as there are."""
    got = b""
    while b'{"length":10}' not in got and (part := connection.recv(1000)):
        got += part
    return b'{"length":10}' in got
