"""What each setting needs in order to have an effect: one table, and its check.

The rule: a setting that a user gives (in a file, the environment or on the command line) another
value than its default is an error where nothing would come of it. A default asks for nothing. What
a shipped recipe proposes goes back to the default where the user's settings leave it without use.

What settings alone show is found when they are read. What depends on the model, the device or the
machine is a fact that is known later; its rows are looked at by a dry run, and when a run starts.

Left out on purpose: how many processes or micro-batches there are. One file of settings serves one
process and many, and what it says of sums over ranks holds where there is one rank.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

CUDA, DEEPEP, EXPERTS, DRY_RUN = "a CUDA device", "DeepEP", "experts", "--dry_run"
"""Facts: what a run may turn out to have, or not."""
FACTS = (CUDA, DEEPEP, EXPERTS, DRY_RUN)


class Other(Container[Any]):
    """Every value but some."""

    def __init__(self, *excluded: Any) -> None:
        self.excluded = excluded

    def __contains__(self, value: object) -> bool:
        return value not in self.excluded


ANY = Other()
SET = Other(None)
SOME = Other(0)
SEVERAL = Other(1)
HELD = {None}
"""Of a fact, whose value is why it does not hold."""


class Need(NamedTuple):
    """A setting, and what it needs."""

    setting: str
    """Its dotted name; ``section.*``: all of a section."""
    of: Mapping[str, Container[Any]]
    """Names of other settings or facts, and their values that will do. One of them suffices."""
    when: Container[Any] = ANY
    """The values of the setting that need it."""

    def covers(self, name: str) -> bool:
        """Whether this is about the setting ``name``."""
        is_in_section = self.setting.endswith(".*") and name.startswith(self.setting[:-1])
        return self.setting == name or (is_in_section and name not in self.of)


_TEXTS = {"text", "jsonl"}
_RATIOS = {"proximal", "rollout"}
_WEIGHTED = {"current", "proximal"}

NEEDS: tuple[Need, ...] = (
    Need("model.init_std", {"model.path": {None}}),
    Need("data.path", {"data.source": _TEXTS}),
    Need("data.eval_path", {"data.source": _TEXTS}),
    Need("data.text_field", {"data.source": {"jsonl"}}),
    Need("data.chat_template", {"data.source": {"jsonl"}}),
    Need("data.eval_fraction", {"data.eval_path": {None}}),
    Need("data.packing", {"data.source": Other("synthetic")}),
    Need("data.tokenizer", {"data.source": Other("synthetic")}),
    Need("data.num_documents", {"data.source": {"synthetic"}}),
    Need("train.eval_interval", {"data.eval_fraction": SOME, "data.eval_path": SET}, SOME),
    Need("train.eval_rows", {"data.eval_fraction": SOME, "data.eval_path": SET}),
    Need("train.sample_tokens", {"data.source": Other("synthetic")}, SOME),
    Need("train.sample_prompt", {"data.source": Other("synthetic")}),
    Need("train.sample_prompt", {"train.sample_tokens": SOME}),
    Need("lora.*", {"lora.rank": SOME}),
    Need("lora.init", {"lora.path": {None}}),
    Need("lora.layout", {"lora.save": {True}}),
    Need("lora.layout", {EXPERTS: HELD}),
    Need("optim.min_lr_ratio", {"optim.schedule": {"cosine", "wsd"}}),
    Need("optim.decay_fraction", {"optim.schedule": {"wsd"}}),
    Need("activation.save", {"activation.policy": {"selective"}}),
    Need("activation.offload", {"activation.policy": {"none", "selective"}}),
    # A share that is named is copied on a CPU too; of a link to the host there is none.
    Need("activation.offload", {CUDA: HELD}, {"auto"}),
    Need("parallel.pp_schedule", {"parallel.pp": SEVERAL}),
    Need("parallel.pp_stages", {"parallel.pp": SEVERAL}),
    Need("parallel.pp_split", {"parallel.pp": SEVERAL}),
    Need("moe.*", {EXPERTS: HELD}),
    Need("moe.deepep_num_sms", {"moe.dispatcher": {"auto", "deepep"}}),
    Need("moe.deepep_num_sms", {"parallel.ep": SEVERAL}),
    Need("moe.deepep_num_sms", {DEEPEP: HELD}),
    Need("moe.dispatcher", {"parallel.ep": {1}}, {"local"}),
    Need("moe.dispatcher", {"parallel.ep": SEVERAL}, {"alltoall", "deepep"}),
    Need("moe.dispatcher", {DEEPEP: HELD}, {"deepep"}),
    Need("moe.dispatch_mode", {"moe.dispatcher": {"auto", "deepep"}}),
    Need("moe.dispatch_mode", {"parallel.ep": SEVERAL}),
    Need("moe.dispatch_mode", {DEEPEP: HELD}),
    Need("moe.static_capacity", {"moe.dispatch_mode": {"static"}}),
    Need("moe.aux_loss_scope", {"moe.aux_loss_coef": SOME}),  # unset: the model's own
    Need("moe.bias_update_rate", {"moe.force_balanced": {False}}),
    # What it promises, the bits of generation, are those of a kernel.
    Need("kernels.attention", {CUDA: HELD}, {"exact"}),
    # Rows that tensor parallel ranks cut would have other scales; adapters of experts lie between
    # products; exact promises the bits of generation, which computes in bf16.
    Need("kernels.precision", {"parallel.tp": {1}}),
    Need("kernels.precision", {"lora.rank": {0}}),
    Need("kernels.precision", {"kernels.attention": Other("exact")}),
    Need("log.profile_after", {"log.profile": SOME}),
    Need("log.profile_as", {"log.profile": SOME}),
    Need("log.profile_as", {CUDA: HELD}, {"nvtx"}),
    # The one at the end, and when stopped, is waited for.
    Need("checkpoint.asynchronous", {"checkpoint.interval": SOME, "checkpoint.minutes": SOME}),
    Need("checkpoint.hf_dtype", {"checkpoint.save_hf": {True}}),
    Need("rl.prompts", {"rl.env": {"jsonl"}}),
    Need("rl.reward", {"rl.env": {"jsonl"}}),
    Need("rl.dual_clip", {"rl.policy": {"clip"}}),
    Need("rl.dual_clip", {"rl.ratio": _RATIOS}),
    Need("rl.clip_low", {"rl.ratio": _RATIOS}),  # the current one is 1
    Need("rl.clip_high", {"rl.ratio": _RATIOS}),
    Need("rl.importance_how", {"rl.ratio": _WEIGHTED}),
    Need("rl.importance_how", {"rl.importance": Other("none")}),
    Need("rl.importance_high", {"rl.ratio": _WEIGHTED}),
    Need("rl.importance_high", {"rl.importance": Other("none")}),
    Need("rl.importance_low", {"rl.importance_how": {"mask"}}),
    Need("rl.resample", {"rl.advantage": Other("reinforce_pp")}),
    Need("rl.supervised_lr", {"rl.supervised_steps": SOME}),
    Need("rl.eval_temperature", {"rl.eval_tasks": SOME}),
    Need("train.eval_interval", {"rl.eval_tasks": SOME}, SOME),
    Need("launch.gpus", {DRY_RUN: HELD}),
    Need("launch.gpu", {DRY_RUN: HELD}),
    Need("launch.gpus", {"train.device": Other("cpu")}),
    Need("launch.gpu", {"train.device": Other("cpu")}),
    Need("rl.routing_replay", {EXPERTS: HELD}),
)


def unmet(
    values: Mapping[str, Any], defaults: Mapping[str, Any], facts: Mapping[str, str | None]
) -> Iterator[tuple[str, str]]:
    """Settings with a value that is not their default and has no effect, and why.

    Args:
        values, defaults: of every setting, by dotted name.
        facts: those that are known; None: it holds, else why it does not. Rows of others are not
            looked at.
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
