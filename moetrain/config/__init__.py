"""The settings of a run: all sections, where their values come from, which contradict each other.

A :class:`Config` is built from four sources, weakest first: defaults, a recipe or TOML file,
environment variables (``MOETRAIN_PARALLEL__EP=8``) and the command line (``--parallel.ep 8``).
Unknown keys are errors, and so are two settings that contradict each other: nothing a user set is
overridden in silence.

Left out on purpose: anything that needs a device, a process group or files beyond the TOML file.
Those checks live where the thing is built (:mod:`moetrain.train.setup`) and raise
:class:`ConfigError` too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from pydantic import PrivateAttr, field_validator

from moetrain.config.checks import unmet
from moetrain.config.compute import (
    ActivationSection,
    CompileSection,
    KernelsSection,
    MoeSection,
    ParallelSection,
)
from moetrain.config.data import DataSection
from moetrain.config.rl import RlSection
from moetrain.config.sections import (
    CheckpointSection,
    EvalSection,
    JobsSection,
    LaunchSection,
    LogSection,
    LoraSection,
    ModelSection,
    OptimSection,
    Section,
    TrainSection,
)
from moetrain.config.sources import ConfigError, Reader, Recipes, leaves


class Config(Section):
    """Every setting of a run. Build it with :meth:`load`; it is frozen afterwards."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    lora: LoraSection = LoraSection()
    optim: OptimSection = OptimSection()
    parallel: ParallelSection = ParallelSection()
    moe: MoeSection = MoeSection()
    kernels: KernelsSection = KernelsSection()
    compile: CompileSection = CompileSection()
    activation: ActivationSection = ActivationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    rl: RlSection = RlSection()
    jobs: JobsSection = JobsSection()
    eval: EvalSection = EvalSection()
    log: LogSection = LogSection()
    launch: LaunchSection = LaunchSection()
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
        recipes: Recipes = Recipes.TRAIN,
        *,
        once: bool = False,
    ) -> Config:
        """Return the validated config of one run.

        Args:
            source: a recipe's name, a TOML file, or a nested mapping; None: the recipe ``debug``.
                If ``model.path`` is set and no recipe is named, a recipe for fine-tuning lies under
                all other sources: ``sft`` for records (by ``data.source`` or the suffix of
                ``data.path``), else ``continue``.
            overrides: command-line words, ``["--train.steps", "3"]`` or ``["train.steps=3"]``. The
                last value of a setting counts, unless ``once``.
            environ: environment to read ``MOETRAIN_*`` from; None: the process's own.
            recipes: the recipes of another command, in place of those named above.
            once: a setting that is given twice is an error: on a command line it is a slip.

        Raises:
            ConfigError: unknown or contradictory settings, wrong types, a missing file.
        """
        reader, environ = Reader(cls), os.environ if environ is None else environ
        config, origins, recipe = reader.read(source, overrides, environ, recipes, once=once)
        config._origins = origins
        config._recipe = recipe
        config = config.fitting()
        config.check()
        if config.is_set("output_dir"):
            return config
        return config.filled({"output_dir": f"outputs/{_name_of_run(config)}"}, "model and data")

    def is_set(self, name: str) -> bool:
        """Return whether any source has set ``name``; else its value is the default."""
        section, _, key = name.rpartition(".")
        return key in (getattr(self, section) if section else self).model_fields_set

    def filled(self, values: Mapping[str, Any], origin: str) -> Config:
        """Return a copy with ``values``, by dotted name, whose origin is ``origin``."""
        mine = dict(leaves(self.model_dump(exclude_unset=True)))
        filled = Reader(type(self)).build({**mine, **values})
        filled._origins = self._origins | dict.fromkeys(values, origin)
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
        if m.path is None and m.preset is None:
            raise ConfigError("model.preset", "not set; name a preset, or a checkpoint: model.path")
        if t.steps is None and t.epochs is None:
            raise ConfigError("train.steps", "not set; give it, or train.epochs")
        t.micro_batches()  # for one rank; plan_world asks again for all
        data = self.data
        named = data.path or data.sources()
        if data.source in ("text", "records", "jsonl") and not named:
            raise ConfigError(
                "data.path", f"not set, and data.source {self.data.source!r} needs it"
            )
        self.rl.check()
        self.checkpoint.check()
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


def _name_of_run(config: Config) -> str:
    """Return ``MODEL-DATA``, after the last parts of their paths."""
    model, data = config.model, config.data
    path = PurePath(os.path.abspath(model.path or model.preset or ""))
    if path.name == "hf":  # a run's own export, OUTPUT_DIR/hf
        path = path.parent
    name = PurePath(os.path.abspath(data.path)).stem if data.path else data.source
    return f"{path.name}-{name}"
