"""Seed-OSS of ByteDance (https://github.com/ByteDance-Seed/seed-oss).

It is Llama's dense decoder, whose files have a key of its own for the bias of attention's output.
The published models have biases of queries, keys and values alone; all others are read as well.

Left out on purpose: dropout of attention and of the results of parts (``attention_dropout``,
``residual_dropout``), which are settings of training. An export keeps their keys.
"""

from moetrain.models.decoders import COMMON_DEFAULTS, DENSE, DenseDecoder
from moetrain.models.family import Family, register

register(
    Family(
        name="seed_oss",
        architecture=DenseDecoder,
        hf_class="SeedOssForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 155_136,
            "intermediate_size": 27_648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524_288,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
        fields={"out_bias": "attention_out_bias"},
        weight_map=DENSE,
        presets={
            "seed-oss-36b": DenseDecoder(
                family="seed_oss",
                vocab_size=155_136,
                hidden_size=5120,
                num_layers=64,
                num_heads=80,
                num_kv_heads=8,
                head_dim=128,
                intermediate_size=27_648,
                max_positions=524_288,
                rope_theta=1e7,
                qkv_bias=True,
            )
        },
    )
)
