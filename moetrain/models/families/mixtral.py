"""Mixtral (arXiv 2401.04088): grouped-query attention, then routed experts, in every layer."""

from moetrain.models.architecture import Architecture
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    moe_block,
)
from moetrain.models.family import Family, register
from moetrain.models.moe import RoutedExperts


class Mixtral(Architecture):
    """Grouped-query attention, then routed experts."""

    kinds = (GroupedQueryAttention, RoutedExperts)


register(
    Family(
        name="mixtral",
        architecture=Mixtral,
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
            "output_router_logits": False,
            "rope_theta": 1000000.0,
        },
        weight_map=DENSE + moe_block("block_sparse_moe", gate="w1", up="w3", down="w2"),
        fields={
            "num_experts": "num_local_experts",
            "moe_intermediate_size": "intermediate_size",
        },
        fixed={"norm_topk_prob": True},
        nullable={"sliding_window": int},
        aliases={"num_experts": "num_local_experts"},
        read_layers=lambda config: {
            "sliding_windows": (config["sliding_window"],) * config["num_hidden_layers"]
        },
        write_layers=lambda arch: {"sliding_window": arch.window(0)},
    )
)
