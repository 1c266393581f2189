"""Llama 2 (arXiv 2307.09288) and 3 (arXiv 2407.21783), and other models with their config.json.

They are dense decoders with optional biases.
"""

from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    DenseDecoder,
)
from moetrain.models.family import Family, register

register(
    Family(
        name="llama",
        architecture=DenseDecoder,
        hf_class="LlamaForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
        },
        weight_map=DENSE,
    )
)
