"""Several jobs share a pass, and their adapters one product: each has its results as if alone."""

import errno
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from moetrain.config import ConfigError
from moetrain.jobs import store
from moetrain.jobs.scheduler import Service
from moetrain.jobs.store import Job
from moetrain.kernels.experts.mlp import adapted_expert_mlp
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.kernels.small_m import add_low_rank, low_rank_products
from moetrain.models.families import PRESETS
from tests.lib.job_services import (
    compiled,
    config_of,
    copies_to_host,
    file_of,
    new,
    rate,
)
from tests.lib.tenants import KINDS, WORDS, Passes, body_of, program, run, serve_all

assert compiled  # a fixture


@pytest.mark.tier("wide", long=["4-passes0"])
@pytest.mark.parametrize(("tenants", "passes"), [(4, [4] * 4), (3, [3, 1] * 4), (8, [4] * 4)])
def test_small_requests_that_wait_together_share_a_pass_and_have_their_bits(
    tmp_path, tenants, passes
):
    alone, theirs, many = run(tmp_path / "alone", range(4), one_by_one=True)
    words = [f"jobs.max_tenants={tenants}", "data.seq_len=512"]
    found, mine, few = run(tmp_path / "together", range(4), *words)
    assert few.tenants == passes
    assert many.tenants == [1] * 16
    assert found == alone
    for one, other in zip(mine, theirs, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(one.abs().max() > 0 for one in mine[0].values())


@pytest.mark.tier("long")
def test_other_shapes_than_alone_differ_by_rounding(tmp_path):
    requests = [("forward_backward", body_of(s, kind, 5)) for s, kind in enumerate(KINDS)]
    found = []
    for tenants in (1, 5):
        words = [f"jobs.max_tenants={tenants}", "data.seq_len=1024", "jobs.max_loaded=9"]
        with Service(config_of(tmp_path / str(tenants), *WORDS, *words)) as service:
            names, passes = [new(service, seed) for seed in range(5)], Passes(service)
            serve_all(service, names, requests)
            assert passes.tenants == ([5] if tenants == 5 else [1] * 5)
            service.session.deactivate()
            held = [service.session.held[name].tensors for name in names]
            keys = [key for key in held[0] if key.endswith("gradient_N")]
            found.append([[tensors[key] for key in keys] for tensors in held])
    assert keys
    for alone, together in zip(*found, strict=True):
        for one, other in zip(alone, together, strict=True):
            assert (one - other).abs().max() <= 2e-6 * one.abs().max()


@pytest.mark.tier("long")
def test_compiled_blocks_have_two_shapes_however_many_wait(tmp_path, compiled):
    words = ["compile.enabled=yes", "jobs.max_tenants=3", "train.micro_batch_size=3"]
    words.append("model.num_layers=1")
    words += ["train.global_batch_size=3", "data.seq_len=64", "jobs.max_resident=5"]
    alone, _, _ = run(tmp_path / "alone", range(2), *words, one_by_one=True)
    found, _, passes = run(tmp_path / "together", range(2), *words)
    assert passes.tenants == [3] * 4
    assert passes.shapes == {(3, 64)}
    assert found == alone


@pytest.mark.tier("long")
def test_a_shared_pass_copies_nothing(tmp_path, monkeypatch):
    copied = copies_to_host(monkeypatch)
    with Service(config_of(tmp_path, *WORDS, "jobs.max_tenants=3")) as service:
        names, passes = [new(service, seed) for seed in range(3)], Passes(service)
        serve_all(service, names, [("forward", body_of(1))] * 3)
        copied.clear()
        for _ in range(2):
            serve_all(service, names, [("forward_backward", body_of(1))] * 3)
            serve_all(service, names, [("optim_step", rate(1e-2))] * 3)
        assert passes.tenants == [3, 3]
        assert not copied


@pytest.mark.tier("long")
def test_large_or_different_requests_get_their_own_pass(tmp_path):
    words = ["jobs.max_tenants=4", "data.seq_len=128", "train.micro_batch_size=1"]
    with Service(config_of(tmp_path, *WORDS, *words, "train.global_batch_size=1")) as service:
        names, passes = [new(service, seed) for seed in range(5)], Passes(service)
        bodies = [body_of(1, length=15), body_of(2, length=40), body_of(3, length=15)]
        bodies += [body_of(4, count=1, length=33), body_of(5, count=1, length=34)]
        requests = [("forward_backward", body) for body in bodies]
        serve_all(service, names, requests)
        assert passes.tenants == [3, 1, 1]  # of 32 tokens: texts have 2 * 14, 2 * 39, 32 and 33
        requests[2] = "forward", bodies[2]
        serve_all(service, names, requests)
        assert passes.tenants[3:] == [2, 1, 1]


@pytest.mark.tier("long", wide=["pass-passes0"])
@pytest.mark.parametrize(
    ("fails", "passes"), [("pass", [1] * 4), ("request", [3]), ("weights", [4])]
)
def test_a_shared_pass_costs_nobody_what_another_has_wrong(tmp_path, fails, passes):
    """The error is in the fourth of four jobs, or in the whole pass."""
    seeds = range(3)
    alone, theirs, _ = run(tmp_path / "alone", seeds, one_by_one=True)
    with Service(config_of(tmp_path / "all", *WORDS, "jobs.max_tenants=4")) as service:
        names, results, bad = [new(service, seed) for seed in seeds], [], new(service, 9)
        engine, counted = service.session.engine, Passes(service)
        for number, requests in enumerate(zip(*map(program, seeds), strict=True)):
            kind, body = requests[0]
            if number in (0, 5):
                service.submit(bad, kind, body)
            if number == 5 and fails == "request":
                file = sorted((service.find(bad).folder / "requests").iterdir())[-1]
                file.write_text("{")
                service.find(bad).pending.clear()  # as after a restart: it is read from the disk
            if number == 5 and fails == "pass":
                engine.batched = lambda jobs: engine.__dict__.pop("batched") and 1 / 0
            if number == 0 and fails == "weights":
                service.submit(bad, "optim_step", rate(1e6))
            counted.tenants.clear()
            results += serve_all(service, names, requests)
            if number == 5:
                assert counted.tenants[-len(passes) :] == passes
        assert service.find(bad).status == ("failed" if fails == "request" else "open")
    assert results == alone
    adapters = [load_file(file_of(tmp_path / "all", name)) for name in names]
    for one, other in zip(adapters, theirs, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.tier("long")
def test_a_disk_that_is_full_after_a_shared_pass_costs_no_job(tmp_path, monkeypatch):
    alone = run(tmp_path / "alone", range(3), one_by_one=True)
    config, answer, left = (
        config_of(tmp_path / "all", *WORDS, "jobs.max_tenants=3"),
        Job.answer,
        [1],
    )

    def full(job, number, given):
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left.pop()
        answer(job, number, given)

    with Service(config) as service:
        names = [new(service, seed) for seed in range(3)]
        for name, seed in zip(names, range(3), strict=True):
            service.submit(name, "forward", body_of(seed))
        monkeypatch.setattr(Job, "answer", full)
        with pytest.raises(OSError, match="No space"):
            service.turn()
        monkeypatch.undo()
    with Service(config) as service:
        for name in names:
            serve_all(service, [name], [("forward", body_of(1))])
        results = []
        for requests in zip(*map(program, range(3)), strict=True):
            results += serve_all(service, names, requests)
    assert results == alone[0]


def test_updates_of_several_jobs_have_one_turn_and_their_answers_are_written_at_once(
    tmp_path, monkeypatch
):
    """If the disk is full for one job, no job loses a step, and no client waits forever."""
    words, answer = [*WORDS, "jobs.max_tenants=4", "data.seq_len=512"], Job.answer
    passes = [("forward_backward", body_of(seed)) for seed in range(4)]
    with Service(config_of(tmp_path, *words)) as service:
        names = [new(service, seed) for seed in range(4)]
        serve_all(service, names, passes)
        futures = [service.answer(x, service.submit(x, "optim_step", rate(1e-2))) for x in names]
        assert service.turn()
        assert all("result" in future.result(60) for future in futures)
        without = service.answer(names[0], service.submit(names[0], "optim_step", rate(1e-2)))
        serve_all(service, names[1:], passes[1:])
        assert "refused" in without.result(60)
        asked = [(name, service.submit(name, "optim_step", rate(1e-2))) for name in names[1:]]
        futures = [service.answer(*each) for each in asked]

        def full(job, number, given):
            if job.id == names[2]:
                raise OSError(errno.ENOSPC, "No space left on device")
            answer(job, number, given)

        monkeypatch.setattr(Job, "answer", full)
        with pytest.raises(OSError, match="No space"):
            list(iter(service.turn, False))
        monkeypatch.undo()
    told = [future.result(0) for future in futures]
    assert told.pop(1)["error"] == service.STOPPED  # its answer is not on the disk
    assert all("result" in answer for answer in told)
    with Service(config_of(tmp_path, *words)) as service:
        serve_all(service, names, passes)
        assert {service.find(name).done for name in names} == {4, 5}


def test_updates_that_share_a_turn_wait_once_and_show_no_gradient(tmp_path, monkeypatch):
    """An empty step among them is refused, and the others keep their states."""
    counts, item, tolist = Counter(), torch.Tensor.item, torch.Tensor.tolist
    with Service(config_of(tmp_path, *WORDS, "jobs.max_tenants=4", "data.seq_len=512")) as service:
        names = [new(service, seed) for seed in range(4)]
        serve_all(service, names[:3], [("forward_backward", body_of(seed)) for seed in range(3)])
        futures = [service.answer(x, service.submit(x, "optim_step", rate(1e-2))) for x in names]
        counted = {"item": item, "tolist": tolist}
        for name, read in counted.items():
            count = partial(lambda name, read, x: counts.update([name]) or read(x), name, read)
            monkeypatch.setattr(torch.Tensor, name, lambda x, count=count: count(x))
        states = [service.session.resident(name) for name in names[:3]]
        assert None not in states
        assert service.turn()
        found = [service.session.resident(name) for name in names[:3]]
        assert all(one is other for one, other in zip(found, states, strict=True))
        members = service.session.engine.fsdp.members.values()
        assert all(member.parameter.grad is None for member in members)
        assert all("result" in future.result(60) for future in futures[:3])
        assert counts == {"tolist": 1}
        assert not futures[3].done()
        monkeypatch.undo()
        assert service.turn()
        assert futures[3].result(60)["refused"]


def test_clients_of_a_job_do_not_wait_for_anothers_disk(tmp_path, monkeypatch):
    with Service(config_of(tmp_path, *WORDS)) as service, ThreadPoolExecutor(1) as pool:
        one, two = (new(service, seed) for seed in range(2))
        goes_on, write = threading.Event(), store.write_durably

        def slow(path, *what):
            assert one not in str(path) or goes_on.wait(60)
            write(path, *what)

        monkeypatch.setattr(store, "write_durably", slow)
        waiting = pool.submit(service.submit, one, "forward", body_of(0))
        service.submit(two, "forward", body_of(1))
        while service.turn():
            pass
        assert not waiting.done()
        goes_on.set()
        assert waiting.result(60) == 0
        assert service.turn()


@pytest.mark.tier("long")
def test_a_job_that_only_shares_passes_is_saved_too(tmp_path):
    with Service(config_of(tmp_path, *WORDS, "jobs.max_tenants=2")) as service:
        names, passes = [new(service, seed) for seed in range(2)], Passes(service)
        for _ in range(12):
            serve_all(service, names, [("forward", body_of(1))] * 2)
        kept = [len(list((service.find(name).folder / "requests").iterdir())) for name in names]
        assert not passes.tenants  # no pass learns
        assert max(kept) <= 9


@pytest.mark.parametrize(
    "words",
    [
        ["lora.dropout=0.1", "lora.targets=*.attn.*"],
        ["model.preset=biased"],
        ["lora.targets=*.router"],
    ],
)
def test_max_tenants_refuses_settings_without_shared_passes(tmp_path, words, monkeypatch):
    biased = PRESETS["debug"].model_copy(update={"selection_bias": True})
    monkeypatch.setitem(PRESETS, "biased", biased)
    with pytest.raises(ConfigError, match=r"jobs.max_tenants: 2, but .*; use 1"):
        Service(config_of(tmp_path, "jobs.max_tenants=2", *words))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("tenants", "rows"), [(1, 64), (3, 64), (8, 128)])
def test_dense_adapters_of_tenants_have_the_bits_they_have_alone(tenants, rows):
    x, y = normal(tenants * rows, 24), normal(tenants * rows, 40, seed=1)
    a = normal(tenants, 8, 24, seed=2).requires_grad_()
    b = normal(tenants, 40, 8, seed=3).requires_grad_()
    x.requires_grad_()

    def run(x, y, a, b):
        (u,) = low_rank_products(x, [a])
        made = add_low_rank(y, u, b, 0.5)
        return made, *torch.autograd.grad(made.square().sum(), (x, a, b))

    together = run(x, y, a, b)
    for i, part in enumerate(torch.arange(tenants * rows).split(rows)):
        alone = run(x[part], y[part], a[i], b[i])
        mine = (together[0][part], together[1][part], together[2][i], together[3][i])
        assert all(map(torch.equal, mine, alone))


@pytest.mark.tier("long")
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("empty", [0.0, 0.4, 1.0])
def test_expert_adapters_of_tenants_are_those_of_each_alone(backend, empty):
    tenants, rows, k, experts, dim, width = 3, 13, 2, 5, 16, 8
    tokens = tenants * rows
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]).int()
    ids = torch.where(torch.rand(tokens, k) < empty, -1, ids)
    x, weights = normal(tokens, dim), normal(tokens, k, seed=1).sigmoid()
    frozen = normal(experts, 2 * width, dim, seed=2), normal(experts, dim, width, seed=3)
    shapes = (8, dim), (2 * width, 8), (8, width), (dim, 8)
    adapters = [normal(tenants, experts, *shape, seed=9) for shape in shapes]

    def run(part, adapters):
        given = [x[part].requires_grad_(), weights[part].requires_grad_()]
        trained = [adapter.clone().requires_grad_() for adapter in adapters]
        how = expert_indices(ids[part], experts, backend), *frozen, *trained, 0.5, backend
        y = adapted_expert_mlp(*given, *how)
        found = torch.autograd.grad(y.square().sum(), (*given, *trained))
        has_expert = ids[part] >= 0
        return [y, found[0], found[1][has_expert]], found[2:]

    (y, dx, dw), gradients = run(slice(None), adapters)
    ends = (ids >= 0).view(tenants, -1).sum(1).tolist()
    parts = zip(y.split(rows), dx.split(rows), dw.split(ends), strict=True)
    for i, mine in enumerate(parts):
        alone, theirs = run(slice(i * rows, (i + 1) * rows), [adapter[i] for adapter in adapters])
        for one, other in zip((*mine, *(g[i] for g in gradients)), (*alone, *theirs), strict=True):
            assert one.shape == other.shape
            assert torch.linalg.vector_norm(one - other) <= 1e-6 * torch.linalg.vector_norm(other)


def test_fewer_residents_than_tenants_are_refused(tmp_path):
    words = [*WORDS, "jobs.max_tenants=3", "jobs.max_resident=2"]
    with pytest.raises(ConfigError, match=r"jobs.max_resident: 2 is below jobs.max_tenants 3"):
        Service(config_of(tmp_path, *words))
