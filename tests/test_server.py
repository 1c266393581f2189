"""The HTTP server, asked by OpenAI's own client: the tokens that generation gives without it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import openai
import pytest
import uvicorn
from test_rollout import make_model

from moetrain.data.chat import CHATML
from moetrain.data.tokenizer import load_tokenizer
from moetrain.data.tokenizer_files import tokenizer_files
from moetrain.models import load_hf, save_hf
from moetrain.rollout import Generator, Request, SamplingParams
from moetrain.rollout.server import make_app
from moetrain.rollout.text import TextStream, chat_ids
from moetrain.serve import main

COMMON = {"max_tokens": 20, "temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from moetrain.data.tokenizer import ByteTokenizer

    folder = tmp_path_factory.mktemp("served")
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    save_hf(make_model(), folder, tokenizer=tokenizer_files(ByteTokenizer(), template))
    return folder


@pytest.fixture(scope="module")
def server(folder):
    """The process that serves, and a client of it."""
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
def directly(folder):
    """``directly(prompt, **params)``: what the generator gives without a server."""
    tokenizer = load_tokenizer(str(folder))
    generator = Generator(load_hf(folder), tokenizer)

    def complete(prompt, **params):
        params = SamplingParams(**{**COMMON, "stop_ids": (tokenizer.eos_id,), **params})
        return generator.generate([Request("a", tuple(prompt), params)])[0]

    return complete


def test_completions_of_texts_and_token_ids(server, directly):
    _, client = server
    assert client.models.list().data[0].id == "tiny"
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
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\] is not an object"):
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


def test_who_hangs_up_is_served_no_further(folder):
    """By a server in this process, whose steps are slow: to the end it would take six seconds."""
    generator = Generator(load_hf(folder), load_tokenizer(str(folder)))
    step = generator.step
    generator.step = lambda: time.sleep(0.05) or step()
    app = make_app(generator, "tiny")
    served = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        wait_until(lambda: served.started, 30)
        port = served.servers[0].sockets[0].getsockname()[1]
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=30)
        stream = client.completions.create(
            model="tiny", prompt="A", max_tokens=120, n=3, seed=1, stream=True
        )
        next(iter(stream))
        assert generator.is_busy
        stream.close()
        wait_until(lambda: not generator.is_busy, 2)
        assert generator.pages.num_available == generator.pages.num_pages
    finally:
        served.should_exit = True
        thread.join(30)


def wait_until(is_so, seconds):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"prompt": "A", "max_tokens": 500}, "more than the model's positions"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": [300]}, "not all of 0 to 263"),
        ({"prompt": "A", "temperature": -1}, "temperature -1"),
        ({"prompt": "A", "max_tokens": "x"}, "wrong type"),
        ({"prompt": "A", "max_tokens": 2.5}, "wrong type: max_tokens 2.5"),
        ({"prompt": "A", "stop": [5]}, "stop"),
        ({"prompt": "A", "best_of": 3}, "'best_of' is not supported"),
        ({"prompt": "A", "max_tokens": 500, "stream": True}, "more than the model's positions"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(server, asked, says):
    _, client = server
    with pytest.raises(openai.BadRequestError, match=says):
        client.completions.create(model="tiny", **asked)


def test_the_server_stops_in_order(server):  # the last test here
    process, client = server
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) in (0, -signal.SIGTERM)
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_others_are_served_for_a_token(folder, tmp_path):
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
def test_settings_of_who_is_served(words, says, folder, capsys):
    assert main([str(folder), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {says}")


@pytest.mark.parametrize("words", [["--port", "x"], ["--cache_tokens", "0"], ["--prot", "1"]])
def test_a_bad_setting_is_one_line(words, folder, capsys):
    assert main([str(folder), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


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
    assert [plain.push(0xC3), plain.end()] == ["", "\ufffd"]
