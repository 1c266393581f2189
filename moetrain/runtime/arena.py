"""A rank's long-lived state, offloaded to pinned host memory and reloaded.

An :class:`Arena` holds one kind of state. While it is offloaded, its memory is free for other uses.
After a reload every tensor is the same object, over the same storage, with the same values. On a
GPU it also has the same address, so that an optimizer, views, CUDA graphs and compiled code need
not know. For that, memory is unmapped from reserved addresses, and mapped there again
(:mod:`moetrain.runtime.memory`). In two cases the storage is resized to nothing and back instead,
and may then have another address: if the device cannot map memory, and if memory is to be freed
with its last use (``fixed=False``). Memory that other processes map is a :class:`Piece` of the code
that owns it, which points the same tensors to new storages.

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
"""The fewest bytes that are mapped at a time. Much smaller pieces do not reach the link's rate."""


def aligned(size: int) -> int:
    """Round ``size`` bytes up to whole :data:`_ALIGNMENT`."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class OffloadedError(RuntimeError):
    """State was used while it was offloaded."""


class Piece(Protocol):
    """Memory of an arena that is freed and restored as a whole."""

    @property
    def memory(self) -> torch.Tensor:
        """The memory, contiguous and of any dtype. It is not read between free and restore."""
        ...

    def free(self) -> None:
        """Give the memory back. The tensors in it remain as objects, without values."""
        ...

    def restore(self) -> None:
        """Give the tensors memory again, with any content, unless they still have it."""
        ...


class _Resized:
    """A tensor in memory of torch's allocator, whose storage is resized."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def free(self) -> None:
        self.memory.untyped_storage().resize_(0)

    def restore(self) -> None:
        self.memory.untyped_storage().resize_(self.memory.nbytes)


class _Mapped:
    """Memory that is mapped to a part of an address range."""

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

    With ``fixed`` its memory lasts as long as the arena and, on a GPU, keeps its address. Without
    ``fixed`` memory is freed with the last use of the tensor that :meth:`empty` returned.
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
        """Each offloaded piece and its bytes in host memory; no bytes if values are not kept."""
        self._addresses: AddressRange | None = None
        self._taken = self._backed = 0
        """The number of bytes of the range that tensors take, and of those that have memory."""
        remedy = "offload less, or use a machine with more memory"
        self._host = HostMemory(device, f"offloading {name}", remedy)
        self._arrived: Any = None
        """The event after the copies of the last reload; None once a stream waits for it."""

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
        """Return a new tensor that is not fixed, also in a fixed arena.

        Raises :class:`OffloadedError`.
        """
        self.need()
        block = torch.empty(numel, dtype=dtype, device=self.device)
        self._loose[next(self._keys)] = block
        return block

    def need(self) -> None:
        """Make the current stream wait until the values are there, after a reload.

        Raises OffloadedError: they are offloaded.
        """
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
            OffloadedError: everything is offloaded already.
            RunFailed: the system cannot pin that much host memory.
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
        """Undo :meth:`offload`. Values may be used after :meth:`need`, which waits for the copies.

        Raises:
            torch.OutOfMemoryError: other users have too much of the device's memory.
        """
        if not self.is_offloaded:
            return
        if stream is not None:  # new memory may be in use by kernels that were queued before
            stream.wait_stream(torch.cuda.current_stream(self.device))
        for piece, part in self._offloaded:
            piece.restore()  # while the piece before it is copied
            with torch.cuda.stream(stream):
                piece.memory.view(torch.uint8)[: len(part)].copy_(part, non_blocking=True)
        self.is_offloaded = False
        self._offloaded = []
        self._arrived = None if stream is None else stream.record_event()
