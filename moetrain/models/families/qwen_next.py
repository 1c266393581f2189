"""Qwen3-Next and Qwen3.5: gated delta nets (arXiv 2412.06464), and attention in every fourth layer.

Attention has an output gate, and a quarter of each head rotates. Norms multiply by 1 + their
weights. MoE layers have a gated shared expert. Qwen3.5 (and 3.6 and 3.8, which have its classes)
also has dense models. Its published files also hold a vision tower, and an export copies the
tower's tensors unchanged. Files of a ``_text`` family hold the language model alone.
"""

from typing import Any

from moetrain.models.architecture import Architecture, AttentionPart, ConfigJson, Fields
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    MoEDecoder,
    beside_vision,
    moe_block,
    stacked,
)
from moetrain.models.families.qwen import read_moe_layers, write_moe_layers
from moetrain.models.family import Family, Rename, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.hf.take_rows import TakeRows
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts
from moetrain.models.parts.gated_delta import GatedDeltaNet
from moetrain.models.parts.multi_token import MultiTokenDecoder, under_mtp

_LINEAR = "linear_attention"
_FULL = "full_attention"


class _QwenNext(MultiTokenDecoder, MoEDecoder):
    """An MoE decoder with gated delta nets in place of attention in ``linear_layers``."""

    kinds = (GroupedQueryAttention, RoutedExperts, SwiGLU, GatedDeltaNet)

    def attention(self, layer: int) -> AttentionPart:
        is_linear = self.linear_layers and self.linear_layers[layer]
        return GatedDeltaNet.of(self, window=None) if is_linear else super().attention(layer)


_FIXED: Fields = {"qk_norm": True, "output_gate": True, "zero_centred_norms": True}
_FIELDS = {
    name: name
    for name in (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
}
_EXPERTS_FIXED = {**_FIXED, "shared_gate": True}
_EXPERTS_FIELDS = {**_FIELDS, "shared_intermediate_size": "shared_expert_intermediate_size"}
_DEFAULTS: Fields = {
    **COMMON_DEFAULTS,
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": 4,
}
_EXPERTS_DEFAULTS: Fields = {
    **_DEFAULTS,
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}
_NULLABLE = {"layer_types": list}


def _read_layers(config: ConfigJson) -> Fields:
    """Read the linear layers from ``layer_types``, or without it from
    ``full_attention_interval``."""
    types, interval = config["layer_types"], config["full_attention_interval"]
    if types is None:
        if interval < 1:
            problem = f"full_attention_interval is {interval}, expected 1 or more"
            raise error("config.json", problem)
        layers = range(config["num_hidden_layers"])
        types = [_LINEAR if (i + 1) % interval else _FULL for i in layers]
    unknown = sorted({str(kind) for kind in types} - {_LINEAR, _FULL})
    if unknown:
        raise error("config.json", f"layer_types {', '.join(unknown)} are not supported")
    return {"linear_layers": tuple(kind == _LINEAR for kind in types)}


def _write_layers(arch: Architecture) -> Fields:
    kinds = arch.linear_layers or (False,) * arch.num_layers
    multi_token = {"mtp_num_hidden_layers": arch.mtp_layers} if arch.mtp_layers else {}
    return {"layer_types": [_LINEAR if is_linear else _FULL for is_linear in kinds], **multi_token}


def _read_next_layers(config: ConfigJson) -> Fields:
    """Read as :func:`_read_layers`, and the MoE layers."""
    return {**_read_layers(config), **read_moe_layers(config)}


def _write_next_layers(arch: Architecture) -> Fields:
    return {**_write_layers(arch), **write_moe_layers(arch)}


# ---- weights -----------------------------------------------------------------------------------


def _of_key_heads(arch: Architecture) -> tuple[int, int, int]:
    """Return how many query rows, value rows and value heads belong to one key head.

    A key head has as many key rows as query rows.
    """
    heads = arch.linear_num_value_heads // arch.linear_num_key_heads
    return arch.linear_key_head_dim, heads * arch.linear_value_head_dim, heads


def _all_rows(arch: Architecture) -> tuple[int, int, int]:
    """Return how many rows all queries, all keys and all values have."""
    heads = arch.linear_num_key_heads
    keys, values, _ = _of_key_heads(arch)
    return heads * keys, heads * keys, heads * values


def _each_head(arch: Architecture) -> tuple[int, ...]:
    keys, values, _ = _of_key_heads(arch)
    return keys, keys, values, values


def _each_gate(arch: Architecture) -> tuple[int, ...]:
    return (_of_key_heads(arch)[2],) * 2


_OURS = "layers.{layer}.linear_attn"
_THEIRS = "model.layers.{layer}.linear_attn"


def _weights(*names: str) -> tuple[str, ...]:
    return tuple(f"{_OURS}.{name}.weight" for name in names)


_LINEAR_MAP = (
    TakeRows(tuple(f"{_OURS}.conv_{x}" for x in "qkv"), f"{_THEIRS}.conv1d.weight", _all_rows),
    Rename(f"{_OURS}.a_log", f"{_THEIRS}.A_log"),
    Rename(f"{_OURS}.dt_bias", f"{_THEIRS}.dt_bias"),
    Rename(f"{_OURS}.norm", f"{_THEIRS}.norm"),
    Rename(f"{_OURS}.wo", f"{_THEIRS}.out_proj"),
)
_NEXT_LINEAR_MAP = (
    *_LINEAR_MAP,
    TakeRows(_weights("wq", "wk", "wv", "wz"), f"{_THEIRS}.in_proj_qkvz.weight", _each_head),
    TakeRows(_weights("wb", "wa"), f"{_THEIRS}.in_proj_ba.weight", _each_gate),
)
_SPLIT_LINEAR_MAP = (
    *_LINEAR_MAP,
    TakeRows(_weights("wq", "wk", "wv"), f"{_THEIRS}.in_proj_qkv.weight", _all_rows),
    *(Rename(f"{_OURS}.w{x}", f"{_THEIRS}.in_proj_{x}") for x in "zba"),
)
_EXPERTS = moe_block(shared="shared_expert", shared_gate="shared_expert_gate")
_PACKED = stacked(_EXPERTS)


# ---- families ----------------------------------------------------------------------------------

# The sizes are those of the published config.json, except rope_theta, max_positions and the dense
# width of Qwen3-Next, which were recalled.
_HEADS: Fields = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_positions": 262_144,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_COMMON: Fields = {
    **_HEADS,
    "num_heads": 16,
    "num_kv_heads": 2,
    "linear_num_value_heads": 32,
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "shared_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
    **_EXPERTS_FIXED,
}
_INTERVAL = (True, True, True, False)


def _next_80b(rope_theta: float) -> _QwenNext:
    return _QwenNext(
        family="qwen3_next",
        vocab_size=151_936,
        num_layers=48,
        intermediate_size=5120,
        rope_theta=rope_theta,
        num_experts=512,
        num_experts_per_token=10,
        linear_layers=_INTERVAL * 12,
        **_COMMON,
    )


register(
    Family(
        name="qwen3_next",
        architecture=_QwenNext,
        hf_class="Qwen3NextForCausalLM",
        defaults={
            **_EXPERTS_DEFAULTS,
            "vocab_size": 151936,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        weight_map=under_mtp((*DENSE, *_NEXT_LINEAR_MAP, *_EXPERTS))[0],
        fields=_EXPERTS_FIELDS,
        fixed=_EXPERTS_FIXED,
        nullable={**_NULLABLE, "mlp_only_layers": list},
        read_layers=_read_next_layers,
        write_layers=_write_next_layers,
        presets={
            "qwen3-next-80b-a3b": _next_80b(1e7),
            "qwen3-coder-next": _next_80b(5e6),
        },
    )
)

_QWEN35_PRESET = _QwenNext(
    family="qwen3_5_moe_text",
    vocab_size=248_320,
    num_layers=40,
    intermediate_size=512,
    rope_theta=1e7,
    num_experts=256,
    num_experts_per_token=8,
    linear_layers=_INTERVAL * 10,
    **_COMMON,
)
_QWEN35_27B = _QwenNext(
    family="qwen3_5_text",
    vocab_size=248_320,
    hidden_size=5120,
    num_layers=64,
    num_heads=24,
    num_kv_heads=4,
    intermediate_size=17_408,
    rope_theta=1e7,
    linear_num_value_heads=48,
    linear_layers=_INTERVAL * 16,
    **_HEADS,
    **_FIXED,
)


def _register_qwen35(name: str, hf_class: str, *maps: WeightMap, **shared: Any) -> None:
    """Register a family with a vision tower, and the family of its language model alone."""
    families = (
        (name, "ForConditionalGeneration", [beside_vision(one) for one in maps], f"{name}_text"),
        (f"{name}_text", "ForCausalLM", maps, None),
    )
    presets = shared.pop("presets")
    for own, head, own_maps, text in families:
        own_map, *others = under_mtp(*own_maps)
        register(
            Family(
                name=own,
                architecture=_QwenNext,
                hf_class=f"{hf_class}{head}",
                weight_map=own_map,
                other_maps=tuple(others),
                section=None if text is None else ("text_config", text),
                nullable=_NULLABLE,
                read_layers=_read_layers,
                write_layers=_write_layers,
                presets=presets if text is None else {},
                **shared,
            )
        )


_register_qwen35(
    "qwen3_5_moe",
    "Qwen3_5Moe",
    (*DENSE, *_SPLIT_LINEAR_MAP, *_EXPERTS),
    (*DENSE, *_SPLIT_LINEAR_MAP, *_PACKED),
    defaults={
        **_EXPERTS_DEFAULTS,
        "vocab_size": 248320,
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    fields={**_EXPERTS_FIELDS, "intermediate_size": "shared_expert_intermediate_size"},
    fixed={**_EXPERTS_FIXED, "norm_topk_prob": True},
    lora_layout="fused",
    presets={"qwen3.5-35b-a3b": _QWEN35_PRESET, "qwen3.6-35b-a3b": _QWEN35_PRESET},
)
_register_qwen35(
    "qwen3_5",
    "Qwen3_5",
    (*DENSE, *_SPLIT_LINEAR_MAP),
    defaults={
        **_DEFAULTS,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    fields=_FIELDS,
    fixed=_FIXED,
    presets={"qwen3.5-27b": _QWEN35_27B, "qwen3.8-27b": _QWEN35_27B},
)
