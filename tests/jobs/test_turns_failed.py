"""Turns that fail while others are unfinished: which job gets the error, and what is left."""

import errno
import gc
import threading
import weakref
from contextlib import suppress
from functools import partial

import pytest
import torch

from moetrain.jobs.api import Refused
from moetrain.jobs.scheduler import Service
from moetrain.jobs.store import Job
from tests.lib.job_services import config_of, new, prompting, text_of, texts
from tests.lib.turns import (
    LEARN,
    RESIDENT,
    SELDOM,
    STEP,
    TENANTS,
    answers_of,
    serve,
    slow,
    submit_all,
)


def failing(service, error):
    """Let the results of passes over :data:`BAD` raise ``error`` when the device is done."""
    session = service.session
    queue = session.queue_pass

    def fail(jobs, requests):
        def result(late):
            if any(49 in datum.tokens[:1] for r in requests for datum in r.data):
                raise error
            return late()

        return [partial(result, late) for late in queue(jobs, requests)]

    session.queue_pass = fail


BAD = ("forward_backward", texts([49, 49, 49]))


def test_a_turn_that_cannot_be_finished_ends_the_service_whoever_is_next(tmp_path):
    """This also holds if that job is to be saved, which waits for the turns of others."""
    words = [*RESIDENT, "jobs.save_interval=3"]
    with suppress(TypeError), slow(tmp_path, *words) as (service, _):
        names = [new(service, seed) for seed in range(2)]
        failing(service, TypeError("of the first job"))
        plans = [LEARN, STEP, LEARN, STEP, BAD, STEP], [LEARN, STEP] * 3
        futures = submit_all(
            service,
            [(x, r) for pair in zip(*plans, strict=True) for x, r in zip(names, pair, strict=True)],
        )
        with pytest.raises(TypeError, match="of the first job"):
            serve(service)
        assert [service.find(name).status for name in names] == ["open"] * 2
        assert service.find(names[0]).done == 4
        assert not futures[8].done()
    assert all(future.done() for future in futures)
    assert futures[8].result(0)["error"] == Service.STOPPED
    with Service(config_of(tmp_path, *words)) as service:
        assert [service.find(name).status for name in names] == ["open"] * 2
        serve(service)
        found = [service.answer(x, i).result(0) for i in range(6) for x in names]
        assert all("result" in answer for answer in found)


def test_turns_behind_one_that_failed_are_not_answered(tmp_path, monkeypatch):
    """No answer gets its number, even if the disk has room again."""
    answer, failed = Job.answer, []

    def full_once(job, number, given):
        if not failed:
            failed.append(number)
            raise OSError(errno.ENOSPC, "No space left on device")
        answer(job, number, given)

    with suppress(OSError), slow(tmp_path, *RESIDENT, SELDOM) as (service, _):
        name = new(service)
        answers_of(service, [(name, LEARN)])
        monkeypatch.setattr(Job, "answer", full_once)
        futures = submit_all(service, [(name, STEP), (name, LEARN), (name, STEP)])
        assert service.turn()
        assert service.turn()
        for turn in service.unfinished:
            turn.mark.computed.set()
        with pytest.raises(OSError, match="No space"):
            serve(service)
    assert failed == [1]
    assert [x.name for x in (tmp_path / "jobs" / name / "answers").iterdir()] == ["00000000.json"]
    assert [future.result(0)["error"] for future in futures] == [Service.STOPPED] * 3
    with Service(config_of(tmp_path, *RESIDENT)) as service:
        serve(service)
        found = [service.answer(name, i).result(0)["result"] for i in range(4)]
    assert [[*result] for result in found] == [["logprobs", "loss"], ["metrics"]] * 2


def test_a_turn_that_fails_for_one_job_is_over_when_all_others_are_told(tmp_path, monkeypatch):
    answer, goes_on = Job.answer, threading.Event()

    def full(job, number, given):
        if job.id == names[0]:
            threading.Timer(0.2, goes_on.set).start()
            raise OSError(errno.ENOSPC, "No space left on device")
        assert goes_on.wait(60)
        answer(job, number, given)

    with slow(tmp_path, *TENANTS, SELDOM) as (service, _):
        names = [new(service, seed) for seed in range(3)]
        answers_of(service, [(name, LEARN) for name in names])
        monkeypatch.setattr(Job, "answer", full)
        futures = submit_all(service, [(name, STEP) for name in names])
        with pytest.raises(OSError, match="No space"):
            serve(service)
        assert [service.find(name).done for name in names] == [1, 2, 2]
        assert [future.done() for future in futures] == [False, True, True]


def test_a_damaged_request_leaves_answers_to_those_before_it(tmp_path):
    with slow(tmp_path, *RESIDENT, SELDOM) as (service, _):
        name = new(service)
        answers_of(service, [(name, LEARN)])
        futures = submit_all(service, [(name, STEP), (name, LEARN), (name, STEP)])
        (service.find(name).folder / "requests/00000003.json").write_bytes(b"{}")
        del service.find(name).pending[3]  # as after a restart: it is read from the disk
        serve(service)
        assert all("result" in future.result(0) for future in futures[:2])
        assert "damaged" in futures[2].result(0)["error"]


def test_a_sampler_that_is_not_answered_yet_gives_no_room(tmp_path, monkeypatch):
    answer, problems = Job.answer, []

    def slowly(job, number, given):
        with pytest.raises(Refused, match="at work") as refused:
            service.create(f"{session}:sample:1")
        problems.append(refused.value)
        answer(job, number, given)

    with Service(config_of(tmp_path, *RESIDENT, "jobs.max_saves=1")) as service:
        session = "0" * 32
        name = service.create(f"{session}:sample:0").id
        monkeypatch.setattr(Job, "answer", slowly)
        asked = prompting(text_of(1))
        del asked["sampler"]
        assert "result" in answers_of(service, [(name, ("asample", asked))])[0]
        assert problems
        service.create(f"{session}:sample:1")
        assert name not in service.jobs


def test_files_are_removed_while_no_client_looks_whether_they_are_there(tmp_path, monkeypatch):
    prune, found = Job.prune, []

    def note(job, seen):
        found.append((job.is_sampler, job.adding.locked()))
        prune(job, seen)

    monkeypatch.setattr(Job, "prune", note)
    with Service(config_of(tmp_path, *RESIDENT, "jobs.save_interval=1")) as service:
        name = service.create(f"{0:032x}:sample:0").id
        asked = prompting(text_of(1))
        del asked["sampler"]
        answers_of(service, [(name, ("asample", asked))])
        name = new(service)
        answers_of(service, [(name, LEARN), (name, STEP)])
    assert {*found} == {(True, True), (False, True)}


def test_a_sampler_for_which_the_disk_has_no_room_costs_its_run_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    words = [*RESIDENT, SELDOM]
    with suppress(OSError), Service(config_of(tmp_path, *words)) as service:
        name = new(service)
        answers_of(service, [(name, LEARN), (name, STEP)])
        monkeypatch.setattr(Job, "create", full)
        save = ("save_weights_for_sampler", {"sampling_session_seq_id": 0})
        submit_all(service, [(name, save)])
        with pytest.raises(OSError, match="No space"):
            serve(service)
    monkeypatch.undo()
    with Service(config_of(tmp_path, *words)) as service:
        serve(service)
        assert "result" in service.answer(name, 2).result(0)


@pytest.mark.parametrize("words", [TENANTS, RESIDENT], ids=["together", "alone"])
def test_a_pass_that_fails_leaves_no_memory_to_the_collector(tmp_path, words):
    """The collector would free it a minute later, and a full device would stay full until then."""
    made = []

    def fail(batches, loss):
        tensor = torch.zeros(3)
        made.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("no room")

    with Service(config_of(tmp_path, *words)) as service:
        names = [new(service, seed) for seed in range(2)]
        service.session.engine.forward_backward = fail
        gc.disable()
        try:
            found = answers_of(service, [(name, LEARN) for name in names])
            left = [one() for one in made]
        finally:
            gc.enable()
    assert all("no room" in answer["error"] for answer in found)
    assert len(left) == (3 if words is TENANTS else 2)
    assert not any(one is not None for one in left)


def test_an_error_that_is_no_text_is_answered(tmp_path):
    with Service(config_of(tmp_path, *RESIDENT)) as service:
        name = new(service)

        def fail(*_):
            raise ValueError("of \ud800")

        service.session.queue_pass = fail
        (answer,) = answers_of(service, [(name, LEARN)])
        assert answer["error"] == "of ?"
    with Service(config_of(tmp_path, *RESIDENT)) as service:
        assert service.answer(name, 0).result(0)["error"] == answer["error"]
