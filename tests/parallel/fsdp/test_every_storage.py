"""Every storage of a bucket's shard keeps the promises of its base class, ``Storage``.

A new storage needs a row of ``WORDS``: settings with which some buckets have it.
"""

import pytest
import torch
import torch.distributed as dist

from moetrain.parallel.fsdp.storage.registry import STORAGES
from tests.lib.distributed import spawn
from tests.lib.engines import ROWS, make_batches, make_engine, objective_of

WORDS = {
    "Plain": [],
    "Offloaded": ["optim.offload_fraction=0.5"],
    "Quantised": ["lora.rank=8", "lora.base_dtype=float8", "moe.bias_update_rate=0"],
}
"""By the name of the class."""
SIZES = ["train.dtype=bfloat16", "model.num_experts=6", "model.hidden_size=64"]


def test_every_storage_has_settings_that_choose_it():
    assert WORDS.keys() == {kind.__name__ for kind in STORAGES}


def whole_of(bucket, member):
    """Return what all ranks read of a parameter, in the dtype in which it is gathered."""
    parts = [torch.empty(0)] * bucket.group.size()
    dist.all_gather_object(parts, member.read().detach().float().cpu(), group=bucket.group)
    return torch.cat(parts).to(bucket.dtype)


def broken_promises(name):
    """Return the promises that the storage called ``name`` breaks, each with a parameter."""
    engine = make_engine(*SIZES, *WORDS[name], micro=ROWS // dist.get_world_size())
    fsdp, world, broken = engine.fsdp, engine.world, []
    stored = [b for b in fsdp.buckets if type(b.storage).__name__ == name]
    assert stored, f"no bucket has the storage {name}"
    names = {id(member): key for key, member in fsdp.members.items()}
    members = {names[id(member)]: (b, member) for b in stored for member in b.members}

    def check(when):
        """Compare what a gather brings with what is read."""
        with fsdp.work():
            for unit in fsdp.units:
                fsdp.unshard(unit)
                for bucket in (b for b in unit.buckets if b in stored):
                    for member, row in zip(bucket.members, bucket.rows(), strict=True):
                        if not torch.equal(row.detach().cpu(), whole_of(bucket, member)):
                            broken.append((when, names[id(member)]))

    def read():
        return {key: whole_of(*found).float() for key, found in members.items()}

    check("new")
    first, weights = read(), {key: weight.clone() for key, weight in engine.weights()}
    for key in members:
        fsdp.write(key, (), weights[key])
    broken += [("as read", key) for key, x in read().items() if not torch.equal(x, first[key])]
    for key in members:
        fsdp.write(key, (), 1.5 * weights[key])
    check("written")
    for key, x in read().items():
        if (x - 1.5 * first[key]).norm() > 0.1 * x.norm():
            broken.append(("near what was written", key))
    before = read()
    batches = make_batches(0, ROWS // world.size, world.data_rank, world.dims.data_ranks)
    engine.forward_backward(batches, objective_of(engine))
    engine.step(1e-1)
    fsdp.settle()
    check("updated")
    for key, x in read().items():
        if torch.equal(x, before[key]) == members[key][1].rule.trainable:
            broken.append(("updated if it is trained", key))
    engine.offload()
    engine.reload()
    check("reloaded")
    return broken


@pytest.mark.tier("long", quick=["1-Plain", "1-Offloaded", "1-Quantised"])
@pytest.mark.parametrize("name", [kind.__name__ for kind in STORAGES])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_storage_keeps_its_promises(name, ranks):
    assert spawn(ranks, broken_promises, name) == [[]] * ranks
