"""FSDP over copy engines: shared memory, its barriers, ranks that are late or die.

tests/parallel/fsdp/test_every_transport.py compares its bits with those of collectives. On CPUs the
ranks share a file's memory, and copies finish at once: only the order of streams is not tested.
``gpu`` tests have the rest.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from moetrain.config import Config, ConfigError
from moetrain.models.transformer import Inputs
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.fsdp.transport import peers as peer_copies
from moetrain.parallel.fsdp.transport.peers import why_unreachable
from moetrain.train.loop import Trainer
from tests.lib.command_lines import settled
from tests.lib.distributed import rank_main, spawn
from tests.lib.engines import make_batches, make_engine, objective_of
from tests.lib.fsdp_transports import BASE, GPU, RUNS, locals_of
from tests.lib.launches import Launcher

SCRIPTS = Path(__file__).parents[3] / "scripts"


def carried_by_copies(runs):
    """Return how many of the buckets that travel are copied, and how many there are, by run."""
    found = {}
    for name, words in runs.items():
        buckets = [
            b for b in make_engine(*COPY, *words, micro=1).fsdp.buckets if b.group.size() > 1
        ]
        found[name] = (sum(b.transport.is_shared for b in buckets), len(buckets))
    return found


def test_copies_carry_all_but_what_is_on_the_host():
    for found in spawn(2, carried_by_copies, RUNS[2]):
        for name, (number, travelling) in found.items():
            assert 0 < number <= travelling
            assert (number == travelling) == (name != "on the host"), name


COPY = [*BASE, "parallel.fsdp_transport=copy"]


def late(device):
    """Delay the device and this rank, so that their next work comes long after the others'."""
    if device.type == "cuda":
        torch.cuda._sleep(2**28)
    else:
        time.sleep(0.1)


def slow_rank(words):
    """Return what rank 1, for which nobody waits, has read and summed, and the right values."""
    answers = []
    for slow in (False, True):
        engine = make_engine(*COPY, *words, "moe.aux_loss_coef=0", micro=1)
        world, fsdp, name = engine.world, engine.fsdp, "layers.2.attn.wo.weight"
        shape = fsdp.members[name].layout.shape
        tokens_BS = make_batches(0, 1)[0].tokens_BS.to(world.device)
        found, start_gather, sum_chunks = (
            [],
            type(fsdp.units[0]).start_gather,
            peer_copies.sum_chunks,
        )

        def gather(unit, start_gather=start_gather, slow=slow, world=world):
            if slow and world.rank == 1:
                late(world.device)
            start_gather(unit)

        def sums(*args, sum_chunks=sum_chunks, slow=slow, world=world, **kwargs):
            if slow and world.rank == 1:
                late(world.device)
            return sum_chunks(*args, **kwargs)

        with (
            patch.object(type(fsdp.units[0]), "start_gather", gather),
            patch.object(peer_copies, "sum_chunks", sums),
        ):
            with torch.no_grad():
                for number in range(2):
                    with fsdp.work():
                        found.append(engine.model.backbone(Inputs(tokens_BS))[0])
                    fsdp.write(name, (), torch.full(shape, 0.1 * number))
            with fsdp.work():
                hidden_BSD, _ = engine.model.backbone(Inputs(tokens_BS))
                fsdp.backward(hidden_BSD.float().square().sum(), is_last=True)
        fsdp.gradient_norm()
        found += [x.grad for x in locals_of(engine).values()]
        answers.append([x.to("cpu", copy=True) for x in found])
    return all(map(torch.equal, *answers)) and not torch.equal(*answers[0][:2])


@pytest.mark.tier("long")
def test_nobody_overwrites_what_a_slow_rank_still_needs():
    assert spawn(2, slow_rank, [], timeout=120) == [True, True]


def memory_comes_and_goes(words):
    """Return the bytes of shared memory after a work, and after they were released."""
    engine = make_engine(*COPY, *words, micro=1)
    (session,) = engine.fsdp.sessions
    (shared,) = session.peers.values()
    batches = make_batches(0, 1, engine.world.rank, 2)

    def is_there():
        return shared.num_bytes > 0

    found = [is_there()]
    engine.forward(batches, objective_of(engine))
    found.append(is_there())
    for _ in range(3):
        engine.offload("workspaces")
        found.append(is_there() or any(b._cast_N.numel() for b in engine.fsdp.buckets))
        engine.forward(batches, objective_of(engine))
    return found, Path("/proc/self/maps").read_text().count("memfd:moetrain")


def test_shared_memory_is_made_by_a_work_and_given_back():
    assert spawn(2, memory_comes_and_goes, []) == [([False, True, *[False] * 3], 1)] * 2


def changes_in_the_middle():
    """Change parameters while peers read them; return the error."""
    engine = make_engine(*COPY, micro=1)
    batches = make_batches(0, 1, engine.world.rank, 2)
    with engine.work():
        with torch.no_grad():
            engine.fsdp.members["layers.0.attn.wq.weight"].local.add_(1.0)
        with pytest.raises(RuntimeError, match=r"changed within FSDP.work\(\)"):
            engine.forward(batches, objective_of(engine))
    return engine.forward(batches, objective_of(engine)).total.isfinite().item()


def test_parameters_that_change_in_a_work_are_an_error():
    assert spawn(2, changes_in_the_middle) == [True] * 2


def maps_after_release():
    """Return how often each rank maps the shared memory after the first one has released it."""
    engine = make_engine(*COPY, micro=1)
    rank = engine.world.rank
    engine.forward(make_batches(0, 1, rank, 2), objective_of(engine))
    pids = [os.getpid()] * 2
    dist.all_gather_object(pids, os.getpid())

    def mapped():
        return [Path(f"/proc/{pid}/maps").read_text().count("memfd:moetrain") for pid in pids]

    before = mapped()
    dist.barrier()
    time.sleep(0.2 * rank)
    engine.offload("workspaces")
    return before, mapped()


def test_released_shared_memory_is_mapped_by_no_rank():
    assert spawn(2, maps_after_release) == [([1, 1], [0, 0])] * 2


def on_two_machines():
    name = f"machine {dist.get_rank()}"
    with patch.object(socket, "gethostname", lambda: name), pytest.raises(ConfigError) as error:
        make_engine(*COPY, micro=1)
    replicas = ["parallel.dp_replicate=2", "parallel.dp_shard=1"]
    alone = make_engine(*COPY, *replicas, micro=1)
    assert not alone.fsdp.sessions  # nothing is sharded
    usual = make_engine(*BASE, micro=1)
    assert not usual.fsdp.sessions  # between CPUs copies leave nothing free
    return str(error.value)


def test_copies_between_machines_are_refused():
    problem = (
        "parallel.fsdp_transport: 'copy' is not possible: its 2 ranks are on 2 machines, not on "
        "one; use nccl"
    )
    assert spawn(2, on_two_machines) == [problem] * 2


def test_why_unreachable_names_gpus_that_cannot_copy(monkeypatch):
    assert why_unreachable([("a", None), ("a", None)]) is None
    assert (
        why_unreachable([("a", 0), ("a", 0)])
        == "ranks see their GPUs as 0, 0, but each must see all GPUs"
    )
    reach = {(0, 1), (1, 0), (1, 2), (2, 1)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) in reach)
    assert why_unreachable([("a", 0), ("a", 1)]) is None
    assert (
        why_unreachable([("a", 0), ("a", 1), ("a", 2)]) == "GPU 0 cannot reach the memory of GPU 2"
    )


def dies_in_the_middle():
    """Kill rank 1 while it copies; the other must notice."""
    engine = make_engine(*COPY, micro=1)
    world = engine.world
    batches = make_batches(0, 1, world.rank, 2)
    engine.forward_backward(batches, objective_of(engine))
    reduce = FSDP.reduce

    def dying(*args):
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        reduce(*args)

    with patch.object(FSDP, "reduce", dying):
        engine.forward_backward(batches, objective_of(engine))
        engine.step(1e-2)


def survivor(folder, timeout=30.0):
    """Return the output of the surviving rank."""
    context = multiprocessing.get_context("forkserver")
    call = pickle.dumps((dies_in_the_middle, ()))
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(
            target=rank_main, args=(rank, 2, "cpu", str(folder), timeout, call, pipe[1])
        )
        for rank, pipe in enumerate(pipes)
    ]
    try:
        for process, pipe in zip(processes, pipes, strict=True):
            process.start()
            pipe[1].close()
        assert pipes[0][0].poll(3 * timeout)
        processes[1].join(10)
        assert processes[1].exitcode == -signal.SIGKILL
        succeeded, said = pickle.loads(pipes[0][0].recv_bytes())
        assert not succeeded
        return said
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_killed_rank_ends_the_others(tmp_path):
    said = survivor(tmp_path)
    assert "in reduce" in said
    assert "onnection" in said


# The real command line runs; rank 1 is killed in a backward of the second step.
DIES = """
import os, signal, sys
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.cli.train import main

reduce, calls = FSDP.reduce, []


def dying(fsdp, *args):
    calls.append(args)
    if os.environ["RANK"] == "1" and len(calls) == len(fsdp.units) + 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return reduce(fsdp, *args)


FSDP.reduce = dying
sys.exit(main(sys.argv[1:]))
"""


def check_killed_run(words, folder, timeout):
    """Check that the launcher ends the ranks that wait for the killed one on their device."""
    words = [*words, "parallel.fsdp_transport=copy", "log.interval=1"]
    code, out, error = Launcher(folder, DIES, *settled(words), nproc=2).end(timeout)
    assert code == 1, out + error
    assert "failed: rank 1 was killed by signal 9 (Killed)" in error
    assert "step 1" in out + error


@pytest.mark.tier("wide")
def test_a_run_ends_with_a_killed_rank(tiny_words, tmp_path):
    check_killed_run(tiny_words, tmp_path, 90)


def bench(words):
    sys.path.insert(0, str(SCRIPTS))
    import bench_fsdp  # scripts are no package

    found = []
    for transport in ("nccl", "copy"):
        config = Config.load(None, [*words, f"parallel.fsdp_transport={transport}"], environ={})
        trainer = Trainer(config)
        found.append(bench_fsdp.compare(trainer, 4))
        assert bool(trainer.engine.fsdp.sessions) == (transport == "copy")
    return found[0] == found[1], len(found[0]), len(dict.fromkeys(found[0].values()))


def test_the_benchmark_compares_every_parameter_and_gradient(tiny_words):
    for is_same, number, different in spawn(2, bench, tiny_words):
        assert is_same
        assert different > number // 2


@pytest.mark.gpu(2)
def test_nobody_overwrites_what_a_slow_gpu_still_needs():
    assert spawn(2, slow_rank, GPU, device_type="cuda", timeout=240) == [True, True]


@pytest.mark.gpu(2)
def test_a_run_on_gpus_ends_with_a_killed_rank(tiny_words, tmp_path):
    check_killed_run([*tiny_words, *GPU], tmp_path, 150)


def released_bytes(words):
    """Return the bytes that each of several releases of shared memory gave back to the driver."""
    engine = make_engine(*COPY, *words, micro=1)
    (session,) = engine.fsdp.sessions
    (shared,) = session.peers.values()
    batches = make_batches(0, 1, engine.world.rank, 2)
    found = []
    for _ in range(5):
        engine.forward(batches, objective_of(engine))
        num_bytes = shared.num_bytes
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dist.barrier()
        before = torch.cuda.mem_get_info()[0]
        shared.release()
        for bucket in engine.fsdp.buckets:
            bucket.release()
        dist.barrier()  # it is free when no rank maps it
        found.append(torch.cuda.mem_get_info()[0] - before)
    return found, num_bytes


@pytest.mark.alone
@pytest.mark.gpu(2)
def test_shared_memory_of_gpus_is_the_drivers_again():
    words = [*GPU, "model.hidden_size=1024", "model.moe_intermediate_size=1024"]
    for found, num_bytes in spawn(2, released_bytes, words, device_type="cuda", timeout=240):
        assert min(found) >= num_bytes > 20 << 20
        assert max(found) == min(found)
