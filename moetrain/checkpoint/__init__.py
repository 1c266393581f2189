"""Checkpoints: folders that exist whole or not at all. Reading a checkpoint runs no code from it.

``checkpoints/step-00000100/`` holds groups of named tensors (``model``, ``optim``, ``rng``) in
files of pieces (``model-00003-00.safetensors`` is rank 3's first), ``state.json`` (step, data
position, architecture, config), and ``manifest.json`` with checksums of all files. The folder is
written under a temporary name, fsynced and renamed. Nothing in it is a pickle.

This package knows nothing of models or optimizers: a rank hands over slices of tensors
(:class:`~moetrain.parallel.mesh.TensorSlice`), and reads others
(:class:`~moetrain.checkpoint.read.StoredTensor`) on any layout.
"""
