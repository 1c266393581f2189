"""Adapters of several tenants in one product: each has what it has alone."""

import pytest
import torch

from moetrain.kernels.experts.mlp import adapted_expert_mlp
from moetrain.kernels.experts.permutation import expert_indices
from moetrain.kernels.small_m import add_low_rank, low_rank_products


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("tenants", "rows"), [(1, 64), (3, 64), (8, 128)])
def test_dense_adapters_of_tenants_have_the_bits_they_have_alone(tenants, rows):
    x, y = normal(tenants * rows, 24), normal(tenants * rows, 40, seed=1)
    a = normal(tenants, 8, 24, seed=2).requires_grad_()
    b = normal(tenants, 40, 8, seed=3).requires_grad_()
    x.requires_grad_()

    def run(x, y, a, b):
        (u,) = low_rank_products(x, [a])
        made = add_low_rank(y, u, b, 0.5)
        return made, *torch.autograd.grad(made.square().sum(), (x, a, b))

    together = run(x, y, a, b)
    for i, part in enumerate(torch.arange(tenants * rows).split(rows)):
        alone = run(x[part], y[part], a[i], b[i])
        mine = (together[0][part], together[1][part], together[2][i], together[3][i])
        assert all(map(torch.equal, mine, alone))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("empty", [0.0, 0.4, 1.0])
def test_expert_adapters_of_tenants_are_those_of_each_alone(backend, empty):
    tenants, rows, k, experts, dim, width = 3, 13, 2, 5, 16, 8
    tokens = tenants * rows
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]).int()
    ids = torch.where(torch.rand(tokens, k) < empty, -1, ids)
    x, weights = normal(tokens, dim), normal(tokens, k, seed=1).sigmoid()
    frozen = normal(experts, 2 * width, dim, seed=2), normal(experts, dim, width, seed=3)
    shapes = (8, dim), (2 * width, 8), (8, width), (dim, 8)
    adapters = [normal(tenants, experts, *shape, seed=9) for shape in shapes]

    def run(part, adapters):
        given = [x[part].requires_grad_(), weights[part].requires_grad_()]
        trained = [adapter.clone().requires_grad_() for adapter in adapters]
        how = expert_indices(ids[part], experts, backend), *frozen, *trained, 0.5, backend
        y = adapted_expert_mlp(*given, *how)
        found = torch.autograd.grad(y.square().sum(), (*given, *trained))
        has_expert = ids[part] >= 0
        return [y, found[0], found[1][has_expert]], found[2:]

    (y, dx, dw), gradients = run(slice(None), adapters)
    ends = (ids >= 0).view(tenants, -1).sum(1).tolist()
    parts = zip(y.split(rows), dx.split(rows), dw.split(ends), strict=True)
    for i, mine in enumerate(parts):
        alone, theirs = run(slice(i * rows, (i + 1) * rows), [adapter[i] for adapter in adapters])
        for one, other in zip((*mine, *(g[i] for g in gradients)), (*alone, *theirs), strict=True):
            assert one.shape == other.shape
            assert torch.linalg.vector_norm(one - other) <= 1e-6 * torch.linalg.vector_norm(other)
