"""Checkpoints: a folder that exists whole or not at all, and runs nobody's code when read.

``checkpoints/step-00000100/`` holds, of groups of named tensors (``model``, ``optim``, ``rng``),
files of pieces (``model-00003-00.safetensors`` is rank 3's first), ``state.json`` (step, data
position, architecture, config) and ``manifest.json``, which vouches for all. It is written under a
temporary name, fsynced and renamed. Nothing in it is a pickle.

This package knows nothing of models or optimizers: a rank gives parts of tensors
(:class:`~moetrain.parallel.layout.TensorSlice`), and asks for others (:class:`StoredTensor`) on any
layout.
"""
