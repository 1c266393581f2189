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
from itertools import count

PAGE_SIZE = 64
"""Tokens, where nobody says otherwise: what the kernels on CUDA read at once."""

Key = tuple[int, tuple[int, ...]]
"""The serial number of the published page before (0: none), and a page's tokens."""


class Pages:
    """``num_pages`` pages of ``page_size`` tokens each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = deque(range(num_pages))
        self._references = [0] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Published pages without references, the longest unused first."""
        self._published: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._serial_of: dict[int, int] = {}
        """Never used twice: what followed a page that is gone can never be found again."""
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
            page = self._published.get((serial, tuple(tokens[start : start + self.page_size])))
            if page is None:
                break
            serial = self._serial_of[page]
            self._idle.pop(page, None)
            self._references[page] += 1
            pages.append(page)
        return pages

    def publish(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Let others find what ``pages``, in order, now hold: ``tokens``, as far as pages are full.

        Of two pages that hold the same, the first published is found.
        """
        serial = 0
        for page, start in zip(
            pages, range(0, len(tokens) - self.page_size + 1, self.page_size), strict=False
        ):
            key = (serial, tuple(tokens[start : start + self.page_size]))
            if key not in self._published:
                if page in self._key_of:  # published behind a page that is gone since
                    self._retract(page)
                self._published[key], self._key_of[page] = page, key
                self._serial_of[page] = next(self._serials)
            serial = self._serial_of[self._published[key]]

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference to each; the end of a sequence is forgotten before its start."""
        for page in reversed(pages):
            assert self._references[page] > 0  # it was allocated or matched
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """Let nobody find anything that pages hold now."""
        for page in list(self._key_of):
            self._retract(page)
        self._free.extend(self._idle)
        self._idle.clear()

    def _retract(self, page: int) -> None:
        del self._published[self._key_of.pop(page)], self._serial_of[page]
