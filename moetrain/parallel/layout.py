"""Where a parameter lies: its global shape, and the piece of it that a rank holds, on any mesh.

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
    """A tensor, or one that lies in a file, of which parts can be had."""

    def __getitem__(self, box: Any, /) -> torch.Tensor:
        """The part in ``box``."""
        ...


class Sliceable(Protocol):
    """A whole tensor of which any part can be had: a tensor, or one that lies in files."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, box: Any, /) -> torch.Tensor:
        """The part in ``box``; of ``()``, all of it."""
        ...


class TensorSlice(NamedTuple):
    """What a rank holds of a whole tensor: ``whole[box]``."""

    tensor: torch.Tensor
    shape: Sequence[int]
    """Of the whole."""
    box: Box
    copy: int = 0
    """This rank's number among those that hold this very part, ..."""
    copies: int = 1
    """... and how many they are."""

    @classmethod
    def all_of(cls, tensor: torch.Tensor) -> TensorSlice:
        """Of a tensor that this rank alone has."""
        return cls(tensor, tensor.shape, full_box(tensor.shape))

    def is_written_here(self, name: str) -> bool:
        """Whether this rank writes it for all that hold it: each a like share of the names."""
        return zlib.crc32(name.encode()) % self.copies == self.copy


def full_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple(slice(0, size) for size in shape)


@dataclass(frozen=True)
class Layout:
    """One parameter of ``shape`` on ``mesh``: (replicate, tensor or expert parallel, FSDP)."""

    shape: torch.Size
    style: ParameterStyle
    mesh: DeviceMesh

    @classmethod
    def of(cls, shape: torch.Size, style: ParameterStyle, meshes: Meshes) -> Layout:
        """How ``style`` lays out a parameter of ``shape`` over the ranks of ``meshes``."""
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
        """The ranks that hold this very piece; None: this one alone."""
        return self.mesh.get_group(0) if self.mesh.size(0) > 1 else None

    @cached_property
    def gathered_box(self) -> Box:
        """What the FSDP ranks of this one hold together."""
        return self._gathered_box(self.mesh.get_local_rank(1))

    @cached_property
    def box(self) -> Box:
        """What this rank holds."""
        return self._part(self.gathered_box, self.mesh.get_local_rank(2))

    def box_of(self, rank: int) -> Box:
        """What ``rank`` of the world holds, which must be one of the mesh's."""
        _, part, shard = (self.mesh.mesh == rank).nonzero()[0].tolist()
        return self._part(self._gathered_box(part), shard)

    def _gathered_box(self, part: int) -> Box:
        box = [slice(0, size) for size in self.shape]
        placement = STYLES[self.style]
        if isinstance(placement, Shard):
            box[placement.dim] = chunk_of(self.shape[placement.dim], self.mesh.size(1), part)
        return tuple(box)

    def _part(self, gathered: Box, shard: int) -> Box:
        rows, *rest = gathered
        mine = chunk_of(rows.stop - rows.start, self.mesh.size(2), shard)
        return slice(rows.start + mine.start, rows.start + mine.stop), *rest

    def part(self, local: torch.Tensor) -> TensorSlice:
        """``local``, which this rank holds of the whole."""
        return TensorSlice(local, self.shape, self.box, self._place[0], self.mesh.size(0))

    def common(self, tensor: torch.Tensor) -> TensorSlice:
        """``tensor``, which every rank of the mesh has whole."""
        number = 0
        for axis, index in enumerate(self._place):
            number = number * self.mesh.size(axis) + index
        return TensorSlice.all_of(tensor)._replace(copy=number, copies=self.mesh.size())

    @property
    def _place(self) -> Sequence[int]:
        """This rank's, along the axes of the mesh."""
        place = self.mesh.get_coordinate()
        assert place is not None  # a rank has layouts on its own meshes alone
        return place

    @property
    def local_shape(self) -> torch.Size:
        """Of :attr:`box`."""
        return _shape(self.box)

    @property
    def gathered_shape(self) -> torch.Size:
        """Of :attr:`gathered_box`."""
        return _shape(self.gathered_box)

    @property
    def padded_numel(self) -> int:
        """Numbers of the largest rank's piece: what each gives to a gather."""
        rows, *rest = self.gathered_shape
        return math.ceil(rows / self.mesh.size(2)) * math.prod(rest)

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """This rank's ``local`` as the whole's DTensor."""
        return DTensor.from_local(
            local,
            self.mesh,
            (Replicate(), STYLES[self.style], Shard(0)),
            run_check=False,
            shape=self.shape,
            stride=torch.empty(self.shape, device="meta").stride(),
        )

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole, of which every rank has its ``local``. Collective."""
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
        """Of ``whole[place]`` what lies here: where in this rank's piece, and where in what was
        asked for; None: nothing does."""
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
    """Which of ``size`` rows are ``rank``'s, by ``torch.chunk``'s rule."""
    rows = math.ceil(size / ranks)
    return slice(min(rank * rows, size), min((rank + 1) * rows, size))


def _shape(box: Sequence[slice]) -> torch.Size:
    return torch.Size(part.stop - part.start for part in box)


def _gather_rows(local: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The ``rows`` rows that the ranks of ``group`` hold by :func:`chunk_of`, in order."""
    if group.size() == 1:
        return local.contiguous()
    padded = local.new_zeros(math.ceil(rows / group.size()), *local.shape[1:])
    padded[: local.shape[0]] = local
    gathered_WN, work = all_gather_start(padded.flatten(), group)
    work.wait()
    return gathered_WN.view(group.size(), *padded.shape).flatten(0, 1)[:rows]
