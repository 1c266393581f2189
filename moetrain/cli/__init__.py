"""The commands: one module for each ``python -m moetrain.NAME``, and what they share."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def interrupt_quietly() -> None:
    """Let Ctrl-C end this process with exit code 130 while a command's modules are imported.

    Otherwise Ctrl-C prints a traceback of the imports, or has no effect: Python drops an exception
    that is raised in a destructor or a weak reference's callback. :func:`interrupt_by_exception`
    restores Python's own handler.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as by nohup
        signal.signal(signal.SIGINT, _end)


def interrupt_by_exception() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, which every command handles."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Let Ctrl-C end this process with exit code 130 in this context, for imports during a command.

    An import may also lose KeyboardInterrupt: C code may try to import another module, and go on
    without that module after any error. Then the command would not stop at all.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is threading.main_thread():  # other threads may set no handler
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


# The process is about to import the modules of a command. Other programs keep their own handler.
if _is_command():
    interrupt_quietly()
