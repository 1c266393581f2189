"""Degrees of parallelism, the meshes of ranks that they describe, and a parameter's layout on one.

:class:`ParallelDims` is arithmetic alone, and needs no process group. So a bad layout is one line
on standard error, before any rank has begun.

Ranks lie in row-major order over the dense axes, so tensor-parallel ranks are neighbours. The
expert axes regroup the same order. Worked example, 8 ranks::

    dp_replicate 2, dp_shard 2, tp 2    [[[0 1] [2 3]] [[4 5] [6 7]]]
    dp_replicate 2, efsdp 1, ep 4       [[[0 1 2 3]] [[4 5 6 7]]]
    rank 2's groups: tp 2 3, fsdp 0 2, ep 0 1 2 3, efsdp 2, dp_replicate 2 6, data 0 2 4 6,
                     tokens 0 1 2 3 4 5 6 7

Axes that cut the world the same way share one communicator. One process is a mesh of one rank.

A parameter is cut twice: over tensor (or expert) parallel ranks by its rule's style, then its first
dim over FSDP ranks. Each time the pieces are equal, but the last ones may be shorter or empty
(``torch.chunk``'s rule, which is DTensor's). Sharding, initial values, checkpoints, export and the
loading of weights all ask :class:`Layout`.

Left out on purpose: layouts that put a machine's ranks anywhere but side by side.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moetrain.config import ConfigError, ParallelSection
from moetrain.models.architecture import Architecture
from moetrain.models.rules import ParameterStyle
from moetrain.parallel.collectives import (
    all_gather_single,
    all_reduce,
    all_to_all_single,
    new_subgroups,
    sharded_dim,
    split_group,
)
from moetrain.runtime.typed import ints, rows_of_ints

_DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep")


@dataclass(frozen=True)
class ParallelDims:
    """Degrees that multiply to the world: pp * dp_replicate * dp_shard * cp * tp.

    ``ep`` regroups dp_shard, cp and tp ranks, and is no factor of its own.

    Raises:
        ConfigError: the product is not the world's size, or ``ep`` does not divide
            ``sharding_ranks``.
    """

    world_size: int
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    cp_method: str = "ulysses"
    per_machine: int = 0
    """The number of ranks on each machine; they are neighbours. 0: all ranks are on one machine."""

    def __post_init__(self) -> None:
        if self.pp * self.dp_replicate * self.sharding_ranks != self.world_size:
            # The error names the first degree that cannot divide the world, else dp_shard.
            names = (name for name in _DENSE_AXES if name != "dp_shard")
            odd = next((n for n in names if self.world_size % getattr(self, n)), "dp_shard")
            others = self.pp * self.dp_replicate * self.token_ranks
            remedy = f"lower one, or start a multiple of {others} processes (launch.nproc)"
            if self.world_size % others == 0:
                product = others * max(1, self.dp_shard)
                remedy = f"leave dp_shard at -1, or start {product} processes (launch.nproc)"
            raise ConfigError(
                f"parallel.{odd}",
                f"{self.describe()} do not multiply to the world of {self.world_size} "
                f"process{'es' * (self.world_size != 1)}; {remedy}",
            )
        if self.sharding_ranks % self.ep:
            raise ConfigError(
                "parallel.ep",
                f"{self.ep} does not divide dp_shard {self.dp_shard} x cp {self.cp} x tp {self.tp} "
                f"= {self.sharding_ranks} ranks of the world of {self.world_size}; use "
                f"{math.gcd(self.ep, self.sharding_ranks)}",
            )

    @classmethod
    def resolve(
        cls, degrees: ParallelSection, world_size: int, arch: Architecture, per_machine: int = 0
    ) -> Self:
        """Make the dims that train ``arch``. Degrees of -1 are inferred.

        Raises ConfigError: no degrees fit.
        """
        wanted = {name: getattr(degrees, name) for name in (*_DENSE_AXES, "ep")}
        near, of_stage = degrees.cp * degrees.tp, world_size // degrees.pp
        if degrees.dp_replicate == -1:
            size = near * degrees.dp_shard if degrees.dp_shard > 0 else per_machine
            wanted["dp_replicate"] = max(1, of_stage // (size or world_size))
        if degrees.dp_shard == -1:
            wanted["dp_shard"] = max(1, of_stage // (near * wanted["dp_replicate"]))
        dims = cls(world_size, per_machine=per_machine, **wanted)
        dims.check_model(arch)
        return replace(dims, cp_method=dims._context_method(degrees.cp_method, arch))

    @property
    def sharding_ranks(self) -> int:
        """The number of ranks that hold one replica of a stage together: dp_shard * cp * tp."""
        return self.dp_shard * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """The number of ranks that shard one expert's parameters (FSDP of experts)."""
        return self.sharding_ranks // self.ep

    @property
    def token_ranks(self) -> int:
        """The number of ranks that share the tokens of the same batch rows: cp * tp."""
        return self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """The number of parts that a global batch is cut into: dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    def machines(self, ranks: int) -> int:
        """Return the most machines that a group of ``ranks`` neighbours may span."""
        per_machine = self.per_machine or self.world_size
        is_inside = self.world_size <= per_machine or per_machine % ranks == 0
        return 1 if is_inside else max(2, math.ceil(ranks / per_machine))

    def describe(self) -> str:
        """Return a description: ``pp 1, dp_replicate 1, dp_shard 4, cp 1, tp 2``."""
        return ", ".join(f"{name} {getattr(self, name)}" for name in _DENSE_AXES)

    def check_model(self, arch: Architecture) -> None:
        """Raise ConfigError if a degree does not divide what its ranks share of ``arch``."""
        where = f"in a world of {self.world_size} ({self.describe()}, ep {self.ep})"
        parts = arch.parts()
        if self.ep > 1 and all("ep" not in part.divided.values() for part in parts):
            problem = f"{self.ep} {where}, but {arch.family} has no experts; use 1"
            raise ConfigError("parallel.ep", problem)
        needs = [(name, getattr(p, name), axis) for p in parts for name, axis in p.divided.items()]
        for name, size, axis in needs:
            if size % (degree := getattr(self, axis)):
                fits = math.gcd(degree, *(other for _, other, of in needs if of == axis))
                problem = f"{degree} {where} does not divide the model's {name} {size}"
                raise ConfigError(f"parallel.{axis}", f"{problem}; use {fits}")
        size, fits = arch.vocab_size, [n for n in range(1, self.tp + 1) if self.tp % n == 0]
        # The last rank must have some rows too.
        fits = [n for n in fits if math.ceil(size / n) * (n - 1) < size]
        if self.tp not in fits:
            raise ConfigError(
                "parallel.tp",
                f"{self.tp} {where} is too much for the model's vocab_size {size}: with parts of "
                f"{math.ceil(size / self.tp)} rows the last rank gets none; use {fits[-1]}",
            )

    def _context_method(self, wanted: str, arch: Architecture) -> str:
        """Return how context parallel ranks share attention: ``wanted``, unless that is auto."""
        if self.cp == 1:
            return "ulysses"
        ranks, problem = self.token_ranks, None
        where = f"{self.cp} in a world of {self.world_size}: cp x tp = {ranks} ranks cannot share"
        for part in arch.attentions():
            if part.carries_state:
                sizes = {name: getattr(part, name) for name in part.divided}
                if bad := [f"{name} {size}" for name, size in sizes.items() if size % ranks]:
                    problem = f"{where} the {bad[0]} of a layer with a recurrent state"
                    raise ConfigError("parallel.cp", f"{problem}; let cp x tp divide it")
                continue
            if part.most_keys is not None:
                problem = (
                    f"{self.cp} in a world of {self.world_size}: layers of {arch.family} select "
                    "keys, and ulysses does not exchange these; set parallel.cp_method all_gather"
                )
            heads, groups = getattr(part, "num_heads", 1), getattr(part, "num_kv_heads", 0)
            groups = groups or heads  # none: each head has keys of its own
            if heads % ranks or (groups % ranks and ranks % groups):
                problem = (
                    f"{where} num_heads {heads} and num_kv_heads {groups}; let cp x tp divide "
                    "num_heads, and num_kv_heads be a multiple or a divisor of it, or use "
                    "parallel.cp_method all_gather"
                )
        if problem and wanted == "ulysses":
            raise ConfigError("parallel.cp", problem)
        return "all_gather" if problem or wanted == "all_gather" else "ulysses"


class ExpertHops(NamedTuple):
    """The groups that tokens cross on their way to experts where ``ep`` spans several machines."""

    across: dist.ProcessGroup
    """One expert parallel rank of each machine: the one with this rank's index on its machine."""
    inside: dist.ProcessGroup
    """The expert parallel ranks of this machine."""


@dataclass(frozen=True)
class Meshes:
    """One rank's view of the world: meshes for placements, groups for collectives."""

    dims: ParallelDims
    """The degrees that the meshes were built from."""
    dense: DeviceMesh
    """Every rank: (pp, dp_replicate, dp_shard, cp, tp)."""
    split_parameters: DeviceMesh
    """This stage's ranks: (dp_replicate, tp, fsdp), where fsdp is dp_shard x cp, and cuts last."""
    shared_parameters: DeviceMesh
    """This stage's ranks, for parameters of which every tensor parallel rank uses the whole:
    (dp_replicate, one, fsdp), where fsdp is dp_shard x cp x tp. Tensor parallel ranks see other
    tokens or heads, and FSDP's reduction adds up their gradients."""
    expert_parameters: DeviceMesh
    """This stage's ranks: (dp_replicate, ep, efsdp)."""
    data: dist.ProcessGroup
    """Ranks with different batch rows: dp_replicate x dp_shard. This rank trains on part
    ``data.rank()`` of a global batch."""
    tokens: dist.ProcessGroup
    """Ranks with different tokens, of the same batch rows or of others: every rank of this
    stage."""
    everyone: dist.ProcessGroup
    """Every rank of the world."""
    expert_hops: ExpertHops
    """The expert parallel ranks that tokens travel over, machine by machine."""
    communicators: tuple[dist.ProcessGroup, ...]
    """Every distinct group above, and the world's, once each."""

    @property
    def sharding(self) -> frozenset[tuple[int, int]]:
        """The size of every group that shards parameters, and this rank's number in it."""
        meshes = (self.split_parameters, self.shared_parameters, self.expert_parameters)
        return frozenset((mesh.shape[-1], mesh.get_local_rank(mesh.ndim - 1)) for mesh in meshes)

    def warm_up(self, device: torch.device) -> None:
        """Make every communicator connect now, one after another, and wait until it has.

        Otherwise the first collectives would connect. They overlap in the first step, which is
        slow, and NCCL communicators that connect at the same time can block each other.
        """
        for group in self.communicators:
            x_W = torch.zeros(group.size(), device=device)
            all_reduce(x_W, group=group)  # connects rings and trees
            all_to_all_single(torch.empty_like(x_W), x_W, group=group)  # connects every pair
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def build_meshes(dims: ParallelDims, device_type: str) -> Meshes:
    """Build the meshes of ``dims``. Collective over the default process group."""
    groups = _Groups(device_type)
    dense_ranks = torch.arange(dims.world_size).view([getattr(dims, name) for name in _DENSE_AXES])
    expert_ranks = dense_ranks.view([getattr(dims, name) for name in _EXPERT_AXES])
    fsdp_ranks = dense_ranks.movedim(-1, 2).flatten(3)  # pp, dp_replicate, tp, fsdp
    shared_ranks = dense_ranks.flatten(2).unsqueeze(2)  # pp, dp_replicate, one, fsdp
    efsdp_ranks = expert_ranks.transpose(2, 3)  # pp, dp_replicate, ep, efsdp
    placed_ranks = torch.unflatten(expert_ranks, 3, (dims.machines(dims.ep), -1))
    data_ranks = dense_ranks.movedim((1, 2), (3, 4)).flatten(3)  # pp, cp, tp, dp
    # All ranks make these groups in one order, that of the arguments.
    return Meshes(
        dims=dims,
        dense=groups.mesh(dense_ranks, *_DENSE_AXES),
        split_parameters=groups.mesh(fsdp_ranks, "dp_replicate", "tp", "fsdp"),
        shared_parameters=groups.mesh(shared_ranks, "dp_replicate", "one", "fsdp"),
        expert_parameters=groups.mesh(efsdp_ranks, "dp_replicate", "ep", "efsdp"),
        data=groups.group(data_ranks, 3),
        tokens=groups.group(dense_ranks.flatten(1), 1),
        everyone=groups.group(dense_ranks.flatten(), 0),
        expert_hops=ExpertHops(
            across=groups.group(placed_ranks, 3), inside=groups.group(placed_ranks, 4)
        ),
        communicators=tuple(groups.made.values()),
    )


_Cut = tuple[tuple[int, ...], ...]
"""The ranks of the world in groups, each in order."""


class _Groups:
    """Makes process groups, once for each way to cut the world."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        whole = tuple(range(dist.get_world_size()))
        assert dist.group.WORLD is not None  # get_world_size needed it too
        self.made: dict[_Cut, dist.ProcessGroup] = {(whole,): dist.group.WORLD}

    def group(self, ranks: torch.Tensor, axis: int) -> dist.ProcessGroup:
        """Return this rank's group along ``axis`` of ``ranks``, which holds every rank once."""
        rows = rows_of_ints(ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]))
        cut = tuple(sorted(map(tuple, rows)))
        if cut not in self.made:
            parts = [list(part) for part in cut]
            if self.device_type == "cuda":  # one collective split, instead of one for each part
                group = split_group(split_ranks=parts)
            else:
                group, _ = new_subgroups(parts)
            assert group is not None  # every rank is in a part
            self.made[cut] = group
        return self.made[cut]

    def mesh(self, ranks: torch.Tensor, *names: str) -> DeviceMesh:
        """Build the mesh of the last axes of ``ranks``, which have ``names``.

        If the pp axis comes before them, the mesh is that of this rank's pipeline stage.
        """
        before = ranks.ndim - len(names)
        groups = [self.group(ranks, axis) for axis in range(before, ranks.ndim)]
        place = (ranks == dist.get_rank()).nonzero()[0, :before]
        return DeviceMesh.from_group(
            groups, self.device_type, ranks[tuple(place)].contiguous(), mesh_dim_names=names
        )


# ---- layouts ------------------------------------------------------------------------------------

STYLES: dict[ParameterStyle, Placement] = {
    "replicate": Replicate(),
    "partial": Replicate(),
    "colwise": Shard(0),
    "rowwise": Shard(1),
    "expert": Shard(0),
}
"""The placement over the tensor parallel axis; for ``expert``, over the expert parallel axis."""

Box = tuple[slice, ...]


class Sliced(Protocol):
    """A tensor, in memory or in a file, that is read where it is indexed."""

    def __getitem__(self, box: Any, /) -> torch.Tensor:
        """Return the part in ``box``."""
        ...


class Sliceable(Sliced, Protocol):
    """A whole tensor of known shape. ``[()]`` reads all of it."""

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
    """The part's place in the whole."""
    copy: int = 0
    """This rank's number among the ranks that hold this very part."""
    copies: int = 1
    """The number of ranks that hold this very part."""

    @classmethod
    def all_of(cls, tensor: torch.Tensor) -> Self:
        """Wrap a whole tensor that this rank alone has."""
        return cls(tensor, tensor.shape, tuple(slice(0, size) for size in tensor.shape))

    def is_written_here(self, name: str) -> bool:
        """Return True if this rank saves ``name``. Ranks with copies share the names evenly."""
        return zlib.crc32(name.encode()) % self.copies == self.copy


@dataclass(frozen=True)
class Layout:
    """One parameter of ``shape`` on ``mesh``: (replicate, tensor or expert parallel, FSDP)."""

    shape: torch.Size
    style: ParameterStyle
    mesh: DeviceMesh

    @classmethod
    def of(cls, shape: torch.Size, style: ParameterStyle, meshes: Meshes) -> Self:
        """Lay out a parameter of ``shape`` over the ranks of ``meshes`` as ``style`` says."""
        if style == "expert":
            return cls(shape, style, meshes.expert_parameters)
        is_split = isinstance(STYLES[style], Shard)
        return cls(shape, style, meshes.split_parameters if is_split else meshes.shared_parameters)

    # Cached, so that they outlive the process group, which a run of one process can do without.
    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The FSDP ranks, which gather from one another."""
        return self.mesh.get_group(2)

    @cached_property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold this very piece; None: only this one does."""
        return self.mesh.get_group(0) if self.mesh.size(0) > 1 else None

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The DTensor's placements, one for each axis of the mesh. The boxes follow from them."""
        return Replicate(), STYLES[self.style], Shard(0)

    @cached_property
    def gathered_box(self) -> Box:
        """The part that this rank's FSDP group holds together."""
        return self._box(self._coordinate[:2])

    @cached_property
    def box(self) -> Box:
        """The part that this rank holds."""
        return self._box(self._coordinate)

    def box_of(self, rank: int) -> Box:
        """Return the part that ``rank`` of the world holds, which must be in the mesh."""
        return self._box(ints((self.mesh.mesh == rank).nonzero()[0]))

    def _box(self, coordinate: Sequence[int]) -> Box:
        """Cut the whole by the placements of the first axes, as many as ``coordinate`` has."""
        box = [slice(0, size) for size in self.shape]
        for axis, index in enumerate(coordinate):
            dim = sharded_dim(self.placements[axis])
            if dim is not None:
                whole = box[dim]
                part = chunk_of(whole.stop - whole.start, self.mesh.size(axis), index)
                box[dim] = slice(whole.start + part.start, whole.start + part.stop)
        return tuple(box)

    def part(self, local: torch.Tensor) -> TensorSlice:
        """Return ``local``, this rank's piece, as a part of the whole."""
        return TensorSlice(local, self.shape, self.box, self._coordinate[0], self.mesh.size(0))

    def common(self, tensor: torch.Tensor) -> TensorSlice:
        """Return ``tensor`` as a whole of which every rank of the mesh has a copy."""
        number = 0
        for axis, index in enumerate(self._coordinate):
            number = number * self.mesh.size(axis) + index
        return TensorSlice.all_of(tensor)._replace(copy=number, copies=self.mesh.size())

    @property
    def _coordinate(self) -> Sequence[int]:
        place = self.mesh.get_coordinate()
        assert place is not None  # a rank has layouts only on its own meshes
        return place

    @cached_property
    def local_shape(self) -> torch.Size:
        return torch.Size(part.stop - part.start for part in self.box)

    @cached_property
    def gathered_shape(self) -> torch.Size:
        return torch.Size(part.stop - part.start for part in self.gathered_box)

    def piece_of(self, flat_N: torch.Tensor, start: int) -> torch.Tensor:
        """Return the view of ``flat_N``, or of each row of [S, N], that is this rank's piece if the
        piece begins at element ``start``."""
        shape = self.local_shape
        return flat_N.narrow(-1, start, shape.numel()).view(flat_N.shape[:-1] + shape)

    @property
    def is_gathered(self) -> bool:
        """True: the parameter must be gathered before use."""
        is_split = self.style != "expert" and isinstance(STYLES[self.style], Shard)
        return self.mesh.size(2) > 1 or (is_split and self.mesh.size(1) > 1)

    @cached_property
    def padded_numel(self) -> int:
        """The elements that each rank sends in a gather: those of the largest piece."""
        rows, *rest = self.gathered_shape
        return math.ceil(rows / self.mesh.size(2)) * math.prod(rest)

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """Return the whole's DTensor, made from this rank's ``local``."""
        spec = self._specs.get(local.dtype)
        if spec is not None:  # a tenth of the time of from_local, which every gradient would take
            return DTensor(local, spec, requires_grad=False)
        stride = torch.empty(self.shape, device="meta").stride()
        made = DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=stride,
        )
        # Torch has no public name for it.
        self._specs[local.dtype] = made._spec  # pyright: ignore[reportPrivateUsage]
        return made

    @cached_property
    def _specs(self) -> dict[torch.dtype, Any]:
        return {}

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """Return the whole, gathered from every rank's ``local``. Collective."""
        # Not DTensor.full_tensor: torch 2.11 has none for meshes whose axes are not in rank order.
        whole = _gather_rows(local, self.gathered_shape[0], self.group)
        dim = sharded_dim(STYLES[self.style])
        if dim is None or self.mesh.size(1) == 1:
            return whole
        group = self.mesh.get_group(1)
        return _gather_rows(whole.movedim(dim, 0), self.shape[dim], group).movedim(0, dim)

    def overlap(
        self, place: tuple[int | slice, ...]
    ) -> tuple[tuple[int | slice, ...], tuple[slice, ...]] | None:
        """Return what this rank holds of ``whole[place]``; None: nothing.

        The first result is the place in this rank's piece, the second the place in
        ``whole[place]``.
        """
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
    """Return ``rank``'s part of ``size`` rows, by ``torch.chunk``'s rule."""
    rows = math.ceil(size / ranks)
    return slice(min(rank * rows, size), min((rank + 1) * rows, size))


def all_gather_start(
    x_N: torch.Tensor, group: dist.ProcessGroup, out_WN: torch.Tensor | None = None
) -> tuple[torch.Tensor, dist.Work]:
    """Begin to gather every rank's ``x_N`` in rank order. Returns ``x_WN`` and the work."""
    x_WN = x_N.new_empty(group.size(), x_N.shape[0]) if out_WN is None else out_WN
    # The output is flat, because gloo does not stack.
    return x_WN, all_gather_single(x_WN.view(-1), x_N, group=group, async_op=True)


def _gather_rows(local: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the ``rows`` rows that the ranks of ``group`` hold by ``torch.chunk``'s rule."""
    if group.size() == 1:
        return local.contiguous()
    padded = local.new_zeros(math.ceil(rows / group.size()), *local.shape[1:])
    padded[: local.shape[0]] = local
    gathered_WN, work = all_gather_start(padded.flatten(), group)
    work.wait()
    return gathered_WN.view(group.size(), *padded.shape).flatten(0, 1)[:rows]
