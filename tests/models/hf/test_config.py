"""Hugging Face configs in both directions, compared with transformers, and every bad one."""

import json

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from moetrain.config import ConfigError
from moetrain.models.families import FAMILIES, PRESETS
from moetrain.models.hf.config import architecture_from_hf, exported_config
from moetrain.models.rope_scaling import RopeScaling
from tests.lib.architectures import make_architecture
from tests.lib.hf_configs import CASES, SIZES, config_of

# The list is taken here, because other tests register their own families.
OURS = [
    name
    for name, family in FAMILIES.items()
    if family.architecture.__module__.startswith("moetrain.") and name in CONFIG_MAPPING
]


NEEDED = {
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "mistral3": {"text_config": {"model_type": "mistral4"}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "gemma4": {"text_config": {"hidden_size_per_layer_input": 0}},
}
"""Keys without a usable default in transformers."""


@pytest.mark.parametrize("keys", [{}, {"use_sliding_window": True}], ids=["none", "window"])
@pytest.mark.parametrize("family", OURS)
def test_omitted_keys_mean_the_defaults_of_transformers(family, keys):
    config = {"model_type": family, **NEEDED.get(family, {}), **keys}
    theirs = AutoConfig.for_model(**config).to_dict()
    assert architecture_from_hf(config) == architecture_from_hf(theirs)


@pytest.mark.parametrize("case", CASES)
def test_config_round_trip(case):
    arch = architecture_from_hf(config_of(case).to_dict())
    written = json.loads(json.dumps(exported_config(arch, None)))
    assert architecture_from_hf(written) == arch
    assert architecture_from_hf(AutoConfig.for_model(**written).to_dict()) == arch


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_can_be_saved(preset):
    arch = PRESETS[preset]
    assert architecture_from_hf(exported_config(arch, None)) == arch


# The keys of published files that describe the model, as far as they have been seen.
PUBLISHED = {
    "solar-open-100b": {
        "model_type": "solar_open",
        "partial_rotary_factor": 1.0,
        "hidden_size": 4096,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "vocab_size": 196608,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1280,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
        "max_position_embeddings": 131072,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 65536,
        },
    },
    "sarvam-30b": {
        "model_type": "sarvam_moe",
        "first_k_dense_replace": 1,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "max_window_layers": 19,
        "moe_intermediate_size": 1024,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 1024,
        "n_group": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 19,
        "num_key_value_heads": 4,
        "num_shared_experts": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 8000000,
        "routed_scaling_factor": 2.5,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "topk_group": 1,
        "use_bias": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "vocab_size": 262144,
    },
    "sarvam-105b": {
        "model_type": "sarvam_mla",
        "default_theta": 10000.0,
        "first_k_dense_replace": 1,
        "head_dim": 576,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "kv_lora_rank": 512,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 2048,
        "moe_router_enable_expert_bias": True,
        "num_attention_heads": 64,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 32,
        "num_shared_experts": 1,
        "q_head_dim": 192,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "deepseek_yarn",
        },
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.5,
        "vocab_size": 262144,
    },
    "minimax-m3": {
        "model_type": "minimax_m3_vl",
        "image_token_index": 200025,
        "vision_config": {},
        "text_config": {
            "vocab_size": 200064,
            "hidden_size": 6144,
            "intermediate_size": 3072,
            "dense_intermediate_size": 12288,
            "shared_intermediate_size": 3072,
            "num_hidden_layers": 60,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rotary_dim": 64,
            "partial_rotary_factor": 0.5,
            "rope_theta": 5000000,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-6,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "use_gemma_norm": True,
            "attention_output_gate": False,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "routed_scaling_factor": 2.0,
            "moe_layer_freq": [0] * 3 + [1] * 57,
            "hidden_act": "swigluoai",
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "num_mtp_modules": 7,
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_index_dim": 128,
                "sparse_num_index_heads": 4,
                "sparse_topk_blocks": 16,
                "sparse_block_size": 128,
                "sparse_score_type": "max",
                "sparse_init_block": 0,
                "sparse_local_block": 1,
                "sparse_disable_index_value": [0] * 3 + [1] * 57,
                "sparse_attention_freq": [0] * 3 + [1] * 57,
            },
        },
    },
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_files_describe_the_presets(preset):
    config = PUBLISHED[preset]
    theirs = AutoConfig.for_model(**config).to_dict()
    assert architecture_from_hf(config) == architecture_from_hf(theirs) == PRESETS[preset]


def test_config_values():
    arch = architecture_from_hf(config_of("qwen3 tied, biases, windows").to_dict())
    assert (arch.tie_embeddings, arch.qkv_bias, arch.out_bias) == (True, True, True)
    assert arch.sliding_windows == (None, 4, 4)
    arch = architecture_from_hf(config_of("qwen3_moe sparse step, windows").to_dict())
    assert arch.moe_layers == (False, True, False)
    assert arch.sliding_windows == (4, 4, 4)
    arch = architecture_from_hf(config_of("qwen3_moe dense layers, biases").to_dict())
    assert arch.moe_layers == (False, True, False)
    assert (arch.num_experts, arch.head_dim) == (5, 4)
    arch = architecture_from_hf(config_of("qwen2").to_dict())
    assert arch.sliding_windows == (None, 4, None)
    assert (arch.qkv_bias, arch.out_bias, arch.qk_norm) == (True, False, False)
    arch = architecture_from_hf(config_of("mixtral").to_dict())
    assert (arch.num_experts, arch.moe_intermediate_size, arch.norm_topk_prob) == (5, 16, True)
    assert (arch.rope_theta, arch.norm_eps) == (1e6, 1e-5)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "theta alone": {"rope_theta": 5e5},
    "old name": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "null": {"rope_theta": 5e5, "rope_scaling": None},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 16.0,
            "attention_factor": 1.5,
            "truncate": False,
        }
    },
    "yarn, few keys": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn, mscale": {
        "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 0.5},
        "original_max_position_embeddings": 8,
    },
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "original_max_position_embeddings": 32,
            **LLAMA3,
        }
    },
    "version 5": {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
    "version 5 llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e5, **LLAMA3}},
}


@pytest.mark.parametrize("family", ["llama", "mixtral"])  # two default thetas
@pytest.mark.parametrize("rope", ROPES)
def test_rope_is_read_as_transformers_reads_it(rope, family):
    config = {"model_type": family, **SIZES, **ROPES[rope]}
    arch = architecture_from_hf(config)
    assert arch == architecture_from_hf(AutoConfig.for_model(**config).to_dict())
    written = exported_config(arch, None)
    assert architecture_from_hf(AutoConfig.for_model(**written).to_dict()) == arch


def test_rope_values():
    config = {"model_type": "llama", **SIZES}
    yarn = architecture_from_hf({**config, **ROPES["yarn, few keys"]}).rope
    assert yarn == RopeScaling(kind="yarn", factor=4.0, original_max_positions=64)
    assert architecture_from_hf({**config, **ROPES["version 5"]}).rope_theta == 123.0


BAD_CONFIGS = {
    "model type": (
        {"model_type": "qwen4_moe"},
        "model_type 'qwen4_moe' is not supported; near it are qwen3_moe and .*families.md lists",
    ),
    "a distant model type": ({"model_type": "x"}, "'x' is not supported; docs/families.md lists"),
    "no model type": ({"model_type": None}, "model_type None"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "rope type": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    "rope key": ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq"),
    "rope value": ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor is 'two'"),
    "rope list": ({"rope_scaling": [1]}, "expected an object"),
    "rope by layer": ({"rope_parameters": {"full_attention": {}}}, "between layer types"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    "text for a number": ({"hidden_size": "big"}, "hidden_size is 'big'"),
    "bool for a number": ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    "heads": ({"num_key_value_heads": 4}, "heads 6 is not a multiple of num_key_value_heads 4"),
    "layer type": ({"layer_types": ["full_attention", "x", "y"]}, "layer_types x, y"),
    "too few layer types": ({"layer_types": ["full_attention"]}, "has 1 entries"),
    "no window": ({"layer_types": ["sliding_attention"] * 3}, "no sliding_window is in use"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config(case):
    change, message = BAD_CONFIGS[case]
    with pytest.raises(ConfigError, match=message) as caught:
        architecture_from_hf({"model_type": "qwen3", **SIZES, **change})
    assert caught.value.field == "model.path"
    assert "\n" not in str(caught.value)


def test_config_that_a_format_cannot_express_is_an_error():
    arch = architecture_from_hf({"model_type": "llama", **SIZES})
    for change in ({"qk_norm": True}, {"qkv_bias": True}, {"sliding_windows": (4, 4, 4)}):
        with pytest.raises(ValueError, match=rf"llama.*cannot express .*{next(iter(change))}"):
            exported_config(make_architecture(**{**arch.model_dump(), **change}), None)
