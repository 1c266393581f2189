"""``moetrain translate CONFIG``: turn the settings of an axolotl or TRL run into a recipe.

    moetrain translate axolotl.yml --out run.toml && moetrain train run.toml
    moetrain translate --gpus 8 -- trl dpo --model_name_or_path MODEL --dataset_name DATA

CONFIG is axolotl's YAML, a YAML file for ``trl --config`` (then ``--from`` names the trainer), or,
after ``--``, a whole command ``trl sft|dpo|kto|reward ...``. The recipe has every setting that is
needed to train as the other trainer does, including that trainer's defaults. Its comments list the
settings that mean something else here, and every setting that was left out, with the reason. The
recipe is checked like the settings of a run.

The defaults are those of axolotl 0.19 and TRL 1.16.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moetrain.cli.main import Parser, command
from moetrain.config import Config, ConfigError
from moetrain.config.elsewhere import settings_named
from moetrain.config.files import read_regular, write_atomically

_MOST_BYTES = 1 << 20
"""Largest file that is read: a configuration is small."""

_ARGUMENTS = {
    "gradient_accumulation_steps": 1,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
}
"""Defaults of transformers' TrainingArguments, which both trainers keep."""
_TRL = {
    **_ARGUMENTS,
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "save_steps": 500,
    "logging_steps": 10,
    "max_length": 1024,
    "gradient_checkpointing": True,
    "bf16": True,
    "dataset_train_split": "train",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
}
"""Defaults of TRL's trainers and of its ModelConfig."""
_AXOLOTL = {
    **_ARGUMENTS,
    "num_epochs": 1.0,
    "micro_batch_size": 1,
    "lr_scheduler": "cosine",
    "optimizer": "adamw_torch_fused",
    "sequence_len": 512,
    "gradient_checkpointing": False,
    "bf16": "auto",
    "output_dir": "./model-out",
    "lora_dropout": 0.0,
    "val_set_size": 0.0,
    "train_on_inputs": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "axolotl": _AXOLOTL,
    "trl-sft": {**_TRL, "learning_rate": 2e-5},
    "trl-dpo": {**_TRL, "learning_rate": 1e-6},
    "trl-kto": {**_TRL, "learning_rate": 1e-6},
    "trl-reward": {**_TRL, "learning_rate": 1e-4},
}
"""The defaults of each trainer that differ from moetrain's, or may."""
_AS = {
    "num_train_epochs": "num_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
    "model_name_or_path": "base_model",
    "max_length": "sequence_len",
    "max_seq_length": "sequence_len",
    "use_dora": "peft_use_dora",
    "use_rslora": "peft_use_rslora",
    "run_name": "wandb_name",
}
"""TRL's names, and axolotl's for the same. The translation below knows axolotl's alone."""

_OBJECTIVES = {"dpo", "ipo", "hinge", "kto", "simpo", "orpo"}
_BETAS = {"dpo": 0.1, "ipo": 0.1, "hinge": 0.1, "kto": 0.1, "simpo": 2.0, "orpo": 0.1}
_ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_ADAMW += ("paged_adamw", "paged_adamw_32bit")
_NARROW_ADAMW = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")
_ATTENTION = {"q_proj": "*.wq", "k_proj": "*.wk", "v_proj": "*.wv", "o_proj": "*.wo"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_FORMATS = {
    "alpaca": "alpaca",
    "chat_template": "auto",
    "sharegpt": "auto",
    "completion": "text",
    "chat_template.default": "auto",
    "chat_template.argilla": "auto",
    "chatml.intel": "preference",
    "chatml.argilla": "preference",
    "llama3.argilla": "preference",
}
"""The forms of axolotl's ``type`` that are forms here."""

_NEEDLESS = {
    "deepspeed": "FSDP shards whatever runs on several GPUs",
    "fsdp": "FSDP shards whatever runs on several GPUs",
    "fsdp_config": "FSDP shards whatever runs on several GPUs",
    "fsdp_version": "FSDP shards whatever runs on several GPUs",
    "ddp_timeout": "launch.hang_seconds ends ranks that hang",
    "flash_attention": "the fastest attention that fits is chosen",
    "sdp_attention": "the fastest attention that fits is chosen",
    "flex_attention": "the fastest attention that fits is chosen",
    "xformers_attention": "the fastest attention that fits is chosen",
    "attn_implementation": "the fastest attention that fits is chosen",
    "use_liger_kernel": "losses and norms are fused anyway",
    "torch_compile": "blocks are compiled on a GPU anyway",
    "tf32": "fp32 products are what train.dtype says",
    "group_by_length": "rows are packed, so no length is better than another",
    "pad_to_sequence_len": "rows are packed to data.seq_len",
    "eval_sample_packing": "rows are packed",
    "padding_free": "rows are packed",
    "pad_to_multiple_of": "rows are packed to data.seq_len",
    "save_safetensors": "files are safetensors",
    "save_only_model": "a checkpoint has the optimizer too, and output_dir/hf the model alone",
    "save_strategy": "checkpoint.interval counts steps",
    "dataset_prepared_path": "tokens are kept in data.cache_dir",
    "strict": "nothing unknown is accepted",
    "tokenizer_type": "the checkpoint says it",
    "model_type": "the checkpoint says it",
    "is_llama_derived_model": "the checkpoint says it",
    "trust_remote_code": "no code of a checkpoint is run",
    "dataset_num_proc": "data.workers chooses by the data",
    "dataset_processes": "data.workers chooses by the data",
    "dataloader_num_workers": "data.workers chooses by the data",
    "dataloader_pin_memory": "batches are pinned",
    "remove_unused_columns": "columns that are not read are listed",
    "lora_task_type": "train.objective says it",
    "lora_fan_in_fan_out": "no model here stores matrices so",
    "gradient_checkpointing_kwargs": "recomputation has no variants",
    "ddp_find_unused_parameters": "experts without tokens have zero gradients",
    "debug": "",
    "local_rank": "",
}
"""Settings that need no counterpart, and why."""


class Translation:
    """A run's settings there, and what has become of them.

    ``settings`` are moetrain's, ``notes`` say what means something else, and ``left`` what was left
    out. A setting that nothing has taken (:meth:`take`) is left out at the end.
    """

    def __init__(self, given: Mapping[str, Any], trainer: str) -> None:
        self.names: dict[str, str] = {}
        """The name of each setting as the run has it, by axolotl's name."""
        self.given: dict[str, Any] = {}
        for name, value in given.items():
            if value is None:
                continue
            key = _AS.get(name, name)
            if key in self.given and self.given[key] != value:
                problem = f"{_short(value)}, but {self.names[key]} is {_short(self.given[key])}"
                raise ConfigError(name, f"{problem}; leave one of them out")
            self.names[key], self.given[key] = name, value
        self.defaults = {_AS.get(name, name): value for name, value in DEFAULTS[trainer].items()}
        self.taken: set[str] = set()
        self.settings: dict[str, Any] = {}
        self.notes: list[str] = []
        self.left: list[str] = []

    def take(self, name: str) -> Any:
        """Return a setting's value there, its default's if it is not given, None if it has none."""
        self.taken.add(name)
        return self.given.get(name, self.defaults.get(name))

    def number(self, name: str) -> float | None:
        """Take a setting that is a number, perhaps written as text (YAML reads 2e-4 as one).

        Raises ConfigError: it is something else, such as auto, or not finite.
        """
        value = self.take(name)
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(self.called(name), f"{_short(value)}: not a number; give one")
        return number

    def count(self, name: str) -> int | None:
        """Take a setting that is a whole number; raises ConfigError as :meth:`number`."""
        value = self.number(name)
        if value is not None and not value.is_integer():
            raise ConfigError(self.called(name), f"{value:g}: not a whole number; give one")
        return None if value is None else int(value)

    def texts(self, name: str) -> list[str]:
        """Take a setting that is a text or a list of texts. Raises ConfigError: it is neither."""
        value = self.take(name)
        found = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise ConfigError(self.called(name), f"{_short(value)}: not a list of texts; give one")
        return found

    def sets(self, name: str) -> list[dict[str, Any]]:
        """Take a list of data sets, each an object or its path. Raises ConfigError: it is not."""
        value = self.take(name) or []
        found: list[dict[str, Any]] = []
        for each in value if isinstance(value, list) else [value]:
            entry: Any = {"path": each} if isinstance(each, str) else each
            if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
                problem = f"{_short(value)}: not a list of data sets with a path each"
                raise ConfigError(self.called(name), f"{problem}; give one")
            found.append({**entry})
        return found

    def called(self, name: str) -> str:
        """Return the name that the run has for a setting."""
        return self.names.get(name, name)

    def leave(self, name: str, why: str) -> None:
        """List a given setting as left out."""
        self.taken.add(name)
        if name in self.given:
            self.left.append(f"{self.called(name)} {_short(self.given[name])}: {why}")

    def leave_rest(self) -> None:
        """List every given setting that nothing has taken."""
        for name in self.given:
            if name in self.taken:
                continue
            if name in _NEEDLESS:
                self.leave(name, _NEEDLESS[name] or "it says nothing about a run here")
            elif here := settings_named(self.called(name)) or settings_named(name):
                self.leave(name, f"decide yourself: {' or '.join(here)} is like it")
            else:
                self.leave(name, "nothing here does the same")


def translate(given: Mapping[str, Any], trainer: str, gpus: int) -> Translation:
    """Translate the settings of a run of ``trainer`` on ``gpus`` GPUs.

    Raises ConfigError: the run cannot be said in settings here at all.
    """
    run = Translation(given, trainer)
    _model(run, trainer)
    _data(run, trainer)
    _objective(run, trainer)
    _batch(run, gpus)
    _optimizer(run)
    _adapters(run, trainer)
    _memory(run)
    _evaluation(run)
    run.leave_rest()
    return run


def _model(run: Translation, trainer: str) -> None:
    model = run.take("base_model")
    if not model:
        name = "base_model" if trainer == "axolotl" else "model_name_or_path"
        raise ConfigError(name, "the run names no model; give one")
    run.settings["model.path"] = model
    if out := run.take("output_dir"):
        run.settings["output_dir"] = out
    run.settings["train.seed"] = run.take("seed")
    is_half = run.take("bf16") or run.take("bfloat16")
    if run.take("fp16"):
        run.notes.append("fp16: bf16 here, which needs no scaling of the loss")
        is_half = True
    run.settings["train.dtype"] = (
        "auto" if is_half == "auto" else "bfloat16" if is_half else "float32"
    )
    if is_half and trainer == "axolotl" and not run.given.get("adapter"):
        run.notes.append(
            "bf16: weights are kept in fp32 here, and computed with in bf16; "
            "optim.weight_dtype bfloat16 keeps them in bf16, as axolotl does"
        )


def _data(run: Translation, trainer: str) -> None:
    sets = run.sets("datasets") + run.sets("pretraining_dataset")
    found = [_source(run, each) for each in sets]
    if name := run.take("dataset_name"):
        entry = {"path": name, "split": run.take("dataset_train_split")}
        if subset := run.take("dataset_config"):
            entry["subset"] = subset
        found.append(entry)
    if not found:
        name = "datasets" if trainer == "axolotl" else "dataset_name"
        raise ConfigError(name, "the run names no data; give some")
    if len(found) == 1:
        run.settings |= {f"data.{name}": value for name, value in found[0].items()}
    else:
        run.settings["data.mix"] = found
    run.settings["data.seq_len"] = run.take("sequence_len")
    is_packed = run.take("sample_packing") or run.take("packing")
    if not is_packed and not run.given.get("pretraining_dataset"):
        run.notes.append(
            "no packing: rows are always packed here, and documents do not see one another; a row "
            "has several records, so a step of as many rows sees more of them"
        )
    strategy = run.take("packing_strategy")
    if is_packed:
        run.settings["data.packing"] = "stream" if strategy == "wrapped" else "whole"
    template = run.take("chat_template") or run.take("chat_template_path")
    jinja = run.take("chat_template_jinja")
    if jinja:
        run.leave("chat_template_jinja", "write it to a file, and name that in data.chat_template")
    if template and template not in ("tokenizer_default", "jinja"):
        if str(template).endswith(".jinja"):
            run.settings["data.chat_template"] = template
        else:
            run.notes.append(
                f"chat_template {template}: the tokenizer's own template is used; for another, "
                "name its Jinja file in data.chat_template"
            )
    if run.take("train_on_inputs"):
        run.left.append(
            "train_on_inputs true: of chats and instructions only answers are learned here"
        )
    share = run.number("val_set_size")
    if held := [each["path"] for each in run.sets("test_datasets")]:
        run.settings["data.eval_path"] = held[0]
        if len(held) > 1:
            run.left.append(f"test_datasets {_short(held[1:])}: one set is held out")
    elif share is not None and share >= 1:
        run.leave("val_set_size", "a number of records; data.eval_fraction is a share of them")
    elif share is not None:
        run.settings["data.eval_fraction"] = share


def _source(run: Translation, given: dict[str, Any]) -> dict[str, Any]:
    """Translate one entry of axolotl's ``datasets``."""
    path, kind = given.pop("path", None), given.pop("ds_type", None)
    files = given.pop("data_files", None)
    if files is not None and (kind or path in ("json", "csv", "parquet", "text", "arrow")):
        path = files[0] if isinstance(files, list) and len(files) == 1 else files
        if isinstance(path, list):
            run.left.append(f"data_files {_short(path)}: give a folder or a pattern in data.path")
            path = path[0]
    entry: dict[str, Any] = {"path": path}
    for there, here in (("split", "split"), ("name", "subset")):
        if value := given.pop(there, None):
            entry[here], _, part = str(value).partition("[")
            if part:
                run.left.append(f"split {value} of {path}: a mixture's limit takes so many records")
    form = given.pop("type", None)
    text = given.pop("field", None) or given.pop("text_column", None)
    if (isinstance(form, str) and _FORMATS.get(form) == "text") or form == "pretrain":
        entry["format"] = "text"
        if text:
            entry["text_field"] = text
    elif isinstance(form, str) and form in _FORMATS:
        if _FORMATS[form] != "auto":
            entry["format"] = _FORMATS[form]
    elif form is not None:
        run.left.append(
            f"type {_short(form)} of {path}: forms are known by their fields; look at them by "
            "moetrain data PATH"
        )
    usual = {"field_messages": ("messages", "conversations"), "train_on_eos": ("turn", "all")}
    for name, value in given.items():
        if value is None or value in usual.get(name, ()):
            continue
        if name == "roles_to_train" and list(value) in (
            ["assistant"],
            ["gpt"],
            ["gpt", "assistant"],
        ):
            continue
        if name == "message_property_mappings":
            continue  # the names of roles and contents are known
        run.left.append(f"{name} {_short(value)} of {path}: look at it by moetrain data PATH")
    return entry


def _objective(run: Translation, trainer: str) -> None:
    kind = trainer.removeprefix("trl-")
    loss = run.take("loss_type")
    if trainer == "axolotl":
        kind = str(run.take("rl") or ("reward" if run.take("reward_model") else "sft"))
    run.taken |= {"rl", "reward_model"}
    if kind == "sft":
        if loss not in (None, "nll"):
            run.leave("loss_type", "the loss of next tokens has no variants")
        return
    loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
    if kind == "dpo" and loss in ("ipo", "hinge", "sigmoid", None):
        kind = loss if loss in ("ipo", "hinge") else "dpo"
    elif loss is not None and loss != kind:
        run.leave("loss_type", f"the loss of {kind} has no such variant here")
    if kind not in _OBJECTIVES | {"reward"}:
        raise ConfigError(
            "rl", f"{kind}: not an objective of moetrain train; see moetrain rl --help"
        )
    run.settings["train.objective"] = kind
    if kind == "reward":
        centre = run.take("center_rewards_coefficient")
        if centre:
            run.settings["train.reward_centering"] = centre
        return
    beta = run.given.get("rl_beta", run.given.get("beta", _BETAS[kind]))
    run.taken |= {"rl_beta", "beta"}
    run.settings["train.beta"] = beta
    if kind == "simpo" and (gamma := run.take("simpo_gamma")) is not None:
        run.settings["train.simpo_gamma"] = gamma
    if kind == "kto":
        for here, names in {
            "train.desirable_weight": ("kto_desirable_weight", "desirable_weight"),
            "train.undesirable_weight": ("kto_undesirable_weight", "undesirable_weight"),
        }.items():
            for name in names:
                if (value := run.take(name)) is not None:
                    run.settings[here] = value


def _batch(run: Translation, gpus: int) -> None:
    rows = run.count("micro_batch_size") or 1
    accumulated = run.count("gradient_accumulation_steps") or 1
    run.settings["train.micro_batch_size"] = rows
    run.settings["train.global_batch_size"] = rows * accumulated * gpus
    steps, epochs = run.count("max_steps"), run.number("num_epochs")
    if steps is not None and steps > 0:
        run.settings["train.steps"] = steps
        run.leave("num_epochs", "max_steps decides, as it does there")
    else:
        run.settings["train.epochs"] = epochs


def _optimizer(run: Translation) -> None:
    out = run.settings
    rate = run.number("learning_rate")
    if rate is None:
        raise ConfigError("learning_rate", "the run has none; give one")
    out["optim.lr"] = rate
    name = str(run.take("optimizer"))
    if name in _NARROW_ADAMW:
        out["optim.state_dtype"] = "float8"
        run.notes.append(f"{name}: moments in 8 bits are float8 with scales here, in blocks of 32")
    elif name == "muon":
        out["optim.name"] = "muon"
    elif name not in _ADAMW:
        said = f"{run.called('optimizer')} {_short(name)}"
        run.left.append(f"{said}: AdamW is used; optim.name knows adamw and muon")
    for there, here in {
        "adam_beta1": "optim.beta1",
        "adam_beta2": "optim.beta2",
        "adam_epsilon": "optim.eps",
        "weight_decay": "optim.weight_decay",
        "max_grad_norm": "optim.max_grad_norm",
    }.items():
        if (value := run.number(there)) is not None:
            out[here] = value
    if not out.get("optim.max_grad_norm"):
        out.pop("optim.max_grad_norm", None)
        run.left.append("max_grad_norm 0: gradients are always clipped, here to 1.0")
    _schedule(run)


def _schedule(run: Translation) -> None:
    out, total = run.settings, run.settings.get("train.steps")
    steps, share = run.number("warmup_steps"), run.number("warmup_ratio")
    if steps is None and share is None:
        share = 0.03  # axolotl's; at most 100 steps
        run.notes.append("no warmup is given: 3 % of the steps, as there, but not at most 100")
    if steps is not None and 0 < steps < 1:
        steps, share = None, steps  # a share, since transformers 5
    if steps and total:
        share, steps = steps / total, None
    if share is not None and not steps:
        out["optim.warmup_fraction"] = share
    else:
        out["optim.warmup_steps"] = int(steps or 0)
    kind = str(run.take("lr_scheduler"))
    ratio = run.number("cosine_min_lr_ratio")
    if kind == "cosine":
        out["optim.schedule"], out["optim.min_lr_ratio"] = "cosine", ratio or 0.0
    elif kind in ("constant", "constant_with_warmup"):
        out["optim.schedule"] = "constant"
        if kind == "constant" and (steps or share):
            out.pop("optim.warmup_steps", None)
            out["optim.warmup_fraction"] = 0.0
    elif kind == "linear":
        out["optim.schedule"], out["optim.min_lr_ratio"] = "wsd", 0.0
        out["optim.decay_fraction"] = 1.0 - (share or 0.0)
        if steps:
            run.notes.append(
                "linear: optim.decay_fraction should be the share of steps after the warmup, which "
                "is not known before the data is; at 1.0 the rate falls a little earlier"
            )
    else:
        said = f"{run.called('lr_scheduler')} {_short(kind)}"
        run.left.append(f"{said}: cosine is used; see optim.schedule")
        out["optim.schedule"] = "cosine"


def _adapters(run: Translation, trainer: str) -> None:
    out, adapter = run.settings, run.take("adapter")
    names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear")
    names += ("lora_modules_to_save", "peft_use_dora", "peft_use_rslora", "use_peft")
    has_adapters = adapter in ("lora", "qlora") or bool(run.take("use_peft"))
    narrow = {4: run.take("load_in_4bit"), 8: run.take("load_in_8bit")}
    if adapter and not has_adapters:
        raise ConfigError("adapter", f"{adapter}: adapters here are LoRA; use lora or qlora")
    if not has_adapters:
        for name in (*names, "load_in_4bit", "load_in_8bit"):
            run.leave(name, "it needs adapters, which the run has not (adapter, use_peft)")
        return
    rank = run.count("lora_r")
    if rank is None:
        raise ConfigError("lora_r", "the run has adapters without a rank; give one")
    out["lora.rank"] = rank
    out["lora.alpha"] = run.number("lora_alpha") or 8.0
    out["lora.dropout"] = run.number("lora_dropout") or 0.0
    if narrow[4] or adapter == "qlora":
        out["lora.base_dtype"] = "nf4"
        if run.take("bnb_4bit_quant_type") not in (None, "nf4"):
            run.notes.append("bnb_4bit_quant_type: 4 bits are NF4 here; mxfp4 is another form")
    elif narrow[8]:
        out["lora.base_dtype"] = "float8"
        run.notes.append("load_in_8bit: 8 bits are MXFP8 here, and LLM.int8() there")
    if run.take("peft_use_dora"):
        out["lora.use_dora"] = True
    if run.take("peft_use_rslora"):
        out["lora.rs"] = True
    if saved := run.texts("lora_modules_to_save"):
        known = [x for x in saved if x in ("embed_tokens", "lm_head")]
        if known:
            out["lora.modules_to_save"] = known
        if odd := [x for x in saved if x not in known]:
            run.left.append(f"lora_modules_to_save {_short(odd)}: embed_tokens and lm_head can be")
    if folder := run.take("lora_model_dir"):
        out["lora.path"] = folder
    _targets(run, trainer)


def _targets(run: Translation, trainer: str) -> None:
    modules, is_linear = run.texts("lora_target_modules"), run.take("lora_target_linear")
    if is_linear or modules == ["all-linear"]:
        run.settings["lora.targets"] = ["auto"]
        run.notes.append(
            "all linear layers: auto is attention and MLPs, or the routed experts of a mixture, "
            "which are no linear layers there"
        )
        return
    if not modules:
        modules = ["q_proj", "v_proj"]
        run.notes.append("no target modules: q_proj and v_proj, PEFT's default for most families")
    found = [_ATTENTION[name] for name in modules if name in _ATTENTION]
    if len(found) == len(_ATTENTION):
        found = ["*.attn.*"]
    if mlp := [name for name in modules if name in _MLP]:
        found.append("*.mlp.*")
        if len(mlp) < len(_MLP):
            run.notes.append(f"{', '.join(mlp)}: a pattern stands for all matrices of an MLP")
    if odd := [name for name in modules if name not in (*_ATTENTION, *_MLP)]:
        run.left.append(
            f"lora_target_modules {_short(odd)}: see lora.targets for patterns of modules"
        )
    run.settings["lora.targets"] = found


def _memory(run: Translation) -> None:
    if run.take("gradient_checkpointing"):
        run.settings["activation.policy"] = "full"
        run.notes.append(
            "gradient_checkpointing: activation.policy auto recomputes as little as fits, and is "
            "faster where memory is left"
        )
    for there, here in {
        "tensor_parallel_size": "parallel.tp",
        "context_parallel_size": "parallel.cp",
        "expert_parallel_size": "parallel.ep",
    }.items():
        if (value := run.count(there)) and value > 1:
            run.settings[here] = value


def _evaluation(run: Translation) -> None:
    out = run.settings
    for there, here in {
        "eval_steps": "train.eval_interval",
        "save_steps": "checkpoint.interval",
        "logging_steps": "log.interval",
        "save_total_limit": "checkpoint.keep",
        "early_stopping_patience": "train.patience",
    }.items():
        value = run.number(there)
        if value is not None and 0 < value < 1:
            run.leave(there, f"a share of the steps; {here} counts steps")
        elif value is not None:
            out[here] = run.count(there)
    for name in ("eval_strategy", "evaluation_strategy"):
        if run.take(name) == "no":
            out["train.eval_interval"] = 0
    if run.take("load_best_model_at_end"):
        out["checkpoint.best"] = True
    reporters = [*run.texts("report_to")]
    if run.take("wandb_project"):
        out["log.project"] = run.given["wandb_project"]
        reporters.append("wandb")
    if "wandb" in reporters:
        out["log.reporters"] = ["wandb"]
    if odd := [x for x in reporters if x not in ("wandb", "tensorboard", "none")]:
        run.left.append(f"report_to {_short(odd)}: log.reporters knows tensorboard and wandb")
    if reporters == ["none"]:
        out["log.tensorboard"] = False
    out["checkpoint.save_hf"] = True


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- reading and printing ------------------------------------------------------------------------


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML (or JSON) file of settings.

    Raises ConfigError: the file cannot be read, or does not hold a mapping.
    """
    import yaml

    try:
        text = read_regular(path, _MOST_BYTES).decode()
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("CONFIG", f"{path} cannot be read as YAML: {reason}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError("CONFIG", f"{path} has no settings by name; give a YAML file of a run")
    return found


def read_words(words: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Read a command ``trl NAME --option value ...``; return its settings and the trainer.

    Raises ConfigError: it is another command.
    """
    names = [name.removeprefix("trl-") for name in DEFAULTS if name.startswith("trl-")]
    if len(words) < 2 or words[0] != "trl" or words[1] not in names:
        problem = f"{' '.join(words[:2]) or 'nothing'} after --"
        raise ConfigError("--", f"{problem}; give a command trl {'|'.join(names)} ...")
    found: dict[str, Any] = {}
    name = ""
    import yaml

    for word in words[2:]:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            is_no = name.startswith(("no_", "no-")) and not has_value
            name = name[3:] if is_no else name
            found[name.replace("-", "_")] = yaml.safe_load(value) if has_value else not is_no
        elif not name:
            raise ConfigError("--", f"{word} belongs to no option; options begin with --")
        else:
            key, value = name.replace("-", "_"), yaml.safe_load(word)
            old = found[key]
            found[key] = (
                value if old is True else [*(old if isinstance(old, list) else [old]), value]
            )
    return found, f"trl-{words[1]}"


def trainer_of(given: Mapping[str, Any]) -> str:
    """Return the trainer that a file's settings are of.

    Raises ConfigError: they do not say it.
    """
    if "base_model" in given:
        return "axolotl"
    names = ", ".join(DEFAULTS)
    raise ConfigError(
        "--from", f"the file does not say whose settings these are; give one of {names}"
    )


def as_toml(run: Translation, source: str) -> str:
    """Return the recipe, with what differs and what was left out as comments."""
    lines = [f"# Translated from {source} by moetrain translate."]
    for title, found in (("Means something else here", run.notes), ("Left out", run.left)):
        if found:
            lines += ["#", f"# {title}:", *(f"#   {line}" for line in found)]
    sections: dict[str, list[str]] = {"": []}
    for name, value in run.settings.items():
        section, _, key = name.rpartition(".")
        if key == "mix":
            continue
        sections.setdefault(section, []).append(f"{key} = {_toml(value)}")
    for section, rows in sections.items():
        if rows:
            lines += ["", f"[{section}]", *rows] if section else ["", *rows]
        if section == "data":
            for entry in run.settings.get("data.mix", []):
                rows = [f"{key} = {_toml(value)}" for key, value in entry.items()]
                lines += ["", "[[data.mix]]", *rows]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


@command
def main(argv: Sequence[str] | None) -> int:
    """Translate, check, and print the recipe."""
    words = list(argv or [])
    rest = words[words.index("--") + 1 :] if "--" in words else None
    parser = Parser("translate", __doc__)
    parser.prog = "moetrain translate"
    parser.add_argument(
        "config",
        metavar="CONFIG",
        type=Path,
        nargs="?",
        help="YAML file with the settings of a run",
    )
    parser.add_argument(
        "--from", dest="trainer", choices=[*DEFAULTS], help="trainer whose settings CONFIG has"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        help="number of GPUs of the run, which its batch size depends on; default 1",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.toml",
        help="file to write the recipe to; default standard output",
    )
    args: argparse.Namespace = parser.parse_args(words[: words.index("--")] if rest else words)
    if (args.config is None) == (rest is None):
        raise ConfigError("CONFIG", "give a YAML file, or a command after --")
    if args.gpus < 1:
        raise ConfigError("--gpus", f"{args.gpus}; give 1 or more")
    if rest is None:
        given, source = read_config(args.config), args.config.name
        trainer = args.trainer or trainer_of(given)
    else:
        (given, trainer), source = read_words(rest), " ".join(rest[:2])
        if file := given.pop("config", None):  # options of the command take precedence
            given = read_config(Path(file)) | given
    run = translate(given, trainer, args.gpus)
    nested: dict[str, Any] = {}
    for name, value in run.settings.items():
        section, _, key = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[key] = value
    Config.load(nested, environ={})
    text = as_toml(run, source)
    if args.out is None:
        print(text, end="")
        return 0
    try:
        write_atomically(args.out, lambda new: new.write_text(text, "utf-8"))
    except OSError as error:
        raise ConfigError("--out", f"{args.out} cannot be written: {error.strerror}") from None
    counts = f"{len(run.notes)} that mean something else here, {len(run.left)} left out"
    print(f"{args.out}; settings: {counts} (its comments list them)")
    return 0
