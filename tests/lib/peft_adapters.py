"""Helpers of tests/models/parts/test_lora_kinds.py that other tests use too."""

import copy

import pytest
import torch

from tests.lib.adapter_files import save_base
from tests.lib.adapters import base_of

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
BOTH = ["embed_tokens", "lm_head"]
ROWS = {"embed_tokens": [1, 2], "lm_head": [5, 4, 3]}
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def load_bases(folders):
    """Write a dense and a routed model into ``folders``; return folder and model by name.

    The models are those of ``transformers``, in fp32.
    """
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
