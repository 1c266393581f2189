"""FSDP over copy engines gives the bits of FSDP over collectives, whatever comes in between.

On CPUs the memory that ranks share is a file's, and copies are done at once: all but the order of
streams is the same. ``gpu`` tests have the rest.
"""

import contextlib
from unittest.mock import patch

import pytest
import torch
from distributed import spawn
from test_engine import make_batches, make_engine, objective_of

from moetrain.parallel.fsdp import FSDP

# Nothing that any number of ranks divides: shards are uneven, and some are empty.
BASE = ["train.dtype=bfloat16", "model.num_experts=6", "model.num_layers=3"]
MICRO = 2  # rows of 8: several micro-batches a step
RUNS = {
    2: {
        "dp": [],
        "fp32": ["train.dtype=float32"],
        "recompute": ["activation.policy=full"],
        "last": ["parallel.reduce_at=last", "parallel.reshard_after_forward=yes"],
        "sums in fp32": ["parallel.reduce=fp32"],
        "sums in bf16": ["parallel.reduce=bf16"],
        "adapters": ["lora.rank=8", "moe.bias_update_rate=0"],
        "tp": ["parallel.tp=2"],
        "on the host": ["optim.offload_fraction=0.5"],
    },
    4: {
        "dp": [],
        "reshard": ["parallel.reshard_after_forward=yes"],
        "last": ["parallel.reduce_at=last"],
        "ep": ["parallel.ep=2"],
        "ep reshard": ["parallel.ep=2", "parallel.reshard_after_forward=yes"],
        "adapters": ["lora.rank=8", "moe.bias_update_rate=0", "parallel.ep=2"],
        "hsdp": ["parallel.dp_replicate=2"],
        "pp": ["parallel.pp=2", "model.num_layers=4"],
    },
}
GPU = [
    "train.device=cuda",
    "train.deterministic=yes",
    "model.hidden_size=128",
    "model.num_heads=4",
    "model.head_dim=32",
    "model.moe_intermediate_size=64",
]


def tell(words, steps=2):
    """What an engine is after each part of a long story, by the part's name."""
    engine, found = make_engine(*BASE, *words, micro=MICRO), {}
    world = engine.world

    def keep(name, tensors):
        copies = {key: x.detach().to("cpu", copy=True) for key, x in tensors.items()}
        found[f"{len(found)}: {name}"] = copies

    def batches(number):
        of_rank = make_batches(number, MICRO, world.data_rank, world.dims.data_ranks)
        return [on_device(batch, world.device) for batch in of_rank]

    def learn(number):
        keep("loss", {"": engine.forward_backward(batches(number), objective_of(engine)).total})

    def evaluate():
        with torch.inference_mode():
            keep("held out", {"": engine.forward(batches(80), objective_of(engine)).total})

    def step(name):
        outcome = engine.step(1e-2)
        assert not outcome.skipped
        engine.fsdp.settle()
        keep(name, {"norm": outcome.grad_norm, **locals_of(engine)})

    evaluate()
    learn(0)
    engine.fsdp.gradient_norm()
    gradients = {name: x.grad for name, x in locals_of(engine).items() if x.grad is not None}
    assert gradients
    keep("gradients", gradients)
    engine._forget()
    for number in range(steps):
        learn(2 * number)
        learn(2 * number + 1)
        step("plain")
    learn(40)
    engine.offload()
    engine.reload()
    step("updated with nothing gathered")
    evaluate()
    state = {name: weight.clone() for name, weight in engine.weights()}
    for name in list(engine.fsdp.members)[::2]:  # behind the optimizer's back
        engine.fsdp.write(name, (), 1.5 * state[name])
    evaluate()
    learn(50)
    step("written")
    for method in ("reduce", "run") if world.dims.pp == 1 else ():  # stages would wait for stages
        with failing_at_its_third_call(method), pytest.raises(ZeroDivisionError):
            learn(60)
    with engine.work():  # two at once gather once
        learn(61)
        evaluate()
    step("failed before")
    engine.load_state({"model": {name: state[name] for name in engine.stages.saved}})
    evaluate()
    learn(70)
    step("loaded")
    return engine, found


def on_device(batch, device):
    return type(batch)(*(x if x is None else x.to(device) for x in batch))


def locals_of(engine):
    return {name: member.local for name, member in engine.fsdp.members.items()}


@contextlib.contextmanager
def failing_at_its_third_call(method):
    """Of FSDP's, with copies under way."""
    original, calls = getattr(FSDP, method), []

    def failing(*args, **kwargs):
        calls.append(method)
        if len(calls) == 3:
            raise ZeroDivisionError
        return original(*args, **kwargs)

    with patch.object(FSDP, method, failing):
        yield
    assert len(calls) == 3


def differences(runs, steps=2):
    """Where copies give other bits than collectives; which buckets they have carried."""
    differ, carried = [], {}
    for name, words in runs.items():
        torch.compiler.reset()
        _, expected = tell([*words, "parallel.fsdp_transport=nccl"], steps)
        engine, found = tell([*words, "parallel.fsdp_transport=copy"], steps)
        assert list(found) == list(expected)
        for part, tensors in expected.items():
            assert tensors.keys() == found[part].keys()
            for key, tensor in tensors.items():
                if not torch.equal(found[part][key], tensor):
                    differ.append(f"{name}: {part}: {key}")
        buckets = [b for b in engine.fsdp.buckets if b.group.size() > 1]
        carried[name] = (len(engine.fsdp.engines.buckets), len(buckets))
    return differ, carried


def check(world, more=(), **kwargs):
    runs = {name: [*more, *words] for name, words in RUNS[world].items()}
    for differ, carried in spawn(world, differences, runs, **kwargs):
        assert not differ
        for name, (number, travelling) in carried.items():
            assert number > 0
            assert (number == travelling) == (name != "on the host"), name


@pytest.mark.parametrize("world", RUNS)
def test_copies_give_the_bits_of_collectives(world):
    check(world, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("world", RUNS)
def test_copies_give_the_bits_of_collectives_on_gpus(world):
    check(world, GPU, device_type="cuda", timeout=500)
