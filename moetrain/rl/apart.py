"""Ranks that only generate, beside those that train (``rl.placement`` apart).

    rank of a launcher   supervises a process: starts another where that dies or hangs
      its process        a :class:`Generator` and a Collector, on a socket to the main learner
    main learner         :class:`Fleet`, a Collector whose trajectories run in those processes

No collective has learners and generators in it: one would hang with a dead peer. A socket ends with
the process, whatever ended that. On it a generator speaks first, and each is silent until the other
has spoken; a generator that is busy is answered at once, and steps meanwhile. Groups that a dead
generator had begin again in another; seeds go with a group's number, so they get the same tokens.

    generator   groups that are over, or all; whether they are all; trajectories not over; figures
    learner     parameters that follow; their version; stop ids; trajectories to begin; whether it
                is to send all groups next

Weights go from the main learner's copy, as they were at an update, straight into a generator's
parameters between two of its steps, while learners train: on CPUs over the socket, on GPUs by NCCL
in a group of two (:class:`_Wire`; copy engines would take its place). Left out on purpose: a
generator on several ranks; generators that send weights on.
"""

import gc
import math
import os
import secrets
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError, connection
from typing import Any

import torch
import torch.distributed as dist

from moetrain.config import Config, logger
from moetrain.config.environment import LaunchedPlace, launched_place
from moetrain.config.sources import RunFailed
from moetrain.generate.engine import Generator
from moetrain.generate.weights import blank
from moetrain.models.transformer import Transformer, compute_dtype
from moetrain.parallel.processes import find_ranks
from moetrain.parallel.world import World, claim_device
from moetrain.rl.collect import Collector
from moetrain.rl.setup import Setup
from moetrain.rl.trajectories import Trajectory
from moetrain.train.session import resolve_run

_BEAT_SECONDS = 1.0
"""Seconds between a generator's signs of life, which a thread of it gives."""
_SILENCE_SECONDS = 8.0
"""Seconds without one after which it hangs: it is stopped, or a call keeps the interpreter."""
_STEP_SECONDS = 600.0
"""The most between two of its steps, beside ``rl.step_timeout``; then something hangs."""
_PAUSE = 0.01
"""Seconds before a busy generator that has nothing to say speaks again."""
_SPARE = 1 / 8
"""The share of a generator's places that is free before others begin, and that waits there until
then. Steps that read prompts are no graphs, and were half of all where each end was a beginning."""
_STILLBORN = 3
"""Generators of a rank in a row that died before they served, to end the run."""
_IN_VAIN = 10
"""Generators in a row that died before any group was over, to end the run: one kills them."""
_KEY = "generators"
"""The main learner's address and secret in the run's store."""
_GONE = (OSError, EOFError, AuthenticationError, dist.DistError)
"""What the death of a peer raises."""


def _over(groups: dict[int, list[Trajectory]]) -> set[int]:
    return {number for number, group in groups.items() if all(t.is_over for t in group)}


class _Wire:
    """A connection that also carries values of the main learner's model into a generator's."""

    index: int | None = None
    """The generator's rank; None: this is its end."""
    version: int | None = None
    """Of the weights that the generator has."""
    reports = False
    """Whether it is to send all groups."""

    def __init__(self, link: connection.Connection, store: dist.Store, model: Transformer) -> None:
        """``store``: where both ends meet for NCCL."""
        self.link, self._store = link, store
        self._group: Any = None
        self.values = dict((*model.named_parameters(), *model.named_buffers()))
        self.groups: dict[int, int] = {}
        """Those that the generator has, and how many trajectories each is."""
        self.running = 0  # trajectories that it has or is given, and that are not over
        self.begun: list[Trajectory] = []
        """What it was not yet told to begin."""

    def is_gone(self) -> bool:
        """Whether the other end was closed, which may have left something to read."""
        poll = select.poll()
        poll.register(self.link, select.POLLRDHUP)
        return bool(poll.poll(0))

    def carry(self, names: Iterable[str]) -> None:
        tensors = [self.values[name].detach() for name in names]
        parts = [t.view(-1).view(torch.uint8) for t in tensors if t.numel()]
        if parts[0].is_cuda:
            return self._by_nccl(parts)
        go = self.link.recv_bytes_into if self.index is None else self.link.send_bytes
        for part in parts:
            go(part.numpy().data)

    def _by_nccl(self, parts: Sequence[torch.Tensor]) -> None:
        device = parts[0].device
        rank = int(self.index is None)
        torch.cuda.set_device(device)  # the current device is each thread's own
        if self._group is None:
            options = dist.ProcessGroupNCCL.Options()
            self._group = dist.ProcessGroupNCCL(self._store, rank, 2, options)
        if self.index is None:  # what still reads the old values
            torch.cuda.synchronize(device)
        go = self._group.recv if self.index is None else self._group.send
        with torch.cuda.stream(torch.cuda.Stream(device)):  # else training would wait as well
            works = [go([part], 1 - rank, 0) for part in parts]
        while not all(work.is_completed() for work in works):
            time.sleep(0.001)
            if self.is_gone():  # which NCCL does not notice
                self._group.abort()
                raise EOFError


# ---- the main learner ----------------------------------------------------------------------------


class Fleet(Collector):
    """A collector whose trajectories run in generators' processes, and go on between its calls.

    Only the main learner's has any. A thread for each generator answers it, all under one lock.
    """

    def __init__(self, *args: Any, world: World, config: Config, **sizes: Any) -> None:
        """The generator that is given has the weights to send, and generates nothing."""
        super().__init__(*args, **sizes)
        self._device = world.device
        self._limit = config.launch.join_timeout
        self._expects = self.settings.generators if world.is_main else 0
        """Generators to wait for at first."""
        self._changed = threading.Condition()
        self._new: list[Trajectory] = []
        """What no thread knows of, since a group may lack some yet."""
        self._peers: list[_Wire] = []
        self._version: int | None = None
        """The weights to generate with; None: they are being written."""
        self._counts: dict[str, float] = {"generators_lost": 0, "trajectories_restarted": 0}
        self._in_vain = 0
        self._sums: Any = Counter()  # generators' figures
        self._since = time.perf_counter()
        if world.is_main:
            key = secrets.token_bytes(32)
            place, store = launched_place(), world.store
            assert place is not None
            assert store is not None  # where there are generators
            host = place.address.rpartition(":")[0]
            listens_at = host if host in ("127.0.0.1", "localhost") else ""
            door = connection.Listener((listens_at, 0), backlog=64)
            store.set(_KEY, f"{host} {door.address[1]} {key.hex()}")
            threading.Thread(target=self._welcome, args=(door, store, key), daemon=True).start()

    def resume(self, trajectory: Trajectory) -> None:
        self._new.append(trajectory)

    def finish(self, groups: Iterable[int]) -> list[list[Trajectory]]:
        groups = list(groups)
        with self._changed:
            for trajectory in self._new:
                self.groups.setdefault(trajectory.group, []).append(trajectory)
            self._new.clear()
            self._hand_out()
            self._await(lambda: {*groups} <= _over(self.groups))
            found = [self.groups.pop(group) for group in groups]
        self.generated += sum(t.num_written for group in found for t in group)
        self.seconds["generate"] = time.perf_counter() - self._since
        return found

    def under_way(self) -> list[Trajectory]:
        self.finish(())
        with self._changed:
            for peer in self._peers:
                peer.reports = True
            self._changed.notify_all()
            self._await(lambda: not any(peer.reports for peer in self._peers))
            return [t for group in self.groups.values() for t in group]

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Wait until the last weights have left, and send those that are written inside."""
        with self._changed:
            self._await(lambda: len(self._peers) >= self._expects)
            self._await(lambda: all(peer.version == self._version for peer in self._peers))
            self._version = None
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        with self._changed:
            self._version = version
            self._hand_out()

    def figures(self) -> dict[str, float]:
        """Return counts, and means over generators of what they did since the last call."""
        number = self.settings.generators
        with self._changed:
            sums, self._sums, self._since = self._sums, Counter(), time.perf_counter()
        sums["generator/places"] *= number / max(1, sums["generator/steps"])
        return self._counts | {name: value / number for name, value in sums.items()}

    def _await(self, condition: Callable[[], bool]) -> None:
        """Wait, with the lock released, until ``condition``; RunFailed: no generator comes."""
        while not condition():
            if self._in_vain >= _IN_VAIN:
                problem = f"{_IN_VAIN} generators in a row died, and nothing was over between"
                raise RunFailed(problem)
            if not self._changed.wait_for(lambda: self._peers, self._limit):
                problem = f"no generator came within {self._limit:g} s (launch.join_timeout)"
                raise RunFailed(f"{problem}; {self._counts['generators_lost']} died")
            self._changed.wait(1.0)

    def _hand_out(self) -> None:
        """Give groups that nobody has to the generators that have least, and wake all threads.

        Where generation runs ahead, nobody gets more than it soon begins. Else all are given at
        once, in one order, so that reruns are the same.
        """
        self._changed.notify_all()
        if self._version is None or not self._peers:
            return
        rl = self.settings
        given = _over(self.groups).union(*(peer.groups for peer in self._peers))
        most = rl.group_size + (1 + _SPARE) * rl.max_sequences if rl.max_staleness else math.inf
        # Numbers of an evaluation, which is waited for, are below 0.
        for group in sorted(self.groups.keys() - given, key=lambda n: (n >= 0, abs(n))):
            peer = min(self._peers, key=lambda peer: (peer.running, peer.index))
            if peer.running >= most:
                break
            peer.groups[group] = number = len(self.groups[group])
            peer.begun += self.groups[group]
            peer.running += number

    # ---- threads ---------------------------------------------------------------------------------

    def _welcome(self, door: connection.Listener, *how: Any) -> None:
        while True:
            link = door.accept()
            threading.Thread(target=self._attend, args=(link, *how), daemon=True).start()

    def _attend(self, link: connection.Connection, store: dist.Store, key: bytes) -> None:
        peer = None
        try:
            with suppress(*_GONE):
                connection.deliver_challenge(link, key)
                connection.answer_challenge(link, key)
                index, token = link.recv()
                peer = _Wire(link, dist.PrefixStore(token, store), self.generator.model)
                with self._changed:
                    peer.index = index
                    self._peers.append(peer)
                    self._hand_out()
                while True:
                    answer = self._answer(peer, *link.recv())
                    link.send(answer)
                    if answer[0]:
                        link.recv()  # it is between two steps
                        peer.carry(answer[0])
                        with self._changed:
                            peer.version = answer[1]
                            self._changed.notify_all()
        finally:  # an error of this side as well: nobody waits for such a generator
            with self._changed:
                if peer in self._peers:
                    self._peers.remove(peer)
                    number = sum(peer.groups.values())
                    text = "generator %d is gone: %d trajectories begin again"
                    logger.warning(text, peer.index, number)
                    self._counts["trajectories_restarted"] += number
                    self._counts["generators_lost"] += 1
                    self._in_vain += 1
                    self._expects = 0
                    self._hand_out()

    def _answer(
        self, peer: _Wire, groups: list[Any], are_all: bool, running: int, figures: Any
    ) -> tuple[Any, ...]:
        with self._changed:
            peer.running = running + len(peer.begun)
            self._sums.update(figures)
            self.groups |= {group[0].group: group for group in groups}
            for number in peer.groups.keys() & _over(self.groups):
                del peer.groups[number]
                self._in_vain = 0
            peer.reports = peer.reports and not are_all
            self._hand_out()
            while True:
                begun: list[Trajectory] = []
                names: list[str] = []
                if self._version is not None:  # nothing begins with weights from before
                    begun, peer.begun = peer.begun, begun
                    has = () if peer.version is None else self.generator.borrowed
                    if peer.version != self._version:
                        names = [name for name in peer.values if name not in has]
                if running or begun or names or peer.reports or peer.is_gone():
                    return names, self._version, self.stop_ids, begun, peer.reports
                self._changed.wait(1.0)


# ---- generators ----------------------------------------------------------------------------------


def generate_if_apart(config: Config) -> None:
    """Return where this process is to train; else generate until the main learner's process ends.

    Raises SystemExit: it has ended, or this rank's generators die before they serve; or whatever
    building one raises.
    """
    place = launched_place()
    if place is None or not 0 < place.world_size - config.rl.apart <= place.rank:
        return
    for thread in threading.enumerate():  # a fork takes none along, and locks as they are
        if type(thread) is threading.Thread:
            thread.join(_STEP_SECONDS)
    find_ranks(place, config.launch.join_timeout)  # a generator may die before it does
    stillborn = 0
    while stillborn < _STILLBORN:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            _Serving(config, place, writing).run()
            os._exit(0)
        os.close(writing)
        stillborn += 1
        beats = b"."
        while beats and select.select([reading], [], [], _SILENCE_SECONDS)[0]:
            beats = os.read(reading, 4096)
            if b"s" in beats:
                stillborn = 0
                _leave_stopping_to_learners()
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code in (0, 2):
            raise SystemExit(code)
    raise SystemExit(1)


def _leave_stopping_to_learners() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


class _Serving:
    """The process of a generator."""

    def __init__(self, config: Config, place: LaunchedPlace, pipe: int) -> None:
        self.config, self.place, self._pipe = config, place, pipe
        self._wire: _Wire | None = None
        self._stepped = math.inf
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while time.monotonic() - self._stepped < _STEP_SECONDS + self.config.rl.step_timeout:
            if self._wire is not None and self._wire.is_gone():  # whatever the other thread does
                os._exit(0)
            try:
                os.write(self._pipe, b"." if self._wire is None else b"s")
            except OSError:  # whoever supervises is gone
                os._exit(1)
            time.sleep(_BEAT_SECONDS)

    def run(self) -> None:
        """Build a generator and serve."""
        gc.enable()  # off while a command starts
        config, arch = resolve_run(self.config)
        device = claim_device(config, self.place.local_rank)
        setup = Setup(config, arch, device.type)
        model = blank(config, arch, compute_dtype(config, device)).to_empty(device=device)
        places = config.rl.max_sequences
        how: Any = {"num_pages": setup.num_pages, "max_sequences": places}
        how["max_tokens"] = max(2048, 32 * places)  # an update may have all of them read again
        generator = Generator(model, setup.tokenizer, **how)
        generator.scheduler.batch = max(1, int(_SPARE * places))
        parts = generator, setup.environment, config.rl
        collector = Collector(*parts, stop_ids=(), longest=config.data.seq_len)
        try:
            store = find_ranks(self.place, _SILENCE_SECONDS, again=True)
            host, port, key = store.get(_KEY).decode().split()
            link = connection.Client((host, int(port)), authkey=bytes.fromhex(key))
            token = secrets.token_hex(8)
            link.send((self.place.rank, token))
            _leave_stopping_to_learners()
            self._wire = _Wire(link, dist.PrefixStore(token, store), model)
            os.write(self._pipe, b"s")
            self._serve(self._wire, collector)
        except (*_GONE, RunFailed):  # a learner's error is its own to report
            if self._wire is not None and not self._wire.is_gone():
                raise

    def _serve(self, wire: _Wire, collector: Collector) -> None:
        generator, groups = collector.generator, []
        figures: Any = generator.scheduler.figures
        spoke, waits, are_all = 0.0, False, False
        while True:
            now = time.monotonic()
            running = sum(not t.is_over for group in collector.groups.values() for t in group)
            self._stepped = now if running else math.inf
            if not waits and (groups or are_all or not running or now - spoke > _PAUSE):
                wire.link.send((groups, are_all, running, figures))
                groups, spoke, waits = [], now, True
                figures.clear()
            if waits and (not running or wire.link.poll()):
                names, version, collector.stop_ids, begun, are_all = wire.link.recv()
                waits = False
                figures["seconds/generator_idle"] += (not running) * (time.monotonic() - now)
                if names:
                    wire.link.send(None)
                    wire.carry(names)
                    generator.weights_changed(keeps_cache=self.config.rl.keep_cache)
                    generator.version = version
                for trajectory in begun:
                    collector.resume(trajectory)
            if collector.groups:
                before, now = figures["generator/mixed_steps"], time.monotonic()
                collector.go_on()
                is_mixed = figures["generator/mixed_steps"] > before
                figures["seconds/generator_mixed"] += is_mixed * (time.monotonic() - now)
            groups += collector.finish(_over(collector.groups))
            if are_all:
                collector.under_way()
                groups += collector.groups.values()
