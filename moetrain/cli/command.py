"""Parts that all commands share: options, help, version, the one line of an error.

``train``, ``rl`` and ``jobs`` take settings (:mod:`moetrain.config`), the other commands options of
their own (:class:`Parser`). In both, whatever is wrong raises :class:`ConfigError`, whose one line
goes to standard error, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moetrain.config import Config, ConfigError, Recipes
from moetrain.config.environment import let_idle_threads_sleep
from moetrain.config.sources import ENV_PREFIX, recipe_names


def version() -> str:
    """Return ``moetrain 0.1.0``: the installed package's version, else that of its pyproject."""
    try:
        number = metadata.version("moetrain")
    except metadata.PackageNotFoundError:  # run from a checkout
        project = Path(__file__).parents[2] / "pyproject.toml"
        number = tomllib.loads(project.read_text("utf-8"))["project"]["version"]
    return f"moetrain {number}"


def error_line(text: str) -> str:
    """Join ``text`` into one line without anything that a terminal would act on."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in " ".join(text.split()))


def run_command(
    work: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None
) -> int:
    """Call ``work(argv)`` and return its exit code; a ConfigError is one line, and 2."""
    let_idle_threads_sleep()
    try:
        with reader_may_leave():
            return work(argv) or 0
        return 0  # whoever reads standard output has left
    except ConfigError as error:
        print(error_line(f"error: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End in silence once nobody reads standard output any more (``--help | head``).

    For commands that only print; a run that nobody watches goes on.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the rest of the buffer would fail again at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """The options of ``python -m moetrain.NAME``; what is wrong with them raises ConfigError."""

    def __init__(self, name: str, description: str | None) -> None:
        super().__init__(
            prog=f"python -m moetrain.{name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.name = name
        self.add_argument("--version", action="version", version=version())

    def add_model(self) -> None:
        """Add the options that name a model and the device it runs on."""
        self.add_argument("path", metavar="PATH", help="Hugging Face folder or hub id")
        self.add_argument("--adapter", help="folder of a LoRA adapter in PEFT's format")
        self.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
        self.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(self.name, f"{message}; see --help")


def settings_help(name: str, recipes: Recipes) -> str:
    """Return the ``--help`` of ``python -m moetrain.NAME``, a command that takes settings.

    It lists usage, recipes, and every setting with its type, default and docstring.
    """
    with_path = recipes.of_path
    if recipes.of_chats != with_path:
        with_path = f"{recipes.of_chats} for jsonl, else {with_path}"
    lines = [
        f"usage: python -m moetrain.{name} [RECIPE | FILE.toml] [--section.key value ...]",
        "",
        f"recipes: {', '.join(recipe_names())}",
        f"default: {recipes.default}; with model.path, {with_path}",
        f"environment: {ENV_PREFIX}SECTION__KEY=value, weaker than the command line",
        "--dry_run prints the resolved config as JSON and whether it fits; --help prints this",
        "--version prints the version",
        "A recipe may set other values than the defaults shown here.",
    ]
    for key, field in Config.model_fields.items():
        section = field.default
        if not isinstance(section, BaseModel):
            lines += ["", *_help_entry(key, field)]
            continue
        lines += ["", f"[{key}] {inspect.cleandoc(type(section).__doc__ or '')}"]
        for inner, setting in type(section).model_fields.items():
            lines += _help_entry(f"{key}.{inner}", setting)
    return "\n".join(lines)


def _help_entry(name: str, field: FieldInfo) -> list[str]:
    kind = field.annotation
    kind = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    meaning = " ".join((field.description or "").split())
    default = "unset" if field.default is None else json.dumps(field.default)
    head = f"  --{name} ({kind}, default: {default})"
    return [head, textwrap.fill(meaning, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)]
