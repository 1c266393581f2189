"""Small checkpoints for tests: written directly, and edited."""

import shutil
from pathlib import Path

import torch
from torch.distributed import HashStore

from moetrain.checkpoint.read import open_checkpoint
from moetrain.checkpoint.save import SavePlan, Saver
from moetrain.parallel.mesh import TensorSlice
from moetrain.parallel.processes import Rendezvous

GROUPS = ("model", "optim", "rng")


def state_of(step):
    return {"step": step, "tokens": 0, "sample_index": 0, "architecture": {}, "config": {}}


def alone():
    """Return a rendezvous of one rank."""
    return Rendezvous(HashStore(), 0, 1)


def save_tensors(root, step, groups, state=None, **plan):
    """Write whole tensors, by group and name, as a run of one rank does."""
    parts = {
        g: {name: TensorSlice.all_of(x) for name, x in named.items()} for g, named in groups.items()
    }
    saver = Saver(alone())
    made = SavePlan(root=root, step=step, **{"keep": 2, **plan})
    saver.start(made, parts, state or state_of(step))
    saved = saver.wait()
    assert saved is not None
    return saved.path


def save(root, step, value=0.0, **plan):
    """Write a checkpoint of three groups of one tensor."""
    groups = {name: {"x": torch.full((3,), value)} for name in GROUPS}
    return save_tensors(root, step, groups, **plan)


def tensors_of(folder):
    """Return every tensor of a checkpoint, by group and name."""
    found = open_checkpoint(Path(folder))
    return {group: found.tensors(group) for group in found.contents.groups}


def rewrite(folder, edit):
    """Let ``edit`` change the tensors of a checkpoint, and write it with matching checksums."""
    folder = Path(folder)
    groups, state = tensors_of(folder), open_checkpoint(folder).state
    state = {name: value for name, value in state.items() if name != "format"}
    edit(groups)
    shutil.rmtree(folder)
    save_tensors(folder.parent, state["step"], groups, state)
