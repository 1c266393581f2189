"""Chooses the tokens that the model reads next: continuous batching, chunked prefill, preemption.

Every step reads the last token of each sequence that is being continued, and a chunk of each
prompt. Sequences are served in the order they came, except that of one request's completions the
first reads the prompt and the others then share its pages. When pages run short, the youngest
running sequence gives its pages back and is read again later (its published pages may still be
there). So the oldest always advances, and nothing waits for ever.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

from moetrain.rollout.pages import Pages
from moetrain.rollout.request import Completion, Request
from moetrain.rollout.sampling import inverse_temperature, scale_of, stream_of


@dataclass(eq=False)
class Running:
    """One completion under way."""

    request: Request
    completion: Completion
    table: np.ndarray
    """int32: its page table, which begins with ``pages``."""
    tokens: list[int]
    """Tokens of prompt and completion."""
    stream: int
    """The seed of its noise (:func:`moetrain.rollout.sampling.stream_of`)."""
    inverse: float
    """1 / temperature, and 0 at temperature 0."""
    scale: float
    """Factor of the logits in reported log-probabilities (``sampling.scale_of``)."""
    pages: list[int] = field(default_factory=list)
    num_read: int = 0
    """Tokens whose keys and values lie in ``pages``."""
    is_running: bool = False
    routes: list[torch.Tensor] = field(default_factory=list)
    """Experts of the tokens that were read, [tokens, MoE layers, K] a chunk; if asked for."""

    @classmethod
    def of(cls, request: Request, index: int, most_pages: int) -> Self:
        """Begin completion ``index`` of ``request``."""
        params = request.params
        return cls(
            request,
            Completion(request.id, index),
            np.zeros(most_pages, np.int32),
            list(request.tokens),
            stream_of(params, index),
            inverse_temperature(params),
            scale_of(params),
        )

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
        self.running: list[Running] = []
        """Running sequences in the order in which they began."""
        self.num_preempted = 0

    def add(self, sequence: Running) -> None:
        """Queue ``sequence`` behind all others."""
        self.waiting.append(sequence)

    def plan(self) -> list[tuple[Running, int]]:
        """Return the next step's sequences and the tokens it reads of each; they have pages."""
        planned: list[tuple[Running, int]] = []
        left = self.max_tokens
        for sequence in list(self.running):
            number = min(len(sequence.tokens) - sequence.num_read, left)
            # Only younger sequences give way, and those have not been planned yet.
            if number and sequence.is_running and self._make_room(sequence, number):
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
            if sequence.request.id in reading and self._can_share(sequence):
                continue  # it waits until another completion has read the prompt
            self._begin(sequence)
            number = min(sequence.num_unread, left)
            if not self._grow(sequence, number):
                self._give_back(sequence)
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.is_running = True
            begun.append((sequence, number))
            left -= number
            if sequence.num_unread > 1:
                reading.add(sequence.request.id)
        return begun

    def was_read(self, sequence: Running, number: int) -> None:
        """Note that ``number`` more tokens of ``sequence`` lie in its pages."""
        before, size = sequence.num_read, self.pages.page_size
        sequence.num_read += number
        if not sequence.request.params.routes and before // size < sequence.num_read // size:
            self.pages.publish(sequence.pages, sequence.tokens, sequence.num_read)

    def remove(self, sequence: Running) -> None:
        """Remove ``sequence``, which is finished, and release its pages."""
        if sequence.is_running:
            self.running.remove(sequence)
            sequence.is_running = False
        else:
            self.waiting.remove(sequence)
        self._give_back(sequence)

    def preempt_all(self) -> None:
        """Move all running sequences, in order, to the head of the queue, to be read again."""
        for sequence in reversed(list(self.running)):
            self._preempt(sequence)

    def _make_room(self, sequence: Running, number: int) -> bool:
        """Get pages for ``number`` more tokens, preempting younger sequences if needed."""
        while not self._grow(sequence, number):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Running) -> None:
        self.running.remove(sequence)
        sequence.is_running = False
        self._give_back(sequence)
        self.waiting.appendleft(sequence)
        self.num_preempted += 1

    def _can_share(self, sequence: Running) -> bool:
        """Whether its prompt fills pages that can be shared. Routes need each token to be read."""
        request = sequence.request
        return not request.params.routes and len(request.tokens) > self.pages.page_size

    def _begin(self, sequence: Running) -> None:
        """Take published pages of the same tokens; the last token is read in any case."""
        if not sequence.request.params.routes:
            sequence.take(self.pages.match(sequence.tokens[:-1]))
            sequence.num_read = len(sequence.pages) * self.pages.page_size

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
        sequence.pages, sequence.num_read, sequence.routes = [], 0, []
