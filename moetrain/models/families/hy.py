"""Hy3 (Tencent): Qwen3's attention with DeepSeek-V3's router and a shared expert.

The first layer is dense. Published files have other names for the router and the shared expert than
``transformers`` has in memory. They also hold an MTP block behind the model's own layers, which an
export copies unchanged unless it is trained (:mod:`moetrain.models.parts.multi_token`).

``enable_moe_fp32_combine`` adds the shared expert's result in fp32 and rounds the sum. That has the
same bits as the sum in bf16, so both values are read.
"""

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE, MoEDecoder, moe_block
from moetrain.models.families.deepseek import check_keys
from moetrain.models.family import Family, register
from moetrain.models.parts.deepseek_router import (
    SIGMOID_ROUTER,
    read_deepseek_layers,
    write_deepseek_layers,
)
from moetrain.models.parts.layer_types import read_mlp_types, write_mlp_types
from moetrain.models.parts.multi_token import MultiTokenDecoder, behind_layers


class _Hy(MultiTokenDecoder, MoEDecoder):
    """An MoE decoder that can have MTP blocks."""


_MAP, _MAP_WITHOUT_COPIES = behind_layers(
    DENSE + moe_block(router="router.gate.weight", bias="expert_bias", shared="shared_mlp"),
    readout="final_layernorm",
)
_FIXED: Fields = {**SIGMOID_ROUTER, "qk_norm": True, "norm_topk_prob": True}
_ONLY: Fields = {"route_norm": True, "qk_norm": True}
_FIRST = "first_k_dense_replace"
_SHARED = "num_shared_experts"
_WIDTH = "expert_hidden_dim"
"""The key in which vLLM looks for moe_intermediate_size."""


def _read_layers(config: ConfigJson) -> Fields:
    """Read the MoE layers, and the width of shared experts."""
    check_keys(config, {"mlp_bias": (False,), **{key: (value,) for key, value in _ONLY.items()}})
    read = read_deepseek_layers({**config, "n_shared_experts": config[_SHARED]})
    return {**read, "moe_layers": read_mlp_types(config, read["moe_layers"])}


def _write_layers(arch: Architecture) -> Fields:
    written = write_deepseek_layers(arch)
    return {
        _SHARED: written["n_shared_experts"],
        _FIRST: written[_FIRST],  # transformers reads the next key, and other programs this one
        "mlp_layer_types": write_mlp_types(arch),
        _WIDTH: arch.moe_intermediate_size,
        **({"num_nextn_predict_layers": arch.mtp_layers} if arch.mtp_layers else {}),
    }


register(
    Family(
        name="hy_v3",
        architecture=_Hy,
        hf_class="HYV3ForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 120832,
            "intermediate_size": 13312,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "attention_bias": False,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            _SHARED: 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
            "mlp_layer_types": None,
            _FIRST: 1,
        },
        weight_map=_MAP,
        other_maps=(_MAP_WITHOUT_COPIES,),
        modules=DENSE + moe_block(bias="e_score_correction_bias", shared="shared_experts"),
        fields={"routed_scaling_factor": "router_scaling_factor"},
        fixed=_FIXED,
        aliases={"num_local_experts": "num_experts", _WIDTH: "moe_intermediate_size"},
        constants=_ONLY,
        nullable={"mlp_layer_types": list, _SHARED: int},
        lora_layout="fused",  # PEFT does not convert the names of this type's experts
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={
            # The sizes are those of the class in transformers, and max_positions those of the
            # published config.json.
            "hy3-preview": _Hy(
                family="hy_v3",
                vocab_size=120_832,
                hidden_size=4096,
                num_layers=80,
                num_heads=64,
                num_kv_heads=8,
                head_dim=128,
                intermediate_size=13_312,
                max_positions=262_144,
                norm_eps=1e-5,
                rope_theta=11_158_840.0,
                num_experts=192,
                num_experts_per_token=8,
                moe_intermediate_size=1536,
                shared_intermediate_size=1536,
                moe_layers=(False,) + (True,) * 79,
                routed_scaling_factor=2.826,
                **_FIXED,
            )
        },
    )
)
