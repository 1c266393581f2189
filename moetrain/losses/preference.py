"""Losses of answers to prompts, from log-probabilities of the policy and of its reference.

DPO, IPO and SLiC's hinge loss compare the two answers of a pair. KTO takes single answers that
are desirable or not, and compares each with the policy's divergence from the reference. A pair
counts as one desirable and one undesirable answer. SimPO and ORPO compare the answers of a pair
without a reference: its log-probabilities count as 0.

Legend: P rows, N segments of all rows, T tokens, S tokens of a row. A pair is a row of 2 segments.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F


class Segments(NamedTuple):
    """The segments of all rows, each a prompt with an answer; all fields are [N]."""

    ratio: torch.Tensor
    """Log-probability of the answer, policy minus reference, in nats, summed over its tokens."""
    num_tokens: torch.Tensor
    """fp32: number of the answer's tokens; 0 where nothing is learned."""
    row: torch.Tensor
    """int64: the row that holds the segment."""
    label: torch.Tensor
    """int64. With KTO, 1: the answer is desirable; -1: it is undesirable; 0: it is another prompt's
    answer, which only measures the divergence, or nothing is learned. With other losses, 0."""

    @classmethod
    def of(
        cls,
        ratio_T: torch.Tensor,
        targets_PS: torch.Tensor,
        cu_seqlens: torch.Tensor,
        label_PS: torch.Tensor | None = None,
    ) -> Self:
        """Sum each segment's log-ratios over its targets.

        Args:
            ratio_T: log-probability of each token, policy minus reference, in nats.
            targets_PS: 0 or more where a token is a target.
            cu_seqlens: 0, then the end of each segment (int [N + 1]).
            label_PS: the label of each token's segment; None: segments have none.
        """
        starts_N = cu_seqlens[:-1].long()
        index_T = torch.arange(len(ratio_T), device=ratio_T.device)
        segment_T = torch.bucketize(index_T, cu_seqlens[1:], right=True)
        learned_T = (targets_PS.flatten() >= 0).float()
        both_T2 = torch.stack([ratio_T * learned_T, learned_T], 1)
        sums_N2 = both_T2.new_zeros(len(starts_N), 2).index_add(0, segment_T, both_T2)
        ratio_N, num_tokens_N = sums_N2.unbind(1)
        label_N = torch.zeros_like(starts_N)
        if label_PS is not None:
            label_N = label_PS.flatten()[starts_N] * (num_tokens_N > 0)
        return cls(ratio_N, num_tokens_N, starts_N // targets_PS.shape[1], label_N)


class Scores(NamedTuple):
    """Log-probabilities of pairs' answers, in nats; all fields are [P].

    They are the policy's minus the reference's, summed over an answer's tokens.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    num_chosen: torch.Tensor
    """Number of the chosen answer's tokens, at least 1."""
    num_rejected: torch.Tensor
    """Number of the rejected answer's tokens, at least 1."""

    @classmethod
    def of_pairs(cls, segments: Segments) -> Self:
        """Take the first segment of each row as chosen and the second as rejected."""
        chosen, rejected = segments.ratio.view(-1, 2).unbind(1)
        num_chosen, num_rejected = segments.num_tokens.view(-1, 2).clamp(min=1).unbind(1)
        return cls(chosen, rejected, num_chosen, num_rejected)

    @property
    def means(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``chosen`` and ``rejected`` per token, so that long answers do not weigh more."""
        return self.chosen / self.num_chosen, self.rejected / self.num_rejected


def reward_losses(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, margin_P: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Return each pair's loss [P] from its rewards: -log sigmoid(chosen - rejected - margin).

    It is the negative log-likelihood of the choice by Bradley and Terry's model (arXiv 2203.02155,
    eq. 1), with a margin as in Llama 2 (arXiv 2307.09288, eq. 2).
    """
    return -F.logsigmoid(chosen_P - rejected_P - margin_P)


def divergence_sums(segments: Segments) -> dict[str, torch.Tensor]:
    """Return the sums over segments from which :func:`divergence` is estimated.

    A segment with label 0 and with targets holds a prompt with another prompt's answer. ``ratio``
    is the sum of these answers' log-ratios of policy and reference, and ``answers`` is their
    number. Both are 0-d and without gradient.
    """
    is_other_N = (segments.label == 0) & (segments.num_tokens > 0)
    ratio_N = torch.where(is_other_N, segments.ratio.detach(), 0.0)
    return {"ratio": ratio_N.sum(), "answers": is_other_N.float().sum()}


def divergence(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return KTO's estimate of the divergence, max(0, the mean log-ratio of the answers), 0-d.

    ``sums`` are those of :func:`divergence_sums`, added over the whole batch. The paper (arXiv
    2402.01306, section 4.1) clamps the mean of the batch. If the means of its parts were clamped
    instead, their mean would be larger.
    """
    return (sums["ratio"] / sums["answers"].clamp(min=1)).clamp(min=0)


def _dpo(scores: Scores, beta: float, gamma: float) -> torch.Tensor:
    return -F.logsigmoid(beta * (scores.chosen - scores.rejected))


def _ipo(scores: Scores, beta: float, gamma: float) -> torch.Tensor:
    chosen, rejected = scores.means  # means over tokens, as its authors compute it
    return (chosen - rejected - 1 / (2 * beta)).square()


def _hinge(scores: Scores, beta: float, gamma: float) -> torch.Tensor:
    return F.relu(1 - beta * (scores.chosen - scores.rejected))


def _simpo(scores: Scores, beta: float, gamma: float) -> torch.Tensor:
    chosen, rejected = scores.means
    return -F.logsigmoid(beta * (chosen - rejected) - gamma)


def _orpo(scores: Scores, beta: float, gamma: float) -> torch.Tensor:
    chosen, rejected = scores.means
    # log(p / (1 - p)) of the mean log-probabilities log p < 0.
    odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    return -chosen - beta * F.logsigmoid(odds)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for x <= 0; above -1e-6, where exp rounds to 1, x counts as -1e-6."""
    x = x.clamp(max=-1e-6)
    return torch.where(x > -0.6931, (-torch.expm1(x)).log(), torch.log1p(-x.exp()))


LOSSES: dict[str, Callable[[Scores, float, float], torch.Tensor]] = {
    "dpo": _dpo,  # arXiv 2305.18290
    "ipo": _ipo,  # arXiv 2310.12036
    # arXiv 2305.10425, eq. 1, times beta, of log-ratios: beta is 1 / delta, as in trl's DPOTrainer.
    "hinge": _hinge,
    "simpo": _simpo,  # arXiv 2405.14734, eq. 6
    "orpo": _orpo,  # arXiv 2403.07691, eq. 6 and 7; beta is its lambda
}
"""Functions that return each pair's loss [P]. They take its scores, ``beta``, and the margin
``gamma``, which SimPO alone uses."""

KINDS = (*LOSSES, "kto")
"""Names of all losses of preferences."""
WITHOUT_REFERENCE = ("simpo", "orpo")
"""Losses that need no reference: their scores are the policy's alone."""


def kto_losses(
    segments: Segments,
    kl: torch.Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Return each answer's loss [N], 0 where the label is 0 (arXiv 2402.01306, eq. 7 and 8).

    It is lambda * (1 - sigmoid(beta * label * (ratio - kl))). lambda is ``desirable_weight`` or
    ``undesirable_weight``, by the label.

    Args:
        kl: 0-d, at least 0: the divergence of the whole batch, without gradient.
    """
    label_N = segments.label
    weight_N = desirable_weight * (label_N > 0) + undesirable_weight * (label_N < 0)
    return weight_N * (1 - torch.sigmoid(beta * label_N * (segments.ratio - kl)))
