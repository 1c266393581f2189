"""Forked commands behave as in a fresh interpreter."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.lib import forked_python

FACTS = """
import json, os, signal, sys, threading
import moetrain.cli  # so that it is forked
print(json.dumps({
    "argv": sys.argv, "orig": sys.orig_argv[1:], "path": sys.path[:2], "name": __name__,
    "module": sys.modules["__main__"].__dict__ is globals(), "parent": os.getppid(),
    "folder": os.getcwd(), "session": os.getsid(0) == os.getpid(),
    "files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(),
    "mine": os.environ.get("MINE"), "variables": sorted(os.environ), "said": sys.stdin.read(),
    "signals": [signal.getsignal(n) is signal.SIG_DFL for n in (15, 10)],
    "ctrl_c": signal.getsignal(2) is signal.default_int_handler,
}))
"""
# These are not the program's own, or only a fresh interpreter has them.
FRESH = {"PYTHONHASHSEED": "0"}


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Count the forked processes."""
    if not forked_python.is_installed():
        pytest.skip("nothing is forked where there is a GPU")
    forked = []
    there = forked_python._forked_there
    monkeypatch.setattr(
        forked_python, "_forked_there", lambda *args: forked.append(there(*args)) or forked[-1]
    )
    return forked


def facts(words, tmp_path, **more):
    environment = {**os.environ, "MINE": "a b", **more}
    asked = {"env": environment, "cwd": tmp_path, "input": "spoken", "start_new_session": True}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, **asked)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    found["variables"] = [name for name in found["variables"] if name not in FRESH]
    return found


@pytest.mark.parametrize("kind", ["text", "file"])
def test_a_forked_program_sees_what_a_fresh_interpreters_does(kind, tmp_path, counted):
    (tmp_path / "facts.py").write_text(FACTS)
    words = ["-c", FACTS] if kind == "text" else [str(tmp_path / "facts.py")]
    forked = facts([*words, "one word", "--two"], tmp_path)
    assert len(counted) == 1
    assert forked == facts([*words, "one word", "--two"], tmp_path, **FRESH)
    assert len(counted) == 1


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("sys.exit(7)", 7),
        ("sys.exit('a reason')", 1),
        ("pass", 0),
        ("raise ValueError('x')", 1),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import atexit; atexit.register(print, 'at the end')", 0),
        ("threading.Thread(target=lambda: (time.sleep(0.1), print('a thread'))).start()", 0),
    ],
)
def test_a_forked_program_ends_as_a_fresh_interpreters_does(program, code, counted):
    text = f"import moetrain.cli, os, sys, threading, time\n\n\ndef f():\n    {program}\n\n\nf()"
    ends = []
    for more in ({}, FRESH):
        words = [sys.executable, "-c", text]
        done = subprocess.run(words, env=os.environ | more, capture_output=True, text=True)
        ends.append((done.returncode, done.stdout, done.stderr))
    assert len(counted) == 1
    assert ends[0] == ends[1]
    assert ends[0][0] == code


def test_a_forked_program_gets_signals_and_is_waited_for():
    text = "import moetrain.cli, time\nprint('ready', flush=True)\ntime.sleep(600)"
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        words = [sys.executable, "-c", text]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            assert process.poll() is None
            process.send_signal(number)
            assert process.wait(60) == -number


def test_children_of_a_forked_program_are_forked(tmp_path):
    inner = "import moetrain.cli, os; print(os.getppid(), os.environ['MINE'])"
    outer = (
        "import moetrain.cli, os, subprocess, sys; from tests.lib import forked_python;"
        "print(os.getpid(), forked_python._is_forked, flush=True);"
        f"subprocess.run([sys.executable, '-c', {inner!r}], env=os.environ | {{'MINE': '5'}})"
    )
    done = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True)
    assert done.stderr == ""
    (pid, is_forked), (parent, mine) = map(str.split, done.stdout.splitlines())
    assert (is_forked, parent, mine) == ("True", pid, "5")


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["-c", "print(1)"], {}),
        (["-m", "moetrain.train", "--help"], {}),
        (["-m", "moetrain.cli.main", "version"], {"OMP_NUM_THREADS": "2"}),
        (["-c", "import moetrain.cli"], {"PYTHONHASHSEED": "1"}),
    ],
)
def test_programs_that_need_a_fresh_interpreter_get_one(words, more, counted):
    subprocess.run([sys.executable, *words], env=os.environ | more, capture_output=True, check=True)
    assert counted == []


@pytest.mark.parametrize(("name", "is_forked"), [("pydantic", 0), ("code", 0), ("mine", 1)])
def test_a_module_that_hides_an_imported_one_is_imported(name, is_forked, counted, tmp_path):
    (tmp_path / f"{name}.py").write_text("print('mine', flush=True)")
    words = [sys.executable, "-c", f"import moetrain.cli, {name}"]
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert (done.stdout[:5], len(counted)) == ("mine\n", is_forked)


def test_variables_that_torch_sets_on_its_way_change_nothing(counted, tmp_path):
    """Forking continues after a worker has compiled something, which sets variables."""
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    words = [sys.executable, "-c", "import moetrain.cli"]
    subprocess.run(words, env=os.environ | own, check=True)
    assert len(counted) == 1
