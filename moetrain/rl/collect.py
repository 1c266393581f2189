"""Trajectories from a generator and an environment: many at once, each at its own pace.

    collector.start(group, task, size, seed)    # puts them under way
    collector.finish(groups)                    # until these are over; others go on meanwhile

A trajectory is either being continued by the generator or waits for its environment. What fails
(an environment that raises, takes too long or answers nonsense) ends its own trajectory, with a
word for why. Weights may change between two calls: trajectories go on with the new ones, and every
token keeps the version that chose it.

With experts shared between ranks, :meth:`Collector.finish` is collective: ranks that are done step
along.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moetrain.config.rl import RlSection
from moetrain.rl.calls import Calls, Failed, are_tokens, not_a_reward, number_of
from moetrain.rl.envs import Environment, Episode, Turn
from moetrain.rl.trajectory import Trajectory
from moetrain.rollout.engine import Generator
from moetrain.rollout.request import Completion, Request, SamplingParams

logger = logging.getLogger("moetrain")

PATIENCE = 0.01
"""Seconds between looks, where nothing is left to generate and environments are at work."""


@dataclass
class _Active:
    """A trajectory under way."""

    trajectory: Trajectory
    episode: Episode | None = None
    """None: it is being made."""
    is_speaking: bool = False
    """Whether it is with the generator; else its environment has been asked."""
    completion: Completion | None = None
    """What the generator has made of this turn; None: nothing yet."""


class Collector:
    """All trajectories under way on this rank.

    Attributes:
        generated: tokens that were generated since :meth:`reset_counts`.
        seconds: what that took, and what was waited for environments meanwhile.
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
        """
        Args:
            stop_ids: tokens that end a turn of the policy's.
            longest: tokens of a trajectory, all told.
        """
        self.generator, self.environment, self.settings = generator, environment, settings
        self.stop_ids, self.longest = stop_ids, longest
        self.groups: dict[int, list[Trajectory]] = {}
        """Begun and not yet taken by :meth:`finish`."""
        self._active: dict[str, _Active] = {}
        self._calls: Calls[str] = Calls(settings.step_timeout)
        self._said: set[str] = set()
        self.reset_counts()

    def reset_counts(self) -> None:
        """Count from here on."""
        self.generated = 0
        self.seconds = {"generate": 0.0, "environment": 0.0}

    # ---- what is under way ---------------------------------------------------------------------

    def start(
        self, group: int, task: int, size: int, seed: int, temperature: float | None = None
    ) -> None:
        """Put ``size`` attempts at ``task`` under way, as ``group``.

        Args:
            seed: with the group's number, of what they sample.
            temperature: None: ``rl.temperature``.
        """
        warm = self.settings.temperature if temperature is None else temperature
        for member in range(size):
            own = random.Random(f"{seed}/{group}/{member}").getrandbits(63)
            self.resume(Trajectory(group, member, task, own, warm))

    def resume(self, trajectory: Trajectory) -> None:
        """Take ``trajectory`` up where it is: from its task, from a checkpoint, or over."""
        self.groups.setdefault(trajectory.group, []).append(trajectory)
        if trajectory.is_over:
            return
        name = f"{trajectory.group}/{trajectory.member}"
        self._active[name] = _Active(trajectory)
        self._calls.start(name, self._enter, trajectory)

    def finish(self, groups: Iterable[int]) -> list[list[Trajectory]]:
        """The trajectories of ``groups``, over; they are no longer kept here."""
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
        """All that was begun and not taken, as it is now, in an order to take it up in.

        Here as well it goes on as it would after :meth:`resume`: nothing that was read is kept, and
        the order is this one.
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
        """Episode and answer of a trajectory that begins; or one to which all is said again."""
        episode = self.environment.episode(trajectory.task)
        actions = [trajectory.tokens[start:stop] for start, stop in trajectory.actions]
        if actions:
            return episode, asyncio.run(_told_again(episode, actions))
        answer = episode.reset()
        return _both(episode, answer) if isinstance(answer, Awaitable) else (episode, answer)

    def _hear(self) -> None:
        """Take in what environments have answered, until the plain ones have nothing to say."""
        started = time.perf_counter()
        while True:
            # Only then is there nothing better to do than to wait.
            patience = 0.0 if self.generator.is_busy else PATIENCE
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
            if trajectory.answers > len(trajectory.actions):  # taken up in the policy's turn
                return self._speak(name, part)
        answer = self._checked(trajectory, answer)
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
        trajectory.read(answer.tokens)
        self._speak(name, part)

    def _checked(self, trajectory: Trajectory, answer: Any) -> Turn | Failed:
        """Return ``answer`` if it is one, else what is wrong with it."""
        if isinstance(answer, Failed):
            return answer
        if not isinstance(answer, Turn):
            return Failed("nonsense", f"{type(answer).__name__} where a Turn is due")
        tokens, (reward, done) = answer.tokens, map(number_of, answer[1:])
        vocabulary = self.generator.model.arch.vocab_size
        problem = not_a_reward(answer.reward, trajectory.reward)
        if problem is not None or reward is None:
            return Failed("nonsense", f"its reward is {problem}")
        if done is None:
            return Failed("nonsense", f"its done, a {type(answer.done).__name__}, is no number")
        if not are_tokens(tokens, vocabulary):
            problem = f"its tokens are no tuple of integers of 0 to {vocabulary - 1}"
            return Failed("nonsense", problem)
        if not trajectory.answers and (done or not tokens):
            return Failed("nonsense", "its prompt is empty or over")
        return Turn(tokens, reward, bool(done))

    def _fail(self, name: str, failed: Failed) -> None:
        trajectory, (reason, detail) = self._active[name].trajectory, failed
        trajectory.fault, trajectory.detail = reason, detail
        if reason not in self._said:  # each kind once: a bad environment has one at every call
            self._said.add(reason)
            logger.warning(
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
        """Tokens that the policy may still write, once it has read ``unread`` more."""
        return min(
            self.settings.max_tokens - trajectory.num_written,
            self.longest - len(trajectory.tokens) - unread,
        )

    def _speak(self, name: str, part: _Active) -> None:
        """Let the policy go on."""
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
        """A completion has gone on; at its end the environment hears of it."""
        part = self._active[completion.request_id]
        part.completion = completion
        if completion.finish_reason is None:
            return
        self._take_in(part)
        part.is_speaking = False
        trajectory = part.trajectory
        # Of all that was read so far, earlier turns too: the newest are those that count.
        trajectory.routes = None if completion.routes is None else completion.routes.numpy()
        trajectory.is_overlong = completion.finish_reason == "length"
        start = trajectory.turn_start
        trajectory.actions.append((start, len(trajectory.tokens)))
        assert part.episode is not None
        action = trajectory.tokens[start:]
        self._calls.start(completion.request_id, _step, part.episode, action)

    def _take_in(self, part: _Active) -> None:
        """Note what the generator has chosen so far."""
        completion, part.completion = part.completion, None
        if completion is not None:
            part.trajectory.write(completion.tokens, completion.logprobs, completion.versions)


def _step(episode: Episode, action: list[int]) -> Turn | Awaitable[Turn]:
    return episode.step(action)  # where an episode that has none costs itself alone


async def _both(episode: Episode, answer: Awaitable[Turn]) -> tuple[Episode, Turn]:
    return episode, await answer


async def _told_again(episode: Episode, actions: Sequence[Sequence[int]]) -> Any:
    """What ``episode`` answers last, when all is said to it that the one before it was told."""
    answer = episode.reset()
    for action in actions:
        if isinstance(answer, Awaitable):
            await answer
        answer = episode.step(action)
    return await answer if isinstance(answer, Awaitable) else answer
