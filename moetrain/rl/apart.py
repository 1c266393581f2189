"""Ranks that only generate, beside those that train (``rl.placement`` apart).

    rank of a launcher   supervises a process, and starts another if it dies or hangs
      its process        a :class:`Generator` and a Collector, with a socket to the main learner
    main learner         :class:`Fleet`, a Collector whose trajectories run in those processes

No collective includes both learners and generators, because it would hang if one of them died. They
talk through a socket, which closes when a process ends, for whatever reason. The generator sends a
:class:`Report`, the learner answers it with :class:`Orders`, and so on. The learner answers a busy
generator at once, and the generator takes steps meanwhile. If a generator dies, its groups begin
again in another. Their seeds follow from the groups' numbers, so with the same weights they get the
same tokens.

The main learner has a copy of the weights as they were after an update. They are written directly
into a generator's parameters, between two of its steps, while learners train. On CPUs they are sent
over the socket, and on GPUs by NCCL in a group of two. A transport by copy engines would belong in
:class:`Wire` too. Left out on purpose: a generator on several ranks, and generators that pass
weights on to others.
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moetrain.config import Config, logger
from moetrain.config.environment import LaunchedPlace, launched_place
from moetrain.config.rl import RlSection
from moetrain.config.sources import RunFailed
from moetrain.generate.engine import Generator
from moetrain.generate.weights import blank
from moetrain.models.transformer import Transformer, compute_dtype
from moetrain.parallel.processes import find_ranks
from moetrain.parallel.world import World, claim_device
from moetrain.rl.collect import Collector
from moetrain.rl.envs import Environment
from moetrain.rl.setup import Setup
from moetrain.rl.trajectories import Trajectory
from moetrain.train.session import resolve_run

_BEAT_SECONDS = 1.0
"""Seconds between two heartbeats that a generator's thread sends."""
SILENCE_SECONDS = 8.0
"""Seconds without a heartbeat after which a generator counts as hanging: its process is stopped, or
a call holds the interpreter."""
_STEP_SECONDS = 600.0
"""The most seconds that a step of a generator may take, besides ``rl.step_timeout``. After that it
counts as hanging."""
_PAUSE = 0.01
"""Seconds after which a busy generator reports again, with news or without."""
_SPARE = 1 / 8
"""Share of a generator's slots that must be free before it begins further trajectories, all at
once. As many trajectories wait in the generator for this. Steps that read prompts cannot be CUDA
graphs. They were half of all steps when a trajectory began as soon as another ended."""
_MAX_STILLBORN = 3
"""Number of processes of a rank that may die in a row before they serve; then the run ends."""
MAX_IN_VAIN = 10
"""Number of generators that may die in a row without a finished group in between. Then the run
ends, because some group probably kills them."""
_KEY = "generators"
"""Key of the main learner's address and secret in the run's store."""
_GONE = (OSError, EOFError, AuthenticationError, dist.DistError)
"""Errors that the death of a peer raises."""


class Report(NamedTuple):
    """A generator's message to the main learner."""

    groups: list[list[Trajectory]]
    """Groups that were finished since the last report; with ``are_all``, all groups."""
    are_all: bool
    """True: ``groups`` has all groups, also unfinished ones, as :attr:`Orders.wants_all` asked."""
    num_running: int
    """Number of trajectories that are not over."""
    figures: Any
    """Counts and seconds of the generator since the last report, to be added up."""


class Orders(NamedTuple):
    """The main learner's answer to a report."""

    names: list[str]
    """Names of the parameters and buffers that are sent next."""
    version: int | None
    """The version of the main learner's weights; None: they are being written."""
    stop_ids: tuple[int, ...]
    begun: list[Trajectory]
    """Trajectories to begin."""
    wants_all: bool
    """True: the next report is to have all groups."""


def _over(groups: dict[int, list[Trajectory]]) -> set[int]:
    """Return the numbers of the groups whose trajectories are all over."""
    return {number for number, group in groups.items() if all(t.is_over for t in group)}


class Wire:
    """A connection between the main learner and a generator.

    It also copies values of the learner's model into the generator's.
    """

    index: int | None = None
    """The generator's rank; None: this is the generator's end."""
    version: int | None = None
    """Version of the weights that the generator has."""
    owes_all = False
    """True: the generator is to report all groups."""

    def __init__(self, link: connection.Connection, store: dist.Store, model: Transformer) -> None:
        """``store``: where both ends meet for NCCL."""
        self.link, self._store = link, store
        self._group: Any = None
        self.values = dict((*model.named_parameters(), *model.named_buffers()))
        self.groups: dict[int, int] = {}
        """The groups given to the generator, and the number of trajectories of each."""
        self.num_running = 0
        """Number of trajectories that are not over: the generator's, and those in :attr:`begun`."""
        self.begun: list[Trajectory] = []
        """Trajectories given to the generator that have not been sent yet."""

    def is_gone(self) -> bool:
        """Return True if the other end was closed. There may still be something to read."""
        poll = select.poll()
        poll.register(self.link, select.POLLRDHUP)
        return bool(poll.poll(0))

    def copy(self, names: Iterable[str]) -> None:
        """Send the values of ``names``, or receive them at the generator's end."""
        tensors = [self.values[name].detach() for name in names]
        parts = [t.view(-1).view(torch.uint8) for t in tensors if t.numel()]
        if parts[0].is_cuda:
            return self._copy_by_nccl(parts)
        transfer = self.link.recv_bytes_into if self.index is None else self.link.send_bytes
        for part in parts:
            transfer(part.numpy().data)

    def _copy_by_nccl(self, parts: Sequence[torch.Tensor]) -> None:
        device = parts[0].device
        rank = int(self.index is None)
        torch.cuda.set_device(device)  # each thread has its own current device
        if self._group is None:
            options = dist.ProcessGroupNCCL.Options()
            self._group = dist.ProcessGroupNCCL(self._store, rank, 2, options)
        if self.index is None:  # a step may still read the old values
            torch.cuda.synchronize(device)
        transfer = self._group.recv if self.index is None else self._group.send
        with torch.cuda.stream(torch.cuda.Stream(device)):  # else training would wait for it
            works = [transfer([part], 1 - rank, 0) for part in parts]
        while not all(work.is_completed() for work in works):
            time.sleep(0.001)
            if self.is_gone():  # NCCL does not notice that the other end is gone
                self._group.abort()
                raise EOFError


# ---- the main learner ----------------------------------------------------------------------------


class Fleet(Collector):
    """A collector whose trajectories run in the generators' processes, also between its calls.

    Only the main learner's collector has trajectories. It has a thread for each generator, which
    answers the generator's reports. One lock protects the state of all.
    """

    def __init__(
        self,
        generator: Generator,
        environment: Environment,
        settings: RlSection,
        *,
        stop_ids: tuple[int, ...],
        longest: int,
        world: World,
        config: Config,
    ) -> None:
        """Accept generators, on the main learner. ``generator`` only has the weights to send."""
        super().__init__(generator, environment, settings, stop_ids, longest)
        self._device = world.device
        self._limit = config.launch.join_timeout
        self.num_expected = self.settings.generators if world.is_main else 0
        """Number of generators to wait for before the first weights are sent."""
        self._changed = threading.Condition()
        self._new: list[Trajectory] = []
        """Trajectories that are not handed out yet, since their groups may be incomplete."""
        self.peers: list[Wire] = []
        self._version: int | None = None
        """Version of the weights to generate with; None: they are being written."""
        self._counts: dict[str, float] = {"generators_lost": 0, "trajectories_restarted": 0}
        self._in_vain = 0
        self._sums: Any = Counter()
        """The generators' figures, added up."""
        self._since = time.perf_counter()
        if world.is_main:
            key = secrets.token_bytes(32)
            place, store = launched_place(), world.store
            assert place is not None
            assert store is not None  # a launcher has started ranks, so there is one
            host = place.address.rpartition(":")[0]
            listens_at = host if host in ("127.0.0.1", "localhost") else ""
            listener = connection.Listener((listens_at, 0), backlog=64)
            store.set(_KEY, f"{host} {listener.address[1]} {key.hex()}")
            args = listener, store, key
            threading.Thread(target=self._listen, args=args, daemon=True).start()

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

    def unfinished(self) -> list[Trajectory]:
        self.finish(())
        with self._changed:
            for peer in self.peers:
                peer.owes_all = True
            self._changed.notify_all()
            self._await(lambda: not any(peer.owes_all for peer in self.peers))
            return [t for group in self.groups.values() for t in group]

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Wait until all generators have the last weights; send those written in the context."""
        with self._changed:
            self._await(lambda: len(self.peers) >= self.num_expected)
            self._await(lambda: all(peer.version == self._version for peer in self.peers))
            self._version = None
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        with self._changed:
            self._version = version
            self._hand_out()

    def figures(self) -> dict[str, float]:
        """Return counts, and means over generators of their figures since the last call."""
        number = self.settings.generators
        with self._changed:
            sums, self._sums, self._since = self._sums, Counter(), time.perf_counter()
        sums["generator/places"] *= number / max(1, sums["generator/steps"])
        return self._counts | {name: value / number for name, value in sums.items()}

    def _await(self, condition: Callable[[], bool]) -> None:
        """Wait, with the lock released, until ``condition`` is true.

        Raises RunFailed: no generator joins in time, or too many died in a row.
        """
        while not condition():
            if self._in_vain >= MAX_IN_VAIN:
                problem = (
                    f"{MAX_IN_VAIN} generators in a row died, and no group was finished in between"
                )
                raise RunFailed(problem)
            if self.peers:
                self._changed.wait(1.0)
            elif not self._changed.wait_for(lambda: self.peers, self._limit):
                problem = f"no generator joined within {self._limit:g} s (launch.join_timeout)"
                raise RunFailed(f"{problem}; {self._counts['generators_lost']} have died")

    def _hand_out(self) -> None:
        """Give each group that no generator has to the least busy one, and wake all threads.

        If generation runs ahead (``rl.max_staleness``), a generator gets no more groups than it can
        begin soon. Otherwise all groups are given at once and in a fixed order, so that reruns are
        the same.
        """
        self._changed.notify_all()
        if self._version is None or not self.peers:
            return
        rl = self.settings
        taken = _over(self.groups).union(*(peer.groups for peer in self.peers))
        most = rl.group_size + (1 + _SPARE) * rl.max_sequences if rl.max_staleness else math.inf
        # An evaluation's groups have negative numbers. They come first: the loop waits for them.
        for group in sorted(self.groups.keys() - taken, key=lambda n: (n >= 0, abs(n))):
            peer = min(self.peers, key=lambda peer: (peer.num_running, peer.index))
            if peer.num_running >= most:
                break
            peer.groups[group] = number = len(self.groups[group])
            peer.begun += self.groups[group]
            peer.num_running += number

    # ---- threads ---------------------------------------------------------------------------------

    def _listen(self, listener: connection.Listener, store: dist.Store, key: bytes) -> None:
        """Start a thread for each generator that connects."""
        while True:
            args = listener.accept(), store, key
            threading.Thread(target=self._attend, args=args, daemon=True).start()

    def _attend(self, link: connection.Connection, store: dist.Store, key: bytes) -> None:
        """Answer a generator until it is gone, then give its groups to others."""
        peer = None
        try:
            with suppress(*_GONE):
                connection.deliver_challenge(link, key)
                connection.answer_challenge(link, key)
                index, token = link.recv()
                peer = Wire(link, dist.PrefixStore(token, store), self.generator.model)
                with self._changed:
                    peer.index = index
                    self.peers.append(peer)
                    self._hand_out()
                while True:
                    orders = self._orders(peer, link.recv())
                    link.send(orders)
                    if orders.names:
                        link.recv()  # the generator is between two steps
                        peer.copy(orders.names)
                        with self._changed:
                            peer.version = orders.version
                            self._changed.notify_all()
        finally:  # also after an error here: no other thread may wait for this generator
            with self._changed:
                if peer in self.peers:
                    self.peers.remove(peer)
                    number = sum(peer.groups.values())
                    text = "generator %d is lost; its %d trajectories begin again"
                    logger.warning(text, peer.index, number)
                    self._counts["trajectories_restarted"] += number
                    self._counts["generators_lost"] += 1
                    self._in_vain += 1
                    self.num_expected = 0
                    self._hand_out()

    def _orders(self, peer: Wire, report: Report) -> Orders:
        """Take a generator's report, and return its orders.

        Waits until there are orders, unless the generator is busy.
        """
        with self._changed:
            peer.num_running = report.num_running + len(peer.begun)
            self._sums.update(report.figures)
            self.groups |= {group[0].group: group for group in report.groups}
            for number in peer.groups.keys() & _over(self.groups):
                del peer.groups[number]
                self._in_vain = 0
            peer.owes_all = peer.owes_all and not report.are_all
            self._hand_out()
            while True:
                begun: list[Trajectory] = []
                names: list[str] = []
                if self._version is not None:  # else trajectories would begin with old weights
                    begun, peer.begun = peer.begun, begun
                    has = () if peer.version is None else self.generator.borrowed
                    if peer.version != self._version:
                        names = [name for name in peer.values if name not in has]
                if report.num_running or begun or names or peer.owes_all or peer.is_gone():
                    return Orders(names, self._version, self.stop_ids, begun, peer.owes_all)
                self._changed.wait(1.0)


# ---- generators ----------------------------------------------------------------------------------


def generate_if_apart(config: Config) -> None:
    """Return if this rank is to train; else supervise a generator until the main learner ends.

    The generator is a forked process, which also raises the errors of building it.

    Raises:
        SystemExit: with code 0, the main learner's process has ended; with 2, a setting is wrong;
            with 1, several generators in a row died before they served.
        ConfigError, RunFailed: as :func:`find_ranks`.
    """
    place = launched_place()
    if place is None or not 0 < place.world_size - config.rl.apart <= place.rank:
        return
    for thread in threading.enumerate():  # a forked process has their locks, but not the threads
        if type(thread) is threading.Thread:
            thread.join(_STEP_SECONDS)
    find_ranks(place, config.launch.join_timeout)  # here, since a generator may die before it
    stillborn = 0
    while stillborn < _MAX_STILLBORN:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            _Serving(config, place, writing).run()
            os._exit(0)
        os.close(writing)
        stillborn += 1
        beats = b"."
        while beats and select.select([reading], [], [], SILENCE_SECONDS)[0]:
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
    """The process of a generator.

    One of its threads sends heartbeats to the supervisor through ``pipe``.
    """

    def __init__(self, config: Config, place: LaunchedPlace, pipe: int) -> None:
        self.config, self.place, self._pipe = config, place, pipe
        self._wire: Wire | None = None
        self._stepped = math.inf
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while time.monotonic() - self._stepped < _STEP_SECONDS + self.config.rl.step_timeout:
            if self._wire is not None and self._wire.is_gone():  # the main thread may hang
                os._exit(0)
            try:
                os.write(self._pipe, b"." if self._wire is None else b"s")
            except OSError:  # the supervisor is gone
                os._exit(1)
            time.sleep(_BEAT_SECONDS)

    def run(self) -> None:
        """Build a generator and serve."""
        gc.enable()  # garbage collection is off while a command starts
        config, arch = resolve_run(self.config)
        device = claim_device(config, self.place.local_rank)
        setup = Setup(config, arch, device.type)
        model = blank(config, arch, compute_dtype(config, device)).to_empty(device=device)
        slots = config.rl.max_sequences
        generator = Generator(
            model,
            setup.tokenizer,
            num_pages=setup.num_pages,
            max_sequences=slots,
            max_tokens=max(2048, 32 * slots),  # after an update all tokens may be read again
            cache=config.rl.generator_cache,
        )
        generator.scheduler.batch = max(1, int(_SPARE * slots))
        collector = Collector(
            generator, setup.environment, config.rl, stop_ids=(), longest=config.data.seq_len
        )
        try:
            store = find_ranks(self.place, SILENCE_SECONDS, again=True)
            host, port, key = store.get(_KEY).decode().split()
            link = connection.Client((host, int(port)), authkey=bytes.fromhex(key))
            token = secrets.token_hex(8)
            link.send((self.place.rank, token))
            _leave_stopping_to_learners()
            self._wire = Wire(link, dist.PrefixStore(token, store), model)
            os.write(self._pipe, b"s")
            self._serve(self._wire, collector)
        except (*_GONE, RunFailed):  # if the learner is gone, it reports its own error
            if self._wire is not None and not self._wire.is_gone():
                raise

    def _serve(self, wire: Wire, collector: Collector) -> None:
        """Generate, report and follow orders, until the main learner is gone."""
        generator, groups = collector.generator, []
        figures: Any = generator.scheduler.figures
        reported, waits, are_all = 0.0, False, False
        while True:
            now = time.monotonic()
            running = sum(not t.is_over for group in collector.groups.values() for t in group)
            self._stepped = now if running else math.inf
            # 1. Send a report if there is news, and otherwise from time to time.
            if not waits and (groups or are_all or not running or now - reported > _PAUSE):
                wire.link.send(Report(groups, are_all, running, figures))
                groups, reported, waits = [], now, True
                figures.clear()
            # 2. Follow the orders that answer the report.
            if waits and (not running or wire.link.poll()):
                orders: Orders = wire.link.recv()
                collector.stop_ids, are_all, waits = orders.stop_ids, orders.wants_all, False
                figures["seconds/generator_idle"] += (not running) * (time.monotonic() - now)
                if orders.names:
                    wire.link.send(None)
                    wire.copy(orders.names)
                    generator.weights_changed(keeps_cache=self.config.rl.keep_cache)
                    assert orders.version is not None  # weights come with their version
                    generator.version = orders.version
                for trajectory in orders.begun:
                    collector.resume(trajectory)
            # 3. Take a step.
            if collector.groups:
                before, now = figures["generator/mixed_steps"], time.monotonic()
                collector.step()
                is_mixed = figures["generator/mixed_steps"] > before
                figures["seconds/generator_mixed"] += is_mixed * (time.monotonic() - now)
            groups += collector.finish(_over(collector.groups))
            if are_all:
                collector.unfinished()
                groups += collector.groups.values()
