"""Collects trajectories from a generator and an environment, many at once.

    collector.start(group, task, size, seed)    # begins them
    collector.finish(groups)                    # runs until these are over; others go on meanwhile

A trajectory is either being continued by the generator or waits for its environment. Weights may
change between two calls: trajectories go on with the new ones, and every token keeps the version
that chose it. With experts shared between ranks, :meth:`Collector.finish` is collective: ranks that
are done take steps too.

Each call of an environment has a time limit, and a failure costs its own trajectory alone. Calls
begin in daemon threads: one makes all of them while they are quick, and slow ones soon have one
each. A plain answer is waited for, so that a run whose environment is quick is the same at every
rerun; an awaitable goes on, on one event loop for all, while text is generated. A thread that hangs
is left behind.

Left out on purpose: isolation of code that blocks the event loop or ends the interpreter.
"""

import asyncio
import math
import random
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import zip_longest
from numbers import Real
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from moetrain.config import ConfigError, logger
from moetrain.config.rl import RlSection
from moetrain.config.sources import RunFailed, shortened
from moetrain.generate.engine import Generator
from moetrain.generate.request import Completion, Request, SamplingParams
from moetrain.rl.envs import Demonstration, Environment, Episode, Turn
from moetrain.rl.envs.shipped import Jsonl
from moetrain.rl.trajectories import Trajectory

_PATIENCE = 0.01
"""Seconds to wait at once for awaited answers, while there is nothing else to do."""
_QUICK = 0.005
"""Seconds that a call may take before others no longer wait for its thread. Threads cost as well:
with one for each of 2,048 calls a step of 0.43 s took 0.67."""
_LARGEST_REWARD = 1e12
"""Gradients grow with rewards, and their squares are summed in fp32, which ends at 3.4e38: above
about 1e19 the norm is infinite and every step is skipped. The rest is room for the gradient of the
log-probability."""
_NUMBERS = (Real, Decimal, np.generic, np.ndarray, torch.Tensor)
"""What a reward may be an object of."""


# ---- calls ---------------------------------------------------------------------------------------


class _Failed(NamedTuple):
    """Takes the place of an answer; ``reason`` is a word to count by."""

    reason: str
    detail: str


class _Calls:
    """Calls under way, each under a key of the caller's, with ``limit`` seconds each."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._plain: dict[Any, tuple[Future[Any], Future[float]]] = {}
        """Each call's answer, and when it began. An awaitable's answer is another future, ..."""
        self._later: dict[Any, tuple[Future[Any], float]] = {}
        """... which moves here, with the call's deadline."""
        self._loop = asyncio.new_event_loop()
        self._waiting: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        """Calls that have not begun, each behind the two futures of ``_plain``."""
        self._num_threads = 0

    def start(self, key: Hashable, function: Callable[..., Any], *args: Any) -> None:
        if not self._num_threads:
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
            self._add_threads(1)
        answer, begun = self._plain[key] = Future(), Future()
        self._waiting.put((answer, begun, partial(function, *args)))

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function`` on the event loop, which logs what it raises; nobody waits for it."""
        self._loop.call_soon_threadsafe(function, *args)

    def finished(self, patience: float = 0.0) -> list[tuple[Any, Any]]:
        """Return the answers that have come, or :class:`_Failed`, in the order of the calls.

        Waits for plain calls, and, without any, up to ``patience`` seconds for one of the others.
        """
        done: list[tuple[Any, Any]] = []
        for key, (answer, begun) in self._plain.items():
            while not (self._waiting.empty() or answer.done() or wait([answer], _QUICK).done):
                self._add_threads(min(self._num_threads, self._waiting.qsize()))
            deadline = begun.result() + self.limit  # waiting for others' turn is not late
            result = _result(answer, deadline - time.monotonic())
            if isinstance(result, Future):
                self._later[key] = result, deadline
            else:
                done.append((key, result))
        self._plain.clear()
        if not done and self._later and patience:
            wait([answer for answer, _ in self._later.values()], patience, FIRST_COMPLETED)
        for key, (answer, deadline) in list(self._later.items()):
            if answer.done() or time.monotonic() > deadline:
                done.append((key, _result(answer, 0)))
                answer.cancel()
                del self._later[key]
        return done

    def all_finished(self) -> dict[Any, Any]:
        """Wait for all calls; returns what :meth:`finished` does."""
        found: dict[Any, Any] = {}
        while self._plain or self._later:
            found |= dict(self.finished(_PATIENCE))
        return found

    def _add_threads(self, number: int) -> None:
        for _ in range(number):
            threading.Thread(target=self._work, daemon=True).start()
        self._num_threads += number

    def _work(self) -> None:
        while True:
            answer, begun, call = self._waiting.get()
            begun.set_result(time.monotonic())
            try:
                result = call()
                if isinstance(result, Awaitable):
                    result = asyncio.run_coroutine_threadsafe(_awaited(result), self._loop)
                answer.set_result(result)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it ends this call alone
                answer.set_exception(error)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _result(answer: Future[Any], seconds: float) -> Any:
    """Return what ``answer`` comes to within ``seconds``, or why there is none."""
    if not (answer.done() or wait([answer], max(0.0, seconds)).done):
        return _Failed("timeout", "no answer within rl.step_timeout")
    if answer.cancelled():
        return _Failed("raised", "it was cancelled")
    if (error := answer.exception()) is None:
        return answer.result()
    reason = "timeout" if isinstance(error, TimeoutError) else "raised"
    return _Failed(reason, " ".join(f"{type(error).__name__}: {error}".split()))


# ---- what environments may say -------------------------------------------------------------------


def try_reward(environment: Jsonl, name: str, limit: float) -> None:
    """Raise ConfigError if the function ``name`` returns no reward for answers to the first line.

    They are the line's own ``answer``, where there is one, and an empty text. A call that raises or
    takes longer than ``limit`` seconds is only logged: the policy may answer otherwise.
    """
    line, calls = environment.lines[0], _Calls(limit)
    for answer in {str(line.get("answer", "")): None, "": None}:
        calls.start(answer, environment.score, environment.problem(0), answer)
    for answer, found in calls.all_finished().items():
        case = f"{name!r}, of line 1 of rl.prompts and the answer {shortened(answer)}"
        if isinstance(found, _Failed):
            logger.warning(
                "rl.reward: %s, failed (%s): %s; trajectories for which it does are dropped",
                *(case, found.reason, found.detail[:400]),
            )
        elif (problem := _not_a_reward(found)) is not None:
            raise ConfigError("rl.reward", f"{case}, returns {problem}")


def _number(value: Any) -> float | None:
    """Return ``value`` of Python, NumPy or torch as a float; None: it is no finite number."""
    if not isinstance(value, _NUMBERS):  # float() would read text, and run an object's own code
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last
        return None
    return number if math.isfinite(number) else None


def _not_a_reward(value: object, before: float = 0.0) -> str | None:
    """Say what is wrong with ``value`` as a reward, added to ``before``; None: nothing."""
    number, most = _number(value), _LARGEST_REWARD
    if number is None:
        return f"a {type(value).__name__} that is no finite number"
    if abs(before + number) > most:
        return f"{number:g}; all of a trajectory's together are at most {most:g} in size"
    return None


def _are_tokens(tokens: object, vocabulary: int) -> bool:
    """Whether an environment may say ``tokens``: a tuple of integers below ``vocabulary``."""
    return isinstance(tokens, tuple) and all(type(t) is int and 0 <= t < vocabulary for t in tokens)


def _are_limits(most: object, stop: object) -> bool:
    texts = isinstance(stop, tuple) and all(isinstance(text, str) and text for text in stop)
    return texts and (most is None or (type(most) is int and most > 0))


def _turn_of(answer: Any, trajectory: Trajectory, vocabulary: int) -> Turn | _Failed:
    """Return an environment's ``answer`` if it may go on ``trajectory``, else what is wrong."""
    if isinstance(answer, _Failed):
        return answer
    if not isinstance(answer, Turn):
        return _Failed("nonsense", f"{type(answer).__name__} where a Turn is due")
    reward, done = _number(answer.reward), _number(answer.done)
    problem = _not_a_reward(answer.reward, trajectory.reward)
    if problem is not None or reward is None:
        problem = f"its reward is {problem}"
    elif done is None:
        problem = f"its done, a {type(answer.done).__name__}, is no number"
    elif not _are_tokens(answer.tokens, vocabulary):
        problem = f"its tokens are no tuple of integers of 0 to {vocabulary - 1}"
    elif not trajectory.answers and (done or not answer.tokens):
        problem = "its prompt is empty or over"
    elif not _are_limits(answer.max_tokens, answer.stop):
        problem = "its max_tokens is no number above 0, or its stop no tuple of texts"
    else:
        return answer._replace(reward=reward, done=bool(done))
    return _Failed("nonsense", problem)


# ---- trajectories --------------------------------------------------------------------------------


@dataclass
class _Active:
    trajectory: Trajectory
    episode: Episode | None = None
    """None: the environment is making it."""
    is_speaking: bool = False
    """Whether the generator continues it; else its environment was asked."""
    completion: Completion | None = None
    turn: Turn = field(default_factory=Turn)
    """The environment's last answer."""


@dataclass(eq=False)
class Collector:
    """All trajectories under way on this rank."""

    generator: Generator
    environment: Environment
    settings: RlSection
    stop_ids: tuple[int, ...]
    """Tokens that end a turn of the policy."""
    longest: int
    """The most tokens of a trajectory."""

    def __post_init__(self) -> None:
        self.groups: dict[int, list[Trajectory]] = {}
        """Trajectories that were begun and not yet returned by :meth:`finish`, by group."""
        self._active: dict[str, _Active] = {}
        self._calls = _Calls(self.settings.step_timeout)
        self._shown = _Calls(self.settings.step_timeout)
        self._said: set[str] = set()
        self.reset_counts()

    def reset_counts(self) -> None:
        self.generated = 0  # tokens
        self.seconds = {"generate": 0.0, "environment": 0.0}

    # ---- what is under way ---------------------------------------------------------------------

    def start(
        self, group: int, task: int, size: int, seed: int, temperature: float | None = None
    ) -> None:
        """Begin ``size`` attempts at ``task``, as ``group``, whose number ``seed`` goes with.

        ``temperature`` None: ``rl.temperature``.
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
            self.go_on()
        return [self.groups.pop(group) for group in groups]

    def go_on(self) -> None:
        """Take one step of the generator, and hear the environments."""
        started = time.perf_counter()
        for completion in self.generator.step():
            self.generated += 1
            self._follow(completion)
        self.seconds["generate"] += time.perf_counter() - started
        self._hear()

    def under_way(self) -> list[Trajectory]:
        """Return all trajectories not handed out, as they are now, in the order to resume them in.

        They go on here as they would after that: without a cache, submitted in this order.
        """
        speaking = {name: part for name, part in self._active.items() if part.is_speaking}
        for name, part in speaking.items():
            self.generator.abort(name)
            self._take_in(part)
        self.generator.pages.clear_cache()
        for name, part in speaking.items():
            self._speak(name, part)
        over = [t for group in self.groups.values() for t in group if t.is_over]
        return over + [part.trajectory for part in self._active.values()]

    # ---- the environment's side ----------------------------------------------------------------

    def demonstrations(self, tasks: Sequence[int]) -> list[Demonstration]:
        """Ask for a demonstration of each task; RunFailed: one raises, is late, or is none."""
        environment: Any = self.environment
        shown, vocabulary = [], self.generator.model.arch.vocab_size
        for number, task in enumerate(tasks):
            self._shown.start(number, environment.demonstrate, task)
        for number, found in sorted(self._shown.all_finished().items()):
            problem = (
                "is none: a Demonstration is a tuple of two or more tokens of 0 to "
                f"{vocabulary - 1}, and as many truth values, of which the first is false"
            )
            if isinstance(found, _Failed):
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

    def _enter(self, trajectory: Trajectory) -> Any:
        """Return a new episode and its answer, after all actions of a resumed trajectory."""
        episode = self.environment.episode(trajectory.task)
        actions = [trajectory.tokens[start:stop] for start, stop in trajectory.actions]
        answer = episode.reset()
        if not (actions or isinstance(answer, Awaitable)):
            return episode, answer
        ends, starts = [0, *(b for _, b in trajectory.actions)], [a for a, _ in trajectory.actions]
        if trajectory.answers > len(actions):
            starts.append(trajectory.turn_start)
        heard = [tuple(trajectory.tokens[a:b]) for a, b in zip(ends, starts, strict=False)]
        told = _told_again(episode, answer, actions, heard if actions else [])
        return asyncio.run(told) if actions else told

    def _hear(self) -> None:
        started = time.perf_counter()
        # Wait only if there is nothing to generate.
        while heard := self._calls.finished(0 if self.generator.is_busy else _PATIENCE):
            for name, answer in heard:
                self._answered(name, answer)
        self.seconds["environment"] += time.perf_counter() - started

    def _answered(self, name: str, answer: Any) -> None:
        part = self._active[name]
        trajectory = part.trajectory
        if part.episode is None and not isinstance(answer, _Failed):
            part.episode, answer = answer
            if trajectory.answers > len(trajectory.actions):  # resumed in the policy's turn
                if isinstance(answer, Turn) and _are_limits(answer.max_tokens, answer.stop):
                    part.turn = answer
                self._tell(part, trajectory.tokens[trajectory.turn_start :])
                return self._speak(name, part)
        answer = _turn_of(answer, trajectory, self.generator.model.arch.vocab_size)
        if isinstance(answer, _Failed):
            return self._fail(name, answer)
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
            return self._fail(name, _Failed("too_long", f"{problem} (data.seq_len)"))
        elif is_cut:
            trajectory.is_over = trajectory.is_overlong = True
        else:
            if start > trajectory.start:
                trajectory.starts.append(start)
            trajectory.extend(answer.tokens)
            return self._speak(name, part)
        self._drop(name, answer.done)

    def _drop(self, name: str, is_done: bool = False) -> Trajectory:
        part = self._active.pop(name)
        if not is_done and callable(close := getattr(part.episode, "close", None)):
            threading.Thread(target=close, daemon=True).start()
        return part.trajectory

    def _fail(self, name: str, failed: _Failed) -> None:
        trajectory, (reason, detail) = self._drop(name), failed
        trajectory.fault, trajectory.detail, trajectory.is_over = reason, detail, True
        if reason not in self._said:  # once a reason: a bad environment fails at every call
            self._said.add(reason)
            logger.warning(
                "a trajectory of task %d is dropped (%s): %s; it is counted, and so will others be",
                *(trajectory.task, reason, detail),
            )

    # ---- the policy's side ---------------------------------------------------------------------

    def _room(self, trajectory: Trajectory, start: int, unread: int = 0) -> int:
        """Return how many tokens fit behind ``unread`` more in a segment from ``start`` on."""
        return min(
            self.settings.max_tokens - trajectory.num_written,
            self.longest - (len(trajectory.tokens) - start) - unread,
        )

    def _speak(self, name: str, part: _Active) -> None:
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
        part.is_speaking = True

    def _follow(self, completion: Completion) -> None:
        """Keep a completion that has one more token; pass a finished one to the environment."""
        part = self._active[completion.request_id]
        part.completion = completion
        if completion.finish_reason is None:
            return self._tell(part, completion.tokens[-completion.num_new :])
        self._take_in(part)
        part.is_speaking = False
        trajectory = part.trajectory
        # They cover all tokens of the segment so far, earlier turns included.
        trajectory.keep_routes(None if completion.routes is None else completion.routes.numpy())
        is_full = self._room(trajectory, trajectory.start) <= 0
        trajectory.is_overlong = completion.finish_reason == "length" and is_full
        start = trajectory.turn_start
        trajectory.actions.append((start, len(trajectory.tokens)))
        episode, action = part.episode, trajectory.tokens[start:]
        assert episode is not None
        # An episode without step fails alone, in the call.
        self._calls.start(completion.request_id, lambda: episode.step(action))

    def _tell(self, part: _Active, tokens: Sequence[int]) -> None:
        if part.turn.heard is not None:
            self._calls.tell(part.turn.heard, tokens)

    def _take_in(self, part: _Active) -> None:
        completion, part.completion = part.completion, None
        if completion is not None:
            part.trajectory.extend(completion.tokens, completion.logprobs, completion.versions)


async def _told_again(
    episode: Episode, answer: Any, actions: Iterable[Sequence[int]], heard: Sequence[Any]
) -> tuple[Episode, Turn]:
    """Raises RuntimeError: it says something else than what was ``heard`` before."""
    for action, said in zip_longest((None, *actions), heard):
        if action is not None:
            answer = episode.step(action)
        answer = await answer if isinstance(answer, Awaitable) else answer
        if said is not None and answer.tokens != said:
            raise RuntimeError("resumed, it does not say what it said before")
    return episode, answer
