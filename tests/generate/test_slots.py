"""Slots of a step: the device reads the fields that the host writes by name."""

import numpy as np
import pytest
import torch

from moetrain.generate.request import Request, SamplingParams
from moetrain.generate.scheduler import Running
from moetrain.generate.slots import (
    HostSlots,
    Slots,
    empty_slots,
    pack_choices,
    slot_dtype,
    unpack_choices,
)

MAX_PAGES = 3


def running(**params):
    request = Request("a", (5, 6, 7, 8), SamplingParams(**params))
    sequence = Running(request, 0, MAX_PAGES, stream=-7)
    sequence.add_pages([9, 4])
    sequence.state_slot = 2
    sequence.num_read = 3
    return sequence


def test_slots_have_the_fields_of_their_chunks():
    sequence = running(temperature=0.5, tempered=True)
    sequence.drafts = [20, 21]
    slots_BC = HostSlots(2, MAX_PAGES, pinned=False).fill(sequence.chunks(1), 5)
    assert (slots_BC.dtype, slots_BC.shape) == (torch.int32, (5, 9 + MAX_PAGES))
    slots = Slots(slots_BC)
    found = {
        "token": [8, 20, 21, 0, 0],
        "position": [3, 4, 5, -1, -1],
        "stream": [-7, -7, -7, 0, 0],
        "state_slot": [2, 2, 2, 0, 0],
        "num_drafts": [0, 1, 2, 0, 0],
        "next_token": [-1, -1, -1, 0, 0],
        "limit": [4, 4, 4, 0, 0],
    }
    assert {name: slots[name].tolist() for name in found} == found
    inverse_B, scale_B = slots.floats()
    assert inverse_B.tolist() == scale_B.tolist() == [2.0, 2.0, 2.0, 0.0, 0.0]
    assert slots.pages_BM.tolist() == [[9, 4, 0]] * 3 + [[0, 0, 0]] * 2


def test_a_prompts_chunk_knows_the_token_after_it():
    sequence = running()
    sequence.num_read = 1
    slots = Slots(HostSlots(2, MAX_PAGES, pinned=False).fill(sequence.chunks(2), 1))
    names = ("token", "position", "next_token", "num_drafts")
    assert [slots[name].tolist() for name in names] == [[7], [2], [8], [0]]


def test_slots_are_empty_where_an_earlier_step_had_chunks():
    host = HostSlots(2, MAX_PAGES, pinned=False)
    host.fill(running().chunks(1) * 4, 4)
    assert torch.equal(host.fill([], 4), empty_slots(4, MAX_PAGES))


@pytest.mark.parametrize("max_pages", [1, 640])
def test_a_slot_is_a_row_of_int32(max_pages):
    dtype = slot_dtype(max_pages)
    assert dtype.itemsize == 4 * (9 + max_pages)
    assert {dtype[i].base.itemsize for i in range(len(dtype))} == {4}
    assert dtype["pages"].base == np.int32


def test_choices_come_back_as_they_were_packed():
    tokens_N, logprobs_N = torch.tensor([2**31 - 1, 7]), torch.tensor([-0.1, -1e30])
    packed_RN = pack_choices(tokens_N, logprobs_N)
    drafts_KN = torch.tensor([[1, 2], [3, 4], [5, 6]])
    first, second = unpack_choices(torch.cat((packed_RN, drafts_KN.double())))
    assert (first.token, first.logprob) == (2**31 - 1, logprobs_N[0].item())
    assert (second.token, second.logprob) == (7, logprobs_N[1].item())
    assert (first.drafts, second.drafts, first.likeliest) == ([1, 3, 5], [2, 4, 6], {})
    assert [one.drafts for one in unpack_choices(packed_RN)] == [[], []]
