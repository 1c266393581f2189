"""Drafting: an MTP block, or the text so far, proposes tokens that the model checks all at once.

A step reads the last token of a sequence and the K draft tokens after it, and the model chooses a
token after each. A draft token is right if it equals the token that the model has chosen in its
place. The random noise of a choice depends on the position alone. So after right draft tokens the
model chooses the same token as without drafts. Drafts change the number of steps and nothing else.
This is speculative decoding (arXiv 2211.17192) in the case that both models draw with the same
noise.

Worked example, K = 2, with token a at position 7 and the draft x, y::

    position    7        8        9           x is right. y is wrong, because z was chosen there.
    reads       a        x        y           New tokens are x and z. The choice c has no effect.
    chosen      x        z        c
    block       h_7, x   h_8, z   h_9, c      Its output at 8 gives d, the draft of position 10,
    again                         h'_8, d     and its second run the draft of position 11.

:class:`Lookup` drafts from the text so far. It runs on the host and needs no block.

The block is the model's first MTP block (:mod:`moetrain.models.parts.multi_token`) and has pages of
its own. The block reads the hidden state of every token together with the next token. So in the
example the block's keys and values of position 9 are written again when the model has read z.

Legend: T tokens of a step, N chunks of a step, D model width, K draft tokens.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch

from moetrain.config import ConfigError
from moetrain.kernels.linear_attention.gated_delta import CHUNK
from moetrain.kernels.vocabulary.chunk import sample_tokens
from moetrain.models.transformer import Rows, Transformer

DraftBy = Literal["block", "ngram"]
"""Source of drafts: the model's MTP block, or the text so far."""


def check_drafting(model: Transformer, draft: int, by: DraftBy) -> None:
    """Raise ConfigError if an MTP block is to draft tokens, and ``model`` has none.

    Raises ValueError: ``draft``, the number of draft tokens, is negative, or ``by`` is no
    :data:`DraftBy`.
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
    """Drafts the tokens that followed an earlier occurrence of the last tokens of the text.

    Worked example: ``a b c d a b`` ends with ``a b``, which occurred before. The draft has the
    tokens that followed: c, d, a, ... The lengths of n-grams are :data:`_LENGTHS`. The longest
    n-gram that occurred before is used, at its latest occurrence. This is prompt lookup decoding
    (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
    """

    def __init__(self) -> None:
        self._continuations: dict[tuple[int, ...], int] = {}
        """The position after the latest occurrence of each n-gram."""
        self._num_indexed = 0

    def draft(self, tokens: Sequence[int], number: int) -> list[int]:
        """Return a draft of ``number`` tokens after ``tokens``, or an empty one.

        ``tokens`` must begin with the ``tokens`` of the previous call.
        """
        for position in range(self._num_indexed, len(tokens)):
            for length in _LENGTHS:
                if length <= position:
                    self._continuations[tuple(tokens[position - length : position])] = position
        self._num_indexed = len(tokens)
        for length in _LENGTHS:
            position = self._continuations.get(tuple(tokens[-length:]))
            if position is not None:
                period = len(tokens) - position  # past the end of the text, repeat
                return [tokens[position + i % period] for i in range(number)]
        return []


_LENGTHS = (4, 3, 2)
"""Lengths of the n-grams that are looked up, the longest first."""


def most_drafts(position: int, left: int, carries_state: bool) -> int:
    """Return the number of draft tokens that a step may read after the token at ``position``.

    A layer with a state updates the state when a chunk of :data:`CHUNK` tokens is full, and cannot
    undo the update if a draft token is wrong. So a step with drafts ends before the chunk is full.

    Args:
        left: number of tokens that are still to be generated.
    """
    most = left - 1
    if carries_state:
        most = min(most, CHUNK - 2 - position % CHUNK)
    return max(0, most)


class Chunks(NamedTuple):
    """The chunks that a step reads. The chunks of a sequence follow each other."""

    last_N: torch.Tensor | slice
    """Index of each chunk's last token among the T tokens."""
    end_token_N: torch.Tensor
    """The last token of each chunk."""
    positions_N: torch.Tensor
    """Position of that token in its sequence; below 0: the chunk is empty."""
    num_drafts_N: torch.Tensor
    """Number of draft tokens of the sequence up to that token."""
    next_N: torch.Tensor
    """The known token after that token; -1: there is none."""
    limits_N: torch.Tensor
    """Number of tokens that the sequence's pages hold."""
    chosen_N: torch.Tensor
    """int64: the token that the model has chosen after that token."""

    def last_right(self, most: int) -> torch.Tensor:
        """Return a mask, bool [N], that is True at the last right chunk of each sequence.

        ``most``: the largest number of draft tokens of a sequence.
        """
        # A chunk is right if its draft token is. A draft token is right if the previous chunk is
        # right and the model chose this token after that chunk.
        is_first_N = self.num_drafts_N == 0
        is_right_N = is_first_N | (self.end_token_N == self.chosen_N.roll(1))
        for _ in range(most - 1):
            is_right_N = is_right_N & (is_first_N | is_right_N.roll(1))
        return is_right_N & ~(is_right_N & ~is_first_N).roll(-1)


def draft_tokens(
    model: Transformer,
    hidden_TD: torch.Tensor,
    tokens_T: torch.Tensor,
    chunks: Chunks,
    *,
    number: int,
    known: int,
    rows: Rows,
    lay_out: Callable[[torch.Tensor, torch.Tensor], Rows],
) -> torch.Tensor:
    """Return a draft after each chunk by the MTP block of ``model``, int64 [K, N], K = ``number``.

    A draft consists of the block's likeliest tokens. Only the draft after the last right chunk of a
    sequence has a meaning.

    Args:
        model: it must have an MTP block.
        hidden_TD: the model's hidden states of ``tokens_T``, after the final norm.
        known: number of known token ids. Ids from this number on are never drafted.
        rows: the layout in which the model has read the tokens.
        lay_out: returns the layout of one token for each chunk, given the tokens' positions [N]
            and a mask [N] of the tokens that are left out.
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
            positions_N = chunks.positions_N + ahead
            is_out_N = ~is_last_N | (positions_N >= chunks.limits_N)
            rows = lay_out(positions_N.masked_fill(is_out_N, 0), is_out_N)
        embedded_TD = model.embed(next_T, model.vocabulary).to(hidden_TD.dtype)
        pair_TP = torch.cat((embedded_TD, hidden_TD), dim=-1)
        context = rows.contexts[kind]
        hidden_BSD, _, _ = model.through(block, pair_TP[None], context)
        hidden_TD = hidden_BSD[0]
        if not ahead:
            hidden_TD = hidden_TD[chunks.last_N]
        zeros_N = hidden_TD.new_zeros(len(hidden_TD), dtype=torch.float32)
        next_T, _ = sample_tokens(
            hidden_TD,
            model.head_weight,
            zeros_N.int(),
            zeros_N,  # temperature 0: the likeliest token
            torch.ones_like(zeros_N),
            known,
            model.kernels.backend,
            arch.logit_softcap,
        )
        found.append(next_T)
    return torch.stack(found)
