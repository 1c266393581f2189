"""Specs of all kernels, used by ``test_kernels.py`` and ``scripts/bench_kernels.py``."""

from tests.lib.specs import (
    attention,
    clamped_experts,
    experts,
    linear_attention,
    loss,
    low_rank,
    norm,
    optim,
    quant,
    routing,
)

SPECS = (
    *attention.SPECS,
    *routing.SPECS,
    *experts.SPECS,
    *clamped_experts.SPECS,
    *linear_attention.SPECS,
    *loss.SPECS,
    *low_rank.SPECS,
    *norm.SPECS,
    *optim.SPECS,
    *quant.SPECS,
)
