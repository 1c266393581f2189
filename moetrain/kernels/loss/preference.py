"""Losses of pairs of answers to one prompt, by what a policy's log-probabilities are from its
reference's.

Legend: P pairs, a row each, G segments of a pair (2, or 3 for KTO), T tokens, S of a row.
"""

from collections.abc import Callable
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
    ) -> Self:
        """Add up ``ratio_T``, policy less reference, over the targets (0 or more) of segments.

        A third segment of each pair has the prompt with another pair's chosen answer, from which
        the divergence is estimated.
        """
        pairs = len(targets_PS)
        segments = len(cu_seqlens) - 1
        index_T = torch.arange(len(ratio_T), device=ratio_T.device)
        segment_T = torch.bucketize(index_T, cu_seqlens[1:], right=True)
        learned_T = (targets_PS.flatten() >= 0).float()
        both_T2 = torch.stack([ratio_T * learned_T, learned_T], 1)
        sums_P2 = both_T2.new_zeros(segments, 2).index_add(0, segment_T, both_T2)
        sums_PG2 = sums_P2.view(pairs, segments // pairs, 2)
        (chosen, rejected), numbers = sums_PG2[:, :2, 0].unbind(1), sums_PG2[:, :, 1]
        kl = chosen.new_zeros(())
        if numbers.shape[1] > 2:
            is_some = numbers[:, 2] > 0
            kl = sums_PG2[:, 2, 0].detach().sum() / is_some.sum().clamp(min=1)
        counted = numbers.clamp(min=1)
        return cls(chosen, rejected, counted[:, 0], counted[:, 1], kl.clamp(min=0))


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
