"""Permutation: from tokens to rows sorted by expert, and back.

    permute:    x_RD[slot_row[t, k]] = x_TD[t]             unpermute:  y_TD[t] = sum over k of
                weights_R[slot_row[t, k]] = weights_TK[t, k]                   y_RD[slot_row[t, k]]

over the slots (t, k) that have a row; :mod:`moetrain.kernels.experts.indices` makes ``slot_row``
and has a worked example. There, token 2 is copied to rows 4 and 2, and gets their sum back.
``permute_tokens`` is the first half of ``permute``, for rows without weights.

Copies and sums are each other's backward. Both go by token: a token is read (or written) once and
its K rows once, which is all the traffic there must be; going by row would read each token K times.
Rows past ``offsets[-1]`` are unused; what they hold is not specified, and gradients never read
them.

Legend: T tokens, K experts a token, R rows (T * K, or as many as the index maps have), D width.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton's launch settings and unrolled ranges are not typed.)

import torch
from torch.nn import functional as F

from moetrain.kernels.backend import Backend, require_contiguous, tl, triton, use_fast
from moetrain.kernels.experts.indices import (
    ExpertIndices,
)

BLOCK, WARPS = 1024, 2  # columns a program copies or sums, measured on one H200


def permute(
    x_TD: torch.Tensor, weights_TK: torch.Tensor, indices: ExpertIndices, backend: Backend = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``x_RD`` and their routing weights ``weights_R``, sorted by expert, dtypes unchanged.

    Differentiable in both; a token's gradient is the fp32 sum over its rows, rounded once.

    Raises:
        ValueError: shapes that do not belong together, or an ``x_TD`` that is not contiguous.
    """
    if weights_TK.shape != indices.slot_row_TK.shape or x_TD.shape[:1] != weights_TK.shape[:1]:
        raise ValueError(
            f"permute: was given x {tuple(x_TD.shape)}, weights {tuple(weights_TK.shape)} and "
            f"indices of {tuple(indices.slot_row_TK.shape)}; it takes [T, D], [T, K] and [T, K]"
        )
    if not use_fast(backend, x_TD):
        return permute_reference(x_TD, weights_TK, indices)
    require_contiguous("permute", x_TD)
    rows = indices.row_slot_R.shape[0]
    return _permute(x_TD, weights_TK.contiguous(), indices.slot_row_TK, rows)


def permute_reference(
    x_TD: torch.Tensor, weights_TK: torch.Tensor, indices: ExpertIndices
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`permute` by indexing; unused rows are zeros."""
    used_R = indices.row_slot_R >= 0
    slot_R = indices.row_slot_R.clamp(min=0)
    weights_R = torch.where(used_R, weights_TK.reshape(-1)[slot_R], 0)
    return permute_tokens_reference(x_TD, indices), weights_R


def permute_tokens(
    x_TD: torch.Tensor, indices: ExpertIndices, backend: Backend = "auto"
) -> torch.Tensor:
    """Rows ``x_RD`` sorted by expert, in any dtype; floating ones are differentiable as above.

    Raises:
        ValueError: another number of tokens than the indices', or ``x_TD`` is not contiguous.
    """
    if x_TD.dim() != 2 or x_TD.shape[0] != indices.slot_row_TK.shape[0]:
        raise ValueError(
            f"permute_tokens: was given x {tuple(x_TD.shape)} and indices of "
            f"{tuple(indices.slot_row_TK.shape)}; it takes [T, D] and [T, K]"
        )
    if not use_fast(backend, x_TD):
        return permute_tokens_reference(x_TD, indices)
    require_contiguous("permute_tokens", x_TD)
    return _permute_tokens(x_TD, indices.slot_row_TK, indices.row_slot_R.shape[0])


def permute_tokens_reference(x_TD: torch.Tensor, indices: ExpertIndices) -> torch.Tensor:
    """:func:`permute_tokens` by indexing; unused rows are zeros."""
    used_R = indices.row_slot_R >= 0
    token_R = indices.row_slot_R.clamp(min=0) // indices.slot_row_TK.shape[1]
    # where, not a product: the gradient of an unused row may hold NaN.
    return torch.where(used_R[:, None], x_TD[token_R], 0)


def unpermute(
    y_RD: torch.Tensor, indices: ExpertIndices, backend: Backend = "auto"
) -> torch.Tensor:
    """``y_TD``: each token's rows summed in fp32 and rounded once to ``y_RD``'s dtype.

    Raises:
        ValueError: a number of rows other than the indices', or ``y_RD`` is not contiguous.
    """
    if y_RD.dim() != 2 or y_RD.shape[0] != indices.row_slot_R.shape[0]:
        raise ValueError(
            f"unpermute: was given rows {tuple(y_RD.shape)} and indices of "
            f"{indices.row_slot_R.shape[0]}; it takes [R, D]"
        )
    if not use_fast(backend, y_RD):
        return unpermute_reference(y_RD, indices)
    require_contiguous("unpermute", y_RD)
    return _unpermute(y_RD, indices.slot_row_TK)


def unpermute_reference(y_RD: torch.Tensor, indices: ExpertIndices) -> torch.Tensor:
    """:func:`unpermute` by indexing."""
    # An absent row, -1, is the last one: zeros.
    rows_TKD = F.pad(y_RD, (0, 0, 0, 1))[indices.slot_row_TK]
    wide = torch.promote_types(y_RD.dtype, torch.float32)
    return rows_TKD.sum(1, dtype=wide).to(y_RD.dtype)


@torch.library.custom_op("moetrain::permute", mutates_args=())
def _permute(
    x_TD: torch.Tensor, weights_TK: torch.Tensor, slot_row_TK: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows_of(x_TD, weights_TK, slot_row_TK, num_rows)


@_permute.register_fake
def _permute_fake(x_TD, weights_TK, slot_row_TK, num_rows):
    return x_TD.new_empty(num_rows, x_TD.shape[1]), weights_TK.new_empty(num_rows)


@torch.library.custom_op("moetrain::permute_backward", mutates_args=())
def _permute_backward(
    d_x_RD: torch.Tensor, d_weights_R: torch.Tensor, slot_row_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    d_x_TD, d_weights_TK = _permute_backward_fake(d_x_RD, d_weights_R, slot_row_TK)
    sum_rows(d_x_RD, slot_row_TK, d_x_TD, d_weights_R, d_weights_TK)
    return d_x_TD, d_weights_TK


@_permute_backward.register_fake
def _permute_backward_fake(d_x_RD, d_weights_R, slot_row_TK):
    d_x_TD = d_x_RD.new_empty(slot_row_TK.shape[0], d_x_RD.shape[1])
    return d_x_TD, d_weights_R.new_empty(slot_row_TK.shape)


@torch.library.custom_op("moetrain::unpermute", mutates_args=())
def _unpermute(y_RD: torch.Tensor, slot_row_TK: torch.Tensor) -> torch.Tensor:
    y_TD = y_RD.new_empty(slot_row_TK.shape[0], y_RD.shape[1])
    sum_rows(y_RD, slot_row_TK, y_TD)
    return y_TD


@_unpermute.register_fake
def _(y_RD: torch.Tensor, slot_row_TK: torch.Tensor) -> torch.Tensor:
    return y_RD.new_empty(slot_row_TK.shape[0], y_RD.shape[1])


@torch.library.custom_op("moetrain::permute_tokens", mutates_args=())
def _permute_tokens(x_TD: torch.Tensor, slot_row_TK: torch.Tensor, num_rows: int) -> torch.Tensor:
    x_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
    copy_to_rows(x_TD, slot_row_TK, x_RD)
    return x_RD


@_permute_tokens.register_fake
def _(x_TD: torch.Tensor, slot_row_TK: torch.Tensor, num_rows: int) -> torch.Tensor:
    return x_TD.new_empty(num_rows, x_TD.shape[1])


def _save_copied(ctx, inputs, output) -> None:
    *_, slot_row_TK, _ = inputs
    ctx.save_for_backward(slot_row_TK)


def _save_summed(ctx, inputs, output) -> None:
    y_RD, slot_row_TK = inputs
    ctx.save_for_backward(slot_row_TK)
    ctx.num_rows = y_RD.shape[0]


def _differentiate_permute(ctx, d_x_RD: torch.Tensor, d_weights_R: torch.Tensor):
    (slot_row_TK,) = ctx.saved_tensors
    grads = _permute_backward(d_x_RD.contiguous(), d_weights_R.contiguous(), slot_row_TK)
    return *grads, None, None


def _differentiate_permute_tokens(ctx, d_x_RD: torch.Tensor):
    (slot_row_TK,) = ctx.saved_tensors
    return _unpermute(d_x_RD.contiguous(), slot_row_TK), None, None


def _differentiate_unpermute(ctx, d_y_TD: torch.Tensor):
    (slot_row_TK,) = ctx.saved_tensors
    return _permute_tokens(d_y_TD.contiguous(), slot_row_TK, ctx.num_rows), None


_permute.register_autograd(_differentiate_permute, setup_context=_save_copied)
_permute_tokens.register_autograd(_differentiate_permute_tokens, setup_context=_save_copied)
_unpermute.register_autograd(_differentiate_unpermute, setup_context=_save_summed)


def rows_of(
    x_TD: torch.Tensor, weights_TK: torch.Tensor, slot_row_TK: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`permute` within an op: no autograd, contiguous inputs that belong together."""
    x_RD, weights_R = _permute_fake(x_TD, weights_TK, slot_row_TK, num_rows)
    copy_to_rows(x_TD, slot_row_TK, x_RD, weights_TK, weights_R)
    return x_RD, weights_R


def copy_to_rows(
    x_TD: torch.Tensor,
    slot_row_TK: torch.Tensor,
    x_RD: torch.Tensor,
    weights_TK: torch.Tensor | None = None,
    weights_R: torch.Tensor | None = None,
) -> None:
    """Write each token, and its slots' weights, to its rows."""
    (tokens, slots), width = slot_row_TK.shape, x_TD.shape[1]
    grid = (tokens, triton.cdiv(width, BLOCK))
    _copy_kernel[grid](
        x_TD, slot_row_TK, x_RD, weights_TK, weights_R, width, slots, BLOCK, num_warps=WARPS
    )


def sum_rows(
    x_RD: torch.Tensor,
    slot_row_TK: torch.Tensor,
    x_TD: torch.Tensor,
    weights_R: torch.Tensor | None = None,
    weights_TK: torch.Tensor | None = None,
) -> None:
    """Sum each token's rows, in slot order, and fetch its slots' weights."""
    (tokens, slots), width = slot_row_TK.shape, x_TD.shape[1]
    grid = (tokens, triton.cdiv(width, BLOCK))
    _sum_kernel[grid](
        x_RD, slot_row_TK, x_TD, weights_R, weights_TK, width, slots, BLOCK, num_warps=WARPS
    )


@triton.jit
def _copy_kernel(
    x, slot_row, rows, weights, row_weights, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * width + column, column < width)
    for k in tl.static_range(SLOTS):
        row = tl.load(slot_row + token * SLOTS + k).to(tl.int64)
        # An absent row has no columns.
        tl.store(rows + row * width + column, value, column < tl.where(row >= 0, width, 0))
        if weights is not None and (tl.program_id(1) == 0) & (row >= 0):
            tl.store(row_weights + row, tl.load(weights + token * SLOTS + k))


@triton.jit
def _sum_kernel(
    rows, slot_row, x, row_weights, weights, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    # Unrolled, so that the loads of all rows are in flight together.
    for k in tl.static_range(SLOTS):
        row = tl.load(slot_row + token * SLOTS + k).to(tl.int64)
        # An absent row has no columns.
        mask = column < tl.where(row >= 0, width, 0)
        total += tl.load(rows + row * width + column, mask, other=0.0).to(tl.float32)
        if row_weights is not None and tl.program_id(1) == 0:
            weight = tl.load(row_weights + row, row >= 0, other=0.0)
            tl.store(weights + token * SLOTS + k, weight)
    tl.store(x + token * width + column, total, column < width)
