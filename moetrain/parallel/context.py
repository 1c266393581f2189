"""Context parallelism: ranks share the tokens of the same rows, put on from outside.

Every rank has its own part of a micro-batch's tokens everywhere but in attention. There heads
travel (Ulysses, arXiv 2309.14509): each rank gets all tokens of a part of the heads, and its tokens
of every head come back::

    q_NHd, k_NGd, v_NGd --exchange--> [B, S, H/W, d] --attention, exchange--> y_NHd

Attention thus sees whole documents, whatever their lengths, and every rank has as many scores to
compute as the others. Tokens are cut as one row [1, T, D] (:mod:`moetrain.parallel.tensor`, whose
ranks cut a part further); they need not lie in the same row. Where ranks outnumber key and value
heads, each of these goes to several. Worked example with W=2, T=4, H=2: rank 0 has tokens 0 and 1
of both heads; after the exchange, all four tokens of head 0.

Embedding, logits and losses are those of a rank's own tokens. Per-token results are gathered, so
that every rank has those of whole rows; a loss that each makes of them alike is to be divided by W.
FSDP shards parameters over these ranks too, and adds up the gradients of their tokens.

Left out on purpose: rings of keys and values, which more ranks than heads would need, and hiding
the exchanges behind the products next to them.

Legend: W context parallel ranks, B batch, S sequence, T = B * S tokens, N = T / W, H query heads,
G key/value heads (of this tensor parallel rank), d head width, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from moetrain.kernels.loss.linear_cross_entropy import SummedLoss, TokenLosses
from moetrain.models.attention import Core
from moetrain.models.layers import Context, Vocabulary
from moetrain.models.transformer import Rows, Transformer
from moetrain.parallel.tensor import TokenParts

_all_to_all: Any = functional.all_to_all_single


def share_tokens(model: Transformer, group: dist.ProcessGroup) -> None:
    """Let the ranks of ``group`` share the tokens of ``model``'s rows."""
    parts = TokenParts(group)
    model.vocabulary = _Vocabulary(model.vocabulary, parts)
    model.cut_rows = _Cut(parts)
    for module in model.modules():
        if (core := getattr(module, "core", None)) is not None:
            setattr(module, "core", _Ulysses(core, group))  # noqa: B010 - of several classes


class _Cut:
    """Cuts what blocks need to know of each token; masks stay those of whole rows."""

    def __init__(self, parts: TokenParts) -> None:
        self.parts = parts

    def __call__(self, rows: Rows) -> Rows:
        shape = rows.batch, rows.seq_len
        tokens = rows.batch * rows.seq_len // self.parts.ranks
        contexts = {window: self._own(one, shape) for window, one in rows.contexts.items()}
        routes = None if rows.routes_BSLK is None else self._part(rows.routes_BSLK)
        return Rows(1, tokens, contexts, routes)

    def _own(self, context: Context, shape: tuple[int, int]) -> Context:
        cos, sin = (self._part(x.expand(shape[0], *x.shape[1:])) for x in context.rotation)
        is_pad = None if context.is_pad_BS is None else self._part(context.is_pad_BS)
        return context._replace(rotation=(cos, sin), is_pad_BS=is_pad, whole=shape)

    def _part(self, x_BS: torch.Tensor) -> torch.Tensor:
        return self.parts.part(x_BS.flatten(0, 1))[None]


class _Ulysses:
    """Attention ``core`` over all tokens of this rank's part of the heads."""

    def __init__(self, core: Core, group: dist.ProcessGroup) -> None:
        self.core, self.ranks, self.rank = core, group.size(), group.rank()
        self.group = group.group_name

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        context: Context,
        scale: float | None = None,
        *,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert context.whole is not None  # rows were cut
        ranks, copies = self.ranks, max(1, self.ranks // k.shape[2])
        heads = [q, *(x.repeat_interleave(copies, 2) for x in (k, v))]
        widths = [x.shape[2] // ranks * x.shape[3] for x in heads]
        # One message for all three: for each rank, its heads of every token here.
        leaving_NWc = torch.cat(
            [x[0].reshape(-1, ranks, x.shape[2] // ranks * x.shape[3]) for x in heads], 2
        )
        arrived_Tc = self._exchanged(leaving_NWc.transpose(0, 1)).flatten(0, 1)
        parts = arrived_Tc.split(widths, 1)
        q, k, v = (
            part.reshape(*context.whole, -1, x.shape[3])
            for part, x in zip(parts, heads, strict=True)
        )
        how = {} if sinks_H is None else {"sinks_H": sinks_H.view(ranks, -1)[self.rank]}
        y_Tc = self.core(q, k, v, context, scale, **how).flatten(2).flatten(0, 1)
        arrived_WNc = self._exchanged(y_Tc.unflatten(0, (ranks, -1)))
        return arrived_WNc.transpose(0, 1).reshape(1, arrived_WNc.shape[1], -1, v.shape[3])

    def _exchanged(self, x_WNc: torch.Tensor) -> torch.Tensor:
        """Send ``x[r]`` to rank r; give what each rank sent here, by rank."""
        return _HeadExchange.apply(x_WNc.contiguous(), self.group)


class _HeadExchange(torch.autograd.Function):
    """An exchange in equal parts, which is its own backward."""

    @staticmethod
    def forward(ctx: Any, x_WNc: torch.Tensor, group: str):
        ctx.group = group
        return functional.wait_tensor(_all_to_all(x_WNc, None, None, group))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        return _HeadExchange.apply(gradients[0].contiguous(), ctx.group), None


class _Vocabulary(Vocabulary):
    """``inner`` for this rank's tokens; arguments and per-token results are those of all."""

    def __init__(self, inner: Vocabulary, parts: TokenParts) -> None:
        super().__init__(inner.backend)
        self.inner, self.parts = inner, parts

    def embed(self, tokens_BS: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        return self.inner.embed(self.parts.part(tokens_BS.flatten())[None], w_VD)

    def logits(self, h_BSD: torch.Tensor, w_VD: torch.Tensor) -> torch.Tensor:
        return self.parts.gather(self.inner.logits(h_BSD, w_VD))

    def logits_of(
        self, h_TD: torch.Tensor, w_VD: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        own = tokens if tokens.ndim == 1 else self.parts.part(tokens)
        return self.parts.gather(self.inner.logits_of(h_TD, w_VD, own))[0]

    def token_losses(
        self,
        h_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        *,
        temperature: float = 1.0,
    ) -> TokenLosses:
        own = self.parts.part(targets_T)
        found = self.inner.token_losses(h_TD, w_VD, own, temperature=temperature)
        return TokenLosses(*self._gathered(found))

    def loss_sum(
        self,
        h_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        weights_T: torch.Tensor,
    ) -> SummedLoss:
        own = self.parts.part(targets_T), self.parts.part(weights_T)
        total, *tokens = self.inner.loss_sum(h_TD, w_VD, *own)
        return SummedLoss(total, *self._gathered(tokens))

    def _gathered(self, results: Any) -> list[torch.Tensor]:
        """Gather results of each token, in one message."""
        return list(self.parts.gather(torch.stack([*results], 1))[0].unbind(1))
