"""``python -m moetrain.rank LAUNCHER GATE COMMAND``: run COMMAND until LAUNCHER, its parent, ends.

A rank whose launcher was killed (``kill -9``, or for want of memory) would train and save on, with
nobody to stop it. The launcher cannot tell it so any more; the rank has to see it for itself.

GATE is a file that the launcher has locked. A rank imports what it needs, which takes seconds, and
waits there (:func:`pass_gate`) until the launcher, which works meanwhile, unlocks it.

Left out on purpose: ranks of torchrun and srun, which have launchers of their own.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence

POLL_SECONDS = 1.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
GATE = "_MOETRAIN_GATE"
"""Environment variable of a rank: the file. Not the name of a setting."""


def die_with(launcher: int) -> None:
    """Be killed, from now on, when ``launcher``, this process's parent, ends."""
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    else:
        threading.Thread(target=_watch, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def pass_gate() -> None:
    """Return when the launcher, if it is this one, lets its ranks go on. It opens as well where the
    launcher has died, of which ranks die."""
    path = os.environ.pop(GATE, None)
    if path is not None:
        with open(path) as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)


def main(argv: Sequence[str]) -> None:
    """``LAUNCHER GATE``, then ``-m MODULE [WORD ...]`` or ``FILE [WORD ...]``, as for python."""
    launcher, gate, *command = argv
    die_with(int(launcher))
    os.environ[GATE] = gate
    is_module = command[0] == "-m"
    sys.argv = command[1:] if is_module else command
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
