"""A router's decision: the experts of each token, their weights, and how often each is chosen.

    w_te = s_te / (max(sum over the chosen e of s_te, min_sum) + sum_eps) * scale

The score s is softmax's or sigmoid's. Without ``normalize`` it is not divided: w_te = s_te * scale.

Legend: T tokens, E experts, K experts a token, R = T * K.
"""

import math
from typing import Literal, NamedTuple

import torch


class Routed(NamedTuple):
    """The decision of one router call, and the sums over tokens that the balancing losses need."""

    ids_TK: torch.Tensor
    """int32: each token's experts, the one with the largest s + bias first. A pad has no experts:
    all its entries are -1. No other token has a -1."""
    weights_TK: torch.Tensor
    """fp32, differentiable: the routing weights; 0 for a pad."""
    counts_E: torch.Tensor
    """int32: (token, slot) pairs that chose each expert."""
    prob_sum_E: torch.Tensor
    """fp32, differentiable: the sum over tokens of softmax(logits)."""
    z_sum: torch.Tensor
    """fp32, differentiable: the sum over tokens of logsumexp(logits)^2 (arXiv 2202.08906)."""
    entropy_sum: torch.Tensor
    """fp32, no gradient: the sum over tokens of softmax's entropy in nats."""


def weighted(
    scores_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    is_pad_T: torch.Tensor | None,
    normalize: bool,
    scale: float,
    min_sum: float,
    sum_eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first three fields of :class:`Routed` for the choice ``ids_TK`` (int64)."""
    weights_TK = scores_TE.gather(1, ids_TK)
    if normalize:
        divisor_T1 = weights_TK.sum(-1, keepdim=True).clamp(min=min_sum) + sum_eps
        weights_TK = weights_TK / divisor_T1
    if is_pad_T is not None:
        ids_TK = ids_TK.masked_fill(is_pad_T[:, None], -1)
        weights_TK = weights_TK.masked_fill(is_pad_T[:, None], 0)
    ids_R = ids_TK.reshape(-1)
    counts_E = torch.zeros(scores_TE.shape[1], dtype=torch.int32, device=scores_TE.device)
    counts_E = counts_E.scatter_add(0, ids_R.clamp(min=0), (ids_R >= 0).int())
    return ids_TK.int(), weights_TK * scale, counts_E


def balanced_ids(logits_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return round-robin ``ids_TK``: the counts of two experts differ by one at most.

    The stride between the experts of one token is coprime to E, so that every expert comes up
    equally often. A token's K experts span two thirds of all experts. That spreads them over ranks
    about as natural routing does (K=8 over 8 ranks touches 5.3 on average). Neighbouring experts
    would touch fewer ranks, and make communication look cheaper than it is.
    """
    tokens, num_experts = logits_TE.shape
    stride = max(1, round(2 * num_experts / (3 * top_k)))
    while math.gcd(stride, num_experts) != 1:
        stride += 1
    slots_R = torch.arange(tokens * top_k, device=logits_TE.device)
    return (slots_R * stride % num_experts).view(-1, top_k)


def rerouted(
    routed: Routed,
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    is_pad_T: torch.Tensor | None = None,
    scale: float = 1.0,
    min_sum: float = 0.0,
    sum_eps: float = 0.0,
) -> Routed:
    """Replace the choice in ``routed`` by ``ids_TK``; the weights follow from the scores.

    Args:
        routed: the result of :func:`~moetrain.kernels.experts.router.router_topk` for
            ``logits_TE`` and the other arguments.
        ids_TK: integers; only those of pads may be negative. Pads get no expert in any case.
    """
    scores_TE = logits_TE.sigmoid() if score == "sigmoid" else logits_TE.softmax(-1)
    ids_TK = ids_TK.clamp(min=0).long()
    ids_TK, weights_TK, counts_E = weighted(
        scores_TE, ids_TK, is_pad_T, normalize, scale, min_sum, sum_eps
    )
    return routed._replace(ids_TK=ids_TK, weights_TK=weights_TK, counts_E=counts_E)
