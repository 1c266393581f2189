"""The fp32 master in host memory, where it is updated (``optim.offload_fraction``).

The device has a copy in the dtype that is gathered, and nothing else. Gradients are copied to the
host as they are reduced, and updated weights are copied back (ZeRO-Offload, arXiv 2101.06840)
through the pinned memory that held the gradient, which an update reads before it writes. Each
direction has a stream of its own, so that both copies and the computation overlap.

Legend: N elements of one rank's shard of a bucket.
"""

from concurrent.futures import Future
from typing import Any, Self

import torch

from moetrain.parallel.fsdp.storage.protocol import HostLink, ShardSpec, Storage
from moetrain.runtime.arena import Arena
from moetrain.runtime.memory import HostMemory


class Offloaded(Storage):
    """One rank's shard of one bucket: ``shard_N`` on the host, ``source_N`` on the device."""

    has_host_master = True

    def __init__(self, numel: int, dtype: torch.dtype, link: HostLink, weights: Arena) -> None:
        """Raises RunFailed if the system does not give as much pinned memory."""
        self.link = link
        self.shard_N = torch.zeros(numel)
        self.source_N = weights.empty(numel, dtype).zero_()
        remedy = "lower it, or use a machine with more memory"
        self._memory = HostMemory(link.device, "optim.offload_fraction", remedy)
        self.gradient_N = self._memory.reserve(4 * numel).view(torch.float32)
        """This step's gradient, once its copy has arrived."""
        self._out_N = self._memory.bytes[: numel * dtype.itemsize].view(dtype)
        self.has_gradient = False
        self.update: Future[None] | None = None
        """The update under way, or done since the last :meth:`wait`."""
        self._gradient_arrived: Any = None
        """The event at the end of the last copy to the host."""
        self._weights_arrived: Any = None
        """The event at the end of the last copy to the device."""

    @classmethod
    def takes(cls, spec: ShardSpec) -> bool:
        return spec.is_offloaded

    @classmethod
    def make(cls, spec: ShardSpec) -> Self:
        return cls(spec.numel, spec.dtype, spec.link, spec.weights)

    @property
    def is_updating(self) -> bool:
        return self.update is not None

    def load(self) -> None:
        self.source_N.copy_(self.shard_N)

    def take_gradient(self, gradient_N: torch.Tensor) -> bool:
        """Begin to copy ``gradient_N`` (fp32, on the device) to the host.

        The caller may free its memory at once.
        """
        self.wait()
        down = self.link.down
        if down is None:
            self.gradient_N.copy_(gradient_N)
        else:
            down.wait_stream(torch.cuda.current_stream(self.link.device))
            with torch.cuda.stream(down):
                self.gradient_N.copy_(gradient_N, non_blocking=True)
            gradient_N.record_stream(down)
            self._gradient_arrived = down.record_event()
        self.has_gradient = True
        return True

    def return_gradient(self, gradient_N: torch.Tensor) -> None:
        if not self.has_gradient:
            return
        if self._gradient_arrived is not None:
            torch.cuda.current_stream(self.link.device).wait_event(self._gradient_arrived)
        gradient_N.copy_(self.gradient_N, non_blocking=True)
        self.has_gradient = False

    def clear_gradient(self) -> None:
        self.has_gradient = False

    def await_gradient(self) -> None:
        """Wait until the gradient has arrived. For the thread that updates."""
        if self._gradient_arrived is not None:
            self._gradient_arrived.synchronize()

    def send(self) -> None:
        """Begin to copy the master to the device, which must no longer use the old copy.

        The weights pass through the memory of the gradient, and overwrite it. For the thread that
        updates.
        """
        up = self.link.up
        if up is None:
            self.source_N.copy_(self.shard_N)
            return
        self._out_N.copy_(self.shard_N)
        with torch.cuda.stream(up):
            self.source_N.copy_(self._out_N, non_blocking=True)
        self._weights_arrived = up.record_event()

    def wait(self) -> None:
        update, self.update = self.update, None
        if update is None:
            return
        update.result()
        arrived, self._weights_arrived = self._weights_arrived, None
        if arrived is not None:
            torch.cuda.current_stream(self.link.device).wait_event(arrived)
