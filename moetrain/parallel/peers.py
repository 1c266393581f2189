"""Ranks of one machine that read and write one another's memory, instead of by collectives.

Copy engines move bytes between GPUs while every SM computes, and nobody waits for a peer to send.
The ranks of an FSDP group share one piece of memory each:

    | a shard, as it is gathered | another | ... | inbox: [W, N] of the reduction under way |

A gather reads the peers' shards; a reduction writes row r of a rank's gradients into row ``rank``
of r's inbox, which r adds up by the kernel that adds up what an all-to-all brings, in rank order:
the same bits. Both go on in streams of their own, beginning at rank + 1, so that no two ranks are
at the same peer. Worked example, 3 ranks: rank 1 reads from 2, then 0, and its own beside them.

What keeps them apart are barriers, in memory on the device: no host waits, and of a rank that is
gone the next collective tells, which is the gradients' norm. Shards are written by an update, after
that norm was summed over all ranks, and between the barriers of :meth:`Peers.open` and
:meth:`Peers.barrier`; they are read only after the second. A reduction has one barrier before it
writes, when every rank has added up the one before, and one before it adds up.

On CPUs it is the same with memory that processes map, and with copies that are done at once.

Left out on purpose: several machines, multicast, and sums on the way (a bf16 ring's).

Legend: W ranks of the group, N numbers of one rank's shard of a bucket.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import _symmetric_memory

from moetrain.annotate import annotate
from moetrain.kernels.reduction import sum_chunks
from moetrain.parallel.arena import aligned
from moetrain.parallel.mapped import MemoryOp, count_bytes, do_memory_ops

_SHARDS, _GRADIENTS, _CHANNELS = 0, 1, 2
"""Barriers' channels, one for each stream that has barriers, and how many they are."""
_FLAG_BYTES = 4


class PeerMemory(Protocol):
    """As many bytes of every rank of a group, which all of them read and write."""

    parts: list[torch.Tensor]
    """uint8, by rank."""

    def barrier(self, channel: int) -> None:
        """Let the current stream go on when all ranks' have come to theirs of ``channel``."""
        ...


class DeviceMemory:
    """:class:`PeerMemory` of GPUs. Making it is collective, and waits for the host.

    Barriers are counters in memory, one for each pair of ranks and each channel, which streams
    write and wait for by themselves. A kernel could not: while products hold every SM there is no
    room for it, so that each would come a product late.
    """

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        """Raises torch.OutOfMemoryError: there is too little, even without what torch keeps."""
        self.device, me, ranks = device, group.rank(), group.size()
        flags = aligned(size)
        whole = flags + aligned(_CHANNELS * ranks * _FLAG_BYTES)
        torch.cuda.empty_cache()
        try:
            # Not symmetric_memory.empty, which in newer versions keeps what was freed.
            own = _SymmetricMemory.empty_strided_p2p((whole,), (1,), torch.uint8, device)
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(f"{size / 2**30:.2f} GiB for peers: {error}") from None
            raise
        own[flags:].zero_()
        torch.cuda.synchronize(device)  # before others, whom this meets next, write there
        handle: Any = _symmetric_memory.rendezvous(own, group)
        self.parts = [handle.get_buffer(r, (size,), torch.uint8) for r in range(ranks)]
        self._own, self._handle = own, handle  # which parts do not keep
        self._ops = []
        for channel in range(_CHANNELS):
            start = flags + channel * ranks * _FLAG_BYTES
            others = [r for r in range(ranks) if r != me]
            writes = [self.parts[r].data_ptr() + start + me * _FLAG_BYTES for r in others]
            waits = [self.parts[me].data_ptr() + start + r * _FLAG_BYTES for r in others]
            ops = [*map(MemoryOp.write, writes), *map(MemoryOp.wait, waits)]
            self._ops.append((MemoryOp * len(ops))(*ops))
        count_bytes(device, whole)
        weakref.finalize(self, count_bytes, device, -whole).atexit = False

    def barrier(self, channel: int) -> None:
        ops = self._ops[channel]
        for op in ops:
            op.value = (op.value + 1) % 2**32
        do_memory_ops(torch.cuda.current_stream(self.device), ops)


class MappedMemory:
    """:class:`PeerMemory` of processes on CPUs. Making it is collective."""

    def __init__(self, size: int, group: dist.ProcessGroup) -> None:
        self.group, ranks = group, group.size()
        file = os.memfd_create("moetrain") if group.rank() == 0 else None
        name = [f"/proc/{os.getpid()}/fd/{file}"]  # in no folder, so that nothing is ever left
        if file is not None:
            os.ftruncate(file, ranks * size)
        dist.broadcast_object_list(name, group=group, group_src=0)
        whole = torch.from_file(name[0], shared=True, size=ranks * size, dtype=torch.uint8)
        self.parts = list(whole.split(size))
        dist.barrier(group)
        if file is not None:
            os.close(file)

    def barrier(self, channel: int) -> None:
        dist.barrier(self.group)


class Copied(NamedTuple):
    """Copies under way, or done."""

    lanes: tuple[Lane, ...]
    done: tuple[torch.cuda.Event, ...]
    """None of them: they are done."""
    kept: tuple[torch.Tensor, ...] = ()
    """What they read: its memory must not be another's before."""

    @classmethod
    def by(cls, *lanes: Lane, kept: tuple[torch.Tensor, ...] = ()) -> Copied:
        """What ``lanes`` have been given so far."""
        streams = [lane.stream for lane in lanes if lane.stream is not None]
        done = tuple(torch.cuda.Event() for _ in streams)
        for stream, event in zip(streams, done, strict=True):
            event.record(stream)
        return cls(lanes, done, kept)

    def wait(self) -> None:
        """Let the current stream go on when they are done."""
        for event in self.done:
            torch.cuda.current_stream(self.lanes[0].device).wait_event(event)

    finish = wait


class Lane:
    """A stream of copies; on a CPU none, and copies are done at once."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        on_cuda = device.type == "cuda"
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=priority) if on_cuda else None

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Meanwhile it gets the work, behind all that the current stream has."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield


class Lanes(NamedTuple):
    """One rank's, whichever group copies are for."""

    pull: Lane
    own: Lane
    """What does not leave the device: it may be SMs that copy it, and those are taken. Nothing else
    is to wait for that."""
    push: Lane

    @classmethod
    def of(cls, device: torch.device) -> Lanes:
        """Those of ``device``. What has to be computed comes before others' work: it is short, and
        peers wait for it."""
        return cls(Lane(device), Lane(device, priority=-1), Lane(device, priority=-1))


class Peers:
    """What the ranks of one group share, and copy."""

    def __init__(self, group: dist.ProcessGroup, lanes: Lanes) -> None:
        self.group, self.lanes = group, lanes
        self._inbox_start = self._inbox_size = 0
        self._memory: PeerMemory | None = None
        self._found: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}
        me, ranks = group.rank(), group.size()
        self._order = [(me + i) % ranks for i in range(1, ranks + 1)]  # itself last

    def reserve(self, size: int) -> int:
        """The place of ``size`` bytes for a shard, on every rank; before the first :meth:`open`."""
        start = self._inbox_start
        self._inbox_start += aligned(size)
        return start

    def reserve_inbox(self, size: int) -> None:
        """Be large enough for a reduction of ``size`` bytes, before the first :meth:`open`."""
        self._inbox_size = max(self._inbox_size, aligned(size))

    @property
    def num_bytes(self) -> int:
        """Of this rank's memory, once it is there."""
        return self._inbox_start + self._inbox_size

    def open(self) -> None:
        """Wait, on the device, until no rank reads any shard; the first time, make the memory.
        Collective."""
        if self._memory is None:
            device = self.lanes.pull.device
            if device.type == "cuda":
                self._memory = DeviceMemory(self.num_bytes, self.group, device)
            else:
                self._memory = MappedMemory(self.num_bytes, self.group)
        self.barrier()

    def barrier(self) -> None:
        """Wait, on the device, until every rank's shards are what others are to read."""
        assert self._memory is not None  # opened
        self._memory.barrier(_SHARDS)

    def release(self) -> None:
        """Give the memory back until the next :meth:`open`. All ranks do."""
        self._memory = None
        self._found.clear()

    def own(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """This rank's ``numel`` numbers at the place ``start``."""
        return self._parts(start, numel, dtype)[self.group.rank()]

    def _parts(self, start: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's. Kept: a step would make thousands of views."""
        key = (start, numel, dtype)
        if key not in self._found:
            assert self._memory is not None  # opened
            end = start + numel * dtype.itemsize
            self._found[key] = [part[start:end].view(dtype) for part in self._memory.parts]
        return self._found[key]

    def gather(self, start: int, out_WN: torch.Tensor) -> Copied:
        """Begin to copy every rank's shard at the place ``start`` to ``out_WN``, in rank order."""
        parts, (pull, own, _) = self._parts(start, out_WN.shape[1], out_WN.dtype), self.lanes
        *others, me = self._order
        with annotate("copy_engines"):
            with pull.behind():
                for rank in others:
                    out_WN[rank].copy_(parts[rank], non_blocking=True)
            with own.behind():
                out_WN[me].copy_(parts[me], non_blocking=True)
        return Copied.by(pull, own)

    def reduce(
        self,
        chunks_WN: torch.Tensor,
        *,
        out_N: torch.Tensor,
        accumulate: bool,
        squares_B: torch.Tensor | None,
    ) -> Copied:
        """Begin what :func:`~moetrain.parallel.collectives.reduce_scatter_start` does in the mode
        fp32_accum; all ranks begin theirs in the same order."""
        memory, push = self._memory, self.lanes.push
        assert memory is not None  # opened
        (ranks, numel), (*others, me) = chunks_WN.shape, self._order
        inboxes = self._parts(self._inbox_start, ranks * numel, chunks_WN.dtype)
        with push.behind():
            with annotate("copy_engines"):
                memory.barrier(_GRADIENTS)
                for rank in others:
                    target_N = inboxes[rank][me * numel :][:numel]
                    target_N.copy_(chunks_WN[rank], non_blocking=True)
                memory.barrier(_GRADIENTS)
            inbox_WN = inboxes[me].view(ranks, numel)
            own = {"own_N": chunks_WN[me], "own": me, "squares_B": squares_B}
            sum_chunks(inbox_WN, out_N=out_N, accumulate=accumulate, **own)
        return Copied.by(push, kept=(chunks_WN,))
