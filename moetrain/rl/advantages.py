"""Rewards to advantages, group by group; who is left out, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from moetrain.config_rl import RlSection


class Outcome(NamedTuple):
    """How one trajectory ended."""

    group: int
    """Trajectories of one prompt have one, over all ranks."""
    reward: float
    fault: str | None = None
    """Why it failed, in a word to count by ("timeout"): it has no reward; None: it did not."""
    is_overlong: bool = False
    """It was cut off before its end."""
    kl: float = 0.0
    """Sum over its tokens of the KL estimate, for ``rl.kl_in`` reward."""


class Advantages(NamedTuple):
    """What the outcomes come to, in their order."""

    values: list[float | None]
    """None: this trajectory is not trained."""
    left_out: Counter[str]
    """How many trajectories are not trained, by reason: a fault, ``overlong``, ``not_finite``,
    ``no_variance`` (all of the group's rewards are equal) or ``alone``."""
    spread: float
    """Standard deviation of the advantages that are trained."""


def advantages(outcomes: Sequence[Outcome], settings: RlSection) -> Advantages:
    """Of every outcome of the *global* batch, all ranks' together."""
    raise NotImplementedError
