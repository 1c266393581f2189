"""The job service against bad luck and bad will: each of these had ended it, or cost a job."""

import errno
import http.client
import json
import os
import random
import socket
import subprocess
import sys

import pytest
from pydantic import ValidationError
from test_jobs import asker, config_of, text_of
from test_jobs_server import Process, send

from moetrain.jobs import store
from moetrain.jobs.api import KINDS, Refused
from moetrain.jobs.scheduler import Service

LEARN = ("forward_backward", {"data": [{"tokens": text_of(5)}]})
STEP, LOOK = ("optim_step", {"lr": 1e-2}), ("forward", {"data": [{"tokens": text_of(6)}]})


@pytest.fixture
def service(tmp_path):
    with Service(config_of(tmp_path)) as one:
        yield one


def blown_up(service):
    """A job whose weights are not finite any more."""
    name = service.create(seed=2)["id"]
    for seed in range(2):
        service.ask(name, "forward_backward", {"data": [{"tokens": text_of(seed)}]})
        service.ask(name, "optim_step", {"lr": 1e6})
    return name


def test_a_job_of_nan_is_told_so(service):
    body = {"prompts": [[1, 2]], "max_tokens": 2, "logprobs": 3}
    (completion,) = service.ask(blown_up(service), "sample", body)["result"]["completions"][0]
    assert completion["logprobs"] == [None, None]
    assert [list(top.values()) for top in completion["top_logprobs"]] == [[None] * 3] * 2


def test_an_answer_is_the_same_when_it_is_read_again(service):
    name, body = service.create()["id"], {"prompts": [[1, 2]], "max_tokens": 2, "logprobs": 3}
    first = service.ask(name, "sample", body, 0)["result"]
    assert service.ask(name, "sample", body, 0)["result"] == first


def test_nothing_of_a_job_is_left_in_the_cache(service):
    """Kernels read pages whole, and NaN there is no better for a weight of 0."""
    body = {"prompts": [text_of(1, 30)], "max_tokens": 20, "n": 4}
    service.ask(blown_up(service), "sample", body)
    caches = service.session.generator.steps.caches
    assert not all(cache.values_PZGv.isfinite().all() for cache in caches)
    asker(service, service.create()["id"])("sample", body | {"n": 1})
    for cache in caches:
        assert cache.values_PZGv.isfinite().all()
        assert cache.keys_PZGd.isfinite().all()
        assert cache.values_PZGv.any()


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        ("optim_step", {"lr": 1.0, "a\nb": 1}, r"^'a\\nb' is not supported"),
        ("optim_step", {"lr": 1.0, "a" * 10**6: 1}, r"^'a{50}.*' is not supported"),
        (
            "sample",
            {"prompts": [[1]], "max_tokens": 200, "n": 1000, "logprobs": 50},
            "more than an answer of jobs.max_request_mib holds",
        ),
    ],
)
def test_a_refusal_is_a_line(service, kind, body, says):
    name = service.create()["id"]
    with pytest.raises(Refused, match=says) as found:
        service.submit(name, kind, body)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 400


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("forward_backward", {"data": [{"tokens": ["a"] * 1000}]}),
        ("forward_backward", {"data": ["a"] * 1000}),
        ("forward", {"data": [{"tokens": [1, 2], "mask": [7] * 1000}]}),
        ("forward_backward", {"data": [{"tokens": [1, 2], "advantages": ["a"] * 1000}]}),
        ("forward_backward", {"data": [{"tokens": [1, 2], "logprobs": ["a"] * 1000}]}),
        ("forward", {"data": [{"tokens": [1, 2]}] * 65_537}),
        ("sample", {"prompts": [["a"] * 1000], "max_tokens": 1}),
        ("sample", {"prompts": ["a"] * 1000, "max_tokens": 1}),
        ("sample", {"prompts": [[1]], "max_tokens": 1, "stop_ids": ["a"] * 1000}),
        ("optim_step", dict.fromkeys(map(str, range(1000)))),
        ("forward", {"data": [{"tokens": [1, 2], **dict.fromkeys(map(str, range(1000)))}]}),
    ],
)
def test_a_bad_body_takes_no_more_memory_than_a_good_one(kind, body):
    with pytest.raises(ValidationError) as found:
        KINDS[kind].model_validate(body)
    assert found.value.error_count() <= 2


def test_who_is_cancelled_is_not_brought_back(tmp_path, monkeypatch):
    service = Service(config_of(tmp_path))
    name = service.create()["id"]
    for _ in range(10):
        asker(service, name)(*LEARN)
    service._stack.close()  # as the kernel ends a claim
    with Service(config_of(tmp_path)) as service:
        waiting = service.answer(name, service.submit(name, *STEP))
        again, served = Service._serve_again, []

        def cancel(self, job, number):
            served.append(number)
            if number == 3:
                service.cancel(name)
            again(self, job, number)

        monkeypatch.setattr(Service, "_serve_again", cancel)
        assert service.turn()
        assert waiting.result(0) == {"error": "cancelled"}
        assert served == [0, 1, 2, 3]
        assert not service.turn()


def test_an_id_is_taken_until_its_job_is_gone(service):
    name = "ab" * 16
    service.create(name)
    asker(service, name)(*LEARN)
    gone = service.delete(name)
    with pytest.raises(Refused, match="being deleted"):
        service.create(name)
    service.turn()
    gone.result(0)
    assert service.create(name, seed=1)["next_number"] == 0
    asker(service, name)(*LEARN)


def test_what_is_deleted_is_gone_after_a_stop(tmp_path):
    with Service(config_of(tmp_path)) as service:
        name = service.create()["id"]
        gone = service.delete(name)
        gone.cancel()  # as who waits for it does, when it goes
    assert not list((tmp_path / "jobs").iterdir())


def test_a_full_disk_refuses_and_changes_nothing(service, tmp_path, monkeypatch):
    name, other = service.create()["id"], "cd" * 16
    waiting = service.answer(name, service.submit(name, *LEARN))

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_write_durably", full)
        with pytest.raises(OSError, match="No space"):
            service.create(other)
        with pytest.raises(OSError, match="No space"):
            service.cancel(name)
        assert service.describe(name)["status"] == "open"
        with pytest.raises(Refused, match="there is no such thing"):
            service.describe(other)
    service.turn()
    assert "result" in waiting.result(0)
    waiting = service.answer(name, service.submit(name, *LEARN))
    with monkeypatch.context() as patch:
        patch.setattr(store, "_write_durably", full)
        gone = service.delete(name)
        assert waiting.result(0) == {"error": "cancelled"}
        service.turn()
        gone.result(0)
    assert not (tmp_path / "jobs" / name).exists()


def test_a_start_with_other_settings_costs_no_job(tmp_path):
    """Its requests since its last checkpoint have no room there, and have again after it."""
    long = ("forward_backward", {"data": [{"tokens": text_of(5, 60)}]})
    with Service(config_of(tmp_path / "a")) as service:
        ask = asker(service, service.create()["id"])
        ask(*long)
        ask(*STEP)
        expected = ask(*LOOK)
    service = Service(config_of(tmp_path / "b"))
    name = service.create()["id"]
    asker(service, name)(*long)
    service._stack.close()  # as the kernel ends a claim
    with Service(config_of(tmp_path / "b", "data.seq_len=32")) as service:
        waiting = service.answer(name, service.submit(name, *STEP))
        service.turn()
        assert "could not be brought back" in waiting.result(0)["error"]
        assert service.describe(name)["status"] == "failed"
    with Service(config_of(tmp_path / "b")) as service:
        assert service.describe(name)["status"] == "open"
        while service.turn():
            pass
        assert asker(service, name)(*LOOK) == expected


# ---- any order of anything ---------------------------------------------------------------------


def program(seed):
    """Requests, most of them possible, of one job."""
    draw = random.Random(seed)
    for _ in range(14):
        tokens = text_of(draw.randrange(1000), draw.randrange(2, 40))
        kind = draw.choice(("cross_entropy", "clip", "step", "step", "sample", "look", "save"))
        if kind == "step":
            yield "optim_step", {"lr": draw.choice((1e-3, 1e-2, 1e4))}
        elif kind == "sample":
            yield "sample", {"prompts": [tokens, [1]], "max_tokens": 5, "n": 2, "logprobs": 2}
        elif kind == "look":
            yield "forward", {"data": [{"tokens": tokens}]}
        elif kind == "save":
            yield draw.choice(("save", "load")), {"name": draw.choice("ab")}
        else:
            datum = {"tokens": tokens}
            if kind == "clip":
                datum |= {"advantages": draw.uniform(-1, 1), "logprobs": [-3.0] * len(tokens)}
            yield "forward_backward", {"data": [datum] * draw.randrange(1, 4), "loss": kind}
    yield "load", {"name": "none"}


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_anything_is_each_jobs_own(tmp_path, seed):
    draw = random.Random(1000 + seed)
    seeds = [10 * seed + i for i in range(5)]
    alone = {}
    for one in seeds:
        with Service(config_of(tmp_path / f"alone-{one}")) as service:
            name = service.create(seed=one)["id"]
            alone[one] = [service.ask(name, *request) for request in program(one)]
    assert any("error" in answer for answers in alone.values() for answer in answers)
    names, found = {one: f"{one:032x}" for one in seeds}, {one: [] for one in seeds}
    left = {one: list(program(one)) for one in seeds}
    while any(left.values()):
        words = (
            f"jobs.max_loaded={draw.randrange(1, 6)}",
            f"jobs.save_interval={draw.choice((1, 4, 99))}",
        )
        service = Service(config_of(tmp_path / "all", *words))
        for one in seeds:
            service.create(names[one], one)
        for _ in range(draw.randrange(5, 40)):
            if not (live := [one for one in seeds if left[one]]):
                break
            one = draw.choice(live)
            number = len(found[one])
            found[one].append(service.ask(names[one], *left[one].pop(0), number))
        if draw.random() < 0.5:
            service.close()
        else:
            service._stack.close()
    for one in seeds:
        for mine, its in zip(found[one], alone[one], strict=True):
            assert mine == its


# ---- behind HTTP -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    one = Process(tmp_path_factory.mktemp("served") / "out")
    one.wait()
    yield one
    one.kill()


def test_to_delete_again_is_no_error(served):
    job = served.client.create()
    job.delete()
    job.delete()  # as after a reply that got lost


@pytest.mark.parametrize("kind", ["text/plain; json", "text/json", ""])
def test_what_any_page_can_send_is_refused(served, kind):
    status, body = send(served, "POST", "/v1/jobs", b"", None, kind)
    assert (status, json.loads(body)["error"]) == (415, "the body is not application/json")


def test_a_number_of_any_length_is_refused(served):
    job = served.client.create()
    for number in ("9" * 5000, "x"):
        status, body = send(served, "GET", f"/v1/jobs/{job.id}/answers/{number}")
        assert status == 400
        assert json.loads(body)["error"].startswith("number: ")


class Confined(Process):
    """One that may have 200 files open."""

    def start(self):
        command = [sys.executable, "-m", "moetrain.jobs", *self.words]
        confined = ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(confined, env=environment, stdout=subprocess.DEVNULL)


def test_connections_do_not_take_the_files_that_jobs_need(tmp_path):
    one, idle = Confined(tmp_path / "out"), []
    try:
        one.wait()
        for _ in range(300):
            idle.append(socket.create_connection(("127.0.0.1", one.port), timeout=10))
        first = http.client.HTTPConnection("127.0.0.1", one.port, timeout=60)
        headers = {"content-type": "application/json"}
        first.request("POST", "/v1/jobs", b"{}", headers)
        name = json.load(first.getresponse())["id"]
        for kind, body in (LEARN, STEP):
            first.request("POST", f"/v1/jobs/{name}/requests/{kind}", json.dumps(body), headers)
            assert "result" in json.load(first.getresponse())
        for connection in idle:
            connection.close()
        one.client.call("GET", f"/v1/jobs/{name}")
    finally:
        one.kill()
