"""Step-3.5-Flash and the text model of Step-3.7-Flash: clamped experts, and more heads in windows.

The result of each head is multiplied by a sigmoid of a projection of the token. Layers with a
window have more heads and rotate whole heads, and the others rotate a part of each by scaled
angles. Norms multiply by 1 + their weights. In some layers the factors of SwiGLU are clamped, with
limits of the routed experts and of the dense layers and shared experts
(:func:`moetrain.kernels.experts.swiglu.limited`). The first layers are dense.

Files hold three MTP layers behind the model's own, and Step-3.7 a vision tower. An export copies
both unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import model_validator

from moetrain.kernels.experts.swiglu import limited
from moetrain.models.architecture import Architecture, ConfigJson, Fields, Part
from moetrain.models.decoders import (
    COMMON_DEFAULTS,
    DENSE,
    StackExperts,
    beside_vision,
    renamed,
)
from moetrain.models.families.deepseek import check_keys
from moetrain.models.family import Family, Rename, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts
from moetrain.models.parts.gated_attention import GateActivation, GatedAttention, GateOf
from moetrain.models.parts.layer_types import (
    FULL,
    ROPE_BY_KIND,
    ROUTED_MLP,
    SLIDING,
    WindowedDecoder,
    read_ropes,
    read_types,
    write_types,
    written_share,
)
from moetrain.models.parts.multi_token import num_multi_token_layers
from moetrain.models.rope_scaling import RopeScaling

_Limits = tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class _Experts(RoutedExperts):
    """Describes routed experts beside a shared one with another activation."""

    shared_activation: str = "silu"

    @property
    def shared(self) -> Part:
        return SwiGLU(
            hidden_size=self.hidden_size,
            intermediate_size=self.shared_intermediate_size,
            activation=self.shared_activation,
        )


class _Step(WindowedDecoder):
    """A decoder with gated attention and limits of SwiGLU by the layer."""

    kinds = (GatedAttention, _Experts, SwiGLU)

    gate_of: ClassVar[GateOf] = "head"
    gate_activation: ClassVar[GateActivation] = "sigmoid"
    expert_limits: _Limits = ()
    """Limit of the routed experts in each layer (None: there is none); empty: in no layer."""
    shared_limits: _Limits = ()
    """Limit of the dense layer or the shared expert in each layer; empty: in no layer."""

    @model_validator(mode="after")
    def _limits_of_every_layer(self) -> Self:
        for name in ("expert_limits", "shared_limits"):
            limits: _Limits = getattr(self, name)
            if limits and len(limits) != self.num_layers:
                problem = f"{name} has {len(limits)} entries, but num_layers is {self.num_layers}"
                raise ValueError(problem)
            if any(limit is not None and not limit > 0 for limit in limits):
                raise ValueError(f"{name} {limits} has an entry that is not above 0")
        return self

    def feed_forward(self, layer: int) -> Part:
        routed = limited("silu", self.expert_limits[layer] if self.expert_limits else None)
        shared = limited("silu", self.shared_limits[layer] if self.shared_limits else None)
        if self.moe_layers[layer] if self.moe_layers else self.num_experts > 0:
            return _Experts.of(self, activation=routed, shared_activation=shared)
        return SwiGLU.of(self, activation=shared)


# ---- config.json -------------------------------------------------------------------------------

_THETA = "layer_theta"
"""Our name of the key ``rope_theta``, a number or a list with an entry for each layer."""
_SCALING = "full_scaling"
"""Our name of the key ``rope_scaling``, which applies to layers without a window."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "mlp_bias": (False,),
    "use_head_wise_attn_gate": (True,),
    "use_qk_norm": (True,),
    "zero_centered": (True,),
    "use_moe_router_bias": (True,),
    "norm_expert_weight": (True,),
    "moe_router_activation": ("sigmoid",),
    "yarn_only_types": ([FULL], FULL, None, []),
}
_OTHER, _LAYERS = "attention_other_setting", "per_layer_config"
_SLIDING_HEADS = "num_sliding_attention_heads"
_PUBLISHED = {
    "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_token",
    "num_attention_groups": "num_kv_heads",
}
"""Keys that servers read, and our fields. transformers has other keys for the same numbers."""
_LIMITS = {"expert_limits": "swiglu_limits", "shared_limits": "swiglu_limits_shared"}


def _read_layers(config: ConfigJson) -> Fields:
    check_keys(config, {**_ONLY, "query_pre_attn_scalar": (None, config["head_dim"])})
    if config["share_expert_dim"] < 1:
        raise error("config.json", "share_expert_dim is 0, expected 1 or more")
    count = config["num_hidden_layers"]
    types = [FULL] * count if config["layer_types"] is None else _own(config, "layer_types")
    return {
        **read_types(config, types),
        "window_num_heads": _read_heads(config, types),
        **_read_ropes(config, types),
        "moe_layers": _read_routed(config),
        **{ours: _read_limits(config, key) for ours, key in _LIMITS.items()},
    }


def _own(config: ConfigJson, key: str) -> list[Any]:
    """Return the list ``key`` without the entries of MTP layers, which follow the model's own.

    Raises ConfigError: it has another length.
    """
    values, count = config[key], config["num_hidden_layers"]
    if isinstance(values, list) and len(values) in (
        count,
        count + num_multi_token_layers(config),
    ):
        return values[:count]
    problem = f"{key} is {values!r:.80}, expected a list of num_hidden_layers {count}"
    raise error("config.json", problem)


def _read_heads(config: ConfigJson, types: Sequence[object]) -> int | None:
    """Read the heads of layers with a window, from one of three keys; None: as in other layers."""
    usual, found = config["num_attention_heads"], config[_SLIDING_HEADS]
    other = config.get(_OTHER) or {}
    if found is None:
        found = other.get("num_attention_heads", usual)
    same = {"head_dim": "head_dim", "num_attention_groups": "num_key_value_heads"}
    for key, theirs in same.items():
        if other.get(key, config[theirs]) != config[theirs]:
            problem = f"{_OTHER} {key} {other[key]!r:.80} differs from {config[theirs]}"
            raise error("config.json", f"{problem}, which is not supported; use a published model")
    layers = {int(key): values for key, values in (config[_LAYERS] or {}).items()}
    own: Fields = {"num_attention_heads": usual}
    each = [own | layers.pop(i, {}) for i in range(len(types))]
    wanted = [{"num_attention_heads": found if kind == SLIDING else usual} for kind in types]
    if config[_LAYERS] is not None and (layers or each != wanted):
        problem = f"{_LAYERS} differs from {_SLIDING_HEADS} {found} in layers of {SLIDING}"
        raise error("config.json", f"{problem}, which is not supported; use published values")
    return None if found == usual or SLIDING not in types else found


def _read_ropes(config: ConfigJson, types: Sequence[object]) -> Fields:
    """Read the rotary embeddings of both kinds of layers, from entries by kind or by layer."""
    kinds = {str(kind) for kind in types}
    ropes = config.get(ROPE_BY_KIND) or {}
    if all(isinstance(ropes.get(kind), Mapping) for kind in kinds):
        return read_ropes(config, {}, kinds, is_partial=True)
    found: dict[str, Fields] = {}
    for kind in kinds:
        rope: Fields = {"rope_type": "default"}
        for ours, key, usual in (
            ("rope_theta", _THETA, 10000.0),
            ("partial_rotary_factor", "partial_rotary_factors", None),
        ):
            value = config.get(key, usual)
            if isinstance(value, list):
                each = {
                    x for x, type_ in zip(_own(config, key), types, strict=True) if type_ == kind
                }
                if len(each) > 1:
                    key = "rope_theta" if key == _THETA else key
                    problem = f"{key} differs between layers of {kind}, which is not supported"
                    raise error("config.json", f"{problem}; use a published model")
                value = each.pop()
            rope[ours] = value
        found[kind] = rope | ((config.get(_SCALING) or {}) if kind == FULL else {})
    return read_ropes({**config, ROPE_BY_KIND: found}, {}, kinds, is_partial=True)


def _read_routed(config: ConfigJson) -> tuple[bool, ...]:
    """Read which layers are MoE; by default all but the first three are."""
    count, listed = config["num_hidden_layers"], config.get("moe_layers_enum")
    if config["mlp_layer_types"] is not None:
        return tuple(kind == ROUTED_MLP for kind in _own(config, "mlp_layer_types"))
    routed = {*range(3, count)}
    if listed is not None:
        numbers = listed.split(",") if isinstance(listed, str) else listed
        routed = {int(number) for number in numbers if str(number).strip()}
    return tuple(i in routed for i in range(count))


def _read_limits(config: ConfigJson, key: str) -> _Limits:
    if config[key] is None:
        return ()
    limits = [float(limit) if limit else None for limit in _own(config, key)]
    return tuple(limits) if any(limits) else ()


def _write_layers(arch: Architecture) -> Fields:
    """Write the keys of published files, which have an entry for each layer."""
    assert isinstance(arch, _Step)
    is_full = [arch.window(i) is None for i in range(arch.num_layers)]
    heads = {
        "attention_type": SLIDING,
        "num_attention_heads": arch.window_num_heads or arch.num_heads,
        "num_attention_groups": arch.num_kv_heads,
        "head_dim": arch.head_dim,
    }
    shares = (arch.partial_rotary_factor, arch.window_partial_rotary_factor)
    factors = [written_share(share, arch.head_dim) for share in shares]
    return {
        **{other: getattr(arch, ours) for other, ours in _PUBLISHED.items()},
        "sliding_window": 512,  # transformers asks for it without windows, too
        **write_types(arch),
        _OTHER: heads,
        "rope_theta": [arch.rope_theta if full else arch.window_rope_theta for full in is_full],
        "partial_rotary_factors": [factors[0] if full else factors[1] for full in is_full],
        "rope_scaling": arch.rope.to_hf(),
        "yarn_only_types": [FULL],
        "moe_layers_enum": ",".join(map(str, arch.moe_layer_indices)),
        **{key: [x or 0.0 for x in getattr(arch, ours)] or None for ours, key in _LIMITS.items()},
    }


# ---- weights -----------------------------------------------------------------------------------


_OURS, _THEIRS = "layers.{layer}.moe", "model.layers.{layer}"
_WEIGHT_MAP: WeightMap = (
    *DENSE,
    Rename("layers.{layer}.attn.wg", f"{_THEIRS}.self_attn.g_proj"),
    Rename(f"{_OURS}.router.weight", f"{_THEIRS}.moe.gate.weight"),
    Rename(f"{_OURS}.router.bias", f"{_THEIRS}.moe.router_bias"),
    *(
        Rename(f"{_OURS}.shared_experts.w_{x}", f"{_THEIRS}.share_expert.{x}_proj")
        for x in ("gate", "up", "down")
    ),
    StackExperts(
        f"{_OURS}.experts.w_gate_up",
        (f"{_THEIRS}.moe.gate_proj.weight", f"{_THEIRS}.moe.up_proj.weight"),
    ),
    Rename(f"{_OURS}.experts.w_down", f"{_THEIRS}.moe.down_proj.weight"),
)
_MODULES = renamed(
    _WEIGHT_MAP,
    lambda name: name.replace(".share_expert.", ".mlp.shared_experts.").replace(".moe.", ".mlp."),
)
_FIXED: Fields = {
    "qk_norm": True,
    "zero_centred_norms": True,
    "norm_topk_prob": True,
    "router_score": "sigmoid",
    "router_fp32": True,
    "selection_bias": True,
    "rope_theta": 10000.0,  # these two are read by the kind of layer
    "partial_rotary_factor": 1.0,
}
_PRESET = _Step(
    **{
        **_FIXED,
        "family": "step3p5",
        "vocab_size": 128_896,
        "hidden_size": 4096,
        "num_layers": 45,
        "num_heads": 64,
        "window_num_heads": 96,
        "num_kv_heads": 8,
        "head_dim": 128,
        "intermediate_size": 11_264,
        "max_positions": 262_144,
        "norm_eps": 1e-5,
        "rope_theta": 5e6,
        "rope": RopeScaling(
            kind="llama3",
            factor=2.0,
            original_max_positions=131_072,
            low_freq_factor=1.0,
            high_freq_factor=32.0,
        ),
        "partial_rotary_factor": 0.5,
        "sliding_windows": (None, 512, 512, 512) * 11 + (None,),
        "moe_layers": (False,) * 3 + (True,) * 42,
        "num_experts": 288,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1280,
        "shared_intermediate_size": 1280,
        "routed_scaling_factor": 3.0,
        "expert_limits": (None,) * 43 + (7.0,) * 2,
        "shared_limits": (None,) * 43 + (16.0,) * 2,
    }
)

for _name, _class, _section in (
    ("step3p5", "Step3p5ForCausalLM", None),
    ("step3p7", "Step3p7ForConditionalGeneration", ("text_config", "step3p5")),
):
    register(
        Family(
            name=_name,
            architecture=_Step,
            hf_class=_class,
            defaults={
                **COMMON_DEFAULTS,
                "vocab_size": 128815,
                "hidden_size": 4096,
                "intermediate_size": 11264,
                "num_hidden_layers": 45,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 128000,
                "rms_norm_eps": 1e-5,
                "partial_rotary_factor": 1.0,
                "attention_bias": False,
                "sliding_window": None,
                "layer_types": None,
                "mlp_layer_types": None,
                _SLIDING_HEADS: None,
                _LAYERS: None,
                "n_routed_experts": 288,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 1280,
                "share_expert_dim": 1280,
                "moe_router_scaling_factor": 1.0,
                "swiglu_limits": None,
                "swiglu_limits_shared": None,
            },
            weight_map=_WEIGHT_MAP,
            fields={
                "num_experts": "n_routed_experts",
                "shared_intermediate_size": "share_expert_dim",
                "routed_scaling_factor": "moe_router_scaling_factor",
            },
            fixed=_FIXED,
            aliases={
                "rope_theta": _THETA,
                "rope_scaling": _SCALING,
                "rope_parameters": ROPE_BY_KIND,
                "num_local_experts": "n_routed_experts",
                "moe_num_experts": "n_routed_experts",
                "moe_top_k": "num_experts_per_tok",
                "num_attention_groups": "num_key_value_heads",
                "share_expert_dims": "share_expert_dim",
            },
            nullable={
                "sliding_window": int,
                "layer_types": list,
                "mlp_layer_types": list,
                _SLIDING_HEADS: int,
                _LAYERS: dict,
                "swiglu_limits": list,
                "swiglu_limits_shared": list,
            },
            lora_layout="fused",  # PEFT does not convert the names of this type's experts
            modules=_MODULES if _section is None else beside_vision(_MODULES),
            section=_section,
            constants={
                **{key: values[0] for key, values in _ONLY.items() if key != "yarn_only_types"},
                "need_fp32_gate": True,
            },
            read_layers=_read_layers,
            write_layers=_write_layers,
            presets={"step-3.5-flash": _PRESET} if _section is None else {},
        )
    )
