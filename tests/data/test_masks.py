"""Masks and weights of turns and records are obeyed or refused, and never ignored.

A turn's ``train`` is axolotl's, ``trainable`` the Tinker cookbook's, ``loss`` and ``loss_scale``
ms-swift's. ``train_detail`` is in axolotl's page on conversations, with spans of a turn.
"""

import re

import pytest

from moetrain.data.chat import CHATML, BadLineError, ChatTemplate
from moetrain.data.messages import read_messages
from moetrain.data.records import RecordReader

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}
SPANS = [{"begin_offset": 0, "end_offset": 0, "train": False}]


def learned(record: dict) -> list[str]:
    (document,) = RecordReader(ChatTemplate(CHATML, {})).documents(record)
    spans = document.loss_spans
    assert spans is not None
    return [document.text[a:b].removesuffix("<|im_end|>") for a, b in spans]


@pytest.mark.parametrize("value", [0, 0.0, False])
@pytest.mark.parametrize(
    "key", ["weight", "train", "training", "trainable", "loss", "loss_scale", "loss_weight"]
)
def test_weights_of_turns_are_obeyed(key: str, value: float):
    turns = [USER, {**ANSWER, key: value}, USER, {**OTHER, key: 1}]
    assert learned({"messages": turns}) == ["b"]
    with pytest.raises(BadLineError, match=rf"messages\[1\].{key} is 0.5, and a weight is 0 "):
        learned({"messages": [USER, {**ANSWER, key: 0.5}]})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_detail", SPANS),
        ("train_on_turn", False),
        ("train_on_this_turn", True),
        ("loss_mask", [0, 1]),
        ("loss_mask", 0),
        ("lossMask", "false"),
        ("is_masked", True),
        ("ignore_loss", True),
        ("token_weights", [0.5]),
    ],
)
def test_other_masks_of_turns_are_refused(key: str, value: object):
    for turn in (
        {**ANSWER, key: value},
        {"from": "gpt", "value": "a", key: value},
        {"role": "function_call", "content": '{"name": "x"}', key: value},
    ):
        problem = rf"messages\[1\].{key} is {re.escape(repr(value))}, .* is not read; write .weight"
        with pytest.raises(BadLineError, match=problem):
            learned({"messages": [USER, turn]})
        assert read_messages([USER, turn], strict=False)  # as a server reads it
    assert learned({"messages": [USER, {**ANSWER, key: None}]}) == ["a"]


def test_masks_of_parts_are_refused():
    """axolotl reads ``train`` and ``weight`` of the parts of a content."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "train": False}]
    with pytest.raises(BadLineError, match=r"`train` of a part of messages\[1\].content is False"):
        learned({"messages": [USER, {**ANSWER, "content": parts}]})
    parts[1]["train"] = True
    assert learned({"messages": [USER, {**ANSWER, "content": parts}]}) == ["ab"]


MASKS = {
    "train": False,
    "training": "false",
    "loss": False,
    "loss_mask": [0, 1],
    "completion_mask": [1],
    "assistant_masks": [0],
    "loss_weight": 0.5,
    "sample_weight": 0,
    "mask": "Assistant",
}


@pytest.mark.parametrize("key", MASKS)
def test_masks_of_records_are_refused(key: str):
    """The names of lists are those of columns that TRL reads."""
    for record in ({"messages": [USER, ANSWER]}, {"text": "x"}, {"prompt": "x", "completion": "y"}):
        with pytest.raises(BadLineError, match=rf"`{key}` is .* write .weight.: 0 in records or"):
            RecordReader(ChatTemplate(CHATML, {})).documents({**record, key: MASKS[key]})


@pytest.mark.parametrize("weight", ["0", [0, 1], 0.5])
def test_weights_of_records_that_are_none_are_refused(weight: object):
    with pytest.raises(BadLineError, match=r"`weight` is .*, and a weight is 0"):
        learned({"messages": [USER, ANSWER], "weight": weight})


@pytest.mark.parametrize(
    "beside",
    [
        {"train": True, "loss": 0.7, "loss_weight": 1, "loss_mask": None},
        {"mask": "User", "attention_mask": [1, 1], "special_tokens_mask": [1, 0]},
        {"trained_on": "a book", "training": {"steps": 0}, "weight": "5 kg", "training_steps": 3},
    ],
)
def test_fields_that_are_no_masks_change_nothing(beside: dict):
    """``mask`` of NeMo's chats names the role that is not learned; ``loss`` may be measured."""
    assert learned({"messages": [USER, ANSWER], **beside}) == ["a"]
    logged = {"logprobs": [0.1], "training_step": 3, "mask_token": "<mask>"}
    assert learned({"messages": [USER, {**ANSWER, **logged}]}) == ["a"]
