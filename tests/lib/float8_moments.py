"""Helpers of tests/optim/test_adamw_float8.py that other tests use too."""

import torch

from moetrain.kernels.optim.adamw_float8 import Float8Moments


def moments_of(shape, box=None, key=0, device="cpu"):
    box = tuple(slice(0, n) for n in shape) if box is None else box

    def zeros(numel, dtype):
        return torch.zeros(numel, dtype=dtype, device=device)

    return Float8Moments(tuple(shape), box, key, zeros)
