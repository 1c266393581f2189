"""Copies within a machine in place of collectives (``parallel.fsdp_transport``).

Copy engines move bytes between GPUs while every SM computes, and no rank waits for a peer to send.
Each rank of an FSDP group has two pieces of memory that all ranks of the group map:

    | a shard of the gathered dtype | another | ...
    | another shard's copy in the gathered dtype | ... | inbox: [W, N] of the reduction under way |

The first piece holds the shards that are stored in the gathered dtype. Peers read them in place, so
no second copy exists. The second piece is a workspace, which may be freed between two uses of
``FSDP.work``. A gather reads the peers' shards. A reduction writes row r of a rank's gradients into
row ``rank`` of r's inbox. Rank r sums its inbox just as it sums what an all-to-all brings: the bits
are the same. Gathers and reductions run in streams of their own. Each rank begins with the peer
rank + 1, so that no two ranks access the same peer at once.

Barriers on the device keep writers and readers apart. Shards are written at two times: by an
update, which follows the sum of the gradients' norm over all ranks, and between :meth:`Peers.open`
and :meth:`Peers.share`. Peers read them only after ``share``. Any other code that writes or moves
shards calls :meth:`PeerSession.withdraw` first. That waits at the barrier of ``open``, unless the
rank has waited there since the last ``share``. A reduction uses two more barriers. It arrives at
``WRITTEN`` when it has written to the inboxes, and waits there before it sums its own. It arrives
at ``FREE`` when it has summed, and the next reduction waits there before it writes.

To arrive, a rank writes 1 to a word of each peer; the peer waits for the 1 and then writes 0. There
is no counter: a CUDA graph writes the same values in every replay. Barriers come in pairs, and no
rank passes one of a pair before all have waited at the other. So no rank arrives twice at a barrier
before its peers have waited there.

No SM waits at a barrier. A kernel that waited for another GPU would occupy an SM all that time, and
a grouped product, which starts one program on each SM, would wait until that SM is free. Instead,
stream memory operations write the words and wait for them: the front end of the GPU executes these,
without an SM. These waits never time out: after a rank has died, the others wait until whoever
started them, or torch's monitor of NCCL, ends them.

On CPUs, processes map the same memory, and a copy is done when its call returns. Left out on
purpose: several machines, multicast, and sums that a switch computes on the way.

Legend: W ranks of the group, N elements of one rank's shard of a bucket.
"""

import os
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _SymmetricMemory,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)
from torch.distributed import _symmetric_memory

from moetrain.config import ConfigError, ParallelSection, logger
from moetrain.kernels.optim.reduction import sum_chunks
from moetrain.parallel import collectives
from moetrain.parallel.fsdp.bucket import Bucket
from moetrain.parallel.fsdp.transport.protocol import Wait
from moetrain.parallel.processes import machine
from moetrain.runtime.annotate import annotate, annotated
from moetrain.runtime.arena import Arena, aligned
from moetrain.runtime.memory import DeviceBytes, on_words
from moetrain.runtime.typed import split

_OPENED, _SHARED, WRITTEN, FREE = _BARRIERS = range(4)
_TAKE = (("wait", 1), ("write", 0))


# ---- shared memory ------------------------------------------------------------------------------


class _DeviceMemory:
    """Memory on the GPUs of a group, which all of its ranks read and write.

    Making it is collective, and the host waits.

    Attributes:
        parts: each rank's bytes (uint8), by rank.
    """

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        """Reserve ``size`` bytes of each rank.

        Raises torch.OutOfMemoryError: there is too little memory, even after torch's cache is
        emptied.
        """
        me, ranks = group.rank(), group.size()
        start = aligned(size)
        whole = start + len(_BARRIERS) * ranks * torch.int32.itemsize
        torch.cuda.empty_cache()
        try:
            # Not symmetric_memory.empty, which in newer versions keeps what was freed.
            own = _SymmetricMemory.empty_strided_p2p((whole,), (1,), torch.uint8, device)
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(
                    f"{whole / 2**30:.2f} GiB for peers: {error}"
                ) from None
            raise
        own[start:].zero_()
        own[start:].view(torch.int32).view(len(_BARRIERS), ranks)[FREE] = 1  # inboxes are empty
        torch.cuda.synchronize(device)  # the words are set before a peer can write them
        handle: Any = _symmetric_memory.rendezvous(own, group)
        parts = [handle.get_buffer(r, (whole,), torch.uint8) for r in range(ranks)]
        # The own part keeps its memory, as any tensor does: a shard may outlive this object.
        self.parts = [part[:size] for part in (*parts[:me], own, *parts[me + 1 :])]
        # Each rank's words, by barrier and by the peer that writes it: 1 if that peer has arrived.
        words = [part[start:].view(torch.int32).view(len(_BARRIERS), ranks, 1) for part in parts]
        others = [rank for rank in range(ranks) if rank != me]
        theirs = [[words[rank][barrier, me] for rank in others] for barrier in _BARRIERS]
        mine = [[words[me][barrier, rank] for rank in others] for barrier in _BARRIERS]
        self._arrive = [on_words([("write", word, 1) for word in row]) for row in theirs]
        taken = [[(name, w, n) for w in row for name, n in _TAKE] for row in mine]
        self._wait = [on_words(row) for row in taken]
        self._own, self._handle = own, handle  # peers' parts do not keep the handle alive
        DeviceBytes.add(device, whole)
        weakref.finalize(self, DeviceBytes.add, device, -whole).atexit = False

    def arrive(self, barrier: int) -> None:
        """Signal to all peers when the current stream reaches this point."""
        self._arrive[barrier]()

    def wait(self, barrier: int) -> None:
        """Make the current stream wait until all peers have arrived since its last wait here."""
        self._wait[barrier]()


class _MappedMemory:
    """Memory like :class:`_DeviceMemory`'s, of processes on the CPUs of one machine.

    Making it is collective.
    """

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, ranks = group, group.size()
        file = os.memfd_create("moetrain") if group.rank() == 0 else None
        name = [f"/proc/{os.getpid()}/fd/{file}"]  # in no folder, so that no file is ever left
        if file is not None:
            os.ftruncate(file, ranks * size + 1)  # no file without bytes can be mapped
        dist.broadcast_object_list(name, group=group, group_src=0)
        whole = torch.from_file(name[0], shared=True, size=ranks * size + 1, dtype=torch.uint8)
        self.parts = list(split(whole[:-1], [size] * ranks))
        collectives.barrier(group)
        if file is not None:
            os.close(file)

    def arrive(self, barrier: int) -> None:
        """Do nothing: :meth:`wait` waits until all ranks have come as far."""

    def wait(self, barrier: int) -> None:
        collectives.barrier(self.group)


class CopyStreams:
    """One rank's streams for copies in all groups. They are None on CPUs, where copies are done at
    once.

    Attributes:
        pull: reads peers' shards.
        own: copies what does not leave the device.
        push: writes gradients to peers, and sums.
        used: the streams that have had work. Only these take part in a CUDA graph's capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Sums have priority: they are short, and peers wait for them. Copies within the device have
        # a stream of their own: they may need busy SMs, and copies from peers should not wait.
        self.pull, self.own, self.push = (
            torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
            for priority in (0, -1, -1)
        )
        self.used: set[torch.cuda.Stream | None] = set()

    def shared(self, size: int, group: dist.ProcessGroup) -> _DeviceMemory | _MappedMemory:
        """Make memory that the ranks of ``group`` share, ``size`` bytes each. Collective."""
        kind = _DeviceMemory if self.device.type == "cuda" else _MappedMemory
        return kind(size, group, self.device)

    @contextmanager
    def behind(self, stream: torch.cuda.Stream | None) -> Generator[None]:
        """Queue the work inside on ``stream``, after all work of the current stream so far."""
        self.used.add(stream)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Make the current stream wait for the work of ``stream`` so far."""
        if stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def end(self, *streams: torch.cuda.Stream | None, kept: object = None) -> Wait:
        """Return a wait for the work of ``streams`` so far.

        ``kept``: tensors that the work reads; their memory is not reused before it is done.
        """
        events: list[Any] = [stream.record_event() for stream in streams if stream is not None]
        return partial(self._wait, events, kept)

    def _wait(self, events: Sequence[Any], kept: object) -> None:
        for event in events:
            torch.cuda.current_stream(self.device).wait_event(event)


class _Area:
    """A piece of memory of each rank of a group, in which shards have places.

    Attributes:
        size: bytes of one rank that have been reserved.
        shared: the memory; None before :meth:`make` and after :meth:`release`.
    """

    def __init__(self, group: dist.ProcessGroup, streams: CopyStreams) -> None:
        self.group, self.streams, self.size = group, streams, 0
        self.shared: _DeviceMemory | _MappedMemory | None = None
        self._found: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}

    def reserve(self, size: int) -> int:
        """Reserve ``size`` bytes, before the memory is made. Return the byte where they begin."""
        start, self.size = self.size, self.size + aligned(size)
        return start

    def make(self, more: int = 0) -> None:
        """Make the memory if there is none: what is reserved, then ``more`` bytes. Collective."""
        if self.shared is None:
            self.shared = self.streams.shared(self.size + more, self.group)

    def release(self) -> None:
        """Give the memory back. Collective.

        The host waits until no rank maps it any more, since others may need the memory at once.
        """
        if self.shared is not None:
            self.shared = None
            self._found.clear()
            collectives.barrier(self.group)

    def own(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's ``numel`` elements from byte ``start`` on."""
        return self.parts(start, numel, dtype)[self.group.rank()]

    def parts(self, start: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return these elements of every rank. Views are cached: a step would make thousands."""
        key = (start, numel, dtype)
        if key not in self._found:
            assert self.shared is not None  # made
            end = start + numel * dtype.itemsize
            self._found[key] = [part[start:end].view(dtype) for part in self.shared.parts]
        return self._found[key]


class _Shards(_Area):
    """The shards that other ranks read in place. They are a piece of the arena of weights.

    Attributes:
        buckets: each bucket, and the byte where its shard begins.
    """

    def __init__(self, group: dist.ProcessGroup, streams: CopyStreams) -> None:
        super().__init__(group, streams)
        self.buckets: list[tuple[Bucket, int]] = []

    @property
    def memory(self) -> torch.Tensor:
        assert self.shared is not None  # made
        return self.shared.parts[self.group.rank()]

    def free(self) -> None:
        """Give the memory back. Collective. By now no rank may read a shard any more."""
        for bucket, start in self.buckets:
            if bucket.shard_N.data_ptr() == self.memory[start:].data_ptr():  # else it has moved
                bucket.place(None)
        self.release()

    def restore(self) -> None:
        """Make the memory, and let the shards lie in it. Collective."""
        self.make()
        for bucket, start in self.buckets:
            if bucket.storage.awaits_memory:
                bucket.place(self.own(start, bucket.shard_N.numel(), bucket.dtype))


class Peers:
    """Memory that the ranks of one group share, and copies in it.

    Attributes:
        shards: the memory of the shards that other ranks read in place.
        workspace: copies of other shards, then the inbox of reductions, then barriers.
    """

    def __init__(self, group: dist.ProcessGroup, streams: CopyStreams) -> None:
        self.group, self.streams = group, streams
        self.shards, self.workspace = _Shards(group, streams), _Area(group, streams)
        self._inbox_size = 0
        self._is_open = True
        """True: no rank reads a shard before the next :meth:`share`."""
        me, ranks = group.rank(), group.size()
        self._order = [(me + i) % ranks for i in range(1, ranks + 1)]  # itself last

    def reserve(self, bucket: Bucket) -> tuple[_Area, int]:
        """Reserve memory for the shard of ``bucket``, or for its copy, and for its reductions.

        All buckets use one inbox, of the largest size.

        Returns:
            The memory that other ranks read, and the byte where the shard begins.
        """
        size = bucket.shard_N.numel() * bucket.dtype.itemsize
        inbox = self.group.size() * size * bucket.is_trained
        self._inbox_size = max(self._inbox_size, aligned(inbox))
        if not bucket.storage.awaits_memory:
            return self.workspace, self.workspace.reserve(size)
        start = self.shards.reserve(size)
        self.shards.buckets.append((bucket, start))
        return self.shards, start

    def open(self) -> None:
        """Wait, on the device, until no rank reads a shard. Collective.

        Only the first call after :meth:`share` waits, so each rank arrives once.
        """
        if not self._is_open:
            self._barrier(_OPENED)
            self._is_open = True

    def prepare(self) -> None:
        """:meth:`open`, and make the workspace if it is not there. Collective."""
        self.open()
        self.workspace.make(self._inbox_size)

    def share(self) -> None:
        """Wait, on the device, until every rank has written the shards that others read.
        Collective."""
        self._barrier(_SHARED)
        self._is_open = False

    def _barrier(self, which: int) -> None:
        memory = self.workspace.shared
        assert memory is not None  # prepared, and not released unless it is open
        memory.arrive(which)
        memory.wait(which)

    @property
    def num_bytes(self) -> int:
        """The bytes of this rank's workspace; 0 while they are given back."""
        return 0 if self.workspace.shared is None else self.workspace.shared.parts[0].nbytes

    def release(self) -> None:
        """Give the workspace back until the next :meth:`prepare`. Collective."""
        self.open()
        self.workspace.release()

    def gather(self, parts: Sequence[torch.Tensor], out_WN: torch.Tensor) -> Wait:
        """Begin to copy every rank's shard to ``out_WN``; both are in rank order."""
        streams, (*others, me) = self.streams, self._order
        with annotate("copy_engines"):
            with streams.behind(streams.pull):
                for rank in others:
                    out_WN[rank].copy_(parts[rank], non_blocking=True)
            with streams.behind(streams.own):
                out_WN[me].copy_(parts[me], non_blocking=True)
        return streams.end(streams.pull, streams.own)

    def reduce(
        self,
        chunks_WN: torch.Tensor,
        *,
        out_N: torch.Tensor,
        accumulate: bool,
        squares_B: torch.Tensor | None,
    ) -> Wait:
        """Begin a reduction (:meth:`Transport.reduce`); all ranks begin theirs in one order."""
        memory, push = self.workspace.shared, self.streams.push
        assert memory is not None  # prepared
        (ranks, numel), (*others, me) = chunks_WN.shape, self._order
        inboxes = self.workspace.parts(self.workspace.size, ranks * numel, chunks_WN.dtype)
        with self.streams.behind(push):
            with annotate("copy_engines"):
                memory.wait(FREE)
                for rank in others:
                    target_N = inboxes[rank][me * numel :][:numel]
                    target_N.copy_(chunks_WN[rank], non_blocking=True)
                memory.arrive(WRITTEN)
                memory.wait(WRITTEN)
            inbox_WN = inboxes[me].view(ranks, numel)
            sum_chunks(
                inbox_WN,
                own_N=chunks_WN[me],
                own=me,
                out_N=out_N,
                accumulate=accumulate,
                squares_B=squares_B,
            )
            memory.arrive(FREE)
        return self.streams.end(push, kept=chunks_WN)


class PeerTransport:
    """Carries one bucket by copies among the ranks of ``peers``."""

    is_shared = True

    def __init__(self, peers: Peers, area: _Area, start: int) -> None:
        """``start``: the byte of ``area`` where the shard begins."""
        self.peers, self.area, self.start = peers, area, start

    def gather(self, shard_N: torch.Tensor, out_WN: torch.Tensor) -> Wait:
        parts = self.area.parts(self.start, len(shard_N), shard_N.dtype)  # shard_N is one of them
        return self.peers.gather(parts, out_WN)

    def reduce(
        self,
        chunks_WN: torch.Tensor,
        *,
        out_N: torch.Tensor,
        accumulate: bool,
        squares_B: torch.Tensor | None,
    ) -> Wait:
        return self.peers.reduce(chunks_WN, out_N=out_N, accumulate=accumulate, squares_B=squares_B)


class PeerSession:
    """The memory and the streams that buckets' copies among peers share."""

    def __init__(self, device: torch.device) -> None:
        self.peers: dict[str, Peers] = {}
        """The groups whose ranks copy from one another, by name."""
        self._streams = CopyStreams(device)
        self._buckets: list[tuple[Bucket, _Area, int]] = []
        """Each bucket, the memory that others read, and the byte where its shard begins."""

    def add(self, bucket: Bucket) -> None:
        """Let the ranks of ``bucket.group`` copy the bucket."""
        peers = self.peers.setdefault(
            str(bucket.group.group_name), Peers(bucket.group, self._streams)
        )
        area, start = peers.reserve(bucket)
        bucket.transport = PeerTransport(peers, area, start)
        bucket.is_read_in_place = area is peers.shards
        self._buckets.append((bucket, area, start))

    def place(self, weights: Arena) -> None:
        """Give the shards that peers read in place their memory, filled with zeros, and add it to
        the arena ``weights``. Collective."""
        for shards in (peers.shards for peers in self.peers.values()):
            if shards.buckets:
                shards.restore()
                shards.memory.zero_()
                weights.add(shards)

    @torch.inference_mode(False)  # tensors made in inference mode could not be trained later
    @torch.no_grad()
    @annotated("fsdp_share copy_engines")
    def share(self) -> None:
        for peers in self.peers.values():
            peers.prepare()
        for bucket, area, start in self._buckets:
            bucket.share(area.own(start, bucket.shard_N.numel(), bucket.dtype))
        for peers in self.peers.values():  # also if no shard of this rank was stale
            peers.share()

    def withdraw(self) -> None:
        for peers in self.peers.values():
            peers.open()

    def finish(self) -> None:
        self._streams.end(*self._streams.used)()

    def release(self) -> None:
        for peers in self.peers.values():
            peers.release()


def connect(
    buckets: Sequence[Bucket], setting: ParallelSection, device: torch.device, weights: Arena
) -> PeerSession | None:
    """Make ranks copy from one another all buckets that ``parallel.fsdp_transport`` allows.
    Collective.

    Collectives still carry buckets with a master in host memory (its copy is loaded while the
    forward runs), quantised ones, and all-reduces over replicas.

    Returns None if there is nothing to copy. Raises ConfigError: the setting is copy, but ranks
    cannot reach one another's memory.
    """
    travelling = [
        bucket
        for bucket in buckets
        if bucket.group.size() > 1
        and not (bucket.storage.has_host_master or bucket.storage.is_packed)
    ]
    groups = {str(bucket.group.group_name): bucket.group for bucket in travelling}
    near = reachable(groups, setting, device)
    session = PeerSession(device)
    for bucket in travelling:
        if str(bucket.group.group_name) in near:
            session.add(bucket)
    session.place(weights)
    return session if session.peers else None


# ---- where peers copy ---------------------------------------------------------------------------


def wants_copies(setting: ParallelSection, device_type: str) -> bool:
    """Return True if ranks of one machine use copy engines, with devices of this type."""
    name = setting.fsdp_transport
    return name == "copy" or (name == "auto" and device_type == "cuda")


def reachable(
    groups: Mapping[str, dist.ProcessGroup], setting: ParallelSection, device: torch.device
) -> list[str]:
    """Return the names of the groups whose ranks copy from one another. Collective.

    This depends on ``parallel.fsdp_transport``, and on whether they reach one another's memory.

    Raises ConfigError: the setting is copy, but ranks cannot reach one another's memory.
    """
    found: list[str] = []
    for name, group in groups.items() if wants_copies(setting, device.type) else ():
        reason = why_apart(group, device)
        if reason is None:
            found.append(name)
        elif setting.fsdp_transport == "copy":
            raise ConfigError(
                "parallel.fsdp_transport", f"'copy' is not possible: {reason}; use nccl"
            )
        else:
            ranks = dist.get_process_group_ranks(group)
            logger.info("FSDP uses collectives among ranks %s: %s", ranks, reason)
    return found


def why_apart(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why ranks of ``group`` cannot map one another's memory; None: they can. Collective."""
    devices = [(machine(), device.index)] * group.size()
    collectives.all_gather_object(devices, devices[0], group=group)
    return why_unreachable(devices)


def why_unreachable(devices: Sequence[tuple[str, int | None]]) -> str | None:
    """Return why ranks cannot map one another's memory; None: they can.

    ``devices``: the machine of each rank, and the index of its GPU there (None: a CPU).
    """
    hosts, gpus = zip(*devices, strict=True)
    if len(set(hosts)) > 1:
        return f"its {len(devices)} ranks are on {len(set(hosts))} machines, not on one"
    if gpus[0] is None:
        return None
    if len(set(gpus)) < len(gpus):
        return f"ranks see their GPUs as {', '.join(map(str, gpus))}, but each must see all GPUs"
    for a, b in permutations(gpus, 2):
        if not torch.cuda.can_device_access_peer(a, b):
            return f"GPU {a} cannot reach the memory of GPU {b}"
    return None
