"""Sources of settings: recipes and TOML files, the environment, the command line; and sections.

Each source becomes a flat mapping of dotted names to values, which :mod:`moetrain.config` merges
and validates. Unknown names are errors here, where the message can name the source. All sections
of settings derive from :class:`Section`.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

ENV_PREFIX = "MOETRAIN_"
_POWER_OF_TEN = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,4}")
_FP32_LEAST, _FP32_MOST = 2.0**-126, 2.0**128


class ConfigError(ValueError):
    """A setting, or data that it names, is wrong; the user sees one line, ``<field>: <problem>``.

    ``field`` is the dotted name of the setting; ``problem`` says what was given, and the remedy.
    """

    def __init__(self, field: str, problem: str) -> None:
        self.field, self.problem = field, problem
        super().__init__(f"{field}: {problem}")


class RunFailed(RuntimeError):
    """A run cannot continue for reasons outside its settings; the user sees the message."""


class Section(BaseModel):
    """A frozen group of settings, without unknown keys, infinities or NaNs."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _whole(cls, value: Any, info: ValidationInfo) -> Any:
        """Read 1e6, which Python and TOML take for a float, as an integer where one is wanted."""
        kinds = get_args(kind := cls.model_fields[info.field_name or ""].annotation) or (kind,)
        if int not in kinds or float in kinds:
            return value
        is_text = isinstance(value, str) and _POWER_OF_TEN.fullmatch(value.strip())
        number = Decimal(value.strip()) if is_text else value
        # Neither NaN nor inf, nor a number of a thousand digits.
        is_small = isinstance(number, float | Decimal) and abs(number) < 2**64
        return int(number) if is_small and number == int(number) else value

    @field_validator("*")
    @classmethod
    def _can_be_used(cls, value: Any) -> Any:
        """Refuse text that cannot be a file's name, and numbers that torch cannot hold."""
        if isinstance(value, str) and not value.strip():
            raise ValueError("is empty; leave it out")
        if isinstance(value, str) and ("\0" in value or _has_surrogates(value)):
            raise ValueError("holds what is not text")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("is beyond 64 bits")
        if isinstance(value, float) and value and not _FP32_LEAST <= abs(value) < _FP32_MOST:
            raise ValueError("is 0 or infinite in fp32, in which weights are updated")
        return value


def _has_surrogates(text: str) -> bool:
    """Return whether ``text`` holds bytes that are not UTF-8, or half a character."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def split_words(value: Any) -> Any:
    """Return the non-empty items of a list, or of text separated by commas, as a tuple."""
    words = value.split(",") if isinstance(value, str) else value
    return tuple(word for word in words if word) if isinstance(words, list) else words


def from_home(value: str | None) -> str | None:
    """Expand ~ in a path: no shell does that in a file or after =."""
    return value and os.path.expanduser(value)


def recipe_names() -> list[str]:
    """Return the names of the recipes shipped with the package."""
    folder = resources.files("moetrain") / "recipes"
    return sorted(f.name[: -len(".toml")] for f in folder.iterdir() if f.name.endswith(".toml"))


def is_recipe(source: object) -> bool:
    """Return whether ``source`` names a recipe shipped with the package."""
    return isinstance(source, str | os.PathLike) and os.fspath(source) in recipe_names()


class Layer(NamedTuple):
    """The settings of one source."""

    origin: str
    """The source, in words for people."""
    values: dict[str, Any]
    """Values by dotted name."""
    is_users: bool = True
    """Whether a user wrote them; a shipped recipe only proposes."""


def read_source(
    source: str | os.PathLike[str] | Mapping[str, Any], settings: Mapping[str, bool]
) -> Layer:
    """Read a recipe, a TOML file (UTF-8, with or without a byte order mark) or a nested mapping.

    Args:
        settings: every dotted name there is, and whether the setting may be unset (``none``).

    Raises:
        ConfigError: the file does not exist, is not TOML, or has an unknown name.
    """
    origin = "mapping" if isinstance(source, Mapping) else os.fspath(source)
    try:
        tree = source if isinstance(source, Mapping) else tomllib.loads(_text_of(origin))
        values = _known(dict(leaves(tree)), settings)
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        problem = "does not exist" if absent else f"cannot be read: {error.strerror}"
        raise ConfigError("config file", f"{shortened(origin)} {problem}") from None
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8: {error.reason} at byte {error.start}"
        raise ConfigError("config file", f"{shortened(origin)} {problem}") from None
    except ConfigError:
        raise
    except ValueError as error:  # tomllib's own, a NUL, Python's for integers of 4,300 digits
        raise ConfigError("config file", f"{shortened(origin)} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError("config file", f"{shortened(origin)} is nested too deeply") from None
    if is_recipe(source):
        return Layer(f"recipe {origin}", values, is_users=False)
    return Layer(origin, values)


def _text_of(name: str) -> str:
    if is_recipe(name):
        return (resources.files("moetrain") / "recipes" / f"{name}.toml").read_text("utf-8")
    if name.endswith(".toml"):
        return Path(name).read_bytes().decode("utf-8-sig")
    near = difflib.get_close_matches(name.lower(), recipe_names(), n=1)
    problem = f"{shortened(name)} is not one of {', '.join(recipe_names())}"
    problem += f" (did you mean {near[0]}?)" if near else ""
    raise ConfigError("recipe", f"{problem}, nor a .toml file")


def _known(flat: dict[str, Any], settings: Mapping[str, bool]) -> dict[str, Any]:
    """Return ``flat`` without empty sections; raises ConfigError for an unknown name."""
    sections = {name.partition(".")[0] for name in settings if "." in name}
    for name, value in flat.items():
        if name in sections and value != {}:
            raise ConfigError(
                name, f"{shortened(value)} is given for a section; put settings under [{name}]"
            )
        if name not in sections and name not in settings:
            raise ConfigError(_cut(name), f"unknown setting{hint(name, settings)}")
    return {name: value for name, value in flat.items() if name in settings}


def read_env(environ: Mapping[str, str], settings: Mapping[str, bool]) -> dict[str, Any]:
    """Turn ``MOETRAIN_A__B=v`` into ``{"a.b": "v"}``; ``settings`` as in :func:`read_source`."""
    known = {_variable(name): name for name in settings}
    values = {}
    for variable, text in environ.items():
        if variable.upper().startswith(ENV_PREFIX):
            if variable.upper() not in known:
                words = variable[len(ENV_PREFIX) :].replace("__", ".")
                raise ConfigError(variable, f"unknown setting{hint(words, settings, _variable)}")
            name = known[variable.upper()]
            _check_once(name, values, text, "in the environment")
            values[name] = _value(text, settings[name])
    return values


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper().replace(".", "__")


def _check_once(name: str, values: Mapping[str, str | None], text: str, where: str) -> None:
    if name in values:
        before = shortened(values[name])
        problem = f"given twice {where}, as {before} and {shortened(text)}; leave one out"
        raise ConfigError(name, problem)


def read_cli(
    words: Sequence[str], settings: Mapping[str, bool], *, once: bool = False
) -> dict[str, Any]:
    """Turn ``--a.b v``, ``--a.b=v`` or ``a.b=v`` into ``{"a.b": "v"}``.

    Args:
        settings: as in :func:`read_source`.
        once: refuse a setting that comes twice; else its last value counts.
    """
    values, rest = {}, list(words)
    while rest:
        word = rest.pop(0)
        key, has_value, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") and not has_value:
            is_source = is_recipe(word) or word.endswith(".toml")
            raise ConfigError(
                shortened(word),
                "is a recipe or file, of which a run takes one, as its first word; leave the rest "
                "out, or put what they set into one file"
                if is_source
                else "is not a setting; write --section.key value (a recipe or file comes first)",
            )
        if key not in settings:
            spelt = "--{}".format if word.startswith("--") else str
            near = hint(key, [*settings, "dry_run", "help", "version"], spelt)
            raise ConfigError(_cut(key or word), f"unknown setting{near}")
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(key, f"has no value on the command line; write --{key} VALUE")
            text = rest.pop(0)
        if once:
            _check_once(key, values, text, "on the command line")
        values[key] = _value(text, settings[key])
    return values


def _value(text: str, may_be_unset: bool) -> str | None:
    return None if may_be_unset and text.lower() in ("none", "null") else text


def merge(
    layers: Sequence[Layer], alternatives: Iterable[tuple[str, str]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge layers, weakest first; returns the values, and where each comes from.

    Of two alternatives one is set: the user's replaces a recipe's or a default. ``None`` means not
    set.

    Raises:
        ConfigError: the user has set both of two alternatives.
    """
    values, origins, is_users = {}, {}, {}
    for layer in layers:
        values |= layer.values
        origins |= dict.fromkeys(layer.values, layer.origin)
        is_users |= dict.fromkeys(layer.values, layer.is_users)
    for pair in alternatives:
        given = [name for name in pair if values.get(name) is not None]
        if len(given) == 2 and is_users[pair[0]] == is_users[pair[1]]:
            one, other = pair
            raise ConfigError(
                one,
                f"{shortened(values[one])} ({origins[one]}) contradicts {other} "
                f"{shortened(values[other])} ({origins[other]}); set one of them",
            )
        if given:
            kept = max(given, key=lambda name: is_users[name])
            dropped = pair[1] if kept == pair[0] else pair[0]
            values[dropped], origins[dropped] = None, f"as {kept} is set"
    return values, origins


# Names that other trainers use.
_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "warmup_ratio": "optim.warmup_fraction",
    "lr_scheduler_type": "optim.schedule",
    "batch_size": "train.global_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "max_steps": "train.steps",
    "bf16": "train.dtype",
    "model_name_or_path": "model.path",
    "dataset": "data.path",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "block_size": "data.seq_len",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep",
    "logging_steps": "log.interval",
    "output": "output_dir",
    "nproc_per_node": "launch.nproc",
    "gpus": "launch.nproc",
    "num_gpus": "launch.nproc",
    "r": "lora.rank",
    "lora_r": "lora.rank",
}
_NEAR = 0.75  # a misspelling; at difflib's own 0.6 unrelated names are near one another


def hint(key: str, known: Iterable[str], spelt: Callable[[str], str] = str) -> str:
    """Return the end of an "unknown setting" message: the names that may have been meant.

    A name is near if it is the same key in another section, differs only in separators, or differs
    in a letter or two. ``spelt`` writes a name as its source does.
    """
    near = _nearest(key.lower().replace("-", "_"), list(known))
    if not near:
        return "; --help lists them all"
    return f"; did you mean {' or '.join(map(spelt, near))}?"


def _nearest(key: str, known: list[str]) -> list[str]:
    alike = [name for name in known if _letters(name) == _letters(key)]
    section, _, last = key.rpartition(".")
    if alike or last in _ELSEWHERE:
        return alike or [_ELSEWHERE[last]]

    def keyed(names: list[str]) -> list[str]:
        keys = [name.rpartition(".")[2] for name in names]
        best = [last] if last in keys else difflib.get_close_matches(last, keys, 1, _NEAR)
        return [name for name, own in zip(names, keys, strict=True) if own in best]

    sections = {name.partition(".")[0] for name in known if "." in name}
    meant = difflib.get_close_matches(section, sections, 1, _NEAR)
    inside = keyed([name for name in known if name.partition(".")[0] in meant])
    return inside or keyed(known)


def _letters(name: str) -> str:
    return re.sub(r"[._]", "", name)


def shortened(value: Any) -> str:
    """Return ``repr(value)``, short enough for a line that a person reads."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        text = f"a number of {value.bit_length()} bits"
    except RecursionError:
        text = "a deeply nested value"
    return _cut(text)


def _cut(text: str, longest: int = 200) -> str:
    return text if len(text) <= longest else f"{text[: longest - 40]}...{text[-20:]}"


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of a nested mapping; a dotted key counts as nested."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that differs between two runs' nested values."""
    before = dict(leaves(then))
    for key, value in leaves(now):
        if before.get(key) != value:
            yield f"{key} {before.get(key)!r} -> {value!r}"


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Group settings by section: ``{"a.b": 1, "c": 2}`` becomes ``{"a": {"b": 1}, "c": 2}``."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, key = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = value
    return tree
