"""A table of what each setting needs in order to have an effect, and its check.

A setting that a user gives another value than its default is an error if it would have no effect;
one of a shipped recipe goes back to its default. Needs that other settings decide are checked when
settings are read; those that depend on the model, the device or the machine are facts, which become
known in a dry run and when a run starts.

Left out on purpose: the number of processes and micro-batches. One file of settings serves one
process and many, and what it says about sums over ranks holds for a single rank too.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple


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
_SEVERAL = _Other(1)
_HELD = {None}
"""A fact that holds; the value of one that does not is the reason."""


class _Need(NamedTuple):
    """Settings, and what they need to have an effect."""

    settings: str
    """Dotted names with spaces between, or ``section.*`` for the others of a section."""
    of: Mapping[str, Container[Any]]
    """Other settings or facts, and the values with which they satisfy the need; one is enough."""
    when: Container[Any] = _ANY
    """Values of the settings that have this need."""

    def covers(self, name: str) -> bool:
        """Return whether this is about the setting ``name``."""
        is_in_section = self.settings.endswith(".*") and name.startswith(self.settings[:-1])
        return name in self.settings.split() or (is_in_section and name not in self.of)


_RECORDS = {"records", "jsonl"}
_TEXTS = {"text", *_RECORDS}
_PREFERENCES = {"dpo", "ipo", "kto"}
_OF_TEXT = {"data.source": _Other("synthetic")}
_EVALUATED = {"data.eval_fraction": _SOME, "data.eval_path": _SET}

NEEDS: tuple[_Need, ...] = (
    _Need("model.*", {"model.path": {None}}),  # else its config.json decides
    _Need("data.path data.eval_path", {"data.source": _TEXTS}),
    _Need("data.text_field data.chat_template data.format", {"data.source": _RECORDS}),
    _Need("data.train_on data.split data.subset", {"data.source": _RECORDS}),
    _Need("data.text_field", {"data.format": {"auto", "text"}}),
    _Need("data.chat_template data.train_on", {"data.format": _Other("text")}),
    _Need("data.mix", {"data.source": _RECORDS}),
    _Need("data.eval_path", {"data.mix": (None,)}),  # each entry may have one
    _Need("data.eval_fraction", {"data.eval_path": {None}}),
    _Need("data.packing data.tokenizer", _OF_TEXT),
    _Need("data.streaming", {"data.source": _TEXTS}),
    _Need("train.objective", {"data.source": _RECORDS}, _PREFERENCES),
    _Need("train.objective", {"data.format": {"auto", "preference"}}, _PREFERENCES),
    # References of all rows are computed before the first step.
    _Need("train.objective", {"data.streaming": {"auto", "no"}}, _PREFERENCES),
    _Need("train.beta", {"train.objective": _PREFERENCES}),
    _Need("data.packing", {"train.objective": {"next_token"}}),  # a pair is a row
    _Need("data.workers", {"data.streaming": {"auto", "yes"}}),
    _Need("data.num_documents", {"data.source": {"synthetic"}}),
    _Need("train.eval_interval", _EVALUATED, _SOME),
    _Need("train.eval_rows", _EVALUATED),
    _Need("train.patience checkpoint.best", {"train.eval_interval": _SOME}),
    _Need("train.sample_tokens", _OF_TEXT, _SOME),
    _Need("train.sample_prompt", _OF_TEXT),
    _Need("train.sample_prompt", {"train.sample_tokens": _SOME}),
    _Need("eval.*", {"eval.tasks": _Other(())}),
    _Need("eval.tasks", _OF_TEXT),
    _Need("lora.*", {"lora.rank": _SOME}),
    _Need("lora.init", {"lora.path": {None}}),
    _Need("lora.layout", {"lora.save": {True}}),
    _Need("lora.layout", {Fact.EXPERTS: _HELD}),
    _Need("optim.min_lr_ratio", {"optim.schedule": {"cosine", "wsd"}}),
    _Need("optim.decay_fraction", {"optim.schedule": {"wsd"}}),
    # The update on the host knows no other dtypes.
    _Need("optim.offload_fraction", {"optim.state_dtype": {"float32"}}),
    _Need("optim.offload_fraction", {"optim.gradient_dtype": {"float32"}}),
    _Need("activation.save", {"activation.policy": {"selective"}}),
    _Need("activation.offload", {"activation.policy": {"none", "selective"}}),
    # A share that is named is copied on a CPU too, but there is no link whose rate gives auto.
    _Need("activation.offload", {Fact.CUDA: _HELD}, {"auto"}),
    _Need("parallel.pp_schedule parallel.pp_stages parallel.pp_split", {"parallel.pp": _SEVERAL}),
    _Need("moe.*", {Fact.EXPERTS: _HELD}),
    _Need("moe.deepep_num_sms moe.dispatch_mode", {"moe.dispatcher": {"auto", "deepep"}}),
    _Need("moe.deepep_num_sms moe.dispatch_mode", {"parallel.ep": _SEVERAL}),
    _Need("moe.deepep_num_sms moe.dispatch_mode", {Fact.DEEPEP: _HELD}),
    _Need("moe.dispatcher", {"parallel.ep": {1}}, {"local"}),
    _Need("moe.dispatcher", {"parallel.ep": _SEVERAL}, {"alltoall", "deepep"}),
    _Need("moe.dispatcher", {Fact.DEEPEP: _HELD}, {"deepep"}),
    _Need("moe.static_capacity", {"moe.dispatch_mode": {"static"}}),
    _Need("moe.aux_loss_scope", {"moe.aux_loss_coef": _SOME}),  # unset: the model's own
    _Need("moe.bias_update_rate", {"moe.force_balanced": {False}}),
    # exact promises the bits of generation, which are a kernel's.
    _Need("kernels.attention", {Fact.CUDA: _HELD}, {"exact"}),
    # Tensor parallel ranks would cut rows and so change their scales; adapters of experts lie
    # between products; exact promises the bits of generation, which computes in bf16.
    _Need("kernels.precision", {"parallel.tp": {1}}),
    _Need("kernels.precision", {"lora.rank": {0}}),
    _Need("kernels.precision", {"kernels.attention": _Other("exact")}),
    _Need("log.project", {"log.reporters": _Other((), ("tensorboard",))}),
    _Need("log.profile_after log.profile_as", {"log.profile": _SOME}),
    _Need("log.profile_as", {Fact.CUDA: _HELD}, {"nvtx"}),
    # The checkpoints at the end and at a stop are waited for in any case.
    _Need("checkpoint.asynchronous", {"checkpoint.interval": _SOME, "checkpoint.minutes": _SOME}),
    _Need("checkpoint.hf_dtype", {"checkpoint.save_hf": {True}}),
    _Need("rl.prompts rl.reward", {"rl.env": {"jsonl"}}),
    _Need("rl.dual_clip", {"rl.policy": {"clip"}}),
    _Need("rl.dual_clip rl.clip_low rl.clip_high", {"rl.ratio": _Other("current")}),  # always 1
    _Need("rl.importance_how rl.importance_high", {"rl.ratio": _Other("rollout")}),
    _Need("rl.importance_how rl.importance_high", {"rl.importance": _Other("none")}),
    _Need("rl.importance_low", {"rl.importance_how": {"mask"}}),
    _Need("rl.resample", {"rl.advantage": _Other("reinforce_pp")}),
    _Need("rl.supervised_lr", {"rl.supervised_steps": _SOME}),
    _Need("rl.eval_temperature", {"rl.eval_tasks": _SOME}),
    _Need("train.eval_interval", {"rl.eval_tasks": _SOME}, _SOME),
    _Need("launch.gpus launch.gpu", {Fact.DRY_RUN: _HELD}),
    _Need("launch.gpus launch.gpu", {"train.device": _Other("cpu")}),
    _Need("rl.routing_replay", {Fact.EXPERTS: _HELD}),
)


def unmet(
    values: Mapping[str, Any], defaults: Mapping[str, Any], facts: Mapping[str, str | None]
) -> Iterator[tuple[str, str]]:
    """Yield settings whose value is not their default and has no effect, and why.

    Args:
        values, defaults: of every setting, by dotted name.
        facts: those that are known, with the reason why one does not hold, or None.
    """
    known = {**values, **facts}
    changed = [name for name, value in values.items() if value != defaults[name]]
    for need in NEEDS:
        if any(other not in known for other in need.of):
            continue
        if any(known[other] in fitting for other, fitting in need.of.items()):
            continue
        fact = next((known[other] for other in need.of if other in facts), None)
        others = " and ".join(f"{other} {_shown(known[other])}" for other in need.of)
        for name in changed:
            if need.covers(name) and values[name] in need.when:
                why = f", but {fact}; unset it" if fact else f" contradicts {others}; unset one"
                yield name, _shown(values[name]) + why


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return repr(",".join(map(str, value)) if isinstance(value, tuple) else value)
