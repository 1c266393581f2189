"""What is not trained, told apart by its values: no checkpoint of a run holds it.

Left out on purpose: telling apart on purpose, for this is no hash that withstands an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from moetrain.parallel.fsdp.bucket import Member
from moetrain.parallel.layout import Layout
from moetrain.parallel.pipeline.stages import Stages
from moetrain.parallel.world import World

NUMBERS = 2**24
"""Of a tensor, summed up at a time."""


@torch.no_grad()
def fingerprint(members: Mapping[str, Member], stages: Stages, world: World) -> str:
    """The same on any layout, and in any dtype that holds the values; empty: all is trained.

    Collective.
    """
    frozen = {n: stages.table[n] for n, rule in stages.rules.items() if not rule.trainable}
    if not frozen:
        return ""
    sums = torch.zeros(len(frozen), dtype=torch.int64, device=world.device)
    for i, (name, entry) in enumerate(frozen.items()):
        if name in members and entry.holders[0] == stages.rank:
            sums[i] = _checksum(members[name].layout, members[name].read())
    rows = zip(frozen.items(), world.sum_all(sums).tolist(), strict=True)
    lines = (f"{name} {list(entry.shape)} {total}" for (name, entry), total in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _checksum(layout: Layout, local: torch.Tensor) -> torch.Tensor:
    """This rank's share (int64) of a number that all ranks' add up to, on any layout.

    That is the sum, modulo 2^64, of every row's bits in fp32 times the row's number; copies count
    once.
    """
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    if layout.mesh.get_local_rank(0) > 0 or not local.numel():
        return total
    number = layout.box[0].start + 1
    for part in local.split(max(1, NUMBERS // local[0].numel())):
        bits_RN = part.float().reshape(part.shape[0], -1).view(torch.int32)
        numbers_R = torch.arange(number, number + part.shape[0], device=local.device)
        total += (bits_RN.sum(1, dtype=torch.int64) * numbers_R).sum()
        number += part.shape[0]
    return total
