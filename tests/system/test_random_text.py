"""Random stop texts and random grammars equal plain implementations.

Each case is drawn by its number. ``RANDOM_TEXT`` selects cases; by default there are a few:

    RANDOM_TEXT=200:1000 python -m pytest tests/system/test_random_text.py  200 from number 1000 on

The plain implementation of stop texts decodes the whole completion at every token, and looks for
each text in it. That of grammars asks the ``regex`` library, for every token, whether the text may
still become a match, and computes the filters and the choice from the whole distribution.
"""

import json
import os
import random
import re

import pytest
import regex
import torch
from starlette.testclient import TestClient

from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams, TextStream
from moetrain.kernels.vocabulary.gumbel import gumbel_noise, noise_keys, stream_of
from moetrain.models.transformer import Transformer
from moetrain.serve.server import CompletionServer
from tests.lib.architectures import make_architecture
from tests.lib.text_streams import NAMES, WholeText, load, random_tokens

__all__ = ["load"]  # a fixture

ARCH = make_architecture(
    family="llama",
    vocab_size=280,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    max_positions=512,
)
MOST = 40
"""Tokens of a completion."""


def numbers(few):
    count, first = map(int, os.environ.get("RANDOM_TEXT", few).split(":"))
    return range(first, first + count)


def again(number, test):
    return f"RANDOM_TEXT=1:{number} pytest tests/system/test_random_text.py -k {test}"


def make_model(seed):
    model = Transformer(ARCH)
    model.init_weights(std=0.3, seed=seed)
    return model


# ---- stop texts ------------------------------------------------------------------------------


def draw_stops(d, text):
    """Draw one to three texts, most of which occur: slices of ``text`` that cut its tokens."""
    stops = []
    for _ in range(d.choice([1, 1, 2, 3])):
        size, start = d.choice([1, 2, 3, 5, 12]), d.randrange(max(1, len(text)))
        stops.append(text[start : start + size] or "NEVER")
    if d.random() < 0.3:  # one inside another, so their order matters
        stops.append(stops[0][1:] or "END")
    return tuple(stop for stop in stops if "\ufffd" not in stop) or ("END",)


def plain_stop(tokenizer, tokens, stops):
    """Return the number of tokens until a stop text appears; None if none does."""
    for number in range(1, len(tokens) + 1):
        if any(stop in tokenizer.decode(tokens[:number]) for stop in stops):
            return number
    return None


def cut(text, stops):
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


@pytest.mark.tier("long", quick=["suffixes", "metaspace", "wordpiece", "no decoder"])
@pytest.mark.parametrize("name", NAMES)
def test_text_stream_stops_where_the_whole_text_first_has_a_stop_text(name, load):
    tokenizer = load(name)
    for number in numbers("6:0"):
        d = random.Random(f"{name} {number}")
        tokens = random_tokens(d, tokenizer)[:250]
        for _ in range(4):
            stops = draw_stops(d, tokenizer.decode(tokens[d.randrange(200) :]))
            stream, found = TextStream(tokenizer, stops), None
            for count, token in enumerate(tokens, 1):
                stream.push(token)
                if stream.is_stopped:
                    found = count
                    break
            wanted = plain_stop(tokenizer, tokens, stops)
            assert found == wanted, (stops, again(number, f"'first_has_a_stop_text and {name}'"))


@pytest.mark.tier("long", quick=["wordpiece"])
@pytest.mark.parametrize("name", ["bytes", "gemma", "llama", "wordpiece"])
def test_completions_end_at_the_first_stop_text_and_the_server_leaves_it_out(name, load):
    tokenizer = load(name)
    for number in numbers("2:0"):
        d = random.Random(f"{name} {number}")
        generator = Generator(make_model(number), tokenizer, num_pages=64, page_size=16)
        prompt = tuple(random_tokens(d, tokenizer)[: d.randrange(1, 9)])
        prompt = tuple(min(token, tokenizer.vocab_size - 1) for token in prompt)
        sampling = {"temperature": d.choice([0.0, 1.0, 2.0]), "seed": number, "max_tokens": MOST}
        free = SamplingParams(**sampling)
        ((whole,),) = generator.generate([Request("free", prompt, free)])
        for turn in range(3):
            stops = draw_stops(d, tokenizer.decode(whole.tokens))
            end = plain_stop(tokenizer, whole.tokens, stops)
            params = SamplingParams(**sampling, stop=stops)
            ((found,),) = generator.generate([Request(f"stop {turn}", prompt, params)])
            what = (stops, again(number, f"'leaves_it_out and {name}'"))
            assert found.tokens == whole.tokens[:end], what
            assert found.finish_reason == ("length" if end is None else "stop"), what
            # A resumed completion continues after its text.
            most = end or MOST
            if most > 1:
                done = d.randrange(1, most)
                params = SamplingParams(**sampling | {"max_tokens": MOST - done}, stop=stops)
                request = Request(f"on {turn}", (*prompt, *found.tokens[:done]), params, done)
                ((rest,),) = generator.generate([request])
                assert rest.tokens == whole.tokens[done:end], (done, *what)
        ends = CompletionServer(generator, "tiny").stop_ids
        free = SamplingParams(**sampling, stop_ids=ends)
        ((whole,),) = generator.generate([Request("free", prompt, free)])
        with TestClient(CompletionServer(generator, "tiny").app) as client:
            for stream in (False, True):
                stops = draw_stops(d, tokenizer.decode(whole.tokens))
                end = plain_stop(tokenizer, whole.tokens, stops)
                body = {"prompt": prompt, "stop": stops, "stream": stream, **sampling}
                reply = client.post("/v1/completions", json=body)
                assert reply.status_code == 200, reply.text
                parts = [reply.json()] if not stream else events(reply.text)
                choices = [part["choices"][0] for part in parts]
                tokens = [token for choice in choices for token in choice["token_ids"]]
                text = "".join(choice["text"] for choice in choices)
                what = (stops, stream, again(number, f"'leaves_it_out and {name}'"))
                assert tokens == whole.tokens[:end], what
                spoken = tokens[:-1] if tokens[-1] in ends else tokens
                wanted = cut(tokenizer.decode(spoken), stops)
                if stream:  # sent text stays, even if a later byte would spoil it
                    plain = WholeText(tokenizer, stops)
                    pieces = [plain.push(token) for token in spoken[:-1]]
                    is_end = len(spoken) == len(tokens)
                    pieces += [plain.push(token, is_end) for token in spoken[-1:]]
                    pieces += [] if is_end else [plain.finish()]
                    wanted = "".join(pieces)
                assert text == wanted, what
                reason = whole.finish_reason if end is None else "stop"
                assert choices[-1]["finish_reason"] == reason, what


def events(text):
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


# ---- grammars --------------------------------------------------------------------------------


def draw_regex(d, depth=3):
    """Draw a pattern of bytes that Python, ``regex`` and grammars read alike, without
    backtracking."""
    kind = d.randrange(7 if depth else 3)
    if kind <= 1:
        return "".join(d.choice("abcxyz 019-") for _ in range(d.randint(1, 4)))
    if kind == 2:
        return d.choice(["[a-c]", "[0-9]", "[a-z0-9]", "(?:é)", r"\.", r"\["])
    if kind == 3:
        return "(" + "|".join(draw_regex(d, depth - 1) for _ in range(d.randint(2, 3))) + ")"
    if kind == 4:
        low = d.randint(0, 2)
        return f"({draw_regex(d, depth - 1)}){{{low},{low + d.randint(1, 3)}}}"
    if kind == 5:
        return f"({draw_regex(d, depth - 1)}){d.choice('?')}"
    return draw_regex(d, depth - 1) + draw_regex(d, depth - 1)


def plain_next(logits, allowed, params):
    """Return each allowed token's probability after temperature and filters, renormalised; fp64."""
    kept = sorted(allowed, key=lambda token: -logits[token])
    scaled = torch.tensor([logits[token] for token in kept], dtype=torch.float64)
    if params.temperature == 0:
        return {kept[0]: 1.0}
    p = torch.softmax(scaled / params.temperature, 0).tolist()
    if params.top_k:
        p = p[: params.top_k]
    p = [x / sum(p) for x in p]
    if params.top_p < 1:
        together, number = 0.0, 0
        while together < params.top_p and number < len(p):
            together, number = together + p[number], number + 1
        p = p[:number]
    p = [x for x in p if x >= params.min_p * p[0]]
    return {token: x / sum(p) for token, x in zip(kept, p, strict=False)}


@pytest.mark.tier("long")
@pytest.mark.parametrize("kind", ["regex", "choice"])
def test_grammars_leave_the_tokens_that_a_match_may_go_on_with(kind):
    tokenizer = ByteTokenizer()
    for number in numbers("5:0"):
        d = random.Random(f"{kind} {number}")
        choices = ["".join(d.choices("abé ", k=d.randint(1, 5))) for _ in range(d.randint(1, 5))]
        pattern, text = draw_regex(d), json.dumps(choices)
        if kind == "choice":
            pattern = "|".join(map(regex.escape, choices))
        pattern_bytes = regex.compile(f"(?:{pattern})".encode())
        generator = Generator(make_model(number), tokenizer, num_pages=64, page_size=16)
        prompt = tuple(d.randrange(256) for _ in range(4))
        filters = d.choice([{}, {}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}])
        if d.random() < 0.2:
            filters = {"top_k": 4, "top_p": 0.8, "min_p": 0.05}
        params = SamplingParams(
            temperature=d.choice([0.0, 0.7, 1.0, 1.5]),
            seed=number,
            max_tokens=40,
            grammar=(kind, text if kind == "choice" else pattern),
            **filters,
        )
        ((found,),) = generator.generate([Request("a", prompt, params)])
        what = (pattern, params, bytes(t for t in found.tokens if t < 256))
        what = (*what, again(number, f"'may_go_on_with and {kind}'"))
        written = bytes(token for token in found.tokens if token != 256)
        if found.finish_reason == "stop":
            assert pattern_bytes.fullmatch(written), what
            assert kind == "regex" or written.decode() in choices, what
            assert kind == "choice" or re.fullmatch(pattern, written.decode()), what
        everything = SamplingParams(max_tokens=1, logprobs=257, temperature=1.0)
        for place, token in enumerate(found.tokens):
            before = bytes(found.tokens[:place])
            request = Request("p", (*prompt, *before), everything)
            ((next_one,),) = generator.generate([request])
            logits = next_one.top_logprobs[0]
            allowed = {
                byte
                for byte in range(256)
                if pattern_bytes.fullmatch(before + bytes([byte]), partial=True)
            }
            if pattern_bytes.fullmatch(before):
                allowed.add(256)
            chances = plain_next(logits, allowed, params)
            keys = noise_keys(
                torch.tensor([stream_of(params.seed, 0)]), torch.tensor([len(prompt) + place])
            )
            noise = gumbel_noise(keys, 257)[0].double()
            score = {t: torch.tensor(p).log().item() + noise[t].item() for t, p in chances.items()}
            assert token == max(score, key=score.__getitem__), (place, allowed, chances, *what)
            assert found.logprobs[place] == pytest.approx(logits[token], abs=1e-4), what


def draw_schema(d, depth=2):
    kind = d.choice(["integer", "enum", "boolean", "string", "const", "array", "object"])
    if depth == 0 and kind in ("array", "object"):
        kind = "null"
    if kind == "integer":
        low = d.randint(-20, 20)
        return {"type": "integer", "minimum": low, "maximum": low + d.randint(0, 300)}
    if kind == "enum":
        return {"enum": d.sample(["x", "é", 3, -1.5, True, None, "a b"], d.randint(1, 4))}
    if kind == "const":
        return {"const": d.choice(["yes", 7, None])}
    if kind == "string":
        return {"type": "string", "pattern": f"^{draw_regex(d, 1)}$"}
    if kind == "array":
        low = d.randint(0, 2)
        sizes = {"minItems": low, "maxItems": low + d.randint(0, 2)}
        return {"type": "array", "items": draw_schema(d, depth - 1), **sizes}
    if kind == "object":
        names = d.sample(["a", "b", "long name", "é"], d.randint(1, 3))
        properties = {name: draw_schema(d, depth - 1) for name in names}
        required = d.sample(names, d.randint(0, len(names)))
        more = {"required": required, "additionalProperties": False}
        return {"type": "object", "properties": properties, **more}
    return {"type": kind}


def is_valid(schema, value):
    """Return True if ``value`` is valid by JSON Schema, for the keywords of :func:`draw_schema`."""
    if "enum" in schema:
        return any(is_valid({"const": one}, value) for one in schema["enum"])
    if "const" in schema:
        wanted = schema["const"]
        return wanted == value and isinstance(wanted, bool) == isinstance(value, bool)
    match schema["type"], value:
        case "null", None:
            return True
        case "boolean", bool():
            return True
        case "integer", bool():
            return False
        case "integer", int():
            return schema["minimum"] <= value <= schema["maximum"]
        case "string", str():
            return re.search(schema["pattern"], value) is not None
        case "array", list():
            sizes = schema["minItems"] <= len(value) <= schema["maxItems"]
            return sizes and all(is_valid(schema["items"], item) for item in value)
        case "object", dict():
            named = schema["properties"]
            fits = all(key in named and is_valid(named[key], x) for key, x in value.items())
            return fits and all(key in value for key in schema["required"])
    return False


@pytest.mark.tier("long")
def test_texts_of_a_schema_are_valid_json_of_it():
    tokenizer, ended = ByteTokenizer(), 0
    for number in numbers("12:0"):
        d = random.Random(f"schema {number}")
        schema = draw_schema(d)
        text = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
        generator = Generator(make_model(number), tokenizer, num_pages=64, page_size=16)
        how = {"temperature": d.choice([0.7, 1.0]), "seed": number, "max_tokens": 120, "n": 3}
        params = SamplingParams(grammar=("json_schema", text), stop_ids=(256,), **how)
        (found,) = generator.generate([Request("a", (1, 2, 3), params)])
        for completion in found:
            what = (schema, tokenizer.decode(completion.tokens), again(number, "valid_json"))
            assert completion.finish_reason in ("stop", "length"), what
            if completion.finish_reason == "stop":
                ended += 1
                assert is_valid(schema, json.loads(tokenizer.decode(completion.tokens))), what
    assert ended >= len(numbers("12:0"))
