"""FSDP over copy engines: shared memory, its barriers, ranks that are late or die.

tests/parallel/fsdp/test_every_transport.py compares its bits with those of collectives. On CPUs the
ranks share a file's memory, and copies finish at once: only the order of streams is not tested.
``gpu`` tests have the rest.
"""

import gc
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
from moetrain.runtime.arena import OffloadedError, aligned
from moetrain.train.loop import Trainer
from tests.lib.command_lines import settled
from tests.lib.distributed import rank_main, spawn
from tests.lib.engines import make_batches, make_engine, objective_of, train, weights_of
from tests.lib.fsdp_transports import BASE, GPU, RUNS, STORED, locals_of
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
            assert (number == travelling) == ("on the host" not in name), name


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
        state = {key: 0.5 * weight for key, weight in engine.weights()}
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
                for number in range(3):
                    with fsdp.work():
                        found.append(engine.model.backbone(Inputs(tokens_BS))[0])
                    if number == 0:
                        fsdp.write(name, (), torch.full(shape, 0.1))
                    else:
                        engine.load_state({"model": state})
            with fsdp.work():
                hidden_BSD, _ = engine.model.backbone(Inputs(tokens_BS))
                fsdp.backward(hidden_BSD.float().square().sum(), is_last=True)
        fsdp.gradient_norm()
        found += [x.grad for x in locals_of(engine).values()]
        engine.forget()
        with patch.object(type(fsdp.units[0]), "start_gather", gather):
            engine.forward_backward(make_batches(1, 1, world.rank, 2), objective_of(engine))
            for _ in range(2):  # the second reads what the update wrote
                with torch.no_grad(), fsdp.work():
                    found.append(engine.model.backbone(Inputs(tokens_BS))[0])
                if engine.since_step:
                    engine.step(1e-2)
        answers.append([x.to("cpu", copy=True) for x in found])
    return all(map(torch.equal, *answers)) and not torch.equal(*answers[0][:2])


@pytest.mark.tier("long")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # copies, and the shards themselves
def test_nobody_overwrites_what_a_slow_rank_still_needs(dtype):
    assert spawn(2, slow_rank, [f"train.dtype={dtype}"], timeout=120) == [True, True]


def count_maps(pid="self"):
    """Return how many pieces of shared memory a process maps."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:moetrain")


def memory_comes_and_goes(words):
    """Return whether there is a workspace after a work, and after it was released."""
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
    return found, count_maps()


def test_shared_memory_is_made_by_a_work_and_given_back():
    # Routers' shards lie in a piece of their own.
    assert spawn(2, memory_comes_and_goes, []) == [([False, True, *[False] * 3], 2)] * 2


SHARDS = {
    "matrices": STORED,
    "frozen": ["train.freeze=embed.*", "optim.offload_fraction=0.5"],
    "all": ["train.dtype=float32", "parallel.ep=2"],
    "adapters": ["train.dtype=float32", "lora.rank=8", "moe.bias_update_rate=0"],
}


def where_shards_lie(words):
    """Return how many buckets other ranks read in place and how many have a copy, and what is wrong
    with their memory."""
    engine = make_engine(*COPY, *words, micro=1)
    world, (session,) = engine.world, engine.fsdp.sessions
    batches = make_batches(0, 1, world.data_rank, world.dims.data_ranks)

    def learn():
        total = engine.forward_backward(batches, objective_of(engine)).total
        engine.step(1e-2)
        return total

    learn()
    buckets, wrong = [*engine.fsdp.buckets], []
    inside = [b for b in buckets if b.is_read_in_place]
    copied = [b for b in buckets if b.transport.is_shared and not b.is_read_in_place]

    # 1. A shard and what others read are one: they have bytes in peers' memory and nowhere else.
    def apart(bucket):
        same = bucket._cast_N.data_ptr() == bucket.shard_N.data_ptr() and not bucket.is_cast
        return not same or any(
            x.data_ptr() != member.piece_of(bucket.shard_N).data_ptr()
            for member in bucket.members
            for x in (member.local, member.parameter.to_local(), member.read())
        )

    wrong += [f"apart: {bucket.members[0].name}" for bucket in filter(apart, inside)]
    groups = [*session.peers.values()]
    pieces = [piece for piece in engine.fsdp.weights._pieces if piece.memory.numel()]
    elsewhere = [b.source_N.nbytes for b in buckets if not b.is_read_in_place]
    copies = [aligned(b.shard_N.numel() * b.dtype.itemsize) for b in copied]
    sizes = {
        "shards": [g.shards.size for g in groups],
        "copies": [g.workspace.size for g in groups],
        "arena": [p.memory.nbytes for p in pieces if p not in [g.shards for g in groups]],
    }
    needed = [aligned(b.shard_N.nbytes) for b in inside], copies, elsewhere
    wrong += [
        (name, found, need)
        for (name, found), need in zip(sizes.items(), needed, strict=True)
        if sum(found) != sum(need)
    ]

    # 2. Offloaded, nothing is mapped. Reloaded, the same tensors are trained.
    values = {key: weight.clone() for key, weight in engine.weights()}
    there = {key: id(local) for key, local in locals_of(engine).items()}
    for what in ((), ("weights",)):
        engine.offload(*what)
        if count_maps() != len(groups) * bool(what):
            wrong.append(f"{count_maps()} maps while {what or 'all'} is offloaded")
        with pytest.raises(OffloadedError):
            learn()
        engine.reload()
        if any(not torch.equal(weight, values[key]) for key, weight in engine.weights()):
            wrong.append("reloaded values")
        if not learn().isfinite():
            wrong.append("loss")
        values = {key: weight.clone() for key, weight in engine.weights()}
    if {key: id(local) for key, local in locals_of(engine).items()} != there:
        wrong.append("other tensors")
    return len(inside), len(copied), wrong


def all_runs(runs):
    answers = {}
    for name, words in runs.items():
        answers[name] = where_shards_lie(words)
        gc.collect()
        if count_maps():
            answers[name][2].append("maps after the engine")
    return answers


@pytest.mark.tier("quick", long=["2"], wide=["4"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_of_the_gathered_dtype_have_no_copy(ranks):
    for answers in spawn(ranks, all_runs, SHARDS, timeout=200):
        for name, (inside, copied, wrong) in answers.items():
            assert not wrong, name
            assert inside > 0, name
            assert (copied == 0) == ("float32" in SHARDS[name][0]), name


def wholes_of(engine):
    """Return a whole :meth:`state`, from the parts of all ranks."""
    mine = {
        (group, key): part._replace(tensor=part.tensor.clone())
        for group, parts in engine.state().items()
        for key, part in parts.items()
    }
    ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    state = {"model": {}, "optim": {}}
    for (group, key), part in (pair for parts in ranks for pair in parts.items()):
        empty = torch.empty(tuple(part.shape), dtype=part.tensor.dtype)
        state[group].setdefault(key, empty)[part.box] = part.tensor
    return state


def carried_over(transport):
    """Return losses, norms and weights of a run that goes on with every step on another mesh."""
    found, state = [], None
    for step, words in enumerate(([], ["parallel.ep=2"], ["parallel.pp=2"], [])):
        engine = make_engine(
            *BASE, *STORED, *words, f"parallel.fsdp_transport={transport}", micro=2
        )
        if state is not None:
            engine.load_state(state)
        found += train(engine, [step], micro=2)
        engine.load_state(state := wholes_of(engine))
        found += train(engine, [step], micro=2)
    return found, weights_of(engine)


def on_other_meshes():
    (expected, weights), (found, same) = (carried_over(name) for name in ("nccl", "copy"))
    return found == expected, [
        name for name in weights if not torch.equal(weights[name], same[name])
    ]


@pytest.mark.tier("long")
def test_shards_without_a_copy_go_on_from_the_state_of_another_mesh():
    assert spawn(2, on_other_meshes, timeout=200) == [(True, [])] * 2


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
        return [count_maps(pid) for pid in pids]

    before = mapped()
    dist.barrier()
    time.sleep(0.2 * rank)
    engine.offload("workspaces")
    return before, mapped()


def test_released_shared_memory_is_mapped_by_no_rank():
    # Routers' shards stay.
    assert spawn(2, maps_after_release) == [([2, 2], [1, 1])] * 2


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
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nobody_overwrites_what_a_slow_gpu_still_needs(dtype):
    words = [*GPU, f"train.dtype={dtype}"]
    assert spawn(2, slow_rank, words, device_type="cuda", timeout=240) == [True, True]


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


def offloaded_bytes(words):
    """Return the bytes that each of several offloads of weights gave back, and those of shards."""
    engine = make_engine(*COPY, *words, micro=1)
    (session,) = engine.fsdp.sessions
    batches, found = make_batches(0, 1, engine.world.rank, 2), []
    for _ in range(4):
        engine.forward(batches, objective_of(engine))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dist.barrier()
        before = torch.cuda.mem_get_info()[0]
        engine.offload("weights")
        dist.barrier()
        found.append(torch.cuda.mem_get_info()[0] - before)
        engine.reload()
    return found, sum(peers.shards.size for peers in session.peers.values())


@pytest.mark.alone
@pytest.mark.gpu(2)
def test_shards_of_gpus_leave_the_memory_of_peers_when_offloaded():
    words = [*GPU, *STORED, "model.hidden_size=1024", "model.moe_intermediate_size=1024"]
    for found, num_bytes in spawn(2, offloaded_bytes, words, device_type="cuda", timeout=240):
        assert min(found) >= num_bytes > 20 << 20
        assert max(found) - min(found) < 4 << 20
