"""Logs of OpenAI's APIs become the conversations that they record, or are refused with a remedy.

Records are those of OpenAI's and Anthropic's references. The right texts are transformers'
renderings of OpenAI's messages.
"""

import json
import re
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


# ---- responses without their question -----------------------------------------------------------

COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {**ANSWER, "refusal": None}, "finish_reason": "stop"}],
}
OF_ANTHROPIC = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "a"}]}
FAILED = {"status_code": 429, "request_id": "req_2", "body": {"error": {"message": "too many"}}}
FROM_INPUT = "write the question, which the batch's input file has under the same `custom_id`, and "
SERVED: list[tuple[dict[str, Any], str]] = [
    (
        {"custom_id": "1", "response": {"status_code": 200, "body": COMPLETION}, "error": None},
        f"{FROM_INPUT}`response.body.choices[0].message`, which is a message of the assistant, as "
        "`messages`; leave out records whose `status_code` is not 200",
    ),
    (
        {"custom_id": "1", "response": FAILED},
        "`response.status_code` is 429: it has no answer; leave such records out",
    ),
    (
        {"custom_id": "1", "result": {"type": "succeeded", "message": OF_ANTHROPIC}},
        f"{FROM_INPUT}`result.message`, which is a message of the assistant, as `messages`",
    ),
    (
        {"custom_id": "1", "result": {"type": "expired"}},
        "it is a result of a batch without an answer; leave such records out",
    ),
    (COMPLETION, "write the question, which is not in the record, and `choices[0].message`, which"),
    (
        {"question": "q", "response": COMPLETION},
        "write `question` as `instruction` and `response.choices[0].message.content` as `output`",
    ),
]


@pytest.mark.parametrize(("record", "says"), SERVED, ids=str)
def test_a_response_of_a_server_says_where_its_message_is(record: dict, says: str):
    with pytest.raises(BadLineError, match=re.escape(f"; {says}")):
        reader().documents(record)


def test_what_the_line_on_a_batch_advises_is_learned():
    asked = {"custom_id": "1", "body": {"model": "m", "messages": [USER]}}
    with pytest.raises(BadLineError, match=r"write `body\.messages` and after it the answer, as"):
        reader().documents(asked)
    messages = [*asked["body"]["messages"], COMPLETION["choices"][0]["message"]]
    assert reader().documents({"messages": messages})[0].text == theirs(USER, ANSWER)
    (document,) = reader().documents({"messages": [USER, OF_ANTHROPIC]})
    assert document.text == theirs(USER, ANSWER)


ENVELOPES: dict[str, tuple[object, str]] = {
    "body": (COMPLETION, "choices[0].message"),
    "HTTP": ({"status_code": 200, "body": COMPLETION}, "body.choices[0].message"),
    "older": ({"choices": [{"text": "a", "finish_reason": "stop"}]}, "choices[0].text"),
}


@pytest.mark.parametrize("write", [json.dumps, str], ids=["JSON", "Python"])
@pytest.mark.parametrize("name", ENVELOPES)
def test_an_answer_that_is_the_text_of_a_response_is_warned_of(name: str, write, caplog):
    value, place = ENVELOPES[name]
    text = write(value)
    forms: list[dict[str, Any]] = [
        {"instruction": "q", "output": text},
        {"prompt": "q", "completion": text},
        {"messages": [USER, {**ANSWER, "content": text}]},
        {"messages": [USER, {**ANSWER, "reasoning_content": "t", "content": text}]},
        {"question": "q", "answer": text},
    ]
    for record in forms:
        SEEN.clear()
        caplog.clear()
        reader().documents(record)
        assert f"write the message in its `{place}` as the answer" in caplog.text


def test_json_that_is_no_response_is_not_warned_of(caplog):
    SEEN.clear()
    for said in ({"assistant": "a"}, {"messages": [USER, ANSWER]}, {"status_code": 200}):
        reader().documents({"instruction": "q", "output": json.dumps(said)})
    reader().documents({"text": json.dumps(COMPLETION)})
    reader().documents({"instruction": "q", "output": '{"finish_reason": '})
    assert caplog.text == ""
