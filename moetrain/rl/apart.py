"""Ranks that only generate, beside those that train (``rl.placement`` apart).

    rank of a launcher   supervises a process: starts another where that dies or hangs
      its process        a :class:`Generator` and a Collector, on a socket to the main learner
    main learner         :class:`Fleet`, a Collector whose trajectories run in those processes

No collective has learners and generators in it: one would hang with a dead peer. A socket ends with
the process, whatever ended that, and no thread but its own waits for a peer. Groups that a dead
generator had begin again in another; seeds go with a group's number, so they get the same tokens.

Weights go from the main learner's copy, as they were at an update, straight into a generator's
parameters between two of its steps, while learners train: on CPUs over the socket, on GPUs by NCCL
in a group of two (:class:`_Wire`; copy engines would take its place). Left out on purpose: a
generator on several ranks; generators that send weights on.
"""

import gc
import os
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from moetrain.config import Config, logger
from moetrain.config.environment import LaunchedPlace, launched_place
from moetrain.config.sources import RunFailed
from moetrain.parallel.processes import find_ranks
from moetrain.parallel.world import World, claim_device
from moetrain.rl.collect import Collector
from moetrain.rl.rows import Trajectory
from moetrain.rl.setup import Setup
from moetrain.rollout.engine import Generator
from moetrain.rollout.weights import blank
from moetrain.train.setup import resolve_run

_BEAT_SECONDS = 1.0
"""Seconds between a generator's signs of life, which a thread of it gives."""
_SILENCE_SECONDS = 8.0
"""Seconds without one after which it hangs: it is stopped, or a call keeps the interpreter."""
_STEP_SECONDS = 600.0
"""The most between two looks at its commands; then a device hangs, or an environment."""
_STILLBORN = 3
"""Generators of a rank in a row that died before they served, to end the run."""
_IN_VAIN = 10
"""Generators in a row that died before any group was over, to end the run: one kills them."""
_KEY = "generators"
"""The main learner's address and secret in the run's store."""
_GONE = (OSError, EOFError, AuthenticationError, dist.DistError)
"""What the death of a peer raises."""


class _Wire:
    """Carries tensors from a learner into a generator's, of the same shapes; raises ``_GONE``."""

    def __init__(self, link: Connection, store: dist.Store, *, sends: bool) -> None:
        self.link, self.sends, self._store = link, sends, store
        self._group: Any = None

    def carry(self, tensors: Sequence[torch.Tensor], is_gone: Callable[[], bool]) -> None:
        """``is_gone`` is asked while NCCL is at work, which notices no death itself."""
        parts = [t.detach().view(-1).view(torch.uint8) for t in tensors if t.numel()]
        if parts[0].is_cuda:
            return self._by_nccl(parts, is_gone)
        for part in parts:
            memory = part.numpy().data
            self.link.send_bytes(memory) if self.sends else self.link.recv_bytes_into(memory)

    def _by_nccl(self, parts: Sequence[torch.Tensor], is_gone: Callable[[], bool]) -> None:
        device, rank = parts[0].device, int(not self.sends)
        torch.cuda.set_device(device)  # the current device is each thread's own
        if self._group is None:
            options = dist.ProcessGroupNCCL.Options()
            self._group = dist.ProcessGroupNCCL(self._store, rank, 2, options)
        if not self.sends:  # what still reads the old values
            torch.cuda.synchronize(device)
        go = self._group.send if self.sends else self._group.recv
        with torch.cuda.stream(torch.cuda.Stream(device)):  # else training would wait as well
            works = [go([part], 1 - rank, 0) for part in parts]
        while not all(work.is_completed() for work in works):
            time.sleep(0.001)
            if is_gone():
                self._group.abort()
                raise EOFError


# ---- the main learner ----------------------------------------------------------------------------


class _Peer:
    """One generator, as the main learner knows it."""

    def __init__(self, index: int, link: Connection, wire: _Wire) -> None:
        self.index, self.link, self.wire = index, link, wire
        self.groups: set[int] = set()
        self.has: set[str] = set()
        """Frozen parameters that it was sent."""
        self.unsaid: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self.ready, self.sent = threading.Event(), threading.Event()
        """Whether it waits for weights; whether it has those that it was told of."""
        self.sent.set()
        self.kept: list[Trajectory] | None = None

    def tell(self, *message: Any) -> None:
        self.unsaid.put(message)


class Fleet(Collector):
    """A collector whose trajectories run in generators' processes, and go on between its calls.

    Only the main learner's has any. Threads follow its peers, all under one lock.
    """

    def __init__(self, *args: Any, world: World, config: Config, **sizes: Any) -> None:
        """The generator that is given has the weights to send, and generates nothing."""
        super().__init__(*args, **sizes)
        self._device, self._limit = world.device, config.launch.join_timeout
        self._changed = threading.Condition()
        self._peers: list[_Peer] = []
        self._waiting: list[int] = []
        """Groups that no generator has now."""
        self._done: set[int] = set()
        self._version: int | None = None
        """The weights to generate with; None: they are being written."""
        self._expects = self.settings.generators if world.is_main else 0
        self._lost = self._restarted = self._in_vain = 0
        self._idle, self._since = 0.0, time.perf_counter()
        model = self.generator.model
        self._values = dict((*model.named_parameters(), *model.named_buffers()))
        if world.is_main:
            place, key = launched_place(), secrets.token_bytes(32)
            assert place is not None
            assert world.store is not None
            host = place.address.rpartition(":")[0]
            listens_at = host if host in ("127.0.0.1", "localhost") else ""
            door = Listener((listens_at, 0), backlog=64, authkey=key)
            world.store.set(_KEY, f"{host} {door.address[1]} {key.hex()}")
            self._start(self._welcome, door, world.store)

    def resume(self, trajectory: Trajectory) -> None:
        group = self.groups.setdefault(trajectory.group, [])
        self._waiting += [trajectory.group] * (not group)
        group.append(trajectory)

    def finish(self, groups: Iterable[int]) -> list[list[Trajectory]]:
        wanted = set(groups := list(groups))
        with self._changed:
            self._hand_out()
            self._await(lambda: wanted <= self._done)
            self._done -= wanted
            found = [self.groups.pop(group) for group in groups]
        self.generated += sum(t.num_written for group in found for t in group)
        self.seconds["generate"] = time.perf_counter() - self._since
        return found

    def under_way(self) -> list[Trajectory]:
        with self._changed:
            asked = [*self._peers]
            for peer in asked:
                peer.kept = None
                peer.tell("keep")
            self._await(lambda: all(p.kept is not None for p in asked if p in self._peers))
            kept = {(t.group, t.member): t for peer in asked for t in peer.kept or ()}
            known = [t for group in self.groups.values() for t in group]
        return [kept.get((t.group, t.member), t) for t in known]

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Wait until the last weights have left, and send those that are written inside."""
        with self._changed:
            self._await(lambda: len(self._peers) >= self._expects or self._lost > 0)
            self._version, peers = None, [*self._peers]
        for peer in peers:
            peer.sent.wait()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        with self._changed:
            self._version = version
            for peer in self._peers:
                self._announce(peer)

    def figures(self) -> dict[str, float]:
        """Return counts, and seconds without work since the last call, the mean of generators."""
        with self._changed:
            idle, self._idle, self._since = self._idle, 0.0, time.perf_counter()
        return {
            "generators_lost": self._lost,
            "trajectories_restarted": self._restarted,
            "seconds/generator_idle": idle / self.settings.generators,
        }

    def _await(self, condition: Callable[[], bool]) -> None:
        """Wait, with the lock released, until ``condition``; RunFailed: no generator comes."""
        since = time.monotonic()
        while not condition():
            self._changed.wait(1.0)
            since = time.monotonic() if self._peers else since
            if self._in_vain >= _IN_VAIN:
                raise RunFailed(
                    f"{_IN_VAIN} generators in a row died, and nothing was over between"
                )
            if time.monotonic() - since > self._limit:
                problem = f"no generator came within {self._limit:g} s (launch.join_timeout)"
                raise RunFailed(f"{problem}; {self._lost} died")

    def _announce(self, peer: _Peer) -> None:
        names = [name for name in self._values if name not in peer.has]
        peer.has |= self.generator.borrowed
        peer.sent.clear()
        peer.tell("weights", self._version, names)

    def _hand_out(self) -> None:
        """Give waiting groups to generators.

        That is by number, so that reruns are the same, or, where generation runs ahead, to whoever
        has least, and to nobody more than it soon begins.
        """
        ahead, size = self.settings.max_staleness, self.settings.group_size
        most = 1 + -(-self.settings.max_sequences // size)
        given: dict[_Peer, list[int]] = {}
        self._waiting.sort(key=lambda group: group >= 0)  # an evaluation is waited for now
        while self._waiting and self._peers and self._version is not None:
            peer = self._peers[self._waiting[0] % len(self._peers)]
            if ahead:
                peer = min(self._peers, key=lambda peer: len(peer.groups))
                if len(peer.groups) >= most:
                    break
            peer.groups.add(self._waiting[0])
            given.setdefault(peer, []).append(self._waiting.pop(0))
        for peer, groups in given.items():
            peer.tell("start", self.stop_ids, [t for group in groups for t in self.groups[group]])

    # ---- threads ---------------------------------------------------------------------------------

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()

    def _welcome(self, door: Listener, store: dist.Store) -> None:
        while True:
            try:
                link = door.accept()
                index, token = link.recv()
            except _GONE:
                continue
            wire = _Wire(link, dist.PrefixStore(token, store), sends=True)
            peer = _Peer(index, link, wire)
            with self._changed:
                self._peers = sorted([*self._peers, peer], key=lambda peer: peer.index)
                if self._version is not None:
                    self._announce(peer)
                    self._hand_out()
                self._changed.notify_all()
            self._start(self._read, peer)
            self._start(self._write, peer)

    def _write(self, peer: _Peer) -> None:
        with suppress(*_GONE):  # which _read meets too
            while True:
                what, *given = peer.unsaid.get()
                peer.link.send((what, *given))
                if what == "weights":
                    peer.ready.wait()  # it is between two steps
                    peer.ready.clear()
                    values = [self._values[name] for name in given[1]]
                    peer.wire.carry(values, lambda: peer not in self._peers)
                    peer.sent.set()

    def _read(self, peer: _Peer) -> None:
        with suppress(*_GONE):
            while True:
                what, found, idle = peer.link.recv()
                with self._changed:
                    self._idle += idle
                    if what == "ready":
                        peer.ready.set()
                    elif what == "keep":
                        peer.kept = found
                    for group in found if what == "over" else ():
                        peer.groups.discard(group[0].group)
                        self.groups[group[0].group] = group
                        self._done.add(group[0].group)
                        self._in_vain = 0
                    self._hand_out()
                    self._changed.notify_all()
        with self._changed:
            self._peers.remove(peer)
            peer.sent.set()
            peer.ready.set()
            number = sum(len(self.groups[group]) for group in peer.groups)
            self._lost, self._restarted = self._lost + 1, self._restarted + number
            self._in_vain += 1
            logger.warning("generator %d is gone: %d trajectories begin again", peer.index, number)
            self._waiting = sorted(peer.groups) + self._waiting
            self._hand_out()
            self._changed.notify_all()


# ---- generators ----------------------------------------------------------------------------------

_STOPS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


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
    stillborn = number = 0
    while stillborn < _STILLBORN:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            _Serving(config, place, writing).run(again=number > 0)
            os._exit(0)
        os.close(writing)
        number, stillborn, beats = number + 1, stillborn + 1, b"."
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
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)


class _Serving:
    """The process of a generator."""

    def __init__(self, config: Config, place: LaunchedPlace, pipe: int) -> None:
        self.config, self.place, self._pipe, self._sign = config, place, pipe, b"."
        self._looked = float("inf")
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while time.monotonic() - self._looked < _STEP_SECONDS:
            try:
                os.write(self._pipe, self._sign)
            except OSError:  # whoever supervises is gone
                os._exit(1)
            time.sleep(_BEAT_SECONDS)

    def run(self, *, again: bool) -> None:
        """Build a generator and serve; ``again``: in the place of another."""
        gc.enable()  # off while a command starts
        config, arch = resolve_run(self.config)
        store = find_ranks(self.place, config.launch.join_timeout, again=again)
        device = claim_device(config, self.place.local_rank)
        setup = Setup(config, arch, device.type)
        model = blank(config, arch, device)
        most, longest = config.rl.max_sequences, config.data.seq_len
        generator = Generator(model, setup.tokenizer, num_pages=setup.num_pages, max_sequences=most)
        parts = generator, setup.environment, config.rl
        self.collector = Collector(*parts, stop_ids=(), longest=longest)
        self._values = dict((*model.named_parameters(), *model.named_buffers()))
        with suppress(*_GONE):  # a learner's error is its own to report
            host, port, key = store.get(_KEY).decode().split()
            self.link = Client((host, int(port)), authkey=bytes.fromhex(key))
            token = secrets.token_hex(8)
            self.link.send((self.place.rank, token))
            self._wire = _Wire(self.link, dist.PrefixStore(token, store), sends=False)
            _leave_stopping_to_learners()
            self._sign = b"s"
            os.write(self._pipe, self._sign)
            self._serve()

    def _serve(self) -> None:
        collector, idle = self.collector, 0.0
        while True:
            started = time.monotonic()
            self._looked = started if collector.groups else float("inf")
            if not collector.groups:
                self.link.poll(None)
                idle += time.monotonic() - started
            while self.link.poll():
                self._obey(*self.link.recv())
            if collector.groups:
                collector.go_on()
            if numbers := collector.over():
                self.link.send(("over", collector.finish(numbers), idle))
                idle = 0.0

    def _obey(self, what: str, *given: Any) -> None:
        collector, generator = self.collector, self.collector.generator
        if what == "weights":
            version, names = given
            self.link.send(("ready", None, 0.0))
            self._wire.carry([self._values[name] for name in names], self.link.poll)
            generator.weights_changed()
            generator.version = version
        elif what == "keep":
            self.link.send(("keep", collector.under_way(), 0.0))
        else:
            collector.stop_ids, trajectories = given
            for trajectory in trajectories:
                collector.resume(trajectory)
            collector.finish(())  # which hears the environments
