"""The expert MLP, from tokens to tokens: two grouped GEMMs around SwiGLU, between permutations.

With r(t) for the rows that token t is copied to, and a row's routing weight w, applied inside so
that combining is a plain sum::

    a = x[t] @ [gate; up]^T      h = silu(a_gate) * a_up * w      y[t] = sum over r of h @ down^T

and for an upstream ``dy``::

    dh = dy @ down            d_down    = dy^T @ h
    da, dw = swiglu'(dh)      d_gate_up = da^T @ x        dx = da @ [gate; up]

It saves the tokens and ``a`` alone. The pass that makes ``da`` recomputes ``h`` and
``dw = <dh, h / w>``, which therefore needs no ``y`` (arXiv 2512.14080), and the rows of ``x``, K
times as many as the tokens, are copied again: a token with D = 2048, F = 768 and K = 8 keeps 28 KB
in bf16, where its rows would be another 32.

Worked example, one row, D = F = 1, x 1, gate 0, up 3, down 1, w 2: ``a = [0, 3]``, ``h = y = 0``;
for ``dy = 1``, ``dh = 1``, ``da = [dh * w * 3 * 1/2, 0] = [3, 0]``, ``dw = 0`` and ``dx = 0``.

:func:`adapted_expert_mlp` has LoRA adapters A, B beside the frozen ``W1 = [gate; up]`` and
``W2 = down``, each scaled by s, and saves ``u`` and ``v`` too. Gate and up share A1::

    u = x @ A1^T    a = x @ W1^T + s * u @ B1^T    h = swiglu(a, w)
    v = h @ A2^T    y = h @ W2^T + s * v @ B2^T

    dv = s * dy @ B2     dh = dy @ W2 + dv @ A2      dB2 = s * dy^T @ v     dA2 = dv^T @ h
    da, dw = swiglu'(dh)
    du = s * da @ B1     dx = da @ W1 + du @ A1      dB1 = s * da^T @ u     dA1 = du^T @ x

Adapters of S tenants are stacked before the experts, [S, E, ...], and tenant s has the s-th of S
equal parts of the tokens. An expert's rows lie in the order of their tokens, so a tenant's are
together: products of adapters have E * S groups of rows, where those of the frozen matrices have E.
With E = 2, S = 2, T = 4, K = 1 and tokens for experts 0, 1, 0, 1::

    row         0       1       2       3
    token       0       2       1       3           offsets of experts           [2, 4]
    tenant      0       1       0       1           offsets of (expert, tenant)  [1, 2, 3, 4]

Experts may have no gate: where the first matrix has F rows alone, ``h = relu(a)^2 * w`` takes
SwiGLU's place (:mod:`moetrain.kernels.experts.relu2`), and all else is the same, but that few rows
take the usual products too.

With the activation ``gelu`` GeGLU takes SwiGLU's place, and few rows the usual products.

Legend: T tokens, K experts a token, R rows sorted by expert, E experts, D model width, F expert
width, r rank of the adapters.
"""

from typing import Any

import torch
from torch.library import CustomOpDef

from moetrain.kernels import small_m
from moetrain.kernels.experts import grouped
from moetrain.kernels.experts.adapters import (
    adapted_product,
    adapted_product_backward,
    narrow_grad,
)
from moetrain.kernels.experts.permutation import (
    ExpertIndices,
    permute,
    rows_of,
    sum_rows,
    unpermute,
)
from moetrain.kernels.experts.products import grouped_mm, grouped_weight_grad
from moetrain.kernels.experts.relu2 import relu2, relu2_gradients
from moetrain.kernels.experts.swiglu import swiglu, swiglu_gradients
from moetrain.kernels.quant.groups import QuantisedMatrices
from moetrain.runtime.backend import (
    Backend,
    refusal,
    use_fast,
    worth_saving,
)


def expert_mlp(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor | QuantisedMatrices,
    w_down_EDF: torch.Tensor | QuantisedMatrices,
    backend: Backend = "auto",
    *,
    typical_rows: int | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """Sum each token's experts, times their routing weights: ``y_TD`` in ``x``'s dtype.

    Args:
        x_TD: bf16 on CUDA; in plain torch any floating dtype.
        weights_TK: routing weights, any floating dtype, differentiable too.
        w_gate_up_E2FD: gate's F rows, then up's; or up's alone, for squared ReLU.
        w_down_EDF: as all matrices, in ``x``'s dtype, with rows of multiples of 16 bytes; or both
            in codes, which are widened here, for few rows within the products' kernels.
        typical_rows: the usual number of rows, where ``indices`` have room for more.
        activation: of the gate, where there is one.
    """
    given = (x_TD, weights_TK, indices, w_gate_up_E2FD, w_down_EDF)
    check_experts("expert_mlp", *given, needs_gate=False)
    weights, is_fast = (w_gate_up_E2FD, w_down_EDF), use_fast(backend, x_TD)
    rows = indices.row_slot_R.shape[0]
    typical = rows if typical_rows is None else typical_rows
    is_swiglu = activation == "silu" and w_gate_up_E2FD.shape[1] != w_down_EDF.shape[2]
    if is_fast and is_swiglu and small_m.runs_experts(x_TD, w_down_EDF, typical):
        x_RD, weights_R = permute(x_TD.contiguous(), weights_TK, indices, backend)
        y_RD = small_m.expert_mlp(x_RD, indices.offsets_E, *weights, weights_R, typical)
        return unpermute(y_RD, indices, backend)
    first, second = (w.dequantise() if isinstance(w, QuantisedMatrices) else w for w in weights)
    if not is_fast:
        x_RD, weights_R = permute(x_TD, weights_TK, indices, "reference")
        a_R2F = grouped_mm(x_RD, first.transpose(1, 2), indices.offsets_E)
        h_RF = _activated(a_R2F, weights_R, second, activation, "reference")
        y_RD = grouped_mm(h_RF, second.transpose(1, 2), indices.offsets_E)
        return unpermute(y_RD, indices, "reference")
    weights = (first, second)
    tensors = (x_TD, weights_TK, indices.slot_row_TK, indices.offsets_E, *weights)
    return _expert_mlp(*(x.contiguous() for x in tensors), activation, rows)[0]


def check_experts(
    kernel: str,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor | QuantisedMatrices,
    w_down_EDF: torch.Tensor | QuantisedMatrices,
    *,
    needs_gate: bool = True,
) -> None:
    """Raise ValueError, naming ``kernel``, for shapes or dtypes that do not fit together."""
    experts, dim, width = w_down_EDF.shape
    rows = (2 * width,) if needs_gate else (2 * width, width)
    fits = w_gate_up_E2FD.shape in [(experts, n, dim) for n in rows] and x_TD.shape[1:] == (dim,)
    if not fits or not x_TD.dtype == w_gate_up_E2FD.dtype == w_down_EDF.dtype:
        takes = "[T, D], [E, 2F, D] and [E, D, F] in one dtype"
        raise refusal(kernel, takes, x=x_TD, w_gate_up=w_gate_up_E2FD, w_down=w_down_EDF)
    slot_row_TK = indices.slot_row_TK
    if weights_TK.shape != slot_row_TK.shape or x_TD.shape[:1] != weights_TK.shape[:1]:
        takes = "[T, D], [T, K] and [T, K]"
        raise refusal(kernel, takes, x=x_TD, weights=weights_TK, slot_row=slot_row_TK)


def _activated(
    a_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    w_down_EDF: torch.Tensor,
    activation: str,
    backend: Backend,
) -> torch.Tensor:
    """Return ``h_RF`` of pre-activations with a gate, or [R, F] without."""
    if a_R2F.shape[1] == w_down_EDF.shape[2]:
        return relu2(a_R2F, weights_R, backend)
    return swiglu(a_R2F, weights_R, backend, activation)


def _activation_gradients(
    dh_RF: torch.Tensor,
    a_R2F: torch.Tensor,
    weights_R: torch.Tensor,
    h_RF: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``da_R2F`` and ``d_weights_R``; ``h_RF`` receives :func:`_activated`."""
    if a_R2F.shape == dh_RF.shape:
        return relu2_gradients(dh_RF, a_R2F, weights_R, h_RF)
    return swiglu_gradients(dh_RF, a_R2F, weights_R, activation, h_RF)


@torch.library.custom_op("moetrain::expert_mlp", mutates_args=())
def _expert_mlp(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    activation: str,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y_TD``, and ``a_R2F`` for the backward."""
    x_RD, weights_R = rows_of(x_TD, weights_TK, slot_row_TK, num_rows)
    has_gate = w_gate_up_E2FD.shape[1] != w_down_EDF.shape[2]
    if has_gate and activation == "silu" and grouped.takes_gated(x_RD, w_gate_up_E2FD):
        a_R2F, h_RF = grouped.gated(x_RD, w_gate_up_E2FD, offsets_E, weights_R)
    else:
        a_R2F = grouped_mm(x_RD, w_gate_up_E2FD.transpose(1, 2), offsets_E)
        h_RF = _activated(a_R2F, weights_R, w_down_EDF, activation, "triton")
    y_RD = grouped_mm(h_RF, w_down_EDF.transpose(1, 2), offsets_E)
    del x_RD, h_RF
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
    activation: str,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weights, w_gate_up and w_down (both empty, unless ``is_trained``)."""
    dy_RD, weights_R = rows_of(dy_TD, weights_TK, slot_row_TK, a_R2F.shape[0])
    dh_RF = grouped_mm(dy_RD, w_down_EDF, offsets_E)
    h_RF = torch.empty_like(dh_RF)
    da_R2F, d_weights_R = _activation_gradients(dh_RF, a_R2F, weights_R, h_RF, activation)
    d_down = grouped_weight_grad(dy_RD, h_RF, offsets_E) if is_trained else dy_TD.new_empty(0)
    del dy_RD, dh_RF, h_RF  # before the products below, where memory peaks
    dx_RD = grouped_mm(da_R2F, w_gate_up_E2FD, offsets_E)
    dx_TD = torch.empty_like(x_TD)
    d_weights_TK = torch.empty_like(weights_TK)
    sum_rows(dx_RD, slot_row_TK, dx_TD, d_weights_R, d_weights_TK)
    if not is_trained:
        return dx_TD, d_weights_TK, dy_TD.new_empty(0), d_down
    # In the memory of dx_RD: dx_TD has its sums.
    x_RD, _ = rows_of(x_TD, None, slot_row_TK, len(dx_RD), dx_RD)
    return dx_TD, d_weights_TK, grouped_weight_grad(da_R2F, x_RD, offsets_E), d_down


def register_experts(forward: CustomOpDef, backward: CustomOpDef) -> None:
    """Register shapes and gradient of a pair of ops with the arguments of :func:`_expert_mlp`'s.

    The activation may be left out of both.
    """

    def differentiate(
        ctx: Any,
        dy_TD: torch.Tensor | None,
        _: object,
    ) -> tuple[Any, ...]:
        others = (None,) * (len(ctx.how) + 1)
        if dy_TD is None:
            return (None,) * 6 + others
        is_trained = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]
        # The kernel copies rows, which an expanded gradient (stride 0, as a sum's) does not have.
        dx_TD, d_weights_TK, *matrices = backward(
            dy_TD.contiguous(), *ctx.saved_tensors, *ctx.how, is_trained
        )
        matrices = matrices if is_trained else (None, None)
        return dx_TD, d_weights_TK, None, None, *matrices, *others

    forward.register_fake(_shapes)
    backward.register_fake(_backward_shapes)
    forward.register_autograd(differentiate, setup_context=_save)


def _shapes(x_TD, weights_TK, slot_row_TK, offsets_E, w_gate_up_E2FD, w_down_EDF, *how):
    return torch.empty_like(x_TD), x_TD.new_empty(how[-1], w_gate_up_E2FD.shape[1])


def _backward_shapes(
    dy_TD,
    x_TD,
    weights_TK,
    slot_row_TK,
    offsets_E,
    w_gate_up,
    w_down,
    a_R2F,
    *how,
):
    matrices = (torch.empty_like(w) if how[-1] else w.new_empty(0) for w in (w_gate_up, w_down))
    return torch.empty_like(x_TD), torch.empty_like(weights_TK), *matrices


def _save(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[torch.Tensor, ...],
) -> None:
    ctx.how = inputs[6:-1]
    ctx.save_for_backward(*inputs[:6], output[1])
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
    *,
    activation: str = "silu",
) -> torch.Tensor:
    """Compute :func:`expert_mlp` with LoRA adapters beside frozen matrices.

    Args:
        w_gate_up_E2FD, w_down_EDF: get no gradient.
        a_gate_up_ErD, b_gate_up_E2Fr, a_down_ErF, b_down_EDr: or [S, E, ...] each, of S tenants.
        scale: multiplies the adapters' results.
    """
    given = (x_TD, weights_TK, indices, w_gate_up_E2FD, w_down_EDF)
    check_experts("adapted_expert_mlp", *given, needs_gate=False)
    experts, dim, width = w_down_EDF.shape
    rank = a_gate_up_ErD.shape[-2]
    offsets_E = offsets_G = indices.offsets_E
    adapters = {
        "a_gate_up": a_gate_up_ErD,
        "b_gate_up": b_gate_up_E2Fr,
        "a_down": a_down_ErF,
        "b_down": b_down_EDr,
    }
    stacked = (experts,)
    if a_gate_up_ErD.dim() == 4:
        tenants = a_gate_up_ErD.shape[0]
        stacked = tenants, experts
        if x_TD.shape[0] % tenants:
            takes = "[T, D] in S equal parts where adapters are [S, E, ...]"
            raise refusal("adapted_expert_mlp", takes, x=x_TD, a_gate_up=a_gate_up_ErD)
        offsets_G = tenant_offsets(
            offsets_E, indices.row_slot_R, tenants, weights_TK.numel() // tenants
        )
    wanted = (rank, dim), (w_gate_up_E2FD.shape[1], rank), (rank, width), (dim, rank)
    for x, shape in zip(adapters.values(), wanted, strict=True):
        if x.shape != (*stacked, *shape) or x.dtype != x_TD.dtype:
            takes = "[E, r, D], [E, 2F, r], [E, r, F] and [E, D, r] in x's dtype"
            given = {"x": x_TD, "w_down": w_down_EDF} | adapters
            raise refusal("adapted_expert_mlp", takes, **given)
    if use_fast(backend, x_TD):
        routing = (weights_TK, indices.slot_row_TK, offsets_E, offsets_G)
        tensors = (x_TD, *routing, w_gate_up_E2FD, w_down_EDF)
        how = scale, activation, indices.row_slot_R.shape[0]
        tensors = (*(x.contiguous() for x in tensors), *adapters.values())
        return _adapted_expert_mlp(*tensors, *how)[0]
    if len(stacked) > 1:
        adapters = {name: x.transpose(0, 1).flatten(0, 1) for name, x in adapters.items()}

    def product(
        x: torch.Tensor,
        w: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> torch.Tensor:
        low = grouped_mm(x, a.transpose(1, 2), offsets_G)
        wide = grouped_mm(x, w.detach().transpose(1, 2), offsets_E)
        return wide + scale * grouped_mm(low, b.transpose(1, 2), offsets_G)

    x_RD, weights_R = permute(x_TD, weights_TK, indices, "reference")
    up, down = (
        (adapters["a_gate_up"], adapters["b_gate_up"]),
        (adapters["a_down"], adapters["b_down"]),
    )
    a_R2F = product(x_RD, w_gate_up_E2FD, *up)
    h_RF = _activated(a_R2F, weights_R, w_down_EDF, activation, "reference")
    return unpermute(product(h_RF, w_down_EDF, *down), indices, "reference")


@torch.library.custom_op("moetrain::tenant_offsets", mutates_args=())
def tenant_offsets(
    offsets_E: torch.Tensor,
    row_slot_R: torch.Tensor,
    tenants: int,
    slots: int,
) -> torch.Tensor:
    """Return the cumulative ends of (expert, tenant)'s rows, int32 [E * tenants].

    Each of ``tenants`` has as many ``slots``, in order; the maps are those of
    :class:`~moetrain.kernels.experts.permutation.ExpertIndices`.
    """
    rows_R = torch.arange(row_slot_R.shape[0], device=row_slot_R.device)
    expert_R = torch.searchsorted(offsets_E, rows_R.int(), right=True)
    key_R = expert_R * tenants + row_slot_R // max(1, slots)
    groups = torch.arange(offsets_E.shape[0] * tenants, device=row_slot_R.device)
    # A row that is none has the last group's key.
    return torch.minimum(torch.searchsorted(key_R, groups, right=True), offsets_E[-1]).int()


@tenant_offsets.register_fake
def _(offsets_E, row_slot_R, tenants, slots):
    return offsets_E.new_empty(offsets_E.shape[0] * tenants)


@torch.library.custom_op("moetrain::adapted_expert_mlp", mutates_args=())
def _adapted_expert_mlp(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    offsets_G: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    a_gate_up: torch.Tensor,
    b_gate_up: torch.Tensor,
    a_down: torch.Tensor,
    b_down: torch.Tensor,
    scale: float,
    activation: str,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``y_TD``, and ``a_R2F``, ``u_Rr`` and ``v_Rr`` for the backward."""
    x_RD, weights_R = rows_of(x_TD, weights_TK, slot_row_TK, num_rows)
    how = scale, offsets_E, offsets_G
    a_R2F, u_Rr = adapted_product(x_RD, w_gate_up_E2FD, a_gate_up, b_gate_up, *how)
    del x_RD
    h_RF = _activated(a_R2F, weights_R, w_down_EDF, activation, "triton")
    y_RD, v_Rr = adapted_product(h_RF, w_down_EDF, a_down, b_down, *how)
    y_TD = torch.empty_like(x_TD)
    sum_rows(y_RD, slot_row_TK, y_TD)
    return y_TD, a_R2F, u_Rr, v_Rr


@_adapted_expert_mlp.register_fake
def _(x_TD, weights, slot_row, offsets, groups, w_gate_up, w_down, a_gate_up, b, a, d, *how):
    rows = how[-1]
    rank = a_gate_up.shape[-2]
    a_R2F = x_TD.new_empty(rows, w_gate_up.shape[1])
    return torch.empty_like(x_TD), a_R2F, x_TD.new_empty(rows, rank), x_TD.new_empty(rows, rank)


@torch.library.custom_op("moetrain::adapted_expert_mlp_backward", mutates_args=())
def _adapted_expert_mlp_backward(
    dy_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    offsets_G: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    a_gate_up: torch.Tensor,
    b_gate_up: torch.Tensor,
    a_down: torch.Tensor,
    b_down: torch.Tensor,
    a_R2F: torch.Tensor,
    u_Rr: torch.Tensor,
    v_Rr: torch.Tensor,
    scale: float,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dy_RD, weights_R = rows_of(dy_TD, weights_TK, slot_row_TK, a_R2F.shape[0])
    how = scale, offsets_E, offsets_G
    dh_RF, dv_Rr = adapted_product_backward(dy_RD, w_down_EDF, a_down, b_down, *how)
    h_RF = torch.empty_like(dh_RF)
    da_R2F, d_weights_R = _activation_gradients(dh_RF, a_R2F, weights_R, h_RF, activation)
    del dh_RF  # before the products below, where memory peaks
    d_a_down = narrow_grad(dv_Rr, h_RF, a_down, offsets_G)
    d_b_down = narrow_grad(v_Rr, dy_RD, b_down.mT, offsets_G, scale).mT
    del h_RF, dy_RD
    dx_RD, du_Rr = adapted_product_backward(da_R2F, w_gate_up_E2FD, a_gate_up, b_gate_up, *how)
    d_b_gate_up = narrow_grad(u_Rr, da_R2F, b_gate_up.mT, offsets_G, scale).mT
    dx_TD = torch.empty_like(x_TD)
    d_weights_TK = torch.empty_like(weights_TK)
    sum_rows(dx_RD, slot_row_TK, dx_TD, d_weights_R, d_weights_TK)
    # In the memory of dx_RD: dx_TD has its sums.
    x_RD, _ = rows_of(x_TD, None, slot_row_TK, len(dx_RD), dx_RD)
    d_a_gate_up = narrow_grad(du_Rr, x_RD, a_gate_up, offsets_G)
    return dx_TD, d_weights_TK, d_a_gate_up, d_b_gate_up, d_a_down, d_b_down


@_adapted_expert_mlp_backward.register_fake
def _(dy, x_TD, weights_TK, slot_row, offsets, groups, w1, w2, a1, b1, a2, b2, *others):
    return tuple(torch.empty_like(x) for x in (x_TD, weights_TK, a1, b1, a2, b2))


def _save_adapted(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[torch.Tensor, ...],
) -> None:
    *tensors, scale, activation, _ = inputs
    ctx.how = scale, activation
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)  # no zeros for outputs that have no gradient


def _differentiate_adapted(
    ctx: Any,
    dy_TD: torch.Tensor | None,
    *_: torch.Tensor | None,
) -> tuple[Any, ...]:
    if dy_TD is None:
        return (None,) * 14
    found = _adapted_expert_mlp_backward(dy_TD.contiguous(), *ctx.saved_tensors, *ctx.how)
    dx_TD, d_weights_TK, *d_adapters = found
    return dx_TD, d_weights_TK, None, None, None, None, None, *d_adapters, None, None, None


_adapted_expert_mlp.register_autograd(_differentiate_adapted, setup_context=_save_adapted)
worth_saving("experts", torch.ops.moetrain.adapted_expert_mlp.default)
