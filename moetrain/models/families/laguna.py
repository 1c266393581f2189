"""Laguna: gated attention with more heads in layers with a window, and a sigmoid router.

The result of each head is multiplied by a softplus of a projection of the token. Layers with a
window rotate whole heads, and the others a part of each by scaled angles. The first layer is dense,
and the others have a shared expert. The router's logits may be capped by a tanh.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field

from moetrain.config import KernelsSection, MoeSection
from moetrain.kernels.vocabulary.chunk import soft_capped
from moetrain.models.architecture import Architecture, ConfigJson, Fields, Part
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE, moe_block
from moetrain.models.families.deepseek import check_keys
from moetrain.models.family import Family, Rename, register
from moetrain.models.hf.files import error
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import Experts, MoE, RoutedExperts, Router
from moetrain.models.parts.gated_attention import GateActivation, GatedAttention, GateOf
from moetrain.models.parts.layer_types import (
    FULL,
    ROPE_BY_KIND,
    SLIDING,
    WindowedDecoder,
    read_mlp_types,
    read_ropes,
    read_types,
    write_mlp_types,
    write_ropes,
    write_types,
)
from moetrain.models.rope_scaling import RopeScaling


@dataclass(frozen=True, kw_only=True)
class _Experts(RoutedExperts):
    """Describes routed experts whose router's logits may be capped."""

    router_softcap: float = 0.0
    """The bound ``c`` of the logits ``c * tanh(logits / c)``; 0: they are not capped."""

    def build(self, kernels: KernelsSection, moe: MoeSection) -> MoE:
        return _MoE(self, moe, kernels)


class _Router(Router):
    """A router that caps its logits."""

    sizes: _Experts

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Compute ``logits_TE`` in fp32."""
        return soft_capped(super().logits(x_TD), self.sizes.router_softcap)


class _MoE(MoE):
    """The module of :class:`_Experts`."""

    kinds = (_Router, Experts)


class _Laguna(WindowedDecoder):
    """A decoder with gated attention, and a capped router."""

    kinds = (GatedAttention, _Experts, SwiGLU)

    gate_of: GateOf = "head"
    gate_activation: ClassVar[GateActivation] = "softplus"
    router_softcap: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def feed_forward(self, layer: int) -> Part:
        is_routed = self.moe_layers[layer] if self.moe_layers else self.num_experts > 0
        return (_Experts if is_routed else SwiGLU).of(self)


# ---- config.json -------------------------------------------------------------------------------

_ROPES: dict[str, Fields] = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
_HEADS = "num_attention_heads_per_layer"
_GATES: dict[object, GateOf] = {True: "head", "per-head": "head", "per-element": "element"}
_ONLY: dict[str, tuple[Any, ...]] = {
    "gating": (*_GATES,),
    "norm_topk_prob": (True,),
    "moe_apply_router_weight_on_input": (False,),
    "swa_attention_sink_enabled": (False, None),
}


def _read_layers(config: ConfigJson) -> Fields:
    check_keys(config, _ONLY)
    if config["shared_expert_intermediate_size"] < 1:
        problem = "shared_expert_intermediate_size is 0, expected 1 or more"
        raise error("config.json", problem)
    count = config["num_hidden_layers"]
    types = [FULL] * count if config["layer_types"] is None else config["layer_types"]
    return {
        **read_types(config, types),
        **_read_heads(config, types),
        **read_ropes(config, _ROPES, {str(kind) for kind in types}, is_partial=True),
        "moe_layers": read_mlp_types(config, (False,) + (True,) * (count - 1)),
        "gate_of": _GATES[config.get("gating", True)],
    }


def _read_heads(config: ConfigJson, types: Sequence[object]) -> Fields:
    """Read the heads of both kinds of layers.

    Raises ConfigError: layers of one kind differ.
    """
    usual = config["num_attention_heads"]
    each = [usual] * len(types) if config[_HEADS] is None else config[_HEADS]
    if len(each) != len(types):
        problem = f"{_HEADS} has {len(each)} entries, but num_hidden_layers is {len(types)}"
        raise error("config.json", problem)
    found: list[int] = []
    for kind in (FULL, SLIDING):
        own = [heads for heads, type_ in zip(each, types, strict=True) if type_ == kind]
        if any(heads != own[0] or type(heads) is not int for heads in own):
            problem = f"{_HEADS} differs between layers of {kind}"
            raise error("config.json", f"{problem}, which is not supported; use a published model")
        found.append(own[0] if own else [usual, *found][-1])
    full, sliding = found
    return {"num_heads": full, "window_num_heads": None if sliding == full else sliding}


def _write_layers(arch: Architecture) -> Fields:
    assert isinstance(arch, _Laguna)
    sliding = arch.window_num_heads or arch.num_heads
    windows = [arch.window(i) for i in range(arch.num_layers)]
    return {
        **write_types(arch),
        _HEADS: [arch.num_heads if window is None else sliding for window in windows],
        "rope_parameters": write_ropes(arch),
        "mlp_layer_types": write_mlp_types(arch),
        "gating": "per-element" if arch.gate_of == "element" else True,
    }


# ---- weights and families ----------------------------------------------------------------------

# PEFT's files have these names, too: it reads them as transformers reads a model's files, whose
# rename of ``shared_expert`` breaks adapters that are named by the modules ``shared_experts``.
_WEIGHT_MAP = (
    *DENSE,
    Rename("layers.{layer}.attn.wg", "model.layers.{layer}.self_attn.g_proj"),
    *moe_block(bias="experts.e_score_correction_bias", shared="shared_expert"),
)
_FIXED: Fields = {
    "qk_norm": True,
    "norm_topk_prob": True,
    "router_score": "sigmoid",
    "selection_bias": True,
    "partial_rotary_factor": 0.5,
}


def _preset(**sizes: Any) -> _Laguna:
    """Return a published model. The sizes are those of the published config.json."""
    num_layers = sizes["num_layers"]
    return _Laguna(
        family="laguna",
        vocab_size=100_352,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500_000.0,
        sliding_windows=(None, 512, 512, 512) * (num_layers // 4),
        moe_layers=(False,) + (True,) * (num_layers - 1),
        num_experts=256,
        routed_scaling_factor=2.5,
        **sizes,
        **_FIXED,
    )


register(
    Family(
        name="laguna",
        architecture=_Laguna,
        hf_class="LagunaForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 100352,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 1.0,
            "attention_bias": False,
            "sliding_window": 512,
            "layer_types": None,
            "mlp_layer_types": None,
            _HEADS: None,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "moe_routed_scaling_factor": 1.0,
            "moe_router_logit_softcapping": 0.0,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
        },
        weight_map=_WEIGHT_MAP,
        fields={
            "shared_intermediate_size": "shared_expert_intermediate_size",
            "routed_scaling_factor": "moe_routed_scaling_factor",
            "router_softcap": "moe_router_logit_softcapping",
        },
        fixed=_FIXED,
        aliases={"rope_parameters": ROPE_BY_KIND},
        nullable={"layer_types": list, "mlp_layer_types": list, _HEADS: list},
        lora_layout="fused",  # PEFT does not convert the names of this type's experts
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={
            "laguna-xs-2.1": _preset(
                num_layers=40,
                hidden_size=2048,
                window_num_heads=64,
                intermediate_size=8192,
                max_positions=262_144,
                rope=RopeScaling(
                    kind="yarn", factor=32.0, original_max_positions=8192, beta_fast=64.0
                ),
                num_experts_per_token=8,
                moe_intermediate_size=512,
                shared_intermediate_size=512,
            ),
            "laguna-s-2.1": _preset(
                num_layers=48,
                hidden_size=3072,
                window_num_heads=72,
                intermediate_size=12_288,
                max_positions=1_048_576,
                rope=RopeScaling(kind="yarn", factor=128.0, original_max_positions=8192),
                num_experts_per_token=10,
                moe_intermediate_size=1024,
                shared_intermediate_size=1024,
            ),
        },
    )
)
