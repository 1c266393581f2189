"""``moetrain COMMAND``: one name for every command."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

from moetrain.cli.main import main

ROOT = Path(__file__).parent.parent


def test_commands_are_called_by_name(monkeypatch, capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"moetrain": "moetrain.cli.main:main"}
    assert main(["train", "debug", "--dry_run", "--launch.gpus", "1"]) == 0
    assert '"preset": "debug"' in capsys.readouterr().out
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"moetrain {project['version']}\n"
    monkeypatch.setattr("sys.argv", ["moetrain"])
    assert main() == 0
    assert "usage: moetrain COMMAND" in capsys.readouterr().out


def test_an_unknown_name_is_one_line(capsys):
    assert main(["trian"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: command: 'trian' is none; use train, ")


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
