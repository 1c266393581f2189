"""The experts of GPT-OSS, from tokens to tokens: with biases and a clamped SwiGLU.

In the notation of :mod:`moetrain.kernels.experts.mlp`, with a row's expert e and routing weight w::

    a = x[t] @ [gate; up]^T      h = clamped_swiglu(a + b1[e], w)
    y[t] = sum over r of h @ down^T + w * b2[e]

The routing weight is applied before the down product, so that product's bias has to be weighted as
well. For an upstream ``dy``, besides the gradients of the products::

    d_b1[e] = sum over e's rows of da        d_b2[e] = sum over e's rows of w * dy
    dw     += <dy, b2[e]>

Only the tokens and ``a`` are saved. With LoRA adapters beside frozen matrices, in the notation of
:func:`~moetrain.kernels.experts.mlp.adapted_expert_mlp`, ``u`` and ``v`` are saved too.

Worked example, one row, D = F = 1, b1 0, x 1, gate 0, up 3, down 1, b2 5, w 2: ``h = 0`` and
``y = 10``; for ``dy = 1``, ``da = [2 * 4 * 1/2, 0] = [4, 0]``, ``dw = 5``, ``d_b2 = 2`` and
``dx = 0``.

Left out on purpose: kernels for few rows.

Legend: T tokens, K experts a token, R rows sorted by expert, E experts, D model width, F expert
width, r rank of the adapters.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch

from moetrain.config.compute import Precision
from moetrain.kernels.experts import frame
from moetrain.kernels.experts.mlp import check_experts
from moetrain.kernels.experts.permutation import ExpertIndices
from moetrain.kernels.experts.projections import Adapter, Clamped, Projection, Saved, Tokens
from moetrain.runtime.backend import Backend, gradients, refusal, use_fast, worth_saving
from moetrain.runtime.typed import OpContext


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
    precision: Precision = "bf16",
) -> torch.Tensor:
    """Sum each token's experts, times their routing weights: ``y_TD`` in ``x``'s dtype.

    Args:
        x_TD: bf16 on CUDA; in plain torch any floating dtype.
        weights_TK: routing weights, any floating dtype, differentiable too.
        w_gate_up_E2FD, b_gate_up_E2F: gate's F rows, then up's.
        w_down_EDF, b_down_ED: all matrices and biases are in ``x``'s dtype.
        limit, alpha: see :mod:`moetrain.kernels.experts.clamped_swiglu`.
        adapters: A [E, r, D] and B [E, 2F, r] beside the first matrix, A [E, r, F] and B [E, D, r]
            beside the second; empty: none. With adapters, matrices and biases get no gradient.
        scale: multiplies the adapters' results.
        precision: of the products with the matrices; those with adapters are in bf16.

    Raises ValueError: shapes, dtypes or widths do not fit.
    """
    check_experts(
        "clamped_expert_mlp",
        x_TD,
        weights_TK,
        indices,
        w_gate_up_E2FD,
        w_down_EDF,
        precision=precision,
    )
    matrices = [w_gate_up_E2FD, b_gate_up_E2F, w_down_EDF, b_down_ED]
    _check_sizes(x_TD, matrices, adapters)
    if not use_fast(backend, x_TD):
        if adapters:
            matrices = [x.detach() for x in matrices]
        first, second, activation = _parts(
            matrices, adapters, limit, alpha, scale, indices.offsets_E
        )
        return frame.reference(x_TD, weights_TK, indices, first, second, activation, precision)
    y_TD, *_ = clamped_expert_mlp_op(
        x_TD.contiguous(),
        weights_TK.contiguous(),
        indices.slot_row_TK.contiguous(),
        indices.offsets_E.contiguous(),
        [x.contiguous() for x in matrices],
        [x.contiguous() for x in adapters],
        limit,
        alpha,
        scale,
        precision,
        indices.row_slot_R.shape[0],
    )
    return y_TD


def _check_sizes(
    x_TD: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    adapters: Sequence[torch.Tensor],
) -> None:
    """Raise ValueError if biases or adapters do not fit the matrices."""
    _, b_gate_up, w_down, b_down = matrices
    experts, dim, width = w_down.shape
    rank = adapters[0].shape[1] if adapters else 0
    wanted: list[tuple[int, ...]] = [(experts, 2 * width), (experts, dim)]
    if adapters:
        pairs = (rank, dim), (2 * width, rank), (rank, width), (dim, rank)
        wanted += [(experts, *pair) for pair in pairs]
    tensors = [b_gate_up, b_down, *adapters]
    is_one_dtype = all(x.dtype == x_TD.dtype for x in tensors)
    if [tuple(x.shape) for x in tensors] != wanted or not is_one_dtype:
        takes = "biases [E, 2F] and [E, D], and adapters [E, r, D], [E, 2F, r], [E, r, F] and"
        names = {"b_gate_up": b_gate_up, "b_down": b_down}
        names |= {f"adapter_{i}": x for i, x in enumerate(adapters)}
        takes += " [E, D, r], in x's dtype"
        raise refusal("clamped_expert_mlp", takes, x=x_TD, w_down=w_down, **names)


def _parts(
    matrices: Sequence[torch.Tensor],
    adapters: Sequence[torch.Tensor],
    limit: float,
    alpha: float,
    scale: float,
    offsets_E: torch.Tensor,
) -> tuple[Projection, Projection, Clamped]:
    """Return both projections and the activation, given matrices and adapters in the op's order."""
    w_gate_up, b_gate_up, w_down, b_down = matrices
    first_adapter = second_adapter = None
    if adapters:
        a_gate_up, b_gate_up_E2Fr, a_down, b_down_EDr = adapters
        first_adapter = Adapter(a_gate_up, b_gate_up_E2Fr, scale, offsets_E)
        second_adapter = Adapter(a_down, b_down_EDr, scale, offsets_E)
    return (
        Projection(w_gate_up, b_gate_up, first_adapter),
        Projection(w_down, b_down, second_adapter),
        Clamped(b_gate_up, limit, alpha),
    )


@torch.library.custom_op("moetrain::clamped_expert_mlp", mutates_args=())
def clamped_expert_mlp_op(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    slot_row_TK: torch.Tensor,
    offsets_E: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    adapters: Sequence[torch.Tensor],
    limit: float,
    alpha: float,
    scale: float,
    precision: str,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``y_TD``, and ``a_R2F``, ``u_Rr`` and ``v_Rr`` for the backward.

    ``matrices`` are w_gate_up, b_gate_up, w_down and b_down.
    """
    tokens = Tokens(x_TD, weights_TK, slot_row_TK, offsets_E)
    first, second, activation = _parts(matrices, adapters, limit, alpha, scale, offsets_E)
    y_TD, saved = frame.forward(
        tokens, num_rows, first, second, activation, cast("Precision", precision)
    )
    return y_TD, saved.a_RA, saved.u_Rr, saved.v_Rr


@clamped_expert_mlp_op.register_fake
def _(
    x_TD, weights_TK, slot_row_TK, offsets_E, matrices, adapters, limit, alpha, scale, precision,
    num_rows,
):  # fmt: skip
    a_R2F = x_TD.new_empty(num_rows, matrices[0].shape[1])
    low = (num_rows, adapters[0].shape[1]) if adapters else (0,)
    return torch.empty_like(x_TD), a_R2F, x_TD.new_empty(low), x_TD.new_empty(low)


@torch.library.custom_op("moetrain::clamped_expert_mlp_backward", mutates_args=())
def clamped_expert_mlp_backward_op(
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
    precision: str,
    is_trained: bool,
) -> list[torch.Tensor]:
    """Return the gradients of x, weights, and the adapters or, if ``is_trained``, the matrices."""
    tokens = Tokens(x_TD, weights_TK, slot_row_TK, offsets_E)
    first, second, activation = _parts(matrices, adapters, limit, alpha, scale, offsets_E)
    found = frame.backward(
        dy_TD,
        tokens,
        first,
        second,
        activation,
        Saved(*saved),
        is_trained,
        cast("Precision", precision),
    )
    if adapters:
        trained = [*found.first.of_adapter(), *found.second.of_adapter()]
    else:
        trained = [*found.first.of_matrices(), *found.second.of_matrices()]
    return [found.x_TD, found.weights_TK, *trained]


@clamped_expert_mlp_backward_op.register_fake
def _(
    dy_TD, x_TD, weights_TK, slot_row_TK, offsets_E, matrices, adapters, saved, limit, alpha, scale,
    precision, is_trained,
):  # fmt: skip
    differentiated = adapters or (matrices if is_trained else [])
    return [torch.empty_like(x) for x in (x_TD, weights_TK, *differentiated)]


def _save(
    ctx: OpContext,
    inputs: tuple[Any, ...],
    output: tuple[torch.Tensor, ...],
) -> None:
    *tokens, matrices, adapters, ctx.limit, ctx.alpha, ctx.scale, ctx.precision, _ = inputs
    ctx.num_adapters = len(adapters)
    ctx.is_trained = not adapters and any(x.requires_grad for x in matrices)
    _, a_R2F, u_Rr, v_Rr = output
    ctx.save_for_backward(*tokens, *matrices, *adapters, a_R2F, u_Rr, v_Rr)
    ctx.set_materialize_grads(False)  # no zeros for outputs that have no gradient


def _differentiate(ctx: OpContext, dy_TD: torch.Tensor | None, *_: None) -> tuple[object, ...]:
    d_matrices, d_adapters = [None] * 4, [None] * ctx.num_adapters
    if dy_TD is None:
        return gradients(clamped_expert_mlp_op, matrices=d_matrices, adapters=d_adapters)
    x_TD, weights_TK, slot_row_TK, offsets_E, *rest = ctx.saved_tensors
    d_x_TD, d_weights_TK, *d_trained = clamped_expert_mlp_backward_op(
        # The kernels read rows, and the gradient of a sum is expanded: its stride is 0.
        dy_TD.contiguous(),
        x_TD,
        weights_TK,
        slot_row_TK,
        offsets_E,
        matrices=rest[:4],
        adapters=rest[4:-3],
        saved=rest[-3:],
        limit=ctx.limit,
        alpha=ctx.alpha,
        scale=ctx.scale,
        precision=ctx.precision,
        is_trained=ctx.is_trained,
    )
    if ctx.is_trained:
        d_matrices = d_trained
    else:
        d_adapters = d_trained
    return gradients(
        clamped_expert_mlp_op,
        x_TD=d_x_TD,
        weights_TK=d_weights_TK,
        matrices=d_matrices,
        adapters=d_adapters,
    )


clamped_expert_mlp_op.register_autograd(_differentiate, setup_context=_save)
worth_saving("experts", torch.ops.moetrain.clamped_expert_mlp.default)
