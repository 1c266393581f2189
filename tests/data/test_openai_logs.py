"""Logs of OpenAI's APIs become the conversations that they record, or are refused with a remedy.

Records are those of OpenAI's reference of the Responses API. The right texts are transformers'
renderings of OpenAI's messages.
"""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.data.chat import CHATML, BadLineError, ChatTemplate
from moetrain.data.records import RecordReader
from moetrain.data.warned import SEEN

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
FUNCTION = {"name": "rain", "description": "says whether it rains", "parameters": {}}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "rain"}
CALL |= {"arguments": '{"where": "Köln"}', "status": "completed"}
SAID = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant"}
SAID |= {"content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]}
THOUGHT = {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "error": None,
    "instructions": None,
    "input": "q",
    "output": [SAID],
    "previous_response_id": None,
    "reasoning": {"effort": "high", "summary": "auto"},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "metadata": {},
}
THEIR_CALL = {
    "type": "function",
    "function": {"name": "rain", "arguments": {"where": "Köln"}},
}


def reader() -> RecordReader:
    return RecordReader(ChatTemplate(CHATML, {}))


def theirs(*messages: dict, tools: list | None = None) -> str:
    rendered, _ = render_jinja_template([[*messages]], tools=tools, chat_template=CHATML)
    return rendered[0].rstrip()


def parts(text: str, kind: str = "input_text") -> list[dict]:
    return [{"type": kind, "text": text}]


RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "no"}
READ: dict[str, tuple[dict[str, Any], list[dict]]] = {
    "a text": ({}, [USER, ANSWER]),
    "a message": ({"input": [{"role": "user", "content": parts("q")}]}, [USER, ANSWER]),
    "instructions": (
        {"instructions": "Be brief."},
        [{"role": "system", "content": "Be brief."}, USER, ANSWER],
    ),
    "a summary": ({"output": [THOUGHT, SAID]}, [USER, {**ANSWER, "reasoning_content": "t"}]),
    "a thought": (
        {"output": [{**THOUGHT, "content": parts("so", "reasoning_text")}, SAID]},
        [USER, {**ANSWER, "reasoning_content": "so"}],
    ),
    "a hidden thought": (
        {"output": [{**THOUGHT, "summary": [], "encrypted_content": "gAAA"}, SAID]},
        [USER, ANSWER],
    ),
    "calls": (
        {"output": [THOUGHT, CALL, {**CALL, "call_id": "call_2"}]},
        [USER, {"role": "assistant", "reasoning_content": "t", "tool_calls": [THEIR_CALL] * 2}],
    ),
    "a result": (
        {"input": [{"role": "user", "content": "q"}, THOUGHT, CALL, RESULT]},
        [
            USER,
            {"role": "assistant", "reasoning_content": "t", "tool_calls": [THEIR_CALL]},
            {"role": "tool", "content": "no"},
            ANSWER,
        ],
    ),
    "turns": (
        {"input": [{"role": "user", "content": "q"}, SAID, {"role": "user", "content": "r"}]},
        [USER, ANSWER, {"role": "user", "content": "r"}, ANSWER],
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_response_is_read_as_its_conversation(name: str):
    beside, messages = READ[name]
    (document,) = reader().documents({**RESPONSE, **beside})
    assert document.text == theirs(*messages)
    # Only the output is learned.
    answered = theirs(*messages[:-1]) + "\n<|im_start|>assistant\n"
    assert [start for start, _ in document.loss_spans or ()] == [len(answered)]


def test_the_tools_of_a_response_are_shown():
    tools = [{"type": "function", **FUNCTION, "strict": True}]
    (document,) = reader().documents({**RESPONSE, "tools": tools, "output": [CALL]})
    shown = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    said = {"role": "assistant", "tool_calls": [THEIR_CALL]}
    assert document.text == theirs(USER, said, tools=shown)


def test_settings_of_a_response_are_not_named_as_unread():
    record = {**RESPONSE, "comment": "A shy girl."}
    assert reader().unread(record, reader().documents(record)) == ["comment"]


def test_a_summary_that_is_learned_as_a_thought_is_said(caplog):
    SEEN.clear()
    reader().documents({**RESPONSE, "output": [{**THOUGHT, "summary": []}, SAID]})
    assert "summaries" not in caplog.text
    reader().documents({**RESPONSE, "output": [THOUGHT, SAID]})
    assert "`output` of records has summaries of thoughts, which are learned as the" in caplog.text


@pytest.mark.parametrize(
    ("beside", "says"),
    [
        (
            {"previous_response_id": "resp_0"},
            "`previous_response_id` is 'resp_0': what was said before .*; write whole conversa",
        ),
        ({"conversation": {"id": "conv_1"}}, "`conversation` is .*; write whole conversations"),
        ({"status": "incomplete"}, "`status` is 'incomplete': the answer is not whole; leave such"),
        ({"input": None}, "without the `input` of its request: .*; write it beside `output`"),
        ({"output": [THOUGHT]}, "`output` has no answer: .*; leave such records out"),
        (
            {"output": [{"type": "web_search_call", "id": "ws_1"}, SAID]},
            r"output\[0\] is neither a message nor .* a function: .*; write the conversation as `m",
        ),
        (
            {"output": [{**SAID, "content": [{"type": "refusal", "refusal": "No."}]}]},
            r"completion\[0\]\.content has a part that is no text: .*'No\.'.*; give texts alone",
        ),
    ],
    ids=str,
)
def test_a_response_without_a_whole_conversation_is_refused(beside: dict, says: str):
    with pytest.raises(BadLineError, match=says):
        reader().documents({**RESPONSE, **beside})


def test_settings_of_a_request_are_no_text_and_no_thought():
    settings = {key: RESPONSE[key] for key in ("text", "reasoning")}
    record = {"messages": [USER, ANSWER], **settings}
    assert reader().documents(record) == reader().documents({"messages": [USER, ANSWER]})
    with pytest.raises(BadLineError, match="`input` seems to be a question; write its turns as `m"):
        reader().documents({"input": [USER], **settings})
    with pytest.raises(BadLineError, match=r"`reasoning` may be .*: 'so it is'; write it as `r"):
        reader().documents({"messages": [USER, ANSWER], "reasoning": {"text": "so it is"}})
