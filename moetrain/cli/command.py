"""Parts that commands share: options, version, the one line of an error.

``train``, ``rl`` and ``jobs`` take settings (:mod:`moetrain.cli.train`), the other commands options
of their own (:class:`Parser`). In both, whatever is wrong raises :class:`ConfigError`, whose one
line goes to standard error, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from moetrain.config import ConfigError
from moetrain.config.environment import let_idle_threads_sleep


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
    work: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None
) -> int:
    """Call ``work(argv)`` and return its exit code; a ConfigError is one line, and 2.

    ``argv`` is a command line; None: the process's own.
    """
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
