"""FSDP: sharded parameters, unsharded in the compute dtype where they are used.

Every parameter is a DTensor, sharded on its first dim over its FSDP axis (:class:`Layout
<moetrain.parallel.mesh.Layout>`). A unit is a block, the embedding, or the head, whose parameters
are gathered together. Its life cycle is explicit:

    unshard   all-gather the unit's parameters into its region of memory, unless they are there
    reshard   release the region, so that another unit can use it or its memory can be freed
    reduce    sum the gradients of full parameters in fp32 into this rank's gradient

All of it happens within :meth:`FSDP.work`, during which parameters do not change. So a unit that is
unsharded need not be gathered again, in whatever order forwards and backwards come. The gather is
outside the compiled block, which sees plain tensors: inside, it could not start before the block.

    forward   unshard(i + 1) starts before block i computes
    backward  unshard(i - 1) starts before block i's backward, and the reduction of block i runs
              while block i - 1 computes

Full parameters lie at fixed addresses. A unit keeps them in a region of its own until the work is
over. Blocks that reshard after their forward share two regions instead (double buffering): one is
filled while the block in the other computes. They share one region if no parameters travel.
Tensors that autograd saves may lie in a region; whenever the backward reads them, the region holds
their values again.

Left out on purpose: gradients of different units in one collective; parameters that change shape.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from moetrain.config import ParallelSection
from moetrain.models.transformer import Sharding
from moetrain.parallel.collectives import all_reduce
from moetrain.parallel.fsdp.bucket import Bucket, GatherBuffer, Member
from moetrain.parallel.fsdp.transport.protocol import Session, Wait
from moetrain.parallel.mesh import Sliced
from moetrain.parallel.waits import waiting
from moetrain.runtime.annotate import annotate
from moetrain.runtime.arena import Arena
from moetrain.runtime.typed import OpContext, split


@dataclass(eq=False)
class _Unit:
    """Parameters that are unsharded together."""

    index: int
    """The unit's place in the order of forwards."""
    buckets: list[Bucket]
    region: GatherBuffer
    """Holds the full parameters."""
    staging: GatherBuffer
    """Receives gathered parameters that must then be copied to their places in the region."""
    shares_region: bool
    """True: other blocks use the region too."""
    works: list[Wait | None] | None = None
    """The gathers under way; None: there are none."""
    graphs: int = 0
    """The number of forwards that still await their backward."""
    _is_laid_out: bool = False
    """True: the buckets know their places in the region."""

    def __post_init__(self) -> None:
        size = sum(bucket.region_bytes for bucket in self.buckets)
        self.region.size = max(self.region.size, size)
        staged = sum(bucket.staging_bytes for bucket in self.buckets)
        self.staging.size = max(self.staging.size, staged)
        self.label = f"unit {self.index}, {size / 2**20:.1f} MiB"  # in traces

    @property
    def members(self) -> Iterator[Member]:
        for bucket in self.buckets:
            yield from bucket.members

    @torch.inference_mode(False)  # tensors made in inference mode could not be trained later
    def move_in(self) -> None:
        """Make the region this unit's, so that its parameters can be written there."""
        memory = self.region.memory
        if not self._is_laid_out:
            sizes = [bucket.region_bytes for bucket in self.buckets]
            for bucket, part in zip(self.buckets, _parts(memory, sizes), strict=True):
                bucket.lay_out(part)
            self._is_laid_out = True
        if self.region.content_of is not self:
            self.region.content_of = self
            for bucket in self.buckets:
                bucket.leave()

    @torch.inference_mode(False)
    def start_gather(self) -> None:
        """Begin to gather every bucket."""
        self.move_in()
        self.works = [bucket.start_gather(part) for bucket, part in self._staged()]

    def finish_gather(self) -> None:
        """Wait for the gathers under way, and copy their results from staging to the region."""
        if self.works is None:
            return
        works, self.works = self.works, None
        for work in works:
            if work is not None:
                with waiting(self.region.device):
                    work()
        for bucket, part in self._staged():
            bucket.copy_out(part)
        self.staging.owner = None

    def _staged(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield each bucket with its part of the staging memory."""
        sizes = [bucket.staging_bytes for bucket in self.buckets]
        return zip(self.buckets, _parts(self.staging.memory, sizes), strict=True)

    def swap_in(self, full: Sequence[torch.Tensor]) -> None:
        """Give modules the ``full`` parameters in place of their DTensors."""
        for member, tensor in zip(self.members, full, strict=True):
            # Not setattr, which refuses a plain tensor in the place of a parameter.
            member.module._parameters[member.name] = tensor  # pyright: ignore

    def swap_out(self) -> None:
        """Give modules their DTensors again."""
        for member in self.members:
            # Torch has no public name for the dict (as in swap_in).
            member.module._parameters[member.name] = member.parameter  # pyright: ignore


def _parts(memory: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    return split(memory[: sum(sizes)], list(sizes))


@dataclass(eq=False)
class FSDP(Sharding):
    """The units of one model in forward order, and the gathers and reductions under way.

    Attributes:
        weights: the memory of shards.
        gradients: the memory of gradients.
        units: every unit, in the order of forwards.
        trained: the buckets that are trained.
        num_works: the number of :meth:`work` so far, by which a late backward is recognised.
    """

    setting: ParallelSection
    device: torch.device
    world_size: int
    """The number of all ranks. It is kept here because the process group may be gone when a second
    run of this process starts."""
    frees: bool
    """True: full parameters are freed after their last use, and gradients are allocated at their
    first use and freed after the update. Only a single process does so."""
    reshards: int
    """The number of blocks, counted from the first, that share regions instead of having one
    each."""
    num_regions: int = 2
    """The number of regions that these blocks share: two for double buffering, or one if no
    parameters travel."""

    def __post_init__(self) -> None:
        device = self.device
        self.reduce_last = self.setting.reduce_at == "last"
        """True: gradients of several micro-batches are added up unsharded, in fp32."""
        self.weights = Arena("weights", device)
        self.gradients = Arena("gradients", device, fixed=not self.frees)
        self.units, self.trained = list[_Unit](), list[Bucket]()
        self.members: dict[str, Member] = {}
        """Every parameter, by its name in the model."""
        self._unit_of: dict[nn.Module, _Unit] = {}
        self._shared_regions = [GatherBuffer(device) for _ in range(self.num_regions)]
        self._staging = (GatherBuffer(device), GatherBuffer(device))
        self.sessions: list[Session] = []
        """The transports' sessions, which are called before, within and after each work."""
        self._reducing: list[Wait | None] = []
        """The reductions under way."""
        self._reduced: list[Bucket] = []
        """Buckets that give their gradients to their storage after these reductions."""
        self._is_working, self._is_last, self.num_works = False, False, 0
        self.before_reduce: Callable[[], object] = lambda: None
        """Called before each reduction, to wait for what others still add to the gradients."""
        self.shows_gradients = True
        """True: parameters' ``grad`` is set, for hooks of an optimizer."""

    def add(self, buckets: list[Bucket], modules: Sequence[nn.Module], *, is_block: bool) -> None:
        """Append the unit of ``modules``; their forwards run in the order of units."""
        index = len(self.units)
        shares_region = is_block and sum(unit.shares_region for unit in self.units) < self.reshards
        region = GatherBuffer(self.device)
        if shares_region:
            region = self._shared_regions[index % len(self._shared_regions)]
        unit = _Unit(
            index=index,
            buckets=buckets,
            region=region,
            staging=self._staging[index % 2],
            shares_region=shares_region,
        )
        self.units.append(unit)
        self.trained += [bucket for bucket in buckets if bucket.is_trained]
        self._unit_of.update(dict.fromkeys(modules, unit))

    @property
    def buckets(self) -> Iterator[Bucket]:
        for unit in self.units:
            yield from unit.buckets

    def share(self) -> None:
        """Let other ranks read all shards as they are now. Collective."""
        for session in self.sessions:
            session.share()

    def withdraw(self) -> None:
        """Wait, on the device, until no rank reads a shard. Collective.

        Call it before shards change. After :meth:`gradient_norm` it is not needed, because there
        every rank waits for all others.
        """
        for session in self.sessions:
            session.withdraw()

    # ---- the life cycle ------------------------------------------------------------------------

    @contextmanager
    def work(self) -> Generator[None]:
        """Enclose the forwards and backwards of one step, or of one evaluation, in any order.

        Parameters must not change inside. Afterwards every reduction is done, and every module
        holds its DTensors again. The context may be nested.
        """
        if self._is_working:
            yield
            return
        self.weights.need()
        self._is_working = True
        try:
            self.share()
            yield
            self._finish_reductions()
            self._reducing = [bucket.flush() for bucket in self.trained]
            self._finish_reductions()
        finally:
            for session in self.sessions:
                session.finish()
            self._is_working, self._is_last = False, False
            self._reducing, self._reduced = [], []  # what failed leaves nothing to finish
            self.num_works += 1
            for unit in self.units:
                unit.graphs = 0
                unit.swap_out()
                self.reshard(unit)

    def release(self) -> None:
        """Free the memory of full parameters until the next :meth:`work`. Collective."""
        self.check_idle()
        for unit in self.units:
            unit.region.free()
            unit.staging.free()
            for bucket in unit.buckets:
                bucket.release()
        for session in self.sessions:
            session.release()

    def check_idle(self) -> None:
        """Raise RuntimeError within :meth:`work`, during which parameters must not change."""
        if self._is_working:
            raise RuntimeError(
                "a step, a release or the loading of a state came within FSDP.work()"
            )

    def start_unshard(self, unit: _Unit, beside: _Unit | None = None) -> None:
        """Begin to gather ``unit``, unless its region holds it or is that of ``beside``."""
        if not self._is_working:
            what = "sharded parameters were asked for outside of FSDP.work()"
            raise RuntimeError(f"{what}; call the model within `with engine.work():`")
        if unit.region.owner is unit or (beside is not None and unit.region is beside.region):
            return
        if isinstance(unit.region.owner, _Unit):
            self.reshard(unit.region.owner)
        if isinstance(unit.staging.owner, _Unit):  # gathered ahead, and not used yet
            unit.staging.owner.finish_gather()
        unit.region.owner = unit.staging.owner = unit
        with annotate(f"fsdp_gather {unit.label}"):
            unit.start_gather()

    def unshard(self, unit: _Unit) -> None:
        """Gather ``unit`` for the work that is queued next."""
        self.start_unshard(unit)
        unit.finish_gather()

    def reshard(self, unit: _Unit) -> None:
        """Release the region of ``unit``, for another unit or another gather."""
        if unit.region.owner is unit:
            unit.finish_gather()
            unit.region.owner = None

    def reduce(self, unit: _Unit, gradients: Sequence[torch.Tensor | None]) -> None:
        """Begin the unit's reductions, then finish those of the unit before it."""
        self.before_reduce()
        with annotate(f"fsdp_reduce {unit.label}"):
            started: list[Wait | None] = []
            rest = list(gradients)
            for bucket in unit.buckets:
                mine, rest = rest[: len(bucket.members)], rest[len(bucket.members) :]
                if bucket.is_trained:
                    now = self._is_last or not self.reduce_last
                    started.append(bucket.start_reduce(mine, now=now))
            self._finish_reductions()
            self._reducing = started
        unit.graphs -= 1
        if self._is_last and not unit.graphs:
            self._reduced = [bucket for bucket in unit.buckets if bucket.is_reduced_at_once]
            if self.frees and all(bucket.is_trained for bucket in unit.buckets):
                self.reshard(unit)
                unit.region.free()

    def _finish_reductions(self) -> None:
        for wait in self._reducing:
            if wait is not None:
                with waiting(self.device):
                    wait()
        for bucket in self._reduced:
            bucket.give_gradient()
        self._reducing, self._reduced = [], []

    # ---- the model's seam: moetrain.models.transformer.Sharding --------------------------------

    @contextmanager
    def unsharded(self, block: nn.Module) -> Generator[None]:
        """Give the modules of ``block`` its full parameters, and begin to gather the next unit."""
        unit = self._unit_of[block]
        full = self._hand_out(unit)
        ahead = self.units[unit.index + 1 : unit.index + 2]
        # If the host updates the next unit, launch this block before the wait for that update, even
        # if this rank's update is done: gathers and the block's own collectives must come in the
        # same order on all ranks.
        buckets = [bucket for following in ahead for bucket in following.buckets]
        late = ahead if any(bucket.storage.is_updating for bucket in buckets) else []
        for following in ahead[len(late) :]:
            self.start_unshard(following, beside=unit)
        unit.swap_in(full)
        try:
            yield
        finally:
            unit.swap_out()
        for following in late:
            self.start_unshard(following, beside=unit)

    def reopen(self, block: nn.Module, outputs: Any) -> Any:
        """Return ``outputs`` of ``block``, so that their backward begins by unsharding it."""
        if not self.reshards or not torch.is_grad_enabled():
            return outputs
        unit = self._unit_of[block]
        leaves, spec = pytree.tree_flatten(outputs)
        at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        wrapped = _BeforeBackward.apply(self, unit, *(leaves[i] for i in at))
        for i, leaf in zip(at, wrapped, strict=True):
            leaves[i] = leaf
        return pytree.tree_unflatten(leaves, spec)

    def open(self, module: nn.Module) -> None:
        """Give the modules of ``module``'s unit full parameters until the work is over."""
        unit = self._unit_of[module]
        unit.swap_in(self._hand_out(unit))

    def _hand_out(self, unit: _Unit) -> list[torch.Tensor]:
        """Return the full parameters of ``unit``, differentiable where they are trained."""
        self.unshard(unit)
        unit.graphs += torch.is_grad_enabled()
        # A new leaf per call: autograd runs a leaf's backward on the stream of its first use.
        anchor = torch.empty((), device=self.device, requires_grad=True)
        return list(_Unshard.apply(anchor, self, unit))

    def backward(
        self,
        outputs: torch.Tensor | Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor] | None = None,
        *,
        is_last: bool,
    ) -> None:
        """Run the backward of ``outputs``.

        Args:
            outputs: tensors that the model gave. Those that depend on nothing trained are skipped;
                a first pipeline stage may have such outputs.
            gradients: the gradient of each output; None: the outputs are 0-d losses.
            is_last: no other backward follows in this work.
        """
        self._is_last = is_last
        if gradients is not None:
            pairs = zip(outputs, gradients, strict=True)
            wanted = [(y, gradient) for y, gradient in pairs if y.requires_grad]
            if not wanted:
                return
            outputs, gradients = zip(*wanted, strict=True)
        torch.autograd.backward(outputs, gradients)

    def write(self, name: str, place: tuple[int | slice, ...], tensor: Sliced) -> None:
        """Write this rank's part of ``parameter[place] = tensor``. Collective."""
        self.settle()  # an update under way would overwrite the new values, or mix with them
        self.withdraw()
        if (member := self.members.get(name)) is not None:
            member.write(place, tensor)

    # ---- the step ------------------------------------------------------------------------------

    def gradient_norm(self) -> torch.Tensor:
        """Complete every gradient after the step's work, and return the whole gradient's 2-norm.

        The norm is 0-d fp32, and the same on every rank.
        """
        self.check_idle()
        squares = [torch.zeros(1, device=self.device)]  # a stage may train nothing
        squares += [bucket.complete_gradient() for bucket in self.trained]
        total = torch.cat(squares).sum(dtype=torch.float64)
        if self.world_size > 1:
            with waiting(self.device):
                all_reduce(total)
        # After the sum is queued: this takes the host longer than the sum takes the device.
        for bucket in self.trained:
            bucket.give_gradient()
            if self.shows_gradients:
                bucket.show_gradient()
        return total.sqrt().float()

    def updates(self) -> Iterator[tuple[Bucket, torch.Tensor | None]]:
        """Yield every bucket that the device updates, with memory for the update's result.

        The caller must update a bucket before it asks for the next one. The update must also write
        the new values to the memory [N], in the dtype in which they are gathered, so that gathers
        need no cast until something else changes the parameters. None: there is no such memory.
        With :attr:`frees` a gradient is freed after its update.
        """
        self.check_idle()
        for unit in self.units:
            for bucket in unit.buckets:
                if not bucket.is_trained or bucket.storage.has_host_master:
                    continue
                place_N = bucket.update_N
                is_shared = bucket.transport.is_shared
                if not is_shared and bucket.is_cast and not unit.shares_region:
                    unit.move_in()
                    place_N = bucket.cast_N
                yield bucket, place_N
                bucket.updated(place_N)
                if self.frees:
                    bucket.clear_gradient(free=True)

    def settle(self) -> None:
        """Wait until every master weight holds the last step's update. Raises OffloadedError."""
        self.weights.need()
        for bucket in self.buckets:
            bucket.storage.wait()

    def refresh(self) -> None:
        """After a change of parameters, update their copies in the compute dtype. Collective.

        Units that share a region keep no copy, because each of their gathers casts again.
        """
        self.share()
        for unit in self.units:
            unit.move_in()
            if unit.shares_region:
                unit.region.content_of = None
                continue
            for bucket in unit.buckets:
                if bucket.is_cast and not bucket.transport.is_shared:
                    bucket.refresh()

    @property
    def marks(self) -> tuple[bool, ...]:
        """For each bucket, True if it has a gradient of this step."""
        return tuple(bucket.has_gradient for bucket in self.buckets)

    @marks.setter
    def marks(self, marks: Sequence[bool]) -> None:
        for bucket, mark in zip(self.buckets, marks, strict=True):
            bucket.has_gradient = mark

    def clear_gradients(self) -> None:
        for bucket in self.trained:
            bucket.clear_gradient(free=self.frees)


class _Unshard(torch.autograd.Function):
    """Hands out a unit's full parameters.

    Its backward reduces their gradients, while the next block's backward runs, into buffers that
    outlive the graph.
    """

    if TYPE_CHECKING:  # torch's has no types

        @classmethod
        def apply(cls, *args: object, **options: object) -> tuple[torch.Tensor, ...]: ...

    @staticmethod
    def forward(
        ctx: OpContext, anchor: torch.Tensor, fsdp: FSDP, unit: _Unit
    ) -> tuple[torch.Tensor, ...]:
        ctx.fsdp, ctx.unit, ctx.work = fsdp, unit, fsdp.num_works
        ctx.set_materialize_grads(False)
        rows = [row for bucket in unit.buckets for row in bucket.rows()]
        pairs = zip(rows, unit.members, strict=True)
        ctx.mark_non_differentiable(*(row for row, member in pairs if not member.rule.trainable))
        return tuple(rows)

    @staticmethod
    def backward(ctx: OpContext, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        """Begin to reduce the gradients of the unit's full parameters."""
        if ctx.work != ctx.fsdp.num_works:  # nobody would finish its reductions
            raise RuntimeError("a backward came after the FSDP.work() of its forward")
        ctx.fsdp.reduce(ctx.unit, gradients)
        return None, None, None


class _BeforeBackward(torch.autograd.Function):
    """An identity around a block's outputs.

    Its backward runs before the block's own backward, and unshards the block again.
    """

    if TYPE_CHECKING:  # torch's has no types

        @classmethod
        def apply(cls, *args: object, **options: object) -> tuple[torch.Tensor, ...]: ...

    @staticmethod
    def forward(
        ctx: OpContext, fsdp: FSDP, unit: _Unit, *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.fsdp, ctx.unit = fsdp, unit
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: OpContext, *gradients: torch.Tensor | None) -> tuple[object, ...]:
        ctx.fsdp.unshard(ctx.unit)
        if ctx.unit.index > 0:
            ctx.fsdp.start_unshard(ctx.fsdp.units[ctx.unit.index - 1], beside=ctx.unit)
        return None, None, *gradients
