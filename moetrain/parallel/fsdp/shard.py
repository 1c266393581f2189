"""From a model on the meta device to sharded parameters with storage, under :class:`FSDP`.

Experts are large and have a mesh of their own: a bucket each, so that what is gathered is the
parameter, with no copy. The rest of a unit, experts' adapters too, shares a bucket wherever the
same ranks gather it in the same dtype from the same storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn

from moetrain.kernels.optim.adamw import BLOCK
from moetrain.models.rules import Rule, is_adapter
from moetrain.parallel.fsdp.bucket import Bucket, Member
from moetrain.parallel.fsdp.float8 import Float8Shard
from moetrain.parallel.fsdp.fsdp import FSDP
from moetrain.parallel.layout import Layout
from moetrain.parallel.mesh import Meshes
from moetrain.parallel.offload.host import HostShard, Link


def shard_model(
    model: nn.Module,
    rules: Mapping[str, Rule],
    units: Sequence[Sequence[nn.Module]],
    meshes: Meshes,
    fsdp: FSDP,
    dtype: torch.dtype,
    *,
    gradient_dtype: torch.dtype = torch.float32,
    host_share: float = 0.0,
    shared: nn.Module | None = None,
) -> None:
    """Replace every parameter of ``model`` (on meta) by a DTensor over uninitialised storage.

    Args:
        rules: of every parameter, by name.
        units: modules whose parameters are gathered together, in forward order; together they hold
            every parameter. A block is a unit of its own.
        dtype: what parameters are gathered in where their rule does not say.
        gradient_dtype: what a rank's part of their gradients lies in.
        host_share: of what is trained, the part, in bytes, whose masters lie in host memory.
        shared: a module of which another rank updates a copy: its master stays on the device, since
            the host's arithmetic rounds in other places.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    blocks = {
        block for child in model.modules() if isinstance(child, nn.ModuleList) for block in child
    }
    members: dict[str, Member] = {}
    found: list[list[list[Member]]] = []
    """Each unit's buckets."""
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
                kind = (alike, rule.gather, rule.storage, rule.is_narrow, rule.trainable)
                groups.setdefault(kind, []).append(members[name])
        found.append(list(groups.values()))
    trained = [g for unit in found for g in unit if g[0].rule.trainable]
    movable = [group for group in trained if all(m.module is not shared for m in group)]
    total = sum(_places(group)[-1] for group in trained)
    hosted = _chosen([_places(group)[-1] for group in movable], host_share * total)
    on_host, link = {id(movable[i]) for i in hosted}, Link(fsdp.device)
    for modules, unit in zip(units, found, strict=True):
        buckets = [
            _make_bucket(g, fsdp, dtype, gradient_dtype, link if id(g) in on_host else None)
            for g in unit
        ]
        fsdp.add(buckets, modules, is_block=all(module in blocks for module in modules))
    fsdp.members = {name: members[name] for name in names.values()}
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, torch.zeros_like(buffer, device=fsdp.device))


def _chosen(sizes: Sequence[int], wanted: float) -> set[int]:
    """Which of ``sizes``, given in forward order, make up about as much as is ``wanted``.

    From the end: of those, gradients come first and weights are asked for last. Worked example:
    of (5, 1, 4), 4.4 takes the 4 alone, for with the 1 it would be further off.
    """
    chosen, taken = set(), 0
    for i, size in reversed(list(enumerate(sizes))):
        if taken + size / 2 <= wanted:
            chosen.add(i)
            taken += size
    return chosen


def _places(members: Sequence[Member]) -> list[int]:
    """Where in their bucket members begin, and the size of all, in numbers."""
    # A block of an update is of one parameter.
    blocks = [-(-member.layout.padded_numel // BLOCK) * BLOCK for member in members]
    starts = list(accumulate(blocks[:-1], initial=0))
    return [*starts, starts[-1] + members[-1].layout.padded_numel]


def _make_bucket(
    members: list[Member],
    fsdp: FSDP,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    link: Link | None,
) -> Bucket:
    """``link``: to the host, if the master is to lie there."""
    *starts, size = _places(members)
    rule, host, float8 = members[0].rule, None, None
    gathered = rule.gather or dtype
    if link is not None:
        host = HostShard(size, gathered, link, fsdp.weights)
        shard_N = host.master_N
    elif rule.is_narrow:
        float8 = Float8Shard(size, gathered, fsdp.weights)
        shard_N = float8.codes_N
    else:
        shard_N = fsdp.weights.empty(size, rule.storage).zero_()
    for member, start in zip(members, starts, strict=True):
        member.start, member.float8 = start, float8
        member.local = member.piece_of(shard_N)
        here = member.local if host is None else member.piece_of(host.copy_N)
        member.parameter = nn.Parameter(
            member.layout.dtensor(here), requires_grad=member.rule.trainable
        )
        if rule.trainable:  # else torch takes a gradient in the parameter's own dtype alone
            member.local.grad_dtype = member.parameter.grad_dtype = gradient_dtype
        member.module.register_parameter(member.name, member.parameter)
    return Bucket(members, shard_N, gathered, fsdp.gradients, gradient_dtype, host, float8)
