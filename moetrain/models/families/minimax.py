"""MiniMax-M2 to M2.7: q/k norms over all heads together, and a sigmoid router.

Rotary embeddings rotate a part of each head. Files give it as ``rotary_dim`` (elements) or as
``partial_rotary_factor`` (a share of the head).
"""

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    MoEDecoder,
    moe_block,
)
from moetrain.models.family import Family, register

_FIXED: Fields = {
    "qk_norm": True,
    "qk_norm_of": "width",
    "norm_topk_prob": True,
    "router_score": "sigmoid",
    "selection_bias": True,
}


def _read_layers(config: ConfigJson) -> Fields:
    width = config["rotary_dim"]
    return {} if width is None else {"partial_rotary_factor": width / config["head_dim"]}


def _write_layers(arch: Architecture) -> Fields:
    return {"rotary_dim": arch.attention(0).rotary_dim}


def _preset(max_positions: int) -> MoEDecoder:
    return MoEDecoder(
        family="minimax_m2",
        vocab_size=200_064,
        hidden_size=3072,
        num_layers=62,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=1536,
        max_positions=max_positions,
        rope_theta=5e6,
        partial_rotary_factor=0.5,
        num_experts=256,
        num_experts_per_token=8,
        moe_intermediate_size=1536,
        router_aux_loss_coef=0.001,
        **_FIXED,
    )


register(
    Family(
        name="minimax_m2",
        architecture=MoEDecoder,
        hf_class="MiniMaxM2ForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5000000.0,
            "partial_rotary_factor": 1.0,
            "rotary_dim": None,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
        },
        weight_map=DENSE
        + moe_block(
            "block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
            bias="e_score_correction_bias",
        ),
        fields={
            "num_experts": "num_local_experts",
            "moe_intermediate_size": "intermediate_size",
        },
        fixed=_FIXED,
        aliases={"num_experts": "num_local_experts"},
        nullable={"rotary_dim": int},
        constants={"scoring_func": "sigmoid", "use_routing_bias": True},
        read_layers=_read_layers,
        write_layers=_write_layers,
        # All sizes but max_positions were recalled, not copied from a config.json; their total is
        # the published 229 billion parameters.
        presets={
            "minimax-m2": _preset(196_608),
            "minimax-m2.5": _preset(196_608),
            "minimax-m2.7": _preset(204_800),
        },
    )
)
