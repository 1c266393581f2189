"""Drafting: an MTP block, or the text so far, guesses tokens that the model then
checks all at once.

A step of generation reads a sequence's last token and the K that were drafted behind it, and the
model chooses a token after each. Its noise depends on the position alone, so what it chooses after
right tokens is what it would have chosen without drafts: a drafted token is right if it is the
token that was chosen in its place. So drafts change the number of steps and nothing else (of
speculative decoding, arXiv 2211.17192, the case in which both models draw with the same noise).

Worked example, K = 2, with a at place 7 and drafts x and y::

    place       7        8        9           x is right, and y is not, as z was chosen there:
    reads       a        x        y           x and z are new tokens, and c counts for nothing
    chosen      x        z        c
    block       h_7, x   h_8, z   h_9, c      its result at 8 gives the draft of place 10, d
    again                         h'_8, d     and its result that of place 11

A text's own drafts (:class:`Lookup`) need no block, and are looked up on the host.

The block (:mod:`moetrain.models.parts.multi_token`; a model's first, if it has several) has
pages of its own. It reads every token's hidden state with the token after it, so its keys and
values of place 9 are written again when the model has read z.

Legend: T tokens of a step, N chunks of it (of a prompt, or one token or draft), D model width,
K drafts.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from moetrain.config import ConfigError
from moetrain.kernels.linear_attention.gated_delta import CHUNK
from moetrain.kernels.vocabulary.chunk import sample_tokens

DraftBy = Literal["block", "ngram"]
"""What guesses: the model's MTP block, or the text so far."""


def check_drafting(model: Any, draft: int, by: DraftBy) -> None:
    """Raise ConfigError if ``model``, a ``Transformer``, has no block to draft tokens with.

    Raises ValueError: ``draft`` is negative, or ``by`` is neither.
    """
    if draft < 0:
        raise ValueError(f"draft {draft} is negative")
    if by not in get_args(DraftBy):
        raise ValueError(f"draft_by {by!r} is neither 'block' nor 'ngram'")
    if draft and by == "block" and not model.arch.mtp_layers:
        problem = "but this model was loaded without multi-token prediction blocks"
        remedy = "load it with load_model(..., draft=...), or set draft_by 'ngram'"
        raise ConfigError("draft", f"{draft}, {problem}; {remedy}")


class Lookup:
    """Drafts by a text itself: it goes on as it did where its last tokens stood before.

    Worked example: behind ``a b c d a b``, ``a b`` stood before, so drafts are c, d, a, ... The
    longest of :data:`_LENGTHS` that is found counts, at its latest place. (Prompt lookup decoding,
    Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.)
    """

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}
        """Where the text went on behind tokens, the last time that it did."""
        self._known = 0

    def ahead(self, tokens: Sequence[int], number: int) -> list[int]:
        """Return ``number`` tokens that may follow ``tokens``, or none; they only ever grow."""
        for place in range(self._known, len(tokens)):
            for length in _LENGTHS:
                if length <= place:
                    self._behind[tuple(tokens[place - length : place])] = place
        self._known = len(tokens)
        for length in _LENGTHS:
            place = self._behind.get(tuple(tokens[-length:]))
            if place is not None:
                period = len(tokens) - place  # behind the end it repeats itself
                return [tokens[place + i % period] for i in range(number)]
        return []


_LENGTHS = (4, 3, 2)


def most_drafts(place: int, left: int, carries_state: bool) -> int:
    """Return how many drafts a step may read behind the token at ``place``.

    A state is carried on where a chunk is full, and could not be brought back: with drafts a step
    ends before that.

    Args:
        left: how many tokens are still to be generated.
    """
    most = left - 1
    if carries_state:
        most = min(most, CHUNK - 2 - place % CHUNK)
    return max(0, most)


class Chunks(NamedTuple):
    """The chunks that a step reads, those of a sequence behind each other."""

    last_N: torch.Tensor | slice
    """Where each ends among the T tokens."""
    ends_N: torch.Tensor
    """The last token of each."""
    places_N: torch.Tensor
    """Its place in its sequence; below 0: the chunk is empty."""
    depths_N: torch.Tensor
    """How many of the sequence's tokens up to it are drafts."""
    next_N: torch.Tensor
    """The token behind it; -1: the sequence ends there."""
    limits_N: torch.Tensor
    """How many places of the sequence have pages."""
    chosen_N: torch.Tensor
    """int64: the token that the model has chosen after it."""

    def last_right(self, most: int) -> torch.Tensor:
        """Return whether each is its sequence's last right one, bool [N]; ``most`` are drafts."""
        is_first_N = self.depths_N == 0
        is_right_N = is_first_N | (self.ends_N == self.chosen_N.roll(1))
        for _ in range(most - 1):  # those behind a wrong one are wrong
            is_right_N = is_right_N & (is_first_N | is_right_N.roll(1))
        return is_right_N & ~(is_right_N & ~is_first_N).roll(-1)


def draft_tokens(
    model: Any,
    hidden_TD: torch.Tensor,
    tokens_T: torch.Tensor,
    chunks: Chunks,
    number: int,
    known: int,
    rows: Any,
    lay_out: Callable[[torch.Tensor, torch.Tensor], Any],
) -> torch.Tensor:
    """Return the likeliest tokens by the block of a ``Transformer``, int64 [K, N], K = ``number``.

    Those of chunks that are not the last right one of a sequence mean nothing.

    Args:
        hidden_TD: the model's hidden states after the final norm, of ``tokens_T``.
        known: tokens from this id on are never drafted.
        rows: the ``Rows`` in which the model has read the tokens.
        lay_out: returns the ``Rows`` of one token a chunk, by their places [N], and whether each
            is left out.
    """
    arch, found = model.arch, []
    block = arch.num_layers
    kind = model.kinds[block]
    is_last_N = chunks.last_right(number)
    is_known_N = chunks.next_N >= 0
    next_N = chunks.next_N.long()
    next_N = next_N.where(is_known_N, chunks.chosen_N)
    next_T = tokens_T.roll(-1)
    next_T[chunks.last_N] = next_N
    for ahead in range(number):
        if ahead:
            places_N = chunks.places_N + ahead
            is_out_N = ~is_last_N | (places_N >= chunks.limits_N)
            rows = lay_out(places_N.masked_fill(is_out_N, 0), is_out_N)
        embedded_TD = model.embed(next_T, model.vocabulary).to(hidden_TD.dtype)
        pair_TP = torch.cat((embedded_TD, hidden_TD), dim=-1)
        context = rows.contexts[kind]
        hidden_BSD, _ = model.through(block, pair_TP[None], context)
        hidden_TD = hidden_BSD[0]
        if not ahead:
            hidden_TD = hidden_TD[chunks.last_N]
        zeros_N = hidden_TD.new_zeros(len(hidden_TD), dtype=torch.float32)
        next_T, _ = sample_tokens(
            hidden_TD,
            model.head_weight,
            zeros_N.int(),
            zeros_N,  # the likeliest one
            torch.ones_like(zeros_N),
            known,
            model.kernels.backend,
            arch.logit_softcap,
        )
        found.append(next_T)
    return torch.stack(found)
