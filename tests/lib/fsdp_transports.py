"""Long sequences of calls of an engine, and their bits over every transport of FSDP."""

import contextlib
from unittest.mock import patch

import pytest
import torch

from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.fsdp.transport.collectives import Collectives
from tests.lib.distributed import spawn
from tests.lib.engines import DENSE, WORDS, make_batches, make_engine, objective_of

# No number of ranks divides the sizes: shards are uneven, and some are empty.
BASE = ["train.dtype=bfloat16", "model.num_experts=6", "model.num_layers=3"]
STORED = ["optim.state_dtype=float8", "optim.weight_dtype=bfloat16"]
"""Matrices are stored as they are gathered; norms are fp32."""
TIED = ["model.preset=qwen3-0.6b"]
MICRO = 2  # rows of 8: several micro-batches a step
RUNS = {
    2: {
        "dp": [],
        "fp32, recompute": ["train.dtype=float32", "activation.policy=full"],
        "last": ["parallel.reduce_at=last", "parallel.reshard_after_forward=yes"],
        "kept in bf16": ["optim.gradient_dtype=bfloat16"],
        "adapters": ["lora.rank=8", "moe.bias_update_rate=0"],
        "tp": ["parallel.tp=2"],
        "on the host": ["optim.offload_fraction=0.5"],
        "stored in bf16": [*STORED, "parallel.reshard_after_forward=2"],
        "frozen, on the host": ["train.freeze=embed.*,*.wq.*", "optim.offload_fraction=0.5"],
    },
    4: {
        "dp": [],
        "reshard": ["parallel.reshard_after_forward=2"],
        "ep reshard": ["parallel.ep=2", "parallel.reshard_after_forward=yes"],
        "adapters": ["lora.rank=8", "moe.bias_update_rate=0", "parallel.ep=2"],
        "hsdp": ["parallel.dp_replicate=2"],
        "pp": ["parallel.pp=2", "model.num_layers=4"],
        "tied, in bf16": [*TIED, *STORED, "parallel.pp=2"],
        "in bf16, ep": [*STORED, "parallel.ep=2", "train.freeze=embed.*"],
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


def tell(words):
    """Return the engine's state after each part of a long sequence of calls, by the part's name."""
    words, base = [*BASE, *words], WORDS
    if is_tied := set(TIED) <= set(words):  # a model without experts
        words, base = [w for w in words if "expert" not in w and "moe" not in w], DENSE
    engine = make_engine(*words, micro=MICRO, base=base)
    assert engine.arch.tie_embeddings == is_tied
    found = {}
    world = engine.world

    def keep(name, tensors):
        copies = {key: x.detach().to("cpu", copy=True) for key, x in tensors.items()}
        found[f"{len(found)}: {name}"] = copies

    def batches(number):
        return make_batches(number, MICRO, world.data_rank, world.dims.data_ranks)

    def learn(number):
        keep("loss", {"": engine.forward_backward(batches(number), objective_of(engine)).total})

    def evaluate():
        with torch.inference_mode():
            keep("held out", {"": engine.forward(batches(80), objective_of(engine)).total})

    def step(name):
        outcome = engine.step(1e-2)
        assert not outcome.skipped
        engine.fsdp.settle()
        values = {name: member.read() for name, member in engine.fsdp.members.items()}
        keep(name, {"norm": outcome.grad_norm, **values})

    evaluate()
    learn(0)
    engine.fsdp.gradient_norm()
    gradients = {name: x.grad for name, x in locals_of(engine).items() if x.grad is not None}
    assert gradients
    keep("gradients", gradients)
    engine.forget()
    learn(0)
    learn(1)
    step("plain")
    learn(40)
    engine.offload()
    engine.reload()
    step("updated with nothing gathered")
    evaluate()
    state = {name: weight.clone() for name, weight in engine.weights()}
    for name in list(engine.fsdp.members)[::2]:  # without the optimizer's knowledge
        engine.fsdp.write(name, (), 1.5 * state[name])
    evaluate()
    learn(50)
    step("written")
    for method in (
        ("reduce", "unshard") if world.dims.pp == 1 else ()
    ):  # stages would wait for stages
        with failing_at_its_third_call(method), pytest.raises(ZeroDivisionError):
            learn(60)
    with engine.work():  # two contexts at once gather once
        learn(61)
        evaluate()
    step("failed before")
    engine.load_state({"model": {name: state[name] for name in engine.stages.saved}})
    evaluate()
    learn(70)
    step("loaded")
    return engine, found


def locals_of(engine):
    return {name: member.local for name, member in engine.fsdp.members.items()}


@contextlib.contextmanager
def failing_at_its_third_call(method):
    """Let a method of FSDP raise at its third call, while copies are in flight."""
    original, calls = getattr(FSDP, method), []

    def failing(*args, **kwargs):
        calls.append(method)
        if len(calls) == 3:
            raise ZeroDivisionError
        return original(*args, **kwargs)

    with patch.object(FSDP, method, failing):
        yield
    assert len(calls) == 3


def differences(transport, runs):
    """Return the bits that differ between ``transport`` and collectives, and how many buckets it
    carries in each run."""
    differ, carried = [], {}
    for name, words in runs.items():
        torch.compiler.reset()
        _, expected = tell([*words, "parallel.fsdp_transport=nccl"])
        engine, found = tell([*words, f"parallel.fsdp_transport={transport}"])
        assert list(found) == list(expected)
        for part, tensors in expected.items():
            assert tensors.keys() == found[part].keys()
            for key, tensor in tensors.items():
                if not torch.equal(found[part][key], tensor):
                    differ.append(f"{name}: {part}: {key}")
        carried[name] = sum(type(b.transport) is not Collectives for b in engine.fsdp.buckets)
    return differ, carried


def check(transport, world, more=(), **kwargs):
    runs = {name: [*more, *words] for name, words in RUNS[world].items()}
    for differ, carried in spawn(world, differences, transport, runs, **kwargs):
        assert not differ
        assert all(carried.values()), f"no bucket travels by {transport}: {carried}"
