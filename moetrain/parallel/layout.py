"""A parameter's layout: its global shape, and the piece of it that a rank holds, on any mesh.

A parameter is cut twice: over tensor (or expert) parallel ranks by its rule's style, then its first
dim over FSDP ranks; each time in equal pieces, the last ones shorter or empty (``torch.chunk``'s
rule, which is DTensor's). Sharding, initial values, checkpoints, export and the loading of weights
all ask here. One process is a mesh of one rank.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moetrain.models.rules import ParameterStyle
from moetrain.parallel.collectives import all_gather_start
from moetrain.parallel.mesh import Meshes

STYLES: dict[ParameterStyle, Placement] = {
    "replicate": Replicate(),
    "partial": Replicate(),
    "colwise": Shard(0),
    "rowwise": Shard(1),
    "expert": Shard(0),
}
"""Placement over the tensor parallel (for ``expert``: expert parallel) axis."""

Box = tuple[slice, ...]


class Sliced(Protocol):
    """A tensor in memory or in a file, whose parts are read by slicing."""

    def __getitem__(self, box: Any, /) -> torch.Tensor:
        """Give the part in ``box``; for ``()``, all of it."""
        ...


class Sliceable(Sliced, Protocol):
    """A whole tensor, of known shape and dtype, whose parts are read by slicing."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...


class TensorSlice(NamedTuple):
    """A rank's part of a whole tensor: ``whole[box]``."""

    tensor: torch.Tensor
    shape: Sequence[int]
    """The shape of the whole."""
    box: Box
    copy: int = 0
    """This rank's number among those that hold this very part."""
    copies: int = 1
    """How many ranks hold this very part."""

    @classmethod
    def all_of(cls, tensor: torch.Tensor) -> TensorSlice:
        """Wrap a whole tensor that this rank alone has."""
        return cls(tensor, tensor.shape, tuple(slice(0, size) for size in tensor.shape))

    def is_written_here(self, name: str) -> bool:
        """Tell whether this rank writes the part ``name`` for all that hold it; each writes a like
        share of the names."""
        return zlib.crc32(name.encode()) % self.copies == self.copy


@dataclass(frozen=True)
class Layout:
    """One parameter of ``shape`` on ``mesh``: (replicate, tensor or expert parallel, FSDP)."""

    shape: torch.Size
    style: ParameterStyle
    mesh: DeviceMesh

    @classmethod
    def of(cls, shape: torch.Size, style: ParameterStyle, meshes: Meshes) -> Layout:
        """Lay out a parameter of ``shape`` over the ranks of ``meshes`` as ``style`` says."""
        if style == "expert":
            return cls(shape, style, meshes.expert_parameters)
        is_split = isinstance(STYLES[style], Shard)
        return cls(shape, style, meshes.split_parameters if is_split else meshes.shared_parameters)

    # Cached, so that they outlive the process group, which a run of one process can do without.
    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The FSDP ranks that this one gathers from."""
        return self.mesh.get_group(2)

    @cached_property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold this very piece, or None if this one alone does."""
        return self.mesh.get_group(0) if self.mesh.size(0) > 1 else None

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The DTensor's placements, one for each axis of the mesh; the boxes follow from them."""
        return Replicate(), STYLES[self.style], Shard(0)

    @cached_property
    def gathered_box(self) -> Box:
        """The part that the FSDP ranks of this one hold together."""
        return self._box(self._coordinate[:2])

    @cached_property
    def box(self) -> Box:
        """The part that this rank holds."""
        return self._box(self._coordinate)

    def box_of(self, rank: int) -> Box:
        """Give the part that ``rank`` of the world holds, which must be one of the mesh's."""
        return self._box((self.mesh.mesh == rank).nonzero()[0].tolist())

    def _box(self, coordinate: Sequence[int]) -> Box:
        """Cut the whole by the placements of as many axes as ``coordinate`` has, in their order."""
        box = [slice(0, size) for size in self.shape]
        for axis, index in enumerate(coordinate):
            placement = self.placements[axis]
            if isinstance(placement, Shard):
                whole = box[placement.dim]
                part = chunk_of(whole.stop - whole.start, self.mesh.size(axis), index)
                box[placement.dim] = slice(whole.start + part.start, whole.start + part.stop)
        return tuple(box)

    def part(self, local: torch.Tensor) -> TensorSlice:
        """Wrap ``local``, this rank's piece, as a part of the whole."""
        return TensorSlice(local, self.shape, self.box, self._coordinate[0], self.mesh.size(0))

    def common(self, tensor: torch.Tensor) -> TensorSlice:
        """Wrap ``tensor``, which every rank of the mesh has whole."""
        number = 0
        for axis, index in enumerate(self._coordinate):
            number = number * self.mesh.size(axis) + index
        return TensorSlice.all_of(tensor)._replace(copy=number, copies=self.mesh.size())

    @property
    def _coordinate(self) -> Sequence[int]:
        """This rank's coordinate on the mesh."""
        place = self.mesh.get_coordinate()
        assert place is not None  # a rank has layouts on its own meshes alone
        return place

    @property
    def local_shape(self) -> torch.Size:
        """The shape of :attr:`box`."""
        return torch.Size(part.stop - part.start for part in self.box)

    @property
    def gathered_shape(self) -> torch.Size:
        """The shape of :attr:`gathered_box`."""
        return torch.Size(part.stop - part.start for part in self.gathered_box)

    @property
    def padded_numel(self) -> int:
        """How many numbers the largest rank's piece has, which each gives to a gather."""
        rows, *rest = self.gathered_shape
        return math.ceil(rows / self.mesh.size(2)) * math.prod(rest)

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """Make the whole's DTensor from this rank's ``local``."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=torch.empty(self.shape, device="meta").stride(),
        )

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """Gather the whole from every rank's ``local``. Collective."""
        # Not DTensor.full_tensor: torch 2.11 has none for meshes whose axes are not in rank order.
        whole = _gather_rows(local, self.gathered_shape[0], self.group)
        placement = STYLES[self.style]
        if not isinstance(placement, Shard) or self.mesh.size(1) == 1:
            return whole
        dim, group = placement.dim, self.mesh.get_group(1)
        return _gather_rows(whole.movedim(dim, 0), self.shape[dim], group).movedim(0, dim)

    def overlap(
        self, place: tuple[int | slice, ...]
    ) -> tuple[tuple[int | slice, ...], tuple[slice, ...]] | None:
        """Find what this rank holds of ``whole[place]``: the place in its piece and the place in
        what was asked for, or None if it holds nothing of it."""
        target: list[int | slice] = []
        source: list[slice] = []
        for dim, mine in enumerate(self.box):
            index = place[dim] if dim < len(place) else slice(None)
            if isinstance(index, int):
                if not mine.start <= index < mine.stop:
                    return None
                target.append(index - mine.start)
                continue
            start, stop, _ = index.indices(self.shape[dim])
            low, high = max(start, mine.start), min(stop, mine.stop)
            if low >= high:
                return None
            target.append(slice(low - mine.start, high - mine.start))
            source.append(slice(low - start, high - start))
        return tuple(target), tuple(source)


def chunk_of(size: int, ranks: int, rank: int) -> slice:
    """Give ``rank``'s part of ``size`` rows, by ``torch.chunk``'s rule."""
    rows = math.ceil(size / ranks)
    return slice(min(rank * rows, size), min((rank + 1) * rows, size))


def _gather_rows(local: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the ``rows`` rows that the ranks of ``group`` hold by :func:`chunk_of`."""
    if group.size() == 1:
        return local.contiguous()
    padded = local.new_zeros(math.ceil(rows / group.size()), *local.shape[1:])
    padded[: local.shape[0]] = local
    gathered_WN, work = all_gather_start(padded.flatten(), group)
    work.wait()
    return gathered_WN.view(group.size(), *padded.shape).flatten(0, 1)[:rows]
