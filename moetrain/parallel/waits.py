"""Measures how long a rank waits for others, on its device's clock. The slowest rank waits least.

Left out on purpose: waits in compiled blocks, CUDA graphs and pipelines, and DeepEP's.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

_MOST = 1024
"""The most waits that are kept until they are read: reading many events takes long."""
noted: list[tuple[Any, Any] | None] = []
"""Begin and end of each wait. None marks a point after which ranks did different things, until they
met in the next wait."""


def now(device: torch.device) -> Any:
    """Return the time in seconds; on CUDA, an event on the current stream. Nothing waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    return torch.cuda.current_stream(device).record_event(event)


def elapsed(begin: Any, end: Any) -> float:
    """Return the seconds between two times of :func:`now` that the device has passed."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


@contextmanager
def waiting(device: torch.device) -> Iterator[None]:
    """Count the time inside as waiting for other ranks."""
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    begin = None if is_captured or len(noted) >= _MOST else now(device)
    yield
    if begin is not None:
        noted.append((begin, now(device)))


def share_waited() -> float:
    """Return the share of its time, 0 to 1, that this rank has waited since the last call."""
    both = [(a, b) for a, b in pairwise(noted) if a is not None and b is not None]
    noted.clear()
    whole = sum(elapsed(a[1], b[1]) for a, b in both)
    return sum(elapsed(*b) for _, b in both) / whole if whole else 0.0
