"""Elementwise functions as ops of their own, whose bits are the same in every graph.

The compiler computes an exponential by other code than torch does, in the kernel that it fuses it
into, and the last bit may differ. Where generation must have training's bits, both call these,
which run torch's own kernels; the compiler fuses their gradients as it likes.
"""

from typing import Any

import torch
from torch.nn import functional as F


@torch.library.custom_op("moetrain::sigmoid", mutates_args=())
def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return ``1 / (1 + exp(-x))`` in ``x``'s dtype."""
    return x.sigmoid()


@torch.library.custom_op("moetrain::softplus", mutates_args=())
def softplus(x: torch.Tensor) -> torch.Tensor:
    """Return ``log(1 + exp(x))`` in ``x``'s dtype."""
    return F.softplus(x)


@torch.library.custom_op("moetrain::exp", mutates_args=())
def exp(x: torch.Tensor) -> torch.Tensor:
    """Return ``exp(x)`` in ``x``'s dtype."""
    return x.exp()


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _save_input(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _save_output(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _of_sigmoid(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    (y,) = ctx.saved_tensors
    return dy * (1 - y) * y


def _of_softplus(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return dy * x.sigmoid()


def _of_exp(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    (y,) = ctx.saved_tensors
    return dy * y


for _op in (sigmoid, softplus, exp):
    _op.register_fake(_like)
sigmoid.register_autograd(_of_sigmoid, setup_context=_save_output)
softplus.register_autograd(_of_softplus, setup_context=_save_input)
exp.register_autograd(_of_exp, setup_context=_save_output)
