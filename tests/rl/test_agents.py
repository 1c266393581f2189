"""Agents written for OpenAI's client: requests and answers are recorded and trained exactly."""

import asyncio
import json
import os
import re
import socket
import struct
import threading
import time
from contextlib import suppress
from itertools import islice
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.request import Request, SamplingParams
from moetrain.http.tool_calls import parse_tools
from moetrain.rl.agents import AgentEnvironment
from moetrain.rl.envs import Prompts
from tests.lib.agents import SEARCH, TEMPLATE, TOKENIZER, Watched, ask, collected, collector_of


class Patient(Watched):
    """Generates a turn's next token once its client has received the ones before."""

    def __init__(self):
        super().__init__()
        self.changed, self.num_said, self.num_heard = threading.Condition(), 0, 0
        self.is_late = False

    def step(self):
        with self.changed:
            is_heard = self.changed.wait_for(lambda: self.num_heard >= self.num_said, 5)
        self.is_late |= not is_heard
        for completion in (completions := super().step()):
            is_over = completion.finish_reason is not None  # the next turn may be no stream
            self.num_said = self.num_heard if is_over else self.num_said + completion.num_new
        return completions

    def hear(self, number):
        with self.changed:
            self.num_heard += number
            self.changed.notify_all()


def test_a_conversation_is_one_row_of_what_was_generated():
    heard = {}

    def run(task, base_url):
        messages = [{"role": "user", "content": f"task {task}"}]
        for turn in range(3):
            reply = ask(base_url, messages, max_tokens=7 + turn)
            choice = reply.choices[0]
            heard.setdefault((task, base_url), []).append(choice.token_ids)
            assert reply.usage.completion_tokens == len(choice.token_ids)
            messages += [choice.message, {"role": "user", "content": f"more {turn}"}]
        return 0.25

    found = collected(run)
    assert len(found) == 4
    said = [[t.tokens[start:stop] for start, stop in t.actions] for t in found]
    assert sorted(said) == sorted(heard.values())
    for t, turns in zip(found, said, strict=True):
        assert (t.fault, t.reward, t.starts) == (None, 0.25, [])
        assert all(len(turn) <= 7 + i for i, turn in enumerate(turns))
        text = bytes(token for token in t.tokens if token < 256)
        assert text.startswith(b"<|im_start|>user\ntask")
        assert text.count(b"<|im_start|>assistant\n") == 3
        assert text.count(b"<|im_start|>user\nmore") == 2
        (sample,) = t.samples(1.0)
        assert sample.is_action.sum() == sum(map(len, turns))


def test_another_history_begins_a_segment():
    def run(task, base_url):
        for name in "ab":
            messages = [{"role": "user", "content": f"{name}{task['answer']}"}]
            reply = ask(base_url, messages, max_tokens=5).choices[0].message
            messages += [reply, {"role": "user", "content": "go on"}]
            if name == "b":
                ask(base_url, messages, max_tokens=6)
        messages[1] = {"role": "assistant", "content": "in other words"}
        ask(base_url, messages, max_tokens=6)
        return 1

    lines = [{"prompt": "", "answer": n} for n in range(2)]
    for t in collected(run, lines=lines, routing_replay="true"):
        assert (t.fault, len(t.starts), len(t.actions)) == (None, 2, 4)
        samples = t.samples(0.5)
        texts = [
            bytes(x for x in sample.tokens if x < 256).decode("utf-8", "replace")
            for sample in samples
        ]
        starts = [
            f"<|im_start|>user\n{name}{t.task}<|im_end|>\n<|im_start|>assistant\n" for name in "abb"
        ]
        assert all(text.startswith(start) for text, start in zip(texts, starts, strict=True))
        assert "in other words<|im_end|>" in texts[2]
        assert [text.count("go on") for text in texts] == [0, 1, 1]
        assert sum(sample.is_action.sum() for sample in samples) == t.num_written
        assert all((sample.routes >= 0).all() for sample in samples)
        # Each segment is generated from its own tokens alone.
        whole = [sample.tokens.tolist() for sample in samples]
        assert [x for tokens in whole for x in tokens] == t.tokens
        for sample in samples:
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, routes=True)
            request = Request("x", tuple(sample.tokens.tolist()), params)
            ((scored,),) = Watched().generate([request])
            wanted = torch.tensor(scored.prompt_logprobs)[sample.is_action[1:]]
            found = torch.tensor(sample.logprobs)[sample.is_action]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            assert (sample.routes == scored.routes[: len(sample.routes)].numpy()).all()


def streamed(base_url, messages, hear=lambda number: None, **options):
    """Return the message of a stream; ``hear`` is called with the number of tokens of each part."""
    text, asked = "", {"model": "m", "messages": messages, "stream": True, **options}
    with OpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
        for part in client.chat.completions.create(**asked):
            hear(len(part.choices[0].token_ids))
            text += part.choices[0].delta.content
    return {"role": "assistant", "content": text}


@pytest.mark.tier("long", quick=["y-False"])
@pytest.mark.parametrize(("asks_again", "stream"), [("x", False), ("y", False), ("x", True)])
def test_a_resumed_agent_hears_what_it_heard(asks_again, stream):
    """This holds if it sends the same requests; else the recorded row would be another prompt's."""
    asked = ["x"]

    def run(task, base_url):
        messages = [{"role": "user", "content": asked[0]}]
        for turn in range(3):
            if stream:
                message = streamed(base_url, messages, max_tokens=6)
            else:
                message = ask(base_url, messages, max_tokens=6).choices[0].message
            messages += [message, {"role": "user", "content": str(turn)}]
        return 1.0

    expected = [t.tokens for t in collected(run)]
    first, second = collector_of(run), collector_of(run)
    for task in range(2):
        first.start(task, task, 2, seed=0)
    while first.generated < 40:
        first._receive_answers()
        for completion in first.generator.step():
            first.generated += 1
            first._on_completion(completion)
    begun = first.unfinished()
    assert sum(len(t.actions) for t in begun) >= 3
    asked[0] = asks_again
    for t in begun:
        second.resume(t)
    for part in first._active.values():
        part.episode.close()
    found = [t for group in second.finish(range(2)) for t in group]
    if asks_again == "x":
        assert [t.fault for t in found] == [None] * 4
        assert sorted(t.tokens for t in found) == sorted(expected)
        return
    for t, was in zip(sorted(found, key=lambda t: (t.group, t.member)), begun, strict=True):
        assert ((was.group, was.member), bool(was.actions)) == ((t.group, t.member), bool(t.fault))
        assert not was.actions or "it gave other tokens than before" in t.detail


@pytest.mark.parametrize("sends_back", [True, False])
def test_streams_and_asynchronous_agents(sends_back):
    async def run(task, base_url):
        async with AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
            messages = [{"role": "user", "content": "x"}]
            for _ in range(2):
                options = {
                    "stream": True,
                    "max_tokens": 20,
                    "stream_options": {"include_usage": True},
                }
                text, last = "", None
                async for part in await client.chat.completions.create(
                    model="m", messages=messages, temperature=0.3, **options
                ):
                    text += part.choices[0].delta.content or "" if part.choices else ""
                    last = part
                assert last.usage.completion_tokens
                messages.append({"role": "assistant", "content": text if sends_back else ""})
                messages.append({"role": "user", "content": "y"})
        return True

    found = collected(run, max_tokens=400, max_turns=2)
    assert {t.fault for t in found} == {None}
    whole = [t for t in found if len(t.actions) == 2]
    assert whole
    assert all(len(t.starts) == (not sends_back) for t in whole)


@pytest.mark.parametrize("form", ["chat", "response"])
def test_a_streams_tokens_come_as_they_are_generated(form):
    """The generator waits for the client before each token; a buffered turn would take seconds."""
    generator, messages = Patient(), [{"role": "user", "content": "x"}]
    said, parts = [], []

    def run(task, base_url):
        if form == "chat":
            said.append(streamed(base_url, messages, generator.hear, max_tokens=12)["content"])
            return 1.0
        with OpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
            asked = {"input": messages, "max_output_tokens": 12, "stream": True}
            for event in client.responses.create(model="m", **asked):
                if event.type == "response.output_text.delta":
                    parts.append(event.delta)
                    generator.hear(1)
        said.append("".join(parts))
        return 1.0

    def run_whole(task, base_url):
        said.append(ask(base_url, messages, max_tokens=12).choices[0].message.content)
        return 1.0

    (found,) = collected(run, 1, 1, generator=generator)
    (whole,) = collected(run_whole, 1, 1)
    assert not generator.is_late
    assert len(found.tokens) - found.actions[0][0] == 12
    assert (vars(found), said[0]) == (vars(whole), said[1])


def test_the_policy_is_described_by_every_name():
    def run(task, base_url):
        with OpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
            assert [model.id for model in client.models.list().data] == ["policy"]
            names = [client.models.retrieve(name).id for name in ("policy", "gpt/x")]
        ask(base_url, [{"role": "user", "content": "x"}], max_tokens=1)
        return float(names == ["policy", "gpt/x"])

    assert {(t.fault, t.reward) for t in collected(run, 1, 1)} == {(None, 1.0)}


def test_agent_that_leaves_a_stream_keeps_its_trajectory():
    generator, messages = Patient(), [{"role": "user", "content": "x"}]
    after = [{"role": "user", "content": "y"}]

    def leaves(task, base_url):
        with OpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
            asked = {"messages": messages, "max_tokens": 12, "stream": True}
            with client.chat.completions.create(model="m", **asked) as stream:
                next(stream)
        time.sleep(0.2)
        generator.hear(float("inf"))
        ask(base_url, after, max_tokens=5)
        return 1.0

    def stays(task, base_url):
        ask(base_url, messages, max_tokens=12)
        ask(base_url, after, max_tokens=5)
        return 1.0

    (found,), (whole,) = collected(leaves, 1, 1, generator=generator), collected(stays, 1, 1)
    assert not generator.is_late
    assert [stop - start for start, stop in found.actions] == [12, 5]
    assert vars(found) == vars(whole)


def connected(base_url, body=b"", missing=0):
    """Return a connection on which a request, without its last ``missing`` bytes, was sent."""
    url, own = urlsplit(base_url), socket.create_connection(base_url.split("/")[2].split(":"))
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: "
    head += f"application/json\r\ncontent-length: {len(body) + missing}\r\n\r\n"
    own.sendall(head.encode() + body if body else head.encode()[:40])
    return own


def test_connections_that_are_left_cost_no_trajectory_and_are_closed():
    kept, asked = [], {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    whole, stream = (json.dumps(asked | {"stream": x}).encode() for x in (False, True))
    reset = socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)

    def run(task, base_url):
        before = connected(base_url, whole)  # it is closed before the first token
        before.setsockopt(*reset)
        before.close()
        amid = connected(base_url, stream)
        amid.recv(1)
        amid.setsockopt(*reset)
        amid.close()
        connected(base_url, whole, missing=100).close()
        kept.extend(socket.create_connection(base_url.split("/")[2].split(":")) for _ in range(20))
        kept.append(connected(base_url))  # half of a head
        kept.append(connected(base_url, whole, missing=100))
        kept.append(connected(base_url, stream))  # nobody reads it
        ask(base_url, [{"role": "user", "content": "y"}], max_tokens=4)
        return 1.0

    collector = collector_of(run)
    for task in range(2):
        collector.start(task, task, 2, seed=0)
    found = [t for group in collector.finish(range(2)) for t in group]
    assert [(t.fault, t.reward) for t in found] == [(None, 1.0)] * 4
    environment = collector.environment
    for own in kept:
        own.close()
    deadline = time.monotonic() + 20
    while connections_to(environment.address) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert connections_to(environment.address) == 0
    assert (environment.episodes, environment.arriving) == ({}, 0)


def connections_to(address):
    """Return the number of open connections that this process has accepted at ``address``."""
    port, number = f":{int(address.rsplit(':')[-1]):04X}", 0
    own = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # a file that was closed meanwhile
            own.add(os.readlink(f"/proc/self/fd/{entry}"))
    with open("/proc/net/tcp") as table:
        for line in islice(table, 1, None):
            _, here, there, *_, inode = line.split()[:10]
            is_open = here.endswith(port) and not there.endswith(":0000")
            number += is_open and f"socket:[{inode}]" in own
    return number


def raises(task, base_url):
    ask(base_url, [{"role": "user", "content": "x"}])
    raise ValueError("no")


def hangs(task, base_url):
    ask(base_url, [{"role": "user", "content": "x"}])
    time.sleep(30)


async def leaves(task, base_url):
    raise SystemExit(3)


def says_nothing(task, base_url):
    return 1.0


def rewards_nothing(task, base_url):
    ask(base_url, [{"role": "user", "content": "x"}])


def asks_nonsense(task, base_url):
    with pytest.raises(BadRequestError, match=r"is not a list|no text"):
        ask(base_url, [{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(BadRequestError, match="needs n 1"):
        ask(base_url, [{"role": "user", "content": "x"}], n=2)
    with pytest.raises(NotFoundError, match="no episode"):
        ask(base_url.replace("/v1", "x/v1"), [{"role": "user", "content": "x"}])
    raise RuntimeError("done")


@pytest.mark.tier("quick", long=["hangs-timeout-rl.step_timeout"])
@pytest.mark.parametrize(
    ("run", "fault", "detail"),
    [
        (raises, "raised", "ValueError: no"),
        (hangs, "timeout", "rl.step_timeout"),
        (leaves, "raised", "the agent ended with SystemExit: 3"),
        (says_nothing, "nonsense", "its first turn has no tokens, or is done"),
        (rewards_nothing, "nonsense", "its reward is a NoneType"),
        (asks_nonsense, "raised", "RuntimeError: done"),
    ],
)
def test_failing_agents_cost_only_their_trajectory(run, fault, detail):
    def some(task, base_url):
        if task == 0:
            return run(task, base_url)
        ask(base_url, [{"role": "user", "content": "x"}])
        return 1.0

    bad, good = collected(some, members=1, step_timeout=3)
    assert (bad.fault, good.fault, good.reward) == (fault, None, 1)
    assert detail in bad.detail


def test_the_same_question_has_another_answer():
    def run(task, base_url):
        for _ in range(4):
            ask(base_url, [{"role": "user", "content": "x"}], max_tokens=6)
        return 1

    for t in collected(run):
        said = {tuple(t.tokens[a:b]) for a, b in t.actions}
        assert (len(t.starts), len(said)) == (3, 4)


class Marked(ByteTokenizer):
    """A tokenizer of bytes, with marks of one token each; the first mark is the end of text."""

    MARKS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|im_end|>")

    def __init__(self, template):
        super().__init__()
        self.chat_template = template
        self.special_tokens = {"eos_token": self.MARKS[0]}

    def encode_batch(self, texts):
        parts = (re.split(f"({'|'.join(map(re.escape, self.MARKS))})", text) for text in texts)
        ids = ([self.ids(part) for part in text] for text in parts)
        return [SimpleNamespace(ids=np.concatenate(list(part)).astype(int)) for part in ids]

    def ids(self, part):
        return [256 + self.MARKS.index(part)] if part in self.MARKS else [*part.encode()]

    def shown(self, tokens):
        return "".join(chr(t) if t < 256 else self.MARKS[t - 256] for t in tokens)


GLM = """{% for m in messages %}<|{{m.role}}|>
{{m.content}}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
CHATML = """{% for m in messages %}<|user|>{{m.role}}
{{m.content}}END
{% endfor %}{% if add_generation_prompt %}<|user|>assistant
{% endif %}"""


@pytest.mark.parametrize(
    ("template", "end"),
    [(GLM, "<|user|>"), *((CHATML.replace("END", m), m) for m in ("<|im_end|>", "<|endoftext|>"))],
    ids=["the next turn's", "its own", "the end of text"],
)
@pytest.mark.parametrize("how", ["ended", "cut", "stopped"])
def test_the_mark_of_a_turns_end_is_there_once(template, end, how):
    after = f"hi{end}\n<|user|>user\ny{end}\n<|user|>assistant\n"
    after = "hi<|user|>\ny<|assistant|>\n" if template == GLM else after

    def run(task, base_url):
        messages = [{"role": "user", "content": "x"}]
        stop = "i" if how == "stopped" else None
        reply = ask(base_url, messages, stop=stop).choices[0].message
        ask(base_url, [*messages, reply, {"role": "user", "content": "y"}])
        return 1.0

    async def played():
        episode = AgentEnvironment(Prompts(tokenizer, True), run, None).episode(0)
        await episode.reset()
        turn = await episode.step(action)
        await episode.step([*b"o", tokenizer.eos_id])
        return turn

    tokenizer = Marked(template)
    action = [*b"hi"] + tokenizer.ids(end) * (how == "ended")
    turn = asyncio.run(played())
    assert not turn.new_segment
    assert tokenizer.shown([*action, *turn.tokens]) == after


def test_what_an_episode_does_not_follow_is_refused():
    refused = (
        {"guided_regex": "a"},
        {"response_format": {"type": "json_object"}},
        {"max_tokens": 0},
    )

    def run(task, base_url):
        for fields in refused:
            with pytest.raises(BadRequestError, match=r"guided|max_tokens"):
                ask(base_url, [{"role": "user", "content": "x"}], extra_body=fields)
        return float(len(ask(base_url, [{"role": "user", "content": "x"}]).choices))

    assert {(t.fault, t.reward) for t in collected(run)} == {(None, 1.0)}


def test_agent_is_told_when_it_is_cut_off():
    heard = []

    def run(task, base_url):
        messages = [{"role": "user", "content": "x"}]
        for _ in range(2):
            choice = ask(base_url, messages, max_tokens=8).choices[0]
            messages += [choice.message, {"role": "user", "content": "y"}]
        with pytest.raises(NotFoundError, match="it is over"):
            ask(base_url, messages)
        heard.append(task)

    for t in collected(run, tasks=1, max_turns=2, max_tokens=500):
        assert (t.fault, t.is_overlong, t.reward) == (None, True, 0)
    time.sleep(0.5)
    assert heard == [0, 0]


TOOLS = {name: {"properties": {"q": {"type": "string"}, "n": {}}} for name in ("find", "add")}


@pytest.mark.parametrize(
    ("text", "left", "calls"),
    [
        (
            'a <tool_call>\n{"name": "find", "arguments": {"q": "}"}}\n</tool_call>',
            "a",
            [("find", {"q": "}"})],
        ),
        (
            "<tool_call>\n<function=find>\n<parameter=q>\n3\n</parameter>\n<parameter=n>\n3\n"
            "</parameter>\n</function>\n</tool_call>",
            "",
            [("find", {"q": "3", "n": 3})],
        ),
        (
            "b<tool_call>add\n<arg_key>n</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",
            "b",
            [("add", {"n": [1]})],
        ),
        (
            "c<tool_calls:opensource>\n<tool_call:opensource>find<tool_sep:opensource>\n"
            "<arg_key:opensource>q</arg_key:opensource>\n"
            "<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n"
            "<tool_call:opensource>add<tool_sep:opensource>\n</tool_call:opensource>\n"
            "</tool_calls:opensource>",
            "c",
            [("find", {"q": "3"}), ("add", {})],
        ),
        (
            "<tool_calls>\n<tool_call>add<tool_sep>\n<arg_key>n</arg_key>\n"
            "<arg_value>[1]</arg_value>\n</tool_call>\n</tool_calls>",
            "",
            [("add", {"n": [1]})],
        ),
        (
            '<minimax:tool_call><invoke name="add"><parameter name="n">x y</parameter></invoke>'
            '<invoke name="find"></invoke></minimax:tool_call>',
            "",
            [("add", {"n": "x y"}), ("find", {})],
        ),
        (
            'e]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="add">]<]minimax[>[<n>[1]'
            "]<]minimax[>[</n>\n]<]minimax[>[</invoke>\n"
            ']<]minimax[>[<invoke name="find">]<]minimax[>[<q>3 < 4]<]minimax[>[</q>'
            "]<]minimax[>[<n>x y]<]minimax[>[</n>]<]minimax[>[</invoke>\n"
            ']<]minimax[>[<invoke name="find">]<]minimax[>[</invoke>]<]minimax[>[</tool_call>',
            "e",
            [("add", {"n": [1]}), ("find", {"q": "3 < 4", "n": "x y"}), ("find", {})],
        ),
        (
            "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>add\n```json\n"
            '{"n": 1}\n```<|tool_call_end|><|tool_calls_end|>',
            "",
            [("add", {"n": 1})],
        ),
        (
            '<|tool_call_begin|>add<|tool_sep|>{"n": 1}<|tool_call_end|>',
            "",
            [("add", {"n": 1})],
        ),
        (
            "d<|tool_calls|><|tool_call:begin|>ab12<|tool_call:name|>find<|tool_call:args|>"
            '{"q": "<"}<|tool_call:end|><|tool_call:begin|>cd34<|tool_call:name|>add'
            "<|tool_call:args|>{}<|tool_call:end|><|calls|>",
            "d",
            [("find", {"q": "<"}), ("add", {})],
        ),
        ('{"name": "add", "parameters": {"n": 1}}', "", [("add", {"n": 1})]),
        (
            '[{"name": "add", "arguments": {}}, {"name": "find", "arguments": {}}]',
            "",
            [("add", {}), ("find", {})],
        ),
    ],
)
def test_tool_calls_of_every_format(text, left, calls):
    if "<|tool_call_" in text:  # DeepSeek's characters
        text = text.replace("|", "\uff5c").replace("_", "\u2581")
    found, said = parse_tools(text, TOOLS)
    assert (found, [(name, json.loads(given)) for name, given in said]) == (left, calls)
    assert parse_tools(text, {}) == (text, [])
    other = text.replace("add", "rm").replace("find", "rm")
    assert parse_tools(other, TOOLS) == (other, [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{}</tool_call>",
        '{"name": []}',
        "[{",
        "{" * 9999,
        "<tool_call>{" * 9999,
        "<tool_call:opensource>a" * 9999,
        "<|tool_call:begin|><|tool_call:name|>a<|tool_call:args|>" * 9999,
        "<tool_call>" + " " * 99_999,
        '<invoke name="add">' * 9999,
        '<invoke name="add"><n>3</n></invoke>',  # no parameter is lost without a word
        ']<]minimax[>[<invoke name="add">]<]minimax[>[<n>' * 9999,
        # Tags within tags are not known.
        ']<]minimax[>[<invoke name="add">]<]minimax[>[<n>]<]minimax[>[<m>3]<]minimax[>[</m>'
        "]<]minimax[>[</n>]<]minimax[>[</invoke>",
        '{"name": "add", "arguments": {"n": NaN}}',
    ],
)
def test_what_is_no_call_stays_text_and_takes_no_time(text):
    began = time.process_time()
    assert parse_tools(text, {"add": {"properties": 3}}) == (text, [])
    assert time.process_time() - began < 1


def test_tools_are_called_and_their_results_read():
    """The policy is scripted, because the small model calls no tools."""
    heard = []

    def run(task, base_url):
        messages = [{"role": "user", "content": "x"}]
        message = ask(base_url, messages, tools=[SEARCH]).choices[0].message
        heard.append(message)
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": call.function.arguments}
        heard.append(ask(base_url, [*messages, message, result], tools=[SEARCH]).choices[0])
        return 1.0

    async def play(episode):
        turn = await episode.reset()
        assert bytes(turn.tokens).decode().endswith("<|im_start|>assistant\n")
        text = '<tool_call>\n{"name": "search", "arguments": {"q": 1}}\n</tool_call>'
        turn = await episode.step([*text.encode(), TOKENIZER.eos_id])
        assert (turn.new_segment, turn.done) == (False, False)
        assert bytes(turn.tokens).decode() == TOOL_TURN
        return await episode.step([*b"ok", TOKENIZER.eos_id])

    tokenizer = ByteTokenizer()
    tokenizer.chat_template = TEMPLATE
    environment = AgentEnvironment(Prompts(tokenizer, True), run, None)
    last = asyncio.run(play(environment.episode(0)))
    assert (last.reward, last.done) == (1.0, True)
    assert json.loads(heard[0].tool_calls[0].function.arguments) == {"q": 1}
    # Templates may show it, so every rerun has the same.
    assert heard[0].tool_calls[0].id == "call_1_0"
    assert (heard[1].finish_reason, heard[1].message.content) == ("stop", "ok")


TOOL_TURN = '\n<|im_start|>tool\n{"q": 1}<|im_end|>\n<|im_start|>assistant\n'
