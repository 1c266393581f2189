"""Helpers of tests/jobs/test_server.py that other tests use too."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_proto_response

from tests.lib.command_lines import settled
from tests.lib.job_services import WORDS, target_of


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def message_of(body, name, number, forward_only=False):
    """Return the bytes that the SDK sends for a pass over texts."""
    data = []
    for datum in body["data"]:
        inputs = {key: values for key, values in datum.items() if key != "tokens"}
        tokens = types.ModelInput.from_ints(datum["tokens"])
        data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
    how = body.get("loss_fn", "cross_entropy"), body.get("loss_fn_config")
    given = types.ForwardBackwardInput(data=data, loss_fn=how[0], loss_fn_config=how[1])
    request = types.ForwardBackwardRequest(
        forward_backward_input=given, model_id=name, seq_id=number
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


def result_of(kind, data):
    """Return the result in a message, in the form that the service stores."""
    if kind == "asample":
        found = deserialize_proto_response(data, types.SampleResponse)
        sequences = [
            {"tokens": one.tokens, "logprobs": one.logprobs, "stop_reason": one.stop_reason}
            for one in found.sequences
        ]
        return {"prompt_logprobs": found.prompt_logprobs, "sequences": sequences}
    found = deserialize_proto_response(data, types.ForwardBackwardOutput)
    logprobs = [one["logprobs"].data for one in found.loss_fn_outputs]
    return {"logprobs": logprobs, "loss": found.metrics["loss:sum"]}


class Failed(Exception):
    """A request was answered with an error."""

    def __init__(self, status, problem):
        super().__init__(problem)
        self.status = status


class Remote:
    """HTTP client of a service; it polls for results instead of the SDK's waits of minutes."""

    def __init__(self, port, token=None):
        self.url, self.token, self.seqs = f"http://127.0.0.1:{port}/api/v1/", token, {}

    def call(self, method, path, body=b"", kind="application/json"):
        """Return the answer's JSON, or its bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": kind} | ({"x-api-key": self.token} if self.token else {})
        request = urllib.request.Request(self.url + path, data or None, headers, method=method)
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(request) as reply:
                    is_json = reply.headers["content-type"] == "application/json"
                    return json.load(reply) if is_json else reply.read()
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:
                    raise Failed(error.code, json.load(error)["error"]) from None
            except (http.client.HTTPException, OSError):
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def create(self, seed=0):
        session = self.call("POST", "create_session", {})["session_id"]
        lora = {"rank": 8, "seed": seed}
        new = {"session_id": session, "model_seq_id": 0, "base_model": "debug"}
        new["lora_config"] = lora
        return self.retrieve(self.call("POST", "create_model", new)["request_id"])["model_id"]

    def retrieve(self, name, kind=""):
        answer = {"type": "try_again"}
        while isinstance(answer, dict) and answer.get("type") == "try_again":
            answer = self.call("POST", "retrieve_future", {"request_id": name})
        if isinstance(answer, bytes):
            return result_of(kind, answer)
        if "error" in answer:
            raise Failed(answer["category"], answer["error"])
        return answer

    def submit(self, name, kind, body):
        job, body = target_of(name, kind, body)
        seq = self.seqs[job] = self.seqs.get(job, 0) + 1
        if kind in ("forward", "forward_backward"):
            data = message_of(body, job, seq, kind == "forward")
            return self.call("POST", "forward_backward", data, "application/x-protobuf")
        at = {"sampling_session_id": job, "seq_id": seq - 1}
        at = at if kind == "asample" else {"model_id": job, "seq_id": seq}
        return self.call("POST", kind, {**body, **at})

    def ask(self, name, kind, body):
        found = self.retrieve(self.submit(name, kind, body)["request_id"], kind)
        return json.loads(json.dumps(found).replace(name.partition(":")[0], "SESSION"))


class Process:
    """The service in its own process, which can be killed and restarted."""

    def __init__(self, folder, *words, token=None):
        self.folder, self.port = folder, free_port()
        self.words = [*WORDS, f"output_dir={folder}", f"jobs.port={self.port}", *words]
        self.client = Remote(self.port, token)
        self.start()

    def start(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "moetrain.jobs", *settled(self.words)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def wait(self):
        """Wait until the service answers."""
        self.client.call("GET", "get_server_capabilities")

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Start a service for many tests; it takes the token "tml-secret"."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "key").write_text("tml-secret\n")
    one = Process(
        folder / "out",
        "jobs.auth=token",
        f"jobs.token_file={folder / 'key'}",
        "jobs.max_request_mib=1",
        token="tml-secret",
    )
    one.wait()
    yield one
    one.kill()


def send(served, method, path, data=b"", token="tml-secret", kind="application/json"):
    """Send a request by hand; return its status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    headers = {"content-type": kind}
    if token is not None:
        headers["x-api-key"] = token
    connection.request(method, f"/api/v1/{path}", data, headers)
    reply = connection.getresponse()
    return reply.status, reply.read()
