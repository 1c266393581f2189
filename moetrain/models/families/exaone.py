"""K-EXAONE (LG AI Research): Qwen3's attention with DeepSeek-V3's router and a shared expert.

Most layers have a window, and the others have no rotary embeddings. The first layer is dense. Files
hold an MTP block under ``mtp.``, which an export copies unchanged.
"""

from dataclasses import replace

from moetrain.models.architecture import Architecture, AttentionPart, ConfigJson, Fields
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE, MoEDecoder, moe_block
from moetrain.models.families.deepseek import check_keys
from moetrain.models.families.qwen import read_windows, write_windows
from moetrain.models.family import Family, register
from moetrain.models.hf.files import error
from moetrain.models.parts.deepseek_router import (
    SIGMOID_ROUTER,
    read_deepseek_layers,
    write_deepseek_layers,
)
from moetrain.models.parts.layer_types import FULL, SLIDING, read_mlp_types, write_mlp_types

_SHARED = "num_shared_experts"
_FIRST = "first_k_dense_replace"
_WINDOW = 4096
"""The window that a config.json names if no layer has one."""


class _Exaone(MoEDecoder):
    """An MoE decoder whose layers without a window have no rotary embeddings."""

    def attention(self, layer: int) -> AttentionPart:
        part = super().attention(layer)
        return part if part.window is not None else replace(part, partial_rotary_factor=0.0)


_FIXED: Fields = {**SIGMOID_ROUTER, "qk_norm": True}


def _read_types(config: ConfigJson) -> list[str]:
    """Read the kind of each layer's attention, from ``layer_types`` or ``sliding_window_pattern``.

    Raises ConfigError: the pattern is not a number of layers.
    """
    if config["layer_types"] is not None:
        return config["layer_types"]
    count, pattern = config["num_hidden_layers"], config.get("sliding_window_pattern", 4)
    if type(pattern) is not int or pattern < 1:
        problem = f"sliding_window_pattern is {pattern!r:.80}, expected a number of layers"
        raise error("config.json", f"{problem}; name each layer's kind in layer_types")
    return [SLIDING if (i + 1) % pattern else FULL for i in range(count)]


def _read_layers(config: ConfigJson) -> Fields:
    """Read windows, MoE layers and the width of shared experts."""
    check_keys(config, {"swiglu_limits": (None,), "sliding_windows": (None,)})
    read = read_deepseek_layers({**config, "n_shared_experts": config[_SHARED]})
    routed = read_mlp_types(config, read["moe_layers"])
    if (named := config.get("is_moe_layer")) not in (None, list(routed)):
        problem = f"is_moe_layer {named!r:.80} contradicts mlp_layer_types or {_FIRST}"
        raise error("config.json", f"{problem}; make them agree")
    return {
        **read,
        **read_windows({**config, "layer_types": _read_types(config)}),
        "moe_layers": routed,
    }


def _write_layers(arch: Architecture) -> Fields:
    windows, layers = write_windows(arch), write_deepseek_layers(arch)
    del windows["use_sliding_window"]
    return {
        **windows,
        "sliding_window": windows["sliding_window"] or _WINDOW,  # transformers takes no null
        _SHARED: layers["n_shared_experts"],
        _FIRST: layers[_FIRST],
        "is_moe_layer": [i in arch.moe_layer_indices for i in range(arch.num_layers)],
        "mlp_layer_types": write_mlp_types(arch),
    }


register(
    Family(
        name="exaone_moe",
        architecture=_Exaone,
        hf_class="ExaoneMoeForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "layer_types": None,
            "mlp_layer_types": None,
            _FIRST: 1,
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            _SHARED: 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
        weight_map=DENSE + moe_block(bias="e_score_correction_bias", shared="shared_experts"),
        fields={
            "num_expert_groups": "n_group",
            "topk_expert_groups": "topk_group",
            "routed_scaling_factor": "routed_scaling_factor",
        },
        fixed=_FIXED,
        nullable={"layer_types": list, "mlp_layer_types": list},
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={
            # The sizes are from memory; the total is the published 237 billion.
            "k-exaone-236b-a23b": _Exaone(
                family="exaone_moe",
                vocab_size=153_600,
                hidden_size=6144,
                num_layers=48,
                num_heads=64,
                num_kv_heads=8,
                head_dim=128,
                intermediate_size=18_432,
                max_positions=262_144,
                norm_eps=1e-5,
                rope_theta=1e6,
                sliding_windows=(128, 128, 128, None) * 12,
                num_experts=128,
                num_experts_per_token=8,
                moe_intermediate_size=2048,
                shared_intermediate_size=2048,
                moe_layers=(False,) + (True,) * 47,
                routed_scaling_factor=2.5,
                **_FIXED,
            )
        },
    )
)
