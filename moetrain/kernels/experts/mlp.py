"""The expert MLP, from tokens to tokens: two grouped GEMMs around SwiGLU, between permutations.

Let token t be copied to the rows r(t), and let w be a row's routing weight. The weight is applied
before the down product, so that combining rows is a plain sum::

    a = x[t] @ [gate; up]^T      h = silu(a_gate) * a_up * w      y[t] = sum over r of h @ down^T

and for an upstream ``dy``::

    dh = dy @ down            d_down    = dy^T @ h
    da, dw = swiglu'(dh)      d_gate_up = da^T @ x        dx = da @ [gate; up]

Only the tokens and ``a`` are saved. The pass that computes ``da`` recomputes ``h``, and with it
``dw = <dh, h / w>``, which needs no ``y`` (arXiv 2512.14080). The backward copies the tokens to
rows again, which are K times as many. A token with D = 2048, F = 768 and K = 8 keeps 28 KB in bf16.
Its rows would take another 32 KB.

Worked example, one row, D = F = 1, x 1, gate 0, up 3, down 1, w 2: ``a = [0, 3]``, ``h = y = 0``;
for ``dy = 1``, ``dh = 1``, ``da = [dh * w * 3 * 1/2, 0] = [3, 0]``, ``dw = 0`` and ``dx = 0``.

:func:`adapted_expert_mlp` has LoRA adapters A and B beside the frozen ``W1 = [gate; up]`` and
``W2 = down``, scaled by s. It saves ``u`` and ``v`` too. Gate and up share A1::

    u = x @ A1^T    a = x @ W1^T + s * u @ B1^T    h = swiglu(a, w)
    v = h @ A2^T    y = h @ W2^T + s * v @ B2^T

    dv = s * dy @ B2     dh = dy @ W2 + dv @ A2      dB2 = s * dy^T @ v     dA2 = dv^T @ h
    da, dw = swiglu'(dh)
    du = s * da @ B1     dx = da @ W1 + du @ A1      dB1 = s * da^T @ u     dA1 = du^T @ x

Tenants are jobs that share a pass, each with adapters of its own. Adapters of S tenants are stacked
before the experts, [S, E, ...]. Tenant s has the s-th of S equal parts of the tokens. An expert's
rows are in the order of their tokens, so that those of a tenant are together. The frozen matrices'
products have E groups of rows, and the adapters' products E * S. With E = 2, S = 2, T = 4, K = 1
and tokens for experts 0, 1, 0, 1::

    row         0       1       2       3
    token       0       2       1       3           offsets of experts           [2, 4]
    tenant      0       1       0       1           offsets of (expert, tenant)  [1, 2, 3, 4]

``activation`` is a name of ``ACTIVATIONS`` (:mod:`moetrain.kernels.experts.projections`), such as
``silu`` for SwiGLU or ``gelu`` for GeGLU. With ``relu2`` experts have no gate: the first matrix has
F rows, and ``h = relu(a)^2 * w``. The products for few rows (:mod:`moetrain.kernels.small_m`) exist
only for SwiGLU in bf16.

The ops here give their projections and activation to :mod:`moetrain.kernels.experts.frame`. It
computes these formulas, with products in e4m3 where ``precision`` says so.

Legend: T tokens, K experts a token, R rows sorted by expert, E experts, D model width, F expert
width, r rank of the adapters.
"""

from typing import Any, cast

import torch

from moetrain.config.compute import Precision
from moetrain.kernels import small_m
from moetrain.kernels.experts import frame
from moetrain.kernels.experts.permutation import ExpertIndices, permute, unpermute
from moetrain.kernels.experts.projections import (
    ACTIVATIONS,
    Activation,
    Adapter,
    Projection,
    Saved,
    Tokens,
    activation_of,
    is_swiglu,
)
from moetrain.kernels.quant.e4m3 import MULTIPLE
from moetrain.kernels.quant.groups import QuantisedMatrices
from moetrain.kernels.quant.recipes import RECIPES
from moetrain.runtime.backend import Backend, gradients, refusal, use_fast, worth_saving
from moetrain.runtime.typed import OpContext, fake_of, register_gradient


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
    precision: Precision = "bf16",
) -> torch.Tensor:
    """Sum each token's experts, times their routing weights: ``y_TD`` in ``x``'s dtype.

    Args:
        x_TD: bf16 on CUDA; in plain torch any floating dtype.
        weights_TK: routing weights, any floating dtype, differentiable too.
        w_gate_up_E2FD: gate's F rows, then up's; without a gate, up's alone.
        w_down_EDF: both matrices are in ``x``'s dtype, with rows of multiples of 16 bytes, or both
            are quantised. Quantised matrices are dequantised first; with few rows the kernels of
            the products dequantise them.
        typical_rows: the usual number of rows, if ``indices`` have room for more; None: all rows
            of ``indices``.
        activation: a name of ``ACTIVATIONS``.
        precision: as the setting ``kernels.precision``; for fp8, D is a multiple of 16, and F of
            the recipe's ``multiple``.

    Raises:
        ValueError: shapes, dtypes or widths do not fit.
    """
    chosen = _activation("expert_mlp", activation)
    check_experts(
        "expert_mlp",
        x_TD,
        weights_TK,
        indices,
        w_gate_up_E2FD,
        w_down_EDF,
        has_gate=chosen.has_gate,
        precision=precision,
    )
    is_fast = use_fast(backend, x_TD)
    rows = indices.row_slot_R.shape[0]
    typical = rows if typical_rows is None else typical_rows
    is_plain = is_swiglu(chosen) and precision == "bf16"
    if is_fast and is_plain and small_m.runs_experts(x_TD, w_down_EDF, typical):
        x_RD, weights_R = permute(x_TD.contiguous(), weights_TK, indices, backend)
        y_RD = small_m.expert_mlp(
            x_RD, indices.offsets_E, w_gate_up_E2FD, w_down_EDF, weights_R, typical
        )
        return unpermute(y_RD, indices, backend)
    w_gate_up, w_down = (
        w.dequantise() if isinstance(w, QuantisedMatrices) else w
        for w in (w_gate_up_E2FD, w_down_EDF)
    )
    if not is_fast:
        return frame.reference(
            x_TD,
            weights_TK,
            indices,
            Projection(w_gate_up),
            Projection(w_down),
            chosen,
            precision,
        )
    y_TD, _ = expert_mlp_op(
        x_TD.contiguous(),
        weights_TK.contiguous(),
        indices.slot_row_TK.contiguous(),
        indices.offsets_E.contiguous(),
        w_gate_up.contiguous(),
        w_down.contiguous(),
        activation,
        precision,
        rows,
    )
    return y_TD


def check_experts(
    kernel: str,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    w_gate_up_E2FD: torch.Tensor | QuantisedMatrices,
    w_down_EDF: torch.Tensor | QuantisedMatrices,
    *,
    has_gate: bool = True,
    precision: Precision = "bf16",
) -> None:
    """Raise ValueError, naming ``kernel``, if shapes, dtypes or widths do not fit."""
    experts, dim, width = w_down_EDF.shape
    outer = 2 * width if has_gate else width
    fits = w_gate_up_E2FD.shape == (experts, outer, dim) and x_TD.shape[1:] == (dim,)
    if not fits or not x_TD.dtype == w_gate_up_E2FD.dtype == w_down_EDF.dtype:
        takes = f"[T, D], [E, {'2F' if has_gate else 'F'}, D] and [E, D, F] in one dtype"
        raise refusal(kernel, takes, x=x_TD, w_gate_up=w_gate_up_E2FD, w_down=w_down_EDF)
    slot_row_TK = indices.slot_row_TK
    if weights_TK.shape != slot_row_TK.shape or x_TD.shape[:1] != weights_TK.shape[:1]:
        takes = "[T, D], [T, K] and [T, K]"
        raise refusal(kernel, takes, x=x_TD, weights=weights_TK, slot_row=slot_row_TK)
    if precision != "bf16":
        multiple = RECIPES[precision].multiple
        if dim % MULTIPLE or width % multiple:
            takes = f"multiples of {MULTIPLE} and {multiple} in {precision}"
            raise refusal(kernel, takes, widths=(dim, width))


def _activation(kernel: str, name: str) -> Activation:
    """Return the activation called ``name``; ValueError, naming ``kernel``: there is none."""
    try:
        return activation_of(name)
    except ValueError:
        takes = " or ".join(map(repr, ACTIVATIONS))
        raise refusal(kernel, takes, activation=repr(name)) from None


@torch.library.custom_op("moetrain::expert_mlp", mutates_args=())
def expert_mlp_op(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    activation: str,
    precision: str,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``y_TD``, and ``a_R2F`` for the backward."""
    y_TD, saved = frame.forward(
        Tokens(x_TD, weights_TK, slot_row_TK, offsets_E),
        num_rows,
        Projection(w_gate_up_E2FD),
        Projection(w_down_EDF),
        activation_of(activation),
        cast("Precision", precision),
    )
    return y_TD, saved.a_RA


@fake_of(expert_mlp_op)
def _(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    activation: str,
    precision: str,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x_TD), x_TD.new_empty(num_rows, w_gate_up_E2FD.shape[1])


@torch.library.custom_op("moetrain::expert_mlp_backward", mutates_args=())
def expert_mlp_backward_op(
    dy_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    a_R2F: torch.Tensor,
    activation: str,
    precision: str,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, weights, w_gate_up and w_down.

    The last two are empty unless ``is_trained``.
    """
    none = dy_TD.new_empty(0)
    found = frame.backward(
        dy_TD,
        Tokens(x_TD, weights_TK, slot_row_TK, offsets_E),
        Projection(w_gate_up_E2FD),
        Projection(w_down_EDF),
        activation_of(activation),
        Saved(a_R2F, none, none),
        is_trained,
        cast("Precision", precision),
    )
    if found.first.w is None or found.second.w is None:
        return found.x_TD, found.weights_TK, none, dy_TD.new_empty(0)
    return found.x_TD, found.weights_TK, found.first.w, found.second.w


@fake_of(expert_mlp_backward_op)
def _(
    dy_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    a_R2F: torch.Tensor,
    activation: str,
    precision: str,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return gradient_shapes(x_TD, weights_TK, w_gate_up_E2FD, w_down_EDF, is_trained)


def gradient_shapes(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    is_trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return uninitialised tensors of the shapes that a backward with these inputs returns."""
    d_gate_up, d_down = (
        torch.empty_like(w) if is_trained else w.new_empty(0) for w in (w_gate_up_E2FD, w_down_EDF)
    )
    return torch.empty_like(x_TD), torch.empty_like(weights_TK), d_gate_up, d_down


def _save(ctx: OpContext, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.activation, ctx.precision, _ = inputs
    _, a_R2F = output
    ctx.save_for_backward(*tensors, a_R2F)
    ctx.set_materialize_grads(False)  # no zeros of a's size: it has no gradient


def _differentiate(ctx: OpContext, dy_TD: torch.Tensor | None, _: None) -> tuple[object, ...]:
    if dy_TD is None:
        return gradients(expert_mlp_op)
    is_trained = any(ctx.needs_input_grad[4:6])
    # The kernels read rows, and the gradient of a sum is expanded: its stride is 0.
    d_x_TD, d_weights_TK, d_gate_up, d_down = expert_mlp_backward_op(
        dy_TD.contiguous(), *ctx.saved_tensors, ctx.activation, ctx.precision, is_trained
    )
    return gradients(
        expert_mlp_op,
        x_TD=d_x_TD,
        weights_TK=d_weights_TK,
        w_gate_up_E2FD=d_gate_up if is_trained else None,
        w_down_EDF=d_down if is_trained else None,
    )


register_gradient(expert_mlp_op, _differentiate, _save)
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
    precision: Precision = "bf16",
) -> torch.Tensor:
    """Compute :func:`expert_mlp` with LoRA adapters beside frozen matrices.

    Args:
        w_gate_up_E2FD, w_down_EDF: the frozen matrices, which get no gradient.
        a_gate_up_ErD, b_gate_up_E2Fr, a_down_ErF, b_down_EDr: one adapter an expert, or
            [S, E, ...] each for S tenants.
        scale: multiplies the adapters' results.
        precision: of the products with the frozen matrices; those with the adapters are in bf16.

    The other arguments are those of :func:`expert_mlp`.

    Raises ValueError: shapes, dtypes or widths do not fit.
    """
    chosen = _activation("adapted_expert_mlp", activation)
    check_experts(
        "adapted_expert_mlp",
        x_TD,
        weights_TK,
        indices,
        w_gate_up_E2FD,
        w_down_EDF,
        has_gate=chosen.has_gate,
        precision=precision,
    )
    _check_adapters(
        x_TD,
        w_gate_up_E2FD,
        w_down_EDF,
        a_gate_up=a_gate_up_ErD,
        b_gate_up=b_gate_up_E2Fr,
        a_down=a_down_ErF,
        b_down=b_down_EDr,
    )
    offsets_E = offsets_G = indices.offsets_E
    if a_gate_up_ErD.dim() == 4:
        tenants = a_gate_up_ErD.shape[0]
        slots = weights_TK.numel() // tenants
        offsets_G = tenant_offsets(offsets_E, indices.row_slot_R, tenants, slots)
    if not use_fast(backend, x_TD):
        return frame.reference(
            x_TD,
            weights_TK,
            indices,
            Projection(
                w_gate_up_E2FD, adapter=Adapter(a_gate_up_ErD, b_gate_up_E2Fr, scale, offsets_G)
            ),
            Projection(w_down_EDF, adapter=Adapter(a_down_ErF, b_down_EDr, scale, offsets_G)),
            chosen,
            precision,
        )
    y_TD, *_ = adapted_expert_mlp_op(
        x_TD.contiguous(),
        weights_TK.contiguous(),
        indices.slot_row_TK.contiguous(),
        offsets_E.contiguous(),
        offsets_G.contiguous(),
        w_gate_up_E2FD.contiguous(),
        w_down_EDF.contiguous(),
        a_gate_up_ErD,
        b_gate_up_E2Fr,
        a_down_ErF,
        b_down_EDr,
        scale,
        activation,
        precision,
        indices.row_slot_R.shape[0],
    )
    return y_TD


def _check_adapters(
    x_TD: torch.Tensor,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    **adapters: torch.Tensor,
) -> None:
    """Raise ValueError if the adapters, in the order of their op, do not fit the matrices."""
    experts, dim, width = w_down_EDF.shape
    a_gate_up = adapters["a_gate_up"]
    rank = a_gate_up.shape[-2]
    stacked = (experts,)
    if a_gate_up.dim() == 4:
        tenants = a_gate_up.shape[0]
        stacked = tenants, experts
        if x_TD.shape[0] % tenants:
            takes = "[T, D] in S equal parts where adapters are [S, E, ...]"
            raise refusal("adapted_expert_mlp", takes, x=x_TD, a_gate_up=a_gate_up)
    wanted = (rank, dim), (w_gate_up_E2FD.shape[1], rank), (rank, width), (dim, rank)
    for x, shape in zip(adapters.values(), wanted, strict=True):
        if x.shape != (*stacked, *shape) or x.dtype != x_TD.dtype:
            takes = "[E, r, D], [E, 2F, r], [E, r, F] and [E, D, r] in x's dtype"
            raise refusal("adapted_expert_mlp", takes, x=x_TD, w_down=w_down_EDF, **adapters)


@torch.library.custom_op("moetrain::tenant_offsets", mutates_args=())
def tenant_offsets(
    offsets_E: torch.Tensor,
    row_slot_R: torch.Tensor,
    tenants: int,
    slots: int,
) -> torch.Tensor:
    """Return the cumulative end row of each (expert, tenant), int32 [E * tenants].

    Args:
        offsets_E, row_slot_R: as in :class:`~moetrain.kernels.experts.permutation.ExpertIndices`.
        slots: the number of (token, slot) pairs of each tenant.
    """
    rows_R = torch.arange(row_slot_R.shape[0], device=row_slot_R.device)
    expert_R = torch.searchsorted(offsets_E, rows_R.int(), right=True)
    key_R = expert_R * tenants + row_slot_R // max(1, slots)
    groups = torch.arange(offsets_E.shape[0] * tenants, device=row_slot_R.device)
    # Unused rows, behind all others, have the last group's key: that group ends where they begin.
    return torch.minimum(torch.searchsorted(key_R, groups, right=True), offsets_E[-1]).int()


@fake_of(tenant_offsets)
def _(offsets_E: torch.Tensor, row_slot_R: torch.Tensor, tenants: int, slots: int) -> torch.Tensor:
    return offsets_E.new_empty(offsets_E.shape[0] * tenants)


@torch.library.custom_op("moetrain::adapted_expert_mlp", mutates_args=())
def adapted_expert_mlp_op(
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
    precision: str,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``y_TD``, and ``a_R2F``, ``u_Rr`` and ``v_Rr`` for the backward."""
    y_TD, saved = frame.forward(
        Tokens(x_TD, weights_TK, slot_row_TK, offsets_E),
        num_rows,
        Projection(w_gate_up_E2FD, adapter=Adapter(a_gate_up, b_gate_up, scale, offsets_G)),
        Projection(w_down_EDF, adapter=Adapter(a_down, b_down, scale, offsets_G)),
        activation_of(activation),
        cast("Precision", precision),
    )
    return y_TD, saved.a_RA, saved.u_Rr, saved.v_Rr


@fake_of(adapted_expert_mlp_op)
def _(
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
    precision: str,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    a_R2F = x_TD.new_empty(num_rows, w_gate_up_E2FD.shape[1])
    u_Rr, v_Rr = (x_TD.new_empty(num_rows, a_gate_up.shape[-2]) for _ in range(2))
    return torch.empty_like(x_TD), a_R2F, u_Rr, v_Rr


@torch.library.custom_op("moetrain::adapted_expert_mlp_backward", mutates_args=())
def adapted_expert_mlp_backward_op(
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
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, weights, a_gate_up, b_gate_up, a_down and b_down."""
    found = frame.backward(
        dy_TD,
        Tokens(x_TD, weights_TK, slot_row_TK, offsets_E),
        Projection(w_gate_up_E2FD, adapter=Adapter(a_gate_up, b_gate_up, scale, offsets_G)),
        Projection(w_down_EDF, adapter=Adapter(a_down, b_down, scale, offsets_G)),
        activation_of(activation),
        Saved(a_R2F, u_Rr, v_Rr),
        is_trained=False,
        precision=cast("Precision", precision),
    )
    d_a_gate_up, d_b_gate_up = found.first.of_adapter()
    d_a_down, d_b_down = found.second.of_adapter()
    return found.x_TD, found.weights_TK, d_a_gate_up, d_b_gate_up, d_a_down, d_b_down


@fake_of(adapted_expert_mlp_backward_op)
def _(
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
    precision: str,
) -> tuple[torch.Tensor, ...]:
    differentiated = (x_TD, weights_TK, a_gate_up, b_gate_up, a_down, b_down)
    return tuple(torch.empty_like(x) for x in differentiated)


def _save_adapted(
    ctx: OpContext,
    inputs: tuple[Any, ...],
    output: tuple[torch.Tensor, ...],
) -> None:
    *tensors, ctx.scale, ctx.activation, ctx.precision, _ = inputs
    _, a_R2F, u_Rr, v_Rr = output
    ctx.save_for_backward(*tensors, a_R2F, u_Rr, v_Rr)
    ctx.set_materialize_grads(False)  # no zeros for outputs that have no gradient


def _differentiate_adapted(
    ctx: OpContext, dy_TD: torch.Tensor | None, *_: None
) -> tuple[object, ...]:
    if dy_TD is None:
        return gradients(adapted_expert_mlp_op)
    d_x_TD, d_weights_TK, d_a_gate_up, d_b_gate_up, d_a_down, d_b_down = (
        adapted_expert_mlp_backward_op(
            dy_TD.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.activation, ctx.precision
        )
    )
    return gradients(
        adapted_expert_mlp_op,
        x_TD=d_x_TD,
        weights_TK=d_weights_TK,
        a_gate_up=d_a_gate_up,
        b_gate_up=d_b_gate_up,
        a_down=d_a_down,
        b_down=d_b_down,
    )


register_gradient(adapted_expert_mlp_op, _differentiate_adapted, _save_adapted)
worth_saving("experts", torch.ops.moetrain.adapted_expert_mlp.default)
