"""Completions that follow a grammar, beside unconstrained ones, with drafts, and on the server."""

import json
import re
import sys

import pytest
import torch
from starlette.testclient import TestClient

from moetrain.data.chat import CHATML
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, RequestError, SamplingParams
from moetrain.http.tool_calls import call_grammar, parse_tools
from moetrain.kernels.vocabulary.gumbel import gumbel_noise, noise_keys, stream_of
from moetrain.serve.server import CompletionServer
from tests.lib.chat_templates import WITHOUT_TOOLS
from tests.lib.drafts import foreseen, make_generator
from tests.lib.drafts import make_model as make_long_model
from tests.lib.generators import make_model
from tests.lib.grammar_cases import CHOICES, GRAMMARS, OTHER, SCHEMA, TOOL, follows


def requests_of(**how):
    """Return a request for each grammar and an unconstrained one, with and without filters."""
    requests = []
    for name, grammar in [*GRAMMARS.items(), ("free", None)]:
        for kind, filters in {"plain": {}, "filtered": {"top_k": 9, "top_p": 0.9}}.items():
            params = SamplingParams(
                max_tokens=120 if grammar else 20,
                grammar=grammar,
                seed=len(requests),
                stop_ids=(256,),
                n=2,
                **filters,
                **how,
            )
            requests.append(Request(f"{name} {kind}", tuple(b"Say: "), params))
    return requests


def seen(completions):
    return {
        (c.request_id, c.index): (c.tokens, c.logprobs, c.top_logprobs, c.finish_reason)
        for found in completions
        for c in found
    }


@pytest.mark.tier("long")
def test_texts_follow_their_grammars_and_change_no_others_bits():
    model = make_model().double()  # on a CPU a product's bits depend on the number of rows
    generator = Generator(model, ByteTokenizer(), max_tokens=16)
    requests = requests_of(logprobs=2)
    together = seen(generator.generate(requests))
    for request in requests:
        for key, (tokens, logprobs, _, reason) in seen(generator.generate([request])).items():
            assert (tokens, reason) == (together[key][0], together[key][3]), key
            assert logprobs == pytest.approx(together[key][1])
    tokenizer, texts = ByteTokenizer(), set()
    for (name, _), (tokens, logprobs, _, reason) in together.items():
        kind = name.split()[0]
        if kind != "free":
            assert follows(kind, tokenizer.decode(tokens)), tokenizer.decode(tokens)
            assert reason == "stop"
            texts.add((kind, tuple(tokens)))
        # Log-probabilities are the model's own, whatever is allowed.
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        again = Request("again", (*b"Say: ", *tokens), params)
        scored = generator.generate([again])[0][0].prompt_logprobs[-len(tokens) :]
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(scored))
    assert len(texts) >= 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_drawn_among_those_that_may_follow(temperature):
    """The reference filters all logits, and uses the noise of an unconstrained request."""
    model, tokens = make_model(), list(b"Say: ")
    generator = Generator(model, ByteTokenizer())
    how = {"temperature": temperature, "seed": 5, "max_tokens": 40}
    params = SamplingParams(grammar=GRAMMARS["choice"], **how)
    found = generator.generate([Request("a", tuple(tokens), params)])[0][0].tokens
    chosen, texts = [], [list(text.encode()) for text in CHOICES]
    while True:
        after = {
            t[len(chosen)] for t in texts if len(t) > len(chosen) and t[: len(chosen)] == chosen
        }
        if chosen in texts:
            after.add(256)
        if after <= {256}:
            break
        chosen.append(pick(generator, tokens, chosen, after, temperature, how["seed"]))
        if chosen[-1] == 256:
            break
    assert found == chosen


def pick(generator, prompt, chosen, after, temperature, seed):
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=seed, logprobs=257)
    top = generator.generate([Request("p", (*prompt, *chosen), params)])[0][0].top_logprobs[0]
    stream = torch.tensor([stream_of(params.seed, 0)])
    keys = noise_keys(stream, torch.tensor([len(prompt) + len(chosen)]))
    noise = gumbel_noise(keys, 257)[0] if temperature else torch.zeros(257)
    return max(after, key=lambda t: top[t] + noise[t].item())


def test_the_end_is_no_text():
    """The byte tokenizer's end reads <|endoftext|>, with letters that this grammar allows."""
    params = SamplingParams(grammar=("regex", "[a-z<|>]{30}"), max_tokens=40, n=8, stop_ids=(256,))
    generator = Generator(make_model(), ByteTokenizer())
    for completion in generator.generate([Request("a", (1, 2), params)])[0]:
        assert re.fullmatch("[a-z<|>]{30}", ByteTokenizer().decode(completion.tokens))


@pytest.mark.tier("long")
@pytest.mark.parametrize("draft", [1, 3])
def test_drafts_change_nothing(draft):
    # An untrained model rarely prefers what a grammar allows, and then drafts nothing.
    wide = SamplingParams(grammar=("regex", "([ -O][P-~]){20}"), max_tokens=50, n=16)
    requests = [*requests_of()[:3], Request("wide", tuple(b"Say: "), wide)]
    plain = seen(make_generator("glm4_moe").generate(requests))
    texts = {key: tokens for key, (tokens, *_) in plain.items()}
    for share in (1.0, 0.5):
        generator = make_generator("glm4_moe", draft=draft)
        made = foreseen(generator, texts, share)
        completions = generator.generate(requests)
        drafted, right = seen(completions), sum(c.num_right for c in completions[-1])
        assert made[True] > 5
        assert right > 5
        for key, (tokens, logprobs, *rest) in plain.items():
            found = drafted[key]
            assert (found[0], *found[2:]) == (tokens, *rest), key
            torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(logprobs))


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (("regex", "(a"), "unclosed group"),
        (("json_schema", '{"type": "nope"}'), "Invalid type: nope"),
        (("json_schema", "[1"), "expected"),
        (("choice", "[1"), "Expecting"),
        (("grammar", 'start: "a" foo'), 'unknown name: "foo"'),
        (("regex", r"[^\s\S]"), "grammar: "),  # no text follows it
    ],
)
def test_bad_grammars_are_one_line(grammar, problem):
    generator = Generator(make_model(), ByteTokenizer())
    request = Request("a", (1, 2), SamplingParams(grammar=grammar, max_tokens=9))
    with pytest.raises(RequestError, match=problem) as caught:
        generator.submit(request)
    assert "\n" not in str(caught.value)
    assert not generator.is_busy


def test_grammar_without_its_needs_is_refused(monkeypatch):
    request = Request("a", (1, 2), SamplingParams(grammar=GRAMMARS["regex"], max_tokens=9))
    with pytest.raises(RequestError, match="a generator with a tokenizer"):
        Generator(make_model()).submit(request)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'moetrain\[grammar\]'"):
        Generator(make_model(), ByteTokenizer()).submit(request)
    with pytest.raises(ValueError, match="tempered"):
        SamplingParams(grammar=GRAMMARS["regex"], tempered=True)


@pytest.fixture(scope="module")
def client():
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "{# <tool_call> #}" + WITHOUT_TOOLS
    generator = Generator(make_long_model("glm4_moe"), tokenizer, max_tokens=64)
    server = CompletionServer(generator, "tiny")
    with TestClient(server.app) as client:
        yield client


def ask(client, **body):
    body = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 150, "seed": 3} | body
    reply = client.post("/v1/chat/completions", json=body)
    if reply.status_code != 200:
        return reply.json()["error"]["message"]
    (choice,) = reply.json()["choices"]
    if "tool_calls" in choice["message"]:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        (call,) = choice["message"]["tool_calls"]
        return call["function"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


@pytest.mark.tier("long")
def test_the_server_takes_the_fields_of_others(client):
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    assert follows("schema", ask(client, response_format=form))
    assert follows("schema", ask(client, guided_json=SCHEMA))
    assert follows("regex", ask(client, guided_regex="[a-c]{3,9}(x|y)"))
    assert follows("choice", ask(client, guided_choice=CHOICES))
    assert follows("lark", ask(client, guided_grammar=GRAMMARS["lark"][1]))
    body = {"prompt": "a", "guided_regex": "[a-c]{3,9}(x|y)", "max_tokens": 20}
    assert follows("regex", client.post("/v1/completions", json=body).json()["choices"][0]["text"])
    call = ask(
        client, tools=[TOOL, OTHER], tool_choice={"type": "function", "function": {"name": "add"}}
    )
    assert call["name"] == "add"
    assert follows("schema", call["arguments"])
    assert ask(client, tools=[TOOL], tool_choice="required")["name"] == "add"


CLOSED = {"type": "object", "additionalProperties": False}
DEFINED = {
    "$id": "https://example.org/tool",
    "$ref": "#/$defs/Arguments",
    "$defs": {
        "Arguments": CLOSED
        | {
            "properties": {"of": {"$ref": "#/$defs/Value"}, "as": {"$ref": "#/$defs/Quoted"}},
            "required": ["of", "as"],
        },
        "Quoted": {"const": {"$ref": "#/$defs/Value"}},  # a value, not a reference
    },
}
QUOTED = {"$ref": "#/$defs/Value"}
TREE = CLOSED | {"properties": {"left": {"$ref": "#"}}}
ALIKE = CLOSED | {
    "properties": {"a": {"enum": ["x"]}, "b": {"$ref": "#/properties/a"}},
    "required": ["a", "b"],
}


def defined_by(value):
    return DEFINED | {"$defs": DEFINED["$defs"] | {"Value": {"const": value}}}


@pytest.mark.parametrize(
    ("choice", "parameters", "arguments", "follows"),
    [
        ("required", defined_by("x"), {"of": "x", "as": QUOTED}, True),
        ("required", defined_by("x"), {"of": "y", "as": QUOTED}, False),
        ("first", defined_by("x"), {"of": "x", "as": QUOTED}, True),
        ("first", defined_by("x"), {"of": 7, "as": QUOTED}, False),  # the other tool's value
        ("required", TREE, {}, True),
        ("required", TREE, {"left": {"left": {}}}, True),
        ("required", TREE, {"left": {"right": {}}}, False),
        ("required", ALIKE, {"a": "x", "b": "x"}, True),
        ("required", ALIKE, {"a": "x", "b": "y"}, False),
    ],
)
def test_a_tools_parameters_refer_to_their_own_definitions(choice, parameters, arguments, follows):
    """By JSON Schema, references start at the parameters' root; the other tool has equal names."""
    llguidance = pytest.importorskip("llguidance")
    given = {"first": parameters, "second": defined_by(7)}
    tools = [{"function": {"name": name, "parameters": x}} for name, x in given.items()]
    asked = choice if choice == "required" else {"function": {"name": choice}}
    grammar = call_grammar(tools, asked, "<tool_call>")
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    assert not matcher.is_error(), matcher.get_error()
    call = json.dumps({"name": "first", "arguments": arguments})
    text = f"<tool_call>\n{call}\n</tool_call>".encode()
    assert (matcher.validate_tokens(list(text)) == len(text)) == follows


@pytest.mark.parametrize("mark", ["<function=", "<arg_key>", '<invoke name="'])
def test_calls_that_are_not_json_have_no_grammar(mark):
    with pytest.raises(ValueError, match="does not write calls as JSON in <tool_call> tags"):
        call_grammar([{"function": {"name": "f"}}], "required", f"<tool_call>{mark}")


def test_arguments_by_definition_are_read_by_their_type():
    text = "<tool_call><function=f><parameter=a>\n12\n</parameter></function></tool_call>"
    for a in ({"type": "string"}, {"$ref": "#/$defs/A"}):
        schema = {"properties": {"a": a}, "$defs": {"A": {"type": "string"}}}
        assert parse_tools(text, {"f": schema}) == ("", [("f", '{"a": "12"}')])
    endless = {"properties": {"a": {"$ref": "#/properties/a"}}}
    assert parse_tools(text, {"f": endless}) == ("", [("f", '{"a": 12}')])


@pytest.mark.tier("long")
def test_a_stream_with_tools_has_the_call_at_its_end(client):
    body = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 150, "seed": 3}
    body |= {"tools": [TOOL], "tool_choice": "required"}
    whole = client.post("/v1/chat/completions", json=body).json()
    told = client.post("/v1/chat/completions", json=body | {"stream": True}).text
    *lines, done, _ = told.split("\n\n")
    parts = [json.loads(line.removeprefix("data: ")) for line in lines]
    *before, last = [part["choices"][0] for part in parts]
    assert done == "data: [DONE]"
    assert [x for c in (*before, last) for x in c["token_ids"]] == whole["choices"][0]["token_ids"]
    assert {c["delta"]["content"] for c in before} == {""}
    (call,) = last["delta"]["tool_calls"]
    assert call.pop("index") == 0
    assert [call] == whole["choices"][0]["message"]["tool_calls"]
    assert (last["finish_reason"], before[-1]["finish_reason"]) == ("tool_calls", None)
    assert parts[-1]["usage"] == whole["usage"]
    assert "usage" not in parts[-2]
    assert {(part["id"], part["created"]) for part in parts} == {
        (parts[0]["id"], parts[0]["created"])
    }


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema has no schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type: "),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "a text can follow only one of them"),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_choice": []}, "guided_choice: "),
        ({"tool_choice": "required"}, "'required' does not fit `tools`; send auto or none"),
        ({"tools": [OTHER], "tool_choice": {"function": {"name": "sub"}}}, "does not fit `tools`"),
        ({"tools": [OTHER], "tool_choice": 3}, "3 does not fit `tools`"),
    ],
)
def test_server_refuses_bad_grammars(client, fields, problem):
    assert problem in ask(client, **fields)


def test_a_template_of_other_calls_is_refused(client):
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "{# <tool_call><function=x> #}" + CHATML
    server = CompletionServer(Generator(make_long_model("glm4_moe"), tokenizer), "tiny")
    with TestClient(server.app) as other:
        assert "as JSON in <tool_call>" in ask(other, tools=[OTHER], tool_choice="required")
