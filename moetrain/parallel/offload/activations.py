"""Offload what blocks save for their backward to pinned host memory, and reload it a block ahead.

Autograd's hooks on saved tensors do it around a block's call, so they see what a compiled block
saves as well. Storages travel, each once, however many tensors view it:

    forward   a large storage of block i is copied down beside the compute that follows; its memory
              is freed when a later block begins, which waits for the copy
    backward  before that of block i, the storages of block i - 1 begin to come back

Parameters and what all blocks share stay. So do small tensors, and a stage's last blocks, which are
needed again before a copy would be done. With ``activation.offload`` auto nothing waits: what
travels in one block takes no longer than its backward, and memory is freed when the link has had
the time. Results have the same bits as without.

Left out on purpose: tensors that recomputation in eager mode keeps for itself, and storages that
two blocks save, which then travel twice.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
from torch import nn
from torch.utils import _pytree as pytree

from moetrain.kernels.memory import HostMemory
from moetrain.models.architecture import Part
from moetrain.models.layers import Context
from moetrain.models.transformer import Transformer

_PAGE = 2**24
"""Bytes of a copy: long enough for the link's full rate, short enough to waste little."""
_PAGES = 16
"""Pages that are pinned at once."""
_SMALLEST = 2**23
"""Bytes of the smallest storage that travels."""
_BYTES_PER_FLOP = 50e9 / 450e12
"""Bytes that the link carries while a block computes a FLOP, at most: over PCIe 5.0 x16, beside the
fastest MoE block on an H200. Older GPUs have slower links, but they compute slower still."""


def link_bytes(parts: Iterable[Part], seq_len: int, tokens: float) -> float:
    """Estimate the bytes that the link carries in a forward of a block of ``parts`` over a rank's
    ``tokens``, in rows of ``seq_len``."""
    products = sum(part.products_per_token(seq_len) for part in parts)
    return 2 * products * tokens * _BYTES_PER_FLOP


class _HostPages:
    """Pinned pages, and the two streams that fill and read them, which on a CPU are None."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_cuda = device, device.type == "cuda"
        self.num_pages = 0
        """All pages; the number grows to the most that were in use at once."""
        self.bytes_down = self.bytes_up = 0
        """Bytes copied so far."""
        self.free: list[tuple[torch.Tensor, Any]] = []
        """Free pages, and the event to await before they are written to."""
        self._chunks: list[HostMemory] = []
        self._down, self._up = (torch.cuda.Stream(device) if self.on_cuda else None for _ in "du")

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device) if self.on_cuda else None

    def copy_down(self, source: torch.Tensor, size: int) -> tuple[Sequence[torch.Tensor], Any]:
        """Copy ``source`` (bytes) to free pages; gives these and the event at the copy's end."""
        number = -(-size // _PAGE)
        while len(self.free) < number:
            self._chunks.append(HostMemory(self.device, "activation.offload", "set it lower, or 0"))
            chunk = self._chunks[-1].reserve(_PAGES * _PAGE)
            self.free += [(page, None) for page in chunk.split(_PAGE)]
            self.num_pages += _PAGES
        taken, self.free = self.free[-number:], self.free[:-number]
        pages, waits = zip(*taken, strict=True)
        pairs = zip(pages, source.split(_PAGE), strict=True)
        self.bytes_down += size
        return pages, self._copy(self._down, waits, [(page[: len(x)], x) for page, x in pairs])

    def copy_up(self, pages: Sequence[torch.Tensor], after: Any, target: torch.Tensor) -> Any:
        """Copy what ``pages`` hold since ``after`` to ``target``, which belongs to the current
        stream; gives the event at the copy's end."""
        pairs = zip(target.split(_PAGE), pages, strict=True)
        self.bytes_up += len(target)
        return self._copy(self._up, [after], [(x, page[: len(x)]) for x, page in pairs])

    def _copy(
        self,
        stream: torch.cuda.Stream | None,
        waits: Iterable[Any],
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> Any:
        if stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for event in dict.fromkeys(waits):
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()


class _HostCopy:
    """A storage of which the host has a copy. It gives its pages back with the last tensor that was
    saved in it."""

    here: torch.Tensor | None = None
    """The bytes on the device, until they are freed."""
    pages: Sequence[torch.Tensor] = ()

    def __init__(self, host: _HostPages, storage: torch.UntypedStorage) -> None:
        self.host, self.size = host, storage.nbytes()
        self.saved: list[tuple[torch.Tensor, int]] = []
        """Tensors that autograd saved and their versions, until the memory is freed."""
        self.here = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.stream = host.current()
        """The stream that uses ``here``, to which its memory goes back."""
        self.pages, self.last = host.copy_down(self.here, self.size)
        """The pages, and the event of the last copy, down or up."""

    def offload(self) -> None:
        """Free the memory on the device, for what its stream runs from now on."""
        for tensor, version in self.saved:
            _unchanged(tensor, version)
        self.saved = []
        if self.stream is not None:
            self.stream.wait_event(self.last)
        self.here = None

    def reload(self) -> None:
        """Begin to copy the storage to the device, unless it is there."""
        if self.here is None:
            self.here = torch.empty(self.size, dtype=torch.uint8, device=self.host.device)
            self.stream = self.host.current()
            self.last = self.host.copy_up(self.pages, self.last, self.here)

    def tensor(self, dtype: torch.dtype, *place: Any) -> torch.Tensor:
        """Give the tensor at an offset of the storage, with a shape and strides, for what is queued
        next on this stream to read."""
        self.reload()
        assert self.here is not None
        for tensor, version in self.saved:
            _unchanged(tensor, version)
        if (stream := self.host.current()) is not None:
            stream.wait_event(self.last)
        storage = self.here.untyped_storage()
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)

    def __del__(self) -> None:
        if self.here is not None and self.stream is not None:
            self.stream.wait_event(self.last)  # it may go while a copy is under way
        self.host.free += [(page, self.last) for page in self.pages]


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Give ``tensor``. Raises RuntimeError if it was changed after it was saved, as autograd does,
    which does not look where there are hooks."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that is needed for a gradient has been "
            f"changed in place: it is at version {tensor._version}, and was saved at {version}"
        )
    return tensor


class _Stash:
    """The storages that one call of a block has saved."""

    def __init__(self, foreign: frozenset[int], send: Callable[[Any], _HostCopy | None]) -> None:
        self._foreign, self._send = foreign, send
        self.found: dict[int, _HostCopy | None] = {}
        """By address, while the block runs; then the graph decides how long they live."""
        self.copies: list[ref[_HostCopy]] = []

    def pack(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Make what gives ``x`` back, which autograd is saving."""
        saved = x.detach()  # else a graph that saves an output of its own nodes would hold itself
        copy = self._copy_of(saved)
        if copy is None:
            return partial(_unchanged, saved, x._version)
        copy.saved.append((saved, x._version))
        return partial(copy.tensor, x.dtype, x.storage_offset(), x.shape, x.stride())

    def _copy_of(self, x: torch.Tensor) -> _HostCopy | None:
        if type(x) is not torch.Tensor or x.layout != torch.strided:
            return None  # a collective's, say, under way
        storage = x.untyped_storage()
        address = storage.data_ptr()
        if address in self._foreign or storage.nbytes() < _SMALLEST:
            return None
        if address not in self.found:
            self.found[address] = copy = self._send(storage)
            if copy is not None:
                self.copies.append(ref(copy))
        return self.found[address]

    def reload(self) -> None:
        """Begin to reload all that is still needed, in reverse order of saving."""
        for at in reversed(self.copies):
            if (copy := at()) is not None:
                copy.reload()


class ActivationOffload:
    """Calls the blocks of ``model``, and offloads part of what they save.

    Make it after ``set_recomputation``: it calls blocks as the model did before.

    Args:
        offload: the share of the bytes of large storages that travels, or ``auto``.
        ranges: the blocks of every stage.
        seq_len: the length of rows that ``auto`` counts with.
    """

    def __init__(
        self,
        model: Transformer,
        offload: float | Literal["auto"],
        ranges: Sequence[range],
        seq_len: int,
        device: torch.device,
    ) -> None:
        self.call, model.call_block = model.call_block, self
        self.numbers = {block: number for number, block in enumerate(model.layers)}
        self.layers, self.seq_len, self.stay = model.arch.layers(), seq_len, _stays(ranges)
        self.share = None if offload == "auto" else offload
        self.host = _HostPages(device)
        self._next = -1
        """The number of the block that goes on with the last block's micro-batch."""
        self._before: _Stash | None = None
        """The last block's."""
        self._blocks_begun = self._busy_until = 0.0
        """Time is counted in blocks begun; the link is busy until the second."""
        self._per_block = math.inf
        """Bytes that the link carries in one block; without ``auto`` there is no limit."""
        self._leaving: deque[tuple[float, ref[_HostCopy]]] = deque()
        """Copies under way, and the block at which each one's memory is freed."""
        self._seen = self._sent = self._allowed = self._room = 0.0
        """Since a micro-batch's first block: bytes of large storages, of those that travel, and
        of what ``auto`` allows; and what this block may still send."""

    def __call__(self, block: nn.Module, x_BSD: torch.Tensor, context: Context) -> Any:
        if not torch.is_grad_enabled():
            return self.call(block, x_BSD, context)
        number = self.numbers[block]
        before = self._begin(number, x_BSD)
        # What outlives the call anyway.
        others = [*block.parameters(), *block.buffers(), *pytree.tree_leaves(context)]
        tensors = (x for x in others if isinstance(x, torch.Tensor))
        foreign = frozenset(x.untyped_storage().data_ptr() for x in tensors)
        self._before = stash = _Stash(foreign, self._send)
        if number in self.stay:
            outputs = self.call(block, x_BSD, context)
        else:
            with torch.autograd.graph.saved_tensors_hooks(stash.pack, lambda get: get()):
                outputs = self.call(block, x_BSD, context)
        stash.found = {}

        def reload(_: Any) -> None:
            for one in (stash, before):
                if one is not None:
                    one.reload()

        if (node := outputs[0].grad_fn) is not None:
            node.register_prehook(reload)  # which autograd calls on the forward's stream
        return outputs

    def _begin(self, number: int, x_BSD: torch.Tensor) -> _Stash | None:
        """Begin block ``number``; gives the stash of the block before it in the micro-batch."""
        before = self._before if number == self._next else None
        if before is None:
            self._seen = self._sent = self._allowed = 0.0
        self._next = number + 1
        self._blocks_begun += 1
        if self.share is None:
            tokens = x_BSD.numel() / x_BSD.shape[-1]
            self._per_block = link_bytes(self.layers[number], self.seq_len, tokens)
        self._allowed += self._per_block
        self._room = 2 * self._per_block  # its backward has twice the products
        while self._leaving and self._leaving[0][0] <= self._blocks_begun:
            if (copy := self._leaving.popleft()[1]()) is not None:
                copy.offload()
        return before

    def _send(self, storage: torch.UntypedStorage) -> _HostCopy | None:
        """Begin to offload ``storage``, unless that would be too much."""
        size = storage.nbytes()
        self._seen += size
        limit = self._allowed if self.share is None else self.share * self._seen
        if self._sent + size > limit or size > self._room:
            return None
        self._sent += size
        self._room -= size
        # A compiled block saves all at its end; then there is the next one to copy beside.
        self._busy_until = max(self._busy_until, self._blocks_begun + 1) + size / self._per_block
        copy = _HostCopy(self.host, storage)
        self._leaving.append((max(self._busy_until, self._blocks_begun + 2), ref(copy)))
        return copy


def _stays(ranges: Sequence[range]) -> frozenset[int]:
    """The blocks of which nothing travels, in stages of these blocks: each one's last, and of the
    last stage, whose backward follows its forward, the one before it too."""
    ends = [blocks.stop - 1 for blocks in ranges]
    return frozenset((*ends, ends[-1] - 1))
