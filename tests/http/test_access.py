"""Access to an HTTP server: tokens, host names, and slow connections."""

import asyncio
import contextlib
import http.client
import json
import os
import socket
import threading
import time

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moetrain.config import ConfigError
from moetrain.http import access as access_module
from moetrain.http.access import Access
from moetrain.http.json_server import JsonServer


def access_to(folder, host="127.0.0.1", auth="auto", file=None, port=0):
    return Access(host, port, auth, file, folder / "made" / "token", "jobs.")


async def echo(request: Request) -> Response:
    body = await request.body()
    await asyncio.sleep(float(request.query_params.get("wait", "0")))
    return JSONResponse(
        {"length": len(body), "more": "x" * int(request.query_params.get("n", "0"))}
    )


class Echo(JsonServer):
    """A server with one route."""

    def __init__(self):
        super().__init__([Route("/echo", echo, methods=["GET", "POST"])], 1, "a setting")

    @staticmethod
    def error_body(status, problem):
        return {"error": problem, "status": status}


@pytest.fixture
def serve():
    """Yield ``serve(access)``, which returns a port; servers end with the test."""
    running = []

    def begin(access):
        server, listener = Echo().listen(access)
        running.append((server, threading.Thread(target=server.run, args=([listener],))))
        running[-1][1].start()
        return listener.getsockname()[1]

    yield begin
    for server, thread in running:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def ask(port, host=None, **headers):
    """Return status and body."""
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
        assert ask(port, host) == (200, {"length": 0, "more": ""}), host
    for host in THEIRS:
        status, body = ask(port, host)
        assert status == 403, host
        assert "is not 127.0.0.1" in body["error"]
        assert body["error"].endswith("or start the server with jobs.auth token")


@pytest.mark.parametrize(("host", "auth"), [("127.0.0.1", "token"), ("0.0.0.0", "auto")])
def test_client_with_the_token_may_use_any_host_name(serve, tmp_path, host, auth):
    access = access_to(tmp_path, host, auth)
    port, token = serve(access), access.token()
    assert token == (tmp_path / "made" / "token").read_text().strip()
    for name in ("evil.example", "127.0.0.1"):
        assert ask(port, name, authorization=f"Bearer {token}") == (200, {"length": 0, "more": ""})
        for wrong in (token[:-1], f"{token}x", "", "\xe9"):
            status, body = ask(port, name, authorization=f"Bearer {wrong}")
            assert (status, body["status"]) == (401, 401)
        assert ask(port, name)[0] == 401
        assert ask(port, name, authorization=f"Basic {token}")[0] == 401


def test_auth_none_serves_every_client(serve, tmp_path):
    port = serve(access_to(tmp_path, "0.0.0.0", "none"))
    assert ask(port, "any.example")[0] == 200
    assert not (tmp_path / "made").exists()


def test_bad_settings_of_access_are_refused_in_one_line(tmp_path):
    for host, auth in (("127.0.0.1", "auto"), ("localhost", "auto"), ("0.0.0.0", "none")):
        match = rf"^jobs\.token_file: 'x' contradicts jobs\.auth '{auth}'.*set jobs\.auth token$"
        with pytest.raises(ConfigError, match=match):
            access_to(tmp_path, host, auth, file="x").check()
    for host, auth in (("127.0.0.1", "token"), ("0.0.0.0", "auto")):
        access_to(tmp_path, host, auth, file="x").check()
    with pytest.raises(ConfigError, match=r"^jobs\.host: 'no such' is not an address"):
        Echo().listen(access_to(tmp_path, "no such", "none"))
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ConfigError, match=r"^jobs\.port: \d+: cannot listen at 127.0.0.1"),
    ):
        Echo().listen(access_to(tmp_path, port=other.getsockname()[1]))
    for port in (-1, 65536, 99999, 10**30):
        with pytest.raises(ConfigError, match=rf"^jobs\.port: {port} is not a port, 1 to 65535"):
            access_to(tmp_path, port=port).check()


def test_packages_that_are_missing_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(access_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as found:
        access_to(tmp_path, port=8000).check()
    problem = "a server needs starlette and uvicorn, which are not installed; "
    problem += "pip install 'moetrain[jobs]'"
    assert str(found.value) == f"jobs.port: {problem}"


POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
ANSWERED = b'{"length":10'
CHUNKED = POST.replace(b"Content-Length: 10", b"Transfer-Encoding: chunked")
LATE = {
    "line": (b"GET /ec", b"h"),
    "headers": (b"GET /echo HTTP/1.1\r\nHost: lo", b"c"),
    "body": (POST.replace(b"10", b"1000"), b"1"),
    "chunks": (CHUNKED, b"1\r\na\r\n"),
}
"""Beginnings of requests that never end, and the bytes that may still come."""


def open_to(port):
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def all_of(connection):
    """Return everything until the server closes; after a reset, what came before."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            got += part
    return got


def refusal(got, status):
    """Return the problem in an answer of ``status``, which must be the only answer."""
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), got
    assert b"content-type: application/json" in head
    told = json.loads(body)
    assert told["status"] == status
    return told["error"]


@pytest.mark.parametrize("drips", [False, True])
@pytest.mark.parametrize(("sent", "drop"), LATE.values(), ids=LATE)
def test_a_request_that_does_not_come_is_not_waited_for(
    serve, tmp_path, monkeypatch, sent, drop, drips
):
    """Either nothing more comes, or a byte now and then."""
    monkeypatch.setattr(Access, "idle_seconds", 0.5)
    with open_to(serve(access_to(tmp_path))) as connection:
        start, got = time.monotonic(), b""
        connection.sendall(sent)
        connection.settimeout(0.1)
        while drips and not got and time.monotonic() - start < 5:
            connection.sendall(drop)
            with contextlib.suppress(TimeoutError):
                got = connection.recv(1 << 16)
        connection.settimeout(10)
        assert "did not come" in refusal(got + all_of(connection), 408)
        assert 0.4 < time.monotonic() - start < 5


def test_a_connection_without_a_request_is_closed(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(Access, "idle_seconds", 0.5)
    with open_to(serve(access_to(tmp_path))) as connection:
        start = time.monotonic()
        assert connection.recv(1) == b""
        assert 0.4 < time.monotonic() - start < 5


@pytest.mark.tier("long")
def test_slow_connection_is_not_idle(serve, tmp_path, monkeypatch):
    """It sends some hundred KiB a second for three times the limit; the answer takes as long."""
    monkeypatch.setattr(Access, "idle_seconds", 0.5)
    length = 12 * (16 << 10)
    post = POST.replace(b"10", b"%d" % length).replace(b"/echo", b"/echo?wait=1.5")
    with open_to(serve(access_to(tmp_path))) as connection:
        for part in (post, *[b"1" * (16 << 10)] * 12):
            connection.sendall(part)
            time.sleep(0.12)
        assert b'{"length":%d' % length in all_of_length(connection)


def test_connection_with_frequent_requests_is_not_idle(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(Access, "idle_seconds", 0.5)
    port = serve(access_to(tmp_path))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.connect()
    for _ in range(8):
        connection.auto_open = False  # the connection stays the same
        connection.request("GET", "/echo")
        assert connection.getresponse().read() == b'{"length":0,"more":""}'
        time.sleep(0.2)


@pytest.mark.tier("long")
def test_answer_that_is_not_read_is_dropped(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(Access, "idle_seconds", 0.5)
    port, length = serve(access_to(tmp_path)), 20_000_000
    ask_for = POST.replace(b"/echo", b"/echo?n=%d" % length) + b"1" * 10
    with open_to(port) as connection:
        connection.sendall(ask_for)
        time.sleep(2)
        assert len(all_of(connection)) < length
    with open_to(port) as connection:  # a reader of a MiB ten times a second gets everything
        connection.sendall(ask_for)
        left = length
        while left > 0:
            time.sleep(0.05)
            left -= len(connection.recv(min(left, 1 << 20), socket.MSG_WAITALL))
        assert left == 0


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", "no HTTP/1.1"),
        (b"GET /echo HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "no HTTP/1.1"),
        (b"GET /echo HTTP/1.1\r\nHost: " + b"a" * 200_000, "no HTTP/1.1"),
        (b"GET /echo HTTP/1.1\r\nHost\xff: a\r\n\r\n", "no HTTP/1.1"),
        (CHUNKED + b"xyz\r\n", "no HTTP/1.1"),
        (POST + b"123", "no end"),
        (CHUNKED + b"3\r\nabc\r\n", "no end"),
        (b"GET /ec", "no end"),
    ],
)
def test_malformed_request_is_answered_with_an_error(serve, tmp_path, sent, says):
    with open_to(serve(access_to(tmp_path))) as connection:
        connection.sendall(sent)
        if says == "no end":
            connection.shutdown(socket.SHUT_WR)
        assert says in refusal(all_of(connection), 400)


@pytest.mark.tier("long")
def test_too_many_connections_cost_the_slowest_its_own(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(JsonServer, "connections", 8)
    port = serve(access_to(tmp_path))
    with open_to(port) as busy, contextlib.ExitStack() as stack:
        busy.sendall(POST.replace(b"/echo", b"/echo?wait=3") + b"1" * 10)
        slow = [stack.enter_context(open_to(port)) for _ in range(7)]
        time.sleep(1.2)  # the server checks twice in this time
        for _ in range(5):
            assert ask(port, "localhost")[0] == 200
        gone = [one for one in slow if is_closed(one)]
        assert 1 <= len(gone) <= 5
        assert ANSWERED in all_of_length(busy)


def is_closed(connection):
    connection.settimeout(0.1)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def all_of_length(connection):
    got = b""
    while b"}" not in got and (part := connection.recv(1000)):
        got += part
    return got


def test_a_port_is_free_when_its_server_ends_before_a_child_that_it_forked(tmp_path):
    listener = access_to(tmp_path).listen()
    port = listener.getsockname()[1]
    (is_there, there), (is_over, over) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.close(over)
        os.write(there, b"1")
        os.read(is_over, 1)
        os._exit(0)
    try:
        assert os.read(is_there, 1) == b"1"
        listener.close()
        access_to(tmp_path, port=port).listen().close()
    finally:
        for one in (is_there, there, is_over, over):
            os.close(one)
        os.waitpid(child, 0)
