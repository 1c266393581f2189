"""Grammars that overflow the stack or take endless time or memory fail only their request."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from llguidance import LLMatcher, LLTokenizer, grammar_from

from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.engine import Generator
from moetrain.generate.grammars import GrammarLimits, Grammars
from moetrain.generate.request import BusyError, Request, SamplingParams
from moetrain.models.transformer import Transformer
from moetrain.serve.server import CompletionServer
from tests.lib.architectures import make_architecture
from tests.lib.chat_templates import WITHOUT_TOOLS
from tests.lib.grammar_cases import GRAMMARS, SCHEMA, follows

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ARCH = make_architecture(
    family="qwen3_moe",
    vocab_size=264,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    max_positions=512,
    qk_norm=True,
    num_experts=6,
    num_experts_per_token=2,
    moe_intermediate_size=16,
)
LONGEST_GAP = 2.0
"""The longest time in seconds between two tokens of a stream."""


def make_generator(**settings):
    model = Transformer(ARCH)
    model.init_weights(std=0.3, seed=0)
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "{# <tool_call> #}" + WITHOUT_TOOLS
    return Generator(model, tokenizer, **settings)


# ---- hostile grammars --------------------------------------------------------------------------


def by_format(schema):
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    return CHAT, {"response_format": form}


def by_text(schema):
    return RESPONSES, {"text": {"format": {"type": "json_schema", "name": "it", "schema": schema}}}


def by_json(schema):
    return COMPLETIONS, {"guided_json": schema}


def by_tool(schema):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return CHAT, {"tools": [tool], "tool_choice": "required"}


def by_grammar(text):
    return COMPLETIONS, {"guided_grammar": text}


def by_regex(text):
    return CHAT, {"guided_regex": text}


def by_choice(texts):
    return CHAT, {"guided_choice": texts}


def references(number):
    names = [f"#/$defs/a{i}" for i in range(number)]
    named = {f"a{i}": {"$ref": name} for i, name in enumerate(names[1:])}
    named[f"a{number - 1}"] = {"type": "integer", "maximum": 9, "minimum": 0}
    return {"$defs": named, "$ref": names[0]}


def nested_references(number):
    level = {"type": "object", "required": ["x"]}
    named = {
        f"a{i}": level | {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(number)
    }
    return {"$defs": named | {f"a{number}": {"type": "integer"}}, "$ref": "#/$defs/a0"}


def rules(number, rule, last, form="r{}: {}\n", name="r{}"):
    """Return a chain of rules; @ in ``rule`` stands for the next one's name."""
    chain = (form.format(i, rule.replace("@", name.format(i + 1))) for i in range(number))
    return "".join(chain) + form.format(number, last)


def lark(number, rule, last='"a"'):
    return "start: r0\n" + rules(number, rule, last)


def terminals(number, rule, last='"a"'):
    return "start: R0\n" + rules(number, rule, last, "R{}: {}\n", "R{}")


def gbnf(number, rule):
    return "root ::= r0\n" + rules(number, rule, '"a"', "r{} ::= {}\n")


def nested(number, schema):
    for i in range(number):
        schema = {"anyOf": [schema, {"type": "array", "items": schema, "maxItems": i}]}
        if i % 8 == 7:  # JSON would double with each level
            schema = {"anyOf": [{"type": "null"}, {"type": "boolean"}]}
    return schema


PRIMES = (97, 89, 83, 79)
ENDED = "nested too deeply, or takes more than"
SLOW = f"takes more than|{ENDED}"
NINES = {"type": "integer", "multipleOf": 9973}
HOSTILE = {
    # name: (path and fields, text of the error; None: an answer without an error is valid too)
    "1,000 references": (by_format(references(1000)), None),
    "1,000 references of a response": (by_text(references(1000)), None),
    "1,000 references of a tool": (by_tool(references(1000)), None),
    "1,000 nested references": (by_format(nested_references(1000)), None),
    "30,000 references": (by_json(references(30_000)), None),
    "a reference to itself": (by_json({"$ref": "#"}), None),
    "3,000 rules": (by_grammar(lark(3000, "@")), None),
    "60,000 rules": (by_grammar(lark(60_000, "@")), SLOW),
    "3,000 rules in GBNF": (by_grammar(gbnf(3000, "@")), None),
    "3,000 letters by as many rules": (by_grammar(lark(3000, '"a" @')), None),
    "3,000 letters by as many rules in GBNF": (by_grammar(gbnf(3000, '"a" @')), None),
    "3,000 terminals": (by_grammar(terminals(3000, "@")), None),
    "rules that double": (by_grammar(lark(40, "@ @")), None),
    "rules that double or are empty": (by_grammar(lark(40, "@ @ |", '"a"?')), None),
    "terminals that double": (by_grammar(terminals(40, "@ @")), r"takes more than|too big"),
    "a rule of itself": (by_grammar('start: s\ns: s s s | s s | "a" | "b"'), None),
    "a rule 100,000 times": (by_grammar('start: s{1,100000}\ns: "a"'), None),
    "20,000 parentheses": (by_grammar("start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "nested"),
    "what is in two and not in a third": (
        by_grammar("start: A\nA: /.*a.{50}/ & /.*b.{50}/ & ~/.*c.{50}/"),
        None,
    ),
    "100,000 of a letter": (by_regex("a{1,100000}"), None),
    "10^9 of a letter": (by_regex("((a{1,1000}){1,1000}){1,1000}"), None),
    "5,000 of alternatives": (by_regex("(a|b|ab){1,5000}c"), None),
    "repeated repetitions": (by_regex("(x+x+)+y"), None),
    "2^20 states": (by_regex(".*a.{20}"), None),
    "2^200 states": (by_regex("(.*a.{200}){3}"), None),
    "2,500 letters of any alphabet": (by_regex(r"\w{1,2000}\p{L}{500}"), None),
    "5,000 groups": (by_regex("(" * 5000 + "a" + ")" * 5000), "invalid regex"),
    "100,000 choices": (by_choice([f"text {i}" for i in range(100_000)]), SLOW),
    "long choices": (by_choice(["a" * i for i in range(2500)]), None),
    "50,000 constants": (by_json({"enum": [f"v{i}" for i in range(50_000)]}), None),
    "128 multiples": (
        by_json({"type": "object", "properties": {f"p{i}": {**NINES} for i in range(128)}}),
        None,
    ),
    "128 other multiples": (
        by_json(
            {
                "type": "object",
                "properties": {
                    f"p{i}": {"type": "integer", "multipleOf": 9000 + i} for i in range(128)
                },
            }
        ),
        SLOW,
    ),
    "an escaped keyword": (by_json(r'{"type": "integer", "multiple\u004ff": 1000003}'), SLOW),
    "multiples of 56,606,581": (
        by_text({"type": "integer", "allOf": [{"multipleOf": p} for p in PRIMES]}),
        SLOW,
    ),
    "10^7 characters": (
        by_json({"type": "string", "minLength": 100_000, "maxLength": 10_000_000}),
        None,
    ),
    "10^6 items": (
        by_json(
            {
                "type": "array",
                "minItems": 100_000,
                "maxItems": 1_000_000,
                "items": {"type": "integer"},
            }
        ),
        None,
    ),
    "a pattern of 2^300 states": (
        by_format({"type": "string", "pattern": "^(.*a.{300}){3}$"}),
        None,
    ),
    "100 patterns of names": (
        by_json(
            {
                "type": "object",
                "patternProperties": {f"^a{i}.*b{i}": {"type": "integer"} for i in range(100)},
            }
        ),
        "not disjoint|takes more than",
    ),
    "20,000 names": (
        by_json({"type": "object", "properties": {f"p{i}": {} for i in range(20_000)}}),
        "too large|takes more than",
    ),
    "nested alternatives": (by_format(nested(23, {"type": "integer"})), None),
    "2^16 alternatives": (
        by_json(
            {
                "allOf": [
                    {
                        "anyOf": [
                            {"type": "object", "properties": {f"a{i}{j}": {"type": "integer"}}}
                            for j in range(2)
                        ]
                    }
                    for i in range(16)
                ]
            }
        ),
        "too large|takes more than",
    ),
    "100,000 brackets": (by_json('{"const":' + "[" * 100_000 + "]" * 100_000 + "}"), "recursion"),
    "a constant of 2 MiB": (by_json({"const": "x" * (2 << 20)}), None),
}


# ---- clients -----------------------------------------------------------------------------------


async def post(port, path, body):
    """Return status and value of the answer; ``body`` is a value, or already JSON."""
    reader, writer = await begun(port, path, body)
    got = await reader.read()
    writer.close()
    head, _, rest = got.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(rest)


async def begun(port, path, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


async def follow(port, number, is_over, gaps):
    """Read one stream after the other, and append to ``gaps`` the seconds between tokens.

    Returns the texts, without repetitions.
    """
    texts = set()
    while not is_over.is_set():
        body = {"prompt": [1, 2, number], "max_tokens": 60, "seed": number, "stream": True}
        reader, writer = await begun(port, COMPLETIONS, body)
        text, last = "", time.monotonic()
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                gaps.append(now - last)
                last = now
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["text"]
        writer.close()
        texts.add(text)
    return texts


def body_of(path, fields):
    body = {"max_tokens": 60, "seed": 1, "temperature": 1.0, **fields}
    if path == RESPONSES:
        body |= {"input": "Go", "max_output_tokens": body.pop("max_tokens")}
    elif path == CHAT:
        body |= {"messages": [{"role": "user", "content": "Go"}]}
    else:
        body |= {"prompt": "Go"}
    return body


@contextlib.contextmanager
def serving(generator, **settings):
    """Serve in this process, and yield the port."""
    app = CompletionServer(generator, "tiny", **settings).app
    served = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        wait_until(lambda: served.started, 30)
        yield served.servers[0].sockets[0].getsockname()[1]
    finally:
        served.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def wait_until(is_so, seconds):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(process):
    """Return the ids of the living processes that ``process`` started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == process and state != "Z":
                found.append(int(stat.parent.name))
    return found


def is_alive(process):
    """Return True if ``process`` runs, and is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def forked(generator):
    """Return the ids of the generator's grammar processes."""
    return children(generator.grammars._forking[0].pid)


# ---- tests -------------------------------------------------------------------------------------


@pytest.mark.tier("wide")
def test_hostile_grammars_delay_no_stream_and_end_no_server():
    """The limit includes the longest gap before the attack, which is long on a busy machine."""
    limits = GrammarLimits(seconds=1.0, mib=256)
    generator = make_generator(grammar_limits=limits)
    bodies = [
        (path, json.dumps(body_of(path, fields)).encode()) for (path, fields), _ in HOSTILE.values()
    ]

    async def attack(port):
        is_over, gaps, usual = asyncio.Event(), [], []
        streams = [asyncio.create_task(follow(port, i, is_over, gaps)) for i in range(20)]
        await asyncio.sleep(3)
        usual, gaps[:] = [*gaps], []
        answers = await asyncio.gather(*(post(port, path, body) for path, body in bodies))
        is_over.set()
        return usual, gaps, answers, await asyncio.gather(*streams)

    with serving(generator) as port:
        usual, gaps, answers, texts = asyncio.run(attack(port))
        honest = asyncio.run(post(port, CHAT, body_of(CHAT, {"guided_json": SCHEMA})))
    print(f"gaps: at most {max(usual):.2f} s before, {max(gaps):.2f} s beside {len(HOSTILE)}")
    for name, (status, value) in zip(HOSTILE, answers, strict=True):
        print(name, status, value.get("error", {}).get("message", ""))
    assert len(HOSTILE) >= 30
    assert max(gaps) < LONGEST_GAP + max(usual)
    assert all(len(found) == 1 for found in texts)  # the same in each repetition
    for (name, ((path, _), problem)), (status, value) in zip(HOSTILE.items(), answers, strict=True):
        if status == 200:
            assert problem is None, name
            assert ("output" if path == RESPONSES else "choices") in value
            continue
        says = value["error"]["message"]
        if status == 429:  # on a slow machine no compiler is left for the last ones
            assert "ask again later" in says, (name, says)
            continue
        assert (status, value["error"]["type"]) == (400, "invalid_request_error"), (name, value)
        assert says.startswith("grammar: "), (name, says)
        assert re.search(f"takes more than|{problem or ''}", says), (name, says)
    statuses = [status for status, _ in answers]
    assert statuses.count(400) >= 10
    assert statuses.count(200) >= 5
    assert honest[0] == 200
    assert follows("schema", honest[1]["choices"][0]["message"]["content"])


def test_grammar_is_compiled_once_for_all_prompts_of_a_request(monkeypatch):
    generator, compiled = make_generator(), []
    compile_one = generator.grammars._compile
    monkeypatch.setattr(
        generator.grammars, "_compile", lambda one: (compiled.append(one), compile_one(one))
    )
    schema = {"type": "integer", "multipleOf": 997, "minimum": 1000, "maximum": 9999}
    body = {"prompt": [[i] for i in range(200)], "max_tokens": 6, "guided_json": schema}
    with serving(generator) as port:
        status, value = asyncio.run(post(port, COMPLETIONS, body))
    assert status == 200
    assert all(int(choice["text"]) % 997 == 0 for choice in value["choices"])
    assert len(value["choices"]) == 200
    assert len(compiled) == 1


def test_compiling_ends_when_all_its_clients_hang_up():
    generator = make_generator(grammar_limits=GrammarLimits(seconds=60, mib=4096))
    (path, fields), _ = HOSTILE["multiples of 56,606,581"]

    async def hang_up(port):
        _, first = await begun(port, path, body_of(path, fields))
        _, second = await begun(port, path, body_of(path, fields))
        while generator.grammars._forking is None or len(forked(generator)) != 1:
            await asyncio.sleep(0.02)
        first.close()
        await asyncio.sleep(0.5)
        assert len(forked(generator)) == 1  # the other waits for the same grammar
        second.close()

    with serving(generator) as port:
        asyncio.run(hang_up(port))
        wait_until(lambda: not forked(generator), 5)
        status, value = asyncio.run(post(port, CHAT, body_of(CHAT, {"guided_choice": ["yes"]})))
    assert (status, value["choices"][0]["message"]["content"]) == (200, "yes")


def test_submit_refuses_more_grammars_than_the_limit_until_one_ends():
    generator = make_generator(grammar_limits=GrammarLimits(number=2))
    requests = [
        Request(text, (1,), SamplingParams(grammar=("regex", text), max_tokens=9))
        for text in ("a{5}", "b{5}", "c{5}")
    ]
    generator.submit(*requests[:2])
    with pytest.raises(BusyError, match="2 other grammars are in use, and that is the limit; ask"):
        generator.submit(requests[2])
    generator.submit(Request("d", (1,), requests[0].params))  # it shares a grammar that exists
    generator.abort("a{5}")
    with pytest.raises(BusyError):
        generator.submit(requests[2])
    generator.abort("d")
    ((found,),) = generator.generate(requests[2:])
    assert ByteTokenizer().decode(found.tokens) == "ccccc"


def test_server_answers_429_to_more_grammars_than_the_limit():
    generator = make_generator(grammar_limits=GrammarLimits(number=1))
    body = {"prompt": "a", "max_tokens": 9, "guided_regex": "a{5}"}
    held = generator.grammars.acquire("regex", "b{5}")
    with serving(generator) as port:
        status, value = asyncio.run(post(port, COMPLETIONS, body))
        assert (status, value["error"]["type"]) == (429, "rate_limit_error")
        generator.grammars.release(held)
        status, value = asyncio.run(post(port, COMPLETIONS, body))
    assert (status, value["choices"][0]["text"]) == (200, "aaaaa")


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_masks_equal_those_of_the_library_in_this_process(grammar):
    tokenizer = ByteTokenizer()
    content = tokenizer.export().files["tokenizer.json"]
    tokens = LLTokenizer(content, eos_token=[256])
    grammars = Grammars(tokenizer, [256], 257, GrammarLimits())
    compiled = grammars.acquire(*grammar)
    rng = random.Random(0)
    for _ in range(4):
        matcher = grammars.begin(compiled)
        plain = LLMatcher(tokens, grammar_from(*grammar), log_level=0)
        while not plain.is_stopped():
            allowed_V = allowed_by(plain)
            drafts = []
            expected = [allowed_V]
            ahead = plain.deep_copy()
            for _ in range(3):
                drafts.append(rng.choice([*np.flatnonzero(expected[-1]).tolist(), 66]))
                if ahead.try_consume_tokens(drafts[-1:]) == 0:
                    expected += [np.ones(257, bool)] * (4 - len(expected))
                    break
                expected.append(allowed_by(ahead))
            asked = [(matcher, drafts[:i]) for i in range(len(expected))]
            found_NV = grammars.allowed([*asked[: 1 + len(drafts)], (None, [])])
            np.testing.assert_array_equal(found_NV[:-1], expected[: 1 + len(drafts)])
            assert found_NV[-1].all()
            token = rng.choice(np.flatnonzero(allowed_V).tolist())
            plain.consume_token(token)
            grammars.take({matcher: [token]})
            assert (matcher.end, matcher.has_failed) == (int(plain.is_stopped()), False)
        grammars.end(matcher)
    grammars.release(compiled)


def allowed_by(matcher):
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    allowed_V = bits[:257].astype(bool)
    allowed_V[256] &= matcher.is_accepting()
    return allowed_V


@pytest.mark.parametrize(
    ("name", "grammar"),
    [
        ("rules", ("grammar", lark(3000, "@"))),
        ("letters", ("grammar", lark(3000, '"a" @'))),
        ("references", ("json_schema", json.dumps(nested_references(1000)))),
    ],
)
def test_deep_grammars_compile_where_there_is_time(name, grammar):
    """They need more stack than Linux's default of 8 MiB."""
    grammars = Grammars(ByteTokenizer(), [256], 257, GrammarLimits(seconds=60))
    text = grammars.begin(grammars.acquire(*grammar))
    allowed = set(np.flatnonzero(grammars.allowed([(text, [])])[0]))
    assert {97} == allowed if name != "references" else ord("{") in allowed


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        (GrammarLimits(seconds=60, mib=16), "nested too deeply, or takes more than 16 MiB or 60 s"),
        (GrammarLimits(seconds=0.1, mib=4096), r"takes more than 0\.1 s; make it smaller"),
    ],
)
def test_grammar_beyond_a_limit_is_refused_with_the_limit(limits, problem):
    grammar = ("json_schema", json.dumps({"type": "integer", "multipleOf": 99_991}))
    grammars = Grammars(ByteTokenizer(), [256], 257, limits)
    compiled = grammars.acquire(*grammar)
    with pytest.raises(ValueError, match=problem):
        compiled.ready.result()
    grammars.release(compiled)
    assert not grammars._live


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_grammar_process_that_fails_aborts_its_text_and_is_replaced(how):
    generator = make_generator()
    params = SamplingParams(grammar=("regex", "[a-c]{12}"), max_tokens=20)
    free = SamplingParams(max_tokens=15)
    generator.submit(Request("a", (1,), params), Request("free", (1,), free))
    for _ in range(5):
        generator.step()
    (own,) = forked(generator)
    os.kill(own, how)
    tokens = []
    while generator.is_busy:
        started = time.monotonic()
        found = {completion.request_id: completion for completion in generator.step()}
        assert time.monotonic() - started < LONGEST_GAP
        if "a" in found:
            assert found["a"].finish_reason == "abort"
            assert re.match("[a-c]{5}", ByteTokenizer().decode(found["a"].tokens))
        tokens = found["free"].tokens
    assert len(tokens) == 15
    wait_until(lambda: not is_alive(own), 5)
    ((found,),) = generator.generate([Request("b", (1,), params)])
    assert re.fullmatch("[a-c]{12}", ByteTokenizer().decode(found.tokens))


def test_forking_process_is_replaced_when_it_ends():
    grammars = Grammars(ByteTokenizer(), [256], 257, GrammarLimits())
    before = grammars.begin(grammars.acquire("regex", "a{9}"))
    process = grammars._forking[0]
    process.kill()
    process.wait()
    after = grammars.begin(grammars.acquire("regex", "b{9}"))
    allowed_NV = grammars.allowed([(before, []), (after, [])])
    assert [list(np.flatnonzero(allowed_V)) for allowed_V in allowed_NV] == [[97], [98]]


def test_slow_masks_end_only_their_own_text():
    """Each mask is within the library's limits, but all together would delay others."""
    grammars = Grammars(ByteTokenizer(), [256], 257, GrammarLimits())
    names = [f"t{i}" for i in range(20)]
    text = 'start: s "."\ns: s s | "a" | ' + " | ".join(names) + "\n"
    text += "".join(f"{name}: s s s\n" for name in names)
    grammar = grammars.acquire("grammar", text)
    other = grammars.acquire("regex", "[ab]{1000}")
    slow, quick = grammars.begin(grammar), grammars.begin(other)
    number, longest = 0, 0.0
    while not slow.has_failed:
        number += 1
        started = time.monotonic()
        allowed_NV = grammars.allowed([(slow, []), (quick, [])])
        grammars.take({slow: [97], quick: [98]})
        longest = max(longest, time.monotonic() - started)
        assert (quick.end, quick.has_failed) == (0, False)
        np.testing.assert_array_equal(np.flatnonzero(allowed_NV[1]), [97, 98])
        assert number < 400
    print(f"it ended behind {number} tokens; the longest took {longest:.2f} s")
    assert number > 5  # the library by itself continues indefinitely
    assert longest < LONGEST_GAP
    # A failed grammar can only end, and is compiled again for the next text.
    assert grammars.allowed([(slow, [])])[0].nonzero()[0].tolist() == [256]
    grammars.end(slow)
    grammars.release(grammar)
    grammar = grammars.acquire("grammar", text)
    again = grammars.begin(grammar)
    assert grammars.allowed([(again, [])])[0].nonzero()[0].tolist() == [97]


def serve_until_killed(told, wanted):
    """Compile a short grammar and a long one, and report the forking process and a child."""
    grammars = Grammars(ByteTokenizer(), [256], 257, GrammarLimits(seconds=60, mib=4096))
    grammars.acquire("regex", "a{5}").ready.result()
    (_, fields), _ = HOSTILE["multiples of 56,606,581"]
    grammars.acquire("json_schema", json.dumps(fields["text"]["format"]["schema"]))
    forking = grammars._forking[0].pid
    wait_until(lambda: len(children(forking)) == 2, 10)
    other = os.fork()
    if other == 0:  # it has the sockets too, and stays alive
        time.sleep(60)
        os._exit(0)
    os.write(told, json.dumps([forking, other]).encode())
    os.read(wanted, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_grammar_processes_end_with_a_killed_server():
    told, wanted = os.pipe(), os.pipe()
    server = os.fork()
    if server == 0:
        try:
            serve_until_killed(told[1], wanted[0])
        finally:
            os._exit(1)
    forking, other = json.loads(os.read(told[0], 99))
    try:
        started = [forking, *children(forking)]
        assert len(started) == 3
        os.write(wanted[1], b"x")
        assert os.waitpid(server, 0)[1] == signal.SIGKILL
        wait_until(lambda: not any(is_alive(one) for one in started), 15)
    finally:
        os.kill(other, signal.SIGKILL)
        for file in (*told, *wanted):
            os.close(file)
