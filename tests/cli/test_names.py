"""``moetrain COMMAND``: one name for every command."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from moetrain.cli.main import main

ROOT = Path(__file__).parents[2]


def test_commands_are_called_by_name(monkeypatch, capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"moetrain": "moetrain.cli.main:run_script"}
    assert main(["train", "debug", "--dry_run", "--launch.gpus", "1"]) == 0
    assert '"preset": "debug"' in capsys.readouterr().out
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"moetrain {project['version']}\n"
    monkeypatch.setattr("sys.argv", ["moetrain"])
    assert main() == 0
    assert "usage: moetrain COMMAND" in capsys.readouterr().out


def test_the_package_is_the_script(capfd):
    words = [sys.executable, "-m", "moetrain", "version"]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == 0
    assert capfd.readouterr().out.startswith("moetrain ")
    assert subprocess.run([*words[:-1], "trian"], cwd=ROOT, check=False).returncode == 2
    assert capfd.readouterr().err.startswith("error: unknown command 'trian'")


def test_an_unknown_name_is_one_line(capsys):
    assert main(["trian"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: unknown command 'trian'; choose from train, ")


@pytest.mark.tier("long")
def test_ctrl_c_at_the_exit_ends_a_command_without_a_traceback():
    program = """if True:
        import atexit, time
        from moetrain.cli.main import leave
        atexit.register(lambda: (print("leaving", flush=True), time.sleep(60)))
        leave(0)"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdout=pipe, stderr=pipe) as process:
        assert process.stdout.readline() == b"leaving\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, b"")


NAMES = ("train", "rl", "jobs", "checkpoint", "generate", "score", "serve")


@pytest.mark.parametrize(
    "words",
    [["-m", f"moetrain.{name}"] for name in NAMES] + [["rank"], ["script"]],
    ids=str,
)
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(tmp_path, words):
    slow = 'import time\nprint("importing", flush=True)\ntime.sleep(60)\n'
    (tmp_path / "pydantic.py").write_text(slow)
    if words == ["script"]:  # as pip writes it
        script = tmp_path / "moetrain"
        script.write_text("from moetrain.cli.main import run_script\nrun_script()\n")
        words = [str(script), "data"]
    if words == ["rank"]:
        words = ["-m", "moetrain.cli.launch", str(os.getpid()), "-m", "moetrain.train"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    pipe, environ = subprocess.PIPE, os.environ | {"PYTHONPATH": path}
    command = [sys.executable, *words]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environ) as process:
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, b"")


LATE = {  # Ctrl-C arrives during the import of this module, after a command has parsed its options
    "generate": ["PATH", "--prompt", "a"],
    "serve": ["PATH", "--port", "0"],
    "score": ["PATH", "RECORDS"],
    "train": [],
    "rl": [],
}


@pytest.mark.parametrize("name", LATE)
def test_ctrl_c_while_a_command_imports_late_is_not_lost(tmp_path, name):
    late = """if True:
        import time
        print("importing", flush=True)
        try:
            time.sleep(60)
        except KeyboardInterrupt:  # as C code that tries an import does
            print("going on", flush=True)"""
    (tmp_path / "torch.py").write_text(late)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    pipe, command = subprocess.PIPE, [sys.executable, "-m", f"moetrain.{name}", *LATE[name]]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environ) as process:
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=30)
    assert (process.returncode, said, errors) == (130, b"", b"")


def test_ctrl_c_in_a_rank_is_not_lost_where_python_drops_exceptions(tmp_path):
    slow = """if True:
        import time
        class Dying:
            def __del__(self):
                print("importing", flush=True)
                time.sleep(60)
        Dying()
        SafetensorError = OSError
        print("going on", flush=True)"""
    (tmp_path / "safetensors.py").write_text(slow)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    words = ["moetrain.cli.launch", str(os.getpid()), "-m", "moetrain.train"]
    pipe, command = subprocess.PIPE, [sys.executable, "-m", *words]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environ) as process:
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=30)
    assert (process.returncode, said, errors) == (130, b"", b"")
