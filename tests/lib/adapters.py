"""Helpers of tests/models/parts/test_lora.py that other tests use too."""

import functools

import pytest
import torch
from torch.nn import functional as F

from moetrain.data.packing import IGNORE_INDEX
from moetrain.losses.balancing import load_balancing_loss, router_z_loss
from moetrain.models.rules import ADAPTER
from moetrain.models.transformer import Inputs, Transformer
from moetrain.parallel import apply
from tests.lib.distributed import compile_by_turns
from tests.lib.engines import (
    WORDS,
    make_batches,
    make_engine,
    objective_of,
    weights_of,
)

TOLERANCE = 1e-5
MICRO = 2
BASE = [
    *WORDS,
    f"train.micro_batch_size={MICRO}",
    "moe.bias_update_rate=0",
    "moe.aux_loss_scope=global_batch",
    "lora.rank=8",
    "lora.alpha=4",
]
EVERYTHING = "lora.targets=*.attn.*,*.router,*.experts"


def base_of(name):
    if name != "dense":
        return BASE
    kept = [w for w in BASE if "expert" not in w and "moe" not in w]
    return [*kept, "model.preset=qwen3-0.6b"]


def value_of(name, shape):
    """Return an adapter's value, the same on every mesh and large enough to change results."""
    generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    return 0.3 * torch.randn(shape, generator=generator)


def adapted(*words, base=BASE):
    """Return an engine whose adapters have the values of :func:`value_of`."""
    engine = make_engine(*words, base=base, micro=MICRO)
    for name, entry in engine.stages.table.items():
        if name.endswith(ADAPTER):
            engine.fsdp.write(name, (), value_of(name, entry.shape))
    return engine


def gradients_of(engine):
    """Return norm and whole gradients of trained parameters, on every rank, then clear them."""
    norm = engine.fsdp.gradient_norm().item()
    members = engine.fsdp.members

    def here(name):
        return members[name].layout.whole(members[name].local.grad)

    found = {
        name: engine.stages.whole(entry, functools.partial(here, name)).clone()
        for name, entry in engine.stages.trained.items()
    }
    assert all(bucket.gradient_N is None for bucket in engine.fsdp.buckets if not bucket.is_trained)
    engine.forget()
    return norm, found


def learn(words, base=BASE):
    """Return the losses, the gradient norm and the gradients of the first step."""
    engine = adapted(*words, base=base)
    world = engine.world
    batches = make_batches(0, MICRO, world.data_rank, world.dims.data_ranks)
    totals = engine.forward_backward(batches, objective_of(engine))
    return [x.item() for x in totals.terms.values()], *gradients_of(engine)


def dense_reference(words, base=BASE):
    """Compute :func:`learn` by autograd alone, in fp64, in a plain model with weights W + s B A."""
    engine = adapted(*words, base=base)
    mine, arch = {n: x.double().cpu() for n, x in weights_of(engine).items()}, engine.arch
    adapters = {n: x.detach().requires_grad_() for n, x in mine.items() if n.endswith(ADAPTER)}
    scale = engine.config.lora.alpha / engine.config.lora.rank ** (
        0.5 if engine.config.lora.rs else 1
    )
    model = Transformer(arch)
    weights = {}
    for name in dict(model.named_parameters()):
        weights[name] = mine[name]
        if f"{name}_lora_a" in adapters:
            a, b = adapters[f"{name}_lora_a"], adapters[f"{name}_lora_b"]
            weights[name] = mine[name] + scale * torch.einsum("...or,...ri->...oi", b, a)
    (batch,) = make_batches(0)
    hidden_BSD, routing = torch.func.functional_call(
        _Backbone(model), {f"model.{k}": v for k, v in weights.items()}, batch.tokens_BS
    )
    head = weights.get("lm_head.weight", weights["embed.weight"])
    logits_TV = F.linear(hidden_BSD, head).flatten(0, 1)
    terms = [F.cross_entropy(logits_TV, batch.targets_BS.flatten(), ignore_index=IGNORE_INDEX)]
    coefficients = [1.0]
    if routing is not None:
        tokens = batch.tokens_BS.numel()
        terms += [
            load_balancing_loss(routing.counts_LE, routing.prob_sum_LE, tokens),
            router_z_loss(routing.z_sum_L, tokens),
        ]
        coefficients += [0.1, 0.01]
    total = torch.stack([c * t for c, t in zip(coefficients, terms, strict=True)]).sum()
    gradients = dict(
        zip(adapters, torch.autograd.grad(total, list(adapters.values())), strict=True)
    )
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    return [t.item() for t in terms], norm, gradients


class _Backbone(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens_BS):
        return self.model.backbone(Inputs(tokens_BS))


def compare(name, answer, expected):
    """Compare losses, the norm and every gradient."""
    assert answer[0] == pytest.approx(expected[0], rel=TOLERANCE), name
    assert answer[1] == pytest.approx(expected[1], rel=TOLERANCE), name
    assert set(answer[2]) == set(expected[2]), name
    for parameter, gradient in answer[2].items():
        wanted = expected[2][parameter]
        assert wanted.norm() > 0, parameter
        error = (gradient.double() - wanted).norm() / wanted.norm()
        assert error <= TOLERANCE, f"{name}: gradient of {parameter} is off by {error:.1e}"


def learn_all(runs, base=BASE):
    """Run :func:`learn` for every run on this rank."""
    answers = {}
    with pytest.MonkeyPatch.context() as patch:
        # The attribute is registered here, so that it is restored at the end.
        patch.setattr(apply, "compile_blocks", None)
        for name, words in runs.items():
            torch.compiler.reset()
            compile_by_turns(words)
            answers[name] = learn(words, base)
    return answers
