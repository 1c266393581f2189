"""Jobs on several ranks: each as if alone there, and as on one rank; a service of two processes."""

import json
import os
import signal

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from moetrain.jobs.scheduler import Service
from moetrain.jobs.session import JobSession
from moetrain.train.session import resolve_run
from tests.lib.distributed import spawn
from tests.lib.engines import assert_near
from tests.lib.job_servers import Process
from tests.lib.job_services import (
    Course,
    adapter_of,
    answer_to,
    asker,
    config_of,
    file_of,
    new,
    prompting,
    rate,
    texts,
)

SEEDS = (0, 1, 3)


def serve(folder, runs, failing=False):
    """Run on every rank; return results and adapters (a checksum, and its names) by seed for each
    of ``runs``.

    ``failing``: in the first run another job fails in between.
    """
    found = []
    for number, (words, seeds) in enumerate(runs):
        config = config_of(f"{folder}/{number}", *words)
        if dist.get_rank() > 0:
            JobSession(*resolve_run(config)).follow()
            continue
        with Service(config) as service:
            names = {seed: new(service, seed) for seed in seeds}
            courses = {seed: Course(seed, asker(service, names[seed])) for seed in seeds}
            live, bad = list(courses.values()), new(service)
            while live:
                live = [course for course in live if course.go_on()]
                if failing and number == 0:
                    fail(service, bad)
            if failing and number == 0:
                damage(service, bad)
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
    """Make the errors of another job."""
    answer_to(service, name, "forward_backward", texts([1, 2, 3]))
    assert "no save" in answer_to(service, name, "load_weights", {"path": "x"})["error"]
    forward_backward = service.session.engine.forward_backward
    service.session.engine.forward_backward = lambda *args: forward_backward(*args) and 1 / 0
    answer = answer_to(service, name, "forward_backward", texts([1, 2, 3]))
    assert "ZeroDivisionError" in answer["error"]
    del service.session.engine.forward_backward


def damage(service, name):
    """Damage a save so that only the rank with the files sees it, before the others write."""
    answer_to(service, name, "save_weights", {"path": "a"})
    (service.find(name).folder / "weights" / "a" / "save.json").write_text("{")
    answer = answer_to(service, name, "save_weights", {"path": "b"})
    assert "save.json is damaged" in answer["error"]


INTERLEAVED = "parallel.pp=2 parallel.pp_schedule=interleaved_1f1b model.num_layers=4"
COPIED = "parallel.fsdp_transport=copy"  # adapters lie in memory that other ranks read
MESHES = ["parallel.ep=2", "parallel.tp=2", "parallel.pp=2", "parallel.cp=2", "dp"]
MESHES += [COPIED, INTERLEAVED]


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    """Return the results of the jobs on one rank, for each number of layers."""
    found = {}

    def jobs(*layers):
        if layers not in found:
            folder, words = tmp_path_factory.mktemp("single"), [*layers, "model.num_kv_heads=2"]
            (found[layers],) = spawn(1, serve, folder, [(words, SEEDS)])[0]
        return found[layers]

    return jobs


@pytest.mark.tier("wide", long=["parallel.cp=2", "parallel.ep=2", "parallel.tp=2"])
@pytest.mark.parametrize("mesh", MESHES)
def test_jobs_on_two_ranks(tmp_path, mesh, on_one):
    words = [] if mesh == "dp" else mesh.split()
    single = on_one(*(word for word in words if "num_layers" in word))
    resident = 1 + MESHES.index(mesh) % 3
    words += ["train.global_batch_size=4", "model.num_kv_heads=2", f"jobs.max_resident={resident}"]
    seed = SEEDS[MESHES.index(mesh) % len(SEEDS)]  # one that began first, second or last
    runs = [(words, SEEDS), (words, [seed])]
    together, alone = spawn(2, serve, tmp_path, runs, True, timeout=150)[0]
    assert together[seed][:2] == alone[seed][:2]
    for seed in SEEDS:
        assert_near(together[seed][2], single[seed][2], 1e-2)
        for mine, theirs in zip(together[seed][0], single[seed][0], strict=True):
            mine, theirs = (one | one.get("metrics", {}) for one in (mine, theirs))
            for key in set(mine) & {"loss", "grad_norm", "logprobs"}:
                assert flat(mine[key]) == pytest.approx(flat(theirs[key]), rel=1e-3, abs=1e-4)


def flat(value):
    """Return the numbers of a nested list."""
    return [x for part in value for x in flat(part)] if isinstance(value, list) else [value]


@pytest.mark.tier("wide")
def test_a_service_of_two_processes(tmp_path):
    words = ["launch.nproc=2", "parallel.ep=2", "train.global_batch_size=4"]
    service = Process(tmp_path / "out", *words)
    try:
        client, look = service.client, ("forward", texts([4, 5]))
        name = client.create()
        client.ask(name, "forward_backward", texts([1, 2, 3]))
        before = client.ask(name, *look)
        client.ask(name, "optim_step", rate(1e-2))
        assert client.ask(name, *look) != before
        client.ask(name, "save_weights_for_sampler", {"sampling_session_seq_id": 0})
        for prompt in ([1], [2], [3]):
            found = client.ask(name, "asample", prompting(prompt, 5, num_samples=2))
            assert [len(one["tokens"]) for one in found["sequences"]] == [5, 5]
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 143
    finally:
        service.kill()
    checkpoints = sorted((tmp_path / "out" / "jobs" / name / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step-00000003", "step-00000005"]
    assert json.loads((checkpoints[-1] / "state.json").read_text())["steps"] == 1
    assert sorted(os.listdir(tmp_path / "out" / "jobs"))[1] == name
