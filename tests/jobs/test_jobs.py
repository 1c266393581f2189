"""The job service: every job's results have the same bits as alone, whatever runs beside it."""

import hashlib
import json
import time

import pytest
import torch

from moetrain.config import ConfigError
from moetrain.config.sources import RunFailed
from moetrain.generate.engine import Generator
from moetrain.jobs import store
from moetrain.jobs.api import ForwardBackward, Refused
from moetrain.jobs.losses import ClientLoss, JobsObjective
from moetrain.jobs.scheduler import Service
from moetrain.optim.adamw import AdamW
from moetrain.parallel.world import join_world
from moetrain.train.engine import Engine
from moetrain.train.samples import pack
from moetrain.train.session import resolve_run
from tests.lib.deaths import dying
from tests.lib.job_services import (
    Course,
    adapter_of,
    answer_to,
    asker,
    compiled,
    config_of,
    copies_to_host,
    new,
    prompting,
    rate,
    run_alone,
    supervised,
    target_of,
    text,
    text_of,
    texts,
)

__all__ = ["compiled"]  # a fixture


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return ``alone(seed)``: a cached :func:`run_alone`."""
    known = {}

    def find(seed):
        if seed not in known:
            known[seed] = run_alone(tmp_path_factory.mktemp("alone"), seed)
        return known[seed]

    return find


RESIDENT = ["jobs.max_resident=3", "jobs.max_loaded=1"]


@pytest.mark.tier("wide", long=["host"])
@pytest.mark.parametrize("words", [(), RESIDENT], ids=["host", "device"])
def test_jobs_beside_each_other_have_the_bits_they_have_alone(tmp_path, alone, words):
    with Service(config_of(tmp_path, *words)) as service:
        names = [new(service, seed) for seed in range(5)]
        courses = [Course(seed, asker(service, names[seed])) for seed in range(5)]
        live = list(courses)
        while live:
            live = [course for course in live if course.go_on()]
    for seed, course in enumerate(courses):
        assert (course.results, adapter_of(tmp_path, names[seed])) == alone(seed)
    assert len({adapter_of(tmp_path, name) for name in names}) == 5


@pytest.mark.tier("long")
def test_all_jobs_use_the_memory_of_one_engine(tmp_path):
    with Service(config_of(tmp_path)) as service:
        engine, model = service.session.engine, service.session.generator.model

        def addresses():
            parts = [p.tensor for group in engine.state().values() for p in group.values()]
            tensors = [*parts, *model.parameters(), *engine.optimizer.param_groups[0]["params"]]
            return [(id(x.untyped_storage()), x.data_ptr()) for x in tensors]

        before = addresses()
        courses = [Course(s, asker(service, new(service, s))) for s in range(6)]
        while courses:
            courses = [course for course in courses if course.go_on()]
        assert [pointer for _, pointer in addresses()] == [pointer for _, pointer in before]
        # One copy of the base model serves all jobs.
        frozen = {n: m.local for n, m in engine.fsdp.members.items() if not m.rule.trainable}
        assert frozen
        for name, local in frozen.items():
            assert model.get_parameter(name).data_ptr() == local.data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jobs_with_room_on_the_device_are_never_copied(tmp_path, monkeypatch, dtype):
    """A resident job is not copied when another is loaded; all states are saved at the end."""
    copied = copies_to_host(monkeypatch)
    words = [f"train.dtype={dtype}"]
    with Service(config_of(tmp_path, "jobs.max_resident=3", *words)) as service:
        engine = service.session.engine
        names = [new(service, seed) for seed in range(4)]
        asks = [asker(service, name) for name in names]
        for turn in range(3):
            for ask in asks[:3]:
                ask("forward_backward", texts(text_of(turn)))
                ask("forward", texts(text_of(turn)))
        places = {b.shard_N.data_ptr() for b in engine.fsdp.buckets if b.is_trained}
        held = service.session.held.values()
        assert len(held) == 2
        assert not places & {x.data_ptr() for one in held for x in one.tensors.values()}
        assert not copied
        asks[3]("forward", texts([1, 2]))
        assert copied
        assert service.session.held[names[0]].place == "host"  # it is the least recently served
        copied.clear()
        for ask in asks[1:3]:
            ask("optim_step", rate(1e-2))
        assert not copied
        asks[0]("optim_step", rate(1e-2))
        assert copied
        del asks[1], names[1]
        found = [ask("forward", texts([3, 4, 5])) for ask in asks]
        service.delete(names[2])
        new(service, 4)
        service.turn()
        assert len(engine.free) == 1
    with Service(config_of(tmp_path, *words)) as service:
        again = [asker(service, name)("forward", texts([3, 4, 5])) for name in names[:2]]
    assert again == found[:2]


@pytest.mark.tier("wide")
def test_compiled_blocks_serve_all_jobs(tmp_path, alone, compiled):
    words = ["compile.enabled=yes", "jobs.max_loaded=1"]
    with Service(config_of(tmp_path, *words)) as service:
        names, courses, counts = {}, {}, []
        for seed in (0, 1, 2, 5):
            names[seed] = new(service, seed)
            courses[seed] = Course(seed, asker(service, names[seed]))
        for pair in ((0, 1), (2, 5)):  # two kinds of jobs each
            live = [courses[seed] for seed in pair]
            while live:
                live = [course for course in live if course.go_on()]
            counts.append(compiled.frame_count)
    assert counts[0] == counts[1] > 0
    for seed, course in courses.items():
        (results, adapter), mine = run_alone(tmp_path / f"{seed}", seed, *words), course.results
        assert (mine, adapter_of(tmp_path, names[seed])) == (results, adapter)
        for one, plain in zip(mine, alone(seed)[0], strict=True):
            if "loss" in one:
                assert one["loss"] == pytest.approx(plain["loss"], rel=1e-4)
            if "metrics" in one:
                assert one["metrics"] == pytest.approx(plain["metrics"], rel=1e-4)


def test_a_job_is_an_engine_of_its_own(tmp_path):
    """The reference makes the same steps with an engine that knows no jobs."""
    config = config_of(tmp_path, "train.seed=3")
    with Service(config) as service:
        name = new(service, 3)
        course = Course(3, asker(service, name))
        course.requests = supervised(3)
        course.next = next(course.requests)
        while course.go_on():
            pass
    config, arch = resolve_run(config)
    engine = Engine(config, arch, join_world(config, arch))
    engine.optimizer.settings = engine.optimizer.settings._replace(beta2=0.95, eps=1e-12)
    change = {"weight_decay": 0.0, "max_grad_norm": float("inf")}
    engine.optimizer.config = engine.optimizer.config.model_copy(update=change)
    losses = []
    for kind, body in list(supervised(3))[:-2]:
        if kind == "optim_step":
            engine.step(body["adam_params"]["learning_rate"])
            continue
        request = ForwardBackward.model_validate(body)
        batches = pack([datum.sample(0) for datum in request.data], 64, 1)
        objective = JobsObjective([ClientLoss.of("cross_entropy", {})])
        totals = engine.forward_backward(batches, objective)
        losses.append(totals.total.item())
    assert losses == [r["loss"] for r in course.results if "loss" in r][:-1]
    engine.save_peft(tmp_path / "by hand")
    mine = (tmp_path / "by hand" / "adapter_model.safetensors").read_bytes()
    assert hashlib.sha256(mine).hexdigest() == adapter_of(tmp_path, name)


@pytest.mark.tier("wide", long=["words1"])
@pytest.mark.parametrize("words", [[], ["lora.dropout=0.3", "lora.targets=*.attn.*"]])
def test_a_service_that_is_gone_at_any_point_has_lost_nothing(tmp_path, words):
    """The end is like kill -9: the next service finds the disk as it is at that moment."""
    expected = {s: run_alone(tmp_path / f"alone{s}", s, *words) for s in (0, 1)}
    names, courses, live = {}, {}, [0, 1]
    while live:
        service = Service(config_of(tmp_path / "all", *words))
        for seed in live:
            names[seed] = names.get(seed) or new(service, seed)
            ask = asker(service, names[seed])
            courses.setdefault(seed, Course(seed, ask)).ask = ask
        live = [seed for seed in live if courses[seed].go_on()]
        # The service ends without any clean-up; its lock is released, as the kernel would do.
        service.release()
    for seed, course in courses.items():
        assert (course.results, adapter_of(tmp_path / "all", names[seed])) == expected[seed]


@pytest.mark.tier("wide", long=["0"])
@pytest.mark.parametrize("seed", [0, 1])
def test_requests_are_done_once_each_before_whatever_write_a_service_dies(
    tmp_path, alone, monkeypatch, seed
):
    """Lives grow longer until the work is done."""
    name, is_over, length, opened = f"{'ab' * 16}:train:0", False, 0, []

    def ask(kind, body):
        is_sample = ["sequences" in result for result in course.results]
        number = is_sample.count(False)
        if kind == "asample":  # a new sampler per step
            number = is_sample[::-1].index(False)
        answer = answer_to(opened[-1], name, kind, body, number)
        assert "result" in answer, answer
        return answer["result"]

    course = Course(seed, ask)
    while not is_over:
        with dying(monkeypatch, length):
            opened.append(Service(config_of(tmp_path)))
            opened[-1].create(name, seed)
            while course.go_on():
                pass
            is_over = True
        if opened:
            opened.pop().release()
        length += 1
    assert 15 < length < 200
    assert (course.results, adapter_of(tmp_path, name)) == alone(seed)


def test_jobs_take_turns(tmp_path):
    with Service(config_of(tmp_path)) as service:
        names = [new(service, seed) for seed in range(3)]
        for name, number in zip(names, (6, 2, 4), strict=True):
            for step in range(number):
                service.submit(name, "forward_backward", texts(text_of(step)))
        order, session = [], service.session
        serve = session.serve
        session.serve = lambda *asked: (order.append(names.index(session.now.id)), serve(*asked))[1]
        while service.turn():
            pass
    assert order == [0, 1, 2, 0, 1, 2, 0, 2, 0, 2, 0, 0]


@pytest.mark.tier("wide", long=["1-float32-4", "9-float32-1"])
@pytest.mark.parametrize(
    ("loaded", "dtype", "resident"),
    [
        (1, "float32", 1),
        (1, "bfloat16", 1),
        (2, "float32", 1),
        (9, "float32", 1),
        (1, "bfloat16", 2),
        (1, "float32", 4),
    ],
)
def test_the_beginning_of_a_step_is_computed_once(tmp_path, loaded, dtype, resident):
    """It does not matter how many other jobs have turns before its end."""
    passes = []

    def of(number):
        for part in range(5):
            yield "forward_backward", texts(text_of(10 * number + part))
        yield "optim_step", rate(1e-2)
        yield "forward", texts(text_of(number))

    together, alone, words = [], [], [f"jobs.max_loaded={loaded}", "jobs.save_interval=1"]
    words += [f"optim.gradient_dtype={dtype}", f"jobs.max_resident={resident}"]
    for number in range(4):
        with Service(config_of(tmp_path / f"alone-{number}", *words)) as service:
            ask = asker(service, new(service, number))
            alone.append([ask(*request) for request in of(number)])
    with Service(config_of(tmp_path / "all", *words)) as service:
        service.session.engine.runner.before_forward = lambda: passes.append(1)
        names = [new(service, number) for number in range(4)]
        aside, held = tmp_path / "all" / "aside", service.session.held
        for requests in zip(*map(of, range(4)), strict=True):
            asked = zip(names, requests, strict=True)
            together.append([asker(service, name)(*request) for name, request in asked])
            if requests[0][0] == "forward_backward":
                on_disk = [one.place for one in held.values()].count("file")
                assert on_disk == max(0, 4 - resident - loaded)
                assert not on_disk or not list(aside.iterdir())
        service.delete(names[0])
        service.turn()
    assert list(map(list, zip(*together, strict=True))) == alone
    assert len(passes) == 4 * (5 + 1)  # each request has one text, so one micro-batch


def test_restart_ignores_states_that_a_killed_service_swapped_out(tmp_path):
    words, data = ["jobs.max_loaded=1"], [text([1, 2, 3])]
    service = Service(config_of(tmp_path, *words))
    names = [new(service, seed) for seed in range(3)]
    for name in names:
        asker(service, name)("forward_backward", {"data": data})
    assert service.session.held[names[0]].place == "file"
    (tmp_path / "aside" / "of-a-kill-while-it-was-written").touch()
    service.release()
    with Service(config_of(tmp_path, *words)) as service:
        assert not (tmp_path / "aside").exists()
        steps = [asker(service, name)("optim_step", rate(1e-2)) for name in names]
    assert all(step["metrics"]["grad_norm"] > 0 for step in steps)


def test_a_disk_that_takes_nothing_aside_ends_the_service(tmp_path):
    service = Service(config_of(tmp_path, "jobs.max_loaded=1"))
    (tmp_path / "aside").mkdir()
    names = [new(service, seed) for seed in range(3)]
    for name in names[:2]:
        asker(service, name)("forward_backward", texts([1, 2, 3]))
    (tmp_path / "aside" / f"{names[0]}-0.safetensors").mkdir()
    with pytest.raises(RunFailed, match=r"cannot be written to disk .*raise jobs\.max_loaded"):
        asker(service, names[2])("forward_backward", texts([1, 2, 3]))
    service.release()


def test_a_request_is_done_once_however_often_it_is_sent(tmp_path):
    body = texts([1, 2, 3])
    with Service(config_of(tmp_path)) as service:
        name = service.create(f"{'ab' * 16}:train:0").id
        first = answer_to(service, name, "forward_backward", body, 0)
        assert answer_to(service, name, "forward_backward", body, 0)["result"] == first["result"]
        assert service.create(f"{'ab' * 16}:train:0").accepted == 1
        with pytest.raises(Refused, match="request 0 was another one; the next number is 1"):
            service.submit(name, "optim_step", rate(1e-3), 0)
        with pytest.raises(Refused, match="request 2 comes too early; the next number is 1"):
            service.submit(name, "optim_step", rate(1e-3), 2)
        with pytest.raises(Refused, match="a job of this id exists, with seed 0"):
            service.create(f"{'ab' * 16}:train:0", seed=1)
    with Service(config_of(tmp_path)) as service:
        assert answer_to(service, name, "forward_backward", body, 0)["result"] == first["result"]


def test_requests_before_every_checkpoint_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "KEPT_ANSWERS", 4)
    with Service(config_of(tmp_path)) as service:
        name = new(service)
        ask = asker(service, name)
        for step in range(12):
            ask("forward_backward", texts(text_of(step)))
            ask("optim_step", rate(1e-3))
        folder = tmp_path / "jobs" / name
        assert len(list((folder / "requests").iterdir())) <= 2 * 4
        assert len(list((folder / "answers").iterdir())) <= 2 * 4 + 4
        with pytest.raises(Refused, match="request 0 is no longer kept: the last 4 are"):
            service.answer(name, 0)


def rules_of(service):
    """Return everything that no job may change or leave behind."""
    engine, generator = service.session.engine, service.session.generator
    frozen = [m.local for m in engine.fsdp.members.values() if not m.rule.trainable]
    bits = [hashlib.sha256(x.view(-1).view(torch.uint8).numpy()).hexdigest() for x in frozen]
    pages = generator.pages
    return bits, generator.is_busy, pages.num_available == pages.num_pages


@pytest.mark.tier("long", quick=["generation"], wide=["exception"])
@pytest.mark.parametrize("fails", ["exception", "nan", "generation", "half a step"])
def test_a_failing_job_reports_and_leaves_the_others_alone(tmp_path, alone, monkeypatch, fails):
    with Service(config_of(tmp_path)) as service:
        before = rules_of(service)
        good = [new(service, seed) for seed in (0, 1)]
        courses = [Course(seed, asker(service, good[seed])) for seed in (0, 1)]
        bad, turns = new(service, 7), 0
        live = list(courses)
        while live:
            live = [course for course in live if course.go_on()]
            fail(service, bad, fails, monkeypatch)
            turns += 1
        assert rules_of(service) == before
        assert service.find(bad).status == "open"
    for seed, course in enumerate(courses):
        assert (course.results, adapter_of(tmp_path, good[seed])) == alone(seed)
    assert turns > 5


def fail(service, name, how, monkeypatch):
    data = [text([1, 2, 3])]
    with monkeypatch.context() as patch:
        if how == "exception":
            assert "result" in answer_to(service, name, "forward_backward", {"data": data})
            patch.setattr(Engine, "forward_backward", lambda *_: 1 / 0)
            answer = answer_to(service, name, "forward_backward", {"data": data})
            assert answer["error"] == "ZeroDivisionError: division by zero"
            patch.undo()
            # The gradients of its step are dropped.
            assert (
                "no forward_backward" in answer_to(service, name, "optim_step", rate(1e-3))["error"]
            )
        elif how == "nan":
            huge = [text([1, 2, 3], weights=[3e38, 3e38])]
            answer_to(service, name, "forward_backward", {"data": huge * 9})
            metrics = answer_to(service, name, "optim_step", rate(1e-3))["result"]["metrics"]
            assert metrics["skipped"] == 1
            assert "grad_norm" not in metrics
        elif how == "generation":
            step, calls = Generator.step, []

            def break_down(self):
                calls.append(1)
                return step(self) if len(calls) < 3 else 1 / 0

            patch.setattr(Generator, "step", break_down)
            body = prompting([1, 2], 9, sampler=99, num_samples=3)
            sampler = target_of(name, "asample", body)[0]
            service.create(sampler)
            answer = answer_to(service, name, "asample", body)
            service.delete(sampler)
            assert "ZeroDivisionError" in answer["error"]
        else:
            assert "result" in answer_to(service, name, "forward_backward", {"data": data})
            patch.setattr(AdamW, "step", lambda *_: 1 / 0)
            assert (
                "ZeroDivisionError" in answer_to(service, name, "optim_step", rate(1e-3))["error"]
            )


def test_a_job_that_failed_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch):
    """Only the gradients of its step are dropped."""
    learn = ("forward_backward", texts(text_of(5)))
    step = ("optim_step", rate(1e-2))
    look = ("forward", texts(text_of(6)))
    with Service(config_of(tmp_path / "a")) as service:
        ask = asker(service, new(service))
        for request in (learn, step, learn, step):
            ask(*request)
        expected = ask(*look)
    service = Service(config_of(tmp_path / "b"))
    name = new(service)
    ask = asker(service, name)
    for request in (learn, step, learn):
        ask(*request)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "forward_backward", lambda *_: 1 / 0)
        assert "error" in answer_to(service, name, *learn)
    service.release()  # and again after a restart
    with Service(config_of(tmp_path / "b")) as service:
        ask = asker(service, name)
        assert "no forward_backward" in answer_to(service, name, *step)["error"]
        ask(*learn)
        ask(*step)
        assert ask(*look) == expected


def test_load_weights_restores_a_save(tmp_path, monkeypatch):
    learn = ("forward_backward", texts(text_of(5)))
    step, look = ("optim_step", rate(1e-2)), ("forward", texts(text_of(6)))
    with Service(config_of(tmp_path, "jobs.max_saves=2")) as service:
        name = new(service)
        ask = asker(service, name)
        for request in (learn, step):
            ask(*request)
        path = "tinker://SESSION:train:0/weights/one"
        assert ask("save_weights", {"path": "one"}) == {"path": path}
        found = []
        for _ in range(2):
            for request in (learn, step):
                ask(*request)
            found.append(ask(*look))
            assert ask("load_weights", {"path": "one"})["path"] == path
        assert found[0] == found[1] != ask(*look)
        ask("load_weights", {"path": "one", "optimizer": False})
        for request in (learn, step):  # from the same weights, with other moments
            ask(*request)
        assert ask(*look) not in (found[0], ask("load_weights", {"path": "one"}))
        ask(*learn)
        for kind, body, says in (
            ("save_weights", {"path": "two"}, "gradients of an unfinished step"),
            ("load_weights", {"path": "two"}, "there is no save"),
        ):
            assert says in answer_to(service, name, kind, body)["error"]
        ask(*step)  # the refused request has cost nothing
        again = {"path": "one"}
        assert "a save 'one' already" in answer_to(service, name, "save_weights", again)["error"]
        ask("save_weights", {"path": "one", "overwrite": True, "ttl_seconds": 3600})
        ask("save_weights", {"path": "two"})
        third = {"path": "three"}
        assert "jobs.max_saves" in answer_to(service, name, "save_weights", third)["error"]
        later = time.time() + 4000
        monkeypatch.setattr(store.time, "time", lambda: later)
        ask("save_weights", third)
        assert list(service.find(name).saves) == ["weights/two", "weights/three"]
        service.remove_save(name, "weights/two")
        assert list(service.find(name).saves) == ["weights/three"]
        with pytest.raises(Refused, match=r"no such (job|save)"):
            service.remove_save(name, "weights/one")


def test_ended_and_deleted_jobs(tmp_path):
    with Service(config_of(tmp_path, "jobs.max_jobs=2")) as service:
        one, two = (new(service) for _ in range(2))
        with pytest.raises(Refused, match="there are 2 jobs, as many"):
            new(service)
        waiting = service.answer(one, service.submit(one, "optim_step", rate(1.0)))
        service.end(one)
        assert waiting.result(0) == {"error": "finished"}
        assert not service.turn()
        with pytest.raises(Refused, match="this job is finished"):
            service.submit(one, "optim_step", rate(1.0))
        asker(service, two)("forward_backward", texts([1, 2]))
        gone = service.delete(two)
        service.turn()
        gone.result(0)
        assert not (tmp_path / "jobs" / two).exists()
        with pytest.raises(Refused, match="there is no such job"):
            service.find(two)
        new(service)
    with Service(config_of(tmp_path)) as service:
        assert service.find(one).status == "finished"


def test_generation_is_given_up_between_two_tokens(tmp_path, monkeypatch):
    with Service(config_of(tmp_path)) as service:
        name, step, calls = f"{'ab' * 16}:sample:0", Generator.step, []
        service.create(name)

        def end(self):
            calls.append(1)
            if len(calls) == 3:
                service.end(name)
            return step(self)

        monkeypatch.setattr(Generator, "step", end)
        _, body = target_of(name, "asample", prompting([1], 50))
        waiting = service.answer(name, service.submit(name, "asample", body))
        service.turn()
        assert waiting.result(0) == {"error": "finished"}
        assert len(calls) == 3
        assert service.find(name).done == 0
        assert not service.session.generator.is_busy


ONE = {"tokens": [1], "target_tokens": [2]}
ODD = [  # changes of a datum
    ({"tokens": []}, r"data\[0\] has no tokens"),
    ({"tokens": [50]}, "a token outside of 0 to 49"),
    ({"tokens": [2**70]}, "data.0.tokens.0|a token outside of 0 to 49"),
    ({"target_tokens": [-1]}, "a token outside of 0 to 49"),
    ({"tokens": [1] * 65}, "65 tokens, more than the 64 of a row"),
    ({"target_tokens": [1, 2]}, "2 target_tokens for 1 tokens"),
    ({"weights": [1.0, 1.0]}, "2 weights for 1 tokens"),
    ({"weights": [1e39]}, "infinite in fp32"),
    ({"weights": ["1"]}, "data.0.weights.0"),
    ({"mask": [1.0]}, "'mask' is not supported"),
    ({"advantages": [1.0]}, "has advantages, which loss 'cross_entropy' does not use"),
]
BAD = [
    ("optim_step", [], "Input should be a valid dictionary"),
    ("optim_step", {}, "adam_params: Field required"),
    ("optim_step", rate("1"), "learning_rate: Input should be a valid number, not '1'"),
    ("optim_step", rate(float("nan")), "learning_rate: "),
    ("optim_step", rate(-1.0), "learning_rate: "),
    ("optim_step", {"adam_params": {"beta1": 1.0}}, "beta1: Input should be less than 1"),
    ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "'optimizer_params' is not supported"),
    ("optim_step", {"adam_params": {"momentum": 2}}, "'momentum' is not supported"),
    ("forward_backward", {"data": []}, "data: List should have at least 1"),
    *(("forward_backward", {"data": [ONE | odd]}, says) for odd, says in ODD),
    ("forward_backward", {"data": [ONE], "loss_fn": "gspo"}, "loss_fn 'gspo' is not one of cross"),
    ("forward_backward", {"data": [ONE], "loss_fn": "ppo"}, "no logprobs, which loss 'ppo' needs"),
    (
        "forward",
        {"data": [ONE | {"logprobs": [0.0]}], "loss_fn": "cispo"},
        "no advantages, which loss 'cispo' needs",
    ),
    (
        "forward_backward",
        {"data": [ONE], "loss_fn_config": {"clip_low_threshold": 0.1}},
        "'clip_low_threshold' is unknown; loss 'cross_entropy' has none",
    ),
    (
        "forward_backward",
        {"data": [ONE], "loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 2.0}},
        "is out of range for 'ppo'",
    ),
    ("save_weights", {"path": "../../x"}, "path: String should match"),
    ("save_weights", {"path": "x", "ttl_seconds": 1}, "ttl_seconds: Input should be"),
    ("save_weights_for_sampler", {}, "send either path or sampling_session_seq_id"),
    ("save_weights_for_sampler", {"path": "a", "kind": "inflight"}, "kind: Input should be 'snap"),
    ("save_weights_external", {"path": "a", "age_encryption_recipients": ["a"]}, "age_encryption"),
    (
        "load_weights",
        {"path": "tinker://x/weights/a", "optimizer": True},
        "does not have the form tinker://RUN/",
    ),
    (
        "load_weights",
        {"path": f"tinker://{'0' * 32}:train:0/sampler_weights/a", "optimizer": True},
        "sampler_weights have no optimizer state",
    ),
    ("asample", prompting([1]), "'asample' is not a request to this kind of job"),
]
SAMPLES = [
    (prompting([]), "prompt has no tokens"),
    (prompting([50]), "prompt has a token outside of 0 to 49"),
    (prompting([1], 10**9), "more than the"),
    (prompting([1], 0), "max_tokens: Input should be"),
    (prompting([1], 1, num_samples=10**6), "jobs.max_completions 1024"),
    (prompting([1], 1, topk_sample_logprobs=51), "more than the model's"),
    (prompting([1], 1, topk_prompt_logprobs=1), "topk_prompt_logprobs: Input should be 0"),
    (prompting([1], 1, prompt_alt_tokens_k=1), "prompt_alt_tokens_k: Input should be 0"),
    (prompting([1], 1, target_prompt_logprobs={}), "is not supported"),
    (prompting([1], 1, prompt_logprobs_last_n=1), "no effect without prompt_logprobs"),
    (prompting([1]) | {"sampling_params": {"stop": "a"}}, "stop texts need a tokenizer"),
    (prompting([1]) | {"sampling_params": {"temperature": -1}}, "temperature: Input should be"),
    (prompting([1]) | {"prompt": {"chunks": [{"type": "image"}]}}, "prompt.chunks.0"),
]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """Start a service that only refuses."""
    with Service(config_of(tmp_path_factory.mktemp("quiet"), "jobs.max_queued=2")) as service:
        yield service


@pytest.mark.parametrize(("kind", "body", "says"), BAD)
def test_submit_refuses_impossible_passes(quiet, kind, body, says):
    name = quiet.create(f"{'ef' * 16}:train:0").id
    with pytest.raises(Refused, match=says) as found:
        quiet.submit(name, kind, body)
    assert "\n" not in str(found.value)
    assert quiet.find(name).accepted == 0


@pytest.mark.parametrize(("body", "says"), SAMPLES)
def test_submit_refuses_impossible_samples(quiet, body, says):
    name = f"{'ef' * 16}:sample:0"
    quiet.create(name)
    with pytest.raises(Refused, match=says) as found:
        quiet.submit(name, "asample", target_of(name, "asample", body)[1])
    assert "\n" not in str(found.value)
    assert quiet.find(name).accepted == 0


def test_submit_refuses_more_requests_than_the_queue_holds(quiet):
    name = new(quiet)
    for _ in range(2):
        quiet.submit(name, "optim_step", rate(1.0))
    with pytest.raises(Refused, match="2 requests of this job wait already"):
        quiet.submit(name, "optim_step", rate(1.0))
    quiet.end(name)


def test_the_folder_has_one_base(tmp_path):
    Service(config_of(tmp_path)).close()
    for word, says in (("train.seed=5", "frozen differs"), ("lora.alpha=3", "lora differs")):
        with pytest.raises(ConfigError, match=f"output_dir: .*another base.*{says}"):
            Service(config_of(tmp_path, word))
    with (
        Service(config_of(tmp_path)),
        pytest.raises(ConfigError, match="being written by another run"),
    ):
        Service(config_of(tmp_path))


def test_a_folder_of_an_older_version_has_no_values_for_newer_fields(tmp_path):
    path = tmp_path / "base.json"
    Service(config_of(tmp_path)).close()
    base = store.read_sealed(tmp_path, path.name)
    for part, field in (("architecture", "rope_layers"), ("lora", "use_dora")):
        del base[part][field]
    store.write_sealed(path, base)
    Service(config_of(tmp_path)).close()
    base["architecture"]["rope_layers"] = [False]
    store.write_sealed(path, base)
    with pytest.raises(ConfigError, match=r"another base.*architecture differs"):
        Service(config_of(tmp_path))


def test_a_damaged_job_fails_alone(tmp_path, alone):
    service = Service(config_of(tmp_path, "jobs.save_interval=1"))
    bad, good = new(service, 4), new(service, 0)
    for _ in range(3):
        asker(service, bad)("forward_backward", texts([1, 2]))
        asker(service, bad)("optim_step", rate(1e-3))
    service.close()
    for path in (tmp_path / "jobs" / bad / "checkpoints").glob("*/manifest.json"):
        path.write_text(json.dumps({}))
    with Service(config_of(tmp_path, "jobs.save_interval=1")) as service:
        future = service.answer(bad, service.submit(bad, "optim_step", rate(1.0)))
        course = Course(0, asker(service, good))
        while course.go_on():
            pass
        assert "could not be restored" in future.result(0)["error"]
        assert service.find(bad).status == "failed"
    assert (course.results, adapter_of(tmp_path, good)) == alone(0)


@pytest.mark.gpu
def test_jobs_on_a_gpu_have_the_bits_they_have_alone(tmp_path):
    words = ["train.device=cuda", "train.deterministic=yes", "model.hidden_size=128"]
    words += ["model.head_dim=64", "model.moe_intermediate_size=64", "model.vocab_size=64"]
    expected = [run_alone(tmp_path / f"alone-{seed}", seed, *words) for seed in range(4)]
    with Service(config_of(tmp_path / "all", *words)) as service:
        bad = new(service, 9)  # its weights are NaN, and so are its pages
        wild = {"adam_params": {"learning_rate": 1e6, "weight_decay": 1e6}}
        for _ in range(5):
            answer_to(service, bad, "forward_backward", texts(text_of(9)))
            answer_to(service, bad, "optim_step", wild)
        answer_to(service, bad, "save_weights_for_sampler", {"sampling_session_seq_id": 0})
        names = [new(service, seed) for seed in range(4)]
        courses = [Course(seed, asker(service, names[seed])) for seed in range(4)]
        live = list(courses)
        while live:
            answer_to(service, bad, "asample", prompting(text_of(9, 40), 100, num_samples=4))
            live = [course for course in live if course.go_on()]
    for seed, course in enumerate(courses):
        assert (course.results, adapter_of(tmp_path / "all", names[seed])) == expected[seed]
