"""Linear attention in chunks equals its rule token by token."""

import pytest
import torch

from moetrain.kernels.linear_attention.gated_delta import CHUNK
from tests.lib.specs.linear_attention import SPECS, recurrence
from tests.lib.specs.spec import with_grad

RULES = [spec for spec in SPECS if spec.name in ("gated_delta", "ssd", "kda")]
DELTA, _, KDA = RULES
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


@pytest.mark.parametrize("decay", [0.01, 8.0])
def test_kda_is_exact_for_slow_and_fast_gates(decay):
    """G falls to -512 in a chunk, where exp(-G) would overflow, and every gradient is finite."""
    case = {**LENGTHS, "decay": decay}
    generator = torch.Generator().manual_seed(1)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 3e-5)):
        inputs = with_grad(KDA, KDA.make_inputs(case, torch.float64, generator), dtype)
        wide = with_grad(KDA, inputs, torch.float64)
        got, leaves = KDA.reference(**inputs), [inputs[x] for x in KDA.differentiable]
        others = [wide[x] for x in KDA.differentiable]
        want = recurrence(*others, inputs["bounds_N"], case["K"] ** -0.5)
        upstream = torch.randn(want.shape, generator=generator, dtype=torch.float64)
        ours = (got, *torch.autograd.grad(got, leaves, upstream.to(dtype)))
        theirs = (want, *torch.autograd.grad(want, others, upstream))
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_kda_with_equal_gates_is_the_gated_delta_rule(backend):
    case = {"lengths": (70, 3), "H": 2, "K": 64, "equal": True}
    inputs = KDA.make_inputs(case, torch.float32, torch.Generator().manual_seed(2))
    names = {"q_THK": "q_TQK", "k_THK": "k_TQK", "g_THK": "g_TH"}
    shared = {names.get(name, name): x for name, x in inputs.items()}
    shared["g_TH"] = inputs["g_THK"][..., 0].contiguous()
    want = DELTA.fast(**shared, backend=backend)
    torch.testing.assert_close(KDA.fast(**inputs, backend=backend), want, rtol=3e-5, atol=3e-6)
