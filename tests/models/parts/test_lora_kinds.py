"""Adapters written by PEFT itself: each gives PEFT's logits, or is refused by a setting's name."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetrain.config import ConfigError
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.peft import attach_peft
from tests.lib.adapter_files import TOKENS_BS, save_adapters, save_base
from tests.lib.adapters import base_of

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
BOTH = ["embed_tokens", "lm_head"]
ROWS = {"embed_tokens": [1, 2], "lm_head": [5, 4, 3]}
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return a dense and a routed model: folder, and ``transformers``' model."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("moe", "dense")}
    for name, folder in folders.items():
        save_base(base_of(name), folder)
    load = transformers.AutoModelForCausalLM.from_pretrained
    return {n: (f, load(f, dtype=torch.float32)) for n, f in folders.items()}


def write(base, folder, config, kind="LoraConfig"):
    """Write an adapter by PEFT, with values that change results."""
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **config)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    draw(model)
    model.save_pretrained(folder)
    return model


def draw(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens")):
                x.copy_(0.3 * torch.randn(x.shape, generator=generator))


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


PLAIN = {
    "attention": {"target_modules": ATTENTION},
    "rslora": {"target_modules": ATTENTION, "use_rslora": True, "lora_alpha": 3},
    "float alpha": {"target_modules": ["q_proj"], "lora_alpha": 2.5},
    "odd rank": {"target_modules": ["o_proj"], "r": 3},
    "dropout": {"target_modules": ["o_proj"], "lora_dropout": 0.5},
    "alpha_pattern": {"target_modules": ATTENTION, "alpha_pattern": {"k_proj": 40, "q_proj": 1}},
    "rank_pattern": {"target_modules": ATTENTION, "rank_pattern": {"q_proj": 2, "o_proj": 11}},
    "patterns": {
        "target_modules": ATTENTION,
        "use_rslora": True,
        "rank_pattern": {"^model.layers.0.self_attn.q_proj": 16, r".*\.1\.self_attn\..*": 4},
        "alpha_pattern": {r"layers\.\d+\.self_attn\.(q|v)_proj": 30},
    },
    "regular expression": {"target_modules": r".*layers\.1\..*\.(q|v)_proj"},
    "layers_to_transform": {"target_modules": ATTENTION, "layers_to_transform": [1]},
    "layer 0": {"target_modules": ATTENTION, "layers_to_transform": 0},
    "layers_pattern": {
        "target_modules": ATTENTION,
        "layers_to_transform": [0],
        "layers_pattern": "layers",
    },
    "exclude_modules": {"target_modules": ATTENTION, "exclude_modules": ["k_proj"]},
    "exclude by expression": {"target_modules": ATTENTION, "exclude_modules": r".*\.0\..*"},
    "gaussian": {"target_modules": ATTENTION, "init_lora_weights": "gaussian"},
    "init false": {"target_modules": ATTENTION, "init_lora_weights": False},
    "orthogonal": {"target_modules": ATTENTION, "init_lora_weights": "orthogonal"},
    "fan_in_fan_out": {"target_modules": ATTENTION, "fan_in_fan_out": True},
    "ensure_weight_tying": {"target_modules": ATTENTION, "ensure_weight_tying": True},
    "head whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding whole": {"target_modules": ["q_proj"], "modules_to_save": ["model.embed_tokens"]},
    "dora": {"target_modules": ATTENTION, "use_dora": True, "rank_pattern": {"q_proj": 2}},
    "dora of rslora": {"target_modules": ["o_proj"], "use_dora": True, "use_rslora": True},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [7, 3, 11]},
    "rows of both": {"target_modules": ["q_proj"], "trainable_token_indices": ROWS},
    "both whole": {"target_modules": ["q_proj"], "modules_to_save": BOTH},
}
TIED = {"target_modules": ["q_proj"], "modules_to_save": BOTH[:1], "ensure_weight_tying": True}
DENSE = {
    "dora of the mlp": {"target_modules": ["up_proj"], "use_dora": True},
    "tied whole": TIED,
    "tied rows": {"target_modules": ["q_proj"], "trainable_token_indices": [7, 3]},
    "tied and named twice": TIED | {"modules_to_save": BOTH},
    "mlp": {"target_modules": MLP},
    "one of the mlp": {"target_modules": ["up_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "mlp rank_pattern": {"target_modules": MLP, "rank_pattern": {"up_proj": 2}},
}
EXPERTS = {
    "both": {"target_parameters": [DOWN, GATE_UP]},
    "gate_up": {"target_parameters": [GATE_UP]},
    "down": {"target_parameters": [DOWN], "r": 4},
    "router": {"target_parameters": ["mlp.gate.weight"]},
    "layer 1": {"target_parameters": [f"model.layers.1.{DOWN}"]},
    "pattern": {"target_parameters": [DOWN, GATE_UP], "rank_pattern": {"down_proj": 3}},
    "alpha": {"target_parameters": [DOWN, GATE_UP], "alpha_pattern": {".*gate_up_proj": 3}},
    "everything": {"target_modules": ATTENTION, "target_parameters": [DOWN, GATE_UP], "r": 5},
}
CASES = [
    *(("moe", name, config) for name, config in PLAIN.items()),
    *(("dense", name, config) for name, config in DENSE.items()),
    *(("moe", name, {"target_modules": []} | config) for name, config in EXPERTS.items()),
]


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
