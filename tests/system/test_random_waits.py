"""Random delays of streams and host threads change no bit of a step.

``random_waits`` makes the delays. On a CPU only threads are delayed: updates in host memory, saves
in the background, compilation ahead.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moetrain.config import Config
from moetrain.train.loop import Trainer
from tests.lib.checkpoints import tensors_of
from tests.lib.distributed import spawn
from tests.lib.engines import ROWS, make_engine, weights_of
from tests.lib.graphed_steps import CASES, GPU, ON, RANKS_GPU, look_between, numbers_of, run_steps
from tests.lib.random_waits import random_waits

SEEDS = range(3)
HOST = {
    "half on the host": (["optim.offload_fraction=0.5"], ROWS),
    "all on the host": (["optim.offload_fraction=1", "parallel.reshard_after_forward=yes"], 4),
}
GRAPHS = {"graphs": ([ON], ROWS), "graphs, moments": ([ON, *CASES["moments"][0]], 4)}
ONE_GPU = CASES | HOST | GRAPHS
SEVERAL_GPUS = RANKS_GPU | {
    "turns": (["parallel.reshard_after_forward=yes", "parallel.fsdp_transport=copy"], 2),
    "turns by collectives": (
        ["parallel.reshard_after_forward=yes", "parallel.fsdp_transport=nccl"],
        2,
    ),
    "copies, host": ([*HOST["half on the host"][0], "parallel.fsdp_transport=copy"], 4),
    "experts": (["parallel.ep=2", "moe.dispatcher=alltoall"], 4),
    "pipeline": (["parallel.pp=2"], 2),
}


def offloaded_between(engine, step):
    """Do what ``look_between`` does, and offload and reload all state."""
    look_between(engine, step)
    if step in (1, 4):
        engine.offload()
        engine.reload()


def steps_of(words, micro):
    """Return losses and norms of eight steps, and the weights after them."""
    engine = make_engine(*words, micro=micro)
    between = look_between if "compile.cuda_graphs=yes" in words else offloaded_between
    return run_steps(engine, micro, between), weights_of(engine)


def check_steps(words, micro):
    """Check that delayed steps have the bits of undelayed ones; return the number of delays."""
    numbers, weights = steps_of(words, micro)
    total = 0
    for seed in SEEDS:
        with random_waits(seed) as counts:
            found, mine = steps_of(words, micro)
        assert found == numbers, f"seed {seed}"
        for name, weight in weights.items():
            assert torch.equal(mine[name], weight), f"seed {seed}: {name}"
        total += sum(counts.values())
    return total


@pytest.mark.tier("long")
@pytest.mark.parametrize("case", HOST)
def test_late_threads_change_no_bit(case):
    assert check_steps(*HOST[case]) > 0


def test_late_threads_are_found_where_nobody_waits():
    """The fuzzer finds a task whose end nobody waits for."""

    def unawaited():
        box = []
        with ThreadPoolExecutor(1) as pool:
            pool.submit(box.append, 1)
            return list(box)

    found = []
    for seed in range(8):
        with random_waits(seed, share=1.0):
            found.append(unawaited())
    assert [] in found


@pytest.mark.gpu
def test_late_streams_are_found_where_nobody_waits():
    """The fuzzer finds a copy on a side stream that does not wait for its source."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def copied(waits):
        source, target = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            target.copy_(source + 1)
        if waits:
            main.wait_stream(side)
        answer = target.sum()
        torch.cuda.synchronize()
        return answer.item()

    wrong = 0
    for seed in range(8):
        with random_waits(seed, share=1.0) as counts:
            assert copied(True) == 1 << 20
            wrong += copied(False) != 1 << 20
        assert counts["stream"] > 2
    assert wrong > 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", ONE_GPU)
def test_late_streams_change_no_bit_on_a_gpu(case):
    words, micro = ONE_GPU[case]
    words = [*GPU, "train.deterministic=yes", "compile.enabled=no", *words]
    assert check_steps(words, micro) > 0 or case in GRAPHS


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", SEVERAL_GPUS)
def test_late_streams_change_no_bit_on_gpus(case):
    words, micro = SEVERAL_GPUS[case]
    if "moe.dispatcher=deepep" in words:
        pytest.importorskip("deep_ep")
    words = [*GPU, "compile.enabled=no", *words]
    assert all(spawn(2, check_steps, words, micro, device_type="cuda", timeout=180))


@pytest.mark.gpu
def test_saves_behind_late_streams_hold_their_step(tiny_words, tmp_path):
    """Checkpoints are written in the background, with evaluations and samples in between."""
    words = [*tiny_words, "train.device=cuda", "train.steps=8", "train.eval_interval=3"]
    words += ["model.hidden_size=64", "model.head_dim=16", "model.moe_intermediate_size=32"]
    words += ["checkpoint.interval=1", "checkpoint.keep=9", "checkpoint.asynchronous=yes"]
    words += ["optim.offload_fraction=0.5"]

    def fit(name):
        run = [*words, f"output_dir={tmp_path / name}"]
        Trainer(Config.load(None, run, environ={})).fit()
        folders = sorted((tmp_path / name / "checkpoints").glob("step-*"))
        return numbers_of(tmp_path / name), [tensors_of(folder) for folder in folders]

    numbers, states = fit("plain")
    with random_waits(0):
        found, mine = fit("late")
    assert found == numbers
    assert len(mine) == len(states) == 8
    for step, (theirs, ours) in enumerate(zip(states, mine, strict=True)):
        for group, tensors in theirs.items():
            for name, tensor in tensors.items():
                assert torch.equal(ours[group][name], tensor), (step, group, name)
