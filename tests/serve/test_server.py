"""The HTTP server, asked by OpenAI's own client, gives the generator's tokens."""

import contextlib
import http.client
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from itertools import islice

import openai
import pytest
import torch

from moetrain.cli.serve import main
from moetrain.data.chat import CHATML
from moetrain.data.tokenizer import load_tokenizer
from moetrain.generate.engine import Generator
from moetrain.generate.request import Request, SamplingParams, TextStream, chat_ids
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import save_hf
from tests.lib.generators import make_model
from tests.lib.servers import serving, wait_until

COMMON = {"max_tokens": 20, "temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from moetrain.data.tokenizer import ByteTokenizer

    folder = tmp_path_factory.mktemp("served")
    template = "{% if tools %}{{ tools | tojson }}{% set tools = none %}{% endif %}" + CHATML
    save_hf(make_model(), folder, tokenizer=ByteTokenizer().export(template))
    return folder


@contextlib.contextmanager
def process_serving(folder):
    """Start a serving process; return it and a client."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--port", str(port), "--device", "cpu", "--name", "tiny", "--max_step_tokens", "16"]
    process = subprocess.Popen(
        [sys.executable, "-m", "moetrain.serve", str(folder), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield process, client
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(folder):
    with process_serving(folder) as served:
        yield served


@pytest.fixture(scope="module")
def directly(folder):
    """Return ``directly(prompt, **params)``, which generates without a server."""
    tokenizer = load_tokenizer(str(folder))
    generator = Generator(load_hf(folder), tokenizer)

    def complete(prompt, **params):
        params = SamplingParams(**{**COMMON, "stop_ids": (tokenizer.eos_id,), **params})
        return generator.generate([Request("a", tuple(prompt), params)])[0]

    return complete


@pytest.mark.tier("long")
def test_completions_of_texts_and_token_ids(server, directly):
    _, client = server
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="no model 'a/b' is here; ask for 'tiny'"):
        client.models.retrieve("a/b")
    reply = client.completions.create(model="tiny", prompt=["AB", "xyz"], n=2, logprobs=2, **COMMON)
    expected = [c for p in (b"AB", b"xyz") for c in directly(p, n=2, logprobs=2)]
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    for choice, completion in zip(reply.choices, expected, strict=True):
        assert choice.token_ids == completion.tokens
        assert choice.finish_reason == completion.finish_reason
        assert choice.logprobs.token_logprobs == pytest.approx(completion.logprobs, rel=1e-5)
        assert all(1 <= len(top) <= 2 for top in choice.logprobs.top_logprobs)
    assert reply.usage.prompt_tokens == 5
    assert reply.usage.completion_tokens == sum(len(c.tokens) for c in expected)
    again = client.completions.create(model="tiny", prompt=[65, 66], **COMMON)
    assert again.choices[0].token_ids == expected[0].tokens
    assert again.choices[0].text == reply.choices[0].text


def test_a_stream_is_the_whole_in_parts(server, directly):
    _, client = server
    whole = client.completions.create(model="tiny", prompt="AB", **COMMON).choices[0]
    parts = list(client.completions.create(model="tiny", prompt="AB", stream=True, **COMMON))
    assert "".join(part.choices[0].text for part in parts) == whole.text
    assert [t for part in parts for t in part.choices[0].token_ids] == whole.token_ids
    assert [part.choices[0].finish_reason for part in parts][-1] == whole.finish_reason
    assert len(parts) == len(whole.token_ids)


def test_chats_by_the_template(server, directly, folder):
    _, client = server
    messages = [{"role": "user", "content": "Hello"}]
    expected = directly(chat_ids(load_tokenizer(str(folder)), messages), logprobs=3)[0]
    asked = {"model": "tiny", "messages": messages, "logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**asked, **COMMON).choices[0]
    assert choice.token_ids == expected.tokens
    logprobs = [token.logprob for token in choice.logprobs.content]
    assert logprobs == pytest.approx(expected.logprobs, rel=1e-5)
    top = [[t.logprob for t in token.top_logprobs] for token in choice.logprobs.content]
    assert top[0] == pytest.approx(sorted(expected.top_logprobs[0].values(), reverse=True))
    parts = client.chat.completions.create(**asked, stream=True, **COMMON)
    assert "".join(part.choices[0].delta.content for part in parts) == choice.message.content


def test_tools_go_to_the_template(server, directly, folder):
    _, client = server
    asked = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"a": 1}]}
    ids = chat_ids(load_tokenizer(str(folder)), asked["messages"], asked)
    assert bytes(ids).startswith(b'[{"a": 1}]')
    choice = client.chat.completions.create(model="tiny", **asked, **COMMON).choices[0]
    assert choice.token_ids == directly(ids)[0].tokens
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\] is text that is not JSON"):
        client.chat.completions.create(model="tiny", **{**asked, "tools": ["a"]}, **COMMON)


def test_a_stop_text_ends_the_text_before_it(server):
    _, client = server
    whole = client.completions.create(model="tiny", prompt="AB", **COMMON).choices[0].text
    at = next(i for i in range(3, len(whole) - 2) if "\ufffd" not in whole[i : i + 2])
    stop = whole[at : at + 2]
    before = whole[: whole.index(stop)]
    cut = client.completions.create(model="tiny", prompt="AB", stop=stop, **COMMON).choices[0]
    assert (cut.text, cut.finish_reason) == (before, "stop")
    parts = client.completions.create(model="tiny", prompt="AB", stop=[stop], stream=True, **COMMON)
    assert "".join(part.choices[0].text for part in parts) == before


def test_server_stops_generating_when_a_client_hangs_up(folder):
    """The server in this process has slow steps: generating to the end would take six seconds."""
    generator = Generator(load_hf(folder), load_tokenizer(str(folder)))
    held_back(generator)
    with serving(generator) as (client, _):
        for is_stream in (True, False):
            asked = {"prompt": "A", "max_tokens": 120, "n": 3, "seed": 1, "stream": is_stream}
            connection = begin(client, asked)
            wait_until(lambda: generator.is_busy, 10)
            time.sleep(0.3)
            connection.close()
            wait_until(lambda: not generator.is_busy, 2)
            assert generator.pages.num_available == generator.pages.num_pages


ASKED = {"model": "tiny", "max_tokens": 9, "seed": 1, "temperature": 0.8}


def held_back(generator):
    """Make steps take 250 ms each, until the yielded list is empty."""
    step, slow = generator.step, [True]
    generator.step = lambda: (slow and time.sleep(0.25)) or step()
    return slow


def begin(client, body, small=False):
    """Return a connection on which ``body`` was sent; ``small``: it buffers little."""
    connection = socket.socket()
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", client.base_url.port))
    data = json.dumps({"model": "tiny", **body, "stream": bool(body["stream"])}).encode()
    line = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    headers = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
    connection.sendall(line + headers + data)
    return connection


def has_answer(connection):
    return bool(select.select([connection], [], [], 0.5)[0])


def test_prompts_have_log_probabilities_as_vllm_gives_them(server, directly):
    _, client = server
    how = {"max_tokens": 1, "n": 2, "extra_body": {"prompt_logprobs": 2}}
    asked = {"model": "tiny", "prompt": [[65, 66, 67], [68, 69]], **how}
    choices = client.completions.create(**asked).choices
    parts = [part.choices[0] for part in client.completions.create(stream=True, **asked)]
    choices += sorted(parts, key=lambda choice: choice.index)  # one token each
    for i, choice in enumerate(choices):
        prompt = asked["prompt"][i // 2 % 2]
        (done,) = directly(prompt, max_tokens=1, prompt_logprobs=2)
        first, *rest = choice.prompt_logprobs
        assert first is None
        for token, logprob, top, said in zip(
            prompt[1:], done.prompt_logprobs, done.prompt_top_logprobs, rest, strict=True
        ):
            found = {int(key): value["logprob"] for key, value in said.items()}
            assert found == pytest.approx(top | {token: logprob}, rel=1e-4)
            assert len(top) == 2
    assert not hasattr(
        client.completions.create(model="tiny", prompt="A").choices[0], "prompt_logprobs"
    )
    assert client.models.list().data[0].max_model_len == 128


LONG = "x" * 129


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"max_tokens": 500}, "more than the model's positions"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": [300]}, "a token outside of 0 to 263"),
        ({"prompt": [[10**400]]}, "a token outside of 0 to 263"),
        (
            {"prompt": "A" * 1000},
            "a prompt of 1000 tokens leaves no room for an answer: both together",
        ),
        ({"prompt": ["A"] * 1025}, "1025 prompts x n 1 are more completions than max_queue 1024"),
        ({"prompt": ["A"] * 100, "n": 100}, "100 prompts x n 100 are more completions than"),
        ({"prompt": {}}, "prompt is neither text nor token ids"),
        ({"prompt": [True]}, "prompt is a list, but not of texts"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0, not -1.0"),
        ({"temperature": 10**400}, "temperature: Input should be a valid number, not 1000"),
        ({"temperature": True}, "temperature: Input should be a valid number, not True"),
        ({"max_tokens": "x"}, "max_tokens: Input should be a valid integer, not 'x'"),
        ({"max_tokens": 2.5}, "max_tokens: Input should be a valid integer, not 2.5"),
        (
            {"max_tokens": 0},
            "max_tokens 0 asks for nothing; raise it, or send echo true or prompt_logprobs",
        ),
        ({"max_tokens": 10**400}, "more than the model's positions"),
        ({"top_p": 10**400}, "top_p: Input should be a valid number"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0, not -1"),
        ({"n": 0}, "n: Input should be greater than 0, not 0"),
        ({"n": 10**8}, "n: Input should be less than or equal to 128, not 100000000"),
        ({"stop": [5]}, "stop.0: Input should be a valid string, not 5"),
        ({"stop": ["x"] * 17}, "stop: List should have at most 16 items"),
        ({"stop": [LONG]}, "stop.0: String should have at most 128 characters"),
        ({"logprobs": 21}, "logprobs: Input should be less than or equal to 20, not 21"),
        ({"logprobs": True}, "logprobs: Input should be a valid integer, not True"),
        ({"logprobs": 20, "n": 128, "prompt": ["A"] * 8}, "lower max_tokens, or ask in parts"),
        (
            {"extra_body": {"best_of": 3}},
            "'best_of' 3 is not supported; leave it out",
        ),
        ({"max_tokens": 500, "stream": True}, "more than the model's positions"),
        ({"extra_body": {"prompt_logprobs": 10**7}}, "lower max_tokens, or ask in parts"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_request_is_told_what_is_wrong(server, asked, says):
    _, client = server
    with pytest.raises(openai.BadRequestError, match=re.escape(says)) as found:
        client.completions.create(**{"model": "tiny", "prompt": "A", "max_tokens": 64} | asked)
    assert found.value.type == "invalid_request_error"
    assert len(str(found.value)) < 400


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"messages": []}, "`messages` is not a list of turns"),
        ({"messages": [5]}, "messages[0] is not an object"),
        ({"messages": [{"role": "user", "content": "a"}] * 4097}, "at most 4096 items"),
        ({"top_logprobs": 3}, "top_logprobs has no effect without logprobs true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs: Input should be less than"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "mean the same; send only one"),
    ],
)
def test_a_bad_chat_is_told_what_is_wrong(server, asked, says):
    _, client = server
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(openai.BadRequestError, match=re.escape(says)):
        client.chat.completions.create(**{"model": "tiny", "messages": messages} | asked)


@pytest.mark.parametrize(
    ("method", "path", "kind", "data", "status"),
    [
        ("POST", "/v1/completions", "text/plain", b'{"prompt": "A"}', 415),
        ("POST", "/v1/completions", "application/x-www-form-urlencoded", b"prompt=A", 415),
        ("POST", "/v1/completions", "", b'{"prompt": "A"}', 415),
        ("POST", "/v1/completions", "application/json", b"[" * 100_000, 400),
        ("POST", "/v1/completions", "application/json", b'{"n":' + b"9" * 5000 + b"}", 400),
        ("POST", "/v1/completions", "application/json", b'{"temperature":NaN}', 400),
        ("POST", "/v1/completions", "application/json", b'{"prompt":"\xff"}', 400),
        ("POST", "/v1/completions", "application/json", b"[]", 400),
        ("POST", "/v1/completions", "application/json", b" " * (5 << 20), 413),
        ("GET", "/v1/completions", "application/json", b"", 405),
        ("OPTIONS", "/v1/completions", "application/json", b"", 405),
        ("GET", "/v1/models/", "application/json", b"", 404),
        ("GET", "/nothing", "application/json", b"", 404),
    ],
    ids=lambda value: str(value)[:40],
)
def test_every_error_is_the_protocols(server, method, path, kind, data, status):
    connection = http.client.HTTPConnection("127.0.0.1", server[1].base_url.port, timeout=60)
    connection.request(method, path, data, {"content-type": kind})
    reply = connection.getresponse()
    assert (reply.status, reply.headers["content-type"]) == (status, "application/json")
    assert "access-control-allow-origin" not in reply.headers
    error = json.loads(reply.read())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]


def test_weights_that_are_no_numbers_are_the_servers_fault(folder):
    model = load_hf(folder)
    with torch.no_grad():
        model.embed.weight.fill_(math.nan)
    with serving(Generator(model, load_tokenizer(str(folder)))) as (client, _):
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="are not finite numbers"):
                client.completions.create(model="tiny", prompt="A", stream=stream, logprobs=2)


def test_a_stream_that_fails_says_so(folder):
    generator = Generator(load_hf(folder), load_tokenizer(str(folder)))
    step, steps = generator.step, []

    def fail_later():
        steps.append(1)
        if len(steps) == 4:
            raise IndexError("of this test")
        return step()

    generator.step = fail_later
    with serving(generator) as (client, _):
        stream = client.completions.create(prompt="A", stream=True, **ASKED)
        assert [len(part.choices[0].token_ids) for part in islice(stream, 3)] == [1, 1, 1]
        with pytest.raises(openai.APIError, match="the server failed at this; its log says why"):
            next(stream)
        assert len(client.completions.create(prompt="A", **ASKED).choices[0].token_ids) == 9


@pytest.mark.tier("long")
def test_more_than_the_queue_holds_is_refused(folder):
    """A refused request can be repeated once others are done, or have hung up."""
    generator = Generator(load_hf(folder), load_tokenizer(str(folder)), max_sequences=1)
    slow = held_back(generator)
    with serving(generator, max_queue=3) as (client, _):
        stream = client.completions.create(prompt="A", stream=True, **ASKED)
        next(iter(stream))
        waiting = [begin(client, {"prompt": "B", "n": 2, **ASKED, "stream": s}) for s in (0, 1)]
        wait_until(lambda: len(generator.scheduler.waiting) == 2, 10)
        refused = [one for one in waiting if has_answer(one)]
        assert len(refused) == 1
        assert refused[0].recv(1 << 16).startswith(b"HTTP/1.1 429 ")
        with pytest.raises(openai.RateLimitError, match="3 completions run or wait, of max_queue"):
            client.completions.create(prompt="A", **ASKED)
        for one in waiting:  # it hangs up before its first token
            one.close()
        wait_until(lambda: not generator.scheduler.waiting, 2)
        assert generator.is_busy
        second = client.completions.create(prompt="A", n=2, stream=True, **ASKED)
        stream.close()
        next(iter(second))
        second.close()
        wait_until(lambda: not generator.is_busy, 2)
        slow.clear()
        assert len(client.completions.create(prompt="A", n=3, **ASKED).choices) == 3


def test_unread_stream_does_not_block_other_requests(folder):
    """An unread stream is generated to its end, and another request gets its slot."""
    generator = Generator(load_hf(folder), load_tokenizer(str(folder)))
    with serving(generator, max_queue=16) as (client, served):
        # Buffers are small: connections inherit the listener's.
        served.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = {"prompt": "A", "n": 16, "max_tokens": 40, "seed": 1, "stream": True}
        stuck = begin(client, body | {"logprobs": 20, "temperature": 3.0}, small=True)
        wait_until(lambda: generator.is_busy, 10)
        wait_until(lambda: not generator.is_busy, 60)
        time.sleep(0.1)  # until the last step is reported
        assert len(client.completions.create(prompt="A", n=16, **ASKED).choices) == 16
        wait_until(lambda: len(served.server_state.tasks) == 1, 10)  # much is still unsent
        stuck.close()


def test_the_server_stops_in_order(server):  # must be the last test of this server
    process, client = server
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) in (0, -signal.SIGTERM)
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


@pytest.mark.tier("wide")
def test_server_requires_a_token_from_other_machines(folder, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(folder), "--port", str(port), "--device", "cpu", "--host", "0.0.0.0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "moetrain.serve", *words],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        file = tmp_path / "moetrain" / "serve.token"
        assert lines == [
            f"the bearer token is in {file}\n",
            f"serving {folder} at http://0.0.0.0:{port}\n",
        ]
        at = f"http://127.0.0.1:{port}/v1"
        with pytest.raises(openai.AuthenticationError, match="no bearer token"):
            openai.OpenAI(base_url=at, api_key="none", max_retries=20).models.list()
        token = file.read_text().strip()
        known = openai.OpenAI(base_url=at, api_key=token, max_retries=0).models.list()
        assert [model.id for model in known] == [str(folder)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--auth", "none", "--token_file", "x"], "token_file: 'x' contradicts auth 'none'"),
        (["--auth", "maybe"], "serve: argument --auth: invalid choice"),
    ],
)
def test_bad_settings_of_access_are_refused(words, says, folder, capsys):
    assert main([str(folder), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {says}")


@pytest.mark.parametrize("words", [["--port", "x"], ["--cache_tokens", "0"], ["--prot", "1"]])
def test_a_bad_setting_is_one_line(words, folder, capsys):
    assert main([str(folder), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port", "99999"], "port: 99999 is not a port, 1 to 65535 (0: any free one)"),
        (["--max_queue", "0"], "max_queue: 0 is not positive; choose 1 or more"),
        (["--max_request_mib", "-1"], "max_request_mib: -1 is not positive; choose 1 or more"),
    ],
)
def test_a_number_out_of_range_is_one_line(words, says, folder, capsys):
    assert main([str(folder), *words]) == 2
    assert capsys.readouterr().err == f"error: {says}\n"


def test_text_waits_for_whole_characters_and_stop_texts():
    from moetrain.data.tokenizer import ByteTokenizer

    text = TextStream(ByteTokenizer(), ["END"])
    given = [text.push(byte) for byte in "aé".encode()]
    assert "".join(given) == ""  # two characters might be the start of END
    given += [text.push(byte) for byte in b"bcEN"]
    assert "".join(given) == "aébc"
    assert text.push(ord("D")) == ""
    plain = TextStream(ByteTokenizer())
    assert [plain.push(byte) for byte in "é!".encode()] == ["", "é", "!"]
    assert [plain.push(0xC3), plain.push(0xC3, is_last=True)] == ["", "\ufffd\ufffd"]
