"""Write docs/settings.md, the table of every setting, from the config sections themselves.

    python scripts/write_settings.py

Run it after a change to a setting's name, default or docstring; a test fails until it has been run.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moetrain.config import Config
from moetrain.config.sections import MixEntry
from moetrain.config.sources import recipe_names

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """\
# Settings

Written by `scripts/write_settings.py` from the config sections: change it there. The commands
print the same text with `--help`.

A setting is written `--section.key value` on the command line, `[section]` and `key = value` in a
TOML file, and `MOETRAIN_SECTION__KEY=value` in the environment. Weakest first, the sources are the
defaults below, a recipe or TOML file, the environment and the command line. The
[recipes]({recipes}) set other values than these defaults: {names}.

"""
_TYPES = {bool: "yes or no", int: "a whole number", float: "a number", str: "text"}


def render() -> str:
    """The whole page as Markdown."""
    names = ", ".join(f"`{name}`" for name in recipe_names())
    lines = [HEAD.format(recipes="../moetrain/recipes", names=names)]
    alone = []
    for name, field in Config.model_fields.items():
        section = field.default
        if not isinstance(section, BaseModel):
            alone.append(_row(name, field))
            continue
        lines += [f"## {name}\n\n", f"{_plain(inspect.getdoc(type(section)) or '')}\n\n"]
        rows = [_row(f"{name}.{key}", sub) for key, sub in type(section).model_fields.items()]
        lines += [*_table(rows), "\n"]
    return "".join([*lines, "## Outside of sections\n\n", *_table(alone)])


def _table(rows: list[str]) -> list[str]:
    return ["| setting | takes | default | meaning |\n", "|---|---|---|---|\n", *rows]


def _row(name: str, field: FieldInfo) -> str:
    default = "unset" if field.default is None else f"`{_written(field.default)}`"
    return f"| `{name}` | {_kind(field.annotation)} | {default} | {_plain(field.description)} |\n"


def _written(value: Any) -> str:
    """``value`` as a person types it on the command line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "(none)"
    return value if isinstance(value, str) else json.dumps(value)


def _kind(annotation: Any) -> str:
    """The values that a setting takes, in words."""
    if get_origin(annotation) is Annotated:  # a number with bounds
        return _kind(get_args(annotation)[0])
    if annotation in _TYPES:
        return _TYPES[annotation]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)[0]
        if inner is MixEntry:
            return "tables"
        numbers = inner is int
        return "whole numbers with commas between" if numbers else "words with commas between"
    kinds = [_kind(part) for part in get_args(annotation) if part is not NoneType]
    return " or ".join(kinds)


def _plain(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("*", "\\*")


def main() -> int:
    """Write the page and say where it is."""
    PAGE.write_text(render(), "utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
