"""When an environment's faults are the run's: nobody gets an answer, or what is shown is none.

A fault costs its own trajectory (:mod:`moetrain.rl.collect`), which is right while others go on. A
run in which all of them fail in the same way, step after step, would end well and have learned
nothing: it ends at once, and says what the environment has said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moetrain.config import RunFailed
from moetrain.rl.calls import Calls, Failed
from moetrain.rl.envs import Demonstrates, Marked
from moetrain.rl.trajectory import Trajectory

HOPELESS_STEPS = 3
"""In a row, in which every trajectory has failed for one reason: what a restart of a service that
answers for an environment takes, and no more."""

PATIENCE = 1.0
"""Seconds between looks at demonstrations that come later."""


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


class Demonstrations:
    """What an environment shows, by :class:`~moetrain.rl.calls.Calls` as all that it is asked."""

    def __init__(self, environment: Demonstrates, limit: float, vocabulary: int) -> None:
        """
        Args:
            limit: seconds for those of a step.
            vocabulary: tokens are below it.
        """
        self.environment, self.vocabulary = environment, vocabulary
        self._calls: Calls[int] = Calls(limit)

    def of(self, tasks: Sequence[int]) -> list[Marked]:
        """Of each task.

        Raises:
            RunFailed: one raised, took too long, or is none: two tokens at least, and as many truth
                values, of which the first is false.
        """
        for number, task in enumerate(tasks):
            self._calls.start(number, self.environment.demonstrate, task)
        found: dict[int, Any] = {}
        while len(self._calls):
            found |= self._calls.finished(PATIENCE)
        return [self._checked(task, found[number]) for number, task in enumerate(tasks)]

    def _checked(self, task: int, shown: Any) -> Marked:
        if isinstance(shown, Failed):
            problem = f"failed ({shown.reason}): {shown.detail[:400]}"
        elif not isinstance(shown, Marked):
            problem = f"is none: {type(shown).__name__} where a Marked is due"
        elif not are_tokens(shown.tokens, self.vocabulary) or len(shown.tokens) < 2:
            most = self.vocabulary - 1
            problem = f"is none: its tokens are no tuple of two or more integers of 0 to {most}"
        elif not isinstance(shown.mask, tuple) or len(shown.mask) != len(shown.tokens):
            problem = "is none: its mask is no tuple that is as long as its tokens"
        elif shown.mask[0]:
            problem = "is none: nothing predicts its first token, and the mask has it chosen"
        else:
            return Marked(shown.tokens, tuple(map(bool, shown.mask)))
        raise RunFailed(f"rl.env: its demonstration of task {task} {problem}")


def are_tokens(tokens: object, vocabulary: int) -> bool:
    """Whether an environment may say ``tokens``."""
    return isinstance(tokens, tuple) and all(type(t) is int and 0 <= t < vocabulary for t in tokens)
