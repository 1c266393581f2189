"""Start the processes of a run on this machine, and make sure that they end together.

:func:`start_ranks` uses the process layer of torch's elastic launcher and gives ranks the same
environment variables as torchrun. The rest of torch's launcher gives a run that is told to stop 30
seconds, even if it needs more to write its checkpoint. After a failure it waits another 30 seconds
for the other ranks, although they hang in a collective. This module ends runs as follows, with
these exit codes:

    all ranks succeed        0
    SIGTERM, Ctrl-C          is sent to every rank; they write a checkpoint: 143, 130
    a rank fails             the first to fail prints its error; the others are killed: 1 or 2
    a rank is killed         a line names the signal; the others are killed: 1
    a rank ends too early    the others lose contact; a line names it and its exit code: 1
    a rank is stopped        the others end by launch.hang_seconds; a line names it, it is killed: 1
    this process is killed   the ranks, which watch it, die too

A rank is ``python -m moetrain.cli.launch LAUNCHER COMMAND``, which runs COMMAND. Left out on
purpose: several machines (torchrun and srun start their processes), checks (the ranks make them,
and the first rank to fail reports), and systems other than Linux, because this module relies on
Linux to tell when a parent or a child has died.
"""

import ctypes
import logging
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moetrain.cli import interrupt_quietly

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0
"""Seconds after a failure in which the other ranks may still report, before they are killed."""
_STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of ranks that stopped on request. The other ranks then have all the time they need."""
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that torch's start_processes handles, and SIGUSR1, the warning of batch systems."""
_FAILED, _MISCONFIGURED = 1, 2
_LOST = "lost"
"""Content of the failure mark if the rank that wrote it has only lost contact to another."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def start_ranks(command: Sequence[str], nproc: int, max_restarts: int = 0) -> int:
    """Run ``python COMMAND`` as ``nproc`` ranks until the run ends. Return its exit code.

    Call this function from the main thread, where signals arrive. After a failure all ranks start
    again, at most ``max_restarts`` times.
    """
    restarts, code = 0, _run_ranks(command, nproc, 0, max_restarts)
    while code == _FAILED and restarts < max_restarts:
        restarts += 1
        print(f"starting again: {restarts} of {max_restarts} times", file=sys.stderr)
        code = _run_ranks(command, nproc, restarts, max_restarts)
    return code


def _run_ranks(command: Sequence[str], nproc: int, restarts: int, max_restarts: int) -> int:
    # Imported here: neither ranks nor --help need it.
    import torch
    from torch.distributed import TCPStore
    from torch.distributed.elastic import multiprocessing

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # This process serves the store. If a rank did, another program might take the rank's free port
    # before the rank uses it.
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    # By default the torch of each rank would use every core.
    threads = min(torch.get_num_threads(), (os.cpu_count() or 1) // nproc)
    shared = {
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks are all clients of that store
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "OMP_NUM_THREADS": str(max(1, threads)),
    }
    follower = ("-m", "moetrain.cli.launch", str(os.getpid()), *command)
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    with tempfile.TemporaryDirectory(prefix="moetrain-") as folder:
        try:
            ranks = multiprocessing.start_processes(
                "moetrain",
                sys.executable,
                args=dict.fromkeys(range(nproc), follower),
                envs={r: shared | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(nproc)},
                logs_specs=multiprocessing.DefaultLogsSpecs(folder),
            )
            try:
                return _watch(list(ranks.pids().values()), handlers, ranks.error_files)
            finally:
                ranks.close(signal.SIGKILL)  # kills the ranks' own children too
        except multiprocessing.SignalException as stop:  # before _watch set its own handlers
            print("interrupted", file=sys.stderr)
            return 128 + stop.sigval
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _watch(
    pids: Sequence[int], before: Mapping[signal.Signals, Any], error_files: Mapping[int, str]
) -> int:
    """Wait until all ranks have succeeded or stopped, or one has failed. Return the exit code.

    ``before`` has the earlier handler of each signal, and ``error_files`` the file to which each
    rank writes its error.
    """
    # Imported here: while the module's own imports run, Ctrl-C is not handled yet.
    from moetrain.config.environment import failure_mark

    forwarded: list[int] = []
    failed_mark = failure_mark(error_files[0])

    def forward(number: int, frame: Any) -> None:
        number = signal.SIGTERM if number == signal.SIGUSR1 else number
        forwarded.append(number)
        for pid in pids:
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)  # a stopped process handles a signal once it continues

    for number, was in before.items():  # a signal that nohup ignores stays ignored
        signal.signal(number, was if was is signal.SIG_IGN else forward)
    deadline, oom_kills = float("inf"), _oom_kills()
    while True:
        codes = [_exit_code(pid) for pid in pids]
        failed = [code for code in codes if code not in (None, 0, *_STOPPED)]
        if any(code < 0 and -code not in forwarded for code in failed):
            failed_mark.touch()  # the others' errors follow from this one
        if None not in codes or time.monotonic() > deadline:
            break
        if failed and deadline == float("inf"):
            deadline = time.monotonic() + _GRACE_SECONDS
        time.sleep(_POLL_SECONDS)
    for rank, code in enumerate(codes):
        if code is not None and code < 0 and -code not in forwarded:
            cause = f"signal {-code} ({signal.strsignal(-code)})"
            if code == -signal.SIGKILL and _oom_kills() > oom_kills:
                cause += (
                    ": the kernel killed processes because memory was full (see dmesg); lower "
                    "train.micro_batch_size, or start fewer processes (launch.nproc)"
                )
            print(f"failed: rank {rank} was killed by {cause}", file=sys.stderr)
        elif code is None and _is_stopped(pids[rank]):
            print(
                f"failed: rank {rank} was stopped by a signal (SIGSTOP or SIGTSTP), so that the "
                "others waited for it; it is killed",
                file=sys.stderr,
            )
    if failed and failed_mark.exists() and failed_mark.read_text() == _LOST:
        for rank, code in enumerate(codes):
            if code is not None and code >= 0 and not Path(error_files[rank]).exists():
                problem = f"ended with exit code {code} and no error, while others needed it"
                print(f"failed: rank {rank} {problem}", file=sys.stderr)
    # A rank that was killed by a stop signal, before it could handle the signal, counts as stopped.
    ended = [128 - code if -code in forwarded else code for code in codes if code is not None]
    failed = [code for code in ended if code not in (0, *_STOPPED)]
    if failed:
        # If one rank finds a bad setting (2), the other ranks fail in other ways (1). Other codes
        # come from code that is not ours.
        return _MISCONFIGURED if _MISCONFIGURED in failed else _FAILED
    return max(ended)


def _exit_code(pid: int) -> int | None:
    """Poll a child's exit code like ``Popen.poll``, but leave the child for its owner to reap."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _oom_kills() -> int:
    """Return how many processes the kernel has ended since its start because memory was full."""
    file = Path("/proc/vmstat")
    rows = file.read_text().splitlines() if file.exists() else []
    return sum(int(row.split()[1]) for row in rows if row.startswith("oom_kill "))


def _is_stopped(pid: int) -> bool:
    """Return whether a child has been stopped by a signal."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


# ---- the code that ranks run -------------------------------------------------------------------


def is_first_to_fail(error_file: str, *, waits: bool, is_lost: bool = False) -> bool:
    """Return True on the first rank of this machine that fails; later ranks fail because of it.

    ``error_file`` is this rank's own, from TORCHELASTIC_ERROR_FILE. With ``waits`` this function
    gives the launcher time to report first that another rank was killed, which may be the cause.
    ``is_lost`` tells the launcher that this rank has only lost contact to another one.
    """
    from moetrain.config.environment import failure_mark

    if waits:
        time.sleep(5 * _POLL_SECONDS)
    try:
        with failure_mark(error_file).open("x") as mark:
            mark.write(_LOST * is_lost)
    except FileExistsError:
        return False
    return True


def _run_command(launcher: str, *command: str) -> None:
    """Run ``-m MODULE [WORD ...]`` or ``FILE [WORD ...]`` as python would."""
    # The kernel kills this process when its parent ends, even if `kill -9` ended the parent.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(launcher):  # the launcher ended before the call of prctl
        os.kill(os.getpid(), signal.SIGKILL)
    if command[0] == "-m":
        interrupt_quietly()
        sys.argv = [*command[1:]]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*command]
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    _run_command(*sys.argv[1:])
