"""Expert parallelism on gloo: each rank's tokens, gradients and experts equal one process's."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from moetrain.kernels.experts.permutation import permute, unpermute
from moetrain.parallel.expert.dispatch import AllToAll, Received
from tests.lib.distributed import spawn
from tests.lib.expert_layers import (
    ALL_ON_ONE,
    CONTEXT,
    EVEN,
    EXPERTS,
    FEW,
    NONE,
    ROUTINGS,
    TOP_K,
    UNEVEN,
    WIDTH,
    CountExchanges,
    check_step,
    local_experts,
    make_dispatcher,
    make_pair,
)


def check_eager() -> None:
    pair = make_pair()
    for seed, tokens in enumerate((EVEN, UNEVEN, ALL_ON_ONE, NONE)):
        for routing in ROUTINGS:
            for recompute in (False, True):
                check_step(pair, tokens, routing, seed, recompute)


def check_kernels() -> None:
    """Check the fast paths in Triton's interpreter."""
    pair = make_pair("triton")
    for seed, routing in enumerate(ROUTINGS):
        check_step(pair, FEW, routing, seed, recompute=False)


def check_compiled() -> None:
    ways = {2: [(False, "auto"), (True, "auto"), (False, "triton")], 4: [(True, "auto")]}
    for recompute, backend in ways[dist.get_world_size()]:
        torch._dynamo.reset()
        pair = make_pair(backend)
        counter = CompileCounterWithBackend("aot_eager")
        pair.mine.compile(fullgraph=True, backend=counter)
        tokens = UNEVEN if backend == "auto" else FEW
        for step, routing in enumerate(ROUTINGS):
            check_step(pair, tokens, routing, step, recompute)
            assert counter.frame_count == 1, f"compiled again in step {step}, {routing}"
        assert not counters["graph_break"]


def check_waits() -> None:
    """Check that only ``exchange_counts`` waits for the device, once a forward."""
    layer = make_pair().mine
    for recompute, waits, exchanges in ((False, 1, 4), (True, 2, 6)):
        x_BSD = torch.randn(1, 5, WIDTH, requires_grad=True)
        with CountExchanges() as counted:
            y_BSD, _ = (
                checkpoint(layer, x_BSD, CONTEXT, use_reentrant=False, early_stop=False)
                if recompute
                else layer(x_BSD, CONTEXT)
            )
            y_BSD.sum().backward()
        assert counted.calls == {"exchange_counts": waits, "exchange_rows": exchanges}


def check_empty_rank_under_inductor() -> None:
    """Check that inductor keeps collectives on a rank without tokens, or the others would hang.

    Only the rank without tokens compiles.
    """
    dispatcher = make_dispatcher()

    def round_trip(x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor):
        sent = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
        x_RD, weights_R = permute(sent.x_SD, sent.weights_SK, sent.indices)
        return dispatcher.combine(unpermute(x_RD * weights_R[:, None], sent.indices), sent.ctx)

    tokens = 3 * dist.get_rank()
    run = round_trip if tokens else torch.compile(round_trip, fullgraph=True)
    for shift in range(3):
        x_TD = torch.randn(tokens, WIDTH, requires_grad=True)
        ids_TK = (torch.arange(2 * tokens, dtype=torch.int32) + shift).view(tokens, 2)
        run(x_TD, ids_TK, torch.full((tokens, 2), 0.75)).sum().backward()
        assert torch.equal(x_TD.grad, torch.full_like(x_TD, 1.5))


def check_interleaved() -> None:
    """Check that two calls in flight do not disturb each other, and that dtypes are kept."""
    dispatcher = make_dispatcher()
    first, second = torch.randn(4, WIDTH).bfloat16(), torch.randn(9, WIDTH).bfloat16()
    calls = []
    for x_TD in (first, second):
        ids_TK = torch.randint(0, EXPERTS, (len(x_TD), 1), dtype=torch.int32)
        calls.append(dispatcher.dispatch(x_TD, ids_TK, torch.ones(ids_TK.shape)))
    assert (calls[0].x_SD.dtype, calls[0].weights_SK.dtype) == (torch.bfloat16, torch.float32)
    for x_TD, sent in zip((first, second), calls, strict=True):
        x_RD, _ = permute(sent.x_SD, sent.weights_SK, sent.indices)
        assert len(x_RD) == sent.indices.offsets_E[-1]
        assert torch.equal(dispatcher.combine(unpermute(x_RD, sent.indices), sent.ctx), x_TD)


def check_transport(device: str, backend: str, dtype: torch.dtype) -> None:
    """Check that a token arrives once, whole, at each rank that it chose, and returns as often."""
    rank, world = dist.get_rank(), dist.get_world_size()
    transport = AllToAll(EXPERTS, dist.group.WORLD)
    compiled = torch.compile(transport.send, fullgraph=True, backend=backend)
    tokens = [0, 40, 1, 33][:world]
    part = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    for seed, dispatch in enumerate((transport.send, compiled, compiled)):
        generator = torch.Generator().manual_seed(seed)
        x_TD = torch.randn(sum(tokens), WIDTH, generator=generator).to(device, dtype)
        ids_TK = torch.randint(-1, EXPERTS, (sum(tokens), TOP_K), generator=generator)
        ids_TK = ids_TK.to(device, torch.int32)
        weights_TK = torch.rand(ids_TK.shape, generator=generator).to(device)
        local = local_experts()
        is_here_TK = (ids_TK >= local.start) & (ids_TK < local.stop)
        arriving = is_here_TK.any(1)  # by source rank, then token: the order of the whole batch

        mine = weights_TK[part].clone().requires_grad_()
        got: Received = dispatch(x_TD[part].contiguous(), ids_TK[part].contiguous(), mine)
        assert torch.equal(got.x_SD, x_TD[arriving])
        want_SK = torch.where(is_here_TK, ids_TK - local.start, -1)[arriving]
        assert torch.equal(got.ids_SK, want_SK)
        assert got.ids_SK.dtype == torch.int32
        used_SK = want_SK >= 0
        assert torch.equal(got.weights_SK[used_SK], weights_TK[arriving][used_SK])
        assert got.num_rows == used_SK.sum()

        ranks_TW = (ids_TK // (EXPERTS // world))[..., None] == torch.arange(world, device=device)
        copies_TW = ranks_TW.any(1)[part]
        sent_W, received_W = (x[:, 0] for x in got.handle[-2:])
        assert sent_W.tolist() == copies_TW.sum(0).tolist()
        assert received_W.tolist() == [int(x.sum()) for x in arriving.split(tokens)]

        got.weights_SK.backward((got.ids_SK + local.start) * used_SK)
        assert torch.equal(mine.grad, ids_TK[part].clamp(min=0).float())
        y_TD = transport.combine(got.x_SD.detach(), got.handle)
        assert torch.equal(y_TD, (x_TD[part].float() * copies_TW.sum(1)[:, None]).to(dtype))


def check_errors() -> None:
    with pytest.raises(ValueError, match=rf"7 experts .* {dist.get_world_size()} expert parallel"):
        AllToAll(7, dist.group.WORLD)


def check_everything() -> None:
    # Fresh memory is filled with NaN: rows past the counts must not reach a result.
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    check_eager()
    check_kernels()
    check_compiled()
    check_waits()
    check_interleaved()
    check_transport("cpu", "aot_eager", torch.float32)
    check_errors()


@pytest.mark.tier("wide", long=["2"])
@pytest.mark.parametrize("world", [2, 4])
def test_expert_parallel(world):
    spawn(world, check_everything, timeout=180.0)


@pytest.mark.tier("wide")
def test_empty_rank_under_inductor():
    spawn(2, check_empty_rank_under_inductor, timeout=180.0)


@pytest.mark.gpu("world")
@pytest.mark.parametrize("world", [2, 4])
def test_transport_on_gpus(world):
    arguments = ("cuda", "inductor", torch.bfloat16)
    spawn(world, check_transport, *arguments, device_type="cuda", timeout=180.0)
