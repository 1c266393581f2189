"""Helpers of tests/generate/test_grammars.py that other tests use too."""

import json
import re

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "é"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # an untrained model would write spaces forever
}
CHOICES = ["yes", "no", "nobody", "yes, of course"]
GRAMMARS = {
    "schema": ("json_schema", json.dumps(SCHEMA)),
    "regex": ("regex", "[a-c]{3,9}(x|y)"),
    "choice": ("choice", json.dumps(CHOICES)),
    "lark": ("grammar", 'start: "a" b\nb: "b"{2,4} "." | "c" b'),
}


def follows(name, text):
    if name == "schema":
        value = json.loads(text)
        return list(value) == ["a", "b"] and 0 <= value["a"] <= 99 and value["b"] in ("x", "é")
    if name == "choice":
        return text in CHOICES
    return re.fullmatch({"regex": "[a-c]{3,9}[xy]", "lark": r"ac*b{2,4}\."}[name], text)


TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "stop"}}
