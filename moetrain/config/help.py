"""The text of ``--help``, made from the settings themselves: names, defaults and docstrings."""

from __future__ import annotations

import inspect
import json
import textwrap

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moetrain.config import TRAIN_RECIPES, Config, Recipes, recipe_names
from moetrain.config.sources import ENV_PREFIX


def format_help(module: str = "moetrain.train", recipes: Recipes = TRAIN_RECIPES) -> str:
    """The text of ``--help``: usage, recipes, and every setting with its default and meaning."""
    with_path = recipes.of_path
    if recipes.of_chats != with_path:
        with_path = f"{recipes.of_chats} for jsonl, else {with_path}"
    lines = [
        f"usage: python -m {module} [RECIPE | FILE.toml] [--section.key value ...]",
        "",
        f"recipes: {', '.join(recipe_names())}",
        f"default: {recipes.default}; with model.path, {with_path}",
        f"environment: {ENV_PREFIX}SECTION__KEY=value, weaker than the command line",
        "--dry_run prints the resolved config as JSON and whether it fits; --help prints this",
        "A recipe may set other values than the defaults shown here.",
    ]
    for name, field in Config.model_fields.items():
        section = field.default
        if not isinstance(section, BaseModel):
            lines += ["", *_help_entry(name, field)]
            continue
        lines += ["", f"[{name}] {inspect.cleandoc(type(section).__doc__ or '')}"]
        for key, sub in type(section).model_fields.items():
            lines += _help_entry(f"{name}.{key}", sub)
    return "\n".join(lines)


def _help_entry(name: str, field: FieldInfo) -> list[str]:
    kind = field.annotation
    kind = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    meaning = " ".join((field.description or "").split())
    default = "unset" if field.default is None else json.dumps(field.default)
    head = f"  --{name} ({kind}, default: {default})"
    return [head, textwrap.fill(meaning, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)]
