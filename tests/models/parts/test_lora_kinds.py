"""Adapters written by PEFT itself: each gives PEFT's logits, or is refused by a setting's name."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetrain.config import ConfigError
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.peft import attach_peft
from tests.lib.adapter_files import TOKENS_BS, save_adapters
from tests.lib.peft_adapters import ATTENTION, CASES, draw, load_bases, write

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return a dense and a routed model: folder, and ``transformers``' model."""
    return load_bases({name: tmp_path_factory.mktemp(name) for name in ("moe", "dense")})


def edit(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@torch.no_grad()
def compare(base, folder):
    """Compare our logits with PEFT's; return how much the adapter changes them."""
    hf, plain = base
    model = load_hf(hf, dtype=torch.float32)
    attach_peft(model, folder)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), folder)
    want = theirs(TOKENS_BS).logits
    torch.testing.assert_close(model(TOKENS_BS), want, rtol=0, atol=1e-5)
    return (want - plain(TOKENS_BS).logits).abs().max().item()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("base", "config"), [(b, c) for b, _, c in CASES], ids=[c[1] for c in CASES]
)
def test_plain_adapters_give_pefts_logits(base, config, bases, tmp_path):
    write(bases[base][1], tmp_path, config)
    assert compare(bases[base], tmp_path) > 0.001


REFUSED = {
    "bias": {"bias": "all"},
    "lora_bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["norm"]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [3, 4]},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "init_lora_weights is 'pissa_niter": {"init_lora_weights": "pissa_niter_2"},
    "init_lora_weights is 'olora": {"init_lora_weights": "olora"},
    "init_lora_weights is 'mica": {"init_lora_weights": "mica"},
    "use_bdlora": {
        "use_bdlora": {"target_modules_bd_a": ["o_proj"], "nblocks": 2, "match_strict": False}
    },
    "kasa_config": {"kasa_config": {"beta": 0.1}},
    "velora_config": {"velora_config": {"num_groups": 4}},
    "monteclora_config": {"monteclora_config": {}},
    "not targeted .*embed_tokens": {"target_modules": ["embed_tokens"]},
    "not targeted .*lm_head": {"target_modules": ["lm_head", "q_proj"]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("problem", "config"), REFUSED.items(), ids=list(REFUSED))
def test_unsupported_peft_adapters_are_refused_by_name(problem, config, bases, tmp_path):
    write(bases["moe"][1], tmp_path, {"target_modules": ATTENTION} | config)
    with pytest.raises(ConfigError, match=rf"lora\.path: .*{problem}"):
        attach_peft(load_hf(bases["moe"][0]), tmp_path)


KINDS = {
    "IA3Config": {"feedforward_modules": []},
    "AdaLoraConfig": {"total_step": 10},
    "VeraConfig": {"r": 4},
    "LoHaConfig": {},
    "LoKrConfig": {},
    "OFTConfig": {"oft_block_size": 4},
    "HRAConfig": {},
    "FourierFTConfig": {"n_frequency": 4},
    "LNTuningConfig": {"target_modules": ["norm"]},
    "TrainableTokensConfig": {"target_modules": ["embed_tokens"], "token_indices": [1]},
    "PromptTuningConfig": {"target_modules": None, "num_virtual_tokens": 2},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "config"), KINDS.items(), ids=list(KINDS))
def test_other_methods_are_refused_by_name(kind, config, bases, tmp_path):
    config = {"target_modules": ["q_proj"]} | config
    config = {key: value for key, value in config.items() if value is not None}
    write(bases["moe"][1], tmp_path, config, kind)
    with pytest.raises(ConfigError, match=r"peft_type is '\w+', but only LORA is supported"):
        attach_peft(load_hf(bases["moe"][0]), tmp_path)


@pytest.fixture(scope="module")
def written(bases, tmp_path_factory):
    """Write the files of a plain adapter."""
    folder = tmp_path_factory.mktemp("plain")
    write(bases["moe"][1], folder, {"target_modules": ATTENTION})
    return folder


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is .*, not supported"),
        ({"megatron_config": {"a": 1}}, "megatron_config is"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"arrow_config": {}}, "arrow_config is {}"),
        ({"alora_invocation_tokens": []}, r"alora_invocation_tokens is \[\]"),
        ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga'"),
        ({"layers_pattern": "h", "layers_to_transform": [0]}, "layers_pattern is 'h'"),
        ({"of_a_newer_peft": {"x": 1}}, "of_a_newer_peft is {'x': 1}, not supported"),
        ({"peft_type": "XLORA"}, "peft_type is 'XLORA'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"target_modules": ["q_proj"]}, "not targeted by its adapter_config.json, .*k_proj"),
        ({"target_modules": None}, "not targeted by its adapter_config.json"),
        ({"target_modules": 5}, "target_modules is 5, not a list of names"),
        ({"exclude_modules": ["o_proj"]}, "not targeted by its adapter_config.json, .*o_proj"),
        ({"layers_to_transform": [1]}, r"not targeted by its .*layers\.0"),
        ({"layers_to_transform": {"0": 1}}, r"layers_to_transform|not targeted"),
        ({"target_modules": "(a+)+("}, r"target_modules is .*in which .* is not a valid pattern"),
        ({"target_modules": "(.*_?)+.*" * 30 + "!"}, "not targeted by its adapter_config.json"),
        ({"r": 10**9}, "r is 1000000000, not a rank"),
        ({"r": True}, "r is True, not a rank"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000.*, not a number"),
        ({"lora_alpha": 1e39}, "lora_alpha is 1e.39, not a number"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern is .*, not patterns of names"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is .*, not patterns of names"),
        ({"alpha_pattern": {"[": 1}}, r"alpha_pattern is .*not a valid pattern"),
        ({"rank_pattern": {"q_proj": 4}}, r"q_proj.lora_A.weight has shape \[8, 16\], but"),
    ],
)
def test_settings_that_are_no_plain_loras(changes, problem, bases, written, tmp_path):
    for file in written.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit(tmp_path, **changes)
    with pytest.raises(ConfigError, match=problem):
        attach_peft(load_hf(bases["moe"][0]), tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_settings_of_a_newer_peft_that_are_off(bases, written, tmp_path):
    for file in written.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit(tmp_path, of_a_newer_peft=None, another=False, init_lora_weights="eva", eva_config={})
    assert compare(bases["moe"], tmp_path) > 0.01


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_what_peft_converted_to_plain_lora(init, bases, tmp_path):
    """The conversion holds the difference from the original base model, at twice the rank."""
    config = peft.LoraConfig(target_modules=ATTENTION, r=4, init_lora_weights=init)
    model = peft.get_peft_model(copy.deepcopy(bases["moe"][1]), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = init
    draw(model)
    initial = str(tmp_path / "initial")
    model.save_pretrained(tmp_path, path_initial_model_for_weight_conversion=initial)
    assert compare(bases["moe"], tmp_path) > 0.01
    with torch.no_grad():
        ours = load_hf(bases["moe"][0])
        attach_peft(ours, tmp_path)
        torch.testing.assert_close(ours(TOKENS_BS), model(TOKENS_BS).logits, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_an_experts_gate_and_up_may_have_an_a_each(bases, tmp_path):
    """PEFT wrote them so when every expert was its own module."""
    save_adapters(["lora.targets=*.experts", "lora.layout=per_expert"], tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    for number, (name, x) in enumerate(tensors.items()):
        if ".up_proj.lora_A" in name:
            x += number
    save_file(tensors, file)
    assert compare(bases["moe"], tmp_path) > 0.01


def test_a_file_without_adapters_is_refused(bases, written, tmp_path):
    (tmp_path / "adapter_config.json").write_bytes((written / "adapter_config.json").read_bytes())
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="holds no adapters"):
        attach_peft(load_hf(bases["moe"][0]), tmp_path)
