"""Importance weights: the trainer's probabilities over generation's, fixed before the update.

    token      w_t = exp(d_t)              d = log of trainer's / generation's probability
    sequence   w_t = exp(sum of d over the sample)

Where generation has not the trainer's bits, samples come from another policy than the one that is
trained, and w corrects for it: truncated at ``importance_high`` (truncated importance sampling,
Espeholt et al., arXiv 1802.01561; for this use Yao et al., "Your efficient RL framework secretly
brings you off-policy RL training", 2025), or w where it lies in [``importance_low``,
``importance_high``] and nothing elsewhere (IcePop, arXiv 2510.18855; of sequences: Liu et al.,
"When speed kills stability", 2025). Over a sequence the weight is unbiased, and varies far more.

They are data of a batch rather than part of the loss, since what is masked must be known before any
micro-batch runs: it is part of no denominator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moetrain.config.rl import RlSection
from moetrain.data.packing import IGNORE_INDEX
from moetrain.rl.rows import RolloutBatch

LOG_RATIO_LIMIT = 20.0
"""Nats to which the logarithm of a ratio is clamped, once, where it is made. A ratio of exp(20) =
4.9e8 has a finite square in fp32, and so has the sum of any batch of them; one step past
log(3.4e38) = 88.7 a single token makes the loss infinite. Beyond the limit the gradient is 0."""


def log_ratio(logprob: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Clamped ``logprob - other``; the only thing that is ever put into an exponential."""
    return clamped(logprob - other)


def clamped(log_ratios: torch.Tensor) -> torch.Tensor:
    """Within :data:`LOG_RATIO_LIMIT`."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def corrected(
    batches: Sequence[RolloutBatch], proximal: Sequence[torch.Tensor], settings: RlSection
) -> list[RolloutBatch]:
    """``batches`` with the trainer's log-probabilities and the weights that ``settings`` ask for.

    A masked token (``importance_how`` mask) has weight 0 and loses its target, and so leaves every
    denominator.

    Args:
        proximal: [B, S] of each batch, as :func:`moetrain.rl.token_stats.score` gives them.
    """
    return [_corrected(*pair, settings) for pair in zip(batches, proximal, strict=True)]


def _corrected(batch: RolloutBatch, proximal_BS: torch.Tensor, settings: RlSection) -> RolloutBatch:
    batch = batch._replace(proximal_BS=proximal_BS)
    if settings.importance_of == "none":
        return batch
    has_target_BS = batch.targets_BS != IGNORE_INDEX
    log_weights_BS = torch.where(has_target_BS, proximal_BS - batch.logprobs_BS, 0)
    if settings.importance_of == "sequence":
        log_weights_BS = batch.sums_over_samples(log_weights_BS)
    weights_BS = clamped(log_weights_BS).exp()
    low, high = settings.importance_low, settings.importance_high
    if settings.importance_how == "truncate":
        return batch._replace(weights_BS=weights_BS.clamp(max=high))
    is_kept_BS = (weights_BS >= low) & (weights_BS <= high)
    return batch._replace(
        weights_BS=torch.where(is_kept_BS, weights_BS, 0),
        targets_BS=torch.where(is_kept_BS, batch.targets_BS, IGNORE_INDEX),
    )
