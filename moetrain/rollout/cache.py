"""Keys and values in pages, and the attention that reads them there.

A :class:`PagedAttention` takes the place of an attention module's core: it stores the keys and
values of the tokens that a step reads, then lets each of them see its own sequence as far as that
was read, itself included. Rows of a step are sequences laid end to end, [1, T].

On CUDA the kernels of :mod:`moetrain.kernels.attention.batch_invariant` do it, elsewhere torch, for
all sequences of one size at a time.

Legend: T tokens of a step, N sequences, P pages, Z tokens of a page, M pages of a sequence at most,
H query heads, G key/value heads, d width.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch.nn import functional as F

from moetrain.kernels.attention.batch_invariant import paged_attention, store_in_pages
from moetrain.models.layers import Context


class PagedRows(NamedTuple):
    """What paged attention must know of a step; in place of a mask."""

    slots_T: torch.Tensor
    """int32: where each token's key and value go, counted in tokens over all pages; -1: nowhere."""
    ends_N: torch.Tensor
    """int32 [N + 1]: the sequences' ends among the T tokens, from 0."""
    seen_N: torch.Tensor
    """int32: tokens of each sequence that were read before."""
    pages_NM: torch.Tensor
    """int32: where each sequence's keys and values lie, in order."""
    num_single: int
    """So many sequences come first, and read a single token each."""


class PagedAttention:
    """The :class:`~moetrain.models.attention.AttentionCore` of one layer over its pages."""

    def __init__(self, num_pages: int, page_size: int, window: int | None) -> None:
        self.num_pages, self.page_size, self.window = num_pages, page_size, window
        self.keys_PZGd: torch.Tensor | None = None
        """None: there is no memory for it, which comes with the first use."""
        self.values_PZGd: torch.Tensor | None = None

    def free(self) -> None:
        """Give the memory back; what it held is gone."""
        self.keys_PZGd = self.values_PZGd = None

    def wipe(self) -> None:
        """Let pages hold zeros again, where they are."""
        for pages in (self.keys_PZGd, self.values_PZGd):
            if pages is not None:
                pages.zero_()

    def __call__(
        self, q_BSHd: torch.Tensor, k_BSGd: torch.Tensor, v_BSGd: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """[1, T, H, d]."""
        rows = context.mask
        assert isinstance(rows, PagedRows)
        if self.keys_PZGd is None or self.values_PZGd is None:
            # Zeros: what a page holds past its sequence gets a weight of 0, which 0 * inf is not.
            shape = (self.num_pages, self.page_size, *k_BSGd.shape[2:])
            self.keys_PZGd, self.values_PZGd = k_BSGd.new_zeros(shape), v_BSGd.new_zeros(shape)
        cache = self.keys_PZGd, self.values_PZGd
        if q_BSHd.is_cuda:
            store_in_pages(*cache, k_BSGd[0], v_BSGd[0], rows.slots_T)
            return self._by_kernels(q_BSHd[0], cache, rows)[None]
        keep_T = rows.slots_T >= 0
        slots_T = rows.slots_T[keep_T].long()
        for pages, x_BSGd in zip(cache, (k_BSGd, v_BSGd), strict=True):
            pages.flatten(0, 1)[slots_T] = x_BSGd[0, keep_T]
        return self._by_sequences(q_BSHd[0], cache, rows)[None]

    def _by_kernels(
        self, q_THd: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], rows: PagedRows
    ) -> torch.Tensor:
        single, parts = rows.num_single, []
        if single:
            ends, seen, pages = rows.ends_N[: single + 1], rows.seen_N[:single], rows.pages_NM
            q = q_THd[:single]
            args = (ends, seen, pages)
            parts.append(paged_attention(q, *cache, *args, window=self.window, one_token=True))
        if single < rows.seen_N.shape[0]:
            ends, seen, pages = (x[single:] for x in (rows.ends_N, rows.seen_N, rows.pages_NM))
            args = (ends - single, seen, pages)
            parts.append(paged_attention(q_THd[single:], *cache, *args, window=self.window))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty_like(q_THd)  # a rank that only helps

    def _by_sequences(
        self, q_THd: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], rows: PagedRows
    ) -> torch.Tensor:
        out_THd, members_of = torch.empty_like(q_THd), defaultdict[tuple[int, int], list[int]](list)
        sizes = zip(rows.ends_N.diff().tolist(), rows.seen_N.tolist(), strict=True)
        for i, size in enumerate(sizes):
            members_of[size].append(i)
        for (queries, seen), members in members_of.items():  # a call for those of one size
            at_NQ = rows.ends_N[members].long()[:, None] + torch.arange(queries)
            length = seen + queries
            pages_NM = rows.pages_NM[members, : -(-length // self.page_size)].long()
            past = (x[pages_NM].flatten(1, 2)[:, :length] for x in cache)
            out_THd[at_NQ] = self._attend(q_THd[at_NQ], *past)
        return out_THd

    def _attend(self, q_NQHd: torch.Tensor, k_NLGd: torch.Tensor, v_NLGd: torch.Tensor):
        """The last Q of L tokens see themselves and what came before."""
        queries, length = q_NQHd.shape[1], k_NLGd.shape[1]
        at_L = torch.arange(length, device=q_NQHd.device)
        distance_QL = at_L[length - queries :, None] - at_L
        visible_QL = distance_QL >= 0
        if self.window is not None:
            visible_QL &= distance_QL < self.window
        out_NHQd = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q_NQHd, k_NLGd, v_NLGd)),
            attn_mask=visible_QL,
            enable_gqa=True,
        )
        return out_NHQd.transpose(1, 2)
