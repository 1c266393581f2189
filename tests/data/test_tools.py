"""Tools of other protocols become OpenAI's, and nulls of tables are in neither tools nor calls.

The right types are those of ``transformers`` for a Python function with the same annotations; the
right texts are its renderings of OpenAI's tools.
"""

import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union  # noqa: UP035  as xLAM has them

import pytest
from transformers.utils.chat_template_utils import get_json_schema, render_jinja_template

from moetrain.data.chat import CHATML, BadLineError, ChatTemplate
from moetrain.data.containers import Files
from moetrain.data.records import RecordReader
from moetrain.data.tools import read_tools
from moetrain.data.warned import SEEN
from tests.lib.data_files import write_lines

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a town"},
        "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city"],
}
RAIN = {"name": "rain", "description": "says whether it rains", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": RAIN}]
ABOUT = {key: RAIN[key] for key in ("name", "description")}
BY_PROPERTIES = (
    "{% for tool in tools or [] %}{{ tool.function.name }}("
    "{% for name, each in (tool.function.parameters.properties or {}).items() %}"
    "{{ name }}: {{ each.type }}, {% endfor %}) {% endfor %}"
)
"""The way in which GPT-OSS's template writes tools."""
BY_PROPERTIES += CHATML[CHATML.index("{%- for message in messages") :].replace(
    "tools and loop.first and message.role == 'system'", "false"
)


def texts(record: dict, template: str = CHATML) -> list[str]:
    reader = RecordReader(ChatTemplate(template, {}))
    return [document.text for document in reader.documents(record)]


def theirs(messages: list[dict], tools: list[dict] | None = TOOLS, template: str = CHATML) -> str:
    settings: dict[str, Any] = {"tools": tools, "chat_template": template}
    return render_jinja_template([messages], **settings)[0][0].rstrip()


# ---- forms of tools ------------------------------------------------------------------------------

GEMINI = {
    "type": "OBJECT",
    "properties": {
        "city": {"type": "STRING", "description": "a town"},
        "days": {"type": "ARRAY", "items": {"type": "INTEGER"}},
    },
    "required": ["city"],
}
XLAM = {
    "city": {"type": "str", "description": "a town"},
    "days": {"type": "List[int], optional"},
}
QWEN = [
    {"name": "city", "type": "string", "description": "a town", "required": True},
    {"name": "days", "type": "array", "items": {"type": "integer"}, "required": False},
]
FORMS = {
    "OpenAI's": TOOLS,
    "a function": [RAIN],
    "OpenAI's responses": [{"type": "function", **RAIN}],
    "Anthropic's": [{**ABOUT, "input_schema": SCHEMA}],
    "Anthropic's, with its type": [
        {"type": "custom", **ABOUT, "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
    ],
    "Anthropic's in a function": [
        {"type": "function", "function": {**ABOUT, "input_schema": SCHEMA}}
    ],
    "MCP's": [{**ABOUT, "inputSchema": SCHEMA}],
    "Bedrock's": [{"toolSpec": {**ABOUT, "inputSchema": {"json": SCHEMA}}}],
    "Gemini's": [{"functionDeclarations": [{**ABOUT, "parameters": GEMINI}]}],
    "Gemini's in Python": [{"function_declarations": [{**ABOUT, "parameters": GEMINI}]}],
    "Gemini's JSON schema": [{"functionDeclarations": [{**ABOUT, "parametersJsonSchema": SCHEMA}]}],
    "Qwen-Agent's": [{**ABOUT, "parameters": QWEN}],
    "xLAM's": [{**ABOUT, "parameters": XLAM}],
    "BitAgent's": [{**ABOUT, "arguments": XLAM}],
    "a schema in arguments": [{"type": "function", "function": {**ABOUT, "arguments": SCHEMA}}],
    "a list in params": [{**ABOUT, "params": QWEN}],
    "a text": [{**ABOUT, "parameters": json.dumps(SCHEMA)}],
    "nulls": [
        {
            "type": "function",
            "function": {
                **ABOUT,
                "strict": None,
                "parameters": {
                    **SCHEMA,
                    "additionalProperties": None,
                    "properties": {
                        "city": {**SCHEMA["properties"]["city"], "items": None, "enum": None},
                        "days": {**SCHEMA["properties"]["days"], "default": None},
                        "unit": None,
                    },
                },
            },
        }
    ],
}


@pytest.mark.parametrize("template", [CHATML, BY_PROPERTIES], ids=["JSON", "properties"])
@pytest.mark.parametrize("form", FORMS)
def test_tools_of_other_protocols_are_openais(form: str, template: str):
    turns = [USER, ANSWER]
    for tools in (FORMS[form], json.dumps(FORMS[form])):
        found = texts({"messages": turns, "tools": tools}, template)
        assert found == [theirs(turns, template=template)]
    assert (
        ChatTemplate(template, {})
        .prompt([USER], ChatTemplate.variables_of({"tools": FORMS[form]}))
        .startswith(theirs([USER], template=template))
    )


def test_tools_of_metadata_may_be_geminis():
    turns = [USER, ANSWER]
    found = texts({"messages": turns, "metadata": {"tools": FORMS["Gemini's"]}})
    assert found == [theirs(turns)]


def test_what_stands_beside_geminis_functions_stays():
    search = {"googleSearch": {}}
    read = read_tools([{**FORMS["Gemini's"][0], **search}, search])
    assert read == [*TOOLS, search, search]


_PYTHON = (
    *("int", "float", "str", "bool", "list", "dict", "tuple", "Any", "List[int]", "list[str]"),
    *("List[Tuple[float, float]]", "List[List[str]]", "Dict[str, Any]", "Dict[str, int]"),
    *("Union[int, float]", "Optional[int]", "int | None", "Tuple[int, str]", "List[Any]"),
    *("Union[str, List[str]]", "Optional[Union[int, str]]", "List[Dict[str, int]]"),
)


@pytest.mark.parametrize("kind", _PYTHON)
def test_pythons_types_are_those_of_transformers(kind: str):
    names = {"Any": Any, "Dict": Dict, "List": List, "Optional": Optional}  # noqa: UP006
    names |= {"Tuple": Tuple, "Union": Union}  # noqa: UP006

    def rain(x):
        """Rain.

        Args:
            x: an x
        """

    rain.__annotations__ = {"x": eval(kind, names)}
    given = {"name": "rain", "description": "Rain.", "parameters": {"x": {"type": kind}}}
    given["parameters"]["x"]["description"] = "an x"
    (read,) = read_tools([given])
    assert read == get_json_schema(rain)


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        ("str, optional", "string"),
        ("int, default=3", "integer"),
        ("Callable[[float], float]", "string"),
        ("np.ndarray", "np.ndarray"),
        ("List[np.ndarray]", "List[np.ndarray]"),
        ("str, of letters", "str, of letters"),
    ],
)
def test_other_types_of_xlam(kind: str, right: str):
    """Types without one of JSON stay; NeMo's reader of xLAM makes texts of functions."""
    (tool,) = read_tools([{"name": "f", "parameters": {"x": {"type": kind}}}])
    assert tool["function"]["parameters"]["properties"] == {"x": {"type": right}}


def test_parameters_of_xlam_are_required_without_a_default():
    """The rule is that of NeMo's reader (``nemo_automodel/components/datasets/llm/xlam.py``)."""
    given = {
        "type": {"description": "The type", "type": "str", "default": "game"},
        "properties": {"description": "how many", "type": "int"},
        "c": {"type": "int, optional"},
        "d": {"type": "Optional[int]"},
        "e": {"type": "str", "required": False},
    }
    (tool,) = read_tools([{"name": "f", "parameters": given}])
    schema = tool["function"]["parameters"]
    assert [*schema["properties"]] == [*given]
    assert schema["required"] == ["properties", "d"]
    right = {"description": "The type", "type": "string", "default": "game"}
    assert schema["properties"]["type"] == right


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {"type": {"type": "string"}}},
        {"properties": {"description": {"type": "string"}}},
        {"$ref": "#/$defs/x", "$defs": {"x": SCHEMA}},
        {"anyOf": [SCHEMA, {"type": "object", "properties": {"x": {"const": None}}}]},
        {"type": "object", "properties": {"x": {"type": ["string", "null"], "default": None}}},
        {
            "type": "object",
            "properties": {"x": {"enum": ["a", None]}},
            "additionalProperties": False,
        },
    ],
    ids=str,
)
def test_json_schemas_stay_as_they_are(schema: dict):
    if "anyOf" in schema:  # a const that is null needs a type that says so
        schema["anyOf"][1]["properties"]["x"] = {"const": None, "type": "null"}
    tools = [{"type": "function", "function": {**ABOUT, "parameters": schema}}]
    assert read_tools(tools) == tools
    assert texts({"messages": [USER, ANSWER], "tools": tools}) == [theirs([USER, ANSWER], tools)]


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"city": "a town"}, r"the parameter 'city' of tools\[0\]"),
        ({"city": {"kind": "text"}}, r"the parameter 'city' of tools\[0\]"),
        ({"allOf": [SCHEMA]}, r"the parameter 'city' of tools\[0\]"),
        ([{"name": "city"}, "days"], r"the parameter 'city' of tools\[0\]"),
        ([{"id": "city"}], r"tools\[0\].parameters"),
        ("city, days", r"tools\[0\].parameters"),
    ],
    ids=str,
)
def test_parameters_that_do_not_come_out_are_refused(
    parameters: object, place: str, caplog: pytest.LogCaptureFixture
):
    tools = [{"type": "function", "function": {**ABOUT, "parameters": parameters}}]
    record = {"messages": [USER, ANSWER], "tools": tools}
    assert texts(record) == [theirs([USER, ANSWER], tools)]
    with pytest.raises(BadLineError, match=f"the chat template does not show {place}; leave it"):
        texts(record, BY_PROPERTIES)
    SEEN.clear()
    ChatTemplate(BY_PROPERTIES, {}).prompt([USER], {"tools": tools})  # a server warns
    assert "does not show the parameters of `tools`, which requests have" in caplog.text


# ---- nulls of tables -----------------------------------------------------------------------------


def calling(**arguments: object) -> dict:
    call = {"type": "function", "function": {"name": "rain", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def declared(required: list[str], **properties: object) -> list[dict]:
    schema = {"type": "object", "properties": properties, "required": required}
    return [{"type": "function", "function": {**ABOUT, "parameters": schema}}]


TEXT, NULLABLE = {"type": "string"}, {"type": ["string", "null"]}
NULLS = {
    "optional": (declared(["a"], a=TEXT, b=TEXT), False),
    "required": (declared(["a", "b"], a=TEXT, b=TEXT), True),
    "nullable": (declared(["a"], a=TEXT, b=NULLABLE), True),
    "pydantic's": (declared(["a"], a=TEXT, b={"anyOf": [TEXT, {"type": "null"}]}), True),
    "Gemini's": (declared(["a"], a=TEXT, b={**TEXT, "nullable": True}), True),
    "not declared": (declared(["a"], a=TEXT), False),
    "no tools": (None, False),
}


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
@pytest.mark.parametrize("case", NULLS)
def test_a_null_in_arguments_is_the_same_from_lines_and_tables(
    case: str, container: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """TRL drops all nulls (``remove_none_values``), here those that the tool allows are kept.

    Tables fill in nulls: the second record has no ``b``, and ``write_table`` gives it one.
    """
    tools, is_kept = NULLS[case]
    shown = {"tools": json.dumps(tools)} if tools else {}
    rows = [{"messages": [USER, calling(a="x", b=None)], **shown}]
    rows += [{"messages": [USER, calling(a="x", b="y")], **shown}]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    if container == "parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        path = tmp_path / "a.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), path)
    files = Files("data.path", str(path), [path])
    SEEN.clear()
    found = [texts(raw.value()) for piece in files.pieces() for raw in files.records(piece)]  # pyright: ignore[reportArgumentType]
    wanted = calling(a="x", b=None) if is_kept else calling(a="x")
    right = [theirs([USER, turn], tools) for turn in (wanted, calling(a="x", b="y"))]
    assert found == [[text] for text in right]
    assert caplog.text.count("arguments that are null, such as 'b' of 'rain'") == (not is_kept)


@pytest.mark.parametrize("is_lone", [False, True])
def test_nulls_of_arguments_that_are_text_are_meant(is_lone: bool):
    function = {"name": "rain", "arguments": {"a": "x", "b": None}}
    if is_lone:
        turn = {"role": "function_call", "content": json.dumps(function)}
    else:
        function = {**function, "arguments": json.dumps(function["arguments"])}
        turn = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    found = texts({"messages": [USER, turn], "tools": TOOLS})
    assert found == [theirs([USER, calling(a="x", b=None)])]


def test_nulls_within_arguments_follow_the_schema():
    inner = {"type": "object", "properties": {"a": NULLABLE, "b": TEXT}}
    tools = declared([], where=inner, all={"type": "array", "items": inner})
    given = {"a": None, "b": None}
    found = texts(
        {"messages": [USER, calling(where=given, all=[given, None], c={"d": None})], "tools": tools}
    )
    kept = calling(where={"a": None}, all=[{"a": None}, None], c={})
    assert found == [theirs([USER, kept], tools)]


def test_tools_of_a_table_have_no_nulls(tmp_path: Path):
    """A table has each parameter of all tools in each tool."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    wind = {"name": "wind", "parameters": {"type": "object", "properties": {"at": TEXT}}}
    tools = [[*TOOLS], [{"type": "function", "function": wind}]]
    rows = [{"messages": [USER, ANSWER], "tools": each} for each in tools]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert lines[1]["tools"][0]["function"]["parameters"]["properties"]["city"] is None
    write_lines(tmp_path / "b.jsonl", *lines)
    for path in (tmp_path / "a.parquet", tmp_path / "b.jsonl"):
        files = Files("data.path", str(path), [path])
        raws = [raw for piece in files.pieces() for raw in files.records(piece)]
        reader = RecordReader(ChatTemplate(BY_PROPERTIES, {}))
        found = [reader.documents(raw.value())[0].text for raw in raws]
        right = [theirs([USER, ANSWER], each, BY_PROPERTIES) for each in tools]
        assert found == right
