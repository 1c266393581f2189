"""DeepEP itself, on GPUs; the all-to-all is the reference, as in test_deepep.py."""

import importlib.util
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moetrain.kernels.experts.deepep import INSTALL, disconnect
from moetrain.parallel.expert.deepep import DeepEP, DeepEPInside, StaticSizes, why_not
from moetrain.parallel.expert.dispatch import AllToAll
from moetrain.parallel.mesh import ParallelDims, build_meshes
from moetrain.runtime.ahead import prepare_compiler
from tests.lib import one_answer
from tests.lib.distributed import spawn
from tests.lib.transports import (
    LARGE,
    ROUTINGS,
    assert_same,
    dispatchers,
    make_batch,
    make_experts,
    plainly,
    recomputed,
    run_layer,
    run_narrow,
    run_step,
    saving,
    static_sizes,
)

BF16 = torch.bfloat16
ROUNDED_TWICE = 2**-7  # ours to bf16, and the reference's: at most 2**-8 of the largest value each
GPU_TOKENS = 512
GPU_STEPS = 50


def gpu_setup() -> tuple[DeepEP, Any, list[torch.Tensor]]:
    device = torch.device("cuda", dist.get_rank())
    arch: Any = SimpleNamespace(
        num_experts=LARGE.experts,
        num_experts_per_token=LARGE.top_k,
        hidden_size=LARGE.width,
        sent_size=LARGE.width,
    )
    prepare_compiler()
    assert why_not(arch, dist.group.WORLD, device, BF16) is None
    return *dispatchers(LARGE, num_sms="auto"), make_experts(LARGE, device, BF16)


def gpu_static(capacity: float) -> StaticSizes:
    return static_sizes(LARGE, capacity, GPU_TOKENS)


def check_steps(run, compiled: bool, judge, experts, tolerance: float, case: Any) -> None:
    """Check that ``run`` equals ``judge``, whatever the numbers of tokens and the routing."""
    torch._dynamo.reset()
    if compiled:
        run = torch.compile(run, fullgraph=True)
    rank = dist.get_rank()
    for step in range(GPU_STEPS):
        # Code is compiled for a rank's number of tokens: none, one, and many.
        tokens = (0, GPU_TOKENS, 1, 300)[(rank if compiled else rank + step) % 4]
        routing = ROUTINGS[step % len(ROUTINGS)]
        batch = make_batch(LARGE, tokens, routing, step, f"cuda:{rank}", BF16)
        want = run_step(judge, batch, experts)
        got = run_step(run, batch, experts)
        assert_same(got, want, tolerance, (case, compiled, step, routing, tokens))


def check_on_gpus() -> None:
    ours, theirs, experts = gpu_setup()
    modes = (None, gpu_static(float(dist.get_world_size())))
    ways = (plainly, recomputed, saving)
    for how, compiled, ours.static in product(ways, (False, True), modes):
        run = partial(how, partial(run_layer, ours))
        case = (how.__name__, ours.static)
        judge = partial(run_layer, theirs)
        check_steps(run, compiled, judge, experts, ROUNDED_TWICE, case)
    disconnect()


def check_narrow_on_gpus() -> None:
    """Check that rows sent in e4m3 equal those that e4m3 experts quantise themselves."""
    _, theirs, experts = gpu_setup()
    ours = DeepEP(LARGE.experts, dist.group.WORLD, LARGE.width, precision="fp8")
    for compiled, ours.static in product(
        (False, True), (None, gpu_static(float(dist.get_world_size())))
    ):
        run, judge = (partial(run_narrow, dispatcher) for dispatcher in (ours, theirs))
        case = ("fp8", ours.static)
        check_steps(run, compiled, judge, experts, ROUNDED_TWICE, case)
    disconnect()


def check_nothing_waits() -> None:
    ours, _, experts = gpu_setup()
    ours.static = gpu_static(float(dist.get_world_size()))
    batch = make_batch(LARGE, GPU_TOKENS, "natural", 0, f"cuda:{dist.get_rank()}", BF16)
    run = partial(run_layer, ours)
    for compiled in (False, True):
        if compiled:
            run = torch.compile(run, fullgraph=True)
        run_step(run, batch, experts)  # compiles kernels
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                run_step(run, batch, experts)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    disconnect()


def check_memory() -> None:
    """Check that a step leaves no memory allocated, in torch or outside."""
    ours, _, experts = gpu_setup()
    run = partial(recomputed, partial(run_layer, ours))
    device = f"cuda:{dist.get_rank()}"
    batch = make_batch(LARGE, GPU_TOKENS, "natural", 0, device, BF16)
    held = []
    for step in range(200):
        ids_TK = make_batch(LARGE, GPU_TOKENS, "natural", step, device, BF16).ids_TK
        batch.ids_TK.copy_(ids_TK)
        del ids_TK
        run_step(run, batch, experts)
        free, total = torch.cuda.mem_get_info()
        beside = total - free - torch.cuda.memory_reserved()
        held.append((torch.cuda.memory_allocated(), beside))
    allocated, beside = zip(*held[20:], strict=True)
    assert set(allocated) == {allocated[0]}
    assert beside[-1] <= 1.05 * beside[0], beside
    disconnect()


@pytest.mark.gpu("world")
@pytest.mark.parametrize(
    "check",
    [
        check_on_gpus,
        check_narrow_on_gpus,
        check_nothing_waits,
        pytest.param(check_memory, marks=pytest.mark.alone),
    ],
)
@pytest.mark.parametrize("world", [2, 4])
def test_deepep_on_gpus(world, check):
    if importlib.util.find_spec("deep_ep") is None:
        pytest.skip(f"needs deep_ep: {INSTALL}")
    spawn(world, check, device_type="cuda", timeout=500.0)


def check_machines_on_gpus() -> None:
    """Check four GPUs as two machines of two, joined by DeepEP: the bits of one hop."""
    *_, experts = gpu_setup()
    dims = ParallelDims(4, dp_shard=4, ep=4, per_machine=2)
    hops, group = build_meshes(dims, "cuda").expert_hops, dist.group.WORLD
    for how in ({}, {"precision": "fp8"}):
        flat, plain = (AllToAll(LARGE.experts, group, hops=x, **how) for x in (None, hops))
        inside = DeepEP(LARGE.experts // 2, hops.inside, LARGE.width, **how)
        near = DeepEPInside(inside, LARGE.experts, group, hops=hops, **how)
        layer = run_narrow if how else run_layer
        for ours, compiled in product((plain, near), (False, True)):
            judge, case = partial(layer, flat), (type(ours).__name__, how)
            judge = torch.compile(judge, fullgraph=True) if compiled else judge
            check_steps(partial(layer, ours), compiled, judge, experts, 0.0, case)
    disconnect()


@pytest.mark.gpu(4)
def test_deepep_over_machines_on_gpus():
    if importlib.util.find_spec("deep_ep") is None:
        pytest.skip(f"needs deep_ep: {INSTALL}")
    spawn(4, check_machines_on_gpus, device_type="cuda", timeout=500.0)


PACKED = ["model.hidden_size=256", "model.head_dim=32", "model.num_kv_heads=2", "model.num_heads=4"]
PACKED += ["model.moe_intermediate_size=64", "model.num_experts=8", "data.seq_len=128"]
PACKED += ["train.device=cuda", "train.dtype=bfloat16", "train.micro_batch_size=2"]
PACKED += ["parallel.ep=2", "moe.aux_loss_scope=micro_batch", "train.global_batch_size=8"]


def train_packed(words, ways):
    """Return each transport's losses of three steps over packed documents, and first gradients."""
    answers = {}
    for name, how in ways.items():
        torch.compiler.reset()  # avoids counting another's graphs as recompilations
        answers[name] = one_answer.run([*words, *how])[:2]
    disconnect()
    return answers


@pytest.mark.gpu(2)
@pytest.mark.parametrize("compiled", ["no", "yes"])
def test_packed_documents_travel_as_by_the_all_to_all(compiled, tiny_words):
    """The run goes from text to an update, in exact and in fixed sizes, with uneven documents."""
    if importlib.util.find_spec("deep_ep") is None:
        pytest.skip(f"needs deep_ep: {INSTALL}")
    words = one_answer.words_of(tiny_words, *PACKED, f"compile.enabled={compiled}")
    deepep = "moe.dispatcher=deepep"
    ways = {
        "alltoall": ["moe.dispatcher=alltoall"],
        "exact": [deepep],
        "static": [deepep, "moe.dispatch_mode=static"],
        "tight": [deepep, "moe.dispatch_mode=static", "moe.static_capacity=1.0"],  # repeated
    }
    answers, _ = spawn(2, train_packed, words, ways, device_type="cuda", timeout=500)
    numbers, gradients = answers.pop("alltoall")
    for name, (found, mine) in answers.items():
        # A router's near ties differ in bf16, and so do a few tokens' experts.
        torch.testing.assert_close(found, numbers, rtol=0.02, atol=0, msg=name)
        for parameter, gradient in gradients.items():
            error = (mine[parameter] - gradient).norm() / gradient.norm()
            assert error < 0.1, f"{name}: {parameter} is off by {error:.1e}"
