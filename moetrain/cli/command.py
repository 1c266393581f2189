"""What the commands share: options, the one line of an error, a reader of the output who leaves."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from moetrain.config.sources import ConfigError


class Parser(argparse.ArgumentParser):
    """Options whose errors are ConfigErrors: one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(self.prog.rpartition(".")[2], f"{message}; see --help")


def one_line(text: str) -> str:
    """``text`` without line ends and what else a terminal would act on."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in " ".join(text.split()))


def refuse(error: ConfigError) -> int:
    """Print the one line of ``error`` to standard error; returns the exit code, 2."""
    print(one_line(f"error: {error}"), file=sys.stderr)
    return 2


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """What is printed in here is lost without an error once nobody reads it (``--help | head``).

    For commands whose only work is to print; a run that nobody watches is another matter.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # what is left in the buffer would fail again at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
