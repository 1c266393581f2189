"""The Mixture-of-Experts families: Qwen3-MoE, and by configuration of the same block Mixtral.

Layers that an architecture keeps dense are the dense family's blocks.
"""

from typing import Any

import torch
from torch import nn

from moetrain.config import KernelsSection, MoeSection
from moetrain.kernels import Backend
from moetrain.models.architecture import Architecture
from moetrain.models.attention import Attention
from moetrain.models.family import (
    ATTENTION_BIAS,
    COMMON_DEFAULTS,
    Family,
    HFConfig,
    HFFamily,
    config_error,
)
from moetrain.models.layers import Context, RMSNorm
from moetrain.models.moe import MoE, RouterStats
from moetrain.models.qwen3 import DenseBlock
from moetrain.models.rules import Plan, decoder_plan, with_experts
from moetrain.models.weight_map import DENSE, moe_block


class MoEBlock(nn.Module):
    """Pre-norm attention, then a pre-norm MoE layer, each added to the residual stream."""

    def __init__(self, arch: Architecture, moe: MoeSection, backend: Backend) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attn = Attention(arch)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.moe = MoE(arch, moe, backend)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> tuple[torch.Tensor, RouterStats]:
        """The residual stream after this block, and its routing."""
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), context)
        y_BSD, stats = self.moe(self.mlp_norm(x_BSD), context)
        return x_BSD + y_BSD, stats


def _make_block(
    arch: Architecture, layer: int, kernels: KernelsSection, moe: MoeSection
) -> DenseBlock | MoEBlock:
    return MoEBlock(arch, moe, kernels.backend) if arch.is_moe_layer(layer) else DenseBlock(arch)


def _read_qwen3_moe_layers(config: HFConfig) -> dict[str, Any]:
    """One window for all layers; MoE every ``decoder_sparse_step`` layers, some excepted."""
    layers, step = range(config["num_hidden_layers"]), config["decoder_sparse_step"]
    dense = config["mlp_only_layers"] or []
    if step < 1:
        raise config_error(f"decoder_sparse_step is {step}, expected 1 or more")
    window = config["sliding_window"] if config["use_sliding_window"] else None
    return {
        "sliding_windows": (window,) * len(layers),
        "moe_layers": tuple((i + 1) % step == 0 and i not in dense for i in layers),
    }


def _write_qwen3_moe_layers(arch: Architecture) -> dict[str, Any]:
    return {
        "use_sliding_window": arch.window(0) is not None,
        "sliding_window": arch.window(0),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(arch.num_layers) if not arch.is_moe_layer(i)],
    }


def _read_mixtral_layers(config: HFConfig) -> dict[str, Any]:
    return {"sliding_windows": (config["sliding_window"],) * config["num_hidden_layers"]}


def _write_mixtral_layers(arch: Architecture) -> dict[str, Any]:
    return {"sliding_window": arch.window(0)}


_EXPERTS = {
    "num_experts_per_token": "num_experts_per_tok",
    "router_aux_loss_coef": "router_aux_loss_coef",
}


def _plan(arch: Architecture) -> Plan:
    return with_experts(decoder_plan(arch), arch)


FAMILY = Family(
    hf={
        "qwen3_moe": HFFamily(
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
                **_EXPERTS,
                "num_experts": "num_experts",
                "moe_intermediate_size": "moe_intermediate_size",
                "norm_topk_prob": "norm_topk_prob",
            },
            fixed={"qk_norm": True},
            aliases={"num_local_experts": "num_experts"},
            read_layers=_read_qwen3_moe_layers,
            write_layers=_write_qwen3_moe_layers,
        ),
        "mixtral": HFFamily(
            hf_class="MixtralForCausalLM",
            defaults={
                **COMMON_DEFAULTS,
                "vocab_size": 32000,
                "intermediate_size": 14336,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "sliding_window": None,
                "num_experts_per_tok": 2,
                "num_local_experts": 8,
                "router_aux_loss_coef": 0.001,
                "rope_theta": 1000000.0,
            },
            weight_map=DENSE + moe_block("block_sparse_moe", gate="w1", up="w3", down="w2"),
            fields={
                **_EXPERTS,
                "num_experts": "num_local_experts",
                "moe_intermediate_size": "intermediate_size",
            },
            fixed={"norm_topk_prob": True},
            aliases={"num_experts": "num_local_experts"},
            read_layers=_read_mixtral_layers,
            write_layers=_write_mixtral_layers,
        ),
    },
    presets={
        "debug": Architecture(
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
        "qwen3-30b-a3b": Architecture(
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
    plan=_plan,
    make_block=_make_block,
)
