"""A reward for programs: they run with the line's tests, in a process with limits of its own.

    python -m moetrain.rl --rl.env jsonl --rl.prompts prompts.jsonl \
        --rl.reward code_reward.py:score_code ...

A line's ``answer`` is its tests, such as ``assert add(3, 4) == 7``.

Left out on purpose: a file system of its own. A program reads what this user may read; run the
trainer in a container where that matters.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

_SECONDS = 10
_PYTHON = ("", "py", "python", "python3")
_START = f"""
import ctypes, os, resource, sys
libc = ctypes.CDLL(None)
# CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET of <linux/sched.h>: no network, no signals to others,
# and no rights to raise limits.
getattr(libc, "unshare", lambda flags: 0)(0x70000000)
if child := os.fork():  # whose end is that of all processes it has started
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
getattr(libc, "prctl", lambda *args: 0)(1, 9)  # PR_SET_PDEATHSIG
for name, most in (("CPU", {_SECONDS}), ("AS", 1 << 30), ("FSIZE", 1 << 20), ("NOFILE", 64),
                   ("NPROC", 64), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
os.execv(sys.executable, [sys.executable, "-I", "-"])
"""
"""What the process does first. 64 processes are this user's, but for root."""


def score_code(line: dict[str, Any], answer: str) -> float:
    """Return 1 if the answer's program and then the line's ``answer``, its tests, run to the end.

    The program is the last block between ``` marks, or else all of the text. Limits: 10 s, 1 GiB of
    memory, 1 MiB a file, 64 open files and processes; where Linux allows, no network.
    """
    found = re.findall(r"```([^\n`]*)\n(.*?)```", answer, re.DOTALL)
    blocks = [code for kind, code in found if kind.strip().lower() in _PYTHON]
    ran = secrets.token_hex(8)  # a program that leaves before its tests writes it only on purpose
    parts = (blocks[-1] if blocks else answer, str(line["answer"]), f"print('{ran}', flush=True)")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as written:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START],
            cwd=folder,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.communicate("\n\n".join(parts).encode("utf-8", "replace"), timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return 0.0
        finally:
            with suppress(ProcessLookupError, PermissionError):  # and all that the program started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        written.seek(0)
        return float(process.returncode == 0 and ran.encode() in written.read())
