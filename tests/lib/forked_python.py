"""Commands that tests start, forked from a process that has imported torch and moetrain.

``python -m moetrain.train`` takes four seconds of a core to import torch before it does anything,
and each rank that it starts four more. After :func:`install`, ``subprocess.Popen`` forks such a
command from the fork server of :mod:`distributed` instead, and a forked command forks the ranks
that it starts. The process is a child of the one that asked for it, with the arguments,
environment, folder, files, session, signals and exit code of a fresh command.

Some programs still start a fresh interpreter: those that are no module of :data:`MODULES`, no
script of ours and do not import ``moetrain.cli``, those with ``--help``, and those whose
environment differs in a variable that Python, torch or Triton read at import. On a machine with a
GPU, all programs do.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import inspect
import logging
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from multiprocessing import forkserver, process, reduction, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

import moetrain

MODULES = re.compile(r"moetrain\.[\w.]+|torch\.distributed\.run")
"""Modules that may run in a process that has imported others before."""
_IMPORTS = re.compile(r"moetrain\.cli\b")
"""Pattern in the text of a program that may be forked."""
_OURS = [Path(__file__).parents[1], Path(__file__).parents[2] / "scripts"]
"""Folders of programs that may always be forked."""
_READ_AT_IMPORT = re.compile(
    r"PYTHON|LD_|OMP_|GOMP_|KMP_|MKL_|MALLOC_|TORCH_|TORCHINDUCTOR_|TRITON_|CUDA_"
)
_READ_LATER = {"PYTHONPATH", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
_READ_LATER |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}  # torchrun sets it
_READ_LATER |= {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}  # inductor sets them
# Commands of ours set how idle OpenMP threads wait; tests have no such threads.
_READ_LATER |= {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
_NAMESPACES = re.compile(
    r"nsenter --target (?P<pid>\d+) --net --mount --uts --ipc --pid --wd=(?P<folder>\S+) "
    r"(?P<dies>setpriv --pdeathsig KILL )?"
)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_OWN_PATHS = [
    path
    for path in sys.path
    if path and path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)
]
"""``sys.path`` of the fork server, which imports this module, without its environment's part."""
_execute = subprocess.Popen._execute_child  # pyright: ignore
_libc = ctypes.CDLL(None, use_errno=True)
_AT_IMPORT = dict(os.environ)
"""The variables that a test's process and its fork server start with."""
_is_forked = False
"""True: this process is a forked command, and forks the commands that it starts by itself."""


class _Command(NamedTuple):
    """The command that a forked process becomes."""

    words: list[str]
    """The arguments after the interpreter's: ``-m MODULE ...``, ``-c TEXT ...`` or ``FILE ...``."""
    environment: dict[str, str]
    folder: str | None
    is_session: bool
    group: int
    ignores_ctrl_c: bool
    namespaces: int | None
    """The process whose namespaces a child enters first."""
    dies: bool


class _Files(NamedTuple):
    """Descriptors that a process keeps; they travel with it when it is pickled."""

    standard: list[int]
    """Descriptors for standard input, output and error."""
    ready: int
    """The descriptor by which the process reports that it has started."""

    def __reduce__(self) -> Any:
        return _received, ([reduction.DupFd(fd) for fd in (*self.standard, self.ready)],)


def _received(sent: list[Any]) -> _Files:
    *standard, ready = [fd.detach() for fd in sent]
    return _Files(standard, ready)


def install(*, is_forked: bool = False) -> None:
    """Let ``subprocess.Popen`` fork from now on, here and in forked processes.

    ``is_forked``: this process was forked by the fork server, and forks without asking it.
    """
    global _is_forked
    _is_forked = is_forked
    if not torch.cuda.is_available() and sys.platform == "linux":
        subprocess.Popen._execute_child = _fork  # pyright: ignore


def is_installed() -> bool:
    """Return True if ``subprocess.Popen`` forks here."""
    return subprocess.Popen._execute_child is _fork  # pyright: ignore


# ---- asking for a process -----------------------------------------------------------------------


def _fork(self: subprocess.Popen[Any], *args: Any) -> None:
    """Replace ``Popen._execute_child``: fork where that gives the same process."""
    asked = inspect.signature(_execute).bind(self, *args).arguments
    command = _command_of(asked)
    if command is None or asked["pass_fds"]:
        return _execute(self, *args)
    # Descriptors 0 to 2 of the fork server belong to another process.
    standard = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
    standard = [own if fd == -1 else fd for own, fd in enumerate(standard)]
    pid = _forked_here(command, standard) if _is_forked else _forked_there(command, standard)
    self.pid = pid
    self._child_created = True  # pyright: ignore
    self._close_pipe_fds(  # pyright: ignore
        *(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
        *(asked[name] for name in ("errread", "errwrite")),
    )
    return None


def _command_of(asked: Mapping[str, Any]) -> _Command | None:
    """Return the process to fork for these arguments of ``_execute_child``, or None."""
    plain = ("preexec_fn", "shell", "creationflags", "gid", "gids", "uid", "startupinfo")
    if any(asked[name] not in (None, False, 0) for name in plain) or asked["umask"] >= 0:
        return None
    if asked["executable"] is not None or isinstance(asked["args"], str | bytes | os.PathLike):
        return None
    if not (asked["close_fds"] and asked["restore_signals"]):
        return None
    words = [os.fsdecode(word) for word in asked["args"]]
    entered = None
    if words[0] == "nsenter" and (entered := _NAMESPACES.match(" ".join(words))):
        words = words[len(entered[0].split()) :]
    folder = entered["folder"] if entered else asked["cwd"]
    if words[:1] != [sys.executable] or not (folder is None or Path(os.fsdecode(folder)).is_dir()):
        return None
    words = words[1:]
    while words[:1] == ["-u"]:
        words = words[1:]
    environment = dict(os.environ if asked["env"] is None else asked["env"])
    environment = {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()}
    if not (_may_fork(words) and _imports_the_same(environment)):
        return None
    return _Command(
        words=words,
        environment=environment,
        folder=None if folder is None else os.fsdecode(folder),
        is_session=bool(asked["start_new_session"]),
        group=asked["process_group"],
        ignores_ctrl_c=signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        namespaces=int(entered["pid"]) if entered else None,
        dies=bool(entered and entered["dies"]),
    )


def _may_fork(words: Sequence[str]) -> bool:
    if not words or {"--help", "-h"} & {*words}:
        return False
    if words[0] == "-m":
        return MODULES.fullmatch(words[1]) is not None
    if words[0] == "-c":
        return _IMPORTS.search(words[1]) is not None
    file = Path(words[0])
    if file.suffix != ".py" or not file.is_file():
        return False
    return file.parent in _OURS or _IMPORTS.search(file.read_text()) is not None


def _imports_the_same(environment: Mapping[str, str]) -> bool:
    """Return True if a fresh interpreter would import the fork server's modules alike."""
    for name in filter(_READ_AT_IMPORT.match, {*environment, *_AT_IMPORT} - _READ_LATER):
        if environment.get(name) != _AT_IMPORT.get(name):
            return False
    known = {*_OWN_PATHS, *(str(Path(module.__path__[0]).parent) for module in (moetrain, torch))}
    added = {entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry}
    return not any(map(_hides_a_module, added - known))


def _hides_a_module(folder: str) -> bool:
    """Return True if ``folder``, searched first, shadows a module that would be found without."""
    if not os.path.isdir(folder):
        return False
    names = {name.partition(".")[0] for name in os.listdir(folder)}
    own = {name for name in names if _is_found(name, [folder])}
    known = {"moetrain", "sitecustomize"}
    return not known.isdisjoint(own) or any(_is_found(name, _OWN_PATHS) for name in own)


def _is_found(name: str, folders: list[str]) -> bool:
    found = PathFinder.find_spec(name, folders)
    return found is not None and found.loader is not None  # a folder without a file has no loader


def _forked_here(command: _Command, standard: list[int]) -> int:
    read, write = os.pipe()
    with warnings.catch_warnings():  # the process has threads, but the command does not use them
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _become(command, _Files(standard, write))
    os.close(write)
    with open(read, "rb") as ready:
        _await(ready, command)
    return pid


def _forked_there(command: _Command, standard: list[int]) -> int:
    """Fork from the fork server; return the id of the process, which becomes this one's child.

    The server's child forks once more and ends. The kernel then gives the orphan to the nearest
    ancestor that is a subreaper, as this process is for that time.
    """
    from tests.lib.distributed import fork_server

    server = fork_server()
    read, write = os.pipe()
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        between = server.Process(target=_bear, args=(command, _Files(standard, write)))
        between.start()
        os.close(write)
        with open(read, "rb") as ready:
            pid = int.from_bytes(ready.read(4), "little")
            _await(ready, command)
        between.join()
        between.close()
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
    return pid


def _await(ready: Any, command: _Command) -> None:
    if ready.read(1) != b"+":
        raise RuntimeError(f"a forked process ended before it began: {command.words}")


def _bear(command: _Command, files: _Files) -> None:
    between = os.getpid()
    pid = os.fork()
    if pid == 0:
        while os.getppid() == between:
            time.sleep(0.001)
        _become(command, files)
    os.write(files.ready, pid.to_bytes(4, "little"))
    os._exit(0)


# ---- being one ----------------------------------------------------------------------------------


def _become(command: _Command, files: _Files) -> NoReturn:
    """Make this process like a fresh interpreter, run the command, and end."""
    code = 1
    try:
        _forget()
        *standard, ready = [
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (*files.standard, files.ready)
        ]
        for own, fd in enumerate(standard):
            os.dup2(fd, own)
        ready = os.dup2(ready, 3, inheritable=False)
        os.closerange(4, 1 << 16)
        os.environ.clear()
        os.environ.update(command.environment)
        if command.is_session:
            os.setsid()
        if command.group >= 0:
            os.setpgid(0, command.group)
        _reset_signals()
        if command.namespaces is not None:
            _enter(command)
        if command.folder is not None:
            os.chdir(command.folder)
        os.write(ready, b"+")
        os.close(ready)
        code = _run(command)
    except BaseException:  # noqa: BLE001 - a process that has nobody above it
        traceback.print_exc()
    finally:
        os._exit(code)


def _forget() -> None:
    """Reset what multiprocessing, atexit and logging know of the parent."""
    if _is_forked:  # its parent was a command, whose exit handlers must not run here
        atexit._clear()
        weakref.finalize._registry.clear()  # pyright: ignore
        weakref.finalize._registered_with_atexit = False  # pyright: ignore
        atexit.register(logging.shutdown)
        atexit.register(multiprocessing.util._exit_function)  # pyright: ignore
    install(is_forked=True)
    (main,) = (c for c in process.BaseProcess.__subclasses__() if c.__name__ == "_MainProcess")
    process._current_process = main()  # pyright: ignore
    process._parent_process = None  # pyright: ignore
    process._children = set()  # pyright: ignore
    multiprocessing.set_start_method(None, force=True)
    forkserver._forkserver = forkserver.ForkServer()
    for name in ("ensure_running", "get_inherited_fds", "connect_to_new_process"):
        setattr(forkserver, name, getattr(forkserver._forkserver, name))
    forkserver.set_forkserver_preload = forkserver._forkserver.set_forkserver_preload
    tracker = resource_tracker._resource_tracker = resource_tracker.ResourceTracker()
    for name in ("ensure_running", "register", "unregister", "getfd"):
        setattr(resource_tracker, name, getattr(tracker, name))


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        with contextlib.suppress(OSError, ValueError):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the command sets its own handler
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _enter(command: _Command) -> None:
    """Continue as a child in other namespaces; this process waits for it, as nsenter does."""
    for name in ("net", "uts", "ipc", "pid", "mnt"):
        fd = os.open(f"/proc/{command.namespaces}/ns/{name}", os.O_RDONLY)
        if _libc.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns({name})")
        os.close(fd)
    child = os.fork()
    if child == 0:
        if command.dies:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    os.closerange(3, 1 << 16)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _run(command: _Command) -> int:
    """Run ``-m``, ``-c`` or a file as ``python`` does; return the exit code."""
    words = command.words
    _open_standard_files()
    for name in [name for name in sys.modules if name in ("__mp_main__", "__main__")]:
        del sys.modules[name]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.orig_argv = [sys.executable, *words]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*map(os.path.abspath, filter(None, added)), *_OWN_PATHS]
    ctrl_c = signal.SIG_IGN if command.ignores_ctrl_c else signal.default_int_handler
    try:
        signal.signal(signal.SIGINT, ctrl_c)
        if words[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = words[1:]
            sys.modules.pop(words[1], None)  # otherwise runpy warns
            call: Callable[[], Any] = lambda: runpy._run_module_as_main(words[1])  # noqa: E731
        elif words[0] == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *words[2:]]
            code = compile(words[1], "<string>", "exec")
            call = lambda: exec(code, main.__dict__)  # noqa: E731
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
            sys.argv = list(words)
            main.__file__ = words[0]
            code = compile(Path(words[0]).read_text(), words[0], "exec")
            call = lambda: exec(code, main.__dict__)  # noqa: E731
        call()
        result = 0
    except SystemExit as end:
        result = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        result = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    if result < 0:
        signal.signal(-result, signal.SIG_DFL)
        os.kill(os.getpid(), -result)
    return result & 0xFF


def _open_standard_files() -> None:
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for fd, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        file = open(fd, "w", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        is_line_buffered = fd == 2 or file.isatty()
        file.reconfigure(write_through=is_unbuffered, line_buffering=is_line_buffered)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
