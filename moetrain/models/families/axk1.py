"""A.X-K1 (SK Telecom): DeepSeek-V3 with a norm of each MoE layer's result.

Published files hold such a norm for dense layers too, which do not use it; an export copies it
unchanged. They hold no selection biases, which are then zero. Files that ``transformers`` writes
hold them. An export has the layout of its source: where that has no biases, it leaves out those
that training has moved, with a warning.
"""

from moetrain.models.architecture import Architecture, ConfigJson, Fields, Part
from moetrain.models.decoders import moe_block
from moetrain.models.families.deepseek import (
    LATENT_MAP,
    V3,
    LatentDecoder,
    check_keys,
)
from moetrain.models.family import Family, Rename, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts
from moetrain.models.parts.between_norms import ExpertsBetweenNorms
from moetrain.models.parts.deepseek_router import read_deepseek_layers, write_deepseek_layers
from moetrain.models.parts.latent_attention import LatentAttention
from moetrain.models.parts.layer_types import read_mlp_types, write_mlp_types


class _AXK1(LatentDecoder):
    """A latent decoder with a norm of each MoE layer's result."""

    kinds = (LatentAttention, ExpertsBetweenNorms, SwiGLU)

    def feed_forward(self, layer: int) -> Part:
        part = super().feed_forward(layer)
        return ExpertsBetweenNorms.of(self) if isinstance(part, RoutedExperts) else part


_THEIRS = "model.layers.{layer}.mlp.gate.e_score_correction_bias"
_FIRST, _EVERY = "first_k_dense_replace", "moe_layer_freq"


def _read_layers(config: ConfigJson) -> Fields:
    """Read the MoE layers, and the width of shared experts."""
    check_keys(config, {"scoring_func": ("sigmoid",)})
    if (every := config[_EVERY]) < 1:
        raise error("config.json", f"{_EVERY} is {every}, expected 1 or more")
    read = read_deepseek_layers(config)
    by_number = [is_routed and i % every == 0 for i, is_routed in enumerate(read["moe_layers"])]
    return {**read, "moe_layers": read_mlp_types(config, by_number)}


def _write_layers(arch: Architecture) -> Fields:
    # Other programs than transformers read the first layers' number.
    return {**write_deepseek_layers(arch), "mlp_layer_types": write_mlp_types(arch)}


_MAP_WITHOUT_BIASES: WeightMap = (
    *LATENT_MAP,
    Rename("layers.{layer}.mlp_out_norm", "model.layers.{layer}.post_mlp_layernorm"),
    *moe_block(shared="shared_experts"),
)
_BIAS = Rename("layers.{layer}.moe.router.bias", _THEIRS)
_MAP: WeightMap = (*_MAP_WITHOUT_BIASES, _BIAS)
_OWN: Fields = {
    "architecture": _AXK1,
    "hf_class": "AXK1ForCausalLM",
    "defaults": {
        **V3["defaults"],
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "max_position_embeddings": 32768,
        "n_routed_experts": 192,
        "mlp_layer_types": None,
        _FIRST: 1,
        _EVERY: 1,
    },
    "weight_map": _MAP,
    "other_maps": (_MAP_WITHOUT_BIASES,),
    "unused": r"model\.layers\.\d+\.post_mlp_layernorm\.weight",
    "nullable": {"mlp_layer_types": list},
    "lora_layout": "fused",  # PEFT does not convert the names of this type's experts
    "read_layers": _read_layers,
    "write_layers": _write_layers,
    "presets": {
        # The sizes are those of the class in transformers.
        "a.x-k1": _AXK1(
            family="axk1",
            vocab_size=163_840,
            hidden_size=7168,
            num_layers=61,
            num_heads=64,
            num_kv_heads=64,
            intermediate_size=18_432,
            max_positions=32_768,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            num_experts=192,
            num_experts_per_token=8,
            num_expert_groups=8,
            topk_expert_groups=4,
            moe_intermediate_size=2048,
            shared_intermediate_size=2048,
            moe_layers=(False,) + (True,) * 60,
            routed_scaling_factor=2.5,
            **V3["fixed"],
        )
    },
}

register(Family(name="axk1", **{**V3, **_OWN}))
