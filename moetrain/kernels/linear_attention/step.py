"""Linear attention in generation: sequences go on from where earlier steps have left them.

A chunk of 64 tokens (:mod:`moetrain.kernels.linear_attention.gated_delta` and
:mod:`moetrain.kernels.linear_attention.ssd` have the formulas of two rules) is computed from the
state before it and from its own tokens. So a sequence has a slot that holds the
state before its open chunk, which is carried on when the chunk is full, and the inputs of the
chunk's tokens so far. A step computes the open chunk anew, with the tokens that it reads at its
end, by the kernels of training and in their tiles. No token's numbers depend on those after it or
on other documents: from equal inputs a token has one result, bit for bit, in a packed batch of
training, in a part of a prompt, and alone. A slot is read and written about as much as a state that
every token replaces: with K = V = 128 and two value heads a key head, in bf16, a state of a head
of the gated delta rule takes 64 KiB and is written once in 64 tokens, the inputs of a full chunk
take 32 KiB.

Worked example, with chunks of 4 tokens. A sequence in slot 2 has 6 tokens: its slot holds the state
after 4, and the inputs of two tokens. A step that reads 3 more lays out 5 rows::

    rows     kept 4, kept 5, read 6, read 7 | read 8     two chunks, the second one open
    after    the state after 8 tokens, and the inputs of token 8 in place 0

A step that reads one token of each sequence writes its inputs first, and its rows are the slots.
So it may read several tokens of a sequence, each as if it were alone, in lanes of one slot: a lane
computes the chunk up to its own token. Of tokens that do not stay the inputs are written again.

Left out on purpose: gradients.

Legend: T tokens that a step reads, N sequences, P slots, I places of a chunk, R rows that chunks
are made of; others as in the rules' files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch

from moetrain.kernels.linear_attention.gated_delta import (
    CHUNK,
    Carried,
    continued,
)
from moetrain.kernels.linear_attention.reads import Reads
from moetrain.kernels.linear_attention.ssd import ssd_continued
from moetrain.runtime.backend import Backend


class StateCache(NamedTuple):
    """The slots of one layer."""

    states_PHKV: torch.Tensor
    """The state before each open chunk, fp32 (or wider, as the inputs)."""
    open_PI: tuple[torch.Tensor, ...]
    """The open chunks: each of the rule's inputs, [P, I, ...]."""

    @classmethod
    def empty(cls, slots: int, inputs: Sequence[torch.Tensor]) -> Self:
        """Make slots for tokens like ``inputs``, a rule's: queries, keys, values and others."""
        k_TQK, v_THV = inputs[1:3]
        wide = torch.promote_types(v_THV.dtype, torch.float32)
        state = (slots, v_THV.shape[1], k_TQK.shape[2], v_THV.shape[2])
        kept = (x.new_zeros(slots, CHUNK, *x.shape[1:]) for x in inputs)
        return cls(v_THV.new_zeros(state, dtype=wide), tuple(kept))


def gated_delta_step(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    cache: StateCache,
    reads: Reads,
    scale: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return ``o_THV`` in ``v``'s dtype, and bring ``cache`` up to date.

    Args:
        q_TQK, k_TQK, v_THV, g_TH, beta_TH: as :func:`gated_delta` takes them.
        cache: in the dtypes of these.
        reads: of these tokens; no two sequences have one slot, but slot 0.
    """

    def rule(rows: Sequence[torch.Tensor], carried: Carried) -> torch.Tensor:
        q_RQK, k_RQK, v_RHV, g_RH, beta_RH = rows
        inputs = (q_RQK, k_RQK, v_RHV, g_RH, beta_RH)
        return continued(*inputs, reads.documents, carried, scale, backend)

    return _read_on(rule, (q_TQK, k_TQK, v_THV, g_TH, beta_TH), cache, reads)


def ssd_step(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    u_THV: torch.Tensor,
    g_TH: torch.Tensor,
    cache: StateCache,
    reads: Reads,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return ``o_THV`` in ``u``'s dtype, and bring ``cache`` up to date.

    Args:
        q_TQK, k_TQK, u_THV, g_TH: as :func:`ssd` takes them.
        cache, reads: as :func:`gated_delta_step` takes them.
    """

    def rule(rows: Sequence[torch.Tensor], carried: Carried) -> torch.Tensor:
        q_RQK, k_RQK, u_RHV, g_RH = rows
        return ssd_continued(q_RQK, k_RQK, u_RHV, g_RH, reads.documents, carried, backend)

    return _read_on(rule, (q_TQK, k_TQK, u_THV, g_TH), cache, reads)


def _read_on(
    rule: Callable[[Sequence[torch.Tensor], Carried], torch.Tensor],
    inputs: Sequence[torch.Tensor],
    cache: StateCache,
    reads: Reads,
) -> torch.Tensor:
    """Return what ``rule`` makes of the tokens, whose ``inputs`` are its own."""
    if len(inputs[2]) == 0:
        return torch.empty_like(inputs[2])

    def rows(x_T: torch.Tensor, kept_PI: torch.Tensor) -> torch.Tensor:
        """Return the rows of one input, whose open chunks are kept."""
        kept_P = kept_PI.flatten(0, 1)
        x_R = kept_P
        if reads.kept_2R is not None:
            to_R, from_R = reads.kept_2R
            x_R = x_T.new_empty(reads.num_rows, *x_T.shape[1:])
            x_R[to_R] = kept_P[from_R]  # before others are kept there
            x_R[reads.rows_T] = x_T
        kept_P[reads.own_T] = x_T
        return x_R

    all_rows = [rows(x_T, kept_PI) for x_T, kept_PI in zip(inputs, cache.open_PI, strict=True)]
    begins = (reads.is_new_N, reads.begins_N, reads.ends_N)
    carried = Carried(cache.states_PHKV, reads.slots_N, *begins)
    return rule(all_rows, carried)[reads.rows_T]
