"""Checkpoints: a folder that exists whole or not at all, and runs nobody's code when read.

``checkpoints/step-00000100/`` holds, of groups of named tensors (``model``, ``optim``, ``rng``),
files of pieces (``model-00003-00.safetensors`` is rank 3's first), ``state.json`` (step, data
position, architecture, config) and ``manifest.json``, which vouches for all. It is written under a
temporary name, fsynced and renamed. Nothing in it is a pickle.

This package knows nothing of models or optimizers: a rank gives parts of tensors
(:class:`~moetrain.parallel.layout.Part`), and asks for others (:class:`Stored`) on any layout.
"""

from moetrain.checkpoint.folder import (
    checkpoint_name,
    list_checkpoints,
    newest_in,
    remove_leftovers,
    step_of,
)
from moetrain.checkpoint.format import Damaged
from moetrain.checkpoint.read import Checkpoint, Stored, is_intact, open_checkpoint
from moetrain.checkpoint.save import Plan, Saved, Saver, written_here
from moetrain.checkpoint.staging import Staging

__all__ = [
    "Checkpoint",
    "Damaged",
    "Plan",
    "Saved",
    "Saver",
    "Staging",
    "Stored",
    "checkpoint_name",
    "is_intact",
    "list_checkpoints",
    "newest_in",
    "open_checkpoint",
    "remove_leftovers",
    "step_of",
    "written_here",
]
