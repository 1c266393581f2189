"""dots.llm1 (arXiv 2506.05767): Qwen3's attention with DeepSeek-V3's router.

The first layers are dense, and the others have shared experts.
"""

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    MoEDecoder,
    moe_block,
)
from moetrain.models.families.qwen import read_windows, write_windows
from moetrain.models.family import Family, register
from moetrain.models.parts.deepseek_router import (
    DEEPSEEK_FIELDS,
    SIGMOID_ROUTER,
    read_deepseek_layers,
    write_deepseek_layers,
)

_FIXED = {**SIGMOID_ROUTER, "qk_norm": True}


def _read_layers(config: ConfigJson) -> Fields:
    return read_windows(config) | read_deepseek_layers(config)


def _write_layers(arch: Architecture) -> Fields:
    written = write_windows(arch) | write_deepseek_layers(arch)
    del written["use_sliding_window"]
    return written


register(
    Family(
        name="dots1",
        architecture=MoEDecoder,
        hf_class="Dots1ForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 152064,
            "hidden_size": 4608,
            "intermediate_size": 10944,
            "num_hidden_layers": 62,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "layer_types": None,
            "moe_intermediate_size": 1408,
            # A file must have the next three keys: transformers cannot build a model without them.
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
        weight_map=DENSE + moe_block(bias="gate.e_score_correction_bias", shared="shared_experts"),
        fields=DEEPSEEK_FIELDS,
        fixed=_FIXED,
        aliases={"num_local_experts": "n_routed_experts"},
        nullable={"sliding_window": int, "layer_types": list},
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={
            # The sizes are from memory; the total is the published 142 billion.
            "dots.llm1": MoEDecoder(
                family="dots1",
                vocab_size=152_064,
                hidden_size=4096,
                num_layers=62,
                num_heads=32,
                num_kv_heads=32,
                head_dim=128,
                intermediate_size=10_944,
                max_positions=32_768,
                norm_eps=1e-5,
                rope_theta=1e7,
                num_experts=128,
                num_experts_per_token=6,
                moe_intermediate_size=1408,
                shared_intermediate_size=2816,
                moe_layers=(False,) + (True,) * 61,
                routed_scaling_factor=2.5,
                **_FIXED,
            )
        },
    )
)
