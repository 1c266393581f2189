"""The inputs and the choices of a step, each sent between host and device in one copy.

A step has a batch of slots, one for each chunk that it reads. On the host they are numpy records.
On the device they are one int32 tensor [B, C], because a captured step has a single fixed input:
one copy from pinned memory fills it, instead of one copy for each field. Both sides access a field
by its name, and floats are stored as their bits. The choices of a step return in one copy, too.

Legend: B slots (some may be empty), C = 9 + M columns of a slot, M pages of a sequence at most,
N chunks, K drafts, R = 2 + K rows of a result.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from moetrain.generate.scheduler import Chunk

# Every field has four bytes, so that a slot is a row of an int32 tensor.
_FIELDS = [
    ("token", np.int32),  # the last token of the chunk
    ("position", np.int32),  # its position in the sequence; -1: the slot is empty
    ("stream", np.int32),  # seed of the sequence's random numbers
    ("inverse_temperature", np.float32),  # 1 / temperature of the choice; 0: the likeliest token
    ("logprob_scale", np.float32),  # factor of the logits in the reported log-probability
    ("state_slot", np.int32),  # slot for the states of layers that carry one; 0: none
    ("num_drafts", np.int32),  # drafts among the sequence's tokens up to this one
    ("next_token", np.int32),  # the known token after this one; -1: there is none yet
    ("limit", np.int32),  # number of tokens that the sequence's pages hold
]
_COLUMNS = {name: column for column, (name, _) in enumerate(_FIELDS)}
_PAGES = len(_FIELDS)
"""Column of the first page."""


def slot_dtype(max_pages: int) -> np.dtype:
    """Return the dtype of a slot whose sequence has ``max_pages`` pages at most.

    After :data:`_FIELDS` comes ``pages``, the page table of the sequence.
    """
    return np.dtype([*_FIELDS, ("pages", np.int32, (max_pages,))])


def _as_records(slots_BC: torch.Tensor) -> np.ndarray:
    """Return the records [B] that share the memory of ``slots_BC``, a contiguous host tensor."""
    return slots_BC.numpy().view(slot_dtype(slots_BC.shape[1] - _PAGES))[:, 0]


def empty_slots(number: int, max_pages: int) -> torch.Tensor:
    """Return ``number`` empty slots, int32 [B, C] in host memory."""
    slots_BC = torch.zeros(number, _PAGES + max_pages, dtype=torch.int32)
    _as_records(slots_BC)["position"] = -1
    return slots_BC


class HostSlots:
    """The slots of a step in host memory. The next step overwrites them."""

    def __init__(self, page_size: int, max_pages: int, *, pinned: bool) -> None:
        """``pinned``: True for memory from which copies to a GPU are fast."""
        self.page_size, self.pinned = page_size, pinned
        self._empty = _as_records(empty_slots(1, max_pages))
        self._slots_BC = empty_slots(0, max_pages)

    def fill(self, chunks: Sequence[Chunk], number: int) -> torch.Tensor:
        """Write ``chunks`` to the first of ``number`` slots; return all of them, [B, C]."""
        if len(self._slots_BC) < number:
            shape = number, self._slots_BC.shape[1]
            self._slots_BC = torch.zeros(shape, dtype=torch.int32, pin_memory=self.pinned)
        slots_BC = self._slots_BC[:number]
        slots_B = _as_records(slots_BC)
        used_N, sequences = slots_B[: len(chunks)], [chunk.sequence for chunk in chunks]
        used_N["token"] = [chunk.last_token for chunk in chunks]
        used_N["position"] = [chunk.end - 1 for chunk in chunks]
        used_N["stream"] = [one.stream for one in sequences]
        used_N["inverse_temperature"] = [one.inverse_temperature for one in sequences]
        used_N["logprob_scale"] = [one.logprob_scale for one in sequences]
        used_N["state_slot"] = [one.state_slot for one in sequences]
        used_N["num_drafts"] = [chunk.num_drafts for chunk in chunks]
        used_N["next_token"] = [chunk.next_token for chunk in chunks]
        used_N["limit"] = [len(one.pages) * self.page_size for one in sequences]
        if chunks:  # NumPy does not broadcast an empty list to [0, M]
            used_N["pages"] = [one.page_table for one in sequences]
        slots_B[len(chunks) :] = self._empty
        return slots_BC


class Slots:
    """The slots of a step on the device."""

    def __init__(self, slots_BC: torch.Tensor) -> None:
        """``slots_BC``: the result of :meth:`HostSlots.fill`, on the device."""
        self.slots_BC = slots_BC

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return an integer field of every slot: int32 [B], a view."""
        return self.slots_BC[:, _COLUMNS[name]]

    @property
    def pages_BM(self) -> torch.Tensor:
        """The page tables, int32, a view."""
        return self.slots_BC[:, _PAGES:]

    def floats(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contiguous fp32 [B] ``inverse_temperature`` and ``logprob_scale``, by one copy."""
        columns = slice(_COLUMNS["inverse_temperature"], _COLUMNS["logprob_scale"] + 1)
        inverse_B, scale_B = self.slots_BC[:, columns].T.contiguous().view(torch.float32)
        return inverse_B, scale_B


class Choice(NamedTuple):
    """The token that is chosen after a chunk."""

    token: int
    logprob: float
    drafts: list[int]
    """Draft of the tokens after it; empty: there is none."""
    likeliest: dict[int, float]
    """The likeliest tokens at its position, with log-probabilities; empty: not asked for."""


def pack_choices(tokens_N: torch.Tensor, logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return tokens and log-probabilities as one tensor [2, N], in fp64, which holds both exactly.

    Drafts [K, N] in fp64 may be appended as further rows.
    """
    return torch.stack((tokens_N.double(), logprobs_N.double()))


def unpack_choices(choices_RN: torch.Tensor) -> list[Choice]:
    """Return the choice after each chunk, from the rows of :func:`pack_choices` and the drafts.

    The host waits here for the device.
    """
    return [
        Choice(int(token), logprob, [*map(int, drafts)], {})
        for token, logprob, *drafts in choices_RN.T.cpu().tolist()
    ]
