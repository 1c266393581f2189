"""Cases of the families of mixtures of experts: transformers' models in odd geometries."""

import json
from copy import deepcopy

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

import tests.lib.step_reference  # noqa: F401 (registers the class of step3p5)
from moetrain.models.hf.config import architecture_from_hf

# transformers has no entry, and takes none for its own classes without exist_ok.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 259
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": None,  # the embedding of a padding token would get no gradient
}
GLM = {
    "head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "partial_rotary_factor": 0.5,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
}
DOTS = {
    "head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
}
WINDOW = {"sliding_window": 5}
ERNIE = {"head_dim": 12, "moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 2}
HUNYUAN = {"head_dim": 12, "num_experts": 6, "moe_topk": 2}
NTK = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
M3 = {
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 6,
    "dense_intermediate_size": 56,
    "shared_intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 10,
    "index_block_size": 2,  # so few that short documents are longer
    "index_topk_blocks": 2,
}
OLMOE = {"num_experts": 6, "num_experts_per_tok": 2}
FLEX_OLMO = {
    # Otherwise norms magnify results near zero, and with them rounding errors.
    "rms_norm_eps": 0.01,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
MINIMAX = {"head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 6}
LINEAR = {
    # The normalised result is near zero where queries are nearly orthogonal to their keys.
    "rms_norm_eps": 0.01,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
NEXT = {
    **LINEAR,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
GPT_OSS = {
    "head_dim": 12,
    "intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "rope_parameters": {**YARN, "truncate": False},
}
TURNS = ["sliding_attention", "full_attention"]
GEMMA = {
    "rms_norm_eps": 0.01,  # as in Flex-OLMo's case, which also has norms of results
    "head_dim": 8,
    "global_head_dim": 12,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "sliding_window": 5,
    "final_logit_softcapping": 3.0,
    "layer_types": TURNS[:1] * 2 + TURNS[1:],
}
SLIDING_ROPE = {"rope_type": "default", "rope_theta": 1e3}
FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e5}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
}
NO_LATENT_QUERIES = {"q_lora_rank": None}
STRETCHED = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
V3 = {
    **LATENT,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
V2 = {**LATENT, "first_k_dense_replace": 1, "n_shared_experts": 1}
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 3}
LITE = {**LATENT, "num_nextn_predict_layers": 0}
STATES = ["linear_attention", "full_attention"]
NEMOTRON = {
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"],
    "head_dim": 10,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 10,
    "chunk_size": 8,
    "layer_norm_epsilon": 0.01,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "moe_latent_size": 16,
    "routed_scaling_factor": 2.5,
}
MIXERS = NEMOTRON["layers_block_type"]
KIMI = {
    **{key: value for key, value in LATENT.items() if key != "n_routed_experts"},
    "rms_norm_eps": 0.01,  # as in LINEAR
    "q_lora_rank": None,
    "num_local_experts": 6,
    "linear_num_heads": 4,
    "linear_head_dim": 6,
    "layer_types": [STATES[0], STATES[1], STATES[0]],
    "bos_token_id": None,
    "eos_token_id": None,
}
LING = {
    **{key: value for key, value in KIMI.items() if not key.startswith("linear_")},
    "head_dim": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
QWEN2 = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
QWEN2_WINDOW = {**WINDOW, "use_sliding_window": True}
SOLAR = {
    "head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
}
HY = {
    "head_dim": 12,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
MELLUM = {
    "head_dim": 12,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "layer_types": TURNS + TURNS[:1],
}
MELLUM_YARN = {TURNS[1]: YARN, TURNS[0]: SLIDING_ROPE}
EXAONE = {
    "head_dim": 12,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
}
AXK1 = {key: value for key, value in V3.items() if key != "num_nextn_predict_layers"}
SARVAM = {
    "head_dim": 12,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
SARVAM_LATENT = {key: value for key, value in LATENT.items() if key != "n_routed_experts"}
SARVAM_LATENT |= {"num_experts": 6, "q_lora_rank": None}
AFMOE = {
    "rms_norm_eps": 0.01,  # as in Gemma's case, which also has norms of results
    "head_dim": 10,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "route_scale": 2.5,
    "mup_enabled": True,
    "sliding_window": 5,
    "layer_types": TURNS[:1] * 2 + TURNS[1:],
}
LAGUNA = {
    "head_dim": 12,
    "num_attention_heads_per_layer": [4, 6, 6],
    "layer_types": TURNS[1:] + TURNS[:1] * 2,
    "sliding_window": 5,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_routed_scaling_factor": 2.5,
}
LAGUNA_ROPES = {TURNS[1]: {**YARN, "partial_rotary_factor": 0.5}, TURNS[0]: SLIDING_ROPE}
STEP = {
    "rms_norm_eps": 0.01,  # as in Gemma's case
    "pad_token_id": 2,  # not in the tokens below; null is no id for this class
    "head_dim": 12,
    "num_sliding_attention_heads": 6,
    "layer_types": TURNS[1:] + TURNS[:1] * 2,
    "sliding_window": 5,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 24,
    "share_expert_dim": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_router_scaling_factor": 2.5,
    "swiglu_limits": [None, None, 0.3],
    "swiglu_limits_shared": [0.2, None, 0.4],
    "rope_parameters": {
        TURNS[1]: {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 1e5,
            "partial_rotary_factor": 0.5,
        },
        TURNS[0]: SLIDING_ROPE,
    },
}
MIMO = {
    "head_dim": 12,
    "v_head_dim": 8,
    "layer_types": TURNS[1:] + TURNS[:1] * 2,
    "sliding_window": 5,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
}
PARTIAL = {"partial_rotary_factor": 0.6}
EARLY = {"original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.7}
MISTRAL_ROPE = {**STRETCHED, **EARLY}
MISTRAL = {key: value for key, value in V3.items() if key != "num_nextn_predict_layers"}
LATE = {"llama_4_scaling_beta": 1.5}
MISTRAL |= {"first_k_dense_replace": 0, "rope_parameters": MISTRAL_ROPE}
GRANITE = {
    "intermediate_size": 24,
    "shared_intermediate_size": 20,
    "num_local_experts": 6,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.7,
}
HYBRID = {
    **GRANITE,
    "rms_norm_eps": 0.01,  # as in Nemotron's case, whose mixers also have norms of results
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_state": 10,
    "mamba_chunk_size": 8,
}
CONVOLVED = ["conv", "full_attention"]
LFM2 = {
    "layer_types": CONVOLVED + CONVOLVED[:1],
    "num_dense_layers": 1,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
SPARSE = {
    **LATENT,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 4,
    # With many heads, few scores are exactly zero. Transformers may take any of equal scores.
    "index_n_heads": 12,
    "index_head_dim": 10,
}
SHARED = ["full", "shared", "shared"]
# The key names the family and the oddity of this case.
# transformers drops in training, by a tenth if the keys are left out.
SEED = {"head_dim": 12, "attention_dropout": 0.0, "residual_dropout": 0.0}
SMOL = {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": False}
SMOL_WINDOW = {**SMOL, "use_sliding_window": True, "sliding_window": 5}
OLMO2 = {"rms_norm_eps": 0.01}  # as for FLEX_OLMO

CASES = {
    "glm4_moe": {**GLM, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe groups": {**GLM, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    "glm4_moe one kv head": {**GLM, "num_key_value_heads": 1, "head_dim": 4, "use_qk_norm": True},
    "glm4_moe two dense layers": {**GLM, "first_k_dense_replace": 2, "routed_scaling_factor": 1.0},
    "glm4_moe no dense layer": {**GLM, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    "glm4_moe not normalised": {**GLM, "norm_topk_prob": False, "num_experts_per_tok": 5},
    # With normalisation one expert's weight would be 1, and its gradient only rounding.
    "glm4_moe top-1": {**GLM, "num_experts_per_tok": 1, "norm_topk_prob": False},
    "glm4_moe every expert": {**GLM, "num_experts_per_tok": 6, "use_qk_norm": True},
    "glm4_moe quarter": {**GLM, "head_dim": 8, "partial_rotary_factor": 0.25},
    "glm4_moe whole heads": {**GLM, "head_dim": 10, "partial_rotary_factor": 1.0},
    "glm4_moe yarn": {**GLM, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    "glm4_moe as many kv heads": {**GLM, "num_key_value_heads": 4, "num_hidden_layers": 2},
    "dots1": DOTS,
    "dots1 groups": {**DOTS, "n_group": 3, "topk_group": 1, "n_shared_experts": 3},
    "dots1 windows": {**DOTS, **WINDOW, "max_window_layers": 1},
    "dots1 every window": {**DOTS, **WINDOW, "max_window_layers": 0, "attention_bias": True},
    "dots1 layer types": {
        **DOTS,
        **WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots1 not normalised": {**DOTS, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "dots1 no dense layer": {**DOTS, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    "dots1 two dense layers": {**DOTS, "first_k_dense_replace": 2, "num_key_value_heads": 4},
    "dots1 one kv head": {**DOTS, "num_key_value_heads": 1, "head_dim": 16},
    "dots1 many experts": {**DOTS, "n_routed_experts": 33, "num_experts_per_tok": 7},
    "dots1 every expert": {**DOTS, "num_experts_per_tok": 6},
    "dots1 yarn": {**DOTS, "rope_parameters": YARN},
    "ernie4_5_moe": {**ERNIE, "moe_num_shared_experts": 1},
    "ernie4_5_moe no shared expert": {**ERNIE, "moe_num_shared_experts": 0},
    "ernie4_5_moe untied": {**ERNIE, "tie_word_embeddings": False},
    "ernie4_5_moe interval": {**ERNIE, "moe_layer_interval": 2, "num_hidden_layers": 5},
    "ernie4_5_moe in the middle": {**ERNIE, "moe_layer_end_index": 1, "num_hidden_layers": 4},
    "ernie4_5_moe from the start": {**ERNIE, "moe_layer_start_index": 0, "moe_k": 3},
    "ernie4_5_moe least sum": {**ERNIE, "moe_norm_min": 0.6},
    "ernie4_5_moe every expert": {**ERNIE, "moe_k": 6, "num_key_value_heads": 4},
    "ernie4_5_moe many experts": {**ERNIE, "moe_num_experts": 31, "moe_k": 8},
    "ernie4_5_moe one kv head": {**ERNIE, "num_key_value_heads": 1, "head_dim": 4},
    "ernie4_5_moe three shared experts": {**ERNIE, "moe_num_shared_experts": 3, "head_dim": 6},
    "ernie4_5_moe two layers": {**ERNIE, "num_hidden_layers": 2, "moe_intermediate_size": 8},
    "hunyuan_v1_moe": {**HUNYUAN, "rope_parameters": NTK},
    "hunyuan_v1_moe plain": HUNYUAN,
    "hunyuan_v1_moe by layer": {**HUNYUAN, "moe_topk": [3, 3, 3]},
    "hunyuan_v1_moe biases": {**HUNYUAN, "attention_bias": True, "rope_parameters": NTK},
    "hunyuan_v1_moe tied": {**HUNYUAN, "tie_word_embeddings": True, "moe_topk": 4},
    "hunyuan_v1_moe one kv head": {**HUNYUAN, "num_key_value_heads": 1, "head_dim": 6},
    "hunyuan_v1_moe as many kv heads": {**HUNYUAN, "num_key_value_heads": 4},
    "hunyuan_v1_moe every expert": {**HUNYUAN, "moe_topk": 6},
    "hunyuan_v1_moe many experts": {**HUNYUAN, "num_experts": 33, "moe_topk": 9},
    "hunyuan_v1_moe little alpha": {**HUNYUAN, "rope_parameters": {**NTK, "alpha": 1.5}},
    "hunyuan_v1_moe linear": {
        **HUNYUAN,
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    },
    "hunyuan_v1_moe one layer": {**HUNYUAN, "num_hidden_layers": 1, "intermediate_size": 8},
    "olmoe": OLMOE,
    "olmoe normalised": {**OLMOE, "norm_topk_prob": True},
    "olmoe as many kv heads": {**OLMOE, "num_key_value_heads": 4},
    "olmoe one kv head": {**OLMOE, "num_key_value_heads": 1},
    "olmoe biases": {**OLMOE, "attention_bias": True},
    "olmoe tied": {**OLMOE, "tie_word_embeddings": True},
    "olmoe top-1": {**OLMOE, "num_experts_per_tok": 1},
    "olmoe every expert": {**OLMOE, "num_experts_per_tok": 6},
    "olmoe many experts": {**OLMOE, "num_experts": 37, "num_experts_per_tok": 8},
    "olmoe yarn": {**OLMOE, "rope_parameters": YARN},
    "olmoe two heads": {**OLMOE, "num_attention_heads": 2, "num_key_value_heads": 2},
    "olmoe one layer": {**OLMOE, "num_hidden_layers": 1, "intermediate_size": 8},
    "flex_olmo": FLEX_OLMO,
    "flex_olmo normalised": {**FLEX_OLMO, "norm_topk_prob": True},
    "flex_olmo as many kv heads": {**FLEX_OLMO, "num_key_value_heads": 4},
    "flex_olmo one kv head": {**FLEX_OLMO, "num_key_value_heads": 1},
    "flex_olmo biases": {**FLEX_OLMO, "attention_bias": True},
    "flex_olmo tied": {**FLEX_OLMO, "tie_word_embeddings": True},
    "flex_olmo top-1": {**FLEX_OLMO, "num_experts_per_tok": 1},
    "flex_olmo every expert": {**FLEX_OLMO, "num_experts_per_tok": 6},
    "flex_olmo many experts": {**FLEX_OLMO, "num_experts": 37, "num_experts_per_tok": 8},
    "flex_olmo yarn": {**FLEX_OLMO, "rope_parameters": YARN},
    "flex_olmo two heads": {**FLEX_OLMO, "num_attention_heads": 2, "num_key_value_heads": 2},
    "flex_olmo wide heads": {
        **FLEX_OLMO,
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    },
    "flex_olmo large epsilon": {**FLEX_OLMO, "rms_norm_eps": 0.1},
    "flex_olmo one layer": {**FLEX_OLMO, "num_hidden_layers": 1, "intermediate_size": 8},
    "minimax_m2": MINIMAX,
    "minimax_m2 factor": {**MINIMAX, "rotary_dim": None, "partial_rotary_factor": 0.5},
    "minimax_m2 two numbers": {**MINIMAX, "rotary_dim": 2},
    "minimax_m2 whole heads": {**MINIMAX, "rotary_dim": 12},
    "minimax_m2 one kv head": {**MINIMAX, "num_key_value_heads": 1},
    "minimax_m2 as many kv heads": {**MINIMAX, "num_key_value_heads": 4},
    "minimax_m2 tied": {**MINIMAX, "tie_word_embeddings": True},
    "minimax_m2 every expert": {**MINIMAX, "num_experts_per_tok": 6},
    "minimax_m2 many experts": {**MINIMAX, "num_local_experts": 35, "num_experts_per_tok": 8},
    "minimax_m2 two experts": {**MINIMAX, "num_local_experts": 2},
    "minimax_m2 wide heads": {**MINIMAX, "head_dim": 20, "rotary_dim": 10},
    "minimax_m2 one layer": {**MINIMAX, "num_hidden_layers": 1, "intermediate_size": 8},
    "gpt_oss": GPT_OSS,
    "gpt_oss often clamped": {**GPT_OSS, "swiglu_limit": 0.5, "swiglu_alpha": 2.5},
    "gpt_oss one kv head": {**GPT_OSS, "num_key_value_heads": 1, "head_dim": 4},
    "gpt_oss as many kv heads": {**GPT_OSS, "num_key_value_heads": 4},
    "gpt_oss every window": {**GPT_OSS, "layer_types": TURNS[:1] * 3, "sliding_window": 2},
    "gpt_oss no window": {**GPT_OSS, "layer_types": TURNS[1:] * 3},
    "gpt_oss turned about": {**GPT_OSS, "layer_types": TURNS[::-1] + TURNS[1:]},
    "gpt_oss no biases": {**GPT_OSS, "attention_bias": False},
    "gpt_oss two layers": {**GPT_OSS, "num_hidden_layers": 2, "num_local_experts": 2},
    "gpt_oss every expert": {**GPT_OSS, "num_experts_per_tok": 6},
    "gpt_oss many experts": {**GPT_OSS, "num_local_experts": 37, "num_experts_per_tok": 8},
    "gpt_oss tied": {**GPT_OSS, "tie_word_embeddings": True},
    "gpt_oss plain rotary": {
        **GPT_OSS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "gpt_oss yarn in whole pairs": {**GPT_OSS, "rope_parameters": YARN},
    "gpt_oss in mxfp4": {**GPT_OSS, "intermediate_size": 64},
    "gpt_oss one layer": {**GPT_OSS, "num_hidden_layers": 1, "intermediate_size": 8},
    "gemma4_text": GEMMA,
    "gemma4_text values": {**GEMMA, "attention_k_eq_v": False},
    "gemma4_text one kv head": {**GEMMA, "num_global_key_value_heads": 1},
    "gemma4_text as many kv heads": {**GEMMA, "num_key_value_heads": 4},
    "gemma4_text no window": {**GEMMA, "layer_types": TURNS[1:] * 3},
    "gemma4_text turns": {**GEMMA, "layer_types": TURNS * 2, "num_hidden_layers": 4},
    "gemma4_text one window at the end": {**GEMMA, "layer_types": TURNS[:1] * 3},
    "gemma4_text narrow windows": {**GEMMA, "sliding_window": 2, "global_head_dim": 4},
    "gemma4_text equal heads": {**GEMMA, "head_dim": 12, "num_global_key_value_heads": None},
    "gemma4_text other angles": {
        **GEMMA,
        "global_head_dim": 16,
        "rope_parameters": {
            TURNS[0]: SLIDING_ROPE,
            TURNS[1]: {**FULL_ROPE, "partial_rotary_factor": 0.5, "factor": 2.0},
        },
    },
    "gemma4_text plain angles": {
        **GEMMA,
        "rope_parameters": {TURNS[0]: {**FULL_ROPE, "rope_theta": 10.0}, TURNS[1]: SLIDING_ROPE},
    },
    "gemma4_text no cap": {**GEMMA, "final_logit_softcapping": None},
    "gemma4_text low cap": {**GEMMA, "final_logit_softcapping": 0.8},
    "gemma4_text untied": {**GEMMA, "tie_word_embeddings": False},
    "gemma4_text biases": {**GEMMA, "attention_bias": True},
    "gemma4_text every expert": {**GEMMA, "top_k_experts": 6},
    "gemma4_text many experts": {**GEMMA, "num_experts": 37, "top_k_experts": 8},
    "gemma4_text dense": {**GEMMA, "enable_moe_block": False},
    "gemma4_text six layers": {**GEMMA, "layer_types": None, "num_hidden_layers": 6},
    "gemma4_text one layer": {**GEMMA, "layer_types": TURNS[1:], "num_hidden_layers": 1},
    "qwen3_next": NEXT,
    "qwen3_next one head": {**NEXT, "linear_num_key_heads": 1, "linear_num_value_heads": 1},
    "qwen3_next as many key heads": {**NEXT, "linear_num_key_heads": 4},
    "qwen3_next eight to one": {**NEXT, "linear_num_key_heads": 1, "linear_num_value_heads": 8},
    "qwen3_next two taps": {**NEXT, "linear_conv_kernel_dim": 2},
    "qwen3_next narrow values": {**NEXT, "linear_value_head_dim": 2},
    "qwen3_next first layers dense": {**NEXT, "mlp_only_layers": [0, 1]},
    "qwen3_next every other": {**NEXT, "decoder_sparse_step": 2, "layer_types": STATES * 2},
    "qwen3_next no attention": {**NEXT, "layer_types": STATES[:1] * 2, "num_hidden_layers": 2},
    "qwen3_next no states": {**NEXT, "layer_types": STATES[1:] * 2, "num_hidden_layers": 2},
    "qwen3_next half rotary": {**NEXT, "partial_rotary_factor": 0.5, "attention_bias": True},
    "qwen3_next not normalised": {**NEXT, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "qwen3_5_moe_text": NEXT,
    "qwen3_5_moe_text tied": {**NEXT, "tie_word_embeddings": True},
    "qwen3_5_moe_text one head": {**NEXT, "linear_num_key_heads": 1, "linear_num_value_heads": 1},
    "qwen3_5_moe_text as many key heads": {**NEXT, "linear_num_key_heads": 4},
    "qwen3_5_moe_text two taps": {**NEXT, "linear_conv_kernel_dim": 2},
    "qwen3_5_moe_text wide keys": {**NEXT, "linear_key_head_dim": 20},
    "qwen3_5_moe_text no states": {**NEXT, "layer_types": STATES[1:] * 4},
    "qwen3_5_moe_text turned about": {**NEXT, "layer_types": STATES[::-1] * 2},
    "qwen3_5_moe_text every expert": {**NEXT, "num_experts_per_tok": 6},
    "qwen3_5_moe_text many experts": {**NEXT, "num_experts": 37, "num_experts_per_tok": 8},
    "qwen3_5_moe_text wide shared expert": {**NEXT, "shared_expert_intermediate_size": 56},
    "qwen3_5_moe_text one layer": {**NEXT, "layer_types": STATES[:1], "num_hidden_layers": 1},
    "qwen3_5_text": LINEAR,
    "qwen3_5_text tied": {**LINEAR, "tie_word_embeddings": True},
    "qwen3_5_text one head": {**LINEAR, "linear_num_key_heads": 1, "linear_num_value_heads": 1},
    "qwen3_5_text as many key heads": {**LINEAR, "linear_num_key_heads": 4},
    "qwen3_5_text three taps": {**LINEAR, "linear_conv_kernel_dim": 3},
    "qwen3_5_text wide keys": {**LINEAR, "linear_key_head_dim": 20},
    "qwen3_5_text no states": {**LINEAR, "layer_types": STATES[1:] * 4},
    "qwen3_5_text turned about": {**LINEAR, "layer_types": STATES[::-1] * 2},
    "qwen3_5_text biases": {**LINEAR, "attention_bias": True},
    "qwen3_5_text one kv head": {**LINEAR, "num_key_value_heads": 1},
    "qwen3_5_text narrow heads": {**LINEAR, "head_dim": 8},
    "qwen3_5_text one layer": {**LINEAR, "layer_types": STATES[:1], "num_hidden_layers": 1},
    "deepseek_v3": V3,
    "deepseek_v3 no latent queries": {**V3, **NO_LATENT_QUERIES, "rms_norm_eps": 1e-3},
    "deepseek_v3 groups": {**V3, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    "deepseek_v3 biases": {**V3, "attention_bias": True},
    "deepseek_v3 biases of keys": {**V3, **NO_LATENT_QUERIES, "attention_bias": True},
    "deepseek_v3 yarn": {**V3, "rope_parameters": STRETCHED},
    "deepseek_v3 yarn of other factors": {
        **V3,
        "rope_parameters": {**STRETCHED, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 1.0},
    },
    "deepseek_v3 plain yarn": {**V3, "rope_parameters": YARN},
    "deepseek_v3 halves": {**V3, "rope_interleave": False, "qk_rope_head_dim": 8},
    "deepseek_v3 wide values": {**V3, "v_head_dim": 26, "rms_norm_eps": 1e-2},
    "deepseek_v3 equal widths": {**V3, "v_head_dim": 16},
    "deepseek_v3 one pair": {**V3, "qk_rope_head_dim": 2, "qk_nope_head_dim": 3, "v_head_dim": 1},
    "deepseek_v3 no dense layer": {**V3, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    "deepseek_v3 two dense layers": {**V3, "first_k_dense_replace": 2, "num_attention_heads": 4},
    "deepseek_v3 not normalised": {**V3, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "deepseek_v3 many experts": {**V3, "n_routed_experts": 33, "num_experts_per_tok": 7},
    "deepseek_v3 one head": {**V3, "num_attention_heads": 1, "num_key_value_heads": 1},
    "deepseek_v2": V2,
    "deepseek_v2 no latent queries": {**V2, **NO_LATENT_QUERIES, "n_shared_experts": 2},
    "deepseek_v2 groups": {**V2, **GROUPED, "topk_group": 2, "routed_scaling_factor": 16.0},
    "deepseek_v2 one group": {**V2, **GROUPED, "topk_group": 1},
    "deepseek_v2 every group": {**V2, **GROUPED, "topk_group": 3, "num_experts_per_tok": 5},
    "deepseek_v2 groups without effect": {**V2, "n_group": 4, "topk_group": 1},
    "deepseek_v2 yarn": {**V2, "rope_parameters": {**STRETCHED, "mscale_all_dim": 0.707}},
    "deepseek_v2 biases": {**V2, "attention_bias": True, "rms_norm_eps": 1e-3},
    "deepseek_v2 tied": {**V2, "tie_word_embeddings": True, "first_k_dense_replace": 0},
    "deepseek_v2 wide values": {**V2, "v_head_dim": 22},
    "deepseek_v2 every expert": {**V2, "num_experts_per_tok": 6},
    "deepseek_v2 many experts": {**V2, "n_routed_experts": 33, "num_experts_per_tok": 7},
    "deepseek_v2 one layer": {**V2, "num_hidden_layers": 1, "first_k_dense_replace": 0},
    "glm4_moe_lite": LITE,
    "glm4_moe_lite layer types": {**LITE, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "glm4_moe_lite no dense layer": {**LITE, "mlp_layer_types": ["sparse"] * 3},
    "glm4_moe_lite equal widths": {**LITE, "v_head_dim": 16},
    "glm4_moe_lite no latent queries": {**LITE, **NO_LATENT_QUERIES},
    "glm4_moe_lite groups": {**LITE, "n_group": 2, "topk_group": 1},
    "glm4_moe_lite biases": {**LITE, "attention_bias": True},
    "glm4_moe_lite yarn": {**LITE, "rope_parameters": STRETCHED},
    "glm4_moe_lite halves": {**LITE, "rope_interleave": False},
    "glm4_moe_lite tied": {**LITE, "tie_word_embeddings": True},
    "glm4_moe_lite top-1": {**LITE, "num_experts_per_tok": 1, "norm_topk_prob": False},
    "glm4_moe_lite two shared experts": {**LITE, "n_shared_experts": 2, "rms_norm_eps": 1e-2},
    "glm4_moe_lite many experts": {**LITE, "n_routed_experts": 35, "num_experts_per_tok": 8},
    "nemotron_h": NEMOTRON,
    "nemotron_h no latent": {**NEMOTRON, "moe_latent_size": None},
    "nemotron_h one group": {**NEMOTRON, "n_groups": 1},
    "nemotron_h as many groups": {**NEMOTRON, "n_groups": 4},
    "nemotron_h eight to one": {**NEMOTRON, "mamba_num_heads": 8, "n_groups": 1},
    "nemotron_h no convolution bias": {**NEMOTRON, "use_conv_bias": False},
    "nemotron_h two taps": {**NEMOTRON, "conv_kernel": 2, "layers_block_type": MIXERS[:2]},
    "nemotron_h least steps": {**NEMOTRON, "time_step_min": 0.6},
    "nemotron_h wide state": {**NEMOTRON, "ssm_state_size": 40, "mamba_head_dim": 3},
    "nemotron_h groups": {**NEMOTRON, "n_group": 3, "topk_group": 2},
    "nemotron_h no states": {**NEMOTRON, "layers_block_type": MIXERS[1:4]},
    "nemotron_h no attention": {**NEMOTRON, "layers_block_type": MIXERS[:2] * 2},
    "nemotron_h no experts": {**NEMOTRON, "layers_block_type": MIXERS[2:5]},
    "nemotron_h only mamba": {**NEMOTRON, "layers_block_type": MIXERS[:1] * 2},
    "nemotron_h not normalised": {**NEMOTRON, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "nemotron_h every expert": {**NEMOTRON, "num_experts_per_tok": 6, "num_key_value_heads": 4},
    "nemotron_h many experts": {**NEMOTRON, "n_routed_experts": 37, "num_experts_per_tok": 8},
    "qwen2_moe": QWEN2,
    "qwen2_moe normalised": {**QWEN2, "norm_topk_prob": True},
    "qwen2_moe no biases": {**QWEN2, "qkv_bias": False},
    "qwen2_moe windows": {**QWEN2, **QWEN2_WINDOW},
    "qwen2_moe one window": {**QWEN2, **QWEN2_WINDOW, "max_window_layers": 2},
    "qwen2_moe no window": {**QWEN2, **QWEN2_WINDOW, "max_window_layers": 0},
    "qwen2_moe layer types": {**QWEN2, **QWEN2_WINDOW, "layer_types": TURNS[::-1] + TURNS[:1]},
    "qwen2_moe every other": {**QWEN2, "decoder_sparse_step": 2},
    "qwen2_moe dense layers": {**QWEN2, **QWEN2_WINDOW, "mlp_only_layers": [0, 2]},
    "qwen2_moe no experts": {**QWEN2, "num_experts": 0},
    "qwen2_moe tied": {**QWEN2, "tie_word_embeddings": True},
    "qwen2_moe one kv head": {**QWEN2, "num_key_value_heads": 1},
    "qwen2_moe as many kv heads": {**QWEN2, "num_key_value_heads": 4},
    "qwen2_moe wide heads": {**QWEN2, "head_dim": 12},
    "qwen2_moe top-1": {**QWEN2, "num_experts_per_tok": 1},
    "qwen2_moe every expert": {**QWEN2, "num_experts_per_tok": 6},
    "qwen2_moe many experts": {**QWEN2, "num_experts": 37, "num_experts_per_tok": 8},
    "qwen2_moe wide shared expert": {**QWEN2, "shared_expert_intermediate_size": 56},
    "qwen2_moe yarn": {**QWEN2, "rope_parameters": YARN},
    "qwen2_moe one layer": {**QWEN2, "num_hidden_layers": 1, "intermediate_size": 8},
    "solar_open": SOLAR,
    "solar_open groups": {**SOLAR, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    "solar_open biases": {**SOLAR, "attention_bias": True},
    "solar_open tied": {**SOLAR, "tie_word_embeddings": True},
    "solar_open one kv head": {**SOLAR, "num_key_value_heads": 1, "head_dim": 4},
    "solar_open as many kv heads": {**SOLAR, "num_key_value_heads": 4, "head_dim": 16},
    "solar_open not normalised": {**SOLAR, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "solar_open top-1": {**SOLAR, "num_experts_per_tok": 1, "norm_topk_prob": False},
    "solar_open every expert": {**SOLAR, "num_experts_per_tok": 6},
    "solar_open many experts": {**SOLAR, "n_routed_experts": 33, "num_experts_per_tok": 7},
    "solar_open yarn": {**SOLAR, "rope_parameters": YARN},
    "solar_open one layer": {**SOLAR, "num_hidden_layers": 1, "moe_intermediate_size": 8},
    "hy_v3": HY,
    "hy_v3 layer types": {**HY, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "hy_v3 no dense layer": {**HY, "mlp_layer_types": ["sparse"] * 3},
    "hy_v3 sums in the model's dtype": {**HY, "enable_moe_fp32_combine": False},
    "hy_v3 two shared experts": {**HY, "num_shared_experts": 2, "router_scaling_factor": 1.0},
    "hy_v3 biases": {**HY, "attention_bias": True},
    "hy_v3 tied": {**HY, "tie_word_embeddings": True},
    "hy_v3 one kv head": {**HY, "num_key_value_heads": 1, "head_dim": 4},
    "hy_v3 as many kv heads": {**HY, "num_key_value_heads": 4},
    "hy_v3 every expert": {**HY, "num_experts_per_tok": 6},
    "hy_v3 many experts": {**HY, "num_experts": 35, "num_experts_per_tok": 8},
    "hy_v3 yarn": {**HY, "rope_parameters": YARN},
    "hy_v3 one layer": {**HY, "num_hidden_layers": 1, "mlp_layer_types": ["sparse"]},
    "mellum": MELLUM,
    "mellum yarn": {**MELLUM, "rope_parameters": MELLUM_YARN},
    "mellum yarn in windows": {
        **MELLUM,
        "rope_parameters": {TURNS[0]: YARN, TURNS[1]: {"rope_type": "default", "rope_theta": 7e3}},
    },
    "mellum no window": {**MELLUM, "layer_types": None},
    "mellum every window": {**MELLUM, "layer_types": TURNS[:1] * 3, "sliding_window": 2},
    "mellum one kind's angles": {
        **MELLUM,
        "layer_types": TURNS[1:] * 3,
        "rope_parameters": {TURNS[1]: YARN},
    },
    "mellum dense layers": {**MELLUM, "mlp_layer_types": ["dense", "sparse", "dense"]},
    "mellum not normalised": {**MELLUM, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "mellum biases": {**MELLUM, "attention_bias": True},
    "mellum tied": {**MELLUM, "tie_word_embeddings": True},
    "mellum one kv head": {**MELLUM, "num_key_value_heads": 1, "head_dim": 4},
    "mellum as many kv heads": {**MELLUM, "num_key_value_heads": 4},
    "mellum many experts": {**MELLUM, "num_experts": 37, "num_experts_per_tok": 8},
    "mellum one layer": {**MELLUM, "num_hidden_layers": 1, "layer_types": TURNS[:1]},
    "exaone_moe": EXAONE,
    "exaone_moe no window": {**EXAONE, "layer_types": TURNS[1:] * 3},
    "exaone_moe every window": {**EXAONE, "sliding_window_pattern": 4, "sliding_window": 2},
    "exaone_moe layer types": {**EXAONE, "layer_types": TURNS[::-1] + TURNS[:1]},
    "exaone_moe groups": {**EXAONE, "n_group": 3, "topk_group": 2, "num_shared_experts": 2},
    "exaone_moe mlp types": {**EXAONE, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "exaone_moe two dense layers": {**EXAONE, "first_k_dense_replace": 2},
    "exaone_moe not normalised": {**EXAONE, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "exaone_moe tied": {**EXAONE, "tie_word_embeddings": True},
    "exaone_moe one kv head": {**EXAONE, "num_key_value_heads": 1, "head_dim": 4},
    "exaone_moe as many kv heads": {**EXAONE, "num_key_value_heads": 4, "head_dim": 8},
    "exaone_moe many experts": {**EXAONE, "num_experts": 35, "num_experts_per_tok": 8},
    "exaone_moe yarn": {**EXAONE, "rope_parameters": YARN},
    "exaone_moe one layer": {**EXAONE, "num_hidden_layers": 1, "first_k_dense_replace": 0},
    "axk1": AXK1,
    "axk1 groups": {**AXK1, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    "axk1 layer types": {**AXK1, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "axk1 every other": {**AXK1, "moe_layer_freq": 2, "first_k_dense_replace": 0},
    "axk1 no dense layer": {**AXK1, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    "axk1 biases": {**AXK1, "attention_bias": True},
    "axk1 yarn": {**AXK1, "rope_parameters": STRETCHED},
    "axk1 halves": {**AXK1, "rope_interleave": False, "qk_rope_head_dim": 8},
    "axk1 wide values": {**AXK1, "v_head_dim": 26, "rms_norm_eps": 1e-2},
    "axk1 not normalised": {**AXK1, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "axk1 many experts": {**AXK1, "n_routed_experts": 33, "num_experts_per_tok": 7},
    "axk1 one head": {**AXK1, "num_attention_heads": 1, "num_key_value_heads": 1},
    "sarvam_moe": SARVAM,
    "sarvam_moe groups": {**SARVAM, "n_group": 3, "topk_group": 2, "num_shared_experts": 2},
    "sarvam_moe every expert": {**SARVAM, "num_experts_per_tok": 6},
    "sarvam_moe no norms": {**SARVAM, "use_qk_norm": False, "rms_norm_eps": 1e-2},
    "sarvam_moe half": {**SARVAM, "partial_rotary_factor": 0.5},
    "sarvam_moe tied": {**SARVAM, "tie_word_embeddings": True},
    "sarvam_moe one kv head": {**SARVAM, "num_key_value_heads": 1, "head_dim": 4},
    "sarvam_moe as many kv heads": {**SARVAM, "num_key_value_heads": 4},
    "sarvam_moe no dense layer": {**SARVAM, "first_k_dense_replace": 0},
    "sarvam_moe two dense layers": {**SARVAM, "first_k_dense_replace": 2},
    "sarvam_moe not normalised": {**SARVAM, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "sarvam_moe many experts": {**SARVAM, "num_experts": 33, "num_experts_per_tok": 7},
    "sarvam_moe yarn": {**SARVAM, "rope_parameters": YARN},
    "sarvam_mla": SARVAM_LATENT,
    "sarvam_mla latent queries": {**SARVAM_LATENT, "q_lora_rank": 20},
    "sarvam_mla groups": {**SARVAM_LATENT, "n_group": 3, "topk_group": 2, "num_shared_experts": 2},
    "sarvam_mla no kv heads": {**SARVAM_LATENT, "num_key_value_heads": None, "head_dim": 18},
    "sarvam_mla yarn": {**SARVAM_LATENT, "rope_parameters": STRETCHED},
    "sarvam_mla biases": {**SARVAM_LATENT, "attention_bias": True},
    "sarvam_mla tied": {**SARVAM_LATENT, "tie_word_embeddings": True},
    "sarvam_mla equal widths": {**SARVAM_LATENT, "v_head_dim": 16},
    "sarvam_mla no dense layer": {**SARVAM_LATENT, "first_k_dense_replace": 0},
    "sarvam_mla two dense layers": {**SARVAM_LATENT, "first_k_dense_replace": 2},
    "sarvam_mla every expert": {**SARVAM_LATENT, "num_experts_per_tok": 6},
    "sarvam_mla many experts": {**SARVAM_LATENT, "num_experts": 33, "num_experts_per_tok": 7},
    "afmoe": AFMOE,
    "afmoe plain embeddings": {**AFMOE, "mup_enabled": False, "num_shared_experts": 1},
    "afmoe no window": {**AFMOE, "layer_types": TURNS[1:] * 3},
    "afmoe every window": {**AFMOE, "layer_types": TURNS[:1] * 3, "sliding_window": 2},
    "afmoe turned about": {**AFMOE, "layer_types": TURNS[::-1] + TURNS[1:]},
    "afmoe every other": {
        **AFMOE,
        "layer_types": None,
        "global_attn_every_n_layers": 2,
        "num_hidden_layers": 5,
    },
    "afmoe biases": {**AFMOE, "attention_bias": True},
    "afmoe tied": {**AFMOE, "tie_word_embeddings": True, "mup_enabled": False},
    "afmoe one kv head": {**AFMOE, "num_key_value_heads": 1, "head_dim": 4},
    "afmoe as many kv heads": {**AFMOE, "num_key_value_heads": None},
    "afmoe no dense layer": {**AFMOE, "num_dense_layers": 0, "route_scale": 1.0},
    "afmoe two dense layers": {**AFMOE, "num_dense_layers": 2},
    "afmoe yarn": {**AFMOE, "rope_parameters": YARN},
    "afmoe every expert": {**AFMOE, "num_experts_per_tok": 6},
    "afmoe many experts": {**AFMOE, "num_experts": 37, "num_experts_per_tok": 8},
    "afmoe one layer": {
        **AFMOE,
        "num_hidden_layers": 1,
        "num_dense_layers": 0,
        "layer_types": TURNS[:1],
    },
    "laguna": {**LAGUNA, "rope_parameters": LAGUNA_ROPES},
    "laguna plain rotary": LAGUNA,
    "laguna gates of elements": {**LAGUNA, "gating": "per-element"},
    "laguna equal heads": {**LAGUNA, "num_attention_heads_per_layer": None},
    "laguna more heads without window": {
        **LAGUNA,
        "num_attention_heads_per_layer": [8, 2, 2],
        "gating": "per-head",
    },
    "laguna capped router": {**LAGUNA, "moe_router_logit_softcapping": 0.7},
    "laguna no window": {
        **LAGUNA,
        "layer_types": None,
        "num_attention_heads_per_layer": [6] * 3,
    },
    "laguna every window": {
        **LAGUNA,
        "layer_types": TURNS[:1] * 3,
        "num_attention_heads_per_layer": [6] * 3,
        "sliding_window": 2,
    },
    "laguna half of every head": {
        **LAGUNA,
        "head_dim": 8,
        "rope_parameters": {
            TURNS[0]: {**YARN, "partial_rotary_factor": 0.25},
            TURNS[1]: {**FULL_ROPE, "rope_type": "default", "partial_rotary_factor": 1.0},
        },
    },
    "laguna biases": {**LAGUNA, "attention_bias": True},
    "laguna tied": {**LAGUNA, "tie_word_embeddings": True},
    "laguna one kv head": {**LAGUNA, "num_key_value_heads": 1, "head_dim": 4},
    "laguna no dense layer": {**LAGUNA, "mlp_layer_types": ["sparse"] * 3},
    "laguna dense at the end": {**LAGUNA, "mlp_layer_types": ["sparse"] * 2 + ["dense"]},
    "laguna every expert": {**LAGUNA, "num_experts_per_tok": 6, "moe_routed_scaling_factor": 1.0},
    "laguna many experts": {**LAGUNA, "num_experts": 37, "num_experts_per_tok": 8},
    "step3p5": STEP,
    "step3p5 no limits": {**STEP, "swiglu_limits": None, "swiglu_limits_shared": None},
    "step3p5 limits of experts": {**STEP, "swiglu_limits_shared": [0, 0.0, None]},
    "step3p5 limits everywhere": {
        **STEP,
        "swiglu_limits": [0.5, 0.2, 7],
        "swiglu_limits_shared": [0.3, 0.4, 16],
    },
    "step3p5 published keys": {
        **{key: STEP[key] for key in STEP if key not in ("rope_parameters", "mlp_layer_types")},
        "num_sliding_attention_heads": None,
        "attention_other_setting": {"num_attention_heads": 8, "head_dim": 12},
        "rope_theta": [1e5, 1e3, 1e3],
        "partial_rotary_factors": [0.5, 1.0, 1.0],
        "moe_layers_enum": "0,2",
    },
    "step3p5 equal heads": {**STEP, "num_sliding_attention_heads": None},
    "step3p5 fewer heads in windows": {**STEP, "num_sliding_attention_heads": 2},
    "step3p5 no window": {**STEP, "layer_types": TURNS[1:] * 3},
    "step3p5 every window": {**STEP, "layer_types": TURNS[:1] * 3, "sliding_window": 2},
    "step3p5 biases": {**STEP, "attention_bias": True},
    "step3p5 tied": {**STEP, "tie_word_embeddings": True},
    "step3p5 one kv head": {**STEP, "num_key_value_heads": 1, "head_dim": 4},
    "step3p5 no dense layer": {**STEP, "mlp_layer_types": ["sparse"] * 3},
    "step3p5 four layers": {
        **STEP,
        "num_hidden_layers": 4,
        "mlp_layer_types": None,
        "layer_types": TURNS * 2,
        "swiglu_limits": None,
        "swiglu_limits_shared": [None] * 3 + [0.3],
    },
    "step3p5 every expert": {**STEP, "num_experts_per_tok": 6},
    "step3p5 many experts": {**STEP, "n_routed_experts": 37, "num_experts_per_tok": 8},
    "mimo_v2_flash": MIMO,
    "mimo_v2_flash wide values": {**MIMO, "v_head_dim": 18, "attention_value_scale": 1.6},
    "mimo_v2_flash equal widths": {**MIMO, "v_head_dim": 12, "attention_value_scale": None},
    "mimo_v2_flash no window": {**MIMO, "layer_types": TURNS[1:] * 3},
    "mimo_v2_flash every window": {**MIMO, "layer_types": TURNS[:1] * 3, "sliding_window": 2},
    "mimo_v2_flash published window": {**MIMO, "sliding_window_size": 3},
    "mimo_v2_flash seven layers": {**MIMO, "layer_types": None, "num_hidden_layers": 7},
    "mimo_v2_flash other angles": {
        **MIMO,
        "head_dim": 14,
        "rope_parameters": {TURNS[1]: {**YARN, **PARTIAL}, TURNS[0]: {**SLIDING_ROPE, **PARTIAL}},
    },
    "mimo_v2_flash groups": {**MIMO, "n_group": 3, "topk_group": 2},
    "mimo_v2_flash not normalised": {
        **MIMO,
        "norm_topk_prob": False,
        "num_experts_per_tok": 5,
        "routed_scaling_factor": None,
    },
    "mimo_v2_flash biases": {**MIMO, "attention_bias": True},
    "mimo_v2_flash tied": {**MIMO, "tie_word_embeddings": True},
    "mimo_v2_flash one kv head": {**MIMO, "num_key_value_heads": 1},
    "mimo_v2_flash no dense layer": {**MIMO, "mlp_layer_types": ["sparse"] * 3},
    "mimo_v2_flash every expert": {**MIMO, "num_experts_per_tok": 6},
    "mimo_v2_flash many experts": {**MIMO, "n_routed_experts": 37, "num_experts_per_tok": 8},
    "lfm2_moe": LFM2,
    "lfm2_moe tied": {**LFM2, "tie_word_embeddings": True, "routed_scaling_factor": 2.5},
    "lfm2_moe no bias of experts": {**LFM2, "use_expert_bias": False},
    "lfm2_moe attention alone": {**LFM2, "layer_types": CONVOLVED[1:] * 3},
    "lfm2_moe convolutions alone": {**LFM2, "layer_types": CONVOLVED[:1] * 3},
    "lfm2_moe turned about": {**LFM2, "layer_types": CONVOLVED[::-1] + CONVOLVED[1:]},
    "lfm2_moe one tap": {**LFM2, "conv_L_cache": 1},
    "lfm2_moe seven taps": {**LFM2, "conv_L_cache": 7, "norm_eps": 1e-3},
    "lfm2_moe no dense layer": {**LFM2, "num_dense_layers": 0},
    "lfm2_moe two dense layers": {**LFM2, "num_dense_layers": 2},
    "lfm2_moe not normalised": {**LFM2, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "lfm2_moe one kv head": {**LFM2, "num_key_value_heads": 1, "hidden_size": 24},
    "lfm2_moe every expert": {**LFM2, "num_experts_per_tok": 6},
    "lfm2_moe many experts": {**LFM2, "num_experts": 37, "num_experts_per_tok": 8},
    "lfm2_moe yarn": {**LFM2, "rope_parameters": YARN},
    "mistral4": MISTRAL,
    "mistral4 late factors": {**MISTRAL, "rope_parameters": {**STRETCHED, **LATE}},
    "mistral4 no factors": {
        **MISTRAL,
        "rope_parameters": {**MISTRAL_ROPE, "llama_4_scaling_beta": 0},
    },
    "mistral4 linear": {
        **MISTRAL,
        "rope_parameters": {
            "rope_type": "linear",
            "factor": 3.0,
            "rope_theta": 1e3,
            **EARLY,
        },
    },
    "mistral4 groups": {**MISTRAL, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    "mistral4 no latent queries": {**MISTRAL, "q_lora_rank": None},
    "mistral4 halves": {**MISTRAL, "rope_interleave": False, "qk_rope_head_dim": 8},
    "mistral4 biases": {**MISTRAL, "attention_bias": True},
    "mistral4 wide values": {**MISTRAL, "v_head_dim": 26, "rms_norm_eps": 1e-2},
    "mistral4 tied": {**MISTRAL, "tie_word_embeddings": True},
    "mistral4 two dense layers": {**MISTRAL, "first_k_dense_replace": 2},
    "mistral4 not normalised": {**MISTRAL, "norm_topk_prob": False, "routed_scaling_factor": 2.5},
    "mistral4 every expert": {**MISTRAL, "num_experts_per_tok": 6},
    "mistral4 many experts": {**MISTRAL, "n_routed_experts": 33, "num_experts_per_tok": 7},
    "mistral4 one head": {**MISTRAL, "num_attention_heads": 1, "num_key_value_heads": 1},
    "granitemoeshared": GRANITE,
    "granitemoeshared no shared expert": {**GRANITE, "shared_intermediate_size": 0},
    "granitemoeshared plain": {**GRANITE, **dict.fromkeys(list(GRANITE)[3:], 1.0)},
    "granitemoeshared whole numbers": {**GRANITE, "embedding_multiplier": 12, "logits_scaling": 6},
    "granitemoeshared wide residuals": {**GRANITE, "residual_multiplier": 1.9},
    "granitemoeshared biases": {**GRANITE, "attention_bias": True},
    "granitemoeshared tied": {**GRANITE, "tie_word_embeddings": True, "embedding_multiplier": 0.5},
    "granitemoeshared one kv head": {**GRANITE, "num_key_value_heads": 1, "hidden_size": 24},
    "granitemoeshared as many kv heads": {**GRANITE, "num_key_value_heads": None},
    "granitemoeshared every expert": {**GRANITE, "num_experts_per_tok": 6},
    "granitemoeshared many experts": {
        **GRANITE,
        "num_local_experts": 37,
        "num_experts_per_tok": 8,
    },
    "granitemoeshared yarn": {**GRANITE, "rope_parameters": YARN},
    "granitemoeshared one layer": {**GRANITE, "num_hidden_layers": 1},
    "granitemoehybrid": HYBRID,
    "granitemoehybrid rotated": {**HYBRID, "position_embedding_type": "rope"},
    "granitemoehybrid yarn": {
        **HYBRID,
        "position_embedding_type": "rope",
        "rope_parameters": YARN,
    },
    "granitemoehybrid no experts": {**HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0},
    "granitemoehybrid two groups": {**HYBRID, "mamba_n_groups": 2},
    "granitemoehybrid no biases of convolutions": {**HYBRID, "mamba_conv_bias": False},
    # Without angles a bias of keys has no effect, and its gradient would be only rounding.
    "granitemoehybrid biases": {
        **HYBRID,
        "attention_bias": True,
        "position_embedding_type": "rope",
    },
    "granitemoehybrid attention alone": {
        **HYBRID,
        "layer_types": ["attention"] * 3,
        "position_embedding_type": "rope",
    },
    "granitemoehybrid mixers alone": {**HYBRID, "layer_types": None},
    "granitemoehybrid newer names": {
        **HYBRID,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "position_embedding_type": "nope",
    },
    "granitemoehybrid wide mixers": {
        **HYBRID,
        "mamba_expand": 3,
        "mamba_n_heads": 4,
        "mamba_d_head": 24,
        "mamba_d_conv": 2,
    },
    "granitemoehybrid tied": {**HYBRID, "tie_word_embeddings": True, "embedding_multiplier": 0.5},
    "granitemoehybrid one kv head": {**HYBRID, "num_key_value_heads": 1},
    "granitemoehybrid every expert": {**HYBRID, "num_experts_per_tok": 6},
    "granitemoehybrid many experts": {
        **HYBRID,
        "num_local_experts": 37,
        "num_experts_per_tok": 8,
    },
    "deepseek_v32": SPARSE,
    "deepseek_v32 groups": {**SPARSE, "n_group": 3, "topk_group": 2},
    "deepseek_v32 stretched": {**SPARSE, "rope_parameters": STRETCHED},
    "deepseek_v32 one key": {**SPARSE, "index_topk": 1},
    "deepseek_v32 every key": {**SPARSE, "index_topk": 40},
    "deepseek_v32 all but one": {**SPARSE, "index_topk": 22},
    "deepseek_v32 all of it rotates": {**SPARSE, "index_head_dim": 6},
    "deepseek_v32 biases": {**SPARSE, "attention_bias": True},
    "deepseek_v32 tied": {**SPARSE, "tie_word_embeddings": True},
    "deepseek_v32 no dense layer": {**SPARSE, "mlp_layer_types": ["sparse"] * 3},
    "deepseek_v32 two shared experts": {**SPARSE, "n_shared_experts": 2},
    "deepseek_v32 not normalised": {**SPARSE, "norm_topk_prob": False},
    "deepseek_v32 many experts": {**SPARSE, "n_routed_experts": 37, "num_experts_per_tok": 8},
    "glm_moe_dsa": {**SPARSE, "indexer_types": ["full", "shared", "full"]},
    "glm_moe_dsa every layer": SPARSE,
    "glm_moe_dsa one indexer": {**SPARSE, "indexer_types": SHARED},
    "glm_moe_dsa by number": {
        **SPARSE,
        "num_hidden_layers": 7,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 3,
    },
    "glm_moe_dsa by letters": {**SPARSE, "index_topk_pattern": "FFS"},
    "glm_moe_dsa one key": {**SPARSE, "index_topk": 1, "indexer_types": SHARED},
    "glm_moe_dsa every key": {**SPARSE, "index_topk": 40, "indexer_types": SHARED},
    "glm_moe_dsa groups": {**SPARSE, "n_group": 3, "topk_group": 2},
    "glm_moe_dsa stretched": {**SPARSE, "rope_parameters": STRETCHED},
    "glm_moe_dsa biases": {**SPARSE, "attention_bias": True},
    "glm_moe_dsa tied": {**SPARSE, "tie_word_embeddings": True, "indexer_types": SHARED},
    "glm_moe_dsa no dense layer": {**SPARSE, "mlp_layer_types": ["sparse"] * 3},
    "glm_moe_dsa many experts": {**SPARSE, "n_routed_experts": 37, "num_experts_per_tok": 8},
    "kimi_linear": KIMI,
    "kimi_linear published keys": {
        **{key: KIMI[key] for key in KIMI if not key.startswith(("linear_", "layer_"))},
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
            "num_heads": 2,
            "head_dim": 10,
            "short_conv_kernel_size": 3,
        },
        "first_k_dense_replace": 2,
        "model_max_length": 100,
    },
    "kimi_linear every layer": {**KIMI, "layer_types": STATES[:1] * 3},
    "kimi_linear no layer": {**KIMI, "layer_types": STATES[1:] * 3},
    "kimi_linear five layers": {**KIMI, "num_hidden_layers": 5, "layer_types": None},
    "kimi_linear one tap": {**KIMI, "linear_conv_kernel_dim": 1, "linear_head_dim": 5},
    "kimi_linear more heads": {**KIMI, "linear_num_heads": 8},
    "kimi_linear latent queries": {**KIMI, "q_lora_rank": 20},
    "kimi_linear biases": {**KIMI, "attention_bias": True, "q_lora_rank": 20},
    "kimi_linear groups": {**KIMI, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    "kimi_linear mlp types": {**KIMI, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "kimi_linear no dense layer": {**KIMI, "mlp_layer_types": ["sparse"] * 3},
    "kimi_linear not normalised": {**KIMI, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "kimi_linear every expert": {**KIMI, "num_experts_per_tok": 6, "v_head_dim": 26},
    "kimi_linear many experts": {**KIMI, "num_local_experts": 33, "num_experts_per_tok": 7},
    "bailing_hybrid": LING,
    "bailing_hybrid published keys": {
        **{key: LING[key] for key in LING if key != "layer_types"},
        "layer_group_size": 2,
        "short_conv_kernel_size": 3,
        "first_k_dense_replace": 2,
        "model_max_length": 100,
    },
    "bailing_hybrid another bound": {**LING, "kda_lower_bound": -0.7},
    "bailing_hybrid no bound": {**LING, "kda_safe_gate": False},
    "bailing_hybrid every layer": {**LING, "layer_types": STATES[:1] * 3},
    "bailing_hybrid no layer": {**LING, "layer_types": STATES[1:] * 3},
    "bailing_hybrid one tap": {**LING, "short_conv_kernel_size": 1, "head_dim": 5},
    "bailing_hybrid latent queries": {**LING, "q_lora_rank": 20, "attention_bias": True},
    "bailing_hybrid yarn": {**LING, "rope_parameters": STRETCHED},
    "bailing_hybrid groups": {**LING, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    "bailing_hybrid mlp types": {**LING, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "bailing_hybrid no dense layer": {**LING, "first_k_dense_replace": 0},
    "bailing_hybrid not normalised": {**LING, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "bailing_hybrid every expert": {**LING, "num_experts_per_tok": 6, "v_head_dim": 26},
    "bailing_hybrid many experts": {**LING, "num_local_experts": 33, "num_experts_per_tok": 7},
    "minimax_m3_vl_text": M3,
    "minimax_m3_vl_text one block": {**M3, "index_topk_blocks": 1},
    "minimax_m3_vl_text two own blocks": {**M3, "index_local_blocks": 2, "index_topk_blocks": 3},
    "minimax_m3_vl_text large blocks": {**M3, "index_block_size": 7},
    "minimax_m3_vl_text no own block": {**M3, "index_local_blocks": 0},
    "minimax_m3_vl_text single keys": {**M3, "index_block_size": 1, "index_topk_blocks": 5},
    "minimax_m3_vl_text all blocks but one": {**M3, "index_block_size": 5, "index_topk_blocks": 4},
    "minimax_m3_vl_text every block": {**M3, "index_topk_blocks": 12},
    "minimax_m3_vl_text every layer": {**M3, "layer_types": ["minimax_m3_sparse"] * 3},
    "minimax_m3_vl_text no sparse layer": {**M3, "layer_types": ["full_attention"] * 3},
    "minimax_m3_vl_text published keys": {
        **{key: M3[key] for key in M3 if not key.startswith(("index_", "layer_", "mlp_"))},
        "hidden_act": "swigluoai",
        "moe_layer_freq": [0, 1, 1],
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 10,
            "sparse_block_size": 3,
            "sparse_topk_blocks": 2,
            "sparse_local_block": 1,
            "sparse_init_block": 0,
            "sparse_score_type": "max",
            "sparse_attention_freq": [0, 1, 1],
        },
    },
    "minimax_m3_vl_text one kv head": {**M3, "num_key_value_heads": 1, "index_n_heads": 1},
    "minimax_m3_vl_text as many kv heads": {**M3, "num_key_value_heads": 4, "index_n_heads": 4},
    "minimax_m3_vl_text whole heads": {**M3, "partial_rotary_factor": 1.0, "index_head_dim": 12},
    "minimax_m3_vl_text stretched": {
        **M3,
        "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
    },
    "minimax_m3_vl_text tied": {**M3, "tie_word_embeddings": True},
    "minimax_m3_vl_text low limit": {**M3, "swiglu_limit": 0.3, "swiglu_alpha": 0.9},
    "minimax_m3_vl_text another factor": {**M3, "routed_scaling_factor": 2.7},
    "minimax_m3_vl_text no dense layer": {**M3, "mlp_layer_types": None},
    "minimax_m3_vl_text every expert": {**M3, "num_experts_per_tok": 6},
    "minimax_m3_vl_text many experts": {**M3, "num_local_experts": 37, "num_experts_per_tok": 8},
    "seed_oss": SEED,
    "seed_oss every bias": {**SEED, "attention_out_bias": True, "mlp_bias": True},
    "seed_oss no bias": {**SEED, "attention_bias": False},
    "seed_oss output's bias alone": {**SEED, "attention_bias": False, "attention_out_bias": True},
    "seed_oss output's bias too": {**SEED, "attention_out_bias": True},
    "seed_oss biases of the MLP": {**SEED, "mlp_bias": True},
    "seed_oss tied": {**SEED, "tie_word_embeddings": True},
    "seed_oss one kv head": {**SEED, "num_key_value_heads": 1},
    "seed_oss as many kv heads": {**SEED, "num_key_value_heads": None},
    "seed_oss width by heads": {**SEED, "head_dim": None},
    "seed_oss narrow heads": {**SEED, "head_dim": 2, "num_attention_heads": 14},
    "seed_oss odd widths": {**SEED, "hidden_size": 28, "intermediate_size": 37},
    "seed_oss one layer": {**SEED, "num_hidden_layers": 1, "rms_norm_eps": 1e-3},
    "seed_oss yarn": {**SEED, "rope_parameters": YARN},
    "smollm3": SMOL,
    "smollm3 every second layer": {"tie_word_embeddings": False, "no_rope_layer_interval": 2},
    "smollm3 every fourth layer": {"num_hidden_layers": 5},
    "smollm3 rotary everywhere": {**SMOL, "no_rope_layers": [1, 1, 1]},
    "smollm3 rotary nowhere": {**SMOL, "no_rope_layers": [0, 0, 0]},
    "smollm3 a longer list": {**SMOL, "no_rope_layers": [0, 1, 1, 0, 1]},
    "smollm3 windows": SMOL_WINDOW,
    "smollm3 windows of other layers": {
        **SMOL_WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "smollm3 windows of no size": {**SMOL_WINDOW, "sliding_window": None},
    "smollm3 windows out of use": {**SMOL_WINDOW, "use_sliding_window": False},
    "smollm3 tied": {**SMOL, "tie_word_embeddings": True},
    "smollm3 biases of the MLP": {**SMOL, "mlp_bias": True},
    # Without rotary embeddings the gradient of a key's bias would be only rounding.
    "smollm3 every bias": {
        **SMOL,
        "no_rope_layers": [1] * 3,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "smollm3 one kv head": {**SMOL, "num_key_value_heads": 1},
    "smollm3 as many kv heads": {**SMOL, "num_key_value_heads": None},
    "smollm3 heads of another width": {
        **SMOL,
        "head_dim": 12,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
    },
    "smollm3 odd widths": {**SMOL, "hidden_size": 24, "intermediate_size": 37},
    "smollm3 one layer": {**SMOL, "num_hidden_layers": 1, "no_rope_layers": [0]},
    "smollm3 yarn": {**SMOL, "rope_parameters": YARN},
    "olmo2": OLMO2,
    "olmo2 as many kv heads": {**OLMO2, "num_key_value_heads": None},
    "olmo2 one kv head": {**OLMO2, "num_key_value_heads": 1},
    "olmo2 biases": {**OLMO2, "attention_bias": True},
    "olmo2 tied": {**OLMO2, "tie_word_embeddings": True},
    "olmo2 yarn": {**OLMO2, "rope_parameters": YARN},
    "olmo2 two heads": {**OLMO2, "num_attention_heads": 2, "num_key_value_heads": 2},
    "olmo2 heads of another width": {
        **OLMO2,
        "head_dim": 12,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
    },
    "olmo2 wide heads": {
        **OLMO2,
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    },
    "olmo2 odd widths": {**OLMO2, "hidden_size": 24, "intermediate_size": 37},
    "olmo2 large epsilon": {**OLMO2, "rms_norm_eps": 0.1},
    "olmo2 one layer": {**OLMO2, "num_hidden_layers": 1, "intermediate_size": 8},
}
FAMILY_CASES = [case for case in CASES if " " not in case]
"""One case of each family."""
WITH_STATES = (
    "qwen3_",
    "nemotron_h",
    "lfm2_moe",
    "granitemoehybrid",
    "kimi_linear",
    "bailing_hybrid",
)
LINEAR_CASES = [case for case in FAMILY_CASES if case.startswith(WITH_STATES)]
"""Families with layers that carry states."""
ROUTED_CASES = [
    case for case in FAMILY_CASES if case not in ("qwen3_5_text", "seed_oss", "smollm3", "olmo2")
]


def limits(case):
    """Return the relative errors that logits and gradients may have.

    Random gated delta nets are ill-conditioned. With an epsilon of 1e-6 their gradients in fp32
    differ from the same model in fp64 by up to 6e-4 in transformers and 4e-4 here; with the epsilon
    of these cases the two differ by up to 2.2e-4.
    """
    return (1e-5, 3e-4) if case.startswith("qwen3_") else (1e-5, 1e-5)


EXTRA = {
    "glm4_moe": "model.layers.{}.eh_proj.weight",
    "deepseek_v3": "model.layers.{}.shared_head.norm.weight",
    "glm4_moe_lite": "model.layers.{}.eh_proj.weight",
    "ernie4_5_moe": "model.mtp_block.0.mlp.up_proj.weight",
    "minimax_m2": "model.mtp.0.fc.weight",
    "nemotron_h": "mtp.layers.0.eh_proj.weight",
    "hy_v3": "model.layers.{}.eh_proj.weight",
    "mellum": "mtp.fc.weight",
    "exaone_moe": "mtp.fc.weight",
    "step3p5": "model.layers.{}.eh_proj.weight",
    "mimo_v2_flash": "model.mtp.layers.0.eh_proj.weight",
    "deepseek_v32": "model.layers.{}.eh_proj.weight",
    "glm_moe_dsa": "model.layers.{}.eh_proj.weight",
    "bailing_hybrid": "model.layers.{}.eh_proj.weight",
}
"""Tensors of MTP blocks, under their names in each family's files."""
AROUND_ONE = ("norm.weight", "layer_scalar", "scale")
SPREAD = {
    "sinks": 2.0,
    "router.weight": 0.5,
    "gate.weight": 0.5,
    "wg.weight": 0.5,
    "correction_bias": 0.3,
    "bias": 0.2,
}


def architecture_of(case, **changes):
    """Return our architecture of ``case``, with these fields changed."""
    config = AutoConfig.for_model(case.split()[0], **{**SIZES, **deepcopy(CASES[case])})
    arch = architecture_from_hf(config.to_dict())
    if case not in ROUTED_CASES:
        changes.pop("num_experts", None)
    assert changes.keys() <= type(arch).model_fields.keys()  # model_copy takes any name
    return arch.model_copy(update=changes)


def centre(case, name):
    """Return the mean of random values of the tensor ``name``.

    Bounded gates are slow at first, as in training. Where they are halfway to their bound, a step's
    gradients are differences of nearly equal sums, which transformers has in fp32 to 1.2e-5 only.
    """
    if case.startswith("bailing_hybrid") and name.endswith("dt_bias"):
        return -3.0
    is_zero_centred = case.startswith(("step3p", "minimax_m3"))
    return 1.0 if name.endswith(AROUND_ONE) and not is_zero_centred else 0.0


def random_reference(case, **sizes):
    """Return transformers' own model of ``case``, in which no routing choice is nearly tied."""
    torch.manual_seed(len(case))
    keys = deepcopy(CASES[case])  # some classes complete the rotary parameters in place
    config = AutoConfig.for_model(case.split()[0], **{**SIZES, **keys, **sizes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            spread = next((s for end, s in SPREAD.items() if name.endswith(end)), 0.1)
            tensor.normal_(centre(case, name), spread)
    return model


def save_reference(case, folder, **sizes):
    """Write the model's files into ``folder``, with one tensor of an MTP head."""
    model = random_reference(case, **sizes)
    model.save_pretrained(folder)
    name = EXTRA.get(case.split()[0])
    if name is not None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name.format(model.config.num_hidden_layers)] = torch.randn(5, 3).bfloat16()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))


def tokens(*shape):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(7))
