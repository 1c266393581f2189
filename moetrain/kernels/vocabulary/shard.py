"""Losses of tokens over a vocabulary that is split over ranks.

    loss = lse - target logit        lse = log sum over ranks of exp(lse of a rank's part)

A rank computes three statistics a token over its part, in chunks
(:mod:`moetrain.kernels.vocabulary.chunk`), and ``join`` turns them into those over the whole
vocabulary. No rank ever has a token's logits over all of it. Losses are the same on every rank. A
rank's gradient of the hidden states is the term that comes from its part of the vocabulary; the
caller adds these terms up over the ranks.

The caller provides the communication, too: two functions of :class:`VocabularyShard`.

Legend: T tokens, D model width, L rows of the vocabulary matrix here, C tokens of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
from moetrain.runtime.typed import OpContext

_IGNORED = -100
"""The target of a token without one."""


@dataclass(frozen=True)
class VocabularyShard:
    """One rank's part of a vocabulary, and the communication with the others."""

    ranks: int
    """Number of parts."""
    first: int
    """The token of this part's first row."""
    most_rows: int
    """Rows of the largest part. Joining a chunk is collective, so all ranks cut chunks by it."""
    join: Callable[[ChunkStats], None]
    """Turns statistics over this part into those over all parts, in place. Collective."""
    all_reduce: Callable[[torch.Tensor], object]
    """Sums a tensor over the ranks, in place. Collective."""
    backend: Backend = "auto"
    softcap: float = 0.0
    chunk_elements: int = CHUNK_ELEMENTS
    """About so many logits exist at once; the same on every rank."""

    def token_losses(
        self,
        h_TD: torch.Tensor,
        w_LD: torch.Tensor,
        targets_T: torch.Tensor,
        temperature: float = 1.0,
    ) -> TokenLosses:
        """Return loss, lse and entropy of every token, the same on every rank."""
        loss_T, lse_T, mean_T = _TokenLosses.apply(
            h_TD, w_LD.to(h_TD.dtype), targets_T - self.first, self, 1 / temperature
        )
        return _valid_losses(targets_T, loss_T, lse_T, mean_T)

    def loss_sum(
        self,
        h_TD: torch.Tensor,
        w_LD: torch.Tensor,
        targets_T: torch.Tensor,
        weights_T: torch.Tensor,
    ) -> SummedLoss:
        """Return this rank's share of the weighted sum of losses: one part in :attr:`ranks`."""
        has_grad = torch.is_grad_enabled() and (h_TD.requires_grad or w_LD.requires_grad)
        if not has_grad or not use_fast(self.backend, h_TD):
            losses = self.token_losses(h_TD, w_LD, targets_T)
            total = (weights_T * losses.loss_T).sum() / self.ranks
            return SummedLoss(total, *(x.detach() for x in losses))
        # The forward makes the gradients, which saves a matrix product.
        weights_T = torch.where(targets_T != _IGNORED, weights_T, 0)
        total, loss_T, lse_T, mean_T = _SummedLoss.apply(
            h_TD, w_LD.to(h_TD.dtype), targets_T - self.first, weights_T, self
        )
        return SummedLoss(total, *_valid_losses(targets_T, loss_T, lse_T, mean_T))

    def stats(
        self, h_TD: torch.Tensor, w_LD: torch.Tensor, targets_T: torch.Tensor, scale: float
    ) -> ChunkStats:
        """Return every token's statistics over the whole vocabulary. Collective.

        ``targets_T`` counts from :attr:`first`, here and in :meth:`gradients`.
        """
        if use_fast(self.backend, h_TD):
            stats = token_stats(h_TD, w_LD, targets_T, scale, self.chunk_elements, self.softcap)
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
        """Return :meth:`stats` and this part's gradients of h and w. Collective.

        The gradient of a w that is not trained is None or [0].
        """
        if use_fast(self.backend, h_TD):
            return loss_gradients(
                h_TD,
                w_LD,
                targets_T,
                grads,
                scale,
                self.chunk_elements,
                join=self.join,
                columns=self.most_rows,
                is_trained=is_trained,
                softcap=self.softcap,
            )
        return loss_gradients_reference(
            h_TD,
            w_LD,
            targets_T,
            grads,
            scale,
            join=self.join,
            is_trained=is_trained,
            softcap=self.softcap,
        )


def _valid_losses(
    targets_T: torch.Tensor, loss_T: torch.Tensor, lse_T: torch.Tensor, mean_T: torch.Tensor
) -> TokenLosses:
    """Return the results, zero where there is no target."""
    valid_T = targets_T != _IGNORED
    return TokenLosses(
        loss_T=torch.where(valid_T, loss_T, 0),
        lse_T=torch.where(valid_T, lse_T, 0),
        entropy_T=torch.where(valid_T, lse_T - mean_T, 0),
    )


class _TokenLosses(torch.autograd.Function):
    """Returns (loss, lse, mean) of every token; the backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: OpContext,
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
    def backward(ctx: OpContext, *d_results: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_results_3T = torch.stack(d_results)
        ctx.shard.all_reduce(d_results_3T)
        grads = LossGrads(*d_results_3T.unbind())
        is_trained = ctx.needs_input_grad[1]
        h_TD, w_LD, targets_T = ctx.saved_tensors
        _, d_h_TD, d_w_LD = ctx.shard.gradients(h_TD, w_LD, targets_T, grads, ctx.scale, is_trained)
        return d_h_TD, d_w_LD if is_trained else None, None, None, None


class _SummedLoss(torch.autograd.Function):
    """Returns this rank's share of the weighted sum, and (loss, lse, mean) without gradients."""

    @staticmethod
    def forward(
        ctx: OpContext,
        h_TD: torch.Tensor,
        w_LD: torch.Tensor,
        targets_T: torch.Tensor,
        weights_T: torch.Tensor,
        shard: VocabularyShard,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.shard = shard
        grads = LossGrads(weights_T.float().contiguous())
        is_trained = ctx.needs_input_grad[1]
        stats, d_h_TD, d_w_LD = shard.gradients(h_TD, w_LD, targets_T, grads, 1.0, is_trained)
        ctx.save_for_backward(d_h_TD, d_w_LD)
        loss_T = stats.lse_C - stats.target_logit_C
        ctx.mark_non_differentiable(loss_T, stats.lse_C, stats.mean_C)
        total = (weights_T * loss_T).sum() / shard.ranks
        return total, loss_T, stats.lse_C, stats.mean_C

    @staticmethod
    def backward(ctx: OpContext, *d_results: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_total, *_ = d_results
        factor = d_total.clone()
        ctx.shard.all_reduce(factor)
        factor /= ctx.shard.ranks
        d_h_TD, d_w_LD = ctx.saved_tensors
        d_w_LD = scaled(d_w_LD, factor) if ctx.needs_input_grad[1] else None
        return scaled(d_h_TD, factor), d_w_LD, None, None, None
