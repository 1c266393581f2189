"""Turns rewards into advantages, group by group, and decides which trajectories are left out.

A trajectory that failed, or was cut off where that counts as failing, is left out before anything
is averaged, and does not affect the others. Then, for a group's rewards R (n of them):

    dr_grpo                A = R - mean(R)                          arXiv 2503.20783
    grpo                   A = (R - mean(R)) / std(R)               arXiv 2402.03300
    rloo                   A = R - mean(the others')                arXiv 2402.14740
    reinforce_pp_baseline  a = R - mean(R), then over the batch     arXiv 2501.03262
    reinforce_pp           a = R, then over the batch: A = (a - mean(a)) / std(a)

with standard deviations of n - 1. All but the last learn by comparing within a group: a group
whose rewards are equal, or that has a single member left, is not trained at all, and so is in no
denominator either. Means over the batch are over what is trained.

Left out on purpose: replacing the groups that are left out, which is the loop's business.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from moetrain.config.rl import RlSection

_EQUAL = 1e-9
"""Relative difference below which rewards are the same: sums of the same parts in another order
differ by 1e-16 or so, and a division by their standard deviation would make 1 of that."""


class Outcome(NamedTuple):
    """How one trajectory ended."""

    group: int
    """Number of the prompt, over all ranks."""
    reward: float
    fault: str | None = None
    """Why it failed and has no reward, in a word to count by; None: it did not fail."""
    is_overlong: bool = False
    kl: float = 0.0
    """The KL estimate, summed over its tokens, for ``rl.kl_in`` reward."""


class _Advantages(NamedTuple):
    """The advantages of outcomes, in their order."""

    values: list[float | None]
    """None: the trajectory is not trained."""
    left_out: Counter[str]
    """Trajectories that are not trained, by reason: a fault, ``overlong``, ``not_finite``
    (rewards), ``no_variance`` (all of the group's rewards are equal), ``alone`` in its group."""
    spread: float
    """Standard deviation of the advantages that are trained; 0 where there is only one."""


_BASELINES: dict[str, Callable[[np.ndarray], np.ndarray] | None] = {
    "dr_grpo": lambda r: r - r.mean(),
    "grpo": lambda r: (r - r.mean()) / r.std(ddof=1),
    "rloo": lambda r: r - (r.sum() - r) / (len(r) - 1),
    "reinforce_pp_baseline": lambda r: r - r.mean(),
    "reinforce_pp": None,
}
"""Maps a group's rewards to advantages; None: groups have no part in it."""
_OVER_BATCH = ("reinforce_pp_baseline", "reinforce_pp")
"""Those whose advantages are then normalised over the batch."""


def advantages(outcomes: Sequence[Outcome], settings: RlSection) -> _Advantages:
    """Compute the advantage of every outcome of the *global* batch, all ranks' together."""
    penalty = settings.kl_coef if settings.kl_in == "reward" else 0.0
    rewards = np.array([o.reward - penalty * o.kl for o in outcomes], dtype=np.float64)
    reasons = [_fault(o, settings) for o in outcomes]
    values = rewards.copy()
    if (of_group := _BASELINES[settings.advantage]) is not None:
        groups: dict[int, list[int]] = {}
        for i, outcome in enumerate(outcomes):
            if reasons[i] is None:
                groups.setdefault(outcome.group, []).append(i)
        for members in groups.values():
            if len(members) > 1 and not _is_flat(rewards[members]):
                values[members] = of_group(rewards[members])
                continue
            for i in members:
                reasons[i] = "alone" if len(members) == 1 else "no_variance"
    if settings.overlong == "mask":
        for i, outcome in enumerate(outcomes):
            if outcome.is_overlong and reasons[i] is None:
                reasons[i] = "overlong"
    trained = np.flatnonzero([reason is None for reason in reasons])
    if settings.advantage in _OVER_BATCH and len(trained):
        spread = 1.0 if _is_flat(values[trained]) else _spread(values[trained])
        values[trained] = (values[trained] - values[trained].mean()) / spread
    return _Advantages(
        [float(v) if r is None else None for v, r in zip(values, reasons, strict=True)],
        Counter(reason for reason in reasons if reason is not None),
        _spread(values[trained]),
    )


def _fault(outcome: Outcome, settings: RlSection) -> str | None:
    """Say why ``outcome`` has no part in its group; None: it has."""
    if outcome.fault is not None:
        return outcome.fault
    if not (math.isfinite(outcome.reward) and math.isfinite(outcome.kl)):
        return "not_finite"
    return "overlong" if outcome.is_overlong and settings.overlong == "drop" else None


def _is_flat(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= _EQUAL * np.abs(values).max())


def _spread(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
