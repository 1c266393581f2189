"""Mellum2 (arXiv 2605.31268): Qwen3-MoE with windows, whose layers have rotary angles of their own.

Files hold an MTP block under ``mtp.``, whose attention has a window. An export copies it unchanged
unless it is trained (:mod:`moetrain.models.parts.multi_token`).
"""

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE, MoEDecoder, moe_block
from moetrain.models.families.deepseek import check_keys
from moetrain.models.families.qwen import read_windows, write_windows
from moetrain.models.family import Family, register
from moetrain.models.parts.layer_types import (
    FULL,
    ROPE_BY_KIND,
    ROUTED_MLP,
    SLIDING,
    WindowedRopes,
    read_mlp_types,
    read_ropes,
    write_mlp_types,
    write_ropes,
)
from moetrain.models.parts.multi_token import MultiTokenDecoder, under_mtp


class _Mellum(MultiTokenDecoder, WindowedRopes, MoEDecoder):
    """An MoE decoder with rotary angles by the kind of layer."""

    mtp_has_window = True


_FIXED: Fields = {"qk_norm": True}
_ROPES: dict[str, Fields] = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}


def _read_layers(config: ConfigJson) -> Fields:
    """Read windows, MoE layers and rotary angles; by default all layers are full and routed."""
    own = {"mtp_layer_types": [SLIDING], "mtp_mlp_layer_types": [ROUTED_MLP]}
    check_keys(config, {key: (None, [], kinds) for key, kinds in own.items()})
    count = config["num_hidden_layers"]
    types = [FULL] * count if config["layer_types"] is None else config["layer_types"]
    return {
        **read_windows({**config, "layer_types": types}),
        "moe_layers": read_mlp_types(config, (True,) * count),
        **read_ropes(config, _ROPES, {str(kind) for kind in types}),
    }


def _write_layers(arch: Architecture) -> Fields:
    written = write_windows(arch)
    del written["use_sliding_window"]
    return {
        **written,
        "mlp_layer_types": write_mlp_types(arch),
        "rope_parameters": write_ropes(arch),
        **({"num_nextn_predict_layers": arch.mtp_layers} if arch.mtp_layers else {}),
    }


register(
    Family(
        name="mellum",
        architecture=_Mellum,
        hf_class="MellumForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 98304,
            "hidden_size": 2304,
            "intermediate_size": 7168,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "attention_bias": False,
            "sliding_window": 1024,
            "layer_types": None,
            "mlp_layer_types": None,
            "moe_intermediate_size": 896,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
        },
        weight_map=under_mtp(DENSE + moe_block())[0],
        fixed=_FIXED,
        aliases={"num_local_experts": "num_experts", "rope_parameters": ROPE_BY_KIND},
        nullable={"sliding_window": int, "layer_types": list, "mlp_layer_types": list},
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={
            # Published files also stretch the angles of layers without a window, by YaRN.
            "mellum2-12b-a2.5b": _Mellum(
                family="mellum",
                vocab_size=98_304,
                hidden_size=2304,
                num_layers=28,
                num_heads=32,
                num_kv_heads=4,
                head_dim=128,
                intermediate_size=7168,
                max_positions=131_072,
                rope_theta=500_000.0,
                window_rope_theta=10_000.0,
                sliding_windows=(1024, 1024, 1024, None) * 7,
                num_experts=64,
                num_experts_per_token=8,
                moe_intermediate_size=896,
                router_aux_loss_coef=0.001,
                **_FIXED,
            )
        },
    )
)
