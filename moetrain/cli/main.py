"""``moetrain COMMAND``: every command under one name, and what completes them in a shell.

``moetrain train`` is ``python -m moetrain.train``, and so are the others. Completion reads what
each command's ``--help`` prints, so that there is no second list of settings.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib import import_module
from io import StringIO
from typing import Any

from moetrain.cli.command import run_command, version
from moetrain.config import ConfigError

_COMMANDS = {
    "train": ("moetrain.cli.train:main", "pretrain or fine-tune a model"),
    "rl": ("moetrain.cli.train:run_rl", "train a model by reinforcement learning"),
    "jobs": ("moetrain.cli.train:run_jobs", "serve training jobs over HTTP"),
    "generate": ("moetrain.cli.generate:main", "continue a text with a checkpoint"),
    "serve": ("moetrain.cli.serve:main", "serve a checkpoint over HTTP in OpenAI's protocol"),
    "checkpoint": ("moetrain.cli.checkpoint:main", "inspect, verify, convert or compare"),
    "data": ("moetrain.cli.data:main", "show what would be trained on"),
    "report": ("moetrain.cli.report:main", "write the page of a run, report.html"),
    "bench": ("moetrain.cli.bench:main", "time training steps"),
    "plan": ("moetrain.cli.plan:main", "list layouts that fit, and how fast they would be"),
}
"""Each command's ``MODULE:FUNCTION``, imported when it is called, and what it does."""
_SHELLS = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n", "fish": ""}
"""What a shell's script begins with; zsh takes that of bash."""


def _run(argv: Sequence[str] | None) -> int | None:
    name, *words = sys.argv[1:] if argv is None else argv or [""]
    match name:
        case "completion":
            _complete(words)
        case "version" | "--version":
            print(version())
        case "" | "help" | "--help" | "-h":
            print(_usage())
        case _ if name in _COMMANDS:
            return _find(name)(words)
        case _:
            problem = f"{name!r} is none; use {', '.join(_COMMANDS)}, completion or version"
            raise ConfigError("command", problem)
    return None


main = partial(run_command, _run)


def _find(name: str) -> Any:
    module, _, function = _COMMANDS[name][0].partition(":")
    return getattr(import_module(module), function)


def _meanings() -> dict[str, str]:
    others = {
        "completion": f"print a script for a shell: {', '.join(_SHELLS)}",
        "version": "print the version",
    }
    return {name: meaning for name, (_, meaning) in _COMMANDS.items()} | others


def _usage() -> str:
    lines = [f"  {name:12}{meaning}" for name, meaning in _meanings().items()]
    head = "usage: moetrain COMMAND ...; moetrain COMMAND --help says what it takes"
    return "\n".join([head, "", *lines])


def _complete(words: Sequence[str]) -> None:
    """Print the script that completes commands, settings and their values, else files."""
    shell = " ".join(words)
    if shell not in _SHELLS:
        raise ConfigError("completion", f"{shell!r} is no shell known here: {', '.join(_SHELLS)}")
    options = {name: _options(name) for name in _COMMANDS}
    options["completion"] = {"": list(_SHELLS)}
    print(_SHELLS[shell] + (_fish(options) if shell == "fish" else _bash(options)))


def _options(name: str) -> dict[str, list[str]]:
    """Return a command's options and the values that each takes, and under "" its first words."""
    printed = StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        _find(name)(["--help"])
    text = printed.getvalue()
    first = re.search(r"^(?:recipes: (.*)|  \{(.*)\})$", text, re.MULTILINE)
    options = {"": re.findall(r"[\w.-]+", (first[1] or first[2]) if first else "")}
    for option, rest in re.findall(r"^  (?:-\w, )?--([\w.]+)(.*)", text, re.MULTILINE):
        kind = rest.partition(", default")[0]  # (Literal['a', 'b'], default: ...), or {a,b}
        braces = re.match(r" \{(.*)\}", kind)
        options[option] = braces[1].split(",") if braces else re.findall(r"'([^']+)'", kind)
    return options


def _bash(options: dict[str, dict[str, list[str]]]) -> str:
    lines = [
        "_moetrain() {",
        "  local words word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}",
        "  case ${COMP_CWORD}-${COMP_WORDS[1]}-$before in",
        f"    1-*) words='{' '.join(_meanings())}' ;;",
    ]
    for name, of_name in options.items():
        for option, values in of_name.items():
            if option and values:
                lines.append(f"    *-{name}---{option}) words='{' '.join(values)}' ;;")
        words = [*of_name[""], *(f"--{option}" for option in of_name if option)]
        lines.append(f"    *-{name}-*) words='{' '.join(words)}' ;;")
    reply = '  COMPREPLY=($(compgen -W "$words" -- "$word"))'
    return "\n".join([*lines, "  esac", reply, "}", "complete -o default -F _moetrain moetrain"])


def _fish(options: dict[str, dict[str, list[str]]]) -> str:
    lines = [
        f"complete -c moetrain -n __fish_use_subcommand -f -a {name} -d {meaning!r}"
        for name, meaning in _meanings().items()
    ]
    for name, of_name in options.items():
        seen = f"complete -c moetrain -n '__fish_seen_subcommand_from {name}'"
        for option, values in of_name.items():
            words = f" -x -a '{' '.join(values)}'" if values else ""
            lines.append(f"{seen} -l {option}{words}" if option else seen + words)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
