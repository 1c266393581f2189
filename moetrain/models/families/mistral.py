"""Mistral-Small-4 (``mistral4``): DeepSeek-V3's attention, with queries that grow by the position.

A query is multiplied by 1 + beta ln(1 + floor(position / interval)), where the interval is the
length of rows before YaRN. The router is a softmax, whose chosen scores are renormalised, without a
selection bias. All layers have experts and a shared one.

Published files describe the model in ``mistral3``, beside a vision tower, which an export copies
unchanged. Their experts are stacked; files with a tensor for each expert are read, too. Other
language models in ``mistral3``, which are dense, are refused.
"""

from pydantic import Field

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import beside_vision, moe_block, renamed, stacked
from moetrain.models.families.deepseek import (
    LATENT_FIELDS,
    LATENT_MAP,
    V3,
    LatentDecoder,
    check_keys,
)
from moetrain.models.family import Family, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.parts.deepseek_router import (
    DEEPSEEK_FIELDS,
    read_deepseek_layers,
    write_deepseek_layers,
)
from moetrain.models.rope_scaling import QueryScaling, RopeScaling

_TEXT = "mistral4"
_BETA = "llama_4_scaling_beta"
_SHARE = "partial_rotary_factor"


class _Mistral4(LatentDecoder):
    """A latent decoder whose queries have a factor by their position."""

    query_scale_beta: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    query_scale_interval: int = Field(default=8192, gt=0, le=2**31 - 1)

    @property
    def query_scaling(self) -> QueryScaling:
        return QueryScaling(beta=self.query_scale_beta, interval=self.query_scale_interval)


# ---- config.json -------------------------------------------------------------------------------

_ROPE: Fields = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    RopeScaling.ORIGINAL: 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


def _read_layers(config: ConfigJson) -> Fields:
    # A text_config without the key describes a dense model.
    check_keys({"model_type": config.get("model_type")}, {"model_type": (_TEXT,)})
    width = config["qk_rope_head_dim"]
    share = width / (config["qk_nope_head_dim"] + width)
    if config[_SHARE] not in (1.0, share):  # it follows from other keys; 1.0 where it is missing
        problem = f"{_SHARE} {config[_SHARE]!r:.80} is not supported, only {share:.4g}"
        raise error("config.json", f"{problem}, by qk_rope_head_dim; use a published model")
    rope = config.get("rope_scaling") or config["rope_parameters"]
    for key in (_BETA, RopeScaling.ORIGINAL):
        if type(rope.get(key)) not in (int, float):
            problem = f"rope_parameters has {key} {rope.get(key)!r:.80}, expected a number"
            raise error("config.json", f"{problem}; use a published model's")
    return {
        **read_deepseek_layers(config),
        "query_scale_beta": float(rope[_BETA]),
        "query_scale_interval": rope[RopeScaling.ORIGINAL],
    }


def _write_layers(arch: Architecture) -> Fields:
    assert isinstance(arch, _Mistral4)
    rope = {
        **(arch.rope.to_hf() or {"rope_type": "default"}),
        "rope_theta": arch.rope_theta,
        _BETA: arch.query_scale_beta,
        RopeScaling.ORIGINAL: arch.query_scale_interval,
    }
    return {**write_deepseek_layers(arch), "rope_parameters": rope}


# ---- weights and families ----------------------------------------------------------------------

_EXPERTS = moe_block(shared="shared_experts")
_STACKED: WeightMap = LATENT_MAP + stacked(_EXPERTS)
_SEPARATE: WeightMap = LATENT_MAP + _EXPERTS


def _inner(weight_map: WeightMap) -> WeightMap:
    """Return ``weight_map`` for files of ``mistral3``."""
    return renamed(weight_map, lambda name: f"language_model.{name}")


_FIXED: Fields = {
    "router_score": "softmax",
    # The reference adds 1e-20 to the sum. The sum is 1e-3 or more, since there are few experts.
    "router_min_sum": 1e-20,
    "head_dim": 0,
    _SHARE: 1.0,
}
_SHARED: Fields = {
    "architecture": _Mistral4,
    "fields": {**DEEPSEEK_FIELDS, **LATENT_FIELDS, "rope_interleaved": "rope_interleave"},
    "fixed": _FIXED,
    "aliases": {"num_local_experts": "n_routed_experts"},
    "nullable": {"q_lora_rank": int, _SHARE: float},
    "lora_layout": "fused",  # experts are stacked
    "read_layers": _read_layers,
    "write_layers": _write_layers,
}
_DEFAULTS: Fields = {
    **V3["defaults"],
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 1_048_576,
    "rope_parameters": _ROPE,
    _SHARE: None,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 4,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}

register(
    Family(
        name=_TEXT,
        hf_class="Mistral4ForCausalLM",
        defaults=_DEFAULTS,
        weight_map=_STACKED,
        other_maps=(_SEPARATE,),
        # The sizes are those of the config class of transformers. The total is the published one.
        presets={
            "mistral-small-4-119b": _Mistral4(
                family=_TEXT,
                vocab_size=131_072,
                hidden_size=4096,
                num_layers=36,
                num_heads=32,
                num_kv_heads=32,
                intermediate_size=12_288,
                max_positions=1_048_576,
                rope=RopeScaling(
                    kind="yarn",
                    factor=128.0,
                    original_max_positions=8192,
                    mscale=1.0,
                    mscale_all_dim=1.0,
                ),
                q_lora_rank=1024,
                kv_lora_rank=256,
                qk_nope_head_dim=64,
                qk_rope_head_dim=64,
                v_head_dim=128,
                num_experts=128,
                num_experts_per_token=4,
                moe_intermediate_size=2048,
                shared_intermediate_size=2048,
                **_FIXED,
            )
        },
        **_SHARED,
    )
)
register(
    Family(
        name="mistral3",
        hf_class="Mistral3ForConditionalGeneration",
        defaults={**_DEFAULTS, "tie_word_embeddings": True},
        weight_map=_inner(_STACKED),
        other_maps=(_inner(_SEPARATE),),
        modules=beside_vision(_STACKED),
        section=("text_config", _TEXT),
        **_SHARED,
    )
)
