"""Random hostile requests to all servers: each is answered by the protocol, and leaves no trace.

Between them a plain request gets the same tokens as before. The fields are read from the models of
requests, and from the SDK's message, so a new field is included.
"""

import asyncio
import contextlib
import copy
import inspect
import json
import random
import re
import socket
import threading
import time
from typing import ClassVar, get_args, get_origin

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from pydantic import BaseModel
from tinker import types
from tinker.proto import tinker_public_pb2 as wire

from moetrain.data.tokenizer import ByteTokenizer, load_tokenizer
from moetrain.generate.engine import Generator
from moetrain.generate.request import JsonBody
from moetrain.http.access import Access
from moetrain.http.protocol import _INSTEAD, Responses, _Asked
from moetrain.jobs import server as jobs_server
from moetrain.jobs.api import KINDS, Datum, Forward, JobBody, Pass, Unserved
from moetrain.jobs.losses import CLIP_THRESHOLDS
from moetrain.jobs.scheduler import Service
from moetrain.jobs.server import JobRoutes
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import save_hf
from moetrain.rl.agents import AgentEnvironment, _AgentChat, _AgentResponses
from moetrain.rl.envs import Prompts
from moetrain.serve.server import CompletionServer
from tests.lib.generators import make_model
from tests.lib.job_servers import message_of, result_of
from tests.lib.job_services import config_of, rate, texts

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
HEARD = {"type": "function_call_output", "call_id": "c", "output": "1"}
ITEMS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, CALL, HEARD]
TOOLS = [{"type": "function", "name": "f", "parameters": {}}]
OF_RESPONSES = ["input", "instructions", "include", *_INSTEAD]
"""Keys that are accepted or refused before a model is made."""
DEEP = "@deep"
"""Placeholder of a list that is nested too deeply for json.dumps."""
VALUES = [None, True, -1, 0, 3, 0.5, 1e308, 5e-324, 10**400, 2**63, 2**31, 1 << 20, "", "x"]
VALUES += ["\ud800", "\0\n", "é" * 9000, [], [[]], {}, {"a": 1}, [1, 2], ["a", 1], [None], [-1]]
VALUES += [[2**70], [10**400], ["a"] * 30, [0.5] * 9, [["a"]], [[1], [2]], [True], DEEP]
VALUES += [[{"role": "user", "content": "a"}], [{"role": 1, "content": "\ud800"}], [{"role": "a"}]]
VALUES += [[{"tokens": [1, 2], "weights": [1, 1]}], [{"tokens": []}], [{"tokens": [1, 2], "x": 1}]]
VALUES += [[{"role": "user", "content": "a", "more": [[[]]]}], {"clip_low": 10**400}, "sort"]
VALUES += [ITEMS, [CALL], [CALL | {"arguments": 1}], [HEARD | {"output": [{"text": "\ud800"}]}]]
VALUES += [[{"type": [], "role": {}, "content": [3]}], [{"role": [], "content": ""}, CALL]]
VALUES += [[{"role": "user", "content": [{"type": "input_text", "text": 1}, None]}], TOOLS, [TOOLS]]
VALUES += [[{"type": "function", "name": 3, "": 1, "\ud800": []}], {"type": "function", "name": []}]
VALUES += [
    {"format": {"type": "json_schema", "schema": 3}},
    {"format": {"type": []}},
    {"format": 1},
]
BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"5",
    b'"a"',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe{}",
]
BODIES += [
    b'{"n":' + b"9" * 5000 + b"}",
    b"\xef\xbb\xbf{}",
    b'{"a":NaN}',
    b'{"a":1e999}',
    b"\0" * 99,
]
BODIES += ["{}".encode("utf-16"), b'{"\\ud800":1}', b'{"prompt":"\xed\xa0\x80"}', b" " * (2 << 20)]
BODIES += [b"{%s}" % b",".join(b'"%d":1' % i for i in range(50_000)), b'{"n":1,"n":2}x']
TYPES = ["text/plain", "", "application/json; charset=utf-16", "multipart/form-data", "a" * 5000]
FRAMES = [
    b"Content-Length: 99\r\n\r\n{}",
    b"Content-Length: -1\r\n\r\n{}",
    b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n{}\r\n",
    b"Transfer-Encoding: gzip\r\n\r\n{}",
    b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n",
    b"Upgrade: websocket\r\nConnection: upgrade\r\nContent-Length: 2\r\n\r\n{}",
    b"Bad\xff: 1\r\n\r\n",
    b"A: " + b"b" * 200_000 + b"\r\n\r\n",
]


def strict(text):
    """Return the value of JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def dumped(value):
    return json.dumps(value).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000).encode()


def exchange(port, head, rest, hang_up=False):
    """Send these bytes; return everything that arrives until the server closes."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(head.encode() + rest)
            if hang_up:
                connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                got += part
    return got


def post(port, path, data, kind="application/json"):
    """Return status and body."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    return parts(exchange(port, head, data))


def parts(got):
    """Return status, content type and body of the one answer in ``got``."""
    head, _, body = got.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers["content-type"], body


# ---- fields --------------------------------------------------------------------------------------


def models_in(annotation, way=()):
    """Yield the models within this type, and the path to each: 0 stands for any place of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, way
    way = (*way, 0) if get_origin(annotation) is list else way
    for part in get_args(annotation):
        yield from models_in(part, way)


def fields_of(model, way=()):
    """Yield the path to every field of a body, and the model that has it."""
    for name, field in model.model_fields.items():
        yield (*way, name), model
        for inner, further in models_in(field.annotation, (*way, name)):
            yield from fields_of(inner, further)


def put(body, way, value):
    """Return ``body`` with ``value`` at the end of ``way``; missing parents are made."""
    if not way:
        return value
    key, *rest = way
    if key == 0:
        body = body if isinstance(body, list) and body else [{}]
        return [put(body[0], rest, value), *body[1:]]
    body = body if isinstance(body, dict) else {}
    return {**body, key: put(body.get(key), rest, value)}


KEYS = {"loss_fn_inputs": [*Datum.model_fields, "x"]}
KEYS |= {key: [*CLIP_THRESHOLDS, "beta", "x"] for key in ("loss_fn_config", "loss_fn_config_v2")}
NUMBERS = [0, 1, -1, 3, 2**31 - 1, -(2**31)]
BYTES = [b"", b"\0", b"\0" * 4, b"\xff" * 8, np.float32([np.nan, np.inf, -3e38]).tobytes()]
BYTES += [
    np.float32([0.5, -0.5]).tobytes(),
    np.int32([1, -2]).tobytes(),
    np.int64([1, 9]).tobytes(),
]
SCALARS = {
    FieldDescriptor.CPPTYPE_STRING: ["", "x", "ppo", "dro", "cross_entropy", "\0\n", "é" * 9000],
    FieldDescriptor.CPPTYPE_DOUBLE: [0.0, -1.0, 0.5, 1e308, 5e-324, float("nan"), float("inf")],
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
    FieldDescriptor.CPPTYPE_ENUM: [*range(4), 99],
    FieldDescriptor.CPPTYPE_UINT32: [0, 1, 2**32 - 1],
    FieldDescriptor.CPPTYPE_INT32: NUMBERS,
    FieldDescriptor.CPPTYPE_INT64: [*NUMBERS, 2**63 - 1],
}


def wire_fields(descriptor):
    """Yield the path to every field of a message that has a value; a map's path has a key too."""
    for field in descriptor.fields:
        inner, ways = field.message_type, [(field.name,)]
        if inner is not None and inner.GetOptions().map_entry:
            ways = [(field.name, key) for key in KEYS[field.name]]
            inner = inner.fields_by_name["value"].message_type
        for way in ways:
            rests = [()] if inner is None else wire_fields(inner)
            yield from ((*way, *rest) for rest in rests)


def put_wire(message, way, draw):
    """Draw a value for the field at the end of ``way``."""
    name, *rest = way
    field, part = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    inner, is_list = field.message_type, field.is_repeated
    if inner is not None and inner.GetOptions().map_entry:
        key, *rest = rest
        if rest:
            return put_wire(part[key], rest, draw)
        part[key] = draw.choice(SCALARS[inner.fields_by_name["value"].cpp_type])
    elif inner is not None:
        return put_wire((part[0] if part else part.add()) if is_list else part, rest, draw)
    else:
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        values = BYTES if is_bytes else SCALARS[field.cpp_type]
        if not is_list:
            return setattr(message, name, draw.choice(values))
        del part[:]
        part.extend(draw.choices(values, k=draw.randrange(3)))


class Target:
    """A server behind its door, and its possible requests."""

    MODELS: ClassVar = {}
    """Models of requests, by the end of the path."""

    def __init__(self, server, folder):
        access = Access("127.0.0.1", 0, "auto", None, folder / "token")
        self.server, listener = server.listen(access)
        self.port = listener.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, args=([listener],))
        self.thread.start()

    def close(self):
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()

    @property
    def fields(self):
        """Return pairs of a URL path and the path to a field of its bodies."""
        found = {(path, (name,)) for path, body in self.good.items() if not isinstance(body, bytes)
                 for name in body}  # fmt: skip
        for path in self.good:
            for model in self.MODELS[path.removeprefix(self.before)]:
                found |= {(path, way) for way, _ in fields_of(model)}
                if issubclass(model, Responses):
                    found |= {(path, (name,)) for name in OF_RESPONSES}
        return found


class Serve(Target):
    """The server of completions and chats."""

    MODELS: ClassVar = {path: [model] for path, model in CompletionServer.BODIES.items()}
    before = ""

    def __init__(self, folder):
        save_hf(make_model(), folder / "hf", tokenizer=ByteTokenizer().export())
        self.generator = Generator(load_hf(folder / "hf"), load_tokenizer(str(folder / "hf")))
        server = CompletionServer(self.generator, "tiny", max_request_mib=1)
        super().__init__(server, folder)
        turns = [{"role": "user", "content": "a"}]
        self.good = {
            "/v1/completions": {"prompt": "AB", "max_tokens": 2, "seed": 1},
            "/v1/chat/completions": {"messages": turns, "max_tokens": 2, "seed": 1},
            "/v1/responses": {"input": ITEMS, "tools": TOOLS, "max_output_tokens": 2, "seed": 1},
        }

    def plain(self):
        body = {"prompt": "AB", "max_tokens": 9, "seed": 1, "logprobs": 2}
        status, _, told = post(self.port, "/v1/completions", dumped(body))
        assert status == 200
        return json.loads(told)["choices"]

    def check_error(self, body):
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return body["error"]["message"]

    def check_end(self):
        deadline = time.monotonic() + 10
        while self.generator.is_busy:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert self.generator.pages.num_available == self.generator.pages.num_pages


class Jobs(Target):
    """The service with one job; refused requests must not change its tokens."""

    MODELS: ClassVar = {kind: [KINDS[kind]] for kind in set(KINDS) - {"unserved", "forward"}}
    MODELS |= dict.fromkeys(("sessions/x/finish", "telemetry", "create_session"), ())
    MODELS |= {
        "create_model": [types.CreateModelRequest],
        "load_weights?": [types.LoadWeightsRequest, KINDS["load_weights"]],
        "create_sampling_session": [types.CreateSamplingSessionRequest],
        "retrieve_future": [types.FutureRetrieveRequest],
        "get_info": [types.GetInfoRequest],
    }
    before = "/api/v1/"

    def __init__(self, folder):
        self.service = Service(config_of(folder / "jobs", "jobs.max_request_mib=1"))
        super().__init__(JobRoutes(self.service), folder)
        self.over = False
        self.worker = threading.Thread(target=self.work)
        self.worker.start()
        session, lora = "ab" * 16, {"rank": 8}
        at = {"session_id": session}
        self.own, self.name = f"{session}:sample:0", f"{session}:train:1"
        for name in (self.own, self.name, f"{session}:sample:1"):
            self.service.create(name)
        params = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 2}}
        params |= {"sampling_session_id": f"{session}:sample:1"}
        run, load = {"model_id": self.name}, {"path": f"tinker://{self.name}/weights/a"}
        number = {"sampling_session_seq_id": 7, "base_model": "debug"}
        self.good = {
            "create_model": {"model_seq_id": 1, "base_model": "debug", "lora_config": lora, **at},
            "create_sampling_session": {**at, **number},
            "asample": {"seq_id": 0, **params},
            "forward_backward": message_of(texts([1, 2, 3]), self.name, 2),
            "optim_step": {"seq_id": 1, **run, **rate(1e-3)},
            "save_weights": {"seq_id": 3, "path": "a", **run},
            "save_weights_for_sampler": {"seq_id": 3, "path": "a", **run},
            "save_weights_external": {"seq_id": 3, "path": "a", **run},
            "load_weights": {"seq_id": 3, "optimizer": True, **run, **load},
            "load_weights?": {"model_seq_id": 1, "optimizer": True, **at, **load},
            "sessions/x/finish": {},
            "retrieve_future": {"request_id": f"{self.name}:0"},
            "get_info": run,
            "telemetry": {},
            "create_session": {},
        }
        self.good = {f"{self.before}{path}": body for path, body in self.good.items()}
        self.seq = 0

    @property
    def fields(self):
        path = f"{self.before}forward_backward"
        of_message = wire_fields(wire.ForwardBackwardRequest.DESCRIPTOR)
        others = {field for field in super().fields if field[0] != path}
        return others | {(path, way) for way in of_message}

    def work(self):
        while not self.over:
            if not self.service.turn():
                self.service.wait(0.05)

    def close(self):
        self.over = True
        self.worker.join(30)
        super().close()
        self.service.close()

    def plain(self):
        self.seq += 1
        asked = {"max_tokens": 9, "seed": 1}
        body = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": asked}
        body |= {"sampling_session_id": self.own, "seq_id": self.seq, "topk_sample_logprobs": 2}
        status, _, told = post(self.port, "/api/v1/asample", dumped(body))
        assert status == 200
        asked = {"request_id": json.loads(told)["request_id"]}
        status, _, told = post(self.port, "/api/v1/retrieve_future", dumped(asked))
        assert status == 200
        return result_of("asample", told)

    def check_error(self, body):
        assert set(body) == {"error"}
        return body["error"]

    def check_end(self):
        assert self.worker.is_alive()


class Agents(Target):
    """The endpoint of an agent that never ends, with a policy that always gives the same answer."""

    MODELS: ClassVar = {"chat/completions": [_AgentChat], "responses": [_AgentResponses]}

    def __init__(self, folder):
        self.agents = AgentEnvironment(
            Prompts(ByteTokenizer(), True), lambda *_: self.over.wait(), None
        )
        self.over = threading.Event()
        self.episode = self.agents.episode(0)
        self.port = int(self.agents.address.rpartition(":")[2])
        self.thread = threading.Thread(target=lambda: asyncio.run(self.play()))
        self.thread.start()
        while self.episode.name not in self.agents.episodes:  # until the episode begins there
            time.sleep(0.01)
        self.before = f"/{self.episode.name}/v1/"
        self.path = f"{self.before}chat/completions"
        self.good = {self.path: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}}
        responses = self.path.replace("chat/completions", "responses")
        self.good[responses] = {"input": ITEMS, "tools": TOOLS, "max_output_tokens": 2}

    async def play(self):
        turn = await self.episode.reset()
        while not turn.done:
            assert turn.tokens
            turn = await self.episode.step([*b"ok", 256])

    def close(self):
        self.over.set()
        self.thread.join(30)
        assert not self.thread.is_alive()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.agents.loop).result(10)
        assert self.agents.episodes == {}

    def plain(self):
        status, _, told = post(self.port, self.path, dumped(self.good[self.path]))
        assert status == 200
        return json.loads(told)["choices"]

    check_error = Serve.check_error

    def check_end(self):
        assert not self.episode.waiting


@pytest.fixture(scope="module", params=[Serve, Jobs, Agents])
def target(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Access, "idle_seconds", 1.0)
        one = request.param(tmp_path_factory.mktemp("fuzz"))
        yield one
        one.close()


def hostile(target, draw, field):
    """Send a hostile request and return the answer; a given ``field`` is popped and drawn."""
    kind = draw.choice(["value"] * 6 + ["body", "type", "frame", "path"])
    path = field[-1][0] if kind == "value" else draw.choice(list(target.good))
    if isinstance(target.good[path], bytes):
        data, sort = bytearray(target.good[path]), "application/x-protobuf"
        if kind == "value":
            message = wire.ForwardBackwardRequest.FromString(bytes(data))
            put_wire(message, field.pop()[1], draw)
            return path, message, post(target.port, path, message.SerializeToString(), sort)
        for _ in range(draw.choice([0, 1, 1, 3, 9])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        data = bytes(data[: draw.choice([len(data)] * 3 + [draw.randrange(len(data))])])
        return path, data, post(target.port, path, data, sort)
    if kind == "value":
        ways = sorted((way for at, way in target.fields if at == path), key=str)
        ways += [(name,) for name in ("x", "\ud800", "")]
        drawn = draw.choices(ways, k=draw.choice([0, 0, 1]))
        body = copy.deepcopy(target.good[path])
        for way in [*drawn, field.pop()[1]]:
            body = put(body, way, draw.choice(VALUES))
        return path, body, post(target.port, path, dumped(body))
    if kind == "body":
        data = draw.choice(BODIES)
        return path, data[:99], post(target.port, path, data)
    good = dumped(target.good[path])
    if kind == "type":
        sort = draw.choice(TYPES)
        return path, sort, post(target.port, path, good, sort)
    if kind == "path":
        path = draw.choice(
            [path + "/", path + "%00", path + "?wait=nan&number=-1", "/", "//", "/%ff"]
        )
        return path, good, post(target.port, path, good)
    frame = draw.choice(FRAMES)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    is_cut = b"Content-Length: 9" in frame or b"2\r\n{}\r\n" in frame
    head += "" if is_cut else "Connection: close\r\n"
    hang_up = is_cut and draw.random() < 0.5
    return path, frame[:99], parts(exchange(target.port, head, frame, hang_up))


@pytest.mark.tier("long", quick=["Agents-0-40"])
@pytest.mark.parametrize(("seed", "times"), [(0, 40), (1, 500)])
def test_whatever_comes_is_answered_and_forgotten(target, seed, times):
    draw, expected = random.Random(seed), target.plain()
    statuses, left = set(), []
    rounds = -1
    for number in range(times):
        if not left:
            left, rounds = sorted(target.fields, key=str), rounds + 1
            draw.shuffle(left)
        path, sent, (status, kind, body) = hostile(target, draw, left)
        told = (path, sent, status, body[:500])
        statuses.add(status)
        assert status < 500, told
        if kind.startswith("text/event-stream"):
            assert strict(body.decode().split("data: ")[1].split("\n")[0]), told
        else:
            assert kind == "application/json", told
            value = strict(body)
            if status >= 300:
                problem = target.check_error(value)
                assert "\n" not in problem, told
                assert len(problem) < 700, told
        if number % 10 == 9:
            assert target.plain() == expected, told
    assert {200, 400, 415} <= statuses or times < 100
    assert rounds or times < 100, f"of {len(target.fields)} fields {len(left)} were never drawn"
    target.check_end()


def test_every_model_of_a_request_is_somewhere_asked_for():
    """Nested models count too; base classes and the service's own messages are left out."""
    parts = [part for target in (Serve, Jobs, Agents) for part in target.MODELS.values()]
    models = [model for part in parts for model in part]
    reached = {model for one in models for _, model in fields_of(one)}
    known, left = set(), [JsonBody]
    while left:
        known.add(left[-1])
        left += left.pop().__subclasses__()
    assert known - reached == {JsonBody, JobBody, _Asked, Pass, Forward, Unserved}
    parsed = set(re.findall(r"_parsed\W+types\.(\w+)", inspect.getsource(jobs_server)))
    assert parsed == {one.__name__ for one in models if not issubclass(one, JsonBody)}
    message = {way for way, _ in fields_of(Pass)}
    assert message >= {("loss_fn_config",), ("data", 0, "advantages")}
    sampling = {way for way, _ in fields_of(KINDS["asample"])}
    assert sampling >= {
        ("prompt_logprobs",),
        ("sampling_params", "seed"),
        ("prompt", "chunks", 0, "tokens"),
    }
    completions = {way for way, _ in fields_of(CompletionServer.BODIES["/v1/completions"])}
    assert completions >= {("prompt_logprobs",), ("response_format", "json_schema")}
