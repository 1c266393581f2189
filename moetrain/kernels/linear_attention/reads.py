"""The tokens that a step of generation reads, laid out for linear attention.

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
        rows_T = is_read_R.nonzero()[:, 0]
        kept_R = (~is_read_R).nonzero()[:, 0]
        of_T = of_R[rows_T]
        before_T = at_R[rows_T] - open_N[of_T]
        place_T = seen_N[of_T] + before_T
        after_T = numbers_N[of_T] - 1 - before_T
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
    def of_singles(
        cls,
        slots_N: torch.Tensor,
        seen_N: torch.Tensor,
        before_N: torch.Tensor | None = None,
    ) -> Self:
        """Lay out one more token of each sequence, without waiting for the device.

        With ``before_N`` there may be several of a sequence, behind each other, and as many before
        each in this step. They lie in one chunk, and none is its last: then a state is only read.
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
