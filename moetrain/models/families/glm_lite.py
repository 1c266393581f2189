"""GLM-4.7-Flash: DeepSeek-V3's latent attention and router, with queries as wide as values.

Files hold blocks of multi-token prediction after the model's own layers. An export copies these
blocks unchanged, unless they are trained (:mod:`moetrain.models.parts.multi_token`).
"""

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.families.deepseek import (
    V3,
    V3Decoder,
    read_v3_layers,
)
from moetrain.models.family import Family, register
from moetrain.models.parts.deepseek_router import write_deepseek_layers
from moetrain.models.parts.layer_types import read_mlp_types, write_mlp_types

_FIRST = "first_k_dense_replace"


def _read_layers(config: ConfigJson) -> Fields:
    """Read which layers are MoE; by default all but the first are."""
    read = read_v3_layers({**config, _FIRST: 1})
    return {**read, "moe_layers": read_mlp_types(config, read["moe_layers"])}


def _write_layers(arch: Architecture) -> Fields:
    # transformers reads mlp_layer_types, and servers the number of dense layers at the start.
    return {**write_deepseek_layers(arch), "mlp_layer_types": write_mlp_types(arch)}


_DEFAULTS = {key: value for key, value in V3["defaults"].items() if key != _FIRST}
_OWN: Fields = {
    "hf_class": "Glm4MoeLiteForCausalLM",
    "defaults": {
        **_DEFAULTS,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": None,
    },
    "nullable": {**V3["nullable"], "mlp_layer_types": list},
    "read_layers": _read_layers,
    "write_layers": _write_layers,
    "presets": {
        # The sizes were recalled, not copied from a config.json; their total is the published 30
        # billion parameters.
        "glm-4.7-flash": V3Decoder(
            family="glm4_moe_lite",
            vocab_size=154_880,
            hidden_size=2048,
            num_layers=47,
            num_heads=20,
            num_kv_heads=20,
            intermediate_size=10_240,
            max_positions=202_752,
            norm_eps=1e-5,
            rope_theta=1e6,
            q_lora_rank=768,
            kv_lora_rank=512,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
            num_experts=64,
            num_experts_per_token=4,
            moe_intermediate_size=1536,
            shared_intermediate_size=1536,
            moe_layers=(False,) + (True,) * 46,
            routed_scaling_factor=1.8,
            **V3["fixed"],
        )
    },
}

register(Family(name="glm4_moe_lite", **{**V3, **_OWN}))
