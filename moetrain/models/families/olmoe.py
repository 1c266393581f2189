"""OLMoE (arXiv 2409.02060): q/k norms over all heads together, and routed experts in every layer.

Left out on purpose: ``clip_qkv``, which no published model uses.
"""

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    MoEDecoder,
    moe_block,
)
from moetrain.models.family import Family, register
from moetrain.models.hf.files import error

_FIXED: Fields = {"qk_norm": True, "qk_norm_of": "width"}


def _read_layers(config: ConfigJson) -> Fields:
    if (limit := config["clip_qkv"]) is not None:
        problem = f"clip_qkv {limit!r:.80} is not supported; use a model that has null there"
        raise error("config.json", problem)
    return {}


def _write_layers(arch: Architecture) -> Fields:
    return {"clip_qkv": None}


register(
    Family(
        name="olmoe",
        architecture=MoEDecoder,
        hf_class="OlmoeForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "clip_qkv": None,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
            "output_router_logits": False,
        },
        weight_map=DENSE + moe_block(),
        fields={"moe_intermediate_size": "intermediate_size"},
        fixed=_FIXED,
        aliases={"num_local_experts": "num_experts"},
        nullable={"clip_qkv": float},
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={
            # The sizes were written down from memory; the total is the published 6.9 billion.
            "olmoe-1b-7b": MoEDecoder(
                family="olmoe",
                vocab_size=50_304,
                hidden_size=2048,
                num_layers=16,
                num_heads=16,
                num_kv_heads=16,
                head_dim=128,
                intermediate_size=1024,
                max_positions=4096,
                norm_eps=1e-5,
                num_experts=64,
                num_experts_per_token=8,
                moe_intermediate_size=1024,
                norm_topk_prob=False,
                router_aux_loss_coef=0.01,
                **_FIXED,
            )
        },
    )
)
