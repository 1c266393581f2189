"""Advantages of trajectories from their rewards.

For a group's rewards R (n of them):

    dr_grpo                A = R - mean(R)                          arXiv 2503.20783
    grpo                   A = (R - mean(R)) / std(R)               arXiv 2402.03300
    rloo                   A = R - mean(the others')                arXiv 2402.14740
    reinforce_pp_baseline  a = R - mean(R), then over the batch     arXiv 2501.03262
    reinforce_pp           a = R, then over the batch: A = (a - mean(a)) / std(a)

Standard deviations divide by n - 1. All but the last of these compare rewards within a group. So a
group whose rewards are equal, or that has a single member, gives no gradient. A further name,
``none``, gives every trajectory the advantage 0.

Legend: N trajectories. All arrays are fp64.
"""

from collections.abc import Callable

import numpy as np

_EQUAL = 1e-9
"""Relative difference below which rewards count as equal: sums of the same parts in another order
differ by about 1e-16, and division by their standard deviation would make advantages of size 1
from that."""
_BASELINES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "dr_grpo": lambda r: r - r.mean(),
    "grpo": lambda r: (r - r.mean()) / r.std(ddof=1),
    "rloo": lambda r: r - (r.sum() - r) / (len(r) - 1),
    "reinforce_pp_baseline": lambda r: r - r.mean(),
    "none": np.zeros_like,
}
"""A group's advantages from its rewards, for the kinds that compare within groups."""
_OVER_BATCH = ("reinforce_pp_baseline", "reinforce_pp")
"""The kinds that are normalised over the batch."""


def group_advantages(name: str, rewards_N: np.ndarray) -> np.ndarray | None:
    """Return a group's advantages, which :func:`batch_advantages` completes.

    None: the group gives no gradient, because its rewards are equal or it has a single member.
    """
    compare = _BASELINES.get(name)
    if compare is None:
        return rewards_N
    return None if len(rewards_N) == 1 or _is_flat(rewards_N) else compare(rewards_N)


def batch_advantages(name: str, values_N: np.ndarray) -> np.ndarray:
    """Return the advantages of a batch from its groups' :func:`group_advantages`."""
    if name not in _OVER_BATCH or not len(values_N):
        return values_N
    deviation = 1.0 if _is_flat(values_N) else spread(values_N)
    return (values_N - values_N.mean()) / deviation


def spread(values_N: np.ndarray) -> float:
    """Return the standard deviation of ``values_N``; 0 if there is only one."""
    return float(values_N.std(ddof=1)) if len(values_N) > 1 else 0.0


def _is_flat(values_N: np.ndarray) -> bool:
    return bool(np.ptp(values_N) <= _EQUAL * np.abs(values_N).max())
