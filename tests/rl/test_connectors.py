"""Environments of other libraries as agents: the examples play them with the libraries' own
clients.

A test with a library is skipped where it is missing; tests with a scripted policy need none.
"""

import asyncio
import importlib.util
import json
import socket
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from moetrain.config import Config, ConfigError
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.rl.agents import AgentEnvironment
from moetrain.rl.envs import Prompts
from moetrain.rl.envs.shipped import open_environment
from tests.lib.agents import TEMPLATE, TOKENIZER, collected


@contextmanager
def served(app):
    """Return the address of ``app``."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def agent_of(name, monkeypatch):
    """Return ``run`` of an example, opened like rl.env."""
    monkeypatch.chdir(importlib.util.find_spec(name).origin.rpartition("/examples/")[0])
    settings = Config.load("rl-sort", [f"rl.env=agent:examples/{name}.py:run"], environ={}).rl
    return open_environment(settings, TOKENIZER).run


def digits(trajectory):
    """Count the digits that the policy wrote."""
    return sum(t in b"0123456789" for a, b in trajectory.actions for t in trajectory.tokens[a:b])


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("VERIFIERS_CONFIG", "none.toml")
    for name, library in (("openenv_agent", "openenv.core"), ("verifiers_agent", "verifiers.v1")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ConfigError, match=rf"^rl.env: cannot load .*{library}"):
            agent_of(name, monkeypatch)


class Client:
    """A GenericEnvClient whose actions have one field, and which ends at the third."""

    opened: ClassVar = []

    def __init__(self, base_url):
        self.steps, self.reset_with = [], None
        self.opened.append(self)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        self.opened.remove(self)

    async def reset(self, **given):
        self.reset_with = given
        return SimpleNamespace(observation={"text": "begin", "metadata": {}}, done=False)

    async def step(self, action):
        if action == {"type": "list_tools"}:
            tool = {"name": "say", "description": "Say.", "input_schema": {"type": "object"}}
            return SimpleNamespace(observation={"tools": [tool]})
        if action == {"text": "break"}:
            raise RuntimeError("Server error: no (code: EXECUTION_ERROR)")
        if not {"text", "tool_name"} & action.keys():
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        self.steps.append(action)
        seen = {"heard": len(self.steps), "by": "x"}
        is_last = len(self.steps) == 3
        return SimpleNamespace(observation=seen, reward=None if is_last else 0.5, done=is_last)


def call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SAY = {"title": "Say", "required": ["text"], "properties": {"text": {}, "metadata": {}}}
TWO = {"title": "Two", "required": ["text", "to"], "properties": {"text": {}, "to": {}}}
CALLED = [{"type": "call_tool", "tool_name": "say", "arguments": {"text": t}} for t in "abc"]
HEARD = '{"heard": %d, "by": "x"}'
NOT_SO = "No action: its fields are not as the schema says."
LINE = {"prompt": "Be brief.", "reset": {"seed": 5, "level": 1}}


@pytest.mark.parametrize(
    ("schema", "task", "says", "reads", "steps", "reward"),
    [
        (
            SAY,
            7,
            ["a", '{"text": "b"}', '{"no": 1}', "c"],
            ["begin", HEARD % 1, HEARD % 2, NOT_SO],
            [{"text": "a"}, {"text": "b"}, {"text": "c"}],
            1.0,
        ),
        (
            TWO,
            LINE,
            ["a", call("act", {"text": "a", "to": 1}), call("act", {})],
            [
                "Be brief.\n\nbegin",
                "No action: call act, or write a JSON object with text, to.",
                HEARD % 1,
            ],
            [{"text": "a", "to": 1}],
            0.5,
        ),
        (
            {"title": "CallToolAction", "properties": {}},
            7,
            [*(call("say", {"text": t}) for t in "ab"), "c", call("say", {"text": "c"})],
            ["begin", HEARD % 1, HEARD % 2, "No action: call one of the tools."],
            CALLED,
            1.0,
        ),
        (SAY, 7, ["break"], ["begin"], [], "EXECUTION_ERROR"),
    ],
    ids=["text", "several fields, and too many turns", "tools of MCP", "the server fails"],
)
def test_an_openenv_server_by_a_scripted_policy(
    schema, task, says, reads, steps, reward, monkeypatch
):
    library = ModuleType("openenv.core")
    library.GenericEnvClient = Client
    monkeypatch.setitem(sys.modules, "openenv.core", library)
    monkeypatch.setenv("OPENENV_TURNS", "3" if schema is TWO else "8")
    tokenizer, heard, taken, begun = ByteTokenizer(), [], [], []
    tokenizer.chat_template = TEMPLATE

    async def play(episode):
        turn = await episode.reset()
        for text in says:
            assert not turn.done
            (client,) = Client.opened
            begun[:], taken[:] = [client.reset_with], client.steps
            words = bytes(turn.tokens).decode().split("<|im_end|>")[-2]
            heard.append(words.rpartition("<|im_start|>")[2].partition("\n")[2])
            turn = await episode.step([*text.encode(), TOKENIZER.eos_id])
            taken[:] = client.steps
        return turn

    with served(
        Starlette(routes=[Route("/schema", lambda _: JSONResponse({"action": schema}))])
    ) as url:
        monkeypatch.setenv("OPENENV_URL", "http://127.0.0.1:9" if task is LINE else url)
        run = agent_of("openenv_agent", monkeypatch)
        environment = AgentEnvironment(Prompts(tokenizer, True), run, None)
        episode = environment.episode(0)
        episode.task = {**LINE, "url": url} if task is LINE else task
        if isinstance(reward, str):
            with pytest.raises(RuntimeError, match=reward):
                asyncio.run(play(episode))
        else:
            turn = asyncio.run(play(episode))
            assert (turn.done, turn.reward) == (True, reward)
    assert heard == reads
    assert (taken, begun) == (steps, [task["reset"] if task is LINE else {"seed": 7}])
    assert Client.opened == []


def test_an_openenv_server(monkeypatch):
    core = pytest.importorskip("openenv.core")

    class Say(core.Action):
        text: str

    class Heard(core.Observation):
        text: str

    class Digits(core.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **given):
            self.number = 0
            return Heard(text=f"Digits {seed}.")

        def step(self, action, timeout_s=None, **given):
            self.number += 1
            count = sum(c in "0123456789" for c in action.text)
            return Heard(text="More.", reward=count, done=self.number == 3)

        @property
        def state(self):
            return core.State(step_count=self.number)

    monkeypatch.setenv("OPENENV_TOKENS", "8")
    with served(core.create_fastapi_app(Digits, Say, Heard, max_concurrent_envs=4)) as url:
        monkeypatch.setenv("OPENENV_URL", url)
        found = collected(agent_of("openenv_agent", monkeypatch))
    assert [(t.fault, len(t.actions), t.reward) for t in found] == [
        (None, 3, digits(t)) for t in found
    ]
    texts = [bytes(x for x in t.tokens if x < 256).decode("utf-8", "replace") for t in found]
    assert [f"Digits {t.task}." in text for t, text in zip(found, texts, strict=True)] == [True] * 4


TASKSET = """
import verifiers.v1 as vf


class Digits(vf.Task[vf.TaskData]):
    @vf.reward(weight=2.0)
    async def digits(self, trace) -> float:
        return sum(c in "0123456789" for c in trace.last_reply) / 2


class Tasks(vf.Taskset[Digits]):
    def load(self):
        for i in range(3):
            yield Digits(vf.TaskData(prompt=f"Digits {i}."), self.config.task)


__all__ = ["Tasks"]
"""
SETTINGS = """
[env.taskset]
id = "digit_tasks"
[env.agent]
harness.id = "null"
runtime.type = "subprocess"
"""


def test_a_verifiers_environment(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1")
    (tmp_path / "digit_tasks.py").write_text(TASKSET)
    (tmp_path / "env.toml").write_text(SETTINGS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERIFIERS_CONFIG", str(tmp_path / "env.toml"))
    agent, ports = agent_of("verifiers_agent", monkeypatch), set()

    def run(task, base_url):
        ports.add(int(base_url.split(":")[2].partition("/")[0]))
        return agent(task, base_url)

    lines = [{"prompt": "", "idx": 1}, {"prompt": "", "idx": 5}]
    found = collected(run, max_tokens=12, step_timeout=120, lines=lines)
    assert [(t.fault, len(t.actions), t.reward) for t in found] == [
        (None, 1, digits(t)) for t in found
    ]
    texts = [bytes(x for x in t.tokens if x < 256).decode("utf-8", "replace") for t in found]
    number = [1 if t.task == 0 else 2 for t in found]
    assert all(f"Digits {n}." in text for n, text in zip(number, texts, strict=True))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    open_to = [int(line[2].partition(":")[2], 16) for line in lines if line[3] in ("01", "08")]
    assert not ports & {*open_to}  # no episode leaves a connection open
