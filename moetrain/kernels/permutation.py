"""Permutation: from tokens to rows sorted by expert, and back.

Legend: T tokens, K experts a token, E experts, R = T * K rows (the most there can be), D width.

A token t that chose experts ``ids[t, 0..K)`` becomes up to K rows; rows lie sorted by expert, and
within one expert by (token, slot), so the order is stable and reproducible. Worked example with
T=3, K=2, E=3 and ``ids = [[2, 0], [0, -1], [2, 1]]`` (-1: no expert)::

    row          0       1       2       3       4      5
    (token,slot) (0,1)   (1,0)   (2,1)   (0,0)   (2,0)  none
    expert       0       0       1       2       2      -
    counts  = [2, 1, 2]        offsets  = [2, 3, 5]     (cumulative ends)
    row_slot = [1, 2, 5, 0, 4, -1]                      (token * K + slot of each row)
    slot_row = [[3, 0], [1, -1], [4, 2]]                (row of each slot)

Shapes never depend on the routing, so nothing waits for the device. Rows past ``offsets[-1]`` are
unused; what they hold is not specified.
"""

from typing import NamedTuple

import torch

from moetrain.kernels.backend import Backend


class ExpertIndices(NamedTuple):
    """The two index maps of a routing decision, all int32 on the tokens' device."""

    counts_E: torch.Tensor
    """Rows of each expert."""
    offsets_E: torch.Tensor
    """Cumulative end row of each expert: what a grouped GEMM takes."""
    row_slot_R: torch.Tensor
    """Flat slot ``token * K + slot`` of each row, -1 past the last row."""
    slot_row_TK: torch.Tensor
    """Row of each slot, -1 where the slot has no expert."""


def expert_indices(
    topk_ids_TK: torch.Tensor, num_experts: int, backend: Backend = "auto"
) -> ExpertIndices:
    """Index maps of ``topk_ids_TK`` (any integer dtype, -1: no expert) over ``num_experts``."""
    return expert_indices_reference(topk_ids_TK, num_experts)


def expert_indices_reference(topk_ids_TK: torch.Tensor, num_experts: int) -> ExpertIndices:
    """:func:`expert_indices` by one stable sort."""
    ids_R = topk_ids_TK.reshape(-1)
    # "No expert" sorts behind every expert.
    keys_R = torch.where(ids_R < 0, num_experts, ids_R)
    sorted_R, slots_R = torch.sort(keys_R, stable=True)
    edges = torch.arange(num_experts + 1, device=ids_R.device, dtype=sorted_R.dtype)
    starts = torch.searchsorted(sorted_R, edges)
    slot_row_R = torch.empty_like(slots_R)
    slot_row_R[slots_R] = torch.arange(ids_R.numel(), device=ids_R.device)
    return ExpertIndices(
        counts_E=starts.diff().int(),
        offsets_E=starts[1:].int(),
        row_slot_R=torch.where(sorted_R < num_experts, slots_R, -1).int(),
        slot_row_TK=torch.where(ids_R < 0, -1, slot_row_R).int().view_as(topk_ids_TK),
    )


def permute(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices: ExpertIndices,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``x_RD`` (x's dtype) and their routing weights ``weights_R``, sorted by expert."""
    return permute_reference(x_TD, weights_TK, indices)


def permute_reference(
    x_TD: torch.Tensor, weights_TK: torch.Tensor, indices: ExpertIndices
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`permute` by indexing; unused rows are zeros."""
    used_R = indices.row_slot_R >= 0
    slot_R = indices.row_slot_R.clamp(min=0)
    # where, not a product: the gradient of an unused row may hold NaN.
    x_RD = torch.where(used_R[:, None], x_TD[slot_R // weights_TK.shape[1]], 0)
    return x_RD, torch.where(used_R, weights_TK.reshape(-1)[slot_R], 0)


def unpermute(
    y_RD: torch.Tensor, indices: ExpertIndices, backend: Backend = "auto"
) -> torch.Tensor:
    """``y_TD``: each token's rows summed in fp32 and rounded once to ``y_RD``'s dtype."""
    return unpermute_reference(y_RD, indices)


def unpermute_reference(y_RD: torch.Tensor, indices: ExpertIndices) -> torch.Tensor:
    """:func:`unpermute` by indexing."""
    used_TK = indices.slot_row_TK >= 0
    rows_TKD = y_RD[indices.slot_row_TK.clamp(min=0)]
    # where, not a product: a row that no slot uses may hold NaN.
    rows_TKD = torch.where(used_TK[..., None], rows_TKD, 0)
    wide = torch.promote_types(y_RD.dtype, torch.float32)
    return rows_TKD.sum(1, dtype=wide).to(y_RD.dtype)
