"""Jobs on several ranks: each as if alone on them, and as on one; a service of two processes."""

import json
import os
import signal

import pytest
import torch.distributed as dist
from distributed import spawn
from safetensors.torch import load_file
from test_engine import assert_near
from test_jobs import Course, adapter_of, asker, config_of, file_of
from test_jobs_server import Process

from moetrain.jobs.scheduler import Service
from moetrain.jobs.session import JobSession
from moetrain.train.setup import resolve_run

SEEDS = (0, 1, 3)


def serve(folder, runs, failing=False):
    """On every rank: of each of ``runs``, words and seeds, results and adapters (a sum, and what
    it is of) by seed.

    ``failing``: in the first one another job fails in between.
    """
    found = []
    for number, (words, seeds) in enumerate(runs):
        config = config_of(f"{folder}/{number}", *words)
        if dist.get_rank() > 0:
            JobSession(*resolve_run(config)).follow()
            continue
        with Service(config) as service:
            names = {seed: service.create(seed=seed)["id"] for seed in seeds}
            courses = {seed: Course(seed, asker(service, names[seed])) for seed in seeds}
            live, bad = list(courses.values()), service.create()["id"]
            while live:
                live = [course for course in live if course.go_on()]
                if failing and number == 0:
                    fail(service, bad)
        service.session.dismiss()
        at = config.output_dir
        found.append(
            {
                s: (courses[s].results, adapter_of(at, names[s]), load_file(file_of(at, names[s])))
                for s in seeds
            }
        )
    return found


def fail(service, name):
    """What another job may get wrong."""
    service.ask(name, "forward_backward", {"data": [{"tokens": [1, 2, 3]}]})
    assert "no save 'x'" in service.ask(name, "load", {"name": "x"})["error"]
    forward_backward = service.session.engine.forward_backward
    service.session.engine.forward_backward = lambda *args: forward_backward(*args) and 1 / 0
    answer = service.ask(name, "forward_backward", {"data": [{"tokens": [1, 2, 3]}]})
    assert "ZeroDivisionError" in answer["error"]
    del service.session.engine.forward_backward


INTERLEAVED = "parallel.pp=2 parallel.pp_schedule=interleaved_1f1b model.num_layers=4"
MESHES = ["parallel.ep=2", "parallel.tp=2", "parallel.pp=2", "parallel.cp=2", "dp", INTERLEAVED]


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    """What comes of the jobs on one rank, of so many layers."""
    found = {}

    def jobs(*layers):
        if layers not in found:
            folder, words = tmp_path_factory.mktemp("single"), [*layers, "model.num_kv_heads=2"]
            (found[layers],) = spawn(1, serve, folder, [(words, SEEDS)])[0]
        return found[layers]

    return jobs


@pytest.mark.parametrize("mesh", MESHES)
def test_jobs_on_two_ranks(tmp_path, mesh, on_one):
    words = [] if mesh == "dp" else mesh.split()
    single = on_one(*(word for word in words if "num_layers" in word))
    words += ["train.global_batch_size=4", "model.num_kv_heads=2"]
    seed = SEEDS[MESHES.index(mesh) % len(SEEDS)]  # one that began first, second or last
    runs = [(words, SEEDS), (words, [seed])]
    together, alone = spawn(2, serve, tmp_path, runs, True, timeout=150)[0]
    assert together[seed][:2] == alone[seed][:2]
    for seed in SEEDS:
        assert_near(together[seed][2], single[seed][2], 1e-2)
        for mine, theirs in zip(together[seed][0], single[seed][0], strict=True):
            for key in set(mine) & {"loss", "grad_norm", "logprobs"}:
                assert flat(mine[key]) == pytest.approx(flat(theirs[key]), rel=1e-3, abs=1e-4)


def flat(value):
    """The numbers of a nested list."""
    return [x for part in value for x in flat(part)] if isinstance(value, list) else [value]


def test_a_service_of_two_processes(tmp_path):
    words = ["launch.nproc=2", "parallel.ep=2", "train.global_batch_size=4"]
    service = Process(tmp_path / "out", *words)
    try:
        job = service.client.create()
        job.forward_backward(data=[{"tokens": [1, 2, 3]}])
        before = job.forward(data=[{"tokens": [4, 5]}])
        job.optim_step(lr=1e-2)
        assert job.forward(data=[{"tokens": [4, 5]}]) != before
        sampled = job.sample(prompts=[[1], [2], [3]], max_tokens=5)["completions"]
        assert [[len(c["tokens"]) for c in group] for group in sampled] == [[5]] * 3
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 143
    finally:
        service.kill()
    checkpoints = sorted((tmp_path / "out" / "jobs" / job.id / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step-00000003", "step-00000005"]
    assert json.loads((checkpoints[-1] / "state.json").read_text())["steps"] == 1
    assert os.listdir(tmp_path / "out" / "jobs") == [job.id]
