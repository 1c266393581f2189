"""Llama 2 and 3, and what is written down like them: dense, biases by choice."""

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
