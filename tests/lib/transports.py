"""One layer of experts over any transport, and its batches, shared by tests of transports."""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moetrain.kernels.experts.mlp import expert_mlp
from moetrain.parallel.expert.deepep import DeepEP, StaticSizes
from moetrain.parallel.expert.dispatch import AllToAll

MAX_TOKENS = 101
ROUTINGS = ("balanced", "natural", "one-hot", "first half empty", "empty")


class Size(NamedTuple):
    experts: int
    top_k: int
    width: int
    expert_width: int


SMALL, LARGE = Size(8, 3, 16, 12), Size(32, 8, 1024, 256)


class Batch(NamedTuple):
    """One rank's tokens, and the loss gradient of the layer's output for them."""

    x_TD: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    slope_TD: torch.Tensor


def make_batch(size: Size, tokens: int, routing: str, seed: int, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed * 100 + dist.get_rank())
    E, K = size.experts, size.top_k
    ids_TK = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K]
    if routing == "balanced":
        ids_TK = torch.arange(tokens * K).view(tokens, K) % E
    elif routing == "natural":
        ids_TK[torch.rand(tokens, K, generator=generator) < 0.2] = -1
    elif routing == "one-hot":
        ids_TK = torch.where(torch.arange(K) == 1, E - 3, -1).expand(tokens, K)
    elif routing == "first half empty":
        ids_TK = torch.rand(tokens, E // 2, generator=generator).argsort(1)[:, :K] + E // 2
    elif routing == "empty":
        ids_TK = torch.full((tokens, K), -1)
    x_TD, slope_TD = torch.randn(2, tokens, size.width, generator=generator).to(dtype)
    weights_TK = torch.rand(tokens, K, generator=generator)
    # The copy has one stride: an empty tensor counts as contiguous with any.
    ids_TK = ids_TK.int().clone(memory_format=torch.contiguous_format)
    return Batch(*(x.to(device) for x in (x_TD, ids_TK, weights_TK, slope_TD)))


def make_experts(size: Size, device="cpu", dtype=torch.float32) -> list[torch.Tensor]:
    """Make this rank's weights: gate and up, down."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    E, D, F = size.experts // dist.get_world_size(), size.width, size.expert_width
    shapes = ((E, 2 * F, D), (E, D, F))
    weights = [torch.randn(s, generator=generator) * s[-1] ** -0.5 for s in shapes]
    return [w.to(device, dtype).requires_grad_() for w in weights]


def run_layer(dispatcher, x_TD, ids_TK, weights_TK, gate_up, down, backend="auto") -> torch.Tensor:
    sent = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    y_SD = expert_mlp(sent.x_SD, sent.weights_SK, sent.indices, gate_up, down, backend)
    return dispatcher.combine(y_SD, sent.ctx)


def run_narrow(dispatcher, x_TD, ids_TK, weights_TK, gate_up, down, precision="fp8"):
    """Run :func:`run_layer` in e4m3."""
    sent = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    y_SD = expert_mlp(sent.x_SD, sent.weights_SK, sent.indices, gate_up, down, precision=precision)
    return dispatcher.combine(y_SD, sent.ctx)


def run_step(run, batch: Batch, experts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the output and every gradient."""
    x_TD, weights_TK = (x.clone().requires_grad_() for x in (batch.x_TD, batch.weights_TK))
    y_TD = run(x_TD, batch.ids_TK, weights_TK, *experts)
    leaves = {"tokens": x_TD, "weights": weights_TK, "gate_up": experts[0], "down": experts[1]}
    grads = torch.autograd.grad(y_TD, list(leaves.values()), batch.slope_TD)
    results = {"output": y_TD.detach(), **dict(zip(leaves, grads, strict=True))}
    # The weight of a slot without an expert has no defined gradient.
    results["weights"] = results["weights"].masked_fill(batch.ids_TK < 0, 0)
    return results


def assert_same(got: dict, want: dict, tolerance: float, case: Any) -> None:
    for name, value in want.items():
        largest = value.abs().max().item() if value.numel() else 0.0
        torch.testing.assert_close(
            got[name],
            value,
            rtol=0,
            atol=tolerance * largest,
            msg=lambda text, name=name: f"rank {dist.get_rank()}, {case}, {name}: {text}",
        )


def static_sizes(size: Size, capacity: float = 2.0, max_tokens: int = MAX_TOKENS) -> StaticSizes:
    return StaticSizes.plan(
        max_tokens,
        capacity=capacity,
        num_experts=size.experts,
        top_k=size.top_k,
        ranks=dist.get_world_size(),
    )


def dispatchers(size: Size, num_sms=6) -> tuple[DeepEP, AllToAll]:
    """Return DeepEP and the reference dispatcher."""
    group = dist.group.WORLD
    ours = DeepEP(size.experts, group, size.width, num_sms=num_sms)
    return ours, AllToAll(size.experts, group)


def recomputed(layer, *inputs):
    return checkpoint(layer, *inputs, use_reentrant=False)


def saving(layer, *inputs):
    """Recompute the layer in the backward, except the outputs of the transport's ops."""

    def policy(ctx, op, *args, **kwargs):
        keep = "deepep" in op.name()
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(layer, *inputs, use_reentrant=False, context_fn=contexts)


def plainly(layer, *inputs):
    return layer(*inputs)
