"""Requests to end or to save a run: signals, callbacks, the clock, bad steps, hanging ranks.

:class:`StopRequests` collects the requests that reach this process and agrees on them with the
other ranks at every step. :class:`Watchdog` ends a process whose step takes too long.
"""

import faulthandler
import math
import os
import sys
import threading
import time
from typing import TextIO, cast

import torch

from moetrain.config.environment import failure_mark, launched_place, report_failure
from moetrain.config.sources import RunFailed
from moetrain.parallel.world import World
from moetrain.runtime.memory import LateValues
from moetrain.runtime.typed import ints

_SAVE = 1 << 32
"""The main rank adds this to the sum of all ranks' stop signals to ask for a checkpoint."""
_END = 1 << 40
"""Every rank on which a callback asks to end the run adds this to the same sum."""

_STUCK_SECONDS = 5.0
"""Seconds after a watchdog's time is up. Then the process ends even if no Python code can run."""


class BadSteps(RunFailed):
    """Too many steps in a row had a non-finite loss or gradient norm. The state is the one before
    these steps."""


class GivenUp(Exception):
    """A stop signal came during a step, and the results of the step are discarded."""


class StopRequests:
    """Requests to stop or to save, and counts of skipped steps. All ranks decide alike.

    Each step sums all ranks' requests on the device. The host reads the sums one step late, so it
    never waits for the step under way. A skipped step changes nothing. So when the host learns, one
    step late, that too many steps were skipped, the state is still the one before these steps.

    Attributes:
        signals: the stop signals that came to this process.
        reason: the reason that a callback of this rank gave to end the run, or an empty text.
        asked_to_save: True if the main rank asked for a checkpoint in the step before the last.
        asked_to_end: True if, by the step before the last, a stop signal came to a rank or a
            callback of a rank asked to end the run.
    """

    def __init__(self, world: World, max_bad_steps: int) -> None:
        self.world, self.max_bad_steps = world, max_bad_steps
        self.signals: list[int] = []
        self.reason = ""
        self.asked_to_save = self.asked_to_end = False
        self._wants_save = False
        self._steps = 0
        # Steps skipped in a row, steps skipped in all, and the sum of ranks' requests.
        self._counts = torch.zeros(3, dtype=torch.int64, device=world.device)
        self._late = LateValues(self._counts)

    def end(self, reason: str, *, everywhere: bool) -> None:
        """Ask to end the run. It ends at most two steps later. The first ``reason`` is kept.

        ``everywhere`` says that all ranks ask at this step. The run then ends with this step.
        """
        self.reason = self.reason or reason
        self.asked_to_end |= everywhere or self.world.size == 1

    def ask_to_save(self) -> None:
        """Ask all ranks to save, at most two steps later. Only the main rank's request counts."""
        self._wants_save = self.world.is_main

    def count(self, skipped: torch.Tensor) -> None:
        """Count a step. Collective.

        ``skipped`` says whether the step was skipped (0-d bool, the same on every rank).

        Raises BadSteps: the limit was reached by the steps before this one.
        """
        requests = self._sum()
        self.check()
        self._steps += 1
        in_row = torch.where(skipped, self._counts[0] + 1, 0)
        self._counts = torch.stack([in_row, self._counts[1] + skipped, requests.long()])
        self._late = LateValues(self._counts)

    def check(self, *, is_over: bool = False) -> None:
        """Raise :class:`BadSteps` if the steps counted so far reach the limit, or if the run is
        over and none of its steps was good."""
        in_row, _, requests = ints(self._late.read())  # the step before is long done
        self.asked_to_save = requests % _END >= _SAVE
        self.asked_to_end |= requests >= _END or requests % _SAVE > 0
        if in_row >= self.max_bad_steps:
            problem = f"{self.max_bad_steps} steps in a row had a non-finite loss or gradient norm"
            remedy = "lower optim.lr, or look at the data"
            raise BadSteps(f"{problem} (train.max_bad_steps); {remedy}")
        if is_over and 0 < self._steps == in_row:
            problem = f"all {self._steps} steps had a non-finite loss or gradient norm: nothing was"
            remedy = "look at the weights that the run started from, and at the data"
            raise BadSteps(f"{problem} trained; {remedy}")

    def skipped_in_row(self) -> int:
        """Return how many steps were skipped since the last good one; waits for the device."""
        return int(self._counts[0])

    def skipped(self) -> int:
        """Return how many steps were skipped so far; waits for the device."""
        return int(self._counts[1])

    def is_signalled(self) -> bool:
        """Return whether a stop signal came to any rank. Collective; waits for the device."""
        return self._sum().item() % _SAVE > 0

    def _sum(self) -> torch.Tensor:
        """Sum all ranks' stop signals, ``_SAVE`` and ``_END`` (0-d)."""
        # Only the main rank's request to save counts: ranks' clocks differ, and all save together.
        mine = len(self.signals) + _SAVE * self._wants_save + _END * bool(self.reason)
        self._wants_save = False
        return self.world.sum_all(torch.full((), mine, device=self.world.device))


class Watchdog:
    """Ends this process unless :meth:`restart` or :meth:`pause` is called in time.

    The time is ``launch.hang_seconds``. If one rank hangs or is stopped, the other ranks wait for
    it until their own watchdogs end them. The launcher sees that ranks have ended, kills the
    remaining ones and starts all ranks again.
    """

    def __init__(self, seconds: float, rank: int = 0, size: int = 1) -> None:
        """Store the arguments; the timer does not run yet.

        Args:
            seconds: time after which the process prints where each of its threads is, and ends; 0:
                never.
            rank, size: this process, for the message.
        """
        self.seconds, self.rank, self.size = seconds, rank, size
        self._deadline = math.inf
        self._thread: threading.Thread | None = None

    def restart(self) -> None:
        """Restart the timer."""
        if not self.seconds:
            return
        self._deadline = time.monotonic() + self.seconds
        # This one ends the process even if a thread keeps the others from running Python code.
        error = cast("TextIO", sys.__stderr__)
        faulthandler.dump_traceback_later(self.seconds + _STUCK_SECONDS, file=error, exit=True)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Stop the timer until the next :meth:`restart`."""
        self._deadline = math.inf
        if self.seconds:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        # A restart while this thread sleeps moves the deadline behind the end of the sleep.
        while (left := self._deadline - time.monotonic()) > 0:
            time.sleep(min(left, self.seconds))
        who = f"rank {self.rank} of {self.size}" if self.size > 1 else "this process"
        reason = (
            f"failed: {who} has not ended a step for {self.seconds:g} s (launch.hang_seconds), so "
            "it ends; above is where its threads were. Raise that if a step can take so long"
        )
        error, place = cast("TextIO", sys.__stderr__), launched_place()
        if place is not None and place.error_file:
            failure_mark(place.error_file).touch()  # errors of other ranks follow from this one
            report_failure(place.error_file, reason)
        print(f"the threads of {who}:", file=error, flush=True)
        faulthandler.dump_traceback(error)
        print(reason, file=error, flush=True)
        os._exit(1)
