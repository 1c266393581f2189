"""A rank's long-lived state, offloaded to pinned host memory and reloaded.

An :class:`Arena` holds one kind of state. While it is offloaded its memory is free for other uses.
After a reload every tensor is what it was: the same object, over the same storage, with the same
values and on a GPU at the same address, so that an optimizer, views, graphs and compiled code need
not know. For that, memory is mapped behind reserved addresses and unmapped
(:mod:`moetrain.runtime.memory`). Where a device cannot do so, and where memory is to be freed with
its last use (``fixed=False``), the storage is emptied and filled again, and may then have another
address. Memory that other processes map is a :class:`Piece` of its owner, who points the same
tensors to new storages.

Left out on purpose: offloading parts of an arena.
"""

import weakref
from itertools import count
from typing import Any, Protocol

import torch

from moetrain.runtime.memory import AddressRange, HostMemory, can_map

_ALIGNMENT = 256
"""Alignment in bytes of CUDA's own allocations; no kernel needs more."""
_GROWTH = 32 << 20
"""Bytes that are mapped at a time at least. Much smaller pieces are copied below link speed."""


def aligned(size: int) -> int:
    """Round ``size`` bytes up to whole :data:`_ALIGNMENT`."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class OffloadedError(RuntimeError):
    """State was used while it was offloaded."""


class Piece(Protocol):
    """Memory of an arena that is freed and restored as a whole."""

    @property
    def memory(self) -> torch.Tensor:
        """The memory, contiguous and of any dtype. It is asked for only while it is there."""
        ...

    def free(self) -> None:
        """Give the memory back. The tensors in it stay, without values."""
        ...

    def restore(self) -> None:
        """Give the tensors memory again, of any content, unless they have it."""
        ...


class _Resized:
    """A tensor in torch's allocator."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def free(self) -> None:
        self.memory.untyped_storage().resize_(0)

    def restore(self) -> None:
        self.memory.untyped_storage().resize_(self.memory.nbytes)


class _Mapped:
    """Memory mapped behind a part of a range."""

    def __init__(self, addresses: AddressRange, start: int, size: int) -> None:
        self.addresses, self.start, self.size = addresses, start, size
        self.restore()
        self.memory = addresses.tensor(start, size)

    def free(self) -> None:
        self.addresses.free(self.start)

    def restore(self) -> None:
        self.addresses.back(self.start, self.size)


class Arena:
    """The state called ``name`` (a plural) on one device.

    With ``fixed`` memory is kept as long as the arena, on a GPU at its address. Without, it is
    freed with the last use of the tensor that :meth:`empty` returned.
    """

    def __init__(self, name: str, device: torch.device, *, fixed: bool = True) -> None:
        self.name, self.device, self.fixed = name, device, fixed
        self.is_offloaded = False
        self._pieces: list[Piece] = []
        """Fixed memory."""
        self._loose: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        """Tensors that are not fixed."""
        self._keys = count()
        self._offloaded: list[tuple[Piece, torch.Tensor]] = []
        """Each offloaded piece and its bytes in host memory; no bytes where values are not kept."""
        self._addresses: AddressRange | None = None
        self._taken = self._backed = 0
        """Bytes of the range that tensors take, and that have memory."""
        remedy = "offload less, or use a machine with more memory"
        self._host = HostMemory(device, f"offloading {name}", remedy)
        self._arrived: Any = None
        """The event after the last reload's copies, until a stream waits for it."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new flat tensor without values. Raises :class:`OffloadedError`."""
        size = numel * dtype.itemsize
        if not self.fixed:
            return self.loose(numel, dtype)
        self.need()
        if not (size and can_map(self.device)):
            block = torch.empty(numel, dtype=dtype, device=self.device)
            self._pieces.append(_Resized(block))
            return block
        if self._addresses is None:
            self._addresses = AddressRange(self.device)
        start, self._taken = self._taken, self._taken + aligned(size)
        if self._taken > self._backed:
            step = self._addresses.granularity
            more = -(-max(self._taken - self._backed, _GROWTH) // step) * step
            self._pieces.append(_Mapped(self._addresses, self._backed, more))
            self._backed += more
        return self._addresses.tensor(start, aligned(size))[:size].view(dtype)

    def add(self, piece: Piece) -> None:
        """Offload and reload ``piece`` with the arena's own memory."""
        self._pieces.append(piece)

    def loose(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor as :meth:`empty` does in an arena that is not fixed."""
        self.need()
        block = torch.empty(numel, dtype=dtype, device=self.device)
        self._loose[next(self._keys)] = block
        return block

    def need(self) -> None:
        """Let the device's work from here on use the values. Raises :class:`OffloadedError`."""
        if self.is_offloaded:
            raise OffloadedError(f"{self.name} are offloaded: call Engine.reload() first")
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)

    @torch.no_grad()
    def offload(self, stream: torch.cuda.Stream | None, *, keep: bool = True) -> None:
        """Copy everything to host memory, over ``stream``, and free each piece once it is copied.

        Without ``keep`` nothing is copied, and values are undefined after the reload.

        Raises:
            RunFailed: the system does not have as much pinned memory.
        """
        self.need()
        pieces = [*self._pieces, *map(_Resized, self._loose.values())]
        sizes = [piece.memory.nbytes if keep else 0 for piece in pieces]
        parts = self._host.reserve(sum(sizes))[: sum(sizes)].split(sizes)
        offloaded, copied = list(zip(pieces, parts, strict=True)), []
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for piece, part in offloaded:
                part.copy_(piece.memory.view(torch.uint8)[: len(part)], non_blocking=True)
                copied.append(None if stream is None else stream.record_event())
        self.is_offloaded = True
        self._offloaded = offloaded
        for (piece, _), event in zip(offloaded, copied, strict=True):
            if event is not None:
                event.synchronize()
            piece.free()

    @torch.no_grad()
    def reload(self, stream: torch.cuda.Stream | None) -> None:
        """Invert :meth:`offload`; copies are under way until :meth:`need`.

        Raises:
            torch.OutOfMemoryError: others have too much of the device's memory.
        """
        if not self.is_offloaded:
            return
        if stream is not None:  # new memory may be in use by kernels that were queued before
            stream.wait_stream(torch.cuda.current_stream(self.device))
        for piece, part in self._offloaded:
            piece.restore()  # while the one before is copied
            with torch.cuda.stream(stream):
                piece.memory.view(torch.uint8)[: len(part)].copy_(part, non_blocking=True)
        self.is_offloaded = False
        self._offloaded = []
        self._arrived = None if stream is None else stream.record_event()
