"""Which implementation of a kernel runs.

Every kernel takes ``backend``: ``reference`` (plain torch, any device), ``triton`` (or fails), or
``auto`` (the fast path on CUDA, plain torch elsewhere). The choice is made here once, by the rule
the user reads, so that no kernel falls back in silence.
"""

from typing import Literal

import torch

from moetrain.kernels.triton import INTERPRETED

Backend = Literal["auto", "triton", "reference"]


def use_fast(backend: Backend, tensor: torch.Tensor) -> bool:
    """Whether ``tensor``'s kernel takes its fast path under ``backend``.

    ``INTERPRETED`` (TRITON_INTERPRET=1 was set before the first import) lets CPU tensors take it.

    Raises:
        ValueError: ``backend="triton"`` with a CPU tensor outside Triton's interpreter.
    """
    if backend == "triton" and not (tensor.is_cuda or INTERPRETED):
        raise ValueError(
            f'backend="triton" was given a tensor on {tensor.device}; it takes CUDA tensors. Use '
            'backend="auto" or "reference" here, or set TRITON_INTERPRET=1 before importing triton'
        )
    return backend == "triton" or (backend == "auto" and tensor.is_cuda)


def require_contiguous(kernel: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for another ``tensor``."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{kernel}: was given strides {tensor.stride()}; it takes a contiguous tensor"
        )
