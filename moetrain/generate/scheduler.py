"""The scheduler decides which sequences a step reads, how many tokens of each, and in which pages.

Batching is continuous. Every step reads the last token of each sequence that is being continued,
and a chunk of each prompt. Sequences are served in the order in which they came, with one
exception: the first completion of a request reads the prompt, and the request's other completions
then share its pages. When pages run short, the newest running sequence is preempted: it gives its
pages back and is read again later. So the oldest sequence always advances, and none waits forever.

Legend: K experts of a token.
"""

from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from moetrain.generate.drafting import Lookup
from moetrain.generate.grammars import Matcher
from moetrain.generate.pages import Pages
from moetrain.generate.request import Completion, Request, TextStream


class Running:
    """A sequence that runs or waits: completion number ``index`` of ``request``."""

    def __init__(self, request: Request, index: int, max_pages: int, stream: int) -> None:
        self.request, self.params = request, request.params
        self.completion = Completion(request.id, index)
        self.tokens = list(request.tokens)
        """Tokens of the prompt and the completion."""
        self.stream = stream
        """Seed of the sequence's random numbers, an int32."""
        self.inverse_temperature = self.params.inverse_temperature
        self.logprob_scale = self.params.logprob_scale
        self.pages: list[int] = []
        self.page_table = np.zeros(max_pages, np.int32)
        """``pages``, followed by zeros."""
        self.state_slot = 0
        """The slot for the states of layers that carry one; 0: the sequence does not run."""
        self.has_mixed_versions = False
        """True: the sequence's keys and values come from several versions of the weights, so no
        other sequence may share its pages."""
        self.num_read = 0
        """Number of tokens whose keys and values are in ``pages``."""
        self.drafts: list[int] = []
        """Draft of the next tokens. Empty unless the model has read all of ``tokens`` but the
        last."""
        self.lookup = Lookup()
        self.matcher: Matcher | None = None
        """State of the grammar after the tokens so far (:mod:`moetrain.generate.grammars`); None:
        the request has no grammar."""
        self.text_so_far: TextStream | None = None
        """Finds stop texts as the completion grows; None: the request has no stop texts."""
        self.routes: list[torch.Tensor] = []
        """Experts of the tokens that were read, one tensor [tokens, MoE layers, K] for each chunk;
        empty unless the request asks for them."""
        self.prompt_scores: list[TokenScore] = []
        """Scores of each prompt token except the first; empty unless the request asks for them."""

    @property
    def num_unread(self) -> int:
        """Number of tokens that the model must still read. The last one predicts the next token."""
        return len(self.tokens) - self.num_read

    def chunks(self, num_tokens: int) -> list["Chunk"]:
        """Return the chunks of a step: ``num_tokens`` unread tokens, then one for each draft."""
        known = len(self.tokens)
        drafts = range(known, known + len(self.drafts))
        return [Chunk(self, self.num_read, num_tokens), *(Chunk(self, i, 1) for i in drafts)]

    def add_pages(self, pages: list[int]) -> None:
        """Append ``pages`` to the sequence's own."""
        self.page_table[len(self.pages) : len(self.pages) + len(pages)] = pages
        self.pages += pages


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence that a step reads: known tokens, or one draft token."""

    sequence: Running
    start: int
    """Position of the first token."""
    num_tokens: int

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens

    @property
    def num_drafts(self) -> int:
        """Number of draft tokens up to the chunk's end; 0: the chunk has known tokens."""
        return max(0, self.end - len(self.sequence.tokens))

    @property
    def last_token(self) -> int:
        """The last token of the chunk."""
        known = self.sequence.tokens
        last = self.end - 1 - len(known)  # below 0: a known token, counted from the end
        return known[last] if last < 0 else self.sequence.drafts[last]

    @property
    def next_token(self) -> int:
        """The known token after the chunk; -1: there is none yet."""
        known = self.sequence.tokens
        return known[self.end] if self.end < len(known) else -1

    @property
    def tokens(self) -> list[int]:
        """The tokens of the chunk."""
        known = self.sequence.tokens
        return known[self.start : self.end] or [self.sequence.drafts[self.start - len(known)]]


class TokenScore(NamedTuple):
    """The model's probability of a token of a prompt."""

    logprob: float
    """Log-probability at temperature 1, nats."""
    likeliest: dict[int, float]
    """The likeliest tokens at its position, with log-probabilities; empty: not asked for."""


class Scheduled(NamedTuple):
    """A sequence that a step reads. Its drafts are read too."""

    sequence: Running
    num_tokens: int
    """Number of known tokens that are read."""


@dataclass(eq=False)
class Scheduler:
    """The sequences that run or wait, and their pages."""

    pages: Pages
    max_sequences: int
    """Largest number of sequences that run at once."""
    max_tokens: int
    """Largest number of tokens that one step reads."""
    shares: bool = True
    """True: sequences with the same beginning share pages. It is False for models whose layers
    carry a state: to share a page, the state at its end would have to be kept, which takes some
    fifty times the page's memory."""
    batch: int = 1
    """Number of waiting sequences that are admitted together, unless fewer wait. Steps that read
    prompts are slow, and there are fewer of them if many sequences begin at once."""

    def __post_init__(self) -> None:
        self._free_slots = list(range(self.max_sequences, 0, -1))
        self.waiting: deque[Running] = deque()
        """Sequences that wait, first come first."""
        self.running: list[Running] = []
        """Sequences that run, oldest first."""
        self.figures = Counter[str]()
        """Sums over steps by metric name (docs/metrics.md). Readers may clear this counter."""

    def plan(self) -> list[Scheduled]:
        """Return what the next step reads, and allocate the pages for it."""
        planned: list[Scheduled] = []
        budget = self.max_tokens
        # 1. Plan running sequences, oldest first. If pages run out, preempt the newest sequence,
        #    which is last in the list and so is not planned yet.
        for sequence in self.running:
            num_tokens = min(sequence.num_unread, budget)
            while num_tokens and not self._allocate(sequence, num_tokens):
                if self._preempt_newest() is sequence:
                    num_tokens = 0
            if num_tokens:
                planned.append(Scheduled(sequence, num_tokens))
                budget -= num_tokens
        # 2. Plan their drafts if pages are free: a draft preempts no sequence.
        for sequence, _ in planned:
            num_drafts = min(len(sequence.drafts), budget)
            if sequence.drafts and not self._allocate(sequence, 1 + num_drafts):
                num_drafts = 0
            sequence.drafts = sequence.drafts[:num_drafts]
            budget -= num_drafts
        # 3. Admit waiting sequences, with the rest of the budget.
        planned += self._admit(budget)
        self.figures["generator/steps"] += bool(planned)
        self.figures["generator/mixed_steps"] += any(number > 1 for _, number in planned)
        self.figures["generator/places"] += len(planned)
        self.figures["generator/read_again"] += 0  # so that 0 is reported too
        return planned

    def _admit(self, budget: int) -> list[Scheduled]:
        """Start waiting sequences. Together they read at most ``budget`` tokens in this step."""
        admitted: list[Scheduled] = []
        # Wait until a batch of slots, and the same share of the pages, is free.
        batch = min(self.batch, len(self.waiting))
        free_slots = self.max_sequences - len(self.running)
        free_pages = self.pages.num_available / self.pages.num_pages * self.max_sequences
        if self.running and min(free_slots, free_pages) < batch:
            return []
        reading = {sequence.request.id for sequence in self.running if sequence.num_unread > 1}
        for sequence in list(self.waiting):
            if not budget or len(self.running) >= self.max_sequences:
                break
            request, size = sequence.request, self.pages.page_size
            if self._shares(sequence):
                if request.id in reading and len(request.tokens) > size:
                    continue  # wait until another completion of the request has read the prompt
                # The last token is never taken from the cache: reading it predicts the next.
                sequence.add_pages(self.pages.match(sequence.tokens[:-1]))
                sequence.num_read = len(sequence.pages) * size
            num_tokens = min(sequence.num_unread, budget)
            if not self._allocate(sequence, num_tokens):
                self._reset(sequence)
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.state_slot = self._free_slots.pop()
            admitted.append(Scheduled(sequence, num_tokens))
            budget -= num_tokens
            if sequence.num_unread > 1:
                reading.add(sequence.request.id)
        return admitted

    def mark_read(self, sequence: Running, num_tokens: int) -> None:
        """Record that a step has read ``num_tokens`` more tokens; cache the pages they filled."""
        before, size = sequence.num_read, self.pages.page_size
        sequence.num_read += num_tokens
        if self._shares(sequence) and before // size < sequence.num_read // size:
            self.pages.cache(sequence.pages[: sequence.num_read // size], sequence.tokens)

    def remove(self, sequence: Running) -> None:
        """Remove a sequence that runs or waits, and release its pages."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._reset(sequence)

    def start_over(self, keeps: bool = False) -> None:
        """Clear the cache, and preempt all running sequences, so that they are read again.

        If ``keeps``, running sequences are not preempted: they keep their pages, which no other
        sequence can share from now on.
        """
        for sequence in self.running if keeps else ():
            sequence.has_mixed_versions = True
        while self.running and not keeps:
            self._preempt_newest()
        self.pages.clear_cache()

    def _preempt_newest(self) -> Running:
        """Move the newest running sequence to the front of the waiting ones."""
        sequence = self.running.pop()
        self.figures["generator/read_again"] += sequence.num_read
        self._reset(sequence)
        self.waiting.appendleft(sequence)
        return sequence

    def _shares(self, sequence: Running) -> bool:
        """Return True if the sequence shares pages with others.

        A request for routes or prompt scores shares no pages, so that all its tokens are read.
        """
        params = sequence.params
        reads_all = params.routes or params.prompt_logprobs is not None
        return self.shares and not (reads_all or sequence.has_mixed_versions)

    def _allocate(self, sequence: Running, num_tokens: int) -> bool:
        """Allocate pages for the next ``num_tokens`` tokens; False: too few pages are free."""
        size = self.pages.page_size
        missing = sequence.num_read + num_tokens - len(sequence.pages) * size
        if missing <= 0:
            return True
        new = self.pages.allocate(-(-missing // size))
        if new is None:
            return False
        sequence.add_pages(new)
        return True

    def _reset(self, sequence: Running) -> None:
        """Release the sequence's pages and slot, and discard all results of reading it."""
        self.pages.release(sequence.pages)
        if sequence.state_slot:
            self._free_slots.append(sequence.state_slot)
            sequence.state_slot = 0
        sequence.pages, sequence.num_read = [], 0
        sequence.routes, sequence.prompt_scores = [], []
        sequence.drafts, sequence.has_mixed_versions = [], False
