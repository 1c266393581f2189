"""Collects trajectories from a generator and an environment, many at once.

    collector.start(group, task, size, seed)    # begins them
    collector.finish(groups)                    # runs until these are over; others go on meanwhile

A trajectory is either being continued by the generator or waits for its environment, whose failure
ends this trajectory alone. Weights may change between two calls: trajectories go on with the new
ones, and every token keeps the version that chose it. With experts shared between ranks,
:meth:`Collector.finish` is collective: ranks that are done take steps too.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from moetrain.config.rl import RlSection
from moetrain.data.tokenizer import Tokenizer
from moetrain.rl.calls import Calls, Failed, turn_of
from moetrain.rl.envs import Environment, Episode, Turn
from moetrain.rl.rows import Trajectory
from moetrain.rollout.engine import Generator
from moetrain.rollout.request import Completion, Request, SamplingParams

_logger = logging.getLogger("moetrain")

_SHOWN = 8
_PATIENCE = 0.01
"""Seconds to wait at once for environments, while there is nothing to generate."""


@dataclass
class _Active:
    """A trajectory under way."""

    trajectory: Trajectory
    episode: Episode | None = None
    """None: the environment is making it."""
    is_speaking: bool = False
    """Whether the generator continues it; otherwise its environment was asked."""
    completion: Completion | None = None


class Collector:
    """All trajectories under way on this rank.

    Attributes:
        generated: tokens generated since :meth:`reset_counts`.
        seconds: time spent on generation, and on waiting for environments.
    """

    def __init__(
        self,
        generator: Generator,
        environment: Environment,
        settings: RlSection,
        *,
        stop_ids: tuple[int, ...],
        longest: int,
    ) -> None:
        """``stop_ids`` end a turn of the policy; a trajectory has ``longest`` tokens at most."""
        self.generator, self.environment, self.settings = generator, environment, settings
        self.stop_ids, self.longest = stop_ids, longest
        self.groups: dict[int, list[Trajectory]] = {}
        """Trajectories that were begun and not yet returned by :meth:`finish`, by group."""
        self._active: dict[str, _Active] = {}
        self._calls: Calls[str] = Calls(settings.step_timeout)
        self._said: set[str] = set()
        self.reset_counts()

    def reset_counts(self) -> None:
        """Set all counts to zero."""
        self.generated = 0
        self.seconds = {"generate": 0.0, "environment": 0.0}

    # ---- what is under way ---------------------------------------------------------------------

    def start(
        self, group: int, task: int, size: int, seed: int, temperature: float | None = None
    ) -> None:
        """Begin ``size`` attempts at ``task``, as ``group``.

        Args:
            seed: seed of their sampling, together with the group's number.
            temperature: None: ``rl.temperature``.
        """
        warm = self.settings.temperature if temperature is None else temperature
        for member in range(size):
            own = random.Random(f"{seed}/{group}/{member}").getrandbits(63)
            self.resume(Trajectory(group, member, task, own, warm))

    def resume(self, trajectory: Trajectory) -> None:
        """Go on with ``trajectory``, be it new, from a checkpoint, or over."""
        self.groups.setdefault(trajectory.group, []).append(trajectory)
        if trajectory.is_over:
            return
        name = f"{trajectory.group}/{trajectory.member}"
        self._active[name] = _Active(trajectory)
        self._calls.start(name, self._enter, trajectory)

    def finish(self, groups: Iterable[int]) -> list[list[Trajectory]]:
        """Run until the trajectories of ``groups`` are over, and hand them out."""
        groups = list(groups)
        waited = [t for group in groups for t in self.groups[group]]
        self._hear()
        while self.generator.goes_on(any(not t.is_over for t in waited)):
            started = time.perf_counter()
            for completion in self.generator.step():
                self.generated += 1
                self._follow(completion)
            self.seconds["generate"] += time.perf_counter() - started
            self._hear()
        return [self.groups.pop(group) for group in groups]

    def under_way(self) -> list[Trajectory]:
        """Return all trajectories not handed out, as they are now, in the order to resume them in.

        They go on here as they would after :meth:`resume`: the cache is emptied, and requests are
        submitted again in this order.
        """
        speaking = {name: part for name, part in self._active.items() if part.is_speaking}
        for name, part in speaking.items():
            self.generator.abort(name)
            self._take_in(part)
        self.generator.pages.forget()
        for name, part in speaking.items():
            self._speak(name, part)
        over = [t for group in self.groups.values() for t in group if t.is_over]
        return over + [part.trajectory for part in self._active.values()]

    # ---- the environment's side ----------------------------------------------------------------

    def _enter(self, trajectory: Trajectory) -> Any:
        """Return a new episode and its answer, after all actions of a resumed trajectory."""
        episode = self.environment.episode(trajectory.task)
        actions = [trajectory.tokens[start:stop] for start, stop in trajectory.actions]
        if actions:
            return episode, asyncio.run(_told_again(episode, actions))
        answer = episode.reset()
        return _both(episode, answer) if isinstance(answer, Awaitable) else (episode, answer)

    def _hear(self) -> None:
        started = time.perf_counter()
        while True:
            # Wait only if there is nothing to generate.
            patience = 0.0 if self.generator.is_busy else _PATIENCE
            heard = self._calls.finished(patience)
            if not heard:
                break
            for name, answer in heard:
                self._answered(name, answer)
        self.seconds["environment"] += time.perf_counter() - started

    def _answered(self, name: str, answer: Any) -> None:
        part = self._active[name]
        trajectory = part.trajectory
        if part.episode is None and not isinstance(answer, Failed):
            part.episode, answer = answer
            if trajectory.answers > len(trajectory.actions):  # resumed in the policy's turn
                return self._speak(name, part)
        answer = turn_of(answer, trajectory, self.generator.model.arch.vocab_size)
        if isinstance(answer, Failed):
            return self._fail(name, answer)
        trajectory.answers += 1
        trajectory.reward += answer.reward
        if answer.done or trajectory.is_overlong:
            return self._end(name)
        has_room = self._room(trajectory, len(answer.tokens)) > 0
        if not has_room or len(trajectory.actions) >= self.settings.max_turns:
            if not trajectory.actions:
                problem = f"a prompt of {len(answer.tokens)} tokens leaves no room in a row"
                return self._fail(name, Failed("too_long", f"{problem} (data.seq_len)"))
            trajectory.is_overlong = True
            return self._end(name)
        trajectory.extend(answer.tokens)
        self._speak(name, part)

    def _fail(self, name: str, failed: Failed) -> None:
        trajectory, (reason, detail) = self._active[name].trajectory, failed
        trajectory.fault, trajectory.detail = reason, detail
        if reason not in self._said:  # once a reason: a bad environment fails at every call
            self._said.add(reason)
            _logger.warning(
                "a trajectory of task %d is dropped (%s): %s; it is counted, and so will others be",
                trajectory.task,
                reason,
                detail,
            )
        self._end(name)

    def _end(self, name: str) -> None:
        self._active.pop(name).trajectory.is_over = True

    # ---- the policy's side ---------------------------------------------------------------------

    def _room(self, trajectory: Trajectory, unread: int = 0) -> int:
        """Return how many tokens the policy may still write once it has read ``unread`` more."""
        return min(
            self.settings.max_tokens - trajectory.num_written,
            self.longest - len(trajectory.tokens) - unread,
        )

    def _speak(self, name: str, part: _Active) -> None:
        trajectory = part.trajectory
        params = SamplingParams(
            max_tokens=self._room(trajectory),
            temperature=trajectory.temperature,
            seed=trajectory.seed,
            stop_ids=self.stop_ids,
            routes=self.settings.routing_replay,
            tempered=True,
        )
        self.generator.submit(Request(name, tuple(trajectory.tokens), params))
        part.is_speaking = True

    def _follow(self, completion: Completion) -> None:
        """Keep a completion that has one more token; pass a finished one to the environment."""
        part = self._active[completion.request_id]
        part.completion = completion
        if completion.finish_reason is None:
            return
        self._take_in(part)
        part.is_speaking = False
        trajectory = part.trajectory
        # They cover all tokens that were read so far, earlier turns included.
        trajectory.routes = None if completion.routes is None else completion.routes.numpy()
        trajectory.is_overlong = completion.finish_reason == "length"
        start = trajectory.turn_start
        trajectory.actions.append((start, len(trajectory.tokens)))
        assert part.episode is not None
        action = trajectory.tokens[start:]
        self._calls.start(completion.request_id, _step, part.episode, action)

    def _take_in(self, part: _Active) -> None:
        completion, part.completion = part.completion, None
        if completion is not None:
            part.trajectory.extend(completion.tokens, completion.logprobs, completion.versions)


def _step(episode: Episode, action: list[int]) -> Turn | Awaitable[Turn]:
    return episode.step(action)  # in the call: an episode without step fails alone


async def _both(episode: Episode, answer: Awaitable[Turn]) -> tuple[Episode, Turn]:
    return episode, await answer


async def _told_again(episode: Episode, actions: Sequence[Sequence[int]]) -> Any:
    answer = episode.reset()
    for action in actions:
        if isinstance(answer, Awaitable):
            await answer
        answer = episode.step(action)
    return await answer if isinstance(answer, Awaitable) else answer


# ---- what has become of them ---------------------------------------------------------------------


class Failing:
    """Counts the steps in a row in which every trajectory has failed for one reason.

    A run of such steps ends: else it would end well and have learned nothing.
    """

    HOPELESS_STEPS = 3
    """Time enough to restart a service that answers for an environment."""

    def __init__(self) -> None:
        self.steps = 0
        self._first = Trajectory(0, 0, 0, 0, 0.0)

    def look_at(self, trajectories: Sequence[Trajectory]) -> None:
        before, self._first = self._first.fault, trajectories[0]
        faults = {t.fault for t in trajectories}
        if len(faults) > 1 or None in faults:
            self.steps = 0
        else:
            self.steps = self.steps + 1 if faults == {before} else 1

    @property
    def is_hopeless(self) -> bool:
        return self.steps >= self.HOPELESS_STEPS

    def describe(self) -> str:
        first = self._first
        return (
            f"every trajectory of {self.steps} steps in a row failed ({first.fault}), and "
            f"nothing was learned; of task {first.task}: {first.detail[:400]}"
        )


def figures(trajectories: Sequence[Trajectory], prefix: str = "") -> dict[str, float]:
    """Return means over ``trajectories``, at least one; failed ones count with a reward of 0.

    ``solved`` is the share with the full reward of 1.
    """
    number = len(trajectories)
    rewards = [0.0 if t.fault else t.reward for t in trajectories]
    return {
        f"{prefix}reward": sum(rewards) / number,
        f"{prefix}solved": sum(reward >= 1 for reward in rewards) / number,
        f"{prefix}length": sum(t.num_written for t in trajectories) / number,
        f"{prefix}overlong": sum(t.is_overlong for t in trajectories) / number,
    }


def write_completions(trajectories: Iterable[Trajectory], tokenizer: Tokenizer, file: Path) -> None:
    """Write the first few as text to ``file``, with the policy's own words in double brackets."""
    parts = []
    for t in list(trajectories)[:_SHOWN]:
        said = []
        for acts, run in groupby(zip(t.is_action, t.tokens, strict=True), lambda pair: pair[0]):
            text = tokenizer.decode([token for _, token in run])
            said.append(f"[[{text}]]" if acts else text)
        ending = t.fault or ("cut off" if t.is_overlong else "ended")
        parts.append(f"--- task {t.task}, reward {t.reward:g}, {ending}\n{''.join(said)}\n")
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(parts), "utf-8")
