"""The experts' matrix products, grouped by expert, and the router's, in fp32.

This module alone names torch's grouped GEMM, and chooses between it and ours
(:mod:`moetrain.kernels.experts.grouped`). Both have the same bits. Rows of ``a`` are sorted by
group, and group g has the rows ``offsets[g-1]:offsets[g]``. Outputs and gradients of rows past
``offsets[-1]`` are uninitialised memory. Nothing may reduce over them, since 0 x NaN is NaN.

:func:`router_logits` is ``x @ weight^T`` in fp32 at the speed of bf16: products of bf16 numbers are
exact in fp32, in which tensor cores add. The upstream gradient is fp32. It is split into two bf16
numbers that hold its leading 16 bits, ``d = high + low + O(2^-17) d``::

    dx = [high low] @ [weight; weight]        d_weight = high^T @ x + low^T @ x

Legend: R rows, T tokens, E groups (experts), M and N the inner and outer widths, D width.
"""

import torch
from torch.nn import functional as F
from torch.nn.functional import grouped_mm as _grouped_mm

from moetrain.kernels import small_m
from moetrain.kernels.experts import grouped
from moetrain.runtime.backend import (
    Backend,
    gradients,
    refusal,
    save_inputs,
    use_fast,
    worth_saving,
)
from moetrain.runtime.typed import OpContext

_ALIGNMENT_BYTES = 16
"""torch's grouped GEMM reads rows in vectors of 16 bytes."""


def width_multiple(dtype: torch.dtype) -> int:
    """Return the number that must divide a matrix's widths for products in ``dtype`` on a GPU."""
    return _ALIGNMENT_BYTES // dtype.itemsize


def _is_aligned(dtype: torch.dtype, *widths: int) -> bool:
    return not any(width % width_multiple(dtype) for width in widths)


def grouped_mm(
    a_RM: torch.Tensor,
    b_EMN: torch.Tensor,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    """Return ``out[r] = a[r] @ b[group of r]``: [R, M] x [E, M, N] -> [R, N], in ``a``'s dtype.

    ``offsets_E`` is int32. The product is fast in bf16, and on a CPU in fp16 and fp32. Other
    dtypes, and other widths on a CPU, take a loop that waits for the device.

    Raises:
        ValueError: on a GPU ``b``'s widths are not multiples of 16 bytes (:func:`width_multiple`).
    """
    if a_RM.dtype == torch.float64:
        return _mm_reference(a_RM, b_EMN, offsets_E)
    is_aligned = _is_aligned(b_EMN.dtype, *b_EMN.shape[1:])
    if a_RM.is_cuda and not is_aligned:
        multiple = width_multiple(b_EMN.dtype)
        raise refusal("grouped_mm", f"widths that are multiples of {multiple}", b=b_EMN)
    if a_RM.dtype != torch.bfloat16 or not is_aligned:
        return _opaque_mm(a_RM, b_EMN, offsets_E)
    if grouped.takes(a_RM, b_EMN):
        return grouped.product(a_RM, b_EMN, offsets_E)
    return _grouped_mm(a_RM, b_EMN, offs=offsets_E)


# It is an op for two reasons: torch's shape function refuses fp32 and fp16, which its product takes
# on a CPU, and the loop over groups reads their sizes, which a compiler must not see.
@torch.library.custom_op("moetrain::grouped_mm", mutates_args=())
def _opaque_mm(
    a_RM: torch.Tensor,
    b_EMN: torch.Tensor,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    if a_RM.is_cuda or not _is_aligned(b_EMN.dtype, *b_EMN.shape[1:]):
        return _mm_reference(a_RM, b_EMN, offsets_E)
    return _grouped_mm(a_RM, b_EMN, offs=offsets_E)


@torch.library.custom_op("moetrain::grouped_outer", mutates_args=())
def _opaque_outer(
    a_RM: torch.Tensor,
    g_RN: torch.Tensor,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    """Return ``out[e] = a[rows of e]^T @ g[rows of e]``: [E, M, N]."""
    if a_RM.is_cuda or not _is_aligned(a_RM.dtype, a_RM.shape[1], g_RN.shape[1]):
        return _outer_reference(a_RM, g_RN, offsets_E)
    return _grouped_mm(a_RM.T, g_RN, offs=offsets_E)


@_opaque_mm.register_fake
def _(
    a_RM: torch.Tensor,
    b_EMN: torch.Tensor,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    return a_RM.new_empty(a_RM.shape[0], b_EMN.shape[2])


@_opaque_outer.register_fake
def _(
    a_RM: torch.Tensor,
    g_RN: torch.Tensor,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    return a_RM.new_empty(offsets_E.shape[0], a_RM.shape[1], g_RN.shape[1])


def grouped_weight_grad(
    a_RM: torch.Tensor,
    g_RN: torch.Tensor,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    """Return ``out[e] = a[rows of e]^T @ g[rows of e]``: [R, M] x [R, N] -> [E, M, N].

    It is the gradient of :func:`grouped_mm` by ``b``. A group without rows gives zeros.
    """
    if a_RM.dtype == torch.float64:
        return _outer_reference(a_RM, g_RN, offsets_E)
    is_aligned = a_RM.is_cuda or _is_aligned(a_RM.dtype, a_RM.shape[1], g_RN.shape[1])
    if a_RM.dtype != torch.bfloat16 or not is_aligned:
        return _opaque_outer(a_RM, g_RN, offsets_E)
    if grouped.takes_outer(a_RM, g_RN, offsets_E.shape[0]):
        return grouped.outer(a_RM, g_RN, offsets_E)
    return _grouped_mm(a_RM.t(), g_RN, offs=offsets_E)


def _differentiate_mm(ctx: OpContext, g_RN: torch.Tensor) -> tuple[object, ...]:
    a_RM, b_EMN, offsets_E = ctx.saved_tensors
    _, is_trained, _ = ctx.needs_input_grad
    g_RN = g_RN.contiguous()  # the product rejects an expanded gradient
    return gradients(
        _opaque_mm,
        a_RM=_opaque_mm(g_RN, b_EMN.transpose(1, 2), offsets_E),
        b_EMN=_opaque_outer(a_RM, g_RN, offsets_E) if is_trained else None,
    )


_opaque_mm.register_autograd(_differentiate_mm, setup_context=save_inputs)
worth_saving("experts", torch.ops.moetrain.grouped_mm.default, torch.ops.aten._grouped_mm.default)


def _mm_reference(
    a_RM: torch.Tensor,
    b_EMN: torch.Tensor,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    """Compute :func:`grouped_mm` one group at a time; rows past the last offset are zeros."""
    ends = offsets_E.tolist()
    parts = [a_RM[i:j] @ b for i, j, b in zip([0, *ends], ends, b_EMN, strict=False)]
    parts.append(a_RM.new_zeros(a_RM.shape[0] - ends[-1], b_EMN.shape[2]))
    return torch.cat(parts)


def _outer_reference(
    a_RM: torch.Tensor,
    g_RN: torch.Tensor,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    ends = offsets_E.tolist()
    rows = [slice(i, j) for i, j in zip([0, *ends], ends, strict=False)]
    return torch.stack([a_RM[r].T @ g_RN[r] for r in rows])


def router_logits(
    x_TD: torch.Tensor,
    weight_ED: torch.Tensor,
    backend: Backend = "auto",
    *,
    wide: bool = False,
) -> torch.Tensor:
    """Return ``logits_TE`` in fp32 (float64 for a float64 ``x``).

    Args:
        x_TD: any floating dtype; bf16 takes the fast path, others the reference.
        weight_ED: any floating dtype; it is rounded to ``x``'s. Its gradient has its own dtype.
        wide: do not round the weight. In the fast path each fp32 number is then the sum of three
            bf16 numbers, so that products are exact.

    Raises:
        ValueError: shapes do not fit.
    """
    if x_TD.dim() != 2 or weight_ED.dim() != 2 or x_TD.shape[1] != weight_ED.shape[1]:
        raise refusal("router_logits", "[T, D] and [E, D]", x=x_TD, weight=weight_ED)
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    if x_TD.dtype == torch.bfloat16 and use_fast(backend, x_TD):
        if not wide:
            return router_logits_op(x_TD, weight_ED)
        weight_ED = weight_ED.to(dtype)
        rest_ED = weight_ED.detach() - weight_ED.detach().to(x_TD.dtype)
        middle_ED = rest_ED.to(x_TD.dtype).to(dtype)
        # The gradient of the first part, in fp32, is that of the weight.
        three = (weight_ED - rest_ED, middle_ED, rest_ED - middle_ED)
        parts = router_logits_op(x_TD, torch.cat(three))
        high_TE, middle_TE, low_TE = parts.chunk(3, dim=1)
        return (low_TE + middle_TE) + high_TE
    weight_ED = weight_ED if wide else weight_ED.to(x_TD.dtype)
    return F.linear(x_TD.to(dtype), weight_ED.to(dtype))


@torch.library.custom_op("moetrain::router_logits", mutates_args=())
def router_logits_op(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    weight_ED = weight_ED.to(x_TD.dtype)
    if x_TD.is_cuda:
        return small_m.wide_product(x_TD, weight_ED.contiguous())
    return _wide_product(x_TD, weight_ED.t())


@torch.library.custom_op("moetrain::router_logits_backward", mutates_args=())
def router_logits_backward_op(
    parts_T2E: torch.Tensor,
    x_TD: torch.Tensor,
    weight_ED: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of ``x``, and of ``weight`` by each part, fp32 [2E, D]."""
    d_x_TD = parts_T2E @ weight_ED.to(x_TD.dtype).repeat(2, 1)
    return d_x_TD, _wide_product(parts_T2E.t(), x_TD)


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


@router_logits_op.register_fake
def _(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    return x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=torch.float32)


@router_logits_backward_op.register_fake
def _(parts_T2E, x_TD, weight_ED):
    experts, width = weight_ED.shape
    return torch.empty_like(x_TD), x_TD.new_empty(2 * experts, width, dtype=torch.float32)


def _differentiate_logits(
    ctx: OpContext, d_logits_TE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x_TD, weight_ED = ctx.saved_tensors
    # Outside the op, so that the compiler fuses the split.
    high_TE = d_logits_TE.to(x_TD.dtype)
    low_TE = (d_logits_TE - high_TE.float()).to(x_TD.dtype)
    parts_T2E = torch.cat((high_TE, low_TE), dim=1)
    d_x_TD, d_weights_2ED = router_logits_backward_op(parts_T2E, x_TD, weight_ED)
    high_ED, low_ED = d_weights_2ED.chunk(2)
    return d_x_TD, (high_ED + low_ED).to(weight_ED.dtype)


router_logits_op.register_autograd(_differentiate_logits, setup_context=save_inputs)
worth_saving("linear", torch.ops.moetrain.router_logits.default)
