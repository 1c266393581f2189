"""Masks and weights of turns and records are obeyed or refused, and never ignored.

A turn's ``train`` is axolotl's, ``trainable`` the Tinker cookbook's, ``loss`` and ``loss_scale``
ms-swift's. ``train_detail`` is in axolotl's page on conversations, with spans of a turn.
"""

import json
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
        ("ignore", True),
        ("skip", "true"),
        ("train_on_inputs", False),
        ("only_last_turn_loss", True),
        ("label", False),
        ("label", "false"),
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


def test_masks_of_parts_are_told_to_be_written_as_segments():
    """axolotl's ``training_detail`` has spans of a turn, and its ``input_output`` has segments."""
    says = r"or, to learn some parts of a turn alone, write the whole text as `segments`, a list of"
    part = {"type": "text", "text": "b", "weight": 0}
    for turn in (
        *({**ANSWER, key: SPANS} for key in ("train_detail", "training_detail")),
        {**ANSWER, "content": [part]},
    ):
        with pytest.raises(BadLineError, match=says):
            learned({"messages": [USER, turn]})
    with pytest.raises(BadLineError, match=r"and leave this out$"):
        learned({"messages": [USER, {**ANSWER, "ignore": True}]})
    # The advice of the error is followed.
    texts = [("<|user|>q<|bot|>", False), ("Knock knock.", False), (" Who is there?", True)]
    segments = [{"label": label, "text": text} for text, label in texts]
    assert learned({"segments": segments}) == [" Who is there?"]


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
    "train_on_inputs": True,
    "train_on_prompt": "true",
    "mask_prompt": False,
    "mask_last": True,
}


@pytest.mark.parametrize("key", MASKS)
def test_masks_of_records_are_refused(key: str):
    """The names of lists are those of columns that TRL reads."""
    for record in ({"messages": [USER, ANSWER]}, {"text": "x"}, {"prompt": "x", "completion": "y"}):
        with pytest.raises(BadLineError, match=rf"`{key}` is .* write .weight.: 0 in records or"):
            RecordReader(ChatTemplate(CHATML, {})).documents({**record, key: MASKS[key]})


@pytest.mark.parametrize(
    "mask",
    ["System", "Assistant", "User,Assistant", "System, User", "user|tool", "Ann", "Ann,User"],
)
def test_a_mask_of_nemos_that_names_others_than_the_user_is_refused(mask: str):
    """NeMo learns all turns but those of the role in ``mask``. Here the assistant's alone are."""
    named = [{"from": "Ann", "value": "hm"}] if "Ann" in mask else []
    turns = [{"from": "User", "value": "q"}, *named, {"from": "Assistant", "value": "a"}]
    with pytest.raises(BadLineError, match=r"`mask` is .*; write .weight.: 0 in records or turns"):
        learned({"conversations": turns, "mask": mask, "system": "S"})
    with pytest.raises(BadLineError, match=r"`mask` is .*; write .weight.: 0 in records or turns"):
        learned({"conversations": json.dumps(turns), "mask": mask})
    for read in ("User", " human ", "User,Human", "<mask>", "a text of its own"):
        assert learned({"conversations": turns, "mask": read, "system": "S"}) == ["a"]
    # The advice of the error is followed: the record has no `mask`.
    assert learned({"conversations": turns, "system": "S"}) == ["a"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("only_last_turn_loss", True),  # Qwen-Coder's
        ("train_on_last", "True"),
        ("mask_history", True),  # LLaMA-Factory's
        ("train_on_history", False),
    ],
)
def test_a_record_that_asks_for_its_last_answer_is_told_of_the_setting(key: str, value: object):
    record = {"messages": [USER, ANSWER, USER, OTHER]}
    says = rf"`{key}` is {value!r}, .* is not read; set data.train_on last, or write .weight.: 0"
    with pytest.raises(BadLineError, match=says):
        learned({**record, key: value})
    (document,) = RecordReader(ChatTemplate(CHATML, {}), train_on="last").documents(
        {**record, key: value}
    )
    assert document.loss_spans is not None
    assert len(document.loss_spans) == 1
    other = {True: False, False: True, "True": "False"}[value]
    assert learned({**record, key: other}) == ["a", "b"]


@pytest.mark.parametrize("value", [False, 0])
def test_the_weight_of_xtuners_answers_is_obeyed(value: object):
    """Its documentation: an answer with ``output_with_loss`` false is not learned."""
    turns = [{"input": "q", "output": "a", "output_with_loss": value}, {"input": "q"}]
    turns[1] |= {"output": "b", "output_with_loss": True}
    assert learned({"conversation": turns}) == ["b"]
    with pytest.raises(BadLineError, match=r"output_with_loss is 0.5, and a weight is 0"):
        learned({"conversation": [{**turns[0], "output_with_loss": 0.5}]})
    with pytest.raises(BadLineError, match=r"loss_mask is \[0\], .* is not read"):
        learned({"conversation": [{"input": "q", "output": "a", "loss_mask": [0]}]})


@pytest.mark.parametrize("weight", ["no", "0.5", [0, 1], 0.5])
def test_weights_of_records_that_are_none_are_refused(weight: object):
    with pytest.raises(BadLineError, match=r"`weight` is .*, and a weight is 0"):
        learned({"messages": [USER, ANSWER], "weight": weight})


@pytest.mark.parametrize(
    "beside",
    [
        {"train": True, "loss": 0.7, "loss_weight": 1, "loss_mask": None},
        {"mask": "User", "attention_mask": [1, 1], "special_tokens_mask": [1, 0]},
        {"train_on_inputs": False, "mask_prompt": True, "last_loss": 0.3, "input_mask": [1]},
        {"loss_history": [0.3], "training_history": ["x"], "ignore": True, "label": "greeting"},
        {"trained_on": "a book", "training": {"steps": 0}, "weight": "5 kg", "training_steps": 3},
    ],
)
def test_fields_that_are_no_masks_change_nothing(beside: dict):
    """``mask`` of NeMo's chats names the role that is not learned; ``loss`` may be measured."""
    assert learned({"messages": [USER, ANSWER], **beside}) == ["a"]
    kind = {"label": "greeting", "ignore": False, "skip": 0}
    assert learned({"messages": [USER, {**ANSWER, **kind}]}) == ["a"]
    logged = {"logprobs": [0.1], "training_step": 3, "mask_token": "<mask>"}
    assert learned({"messages": [USER, {**ANSWER, **logged}]}) == ["a"]
