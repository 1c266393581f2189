"""``moetrain COMMAND``: one name for every command, and what completes it in a shell."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from moetrain.cli.main import main

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A file with what ``moetrain completion bash`` prints."""
    path = tmp_path_factory.mktemp("completion") / "moetrain.bash"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


def completed(script, *words):
    """What bash offers for the last of ``words``."""
    line = " ".join(f"'{word}'" for word in words)
    program = (
        f"source {script}; COMP_WORDS=(moetrain {line}); COMP_CWORD={len(words)}; _moetrain; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True).stdout.split()


def test_bash_completes_commands_settings_and_values(script):
    assert completed(script, "ch") == ["checkpoint"]
    assert {"train", "rl", "jobs", "serve", "completion", "version"} <= {*completed(script, "")}
    assert completed(script, "train", "--parallel.pp_sch") == ["--parallel.pp_schedule"]
    assert completed(script, "train", "--parallel.pp_schedule", "1f") == ["1f1b"]
    assert completed(script, "train", "qwen3-30b-a3b-") == ["qwen3-30b-a3b-24l"]
    assert completed(script, "serve", "x", "--auth", "") == ["auto", "token", "none"]
    assert completed(script, "checkpoint", "ver") == ["verify"]
    assert completed(script, "launch", "sl") == ["slurm"]
    assert completed(script, "completion", "z") == ["zsh"]
    assert completed(script, "generate", "outpu") == []  # a file, which bash then looks for itself


def test_other_shells_have_the_same_words(script, capsys):
    assert main(["completion", "zsh"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert "bashcompinit" in first
    assert rest == script.read_text().splitlines()
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("complete -c moetrain -n ") for line in lines)
    seen = "'__fish_seen_subcommand_from train' -l parallel.pp_schedule -x -a 'gpipe 1f1b"
    assert any(seen in line for line in lines)


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


@pytest.mark.parametrize(
    ("words", "problem"),
    [(["trian"], "command: 'trian' is none; use train, "), (["completion", "csh"], "'csh'")],
)
def test_an_unknown_name_is_one_line(words, problem, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert problem in line
