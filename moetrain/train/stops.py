"""Requests to end or to save a run: signals, callbacks, the clock, bad steps, hanging ranks.

:class:`StopRequests` collects what this process is asked for and agrees on it with the other ranks
at every step. :class:`Watchdog` ends a process whose step takes too long.
"""

import faulthandler
import sys
from typing import TextIO, cast

import torch

from moetrain.config.sources import RunFailed
from moetrain.parallel.world import World
from moetrain.runtime.memory import LateValues

_SAVE = 1 << 32
"""Added to the sum of all ranks' stop signals where the main rank asks for a checkpoint."""
_END = 1 << 40
"""Added to the same sum by every rank on which a callback asks to end the run."""


class BadSteps(RunFailed):
    """Too many steps in a row were not finite; the state is that before them."""


class GivenUp(Exception):
    """A stop signal came within a step, and nothing of the step is kept."""


class StopRequests:
    """Requests to stop or to save, and counts of skipped steps. All ranks decide alike.

    Each step sums all ranks' requests on the device. The host reads the sums one step late, so it
    never waits for the step under way. A skipped step changes nothing: one step later the state is
    still that before the first of them.

    Attributes:
        signals: the stop signals that came to this process.
        reason: why a callback of this rank asked to end the run, or an empty text.
        asked_to_save: the main rank asked for a checkpoint, as of the step before the last.
        asked_to_end: a stop signal came to a rank, or a callback of a rank asked to end the run, as
            of the step before the last.
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
        """Ask to end the run, at most two steps later; the first ``reason`` is kept.

        With ``everywhere`` all ranks ask at this step, and the run ends with it.
        """
        self.reason = self.reason or reason
        self.asked_to_end |= everywhere or self.world.size == 1

    def ask_to_save(self) -> None:
        """Have all ranks save at most two steps later, if this is the main rank."""
        self._wants_save = self.world.is_main

    def count(self, skipped: torch.Tensor) -> None:
        """Count a step, which was skipped or not (0-d bool, the same on every rank). Collective.

        Raises BadSteps: the limit was reached by the steps before this one.
        """
        requests = self._sum()
        self.check()
        self._steps += 1
        in_row = torch.where(skipped, self._counts[0] + 1, 0)
        self._counts = torch.stack([in_row, self._counts[1] + skipped, requests.long()])
        self._late = LateValues(self._counts)

    def check(self, *, is_over: bool = False) -> None:
        """Raise :class:`BadSteps` if the limit was reached by the steps counted so far, or if the
        run is over and no step of it was good."""
        in_row, _, requests = self._late.read().tolist()  # the step before is long done
        self.asked_to_save = requests % _END >= _SAVE
        self.asked_to_end |= requests >= _END or requests % _SAVE > 0
        if in_row >= self.max_bad_steps:
            problem = f"{self.max_bad_steps} steps in a row had a non-finite loss or gradient norm"
            remedy = "lower optim.lr, or look at the data"
            raise BadSteps(f"{problem} (train.max_bad_steps); {remedy}")
        if is_over and 0 < self._steps == in_row:
            problem = f"all {self._steps} steps had a non-finite loss or gradient norm: nothing was"
            remedy = "look at the weights it started from, and at the data"
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
        # Only the main rank's clock counts, since all must decide alike.
        mine = len(self.signals) + _SAVE * self._wants_save + _END * bool(self.reason)
        self._wants_save = False
        return self.world.sum_all(torch.full((), mine, device=self.world.device))


class Watchdog:
    """Ends this process if it is not restarted or paused in time (``launch.hang_seconds``).

    The other ranks of one that hangs, or is stopped, wait for it, and end themselves likewise; then
    the launcher, which has lost some, kills all and starts them again.
    """

    def __init__(self, seconds: float) -> None:
        """``seconds`` until the end, with a traceback of all threads; 0: never."""
        self.seconds = seconds

    def restart(self) -> None:
        """Begin to wait anew."""
        self.pause()
        if self.seconds:
            error = cast("TextIO", sys.__stderr__)
            faulthandler.dump_traceback_later(self.seconds, file=error, exit=True)

    def pause(self) -> None:
        """Wait for nothing until the next :meth:`restart`."""
        if self.seconds:
            faulthandler.cancel_dump_traceback_later()
