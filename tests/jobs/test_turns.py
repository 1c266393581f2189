"""Turns begin before earlier ones are finished, and nothing is lost by that."""

import errno
import threading
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file

from moetrain.checkpoint.read import list_checkpoints, step_of
from moetrain.jobs import scheduler
from moetrain.jobs.scheduler import Service
from moetrain.jobs.store import Job
from tests.lib.job_services import config_of, file_of, new, texts
from tests.lib.tenants import WORDS, Passes, body_of, program, run, serve_all, without_id
from tests.lib.turns import (
    LEARN,
    RESIDENT,
    SELDOM,
    STEP,
    TENANTS,
    Slow,
    _Mark,
    answers_of,
    serve,
    slow,
    submit_all,
)


def assert_same(one, other, is_shared):
    """Assert that two answers are equal; answers of a shared pass may differ by rounding."""
    if isinstance(one, float) and is_shared:
        assert one == pytest.approx(other, rel=1e-6)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key], is_shared)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair, is_shared)
    else:
        assert one == other


def test_turns_are_begun_before_those_before_them_are_finished(tmp_path):
    with slow(tmp_path, *RESIDENT, SELDOM) as (service, device):
        name = new(service)
        answers_of(service, [(name, LEARN), (name, STEP)])
        device.log.clear()
        for future in submit_all(service, [(name, LEARN), (name, STEP)] * 2):
            device.told(future)
        for _ in range(4):
            assert service.turn()
        log = [entry for entry in device.log if entry != "told"]
        assert log == ["begun"] * 3 + ["computed", "begun", "computed"]
        serve(service)
        told = [device.log[:i] for i, entry in enumerate(device.log) if entry == "told"]
        assert len(told) == 4
        assert all(log.count("computed") > i for i, log in enumerate(told))


def test_turns_that_jobs_share_are_begun_early_too(tmp_path):
    with slow(tmp_path, *TENANTS) as (service, device):
        names = [new(service, seed) for seed in range(3)]
        answers_of(service, [(name, LEARN) for name in names])
        device.log.clear()
        submit_all(service, [(name, x) for x in (STEP, LEARN, STEP) for name in names])
        for _ in range(3):
            assert service.turn()
        assert device.log == ["begun"] * 3 + ["computed"]


def test_scheduler_waits_for_previous_group_while_device_is_busy(tmp_path):
    with slow(tmp_path, *TENANTS, SELDOM) as (service, device):
        names = [new(service, seed) for seed in range(3)]
        answers_of(service, [(name, LEARN) for name in names])
        device.log.clear()
        submit_all(service, [(name, STEP) for name in names])
        assert service.turn()
        submit_all(service, [(name, LEARN) for name in names[:2]])
        for _ in range(3):
            assert service.turn()
        assert device.log == ["begun"]
        submit_all(service, [(names[2], LEARN)])
        assert service.turn()
        assert device.log == ["begun"] * 2
        submit_all(service, [(name, STEP) for name in names[:2]])
        while service.find(names[0]).done < 4:  # the wait is bounded
            assert service.turn()
        assert {service.find(name).begun for name in names} == {3, 4}


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_a_pass_waits_a_little_for_those_that_shared_the_one_before(
    tmp_path, patience, monkeypatch
):
    """The wait is bounded by the time of launching that pass."""
    monkeypatch.setattr(scheduler, "LONGEST_WAIT", 60.0)
    with Service(config_of(tmp_path, *TENANTS, SELDOM)) as service:
        names, passes = [new(service, seed) for seed in range(3)], Passes(service)
        answers_of(service, [(name, LEARN) for name in names])
        assert 0 < service.pass_seconds < 60
        service.pass_seconds = patience
        first = submit_all(service, [(name, LEARN) for name in names[:2]])
        for _ in range(4):
            assert service.turn() or first[1].done()
        last = submit_all(service, [(names[2], LEARN)])
        serve(service)
        assert all("result" in future.result(0) for future in first + last)
        assert passes.tenants == ([3, 3] if patience else [3, 2, 1])


def test_jobs_on_the_device_share_turns_as_they_lie(tmp_path):
    """No state is swapped for that, and the most recently served jobs stay resident."""
    with Service(config_of(tmp_path, *TENANTS, SELDOM)) as service:
        *names, other, last = [new(service, seed) for seed in range(5)]
        answers_of(service, [(name, LEARN) for name in names])
        answers_of(service, [(other, LEARN)])
        session, activated = service.session, []
        activate = session.activate
        session.activate = lambda *who: (activated.append(who[0]), activate(*who))[1]
        found = answers_of(service, [(x, r) for r in (STEP, LEARN) for x in names])
        assert all("result" in answer for answer in found)
        assert not activated
        answers_of(service, [(last, LEARN)])
        assert [name for name in [*names, other] if not session.resident(name)] == [other]


def test_updates_go_first_so_that_jobs_a_request_apart_share_a_pass_again(tmp_path):
    with Service(config_of(tmp_path, *TENANTS, SELDOM)) as service:
        names, passes = [new(service, seed) for seed in range(2)], Passes(service)
        answers_of(service, [(names[0], LEARN)])
        submit_all(service, [(names[1], LEARN), (names[0], STEP), (names[0], LEARN)])
        serve(service)
        assert passes.tenants == [1, 2]
        assert [service.find(name).done for name in names] == [3, 1]


def test_updates_without_a_pass_before_them_do_not_go_first(tmp_path):
    with Service(config_of(tmp_path, *TENANTS, SELDOM)) as service:
        names = [new(service, seed) for seed in range(2)]
        submit_all(service, [(names[0], LEARN)] + [(names[0], STEP)] * 3)
        assert service.turn()
        submit_all(service, [(names[1], LEARN)])
        assert service.turn()
        assert service.turn()
        assert [service.find(name).begun for name in names] == [2, 1]
        serve(service)
        assert [service.find(name).done for name in names] == [4, 1]


def test_answers_are_written_while_the_next_turns_are_begun(tmp_path, monkeypatch):
    """They are written in order, and before a save."""
    may_write, answer, written = threading.Event(), Job.answer, []

    def slowly(job, number, given):
        assert may_write.wait(60)
        written.append(number)
        answer(job, number, given)

    monkeypatch.setattr(Job, "answer", slowly)
    with slow(tmp_path, *RESIDENT, SELDOM) as (service, device):
        name = new(service)
        may_write.set()
        answers_of(service, [(name, LEARN), (name, STEP)])
        may_write.clear()
        device.log.clear()
        futures = submit_all(service, [(name, x) for x in (LEARN, STEP, LEARN, STEP)])
        assert service.turn()
        service.unfinished[0].mark.computed.set()
        assert service.turn()
        assert device.log == ["begun"] * 2
        assert not futures[0].done()
        may_write.set()
        serve(service)
        assert all("result" in future.result(0) for future in futures)
        submit_all(service, [(name, LEARN), (name, STEP), (name, ("save_weights", {"path": "a"}))])
        serve(service)
        assert list(service.find(name).saves) == ["weights/a"]
    assert written == [*range(9)]


def test_a_request_that_none_follows_is_answered_when_it_is_computed(tmp_path):
    with Service(config_of(tmp_path, *RESIDENT)) as service:
        name, device = new(service), Slow(service, turns=4)
        answers_of(service, [(name, LEARN)])
        for request in (LEARN, STEP):
            (future,) = submit_all(service, [(name, request)])
            turns, computed = 0, device.log.count("computed")
            while not future.done():
                assert service.turn()
                service.wait(0 if future.done() else 100)  # this returns earlier
                turns += device.log.count("computed") == computed
            assert 2 < turns < 9
            assert "result" in future.result(0)
        serve(service)
        assert not service.unfinished


def results_of(folder, *words, lives=None, seeds=range(3)):
    """Return results and adapters of jobs that submit everything at once, to a slow device.

    With ``lives`` the service is killed after each of these numbers of turns.
    """
    names, more, done = [f"{seed:032x}:train:0" for seed in seeds], {}, False
    while not done:
        service = Service(config_of(folder, *words))
        device = Slow(service)
        for seed, name in zip(seeds, names, strict=True):
            service.create(name, seed)
            requests = [*program(seed)]
            for number, request in enumerate(requests):
                service.submit(name, *request, number)
                more[name, number] = service.answer(name, number)
        turns = 0
        while (lives is None or turns < lives) and service.turn():
            turns += 1
        done = lives is None or turns < lives
        if done:
            service.close()
        device.die()
        service.release()
    found = [more[name, number].result(0) for number in range(9) for name in names]
    with Service(config_of(folder, *words)) as service:
        kept = [service.answer(name, n).result(0) for n in range(9) for name in names]
    assert [x["result"] for x in kept] == [x["result"] for x in found]
    results = [without_id(x["result"], names[i % 3]) for i, x in enumerate(found)]
    return results, [load_file(file_of(folder, name)) for name in names]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return results and adapters of jobs that ask for one request at a time."""
    return run(tmp_path_factory.mktemp("alone"), range(3), one_by_one=True)[:2]


@pytest.mark.tier("wide", long=["resident", "together"])
@pytest.mark.parametrize(
    ("words", "lives"),
    [
        (TENANTS, None),
        (TENANTS, 4),
        (RESIDENT, None),
        ([*RESIDENT, "jobs.save_interval=1"], 9),
        ([*WORDS, "jobs.max_loaded=1", SELDOM], 11),
    ],
    ids=["together", "together-killed", "resident", "saved-killed", "put away-killed"],
)
def test_requests_submitted_ahead_have_the_bits_of_single_requests(tmp_path, alone, words, lives):
    """The service may also be killed repeatedly between the begin and the end of turns."""
    found, mine = results_of(tmp_path, *words, lives=lives)
    assert found == alone[0]
    for one, other in zip(mine, alone[1], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def checked_saves(session):
    """Collect the jobs that are saved, and check that all their requests have answers then."""
    write, saved = session.write, []

    def check(folder, *kinds):
        assert len([*(session.now.folder / "answers").iterdir()]) == session.now.seen
        saved.append(session.now.folder.name)
        write(folder, *kinds)

    session.write = check
    return saved


def test_jobs_that_give_way_are_saved_with_answers(tmp_path):
    words = [*TENANTS, "jobs.max_resident=3", "jobs.max_loaded=1", SELDOM]
    with slow(tmp_path, *words) as (service, _):
        names = [new(service, seed) for seed in range(6)]
        answers_of(service, [(x, r) for r in (LEARN, STEP) for x in names[3:]])
        answers_of(service, [(x, LEARN) for x in names[:3]])
        submit_all(service, [(x, STEP) for x in names[:3]])
        assert service.turn()
        assert {service.find(x).done for x in names[:3]} == {1}
        saved = checked_saves(service.session)
        assert all("result" in x for x in answers_of(service, [(x, LEARN) for x in names[3:]]))
        assert {*saved} & {*names[:3]}


@pytest.mark.tier("long")
@pytest.mark.parametrize("words", [TENANTS, RESIDENT], ids=["together", "alone"])
def test_saves_come_between_turns_and_have_seen_only_what_is_answered(tmp_path, words):
    """A client always has a next request, and jobs share all turns."""
    with slow(tmp_path, *words) as (service, _):
        names, session = [new(service, seed) for seed in range(3)], service.session
        saved = checked_saves(session)
        submit_all(service, [(x, r) for r in [LEARN, STEP] * 4 for x in names])
        for _ in range(6 if words is TENANTS else 18):
            assert service.turn()
            assert all(service.find(name).has_work for name in names)
        assert {*saved} == {*names}
        saved.clear()
        save = ("save_weights", {"path": "a"})
        found = answers_of(service, [(x, r) for r in [LEARN, STEP, save] for x in names])
        assert all("result" in answer for answer in found)
        assert {*saved} == {*names}


@pytest.mark.tier("long")
@pytest.mark.parametrize("words", [TENANTS, RESIDENT], ids=["together", "alone"])
def test_a_request_that_fails_costs_its_job_alone(tmp_path, words, monkeypatch):
    """Two requests are begun before it, and others wait behind it."""
    found = []
    for ahead in (False, True):
        with slow(tmp_path / str(ahead), *words) as (service, _):
            names, engine = [new(service, seed) for seed in range(3)], service.session.engine
            learn = engine.forward_backward

            def fail(batches, loss, learn=learn):
                if any((batch.tokens_BS == 49).any() for batch in batches):
                    raise ZeroDivisionError
                return learn(batches, loss)

            engine.forward_backward = fail
            bad = ("forward_backward", texts([49, 49, 49]))
            plans = [[LEARN, STEP, LEARN, STEP, LEARN] for _ in names]
            plans[1][2] = bad
            requests = [
                (x, plan[i]) for i in range(5) for x, plan in zip(names, plans, strict=True)
            ]
            if ahead:
                found.append(answers_of(service, requests))
            else:
                found.append([answers_of(service, [request])[0] for request in requests])
    assert_same(*found, is_shared=words is TENANTS)
    errors = [answer.get("error", "") for answer in found[0]]
    assert [i for i, error in enumerate(errors) if error] == [7, 10]
    assert "ZeroDivisionError" in errors[7]
    assert "no forward_backward" in errors[10]


@pytest.mark.tier("wide", long=["together"])
@pytest.mark.parametrize("words", [TENANTS, RESIDENT], ids=["together", "alone"])
def test_a_disk_that_is_full_leaves_no_checkpoint_of_what_has_no_answer(
    tmp_path, words, monkeypatch
):
    answer, told = Job.answer, []

    def full(job, number, given):
        if number == 2 and job.id == names[1]:
            raise OSError(errno.ENOSPC, "No space left on device")
        answer(job, number, given)

    with slow(tmp_path / "all", *words) as (service, _):
        names = [new(service, seed) for seed in range(3)]
        answers_of(service, [(x, r) for r in (LEARN, STEP) for x in names])
        monkeypatch.setattr(Job, "answer", full)
        told = submit_all(service, [(x, r) for r in [LEARN, STEP] * 2 for x in names])
        with pytest.raises(OSError, match="No space"):
            serve(service)
        monkeypatch.undo()
    for name, future in zip(names * 4, told, strict=True):
        answers = {int(x.stem) for x in (tmp_path / "all/jobs" / name / "answers").iterdir()}
        kept = list_checkpoints(tmp_path / "all/jobs" / name / "checkpoints")
        assert all((step_of(x) or 0) <= len(answers) for x in kept)
        assert future.done()
    assert told[1].result(0)["error"] == service.STOPPED
    with Service(config_of(tmp_path / "all", *words)) as service:
        serve(service)
        found = [service.answer(x, i + 2).result(0) for i in range(4) for x in names]
    with Service(config_of(tmp_path / "alone", *words)) as service:
        names = [new(service, seed) for seed in range(3)]
        requests = [(x, r) for r in [LEARN, STEP] * 3 for x in names]
        alone = [answers_of(service, [request])[0] for request in requests]
    results = [[answer["result"] for answer in answers] for answers in (found, alone[6:])]
    assert_same(*results, is_shared=words is TENANTS)


def test_a_device_that_fails_ends_the_service_and_loses_nothing(tmp_path, monkeypatch):
    def fail(_):
        raise RuntimeError("CUDA error: an illegal memory access")

    with suppress(Exception), slow(tmp_path, *RESIDENT) as (service, _):
        name = new(service)
        monkeypatch.setattr(_Mark, "read", fail)
        futures = submit_all(service, [(name, LEARN), (name, STEP)] * 2)
        with pytest.raises(Exception, match="the device has failed"):
            serve(service)
        assert not any(future.done() for future in futures)
        monkeypatch.undo()
    with Service(config_of(tmp_path, *RESIDENT)) as service:
        assert service.find(name).done == 0
        serve(service)
        assert all("result" in service.answer(name, i).result(0) for i in range(4))


def test_jobs_that_go_while_their_turns_are_unfinished(tmp_path):
    with slow(tmp_path, *TENANTS) as (service, _):
        names = [new(service, seed) for seed in range(3)]
        answers_of(service, [(name, LEARN) for name in names])
        futures = submit_all(service, [(x, r) for r in [STEP, LEARN] for x in names])
        assert service.turn()
        assert not futures[0].done()
        gone = service.delete(names[0])
        service.end(names[1])
        serve(service)
        assert gone.done()
        assert not (tmp_path / "jobs" / names[0]).exists()
        assert "finished" in futures[1].result(0)["error"]
        assert "result" in futures[5].result(0)
        (answer,) = serve_all(service, names[2:], [("forward", body_of(1))])
        assert answer


def test_a_service_that_is_closed_keeps_what_it_has_begun(tmp_path):
    with slow(tmp_path, *RESIDENT) as (service, _):
        name = new(service)
        answers_of(service, [(name, LEARN)])
        submit_all(service, [(name, STEP)])
        assert service.turn()
        assert service.find(name).done == 1
    with Service(config_of(tmp_path, *RESIDENT)) as service:
        assert service.find(name).done == 2
        kept = list_checkpoints(tmp_path / "jobs" / name / "checkpoints")
        assert [step_of(x) for x in kept] == [2]
