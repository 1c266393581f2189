"""Which tokens the model reads next: continuous batching with chunked prefill and preemption.

Every step reads some tokens of every running sequence: of one that is being continued its last, of
a prompt a chunk. Sequences are served in the order they came, but for those of one request: the
first reads the prompt, then the others share its pages. When pages run short the youngest
running one gives its pages back and is read again later (what it had published may still be there);
so the oldest always gets on, and nothing waits for ever.
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
    """int32: where its keys and values lie; the first numbers are ``pages``."""
    tokens: list[int]
    """Prompt and completion."""
    stream: int
    """What its noise depends on (:func:`moetrain.rollout.sampling.stream_of`)."""
    inverse: float
    """1 / temperature, and 0 at temperature 0."""
    scale: float
    """Of the logits in what is reported (:func:`moetrain.rollout.sampling.scale_of`)."""
    pages: list[int] = field(default_factory=list)
    num_read: int = 0
    """Tokens whose keys and values lie in ``pages``."""
    is_running: bool = False
    routes: list[torch.Tensor] = field(default_factory=list)
    """[tokens, MoE layers, K] of what was read, chunk by chunk; if they are asked for."""

    @classmethod
    def of(cls, request: Request, index: int, most_pages: int) -> Self:
        """Completion ``index`` of ``request``, nothing of it read."""
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
        """Tokens that the model has still to read; the last of them gives the next one."""
        return len(self.tokens) - self.num_read

    def take(self, pages: list[int]) -> None:
        """``pages`` more are its own."""
        self.table[len(self.pages) : len(self.pages) + len(pages)] = pages
        self.pages += pages


class Scheduler:
    """The sequences that run or wait, and the pages between them.

    Args:
        max_sequences: that run at once.
        max_tokens: that one step reads.
    """

    def __init__(self, pages: Pages, max_sequences: int, max_tokens: int) -> None:
        self.pages = pages
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        """In the order in which they began."""
        self.num_preempted = 0

    def add(self, sequence: Running) -> None:
        """Let ``sequence`` wait behind all others."""
        self.waiting.append(sequence)

    def plan(self) -> list[tuple[Running, int]]:
        """The sequences of the next step and how many tokens of each it reads; pages are theirs."""
        planned: list[tuple[Running, int]] = []
        left = self.max_tokens
        for sequence in list(self.running):
            number = min(len(sequence.tokens) - sequence.num_read, left)
            # Those that give way for it are younger: they were not planned yet, and now are not.
            if number and sequence.is_running and self._make_room(sequence, number):
                planned.append((sequence, number))
                left -= number
        return planned + self._begin_some(left)

    def _begin_some(self, left: int) -> list[tuple[Running, int]]:
        """Those that wait and now run, and how many of ``left`` tokens each of them reads."""
        begun: list[tuple[Running, int]] = []
        reading = {sequence.request.id for sequence in self.running if sequence.num_unread > 1}
        for sequence in list(self.waiting):
            if not left or len(self.running) >= self.max_sequences:
                break
            if sequence.request.id in reading and self._can_share(sequence):
                continue  # once another completion of its request has read the prompt
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
        """``number`` more tokens of ``sequence`` lie in its pages."""
        before, size = sequence.num_read, self.pages.page_size
        sequence.num_read += number
        if not sequence.request.params.routes and before // size < sequence.num_read // size:
            self.pages.publish(sequence.pages, sequence.tokens, sequence.num_read)

    def remove(self, sequence: Running) -> None:
        """``sequence`` is over."""
        if sequence.is_running:
            self.running.remove(sequence)
            sequence.is_running = False
        else:
            self.waiting.remove(sequence)
        self._give_back(sequence)

    def preempt_all(self) -> None:
        """Every running sequence waits, in order, before all others, to be read anew."""
        for sequence in reversed(list(self.running)):
            self._preempt(sequence)

    def _make_room(self, sequence: Running, number: int) -> bool:
        """Pages for ``number`` more tokens of a running sequence, at the cost of younger ones."""
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
        """Whether its prompt fills pages that others can use; routes only reading tells."""
        request = sequence.request
        return not request.params.routes and len(request.tokens) > self.pages.page_size

    def _begin(self, sequence: Running) -> None:
        """Share what others have read of the same tokens; the last is read in any case."""
        if not sequence.request.params.routes:
            sequence.take(self.pages.match(sequence.tokens[:-1]))
            sequence.num_read = len(sequence.pages) * self.pages.page_size

    def _grow(self, sequence: Running, number: int) -> bool:
        """Have pages for ``number`` more tokens than were read; False: there are not enough."""
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
