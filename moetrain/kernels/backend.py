"""Which implementation of a kernel runs.

Every kernel takes ``backend``: ``reference`` (plain torch, any device), ``triton`` (or fails), or
``auto`` (the fast path on CUDA, plain torch elsewhere). The choice is made here once, by the rule
the user reads, so that no kernel falls back in silence.
"""

from typing import Literal

import torch

Backend = Literal["auto", "triton", "reference"]


def use_fast(backend: Backend, tensor: torch.Tensor) -> bool:
    """Whether ``tensor``'s kernel takes its fast path under ``backend``."""
    if backend == "auto":
        return tensor.is_cuda
    return backend == "triton"
