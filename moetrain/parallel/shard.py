"""From a model on the meta device to sharded parameters with storage, values and gather hooks.

The order, the same for every model: match the plan, lay each parameter out as a DTensor over its
mesh, give each unit flat fp32 buffers, draw or load values, wrap the units' forwards.

A parameter is cut twice: first over tensor (or expert) parallel ranks by its style, then its first
dim over FSDP ranks; both times in equal pieces, the last ones shorter or empty (``torch.chunk``'s
rule, which is DTensor's).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
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
        cut = [slice(0, size) for size in shape]
        placement = STYLES[self.style]
        if isinstance(placement, Shard):
            dim = placement.dim
            cut[dim] = chunk_of(shape[dim], self.mesh.size(1), self.mesh.get_local_rank(1))
        gathered = torch.Size(part.stop - part.start for part in cut)
        first, ranks = cut[0].start, self.mesh.size(2)
        rows = chunk_of(gathered[0], ranks, self.mesh.get_local_rank(2))
        cut[0] = slice(first + rows.start, first + rows.stop)
        return gathered, tuple(cut), math.ceil(gathered[0] / ranks)


def chunk_of(size: int, ranks: int, rank: int) -> slice:
    """Which of ``size`` rows are ``rank``'s, by ``torch.chunk``'s rule."""
    rows = math.ceil(size / ranks)
    return slice(min(rank * rows, size), min((rank + 1) * rows, size))


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
        # Experts are large and have a mesh of their own: a bucket each, so that the gathered
        # buffer is the parameter, with no copy. The rest share one wherever the same ranks gather
        # it in the same dtype.
        groups: dict[object, list[_Entry]] = {}
        for owner in (owner for module in modules for owner in module.modules()):
            for key, parameter in owner.named_parameters(recurse=False):
                style = styles[names[id(parameter)]]
                kind = torch.float32 if style == "fp32" else dtype
                entry = _Entry(owner, key, parameter, Layout(_mesh(style, meshes), style), kind)
                alike = parameter if style == "expert" else entry.layout.mesh.get_group(2)
                groups.setdefault((id(alike), kind), []).append(entry)
        buckets = [_make_bucket(group, device) for group in groups.values()]
        fsdp.add(buckets, modules)
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, torch.zeros_like(buffer, device=device))
    return fsdp


class _Entry(NamedTuple):
    owner: nn.Module
    name: str
    parameter: nn.Parameter
    layout: Layout
    dtype: torch.dtype
    """What it is gathered in."""


def _mesh(style: str, meshes: Meshes) -> DeviceMesh:
    """Over which the parameters of a style are cut."""
    if style == "expert":
        return meshes.expert_parameters
    is_split = isinstance(STYLES[style], Shard)
    return meshes.split_parameters if is_split else meshes.shared_parameters


def _make_bucket(group: Sequence[_Entry], device: torch.device) -> Bucket:
    cuts = [entry.layout.cut(entry.parameter.shape) for entry in group]
    sizes = [padded * math.prod(shape[1:]) for shape, _, padded in cuts]
    shard_N = torch.zeros(sum(sizes), device=device)
    members, start = [], 0
    for (owner, key, parameter, layout, _), (shape, cut, _), numel in zip(
        group, cuts, sizes, strict=True
    ):
        local_shape = [part.stop - part.start for part in cut]
        local = shard_N[start : start + math.prod(local_shape)].view(local_shape)
        data = DTensor.from_local(
            local,
            layout.mesh,
            layout.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        sharded = nn.Parameter(data)
        owner.register_parameter(key, sharded)
        placement = STYLES[layout.style]
        model_axis = None
        if isinstance(placement, Shard) and layout.mesh.size(1) > 1:
            model_axis = layout.mesh.get_group(1), placement.dim
        members.append(Member(owner, key, sharded, local, shape, start, numel, cut, model_axis))
        start += numel
    *_, layout, dtype = group[0]
    mesh = layout.mesh
    return Bucket(
        members,
        mesh.get_group(2),
        shard_N,
        torch.zeros_like(shard_N),
        mesh.get_group(0) if mesh.size(0) > 1 else None,
        dtype,
    )
