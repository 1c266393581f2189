"""Linear attention in chunks equals its rule token by token."""

import pytest
import torch

from moetrain.kernels.linear_attention.gated_delta import CHUNK
from tests.lib.specs.linear_attention import SPECS, recurrence
from tests.lib.specs.spec import with_grad

RULES = [spec for spec in SPECS if spec.name in ("gated_delta", "ssd")]
LENGTHS = {"lengths": (3, 0, CHUNK, 2 * CHUNK + 5, 1), "H": 4, "Q": 2, "K": 5, "V": 3}


@pytest.mark.parametrize("spec", RULES, ids=lambda spec: spec.name)
def test_chunks_give_what_tokens_in_sequence_do(spec):
    generator = torch.Generator().manual_seed(0)
    inputs = with_grad(spec, spec.make_inputs(LENGTHS, torch.float64, generator), torch.float64)
    q, k, values, g, *beta = (inputs[name] for name in spec.differentiable)
    scale = k.shape[2] ** -0.5 if beta else 1.0
    want = recurrence(q, k, values, g, beta[0] if beta else None, inputs["bounds_N"], scale)
    got = spec.reference(**inputs)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    upstream = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    leaves = [inputs[name] for name in spec.differentiable]
    pairs = zip(*(torch.autograd.grad(y, leaves, upstream) for y in (got, want)), strict=True)
    for name, (a, b) in zip(spec.differentiable, pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=name)
