"""Helpers of tests/train/test_reward.py that other tests use too."""

import torch
from transformers import AutoConfig

EOS = 256  # of the tokenizer of bytes, which has no PAD
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
    """A model of transformers with large weights, so that scores differ, saved to ``folder``."""
    torch.manual_seed(0)
    own = {"pad_token_id": EOS, "eos_token_id": EOS, "bos_token_id": None, **changes}
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **own})
    model = kind.from_config(config, experts_implementation="eager")  # others know no fp64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return model
