"""The settings of a run: all sections, where their values come from, which contradict each other.

A :class:`Config` is built from four sources, weakest first: defaults, a recipe or TOML file,
environment variables (``MOETRAIN_PARALLEL__EP=8``) and the command line (``--parallel.ep 8``).
Unknown keys are errors, and so are two settings that contradict each other, and one that differs
from its default but would have no effect: nothing a user set is overridden in silence.

Left out on purpose: anything that needs a device, a process group or files beyond the TOML file.
Those checks live where the thing is built (:mod:`moetrain.train.session`) and raise
:class:`ConfigError` too.
"""

import json
import logging
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import starmap
from pathlib import PurePath
from typing import Annotated, Any, NamedTuple, Self, cast

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
from moetrain.config.sources import ConfigError, Reader, Recipes, Unused, leaves, redacted

logger = logging.getLogger("moetrain")
"""The logger of the whole package. Passwords and keys in URLs do not appear in its lines."""


def _redact(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if (text := redacted(message)) != message:
        record.msg, record.args = text, ()
    return True


logger.addFilter(_redact)


class Fact(StrEnum):
    """What a run may turn out to have, in the words of messages."""

    CUDA = "a CUDA device"
    DEEPEP = "DeepEP"
    EXPERTS = "experts"
    DRY_RUN = "--dry_run"


class _Other(Container[Any]):
    """Every value except some."""

    def __init__(self, *excluded: Any) -> None:
        self.excluded = excluded

    def __contains__(self, value: object) -> bool:
        return value not in self.excluded


_ANY = _Other()
_SET = _Other(None)
_SOME = _Other(0)
_SOME_NAMES = _Other(())
_SEVERAL = _Other(1)
_HELD = {None}
"""A fact that holds; the value of one that does not is the reason."""


class _Need(NamedTuple):
    """Settings, and what they need to have an effect.

    What other settings decide is checked when settings are read; what the model, the device or the
    machine decides are facts, which become known in a dry run and when a run starts. The number of
    processes and micro-batches is no need: one file of settings serves one process and many.
    """

    settings: str
    """Dotted names with spaces between, or ``section.*`` for the others of a section."""
    of: Mapping[str, Container[Any]]
    """Other settings or facts, and the values with which they satisfy the need; one is enough."""
    when: Container[Any] = _ANY
    """Values of the settings that have this need."""
    why: str = ""
    """The reason, which the message appends to the values of ``of``."""
    remedy: str = ""
    """The advice of the message. Without one it advises to unset the setting, or to give another
    setting of ``of`` one of its values."""

    def covers(self, name: str) -> bool:
        is_in_section = self.settings.endswith(".*") and name.startswith(self.settings[:-1])
        return name in self.settings.split() or (is_in_section and name not in self.of)

    def advised(self, unused: tuple[str, ...]) -> str:
        """Return the end of a message: what to do, each way by itself.

        Settings whose names begin as ``unused`` says are not advised.
        """
        others = [(name, x) for name, x in self.of.items() if not name.startswith(unused)]
        return self.remedy or ", or ".join(["unset it", *starmap(_satisfied, others)])


def _satisfied(name: str, fitting: Container[Any]) -> str:
    """Say how the setting ``name`` comes to one of the values ``fitting``."""
    if isinstance(fitting, _Other):
        if fitting.excluded == (None,):
            return f"set {name}"
        is_least = fitting.excluded in ((0,), (1,))
        return f"raise {name}" if is_least else f"use another {name}"
    values = [x for x in cast("Iterable[Any]", fitting) if x not in (None, ())]
    if not values:
        return f"unset {name}"
    *words, last = (("no", "yes")[x] if isinstance(x, bool) else str(x) for x in values)
    return f"set {name} {', '.join(words)}{' or ' * bool(words)}{last}"


_RECORDS = ("records", "jsonl")
_TEXTS = ("text", *_RECORDS)
_WITH_REFERENCE = ("dpo", "ipo", "kto")
_PREFERENCES = (*_WITH_REFERENCE, "simpo", "orpo")
_ON_PAIRS = ("dpo", "ipo", "simpo", "orpo", "reward")
_ON_ANSWERS = (*_ON_PAIRS, "kto")
_BY_PRESET = {"model.path": {None}}
_EXPERT_PARALLEL = {"parallel.ep": _SEVERAL}
_OF_TEXT = {"data.source": _Other("synthetic")}
_HAS_CHATS = {"rl.chat": {True}, "rl.env": _Other("sort", "arithmetic")}
_OF_GROUPS = ("dr_grpo", "grpo", "rloo", "reinforce_pp_baseline")
_HAS_RATIO = {"rl.policy": _Other("reinforce")}
_SAVES = {"checkpoint.interval": _SOME, "checkpoint.minutes": _SOME}
_NARROW = _Other("auto")
_NO_PLACE_FOR_BIAS = ", whose files have no place for the bias that it moves"
_LEARN_TOKENS = "set lora.trainable_tokens to the same"
_LEARNS_TOKENS = {
    "lora.rank": {0},
    "lora.modules_to_save": _SOME_NAMES,
    "lora.trainable_tokens": _SOME_NAMES,
}
_EVALUATED = {"data.eval_fraction": _SOME, "data.eval_path": _SET}

_NEEDS: tuple[_Need, ...] = (
    # Else its config.json decides.
    _Need("model.preset model.hidden_size model.num_layers", _BY_PRESET),
    _Need("model.num_heads model.num_kv_heads model.head_dim", _BY_PRESET),
    _Need("model.num_experts model.num_experts_per_token", _BY_PRESET),
    _Need("model.intermediate_size model.moe_intermediate_size model.init_std", _BY_PRESET),
    _Need("model.rope", {"model.max_positions": _SET}),
    _Need("data.path data.eval_path data.streaming", {"data.source": _TEXTS}),
    _Need("data.mix data.text_field data.format", {"data.source": _RECORDS}),
    _Need("data.chat_template data.chat_template_kwargs", {"data.source": _RECORDS} | _HAS_CHATS),
    _Need("data.train_on data.split data.subset", {"data.source": _RECORDS}),
    _Need("data.bad_records data.overlong", {"data.source": _RECORDS}),
    _Need("data.overlong", {"data.packing": ("auto", "whole")}),
    _Need("data.text_field", {"data.format": ("auto", "text")}),
    _Need("data.chat_template data.train_on", {"data.format": _Other("text")}),
    _Need("data.chat_template_kwargs", {"data.format": _Other("text")}),
    _Need("data.eval_path", {"data.mix": (None,)}),  # each entry may have one
    # With 0 nothing is held out either way.
    _Need("data.eval_fraction", {"data.eval_path": {None}}, _SOME),
    _Need("data.packing data.tokenizer train.sample_tokens train.sample_prompt", _OF_TEXT, _SOME),
    _Need("data.new_tokens", _OF_TEXT),
    # Else their rows stay as they begin.
    _Need("data.new_tokens", _LEARNS_TOKENS, remedy=_LEARN_TOKENS),
    _Need("train.objective", {"data.source": _RECORDS}, _ON_ANSWERS),
    _Need("train.objective", {"data.format": ("auto", "preference")}, _ON_PAIRS),
    _Need("train.objective", {"data.format": _Other("text")}, {"kto"}),  # what has a label
    # References of all rows are computed before the first step.
    _Need("train.objective", {"data.streaming": ("auto", "no")}, _ON_ANSWERS),
    _Need("train.beta", {"train.objective": _PREFERENCES}),
    _Need("train.reward_centering", {"train.objective": {"reward"}}),
    # A reward model writes no text.
    _Need("train.sample_tokens train.sample_prompt", {"train.objective": _Other("reward")}, _SOME),
    _Need("train.desirable_weight train.undesirable_weight", {"train.objective": {"kto"}}),
    _Need("train.simpo_gamma", {"train.objective": {"simpo"}}),
    _Need("train.mtp_weight data.packing", {"train.objective": {"next_token"}}),  # a pair is a row
    _Need("train.mtp_weight", {"parallel.pp": {1}}),  # the last stage has no embedding
    # PEFT's models have no such blocks; adapters are not copied, and lie between experts' products.
    _Need("train.mtp_weight moe.redundant_experts kernels.precision", {"lora.rank": {0}}),
    _Need("data.workers", {"data.streaming": ("auto", "yes")}),
    _Need("data.num_documents", {"data.source": {"synthetic"}}),
    _Need("train.compare_replicas", {"parallel.dp_replicate": _Other(1)}, _SOME),
    _Need("train.eval_interval train.eval_rows", _EVALUATED, _SOME),
    _Need("train.patience checkpoint.best", {"train.eval_interval": _SOME}),
    _Need("train.sample_prompt", {"train.sample_tokens": _SOME}),
    _Need("rl.generators rl.keep_cache", {"rl.placement": {"apart"}}),
    _Need("rl.keep_cache", {"rl.max_staleness": _SOME}),  # else nothing is under way
    _Need("rl.offload rl.sleep", {"rl.placement": {"together"}}),
    _Need("lora.*", {"lora.rank": _SOME}),
    # A tensor parallel rank has parts of rows, whose lengths are of the whole.
    _Need("lora.use_dora", {"parallel.tp": {1}}),
    _Need("lora.use_dora", {"lora.dropout": {0}}),  # dropped inputs would take two more products
    _Need("lora.trainable_tokens", {"lora.modules_to_save": {()}}),  # which trains all rows
    # A gradient on its way to the host has all rows.
    _Need("lora.trainable_tokens", {"optim.offload_fraction": {0}}),
    _Need("lora.init", {"lora.path": {None}}),
    _Need("lora.layout", {"lora.save": {True}}),
    _Need("lora.offload_experts", {"lora.base_dtype": _NARROW}),
    _Need("lora.layout lora.offload_experts", {Fact.EXPERTS: _HELD}),
    _Need("rl.routing_replay rl.generator_dtype", {Fact.EXPERTS: _HELD}),
    _Need("optim.min_lr_ratio", {"optim.schedule": ("cosine", "wsd")}),
    _Need("optim.decay_fraction", {"optim.schedule": {"wsd"}}),
    _Need("optim.muon_momentum optim.muon_iterations optim.muon_scale", {"optim.name": {"muon"}}),
    _Need("optim.muon_qk_clip", {"optim.name": {"muon"}}),
    _Need("optim.muon_qk_clip", {"kernels.attention": _Other("flex")}),  # shows no documents
    _Need(
        "optim.name", {"lora.rank": {0}}, {"muon"}, remedy="use adamw"
    ),  # adapters are no such matrices
    _Need("optim.offload_fraction", {"optim.name": {"adamw"}}),  # matrices lie in parts on the host
    _Need("optim.state_dtype", {"optim.name": {"adamw"}}, {"float8"}, remedy="use bfloat16"),
    _Need("optim.weight_dtype", {"optim.state_dtype": {"float8"}}, {"bfloat16"}),
    _Need("optim.weight_dtype", {"lora.rank": {0}}, {"bfloat16"}),  # adapters are fp32
    # The update on the host knows no other dtypes.
    _Need("optim.offload_fraction", {"optim.state_dtype": {"float32"}}),
    _Need("optim.offload_fraction", {"optim.gradient_dtype": {"float32"}}),
    _Need("activation.save", {"activation.policy": {"selective"}}),
    # A graph holds what a device computes over memory that stays where it is.
    _Need("compile.cuda_graphs", {Fact.CUDA: _HELD}, {True}),
    _Need("compile.cuda_graphs", {"optim.offload_fraction": {0}}, {True}),
    _Need("compile.cuda_graphs", {"parallel.reshard_after_forward": (None, False)}, {True}),
    _Need("compile.cuda_graphs", {"lora.dropout": {0}}, {True}),
    *(_Need("compile.cuda_graphs", {f"parallel.{x}": {1}}, {True}) for x in ("pp", "tp", "cp")),
    _Need("compile.cuda_graphs", {"parallel.ep": {1}, "moe.dispatch_mode": {"static"}}, {True}),
    _Need("parallel.cp_method", {"parallel.cp": _SEVERAL}),
    _Need("parallel.pp_schedule parallel.pp_stages parallel.pp_split", {"parallel.pp": _SEVERAL}),
    _Need("moe.*", {Fact.EXPERTS: _HELD}),
    _Need("moe.deepep_num_sms moe.dispatch_mode", {"moe.dispatcher": ("auto", "deepep")}),
    _Need("moe.deepep_num_sms moe.dispatch_mode moe.redundant_experts", _EXPERT_PARALLEL),
    _Need("moe.deepep_num_sms moe.dispatch_mode", {Fact.DEEPEP: _HELD}),
    _Need("moe.dispatcher", {"parallel.ep": {1}}, {"local"}),
    _Need("moe.dispatcher", _EXPERT_PARALLEL, {"alltoall", "deepep"}),
    _Need("moe.dispatcher", {Fact.DEEPEP: _HELD}, {"deepep"}),
    # A step cannot be done again over stages.
    _Need("moe.dispatch_mode", {"parallel.pp": {1}}, {"static"}, remedy="use exact"),
    # Neither memory on the host nor graphs know of places for copies.
    _Need("moe.redundant_experts", {"optim.offload_fraction": {0}}),
    _Need("compile.cuda_graphs", {"moe.redundant_experts": {0}}, {True}),
    _Need("moe.static_capacity", {"moe.dispatch_mode": {"static"}}),
    _Need("moe.aux_loss_scope", {"moe.aux_loss_coef": _SOME}),  # unset: the model's own
    _Need("moe.bias_update_rate", {"moe.force_balanced": {False}}),
    # PEFT's files have adapters alone: base and adapters would choose other experts than the model.
    _Need("moe.bias_update_rate", {"lora.rank": {0}}, _SOME, _NO_PLACE_FOR_BIAS, "set it to 0"),
    # exact promises the bits of generation, which are a kernel's.
    _Need("kernels.attention", {Fact.CUDA: _HELD}, {"exact"}),
    # Tensor parallel ranks would cut rows and so change their scales; exact promises the bits of
    # generation, which computes in bf16.
    _Need("kernels.precision", {"parallel.tp": {1}}),
    _Need("kernels.precision", {"kernels.attention": _Other("exact")}),
    # Which has other weights, unless training's are in codes too.
    _Need(
        "rl.generator_dtype",
        {"kernels.attention": _Other("exact"), "lora.base_dtype": _NARROW},
        remedy="unset it, or use another kernels.attention",
    ),
    _Need(
        "log.project",
        {"log.reporters": _Other((), ("tensorboard",))},
        remedy="unset it, or set log.reporters wandb",
    ),
    _Need("log.profile_after", {"log.profile": _SOME}),
    # The checkpoints at the end and at a stop are waited for in any case.
    _Need("checkpoint.asynchronous", _SAVES | {"checkpoint.memory_interval": _SOME}),
    _Need("checkpoint.memory", {"checkpoint.memory_interval": _SOME}),
    _Need(
        "checkpoint.replicas",
        {"checkpoint.memory_interval": _SOME, "checkpoint.shared": {False}},
    ),
    # All ranks read their reference's file.
    _Need("train.objective", {"checkpoint.shared": {True}}, _WITH_REFERENCE),
    _Need("checkpoint.hf_dtype", {"checkpoint.save_hf": {True}}),
    _Need("rl.prompts rl.reward", {"rl.env": {"jsonl"}}),
    _Need("rl.clip_low rl.clip_high", _HAS_RATIO, why=", which has no ratio to clip"),
    _Need("rl.dual_clip", {"rl.policy": {"clip"}}),
    _Need("rl.dual_clip rl.clip_low rl.clip_high", {"rl.ratio": _Other("current")}),  # always 1
    _Need("rl.importance_high", {"rl.importance": _Other("none")}),
    _Need("rl.mask_low rl.mask_high", {"rl.mask": _Other("none")}),
    # Which has these weights in it already.
    _Need("rl.importance rl.importance_high", {"rl.ratio": _Other("rollout")}, _Other("none")),
    _Need("rl.kl rl.kl_in", {"rl.kl_coef": _SOME}),
    # In the loss its gradient is 0 in expectation.
    _Need("rl.kl", {"rl.kl_in": {"reward"}}, {"k1"}, remedy="use k2 or k3, or set rl.kl_in reward"),
    # The others compare within a group.
    _Need("rl.group_size", {"rl.advantage": ("reinforce_pp", "none")}, {1}, remedy="use 2 or more"),
    _Need("rl.advantage", {"rl.teacher": _SET}, {"none"}),
    _Need("rl.teacher_coef rl.teacher_top_k", {"rl.teacher": _SET}),
    _Need("rl.resample", {"rl.advantage": _OF_GROUPS}),
    _Need("rl.resample", {"rl.teacher": {None}}),  # from whom every group learns
    _Need("rl.supervised_lr", {"rl.supervised_steps": _SOME}),
    _Need("rl.eval_temperature", {"rl.eval_tasks": _SOME}),
    _Need("train.eval_interval", {"rl.eval_tasks": _SOME}, _SOME),
    _Need("launch.gpus launch.gpu", {Fact.DRY_RUN: _HELD}),
    _Need("launch.gpus launch.gpu", {"train.device": _Other("cpu")}),
)


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
    """Folder for metrics, checkpoints and the resolved config; unset: outputs/MODEL-DATA,
    after the names of model and data."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _recipe: str = PrivateAttr(default="")
    _unused: tuple[str, ...] = PrivateAttr(default=())
    """Beginnings of the names of settings that the command does not use."""

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
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
                If ``model.path`` is set and no recipe is named, a recipe for fine-tuning lies under
                all other sources: ``sft`` for records (by ``data.source`` or the suffix of
                ``data.path``), else ``continue``.
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
        config = config.fitting()
        config.check()
        if config.is_set("output_dir"):
            return config
        return config.filled({"output_dir": f"outputs/{_name_of_run(config)}"}, "model and data")

    def is_set(self, name: str) -> bool:
        """Return whether any source has set ``name``; else its value is the default."""
        section, _, key = name.rpartition(".")
        return key in (getattr(self, section) if section else self).model_fields_set

    def is_users(self, name: str) -> bool:
        """Return whether a user has set ``name``, and not only a recipe proposed it."""
        return not self._origins.get(name, Reader.PROPOSED).startswith(Reader.PROPOSED)

    def filled(self, values: Mapping[str, Any], origin: str) -> Self:
        """Return a copy with ``values``, by dotted name, whose origin is ``origin``."""
        mine = dict(leaves(self.model_dump(exclude_unset=True)))
        filled = Reader(type(self)).build({**mine, **values})
        filled._origins = self._origins | dict.fromkeys(values, origin)
        filled._recipe, filled._unused = self._recipe, self._unused
        return filled

    def proposed(self) -> Self:
        """Return a copy whose settings count as a recipe's, which :meth:`fitting` may drop."""
        copy = self.model_copy()
        copy._origins = {}
        return copy

    def fitting(self, facts: Mapping[str, str | None] | None = None) -> Self:
        """Return a copy in which no setting is without effect.

        Settings that only a recipe proposes go back to their defaults.

        ``facts``: the facts that are known; each maps to the reason why it does not hold, or None.

        Raises ConfigError: a setting that a user gave has no effect.
        """
        default, config = dict(leaves(Config().model_dump())), self
        while True:
            values = dict(leaves(config.model_dump()))
            found = next(_unmet(values, default, facts or {}, self._unused), None)
            if found is None:
                return config
            name, why, advised = found
            if self.is_users(name):
                raise ConfigError(name, f"{why}; {advised}")
            config = config.filled({name: default[name]}, f"as {why}")

    @property
    def origins(self) -> dict[str, str]:
        """The source of each setting that has one, by dotted name."""
        return dict(self._origins)

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested values that JSON can hold, for people and records to read.

        Passwords and keys in URLs are ``***``: give them again to start a run from these values.
        """
        return _without_secrets(self.model_dump(mode="json"))

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
        self.data.sources()
        self.checkpoint.check()
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


def _unmet(
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    facts: Mapping[str, str | None],
    unused: tuple[str, ...] = (),
) -> Iterator[tuple[str, str, str]]:
    """Yield settings, by dotted name, whose value is not their default and has no effect.

    With each comes the reason, and what a user can do. ``unused``: beginnings of the names of
    settings that neither names, since the command does not use them.
    """
    known = {**values, **facts}
    changed = [name for name, value in values.items() if value != defaults[name]]
    for need in _NEEDS:
        if any(other not in known for other in need.of):
            continue
        if any(known[other] in fitting for other, fitting in need.of.items()):
            continue
        fact = next((known[other] for other in need.of if other in facts), None)
        named = [other for other in need.of if not other.startswith(unused)] or need.of
        others = " and ".join(f"{other} {_shown(known[other])}" for other in named)
        for name in changed:
            if need.covers(name) and values[name] in need.when:
                why = f", but {fact}" if fact else f" contradicts {others}{need.why}"
                yield name, _shown(values[name]) + why, "unset it" if fact else need.advised(unused)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return repr(",".join(map(str, value)) if isinstance(value, tuple) else value)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_secrets(inner) for inner in value]
    return redacted(value) if isinstance(value, str) else value
