"""A reward for programs: each runs with the line's tests, in a process with its own limits.

    python -m moetrain.rl --model.path MODEL --rl.env jsonl --rl.prompts prompts.jsonl \
        --rl.reward code_reward.py:score_code

A line's ``answer`` is its tests, such as ``assert add(3, 4) == 7``: a text, a list of texts, or the
text of such a list's JSON. Tests may also be a function ``check(candidate)`` beside the line's
``entry_point`` (HumanEval), functions ``test_...`` without arguments (pytest), or subclasses of
``unittest.TestCase``; these are called. ``from solution import add`` (KodCode) finds the program.
Tests may also be inputs and outputs: ``{"inputs": ["3 4\\n"], "outputs": ["7\\n"]}`` (APPS, TACO,
Eurus) or ``[{"input": "3 4\\n", "output": "7\\n"}]`` (LiveCodeBench), as objects or as JSON. The
program runs with each input as its standard input, within the limits for all together. Its output
is right if each line has the words of the right one. Numbers with a point or an exponent may differ
as in ``numpy.allclose``, and blank lines do not count. With ``fn_name`` beside the inputs or in the
line (``func_name`` in the line's ``metadata``), the function or the method of ``Solution`` is
called with each input's arguments.

What the tests need, in the line's ``test_setup_code`` or ``test_imports`` (MBPP), runs before them.

If the prompt ends with a function that has no more than a docstring (HumanEval), an answer may go
on with its body, as a base model does, or define the function again, as a chat does. The imports
and the other functions of the prompt are there for both.

The available guarantees depend on the machine. ``python code_reward.py`` prints those of this one:

``uid``       The program has a user id of its own. It cannot signal the trainer, nor read its
              memory, its environment or files that not every user may read. Only root can give
              that; another user's program reads what this user may read.
``pids``      A namespace of processes: the program sees no others, and all that it has started
              ends with it, whatever it forked. Where users may make namespaces the trainer's
              memory and environment are closed to it too, since they belong to another namespace.
``network``   No network, loopback neither. Sockets that are files can be opened by who may.
``files``     Everything but its folder and /dev/shm is read-only, and what it wrote there (64 MiB
              each at most) is gone at its end. Without it, files that it leaves in /tmp, in
              /dev/shm or where else it may write stay there.
``group``     A control group limits the memory of all its processes together. Without one, the sum
              is taken 20 times a second, so it may be exceeded for that long, and memory that no
              process has mapped (of ``memfd_create`` and System V) is not in the sum.
``alone``     64 processes are the program's own. Without it the limit counts all of this user's.

Limits on every machine: 10 s, 1 GiB for each process, 1 MiB for each file and for the output, 64
open files, no rights through setuid programs, no inherited files, a folder of its own that is
removed.

With neither ``uid`` nor ``pids`` the program may kill or stop the trainer and the process that
enforces the limits, read the trainer's memory, and leave processes. Train in a container then. The
program can always find out how its process reports success, and report it without passing.
"""

import ast
import ctypes
import json
import logging
import os
import re
import resource
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

_SECONDS = 10
_MEMORY = 1 << 30
_PROCESSES = 64
_SECONDS_TO_DIE = 30
"""A killed process dies only when a core is free, and programs may have filled all cores."""
_FILE, _FOLDER, _OPEN_FILES = 1 << 20, 64 << 20, 64
_USES = ("uid", "namespaces", "group")
"""The means of isolation, each used if the machine has it. Tests leave some out."""
_PYTHON = ("", "py", "python", "python3")
_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError, IndexError)
"""Errors of ``ast.parse`` for a text, and of an empty one."""
_SETUPS = ("test_imports", "test_setup_code", "test_setup", "setup_code")
"""Fields of a line with what its tests need: MBPP's, and names like them."""
_PROMPTS = ("prompt", "messages", "conversations")
_START = re.compile(r"^(?:(?:from|import|def|async|class)\b|@|[A-Z_]+ *=)", re.MULTILINE)
"""Matches the first line of what may be Python in a prompt."""
_DEFINED = re.compile(r"^(?:(?:async\s+)?def|class)\s+(\w+)", re.MULTILINE)
_STARTS = 32
"""Most such lines that are tried."""


def score_code(line: dict[str, Any], answer: str) -> float:
    """Return 1 if the answer's program and then the line's ``answer``, its tests, run to the end.

    The program is the last block between ``` marks that defines a function or a class of the tests,
    since an example of its use may follow. Else it is the last block that is marked as Python, the
    last block, or all of the text. The module's docstring lists its limits.

    Raises:
        RuntimeError: programs cannot be run here, not even one that does nothing.
        ValueError: the tests cannot be run, or a program that is empty passes them.
    """
    tests, setup = _runnable(line), _setup_of(line)
    begun = _begun_in(_prompt_of(line))
    for before in dict.fromkeys(("", f"{setup}\n")):
        if _is_passed_by_nothing(begun.stub if begun else "", tests.behind(before)):
            raise ValueError(
                f"answer has tests that an empty program passes: {_shown(line['answer'])}; write "
                "tests such as assert add(3, 4) == 7, or inputs and outputs"
            )
    program = _program_in(answer, "" if tests.run_it else tests.text)
    program = begun.finished_by(program) if begun else program
    return float(_passes(program, tests.behind(f"{setup}\n")))


def _blocks(text: str) -> list[str]:
    """Return the blocks of Python between ``` marks, those that are marked as Python last."""
    found = re.findall(r"```([^\n`]*)\n(.*?)```", text, re.DOTALL)
    kinds = ((kind.strip().lower(), code) for kind, code in found)
    python = [(kind, code) for kind, code in kinds if kind in _PYTHON]
    return [code for _, code in sorted(python, key=lambda block: bool(block[0]))]


def _program_in(answer: str, tests: str) -> str:
    """Return the program of an answer. It is not parsed: it may be made to crash Python."""
    blocks, words = _blocks(answer), set(re.findall(r"[A-Za-z_]\w*", tests))
    defining = [x for x in blocks if not words.isdisjoint(_DEFINED.findall(x))]
    return [answer, *blocks, *defining][-1]


class _Tests(NamedTuple):
    """Tests as a program."""

    text: str
    run_it: bool = False
    """True: the tests run the program, which is the text ``_program``. False: they follow it."""

    def behind(self, before: str) -> "_Tests":
        """Return these tests behind the program ``before``."""
        return self._replace(text=before + self.text)

    def of(self, program: str) -> str:
        """Return the program with its tests, as one program."""
        program = f"_program = {program!r}" if self.run_it else program
        return f"{program}\n\n{self.text}"


def _passes(program: str, tests: _Tests) -> bool:
    """Return True if the program and then the tests run to the end."""
    uses, _ = _usable(_USES)
    # A program that exits before its tests can print this only on purpose.
    ran = secrets.token_hex(8)
    code, written, _ = _run(f"{tests.of(program)}\n\nprint('{ran}', flush=True)", uses)
    return code == 0 and ran.encode() in written


@lru_cache(maxsize=1 << 14)
def _is_passed_by_nothing(stub: str, tests: _Tests) -> bool:
    """Return True if the prompt's own code, or a program that defines nothing, passes the tests."""
    return _passes(stub or "pass", tests)


class _Begun(NamedTuple):
    """A program that a prompt begins: its last function has no more than a docstring."""

    text: str
    """The program as the prompt has it."""
    stub: str
    """The same as Python that can be run: the last function returns None."""
    name: str
    """The function or class that is not finished."""

    def finished_by(self, program: str) -> str:
        """Return a program that defines ``name`` itself, or goes on with its body, behind the
        prompt's. Answers are not parsed here: they may be made to crash Python."""
        names = rf"^(?:(?:async\s+)?def|class)\s+{self.name}\b|^{self.name}\s*="
        last = self.text.rpartition("\n")[2]
        is_within_line = last.isspace() or last.rstrip().endswith(":")
        is_indented = program.lstrip("\n")[:1] in (" ", "\t")
        if re.search(names, program, re.MULTILINE) or not (is_indented or is_within_line):
            future = r"^from __future__ import .*$"
            first = re.findall(future, program, re.MULTILINE)
            rest = re.sub(future, "", program, flags=re.MULTILINE)
            return "\n".join([*first, self.stub, "", rest])
        if last.isspace() and is_indented:
            return self.text[: -len(last)] + program
        is_cut = bool(last) and not is_within_line and not program.startswith("\n")
        return self.text + "\n" * is_cut + program


def _prompt_of(line: dict[str, Any]) -> str:
    """Return the text of the line's prompt, or of the last turn in it. Empty: it is no text."""
    given = next((line[key] for key in _PROMPTS if line.get(key)), "")
    turn = given[-1] if isinstance(given, list) and given else given
    text = turn.get("content", turn.get("value")) if isinstance(turn, dict) else turn
    return text if isinstance(text, str) else ""


@lru_cache(maxsize=1 << 14)
def _begun_in(prompt: str) -> _Begun | None:
    """Return the program that a prompt begins: its last block, or the lines at its end."""
    starts = [found.start() for found in _START.finditer(prompt)][:_STARTS]
    for text in (*_blocks(prompt)[-1:], *(prompt[start:] for start in starts)):
        for stub in (text, f"{text.rstrip()} pass"):
            with suppress(*_NO_PYTHON):
                last = ast.parse(stub).body[-1]
                if _is_unfinished(last):
                    return _Begun(text, stub, last.name)
    return None


def _is_unfinished(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.ClassDef]:
    """Return True for a function with no more than a docstring, or a class that ends with one."""
    if isinstance(node, ast.ClassDef):
        return _is_unfinished(node.body[-1])
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and all(
        isinstance(inner, ast.Pass)
        or (isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant))
        for inner in node.body
    )


def _setup_of(line: dict[str, Any]) -> str:
    """Return what the tests need, as a program.

    Raises ValueError: it is no Python.
    """
    texts = []
    for key in _SETUPS:
        text = _text_of(line.get(key))
        try:
            ast.parse(text or "")
        except _NO_PYTHON as error:
            problem = f"{key} is no Python: {' '.join(str(error).split())}"
            raise ValueError(f"{problem}; write what runs before the tests there") from None
        texts += [text] if text else []
    return "\n".join(texts)


def _text_of(given: object) -> str | None:
    """Return a text, or the lines of a list or of the JSON of one. None: it is another value."""
    if isinstance(given, str) and given.lstrip().startswith("["):
        with suppress(ValueError):
            given = json.loads(given)
    text = "\n".join(map(str, given)) if isinstance(given, list) else given
    return text if isinstance(text, str) else None


_RUNS = """
import subprocess, sys
with open("program.py", "w", encoding="utf-8", errors="replace") as opened:
    opened.write(_program)
def same(word, right):
    if word == right or not set(right.lower()) & set(".e"):
        return word == right
    try:
        return abs(float(word) - float(right)) <= 1e-8 + 1e-5 * abs(float(right))
    except ValueError:
        return False
for given, right in {cases!r}:
    command = [sys.executable, "-I", "-X", "utf8", "program.py"]
    ran = subprocess.run(command, input=given.encode(), stdout=subprocess.PIPE, check=True)
    texts = (ran.stdout.decode(errors="replace"), right)
    lines, wanted = ([x.split() for x in text.splitlines() if x.strip()] for text in texts)
    assert [len(line) for line in lines] == [len(line) for line in wanted]
    pairs = [pair for both in zip(lines, wanted) for pair in zip(*both)]
    assert all(same(word, right) for word, right in pairs)
"""
"""Tests of a program that reads standard input."""
_CALLS = """
import json
def listed(value):
    return json.loads(json.dumps(value))
_solution = globals().get("Solution")
_called = getattr(_solution(), {name!r}) if hasattr(_solution, {name!r}) else {name}
for given, right in json.loads({cases!r}):
    got = listed(_called(*given))
    assert got == right or (isinstance(right, list) and len(right) == 1 and got == right[0])
"""
"""Tests of a function. As in APPS, a result may stand in a list, and tuples are lists."""


def _inputs_of(line: dict[str, Any]) -> _Tests | None:
    """Return the tests of an ``answer`` that is inputs and outputs. None: it is something else.

    Raises ValueError: they cannot be read.
    """
    given = _unpacked(line.get("answer"))
    if isinstance(given, list) and given and all(_has(each, "input", "output") for each in given):
        pairs = [(each["input"], each["output"]) for each in given]
    elif _has(given, "inputs", "outputs"):
        inputs, outputs = _unpacked(given["inputs"]), _unpacked(given["outputs"])
        if not (isinstance(inputs, list) and isinstance(outputs, list)) or not inputs:
            raise ValueError("answer has inputs or outputs that are no list of some; write lists")
        if len(inputs) != len(outputs):
            counts = f"{len(inputs)} inputs and {len(outputs)} outputs"
            raise ValueError(f"answer has {counts}; write one output for each input")
        pairs = list(zip(inputs, outputs, strict=True))
    else:
        return None
    places = (given, line, _unpacked(line.get("metadata")))
    names = (x.get(key) for x in places if isinstance(x, dict) for key in ("fn_name", "func_name"))
    if name := next(filter(None, names), None):
        if not str(name).isidentifier():
            raise ValueError(f"answer has the function {_shown(name)}; write its name alone")
        cases = json.dumps(
            [(_arguments(x), _unpacked(y) if isinstance(x, str) else y) for x, y in pairs]
        )
        return _Tests(_CALLS.format(name=name, cases=cases))
    texts = [tuple(_lines(x) for x in pair) for pair in pairs]
    return _Tests(_RUNS.format(cases=texts), run_it=True)


def _has(value: object, *keys: str) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and all(key in value for key in keys)


def _unpacked(value: object) -> Any:
    """Return the value whose JSON is the text ``value``. Return other values unchanged."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _arguments(given: object) -> list[Any]:
    """Return the arguments of a call: a list of them, or a text with the JSON of one a line."""
    if isinstance(given, str):
        return [_unpacked(text) for text in given.splitlines() if text.strip()]
    return given if isinstance(given, list) else [given]


def _lines(value: object) -> str:
    """Return what a program reads or writes: a text, or lines in a list."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _runnable(line: dict[str, Any]) -> _Tests:
    """Return the tests in the line's ``answer`` as a program that calls all of them.

    Raises ValueError: there are none, or their form is not one that the module's docstring names.
    """
    if found := _inputs_of(line):
        return found
    text = _text_of(line.get("answer"))
    if text is None or not text.strip():
        raise ValueError(
            f"answer is {_shown(line.get('answer'))}; write the tests there, as Python"
        )
    try:
        tree = ast.parse(text)
    except _NO_PYTHON as error:
        problem = f"answer has tests that are no Python: {' '.join(str(error).split())}"
        remedy = "write tests such as assert add(3, 4) == 7, or inputs and outputs"
        raise ValueError(f"{problem}; {remedy}") from None
    body = [node for node in tree.body if not _is_start_of_tests(node)]
    calls = [node for node in body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    called = {node.id for call in calls for node in ast.walk(call) if isinstance(node, ast.Name)}
    lines, cases = [ast.unparse(node) for node in body], []
    if _imports_solution(tree):
        lines.insert(0, "import sys\nsys.modules['solution'] = sys.modules['__main__']")
    for node in body:
        if isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(b) for b in node.bases):
            cases.append(node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            raise ValueError(
                f"answer has the class {node.name} for pytest; write its asserts alone"
            )
        if not isinstance(node, ast.FunctionDef) or node.name in called:
            continue
        if node.name == "check":
            if not line.get("entry_point"):
                remedy = "give the name of the function that it checks as `entry_point`"
                raise ValueError(f"answer has a function check that nothing calls; {remedy}")
            lines.append(f"check({line['entry_point']})")
        elif node.name.startswith("test"):
            arguments = node.args.posonlyargs + node.args.args
            if len(arguments) > len(node.args.defaults) or node.decorator_list:
                problem = f"answer has {node.name}, whose arguments or marks need pytest"
                raise ValueError(f"{problem}; write its asserts with values")
            lines.append(f"{node.name}()")
    for name in cases:
        lines.append(
            "import unittest\n"
            f"_loaded = unittest.defaultTestLoader.loadTestsFromTestCase({name})\n"
            "assert unittest.TextTestRunner(verbosity=0).run(_loaded).wasSuccessful()"
        )
    return _Tests("\n".join(lines))


def _shown(value: object) -> str:
    """Return the beginning of a value for an error."""
    return "not there" if value is None else f"{str(value)[:80]!r}"


def _is_start_of_tests(node: ast.stmt) -> bool:
    """Return True for ``unittest.main()`` or ``pytest.main()``, also under ``__main__``."""
    if not isinstance(node, ast.Expr | ast.If):
        return False
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return any(ast.unparse(call.func) in ("unittest.main", "pytest.main") for call in calls)


def _imports_solution(tree: ast.Module) -> bool:
    return any(
        (isinstance(node, ast.ImportFrom) and node.module == "solution")
        or (isinstance(node, ast.Import) and any(name.name == "solution" for name in node.names))
        for node in ast.walk(tree)
    )


def contained() -> frozenset[str]:
    """Return the names of the module's guarantees that hold on this machine.

    Raises RuntimeError: programs cannot be run here.
    """
    return _usable(_USES)[1]


@lru_cache(maxsize=8)
def _usable(uses: tuple[str, ...]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the part of ``uses`` with which an empty program runs here, and its guarantees."""
    code, written, report = _run("print('ran')", uses)
    if code == 0 and written == b"ran\n":
        return uses, frozenset(report)
    why = " ".join(line[1:] for line in report if line.startswith("!"))
    why = why or f"it ended with exit status {code}"
    if "uid" in uses and os.geteuid() == 0:
        logging.getLogger(__name__).warning(
            "programs run as root: %s cannot be run by other users (%s). They can stop the trainer "
            "and read all files; install Python where every user can read it",
            *(sys.executable, why),
        )
        return _usable(tuple(use for use in uses if use != "uid"))
    raise RuntimeError(f"{sys.executable} cannot be run with limits: {why}")


def _run(program: str, uses: tuple[str, ...]) -> tuple[int, bytes, list[str]]:
    """Run a program; return its exit status, its output, and the guarantees that hold for it."""
    folder = tempfile.mkdtemp(prefix="code-reward-")
    limits = {"seconds": _SECONDS, "memory": _MEMORY, "processes": _PROCESSES, "uses": uses}
    limits |= {"file": _FILE, "folder": _FOLDER, "open": _OPEN_FILES, "parent": os.getpid()}
    told, tell = os.pipe()
    try:
        with tempfile.TemporaryFile() as written, os.fdopen(told, "rb") as report:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", __file__, str(tell), json.dumps(limits)],
                    cwd=folder,
                    env={
                        **{"PATH": os.defpath, "OMP_NUM_THREADS": "1"},
                        **{"HOME": folder, "TMPDIR": folder},
                    },
                    stdin=subprocess.PIPE,
                    stdout=written,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(tell,),
                    start_new_session=True,
                )
            finally:
                os.close(tell)
            most = _SECONDS + 2 * _SECONDS_TO_DIE
            try:
                process.communicate(program.encode("utf-8", "replace"), timeout=most)
            # The program has stopped the process that enforces the limits.
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end(process)
            written.seek(0)
            # The pipe has no other writer, unless the program's processes outlive it.
            os.set_blocking(report.fileno(), False)
            lines = (report.read() or b"").decode(errors="replace").split("\n")
            return process.returncode, written.read(2 * _FILE), [line for line in lines if line]
    finally:
        _remove(folder)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end everything that it has started, unless it has ended."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_DIE)
        process.kill()
        process.wait()


def _remove(folder: str) -> None:
    """Remove the folder, which may hold a million nested folders."""
    try:
        os.rmdir(folder)
    except OSError:
        for words in (["chmod", "-R", "u+rwX", "--", folder], ["rm", "-rf", "--", folder]):
            subprocess.run(words, check=False, capture_output=True)


# ---- the process that enforces the limits --------------------------------------------------------
#
# It forks a process that enters the control group and the namespaces; that forks the first process
# of the namespace of processes, which gives up its rights; and that forks the program.

_NEWNS, _NEWIPC, _NEWUSER = 0x00020000, 0x08000000, 0x10000000
_NEWPID, _NEWNET = 0x20000000, 0x40000000
_SPACES = _NEWNS | _NEWIPC | _NEWPID | _NEWNET
_PDEATHSIG, _SUBREAPER, _DUMPABLE, _NO_NEW_PRIVS = 1, 36, 4, 38
_MOUNT_SETATTR = 442
_LIBC = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: object) -> None:
    """Call a function of the system; raise OSError if it fails or does not exist."""
    function = getattr(_LIBC, name, None)
    if function is None:
        raise OSError(0, f"there is no {name}")
    if function(*args) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    with suppress(OSError):
        _call("prctl", option, ctypes.c_ulong(value), zero, zero, zero)


def _status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def enforce(report: int, limits: dict[str, Any]) -> int:
    """Run the program on standard input, end all of its processes, and return its exit status.

    It writes a line to ``report`` for each guarantee that holds. A line that begins with ``!`` says
    why nothing can run.
    """
    os.set_inheritable(report, False)
    _prctl(_PDEATHSIG, signal.SIGTERM)  # if the trainer dies
    _prctl(_SUBREAPER, 1)  # so that daemonised processes are still found
    if os.getppid() != limits["parent"]:
        return 1
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    uid = _spare_uid() if os.geteuid() == 0 and "uid" in limits["uses"] else None
    if uid is not None:
        os.chown(".", uid, uid)
    group = _Group(limits["memory"], limits["processes"]) if "group" in limits["uses"] else None
    if group is not None and not group.folders:
        group = None
    deadline = time.monotonic() + limits["seconds"]
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _guarded(report, lambda: _enter(report, limits, uid, group))
    try:
        code = _watch(child, deadline, None if group else limits["memory"])
        if group is not None and group.was_exceeded():
            code = 137
    finally:
        if group is not None:
            group.kill()
        _kill_all(uid)
        if group is not None:
            group.remove()
    return code


def _guarded(report: int, work: Callable[[], int]) -> None:
    """Do the work of a forked process and end it."""
    code = 1
    try:
        code = work()
    except OSError as error:
        os.write(report, f"!{error.strerror} {error.filename or ''}\n".encode())
    finally:
        os._exit(code)


def _watch(child: int, deadline: float, memory: int | None) -> int:
    """Wait for the child; return its exit status, or 137 if it takes more time or memory."""
    while time.monotonic() < deadline:
        got = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, 0.05)
        if got is not None and got.si_signo == signal.SIGTERM:
            return 137
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == child:
                    return _status(found[1])
        if memory is not None and sum(map(_memory_of, _descendants(os.getpid()))) > memory:
            return 137
    return 137


def _descendants(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in file.read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _memory_of(pid: int) -> int:
    """Return the bytes of a process; shared pages count in part."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return sum(int(kib) << 10 for kib in re.findall(r"^(?:Swap)?Pss: +(\d+)", text, re.M))
    except PermissionError:  # it has made itself unreadable to other processes of this user
        with suppress(OSError):
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        pass
    return 0


def _kill_all(uid: int | None) -> None:
    """End all processes below this one."""
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while time.monotonic() < deadline:
        if uid is not None:  # all at once, so that none can fork in between
            killer = os.fork()
            if not killer:
                with suppress(OSError):
                    os.setresuid(uid, uid, uid)
                    os.kill(-1, signal.SIGKILL)
                os._exit(0)
            os.waitpid(killer, 0)
        for pid in [*_descendants(os.getpid())]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, 0.02)


def _spare_uid() -> int | None:
    """Return an unused user id, or None if this root may not use other ids.

    It is derived from the process's id, so that concurrent programs have different ones.
    """
    import pwd

    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        last = first + count
        base, most = (1 << 30, 1 << 22) if last > 1 << 31 else (last - 4000, 3999)
        if base > max(first, 1000):
            found = base + os.getpid() % most
            with suppress(KeyError):
                pwd.getpwuid(found)
                continue
            return found
    return None


class _Group:
    """Control groups for the program: one in version 2, one for each resource in version 1."""

    def __init__(self, memory: int, processes: int) -> None:
        """Make the groups if the trainer's own group allows it; otherwise ``folders`` is empty."""
        self.folders: list[Path] = []
        self._limits = {"memory": memory, "pids": processes + 3}
        for kind, places in _places().items():
            for place in places:
                if self._make(kind, place):
                    break
        if not any((folder / "memory.stat").exists() for folder in self.folders):
            self.remove()
            self.folders = []

    def _make(self, kind: str, place: Path) -> bool:
        for old in place.glob("code-reward-*"):  # left by killed processes
            if not Path("/proc", old.name.rpartition("-")[2]).exists():
                with suppress(OSError):
                    old.rmdir()
        folder = place / f"code-reward-{os.getpid()}"
        memory, pids = self._limits["memory"], self._limits["pids"]
        values = {
            "memory": {"memory.limit_in_bytes": memory},
            "pids": {"pids.max": pids},
            "": {"memory.max": memory, "memory.oom.group": 1},
        }[kind]
        also = {"memory.memsw.limit_in_bytes": memory, "memory.swap.max": 0, "pids.max": pids}
        try:
            folder.mkdir()
        except OSError:
            return False
        self.folders.append(folder)
        try:
            for name, value in values.items():
                _put(folder / name, value)
        except OSError:
            self.folders.pop().rmdir()
            return False
        for name, value in also.items():
            with suppress(OSError):
                _put(folder / name, value)
        return True

    @property
    def counts(self) -> bool:
        """Return True if the number of processes is limited."""
        return any((folder / "pids.max").exists() for folder in self.folders)

    def enter(self) -> bool:
        """Move this process into the groups; return False if one rejects it."""
        try:
            for folder in self.folders:
                _put(folder / "cgroup.procs", 0)
        except OSError:
            return False
        return True

    def was_exceeded(self) -> bool:
        """Return True if the kernel ended a process for its memory."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with suppress(OSError):
                    if re.search(r"^oom_kill [1-9]", (folder / name).read_text(), re.M):
                        return True
        return False

    def kill(self) -> None:
        """End the processes of the groups."""
        for folder in self.folders:
            with suppress(OSError):
                _put(folder / "pids.max", 0)
            with suppress(OSError):
                _put(folder / "cgroup.kill", 1)

    def remove(self) -> None:
        """Remove the groups, which have no processes left."""
        for folder in self.folders:
            for _ in range(100):
                with suppress(FileNotFoundError):
                    try:
                        folder.rmdir()
                    except OSError:
                        time.sleep(0.01)
                        continue
                break


def _put(file: Path, value: int) -> None:
    with file.open("w") as opened:  # does not create a file
        opened.write(str(value))


def _places() -> dict[str, list[Path]]:
    """Return folders of control groups in which a group can be made, by resource ("": all).

    In version 2 a group with processes cannot have limited subgroups, so the parent of the
    trainer's own group may be the place.
    """
    found: dict[str, list[Path]] = {}
    try:
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return found
    for line in mounts:
        words, _, last = line.partition(" - ")
        root, point = words.split()[3:5]
        kind, *_, options = last.split()
        for _, controllers, name in own:
            inner = Path(point, os.path.relpath(name, root)) if name.startswith(root) else point
            inner = Path(os.path.normpath(inner))
            for resource_name in {"memory", "pids"} & set(controllers.split(",")):
                if kind == "cgroup" and resource_name in options.split(","):
                    found.setdefault(resource_name, []).append(inner)
            if kind == "cgroup2" and not controllers:
                for place in (inner, inner.parent):
                    with suppress(OSError):
                        allowed = (place / "cgroup.subtree_control").read_text().split()
                        if "memory" in allowed and place.is_relative_to(point):
                            found.setdefault("", []).append(place)
    return found


def _enter(report: int, limits: dict[str, Any], uid: int | None, group: _Group | None) -> int:
    """Enter the group and the namespaces; run the first process there; return its exit status."""
    _prctl(_PDEATHSIG, signal.SIGKILL)
    promises = []
    if group is not None and group.enter():
        promises += ["group", *(["alone"] if group.counts else [])]
    elif group is not None:
        raise OSError(0, "the control group does not take the program", str(group.folders[-1]))
    is_isolated = has_rights = False
    if "namespaces" in limits["uses"] and os.geteuid() == 0:
        with suppress(OSError):
            _call("unshare", _SPACES)
            is_isolated = has_rights = True
    if uid is not None:
        promises += ["uid", "alone"]
        if not has_rights:
            _become(uid)
    if "namespaces" in limits["uses"] and not is_isolated and os.geteuid() != 0:
        with suppress(OSError):
            _prctl(_DUMPABLE, 1)  # allows the maps to be written
            user, own = os.getuid(), os.getgid()
            _call("unshare", _NEWUSER | _SPACES)
            is_isolated = True
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{own} {own} 1")
    if is_isolated:
        promises += ["pids", "network"]
        # The count of a user's processes is kept per namespace.
        promises += [] if uid is not None or has_rights else ["alone"]
    first = os.fork()
    if not first:
        _guarded(report, lambda: _begin(report, limits, uid if has_rights else None, promises))
    return _status(os.waitpid(first, 0)[1])


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _prctl(_PDEATHSIG, signal.SIGKILL)  # the change of user id has reset it


def _begin(report: int, limits: dict[str, Any], uid: int | None, promises: list[str]) -> int:
    """Drop privileges, run the program, and wait for it; all its processes end with this one."""
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if "pids" in promises and _hide_files(limits["folder"], uid):
        promises.append("files")
    if uid is not None:
        _become(uid)
    _prctl(_NO_NEW_PRIVS, 1)
    program = os.fork()
    if not program:
        _guarded(report, lambda: _execute(report, limits, promises))
    _prctl(_DUMPABLE, 0)  # the program cannot trace this process
    while True:
        pid, status = os.wait()
        if pid == program:
            return _status(status)


def _hide_files(size: int, uid: int | None) -> bool:
    """Make everything read-only except a new folder in place of this one; return False if refused.

    Steps that succeeded before a refusal stay in effect.
    """
    folder, private, recursive = os.getcwd(), 1 << 18, 1 << 14
    options = f"size={size},nr_inodes=10000,mode=700"
    options += f",uid={uid},gid={uid}" if uid is not None else ""
    nosuid_nodev = 2 | 4

    def mount(what: str, where: str, kind: str, flags: int, data: str) -> None:
        _call("mount", what.encode(), where.encode(), kind.encode(), flags, data.encode())

    try:
        mount("none", "/", "", private | recursive, "")
        if uid is not None:
            _open_python(folder, mount)
        read_only = struct.pack("QQQQ", 1, 0, 0, 0)
        _call("syscall", _MOUNT_SETATTR, -100, b"/", 0x8000, read_only, len(read_only))
        mount("tmpfs", folder, "tmpfs", nosuid_nodev, options)
        os.chdir(folder)  # enters the new mount
        if os.path.isdir("/dev/shm"):
            mount("tmpfs", "/dev/shm", "tmpfs", nosuid_nodev, options)
    except OSError:
        return False
    with suppress(OSError):  # a container may hide parts of it, and then this is refused
        mount("proc", "/proc", "proc", nosuid_nodev | 8, "")
    return True


def _open_python(folder: str, mount: Callable[[str, str, str, int, str], None]) -> None:
    """Let every user reach Python if a parent folder is closed to others, and hide that folder's
    rest.

    For example ``/root/miniconda3`` becomes readable, and ``/root`` then holds nothing else.
    """
    needed = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    needed = {os.path.realpath(path) for path in needed}
    closed: dict[str, dict[str, int]] = {}
    for path in sorted(needed):
        for outer in (*reversed(Path(path).parents), Path(path)):
            if not outer.stat().st_mode & 1:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                closed.setdefault(str(outer), {})[path] = descriptor
                break
    for outer, paths in closed.items():
        if outer in paths:
            raise OSError(13, "it is closed to other users", outer)
        mount("tmpfs", outer, "tmpfs", 2 | 4, "size=1m,mode=755")
        for path, descriptor in paths.items():
            os.makedirs(path, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", path, "", 4096 | 16384, "")
            os.close(descriptor)
        if Path(folder).is_relative_to(outer):
            os.makedirs(folder, exist_ok=True)


def _execute(report: int, limits: dict[str, Any], promises: list[str]) -> int:
    """Become the program."""
    os.write(report, "".join(f"{name}\n" for name in promises).encode())
    names = {"CPU": limits["seconds"], "AS": limits["memory"], "FSIZE": limits["file"]}
    # Two helper processes of the program's user wait for it.
    names |= {"NOFILE": limits["open"], "NPROC": limits["processes"] + 2, "CORE": 0}
    for name, most in names.items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    os.execv(sys.executable, [sys.executable, "-I", "-"])
    return 1


if __name__ == "__main__":
    if len(sys.argv) == 3:
        sys.exit(enforce(int(sys.argv[1]), json.loads(sys.argv[2])))
    print("holds on this machine:", ", ".join(sorted(contained())) or "none of the promises")
