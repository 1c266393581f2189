"""Two ways in which a bucket's shard is not simply its values on the device.

:class:`HostShard` has the fp32 master in host memory. The device has a copy in the dtype that is
gathered, and nothing else: gradients go down as they are reduced, and updated weights come back
into the copy (ZeRO-Offload, arXiv 2101.06840), through the pinned memory that their gradient came
to: an update reads that before it writes. Both ways are streams of their own, so that a copy down,
a copy up and computing overlap.

:class:`QuantisedShard` holds frozen weights in codes of 8 or 4 bits with scales
(``lora.base_dtype``, :mod:`moetrain.kernels.quant.groups`). Codes and scales are what is gathered;
they are widened where the parameters lie gathered. Those of experts may lie in host memory
(``lora.offload_experts``): a copy to the device then takes the place of the gather, at the same
moments. Widened to fp32 and written again they are the same. Groups are of neighbours in a rank's
shard: the same on any layout that leaves every rank's part of a row a multiple of a form's unit (32
numbers, of nf4 2,048).

Legend: N numbers of one rank's shard of a bucket, W ranks.
"""

from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from moetrain.kernels.quant.groups import Groups, QuantFormat, dequantise_groups, quantise_groups
from moetrain.models.hf.formats import Dequantised
from moetrain.parallel.fsdp.transport import Wait
from moetrain.parallel.mesh import all_gather_start
from moetrain.runtime.arena import Arena
from moetrain.runtime.memory import HostMemory


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


class QuantisedShard:
    """One rank's shard of a bucket: ``numel`` numbers stored in ``format``, used in ``dtype``."""

    def __init__(
        self,
        format: QuantFormat,
        numel: int,
        dtype: torch.dtype,
        weights: Arena,
        link: Link | None = None,
    ) -> None:
        """``link``: the way from the host, where codes lie then; None: they lie on the device.

        Raises RunFailed if the system does not give as much pinned memory.
        """
        self.format, self.dtype, self.device, self.link = format, dtype, weights.device, link
        remedy = "unset it, or use a machine with more memory"
        self._memory = HostMemory(self.device, "lora.offload_experts", remedy)
        size = format.num_bytes(numel)
        own = weights.empty(size if link is None else 1, torch.uint8)
        self.bytes = own if link is None else self._memory.reserve(size)[:size]
        """Codes, and scales behind them: all that is gathered."""
        self.bytes.zero_()
        self.shape_N = own[:1].expand(numel)
        """A tensor of the shard's size that holds nothing: a number has no bytes of its own."""
        self._table = format.table(self.device)

    def _units(self, first: int, stop: int) -> Groups:
        """Give what is stored of units ``first:stop``, in views."""
        return self.format.split(self.bytes[None]).units(self.format, first, stop)

    def read(self, start: int, shape: torch.Size, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Copy the tensor that begins at number ``start``, in ``dtype`` or as it is used."""
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        unit, numel = self.format.unit, out.numel()
        first, stop = start // unit, -(-(start + numel) // unit)
        stored, at = self._units(first, stop).to(self.device), start - first * unit
        dequantise_groups(self.format, stored, self._table, out.view(-1), at, numel)
        return out

    @torch.no_grad()
    def write(
        self,
        start: int,
        shape: torch.Size,
        place: tuple[int | slice, ...],
        given: Any,
        there: tuple[int | slice, ...] = (),
    ) -> None:
        """Do ``tensor[place] = given[there]``, rounded; the tensor begins at ``start``. Codes and
        scales that ``given`` has in this form are taken as they are."""
        view, unit = torch.empty(shape, device="meta")[place], self.format.unit
        begin = start + int(view.storage_offset())
        numel = 1 + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
        # The units that hold these numbers; they begin and end within the tensor's own.
        first, stop = begin // unit, -(-(begin + numel) // unit)
        outer, size = first * unit, (stop - first) * unit
        made = None
        if isinstance(given, Dequantised) and (outer, size) == (begin, view.numel()):
            made = given.groups(self.format, there)
        if made is None:
            wide_N = self.read(outer, torch.Size([size]), torch.float32)
            target = wide_N.as_strided(view.shape, view.stride(), begin - outer)
            values: Any = given[there] if there else given
            target.copy_(values)
            made = quantise_groups(self.format, wide_N)
        for own, new in zip(self._units(first, stop), made, strict=True):
            if own is not None and new is not None:
                own.copy_(new)

    def start_gather(self, group: dist.ProcessGroup, staging: torch.Tensor) -> Wait | None:
        """Begin to bring every rank's bytes to the device, to ``staging`` where they are not."""
        if group.size() > 1:
            return all_gather_start(self.bytes, group, self.gathered(group.size(), staging))[1].wait
        if self.link is None:
            return None
        up, target = self.link.up, self.gathered(1, staging)[0]
        if up is None:
            target.copy_(self.bytes)
            return None
        up.wait_stream(torch.cuda.current_stream(self.device))  # which may still read the last
        with torch.cuda.stream(up):
            target.copy_(self.bytes, non_blocking=True)
        came = up.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(came)

    def gathered(self, ranks: int, staging: torch.Tensor) -> torch.Tensor:
        """Give every rank's bytes [W, bytes] once they are on the device."""
        if ranks == 1 and self.link is None:
            return self.bytes[None]
        return staging[: ranks * self.bytes.numel()].view(ranks, -1)

    def dequantise(
        self, out_N: torch.Tensor, bytes_W: torch.Tensor, start: int, numel: int
    ) -> None:
        """Write ``numel`` numbers from ``start`` on of each rank's ``bytes_W``, one rank's behind
        the other's, to ``out_N``; the last ranks may have less."""
        dequantise_groups(self.format, self.format.split(bytes_W), self._table, out_N, start, numel)
