"""Log-probability and entropy of every target: what every loss here is made of.

    logits = h @ w^T / temperature      logprob = logits[target] - lse      entropy = lse - mean

with mean = sum(p * logits), over vocabulary chunks and vocabulary shards as
:mod:`moetrain.kernels.loss.linear_cross_entropy` and :mod:`moetrain.parallel.vocab_parallel` do it.

Left out on purpose: log-probabilities among the tokens that a top-k or top-p filter left. They need
the logits of every kept token again; where filters are on, the whole distribution's are trained.
Legend: B batch, S sequence, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from moetrain.models.layers import Vocabulary, WholeVocabulary
from moetrain.models.transformer import Transformer
from moetrain.rl.rows import RolloutBatch
from moetrain.train.engine import Engine

_WHOLE = WholeVocabulary()


class TokenStats(NamedTuple):
    """Per-token results, at least fp32, both differentiable; 0 where there is no target."""

    logprob: torch.Tensor
    """Log-probability of the target, nats."""
    entropy: torch.Tensor
    """Of the predicted distribution, nats."""


def token_stats(
    hidden_TD: torch.Tensor,
    head_VD: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocabulary: Vocabulary = _WHOLE,
) -> TokenStats:
    """Of ``targets_T`` (int64, IGNORE_INDEX: none) under ``softmax(h @ head^T / temperature)``.

    Args:
        hidden_TD: as ``Transformer.backbone`` gives it; differentiable, as ``head_VD``.
        vocabulary: ``model.vocabulary`` where ``head_VD`` is spread over tensor parallel ranks:
            collective, and the same results on all of them.
    """
    losses = vocabulary.token_losses(hidden_TD, head_VD, targets_T, temperature=temperature)
    return TokenStats(-losses.loss_T, losses.entropy_T)


def score(
    engine: Engine, batches: Sequence[RolloutBatch], temperature: float = 1.0
) -> list[TokenStats]:
    """:func:`token_stats` [B, S] of each batch under the engine's weights, on the CPU.

    Of the same batches ``Engine.forward_backward`` makes the same numbers, and where blocks are not
    compiled (a graph of a forward alone may round elsewhere) the same bits. Collective, and without
    gradients. Waits for the device once all batches are through.
    """

    def finish(hidden_BSD: torch.Tensor, _: Any, batch: RolloutBatch) -> torch.Tensor:
        return torch.stack(batch_stats(engine.model, hidden_BSD, batch, temperature))

    shapes = [(2, *batch.targets_BS.shape) for batch in batches]
    with engine.work(), torch.no_grad(), engine.exact_sizes():
        found = engine.passes.collect(batches, finish, shapes)
    return [TokenStats(*stats_2BS.cpu()) for stats_2BS in found]


def batch_stats(
    model: Transformer, hidden_BSD: torch.Tensor, batch: RolloutBatch, temperature: float
) -> TokenStats:
    """:func:`token_stats` [B, S] of the batch's targets, from what the backbone made of it."""
    stats = token_stats(
        hidden_BSD.flatten(0, 1),
        model.head_weight,
        batch.targets_BS.flatten(),
        temperature=temperature,
        vocabulary=model.vocabulary,
    )
    return TokenStats(*(x_T.view_as(batch.targets_BS) for x_T in stats))
