"""Grouped-query attention with sinks: each head has a learned logit that joins its softmax.

The formulas are in :mod:`moetrain.kernels.attention.sinks`.

Legend: B batch, S sequence, H query heads, G key/value heads, d head width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from moetrain.config import KernelsSection, MoeSection
from moetrain.models.architecture import Weight
from moetrain.models.attention import Attention, GroupedQueryAttention
from moetrain.models.layers import Context
from moetrain.models.rules import Rule

_SINKS = Rule("colwise", decay=False, gather=torch.float32)


@dataclass(frozen=True, kw_only=True)
class SinkAttention(GroupedQueryAttention):
    """Describes grouped-query attention with sinks."""

    needs_lse: ClassVar[bool] = True

    def build(self, kernels: KernelsSection, moe: MoeSection) -> Attention:
        return AttentionWithSinks(self, kernels)

    @property
    def weights(self) -> Mapping[str, Weight]:
        return {**super().weights, "sinks": Weight((self.num_heads,), _SINKS)}


class AttentionWithSinks(Attention):
    """The module of :class:`SinkAttention`."""

    def __init__(self, sizes: SinkAttention, kernels: KernelsSection) -> None:
        super().__init__(sizes, kernels)
        self.sinks = nn.Parameter(torch.empty(sizes.num_heads))

    def mix(
        self,
        q_BSHd: torch.Tensor,
        k_BSGd: torch.Tensor,
        v_BSGd: torch.Tensor,
        context: Context,
    ) -> torch.Tensor:
        """Call the core with the sinks [H]."""
        return self.core(q_BSHd, k_BSGd, v_BSGd, context, sinks_H=self.sinks)
