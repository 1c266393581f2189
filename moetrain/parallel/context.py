"""Context parallelism: ranks share the tokens of the same batch rows.

Every rank has its own part of a micro-batch's tokens. Attention needs more: it must see whole
documents, whatever their lengths. There are two ways to do that:

``ulysses`` (arXiv 2309.14509) exchanges heads. Each rank gets all tokens of a part of the heads.
After attention, a second exchange returns the results of all heads for the rank's own tokens::

    q_NHd, k_NGd, v_NGd --exchange--> [B, S, H/W, d] --attention, exchange--> y_NHd

All ranks compute equally many scores. If there are more ranks than key and value heads, each of
these heads goes to several ranks. Worked example with W=2, T=4, H=2: rank 0 has tokens 0 and 1 of
both heads; after the exchange it has all four tokens of head 0.

``all_gather`` (arXiv 2407.21783) leaves queries where they are, and gathers the keys and values of
all tokens. For latent attention it gathers the latents, and every rank expands them to keys and
values. The gradients of what was gathered are added up in fp32, in rank order. A document's last
tokens see the most keys, so consecutive parts would give the last rank the most work. Therefore all
tokens are cut into 2W pieces, and rank r has pieces r and 2W - 1 - r. This divides the scores of
one long document equally. With W=2 and T=8, rank 0 has tokens 0, 1, 6 and 7, which see 1, 2, 7 and
8 keys; rank 1 has those that see 3, 4, 5 and 6.

In both methods, layers that carry a state exchange heads as in ``ulysses``.

The batch rows are concatenated to one row [1, T, D], which is then cut, so a rank's tokens may come
from several batch rows. Tensor parallel ranks (:mod:`moetrain.parallel.tensor`) cut a part further.
A rank computes embedding, logits and losses for its own tokens only. Per-token results are
gathered, so that every rank has the results of whole rows. If every rank computes the same loss
from these results, the loss must be divided by W. FSDP shards parameters over these ranks too, and
adds up the gradients of their tokens.

Left out on purpose: ring attention, where a rank holds the keys of one other rank at a time, and
overlapping the exchanges with the matrix products around them.

Legend: W context parallel ranks, B batch, S sequence, T = B * S tokens, N = T / W, H query heads,
G key/value heads (of this tensor parallel rank), d head width, D model width, c any width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from moetrain.kernels.vocabulary.linear_cross_entropy import SummedLoss, TokenLosses
from moetrain.models.attention import Core
from moetrain.models.layers import Context, Vocabulary
from moetrain.models.transformer import Rows, Transformer
from moetrain.parallel.tensor import TokenParts


def share_tokens(model: Transformer, group: dist.ProcessGroup, method: str) -> None:
    """Let the ranks of ``group`` share the tokens of ``model``'s batch rows.

    ``method``: ulysses or all_gather (``parallel.cp_method``).
    """
    gathers = method == "all_gather"
    parts = _Parts(group, 2 if gathers else 1)
    model.vocabulary = _Vocabulary(model.vocabulary, parts)
    model.cut_rows, model.cuts_queries = parts.cut, gathers
    for module in model.modules():
        others: dict[str, Any] = {"over_heads": parts.over_heads, "gather_latents": parts.gather}
        if (core := getattr(module, "core", None)) is not None:
            others["core"] = _Gathered(core, parts) if gathers else _Ulysses(core, parts)
        for name, other in others.items():
            if hasattr(module, name) and (name != "gather_latents" or gathers):
                setattr(module, name, other)


class _Parts(TokenParts):
    """Exchanges tokens among context parallel ranks.

    Rank r has piece r of W, or pieces r and 2W - 1 - r of 2W.
    """

    def __init__(self, group: dist.ProcessGroup, pieces: int) -> None:
        """``pieces``: the number of pieces that a rank has, 1 or 2."""
        super().__init__(group)
        self.pieces = pieces

    def in_order(self, x_WNc: torch.Tensor) -> torch.Tensor:
        """Return [T, c], all tokens in order, from those of each rank."""
        if self.pieces == 2:
            first_Wnc, second_Wnc = x_WNc.chunk(2, 1)
            x_WNc = torch.cat((first_Wnc, second_Wnc.flip(0)))
        return x_WNc.flatten(0, 1)

    def by_rank(self, x_Tc: torch.Tensor) -> torch.Tensor:
        """Return [W, N, c], the tokens of each rank, from all in order."""
        x_Pnc = x_Tc.unflatten(0, (self.pieces * self.ranks, -1))
        if self.pieces == 1:
            return x_Pnc
        first_Wnc, second_Wnc = x_Pnc.chunk(2)
        return torch.cat((first_Wnc, second_Wnc.flip(0)), 1)

    def starts(self, tokens: int) -> list[int]:
        """Return the index of the first token of each of this rank's pieces.

        ``tokens``: the number of tokens of all ranks.
        """
        count = self.pieces * self.ranks
        return [i * tokens // count for i in (self.rank, count - 1 - self.rank)[: self.pieces]]

    def part(self, x_T: torch.Tensor) -> torch.Tensor:
        n = len(x_T) // self.ranks // self.pieces
        found = [x_T[start : start + n] for start in self.starts(len(x_T))]
        return found[0] if len(found) == 1 else torch.cat(found)

    def gather(self, x_ND: torch.Tensor) -> torch.Tensor:
        return self.in_order(super().gather(x_ND)[0].unflatten(0, (self.ranks, -1)))[None]

    def cut(self, rows: Rows) -> Rows:
        """Return the description of this rank's tokens that blocks need.

        Its masks are still those of whole rows. With all_gather, it also has a mask for each piece
        of this rank's queries.
        """
        shape = rows.batch, rows.seq_len
        tokens = rows.batch * rows.seq_len // self.ranks
        contexts = {kind: self._own(one, shape, kind.window) for kind, one in rows.contexts.items()}
        routes = None if rows.routes_BSLK is None else self.part_of_rows(rows.routes_BSLK)
        return Rows(1, tokens, contexts, routes, self.part_of_rows)

    def _own(self, context: Context, shape: tuple[int, int], window: int | None) -> Context:
        cos, sin = (self.part_of_rows(x.expand(shape[0], *x.shape[1:])) for x in context.rotation)
        is_pad = None if context.is_pad_BS is None else self.part_of_rows(context.is_pad_BS)
        seen_BS2 = context.seen_BS2
        if seen_BS2 is not None:  # indices among all tokens, from here on
            begins_B = torch.arange(shape[0], device=seen_BS2.device) * shape[1]
            seen_BS2 = self.part_of_rows(seen_BS2 + begins_B[:, None, None])
        masks, tokens = (), shape[0] * shape[1]
        if (pieces := self.pieces) > 1:
            n = tokens // (pieces * self.ranks)
            # A window that is no longer than a piece needs only the keys of that piece and of the
            # one before it. The backend "exact" still gets all keys, because its bits depend on
            # where a document's keys begin.
            is_near = window is not None and window <= n and context.mask.backend != "exact"
            before = max(1, window - 1) if is_near and window else None
            starts = self.starts(tokens)
            masks = tuple(context.mask.part(i, i + n, shape, before) for i in starts)
        query_scale = context.query_scale
        if query_scale is not None:
            query_scale = self.part_of_rows(query_scale.expand(shape[0], *query_scale.shape[1:]))
        return context._replace(
            rotation=(cos, sin),
            is_pad_BS=is_pad,
            query_scale=query_scale,
            whole=shape,
            parts=masks,
            seen_BS2=seen_BS2,
        )

    def part_of_rows(self, x_BS: torch.Tensor) -> torch.Tensor:
        return self.part(x_BS.flatten(0, 1))[None]

    def spread(self, given_Nc: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Send the heads of each input to their ranks, in one message.

        Returns a tensor [T, c] for each input: all tokens, of this rank's part of the heads.
        """
        parts = [x.unflatten(1, (self.ranks, -1)) for x in given_Nc]
        leaving_WNc = torch.cat(parts, 2).transpose(0, 1)
        arrived_Tc = self.in_order(self.swap(leaving_WNc))
        return arrived_Tc.split([x.shape[2] for x in parts], 1)

    def collected(self, y_Tc: torch.Tensor) -> torch.Tensor:
        """Return [N, W * c], this rank's tokens of all heads, from all tokens of its heads."""
        return self.swap(self.by_rank(y_Tc)).transpose(0, 1).flatten(1)

    def over_heads(
        self,
        mixed: Callable[..., torch.Tensor],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        context: Context,
        *,
        whole_values: Sequence[torch.Tensor] = (),
        whole_weights: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Call ``mixed`` with all tokens and the weights of this rank's part of the heads.

        What all heads share goes to every rank, and its gradients are added up.
        """
        own = [w.unflatten(0, (self.ranks, -1))[self.rank] for w in weights]
        copies = [x.repeat(1, self.ranks) for x in whole_values]
        arrived = self.spread([*inputs, *copies])
        return self.collected(mixed(arrived, [*own, *whole_weights], context))


class _Ulysses:
    """Attention ``core`` over all tokens of this rank's part of the heads."""

    def __init__(self, core: Core, parts: _Parts) -> None:
        self.core, self.parts = core, parts

    def __call__(
        self,
        q_BSHd: torch.Tensor,
        k_BSGd: torch.Tensor,
        v_BSGv: torch.Tensor,
        context: Context,
        scale: float | None = None,
        *,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert context.whole is not None  # cut() has set it
        ranks, rank = self.parts.ranks, self.parts.rank
        # Ranks that outnumber key and value heads have copies of them.
        copies = max(1, ranks // k_BSGd.shape[2])
        heads = [q_BSHd, *(x.repeat_interleave(copies, 2) for x in (k_BSGd, v_BSGv))]
        spread = self.parts.spread([x[0].flatten(1) for x in heads])
        q, k, v = (
            part.reshape(*context.whole, -1, x.shape[3])
            for part, x in zip(spread, heads, strict=True)
        )
        if sinks_H is not None:
            sinks_H = sinks_H.view(ranks, -1)[rank]
        y_Tc = self.core(q, k, v, context, scale, sinks_H=sinks_H).flatten(2).flatten(0, 1)
        return self.parts.collected(y_Tc).unflatten(1, (-1, v.shape[3]))[None]


class _Gathered:
    """Attention ``core`` of this rank's queries, piece by piece, over the keys of all tokens."""

    def __init__(self, core: Core, parts: _Parts) -> None:
        self.core, self.parts = core, parts

    def __call__(
        self,
        q_BSHd: torch.Tensor,
        k_BSGd: torch.Tensor,
        v_BSGv: torch.Tensor,
        context: Context,
        scale: float | None = None,
        *,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        before, keys = context.parts[0].before, (k_BSGd, v_BSGv)
        if k_BSGd.shape[1] == q_BSHd.shape[1]:  # else they come from all tokens' latents
            own = torch.cat([x.flatten(2) for x in keys], 2)
            arrived = self.parts.gather(own) if before is None else self._near(own, before)
            widths = [x.shape[2] * x.shape[3] for x in keys]
            both = zip(arrived.split(widths, 2), keys, strict=True)
            keys = tuple(y.contiguous().unflatten(2, x.shape[2:]) for y, x in both)
        else:
            assert before is None  # latent attention has no windows
        count = len(context.parts)
        own_keys = [keys] * count
        if before is not None:
            own_keys = zip(*(x.chunk(count, 1) for x in keys), strict=True)
        pieces = zip(q_BSHd.chunk(count, 1), own_keys, context.parts, strict=True)
        found = [
            self.core(queries, k, v, context._replace(mask=mask), scale, sinks_H=sinks_H)
            for queries, (k, v), mask in pieces
        ]
        return torch.cat(found, 1)

    def _near(self, own_1Nc: torch.Tensor, before: int) -> torch.Tensor:
        """Prepend to each of this rank's pieces the ``before`` tokens that precede it."""
        pieces = own_1Nc.chunk(self.parts.pieces, 1)
        ends = self.parts.gather(torch.cat([x[:, -before:] for x in pieces], 1))
        ends = F.pad(ends, (0, 0, before, 0)).unflatten(1, (-1, before))
        found = []
        for start, piece in zip(self.parts.starts(len(ends[0]) - 1), pieces, strict=True):
            found += [ends[:, start], piece]
        return torch.cat(found, 1)


class _Vocabulary(Vocabulary):
    """Applies the vocabulary ``inner`` to this rank's tokens.

    Hidden states, as arguments and as results, are those of this rank's tokens. Token ids, targets
    and weights are those of all tokens, and so are logits, losses and scores that are returned.
    """

    def __init__(self, inner: Vocabulary, parts: _Parts) -> None:
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

    def scores(
        self, h_TD: torch.Tensor, w_LD: torch.Tensor, places_N: torch.Tensor
    ) -> torch.Tensor:
        own, count = h_TD.shape[0], h_TD.shape[0] * self.parts.ranks
        index_T = torch.arange(count, device=h_TD.device)
        local_T = torch.full_like(index_T, -1)
        local_T[self.parts.part(index_T)] = index_T[:own]
        local_N = local_T[places_N]
        mine_NL = self.inner.scores(h_TD, w_LD, local_N.clamp(min=0))
        return self.parts.sum(torch.where(local_N[:, None] >= 0, mine_NL, 0))

    def token_losses(
        self,
        h_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        *,
        temperature: float = 1.0,
    ) -> TokenLosses:
        own_N = self.parts.part(targets_T)
        found = self.inner.token_losses(h_TD, w_VD, own_N, temperature=temperature)
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
        """Gather several results of each token, in one message."""
        return list(self.parts.gather(torch.stack([*results], 1))[0].unbind(1))
