"""The coefficient of the routers' load-balancing loss, and the log line that names its source.

With the right coefficient the gradient norm equals that of transformers' own model, which adds the
loss only if config.json sets ``output_router_logits``.
"""

import functools

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from moetrain.config import Config
from moetrain.models.families import FAMILIES, PRESETS
from moetrain.models.hf.config import architecture_from_hf, exported_config
from moetrain.models.parts.multi_token import with_multi_token
from moetrain.rl.loop import RlTrainer
from moetrain.train.loop import Trainer
from moetrain.train.objectives import Pretraining, router_loss
from moetrain.train.session import resolve_run
from tests.lib.engines import make_batches, make_engine
from tests.lib.rl_runs import config_of as rl_config_of

COEFFICIENT = 0.9  # from the file of gpt-oss-20b
SIZES = {
    "vocab_size": 257,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "router_aux_loss_coef": COEFFICIENT,
    "pad_token_id": None,
}
EXPERTS = {
    "gpt_oss": "num_local_experts",
    "qwen3_moe": "num_experts",
    "mixtral": "num_local_experts",
}
FLAGS = {
    "unset": {},
    "false": {"output_router_logits": False},
    "true": {"output_router_logits": True},
}
WORDS = ["train.device=cpu", "train.dtype=float32", "compile.enabled=no", "data.tokenizer=byte"]
WORDS += [
    "train.global_batch_size=8",
    "train.micro_batch_size=8",
    "optim.max_grad_norm=1e9",
    "optim.warmup_steps=0",
]
WORDS += ["data.source=synthetic", "data.seq_len=12"]
DENSE = ["model.hidden_size=16", "model.num_layers=1", "model.vocab_size=257"]


@functools.cache
def theirs_of(family, flag):
    torch.manual_seed(0)
    more = {EXPERTS[family]: 4, **FLAGS[flag]}
    config = AutoConfig.for_model(family, **SIZES, **more)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return ``saved(family, flag)``: the folder of a model of transformers."""

    @functools.cache
    def save(family, flag):
        folder = tmp_path_factory.mktemp("models") / f"{family}-{flag}"
        theirs_of(family, flag).save_pretrained(folder)
        return folder

    return save


def their_norm(theirs, batch):
    """Return the norm of transformers' own gradient, for the loss of its own config."""
    theirs.zero_grad(set_to_none=True)
    tokens_BS, labels_BS = batch.tokens_BS, batch.targets_BS
    theirs(tokens_BS, labels=tokens_BS, shift_labels=labels_BS, use_cache=False).loss.backward()
    norms = [p.grad.norm() for p in theirs.parameters() if p.grad is not None]
    return torch.stack(norms).norm().item()


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("family", EXPERTS)
def test_gradient_norm_matches_transformers_by_its_output_router_logits(family, flag, saved):
    engine = make_engine(f"model.path={saved(family, flag)}", base=WORDS)
    [batch] = make_batches(0)
    engine.forward_backward([batch], Pretraining.of(engine.config, engine.arch))
    norm = engine.step(0.0).grad_norm.item()
    assert norm == pytest.approx(their_norm(theirs_of(family, flag), batch), rel=1e-4)


def test_every_family_whose_transformers_class_has_the_key_reads_and_writes_it():
    for name, family in FAMILIES.items():
        model_type = family.section[1] if family.section else name
        if model_type not in CONFIG_MAPPING:
            continue
        theirs = CONFIG_MAPPING[model_type]()
        has_loss = hasattr(theirs, "output_router_logits") and hasattr(
            theirs, "router_aux_loss_coef"
        )
        assert ("output_router_logits" in family.keys) == has_loss, name
        if has_loss:
            assert family.defaults["output_router_logits"] == theirs.output_router_logits
            assert family.defaults["router_aux_loss_coef"] == theirs.router_aux_loss_coef


IN_RL = "moe.aux_loss_coef is unset, which means 0 in reinforcement learning"
WITH_ADAPTERS = "moe.aux_loss_coef is unset, which means 0 with adapters (lora.rank)"
OFF = "moe.aux_loss_coef is unset, and the model's config.json does not set output_router_logits"
ON = "moe.aux_loss_coef is unset: router_aux_loss_coef of the model's config.json"
PRESET = "moe.aux_loss_coef is unset: router_aux_loss_coef of model.preset"
SET = "moe.aux_loss_coef: command line"
DECIDED = [
    ("true", [], False, COEFFICIENT, ON),
    ("unset", [], False, 0, OFF),
    ("true", [], True, 0, IN_RL),
    ("true", ["lora.rank=8"], False, 0, WITH_ADAPTERS),
    ("true", ["moe.aux_loss_coef=0.25", "lora.rank=8"], True, 0.25, SET),
    ("unset", ["moe.aux_loss_coef=0.25"], False, 0.25, SET),
    ("true", ["moe.aux_loss_coef=0"], False, 0, SET),
    (None, ["moe.aux_loss_coef=none"], False, 0.001, PRESET),
    (None, ["moe.aux_loss_coef=none"], True, 0, IN_RL),
]


@pytest.mark.parametrize(("flag", "words", "is_rl", "coefficient", "origin"), DECIDED)
def test_router_loss_says_what_decides_the_coefficient(
    flag, words, is_rl, coefficient, origin, saved
):
    model = "preset=qwen3-30b-a3b" if flag is None else f"path={saved('gpt_oss', flag)}"
    config, arch = resolve_run(Config.load(None, [*WORDS, f"model.{model}", *words], environ={}))
    assert router_loss(config, arch, is_rl=is_rl) == (coefficient, origin)


def test_each_run_says_the_coefficient_in_one_line(saved, tmp_path, capsys):
    words = [*WORDS, "train.steps=1", "log.tensorboard=no"]
    models = (f"model.path={saved('gpt_oss', 'true')}",), ("model.preset=qwen3-0.6b", *DENSE)
    for number, model in enumerate(models):
        Trainer(Config.load(None, [*words, *model, f"output_dir={tmp_path / str(number)}"])).fit()
    RlTrainer(rl_config_of(tmp_path / "rl")).fit()
    said = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert said.count("load-balancing loss: ") == 2  # the dense model has none
    assert f"load-balancing loss: coefficient 0.9 ({ON})" in said
    assert "load-balancing loss: coefficient 0.01 (moe.aux_loss_coef: recipe rl-sort)" in said


def test_a_checkpoint_is_of_the_same_model_whatever_its_files_ask_for():
    """Runs and jobs of versions without the note therefore resume, and exports keep the file."""
    sizes = {**SIZES, "model_type": "qwen3_moe", "num_experts": 4}
    asks = architecture_from_hf(sizes | {"output_router_logits": True})
    silent = architecture_from_hf(sizes)
    assert (asks.output_router_logits, silent.output_router_logits) == (True, False)
    assert asks.model_dump() == silent.model_dump()
    earlier = type(asks).model_validate(asks.model_dump())
    source = sizes | {"output_router_logits": True}
    assert exported_config(earlier, source) == exported_config(asks, source) == source
    longer = asks.model_copy(update={"max_positions": 128})
    assert exported_config(longer, source)["output_router_logits"] is True
    assert exported_config(asks, None)["output_router_logits"] is True
    preset = PRESETS["qwen3-next-80b-a3b"].model_copy(update={"output_router_logits": True})
    assert with_multi_token(preset, {}).output_router_logits is True
