"""When an environment's faults are the run's: nobody gets an answer, or what is shown is none.

A fault costs its own trajectory (:mod:`moetrain.rl.collect`), which is right while others go on. A
run in which all of them fail in the same way, step after step, would end well and have learned
nothing: it ends at once, and says what the environment has said.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, SupportsFloat, cast

import numpy as np
import torch

from moetrain.config import ConfigError, RunFailed
from moetrain.config.sources import shortened
from moetrain.rl.calls import Calls, Failed
from moetrain.rl.envs import Demonstrates, Demonstration
from moetrain.rl.envs.jsonl import Jsonl
from moetrain.rl.trajectory import Trajectory

logger = logging.getLogger("moetrain")

HOPELESS_STEPS = 3
"""In a row, in which every trajectory has failed for one reason: what a restart of a service that
answers for an environment takes, and no more."""

LARGEST_REWARD = 1e12
"""Gradients grow with rewards, and their squares are summed in fp32, which ends at 3.4e38: above
about 1e19 the norm is infinite and every step is skipped. The rest is room for the gradient of the
log-probability."""

NUMBERS = (Real, Decimal, np.generic, np.ndarray, torch.Tensor)
"""What a reward may be an object of."""


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

    def of(self, tasks: Sequence[int]) -> list[Demonstration]:
        """Of each task.

        Raises:
            RunFailed: one raised, took too long, or is none: two tokens at least, and as many truth
                values, of which the first is false.
        """
        for number, task in enumerate(tasks):
            self._calls.start(number, self.environment.demonstrate, task)
        found = self._calls.wait_for_all()
        return [self._checked(task, found[number]) for number, task in enumerate(tasks)]

    def _checked(self, task: int, shown: Any) -> Demonstration:
        if type(shown) is Failed:
            problem = f"failed ({shown.reason}): {shown.detail[:400]}"
        elif not issubclass(type(shown), Demonstration):
            problem = f"is none: {type(shown).__name__} where a Demonstration is due"
        elif not are_tokens(shown.tokens, self.vocabulary) or len(shown.tokens) < 2:
            most = self.vocabulary - 1
            problem = f"is none: its tokens are no tuple of two or more integers of 0 to {most}"
        elif type(shown.mask) is not tuple or len(shown.mask) != len(shown.tokens):
            problem = "is none: its mask is no tuple that is as long as its tokens"
        elif shown.mask[0]:
            problem = "is none: nothing predicts its first token, and the mask has it chosen"
        else:
            return Demonstration(shown.tokens, tuple(map(bool, shown.mask)))
        raise RunFailed(f"rl.env: its demonstration of task {task} {problem}")


def try_reward(environment: Jsonl, name: str, limit: float) -> None:
    """Call the reward function on the first line, before anything is generated.

    It scores the line's own ``answer``, where there is one, and an empty text. A call that raises
    or takes too long is logged alone: the policy's answers may be other ones.

    Args:
        name: of the function, as ``rl.reward`` has it.
        limit: seconds for a call.

    Raises:
        ConfigError: it returns something else than a reward.
    """
    line, calls = environment.lines[0], Calls[str](limit)
    for answer in {str(line.get("answer", "")): None, "": None}:
        calls.start(answer, environment.score, environment.problem(0), answer)
    for answer, found in calls.wait_for_all().items():
        case = f"{name!r}, of line 1 of rl.prompts and the answer {shortened(answer)}"
        if type(found) is Failed:
            logger.warning(
                "rl.reward: %s, failed (%s): %s; trajectories for which it does are dropped",
                case,
                found.reason,
                found.detail[:400],
            )
        elif (problem := not_a_reward(found)) is not None:
            raise ConfigError("rl.reward", f"{case}, returns {problem}")


def not_a_reward(value: object, before: float = 0.0) -> str | None:
    """What is wrong with ``value`` as a reward, in words; None: nothing.

    Args:
        before: the rewards that it is added to.
    """
    number = number_of(value)
    if number is None:
        return f"a {type(value).__name__} that is no finite number"
    if abs(before + number) > LARGEST_REWARD:
        return f"{number:g}; all of a trajectory's together are at most {LARGEST_REWARD:g} in size"
    return None


def number_of(value: object) -> float | None:
    """``value`` as a float, be it Python's, NumPy's or torch's; None: it is no finite number."""
    if not issubclass(type(value), NUMBERS):  # float() reads text, and runs code of an object
        return None
    try:
        number = float(cast("SupportsFloat", value))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's is the last
        return None
    return number if math.isfinite(number) else None


def are_tokens(tokens: object, vocabulary: int) -> bool:
    """Whether an environment may say ``tokens``."""
    return type(tokens) is tuple and all(type(t) is int and 0 <= t < vocabulary for t in tokens)
