"""Solar-Open (Upstage): Llama's attention, DeepSeek-V3's router and shared expert in every layer.

There are no dense layers, no norms of queries and keys, and the whole head rotates.
"""

from moetrain.models.architecture import ConfigJson, Fields
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE, MoEDecoder, moe_block
from moetrain.models.families.deepseek import check_keys
from moetrain.models.family import Family, register
from moetrain.models.parts.deepseek_router import (
    DEEPSEEK_FIELDS,
    SIGMOID_ROUTER,
    read_deepseek_layers,
    write_deepseek_layers,
)
from moetrain.models.rope_scaling import RopeScaling

_FIXED: Fields = {**SIGMOID_ROUTER, "out_bias": False}
_FIRST = "first_k_dense_replace"


def _read_layers(config: ConfigJson) -> Fields:
    """Read the width of shared experts; published files say that there are no dense layers."""
    check_keys(config, {_FIRST: (0,), "use_qk_norm": (False,)})
    return read_deepseek_layers({**config, _FIRST: 0})


register(
    Family(
        name="solar_open",
        architecture=MoEDecoder,
        hf_class="SolarOpenForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 196608,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "attention_bias": False,
            "moe_intermediate_size": 1280,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        weight_map=DENSE + moe_block(bias="gate.e_score_correction_bias", shared="shared_experts"),
        # Only dense layers have a width of their own.
        fields={**DEEPSEEK_FIELDS, "intermediate_size": "moe_intermediate_size"},
        fixed=_FIXED,
        aliases={"num_local_experts": "n_routed_experts"},
        read_layers=_read_layers,
        write_layers=write_deepseek_layers,
        presets={
            "solar-open-100b": MoEDecoder(
                family="solar_open",
                vocab_size=196_608,
                hidden_size=4096,
                num_layers=48,
                num_heads=64,
                num_kv_heads=8,
                head_dim=128,
                intermediate_size=1280,
                max_positions=131_072,
                norm_eps=1e-5,
                rope_theta=1e6,
                rope=RopeScaling(kind="yarn", factor=2.0, original_max_positions=65_536),
                num_experts=128,
                num_experts_per_token=8,
                moe_intermediate_size=1280,
                shared_intermediate_size=1280,
                **_FIXED,
            )
        },
    )
)
