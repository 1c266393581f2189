"""Helpers of tests/train/test_reward.py that other tests use too."""

import torch
from transformers import AutoConfig

EOS = 256  # the tokenizer of bytes has no PAD
SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
FAMILIES = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
}


def make(kind, folder, family="qwen3_moe", **changes):
    """Write a model of transformers into ``folder``, with large weights so that scores differ."""
    torch.manual_seed(0)
    own = {"pad_token_id": EOS, "eos_token_id": EOS, "bos_token_id": None, **changes}
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **own})
    # Other implementations lack fp64.
    model = kind.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return model
