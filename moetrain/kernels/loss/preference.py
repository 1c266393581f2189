"""Losses of pairs of answers to one prompt, by what a policy's log-probabilities are from its
reference's.

Legend: P pairs.
"""

from collections.abc import Callable
from typing import NamedTuple

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
