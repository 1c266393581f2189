"""Calls, their results and declared tools: each is learned once, and as written.

The right values are transformers' renderings of OpenAI's messages.
"""

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.data.chat import CHATML, BadLineError, ChatTemplate
from moetrain.data.records import RecordReader
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.data.warned import SEEN
from moetrain.rl.envs import Prompts

WITH_IDS = CHATML.replace(
    "{{- message.content or '' }}", "{{- message.tool_call_id }}{{- message.content or '' }}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"says {name}",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
        },
    }
    for name in ("rain", "wind")
]
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SIGNATURES = {
    "json": json.dumps(TOOLS),
    "python": str(TOOLS),
    "a line each": "\n".join(json.dumps(tool["function"], sort_keys=True) for tool in TOOLS),
}


def texts(record: dict, template: str = CHATML) -> list[str]:
    return [
        document.text for document in RecordReader(ChatTemplate(template, {})).documents(record)
    ]


def theirs(messages: list[dict], tools: list[dict] | None = None, template: str = CHATML) -> str:
    settings: dict[str, Any] = {"tools": tools, "chat_template": template}
    rendered, _ = render_jinja_template([messages], **settings)
    return rendered[0].rstrip()


def calls(*ids: str | None) -> dict:
    """Return a turn that calls a tool once for each of ``ids``."""
    made = [
        {"type": "function", "function": {"name": "rain", "arguments": {"name": f"{i}"}}}
        | ({"id": each} if each else {})
        for i, each in enumerate(ids)
    ]
    return {"role": "assistant", "tool_calls": made}


def result(call_id: str | None, text: str) -> dict:
    return {"role": "tool", "content": text} | ({"tool_call_id": call_id} if call_id else {})


# ---- tools that the system message already lists
# --------------------------------------------------


def hermes(signatures: str) -> list[dict]:
    said = f"You call functions. <tools> {signatures} </tools> Write {{'name': <function-name>}}."
    call = '<tool_call>\n{"name": "rain", "arguments": {}}\n</tool_call>'
    turns = [("system", said), ("human", "q"), ("gpt", call)]
    return [{"from": role, "value": text} for role, text in turns]


@pytest.mark.parametrize("signatures", SIGNATURES.values(), ids=SIGNATURES)
def test_tools_of_the_systems_turn_are_shown_once(
    signatures: str, caplog: pytest.LogCaptureFixture
):
    record = {"conversations": hermes(signatures), "tools": json.dumps(TOOLS)}
    SEEN.clear()
    with caplog.at_level("WARNING", logger="moetrain"):
        found = texts(record) + texts(record)
    roles = ("system", "user", "assistant")
    pairs = zip(roles, record["conversations"], strict=True)
    turns = [{"role": role, "content": turn["value"]} for role, turn in pairs]
    assert found == [theirs(turns)] * 2
    assert [r.getMessage() for r in caplog.records if "shown once" in r.getMessage()]
    assert caplog.text.count("shown once") == 1
    prompt = Prompts(ByteTokenizer(), True).encode(turns[:2], {"tools": TOOLS})
    assert bytes(prompt).decode() == theirs(turns[:2]) + "\n<|im_start|>assistant\n"


def test_a_system_that_lists_other_tools_is_refused():
    record = {"conversations": hermes(json.dumps(TOOLS[:1])), "tools": TOOLS}
    with pytest.raises(
        BadLineError, match=r"lists other tools than `tools`, which has 'wind'; leave"
    ):
        texts(record)


@pytest.mark.parametrize(
    "said", ['Write {"name": "rain", "arguments": {}} and {"name": "wind"}.', "Say rain or wind."]
)
def test_a_system_that_names_tools_does_not_declare_them(said: str):
    turns = [{"role": "system", "content": said}, USER, ANSWER]
    assert texts({"messages": turns, "tools": TOOLS}) == [theirs(turns, TOOLS)]


def test_tools_with_names_that_are_none_are_shown():
    """A template may write such tools as a whole; nothing compares their names."""
    tools = [{"type": "function", "function": {"name": {"a": 1}}}, {"type": "x"}]
    assert texts({"messages": [USER, calls("c")], "tools": tools}) == [
        theirs([USER, calls("c")], tools)
    ]


# ---- results ------------------------------------------------------------------------------------

ORDERED = [USER, calls("c1", "c2"), result("c1", "one"), result("c2", "two"), ANSWER]


def test_results_are_in_the_order_of_their_calls():
    given = [*ORDERED[:2], ORDERED[3], ORDERED[2], ANSWER]
    assert texts({"messages": given, "tools": TOOLS}) == [theirs(ORDERED, TOOLS)]
    prompt = ChatTemplate(CHATML, {}).prompt(given[:4], {"tools": TOOLS})
    assert prompt.startswith(theirs(ORDERED[:4], TOOLS))


def test_results_stay_where_they_are_if_the_template_writes_their_ids():
    given = [*ORDERED[:2], ORDERED[3], ORDERED[2], ANSWER]
    found = texts({"messages": given, "tools": TOOLS}, WITH_IDS)
    assert found == [theirs(given, TOOLS, WITH_IDS)]


@pytest.mark.parametrize(
    "given",
    [
        [USER, calls(None, None), result(None, "one"), result(None, "two"), ANSWER],
        [USER, calls("c", "c"), result("c", "one"), result("c", "two"), ANSWER],
        [USER, calls("c1", "c2"), result("c1", "one"), ANSWER],
        [USER, calls("c1"), result("x", "one"), ANSWER],
    ],
    ids=["no ids", "one id", "a result is missing", "one call"],
)
def test_results_that_say_nothing_else_follow_the_calls(given: list[dict]):
    assert texts({"messages": given, "tools": TOOLS}) == [theirs(given, TOOLS)]


@pytest.mark.parametrize(
    ("results", "says"),
    [
        (["c2"], r"the results of the calls of messages\[1\] are \['c2'\], and the calls are"),
        (["c1", "c1"], r"the results of the calls of messages\[1\] are \['c1', 'c1'\]"),
        (["c1", "x"], r"messages\[3\]\.tool_call_id is 'x', which names no call of messages\[1\]"),
    ],
)
def test_results_of_no_call_are_refused(results: list[str], says: str):
    given = [USER, calls("c1", "c2"), *(result(each, "r") for each in results), ANSWER]
    with pytest.raises(BadLineError, match=says):
        texts({"messages": given, "tools": TOOLS})
    # A server answers such a request.
    assert "<|im_start|>tool\nr" in ChatTemplate(CHATML, {}).prompt(given[:-1])


@pytest.mark.parametrize("key", ["tool_use_id", "call_id", "toolUseId", "toolCallId", "id"])
def test_ids_of_results_have_many_names(key: str):
    """Anthropic's, OpenAI's responses', Bedrock's and the AI SDK's. Some have ``id`` as well."""
    results = [{"role": "tool", "content": x, key: i} for i, x in (("c2", "two"), ("c1", "one"))]
    for template in (CHATML, WITH_IDS):
        right = ORDERED if template == CHATML else [*ORDERED[:2], *reversed(ORDERED[2:4]), ANSWER]
        found = texts({"messages": [USER, calls("c1", "c2"), *results, ANSWER]}, template)
        assert found == [theirs(right, template=template)]
    if key != "id":
        strange = [results[0], {**results[1], key: "x"}]
        with pytest.raises(BadLineError, match=r"tool_call_id is 'x', which names no call"):
            texts({"messages": [USER, calls("c1", "c2"), *strange, ANSWER]})


def test_ids_of_calls_have_many_names():
    """An item of OpenAI's responses has an ``id`` of its own."""
    both = calls("c1", "c2")["tool_calls"]
    for key, own in (("call_id", {"id": "fc_1"}), ("toolUseId", {})):
        turn = {"role": "assistant", "tool_calls": [{**x, **own, key: x["id"]} for x in both]}
        given = [USER, turn, ORDERED[3], ORDERED[2], ANSWER]
        assert texts({"messages": given}) == [theirs(ORDERED)]


def test_a_second_result_of_one_call_is_refused():
    given = [USER, calls("c1"), result("c1", "one"), result("c2", "two"), ANSWER]
    with pytest.raises(BadLineError, match=r"messages\[3\]\.tool_call_id is 'c2', which names no"):
        texts({"messages": given})


@pytest.mark.parametrize(
    ("said", "is_named"),
    [
        ("I look.", True),
        ("I look (at the sky).", True),
        (None, True),
        ("<tool_call>{}</tool_call>", False),
        ("```\nrain\n```", False),
        ("rain(3)", False),
        ("Action: rain", False),
    ],
)
@pytest.mark.parametrize(("call_id", "name"), [("c", "id 'c'"), (None, "text 'r'")])
def test_a_result_behind_a_turn_without_a_call_is_named(
    said: str | None, is_named: bool, call_id: str | None, name: str, caplog
):
    """Without ``said``, the result stands behind the question."""
    SEEN.clear()
    before = [] if said is None else [{**ANSWER, "content": said}]
    given = [USER, *before, result(call_id, "r"), ANSWER]
    assert texts({"messages": given}) == [theirs(given)]
    assert (f"such as that with the {name}: they are shown as they" in caplog.text) is is_named


# ---- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "warns"),
    [
        ({"messages": [USER, calls("c")]}, True),
        ({"messages": [USER, calls("c")], "tools": []}, True),
        ({"messages": [USER, calls("c")], "tools": TOOLS[1:]}, True),
        ({"messages": [USER, calls("c")], "tools": TOOLS}, False),
        ({"messages": [{"role": "system", "content": "rain(name)"}, USER, calls("c")]}, False),
        ({"messages": [USER, {**calls("c"), "weight": 0}, result("c", "r"), ANSWER]}, False),
    ],
    ids=["no tools", "empty", "others", "declared", "in the system's turn", "not learned"],
)
def test_calls_of_tools_that_are_not_declared_are_named_once(
    record: dict, warns: bool, caplog: pytest.LogCaptureFixture
):
    SEEN.clear()
    with caplog.at_level("WARNING", logger="moetrain"):
        assert texts(record) == texts(record)
    assert caplog.text.count("call a tool that they do not declare, such as 'rain'") == warns


@pytest.mark.parametrize("before", [[], [{"from": "gpt", "value": "Let me see."}]])
def test_a_thought_before_a_call_is_reasoning(before: list[dict]):
    """The turns are LLaMA-Factory's ``function_call`` turns."""
    call = json.dumps({"name": "rain", "arguments": {"name": "x"}})
    turns = [
        {"from": "human", "value": "q"},
        *before,
        {"from": "function_call", "value": f"<think>\nhm\n</think>\n\n{call}"},
        {"from": "observation", "value": "no"},
        {"from": "gpt", "value": "a"},
    ]
    function = {"name": "rain", "arguments": {"name": "x"}}
    calling = {
        "role": "assistant",
        "reasoning_content": "hm",
        "tool_calls": [{"function": function}],
    }
    said = [{"role": "assistant", "content": turn["value"]} for turn in before]
    messages = [USER, *said, calling, {"role": "tool", "content": "no"}, ANSWER]
    found = texts({"conversations": turns, "tools": json.dumps(TOOLS)})
    assert found == [theirs(messages, TOOLS)]


def test_an_empty_thought_before_a_call_is_none():
    call = {"from": "function_call", "value": '<think>\n\n</think>\n\n{"name": "rain"}'}
    asked = {"from": "human", "value": "q"}
    calling = [{"function": {"name": "rain", "arguments": {}}}]
    messages = [USER, {"role": "assistant", "tool_calls": calling}]
    assert texts({"conversations": [asked, call], "tools": TOOLS}) == [theirs(messages, TOOLS)]
