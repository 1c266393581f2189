"""Helpers of tests/parallel/expert/test_expert_parallel.py that other tests use too."""

from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moetrain.config import KernelsSection, MoeSection
from moetrain.kernels.experts.routed import Routed
from moetrain.models.layers import Context
from moetrain.models.moe import MoE, RoutedExperts
from moetrain.parallel.expert.dispatch import AllToAll, ExpertParallelDispatcher
from moetrain.runtime.backend import Backend
from tests.lib.architectures import make_architecture

# Experts per token: more than the ranks in a world of 2, fewer than in one of 4.
EXPERTS, TOP_K, WIDTH = 8, 3, 16
ARCH = make_architecture(
    family="qwen3_moe",
    vocab_size=40,
    hidden_size=WIDTH,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    num_experts=EXPERTS,
    num_experts_per_token=TOP_K,
    moe_intermediate_size=12,
)
NOTHING: Any = None
CONTEXT = Context(NOTHING, NOTHING)  # the layer asks for pads alone
# The number of tokens on each rank.
EVEN, UNEVEN, ALL_ON_ONE, NONE = (6, 6, 6, 6), (0, 7, 1, 100), (0, 5, 0, 0), (0, 0, 0, 0)
FEW = (0, 7, 1, 3)  # for Triton's interpreter, which is slow
# The expert that replaces each expert of the router's choice; -1: none.
NATURAL = tuple(range(EXPERTS))
ROUTINGS = {
    "natural": NATURAL,
    "one-hot": (5,) * EXPERTS,
    "first half empty": (4, 5, 6, 7) * 2,
    "two experts of one rank": (4, 5) * 4,
    "some dropped": (0, -1, 2, -1, -1, 5, 6, 7),
    "all dropped": (-1,) * EXPERTS,
}


class Rerouted(nn.Module):
    """Router that replaces its choices: expert e becomes ``table_E[e]``."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router
        self.register_buffer("table_E", torch.tensor(NATURAL, dtype=torch.int32))

    def forward(self, x_TD: torch.Tensor, *others: torch.Tensor | None) -> Routed:
        routed = self.router(x_TD, *others)
        return routed._replace(ids_TK=self.table_E[routed.ids_TK.long()])


class Pair(NamedTuple):
    """The layer with all experts, and the same layer with this rank's experts."""

    whole: MoE
    mine: MoE


def local_experts() -> slice:
    size = EXPERTS // dist.get_world_size()
    return slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)


def make_dispatcher(backend: Backend = "auto") -> ExpertParallelDispatcher:
    return AllToAll(EXPERTS, dist.group.WORLD, backend)


def make_pair(backend: Backend = "auto") -> Pair:
    layers = []
    for _ in range(2):
        layer = MoE(RoutedExperts.of(ARCH), MoeSection(), KernelsSection())
        generator = torch.Generator().manual_seed(0)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
        layer.router = Rerouted(layer.router)
        layers.append(layer)
    mine = layers[1]
    for name, parameter in list(mine.experts.named_parameters()):
        setattr(mine.experts, name, nn.Parameter(parameter.detach()[local_experts()].clone()))
    mine.dispatcher = make_dispatcher(backend)
    return Pair(*layers)


def check_step(pair: Pair, tokens: tuple[int, ...], routing: str, seed: int, recompute: bool):
    """Compare the outputs and every gradient of one forward and backward."""
    rank, tokens = dist.get_rank(), tokens[: dist.get_world_size()]

    def close(got: torch.Tensor, want: torch.Tensor) -> None:
        largest = want.abs().max().item() if want.numel() else 0.0
        case = f"rank {rank}, tokens {tokens}, {routing}, step {seed}"
        torch.testing.assert_close(
            got, want, rtol=0, atol=1e-6 * largest, msg=lambda text: f"{case}: {text}"
        )

    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(sum(tokens), WIDTH, generator=generator)
    slope_TD = torch.randn(x_TD.shape, generator=generator)
    start = sum(tokens[:rank])
    part = slice(start, start + tokens[rank])
    runs = []
    for layer, rows in zip(pair, (slice(None), part), strict=True):
        layer.zero_grad()
        layer.router.table_E.copy_(torch.tensor(ROUTINGS[routing]))
        x_BSD = x_TD[rows][None].clone().requires_grad_()
        if recompute:
            y_BSD, stats = checkpoint(layer, x_BSD, CONTEXT, use_reentrant=False)
        else:
            y_BSD, stats = layer(x_BSD, CONTEXT)
        loss = (y_BSD * slope_TD[rows]).sum() + stats.z_sum
        loss.backward()
        runs.append((y_BSD.detach()[0], x_BSD.grad[0], layer.router.router.weight.grad))
    (y_TD, d_x_TD, d_router), (y_mine, d_x_mine, d_router_mine) = runs
    close(y_mine, y_TD[part])
    close(d_x_mine, d_x_TD[part])
    dist.all_reduce(d_router_mine)
    close(d_router_mine, d_router)
    for name, parameter in pair.whole.experts.named_parameters():
        own = getattr(pair.mine.experts, name).grad[: EXPERTS // dist.get_world_size()]
        close(own, parameter.grad[local_experts()])


class CountExchanges(TorchDispatchMode):
    """Counts the calls of the dispatcher's ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moetrain" and "exchange" in func.__name__:
            self.calls[func.__name__.removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))
