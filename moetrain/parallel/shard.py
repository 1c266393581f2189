"""From a model on the meta device to sharded parameters with storage, under :class:`FSDP`.

Experts are large and have a mesh of their own: a bucket each, so that what is gathered is the
parameter, with no copy. The rest of a unit shares a bucket wherever the same ranks gather it in the
same dtype from the same storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from moetrain.models.rules import Rule
from moetrain.parallel.bucket import ALIGNMENT, Bucket, Member
from moetrain.parallel.fsdp import FSDP
from moetrain.parallel.layout import Layout
from moetrain.parallel.mesh import Meshes

_ALIGNED_NUMBERS = ALIGNMENT // 2
"""A member begins at a multiple of this in its bucket, in any dtype of two bytes or more."""


class _Entry(NamedTuple):
    owner: nn.Module
    key: str
    name: str
    parameter: nn.Parameter
    rule: Rule
    layout: Layout


def shard_model(
    model: nn.Module,
    rules: Mapping[str, Rule],
    units: Sequence[Sequence[nn.Module]],
    meshes: Meshes,
    fsdp: FSDP,
    dtype: torch.dtype,
) -> None:
    """Replace every parameter of ``model`` (on meta) by a DTensor over uninitialised storage.

    Args:
        rules: of every parameter, by name.
        units: modules whose parameters are gathered together, in forward order; together they hold
            every parameter. A block is a unit of its own.
        dtype: what parameters are gathered in where their rule does not say.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    blocks = {
        block for child in model.modules() if isinstance(child, nn.ModuleList) for block in child
    }
    members: dict[str, Member] = {}
    for modules in units:
        groups: dict[object, list[_Entry]] = {}
        for owner in (owner for module in modules for owner in module.modules()):
            for key, parameter in owner.named_parameters(recurse=False):
                name = names[id(parameter)]
                rule = rules[name]
                layout = Layout.of(parameter.shape, rule.style, meshes)
                entry = _Entry(owner, key, name, parameter, rule, layout)
                alike = name if rule.style == "expert" else layout.group
                kind = (alike, rule.gather, rule.storage, rule.trainable)
                groups.setdefault(kind, []).append(entry)
        buckets = []
        for group in groups.values():
            bucket = _make_bucket(group, fsdp.device, dtype, meshes.dims.tp)
            members |= {e.name: m for e, m in zip(group, bucket.members, strict=True)}
            buckets.append(bucket)
        fsdp.add(buckets, modules, is_block=all(module in blocks for module in modules))
    fsdp.members = {name: members[name] for name in names.values()}
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, torch.zeros_like(buffer, device=fsdp.device))


def _make_bucket(
    group: Sequence[_Entry], device: torch.device, dtype: torch.dtype, tensor_ranks: int
) -> Bucket:
    starts, size = [], 0
    for entry in group:
        starts.append(-(-size // _ALIGNED_NUMBERS) * _ALIGNED_NUMBERS)
        size = starts[-1] + entry.layout.padded_numel
    rule = group[0].rule
    shard_N = torch.zeros(size, device=device, dtype=rule.storage)
    members = []
    for (owner, key, _, _, own_rule, layout), start in zip(group, starts, strict=True):
        local = shard_N[start : start + layout.local_shape.numel()].view(layout.local_shape)
        sharded = nn.Parameter(layout.dtensor(local), requires_grad=own_rule.trainable)
        owner.register_parameter(key, sharded)
        share = 1 / tensor_ranks if own_rule.style == "partial" else 1.0
        members.append(Member(owner, key, sharded, local, layout, own_rule, start, share))
    return Bucket(members, shard_N, rule.gather or dtype)
