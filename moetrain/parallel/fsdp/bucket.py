"""A bucket of parameters that travel together: a flat shard a rank, its gradient, its gathering.

It is one collective, or a copy from each peer (:mod:`moetrain.parallel.fsdp.transport`): its
members lie end to end in one flat shard, each padded to the same length on every rank.

Legend: W ranks of the FSDP axis, N numbers of one rank's shard of a bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moetrain.kernels.optim.reduction import num_blocks, sum_chunks
from moetrain.models.rules import Rule
from moetrain.parallel.fsdp.storage import HostShard, QuantisedShard
from moetrain.parallel.fsdp.transport import Peers, Wait, reduce_scatter_start
from moetrain.parallel.mesh import Layout, all_gather_start
from moetrain.parallel.waits import waiting
from moetrain.runtime.arena import Arena, aligned


class GatherBuffer:
    """Memory that holds the gathered parameters of one unit at a time, at one address.

    Attributes:
        size: bytes, which grow until the first use.
        owner: the unit that is unsharded there now.
        content_of: the unit whose values lie there, in use or not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.size = device, 0
        self.owner: object | None = None
        self.content_of: object | None = None
        self._memory: torch.Tensor | None = None

    @property
    def memory(self) -> torch.Tensor:
        """The whole buffer as bytes; allocated at the first use."""
        if self._memory is None:
            self._memory = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        elif not self.memory_in_use():
            self._memory.untyped_storage().resize_(self.size)
        return self._memory

    def memory_in_use(self) -> int:
        return 0 if self._memory is None else self._memory.untyped_storage().size()

    def free(self) -> None:
        """Give the memory back until the next use; tensors in it stay, and have no values."""
        self.content_of = None
        if self._memory is not None:
            self._memory.untyped_storage().resize_(0)


@dataclass
class Member:
    """One parameter of a bucket, as one rank sees it."""

    module: nn.Module
    name: str
    """The name under which ``module`` holds it."""
    parameter: nn.Parameter
    """The DTensor that ``named_parameters`` shows."""
    local: torch.Tensor
    """This rank's piece: a view into the bucket's shard, wherever that lies. The optimizer's
    parameter."""
    layout: Layout
    rule: Rule
    start: int
    """The place of its padded shard in the bucket, in numbers; ``layout.padded_numel`` long."""
    share: float
    """The part of the value that a rank uses: 1, or 1/tp where tensor parallel ranks' uses are
    added up."""
    quantised: QuantisedShard | None = None
    """The storage whose codes :attr:`local` is; None where that is the values."""
    spare: int = 0
    """Rows for which there is memory behind the gathered value, for the block's ops to use."""

    @property
    def spare_numel(self) -> int:
        return self.spare * self.layout.shape[1:].numel()

    @property
    def full_numel(self) -> int:
        """The numbers of the gathered value and of the memory behind it."""
        return torch.Size(self.layout.gathered_shape).numel() + self.spare_numel

    def piece_of(self, flat_N: torch.Tensor) -> torch.Tensor:
        """Return the view of ``flat_N``, as long as the bucket's shard, or of each row of [S, N],
        that is this member's."""
        return self.layout.piece_of(flat_N, self.start)

    def read(self) -> torch.Tensor:
        """Give this rank's piece as values: :attr:`local`, or a copy."""
        return (
            self.local
            if self.quantised is None
            else self.quantised.read(self.start, self.local.shape)
        )

    def write(self, place: tuple[int | slice, ...], tensor: Any) -> None:
        """Do what is this rank's of ``parameter[place] = tensor``, reading only that of it, by
        slicing."""
        if (overlap := self.layout.overlap(place)) is None:
            return
        here, there = overlap
        if self.quantised is None:
            self.local[here].copy_(tensor[there])
        else:
            self.quantised.write(self.start, self.local.shape, here, tensor, there)


@dataclass
class Bucket:
    """Members that the same ranks gather in the same dtype."""

    members: list[Member]
    shard_N: torch.Tensor
    dtype: torch.dtype
    """The dtype it is gathered in."""
    gradients: Arena
    """The memory of its gradient."""
    gradient_dtype: torch.dtype
    """The dtype of its gradient: sums are made in fp32, and rounded to it as they are stored."""
    host: HostShard | None = None
    """The storage whose master :attr:`shard_N` is; None where the shard is on the device."""
    quantised: QuantisedShard | None = None
    """The storage whose codes :attr:`shard_N` is; None where the shard is values."""
    gradient_N: torch.Tensor | None = None
    """This step's gradient, once there is one."""
    squares_B: torch.Tensor | None = None
    """fp32: each block's sum of squares of the gradient, as the last reduction left them."""
    has_gradient: bool = False
    unreduced_WN: torch.Tensor | None = None
    """fp32: gradients of earlier micro-batches that are still to travel."""
    tied: tuple[dist.ProcessGroup, int] | None = None
    """A group and the rank there with a tied embedding's other copy, used elsewhere."""
    tenants: "Sequence[Bucket]" = ()
    """Buckets whose values are stacked in place of its own, and which get their gradients."""
    peers: Peers | None = None
    """The group's ranks, if they copy from one another; else the bucket travels by collectives."""
    peers_start: int = 0
    """The shard's place in the memory that they share."""
    _gathered_N: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    _cast_N: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """A copy of the shard as it is gathered, in another dtype or for peers to read."""
    _version: int | None = None
    """The shard's version when that copy was written; None if something else may lie there."""
    _rows: list[torch.Tensor] = field(default_factory=list)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that gather the bucket."""
        return self.members[0].layout.group

    @property
    def is_trained(self) -> bool:
        return self.members[0].rule.trainable

    @property
    def source_N(self) -> torch.Tensor:
        """The shard on the device; :meth:`start_gather` sees to its values."""
        return self.shard_N if self.host is None else self.host.copy_N

    @property
    def is_never_sharded(self) -> bool:
        """Whether blocks use the shard itself."""
        return self.group.size() == 1 and not self.is_cast

    @property
    def needs_copies(self) -> bool:
        """Whether members must be copied out of what a gather gives, rank by rank."""
        return self.quantised is not None or (len(self.members) > 1 and self.group.size() > 1)

    def moved(self) -> None:
        """Note that :attr:`shard_N` has other memory, and other values."""
        self._version = None
        if self.is_never_sharded:  # blocks use it itself
            self.lay_out(self.shard_N.new_empty(0, dtype=torch.uint8))

    # ---- the shard as it is gathered -----------------------------------------------------------

    @property
    def is_cast(self) -> bool:
        """Whether the shard is gathered in another dtype than the device has it in."""
        return self.dtype != self.source_N.dtype

    @property
    def is_fresh(self) -> bool:
        """Whether :attr:`cast_N`, or the device's copy of a host's shard, is up to date."""
        return self._version == self._changes()

    def _changes(self) -> int:
        """Count changes in place, which autograd does for all views of a tensor together."""
        members = sum(member.parameter._version for member in self.members)
        return self.shard_N._version + members

    @property
    def cast_N(self) -> torch.Tensor:
        """Memory for the shard in the dtype it is gathered in, once that is laid out: the very
        place that a gather would copy it to, or a place of its own."""
        if self.needs_copies and not self._cast_N.numel():
            self._cast_N = torch.empty_like(self.shard_N, dtype=self.dtype)
        return self._cast_N

    def mark_fresh(self) -> None:
        """Note that :attr:`cast_N`, or the copy of a host's shard, was written."""
        self._version = self._changes()

    def updated(self, place_N: torch.Tensor | None) -> None:
        """Note an update that wrote ``place_N`` too. A copy that peers read follows at once: when a
        graph updates, no count changes that would tell."""
        if place_N is not None:
            self.mark_fresh()
        elif self.peers is not None and self._cast_N.numel():
            self.refresh()

    @property
    def update_N(self) -> torch.Tensor | None:
        """The copy that peers read, if an update must write it beside the master."""
        is_there = self.peers is not None and self._cast_N.numel() > 0
        return self._cast_N if is_there and self.is_cast else None

    def share(self) -> None:
        """Bring the copy that peers read up to date; they do not read it meanwhile."""
        assert self.peers is not None
        if not self._cast_N.numel():
            self._cast_N = self.peers.own(self.peers_start, self.shard_N.numel(), self.dtype)
        self.refresh()

    def refresh(self) -> None:
        """Write :attr:`cast_N` if it is not up to date."""
        if self.is_fresh:
            return
        if self.is_cast:
            # Torch's own cast takes 1.5 times as long.
            sum_chunks(self.shard_N.detach()[None], out_N=self.cast_N)
        else:
            self._cast_N.copy_(self.shard_N)
        self.mark_fresh()

    @property
    def _lies_apart(self) -> bool:
        """Whether :attr:`cast_N` has memory of its own, apart from the gathered members."""
        return self.needs_copies or self.peers is not None

    def leave(self) -> None:
        """Note that the memory of the gathered members may be overwritten from now on."""
        if self.host is None and not self._lies_apart:
            self._version = None

    def release(self) -> None:
        """Free the memory of :attr:`cast_N`, where it has some of its own."""
        if self.host is None and self._lies_apart:
            self._cast_N, self._version = torch.empty(0), None

    # ---- gathering -----------------------------------------------------------------------------

    @property
    def gathered_bytes(self) -> int:
        """The bytes that a gather writes."""
        if self.quantised is not None:
            return aligned(self.group.size() * self.quantised.bytes.numel())
        return aligned(self.group.size() * self.shard_N.numel() * self.dtype.itemsize)

    @property
    def staging_bytes(self) -> int:
        """The bytes that are gathered to be copied out."""
        comes_up = self.quantised is not None and self.quantised.link is not None
        travels = comes_up or self.group.size() > 1
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
        if self.is_cast and not self._lies_apart:
            numbers = self.shard_N.numel()
            # As in start_gather: what writes here changes nothing that autograd saved.
            self._cast_N = whole_N.data[self.group.rank() * numbers :][:numbers]

    def start_gather(self, staging: torch.Tensor) -> Wait | None:
        """Begin to gather, to the members' place or, if they are copied out, to ``staging``."""
        if self.host is not None:
            self.host.wait()
            if not self.is_fresh:
                self.host.copy_N.copy_(self.shard_N)
                self.mark_fresh()
        if self.is_never_sharded:
            return None
        if self.quantised is not None:
            return self.quantised.start_gather(self.group, staging)
        ranks = self.group.size()
        target_N = staging.view(self.dtype) if self.needs_copies else self._gathered_N
        # Through .data, which has a version counter of its own: autograd would else take the next
        # gather for a change of what it saved.
        target_WN = target_N[: ranks * self.shard_N.numel()].data.view(ranks, -1)
        if self.peers is not None:
            if not self.is_fresh:
                raise RuntimeError("parameters changed within FSDP.work(), while peers read them")
            return self.peers.gather(self.peers_start, target_WN)
        if self.is_cast:
            self.refresh()
        if ranks == 1:
            return None
        sent_N = self.cast_N if self.is_cast else self.source_N
        return all_gather_start(sent_N, self.group, target_WN)[1].wait

    def copy_out(self, staging: torch.Tensor) -> None:
        """Copy members from ``staging`` to their place, if they are copied out."""
        if not self.needs_copies:
            return
        if self.quantised is not None:
            bytes_W = self.quantised.gathered(self.group.size(), staging)
            for member, row in zip(self.members, self._rows, strict=True):
                padded = member.layout.padded_numel
                self.quantised.dequantise(row.data.view(-1), bytes_W, member.start, padded)
            return
        ranks, numbers = self.group.size(), self.group.size() * self.shard_N.numel()
        staged_WN = staging.view(self.dtype)[:numbers].view(ranks, -1)
        for member, row in zip(self.members, self._rows, strict=True):
            padded = member.layout.padded_numel
            part_WN = staged_WN[:, member.start : member.start + padded]
            target = row.data.view(-1)
            if padded * ranks == target.numel():
                target.view(ranks, -1).copy_(part_WN)
            else:  # the last ranks have less
                target.copy_(part_WN.reshape(-1)[: target.numel()])

    def rows(self) -> list[torch.Tensor]:
        """Give the gathered parameters in the order of members, as new tensors for autograd."""
        if self.tenants:
            shards = [tenant.shard_N for tenant in self.tenants]
            stacked_SN = torch.stack(shards, out=shards[0].new_empty(0, dtype=self.dtype))
            return [member.piece_of(stacked_SN) for member in self.members]
        return [
            row.view(row.shape) if member.share == 1 else row * member.share
            for member, row in zip(self.members, self._rows, strict=True)
        ]

    # ---- reducing ------------------------------------------------------------------------------

    def start_reduce(self, gradients: Sequence[torch.Tensor | None], *, now: bool) -> Wait | None:
        """Begin to sum gathered parameters' gradients over the group into this rank's gradient.

        Every rank must call this, even without gradients (None counts as 0): others wait for it.
        Without ``now`` they are added up here, until a later call or :meth:`flush` sends all.
        """
        chunks_WN = self._chunks(gradients)
        if self.tenants:
            for tenant, chunk_1N in zip(self.tenants, chunks_WN.split(1), strict=True):
                tenant.unreduced_WN = chunk_1N
                tenant.flush()
            return None
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
            if self.host is not None and self.host.has_gradient:
                self.host.give_back(self.gradient_N)
        if self.squares_B is None:
            blocks = num_blocks(self.shard_N.numel())
            self.squares_B = self.gradient_N.new_empty(blocks, dtype=torch.float32)
        into: Any = {"out_N": self.gradient_N, "squares_B": self.squares_B}
        into["accumulate"], self.has_gradient = self.has_gradient, True
        if self.peers is not None:
            return self.peers.reduce(chunks_WN, **into)
        wait = reduce_scatter_start(chunks_WN, self.group, **into)
        if self.group.size() > 1:
            return wait
        wait()  # nothing is under way, and what it holds is large
        return None

    def _new_gradient(self) -> torch.Tensor:
        # What goes down to the host is here for a short time.
        new = self.gradients.empty if self.host is None else self.gradients.loose
        return new(self.shard_N.numel(), self.gradient_dtype)

    @property
    def is_reduced_at_once(self) -> bool:
        """Whether a reduction over the group completes the gradient."""
        return self.members[0].layout.replicas is None and self.tied is None

    def give_gradient(self) -> None:
        """Send the gradient of a host's shard there, and free its memory."""
        if self.host is not None and self.gradient_N is not None:
            self.host.take(self.gradient_N)
            self.gradient_N = None

    def _chunks(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Lay gradients of gathered parameters out as [W, N]: row r is for rank r's shard, or, of
        the one rank that tenants have, for tenant r's."""
        ranks = len(self.tenants) or self.group.size()
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
        """Complete this step's gradient; give fp32 numbers that add up to this rank's share of its
        square."""
        has_left = self.host is not None and self.host.has_gradient and self.has_gradient
        if has_left and self.squares_B is not None:
            return self.squares_B  # it is complete
        if self.gradient_N is None:
            self.gradient_N = self._new_gradient()
        if not self.has_gradient:  # nothing used these parameters in this step
            self.gradient_N.zero_()
        copies = 1 if self.is_reduced_at_once else self._add_copies(self.gradient_N)
        if self._other_rows:
            for member, is_other_R in self._other_rows:
                member.piece_of(self.gradient_N).masked_fill_(is_other_R[:, None], 0.0)
        elif copies == 1 and self.has_gradient and self.squares_B is not None:
            return self.squares_B
        norm = torch.linalg.vector_norm(self.gradient_N, dtype=torch.float32)
        return (norm.square() / copies)[None]

    @cached_property
    def _other_rows(self) -> list[tuple[Member, torch.Tensor]]:
        """Members of which some rows alone are trained, and which of this rank's rows are others:
        bool [rows]."""
        found = []
        for member in self.members:
            if member.rule.rows is not None:
                here = range(member.layout.box[0].start, member.layout.box[0].stop)
                kept = [row - here.start for row in member.rule.rows if row in here]
                is_other_R = torch.ones(member.local.shape[0], dtype=torch.bool)
                is_other_R[kept] = False
                found.append((member, is_other_R.to(self.shard_N.device)))
        return found

    def _add_copies(self, gradient_N: torch.Tensor) -> int:
        """Add the gradients of this shard's copies; returns how many ranks have the sum then."""
        wide_N, copies = gradient_N.float(), 1
        if (replicas := self.members[0].layout.replicas) is not None:
            with waiting(wide_N.device):
                dist.all_reduce(wide_N, group=replicas)
            copies *= replicas.size()
        if self.tied is not None:
            (group, rank), theirs_N = self.tied, torch.empty_like(wide_N)
            pairs = ((dist.isend, wide_N), (dist.irecv, theirs_N))
            ops = [dist.P2POp(op, x, group=group, group_peer=rank) for op, x in pairs]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            wide_N += theirs_N
            copies *= 2
        gradient_N.copy_(wide_N)  # nothing where that is fp32: they are one
        return copies

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
        if self.host is not None:
            self.host.has_gradient = False
        if free or self.host is not None:
            self.gradient_N = None
        for member in self.members if self.members[0].local.grad is not None else ():
            member.local.grad = member.parameter.grad = None
