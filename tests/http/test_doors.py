"""Both servers at shutdown, and with unusual requests and connections."""

import asyncio
import contextlib
import gzip
import http.client
import json
import logging
import socket
import threading
import time

import openai
import pytest
from starlette.responses import FileResponse, StreamingResponse
from starlette.routing import Route

from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.engine import Generator
from moetrain.http.access import Access
from moetrain.http.json_server import JsonServer
from moetrain.jobs.run import JobRun
from moetrain.jobs.scheduler import Service
from moetrain.jobs.server import JobRoutes
from moetrain.serve.server import CompletionServer
from tests.lib.generators import make_model
from tests.lib.job_services import config_of, new, texts

REQUEST = b"POST /%s HTTP/%s\r\nHost: localhost\r\nContent-Type: application/json\r\n"
REQUEST += b"Content-Length: 7\r\n\r\n" + b'{"a":1}'


class Doors(JsonServer):
    """A server that answers at once, late, in parts or never."""

    error_body = staticmethod(lambda status, problem: {"error": {"message": problem}})

    def __init__(self, folder):
        self.begun, self.cancelled = [], []
        self.file = folder / "file"
        with self.file.open("wb") as file:
            file.truncate(64 << 20)
        names = ("echo", "late", "never", "stream", "half")
        routes = [Route(f"/{one}", getattr(self, one), methods=["POST"]) for one in names]
        super().__init__(routes, 1, "a setting")

    async def echo(self, request):
        return self.reply(await self.read(request, lambda body: body))

    async def late(self, request):
        body = await self.read(request, lambda body: body)
        return self.reply(await self.unless_disconnected(request, asyncio.sleep(0.5, body)))

    async def never(self, request):
        await self.read(request, lambda body: body)
        self.begun.append("never")
        try:
            await self.unless_disconnected(request, asyncio.sleep(600))
        finally:
            self.cancelled.append("never")

    async def stream(self, request):
        await self.read(request, lambda body: body)

        async def events():
            yield "data: 1\n\n"
            self.begun.append("stream")
            await asyncio.sleep(600)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def half(self, request):
        await self.read(request, lambda body: body)
        self.begun.append("half")
        return FileResponse(self.file)


def wait_until(is_so, seconds=10):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def running(served):
    """Yield the port of a server in a thread, and the function that stops it."""
    server, listener = served.listen(Access("127.0.0.1", 0, "auto", None, None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()

    def stop():
        server.should_exit = True

    try:
        wait_until(lambda: server.started)
        yield listener.getsockname()[1], stop
    finally:
        stop()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def doors(tmp_path):
    served = Doors(tmp_path)
    with running(served) as (port, stop):
        served.port, served.stop = port, stop
        yield served


def asked(port, path, body=b'{"a":1}', **headers):
    """Return a connection on which a request was sent."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {"content-type": "application/json", **headers}
    connection.request("POST", f"/{path}", body, headers)
    return connection


def test_waiting_clients_get_the_protocols_error_at_shutdown(doors, caplog):
    slow, stream, half = (asked(doors.port, path) for path in ("never", "stream", "half"))
    kept = asked(doors.port, "echo")
    assert json.load(kept.getresponse()) == {"a": 1}
    wait_until(lambda: sorted(doors.begun) == ["half", "never", "stream"])
    with caplog.at_level(logging.WARNING):
        doors.stop()
        reply = slow.getresponse()
        assert (reply.status, reply.headers["content-type"]) == (503, "application/json")
        assert int(reply.headers["retry-after"]) > 0
        problem = "the server stops; ask again when it runs"
        assert json.load(reply) == {"error": {"message": problem}}
        first, last, rest = stream.getresponse().read().split(b"\n\n")
        assert (first, rest) == (b"data: 1", b"")
        assert json.loads(last.removeprefix(b"data: ")) == {"error": {"message": problem}}
        with pytest.raises((http.client.IncompleteRead, OSError)):
            half.getresponse().read()
        wait_until(lambda: doors.cancelled == ["never"])
        with pytest.raises((http.client.HTTPException, OSError)):
            asked(doors.port, "echo").getresponse()
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_requests_during_shutdown_are_answered_with_503(doors):
    """The client asks again on a connection whose last answer was in progress at the signal."""
    kept = asked(doors.port, "late")
    slow = asked(doors.port, "never")
    wait_until(lambda: doors.begun)
    doors.is_stopping = True
    assert json.load(kept.getresponse()) == {"a": 1}
    kept.request("POST", "/echo", b"{}", {"content-type": "application/json"})
    reply = kept.getresponse()
    assert (reply.status, int(reply.headers["retry-after"]) > 0) == (503, True)
    assert "the server stops" in json.load(reply)["error"]["message"]
    slow.close()


def test_job_clients_are_told_that_the_service_stops_however_often_they_ask(tmp_path, caplog):
    with Service(config_of(tmp_path)) as service:
        name = new(service)
        number = service.submit(name, "forward_backward", texts([1, 2, 3]))
        body = json.dumps({"request_id": f"{name}:{number}"}).encode()
        said = []

        def ask(port):
            for _ in range(2):
                reply = asked(port, "api/v1/retrieve_future", body).getresponse()
                said.append((reply.status, json.load(reply)["error"]))

        def service_stops_late(server):
            """Let clients ask for the second time before the server has noticed that it stops."""
            wait_until(lambda: len(said) == 2 * len(clients), 30)

        with running_jobs(service, service_stops_late) as port:
            clients = [threading.Thread(target=ask, args=(port,)) for _ in range(8)]
            for client in clients:
                client.start()
            wait_until(lambda: service.jobs[name].waiting)
            time.sleep(0.5)
        for client in clients:
            client.join()
    assert said == [(503, Service.STOPPED)] * 16
    assert "Traceback" not in caplog.text


def test_completions_that_are_cut_off_say_so_to_openais_client(caplog):
    generator = Generator(make_model(), ByteTokenizer())
    step = generator.step
    generator.step = lambda: time.sleep(0.2) or step()
    with running(CompletionServer(generator, "tiny")) as (port, stop):
        at = f"http://127.0.0.1:{port}/v1"
        client = openai.OpenAI(base_url=at, api_key="none", timeout=60, max_retries=0)
        body = {"model": "tiny", "prompt": "A", "max_tokens": 100, "seed": 1}
        stream = client.completions.create(stream=True, **body)
        next(stream)
        errors = []

        def ask():
            with pytest.raises(openai.InternalServerError) as error:
                client.completions.create(**body)
            errors.append(error.value)

        waiting = threading.Thread(target=ask)
        waiting.start()
        time.sleep(0.3)
        stop()
        with pytest.raises(openai.APIError, match="the server stops; ask again when it runs"):
            list(stream)
        waiting.join(30)
    assert [(error.status_code, error.type) for error in errors] == [(503, "server_error")]
    assert "the server stops" in errors[0].message
    assert "Traceback" not in caplog.text
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


@contextlib.contextmanager
def running_jobs(service, before_stop):
    """Yield the port of a service's server, which announces its stop before it stops."""
    with running(JobRoutes(service)) as (port, _):
        yield port
        service.refuse_waiting()
        before_stop(service)


def test_port_0_is_any_free_port_which_is_printed(tmp_path, capsys):
    with Service(config_of(tmp_path, "jobs.port=0")) as service, JobRun.serving(service):
        port = int(capsys.readouterr().out.rpartition(":")[2])
        assert port > 0
        wait_until(lambda: socket.create_connection(("127.0.0.1", port)).close() is None)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("path", [b"echo", b"late"])
def test_client_that_closes_its_sending_side_gets_an_answer(doors, path, version):
    with socket.create_connection(("127.0.0.1", doors.port), timeout=20) as connection:
        connection.sendall(REQUEST % (path, version))
        connection.shutdown(socket.SHUT_WR)
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert (reply.status, reply.read()) == (200, b'{"a":1}')
        assert connection.recv(1) == b""


def test_two_requests_at_once_are_both_answered_to_who_sends_no_more(doors):
    with socket.create_connection(("127.0.0.1", doors.port), timeout=20) as connection:
        connection.sendall(REQUEST % (b"late", b"1.1") + REQUEST % (b"echo", b"1.1"))
        connection.shutdown(socket.SHUT_WR)
        data = b""
        while part := connection.recv(1 << 16):
            data += part
    assert data.count(b"HTTP/1.1 200 OK") == data.count(b'{"a":1}') == 2


def test_half_a_request_of_who_sends_no_more_is_refused(doors):
    with socket.create_connection(("127.0.0.1", doors.port), timeout=20) as connection:
        connection.sendall((REQUEST % (b"echo", b"1.1"))[:-1])
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("path", [b"never", b"stream"])
def test_closed_connection_ends_its_request(doors, path):
    connection = socket.create_connection(("127.0.0.1", doors.port))
    connection.sendall(REQUEST % (path, b"1.1"))
    wait_until(lambda: doors.begun)
    connection.close()
    wait_until(lambda: not doors._open, 5)


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        ({"content-encoding": "gzip"}, 415, "content-encoding 'gzip' is not supported"),
        (
            {"content-encoding": "identity, br"},
            415,
            "content-encoding 'identity, br' is not supported",
        ),
        ({"content-encoding": "identity"}, 200, None),
        ({"content-type": "application/json; charset=ISO-8859-1"}, 415, "charset 'iso-8859-1'"),
        ({"content-type": 'application/json; a=b; charset="utf-16"'}, 415, "charset 'utf-16'"),
        ({"content-type": 'application/json; charset="UTF-8"'}, 200, None),
        ({"content-type": "application/json;charset=us-ascii"}, 200, None),
    ],
)
def test_a_body_in_another_encoding_is_status_415(doors, headers, status, says):
    data = b'{"a":1}'
    if "gzip" in headers.values():
        data = gzip.compress(data)
    reply = asked(doors.port, "echo", data, **headers).getresponse()
    body = json.load(reply)
    assert reply.status == status
    assert body == {"a": 1} if says is None else says in body["error"]["message"]
    if "content-encoding" in headers and status == 415:
        assert reply.headers["accept-encoding"] == "identity"
