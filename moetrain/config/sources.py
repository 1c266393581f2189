"""The sources of settings: recipes and TOML files, the environment, the command line.

Each source becomes a layer of values by dotted name. :class:`Reader` reads the layers of a run,
puts a recipe under them if the user named none, and merges them. Unknown names are errors here,
where the message can name the source. The sections say which values are valid.
"""

import codecs
import difflib
import glob
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Generic, Literal, NamedTuple, TypeGuard, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from moetrain.config.elsewhere import settings_named


class ConfigError(ValueError):
    """A setting, or data that it names, is wrong; the user sees one line, ``<field>: <problem>``.

    ``field`` is the dotted name of the setting; ``problem`` says what was given, and the remedy.
    """

    def __init__(self, field: str, problem: str) -> None:
        self.field = redacted(field)
        self.problem = redacted(problem)
        super().__init__(f"{self.field}: {self.problem}")


class RunFailed(RuntimeError):
    """A run cannot continue for reasons outside its settings; the user sees the message."""

    def __init__(self, problem: object = "") -> None:
        super().__init__(redacted(str(problem)))


class RankLost(RunFailed):
    """Another rank has ended. It, or its launcher, says why; this rank only follows."""


class Recipes(Enum):
    """The recipes that a command starts from if the user names none."""

    TRAIN = "debug", "continue", "sft", "pretrain"
    RL = "rl-sort", "rl", "rl", "rl"
    JOBS = "jobs-debug", "jobs", "jobs", "jobs"

    def __init__(self, default: str, of_path: str, of_chats: str, of_preset: str) -> None:
        """Name the recipes.

        Args:
            default: the recipe if ``model.path`` is unset.
            of_path: the recipe if ``model.path`` is set.
            of_chats: the recipe if ``model.path`` is set and the data are records.
            of_preset: the recipe if the user names a preset where a recipe may stand.
        """
        self.default = default
        self.of_path = of_path
        self.of_chats = of_chats
        self.of_preset = of_preset


class Unused(NamedTuple):
    """Settings that a command does not use."""

    command: str
    """The command is ``python -m moetrain.COMMAND``."""
    beginnings: tuple[str, ...]
    """Beginnings of the dotted names of these settings."""
    recipe: str
    """The command's own recipe."""

    def check(self, origins: Mapping[str, str]) -> None:
        """Raise ConfigError if ``origins``, the sources of settings, has an unused setting."""
        for name, origin in origins.items():
            if not name.startswith(self.beginnings):
                continue
            if origin.startswith(Reader.PROPOSED):
                command = f"python -m moetrain.{self.command}"
                problem = f"{origin.split()[1]!r} sets {name}, which {command} does not use"
                remedy = f"give a recipe for this command, such as {self.recipe}"
                raise ConfigError("recipe", f"{problem}; {remedy}")
            problem = f"set ({origin}), but python -m moetrain.{self.command} does not use it"
            raise ConfigError(name, f"{problem}; leave it out")


_USER = re.compile(r"(?<=://)[^\s/?#]+(?=@)")
_PARAMETER = re.compile(
    r"""(?<=[?&])
    ((?:[a-z0-9.]+[-_.])*
    (?:api_?key|key|token|secret|passw(?:or)?d|pwd|sig|signature|credentials?|auth
    |awsaccesskeyid|googleaccessid|policy)=)
    [^&#\s'"]+""",
    re.IGNORECASE | re.VERBOSE,
)
"""Matches a parameter of a URL that gives access. The parameter is a part of a signed URL (S3,
Google, Azure, CloudFront), or a key under one of its usual names."""

_RECIPES = Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    """Return the names of the recipes shipped with the package."""
    return sorted(path.stem for path in _RECIPES.glob("*.toml"))


def _is_recipe(source: object) -> bool:
    return isinstance(source, str | os.PathLike) and os.fspath(source) in recipe_names()


_Layers = Mapping[str, Mapping[str, object]]
"""Layers of settings, weakest first. A key is the origin of a layer in words, and its value holds
the settings of the layer by dotted name."""

# Only one setting of a pair is set. The user's setting replaces a recipe's or a default.
_ALTERNATIVES = (
    ("model.path", "model.preset"),
    ("data.mix", "data.path"),
    ("train.epochs", "train.steps"),
    ("optim.warmup_fraction", "optim.warmup_steps"),
)
_PREFIX = "MOETRAIN_"
IMPORTS = "MOETRAIN_IMPORT"
"""The variable with the files of ``--import``, separated as those of PATH. It is no setting."""
_C = TypeVar("_C", bound=BaseModel)


class Reader(Generic[_C]):
    """Reads settings for a config class. Each field of the class is a section or a setting."""

    PROPOSED = "recipe "
    """An origin that begins with this text is a recipe."""
    DERIVED = "as "
    """An origin that begins with this text is what other settings say: nobody gave the value. All
    other origins are a user's."""

    def __init__(self, config: type[_C]) -> None:
        self._config = config
        self._may_be_unset: dict[str, bool] = {}  # by dotted name
        for name, field in config.model_fields.items():
            inner = {"": field}
            if isinstance(field.default, BaseModel):
                inner = type(field.default).model_fields
            for key, setting in inner.items():
                may = type(None) in get_args(setting.annotation)
                self._may_be_unset[f"{name}.{key}".rstrip(".")] = may
        self._sections = {name.partition(".")[0] for name in self._may_be_unset if "." in name}

    def read(
        self,
        source: str | os.PathLike[str] | Mapping[str, object] | None,
        overrides: Sequence[str],
        environ: Mapping[str, str],
        recipes: Recipes,
        *,
        once: bool,
    ) -> tuple[_C, dict[str, str], str]:
        """Read the arguments of ``Config.load``. Raises ConfigError as ``Config.load`` does.

        Returns:
            The config, the origin of each setting, and a line that names the recipe under them.
        """
        layers: _Layers = {
            **({} if source is None else self._of_source(source)),
            "environment": self._typed(self._of_environment(environ)),
            "command line": self._typed(self._of_words(overrides, once)),
        }
        recipe, why = _recipe_under(layers, source, recipes)
        if recipe is not None:
            layers = {**self._of_source(recipe), **layers}
        if recipes.of_path != recipes.of_chats:
            layers = {**layers, **_source_of_path(layers)}
        values, origins = _merged(layers)
        return self.build(values), origins, why

    def build(self, values: Mapping[str, object], *, strict: bool = True) -> _C:
        """Make a config of ``values`` by dotted name.

        If ``strict`` is True, values must have exactly the right types. Otherwise they may be
        texts.

        Raises ConfigError: a value has a wrong type, or its setting does not take it.
        """
        tree: dict[str, Any] = {}
        for name, value in values.items():
            section, _, key = name.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[key] = value
        try:
            return self._config.model_validate(tree, strict=strict)
        except ValidationError as error:
            raise self._told(error) from None

    def _typed(self, texts: Mapping[str, object]) -> dict[str, object]:
        return dict(leaves(self.build(texts, strict=False).model_dump(exclude_unset=True)))

    def _told(self, error: ValidationError) -> ConfigError:
        """Turn pydantic's first error into one line. Errors of a union's branches are joined."""
        named = [(".".join(map(str, each["loc"])), each) for each in error.errors()]
        (name, first), *_ = named
        field = next((k for k in self._may_be_unset if f"{name}.".startswith(f"{k}.")), name)
        own = (each["msg"] for name, each in named if name.startswith(field))
        first_way, *others = dict.fromkeys(map(_remedy, own))
        ways = " or ".join([first_way, *(way.removeprefix("give ") for way in others)])
        return ConfigError(field, f"{shortened(first['input'])}: {ways}")

    def _of_source(self, source: str | os.PathLike[str] | Mapping[str, object]) -> _Layers:
        """Read a recipe, a TOML file (UTF-8, perhaps with a byte order mark) or a mapping."""
        origin = "mapping" if isinstance(source, Mapping) else os.fspath(source)
        try:
            tree = source if isinstance(source, Mapping) else tomllib.loads(_text_of(origin))
            values = self._known(dict(leaves(tree)))
            return {f"{self.PROPOSED * _is_recipe(source)}{origin}": values}
        except ConfigError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            problem = f"{shortened(origin)} cannot be read as TOML: {error}"
            raise ConfigError("config file", problem) from None

    def _known(self, flat: dict[str, object]) -> dict[str, object]:
        """Return ``flat`` without empty sections."""
        for name, value in flat.items():
            if name in self._sections and value != {}:
                problem = f"is given, but {name} is a section; put settings under [{name}]"
                raise ConfigError(name, f"{shortened(value)} {problem}")
            if name not in self._sections and name not in self._may_be_unset:
                raise ConfigError(_cut(name), f"unknown setting{self._hint(name)}")
        return {name: value for name, value in flat.items() if name in self._may_be_unset}

    def _of_environment(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        """Turn ``MOETRAIN_A__B=v`` into ``{"a.b": "v"}``."""
        known = {_variable(name): name for name in self._may_be_unset}
        values: dict[str, str | None] = {}
        for variable, text in environ.items():
            if not variable.upper().startswith(_PREFIX) or variable == IMPORTS:
                continue
            name = known.get(variable.upper())
            if name is None:
                words = variable[len(_PREFIX) :].replace("__", ".")
                raise ConfigError(variable, f"unknown setting{self._hint(words, _variable)}")
            _check_once(name, values, text, "in the environment")
            values[name] = self._value(name, text)
        return values

    def _of_words(self, words: Sequence[str], once: bool) -> dict[str, str | None]:
        """Turn ``--a.b v``, ``--a.b=v`` or ``a.b=v`` into ``{"a.b": "v"}``."""
        values: dict[str, str | None] = {}
        rest = list(words)
        while rest:
            word = rest.pop(0)
            key, has_value, text = word.removeprefix("--").partition("=")
            if not word.startswith("--") and not has_value:
                problem = (
                    "is not a setting: write --section.key value, and a recipe or file only as"
                )
                raise ConfigError(shortened(word), f"{problem} the first word")
            if key not in self._may_be_unset:
                spelt = "--{}".format if word.startswith("--") else str
                near = self._hint(key, spelt, ("dry_run", "help", "version"))
                raise ConfigError(_cut(key or word), f"unknown setting{near}")
            if not has_value:
                if not rest or rest[0].startswith("--"):
                    problem = f"has no value on the command line; write --{key} VALUE"
                    raise ConfigError(key, problem)
                text = rest.pop(0)
            if once:
                _check_once(key, values, text, "on the command line")
            values[key] = self._value(key, text)
        return values

    def _value(self, name: str, text: str) -> str | None:
        is_unset = self._may_be_unset[name] and text.lower() in ("none", "null")
        return None if is_unset else text

    def _hint(self, key: str, spelt: Callable[[str], str] = str, others: Sequence[str] = ()) -> str:
        """Return the end of an "unknown setting" message: the names that the user may mean.

        ``spelt`` writes a name as its source does. ``others`` are known names that are not
        settings.
        """
        near = self._nearest(key.lower().replace("-", "_"), [*self._may_be_unset, *others])
        if not near:
            return "; --help lists them all"
        return f"; did you mean {' or '.join(map(spelt, near))}?"

    def _nearest(self, key: str, known: list[str]) -> list[str]:
        """List the names of ``known`` that ``key`` may mean.

        A name has the same letters with other separators, or ``key`` is another trainer's name for
        it, or the last parts are the same or differ in few letters.
        """
        last, letters = key.rpartition(".")[2], key.translate(_SEPARATORS)
        alike = [name for name in known if name.translate(_SEPARATORS) == letters]
        if alike := alike or [name for name in settings_named(last) if name in known]:
            return alike
        keys = [name.rpartition(".")[2] for name in known]
        best = [last] if last in keys else difflib.get_close_matches(last, keys, 1, _NEAR)
        found = [name for name, own in zip(known, keys, strict=True) if own in best]
        return ("." in key and difflib.get_close_matches(key, found, 1, _NEAR)) or found


def _text_of(name: str) -> str:
    if _is_recipe(name):
        return (_RECIPES / f"{name}.toml").read_text("utf-8")
    if name.endswith(".toml"):
        return Path(name).read_bytes().decode("utf-8-sig")
    problem = f"{shortened(name)} is not one of {', '.join(recipe_names())}, nor a .toml file"
    raise ConfigError("recipe", problem)


def _variable(name: str) -> str:
    return _PREFIX + name.upper().replace(".", "__")


def _check_once(name: str, values: Mapping[str, str | None], text: str, where: str) -> None:
    if name in values:
        both = f"as {shortened(values[name])} and {shortened(text)}"
        raise ConfigError(name, f"given twice {where}, {both}; leave one out")


def _flat(layers: _Layers) -> dict[str, object]:
    """Return the settings of all layers, by dotted name; later layers win."""
    return {name: value for values in layers.values() for name, value in values.items()}


def _recipe_under(layers: _Layers, source: object, recipes: Recipes) -> tuple[str | None, str]:
    """Return the recipe to put under ``layers``, or None, and a line that names the recipe."""
    if _is_recipe(source):
        return None, f"  recipe {source}"
    values = _flat(layers)
    recipe, why = recipes.of_path, "model.path is set"
    if values.get("model.path") is None:
        if source is not None:
            return None, ""
        recipe, why = recipes.default, "neither a recipe nor model.path is named"
    elif recipes.of_path == recipes.of_chats:
        why += " and no recipe is named"
    else:
        path, kind = values.get("data.path"), values.get("data.source")
        kind = kind or (path and source_by_suffix(path)) or _kind_of_mix(values.get("data.mix"))
        recipe = recipes.of_chats if kind in ("records", "jsonl") else recipes.of_path
        why += f", the data is {kind} and no recipe is named"
    return recipe, f"  recipe {recipe}, as {why}"


def _kind_of_mix(mix: Any) -> str | None:
    """Return ``text`` if all sources of a mixture are texts, else ``records``; None: no mixture."""
    if not mix:
        return None
    kinds: set[object] = set()
    for each in mix if isinstance(mix, list | tuple) else ():  # pyright: ignore[reportUnknownVariableType]
        if isinstance(each, Mapping):
            kinds.add(each.get("source") or source_by_suffix(each.get("path")))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return "text" if kinds == {"text"} else "records"


def _source_of_path(layers: _Layers) -> _Layers:
    """Set ``data.source`` if a user gives only ``data.path`` to a recipe that reads no files."""
    values = _flat(layers)
    users = _flat({k: x for k, x in layers.items() if not k.startswith(Reader.PROPOSED)})
    if users.get("data.mix") is not None and "data.source" not in users:
        return {f"{Reader.DERIVED}data.mix is set": {"data.source": "records"}}
    path, reads_files = values.get("data.path"), values.get("data.source") in {*_SOURCE_OF.values()}
    if path is None or reads_files or "data.path" not in users or "data.source" in users:
        return {}
    return {"end of data.path": {"data.source": source_by_suffix(path)}}


class FileKind(Enum):
    """Kinds of files of data; :mod:`moetrain.data.containers` reads those of records."""

    TEXT = "text"
    LINES = "one JSON object in each line"
    JSON = "the same, or one array of objects, or one object over several lines"
    TABLE = "rows and columns, which pyarrow reads"
    CELLS = "rows of cells, which are texts; the first row names the fields"
    COMPRESSED = "a compressed file of LINES, JSON or CELLS"
    SHEET = "rows and columns as text, to be converted, or learned as text"
    ARCHIVE = "several files in one, to be unpacked"

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The ends of the names of such files."""
        return tuple(suffix for suffix, kind in FILE_KINDS.items() if kind is self)


FILE_KINDS: Mapping[str, FileKind] = {
    ".jsonl": FileKind.LINES,
    ".txt": FileKind.TEXT,
    ".json": FileKind.JSON,
    ".parquet": FileKind.TABLE,
    ".arrow": FileKind.TABLE,
    ".csv": FileKind.CELLS,
    ".gz": FileKind.COMPRESSED,
    ".zst": FileKind.COMPRESSED,
    ".zstd": FileKind.COMPRESSED,
    ".bz2": FileKind.COMPRESSED,
    ".xz": FileKind.COMPRESSED,
    ".tsv": FileKind.SHEET,
    ".zip": FileKind.ARCHIVE,
    ".tar": FileKind.ARCHIVE,
    ".tgz": FileKind.ARCHIVE,
    ".7z": FileKind.ARCHIVE,
}
"""Kinds of files, by the end of the file's name."""
_SOURCE_OF = {
    FileKind.LINES: "jsonl",
    FileKind.TEXT: "text",
    FileKind.JSON: "records",
    FileKind.TABLE: "records",
    FileKind.CELLS: "records",
    FileKind.COMPRESSED: "records",
}
"""The ``data.source`` of a kind. Files of the other kinds are refused."""


def source_by_suffix(path: object, field: str = "data.path") -> str:
    """Return the ``data.source`` for ``path``, the value of the setting ``field``.

    The end of the file's name decides. A folder holds texts if all of its files end in .txt. A
    pattern names texts if no file that it matches has a known end, and none begins as JSON.

    Raises ConfigError: no source reads names with this end, or the name has no end that is known,
    and the file is a text that does not begin as JSON.
    """
    # If other files were read as texts, a model would learn their format: braces, commas, binary.
    suffix = PurePath(str(path)).suffix.lower()
    if _matches_texts_alone(str(path)):
        return "text"
    if not re.fullmatch(r"\.[a-z]+\d?", suffix):  # a folder, or a data set on the hub
        if begins_as(str(path)) == "text":
            problem = f"not set, and {field} {shortened(path)} is a text without a known extension"
            raise ConfigError("data.source", f"{problem}; set text to learn it as it is")
        return "text" if _holds_texts_alone(str(path)) else "records"
    kind = FILE_KINDS.get(suffix)
    if kind is FileKind.SHEET:
        problem = f"not set, and {field} {shortened(path)} is a table that is not read as records"
        remedy = "convert it to .jsonl or .parquet, or set text to learn the file as it is"
        raise ConfigError("data.source", f"{problem}; {remedy}")
    if kind not in _SOURCE_OF:
        known = [suffix for suffix, one in FILE_KINDS.items() if one in _SOURCE_OF]
        raise ConfigError(
            "data.source",
            f"not set, and {field} {shortened(path)} ends in none of {', '.join(known)}; set text "
            "(for text files or folders of them) or records (for files or folders of records, or a "
            "data set of the hub); stdlib and synthetic take no path",
        )
    return _SOURCE_OF[kind]


def begins_as(path: str) -> Literal["json", "text"] | None:
    """Return what the file ``path`` seems to hold, by its first bytes.

    None: it is blank, has null bytes, cannot be read, or is no file.
    """
    if not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:
            head = file.read(1 << 10).removeprefix(codecs.BOM_UTF8).lstrip()
    except OSError:
        return None
    if not head or b"\0" in head:
        return None
    return "json" if head.startswith((b"{", b"[")) else "text"


def _matches_texts_alone(pattern: str) -> bool:
    """Return True if the files that ``pattern`` matches are texts, by the first one of each kind.

    Files of a kind have the same end of their names. One that is blank tells nothing.
    """
    if not glob.has_magic(pattern) or os.path.lexists(pattern):
        return False
    firsts: dict[str, set[str | None]] = {}
    for name in sorted(glob.glob(pattern, recursive=True)):
        begins = firsts.setdefault(PurePath(name).suffix.lower(), set())
        if not begins and os.path.isfile(name):
            begins.add(begins_as(name))
    firsts = {suffix: begins for suffix, begins in firsts.items() if begins}
    return (
        bool(firsts)
        and not any(suffix in FILE_KINDS for suffix in firsts)
        and all(begins == {"text"} for begins in firsts.values())
    )


def _holds_texts_alone(folder: str) -> bool:
    """Return True if ``folder`` has visible files, and all of them end in .txt."""
    number = 0
    for _, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in (name for name in names if not name.startswith(".")):
            if not name.endswith(".txt"):
                return False
            number += 1
    return number > 0


def _merged(layers: _Layers) -> tuple[dict[str, object], dict[str, str]]:
    """Merge layers, weakest first. Returns the values, and the origin of each value."""
    values = _flat(layers)
    origins = {name: origin for origin, values in layers.items() for name in values}
    is_users = {name: not origin.startswith(Reader.PROPOSED) for name, origin in origins.items()}
    for pair in _ALTERNATIVES:
        set_names = [name for name in pair if values.get(name) is not None]
        if len(set_names) == 2 and is_users[set_names[0]] == is_users[set_names[1]]:
            one, other = (f"{shortened(values[name])} ({origins[name]})" for name in set_names)
            problem = f"{one} contradicts {set_names[1]} {other}; set one of them"
            raise ConfigError(set_names[0], problem)
        if set_names:
            kept = max(set_names, key=lambda name: is_users[name])
            dropped = pair[1 - pair.index(kept)]
            values[dropped], origins[dropped] = None, f"{Reader.DERIVED}{kept} is set"
    return values, origins


def _remedy(message: str) -> str:
    """Rewrite pydantic's "Input should be ..." as advice."""
    message = message.removeprefix("Value error, ").partition(", unable to")[0]
    message = re.sub(r"Input should be (?=greater|less)", "give a number ", message)
    message = message.replace("a valid boolean", "yes or no (in TOML true or false)")
    message = re.sub(r"a valid dictionary or instance of \w+", "a table", message)
    return message.replace("Input should be", "give")


_SEPARATORS = str.maketrans("", "", "._")
_NEAR = 0.75  # likeness of a misspelt name; at difflib's default, 0.6, unrelated names match


def redacted(text: str) -> str:
    """Replace user, password, keys and signatures in URLs of ``text`` by ``***``."""
    return _PARAMETER.sub(r"\1***", _USER.sub("***", text)) if "://" in text else text


def shortened(value: object) -> str:
    """Return ``repr(value)``, short enough for a line that a person reads."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits, or a value with one
        text = "a value that holds a number of thousands of digits"
        if isinstance(value, int):
            text = f"a number of {value.bit_length()} bits"
    except RecursionError:
        text = "a deeply nested value"
    return _cut(text)


def _cut(text: str, longest: int = 200) -> str:
    text = redacted(text)  # first, since half a URL would not be recognised
    return text if len(text) <= longest else f"{text[: longest - 40]}...{text[-20:]}"


def is_list(value: object) -> TypeGuard[list[object]]:
    """Return whether ``value``, of JSON or TOML, is a list."""
    return isinstance(value, list)


def is_tuple(value: object) -> TypeGuard[tuple[object, ...]]:
    """Return whether ``value``, of a setting, is a tuple."""
    return isinstance(value, tuple)


def is_table(value: object) -> TypeGuard[Mapping[str, object]]:
    """Return whether ``value``, of JSON or TOML, is a table."""
    return isinstance(value, Mapping)


def leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted names and values of a nested mapping; a dotted key counts as nested."""
    for key, value in tree.items():
        if is_table(value) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
