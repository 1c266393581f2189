"""DeepSeek-V3 and R1 (arXiv 2412.19437), Moonlight, Kimi-K2 and K2.5 to K2.7.

Attention is multi-head latent attention. The router scores by sigmoid, has a selection bias and
chooses among groups of experts. The first layers are dense, and the others have shared experts.
Files hold MTP blocks behind the model's own layers. An export copies them unchanged unless they are
trained (:mod:`moetrain.models.parts.multi_token`). ``kimi_k2`` is another name of ``deepseek_v3``.
``kimi_k25`` is a ``kimi_k2`` beside a vision tower, which an export copies unchanged, without MTP
blocks. Published files have ``layers`` where those that transformers 5 writes have ``blocks``.

Other families with this attention use :class:`LatentDecoder` and the tables of V3.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    MoEDecoder,
    beside_vision,
    moe_block,
    renamed,
)
from moetrain.models.family import Family, Rename, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts
from moetrain.models.parts.deepseek_router import (
    DEEPSEEK_FIELDS,
    SIGMOID_ROUTER,
    read_deepseek_layers,
    write_deepseek_layers,
)
from moetrain.models.parts.latent_attention import LatentAttention
from moetrain.models.parts.multi_token import MultiTokenDecoder, behind_layers
from moetrain.models.rope_scaling import RopeScaling

_MAX_WIDTH = 2**31 - 1


class LatentDecoder(MoEDecoder):
    """An MoE decoder with multi-head latent attention."""

    kinds = (LatentAttention, RoutedExperts, SwiGLU)

    rope_interleaved: bool = True
    q_lora_rank: int | None = Field(gt=0, le=_MAX_WIDTH)
    kv_lora_rank: int = Field(gt=0, le=_MAX_WIDTH)
    qk_nope_head_dim: int = Field(gt=0, le=_MAX_WIDTH)
    qk_rope_head_dim: int = Field(gt=0, le=_MAX_WIDTH)
    v_head_dim: int = Field(gt=0, le=_MAX_WIDTH)

    @model_validator(mode="before")
    @classmethod
    def _whole_heads(cls, values: Fields) -> Fields:
        """Set the width of a head to the sum of its two parts."""
        widths = [values.get(f"qk_{part}_head_dim") for part in ("nope", "rope")]
        # JSON's arrays are lists, and a strict model does not accept them as tuples.
        values = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
        return {**values, "head_dim": sum(n if type(n) is int else 0 for n in widths)}


class V3Decoder(MultiTokenDecoder, LatentDecoder):
    """A latent decoder that can have MTP blocks."""


def check_keys(config: ConfigJson, expected: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ConfigError if a key of ``config`` has a value that is not in ``expected``.

    A missing key counts as the first of its expected values.
    """
    for key, values in expected.items():
        if (value := config.get(key, values[0])) not in values:
            known = " or ".join(map(repr, values))
            problem = f"{key} {value!r:.80} is not supported, only {known}"
            raise error("config.json", f"{problem}; use a model that has it")


_ONLY: Fields = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def read_v3_layers(config: ConfigJson) -> Fields:
    """Read as :func:`read_deepseek_layers` does, but refuse values that no V3 model has."""
    check_keys(config, {key: (value,) for key, value in _ONLY.items()})
    return read_deepseek_layers(config)


def _renamed(**names: str) -> WeightMap:
    ours = "layers.{layer}.attn"
    theirs = "model.layers.{layer}.self_attn"
    return tuple(Rename(f"{ours}.{x}", f"{theirs}.{y}") for x, y in names.items())


LATENT_MAP: WeightMap = DENSE + _renamed(
    wq_a="q_a_proj",
    q_a_norm="q_a_layernorm",
    wq_b="q_b_proj",
    wkv_a="kv_a_proj_with_mqa",
    kv_a_norm="kv_a_layernorm",
    wkv_b="kv_b_proj",
)
_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT_FIELDS: Mapping[str, str] = {name: name for name in _WIDTHS}
# The width of a head is the sum of two others; files hold a head_dim that nothing reads.
_FIXED: Fields = {**SIGMOID_ROUTER, "head_dim": 0}
_MODEL = LATENT_MAP + moe_block(bias="gate.e_score_correction_bias", shared="shared_experts")
_MAP, _MAP_WITHOUT_COPIES = behind_layers(_MODEL)
_KIMI = renamed(_MODEL, lambda name: f"language_model.{name}")
V3: Fields = {
    "architecture": V3Decoder,
    "hf_class": "DeepseekV3ForCausalLM",
    "defaults": {
        **COMMON_DEFAULTS,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "rope_interleave": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
    },
    "weight_map": _MAP,
    "other_maps": (_MAP_WITHOUT_COPIES,),
    "fields": {**DEEPSEEK_FIELDS, **LATENT_FIELDS, "rope_interleaved": "rope_interleave"},
    "fixed": _FIXED,
    "aliases": {"num_local_experts": "n_routed_experts"},
    "nullable": {"q_lora_rank": int},
    "constants": _ONLY,
    "read_layers": read_v3_layers,
    "write_layers": write_deepseek_layers,
}
"""The arguments of :class:`~moetrain.models.family.Family` for DeepSeek-V3."""

# The presets' sizes were written from memory of the published config.json. Their parameter counts
# agree with the published ones (tests/models/families/test_families.py).
_COMMON: Fields = {
    "family": "deepseek_v3",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    **_FIXED,
}
_LARGE: Fields = {
    **_COMMON,
    "hidden_size": 7168,
    "num_layers": 61,
    "intermediate_size": 18_432,
    "q_lora_rank": 1536,
    "num_experts_per_token": 8,
    "moe_intermediate_size": 2048,
    "shared_intermediate_size": 2048,
}
_YARN = RopeScaling(
    kind="yarn",
    factor=40.0,
    original_max_positions=4096,
    mscale=1.0,
    mscale_all_dim=1.0,
)
_PRESETS: Mapping[str, Architecture] = {
    "deepseek-v3": V3Decoder(
        **_LARGE,
        vocab_size=129_280,
        num_heads=128,
        num_kv_heads=128,
        max_positions=163_840,
        rope=_YARN,
        num_experts=256,
        num_expert_groups=8,
        topk_expert_groups=4,
        moe_layers=(False,) * 3 + (True,) * 58,
        routed_scaling_factor=2.5,
    ),
    "kimi-k2": V3Decoder(
        **_LARGE,
        vocab_size=163_840,
        num_heads=64,
        num_kv_heads=64,
        max_positions=131_072,
        rope_theta=5e4,
        rope=_YARN.model_copy(update={"factor": 32.0, "beta_fast": 1.0}),
        num_experts=384,
        moe_layers=(False,) + (True,) * 60,
        routed_scaling_factor=2.827,
    ),
    "moonlight-16b-a3b": V3Decoder(
        **_COMMON,
        vocab_size=163_840,
        hidden_size=2048,
        num_layers=27,
        num_heads=16,
        num_kv_heads=16,
        intermediate_size=11_264,
        max_positions=8192,
        norm_eps=1e-5,
        rope_theta=5e4,
        q_lora_rank=None,
        num_experts=64,
        num_experts_per_token=6,
        moe_intermediate_size=1408,
        shared_intermediate_size=2816,
        moe_layers=(False,) + (True,) * 26,
        routed_scaling_factor=2.446,
    ),
}

register(Family(name="deepseek_v3", **V3, presets=_PRESETS))
register(Family(name="kimi_k2", **V3))
register(
    Family(
        name="kimi_k25",
        **{
            **V3,
            "architecture": LatentDecoder,
            "hf_class": "KimiK25ForConditionalGeneration",
            "defaults": {**V3["defaults"], "tie_word_embeddings": True},
            "weight_map": _KIMI,
            "other_maps": (renamed(_KIMI, lambda name: name.replace(".layers.", ".blocks.")),),
            "section": ("text_config", "kimi_k2"),
            "modules": beside_vision(_MODEL),
            "lora_layout": "fused",  # PEFT does not convert the names of this type's experts
        },
    )
)
