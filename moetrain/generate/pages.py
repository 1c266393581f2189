"""The key/value cache: pages of memory, the sequences that hold them, attention that reads them.

A page has room for the keys and values of ``page_size`` consecutive tokens of one sequence. Full
pages are published under their tokens and the text before them, so that sequences that begin alike
share them, among others a request's ``n`` completions. A page without references keeps its content
until its room is needed; the longest unused page goes first. Keys and values depend on the weights:
after an update :meth:`Pages.forget` comes before any further use.

Batching is continuous: every step reads the last token of each sequence that is being continued,
and a chunk of each prompt. Sequences are served in the order they came, except that of one
request's completions the first reads the prompt and the others then share its pages. When pages run
short, the youngest running sequence gives its pages back and is read again later. So the oldest
always advances, and nothing waits for ever.

Legend: T tokens of a step, N sequences, P pages, Z tokens of a page, M pages of a sequence at most,
H query heads, G key/value heads, d width of a query and a key, v of a value.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch

from moetrain.config import Config, ConfigError
from moetrain.generate.drafting import Lookup
from moetrain.generate.grammars import Matcher
from moetrain.generate.request import Completion, Request, TextStream
from moetrain.kernels.attention.paged import PagedRows, attend_over_pages
from moetrain.kernels.norm.rotary import rotate_into_pages
from moetrain.models.layers import Context
from moetrain.models.transformer import Transformer

_CPU_TOKENS = 16_384
_MEMORY_SHARE = 0.85  # of what is free: steps need some of it themselves
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
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = deque(range(num_pages))
        self._references = [0] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Published pages without references, the longest unused first."""
        self._texts: dict[_Key, _Text] = {}
        self._text_of: dict[int, _Text] = {}
        self._serials = count(1)

    @classmethod
    def number_for(cls, config: Config) -> int:
        """Return the pages that settings give a rank; ConfigError: they do not hold a row."""
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
        model: Transformer, page_size: int, max_sequences: int, ranks: int = 1
    ) -> int:
        """Return the pages that fit most of the free memory, at most 1024 texts of full length."""
        weight = model.embed.weight
        if weight.device.type != "cuda":
            return -(-_CPU_TOKENS // page_size)
        free = torch.cuda.mem_get_info(weight.device)[0]
        parts = [part for layer in model.arch.layers() for part in layer]
        states = sum(part.state_bytes(weight.element_size()) for part in parts)
        numbers = sum(part.cached_numbers(ranks) for part in parts)
        room = int(_MEMORY_SHARE * free - (max_sequences + 1) * states)
        fitting = room // (max(1, numbers) * weight.element_size() * page_size)
        if fitting < 1:
            raise ValueError(f"num_pages: there is no room for one; {free} bytes are free")
        return min(int(fitting), -(-1024 * model.arch.max_positions // page_size))

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_available(self) -> int:
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


class Running:
    """Completion ``index`` of ``request``, under way; it has ``most_pages`` at most."""

    def __init__(self, request: Request, index: int, most_pages: int, stream: int) -> None:
        self.request, self.params = request, request.params
        self.completion = Completion(request.id, index)
        self.tokens = list(request.tokens)
        """Tokens of prompt and completion."""
        self.stream = stream
        """The seed of its noise."""
        self.inverse = self.params.inverse
        self.scale = self.params.scale
        self.pages: list[int] = []
        self.table = np.zeros(most_pages, np.int32)
        """Its page table, which begins with ``pages``."""
        self.slot = 0
        """Where layers that carry a state keep it; 0: it does not run."""
        self.is_mixed = False
        """Whether its pages are of several versions of the weights, and no other sequence's."""
        self.num_read = 0
        """Tokens whose keys and values lie in ``pages``."""
        self.drafts: list[int] = []
        """What its next tokens may be, if it was read to its end."""
        self.lookup = Lookup()
        self.matcher: Matcher | None = None
        """The grammar's state after the text so far (:mod:`moetrain.generate.grammars`); None: the
        request has no grammar."""
        self.text_so_far: TextStream | None = None
        """Finds stop texts as the completion grows; None: the request has none."""
        self.routes: list[torch.Tensor] = []
        """Experts of the tokens that were read, [tokens, MoE layers, K] a chunk; if asked for."""
        self.scores: list[tuple[float, dict[int, float]]] = []
        """Of each token of the prompt but the first, if asked for: its log-probability, and the
        likeliest tokens in its place."""

    @property
    def num_unread(self) -> int:
        """Number of tokens that the model has yet to read; the last one predicts the next."""
        return len(self.tokens) - self.num_read

    def chunks(self, number: int) -> list["Chunk"]:
        """Return those of a step that reads ``number`` tokens, and each draft as one."""
        known = len(self.tokens)
        drafts = range(known, known + len(self.drafts))
        return [(self, self.num_read, number), *((self, i, 1) for i in drafts)]

    def text(self, start: int, number: int) -> list[int]:
        """Return ``number`` tokens from ``start`` on, or drafts behind the tokens."""
        known = self.tokens[start : start + number]
        return known or self.drafts[start - len(self.tokens) :][:number]

    def take(self, pages: list[int]) -> None:
        """Append ``pages`` to its own."""
        self.table[len(self.pages) : len(self.pages) + len(pages)] = pages
        self.pages += pages


Chunk = tuple[Running, int, int]
"""What a step reads at once of a sequence, from which token on, and how many. In a step those of
one token come first, and a sequence's drafts behind its token."""


@dataclass(eq=False)
class Scheduler:
    """The sequences that run or wait, and their pages."""

    pages: Pages
    max_sequences: int
    """Sequences that run at once."""
    max_tokens: int
    """Tokens that one step reads."""
    shares: bool = True
    """Whether sequences that begin alike share pages. Where layers carry states they do not: the
    states at a page's end take some fifty times the memory of the page."""
    batch: int = 1
    """Places, and as large a share of the pages, that are free before any that wait begin, or as
    many as wait: steps that read prompts are slow, and fewer where many begin at once."""

    def __post_init__(self) -> None:
        self._free_slots = list(range(self.max_sequences, 0, -1))
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.figures = Counter[str]()
        """Sums over steps by metrics' names (docs/metrics.md), until somebody empties it."""

    def plan(self) -> list[tuple[Running, int]]:
        """Return the next step's sequences and the tokens it reads of each, then its drafts; they
        have pages."""
        planned: list[tuple[Running, int]] = []
        left = self.max_tokens
        for sequence in self.running:
            number = min(sequence.num_unread, left)
            # Only the youngest gives way, the list's last, which has not been planned yet.
            while number and not self._grow(sequence, number):
                if self._preempt_youngest() is sequence:
                    number = 0
            if number:
                planned.append((sequence, number))
                left -= number
        for sequence, _ in planned:  # drafts push nobody aside
            most = min(len(sequence.drafts), left)
            fit = sequence.drafts and self._grow(sequence, 1 + most)
            sequence.drafts = sequence.drafts[: most if fit else 0]
            left -= len(sequence.drafts)
        planned += self._begin_some(left)
        self.figures["generator/steps"] += bool(planned)
        self.figures["generator/mixed_steps"] += any(number > 1 for _, number in planned)
        self.figures["generator/places"] += len(planned)
        return planned

    def _begin_some(self, left: int) -> list[tuple[Running, int]]:
        """Start waiting sequences; return them and how many of ``left`` tokens each reads."""
        begun: list[tuple[Running, int]] = []
        least = min(self.batch, len(self.waiting))
        room = self.pages.num_available / self.pages.num_pages * self.max_sequences
        if self.running and min(self.max_sequences - len(self.running), room) < least:
            return []
        reading = {sequence.request.id for sequence in self.running if sequence.num_unread > 1}
        for sequence in list(self.waiting):
            if not left or len(self.running) >= self.max_sequences:
                break
            request, size = sequence.request, self.pages.page_size
            if self._shares(sequence):
                if request.id in reading and len(request.tokens) > size:
                    continue  # it waits until another completion has read the prompt
                # The last token is read in any case.
                sequence.take(self.pages.match(sequence.tokens[:-1]))
                sequence.num_read = len(sequence.pages) * size
            number = min(sequence.num_unread, left)
            if not self._grow(sequence, number):
                self._give_back(sequence)
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.slot = self._free_slots.pop()
            begun.append((sequence, number))
            left -= number
            if sequence.num_unread > 1:
                reading.add(sequence.request.id)
        return begun

    def was_read(self, sequence: Running, number: int) -> None:
        """Note that ``number`` more tokens of ``sequence`` lie in its pages."""
        before, size = sequence.num_read, self.pages.page_size
        sequence.num_read += number
        if self._shares(sequence) and before // size < sequence.num_read // size:
            self.pages.publish(sequence.pages[: sequence.num_read // size], sequence.tokens)

    def remove(self, sequence: Running) -> None:
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._give_back(sequence)

    def start_over(self, keeps: bool = False) -> None:
        """Forget all pages. Running sequences are queued before all others, to be read again.

        ``keeps``: they go on with their pages, which nobody else finds.
        """
        for sequence in self.running if keeps else ():
            sequence.is_mixed = True
        while self.running and not keeps:
            self._preempt_youngest()
        self.pages.forget()

    def _preempt_youngest(self) -> Running:
        sequence = self.running.pop()
        self.figures["generator/read_again"] += sequence.num_read
        self._give_back(sequence)
        self.waiting.appendleft(sequence)
        return sequence

    def _shares(self, sequence: Running) -> bool:
        params = sequence.params  # either of the two takes reading every token for itself
        takes_all = params.routes or params.prompt_logprobs is not None
        return self.shares and not (takes_all or sequence.is_mixed)

    def _grow(self, sequence: Running, number: int) -> bool:
        """Allocate pages for ``number`` more tokens than were read; False: there are too few."""
        size = self.pages.page_size
        missing = sequence.num_read + number - len(sequence.pages) * size
        if missing <= 0:
            return True
        new = self.pages.allocate(-(-missing // size))
        if new is None:
            return False
        sequence.take(new)
        return True

    def _give_back(self, sequence: Running) -> None:
        self.pages.release(sequence.pages)
        if sequence.slot:
            self._free_slots.append(sequence.slot)
            sequence.slot = 0
        sequence.pages, sequence.num_read, sequence.routes, sequence.scores = [], 0, [], []
        sequence.drafts, sequence.is_mixed = [], False


@dataclass(eq=False)
class PagedAttention:
    """The attention core of one layer over its pages; a step is one row of sequences, [1, T]."""

    num_pages: int
    page_size: int
    window: int | None
    keys_PZGd: torch.Tensor | None = None
    """None: no memory is allocated, which happens at the first use."""
    values_PZGv: torch.Tensor | None = None

    def free(self) -> None:
        self.keys_PZGd = self.values_PZGv = None

    def wipe(self) -> None:
        for pages in (self.keys_PZGd, self.values_PZGv):
            if pages is not None:
                pages.zero_()

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
        rows, cache = context.mask, self._cache(k_BSGd[0], v_BSGv[0])
        assert isinstance(rows, PagedRows)
        how = {"window": self.window, "scale": scale, "sinks_H": sinks_H}
        step: Any = q_BSHd[0], k_BSGd[0], v_BSGv[0], cache, rows
        return attend_over_pages(*step, **how)[None]

    def _cache(self, k_TGd: torch.Tensor, v_TGv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keys_PZGd is None or self.values_PZGv is None:
            # Zeros: past its sequence's end a page has weight 0, and 0 * inf would be NaN.
            size = self.num_pages, self.page_size
            self.keys_PZGd, self.values_PZGv = (
                x.new_zeros(*size, *x.shape[1:]) for x in (k_TGd, v_TGv)
            )
        return self.keys_PZGd, self.values_PZGv

    def rotate(self, qkv: Any, context: Any, *how: Any) -> tuple[torch.Tensor, Any]:
        """Rotate queries and keys, and store keys and values: queries, and :meth:`__call__`'s
        context. ``how`` are the norms, and whether pairs are interleaved."""
        (q, k, v), rows = (x_BSHd[0] for x_BSHd in qkv), context.mask
        where: Any = self._cache(k, v), rows.slots_T, *(x.flatten(0, 2) for x in context.rotation)
        q_THd, arrived = rotate_into_pages(q, k, v, *where, *how)
        return q_THd[None], context._replace(mask=rows._replace(arrived=arrived))
