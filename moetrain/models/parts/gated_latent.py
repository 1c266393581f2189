"""Multi-head latent attention whose heads' results are multiplied by gates.

    y = W_o (sigmoid(W_g x)_h * attention(x)_h),    W_g [H, D]

Legend: B batch, S sequence, D model width, H heads, v width of a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from moetrain.config import KernelsSection, MoeSection
from moetrain.config.compute import SavedName
from moetrain.kernels.norm.elementwise import sigmoid
from moetrain.models.architecture import Weight, Workload
from moetrain.models.layers import Context, Linear
from moetrain.models.parts.latent_attention import LatentAttention, MultiHeadLatent
from moetrain.models.rules import COLWISE

# A rank may have fewer rows than products in fp8 take.
_OF_HEADS = replace(COLWISE, gather=torch.float32)


@dataclass(frozen=True, kw_only=True)
class GatedLatentAttention(LatentAttention):
    """Describes multi-head latent attention with a gate for each head."""

    def build(self, kernels: KernelsSection, moe: MoeSection) -> MultiHeadLatent:
        return _GatedLatent(self, kernels)

    @property
    def weights(self) -> Mapping[str, Weight]:
        gate = Weight((self.num_heads, self.hidden_size), _OF_HEADS)
        return {**super().weights, "wg.weight": gate}

    def activations(self, share: Workload) -> float:
        """Return the bytes of latent attention, the gates before and after the sigmoid, and the
        gated result."""
        own = self.num_heads * (2 + self.v_head_dim) * share.width
        return super().activations(share) + share.tokens * own / share.tp

    def saved(self, share: Workload) -> Mapping[SavedName, float]:
        found = dict(super().saved(share))
        found["linear"] += share.tokens * share.width * self.num_heads / share.tp
        return found


class _GatedLatent(MultiHeadLatent):
    """The module of :class:`GatedLatentAttention`."""

    def __init__(self, sizes: GatedLatentAttention, kernels: KernelsSection) -> None:
        super().__init__(sizes, kernels)
        self.wg = Linear(sizes.hidden_size, sizes.num_heads, kernels.without_fp8)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        """Mix tokens; returns [B, S, D] in ``x_BSD``'s dtype."""
        gates_BSH = sigmoid(self.wg(x_BSD), fusible=not self.batch_invariant)
        return self.wo((self.attend(x_BSD, context) * gates_BSH[..., None]).flatten(-2))
