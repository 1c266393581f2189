"""The dense families: Qwen3, and by configuration of the same block Qwen2 and Llama.

Qwen2 has q/k/v biases and no q/k norm, Llama has neither; :class:`Architecture` says which.
"""

from typing import Any

import torch
from torch import nn

from moetrain.config import KernelsSection, MoeSection
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
from moetrain.models.layers import Context, DenseMLP, RMSNorm
from moetrain.models.rules import decoder_plan
from moetrain.models.weight_map import DENSE


class DenseBlock(nn.Module):
    """Pre-norm attention, then a pre-norm MLP, each added to the residual stream."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attn = Attention(arch)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = DenseMLP(arch)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> tuple[torch.Tensor, None]:
        """The residual stream after this block; None stands for "no routing"."""
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), context)
        y_BSD, stats = self.mlp(self.mlp_norm(x_BSD), context)
        return x_BSD + y_BSD, stats


def _make_block(
    arch: Architecture, layer: int, kernels: KernelsSection, moe: MoeSection
) -> DenseBlock:
    return DenseBlock(arch)


_SLIDING, _FULL = "sliding_attention", "full_attention"


def _read_layer_windows(config: HFConfig) -> dict[str, Any]:
    """``layer_types``, else full attention below ``max_window_layers``."""
    window = config["sliding_window"] if config["use_sliding_window"] else None
    types = config["layer_types"]
    if types is None:
        first = config["max_window_layers"]
        layers = range(config["num_hidden_layers"])
        return {"sliding_windows": tuple(window if i >= first else None for i in layers)}
    unknown = sorted({str(kind) for kind in types} - {_SLIDING, _FULL})
    if unknown:
        raise config_error(f"layer_types {', '.join(unknown)} are not supported")
    if _SLIDING in types and window is None:
        raise config_error(f"layer_types name {_SLIDING}, but no sliding_window is in use")
    return {"sliding_windows": tuple(window if kind == _SLIDING else None for kind in types)}


def _write_layer_windows(arch: Architecture) -> dict[str, Any]:
    windows = [arch.window(i) for i in range(arch.num_layers)]
    window = next((w for w in windows if w is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [_FULL if w is None else _SLIDING for w in windows],
    }


_QWEN2_DEFAULTS = {
    **COMMON_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

FAMILY = Family(
    hf={
        "qwen3": HFFamily(
            hf_class="Qwen3ForCausalLM",
            defaults={**_QWEN2_DEFAULTS, "head_dim": 128, "attention_bias": False},
            weight_map=DENSE,
            fields=ATTENTION_BIAS,
            fixed={"qk_norm": True},
            read_layers=_read_layer_windows,
            write_layers=_write_layer_windows,
        ),
        "qwen2": HFFamily(
            hf_class="Qwen2ForCausalLM",
            defaults=_QWEN2_DEFAULTS,
            weight_map=DENSE,
            fixed={"qkv_bias": True},
            read_layers=_read_layer_windows,
            write_layers=_write_layer_windows,
        ),
        "llama": HFFamily(
            hf_class="LlamaForCausalLM",
            defaults={
                **COMMON_DEFAULTS,
                "vocab_size": 32000,
                "intermediate_size": 11008,
                "max_position_embeddings": 2048,
                "attention_bias": False,
                "mlp_bias": False,
            },
            weight_map=DENSE,
            fields={**ATTENTION_BIAS, "mlp_bias": "mlp_bias"},
        ),
    },
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
    plan=decoder_plan,
    make_block=_make_block,
)
