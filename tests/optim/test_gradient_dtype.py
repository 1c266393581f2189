"""Gradients kept in bf16: each is a sum in fp32, rounded once, to nearest, when it is stored.

Each run is compared with a run with fp32 gradients on the same mesh: until the first rounding both
compute the same.
"""

import pytest
import torch
import torch.distributed as dist

from moetrain.jobs.shared import JobState, SharedEngine
from moetrain.parallel.fsdp.copies import TiedCopy
from tests.lib.distributed import spawn
from tests.lib.engines import (
    DENSE,
    ROWS,
    WORDS,
    make_batches,
    make_engine,
    objective_of,
    train,
    weights_of,
)
from tests.lib.updates import BF16, NARROW

LORA = ["lora.rank=8", "moe.bias_update_rate=0"]
TIED = "tied"
LAYOUTS = {
    1: {"one": [], "one bf16": [BF16], "adapters": LORA, TIED: []},
    2: {
        "dp": [],
        "dp bf16": [BF16],
        "ep": ["parallel.ep=2"],
        "tp+ep": ["parallel.tp=2", "parallel.ep=2"],
        "copy": ["parallel.fsdp_transport=copy"],
        "replicas": ["parallel.dp_replicate=2"],
        "adapters": LORA,
        f"{TIED} pp": ["parallel.pp=2"],
    },
    4: {
        "dp": [],
        "hsdp": ["parallel.dp_replicate=2"],
        "hsdp bf16": [BF16, "parallel.dp_replicate=2"],
        "hsdp+ep": ["parallel.dp_replicate=2", "parallel.ep=2"],
        "replicas": ["parallel.dp_replicate=4"],
        f"{TIED} pp": ["parallel.pp=2"],
        f"{TIED} pp+replicas": ["parallel.pp=2", "parallel.dp_replicate=2"],
    },
}
GPU = ["train.device=cuda", "train.deterministic=yes", "model.hidden_size=64"]
GPU += ["model.head_dim=32", "model.moe_intermediate_size=32"]
# With these settings, rounding cannot change the routing.
GPU += ["moe.force_balanced=yes", "moe.bias_update_rate=0"]
GPU_FP32 = [*GPU, "train.dtype=float32"]


def engine_of(name, words):
    """Return an engine whose ranks have one micro-batch each per step; stages have two."""
    base = [*WORDS, "moe.aux_loss_scope=global_batch"]
    if TIED in name:
        base, words = DENSE, [word for word in words if "moe" not in word]
    world = dist.get_world_size() if dist.is_initialized() else 1
    ranks = world // (2 if "tp" in name else 1)
    return make_engine(*words, base=base, micro=ROWS // ranks)


def learn(engine, step=0):
    """Add the gradients of a step's rows."""
    world = engine.world
    micro = engine.config.train.micro_batch_size
    batches = make_batches(step, micro, world.data_rank, world.dims.data_ranks)
    engine.forward_backward(batches, objective_of(engine))


def trained(engine):
    return [bucket for bucket in engine.fsdp.buckets if bucket.is_trained]


def completed(bucket, gradient_N):
    """Return ``gradient_N``, summed in fp32 over copies of the shard and rounded once."""
    wide_N = gradient_N.float()
    if (replicas := bucket.members[0].layout.replicas) is not None:
        dist.all_reduce(wide_N, group=replicas)
    for tied in (copies for copies in bucket.copies if isinstance(copies, TiedCopy)):
        theirs_N = torch.empty_like(wide_N)
        sent = dist.isend(wide_N, group=tied.group, group_dst=tied.rank)
        dist.recv(theirs_N, group=tied.group, group_src=tied.rank)
        sent.wait()
        wide_N = wide_N + theirs_N
    return wide_N.bfloat16()


def rounded(runs):
    """Return every run's whole gradients, norm, and the losses of a few more steps."""
    answers = {}
    for name, words in runs.items():
        wide, narrow = (engine_of(name, [*words, *more]) for more in ([], [NARROW]))
        learn(wide)
        learn(narrow)
        expected = []
        for ours, theirs in zip(trained(narrow), trained(wide), strict=True):
            assert ours.gradient_N.dtype == torch.bfloat16
            is_one_sum = "pp" not in name
            assert torch.equal(ours.gradient_N, theirs.gradient_N.bfloat16()) == is_one_sum, name
            expected.append(completed(ours, ours.gradient_N))
        norms = [engine.fsdp.gradient_norm().item() for engine in (wide, narrow)]
        for bucket, expected_N in zip(trained(narrow), expected, strict=True):
            assert torch.equal(bucket.gradient_N, expected_N), name
        found = {}
        for parameter, member in narrow.fsdp.members.items():
            if member.rule.trainable:
                assert member.parameter.grad.dtype == member.local.grad.dtype == torch.bfloat16
                found[parameter] = member.layout.whole(member.local.grad).to("cpu", copy=True)
        narrow.forget()
        micro = narrow.config.train.micro_batch_size
        answers[name] = (found, norms, train(narrow, range(3), micro))
    return answers


def check(world, runs, **kwargs):
    """Check that the ranks' gradients equal those of one process, up to rounding to bf16."""
    plain = {TIED: [], "adapters": LORA, "": []}
    exact = {}
    for kind, words in plain.items():
        more = GPU_FP32 if kwargs.get("device_type") == "cuda" else []
        engine = engine_of(kind, [*words, *more])
        learn(engine)
        norm = engine.fsdp.gradient_norm().item()
        members = {n: m for n, m in engine.fsdp.members.items() if m.rule.trainable}
        exact[kind] = ({n: m.local.grad.cpu() for n, m in members.items()}, norm)
        engine.forget()
        exact[kind] += (train(engine, range(3)),)
    ranks = [rounded(runs)] if world == 1 else spawn(world, rounded, runs, **kwargs)
    for name in runs:
        gradients, norm, numbers = next(e for kind, e in exact.items() if kind in name)
        tolerance = 2e-2 if BF16 in runs[name] else 2**-8
        seen = {}
        for rank in ranks:
            found, norms, losses = rank[name]
            for parameter, gradient in found.items():
                assert torch.equal(seen.setdefault(parameter, gradient), gradient)
                error = (gradient.float() - gradients[parameter]).norm()
                assert error <= tolerance * gradients[parameter].norm(), (name, parameter)
            assert norms == pytest.approx([norm, norm], rel=tolerance), name
            assert losses == ranks[0][name][2], name
            torch.testing.assert_close(losses, numbers, rtol=5 * tolerance, atol=0, msg=name)
        assert seen.keys() == gradients.keys(), name


@pytest.mark.tier("long", wide=["4"])
@pytest.mark.parametrize("world", LAYOUTS)
def test_bf16_gradients_are_rounded_fp32_sums(world):
    check(world, LAYOUTS[world], timeout=300)


@pytest.mark.gpu("world")
@pytest.mark.parametrize("world", LAYOUTS)
def test_bf16_gradients_are_rounded_fp32_sums_on_gpus(world):
    """On GPUs the kernels round."""
    runs = {
        name: [*words, *(GPU if BF16 in words else GPU_FP32)]
        for name, words in LAYOUTS[world].items()
        if name != "tp+ep"  # this model has too few heads
    }
    check(world, runs, device_type="cuda", timeout=400)


def gradients_of(engine):
    """Return the step's gradients so far, which stay."""
    return [bucket.gradient_N.clone() for bucket in trained(engine)]


def test_later_gradients_are_added_in_fp32_to_what_is_kept():
    engine, wide = engine_of("one", [NARROW]), engine_of("one", [])
    expected = None
    for step in range(3):
        learn(engine, step)
        learn(wide, step)
        new = gradients_of(wide)
        wide.forget()
        kept = (
            new if expected is None else [a.float() + b for a, b in zip(expected, new, strict=True)]
        )
        expected = [x_N.bfloat16() for x_N in kept]
        assert all(map(torch.equal, gradients_of(engine), expected))
    squares = sum(x_N.double().square().sum() for x_N in expected)
    assert engine.fsdp.gradient_norm().item() == pytest.approx(squares.sqrt().item(), rel=1e-6)


def test_micro_batches_that_wait_are_rounded_together():
    """Two micro-batches that are reduced separately are rounded twice, so their sums differ."""
    found = spawn(2, kept_at, timeout=60)
    for each, last, wide in found:
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(last, wide, strict=True))
        assert not any(map(torch.equal, each, last))


def kept_at():
    answers = []
    for words in (["each", NARROW], ["last", NARROW], ["last"]):
        at, *more = words
        engine = make_engine(f"parallel.reduce_at={at}", *more, micro=2)
        learn(engine)
        answers.append(gradients_of(engine))
    return answers


def test_step_uses_bf16_gradients_and_resumes_bit_for_bit():
    straight = engine_of("one", [NARROW])
    numbers = train(straight, range(4))
    assert numbers[1:] != train(engine_of("one", []), range(4))[1:]
    first, second = (engine_of("one", [NARROW]) for _ in range(2))
    train(first, range(2))
    state = first.state().items()
    second.load_state({g: {n: p.tensor.clone() for n, p in ps.items()} for g, ps in state})
    assert train(second, range(2, 4)) == numbers[2:]
    weights = weights_of(straight)
    for name, weight in weights_of(second).items():
        assert torch.equal(weight, weights[name]), name
    learn(second)
    second.since_step[-1].total.fill_(float("nan"))
    assert second.step(1e-2).skipped
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(second).items())
    assert train(second, [4]) == train(straight, [4])


def test_gradients_that_are_put_aside_come_back_as_they_are():
    one = engine_of("one", [NARROW, "lora.rank=8", "moe.bias_update_rate=0"])
    engine = SharedEngine(one.config, one.arch, one.world)
    job, other = JobState(), JobState()
    engine.activate(job)
    learn(engine)
    before = gradients_of(engine)
    engine.deactivate(job)
    engine.move_to_host(job)
    assert engine.is_between_steps
    kept = [x_N for name, x_N in job.tensors.items() if name.endswith(".gradient_N")]
    assert {x_N.dtype for x_N in kept} == {torch.bfloat16}
    engine.activate(other)
    learn(engine, 1)
    engine.deactivate(other)
    engine.activate(job)
    assert all(map(torch.equal, gradients_of(engine), before))
