"""Copies within a machine in place of collectives (``parallel.fsdp_transport``).

Copy engines move bytes between GPUs while every SM computes, and no rank waits for a peer to send.
Each rank of an FSDP group has one piece of memory that all of them map:

    | a shard, as it is gathered | another | ... | inbox: [W, N] of the reduction under way |

A gather reads the peers' shards. A reduction writes row r of a rank's gradients into row ``rank``
of r's inbox. Rank r sums its inbox just as it sums what an all-to-all brings: the bits are the
same. Both run in streams of their own. They begin at rank + 1, so that no two ranks are at the same
peer.

Barriers on the device keep writers and readers apart. Shards are written by an update, after the
gradients' norm was summed over all ranks, and between :meth:`Peers.open` and :meth:`Peers.barrier`.
They are read only after the second. A reduction has two barriers more. It arrives at one when it
has written to the inboxes, and waits there before it sums its own. It arrives at the other when it
has summed, and the next reduction waits there before it writes.

To arrive is to write 1 to a word of each peer, who sets it to 0 after waiting. There is no count,
which a CUDA graph could not hold. Barriers come in pairs, and no rank passes one of a pair before
all have waited at the other. So no rank arrives twice before a peer has waited.

No SM waits at a barrier. A kernel that waits for another GPU holds a multiprocessor for as long,
and a grouped product that begins one program on each SM waits until that one is free. Stream memory
operations write and wait for words of memory instead, which the front end of the GPU does. Nothing
times out: after a rank died the others wait until whoever started them, or torch's monitor of NCCL,
ends them.

On CPUs processes map the same memory, and copies are done at once. Left out on purpose: several
machines, multicast, sums on the way, and shards that lie nowhere but in peers' memory.

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
from moetrain.runtime.arena import aligned
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

        Raises torch.OutOfMemoryError if there is too little, even without torch's caches.
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
        self.parts = [part[:size] for part in parts]
        # Each rank's words, by barrier and by the peer that writes it: 1 if that peer has arrived.
        words = [part[start:].view(torch.int32).view(len(_BARRIERS), ranks, 1) for part in parts]
        others = [rank for rank in range(ranks) if rank != me]
        theirs = [[words[rank][barrier, me] for rank in others] for barrier in _BARRIERS]
        mine = [[words[me][barrier, rank] for rank in others] for barrier in _BARRIERS]
        self._arrive = [on_words([("write", word, 1) for word in row]) for row in theirs]
        taken = [[(name, w, n) for w in row for name, n in _TAKE] for row in mine]
        self._wait = [on_words(row) for row in taken]
        self._own, self._handle = own, handle  # parts do not keep these alive
        DeviceBytes.add(device, whole)
        weakref.finalize(self, DeviceBytes.add, device, -whole).atexit = False

    def arrive(self, barrier: int) -> None:
        """Signal to all ranks once the current stream has come here."""
        self._arrive[barrier]()

    def wait(self, barrier: int) -> None:
        """Make the current stream wait until all ranks have arrived since it last waited."""
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
            os.ftruncate(file, ranks * size)
        dist.broadcast_object_list(name, group=group, group_src=0)
        whole = torch.from_file(name[0], shared=True, size=ranks * size, dtype=torch.uint8)
        self.parts = list(split(whole, size))
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
        used: the streams that have had work. A CUDA graph's capture has only these in it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Sums have priority: they are short, and peers wait for them. What does not leave the
        # device has a stream of its own: busy SMs may copy it, and nothing else should wait for it.
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


class Peers:
    """Memory that the ranks of one group share, and copies in it."""

    def __init__(self, group: dist.ProcessGroup, streams: CopyStreams) -> None:
        self.group, self.streams = group, streams
        self._inbox_start = self._inbox_size = 0
        self._memory: _DeviceMemory | _MappedMemory | None = None
        self._found: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}
        me, ranks = group.rank(), group.size()
        self._order = [(me + i) % ranks for i in range(1, ranks + 1)]  # itself last

    def reserve(self, size: int, inbox: int) -> int:
        """Reserve memory for a shard, before the first :meth:`open`.

        Args:
            size: bytes of the shard.
            inbox: bytes of its reductions. All shards use one inbox, of the largest size.

        Returns:
            The byte where the shard begins.
        """
        start = self._inbox_start
        self._inbox_start += aligned(size)
        self._inbox_size = max(self._inbox_size, aligned(inbox))
        return start

    def open(self) -> None:
        """Wait, on the device, until no rank reads a shard. The first call makes the memory.
        Collective."""
        if self._memory is None:
            size = self._inbox_start + self._inbox_size
            self._memory = self.streams.shared(size, self.group)
        self.barrier(_OPENED)

    def barrier(self, which: int = _SHARED) -> None:
        """Wait, on the device, until every rank has written the shards that others read."""
        assert self._memory is not None  # opened
        self._memory.arrive(which)
        self._memory.wait(which)

    @property
    def num_bytes(self) -> int:
        """The bytes of this rank that the others read and write; 0 while they are given back."""
        return 0 if self._memory is None else self._memory.parts[0].nbytes

    def release(self) -> None:
        """Give the memory back until the next :meth:`open`. Collective.

        The host waits until no rank maps it any more, since others may need the memory at once.
        """
        if self._memory is not None:
            self._memory = None
            self._found.clear()
            collectives.barrier(self.group)

    def own(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's ``numel`` elements from byte ``start`` on."""
        return self._parts(start, numel, dtype)[self.group.rank()]

    def _parts(self, start: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return every rank's view of the same. Views are cached: a step would make thousands."""
        key = (start, numel, dtype)
        if key not in self._found:
            assert self._memory is not None  # opened
            end = start + numel * dtype.itemsize
            self._found[key] = [part[start:end].view(dtype) for part in self._memory.parts]
        return self._found[key]

    def gather(self, start: int, out_WN: torch.Tensor) -> Wait:
        """Begin to copy every rank's shard at byte ``start`` to ``out_WN``, in rank order."""
        parts, streams = self._parts(start, out_WN.shape[1], out_WN.dtype), self.streams
        *others, me = self._order
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
        memory, push = self._memory, self.streams.push
        assert memory is not None  # opened
        (ranks, numel), (*others, me) = chunks_WN.shape, self._order
        inboxes = self._parts(self._inbox_start, ranks * numel, chunks_WN.dtype)
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

    def __init__(self, peers: Peers, start: int) -> None:
        """``start``: the byte of the shared memory where the shard begins."""
        self.peers, self.start = peers, start

    def gather(self, shard_N: torch.Tensor, out_WN: torch.Tensor) -> Wait:
        return self.peers.gather(self.start, out_WN)  # which reads shard_N in the shared memory

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
        self._buckets: list[tuple[Bucket, Peers, int]] = []
        """Each bucket, the memory that has its shard, and the byte where that begins."""

    def add(self, bucket: Bucket) -> None:
        """Let the ranks of ``bucket.group`` copy the bucket."""
        peers = self.peers.setdefault(
            str(bucket.group.group_name), Peers(bucket.group, self._streams)
        )
        size = bucket.shard_N.numel() * bucket.dtype.itemsize
        inbox = bucket.group.size() * size * bucket.is_trained
        start = peers.reserve(size, inbox)
        bucket.transport = PeerTransport(peers, start)
        self._buckets.append((bucket, peers, start))

    @torch.inference_mode(False)  # tensors made in inference mode could not be trained later
    @torch.no_grad()
    @annotated("fsdp_share copy_engines")
    def share(self) -> None:
        for peers in self.peers.values():
            peers.open()
        for bucket, peers, start in self._buckets:
            bucket.share(peers.own(start, bucket.shard_N.numel(), bucket.dtype))
        for peers in self.peers.values():  # also if no shard of this rank was stale
            peers.barrier()

    def finish(self) -> None:
        self._streams.end(*self._streams.used)()

    def release(self) -> None:
        for peers in self.peers.values():
            peers.release()


def connect(
    buckets: Sequence[Bucket], setting: ParallelSection, device: torch.device
) -> PeerSession | None:
    """Let ranks copy the buckets that ``parallel.fsdp_transport`` allows. Collective.

    Collectives still carry buckets with a master in host memory (its copy is loaded while the
    forward runs), quantised ones, and all-reduces over replicas.

    Returns None if there is nothing to copy. Raises ConfigError: the setting is copy, and ranks do
    not reach one another's memory.
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
    return session if session.peers else None


# ---- where peers copy ---------------------------------------------------------------------------


def wants_copies(setting: ParallelSection, device_type: str) -> bool:
    """Return True if ranks of one machine use copy engines, with devices of this type."""
    name = setting.fsdp_transport
    return name == "copy" or (name == "auto" and device_type == "cuda")


def reachable(
    groups: Mapping[str, dist.ProcessGroup], setting: ParallelSection, device: torch.device
) -> list[str]:
    """Return the names of the groups whose ranks copy by ``parallel.fsdp_transport``. Collective.

    Raises ConfigError: the setting is copy, and ranks do not reach one another's memory.
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
