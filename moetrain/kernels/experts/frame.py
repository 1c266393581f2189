"""The frame of the expert MLPs: two projections around an activation, between permutations.

The ops of :mod:`moetrain.kernels.experts.mlp` and :mod:`moetrain.kernels.experts.clamped_mlp`
differ only in the parts that they choose. :mod:`moetrain.kernels.experts.projections` has these
parts, and the formulas. :func:`forward` and :func:`backward` are bodies of ops, and
:func:`reference` is plain torch, which autograd differentiates. Products are in bf16, or in e4m3 by
:mod:`moetrain.kernels.experts.frame_fp8`, as ``precision`` says.

Only the tokens, ``a`` and the adapters' narrow products (``Saved``) are kept for the backward. It
recomputes ``h`` while it differentiates the activation, and copies the tokens' rows again.

Legend: T tokens, K experts a token, R rows sorted by expert, E experts, D model width, F expert
width, A width of ``a`` (2F with a gate, F without), r rank of the adapters.
"""

import torch

from moetrain.config.compute import Precision
from moetrain.kernels.experts import frame_fp8, grouped
from moetrain.kernels.experts.permutation import (
    ExpertIndices,
    permute,
    rows_of,
    sum_rows,
    unpermute,
)
from moetrain.kernels.experts.projections import (
    Activation,
    Gradients,
    Projection,
    ProjectionGradients,
    Saved,
    Tokens,
    add_bias_products,
    is_swiglu,
    sum_biased_rows,
)


def forward(
    tokens: Tokens,
    num_rows: int,
    first: Projection,
    second: Projection,
    activation: Activation,
    precision: Precision,
) -> tuple[torch.Tensor, Saved]:
    """Return ``y_TD``, the sum of each token's experts, and what is saved; within an op."""
    if precision != "bf16":
        return frame_fp8.forward(tokens, num_rows, first, second, activation, precision)
    x_TD, weights_TK, slot_row_TK, offsets_E = tokens
    # 1. Copy the tokens to rows, sorted by expert.
    x_RD, weights_R = rows_of(x_TD, weights_TK, slot_row_TK, num_rows)
    # 2. First projection and activation, in one kernel where there is one.
    is_plain = is_swiglu(activation) and first.adapter is None
    if is_plain and grouped.takes_gated(x_RD, first.w_EMN):
        a_RA, h_RF = grouped.gated(x_RD, first.w_EMN, offsets_E, weights_R)
        u_Rr = x_RD.new_empty(0)
        del x_RD
    else:
        a_RA, u_Rr = first.product(x_RD, offsets_E)
        del x_RD
        h_RF = activation.forward(a_RA, weights_R, offsets_E, "triton")
    # 3. Second projection.
    y_RD, v_Rr = second.product(h_RF, offsets_E)
    del h_RF
    # 4. Sum each token's rows, and with them their weighted biases.
    y_TD = torch.empty_like(x_TD)
    if second.bias_EM is None:
        sum_rows(y_RD, slot_row_TK, y_TD)
    else:
        sum_biased_rows(y_RD, tokens, second.bias_EM, y_TD)
    return y_TD, Saved(a_RA, u_Rr, v_Rr)


def backward(
    dy_TD: torch.Tensor,
    tokens: Tokens,
    first: Projection,
    second: Projection,
    activation: Activation,
    saved: Saved,
    is_trained: bool,
    precision: Precision,
) -> Gradients:
    """Differentiate :func:`forward`, within an op; ``dy_TD`` is contiguous.

    Parameters get gradients if ``is_trained``, adapters always.
    """
    if precision != "bf16":
        return frame_fp8.backward(
            dy_TD, tokens, first, second, activation, saved, is_trained, precision
        )
    x_TD, weights_TK, slot_row_TK, offsets_E = tokens
    # 1. Copy the upstream gradient to rows.
    dy_RD, weights_R = rows_of(dy_TD, weights_TK, slot_row_TK, saved.a_RA.shape[0])
    # 2. Back through the second projection and the activation, which recomputes h.
    dh_RF, dv_Rr = second.input_gradient(dy_RD, offsets_E)
    h_RF = torch.empty_like(dh_RF)
    da_RA, d_weights_R = activation.gradients(dh_RF, saved.a_RA, weights_R, offsets_E, h_RF)
    del dh_RF  # before the products below, where memory peaks
    # 3. Gradients of the second projection's parameters.
    d_first = d_second = ProjectionGradients()
    if is_trained or second.adapter is not None:
        d_second = second.gradients(dy_RD, h_RF, saved.v_Rr, dv_Rr, weights_R, offsets_E)
    del dy_RD, h_RF
    # 4. Back through the first projection, and sum each token's rows.
    dx_RD, du_Rr = first.input_gradient(da_RA, offsets_E)
    dx_TD = torch.empty_like(x_TD)
    d_weights_TK = torch.empty_like(weights_TK)
    sum_rows(dx_RD, slot_row_TK, dx_TD, d_weights_R, d_weights_TK)
    if second.bias_EM is not None:
        add_bias_products(dy_TD, tokens, second.bias_EM, d_weights_TK)
    # 5. Gradients of the first projection's parameters. The tokens' rows take the memory of dx_RD,
    # which is summed by now.
    if is_trained or first.adapter is not None:
        x_RD, _ = rows_of(x_TD, None, slot_row_TK, len(dx_RD), dx_RD)
        d_first = first.gradients(da_RA, x_RD, saved.u_Rr, du_Rr, None, offsets_E)
    return Gradients(dx_TD, d_weights_TK, d_first, d_second)


def reference(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    first: Projection,
    second: Projection,
    activation: Activation,
    precision: Precision,
) -> torch.Tensor:
    """Compute ``y_TD`` of :func:`forward` in plain torch."""
    if precision != "bf16":
        return frame_fp8.reference(x_TD, weights_TK, indices, first, second, activation, precision)
    offsets_E = indices.offsets_E
    x_RD, weights_R = permute(x_TD, weights_TK, indices, "reference")
    a_RA = first.reference(x_RD, offsets_E)
    h_RF = activation.forward(a_RA, weights_R, offsets_E, "reference")
    y_RD = second.reference(h_RF, offsets_E)
    return unpermute(second.biased(y_RD, weights_R, offsets_E), indices, "reference")
