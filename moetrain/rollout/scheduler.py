"""Chooses the tokens that the model reads next: continuous batching, chunked prefill, preemption.

Every step reads the last token of each sequence that is being continued, and a chunk of each
prompt. Sequences are served in the order they came, except that of one request's completions the
first reads the prompt and the others then share its pages. When pages run short, the youngest
running sequence gives its pages back and is read again later (its published pages may still be
there). So the oldest always advances, and nothing waits for ever.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from moetrain.rollout.pages import Pages
from moetrain.rollout.request import Completion, Request


class Running:
    """Completion ``index`` of ``request``, under way; it has ``most_pages`` at most."""

    def __init__(self, request: Request, index: int, most_pages: int, stream: int) -> None:
        self.request, self.params = request, request.params
        self.completion = Completion(request.id, index)
        self.tokens = list(request.tokens)
        """Tokens of prompt and completion."""
        self.stream = stream
        """The seed of its noise."""
        self.inverse, self.scale = self.params.inverse, self.params.scale
        self.pages: list[int] = []
        self.table = np.zeros(most_pages, np.int32)
        """Its page table, which begins with ``pages``."""
        self.num_read = 0
        """Tokens whose keys and values lie in ``pages``."""
        self.routes: list[torch.Tensor] = []
        """Experts of the tokens that were read, [tokens, MoE layers, K] a chunk; if asked for."""
        self.scores: list[tuple[float, int]] = []
        """Of each token of the prompt but the first, if asked for: its log-probability, and the
        likeliest token in its place."""

    @property
    def num_unread(self) -> int:
        """Number of tokens that the model has yet to read; the last one predicts the next."""
        return len(self.tokens) - self.num_read

    def take(self, pages: list[int]) -> None:
        """Append ``pages`` to its own."""
        self.table[len(self.pages) : len(self.pages) + len(pages)] = pages
        self.pages += pages


class Scheduler:
    """The sequences that run or wait, and their pages.

    Args:
        max_sequences: sequences that run at once.
        max_tokens: tokens that one step reads.
    """

    def __init__(self, pages: Pages, max_sequences: int, max_tokens: int) -> None:
        self.pages = pages
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.waiting: deque[Running] = deque()
        """Sequences in the order in which they will begin; new ones go to its end."""
        self.running: list[Running] = []
        """Running sequences in the order in which they began."""
        self.num_preempted = 0

    def plan(self) -> list[tuple[Running, int]]:
        """Return the next step's sequences and the tokens it reads of each; they have pages."""
        planned: list[tuple[Running, int]] = []
        left = self.max_tokens
        # Only the youngest gives way, the list's last, which has not been planned yet.
        for sequence in self.running:
            number = min(sequence.num_unread, left)
            if number and self._make_room(sequence, number):
                planned.append((sequence, number))
                left -= number
        return planned + self._begin_some(left)

    def _begin_some(self, left: int) -> list[tuple[Running, int]]:
        """Start waiting sequences; return them and how many of ``left`` tokens each reads."""
        begun: list[tuple[Running, int]] = []
        reading = {sequence.request.id for sequence in self.running if sequence.num_unread > 1}
        for sequence in list(self.waiting):
            if not left or len(self.running) >= self.max_sequences:
                break
            request, size = sequence.request, self.pages.page_size
            if not request.params.reads_all:
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
            begun.append((sequence, number))
            left -= number
            if sequence.num_unread > 1:
                reading.add(sequence.request.id)
        return begun

    def was_read(self, sequence: Running, number: int) -> None:
        """Note that ``number`` more tokens of ``sequence`` lie in its pages."""
        before, size = sequence.num_read, self.pages.page_size
        sequence.num_read += number
        if not sequence.params.reads_all and before // size < sequence.num_read // size:
            self.pages.publish(sequence.pages[: sequence.num_read // size], sequence.tokens)

    def remove(self, sequence: Running) -> None:
        """Remove ``sequence``, which is finished, and release its pages."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._give_back(sequence)

    def start_over(self) -> None:
        """Queue all running sequences before all others, to be read again, and forget all pages."""
        while self.running:
            self._preempt_youngest()
        self.pages.forget()

    def _make_room(self, sequence: Running, number: int) -> bool:
        """Get pages for ``number`` more tokens, preempting younger sequences if needed."""
        while not self._grow(sequence, number):
            if self._preempt_youngest() is sequence:
                return False
        return True

    def _preempt_youngest(self) -> Running:
        sequence = self.running.pop()
        self._give_back(sequence)
        self.waiting.appendleft(sequence)
        self.num_preempted += 1
        return sequence

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
        sequence.pages, sequence.num_read, sequence.routes, sequence.scores = [], 0, [], []
