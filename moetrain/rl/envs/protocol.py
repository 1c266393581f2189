"""What reinforcement learning asks of an environment: numbered tasks, and episodes of them.

    environment.episode(task)    one attempt at a task, with a state of its own
    episode.reset()              -> the prompt
    episode.step(action)         -> what the policy reads next, a reward, and whether that is all

Tokens in, tokens out: what text becomes is the environment's business (:mod:`moetrain.rl.envs.text`
does it for those that are text). Each call may be plain or ``async``. Plain ones are waited for,
which keeps a run the same at every rerun, and are for what answers at once; asynchronous ones run
beside generation, on an event loop that all share, and must not block it. Every call has a time
limit, and one that fails costs its own trajectory alone; where all fail alike for several steps, or
a demonstration does, the run ends (:mod:`moetrain.rl.calls`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Turn(NamedTuple):
    """What an environment answers."""

    tokens: tuple[int, ...] = ()
    """What the policy reads before it acts, at least one after ``reset``."""
    reward: float = 0.0
    """Of the action before; those of a trajectory are added up. Finite."""
    done: bool = False
    """Whether the episode ends here; what the policy would have read is then of no use."""


class Demonstration(NamedTuple):
    """A whole trajectory as it should be."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    """For each token, whether the policy is to choose it; the environment says the others."""


class Episode(Protocol):
    """One attempt at a task.

    After a checkpoint the same actions are given to a new episode of the same task: it must answer
    as it did, or go on from there in another way.
    """

    def reset(self) -> Turn | Awaitable[Turn]:
        """The prompt. Called once, first."""
        ...

    def step(self, action: Sequence[int]) -> Turn | Awaitable[Turn]:
        """What comes of the policy's next tokens: as many as it may write, or up to a stop."""
        ...


class Environment(Protocol):
    """Tasks by number: the same task at every call, on every rank."""

    num_tasks: int | None
    """Tasks 0 to ``num_tasks - 1``; None: without end."""

    def episode(self, task: int) -> Episode:
        """A new attempt at ``task``."""
        ...


@runtime_checkable
class Demonstrates(Protocol):
    """An environment that can show how it is done, for ``rl.supervised_steps``."""

    def demonstrate(self, task: int) -> Demonstration:
        """``task``, solved."""
        ...
