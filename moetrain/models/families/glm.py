"""GLM-4.5 (arXiv 2508.06471), 4.6 and 4.7: half of each head rotates; the router is DeepSeek-V3's.

The first layers are dense, and the others have a shared expert. Files hold MTP blocks behind the
model's own layers. They can be trained (:mod:`moetrain.models.parts.multi_token`). Otherwise an
export copies them unchanged.

GLM-4.5V and 4.6V (arXiv 2507.01006) are such models beside a vision tower, without MTP blocks. An
export copies the tower's tensors unchanged.
"""

from moetrain.models.architecture import Fields
from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    MoEDecoder,
    beside_vision,
    moe_block,
)
from moetrain.models.family import Family, register
from moetrain.models.parts.deepseek_router import (
    DEEPSEEK_FIELDS,
    SIGMOID_ROUTER,
    read_deepseek_layers,
    write_deepseek_layers,
)
from moetrain.models.parts.multi_token import MultiTokenDecoder, behind_layers


class _Glm(MultiTokenDecoder, MoEDecoder):
    """An MoE decoder that can have MTP blocks."""


_MODEL = DENSE + moe_block(bias="gate.e_score_correction_bias", shared="shared_experts")
_MAP, _MAP_WITHOUT_COPIES = behind_layers(_MODEL)
_FIXED = {**SIGMOID_ROUTER, "out_bias": False}
# The sizes of presets were written down from memory of the published config.json. The totals of
# parameters agree with the published ones (tests/models/families/test_families.py).
_COMMON: Fields = {
    "family": "glm4_moe",
    "vocab_size": 151_552,
    "num_heads": 96,
    "num_kv_heads": 8,
    "head_dim": 128,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
    "qkv_bias": True,
    "num_experts_per_token": 8,
    **_FIXED,
}


def _glm_355b(max_positions: int) -> _Glm:
    return _Glm(
        **_COMMON,
        hidden_size=5120,
        num_layers=92,
        intermediate_size=12_288,
        max_positions=max_positions,
        qk_norm=True,
        num_experts=160,
        moe_intermediate_size=1536,
        shared_intermediate_size=1536,
        moe_layers=(False,) * 3 + (True,) * 89,
        routed_scaling_factor=2.5,
    )


_AIR = _Glm(
    **_COMMON,
    hidden_size=4096,
    num_layers=46,
    intermediate_size=10_944,
    max_positions=131_072,
    num_experts=128,
    moe_intermediate_size=1408,
    shared_intermediate_size=1408,
    moe_layers=(False,) + (True,) * 45,
)

_DEFAULTS: Fields = {
    **COMMON_DEFAULTS,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    # Every published file has 128. The default of transformers is 42, half of which is odd.
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_ALIASES = {"num_local_experts": "n_routed_experts"}

register(
    Family(
        name="glm4_moe",
        architecture=_Glm,
        hf_class="Glm4MoeForCausalLM",
        defaults={
            **_DEFAULTS,
            "vocab_size": 151552,
            "max_position_embeddings": 131072,
            "attention_bias": False,
            "use_qk_norm": False,
        },
        weight_map=_MAP,
        other_maps=(_MAP_WITHOUT_COPIES,),
        fields={**DEEPSEEK_FIELDS, "qk_norm": "use_qk_norm"},
        fixed=_FIXED,
        aliases=_ALIASES,
        read_layers=read_deepseek_layers,
        write_layers=write_deepseek_layers,
        presets={
            "glm-4.5-air": _AIR,
            "intellect-3": _AIR,  # GLM-4.5-Air with other weights
            "glm-4.5": _glm_355b(131_072),
            "glm-4.6": _glm_355b(202_752),
            "glm-4.7": _glm_355b(202_752),
        },
    )
)
register(
    Family(
        name="glm4v_moe",
        architecture=MoEDecoder,
        hf_class="Glm4vMoeForConditionalGeneration",
        defaults={
            **_DEFAULTS,
            "vocab_size": 151424,
            "max_position_embeddings": 65536,
            "attention_bias": True,
            "router_aux_loss_coef": 0.0001,
            "output_router_logits": False,
        },
        weight_map=beside_vision(_MODEL),
        section=("text_config", "glm4v_moe_text"),
        fields=DEEPSEEK_FIELDS,
        fixed=_FIXED,
        aliases=_ALIASES,
        read_layers=read_deepseek_layers,
        write_layers=write_deepseek_layers,
    )
)
