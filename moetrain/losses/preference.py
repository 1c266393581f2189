"""Losses of answers to prompts, from log-probabilities of the policy and of its reference.

DPO and IPO compare the two answers of a pair. KTO takes single answers that are desirable or not,
and compares each with the policy's divergence from the reference; a pair gives one of each. SimPO
and ORPO compare the answers of a pair without a reference, whose log-probabilities count as 0.

Legend: P rows, G segments of a pair (2), N segments of all rows, T tokens, S tokens of a row.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F


class Segments(NamedTuple):
    """Prompts with an answer each; all fields are [N]."""

    ratio: torch.Tensor
    """Log-probability of the answer, policy minus reference, in nats, summed over its tokens."""
    num_tokens: torch.Tensor
    """fp32: tokens of the answer; 0 where nothing is learned."""
    row: torch.Tensor
    """int64: the row that holds the segment."""
    label: torch.Tensor
    """int64, for KTO: 1 for a desirable answer, -1 for an undesirable one, 0 for another prompt's
    answer (it only measures the divergence), and where nothing is learned. 0 for other losses."""

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
            ratio_T: policy minus reference.
            targets_PS: 0 or more where a token is a target.
            cu_seqlens: the segments' ends, from 0.
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
    """Tokens of the chosen answer, at least 1."""
    num_rejected: torch.Tensor
    """Tokens of the rejected answer, at least 1."""

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

    It is Bradley-Terry's likelihood of the choice (arXiv 2203.02155, eq. 1), with a margin as in
    Llama 2 (arXiv 2307.09288, eq. 2).
    """
    return -F.logsigmoid(chosen_P - rejected_P - margin_P)


def divergence_sums(segments: Segments) -> dict[str, torch.Tensor]:
    """Return the sums over segments from which :func:`divergence` is estimated.

    Segments with label 0 hold a prompt with another prompt's answer. ``ratio`` is the sum of these
    answers' log-ratios of policy and reference, ``answers`` is their number; both are 0-d and
    without gradient.
    """
    is_other_N = (segments.label == 0) & (segments.num_tokens > 0)
    ratio_N = torch.where(is_other_N, segments.ratio.detach(), 0.0)
    return {"ratio": ratio_N.sum(), "answers": is_other_N.float().sum()}


def divergence(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return KTO's estimate of the divergence, max(0, the mean log-ratio of the answers), 0-d.

    ``sums``: those of :func:`divergence_sums` over the whole batch. The paper (arXiv 2402.01306,
    section 4.1) clamps the mean over the batch; the clamped means of its parts would have a
    larger mean.
    """
    return (sums["ratio"] / sums["answers"].clamp(min=1)).clamp(min=0)


def _dpo(scores: Scores, beta: float, gamma: float) -> torch.Tensor:
    return -F.logsigmoid(beta * (scores.chosen - scores.rejected))


def _ipo(scores: Scores, beta: float, gamma: float) -> torch.Tensor:
    chosen, rejected = scores.means  # as its authors compute it
    return (chosen - rejected - 1 / (2 * beta)).square()


def _simpo(scores: Scores, beta: float, gamma: float) -> torch.Tensor:
    chosen, rejected = scores.means
    return -F.logsigmoid(beta * (chosen - rejected) - gamma)


def _orpo(scores: Scores, beta: float, gamma: float) -> torch.Tensor:
    chosen, rejected = scores.means
    # log(p / (1 - p)) of the mean log-probabilities log p < 0.
    odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    return -chosen - beta * F.logsigmoid(odds)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for x at most 0; above -1e-6, where p rounds to 1, for -1e-6."""
    x = x.clamp(max=-1e-6)
    return torch.where(x > -0.6931, (-torch.expm1(x)).log(), torch.log1p(-x.exp()))


LOSSES: dict[str, Callable[[Scores, float, float], torch.Tensor]] = {
    "dpo": _dpo,  # arXiv 2305.18290
    "ipo": _ipo,  # arXiv 2310.12036
    "simpo": _simpo,  # arXiv 2405.14734, eq. 6
    "orpo": _orpo,  # arXiv 2403.07691, eq. 6 and 7; beta is its lambda
}
"""Each pair's loss [P] from its scores, ``beta`` and, for SimPO, the margin ``gamma``."""

KINDS = (*LOSSES, "kto")
"""All losses of preferences."""
WITHOUT_REFERENCE = ("simpo", "orpo")
"""Kinds whose scores are the policy's alone."""


def kto_losses(
    segments: Segments,
    kl: torch.Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Return each answer's loss [N], 0 where the label is 0 (arXiv 2402.01306, eq. 7 and 8).

    It is lambda * (1 - sigmoid(beta * label * (ratio - kl))), with lambda the weight of the label's
    kind.

    Args:
        kl: 0-d, at least 0: the divergence of the whole batch, without gradient.
    """
    label_N = segments.label
    weight_N = desirable_weight * (label_N > 0) + undesirable_weight * (label_N < 0)
    return weight_N * (1 - torch.sigmoid(beta * label_N * (segments.ratio - kl)))
