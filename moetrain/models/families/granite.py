"""Granite's mixtures of experts with a shared one (``granitemoeshared``).

The family has four factors (arXiv 2405.04324 has them in dense models): on embeddings, on the
result of each part, on the scores of attention, and a divisor of logits. A token's experts are
chosen by their logits and weighted by a softmax of those of the chosen. Files stack the gate and up
matrices, those of all experts in one tensor.
"""

from collections.abc import Mapping

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE, MoEDecoder
from moetrain.models.family import Family, Rename, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.hf.take_rows import TakeRows

_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
_MULTIPLIERS += ("logits_scaling",)
_FIELDS: Mapping[str, str] = {
    **{name: name for name in _MULTIPLIERS},
    "num_experts": "num_local_experts",
    "moe_intermediate_size": "intermediate_size",
    "shared_intermediate_size": "shared_intermediate_size",
}
_DEFAULTS: Fields = {
    **COMMON_DEFAULTS,
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    **dict.fromkeys(_MULTIPLIERS, 1.0),
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}


def _read_shared(config: ConfigJson) -> Fields:
    if config["num_local_experts"] < 1:
        raise error("config.json", "num_local_experts is 0, expected 1 or more")
    return {}


# ---- weights -----------------------------------------------------------------------------------

_OURS, _THEIRS = "layers.{layer}", "model.layers.{layer}"


def _experts(**names: str) -> WeightMap:
    """Map routed experts, with the names in ``block_sparse_moe`` of their tensors."""
    theirs = f"{_THEIRS}.block_sparse_moe"
    return (
        Rename(f"{_OURS}.moe.router.weight", f"{theirs}.{names['router']}"),
        Rename(f"{_OURS}.moe.experts.w_gate_up", f"{theirs}.{names['gate_up']}"),
        Rename(f"{_OURS}.moe.experts.w_down", f"{theirs}.{names['down']}"),
    )


def _shared_rows(arch: Architecture) -> tuple[int, int]:
    return arch.shared_intermediate_size, arch.shared_intermediate_size


def _shared(module: str) -> WeightMap:
    """Map the shared experts, which are ``module`` of a block."""
    return (
        TakeRows(
            tuple(f"{_OURS}.{module}.w_{x}.weight" for x in ("gate", "up")),
            f"{_THEIRS}.shared_mlp.input_linear.weight",
            _shared_rows,
        ),
        Rename(f"{_OURS}.{module}.w_down", f"{_THEIRS}.shared_mlp.output_linear"),
    )


_COMMON_MAP = tuple(one for one in DENSE if ".mlp." not in one.ours)
_EXPERTS = _experts(
    router="router.layer.weight", gate_up="input_linear.weight", down="output_linear.weight"
)
_EXPERTS_IN_MEMORY = _experts(
    router="router.weight", gate_up="experts.gate_up_proj", down="experts.down_proj"
)
_SHARED_EXPERTS = _shared("moe.shared_experts")

# ---- families ----------------------------------------------------------------------------------

_FIXED: Fields = {"norm_topk_prob": True}
_EXPERTS_OF_FAMILY = "block_sparse_moe.experts"

register(
    Family(
        name="granitemoeshared",
        architecture=MoEDecoder,
        hf_class="GraniteMoeSharedForCausalLM",
        defaults={**_DEFAULTS, "shared_intermediate_size": 0},
        weight_map=(*_COMMON_MAP, *_EXPERTS, *_SHARED_EXPERTS),
        modules=(*_COMMON_MAP, *_EXPERTS_IN_MEMORY, *_SHARED_EXPERTS),
        fields=_FIELDS,
        fixed=_FIXED,
        experts=_EXPERTS_OF_FAMILY,
        lora_layout="fused",  # experts are stacked
        read_layers=_read_shared,
    )
)
