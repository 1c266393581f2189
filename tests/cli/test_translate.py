"""``moetrain translate``: runs of axolotl and TRL as recipes."""

import tomllib
from contextlib import suppress

import pytest
import torch

from moetrain.cli.translate import DEFAULTS, as_toml, main, read_words, translate
from moetrain.config import Config, ConfigError
from moetrain.optim.schedule import learning_rate

AXOLOTL = """
base_model: org/model
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
datasets:
  - path: json
    data_files: [mine.jsonl]
    type: alpaca
  - path: org/chats
    name: english
    type: chat_template
    field_messages: conversations
    roles_to_train: [assistant]
val_set_size: 0.05
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 2
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_ratio: 0.1
bf16: true
gradient_checkpointing: true
wandb_project: mine
deepspeed: zero3.json
loraplus_lr_ratio: 16
"""
BASE = {"base_model": "org/model", "datasets": [{"path": "org/data"}], "learning_rate": 1e-4}
ADAPTERS = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16}
TRL = "trl sft --model_name_or_path org/model --dataset_name org/data"


def recipe_of(capsys, *words):
    assert main([*words]) == 0
    text = capsys.readouterr().out
    return tomllib.loads(text), [line[4:] for line in text.splitlines() if line.startswith("#   ")]


def test_axolotls_yaml_becomes_a_recipe(capsys, tmp_path):
    path = tmp_path / "run.yml"
    path.write_text(AXOLOTL)
    found, comments = recipe_of(capsys, str(path), "--gpus", "4")
    assert found["model"] == {"path": "org/model"}
    assert found["data"] == {
        "seq_len": 2048,
        "packing": "whole",
        "eval_fraction": 0.05,
        "mix": [
            {"path": "mine.jsonl", "format": "alpaca"},
            {"path": "org/chats", "subset": "english"},
        ],
    }
    assert found["train"] == {
        "seed": 42,
        "dtype": "bfloat16",
        "micro_batch_size": 2,
        "global_batch_size": 32,
        "epochs": 2.0,
    }
    assert found["optim"] == {
        "lr": 2e-4,
        "state_dtype": "float8",
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "warmup_fraction": 0.1,
        "schedule": "cosine",
        "min_lr_ratio": 0.0,
    }
    assert found["lora"] == {
        "rank": 32,
        "alpha": 16.0,
        "dropout": 0.05,
        "base_dtype": "nf4",
        "targets": ["*.attn.*", "*.mlp.*"],
    }
    assert found["activation"] == {"policy": "full"}
    assert found["log"] == {"project": "mine", "reporters": ["wandb"]}
    assert found["output_dir"] == "./model-out"
    for said in ("deepspeed zero3.json: FSDP", "loraplus_lr_ratio 16: nothing here does the same"):
        assert any(line.startswith(said) for line in comments)
    # The recipe is one that a run reads.
    assert main([str(path), "--out", str(tmp_path / "run.toml")]) == 0
    assert "settings: 2 that mean something else here, 2 left out" in capsys.readouterr().out
    config = Config.load(tmp_path / "run.toml", environ={})
    assert (config.train.global_batch_size, config.train.epochs) == (8, 2.0)


def test_trls_defaults_are_written_out(capsys):
    """They are those of TRL 1.16's SFTConfig and ModelConfig."""
    found, comments = recipe_of(capsys, "--", *TRL.split())
    assert found["train"]["epochs"] == 3.0
    assert found["train"]["global_batch_size"] == 8
    assert found["train"]["dtype"] == "bfloat16"
    assert found["data"] == {"path": "org/data", "split": "train", "seq_len": 1024}
    optim = {
        "lr": 2e-5,
        "beta2": 0.999,
        "weight_decay": 0.0,
        "schedule": "wsd",
        "min_lr_ratio": 0.0,
    }
    assert optim.items() <= found["optim"].items()
    assert found["checkpoint"]["interval"] == 500
    assert "lora" not in found
    assert any(line.startswith("no packing") for line in comments)


@pytest.mark.parametrize(
    ("words", "section", "values"),
    [
        ("trl dpo --loss_type ipo --beta 0.2", "train", {"objective": "ipo", "beta": 0.2}),
        ("trl dpo --loss_type hinge", "train", {"objective": "hinge", "beta": 0.1}),
        ("trl kto --desirable_weight 2", "train", {"objective": "kto", "desirable_weight": 2}),
        ("trl reward", "train", {"objective": "reward"}),
        ("trl reward --center_rewards_coefficient 0.01", "train", {"reward_centering": 0.01}),
        ("trl sft --packing --packing_strategy wrapped", "data", {"packing": "stream"}),
        ("trl sft --use_peft", "lora", {"rank": 16, "alpha": 32.0, "targets": ["*.wq", "*.wv"]}),
        ("trl sft --no_gradient_checkpointing", "activation", None),
        ("trl sft --use_peft --load_in_8bit", "lora", {"base_dtype": "float8"}),
        ("trl sft --max_steps 50", "train", {"steps": 50}),
        ("trl sft --eval_strategy steps --eval_steps 5", "train", {"eval_interval": 5}),
        ("trl sft --report_to none", "log", {"tensorboard": False}),
        (
            "trl sft --lr_scheduler_type constant --warmup_steps 5",
            "optim",
            {"warmup_fraction": 0.0},
        ),
    ],
)
def test_options_of_trl(capsys, words, section, values):
    given = "--model_name_or_path org/model --dataset_name org/data"
    found, _ = recipe_of(capsys, "--", *words.split(), *given.split())
    if values is None:
        assert section not in found
    else:
        assert values.items() <= found[section].items()


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_the_learning_rate_is_that_of_transformers(capsys, kind):
    """The first steps of the warmup differ: the rate of step 0 is 0 there."""
    from transformers import get_scheduler

    total, warmup, peak = 100, 10, 1e-3
    words = f"{TRL} --max_steps {total} --warmup_steps {warmup} --learning_rate {peak}"
    found, _ = recipe_of(capsys, "--", *words.split(), "--lr_scheduler_type", kind)
    config = Config.load(found, environ={}).optim
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    expected = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    for step in range(total):
        found = learning_rate(step, total, config)
        if step >= warmup:
            assert found == pytest.approx(expected.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        expected.step()
        if step < warmup - 1:
            assert found == pytest.approx(expected.get_last_lr()[0], rel=1e-9)


SETTINGS = {
    "rl": "dpo",
    "rl_beta": 0.3,
    "output_dir": "elsewhere",
    "seed": 7,
    "bf16": False,
    "fp16": True,
    "chat_template": "chatml",
    "chat_template_jinja": "{{ messages }}",
    "train_on_inputs": True,
    "test_datasets": [{"path": "held.jsonl"}],
    "val_set_size": 100,
    "sample_packing": True,
    "max_steps": 10,
    "num_epochs": 5,
    "optimizer": "lion_8bit",
    "adam_beta1": 0.8,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.01,
    "max_grad_norm": 0.5,
    "lr_scheduler": "one_cycle",
    "cosine_min_lr_ratio": 0.1,
    "warmup_steps": 3,
    "warmup_ratio": 0.2,
    "load_in_8bit": True,
    "lora_r": 4,
    "lora_target_linear": True,
    "tensor_parallel_size": 2,
    "expert_parallel_size": 2,
    "eval_steps": 7,
    "save_steps": 0.25,
    "save_total_limit": 3,
    "evals_per_epoch": 4,
    "early_stopping_patience": 2,
    "load_best_model_at_end": True,
    "report_to": "trackio",
    "special_tokens": {"pad_token": "x"},
    "tokens": ["<a>"],
    "neftune_noise_alpha": 5,
    "fsdp_config": {"offload_params": True},
    "unfrozen_parameters": ["^lm_head"],
    "shuffle_merged_datasets": False,
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "dataset_prepared_path": "prepared",
    "resume_from_checkpoint": "folder",
    "excess_length_strategy": "drop",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_is_dropped_in_silence(name):
    """Each setting changes the recipe, or is listed with the reason."""
    given = {**BASE, "rl": "dpo"} if name == "rl_beta" else BASE
    before = as_toml(translate(given, "axolotl", 1), "x")
    assert as_toml(translate({**given, name: SETTINGS[name]}, "axolotl", 1), "x") != before


ODD = ["auto", "", [], {}, 3.5, True, -1, [1], {"a": 1}, [None], [{"path": None}], "9" * 400]


@pytest.mark.parametrize("name", [*SETTINGS, *BASE, *ADAPTERS, *DEFAULTS["axolotl"], "loss_type"])
def test_odd_values_are_translated_or_refused(name):
    """DeepSpeed's ``auto`` among them. Nothing else than a ConfigError is raised."""
    refused = 0
    for given in (BASE, {**BASE, **ADAPTERS}, {**BASE, "rl": "kto"}):
        for value in ODD:
            with suppress(ConfigError):
                as_toml(translate({**given, name: value}, "axolotl", 1), "x")
                continue
            refused += 1
    if name in ("micro_batch_size", "learning_rate", "datasets"):
        assert refused > 10


def test_lines_use_the_names_that_the_run_has():
    run = translate(
        {
            "model_name_or_path": "m",
            "dataset_name": "d",
            "optim": "lion_8bit",
            "lr_scheduler_type": "polynomial",
            "num_train_epochs": 2,
            "max_steps": 5,
        },
        "trl-sft",
        1,
    )
    said = [line.partition(" ")[0] for line in run.left]
    assert {"optim", "lr_scheduler_type", "num_train_epochs"} <= {*said}
    with pytest.raises(ConfigError, match=r"^per_device_train_batch_size: auto: not a number"):
        translate({**run.given, "per_device_train_batch_size": "auto"}, "trl-sft", 1)
    with pytest.raises(ConfigError, match=r"^max_seq_length: 9, but max_length is 8; leave one"):
        translate({"max_length": 8, "max_seq_length": 9}, "trl-sft", 1)


@pytest.mark.parametrize(
    "entry",
    [
        {"type": {"field_instruction": "q"}},
        {"type": "input_output"},
        {"split": "train[:5%]"},
        {"roles_to_train": ["user"]},
        {"train_on_eos": "last"},
        {"field_messages": "log"},
        {"shards": 8},
    ],
)
def test_what_is_not_known_of_a_data_set_is_listed(entry):
    given = {**BASE, "datasets": [{"path": "org/data", **entry}]}
    run = translate(given, "axolotl", 1)
    assert any(str(next(iter(entry))) in line and "org/data" in line for line in run.left)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({**BASE, "base_model": None}, r"^base_model: the run names no model"),
        ({**BASE, "datasets": None}, r"^datasets: the run names no data"),
        ({**BASE, "rl": "grpo"}, r"^rl: grpo: not an objective of moetrain train"),
        ({**BASE, "learning_rate": None}, r"^learning_rate: the run has none"),
        ({**BASE, "adapter": "llama-adapter"}, r"^adapter: llama-adapter: adapters here are LoRA"),
        ({**BASE, **ADAPTERS, "lora_r": None}, r"^lora_r: the run has adapters without a rank"),
    ],
)
def test_what_cannot_be_said_is_one_line(given, says):
    with pytest.raises(ConfigError, match=says):
        translate(given, "axolotl", 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "cannot be read as YAML"),
        ("- 1\n- 2\n", "has no settings by name"),
        ("model_name_or_path: x\n", "--from: the file does not say whose settings these are"),
    ],
)
def test_a_bad_file_is_one_line(capsys, tmp_path, text, says):
    path = tmp_path / "run.yml"
    path.write_text(text)
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_a_command_is_read_as_trl_reads_it():
    words = "trl sft --learning_rate 1e-5 --lora_target_modules q_proj v_proj --packing --eos=x"
    found, trainer = read_words(words.split())
    assert trainer == "trl-sft"
    assert found["lora_target_modules"] == ["q_proj", "v_proj"]
    assert (found["packing"], found["eos"]) == (True, "x")
    with pytest.raises(ConfigError, match=r"^--: accelerate launch after --; give a command trl"):
        read_words(["accelerate", "launch"])


def test_two_sources_or_none_are_refused(capsys, tmp_path):
    assert main([]) == 2
    assert main([str(tmp_path / "x.yml"), "--", *TRL.split()]) == 2
    assert main(["--gpus", "0", "--", *TRL.split()]) == 2
    assert "--gpus: 0; give 1 or more" in capsys.readouterr().err
