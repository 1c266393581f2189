"""Calls of an environment: each has a time limit, and a failure costs its own trajectory alone.

Calls begin in daemon threads: one makes all of them while they are quick, and slow ones soon have
one each. A plain answer is waited for, so that a run whose environment is quick is the same at
every rerun; an awaitable goes on, on one event loop for all, while text is generated. A thread that
hangs is left behind.

Left out on purpose: isolation of code that blocks the event loop or ends the interpreter.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from decimal import Decimal
from numbers import Real
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from moetrain.config.sources import RunFailed
from moetrain.rl.envs import Demonstrates, Demonstration, Turn
from moetrain.rl.rows import Trajectory

_K = TypeVar("_K")

_LARGEST_REWARD = 1e12
"""Gradients grow with rewards, and their squares are summed in fp32, which ends at 3.4e38: above
about 1e19 the norm is infinite and every step is skipped. The rest is room for the gradient of the
log-probability."""
_NUMBERS = (Real, Decimal, np.generic, np.ndarray, torch.Tensor)
"""What a reward may be an object of."""
_QUICK = 0.005
"""Seconds that a call may take before others no longer wait for its thread. Threads cost as well:
with one for each of 2,048 calls a step of 0.43 s took 0.67."""
_PATIENCE = 1.0
"""Seconds between looks at calls whose answers come later, where nothing else is to be done."""


class Failed(NamedTuple):
    """Takes the place of an answer."""

    reason: str
    """A word to count by: ``raised``, ``timeout``, or one of the caller's."""
    detail: str


class Calls(Generic[_K]):
    """Calls under way, each under a key of the caller's."""

    def __init__(self, limit: float) -> None:
        """``limit``: seconds for one call."""
        self.limit = limit
        self._plain: dict[_K, tuple[Future[Any], Future[float]]] = {}
        """Each call's answer, and when it began. An awaitable's answer is another future, ..."""
        self._later: dict[_K, tuple[Future[Any], float]] = {}
        """... which moves here, with the call's deadline."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        """The arguments of :meth:`_call` for calls that have not begun."""
        self._num_threads = 0

    def start(self, key: _K, function: Callable[..., Any], *args: Any) -> None:
        """Begin ``function(*args)``."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        answer, begun = self._plain[key] = Future(), Future()
        self._waiting.put((answer, begun, function, args))
        self._add_threads(0 if self._num_threads else 1)

    def __len__(self) -> int:
        return len(self._plain) + len(self._later)

    def finished(self, patience: float = 0.0) -> list[tuple[_K, Any]]:
        """Return the answers that have come, or :class:`Failed`, in the order of the calls.

        Waits for plain calls, and, where these are none, up to ``patience`` seconds for one of the
        others.
        """
        done: list[tuple[_K, Any]] = []
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

    def wait_for_all(self) -> dict[_K, Any]:
        found: dict[_K, Any] = {}
        while len(self):
            found |= dict(self.finished(_PATIENCE))
        return found

    def _add_threads(self, number: int) -> None:
        for _ in range(number):
            threading.Thread(target=self._work, daemon=True).start()
        self._num_threads += number

    def _work(self) -> None:
        while True:
            self._call(*self._waiting.get())

    def _call(
        self, answer: Future[Any], begun: Future[float], function: Callable[..., Any], args: Any
    ) -> None:
        begun.set_result(time.monotonic())
        try:
            result = function(*args)
            if isinstance(result, Awaitable):
                assert self._loop is not None
                result = asyncio.run_coroutine_threadsafe(_awaited(result), self._loop)
            answer.set_result(result)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it ends this call alone
            answer.set_exception(error)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _result(answer: Future[Any], seconds: float) -> Any:
    """Return what ``answer`` comes to within ``seconds``, or why there is none."""
    if not (answer.done() or wait([answer], max(0.0, seconds)).done):
        return Failed("timeout", "no answer within rl.step_timeout")
    if answer.cancelled():
        return Failed("raised", "it was cancelled")
    if (error := answer.exception()) is None:
        return answer.result()
    reason = "timeout" if isinstance(error, TimeoutError) else "raised"
    return Failed(reason, " ".join(f"{type(error).__name__}: {error}".split()))


def demonstrations(
    environment: Demonstrates, tasks: Sequence[int], limit: float, vocabulary: int
) -> list[Demonstration]:
    """Ask for a demonstration of each task, its tokens below ``vocabulary``.

    Raises:
        RunFailed: one raises, takes longer than ``limit`` seconds, or is none.
    """
    calls: Calls[int] = Calls(limit)
    for number, task in enumerate(tasks):
        calls.start(number, environment.demonstrate, task)
    found = calls.wait_for_all()
    return [_checked(task, found[number], vocabulary) for number, task in enumerate(tasks)]


def _checked(task: int, shown: object, vocabulary: int) -> Demonstration:
    if isinstance(shown, Failed):
        problem = f"failed ({shown.reason}): {shown.detail[:400]}"
    elif (
        isinstance(shown, Demonstration)
        and _are_tokens(shown.tokens, vocabulary)
        and isinstance(shown.mask, tuple)
        and len(shown.mask) == len(shown.tokens) >= 2
        and not shown.mask[0]
    ):
        return Demonstration(shown.tokens, tuple(map(bool, shown.mask)))
    else:
        problem = (
            f"is none: a Demonstration is a tuple of two or more tokens of 0 to {vocabulary - 1}, "
            "and as many truth values, of which the first is false"
        )
    raise RunFailed(f"rl.env: its demonstration of task {task} {problem}")


def _number(value: Any) -> float | None:
    """Return ``value`` of Python, NumPy or torch as a float; None: it is no finite number."""
    if not isinstance(value, _NUMBERS):  # float() would read text, and run an object's own code
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last
        return None
    return number if math.isfinite(number) else None


def not_a_reward(value: object, before: float = 0.0) -> str | None:
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


def turn_of(answer: Any, trajectory: Trajectory, vocabulary: int) -> Turn | Failed:
    """Return an environment's ``answer`` if it may go on ``trajectory``, else what is wrong."""
    if isinstance(answer, Failed):
        return answer
    if not isinstance(answer, Turn):
        return Failed("nonsense", f"{type(answer).__name__} where a Turn is due")
    tokens, (reward, done) = answer.tokens, map(_number, answer[1:])
    problem = not_a_reward(answer.reward, trajectory.reward)
    if problem is not None or reward is None:
        return Failed("nonsense", f"its reward is {problem}")
    if done is None:
        return Failed("nonsense", f"its done, a {type(answer.done).__name__}, is no number")
    if not _are_tokens(tokens, vocabulary):
        problem = f"its tokens are no tuple of integers of 0 to {vocabulary - 1}"
        return Failed("nonsense", problem)
    if not trajectory.answers and (done or not tokens):
        return Failed("nonsense", "its prompt is empty or over")
    return Turn(tokens, reward, bool(done))
