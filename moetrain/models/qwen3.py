"""The dense families: Qwen3, and by configuration of the same block Qwen2 and Llama.

Qwen2 has q/k/v biases and no q/k norm, Llama has neither; :class:`Architecture` says which.
"""

import torch
from torch import nn

from moetrain.config import KernelsSection, MoeSection
from moetrain.kernels import AttentionMask
from moetrain.models.architecture import Architecture
from moetrain.models.layers import Attention, DenseMLP, RMSNorm, Rotation
from moetrain.models.transformer import Family


class DenseBlock(nn.Module):
    """Pre-norm attention, then a pre-norm MLP, each added to the residual stream."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attn = Attention(arch)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = DenseMLP(arch)

    def forward(
        self, x_BSD: torch.Tensor, rotation: Rotation, mask: AttentionMask
    ) -> tuple[torch.Tensor, None]:
        """The residual stream after this block; None stands for "no routing"."""
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), rotation, mask)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD)), None


def _make_block(
    arch: Architecture, layer: int, kernels: KernelsSection, moe: MoeSection
) -> DenseBlock:
    return DenseBlock(arch)


FAMILY = Family(
    model_types=("qwen3", "qwen2", "llama"),
    presets={
        "qwen3-0.6b": Architecture(
            family="qwen3",
            vocab_size=151_936,
            hidden_size=1024,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=3072,
            max_positions=40_960,
            tie_embeddings=True,
            rope_theta=1e6,
            qk_norm=True,
        ),
    },
    make_block=_make_block,
)
