"""Records of public data sets, under their own field names."""

import logging

import pytest

from moetrain.data.chat import ChatTemplate
from moetrain.data.messages import BadLineError
from moetrain.data.records import RecordReader
from moetrain.data.warned import SEEN

TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }} {% endif %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "q"), ("assistant", "good"), ("assistant", "bad"))
)
ASKED, SAID = "<user>q<end><assistant>", "good<end>"


def read(record, pairs=False, **how):
    form = {"form": "preference", "reads_pairs": True} if pairs else {}
    return RecordReader(ChatTemplate(TEMPLATE, {}), **form, **how).documents(record)


def parts(document):
    """Return a document's text before the learned part, and the learned part."""
    ((start, stop),) = document.loss_spans
    assert stop == len(document.text)
    return document.text[:start], document.text[start:]


@pytest.mark.parametrize(
    ("record", "asked"),
    [
        ({"question": "q", "answer": "good"}, ASKED),
        ({"type": "x", "query": "q", "original_question": "o", "response": "good"}, ASKED),
        (
            {"inputs": "q", "targets": "good", "language_code": "eng", "annotation_type": "x"},
            ASKED,
        ),
        (
            {
                **{"inputs": [3, 1], "inputs_pretokenized": "q"},
                **{"targets": [4, 1], "targets_pretokenized": "good"},
            },
            ASKED,
        ),
        ({"Question": "q", "Answer": "good"}, ASKED),
        ({"system_prompt": "s", "question": "q", "response": "good"}, f"<system>s<end>{ASKED}"),
        ({"system_prompt": "", "question": "q", "response": "good"}, ASKED),
        (
            {"instruction": "q", "context": "c", "response": "good", "category": "qa"},
            "<user>q\n\nc<end><assistant>",
        ),
        ({"conversation_id": 1, "conversation": [USER, GOOD], "turn": 1}, ASKED),
        ({"trajectory": [USER, GOOD], "exit_status": "ok"}, ASKED),
        ({"system_prompt": "s", "messages": [USER, GOOD]}, f"<system>s<end>{ASKED}"),
        ({"system": "s", "messages": [USER, GOOD]}, f"<system>s<end>{ASKED}"),
        (
            {"system": "s", "messages": [{"role": "system", "content": "s"}, USER, GOOD]},
            f"<system>s<end>{ASKED}",
        ),
        (
            {
                "system_prompt": "s",
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "bing", "value": "good"},
                ],
            },
            f"<system>s<end>{ASKED}",
        ),
        (
            {"messages": [USER, GOOD], "functions": [{"name": "f"}]},
            f"f {ASKED}",
        ),
    ],
    ids=str,
)
def test_columns_of_single_answers_are_read(record, asked):
    (document,) = read(record)
    assert parts(document) == (asked, SAID)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, GOOD], "rejected_response": "bad"},
        {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
        {"query": "q", "response": "good", "rejected_response": "bad"},
        {
            "input": {"messages": [USER], "tools": []},
            "preferred_output": [GOOD],
            "non_preferred_output": [BAD],
        },
        {"messages": [USER], "chosen_response": GOOD, "rejected_response": BAD},
        {"messages": [USER, GOOD], "rejected_message": BAD},  # OpenPipe's
    ],
    ids=str,
)
def test_columns_of_pairs_are_read(record):
    chosen, rejected = read(record, pairs=True)
    assert parts(chosen) == (ASKED, SAID)
    assert parts(rejected) == (ASKED, "bad<end>")


def test_next_token_learns_the_messages_of_swifts_pairs():
    record = {"messages": [USER, GOOD, USER, GOOD], "rejected_response": "bad"}
    (document,) = read(record)
    assert [document.text[a:b] for a, b in document.loss_spans] == [SAID, SAID]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"question": "q", "answer": "good", "context": {"x": ["y"]}}, "no known form"),
        ({"question": "q", "choices": ["a", "b"], "answer": "a"}, "no known form"),
        ({"question": "q", "A": "x", "B": "y", "answer": "A"}, "no known form"),
        ({"question": "q", "cot": "thought", "answer": "a"}, "no known form"),
        ({"Question": "q", "Complex_CoT": "thought", "Response": "a"}, "`Complex_CoT` may be a"),
        ({"definition": "d", "inputs": "q", "targets": "a"}, "`definition` may be a part of the"),
        ({"inputs": [3, 1], "inputs_pretokenized": "q", "targets": [4, 1]}, "no known form"),
        ({"question": "q", "answer": True}, "no known form"),
        ({"system": "a", "system_prompt": "b", "messages": [USER, GOOD]}, "`system_prompt` differ"),
        ({"question": "q", "answer": "a", "response": "b"}, "no known form"),
        ({"text": "q", "role": "prompter", "parent_id": None}, "a turn of a dialogue"),
        ({"text": "q", "role": "prompter", "message_id": "1"}, "a turn of a dialogue"),
    ],
    ids=str,
)
def test_columns_that_would_be_lost_are_refused(record, says):
    with pytest.raises(BadLineError, match=says):
        read(record)


def test_a_text_that_is_named_stays_one():
    (document,) = read({"question": "q", "answer": "good"}, text_field="answer")
    assert (document.text, document.loss_spans) == ("good", None)


SWITCHED = (
    "{# note #}plain{%- set kept = 'x' %}{%- macro show(name) %}{{ name | trim }}{%- endmacro %}"
    "{%- for m in messages %}"
    "{{- m.role + m.title|default('') + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}assistant{%- if enable_thinking is defined and "
    "enable_thinking is false %}<think></think>{%- endif %}{%- endif %}"
)


@pytest.mark.parametrize("value", [True, False, "False"])
def test_a_column_with_the_name_of_a_variable_is_named(value, caplog):
    """verl's files for fine-tuning have ``enable_thinking`` so, and pass it to the template."""
    SEEN.clear()
    reader = RecordReader(ChatTemplate(SWITCHED, {}))
    record = {"messages": [USER, GOOD]}
    right = reader.documents(record)
    assert reader.documents({**record, "enable_thinking": value}) == right
    says = "`enable_thinking` of records is not given to the chat template, which reads a variable"
    assert says in caplog.text
    caplog.clear()
    SEEN.clear()
    kwargs = {"chat_template_kwargs": {"enable_thinking": value}}
    reader.documents({**record, **kwargs, "enable_thinking": value})
    for key in ("title", "kept", "note", "plain", "role", "m", "name", "trim", "default", "source"):
        reader.documents({**record, key: "x"})
    assert "is not given to the chat template" not in caplog.text


@pytest.mark.parametrize(
    "record", [{"prompt": "q", "completion": "a"}, {"instruction": "q", "output": "a"}], ids=str
)
def test_a_record_that_goes_on_from_another_is_named(record, caplog):
    """H2O LLM Studio chains records by a column with the id of the parent."""
    SEEN.clear()
    reader = RecordReader(ChatTemplate(TEMPLATE, {}))
    right = reader.documents(record)
    for value in (None, ""):
        assert reader.documents({**record, "parent_id": value}) == right
    assert not caplog.text
    assert reader.documents({**record, "parent_id": "1"}) == right
    assert "`parent_id` of records names the turn before them: each is learned alone" in caplog.text


def test_variables_that_the_template_does_not_read_are_named_once(caplog):
    kwargs = {"custom": "x", "unused": False}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            read({"messages": [USER, GOOD], "chat_template_kwargs": kwargs})
        asked = {"custom": "x", "reasoning_effort": "high"}
        ChatTemplate(TEMPLATE, {}).prompt([USER], asked)
    said = [r.getMessage() for r in caplog.records if "does not read" in r.getMessage()]
    assert [each.split()[6] for each in said] == ["'custom',", "'reasoning_effort',"]
