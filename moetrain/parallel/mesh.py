"""Check degrees of parallelism, and build the meshes of ranks that they describe.

:class:`ParallelDims` is arithmetic alone: it exists before any process group, so a bad layout is
one line on standard error and no rank has begun.

Ranks lie in row-major order over the dense axes, so tensor-parallel ranks are neighbours. The
expert axes regroup the same order. Worked example, 8 ranks::

    dp_replicate 2, dp_shard 2, tp 2    [[[0 1] [2 3]] [[4 5] [6 7]]]
    dp_replicate 2, efsdp 1, ep 4       [[[0 1 2 3]] [[4 5 6 7]]]
    rank 2's groups: tp 2 3, fsdp 0 2, ep 0 1 2 3, efsdp 2, dp_replicate 2 6, data 0 2 4 6,
                     tokens 0 1 2 3 4 5 6 7

Axes that cut the world the same way share one communicator.

Left out on purpose: layouts that put a machine's ranks anywhere but side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moetrain.config import ConfigError, ParallelSection
from moetrain.models.architecture import Architecture

_DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep")

_NOT_YET = {"cp": "context parallelism"}
"""Axes that have meshes and nothing that uses them yet; removing a line admits the axis."""


@dataclass(frozen=True)
class ParallelDims:
    """Degrees that multiply to the world: pp * dp_replicate * dp_shard * cp * tp.

    ``ep`` regroups dp_shard, cp and tp ranks and so is no factor of its own.

    Raises:
        ConfigError: the product is not the world's size, or ``ep`` does not divide its ranks.
    """

    world_size: int
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.pp * self.dp_replicate * self.sharding_ranks != self.world_size:
            raise ConfigError(
                f"parallel.{self._misfit()}",
                f"{self.describe()} do not multiply to the world of {self.world_size} "
                f"process{'es' * (self.world_size != 1)}; change them, launch.nproc, or leave "
                "dp_shard at -1",
            )
        if self.sharding_ranks % self.ep:
            raise ConfigError(
                "parallel.ep",
                f"{self.ep} does not divide dp_shard {self.dp_shard} x cp {self.cp} x tp {self.tp} "
                f"= {self.sharding_ranks} ranks of the world of {self.world_size}",
            )

    @classmethod
    def resolve(cls, degrees: ParallelSection, world_size: int, arch: Architecture) -> ParallelDims:
        """Make the dims of ``world_size`` ranks that train ``arch``, inferring a dp_shard of -1.

        Raises:
            ConfigError: the degrees do not fit the world or the model; it names them all.
        """
        given = {name: getattr(degrees, name) for name in (*_DENSE_AXES, "ep")}
        others = degrees.pp * degrees.dp_replicate * degrees.cp * degrees.tp
        if degrees.dp_shard == -1:
            given["dp_shard"] = max(1, world_size // others)
        for name, what in _NOT_YET.items():
            if given[name] > 1:
                raise ConfigError(
                    f"parallel.{name}", f"{given[name]}: this version has no {what}; use 1"
                )
        dims = cls(world_size, **given)
        dims._check_model(arch)
        return dims

    @property
    def sharding_ranks(self) -> int:
        """The ranks that hold one replica of a stage together: dp_shard * cp * tp."""
        return self.dp_shard * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """The ranks that shard one expert's parameters (FSDP of experts)."""
        return self.sharding_ranks // self.ep

    @property
    def data_ranks(self) -> int:
        """The parts that a global batch is cut into: dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    def describe(self) -> str:
        """Describe the degrees: ``pp 1, dp_replicate 1, dp_shard 4, cp 1, tp 2``."""
        return ", ".join(f"{name} {getattr(self, name)}" for name in _DENSE_AXES)

    def _misfit(self) -> str:
        """Give the degree to blame: the first that cannot divide the world, else dp_shard."""
        names = (name for name in _DENSE_AXES if name != "dp_shard")
        return next((n for n in names if self.world_size % getattr(self, n)), "dp_shard")

    def _check_model(self, arch: Architecture) -> None:
        where = f"in a world of {self.world_size} ({self.describe()}, ep {self.ep})"
        parts = arch.parts()
        if self.ep > 1 and all("ep" not in part.divided.values() for part in parts):
            raise ConfigError(
                "parallel.ep", f"{self.ep} {where}, but {arch.family} has no experts; use 1"
            )
        for part, name, axis in ((p, *need) for p in parts for need in p.divided.items()):
            degree, size = getattr(self, axis), getattr(part, name)
            if size % degree:
                raise ConfigError(
                    f"parallel.{axis}",
                    f"{degree} {where} does not divide the model's {name} {size}",
                )
        if math.ceil(arch.vocab_size / self.tp) * (self.tp - 1) >= arch.vocab_size:
            raise ConfigError(
                "parallel.tp",
                f"{self.tp} {where} is too much for the model's vocab_size {arch.vocab_size}: in "
                f"parts of {math.ceil(arch.vocab_size / self.tp)} the last rank has none; use less",
            )


@dataclass(frozen=True)
class Meshes:
    """One rank's view of the world: meshes for placements, groups for who shares which rows."""

    dims: ParallelDims
    dense: DeviceMesh
    """Every rank: (pp, dp_replicate, dp_shard, cp, tp)."""
    split_parameters: DeviceMesh
    """This stage's ranks: (dp_replicate, tp, fsdp); fsdp is dp_shard x cp, and cuts last."""
    shared_parameters: DeviceMesh
    """The same, where tensor parallel ranks use one value: (dp_replicate, one, fsdp), with their
    ranks in fsdp. Each sees other tokens or heads, and FSDP's reduction adds up their gradients."""
    expert_parameters: DeviceMesh
    """This stage's ranks: (dp_replicate, ep, efsdp)."""
    data: dist.ProcessGroup
    """Ranks with different rows: dp_replicate x dp_shard; this rank takes part ``data.rank()``."""
    tokens: dist.ProcessGroup
    """Ranks with different tokens, of other rows or of the same: every rank of this stage."""
    everyone: dist.ProcessGroup
    """The world."""
    communicators: tuple[dist.ProcessGroup, ...]
    """Each distinct group above and the world's, once."""

    @property
    def sharding(self) -> frozenset[tuple[int, int]]:
        """The size of every group that shards parameters, and this rank in it."""
        meshes = (self.split_parameters, self.shared_parameters, self.expert_parameters)
        groups = [mesh.get_group(mesh.ndim - 1) for mesh in meshes]
        return frozenset((group.size(), group.rank()) for group in groups)


def build_meshes(dims: ParallelDims, device_type: str) -> Meshes:
    """Build the meshes of ``dims``. Collective over the default process group."""
    groups = _Groups(device_type)
    dense_ranks = torch.arange(dims.world_size).view([getattr(dims, name) for name in _DENSE_AXES])
    expert_ranks = dense_ranks.view([getattr(dims, name) for name in _EXPERT_AXES])
    fsdp_ranks = dense_ranks.movedim(-1, 2).flatten(3)  # pp, dp_replicate, tp, fsdp
    shared_ranks = dense_ranks.flatten(2).unsqueeze(2)  # pp, dp_replicate, one, fsdp
    efsdp_ranks = expert_ranks.transpose(2, 3)  # pp, dp_replicate, ep, efsdp
    return Meshes(
        dims,
        groups.mesh(dense_ranks, _DENSE_AXES),
        groups.stage_mesh(fsdp_ranks, ("dp_replicate", "tp", "fsdp")),
        groups.stage_mesh(shared_ranks, ("dp_replicate", "one", "fsdp")),
        groups.stage_mesh(efsdp_ranks, ("dp_replicate", "ep", "efsdp")),
        # The ranks that differ in dp_replicate and dp_shard alone, flattened to one axis.
        groups.group(dense_ranks.movedim((1, 2), (3, 4)).flatten(3), 3),
        groups.group(dense_ranks.flatten(1), 1),
        groups.group(dense_ranks.flatten(), 0),
        tuple(groups.made.values()),
    )


def warm_up(meshes: Meshes, device: torch.device) -> None:
    """Make every communicator connect now, one after another, and wait until it has.

    Connections are otherwise made by the first collectives, which overlap in the first step: slow,
    and on NCCL communicators that connect at the same time can block each other.
    """
    for group in meshes.communicators:
        x_W = torch.zeros(group.size(), device=device)
        dist.all_reduce(x_W, group=group)  # rings and trees
        dist.all_to_all_single(torch.empty_like(x_W), x_W, group=group)  # every pair
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class _Groups:
    """Process groups by the way they cut the world, each made once."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        whole = tuple(range(dist.get_world_size()))
        assert dist.group.WORLD is not None  # get_world_size needed it too
        self.made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {
            (whole,): dist.group.WORLD
        }

    def group(self, ranks: torch.Tensor, axis: int) -> dist.ProcessGroup:
        """Give this rank's group along ``axis`` of a tensor that holds every rank once."""
        rows = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
        cut = tuple(sorted(map(tuple, rows)))
        if cut not in self.made:
            parts = [list(part) for part in cut]
            if self.device_type == "cuda":  # one collective split, not one a part
                group = dist.split_group(split_ranks=parts)
            else:
                group, _ = dist.new_subgroups_by_enumeration(parts)
            assert isinstance(group, dist.ProcessGroup)  # every rank is in a part
            self.made[cut] = group
        return self.made[cut]

    def mesh(self, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
        """Make a mesh of every rank."""
        groups = [self.group(ranks, axis) for axis in range(ranks.ndim)]
        return DeviceMesh.from_group(groups, self.device_type, ranks, mesh_dim_names=names)

    def stage_mesh(self, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
        """Make a mesh of this rank's part of the first (pp) axis, over the other axes."""
        groups = [self.group(ranks, axis) for axis in range(1, ranks.ndim)]
        stage = int((ranks == dist.get_rank()).nonzero()[0, 0])
        mine = ranks[stage].contiguous()
        return DeviceMesh.from_group(groups, self.device_type, mine, mesh_dim_names=names)
