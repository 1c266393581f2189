"""AFMoE, the Trinity models: gated attention, windows in most layers, and four norms a block.

Only layers with a window rotate queries and keys, so the others reach any length. The result of
attention is multiplied by a sigmoid of a projection of the token. Each part has a norm before and
after it. Embeddings are multiplied by the root of the width. The router is DeepSeek-V3's, and
computes its product in the compute dtype. The first layers are dense.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from moetrain.models.architecture import Architecture, AttentionPart, ConfigJson, Fields, Part
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE, MoEDecoder, moe_block
from moetrain.models.families.deepseek import check_keys
from moetrain.models.family import Family, Rename, register
from moetrain.models.hf.files import error
from moetrain.models.parts.between_norms import ExpertsBetweenNorms, MLPBetweenNorms
from moetrain.models.parts.deepseek_router import SIGMOID_ROUTER
from moetrain.models.parts.gated_attention import GateActivation, GatedAttention, GateOf
from moetrain.models.parts.layer_types import FULL, SLIDING, read_types, write_types


@dataclass(frozen=True, kw_only=True)
class _Attention(GatedAttention):
    """Describes gated attention between two norms."""

    after: ClassVar[str] = "attn_out_norm"


class _Afmoe(MoEDecoder):
    """A decoder with four norms a block."""

    kinds = (_Attention, ExpertsBetweenNorms, MLPBetweenNorms)

    gate_of: ClassVar[GateOf] = "element"
    gate_activation: ClassVar[GateActivation] = "sigmoid"

    def attention(self, layer: int) -> AttentionPart:
        part = super().attention(layer)
        assert isinstance(part, _Attention)
        return part if part.window is not None else replace(part, partial_rotary_factor=0.0)

    def feed_forward(self, layer: int) -> Part:
        is_routed = self.moe_layers[layer] if self.moe_layers else self.num_experts > 0
        return (ExpertsBetweenNorms if is_routed else MLPBetweenNorms).of(self)


# Keys of published files that transformers does not read, and their only values there.
_ONLY: dict[str, tuple[Any, ...]] = {
    "score_func": ("sigmoid",),
    "route_norm": (True,),
    "n_group": (1, None),
    "topk_group": (1, None),
    "num_expert_groups": (1, None),
    "num_limited_groups": (1, None),
}


def _read_layers(config: ConfigJson) -> Fields:
    check_keys(config, _ONLY)
    count, every = config["num_hidden_layers"], config["global_attn_every_n_layers"]
    if every < 1:
        problem = f"global_attn_every_n_layers is {every}, expected 1 or more"
        raise error("config.json", problem)
    if config["num_shared_experts"] < 1:
        problem = f"num_shared_experts is {config['num_shared_experts']}, expected 1 or more"
        raise error("config.json", problem)
    types = config["layer_types"] or [SLIDING if (i + 1) % every else FULL for i in range(count)]
    return {
        **read_types(config, types),
        "moe_layers": tuple(i >= config["num_dense_layers"] for i in range(count)),
        "shared_intermediate_size": config["num_shared_experts"] * config["moe_intermediate_size"],
    }


def _write_layers(arch: Architecture) -> Fields:
    return {
        **write_types(arch),
        "num_dense_layers": min(arch.moe_layer_indices, default=arch.num_layers),
        "num_shared_experts": arch.shared_intermediate_size // arch.moe_intermediate_size,
    }


_LAYER = "model.layers.{layer}"
_MODULES = {
    "attn.wg": "self_attn.gate_proj",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}
_WEIGHT_MAP = (
    *(one for one in DENSE if not one.ours.endswith("mlp_norm")),
    *(
        Rename(f"layers.{{layer}}.{ours}", f"{_LAYER}.{theirs}")
        for ours, theirs in _MODULES.items()
    ),
    *moe_block(router="router.gate.weight", bias="expert_bias", shared="shared_experts"),
)
_FIXED: Fields = {
    **SIGMOID_ROUTER,
    "router_fp32": False,
    "norm_topk_prob": True,
    "qk_norm": True,
    "late_norms": True,
}


def _preset(num_layers: int, window: int, **sizes: Any) -> _Afmoe:
    return _Afmoe(
        family="afmoe",
        vocab_size=200_192,
        num_layers=num_layers,
        head_dim=128,
        norm_eps=1e-5,
        scaled_embeddings=True,
        sliding_windows=((window,) * 3 + (None,)) * (num_layers // 4),
        **sizes,
        **_FIXED,
    )


def _small(num_layers: int, moe_width: int, **sizes: Any) -> _Afmoe:
    """Return Trinity-Nano or Mini, which have the same experts but for their width."""
    return _preset(
        num_layers,
        2048,
        max_positions=131_072,
        moe_layers=(False,) * 2 + (True,) * (num_layers - 2),
        num_experts=128,
        num_experts_per_token=8,
        moe_intermediate_size=moe_width,
        shared_intermediate_size=moe_width,
        routed_scaling_factor=2.826,
        **sizes,
    )


register(
    Family(
        name="afmoe",
        architecture=_Afmoe,
        hf_class="AfmoeForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 200_192,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 1408,
            "num_dense_layers": 1,
            "num_attention_heads": 16,
            "head_dim": 128,
            "max_position_embeddings": 16_384,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "route_scale": 1.0,
            "global_attn_every_n_layers": 4,
            "sliding_window": 1024,
            "layer_types": None,
            "mup_enabled": False,
            "attention_bias": False,
        },
        weight_map=_WEIGHT_MAP,
        fields={"routed_scaling_factor": "route_scale", "scaled_embeddings": "mup_enabled"},
        fixed=_FIXED,
        nullable={"layer_types": list, "sliding_window": int},
        constants={key: values[0] for key, values in _ONLY.items()},
        read_layers=_read_layers,
        write_layers=_write_layers,
        # The sizes of Nano and Mini are those of the published config.json. Those of Large were
        # written down from memory, and their total is the published one.
        presets={
            "trinity-nano": _small(
                56,
                256,
                hidden_size=1024,
                num_heads=8,
                num_kv_heads=2,
                intermediate_size=3072,
            ),
            "trinity-mini": _small(
                32,
                1024,
                hidden_size=2048,
                num_heads=32,
                num_kv_heads=4,
                intermediate_size=6144,
            ),
            "trinity-large": _preset(
                60,
                4096,
                hidden_size=3072,
                num_heads=48,
                num_kv_heads=8,
                intermediate_size=12_288,
                max_positions=262_144,
                moe_layers=(False,) * 6 + (True,) * 54,
                num_experts=256,
                num_experts_per_token=4,
                moe_intermediate_size=3072,
                shared_intermediate_size=3072,
                routed_scaling_factor=2.448,
            ),
        },
    )
)
