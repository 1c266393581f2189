"""The gated delta rule in generation: sequences go on from where earlier steps have left them.

A chunk of 64 tokens (:mod:`moetrain.kernels.linear_attention.gated_delta` has the formulas) is
computed from the state before it and from its own tokens. So a sequence has a slot that holds the
state before its open chunk, which is carried on when the chunk is full, and the inputs of the
chunk's tokens so far. A step computes the open chunk anew, with the tokens that it reads at its
end, by the kernels of training and in their tiles. No token's numbers depend on those after it or
on other documents: from equal inputs a token has one result, bit for bit, in a packed batch of
training, in a part of a prompt, and alone. A slot is read and written about as much as a state that
every token replaces: with K = V = 128 and two value heads a key head, in bf16, a state of a head
takes 64 KiB and is written once in 64 tokens, the inputs of a full chunk take 32 KiB.

Worked example, with chunks of 4 tokens. A sequence in slot 2 has 6 tokens: its slot holds the state
after 4, and the inputs of two tokens. A step that reads 3 more lays out 5 rows::

    rows     kept 4, kept 5, read 6, read 7 | read 8     two chunks, the second one open
    after    the state after 8 tokens, and the inputs of token 8 in place 0

A step that reads one token of each sequence writes its inputs first, and its rows are the slots.

Left out on purpose: gradients.

Legend: T tokens that a step reads, N sequences, P slots, I places of a chunk, R rows that chunks
are made of; others as in the rule's file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch.nn import functional as F

from moetrain.kernels.backend import Backend
from moetrain.kernels.linear_attention.gated_delta import CHUNK, Carried, Documents, continued


class Reads(NamedTuple):
    """Tokens that a step reads, and where they lie; all layers share it.

    Slot 0 is nobody's: what no later step needs is written there.
    """

    place_T: torch.Tensor
    """int64: each token's place in its sequence."""
    before_T: torch.Tensor
    """int64: how many tokens of its sequence this step reads before it."""
    after_T: torch.Tensor
    """int64: how many it reads after it."""
    slots_T: torch.Tensor
    """int64: its sequence's slot."""
    rows_T: torch.Tensor
    """int64: its row."""
    own_T: torch.Tensor
    """int64: its place among those of all slots, if its chunk stays open; else one of slot 0."""
    kept_2R: torch.Tensor | None
    """int64: rows of tokens that were read before, and their places among those of all slots. None:
    the slots' places are the rows."""
    num_rows: int
    begins_N: torch.Tensor
    """int32: each sequence's first row, and below where its rows end."""
    ends_N: torch.Tensor
    documents: Documents
    """The chunks of the rows. Its ``bounds_N`` are not used."""
    slots_N: torch.Tensor
    """int32."""
    is_new_N: torch.Tensor
    """int32: 1 where the state before the first row is zero, and its slot's is not read."""

    @classmethod
    def of(cls, sequences: Sequence[tuple[int, int, int]], device: torch.device | str) -> Self:
        """Lay out what is read of ``sequences``: slot, tokens read before, and tokens read now."""
        slots_N, seen_N, numbers_N = torch.tensor(sequences, dtype=torch.int64).view(-1, 3).T
        open_N = seen_N % CHUNK
        bounds_N = F.pad((open_N + numbers_N).cumsum(0), (1, 0))
        rows, number = int(bounds_N[-1]), len(slots_N)
        of_R = torch.arange(number).repeat_interleave(open_N + numbers_N)
        at_R = torch.arange(rows) - bounds_N[of_R]
        is_read_R = at_R >= open_N[of_R]
        rows_T, kept_R = is_read_R.nonzero()[:, 0], (~is_read_R).nonzero()[:, 0]
        of_T = of_R[rows_T]
        before_T = at_R[rows_T] - open_N[of_T]
        place_T, after_T = seen_N[of_T] + before_T, numbers_N[of_T] - 1 - before_T
        slots_T = slots_N[of_T]
        stays_T = place_T // CHUNK == (place_T + after_T) // CHUNK
        own_T = torch.where(stays_T, slots_T, 0) * CHUNK + place_T % CHUNK
        kept_2R = torch.stack((kept_R, slots_N[of_R[kept_R]] * CHUNK + at_R[kept_R]))
        documents = Documents.of(bounds_N.int(), rows)
        return cls(
            place_T=place_T.to(device),
            before_T=before_T.to(device),
            after_T=after_T.to(device),
            slots_T=slots_T.to(device),
            rows_T=rows_T.to(device),
            own_T=own_T.to(device),
            kept_2R=kept_2R.to(device),
            num_rows=rows,
            begins_N=documents.bounds_N[:-1].to(device),
            ends_N=documents.bounds_N[1:].to(device),
            documents=Documents(*(x.to(device) for x in documents)),
            slots_N=slots_N.int().to(device),
            is_new_N=(seen_N < CHUNK).int().to(device),
        )

    @classmethod
    def of_singles(cls, slots_N: torch.Tensor, seen_N: torch.Tensor) -> Self:
        """Lay out one more token of each sequence, without waiting for the device."""
        slots_N, seen_N = slots_N.long(), seen_N.long()
        zeros_N, at_N = torch.zeros_like(slots_N), seen_N % CHUNK
        begins_N, sizes_N = (slots_N * CHUNK).int(), (at_N + 1).int()
        firsts_N = torch.arange(len(slots_N) + 1, dtype=torch.int32, device=slots_N.device)
        places_N = slots_N * CHUNK + at_N
        return cls(
            place_T=seen_N,
            before_T=zeros_N,
            after_T=zeros_N,
            slots_T=slots_N,
            rows_T=places_N,
            own_T=places_N,
            kept_2R=None,
            num_rows=0,
            begins_N=begins_N,
            ends_N=begins_N + sizes_N,
            documents=Documents(begins_N, begins_N, sizes_N, firsts_N),
            slots_N=slots_N.int(),
            is_new_N=(seen_N < CHUNK).int(),
        )


class DeltaCache(NamedTuple):
    """The slots of one layer."""

    states_PHKV: torch.Tensor
    """The state before each open chunk, fp32 (or wider, as the inputs)."""
    q_PIQK: torch.Tensor
    k_PIQK: torch.Tensor
    v_PIHV: torch.Tensor
    g_PIH: torch.Tensor
    beta_PIH: torch.Tensor

    @classmethod
    def empty(cls, slots: int, inputs: Sequence[torch.Tensor]) -> Self:
        """Make slots for tokens like ``inputs``, those of :func:`gated_delta_step`."""
        k_TQK, v_THV = inputs[1:3]
        wide = torch.promote_types(v_THV.dtype, torch.float32)
        state = (slots, v_THV.shape[1], k_TQK.shape[2], v_THV.shape[2])
        kept = (x.new_zeros(slots, CHUNK, *x.shape[1:]) for x in inputs)
        return cls(v_THV.new_zeros(state, dtype=wide), *kept)


def gated_delta_step(
    q_TQK: torch.Tensor,
    k_TQK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    cache: DeltaCache,
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
    if len(v_THV) == 0:
        return torch.empty_like(v_THV)

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

    states_PHKV, q_PIQK, k_PIQK, v_PIHV, g_PIH, beta_PIH = cache
    o_RHV = continued(
        rows(q_TQK, q_PIQK),
        rows(k_TQK, k_PIQK),
        rows(v_THV, v_PIHV),
        rows(g_TH, g_PIH),
        rows(beta_TH, beta_PIH),
        reads.documents,
        Carried(states_PHKV, reads.slots_N, reads.is_new_N, reads.begins_N, reads.ends_N),
        scale,
        backend,
    )
    return o_RHV[reads.rows_T]
