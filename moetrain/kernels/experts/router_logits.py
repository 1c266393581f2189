"""Router logits: ``x @ weight^T`` in fp32 from bf16 operands, at the speed of bf16.

A product of two bf16 numbers is exact in fp32, so nothing is lost by multiplying the operands as
they are: the tensor cores' sums are fp32, and so is what they write. In the backward the upstream
gradient is fp32, and rounding it to bf16 would lose something; it is split into two bf16 numbers
that hold its leading 16 bits, ``d = high + low + O(2^-17) d``, whose products are summed in fp32::

    dx = [high low] @ [weight; weight]        d_weight = high^T @ x + low^T @ x

Legend: T tokens, D width, E experts.
"""

from typing import Any

import torch
from torch.nn import functional as F

from moetrain.kernels.backend import Backend, use_fast
from moetrain.kernels.saving import worth_saving


def router_logits(
    x_TD: torch.Tensor, weight_ED: torch.Tensor, backend: Backend = "auto"
) -> torch.Tensor:
    """``logits_TE``, fp32 (float64 for a float64 ``x``).

    Args:
        x_TD: any floating dtype; the fast path takes bf16, and others take the reference.
        weight_ED: any floating dtype; it is rounded to ``x``'s. Its gradient has its own.

    Raises:
        ValueError: widths that differ.
    """
    if x_TD.dim() != 2 or weight_ED.dim() != 2 or x_TD.shape[1] != weight_ED.shape[1]:
        raise ValueError(
            f"router_logits: x and weight were given as {tuple(x_TD.shape)} and "
            f"{tuple(weight_ED.shape)}; it takes [T, D] and [E, D]"
        )
    if x_TD.dtype == torch.bfloat16 and use_fast(backend, x_TD):
        return _router_logits(x_TD, weight_ED)
    return router_logits_reference(x_TD, weight_ED)


def router_logits_reference(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """:func:`router_logits` in plain torch."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return F.linear(x_TD.to(wide), weight_ED.to(x_TD.dtype).to(wide))


@torch.library.custom_op("moetrain::router_logits", mutates_args=())
def _router_logits(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    return _wide_product(x_TD, weight_ED.to(x_TD.dtype).t())


@torch.library.custom_op("moetrain::router_logits_backward", mutates_args=())
def _router_logits_backward(
    parts_T2E: torch.Tensor, x_TD: torch.Tensor, weight_ED: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of ``x``, and those of ``weight`` from each part, fp32 [2E, D]."""
    d_x_TD = parts_T2E @ weight_ED.to(x_TD.dtype).repeat(2, 1)
    return d_x_TD, _wide_product(parts_T2E.t(), x_TD)


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b``, written as fp32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


@_router_logits.register_fake
def _(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    return x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=torch.float32)


@_router_logits_backward.register_fake
def _(parts_T2E, x_TD, weight_ED):
    experts, width = weight_ED.shape
    return torch.empty_like(x_TD), x_TD.new_empty(2 * experts, width, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, d_logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x_TD, weight_ED = ctx.saved_tensors
    # Here and not in the op: the compiler fuses it.
    high_TE = d_logits_TE.to(x_TD.dtype)
    low_TE = (d_logits_TE - high_TE.float()).to(x_TD.dtype)
    parts_T2E = torch.cat((high_TE, low_TE), dim=1)
    d_x_TD, d_weights_2ED = _router_logits_backward(parts_T2E, x_TD, weight_ED)
    high_ED, low_ED = d_weights_2ED.chunk(2)
    return d_x_TD, (high_ED + low_ED).to(weight_ED.dtype)


_router_logits.register_autograd(_differentiate, setup_context=_save)
worth_saving("linear", torch.ops.moetrain.router_logits.default)
