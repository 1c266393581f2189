"""LFM2's mixtures of experts (``lfm2_moe``, arXiv 2511.23404): short convolutions, some attention.

``layer_types`` says which layers have attention, with norms of queries and keys. The others have a
gated short convolution. The first layers are dense. The router scores by sigmoid, has a selection
bias, and adds 1e-6 to the sum by which it divides the chosen experts' scores.
"""

from typing import Any

from pydantic import Field

from moetrain.models.architecture import Architecture, AttentionPart, ConfigJson, Fields
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.decoders import COMMON_DEFAULTS, MoEDecoder, moe_block
from moetrain.models.families.deepseek import check_keys
from moetrain.models.family import Family, Rename, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.hf.take_rows import TakeRows
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts
from moetrain.models.parts.layer_types import FULL
from moetrain.models.parts.short_convolution import ShortConvolution

_CONV = "conv"


class _Lfm2(MoEDecoder):
    """An MoE decoder with short convolutions in place of attention in ``linear_layers``."""

    kinds = (GroupedQueryAttention, RoutedExperts, SwiGLU, ShortConvolution)

    conv_kernel_dim: int = Field(default=3, ge=0, le=2**31 - 1)

    def attention(self, layer: int) -> AttentionPart:
        is_conv = self.linear_layers and self.linear_layers[layer]
        return ShortConvolution.of(self, window=None) if is_conv else super().attention(layer)


# ---- config.json -------------------------------------------------------------------------------


def _read_layers(config: ConfigJson) -> Fields:
    check_keys(config, {"conv_bias": (False,)})
    types = config["layer_types"]
    if types is None:
        problem = f"layer_types is null, expected a list of {_CONV!r} and {FULL!r}"
        raise error("config.json", f"{problem}; use a published model's")
    if unknown := sorted({str(kind) for kind in types} - {_CONV, FULL}):
        raise error("config.json", f"layer_types {', '.join(unknown)} are not supported")
    dense = config["num_dense_layers"]
    return {
        "linear_layers": tuple(kind == _CONV for kind in types),
        "moe_layers": tuple(i >= dense for i in range(config["num_hidden_layers"])),
    }


def _write_layers(arch: Architecture) -> Fields:
    are_conv = arch.linear_layers or (False,) * arch.num_layers
    return {
        "layer_types": [_CONV if is_conv else FULL for is_conv in are_conv],
        "num_dense_layers": min(arch.moe_layer_indices, default=arch.num_layers),
    }


# ---- weights -----------------------------------------------------------------------------------

_OURS, _THEIRS = "layers.{layer}", "model.layers.{layer}"
_NAMES = {
    "attn_norm": "operator_norm",
    "attn.wq": "self_attn.q_proj",
    "attn.wk": "self_attn.k_proj",
    "attn.wv": "self_attn.v_proj",
    "attn.wo": "self_attn.out_proj",
    "attn.q_norm": "self_attn.q_layernorm",
    "attn.k_norm": "self_attn.k_layernorm",
    "conv.filters": "conv.conv.weight",
    "conv.wo": "conv.out_proj",
    "mlp_norm": "ffn_norm",
    "mlp.w_gate": "feed_forward.w1",
    "mlp.w_up": "feed_forward.w3",
    "mlp.w_down": "feed_forward.w2",
}
_WEIGHT_MAP: WeightMap = (
    Rename("embed", "model.embed_tokens"),
    *(Rename(f"{_OURS}.{ours}", f"{_THEIRS}.{theirs}") for ours, theirs in _NAMES.items()),
    TakeRows(
        tuple(f"{_OURS}.conv.w{x}.weight" for x in "bcx"),
        f"{_THEIRS}.conv.in_proj.weight",
        lambda arch: (arch.hidden_size,) * 3,
    ),
    *moe_block("feed_forward", gate="w1", up="w3", down="w2", bias="expert_bias"),
    Rename("norm", "model.embedding_norm"),
    Rename("lm_head", "lm_head"),
)

# ---- the family --------------------------------------------------------------------------------

_FIXED: Fields = {"qk_norm": True, "router_score": "sigmoid", "router_sum_eps": 1e-6}


def _preset(num_layers: int, attention: tuple[int, ...], **sizes: Any) -> _Lfm2:
    """Return a published model with attention in the layers ``attention``."""
    return _Lfm2(
        family="lfm2_moe",
        vocab_size=65_536,
        hidden_size=2048,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_positions=128_000,
        norm_eps=1e-5,
        rope_theta=1e6,
        tie_embeddings=True,
        selection_bias=True,
        num_experts_per_token=4,
        linear_layers=tuple(i not in attention for i in range(num_layers)),
        moe_layers=(False,) * 2 + (True,) * (num_layers - 2),
        **sizes,
        **_FIXED,
    )


_COMMON = {key: COMMON_DEFAULTS[key] for key in COMMON_DEFAULTS if key != "rms_norm_eps"}

register(
    Family(
        name="lfm2_moe",
        architecture=_Lfm2,
        hf_class="Lfm2MoeForCausalLM",
        defaults={
            **_COMMON,
            "vocab_size": 65_536,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128_000,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "conv_bias": False,
            "conv_L_cache": 3,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "layer_types": None,
        },
        weight_map=_WEIGHT_MAP,
        fields={
            "norm_eps": "norm_eps",
            "selection_bias": "use_expert_bias",
            "routed_scaling_factor": "routed_scaling_factor",
            "conv_kernel_dim": "conv_L_cache",
        },
        fixed=_FIXED,
        aliases={"tie_embedding": "tie_word_embeddings"},
        nullable={"layer_types": list},
        experts="feed_forward.experts",
        lora_layout="fused",  # PEFT does not convert the names of this type's experts
        read_layers=_read_layers,
        write_layers=_write_layers,
        # The sizes were written down from memory of the published config.json. The totals are the
        # published ones.
        presets={
            "lfm2-8b-a1b": _preset(
                24,
                (2, 6, 10, 14, 18, 21),
                intermediate_size=7168,
                num_experts=32,
                moe_intermediate_size=1792,
            ),
            "lfm2-24b-a2b": _preset(
                40,
                tuple(range(2, 40, 4)),
                intermediate_size=11_776,
                num_experts=64,
                moe_intermediate_size=1536,
            ),
        },
    )
)
