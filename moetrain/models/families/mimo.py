"""MiMo-V2-Flash: sinks and more key/value heads in layers with a window, and narrow values.

Values are narrower than queries and keys, and are multiplied by a number. A third of each head
rotates, by other angles in layers with a window. The router is DeepSeek-V3's, without shared
experts. The first layer is dense. Files also hold three MTP blocks, under ``model.mtp.``. An export
copies them unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field

from moetrain.config import KernelsSection, MoeSection
from moetrain.models.architecture import Architecture, AttentionPart, ConfigJson, Fields
from moetrain.models.attention import Attention, GroupedQueryAttention
from moetrain.models.decoders import COMMON_DEFAULTS, DENSE, moe_block
from moetrain.models.families.deepseek import check_keys
from moetrain.models.family import Family, Rename, register
from moetrain.models.hf.files import error
from moetrain.models.layers import Context, SwiGLU
from moetrain.models.moe import RoutedExperts
from moetrain.models.parts.deepseek_router import DEEPSEEK_FIELDS, SIGMOID_ROUTER
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
    written_share,
)
from moetrain.models.parts.sink_attention import AttentionWithSinks, SinkAttention

# ---- attention ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Attention(GroupedQueryAttention):
    """Describes attention whose values have a width and a factor of their own."""

    v_head_dim: int
    value_scale: float = 1.0
    """The factor of the values."""

    @property
    def value_dim(self) -> int:
        return self.v_head_dim

    def build(self, kernels: KernelsSection, moe: MoeSection) -> Attention:
        return _ScaledValues(self, kernels)


@dataclass(frozen=True, kw_only=True)
class _AttentionInWindow(_Attention, SinkAttention):
    """Describes such attention with sinks."""

    def build(self, kernels: KernelsSection, moe: MoeSection) -> Attention:
        return _ScaledValuesAndSinks(self, kernels)


class _ScaledValues(Attention):
    """The module of :class:`_Attention`."""

    def __init__(self, sizes: Any, kernels: KernelsSection) -> None:
        super().__init__(sizes, kernels)
        self.value_scale: float = sizes.value_scale

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """Return the heads' results [B, S, H, v] of scaled values."""
        return super().attend(q, k, v * self.value_scale, context)


class _ScaledValuesAndSinks(_ScaledValues, AttentionWithSinks):
    """The module of :class:`_AttentionInWindow`."""


class _MiMo(WindowedDecoder):
    """A decoder with sinks in layers that have a window."""

    kinds = (_Attention, RoutedExperts, SwiGLU, _AttentionInWindow)

    v_head_dim: int = Field(default=128, gt=0, le=2**31 - 1)
    value_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    def attention(self, layer: int) -> AttentionPart:
        window = self.sliding_windows[layer] if self.sliding_windows else None
        if window is None:
            return _Attention.of(self, window=None)
        return _AttentionInWindow.of(
            self,
            window=window,
            num_kv_heads=self.window_num_kv_heads or self.num_kv_heads,
            partial_rotary_factor=self.window_partial_rotary_factor,
        )


# ---- config.json -------------------------------------------------------------------------------

_THETA, _SHARE = "full_theta", "rotating_share"
"""Our names of the keys ``rope_theta`` and ``partial_rotary_factor``."""
_WINDOW = "sliding_window_size"
"""The key of published files: how many tokens before itself a token attends to."""
_IN_WINDOW = "swa_num_key_value_heads"


def _read_layers(config: ConfigJson) -> Fields:
    same = {  # keys of published files
        "swa_num_attention_heads": (config["num_attention_heads"],),
        "swa_head_dim": (config["head_dim"],),
        "swa_v_head_dim": (config["v_head_dim"],),
        "add_swa_attention_sink_bias": (True,),
        "add_full_attention_sink_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "n_shared_experts": (None, 0),
        "rope_scaling": (None,),
    }
    check_keys(config, same)
    count, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    window = config.get(_WINDOW)
    if window is not None:
        config = {**config, "sliding_window": window + 1}
    types = _types(config, "layer_types", "hybrid_layer_pattern", (FULL, SLIDING))
    if types is None:
        is_full = [i == 0 or (i + 1) % 6 == 0 for i in range(count)]
        types = [FULL if full else SLIDING for full in is_full]
    routed = _types(config, "mlp_layer_types", "moe_layer_freq", ("dense", "sparse"))
    own = config.get(_IN_WINDOW, 2 * heads)
    scale = config["attention_value_scale"]
    return {
        **read_types(config, types),
        **read_ropes(config, _ropes(config), {str(kind) for kind in types}, is_partial=True),
        "window_num_kv_heads": own if SLIDING in types else None,
        "moe_layers": read_mlp_types(
            {**config, "mlp_layer_types": routed}, (False,) + (True,) * (count - 1)
        ),
        "routed_scaling_factor": _number(config["routed_scaling_factor"]),
        "value_scale": _number(scale),
    }


def _number(value: float | None) -> float:
    """Return a factor that is 1 where a file has null."""
    return 1.0 if value is None else float(value)


def _types(
    config: ConfigJson, key: str, published: str, names: tuple[str, str]
) -> list[str] | None:
    """Return the list ``key``, or that of published files, which has 0 and 1 for ``names``."""
    numbers = config.get(published)
    if config[key] is not None or numbers is None:
        return config[key]
    if not isinstance(numbers, list) or any(number not in (0, 1) for number in numbers):
        problem = f"{published} is {numbers!r:.80}, expected a list of 0 and 1"
        raise error("config.json", problem)
    return [names[number] for number in numbers]


def _ropes(config: ConfigJson) -> dict[str, Fields]:
    """Return the rotary embeddings of files without ``rope_parameters``."""
    share = config.get(_SHARE, 0.334)
    thetas = {FULL: config.get(_THETA, 5e6), SLIDING: config.get("swa_rope_theta", 1e4)}
    return {
        kind: {"rope_theta": theta, "partial_rotary_factor": share}
        for kind, theta in thetas.items()
    }


def _write_layers(arch: Architecture) -> Fields:
    assert isinstance(arch, _MiMo)
    written = write_types(arch)
    if "sliding_window" in written:
        written[_WINDOW] = written["sliding_window"] - 1
    kinds = [int(arch.window(i) is not None) for i in range(arch.num_layers)]
    routed = arch.moe_layer_indices
    shares = {arch.partial_rotary_factor, arch.window_partial_rotary_factor}
    if len(shares) == 1:  # published files have one for both kinds
        written["partial_rotary_factor"] = written_share(shares.pop(), arch.head_dim)
    return {
        **written,
        "rope_theta": arch.rope_theta,
        "swa_rope_theta": arch.window_rope_theta,
        "swa_num_attention_heads": arch.num_heads,
        "swa_head_dim": arch.head_dim,
        "swa_v_head_dim": arch.v_head_dim,
        "layernorm_epsilon": arch.norm_eps,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "hybrid_layer_pattern": kinds,
        "moe_layer_freq": [int(i in routed) for i in range(arch.num_layers)],
        "mlp_layer_types": write_mlp_types(arch),
        "rope_parameters": write_ropes(arch),
        _IN_WINDOW: arch.window_num_kv_heads or arch.num_kv_heads,
        "routed_scaling_factor": arch.routed_scaling_factor,
        "attention_value_scale": arch.value_scale,
    }


# ---- weights and families ----------------------------------------------------------------------

_FIXED: Fields = {
    **SIGMOID_ROUTER,
    "out_bias": False,
    "rope_theta": 10000.0,  # these two are read by the kind of layer
    "partial_rotary_factor": 1.0,
}
_FIELDS: Mapping[str, str] = {
    **{ours: theirs for ours, theirs in DEEPSEEK_FIELDS.items() if "scaling" not in ours},
    "v_head_dim": "v_head_dim",
}
# The sizes are those of the published config.json.
_PRESET = _MiMo(
    **{
        **_FIXED,
        "family": "mimo_v2_flash",
        "vocab_size": 152_576,
        "hidden_size": 4096,
        "num_layers": 48,
        "num_heads": 64,
        "num_kv_heads": 4,
        "window_num_kv_heads": 8,
        "head_dim": 192,
        "v_head_dim": 128,
        "value_scale": 0.707,
        "intermediate_size": 16_384,
        "max_positions": 262_144,
        "norm_eps": 1e-5,
        "rope_theta": 5e6,
        "partial_rotary_factor": 64 / 192,
        "window_rope_theta": 1e4,
        "window_partial_rotary_factor": 64 / 192,
        "sliding_windows": (None, *((129,) * 4 + (None,)), *((129,) * 5 + (None,)) * 7),
        "moe_layers": (False,) + (True,) * 47,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 2048,
    }
)

register(
    Family(
        name="mimo_v2_flash",
        architecture=_MiMo,
        hf_class="MiMoV2FlashForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 152576,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "attention_bias": False,
            "attention_value_scale": 0.707,
            "sliding_window": 129,
            "layer_types": None,
            "mlp_layer_types": None,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        weight_map=(
            *DENSE,
            Rename(
                "layers.{layer}.attn.sinks", "model.layers.{layer}.self_attn.attention_sink_bias"
            ),
            *moe_block(bias="gate.e_score_correction_bias"),
        ),
        fields=_FIELDS,
        fixed=_FIXED,
        aliases={
            "num_local_experts": "n_routed_experts",
            "layernorm_epsilon": "rms_norm_eps",
            "rope_theta": _THETA,
            "partial_rotary_factor": _SHARE,
            "rope_parameters": ROPE_BY_KIND,
        },
        nullable={
            "layer_types": list,
            "mlp_layer_types": list,
            "routed_scaling_factor": float,
            "attention_value_scale": float,
        },
        lora_layout="fused",  # PEFT does not convert the names of this type's experts
        constants={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={"mimo-v2-flash": _PRESET},
    )
)
