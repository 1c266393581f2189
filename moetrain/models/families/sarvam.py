"""Sarvam's 30B and 105B: GLM-4.5 and DeepSeek-V3, with other names of keys and tensors.

``sarvam_moe`` (30B) rotates whole heads, and its files stack the rows of queries, keys and values.
``sarvam_mla`` (105B) has DeepSeek-V3's files, a name of its own for the rope type yarn, and a
``head_dim`` that nothing reads. Neither has MTP blocks.
"""

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE, MoEDecoder, moe_block, renamed
from moetrain.models.families.deepseek import LATENT_MAP, V3, LatentDecoder, check_keys
from moetrain.models.family import Family, WeightMap, register
from moetrain.models.hf.take_rows import TakeRows
from moetrain.models.parts.deepseek_router import (
    SIGMOID_ROUTER,
    read_deepseek_layers,
    write_deepseek_layers,
)
from moetrain.models.rope_scaling import RopeScaling

# ---- config.json -------------------------------------------------------------------------------

_SHARED, _DEEPSEEK_SHARED = "num_shared_experts", "n_shared_experts"
_KNOWN = {
    "score_function": ("sigmoid",),
    "scoring_func": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
    "use_bias": (False,),
    "use_qkv_bias": (False,),
}
_ALIASES = {
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    _DEEPSEEK_SHARED: _SHARED,
}
"""The names that ``transformers`` writes, and those of published files."""
_FIELDS = {
    "num_expert_groups": "n_group",
    "topk_expert_groups": "topk_group",
    "routed_scaling_factor": "routed_scaling_factor",
}
_COMMON: Fields = {
    "vocab_size": 262144,
    "num_attention_heads": 64,
    "num_experts": 128,
    _SHARED: 1,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}


def _read_layers(config: ConfigJson) -> Fields:
    """Read the MoE layers, and the width of shared experts."""
    check_keys(config, _KNOWN)  # no published model has other values
    return read_deepseek_layers({**config, _DEEPSEEK_SHARED: config[_SHARED]})


def _write_layers(arch: Architecture) -> Fields:
    written = write_deepseek_layers(arch)
    written[_SHARED] = written.pop(_DEEPSEEK_SHARED)
    return written


# ---- weights -----------------------------------------------------------------------------------

_NAMES = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
}
_SPLIT = ("wq", "wk", "wv")


def _published(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _rows(arch: Architecture) -> tuple[int, ...]:
    """Return the numbers of rows of queries, keys and values."""
    sizes = GroupedQueryAttention.of(arch, window=None)
    return sizes.query_width, sizes.widths[1], sizes.widths[1]


_MAP: WeightMap = (
    *renamed(
        tuple(one for one in DENSE if not one.ours.endswith(_SPLIT)),
        _published,
    ),
    TakeRows(
        tuple(f"layers.{{layer}}.attn.{name}.weight" for name in _SPLIT),
        "model.layers.{layer}.attention.query_key_value.weight",
        _rows,
    ),
    *moe_block(bias="gate.expert_bias", shared="shared_experts"),
)

# ---- families ----------------------------------------------------------------------------------

_FIXED: Fields = {**SIGMOID_ROUTER, "out_bias": False}
register(
    Family(
        name="sarvam_moe",
        architecture=MoEDecoder,
        hf_class="SarvamMoEForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            **_COMMON,
            "intermediate_size": 8192,
            "num_hidden_layers": 19,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_theta": 8000000.0,
            "partial_rotary_factor": 1.0,
            "use_qkv_bias": False,
            "use_qk_norm": True,
            "moe_intermediate_size": 1024,
            "num_experts_per_tok": 6,
        },
        weight_map=_MAP,
        modules=DENSE + moe_block(shared="shared_experts", bias="gate.e_score_correction_bias"),
        fields={**_FIELDS, "qk_norm": "use_qk_norm"},
        fixed=_FIXED,
        aliases={**_ALIASES, "attention_bias": "use_qkv_bias"},
        constants={
            "use_bias": False,
            "use_rmsnorm": True,
            "embedding_dropout": 0.0,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
        lora_layout="fused",  # PEFT does not convert the names of this type's experts
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={
            "sarvam-30b": MoEDecoder(
                family="sarvam_moe",
                vocab_size=262_144,
                hidden_size=4096,
                num_layers=19,
                num_heads=64,
                num_kv_heads=4,
                head_dim=64,
                intermediate_size=8192,
                max_positions=131_072,
                rope_theta=8e6,
                qk_norm=True,
                num_experts=128,
                num_experts_per_token=6,
                moe_intermediate_size=1024,
                shared_intermediate_size=1024,
                moe_layers=(False,) + (True,) * 18,
                routed_scaling_factor=2.5,
                **_FIXED,
            )
        },
    )
)
_LATENT: Fields = {
    "architecture": LatentDecoder,
    "hf_class": "SarvamMLAForCausalLM",
    "defaults": {
        **{key: value for key, value in V3["defaults"].items() if key not in _ALIASES},
        **_COMMON,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "q_lora_rank": None,
    },
    "weight_map": LATENT_MAP
    + moe_block(bias="gate.e_score_correction_bias", shared="shared_experts"),
    "other_maps": (),
    "fields": {**V3["fields"], **_FIELDS, "num_experts": "num_experts"},
    "aliases": _ALIASES,
    "read_layers": _read_layers,
    "write_layers": _write_layers,
    "presets": {
        "sarvam-105b": LatentDecoder(
            family="sarvam_mla",
            vocab_size=262_144,
            hidden_size=4096,
            num_layers=32,
            num_heads=64,
            num_kv_heads=64,
            intermediate_size=16_384,
            max_positions=131_072,
            rope=RopeScaling(
                kind="yarn",
                factor=40.0,
                original_max_positions=4096,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            num_experts=128,
            num_experts_per_token=8,
            moe_intermediate_size=2048,
            shared_intermediate_size=2048,
            moe_layers=(False,) + (True,) * 31,
            routed_scaling_factor=2.5,
            **V3["fixed"],
        )
    },
}
register(Family(name="sarvam_mla", **{**V3, **_LATENT}))
