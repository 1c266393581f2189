"""The experts of GPT-OSS, from tokens to tokens: biases, and a clamped SwiGLU.

In the notation of :mod:`moetrain.kernels.experts.mlp`, with a row's expert e and routing weight w::

    a = x[t] @ [gate; up]^T      h = clamped_swiglu(a + b1[e], w)
    y[t] = sum over r of h @ down^T + w * b2[e]

A routing weight applied before the down product must weight that product's bias as well. For an
upstream ``dy``, beside the gradients of those products::

    d_b1[e] = sum over e's rows of da        d_b2[e] = sum over e's rows of w * dy
    dw     += <dy, b2[e]>

It saves the tokens and ``a`` alone, as there. With LoRA adapters beside frozen matrices, in the
notation of :func:`~moetrain.kernels.experts.mlp.adapted_expert_mlp`, it saves ``u`` and ``v`` too.

Worked example, one row, D = F = 1, b1 0, x 1, gate 0, up 3, down 1, b2 5, w 2: ``h = 0`` and
``y = 10``; for ``dy = 1``, ``da = [2 * 4 * 1/2, 0] = [4, 0]``, ``dw = 5``, ``d_b2 = 2`` and
``dx = 0``.

Left out on purpose: products in fp8, and kernels for few rows.

Legend: T tokens, K experts a token, R rows sorted by expert, E experts, D model width, F expert
width, r rank of the adapters.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Sequence
from typing import Any

import torch

from moetrain.kernels.experts.adapters import (
    adapted_product,
    adapted_product_backward,
    narrow_grad,
)
from moetrain.kernels.experts.clamped_swiglu import (
    clamped_swiglu,
    clamped_swiglu_gradients,
    expert_of,
    expert_of_rows,
    sum_by_expert,
)
from moetrain.kernels.experts.mlp import check_experts
from moetrain.kernels.experts.permutation import (
    ExpertIndices,
    permute,
    rows_of,
    sum_rows,
    unpermute,
)
from moetrain.kernels.experts.products import grouped_mm, grouped_weight_grad
from moetrain.runtime.backend import (
    Backend,
    refusal,
    tl,
    triton,
    use_fast,
    worth_saving,
)

_COLUMNS, _WARPS = 1024, 2  # as the kernels' of permutation


def clamped_expert_mlp(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor,
    b_gate_up_E2F: torch.Tensor,
    w_down_EDF: torch.Tensor,
    b_down_ED: torch.Tensor,
    limit: float,
    alpha: float,
    adapters: Sequence[torch.Tensor] = (),
    scale: float = 1.0,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Sum each token's experts, times their routing weights: ``y_TD`` in ``x``'s dtype.

    Args:
        x_TD: bf16 on CUDA; in plain torch any floating dtype.
        weights_TK: routing weights, any floating dtype, differentiable too.
        w_gate_up_E2FD, b_gate_up_E2F: gate's F rows, then up's.
        w_down_EDF: as all matrices and biases, in ``x``'s dtype.
        limit, alpha: see :mod:`moetrain.kernels.experts.clamped_swiglu`.
        adapters: A [E, r, D] and B [E, 2F, r] of the first matrix, A [E, r, F] and B [E, D, r] of
            the second, which then get no gradient, nor do the biases; empty: there are none.
        scale: multiplies the adapters' results.
    """
    check_experts("clamped_expert_mlp", x_TD, weights_TK, indices, w_gate_up_E2FD, w_down_EDF)
    matrices = [w_gate_up_E2FD, b_gate_up_E2F, w_down_EDF, b_down_ED]
    _check_sizes(x_TD, matrices, adapters)
    rows = indices.row_slot_R.shape[0]
    if use_fast(backend, x_TD):
        routing = (x.contiguous() for x in (weights_TK, indices.slot_row_TK, indices.offsets_E))
        lists = ([x.contiguous() for x in matrices], [x.contiguous() for x in adapters])
        how = (limit, alpha, scale, rows)
        return _clamped_expert_mlp(x_TD.contiguous(), *routing, *lists, *how)[0]
    offsets_E = indices.offsets_E
    if adapters:
        matrices = [x.detach() for x in matrices]
    w_gate_up, b_gate_up, w_down, b_down = matrices
    x_RD, weights_R = permute(x_TD, weights_TK, indices, "reference")
    a_R2F = _product(x_RD, w_gate_up, adapters[:2], scale, offsets_E)
    h_RF = clamped_swiglu(a_R2F, weights_R, b_gate_up, offsets_E, limit, alpha, "reference")
    y_RD = _product(h_RF, w_down, adapters[2:], scale, offsets_E)
    biases_RD = weights_R.to(y_RD.dtype)[:, None] * b_down[expert_of_rows(offsets_E, rows)]
    return unpermute(y_RD + biases_RD, indices, "reference")


def _check_sizes(
    x_TD: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    adapters: Sequence[torch.Tensor],
) -> None:
    """Raise ValueError for biases or adapters that do not fit the matrices."""
    _, b_gate_up, w_down, b_down = matrices
    experts, dim, width = w_down.shape
    rank = adapters[0].shape[1] if adapters else 0
    wanted: list[tuple[int, ...]] = [(experts, 2 * width), (experts, dim)]
    if adapters:
        pairs = (rank, dim), (2 * width, rank), (rank, width), (dim, rank)
        wanted += [(experts, *pair) for pair in pairs]
    given = [b_gate_up, b_down, *adapters]
    if [tuple(x.shape) for x in given] != wanted or any(x.dtype != x_TD.dtype for x in given):
        takes = "biases [E, 2F] and [E, D], and adapters [E, r, D], [E, 2F, r], [E, r, F] and"
        names = {"b_gate_up": b_gate_up, "b_down": b_down}
        names |= {f"adapter_{i}": x for i, x in enumerate(adapters)}
        takes += " [E, D, r], in x's dtype"
        raise refusal("clamped_expert_mlp", takes, x=x_TD, w_down=w_down, **names)


def _product(
    x_RN: torch.Tensor,
    w: torch.Tensor,
    adapter: Sequence[torch.Tensor],
    scale: float,
    offsets_E: torch.Tensor,
) -> torch.Tensor:
    wide = grouped_mm(x_RN, w.transpose(1, 2), offsets_E)
    if not adapter:
        return wide
    low = grouped_mm(x_RN, adapter[0].transpose(1, 2), offsets_E)
    return wide + scale * grouped_mm(low, adapter[1].transpose(1, 2), offsets_E)


def _adapted(
    x_RN: torch.Tensor,
    w: torch.Tensor,
    adapter: Sequence[torch.Tensor],
    scale: float,
    offsets_E: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of :func:`_product` within an op, and that with A ([0] without an adapter)."""
    if adapter:
        return adapted_product(x_RN, w, *adapter, scale, offsets_E, offsets_E)
    return grouped_mm(x_RN, w.transpose(1, 2), offsets_E), x_RN.new_empty(0)


@torch.library.custom_op("moetrain::clamped_expert_mlp", mutates_args=())
def _clamped_expert_mlp(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    adapters: Sequence[torch.Tensor],
    limit: float,
    alpha: float,
    scale: float,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``y_TD``, and ``a_R2F``, ``u_Rr`` and ``v_Rr`` for the backward."""
    w_gate_up, b_gate_up, w_down, b_down = matrices
    x_RD, weights_R = rows_of(x_TD, weights_TK, slot_row_TK, num_rows)
    a_R2F, u_Rr = _adapted(x_RD, w_gate_up, adapters[:2], scale, offsets_E)
    del x_RD
    h_RF = clamped_swiglu(a_R2F, weights_R, b_gate_up, offsets_E, limit, alpha, "triton")
    y_RD, v_Rr = _adapted(h_RF, w_down, adapters[2:], scale, offsets_E)
    del h_RF
    y_TD = torch.empty_like(x_TD)
    tokens, width = x_TD.shape
    experts = offsets_E.shape[0]
    _sum_kernel[(tokens, triton.cdiv(width, _COLUMNS))](
        y_RD, slot_row_TK, weights_TK, offsets_E, b_down, y_TD, width, experts,
        slot_row_TK.shape[1], triton.next_power_of_2(experts), _COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return y_TD, a_R2F, u_Rr, v_Rr


@_clamped_expert_mlp.register_fake
def _(x_TD, weights, slot_row, offsets, matrices, adapters, limit, alpha, scale, num_rows):
    a_R2F = x_TD.new_empty(num_rows, matrices[0].shape[1])
    low = (num_rows, adapters[0].shape[1]) if adapters else (0,)
    return torch.empty_like(x_TD), a_R2F, x_TD.new_empty(low), x_TD.new_empty(low)


@torch.library.custom_op("moetrain::clamped_expert_mlp_backward", mutates_args=())
def _clamped_expert_mlp_backward(
    dy_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    adapters: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor],
    limit: float,
    alpha: float,
    scale: float,
    is_trained: bool,
) -> list[torch.Tensor]:
    """The gradients of x, weights, and of the adapters or, if ``is_trained``, the matrices."""
    w_gate_up, b_gate_up, w_down, b_down = matrices
    a_R2F, u_Rr, v_Rr = saved
    dy_RD, weights_R = rows_of(dy_TD, weights_TK, slot_row_TK, a_R2F.shape[0])
    dh_RF, dv_Rr = _before(dy_RD, w_down, adapters[2:], scale, offsets_E)
    h_RF = torch.empty_like(dh_RF)
    pre = (a_R2F, weights_R, b_gate_up, offsets_E)
    da_R2F, d_weights_R = clamped_swiglu_gradients(dh_RF, *pre, limit, alpha, h_RF)
    del dh_RF  # before the products below, where memory peaks
    second, first = [], []
    if adapters:
        a_down, b_down_EDr = adapters[2:]
        second = [narrow_grad(dv_Rr, h_RF, a_down, offsets_E)]
        second.append(narrow_grad(v_Rr, dy_RD, b_down_EDr.mT, offsets_E, scale).mT)
    elif is_trained:
        second = [grouped_weight_grad(dy_RD, h_RF, offsets_E)]
        second.append(sum_by_expert(dy_RD, weights_R, offsets_E))
    del dy_RD, h_RF
    dx_RD, du_Rr = _before(da_R2F, w_gate_up, adapters[:2], scale, offsets_E)
    dx_TD = torch.empty_like(x_TD)
    d_weights_TK = torch.empty_like(weights_TK)
    sum_rows(dx_RD, slot_row_TK, dx_TD, d_weights_R, d_weights_TK)
    _add_products(dy_TD, slot_row_TK, offsets_E, b_down, d_weights_TK)
    if adapters or is_trained:  # the tokens' rows, in the memory of dx_RD: dx_TD has its sums
        x_RD, _ = rows_of(x_TD, None, slot_row_TK, len(dx_RD), dx_RD)
        if adapters:
            a_up, b_up = adapters[:2]
            first = [narrow_grad(du_Rr, x_RD, a_up, offsets_E)]
            first.append(narrow_grad(u_Rr, da_R2F, b_up.mT, offsets_E, scale).mT)
        else:
            first = [grouped_weight_grad(da_R2F, x_RD, offsets_E)]
            first.append(sum_by_expert(da_R2F, None, offsets_E))
    return [dx_TD, d_weights_TK, *first, *second]


def _before(
    dy_RN: torch.Tensor,
    w: torch.Tensor,
    adapter: Sequence[torch.Tensor],
    scale: float,
    offsets_E: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the input of :func:`_adapted`, and that of its product with A."""
    if adapter:
        return adapted_product_backward(dy_RN, w, *adapter, scale, offsets_E, offsets_E)
    return grouped_mm(dy_RN, w, offsets_E), dy_RN.new_empty(0)


@_clamped_expert_mlp_backward.register_fake
def _(dy, x_TD, weights_TK, slot_row, offsets, matrices, adapters, saved, *how):
    trained = adapters or (matrices if how[-1] else [])
    return [torch.empty_like(x) for x in (x_TD, weights_TK, *trained)]


def _save(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[torch.Tensor, ...],
) -> None:
    *routed, matrices, adapters, ctx.limit, ctx.alpha, ctx.scale, _ = inputs
    ctx.num_adapters = len(adapters)
    ctx.is_trained = any(x.requires_grad for x in matrices)
    ctx.save_for_backward(*routed, *matrices, *adapters, *output[1:])
    ctx.set_materialize_grads(False)  # no zeros for outputs that have no gradient


def _differentiate(ctx: Any, dy_TD: torch.Tensor | None, *_: torch.Tensor | None):
    count = ctx.num_adapters
    none = [None] * 4, [None] * count
    if dy_TD is None:
        return *(None,) * 4, *none, *(None,) * 4
    routed, rest = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
    lists = ([*rest[:4]], [*rest[4 : 4 + count]], [*rest[4 + count :]])
    is_trained = ctx.is_trained and not count
    how = (ctx.limit, ctx.alpha, ctx.scale, is_trained)
    # The kernel copies rows, which an expanded gradient (stride 0, as a sum's) does not have.
    found = _clamped_expert_mlp_backward(dy_TD.contiguous(), *routed, *lists, *how)
    dx_TD, d_weights_TK, *d_trained = found
    grads = (d_trained, none[1]) if is_trained else (none[0], d_trained)
    return dx_TD, d_weights_TK, None, None, *grads, *(None,) * 4


_clamped_expert_mlp.register_autograd(_differentiate, setup_context=_save)
worth_saving("experts", torch.ops.moetrain.clamped_expert_mlp.default)


def _add_products(
    dy_TD: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    bias_ED: torch.Tensor,
    d_weights_TK: torch.Tensor,
) -> None:
    """Add ``<dy, bias>`` of each slot's expert to its weight's gradient."""
    experts, width = bias_ED.shape
    _product_kernel[(dy_TD.shape[0],)](
        dy_TD, slot_row_TK, offsets_E, bias_ED, d_weights_TK, width, experts,
        slot_row_TK.shape[1], triton.next_power_of_2(experts), _COLUMNS, num_warps=_WARPS,
    )  # fmt: skip


@triton.jit
def _sum_kernel(
    rows, slot_row, weights, offsets, bias, x, width, experts,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    # Unrolled, so that the loads of all rows are in flight together.
    for k in tl.static_range(SLOTS):
        row = tl.load(slot_row + token * SLOTS + k).to(tl.int64)
        expert = expert_of(offsets, row, experts, EXPERTS).to(tl.int64)
        # An absent row has no columns, and no weight.
        mask = column < tl.where(row >= 0, width, 0)
        weight = tl.load(weights + token * SLOTS + k, row >= 0, other=0.0).to(tl.float32)
        value = tl.load(rows + row * width + column, mask, other=0.0).to(tl.float32)
        own = tl.load(bias + expert * width + column, mask, other=0.0).to(tl.float32)
        total += tl.fma(own, weight, value)
    tl.store(x + token * width + column, total, column < width)


@triton.jit
def _product_kernel(
    dy, slot_row, offsets, bias, d_weights, width, experts,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(SLOTS):
        row = tl.load(slot_row + token * SLOTS + k).to(tl.int64)
        expert = expert_of(offsets, row, experts, EXPERTS).to(tl.int64)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < tl.where(row >= 0, width, 0)
            upstream = tl.load(dy + token * width + column, mask, other=0.0).to(tl.float32)
            total += upstream * tl.load(bias + expert * width + column, mask, other=0.0).to(
                tl.float32
            )
        at = d_weights + token * SLOTS + k
        before = tl.load(at, row >= 0, other=0.0)
        tl.store(at, before + tl.sum(total, axis=0).to(before.dtype), row >= 0)
