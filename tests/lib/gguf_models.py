"""Small models of transformers of the types that GGUF names, with random weights."""

import torch
import transformers

from tests.lib.exports import make_tokenizer

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 290}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
YARN = {"rope_type": "yarn", "factor": 8.0, "truncate": True, "rope_theta": 15e4}
YARN |= {"original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
CASES = {
    "llama": {"rope_theta": 5e5},
    "mixtral": LOCAL,
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {**MOE, "norm_topk_prob": True},
    "gpt_oss": {**LOCAL, "sliding_window": 8, "rope_parameters": YARN},
}


def write(case, folder, **sizes):
    """Write transformers' model of ``case`` with random weights, and a tokenizer."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(case, **SIZES | CASES[case] | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return model.eval()
