"""How long a rank waits for others, on its device's own time: the slowest of them waits least.

Left out on purpose: waits in compiled blocks, CUDA graphs and pipelines, and DeepEP's.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

_MOST = 1024
"""Waits that are noted until they are looked at: to read many events takes long."""
noted: list[tuple[Any, Any] | None] = []
"""Begins and ends of waits. None: then ranks did different things, and met in the next wait."""


def now(device: torch.device) -> Any:
    """Return the time in seconds; on CUDA, an event of the device's own time. Nothing waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    return torch.cuda.current_stream(device).record_event(event)


def elapsed(begin: Any, end: Any) -> float:
    """Return the seconds between two times of :func:`now`, which the device has come to."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


@contextmanager
def waiting(device: torch.device) -> Iterator[None]:
    """Note the time inside as one in which this rank waits for others."""
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    begin = None if is_captured or len(noted) >= _MOST else now(device)
    yield
    if begin is not None:
        noted.append((begin, now(device)))


def share_waited() -> float:
    """Return which share of its time this rank has waited since the last call, 0 to 1."""
    both = [(a, b) for a, b in pairwise(noted) if a is not None and b is not None]
    noted.clear()
    whole = sum(elapsed(a[1], b[1]) for a, b in both)
    return sum(elapsed(*b) for _, b in both) / whole if whole else 0.0
