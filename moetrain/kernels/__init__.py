"""Kernels: the few places where an MoE trainer's time goes, each one file, usable on its own.

Every file opens with its maths and shape legend and holds a plain-torch reference.
"""

import pkgutil
from importlib import import_module

from moetrain.kernels.adamw import adamw
from moetrain.kernels.adapted_experts import adapted_expert_mlp
from moetrain.kernels.attention import AttentionMask, attention, attention_mask
from moetrain.kernels.backend import Backend
from moetrain.kernels.expert_indices import ExpertIndices, expert_indices
from moetrain.kernels.experts import expert_mlp
from moetrain.kernels.experts_fp8 import expert_mlp_fp8
from moetrain.kernels.grouped_mm import grouped_mm
from moetrain.kernels.linear_cross_entropy import (
    SummedLoss,
    TokenLosses,
    linear_cross_entropy,
    linear_cross_entropy_sum,
)
from moetrain.kernels.linear_fp8 import linears_fp8
from moetrain.kernels.narrow import narrow_products
from moetrain.kernels.packed_attention import attention_packed
from moetrain.kernels.permutation import permute, permute_tokens, unpermute
from moetrain.kernels.reduction import sum_chunks
from moetrain.kernels.rms_norm import add_rms_norm, fusible_rms_norm, rms_norm
from moetrain.kernels.rotary import rotary
from moetrain.kernels.router import Routed, router_topk
from moetrain.kernels.router_logits import router_logits
from moetrain.kernels.swiglu import swiglu

__all__ = [
    "SPECS",
    "AttentionMask",
    "Backend",
    "ExpertIndices",
    "Routed",
    "SummedLoss",
    "TokenLosses",
    "adamw",
    "adapted_expert_mlp",
    "add_rms_norm",
    "attention",
    "attention_mask",
    "attention_packed",
    "expert_indices",
    "expert_mlp",
    "expert_mlp_fp8",
    "fusible_rms_norm",
    "grouped_mm",
    "linear_cross_entropy",
    "linear_cross_entropy_sum",
    "linears_fp8",
    "narrow_products",
    "permute",
    "permute_tokens",
    "rms_norm",
    "rotary",
    "router_logits",
    "router_topk",
    "sum_chunks",
    "swiglu",
    "unpermute",
]

SPECS = tuple(
    spec
    for file in pkgutil.iter_modules(__path__)
    for spec in getattr(import_module(f"{__name__}.{file.name}"), "SPECS", ())
)
"""What every kernel promises; tests/test_kernels.py and scripts/bench_kernels.py walk it."""
