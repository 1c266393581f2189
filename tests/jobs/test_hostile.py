"""Accidents and hostile requests: each of these once ended the job service or cost a job."""

import errno
import json
import os
import random
import shutil
import socket
import subprocess
import sys

import pytest
from pydantic import ValidationError
from tinker.proto import tinker_public_pb2 as wire

from moetrain.jobs import store
from moetrain.jobs.api import KINDS, MOST_TEXTS, Refused
from moetrain.jobs.scheduler import Service
from moetrain.jobs.server import body_of_pass
from tests.lib.deaths import dying
from tests.lib.job_servers import Process, send
from tests.lib.job_services import (
    answer_to,
    asker,
    config_of,
    new,
    prompting,
    rate,
    target_of,
    text,
    text_of,
    texts,
)

LEARN = ("forward_backward", texts(text_of(5)))
STEP, LOOK = ("optim_step", rate(1e-2)), ("forward", texts(text_of(6)))


@pytest.fixture
def service(tmp_path):
    with Service(config_of(tmp_path)) as one:
        yield one


def blown_up(service):
    """Return a job with non-finite weights and a sampler."""
    name = new(service, 2)
    wild = {"adam_params": {"learning_rate": 1e6, "weight_decay": 1e6}}
    for seed in range(5):
        answer_to(service, name, "forward_backward", texts(text_of(seed)))
        answer_to(service, name, "optim_step", wild)
    answer_to(service, name, "save_weights_for_sampler", {"sampling_session_seq_id": 0})
    return name


TOPS = prompting([1, 2], 2, topk_sample_logprobs=3, prompt_logprobs=True)


def test_a_job_of_nan_is_told_so(service):
    result = answer_to(service, blown_up(service), "asample", TOPS)["result"]
    (completion,) = result["sequences"]
    assert completion["logprobs"] == result["prompt_logprobs"] == [None, None]
    assert [[x for _, x in top] for top in completion["topk"]] == [[None] * 3] * 2


def test_an_answer_is_the_same_when_it_is_read_again(service):
    name = f"{'ab' * 16}:sample:0"
    service.create(name)
    first = answer_to(service, name, "asample", TOPS, 7)["result"]
    assert answer_to(service, name, "asample", TOPS, 7)["result"] == first
    assert service.find(name).accepted == 1
    with pytest.raises(Refused, match="request 7 was another one"):
        answer_to(service, name, "asample", prompting([1], 2), 7)


def test_samples_are_the_same_together_and_after_a_restart(tmp_path):
    """The order of requests does not matter: a request's noise depends on its key.

    Log-probabilities agree up to rounding: a CPU's products depend on the number of rows in their
    bits.
    """
    bodies = {str(key): prompting([1 + key], 5, num_samples=2) for key in range(5)}
    name, found = f"{'ab' * 16}:sample:0", []
    for part, order in enumerate(("01234", "43210")):
        service = Service(config_of(tmp_path / str(part), "jobs.max_completions=4"))
        service.create(name)
        for key in order:
            service.submit(name, "asample", target_of(name, "asample", bodies[key])[1], int(key))
        if part:
            service.release()  # as the kernel releases a lock
            service = Service(config_of(tmp_path / str(part)))
        else:
            assert service.turn()
            assert service.jobs[name].done == 2  # at most jobs.max_completions
        numbers = [
            service.submit(name, "asample", target_of(name, "asample", bodies[k])[1], int(k))
            for k in bodies
        ]
        assert sorted(numbers) == [0, 1, 2, 3, 4]
        while service.turn():
            pass
        results = [service.answer(name, number).result(0)["result"] for number in numbers]
        found.append([one for result in results for one in result["sequences"]])
        service.close()
    assert len(found[0]) == 10
    for one, other in zip(*found, strict=True):
        assert one.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-5)
        assert one == other


def test_a_session_keeps_so_many_samplers(tmp_path):
    with Service(config_of(tmp_path, "jobs.max_saves=2")) as service:
        name = new(service)
        ask, root = asker(service, name), tmp_path / "jobs"
        for number in range(4):
            ask("save_weights_for_sampler", {"sampling_session_seq_id": number})
            ask("asample", prompting([1, 2], 2, sampler=number))
        service.turn()
        assert sorted(path.name[33:] for path in root.iterdir()) == [
            "sample:2",
            "sample:3",
            "train:0",
        ]
        assert sorted(path.name for path in (root / name / "samplers").iterdir()) == ["2", "3"]
        with pytest.raises(Refused, match=r"no such (job|save)"):
            ask("asample", prompting([1, 2], 2, sampler=1))
        ask("save_weights", {"path": "a"})
        service.finish(name[:32])
        service.turn()
        assert [path.name for path in root.iterdir()] == [name]
        with pytest.raises(Refused, match="this job is finished"):
            service.submit(name, *STEP)
        service.remove_save(name, "weights/a")
        service.turn()
        assert not list(root.iterdir())


def test_a_sampler_that_is_refused_leaves_no_weights(tmp_path):
    with Service(config_of(tmp_path, "jobs.max_jobs=1")) as service:
        name = new(service)
        answer = answer_to(
            service, name, "save_weights_for_sampler", {"sampling_session_seq_id": 0}
        )
        assert "there are 1 jobs" in answer["error"]
        assert not list((tmp_path / "jobs" / name / "samplers").iterdir())


def test_a_sampler_has_the_weights_that_it_was_made_of_or_none(tmp_path):
    """Another save under the same name does not replace it."""
    with Service(config_of(tmp_path, "jobs.max_loaded=1")) as service:
        name = new(service)
        ask, found = asker(service, name), []
        for number in range(2):
            for request in (LEARN, STEP, ("save_weights_for_sampler", {"path": "a"})):
                ask(*request)
            sampler = f"{name[:32]}:sample:{number}"
            service.create(sampler, source=f"{name}/sampler_weights/a")
            service.create(sampler, source=f"{name}/sampler_weights/a")  # the same name again
            with pytest.raises(Refused, match="or another source"):
                service.create(sampler, source=f"{name}/sampler_weights/b")
            asked = prompting([1, 2], 2, number, prompt_logprobs=True)
            found.append(ask("asample", asked)["prompt_logprobs"])
            if not number:
                service.remove_save(name, "sampler_weights/a")
                with pytest.raises(Refused, match="there is no save"):
                    service.create(f"{name[:32]}:sample:9", source=f"{name}/sampler_weights/a")
                left = tmp_path / "jobs" / name / "sampler_weights" / "a"
                # The files stay until a turn is over, because its worker may be writing there.
                assert list(left.iterdir())
                service.turn()
                assert not left.exists()
        assert found[0] != found[1]
        answer = answer_to(service, name, "asample", prompting([1], 2, 0, num_samples=2))
        assert "could not be restored" in answer["error"]
        assert ask("asample", asked)["prompt_logprobs"] == found[1]


def test_restart_does_not_need_the_loaded_save(tmp_path):
    """A service that is restarted after a load does not load a newer save of that name."""
    service = Service(config_of(tmp_path, "jobs.save_interval=99"))
    name = new(service)
    ask = asker(service, name)
    save, load = ("save_weights", {"path": "a", "overwrite": True}), ("load_weights", {"path": "a"})
    for request in (LEARN, STEP, save, LEARN, STEP, load, LEARN, STEP, save):
        ask(*request)
    expected = ask(*LOOK)
    service.release()  # as the kernel releases a lock
    with Service(config_of(tmp_path)) as service:
        assert asker(service, name)(*LOOK) == expected


def test_a_damaged_save_costs_its_own_job(service, tmp_path):
    name, other = new(service), new(service)
    asker(service, name)("save_weights", {"path": "a"})
    (tmp_path / "jobs" / name / "weights" / "a" / "save.json").write_text("{")
    load = {"path": f"tinker://{name}/weights/a", "optimizer": True}
    assert "save.json is damaged" in answer_to(service, other, "load_weights", load)["error"]
    asker(service, other)(*LEARN)
    assert service.find(name).status == "open"


def test_a_save_that_its_owner_removes_meanwhile_is_none(service, tmp_path, monkeypatch):
    """The run is undamaged; its next save checks the folder."""
    name = new(service)
    ask = asker(service, name)
    ask("save_weights", {"path": "a"})
    for file in (".DS_Store", "notes"):  # nor do files of others, or the service's own, break it
        (tmp_path / "jobs" / name / "weights" / file).touch()
    load = store.read_sealed

    def remove_first(folder, file, **fields):
        if folder.name == "a":
            (folder / file).unlink(missing_ok=True)
        return load(folder, file, **fields)

    monkeypatch.setattr(store, "read_sealed", remove_first)
    ask("save_weights", {"path": "b"})
    assert service.find(name).status == "open"
    assert list(service.find(name).saves) == ["weights/b"]


@pytest.mark.tier("long")
def test_many_answers_together_hold_no_more_than_one_may(tmp_path):
    """Each of their likeliest tokens takes some hundred bytes."""
    with Service(config_of(tmp_path, "jobs.max_request_mib=1")) as service:
        name = new(service)
        asker(service, name)("save_weights_for_sampler", {"sampling_session_seq_id": 0})
        body = prompting([1, 2], 60, topk_sample_logprobs=50, num_samples=6)
        sampler, body = target_of(name, "asample", body)
        for number in range(3):  # each has 18,000 of 32,768
            service.submit(sampler, "asample", body, number)
        for done in (1, 2, 3):
            service.turn()
            assert service.find(sampler).done == done


def test_a_message_of_nothing_takes_little_memory():
    message = wire.ForwardBackwardRequest()
    for _ in range(MOST_TEXTS + 9):
        message.data.add()
    assert len(body_of_pass(message)["data"]) == MOST_TEXTS + 1  # it is then refused


def test_nothing_of_a_job_is_left_in_the_cache(service):
    """Kernels read whole pages, and NaN times a weight of 0 is still NaN."""
    body = prompting(text_of(1, 30), 20, num_samples=4)
    answer_to(service, blown_up(service), "asample", body)
    caches = service.session.generator.steps.caches
    assert not all(cache.values_PZGv.isfinite().all() for cache in caches)
    other = f"{'cd' * 16}:sample:0"
    service.create(other)
    asker(service, other)("asample", body | {"num_samples": 1})
    for cache in caches:
        assert cache.values_PZGv.isfinite().all()
        assert cache.keys_PZGd.isfinite().all()
        assert cache.values_PZGv.any()


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        ("optim_step", rate(1.0) | {"a\nb": 1}, r"^'a\\nb' is not supported"),
        ("optim_step", rate(1.0) | {"a" * 10**6: 1}, r"^'a{50}.*' is not supported"),
        ("save_weights", {"path": "a\n"}, r"^path: String should match"),
        (
            "asample",
            prompting([1], 200, num_samples=1000, topk_sample_logprobs=50),
            "makes an answer larger than jobs.max_request_mib",
        ),
    ],
)
def test_bad_requests_are_refused_in_one_line(service, kind, body, says):
    name = f"{'ab' * 16}:train:0"
    for job in (name, f"{'ab' * 16}:sample:0"):
        service.create(job)
    with pytest.raises(Refused, match=says) as found:
        answer_to(service, name, kind, body)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 400


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("forward_backward", {"data": [{"tokens": ["a"] * 1000, "target_tokens": [1]}]}),
        ("forward_backward", {"data": ["a"] * 1000}),
        ("forward", {"data": [text([1, 2]) | {"weights": ["a"] * 1000}]}),
        ("forward_backward", {"data": [text([1, 2]) | {"advantages": ["a"] * 1000}]}),
        ("forward_backward", {"data": [text([1, 2]) | {"logprobs": ["a"] * 1000}]}),
        ("forward", {"data": [text([1, 2])] * 65_537}),
        (
            "forward",
            {"data": [text([1, 2])], "loss_fn_config": dict.fromkeys(map(str, range(99)), 0)},
        ),
        ("asample", {"prompt": {"chunks": [{"tokens": ["a"] * 1000}]}, "sampling_params": {}}),
        ("asample", {"prompt": {"chunks": ["a"] * 1000}, "sampling_params": {}}),
        ("optim_step", dict.fromkeys(map(str, range(1000)))),
        ("save_weights", {"path": "a", "user_metadata": dict.fromkeys(map(str, range(1000)), "")}),
        ("forward", {"data": [text([1, 2]) | dict.fromkeys(map(str, range(1000)))]}),
    ],
)
def test_a_bad_body_takes_no_more_memory_than_a_good_one(kind, body):
    with pytest.raises(ValidationError) as found:
        KINDS[kind].model_validate(body)
    assert found.value.error_count() <= 2


def test_ended_job_is_not_restored(tmp_path, monkeypatch):
    service = Service(config_of(tmp_path))
    name = new(service)
    for _ in range(10):
        asker(service, name)(*LEARN)
    service.release()  # as the kernel releases a lock
    with Service(config_of(tmp_path)) as service:
        waiting = service.answer(name, service.submit(name, *STEP))
        again, served = service.session.serve, []

        def end(number, *asked):
            served.append(number)
            if number == 3:
                service.end(name)
            return again(number, *asked)

        monkeypatch.setattr(service.session, "serve", end)
        assert service.turn()
        assert waiting.result(0) == {"error": "finished"}
        assert served == [0, 1, 2, 3]
        assert not service.turn()


def test_an_id_is_taken_until_its_job_is_gone(service):
    name = f"{'ab' * 16}:train:0"
    service.create(name)
    asker(service, name)(*LEARN)
    gone = service.delete(name)
    with pytest.raises(Refused, match="being deleted"):
        service.create(name)
    service.turn()
    gone.result(0)
    assert service.create(name, seed=1).accepted == 0
    asker(service, name)(*LEARN)


def test_deleted_job_is_gone_after_a_stop(tmp_path):
    with Service(config_of(tmp_path)) as service:
        name = new(service)
        gone = service.delete(name)
        gone.cancel()  # as a waiting client does when it disconnects
    assert not list((tmp_path / "jobs").iterdir())


@pytest.mark.tier("long")
def test_finish_leaves_nothing_wherever_the_service_is_killed(tmp_path, monkeypatch):
    """The kills come before its first, second, ... write or removal, until all are done."""
    with Service(config_of(tmp_path / "before")) as service:
        name, other = new(service), new(service)
        ask = asker(service, name)
        for path in ("kept", "gone"):
            ask("save_weights", {"path": path})
        ask("save_weights_for_sampler", {"sampling_session_seq_id": 0})

    def finish(service):
        if "weights/gone" in service.find(name).saves:
            service.remove_save(name, "weights/gone")
        for session in (other[:32], name[:32]):
            service.finish(session)

    length, is_over, deaths = 0, False, []
    while not is_over:
        folder, is_told = tmp_path / str(length), False
        shutil.copytree(tmp_path / "before", folder)
        service = Service(config_of(folder))
        with dying(monkeypatch, length):
            finish(service)
            is_told = True
            service.turn()
            is_over = True
        service.release()
        deaths.append(is_told)
        with Service(config_of(folder)) as service:
            if not is_told:  # then its client asks again
                finish(service)
                service.turn()
            assert [*service.jobs] == [name]
            assert [*service.jobs[name].saves] == ["weights/kept"]
        root = folder / "jobs"
        assert [path.name for path in root.iterdir()] == [name]
        assert not list((root / name / "samplers").iterdir())
        assert not (root / name / "weights" / "gone").exists()
        length += 1
    assert deaths.count(False) > 2
    assert deaths.count(True) > 5


@pytest.mark.parametrize("length", range(6))
def test_a_finished_run_goes_with_its_last_save_wherever_the_service_is_killed(
    length, tmp_path, monkeypatch
):
    with Service(config_of(tmp_path)) as service:
        name = new(service)
        asker(service, name)("save_weights", {"path": "last"})
        service.finish(name[:32])
        with dying(monkeypatch, length):
            service.remove_save(name, "weights/last")
            service.turn()
        service.removals.clear()  # so that the end does no removal
    with Service(config_of(tmp_path)) as service:
        if name in service.jobs:
            assert [*service.jobs[name].saves] == ["weights/last"]
        else:
            assert not list((tmp_path / "jobs").iterdir())


def test_a_full_disk_refuses_and_changes_nothing(service, tmp_path, monkeypatch):
    name, other = new(service), f"{'cd' * 16}:train:0"
    waiting = service.answer(name, service.submit(name, *LEARN))

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_durably", full)
        with pytest.raises(OSError, match="No space"):
            service.create(other)
        with pytest.raises(OSError, match="No space"):
            service.end(name)
        assert service.find(name).status == "open"
        with pytest.raises(Refused, match="there is no such job"):
            service.find(other)
    service.turn()
    assert "result" in waiting.result(0)
    waiting = service.answer(name, service.submit(name, *LEARN))
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_durably", full)
        gone = service.delete(name)
        assert waiting.result(0) == {"error": "finished"}
        service.turn()
        gone.result(0)
    assert not (tmp_path / "jobs" / name).exists()


def test_a_start_with_other_settings_costs_no_job(tmp_path):
    """Its requests since its last checkpoint do not fit there, and fit again later."""
    long = ("forward_backward", texts(text_of(5, 60)))
    with Service(config_of(tmp_path / "a")) as service:
        ask = asker(service, new(service))
        ask(*long)
        ask(*STEP)
        expected = ask(*LOOK)
    service = Service(config_of(tmp_path / "b"))
    name = new(service)
    asker(service, name)(*long)
    service.release()  # as the kernel releases a lock
    with Service(config_of(tmp_path / "b", "data.seq_len=32")) as service:
        waiting = service.answer(name, service.submit(name, *STEP))
        service.turn()
        assert "could not be restored" in waiting.result(0)["error"]
        assert service.find(name).status == "failed"
    with Service(config_of(tmp_path / "b")) as service:
        assert service.find(name).status == "open"
        while service.turn():
            pass
        assert asker(service, name)(*LOOK) == expected


def test_a_sampler_that_was_refused_has_no_checkpoint(tmp_path):
    """A checkpoint would hold the moments of the run before it."""
    sampler = f"{'ab' * 16}:sample:0"
    _, body = target_of(sampler, "asample", prompting([1, 2], 3, num_samples=4))
    with Service(config_of(tmp_path)) as service:
        service.create(sampler)
        service.submit(sampler, "asample", body, 0)
    with Service(config_of(tmp_path, "jobs.max_completions=2")) as service:
        service.turn()
        assert "ask in parts" in service.answer(sampler, 0).result(0)["error"]
    assert not list((tmp_path / "jobs" / sampler / "checkpoints").iterdir())


# ---- random orders -----------------------------------------------------------------------------


def program(seed):
    """Draw the requests of one job; most of them are valid."""
    draw, samplers = random.Random(seed), 0
    for _ in range(14):
        tokens = text_of(draw.randrange(1000), draw.randrange(2, 40))
        kind = draw.choice(("cross_entropy", "ppo", "step", "step", "sample", "look", "save"))
        if kind == "step":
            yield "optim_step", rate(draw.choice((1e-3, 1e-2, 1e4)))
        elif kind == "sample":
            yield "save_weights_for_sampler", {"sampling_session_seq_id": samplers}
            yield "asample", prompting(tokens, 5, samplers, num_samples=2, topk_sample_logprobs=2)
            samplers += 1
        elif kind == "look":
            yield "forward", texts(tokens)
        elif kind == "save":
            kind = draw.choice(("save_weights", "save_weights", "load_weights"))
            more = {"overwrite": draw.random() < 0.5} if kind == "save_weights" else {}
            yield kind, {"path": draw.choice("ab"), **more}
        else:
            count = len(tokens) - 1
            policy = {"advantages": [draw.uniform(-1, 1)] * count, "logprobs": [-3.0] * count}
            datum = text(tokens, **(policy if kind == "ppo" else {}))
            yield "forward_backward", {"data": [datum] * draw.randrange(1, 4), "loss_fn": kind}
    yield "load_weights", {"path": "none"}


@pytest.mark.tier("wide", long=["2"])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_anything_is_each_jobs_own(tmp_path, seed):
    draw = random.Random(1000 + seed)
    seeds = [10 * seed + i for i in range(5)]
    alone = {}
    for one in seeds:
        with Service(config_of(tmp_path / f"alone-{one}")) as service:
            name = new(service, one)
            alone[one] = [answer_to(service, name, *request) for request in program(one)]
    assert any("error" in answer for answers in alone.values() for answer in answers)
    names, found = {one: f"{one:032x}:train:0" for one in seeds}, {one: [] for one in seeds}
    left = {one: list(program(one)) for one in seeds}
    while any(left.values()):
        words = (
            f"jobs.max_loaded={draw.randrange(1, 6)}",
            f"jobs.max_resident={draw.randrange(1, 4)}",
            f"jobs.save_interval={draw.choice((1, 4, 99))}",
        )
        service = Service(config_of(tmp_path / "all", *words))
        for one in seeds:
            service.create(names[one], one)
        for _ in range(draw.randrange(5, 40)):
            if not (live := [one for one in seeds if left[one]]):
                break
            one = draw.choice(live)
            request = left[one].pop(0)
            kinds = [kind for kind, _ in program(one)][: len(found[one])]
            number = 0 if request[0] == "asample" else len(kinds) - kinds.count("asample")
            found[one].append(answer_to(service, names[one], *request, number))
        if draw.random() < 0.5:
            service.close()
        else:
            service.release()
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


FORMS = ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain"]
"""Content types that a browser sends to another site without asking it first."""


@pytest.mark.parametrize("kind", [*FORMS, "text/plain; application/json", "text/json", ""])
def test_service_refuses_json_under_another_content_type(served, kind):
    status, body = send(served, "POST", "create_session", b"{}", None, kind)
    said = f"the content-type is {kind.partition(';')[0]!r}, not application/json"
    assert (status, json.loads(body)["error"]) == (415, said)
    assert send(served, "POST", "create_session", b"{}", None)[0] == 200  # the type alone is wrong


class Confined(Process):
    """A service that may have 200 open files."""

    def start(self):
        command = [sys.executable, "-m", "moetrain.jobs", *self.words]
        confined = ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(confined, env=environment, stdout=subprocess.DEVNULL)


@pytest.mark.tier("wide")
def test_connections_do_not_take_the_files_that_jobs_need(tmp_path):
    one, idle = Confined(tmp_path / "out"), []
    try:
        one.wait()
        for _ in range(300):
            idle.append(socket.create_connection(("127.0.0.1", one.port), timeout=10))
        name = one.client.create()
        for kind, body in (LEARN, STEP):
            one.client.ask(name, kind, body)
        for connection in idle:
            connection.close()
        one.client.call("GET", f"training_runs/{name}")
    finally:
        one.kill()
