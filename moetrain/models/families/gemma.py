"""Gemma-4: windows in most layers, and experts beside a dense layer.

Layers with full attention have wider heads and other rotary angles, and may share keys and values.
Embeddings are scaled, and logits are capped. Each part has a norm before and after it. Each block's
result is multiplied by a scalar, a buffer in ``transformers``, that is read and written but not
trained. Published files also hold towers for pictures and sound, and an export carries their
tensors on; files of ``gemma4_text`` hold the language model alone.

Left out on purpose: embeddings by layer and layers that share keys (E2B, E4B), and attention to
later tokens.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from moetrain.models.architecture import Architecture, AttentionPart, ConfigJson, Fields, Part
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE, beside_vision
from moetrain.models.family import Family, Rename, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.parts.between_norms import MLPBetweenNorms
from moetrain.models.parts.gemma_layers import (
    GemmaAttention,
    GemmaExperts,
)
from moetrain.models.rope_scaling import RopeScaling, Rotation

_SLIDING = "sliding_attention"
_FULL = "full_attention"


class _Gemma4(Architecture):
    """Gemma-4; the fields below are those of layers without a window."""

    kinds = (GemmaAttention, MLPBetweenNorms, GemmaExperts)
    activation = "gelu"

    global_head_dim: int = Field(default=512, gt=0)
    global_num_kv_heads: int = Field(default=1, gt=0)
    global_rope_theta: float = Field(default=1e6, gt=0, allow_inf_nan=False)
    global_rope: RopeScaling = RopeScaling(kind="proportional", share=0.25)
    keys_are_values: bool = False

    @field_validator("sliding_windows")
    @classmethod
    def _full_at_the_end(cls, windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Give the last layer full attention, as ``transformers`` always does."""
        return (*windows[:-1], None) if windows else windows

    def _is_global(self, layer: int) -> bool:
        return not self.sliding_windows or self.sliding_windows[layer] is None

    def attention(self, layer: int) -> AttentionPart:
        if not self._is_global(layer):
            window = self.sliding_windows[layer]
            return GemmaAttention.of(self, window=window, keys_are_values=False)
        return GemmaAttention.of(
            self,
            window=None,
            head_dim=self.global_head_dim,
            num_kv_heads=self.global_num_kv_heads,
        )

    def feed_forward(self, layer: int) -> Part:
        return (GemmaExperts if self.num_experts else MLPBetweenNorms).of(self)

    def rotation(self, layer: int) -> Rotation:
        if self._is_global(layer):
            return Rotation(
                self.global_head_dim,
                self.global_rope_theta,
                self.global_rope,
                self.max_positions,
            )
        return Rotation(self.head_dim, self.rope_theta, self.rope, self.max_positions)


# ---- config.json -------------------------------------------------------------------------------

_ROPE = "layer_rope"
"""Our name of the key ``rope_parameters``, which has an entry for each type of layers."""
_ROPES: dict[str, Fields] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_UNSUPPORTED = {
    "hidden_size_per_layer_input": (0, "embeddings by layer"),
    "num_kv_shared_layers": (0, "layers that share keys"),
}


def _read_layers(config: ConfigJson) -> Fields:
    for key, (taken, what) in _UNSUPPORTED.items():
        if config[key] != taken:
            problem = f"{key} {config[key]!r:.80} ({what}) is not supported"
            raise error("config.json", f"{problem}; use another model, such as 26B-A4B or 31B")
    if config["use_bidirectional_attention"] not in (None, "vision"):
        problem = f"use_bidirectional_attention {config['use_bidirectional_attention']!r:.80}"
        raise error("config.json", f"{problem} is not supported; use a model with causal attention")
    types = _layer_types(config)
    found: Fields = {
        "sliding_windows": tuple(config["sliding_window"] if t == _SLIDING else None for t in types)
    }
    found |= _read_widths(config, types) | _read_ropes(config)
    found["logit_softcap"] = float(config["final_logit_softcapping"] or 0.0)
    if config["enable_moe_block"]:
        for ours, key in _EXPERT_KEYS.items():
            if not isinstance(config.get(key), int):
                raise error("config.json", f"{key} is {config.get(key)!r:.80}, expected a number")
            found[ours] = config[key]
        if found["num_experts_per_token"] > found["num_experts"]:
            problem = f"top_k_experts {config['top_k_experts']} is more than num_experts"
            raise error("config.json", f"{problem} {config['num_experts']}")
    return found


def _layer_types(config: ConfigJson) -> list[str]:
    count = config["num_hidden_layers"]
    types = config["layer_types"] or [_FULL if (i + 1) % 6 == 0 else _SLIDING for i in range(count)]
    unknown = sorted({str(kind) for kind in types} - {_SLIDING, _FULL})
    if unknown:
        raise error("config.json", f"layer_types {', '.join(unknown)} are not supported")
    return [*types[:-1], _FULL]  # transformers ignores the last entry too


def _read_widths(config: ConfigJson, types: list[str]) -> Fields:
    """Read the heads of layers with full attention, from keys of their own or layer by layer."""
    is_shared = config["attention_k_eq_v"]
    per_layer = config["per_layer_config"]
    kv_heads = config["num_global_key_value_heads"] if is_shared else None
    own = {"head_dim": config["global_head_dim"]}
    own |= {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    if per_layer is not None:
        named = {str(key): values for key, values in per_layer.items() if values}
        # Files write layers' numbers with leading zeros.
        layers = {str(int(x)) if x.isdecimal() else x: values for x, values in named.items()}
        full = {str(i) for i, kind in enumerate(types) if kind == _FULL}
        own = next(iter(layers.values()), {})
        alike = all(values == own for values in layers.values())
        if (layers and layers.keys() not in ({_FULL}, full)) or not alike or own.keys() - _WIDTHS:
            problem = "per_layer_config differs between layers in more than the head_dim and the"
            problem += f" num_key_value_heads of {_FULL}"
            raise error("config.json", f"{problem}, which is not supported; use published values")
    return {
        "global_head_dim": own.get("head_dim", config["head_dim"]),
        "global_num_kv_heads": own.get("num_key_value_heads", config["num_key_value_heads"]),
        "keys_are_values": is_shared,
    }


_WIDTHS = {"head_dim", "num_key_value_heads"}
_EXPERT_KEYS = {
    "num_experts": "num_experts",
    "num_experts_per_token": "top_k_experts",
    "moe_intermediate_size": "moe_intermediate_size",
}


def _read_ropes(config: ConfigJson) -> Fields:
    found: Fields = {}
    ropes = _ROPES if config.get(_ROPE) is None else config[_ROPE]
    for kind, prefix in ((_SLIDING, ""), (_FULL, "global_")):
        rope = ropes.get(kind) if isinstance(ropes, Mapping) else ropes
        values = rope if isinstance(rope, Mapping) else {}
        name = values.get("rope_type")
        theta = values.get("rope_theta")
        if name not in ("default", "proportional") or not isinstance(theta, int | float):
            problem = f"rope_parameters of {kind} are {rope!r:.80}, expected a rope_theta, and"
            raise error("config.json", f"{problem} default or proportional for rope_type")
        scaling = RopeScaling()
        if name == "proportional":
            scaling = RopeScaling(
                kind="proportional",
                factor=float(values.get("factor", 1.0)),
                share=float(values.get("partial_rotary_factor", 1.0)),
            )
        found |= {f"{prefix}rope_theta": float(theta), f"{prefix}rope": scaling}
    return found


def _write_layers(arch: Architecture) -> Fields:
    assert isinstance(arch, _Gemma4)
    windows = [arch.window(i) for i in range(arch.num_layers)]
    moe = {theirs: getattr(arch, ours) for ours, theirs in _EXPERT_KEYS.items()}
    return {
        "hidden_activation": _ACTIVATION,
        "layer_types": [_FULL if window is None else _SLIDING for window in windows],
        # transformers does not accept null, so a number is written even without windows.
        "sliding_window": next(filter(None, windows), 512),
        "global_head_dim": arch.global_head_dim,
        "num_global_key_value_heads": arch.global_num_kv_heads,
        "attention_k_eq_v": arch.keys_are_values,
        "final_logit_softcapping": arch.logit_softcap or None,
        "enable_moe_block": arch.num_experts > 0,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            _SLIDING: _write_rope(arch.rope, arch.rope_theta),
            _FULL: _write_rope(arch.global_rope, arch.global_rope_theta),
        },
        **(moe if arch.num_experts else {}),
    }


def _write_rope(rope: RopeScaling, theta: float) -> Fields:
    found = {"rope_type": rope.kind, "rope_theta": theta}
    if rope.kind == "proportional":
        found |= {"partial_rotary_factor": rope.share, "factor": rope.factor}
    return found


# ---- weights and families ----------------------------------------------------------------------

_LAYER = "model.layers.{layer}"
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
    "moe.dense_norm": "pre_feedforward_layernorm",
    "moe.dense_out_norm": "post_feedforward_layernorm_1",
    "moe.routed_norm": "pre_feedforward_layernorm_2",
    "moe.routed_out_norm": "post_feedforward_layernorm_2",
    "moe.shared_experts.w_gate": "mlp.gate_proj",
    "moe.shared_experts.w_up": "mlp.up_proj",
    "moe.shared_experts.w_down": "mlp.down_proj",
}
_TENSORS = {
    "scalar": "layer_scalar",
    "moe.router.weight": "router.proj.weight",
    "moe.router.scale": "router.scale",
    "moe.router.expert_scale": "router.per_expert_scale",
    "moe.experts.w_gate_up": "experts.gate_up_proj",
    "moe.experts.w_down": "experts.down_proj",
}
_MAP: WeightMap = (
    *(one for one in DENSE if not one.ours.endswith(("attn_norm", "mlp_norm"))),
    *(Rename(f"layers.{{layer}}.{ours}", f"{_LAYER}.{x}") for ours, x in _MODULES.items()),
    *(Rename(f"layers.{{layer}}.{ours}", f"{_LAYER}.{x}") for ours, x in _TENSORS.items()),
)
_ACTIVATION = "gelu_pytorch_tanh"
_FIXED: Fields = {
    "qk_norm": True,
    "late_norms": True,
    "layer_scalars": True,
    "scaled_embeddings": True,
}
_NULLABLE: dict[str, type] = {
    "layer_types": list,
    "final_logit_softcapping": float,
    "num_global_key_value_heads": int,
    "per_layer_config": dict,
    "use_bidirectional_attention": str,
}


def _preset(num_layers: int, **sizes: Any) -> _Gemma4:
    """Return a published model. Sizes are from memory; they give the published parameter counts."""
    return _Gemma4(
        family="gemma4_text",
        vocab_size=262_144,
        num_layers=num_layers,
        head_dim=256,
        max_positions=262_144,
        tie_embeddings=True,
        sliding_windows=((1024,) * 5 + (None,)) * (num_layers // 6),
        keys_are_values=True,
        logit_softcap=30.0,
        **sizes,
        **_FIXED,
    )


_PRESETS = {
    "gemma-4-26b-a4b": _preset(
        30,
        hidden_size=2816,
        num_heads=16,
        num_kv_heads=8,
        global_num_kv_heads=2,
        intermediate_size=2112,
        num_experts=128,
        num_experts_per_token=8,
        moe_intermediate_size=704,
    ),
    "gemma-4-31b": _preset(
        60,
        hidden_size=5376,
        num_heads=32,
        num_kv_heads=16,
        global_num_kv_heads=4,
        intermediate_size=21_504,
    ),
}
for _name, _class, _map, _section in (
    ("gemma4_text", "Gemma4ForCausalLM", _MAP, None),
    ("gemma4", "Gemma4ForConditionalGeneration", beside_vision(_MAP), "text_config"),
):
    register(
        Family(
            name=_name,
            architecture=_Gemma4,
            hf_class=_class,
            defaults={
                **COMMON_DEFAULTS,
                "vocab_size": 262_144,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 30,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "global_head_dim": 512,
                "num_global_key_value_heads": None,
                "per_layer_config": None,
                "hidden_act": _ACTIVATION,
                "max_position_embeddings": 131_072,
                "tie_word_embeddings": True,
                "attention_bias": False,
                "sliding_window": 512,
                "layer_types": None,
                "final_logit_softcapping": None,
                "use_bidirectional_attention": None,
                "hidden_size_per_layer_input": 256,
                "attention_k_eq_v": False,
                "num_kv_shared_layers": 0,
                "enable_moe_block": False,
            },
            weight_map=_map,
            fixed=_FIXED,
            aliases={"hidden_activation": "hidden_act", "rope_parameters": _ROPE},
            nullable=_NULLABLE,
            lora_layout="fused",
            experts="experts",
            section=None if _section is None else (_section, "gemma4_text"),
            activation=_ACTIVATION,
            read_layers=_read_layers,
            write_layers=_write_layers,
            presets=_PRESETS if _section is None else {},
        )
    )
