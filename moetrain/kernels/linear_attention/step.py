"""A step of linear attention in generation: sequences go on from earlier steps' states.

A chunk of 64 tokens is computed from the state before it and from its own tokens
(:mod:`moetrain.kernels.linear_attention.gated_delta`,
:mod:`moetrain.kernels.linear_attention.kda` and :mod:`moetrain.kernels.linear_attention.ssd` have
the formulas of three rules). So a sequence has a
slot that holds the state before its open chunk, and the inputs of this chunk's tokens so far; when
the chunk is full, the state after it replaces the state before it. A step computes the open chunk
again, with the new tokens at its end, by the kernels of training and in the same tiles. No token's
result depends on later tokens or on other documents. So equal inputs give a token the same bits in
a packed batch of training, in a part of a prompt, and alone.

Such a step reads and writes about as many bytes as a step that updates the state with every token.
Take the gated delta rule with K = V = 128, two value heads a key head, and bf16: a head's state
takes 64 KiB and is written once in 64 tokens, and the inputs of a full chunk take 32 KiB.

Worked example, with chunks of 4 tokens. A sequence in slot 2 has 6 tokens: its slot holds the state
after 4, and the inputs of two tokens. A step that reads 3 more lays out 5 rows::

    rows     kept 4, kept 5, read 6, read 7 | read 8     two chunks, the second one open
    after    the state after 8 tokens, and the inputs of token 8 in entry 0

A step that reads one token of each sequence writes its inputs into the slots first, and the slots'
entries are its rows. Such a step may also read several tokens of one sequence. It then treats each
token as a sequence of its own with the same slot, and computes the chunk up to that token. Inputs
of tokens that the sequence does not keep are overwritten later.

Left out on purpose: gradients.

Legend: T tokens that a step reads, N sequences, P slots, I entries of a slot, R rows that chunks
are made of; others as in the rules' files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch

from moetrain.kernels.linear_attention.gated_delta import CHUNK, Carried, continued
from moetrain.kernels.linear_attention.kda import kda_continued
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
        """Make slots for tokens like ``inputs``: a rule's queries, keys, values and others."""
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
    """Return ``o_THV`` in ``v``'s dtype, and update ``cache``.

    Args:
        q_TQK, k_TQK, v_THV, g_TH, beta_TH: as :func:`gated_delta` takes them.
        cache: in the dtypes of these.
        reads: the layout of these tokens. Only slot 0, or a slot whose state is only read
            (:meth:`Reads.of_singles`), may be that of several sequences.
        scale: the factor of the outputs.
    """

    def rule(rows: Sequence[torch.Tensor], carried: Carried) -> torch.Tensor:
        q_RQK, k_RQK, v_RHV, g_RH, beta_RH = rows
        return continued(
            q_RQK, k_RQK, v_RHV, g_RH, beta_RH, reads.documents, carried, scale, backend
        )

    return _read_on(rule, (q_TQK, k_TQK, v_THV, g_TH, beta_TH), cache, reads)


def kda_step(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    cache: StateCache,
    reads: Reads,
    scale: float,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return ``o_THV`` in ``v``'s dtype, and update ``cache``.

    Args:
        q_THK, k_THK, v_THV, g_THK, beta_TH: as :func:`kda` takes them.
        cache, reads, scale: as :func:`gated_delta_step` takes them.
    """

    def rule(rows: Sequence[torch.Tensor], carried: Carried) -> torch.Tensor:
        q_RHK, k_RHK, v_RHV, g_RHK, beta_RH = rows
        return kda_continued(
            q_RHK, k_RHK, v_RHV, g_RHK, beta_RH, reads.documents, carried, scale, backend
        )

    return _read_on(rule, (q_THK, k_THK, v_THV, g_THK, beta_TH), cache, reads)


def ssd_step(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    u_THV: torch.Tensor,
    g_TH: torch.Tensor,
    cache: StateCache,
    reads: Reads,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return ``o_THV`` in ``u``'s dtype, and update ``cache``.

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
    """Return the outputs of ``rule`` for tokens with these ``inputs``, and update their slots."""
    if len(inputs[2]) == 0:
        return torch.empty_like(inputs[2])

    def rows(x_T: torch.Tensor, open_PI: torch.Tensor) -> torch.Tensor:
        """Return the rows of one input, and keep the inputs of chunks that stay open."""
        entries = open_PI.flatten(0, 1)
        x_R = entries
        if reads.kept_2R is not None:
            to_R, from_R = reads.kept_2R
            x_R = x_T.new_empty(reads.num_rows, *x_T.shape[1:])
            x_R[to_R] = entries[from_R]  # before these entries are overwritten
            x_R[reads.rows_T] = x_T
        entries[reads.own_T] = x_T
        return x_R

    carried = Carried(
        states_PHKV=cache.states_PHKV,
        slots_N=reads.slots_N,
        is_new_N=reads.is_new_N,
        begins_N=reads.begins_N,
        ends_N=reads.ends_N,
    )
    all_rows = [rows(x_T, open_PI) for x_T, open_PI in zip(inputs, cache.open_PI, strict=True)]
    return rule(all_rows, carried)[reads.rows_T]
