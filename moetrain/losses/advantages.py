"""Advantages of trajectories from their rewards, by name.

For a group's rewards R (n of them):

    dr_grpo                A = R - mean(R)                          arXiv 2503.20783
    grpo                   A = (R - mean(R)) / std(R)               arXiv 2402.03300
    rloo                   A = R - mean(the others')                arXiv 2402.14740
    reinforce_pp_baseline  a = R - mean(R), then over the batch     arXiv 2501.03262
    reinforce_pp           a = R, then over the batch: A = (a - mean(a)) / std(a)

with standard deviations of n - 1. All but the last learn by comparing within a group: a group
whose rewards are equal, or that has a single member, teaches nothing. ``none`` is 0 for all.

Legend: N trajectories, fp64.
"""

from collections.abc import Callable

import numpy as np

_EQUAL = 1e-9
"""Relative difference below which rewards are the same: sums of the same parts in another order
differ by 1e-16 or so, and a division by their standard deviation would make 1 of that."""
_BASELINES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "dr_grpo": lambda r: r - r.mean(),
    "grpo": lambda r: (r - r.mean()) / r.std(ddof=1),
    "rloo": lambda r: r - (r.sum() - r) / (len(r) - 1),
    "reinforce_pp_baseline": lambda r: r - r.mean(),
    "none": np.zeros_like,
}
"""Maps a group's rewards to advantages, where groups have a part in them."""
_OVER_BATCH = ("reinforce_pp_baseline", "reinforce_pp")
"""Those that are then normalised over the batch."""


def group_advantages(name: str, rewards_N: np.ndarray) -> np.ndarray | None:
    """Compare a group's rewards; None: the group teaches nothing."""
    if (of_group := _BASELINES.get(name)) is None:
        return rewards_N
    return None if len(rewards_N) == 1 or _is_flat(rewards_N) else of_group(rewards_N)


def batch_advantages(name: str, values_N: np.ndarray) -> np.ndarray:
    """Normalise what :func:`group_advantages` gave for a whole batch, if ``name`` does that."""
    if name not in _OVER_BATCH or not len(values_N):
        return values_N
    by = 1.0 if _is_flat(values_N) else spread(values_N)
    return (values_N - values_N.mean()) / by


def spread(values_N: np.ndarray) -> float:
    """Return the standard deviation of ``values_N``; 0 where there is only one."""
    return float(values_N.std(ddof=1)) if len(values_N) > 1 else 0.0


def _is_flat(values_N: np.ndarray) -> bool:
    return bool(np.ptp(values_N) <= _EQUAL * np.abs(values_N).max())
