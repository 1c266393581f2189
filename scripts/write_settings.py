"""Write docs/settings.md, the table of every setting, from the config sections themselves.

    python scripts/write_settings.py

Run it after a change to a setting's name, default or docstring; a test fails until it has been run.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

# The page is of this checkout, wherever the package is installed.
sys.path.insert(0, str(Path(__file__).parent.parent.resolve()))

from moetrain.config import Config
from moetrain.config.help import as_typed, values_in_words
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


def render() -> str:
    """Return the whole page as Markdown."""
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
    values = values_in_words(field.annotation, quote="`")
    default = as_typed(field.default)
    default = default if field.default is None else f"`{default}`"
    return f"| `{name}` | {values} | {default} | {_plain(field.description)} |\n"


def _plain(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("*", "\\*")


def main() -> int:
    """Write the page and print its path."""
    PAGE.write_text(render(), "utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
