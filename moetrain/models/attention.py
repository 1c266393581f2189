"""Grouped-query attention; what happens to queries, keys and values is injected.

Legend: B batch, S sequence, D model width, H query heads, G key/value heads, d head width.
"""

from typing import Protocol

import torch
from torch import nn

from moetrain.kernels import attention
from moetrain.models.architecture import Architecture
from moetrain.models.layers import Context, Linear, RMSNorm
from moetrain.models.rope import rotate


class AttentionCore(Protocol):
    """Mixes tokens: rotated queries and keys, and values, to one value a query head.

    The seam of context parallelism, key/value caches, sinks and other scores. It is called inside
    the compiled block.
    """

    def __call__(
        self, q_BSHd: torch.Tensor, k_BSGd: torch.Tensor, v_BSGd: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """[B, S, H, d]; under tensor parallelism of this rank's heads alone."""
        ...


def masked_attention(
    q_BSHd: torch.Tensor, k_BSGd: torch.Tensor, v_BSGd: torch.Tensor, context: Context
) -> torch.Tensor:
    """The :class:`AttentionCore` of whole rows: softmax over what the mask lets a token see."""
    return attention(q_BSHd, k_BSGd, v_BSGd, context.mask)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, optional biases and q/k norms.

    ``core`` is a plain attribute, to be replaced.
    """

    def __init__(self, arch: Architecture, core: AttentionCore = masked_attention) -> None:
        super().__init__()
        self.core = core
        self.head_dim = arch.head_dim
        dim, q_dim, kv_dim = (
            arch.hidden_size,
            arch.num_heads * arch.head_dim,
            arch.num_kv_heads * arch.head_dim,
        )
        self.wq = Linear(dim, q_dim, bias=arch.qkv_bias)
        self.wk = Linear(dim, kv_dim, bias=arch.qkv_bias)
        self.wv = Linear(dim, kv_dim, bias=arch.qkv_bias)
        self.wo = Linear(q_dim, dim, bias=arch.out_bias)
        self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None
        self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None

    def forward(self, x_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Mixes tokens: [B, S, D] in ``x_BSD``'s dtype."""
        q_BSHd, k_BSGd, v_BSGd = (
            w(x_BSD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHd, k_BSGd = self.q_norm(q_BSHd), self.k_norm(k_BSGd)
        q_BSHd, k_BSGd = rotate(q_BSHd, context.rotation), rotate(k_BSGd, context.rotation)
        return self.wo(self.core(q_BSHd, k_BSGd, v_BSGd, context).flatten(-2))
