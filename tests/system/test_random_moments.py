"""Random updates of float8 moments and bf16 weights: their mean equals AdamW's in fp64.

Each case is drawn by its number: a shape, rates, the state after some steps, and a gradient. The
same step is taken with many seeds of the random bits. The mean of the weights, and of both moments,
is compared with the formula of arXiv 1711.05101 from the same dequantised state, within the
standard errors of so many roundings. ``RANDOM_MOMENTS`` selects cases; by default there are a few:

    RANDOM_MOMENTS=100:1000 python -m pytest tests/system/test_random_moments.py  100 from 1000 on
"""

import os
import random

import pytest
import torch

from moetrain.kernels.optim.adamw import Settings
from moetrain.kernels.optim.adamw_float8 import QuantisedMoment
from tests.lib.float8_moments import moments_of

SEEDS = 300
LIMIT = 6.0
"""The largest allowed distance of a mean, in standard errors."""


def widened(moments):
    first, first_scales, second, second_scales = moments
    return (
        QuantisedMoment(first, first_scales).dequantise(is_signed=True).double(),
        QuantisedMoment(second, second_scales).dequantise(is_signed=False).double(),
    )


def compare(number):
    """Describe the means that are off, in standard errors; nothing if all are right."""
    d = random.Random(number)
    shape = (d.choice([1, 2, 5]), d.choice([1, 31, 32, 33, 70]))
    g = torch.Generator().manual_seed(number)
    beta1, beta2 = d.choice([0.0, 0.5, 0.9]), d.choice([0.9, 0.95, 0.999])
    eps, lr, decay = d.choice([1e-8, 1e-3]), 10 ** d.uniform(-5, -1), d.choice([0.0, 0.1])
    clip, decays = d.choice([1.0, 0.3]), d.random() < 0.7
    scale = 10 ** d.uniform(-4, 2)
    param = (torch.randn(shape, generator=g) * 10 ** d.uniform(-2, 1)).bfloat16()

    def gradient():
        spread = torch.exp(d.choice([0.0, 1.0]) * torch.randn(shape, generator=g))
        return scale * spread * torch.randn(shape, generator=g)

    def rates(settings, step):
        state = torch.tensor(float(step)), torch.tensor(clip), torch.tensor(False)
        return settings.rates(*state, lr, decay)

    moments, steps = moments_of(shape), d.choice([0, 1, 5])
    for step in range(1, steps + 1):
        settings = Settings(beta1, beta2, eps, seed=number)
        moments.update(param, gradient(), None, rates(settings, step), settings, decays)
    grad, step = gradient(), steps + 1
    first, second = widened(moments)
    g64 = grad.double() * clip
    first = beta1 * first + (1 - beta1) * g64
    second = beta2 * second + (1 - beta2) * g64.square()
    hat = first / (1 - beta1**step), second / (1 - beta2**step)
    wanted = param.double() * (1 - lr * decay * decays)
    wanted = wanted - lr * hat[0] / (hat[1].sqrt() + eps)
    kept = [x.clone() for x in moments]
    sums = [torch.zeros(shape, dtype=torch.float64) for _ in range(6)]
    for seed in range(SEEDS):
        for x, old in zip(moments, kept, strict=True):
            x.copy_(old)
        settings, weight = Settings(beta1, beta2, eps, seed=1000 * number + seed), param.clone()
        moments.update(weight, grad, None, rates(settings, step), settings, decays)
        for i, x in enumerate((weight.double(), *widened(moments))):
            sums[2 * i] += x
            sums[2 * i + 1] += x.square()
    # Second moments below 2^-31 of their group's largest are deliberately not 0.
    whole = torch.nn.functional.pad(second, (0, -shape[1] % 32)).unflatten(1, (-1, 32))
    largest = whole.amax(-1, keepdim=True).expand_as(whole).flatten(1)[:, : shape[1]]
    wrong = []
    for i, (name, exact) in enumerate({"weight": wanted, "first": first, "second": second}.items()):
        mean = sums[2 * i] / SEEDS
        spread = (sums[2 * i + 1] / SEEDS - mean.square()).clamp(min=0).sqrt()
        error = (mean - exact).abs()
        # A value very near a code is rounded the other way too rarely for this sample: its distance
        # to the code must then be below a few roundings of all samples.
        step_size = exact.abs() / 8 + largest.sqrt() * 2.0**-17
        step_size = exact.abs() / 128 if name == "weight" else step_size
        bits = 2.0**-8 if name == "first" else 2.0**-12
        allowed = LIMIT * (spread / SEEDS**0.5 + step_size / SEEDS) + bits * step_size + 1e-30
        if name == "second":
            allowed = torch.where(
                second < 2.0**-30 * largest, allowed + 2.0**-30 * largest, allowed
            )
        if not (error <= allowed).all():
            place = (error / allowed).argmax()
            found = [x.flatten()[place].item() for x in (mean, exact, spread, allowed)]
            wrong.append(f"{name}: {found}")
    return wrong


@pytest.mark.tier("long")
def test_random_updates_are_adamw_on_average():
    count, first = map(int, os.environ.get("RANDOM_MOMENTS", "6:0").split(":"))
    wrong = []
    for number in range(first, first + count):
        again = f"RANDOM_MOMENTS=1:{number} pytest tests/system/test_random_moments.py"
        wrong += [f"{what}\n    {again}" for what in compare(number)]
    assert not wrong, "\n".join(wrong)
