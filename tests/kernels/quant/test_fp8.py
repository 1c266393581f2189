"""kernels.precision fp8: accurate gradients, equal on every mesh and policy, and its refusals.

Its kernels have their specs in tests/kernels/test_kernels.py.
"""

import sys
from functools import partial
from typing import get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_to_all_single

from moetrain.config import ActivationSection, Config, ConfigError, KernelsSection, MoeSection
from moetrain.config.compute import Precision
from moetrain.generate.engine import Generator
from moetrain.generate.weights import replica
from moetrain.kernels.experts.clamped_mlp import clamped_expert_mlp
from moetrain.kernels.experts.mlp import adapted_expert_mlp, expert_mlp
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.kernels.experts.projections import ACTIVATIONS
from moetrain.kernels.quant.e4m3 import LARGEST_E4M3, quantise_columns, quantise_rows
from moetrain.kernels.quant.products import linears_fp8
from moetrain.kernels.quant.recipes import RECIPES
from moetrain.kernels.quant.transposed import place_columns, transpose_rows
from moetrain.kernels.vocabulary.fp8_gradients import gradient_step
from moetrain.kernels.vocabulary.linear_cross_entropy import linear_cross_entropy_sum
from moetrain.models.transformer import Inputs, Transformer
from moetrain.parallel.expert import dispatch
from moetrain.parallel.expert.deepep import DeepEP
from moetrain.parallel.expert.dispatch import AllToAll
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from moetrain.train.session import resolve_run
from tests.lib import fake_deep_ep
from tests.lib.architectures import make_architecture
from tests.lib.compiled_blocks import batch, compile_counting
from tests.lib.distributed import spawn
from tests.lib.one_answer import LAYOUTS, compare, run, run_layouts, words_of
from tests.lib.transports import (
    ROUTINGS,
    Size,
    assert_same,
    make_batch,
    run_narrow,
    run_step,
    static_sizes,
)
from tests.lib.transports import make_experts as make_weights

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HALF_STEP = 2.0**-4
"""Largest relative rounding error in e4m3; below the least power it is 2^-10 of the scale."""
NEAR = 0.08
"""A gradient's error, relative to its norm: sqrt(2 or 3) operands of 2.6% each, and a margin."""

ARCH = partial(
    make_architecture,
    family="qwen3_moe",
    vocab_size=40,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    qk_norm=True,
    num_experts=4,
    num_experts_per_token=2,
    moe_layers=(True, False),
)
SIZES = ["model.hidden_size=32", "model.head_dim=16", "model.moe_intermediate_size=16"]
FP8 = "kernels.precision=fp8"


def rows_of_all_sizes() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x_RM = torch.randn(60, 80, generator=generator)
    return x_RM * torch.logspace(-36, 36, 60)[:, None]


def test_every_precision_but_bf16_has_a_recipe():
    assert {"bf16", *RECIPES} == set(get_args(Precision))


# Quantisation.
def test_every_number_is_within_half_a_step():
    x_RM = rows_of_all_sizes()
    quantised = quantise_rows(x_RM)
    values, scales = quantised.values.float(), quantised.scales[:, None]
    assert values.abs().max() <= LARGEST_E4M3
    mantissa, _ = torch.frexp(scales)
    assert (mantissa == 0.5).all()  # powers of two
    assert (values.abs().amax(1) > LARGEST_E4M3 / 2 * (1 - HALF_STEP)).all()
    half_step = torch.maximum(HALF_STEP * x_RM.abs(), 2.0**-10 * scales)
    assert ((values * scales - x_RM).abs() <= half_step).all()


def test_quantise_rows_is_idempotent():
    for dtype in (torch.float32, torch.bfloat16):
        once = quantise_rows(rows_of_all_sizes().to(dtype)).to(dtype)
        assert torch.equal(quantise_rows(once).to(dtype), once)


def test_zeros_stay_zeros_and_nothing_becomes_infinite():
    x_RM = torch.zeros(3, 16)
    x_RM[1], x_RM[2] = 2.0**127, 2.0**-126  # the limits of fp32's powers
    back = quantise_rows(x_RM).to(torch.float32)
    assert (back[0] == 0).all()
    assert back.isfinite().all()


def test_columns_are_rows_of_the_transposed():
    w_ENM = rows_of_all_sizes().view(2, 30, 80)
    columns, rows = quantise_columns(w_ENM), quantise_rows(w_ENM.transpose(1, 2).contiguous())
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(columns, rows, strict=True))


# Products.
def make_experts(tokens=64, experts=5, slots=2, dim=64, width=48):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    ids_TK = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :slots].int()
    leaves = {
        "x_TD": normal(tokens, dim),
        "weights_TK": torch.rand(tokens, slots, generator=generator),
        "w_gate_up": normal(experts, 2 * width, dim) * dim**-0.5,
        "w_down": normal(experts, dim, width) * width**-0.5,
    }
    return {name: x.requires_grad_() for name, x in leaves.items()}, ids_TK, normal(tokens, dim)


@pytest.mark.parametrize("precision", RECIPES)
def test_gradients_of_experts_are_near_those_in_fp64(precision):
    leaves, ids_TK, slope_TD = make_experts(width=128)
    indices = expert_indices(ids_TK, 5)
    x, weights, *matrices = leaves.values()
    y_TD = expert_mlp(x, weights, indices, *matrices, precision=precision)
    found = [y_TD, *torch.autograd.grad(y_TD, list(leaves.values()), slope_TD)]

    wide = [leaf.detach().double().requires_grad_() for leaf in leaves.values()]
    y_TD = expert_mlp(wide[0], wide[1], indices, wide[2], wide[3])
    exact = [y_TD, *torch.autograd.grad(y_TD, wide, slope_TD.double())]
    for name, got, want in zip(("y", *leaves), found, exact, strict=True):
        error = ((got - want).norm() / want.norm()).item()
        assert 1e-3 < error < NEAR, f"{name}: {error}"  # it is quantised, but not worse


def run_kind(kind, leaves, indices, precision):
    """The experts of ``kind`` from ``leaves``, by name."""
    x, weights, first, second, *others = leaves.values()
    if "clamped" in kind:
        biases, adapters = others[:2], others[2:]
        matrices = first, biases[0], second, biases[1]
        more = {"limit": 7.0, "alpha": 1.702, "adapters": adapters, "precision": precision}
        return clamped_expert_mlp(x, weights, indices, *matrices, **more)
    if "lora" in kind:
        more = {"scale": 0.75, "precision": precision}
        return adapted_expert_mlp(x, weights, indices, first, second, *others, **more)
    more = {"activation": kind, "precision": precision}
    return expert_mlp(x, weights, indices, first, second, **more)


@pytest.mark.parametrize("kind", [*ACTIVATIONS, "clamped", "lora", "clamped lora"])
@pytest.mark.parametrize("precision", RECIPES)
def test_gradients_of_other_experts_are_near_those_in_fp64(precision, kind):
    """A bias, an adapter and a gate other than SiLU's, or none, between products in e4m3."""
    leaves, ids_TK, slope_TD = make_experts(width=128)
    generator = torch.Generator().manual_seed(1)
    if kind in ACTIVATIONS and not ACTIVATIONS[kind].has_gate:
        leaves["w_gate_up"] = leaves["w_gate_up"].detach()[:, :128].contiguous().requires_grad_()
    shapes = [(5, 256), (5, 64)] if "clamped" in kind else []
    if "lora" in kind:
        shapes += [(5, 8, 64), (5, 256, 8), (5, 8, 128), (5, 64, 8)]
    for i, shape in enumerate(shapes):
        value = torch.randn(shape, generator=generator)
        value = value * shape[-1] ** -0.5 if len(shape) > 2 else value
        leaves[f"other {i}"] = value.requires_grad_()
    if "lora" in kind:
        for name in [name for name, x in leaves.items() if name[0] == "w" or x.dim() == 2]:
            leaves[name].requires_grad_(name in ("x_TD", "weights_TK"))
        leaves["w_gate_up"].requires_grad_(False)
    indices = expert_indices(ids_TK, 5)
    trained = [name for name, x in leaves.items() if x.requires_grad]
    y_TD = run_kind(kind, leaves, indices, precision)
    found = [y_TD, *torch.autograd.grad(y_TD, [leaves[name] for name in trained], slope_TD)]
    wide = {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in leaves.items()}
    y_TD = run_kind(kind, wide, indices, "bf16")
    exact = [y_TD, *torch.autograd.grad(y_TD, [wide[n] for n in trained], slope_TD.double())]
    for name, got, want in zip(("y", *trained), found, exact, strict=True):
        error = ((got - want).norm() / want.norm()).item()
        assert 1e-3 < error < 1.25 * NEAR, f"{name}: {error}"


@pytest.mark.parametrize("precision", RECIPES)
def test_gradients_of_projections_are_near_those_in_fp64(precision):
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(40, 64, generator=generator, requires_grad=True)
    weights = [torch.randn(n, 64, generator=generator, requires_grad=True) for n in (32, 16)]
    slopes = [torch.randn(40, n, generator=generator) for n in (32, 16)]
    leaves = [x_TD, *weights]
    found = torch.autograd.grad(linears_fp8(x_TD, weights, "auto", precision), leaves, slopes)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    products = [wide[0] @ w.t() for w in wide[1:]]
    exact = torch.autograd.grad(products, wide, [s.double() for s in slopes])
    assert 1e-3 < (found[0] - exact[0]).norm() / exact[0].norm() < NEAR
    for got, want in zip(found[1:], exact[1:], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)  # not quantised


@pytest.mark.parametrize("precision", ["fp8_gradients", "fp8_blocks"])
def test_a_weights_gradient_does_not_depend_on_where_its_expert_is(precision):
    """The expert has other neighbours, another position, or unused rows before it."""
    leaves, ids_TK, slope_TD = make_experts(width=128)

    def gradients(order):
        ids = torch.full_like(ids_TK, -1)
        for place, expert in enumerate(order):
            ids[ids_TK == expert] = place
        x, weights, *matrices = leaves.values()
        matrices = [w[list(order)].detach().requires_grad_() for w in matrices]
        indices = expert_indices(ids, len(order))
        y_TD = expert_mlp(x, weights, indices, *matrices, precision=precision)
        return torch.autograd.grad(y_TD, matrices, slope_TD)

    alone, among = gradients([3]), gradients([4, 3, 0, 1])
    for one, many in zip(alone, among, strict=True):
        assert torch.equal(one[0], many[1])


def test_a_group_takes_the_largest_scale_of_its_rows_and_loses_nothing_else():
    """Values above 2^-6 of the group's scale are unchanged, and smaller ones are near."""
    x_RM = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    x_RM *= torch.logspace(0, -6, 40)[:, None]
    rows = quantise_rows(x_RM)
    ends_E = torch.tensor([7, 7, 40], dtype=torch.int32)
    columns = place_columns(ends_E, 40)
    assert columns.offsets_E.tolist() == [128, 128, 256]
    made = transpose_rows(rows, columns)
    assert made.scales[0] == rows.scales[:7].max()
    assert made.scales[2] == rows.scales[7:].max()
    back_PM = made.rows(columns, torch.float32)
    assert (back_PM[7:128] == 0).all()
    assert (back_PM[161:] == 0).all()
    back_RM, want_RM = back_PM[[*range(7), *range(128, 161)]], rows.to(torch.float32)
    scale_R = made.scales[[0] * 7 + [2] * 33][:, None]
    is_normal = want_RM.abs() >= 2.0**-6 * scale_R
    assert 0.2 < is_normal.float().mean() < 0.9
    assert torch.equal(back_RM[is_normal], want_RM[is_normal])
    assert ((back_RM - want_RM).abs() <= 2.0**-10 * scale_R).all()


def make_head(tokens=64, dim=64, vocabulary=512, device="cpu"):
    """Return a head with half-certain predictions of 40 tokens; all others have about 1e-8 each."""
    generator = torch.Generator().manual_seed(0)
    h_TD = torch.randn(tokens, dim, generator=generator)
    w_VD = 0.3 * torch.randn(vocabulary, dim, generator=generator)
    h_TD[:, 0], w_VD[40:, 0], w_VD[:40, 0] = 4.0, -3.0, 0.0
    targets_T = torch.randint(40, (tokens,), generator=generator)
    leaves = (x.to(device).requires_grad_() for x in (h_TD, w_VD))
    return *leaves, targets_T.to(device), torch.full((tokens,), 2.0**-9, device=device)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_gradients_of_the_head_are_near_those_in_fp64(backend):
    h_TD, w_VD, targets_T, weights_T = given = make_head()
    plain = linear_cross_entropy_sum(*given, backend=backend)
    narrow = linear_cross_entropy_sum(*given, backend=backend, fp8_grads=True)
    for a, b in zip(plain, narrow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
        assert torch.equal(a, b) or backend == "reference"
    found = torch.autograd.grad(narrow.total, (h_TD, w_VD))
    wide = [x.detach().double().requires_grad_() for x in (h_TD, w_VD)]
    exact = linear_cross_entropy_sum(*wide, targets_T, weights_T, backend="reference")
    expected = torch.autograd.grad(exact.total, wide)
    p_TV = (wide[0] @ wide[1].t()).softmax(1)
    assert 1e-9 < p_TV[:, 40:].median() < 1e-7 < 0.1 < p_TV.amax(1).mean()
    # For tokens that are no target, e4m3 has no value as small as their gradients.
    parts = {"h": (found[0], expected[0]), "w": (found[1], expected[1])}
    parts["rare"] = (found[1][40:], expected[1][40:])
    for name, (got, want) in parts.items():
        error = ((got - want).norm() / want.norm()).item()
        assert 1e-3 < error < NEAR, f"{name}: {error}"


@pytest.mark.tier("quick", long=["cpu"])
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU")),
        pytest.param("cuda", marks=on_gpu),
    ],
)
def test_fp8_head_gradient_of_a_frequent_token_is_not_lost(device):
    """Each of a hundred terms is smaller than bf16's resolution of their sum."""
    h_TD, w_VD, targets_T, weights_T = make_head(6, device=device)
    with torch.no_grad():
        h_TD, w_VD = h_TD.repeat(100, 1).bfloat16(), (0.01 * w_VD).bfloat16()
    # Nearly all of a gradient is the target's, which lies between two values of e5m2.
    targets_T, weights_T = targets_T.repeat(100), 1.12 * weights_T.repeat(100)
    errors = {}
    for narrow in (False, True):
        w = w_VD.detach().clone().requires_grad_()
        given = (h_TD, w, targets_T, weights_T)
        loss = linear_cross_entropy_sum(*given, backend="triton", fp8_grads=narrow)
        wide = [x.detach().double().requires_grad_() for x in (h_TD, w)]
        exact = linear_cross_entropy_sum(*wide, targets_T, weights_T, backend="reference")
        want = torch.autograd.grad(exact.total, wide[1])[0]
        (got,) = torch.autograd.grad(loss.total, w)
        errors[narrow] = ((got - want).norm() / want.norm()).item()
    assert errors[False] < 0.02
    assert errors[True] < 0.045  # 0.022, and 0.107 if it is lost


def test_the_step_of_logits_gradients_is_the_least_power_of_two():
    for largest, step in ((1.0, 2.0**-15), (57344 * 2.0**-20, 2.0**-20), (57345.0, 2.0)):
        assert gradient_step(torch.tensor([-largest, 0.5 * largest]), 1.0) == step
        assert gradient_step(torch.tensor([largest]), 0.25) == step / 4
    assert gradient_step(torch.zeros(3), 1.0).isfinite()
    assert gradient_step(torch.zeros(0), 1.0).isfinite()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fp8_head_gradient_sums_small_terms():
    """Half of each prediction is spread over 50,000 tokens with nearly equal rows: the accumulators
    of tensor cores would lose all of it."""
    h_TD, w_VD, targets_T, weights_T = make_head(256, 256, 50_000, "cuda")
    with torch.no_grad():
        w_VD.mul_(0.1)
        w_VD[:, 1] = 1.0
        w_VD[:40, 0] = 1.48
    h_TD, w_VD = (x.detach().bfloat16().requires_grad_() for x in (h_TD, w_VD))
    total = linear_cross_entropy_sum(h_TD, w_VD, targets_T, weights_T, fp8_grads=True).total
    wide = [x.detach().double().requires_grad_() for x in (h_TD, w_VD)]
    exact = linear_cross_entropy_sum(*wide, targets_T, weights_T, backend="reference").total
    found, want = torch.autograd.grad(total, h_TD)[0], torch.autograd.grad(exact, wide[0])[0]
    # 0.026, and 0.046 or more in such accumulators.
    assert ((found - want).norm() / want.norm()) < 0.035


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_tokens_without_experts_are_not_read(backend):
    leaves, ids_TK, slope_TD = make_experts(tokens=9, experts=2, slots=1, dim=16, width=16)
    ids_TK[5:] = -1  # like unused rows in buffers of fixed sizes
    indices = expert_indices(ids_TK, 2, num_rows=7)
    x, weights, *matrices = leaves.values()
    with torch.no_grad():
        x[5:], slope_TD[5:] = float("nan"), float("nan")
    y_TD = expert_mlp(x, weights, indices, *matrices, backend, precision="fp8")
    assert (y_TD[5:] == 0).all()
    grads = torch.autograd.grad(y_TD, list(leaves.values()), slope_TD)
    assert all(g.isfinite().all() for g in (grads[0][:5], grads[1][:5], *grads[2:]))
    assert (grads[0][5:] == 0).all()


# In a model.
def fresh_model(precision="fp8"):
    arch = ARCH(moe_intermediate_size=RECIPES[precision].multiple)
    model = Transformer(arch, kernels=KernelsSection(precision=precision), moe=MoeSection())
    model.init_weights(std=0.3, seed=0)
    return model


def gradients_of(policy, precision, is_compiled=False):
    """Return gradients of the blocks' parameters after two micro-batches."""
    torch.compiler.reset()
    model = fresh_model(precision)
    model.set_recomputation(ActivationSection(policy=policy))
    if is_compiled:
        compile_counting(model)
    for step in range(2):
        hidden_BSD, _ = model.backbone(batch(step))
        hidden_BSD.pow(3).mean().backward()
    return {name: p.grad for name, p in model.layers.named_parameters()}


def test_the_setting_reaches_experts_and_the_head_and_nothing_else():
    gradients = {}
    for precision in ("fp8", "fp8_gradients"):
        model = fresh_model(precision)
        tokens_BS, targets_BS = torch.arange(16).view(2, 8), torch.arange(1, 17).view(2, 8)
        hidden_TD = model.backbone(Inputs(tokens_BS))[0].flatten(0, 1).detach().requires_grad_()
        given = (hidden_TD, model.head_weight, targets_BS.flatten(), torch.ones(16))
        model.vocabulary.loss_sum(*given).total.backward()
        gradients[precision] = {"head": model.head_weight.grad, "hidden": hidden_TD.grad}
        model.backbone(Inputs(tokens_BS))[0].pow(3).mean().backward()
        blocks = {name: p.grad.clone() for name, p in model.layers[-1].named_parameters()}
        blocks |= {f"moe {name}": p.grad for name, p in model.layers[0].moe.named_parameters()}
        gradients[precision] |= blocks
    pairs = zip(*(x.items() for x in gradients.values()), strict=True)
    changed = {name for (name, a), (_, b) in pairs if not torch.equal(a, b)}
    assert changed == {"head", "hidden", "moe experts.w_gate_up", "moe experts.w_down"}


@pytest.mark.tier(
    "quick",
    wide=[
        "compiled selective-fp8",
        "compiled selective-fp8_blocks",
        "compiled selective-fp8_gradients",
    ],
)
@pytest.mark.parametrize("precision", ["fp8", "fp8_gradients", "fp8_blocks"])
@pytest.mark.parametrize("policy", ["selective", "full", "compiled selective"])
def test_recomputation_changes_no_gradient(policy, precision):
    *compiled, policy = policy.split()
    gradients = gradients_of(policy, precision, bool(compiled))
    expected = gradients_of("none", precision)
    for name, want in expected.items():
        error = (gradients[name] - want).norm() / want.norm()
        assert error < 1e-3, f"{policy} {name}: {error}"


@pytest.mark.tier("long")
def test_compiled_evaluation_gives_the_same_bits():
    """A forward without a backward is a graph of its own."""
    torch.compiler.reset()
    models = [fresh_model() for _ in range(2)]
    counter = compile_counting(models[0])
    with torch.no_grad():
        compiled_BSD, eager_BSD = (model.backbone(batch(0))[0] for model in models)
    assert counter.frame_count == 2
    assert torch.equal(compiled_BSD, eager_BSD)


@pytest.mark.tier("long", wide=["2-fp8_blocks", "2-fp8_gradients"])
@pytest.mark.parametrize(
    ("world", "precision"),
    [
        *((world, f"fp8{ending}") for world in (2, 4) for ending in ("", "_gradients")),
        (2, "fp8_blocks"),
        (4, "fp8_blocks_ue8m0"),
    ],
)
def test_every_mesh_gives_the_single_process_answer(world, precision, tiny_words):
    words = [*SIZES, f"model.moe_intermediate_size={RECIPES[precision].multiple}"]
    words = words_of(tiny_words, *words, f"kernels.precision={precision}")
    names = {2: ("dp", "ep"), 4: ("ep", "ep+efsdp")}[world]
    runs = {f"{name} plain": [*words, *LAYOUTS[world][name]] for name in names}
    if world == 2:
        # There is one micro-batch, so that no pass counts ahead: that would be evaluation's graph,
        # compiled above.
        one = ["compile.enabled=yes", "train.micro_batch_size=4"]
        runs["ep compile"] = [*runs["ep plain"], *one]
        split = ["parallel.pp=2", "train.micro_batch_size=4"]
        runs["pp plain"] = [*words, *split]
    expected = run([*words, "train.micro_batch_size=8"])
    answers = spawn(world, run_layouts, runs, timeout=300)[0]
    for name, answer in answers.items():
        numbers, gradients, biases = expected
        if "pp" in name:  # of this stage's blocks
            assert "layers.0.moe.experts.w_down" in answer[1]
            gradients = {parameter: gradients[parameter] for parameter in answer[1]}
        # A sum in another order rounds differently, and quantisation turns that into a step.
        compare({name: answer}, (numbers, gradients, biases), 3e-3)


OTHERS = {
    "biases": ["model.preset=gpt-oss-20b", "model.moe_intermediate_size=32"],
    "biases and adapters": [
        "model.preset=gpt-oss-20b",
        "model.moe_intermediate_size=32",
        "lora.rank=8",
        "moe.bias_update_rate=0",
    ],
    "gelu": ["model.preset=gemma-4-26b-a4b", "model.moe_intermediate_size=32"],
    "squared relu": [
        "model.preset=nemotron-3-nano-30b-a3b",
        "model.moe_intermediate_size=32",
        "model.num_layers=6",  # the first with attention
    ],
    "adapters": ["lora.rank=8", "model.moe_intermediate_size=32", "moe.bias_update_rate=0"],
}


@pytest.mark.tier("long", wide=["gelu", "squared relu", "adapters"])
@pytest.mark.parametrize("kind", OTHERS)
def test_ranks_with_other_experts_give_the_single_process_answer(kind, tiny_words):
    words = words_of(tiny_words, "model.hidden_size=32", "model.head_dim=16", *OTHERS[kind])
    words += ["kernels.precision=fp8_gradients", "model.num_experts_per_token=2"]
    expected = run([*words, "train.micro_batch_size=8"])
    runs = {name: [*words, *LAYOUTS[2][name]] for name in ("dp", "ep")}
    for name, answer in spawn(2, run_layouts, runs, timeout=300)[0].items():
        compare({name: answer}, expected, 3e-3)


def check_transports(precision: Precision) -> None:
    """Check that rows and gradients travel in e4m3, and that experts see the same bits."""
    sys.modules["deep_ep"] = fake_deep_ep
    recipe = RECIPES[precision]
    size, group = Size(8, 3, 160 if recipe.tiled else 32, recipe.multiple), dist.group.WORLD
    experts = make_weights(size)
    deep = DeepEP(size.experts, group, size.width, num_sms=6, precision=precision)
    plain, narrow = (AllToAll(size.experts, group, precision=p) for p in ("bf16", precision))
    layer = partial(run_narrow, precision=precision)
    for seed, routing in enumerate(ROUTINGS):
        batch = make_batch(size, (40, 7, 0, 101)[dist.get_rank()], routing, seed)
        answers = {}
        for name, transport, static in (
            ("plain", plain, None),
            ("all-to-all", narrow, None),
            ("exact", deep, None),
            ("static", deep, static_sizes(size, capacity=4.0)),
        ):
            deep.static = static
            fake_deep_ep.calls.clear()
            with patch.object(dispatch, "all_to_all_single", wraps=all_to_all_single) as sent:
                answers[name] = run_step(partial(layer, transport), batch, experts)
            dtypes = [call.args[0].dtype for call in sent.call_args_list]
            assert dtypes.count(torch.uint8) == 2 * (name == "all-to-all")
            assert fake_deep_ep.calls["in e4m3"] == 2 * (transport is deep)
            assert_same(answers[name], answers["plain"], 1e-6, (routing, name))


@pytest.mark.tier("long", quick=["2-fp8_blocks"])
@pytest.mark.parametrize(("world", "precision"), [(2, "fp8"), (4, "fp8"), (2, "fp8_blocks")])
def test_rows_sent_in_e4m3_change_no_bit(world, precision):
    spawn(world, check_transports, precision, timeout=200)


def sample_over_ranks(words):
    trainer = Trainer(Config.load(None, words, environ={}))
    transports = [layer.moe.dispatcher for layer in trainer.model.layers]
    model, _ = replica(trainer.engine)
    generators = [layer.moe.dispatcher for layer in model.layers]
    return [{t.precision for t in of} for of in (transports, generators)]


def test_generation_over_ranks_sends_tokens_as_they_are(tiny_words):
    words = [*tiny_words, *SIZES, FP8, "parallel.ep=2", "train.micro_batch_size=2"]
    assert spawn(2, sample_over_ranks, words)[0] == [{"fp8"}, {"bf16"}]


@pytest.mark.tier("wide")
def test_fp8_learns_as_bf16_does(tiny):
    last = {}
    for precision in ("bf16", "fp8", "fp8_gradients", "fp8_blocks"):
        words = [
            *SIZES,
            "model.moe_intermediate_size=128",
            "train.steps=40",
            "optim.lr=3e-3",
            f"kernels.precision={precision}",
        ]
        trainer = Trainer(tiny(*words, "checkpoint.resume=never", "train.sample_tokens=0"))
        trainer.fit()
        losses = [row["loss"] for row in read_metrics(trainer.reporter.log.path) if "loss" in row]
        last[precision] = sum(losses[-5:]) / 5
    assert last["bf16"] < 0.8 * losses[0]
    assert list(last.values()) == [pytest.approx(last["bf16"], rel=0.03)] * len(last)
    assert len(set(last.values())) == len(last)


def test_generation_computes_in_bf16(tiny):
    model = fresh_model()
    Generator(model, None, num_pages=2)
    found = {module.precision for module in model.modules() if hasattr(module, "precision")}
    assert found == {"bf16"}


# Refusals.
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("model.hidden_size=40", r"multiples of 16, and attn.wq.weight is \[.*, 40\]; use bf16"),
        ("model.moe_intermediate_size=24", "whose width is a multiple of 16, and these have 24"),
        ("model.moe_intermediate_size=192", "'fp8_blocks' needs .* multiple of 128, .* have 192"),
        ("model.hidden_size=24", "'fp8_gradients' takes widths that are multiples of 16"),
        ("parallel.tp=2", "'fp8' contradicts parallel.tp 2"),
        ("kernels.attention=exact", "'fp8' contradicts kernels.attention 'exact'"),
    ],
)
def test_fp8_refuses_unsupported_settings(words, problem):
    found = [p for p in RECIPES if f"'{p}'" in problem]
    precision = f"kernels.precision={found[0] if found else 'fp8'}"
    with pytest.raises(ConfigError, match=f"kernels.precision: .*{problem}"):
        resolve_run(Config.load(None, [precision, words], environ={}))


def test_reinforcement_learning_refuses_fp8(tmp_path):
    from moetrain.config import Recipes
    from moetrain.rl.setup import Setup

    config = Config.load(None, [FP8, f"output_dir={tmp_path}"], environ={}, recipes=Recipes.RL)
    config, arch = resolve_run(config)
    with pytest.raises(ConfigError, match=r"kernels.precision: 'fp8', but .* generated in bf16"):
        Setup(config, arch, "cpu")
