"""What keeps a run in hand: stop signals, skipped steps, determinism, the garbage collector."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moetrain.config import RunFailed

logger = logging.getLogger("moetrain")


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a run to save and stop."""
SAVE = 1 << 32
"""In the sum of what ranks ask for: the main rank asks for a checkpoint. Signals are fewer."""


class BadSteps(RunFailed):
    """Too many steps in a row were not finite; the state is what it was before them."""


class GivenUp(Exception):
    """A stop signal came within a step, of which nothing is kept."""


class LateNumbers:
    """Numbers that the device is still to compute; reading waits for them and nothing after."""

    def __init__(self, numbers: torch.Tensor) -> None:
        on_cuda = numbers.device.type == "cuda"
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=on_cuda)
        self._host.copy_(numbers, non_blocking=True)
        self._copied = torch.cuda.Event() if on_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> torch.Tensor:
        """The numbers, on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


class StepWatch:
    """Counts skipped steps and ranks' requests on the device, and reads them one step late.

    So the host never waits for the step under way. Since a skipped step changes nothing, the state
    one step later is still that before the first of them; and since all ranks read the same sums of
    the same step, they stop together.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.limit = limit
        self._steps = 0
        # Skipped in a row, skipped in all, what ranks ask for.
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._late = LateNumbers(self._counts)
        self.asked_to_stop = False
        """Whether any rank was, as of the step before the last."""
        self.asked_to_save = False
        """Whether the main rank's clock asked for a checkpoint, as of the step before the last."""

    def update(self, skipped: torch.Tensor, requests: torch.Tensor) -> None:
        """Count one step; raises :class:`BadSteps` for the steps before it.

        Args:
            skipped: 0-d bool, the same on every rank.
            requests: 0-d, a sum over ranks: stop signals, and :data:`SAVE` for a checkpoint.
        """
        self.check()
        self._steps += 1
        in_row = torch.where(skipped, self._counts[0] + 1, 0)
        self._counts = torch.stack([in_row, self._counts[1] + skipped, requests.long()])
        self._late = LateNumbers(self._counts)

    def check(self) -> None:
        """Raise :class:`BadSteps` if the limit was reached by the steps counted so far."""
        in_row, _, requests = self._late.read().tolist()  # of the step before: long done
        self.asked_to_save, self.asked_to_stop = requests >= SAVE, requests % SAVE > 0
        if in_row >= self.limit:
            raise BadSteps(
                f"{self.limit} steps in a row had a non-finite loss or gradient norm "
                "(train.max_bad_steps); lower optim.lr, or look at the data"
            )

    def check_end(self) -> None:
        """:meth:`check`, of a run's last step; and raise if none of its steps was a good one."""
        self.check()
        if 0 < self._steps == self.in_row():
            raise BadSteps(
                f"all {self._steps} steps had a non-finite loss or gradient norm: nothing was "
                "trained; look at the weights it started from, and at the data"
            )

    def in_row(self) -> int:
        """Skipped steps since the last good one; waits for the device."""
        return int(self._counts[0])

    def total(self) -> int:
        """Skipped steps so far; waits for the device."""
        return int(self._counts[1])


def make_deterministic() -> None:
    """Only bitwise-reproducible algorithms from here on, in this process."""
    # cuBLAS reads this when its first handle is made; two buffers of 4 MiB is NVIDIA's own choice.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that SIGTERM and SIGINT append to; a second Ctrl-C interrupts at once.

    SIGUSR1, which batch systems send some time before the end, counts as SIGTERM.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may set handlers; its owner decides what stops it
        return

    def note(number: int, frame: Any) -> None:
        received.append(signal.SIGTERM if number == signal.SIGUSR1 else number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logger.info("stopping; a checkpoint will be written (Ctrl-C again: none, and at once)")

    before = {s: signal.signal(s, note) for s in STOPS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Collections happen when the loop says so; objects made before it are never scanned again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
