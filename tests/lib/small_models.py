"""Helpers of tests/models/test_models.py that other tests use too."""

from pathlib import Path

import torch
from safetensors.torch import load_file

SIZES = {
    "vocab_size": 56,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
QWEN3_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
MIXTRAL = {"num_local_experts": 6, "output_router_logits": True, "router_aux_loss_coef": 0.1}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
}
# The key names the family and the oddity of this case; head_dim 8 is hidden / heads.
CASES = {
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3 one kv head, biases": {
        "head_dim": 24,
        "num_key_value_heads": 1,
        "attention_bias": True,
    },
    "qwen3 windows, yarn": {
        "head_dim": 16,
        "max_window_layers": 2,
        "rope_parameters": YARN,
        **WINDOW,
    },
    "qwen3_moe": {"head_dim": 16, "norm_topk_prob": True, **QWEN3_EXPERTS},
    "qwen3_moe not normalised, tied": {
        "head_dim": 8,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        **QWEN3_EXPERTS,
    },
    "qwen3_moe sparse step, window": {
        "head_dim": 8,
        "decoder_sparse_step": 2,
        **QWEN3_EXPERTS,
        **WINDOW,
    },
    "qwen3_moe dense layers, biases, linear": {
        "head_dim": 8,
        "mlp_only_layers": [0, 2],
        "attention_bias": True,
        "num_key_value_heads": 1,
        "rope_parameters": LINEAR,
        **QWEN3_EXPERTS,
    },
    "qwen2 windows": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "tie_word_embeddings": True,
        **WINDOW,
    },
    "qwen2 yarn": {"rope_parameters": YARN},
    "llama": {"head_dim": 16, "num_key_value_heads": 1},
    "llama biases, linear": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LINEAR,
    },
    "llama tied, llama3": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "mixtral": {"num_experts_per_tok": 2, **MIXTRAL},
    "mixtral top-1, window": {
        "num_experts_per_tok": 1,
        "sliding_window": 5,
        "head_dim": 16,
        **MIXTRAL,
    },
}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return ||got - want|| / ||want||; 0 where both are zero (an expert without tokens)."""
    difference = (got - want).norm().item()
    return difference / want.norm().item() if difference else 0.0


def gradients_as_checkpoint(model: torch.nn.Module, save, folder: Path) -> dict[str, torch.Tensor]:
    """Write every gradient in place of its weight; return them by the names in checkpoint files."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            parameter.copy_(parameter.grad)
    save(folder)
    return load_file(folder / "model.safetensors")
