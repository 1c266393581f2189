"""Event-driven simulation of streams that share links: the engine of scripts/simulate.py.

Each stream runs one operation at a time, in the order of the queue. An operation begins when it is
the first in all its streams and everything that it needs is done. An operation of several streams
is a collective: all of them wait for it. After its latency it uses resources: seconds of a device,
bytes of links.

Operations that use a resource at the same time share it (dominant resource fairness, Ghodsi et al.,
NSDI 2011). A rate counts as a share of the rate that the operation would have alone. All shares
grow together from 0 until a resource is full. The operations that use it keep their rates, and the
shares of the others continue to grow. So no resource is idle that an operation could use.

Some operations slow a resource down while they run, as NCCL's kernels take multiprocessors from
products. A resource may also carry less while several operations use it.

Left out on purpose: preemption, priorities, and anything random.

Times are in seconds, and sizes in bytes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Stream = tuple[Hashable, str]
"""A rank, and the name of its stream."""
_SAME = 1e-12
"""Events that are at most so many seconds apart count as simultaneous."""


@dataclass(eq=False)
class Operation:
    """Work of one or several streams.

    Attributes:
        kind: its purpose; the reports count by it.
        start, end: when it began and ended; -1: not yet.
        blocker: the operation that it needed and that ended last; None: it needed none, or it
            became the first in its streams only after that.
    """

    kind: str
    label: str
    streams: Sequence[Stream]
    needs: list[Operation]
    uses: Mapping[Any, float]
    latency: float
    slows: Mapping[Any, float]
    start: float = -1.0
    end: float = -1.0
    blocker: Operation | None = None
    missing: int = 0
    """The number of its streams in which it is not first, plus that of its needs not done yet."""
    waiting: list[Operation] = field(default_factory=list)
    """The operations that need it."""
    left: float = 1.0
    """The share of the work that remains."""
    rate: float = 0.0
    """The share of the work that is done per second."""
    since: float = 0.0
    """The time at which :attr:`left` was updated."""
    turn: int = 0
    """The number of changes of the rate. An event from before the last change is void."""


class _Event(NamedTuple):
    time: float
    number: int
    operation: Operation
    turn: int


class Simulation:
    """Streams, links and the operations that were queued.

    Attributes:
        capacity: the seconds or bytes that a resource provides per second; 1 by default.
        together: the share of the capacity that remains while several operations use the resource;
            1 by default.
        operations: all operations, in the order in which they were queued.
    """

    def __init__(self, capacity: Mapping[Any, float] | None = None) -> None:
        self.capacity, self.together = dict(capacity or {}), dict[Any, float]()
        self.operations: list[Operation] = []
        self._queues: dict[Stream, deque[Operation]] = defaultdict(deque)
        self._users: dict[Hashable, dict[Operation, None]] = defaultdict(dict)
        self._slowed: dict[Hashable, dict[Operation, float]] = defaultdict(dict)
        self._events: list[_Event] = []
        self._number, self.now = 0, 0.0
        self._changed: dict[Hashable, None] = {}
        """The resources whose users have changed since the rates were set."""

    def queue(
        self,
        kind: str,
        label: str,
        streams: Sequence[Stream],
        needs: Iterable[Operation] = (),
        *,
        uses: Mapping[Any, float] | None = None,
        latency: float = 0.0,
        slows: Mapping[Any, float] | None = None,
    ) -> Operation:
        """Queue an operation at the end of ``streams``.

        Args:
            needs: operations that must be done before it begins.
            uses: the seconds or bytes that it takes of each resource.
            latency: the seconds before it uses anything.
            slows: the share of a resource's capacity that remains while it runs, by resource.
        """
        given = {name: amount for name, amount in (uses or {}).items() if amount > 0}
        made = Operation(kind, label, streams, list(needs), given, latency, slows or {})
        self.operations.append(made)
        for stream in streams:
            self._queues[stream].append(made)
        return made

    def run(self) -> float:
        """Run all queued operations; return when the last one ends.

        Raises RuntimeError: operations wait for one another.
        """
        for operation in self.operations:
            first = sum(self._queues[stream][0] is operation for stream in operation.streams)
            needs = dict.fromkeys(operation.needs)
            operation.missing = len(operation.streams) - first + len(needs)
            for needed in needs:
                needed.waiting.append(operation)
        for operation in self.operations:
            if not operation.missing:
                self._begin(operation)
        while self._events or self._changed:
            self._set_rates()
            if self._events:
                self.now = max(self.now, self._events[0].time)
            while self._events and self._events[0].time <= self.now + _SAME:
                self._happen(heapq.heappop(self._events))
        stuck = [one.label for one in self.operations if one.end < 0]
        if stuck:
            raise RuntimeError(f"deadlock: {len(stuck)} operations wait, the first is {stuck[0]}")
        return max((one.end for one in self.operations), default=0.0)

    # ---- events --------------------------------------------------------------------------------

    def _at(self, time: float, operation: Operation) -> None:
        self._number += 1
        heapq.heappush(self._events, _Event(time, self._number, operation, operation.turn))

    def _begin(self, operation: Operation) -> None:
        operation.start = self.now
        for resource, share in operation.slows.items():
            self._slowed[resource][operation] = share
            self._changed[resource] = None
        self._at(self.now + operation.latency, operation)

    def _happen(self, event: _Event) -> None:
        """Handle an event: a latency or the work is over, unless a later rate makes it void."""
        operation = event.operation
        if event.turn != operation.turn:
            return
        if operation.turn == 0 and operation.uses:
            operation.turn, operation.since = 1, self.now
            for resource in operation.uses:
                self._users[resource][operation] = None
                self._changed[resource] = None
            return
        operation.turn += 1
        operation.end = self.now
        for resource in operation.uses:
            self._users[resource].pop(operation, None)
            self._changed[resource] = None
        for resource in operation.slows:
            self._slowed[resource].pop(operation, None)
            self._changed[resource] = None
        for stream in operation.streams:
            queue = self._queues[stream]
            queue.popleft()
            if queue:
                self._release(queue[0], None)
        for one in operation.waiting:
            self._release(one, operation)

    def _release(self, operation: Operation, needed: Operation | None) -> None:
        operation.missing -= 1
        operation.blocker = needed
        if not operation.missing:
            self._begin(operation)

    # ---- rates ---------------------------------------------------------------------------------

    def _set_rates(self) -> None:
        """Share resources anew among operations that are connected to a changed one."""
        if not self._changed:
            return
        resources, found, changed = deque(self._changed), {}, self._changed
        self._changed = {}
        while resources:
            for operation in self._users[resources.popleft()]:
                if operation in found:
                    continue
                found[operation] = None
                for resource in operation.uses:
                    if resource not in changed:
                        changed[resource] = None
                        resources.append(resource)
        rates = self._shared(list(found))
        for operation, rate in rates.items():
            if rate == operation.rate and operation.turn > 1:
                continue
            operation.left -= (self.now - operation.since) * operation.rate
            operation.since, operation.rate = self.now, rate
            operation.turn += 1
            self._at(self.now + max(0.0, operation.left) / rate, operation)

    def _shared(self, operations: Sequence[Operation]) -> dict[Operation, float]:
        """Return every operation's rate: the share of its work that is done per second."""
        left: dict[Hashable, float] = {}
        demands: dict[Hashable, dict[Operation, float]] = defaultdict(dict)
        alone = {}
        for operation in operations:
            times = {name: x / self._capacity(name) for name, x in operation.uses.items()}
            alone[operation] = max(times.values())
            for name, seconds in times.items():
                left[name] = 1.0 if len(self._users[name]) < 2 else self.together.get(name, 1.0)
                demands[name][operation] = seconds / alone[operation]
        level, rates = 0.0, dict[Operation, float]()
        while demands:
            room = {name: left[name] / sum(each.values()) for name, each in demands.items()}
            grown = min(room.values())
            level += grown
            for name, each in demands.items():
                left[name] -= grown * sum(each.values())
            full = [name for name, x in room.items() if x <= grown * (1 + 1e-9)]
            done = {operation for name in full for operation in demands[name]}
            rates |= {operation: level / alone[operation] for operation in done}
            for each in demands.values():
                for operation in done & each.keys():
                    del each[operation]
            demands = defaultdict(dict, {name: each for name, each in demands.items() if each})
        return rates

    def _capacity(self, resource: Hashable) -> float:
        slowed = self._slowed[resource].values()
        return self.capacity.get(resource, 1.0) * min(slowed, default=1.0)

    # ---- results ------------------------------------------------------------------------------

    def busy(self) -> dict[Stream, float]:
        """Return the seconds in which each stream runs something."""
        found: dict[Stream, float] = defaultdict(float)
        for one in self.operations:
            for stream in one.streams:
                found[stream] += one.end - one.start
        return found

    def waits(self) -> dict[Stream, dict[str, float]]:
        """Return the seconds for which each stream was blocked, by the kind of the blocker.

        If an operation has no blocker, its own kind counts.
        """
        found: dict[Stream, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        last: dict[Stream, float] = defaultdict(float)
        for one in self.operations:
            for stream in one.streams:
                if one.start > last[stream]:
                    kind = one.blocker.kind if one.blocker is not None else one.kind
                    found[stream][kind] += one.start - last[stream]
                last[stream] = one.end
        return found

    def trace(self) -> dict[str, Any]:
        """Return a trace for Chrome: a process for each rank, a thread for each stream."""
        ranks = {rank: i for i, rank in enumerate(dict.fromkeys(r for r, _ in self._queues))}
        threads = {stream: i for i, stream in enumerate(self._queues)}
        events: list[dict[str, Any]] = []
        for rank, i in ranks.items():
            events.append(
                {"ph": "M", "name": "process_name", "pid": i, "args": {"name": str(rank)}}
            )
        for stream, i in threads.items():
            about = {"ph": "M", "name": "thread_name", "pid": ranks[stream[0]], "tid": i}
            events.append({**about, "args": {"name": stream[1]}})
        for one in self.operations:
            for stream in one.streams:
                what = {"ph": "X", "name": one.label, "cat": one.kind, "pid": ranks[stream[0]]}
                times = {"ts": 1e6 * one.start, "dur": 1e6 * (one.end - one.start)}
                events.append({**what, "tid": threads[stream], **times})
        return {"traceEvents": events, "displayTimeUnit": "ms"}
