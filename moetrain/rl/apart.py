"""Ranks that only generate, beside those that train (``rl.placement`` apart).

    rank of a launcher   supervises a process: starts another where that dies or hangs
      its process        a :class:`Generator` and a Collector, connected to the main learner
    main learner         :class:`Fleet`, a Collector whose trajectories run in those processes

No collective has learners and generators in it: one would hang with a dead peer. Each generator has
two sockets to the main learner, one for commands and trajectories, one for weights. The kernel ends
both when the process dies, whatever it did. A group of trajectories that it had is begun again by
another, from where it was handed out; seeds go with a group's number, so it has the same tokens.

Weights go from the main learner's own copy, as it was at an update, straight into a generator's
parameters between two of its steps: over the socket on CPUs, by NCCL in a group of two on GPUs
(:class:`_Wire`; copy engines would take its place). Learners train meanwhile.

Left out on purpose: experts of one generator on several ranks; generators that send weights on.
"""

import gc
import os
import secrets
import select
import signal
import sys
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
from moetrain.train.setup import as_generating, resolve_run

_BEAT_SECONDS = 1.0
"""Seconds between a generator's signs of life, which a thread of it gives."""
_SILENCE_SECONDS = 8.0
"""Seconds without one after which a generator hangs: it is stopped, or a call keeps Python."""
_STEP_SECONDS = 600.0
"""The longest time between two looks at its commands: a device hangs, or an environment."""
_STILLBORN = 3
"""Generators in a row that died before they served, to end the run."""
_KEY = "generators"
"""The key in the run's store of the address and the secret to connect with."""
_GONE = (OSError, EOFError, AuthenticationError, dist.DistError)
"""What the death of the other side of a socket raises."""


class _Wire:
    """Carries tensors from a learner to one generator, in place; raises ``_GONE``."""

    def __init__(self, link: Connection, device: torch.device, store: dist.Store, token: str):
        self.link, self._device, self._group = link, device, None
        self._where = dist.PrefixStore(token, store)

    def carry(self, tensors: Sequence[torch.Tensor], *, sends: bool) -> None:
        """Send all tensors, or receive into them. Both sides call it with the same shapes."""
        parts = [t.detach().view(-1).view(torch.uint8) for t in tensors if t.numel()]
        if self._device.type == "cuda":
            return self._by_nccl(parts, sends)
        for part in parts:
            memory = memoryview(part.numpy())
            self.link.send_bytes(memory) if sends else self.link.recv_bytes_into(memory)

    def _by_nccl(self, parts: Sequence[torch.Tensor], sends: bool) -> None:
        if self._group is None:
            options = dist.ProcessGroupNCCL.Options()
            self._group = dist.ProcessGroupNCCL(self._where, int(not sends), 2, options)
        torch.cuda.set_device(self._device)  # the current device is each thread's own
        if not sends:  # what still reads the old values
            torch.cuda.synchronize(self._device)
        # A stream of its own, else training would wait for the generator.
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            go = self._group.send if sends else self._group.recv
            works = [go([part], int(sends), 0) for part in parts]
        while not all(work.is_completed() for work in works):
            if self.link.poll(0.001):  # nothing is sent on it now: the other side is gone
                self._group.abort()
                raise EOFError


# ---- the main learner's side ---------------------------------------------------------------------


class _Peer:
    """One generator, as the main learner knows it."""

    def __init__(self, index: int, link: Connection, wire: _Wire) -> None:
        self.index, self.link, self.wire = index, link, wire
        self.groups: set[int] = set()
        self.has: set[str] = set()
        """Frozen parameters that it was sent, which stay."""
        self.sent = threading.Event()
        self.kept: list[Trajectory] | None = None
        self.idle = 0.0
        self.unsaid: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        """Commands for a thread to send, so that nobody else waits for a peer."""

    def tell(self, *message: Any) -> None:
        self.unsaid.put(message)


class Fleet(Collector):
    """A collector whose trajectories run in the processes of generators, and go on meanwhile.

    Only the main learner's has any. What happens is handled by threads, under one lock.
    """

    def __init__(self, *args: Any, world: World, config: Config, **sizes: Any) -> None:
        """The generator given holds the weights to be sent, and generates nothing itself."""
        super().__init__(*args, **sizes)
        self.lost = self.restarted = 0
        """Generators that died, and trajectories that were begun again for it."""
        self._world, self._config = world, config
        self._changed = threading.Condition()
        self._peers: list[_Peer] = []
        self._fresh: list[int] = []
        """Groups for :meth:`finish` to hand out, ..."""
        self._waiting: list[int] = []
        """... and those that no generator has now."""
        self._done: set[int] = set()
        self._version: int | None = None
        """The weights to generate with; None: they are being written."""
        self._has_met = self._ended = False
        model = self.generator.model
        self._values = dict((*model.named_parameters(), *model.named_buffers()))
        if not world.is_main:
            return
        place, key = launched_place(), secrets.token_bytes(32)
        assert place is not None and world.store is not None  # join_world has seen to it
        host = place.address.rpartition(":")[0]
        is_near = host in ("127.0.0.1", "localhost")
        self._door = Listener(("127.0.0.1" if is_near else "", 0), backlog=64, authkey=key)
        world.store.set(_KEY, f"{host} {self._door.address[1]} {key.hex()}")
        threading.Thread(target=self._welcome, daemon=True).start()
        world.endings.append(self.end)

    def end(self) -> None:
        """Let the generators end."""
        with self._changed:
            self._ended = True
            for peer in self._peers:
                peer.tell("end")
        self._door.close()

    def resume(self, trajectory: Trajectory) -> None:
        group = self.groups.setdefault(trajectory.group, [])
        group.append(trajectory)
        if len(group) == 1:
            self._fresh.append(trajectory.group)

    def finish(self, groups: Iterable[int]) -> list[list[Trajectory]]:
        wanted = set(groups := list(groups))
        with self._changed:
            if self._fresh and not self._has_met:  # else the first to come had all
                self._await(lambda: len(self._peers) >= self.settings.generators)
                self._has_met = True
            self._waiting += self._fresh
            self._fresh.clear()
            self._hand_out()
            self._await(lambda: wanted <= self._done)
            self._done -= wanted
            found = [self.groups.pop(group) for group in groups]
        self.generated += sum(t.num_written for group in found for t in group)
        return found

    def under_way(self) -> list[Trajectory]:
        with self._changed:
            asked = [*self._peers]
            for peer in asked:
                peer.kept = None
                peer.tell("keep")
            self._await(lambda: all(p.kept is not None for p in asked if p in self._peers))
            kept = {(t.group, t.member): t for peer in asked for t in peer.kept or ()}
            ours = [t for group in self.groups.values() for t in group]
        return [kept.get((t.group, t.member), t) for t in ours]

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Wait until the last weights have left; send those that are written inside."""
        with self._changed:
            self._version, peers = None, [*self._peers]
        for peer in peers:
            peer.sent.wait()
        yield
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        with self._changed:
            self._version = version
            for peer in self._peers:
                self._announce(peer)
            self._hand_out()

    def figures(self) -> dict[str, float]:
        """Return counts, and the generators' mean seconds without work since the last call."""
        with self._changed:
            idle = sum(peer.idle for peer in self._peers)
            for peer in self._peers:
                peer.idle = 0.0
        return {
            "generators_lost": self.lost,
            "trajectories_restarted": self.restarted,
            "seconds/generator_idle": idle / self.settings.generators,
        }

    def _await(self, condition: Callable[[], bool]) -> None:
        """Wait, with the lock released, until ``condition``; RunFailed: no generator comes."""
        since, limit = time.monotonic(), self._config.launch.join_timeout
        while not condition():
            self._changed.wait(1.0)
            if self._peers:
                since = time.monotonic()
            elif time.monotonic() - since > limit:
                problem = f"no generator came within {limit:g} s (launch.join_timeout)"
                raise RunFailed(f"{problem}; {self.lost} died")

    def _announce(self, peer: _Peer) -> None:
        peer.sent.clear()
        names = [name for name in self._values if name not in peer.has]
        peer.has |= self.generator.borrowed
        peer.tell("weights", self._version, names)

    def _hand_out(self) -> None:
        """Give waiting groups to generators: by number, so that reruns are the same, or, where
        generation runs ahead, to whoever has least, and to none more than it can begin soon."""
        if self._version is None or not self._peers:
            return
        settings, given = self.settings, {peer: list[int]() for peer in self._peers}
        most = 1 + -(-settings.max_sequences // settings.group_size)
        while self._waiting:
            if settings.max_staleness:
                peer = min(self._peers, key=lambda peer: len(peer.groups))
                if len(peer.groups) >= most:
                    break
            else:
                peer = self._peers[self._waiting[0] % len(self._peers)]
            group = self._waiting.pop(0)
            peer.groups.add(group)
            given[peer].append(group)
        for peer, groups in given.items():
            if groups:
                peer.tell("start", [t for group in groups for t in self.groups[group]])

    # ---- threads ---------------------------------------------------------------------------------

    def _welcome(self) -> None:
        """Take in generators that connect, with their two sockets."""
        halves: dict[str, Connection] = {}
        while not self._ended:
            try:
                link = self._door.accept()
                token, index = link.recv()
            except _GONE:
                continue
            if token not in halves:
                halves[token] = link
                continue
            assert self._world.store is not None  # the main learner's
            wire = _Wire(link, self._world.device, self._world.store, token)
            peer = _Peer(index, halves.pop(token), wire)
            with self._changed:
                peer.tell("begin", self.stop_ids)
                peer.sent.set()
                if self._version is not None:
                    self._announce(peer)
                self._peers = sorted([*self._peers, peer], key=lambda peer: peer.index)
                if self._has_met:
                    self._hand_out()
                self._changed.notify_all()
            for target in (self._listen, self._feed, self._speak):
                threading.Thread(target=target, args=(peer,), daemon=True).start()

    def _listen(self, peer: _Peer) -> None:
        with suppress(*_GONE):
            while True:
                what, found, idle = peer.link.recv()
                with self._changed:
                    peer.idle += idle
                    if what == "keep":
                        peer.kept = found
                    else:
                        for trajectories in found:
                            group = trajectories[0].group
                            peer.groups.discard(group)
                            self.groups[group] = trajectories
                            self._done.add(group)
                        self._hand_out()
                    self._changed.notify_all()
        self._lose(peer)

    def _speak(self, peer: _Peer) -> None:
        with suppress(*_GONE):  # which :meth:`_listen` meets too
            while True:
                peer.link.send(peer.unsaid.get())

    def _feed(self, peer: _Peer) -> None:
        with suppress(*_GONE):
            while True:
                names = peer.wire.link.recv()  # it is ready, between two steps
                peer.wire.carry([self._values[name] for name in names], sends=True)
                peer.sent.set()
        self._lose(peer)

    def _lose(self, peer: _Peer) -> None:
        with self._changed:
            peer.sent.set()
            if peer not in self._peers or self._ended:
                return
            self._peers.remove(peer)
            groups = sorted(peer.groups)
            number = sum(len(self.groups[group]) for group in groups)
            self.lost, self.restarted = self.lost + 1, self.restarted + number
            logger.warning("generator %d is gone; %d trajectories begin again", peer.index, number)
            self._waiting = groups + self._waiting
            self._hand_out()
            self._changed.notify_all()


# ---- a generator's side --------------------------------------------------------------------------


def generate_if_apart(config: Config) -> None:
    """Return where this process is to train; else generate as long as the run goes on.

    Raises:
        SystemExit: the run is over, or this rank's generators die before they serve.
        ConfigError: as :class:`~moetrain.rl.setup.Setup`.
    """
    place = launched_place()
    if place is None or not 0 < place.world_size - config.rl.apart <= place.rank:
        return
    for thread in threading.enumerate():  # a fork takes none along, and locks as they are
        if type(thread) is threading.Thread:
            thread.join(_STEP_SECONDS)
    stillborn, number = 0, 0
    while stillborn < _STILLBORN:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            _Serving(config, place, writing, number).run()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.close(writing)
        has_served = False
        while select.select([reading], [], [], _SILENCE_SECONDS)[0]:
            if not (beats := os.read(reading, 4096)):
                break
            if b"s" in beats:
                has_served = True
                for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                    signal.signal(one, signal.SIG_IGN)  # learners say when it is over
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code in (0, 2):
            raise SystemExit(code)
        number, stillborn = number + 1, 0 if has_served else stillborn + 1
    raise SystemExit(1)


class _Serving:
    """The process of a generator."""

    def __init__(self, config: Config, place: LaunchedPlace, pipe: int, number: int) -> None:
        self.config, self.place, self._pipe, self._number = config, place, pipe, number
        self._looked, self._sign = float("inf"), b"."
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while time.monotonic() - self._looked < _STEP_SECONDS:
            try:
                os.write(self._pipe, self._sign)
            except OSError:  # whoever supervises is gone
                os._exit(1)
            time.sleep(_BEAT_SECONDS)

    def run(self) -> None:
        """Build a generator, connect it, and serve until the main learner ends."""
        gc.enable()  # off while a command starts
        place, wait = self.place, self.config.launch.join_timeout
        index = place.rank - (place.world_size - self.config.rl.apart)
        config, arch = resolve_run(self.config)
        store = find_ranks(place, wait, again=self._number > 0)
        device = claim_device(config, place.local_rank)
        config = as_generating(config, arch, device)
        setup = Setup(config, arch, device.type)
        model = blank(config, arch, device)
        sizes = {"num_pages": setup.num_pages, "max_sequences": config.rl.max_sequences}
        generator = Generator(model, setup.tokenizer, **sizes)
        self._values = dict((*model.named_parameters(), *model.named_buffers()))
        with suppress(*_GONE):  # a learner's error is its own to report
            host, port, key = store.get(_KEY).decode().split()
            token = f"generator/{index}/{secrets.token_hex(8)}"
            links = []
            for _ in range(2):
                links.append(Client((host, int(port)), authkey=bytes.fromhex(key)))
                links[-1].send((token, index))
            self.link, self._wire = links[0], _Wire(links[1], device, store, token)
            _, stop_ids = self.link.recv()
            ends = {"stop_ids": stop_ids, "longest": config.data.seq_len}
            self.collector = Collector(generator, setup.environment, config.rl, **ends)
            for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(one, signal.SIG_IGN)
            self._sign = b"s"
            os.write(self._pipe, self._sign)
            self._serve()

    def _serve(self) -> None:
        collector, idle = self.collector, 0.0
        while True:
            self._looked, started = time.monotonic(), time.monotonic()
            if not collector.groups:
                self._looked = float("inf")
                self.link.poll(None)
                idle += time.monotonic() - started
            while self.link.poll():
                what, *given = self.link.recv()
                if what == "end":
                    return
                self._obey(what, *given)
            if not collector.groups:
                continue
            collector.go_on()
            if numbers := collector.over():
                self.link.send(("over", collector.finish(numbers), idle))
                idle = 0.0

    def _obey(self, what: str, *given: Any) -> None:
        collector, generator = self.collector, self.collector.generator
        if what == "weights":
            version, names = given
            self._wire.link.send(names)
            self._wire.carry([self._values[name] for name in names], sends=False)
            generator.weights_changed()
            generator.version = version
        elif what == "keep":
            self.link.send(("keep", collector.under_way(), 0.0))
        else:
            for trajectory in given[0]:
                collector.resume(trajectory)
            collector.finish(())  # which hears the environments
