"""A bucket of parameters that are gathered and reduced together.

Its members lie end to end in one flat shard, each padded to the same length on every rank. The
bucket knows that layout, when the shard is gathered, and how gradients are summed. Its storage
(:mod:`moetrain.parallel.fsdp.storage`) knows where the shard's elements are, and its transport
(:mod:`moetrain.parallel.fsdp.transport`) how they travel.

Legend: W ranks of the FSDP axis, N elements of one rank's shard of a bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from moetrain.kernels.optim.reduction import num_blocks, sum_chunks
from moetrain.models.rules import Rule
from moetrain.parallel.fsdp.storage.protocol import Storage, nowhere
from moetrain.parallel.fsdp.transport.protocol import Transport, Wait
from moetrain.parallel.mesh import Layout, Sliced
from moetrain.runtime.arena import Arena, aligned
from moetrain.runtime.typed import vector_norm


class GatherBuffer:
    """Memory that holds the gathered parameters of one unit at a time, at one address.

    Attributes:
        size: its bytes, which grow until the first use.
        owner: the unit that is unsharded in it now.
        content_of: the unit that last filled it, in use or not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.size = device, 0
        self.owner: object | None = None
        self.content_of: object | None = None
        self._memory: torch.Tensor | None = None

    @property
    def memory(self) -> torch.Tensor:
        """The whole buffer as bytes. It is allocated at the first use."""
        if self._memory is None:
            self._memory = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        elif not self.memory_in_use():
            self._memory.untyped_storage().resize_(self.size)
        return self._memory

    def memory_in_use(self) -> int:
        """Return the bytes that are allocated now."""
        return 0 if self._memory is None else self._memory.untyped_storage().size()

    def free(self) -> None:
        """Give the memory back until the next use. Tensors in it stay, without values."""
        self.content_of = None
        if self._memory is not None:
            self._memory.untyped_storage().resize_(0)


@dataclass
class Member:
    """One parameter of a bucket, as one rank sees it."""

    module: nn.Module
    """The module that holds the parameter."""
    name: str
    """The parameter's name in ``module``."""
    parameter: nn.Parameter
    """The DTensor that ``named_parameters`` shows."""
    local: torch.Tensor
    """This rank's piece, which the optimizer updates: a view of the bucket's ``shard_N``."""
    layout: Layout
    """The parameter's pieces over ranks."""
    rule: Rule
    """The parameter's dtypes and storage, and whether it is trained."""
    start: int
    """The element of the bucket's shard where the piece begins. With its padding it takes
    ``layout.padded_numel`` elements."""
    share: float
    """The factor on the value that a rank uses: 1, or 1/tp where tensor parallel ranks each use the
    parameter and their results are added up."""
    storage: Storage
    """The bucket's storage."""
    spare: int = 0
    """Extra rows of memory after the gathered value, for copies of experts."""

    @property
    def spare_numel(self) -> int:
        return self.spare * self.layout.shape[1:].numel()

    @property
    def full_numel(self) -> int:
        """Elements of the gathered value and of the extra rows after it."""
        return torch.Size(self.layout.gathered_shape).numel() + self.spare_numel

    def piece_of(self, flat_N: torch.Tensor) -> torch.Tensor:
        """Return this member's view of ``flat_N``, a tensor as long as the bucket's shard. For a
        tensor [S, N], return the view of each row."""
        return self.layout.piece_of(flat_N, self.start)

    def read(self) -> torch.Tensor:
        """Return the values of this rank's piece: a view of the shard, or a copy."""
        return self.storage.read(self.start, self.local.shape)

    def write(self, place: tuple[int | slice, ...], tensor: Sliced) -> None:
        """Write this rank's part of ``parameter[place] = tensor``. Only that part of ``tensor`` is
        read, by slicing."""
        if (overlap := self.layout.overlap(place)) is None:
            return
        here, there = overlap
        self.storage.write(self.start, self.local.shape, here, tensor, there)


class Copies(Protocol):
    """Other ranks that hold a copy of a bucket's shard, and whose gradients are to be added."""

    count: int
    """The number of ranks that hold the shard, this one included."""

    def add(self, gradient_N: torch.Tensor) -> None:
        """Add the other ranks' gradients to ``gradient_N`` (fp32), in place. Collective."""
        ...


class Overlay(Protocol):
    """Values that blocks use in place of a bucket's own, and that get the gradients."""

    def values(self) -> list[torch.Tensor]:
        """Return the gathered parameters in the order of members."""
        ...

    def reduce(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of :meth:`values`."""
        ...


@dataclass
class Bucket:
    """Members that the same ranks gather in the same dtype."""

    members: list[Member]
    storage: Storage
    """Holds this rank's shard."""
    transport: Transport
    """Carries shards and gradients among the ranks of :attr:`group`."""
    dtype: torch.dtype
    """The dtype in which the shard is gathered."""
    gradients: Arena
    """The memory of the gradient."""
    gradient_dtype: torch.dtype
    """The dtype of the gradient. Sums are made in fp32, and rounded to it when they are stored."""
    is_read_in_place: bool = False
    """True: the transport gave the shard memory in which other ranks read it."""
    copies: Sequence[Copies] = ()
    """Ranks that hold this very shard too: replicas, or the other copy of a tied embedding."""
    overlay: Overlay | None = None
    """Values that blocks use in place of the shard at the moment; None: they use the shard."""
    gradient_N: torch.Tensor | None = None
    """This step's gradient; None before the first reduction of the step, or once it moved into the
    storage."""
    squares_B: torch.Tensor | None = None
    """fp32: each block's sum of squares of the gradient, after the last reduction."""
    has_gradient: bool = False
    """True: this step has reduced a gradient."""
    unreduced_WN: torch.Tensor | None = None
    """fp32: gradients of earlier micro-batches that are not reduced yet."""
    _gathered_N: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """The memory of the gathered members."""
    _cast_N: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """The copy of the shard that is gathered: cast to the gathered dtype, or in memory that other
    ranks read. If they read the shard itself, this is its memory."""
    _version: int | None = None
    """The shard's version when that copy was written; None if the copy may be overwritten."""
    _rows: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Views of the gathered members."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that gather the bucket."""
        return self.members[0].layout.group

    @property
    def shard_N(self) -> torch.Tensor:
        """The master values that the optimizer updates, wherever they are."""
        return self.storage.shard_N

    @property
    def source_N(self) -> torch.Tensor:
        """The shard on the device. :meth:`start_gather` brings its values up to date."""
        return self.storage.source_N

    @property
    def is_trained(self) -> bool:
        return self.members[0].rule.trainable

    @property
    def is_never_sharded(self) -> bool:
        """True: blocks use the shard itself."""
        return self.group.size() == 1 and not self.is_cast and not self.storage.is_packed

    @property
    def needs_copies(self) -> bool:
        """True: a gather writes to staging memory, and members are copied or unpacked from it."""
        return self.storage.is_packed or (len(self.members) > 1 and self.group.size() > 1)

    @torch.inference_mode(False)  # tensors made in inference mode could not be trained later
    def place(self, memory_N: torch.Tensor | None) -> None:
        """Make ``memory_N``, with the values in it, the shard's memory. None: it has no memory.

        Tensors that are views of the shard stay the same objects.
        """
        self.release()
        self.storage.awaits_memory = memory_N is None
        if memory_N is None:
            memory_N = nowhere(self.shard_N.numel(), self.shard_N.dtype, self.shard_N.device)
        self.shard_N.data = memory_N
        for member in self.members:
            local: torch.Tensor = member.parameter._local_tensor  # pyright: ignore
            member.local.data = local.data = member.piece_of(memory_N)
        self.moved()

    def moved(self) -> None:
        """Note that :attr:`shard_N` has other memory, and other values."""
        self._version = None
        if self.is_never_sharded:  # blocks use it itself
            self.lay_out(self.shard_N.new_empty(0, dtype=torch.uint8))

    # ---- the shard in the dtype that is gathered -----------------------------------------------

    @property
    def is_cast(self) -> bool:
        """True: the shard is gathered in another dtype than it has on the device."""
        return not self.storage.is_packed and self.dtype != self.source_N.dtype

    @property
    def is_fresh(self) -> bool:
        """True: the copy of the shard, :attr:`cast_N` or the storage's, is up to date."""
        return self._version == self._changes()

    def _changes(self) -> int:
        """Return the number of in-place changes, which autograd counts for all views together."""
        members = sum(member.parameter._version for member in self.members)
        return self.shard_N._version + members

    @property
    def cast_N(self) -> torch.Tensor:
        """The memory of the shard in the gathered dtype; it exists once members are laid out. It is
        either the place to which a gather would copy the shard, or memory of its own."""
        if self.needs_copies and not self._cast_N.numel():
            self._cast_N = torch.empty_like(self.shard_N, dtype=self.dtype)
        return self._cast_N

    @property
    def _has_own_cast(self) -> bool:
        """True: :attr:`cast_N` has memory of its own, apart from the gathered members."""
        return not self.storage.has_host_master and (self.needs_copies or self.transport.is_shared)

    def mark_fresh(self) -> None:
        """Note that the copy of the shard was written."""
        self._version = self._changes()

    def updated(self, place_N: torch.Tensor | None) -> None:
        """Record an update of the shard, which also wrote the copy ``place_N`` if that is not None.
        Otherwise a copy that other ranks read is refreshed at once: an update in a CUDA graph
        changes no version by which it could be noticed later."""
        if place_N is not None:
            self.mark_fresh()
        elif self.transport.is_shared and self._cast_N.numel():
            self.refresh()

    @property
    def update_N(self) -> torch.Tensor | None:
        """The copy that other ranks read, if an update must write it beside the master."""
        is_there = self.transport.is_shared and self._cast_N.numel() > 0
        return self._cast_N if is_there and self.is_cast else None

    def share(self, copy_N: torch.Tensor) -> None:
        """Bring the copy that other ranks read up to date; they must not read it meanwhile.

        ``copy_N`` is the copy's memory, which the first call after :meth:`release` adopts. It may
        be the memory of the shard itself.
        """
        if not self._cast_N.numel():
            self._cast_N = copy_N
        self.refresh()

    def refresh(self) -> None:
        """Write :attr:`cast_N` if it is not up to date."""
        if self.is_fresh:
            return
        if self.is_cast:
            # Torch's own cast takes 1.5 times as long.
            sum_chunks(self.shard_N.detach()[None], out_N=self.cast_N)
        elif self._cast_N.data_ptr() != self.shard_N.data_ptr():
            self._cast_N.copy_(self.shard_N)
        self.mark_fresh()

    def leave(self) -> None:
        """Note that the memory of the gathered members may be overwritten from now on."""
        if not self.storage.has_host_master and not self._has_own_cast:
            self._version = None

    def release(self) -> None:
        """Free the memory of :attr:`cast_N`, where it has some of its own."""
        if self._has_own_cast:
            self._cast_N, self._version = torch.empty(0), None

    # ---- gathering -----------------------------------------------------------------------------

    @property
    def gathered_bytes(self) -> int:
        """The bytes that a gather writes."""
        if self.storage.is_packed:
            return aligned(self.group.size() * self.storage.packed_bytes())
        return aligned(self.group.size() * self.shard_N.numel() * self.dtype.itemsize)

    @property
    def staging_bytes(self) -> int:
        """The bytes of a gather's staging memory, out of which members are copied."""
        travels = self.storage.loads_packed or self.group.size() > 1
        return self.gathered_bytes if self.needs_copies and travels else 0

    @property
    def region_bytes(self) -> int:
        """The bytes that the gathered members take in the end."""
        if self.is_never_sharded:
            return 0
        if not self.needs_copies:
            spare = sum(member.spare_numel for member in self.members)
            return self.gathered_bytes + aligned(spare * self.dtype.itemsize)
        return sum(aligned(m.full_numel * self.dtype.itemsize) for m in self.members)

    def lay_out(self, memory: torch.Tensor) -> None:
        """Place the gathered members in ``memory``, of :attr:`region_bytes`."""
        whole_N = memory.view(self.dtype)
        if self.is_never_sharded:
            spare = sum(member.spare_numel for member in self.members)
            whole_N = self.source_N.detach()
            whole_N = whole_N.as_strided((len(whole_N) + spare,), (1,), whole_N.storage_offset())
        self._gathered_N = whole_N
        self._rows, start = [], 0
        for member in self.members:
            shape = torch.Size(member.layout.gathered_shape)
            first = start if self.needs_copies else member.start
            self._rows.append(whole_N[first : first + shape.numel()].view(shape))
            start += aligned(member.full_numel * self.dtype.itemsize) // self.dtype.itemsize
        if self.is_cast and not self._has_own_cast:
            numel = self.shard_N.numel()
            # As in start_gather: what writes here changes nothing that autograd saved.
            self._cast_N = whole_N.data[self.group.rank() * numel :][:numel]

    def start_gather(self, staging: torch.Tensor) -> Wait | None:
        """Begin to gather, to the members' place or, if they are copied out, to ``staging``."""
        # 1. What the host has updated is brought to the device.
        if self.storage.has_host_master:
            self.storage.wait()
            if not self.is_fresh:
                self.storage.load()
                self.mark_fresh()
        if self.is_never_sharded:
            return None
        if self.storage.is_packed:
            return self.storage.start_gather(self.group, staging)
        # 2. Every rank's part lands in one row of the target.
        ranks = self.group.size()
        target_N = staging.view(self.dtype) if self.needs_copies else self._gathered_N
        # Through .data, which has a version counter of its own: autograd would else take the next
        # gather for a change of what it saved.
        target_WN = target_N[: ranks * self.shard_N.numel()].data.view(ranks, -1)
        # 3. What is sent is the shard, or its copy in the dtype that is gathered.
        if self.transport.is_shared:
            if not self.is_fresh:
                raise RuntimeError("parameters changed within FSDP.work(), while peers read them")
            return self.transport.gather(self._cast_N, target_WN)
        if self.is_cast:
            self.refresh()
        sent_N = self.cast_N if self.is_cast else self.source_N
        return self.transport.gather(sent_N, target_WN)

    def copy_out(self, staging: torch.Tensor) -> None:
        """Copy members from ``staging`` to their place, if they are copied out."""
        if not self.needs_copies:
            return
        if self.storage.is_packed:
            bytes_W = self.storage.arrived(self.group.size(), staging)
            for member, row in zip(self.members, self._rows, strict=True):
                padded = member.layout.padded_numel
                self.storage.unpack(row.data.view(-1), bytes_W, member.start, padded)
            return
        ranks, numel = self.group.size(), self.group.size() * self.shard_N.numel()
        staged_WN = staging.view(self.dtype)[:numel].view(ranks, -1)
        for member, row in zip(self.members, self._rows, strict=True):
            padded = member.layout.padded_numel
            part_WN = staged_WN[:, member.start : member.start + padded]
            target = row.data.view(-1)
            if padded * ranks == target.numel():
                target.view(ranks, -1).copy_(part_WN)
            else:  # the last ranks have less
                target.copy_(part_WN.reshape(-1)[: target.numel()])

    def rows(self) -> list[torch.Tensor]:
        """Return the gathered parameters in the order of members, as new tensors for autograd."""
        if self.overlay is not None:
            return self.overlay.values()
        return [
            row.view(row.shape) if member.share == 1 else row * member.share
            for member, row in zip(self.members, self._rows, strict=True)
        ]

    # ---- reducing ------------------------------------------------------------------------------

    def start_reduce(self, gradients: Sequence[torch.Tensor | None], *, now: bool) -> Wait | None:
        """Begin to sum gathered parameters' gradients over the group into this rank's gradient.

        Every rank must call this, even without gradients (None counts as 0): others wait for it.
        Without ``now`` gradients are added up here, until a later call or :meth:`flush` sends them.
        """
        if self.overlay is not None:
            self.overlay.reduce(gradients)
            return None
        chunks_WN = self.chunks(gradients, self.group.size())
        if self.unreduced_WN is not None:
            chunks_WN = self.unreduced_WN.add_(chunks_WN)
        if not now and self.group.size() > 1:
            self.unreduced_WN = chunks_WN.to(torch.float32, copy=self.unreduced_WN is None)
            return None
        self.unreduced_WN = chunks_WN
        return self.flush()

    def flush(self) -> Wait | None:
        """Begin to sum the gradients that :meth:`start_reduce` has kept back."""
        chunks_WN, self.unreduced_WN = self.unreduced_WN, None
        if chunks_WN is None:
            return None
        chunks_WN = chunks_WN.to(self.dtype)
        if self.gradient_N is None:
            self.gradient_N = self._new_gradient()
            self.storage.return_gradient(self.gradient_N)
        if self.squares_B is None:
            blocks = num_blocks(self.shard_N.numel())
            self.squares_B = self.gradient_N.new_empty(blocks, dtype=torch.float32)
        accumulate, self.has_gradient = self.has_gradient, True
        return self.transport.reduce(
            chunks_WN, out_N=self.gradient_N, accumulate=accumulate, squares_B=self.squares_B
        )

    def _new_gradient(self) -> torch.Tensor:
        # A gradient that moves to the host is on the device for a short time.
        new = self.gradients.loose if self.storage.has_host_master else self.gradients.empty
        return new(self.shard_N.numel(), self.gradient_dtype)

    @property
    def is_reduced_at_once(self) -> bool:
        """True: a reduction over the group completes the gradient."""
        return not self.copies

    def give_gradient(self) -> None:
        """Move the gradient into the storage, if that takes it, and free its memory."""
        if self.gradient_N is not None and self.storage.take_gradient(self.gradient_N):
            self.gradient_N = None

    def chunks(self, gradients: Sequence[torch.Tensor | None], ranks: int) -> torch.Tensor:
        """Lay out gradients of gathered parameters as [W, N], where row r is for rank r's shard.

        ``ranks`` is W, into which each gradient is cut.
        """
        parts = [g for g in gradients if g is not None]
        is_whole = sum(part.numel() for part in parts) == ranks * self.shard_N.numel()
        if is_whole and all(member.share == 1 for member in self.members):
            parts = [part.reshape(ranks, -1) for part in parts]
            return torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        chunks_WN = self.source_N.new_zeros((ranks, self.shard_N.numel()), dtype=self.dtype)
        for member, gradient in zip(self.members, gradients, strict=True):
            if gradient is None:
                continue
            flat = (gradient if member.share == 1 else gradient * member.share).reshape(-1)
            padded = member.layout.padded_numel
            whole, rest = divmod(flat.numel(), padded)
            target_WN = chunks_WN[:, member.start : member.start + padded]
            target_WN[:whole] = flat[: whole * padded].view(whole, -1)
            if rest:
                target_WN[whole, :rest] = flat[whole * padded :]
        return chunks_WN

    def complete_gradient(self) -> torch.Tensor:
        """Complete this step's gradient.

        Returns fp32 numbers that add up to this rank's share of the gradient's squared norm.
        """
        if self.storage.has_gradient and self.has_gradient and self.squares_B is not None:
            return self.squares_B  # the gradient is complete, and has moved into the storage
        if self.gradient_N is None:
            self.gradient_N = self._new_gradient()
        if not self.has_gradient:  # nothing used these parameters in this step
            self.gradient_N.zero_()
        count = 1 if self.is_reduced_at_once else self._add_copies(self.gradient_N)
        if self._other_rows:
            for member, is_other_R in self._other_rows:
                member.piece_of(self.gradient_N).masked_fill_(is_other_R[:, None], 0.0)
        elif count == 1 and self.has_gradient and self.squares_B is not None:
            return self.squares_B
        norm = vector_norm(self.gradient_N, dtype=torch.float32)
        return (norm.square() / count)[None]

    @cached_property
    def _other_rows(self) -> list[tuple[Member, torch.Tensor]]:
        """Members with rows that are not trained, and a mask of those on this rank: bool [rows]."""
        found: list[tuple[Member, torch.Tensor]] = []
        for member in self.members:
            if member.rule.rows is not None:
                here = range(member.layout.box[0].start, member.layout.box[0].stop)
                kept = [row - here.start for row in member.rule.rows if row in here]
                is_other_R = torch.ones(member.local.shape[0], dtype=torch.bool)
                is_other_R[kept] = False
                found.append((member, is_other_R.to(self.shard_N.device)))
        return found

    def _add_copies(self, gradient_N: torch.Tensor) -> int:
        """Add the gradients of this shard's copies. Return how many ranks have the sum then."""
        wide_N, count = gradient_N.float(), 1
        for copies in self.copies:
            copies.add(wide_N)
            count *= copies.count
        gradient_N.copy_(wide_N)  # does nothing in fp32, where both are one tensor
        return count

    def show_gradient(self) -> None:
        """Set every member's ``grad`` to its piece of the gradient, if that is on the device."""
        if self.gradient_N is None:
            return
        for member in self.members:
            member.local.grad = member.piece_of(self.gradient_N)
            member.parameter.grad = member.layout.dtensor(member.local.grad)

    def clear_gradient(self, *, free: bool) -> None:
        """Forget this step's gradient, and with ``free`` give its memory back."""
        self.has_gradient = False
        self.unreduced_WN = None
        self.storage.clear_gradient()
        if free or self.storage.has_host_master:
            self.gradient_N = None
        for member in self.members if self.members[0].local.grad is not None else ():
            member.local.grad = member.parameter.grad = None
