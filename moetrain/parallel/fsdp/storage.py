"""Two ways in which a bucket's shard is not simply its values on the device.

:class:`HostShard` has the fp32 master in host memory. The device has a copy in the dtype that is
gathered, and nothing else: gradients go down as they are reduced, and updated weights come back
into the copy (ZeRO-Offload, arXiv 2101.06840), through the pinned memory that their gradient came
to: an update reads that before it writes. Both ways are streams of their own, so that a copy down,
a copy up and computing overlap.

:class:`Float8Shard` holds frozen weights in OCP's MXFP8: e4m3, and a scale for each 32 numbers
(``lora.base_dtype``). Codes and scales are what is gathered, half the bytes; they are widened into
the memory where the parameters lie gathered. A scale is a power of two, the least with which its
group's largest number is in range, so what is widened and written again has the same values. Groups
are of neighbours in a rank's shard: the same on any layout that leaves every rank's part of a row a
multiple of 32 numbers.

Legend: N numbers of one rank's shard of a bucket (of whole groups, in 8 bits), G groups, W ranks.
"""

import math
import time
from concurrent.futures import Future
from typing import Any

import torch

from moetrain.kernels.memory import HostMemory
from moetrain.kernels.quant.e4m3 import E4M3, SCALED, quantise_groups, widen_groups
from moetrain.parallel.offload.arena import Arena


class Link:
    """Streams to and from the host, and how well updates there are hidden."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.device = device
        self.down = torch.cuda.Stream(device) if on_cuda else None
        self.up = torch.cuda.Stream(device) if on_cuda else None
        self.busy_seconds = 0.0
        """The time for which updates ran on the host."""
        self.waited_seconds = 0.0
        """The time for which training waited for them; the rest was hidden."""


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
        start = time.perf_counter()
        update.result()
        self.link.waited_seconds += time.perf_counter() - start
        left, self._left = self._left, None
        if left is not None:
            torch.cuda.current_stream(self.link.device).wait_event(left)


class Float8Shard:
    """One rank's shard of one bucket, ``numel`` numbers that are used in ``dtype``."""

    def __init__(self, numel: int, dtype: torch.dtype, weights: Arena) -> None:
        self.dtype = dtype
        self._codes = -(-numel // SCALED) * SCALED
        self.bytes = weights.empty(self._codes + self._codes // SCALED, torch.uint8).zero_()
        """Codes, and scales behind them: all that is gathered."""
        self.codes_N = self.bytes[:numel].view(E4M3)

    def _apart(self, bytes_W: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split bytes into codes [W, N] and scales [W, G]."""
        codes_WN, scales_WG = bytes_W[:, : self._codes], bytes_W[:, self._codes :]
        return codes_WN.view(E4M3), scales_WG

    def read(self, start: int, shape: torch.Size, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Copy the tensor that begins at number ``start``, in ``dtype`` or as it is used."""
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.bytes.device)
        self.widen(out.view(-1), self.bytes[None], start, out.numel())
        return out

    @torch.no_grad()
    def write(
        self,
        start: int,
        shape: torch.Size,
        place: tuple[int | slice, ...],
        values: torch.Tensor,
    ) -> None:
        """Do ``tensor[place] = values``, rounded; the tensor begins at ``start``."""
        rows, *columns = place
        first, last = (rows, rows + 1) if isinstance(rows, int) else (rows.start, rows.stop)
        # The groups that hold these rows; they begin and end within the tensor's own.
        size = math.prod(shape[1:])
        begin, numel = start + first * size, (last - first) * size
        outer = begin // SCALED * SCALED
        end = -(-(begin + numel) // SCALED) * SCALED
        wide_N = self.read(outer, torch.Size([end - outer]), torch.float32)
        part = wide_N[begin - outer :][:numel].view(last - first, *shape[1:])
        part[0 if isinstance(rows, int) else slice(None), *columns].copy_(values)
        codes_WN, scales_WG = self._apart(self.bytes[None])
        codes_N, scales_G = quantise_groups(wide_N)
        codes_WN[0, outer:end].copy_(codes_N)
        scales_WG[0, outer // SCALED : end // SCALED].copy_(scales_G)

    def gathered(self, ranks: int, staging: torch.Tensor) -> torch.Tensor:
        """Give every rank's gathered bytes [W, bytes]."""
        if ranks == 1:
            return self.bytes[None]
        return staging[: ranks * self.bytes.numel()].view(ranks, -1)

    def widen(self, out_N: torch.Tensor, bytes_W: torch.Tensor, start: int, numel: int) -> None:
        """Write ``numel`` numbers from ``start`` on of each rank's ``bytes_W``, one rank's behind
        the other's, to ``out_N``; the last ranks may have less."""
        codes_WN, scales_WG = self._apart(bytes_W)
        widen_groups(codes_WN, scales_WG, out_N, start, numel)
