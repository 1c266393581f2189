"""DeepEP on gloo, over a fake of its package. ``test_deepep_gpu.py`` tests the package itself.

The all-to-all is the reference: one layer of experts runs both transports on the same tokens, and
the outputs and the gradients of tokens, routing weights and experts must agree.
"""

import re
import sys
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from moetrain.config import Config, ConfigError
from moetrain.kernels.experts import deepep as package
from moetrain.kernels.experts.deepep import disconnect
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.parallel import apply
from moetrain.parallel.apply import choose_dispatcher
from moetrain.parallel.expert import deepep
from moetrain.parallel.expert.deepep import DeepEP, DeepEPInside, StaticSizes, why_not
from moetrain.parallel.expert.dispatch import AllToAll
from moetrain.parallel.mesh import ParallelDims, build_meshes
from moetrain.train.loop import Trainer
from tests.lib import fake_deep_ep, one_answer
from tests.lib.deepep_layers import use_fake
from tests.lib.distributed import spawn
from tests.lib.transports import (
    MAX_TOKENS,
    ROUTINGS,
    SMALL,
    assert_same,
    dispatchers,
    make_batch,
    make_experts,
    plainly,
    recomputed,
    run_layer,
    run_step,
    saving,
    static_sizes,
)

# The number of tokens on each rank.
EVEN, UNEVEN, ALL_ON_ONE, NONE = (6, 6, 6, 6), (0, 7, 1, 101), (0, 5, 0, 0), (0, 0, 0, 0)


def check_eager() -> None:
    ours, theirs = dispatchers(SMALL)
    experts = make_experts(SMALL)
    modes = (None, static_sizes(SMALL, capacity=4.0))
    for seed, (tokens, routing) in enumerate(product((EVEN, UNEVEN, ALL_ON_ONE, NONE), ROUTINGS)):
        batch = make_batch(SMALL, tokens[dist.get_rank()], routing, seed)
        want = run_step(partial(run_layer, theirs), batch, experts)
        for ours.static, how in product(modes, (plainly, saving)):
            got = run_step(partial(how, partial(run_layer, ours)), batch, experts)
            assert_same(got, want, 1e-6, (tokens, routing, ours.static, how.__name__))


def check_compiled() -> None:
    """Check that one graph serves every routing, in each mode and with each kind of
    recomputation."""
    ours, theirs = dispatchers(SMALL)
    experts = make_experts(SMALL)
    tokens = UNEVEN[dist.get_rank()]
    ways = [(None, plainly), (None, saving), (static_sizes(SMALL, capacity=4.0), recomputed)]
    for ours.static, how in ways if dist.get_world_size() == 2 else ways[2:]:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        run = torch.compile(partial(how, partial(run_layer, ours)), fullgraph=True, backend=counter)
        for step, routing in enumerate(ROUTINGS):
            batch = make_batch(SMALL, tokens, routing, step)
            want = run_step(partial(run_layer, theirs), batch, experts)
            fake_deep_ep.calls.clear()
            assert_same(run_step(run, batch, experts), want, 1e-6, (routing, how.__name__))
            assert_called_once(ours, how)
            assert counter.frame_count == 1, f"compiled again in step {step}, {routing}"
        assert not counters["graph_break"]


def assert_called_once(transport, how) -> None:
    """Assert that a backward neither waits nor dispatches again if the results are kept."""
    dispatches = fake_deep_ep.calls["dispatch"]
    waits = fake_deep_ep.calls.pop("wait", 0)
    assert waits == (dispatches if transport.static is None else 0)
    if how is recomputed:
        assert dispatches == 2
    else:
        once = {"dispatch": 1, "combine": 2, "cached dispatch": 1}
        assert dict(fake_deep_ep.calls) == once, (how.__name__, transport.static)


def check_calls() -> None:
    """Check all modes, compiled or not, except those that :func:`check_compiled` compiles."""
    use_fake()
    ours, _ = dispatchers(SMALL)
    experts = make_experts(SMALL)
    batch = make_batch(SMALL, 9, "natural", 0)
    for ours.static, how, compiled in product(
        (None, static_sizes(SMALL, capacity=4.0)), (plainly, saving, recomputed), (False, True)
    ):
        if compiled and (ours.static is None) == (how is not recomputed):
            continue
        run = partial(how, partial(run_layer, ours))
        if compiled:
            torch._dynamo.reset()
            run = torch.compile(run, fullgraph=True, backend="aot_eager")
        run_step(run, batch, experts)
        fake_deep_ep.calls.clear()
        run_step(run, batch, experts)
        assert_called_once(ours, how)


def check_fast_kernels() -> None:
    """Check that the kernels do not read uninitialised memory either."""
    use_fake()
    ours, theirs = dispatchers(SMALL)
    ours.backend = "triton"
    ours.static = static_sizes(SMALL, max_tokens=9)
    batch = make_batch(SMALL, 9 - 4 * dist.get_rank(), "natural", 0)
    experts = make_experts(SMALL)
    want = run_step(partial(run_layer, theirs), batch, experts)
    got = run_step(partial(run_layer, ours, backend="triton"), batch, experts)
    assert_same(got, want, 1e-6, "triton")


def check_overflow() -> None:
    """Check that rows that do not fit are counted, and written nowhere."""
    ours, _ = dispatchers(SMALL)
    experts = make_experts(SMALL)
    batch = make_batch(SMALL, MAX_TOKENS, "first half empty", 0)
    ours.static = static_sizes(SMALL, capacity=1.0)
    run_step(partial(run_layer, ours), batch, experts)
    received = ours.send(*batch[:3])
    assert received.num_rows == MAX_TOKENS * SMALL.top_k
    local = SMALL.experts // ours.num_ranks
    indices = expert_indices(received.ids_SK, local, num_rows=received.num_rows)
    overloaded = dist.get_rank() >= ours.num_ranks // 2
    assert (indices.counts_E.sum() > received.num_rows) == overloaded
    dropped = ours.dispatch(*batch[:3]).dropped
    assert dropped == (indices.counts_E.sum() - received.num_rows).clamp(min=0)
    with pytest.raises(ValueError, match=f"{MAX_TOKENS + 1} tokens.*planned for {MAX_TOKENS}"):
        ours.send(*make_batch(SMALL, MAX_TOKENS + 1, "empty", 0)[:3])


def check_order_and_sharing() -> None:
    """Check that tokens arrive by source rank and in order; each size of buffer is made once."""
    fake_deep_ep.calls.clear()
    disconnect()
    transports = [DeepEP(8, dist.group.WORLD, 24, num_sms=4) for _ in range(3)]
    assert fake_deep_ep.calls["buffer"] == 1
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = 3 + rank
    x_TD = (1000 * rank + torch.arange(tokens).float())[:, None].expand(tokens, 24)
    everywhere = torch.arange(8, dtype=torch.int32).expand(tokens, 8)
    received = transports[1].send(x_TD, everywhere, torch.ones(tokens, 8))
    want = torch.cat([1000 * r + torch.arange(3 + r).float() for r in range(world)])
    assert torch.equal(received.x_SD, want[:, None].expand(-1, 24))
    assert received.num_rows == len(want) * 8 // world
    disconnect()


def check_everything() -> None:
    use_fake()
    check_eager()
    check_compiled()
    check_overflow()
    check_order_and_sharing()


@pytest.mark.tier("wide", long=["2"])
@pytest.mark.parametrize("world", [2, 4])
def test_deepep_equals_the_all_to_all(world):
    spawn(world, check_everything, timeout=400.0)


@pytest.mark.tier("long")
def test_backward_neither_waits_nor_dispatches_again():
    spawn(2, check_calls, timeout=200.0)


def residual(dispatcher, x_TD, *rest) -> torch.Tensor:
    """A residual layer, whose surroundings the compiler makes itself, and drops without tokens."""
    return x_TD + 2 * run_layer(dispatcher, 3 * x_TD, *rest)


def check_under_inductor() -> None:
    """Check that the compiler keeps the collectives of a rank without tokens."""
    use_fake()
    ours, theirs = dispatchers(SMALL)
    experts = make_experts(SMALL)
    for ours.static in (None, static_sizes(SMALL, capacity=4.0)):
        run = partial(residual, ours)
        run = torch.compile(run, fullgraph=True) if dist.get_rank() == 0 else run
        for step in range(2):
            batch = make_batch(SMALL, 5 * dist.get_rank(), "natural", step)
            want = run_step(partial(residual, theirs), batch, experts)
            assert_same(run_step(run, batch, experts), want, 1e-6, ours.static)


@pytest.mark.tier("long")
def test_a_rank_without_tokens_under_inductor():
    spawn(2, check_under_inductor, timeout=300.0)


@pytest.mark.tier("long")
def test_deepep_with_fast_kernels():
    spawn(2, check_fast_kernels, timeout=120.0)


# ---- availability -------------------------------------------------------------------------------

SIZES = {"num_experts": 128, "num_experts_per_token": 8, "hidden_size": 2048}
ARCH: Any = SimpleNamespace(**SIZES, sent_size=2048)
GPU, BF16 = torch.device("cuda"), torch.bfloat16


@pytest.mark.parametrize(
    ("change", "ranks", "device", "dtype", "reason"),
    [
        ({}, 3, GPU, BF16, "parallel.ep is 3.*takes 2, 4 or 8"),
        ({}, 8, torch.device("cpu"), BF16, "CUDA devices.*on cpu"),
        ({}, 8, GPU, torch.float32, "bfloat16.*computes in float32"),
        (
            {"hidden_size": 2056, "sent_size": 2056},
            8,
            GPU,
            BF16,
            "hidden_size is 2056.*multiples of 16",
        ),
        ({"hidden_size": 8192, "sent_size": 8192}, 8, GPU, BF16, "hidden_size is 8192.*up to 8176"),
        ({"sent_size": 1016}, 8, GPU, BF16, "moe_latent_size is 1016.*multiples of 16"),
        ({"num_experts_per_token": 33}, 8, GPU, BF16, "to 33 experts.*up to 32"),
        ({"num_experts": 384}, 2, GPU, BF16, "a rank has 192 experts.*up to 128"),
        ({}, 8, GPU, BF16, "not installed.*pip install tokenspeed-deepep=="),
    ],
)
def test_why_not_names_the_value_and_the_limit(monkeypatch, change, ranks, device, dtype, reason):
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: None)
    arch: Any = SimpleNamespace(**{**vars(ARCH), **change})
    assert re.search(reason, deepep.why_not_here(arch, ranks, device, dtype) or "no reason")


def test_a_package_that_does_not_load_is_an_import_error_with_a_remedy(monkeypatch, tmp_path):
    (tmp_path / "deep_ep.py").write_text("assert False, 'another NCCL is loaded'")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"another NCCL is loaded.*pip install tokenspeed-deepep"):
        package.load_deep_ep()


def check_agreement() -> None:
    use_fake()
    group = dist.group.WORLD
    assert why_not(ARCH, group, GPU, BF16) is None
    if dist.get_rank() == 1:
        del sys.modules["deep_ep"]
    assert "not installed" in (why_not(ARCH, group, GPU, BF16) or "")
    with patch("socket.gethostname", lambda: f"machine-{dist.get_rank()}"):
        assert "2 machines" in (why_not(ARCH, group, GPU, BF16) or "")
    with patch.object(Path, "read_text", lambda _: f"start {dist.get_rank()}"):  # of one image
        assert "2 machines" in (why_not(ARCH, group, GPU, BF16) or "")


def check_one_rank_a_machine(choose, lines: list[str]) -> None:
    """Check that the package makes no buffer if each machine has one rank."""
    dims = ParallelDims(2, dp_shard=2, ep=2, per_machine=1)
    hops = build_meshes(dims, "cpu").expert_hops
    buffers = fake_deep_ep.calls["buffer"]
    assert type(choose(hops=hops)) is AllToAll
    reason = "a machine has 1 of parallel.ep's ranks, but DeepEP takes 2, 4 or 8"
    assert reason in lines[-1]
    with pytest.raises(ConfigError, match=f"DeepEP cannot run: {reason}"):
        choose("moe.dispatcher=deepep", hops=hops)
    assert fake_deep_ep.calls["buffer"] == buffers


def check_machines() -> None:
    """Check that DeepEP joins both ranks of a machine."""
    use_fake()
    lines: list[str] = []
    apply.logger.info = lambda text, *args: lines.append(text % args)
    config = Config.load(None, ["parallel.ep=4", "moe.dispatcher=deepep", "moe.deepep_num_sms=28"])
    dims = ParallelDims(4, dp_shard=4, ep=4, per_machine=2)
    hops = build_meshes(dims, "cpu").expert_hops
    group = dist.group.WORLD
    choose = partial(choose_dispatcher, config, ARCH, group, GPU, BF16)
    chosen, _ = choose(hops)
    assert isinstance(chosen, DeepEPInside)
    assert (chosen.num_sms, chosen.hops) == (28, hops)
    assert (
        "tokens reach other ranks of a machine by DeepEP on 28 SMs, with exact sizes" in lines[-1]
    )
    names = [f"machine-{dist.get_rank() // 2}", f"machine-{dist.get_rank() % 2}"]
    with patch("socket.gethostname", lambda: names[0]):
        assert why_not(ARCH, group, GPU, BF16, inside=hops.inside) is None
        assert "the 4 expert parallel ranks are on 2" in (why_not(ARCH, group, GPU, BF16) or "")
    with (
        patch("socket.gethostname", lambda: names[1]),
        pytest.raises(
            ConfigError, match=r"the 2 .* of a machine \(launch.gpus_per_machine\) are on 2"
        ),
    ):
        choose(hops)
    disconnect()


def test_deepep_joins_the_ranks_of_a_machine():
    spawn(4, check_machines)


def check_choice() -> None:
    use_fake()
    lines: list[str] = []
    apply.logger.info = lambda text, *args: lines.append(text % args)

    def choose(*overrides: str, device=GPU, hops=None) -> Any:
        words = [*overrides, "data.seq_len=64", "train.micro_batch_size=2", "parallel.ep=2"]
        config = Config.load(None, words)
        return choose_dispatcher(config, ARCH, dist.group.WORLD, device, BF16, hops)[0]

    chosen = choose("moe.deepep_num_sms=28")
    assert isinstance(chosen, DeepEP)
    assert (chosen.num_sms, chosen.static) == (28, None)
    assert "DeepEP on 28 SMs" in lines[-1]
    chosen = choose("moe.dispatcher=deepep", "moe.dispatch_mode=static", "moe.static_capacity=1.5")
    assert chosen.num_sms == deepep._AUTO_NUM_SMS[2]
    assert chosen.static == (128, 128 * 8 * 3 // 2)
    small_gpu = SimpleNamespace(multi_processor_count=33)
    with (
        patch.object(torch.cuda, "is_available", return_value=True),
        patch.object(torch.cuda, "get_device_properties", return_value=small_gpu),
    ):
        assert choose("moe.deepep_num_sms=auto").num_sms == 32
        with pytest.raises(ConfigError, match=r"moe.deepep_num_sms: 48, but this GPU has 33 SMs"):
            choose("moe.deepep_num_sms=48")
    assert isinstance(choose("moe.dispatcher=alltoall"), AllToAll)
    assert "all-to-all: moe.dispatcher asks" in lines[-1]
    cpu = torch.device("cpu")
    assert isinstance(choose(device=cpu), AllToAll)
    assert "all-to-all: DeepEP takes CUDA devices" in lines[-1]
    check_one_rank_a_machine(choose, lines)
    for name, value in (("dispatcher", "deepep"), ("dispatch_mode", "static")):
        with pytest.raises(ConfigError, match=f"moe.{name}: '{value}', but DeepEP cannot run: Dee"):
            choose(f"moe.{name}={value}", device=cpu)
    with pytest.raises(ConfigError, match=r"moe.deepep_num_sms: 24, but DeepEP cannot run: Deep"):
        choose("moe.deepep_num_sms=24", device=cpu)
    with pytest.raises(ConfigError, match=r"dispatch_mode: 'static' contradicts moe.dispatcher 'a"):
        choose("moe.dispatch_mode=static", "moe.dispatcher=alltoall", device=cpu)
    disconnect()


def check_agreement_and_choice() -> None:
    check_choice()
    check_agreement()


def test_ranks_agree_on_a_transport():
    spawn(2, check_agreement_and_choice)


@pytest.mark.parametrize(
    ("capacity", "top_k", "rows"), [(2.0, 8, 1600), (1.001, 3, 301), (9.0, 8, 3200), (4, 24, 6400)]
)
def test_static_sizes_plan_rows_of_an_even_load(capacity, top_k, rows):
    """They are a multiple of an even load, at most all ranks' choices of 16 local experts."""
    sizes = StaticSizes.plan(100, capacity=capacity, num_experts=64, top_k=top_k, ranks=4)
    assert sizes == (100, rows)


def train_by_deepep(words: list[str]) -> tuple[Any, dict[str, torch.Tensor], int]:
    """Return a run's losses, gradients and final count of repeated steps."""
    use_fake()
    apply.why_not = lambda *_, **__: None
    trainers: list[Trainer] = []
    one_answer.Trainer = lambda config: trainers.append(Trainer(config)) or trainers[-1]
    numbers, gradients, _ = one_answer.run(words)
    return numbers, gradients, trainers[0].engine.passes.num_retried


@pytest.mark.tier("long")
def test_a_step_that_overflows_is_done_again_and_nothing_is_lost(tiny_words):
    words = one_answer.words_of(tiny_words, "train.micro_batch_size=4")
    numbers, gradients, _ = one_answer.run(words)
    words += ["parallel.ep=2", "train.micro_batch_size=2", "moe.dispatch_mode=static"]
    for capacity, retried in (("1.0", True), ("2.0", False)):  # 2.0 is room for everything
        answers = spawn(2, train_by_deepep, [*words, f"moe.static_capacity={capacity}"])
        got, mine, count = answers[0]
        assert (count > 0) == retried
        torch.testing.assert_close(got, numbers, rtol=1e-5, atol=0)
        for name, gradient in gradients.items():
            assert (mine[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def gradients_of_two_calls(words: list[str]) -> tuple[dict[str, torch.Tensor], int]:
    """Return gradients of a step with micro-batches in two calls, and the number of repeats."""
    use_fake()
    apply.why_not = lambda *_, **__: None
    trainer = Trainer(Config.load(None, words, environ={}))
    engine, batches = trainer.engine, trainer.loader.next_step()
    for part in (batches[:1], batches[1:]):
        engine.forward_backward(part, trainer.objective)
    engine.fsdp.gradient_norm()
    members = engine.fsdp.members.items()
    gradients = {name: m.layout.whole(m.local.grad).clone() for name, m in members}
    assert not engine.step(1e-3).skipped  # it adds up the routing of both calls, exact and not
    return gradients, engine.passes.num_retried


@pytest.mark.tier("long")
def test_a_call_that_overflows_loses_nothing_of_the_call_before(tiny_words):
    words = one_answer.words_of(tiny_words, "train.micro_batch_size=2")
    words += ["parallel.ep=2", "moe.dispatch_mode=static"]
    answers = {
        capacity: spawn(2, gradients_of_two_calls, [*words, f"moe.static_capacity={capacity}"])[0]
        for capacity in ("1.0", "2.0")
    }
    assert [retried for _, retried in answers.values()] == [1, 0]
    tight, roomy = (gradients for gradients, _ in answers.values())
    for name, gradient in roomy.items():
        assert (tight[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
