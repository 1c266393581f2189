"""``moetrain COMMAND``: one name for every command."""

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
