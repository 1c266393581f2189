"""DeepSeek-V2 (arXiv 2405.04434): V3's latent attention with a softmax router.

The router's weights are not renormalised. With ``topk_method`` group_limited_greedy a token chooses
among a few groups of experts, and a group's score is that of its best expert.

Left out on purpose: biases of feed-forward layers (``mlp_bias``), which no published model has.
"""

from collections.abc import Mapping
from typing import Any

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import moe_block
from moetrain.models.families.deepseek import (
    LATENT_FIELDS,
    LATENT_MAP,
    V3,
    LatentDecoder,
    check_keys,
)
from moetrain.models.family import Family, register
from moetrain.models.hf.files import error
from moetrain.models.parts.deepseek_router import read_deepseek_layers, write_deepseek_layers
from moetrain.models.rope_scaling import RopeScaling

_FIXED: Fields = {
    "router_fp32": True,
    "norm_topk_prob": False,
    "best_of_group": True,
    "mlp_bias": False,
    "rope_interleaved": True,
    "head_dim": 0,
    # _read_layers sets the groups if topk_method uses them.
    "num_expert_groups": 1,
    "topk_expert_groups": 1,
}
_GROUPS = {"num_expert_groups": "n_group", "topk_expert_groups": "topk_group"}
_GREEDY = "greedy"
_GROUPED = "group_limited_greedy"
_KNOWN: Mapping[str, tuple[Any, ...]] = {
    "moe_layer_freq": (1,),
    "scoring_func": ("softmax",),
    "topk_method": (_GREEDY, _GROUPED),
    # DeepSeek's own code obeys this key, and transformers ignores it. With these values both agree.
    "norm_topk_prob": (False, None),
    "mlp_bias": (False,),
}


def _read_layers(config: ConfigJson) -> Fields:
    """Read the layers as V3 does, and the groups of experts if ``topk_method`` uses them."""
    check_keys(config, _KNOWN)
    read = read_deepseek_layers(config)
    if config["topk_method"] == _GROUPED:
        for field, key in _GROUPS.items():
            if config[key] is None:
                raise error("config.json", f"{key} is None, expected a number of groups")
            read[field] = config[key]
    return read


def _write_layers(arch: Architecture) -> Fields:
    return {
        **write_deepseek_layers(arch),
        "topk_method": _GROUPED if arch.num_expert_groups > 1 else _GREEDY,
        **{key: getattr(arch, field) for field, key in _GROUPS.items()},
        "norm_topk_prob": False,
        "mlp_bias": False,
    }


_LEFT_OUT = ("rope_interleave", "norm_topk_prob")
_DEFAULTS = {key: value for key, value in V3["defaults"].items() if key not in _LEFT_OUT}

register(
    Family(
        name="deepseek_v2",
        architecture=LatentDecoder,
        hf_class="DeepseekV2ForCausalLM",
        defaults={
            **_DEFAULTS,
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "moe_intermediate_size": 1407,
            "num_experts_per_tok": 6,  # a file must have it: transformers has no default
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "routed_scaling_factor": 1.0,
            "n_group": None,
            "topk_group": None,
            "topk_method": _GREEDY,
            "first_k_dense_replace": 0,
        },
        weight_map=LATENT_MAP + moe_block(shared="shared_experts"),
        fields={
            **LATENT_FIELDS,
            "num_experts": "n_routed_experts",
            "routed_scaling_factor": "routed_scaling_factor",
        },
        fixed=_FIXED,
        aliases={"num_experts": "n_routed_experts"},
        nullable={"q_lora_rank": int, "n_group": int, "topk_group": int},
        constants={"moe_layer_freq": 1, "scoring_func": "softmax"},
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={
            # These sizes were written from memory. Their total is the published 15.7 billion.
            "deepseek-v2-lite": LatentDecoder(
                family="deepseek_v2",
                vocab_size=102_400,
                hidden_size=2048,
                num_layers=27,
                num_heads=16,
                num_kv_heads=16,
                intermediate_size=10_944,
                max_positions=163_840,
                rope=RopeScaling(
                    kind="yarn",
                    factor=40.0,
                    original_max_positions=4096,
                    mscale=0.707,
                    mscale_all_dim=0.707,
                ),
                q_lora_rank=None,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                num_experts=64,
                num_experts_per_token=6,
                moe_intermediate_size=1408,
                shared_intermediate_size=2816,
                moe_layers=(False,) + (True,) * 26,
                **_FIXED,
            )
        },
    )
)
