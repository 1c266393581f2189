"""Frozen weights, quantised to 8 or 4 bits in groups with scales (``lora.base_dtype``).

Ranks gather the quantised elements and their scales (:mod:`moetrain.kernels.quant.groups`), and
dequantise them into the memory of the gathered parameters. Experts may be kept in host memory
(``lora.offload_experts``): a copy to the device then takes the place of the gather, at the same
moments. Dequantising to fp32 and quantising again changes nothing. The elements of a group are
consecutive in a rank's shard. So two layouts have the same groups if, in both, each rank's part of
a row is a multiple of the format's unit (32 elements; 2,048 for nf4).

Legend: N elements of one rank's shard of a bucket, W ranks of its group.
"""

from typing import Any, Self

import torch
import torch.distributed as dist

from moetrain.kernels.quant.groups import Groups, QuantFormat, dequantise_groups, quantise_groups
from moetrain.models.hf.formats import Dequantised
from moetrain.parallel.fsdp.storage.protocol import HostLink, ShardSpec, Storage
from moetrain.parallel.fsdp.transport.protocol import Wait
from moetrain.parallel.mesh import Sliced, all_gather_start
from moetrain.runtime.arena import Arena
from moetrain.runtime.memory import HostMemory


class Quantised(Storage):
    """One rank's shard of a bucket: ``numel`` elements stored in ``format``, used in ``dtype``."""

    is_packed = True

    def __init__(
        self,
        format: QuantFormat,
        numel: int,
        dtype: torch.dtype,
        weights: Arena,
        link: HostLink | None = None,
    ) -> None:
        """Allocate the quantised elements and scales, zeroed.

        ``link`` copies them from host memory, where they are then stored. None: they are stored on
        the device.

        Raises RunFailed if the system cannot pin that much host memory.
        """
        self.format, self.dtype, self.device, self.link = format, dtype, weights.device, link
        self.loads_packed = link is not None
        remedy = "unset it, or use a machine with more memory"
        self._memory = HostMemory(self.device, "lora.offload_experts", remedy)
        size = format.num_bytes(numel)
        own = weights.empty(size if link is None else 1, torch.uint8)
        self.bytes = own if link is None else self._memory.reserve(size)[:size]
        """The quantised elements, then their scales: all that is gathered."""
        self.bytes.zero_()
        # A stand-in with the shard's length that occupies one byte. Its values are never read.
        self.shard_N = self.source_N = own[:1].expand(numel)
        self._table = format.table(self.device)

    @classmethod
    def takes(cls, spec: ShardSpec) -> bool:
        return spec.rule.quant_format is not None

    @classmethod
    def make(cls, spec: ShardSpec) -> Self:
        assert spec.rule.quant_format is not None
        link = spec.link if spec.is_offloaded else None
        return cls(spec.rule.quant_format, spec.numel, spec.dtype, spec.weights, link)

    def _units(self, first: int, stop: int) -> Groups:
        """Return views of the quantised elements and scales of units ``first:stop``."""
        return self.format.split(self.bytes[None]).units(self.format, first, stop)

    def read(self, start: int, shape: torch.Size, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a copy of the tensor that begins at element ``start``, in ``dtype``; None: in
        :attr:`dtype`."""
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
        source: Sliced,
        there: tuple[int | slice, ...] = (),
    ) -> None:
        """Assign ``tensor[place] = source[there]``, rounded; the tensor begins at ``start``.

        Quantised elements and scales that ``source`` has in this format are copied as they are.
        """
        view, unit = torch.empty(shape, device="meta")[place], self.format.unit
        begin = start + int(view.storage_offset())
        numel = 1 + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
        # The units that hold these elements; they begin and end within the tensor's own.
        first, stop = begin // unit, -(-(begin + numel) // unit)
        outer, size = first * unit, (stop - first) * unit
        made = None
        if isinstance(source, Dequantised) and (outer, size) == (begin, view.numel()):
            made = source.groups(self.format, there)
        if made is None:
            wide_N = self.read(outer, torch.Size([size]), torch.float32)
            target = wide_N.as_strided(view.shape, view.stride(), begin - outer)
            values: Any = source[there] if there else source
            target.copy_(values)
            made = quantise_groups(self.format, wide_N)
        for own, new in zip(self._units(first, stop), made, strict=True):
            if own is not None and new is not None:
                own.copy_(new)

    def packed_bytes(self) -> int:
        return self.bytes.numel()

    def start_gather(self, group: dist.ProcessGroup, staging: torch.Tensor) -> Wait | None:
        if group.size() > 1:
            return all_gather_start(self.bytes, group, self.arrived(group.size(), staging))[1].wait
        if self.link is None:
            return None
        up, target = self.link.up, self.arrived(1, staging)[0]
        if up is None:
            target.copy_(self.bytes)
            return None
        up.wait_stream(torch.cuda.current_stream(self.device))  # it may still read the target
        with torch.cuda.stream(up):
            target.copy_(self.bytes, non_blocking=True)
        came = up.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(came)

    def arrived(self, ranks: int, staging: torch.Tensor) -> torch.Tensor:
        if ranks == 1 and self.link is None:
            return self.bytes[None]
        return staging[: ranks * self.bytes.numel()].view(ranks, -1)

    def unpack(self, out_N: torch.Tensor, bytes_W: torch.Tensor, start: int, numel: int) -> None:
        dequantise_groups(self.format, self.format.split(bytes_W), self._table, out_N, start, numel)
