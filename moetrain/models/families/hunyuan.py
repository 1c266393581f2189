"""HunYuan-A13B: queries and keys are normalised after the rotation, and there is one shared expert.

``alpha`` enlarges the base of rotary embeddings. A config.json may give the number of a token's
experts for each layer. Numbers that differ between layers are refused.
"""

from dataclasses import replace

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    MoEDecoder,
    moe_block,
)
from moetrain.models.family import Family, register
from moetrain.models.hf.files import error
from moetrain.models.rope_scaling import RopeScaling

_FIXED: Fields = {
    "qk_norm": True,
    "qk_norm_of": "rotated",
    "norm_topk_prob": True,
    "router_fp32": True,
}
_NORMS = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}


def _renamed(theirs: str) -> str:
    module, _, leaf = theirs.rpartition(".")
    return f"{module}.{_NORMS[leaf]}" if leaf in _NORMS else theirs


def _read_layers(config: ConfigJson) -> Fields:
    """Read the number of a token's experts, from one number or one for each layer."""
    value = config["moe_topk"]
    counts = set(value) if isinstance(value, list) else {value}
    count = counts.pop() if counts else None
    if counts or type(count) is not int:
        problem = f"moe_topk is {value!r:.80}; only one number for all layers is supported"
        raise error("config.json", problem)
    return {"num_experts_per_token": count}


def _write_layers(arch: Architecture) -> Fields:
    return {"moe_topk": arch.num_experts_per_token}


register(
    Family(
        name="hunyuan_v1_moe",
        architecture=MoEDecoder,
        hf_class="HunYuanMoEV1ForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 290943,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "num_experts": 1,
            "moe_topk": 1,
        },
        weight_map=tuple(replace(one, theirs=_renamed(one.theirs)) for one in DENSE)
        + moe_block(router="gate.wg.weight", shared="shared_mlp"),
        fields={
            "moe_intermediate_size": "intermediate_size",
            "shared_intermediate_size": "intermediate_size",
        },
        # _read_layers sets num_experts_per_token. Until then sizes are checked with this value.
        fixed={**_FIXED, "num_experts_per_token": 1},
        aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
        nullable={"moe_topk": object},
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={
            # The sizes are from memory; the total is the published 80 billion.
            "hunyuan-a13b": MoEDecoder(
                family="hunyuan_v1_moe",
                vocab_size=128_167,
                hidden_size=4096,
                num_layers=32,
                num_heads=32,
                num_kv_heads=8,
                head_dim=128,
                intermediate_size=3072,
                max_positions=32_768,
                norm_eps=1e-5,
                tie_embeddings=True,
                rope=RopeScaling(kind="dynamic", alpha=1000.0),
                num_experts=64,
                num_experts_per_token=8,
                moe_intermediate_size=3072,
                shared_intermediate_size=3072,
                **_FIXED,
            )
        },
    )
)
