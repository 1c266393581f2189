"""A shard whose fp32 master is in host memory, and the streams to and from there.

The device has a copy in the dtype that is gathered, and nothing else: gradients go down as they are
reduced, and updated weights come back into the copy (ZeRO-Offload, arXiv 2101.06840), through the
pinned memory that their gradient came to: an update reads that before it writes. Both ways are
streams of their own, so that a copy down, a copy up and computing overlap.

Legend: N numbers of one rank's shard of a bucket.
"""

from concurrent.futures import Future
from typing import Any

import torch

from moetrain.kernels.arena import Arena
from moetrain.kernels.memory import HostMemory


class Link:
    """Streams to and from the host."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.device = device
        self.down = torch.cuda.Stream(device) if on_cuda else None
        self.up = torch.cuda.Stream(device) if on_cuda else None


class HostShard:
    """One rank's shard of one bucket: :attr:`master_N` here, :attr:`copy_N` on the device."""

    def __init__(self, numel: int, dtype: torch.dtype, link: Link, weights: Arena) -> None:
        """Raises RunFailed if the system does not give as much pinned memory."""
        self.link = link
        self.master_N = torch.zeros(numel)
        self.copy_N = weights.empty(numel, dtype).zero_()
        remedy = "lower it, or use a machine with more memory"
        self._memory = HostMemory(link.device, "optim.offload_fraction", remedy)
        self.gradient_N = self._memory.reserve(4 * numel).view(torch.float32)
        """This step's gradient, once it is here."""
        self._out_N = self._memory.bytes[: numel * dtype.itemsize].view(dtype)
        self.has_gradient = False
        """Whether this step's gradient so far is here or on the way."""
        self.update: Future[None] | None = None
        """The update under way, or done since the last :meth:`wait`."""
        self._came: Any = None
        self._left: Any = None
        """The events at the ends of the last copies down and up."""

    def take(self, gradient_N: torch.Tensor) -> None:
        """Begin to copy the device's gradient (fp32) here; its memory may be freed at once."""
        self.wait()
        down = self.link.down
        if down is None:
            self.gradient_N.copy_(gradient_N)
        else:
            down.wait_stream(torch.cuda.current_stream(self.link.device))
            with torch.cuda.stream(down):
                self.gradient_N.copy_(gradient_N, non_blocking=True)
            gradient_N.record_stream(down)
            self._came = down.record_event()
        self.has_gradient = True

    def give_back(self, gradient_N: torch.Tensor) -> None:
        """Copy the gradient to the device again, where more is to be added."""
        if self._came is not None:
            torch.cuda.current_stream(self.link.device).wait_event(self._came)
        gradient_N.copy_(self.gradient_N, non_blocking=True)
        self.has_gradient = False

    def await_gradient(self) -> None:
        """Wait until the gradient is here. For the thread that updates."""
        if self._came is not None:
            self._came.synchronize()

    def send(self) -> None:
        """Begin to copy the master to the device, which must no longer use the old copy.

        The gradient is lost. For the thread that updates."""
        up = self.link.up
        if up is None:
            self.copy_N.copy_(self.master_N)
            return
        self._out_N.copy_(self.master_N)
        with torch.cuda.stream(up):
            self.copy_N.copy_(self._out_N, non_blocking=True)
        self._left = up.record_event()

    def wait(self) -> None:
        """Wait until the update under way is done and, on the device, its weights have come."""
        update, self.update = self.update, None
        if update is None:
            return
        update.result()
        left, self._left = self._left, None
        if left is not None:
            torch.cuda.current_stream(self.link.device).wait_event(left)
