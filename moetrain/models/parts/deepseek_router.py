"""DeepSeek-V3's router, and its keys of config.json for layers; many families share both."""

from collections.abc import Mapping

from moetrain.models.architecture import Architecture, ConfigJson, Fields

SIGMOID_ROUTER: Fields = {
    "router_score": "sigmoid",
    "router_fp32": True,
    "selection_bias": True,
    # The reference adds 1e-20 to the sum. In fp32 both agree for sums above 1e-12.
    "router_min_sum": 1e-20,
}
"""Entries of ``Family.fixed`` for DeepSeek-V3's router (arXiv 2412.19437)."""
DEEPSEEK_FIELDS: Mapping[str, str] = {
    "num_experts": "n_routed_experts",
    "num_expert_groups": "n_group",
    "topk_expert_groups": "topk_group",
    "routed_scaling_factor": "routed_scaling_factor",
}
"""Entries of ``Family.fields`` for the keys of DeepSeek's config.json."""


def read_deepseek_layers(config: ConfigJson) -> Fields:
    """Read the MoE layers and the width of shared experts (a ``Family.read_layers``)."""
    layers = range(config["num_hidden_layers"])
    first = config["first_k_dense_replace"]
    width = (config["n_shared_experts"] or 0) * config["moe_intermediate_size"]
    return {"moe_layers": tuple(i >= first for i in layers), "shared_intermediate_size": width}


def write_deepseek_layers(arch: Architecture) -> Fields:
    """Invert :func:`read_deepseek_layers`."""
    return {
        "first_k_dense_replace": min(arch.moe_layer_indices, default=arch.num_layers),
        "n_shared_experts": arch.shared_intermediate_size // max(1, arch.moe_intermediate_size),
        **({"num_nextn_predict_layers": arch.mtp_layers} if arch.mtp_layers else {}),
    }
