"""Qwen3-MoE: Qwen3's attention, then routed experts; layers may be kept dense."""

from typing import Any

from moetrain.models.architecture import Architecture, Part
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.family import (
    ATTENTION_BIAS,
    COMMON_DEFAULTS,
    DENSE,
    EXPERTS,
    Family,
    HFConfig,
    HFFamily,
    config_error,
    moe_block,
)
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts


class Qwen3Moe(Architecture):
    """Grouped-query attention, then routed experts; SwiGLU where ``moe_layers`` says so."""

    kinds = (GroupedQueryAttention, RoutedExperts, SwiGLU)

    def feed_forward(self, layer: int) -> Part:
        is_routed = self.moe_layers[layer] if self.moe_layers else self.num_experts > 0
        return (RoutedExperts if is_routed else SwiGLU).of(self)


def _read_layers(config: HFConfig) -> dict[str, Any]:
    """Read one window for all layers, and which layers are MoE."""
    layers, step = range(config["num_hidden_layers"]), config["decoder_sparse_step"]
    dense = config["mlp_only_layers"] or []
    if step < 1:
        raise config_error(f"decoder_sparse_step is {step}, expected 1 or more")
    window = config["sliding_window"] if config["use_sliding_window"] else None
    return {
        "sliding_windows": (window,) * len(layers),
        "moe_layers": tuple((i + 1) % step == 0 and i not in dense for i in layers),
    }


def _write_layers(arch: Architecture) -> dict[str, Any]:
    routed = arch.moe_layer_indices
    return {
        "use_sliding_window": arch.window(0) is not None,
        "sliding_window": arch.window(0),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(arch.num_layers) if i not in routed],
    }


FAMILY = Family(
    name="qwen3_moe",
    architecture=Qwen3Moe,
    hf=HFFamily(
        hf_class="Qwen3MoeForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
            "mlp_only_layers": None,
        },
        weight_map=DENSE + moe_block("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        fields={
            **ATTENTION_BIAS,
            **EXPERTS,
            "num_experts": "num_experts",
            "moe_intermediate_size": "moe_intermediate_size",
            "norm_topk_prob": "norm_topk_prob",
        },
        fixed={"qk_norm": True},
        nullable={"sliding_window": int, "mlp_only_layers": list},
        aliases={"num_local_experts": "num_experts"},
        read_layers=_read_layers,
        write_layers=_write_layers,
    ),
    presets={
        "debug": Qwen3Moe(
            family="qwen3_moe",
            vocab_size=264,  # 256 bytes and a few special tokens, a multiple of 8
            hidden_size=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            intermediate_size=384,
            qk_norm=True,
            num_experts=8,
            num_experts_per_token=2,
            moe_intermediate_size=128,
            router_aux_loss_coef=0.001,
        ),
        "qwen3-30b-a3b": Qwen3Moe(
            family="qwen3_moe",
            vocab_size=151_936,
            hidden_size=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            intermediate_size=6144,
            max_positions=40_960,
            rope_theta=1e6,
            qk_norm=True,
            num_experts=128,
            num_experts_per_token=8,
            moe_intermediate_size=768,
            router_aux_loss_coef=0.001,
        ),
    },
)
