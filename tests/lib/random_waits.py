"""A fuzzer of streams and threads: :func:`random_waits` delays work and changes no result.

Inside it, a side stream may wait on the device when it is entered, waits for another stream or
records an event, and a thread or a task of a thread pool may start late and end late. Each delay is
legal: work stays in the order of its stream. Code that relies on luck, such as a copy that no
stream waits for, then reads wrong values, and results differ from those without delays.

Streams that are being captured into a CUDA graph are left alone.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

MOST_CYCLES = 4_000_000
"""The longest wait of a stream, some 2 ms on an H200."""
MOST_SECONDS = 0.003
"""The longest wait of a host thread."""


@contextmanager
def random_waits(seed: int, share: float = 0.5) -> Iterator[Counter[str]]:
    """Delay side streams and host threads at random places.

    Args:
        seed: seed of the places and lengths. Threads draw numbers in the order in which they run,
            so a seed does not repeat a run exactly.
        share: probability of a delay at each place.

    Returns:
        the numbers of delays so far, by kind: ``stream`` and ``thread``.
    """
    numbers, lock, counts = random.Random(seed), threading.Lock(), Counter[str]()

    def drawn(kind: str, most: float) -> float:
        with lock:
            if numbers.random() >= share:
                return 0.0
            counts[kind] += 1
            return most * numbers.random() ** 3  # mostly short: many orders in little time

    def delay_stream(stream: torch.cuda.Stream | None) -> None:
        if stream is None or torch.cuda.is_current_stream_capturing():
            return
        if cycles := int(drawn("stream", MOST_CYCLES)):
            previous = torch.cuda.current_stream(stream.device)
            torch.cuda.set_stream(stream)
            torch.cuda._sleep(cycles)
            torch.cuda.set_stream(previous)

    def delay_thread() -> None:
        if seconds := drawn("thread", MOST_SECONDS):
            time.sleep(seconds)

    def before(delay: Callable[[Any], None], call: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(owner: Any, *args: Any, **kwargs: Any) -> Any:
            delay(owner)
            return call(owner, *args, **kwargs)

        return delayed

    def wait_stream(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        delay_stream(other)  # the awaited stream is late
        waits(stream, other)
        delay_stream(stream)

    def entered(context: torch.cuda.StreamContext) -> None:
        enter(context)
        delay_stream(context.stream)

    def submit(
        pool: ThreadPoolExecutor, task: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        def late(*args: Any, **kwargs: Any) -> Any:
            delay_thread()
            try:
                return task(*args, **kwargs)
            finally:
                delay_thread()

        return submits(pool, late, *args, **kwargs)

    streams, contexts = torch.cuda.Stream, torch.cuda.StreamContext
    waits, enter, submits = streams.wait_stream, contexts.__enter__, ThreadPoolExecutor.submit
    runs = threading.Thread.run
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            patch.setattr(streams, "wait_stream", wait_stream)
            patch.setattr(streams, "record_event", before(delay_stream, streams.record_event))
            patch.setattr(streams, "wait_event", before(delay_stream, streams.wait_event))
            patch.setattr(contexts, "__enter__", entered)
        patch.setattr(ThreadPoolExecutor, "submit", submit)
        patch.setattr(threading.Thread, "run", before(lambda _: delay_thread(), runs))
        yield counts
