"""Products with narrow matrices, as adapters have: ``u_i = x @ a_i^T``, read in one pass over x.

cuBLAS splits the sum over the inner width of a narrow product unless there are many rows (measured
on one H200, widths of 16 to 64: all below about 5,000 rows), so that a row's bits depend on how
many it is computed beside. :func:`moetrain.kernels.small_m.linears` sums in ascending order for
any number of rows; this is its autograd, as an op for the compiler. The backward is plain torch::

    dx = sum_i du_i @ a_i        da_i = du_i^T @ x

Legend: T rows, D inner width, r outer width of each.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from moetrain.kernels import small_m
from moetrain.kernels.backend import Backend, use_fast

_MULTIPLE = 16
"""Of which the kernel's outer widths are multiples."""


def low_rank_products(
    x_TD: torch.Tensor, weights: Sequence[torch.Tensor], backend: Backend = "auto"
) -> tuple[torch.Tensor, ...]:
    """``x @ a^T`` [T, r] of up to three ``a`` [r, D] in ``x``'s dtype.

    Raises:
        ValueError: matrices of another width or dtype, or more of them.
    """
    if len(weights) > 3 or any(
        a.shape[1:] != x_TD.shape[1:] or a.dtype != x_TD.dtype for a in weights
    ):
        given = ", ".join(f"{a.dtype} {tuple(a.shape)}" for a in weights)
        raise ValueError(
            f"low_rank_products: was given x {x_TD.dtype} {tuple(x_TD.shape)} and {given}; it "
            "takes up to three [r, D] in x's dtype"
        )
    # What is not bf16 has no bits to keep, and rows that no descriptor takes have none either.
    is_for_it = x_TD.dtype == torch.bfloat16 and x_TD.shape[1] % 8 == 0
    if not is_for_it or not use_fast(backend, x_TD):
        return low_rank_products_reference(x_TD, weights)
    sizes = [a.shape[0] for a in weights]
    return _low_rank_products(x_TD.contiguous(), [a.contiguous() for a in weights]).split(sizes, 1)


def low_rank_products_reference(
    x_TD: torch.Tensor, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """:func:`low_rank_products` in plain torch."""
    return tuple(F.linear(x_TD, a) for a in weights)


@torch.library.custom_op("moetrain::low_rank_products", mutates_args=())
def _low_rank_products(x_TD: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """All of them side by side."""
    missing = [-a.shape[0] % _MULTIPLE for a in weights]
    padded = [F.pad(a, (0, 0, 0, n)) if n else a for a, n in zip(weights, missing, strict=True)]
    u_TR = small_m.product(x_TD, padded)
    if not any(missing):
        return u_TR
    parts = u_TR.split([a.shape[0] for a in padded], 1)
    return torch.cat([u[:, : a.shape[0]] for u, a in zip(parts, weights, strict=True)], 1)


@_low_rank_products.register_fake
def _(x_TD, weights):
    return x_TD.new_empty(x_TD.shape[0], sum(a.shape[0] for a in weights))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x_TD, weights = inputs
    ctx.save_for_backward(x_TD, *weights)


def _differentiate(ctx: Any, du_TR: torch.Tensor) -> tuple[Any, ...]:
    x_TD, *weights = ctx.saved_tensors
    da_RD = du_TR.t() @ x_TD if any(ctx.needs_input_grad[1]) else None
    dx_TD = du_TR @ torch.cat(weights) if ctx.needs_input_grad[0] else None
    sizes = [a.shape[0] for a in weights]
    return dx_TD, list(da_RD.split(sizes)) if da_RD is not None else [None] * len(weights)


_low_rank_products.register_autograd(_differentiate, setup_context=_save)
