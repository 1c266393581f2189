"""The expert MLP, from tokens to tokens: two grouped GEMMs around SwiGLU, between permutations.

With r(t) for the rows that token t is copied to, and a row's routing weight w::

    a = x[t] @ [gate; up]^T      h = silu(a_gate) * a_up * w      y[t] = sum over r of h @ down^T

The weight is applied inside, before the down projection, so combining is a plain sum. The backward
for an upstream ``dy``::

    dh = dy @ down            d_down    = dy^T @ h
    da, dw = swiglu'(dh)      d_gate_up = da^T @ x        dx = da @ [gate; up]

It saves the tokens and ``a`` alone. ``h`` is recomputed in the pass over ``a`` and ``dh`` that
makes ``da``, and so is ``dw = <dh, h / w>``, which therefore needs no ``y`` (arXiv 2512.14080). The
rows of ``x`` are K times as many as the tokens, and ``d_gate_up`` alone needs them: they are copied
again, a pass at memory's rate. A token with D = 2048, F = 768 and K = 8 keeps 28 KB in bf16, where
its rows would be another 32.

Worked example, one row, D = F = 1, x 1, gate 0, up 3, down 1, w 2: ``a = [0, 3]``, ``h = y = 0``;
for ``dy = 1``, ``dh = 1``, ``da = [dh * w * 3 * 1/2, 0] = [3, 0]``, ``dw = 0`` and ``dx = 0``.

:func:`adapted_expert_mlp` has LoRA adapters A, B beside the frozen ``W1 = [gate; up]`` and
``W2 = down``, each scaled by s::

    u = x @ A1^T    a = x @ W1^T + s * u @ B1^T    h = swiglu(a, w)
    v = h @ A2^T    y = h @ W2^T + s * v @ B2^T

for an upstream ``dy`` its backward, which has no gradients of the frozen matrices, is::

    dv = s * dy @ B2     dh = dy @ W2 + dv @ A2      dB2 = s * dy^T @ v     dA2 = dv^T @ h
    da, dw = swiglu'(dh)
    du = s * da @ B1     dx = da @ W1 + du @ A1      dB1 = s * da^T @ u     dA1 = du^T @ x

It saves ``u`` and ``v`` too. Gate and up share A1: their adapters are one.

Worked example, one row, D = F = r = 1, x 1, W1 = [0, 2], A1 1, B1 = [0, 1], s 1: ``u = 1`` and
``a = [0, 3]``; with ``W2 = 0``, A2 2, B2 3 and w 2, ``h = 0``, ``v = y = 0``. For ``dy = 1``,
``dv = 3``, ``dh = 6``, ``da = [18, 0]``, ``du = 18 * 0 + 0 * 1 = 0``.

Legend: T tokens, K experts a token, R rows sorted by expert, E experts, D model width, F expert
width, r rank of the adapters.
"""

from typing import Any

import torch
from torch.library import CustomOpDef

from moetrain.kernels import small_m
from moetrain.kernels.backend import Backend, use_fast, worth_saving
from moetrain.kernels.experts.grouped_mm import grouped_mm, grouped_weight_grad
from moetrain.kernels.experts.permutation import (
    ExpertIndices,
    copy_to_rows,
    permute,
    permute_reference,
    rows_of,
    sum_rows,
    unpermute,
    unpermute_reference,
)
from moetrain.kernels.experts.swiglu import swiglu, swiglu_backward_with_output, swiglu_reference


def expert_mlp(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    backend: Backend = "auto",
    *,
    typical_rows: int | None = None,
) -> torch.Tensor:
    """Sum each token's experts, times their routing weights: ``y_TD`` in ``x``'s dtype.

    Args:
        x_TD: bf16 on CUDA; the reference path takes any floating dtype.
        weights_TK: routing weights, any floating dtype, differentiable too.
        indices: the index maps of the tokens' experts.
        w_gate_up_E2FD: gate's F rows, then up's; in ``x``'s dtype, contiguous.
        w_down_EDF: in ``x``'s dtype, contiguous.
        typical_rows: the usual number of rows, where ``indices`` have room for more.

    Raises:
        ValueError: for other shapes, dtypes or strides, or widths whose rows are not a multiple of
            16 bytes.
    """
    inputs = (x_TD, weights_TK, indices, w_gate_up_E2FD, w_down_EDF)
    check_experts("expert_mlp", *inputs)
    weights = (w_gate_up_E2FD, w_down_EDF)
    if not use_fast(backend, x_TD):
        return expert_mlp_reference(*inputs)
    rows = indices.row_slot_R.shape[0]
    typical = rows if typical_rows is None else typical_rows
    if small_m.runs_experts(x_TD, w_down_EDF, typical):
        x_RD, weights_R = permute(x_TD.contiguous(), weights_TK, indices, backend)
        y_RD = small_m.expert_mlp(x_RD, indices.offsets_E, *weights, weights_R, typical)
        return unpermute(y_RD, indices, backend)
    tensors = (x_TD, weights_TK, indices.slot_row_TK, indices.offsets_E, *weights)
    return _expert_mlp(*(x.contiguous() for x in tensors), rows)[0]


def expert_mlp_reference(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
) -> torch.Tensor:
    """Compute :func:`expert_mlp` in plain torch."""
    x_RD, weights_R = permute_reference(x_TD, weights_TK, indices)
    a_R2F = grouped_mm(x_RD, w_gate_up_E2FD.transpose(1, 2), indices.offsets_E)
    h_RF = swiglu_reference(a_R2F, weights_R)
    y_RD = grouped_mm(h_RF, w_down_EDF.transpose(1, 2), indices.offsets_E)
    return unpermute_reference(y_RD, indices)


def check_experts(
    kernel: str,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
) -> None:
    """Raise ValueError, naming ``kernel``, for shapes or dtypes that do not fit together."""
    experts, dim, width = w_down_EDF.shape
    if w_gate_up_E2FD.shape != (experts, 2 * width, dim) or x_TD.shape[1:] != (dim,):
        raise ValueError(
            f"{kernel}: x, w_gate_up and w_down were given as {tuple(x_TD.shape)}, "
            f"{tuple(w_gate_up_E2FD.shape)} and {tuple(w_down_EDF.shape)}; it takes [T, D], "
            "[E, 2F, D] and [E, D, F]"
        )
    if not x_TD.dtype == w_gate_up_E2FD.dtype == w_down_EDF.dtype:
        raise ValueError(
            f"{kernel}: x, w_gate_up and w_down were given in {x_TD.dtype}, "
            f"{w_gate_up_E2FD.dtype} and {w_down_EDF.dtype}; it takes one dtype"
        )
    if weights_TK.shape != indices.slot_row_TK.shape or x_TD.shape[:1] != weights_TK.shape[:1]:
        raise ValueError(
            f"{kernel}: x, weights and indices were given as {tuple(x_TD.shape)}, "
            f"{tuple(weights_TK.shape)} and {tuple(indices.slot_row_TK.shape)}; it takes [T, D], "
            "[T, K] and [T, K]"
        )


def expert_rows(
    x_RD: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    weights_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``y_RD`` and ``a_R2F`` of permuted rows; past ``offsets[-1]`` they are unspecified."""
    a_R2F = grouped_mm(x_RD, w_gate_up_E2FD.transpose(1, 2), offsets_E)
    h_RF = swiglu(a_R2F, weights_R, "triton")
    return grouped_mm(h_RF, w_down_EDF.transpose(1, 2), offsets_E), a_R2F


@torch.library.custom_op("moetrain::expert_mlp", mutates_args=())
def _expert_mlp(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y_TD``, and ``a_R2F`` for the backward."""
    x_RD, weights_R = rows_of(x_TD, weights_TK, slot_row_TK, num_rows)
    y_RD, a_R2F = expert_rows(x_RD, offsets_E, w_gate_up_E2FD, w_down_EDF, weights_R)
    del x_RD
    y_TD = torch.empty_like(x_TD)
    sum_rows(y_RD, slot_row_TK, y_TD)
    return y_TD, a_R2F


@torch.library.custom_op("moetrain::expert_mlp_backward", mutates_args=())
def _expert_mlp_backward(
    dy_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    a_R2F: torch.Tensor,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weights, w_gate_up and w_down (both empty, unless ``is_trained``)."""
    dy_RD, weights_R = rows_of(dy_TD, weights_TK, slot_row_TK, a_R2F.shape[0])
    dh_RF = grouped_mm(dy_RD, w_down_EDF, offsets_E)
    da_R2F, d_weights_R, h_RF = swiglu_backward_with_output(dh_RF, a_R2F, weights_R)
    d_down = grouped_weight_grad(dy_RD, h_RF, offsets_E) if is_trained else dy_TD.new_empty(0)
    del dy_RD, dh_RF, h_RF  # before the products below, where memory peaks
    dx_RD = grouped_mm(da_R2F, w_gate_up_E2FD, offsets_E)
    dx_TD, d_weights_TK = torch.empty_like(x_TD), torch.empty_like(weights_TK)
    sum_rows(dx_RD, slot_row_TK, dx_TD, d_weights_R, d_weights_TK)
    if not is_trained:
        return dx_TD, d_weights_TK, dy_TD.new_empty(0), d_down
    x_RD = dx_RD  # reuses its memory: dx_TD has its sums
    copy_to_rows(x_TD, slot_row_TK, x_RD)
    return dx_TD, d_weights_TK, grouped_weight_grad(da_R2F, x_RD, offsets_E), d_down


def register_experts(forward: CustomOpDef, backward: CustomOpDef) -> None:
    """Register the shapes, the saved tensors and the gradient of a pair of expert MLP ops.

    Their arguments are those of ``_expert_mlp`` and ``_expert_mlp_backward``.
    """

    def differentiate(ctx: Any, dy_TD: torch.Tensor | None, _: object) -> tuple[Any, ...]:
        if dy_TD is None:
            return (None,) * 7
        is_trained = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]
        # The kernel copies rows, which an expanded gradient (stride 0, as a sum's) does not have.
        dx_TD, d_weights_TK, *matrices = backward(
            dy_TD.contiguous(), *ctx.saved_tensors, is_trained
        )
        return dx_TD, d_weights_TK, None, None, *(matrices if is_trained else (None, None)), None

    forward.register_fake(_shapes)
    backward.register_fake(_backward_shapes)
    forward.register_autograd(differentiate, setup_context=_save)


def _shapes(x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up_E2FD, w_down_EDF, num_rows):
    return torch.empty_like(x_TD), x_TD.new_empty(num_rows, w_gate_up_E2FD.shape[1])


def _backward_shapes(
    dy_TD, x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up, w_down, a_R2F, is_trained
):
    matrices = (torch.empty_like(w) if is_trained else w.new_empty(0) for w in (w_gate_up, w_down))
    return torch.empty_like(x_TD), torch.empty_like(weights_TK), *matrices


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)  # no zeros of a's size: it has no gradient


register_experts(_expert_mlp, _expert_mlp_backward)
worth_saving("experts", torch.ops.moetrain.expert_mlp.default)


def adapted_expert_mlp(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    a_gate_up_ErD: torch.Tensor,
    b_gate_up_E2Fr: torch.Tensor,
    a_down_ErF: torch.Tensor,
    b_down_EDr: torch.Tensor,
    scale: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Compute :func:`expert_mlp` with LoRA adapters beside frozen matrices.

    Args:
        x_TD, weights_TK, indices, w_gate_up_E2FD, w_down_EDF: as in :func:`expert_mlp`, but the
            matrices get no gradient.
        a_gate_up_ErD, b_gate_up_E2Fr, a_down_ErF, b_down_EDr: in ``x``'s dtype, contiguous; r is a
            multiple of 16 bytes.
        scale: multiplies the adapters' results.

    Raises:
        ValueError: as :func:`expert_mlp`, and for adapters of other shapes or dtypes.
    """
    inputs = (x_TD, weights_TK, indices, w_gate_up_E2FD, w_down_EDF)
    check_experts("adapted_expert_mlp", *inputs)
    experts, dim, width = w_down_EDF.shape
    rank = a_gate_up_ErD.shape[1]
    adapters = (a_gate_up_ErD, b_gate_up_E2Fr, a_down_ErF, b_down_EDr)
    wanted = (rank, dim), (2 * width, rank), (rank, width), (dim, rank)
    if any(x.shape != (experts, *shape) for x, shape in zip(adapters, wanted, strict=True)):
        given = ", ".join(str(tuple(x.shape)) for x in adapters)
        raise ValueError(
            f"adapted_expert_mlp: adapters were given as {given}; with w_down of "
            f"{tuple(w_down_EDF.shape)} it takes [E, r, D], [E, 2F, r], [E, r, F] and [E, D, r]"
        )
    if any(x.dtype != x_TD.dtype for x in adapters):
        given = ", ".join(str(x.dtype) for x in adapters)
        raise ValueError(
            f"adapted_expert_mlp: adapters were given in {given}; with x in {x_TD.dtype} it takes "
            "that"
        )
    if not use_fast(backend, x_TD):
        return adapted_expert_mlp_reference(*inputs, *adapters, scale)
    routing = (weights_TK, indices.slot_row_TK, indices.offsets_E)
    tensors = (x_TD, *routing, w_gate_up_E2FD, w_down_EDF, *adapters)
    rows = indices.row_slot_R.shape[0]
    return _adapted_expert_mlp(*(x.contiguous() for x in tensors), scale, rows)[0]


def adapted_expert_mlp_reference(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    a_gate_up_ErD: torch.Tensor,
    b_gate_up_E2Fr: torch.Tensor,
    a_down_ErF: torch.Tensor,
    b_down_EDr: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute :func:`adapted_expert_mlp` in plain torch."""
    offsets_E = indices.offsets_E

    def product(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        low = grouped_mm(x, a.transpose(1, 2), offsets_E)
        wide = grouped_mm(x, w.detach().transpose(1, 2), offsets_E)
        return wide + scale * grouped_mm(low, b.transpose(1, 2), offsets_E)

    x_RD, weights_R = permute_reference(x_TD, weights_TK, indices)
    a_R2F = product(x_RD, w_gate_up_E2FD, a_gate_up_ErD, b_gate_up_E2Fr)
    h_RF = swiglu_reference(a_R2F, weights_R)
    return unpermute_reference(product(h_RF, w_down_EDF, a_down_ErF, b_down_EDr), indices)


@torch.library.custom_op("moetrain::adapted_expert_mlp", mutates_args=())
def _adapted_expert_mlp(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    a_gate_up_ErD: torch.Tensor,
    b_gate_up_E2Fr: torch.Tensor,
    a_down_ErF: torch.Tensor,
    b_down_EDr: torch.Tensor,
    scale: float,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``y_TD``, and ``a_R2F``, ``u_Rr`` and ``v_Rr`` for the backward."""
    x_RD, weights_R = rows_of(x_TD, weights_TK, slot_row_TK, num_rows)
    u_Rr = grouped_mm(x_RD, a_gate_up_ErD.transpose(1, 2), offsets_E)
    a_R2F = grouped_mm(x_RD, w_gate_up_E2FD.transpose(1, 2), offsets_E)
    del x_RD
    a_R2F.add_(grouped_mm(u_Rr, b_gate_up_E2Fr.transpose(1, 2), offsets_E), alpha=scale)
    h_RF = swiglu(a_R2F, weights_R, "triton")
    v_Rr = grouped_mm(h_RF, a_down_ErF.transpose(1, 2), offsets_E)
    y_RD = grouped_mm(h_RF, w_down_EDF.transpose(1, 2), offsets_E)
    y_RD.add_(grouped_mm(v_Rr, b_down_EDr.transpose(1, 2), offsets_E), alpha=scale)
    y_TD = torch.empty_like(x_TD)
    sum_rows(y_RD, slot_row_TK, y_TD)
    return y_TD, a_R2F, u_Rr, v_Rr


@_adapted_expert_mlp.register_fake
def _(x_TD, weights, slot_row, offsets, w_gate_up, w_down, a_gate_up, b, a, d, scale, rows):
    rank = a_gate_up.shape[1]
    a_R2F = x_TD.new_empty(rows, w_gate_up.shape[1])
    return torch.empty_like(x_TD), a_R2F, x_TD.new_empty(rows, rank), x_TD.new_empty(rows, rank)


@torch.library.custom_op("moetrain::adapted_expert_mlp_backward", mutates_args=())
def _adapted_expert_mlp_backward(
    dy_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    a_gate_up_ErD: torch.Tensor,
    b_gate_up_E2Fr: torch.Tensor,
    a_down_ErF: torch.Tensor,
    b_down_EDr: torch.Tensor,
    a_R2F: torch.Tensor,
    u_Rr: torch.Tensor,
    v_Rr: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weights and the four adapters."""
    dy_RD, weights_R = rows_of(dy_TD, weights_TK, slot_row_TK, a_R2F.shape[0])
    dv_Rr = grouped_mm(dy_RD, b_down_EDr, offsets_E).mul_(scale)
    dh_RF = grouped_mm(dy_RD, w_down_EDF, offsets_E)
    dh_RF += grouped_mm(dv_Rr, a_down_ErF, offsets_E)
    da_R2F, d_weights_R, h_RF = swiglu_backward_with_output(dh_RF, a_R2F, weights_R)
    del dh_RF  # before the products below, where memory peaks
    d_a_down = grouped_weight_grad(dv_Rr, h_RF, offsets_E)
    d_b_down = grouped_weight_grad(dy_RD, v_Rr, offsets_E).mul_(scale)
    del h_RF, dy_RD
    du_Rr = grouped_mm(da_R2F, b_gate_up_E2Fr, offsets_E).mul_(scale)
    dx_RD = grouped_mm(da_R2F, w_gate_up_E2FD, offsets_E)
    dx_RD += grouped_mm(du_Rr, a_gate_up_ErD, offsets_E)
    d_b_gate_up = grouped_weight_grad(da_R2F, u_Rr, offsets_E).mul_(scale)
    dx_TD, d_weights_TK = torch.empty_like(x_TD), torch.empty_like(weights_TK)
    sum_rows(dx_RD, slot_row_TK, dx_TD, d_weights_R, d_weights_TK)
    x_RD = dx_RD  # reuses its memory: dx_TD has its sums
    copy_to_rows(x_TD, slot_row_TK, x_RD)
    d_a_gate_up = grouped_weight_grad(du_Rr, x_RD, offsets_E)
    return dx_TD, d_weights_TK, d_a_gate_up, d_b_gate_up, d_a_down, d_b_down


@_adapted_expert_mlp_backward.register_fake
def _(dy, x_TD, weights_TK, slot_row, offsets, w1, w2, a1, b1, a2, b2, a, u, v, scale):
    return tuple(torch.empty_like(x) for x in (x_TD, weights_TK, a1, b1, a2, b2))


def _save_adapted(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)  # no zeros for outputs that have no gradient


def _differentiate_adapted(
    ctx: Any, dy_TD: torch.Tensor | None, *_: torch.Tensor | None
) -> tuple[Any, ...]:
    if dy_TD is None:
        return (None,) * 12
    found = _adapted_expert_mlp_backward(dy_TD.contiguous(), *ctx.saved_tensors, ctx.scale)
    dx_TD, d_weights_TK, *d_adapters = found
    return dx_TD, d_weights_TK, None, None, None, None, *d_adapters, None, None


_adapted_expert_mlp.register_autograd(_differentiate_adapted, setup_context=_save_adapted)
worth_saving("experts", torch.ops.moetrain.adapted_expert_mlp.default)
