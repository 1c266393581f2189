"""Linear cross-entropy: hidden states and the vocabulary matrix to per-token losses.

    logits = h @ w^T / temperature      lse = logsumexp(logits)      loss = lse - logits[target]

Legend: T tokens, D model width, V vocabulary.
"""

from typing import NamedTuple

import torch

from moetrain.kernels.backend import Backend


class TokenLosses(NamedTuple):
    """Per-token results, fp32; zero where the target is the ignored index."""

    loss_T: torch.Tensor
    """Cross-entropy in nats, the negative log-probability of the target; differentiable."""
    lse_T: torch.Tensor
    """logsumexp of the logits, for a z-loss; differentiable."""
    entropy_T: torch.Tensor
    """Entropy of the predicted distribution in nats; differentiable."""


def linear_cross_entropy(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    backend: Backend = "auto",
) -> TokenLosses:
    """Losses of ``targets_T`` (int64) under ``softmax(h @ w^T / temperature)``."""
    return linear_cross_entropy_reference(
        h_TD, w_VD, targets_T, ignore_index=ignore_index, temperature=temperature
    )


def linear_cross_entropy_reference(
    h_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
) -> TokenLosses:
    """:func:`linear_cross_entropy` with the logits held whole, softmax in fp32."""
    wide = torch.promote_types(h_TD.dtype, torch.float32)
    logits_TV = (h_TD @ w_VD.T).to(wide) / temperature
    valid_T = targets_T != ignore_index
    target_T = torch.where(valid_T, targets_T, 0)
    lse_T = logits_TV.logsumexp(-1)
    log_probs_TV = logits_TV - lse_T[:, None]
    loss_T = -log_probs_TV.gather(1, target_T[:, None])[:, 0]
    entropy_T = -(log_probs_TV.exp() * log_probs_TV).sum(-1)
    return TokenLosses(*(torch.where(valid_T, x, 0) for x in (loss_T, lse_T, entropy_T)))
