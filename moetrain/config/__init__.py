"""The settings of a run: all sections, where their values come from, which contradict each other.

A :class:`Config` is built from four sources, weakest first: the defaults of
:mod:`moetrain.config.sections`, a recipe or TOML file, environment variables
(``MOETRAIN_PARALLEL__EP=8``) and the command line (``--parallel.ep 8``). Unknown keys are errors,
and so are two settings that contradict each other: nothing a user set is overridden in silence.

Left out on purpose: anything that needs a device, a process group or the file system beyond the
TOML file itself. Those checks live where the thing is built (:mod:`moetrain.train.setup`) and
raise :class:`ConfigError` too. Settings that a checkpoint decides, unless a user has, are filled in
there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple, get_args

from pydantic import PrivateAttr, ValidationError, field_validator

from moetrain.config.checks import unmet
from moetrain.config.compute import (
    ActivationSection,
    CompileSection,
    KernelsSection,
    MoeSection,
    ParallelSection,
)
from moetrain.config.rl import RlSection
from moetrain.config.sections import (
    CheckpointSection,
    DataSection,
    JobsSection,
    LaunchSection,
    LogSection,
    LoraSection,
    ModelSection,
    OptimSection,
    TrainSection,
)
from moetrain.config.sources import (
    ConfigError,
    Layer,
    Section,
    is_recipe,
    leaves,
    merge,
    nest,
    read_cli,
    read_env,
    read_source,
    shortened,
)


class Recipes(NamedTuple):
    """The recipes that a command starts from where none is named."""

    default: str
    of_path: str
    """Recipe with ``model.path``."""
    of_chats: str
    """Recipe with ``model.path`` and jsonl data. If it is not ``of_path``, the kind of data must be
    known."""


TRAIN_RECIPES = Recipes("debug", "continue", "sft")
RL_RECIPES = Recipes("rl-sort", "rl", "rl")
JOB_RECIPES = Recipes("jobs-debug", "jobs", "jobs")

# One of two alternatives is set: the user's replaces a recipe's or a default.
_ALTERNATIVES = (
    ("model.path", "model.preset"),
    ("train.epochs", "train.steps"),
    ("optim.warmup_fraction", "optim.warmup_steps"),
)


class Config(Section):
    """Every setting of a run. Build it with :meth:`load`; it is frozen afterwards."""

    model: ModelSection = ModelSection()
    """The model to train."""
    data: DataSection = DataSection()
    """The data that it trains on."""
    train: TrainSection = TrainSection()
    """Length, batches and precision of the run."""
    lora: LoraSection = LoraSection()
    """Low-rank adapters."""
    optim: OptimSection = OptimSection()
    """Optimizer and schedule."""
    parallel: ParallelSection = ParallelSection()
    """Degrees of parallelism."""
    moe: MoeSection = MoeSection()
    """Routing, balancing and dispatch of experts."""
    kernels: KernelsSection = KernelsSection()
    """Implementations of kernels."""
    compile: CompileSection = CompileSection()
    """Compilation by torch.compile."""
    activation: ActivationSection = ActivationSection()
    """Memory of activations."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Saving and resuming."""
    rl: RlSection = RlSection()
    """Reinforcement learning (python -m moetrain.rl)."""
    jobs: JobsSection = JobsSection()
    """Job service (python -m moetrain.jobs)."""
    log: LogSection = LogSection()
    """What a run prints and writes."""
    launch: LaunchSection = LaunchSection()
    """Processes of a run."""
    output_dir: str = "outputs/MODEL-DATA"
    """Folder for metrics, checkpoints, plots and the resolved config; unset: outputs/MODEL-DATA,
    after the names of model and data."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _recipe: str = PrivateAttr(default="")

    @field_validator("output_dir")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        if value.lower() in ("none", "null"):
            raise ValueError("a run needs a folder to write to")
        return os.path.expanduser(value)

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        recipes: Recipes = TRAIN_RECIPES,
        *,
        once: bool = False,
    ) -> Config:
        """Return the validated config of one run.

        Args:
            source: a recipe's name, a TOML file, or a nested mapping; None: the recipe ``debug``.
                If ``model.path`` is set and no recipe is named, a recipe for fine-tuning lies under
                all other sources: ``sft`` for jsonl data (by ``data.source`` or the suffix of
                ``data.path``), else ``continue``.
            overrides: command-line words, ``["--train.steps", "3"]`` or ``["train.steps=3"]``. The
                last value of a setting counts, unless ``once``.
            environ: environment to read ``MOETRAIN_*`` from; None: the process's own.
            recipes: the recipes of another command, in place of those named above.
            once: a setting that is given twice is an error: on a command line it is a slip.

        Raises:
            ConfigError: unknown or contradictory settings, wrong types, a missing file.
        """
        settings = _settings()
        environment = read_env(os.environ if environ is None else environ, settings)
        layers = [] if source is None else [read_source(source, settings)]
        layers += [
            Layer("environment", cls._typed(environment)),
            Layer("command line", cls._typed(read_cli(overrides, settings, once=once))),
        ]
        recipe, why = _recipe_under(layers, source, recipes)
        if recipe is not None:
            layers.insert(0, read_source(recipe, settings))
        if recipes.of_path != recipes.of_chats:
            layers += _source_of_path(layers)
        config = cls._of(*merge(layers, _ALTERNATIVES))
        config._recipe = why
        config.check()
        config = config.fitting()
        if config.is_set("output_dir"):
            return config
        return config.filled({"output_dir": f"outputs/{_name_of_run(config)}"}, "model and data")

    @classmethod
    def _of(cls, values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
        """Build a config from values by dotted name, of exactly the right types."""
        try:
            config = cls.model_validate(nest(values), strict=True)
        except ValidationError as error:
            raise _as_config_error(error) from None
        config._origins = dict(origins)
        return config

    @classmethod
    def _typed(cls, texts: Mapping[str, Any]) -> dict[str, Any]:
        """Convert texts from the environment or the command line to the settings' types."""
        try:
            return dict(leaves(cls.model_validate(nest(texts)).model_dump(exclude_unset=True)))
        except ValidationError as error:
            raise _as_config_error(error) from None

    def is_set(self, name: str) -> bool:
        """Return whether any source has set ``name``; else its value is the default."""
        section, _, key = name.rpartition(".")
        return key in (getattr(self, section) if section else self).model_fields_set

    def filled(self, values: Mapping[str, Any], origin: str) -> Config:
        """Return a copy with ``values``, by dotted name, whose origin is ``origin``."""
        mine = dict(leaves(self.model_dump(exclude_unset=True)))
        filled = self._of({**mine, **values}, self._origins | dict.fromkeys(values, origin))
        filled._recipe = self._recipe
        return filled

    def fitting(self, facts: Mapping[str, str | None] | None = None) -> Config:
        """Return a copy in which no setting is without effect (:mod:`moetrain.config.checks`).

        Settings that only a recipe proposes go back to their defaults.

        Args:
            facts: the facts that are known; each maps to the reason why it does not hold, or None.

        Raises:
            ConfigError: a setting that a user gave has no effect.
        """
        default, config = dict(leaves(Config().model_dump())), self
        while found := next(unmet(dict(leaves(config.model_dump())), default, facts or {}), None):
            name, why = found
            if not self._origins.get(name, "recipe ").startswith("recipe "):
                raise ConfigError(name, why)
            config = config.filled({name: default[name]}, f"as {why}")
        return config

    @property
    def origins(self) -> dict[str, str]:
        """The source of each setting that has one, by dotted name."""
        return dict(self._origins)

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested values that JSON can hold."""
        return self.model_dump(mode="json")

    def describe(self) -> str:
        """Name the recipe and why, then each non-default setting with its value and source."""
        default = dict(leaves(Config().to_dict()))
        rows = [
            f"  {key} = {json.dumps(value)}  ({self._origins.get(key, 'default')})"
            for key, value in leaves(self.to_dict())
            if value != default[key]
        ]
        return "\n".join([self._recipe] * bool(self._recipe) + (rows or ["  (all defaults)"]))

    def check(self) -> None:
        """Raise ConfigError for settings that contradict each other."""
        m, t = self.model, self.train
        if m.path is not None and m.overrides():
            key, value = next(iter(m.overrides().items()))
            raise ConfigError(
                f"model.{key}",
                f"{value} contradicts model.path {m.path!r}, whose config.json decides; unset one",
            )
        if m.path is None and m.preset is None:
            raise ConfigError("model.preset", "not set; name a preset, or a checkpoint: model.path")
        if t.steps is None and t.epochs is None:
            raise ConfigError("train.steps", "not set; give it, or train.epochs")
        t.micro_batches()  # for one rank; plan_world asks again for all
        if self.data.source in ("text", "jsonl") and self.data.path is None:
            raise ConfigError(
                "data.path", f"not set, and data.source {self.data.source!r} needs it"
            )
        self.rl.check()
        self.checkpoint.check()
        self.optim.check()
        if t.steps is not None:
            self.log.check(t.steps)
        activation = self.activation
        if activation.offload and activation.policy == "selective" and not self.compile.enabled:
            raise ConfigError(
                "activation.offload",
                f"{activation.offload!r}, and with activation.policy 'selective' only compiled "
                "blocks leave what they keep to be sent; set compile.enabled yes, or "
                "activation.policy none",
            )


def _recipe_under(
    layers: Sequence[Layer], source: object, recipes: Recipes
) -> tuple[str | None, str]:
    """Return the recipe to put under ``layers``, or None, and a line that says which it is."""
    if is_recipe(source):
        return None, f"  recipe {source}"
    given = {name: value for layer in layers for name, value in layer.values.items()}
    path, data = given.get("model.path"), given.get("data.path")
    if path is None:
        if source is not None:
            return None, ""
        default = recipes.default
        return default, f"  recipe {default}, as neither one nor model.path is named"
    if recipes.of_path == recipes.of_chats:
        return (
            recipes.of_path,
            f"  recipe {recipes.of_path}, as model.path is set and none is named",
        )
    kind = given.get("data.source") or (None if data is None else _source_by_suffix(data))
    recipe = recipes.of_chats if kind == "jsonl" else recipes.of_path
    return recipe, f"  recipe {recipe}, as model.path is set, the data is {kind} and none is named"


def _source_of_path(layers: Sequence[Layer]) -> list[Layer]:
    """Set ``data.source`` if a user gives only ``data.path`` to a recipe that reads no files."""
    given = {name: value for layer in layers for name, value in layer.values.items()}
    users = {name for layer in layers if layer.is_users for name in layer.values}
    path, reads_files = given.get("data.path"), given.get("data.source") in ("text", "jsonl")
    if path is None or reads_files or "data.path" not in users or "data.source" in users:
        return []
    return [Layer("end of data.path", {"data.source": _source_by_suffix(path)}, is_users=False)]


def _source_by_suffix(path: object) -> str:
    # To guess text for other files would train on their format: braces, commas, binary.
    kind = {".jsonl": "jsonl", ".txt": "text"}.get(PurePath(str(path)).suffix.lower())
    if kind is None:
        raise ConfigError(
            "data.source",
            f"not set, and data.path {shortened(path)} is neither .jsonl nor .txt; set text (a "
            "file of any text, or a folder of such) or jsonl (a file or folder of .jsonl); stdlib "
            "and synthetic take no path, and Parquet, Arrow, compressed files and a hub's data "
            "sets are not read: write them as .jsonl",
        )
    return kind


def _name_of_run(config: Config) -> str:
    """Return ``MODEL-DATA``, after the last parts of their paths."""
    model, data = config.model, config.data
    path = PurePath(os.path.abspath(model.path or model.preset or ""))
    if path.name == "hf":  # a run's own export, OUTPUT_DIR/hf
        path = path.parent
    name = PurePath(os.path.abspath(data.path)).stem if data.path else data.source
    return f"{path.name}-{name}"


def _settings() -> dict[str, bool]:
    """Return every dotted name, and whether the setting may be unset."""
    names = {}
    for name, field in Config.model_fields.items():
        section = field.default
        inner = type(section).model_fields if isinstance(section, Section) else {"": field}
        for key, setting in inner.items():
            names[f"{name}.{key}".rstrip(".")] = type(None) in get_args(setting.annotation)
    return names


def _as_config_error(error: ValidationError) -> ConfigError:
    """Turn pydantic's first complaint into one line; the branches of a union share one field."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    field = next((k for k in _settings() if name == k or name.startswith(k + ".")), name)
    messages = dict.fromkeys(
        _remedy(e["msg"]) for e in error.errors() if ".".join(map(str, e["loc"])).startswith(field)
    )
    return ConfigError(field, f"{shortened(first['input'])}: {' or '.join(messages)}")


def _remedy(message: str) -> str:
    """Rewrite pydantic's sentence on what the input should be as what to give instead."""
    message = message.removeprefix("Value error, ").partition(", unable to")[0]
    message = re.sub(r"Input should be (?=greater|less)", "give a number ", message)
    message = message.replace("a valid boolean", "yes or no (in TOML true or false)")
    return message.replace("Input should be", "give")
