"""The job service as a process, behind HTTP: killed, cancelled, asked by many, and by strangers."""

import hashlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from command_lines import settled
from test_jobs import WORDS, Course, adapter_of, config_of, run_alone

from moetrain.cli.train import run_jobs as run
from moetrain.config import ConfigError
from moetrain.jobs.client import Client, RequestFailed
from moetrain.jobs.run import JobRun

JOBS, SEEDS = 30, 15
CANCELLED = (3, 10, 18, 27)
"""Of :data:`JOBS`."""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Process:
    """The service in a process of its own, which can be killed and started again."""

    def __init__(self, folder, *words, token=None):
        self.folder, self.port = folder, free_port()
        self.words = [*WORDS, f"output_dir={folder}", f"jobs.port={self.port}", *words]
        self.client = Client(f"http://127.0.0.1:{self.port}", token, patience=60)
        self.start()

    def start(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "moetrain.jobs", *settled(self.words)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def wait(self):
        """Until it serves."""
        self.client.call("GET", "/health")

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    """``start(*words)``: a :class:`Process` in ``tmp_path / "out"``, ended with the test."""
    started = []

    def begin(*words):
        started.append(Process(tmp_path / "out", *words))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


def follow(client, seed, is_cancelled, counts):
    """One client's job from start to end, or to the middle; every answer is counted."""
    job = client.create(seed=seed)
    course = Course(seed, lambda kind, body: job.ask(kind, **body))
    while course.go_on():
        counts.append(seed)
        if is_cancelled and len(course.results) == 3:
            assert job.cancel()["status"] == "cancelled"
            with pytest.raises(RequestFailed, match="this job is cancelled"):
                job.optim_step(lr=1.0)
            if seed % 2:
                job.delete()
            return None
    return course.results, job.id


def test_thirty_jobs_with_kills_and_cancels_each_as_if_alone(start, tmp_path):
    service = start("jobs.max_loaded=4", "jobs.save_interval=4")
    service.wait()
    over, killed, counts = threading.Event(), [], []

    def kill_now_and_then():
        """At moments that nobody has chosen, of a service that has got somewhere since the last."""
        while not over.wait(random.uniform(0.2, 0.6)):
            if len(counts) >= 80 * (len(killed) + 1):
                service.kill()
                killed.append(len(counts))
                service.start()

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        with ThreadPoolExecutor(10) as clients:
            work = [(service.client, n % SEEDS, n in CANCELLED, counts) for n in range(JOBS)]
            found = list(clients.map(lambda words: follow(*words), work))
    finally:
        over.set()
        killer.join()
    assert len(killed) >= 2, counts
    assert [number for number in range(JOBS) if found[number] is None] == list(CANCELLED)
    alone = {seed: run_alone(tmp_path / f"alone-{seed}", seed) for seed in range(SEEDS)}
    for number, result in enumerate(found):
        if result is not None:
            results, name = result
            assert (results, adapter_of(service.folder, name)) == alone[number % SEEDS], number
    left = list((service.folder / "jobs").iterdir())
    assert len(left) == JOBS - sum(number % SEEDS % 2 for number in CANCELLED)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A service for many tests, which takes the token "secret"."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "key").write_text("secret\n")
    one = Process(
        folder / "out",
        "jobs.auth=token",
        f"jobs.token_file={folder / 'key'}",
        "jobs.max_request_mib=1",
        token="secret",
    )
    one.wait()
    yield one
    one.kill()


def send(served, method, path, data=b"", token="secret", kind="application/json"):
    """Status and body of a request by hand."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    headers = {"content-type": kind}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    connection.request(method, path, data, headers)
    reply = connection.getresponse()
    return reply.status, reply.read()


def test_who_has_no_token_is_told_nothing(served):
    job = served.client.create()
    here = f"/v1/jobs/{job.id}"
    for method, path in (
        ("GET", here),
        ("DELETE", here),
        ("POST", "/v1/jobs"),
        ("POST", here + "/cancel"),
        ("POST", here + "/requests/optim_step"),
        ("GET", here + "/answers/0"),
        ("GET", here + "/saves/a/adapter_config.json"),
        ("GET", "/health"),
    ):
        for token in (None, "", "secre", "secret2", "Bearer secret"):
            status, body = send(served, method, path, b"{}", token)
            assert (status, list(json.loads(body))) == (401, ["error"])
    assert job.describe()["status"] == "open"


def test_nobody_reads_or_touches_what_is_anothers(served):
    client = served.client
    mine, theirs = client.create(seed=1), client.create(seed=2)
    mine.forward_backward(data=[{"tokens": [1, 2, 3]}])
    mine.optim_step(lr=1e-2)
    mine.save("a")
    before = mine.describe()
    # What there is has no list, and names lead nowhere else.
    assert send(served, "GET", "/v1/jobs")[0] == 405
    for name in ("0" * 32, mine.id[:-1], mine.id.upper() + "x", "..", "%2e%2e", "base.json"):
        assert send(served, "GET", f"/v1/jobs/{name}")[0] == 404, name
        assert send(served, "DELETE", f"/v1/jobs/{name}")[0] in (404, 405), name
    for save in ("a", "../../" + mine.id + "/saves/a", "..%2f..%2f" + mine.id + "%2fsaves%2fa"):
        path = f"/v1/jobs/{theirs.id}/saves/{save}/adapter_config.json"
        assert send(served, "GET", path)[0] == 404, save
    for file in ("../../../job.json", "..%2f..%2f..%2fjob.json", "manifest.json"):
        assert send(served, "GET", f"/v1/jobs/{mine.id}/saves/a/{file}")[0] == 404, file
    for name in ("../" + mine.id, "..", "/etc/passwd", mine.id + "/a"):
        with pytest.raises(RequestFailed, match="should match pattern"):
            theirs.load(name)
    with pytest.raises(RequestFailed, match="has no save 'a'"):
        theirs.load("a")
    theirs.delete()
    assert mine.describe() == before
    status, adapter = send(served, "GET", f"/v1/jobs/{mine.id}/saves/a/adapter_model.safetensors")
    assert status == 200
    assert hashlib.sha256(adapter).hexdigest() == adapter_of(served.folder, mine.id, "a")


def test_bad_bodies_are_refused_in_one_line(served):
    job = served.client.create()
    here = f"/v1/jobs/{job.id}"
    there = f"{here}/requests/optim_step"
    for path, data, kind, wanted in (
        (there, b"{", "application/json", (400, "the body is not JSON")),
        (there, b"[" * 100_000, "application/json", (400, "the body is not JSON")),
        (there, b'{"lr": NaN}', "application/json", (400, "the body is not JSON")),
        (there, b'{"lr": 1}', "text/plain", (415, "the body is not application/json")),
        (there, b" " * (2 << 20), "application/json", (413, "the body has more than the 1 MiB of")),
        (here + "/cancel", b"{}", "text/plain", (415, "the body is not application/json")),
        (here + "/cancel", b'{"a": 1}', "application/json", (400, "'a' is not supported")),
        (here + "/nothing", b"{}", "application/json", (404, "Not Found")),
        (here, b"{}", "application/json", (405, "Method Not Allowed")),
        (there + "?number=7", b'{"lr": 1}', "application/json", (400, "number 7 is ahead")),
        (there + "?number=x", b'{"lr": 1}', "application/json", (400, "number: Input should be")),
        (there + "?wait=inf", b'{"lr": 1}', "application/json", (400, "wait: Input should be")),
        (there + "x", b"{}", "application/json", (400, "'optim_stepx' is not one of")),
        ("/v1/jobs", b'{"id": "mine"}', "application/json", (400, "id is not 32 hexadecimal")),
        ("/v1/jobs", b'{"sed": 1}', "application/json", (400, "'sed' is not supported")),
        ("/v1/jobs", b'{"seed": -1}', "application/json", (400, "seed -1 is out of range")),
        ("/v1/jobs", b"[]", "application/json", (400, "Input should be a valid dictionary")),
        ("/v1/jobs", b'{"seed": 1.5}', "application/json", (400, "seed: Input should be a valid")),
    ):
        status, body = send(served, "POST", path, data, kind=kind)
        problem = json.loads(body)["error"]
        assert (status, problem[: len(wanted[1])]) == wanted
        assert "\n" not in problem
    assert (job.describe()["status"], job.describe()["next_number"]) == ("open", 0)


def test_an_answer_can_be_asked_for_later(served):
    job = served.client.create()
    body = json.dumps({"prompts": [[1, 2]], "max_tokens": 40, "n": 4}).encode()
    here = f"/v1/jobs/{job.id}"
    status, reply = send(served, "POST", here + "/requests/sample?wait=0", body)
    assert (status, json.loads(reply)) == (202, {"number": 0})
    status, reply = send(served, "GET", here + "/answers/0?wait=60")
    assert status == 200
    assert [len(c["tokens"]) for c in json.loads(reply)["result"]["completions"][0]] == [40] * 4
    assert send(served, "GET", here + "/answers/1")[0] == 400
    status, reply = send(served, "POST", here + "/requests/optim_step", b'{"lr": 1}')
    assert (status, json.loads(reply)["number"]) == (422, 1)


def test_the_service_stops_in_order(start):
    service = start("jobs.save_interval=100")
    job = service.client.create()
    job.forward_backward(data=[{"tokens": [1, 2, 3]}])
    job.optim_step(lr=1e-2)
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(60) == 143
    assert [path.name for path in (service.folder / "jobs" / job.id / "checkpoints").iterdir()] == [
        "step-00000002"
    ]


def test_a_token_is_made_for_who_listens_to_others(tmp_path):
    for words, has_token in (
        (["jobs.host=0.0.0.0"], True),
        (["jobs.host=::"], True),
        (["jobs.host=example.org"], True),
        (["jobs.host=0.0.0.0", "jobs.auth=none"], False),
        ([], False),
        (["jobs.host=127.8.9.1"], False),
        (["jobs.host=::1"], False),
        (["jobs.host=localhost"], False),
        (["jobs.auth=token"], True),
    ):
        token = JobRun.access_of(config_of(tmp_path, *words)).token()
        assert (token is not None) == has_token, words
        if has_token:
            assert len(token) > 40
            assert JobRun.access_of(config_of(tmp_path, *words)).token() == token
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    for text, says in (("", "holds no token"), (None, "cannot be read")):
        if text is not None:
            (tmp_path / "mine").write_text(text)
        name = "mine" if text is not None else "nowhere"
        with pytest.raises(ConfigError, match=f"jobs.token_file: .*{says}"):
            JobRun.access_of(
                config_of(tmp_path, "jobs.auth=token", f"jobs.token_file={tmp_path / name}")
            ).token()


def test_a_port_that_is_taken_is_one_line(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert run([*WORDS, f"output_dir={tmp_path / 'out'}", f"jobs.port={port}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: jobs.port: {port} at 127.0.0.1 cannot be listened at")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--jobs.auth none --jobs.token_file x", "error: jobs.token_file: 'x' contradicts"),
        ("--lora.rank 0", "error: lora.rank: 0, but jobs train adapters"),
        ("--optim.offload_fraction 1", "error: optim.offload_fraction: 1.0, but jobs take turns"),
        ("--jobs.max_jobs 0", "error: jobs.max_jobs: "),
        ("--rl.policy clip", "error: rl.policy: set (command line), but python -m moetrain.jobs"),
        ("--checkpoint.interval 3", "error: checkpoint.interval: set (command line), but"),
        ("--optim.lr 1e-4", "error: optim.lr: set (command line), but python -m moetrain.jobs"),
        ("--jobs.prot 3", "error: jobs.prot: unknown setting; did you mean --jobs.port?"),
        ("--launch.nproc 2 --train.global_batch_size 8 --lora.rank 0", "error: lora.rank: 0, but"),
    ],
)
def test_a_bad_setting_is_one_line(words, says, capsys, tmp_path):
    assert run([*words.split(), "--train.device=cpu", f"--output_dir={tmp_path / 'out'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(says)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_needs_nothing(capsys, tmp_path):
    assert run(["--dry_run", "--train.device=cpu", f"--output_dir={tmp_path / 'out'}"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"]["port"] == 8100
    assert not (tmp_path / "out").exists()
