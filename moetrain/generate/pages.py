"""The bookkeeping of the key/value cache: pages of memory, and the texts that they hold.

A page holds the keys and values of ``page_size`` consecutive tokens of one sequence. A full page is
cached under its tokens and the tokens before them, so that sequences with the same beginning share
it, for example the ``n`` completions of one request. A page that no sequence uses keeps its content
until its memory is needed; the least recently used page is evicted first. Keys and values depend on
the weights, so :meth:`Pages.clear_cache` must follow every update of them. There are no tensors
here: layers have the memory of the pages (:mod:`moetrain.generate.paged_attention`).
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from moetrain.config import Config, ConfigError
from moetrain.models.transformer import Transformer

_CPU_TOKENS = 16_384
_MEMORY_SHARE = 0.85  # share of the free memory; the steps need the rest
_Key = tuple[int, tuple[int, ...]]
"""The serial number of the prefix before a page (0: none), and the page's tokens."""


@dataclass
class _Prefix:
    """The text that ends with one full page: the page's tokens and all tokens before them."""

    key: _Key
    serial: int
    """A number that no other prefix ever gets. The keys of the pages after it contain the number,
    so pages after an evicted prefix are never found again."""
    pages: dict[int, None] = field(default_factory=dict)
    """The pages that hold it, at least one, in the order in which they were cached.
    :meth:`Pages.match` finds the first page. Once this page is evicted, it finds the next one. So
    the pages that a sequence has cached are found as long as the sequence holds them."""


class Pages:
    """The bookkeeping of ``num_pages`` pages: reference counts and cached content."""

    SIZE = 64
    """Default number of tokens in a page. The CUDA kernels read as many tokens at once."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = deque(range(num_pages))
        """Pages without references and without cached content."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Pages without references whose content is cached, least recently used first."""
        self._ref_counts = [0] * num_pages
        """Number of sequences that use each page."""
        self._prefixes: dict[_Key, _Prefix] = {}
        self._prefix_of: dict[int, _Prefix] = {}
        """The prefix that ends with each cached page, whether or not the page has references."""
        self._serials = count(1)

    @classmethod
    def number_for(cls, config: Config) -> int:
        """Return the number of pages on a rank. Raises ConfigError: they cannot hold a row."""
        rl, longest = config.rl, config.data.seq_len
        if rl.cache_tokens is None:
            return rl.max_sequences * -(-longest // cls.SIZE)
        number = rl.cache_tokens // cls.SIZE
        if number * cls.SIZE < longest:
            row = f"a row of data.seq_len {longest}"
            problem = f"{rl.cache_tokens}, in pages of {cls.SIZE}, do not hold {row}; raise it"
            raise ConfigError("rl.cache_tokens", problem)
        return number

    @staticmethod
    def number_that_fits(
        model: Transformer,
        page_size: int,
        max_sequences: int,
        ranks: int = 1,
        *,
        keeps_latents: bool = False,
    ) -> int:
        """Return the number of pages that fill most of the free memory of the model's GPU.

        The pages hold at most 1024 sequences of full length, even if more memory is free. On a CPU
        they hold :data:`_CPU_TOKENS` tokens.

        ``keeps_latents``: layers with latents cache these, in place of keys and values.

        Raises ValueError: there is no room for one page.
        """
        weight = model.embed.weight
        if weight.device.type != "cuda":
            return -(-_CPU_TOKENS // page_size)
        free = torch.cuda.mem_get_info(weight.device)[0]
        parts = [part for layer in model.arch.layers() for part in layer]
        states = sum(part.state_bytes(weight.element_size()) for part in parts)
        numbers = model.arch.cached_elements(ranks, latent=keeps_latents)
        room = int(_MEMORY_SHARE * free - (max_sequences + 1) * states)
        fitting = room // (max(1, numbers) * weight.element_size() * page_size)
        if fitting < 1:
            raise ValueError(f"num_pages: not one page fits in the {free} bytes of free memory")
        return min(int(fitting), -(-1024 * model.arch.max_positions // page_size))

    @property
    def num_tokens(self) -> int:
        """Number of tokens that all pages hold together."""
        return self.num_pages * self.page_size

    @property
    def num_available(self) -> int:
        """Number of pages without references, which :meth:`allocate` can return."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of pages whose content :meth:`match` can find, with or without references."""
        return len(self._prefix_of)

    def allocate(self, number: int) -> list[int] | None:
        """Return ``number`` pages with one reference each, or None if there are not enough."""
        if number > self.num_available:
            return None
        pages = []
        for _ in range(number):
            if not self._free:
                page, _ = self._cached.popitem(last=False)
                self._uncache(page)
                self._free.append(page)
            page = self._free.popleft()
            self._ref_counts[page] = 1
            pages.append(page)
        return pages

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the cached pages of the longest prefix of ``tokens``; add a reference to each."""
        pages, serial = [], 0
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            prefix = self._prefixes.get((serial, tuple(tokens[start : start + self.page_size])))
            if prefix is None:
                break
            page, serial = next(iter(prefix.pages)), prefix.serial
            self._cached.pop(page, None)
            self._ref_counts[page] += 1
            pages.append(page)
        return pages

    def cache(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Let other sequences find ``pages``, the first pages of a sequence with ``tokens``.

        A page that is not full is left out. If two pages hold the same prefix, :meth:`match` finds
        the one that was cached first. Pages that are cached already are skipped, so a growing
        sequence costs only its new pages.
        """
        size = self.page_size
        num_full = num_known = min(len(pages), len(tokens) // size)
        while num_known and pages[num_known - 1] not in self._prefix_of:
            num_known -= 1
        serial = self._prefix_of[pages[num_known - 1]].serial if num_known else 0
        for i in range(num_known, num_full):
            key = (serial, tuple(tokens[i * size : (i + 1) * size]))
            prefix = self._prefixes.get(key)
            if prefix is None:
                prefix = self._prefixes[key] = _Prefix(key, next(self._serials))
            prefix.pages[pages[i]] = None
            self._prefix_of[pages[i]] = prefix
            serial = prefix.serial

    def release(self, pages: Sequence[int]) -> None:
        """Remove one reference from each page. A sequence's last page is evicted before its first.

        A page without references stays cached if :meth:`match` can find it. If another page holds
        the same prefix and is found instead, the content is dropped.
        """
        for page in reversed(pages):
            assert self._ref_counts[page] > 0  # it was allocated or matched
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                prefix = self._prefix_of.get(page)
                if prefix is not None and next(iter(prefix.pages)) == page:
                    self._cached[page] = None
                else:
                    if prefix is not None:
                        self._uncache(page)
                    self._free.append(page)

    def clear_cache(self) -> None:
        """Forget the content of all pages. References stay."""
        self._prefixes.clear()
        self._prefix_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _uncache(self, page: int) -> None:
        prefix = self._prefix_of.pop(page)
        del prefix.pages[page]
        if not prefix.pages:
            del self._prefixes[prefix.key]
