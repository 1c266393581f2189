"""Log-probability and entropy of every target, never holding [T, V] where kernels are fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moetrain.engine import Engine
from moetrain.models.vocabulary import Vocabulary, WholeVocabulary
from moetrain.rl.rows import RolloutBatch

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
    """Of ``targets_T`` (int64, IGNORE_INDEX: none) under ``softmax(h @ head^T / temperature)``."""
    raise NotImplementedError


def score(
    engine: Engine, batches: Sequence[RolloutBatch], temperature: float = 1.0
) -> list[TokenStats]:
    """:func:`token_stats` [B, S] of each batch under the engine's weights, on the CPU.

    The bits are those that ``Engine.forward_backward`` makes of the same batches. Collective, and
    without gradients. Waits for the device, once.
    """
    raise NotImplementedError
