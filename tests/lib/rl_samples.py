"""Helpers of tests/rl/test_rows.py that other tests use too."""

import numpy as np

from moetrain.train.samples import Sample


def make_sample(n, seed=0, group=0, routes=None, vocabulary=50):
    """Draw ``n`` tokens, about half of them actions: at least one, and never the first token."""
    rng = np.random.default_rng([seed, n])
    is_action = rng.random(n) < 0.5
    is_action[0], is_action[-1] = False, True
    return Sample(
        tokens=rng.integers(vocabulary, size=n),
        is_action=is_action,
        logprobs=np.where(is_action, -rng.random(n), 0).astype(np.float32),
        versions=np.where(is_action, rng.integers(3, size=n), -1),
        advantage=float(np.float32(rng.normal())),
        group=group,
        routes=routes,
    )


def make_samples(*lengths, **kwargs):
    return [make_sample(n, seed=i, group=i // 2, **kwargs) for i, n in enumerate(lengths)]
