"""Settings that contradict each other, or that would have no effect: one table.

    Need("model.rope", requires={"model.max_positions": Other(None)})

If a user gave a setting that a need refuses, the result is an error of one line. If only a recipe
gave the setting, it goes back to its default (:meth:`moetrain.config.Config.fitted`).
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import starmap
from typing import NamedTuple, cast

from moetrain.config.sources import is_tuple


class Fact(StrEnum):
    """Facts about the machine and the model, which are known once a run starts.

    The values are the words of messages.
    """

    CUDA = "a CUDA device"
    DEEPEP = "DeepEP"
    EXPERTS = "experts"
    LATENTS = "latent attention"
    DRY_RUN = "--dry_run"


class Other(Container[object]):
    """A container of every value except ``excluded``.

    With one value excluded the message advises another one. With several it cannot tell which
    values are left: give the :class:`Need` a ``remedy``, or list the values that fit in place of
    ``Other``.
    """

    def __init__(self, *excluded: object) -> None:
        self.excluded = excluded

    def __contains__(self, value: object) -> bool:
        return value not in self.excluded


_ANY = Other()
_SET = Other(None)
_SOME = Other(0)
_SOME_NAMES = Other(())
_SEVERAL = Other(1)
_HELD = {None}
"""The value of a fact that is true. The value of a false fact is a string, the reason."""


class Need(NamedTuple):
    """Settings, and the conditions under which they have an effect.

    Conditions on other settings are checked when settings are read. Conditions on facts about the
    model, the device or the machine are checked in a dry run and when a run starts, once the facts
    are known. Counts of processes and micro-batches are not checked here, since one file of
    settings must work with any counts.
    """

    settings: str
    """Dotted names with spaces between, or ``section.*`` for all settings of a section except those
    in ``requires``."""
    requires: Mapping[str, Container[object]]
    """Other settings or facts, each with the values that satisfy the need. One is enough."""
    when: Container[object] = _ANY
    """Values of the settings that have this need."""
    why: str = ""
    """The reason in words, for the message, where the values alone do not tell it."""
    remedy: str = ""
    """The advice of the message. Empty: the message advises to unset the setting, or to give
    another setting of ``requires`` one of its values."""

    def covers(self, name: str) -> bool:
        """Return whether the setting ``name`` has this need."""
        is_in_section = self.settings.endswith(".*") and name.startswith(self.settings[:-1])
        return name in self.settings.split() or (is_in_section and name not in self.requires)

    def advised(self, unused: tuple[str, ...] = ()) -> str:
        """Return the end of a message: the remedies, each of which is enough.

        Settings whose names begin with one of ``unused`` are not advised.
        """
        others = [(name, x) for name, x in self.requires.items() if not name.startswith(unused)]
        return self.remedy or ", or ".join(["unset it", *starmap(_satisfied, others)])


def _satisfied(name: str, fitting: Container[object]) -> str:
    """Return the advice that gives the setting ``name`` one of the values ``fitting``."""
    if isinstance(fitting, Other):
        if fitting.excluded == (None,):
            return f"set {name}"
        is_least = fitting.excluded in ((0,), (1,))
        return f"raise {name}" if is_least else f"use another {name}"
    values = [x for x in cast("Iterable[object]", fitting) if x not in (None, ())]
    if not values:
        return f"unset {name}"
    *words, last = (("no", "yes")[x] if isinstance(x, bool) else str(x) for x in values)
    return f"set {name} {', '.join(words)}{' or ' * bool(words)}{last}"


_RECORD_SOURCES = ("records", "jsonl")
_FILE_SOURCES = ("text", *_RECORD_SOURCES)
_WITH_REFERENCE = ("dpo", "ipo", "hinge", "kto")
_PREFERENCES = (*_WITH_REFERENCE, "simpo", "orpo")
_ON_PAIRS = ("dpo", "ipo", "hinge", "simpo", "orpo", "reward")
_ON_ANSWERS = (*_ON_PAIRS, "kto")
_EXPERT_PARALLEL = {"parallel.ep": _SEVERAL}
_OF_TEXT = {"data.source": Other("synthetic")}
_HAS_CHATS = {"rl.chat": {True}, "rl.env": Other("sort", "arithmetic")}
_OF_GROUPS = ("dr_grpo", "grpo", "rloo", "reinforce_pp_baseline")
_CLIPS = {"rl.policy": ("clip", "gspo", "cispo", "dppo_tv", "dppo_kl")}
_SAVES = {"checkpoint.interval": _SOME, "checkpoint.minutes": _SOME}
_NARROW = Other("auto")
_LEARNS_TOKENS = {
    "lora.rank": {0},
    "lora.modules_to_save": _SOME_NAMES,
    "lora.trainable_tokens": _SOME_NAMES,
}
# An entry of data.mix may have an eval_path of its own.
_EVALUATED = {"data.eval_fraction": _SOME, "data.eval_path": _SET, "data.mix": _SET}

NEEDS: tuple[Need, ...] = (
    Need(
        "model.preset model.hidden_size model.num_layers model.num_heads model.num_kv_heads "
        "model.head_dim model.num_experts model.num_experts_per_token model.intermediate_size "
        "model.moe_intermediate_size model.init_std",
        requires={"model.path": {None}},
        why="its config.json decides",
    ),
    Need("model.rope", requires={"model.max_positions": _SET}),
    Need("data.path data.eval_path data.streaming", requires={"data.source": _FILE_SOURCES}),
    Need("data.mix data.text_field data.format", requires={"data.source": _RECORD_SOURCES}),
    Need(
        "data.chat_template data.chat_template_kwargs",
        requires={"data.source": _RECORD_SOURCES} | _HAS_CHATS,
    ),
    Need("data.train_on data.split data.subset", requires={"data.source": _RECORD_SOURCES}),
    Need("data.bad_records data.overlong", requires={"data.source": _RECORD_SOURCES}),
    Need("data.overlong", requires={"data.packing": ("auto", "whole")}),
    Need("data.text_field", requires={"data.format": ("auto", "text")}),
    Need("data.chat_template data.train_on", requires={"data.format": Other("text")}),
    Need("data.chat_template_kwargs", requires={"data.format": Other("text")}),
    Need(
        "data.eval_path",
        requires={"data.mix": (None,)},
        why="each entry has an eval_path of its own",
    ),
    Need(
        "data.eval_fraction",
        requires={"data.eval_path": {None}},
        when=_SOME,
        why="the held-out rows are read from there",
    ),
    Need(
        "data.packing data.tokenizer train.sample_tokens train.sample_prompt",
        requires=_OF_TEXT,
        when=_SOME,
    ),
    Need("data.new_tokens", requires=_OF_TEXT),
    Need(
        "data.new_tokens",
        requires=_LEARNS_TOKENS,
        why="the rows of new tokens would not be trained",
        remedy="set lora.trainable_tokens to the same tokens",
    ),
    Need("train.objective", requires={"data.source": _RECORD_SOURCES}, when=_ON_ANSWERS),
    Need("train.objective", requires={"data.format": ("auto", "preference")}, when=_ON_PAIRS),
    Need(
        "train.objective",
        requires={"data.format": Other("text")},
        when={"kto"},
        why="texts have no label",
    ),
    Need(
        "train.objective",
        requires={"data.streaming": ("auto", "no")},
        when=_ON_ANSWERS,
        why="all rows must be tokenised before the first step",
    ),
    Need("train.beta", requires={"train.objective": _PREFERENCES}),
    Need("train.reward_centering", requires={"train.objective": {"reward"}}),
    Need(
        "train.sample_tokens train.sample_prompt",
        requires={"train.objective": Other("reward")},
        when=_SOME,
        why="a reward model writes no text",
    ),
    Need("train.desirable_weight train.undesirable_weight", requires={"train.objective": {"kto"}}),
    Need("train.simpo_gamma", requires={"train.objective": {"simpo"}}),
    Need("train.mtp_weight data.packing", requires={"train.objective": {"next_token"}}),
    Need(
        "train.mtp_weight",
        requires={"parallel.pp": {1}},
        why="the last stage holds no embedding, which the block reads",
    ),
    Need(
        "train.mtp_weight",
        requires={"lora.rank": {0}},
        why="PEFT adapts no multi-token prediction blocks",
    ),
    Need(
        "train.indexer",
        requires={"parallel.pp": {1}},
        why="the last stage has no losses of other stages' indexers",
    ),
    Need("train.indexer", requires={"lora.rank": {0}}, why="PEFT's files hold no indexers"),
    Need(
        "train.indexer",
        requires={"train.mtp_weight": {0}},
        when={"warmup"},
        why="everything but the indexers is frozen",
    ),
    Need("moe.redundant_experts", requires={"lora.rank": {0}}, why="adapters are not copied"),
    Need("data.workers", requires={"data.streaming": ("auto", "yes")}),
    Need("data.num_documents", requires={"data.source": {"synthetic"}}),
    Need("train.compare_replicas", requires={"parallel.dp_replicate": Other(1)}, when=_SOME),
    Need(
        "train.eval_interval train.eval_rows train.patience train.target_loss checkpoint.best",
        requires=_EVALUATED,
        when=_SOME,
        remedy="unset it, or raise data.eval_fraction, or set data.eval_path",
    ),
    Need(
        "train.patience train.target_loss checkpoint.best",
        requires={"train.eval_interval": _SOME},
    ),
    Need("train.sample_prompt", requires={"train.sample_tokens": _SOME}),
    Need("rl.generators rl.keep_cache", requires={"rl.placement": {"apart"}}),
    Need(
        "rl.keep_cache",
        requires={"rl.max_staleness": _SOME},
        why="no trajectory is under way when weights change",
    ),
    Need("rl.offload rl.sleep", requires={"rl.placement": {"together"}}),
    Need("lora.*", requires={"lora.rank": _SOME}),
    Need(
        "lora.use_dora",
        requires={"parallel.tp": {1}},
        why="DoRA needs the lengths of whole rows, and a rank has only parts of rows",
    ),
    Need(
        "lora.use_dora",
        requires={"lora.dropout": {0}},
        why="DoRA with dropout would take two more products, and is not implemented",
    ),
    Need(
        "lora.trainable_tokens",
        requires={"lora.modules_to_save": {()}},
        why="the module trains all rows already",
    ),
    Need(
        "lora.trainable_tokens",
        requires={"optim.offload_fraction": {0}},
        why="the gradients of offloaded parameters have all rows, not only these",
    ),
    Need("lora.init", requires={"lora.path": {None}}),
    Need("lora.layout", requires={"lora.save": {True}}),
    Need("lora.offload_experts", requires={"lora.base_dtype": _NARROW}),
    Need("lora.layout lora.offload_experts", requires={Fact.EXPERTS: _HELD}),
    Need("rl.routing_replay rl.generator_dtype", requires={Fact.EXPERTS: _HELD}),
    Need("optim.min_lr_ratio", requires={"optim.schedule": ("cosine", "wsd")}),
    Need("optim.decay_fraction", requires={"optim.schedule": {"wsd"}}),
    Need(
        "optim.muon_momentum optim.muon_iterations optim.muon_scale",
        requires={"optim.name": {"muon"}},
    ),
    Need("optim.muon_qk_clip", requires={"optim.name": {"muon"}}),
    Need(
        "optim.muon_qk_clip",
        requires={"kernels.attention": Other("flex")},
        why="QK-clip needs the boundaries of documents, which flex masks do not show",
    ),
    Need(
        "kernels.sparse_attention",
        requires={"optim.muon_qk_clip": {0}},
        when={"sparse"},
        why="QK-clip watches the scores of all visible keys",
    ),
    Need(
        "kernels.sparse_attention",
        requires={"lora.dropout": {0}},
        when={"sparse"},
        why="it multiplies latents by no weight, and so cannot drop their elements before one",
    ),
    Need(
        "kernels.sparse_attention",
        requires={"kernels.attention": Other("exact")},
        when={"sparse"},
        why="exact repeats the bits of generation, which expands keys and values",
    ),
    Need(
        "optim.name",
        requires={"lora.rank": {0}},
        when={"muon"},
        why="Muon does not train adapters",
        remedy="use adamw",
    ),
    Need(
        "optim.offload_fraction",
        requires={"optim.name": {"adamw"}},
        why="Muon needs whole matrices, and the host holds only parts of them",
    ),
    Need(
        "optim.state_dtype",
        requires={"optim.name": {"adamw"}},
        when={"float8"},
        remedy="use bfloat16",
    ),
    Need("optim.weight_dtype", requires={"optim.state_dtype": {"float8"}}, when={"bfloat16"}),
    Need(
        "optim.weight_dtype",
        requires={"lora.rank": {0}},
        when={"bfloat16"},
        why="adapters are kept in fp32",
    ),
    Need(
        "optim.offload_fraction",
        requires={"optim.state_dtype": {"float32"}},
        why="the update on the host is fp32",
    ),
    Need(
        "optim.offload_fraction",
        requires={"optim.gradient_dtype": {"float32"}},
        why="the update on the host is fp32",
    ),
    Need("activation.save", requires={"activation.policy": {"selective", "full", "auto"}}),
    Need("activation.blocks", requires={"activation.policy": {"selective", "full"}}),
    # A CUDA graph replays the work of a device, on memory at fixed addresses.
    Need("compile.cuda_graphs", requires={Fact.CUDA: _HELD}, when={True}),
    Need("compile.cuda_graphs", requires={"optim.offload_fraction": {0}}, when={True}),
    Need(
        "compile.cuda_graphs",
        requires={"parallel.reshard_after_forward": (None, False)},
        when={True},
    ),
    Need("compile.cuda_graphs", requires={"lora.dropout": {0}}, when={True}),
    *(
        Need("compile.cuda_graphs", requires={f"parallel.{x}": {1}}, when={True})
        for x in ("pp", "tp", "cp")
    ),
    Need(
        "compile.cuda_graphs",
        requires={"parallel.ep": {1}, "moe.dispatch_mode": {"static"}},
        when={True},
    ),
    Need("parallel.cp_method", requires={"parallel.cp": _SEVERAL}),
    Need(
        "parallel.pp_schedule parallel.pp_stages parallel.pp_split",
        requires={"parallel.pp": _SEVERAL},
    ),
    Need("moe.*", requires={Fact.EXPERTS: _HELD}),
    Need("moe.deepep_num_sms moe.dispatch_mode", requires={"moe.dispatcher": ("auto", "deepep")}),
    Need("moe.deepep_num_sms moe.dispatch_mode moe.redundant_experts", requires=_EXPERT_PARALLEL),
    Need("moe.deepep_num_sms moe.dispatch_mode", requires={Fact.DEEPEP: _HELD}),
    Need("moe.dispatcher", requires={"parallel.ep": {1}}, when={"local"}),
    Need("moe.dispatcher", requires=_EXPERT_PARALLEL, when={"alltoall", "deepep"}),
    Need("moe.dispatcher", requires={Fact.DEEPEP: _HELD}, when={"deepep"}),
    Need(
        "moe.dispatch_mode",
        requires={"parallel.pp": {1}},
        when={"static"},
        why="a step that overflows cannot be run again in a pipeline",
        remedy="use exact",
    ),
    Need(
        "moe.redundant_experts",
        requires={"optim.offload_fraction": {0}},
        why="offloaded weights have no slots for copies",
    ),
    Need(
        "compile.cuda_graphs",
        requires={"moe.redundant_experts": {0}},
        when={True},
        why="graphs do not support copies of experts",
    ),
    Need("moe.static_capacity", requires={"moe.dispatch_mode": {"static"}}),
    # An unset coefficient takes the model's own value, and satisfies the need.
    Need("moe.aux_loss_scope", requires={"moe.aux_loss_coef": _SOME}),
    Need("moe.bias_update_rate", requires={"moe.force_balanced": {False}}),
    # Without the bias, base and adapters would choose other experts than the trained model.
    Need(
        "moe.bias_update_rate",
        requires={"lora.rank": {0}},
        when=_SOME,
        why="it moves a selection bias, which an adapter's files do not hold",
        remedy="set it to 0",
    ),
    # ``exact`` promises the same bits as generation, and only a GPU kernel computes them.
    Need("kernels.attention", requires={Fact.CUDA: _HELD}, when={"exact"}),
    Need(
        "kernels.precision",
        requires={"parallel.tp": {1}},
        why="a rank holds parts of rows, and would scale each part by itself",
    ),
    Need(
        "kernels.precision",
        requires={"kernels.attention": Other("exact")},
        why="exact repeats the bits of generation, which computes in bf16",
    ),
    Need(
        "rl.generator_dtype",
        requires={"kernels.attention": Other("exact"), "lora.base_dtype": _NARROW},
        why="the generator would compute with other weights than the trainer",
        remedy="unset it, or use another kernels.attention",
    ),
    Need("rl.generator_cache", requires={Fact.LATENTS: _HELD}),
    Need(
        "rl.generator_cache",
        requires={"kernels.attention": Other("exact")},
        why="attention within latents has other bits than the trainer's",
        remedy="unset it, or use another kernels.attention",
    ),
    Need(
        "log.project",
        requires={"log.reporters": Other((), ("tensorboard",))},
        remedy="unset it, or set log.reporters wandb",
    ),
    Need("log.profile_after", requires={"log.profile": _SOME}),
    # Only saves during a run can be asynchronous: at its end and at a stop, a run waits for them.
    Need("checkpoint.asynchronous", requires=_SAVES | {"checkpoint.memory_interval": _SOME}),
    Need("checkpoint.memory", requires={"checkpoint.memory_interval": _SOME}),
    Need(
        "checkpoint.replicas",
        requires={"checkpoint.memory_interval": _SOME, "checkpoint.shared": {False}},
    ),
    Need(
        "train.objective",
        requires={"checkpoint.shared": {True}},
        when=_WITH_REFERENCE,
        why="all ranks read one file of the reference's log-probabilities",
    ),
    Need("checkpoint.hf_dtype", requires={"checkpoint.save_hf": {True}}),
    Need("rl.prompts rl.reward", requires={"rl.env": {"jsonl"}}),
    Need("rl.clip_low rl.clip_high", requires=_CLIPS, why="this loss clips no ratio"),
    Need("rl.dual_clip", requires={"rl.policy": {"clip"}}),
    Need(
        "rl.dual_clip rl.clip_low rl.clip_high",
        requires={"rl.ratio": Other("current")},
        why="the ratio is then always 1",
    ),
    Need("rl.importance_high", requires={"rl.importance": Other("none")}),
    Need("rl.mask_low rl.mask_high", requires={"rl.mask": Other("none")}),
    Need(
        "rl.importance rl.importance_high",
        requires={"rl.ratio": Other("rollout")},
        when=Other("none"),
        why="the ratio contains the importance weight already",
    ),
    Need("rl.kl rl.kl_in", requires={"rl.kl_coef": _SOME}),
    Need(
        "rl.kl",
        requires={"rl.kl_in": {"reward"}},
        when={"k1"},
        why="its gradient is 0 in expectation",
        remedy="use k2 or k3, or set rl.kl_in reward",
    ),
    Need(
        "rl.group_size",
        requires={"rl.advantage": ("reinforce_pp", "none")},
        when={1},
        why="it compares the trajectories of a group with each other",
        remedy="use 2 or more",
    ),
    Need("rl.advantage", requires={"rl.teacher": _SET}, when={"none"}),
    Need("rl.teacher_coef rl.teacher_top_k", requires={"rl.teacher": _SET}),
    Need("rl.resample", requires={"rl.advantage": _OF_GROUPS}),
    Need("rl.resample", requires={"rl.teacher": {None}}, why="every group learns from the teacher"),
    Need("rl.supervised_lr", requires={"rl.supervised_steps": _SOME}),
    Need("rl.eval_temperature", requires={"rl.eval_tasks": _SOME}),
    Need(
        "train.eval_interval train.patience checkpoint.best",
        requires={"rl.eval_tasks": _SOME},
        when=_SOME,
    ),
    Need("launch.gpus launch.gpu", requires={Fact.DRY_RUN: _HELD}),
    Need("launch.gpus launch.gpu", requires={"train.device": Other("cpu")}),
)


def unmet(
    values: Mapping[str, object],
    defaults: Mapping[str, object],
    facts: Mapping[str, str | None],
    unused: tuple[str, ...] = (),
) -> Iterator[tuple[str, str, str]]:
    """Yield the settings whose value is not their default and has no effect.

    Args:
        values, defaults: the values and the defaults of all settings, by dotted name.
        facts: the facts that are known; each maps to None if it holds, else to the reason why it
            does not.
        unused: beginnings of the names of settings that no message names, since the command does
            not use them.

    Yields the setting's dotted name, the reason, and what a user can do.
    """
    known = {**values, **facts}
    changed = [name for name, value in values.items() if value != defaults[name]]
    for need in NEEDS:
        if any(other not in known for other in need.requires):
            continue
        if any(known[other] in fitting for other, fitting in need.requires.items()):
            continue
        fact = next((known[other] for other in need.requires if other in facts), None)
        named = [other for other in need.requires if not other.startswith(unused)]
        named = named or [*need.requires]
        others = " and ".join(f"{other} {shown(known[other])}" for other in named)
        for name in changed:
            if need.covers(name) and values[name] in need.when:
                reason = f" ({need.why})" if need.why else ""
                problem = f", but {fact}" if fact else f" contradicts {others}{reason}"
                advice = "unset it" if fact else need.advised(unused)
                yield name, shown(values[name]) + problem, advice


def shown(value: object) -> str:
    """Return a setting's value as messages show it."""
    if value is None:
        return "none"
    return repr(",".join(map(str, value)) if is_tuple(value) else value)
