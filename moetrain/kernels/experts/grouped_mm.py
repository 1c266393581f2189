"""Grouped matrix products: the one place that names torch's grouped GEMM.

Rows of ``a`` are sorted by group; group g is rows ``offsets[g-1]:offsets[g]``. Rows past
``offsets[-1]`` belong to no group: their outputs and gradients are uninitialised memory (0 x NaN is
NaN, so nothing may reduce over them).

Legend: R rows, E groups (experts), M and N the inner and outer widths.
"""

from typing import Any

import torch
from torch.nn.functional import grouped_mm as _grouped_mm

from moetrain.kernels.backend import worth_saving

_ALIGNMENT_BYTES = 16  # torch's grouped GEMM reads rows through 16-byte vectors


def grouped_mm(a_RM: torch.Tensor, b_EMN: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """Return ``out[r] = a[r] @ b[group of r]``: [R, M] x [E, M, N] -> [R, N], in ``a``'s dtype.

    ``offsets_E`` (int32) holds the cumulative end row of each group. It is fast in bf16, and on a
    CPU in fp16 and fp32; other dtypes take a loop that waits for the device and serves to check
    numbers. It is differentiable in ``a`` and ``b``.

    Raises:
        ValueError: for a width whose bytes are not a multiple of 16.
    """
    if a_RM.dtype == torch.float64:
        return _mm_reference(a_RM, b_EMN, offsets_E)
    for name, size in (("inner", b_EMN.shape[1]), ("outer", b_EMN.shape[2])):
        if size * b_EMN.element_size() % _ALIGNMENT_BYTES:
            raise ValueError(
                f"grouped_mm: the {name} width {size} in {b_EMN.dtype} is not a multiple of "
                f"{_ALIGNMENT_BYTES} bytes; use a multiple of "
                f"{_ALIGNMENT_BYTES // b_EMN.element_size()}"
            )
    if a_RM.dtype == torch.bfloat16:
        return _grouped_mm(a_RM, b_EMN, offs=offsets_E)
    return _opaque_mm(a_RM, b_EMN, offsets_E)


# torch's shape function of the grouped product takes bf16 alone, although the product itself also
# takes fp32 and fp16 on a CPU (on CUDA it does not). These two ops tell the compiler the shapes.
@torch.library.custom_op("moetrain::grouped_mm", mutates_args=())
def _opaque_mm(a_RM: torch.Tensor, b_EMN: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    if a_RM.is_cuda:
        return _mm_reference(a_RM, b_EMN, offsets_E)
    return _grouped_mm(a_RM, b_EMN, offs=offsets_E)


@torch.library.custom_op("moetrain::grouped_outer", mutates_args=())
def _opaque_outer(a_RM: torch.Tensor, g_RN: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """``out[e] = a[rows of e]^T @ g[rows of e]``: [E, M, N]."""
    if a_RM.is_cuda:
        return _outer_reference(a_RM, g_RN, offsets_E)
    return _grouped_mm(a_RM.T, g_RN, offs=offsets_E)


@_opaque_mm.register_fake
def _(a_RM: torch.Tensor, b_EMN: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    return a_RM.new_empty(a_RM.shape[0], b_EMN.shape[2])


@_opaque_outer.register_fake
def _(a_RM: torch.Tensor, g_RN: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    return a_RM.new_empty(offsets_E.shape[0], a_RM.shape[1], g_RN.shape[1])


def _save_inputs(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def grouped_weight_grad(
    a_RM: torch.Tensor, g_RN: torch.Tensor, offsets_E: torch.Tensor
) -> torch.Tensor:
    """Return ``out[e] = a[rows of e]^T @ g[rows of e]``: [R, M] x [R, N] -> [E, M, N].

    It is the gradient of :func:`grouped_mm` in ``b``, in ``a``'s dtype; dtypes are as there. Rows
    past ``offsets[-1]`` are not read, and a group without rows gives zeros.
    """
    if a_RM.dtype == torch.float64:
        return _outer_reference(a_RM, g_RN, offsets_E)
    if a_RM.dtype == torch.bfloat16:
        return _grouped_mm(a_RM.t(), g_RN, offs=offsets_E)
    return _opaque_outer(a_RM, g_RN, offsets_E)


def _backward(ctx: Any, g_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    a_RM, b_EMN, offsets_E = ctx.saved_tensors
    g_RN = g_RN.contiguous()  # a gradient may come expanded, which the product rejects
    grad_a = _opaque_mm(g_RN, b_EMN.transpose(1, 2), offsets_E)
    is_trained = ctx.needs_input_grad[1]
    return grad_a, _opaque_outer(a_RM, g_RN, offsets_E) if is_trained else None, None


torch.library.register_autograd("moetrain::grouped_mm", _backward, setup_context=_save_inputs)
worth_saving("experts", torch.ops.moetrain.grouped_mm.default, torch.ops.aten._grouped_mm.default)


def _mm_reference(a_RM: torch.Tensor, b_EMN: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """Compute :func:`grouped_mm` one group at a time; rows past the last offset are zeros."""
    ends = offsets_E.tolist()
    parts = [a_RM[i:j] @ b for i, j, b in zip([0, *ends], ends, b_EMN, strict=False)]
    parts.append(a_RM.new_zeros(a_RM.shape[0] - ends[-1], b_EMN.shape[2]))
    return torch.cat(parts)


def _outer_reference(
    a_RM: torch.Tensor, g_RN: torch.Tensor, offsets_E: torch.Tensor
) -> torch.Tensor:
    ends = offsets_E.tolist()
    rows = [slice(i, j) for i, j in zip([0, *ends], ends, strict=False)]
    return torch.stack([a_RM[r].T @ g_RN[r] for r in rows])
