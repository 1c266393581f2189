"""The processes of a run: how many there are, on which devices, and how they meet on the host.

Ranks find one another and wait for one another through torch's store. Collectives would not do:
they time out, and keep a GPU busy, while one rank may take long over what it does alone (tokenise a
corpus, write a checkpoint). A wait on the store fails only if a rank shows no sign of life any
more.

Left out on purpose: starting processes (:mod:`moetrain.cli.launch`), and noticing at once that one
has died, which is the launcher's business.
"""

import itertools
import os
import queue
import re
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from moetrain.config import Config, ConfigError
from moetrain.config.environment import GIB, GPUS, LaunchedPlace, launched_place
from moetrain.config.sources import RankLost, RunFailed, shortened

_MOST_ON_CORE = 16
"""The most processes for each core: enough to try a large layout on a small machine."""
TIMEOUT = timedelta(minutes=30)
"""The longest time that a collective may take, or that a rank may show no sign of life."""
_BEAT_SECONDS = 10.0
"""Seconds between a rank's signs of life."""
_LONGEST_PAUSE = 0.2
"""Seconds between looks at the store: short beside any work, and cheap with thousands of ranks."""


# ---- how many, and on what -----------------------------------------------------------------------


def num_processes(config: Config) -> int:
    """Return the number of processes that ``launch.nproc`` asks for on this machine.

    Raises ConfigError: it is more than there are GPUs, or more than the cores can run.
    """
    nproc, gpus, cores = config.launch.nproc, torch.cuda.device_count(), os.cpu_count() or 1
    on_cpu = config.train.device == "cpu" or (config.train.device == "auto" and gpus == 0)
    if nproc == "auto":
        return 1 if on_cpu else max(1, gpus)
    problem = f"{nproc} processes, but this machine has "
    if not on_cpu and nproc > max(1, gpus):
        problem += f"{gpus} GPUs; use auto, which starts one for each"
        raise ConfigError("launch.nproc", problem)
    if on_cpu and nproc > _MOST_ON_CORE * cores:
        problem += f"{cores} cores and no GPU to use; use {cores} or fewer"
        raise ConfigError("launch.nproc", f"{problem} (up to {_MOST_ON_CORE} a core are started)")
    return nproc


def machine() -> str:
    """Return an identifier of this machine: its host name, and its boot.

    Machines made from one image may share the name, but not the boot.
    """
    start = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {start.read_text().strip() if start.exists() else ''}"


def device_capacity(device: torch.device) -> float:
    """Return the bytes of memory of ``device``. A CPU's are its machine's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class Machine(NamedTuple):
    """The devices that a run has or is planned for, one for each process."""

    name: str
    """The device's name, for people."""
    device: torch.device
    processes: int
    capacity: float
    """Bytes for each process. Processes on CPUs share their machine's memory."""
    why: str
    """The reason why it is these devices, for people."""

    def describe(self) -> str:
        """Return a description: ``8 x H100 of 79.1 GiB (launch.gpus)``."""
        return f"{self.processes} x {self.name} of {self.capacity / GIB:.1f} GiB ({self.why})"


def planned_machine(config: Config) -> Machine:
    """Return the devices that ``config`` is for.

    They are those of ``launch.gpus`` and ``launch.gpu`` if these are set. Otherwise there is one
    for each process that a launcher started or that ``launch.nproc`` asks for, or as many as the
    degrees of parallelism multiply to.

    Raises ConfigError: ``launch.nproc`` is not ``launch.gpus``, or more than there are GPUs here.
    """
    launch, p, place = config.launch, config.parallel, launched_place()
    gpus, is_asked = torch.cuda.device_count(), (launch.gpus or launch.gpu) is not None
    on_cpu = config.train.device == "cpu" or not (gpus or is_asked or config.train.device == "cuda")
    data_ranks = max(p.dp_replicate, 1) * max(p.dp_shard, 1)
    named = max(data_ranks * p.tp * p.pp * p.cp, p.ep)
    if launch.gpus is not None:
        size, why = launch.gpus, "launch.gpus"
        if launch.nproc not in ("auto", 1, size):
            problem = f"{launch.nproc} contradicts launch.gpus {size}"
            raise ConfigError("launch.nproc", f"{problem}; leave one of the two out")
    elif place is not None:
        size, why = place.world_size, "those that the launcher started"
    else:
        here = num_processes(config) if gpus or on_cpu or launch.nproc == "auto" else launch.nproc
        size = max(here, named)
        why = "launch.nproc" if size == here else "as many as parallel's degrees multiply to"
    if on_cpu:
        on_machine = size if place is None else place.on_machine or size
        if not gpus:
            why += "; no GPU is here: launch.gpus and launch.gpu plan for some"
        cpu = torch.device("cpu")
        return Machine("CPU", cpu, size, device_capacity(cpu) / on_machine, why)
    cuda = torch.device("cuda")
    if launch.gpu is None and gpus:
        name = torch.cuda.get_device_name(cuda)
        return Machine(name, cuda, size, device_capacity(cuda), why)
    kind = launch.gpu or "h100"
    why += ", launch.gpu" if launch.gpu else "; no GPU is here: launch.gpu names another kind"
    return Machine(kind.upper(), cuda, size, GPUS[kind].memory_gib * GIB, why)


# ---- on the host ---------------------------------------------------------------------------------


class Rendezvous:
    """Exchanges messages among the ranks of a group, on the host. All make the same calls, in one
    order."""

    _numbers = itertools.count()

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = dist.PrefixStore(f"moetrain/{next(self._numbers)}", store)
        self._calls = itertools.count()
        self._seen: dict[int, tuple[int, float]] = {}
        stopped = threading.Event()
        self.end = weakref.finalize(self, stopped.set)
        """A call that ends this rank's signs of life."""
        if size > 1:
            life = (self._store, f"life/{rank}", stopped)
            threading.Thread(target=_show_life, args=life, daemon=True).start()

    def barrier(self) -> None:
        """Wait until every rank has come here, however late. Raises RunFailed: a rank is gone."""
        with self._next_call("wait") as key:
            if self._store.add(key, 1) == self.size:
                self._store.set(f"{key}/all", "")
            self._await(f"{key}/all")

    def broadcast(self, text: str) -> str:
        """Return rank 0's ``text`` on every rank. It waits as :meth:`barrier` does."""
        with self._next_call("share") as key:
            if self.rank == 0:
                self._store.set(key, text)
            else:
                self._await(key)
            return self._store.get(key).decode()

    def gather(self, text: str) -> list[str]:
        """Return every rank's ``text`` on rank 0, [] on others. Waits as :meth:`barrier` does."""
        with self._next_call("gather") as key:
            if self.rank > 0:
                self._store.set(f"{key}/{self.rank}", text)
                return []
            texts = [text]
            for one in (f"{key}/{rank}" for rank in range(1, self.size)):
                self._await(one)
                texts.append(self._store.get(one).decode())
                self._store.delete_key(
                    one
                )  # texts may be long, and the store lives as long as the run
            return texts

    @contextmanager
    def _next_call(self, what: str) -> Iterator[str]:
        try:
            yield f"{what}/{next(self._calls)}"
        except dist.DistError as error:
            raise RankLost(lost(error)) from None

    def _await(self, key: str) -> None:
        # Poll: a wait inside the store would hold back Ctrl-C.
        pause, looked = 0.001, time.monotonic()
        self._seen.clear()
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if time.monotonic() - looked > _BEAT_SECONDS:
                looked = time.monotonic()
                self._look_for_life(looked)

    def _look_for_life(self, now: float) -> None:
        """Raise RunFailed if a rank is silent for too long. Rank 0 watches all others, and they
        watch rank 0."""
        silent = []
        for rank in range(1, self.size) if self.rank == 0 else (0,):
            beats = self._store.add(f"life/{rank}", 0)
            before, since = self._seen.get(rank, (-1, now))
            if beats != before:
                self._seen[rank] = (beats, now)
            elif now - since > TIMEOUT.total_seconds():
                silent.append(rank)
        if silent:
            who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} of {self.size}"
            raise RunFailed(f"{who} gave no sign of life for {TIMEOUT.total_seconds():.0f} s")


def _show_life(store: dist.Store, key: str, stopped: threading.Event) -> None:
    while not stopped.wait(_BEAT_SECONDS):
        try:
            store.add(key, 1)
        except RuntimeError:  # the store is gone, and so is the run
            return


_GONE = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|Connection was likely closed|Broken pipe"
    r"|ncclRemoteError|remote process exited"
)


def lost(error: Exception) -> str:
    """Return the message for an error that says that another rank has ended."""
    return f"lost another rank: {_first_line(error)}; the output of that rank or launcher says why"


def is_of_lost_rank(error: BaseException) -> bool:
    """Return whether ``error``, of a collective or of the store, says that another rank has
    ended."""
    is_of_torch = isinstance(error, dist.DistError) or "gloo" in str(error)
    return is_of_torch and _GONE.search(str(error)) is not None


def _first_line(error: Exception) -> str:
    """Return the first line, without the place in torch's source and without gloo's advice."""
    text = str(error).partition("\n")[0].strip()
    return re.sub(r"^\[\S*\] |\. This is typically caused by .*", "", text)


def find_ranks(place: LaunchedPlace, seconds: float, *, again: bool = False) -> dist.Store:
    """Connect to the store, and wait until all ``place.world_size`` ranks have connected.

    Args:
        place: this process, as a launcher started it.
        seconds: the time to wait for the others (``launch.join_timeout``).
        again: True: all have connected before, and this process replaces one that is gone.

    Raises:
        ConfigError: the address is unknown, or ranks contradict one another.
        RunFailed: nobody answers at the address, or ranks are missing after that time.
    """
    deadline = time.monotonic() + seconds
    host, _, port = place.address.rpartition(":")
    if not 0 < int(port) < 1 << 16:
        raise ConfigError("MASTER_PORT", f"{port} is not a port; give 1 to 65535")
    try:
        socket.getaddrinfo(host, int(port))
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is too long
        reason = getattr(error, "strerror", None) or error
        problem = f"{shortened(host)}, where the ranks are to meet, is unknown: {reason}"
        remedy = "give the name or the address of rank 0's machine"
        raise ConfigError("MASTER_ADDR", f"{problem}; {remedy}") from None
    serves = place.rank == 0 and not place.store_is_served
    if not serves:
        _await_server(place, host, int(port), seconds)
    try:
        store = _open_store(place, host, int(port), serves, seconds)
        # A launcher's store outlives the ranks, so each restart has a prefix of its own. A store
        # that rank 0 serves ends with rank 0. Its prefix must not contain the number of restarts,
        # which torchrun's agents on several machines count separately.
        restarts = place.restarts if place.store_is_served else 0
        store = dist.PrefixStore(f"moetrain/{restarts}", store)
        if not again:
            _await_ranks(dist.PrefixStore("join", store), place, seconds, deadline)
    except dist.DistError as error:
        problem = f"rank {place.rank} of {place.world_size} could not meet the others"
        remedy = "; give all ranks another MASTER_PORT" if serves else ""
        raise RunFailed(f"{problem} at {place.address}: {_first_line(error)}{remedy}") from None
    return store


def _open_store(
    place: LaunchedPlace, host: str, port: int, serves: bool, seconds: float
) -> dist.Store:
    """Return the store at the address; with ``serves`` this process serves it.

    If the server is no store, torch waits forever for its answer. So a thread does the waiting.
    """
    opened: queue.SimpleQueue[dist.Store | RuntimeError] = queue.SimpleQueue()

    def open_store() -> None:
        try:
            # The server listens on every address of its machine, whose name it need not know.
            store = TCPStore(
                "localhost" if serves else host,
                port,
                place.world_size,
                is_master=serves,
                timeout=TIMEOUT,
                wait_for_workers=False,
            )
        except RuntimeError as error:  # torch's network errors are RuntimeErrors
            opened.put(error)
        else:
            opened.put(store)

    threading.Thread(target=open_store, daemon=True).start()
    try:
        found = opened.get(timeout=seconds)
    except queue.Empty:
        raise RunFailed(
            f"what answers at {host}:{port} is not rank 0 of this run (rank {place.rank} of "
            f"{place.world_size} waited {seconds:g} s, launch.join_timeout); give all ranks "
            "another MASTER_PORT"
        ) from None
    if isinstance(found, RuntimeError):
        raise found
    return found


def _await_server(place: LaunchedPlace, host: str, port: int, seconds: float) -> None:
    """Wait until the server answers. TCPStore's own wait would hold back Ctrl-C."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(left, 5.0))).close()
            return
        except OSError as error:
            if left <= 0:
                raise RunFailed(
                    f"rank {place.rank} of {place.world_size} found nobody at {host}:{port} within "
                    f"{seconds:g} s (launch.join_timeout), where rank 0 should be: {error}; is it "
                    "running, and are MASTER_ADDR and MASTER_PORT those of its machine?"
                ) from None
        time.sleep(_LONGEST_PAUSE)


def _await_ranks(store: dist.Store, place: LaunchedPlace, seconds: float, deadline: float) -> None:
    rank, size = place.rank, place.world_size
    theirs = int(store.compare_set("size", "", str(size)))
    if theirs != size:
        problem = f"{size} for rank {rank}, and {theirs} for another; give all the same"
        raise ConfigError("WORLD_SIZE", problem)
    if store.add(f"rank/{rank}", 1) > 1:
        raise ConfigError("RANK", f"two of {size} processes have {rank}; number them from 0")
    store.add("came", 1)
    while store.add("came", 0) < size:
        if time.monotonic() > deadline:
            missing = [str(r) for r in range(size) if store.add(f"rank/{r}", 0) == 0]
            named = f"rank{'s' * (len(missing) > 1)} "
            named += ", ".join([*missing[:8], "..."] if len(missing) > 8 else missing)
            raise RunFailed(
                f"{named} of {size} did not join at {place.address} within {seconds:g} s "
                "(launch.join_timeout); are all started, with the same MASTER_ADDR, MASTER_PORT "
                "and WORLD_SIZE?"
            )
        time.sleep(_LONGEST_PAUSE)
