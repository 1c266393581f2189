"""ERNIE 4.5: neighbouring elements of a head rotate together, and the router has a selection bias.

The router's scores are a softmax. Some layers may be dense. MoE layers may have shared experts.

Left out on purpose: biases of linear layers (``use_bias``), which no published model has.
"""

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    MoEDecoder,
    moe_block,
)
from moetrain.models.family import Family, register
from moetrain.models.hf.files import error

_FIXED: Fields = {
    "rope_interleaved": True,
    "norm_topk_prob": True,
    "router_fp32": True,
    "selection_bias": True,
}
# Sizes of presets are those of the published config.json, from memory; their totals of parameters
# agree with what is published (tests/models/families/test_families.py).
_COMMON: Fields = {
    "family": "ernie4_5_moe",
    "vocab_size": 103_424,
    "head_dim": 128,
    "max_positions": 131_072,
    "norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "num_experts": 64,
    "router_min_sum": 1e-12,
    "router_aux_loss_coef": 0.001,
    **_FIXED,
}


def _read_layers(config: ConfigJson) -> Fields:
    """Read the MoE layers and the width of shared experts."""
    if config["use_bias"]:
        raise error("config.json", "use_bias true is not supported; use a model without biases")
    count = config["num_hidden_layers"]
    step = config["moe_layer_interval"]
    if step < 1:
        raise error("config.json", f"moe_layer_interval is {step}, expected 1 or more")
    first = config["moe_layer_start_index"]
    last = config["moe_layer_end_index"]
    last = count - 1 if last == -1 else last
    routed = (first <= i <= last and (i + 1) % step == 0 for i in range(count))
    width = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
    return {"moe_layers": tuple(routed), "shared_intermediate_size": width}


def _write_layers(arch: Architecture) -> Fields:
    routed = arch.moe_layer_indices or [arch.num_layers]
    return {
        "use_bias": False,
        "moe_layer_start_index": routed[0],
        "moe_layer_end_index": routed[-1],
        "moe_layer_interval": routed[1] - routed[0] if len(routed) > 1 else 1,
        "moe_num_shared_experts": arch.shared_intermediate_size // arch.moe_intermediate_size,
    }


register(
    Family(
        name="ernie4_5_moe",
        architecture=MoEDecoder,
        hf_class="Ernie4_5_MoeForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 103424,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_hidden_layers": 28,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            "use_bias": False,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
        },
        weight_map=DENSE
        + moe_block(
            bias="moe_statics.e_score_correction_bias",
            bias_place=(None,),
            shared="shared_experts",
        ),
        fields={
            "num_experts": "moe_num_experts",
            "num_experts_per_token": "moe_k",
            "router_min_sum": "moe_norm_min",
        },
        fixed=_FIXED,
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={
            "ernie-4.5-21b-a3b": MoEDecoder(
                **_COMMON,
                hidden_size=2560,
                num_layers=28,
                num_heads=20,
                num_kv_heads=4,
                intermediate_size=12_288,
                tie_embeddings=True,
                num_experts_per_token=6,
                moe_intermediate_size=1536,
                shared_intermediate_size=3072,
                moe_layers=(False,) + (True,) * 27,
            ),
            "ernie-4.5-300b-a47b": MoEDecoder(
                **_COMMON,
                hidden_size=8192,
                num_layers=54,
                num_heads=64,
                num_kv_heads=8,
                intermediate_size=28_672,
                num_experts_per_token=8,
                moe_intermediate_size=3584,
                moe_layers=(False,) * 3 + (True,) * 51,
            ),
        },
    )
)
