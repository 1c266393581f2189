"""Ling-3.0-Flash (``bailing_hybrid``): Kimi Delta Attention, with gated latent attention between.

It differs from Kimi-Linear in whole matrices of the decay and of the output gate, a bounded decay,
filters in fp32, and latent attention that rotates and whose heads have gates. The router and the
experts are DeepSeek-V3's, with groups. Files hold an MTP block behind the model's own layers, which
an export copies unchanged.

Ling-2.5 and Ring-2.5 have the same ``model_type`` and another linear attention. They are not
supported: their files lack the tensors of this one.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from moetrain.models.architecture import Architecture, ConfigJson, Fields
from moetrain.models.decoders import COMMON_DEFAULTS, moe_block, renamed
from moetrain.models.families.deepseek import LATENT_MAP
from moetrain.models.families.kimi_linear import (
    DELTA_ALIASES,
    DELTA_FIELDS,
    DELTA_NAMES,
    LINEAR,
    DeltaDecoder,
    check_types,
    delta_map,
    write_kinds,
)
from moetrain.models.family import Family, Rename, WeightMap, register
from moetrain.models.hf.files import error
from moetrain.models.layers import SwiGLU
from moetrain.models.moe import RoutedExperts
from moetrain.models.parts.deepseek_router import SIGMOID_ROUTER
from moetrain.models.parts.gated_latent import GatedLatentAttention
from moetrain.models.parts.kimi_delta import KimiDelta
from moetrain.models.parts.layer_types import FULL, read_mlp_types, write_mlp_types


class _Ling(DeltaDecoder):
    kinds = (GatedLatentAttention, RoutedExperts, SwiGLU, KimiDelta)

    low_rank_gates: ClassVar[bool] = False
    wide_filters: ClassVar[bool] = True
    decay_bound: float | None = Field(default=-5.0, lt=0, allow_inf_nan=False)


# ---- config.json -------------------------------------------------------------------------------

_PADDING = 156_892
"""The padding token of Ling's vocabulary."""
_SHARED, _FIRST, _GROUP = "num_shared_experts", "first_k_dense_replace", "layer_group_size"
_SAFE, _BOUND = "kda_safe_gate", "kda_lower_bound"


def _positive(config: ConfigJson, key: str, default: Any) -> int:
    """Return a number of the keys that transformers adds; ConfigError: it is no positive one."""
    value = config.get(key, default)
    if type(value) is not int or value < 1:
        raise error("config.json", f"{key} is {value!r:.80}, expected 1 or more")
    return value


def _read_layers(config: ConfigJson) -> Fields:
    """Read the kinds of layers, the sizes of linear attention, and the width of shared experts.

    Published files have the width of its heads in ``head_dim``. transformers writes another number
    there, and this one in ``linear_head_dim``.
    """
    layers, types = range(config["num_hidden_layers"]), config["layer_types"]
    if types is None:
        group = _positive(config, _GROUP, 0)
        types = [LINEAR if (i + 1) % group else FULL for i in layers]
    check_types(types)
    if not config[_BOUND] < 0:
        problem = f"{_BOUND} is {config[_BOUND]!r:.80}, expected a number below 0"
        raise error("config.json", f"{problem}, or {_SAFE} false for no bound")
    routed = [i >= config[_FIRST] for i in layers]
    return {
        "linear_layers": tuple(kind == LINEAR for kind in types),
        "linear_num_value_heads": _positive(
            config, "linear_num_heads", config["num_attention_heads"]
        ),
        "linear_key_head_dim": _positive(config, "linear_head_dim", config["head_dim"]),
        "decay_bound": float(config[_BOUND]) if config[_SAFE] else None,
        "moe_layers": read_mlp_types(config, routed),
        "shared_intermediate_size": config[_SHARED] * config["moe_intermediate_size"],
    }


def _write_layers(arch: Architecture) -> Fields:
    """Invert :func:`_read_layers`.

    transformers takes a file without a padding token for one with Ling's, which smaller
    vocabularies do not have.
    """
    assert isinstance(arch, _Ling)
    groups = _group_sizes(arch.linear_layers)
    heads = {"linear_num_heads": arch.linear_num_value_heads}
    return {
        "layer_types": write_kinds(arch),
        "head_dim": arch.linear_key_head_dim,
        **(heads if arch.linear_num_value_heads != arch.num_heads else {}),
        _SAFE: arch.decay_bound is not None,
        _BOUND: -5.0 if arch.decay_bound is None else arch.decay_bound,
        _FIRST: min(arch.moe_layer_indices, default=arch.num_layers),
        "mlp_layer_types": write_mlp_types(arch),
        _SHARED: arch.shared_intermediate_size // max(1, arch.moe_intermediate_size),
        **({"pad_token_id": None} if arch.vocab_size <= _PADDING else {}),
        # vLLM and SGLang read the next keys only, and transformers others for the same numbers.
        **({_GROUP: groups[0]} if groups else {}),
        "max_position_embeddings": arch.max_positions,
        "num_experts_per_tok": arch.num_experts_per_token,
        "n_group": arch.num_expert_groups,
        "moe_shared_expert_intermediate_size": arch.moe_intermediate_size,
    }


def _group_sizes(are_linear: Sequence[bool]) -> list[int]:
    """Return the values of ``layer_group_size`` by which servers find these kinds of layers.

    They take the last layer of each group for latent attention, and all layers behind the last
    whole group. Empty: no value says these kinds, and servers refuse the file without the key.
    """
    count = len(are_linear)
    return [
        size
        for size in range(1, count + 1)
        if all(
            are_linear[i] == ((i + 1) % size != 0 and i < count // size * size)
            for i in range(count)
        )
    ]


# ---- weights -----------------------------------------------------------------------------------

_NAMES = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.": "attention.",
    "gate.e_score_correction_bias": "gate.expert_bias",
}


def _published(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _of_transformers(name: str) -> str:
    """Return the name that transformers writes. It has one for the outputs of both attentions."""
    return _published(name).replace("attention.o_proj", "attention.dense")


def _in_memory(name: str) -> str:
    for leaf in ("f_proj", "A_log", "dt_bias"):
        name = name.replace(f"self_attn.{leaf}", f"self_attn.forget_gate.{leaf}")
    return name


_LATENT: WeightMap = (
    *LATENT_MAP,
    Rename("layers.{layer}.attn.wg", "model.layers.{layer}.self_attn.g_proj"),
)
_REST: WeightMap = (
    *delta_map({**DELTA_NAMES, "a_log": "A_log", "wf": "f_proj", "wg": "g_proj"}),
    *moe_block(bias="gate.e_score_correction_bias", shared="shared_experts"),
)
_MODEL = _LATENT + _REST

# ---- family ------------------------------------------------------------------------------------

_FIXED: Fields = {**SIGMOID_ROUTER, "head_dim": 0}
register(
    Family(
        name="bailing_hybrid",
        architecture=_Ling,
        hf_class="BailingMoeV3ForCausalLM",  # of published files; servers know no other
        defaults={
            **COMMON_DEFAULTS,
            "vocab_size": 157184,
            "hidden_size": 2560,
            "intermediate_size": 6144,
            "num_hidden_layers": 42,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "model_max_length": 262144,
            "rope_theta": 6000000.0,
            "attention_bias": False,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 512,
            "num_experts_per_token": 8,
            _SHARED: 1,
            "moe_renormalize": True,
            "routed_scaling_factor": 2.5,
            "num_expert_group": 8,
            "topk_group": 4,
            _FIRST: 2,
            "mlp_layer_types": None,
            "layer_types": None,
            _GROUP: 6,
            "short_conv_kernel_size": 4,
            _SAFE: True,
            _BOUND: -5.0,
        },
        weight_map=renamed(_LATENT, _of_transformers) + renamed(_REST, _published),
        other_maps=(renamed(_MODEL, _of_transformers),),
        modules=renamed(_MODEL, _in_memory),
        lora_layout="fused",  # PEFT does not convert the names of this type's experts
        fields={
            **DELTA_FIELDS,
            "linear_conv_kernel_dim": "short_conv_kernel_size",
        },
        fixed=_FIXED,
        aliases=DELTA_ALIASES,
        nullable={"q_lora_rank": int, "mlp_layer_types": list, "layer_types": list},
        constants={
            "use_bias": False,
            "no_kda_lora": True,
            "gated_attention_proj_granularity_type": "head_wise",
        },
        read_layers=_read_layers,
        write_layers=_write_layers,
        presets={
            "ling-3.0-flash": _Ling(
                family="bailing_hybrid",
                vocab_size=157_184,
                hidden_size=2560,
                num_layers=42,
                num_heads=32,
                num_kv_heads=32,
                intermediate_size=6144,
                max_positions=262_144,
                rope_theta=6e6,
                q_lora_rank=None,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                linear_layers=((True,) * 5 + (False,)) * 7,
                linear_num_value_heads=32,
                linear_key_head_dim=128,
                linear_conv_kernel_dim=4,
                num_experts=512,
                num_experts_per_token=8,
                num_expert_groups=8,
                topk_expert_groups=4,
                moe_intermediate_size=768,
                shared_intermediate_size=768,
                moe_layers=(False,) * 2 + (True,) * 40,
                routed_scaling_factor=2.5,
                **_FIXED,
            )
        },
    )
)
