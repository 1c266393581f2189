"""From a model on the meta device to sharded parameters with storage, under :class:`FSDP`.

Experts are large and have a mesh of their own: a bucket each, so that what is gathered is the
parameter, with no copy. The rest of a unit, experts' adapters too, shares a bucket wherever the
same ranks gather it in the same dtype from the same storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from moetrain.kernels.adamw import BLOCK
from moetrain.models.rules import Rule, is_adapter
from moetrain.parallel.bucket import Bucket, Member
from moetrain.parallel.fsdp import FSDP
from moetrain.parallel.layout import Layout
from moetrain.parallel.mesh import Meshes


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
        groups: dict[object, list[Member]] = {}
        for owner in (owner for module in modules for owner in module.modules()):
            for key, parameter in owner.named_parameters(recurse=False):
                name = names[id(parameter)]
                rule = rules[name]
                layout = Layout.of(parameter.shape, rule.style, meshes)
                share = 1 / meshes.dims.tp if rule.style == "partial" else 1.0
                # Its storage and place in the bucket are still to come.
                members[name] = Member(owner, key, parameter, parameter, layout, rule, 0, share)
                is_large = rule.style == "expert" and not is_adapter(name)
                alike = name if is_large else layout.group
                kind = (alike, rule.gather, rule.storage, rule.trainable)
                groups.setdefault(kind, []).append(members[name])
        buckets = [_make_bucket(group, fsdp, dtype) for group in groups.values()]
        fsdp.add(buckets, modules, is_block=all(module in blocks for module in modules))
    fsdp.members = {name: members[name] for name in names.values()}
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, torch.zeros_like(buffer, device=fsdp.device))


def _make_bucket(members: list[Member], fsdp: FSDP, dtype: torch.dtype) -> Bucket:
    size = 0
    for member in members:
        member.start = -(-size // BLOCK) * BLOCK  # a block of an update is of one parameter
        size = member.start + member.layout.padded_numel
    rule = members[0].rule
    shard_N = fsdp.weights.empty(size, rule.storage).zero_()
    for member in members:
        member.local = member.piece_of(shard_N)
        sharded = member.layout.dtensor(member.local)
        member.parameter = nn.Parameter(sharded, requires_grad=rule.trainable)
        member.module.register_parameter(member.name, member.parameter)
    return Bucket(members, shard_N, rule.gather or dtype, fsdp.gradients)
