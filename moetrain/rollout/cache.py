"""Keys and values in pages, and the attention that reads them there.

A :class:`PagedAttention` takes the place of an attention module's core: it stores the keys and
values of the tokens that a step reads, then lets each of them see its own sequence as far as that
was read, itself included. Rows of a step are sequences laid end to end, [1, T].

Legend: T tokens of a step, P pages, Z tokens of a page, H query heads, G key/value heads, d width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from moetrain.models.layers import Context


class Span(NamedTuple):
    """The tokens of one sequence in a step."""

    start: int
    stop: int
    """Where they lie among the T tokens."""
    num_seen: int
    """Tokens of the sequence that were read before them."""
    pages: torch.Tensor
    """int64: where its keys and values lie, in order."""


@dataclass(frozen=True)
class PagedRows:
    """What paged attention must know of a step; in place of a mask."""

    spans: tuple[Span, ...]
    slots_T: torch.Tensor
    """int64: where each token's key and value go, counted in tokens over all pages."""


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
        self.keys_PZGd.flatten(0, 1)[rows.slots_T] = k_BSGd[0]
        self.values_PZGd.flatten(0, 1)[rows.slots_T] = v_BSGd[0]
        out_THd = torch.empty_like(q_BSHd[0])
        for start, stop, num_seen, pages in rows.spans:
            length = num_seen + stop - start
            keys_LGd = self.keys_PZGd[pages].flatten(0, 1)[:length]
            values_LGd = self.values_PZGd[pages].flatten(0, 1)[:length]
            out_THd[start:stop] = self._attend(q_BSHd[0, start:stop], keys_LGd, values_LGd)
        return out_THd[None]

    def _attend(self, q_QHd: torch.Tensor, k_LGd: torch.Tensor, v_LGd: torch.Tensor):
        """The last Q of L tokens see themselves and what came before."""
        queries, length = q_QHd.shape[0], k_LGd.shape[0]
        at_L = torch.arange(length, device=q_QHd.device)
        distance_QL = at_L[length - queries :, None] - at_L
        visible_QL = distance_QL >= 0
        if self.window is not None:
            visible_QL &= distance_QL < self.window
        out_HQd = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q_QHd, k_LGd, v_LGd)),
            attn_mask=visible_QL,
            enable_gqa=True,
        )[0]
        return out_HQd.transpose(0, 1)
