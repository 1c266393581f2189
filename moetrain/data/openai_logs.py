"""Reads logs of OpenAI's Responses API, whose turns are items of ``input`` and ``output``.

The format is that of https://platform.openai.com/docs/api-reference/responses: a record is a
response with the ``input`` and the ``instructions`` of its request. An item is a message, a
reasoning, a call of a function or its output. Successive items of the assistant are one turn.

Left out on purpose: calls of tools that OpenAI runs itself (``web_search_call`` and others), whose
results are not in the record.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moetrain.config.sources import shortened
from moetrain.data.messages import BadLineError
from moetrain.data.warned import warn_once

_OF_OUTPUTS = {"message", "reasoning", "function_call"}
"""Types of items by which an ``output`` is recognised."""
_BEFORE = ("previous_response_id", "conversation", "prompt")
"""Fields of a request that name turns which OpenAI keeps."""
_SETTINGS = {
    *("object", "status", "error", "incomplete_details", "background", "include", "model"),
    *("max_output_tokens", "max_tool_calls", "parallel_tool_calls", "prompt_cache_key"),
    *("prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "store"),
    *("stream", "temperature", "text", "tool_choice", "top_logprobs", "top_p", "truncation"),
    *("usage", "user", *_BEFORE),
}
"""Fields of a request and of a response that are no part of the conversation."""
_SETTINGS_OF_TEXTS = {
    "text": {"format", "verbosity"},
    "reasoning": {"effort", "summary", "generate_summary"},
}
"""Settings of a request whose names are those of a text and of a thought, with their keys."""


def without_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record`` without ``text`` and ``reasoning`` if they are settings of a request."""
    return {
        key: value
        for key, value in record.items()
        if not (isinstance(value, dict) and value)
        or not value.keys() <= _SETTINGS_OF_TEXTS.get(key, set())
    }


def is_response(record: Mapping[str, Any]) -> bool:
    """Return whether ``record`` is a response, or a request with its response."""
    output = record.get("output")
    if not isinstance(output, list) or not output:
        return False
    if not all(isinstance(x, dict) and isinstance(x.get("type"), str) for x in output):
        return False
    is_named = record.get("object") == "response" or isinstance(record.get("input"), str | list)
    return is_named and not _OF_OUTPUTS.isdisjoint(x["type"] for x in output)


def read_response(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response as ``prompt`` and ``completion``, two lists of messages.

    Raises BadLineError: turns before the record are not in it, the answer is not whole, there is no
    question or no answer, or an item is of a type that is not read.
    """
    for name in _BEFORE:
        if record.get(name):
            problem = f"`{name}` is {shortened(record[name])}: what was said before the `input` is "
            problem += "not in the record"
            remedy = "write whole conversations as `messages`, or leave such records out"
            raise BadLineError(f"{problem}; {remedy}", kind=f"`{name}` of a response")
    if (status := record.get("status")) not in (None, "completed"):
        problem = f"`status` is {shortened(status)}: the answer is not whole"
        raise BadLineError(f"{problem}; leave such records out", kind="an unfinished response")
    asked, instructions = record.get("input"), record.get("instructions")
    if not asked:
        problem = "it is a response without the `input` of its request"
        raise BadLineError(f"{problem}: {shortened(dict(record))}; write it beside `output`")
    prompt = turns_of_items(asked, "input")
    if isinstance(instructions, str) and instructions:
        prompt = [{"role": "system", "content": instructions}, *prompt]
    elif instructions:
        prompt = [*turns_of_items(instructions, "instructions"), *prompt]
    completion = turns_of_items(record["output"], "output")
    if not completion or completion[-1].keys().isdisjoint(("content", "tool_calls")):
        problem = f"`output` has no answer: {shortened(record['output'])}"
        raise BadLineError(f"{problem}; leave such records out", kind="no answer in a response")
    read = _SETTINGS | {"input", "output", "instructions", "output_text"}
    rest = {key: value for key, value in record.items() if key not in read}
    return {**rest, "prompt": prompt, "completion": completion}


def turns_of_items(items: object, name: str) -> list[dict[str, Any]]:
    """Return the messages of a text, which is the user's, or of the items of the field ``name``.

    Raises BadLineError: an item is of a type that is not read.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    turns: list[dict[str, Any]] = []
    for i, item in enumerate(items) if isinstance(items, Sequence) else ():
        kind = item.get("type", "message") if isinstance(item, dict) else None
        last = turns[-1] if turns and turns[-1]["role"] == "assistant" else {}
        if kind == "message" and "role" in item:
            is_end = last.keys() == {"role", "reasoning_content"} and item["role"] == "assistant"
            turns[len(turns) - is_end :] = [{**last, **item} if is_end else item]
        elif kind == "reasoning":
            thought = _thought_of(item)
            if thought and last.keys() == {"role", "reasoning_content"}:
                last["reasoning_content"] += f"\n\n{thought}"
            elif thought:
                turns.append({"role": "assistant", "reasoning_content": thought})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not last:
                turns.append({"role": "assistant"})
            turns[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.get("call_id")}
            turns.append({**result, "content": item.get("output")})
        else:
            problem = f"{name}[{i}] is neither a message nor a reasoning nor a call of a function"
            remedy = "write the conversation as `messages`, or leave such records out"
            kind = f"an item of the type {kind}"
            raise BadLineError(f"{problem}: {shortened(item)}; {remedy}", kind=kind)
    return turns


def _thought_of(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning, or of its summary. It may be empty: it may be encrypted."""
    for key in ("content", "summary"):
        parts = item.get(key)
        parts = parts if isinstance(parts, list) else []
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        thought = "\n\n".join(text for text in texts if isinstance(text, str) and text.strip())
        if thought and key == "summary":
            warn_once(
                "summaries of reasoning",
                "`output` of records has summaries of thoughts, which are learned as the thoughts; "
                "leave the items of the type reasoning out if that is not meant",
            )
        if thought:
            return thought
    return ""
