"""Memory that leaves for the host and comes back while nobody's tensors change.

An :class:`Arena` holds one kind of a rank's long-lived state. While it is away its memory is free
for others; afterwards every tensor in it is the one that it was: the same object, over the same
storage, with the same values and on a GPU at the same address
(:mod:`moetrain.parallel.fsdp.mapped`), so that an optimizer, views, graphs and compiled code need
not know.

Elsewhere, and where memory is to come and go by itself (``fixed=False``), the storage is emptied
and filled again: its memory may then lie elsewhere.

Left out on purpose: parts of an arena.
"""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

import torch

from moetrain.parallel.fsdp.mapped import AddressRange, can_map
from moetrain.parallel.offload.pinned import HostMemory

ALIGNMENT = 256
"""Bytes: what CUDA's own allocations begin at, and more than any kernel asks for."""
GROWTH = 32 << 20
"""Bytes: what memory behind a range grows by at least. Much less is copied below link speed."""


class OffloadedError(RuntimeError):
    """Something was asked of state that is in host memory."""


class _Emptied:
    """Memory of torch's allocator: that of one tensor."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def free(self) -> None:
        self.memory.untyped_storage().resize_(0)

    def restore(self) -> None:
        self.memory.untyped_storage().resize_(self.memory.nbytes)


class _Unmapped:
    """Memory behind a part of a range."""

    def __init__(self, addresses: AddressRange, start: int, size: int) -> None:
        self.addresses, self.start, self.size = addresses, start, size
        self.restore()
        self.memory = addresses.tensor(start, size)

    def free(self) -> None:
        self.addresses.free(self.start)

    def restore(self) -> None:
        if not self.addresses.is_backed(self.start):  # as far as one that failed came
            self.addresses.back(self.start, self.size)


class Arena:
    """The state called ``name`` (a plural) on one device.

    ``fixed``: it stays for as long as the arena, and on a GPU at its address. Else memory goes with
    the last use of the tensor that :meth:`empty` gave.
    """

    def __init__(self, name: str, device: torch.device, *, fixed: bool = True) -> None:
        self.name, self.device, self.fixed = name, device, fixed
        self.is_away = False
        self._pieces: list[_Emptied | _Unmapped] = []
        self._loose: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        """What is not fixed."""
        self._numbers = count()
        self._gone: list[tuple[_Emptied | _Unmapped, torch.Tensor]] = []
        """What is away, and its bytes in host memory; none, if it has no values."""
        self._addresses: AddressRange | None = None
        self._taken = self._backed = 0
        """Of the range: bytes that are tensors', and that have memory."""
        remedy = "offload less, or use a machine with more memory"
        self._host = HostMemory(device, f"offloading {name}", remedy)
        self._arrived: torch.cuda.Event | None = None
        """Of copies that the current stream has not waited for."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new flat tensor of any values. Raises :class:`OffloadedError`."""
        self.need()
        size = numel * dtype.itemsize
        if size and self.fixed and can_map(self.device):
            return self._mapped(aligned(size))[:size].view(dtype)
        if not self.fixed:
            return self.loose(numel, dtype)
        block = torch.empty(numel, dtype=dtype, device=self.device)
        self._pieces.append(_Emptied(block))
        return block

    def loose(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """:meth:`empty` in an arena that is not fixed, whatever this one is."""
        self.need()
        block = torch.empty(numel, dtype=dtype, device=self.device)
        self._loose[next(self._numbers)] = block
        return block

    def _mapped(self, size: int) -> torch.Tensor:
        if self._addresses is None:
            self._addresses = AddressRange(self.device)
        start, end = self._taken, self._taken + size
        if end > self._backed:
            step = self._addresses.granularity
            more = -(-max(end - self._backed, GROWTH) // step) * step
            self._pieces.append(_Unmapped(self._addresses, self._backed, more))
            self._backed += more
        self._taken = end
        return self._addresses.tensor(start, size)

    def need(self) -> None:
        """Let what the device is given from here on find the values.

        Raises:
            OffloadedError: they are in host memory.
        """
        if self.is_away:
            raise OffloadedError(f"{self.name} are offloaded: call Engine.reload() first")
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)

    @torch.no_grad()
    def offload(self, stream: torch.cuda.Stream | None, *, keep: bool = True) -> None:
        """Copy everything to host memory, over ``stream``, and free the device's as copies end.

        ``keep``: else there are no values worth copying, and any will be there afterwards.

        Raises:
            RunFailed: the system does not give as much pinned memory.
        """
        self.need()
        pieces = [*self._pieces, *map(_Emptied, self._loose.values())]
        sizes = [piece.memory.nbytes if keep else 0 for piece in pieces]
        parts = self._host.reserve(sum(sizes))[: sum(sizes)].split(sizes)
        gone, copied = list(zip(pieces, parts, strict=True)), []
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for piece, part in gone:
                part.copy_(_bytes(piece.memory)[: len(part)], non_blocking=True)
                copied.append(None if stream is None else stream.record_event())
        self.is_away, self._gone = True, gone
        for (piece, _), event in zip(gone, copied, strict=True):
            if event is not None:
                event.synchronize()
            piece.free()

    @torch.no_grad()
    def reload(self, stream: torch.cuda.Stream | None) -> None:
        """Inverse of :meth:`offload`; copies are under way until :meth:`need`.

        Raises:
            torch.OutOfMemoryError: others have too much of the device's memory.
        """
        if not self.is_away:
            return
        if stream is not None:  # which memory that others had is used by
            stream.wait_stream(torch.cuda.current_stream(self.device))
        for piece, part in self._gone:
            piece.restore()  # while the one before is copied
            with torch.cuda.stream(stream):
                _bytes(piece.memory)[: len(part)].copy_(part, non_blocking=True)
        self.is_away, self._gone = False, []
        if stream is not None:
            self._arrived = torch.cuda.Event()
            self._arrived.record(stream)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def aligned(size: int) -> int:
    """``size`` bytes, filled up to whole :data:`ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
