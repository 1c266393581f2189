"""The commands: one module for each ``python -m moetrain.NAME``, and what they share."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def interrupt_quietly() -> None:
    """Let Ctrl-C end this process with 130 while the modules of a command are imported.

    Otherwise it prints a traceback of the imports, or nothing: Python drops an exception that is
    raised in a destructor or a weak reference's callback. :func:`interrupt_by_exception` undoes it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as by nohup
        signal.signal(signal.SIGINT, _end)


def interrupt_by_exception() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, which every command handles."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Let Ctrl-C end this process with 130 inside, where a command imports modules late.

    An import may also lose KeyboardInterrupt in C code that tries another import and goes on
    without it. Then the command would not stop at all.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is threading.main_thread():  # no other may set a handler
        interrupt_quietly()
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is not before:
            signal.signal(signal.SIGINT, before)


def _end(number: int, frame: Any) -> None:
    os._exit(128 + number)


def _is_command() -> bool:
    """Return whether this process is ``python -m moetrain.NAME`` or the script ``moetrain``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return spec.name.startswith("moetrain.")
    script, _ = os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))
    return script == "moetrain"


if _is_command():  # it is about to import what the command takes; no other program has asked
    interrupt_quietly()
