"""Pages of the key/value cache: who has them, and what those that nobody needs still hold.

A page has room for the keys and values of ``page_size`` consecutive tokens of one sequence. Full
pages are published under what they hold and what came before it, so that a sequence that begins
alike shares them, those of a request's ``n`` completions among them. A page that nobody refers to
any more keeps what it holds until its room is needed, the longest unused first.

Values depend on the weights: after an update of these :meth:`Pages.forget` must come before any
further use (a cache that outlives its weights answers for other ones).

This is bookkeeping alone; the tensors are :mod:`moetrain.rollout.cache`'s.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

PAGE_SIZE = 64
"""Tokens, where nobody says otherwise: what the kernels on CUDA read at once."""

Key = tuple[int, tuple[int, ...]]
"""The serial number of the text before (0: none), and a page's tokens."""


@dataclass
class _Text:
    """What one full page and those before it hold."""

    key: Key
    serial: int
    """Never used twice: what followed a text that is gone can never be found again."""
    pages: dict[int, None] = field(default_factory=dict)
    """Those that hold it, at least one. The first is found; when it goes, the next is, so that what
    a sequence has published can be found as long as the sequence has its pages."""


class Pages:
    """``num_pages`` pages of ``page_size`` tokens each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = deque(range(num_pages))
        self._references = [0] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Published pages without references, the longest unused first."""
        self._texts: dict[Key, _Text] = {}
        self._text_of: dict[int, _Text] = {}
        self._serials = count(1)

    @property
    def num_available(self) -> int:
        """Pages that :meth:`allocate` could give."""
        return len(self._free) + len(self._idle)

    def allocate(self, number: int) -> list[int] | None:
        """``number`` pages with one reference each; None: there are not so many."""
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
        """The published pages that hold the first of ``tokens``, one more reference to each."""
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

    def publish(
        self, pages: Sequence[int], tokens: Sequence[int], num_tokens: int | None = None
    ) -> None:
        """Let others find what ``pages``, in order, now hold, as far as pages are full.

        Of two pages that hold the same, the first published is found. Pages that were published
        before are not looked at again, so a sequence that grows costs what is new of it.

        Args:
            pages: of one sequence, which has a reference to each.
            tokens: what they hold, and what they will hold.
            num_tokens: which pages hold already; None: all.
        """
        size = self.page_size
        num_full = min(len(pages), (len(tokens) if num_tokens is None else num_tokens) // size)
        known = num_full
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
        """Give back one reference to each; the end of a sequence is forgotten before its start."""
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
        """Let nobody find anything that pages hold now."""
        self._texts.clear()
        self._text_of.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _retract(self, page: int) -> None:
        text = self._text_of.pop(page)
        del text.pages[page]
        if not text.pages:
            del self._texts[text.key]
