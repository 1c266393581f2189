"""What keeps a run in hand: stop signals, skipped steps, determinism, the garbage collector."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RunFailed(RuntimeError):
    """Training cannot go on; a checkpoint of the last good state was written."""


class SkipWatch:
    """Counts skipped steps on the device and reads the count one step late, so never waits.

    Since a skipped step changes nothing, the state one step later is still the last good one.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.limit = limit
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # in a row, in all
        self._host = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def update(self, skipped: torch.Tensor) -> None:
        """Count one step; raises :class:`RunFailed` for the steps before it."""
        self.check()
        in_row = torch.where(skipped, self._counts[0] + 1, 0)
        self._counts = torch.stack([in_row, self._counts[1] + skipped])
        self._host.copy_(self._counts, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def check(self) -> None:
        """Raise :class:`RunFailed` if the limit was reached by the steps counted so far."""
        if self._copied is not None:
            self._copied.synchronize()  # of the step before: long done
        if self._host[0] >= self.limit:
            raise RunFailed(
                f"{self.limit} steps in a row had a non-finite loss or gradient norm "
                "(train.max_bad_steps); the weights of the last good step were saved. "
                "Lower optim.lr, or look at the data"
            )

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
    """A list that SIGTERM and SIGINT append to; a second Ctrl-C interrupts at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may set handlers; its owner decides what stops it
        return

    def note(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("stopping after this step; a checkpoint will be written", file=sys.stderr)

    before = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
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
