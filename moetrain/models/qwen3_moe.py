"""The Mixture-of-Experts families: Qwen3-MoE, and by configuration of the same block Mixtral.

Layers that an architecture keeps dense are the dense family's blocks.
"""

import torch
from torch import nn

from moetrain.config import KernelsSection, MoeSection
from moetrain.kernels import AttentionMask, Backend
from moetrain.models.architecture import Architecture
from moetrain.models.layers import Attention, RMSNorm, Rotation
from moetrain.models.moe import MoE, RouterStats
from moetrain.models.qwen3 import DenseBlock
from moetrain.models.transformer import Family


class MoEBlock(nn.Module):
    """Pre-norm attention, then a pre-norm MoE layer, each added to the residual stream."""

    def __init__(self, arch: Architecture, moe: MoeSection, backend: Backend) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attn = Attention(arch)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.moe = MoE(arch, moe, backend)

    def forward(
        self, x_BSD: torch.Tensor, rotation: Rotation, mask: AttentionMask
    ) -> tuple[torch.Tensor, RouterStats]:
        """The residual stream after this block, and its routing."""
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), rotation, mask)
        y_BSD, stats = self.moe(self.mlp_norm(x_BSD))
        return x_BSD + y_BSD, stats


def _make_block(
    arch: Architecture, layer: int, kernels: KernelsSection, moe: MoeSection
) -> DenseBlock | MoEBlock:
    return MoEBlock(arch, moe, kernels.backend) if arch.is_moe_layer(layer) else DenseBlock(arch)


FAMILY = Family(
    model_types=("qwen3_moe", "mixtral"),
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
    make_block=_make_block,
)
