"""Messages in every form of users, under templates that take different forms.

The right values are transformers' renderings of OpenAI's messages, in the form that a template
takes.
"""

import json
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moetrain.config import Config, ConfigError
from moetrain.data.chat import CHATML, BadLineError, ChatTemplate
from moetrain.data.messages import read_messages
from moetrain.data.records import RecordReader
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.data.warned import SEEN
from moetrain.http.protocol import Chat
from moetrain.rl.envs import Prompts
from moetrain.rl.envs.shipped import Jsonl

_TURNS = """\
{%- if tools %}{{ 'tools: ' ~ (tools | tojson) }}{% endif %}
{%- for m in messages %}{% if m.role in ('system', 'user', 'tool') %}
{{- '<' ~ m.role ~ '>' ~ m.content }}{% elif m.role == 'assistant' %}{{ '<assistant>' }}
{%- if m.reasoning_content and loop.last %}{{ '<think>' ~ m.reasoning_content ~ '</think>' }}
{%- endif %}CALLS{{ '<end>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
_CALLS = "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '[' ~ c.function.name }}CALL"
_CALLS += "{{ ']' }}{% endfor %}"
# Published templates differ: JSON (Qwen2.5, Llama 3.1, GPT-OSS), each argument (Qwen3.5, GLM,
# Nemotron), JSON or text (Qwen3), text (DeepSeek).
TEMPLATES = {
    "json": _TURNS.replace("CALLS", _CALLS.replace("CALL", "{{ c.function.arguments | tojson }}")),
    "items": _TURNS.replace(
        "CALLS",
        _CALLS.replace(
            "CALL",
            "{% for k, v in c.function.arguments | items %}{{ '(' ~ k ~ '=' ~ v ~ ')' }}"
            "{% endfor %}",
        ),
    ),
    "either": _TURNS.replace(
        "CALLS",
        _CALLS.replace(
            "CALL",
            "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
            "{{ c.function.arguments | tojson }}{% endif %}",
        ),
    ),
    "text": _TURNS.replace(
        "CALLS",
        "{% if m.content is none %}{% for c in m.tool_calls %}"
        "{{ '[' + c.type + ' ' + c.function.name + c.function.arguments + ']' }}{% endfor %}"
        "{% else %}{{ m.content + '' }}{% endif %}",
    ),
}
TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}]
ARGUMENTS = {"where": "Köln", "days": 2}


def asked(arguments: object) -> list[dict]:
    """Return OpenAI's messages about a call."""
    call = {"id": "call_0001", "type": "function"}
    call |= {"function": {"name": "rain", "arguments": arguments}}
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0001", "content": "no"},
    ]


ANSWER = [{"role": "assistant", "content": "It stays dry."}]
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)


def theirs(template: str, messages: list[dict], **settings: object) -> str:
    """Return transformers' rendering, without null values if the template allows that."""
    messages = json.loads(json.dumps(messages))
    if template != TEMPLATES["text"]:
        messages = [{k: v for k, v in turn.items() if v is not None} for turn in messages]
    rendered = render_jinja_template([messages], chat_template=template, **settings)
    return rendered[0][0]


SHAREGPT = [
    {"from": "human", "value": "Rain?"},
    {"from": "function_call", "value": json.dumps({"name": "rain", "arguments": ARGUMENTS})},
    {"from": "observation", "value": "no"},
    {"from": "gpt", "value": "It stays dry."},
]
SWIFT = [
    {"role": "user", "content": "Rain?"},
    {"role": "tool_call", "content": json.dumps({"name": "rain", "arguments": ARGUMENTS})},
    {"role": "tool_response", "content": "no"},
    {"role": "assistant", "content": "It stays dry."},
]
BARE = {"name": "rain", "arguments": TEXT}
GLM3 = [
    {"role": "user", "content": "Rain?"},
    {"role": "tool", "name": "rain", "parameters": ARGUMENTS, "observation": "no"},
    {"role": "assistant", "content": "It stays dry."},
]
OLD = [
    {"role": "User", "content": "Rain?"},
    {"role": "assistant", "content": None, "function_call": BARE},
    {"role": "function", "name": "rain", "content": "no"},
    *ANSWER,
]
RECORDS = {
    "objects": {"messages": [*asked(ARGUMENTS), *ANSWER]},
    "texts": {"messages": [*asked(TEXT), *ANSWER]},
    "empty content": {
        "messages": [asked(TEXT)[0], {**asked(TEXT)[1], "content": ""}, asked(TEXT)[2], *ANSWER]
    },
    "text of JSON": {"messages": json.dumps([*asked(TEXT), *ANSWER])},
    "prompt": {"prompt": asked(TEXT), "completion": ANSWER},
    "completion": {"prompt": asked(TEXT)[:1], "completion": [*asked(TEXT)[1:], *ANSWER]},
    "swift completion": {"prompt": SWIFT[:1], "completion": SWIFT[1:]},
    "pair": {
        "chosen": [*asked(TEXT), *ANSWER],
        "rejected": [*asked(TEXT), *ANSWER[:0], {"role": "assistant", "content": "?"}],
    },
    "sharegpt": {"conversations": SHAREGPT},
    "sharegpt, text": {
        "conversations": [
            SHAREGPT[0],
            {"from": "function_call", "value": json.dumps(BARE)},
            *SHAREGPT[2:],
        ]
    },
    "sharegpt, object": {
        "conversations": [SHAREGPT[0], {"from": "function_call", "value": BARE}, *SHAREGPT[2:]]
    },
    "ms-swift": {"messages": SWIFT},
    "ChatGLM3": {"conversations": GLM3},
    "before tool_calls": {"messages": OLD},
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=list(RECORDS))
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_calls_are_written_as_the_template_takes_them(template: str, record: dict):
    """They used to be JSON within JSON where they came as text, and refused by some templates."""
    arguments = TEXT if template == TEMPLATES["text"] else ARGUMENTS
    want = theirs(template, [*asked(arguments), *ANSWER], tools=TOOLS)
    reader = RecordReader(ChatTemplate(template, {}))
    (document,) = reader.documents({**record, "tools": TOOLS})
    assert document.text == want
    assert document.loss_spans is not None
    learned = [document.text[a:b] for a, b in document.loss_spans]
    assert learned[-1] == "It stays dry.<end>"
    if "prompt" not in record and "chosen" not in record:
        assert len(learned) == 2
        assert "rain" in learned[0]


@pytest.mark.parametrize("name", ["parameters", "args", "input"])
def test_arguments_have_the_names_of_other_libraries(name: str):
    """The names are Llama 3's, LangChain's and Anthropic's; such calls used to lose their
    arguments.

    Other fields of a call than its function are no arguments.
    """
    bare = {"name": "rain", name: ARGUMENTS, "id": "call_0001", "type": "tool_call"}
    nested = {"id": "call_0001", "type": "function", "function": {"name": "rain", name: TEXT}}
    for given in (bare, nested, {**bare, "index": 0, "extra_content": {"signature": "x"}}):
        messages = [asked(TEXT)[0], {"role": "assistant", "tool_calls": [given]}, *asked(TEXT)[2:]]
        ((text, _),) = ChatTemplate(TEMPLATES["json"], {}).documents([*messages, *ANSWER])
        assert text == theirs(TEMPLATES["json"], [*asked(ARGUMENTS), *ANSWER])


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_a_request_has_the_text_that_training_has(template: str):
    """A template that wants text used to answer each request with an earlier call with 400."""
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    arguments = TEXT if template == TEMPLATES["text"] else ARGUMENTS
    want = theirs(template, asked(arguments), tools=TOOLS, add_generation_prompt=True)
    for given in (ARGUMENTS, TEXT):
        body = Chat(messages=asked(given), tools=TOOLS)
        (ids,) = body.prompts(tokenizer)
        assert bytes(ids).decode() == want
        record = {"messages": asked(given), "tools": TOOLS}
        assert bytes(Prompts(tokenizer, True).encode(asked(given), record)).decode() == want


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{'a': 1}"}}]}, "not JSON"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "not an object"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": 1}}]}, "not an object"),
        ({"tool_calls": [{"function": {}}]}, "no function with a name"),
        ({"tool_calls": [5]}, "no function with a name"),
        (
            {"tool_calls": [{"function": {"name": "f", "kwargs": {"a": 1}}}]},
            "`kwargs`, which is no name of its arguments",
        ),
        ({"tool_calls": [{"name": "f", "params": {"a": 1}}]}, "`params`, which is no name"),
        ({"tool_calls": "rain"}, "not JSON"),
        ({"function_call": {"name": 3}}, "no function with a name"),
        ({"content": {"a": 1}}, "content is missing or not text"),
        ({"content": None}, "content is missing or not text"),
    ],
)
def test_calls_that_are_none_are_named(turn: dict, problem: str):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", **turn}]
    with pytest.raises(BadLineError, match=rf"^messages\[1\].*{problem}.*; ") as caught:
        ChatTemplate(TEMPLATES["json"], {}).documents(messages)
    assert "\n" not in str(caught.value)


# ---- parts that a template does not show
# ----------------------------------------------------------

# Like the first Llama-3's or Mistral's, it shows neither tools nor calls nor reasoning, and no
# tool's turn.
PLAIN = """\
{%- for m in messages %}{% if m.role in ('system', 'user') and (loop.first or m.role == 'user') %}
{{- '<' ~ m.role ~ '>' ~ m.content }}{% elif m.role == 'assistant' %}
{{- '<assistant>' ~ m.content ~ '<end>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
MARKED = PLAIN.replace(
    "{{- '<assistant>' ~ m.content ~ '<end>' }}",
    "{{- '<assistant>' }}{% generation %}{{ m.content ~ '<end>' }}{% endgeneration %}",
)
DROPS = "m.content.split('</think>')[-1] ~ '<end>'"
USER, SAID = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = {**SAID, "reasoning_content": "hm"}
CALLING = {**SAID, "tool_calls": [{"function": {"name": "rain", "arguments": ARGUMENTS}}]}
LOST: dict[str, tuple[dict, str]] = {
    "tools": ({"messages": [USER, SAID], "tools": TOOLS}, "tools[0]"),
    "documents": (
        {"messages": [USER, SAID], "documents": [{"title": "t", "text": "x"}]},
        "documents[0]",
    ),
    "a call": ({"messages": [USER, CALLING, SAID]}, "messages[1].tool_calls[0].name"),
    "reasoning": ({"messages": [USER, THOUGHT]}, "messages[1].reasoning_content"),
    "thinking": ({"messages": [USER, {**SAID, "thinking": "x"}]}, "messages[1].reasoning_content"),
    "a later system": ({"messages": [USER, SYSTEM, SAID]}, "messages[1].content, of role 'system'"),
    "a second system": (
        {"messages": [SYSTEM, {**SYSTEM, "role": "developer"}, USER, SAID]},
        "messages[1].content, of role 'developer'",
    ),
    "a role": (
        {"messages": [USER, {"role": "critic", "content": "No."}, SAID]},
        "messages[1].content, of role 'critic'",
    ),
    "a result": (
        {"messages": [USER, {"role": "tool_response", "content": "no"}, SAID]},
        "messages[1].content, of role 'tool'",
    ),
    "a completion": ({"prompt": [USER], "completion": [THOUGHT]}, "messages[1].reasoning_content"),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi"}, SHAREGPT[2], SHAREGPT[3]]},
        "messages[1].content, of role 'tool'",
    ),
}
SHOWS_ALL = "{% for d in documents or [] %}{{ d.text }}{% endfor %}" + CHATML


@pytest.mark.parametrize(("record", "place"), LOST.values(), ids=list(LOST))
def test_what_the_template_does_not_show_is_refused(record: dict, place: str):
    """Such parts used to vanish silently. Both remedies in the line help."""
    remedy = "leave it out"
    if "critic" in place:
        remedy = "write `tool` as the role of a tool's result, and `user` as that of what is said"
    with pytest.raises(BadLineError) as caught:
        RecordReader(ChatTemplate(PLAIN, {})).documents(record)
    assert str(caught.value) == (
        f"the chat template does not show {place}"
        + ", of role 'assistant'" * ("reasoning" in place or "tool_calls" in place)
        + f"; {remedy}, or name a template that shows it in data.chat_template"
    )
    assert RecordReader(ChatTemplate(SHOWS_ALL, {})).documents(record)
    assert RecordReader(ChatTemplate(PLAIN, {})).documents({"messages": [USER, SAID]})


@pytest.mark.parametrize(
    "role", ["User", "USER", "human", "prompter", "system", "developer", "Developer"]
)
def test_roles_have_openais_names(role: str):
    """The template knows user and system alone, and no developer."""
    usual = "user" if role.lower() in ("user", "human", "prompter") else "system"
    messages = [{"role": usual, "content": "Be brief."}, USER, SAID]
    ((text, _),) = ChatTemplate(PLAIN, {}).documents([{**messages[0], "role": role}, USER, SAID])
    assert text == theirs(PLAIN, messages)
    knows = PLAIN.replace("('system', ", "('system', 'developer', ")
    ((text, _),) = ChatTemplate(knows, {}).documents([{**messages[0], "role": role}, USER, SAID])
    ((speaks, _),) = ChatTemplate("{#- developer #}" + PLAIN, {}).documents(
        [{**messages[0], "role": role}, USER, SAID]
    )
    assert speaks == theirs(PLAIN, messages)
    usual = "developer" if role.lower() == "developer" else usual
    assert text == theirs(knows, [{**messages[0], "role": usual}, USER, SAID])


def test_earlier_reasoning_may_be_dropped_where_it_was_learned():
    """Qwen3's template drops it; each turn is learned with its own reasoning."""
    earlier = {**THOUGHT, "reasoning_content": "mm"}
    template = ChatTemplate(TEMPLATES["json"], {})
    documents = template.documents([USER, earlier, USER, THOUGHT])
    learned = [text[a:b] for text, spans in documents for a, b in spans]
    assert learned == ["<think>mm</think>Ho<end>", "<think>hm</think>Ho<end>"]
    assert template.prompt([USER, earlier, USER], strict=True).endswith(
        "Ho<end><user>Hi<assistant>"
    )


def test_thoughts_in_the_content_are_learned_or_refused():
    """DeepSeek-R1's template drops everything before </think>, even in the learned turn.

    Nothing can be added if the template marks the learned text.
    """
    messages = [USER, {**SAID, "content": "<think>\nhm\n</think>\n\nHo"}]
    for template in (PLAIN, MARKED, PLAIN.replace("m.content ~ '<end>'", DROPS)):
        ((text, spans),) = ChatTemplate(template, {}).documents(messages)
        assert [text[a:b] for a, b in spans] == ["<think>\nhm\n</think>\n\nHo<end>"]
    said = MARKED.replace("m.content ~ '<end>'", DROPS)
    with pytest.raises(BadLineError, match=r"not show messages\[1\].content before </think>, of"):
        ChatTemplate(said, {}).documents(messages)


@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        ({"type": "tool_use", "id": "t", "name": "f", "input": {}}, ", and calls as `tool_calls`"),
        ({"type": "thinking", "thinking": "hm"}, ", and thoughts as `reasoning_content`"),
        (
            {"type": "tool_result", "tool_use_id": "t", "content": "a"},
            ", and results as turns of the role tool",
        ),
        ({"toolUse": {"toolUseId": "t", "name": "f", "input": {}}}, ", and calls as `tool_calls`"),
        (
            {"toolResult": {"toolUseId": "t", "content": [{"text": "a"}]}},
            ", and results as turns of the role tool",
        ),
        (
            {"reasoningContent": {"reasoningText": {"text": "hm"}}},
            ", and thoughts as `reasoning_content`",
        ),
        ({"functionCall": {"name": "f", "args": {}}}, ", and calls as `tool_calls`"),
        (3, ""),
    ],
)
def test_parts_that_are_no_text_are_refused_with_their_place(part: object, remedy: str):
    """The parts are calls and thoughts of Anthropic, of Bedrock's Converse and of Gemini."""
    with pytest.raises(BadLineError) as caught:
        ChatTemplate(PLAIN, {}).documents([USER, {**SAID, "content": [part]}])
    assert str(caught.value).endswith(f"; give texts alone{remedy}")


# Mistral's ThinkChunk. Magistral's prompt shows in one which form a thought has.
THINKS = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}], "closed": True}


def test_the_texts_of_mistrals_thought_become_one_text():
    first, last = {"type": "text", "text": "Ho"}, {"type": "text", "text": "!"}
    thinks = {**THINKS, "thinking": [*THINKS["thinking"], {"type": "text", "text": " so"}]}
    says = "; give texts alone, and the texts of thoughts, joined to one text, as `reasoning_con"
    with pytest.raises(BadLineError, match=rf"messages\[1\].content .*{says}"):
        read_messages([USER, {**SAID, "content": [thinks, first, last]}])
    followed = {**SAID, "content": [first, last], "reasoning_content": "hm so"}
    ((text, _),) = ChatTemplate(CHATML, {}).documents([USER, followed])
    right = {**SAID, "content": "Ho!", "reasoning_content": "hm so"}
    rendered, _ = render_jinja_template([[USER, right]], chat_template=CHATML)
    assert text == rendered[0].rstrip()


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_thought_in_another_turn_than_the_assistants_stays_where_it_is(role: str):
    before, behind = {"type": "text", "text": "Think:"}, {"type": "text", "text": "Then answer."}
    marked = [before, {"type": "text", "text": "<think>hm</think>"}, behind]
    says = "; write its text in `content` where it belongs, between the marks of the model's tho"
    for part in (THINKS, {"type": "thinking", "thinking": "hm"}):
        with pytest.raises(BadLineError, match=rf"messages\[0\].content .*{says}.* </think>$"):
            read_messages([{"role": role, "content": [before, part, behind]}, USER, SAID])
    for key in ("reasoning_content", "thinking", "reasoning"):
        for value in ("hm", ["hm"]):
            turn = {"role": role, "content": [before, behind], key: value}
            with pytest.raises(
                BadLineError,
                match=rf"messages\[0\].{key} is a thought in a turn of role {role}.*{says}",
            ):
                read_messages([turn, USER, SAID])
            assert read_messages([turn | {key: " "}, USER, SAID])
    # The advice of both errors is followed.
    followed = [{"role": role, "content": marked}, USER, SAID]
    ((text, _),) = ChatTemplate(CHATML, {}).documents(followed)
    right = {"role": role, "content": "Think:<think>hm</think>Then answer."}
    rendered, _ = render_jinja_template([[right, USER, SAID]], chat_template=CHATML)
    assert text == rendered[0].rstrip()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "a"}},
        {"type": "input_audio", "input_audio": {"data": "a"}},
        {"type": "input_file", "file_id": "a"},
        {"type": "image", "source": {"type": "base64"}},
        {"inlineData": {"mimeType": "image/png", "data": "a"}},
        {"document": {"format": "pdf"}},
    ],
    ids=str,
)
def test_a_part_that_is_a_picture_or_a_file_is_not_to_be_left_out(part: dict):
    """Without it, the answer would be about something that the model does not see."""
    with pytest.raises(BadLineError, match="; leave such records out: the answer is about it"):
        ChatTemplate(PLAIN, {}).documents([{"role": "user", "content": [part]}, SAID])


# Olmo's published templates read a turn's tools and calls, which are texts. Its records (Dolci)
# have nothing else in a turn that only calls.
OLMO = """\
{% for m in messages %}{{ '<' ~ m.role ~ '>' }}{% if m.get('content', none) is not none %}
{{- m.content }}{% endif %}{% if m.get('functions', none) is not none %}
{{- '<functions>' + m['functions'] + '</functions>' }}{% endif %}
{%- if m.get('function_calls', none) is not none %}
{{- '<function_calls>' + m['function_calls'] + '</function_calls>' }}{% endif %}{{ '<end>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


@pytest.mark.parametrize("content", ["", None])
def test_calls_and_tools_in_turns_are_shown_or_refused(content: str | None):
    system = {"role": "system", "content": "S", "functions": '[{"name": "rain"}]'}
    calling = {"role": "assistant", "content": content, "function_calls": 'rain(where="Köln")'}
    messages = [system, {**USER, "function_calls": None}, calling]
    rendered, _ = render_jinja_template([messages], chat_template=OLMO)
    ((text, spans),) = ChatTemplate(OLMO, {}).documents(messages)
    assert text == rendered[0]
    calls = '<function_calls>rain(where="Köln")</function_calls><end>'
    assert [text[a:b] for a, b in spans] == [calls]
    for turns, says in (
        (messages, r"messages\[0\]\.functions is not read .*; write the tools as `tools` of the"),
        (messages[1:], r"messages\[1\]\.function_calls is not .*; write calls as `tool_calls`, or"),
    ):
        with pytest.raises(BadLineError, match=says):
            ChatTemplate(PLAIN, {}).documents(turns)
    shown = {**calling, "content": 'I call rain(where="Köln")'}
    assert ChatTemplate(PLAIN, {}).documents([USER, shown])
    beside = {**calling, "tool_calls": [{"function": {"name": "rain", "arguments": {}}}]}
    assert ChatTemplate(TEMPLATES["json"], {}).documents([USER, beside])


CALL = {"name": "rain", "arguments": {"where": "Köln"}}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"tool_call": CALL}, "write calls as `tool_calls`, or leave such records out"),
        ({"toolCalls": [CALL]}, "write calls as `tool_calls`"),
        ({"toolInvocations": [{"toolName": "rain", "args": {}}]}, "write calls as `tool_calls`"),
        ({"content": "I look.", "tool_call": CALL}, "write calls as `tool_calls`"),
        ({"additional_kwargs": {"tool_calls": [CALL]}}, "write what the turn says as `content`"),
        ({"parts": [{"type": "text", "text": "a"}]}, "write what the turn says as `content`"),
        ({"refusal": "I cannot help."}, "write what the turn says as `content`, and calls as"),
    ],
    ids=str,
)
def test_an_answer_under_another_name_is_not_learned_as_an_empty_one(keys: dict, says: str):
    """The names are the AI SDK's, LangChain's and OpenAI's. A template may read them."""
    turn = {"role": "assistant", "content": "", **keys}
    key = [*keys][-1]
    with pytest.raises(BadLineError, match=rf"messages\[1\]\.{key} is not read .*; {says}"):
        ChatTemplate(PLAIN, {}).documents([USER, turn])
    assert ChatTemplate(PLAIN + f"{{# m.{key} #}}", {}).documents([USER, turn])


@pytest.mark.parametrize(
    "keys",
    [
        {"usage": {"tokens": 3}, "id": "1", "model": "m", "tool_call_ids": ["1"], "refusal": ""},
        {"content": "Ho", "parts": [{"type": "text", "text": "Ho"}], "tool_call": {}},
        {"content": "Ho", "refusal": "Ho"},
    ],
    ids=str,
)
def test_keys_that_describe_an_answer_are_ignored(keys: dict):
    turn = {"role": "assistant", "content": "", **keys}
    plain = {"role": "assistant", "content": turn["content"]}
    template = ChatTemplate(PLAIN, {})
    assert template.documents([USER, turn]) == template.documents([USER, plain])


TAGGED = TEMPLATES["json"].replace(
    "{{- '<' ~ m.role ~ '>' ~ m.content }}",
    "{{- '<tool_response>\n' ~ m.content ~ '\n</tool_response>' if m.role == 'tool' else "
    "'<' ~ m.role ~ '>' ~ m.content }}",
)


@pytest.mark.parametrize("num_results", [1, 2])
def test_results_are_tagged_once(num_results: int):
    """Hermes' records have tags already; some templates write them (Qwen's), others do not."""
    results = ["{'rain': 'no'}", "{'rain': 'yes'}"][:num_results]
    tagged = "\n".join(f"<tool_response>\n{each}\n</tool_response>" for each in results)
    for given in (tagged, f"{tagged}\n", *results[: 2 - num_results]):
        messages = [*asked(ARGUMENTS)[:2], {"role": "tool", "content": given}, *ANSWER]
        for text, _ in ChatTemplate(TAGGED, {}).documents(messages):
            shown = theirs(TAGGED, [*asked(ARGUMENTS)[:2], *ANSWER])
            assert text == shown.replace("<end><ass", f"<end>{tagged}<ass", 1)
        ((text, _),) = ChatTemplate(TEMPLATES["json"], {}).documents(messages)
        assert text == theirs(TEMPLATES["json"], messages)


def test_a_thought_that_is_written_twice_is_one():
    """It used to be learned twice if both were shown; of two different ones, one was lost."""
    both = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHo", "reasoning": "hm\n"}
    for messages in ([USER, both], [USER, {**both, "reasoning_content": "hm\n"}]):
        ((text, _),) = ChatTemplate(TEMPLATES["json"], {}).documents(messages)
        assert text == "<user>Hi<assistant><think>hm\n</think>Ho<end>"
    ((text, _),) = ChatTemplate(PLAIN, {}).documents([USER, {**both, "reasoning": ""}])
    assert text == "<user>Hi<assistant><think>\nhm\n</think>\n\nHo<end>"
    for other in ({**both, "reasoning": "oh"}, {**SAID, "reasoning": "hm", "thinking": "oh"}):
        with pytest.raises(BadLineError, match=r"messages\[1\] has two thoughts: .*; leave one"):
            ChatTemplate(TEMPLATES["json"], {}).documents([USER, other])


def test_texts_in_a_list_beside_a_thought_are_read_as_parts():
    """They stayed texts, at which the search for what a turn comes with ended in a traceback."""
    said = {"role": "assistant", "reasoning_content": "hm", "content": ["H", {"text": "o"}]}
    ((text, _),) = ChatTemplate(TEMPLATES["json"], {}).documents([USER, said])
    assert text == "<user>Hi<assistant><think>hm</think>Ho<end>"


def test_roles_with_hyphens_are_those_with_underscores():
    """smolagents writes tool-call and tool-response. Templates used to write these names."""
    call = {"role": "tool-call", "content": json.dumps(BARE)}
    messages = [SWIFT[0], call, {"role": "tool-response", "content": "no"}, *ANSWER]
    ((text, _),) = ChatTemplate(TEMPLATES["json"], {}).documents(messages)
    assert text == theirs(TEMPLATES["json"], [*asked(ARGUMENTS), *ANSWER])


def test_a_role_that_is_not_known_is_named_once(caplog: pytest.LogCaptureFixture):
    SEEN.clear()
    with caplog.at_level("WARNING", logger="moetrain"):
        for _ in range(2):
            ChatTemplate(CHATML, {}).documents([USER, {**SAID, "role": "asistant"}, USER, SAID])
            ChatTemplate(CHATML, {}).documents([USER, SAID])
    (line,) = (record.getMessage() for record in caplog.records)
    assert "'asistant'" in line
    assert "not learned" in line


@pytest.mark.parametrize("channel", ["analysis", "commentary"])
def test_channels_that_the_template_does_not_read_are_refused(channel: str):
    """Messages as openai-harmony writes them: the analysis used to be learned as an answer."""
    messages = [USER, {**SAID, "channel": channel}, {**SAID, "channel": "final"}]
    with pytest.raises(BadLineError, match=rf"messages\[1\]\.channel is '{channel}', .*; give "):
        ChatTemplate(PLAIN, {}).documents(messages)
    assert ChatTemplate(PLAIN, {}).documents([USER, messages[2]])
    reads = PLAIN.replace("m.content", "(m.channel or '') ~ m.content")
    assert ChatTemplate(reads, {}).documents(messages)


def test_null_fields_of_messages_are_absent():
    """Clients and tables write keys without a value, and templates test for their presence."""
    asks = PLAIN.replace("m.content ~ '<end>'", "m.content ~ '!' * ('tool_calls' in m) ~ '<end>'")
    nulls = dict.fromkeys(("tool_calls", "function_call", "reasoning_content", "weight", "name"))
    messages = [{**USER, **nulls}, {**SAID, **nulls}]
    ((text, _),) = ChatTemplate(asks, {}).documents(messages, {"tools": None})
    assert text == "<user>Hi<assistant>Ho<end>"


def test_a_server_says_once_what_its_template_does_not_show(caplog: pytest.LogCaptureFixture):
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = PLAIN
    SEEN.clear()
    asked = [USER, CALLING, {"role": "tool", "content": "no"}, USER]
    with caplog.at_level("WARNING", logger="moetrain"):
        for _ in range(2):
            (ids,) = Chat(messages=asked, tools=TOOLS).prompts(tokenizer)
            assert bytes(ids).decode() == "<user>Hi<assistant>Ho<end><user>Hi<assistant>"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    for kind in ("`tools`", "`tool_calls`", "`content` of role 'tool'"):
        assert sum(f"does not show {kind}," in line for line in said) == 1


@pytest.mark.parametrize("as_text", [False, True])
def test_prompts_that_the_template_does_not_show_are_refused_at_once(as_text: bool, tmp_path: Path):
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = PLAIN
    path = tmp_path / "prompts.jsonl"
    critic = [{"role": "critic", "content": "a"}, USER]
    for messages, problem in [([USER], None), (critic, "does not show messages[0].content")]:
        given = json.dumps(messages) if as_text else messages
        path.write_text(json.dumps({"messages": given}) + "\n")
        if problem is None:
            environment = Jsonl(Prompts(tokenizer, True), str(path), "zero")
            turn = environment.episode(0).reset()
            assert bytes(turn.tokens).decode() == "<user>Hi<assistant>"
        else:
            with pytest.raises(ConfigError, match=r"rl\.prompts: .* line 1: ") as caught:
                Jsonl(Prompts(tokenizer, True), str(path), "zero")
            assert problem in str(caught.value)


# ---- weights -------------------------------------------------------------------------------------

TALK = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2"},
    {"role": "user", "content": "q3"},
    {"role": "assistant", "content": "a3"},
]


def weighted(name: str, *values: object) -> list[dict]:
    """Return the dialogue with these weights of its answers under the key ``name``, if not None."""
    given = [{} if value is None else {name: value} for value in values]
    return [{**turn, **given[i // 2]} if i % 2 else turn for i, turn in enumerate(TALK)]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["unmarked", "marked"])
@pytest.mark.parametrize(
    ("name", "values", "learned"),
    [
        ("weight", (0, 1, None), ["a2", "a3"]),  # OpenAI's and Mistral's
        ("weight", (1, 0, 1.0), ["a1", "a3"]),
        ("weight", (None, None, 0), ["a1", "a2"]),
        ("train", (False, False, True), ["a3"]),  # axolotl's
        ("training", (True, False, None), ["a1", "a3"]),
        ("loss", (False, True, False), ["a2"]),  # ms-swift's
        ("weight", (0, 0, 0.0), []),
    ],
)
def test_turns_of_weight_0_are_read_and_not_learned(template, name, values, learned):
    reader = RecordReader(ChatTemplate(template, {}))
    documents = reader.documents({"messages": weighted(name, *values)})
    assert len(documents) == bool(learned)
    for document in documents:
        assert document.loss_spans is not None
        found = [document.text[a:b] for a, b in document.loss_spans]
        assert found == [f"{answer}<end>" for answer in learned]
        assert document.text == theirs(PLAIN, TALK[: 2 * int(learned[-1][1])])
    sharegpt = {"conversations": weighted(name, *values)}
    assert reader.documents(sharegpt) == documents


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"messages": weighted("weight", 0.5, 1, 1)}, "messages[1].weight is 0.5, and a weight"),
        ({"messages": weighted("weight", 1, 2, 1)}, "messages[3].weight is 2, and a weight is 0"),
        ({"messages": weighted("train", "no", 1, 1)}, "messages[1].train is 'no', and a weight"),
        (
            {"messages": [{**TALK[0], "train": True}, TALK[1]]},
            "messages[0] has `train` and asks to learn a turn of role 'user', and only the "
            "assistant's are learned; leave `train` out of that turn",
        ),
        (
            {"messages": [TALK[0], {**TALK[1], "weight": 1, "train": False}]},
            "messages[1] has 'weight' and 'train', which contradict",
        ),
        ({"messages": TALK, "weight": 0.5}, "`weight` is 0.5, and a weight is 0"),
        ({"text": "a", "weight": 3}, "`weight` is 3, and a weight is 0"),
    ],
)
def test_weights_that_no_loss_has_are_refused(record: dict, problem: str):
    with pytest.raises(BadLineError) as caught:
        RecordReader(ChatTemplate(PLAIN, {})).documents(record)
    assert problem in str(caught.value)


@pytest.mark.parametrize("weight", [0, 0.0, False, 1, True, None])
def test_records_of_weight_0_are_left_out(weight: object):
    reader = RecordReader(ChatTemplate(PLAIN, {}))
    for record in ({"messages": TALK}, {"text": "a"}, {"prompt": "a", "completion": "b"}):
        whole = reader.documents(record)
        assert reader.documents({**record, "weight": weight}) == whole * (
            weight is None or weight == 1
        )


# ---- templates and their variables for a whole run -----------------------------------------------

STYLED = "{{ style | default('plain') }}:" + PLAIN


def config_of(**data: object) -> Config:
    given = {"source": "records", "path": "unused.jsonl", **data}
    return Config.load({"model": {"preset": "debug"}, "data": given})


def test_a_run_has_variables_of_its_template(tmp_path: Path):
    """A record's own variables win over them, as in apply_chat_template."""
    (tmp_path / "t.jinja").write_text(STYLED)
    data = config_of(
        chat_template=str(tmp_path / "t.jinja"), chat_template_kwargs='{"style": "short"}'
    ).data
    reader = RecordReader.of(data, ByteTokenizer())
    for own, style in ((None, "short"), ({}, "short"), ({"style": "long"}, "long")):
        record = {"messages": [USER, SAID], "chat_template_kwargs": own}
        (document,) = reader.documents(record)
        assert document.text == theirs(STYLED, [USER, SAID], style=style)
    plain = RecordReader.of(data.model_copy(update={"chat_template_kwargs": None}), ByteTokenizer())
    assert plain.identity() != reader.identity()


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ("style", "'style' is not JSON"),
        ("[1]", "'[1]' is no JSON object"),
        ('{"messages": []}', "has 'messages', which cannot be set there"),
    ],
)
def test_variables_that_are_none_are_named(kwargs: str, problem: str):
    with pytest.raises(ConfigError) as caught:
        RecordReader.of(config_of(chat_template_kwargs=kwargs).data, ByteTokenizer())
    assert caught.value.field == "data.chat_template_kwargs"
    assert problem in str(caught.value)


def test_a_template_and_its_variables_in_reinforcement_learning(tmp_path: Path):
    """Reinforcement learning takes data.chat_template, and the model is exported with it."""
    (tmp_path / "t.jinja").write_text(STYLED)
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = tokenizer.tool_template = CHATML
    ChatTemplate.put_in(tokenizer, str(tmp_path / "t.jinja"), '{"style": "short"}')
    ids = Prompts(tokenizer, chat=True).encode("Hi")
    assert bytes(ids).decode() == theirs(STYLED, [USER], style="short", add_generation_prompt=True)
    ids = Prompts(tokenizer, True).encode([USER], {"chat_template_kwargs": {"style": "long"}})
    assert bytes(ids).decode().startswith("long:")
    assert tokenizer.export(tokenizer.chat_template).files["chat_template.jinja"] == STYLED
    settings = {"chat_template": str(tmp_path / "t.jinja"), "chat_template_kwargs": "{}"}
    for rl in ({"env": "jsonl", "prompts": "p.jsonl", "reward": "zero"}, {"chat": True}):
        Config.load({"model": {"preset": "debug"}, "data": settings, "rl": rl})
    with pytest.raises(ConfigError, match=r"data\.chat_template"):
        Config.load({"model": {"preset": "debug"}, "data": settings, "rl": {"env": "sort"}})


def test_lists_of_parts_are_never_written_as_objects():
    """A template that reads lists in one role may print those of others as Python objects."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' and m.content is iterable and "
        "m.content is not string %}{{ m.content[0].text }}{% else %}{{ m.content }}{% endif %}"
        "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    plain = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    parts = [{**turn, "content": [*map(part_of, turn["content"])]} for turn in plain]
    chat = ChatTemplate(template, {})
    expected = [("<user>ab<end><assistant>c<end>", [(24, 30)])]
    assert chat.documents(plain) == chat.documents(parts) == expected


def part_of(text):
    return {"type": "text", "text": text}


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    ("record", "tools"),
    [
        ({"tools": [WRAPPED]}, [WRAPPED]),
        ({"tools": [FUNCTION]}, [WRAPPED]),
        ({"tools": json.dumps([FUNCTION])}, [WRAPPED]),
        ({"tools": [json.dumps(FUNCTION)]}, [WRAPPED]),
        ({"tools": [{"type": "function", **FUNCTION}]}, [WRAPPED]),
        ({"tools": [{"type": "web_search"}]}, [{"type": "web_search"}]),
        ({"functions": [FUNCTION]}, [WRAPPED]),
        ({"functions": [FUNCTION], "tools": None}, [WRAPPED]),
        ({"tools": []}, []),
        ({"tools": "[]"}, []),
        ({"tools": ""}, None),
    ],
    ids=str,
)
def test_tools_are_written_as_transformers_takes_them(record, tools):
    assert ChatTemplate.variables_of(record)["tools"] == tools


def test_tools_of_a_turn_are_named():
    """GLM-4's fine-tuning files have them in the system's turn."""
    tool = {"type": "function", "function": {"name": "rain", "parameters": {}}}
    turns = [{"role": "system", "content": "s", "tools": [tool]}, USER, SAID]
    with pytest.raises(
        BadLineError, match=r"messages\[0\]\.tools is not .*; write the tools as `tools`"
    ):
        RecordReader(ChatTemplate(CHATML, {})).documents({"messages": turns})
