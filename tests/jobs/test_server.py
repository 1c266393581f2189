"""The job service as an HTTP process: killed, abandoned, with many clients, and with strangers."""

import hashlib
import json
import random
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tinker.proto import tinker_public_pb2 as wire

from moetrain.cli.train import run_jobs as run
from moetrain.config import ConfigError
from moetrain.jobs.run import JobRun
from moetrain.jobs.server import body_of_pass
from tests.lib.job_servers import Failed, Process, Remote, message_of, send, served
from tests.lib.job_services import (
    WORDS,
    Course,
    adapter_of,
    config_of,
    rate,
    run_alone,
    texts,
)

__all__ = ["served"]  # a fixture

JOBS, SEEDS = 30, 15
CANCELLED = (3, 10, 18, 27)
"""Indices of :data:`JOBS`."""


@pytest.fixture
def start(tmp_path):
    """Return ``start(*words)``, which starts a :class:`Process` in ``tmp_path / "out"``; it ends
    with the test."""
    started = []

    def begin(*words):
        started.append(Process(tmp_path / "out", *words))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


def follow(port, seed, is_cancelled, counts):
    """Run one client's job to its end, or to the middle; count every answer."""
    client = Remote(port)
    name = client.create(seed)
    course = Course(seed, lambda kind, body: client.ask(name, kind, body))
    while course.go_on():
        counts.append(seed)
        if is_cancelled and len(course.results) == 3:
            if seed % 2:
                client.call("DELETE", f"training_runs/{name}")
            else:
                client.call("POST", f"sessions/{name.partition(':')[0]}/finish", {})
            with pytest.raises(Failed, match="there is no such job"):
                client.ask(name, "optim_step", rate(1.0))
            return None
    return course.results, name


@pytest.mark.tier("wide")
def test_thirty_jobs_with_kills_and_cancels_each_as_if_alone(start, tmp_path):
    service = start("jobs.max_loaded=4", "jobs.save_interval=4")
    service.wait()
    over, killed, counts = threading.Event(), [], []

    def kill_now_and_then():
        """Kill the service at random moments, once it has progressed since the last kill."""
        while not over.wait(random.uniform(0.2, 0.6)):
            if len(counts) >= 80 * (len(killed) + 1):
                service.kill()
                killed.append(len(counts))
                service.start()

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        with ThreadPoolExecutor(10) as clients:
            work = [(service.port, n % SEEDS, n in CANCELLED, counts) for n in range(JOBS)]
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
    runs = [path for path in left if ":train:" in path.name]
    assert len(runs) == JOBS - len(CANCELLED)


@pytest.mark.tier("long")
def test_service_answers_nothing_without_the_token(served):
    name = served.client.create()
    for method, path in (
        ("GET", f"training_runs/{name}"),
        ("DELETE", f"training_runs/{name}"),
        ("GET", f"training_runs/{name}/checkpoints"),
        ("GET", f"training_runs/{name}/checkpoints/external_weights/a/adapter_config.json"),
        ("POST", f"sessions/{name[:32]}/finish"),
        ("POST", "create_session"),
        ("POST", "client/config"),
        ("POST", "optim_step"),
        ("POST", "retrieve_future"),
        ("GET", "get_server_capabilities"),
    ):
        for token in (None, "", "tml-secre", "tml-secret2", "Bearer tml-secret"):
            status, body = send(served, method, path, b"{}", token)
            assert (status, list(json.loads(body))) == (401, ["error"])
    assert send(served, "GET", f"training_runs/{name}")[0] == 200


def test_clients_cannot_reach_other_clients_jobs(served):
    client = served.client
    mine, theirs = client.create(1), client.create(2)
    client.ask(mine, "forward_backward", texts([1, 2, 3]))
    client.ask(mine, "optim_step", rate(1e-2))
    for kind in ("weights", "weights_for_sampler", "weights_external"):
        client.ask(mine, f"save_{kind}", {"path": "a"})
    before = client.call("GET", f"training_runs/{mine}/checkpoints")
    assert len(before["checkpoints"]) == 3
    # Jobs cannot be listed, and paths lead nowhere else.
    for path in ("training_runs", "sessions", "checkpoints", f"sessions/{mine[:32]}"):
        assert send(served, "GET", path)[0] == 404
    for name in ("0" * 32, mine[:-1], mine.upper() + "x", "..", "%2e%2e", "base.json"):
        for method in ("GET", "DELETE"):
            assert send(served, method, f"training_runs/{name}")[0] in (404, 405), name
    for save in ("../../" + mine + "/weights/a", "weights/b", "weights", "job.json", "a"):
        for name in (mine, theirs):
            path = f"training_runs/{name}/checkpoints/{save}"
            assert send(served, "DELETE", path)[0] == 404, save
    for file in ("../../../job.json", "..%2f..%2f..%2fjob.json", "save.json", "../../job.json"):
        for save in ("external_weights/a", "weights/a", "external_weights/a/..", ".."):
            path = f"training_runs/{mine}/checkpoints/{save}/{file}"
            assert send(served, "GET", path)[0] in (404, 405), path
    for path in ("../" + mine, "/etc/passwd", f"tinker://{mine}/weights/../a", mine + "/a"):
        for load in ({"path": path, "optimizer": True}, {"path": path + "/..", "optimizer": False}):
            with pytest.raises(Failed, match="does not have the form tinker://RUN/weights/NAME"):
                client.ask(theirs, "load_weights", load)
    with pytest.raises(Failed, match="there is no save"):
        client.ask(theirs, "load_weights", {"path": "a"})
    # A run that cannot start from a save does not exist.
    wrong = {"path": f"tinker://{mine}/sampler_weights/a", "optimizer": True}
    begun = {**wrong, "session_id": theirs[:32], "model_seq_id": 7}
    status, body = send(served, "POST", "load_weights", json.dumps(begun).encode())
    assert (status, b"no optimizer state" in body) == (400, True)
    assert send(served, "GET", f"training_runs/{theirs[:-1]}7")[0] == 404
    client.call("DELETE", f"training_runs/{theirs}")
    assert client.call("GET", f"training_runs/{mine}/checkpoints") == before
    here = f"training_runs/{mine}/checkpoints/external_weights/a"
    urls = client.call("GET", f"{here}/external_weights_urls")["urls"]
    file = f"{here}/adapter_model.safetensors"
    assert urls["adapter_model.safetensors"] == client.url + file
    status, adapter = send(served, "GET", file)
    assert status == 200
    assert hashlib.sha256(adapter).hexdigest() == adapter_of(served.folder, mine, "a")


def test_bad_bodies_are_refused_in_one_line(served):
    name, kind = served.client.create(), "application/json"
    bits = "application/x-protobuf"
    new = {"session_id": name[:32], "model_seq_id": 5, "lora_config": {"rank": 8}}
    new["base_model"], many = "debug", dict.fromkeys(map(str, range(65)))
    at = {"session_id": name[:32], "sampling_session_seq_id": 5}
    load = {"session_id": name[:32], "model_seq_id": 6, "optimizer": True}
    for path, data, sent, wanted in (
        ("optim_step", b"{", kind, (400, "the body is not JSON")),
        ("optim_step", b"[" * 100_000, kind, (400, "the body is not JSON")),
        ("optim_step", b'{"lr": NaN}', kind, (400, "the body is not JSON")),
        (
            "optim_step",
            b'{"lr": 1}',
            "text/plain",
            (415, "the content-type is 'text/plain', not application/json"),
        ),
        ("optim_step", b" " * (2 << 20), kind, (413, "the body has more than the 1 MiB of")),
        ("optim_step", b"[]", kind, (400, "the body is not an object")),
        ("optim_step", {"model_id": name}, kind, (400, "seq_id None is not a whole number from 1")),
        ("optim_step", {"model_id": name, "seq_id": 7}, kind, (400, "request 6 comes too early")),
        (
            "optim_step",
            {"model_id": name, "seq_id": 0},
            kind,
            (400, "seq_id 0 is not a whole number from 1"),
        ),
        ("optim_step", {"model_id": name, "seq_id": True}, kind, (400, "seq_id True is")),
        ("optim_step", {"model_id": [name]}, kind, (404, "there is no such job")),
        ("optim_stepx", b"{}", kind, (404, "Not Found")),
        (f"training_runs/{name}", b"{}", kind, (405, "Method Not Allowed")),
        (
            "forward_backward",
            b"{}",
            kind,
            (415, "the content-type is 'application/json', not application/x-protobuf"),
        ),
        ("forward_backward", b"{}", bits, (400, "the body is not a ForwardBackwardRequest")),
        ("forward_backward", b"", bits, (404, "there is no such job")),
        (
            "create_model",
            {**new, "session_id": "mine"},
            kind,
            (400, "'mine:train:5' cannot be the i"),
        ),
        ("create_model", {**new, "session_id": name}, kind, (400, "")),
        (
            "create_model",
            {**new, "session_id": "\ud800"},
            kind,
            (400, "'\\ud800:train:5' cannot"),
        ),
        ("create_model", {**new, "session_id": "../" + name[:32]}, kind, (400, "")),
        ("create_model", {**new, "model_seq_id": -1}, kind, (400, "")),
        ("create_model", {**new, "model_seq_id": "5"}, kind, (400, "model_seq_id: Input should")),
        ("create_model", {**new, "sed": 1}, kind, (400, "sed: Extra inputs are not permitted")),
        ("create_model", new | many, kind, (400, "an object has more than 64 keys")),
        ("create_model", {**new, "lora_config": many}, kind, (400, "an object has more than 64")),
        ("create_model", b"[]", kind, (400, "Input should be")),
        (
            "create_model",
            {**new, "base_model": "x"},
            kind,
            (400, "base_model 'x' is not this service's 'debug'"),
        ),
        ("create_model", {**new, "lora_config": {"rank": 5}}, kind, (400, "rank 5 is not this")),
        ("create_model", {**new, "lora_config": None}, kind, (400, "rank 0 is not")),
        (
            "create_model",
            {**new, "lora_config": {"rank": 8, "train_mlp": False}},
            kind,
            (400, "train_mlp is False, but this service trains these w"),
        ),
        (
            "create_model",
            {**new, "optimizer_config": {"type": "dimuon"}},
            kind,
            (400, "optimizer 'dimuon' is not supported, only 'adamw'"),
        ),
        ("create_sampling_session", at, kind, (400, "a sampling session needs base_model or m")),
        (
            "create_sampling_session",
            {**at, "model_path": "x"},
            kind,
            (400, "path: 'x' does not have the form tinker:"),
        ),
        (
            "load_weights",
            {**load, "path": "x"},
            kind,
            (400, "path: 'x' does not have the form tinker://RUN/"),
        ),
        (
            "load_weights",
            {**load, "path": f"tinker://{name}/weights/a"},
            kind,
            (404, "there is no s"),
        ),
        ("asample", b"[]", kind, (400, "the body is not an object")),
        (
            "asample",
            {"sampling_session_id": name, "seq_id": -1},
            kind,
            (400, "seq_id -1 is not a w"),
        ),
        ("retrieve_future", {"request_id": f"{name}:x"}, kind, (404, "there is no such request")),
        ("retrieve_future", {"request_id": f"{name}:0"}, kind, (400, "there was no request 0")),
        ("retrieve_future", {"request_id": f"{name}:" + "9" * 5000}, kind, (404, "there is no s")),
        (
            "asample",
            {"sampling_session_id": name, "seq_id": 0},
            kind,
            (400, "'asample' is not a req"),
        ),
        ("telemetry", b'{"a": ', kind, (400, "the body is not JSON")),
    ):
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        status, told = send(served, "POST", path, body, kind=sent)
        problem = json.loads(told)["error"]
        assert (status, problem[: len(wanted[1])]) == wanted, (path, data)
        assert "\n" not in problem
    assert served.client.ask(name, "forward", texts([1, 2, 3]))["loss"] > 0


def test_a_loss_has_its_settings_from_older_sdks_too():
    """Older SDKs have one map of numbers; newer ones write both, and the second one counts."""
    body = {"data": texts([1, 2])["data"], "loss_fn": "ppo"}
    body["loss_fn_config"] = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    message = wire.ForwardBackwardRequest.FromString(message_of(body, "name", 1))
    message.loss_fn_config["clip_low_threshold"] = 0.25
    assert body_of_pass(message)["loss_fn_config"] == body["loss_fn_config"]
    message.ClearField("loss_fn_config_v2")
    expected = body["loss_fn_config"] | {"clip_low_threshold": 0.25}
    assert body_of_pass(message)["loss_fn_config"] == expected


def test_a_refused_request_takes_its_number(served):
    """The SDK has counted it, and continues with the next number."""
    client = served.client
    name = client.create()
    for kind, body, says in (
        ("optim_step", {"adam_params": {"beta1": 2.0}}, "beta1"),
        ("forward_backward", texts([1, 50]), "a token outside of 0 to 49"),
        ("forward_backward", {**texts([1, 2]), "loss_fn": "gspo"}, "'gspo' is not one of"),
        ("optim_step", rate(1.0), "there was no forward_backward"),
        (
            "load_weights",
            {"path": "tinker://x", "optimizer": True},
            "does not have the form tinker://RUN/",
        ),
    ):
        with pytest.raises(Failed, match=says) as failed:
            client.ask(name, kind, body)
        assert failed.value.status == "user"
    first = client.submit(name, "forward", texts([1, 2, 3]))
    client.seqs[name] -= 1
    assert client.submit(name, "forward", texts([1, 2, 3])) == first  # sent again
    found = [client.retrieve(first["request_id"], "forward") for _ in range(2)]
    assert found[0] == found[1]
    assert found[0]["loss"] > 0


@pytest.mark.tier("long")
def test_the_service_stops_in_order(start):
    service = start("jobs.save_interval=100")
    name = service.client.create()
    service.client.ask(name, "forward_backward", texts([1, 2, 3]))
    service.client.ask(name, "optim_step", rate(1e-2))
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(60) == 143
    checkpoints = service.folder / "jobs" / name / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]


def test_service_makes_a_token_for_other_addresses(tmp_path):
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
            assert token.startswith("tml-")
            assert JobRun.access_of(config_of(tmp_path, *words)).token() == token
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    for text, says in (
        ("", "holds no token"),
        (None, "cannot be read"),
    ):
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
    assert line.startswith(f"error: jobs.port: {port}: cannot listen at 127.0.0.1")


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
        (
            "--dry_run --launch.nproc 2 --train.global_batch_size 8 --lora.rank 0",
            "error: lora.rank: 0, but",
        ),
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
