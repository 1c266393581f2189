"""Helpers of tests/models/hf/test_config.py that other tests use too."""

import transformers
from transformers import AutoConfig

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}
QWEN3_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
WINDOW = {"use_sliding_window": True, "sliding_window": 4}
CASES = {
    "qwen3": {"head_dim": 8},
    "qwen3 tied, biases, windows": {
        "head_dim": 4,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "max_window_layers": 1,
        **WINDOW,
    },
    "qwen3_moe": {"head_dim": 8, "norm_topk_prob": True, **QWEN3_EXPERTS},
    "qwen3_moe sparse step, windows": {
        "head_dim": 4,
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
        **QWEN3_EXPERTS,
        **WINDOW,
    },
    "qwen3_moe dense layers, biases": {
        "mlp_only_layers": [0, 2],
        "attention_bias": True,
        **QWEN3_EXPERTS,
    },
    "qwen2": {"layer_types": ["full_attention", "sliding_attention", "full_attention"], **WINDOW},
    "qwen2 tied": {"tie_word_embeddings": True},
    "llama": {"head_dim": 8, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "mixtral window": {"num_local_experts": 2, "sliding_window": 4, "head_dim": 8},
}


def config_of(case: str) -> transformers.PreTrainedConfig:
    return AutoConfig.for_model(case.split()[0], **SIZES, **CASES[case])
