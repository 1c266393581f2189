"""Losses of pairs of answers to one prompt, by what a policy's log-probabilities are from its
reference's.

Legend: P pairs, a row each, G segments of a pair (2, or 3 for KTO), N = P * G, T tokens, S tokens
of a row.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F


class Scores(NamedTuple):
    """Log-probabilities of answers, in nats, and what they are compared with; all [P]."""

    chosen: torch.Tensor
    """Of the policy minus those of the reference, summed over the answer's tokens."""
    rejected: torch.Tensor
    num_chosen: torch.Tensor
    """Tokens of the answer."""
    num_rejected: torch.Tensor
    kl: torch.Tensor
    """0-d, at least 0: the divergence from the reference (KTO), without gradient."""

    @classmethod
    def of_pairs(
        cls,
        ratio_T: torch.Tensor,
        targets_PS: torch.Tensor,
        cu_seqlens: torch.Tensor,
        kl: torch.Tensor | None = None,
    ) -> Self:
        """Add up ``ratio_T``, policy less reference, over the targets (0 or more) of segments.

        ``kl``: the divergence of the whole batch, as :func:`divergence` returns it; None: 0.
        """
        ratios_PG, numbers_PG = _sums_of_segments(ratio_T, targets_PS, cu_seqlens)
        counted_PG = numbers_PG.clamp(min=1)
        return cls(
            chosen=ratios_PG[:, 0],
            rejected=ratios_PG[:, 1],
            num_chosen=counted_PG[:, 0],
            num_rejected=counted_PG[:, 1],
            kl=ratios_PG.new_zeros(()) if kl is None else kl,
        )


def divergence_sums(
    ratio_T: torch.Tensor, targets_PS: torch.Tensor, cu_seqlens: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return two sums over pairs, whose quotient estimates the divergence from the reference.

    The third segment of a pair holds its prompt with another pair's chosen answer. ``ratio`` is
    the sum of these answers' log-ratios of policy and reference, ``answers`` is their number; both
    are 0-d and without gradient. :func:`divergence` takes them summed over a whole batch.
    """
    ratios_PG, numbers_PG = _sums_of_segments(ratio_T.detach(), targets_PS, cu_seqlens)
    return {"ratio": ratios_PG[:, 2].sum(), "answers": (numbers_PG[:, 2] > 0).float().sum()}


def divergence(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return KTO's estimate of the divergence, max(0, the mean log-ratio of the answers), 0-d.

    ``sums``: those of :func:`divergence_sums` over the whole batch. The paper (arXiv 2402.01306,
    section 4.1) clamps the mean over the batch; the clamped means of its parts would have a
    larger mean.
    """
    return (sums["ratio"] / sums["answers"].clamp(min=1)).clamp(min=0)


def _sums_of_segments(
    ratio_T: torch.Tensor, targets_PS: torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, [P, G] each, the sum of ``ratio_T`` over a segment's targets, and their number."""
    segments = len(cu_seqlens) - 1
    index_T = torch.arange(len(ratio_T), device=ratio_T.device)
    segment_T = torch.bucketize(index_T, cu_seqlens[1:], right=True)
    learned_T = (targets_PS.flatten() >= 0).float()
    both_T2 = torch.stack([ratio_T * learned_T, learned_T], 1)
    sums_N2 = both_T2.new_zeros(segments, 2).index_add(0, segment_T, both_T2)
    ratios_PG, numbers_PG = sums_N2.view(len(targets_PS), -1, 2).unbind(2)
    return ratios_PG, numbers_PG


def _dpo(scores: Scores, beta: float) -> torch.Tensor:
    return -F.logsigmoid(beta * (scores.chosen - scores.rejected))


def _ipo(scores: Scores, beta: float) -> torch.Tensor:
    # A mean over tokens, as its authors compute it, so that long answers do not count for more.
    chosen, rejected = scores.chosen / scores.num_chosen, scores.rejected / scores.num_rejected
    return (chosen - rejected - 1 / (2 * beta)).square()


def _kto(scores: Scores, beta: float) -> torch.Tensor:
    liked = 1 - torch.sigmoid(beta * (scores.chosen - scores.kl))
    return (liked + 1 - torch.sigmoid(beta * (scores.kl - scores.rejected))) / 2


LOSSES: dict[str, Callable[[Scores, float], torch.Tensor]] = {
    "dpo": _dpo,  # arXiv 2305.18290
    "ipo": _ipo,  # arXiv 2310.12036
    "kto": _kto,  # arXiv 2402.01306, for as many liked as disliked answers
}
"""Each pair's loss [P] of its scores and ``beta``."""
