"""Kernels: the few places where an MoE trainer's time goes, each one file, usable on its own.

Every file opens with its maths and shape legend and holds a plain-torch reference.
"""

from moetrain.kernels.attention import AttentionMask, attention, attention_mask
from moetrain.kernels.backend import Backend
from moetrain.kernels.experts import expert_mlp
from moetrain.kernels.grouped_mm import grouped_mm
from moetrain.kernels.linear_cross_entropy import TokenLosses, linear_cross_entropy
from moetrain.kernels.permutation import ExpertIndices, expert_indices, permute, unpermute
from moetrain.kernels.router import Routed, router_topk
from moetrain.kernels.swiglu import swiglu

__all__ = [
    "AttentionMask",
    "Backend",
    "ExpertIndices",
    "Routed",
    "TokenLosses",
    "attention",
    "attention_mask",
    "expert_indices",
    "expert_mlp",
    "grouped_mm",
    "linear_cross_entropy",
    "permute",
    "router_topk",
    "swiglu",
    "unpermute",
]
