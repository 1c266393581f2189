"""When an environment's faults are the run's: nobody gets an answer, or what is shown is none.

A fault costs its own trajectory (:mod:`moetrain.rl.collect`), which is right while others go on. A
run in which all of them fail in the same way, step after step, would end well and have learned
nothing: it ends at once, and says what the environment has said.
"""

from __future__ import annotations

from collections.abc import Sequence

from moetrain.config import RunFailed
from moetrain.rl.envs import Demonstrates, Marked
from moetrain.rl.trajectory import Trajectory

HOPELESS_STEPS = 3
"""In a row, in which every trajectory has failed for one reason: what a restart of a service that
answers for an environment takes, and no more."""


class Failing:
    """Steps in a row in which everything has failed alike."""

    def __init__(self) -> None:
        self.steps = 0
        self.first: Trajectory | None = None
        """Of those that failed in the newest of these steps."""

    def look_at(self, trajectories: Sequence[Trajectory]) -> None:
        """Take in all trajectories of a step."""
        reasons = {t.fault for t in trajectories}
        last = None if self.first is None else self.first.fault
        if len(reasons) > 1 or None in reasons:
            self.steps, self.first = 0, None
            return
        self.steps = self.steps + 1 if reasons == {last} else 1
        self.first = trajectories[0]

    @property
    def is_hopeless(self) -> bool:
        return self.steps >= HOPELESS_STEPS

    def describe(self) -> str:
        """What has failed, and the environment's own words."""
        assert self.first is not None  # something has
        return (
            f"every trajectory of {self.steps} steps in a row failed ({self.first.fault}), and "
            f"nothing was learned; of task {self.first.task}: {self.first.detail[:400]}"
        )


def shown_by(environment: Demonstrates, task: int, vocabulary: int) -> Marked:
    """The environment's demonstration of ``task``.

    Raises:
        RunFailed: it raised, or this is none: tokens of 0 to ``vocabulary - 1``, two at least, and
            as many truth values, the first of them false.
    """
    try:
        shown = environment.demonstrate(task)
        tokens, mask = tuple(shown.tokens), tuple(map(bool, shown.mask))
        tokens_are_good = all(type(t) is int and 0 <= t < vocabulary for t in tokens)
    except (Exception, SystemExit) as error:  # a user's code, whatever it raises
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise RunFailed(f"rl.env: its demonstration of task {task} failed: {problem}") from error
    if not tokens_are_good or len(tokens) < 2 or len(mask) != len(tokens) or mask[0]:
        raise RunFailed(
            f"rl.env: its demonstration of task {task} is none: {len(tokens)} tokens and a mask of "
            f"{len(mask)}; it takes two or more integers of 0 to {vocabulary - 1}, and as many "
            "truth values, of which the first is false"
        )
    return Marked(tokens, mask)
