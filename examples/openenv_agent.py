"""Episodes of an OpenEnv server (https://github.com/meta-pytorch/OpenEnv), played by the policy.

    OPENENV_URL=http://127.0.0.1:8000 \\
        python -m moetrain.rl --rl.env agent:examples/openenv_agent.py:run ...

The reward is the sum of the rewards of an episode's steps. The policy reads each observation and
answers with a call of a tool: the environment's action, or, where an environment serves MCP, the
tools that it lists. Text without a call is the action too, as JSON, or as the action's one required
field. After an answer that is no action, the policy reads so and has another turn.

The task is the seed of ``reset``, or a line of ``rl.prompts``. Its ``prompt`` is the first message,
before the observation; ``reset``, the arguments of that call, and ``url`` are optional.

The library (``pip install openenv-core openai``) brings the client. The server must allow as many
sessions at once (``max_concurrent_envs``) as there are trajectories in a step. Left out on purpose:
servers that the agent would start by itself, such as containers.
"""

import json
import os
from typing import Any

import httpx
from openai import AsyncOpenAI
from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]

URL = os.environ.get("OPENENV_URL")
MOST_TURNS = int(os.environ.get("OPENENV_TURNS", "8"))
"""Steps of an episode. ``rl.max_turns`` must be at least as large, or there is no reward."""
MOST_TOKENS = int(os.environ.get("OPENENV_TOKENS", "0"))
"""Tokens of one answer; 0: all that remain of ``rl.max_tokens``."""
_OF_MCP = {"Action", "CallToolAction", "ListToolsAction"}
"""Titles of the action's schema in environments whose actions are tool calls."""
_ACT = "act"


async def run(task: Any, base_url: str) -> float:
    line = task if isinstance(task, dict) else {"reset": {"seed": task}}
    if (url := line.get("url", URL)) is None:
        raise ValueError("no server: set OPENENV_URL, or url in the lines of rl.prompts")
    options = {"max_tokens": MOST_TOKENS} if MOST_TOKENS else {}
    client = AsyncOpenAI(base_url=base_url, api_key="none", timeout=None, max_retries=0)
    async with client, GenericEnvClient(base_url=url) as env:
        tools, action_of = await _tools(env, url)
        seen = await env.reset(**line.get("reset", {}))
        first = "\n\n".join(filter(None, [line.get("prompt"), _shown(seen.observation)]))
        messages: list[Any] = [{"role": "user", "content": first}]
        total = 0.0
        for _ in range(MOST_TURNS):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=tools, **options
            )
            message = reply.choices[0].message
            messages.append(message)
            for call in message.tool_calls or [None]:
                seen, reward, is_done = await _step(env, action_of, call, message.content)
                total += reward
                if is_done:
                    return total
                heard = {"role": "tool", "tool_call_id": call.id} if call else {"role": "user"}
                messages.append({**heard, "content": seen})
    return total


async def _tools(env: Any, url: str) -> tuple[list[Any], Any]:
    """Return the policy's tools, and a function from a tool's name and input to an action.

    The name is None for text without a call. The function raises ValueError if the text is no
    action.
    """
    http = url.replace("ws://", "http://", 1).replace("wss://", "https://", 1).rstrip("/")
    async with httpx.AsyncClient(timeout=30) as client:
        reply = await client.get(f"{http}/schema")
        reply.raise_for_status()
    schema = reply.json()["action"]
    if schema.get("title") in _OF_MCP:
        listed = (await env.step({"type": "list_tools"})).observation["tools"]
        tools = [_tool(t["name"], t["description"], t["input_schema"]) for t in listed]

        def call_of(name: str | None, given: Any) -> dict[str, Any]:
            if name is None:
                raise ValueError("call one of the tools")
            return {"type": "call_tool", "tool_name": name, "arguments": given}

        return tools, call_of
    fields = {name: of for name, of in schema["properties"].items() if name != "metadata"}
    needed = [name for name in schema.get("required", ()) if name in fields]

    def action_of(name: str | None, given: Any) -> dict[str, Any]:
        if name is None and not isinstance(given, dict):
            if len(needed) != 1:
                raise ValueError(f"call {_ACT}, or write a JSON object with {', '.join(fields)}")
            return {needed[0]: given}
        return given

    given = {**schema, "properties": fields, "required": needed}
    return [_tool(_ACT, schema.get("description", "Act."), given)], action_of


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


async def _step(env: Any, action_of: Any, call: Any, text: str | None) -> tuple[str, float, bool]:
    """Take the policy's action; return the next observation, the reward, and True at the end."""
    try:
        if call is not None:
            action = action_of(call.function.name, json.loads(call.function.arguments))
        else:
            action = action_of(None, _value(text or ""))
    except ValueError as error:
        return f"No action: {error}.", 0.0, False
    try:
        result = await env.step(action)
    # The server raised it; for a rejected action it is the policy's fault.
    except RuntimeError as error:
        if "VALIDATION_ERROR" not in str(error):
            raise
        return "No action: its fields are not as the schema says.", 0.0, False
    return _shown(result.observation), float(result.reward or 0), result.done


def _value(text: str) -> Any:
    """Return the object that ``text`` encodes as JSON, or the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _shown(observation: dict[str, Any]) -> str:
    """Return an observation's only text, or the observation as JSON."""
    parts = {name: value for name, value in observation.items() if name != "metadata"}
    values = [*parts.values()]
    return values[0] if [type(v) for v in values] == [str] else json.dumps(parts)
