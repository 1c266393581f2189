"""Collects trajectories from a generator and an environment, many at once.

    collector.start(group, task, size, seed)    # begins a group's trajectories
    collector.finish(groups)                    # runs until these are over; others go on meanwhile

A trajectory is either being continued by the generator, or waits for an answer of its environment
(:mod:`moetrain.rl.calls`). Weights may change between two calls of :meth:`Collector.finish`.
Unfinished trajectories then go on with the new weights, and every token keeps the version of the
weights that chose it. With experts spread over ranks, :meth:`Collector.finish` is collective: ranks
that are done take steps too. An environment that fails ends only its own trajectory.
"""

import asyncio
import math
import random
import threading
import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import zip_longest
from numbers import Real
from typing import Any

import numpy as np
import torch

from moetrain.config import ConfigError, logger
from moetrain.config.rl import RlSection
from moetrain.config.sources import RunFailed, shortened
from moetrain.generate.engine import Generator
from moetrain.generate.request import Completion, Request, SamplingParams
from moetrain.rl.calls import PATIENCE, Calls, Failed
from moetrain.rl.envs import Demonstration, Environment, Episode, Turn
from moetrain.rl.envs.shipped import Jsonl
from moetrain.rl.trajectories import Trajectory

LARGEST_REWARD = 1e12
"""Largest absolute reward of a trajectory. Gradients grow with rewards, and their squares are
summed in fp32, which ends at 3.4e38. Above about 1e19 the norm is infinite, and every step is
skipped. The rest is room for the gradient of the log-probability."""
_NUMBERS = (Real, Decimal, np.generic, np.ndarray, torch.Tensor)
"""Types that a reward may have."""


# ---- answers of environments ---------------------------------------------------------------------


def try_reward(environment: Jsonl, name: str, limit: float, *, is_plan: bool = False) -> None:
    """Try the reward function ``name`` on the first line of ``rl.prompts``.

    The answers are the line's own ``answer``, if it has one, and an empty text. A call that raises
    or takes longer than ``limit`` seconds is only logged, because the function may work for other
    texts.

    Raises:
        ConfigError: the function returns something that is not a reward.
        RunFailed: ``is_plan`` is True, and the call with the line's own answer fails, or with the
            empty text if the line has no answer.
    """
    calls, own = Calls(limit), str(environment.lines[0].get("answer", ""))
    for answer in {own: None, "": None}:
        calls.start(answer, environment.score, environment.problem(0), answer)
    failed: dict[tuple[str, str], list[str]] = {}  # the answers with each failure
    for answer, found in calls.all_finished().items():
        if isinstance(found, Failed):
            failed.setdefault((found.reason, found.detail), []).append(answer)
        elif (problem := reward_problem(found)) is not None:
            case = f"{name!r}, of line 1 of rl.prompts and the answer {shortened(answer)}"
            raise ConfigError("rl.reward", f"{case}, returns {problem}")
    for (reason, detail), answers in failed.items():
        answered = f"answer{'s' * (len(answers) > 1)} {' and '.join(map(shortened, answers))}"
        said = f"rl.reward: {name!r}, of line 1 of rl.prompts and the {answered}, failed "
        said += f"({reason}): {detail[:400]}"
        if is_plan and own in answers:
            raise RunFailed(said)
        logger.warning("%s; trajectories whose reward fails are dropped", said)


def _number(value: Any) -> float | None:
    """Return a number of Python, NumPy or torch as a float; None: it is no finite number."""
    if not isinstance(value, _NUMBERS):  # float() would read text, and run an object's own code
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last
        return None
    return number if math.isfinite(number) else None


def reward_problem(value: object, before: float = 0.0) -> str | None:
    """Return what is wrong with the reward ``value``; None: nothing.

    ``before``: the trajectory's reward so far.
    """
    number, most = _number(value), LARGEST_REWARD
    if number is None:
        return f"a {type(value).__name__} that is no finite number"
    if abs(before + number) > most:
        return f"{number:g}; the sum of a trajectory's rewards is at most {most:g} in size"
    return None


def _are_tokens(tokens: object, vocabulary: int) -> bool:
    """Return whether ``tokens`` is a tuple of integers of 0 to ``vocabulary - 1``."""
    return isinstance(tokens, tuple) and all(type(t) is int and 0 <= t < vocabulary for t in tokens)


def _are_limits(most: object, stop: object) -> bool:
    """Return whether these may be the ``max_tokens`` and the ``stop`` of a turn."""
    texts = isinstance(stop, tuple) and all(isinstance(text, str) and text for text in stop)
    return texts and (most is None or (type(most) is int and most > 0))


def _turn_of(answer: Any, trajectory: Trajectory, vocabulary: int) -> Turn | Failed:
    """Return an environment's ``answer`` to ``trajectory`` if it is valid, else what is wrong."""
    if isinstance(answer, Failed):
        return answer
    if not isinstance(answer, Turn):
        return Failed("nonsense", f"it returned a {type(answer).__name__}, not a Turn")
    reward, done = _number(answer.reward), _number(answer.done)
    problem = reward_problem(answer.reward, trajectory.reward)
    if problem is not None or reward is None:
        problem = f"its reward is {problem}"
    elif done is None:
        problem = f"its done is a {type(answer.done).__name__}, not true or false"
    elif not _are_tokens(answer.tokens, vocabulary):
        problem = f"its tokens are not a tuple of integers from 0 to {vocabulary - 1}"
    elif not trajectory.answers and (done or not answer.tokens):
        problem = "its first turn has no tokens, or is done"
    elif not _are_limits(answer.max_tokens, answer.stop):
        problem = "its max_tokens is not a positive integer, or its stop not a tuple of texts"
    else:
        return answer._replace(reward=reward, done=bool(done))
    return Failed("nonsense", problem)


# ---- trajectories --------------------------------------------------------------------------------


@dataclass
class _Active:
    """A trajectory that is not over."""

    trajectory: Trajectory
    episode: Episode | None = None
    """None: the environment is making it."""
    is_generating: bool = False
    """True: the generator continues the trajectory. False: its environment was called."""
    completion: Completion | None = None
    """The completion of the policy's turn, whose tokens the trajectory does not have yet."""
    turn: Turn = field(default_factory=Turn)
    """The environment's last answer."""


@dataclass(eq=False)
class Collector:
    """All trajectories of this rank that are not handed out."""

    generator: Generator
    environment: Environment
    settings: RlSection
    stop_ids: tuple[int, ...]
    """Tokens that end a turn of the policy."""
    longest: int
    """Most tokens of a segment."""

    def __post_init__(self) -> None:
        self.groups: dict[int, list[Trajectory]] = {}
        """Trajectories that were begun and not yet returned by :meth:`finish`, by group."""
        self._active: dict[str, _Active] = {}
        """Trajectories that are not over, by name. The name is also the id of their requests."""
        self._calls = Calls(self.settings.step_timeout)
        self._demonstrations = Calls(self.settings.step_timeout)
        self._logged: set[str] = set()
        """Reasons of failures that were logged."""
        self.reset_counts()

    def reset_counts(self) -> None:
        self.generated = 0
        """Tokens that were generated since this was called."""
        self.seconds = {"generate": 0.0, "environment": 0.0}
        """Time that went into the generator's steps, and into waiting for environments."""

    # ---- trajectories --------------------------------------------------------------------------

    def start(
        self, group: int, task: int, size: int, seed: int, temperature: float | None = None
    ) -> None:
        """Begin ``size`` attempts at ``task``. Together they are the group number ``group``.

        The seed of each attempt follows from ``seed``, the group's number and the attempt's number.
        If ``temperature`` is None, it is ``rl.temperature``.
        """
        if temperature is None:
            temperature = self.settings.temperature
        for member in range(size):
            own = random.Random(f"{seed}/{group}/{member}").getrandbits(63)
            self.resume(Trajectory(group, member, task, own, temperature))

    def resume(self, trajectory: Trajectory) -> None:
        """Begin ``trajectory``, or go on with one from a checkpoint.

        A trajectory that is over is only kept until :meth:`finish` returns it.
        """
        self.groups.setdefault(trajectory.group, []).append(trajectory)
        if trajectory.is_over:
            return
        name = f"{trajectory.group}/{trajectory.member}"
        self._active[name] = _Active(trajectory)
        self._calls.start(name, self._start_episode, trajectory)

    def finish(self, groups: Iterable[int]) -> list[list[Trajectory]]:
        """Run until the trajectories of ``groups`` are over, and hand them out."""
        groups = list(groups)
        waited = [t for group in groups for t in self.groups[group]]
        self._receive_answers()
        while self.generator.goes_on(any(not t.is_over for t in waited)):
            self.step()
        return [self.groups.pop(group) for group in groups]

    def step(self) -> None:
        """Take one step of the generator, and receive answers of environments."""
        started = time.perf_counter()
        for completion in self.generator.step():
            self.generated += 1
            self._on_completion(completion)
        self.seconds["generate"] += time.perf_counter() - started
        self._receive_answers()

    def unfinished(self) -> list[Trajectory]:
        """Return all trajectories that are not handed out, in the order to resume them in.

        This also submits to the generator again what it is continuing, in the same order and with
        an empty cache. So this run goes on exactly as a run that resumes from the checkpoint.
        """
        generating = {name: part for name, part in self._active.items() if part.is_generating}
        for name, part in generating.items():
            self.generator.abort(name)
            self._accept(part)
        self.generator.pages.clear_cache()
        for name, part in generating.items():
            self._submit(name, part)
        over = [t for group in self.groups.values() for t in group if t.is_over]
        return over + [part.trajectory for part in self._active.values()]

    # ---- the environment's turns ---------------------------------------------------------------

    def demonstrations(self, tasks: Sequence[int]) -> list[Demonstration]:
        """Return a demonstration of each task; RunFailed: one raises, is late, or is not valid."""
        environment: Any = self.environment
        shown, vocabulary = [], self.generator.model.arch.vocab_size
        for number, task in enumerate(tasks):
            self._demonstrations.start(number, environment.demonstrate, task)
        for number, found in sorted(self._demonstrations.all_finished().items()):
            problem = (
                "is not valid: a Demonstration has a tuple of two or more tokens from 0 to "
                f"{vocabulary - 1}, and a mask of as many truth values, the first of them false"
            )
            if isinstance(found, Failed):
                problem = f"failed ({found.reason}): {found.detail[:400]}"
            elif (
                isinstance(found, Demonstration)
                and _are_tokens(found.tokens, vocabulary)
                and isinstance(found.mask, tuple)
                and len(found.mask) == len(found.tokens) >= 2
                and not found.mask[0]
            ):
                shown.append(Demonstration(found.tokens, tuple(map(bool, found.mask))))
                continue
            raise RunFailed(f"rl.env: its demonstration of task {tasks[number]} {problem}")
        return shown

    def _start_episode(self, trajectory: Trajectory) -> Any:
        """Return a new episode and its answer. A resumed trajectory's actions are replayed."""
        episode = self.environment.episode(trajectory.task)
        actions = [trajectory.tokens[start:stop] for start, stop in trajectory.actions]
        answer = episode.reset()
        if not (actions or isinstance(answer, Awaitable)):
            return episode, answer
        # The environment's tokens lie between the policy's turns.
        ends, starts = [0, *(b for _, b in trajectory.actions)], [a for a, _ in trajectory.actions]
        if trajectory.answers > len(actions):
            starts.append(trajectory.turn_start)
        before = [tuple(trajectory.tokens[a:b]) for a, b in zip(ends, starts, strict=False)]
        replayed = _replay(episode, answer, actions, before if actions else [])
        return asyncio.run(replayed) if actions else replayed

    def _receive_answers(self) -> None:
        started = time.perf_counter()
        # Wait only if there is nothing to generate.
        while answers := self._calls.finished(0 if self.generator.is_busy else PATIENCE):
            for name, answer in answers:
                self._on_answer(name, answer)
        self.seconds["environment"] += time.perf_counter() - started

    def _on_answer(self, name: str, answer: Any) -> None:
        """Let the policy go on after the environment's ``answer``, or end the trajectory."""
        part = self._active[name]
        trajectory = part.trajectory
        # 1. A new episode comes with its first answer.
        if part.episode is None and not isinstance(answer, Failed):
            part.episode, answer = answer
            if trajectory.answers > len(trajectory.actions):  # resumed in the policy's turn
                if isinstance(answer, Turn) and _are_limits(answer.max_tokens, answer.stop):
                    part.turn = answer
                self._send(part, trajectory.tokens[trajectory.turn_start :])
                return self._submit(name, part)
        # 2. An answer that is not valid fails the trajectory.
        answer = _turn_of(answer, trajectory, self.generator.model.arch.vocab_size)
        if isinstance(answer, Failed):
            return self._fail(name, answer)
        # 3. The answer ends the trajectory, or leaves no room, or the policy goes on.
        part.turn = answer
        trajectory.answers += 1
        trajectory.reward += answer.reward
        start = len(trajectory.tokens) if answer.new_segment else trajectory.start
        has_room = self._room(trajectory, start, len(answer.tokens)) > 0
        is_cut = not has_room or len(trajectory.actions) >= self.settings.max_turns
        if answer.done or trajectory.is_overlong:
            trajectory.is_over = True
        elif is_cut and not trajectory.actions:
            problem = f"a prompt of {len(answer.tokens)} tokens leaves no room in a row"
            return self._fail(name, Failed("too_long", f"{problem} (data.seq_len)"))
        elif is_cut:
            trajectory.is_over = trajectory.is_overlong = True
        else:
            if start > trajectory.start:
                trajectory.starts.append(start)
            trajectory.extend(answer.tokens)
            return self._submit(name, part)
        self._drop(name, answer.done)

    def _drop(self, name: str, is_done: bool = False) -> Trajectory:
        """End a trajectory and return it. If not ``is_done``, call the episode's ``close``."""
        part = self._active.pop(name)
        if not is_done and callable(close := getattr(part.episode, "close", None)):
            threading.Thread(target=close, daemon=True).start()
        return part.trajectory

    def _fail(self, name: str, failed: Failed) -> None:
        trajectory, (reason, detail) = self._drop(name), failed
        trajectory.fault, trajectory.detail, trajectory.is_over = reason, detail, True
        if reason not in self._logged:  # once a reason: a bad environment fails at every call
            self._logged.add(reason)
            logger.warning(
                "a trajectory of task %d is dropped (%s): %s; later ones are counted, not logged",
                *(trajectory.task, reason, detail),
            )

    # ---- the policy's turns --------------------------------------------------------------------

    def _room(self, trajectory: Trajectory, start: int, unread: int = 0) -> int:
        """Return how many tokens the policy may write in a segment that begins at ``start``.

        ``unread``: tokens of the environment that come first.
        """
        return min(
            self.settings.max_tokens - trajectory.num_written,
            self.longest - (len(trajectory.tokens) - start) - unread,
        )

    def _submit(self, name: str, part: _Active) -> None:
        """Let the generator continue a trajectory."""
        trajectory, most = part.trajectory, part.turn.max_tokens
        room = self._room(trajectory, trajectory.start)
        num_written = len(trajectory.tokens) - trajectory.turn_start  # by an interrupted turn
        if most is not None:
            room = min(room, most - num_written)
        params = SamplingParams(
            max_tokens=room,
            stop=part.turn.stop,
            temperature=trajectory.temperature,
            seed=(trajectory.seed + len(trajectory.starts)) % (1 << 63),  # positions begin again
            stop_ids=self.stop_ids,
            routes=self.settings.routing_replay,
            tempered=True,
        )
        tokens = tuple(trajectory.tokens[trajectory.start :])
        self.generator.submit(Request(name, tokens, params, num_written))
        part.is_generating = True

    def _on_completion(self, completion: Completion) -> None:
        """Keep a completion with new tokens; pass a finished one to the environment."""
        part = self._active[completion.request_id]
        part.completion = completion
        if completion.finish_reason is None:
            return self._send(part, completion.tokens[-completion.num_new :])
        self._accept(part)
        part.is_generating = False
        trajectory = part.trajectory
        # The routes cover all tokens of the segment so far, earlier turns included.
        trajectory.keep_routes(None if completion.routes is None else completion.routes.numpy())
        is_full = self._room(trajectory, trajectory.start) <= 0
        trajectory.is_overlong = completion.finish_reason == "length" and is_full
        start = trajectory.turn_start
        trajectory.actions.append((start, len(trajectory.tokens)))
        episode, action = part.episode, trajectory.tokens[start:]
        assert episode is not None
        # An episode without step fails alone, in the call.
        self._calls.start(completion.request_id, lambda: episode.step(action))

    def _send(self, part: _Active, tokens: Sequence[int]) -> None:
        """Send the environment new tokens of a turn, if it asked for them."""
        if part.turn.on_tokens is not None:
            self._calls.notify(part.turn.on_tokens, tokens)

    def _accept(self, part: _Active) -> None:
        """Append the completion's tokens to the trajectory."""
        completion, part.completion = part.completion, None
        if completion is not None:
            part.trajectory.extend(completion.tokens, completion.logprobs, completion.versions)


async def _replay(
    episode: Episode, answer: Any, actions: Iterable[Sequence[int]], before: Sequence[Any]
) -> tuple[Episode, Turn]:
    """Give ``episode`` its ``actions`` again; return it with its last answer.

    Raises RuntimeError if its answers have other tokens than ``before``.
    """
    for action, tokens in zip_longest((None, *actions), before):
        if action is not None:
            answer = episode.step(action)
        answer = await answer if isinstance(answer, Awaitable) else answer
        if tokens is not None and answer.tokens != tokens:
            raise RuntimeError("replayed on resuming, it gave other tokens than before")
    return episode, answer
