"""Flex-OLMo (arXiv 2507.07024): OLMoE with norms after attention and experts instead of before.

In the published models each expert was trained on its own data set, next to an expert trained on
public data. This module treats them like any other experts.
"""

from dataclasses import dataclass
from typing import ClassVar

from moetrain.models.architecture import Architecture, Fields
from moetrain.models.attention import GroupedQueryAttention
from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    MoEDecoder,
    moe_block,
)
from moetrain.models.family import Family, Rename, WeightMap, register
from moetrain.models.moe import RoutedExperts


@dataclass(frozen=True, kw_only=True)
class AttentionThenNorm(GroupedQueryAttention):
    """Describes grouped-query attention with a norm of its result, and none before."""

    norm: ClassVar[str] = ""
    after: ClassVar[str] = "attn_norm"


@dataclass(frozen=True, kw_only=True)
class _ExpertsThenNorm(RoutedExperts):
    norm: ClassVar[str] = ""
    after: ClassVar[str] = "mlp_norm"


class _FlexOlmo(MoEDecoder):
    """Attention and routed experts in every layer, each followed by its norm."""

    kinds = (AttentionThenNorm, _ExpertsThenNorm)

    def feed_forward(self, layer: int) -> _ExpertsThenNorm:
        return _ExpertsThenNorm.of(self)


_PAD = 100_277
"""The ``pad_token_id`` of a file that does not name one."""


def _write_layers(arch: Architecture) -> Fields:
    return {"pad_token_id": None} if arch.vocab_size <= _PAD else {}


_NORMS = {"attn_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
DENSE_THEN_NORMS: WeightMap = (
    *(one for one in DENSE if not one.ours.endswith(("attn_norm", "mlp_norm"))),
    *(
        Rename(f"layers.{{layer}}.{ours}", f"model.layers.{{layer}}.{theirs}")
        for ours, theirs in _NORMS.items()
    ),
)
"""``DENSE`` with the names of norms that follow their parts."""
FIXED: Fields = {"qk_norm": True, "qk_norm_of": "width", "late_norms": True}
"""Fields of every OLMo with :class:`AttentionThenNorm`."""
register(
    Family(
        name="flex_olmo",
        architecture=_FlexOlmo,
        hf_class="FlexOlmoForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 100352,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "rope_theta": 500000.0,
            "attention_bias": False,
            "num_experts_per_tok": 5,
            "num_experts": 7,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
            "output_router_logits": False,
        },
        weight_map=(*DENSE_THEN_NORMS, *moe_block()),
        fields={"moe_intermediate_size": "intermediate_size"},
        fixed=FIXED,
        aliases={"num_local_experts": "num_experts"},
        write_layers=_write_layers,
        presets={
            # The sizes are from memory; the total is the published 33 billion.
            "flex-olmo-7x7b": _FlexOlmo(
                family="flex_olmo",
                vocab_size=100_352,
                hidden_size=4096,
                num_layers=32,
                num_heads=32,
                num_kv_heads=32,
                head_dim=128,
                intermediate_size=11_008,
                max_positions=4096,
                rope_theta=500_000.0,
                num_experts=7,
                num_experts_per_token=5,
                moe_intermediate_size=11_008,
                norm_topk_prob=False,
                router_aux_loss_coef=0.01,
                **FIXED,
            )
        },
    )
)
