"""Losses of tokens over a vocabulary of which every rank holds a part.

    loss = lse - target logit        lse = log sum over ranks of exp(lse of a rank's part)

A rank computes three numbers a token of its part, in chunks
(:mod:`moetrain.kernels.vocabulary.chunk`), and ``join`` makes the whole vocabulary's of them.
No rank ever has a token's logits over all of it. Losses are the same on every rank; gradients of
hidden states are those that come from a rank's part, and add up over the ranks.

How ranks reach one another is the caller's: this file knows it as two functions.

Legend: T tokens, D model width, L rows of the vocabulary matrix here, C tokens of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moetrain.kernels.vocabulary.chunk import (
    CHUNK_ELEMENTS,
    ChunkStats,
    LossGrads,
    loss_gradients,
    token_stats,
)
from moetrain.kernels.vocabulary.linear_cross_entropy import (
    SummedLoss,
    TokenLosses,
    loss_gradients_reference,
    scaled,
    token_stats_reference,
)
from moetrain.runtime.backend import Backend, use_fast

_IGNORED = -100
"""The target of a token without one."""


@dataclass(frozen=True)
class VocabularyShard:
    """One rank's part of a vocabulary, and how it is joined to the others."""

    ranks: int
    first: int
    """The token of this part's first row."""
    most_rows: int
    """Rows of the largest part. A chunk joins by a collective, so every rank cuts as that must."""
    join: Callable[[ChunkStats], None]
    """Turns the stats of this part into the whole vocabulary's, in place. Collective."""
    add_up: Callable[[torch.Tensor], object]
    """Adds a tensor up over the ranks, in place. Collective."""
    backend: Backend = "auto"
    softcap: float = 0.0
    chunk_elements: int = CHUNK_ELEMENTS
    """About so many logits exist at once, the same number on every rank."""

    def token_losses(
        self,
        h_TD: torch.Tensor,
        w_LD: torch.Tensor,
        targets_T: torch.Tensor,
        temperature: float = 1.0,
    ) -> TokenLosses:
        """Give loss, lse and entropy of every token, the same on every rank."""
        given = h_TD, w_LD.to(h_TD.dtype), targets_T - self.first
        return self._of_tokens(targets_T, *_TokenLosses.apply(*given, self, 1 / temperature))

    def loss_sum(
        self,
        h_TD: torch.Tensor,
        w_LD: torch.Tensor,
        targets_T: torch.Tensor,
        weights_T: torch.Tensor,
    ) -> SummedLoss:
        """Give this rank's share of the weighted sum of losses: 1/W of it."""
        has_grad = torch.is_grad_enabled() and (h_TD.requires_grad or w_LD.requires_grad)
        if not has_grad or not use_fast(self.backend, h_TD):
            losses = self.token_losses(h_TD, w_LD, targets_T)
            total = (weights_T * losses.loss_T).sum() / self.ranks
            return SummedLoss(total, *(x.detach() for x in losses))
        # As the kernel's own: gradients are made in the forward, which saves a matrix product.
        weights_T = torch.where(targets_T != _IGNORED, weights_T, 0)
        given = h_TD, w_LD.to(h_TD.dtype), targets_T - self.first
        total, *results = _SummedLoss.apply(*given, weights_T, self)
        return SummedLoss(total, *self._of_tokens(targets_T, *results))

    def _of_tokens(
        self,
        targets_T: torch.Tensor,
        loss_T: torch.Tensor,
        lse_T: torch.Tensor,
        mean_T: torch.Tensor,
    ) -> TokenLosses:
        valid_T = targets_T != _IGNORED
        return TokenLosses(*(torch.where(valid_T, x, 0) for x in (loss_T, lse_T, lse_T - mean_T)))

    def stats(
        self,
        h_TD: torch.Tensor,
        w_LD: torch.Tensor,
        targets_T: torch.Tensor,
        scale: float,
    ) -> ChunkStats:
        """Give every token's statistics over the whole vocabulary. Collective."""
        if use_fast(self.backend, h_TD):
            how = (scale, self.chunk_elements, self.softcap)
            stats = token_stats(h_TD, w_LD, targets_T, *how)
        else:
            stats, _ = token_stats_reference(h_TD, w_LD, targets_T, scale, self.softcap)
        self.join(stats)
        return stats

    def gradients(
        self,
        h_TD: torch.Tensor,
        w_LD: torch.Tensor,
        targets_T: torch.Tensor,
        grads: LossGrads,
        scale: float,
        is_trained: bool,
    ) -> tuple[ChunkStats, torch.Tensor, torch.Tensor | None]:
        """Give :meth:`stats`, the part of h's gradient that comes from this vocabulary, and w's
        gradient (None or [0] where it is not trained)."""
        how = {"join": self.join, "is_trained": is_trained, "softcap": self.softcap}
        if use_fast(self.backend, h_TD):
            how["columns"] = self.most_rows
            chunk = self.chunk_elements
            return loss_gradients(h_TD, w_LD, targets_T, grads, scale, chunk, **how)
        return loss_gradients_reference(h_TD, w_LD, targets_T, grads, scale, **how)


class _TokenLosses(torch.autograd.Function):
    """Gives (loss, lse, mean) of every token; the backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        h_TD: torch.Tensor,
        w_LD: torch.Tensor,
        targets_T: torch.Tensor,
        shard: VocabularyShard,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(h_TD, w_LD, targets_T)
        ctx.shard, ctx.scale = shard, scale
        stats = shard.stats(h_TD, w_LD, targets_T, scale)
        return stats.lse_C - stats.target_logit_C, stats.lse_C, stats.mean_C

    @staticmethod
    def backward(ctx: Any, *d_results: torch.Tensor):
        d_results_3T = torch.stack(d_results)
        ctx.shard.add_up(d_results_3T)
        grads = LossGrads(*d_results_3T.unbind())
        is_trained = ctx.needs_input_grad[1]
        _, *found = ctx.shard.gradients(*ctx.saved_tensors, grads, ctx.scale, is_trained)
        return found[0], found[1] if is_trained else None, None, None, None


class _SummedLoss(torch.autograd.Function):
    """Gives this rank's share of the weighted sum, and (loss, lse, mean) without gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        h_TD: torch.Tensor,
        w_LD: torch.Tensor,
        targets_T: torch.Tensor,
        weights_T: torch.Tensor,
        shard: VocabularyShard,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.shard = shard
        grads = LossGrads(weights_T.float().contiguous())
        is_trained = ctx.needs_input_grad[1]
        stats, *d_inputs = shard.gradients(h_TD, w_LD, targets_T, grads, 1.0, is_trained)
        ctx.save_for_backward(*d_inputs)
        loss_T = stats.lse_C - stats.target_logit_C
        ctx.mark_non_differentiable(loss_T, stats.lse_C, stats.mean_C)
        total = (weights_T * loss_T).sum() / shard.ranks
        return total, loss_T, stats.lse_C, stats.mean_C

    @staticmethod
    def backward(ctx: Any, *d_results: torch.Tensor):
        factor = d_results[0].clone()
        ctx.shard.add_up(factor)
        factor /= ctx.shard.ranks
        d_h_TD, d_w_LD = ctx.saved_tensors
        d_w_LD = scaled(d_w_LD, factor) if ctx.needs_input_grad[1] else None
        return scaled(d_h_TD, factor), d_w_LD, None, None, None
