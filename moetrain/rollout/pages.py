"""The key/value cache: pages of memory, who holds them, and attention that reads them.

A page has room for the keys and values of ``page_size`` consecutive tokens of one sequence. Full
pages are published under their tokens and the text before them, so that sequences that begin alike
share them, among others a request's ``n`` completions. A page without references keeps its content
until its room is needed; the longest unused page goes first. Keys and values depend on the weights:
after an update :meth:`Pages.forget` comes before any further use.

Legend: T tokens of a step, N sequences, P pages, Z tokens of a page, M pages of a sequence at most,
H query heads, G key/value heads, d width.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from torch.nn import functional as F

from moetrain.kernels.attention.batch_invariant import paged_attention, store_in_pages
from moetrain.models.layers import Context

_Key = tuple[int, tuple[int, ...]]
"""The serial number of the text before (0: none), and a page's tokens."""


@dataclass
class _Text:
    """The text of one full page and of those before it."""

    key: _Key
    serial: int
    """Never used twice, so that what followed a text that is gone is never found again."""
    pages: dict[int, None] = field(default_factory=dict)
    """The pages that hold it, at least one. :meth:`Pages.match` finds the first, and the next when
    that goes, so that what a sequence has published is found as long as it has its pages."""


class Pages:
    """Who holds which of ``num_pages`` pages, and what they contain; it has no tensors."""

    SIZE = 64
    """Tokens of a page by default: what the kernels on CUDA read at once."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = deque(range(num_pages))
        self._references = [0] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Published pages without references, the longest unused first."""
        self._texts: dict[_Key, _Text] = {}
        self._text_of: dict[int, _Text] = {}
        self._serials = count(1)

    @property
    def num_tokens(self) -> int:
        """Tokens that all pages have room for."""
        return self.num_pages * self.page_size

    @property
    def num_available(self) -> int:
        """Pages that :meth:`allocate` could give."""
        return len(self._free) + len(self._idle)

    def allocate(self, number: int) -> list[int] | None:
        """Return ``number`` pages with one reference each; None: there are not so many."""
        if number > self.num_available:
            return None
        pages = []
        for _ in range(number):
            if not self._free:
                page, _ = self._idle.popitem(last=False)
                self._retract(page)
                self._free.append(page)
            page = self._free.popleft()
            self._references[page] = 1
            pages.append(page)
        return pages

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the published pages of the first ``tokens``, with one more reference to each."""
        pages, serial = [], 0
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            text = self._texts.get((serial, tuple(tokens[start : start + self.page_size])))
            if text is None:
                break
            page, serial = next(iter(text.pages)), text.serial
            self._idle.pop(page, None)
            self._references[page] += 1
            pages.append(page)
        return pages

    def publish(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Let other sequences find ``pages``, the first of a sequence that has ``tokens``.

        A page that is not full is left out. If two pages hold the same, the one that was published
        first is found. Pages that were published before are skipped, so a growing sequence costs
        only its new pages.
        """
        size = self.page_size
        num_full = known = min(len(pages), len(tokens) // size)
        while known and pages[known - 1] not in self._text_of:
            known -= 1
        serial = self._text_of[pages[known - 1]].serial if known else 0
        for i in range(known, num_full):
            key = (serial, tuple(tokens[i * size : (i + 1) * size]))
            text = self._texts.get(key)
            if text is None:
                text = self._texts[key] = _Text(key, next(self._serials))
            text.pages[pages[i]] = None
            self._text_of[pages[i]] = text
            serial = text.serial

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference to each; a sequence's end is forgotten before its start."""
        for page in reversed(pages):
            assert self._references[page] > 0  # it was allocated or matched
            self._references[page] -= 1
            if self._references[page] == 0:
                text = self._text_of.get(page)
                if text is not None and next(iter(text.pages)) == page:
                    self._idle[page] = None
                else:
                    if text is not None:  # another page holds the same, and is found
                        self._retract(page)
                    self._free.append(page)

    def forget(self) -> None:
        """Unpublish all pages."""
        self._texts.clear()
        self._text_of.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _retract(self, page: int) -> None:
        text = self._text_of.pop(page)
        del text.pages[page]
        if not text.pages:
            del self._texts[text.key]


_Cache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of all pages, [P, Z, G, d]."""


class PagedRows(NamedTuple):
    """The layout of a step for paged attention, in place of a mask."""

    slots_T: torch.Tensor
    """int32: the slot of each token's key and value, counted over all pages; -1: not stored."""
    ends_N: torch.Tensor
    """int32 [N + 1]: the sequences' ends among the T tokens, from 0."""
    seen_N: torch.Tensor
    """int32: tokens of each sequence that were read before."""
    pages_NM: torch.Tensor
    """int32: the pages of each sequence, in order."""
    num_single: int
    """Number of sequences that read a single token each; they come first."""


class PagedAttention:
    """The attention core of one layer over its pages.

    It stores the keys and values of the tokens that a step reads, then lets each of them see its
    own sequence as far as that was read, itself included. Rows of a step are sequences laid end to
    end, [1, T].
    """

    def __init__(self, num_pages: int, page_size: int, window: int | None) -> None:
        self.num_pages, self.page_size, self.window = num_pages, page_size, window
        self.keys_PZGd: torch.Tensor | None = None
        """None: no memory is allocated, which happens at the first use."""
        self.values_PZGd: torch.Tensor | None = None

    def free(self) -> None:
        """Free the memory; its content is lost."""
        self.keys_PZGd = self.values_PZGd = None

    def wipe(self) -> None:
        """Fill the pages with zeros in place."""
        for pages in (self.keys_PZGd, self.values_PZGd):
            if pages is not None:
                pages.zero_()

    def __call__(
        self, q_BSHd: torch.Tensor, k_BSGd: torch.Tensor, v_BSGd: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """Return attention's output, [1, T, H, d]."""
        rows = context.mask
        assert isinstance(rows, PagedRows)
        if self.keys_PZGd is None or self.values_PZGd is None:
            # Zeros: past its sequence's end a page has weight 0, and 0 * inf would be NaN.
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

    def _by_kernels(self, q_THd: torch.Tensor, cache: _Cache, rows: PagedRows) -> torch.Tensor:
        single, parts = rows.num_single, []
        if single:
            args = (rows.ends_N[: single + 1], rows.seen_N[:single], rows.pages_NM)
            q_LHd = q_THd[:single]
            parts.append(paged_attention(q_LHd, *cache, *args, window=self.window, one_token=True))
        if single < rows.seen_N.shape[0]:
            args = (rows.ends_N[single:] - single, rows.seen_N[single:], rows.pages_NM[single:])
            parts.append(paged_attention(q_THd[single:], *cache, *args, window=self.window))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty_like(q_THd)  # nothing to read here

    def _by_sequences(self, q_THd: torch.Tensor, cache: _Cache, rows: PagedRows) -> torch.Tensor:
        """Attend by torch, for all sequences of one size at a time."""
        out_THd, members_of = torch.empty_like(q_THd), defaultdict[tuple[int, int], list[int]](list)
        sizes = zip(rows.ends_N.diff().tolist(), rows.seen_N.tolist(), strict=True)
        for i, size in enumerate(sizes):
            members_of[size].append(i)
        for (queries, seen), members in members_of.items():
            at_NQ = rows.ends_N[members].long()[:, None] + torch.arange(queries)
            length = seen + queries
            pages_NM = rows.pages_NM[members, : -(-length // self.page_size)].long()
            past = (x[pages_NM].flatten(1, 2)[:, :length] for x in cache)
            distance_QL = torch.arange(seen, length)[:, None] - torch.arange(length)
            visible_QL = distance_QL >= 0
            if self.window is not None:
                visible_QL &= distance_QL < self.window
            out_NHQd = F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q_THd[at_NQ], *past)),
                attn_mask=visible_QL,
                enable_gqa=True,
            )
            out_THd[at_NQ] = out_NHQd.transpose(1, 2)
        return out_THd
