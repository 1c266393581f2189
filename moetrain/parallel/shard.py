"""From a model on the meta device to sharded parameters with storage, values and gather hooks.

The order, the same for every model: match the plan, lay each parameter out as a DTensor over its
mesh, give each unit flat fp32 buffers, draw or load values, wrap the units' forwards.

A parameter is cut twice, both times along whole rows: first over tensor (or expert) parallel ranks
by its style, then its first dim over FSDP ranks in equal pieces, the last ones shorter or empty
(``torch.chunk``'s rule, which is DTensor's).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moetrain.parallel.collectives import ReduceMode
from moetrain.parallel.fsdp import FSDP, Bucket, Member
from moetrain.parallel.mesh import Meshes
from moetrain.parallel.plan import STYLES, match_plan


@dataclass(frozen=True)
class Layout:
    """How one style's parameters lie: a mesh (replicate, model axis, fsdp) and a style."""

    mesh: DeviceMesh
    style: str

    @property
    def placements(self) -> tuple[Replicate | Shard, ...]:
        """Over the mesh's axes; the FSDP axis cuts what the model axis has left."""
        return (Replicate(), STYLES[self.style], Shard(0))  # pyright: ignore[reportReturnType]

    def cut(self, shape: Sequence[int]) -> tuple[torch.Size, tuple[slice, ...], int]:
        """This rank's part of a parameter of ``shape``.

        Returns the shape that the FSDP gather gives, the part of the whole parameter that this rank
        holds, and the rows of the padded shard.
        """
        gathered, cut = list(shape), [slice(0, size) for size in shape]
        placement = STYLES[self.style]
        if isinstance(placement, Shard):
            dim, ranks, rank = placement.dim, self.mesh.size(1), self.mesh.get_local_rank(1)
            gathered[dim] = shape[dim] // ranks  # divisibility is ParallelDims' check
            cut[dim] = slice(rank * gathered[dim], (rank + 1) * gathered[dim])
        ranks, rank = self.mesh.size(2), self.mesh.get_local_rank(2)
        padded = math.ceil(gathered[0] / ranks)
        first = cut[0].start
        start, stop = (min(r * padded, gathered[0]) for r in (rank, rank + 1))
        cut[0] = slice(first + start, first + stop)
        return torch.Size(gathered), tuple(cut), padded


def shard_model(
    model: nn.Module,
    plan: Mapping[str, str],
    units: Sequence[Sequence[nn.Module]],
    meshes: Meshes,
    *,
    device: torch.device,
    dtype: torch.dtype,
    mode: ReduceMode,
) -> FSDP:
    """Replace every parameter of ``model`` (on meta) by a DTensor over uninitialised storage.

    Args:
        units: modules whose parameters are gathered together, in forward order; together they hold
            every parameter.
        dtype: what parameters are gathered in.
    """
    styles = match_plan(plan, [name for name, _ in model.named_parameters()])
    names = {id(p): name for name, p in model.named_parameters()}
    fsdp = FSDP(mode)
    for modules in units:
        found = [
            (owner, key, parameter, styles[names[id(parameter)]])
            for module in modules
            for owner in module.modules()
            for key, parameter in owner.named_parameters(recurse=False)
        ]
        # Experts are large and have a mesh of their own: a bucket each, so that the gathered
        # buffer is the parameter, with no copy. The rest of a unit shares one.
        groups = [[entry] for entry in found if entry[3] == "expert"]
        groups += [[e for e in found if e[3] == "fp32"]]
        groups += [[e for e in found if e[3] not in ("expert", "fp32")]]
        buckets = []
        for group in filter(None, groups):
            is_expert = group[0][3] == "expert"
            mesh = meshes.expert_parameters if is_expert else meshes.dense_parameters
            kind = torch.float32 if group[0][3] == "fp32" else dtype
            buckets.append(_make_bucket(group, mesh, device, kind))
        fsdp.add(buckets, modules)
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, torch.zeros_like(buffer, device=device))
    return fsdp


def _make_bucket(
    group: Sequence[tuple[nn.Module, str, nn.Parameter, str]],
    mesh: DeviceMesh,
    device: torch.device,
    dtype: torch.dtype,
) -> Bucket:
    layouts = [Layout(mesh, style) for *_, style in group]
    cuts = [lay.cut(entry[2].shape) for lay, entry in zip(layouts, group, strict=True)]
    sizes = [padded * math.prod(shape[1:]) for shape, _, padded in cuts]
    shard_N = torch.zeros(sum(sizes), device=device)
    members, start = [], 0
    for (owner, key, parameter, _), layout, (shape, cut, _), numel in zip(
        group, layouts, cuts, sizes, strict=True
    ):
        local_shape = [part.stop - part.start for part in cut]
        local = shard_N[start : start + math.prod(local_shape)].view(local_shape)
        data = DTensor.from_local(
            local,
            mesh,
            layout.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        sharded = nn.Parameter(data)
        owner.register_parameter(key, sharded)
        placement = STYLES[layout.style]
        model_axis = None
        if isinstance(placement, Shard) and mesh.size(1) > 1:
            model_axis = mesh.get_group(1), placement.dim
        members.append(Member(owner, key, sharded, local, shape, start, numel, cut, model_axis))
        start += numel
    world = dist.get_world_size()
    split = mesh.size(2) * (mesh.size(1) if isinstance(STYLES[group[0][3]], Shard) else 1)
    replicas = [mesh.get_group(0)] if mesh.size(0) > 1 else []
    return Bucket(
        members,
        mesh.get_group(2),
        shard_N,
        torch.zeros_like(shard_N),
        replicas,
        world // split,
        dtype,
    )
