"""Elementwise functions as ops of their own, with the same bits in every graph.

The compiler fuses an exponential into other kernels, and computes it by other code than torch, so
that the last bit may differ. Where generation must have the bits of training, ``fusible`` is False,
and torch's own kernels run. The compiler may still fuse the gradients.
"""

import torch
from torch.nn import functional as F

from moetrain.runtime.backend import refusal
from moetrain.runtime.typed import OpContext


def sigmoid(x: torch.Tensor, *, fusible: bool) -> torch.Tensor:
    """Return ``1 / (1 + exp(-x))`` in ``x``'s dtype."""
    _check("sigmoid", x)
    return x.sigmoid() if fusible else sigmoid_op(x)


@torch.library.custom_op("moetrain::sigmoid", mutates_args=())
def sigmoid_op(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid()


def softplus(x: torch.Tensor, *, fusible: bool) -> torch.Tensor:
    """Return ``log(1 + exp(x))`` in ``x``'s dtype."""
    _check("softplus", x)
    return F.softplus(x) if fusible else softplus_op(x)


@torch.library.custom_op("moetrain::softplus", mutates_args=())
def softplus_op(x: torch.Tensor) -> torch.Tensor:
    return F.softplus(x)


def exp(x: torch.Tensor, *, fusible: bool) -> torch.Tensor:
    """Return ``exp(x)`` in ``x``'s dtype."""
    _check("exp", x)
    return x.exp() if fusible else exp_op(x)


@torch.library.custom_op("moetrain::exp", mutates_args=())
def exp_op(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


def _check(name: str, x: torch.Tensor) -> None:
    if not x.is_floating_point():
        raise refusal(name, "a floating dtype", x=x)


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _save_input(ctx: OpContext, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _save_output(ctx: OpContext, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _sigmoid_gradient(ctx: OpContext, dy: torch.Tensor) -> torch.Tensor:
    (y,) = ctx.saved_tensors
    return dy * (1 - y) * y


def _softplus_gradient(ctx: OpContext, dy: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return dy * x.sigmoid()


def _exp_gradient(ctx: OpContext, dy: torch.Tensor) -> torch.Tensor:
    (y,) = ctx.saved_tensors
    return dy * y


for _op in (sigmoid_op, softplus_op, exp_op):
    _op.register_fake(_empty_like)
sigmoid_op.register_autograd(_sigmoid_gradient, setup_context=_save_output)
softplus_op.register_autograd(_softplus_gradient, setup_context=_save_input)
exp_op.register_autograd(_exp_gradient, setup_context=_save_output)
