"""The interface between a bucket and what stores its shard.

A :class:`~moetrain.parallel.fsdp.bucket.Bucket` knows where each parameter lies in its shard, when
the shard is gathered and how gradients are summed. It does not know in which memory, and in which
format, the elements are: only its :class:`Storage` does. The defaults here suit a shard that is on
the device and that the optimizer updates there. A subclass overrides what differs.

Legend: N elements of one rank's shard of a bucket, W ranks of its group.
"""

from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from moetrain.models.rules import Rule
from moetrain.parallel.fsdp.transport.protocol import Wait
from moetrain.parallel.mesh import Sliced
from moetrain.runtime.arena import Arena


class HostLink:
    """The streams that copy between the device and host memory; None where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.device = device
        self.down = torch.cuda.Stream(device) if on_cuda else None
        """Copies to the host."""
        self.up = torch.cuda.Stream(device) if on_cuda else None
        """Copies from the host."""


class ShardSpec(NamedTuple):
    """The shard of one bucket that a rank is to store."""

    rule: Rule
    """The rule of the bucket's first parameter. The others share its ``of_bucket``."""
    numel: int
    """Elements of the shard, with the padding between parameters."""
    dtype: torch.dtype
    """The dtype in which the shard is gathered."""
    is_offloaded: bool
    """True: ``optim.offload_fraction`` or ``lora.offload_experts`` puts it in host memory."""
    may_be_read: bool
    """True: ranks gather the shard in the dtype in which it is stored, so other ranks may read it
    directly from its memory. The storage may then let the transport allocate this memory
    (``Storage.awaits_memory``)."""
    spare_numel: int
    """Elements of memory to allocate behind the shard, for copies of redundant experts. They are
    needed where blocks use the shard in place, without a gather."""
    weights: Arena
    """The memory of parameters on the device."""
    link: HostLink
    """The way to host memory and back."""


def nowhere(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor [numel] that has memory for one element only; its values are meaningless."""
    return torch.empty(1, dtype=dtype, device=device).expand(numel)


class Storage:
    """Stores one rank's shard of one bucket.

    Every storage keeps these promises, which ``tests/parallel/fsdp/test_every_storage.py`` checks
    for each row of ``STORAGES``:

    1. :meth:`read` returns the values that :meth:`write` stored, rounded at most once. Writing
       values that were read changes nothing.
    2. A gather returns the values of :meth:`read` in ``ShardSpec.dtype``. A value that was written
       is in the next gather.
    3. All memory is from ``ShardSpec.weights``, or pinned memory of the host, or memory that
       ``Bucket.place`` was given.
    4. If the shard is trained, an update of :attr:`shard_N` on the device is in the next gather. A
       storage with a master in host memory derives from ``Offloaded``, since the optimizer updates
       no other masters there.
    """

    shard_N: torch.Tensor
    """The master values. The ``local`` tensors of parameters are views of it. A storage that keeps
    no plain master on the device has a placeholder of the same size (:func:`nowhere`)."""
    source_N: torch.Tensor
    """The shard on the device, as a gather reads it. It is :attr:`shard_N` itself, or a copy."""
    has_host_master: bool = False
    """True: the master is in host memory, where it is updated. The device has a copy
    (:attr:`source_N`) in the dtype that is gathered, and gradients move to the host."""
    is_packed: bool = False
    """True: a gather exchanges packed bytes instead of values. Each rank sends
    :meth:`packed_bytes` bytes (:meth:`start_gather`). :meth:`unpack` converts them to values."""
    loads_packed: bool = False
    """True: the packed bytes are in host memory, and are copied to the device at each gather."""
    awaits_memory: bool = False
    """True: :attr:`shard_N` has no memory before ``Bucket.place``."""
    has_gradient: bool = False
    """True: this step's gradient so far is in the storage, or on its way there."""

    @classmethod
    def takes(cls, spec: ShardSpec) -> bool:
        """Return True if shards of this kind are stored this way."""
        raise NotImplementedError

    @classmethod
    def make(cls, spec: ShardSpec) -> Self:
        """Make the storage, with zeros."""
        raise NotImplementedError

    def read(self, start: int, shape: torch.Size) -> torch.Tensor:
        """Return the values of the tensor that begins at element ``start``: a view, or a copy."""
        return self.shard_N.narrow(0, start, shape.numel()).view(shape)

    def write(
        self,
        start: int,
        shape: torch.Size,
        place: tuple[int | slice, ...],
        source: Sliced,
        there: tuple[int | slice, ...],
    ) -> None:
        """Assign ``tensor[place] = source[there]``; the tensor begins at element ``start``."""
        self.read(start, shape)[place].copy_(source[there])

    # ---- a master in host memory ---------------------------------------------------------------

    @property
    def is_updating(self) -> bool:
        """True: an update was started that :meth:`wait` has not waited for."""
        return False

    def wait(self) -> None:
        """Wait until the update under way is done and its values are on the device."""

    def load(self) -> None:
        """Copy the master to :attr:`source_N`."""

    def take_gradient(self, gradient_N: torch.Tensor) -> bool:
        """Begin to move the device's gradient (fp32) into the storage.

        Returns False if the gradient stays on the device.
        """
        return False

    def return_gradient(self, gradient_N: torch.Tensor) -> None:
        """Copy the gradient back to the device if the storage has it, so that more can be added."""

    def clear_gradient(self) -> None:
        """Forget this step's gradient."""

    # ---- packed values -------------------------------------------------------------------------

    def packed_bytes(self) -> int:
        """Return the bytes that a rank sends in a gather."""
        raise NotImplementedError

    def start_gather(self, group: dist.ProcessGroup, staging: torch.Tensor) -> Wait | None:
        """Begin to gather every rank's bytes in ``staging``, unless the device has them already."""
        raise NotImplementedError

    def arrived(self, ranks: int, staging: torch.Tensor) -> torch.Tensor:
        """Return every rank's bytes [W, bytes] after :meth:`start_gather`."""
        raise NotImplementedError

    def unpack(self, out_N: torch.Tensor, bytes_W: torch.Tensor, start: int, numel: int) -> None:
        """Write the values of ``numel`` elements of each rank's shard to ``out_N``, rank by rank.

        The elements begin at ``start`` of each shard. The last ranks may have fewer.
        """
        raise NotImplementedError
