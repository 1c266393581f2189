"""Responses are chats in another form: OpenAI's own client and types read the same tokens."""

import asyncio
import json
import time
from functools import partial

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.engine import Generator
from moetrain.http.protocol import Responses
from moetrain.rl.agents import AgentEnvironment
from moetrain.rl.envs import Prompts
from moetrain.serve.server import CompletionServer
from tests.lib.agents import SEARCH, TEMPLATE, TOKENIZER, Watched, ask, collected
from tests.lib.grammar_cases import OTHER, SCHEMA, TOOL, follows

GREEDY = {"model": "m", "temperature": 0}
EVENTS = TypeAdapter(ResponseStreamEvent)


def flat(tool):
    return {"type": "function", **tool["function"]}


@pytest.fixture(scope="module")
def client():
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    generator = Generator(Watched().model, tokenizer)
    with TestClient(CompletionServer(generator, "tiny").app) as http:
        yield openai.OpenAI(
            base_url="http://testserver/v1", api_key="-", http_client=http, max_retries=0
        )


def create(client, **asked):
    """Return a response, checked against its types."""
    reply = client.responses.create(**{"max_output_tokens": 9, **GREEDY, **asked})
    return Response.model_validate(reply.model_dump(warnings=False), strict=True)


def chosen(client, **asked):
    asked = {"max_tokens": 9, **GREEDY, **asked}
    return client.chat.completions.create(**asked).choices[0]


def test_a_conversation_has_the_tokens_that_it_has_as_a_chat(client):
    items = [{"role": "user", "content": "Hi"}]
    messages = [{"role": "system", "content": "Be."}, *items]
    tools = {"tools": [SEARCH], "tool_choice": "none"}
    flat_tools = {"tools": [flat(SEARCH)], "tool_choice": "none"}
    for turn in range(3):
        choice = chosen(client, messages=messages, **(tools if turn == 2 else {}))
        reply = create(client, input=items, instructions="Be.", **(flat_tools if turn == 2 else {}))
        assert reply.token_ids == choice.token_ids
        assert reply.output_text == choice.message.content
        assert (reply.status, reply.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        assert reply.usage.output_tokens == len(choice.token_ids) == 9
        messages += [choice.message, {"role": "user", "content": "more"}]
        items += [*reply.output, {"role": "user", "content": "more"}]
    one = create(client, input="Hi", text={"format": {"type": "text"}}, store=True)
    assert one.token_ids == chosen(client, messages=[{"role": "user", "content": "Hi"}]).token_ids


@pytest.mark.tier("long")
def test_responses_return_tool_calls_as_items(client):
    asked = {"tools": [flat(TOOL), flat(OTHER)], "max_output_tokens": 150}
    choice = {"type": "function", "name": "add"}
    reply = create(
        client, input="Go", **asked, tool_choice=choice, extra_body={"seed": 3}, temperature=1.0
    )
    (call,) = reply.output
    assert (call.type, call.name, reply.status) == ("function_call", "add", "completed")
    assert follows("schema", call.arguments)
    said = chosen(
        client,
        messages=[{"role": "user", "content": "Go"}],
        tools=[TOOL, OTHER],
        tool_choice={"type": "function", "function": {"name": "add"}},
        max_tokens=150,
        seed=3,
        temperature=1.0,
    )
    assert said.token_ids == reply.token_ids
    assert said.message.tool_calls[0].id == call.call_id
    heard = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    reply = create(client, input=[{"role": "user", "content": "Go"}, call, heard], **asked)
    function = {"name": "add", "arguments": call.arguments}
    called = {"id": call.call_id, "type": "function", "function": function}
    messages = [{"role": "user", "content": "Go"}]
    messages.append({"role": "assistant", "content": None, "tool_calls": [called]})
    messages.append({"role": "tool", "tool_call_id": call.call_id, "content": "5"})
    choice = chosen(client, messages=messages, tools=[TOOL, OTHER], max_tokens=150)
    assert choice.token_ids == reply.token_ids


def test_a_schema_is_followed(client):
    form = {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}
    reply = create(client, input="Go", text={"format": form}, max_output_tokens=150)
    assert follows("schema", reply.output_text)


@pytest.mark.tier("long")
@pytest.mark.parametrize("kind", ["text", "call", "nothing"])
def test_a_stream_has_the_events_of_its_items(client, kind):
    asked = {"input": "Go", "max_output_tokens": 150, **GREEDY}
    if kind == "call":
        asked |= {"tools": [flat(TOOL)], "tool_choice": "required"}
    if kind == "nothing":
        asked |= {"extra_body": {"guided_regex": ""}}
    whole = create(client, **asked)
    events = list(client.responses.create(**asked, stream=True))
    for number, event in enumerate(events):
        EVENTS.validate_python(event.model_dump(warnings=False))
        assert event.sequence_number == number
    names = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type.endswith("delta")]
    (item,) = whole.output
    if kind == "call":
        middle = ["function_call_arguments.delta", "function_call_arguments.done"]
        assert deltas == [item.arguments]
        assert events[1].item.arguments == ""
    else:
        middle = ["output_text.delta"] * len(whole.token_ids) + ["output_text.done"]
        assert "".join(deltas) == whole.output_text == events[-3].text
        assert events[1].item.content[0].text == ""
    last = ["output_item.done", whole.status]
    assert names == ["created", "output_item.added", *middle, *last]
    ids = {"id", "created_at"}
    expected = whole.model_dump(exclude=ids, warnings=False)
    told = events[-1].response.model_dump(exclude=ids, warnings=False)
    for response in (expected, told):
        assert response["output"][0].pop("id")
    assert told == expected
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert {event.item_id for event in events[2:-2]} == {events[1].item.id}
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == whole.output_text


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("a", [{"role": "user", "content": "a"}]),
        (
            [
                {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "message", "role": "user", "content": "b"},
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "x",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": t} for t in ("c", "d")],
                },
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "e"},
                {
                    "type": "function_call_output",
                    "call_id": "2",
                    "output": [{"type": "input_text", "text": "h"}],
                },
                {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
            ],
            [
                {"role": "developer", "content": "a"},
                {"role": "user", "content": "b"},
                {
                    "role": "assistant",
                    "content": "cd",
                    "tool_calls": [
                        {"id": i, "type": "function", "function": {"name": n, "arguments": "{}"}}
                        for i, n in (("1", "f"), ("2", "g"))
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "e"},
                {"role": "tool", "tool_call_id": "2", "content": "h"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "3",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                    ],
                },
            ],
        ),
    ],
)
def test_responses_input_items_become_messages(items, messages):
    assert Responses(input=items).messages == messages
    first = {"role": "system", "content": "x"}
    assert Responses(input=items, instructions="x").messages == [first, *messages]


def test_a_tools_keys_come_in_a_chats_order():
    """Templates write that order; the Agents SDK has another order in its two forms."""
    tool = {"parameters": {}, "strict": True, "type": "function", "name": "f", "description": "d"}
    (found,) = Responses(input="a", tools=[tool]).tools
    assert json.dumps(found) == (
        '{"type": "function", "function": '
        '{"name": "f", "description": "d", "parameters": {}, "strict": true}}'
    )


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"previous_response_id": "resp_1"}, "'previous_response_id' is not supported; send the"),
        ({"conversation": "c"}, "'conversation' is not supported; send the whole input"),
        ({"extra_body": {"n": 2}}, "'n' is not supported; send a request for each answer"),
        ({"extra_body": {"messages": []}}, "'messages' is not supported; send input"),
        ({"extra_body": {"max_tokens": 9}}, "is not supported; send max_output_tokens"),
        ({"extra_body": {"response_format": {}}}, "is not supported; send text.format"),
        ({"top_logprobs": 2}, "'top_logprobs' is not supported; send a chat, whose reply has"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "'reasoning' is not supported"),
        ({"include": ["reasoning.encrypted_content"]}, "'include' is not supported"),
        ({"input": 5}, "input: 5 is no message, function_call or function_call_output; send only"),
        ({"input": {}}, "input: {} is no message"),
        ({"input": []}, "input: None is no message"),
        ({"input": ["a"]}, "input: 'a' is no message, function_call or function_call_output"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "is no message"),
        ({"input": [{"role": "tool", "content": "5", "tool_call_id": "1"}]}, "is a chat message"),
        ({"input": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, " a chat message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "is no text"),
        ({"tools": [{"type": "web_search"}]}, "{'type': 'web_search'} is not of type function"),
        ({"tools": "[]"}, "tools: '[]' is not of type function; leave it out"),
        (
            {"tools": [flat(TOOL)], "tool_choice": {"type": "function", "name": "x"}},
            "not fit `tools`",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens: Input should be greater than 0, not 0"),
        ({"max_output_tokens": 9999}, "or lower max_output_tokens"),
        ({"max_output_tokens": "x"}, "max_output_tokens: Input should be a valid integer"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0, not -1"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {}}}, "response_format.type: Input should be 'text'"),
        ({"text": {"format": {"type": "xml"}}}, "response_format.type: Input should be 'text'"),
        ({"text": {"format": {"type": "json_schema"}}}, "json_schema has no schema; send one"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_responses_requests_are_refused(client, asked, says):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as found:
            client.responses.create(**{"input": "a", **GREEDY, **asked}, stream=stream)
        assert says in found.value.message
        assert "\n" not in found.value.body["message"]


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


@pytest.mark.parametrize("depth", [300, 900])
def test_what_is_nested_deeply_is_read_or_refused(client, depth):
    """Python's json reads more levels than Python can copy."""
    arguments = json.dumps(nested(depth))
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    tool = flat(TOOL) | {"parameters": {"type": "object", "examples": nested(depth)}}
    bodies = [
        {"input": [call]},
        {"input": [call | {"arguments": "[" * 100_000}]},
        {"input": [call | {"arguments": "[" * 100_000 + "]" * 100_000}]},
        {"input": [{"role": "user", "content": nested(depth)}]},
        {"input": "a", "tools": [tool], "tool_choice": "none"},
        {"input": "a", "metadata": nested(depth)},
    ]
    for body in bodies:
        for stream in (False, True):
            body |= {"stream": stream, "max_output_tokens": 1}
            reply = client._client.post("/v1/responses", json=body)
            assert reply.status_code in (200, 400), (body, reply.text)
    chat = {"messages": [{"role": "user", "content": "a", "more": nested(depth)}], "max_tokens": 1}
    assert client._client.post("/v1/chat/completions", json=chat).status_code in (200, 400)


def test_the_time_of_a_streams_part_does_not_grow():
    """It depends neither on the tools, in the first and last part only, nor on earlier text."""
    tools = [{"type": "function", "name": f"f{i}"} for i in range(20_000)]
    asked = Responses(input="a", tools=tools, tool_choice="none", stream=True)
    write, began, size = asked.writer(), time.process_time(), 0
    for i in range(30_000):
        choice = {
            "index": 0,
            "token_ids": [i],
            **asked.choice_fields("four", None if i < 29_999 else "stop"),
        }
        part = asked.reply("m", [choice], None if i < 29_999 else (1, 30_000))
        size += len(write(part))
    assert time.process_time() - began < 6.0
    assert size > 30_000 * 100


def respond(base_url, items, **options):
    with openai.OpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
        reply = client.responses.create(model="m", input=items, **options)
        return list(reply)[-1].response if options.get("stream") else reply


def converse_in_chats(task, base_url):
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": f"{task}"}]
    for turn in range(3):
        choice = ask(base_url, messages, max_tokens=7 + turn).choices[0]
        messages += [choice.message, {"role": "user", "content": f"more {turn}"}]
    return 0.25


def converse_in_responses(task, base_url, **how):
    items = [{"role": "user", "content": f"{task}"}]
    for turn in range(3):
        reply = respond(base_url, items, instructions="Be.", max_output_tokens=7 + turn, **how)
        assert reply.usage.output_tokens == len(reply.token_ids)
        items += [*reply.output, {"role": "user", "content": f"more {turn}"}]
    return 0.25


def converse_in_both(task, base_url):
    items = [{"role": "user", "content": f"{task}"}]
    text = respond(base_url, items, instructions="Be.", max_output_tokens=7).output_text
    messages = [{"role": "system", "content": "Be."}, *items]
    for turn in range(2):
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"more {turn}"})
        text = ask(base_url, messages, max_tokens=8 + turn).choices[0].message.content
    return 0.25


converse_in_streams = partial(converse_in_responses, stream=True)


@pytest.mark.tier("long")
def test_agents_record_equal_tokens_by_chats_and_responses():
    def by_name(run):
        found = {(t.group, t.member): t for t in collected(run)}
        assert {(t.fault, t.reward, t.starts == []) for t in found.values()} == {(None, 0.25, True)}
        return found

    expected = by_name(converse_in_chats)
    for run in (converse_in_responses, converse_in_both, converse_in_streams):
        for name, t in by_name(run).items():
            assert (t.tokens, t.is_action) == (expected[name].tokens, expected[name].is_action)
            assert t.logprobs == pytest.approx(expected[name].logprobs, abs=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_tools_and_goes_on(stream):
    """The policy is scripted, because the small model calls no tools."""
    tools, replies = [flat(SEARCH)], []

    def run(task, base_url):
        items = [{"role": "user", "content": "x"}]
        for _ in range(2):
            reply = respond(base_url, items, tools=tools, stream=stream)
            replies.append(reply)
            items += reply.output
            for call in reply.output:
                if call.type == "function_call":
                    heard = {"type": "function_call_output", "call_id": call.call_id}
                    items.append({**heard, "output": call.arguments})
        return 1.0

    async def play(episode):
        await episode.reset()
        calls = "".join(
            f'<tool_call>\n{{"name": "search", "arguments": {{"q": {i}}}}}\n</tool_call>'
            for i in range(2)
        )
        turn = await episode.step([*f"so {calls}".encode(), TOKENIZER.eos_id])
        assert (turn.new_segment, turn.done) == (False, False)
        heard = "".join(f'<|im_start|>tool\n{{"q": {i}}}<|im_end|>\n' for i in range(2))
        assert bytes(turn.tokens).decode() == f"\n{heard}<|im_start|>assistant\n"
        return await episode.step([*b"ok", TOKENIZER.eos_id])

    tokenizer = ByteTokenizer()
    tokenizer.chat_template = TEMPLATE
    last = asyncio.run(play(AgentEnvironment(Prompts(tokenizer, True), run, None).episode(0)))
    assert (last.reward, last.done) == (1.0, True)
    said, first, second = replies[0].output
    assert said.content[0].text == "so"
    assert [first.call_id, second.call_id] == ["call_1_0", "call_1_1"]
    assert [json.loads(call.arguments) for call in (first, second)] == [{"q": 0}, {"q": 1}]
    assert (replies[1].status, replies[1].output_text) == ("completed", "ok")


def test_what_an_episode_does_not_follow_is_refused():
    form = {"format": {"type": "json_object"}}

    def run(task, base_url):
        for asked in ({"text": form}, {"tool_choice": "required"}, {"previous_response_id": "x"}):
            with pytest.raises(openai.BadRequestError, match=r"in words|tool_choice|whole input"):
                respond(base_url, "x", **asked)
        respond(base_url, "x", max_output_tokens=5)
        return 1.0

    assert {(t.fault, t.reward) for t in collected(run)} == {(None, 1.0)}
