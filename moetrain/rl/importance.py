"""Importance weights: generation's probabilities against the trainer's, known before the update."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moetrain.config_rl import RlSection
from moetrain.rl.rows import RolloutBatch


def corrected(
    batches: Sequence[RolloutBatch], proximal: Sequence[torch.Tensor], settings: RlSection
) -> list[RolloutBatch]:
    """``batches`` with the trainer's log-probabilities and the weights that ``settings`` ask for.

    A masked token (``importance_how`` mask) has weight 0 and loses its target, and so leaves every
    denominator.

    Args:
        proximal: fp32 [B, S] of each batch, as :func:`moetrain.rl.token_stats.score` gives them.
    """
    raise NotImplementedError
