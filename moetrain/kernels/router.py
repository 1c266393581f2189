"""Router top-k: scores to expert ids, weights, and the statistics the balancing losses need.

    p = softmax(logits)  (or sigmoid)          chosen = the K largest of p + bias
    weight = p[chosen], divided by their sum if ``normalize``

``bias`` moves the choice only, never the weights (auxiliary-loss-free balancing, arXiv 2408.15664).
All arithmetic is fp32. Equal scores go to the lower expert id.

Legend: T tokens, E experts, K experts a token.
"""

from typing import Literal, NamedTuple

import torch

from moetrain.kernels.backend import Backend


class Routed(NamedTuple):
    """One router call's decision and its sums over tokens (all that balancing needs)."""

    ids_TK: torch.Tensor
    """int32, largest weight first."""
    weights_TK: torch.Tensor
    """fp32, differentiable."""
    counts_E: torch.Tensor
    """int32: (token, slot) pairs that chose each expert."""
    prob_sum_E: torch.Tensor
    """fp32, differentiable: sum over tokens of softmax(logits)."""
    z_sum: torch.Tensor
    """fp32 scalar, differentiable: sum over tokens of logsumexp(logits)^2 (arXiv 2202.08906)."""
    entropy_sum: torch.Tensor
    """fp32 scalar, no gradient: sum over tokens of the entropy of softmax(logits), in nats."""


def router_topk(
    logits_TE: torch.Tensor,
    k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    bias_E: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> Routed:
    """Choose ``k`` experts for every token of ``logits_TE`` (fp32)."""
    return router_topk_reference(logits_TE, k, score=score, normalize=normalize, bias_E=bias_E)


def router_topk_reference(
    logits_TE: torch.Tensor,
    k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    bias_E: torch.Tensor | None = None,
) -> Routed:
    """:func:`router_topk` in plain torch."""
    log_probs_TE = logits_TE.log_softmax(-1)
    probs_TE = log_probs_TE.exp()
    scores_TE = probs_TE if score == "softmax" else logits_TE.sigmoid()
    choice_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    # A stable sort, since torch.topk leaves the order of ties open.
    ids_TK = choice_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights_TK = scores_TE.gather(1, ids_TK)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    counts_E = torch.zeros(logits_TE.shape[1], dtype=torch.int32, device=logits_TE.device)
    counts_E = counts_E.scatter_add(
        0, ids_TK.reshape(-1), torch.ones_like(ids_TK, dtype=torch.int32).reshape(-1)
    )
    return Routed(
        ids_TK=ids_TK.int(),
        weights_TK=weights_TK,
        counts_E=counts_E,
        prob_sum_E=probs_TE.sum(0),
        z_sum=logits_TE.logsumexp(-1).square().sum(),
        entropy_sum=-(probs_TE * log_probs_TE).detach().sum(),
    )
