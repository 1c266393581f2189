"""Kimi-Linear-48B-A3B (arXiv 2510.26692): Kimi Delta Attention, with latent attention between.

Latent attention is DeepSeek-V3's, but nothing rotates: positions are told by the layers that carry
states. The router and the experts are DeepSeek-V3's, with Mixtral's names of tensors. In published
files the dense layers' tensors lie under ``mlp``, and in those that transformers 5 writes under
``block_sparse_moe``, as the experts'. Layers are numbered from 1 in ``linear_attn_config``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moetrain.models.architecture import Architecture, AttentionPart, ConfigJson, Fields
from moetrain.models.decoders import COMMON_DEFAULTS, moe_block, renamed
from moetrain.models.families.deepseek import (
    LATENT_FIELDS,
    LATENT_MAP,
    LatentDecoder,
    check_keys,
)
from moetrain.models.family import Family, Piece, Rename, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts
from moetrain.models.parts.deepseek_router import SIGMOID_ROUTER
from moetrain.models.parts.kimi_delta import KimiDelta
from moetrain.models.parts.latent_attention import LatentAttention
from moetrain.models.parts.layer_types import FULL, read_mlp_types, write_mlp_types


class DeltaDecoder(LatentDecoder):
    """A latent decoder with Kimi Delta Attention in ``linear_layers``."""

    kinds = (LatentAttention, RoutedExperts, SwiGLU, KimiDelta)

    def attention(self, layer: int) -> AttentionPart:
        is_linear = self.linear_layers and self.linear_layers[layer]
        return KimiDelta.of(self, window=None) if is_linear else super().attention(layer)


class _KimiLinear(DeltaDecoder):
    low_rank_gates: ClassVar[bool] = True
    decay_bound: ClassVar[float | None] = None
    wide_filters: ClassVar[bool] = False


# ---- config.json -------------------------------------------------------------------------------

LINEAR = "linear_attention"
_CONFIG = "linear_attn_config"
_NUMBERED = {"kda_layers": LINEAR, "full_attn_layers": FULL}
_SIZES = {
    "num_heads": "linear_num_value_heads",
    "head_dim": "linear_key_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_PADDING = 163_839
"""The padding token of Kimi's vocabulary."""
_SHARED, _FIRST = "num_shared_experts", "first_k_dense_replace"
_KNOWN = {
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "moe_layer_freq": (1,),
    "use_grouped_topk": (True, None),
    "num_nextn_predict_layers": (0, None),
}


def _read_types(config: ConfigJson) -> list[str]:
    """Read the kind of each layer's attention.

    Raises ConfigError: ``linear_attn_config`` does not name each layer once.
    """
    count, own = config["num_hidden_layers"], config[_CONFIG] or {}
    types = config["layer_types"]
    if types is None and not _NUMBERED.keys() <= own.keys():
        # This is the default of transformers' class, and no published model's.
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    if types is None:
        numbers = {key: own[key] for key in _NUMBERED}
        named = [n for key in _NUMBERED for n in numbers[key]]
        if sorted(named, key=str) != sorted(range(1, count + 1), key=str):
            problem = f"{_CONFIG} has {numbers!r:.200}, which are not the layers 1 to {count}"
            raise error("config.json", f"{problem}; name each of them once")
        return [next(kind for key, kind in _NUMBERED.items() if i in numbers[key])
                for i in range(1, count + 1)]  # fmt: skip
    check_types(types)
    return types


def check_types(types: Sequence[object]) -> None:
    """Raise ConfigError if ``types`` has the name of another kind of layer."""
    if unknown := sorted({str(kind) for kind in types} - {LINEAR, FULL}):
        raise error("config.json", f"layer_types {', '.join(unknown)} are not supported")


def write_kinds(arch: Architecture) -> list[str]:
    """Return the key ``layer_types``."""
    linear = arch.linear_layers or (False,) * arch.num_layers
    return [LINEAR if is_linear else FULL for is_linear in linear]


def _read_layers(config: ConfigJson) -> Fields:
    """Read the kinds of layers, the sizes of linear attention, and the width of shared experts."""
    check_keys(config, _KNOWN)
    own = config[_CONFIG] or {}
    first = config[_FIRST]
    routed = [i >= first for i in range(config["num_hidden_layers"])]
    return {
        "linear_layers": tuple(kind == LINEAR for kind in _read_types(config)),
        "moe_layers": read_mlp_types(config, routed),
        "shared_intermediate_size": config[_SHARED] * config["moe_intermediate_size"],
        **{ours: own[key] for key, ours in _SIZES.items() if key in own},
    }


def _write_layers(arch: Architecture) -> Fields:
    """Write the published keys, and those that transformers writes.

    transformers takes a file without a padding token for one with Kimi's, which smaller
    vocabularies do not have.
    """
    linear = arch.linear_layers or (False,) * arch.num_layers
    numbers = {
        "kda_layers": [i for i, is_linear in enumerate(linear, 1) if is_linear],
        "full_attn_layers": [i for i, is_linear in enumerate(linear, 1) if not is_linear],
    }
    return {
        _CONFIG: {**numbers, **{key: getattr(arch, ours) for key, ours in _SIZES.items()}},
        "layer_types": write_kinds(arch),
        _FIRST: min(arch.moe_layer_indices, default=arch.num_layers),
        "mlp_layer_types": write_mlp_types(arch),
        _SHARED: arch.shared_intermediate_size // max(1, arch.moe_intermediate_size),
        "mla_use_nope": True,
        **({"pad_token_id": None} if arch.vocab_size <= _PADDING else {}),
    }


# ---- weights -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OfFourDims(Rename):
    """Maps a vector [H] to a file tensor [1, 1, H, 1]."""

    def pieces(
        self, parameter: str, shape: Sequence[int], arch: Architecture | None
    ) -> list[Piece]:
        found = super().pieces(parameter, shape, arch)
        return [one._replace(within=(0, 0, slice(0, shape[0]), 0)) for one in found]


_OURS, _THEIRS = "layers.{layer}.linear_attn", "model.layers.{layer}.self_attn"


def delta_map(names: Fields) -> WeightMap:
    """Map the tensors of linear attention; ``names`` are the file's, by ours."""
    return tuple(Rename(f"{_OURS}.{x}", f"{_THEIRS}.{y}") for x, y in names.items())


DELTA_NAMES: Fields = {
    **{f"w{x}": f"{x}_proj" for x in "qkvbo"},
    **{f"conv_{x}": f"{x}_conv1d.weight" for x in "qkv"},
    "norm": "o_norm",
    "dt_bias": "dt_bias",
}
"""The usual names of the tensors of linear attention, by ours."""
_GATES = {"wf_a": "f_a_proj", "wf_b": "f_b_proj", "wg_a": "g_a_proj", "wg_b": "g_b_proj"}
_EXPERTS = moe_block(
    "block_sparse_moe",
    "w1",
    "w3",
    "w2",
    bias="gate.e_score_correction_bias",
)
_SHARED_EXPERTS: WeightMap = tuple(
    Rename(
        f"layers.{{layer}}.moe.shared_experts.w_{x}",
        f"model.layers.{{layer}}.block_sparse_moe.shared_experts.{x}_proj",
    )
    for x in ("gate", "up", "down")
)
_REST: WeightMap = (
    *delta_map({**DELTA_NAMES, **_GATES}),
    _OfFourDims(f"{_OURS}.a_log", f"{_THEIRS}.A_log"),
    *_EXPERTS,
    *_SHARED_EXPERTS,
)
_MAP: WeightMap = (*LATENT_MAP, *_REST)
_MAP_OF_TRANSFORMERS = (
    *renamed(LATENT_MAP, lambda name: name.replace(".mlp.", ".block_sparse_moe.")),
    *_REST,
)
_MODULES = renamed(
    _MAP,
    lambda name: name.replace("block_sparse_moe", "mlp").replace(
        "self_attn.f_", "self_attn.forget_gate.f_"
    ),
)

# ---- family ------------------------------------------------------------------------------------

DELTA_FIELDS: Mapping[str, str] = {
    **LATENT_FIELDS,
    "max_positions": "model_max_length",
    "num_experts_per_token": "num_experts_per_token",
    "norm_topk_prob": "moe_renormalize",
    "num_expert_groups": "num_expert_group",
    "topk_expert_groups": "topk_group",
    "routed_scaling_factor": "routed_scaling_factor",
}
"""The keys of config.json by field, without those of linear attention."""
DELTA_ALIASES: Mapping[str, str] = {
    "max_position_embeddings": "model_max_length",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": _SHARED,
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}
_FIXED: Fields = {**SIGMOID_ROUTER, "head_dim": 0, "partial_rotary_factor": 0.0}
register(
    Family(
        name="kimi_linear",
        architecture=_KimiLinear,
        hf_class="KimiLinearForCausalLM",
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 163840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 27,
            "num_key_value_heads": 32,
            "model_max_length": 1048576,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 1024,
            "num_experts": 256,
            "num_experts_per_token": 8,
            _SHARED: 1,
            "moe_renormalize": True,
            "routed_scaling_factor": 2.446,
            "num_expert_group": 1,
            "topk_group": 1,
            _FIRST: 1,
            "mlp_layer_types": None,
            "layer_types": None,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
            _CONFIG: None,
        },
        weight_map=_MAP,
        other_maps=(_MAP_OF_TRANSFORMERS,),
        modules=_MODULES,
        lora_layout="fused",  # PEFT does not convert the names of this type's experts
        fields={
            **DELTA_FIELDS,
            "linear_num_value_heads": "linear_num_heads",
            "linear_key_head_dim": "linear_head_dim",
            "linear_conv_kernel_dim": "linear_conv_kernel_dim",
        },
        fixed=_FIXED,
        aliases=DELTA_ALIASES,
        nullable={
            "q_lora_rank": int,
            "mlp_layer_types": list,
            "layer_types": list,
            _CONFIG: dict,
        },
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={
            "kimi-linear-48b-a3b": _KimiLinear(
                family="kimi_linear",
                vocab_size=163_840,
                hidden_size=2304,
                num_layers=27,
                num_heads=32,
                num_kv_heads=32,
                intermediate_size=9216,
                max_positions=1_048_576,
                norm_eps=1e-5,
                q_lora_rank=None,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                linear_layers=tuple(i not in {3, 7, 11, 15, 19, 23, 26} for i in range(27)),
                linear_num_value_heads=32,
                linear_key_head_dim=128,
                linear_conv_kernel_dim=4,
                num_experts=256,
                num_experts_per_token=8,
                moe_intermediate_size=1024,
                shared_intermediate_size=1024,
                moe_layers=(False,) + (True,) * 26,
                routed_scaling_factor=2.446,
                **_FIXED,
            )
        },
    )
)
