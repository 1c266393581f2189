"""The MoE layer compared with a plain loop over experts; dispatch, balancing, recomputation."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from moetrain.config import ActivationSection, KernelsSection, MoeSection
from moetrain.kernels.experts.permutation import permute, unpermute
from moetrain.kernels.experts.products import router_logits
from moetrain.kernels.quant.recipes import RECIPES
from moetrain.losses.balancing import (
    RouterStats,
    RoutingStats,
    load_balancing_loss,
    router_z_loss,
)
from moetrain.models import moe
from moetrain.models.architecture import Architecture
from moetrain.models.layers import Context
from moetrain.models.moe import Dispatcher, MoE, RoutedExperts, Router, update_router_bias
from moetrain.models.transformer import Inputs, Transformer
from moetrain.train.metrics import UNHEALTHY_LOGS, RoutingWatch
from tests.lib.architectures import make_architecture

ARCH = make_architecture(
    family="qwen3_moe",
    vocab_size=40,
    hidden_size=16,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    num_experts=5,
    num_experts_per_token=2,
    moe_intermediate_size=8,
    moe_layers=(True, False, True),
)


def arch_with(**changes) -> Architecture:
    return make_architecture(**{**ARCH.model_dump(), **changes})


def random_layer(arch: Architecture = ARCH, **settings) -> MoE:
    layer = MoE(RoutedExperts.of(arch), MoeSection(**settings), KernelsSection())
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return layer


def context(is_pad_BS: torch.Tensor | None = None) -> Context:
    """Return the inputs that the layer alone reads."""
    nothing: Any = None
    return Context(nothing, nothing, is_pad_BS=is_pad_BS)


def dumb_moe(layer: MoE, x_TD: torch.Tensor, arch: Architecture) -> torch.Tensor:
    """Send every token through every expert, one at a time, with weight 0 unless chosen."""
    probs_TE = (x_TD @ layer.router.weight.T).softmax(-1)
    weights_TK, ids_TK = probs_TE.topk(arch.num_experts_per_token)
    if arch.norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    weights_TE = torch.zeros_like(probs_TE).scatter(1, ids_TK, weights_TK)
    out_TD = torch.zeros_like(x_TD)
    for e in range(arch.num_experts):
        gate, up = layer.experts.w_gate_up[e].chunk(2)
        y_TD = (F.silu(x_TD @ gate.T) * (x_TD @ up.T)) @ layer.experts.w_down[e].T
        out_TD = out_TD + weights_TE[:, e, None] * y_TD
    return out_TD


# The layer.
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 7, 100])
@pytest.mark.parametrize("routing", ["natural", "one-hot"])
def test_layer_and_gradients_match_a_dumb_loop(num_tokens, routing, normalize):
    arch = arch_with(norm_topk_prob=normalize)
    layer = random_layer(arch)
    x_BSD = torch.randn(1, num_tokens, 16, generator=torch.Generator().manual_seed(1))
    if routing == "one-hot":  # every token to experts 3 and 1; the others stay empty
        x_BSD[..., 0] = 1.0
        with torch.no_grad():
            layer.router.weight[3, 0], layer.router.weight[1, 0] = 60.0, 50.0
    x_BSD.requires_grad_()
    inputs = [x_BSD, *layer.parameters()]
    y_BSD, stats = layer(x_BSD, context())
    want_TD = dumb_moe(layer, x_BSD[0], arch)
    if routing == "one-hot":
        assert stats.counts_E.tolist() == [0, num_tokens, 0, num_tokens, 0]
    torch.testing.assert_close(y_BSD[0], want_TD, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(want_TD)
    got = torch.autograd.grad((y_BSD[0] * direction).sum(), inputs)
    want = torch.autograd.grad((want_TD * direction).sum(), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_statistics():
    layer = random_layer()
    x_BSD = torch.randn(2, 9, 16)
    _, stats = layer(x_BSD, context())
    logits_TE = x_BSD.flatten(0, 1) @ layer.router.weight.T
    probs_TE = logits_TE.softmax(-1)
    chosen = probs_TE.topk(2).indices.flatten()
    assert torch.equal(stats.counts_E, torch.bincount(chosen, minlength=5).int())
    torch.testing.assert_close(stats.prob_sum_E, probs_TE.sum(0))
    torch.testing.assert_close(stats.z_sum, logits_TE.logsumexp(-1).square().sum())
    entropy = torch.distributions.Categorical(probs=probs_TE).entropy().sum()
    torch.testing.assert_close(stats.entropy_sum, entropy.detach())


def test_model_stacks_the_statistics_of_its_moe_layers():
    model = Transformer(ARCH)
    model.init_weights(std=0.1, seed=0)
    _, routing = model.backbone(Inputs(torch.randint(0, 40, (2, 9))))
    assert routing is not None
    assert routing.num_tokens == 18
    assert routing.counts_LE.shape == routing.prob_sum_LE.shape == (2, 5)
    assert routing.z_sum_L.shape == routing.entropy_sum_L.shape == (2,)
    assert (routing.counts_LE.sum(1) == 18 * 2).all()
    dense = Transformer(arch_with(num_experts=0, num_experts_per_token=0, moe_layers=()))
    dense.init_weights(std=0.1, seed=0)
    assert dense.backbone(Inputs(torch.zeros(1, 3, dtype=torch.long)))[1] is None


def test_router_is_fp32_under_bf16_activations():
    router = random_layer().router
    router.weight.data = router.weight.data.bfloat16().float()
    x_TD = torch.randn(50, 16).bfloat16()
    routed = router(x_TD)
    exact = router(x_TD.float())
    assert torch.equal(routed.ids_TK, exact.ids_TK)
    assert torch.equal(routed.weights_TK, exact.weights_TK)
    assert routed.weights_TK.dtype == torch.float32


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_router_logits_of_bf16_lose_nothing(device):
    """Logits have fp32's precision, although the product's inputs are bf16."""
    generator = torch.Generator().manual_seed(0)
    x_TD, weight_ED, slope_TE = (
        torch.randn(shape, generator=generator).to(device)
        for shape in ((300, 64), (24, 64), (300, 24))
    )
    x_TD, weight_ED = x_TD.bfloat16(), weight_ED.bfloat16().float().requires_grad_()
    logits_TE = router_logits(x_TD, weight_ED, "auto" if torch.cuda.is_available() else "triton")
    (slope_ED,) = torch.autograd.grad(logits_TE, weight_ED, slope_TE)
    wide_TD, wide_ED, wide_TE = x_TD.double(), weight_ED.detach().double(), slope_TE.double()
    for got, want, tolerance in (
        (logits_TE, wide_TD @ wide_ED.T, 1e-6),
        (slope_ED, wide_TE.T @ wide_TD, 1e-5),
    ):
        assert got.dtype == torch.float32
        assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_kernels_equal_auto_on_a_cpu(dtype):
    tokens_BS = torch.randint(0, 40, (2, 9))
    outputs = []
    for backend in ("auto", "reference"):
        model = Transformer(ARCH, kernels=KernelsSection(backend=backend))
        model.init_weights(std=0.1, seed=0)
        model.compute_dtype = dtype
        outputs.append(model(tokens_BS))
    assert torch.equal(*outputs)


# Padding.
DOCUMENTS = ((5, 3), (8,))  # rows of documents


def packed(pads=None) -> tuple[torch.Tensor, ...]:
    """Return tokens, positions and padding [B, S] of DOCUMENTS, ``pads[row]`` after each."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for lengths, behind in zip(DOCUMENTS, pads or [[0] * len(d) for d in DOCUMENTS], strict=True):
        row = []
        for length, more in zip(lengths, behind, strict=True):
            tokens = torch.randint(0, ARCH.vocab_size, (length,), generator=generator)
            row.append((torch.cat((tokens, tokens.new_full((more,), 7))), length))
        tokens_S = torch.cat([tokens for tokens, _ in row])
        positions_S = torch.cat([torch.arange(len(tokens)) for tokens, _ in row])
        is_pad_S = torch.cat([torch.arange(len(tokens)) >= length for tokens, length in row])
        rows.append((tokens_S, positions_S, is_pad_S))
    return tuple(torch.stack(x) for x in zip(*rows, strict=True))


@pytest.mark.tier("quick", long=["pads0-triton", "pads1-triton", "pads2-triton"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("pads", [((3, 0), (3,)), ((1, 2), (3,)), ((0, 3), (3,))])
def test_pads_change_nothing(pads, backend):
    """Outputs, statistics and every gradient equal those of the same documents without pads."""
    results = []
    for tokens_BS, positions_BS, is_pad_BS in (packed(), packed(pads)):
        model = Transformer(ARCH, kernels=KernelsSection(backend=backend))
        model.init_weights(std=0.5, seed=0)
        hidden_BSD, routing = model.backbone(Inputs(tokens_BS, positions_BS, is_pad_BS=is_pad_BS))
        assert routing is not None
        hidden_TD = hidden_BSD[~is_pad_BS]
        loss = hidden_TD.pow(3).sum() + routing.z_sum_L.sum()
        (loss + (routing.prob_sum_LE * torch.arange(5)).sum()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert routing.num_tokens == 16
        sums = {name: x for name, x in routing._asdict().items() if x is not None}
        results.append((hidden_TD, sums, gradients))
    # The error is relative to each tensor's norm: single elements may be small differences of large
    # values, and a product's rounding depends on its number of rows (2.9e-5 of one of 640, on one
    # CPU).
    for got, want in zip(map(tensors_of, results[1]), map(tensors_of, results[0]), strict=True):
        for x, y in zip(got, want, strict=True):
            assert (x.double() - y.double()).norm() <= 5e-6 * y.double().norm()


def tensors_of(result) -> list[torch.Tensor]:
    """Return a tensor, a tuple of tensors or a dict of them as a list."""
    if isinstance(result, dict):
        return [result[name] for name in sorted(result)]
    return list(result) if isinstance(result, tuple) else [result]


def test_a_pad_has_no_expert():
    is_pad_BS = torch.tensor([[False, True, False, True]])
    for settings in ({}, {"force_balanced": True}):
        layer = random_layer(**settings)
        x_BSD = torch.randn(1, 4, 16, requires_grad=True)
        routed = layer.router(x_BSD.flatten(0, 1), is_pad_BS.flatten())
        assert (routed.ids_TK < 0).all(1).tolist() == [False, True, False, True]
        assert routed.counts_E.sum() == 4
        y_BSD, _ = layer(x_BSD, context(is_pad_BS))
        assert (y_BSD[is_pad_BS] == 0).all()
        (d_x_BSD,) = torch.autograd.grad(y_BSD.pow(2).sum(), x_BSD)
        assert (d_x_BSD[is_pad_BS] == 0).all()
        assert (d_x_BSD[~is_pad_BS] != 0).any(1).all()


# Dispatch.
def test_dispatch_round_trip():
    x_TD = torch.randn(4, 3)
    ids_TK = torch.tensor([[2, 0], [-1, -1], [4, -1], [0, 2]], dtype=torch.int32)
    weights_TK = torch.tensor([[0.5, 0.25], [9.0, 9.0], [2.0, 9.0], [1.0, 3.0]])
    dispatcher = Dispatcher(num_experts=5)
    sent = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    assert sent.indices.offsets_E.tolist() == [2, 2, 4, 4, 5]
    x_RD, weights_R = permute(sent.x_SD, sent.weights_SK, sent.indices)
    assert torch.equal(x_RD[:5], x_TD[[0, 3, 0, 3, 2]])
    assert weights_R[:5].tolist() == [0.25, 1.0, 0.5, 3.0, 2.0]
    y_TD = dispatcher.combine(unpermute(x_RD * weights_R[:, None], sent.indices), sent.ctx)
    total_T = torch.tensor([0.75, 0.0, 2.0, 4.0])
    torch.testing.assert_close(y_TD, x_TD * total_T[:, None])


def test_interleaved_calls_do_not_disturb_each_other():
    dispatcher = Dispatcher(num_experts=3)
    x, y = torch.randn(2, 4), torch.randn(5, 4)
    weights = torch.ones(5, 1)
    first = dispatcher.dispatch(x, torch.tensor([[2], [0]]), weights[:2])
    second = dispatcher.dispatch(y, torch.tensor([[1], [2], [0], [1], [1]]), weights)
    for sent, tokens in ((first, x), (second, y)):
        x_RD, _ = permute(sent.x_SD, sent.weights_SK, sent.indices)
        assert torch.equal(dispatcher.combine(unpermute(x_RD, sent.indices), sent.ctx), tokens)


# Balancing.
@pytest.mark.parametrize(
    ("experts", "top_k", "num_tokens"), [(8, 2, 16), (128, 8, 64), (6, 5, 12), (4, 4, 7), (1, 1, 3)]
)
def test_force_balanced(experts, top_k, num_tokens):
    arch = arch_with(num_experts=experts, num_experts_per_token=top_k)
    router = random_layer(arch, force_balanced=True).router
    x_TD = torch.randn(num_tokens, 16)
    routed = router(x_TD)
    assert (routed.counts_E == num_tokens * top_k // experts).all()
    assert torch.equal(
        torch.bincount(routed.ids_TK.flatten(), minlength=experts).int(), routed.counts_E
    )
    assert all(len(set(row)) == top_k for row in routed.ids_TK.tolist())
    scores_TE = (x_TD @ router.weight.T).softmax(-1)
    weights_TK = scores_TE.gather(1, routed.ids_TK.long())
    torch.testing.assert_close(routed.weights_TK, weights_TK / weights_TK.sum(-1, keepdim=True))
    (gradient,) = torch.autograd.grad(routed.weights_TK[:, 0].sum(), router.weight)
    assert gradient.abs().max() > 0 or top_k == 1


def test_force_balanced_spreads_a_token_over_expert_parallel_ranks():
    arch = arch_with(num_experts=128, num_experts_per_token=8)
    ids_TK = random_layer(arch, force_balanced=True).router(torch.randn(256, 16)).ids_TK
    ranks = [len(set(row)) for row in (ids_TK // 16).tolist()]
    assert sum(ranks) / len(ranks) == pytest.approx(5.3, abs=0.5)  # 8 random of 128 over 8 ranks


def test_bias_moves_the_choice_and_not_the_weights():
    layer = random_layer(bias_update_rate=0.1)
    router, x_TD = layer.router, torch.randn(20, 16)
    assert "router.bias" in layer.state_dict()
    plain = router(x_TD)
    assert router.bias is not None
    router.bias[4] = 10.0
    biased = router(x_TD)
    assert (biased.ids_TK == 4).any(1).all()
    assert not (plain.ids_TK == 4).any(1).all()
    weights_TK = (x_TD @ router.weight.T).softmax(-1).gather(1, biased.ids_TK.long())
    torch.testing.assert_close(biased.weights_TK, weights_TK / weights_TK.sum(-1, keepdim=True))
    torch.testing.assert_close(biased.prob_sum_E, plain.prob_sum_E)


def test_tokens_are_sent_again_where_they_were_sent():
    model = Transformer(ARCH)
    model.init_weights(std=0.3, seed=0)
    tokens_BS = torch.arange(24).view(2, 12) % ARCH.vocab_size
    chosen = []
    routers = [m for m in model.modules() if isinstance(m, Router)]
    for router in routers:
        router.register_forward_hook(lambda module, args, routed: chosen.append(routed))
    hidden_BSD, stats = model.backbone(Inputs(tokens_BS))
    free = list(chosen)
    routes_BSLK = torch.stack([r.ids_TK.view(2, 12, -1) for r in chosen], 2)
    chosen.clear()
    again_BSD, again = model.backbone(Inputs(tokens_BS, routes_BSLK=routes_BSLK))
    torch.testing.assert_close(again_BSD, hidden_BSD)
    assert torch.equal(again.counts_LE, stats.counts_LE)
    # The route differs from the router's choice; weights follow its scores, and have gradients.
    moved_BSLK = (routes_BSLK + 1) % ARCH.num_experts
    moved_BSLK[1, 5:] = -1  # the router chooses here
    chosen.clear()
    moved_BSD, stats = model.backbone(Inputs(tokens_BS, routes_BSLK=moved_BSLK))
    moved_BSD.square().sum().backward()
    for layer, routed in enumerate(chosen):
        ids = routed.ids_TK.view(2, 12, -1)
        assert torch.equal(ids[0], moved_BSLK[0, :, layer])
        assert torch.equal(ids[1, :5], moved_BSLK[1, :5, layer])
        assert (ids[1, 5:] >= 0).all()
        torch.testing.assert_close(routed.weights_TK.sum(1), torch.ones(24))
    first = free[0].ids_TK.view(2, 12, -1)[1, 5:]
    assert torch.equal(chosen[0].ids_TK.view(2, 12, -1)[1, 5:], first)
    assert stats.counts_LE.sum() == 24 * 2 * len(chosen)
    assert all(router.weight.grad.abs().sum() > 0 for router in routers)


def test_update_router_bias():
    model = Transformer(ARCH, moe=MoeSection(bias_update_rate=0.5))
    model.init_weights(std=0.1, seed=0)
    counts_LE = torch.tensor([[4, 0, 4, 8, 4], [0, 0, 0, 0, 20]], dtype=torch.int32)
    for _ in range(2):
        update_router_bias(model, counts_LE, rate=0.5)
    biases = [m.bias.tolist() for m in model.modules() if isinstance(m, Router)]
    assert biases == [[0.0, 1.0, 0.0, -1.0, 0.0], [1.0, 1.0, 1.0, 1.0, -1.0]]
    assert "layers.2.moe.router.bias" in model.state_dict()


def test_bias_updates_even_out_the_load():
    router = random_layer(bias_update_rate=0.002).router
    x_TD = torch.randn(500, 16, generator=torch.Generator().manual_seed(0)) + 1.0
    before = router(x_TD).counts_E
    for _ in range(500):
        update_router_bias(router, router(x_TD).counts_E[None], rate=0.002)
    after = router(x_TD).counts_E
    assert before.max() > 300  # 200 on average
    assert after.max() < 230


@pytest.mark.parametrize("pooled", [False, True])
def test_losses_of_the_parts_add_up(pooled):
    counts_LE = torch.randint(0, 9, (3, 5))
    prob_sum_LE, z_sum_L = torch.rand(2, 3, 5), torch.rand(2, 3)
    whole = load_balancing_loss(counts_LE, prob_sum_LE.sum(0), 40, pooled=pooled)
    parts = [load_balancing_loss(counts_LE, part, 40, pooled=pooled) for part in prob_sum_LE]
    torch.testing.assert_close(sum(parts), whole)
    z_parts = [router_z_loss(part, 40) for part in z_sum_L]
    torch.testing.assert_close(sum(z_parts), router_z_loss(z_sum_L.sum(0), 40))


def test_loss_values():
    tokens, top_k = 30, 2
    uniform_LE = torch.full((3, 5), tokens / 5)
    assert load_balancing_loss(uniform_LE * top_k, uniform_LE, tokens).item() == pytest.approx(2)
    one_hot_LE = F.one_hot(torch.zeros(3, dtype=torch.long), 5) * tokens
    assert load_balancing_loss(one_hot_LE, one_hot_LE, tokens).item() == pytest.approx(5)
    # Each layer sends everything to another expert: pooled, that looks even.
    uneven_LE = torch.eye(5) * tokens
    assert load_balancing_loss(uneven_LE, uneven_LE, tokens).item() == pytest.approx(5)
    pooled = load_balancing_loss(uneven_LE, uneven_LE, tokens, pooled=True)
    assert pooled.item() == pytest.approx(1)
    assert router_z_loss(torch.tensor([60.0, 120.0]), tokens).item() == pytest.approx(3)


def routing_of(counts_LE: torch.Tensor, tokens: int) -> RoutingStats:
    ones_L = torch.ones(len(counts_LE))
    return RoutingStats(
        counts_LE=counts_LE,
        prob_sum_LE=counts_LE / tokens,
        z_sum_L=ones_L,
        entropy_sum_L=ones_L,
        num_tokens=torch.tensor(tokens),
    )


def test_sums_come_out_of_rows_as_they_went_in():
    counts = torch.tensor([2**24 + 1, 3], dtype=torch.int32)
    stats = RouterStats(
        counts_E=counts,
        prob_sum_E=torch.tensor([0.1, 0.2]),
        z_sum=torch.tensor(0.3),
        entropy_sum=torch.tensor(0.4),
    )
    routing = RoutingStats.of_layers([stats, stats], 2)
    assert routing is not None
    rows = [RouterStats.of_packed(row) for row in routing.packed()]
    found = RoutingStats.of_layers(rows, 2)
    assert found is not None
    for name, before, after in zip(routing._fields, routing, found, strict=True):
        if before is not None:
            assert before.dtype == after.dtype, name
            assert torch.equal(before, after), name
    few = stats._replace(counts_E=torch.tensor([2**24, 3], dtype=torch.int32))
    assert few.packed().dtype == torch.float32
    assert few.packed().shape == (RouterStats.packed_size(2),)
    found = RouterStats.of_packed(few.packed())._asdict()
    for name, before in few._asdict().items():
        assert before is None or torch.equal(before, found[name]), name


def test_routing_health_names_layers_and_finds_the_worst():
    counts_LE = torch.tensor([[10, 10, 10, 10], [40, 0, 0, 0], [20, 20, 0, 0]])
    row = RoutingWatch([1, 2, 5]).health(routing_of(counts_LE, 20))
    assert row["expert_load_max"] == 4
    assert row["experts_without_tokens"] == 5
    assert row["expert_load_max/layer_5"] == 2
    long = RoutingWatch(range(9)).health(routing_of(counts_LE.repeat(3, 1), 20))
    assert {"expert_load_max/layers_0-2", "router_entropy/layers_7-8"} <= set(long)


def test_unhealthy_routing_is_said_once_and_only_if_it_lasts():
    even = torch.full((2, 4), 20)
    ill = torch.tensor([[20, 20, 20, 20], [40, 40, 0, 0]])
    watch = RoutingWatch([3, 4])
    said = [watch.update(routing_of(ill, 40)) for _ in range(UNHEALTHY_LOGS - 1)]
    said += [watch.update(routing_of(even, 40))]  # it recovers
    assert said == [[]] * UNHEALTHY_LOGS
    said = [watch.update(routing_of(ill, 40)) for _ in range(UNHEALTHY_LOGS)]
    assert said[:-1] == [[]] * (UNHEALTHY_LOGS - 1)
    (dead,) = said[-1]  # 40 tokens are twice an expert's share, not more
    assert "2 of 8 experts got no token" in dead
    assert "layers 4" in dead
    assert "moe.aux_loss_coef" in dead
    assert watch.update(routing_of(ill, 40)) == []
    watch, crowded = RoutingWatch([0]), torch.tensor([[33, 3, 2, 2]])
    texts = [
        text for _ in range(UNHEALTHY_LOGS + 9) for text in watch.update(routing_of(crowded, 40))
    ]
    assert len(texts) == 1
    assert "1 of 4 experts took most" in texts[0]


# Recomputation.
def test_recompute_gives_the_same_gradients_and_counts():
    tokens_BS = torch.randint(0, 40, (2, 9))
    results = []
    for recompute in (False, True):
        model = Transformer(ARCH)
        model.init_weights(std=0.1, seed=0)
        model.set_recomputation(ActivationSection(policy="full" if recompute else "none"))
        calls = 0

        def count(*_):
            nonlocal calls
            calls += 1

        model.layers[0].register_forward_pre_hook(count)
        hidden_BSD, routing = model.backbone(Inputs(tokens_BS))
        assert routing is not None
        loss = hidden_BSD.square().mean() + routing.prob_sum_LE.square().sum()
        loss.backward()
        assert calls == 1 + recompute
        results.append((routing.counts_LE, loss, [p.grad for p in model.parameters()]))
    (counts, loss, gradients), (counts_again, loss_again, gradients_again) = results
    assert torch.equal(counts, counts_again)
    assert torch.equal(loss, loss_again)
    # The head has no part in this loss.
    for a, b in zip(gradients[:-1], gradients_again[:-1], strict=True):
        assert torch.equal(a, b)


def test_a_wide_router_keeps_its_weights():
    """In bf16 too its logits equal those of fp32, and so does its weight's gradient."""
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(30, 48, generator=generator).bfloat16()
    weight_ED = torch.randn(9, 48, generator=generator).requires_grad_()
    exact_TE = x_TD.double() @ weight_ED.double().T
    errors = {}
    for wide in (False, True):
        logits_TE = router_logits(x_TD, weight_ED, "triton", wide=wide)
        errors[wide] = ((logits_TE - exact_TE).norm() / exact_TE.norm()).item()
    assert errors[False] > 1e-3
    assert errors[True] < 1e-6
    upstream = torch.randn(30, 9, generator=generator)
    found, want = (
        torch.autograd.grad((y * upstream).sum(), weight_ED, retain_graph=True)[0]
        for y in (logits_TE, exact_TE)
    )
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", *RECIPES])
def test_few_tokens_are_computed_as_the_precision_says(precision, monkeypatch):
    """Their kernels, absent on a CPU, multiply in bf16 only."""
    for name in ("is_few", "fits_few_tokens", "few_tokens_counters", "few_tokens_mlp"):
        monkeypatch.setattr(moe, name, lambda *args, **kwargs: torch.ones(1))
    (sizes,) = {part for part in arch_with(moe_intermediate_size=128).parts() if part.name == "moe"}
    experts = moe.Experts(sizes, KernelsSection(precision=precision))
    routed = moe.Router(sizes, MoeSection(), "reference")(torch.ones(2, ARCH.hidden_size))
    found = experts.of_few(torch.ones(2, ARCH.hidden_size), routed)
    assert (found is not None) == (precision == "bf16")
