"""Tool calls in generated text, in the formats of several model families.

:func:`parse_tools` finds calls in a text, and :func:`call_grammar` makes a model write one. Texts
have no special tokens, so calls whose marks are special tokens (those of GPT-OSS) are not found.
"""

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from moetrain.config.sources import shortened

_BEGIN, _SEP, _END = (f"<.tool.{mark}.>" for mark in ("call.begin", "sep", "call.end"))
"""Marks of DeepSeek, where the dots stand for U+FF5C and U+2581, and of Solar-Open."""
_OF = r"(?::\w{1,32})?"
"""The word that Hy3's tokenizer adds to every mark (``<tool_call:opensource>``)."""
_IN = rf"(?:(?!<tool_call{_OF}>|<invoke |{_BEGIN}).)*?"
"""Text inside a call. It does not reach into the next call, because a text that consists of marks
would then take quadratic time."""
_NS = re.escape("]<]minimax[>[")
"""The mark before every tag of MiniMax-M3."""
_IN_TAG = rf"(?:(?!{_NS}).)*"
"""Text inside a tag of MiniMax-M3, without tags in it."""
_FORMATS = {
    # Hermes, Qwen
    rf"<tool_call>\s*(?P<json>\{{{_IN}\}})\s*</tool_call>": "",
    # Qwen3-Coder, Nemotron; GLM, Hy3; MiniMax-M3, MiniMax-M2: the arguments one by one
    rf"<tool_call>\s*<function=(?P<name>[^<>]+)>(?P<pairs>{_IN})</function>\s*</tool_call>": (
        r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>"
    ),
    rf"<tool_call{_OF}>\s*(?P<name>[^<{{\s]{{1,128}})(?P<pairs>{_IN})</tool_call{_OF}>": (
        rf"<arg_key{_OF}>(.*?)</arg_key{_OF}>\s*<arg_value{_OF}>(.*?)</arg_value{_OF}>"
    ),
    rf'{_NS}<invoke name="(?P<name>[^"<]+)">'
    rf"(?P<pairs>(?:\s*{_NS}<(?P<tag>[^<>\s/]+)>{_IN_TAG}{_NS}</(?P=tag)>)*)\s*{_NS}</invoke>": (
        rf"{_NS}<([^<>\s/]+)>({_IN_TAG}){_NS}</\1>"
    ),
    rf'<invoke name="(?P<name>[^"<]+)">(?P<pairs>\s*(?:<parameter {_IN})?)</invoke>': (
        r'<parameter name="([^"]+)">(.*?)</parameter>'
    ),
    # DeepSeek
    rf"{_BEGIN}(?:function{_SEP})?(?P<name>[^<\n]{{1,128}})(?:{_SEP}|\n)(?:```json)?"
    rf"(?P<json>{_IN})(?:```)?{_END}": "",
    # Solar-Open
    rf"{_BEGIN}[^<]{{0,64}}<.tool.call.name.>(?P<name>[^<]{{1,128}})<.tool.call.args.>"
    rf"(?P<json>{_IN}){_END}": "",
    # Llama, Mistral: JSON and nothing else
    r"\A\s*(?P<json>\[?\{.*\}\]?)\s*\Z": "",
}
"""Patterns of calls, each with the pattern of one argument; empty: the arguments are JSON."""
_MOST_REFERENCES = 100
"""Most references of a chain that are followed; a chain may be a cycle."""
_AROUND = re.compile(
    rf"<.tool.calls.(?:begin|end).>|</?minimax:tool_call>|</?tool_calls{_OF}>|<\|(?:tool_)?calls\|>"
    rf"|{_NS}</?tool_call>"
)


def parse_tools(text: str, schemas: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """Remove the calls of tools from ``text``.

    A call of an unknown tool, or one that cannot be read, stays in the text.

    Args:
        schemas: the JSON schema of each tool's parameters, by the tool's name.

    Returns:
        The rest of the text, and the name and arguments of each call. Arguments are the text of a
        JSON object.
    """
    calls: list[tuple[str, str]] = []
    for pattern, pair in _FORMATS.items() if schemas else ():
        kept, end = "", 0
        for found in re.finditer(pattern, text, re.DOTALL):
            try:
                new = _read(found.groupdict(), pair, schemas)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                continue
            calls += new
            kept, end = kept + text[end : found.start()], found.end()
        if calls:
            return _AROUND.sub("", kept + text[end:]).strip(), calls
    return text, []


def _read(
    parts: dict[str, str],
    pair: str,
    schemas: Mapping[str, Any],
) -> list[tuple[str, str]]:
    """Return the calls of one match of a pattern of :data:`_FORMATS`.

    ``pair``: the pattern of an argument.

    Raises one of the exceptions that :func:`parse_tools` catches: the match is no call.
    """
    name = parts.get("name", "").strip()
    if pair:
        root = schemas[name]
        about = _resolved(root, root).get("properties", {})
        pairs = re.findall(pair, parts["pairs"], re.DOTALL)
        kinds = {key: _resolved(about.get(key, {}), root) for key, _ in pairs}
        calls = [(name, {key: _value(text, kinds[key]) for key, text in pairs})]
    else:
        found = json.loads(parts["json"])
        if name:
            found = {"name": name, "arguments": found}
        found = found if isinstance(found, list) else [found]
        calls = [(call["name"], call.get("arguments", call.get("parameters"))) for call in found]
    if any(name not in schemas or not isinstance(arguments, dict) for name, arguments in calls):
        raise ValueError("the text calls no tool of the request")
    return [(name, json.dumps(arguments, allow_nan=False)) for name, arguments in calls]


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema to which ``schema`` refers in ``root``; itself if it is no reference."""
    for _ in range(_MOST_REFERENCES):
        place = schema.get("$ref")
        if not isinstance(place, str) or not re.match("#(/|$)", place):
            break
        schema = root
        for name in place.split("/")[1:]:
            schema = schema[unquote(name).replace("~1", "/").replace("~0", "~")]
    return schema


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of an argument that is written without quotes, according to its type."""
    try:
        return text if schema.get("type") == "string" else json.loads(text)
    except ValueError:
        return text


_VALUES = {"const", "enum", "default", "examples"}
"""Keywords of a JSON schema that contain values, not schemas."""
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords that contain schemas by name."""


def _moved(schema: Any, place: str) -> Any:
    """Return ``schema`` with its internal references adjusted to its new place in another schema.

    ``place`` is a JSON pointer such as ``#/$defs/0``. The schema's own address (``$id``) is
    removed, because references would be relative to it.
    """
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and re.match("#(/|$)", value):
            found[key] = place + value[1:]
        elif key in _NAMED and isinstance(value, dict):
            found[key] = {name: _moved(part, place) for name, part in value.items()}
        elif key != "$id":
            found[key] = value if key in _VALUES else _moved(value, place)
    return found


def call_grammar(tools: Any, choice: Any, template: str) -> str:
    """Return the grammar of one call of a tool, as Lark in llguidance's dialect.

    Args:
        tools: the tools of the request.
        choice: the request's ``tool_choice``: an object that names a tool, or ``required``, for a
            call of any tool.
        template: the model's chat template.

    Raises ValueError: the template does not write such calls, or there is no such tool.
    """
    others = ("<function=", "<arg_key>", "<invoke ")
    if "<tool_call>" not in template or any(x in template for x in others):
        problem = "this model's chat template does not write calls as JSON in <tool_call> tags"
        raise ValueError(f"tool_choice: {problem}; send auto with a guided_grammar")
    try:
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        names = list(functions) if choice == "required" else [choice["function"]["name"]]
        given = [functions[name].get("parameters", {}) for name in names]
    except (AttributeError, KeyError, TypeError):
        problem = f"{shortened(choice)} does not fit `tools`; send auto or none, or, with tools, "
        problem += "required or the name of one"
        raise ValueError(f"tool_choice: {problem}") from None
    closed = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
    # References in parameters start at the root of the parameters. So each tool's parameters become
    # a definition of the whole schema, and their references start at that definition.
    whole: dict[str, Any] = {"anyOf": [], "$defs": {}}
    for i, (name, parameters) in enumerate(zip(names, given, strict=True)):
        place = f"#/$defs/{i}"
        arguments = {"$ref": place}
        call = closed | {"properties": {"name": {"const": name}, "arguments": arguments}}
        whole["anyOf"].append(call)
        try:
            whole["$defs"][str(i)] = _moved(parameters, place)
        except RecursionError:
            problem = f"the parameters of {shortened(name)} are nested too deeply"
            raise ValueError(f"tool_choice: {problem}") from None
    call = json.dumps(whole)
    return f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {call}\n'
