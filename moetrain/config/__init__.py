"""The settings of a run: all sections, and the one object that holds them.

A :class:`Config` is built from four sources, weakest first: defaults, a recipe or TOML file,
environment variables (``MOETRAIN_PARALLEL__EP=8``) and the command line (``--parallel.ep 8``).
Unknown keys are errors. So are two settings that contradict each other, and a setting that differs
from its default but would have no effect (:mod:`moetrain.config.needs`): nothing that a user set is
overridden in silence.

Left out on purpose: checks that need a device, a process group or files beyond the TOML file. They
are made where the thing is built (:mod:`moetrain.train.session`), and raise :class:`ConfigError`
too.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Self

from pydantic import PrivateAttr

from moetrain.config.compute import (
    ActivationSection,
    CompileSection,
    KernelsSection,
    LaunchSection,
    MoeSection,
    OptimSection,
    ParallelSection,
)
from moetrain.config.needs import Fact as Fact
from moetrain.config.needs import unmet
from moetrain.config.rl import JobsSection, RlSection
from moetrain.config.sections import (
    CheckpointSection,
    DataSection,
    GivenPath,
    LogSection,
    LoraSection,
    ModelSection,
    Section,
    TrainSection,
    checked,
)
from moetrain.config.sources import (
    ConfigError,
    Reader,
    Recipes,
    Unused,
    is_list,
    is_table,
    leaves,
    redacted,
)

logger = logging.getLogger("moetrain")
"""The logger of the whole package. Passwords and keys in URLs do not appear in its lines."""


def _redact(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if (text := redacted(message)) != message:
        record.msg, record.args = text, ()
    return True


logger.addFilter(_redact)


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
    log: LogSection = LogSection()
    launch: LaunchSection = LaunchSection()
    output_dir: Annotated[
        GivenPath,
        checked(
            lambda x: x.lower() not in ("none", "null"),
            "a run needs a folder to write to; name one",
        ),
    ] = "outputs/MODEL-DATA"
    """Folder for metrics, checkpoints and the resolved config; unset: outputs/MODEL-DATA, named
    after model and data."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _recipe: str = PrivateAttr(default="")
    _unused: tuple[str, ...] = PrivateAttr(default=())
    """Beginnings of the names of settings that the command does not use."""

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | Mapping[str, object] | None = None,
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        recipes: Recipes = Recipes.TRAIN,
        *,
        unused: Unused | None = None,
        once: bool = False,
    ) -> Self:
        """Return the validated config of one run.

        Args:
            source: a recipe's name, a TOML file, or a nested mapping; None: the recipe ``debug``.
                If ``model.path`` is set and no recipe is named, a recipe for fine-tuning is read,
                and all other sources override it: ``sft`` for records (by ``data.source`` or the
                suffix of ``data.path``), else ``continue``.
            overrides: command-line words, ``["--train.steps", "3"]`` or ``["train.steps=3"]``. The
                last value of a setting counts, unless ``once``.
            environ: environment to read ``MOETRAIN_*`` from; None: the process's own.
            recipes: the recipes of another command, in place of those named above.
            unused: settings that are refused because the command does not use them.
            once: a setting that is given twice is an error: on a command line it is a slip.

        Raises ConfigError: unknown or contradictory settings, wrong types, a missing file.
        """
        reader, environ = Reader(cls), os.environ if environ is None else environ
        config, origins, recipe = reader.read(source, overrides, environ, recipes, once=once)
        config._origins = origins
        config._recipe = recipe
        if unused is not None:
            unused.check(origins)
            config._unused = unused.beginnings
        config = config.fitted()
        config.check()
        if config.is_set("output_dir"):
            return config
        return config.filled({"output_dir": f"outputs/{_name_of_run(config)}"}, "model and data")

    def is_set(self, name: str) -> bool:
        """Return True if any source has set ``name``; otherwise its value is the default."""
        section, _, key = name.rpartition(".")
        return key in (getattr(self, section) if section else self).model_fields_set

    def is_users(self, name: str) -> bool:
        """Return True if a user has set ``name``.

        A recipe's proposal does not count, nor what follows from other settings.
        """
        origin = self._origins.get(name, Reader.PROPOSED)
        return not origin.startswith((Reader.PROPOSED, Reader.DERIVED))

    def filled(self, values: Mapping[str, object], origin: str) -> Self:
        """Return a copy with ``values``, by dotted name, from the source ``origin``."""
        mine = dict(leaves(self.model_dump(exclude_unset=True)))
        filled = Reader(type(self)).build({**mine, **values})
        filled._origins = self._origins | dict.fromkeys(values, origin)
        filled._recipe, filled._unused = self._recipe, self._unused
        return filled

    def proposed(self) -> Self:
        """Return a copy whose settings count as a recipe's: :meth:`fitted` may drop them."""
        copy = self.model_copy()
        copy._origins = {}
        return copy

    def fitted(self, facts: Mapping[str, str | None] | None = None) -> Self:
        """Return a copy in which every setting has an effect.

        A setting that would have none, and that only a recipe proposed, gets its default again.

        ``facts``: the facts that are known; each maps to None if it holds, else to the reason why
        it does not.

        Raises ConfigError: a setting that a user gave has no effect.
        """
        default, config = dict(leaves(Config().model_dump())), self
        while True:
            values = dict(leaves(config.model_dump()))
            found = next(unmet(values, default, facts or {}, self._unused), None)
            if found is None:
                return config
            name, why, advised = found
            if self.is_users(name):
                raise ConfigError(name, f"{why}; {advised}")
            config = config.filled({name: default[name]}, f"{Reader.DERIVED}{why}")

    @property
    def origins(self) -> dict[str, str]:
        """The source of each setting that has one, by dotted name."""
        return dict(self._origins)

    @property
    def generation_differs(self) -> bool:
        """True: generation has other weights or another formula than training, so other bits."""
        rl = self.rl
        return rl.generator_cache != "expanded" or rl.generator_dtype not in (
            "auto",
            self.lora.base_dtype,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested values that JSON can hold, for people and records to read.

        Passwords and keys in URLs are ``***``: give them again to start a run from these values.
        """
        values = self.model_dump(mode="json")
        return {key: _without_secrets(value) for key, value in values.items()}

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
            raise ConfigError(
                "model.preset", "not set; name a preset, or set model.path to a checkpoint"
            )
        if t.steps is None and t.epochs is None:
            raise ConfigError("train.steps", "not set; give it, or train.epochs")
        t.micro_batches()  # for one rank; plan_world asks again for all
        self.data.sources()
        self.checkpoint.check()
        activation = self.activation
        keeps_nothing = (activation.policy, activation.blocks) == ("full", "all")
        if keeps_nothing and self.is_users("activation.save"):
            problem = "activation.policy full keeps nothing in any block"
            raise ConfigError(
                "activation.save", f"{problem}; leave it out, or set activation.blocks"
            )
        if t.steps is not None:
            self.log.check(t.steps)


def _name_of_run(config: Config) -> str:
    """Return ``MODEL-DATA``, after the last parts of their paths."""
    model, data = config.model, config.data
    path = PurePath(os.path.abspath(model.path or model.preset or ""))
    if path.name == "hf":  # a run's own export, OUTPUT_DIR/hf
        path = path.parent
    name = PurePath(os.path.abspath(data.path)).stem if data.path else data.source
    return f"{path.name}-{name}"


def _without_secrets(value: object) -> object:
    if is_table(value):
        return {key: _without_secrets(inner) for key, inner in value.items()}
    if is_list(value):
        return [_without_secrets(inner) for inner in value]
    return redacted(value) if isinstance(value, str) else value
