"""What touches the vocabulary matrix: embedding tokens, logits, and losses of targets.

A :class:`Vocabulary` is the seam through which a model whose matrix is spread over devices keeps
its single-device code. :class:`WholeVocabulary` is that of one that has it whole.

Legend: B batch, S sequence, T tokens, D model width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from moetrain.kernels.backend import Backend
from moetrain.kernels.loss.linear_cross_entropy import (
    SummedLoss,
    TokenLosses,
    linear_cross_entropy,
    linear_cross_entropy_sum,
)


class Vocabulary(Protocol):
    """Functions of the vocabulary matrix ``w_VD`` (the embedding's, or the head's).

    Hidden states go in as they come out of ``Transformer.backbone``. Arguments and results are
    those of :mod:`moetrain.kernels.loss.linear_cross_entropy`.
    """

    def embed(self, tokens_BS: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        """Rows of ``w_VD``: [B, S, D], or this device's part of the B * S tokens."""
        ...

    def logits(self, h_BSD: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        """``h @ w^T`` over the whole vocabulary: [B, S, V]."""
        ...

    def token_losses(
        self,
        h_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        *,
        temperature: float = 1.0,
    ) -> TokenLosses:
        """Each token's loss (the negative log-probability of its target), lse and entropy."""
        ...

    def loss_sum(
        self,
        h_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        weights_T: torch.Tensor,
    ) -> SummedLoss:
        """The weighted sum of losses; over several devices, this one's share of it."""
        ...


@dataclass(frozen=True)
class WholeVocabulary:
    """The :class:`Vocabulary` of a device that has all of it."""

    backend: Backend = "auto"

    def embed(self, tokens_BS: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens_BS, w_VD)

    def logits(self, h_BSD: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        return F.linear(h_BSD, w_VD.to(h_BSD.dtype))

    def token_losses(
        self,
        h_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        *,
        temperature: float = 1.0,
    ) -> TokenLosses:
        w_VD = w_VD.to(h_TD.dtype)
        return linear_cross_entropy(
            h_TD, w_VD, targets_T, temperature=temperature, backend=self.backend
        )

    def loss_sum(
        self,
        h_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        weights_T: torch.Tensor,
    ) -> SummedLoss:
        w_VD = w_VD.to(h_TD.dtype)
        return linear_cross_entropy_sum(h_TD, w_VD, targets_T, weights_T, backend=self.backend)
