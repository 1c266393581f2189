"""Where settings come from: recipes and TOML files, the environment, the command line.

Each source becomes a flat mapping of dotted names to values; :mod:`moetrain.config` merges them and
gives them types. Unknown names are errors here already, where the message can name the source.

A launcher's variables are read here too: they are no settings, but say where this process stands.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

ENV_PREFIX = "MOETRAIN_"


class ConfigError(ValueError):
    """A setting or its data is wrong; the one line a user sees is ``<field>: <problem>``.

    ``field`` is the dotted name of the setting, ``problem`` says what was given and the remedy.
    """

    def __init__(self, field: str, problem: str) -> None:
        self.field, self.problem = field, problem
        super().__init__(f"{field}: {problem}")


class RunFailed(RuntimeError):
    """A run cannot go on, for reasons outside its settings; the message is the one line of it."""


def recipe_names() -> list[str]:
    """Names of the recipes shipped with the package."""
    folder = resources.files("moetrain") / "recipes"
    return sorted(f.name[: -len(".toml")] for f in folder.iterdir() if f.name.endswith(".toml"))


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the nested values of a recipe, a TOML file or a mapping."""
    if isinstance(source, Mapping):
        return "mapping", dict(source)
    name = os.fspath(source)
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError("config file", f"{name!r} does not exist")
        text, origin = path.read_text(encoding="utf-8"), name
    elif name in recipe_names():
        text = (resources.files("moetrain") / "recipes" / f"{name}.toml").read_text("utf-8")
        origin = f"recipe {name}"
    else:
        raise ConfigError(
            "recipe", f"{name!r} is not one of {', '.join(recipe_names())}, nor a .toml file"
        )
    try:
        return origin, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config file", f"{name!r} is not TOML: {error}") from None


def read_env(environ: Mapping[str, str], settings: Mapping[str, bool]) -> dict[str, Any]:
    """``MOETRAIN_A__B=v`` to ``{"a.b": "v"}``.

    ``settings``: every dotted name there is, and whether it may be unset (``none``).
    """
    known = {ENV_PREFIX + name.upper().replace(".", "__"): name for name in settings}
    values = {}
    for variable, text in environ.items():
        if variable.upper().startswith(ENV_PREFIX):
            if variable.upper() not in known:
                raise ConfigError(variable, f"unknown setting{hint(variable.upper(), known)}")
            name = known[variable.upper()]
            values[name] = _value(text, settings[name])
    return values


def read_cli(words: Sequence[str], settings: Mapping[str, bool]) -> dict[str, Any]:
    """``--a.b v``, ``--a.b=v`` or ``a.b=v`` to ``{"a.b": "v"}``; ``settings`` as in read_env."""
    values, rest = {}, list(words)
    while rest:
        word = rest.pop(0)
        key, has_value, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") and not has_value:
            raise ConfigError(word, "is not a setting; write --section.key value")
        if key not in settings:
            raise ConfigError(key, f"unknown setting{hint(key, settings)}")
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(key, "has no value on the command line")
            text = rest.pop(0)
        values[key] = _value(text, settings[key])
    return values


def _value(text: str, may_be_unset: bool) -> str | None:
    return None if may_be_unset and text.lower() in ("none", "null") else text


def hint(key: str, known: Iterable[str]) -> str:
    """The end of an "unknown setting" message: the nearest name there is."""
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "; --help lists them all"


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a nested mapping; a dotted key counts as nested."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """One line for each setting that differs between two runs' nested values."""
    before = dict(leaves(then))
    for key, value in leaves(now):
        if before.get(key) != value:
            yield f"{key} {before.get(key)!r} -> {value!r}"


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of :func:`leaves`."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, key = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(section, f"is a section and cannot be {node!r}")
        node[key] = value
    return tree


class Place(NamedTuple):
    """A process's place among those that were started together."""

    rank: int
    local_rank: int
    """Rank among the processes of this machine."""
    world_size: int
    address: str
    """``host:port`` where the ranks meet."""
    error_file: str | None
    """What torch's launchers call this rank's report, ``FOLDER/RANK/error.json``; None: others."""
    on_machine: int | None
    """Processes of this machine; None: the launcher does not say."""
    store_is_served: bool = False
    """Whether the launcher serves the store at ``address``; else rank 0 does."""


SLURM_PORTS = range(20000, 30000)  # below the ports that Linux gives to outgoing connections


def read_place(variables: Mapping[str, str]) -> Place | None:
    """What torchrun's or else srun's variables say; None: this process was started alone.

    Raises:
        ConfigError: one of the launcher's variables is missing or no number.
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        host, port = _text(variables, "MASTER_ADDR"), _number(variables, "MASTER_PORT")
    # Of a step, which srun starts: a batch script's own process has a SLURM_PROCID too, and nobody
    # to meet, as a step of one task has not.
    elif variables.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
        host = variables.get("MASTER_ADDR") or _first_slurm_host(variables)
        if "MASTER_PORT" in variables:
            port = _number(variables, "MASTER_PORT")
        else:  # jobs that share a machine need ports of their own
            port = SLURM_PORTS[_number(variables, "SLURM_JOB_ID") % len(SLURM_PORTS)]
    else:
        return None
    rank, local_rank, world_size = (_number(variables, name) for name in names)
    error_file = variables.get("TORCHELASTIC_ERROR_FILE")
    on_machine = _number(variables, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in variables else None
    for name, value, of, count in (
        (names[0], rank, names[2], world_size),
        (names[1], local_rank, "LOCAL_WORLD_SIZE", on_machine),
    ):
        if count is not None and value >= count:
            raise ConfigError(name, f"{value} contradicts {of} {count}: give 0 to {count - 1}")
    is_served = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(rank, local_rank, world_size, f"{host}:{port}", error_file, on_machine, is_served)


def _first_slurm_host(variables: Mapping[str, str]) -> str:
    """Where rank 0 is: ``gpu[07-10,12]-ib,x3`` begins with ``gpu07-ib``."""
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST", "")
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        return _text(variables, "SLURM_LAUNCH_NODE_IPADDR")
    return "".join(part or "" for part in match.groups())


def _text(variables: Mapping[str, str], name: str) -> str:
    if not variables.get(name):
        raise ConfigError(name, "not set, though other variables of the launcher are; set it")
    return variables[name]


def _number(variables: Mapping[str, str], name: str) -> int:
    text = _text(variables, name)
    if not text.isdecimal():
        raise ConfigError(name, f"{text!r} is not a number")
    return int(text)
