"""Reads the tools of a conversation, and the nulls that tables put into tools and calls.

:func:`read_tools` returns tools in OpenAI's form, in which ``parameters`` is a JSON schema. Chat
templates read only this form: GPT-OSS's writes only the parameters in ``properties``. The function
reads bare functions, the tools of Anthropic, MCP, Bedrock and Gemini, Qwen-Agent's lists of
parameters, and xLAM's mappings of parameters to Python's types.

Tables (Arrow, Parquet) have each key in all of their rows, and null where a row has no value.
:func:`without_nulls`, :func:`read_tools` and :func:`without_filled` drop such nulls.

Left out on purpose: schemas of other kinds than JSON's. Such parameters stay as they are, and a
conversation is refused if the template does not show them (:mod:`moetrain.data.chat`).
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from moetrain.data.warned import warn_once

_PARAMETERS = (
    *("parameters", "input_schema", "inputSchema"),
    *("parametersJsonSchema", "parameters_json_schema"),
)
"""Names of a tool's parameters: OpenAI's, Anthropic's, MCP's, and Gemini's two for JSON schema."""
_ARGUMENTS = ("arguments", "args", "params", "inputs")
"""Names of a tool's parameters if it has none of :data:`_PARAMETERS`. They count only if they
describe each parameter, as BitAgent's ``arguments`` do."""
_DECLARATIONS = ("functionDeclarations", "function_declarations")
"""Names of Gemini's list of tools within a tool."""
_TYPES = {
    **{name: name for name in ("string", "integer", "number", "boolean", "array", "object")},
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("float", "double"), "number"),
    "bool": "boolean",
    **dict.fromkeys(("list", "tuple", "set", "frozenset", "sequence", "iterable"), "array"),
    **dict.fromkeys(("dict", "mapping"), "object"),
    **dict.fromkeys(("null", "none", "nonetype"), "null"),
}
"""JSON schema's type for each name of a type, in lower case. Names of other languages are among
them."""
_SINGLE = {"string", "integer", "number", "boolean"}
"""Types whose union ``transformers`` writes as a list of their names."""
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of JSON schema whose value has a schema for each name."""
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
KEYWORDS = {
    *(*_OF_SCHEMAS, *_LISTS, *_ONE, "type", "required", "description", "title", "default", "enum"),
    *("const", "examples", "example", "nullable", "format", "strict", "minProperties"),
    *("maxProperties", "dependentRequired", "unevaluatedProperties", "deprecated", "readOnly"),
}
"""Keywords of JSON schema, which are not names of parameters. Others begin with ``$`` or ``x-``."""
TABLED = ("tools", "functions", "tool_calls", "function_call", *("arguments", "parameters", "args"))
"""Keys within which a null may be meant. This module decides which of these nulls are dropped."""


def without_nulls(value: Any, kept: Collection[str] = ()) -> Any:
    """Return ``value`` without keys whose value is null. The values of ``kept`` stay unchanged."""
    if isinstance(value, dict):
        return {
            key: inner if key in kept else without_nulls(inner, kept)
            for key, inner in value.items()
            if inner is not None
        }
    return [without_nulls(inner, kept) for inner in value] if isinstance(value, list) else value


# ---- tools ---------------------------------------------------------------------------------------


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``tools`` in OpenAI's form: ``{"type": "function", "function": {...}}``.

    Parameters become a JSON schema, without nulls. A tool without a name stays as it is.
    """
    return [_read_tool(tool) for tool in _single_tools(tools)]


_SCHEMAS = {"parameters", "input_schema", "inputSchema"}
"""Keys of the schema of a tool's parameters: OpenAI's, Anthropic's, MCP's."""


def are_tools(tools: list[Any]) -> bool:
    """Return whether ``tools`` are objects that seem to be tools."""
    marks = {"name", "function", "toolSpec", *_DECLARATIONS}
    return all(isinstance(x, dict) and marks & x.keys() for x in tools)


def names_of_tools(value: object) -> list[str]:
    """Return the names of the tools that ``value`` seems to hold, whatever the name of its field.

    It may be a tool, a list of tools, the JSON text of either, or a list of such texts. A tool has
    a name and a schema of its parameters. If anything in a list is no tool, no name is returned.
    """
    if isinstance(value, str):
        if not re.match(r"\s*[\[{]", value) or not any(f'"{key}"' in value for key in _SCHEMAS):
            return []
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    if isinstance(value, list):
        each = [names_of_tools(tool) for tool in value if not isinstance(tool, list)]
        return [name for names in each for name in names] if all(each) else []
    if not isinstance(value, dict):
        return []
    function = value.get("function")
    function = function if isinstance(function, dict) else value
    name = function.get("name") or function.get("api_name")
    return [name] if isinstance(name, str) and not _SCHEMAS.isdisjoint(function) else []


def _single_tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield single tools, also those within Gemini's lists and Bedrock's ``toolSpec``.

    What a tool has beside them (Gemini's ``googleSearch``) is yielded as a tool of its own.
    """
    for tool in tools:
        rest = dict(tool)
        inner: list[Any] = []
        for key in _DECLARATIONS:
            if isinstance(found := rest.get(key), list) and all(isinstance(x, dict) for x in found):
                inner += rest.pop(key)
        if isinstance(rest.get("toolSpec"), dict):
            inner.append(rest.pop("toolSpec"))
        yield from inner
        if not inner or any(value is not None for value in rest.values()):
            yield rest


def _read_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    is_anthropics = any(isinstance(tool.get(key), dict) for key in _PARAMETERS[1:])
    kinds = ("function", "custom") if is_anthropics else ("function",)
    is_alone = isinstance(tool.get("name"), str) and (tool.get("type") or "function") in kinds
    if function is None and is_alone:
        beside = ("type", "cache_control") if is_anthropics else ("type",)
        function = {key: value for key, value in tool.items() if key not in beside}
        return {"type": "function", "function": _read_function(function)}
    if not isinstance(function, dict):
        return {**tool}
    kept = {key: value for key, value in tool.items() if value is not None}
    return {**kept, "function": _read_function(function)}


def _read_function(function: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in function.items() if value is not None}
    named = [key for key in _PARAMETERS if key in found]
    named = named or [key for key in _ARGUMENTS if _describe(found.get(key))]
    if len(named) != 1:
        return found
    given = _parameters(found[named[0]])
    return {("parameters" if k == named[0] else k): v for k, v in found.items()} | {
        "parameters": given
    }


def _parameters(given: Any) -> Any:
    """Return the parameters of a function as a JSON schema. Unknown forms stay as they are."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return given
    if isinstance(given, dict) and given.keys() == {"json"}:  # Bedrock's
        given = given["json"]
    if isinstance(given, list):
        return _of_list(given)
    if not isinstance(given, dict):
        return given
    known = {key: value for key, value in given.items() if value is not None}
    return _of_mapping(known) if _is_mapping(known) else _schema(known)


def _describe(given: Any) -> bool:
    """Return whether ``given`` describes parameters, so that it becomes a JSON schema."""
    read = _parameters(given)
    return isinstance(read, dict) and isinstance(read.get("properties"), dict)


def _of_list(given: list[Any]) -> Any:
    """Read Qwen-Agent's list of parameters, each with its ``name``. Other lists stay unchanged."""
    are_named = all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in given)
    if not given or not are_named:
        return given
    properties = {
        each["name"]: _schema({k: v for k, v in each.items() if k not in ("name", "required")})
        for each in given
    }
    required = [each["name"] for each in given if each.get("required") is True]
    return _object(properties, required)


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    named = {"required": required} if required else {}
    return {"type": "object", "properties": properties, **named}


def _is_mapping(given: Mapping[str, Any]) -> bool:
    """Return whether ``given`` has a description of each parameter, and is no JSON schema.

    A parameter may be called ``type`` or ``properties``. Its value is an object with a type or a
    description, unlike the values of these keys in a JSON schema.
    """
    described = {key: value for key, value in given.items() if not _names_required(key, value)}
    return bool(described) and all(
        not key.startswith("$")
        and isinstance(value, dict)
        and any(isinstance(value.get(name), str) for name in ("type", "description"))
        for key, value in described.items()
    )


def _names_required(key: str, value: Any) -> bool:
    return key == "required" and isinstance(value, list)


def _of_mapping(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read xLAM's parameters: a description for each name, with a type of Python.

    A parameter is required if it has no ``default`` and its type is not followed by ``optional`` or
    ``default``, as in NeMo's reader of this set. Its own ``required``, true or false, overrides
    this. A list ``required`` beside the parameters overrides both.
    """
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, value in given.items():
        if _names_required(name, value):
            continue
        read = _schema({key: inner for key, inner in value.items() if key != "required"})
        _, *flags = _divided(str(value.get("type")))
        is_optional = "default" in read or any(
            flag == "optional" or flag.startswith("default") for flag in map(str.lower, flags)
        )
        flag = value.get("required")
        if not is_optional if not isinstance(flag, bool) else flag:
            required.append(name)
        properties[name] = read
    if isinstance(given.get("required"), list):
        required = given["required"]
    return _object(properties, required)


def _schema(given: Any) -> Any:
    """Return a JSON schema with JSON's names of types, and without nulls.

    A null stays as ``default`` or ``const`` of a value that may be null.
    """
    if not isinstance(given, dict):
        return given
    found: dict[str, Any] = {}
    for key, value in given.items():
        if value is None and not (key in ("default", "const") and takes_null(given)):
            continue
        if key == "type" and isinstance(value, str):
            found |= _type(value)
        elif key == "type" and isinstance(value, list):
            found[key] = [_TYPES.get(str(each).lower(), each) for each in value]
        elif key in _OF_SCHEMAS and isinstance(value, dict):
            found[key] = {k: _schema(each) for k, each in value.items() if each is not None}
        elif key in (*_LISTS, *_ONE) and isinstance(value, list):
            found[key] = [_schema(each) for each in value]
        else:
            found[key] = _schema(value) if key in _ONE else value
    return found


def _type(text: str) -> dict[str, Any]:
    """Return the JSON schema of a type: JSON's, Gemini's (``STRING``) or Python's (``List[int]``).

    Python's types become what ``transformers`` makes of them. Flags behind a type (``optional``,
    ``default 5``) are dropped. Unknown types stay as they are.
    """
    kind, *flags = _divided(text)
    known = all(re.match(r"optional$|required$|default\b", flag, re.I) for flag in flags)
    read = _read_type(kind) if known else None
    return {"type": text} if read is None else read


def _read_type(text: str) -> dict[str, Any] | None:
    """Return the JSON schema of a type without flags. None: the type is unknown."""
    text = text.strip()
    if len(among := _divided(text, "|")) > 1:
        return _union(among)
    found = re.fullmatch(r"(?:typing\.)?(\w+)(?:\[(.*)\])?", text, re.S)
    if found is None:
        return None
    name, inner = found[1].lower(), _divided(found[2]) if found[2] else []
    if name in ("optional", "union"):
        return _union([*inner, "None"] if name == "optional" else inner) if inner else None
    if name == "any":
        return {}
    if name == "callable":  # JSON has no functions, so calls have a name or a source
        return {"type": "string"}
    if name not in _TYPES:
        return None
    schema: dict[str, Any] = {"type": _TYPES[name]}
    parts = [_read_type(each) for each in inner if each != "..."]
    known = [part for part in parts if part is not None]
    if not parts or len(known) < len(parts):
        return schema if not parts else None
    if name == "tuple" and "..." not in inner:
        schema["prefixItems"] = known
    elif schema["type"] == "array":
        schema["items"] = known[0]
    elif schema["type"] == "object":
        schema["additionalProperties"] = known[-1]
    return schema


def _union(names: Sequence[str]) -> dict[str, Any] | None:
    """Return the JSON schema of a union as ``transformers`` writes it.

    None: a type is unknown, or all are null.
    """
    parts = [_read_type(each) for each in names]
    known = [part for part in parts if part is not None and part != {"type": "null"}]
    null = {"nullable": True} if {"type": "null"} in parts else {}
    if None in parts or not known:
        return None
    if len(known) == 1:
        return {**known[0], **null}
    if all(part.keys() == {"type"} and part["type"] in _SINGLE for part in known):
        return {"type": sorted({part["type"] for part in known}), **null}
    return {"anyOf": known, **null}


def _divided(text: str, mark: str = ",") -> list[str]:
    """Divide ``text`` at each ``mark`` that is outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[({") - (letter in "])}")
        if letter == mark and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


# ---- nulls in calls ------------------------------------------------------------------------------


def takes_null(schema: object) -> bool:
    """Return whether a JSON schema says that its value may be null."""
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type")
    among = [x for key in ("anyOf", "oneOf") if isinstance(x := schema.get(key), list)]
    enum = schema.get("enum")
    return (
        (str(kinds).lower() == "null" if not isinstance(kinds, list) else "null" in kinds)
        or schema.get("nullable") is True
        or (isinstance(enum, list) and None in enum)
        or any(takes_null(each) for some in among for each in some)
    )


def without_filled(
    turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return ``turns`` without the nulls that tables put into the arguments of calls.

    A null stays if the tool in ``tools`` requires its parameter, or says that it may be null.
    Arguments that are text stay as they are, since no table changes them. A warning names the first
    null that is dropped.
    """
    functions = [f for tool in tools or () if isinstance(f := tool.get("function"), dict)]
    schemas = {f["name"]: f.get("parameters") for f in functions if isinstance(f.get("name"), str)}
    return [
        {**turn, "tool_calls": [_without_filled(call, schemas) for call in turn["tool_calls"]]}
        if "tool_calls" in turn
        else {**turn}
        for turn in turns
    ]


def _without_filled(call: Mapping[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, dict):
        return {**call}
    dropped: list[str] = []
    arguments = _meant(arguments, schemas.get(function["name"]), dropped)
    if dropped:
        _warn_of_nulls(dropped[0], function["name"])
    return {**call, "function": {**function, "arguments": arguments}}


def _meant(value: Any, schema: object, dropped: list[str]) -> Any:
    """Return ``value`` without the nulls that are not meant. Add their keys to ``dropped``."""
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, list):
        return [_meant(each, schema.get("items"), dropped) for each in value]
    if not isinstance(value, dict):
        return value
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    required = required if isinstance(required, list) else []
    found: dict[str, Any] = {}
    for key, inner in value.items():
        own = properties.get(key, schema.get("additionalProperties"))
        if inner is None and key not in required and not takes_null(own):
            dropped.append(key)
        else:
            found[key] = _meant(inner, own, dropped)
    return found


def _warn_of_nulls(key: str, name: str) -> None:
    warn_once(
        "nulls in arguments",
        f"calls have arguments that are null, such as {key!r} of {name!r}, as tables fill them in: "
        "they are left out; if they are meant, declare in `tools` that the parameter is required "
        "or may be null, or write `arguments` as the text of their JSON",
    )
