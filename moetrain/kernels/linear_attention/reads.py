"""The layout of a step's tokens for linear attention in generation.

:mod:`moetrain.kernels.linear_attention.step` says what rows are, and has a worked example.

Legend: T tokens that a step reads, N sequences, R rows that chunks are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch.nn import functional as F

from moetrain.kernels.linear_attention.gated_delta import CHUNK, Documents


class Reads(NamedTuple):
    """The tokens that a step reads, and their rows and slots; all layers share it.

    A slot has ``CHUNK`` entries, for the tokens of a sequence's open chunk. An entry's index counts
    over all slots. Slot 0 belongs to no sequence; tokens that no later step needs go there.
    """

    place_T: torch.Tensor
    """int64: each token's place in its sequence."""
    before_T: torch.Tensor
    """int64: number of tokens of its sequence that this step reads before it."""
    after_T: torch.Tensor
    """int64: number of tokens of its sequence that this step reads after it. :meth:`of_singles` has
    zeros, whatever follows."""
    slots_T: torch.Tensor
    """int64: the slot of its sequence."""
    rows_T: torch.Tensor
    """int64: its row."""
    own_T: torch.Tensor
    """int64: its entry if its chunk is still open after the step, else an entry of slot 0."""
    kept_2R: torch.Tensor | None
    """int64: the rows of tokens that earlier steps read, and the entries of these tokens. None: the
    rows are the entries themselves."""
    num_rows: int
    """R; 0 if the rows are the entries."""
    begins_N: torch.Tensor
    """int32: each sequence's first row."""
    ends_N: torch.Tensor
    """int32: the end of each sequence's rows."""
    documents: Documents
    """The chunks of the rows. Its ``bounds_N`` are not used."""
    slots_N: torch.Tensor
    """int32: each sequence's slot."""
    is_new_N: torch.Tensor
    """int32: 1 where the state before the first row is zero, and its slot's is not read."""

    @classmethod
    def of(cls, sequences: Sequence[tuple[int, int, int]], device: torch.device | str) -> Self:
        """Lay out a step.

        Args:
            sequences: (slot, tokens that earlier steps read, tokens to read) of each.
        """
        slots_N, seen_N, new_N = torch.tensor(sequences, dtype=torch.int64).view(-1, 3).T
        # Rows: for each sequence the tokens of its open chunk, then those to read.
        open_N = seen_N % CHUNK
        bounds_N = F.pad((open_N + new_N).cumsum(0), (1, 0))
        rows = int(bounds_N[-1])
        sequence_R = torch.arange(len(slots_N)).repeat_interleave(open_N + new_N)
        at_R = torch.arange(rows) - bounds_N[sequence_R]
        is_new_R = at_R >= open_N[sequence_R]
        rows_T = is_new_R.nonzero()[:, 0]
        kept_R = (~is_new_R).nonzero()[:, 0]
        # Tokens to read.
        sequence_T = sequence_R[rows_T]
        before_T = at_R[rows_T] - open_N[sequence_T]
        place_T = seen_N[sequence_T] + before_T
        after_T = new_N[sequence_T] - 1 - before_T
        slots_T = slots_N[sequence_T]
        # Entries: of tokens whose chunk the step leaves open, and of tokens kept before.
        stays_T = place_T // CHUNK == (place_T + after_T) // CHUNK
        own_T = torch.where(stays_T, slots_T, 0) * CHUNK + place_T % CHUNK
        kept_2R = torch.stack((kept_R, slots_N[sequence_R[kept_R]] * CHUNK + at_R[kept_R]))
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
    def of_singles(
        cls, slots_N: torch.Tensor, seen_N: torch.Tensor, before_N: torch.Tensor | None = None
    ) -> Self:
        """Lay out one more token of each sequence, without waiting for the device.

        Args:
            slots_N: each sequence's slot.
            seen_N: the number of tokens before this one.
            before_N: the number of these tokens that this step reads, too, if it reads several
                consecutive tokens of a sequence; None: zeros. Those of one sequence are then in one
                chunk, and none is the last token of the chunk, so that the state is only read.
        """
        slots_N, seen_N = slots_N.long(), seen_N.long()
        zeros_N = torch.zeros_like(slots_N)
        at_N = seen_N % CHUNK
        before_N = zeros_N if before_N is None else before_N.long()
        begins_N = (slots_N * CHUNK).int()
        sizes_N = (at_N + 1).int()
        firsts_N = torch.arange(len(slots_N) + 1, dtype=torch.int32, device=slots_N.device)
        places_N = slots_N * CHUNK + at_N
        return cls(
            place_T=seen_N,
            before_T=before_N,
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
