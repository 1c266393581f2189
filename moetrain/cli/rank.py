"""``python -m moetrain.cli.rank LAUNCHER COMMAND``: run COMMAND, and die with our parent LAUNCHER.

A rank whose launcher was killed (``kill -9``, or for lack of memory) would go on training and
saving, with nobody to stop it. The launcher cannot tell it any more, so the rank must notice.

A rank imports what it needs while the launcher checks the settings. Then it waits for a file that
says that it may go on (:func:`pass_gate`).

Left out on purpose: ranks of torchrun and srun, which have launchers of their own.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence

_POLL_SECONDS = 1.0
_GATE_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with(launcher: int) -> None:
    """Have this process killed when ``launcher``, its parent, ends."""
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    else:
        threading.Thread(target=_watch, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def pass_gate(file: str) -> None:
    """Wait until the launcher has created ``file``, or its folder is gone: then it was
    another's."""
    while os.path.isdir(os.path.dirname(file)) and not os.path.exists(file):
        time.sleep(_GATE_SECONDS)


def main(argv: Sequence[str]) -> None:
    """Run ``LAUNCHER -m MODULE [WORD ...]`` or ``LAUNCHER FILE [WORD ...]`` as python would."""
    launcher, *command = argv
    _die_with(int(launcher))
    is_module = command[0] == "-m"
    sys.argv = command[1:] if is_module else command
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
